//! Checks that `fumehood doctor` reports what a later run finds: on this host, and on this host with a mechanism
//! removed.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use testkit::account;
use testkit::command::{FinishedCommand, RunningCommand, finish};
use testkit::home::TestHome;
use testkit::process::names_in;
use testkit::program;
use testkit::trial;

fn document(ended: &FinishedCommand) -> Value {
    let code = ended.code();
    let document = ended.document();
    assert_eq!(code, if document["starts"] == true { 0 } else { 125 });
    document
}

fn finding<'a>(document: &'a Value, name: &str) -> Option<&'a Value> {
    let findings = document["findings"].as_array().unwrap();
    findings.iter().find(|f| f["name"] == name)
}

#[track_caller]
fn found<'a>(document: &'a Value, name: &str, severity: &str) -> &'a Value {
    let found = finding(document, name);
    let found = found.unwrap_or_else(|| panic!("no {name} in {}", document["findings"]));
    assert_eq!(found["severity"], severity, "{found}");
    found
}

fn lines(finding: &Value) -> String {
    let lines = finding["remedy"]["lines"].as_array().unwrap();
    let lines: Vec<&str> = lines.iter().map(|l| l.as_str().unwrap()).collect();
    lines.join("\n")
}

fn verdict<'a>(document: &'a Value, mechanism: &str) -> &'a str {
    let list = document["mechanisms"].as_array().unwrap();
    let tried = list.iter().find(|m| m["mechanism"] == mechanism).unwrap();
    tried["verdict"].as_str().unwrap()
}

trial!(
    Everyone,
    doctor_predicts_the_level_and_limits_that_a_run_records
);
fn doctor_predicts_the_level_and_limits_that_a_run_records() {
    let test_home = TestHome::new();
    let said = document(&test_home.ask(["doctor", "--json"]));
    let ran = test_home.sh_json(&[], "true");
    assert_eq!(said["starts"], true, "{said}");
    assert_eq!(said["level"], ran["isolation"]["level"]);
    for (limit, entry) in ran["limits"].as_object().unwrap() {
        let mut all = said["limits"].as_array().unwrap().iter();
        let told = all.find(|l| l["limit"] == **limit).unwrap();
        assert_eq!(told["enforced_by"], entry["enforced_by"], "{limit}");
        assert_eq!(told["how_hard"], entry["how_hard"], "{limit}");
    }
    // Doctor tries each mechanism. No mechanism that a level needs fails.
    for tried in said["mechanisms"].as_array().unwrap() {
        if tried["needed_for"] != "neither" {
            assert_ne!(tried["verdict"], "fails", "{tried}");
        }
    }
    assert_eq!(said["mechanisms"].as_array().unwrap().len(), 24);
    let miniature = &said["levels"][0];
    assert_eq!(
        (&miniature["level"], &miniature["works"]),
        (&"full".into(), &true.into())
    );
}

trial!(Everyone, doctor_leaves_no_file_and_no_cgroup_behind);
fn doctor_leaves_no_file_and_no_cgroup_behind() {
    let test_home = TestHome::new();
    let live = {
        let mut command = test_home.fumehood();
        command.args(["doctor", "--json"]);
        RunningCommand::start(command)
    };
    let group = format!("fumehood-doctor-{}", live.pid());
    assert_eq!(live.finish().code(), 0);
    assert!(!test_home.home.exists(), "a doctor makes no home");
    assert!(test_home.workspaces().is_empty());
    let mut pending = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(dir) = pending.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            assert_ne!(entry.file_name(), *group, "{:?}", entry.path());
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                pending.push(entry.path());
            }
        }
    }
}

trial!(Everyone, the_json_document_matches_its_schema);
fn the_json_document_matches_its_schema() {
    let test_home = TestHome::new();
    let fine = document(&test_home.ask(["doctor", "--json"]));
    let stopped = document(&test_home.ask(["doctor", "--json", "--workspace-root", "/nowhere"]));
    assert_eq!(stopped["starts"], false);
    found(&stopped, "workspace_root", "stops");
    let documents = test_home.write(
        "documents.json",
        serde_json::to_vec(&[fine, stopped]).unwrap(),
    );
    let schema = test_home.write(
        "schema.json",
        include_str!("../../../../docs/doctor-v1.schema.json"),
    );
    let checker = "import json, sys, jsonschema\n\
        schema, documents = (json.load(open(a)) for a in sys.argv[1:])\n\
        jsonschema.Draft202012Validator.check_schema(schema)\n\
        v = jsonschema.Draft202012Validator(schema)\n\
        for d in documents: v.validate(d)\n\
        for spoil in (dict(level='best'), dict(extra=1), dict(starts='yes'), dict(findings=[{}])):\n\
        \x20   assert not v.is_valid({**documents[0], **spoil}), spoil\n";
    let mut python = Command::new("/usr/bin/python3");
    python
        .args(["-I", "-c", checker])
        .arg(schema)
        .arg(documents);
    let checked = python.output().unwrap();
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success(), "{said}");
}

trial!(Everyone, the_first_line_is_the_verdict);
fn the_first_line_is_the_verdict() {
    let test_home = TestHome::new();
    let said = test_home.ask(["doctor"]).good();
    let first = said.lines().next().unwrap();
    assert!(first.starts_with("Runs start at level `full`"), "{said}");
    assert!(!said.contains("\x1b"), "no colours off a terminal");
    assert!(!said.contains("\nfine"), "{said}");
    let all = test_home.ask(["doctor", "-v"]).good();
    assert_eq!(all.lines().next(), Some(first));
    for part in [
        "\nfine ",
        "landlock  ",
        "RLIMIT_NOFILE",
        "level full: built in miniature",
    ] {
        assert!(all.contains(part), "no {part:?} in {all}");
    }
    // Lines to copy are never wrapped. Every other line fits the width.
    let long = said
        .lines()
        .filter(|l| !l.starts_with("          ") && l.chars().count() > 80);
    assert_eq!(long.collect::<Vec<_>>(), Vec::<&str>::new());
    let ended = test_home.ask(["doctor", "--workspace-root", "/nowhere"]);
    assert_eq!(ended.code(), 125);
    assert!(ended.out().starts_with("Runs do not start"));
}

trial!(Everyone, a_configuration_that_is_refused_stops_runs);
fn a_configuration_that_is_refused_stops_runs() {
    let test_home = TestHome::new();
    test_home.write("project/fumehood.toml", "isolation = \"landlock\"\n");
    let said = document(&test_home.ask(["doctor", "--json"]));
    assert_eq!(said["starts"], false);
    let refused = found(&said, "configuration", "stops");
    assert!(refused["text"].as_str().unwrap().contains("isolation"));
    // The other checks ran all the same.
    assert_eq!(said["level"], "full");
    std::fs::remove_file(test_home.project.join("fumehood.toml")).unwrap();
    assert_eq!(
        document(&test_home.ask(["doctor", "--json"]))["starts"],
        true
    );
}

pub fn docker_like(test_home: &TestHome, options: &[&str], args: &[&str]) -> FinishedCommand {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let script = here.join("../../tests/vm/docker_like.py");
    let mut command = test_home.with_environment(Command::new("/usr/bin/python3"));
    command.arg("-I").arg(script).args(options).arg("--");
    if options.contains(&"--user") {
        let home = format!("/home/{}", account::ACCOUNT);
        command
            .args(["env", "-u", "FUMEHOOD_HOME"])
            .arg(format!("HOME={home}"))
            .arg("FUMEHOOD_WORKSPACE_ROOT=/var/tmp")
            .arg(program::executable_copies().join("fumehood"));
    } else {
        command.arg(program::binary());
    }
    command.args(args).current_dir("/");
    finish(command)
}

trial!(Root, doctor_names_the_docker_flags_that_give_level_full);
/// docker_like.py refuses the calls with a real seccomp filter. To try a remedy that doctor names, the trial leaves out
/// the part of the confinement that the remedy removes.
fn doctor_names_the_docker_flags_that_give_level_full() {
    let test_home = TestHome::new();
    account::uid_and_gid();
    for user in [&[][..], &["--user", account::ACCOUNT]] {
        let with = |more: &[&'static str], args: &[&str]| {
            let options: Vec<&str> = user.iter().chain(more).copied().collect();
            docker_like(&test_home, &options, args)
        };
        let said = document(&with(&[], &["doctor", "--json"]));
        assert_eq!(said["level"], "landlock", "{said}");
        assert_eq!(said["host"]["is_filtered"], true);
        assert_eq!(verdict(&said, "mount_namespace"), "fails");
        assert_eq!(verdict(&said, "landlock"), "works");
        // If this machine does not look like a Docker container, doctor reports a confined process (`shut_in`).
        let name = match said["host"]["container"].is_null() {
            true => "shut_in",
            false => "container",
        };
        let why = found(&said, name, "warning");
        assert!(why["text"].as_str().unwrap().contains("seccomp filter"));
        if said["host"]["container"] == "docker" {
            let flags = lines(why);
            assert!(flags.contains("seccomp=unconfined"), "{flags}");
            assert!(flags.contains("systempaths=unconfined"), "{flags}");
            assert_eq!(flags.contains("--cap-add SYS_ADMIN"), user.is_empty());
        }
        // With a higher floor no run starts on the same host.
        let stopped = document(&with(&[], &["doctor", "--json", "--isolation", "full"]));
        assert_eq!(stopped["starts"], false);
        found(&stopped, name, "stops");
        // With the named remedies the level is full.
        let given = ["--no-seccomp", "--no-masks", "--no-capabilities"];
        let said = document(&with(&given, &["doctor", "--json"]));
        assert_eq!(said["level"], "full", "{said}");
    }
    // Only the mount of a new /proc is refused, because /proc is masked.
    let given = [
        "--user",
        account::ACCOUNT,
        "--no-seccomp",
        "--no-capabilities",
    ];
    let said = document(&docker_like(&test_home, &given, &["doctor", "--json"]));
    assert_eq!(verdict(&said, "user_namespace"), "works", "{said}");
    assert_eq!(verdict(&said, "new_proc"), "fails");
    assert_eq!(said["level"], "landlock");
}

/// Becomes the test account in a user namespace that maps every uid and allows no further user namespace.
const NO_MORE_NAMESPACES: &str = r#"
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER = 0x10000000
ready, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    assert libc.unshare(CLONE_NEWUSER) == 0
    os.write(ready[1], b'x')
    os.read(go[0], 1)
    os.setgid(0); os.setuid(0)
    if sys.argv[2] != '-':
        open('/proc/sys/user/max_user_namespaces', 'w').write(sys.argv[2])
    uid, gid = (int(n) for n in sys.argv[1].split(':'))
    os.setgroups([]); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)
    os.execv(sys.argv[3], sys.argv[3:])
os.read(ready[0], 1)
for name in ('uid_map', 'gid_map'):
    open(f'/proc/{child}/{name}', 'w').write('0 0 4294967295')
os.write(go[1], b'x')
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"#;

trial!(Root, doctor_names_the_switch_for_user_namespaces);
fn doctor_names_the_switch_for_user_namespaces() {
    let test_home = TestHome::new();
    let (uid, gid) = account::uid_and_gid();
    let with = |most: &str| {
        let mut command = test_home.with_environment(Command::new("/usr/bin/python3"));
        command
            .args(["-I", "-c", NO_MORE_NAMESPACES])
            .arg(format!("{uid}:{gid}"))
            .arg(most)
            .arg(program::executable_copies().join("fumehood"))
            .args(["doctor", "--json"])
            .env("HOME", format!("/home/{}", account::ACCOUNT))
            .env("FUMEHOOD_WORKSPACE_ROOT", "/var/tmp")
            .env_remove("FUMEHOOD_HOME")
            .current_dir("/");
        document(&finish(command))
    };
    let said = with("0");
    assert_eq!(said["level"], "landlock", "{said}");
    assert_eq!(said["host"]["sysctls"]["max_user_namespaces"], 0);
    let why = found(&said, "namespace_count", "warning");
    assert!(lines(why).contains("user.max_user_namespaces=10000"));
    let list = said["mechanisms"].as_array().unwrap();
    let tried = list.iter().find(|m| m["mechanism"] == "user_namespace");
    assert_eq!(tried.unwrap()["errno_name"], "ENOSPC");
    assert_eq!(tried.unwrap()["finding"], "namespace_count");
    // Control: the same environment without the switch.
    assert_eq!(with("-")["level"], "full");
}

trial!(Root, doctor_names_the_capability_that_root_lacks);
fn doctor_names_the_capability_that_root_lacks() {
    let test_home = TestHome::new();
    let without = |set: &str| {
        let mut command = test_home.with_environment(Command::new("setpriv"));
        command
            .arg(format!("--bounding-set={set}"))
            .arg(program::binary())
            .args(["doctor", "--json"]);
        document(&finish(command))
    };
    let said = without("-net_admin");
    assert_eq!(said["level"], "landlock", "{said}");
    assert_eq!(verdict(&said, "net_namespace"), "fails");
    assert_eq!(verdict(&said, "mount_namespace"), "works");
    let why = found(&said, "capabilities", "warning");
    assert!(why["text"].as_str().unwrap().contains("NET_ADMIN"), "{why}");
    assert_eq!(without("-net_raw")["level"], "full");
}

/// `fumehood doctor ARGS` in a mount namespace that a script has prepared.
fn doctor_in_prepared_namespace(
    test_home: &TestHome,
    prepare: &str,
    args: &[&str],
) -> FinishedCommand {
    let mut command = test_home.with_environment(Command::new("unshare"));
    let script = format!("set -e\n{prepare}\nexec \"$@\"");
    command
        .args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            &script,
            "sh",
        ])
        .arg(program::binary())
        .arg("doctor")
        .args(args);
    finish(command)
}

trial!(Root, doctor_warns_of_an_unsuitable_workspace_root);
fn doctor_warns_of_an_unsuitable_workspace_root() {
    let test_home = TestHome::new();
    let root = test_home.workspace_root.display();
    let prepare = format!("mount -t tmpfs -o size=8m,noexec none {root}");
    let said = document(&doctor_in_prepared_namespace(
        &test_home,
        &prepare,
        &["--json"],
    ));
    assert_eq!(said["starts"], true, "warnings stop nothing");
    for name in ["workspace_tmpfs", "workspace_noexec", "workspace_room"] {
        found(&said, name, "warning");
    }
    found(&said, "apart", "note");
    let usual = document(&doctor_in_prepared_namespace(
        &test_home,
        "true",
        &["--json"],
    ));
    for name in ["workspace_tmpfs", "workspace_noexec", "apart"] {
        assert!(finding(&usual, name).is_none(), "{name}");
    }
    assert!(names_in(&test_home.workspace_root).is_empty());
}

/// A script that replaces /etc by a copy and applies `change` to it.
fn etc(test_home: &TestHome, change: &str) -> String {
    let copy = test_home.path("etc");
    let copy = copy.display();
    format!(
        "mkdir -p {copy}\nmount -t tmpfs -o mode=755 none {copy}\ncp -a /etc/. {copy}\nmount --bind {copy} /etc\n{change}"
    )
}

trial!(Root, the_policy_decides_whether_runs_start);
fn the_policy_decides_whether_runs_start() {
    let test_home = TestHome::new();
    let shipped = test_home.write(
        "policy.toml",
        include_str!("../../../../packaging/policy.toml"),
    );
    let install = format!(
        "mkdir -m 755 /etc/fumehood\ninstall -m 644 {} /etc/fumehood/policy.toml",
        shipped.display()
    );
    let said = document(&doctor_in_prepared_namespace(
        &test_home,
        &etc(&test_home, &install),
        &["--json"],
    ));
    assert_eq!(
        (&said["starts"], &said["floor"]),
        (&true.into(), &"full".into())
    );
    found(&said, "policy", "fine");
    let missing = document(&doctor_in_prepared_namespace(
        &test_home,
        "true",
        &["--json"],
    ));
    assert_eq!(missing["floor"], "landlock");
    assert!(lines(found(&missing, "policy", "note")).contains("level = \"full\""));
    // With the default floor, runs do not start on a host that offers less.
    let drop = format!(
        "{}\nset -- setpriv --bounding-set=-sys_admin \"$@\"",
        etc(&test_home, &install)
    );
    // The script mounts before it drops the capability.
    let said = document(&doctor_in_prepared_namespace(
        &test_home,
        &drop,
        &["--json"],
    ));
    assert_eq!(said["starts"], false);
    found(&said, "capabilities", "stops");
    let broken = install + "\necho nonsense > /etc/fumehood/policy.toml";
    let said = document(&doctor_in_prepared_namespace(
        &test_home,
        &etc(&test_home, &broken),
        &["--json"],
    ));
    found(&said, "configuration", "stops");
}

trial!(Root, doctor_reports_leased_uids_that_belong_to_accounts);
fn doctor_reports_leased_uids_that_belong_to_accounts() {
    let test_home = TestHome::new();
    let add = "echo 'mallory:x:1900000077:1900000077::/:/bin/sh' >> /etc/passwd\n\
        echo 'podman:1900000000:65536' >> /etc/subuid";
    let said = document(&doctor_in_prepared_namespace(
        &test_home,
        &etc(&test_home, add),
        &["--json"],
    ));
    // Every uid of the range belongs to an account, so none can be leased.
    assert_eq!(said["starts"], false);
    found(&said, "uids", "stops");
    let add = "echo 'mallory:x:1900000077:1900000077::/:/bin/sh' >> /etc/passwd";
    let said = document(&doctor_in_prepared_namespace(
        &test_home,
        &etc(&test_home, add),
        &["--json"],
    ));
    assert_eq!(said["starts"], true);
    let told = found(&said, "uids", "warning");
    assert!(told["text"].as_str().unwrap().contains("mallory"));
    found(
        &document(&doctor_in_prepared_namespace(
            &test_home,
            "true",
            &["--json"],
        )),
        "uids",
        "fine",
    );
}
