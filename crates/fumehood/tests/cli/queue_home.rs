//! A home with a queue on PostgreSQL, and its workers.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use store::{Environment, Location, LocationOrigin, NewSubmission, Store};
use testkit::command::{FinishedCommand, finish};
use testkit::home::TestHome;
use testkit::process::names_in;
use testkit::wait::eventually;

use crate::postgres::PostgresHome;

/// A home whose database is on a server, where other users could write to the queue.
pub struct QueueHome {
    pub test_home: TestHome,
    pub url: String,
}

impl QueueHome {
    pub fn new() -> QueueHome {
        let PostgresHome { test_home, url, .. } = PostgresHome::new();
        QueueHome { test_home, url }
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = self.test_home.fumehood();
        command.args(args).env("FUMEHOOD_DB", &self.url);
        command
    }

    pub fn ask(&self, args: &[&str]) -> FinishedCommand {
        finish(self.command(args))
    }

    #[track_caller]
    pub fn submit(&self, id: &str, options: &[&str], words: &[&str]) {
        let first = ["submit", "--id", id];
        self.ask(&[&first, options, words].concat()).good();
    }

    /// Inserts a request as somebody with a login to the database could, without the checks of `fumehood submit`.
    pub fn submit_by_hand(&self, id: &str, request: &Value) {
        let env: Environment = &|_| None;
        let location = Location::parse(&self.url, LocationOrigin::Environment, env).unwrap();
        let submit = NewSubmission {
            id,
            submit_key: None,
            fingerprint: "f",
            request_json: &request.to_string(),
            submitter: "mallory",
            priority: 9,
            retries: 1,
            retry_on: &[],
            memory_bytes: None,
            cpu_milli: None,
            blobs: &[],
            replace: false,
        };
        let mut store = Store::open(&location).unwrap();
        store.submit(&[submit], 1_000).unwrap();
    }

    #[track_caller]
    pub fn sql(&self, sql: &str) -> String {
        let asked = Command::new("psql")
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d"])
            .arg(&self.url)
            .args(["-c", "SET search_path = fumehood", "-c", sql])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&asked.stderr);
        assert!(asked.status.success(), "{sql}: {said}");
        let out = String::from_utf8(asked.stdout).unwrap();
        out.trim_end().to_owned()
    }

    /// State and reason of each attempt of an analysis, oldest first.
    pub fn ends(&self, id: &str) -> String {
        let sql = format!("SELECT state, reason FROM attempts WHERE id = '{id}' ORDER BY attempt");
        self.sql(&sql).replace('\n', " ")
    }

    /// Runs a worker until the queue is empty.
    #[track_caller]
    pub fn work(&self, slots: &str) -> FinishedCommand {
        let args = ["worker", "--slots", slots, "--memory", "1G", "--until-idle"];
        let ended = self.ask(&args);
        ended.good();
        ended
    }

    pub fn worker(&self, options: &[&str]) -> RunningWorker {
        let args = [&["worker", "--memory", "1G"], options].concat();
        RunningWorker::start(self.command(&args), &self.test_home)
    }

    /// Submits an analysis that makes the file `up` and waits for the file `gate`.
    pub fn submit_gated(&self, id: &str, options: &[&str]) {
        self.submit(id, options, &["--", "sh", "-c", GATED]);
    }

    pub fn wait_until_up(&self, id: &str) {
        eventually(&format!("{id} is up"), || {
            self.test_home.workspace(id).join("up").exists()
        });
    }

    /// The process that runs an analysis.
    #[track_caller]
    pub fn runner_of(&self, id: &str) -> Pid {
        let mut runners = self.runners().into_iter();
        runners.find(|(of, _)| of == id).unwrap().1
    }

    /// The live runners. Each holds a lock on its order file.
    pub fn runners(&self) -> Vec<(String, Pid)> {
        let slots = self.test_home.home.join("workers/default/slots");
        let runner = |slot: std::ffi::OsString| {
            let slot = slots.join(slot);
            let order = std::fs::read(slot.join("order")).ok()?;
            let order: Value = serde_json::from_slice(&order).ok()?;
            let pid = std::fs::read_to_string(slot.join("pid")).ok()?;
            let file = std::fs::File::open(slot.join("order")).ok()?;
            flock(&file, FlockOperation::NonBlockingLockShared).err()?;
            let id = order["id"].as_str()?.to_owned();
            Some((id, Pid::from_raw(pid.trim().parse().ok()?)?))
        };
        names_in(&slots).into_iter().filter_map(runner).collect()
    }

    pub fn let_go(&self, id: &str) {
        std::fs::write(self.test_home.workspace(id).join("gate"), "").unwrap();
    }
}

impl Drop for QueueHome {
    fn drop(&mut self) {
        // Only a trial that failed half-way leaves runners. Its workers are already gone.
        if std::thread::panicking() {
            for (_, runner) in self.runners() {
                let _gone = kill_process(runner, Signal::KILL);
            }
        }
    }
}

pub const GATED: &str = "touch up; until [ -e gate ]; do sleep 0.05; done";

/// A worker that runs while the trial does other things.
pub struct RunningWorker {
    pub child: Child,
    pub log: PathBuf,
}

impl RunningWorker {
    pub fn start(mut command: Command, test_home: &TestHome) -> RunningWorker {
        let log = test_home.path("worker.log");
        let file = std::fs::File::create(&log).unwrap();
        command.stdout(Stdio::null()).stderr(file);
        RunningWorker {
            child: command.spawn().unwrap(),
            log,
        }
    }

    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    #[track_caller]
    pub fn wait_until_it_says(&self, words: &str) {
        eventually(words, || self.said().contains(words));
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until the worker ends by itself.
    #[track_caller]
    pub fn end(mut self) {
        let mut status = None;
        eventually("the worker ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        assert!(status.unwrap().success(), "{}", self.said());
    }
}

impl Drop for RunningWorker {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}
