#![allow(clippy::unwrap_used)]

use super::entries::SettingOrigin;
use super::error::ConfigError;
use super::policy::Policy;
use super::post_process::PostProcessSettings;
use super::table::{GivenSettings, Key, SETTINGS, SettingKind};
use super::*;
use crate::request::{
    AnalysisId, Command, Input, IsolationLevel, KeepPolicy, LimitName, NamedBy, NamedDirectory,
    ReadRoot, RequestFields, RequestedLimit, RequestedLimits, Stdin, WorkspaceKind,
};
use proptest::prelude::*;
use sandbox::spec::{Layer, SharedMemory};
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

mod queued;
mod record;

/// A home, a project and a directory for a policy: real files owned by the user who runs the tests.
struct TestConfig {
    dir: tempfile::TempDir,
    sources: Sources,
}

impl TestConfig {
    fn new() -> TestConfig {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_owned();
        for name in ["project", "user", "etc"] {
            fs::create_dir(root.join(name)).unwrap();
            chmod(&root.join(name), 0o755);
        }
        let uid = rustix::process::geteuid().as_raw();
        TestConfig {
            sources: Sources {
                env: BTreeMap::new(),
                cwd: root.join("project"),
                uid,
                user_config: Some(root.join("user/config.toml")),
                policy: root.join("etc/policy.toml"),
                policy_owner_uid: uid,
            },
            dir,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        chmod(&path, 0o644);
        path
    }

    fn user(self, text: &str) -> TestConfig {
        self.write("user/config.toml", text);
        self
    }

    fn project(self, text: &str) -> TestConfig {
        self.write("project/fumehood.toml", text);
        self
    }

    fn policy(self, text: &str) -> TestConfig {
        self.write("etc/policy.toml", text);
        self
    }

    fn var(mut self, name: &str, value: &str) -> TestConfig {
        self.sources.env.insert(name.into(), value.into());
        self
    }

    fn run(&self, options: &[&str]) -> Result<Resolved, ConfigError> {
        let script = Command::Script {
            script: "a.py".into(),
            args: Vec::new(),
        };
        run_request(script, given(options), &self.sources)
    }

    fn ok(&self, options: &[&str]) -> RequestFields {
        let resolved = self.run(options);
        let resolved = resolved.unwrap_or_else(|error| panic!("{}", chain(&error)));
        RequestFields::clone(&resolved.request)
    }

    /// Checks that the request is refused with a message that contains each of `words`.
    fn fails(&self, options: &[&str], words: &[&str]) {
        let message = chain(&self.run(options).unwrap_err());
        for word in words {
            assert!(message.contains(word), "{word:?} is not in {message:?}");
        }
    }
}

/// The settings that options give. The binary's tests check that its parser gives the same.
fn given(options: &[&str]) -> GivenSettings {
    let mut given = GivenSettings::new();
    let mut words = options.iter();
    while let Some(option) = words.next() {
        let named = SETTINGS.iter().find(|setting| setting.flag() == *option);
        let setting = named.unwrap_or_else(|| panic!("no option {option}"));
        let word = match setting.kind {
            SettingKind::Switch => "true",
            _ => words.next().unwrap(),
        };
        match given.iter_mut().find(|(key, _)| *key == setting.key) {
            Some((_, words)) => words.push(word.into()),
            None => given.push((setting.key, vec![word.into()])),
        }
    }
    given
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn chain(error: &dyn Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    }
}

fn asked(value: u64) -> RequestedLimit<u64> {
    RequestedLimit {
        value,
        explicit: true,
    }
}

#[test]
fn defaults_are_those_documented() {
    let config = TestConfig::new();
    let resolved = config.run(&[]).unwrap();
    let request = resolved.request;
    assert_eq!(request.limits, RequestedLimits::default());
    assert_eq!(request.project, config.sources.cwd);
    assert_eq!(request.floor, IsolationLevel::Landlock);
    assert_eq!(request.keep, KeepPolicy::Never);
    assert_eq!(request.keep_for_ms, 86_400_000);
    assert_eq!(request.workspace_root, Path::new("/tmp"));
    assert_eq!(request.workspace_kind, WorkspaceKind::Disk);
    assert_eq!(request.stdin, Stdin::Null);
    assert_eq!(request.readable_roots, None);
    assert!(request.env.is_empty() && request.allow_degraded.is_empty());
    assert_eq!(resolved.presentation, Presentation::default());
    let Command::Script { script, .. } = &request.command else {
        panic!("script")
    };
    assert_eq!(*script, config.sources.cwd.join("a.py"));
}

#[test]
fn each_place_beats_the_weaker_ones() {
    let config = TestConfig::new().user("timeout = 10\nmemory = \"1G\"\npids = 100\ncpus = 1.5");
    assert_eq!(config.ok(&[]).limits.wall_ms, asked(10_000));
    let config = config.project("timeout = \"20s\"\nmemory = \"2G\"\npids = 200");
    assert_eq!(config.ok(&[]).limits.wall_ms, asked(20_000));
    let config = config
        .var("FUMEHOOD_TIMEOUT", "30")
        .var("FUMEHOOD_MEMORY", "3G");
    assert_eq!(config.ok(&[]).limits.wall_ms, asked(30_000));
    let limits = config.ok(&["--timeout", "40"]).limits;
    assert_eq!(limits.wall_ms, asked(40_000));
    assert_eq!(limits.memory_bytes, Some(asked(3 << 30)));
    assert_eq!(limits.pids, asked(200));
    assert_eq!(limits.cpu_milli, Some(asked(1500)));
}

#[test]
fn off_switches_a_limit_off_again() {
    let config = TestConfig::new().user("idle_timeout = \"5m\"\ncpu_time = \"1h\"");
    assert_eq!(config.ok(&[]).limits.idle_ms, Some(asked(300_000)));
    let limits = config.ok(&["--idle-timeout", "off"]).limits;
    assert_eq!(
        (limits.idle_ms, limits.cpu_ms),
        (None, Some(asked(3_600_000)))
    );
    config.fails(&["--timeout", "off"], &["--timeout", "not a duration"]);
}

#[test]
fn an_unknown_key_names_the_nearest() {
    let config = TestConfig::new().project("memroy = \"1G\"");
    config.fails(&[], &["fumehood.toml", "`memroy`", "`memory`"]);
    let config = TestConfig::new().user("cpu-time = 3");
    config.fails(&[], &["config.toml", "`cpu-time`", "`cpu_time`"]);
    TestConfig::new()
        .project("[limits]\nmemory = 1")
        .fails(&[], &["`limits`"]);
}

#[test]
fn an_unknown_variable_names_the_nearest() {
    TestConfig::new()
        .var("FUMEHOOD_TIMEOUTS", "3")
        .fails(&[], &["FUMEHOOD_TIMEOUTS", "`FUMEHOOD_TIMEOUT`"]);
    TestConfig::new()
        .var("FUMEHOOD_POLICY", "/x")
        .fails(&[], &["unknown variable FUMEHOOD_POLICY"]);
    TestConfig::new()
        .var("FUMEHOOD_DBB", "x")
        .fails(&[], &["`FUMEHOOD_DB`"]);
    let mut config = TestConfig::new();
    let odd = OsString::from_vec(b"FUMEHOOD_\xff".to_vec());
    config.sources.env.insert(odd, "x".into());
    config.fails(&[], &["unknown variable"]);
    let config = TestConfig::new()
        .var("FUMEHOOD_HOME", "x")
        .var("FUMEHOOD_LOG", "x")
        .var("FUMEHOOD_TEST_SKIP", "x")
        .var("fumehood_other", "x");
    config.ok(&[]);
}

#[test]
fn values_of_the_wrong_form_are_refused() {
    for (line, word) in [
        ("timeout = true", "a number or a string"),
        ("timeout = []", "a number or a string"),
        ("timeout = -5", "not a duration"),
        ("timeout = nan", "not a duration"),
        ("timeout = inf", "not a duration"),
        ("timeout = 0", "from 1ms"),
        ("timeout = \"366d\"", "to 365d"),
        ("timeout = 1979-05-27", "a number or a string"),
        ("cpus = 1e300", "too large"),
        ("cpus = 0", "from 0.01"),
        ("memory = \"1M\"", "from 16 MiB"),
        ("pids = 1", "from 8"),
        ("open_files = 3", "from 16"),
        ("log_limit = 1", "may not be set there"),
        ("disk = \"\"", "is empty"),
        ("data = 7", "a string"),
        ("data = \"a\\u0000b\"", "NUL"),
        ("env = \"A=1\"", "an array of strings"),
        ("env = [1]", "an array of strings"),
        ("workspace = \"ram\"", "disk, memory"),
        ("timeout = ", "TOML"),
    ] {
        TestConfig::new()
            .project(line)
            .fails(&[], &["fumehood.toml", word]);
    }
    TestConfig::new()
        .user("json = \"true\"")
        .fails(&[], &["true or false"]);
    TestConfig::new()
        .var("FUMEHOOD_TIMEOUT", "")
        .fails(&[], &["FUMEHOOD_TIMEOUT is empty"]);
    TestConfig::new()
        .var("FUMEHOOD_JSON", "yes")
        .fails(&[], &["FUMEHOOD_JSON", "true"]);
    TestConfig::new().fails(&["--network", "host"], &["--network", "none"]);
    TestConfig::new().fails(&["--id", "../x"], &["--id", "[A-Za-z0-9]"]);
    let many = format!("env = [{}]", "\"A=1\",".repeat(1001));
    TestConfig::new()
        .project(&many)
        .fails(&[], &["more than 1000"]);
}

#[test]
fn a_wrong_value_is_an_error_even_when_overridden() {
    TestConfig::new()
        .user("timeout = \"soon\"")
        .fails(&["--timeout", "3"], &["config.toml", "soon"]);
}

#[test]
fn a_project_file_cannot_widen_anything() {
    for (line, instead) in [
        ("isolation = \"full\"", "--isolation"),
        ("read = [\"/etc\"]", "--read"),
        ("input = [\".env\"]", "--input"),
        ("runtime = \"/opt\"", "--runtime"),
        ("stdin = \"secret\"", "--stdin"),
        ("allow_degraded = [\"memory\"]", "--allow-degraded"),
        ("workspace_root = \"/var/tmp\"", "--workspace-root"),
        ("keep = \"always\"", "--keep"),
        ("keep_for = \"1h\"", "--keep-for"),
        ("network = \"none\"", "--network"),
        ("project = \"x\"", "--project"),
        ("id = \"x\"", "--id"),
        ("json = true", "--json"),
        ("db = \"sqlite:/srv/x\"", "--db"),
        ("artifacts = \"out\"", "--artifacts"),
        ("inline_max = \"2M\"", "--inline-max"),
        ("store_quota = \"1G\"", "--store-quota"),
        ("free_reserve = 0", "--free-reserve"),
        ("secret_env = [\"SEED\"]", "--secret-env"),
        ("to = \"out\"", "--to"),
        ("force = true", "--force"),
        ("replace = true", "--replace"),
        ("in = \"x\"", "--in"),
        ("env = [\"A=1\", \"PGPASSWORD\"]", "--env"),
        ("data = \"/srv\"", "--data"),
        ("data = \"../other\"", "--data"),
        ("data = \"a/../../b\"", "--data"),
        ("data = \".\"", "--data"),
        ("docs = \".git\"", "--docs"),
    ] {
        let config = TestConfig::new().project(line).var("PGPASSWORD", "x");
        config.fails(&[], &["fumehood.toml", instead]);
    }
    let config =
        TestConfig::new().project("data = \"inputs/v2\"\nenv = [\"SEED=7\"]\ndocs = \"./notes\"");
    let request = config.ok(&[]);
    let by_project = |name| {
        Some(NamedDirectory {
            path: config.path(name),
            named_by: NamedBy::ProjectFile,
        })
    };
    assert_eq!(request.data, by_project("project/inputs/v2"));
    assert_eq!(request.docs, by_project("project/notes"));
    assert_eq!(request.env, [("SEED".into(), "7".into())]);
    let absolute = format!("data = {:?}", config.path("project/d"));
    assert!(config.project(&absolute).run(&[]).is_ok());
}

#[test]
fn settings_of_one_run_stand_in_no_file_or_variable() {
    TestConfig::new().user("id = \"x\"").fails(&[], &["--id"]);
    TestConfig::new()
        .user("input = [\"x\"]")
        .fails(&[], &["--input"]);
    for name in ["replace", "force"] {
        let flag = format!("--{name}");
        TestConfig::new()
            .user(&format!("{name} = true"))
            .fails(&[], &["config.toml", &flag]);
        TestConfig::new()
            .var(&format!("FUMEHOOD_{}", name.to_uppercase()), "1")
            .fails(&[], &[&flag]);
    }
    for name in ["to", "in"] {
        let flag = format!("--{name}");
        TestConfig::new()
            .user(&format!("{name} = \"x\""))
            .fails(&[], &["config.toml", &flag]);
        TestConfig::new()
            .var(&format!("FUMEHOOD_{}", name.to_uppercase()), "x")
            .fails(&[], &[&flag]);
    }
    for name in ["output", "expect"] {
        TestConfig::new()
            .var(&format!("FUMEHOOD_{}", name.to_uppercase()), "*")
            .fails(&[], &["separate", &format!("--{name}")]);
    }
    TestConfig::new()
        .var("FUMEHOOD_READ", "/etc")
        .fails(&[], &["FUMEHOOD_READ", "--read"]);
    TestConfig::new()
        .var("FUMEHOOD_STDIN", "x")
        .fails(&[], &["--stdin"]);
}

#[test]
fn the_project_can_be_named_by_variable_and_option() {
    let config = TestConfig::new();
    fs::create_dir(config.path("other")).unwrap();
    config.write("other/fumehood.toml", "pids = 77");
    let config = config
        .project("pids = 66")
        .var("FUMEHOOD_PROJECT", "../other");
    assert_eq!(config.ok(&[]).limits.pids, asked(77));
    assert_eq!(config.ok(&["--project", "."]).limits.pids, asked(66));
    config.fails(&["--project", "nowhere"], &["nowhere", "not a directory"]);
}

#[test]
fn variables_pass_by_name_or_value() {
    let config = TestConfig::new()
        .user("env = [\"A=user\", \"SEED\"]")
        .project("env = [\"A=project\", \"B==x\"]");
    let config = config.var("SEED", "7");
    let pairs = |request: RequestFields| -> Vec<String> {
        request
            .env
            .iter()
            .map(|(k, v)| format!("{}={}", k.display(), v.display()))
            .collect()
    };
    assert_eq!(pairs(config.ok(&[])), ["A=project", "B==x", "SEED=7"]);
    assert_eq!(
        pairs(config.ok(&["--env", "A=", "--env", "PATH=/x"])),
        ["A=", "B==x", "PATH=/x", "SEED=7"]
    );
    config.fails(&["--env", "MISSING"], &["--env", "MISSING"]);
    config.fails(&["--env", "FUMEHOOD_MEMORY=1"], &["reserved"]);
    for bad in ["=x", "1A=x", "A-B=1", "Ä=1", "A B"] {
        config.fails(&["--env", bad], &["not a variable's name"]);
    }
    let long = format!("A={}", "x".repeat(128 << 10));
    config.fails(&["--env", &long], &["longer than"]);
}

#[test]
fn a_suffix_follows_the_last_colon_unless_the_whole_exists() {
    let config = TestConfig::new();
    config.write("project/a:b", "");
    let cwd = config.sources.cwd.clone();
    let request = config.ok(&[
        "--read",
        "a:b",
        "--read",
        "x:y:/ref",
        "--read",
        "/opt/ref",
        "--input",
        "a:b",
        "--input",
        "fit.R:src/fit.R",
    ]);
    let read = |host: &Path, inside: Option<&str>| ReadRoot {
        host: host.into(),
        inside: inside.map(Into::into),
    };
    assert_eq!(
        request.reads,
        [
            read(&cwd.join("a:b"), None),
            read(&cwd.join("x:y"), Some("/ref")),
            read(Path::new("/opt/ref"), None),
        ]
    );
    assert_eq!(
        request.inputs[0],
        Input {
            host: cwd.join("a:b"),
            name: None
        }
    );
    assert_eq!(
        request.inputs[1],
        Input {
            host: cwd.join("fit.R"),
            name: Some("src/fit.R".into())
        }
    );
    for bad in [
        "x:",
        ":/y",
        ":",
        "x:y",
        "x:/a/../b",
        "x:/",
        "x:/proc/1",
        "x:/dev",
        "x:/sys",
    ] {
        config.fails(&["--read", bad], &["--read"]);
    }
    for bad in ["x:", ":y", "x:/y", "x:..", "x:a/../../b", "x:.", "x:./a"] {
        config.fails(&["--input", bad], &["--input"]);
    }
    assert_eq!(config.ok(&["--stdin", "-"]).stdin, Stdin::Caller);
    assert_eq!(
        config.ok(&["--stdin", "f"]).stdin,
        Stdin::File(cwd.join("f"))
    );
}

#[test]
fn files_others_can_write_are_refused() {
    for mode in [0o664, 0o646, 0o666] {
        let config = TestConfig::new().project("");
        chmod(&config.path("project/fumehood.toml"), mode);
        config.fails(&[], &["chmod go-w"]);
        let config = TestConfig::new().user("");
        chmod(&config.path("user/config.toml"), mode);
        config.fails(&[], &["chmod go-w"]);
        let config = TestConfig::new().policy("");
        chmod(&config.path("etc/policy.toml"), mode);
        config.fails(&[], &["policy"]);
    }
    let config = TestConfig::new().project("pids = 9");
    chmod(&config.path("project"), 0o777);
    config.fails(&[], &["may be written by others"]);
    chmod(&config.path("project"), 0o1777);
    assert_eq!(config.ok(&[]).limits.pids, asked(9));
}

/// Only root can make a file with a foreign owner. So the test calls as another user, with a control in which the
/// caller's own file is read.
#[test]
fn files_of_other_users_are_refused() {
    let mut config = TestConfig::new().project("pids = 9");
    let link_target = config.write("user/real.toml", "pids = 10");
    assert_eq!(config.ok(&[]).limits.pids, asked(9));
    if config.sources.uid == 0 {
        let owner = Some(rustix::process::Uid::from_raw(65_000));
        let file = config.path("project/fumehood.toml");
        rustix::fs::chown(&file, owner, None).unwrap();
        config.fails(&[], &["belongs to uid 65000"]);
        config.sources.uid = 65_000;
        assert_eq!(config.ok(&[]).limits.pids, asked(9));
        config.sources.uid = 0;
        // A link made by another user to a file of root's would let that user choose what is read.
        fs::remove_file(&file).unwrap();
        symlink(&link_target, &file).unwrap();
        assert_eq!(config.ok(&[]).limits.pids, asked(10));
        rustix::fs::chownat(
            rustix::fs::CWD,
            &file,
            owner,
            None,
            rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
        )
        .unwrap();
        config.fails(&[], &["belongs to uid 65000"]);
    } else {
        config.sources.uid += 1;
        config.fails(&[], &["belongs to uid"]);
    }
}

#[test]
fn the_policy_must_be_the_operators() {
    let mut config = TestConfig::new().policy("[ceilings]\npids = 50");
    assert_eq!(config.ok(&[]).limits.pids.value, 50);
    chmod(&config.path("etc"), 0o775);
    config.fails(&[], &["operator's policy", "may be written by others"]);
    chmod(&config.path("etc"), 0o1777);
    config.fails(&[], &["operator's policy"]);
    chmod(&config.path("etc"), 0o755);
    config.sources.policy_owner_uid += 1;
    config.fails(&[], &["operator's policy", "must belong to uid"]);
}

#[test]
fn a_policy_that_cannot_be_read_stops_every_run() {
    for text in [
        "[ceilings",
        "[ceiling]\npids = 9",
        "[ceilings]\npids = \"many\"",
        "[ceilings]\ncpu_time = \"off\"",
        "[ceilings]\ntimeout = 0",
        "[floor]\nlevel = \"none\"",
        "[floor]\nlevel = 3",
        "[floor]\nlayers = [\"selinux\"]",
        "[read]\nroots = [\"data\"]",
        "[read]\nroots = [\"/a/../b\"]",
        "[env]\npass = [\"A*B\"]",
        "[env]\npass = \"A\"",
        "[degraded]\nallow = [\"speed\"]",
        "floor = 3",
        "pids = 9",
        "[ceilings]\nkeep = 3",
        "[ceilings.pids]\nx = 1",
        "[ceilings]\nfree_reserve = \"1G\"",
        "[ceilings]\nmax_depth = 0",
        "[env]\nsecret = [\"A*B\"]",
        "[env]\nsecret = \"A\"",
        "[record]\ndb = 3",
        "[record]\ndb = \"\"",
        "[record]\ndb = \"sqlite:here.db\"",
        "[record]\ndb = \"sqlite://here.db\"",
        "[record]\ndb = \" \"",
        "[record]\nrequired = true\ndb = \" none \"",
        "[record]\nrequired = \"yes\"",
        "[record]\nrequired = true\ndb = \"none\"",
        "[record]\ndatabase = \"none\"",
        "post_process = \"/bin/true\"",
        "[post_process]\ntimeout = 3",
        "[post_process]\ncommand = [\"true\"]",
    ] {
        TestConfig::new().policy(text).fails(&[], &["policy"]);
    }
    TestConfig::new()
        .policy("[ceilings]\nmemroy = 1")
        .fails(&[], &["ceilings.memroy", "ceilings.memory"]);
    let config = TestConfig::new();
    config.write("etc/policy.toml", b"\xff\xfe");
    config.fails(&[], &["not UTF-8"]);
    config.write("etc/policy.toml", vec![b'#'; (1 << 20) + 1]);
    config.fails(&[], &["larger than"]);
    fs::remove_file(config.path("etc/policy.toml")).unwrap();
    config.ok(&[]);
    symlink("/nonexistent/policy.toml", config.path("etc/policy.toml")).unwrap();
    config.fails(&[], &["operator's policy"]);
    fs::remove_file(config.path("etc/policy.toml")).unwrap();
    symlink("missing.toml", config.path("etc/policy.toml")).unwrap();
    config.fails(&[], &["operator's policy"]);
    fs::remove_file(config.path("etc/policy.toml")).unwrap();
    symlink("policy.toml", config.path("etc/policy.toml")).unwrap();
    config.fails(&[], &["symlinks"]);
    let mut config = TestConfig::new();
    symlink("/nonexistent", config.path("link")).unwrap();
    config.sources.policy = config.path("link/policy.toml");
    config.fails(&[], &["operator's policy"]);
    config.sources.policy = config.path("none/policy.toml");
    config.ok(&[]);
}

#[test]
fn a_settings_file_that_is_not_regular_is_refused_without_waiting() {
    let config = TestConfig::new();
    let file = config.path("project/fumehood.toml");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &file,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    config.fails(&[], &["not a regular file"]);
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    config.fails(&[], &["not a regular file"]);
    fs::remove_dir(&file).unwrap();
    symlink("/dev/null", &file).unwrap();
    assert!(config.run(&[]).is_err());
}

#[test]
fn a_ceiling_refuses_an_ask_and_lowers_a_default() {
    let config = TestConfig::new().policy(
        "[ceilings]\ntimeout = \"10m\"\nmemory = \"2G\"\ncpus = 2\nidle_timeout = \"5m\"\ncpu_time = \"1h\"\nkeep_for = \"1h\"",
    );
    let request = config.ok(&[]);
    let default = |value| RequestedLimit {
        value,
        explicit: false,
    };
    assert_eq!(request.limits.wall_ms, default(600_000));
    assert_eq!(request.limits.memory_bytes, Some(default(2 << 30)));
    assert_eq!(request.limits.cpu_milli, Some(default(2000)));
    assert_eq!(request.limits.idle_ms, Some(default(300_000)));
    assert_eq!(request.limits.cpu_ms, Some(default(3_600_000)));
    assert_eq!(request.keep_for_ms, 3_600_000);
    assert_eq!(
        config.ok(&["--timeout", "10m"]).limits.wall_ms,
        asked(600_000)
    );
    config.fails(
        &["--timeout", "11m"],
        &["--timeout is 11m", "ceiling of 10m", "policy.toml"],
    );
    config.fails(&["--idle-timeout", "off"], &["off", "ceiling of 5m"]);
    config.fails(&["--keep-for", "2h"], &["ceiling of 1h"]);
    let config = config.project("memory = \"3G\"");
    config.fails(&[], &["fumehood.toml", "ceiling of 2 GiB"]);
    assert_eq!(
        config.ok(&["--memory", "1G"]).limits.memory_bytes,
        Some(asked(1 << 30))
    );
    let roomy = TestConfig::new().policy("[ceilings]\nmemory = \"64G\"");
    assert_eq!(roomy.ok(&[]).limits.memory_bytes, Some(default(4 << 30)));
}

#[test]
fn an_exact_level_is_asked_for_by_the_caller_and_never_by_a_project() {
    use sandbox::spec::ConfinementLevel as Exactly;
    assert_eq!(TestConfig::new().ok(&[]).level, None);
    let asked = |level| TestConfig::new().ok(&["--level", level]).level;
    assert_eq!(asked("landlock"), Some(Exactly::Landlock));
    assert_eq!(asked("full"), Some(Exactly::Full));
    TestConfig::new().fails(&["--level", "none"], &["--level", "landlock", "full"]);
    for line in ["level = \"landlock\"", "shared_memory = \"host\""] {
        TestConfig::new()
            .project(line)
            .fails(&[], &["fumehood.toml"]);
    }
}

#[test]
fn the_hosts_shared_memory_is_the_operators_to_open() {
    let host: &[&str] = &["--shared-memory", "host"];
    assert_eq!(
        TestConfig::new().ok(&[]).shared_memory,
        SharedMemory::Private
    );
    assert_eq!(TestConfig::new().ok(host).shared_memory, SharedMemory::Host);
    let closed = TestConfig::new().policy("");
    closed.fails(host, &["--shared-memory", "/dev/shm", "policy.toml"]);
    let open = TestConfig::new().policy("[floor]\nshared_memory = \"host\"");
    assert_eq!(open.ok(&[]).shared_memory, SharedMemory::Private);
    assert_eq!(open.ok(host).shared_memory, SharedMemory::Host);
}

#[test]
fn the_floor_only_rises() {
    assert_eq!(
        TestConfig::new().ok(&["--isolation", "landlock"]).floor,
        IsolationLevel::Landlock
    );
    let config = TestConfig::new().user("isolation = \"full\"");
    assert_eq!(
        config.ok(&["--isolation", "landlock"]).floor,
        IsolationLevel::Full
    );
    for policy in ["", "[floor]\nlevel = \"full\""] {
        let config = TestConfig::new().policy(policy);
        assert_eq!(config.ok(&[]).floor, IsolationLevel::Full);
        config.fails(
            &["--isolation", "landlock"],
            &["--isolation", "floor", "policy.toml"],
        );
        config
            .var("FUMEHOOD_ISOLATION", "landlock")
            .fails(&[], &["FUMEHOOD_ISOLATION"]);
    }
    let config = TestConfig::new()
        .policy("[floor]\nlevel = \"landlock\"\nlayers = [\"seccomp\", \"net_namespace\"]");
    assert_eq!(config.ok(&[]).floor, IsolationLevel::Landlock);
    assert_eq!(
        config.ok(&["--isolation", "full"]).floor,
        IsolationLevel::Full
    );
    let layers = config.ok(&[]).required_layers;
    assert_eq!(
        layers,
        BTreeSet::from([Layer::Seccomp, Layer::NetNamespace])
    );
}

#[test]
fn the_policy_decides_what_passes_and_what_degrades() {
    let config = TestConfig::new()
        .var("SEED", "7")
        .var("LC_ALL", "C")
        .var("PGPASSWORD", "x");
    config.ok(&["--env", "PGPASSWORD", "--allow-degraded", "disk"]);
    let config = config.policy("[env]\npass = [\"SEED\", \"LC_*\"]\n[read]\nroots = [\"/srv/data/\"]\n[degraded]\nallow = [\"disk\"]");
    let request = config.ok(&[
        "--env",
        "SEED",
        "--env",
        "LC_ALL",
        "--env",
        "PGPASSWORD=mine",
        "--allow-degraded",
        "disk",
    ]);
    assert_eq!(request.env.len(), 3);
    assert_eq!(request.allow_degraded, BTreeSet::from([LimitName::Disk]));
    assert_eq!(request.readable_roots, Some(vec!["/srv/data".into()]));
    config.fails(&["--env", "PGPASSWORD"], &["PGPASSWORD", "env.pass"]);
    config.fails(&["--env", "SEEDS"], &["env.pass"]);
    config.fails(&["--allow-degraded", "memory"], &["degraded.allow"]);
    config.fails(&["--allow-degraded", "memroy"], &["no limit", "memory"]);
    TestConfig::new()
        .policy("")
        .fails(&["--allow-degraded", "disk"], &["degraded.allow"]);
    let config = TestConfig::new().var("FUMEHOOD_ALLOW_DEGRADED", "disk, files");
    assert_eq!(
        config.ok(&[]).allow_degraded,
        BTreeSet::from([LimitName::Disk, LimitName::Files])
    );
}

#[test]
fn the_users_file_follows_xdg() {
    let find = |pairs: &[(&str, &str)]| {
        sources::user_config(&pairs.iter().map(|(k, v)| (k.into(), v.into())).collect())
    };
    assert_eq!(
        find(&[("HOME", "/h")]),
        Some("/h/.config/fumehood/config.toml".into())
    );
    assert_eq!(
        find(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "/x")]),
        Some("/x/fumehood/config.toml".into())
    );
    assert_eq!(
        find(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "x")]),
        Some("/h/.config/fumehood/config.toml".into())
    );
    assert_eq!(find(&[("HOME", "")]), None);
}

#[test]
fn the_shell_takes_the_same_settings() {
    let config = TestConfig::new()
        .project("pids = 99")
        .var("FUMEHOOD_QUIET", "1");
    let resolved = shell_request(GivenSettings::new(), &config.sources).unwrap();
    assert_eq!(resolved.request.command, Command::Shell);
    assert_eq!(resolved.request.limits.pids, asked(99));
    assert!(resolved.presentation.quiet);
}

#[test]
fn the_documented_policy_is_valid() {
    let page = include_str!("../../../../../docs/configuration.md");
    let (_, rest) = page
        .split_once("```toml\n# /etc/fumehood/policy.toml")
        .unwrap();
    let (text, _) = rest.split_once("```").unwrap();
    let policy = Policy::parse(text, Path::new("policy.toml")).unwrap();
    assert!(policy.readable_roots.is_some() && !policy.passes_env(OsStr::new("PGPASSWORD")));
    assert!(policy.db.is_some() && policy.record_required && policy.post_process.is_some());
    let (_, rest) = page
        .split_once("```toml\n# ~/.config/fumehood/config.toml")
        .unwrap();
    let (text, _) = rest.split_once("```").unwrap();
    let user = entries::from_file(text, &SettingOrigin::UserFile("/u/config.toml".into())).unwrap();
    assert!(!user.entries.is_empty() && user.post_process.is_some());
    let (_, rest) = page.split_once("```toml\n# fumehood.toml").unwrap();
    let (text, _) = rest.split_once("```").unwrap();
    assert!(
        !entries::from_file(text, &SettingOrigin::ProjectFile("/p/fumehood.toml".into()))
            .unwrap()
            .entries
            .is_empty()
    );
}

/// Random values within the bounds of every setting of kind count, near the random ceilings.
fn number() -> impl Strategy<Value = u64> {
    16u64..2000
}

fn maybe<T: std::fmt::Debug + Clone>(
    inner: impl Strategy<Value = T>,
) -> impl Strategy<Value = Option<T>> {
    proptest::option::of(inner)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_text_panics(text in any::<String>()) {
        let _ = Policy::parse(&text, Path::new("/p"));
        let _ = entries::from_file(&text, &SettingOrigin::ProjectFile("/p/fumehood.toml".into()));
    }

    #[test]
    fn no_table_panics(key in "[a-z_]{1,14}", of in 0usize..60, value in "(-?[0-9.e]{1,8}|\"[^\"\\\\]{0,9}\"|\\[(\"[a-z=/:]{0,6}\",?){0,3}\\]|true|nan|\\{a=1\\})") {
        let name = table::SETTINGS.get(of).map_or(key.as_str(), |setting| setting.name);
        for text in [format!("{name} = {value}"), format!("[ceilings]\n{name} = {value}"), format!("[floor]\n{key} = {value}"),
            format!("[record]\ndb = {value}"), format!("[post_process]\ncommand = {value}"), format!("[post_process]\ntimeout = {value}")] {
            let _ = Policy::parse(&text, Path::new("/p"));
            let _ = entries::from_file(&text, &SettingOrigin::UserFile("/p/config.toml".into()));
        }
    }

    #[test]
    fn no_file_of_any_bytes_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let config = TestConfig::new();
        config.write("project/fumehood.toml", &bytes);
        config.write("etc/policy.toml", &bytes);
        let _ = config.run(&[]);
    }

    #[test]
    fn the_strongest_place_wins(user in maybe(number()), project in maybe(number()), env in maybe(number()), flag in maybe(number())) {
        let mut config = TestConfig::new();
        if let Some(n) = user { config = config.user(&format!("pids = {n}")); }
        if let Some(n) = project { config = config.project(&format!("pids = {n}")); }
        if let Some(n) = env { config = config.var("FUMEHOOD_PIDS", &n.to_string()); }
        let flag_text = flag.map(|n| n.to_string());
        let options: Vec<&str> = flag_text.iter().flat_map(|n| ["--pids", n.as_str()]).collect();
        let strongest = flag.or(env).or(project).or(user);
        let expected = strongest.map_or(RequestedLimit { value: 1024, explicit: false }, asked);
        prop_assert_eq!(config.ok(&options).limits.pids, expected);
    }

    /// Promise P18: whatever a project's file, the environment and the options say, the request either keeps to the
    /// policy or is refused.
    #[test]
    fn nothing_loosens_the_policy(
        ceilings in proptest::collection::btree_map(0usize..12, number(), 0..12),
        asks in proptest::collection::vec((0usize..12, 0usize..4, number()), 0..6),
        floor in maybe(prop_oneof![Just("full"), Just("landlock")]),
        isolation in maybe(prop_oneof![Just("full"), Just("landlock")]),
        off in maybe(prop_oneof![Just("--cpu-time"), Just("--idle-timeout")]),
        degraded in maybe(prop_oneof![Just("disk"), Just("memory")]),
        pass in maybe(prop_oneof![Just("SEED"), Just("TOKEN")]),
    ) {
        // Each number is multiplied by a unit that keeps it within the setting's bounds.
        const NAMES: [(&str, &str); 12] = [("timeout", "s"), ("cpu_time", "s"), ("idle_timeout", "s"), ("grace", "s"),
            ("memory", "M"), ("cpus", ""), ("pids", ""), ("open_files", ""), ("disk", "M"), ("files", ""),
            ("log_limit", "K"), ("keep_for", "s")];
        let show = |(at, n): (usize, u64)| format!("{} = \"{n}{}\"\n", NAMES[at].0, NAMES[at].1);
        let mut policy = String::new();
        if let Some(level) = floor { policy.push_str(&format!("[floor]\nlevel = \"{level}\"\nlayers = [\"seccomp\"]\n")); }
        policy.push_str("[read]\nroots = [\"/srv\"]\n[env]\npass = [\"SEED\"]\n[degraded]\nallow = [\"disk\"]\n[ceilings]\n");
        for (at, n) in &ceilings { policy.push_str(&show((*at, *n))); }
        let mut files = [BTreeMap::new(), BTreeMap::new()];
        let mut config = TestConfig::new().policy(&policy).var("SEED", "7").var("TOKEN", "t");
        let mut flags: BTreeMap<String, String> = BTreeMap::new();
        for (at, place, n) in asks {
            let (name, unit) = NAMES[at];
            match place {
                0 | 1 if name != "keep_for" => { files[place].insert(name, show((at, n))); }
                2 => config = config.var(&format!("FUMEHOOD_{}", name.to_uppercase()), &format!("{n}{unit}")),
                _ => { flags.insert(format!("--{}", name.replace('_', "-")), format!("{n}{unit}")); }
            }
        }
        config = config.user(&files[0].values().cloned().collect::<String>());
        config = config.project(&files[1].values().cloned().collect::<String>());
        if let Some(flag) = off { flags.insert(flag.to_owned(), "off".to_owned()); }
        if let Some(level) = isolation { flags.insert("--isolation".to_owned(), level.to_owned()); }
        if let Some(limit) = degraded { flags.insert("--allow-degraded".to_owned(), limit.to_owned()); }
        if let Some(name) = pass { flags.insert("--env".to_owned(), name.to_owned()); }
        let options: Vec<&str> = flags.iter().flat_map(|(k, v)| [k.as_str(), v.as_str()]).collect();
        let Ok(resolved) = config.run(&options) else { return Ok(()) };
        let request = resolved.request;
        let limits = &request.limits;
        let got = [Some(limits.wall_ms), limits.cpu_ms, limits.idle_ms, Some(limits.grace_ms), limits.memory_bytes,
            limits.cpu_milli, Some(limits.pids), Some(limits.open_files), Some(limits.disk_bytes), Some(limits.files),
            Some(limits.log_bytes), Some(RequestedLimit { value: request.keep_for_ms, explicit: false })];
        for (at, n) in ceilings {
            let scale = match NAMES[at].1 { "s" => 1000, "M" => 1 << 20, "K" => 1 << 10, _ if at == 5 => 1000, _ => 1 };
            prop_assert!(got[at].is_some_and(|limit| limit.value <= n * scale), "{}", NAMES[at].0);
        }
        if floor != Some("landlock") { prop_assert_eq!(request.floor, IsolationLevel::Full); }
        prop_assert_eq!(request.required_layers.contains(&Layer::Seccomp), floor.is_some());
        prop_assert_eq!(&request.readable_roots, &Some(vec![PathBuf::from("/srv")]));
        prop_assert!(request.allow_degraded.iter().all(|limit| *limit == LimitName::Disk));
        prop_assert!(request.env.iter().all(|(name, _)| name == "SEED"));
    }
}
