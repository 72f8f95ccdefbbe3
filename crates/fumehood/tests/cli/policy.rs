//! P18 through the binary: the operator's policy bounds every user, and a project's file cannot loosen any setting.
//!
//! The path of the policy is fixed. A trial that needs a policy therefore runs Fumehood in a separate mount namespace,
//! where /etc is a copy. The host's /etc does not change.

use std::os::unix::fs::symlink;
use std::process::Command;

use testkit::account;
use testkit::command::{FinishedCommand, finish};
use testkit::home::{TestHome, set_mode};
use testkit::program;
use testkit::trial;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Account {
    Root,
    /// The test account, under the same policy.
    Plain,
}

/// Runs `fumehood run ARGS` where `/etc/fumehood/policy.toml` is made by `prepare`, a shell script in that directory.
pub fn under(test_home: &TestHome, prepare: &str, who: Account, args: &[&str]) -> FinishedCommand {
    let script = r#"
        set -e
        mount -t tmpfs -o mode=755 none "$1"
        cp -a /etc/. "$1"
        mount --bind "$1" /etc
        mkdir -m 755 /etc/fumehood
        (cd /etc/fumehood; umask 022; eval "$2")
        shift 2
        exec "$@"
    "#;
    let etc = test_home.path("etc");
    if !etc.exists() {
        std::fs::create_dir(&etc).unwrap();
    }
    let mut command = test_home.with_environment(Command::new("unshare"));
    command.args([
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        script,
        "sh",
    ]);
    command.arg(&etc).arg(prepare);
    match who {
        Account::Root => command.arg(program::binary()),
        Account::Plain => {
            let (uid, gid) = account::uid_and_gid();
            let ids = [format!("--reuid={uid}"), format!("--regid={gid}")];
            let home = format!("/home/{}", account::ACCOUNT);
            command
                .env("HOME", &home)
                .env("FUMEHOOD_WORKSPACE_ROOT", "/tmp")
                .env_remove("FUMEHOOD_HOME");
            command
                .current_dir("/")
                .arg("setpriv")
                .args(ids)
                .arg("--clear-groups");
            command.arg(program::executable_copies().join("fumehood"))
        }
    };
    command.arg("run").args(args);
    finish(command)
}

/// Runs `fumehood run ARGS` as root under a policy with this text.
pub fn with(test_home: &TestHome, policy: &str, args: &[&str]) -> FinishedCommand {
    under(
        test_home,
        &format!("cat > policy.toml <<'END'\n{policy}\nEND"),
        Account::Root,
        args,
    )
}

trial!(Root, ceilings_bound_every_limit);
fn ceilings_bound_every_limit() {
    let test_home = TestHome::new();
    let policy = "[ceilings]\ntimeout = \"10s\"\nmemory = \"256M\"\npids = 50\ncpu_time = 5\ndisk = \"1G\"\ngrace = 1";
    for (option, over, fine) in [
        ("--timeout", "11s", "10s"),
        ("--memory", "257M", "256M"),
        ("--pids", "51", "50"),
        ("--cpu-time", "6", "5"),
        ("--cpu-time", "off", "1"),
        ("--disk", "2G", "1G"),
        ("--grace", "2s", "1s"),
    ] {
        with(&test_home, policy, &[option, over, "--", "true"]).refused(125, "above the ceiling");
        with(&test_home, policy, &[option, fine, "--", "true"]).good();
    }
    let document = with(&test_home, policy, &["--json", "--", "true"]).document();
    assert_eq!(document["limits"]["wall_time"]["asked"], 10_000);
    assert_eq!(document["limits"]["memory"]["asked"], 256 << 20);
    assert_eq!(
        document["limits"]["cpu_time"]["asked"], 5_000,
        "never off under a ceiling"
    );
    // The policy also bounds the plain account, and settings from a variable or a file.
    let prepare = format!("cat > policy.toml <<'END'\n{policy}\nEND");
    under(
        &test_home,
        &prepare,
        Account::Plain,
        &["--pids", "51", "--", "true"],
    )
    .refused(125, "above the ceiling");
    under(
        &test_home,
        &prepare,
        Account::Plain,
        &["--pids", "50", "--", "true"],
    )
    .good();
    test_home.write("project/fumehood.toml", "timeout = 11\n");
    with(&test_home, policy, &["--", "true"]).refused(125, "above the ceiling");
}

trial!(Root, the_floor_cannot_be_lowered);
fn the_floor_cannot_be_lowered() {
    let test_home = TestHome::new();
    for policy in ["", "[floor]\nlevel = \"full\""] {
        with(
            &test_home,
            policy,
            &["--isolation", "landlock", "--", "true"],
        )
        .refused(125, "below the floor");
        with(&test_home, policy, &["--isolation", "full", "--", "true"]).good();
    }
    let low = "[floor]\nlevel = \"landlock\"";
    with(&test_home, low, &["--isolation", "landlock", "--", "true"]).good();
}

trial!(Root, only_listed_roots_are_read);
fn only_listed_roots_are_read() {
    let test_home = TestHome::new();
    test_home.write("allowed/a", "a\n");
    test_home.write("denied/d", "d\n");
    symlink(test_home.path("denied"), test_home.path("allowed/link")).unwrap();
    let (allowed, denied) = (test_home.path("allowed"), test_home.path("denied"));
    let policy = format!("[read]\nroots = [{allowed:?}]");
    let (allowed, denied) = (allowed.to_str().unwrap(), denied.to_str().unwrap());
    let file = format!("{allowed}/a");
    assert_eq!(
        with(
            &test_home,
            &policy,
            &["--read", allowed, "--", "cat", &file]
        )
        .good(),
        "a\n"
    );
    let link = format!("{allowed}/link");
    let climb = format!("{allowed}/../denied");
    for path in [denied, &link, &climb] {
        for option in ["--read", "--data", "--docs", "--input"] {
            let ended = with(&test_home, &policy, &[option, path, "--", "true"]);
            assert_eq!(ended.code(), 125, "{option} {path}: {}", ended.err());
        }
    }
    // The policy does not list the project's own data either.
    test_home.write("project/data/d", "d");
    with(&test_home, &policy, &["--", "true"]).refused(125, "policy");
}

trial!(Root, only_listed_roots_are_piped_in);
/// The policy's list also applies to files for standard input.
fn only_listed_roots_are_piped_in() {
    let test_home = TestHome::new();
    let allowed = test_home.write("allowed/a", "a\n");
    let denied = test_home.write("denied/d", "d\n");
    let policy = format!("[read]\nroots = [{:?}]", test_home.path("allowed"));
    assert_eq!(
        with(
            &test_home,
            &policy,
            &["--stdin", allowed.to_str().unwrap(), "--", "cat"]
        )
        .good(),
        "a\n"
    );
    with(
        &test_home,
        &policy,
        &["--stdin", denied.to_str().unwrap(), "--", "cat"],
    )
    .refused(125, "policy");
}

trial!(Root, only_listed_variables_pass);
fn only_listed_variables_pass() {
    let test_home = TestHome::new();
    let policy = "[env]\npass = [\"LC_*\", \"FUMEHOOD_TEST_ONE\", \"HOME\"]";
    with(&test_home, policy, &["--env", "HOME", "--", "true"]).good();
    with(&test_home, policy, &["--env", "PATH", "--", "true"]).refused(125, "env.pass");
    let out = with(
        &test_home,
        policy,
        &["--env", "PATH2=x", "--", "sh", "-c", "echo $PATH2"],
    );
    assert_eq!(
        out.good(),
        "x\n",
        "a value of one's own is no variable handed on"
    );
}

trial!(Root, only_listed_limits_degrade);
fn only_listed_limits_degrade() {
    let test_home = TestHome::new();
    with(
        &test_home,
        "",
        &["--allow-degraded", "memory", "--", "true"],
    )
    .refused(125, "degraded.allow");
    let policy = "[degraded]\nallow = [\"memory\"]";
    with(
        &test_home,
        policy,
        &["--allow-degraded", "memory", "--", "true"],
    )
    .good();
    with(
        &test_home,
        policy,
        &["--allow-degraded", "cpus", "--", "true"],
    )
    .refused(125, "degraded.allow");
}

trial!(Root, a_run_without_a_required_layer_does_not_start);
fn a_run_without_a_required_layer_does_not_start() {
    let test_home = TestHome::new();
    let prepare = "printf '[floor]\\nlayers = [\"leased_uid\"]\\n' > policy.toml";
    under(&test_home, prepare, Account::Root, &["--", "true"]).good();
    under(&test_home, prepare, Account::Plain, &["--", "true"]).refused(125, "leased_uid");
    under(&test_home, "true", Account::Plain, &["--", "true"]).good();
}

trial!(Root, a_broken_policy_stops_every_run);
fn a_broken_policy_stops_every_run() {
    let test_home = TestHome::new();
    for (policy, said) in [
        ("nonsense", "policy"),
        ("[floors]\n", "did you mean `floor`"),
        ("[ceilings]\ntimeot = 5", "did you mean `ceilings.timeout`"),
        ("[ceilings]\ntimeout = \"soon\"", "ceiling"),
        ("[floor]\nlevel = \"none\"", "floor.level"),
        ("[floor]\nlayers = [\"magic\"]", "floor.layers"),
        ("[read]\nroots = [\"relative\"]", "read.roots"),
        ("[env]\npass = \"*\"", "env.pass"),
    ] {
        with(&test_home, policy, &["--", "true"]).refused(125, said);
        with(&test_home, policy, &["--json", "--", "true"]).refused(125, said);
    }
    for prepare in [
        "mkdir policy.toml",
        "mkfifo policy.toml",
        "ln -s nowhere policy.toml",
    ] {
        let ended = under(&test_home, prepare, Account::Root, &["--", "true"]);
        assert_eq!(ended.code(), 125, "{prepare}: {}", ended.err());
    }
    test_home.assert_nothing_left();
}

trial!(Root, a_policy_others_can_write_is_refused);
fn a_policy_others_can_write_is_refused() {
    let test_home = TestHome::new();
    for prepare in [
        "touch policy.toml; chmod 666 policy.toml",
        "touch policy.toml; chmod 664 policy.toml",
        "touch policy.toml; chown 12345 policy.toml",
        "touch policy.toml; chmod 777 .",
        "touch policy.toml; chown 12345 .",
    ] {
        let ended = under(&test_home, prepare, Account::Root, &["--", "true"]);
        assert_eq!(ended.code(), 125, "{prepare}: {}", ended.err());
    }
    under(
        &test_home,
        "touch policy.toml",
        Account::Root,
        &["--", "true"],
    )
    .good();
    // A user who may not read the policy cannot run without it.
    under(
        &test_home,
        "touch policy.toml; chmod 600 policy.toml",
        Account::Plain,
        &["--", "true"],
    )
    .refused(125, "policy");
}

trial!(Everyone, a_projects_file_cannot_widen);
fn a_projects_file_cannot_widen() {
    let test_home = TestHome::new();
    test_home.write("outside/d", "outside");
    test_home.write("project/data/d", "d");
    for text in [
        "isolation = \"landlock\"",
        "isolation = \"full\"",
        "read = [\"/etc\"]",
        "input = [\"../outside/d\"]",
        "runtime = \"/opt\"",
        "stdin = \"../outside/d\"",
        "allow_degraded = [\"memory\"]",
        "workspace_root = \"/tmp\"",
        "network = \"none\"",
        "keep = \"always\"",
        "keep_for = \"1d\"",
        "env = [\"HOME\"]",
        "data = \"../outside\"",
        "data = \"/etc\"",
        "docs = \".\"",
        "json = true",
        "id = \"x\"",
        "project = \"..\"",
    ] {
        test_home.write("project/fumehood.toml", text);
        let ended = test_home.sh(&[], "true");
        assert_eq!(ended.code(), 125, "{text}: {}", ended.err());
    }
    std::fs::create_dir(test_home.path("project/inputs")).unwrap();
    test_home.write(
        "project/fumehood.toml",
        "data = \"inputs\"\nmemory = \"1G\"\nallow_it = 1\n",
    );
    test_home.sh(&[], "true").refused(125, "allow_it");
    test_home.write("project/fumehood.toml", "data = \"inputs\"\npids = 99\n");
    assert_eq!(test_home.sh(&[], "ls data | wc -l").good().trim(), "0");
}

trial!(Everyone, a_projects_file_cannot_widen_by_a_link);
/// A directory outside the project is not below the project, even if a link in the project leads to it.
fn a_projects_file_cannot_widen_by_a_link() {
    let test_home = TestHome::new();
    test_home.write("outside/d", "outside");
    symlink(test_home.path("outside"), test_home.path("project/sly")).unwrap();
    test_home.write("project/fumehood.toml", "data = \"sly\"\n");
    let ended = test_home.sh(&[], "cat data/d");
    assert_eq!(ended.code(), 125, "{}", ended.out());
}

trial!(Everyone, a_file_others_can_write_is_refused);
fn a_file_others_can_write_is_refused() {
    let test_home = TestHome::new();
    for name in [
        "project/fumehood.toml",
        "person/.config/fumehood/config.toml",
    ] {
        let file = test_home.write(name, "timeout = 60\n");
        for mode in [0o666, 0o664, 0o646] {
            set_mode(&file, mode);
            test_home.sh(&[], "true").refused(125, "written by others");
        }
        set_mode(&file, 0o644);
        test_home.sh(&[], "true").good();
        let parent = file.parent().unwrap();
        set_mode(parent, 0o777);
        test_home.sh(&[], "true").refused(125, "written by others");
        set_mode(parent, 0o755);
        std::fs::remove_file(&file).unwrap();
    }
    // The target of a link must meet the same conditions.
    let target = test_home.write("elsewhere/config.toml", "timeout = 60\n");
    set_mode(&target, 0o666);
    symlink(&target, test_home.path("project/fumehood.toml")).unwrap();
    test_home.sh(&[], "true").refused(125, "written by others");
    // A FIFO in its place does not block Fumehood.
    std::fs::remove_file(test_home.path("project/fumehood.toml")).unwrap();
    let made = Command::new("mkfifo")
        .arg(test_home.path("project/fumehood.toml"))
        .status()
        .unwrap();
    assert!(made.success());
    test_home.sh(&[], "true").refused(125, "not a regular file");
}

trial!(Root, another_users_settings_file_is_refused);
fn another_users_settings_file_is_refused() {
    let test_home = TestHome::new();
    let (uid, gid) = account::uid_and_gid();
    let file = test_home.write("project/fumehood.toml", "timeout = 60\n");
    std::os::unix::fs::chown(&file, Some(uid), Some(gid)).unwrap();
    test_home.sh(&[], "true").refused(125, "belongs to uid");
}
