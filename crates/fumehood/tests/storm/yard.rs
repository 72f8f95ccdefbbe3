//! A queue with its machines: homes that share a database, workers and their runners, and the witness over all of them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal};
use serde_json::Value;
use store::{AnalysisEvent, AttemptSummary, QueueOverview, State, Store, StoreError};

use crate::bench::{Bench, Place};
use crate::lab::{Ended, all_pids, cgroups_of, finish, is_root, names_in};
use crate::model::Kept;
use crate::rows::{Row, number, text, truth};
use crate::server::Server;
use crate::witness::{Seen, What, Witness, count};

/// `$0` is the id, `$1` the directory of the gates: holds its file, and says that it is up.
pub const UP: &str = r#"exec 9< "$1/$0"; echo up
"#;
/// Waits to be let go.
pub const WAIT: &str = r#"while [ ! -s "$1/go-$0" ]; do sleep 0.05; done
"#;

/// The bound of every wait: backoffs, leases and a busy machine together stay far below.
pub const AT_MOST: Duration = Duration::from_secs(240);

pub struct Yard {
    pub bench: Bench,
    pub places: Vec<Place>,
    pub witness: Witness,
    gates: PathBuf,
    store: Mutex<Option<Store>>,
}

impl Yard {
    /// One machine.
    pub fn sqlite(stem: &str) -> Yard {
        Yard::new(Bench::sqlite(stem), 1)
    }

    /// Two machines, as far as homes and workspaces go, with the server that all trials share.
    pub fn postgres(stem: &str) -> Yard {
        Yard::new(Bench::postgres(stem), 2)
    }

    pub fn on(server: &'static Server, stem: &str) -> Yard {
        Yard::new(Bench::on(server, stem), 2)
    }

    fn new(bench: Bench, machines: usize) -> Yard {
        // Platforms' own steps have trials of their own.
        std::fs::remove_file(bench.lab.path("person/.config/fumehood/config.toml")).unwrap();
        let mut places = vec![bench.place.clone()];
        places.extend((1..machines).map(|number| bench.another_place(number)));
        let gates = bench.lab.path("gates");
        std::fs::create_dir(&gates).unwrap();
        let roots: Vec<PathBuf> = places.iter().map(|place| place.root.clone()).collect();
        Yard {
            witness: Witness::of(&gates, &roots),
            bench,
            places,
            gates,
            store: Mutex::new(None),
        }
    }

    pub fn id(&self, name: &str) -> String {
        self.bench.id(name)
    }

    pub fn ask(&self, place: &Place, args: &[&str]) -> Ended {
        finish(self.bench.fumehood(place, args))
    }

    /// What a script of this id is submitted with, after the options.
    pub fn words(&self, id: &str, script: &str) -> Vec<String> {
        self.witness.expect(id);
        let script = format!("{UP}{script}");
        let gates = self.gates.to_str().unwrap();
        let words = ["--id", id, "--", "sh", "-c", &script, id, gates];
        let shown = [self.witness.gate(id), self.witness.go_file(id)];
        let shown = shown
            .iter()
            .flat_map(|path| ["--read", path.to_str().unwrap()]);
        shown.chain(words).map(str::to_owned).collect()
    }

    /// Queues a script of the shell's, which holds its file from its first word on.
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
        let printed = self.ask(&self.places[0], &all).good();
        assert_eq!(printed.trim_end(), id);
        id
    }

    /// A line of a batch: the same, as JSON.
    pub fn line(&self, id: &str, mut settings: Value, script: &str) -> String {
        self.witness.expect(id);
        let script = format!("{UP}{script}");
        let given = settings.as_object_mut().unwrap();
        given.insert("id".into(), id.into());
        let gates = self.gates.to_str().unwrap();
        given.insert(
            "command".into(),
            vec!["sh", "-c", &script, id, gates].into(),
        );
        let shown = [self.witness.gate(id), self.witness.go_file(id)];
        let shown: Vec<&str> = shown.iter().map(|path| path.to_str().unwrap()).collect();
        given.insert("read".into(), shown.into());
        settings.to_string()
    }

    pub fn worker(&self, place: &Place, name: &str, options: &[&str]) -> Worker {
        Worker::start(self, place, name, options, &[])
    }

    /// Asked again where the server was away for a moment.
    fn read<T>(&self, mut ask: impl FnMut(&mut Store) -> Result<T, StoreError>) -> Option<T> {
        let mut store = self.store.lock().unwrap();
        if store.is_none() {
            *store = Store::open(&self.bench.location()).ok();
        }
        let answer = store.as_mut().map(&mut ask)?;
        if answer.is_err() {
            *store = None;
        }
        answer.ok()
    }

    /// All attempts of an analysis, the first first.
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

    /// The words of its story, those of one attempt.
    pub fn story(&self, id: &str, attempt: u32) -> Vec<String> {
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
            self.witness.running().contains(id)
        });
    }

    /// Looks again and again, and tells all it knows where that is in vain.
    #[track_caller]
    pub fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let give_up = Instant::now() + AT_MOST;
        while !holds() {
            if Instant::now() > give_up {
                panic!("waited in vain: {what}\n{}", self.everything());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// For whoever has to find out what went wrong.
    pub fn everything(&self) -> String {
        let mut told = String::new();
        for name in names_in(self.bench.lab.path("").as_path()) {
            let name = name.to_string_lossy().into_owned();
            if name.starts_with("worker-") {
                let said = std::fs::read_to_string(self.bench.lab.path(&name)).unwrap_or_default();
                let from = said.len().saturating_sub(4000);
                told += &format!("--- {name}\n{}\n", said.get(from..).unwrap_or(&said));
            }
        }
        let rows = self.bench.rows();
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
        for place in &self.places {
            for slot in slots(place) {
                let (order, pid) = (order(&slot), pid(&slot));
                let order = order.map(|o| (o["id"].clone(), o["attempt"].clone()));
                told += &format!("{slot:?}: {order:?}, pid {pid:?}\n");
            }
            let runs = crate::model::files_below(&place.home.join("runs"));
            let names = names_in(&place.root);
            told += &format!("runs {runs:?}\nworkspaces {names:?}\n");
        }
        told
    }

    /// The runner that has this analysis just now: where it is, and the process.
    pub fn runner_of(&self, id: &str) -> Option<Runner> {
        let mut runners = self.places.iter().flat_map(runners);
        runners.find(|runner| runner.id == id)
    }

    #[track_caller]
    pub fn kill_runner(&self, id: &str) {
        let runner = self.runner_of(id);
        let runner = runner.unwrap_or_else(|| panic!("{id} has no runner\n{}", self.everything()));
        assert!(runner.signal(Signal::KILL), "{id}");
    }

    /// Everything came to its one end, and nothing else is left, anywhere.
    #[track_caller]
    pub fn check(&self, ids: &[String]) {
        let seen = self.witness.seen();
        crate::witness::assert_never_doubled(&seen);
        let rows = self.bench.rows();
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
        let kept = Kept {
            rows: &rows,
            artifacts: &self.bench.artifacts(),
            steps: &BTreeSet::new(),
        };
        kept.check_no_other_objects();
        self.check_nothing_left();
    }

    /// Exactly one end for each attempt, told once; each claimed attempt has at most one workspace and one program.
    #[track_caller]
    fn check_one(&self, id: &str, attempts: &[&Row], events: &[&Row], seen: &[Seen]) {
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
            // What was taken ends by a commit, or is given up; what was not is cancelled or parked where it waits.
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
        // A workspace may be made and removed more often than that: while the database is away, nothing begins in it.
        let starts = count(seen, id, What::Began);
        assert!(starts <= claimed, "began {starts} times: {}", everything());
        for (begin, end) in [(What::Made, What::Removed), (What::Began, What::Ended)] {
            assert_eq!(
                count(seen, id, begin),
                count(seen, id, end),
                "{begin:?}: {}",
                everything()
            );
        }
    }

    /// Neither files, cgroups, uids, nor processes.
    #[track_caller]
    pub fn check_nothing_left(&self) {
        for place in &self.places {
            self.bench.check_disk(place);
            for slot in slots(place) {
                assert!(!slot.join("inputs").exists(), "{slot:?}");
                assert_eq!(order(&slot), None, "{slot:?}");
            }
        }
        let stem = format!("{}-", self.bench.stem);
        let groups = cgroups_of(&stem);
        assert!(groups.is_empty(), "{groups:?}");
        assert_eq!(self.processes(), [] as [(u32, String); 0]);
        if is_root() {
            for uid in self.witness.uids() {
                // Somebody else's analysis may have it by now, for a while.
                self.until("the uid is free", || {
                    engine::workspace::uid_pool::lock_uid(uid).is_some()
                });
            }
        }
    }

    /// Analyses, runners and workers of this yard's.
    fn processes(&self) -> Vec<(u32, String)> {
        let stem = format!("{}-", self.bench.stem).into_bytes();
        let lab = self
            .bench
            .lab
            .path("")
            .into_os_string()
            .into_encoded_bytes();
        let has = |text: &[u8], part: &[u8]| text.windows(part.len()).any(|w| w == part);
        let ours = |pid: u32| {
            let read =
                |name: &str| std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let (words, environment) = (read("cmdline"), read("environ"));
            let is_ours = has(&words, &stem) || has(&environment, &lab);
            is_ours.then(|| (pid, String::from_utf8_lossy(&words).into_owned()))
        };
        let own = std::process::id();
        all_pids()
            .filter(|pid| *pid != own)
            .filter_map(ours)
            .collect()
    }
}

impl Drop for Yard {
    fn drop(&mut self) {
        // Only when the trial failed half-way: its runners must not outlive it. Workers went before.
        if std::thread::panicking() {
            let left = self.places.iter().flat_map(runners);
            left.for_each(|runner| {
                let _gone = runner.signal(Signal::KILL);
            });
            for place in &self.places {
                let _told_by_the_failure = self.bench.fumehood(place, ["gc", "--kept"]).output();
            }
        }
    }
}

/// A runner that lives in a slot.
pub struct Runner {
    pub id: String,
    pub slot: PathBuf,
    pid: Pid,
}

impl Runner {
    /// False: it was gone already.
    pub fn signal(&self, signal: Signal) -> bool {
        let Ok(process) = rustix::process::pidfd_open(self.pid, PidfdFlags::empty()) else {
            return false;
        };
        // The descriptor was had before: if the lock is held now, and by this order, the number was the runner's own.
        let same = order(&self.slot).is_some_and(|order| order["id"] == self.id.as_str());
        same && is_held(&self.slot.join("order"))
            && rustix::process::pidfd_send_signal(process, signal).is_ok()
    }
}

fn slots(place: &Place) -> Vec<PathBuf> {
    let workers = place.home.join("workers");
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

/// Those that live just now.
pub fn runners(place: &Place) -> Vec<Runner> {
    let runner = |slot: PathBuf| {
        let order = order(&slot)?;
        let pid = pid(&slot)?;
        is_held(&slot.join("order")).then(|| Runner {
            id: order["id"].as_str().unwrap_or_default().to_owned(),
            slot,
            pid,
        })
    };
    slots(place).into_iter().filter_map(runner).collect()
}

/// A worker that runs while the trial looks on. Its runners outlive it.
pub struct Worker {
    child: Child,
    log: PathBuf,
    said_before: usize,
    ended: bool,
}

impl Worker {
    pub fn start(
        yard: &Yard,
        place: &Place,
        name: &str,
        options: &[&str],
        environment: &[(&str, &str)],
    ) -> Worker {
        let home = place.home.file_name().unwrap().to_string_lossy();
        let log = yard.bench.lab.path(&format!("worker-{home}-{name}"));
        let file = || {
            std::fs::File::options()
                .append(true)
                .create(true)
                .open(&log)
                .unwrap()
        };
        let mut command = yard.bench.fumehood(place, ["worker", "--name", name]);
        command.args(options).envs(environment.iter().copied());
        command
            .stdout(Stdio::from(file()))
            .stderr(Stdio::from(file()));
        Worker {
            said_before: std::fs::metadata(&log).map_or(0, |meta| meta.len() as usize),
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

    /// All that any worker of this name has said.
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    pub fn is_ready(&self) -> bool {
        self.has_said(" is ready: ")
    }

    /// This one or one after it, not one of the same name before it.
    pub fn has_said(&self, what: &str) -> bool {
        let said = self.said();
        said.get(self.said_before..)
            .is_some_and(|said| said.contains(what))
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.ended = true;
    }

    /// Its exit code, once it ends by itself.
    #[track_caller]
    pub fn end(mut self, yard: &Yard) -> i32 {
        yard.until("the worker ends", || self.has_ended());
        self.child.wait().unwrap().code().unwrap()
    }

    /// Ends without leaving anything.
    #[track_caller]
    pub fn drain(self, yard: &Yard) {
        // Before that a signal would simply kill it.
        yard.until("the worker listens", || self.is_ready());
        self.signal(Signal::TERM);
        let log = self.log.clone();
        assert_eq!(
            self.end(yard),
            0,
            "{}",
            std::fs::read_to_string(log).unwrap()
        );
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.ended {
            let _gone = self.child.kill();
            let _gone = self.child.wait();
        }
    }
}
