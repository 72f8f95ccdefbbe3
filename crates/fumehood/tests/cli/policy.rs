//! P18 through the binary: the operator's policy bounds everybody, and a project's file cannot loosen anything.
//!
//! The policy's place is fixed, so the trials that need one run in a mount namespace of their own, where /etc is a
//! copy: the host's stays as it is.

use std::os::unix::fs::symlink;
use std::process::Command;

use crate::lab::{Ended, Lab, finish, set_mode};
use crate::plain_user;
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    ("ceilings_bound_every_limit", For::Root, ceilings),
    ("the_floor_cannot_be_lowered", For::Root, floor),
    ("only_listed_roots_are_read", For::Root, read_roots),
    (
        "only_listed_roots_are_piped_in",
        For::Root,
        read_roots_stdin,
    ),
    ("only_listed_variables_pass", For::Root, env_pass),
    ("only_listed_limits_degrade", For::Root, degraded),
    (
        "a_required_layer_stops_who_lacks_it",
        For::Root,
        required_layer,
    ),
    ("a_broken_policy_stops_every_run", For::Root, broken),
    (
        "a_policy_others_can_write_is_refused",
        For::Root,
        writable_policy,
    ),
    ("a_projects_file_cannot_widen", For::Everyone, project_file),
    (
        "a_projects_file_cannot_widen_by_a_link",
        For::Everyone,
        project_link,
    ),
    (
        "a_file_others_can_write_is_refused",
        For::Everyone,
        writable_files,
    ),
    ("a_file_of_anothers_is_refused", For::Root, foreign_file),
];

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum As {
    Root,
    /// The test account, under the same policy.
    Plain,
}

/// Runs `fumehood run ARGS` where `/etc/fumehood/policy.toml` is made by `prepare`, a shell script in that directory.
pub fn under(lab: &Lab, prepare: &str, who: As, args: &[&str]) -> Ended {
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
    let etc = lab.path("etc");
    if !etc.exists() {
        std::fs::create_dir(&etc).unwrap();
    }
    let mut command = lab.with_surroundings(Command::new("unshare"));
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
        As::Root => command.arg(plain_user::binary()),
        As::Plain => {
            let (uid, gid) = plain_user::account();
            let ids = [format!("--reuid={uid}"), format!("--regid={gid}")];
            let home = format!("/home/{}", plain_user::ACCOUNT);
            command
                .env("HOME", &home)
                .env("FUMEHOOD_WORKSPACE_ROOT", "/tmp")
                .env_remove("FUMEHOOD_HOME");
            command
                .current_dir("/")
                .arg("setpriv")
                .args(ids)
                .arg("--clear-groups");
            command.arg(plain_user::reachable().join("fumehood"))
        }
    };
    command.arg("run").args(args);
    finish(command)
}

/// As [`under`] with the policy's text, for root.
pub fn with(lab: &Lab, policy: &str, args: &[&str]) -> Ended {
    under(
        lab,
        &format!("cat > policy.toml <<'END'\n{policy}\nEND"),
        As::Root,
        args,
    )
}

fn ceilings() {
    let lab = Lab::new();
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
        with(&lab, policy, &[option, over, "--", "true"]).refused(125, "above the ceiling");
        with(&lab, policy, &[option, fine, "--", "true"]).good();
    }
    let document = with(&lab, policy, &["--json", "--", "true"]).document();
    assert_eq!(document["limits"]["wall_time"]["asked"], 10_000);
    assert_eq!(document["limits"]["memory"]["asked"], 256 << 20);
    assert_eq!(
        document["limits"]["cpu_time"]["asked"], 5_000,
        "never off under a ceiling"
    );
    // For the plain account as well, and by a variable or a file as by an option.
    let prepare = format!("cat > policy.toml <<'END'\n{policy}\nEND");
    under(&lab, &prepare, As::Plain, &["--pids", "51", "--", "true"])
        .refused(125, "above the ceiling");
    under(&lab, &prepare, As::Plain, &["--pids", "50", "--", "true"]).good();
    lab.write("project/fumehood.toml", "timeout = 11\n");
    with(&lab, policy, &["--", "true"]).refused(125, "above the ceiling");
}

fn floor() {
    let lab = Lab::new();
    for policy in ["", "[floor]\nlevel = \"full\""] {
        with(&lab, policy, &["--isolation", "landlock", "--", "true"])
            .refused(125, "below the floor");
        with(&lab, policy, &["--isolation", "full", "--", "true"]).good();
    }
    let low = "[floor]\nlevel = \"landlock\"";
    with(&lab, low, &["--isolation", "landlock", "--", "true"]).good();
}

fn read_roots() {
    let lab = Lab::new();
    lab.write("allowed/a", "a\n");
    lab.write("denied/d", "d\n");
    symlink(lab.path("denied"), lab.path("allowed/link")).unwrap();
    let (allowed, denied) = (lab.path("allowed"), lab.path("denied"));
    let policy = format!("[read]\nroots = [{allowed:?}]");
    let (allowed, denied) = (allowed.to_str().unwrap(), denied.to_str().unwrap());
    let file = format!("{allowed}/a");
    assert_eq!(
        with(&lab, &policy, &["--read", allowed, "--", "cat", &file]).good(),
        "a\n"
    );
    let link = format!("{allowed}/link");
    let climb = format!("{allowed}/../denied");
    for path in [denied, &link, &climb] {
        for option in ["--read", "--data", "--docs", "--input"] {
            let ended = with(&lab, &policy, &[option, path, "--", "true"]);
            assert_eq!(ended.code(), 125, "{option} {path}: {}", ended.err());
        }
    }
    // The project's own data is not listed either.
    lab.write("project/data/d", "d");
    with(&lab, &policy, &["--", "true"]).refused(125, "policy");
}

/// Standard input is a way of reading, too.
fn read_roots_stdin() {
    let lab = Lab::new();
    let allowed = lab.write("allowed/a", "a\n");
    let denied = lab.write("denied/d", "d\n");
    let policy = format!("[read]\nroots = [{:?}]", lab.path("allowed"));
    assert_eq!(
        with(
            &lab,
            &policy,
            &["--stdin", allowed.to_str().unwrap(), "--", "cat"]
        )
        .good(),
        "a\n"
    );
    with(
        &lab,
        &policy,
        &["--stdin", denied.to_str().unwrap(), "--", "cat"],
    )
    .refused(125, "policy");
}

fn env_pass() {
    let lab = Lab::new();
    let policy = "[env]\npass = [\"LC_*\", \"FUMEHOOD_TEST_ONE\", \"HOME\"]";
    with(&lab, policy, &["--env", "HOME", "--", "true"]).good();
    with(&lab, policy, &["--env", "PATH", "--", "true"]).refused(125, "env.pass");
    let out = with(
        &lab,
        policy,
        &["--env", "PATH2=x", "--", "sh", "-c", "echo $PATH2"],
    );
    assert_eq!(
        out.good(),
        "x\n",
        "a value of one's own is no variable handed on"
    );
}

fn degraded() {
    let lab = Lab::new();
    with(&lab, "", &["--allow-degraded", "memory", "--", "true"]).refused(125, "degraded.allow");
    let policy = "[degraded]\nallow = [\"memory\"]";
    with(&lab, policy, &["--allow-degraded", "memory", "--", "true"]).good();
    with(&lab, policy, &["--allow-degraded", "cpus", "--", "true"]).refused(125, "degraded.allow");
}

fn required_layer() {
    let lab = Lab::new();
    let prepare = "printf '[floor]\\nlayers = [\"leased_uid\"]\\n' > policy.toml";
    under(&lab, prepare, As::Root, &["--", "true"]).good();
    under(&lab, prepare, As::Plain, &["--", "true"]).refused(125, "leased_uid");
    under(&lab, "true", As::Plain, &["--", "true"]).good();
}

fn broken() {
    let lab = Lab::new();
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
        with(&lab, policy, &["--", "true"]).refused(125, said);
        with(&lab, policy, &["--json", "--", "true"]).refused(125, said);
    }
    for prepare in [
        "mkdir policy.toml",
        "mkfifo policy.toml",
        "ln -s nowhere policy.toml",
    ] {
        let ended = under(&lab, prepare, As::Root, &["--", "true"]);
        assert_eq!(ended.code(), 125, "{prepare}: {}", ended.err());
    }
    lab.assert_nothing_left();
}

fn writable_policy() {
    let lab = Lab::new();
    for prepare in [
        "touch policy.toml; chmod 666 policy.toml",
        "touch policy.toml; chmod 664 policy.toml",
        "touch policy.toml; chown 12345 policy.toml",
        "touch policy.toml; chmod 777 .",
        "touch policy.toml; chown 12345 .",
    ] {
        let ended = under(&lab, prepare, As::Root, &["--", "true"]);
        assert_eq!(ended.code(), 125, "{prepare}: {}", ended.err());
    }
    under(&lab, "touch policy.toml", As::Root, &["--", "true"]).good();
    // Who may not even read it is not let run without it.
    under(
        &lab,
        "touch policy.toml; chmod 600 policy.toml",
        As::Plain,
        &["--", "true"],
    )
    .refused(125, "policy");
}

fn project_file() {
    let lab = Lab::new();
    lab.write("outside/d", "outside");
    lab.write("project/data/d", "d");
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
        lab.write("project/fumehood.toml", text);
        let ended = lab.sh(&[], "true");
        assert_eq!(ended.code(), 125, "{text}: {}", ended.err());
    }
    std::fs::create_dir(lab.path("project/inputs")).unwrap();
    lab.write(
        "project/fumehood.toml",
        "data = \"inputs\"\nmemory = \"1G\"\nallow_it = 1\n",
    );
    lab.sh(&[], "true").refused(125, "allow_it");
    lab.write("project/fumehood.toml", "data = \"inputs\"\npids = 99\n");
    assert_eq!(lab.sh(&[], "ls data | wc -l").good().trim(), "0");
}

/// A link inside the project that leads out of it is not below the project.
fn project_link() {
    let lab = Lab::new();
    lab.write("outside/d", "outside");
    symlink(lab.path("outside"), lab.path("project/sly")).unwrap();
    lab.write("project/fumehood.toml", "data = \"sly\"\n");
    let ended = lab.sh(&[], "cat data/d");
    assert_eq!(ended.code(), 125, "{}", ended.out());
}

fn writable_files() {
    let lab = Lab::new();
    for name in [
        "project/fumehood.toml",
        "person/.config/fumehood/config.toml",
    ] {
        let file = lab.write(name, "timeout = 60\n");
        for mode in [0o666, 0o664, 0o646] {
            set_mode(&file, mode);
            lab.sh(&[], "true").refused(125, "written by others");
        }
        set_mode(&file, 0o644);
        lab.sh(&[], "true").good();
        let parent = file.parent().unwrap();
        set_mode(parent, 0o777);
        lab.sh(&[], "true").refused(125, "written by others");
        set_mode(parent, 0o755);
        std::fs::remove_file(&file).unwrap();
    }
    // Through a link the target is held to the same.
    let target = lab.write("elsewhere/config.toml", "timeout = 60\n");
    set_mode(&target, 0o666);
    symlink(&target, lab.path("project/fumehood.toml")).unwrap();
    lab.sh(&[], "true").refused(125, "written by others");
    // A FIFO in its place does not hold us for ever.
    std::fs::remove_file(lab.path("project/fumehood.toml")).unwrap();
    let made = Command::new("mkfifo")
        .arg(lab.path("project/fumehood.toml"))
        .status()
        .unwrap();
    assert!(made.success());
    lab.sh(&[], "true").refused(125, "not a regular file");
}

fn foreign_file() {
    let lab = Lab::new();
    let (uid, gid) = plain_user::account();
    let file = lab.write("project/fumehood.toml", "timeout = 60\n");
    std::os::unix::fs::chown(&file, Some(uid), Some(gid)).unwrap();
    lab.sh(&[], "true").refused(125, "belongs to uid");
}
