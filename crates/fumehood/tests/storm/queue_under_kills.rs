//! The queue under random disturbances: the trial kills workers and runners at random instants, restarts the server, cancels
//! analyses and runs `gc`, and one worker's clock is an hour wrong. In the end every accepted analysis is in exactly one
//! final state, none ran twice at once, and nothing is left over.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use store::State;
use testkit::postgres::PrivatePostgres;
use testkit::process::names_in;
use testkit::trial;
use testkit::wait::eventually;

use crate::cluster::{RunningWorker, TestCluster, WAIT_MAX, runners};
use crate::database_rows::{Row, Rows, bytes, number, text};
use crate::deployment::{Database, Machine};
use crate::execution_monitor::{ExecutionEvent, ObservedEvent, count};
use crate::outages::{own_server, stop_at_once};
use crate::random_kills::RandomNumbers;
use crate::{report, settings};

/// What the program of an analysis does, and which settings its submission has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Writes,
    Reads,
    Fails,
    FailsAgain,
    Forks,
    Chats,
    TakesASecond,
}

const KINDS: [Kind; 7] = [
    Kind::Writes,
    Kind::Reads,
    Kind::Fails,
    Kind::FailsAgain,
    Kind::Forks,
    Kind::Chats,
    Kind::TakesASecond,
];

impl Kind {
    fn script(self) -> &'static str {
        match self {
            Kind::Writes => {
                "printf 'alpha %s\\n' \"$0\" > a.txt; mkdir deep; yes \"big $0\" | head -c 300000 > deep/big.bin"
            }
            Kind::Reads => "printf 'alpha %s\\n' \"$0\" > a.txt; cat told.txt > heard.txt",
            Kind::Fails | Kind::FailsAgain => "printf 'alpha %s\\n' \"$0\" > a.txt; exit 3",
            // The `sleep` outlives the shell, and no process of the program waits for it.
            Kind::Forks => {
                "setsid sleep 1000 & for n in 1 2 3; do (sleep 0.2; echo $n > $n.txt) & done; sleep 0.4
                 printf 'alpha %s\\n' \"$0\" > a.txt"
            }
            Kind::Chats => {
                "yes \"out $0\" | head -c 300000; yes err | head -c 1000 >&2; printf 'alpha %s\\n' \"$0\" > a.txt"
            }
            Kind::TakesASecond => "sleep 1; printf 'alpha %s\\n' \"$0\" > a.txt",
        }
    }

    /// How the program itself ends.
    fn end(self) -> State {
        match self {
            Kind::Fails | Kind::FailsAgain => State::Failed,
            _ => State::Succeeded,
        }
    }
}

/// Enough that most analyses complete, and few enough that some lose their runner in every attempt.
const RETRIES: usize = 3;

/// One analysis of the storm.
struct Task {
    id: String,
    kind: Kind,
    line: String,
}

#[derive(Default, Debug)]
struct DisturbanceCounts {
    workers: usize,
    runners: usize,
    restarts: usize,
    cancels: usize,
    cleanings: usize,
}

/// The cluster, its workers, and the disturbances made so far.
struct QueueStorm<'a> {
    cluster: &'a TestCluster,
    server: Option<&'static PrivatePostgres>,
    random: RandomNumbers,
    workers: Vec<(usize, &'static str, RunningWorker)>,
    clock: Vec<(&'static str, String)>,
    disturbances: DisturbanceCounts,
    cancelled: BTreeSet<String>,
    /// Processes that ran with libfaketime. When such a process is killed, libfaketime leaves files of the process behind.
    wrong: Vec<u32>,
}

trial!(Everyone, everything_is_killed_on_sqlite);
fn everything_is_killed_on_sqlite() {
    storm(&TestCluster::sqlite("queue"), 11);
}

trial!(Everyone, everything_is_killed_on_postgres);
fn everything_is_killed_on_postgres() {
    storm(&TestCluster::on(own_server(), "queue"), 12);
}

fn storm(cluster: &TestCluster, salt: u64) {
    let server = match cluster.deployment.database {
        Database::Postgres { server, .. } => Some(server),
        Database::Sqlite(_) => None,
    };
    let mut storm = QueueStorm {
        cluster,
        server,
        random: RandomNumbers::new(salt),
        workers: Vec::new(),
        clock: Vec::new(),
        disturbances: DisturbanceCounts::default(),
        cancelled: BTreeSet::new(),
        wrong: Vec::new(),
    };
    let hour = ["+3600", "-3600"][storm.random.below(2) as usize];
    storm.clock = vec![
        ("LD_PRELOAD", libfaketime().to_str().unwrap().to_owned()),
        ("FAKETIME", hour.to_owned()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
    ];
    let tasks = storm.tasks(settings().queued);
    storm.disturb_until_done(&tasks);
    storm.drain_workers();
    let ids: Vec<String> = tasks.iter().map(|task| task.id.clone()).collect();
    storm.report(&tasks);
    cluster.check(&ids);
    let (rows, seen) = (cluster.deployment.rows(), cluster.monitor.seen());
    for task in &tasks {
        storm.check(task, &rows, &seen);
    }
    // Without disturbances the trial would prove nothing. With few analyses this can happen by chance.
    let DisturbanceCounts {
        workers,
        runners,
        restarts,
        ..
    } = storm.disturbances;
    let went_on = workers.min(runners) > 0 && (server.is_none() || restarts > 0);
    assert!(went_on || tasks.len() < 30, "{:?}", storm.disturbances);
}

/// The path of libfaketime, which is in the Debian package faketime.
fn libfaketime() -> PathBuf {
    let found = names_in("/usr/lib".as_ref()).into_iter().map(|name| {
        PathBuf::from("/usr/lib")
            .join(name)
            .join("faketime/libfaketimeMT.so.1")
    });
    let mut found = found.filter(|path| path.exists());
    found.next().expect("faketime must be installed")
}

impl QueueStorm<'_> {
    fn tasks(&mut self, how_many: usize) -> Vec<Task> {
        let told = self
            .cluster
            .deployment
            .test_home
            .write("project/told.txt", "told\n");
        let told = told.to_str().unwrap();
        let task = |number: usize| {
            let kind = KINDS[self.random.below(KINDS.len() as u64) as usize];
            let id = self.cluster.id(&number.to_string());
            let mut settings = json!({
                "retries": RETRIES,
                "priority": self.random.below(3),
                "key": id,
                "limits": { "memory": "96M", "inline_max": "4K" },
                // A plain user has no cgroup of its own. Admission counts the same values anyway.
                "allow_degraded": ["memory"],
            });
            match kind {
                Kind::Reads => settings["inputs"] = json!([told]),
                Kind::FailsAgain => {
                    settings["retry_on"] = json!(["failed"]);
                    settings["retries"] = 1.into();
                }
                _ => {}
            }
            let line = self.cluster.line(&id, settings, kind.script());
            Task { id, kind, line }
        };
        (0..how_many).map(task).collect()
    }

    /// Starts a worker. The trial has two workers: both on one machine, or one on each of two machines. The clock of
    /// the worker named `wrong` is wrong.
    fn start(&mut self, at: usize, name: &'static str) {
        let machine = &self.cluster.machines[at];
        let clock: Vec<(&str, &str)> = self.clock.iter().map(|(k, v)| (*k, v.as_str())).collect();
        let environment = if name == "wrong" { &clock[..] } else { &[] };
        let options = ["--slots", "3", "--memory", "512M"];
        let worker = RunningWorker::start(self.cluster, machine, name, &options, environment);
        if name == "wrong" {
            self.wrong.push(worker.pid());
        }
        self.workers.push((at, name, worker));
    }

    fn disturb_until_done(&mut self, tasks: &[Task]) {
        let last = self.cluster.machines.len() - 1;
        let (first, rest) = tasks.split_at(tasks.len() / 2);
        self.submit(first);
        self.start(0, "right");
        self.start(last, "wrong");
        let mut rest = rest.chunks(5);
        let give_up = Instant::now() + WAIT_MAX + Duration::from_secs(2) * tasks.len() as u32;
        loop {
            assert!(Instant::now() < give_up, "{}", self.cluster.everything());
            // This sleep waits for no event. It varies the moment of the interruption.
            std::thread::sleep(self.random.moment(Duration::from_millis(200)));
            let more = rest.next();
            if let Some(more) = more {
                self.submit(more);
            }
            let went_on = self.disturb(tasks);
            if more.is_none() && !went_on && self.unfinished() == Some(0) {
                return;
            }
        }
    }

    fn unfinished(&self) -> Option<u64> {
        let all = self.cluster.overview()?;
        Some(all.queued + all.running)
    }

    /// Returns false if it did nothing because enough disturbances of the chosen kind were made.
    fn disturb(&mut self, tasks: &[Task]) -> bool {
        let how_many = tasks.len();
        match self.random.below(12) {
            0 | 1 if self.disturbances.workers < how_many / 4 => self.kill_worker(),
            2..=6 if self.disturbances.runners < how_many / 2 => self.kill_runner(),
            7 if self.disturbances.restarts < 3 + how_many / 50 => self.restart(),
            8 | 9 if self.disturbances.cancels < how_many / 10 => self.cancel(tasks),
            10 if self.disturbances.cleanings < how_many / 8 => self.clean(),
            _ => return false,
        }
        true
    }

    fn kill_worker(&mut self) {
        let which = self.random.below(self.workers.len() as u64) as usize;
        let (at, name, worker) = self.workers.swap_remove(which);
        worker.kill();
        self.disturbances.workers += 1;
        self.start(at, name);
    }

    fn kill_runner(&mut self) {
        let all: Vec<_> = self.cluster.machines.iter().flat_map(runners).collect();
        if !all.is_empty() {
            let which = self.random.below(all.len() as u64) as usize;
            self.disturbances.runners += usize::from(all[which].signal(Signal::KILL));
        }
    }

    fn restart(&mut self) {
        let Some(server) = self.server else {
            return;
        };
        match self.random.below(3) {
            0 => server.kill(),
            1 => stop_at_once(server),
            _ => stop_fast(server),
        }
        // This sleep waits for no event. It varies the moment of the interruption.
        std::thread::sleep(self.random.moment(Duration::from_secs(3)));
        server.start_again();
        self.disturbances.restarts += 1;
    }

    fn cancel(&mut self, tasks: &[Task]) {
        let task = &tasks[self.random.below(tasks.len() as u64) as usize];
        let at = self.random.below(self.cluster.machines.len() as u64) as usize;
        let asked = self
            .cluster
            .ask(&self.cluster.machines[at], &["cancel", &task.id]);
        // `cancel` fails if the task is not submitted yet or has ended, or if the server is starting.
        if asked.code() == 0 {
            self.cancelled.insert(task.id.clone());
            self.disturbances.cancels += 1;
        }
    }

    fn clean(&mut self) {
        let at = self.random.below(self.cluster.machines.len() as u64) as usize;
        self.cluster.ask(&self.cluster.machines[at], &["gc"]).good();
        self.disturbances.cleanings += 1;
    }

    /// Submits until the tasks are known to be accepted. Their idempotency keys prevent that one is queued twice.
    fn submit(&self, tasks: &[Task]) {
        let lines: Vec<&str> = tasks.iter().map(|task| task.line.as_str()).collect();
        let batch = self
            .cluster
            .deployment
            .test_home
            .write("batch.jsonl", lines.join("\n"));
        let machine: &Machine = &self.cluster.machines[0];
        let args = ["submit", "--from", batch.to_str().unwrap()];
        let ids: Vec<&str> = tasks.iter().map(|task| task.id.as_str()).collect();
        let submitted = self.cluster.ask(machine, &args);
        assert_eq!(submitted.good().lines().collect::<Vec<_>>(), ids);
        // If an answer was lost, a repeated submission gets the same answer.
        if self.submits_again(tasks) {
            assert_eq!(
                self.cluster
                    .ask(machine, &args)
                    .good()
                    .lines()
                    .collect::<Vec<_>>(),
                ids
            );
        }
    }

    fn submits_again(&self, tasks: &[Task]) -> bool {
        tasks.first().is_some_and(|task| task.line.len() % 2 == 0)
    }

    /// Drains the live workers. All tasks have ended by then, so no request is left in the queue.
    fn drain_workers(&mut self) {
        self.check_clock();
        for (_, _, worker) in std::mem::take(&mut self.workers) {
            worker.drain(self.cluster);
        }
        for pid in &self.wrong {
            for name in [
                format!("sem.faketime_sem_{pid}"),
                format!("faketime_shm_{pid}"),
            ] {
                // The file is missing if the process was not killed.
                let _ = std::fs::remove_file(PathBuf::from("/dev/shm").join(name));
            }
        }
    }

    /// Asserts that the worker with libfaketime reported a time that is an hour wrong.
    fn check_clock(&self) {
        let mut said = None;
        self.cluster.until("the wrong worker is seen", || {
            let workers = self.cluster.overview().map(|all| all.workers);
            let wrong = workers
                .unwrap_or_default()
                .into_iter()
                .find(|worker| worker.name == "wrong");
            said = wrong.map(|worker| worker.started_ms / 1000);
            said.is_some()
        });
        let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() as i64;
        let off = said.unwrap() - now;
        assert!(
            off.abs() > 1800,
            "the clock is {off} s wrong, and should be an hour"
        );
    }

    fn report(&self, tasks: &[Task]) {
        let rows = self.cluster.deployment.rows();
        let mut ends: BTreeMap<String, usize> = BTreeMap::new();
        for row in rows.all("attempts") {
            let cells = ["state", "reason", "message"].map(|cell| text(row, cell).unwrap_or("-"));
            let end = match cells {
                ["error", reason, message] => format!("error {reason} ({message:.60})"),
                [state, ..] => state.to_owned(),
            };
            *ends.entry(end).or_default() += 1;
        }
        let seen = self.cluster.monitor.seen();
        let began = seen
            .iter()
            .filter(|seen| seen.what == ExecutionEvent::Began)
            .count();
        let attempts = rows.all("attempts").len();
        report(&format!(
            "{}: {} analyses, {attempts} attempts, {} retries, {began} programs started; {:?}; {ends:?}; clock {}",
            self.cluster.deployment.stem,
            tasks.len(),
            attempts - tasks.len(),
            self.disturbances,
            self.clock[1].1,
        ));
    }

    /// Asserts that a task ended as its kind and its disturbances require.
    fn check(&self, task: &Task, rows: &Rows, seen: &[ObservedEvent]) {
        let id = &task.id;
        let mut attempts = rows.of("attempts", id);
        attempts.sort_by_key(|row| number(row, "attempt"));
        let state = |row: &Row| State::parse(text(row, "state").unwrap()).unwrap();
        let states: Vec<State> = attempts.iter().map(|row| state(row)).collect();
        let (last, before) = states.split_last().unwrap();
        let retries = if task.kind == Kind::FailsAgain {
            1
        } else {
            RETRIES
        };
        let is_retried = |state: &State| {
            *state == State::Error || task.kind == Kind::FailsAgain && *state == State::Failed
        };
        assert!(before.iter().all(is_retried), "{id}: {attempts:?}");
        assert!(before.len() <= retries, "{id}: {attempts:?}");
        let cancelled = self.cancelled.contains(id);
        match last {
            State::Cancelled => assert!(cancelled, "{id}: {attempts:?}"),
            // Every retry was used, unless the task was cancelled.
            last if is_retried(last) => {
                assert!(cancelled || before.len() == retries, "{id}: {attempts:?}");
            }
            last => assert_eq!(*last, task.kind.end(), "{id}: {attempts:?}"),
        }
        // An attempt that ended by itself had one program, and its output is recorded.
        let ended = attempts.iter().filter(|row| state(row) == task.kind.end());
        assert!(
            ended.clone().count() <= count(seen, id, ExecutionEvent::Began),
            "{id}: {attempts:?}"
        );
        for row in ended {
            let mut outputs = rows.of("outputs", id);
            outputs.retain(|output| output["attempt"] == row["attempt"]);
            let named = outputs
                .iter()
                .find(|o| bytes(o, "path").as_deref() == Some(b"a.txt"));
            let content = named.and_then(|output| bytes(output, "content"));
            assert_eq!(
                content,
                Some(format!("alpha {id}\n").into_bytes()),
                "{id}: {outputs:?}"
            );
            if task.kind == Kind::Reads {
                let heard = outputs
                    .iter()
                    .find(|o| bytes(o, "path").as_deref() == Some(b"heard.txt"));
                let heard = heard.and_then(|output| bytes(output, "content"));
                assert_eq!(heard.as_deref(), Some(&b"told\n"[..]), "{id}");
            }
        }
    }
}

/// Stops the server like `pg_ctl stop -m fast`: it ends every session and writes the committed data.
fn stop_fast(server: &PrivatePostgres) {
    let pid_file = server.dir().join("data/postmaster.pid");
    let text = std::fs::read_to_string(&pid_file).unwrap();
    let pid = text.lines().next().unwrap().parse().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, Signal::INT).unwrap();
    eventually("the server has stopped", || !pid_file.exists());
}
