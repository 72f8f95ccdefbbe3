//! Submissions: a worker reads what the client stored as the same request, and refuses what no client writes.

use super::*;
use crate::request::{QueueWriters, RequestOrigin};
use store::types::submission::{
    InputItem, Submission, SubmittedCommand, SubmittedSetting as Stored, VERSION,
};

impl TestConfig {
    fn submit(&self, options: &[&str]) -> Result<ResolvedSubmission, ConfigError> {
        let command = Command::Argv(vec!["true".into()]);
        SubmissionConfig::new(given(options), &self.sources)?.resolve(command, Vec::new())
    }

    fn take(&self, submission: &Submission) -> Result<Resolved, ConfigError> {
        let worker = WorkerSettings::read(GivenSettings::new(), &self.sources)?;
        Ok(Resolved {
            request: worker.request(submission, &self.path("staged"))?,
            presentation: Presentation::default(),
            record: worker.record,
        })
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
    let config = TestConfig::new().var("TOKEN", "t");
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
    let asked = config.submit(&options).unwrap();
    assert_eq!(asked.queue_options.priority, 7);
    assert_eq!(asked.queue_options.retries, 0);
    let ends = [store::State::Failed, store::State::TimedOut];
    assert_eq!(asked.queue_options.retry_on, ends);
    assert_eq!(asked.queue_options.key.as_deref(), Some("k"));
    assert_eq!(asked.queue_options.queue_max, 200_000);
    let mut submission = submission([]);
    submission.settings = asked.settings.clone();
    submission.id = asked.request.id.clone();
    let json = submission.write().unwrap();
    let again = Submission::read(&json, "x").unwrap();
    assert_eq!(again, submission);
    let taken = config.take(&again).unwrap().request;
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
fn settings_that_are_only_for_run_are_not_submitted() {
    let config = TestConfig::new();
    for options in [
        &["--to", "x"][..],
        &["--to", "x", "--force"],
        &["--workspace-root", "/srv"],
        &["--artifacts", "/srv"],
        &["--store-quota", "1G"],
        &["--free-reserve", "1G"],
    ] {
        let message = chain(&config.submit(options).unwrap_err());
        assert!(message.contains("cannot be submitted"), "{message}");
    }
    // In a file the setting is meant for other runs.
    let config = config.user("workspace_root = \"/srv\"\nfree_reserve = \"1G\"\nquiet = true\n");
    let asked = config.submit(&["--memory", "32M"]).unwrap();
    assert_eq!(asked.settings.keys().collect::<Vec<_>>(), ["memory"]);
    let odd = OsString::from_vec(vec![b'A', b'=', 0xff]);
    let submitter = SubmissionConfig::new(vec![(Key::Env, vec![odd])], &config.sources).unwrap();
    let command = Command::Argv(vec!["true".into()]);
    let message = chain(&submitter.resolve(command, Vec::new()).unwrap_err());
    assert!(message.contains("not UTF-8"), "{message}");
}

#[test]
fn a_line_wins_over_options_and_lists_add_up() {
    let config = TestConfig::new();
    let given = vec![
        (Key::Memory, vec!["32M".into()]),
        (Key::Env, vec!["A=1".into()]),
    ];
    let submitter = SubmissionConfig::new(given, &config.sources).unwrap();
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
fn a_setting_that_a_submission_may_not_have_is_refused() {
    let config = TestConfig::new();
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
        config.refuses(name, text("/srv"), &[name, "may not be set there"]);
    }
    config.refuses(
        "memroy",
        Stored::Number(1),
        &["memroy", "did you mean `memory`?"],
    );
    config.refuses("post_process", text("/bin/sh"), &["unknown setting"]);
    config.refuses("", text(""), &["unknown setting"]);
    config.refuses(&"x".repeat(1 << 20), text(""), &["unknown setting"]);
}

#[test]
fn values_that_no_client_writes_are_refused() {
    let config = TestConfig::new();
    config.refuses(
        "memory",
        Stored::Number(0),
        &["`memory` of the submission", "16 MiB"],
    );
    config.refuses("memory", Stored::Number(u64::MAX), &["must be from"]);
    config.refuses("memory", text("64M"), &["must be a number"]);
    config.refuses("memory", Stored::Off, &["memory"]);
    config.refuses("grace", Stored::Number(u64::MAX), &["must be from"]);
    config.refuses("max_depth", Stored::Number(1 << 40), &["must be from"]);
    config.refuses("isolation", text("none"), &["one of"]);
    config.refuses("network", text("host"), &["one of"]);
    config.refuses("keep", Stored::Switch(true), &["must be a text"]);
    config.refuses("data", text("data"), &["absolute"]);
    config.refuses("data", text("/a\0b"), &["NUL"]);
    config.refuses("data", text(""), &["empty"]);
    config.refuses("project", text("x/../y"), &["absolute"]);
    config.refuses("read", texts(&["etc/passwd"]), &["absolute"]);
    config.refuses("read", texts(&["/srv:/proc/x"]), &["outside /proc"]);
    config.refuses("read", texts(&["/srv:/a/../b"]), &["without `..`"]);
    config.refuses("read", text("/srv"), &["must be a list"]);
    config.refuses(
        "read",
        Stored::List(vec!["/srv".into(); 1001]),
        &["more than 1000"],
    );
    config.refuses(
        "allow_degraded",
        texts(&["everything"]),
        &["there is no limit"],
    );
    config.refuses("output", texts(&["/etc/*"]), &["globs"]);
    config.refuses("env", texts(&["FUMEHOOD_DB=x"]), &["reserved"]);
    config.refuses("env", texts(&["1A=x"]), &["not a variable's name"]);
    config.refuses("env", texts(&["A=\0"]), &["NUL"]);
}

/// A name alone would pass on the worker's own variable, such as the password of its database.
#[test]
fn no_variable_of_the_workers_is_lent() {
    let config = TestConfig::new()
        .var("PGPASSWORD", "secret")
        .var("FUMEHOOD_TIMEOUT", "5s");
    config.refuses("env", texts(&["PGPASSWORD"]), &["variables of the worker"]);
    config.refuses(
        "env",
        texts(&["A=1", "PGPASSWORD"]),
        &["variables of the worker"],
    );
    let request = config.take(&submission([])).unwrap().request;
    assert!(request.env.is_empty());
    // The worker's files and variables do not set what a submission may set, either.
    assert_eq!(request.limits, RequestedLimits::default());
    let config = TestConfig::new().user("memory = \"1G\"\nread = [\"/root\"]\nenv = [\"A=1\"]\n");
    let request = config.take(&submission([])).unwrap().request;
    assert_eq!(request.limits.memory_bytes, None);
    assert!(request.reads.is_empty() && request.env.is_empty());
}

#[test]
fn the_workers_own_settings_override_the_submission() {
    let config = TestConfig::new()
        .user("workspace_root = \"/srv/w\"\nfree_reserve = \"2G\"\nsecret_env = [\"A\"]\nisolation = \"full\"\n")
        .var("FUMEHOOD_DB", "sqlite:/srv/x.db");
    let taken = config
        .take(&submission([("isolation", text("landlock"))]))
        .unwrap();
    assert_eq!(taken.request.workspace_root, Path::new("/srv/w"));
    assert_eq!(taken.record.free_reserve_bytes, 2 << 30);
    assert_eq!(taken.record.db.unwrap().text, "sqlite:/srv/x.db");
    assert_eq!(taken.request.secret_env, ["A"]);
    assert_eq!(taken.request.floor, IsolationLevel::Full);
    // The worker does not read a project's file, which the submitter could have written.
    let config = TestConfig::new().project("pids = 99\n");
    let project = config.path("project").to_str().unwrap().to_owned();
    let request = config
        .take(&submission([("project", text(&project))]))
        .unwrap()
        .request;
    assert_eq!(request.limits.pids.value, 1024);
    assert_eq!(request.project, config.path("project"));
}

#[test]
fn the_workers_policy_bounds_a_submission() {
    let config = TestConfig::new().policy(
        "[floor]\nlevel = \"full\"\n[ceilings]\nmemory = \"1G\"\ntimeout = \"1h\"\nidle_timeout = \"1h\"\npriority = 5\n\
         [read]\nroots = [\"/srv/data\"]\n[degraded]\nallow = [\"pids\"]\n[env]\npass = [\"LANG\"]\n",
    );
    config.refuses("isolation", text("landlock"), &["below the floor"]);
    config.refuses(
        "memory",
        Stored::Number(2 << 30),
        &["above the ceiling of 1 GiB"],
    );
    config.refuses("idle_timeout", Stored::Off, &["above the ceiling"]);
    config.refuses("allow_degraded", texts(&["memory"]), &["degraded.allow"]);
    config.refuses("shared_memory", text("host"), &["/dev/shm"]);
    let request = config
        .take(&submission([("allow_degraded", texts(&["pids"]))]))
        .unwrap()
        .request;
    assert_eq!(request.limits.memory_bytes.unwrap().value, 1 << 30);
    assert_eq!(request.readable_roots, Some(vec!["/srv/data".into()]));
    assert_eq!(request.floor, IsolationLevel::Full);
    let message = chain(&config.submit(&["--priority", "6"]).unwrap_err());
    assert!(message.contains("above the ceiling of 5"), "{message}");
}

#[test]
fn only_a_private_file_is_our_own_queue() {
    let config = TestConfig::new();
    let writers = |config: &TestConfig| match config.take(&submission([])).unwrap().request.asked_by
    {
        RequestOrigin::Queue { writers, .. } => writers,
        RequestOrigin::Caller => panic!("not queued"),
    };
    let mut plain = TestConfig::new();
    plain.sources.uid = rustix::process::geteuid().as_raw().max(1);
    plain.sources.user_config = None;
    assert_eq!(writers(&plain), QueueWriters::OnlyThisUser);
    let plain = plain.var("FUMEHOOD_DB", "postgres://me@db.example/x");
    assert_eq!(writers(&plain), QueueWriters::OtherUsers);
    let file = config.write("project/x.db", "");
    let url = format!("sqlite:{}", file.display());
    let uid = plain.sources.uid;
    if rustix::process::geteuid().is_root() {
        assert_eq!(
            writers(&config),
            QueueWriters::OtherUsers,
            "root's own file, and root"
        );
        std::os::unix::fs::chown(&file, Some(uid), None).unwrap();
    }
    let plain = TestConfig { ..plain }.var("FUMEHOOD_DB", &url);
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
fn a_submission_of_another_user_gets_the_hosts_shared_memory_only_by_policy() {
    let config = TestConfig::new().var("FUMEHOOD_DB", "postgres://me@db.example/x");
    config.refuses(
        "shared_memory",
        text("host"),
        &["/dev/shm", "operator's policy"],
    );
    let config = config.policy("[floor]\nlevel = \"landlock\"\nshared_memory = \"host\"\n");
    let request = config
        .take_with("shared_memory", text("host"))
        .unwrap()
        .request;
    assert_eq!(request.shared_memory, SharedMemory::Host);
}

#[test]
fn inputs_come_from_where_they_were_laid_out() {
    let config = TestConfig::new();
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
    let request = config.take(&submission).unwrap().request;
    let staged = config.path("staged");
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
    assert!(config.take(&submission).is_err());
}

/// Set in the child process of the test below.
const CHILD_VARIABLE: &str = "FUMEHOOD_TEST_PRINT_REQUEST";

/// The test starts itself in a process whose variables, home and working directory all ask for something, and compares
/// the requests that the two processes make.
#[test]
fn nothing_of_the_process_gets_into_the_request_of_a_submission() {
    let sources = Sources {
        env: BTreeMap::new(),
        cwd: "/".into(),
        uid: rustix::process::geteuid().as_raw(),
        user_config: None,
        policy: "/nonexistent/policy.toml".into(),
        policy_owner_uid: 0,
    };
    let worker = WorkerSettings::read(GivenSettings::new(), &sources).unwrap();
    let submission = submission([
        ("read", texts(&["/srv/a:/mnt/b", "/srv/c"])),
        ("env", texts(&["A=1"])),
        ("memory", Stored::Number(1 << 30)),
    ]);
    let request = worker.request(&submission, Path::new("/staged")).unwrap();
    let shown = format!("request: {request:?}\n");
    if std::env::var_os(CHILD_VARIABLE).is_some() {
        print!("{shown}");
        return;
    }
    let config = TestConfig::new().project("timeout = 1\npids = 9\nenv = [\"B=2\"]\ndata = \"x\"");
    fs::create_dir_all(config.path("user/fumehood")).unwrap();
    config.write("user/fumehood/config.toml", "timeout = 1\nread = [\"/\"]\n");
    let name =
        "settings::tests::queued::nothing_of_the_process_gets_into_the_request_of_a_submission";
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", name])
        .env(CHILD_VARIABLE, "1")
        .env("XDG_CONFIG_HOME", config.path("user"))
        .env("HOME", config.path("user"))
        .env("FUMEHOOD_HOME", config.path("user"))
        .envs([
            ("A", "2"),
            ("PGPASSWORD", "secret"),
            ("FUMEHOOD_TIMEOUT", "1s"),
            ("FUMEHOOD_PROJECT", "/root"),
            ("FUMEHOOD_DATA", "/root"),
            ("FUMEHOOD_ISOLATION", "landlock"),
            ("FUMEHOOD_SHARED_MEMORY", "host"),
            ("FUMEHOOD_ALLOW_DEGRADED", "memory"),
            ("FUMEHOOD_WORKSPACE_ROOT", "/root"),
            ("FUMEHOOD_DB", "postgres://me@db.example/x"),
            ("FUMEHOOD_NO_SUCH_SETTING", "1"),
        ])
        .current_dir(config.path("project"))
        .output()
        .unwrap();
    let printed = String::from_utf8(child.stdout).unwrap();
    assert!(
        child.status.success() && printed.contains(&shown),
        "{printed}"
    );
}

#[test]
fn a_reservation_bounds_what_a_submission_gets() {
    let config = TestConfig::new();
    let reserved = ReservedCapacity {
        memory_bytes: 1 << 30,
        cpu_milli: 500,
        cpu_milli_max: 4000,
    };
    let within = |settings: &[(&str, Stored)]| {
        let mut submission = submission([]);
        let named = |(name, value): &(&str, Stored)| ((*name).to_owned(), value.clone());
        submission.settings = settings.iter().map(named).collect();
        let request = config.take(&submission).unwrap().request;
        request.within_reservation(reserved)
    };
    let open = |value| {
        Some(RequestedLimit {
            value,
            explicit: false,
        })
    };
    let limits = within(&[]).unwrap().limits.clone();
    assert_eq!(
        (limits.memory_bytes, limits.cpu_milli),
        (open(1 << 30), open(4000))
    );
    let asks = [
        ("memory", Stored::Number(1 << 29)),
        ("cpus", Stored::Number(500)),
    ];
    let limits = within(&asks).unwrap().limits.clone();
    assert_eq!(limits.memory_bytes, Some(super::asked(1 << 29)));
    assert_eq!(limits.cpu_milli, Some(super::asked(500)));
    for more in [
        ("memory", Stored::Number((1 << 30) + 1)),
        ("cpus", Stored::Number(501)),
    ] {
        assert!(matches!(within(&[more]), Err(ConfigError::OverReservation)));
    }
}
