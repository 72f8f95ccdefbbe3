//! A queue with several machines: homes that share a database, their workers and runners, and a monitor of what they execute.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal};
use serde_json::Value;
use store::{AnalysisEvent, AttemptSummary, QueueOverview, State, Store, StoreError};
use testkit::command::{FinishedCommand, finish};
use testkit::is_root;
use testkit::postgres::PrivatePostgres;
use testkit::process::{all_pids, cgroups_of, names_in};
use testkit::wait::poll_until;

use crate::database_rows::{Row, number, text, truth};
use crate::deployment::{Machine, TestDeployment};
use crate::execution_monitor::{ExecutionEvent, ExecutionMonitor, ObservedEvent, count};
use crate::expected_state::StoredState;

/// `$0` is the id, `$1` the directory of the gate files. Opens the gate file of the id, and prints that it is up.
pub const UP: &str = r#"exec 9< "$1/$0"; echo up
"#;
/// Waits until the trial lets the program go on.
pub const WAIT: &str = r#"while [ ! -s "$1/go-$0" ]; do sleep 0.05; done
"#;

/// The bound of every wait. Backoffs, leases and a busy machine together stay far below it.
pub const WAIT_MAX: Duration = Duration::from_secs(240);

pub struct TestCluster {
    pub deployment: TestDeployment,
    pub machines: Vec<Machine>,
    pub monitor: ExecutionMonitor,
    gates: PathBuf,
    store: Mutex<Option<Store>>,
}

impl TestCluster {
    /// One machine.
    pub fn sqlite(stem: &str) -> TestCluster {
        TestCluster::new(TestDeployment::sqlite(stem), 1)
    }

    /// Two homes with workspace roots of their own, which stand for two machines, on the server that all trials share.
    pub fn postgres(stem: &str) -> TestCluster {
        TestCluster::new(TestDeployment::postgres(stem), 2)
    }

    pub fn on(server: &'static PrivatePostgres, stem: &str) -> TestCluster {
        TestCluster::new(TestDeployment::on(server, stem), 2)
    }

    fn new(deployment: TestDeployment, machine_count: usize) -> TestCluster {
        // Other trials test the post-process command.
        std::fs::remove_file(
            deployment
                .test_home
                .path("person/.config/fumehood/config.toml"),
        )
        .unwrap();
        let mut machines = vec![deployment.machine.clone()];
        machines.extend((1..machine_count).map(|number| deployment.another_machine(number)));
        let gates = deployment.test_home.path("gates");
        std::fs::create_dir(&gates).unwrap();
        let roots: Vec<PathBuf> = machines
            .iter()
            .map(|machine| machine.root.clone())
            .collect();
        TestCluster {
            monitor: ExecutionMonitor::of(&gates, &roots),
            deployment,
            machines,
            gates,
            store: Mutex::new(None),
        }
    }

    pub fn id(&self, name: &str) -> String {
        self.deployment.id(name)
    }

    pub fn ask(&self, machine: &Machine, args: &[&str]) -> FinishedCommand {
        finish(self.deployment.fumehood(machine, args))
    }

    /// The arguments of `submit` after the options, for a script with this id.
    pub fn words(&self, id: &str, script: &str) -> Vec<String> {
        self.monitor.expect(id);
        let script = format!("{UP}{script}");
        let gates = self.gates.to_str().unwrap();
        let words = ["--id", id, "--", "sh", "-c", &script, id, gates];
        let shown = [self.monitor.gate(id), self.monitor.go_file(id)];
        let shown = shown
            .iter()
            .flat_map(|path| ["--read", path.to_str().unwrap()]);
        shown.chain(words).map(str::to_owned).collect()
    }

    /// Queues a shell script that opens its gate file first.
    #[track_caller]
    pub fn submit(&self, name: &str, options: &[&str], script: &str) -> String {
        let id = self.id(name);
        let words = self.words(&id, script);
        let words = words.iter().map(String::as_str);
        let all: Vec<&str> = ["submit"]
            .into_iter()
            .chain(options.iter().copied())
            .chain(words)
            .collect();
        let printed = self.ask(&self.machines[0], &all).good();
        assert_eq!(printed.trim_end(), id);
        id
    }

    /// The same submission as [`TestCluster::submit`] makes, as a line of a batch.
    pub fn line(&self, id: &str, mut settings: Value, script: &str) -> String {
        self.monitor.expect(id);
        let script = format!("{UP}{script}");
        let given = settings.as_object_mut().unwrap();
        given.insert("id".into(), id.into());
        let gates = self.gates.to_str().unwrap();
        given.insert(
            "command".into(),
            vec!["sh", "-c", &script, id, gates].into(),
        );
        let shown = [self.monitor.gate(id), self.monitor.go_file(id)];
        let shown: Vec<&str> = shown.iter().map(|path| path.to_str().unwrap()).collect();
        given.insert("read".into(), shown.into());
        settings.to_string()
    }

    pub fn worker(&self, machine: &Machine, name: &str, options: &[&str]) -> RunningWorker {
        RunningWorker::start(self, machine, name, options, &[])
    }

    /// Reads from the store. Returns `None` if the server is unreachable, and connects anew the next time.
    fn read<T>(&self, mut ask: impl FnMut(&mut Store) -> Result<T, StoreError>) -> Option<T> {
        let mut store = self.store.lock().unwrap();
        if store.is_none() {
            *store = Store::open(&self.deployment.location()).ok();
        }
        let answer = store.as_mut().map(&mut ask)?;
        if answer.is_err() {
            *store = None;
        }
        answer.ok()
    }

    /// All attempts of an analysis, oldest first.
    pub fn attempts(&self, id: &str) -> Vec<AttemptSummary> {
        let mut all = Vec::new();
        self.until("the database answers", || {
            let answer = self.read(|store| store.attempts(id));
            let answered = answer.is_some();
            all = answer.unwrap_or_default();
            answered
        });
        all.sort_by_key(|one| one.attempt);
        all
    }

    pub fn events(&self, id: &str) -> Vec<AnalysisEvent> {
        self.read(|store| store.events(id)).unwrap()
    }

    /// The names of the events of one attempt.
    pub fn event_names(&self, id: &str, attempt: u32) -> Vec<String> {
        let events = self.events(id).into_iter();
        events
            .filter(|e| e.attempt == attempt)
            .map(|e| e.event)
            .collect()
    }

    pub fn overview(&self) -> Option<QueueOverview> {
        self.read(|store| store.overview(1))
    }

    pub fn queued(&self) -> u64 {
        self.overview().map_or(u64::MAX, |all| all.queued)
    }

    /// State and reason of each attempt.
    pub fn states(&self, id: &str) -> Vec<(State, String)> {
        let attempts = self.attempts(id).into_iter();
        attempts
            .map(|one| (one.state, one.reason.unwrap_or_default()))
            .collect()
    }

    pub fn has_ended(&self, id: &str) -> bool {
        let attempts = self.attempts(id);
        !attempts.is_empty() && attempts.iter().all(|one| one.state.is_final())
    }

    #[track_caller]
    pub fn wait_for_ends(&self, ids: &[String]) {
        for id in ids {
            self.until(&format!("{id} ends"), || self.has_ended(id));
        }
    }

    #[track_caller]
    pub fn wait_until_runs(&self, id: &str) {
        self.until(&format!("{id} runs"), || {
            self.monitor.running().contains(id)
        });
    }

    /// Waits until `holds`. On timeout panics with the state of the whole cluster.
    #[track_caller]
    pub fn until(&self, what: &str, holds: impl FnMut() -> bool) {
        let held = poll_until(WAIT_MAX, Duration::from_millis(20), holds);
        assert!(held, "waited in vain: {what}\n{}", self.everything());
    }

    /// The state of the whole cluster, for the message of a failed trial.
    pub fn everything(&self) -> String {
        let mut told = String::new();
        for name in names_in(self.deployment.test_home.path("").as_path()) {
            let name = name.to_string_lossy().into_owned();
            if name.starts_with("worker-") {
                let log = std::fs::read_to_string(self.deployment.test_home.path(&name))
                    .unwrap_or_default();
                let from = log.len().saturating_sub(4000);
                told += &format!("--- {name}\n{}\n", log.get(from..).unwrap_or(&log));
            }
        }
        let rows = self.deployment.rows();
        for row in rows.all("attempts") {
            if text(row, "state") != Some("succeeded") {
                let cells = [
                    "id",
                    "attempt",
                    "state",
                    "reason",
                    "message",
                    "worker",
                    "lease_ms",
                    "cancel_ms",
                    "superseded",
                ];
                let cells = cells.map(|cell| format!("{cell}={}", row[cell]));
                told += &format!("{}\n", cells.join(" "));
            }
        }
        told += &format!("--- queue {:?}\n", rows.all("queue"));
        for machine in &self.machines {
            for slot in slots(machine) {
                let (order, pid) = (order(&slot), pid(&slot));
                let order = order.map(|o| (o["id"].clone(), o["attempt"].clone()));
                told += &format!("{slot:?}: {order:?}, pid {pid:?}\n");
            }
            let runs = crate::expected_state::files_below(&machine.home.join("runs"));
            let names = names_in(&machine.root);
            told += &format!("runs {runs:?}\nworkspaces {names:?}\n");
        }
        told
    }

    /// The live runner of an analysis.
    pub fn runner_of(&self, id: &str) -> Option<Runner> {
        let mut runners = self.machines.iter().flat_map(runners);
        runners.find(|runner| runner.id == id)
    }

    #[track_caller]
    pub fn kill_runner(&self, id: &str) {
        let runner = self.runner_of(id);
        let runner = runner.unwrap_or_else(|| panic!("{id} has no runner\n{}", self.everything()));
        assert!(runner.signal(Signal::KILL), "{id}");
    }

    /// Asserts that each analysis has exactly one end, and that nothing else is left on any machine.
    #[track_caller]
    pub fn check(&self, ids: &[String]) {
        let seen = self.monitor.seen();
        crate::execution_monitor::assert_never_doubled(&seen);
        let rows = self.deployment.rows();
        let known: BTreeSet<&str> = rows
            .all("analyses")
            .iter()
            .filter_map(|row| text(row, "id"))
            .collect();
        let ours: BTreeSet<&str> = ids.iter().map(String::as_str).collect();
        assert_eq!(known, ours, "analyses, and what submit printed");
        for id in ids {
            let attempts = rows.of("attempts", id);
            let events = rows.of("events", id);
            self.check_one(id, &attempts, &events, &seen);
        }
        assert_eq!(rows.all("queue"), [] as [Row; 0], "queue");
        assert_eq!(rows.all("workers"), [] as [Row; 0], "workers");
        let named: BTreeSet<_> = rows
            .all("submission_blobs")
            .iter()
            .map(|row| text(row, "blake3"))
            .collect();
        let held: BTreeSet<_> = rows
            .all("blobs")
            .iter()
            .map(|row| text(row, "blake3"))
            .collect();
        assert_eq!(
            held, named,
            "files that were submitted, and who refers to them"
        );
        let kept = StoredState {
            rows: &rows,
            artifacts: &self.deployment.artifacts(),
            steps: &BTreeSet::new(),
        };
        kept.check_no_other_objects();
        self.check_nothing_left();
    }

    /// Asserts one end for each attempt, recorded once, and at most one workspace and one program for each claimed attempt.
    #[track_caller]
    fn check_one(&self, id: &str, attempts: &[&Row], events: &[&Row], seen: &[ObservedEvent]) {
        let told = |attempt: Option<i64>, event: &str| {
            let of_it = |row: &&&Row| {
                number(row, "attempt") == attempt && text(row, "event") == Some(event)
            };
            events.iter().filter(of_it).count()
        };
        let everything = || format!("{id}: {attempts:?}\n{events:?}");
        let mut claimed = 0;
        for row in attempts {
            let attempt = number(row, "attempt");
            let state = State::parse(text(row, "state").unwrap()).unwrap();
            assert!(state.is_final(), "{}", everything());
            assert!(number(row, "committed_ms").is_some(), "{}", everything());
            assert_eq!(truth(row, "superseded"), Some(false), "{}", everything());
            let of_it =
                ["claimed", "started", "ended", "committed"].map(|event| told(attempt, event));
            assert!(of_it.iter().all(|n| *n <= 1), "{of_it:?}: {}", everything());
            claimed += of_it[0];
            // A claimed attempt is committed or given up. An attempt that nobody claimed is cancelled or parked.
            let (taken, ends) = (of_it[0] == 1, of_it[2] + of_it[3]);
            assert_eq!(taken, ends > 0, "{}", everything());
            assert!(
                taken || matches!(state, State::Cancelled | State::Error),
                "{}",
                everything()
            );
        }
        let numbers: Vec<i64> = attempts
            .iter()
            .filter_map(|row| number(row, "attempt"))
            .collect();
        let sorted: BTreeSet<i64> = numbers.iter().copied().collect();
        assert!(
            sorted.into_iter().eq(1..=numbers.len() as i64),
            "{}",
            everything()
        );
        assert_eq!(told(Some(1), "submitted"), 1, "{}", everything());
        // There may be more workspaces than programs: while the database is unreachable, no program begins in a workspace.
        let starts = count(seen, id, ExecutionEvent::Began);
        assert!(starts <= claimed, "began {starts} times: {}", everything());
        for (begin, end) in [
            (ExecutionEvent::Made, ExecutionEvent::Removed),
            (ExecutionEvent::Began, ExecutionEvent::Ended),
        ] {
            assert_eq!(
                count(seen, id, begin),
                count(seen, id, end),
                "{begin:?}: {}",
                everything()
            );
        }
    }

    /// Asserts that no file, cgroup, leased uid or process is left.
    #[track_caller]
    pub fn check_nothing_left(&self) {
        for machine in &self.machines {
            self.deployment.check_disk(machine);
            for slot in slots(machine) {
                assert!(!slot.join("inputs").exists(), "{slot:?}");
                assert_eq!(order(&slot), None, "{slot:?}");
            }
        }
        let stem = format!("{}-", self.deployment.stem);
        let groups = cgroups_of(&stem);
        assert!(groups.is_empty(), "{groups:?}");
        assert_eq!(self.processes(), [] as [(u32, String); 0]);
        if is_root() {
            for uid in self.monitor.uids() {
                // An analysis of another trial may have the uid now, for a while.
                self.until("the uid is free", || {
                    engine::workspace::uid_pool::lock_uid(uid).is_some()
                });
            }
        }
    }

    /// The processes of this cluster: programs, runners and workers.
    fn processes(&self) -> Vec<(u32, String)> {
        let stem = format!("{}-", self.deployment.stem).into_bytes();
        let test_home = self
            .deployment
            .test_home
            .path("")
            .into_os_string()
            .into_encoded_bytes();
        let has = |text: &[u8], part: &[u8]| text.windows(part.len()).any(|w| w == part);
        let ours = |pid: u32| {
            let read =
                |name: &str| std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let (words, environment) = (read("cmdline"), read("environ"));
            let is_ours = has(&words, &stem) || has(&environment, &test_home);
            is_ours.then(|| (pid, String::from_utf8_lossy(&words).into_owned()))
        };
        let own = std::process::id();
        all_pids()
            .filter(|pid| *pid != own)
            .filter_map(ours)
            .collect()
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        // Only a trial that failed half-way leaves runners. Its workers are already gone.
        if std::thread::panicking() {
            let left = self.machines.iter().flat_map(runners);
            left.for_each(|runner| {
                let _gone = runner.signal(Signal::KILL);
            });
            for machine in &self.machines {
                let _told_by_the_failure =
                    self.deployment.fumehood(machine, ["gc", "--kept"]).output();
            }
        }
    }
}

/// A live runner and its slot.
pub struct Runner {
    pub id: String,
    pub slot: PathBuf,
    pid: Pid,
}

impl Runner {
    /// Returns false if the runner was already gone.
    pub fn signal(&self, signal: Signal) -> bool {
        let Ok(process) = rustix::process::pidfd_open(self.pid, PidfdFlags::empty()) else {
            return false;
        };
        // The pidfd was opened first. If the lock on this order is held now, the pid belonged to the runner.
        let same = order(&self.slot).is_some_and(|order| order["id"] == self.id.as_str());
        same && is_held(&self.slot.join("order"))
            && rustix::process::pidfd_send_signal(process, signal).is_ok()
    }
}

fn slots(machine: &Machine) -> Vec<PathBuf> {
    let workers = machine.home.join("workers");
    let of = |name| {
        let slots = workers.join(name).join("slots");
        names_in(&slots)
            .into_iter()
            .map(move |slot| slots.join(slot))
    };
    let mut all: Vec<PathBuf> = names_in(&workers).into_iter().flat_map(of).collect();
    all.sort();
    all
}

fn order(slot: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(slot.join("order")).ok()?).ok()
}

fn pid(slot: &Path) -> Option<Pid> {
    let text = std::fs::read_to_string(slot.join("pid")).ok()?;
    Pid::from_raw(text.trim().parse().ok()?)
}

fn is_held(path: &Path) -> bool {
    std::fs::File::open(path).is_ok_and(|file| {
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockShared).is_err()
    })
}

/// The live runners of a machine.
pub fn runners(machine: &Machine) -> Vec<Runner> {
    let runner = |slot: PathBuf| {
        let order = order(&slot)?;
        let pid = pid(&slot)?;
        is_held(&slot.join("order")).then(|| Runner {
            id: order["id"].as_str().unwrap_or_default().to_owned(),
            slot,
            pid,
        })
    };
    slots(machine).into_iter().filter_map(runner).collect()
}

/// A worker that runs while the trial does other things. Its runners outlive it.
pub struct RunningWorker {
    child: Child,
    log: PathBuf,
    printed_before: usize,
    ended: bool,
}

impl RunningWorker {
    pub fn start(
        cluster: &TestCluster,
        machine: &Machine,
        name: &str,
        options: &[&str],
        environment: &[(&str, &str)],
    ) -> RunningWorker {
        let home = machine.home.file_name().unwrap().to_string_lossy();
        let log = cluster
            .deployment
            .test_home
            .path(&format!("worker-{home}-{name}"));
        let file = || {
            std::fs::File::options()
                .append(true)
                .create(true)
                .open(&log)
                .unwrap()
        };
        let mut command = cluster
            .deployment
            .fumehood(machine, ["worker", "--name", name]);
        command.args(options).envs(environment.iter().copied());
        command
            .stdout(Stdio::from(file()))
            .stderr(Stdio::from(file()));
        RunningWorker {
            printed_before: std::fs::metadata(&log).map_or(0, |meta| meta.len() as usize),
            child: command.spawn().unwrap(),
            log,
            ended: false,
        }
    }

    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn has_ended(&mut self) -> bool {
        let status = self.child.try_wait().unwrap();
        self.ended |= status.is_some();
        status.is_some()
    }

    /// The output of all workers with this name.
    pub fn output(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    pub fn is_ready(&self) -> bool {
        self.has_printed(" is ready: ")
    }

    /// Whether this worker or a later one with the same name has printed a text.
    pub fn has_printed(&self, what: &str) -> bool {
        let output = self.output();
        output
            .get(self.printed_before..)
            .is_some_and(|output| output.contains(what))
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.ended = true;
    }

    /// Waits until the worker ends by itself, and returns its exit code.
    #[track_caller]
    pub fn end(mut self, cluster: &TestCluster) -> i32 {
        cluster.until("the worker ends", || self.has_ended());
        self.child.wait().unwrap().code().unwrap()
    }

    /// Drains the worker, and waits for its end.
    #[track_caller]
    pub fn drain(self, cluster: &TestCluster) {
        // Before the worker handles signals, SIGTERM would kill it.
        cluster.until("the worker listens", || self.is_ready());
        self.signal(Signal::TERM);
        let log = self.log.clone();
        assert_eq!(
            self.end(cluster),
            0,
            "{}",
            std::fs::read_to_string(log).unwrap()
        );
    }
}

impl Drop for RunningWorker {
    fn drop(&mut self) {
        if !self.ended {
            let _gone = self.child.kill();
            let _gone = self.child.wait();
        }
    }
}
