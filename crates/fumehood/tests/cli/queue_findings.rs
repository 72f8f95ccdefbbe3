//! What attackers of the queue found: each trial names its finding, by the two attackers' own letters and numbers, and says
//! what it would have seen then.
//!
//! Nearly all on PostgreSQL, where submissions are those of strangers to a plain user's worker, too.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use store::{Environment, Location, LocationOrigin, NewSubmission, Store};

use crate::lab::{Ended, Lab, Live, eventually, finish, names_in, set_mode};
use crate::plain_user;
use crate::postgres::Bench;
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    (
        "a_programs_that_do_not_exist_pause_nobody",
        For::Everyone,
        no_such_programs,
    ),
    (
        "c_what_has_no_id_is_ended_and_others_are_served",
        For::Everyone,
        no_ids,
    ),
    (
        "d_there_is_one_answer_about_private_interpreters",
        For::Everyone,
        private_interpreters,
    ),
    (
        "d2_what_leads_out_of_a_listed_root_tells_nothing",
        For::Root,
        out_of_a_root,
    ),
    (
        "e_f_h_m_strangers_get_what_was_counted_and_no_more",
        For::Everyone,
        too_much,
    ),
    (
        "g_s_t_a_request_that_is_too_long_ends_in_few_words",
        For::Everyone,
        too_long,
    ),
    (
        "i_a_private_repository_is_not_in_the_record",
        For::Root,
        private_repository,
    ),
    (
        "j_a_private_library_is_not_in_the_record",
        For::Everyone,
        private_library,
    ),
    (
        "k_what_another_database_kept_is_not_removed",
        For::Everyone,
        kept_by_another,
    ),
    (
        "l_a_slot_is_free_though_there_is_no_next_number",
        For::Everyone,
        no_next_number,
    ),
    (
        "b4_an_attempt_that_cannot_be_read_stops_no_worker",
        For::Everyone,
        unreadable_attempt,
    ),
    (
        "f1_a_restarted_worker_has_the_slots_it_was_given",
        For::Everyone,
        fewer_slots,
    ),
    (
        "f2_a_runner_that_is_told_to_end_was_not_cancelled",
        For::Everyone,
        runner_told_to_end,
    ),
    (
        "f4_children_are_heard_of_though_nobody_wanted_to",
        For::Everyone,
        ignored_children,
    ),
    (
        "f5_it_is_not_idle_while_a_retry_is_queued",
        For::Everyone,
        idle_with_a_retry,
    ),
    (
        "f6_it_is_not_idle_while_the_database_is_away",
        For::Everyone,
        idle_while_away,
    ),
    (
        "f14_a_database_that_is_restarted_costs_no_attempt",
        For::Everyone,
        away_before_the_start,
    ),
    (
        "f15_a_torn_record_does_not_hold_its_attempt",
        For::Root,
        torn_record,
    ),
    (
        "a_secret_does_not_stay_in_a_dead_workers_slot",
        For::Everyone,
        secret_in_a_slot,
    ),
];

/// A queue that others can write to, as far as the worker knows.
struct Queue {
    lab: Lab,
    url: String,
}

impl Queue {
    fn new() -> Queue {
        let Bench { lab, url, .. } = Bench::new();
        Queue { lab, url }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.lab.fumehood();
        command.args(args).env("FUMEHOOD_DB", &self.url);
        command
    }

    fn ask(&self, args: &[&str]) -> Ended {
        finish(self.command(args))
    }

    #[track_caller]
    fn submit(&self, id: &str, options: &[&str], words: &[&str]) {
        let first = ["submit", "--id", id];
        self.ask(&[&first, options, words].concat()).good();
    }

    /// As somebody would who has a login there and no client.
    fn submit_by_hand(&self, id: &str, request: &Value) {
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
    fn sql(&self, sql: &str) -> String {
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

    /// State and reason of its attempts, the first first.
    fn ends(&self, id: &str) -> String {
        let sql = format!("SELECT state, reason FROM attempts WHERE id = '{id}' ORDER BY attempt");
        self.sql(&sql).replace('\n', " ")
    }

    /// A worker that takes all there is.
    #[track_caller]
    fn work(&self, slots: &str) -> Ended {
        let args = ["worker", "--slots", slots, "--memory", "1G", "--until-idle"];
        let ended = self.ask(&args);
        ended.good();
        ended
    }

    fn worker(&self, options: &[&str]) -> Worker {
        let args = [&["worker", "--memory", "1G"], options].concat();
        Worker::start(self.command(&args), &self.lab)
    }

    /// One that says that it is up and waits to be let go.
    fn submit_gated(&self, id: &str, options: &[&str]) {
        self.submit(id, options, &["--", "sh", "-c", GATED]);
    }

    fn wait_until_up(&self, id: &str) {
        eventually(&format!("{id} is up"), || {
            self.lab.workspace(id).join("up").exists()
        });
    }

    /// The process that runs it.
    #[track_caller]
    fn runner_of(&self, id: &str) -> Pid {
        let mut runners = self.runners().into_iter();
        runners.find(|(of, _)| of == id).unwrap().1
    }

    /// Those that live: each holds its order locked.
    fn runners(&self) -> Vec<(String, Pid)> {
        let slots = self.lab.home.join("workers/default/slots");
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

    fn let_go(&self, id: &str) {
        std::fs::write(self.lab.workspace(id).join("gate"), "").unwrap();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Only when the trial failed half-way: its runners must not outlive it. Workers went before.
        if std::thread::panicking() {
            for (_, runner) in self.runners() {
                let _gone = kill_process(runner, Signal::KILL);
            }
        }
    }
}

const GATED: &str = "touch up; until [ -e gate ]; do sleep 0.05; done";

/// A worker that runs while the trial looks on.
struct Worker {
    child: Child,
    log: PathBuf,
}

impl Worker {
    fn start(mut command: Command, lab: &Lab) -> Worker {
        let log = lab.path("worker.log");
        let file = std::fs::File::create(&log).unwrap();
        command.stdout(Stdio::null()).stderr(file);
        Worker {
            child: command.spawn().unwrap(),
            log,
        }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    #[track_caller]
    fn wait_until_it_says(&self, words: &str) {
        eventually(words, || self.said().contains(words));
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Once it ends by itself.
    #[track_caller]
    fn end(mut self) {
        let mut status = None;
        eventually("the worker ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        assert!(status.unwrap().success(), "{}", self.said());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

/// A, and F3 of the second: "3 analyses in a row could not be started here", and nobody was served for half a minute.
fn no_such_programs() {
    let queue = Queue::new();
    let file = queue.lab.write("project/input", "input");
    let file = file.to_str().unwrap();
    for n in 1..=4 {
        let name = format!("nosuchprogram{n}");
        queue.submit(&name, &["--priority", "5"], &["--", &name]);
        let gone = format!("gone{n}");
        queue.submit(
            &gone,
            &["--priority", "5", "--input", file],
            &["--", "true"],
        );
    }
    queue.submit("good", &[], &["--", "true"]);
    queue.sql("DELETE FROM submission_blobs");
    queue.sql("DELETE FROM blobs");
    let worked = queue.work("1");
    assert!(!worked.err().contains("in a row"), "{}", worked.err());
    for n in 1..=4 {
        assert_eq!(
            queue.ends(&format!("nosuchprogram{n}")),
            "error|not_found",
            "not tried again"
        );
        assert_eq!(queue.ends(&format!("gone{n}")), "error|refused");
    }
    assert_eq!(queue.ends("good"), "succeeded|exit");
}

/// C and N: they stayed `running` for ever, and the first three stopped the worker for half a minute; a newline in one made a
/// line of its own in the worker's log.
fn no_ids() {
    let queue = Queue::new();
    let bad = [
        "../../evil",
        ".x",
        "a b",
        "x\nfumehood: worker default is draining",
    ];
    for id in bad {
        let request = json!({"version": 1, "id": id, "command": {"argv": ["true"]}, "settings": {}, "inputs": [], "stdin": null});
        queue.submit_by_hand(id, &request);
    }
    queue.submit("good", &[], &["--", "true"]);
    let worked = queue.work("1");
    assert!(!worked.err().contains("in a row"), "{}", worked.err());
    let draining = |line: &str| line == "fumehood: worker default is draining";
    assert!(!worked.err().lines().any(draining), "{}", worked.err());
    let ended = "SELECT COUNT(*) FROM attempts WHERE submitter = 'mallory' AND state = 'error' AND reason = 'refused'";
    assert_eq!(queue.sql(ended), bad.len().to_string());
    assert_eq!(
        queue.sql("SELECT COUNT(*) FROM attempts"),
        (bad.len() + 1).to_string()
    );
    assert_eq!(queue.ends("good"), "succeeded|exit");
    queue.lab.assert_nothing_left();
}

/// D and D': not there, there, executable, and an environment of Python's were four answers about files that only the
/// worker's user can see; and whoever asked for a program that is nowhere was told the worker's PATH.
fn private_interpreters() {
    let queue = Queue::new();
    let lab = &queue.lab;
    lab.write("private/plain", "text");
    lab.write_program("private/program", std::fs::read("/bin/sh").unwrap());
    lab.write_program("private/script", "#!/bin/sh\n");
    lab.write(
        "private/venv/pyvenv.cfg",
        "home = /usr/bin\nversion = 3.11.2\n",
    );
    std::fs::create_dir(lab.path("private/venv/bin")).unwrap();
    symlink("/usr/bin/python3", lab.path("private/venv/bin/python")).unwrap();
    symlink(lab.path("private/program"), lab.path("private/link")).unwrap();
    set_mode(&lab.path("private"), 0o700);
    let names = [
        "nothing",
        "plain",
        "program",
        "script",
        "venv/bin/python",
        "venv/nothing",
        "link",
    ];
    for (n, name) in names.iter().enumerate() {
        let interpreter = lab.path("private").join(name);
        let line = format!("#!{}\nexit 0\n", interpreter.display());
        let script = lab.write_program(&format!("project/s{n}"), line);
        queue.submit(&format!("s{n}"), &[], &[script.to_str().unwrap()]);
        queue.submit(
            &format!("p{n}"),
            &[],
            &["--", interpreter.to_str().unwrap()],
        );
    }
    queue.submit("nowhere", &[], &["--", "nosuchprogram"]);
    let open = lab.write_program("project/open", "#!/bin/sh\nexit 0\n");
    queue.submit("open", &[], &[open.to_str().unwrap()]);
    queue.work("2");
    let told = queue.sql(
        "SELECT DISTINCT state, reason, message FROM attempts WHERE id LIKE 's%' OR id = 'nowhere'",
    );
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(told.starts_with("error|not_found|"), "{told}");
    for secret in ["/usr/sbin", "private", lab.project.to_str().unwrap()] {
        assert!(!told.contains(secret), "{told}");
    }
    // Who names a path is told that it is not for everybody, and not whether it is there.
    let mut answers: Vec<String> = Vec::new();
    for (n, name) in names.iter().enumerate() {
        let sql = format!("SELECT state, reason, message FROM attempts WHERE id = 'p{n}'");
        answers.push(queue.sql(&sql).replacen(&format!("private/{name}"), "", 1));
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "{answers:?}");
    assert!(answers[0].starts_with("error|refused|"), "{answers:?}");
    // The control: what everybody can execute is found, and who asks for himself is told more.
    assert_eq!(queue.ends("open"), "succeeded|exit");
    let own = queue.ask(&["run", "--", "nosuchprogram"]);
    assert!(own.err().contains("/usr/sbin"), "{}", own.err());
}

/// D2: by `..` or a link below a root that the operator lists, "no such file" and "not listed" told what is where in private,
/// and where a private link leads.
fn out_of_a_root() {
    let queue = Queue::new();
    let lab = &queue.lab;
    set_mode(lab.path("project").parent().unwrap(), 0o755);
    lab.write("private/there", "secret");
    set_mode(&lab.path("private"), 0o700);
    let roots = [("open", 0o755), ("closed", 0o700)];
    let pairs = [
        ("up", "../private/there", "../private/nothing"),
        ("link", "l-there", "l-nothing"),
    ];
    for (root, mode) in roots {
        let dir = lab.path(root);
        let control = lab.write(&format!("{root}/control"), "control");
        set_mode(&dir, mode);
        symlink(lab.path("private/there"), dir.join("l-there")).unwrap();
        symlink(lab.path("private/nothing"), dir.join("l-nothing")).unwrap();
        for (how, there, nothing) in pairs {
            for (what, name) in [("there", there), ("nothing", nothing)] {
                let path = format!("{}/{name}", dir.display());
                let id = format!("{root}-{how}-{what}");
                queue.submit(&id, &["--read", &path], &["--", "true"]);
            }
        }
        let control = control.to_str().unwrap();
        queue.submit(root, &["--read", control], &["--", "true"]);
    }
    let policy = format!(
        "[read]\nroots = [{:?}, {:?}]\n",
        lab.path("open"),
        lab.path("closed")
    );
    let args = ["worker", "--slots", "2", "--memory", "1G", "--until-idle"];
    finish(under_policy(&queue, &policy, &args)).good();
    for (root, _) in roots {
        for (how, there, nothing) in pairs {
            let answer = |what: &str, name: &str| {
                let id = format!("{root}-{how}-{what}");
                assert_eq!(queue.ends(&id), "error|refused", "{id}");
                let sql = format!("SELECT message FROM attempts WHERE id = '{id}'");
                // But for what was asked for.
                queue.sql(&sql).replace(name, "")
            };
            let answers = [answer("there", there), answer("nothing", nothing)];
            assert_eq!(answers[0], answers[1], "{root} {how}");
            // Where an open link leads is everybody's to know, and who wrote the name knows it.
            if (root, how) == ("closed", "link") {
                assert!(!answers[0].contains("private"), "{answers:?}");
            }
        }
        assert_eq!(queue.ends(root), "succeeded|exit");
    }
}

/// Where /etc is a copy with this policy: the host's stays as it is.
fn under_policy(queue: &Queue, policy: &str, args: &[&str]) -> Command {
    let script = r#"
        set -e
        mount -t tmpfs -o mode=755 none "$1"
        cp -a /etc/. "$1"
        mount --bind "$1" /etc
        mkdir -m 755 /etc/fumehood
        umask 022
        printf %s "$2" > /etc/fumehood/policy.toml
        shift 2
        exec "$@"
    "#;
    let etc = queue.lab.path("etc");
    std::fs::create_dir(&etc).unwrap();
    let mut command = queue.lab.with_surroundings(Command::new("unshare"));
    command.env("FUMEHOOD_DB", &queue.url);
    command.args(["--mount", "--propagation", "private", "sh", "-c", script]);
    command.arg("sh").arg(&etc).arg(policy);
    command.arg(plain_user::binary()).args(args);
    command
}

/// E: with a row that counted nothing it ran with 8 GiB on a worker of two. F: it chose the level that hides less. H: the
/// runner itself took gigabytes. M: what it left stayed for a year.
fn too_much() {
    let queue = Queue::new();
    let degraded = ["--allow-degraded", "memory", "--allow-degraded", "cpus"];
    queue.submit(
        "e-memory",
        &[&degraded[..], &["--memory", "64M"]].concat(),
        &["--", "true"],
    );
    queue.submit(
        "e-cpus",
        &[&degraded[..], &["--cpus", "1"]].concat(),
        &["--", "true"],
    );
    for table in ["queue", "submissions"] {
        queue.sql(&format!(
            "UPDATE {table} SET memory_bytes = 0, cpu_milli = 0 WHERE id IN ('e-memory', 'e-cpus')"
        ));
    }
    let cases = [
        ("f-level", ["--level", "landlock"]),
        ("h-log", ["--log-limit", "1G"]),
        ("h-outputs", ["--max-outputs", "1000000"]),
        ("h-inline", ["--inline-max", "64M"]),
        ("m-keep-for", ["--keep-for", "2d"]),
    ];
    for (id, option) in cases {
        queue.submit(id, &option, &["--", "true"]);
    }
    // The control: the same, within the bounds, and counted.
    let within = [
        ["--log-limit", "1M"],
        ["--max-outputs", "100"],
        ["--inline-max", "1K"],
        ["--keep-for", "1h"],
        ["--memory", "64M"],
    ];
    let within = [degraded.to_vec(), within.concat()].concat();
    queue.submit("within", &within, &["--", "true"]);
    queue.work("2");
    for id in ["e-memory", "e-cpus"].into_iter().chain(cases.map(|c| c.0)) {
        assert_eq!(queue.ends(id), "error|refused", "{id}");
    }
    assert_eq!(queue.ends("within"), "succeeded|exit");
}

/// G: the worker fetched a request of any length. S: what it did not like of one was in the message, all of it. T: a name that no
/// disk takes was tried again and again.
fn too_long() {
    let queue = Queue::new();
    let request = |id: &str, settings: Value, inputs: Value| {
        json!({
            "version": 1, "id": id, "command": {"argv": ["true"]}, "settings": settings,
            "inputs": inputs, "stdin": null,
        })
    };
    queue.submit_by_hand("g-request", &request("g-request", json!({}), json!([])));
    queue.sql("UPDATE submissions SET request = repeat('x', 5000000) WHERE id = 'g-request'");
    let item = json!({"env": {"list": ["x".repeat(200_000)]}});
    queue.submit_by_hand("s-env", &request("s-env", item, json!([])));
    let word = json!({"keep": {"text": "x".repeat(200_000)}});
    queue.submit_by_hand("s-word", &request("s-word", word, json!([])));
    let name = json!([{"directory": {"name": "x".repeat(300)}}]);
    queue.submit_by_hand("t-name", &request("t-name", json!({}), name));
    queue.submit("good", &[], &["--", "true"]);
    queue.work("1");
    for id in ["g-request", "s-env", "s-word", "t-name"] {
        assert_eq!(queue.ends(id), "error|refused", "{id}");
    }
    let longest = queue.sql("SELECT MAX(length(message)) FROM attempts");
    assert!(longest.parse::<u32>().unwrap() <= 4_000, "{longest}");
    assert_eq!(queue.ends("good"), "succeeded|exit");
}

/// I: branch, commit and state of a repository that only root can read were in the record of whoever named the directory.
fn private_repository() {
    let queue = Queue::new();
    let lab = &queue.lab;
    set_mode(lab.path("project").parent().unwrap(), 0o755);
    let git = |args: &[&str]| {
        let mut git = lab.with_surroundings(Command::new("git"));
        let who = ["-c", "user.name=x", "-c", "user.email=x"];
        let ended = finish({
            git.args(who).args(args);
            git
        });
        ended.good();
    };
    git(&["init", "-q", "-b", "secretbranch"]);
    git(&["commit", "-q", "--allow-empty", "-m", "x"]);
    set_mode(&lab.path("project/.git"), 0o700);
    let project = lab.project.to_str().unwrap();
    queue.submit("theirs", &["--project", project], &["--", "true"]);
    queue.work("1");
    assert_eq!(queue.ends("theirs"), "succeeded|exit");
    queue.ask(&["run", "--id", "own", "--", "true"]).good();
    let tells = "SELECT id FROM attempts WHERE provenance::text LIKE '%secretbranch%'";
    assert_eq!(queue.sql(tells), "own", "and the control");
}

/// J: R_LIBS named any directory, and the record listed what was in it.
fn private_library() {
    let queue = Queue::new();
    let lab = &queue.lab;
    lab.write(
        "private/secretpkg/DESCRIPTION",
        "Package: secretpkg\nVersion: 6.6.6\nBuilt: R 4.2.2; ; 2024-01-01 00:00:00 UTC; unix\n",
    );
    set_mode(&lab.path("private"), 0o700);
    let variable = format!("R_LIBS={}", lab.path("private").display());
    queue.submit("theirs", &["--env", &variable], &["--", "true"]);
    queue.work("1");
    assert_eq!(queue.ends("theirs"), "succeeded|exit");
    let own = ["run", "--id", "own", "--env", &variable, "--", "true"];
    queue.ask(&own).good();
    let tells = "SELECT id FROM attempts WHERE provenance::text LIKE '%6.6.6%'";
    assert_eq!(queue.sql(tells), "own", "and the control");
}

/// K: `submit --id ID` on a database that the worker serves removed the workspace of the operator's own run, which another
/// database had recorded.
fn kept_by_another() {
    let queue = Queue::new();
    let lab = &queue.lab;
    let other = format!("sqlite:{}", lab.path("other.db").display());
    let keep = ["--keep", "always", "--keep-for", "1d"];
    let options = [&["--db", &other, "--id", "kept"][..], &keep].concat();
    lab.sh(&options, "echo precious > file").good();
    let file = lab.workspace("kept").join("file");
    assert!(file.exists());
    queue.submit("kept", &[], &["--", "true"]);
    queue.work("1");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious\n");
    assert!(queue.ends("kept").starts_with("error|"));
    // The control: what this database's own attempt kept does not stand in the way of the next one.
    let args = [&["--retries", "0"][..], &keep].concat();
    queue.submit("again", &args, &["--", "sh", "-c", "touch first; ls"]);
    queue.work("1");
    assert!(lab.workspace("again").join("first").exists());
    queue.ask(&["retry", "again"]).good();
    queue.work("1");
    assert_eq!(queue.ends("again"), "succeeded|exit succeeded|exit");
    lab.gc(&["--kept"]).good();
}

/// L and L': the end of the attempt could not be written, because the next one had no number. The slot was never free again,
/// also after a restart; or the result was never committed.
fn no_next_number() {
    let queue = Queue::new();
    let again = ["--retries", "1", "--retry-on", "failed"];
    queue.submit("failed", &again, &["--", "false"]);
    queue.submit("unstarted", &again, &["--", "true"]);
    queue.submit("good", &[], &["--", "true"]);
    // Somebody's directory in the way: it cannot be started here.
    std::fs::create_dir(queue.lab.workspace("unstarted")).unwrap();
    queue.sql("UPDATE analyses SET attempt_last = 9223372036854775807 WHERE id <> 'good'");
    queue.work("1");
    assert_eq!(queue.ends("failed"), "failed|exit");
    assert!(queue.ends("unstarted").starts_with("error|"));
    assert_eq!(queue.ends("good"), "succeeded|exit");
    assert_eq!(names_in(&queue.lab.home.join("pending")), [""; 0]);
}

/// B4: "the database cannot be used for now", for as long as anything ran: nothing was taken, and nobody was cancelled.
fn unreadable_attempt() {
    let queue = Queue::new();
    queue.submit_gated("busy", &[]);
    let worker = queue.worker(&["--slots", "2", "--until-idle"]);
    queue.wait_until_up("busy");
    queue.sql(
        "INSERT INTO attempts (id, attempt, key, state, host, boot_id, created_ms, lease_ms, cancel_ms)
         SELECT id, 5000000000, 'k', state, host, boot_id, 1, 1, 1 FROM attempts WHERE id = 'busy'",
    );
    queue.submit("good", &[], &["--", "true"]);
    eventually("others are served", || {
        queue.ends("good") == "succeeded|exit"
    });
    queue.submit_gated("cancelled", &[]);
    queue.wait_until_up("cancelled");
    queue.ask(&["cancel", "--wait", "cancelled"]).good();
    queue.let_go("busy");
    eventually("it ends", || {
        queue.ends("busy").starts_with("succeeded|exit")
    });
    assert!(
        !worker.said().contains("cannot be used"),
        "{}",
        worker.said()
    );
    worker.kill();
}

/// F1: a worker that was started anew with one slot, while two analyses ran on from before, took a third.
fn fewer_slots() {
    let queue = Queue::new();
    // So little that memory is no reason to wait.
    let little = ["--memory", "16M", "--allow-degraded", "memory"];
    for id in ["first", "second", "third"] {
        queue.submit_gated(id, &little);
    }
    let worker = queue.worker(&["--slots", "3"]);
    for id in ["first", "second", "third"] {
        queue.wait_until_up(id);
    }
    worker.kill();
    // Its slot is among those that the next one has.
    queue.let_go("first");
    eventually("the first ends", || queue.ends("first") == "succeeded|exit");
    // A runner cleans up after its commit, and has its slot until then.
    eventually("its runner ends", || queue.runners().len() == 2);
    queue.submit("late", &little, &["--", "true"]);
    let worker = queue.worker(&["--slots", "1", "--until-idle"]);
    worker.wait_until_it_says("2 analyses run on from before");
    eventually("it has looked at the queue", || {
        queue.sql("SELECT slots, running FROM workers") == "1|2"
    });
    for id in ["second", "third"] {
        assert_eq!(queue.ends("late"), "queued|", "while {id} runs");
        queue.let_go(id);
        eventually("it ends", || queue.ends(id) == "succeeded|exit");
    }
    worker.end();
    assert_eq!(queue.ends("late"), "succeeded|exit");
    let order = "SELECT id FROM events WHERE id IN ('second', 'third') AND event = 'committed' OR id = 'late' AND event = 'claimed' ORDER BY seq";
    assert_eq!(queue.sql(order), "second\nthird\nlate");
}

/// F2: a machine that was shut down ended everything on it as `cancelled`, which is not tried again.
fn runner_told_to_end() {
    let queue = Queue::new();
    for id in ["told", "cancelled"] {
        queue.submit_gated(id, &["--retries", "1"]);
    }
    let worker = queue.worker(&["--slots", "2", "--until-idle"]);
    for id in ["told", "cancelled"] {
        queue.wait_until_up(id);
    }
    queue.sql("UPDATE attempts SET cancel_ms = 1, cancel_by = 'bob' WHERE id = 'cancelled'");
    for id in ["told", "cancelled"] {
        kill_process(queue.runner_of(id), Signal::TERM).unwrap();
    }
    eventually("it is tried again", || {
        queue.ends("told") == "error|runner_stopped running|"
    });
    queue.wait_until_up("told");
    queue.let_go("told");
    worker.end();
    assert_eq!(queue.ends("told"), "error|runner_stopped succeeded|exit");
    assert_eq!(queue.ends("cancelled"), "cancelled|cancelled");
}

/// F4: what was started by somebody who ignores SIGCHLD never learnt that anything had ended; not even a time limit held.
fn ignored_children() {
    let queue = Queue::new();
    queue.submit("queued", &[], &["--", "true"]);
    let deaf = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])";
    let worker = ["worker", "--slots", "1", "--memory", "1G", "--until-idle"];
    for args in [&worker[..], &["run", "--timeout", "60s", "--", "true"]] {
        let mut python = queue
            .lab
            .with_surroundings(Command::new("/usr/bin/python3"));
        python.env("FUMEHOOD_DB", &queue.url);
        python
            .args(["-c", deaf])
            .arg(plain_user::binary())
            .args(args);
        finish(python).good();
    }
    assert_eq!(queue.ends("queued"), "succeeded|exit");
}

/// F5: on SQLite, a worker that was to work until nothing is queued left, one time of several, while the next attempt of
/// what its dead runners had run was.
fn idle_with_a_retry() {
    let queue = Queue {
        lab: Lab::new(),
        url: String::new(),
    };
    let lab = &queue.lab;
    let ids = ["one", "two", "three"];
    for id in ids {
        let script = "touch up; sleep 2";
        let words = ["--retries", "1", "--id", id, "--", "sh", "-c", script];
        lab.ask(["submit"].iter().chain(&words)).good();
    }
    let mut command = lab.fumehood();
    command.args(["worker", "--slots", "4", "--memory", "1G", "--until-idle"]);
    let worker = Worker::start(command, lab);
    for id in ids {
        queue.wait_until_up(id);
        kill_process(queue.runner_of(id), Signal::KILL).unwrap();
    }
    worker.end();
    let rows = lab.sql("SELECT id, attempt, state FROM attempts ORDER BY attempt, id");
    let states: Vec<&str> = rows.iter().map(|row| row[2].as_str().unwrap()).collect();
    assert_eq!(states[..3], ["error"; 3], "{rows:?}");
    assert_eq!(states[3..], ["succeeded"; 3], "{rows:?}");
    lab.assert_nothing_left();
}

/// A queue whose database can be away, for those who use it by this address.
struct Front {
    queue: Queue,
    direct: Queue,
    link: PathBuf,
    socket: PathBuf,
}

impl Front {
    fn new() -> Front {
        let mut queue = Queue::new();
        let direct = Queue {
            lab: Lab::new(),
            url: queue.url.clone(),
        };
        let dir = queue.lab.path("front");
        std::fs::create_dir(&dir).unwrap();
        let (_, rest) = queue.url.split_once("host=").unwrap();
        let (host, _) = rest.split_once('&').unwrap();
        let socket = Path::new(host).join(".s.PGSQL.5432");
        queue.url = queue.url.replace(host, dir.to_str().unwrap());
        let link = dir.join(".s.PGSQL.5432");
        symlink(&socket, &link).unwrap();
        Front {
            queue,
            direct,
            link,
            socket,
        }
    }

    /// As a server that is stopped: nobody is connected, and nobody can be.
    fn go_away(&self) {
        std::fs::remove_file(&self.link).unwrap();
        self.direct.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
        );
    }

    fn come_back(&self) {
        symlink(&self.socket, &self.link).unwrap();
    }
}

/// F6: it ended at once when its last runner did, and what that had left for want of a database stayed `running` for ever.
fn idle_while_away() {
    let front = Front::new();
    let queue = &front.queue;
    queue.submit_gated("late", &[]);
    let worker = queue.worker(&["--slots", "2", "--until-idle"]);
    queue.wait_until_up("late");
    front.go_away();
    queue.let_go("late");
    eventually("its end waits for the database", || {
        queue.lab.home.join("pending/late").exists()
    });
    worker.wait_until_it_says("cannot be used");
    assert_eq!(front.direct.ends("late"), "running|");
    front.come_back();
    worker.end();
    assert_eq!(queue.ends("late"), "succeeded|exit");
    assert_eq!(names_in(&queue.lab.home.join("pending")), [""; 0]);
}

/// F14: attempts that had not begun ended for good as `not_started`, because the server was restarted at that moment.
fn away_before_the_start() {
    let front = Front::new();
    let queue = &front.queue;
    queue.lab.write("project/input", "input");
    let options = ["--retries", "0", "--input", "input"];
    queue.submit("early", &options, &["--", "cat", "input"]);
    // Whoever fetches an input has to wait, and says so: it has claimed, and has not begun.
    let mut holder = Command::new("psql");
    holder.args(["-X", "-q", "-d", &front.direct.url, "-c"]);
    holder.arg("BEGIN; LOCK TABLE fumehood.blobs IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(600)");
    let holder = Live::start(holder);
    let locks = |granted: &str| {
        let sql = format!(
            "SELECT COUNT(*) > 0 FROM pg_locks WHERE relation = 'blobs'::regclass AND {granted}"
        );
        front.direct.sql(&sql) == "t"
    };
    eventually("it is held", || locks("granted"));
    let worker = queue.worker(&["--slots", "1", "--until-idle"]);
    eventually("the runner waits", || locks("NOT granted"));
    front.go_away();
    holder.end();
    worker.wait_until_it_says("cannot be used");
    front.come_back();
    worker.end();
    assert_eq!(queue.ends("early"), "succeeded|exit");
}

/// F15: a record that a power cut had torn was taken for one that would be finished, so its attempt was `running` for ever.
fn torn_record() {
    let queue = Queue::new();
    queue.submit_gated("torn", &["--retries", "0"]);
    let worker = queue.worker(&["--slots", "1", "--lease", "5s"]);
    queue.wait_until_up("torn");
    let runner = queue.runner_of("torn");
    worker.kill();
    kill_process(runner, Signal::KILL).unwrap();
    std::fs::write(queue.lab.home.join("runs/torn/1/run.json"), "").unwrap();
    let worker = queue.worker(&["--slots", "1", "--lease", "5s"]);
    // Half a minute after its lease, by design: the database may have been away for everybody.
    eventually("it is given up", || {
        queue.ends("torn") == "error|runner_lost"
    });
    queue.submit("good", &[], &["--", "true"]);
    eventually("others are served", || {
        queue.ends("good") == "succeeded|exit"
    });
    worker.kill();
}

/// Runner and worker were killed and the attempt was ended by `gc`, which erased the secret in the database. The order in the slot
/// had it still, until a worker of the same name was started.
fn secret_in_a_slot() {
    let queue = Queue::new();
    let secret = ["--env", "WORD=marker-secret", "--secret-env", "WORD"];
    queue.submit_gated("told", &[&secret[..], &["--retries", "0"]].concat());
    let worker = queue.worker(&[]);
    queue.wait_until_up("told");
    let runner = queue.runner_of("told");
    worker.kill();
    let order = queue.lab.home.join("workers/default/slots/0/order");
    let holds = || {
        std::fs::read_to_string(&order)
            .unwrap()
            .contains("marker-secret")
    };
    queue.ask(&["gc"]).good();
    assert!(holds(), "its runner lives");
    kill_process(runner, Signal::KILL).unwrap();
    eventually("gc ends it", || {
        queue.ask(&["gc"]);
        queue.ends("told") == "error|runner_lost"
    });
    assert!(!holds());
}
