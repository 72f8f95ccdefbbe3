//! Submissions: what the client stores a worker reads as the same request, and what no client would write it refuses.

use super::*;
use crate::cli::args::{StoreArgs, SubmitArgs};
use engine::request::{QueueWriters, RequestOrigin};
use store::types::submission::{
    InputItem, Submission, SubmittedCommand, SubmittedSetting as Stored, VERSION,
};

impl Bench {
    fn submit(&self, options: &[&str]) -> Result<ToSubmit, ConfigError> {
        #[derive(clap::Parser)]
        struct Program {
            #[command(flatten)]
            submit: SubmitArgs,
        }
        let argv: Vec<OsString> = ["fumehood"]
            .iter()
            .chain(options)
            .chain(&["--", "true"])
            .map(Into::into)
            .collect();
        let program = <Program as clap::Parser>::try_parse_from(&argv).unwrap();
        let sources = Sources {
            argv: argv.clone(),
            ..self.sources.clone()
        };
        let command = program.submit.command(&argv)?;
        Submitter::new(program.submit.given(), &sources)?.resolve(command, Vec::new())
    }

    fn take(&self, submission: &Submission) -> Result<Resolved, ConfigError> {
        let staged = self.path("staged");
        queued(submission, &staged, &StoreArgs::default(), &self.sources)
    }

    fn take_with(&self, name: &str, value: Stored) -> Result<Resolved, ConfigError> {
        self.take(&submission([(name, value)]))
    }

    fn refuses(&self, name: &str, value: Stored, words: &[&str]) {
        let shown = format!("{name} = {value:?}");
        let Err(error) = self.take_with(name, value) else {
            panic!("{shown} was taken");
        };
        let message = chain(&error);
        for word in words {
            assert!(
                message.contains(word),
                "{shown}: {word:?} not in {message:?}"
            );
        }
    }
}

fn submission<const N: usize>(settings: [(&str, Stored); N]) -> Submission {
    Submission {
        version: VERSION,
        id: AnalysisId::new("q").unwrap(),
        command: SubmittedCommand::Argv(vec!["true".into()]),
        settings: settings
            .map(|(name, value)| (name.to_owned(), value))
            .into(),
        inputs: Vec::new(),
        stdin: None,
    }
}

fn text(value: &str) -> Stored {
    Stored::Text(value.into())
}

fn texts(values: &[&str]) -> Stored {
    Stored::List(values.iter().map(|v| (*v).to_owned()).collect())
}

#[test]
fn a_worker_reads_what_the_client_stored() {
    let bench = Bench::new().var("TOKEN", "t");
    let options = [
        "--id",
        "x",
        "--timeout",
        "1.5s",
        "--cpu-time",
        "off",
        "--memory",
        "64M",
        "--cpus",
        "0.25",
        "--pids",
        "77",
        "--disk",
        "2G",
        "--files",
        "99",
        "--env",
        "A=b=c",
        "--env",
        "TOKEN",
        "--read",
        "/usr/share:/mnt/s",
        "--data",
        "/srv/data",
        "--output",
        "*.csv",
        "--expect",
        "a.csv",
        "--keep",
        "on-failure",
        "--keep-for",
        "2h",
        "--workspace",
        "memory",
        "--isolation",
        "full",
        "--level",
        "full",
        "--allow-degraded",
        "pids",
        "--max-depth",
        "3",
        "--inline-max",
        "1K",
        "--secret-env",
        "TOK*",
        "--runtime",
        "/opt/r",
        "--priority",
        "7",
        "--retries",
        "0",
        "--retry-on",
        "failed,timed_out",
        "--key",
        "k",
    ];
    let asked = bench.submit(&options).unwrap();
    assert_eq!(asked.queueing.priority, 7);
    assert_eq!(asked.queueing.retries, 0);
    let ends = [store::State::Failed, store::State::TimedOut];
    assert_eq!(asked.queueing.retry_on, ends);
    assert_eq!(asked.queueing.key.as_deref(), Some("k"));
    assert_eq!(asked.queueing.queue_max, 200_000);
    let mut submission = submission([]);
    submission.settings = asked.settings.clone();
    submission.id = asked.request.id.clone();
    let json = submission.write().unwrap();
    let again = Submission::read(&json, "x").unwrap();
    assert_eq!(again, submission);
    let taken = bench.take(&again).unwrap().request;
    let here = asked.request;
    assert_eq!(taken.limits, here.limits);
    assert_eq!(taken.collection, here.collection);
    assert_eq!(
        (&taken.env, &taken.reads, &taken.data, &taken.runtime),
        (&here.env, &here.reads, &here.data, &here.runtime)
    );
    assert_eq!(
        (
            taken.keep,
            taken.keep_for_ms,
            taken.workspace_kind,
            taken.floor,
            taken.level
        ),
        (
            here.keep,
            here.keep_for_ms,
            here.workspace_kind,
            here.floor,
            here.level
        )
    );
    assert_eq!(taken.allow_degraded, here.allow_degraded);
    assert_eq!(taken.secret_env, here.secret_env);
    assert_eq!(taken.id, here.id);
}

#[test]
fn what_is_only_for_run_is_not_submitted() {
    let bench = Bench::new();
    for options in [
        &["--to", "x"][..],
        &["--to", "x", "--force"],
        &["--workspace-root", "/srv"],
        &["--artifacts", "/srv"],
        &["--store-quota", "1G"],
        &["--free-reserve", "1G"],
    ] {
        let message = chain(&bench.submit(options).unwrap_err());
        assert!(message.contains("cannot be submitted"), "{message}");
    }
    // In a file it is meant for other runs.
    let bench = bench.user("workspace_root = \"/srv\"\nfree_reserve = \"1G\"\nquiet = true\n");
    let asked = bench.submit(&["--memory", "32M"]).unwrap();
    assert_eq!(asked.settings.keys().collect::<Vec<_>>(), ["memory"]);
    let odd = OsString::from_vec(vec![b'A', b'=', 0xff]);
    let submitter = Submitter::new(vec![(Key::Env, vec![odd])], &bench.sources).unwrap();
    let command = Command::Argv(vec!["true".into()]);
    let message = chain(&submitter.resolve(command, Vec::new()).unwrap_err());
    assert!(message.contains("not UTF-8"), "{message}");
}

#[test]
fn a_line_wins_over_options_and_lists_add_up() {
    let bench = Bench::new();
    let given = vec![
        (Key::Memory, vec!["32M".into()]),
        (Key::Env, vec!["A=1".into()]),
    ];
    let submitter = Submitter::new(given, &bench.sources).unwrap();
    let line = vec![
        (Key::Memory, vec!["64M".into()]),
        (Key::Env, vec!["B=2".into()]),
    ];
    let command = || Command::Argv(vec!["true".into()]);
    let asked = submitter.resolve(command(), line).unwrap();
    assert_eq!(
        asked.request.limits.memory_bytes,
        Some(super::asked(64 << 20))
    );
    assert_eq!(asked.request.env.len(), 2);
    let plain = submitter.resolve(command(), Vec::new()).unwrap();
    assert_eq!(
        plain.request.limits.memory_bytes,
        Some(super::asked(32 << 20))
    );
}

#[test]
fn what_a_submission_may_not_say_is_refused() {
    let bench = Bench::new();
    for name in [
        "workspace_root",
        "db",
        "artifacts",
        "to",
        "force",
        "in",
        "replace",
        "json",
        "quiet",
        "store_quota",
        "free_reserve",
        "id",
        "input",
        "stdin",
        "priority",
        "key",
        "queue_max",
    ] {
        bench.refuses(name, text("/srv"), &[name, "may not be set there"]);
    }
    bench.refuses(
        "memroy",
        Stored::Number(1),
        &["memroy", "did you mean `memory`?"],
    );
    bench.refuses("post_process", text("/bin/sh"), &["unknown setting"]);
    bench.refuses("", text(""), &["unknown setting"]);
    bench.refuses(&"x".repeat(1 << 20), text(""), &["unknown setting"]);
}

#[test]
fn values_that_no_client_writes_are_refused() {
    let bench = Bench::new();
    bench.refuses(
        "memory",
        Stored::Number(0),
        &["`memory` of the submission", "16 MiB"],
    );
    bench.refuses("memory", Stored::Number(u64::MAX), &["must be from"]);
    bench.refuses("memory", text("64M"), &["must be a number"]);
    bench.refuses("memory", Stored::Off, &["memory"]);
    bench.refuses("grace", Stored::Number(u64::MAX), &["must be from"]);
    bench.refuses("max_depth", Stored::Number(1 << 40), &["must be from"]);
    bench.refuses("isolation", text("none"), &["one of"]);
    bench.refuses("network", text("host"), &["one of"]);
    bench.refuses("keep", Stored::Switch(true), &["must be a text"]);
    bench.refuses("data", text("data"), &["absolute"]);
    bench.refuses("data", text("/a\0b"), &["NUL"]);
    bench.refuses("data", text(""), &["empty"]);
    bench.refuses("project", text("x/../y"), &["absolute"]);
    bench.refuses("read", texts(&["etc/passwd"]), &["absolute"]);
    bench.refuses("read", texts(&["/srv:/proc/x"]), &["outside /proc"]);
    bench.refuses("read", texts(&["/srv:/a/../b"]), &["without `..`"]);
    bench.refuses("read", text("/srv"), &["must be a list"]);
    bench.refuses(
        "read",
        Stored::List(vec!["/srv".into(); 1001]),
        &["more than 1000"],
    );
    bench.refuses(
        "allow_degraded",
        texts(&["everything"]),
        &["there is no limit"],
    );
    bench.refuses("output", texts(&["/etc/*"]), &["globs"]);
    bench.refuses("env", texts(&["FUMEHOOD_DB=x"]), &["reserved"]);
    bench.refuses("env", texts(&["1A=x"]), &["not a variable's name"]);
    bench.refuses("env", texts(&["A=\0"]), &["NUL"]);
}

/// A name alone would hand on the worker's own variable, its database's password among them.
#[test]
fn no_variable_of_the_workers_is_lent() {
    let bench = Bench::new()
        .var("PGPASSWORD", "secret")
        .var("FUMEHOOD_TIMEOUT", "5s");
    bench.refuses("env", texts(&["PGPASSWORD"]), &["variables of the worker"]);
    bench.refuses(
        "env",
        texts(&["A=1", "PGPASSWORD"]),
        &["variables of the worker"],
    );
    let request = bench.take(&submission([])).unwrap().request;
    assert!(request.env.is_empty());
    // Nor its files' nor its variables' say in what a submission may set.
    assert_eq!(request.limits, RequestedLimits::default());
    let bench = Bench::new().user("memory = \"1G\"\nread = [\"/root\"]\nenv = [\"A=1\"]\n");
    let request = bench.take(&submission([])).unwrap().request;
    assert_eq!(request.limits.memory_bytes, None);
    assert!(request.reads.is_empty() && request.env.is_empty());
}

#[test]
fn what_is_the_workers_own_holds() {
    let bench = Bench::new()
        .user("workspace_root = \"/srv/w\"\nfree_reserve = \"2G\"\nsecret_env = [\"A\"]\nisolation = \"full\"\n")
        .var("FUMEHOOD_DB", "sqlite:/srv/x.db");
    let taken = bench
        .take(&submission([("isolation", text("landlock"))]))
        .unwrap();
    assert_eq!(taken.request.workspace_root, Path::new("/srv/w"));
    assert_eq!(taken.record.free_reserve_bytes, 2 << 30);
    assert_eq!(taken.record.db.unwrap().text, "sqlite:/srv/x.db");
    assert_eq!(taken.request.secret_env, ["A"]);
    assert_eq!(taken.request.floor, IsolationLevel::Full);
    // A project's file, which the submitter could have written, is not heard.
    let bench = Bench::new().project("pids = 99\n");
    let project = bench.path("project").to_str().unwrap().to_owned();
    let request = bench
        .take(&submission([("project", text(&project))]))
        .unwrap()
        .request;
    assert_eq!(request.limits.pids.value, 1024);
    assert_eq!(request.project, bench.path("project"));
}

#[test]
fn the_workers_policy_bounds_a_submission() {
    let bench = Bench::new().policy(
        "[floor]\nlevel = \"full\"\n[ceilings]\nmemory = \"1G\"\ntimeout = \"1h\"\nidle_timeout = \"1h\"\npriority = 5\n\
         [read]\nroots = [\"/srv/data\"]\n[degraded]\nallow = [\"pids\"]\n[env]\npass = [\"LANG\"]\n",
    );
    bench.refuses("isolation", text("landlock"), &["below the floor"]);
    bench.refuses(
        "memory",
        Stored::Number(2 << 30),
        &["above the ceiling of 1 GiB"],
    );
    bench.refuses("idle_timeout", Stored::Off, &["above the ceiling"]);
    bench.refuses("allow_degraded", texts(&["memory"]), &["degraded.allow"]);
    bench.refuses("shared_memory", text("host"), &["/dev/shm"]);
    let request = bench
        .take(&submission([("allow_degraded", texts(&["pids"]))]))
        .unwrap()
        .request;
    assert_eq!(request.limits.memory_bytes.unwrap().value, 1 << 30);
    assert_eq!(request.readable_roots, Some(vec!["/srv/data".into()]));
    assert_eq!(request.floor, IsolationLevel::Full);
    let message = chain(&bench.submit(&["--priority", "6"]).unwrap_err());
    assert!(message.contains("above the ceiling of 5"), "{message}");
}

#[test]
fn only_a_private_file_is_our_own_queue() {
    let bench = Bench::new();
    let writers = |bench: &Bench| match bench.take(&submission([])).unwrap().request.asked_by {
        RequestOrigin::Queue { writers, .. } => writers,
        RequestOrigin::Caller => panic!("not queued"),
    };
    let mut plain = Bench::new();
    plain.sources.uid = rustix::process::geteuid().as_raw().max(1);
    plain.sources.user_config = None;
    assert_eq!(writers(&plain), QueueWriters::OnlyThisUser);
    let plain = plain.var("FUMEHOOD_DB", "postgres://me@db.example/x");
    assert_eq!(writers(&plain), QueueWriters::OtherUsers);
    let file = bench.write("project/x.db", "");
    let url = format!("sqlite:{}", file.display());
    let uid = plain.sources.uid;
    if rustix::process::geteuid().is_root() {
        assert_eq!(
            writers(&bench),
            QueueWriters::OtherUsers,
            "root's own file, and root"
        );
        std::os::unix::fs::chown(&file, Some(uid), None).unwrap();
    }
    let plain = Bench { ..plain }.var("FUMEHOOD_DB", &url);
    assert_eq!(writers(&plain), QueueWriters::OnlyThisUser);
    chmod(&file, 0o664);
    assert_eq!(
        writers(&plain),
        QueueWriters::OtherUsers,
        "its group writes it"
    );
    chmod(&file, 0o644);
    chmod(file.parent().unwrap(), 0o777);
    assert_eq!(
        writers(&plain),
        QueueWriters::OtherUsers,
        "anybody puts another in its place"
    );
    let gone = plain.var("FUMEHOOD_DB", "sqlite:/nowhere/x.db");
    assert_eq!(writers(&gone), QueueWriters::OtherUsers);
}

#[test]
fn a_stranger_gets_the_hosts_shared_memory_only_by_policy() {
    let bench = Bench::new().var("FUMEHOOD_DB", "postgres://me@db.example/x");
    bench.refuses(
        "shared_memory",
        text("host"),
        &["/dev/shm", "operator's policy"],
    );
    let bench = bench.policy("[floor]\nlevel = \"landlock\"\nshared_memory = \"host\"\n");
    let request = bench
        .take_with("shared_memory", text("host"))
        .unwrap()
        .request;
    assert_eq!(request.shared_memory, SharedMemory::Host);
}

#[test]
fn inputs_come_from_where_they_were_laid_out() {
    let bench = Bench::new();
    let hash = store::types::manifest::ContentHash::of(b"x");
    let file = |name: &str| InputItem::File {
        name: name.into(),
        blake3: hash,
        executable: false,
    };
    let mut submission = submission([]);
    submission.inputs = vec![
        file("a.py"),
        InputItem::Directory { name: "d".into() },
        file("d/x"),
    ];
    submission.command = SubmittedCommand::Script {
        name: "a.py".into(),
        from: "/home/me/a.py".into(),
        args: vec!["1".into()],
    };
    submission.stdin = Some(hash);
    let request = bench.take(&submission).unwrap().request;
    let staged = bench.path("staged");
    assert_eq!(
        request.command,
        Command::Script {
            script: staged.join("inputs/a.py"),
            args: vec!["1".into()]
        }
    );
    let d = Input {
        host: staged.join("inputs/d"),
        name: Some("d".into()),
    };
    assert_eq!(request.inputs, [d]);
    assert_eq!(request.stdin, Stdin::File(staged.join("stdin")));
    assert_eq!(request.project, staged.join("inputs"));
    submission.inputs = vec![file("../a.py")];
    assert!(bench.take(&submission).is_err());
}
