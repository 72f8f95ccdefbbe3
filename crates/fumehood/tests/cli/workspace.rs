//! P1 and P5: the workspace is a private directory with a known name. It is created exclusively, and removed afterwards unless
//! the caller keeps it.

use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;
use testkit::account;
use testkit::command::{RunningCommand, finish};
use testkit::home::{TestHome, set_mode};
use testkit::process::names_in;
use testkit::wait::eventually;
use testkit::{fresh_id, is_root, trial};

trial!(Everyone, the_workspace_is_in_tmp_and_named_after_the_id);
fn the_workspace_is_in_tmp_and_named_after_the_id() {
    let test_home = TestHome::new();
    let id = fresh_id("e2e-tmp");
    let path = format!("/tmp/scidex-analysis-{id}");
    let mut command = test_home.run_command(["--id", &id, "--", "sh", "-c", "pwd; stat -c %a ."]);
    command.env_remove("FUMEHOOD_WORKSPACE_ROOT");
    let ended = finish(command);
    assert_eq!(ended.good(), format!("{path}\n700\n"));
    assert!(!Path::new(&path).exists());
    test_home.assert_nothing_left();
}

trial!(Everyone, the_workspace_has_the_same_path_inside_and_outside);
fn the_workspace_has_the_same_path_inside_and_outside() {
    let test_home = TestHome::new();
    let id = fresh_id("same");
    let outside = test_home.workspace(&id);
    let script = "pwd; echo mine > note; ls -d $PWD; echo ready; read go; cat reply";
    let mut command =
        test_home.run_command(["--id", &id, "--stdin", "-", "--", "sh", "-c", script]);
    command.stdin(Stdio::piped());
    let mut live = RunningCommand::start(command);
    live.wait_for("ready");
    let meta = outside.symlink_metadata().unwrap();
    assert!(meta.is_dir());
    assert_eq!(meta.mode() & 0o7777, 0o700);
    assert_eq!(std::fs::read(outside.join("note")).unwrap(), b"mine\n");
    let own = rustix::process::geteuid().as_raw();
    // For root the owner is the leased uid, otherwise the caller.
    assert_eq!(meta.uid() == own, !is_root());
    std::fs::write(outside.join("reply"), "theirs\n").unwrap();
    set_mode(&outside.join("reply"), 0o644);
    drop(live.child.stdin.take());
    let ended = live.finish();
    let shown = outside.display();
    assert_eq!(ended.good(), format!("{shown}\n{shown}\nready\ntheirs\n"));
    assert!(!outside.exists());
    test_home.assert_nothing_left();
}

/// The metadata of a path, without following links, and the content of a regular file.
fn fingerprint(path: &Path) -> (u32, u64, u32, i64, Option<Vec<u8>>) {
    let meta = path.symlink_metadata().unwrap();
    let content = meta.is_file().then(|| std::fs::read(path).unwrap());
    (
        meta.mode(),
        meta.ino(),
        meta.uid(),
        meta.mtime_nsec(),
        content,
    )
}

#[track_caller]
fn assert_refused_and_untouched(test_home: &TestHome, id: &str) {
    let path = test_home.workspace(id);
    let before = fingerprint(&path);
    let ended = test_home.sh(&["--id", id], "touch was-here");
    ended.refused(125, "exists already and is not touched");
    assert_eq!(fingerprint(&path), before);
    let document = test_home.sh_json(&["--id", id], "touch was-here");
    assert_eq!(document["status"], "error");
    assert_eq!(fingerprint(&path), before);
    // Nothing was added.
    assert_eq!(
        test_home.workspaces().len(),
        1,
        "{:?}",
        test_home.workspaces()
    );
    assert_eq!(names_in(&test_home.home.join("runs")).len(), 0);
    let control = test_home.sh(&["--id", "control"], "touch was-here");
    control.good();
}

/// Makes a file, a directory, a link or the like at a path.
type Maker = fn(&TestHome, &Path);

trial!(Everyone, a_run_refuses_an_existing_workspace_path);
fn a_run_refuses_an_existing_workspace_path() {
    let makers: [(&str, Maker); 5] = [
        ("dir", |_, at| std::fs::create_dir(at).unwrap()),
        ("file", |_, at| std::fs::write(at, "precious").unwrap()),
        ("link", |test_home, at| {
            symlink(&test_home.project, at).unwrap()
        }),
        ("dangling", |test_home, at| {
            symlink(test_home.path("nowhere"), at).unwrap()
        }),
        ("loop", |_, at| symlink(at, at).unwrap()),
    ];
    for (id, make) in makers {
        let test_home = TestHome::new();
        make(&test_home, &test_home.workspace(id));
        assert_refused_and_untouched(&test_home, id);
        assert!(!test_home.path("nowhere").exists());
        assert!(names_in(&test_home.project).is_empty(), "{id}");
    }
}

trial!(Root, a_run_refuses_another_users_directory);
fn a_run_refuses_another_users_directory() {
    let test_home = TestHome::new();
    set_mode(&test_home.workspace_root, 0o1777);
    let (uid, gid) = account::uid_and_gid();
    let path = test_home.workspace("squat");
    std::fs::create_dir(&path).unwrap();
    std::os::unix::fs::chown(&path, Some(uid), Some(gid)).unwrap();
    assert_refused_and_untouched(&test_home, "squat");
}

trial!(Everyone, an_id_runs_once_at_a_time);
fn an_id_runs_once_at_a_time() {
    let test_home = TestHome::new();
    let script = "echo first > mine; echo ready; read go; cat mine; ls";
    let args = ["--id", "twin", "--stdin", "-", "--", "sh", "-c", script];
    let mut command = test_home.run_command(args);
    command.stdin(Stdio::piped());
    let mut first = RunningCommand::start(command);
    first.wait_for("ready");
    for _ in 0..3 {
        let second = test_home.sh(&["--id", "twin"], "echo second > mine");
        second.refused(125, "running already");
    }
    // Another home has no record of the run, but the directory exists.
    let mut elsewhere = test_home.run_command(["--id", "twin", "--", "true"]);
    elsewhere.env("FUMEHOOD_HOME", test_home.path("other-home"));
    finish(elsewhere).refused(125, "exists already");
    test_home.gc(&[]).good();
    drop(first.child.stdin.take());
    assert_eq!(first.finish().good(), "ready\nfirst\nmine\n");
    test_home.assert_nothing_left();
    test_home.sh(&["--id", "twin", "--replace"], "true").good();
}

trial!(Everyone, an_id_that_is_no_file_name_is_refused);
fn an_id_that_is_no_file_name_is_refused() {
    let test_home = TestHome::new();
    let long = "x".repeat(65);
    let bad = [
        "../x",
        "a/b",
        "",
        &long,
        ".hidden",
        "-dash",
        "_under",
        "a\nb",
        "a b",
        "é",
        "a\u{202e}b",
        "..",
        ".",
        "/abs",
        "a\tb",
        "a;b",
        "a%2fb",
        "x\u{0}",
    ];
    for id in bad.iter().filter(|id| !id.contains('\0')) {
        let ended = test_home.run([&format!("--id={id}"), "--", "true"]);
        assert_eq!(ended.code(), 125, "{id:?}: {}", ended.err());
        assert_eq!(ended.err().lines().count(), 1, "{id:?}: {}", ended.err());
    }
    use std::os::unix::ffi::OsStrExt;
    let bytes = std::ffi::OsStr::from_bytes(b"--id=a\xffb");
    let ended = test_home.run([bytes, "--".as_ref(), "true".as_ref()]);
    assert_eq!(ended.code(), 125);
    test_home.assert_nothing_left();
    assert_eq!(
        names_in(test_home.workspace_root.parent().unwrap()).len(),
        4 - usize::from(!test_home.home.exists())
    );
    let longest = "x".repeat(64);
    for id in [&longest, "A", "0", "a.b_c-D", "a..", "9-"] {
        let out = test_home.sh(&["--id", id], "basename $PWD").good();
        assert_eq!(out, format!("scidex-analysis-{id}\n"));
    }
    test_home.assert_nothing_left();
}

trial!(Everyone, an_open_root_is_refused);
fn an_open_root_is_refused() {
    let test_home = TestHome::new();
    for mode in [0o777, 0o775, 0o757, 0o2775] {
        set_mode(&test_home.workspace_root, mode);
        let ended = test_home.sh(&[], "true");
        ended.refused(125, "is not sticky");
        test_home.assert_nothing_left();
    }
    for mode in [0o1777, 0o755, 0o700, 0o1775] {
        set_mode(&test_home.workspace_root, mode);
        test_home.sh(&[], "true").good();
        test_home.assert_nothing_left();
    }
    let missing = test_home.path("missing").display().to_string();
    test_home
        .sh(&["--workspace-root", &missing], "true")
        .refused(125, "workspace root");
    let file = test_home.write("file", "").display().to_string();
    test_home
        .sh(&["--workspace-root", &file], "true")
        .refused(125, "file");
}

trial!(Root, another_users_workspace_root_is_refused);
fn another_users_workspace_root_is_refused() {
    let test_home = TestHome::new();
    let (uid, gid) = account::uid_and_gid();
    std::os::unix::fs::chown(&test_home.workspace_root, Some(uid), Some(gid)).unwrap();
    let ended = test_home.sh(&[], "true");
    assert_eq!(ended.code(), 125, "{}", ended.err());
    test_home.assert_nothing_left();
}

trial!(Everyone, a_root_may_be_a_symlink);
fn a_root_may_be_a_symlink() {
    let test_home = TestHome::new();
    let link = test_home.path("link");
    symlink(&test_home.workspace_root, &link).unwrap();
    let root = link.display().to_string();
    let options = ["--workspace-root", root.as_str(), "--id", "linked"];
    let out = test_home.sh(&options, "pwd -P; pwd").good();
    let real = test_home.workspace("linked").display().to_string();
    assert_eq!(out, format!("{real}\n{real}\n"));
    let again: Vec<&str> = options.into_iter().chain(["--replace"]).collect();
    let document = test_home.sh_json(&again, "true");
    assert_eq!(document["workspace"], real);
    test_home.assert_nothing_left();
}

trial!(Everyone, the_workspace_is_removed_after_every_end);
fn the_workspace_is_removed_after_every_end() {
    let hog = "exec /usr/bin/python3 -c 'x = bytearray(400 << 20); print(len(x))'";
    let ends: [(&[&str], &str, i32); 6] = [
        (&[], "echo x > f", 0),
        (&[], "echo x > f; exit 3", 3),
        (
            &["--timeout", "300ms", "--grace", "0"],
            "echo x > f; sleep 600",
            124,
        ),
        (&["--memory", "64M", "--allow-degraded", "memory"], hog, 137),
        (&["--disk", "4M"], "exec head -c 64M /dev/zero > f", 122),
        (&[], "echo x > f; kill -SEGV $$", 139),
    ];
    for (options, script, code) in ends {
        let test_home = TestHome::new();
        let ended = test_home.sh(options, script);
        assert_eq!(ended.code(), code, "{script}: {}", ended.err());
        test_home.assert_nothing_left();
    }
}

trial!(Everyone, the_workspace_is_removed_after_a_failed_start);
fn the_workspace_is_removed_after_a_failed_start() {
    let test_home = TestHome::new();
    test_home.write("project/not-executable", "text");
    test_home.write("project/broken", "#!/nowhere/interpreter\n");
    set_mode(&test_home.path("project/broken"), 0o755);
    let big = test_home.write("project/big", vec![0; 2 << 20]);
    let big = big.to_str().unwrap();
    let starts: [(&[&str], i32); 7] = [
        (&["--", "no-such-command-here"], 127),
        (
            &["--input", "not-executable", "--", "./not-executable"],
            126,
        ),
        (&["--input", "broken", "--", "./broken"], 127),
        (&["--input", "missing-input", "--", "true"], 125),
        (&["--stdin", "missing-stdin", "--", "true"], 125),
        (&["--data", "missing-data", "--", "true"], 125),
        (&["--disk", "1M", "--input", big, "--", "true"], 125),
    ];
    for (args, code) in starts {
        let ended = test_home.run(args);
        assert_eq!(ended.code(), code, "{args:?}: {}", ended.err());
        test_home.assert_nothing_left();
        let json: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
        let ended = test_home.run(json);
        assert_eq!(ended.code(), code, "{args:?}");
        assert_eq!(ended.document()["status"], "error", "{args:?}");
        test_home.assert_nothing_left();
    }
}

#[track_caller]
fn kept_path(document: &Value) -> &Path {
    assert!(document["kept_until"].is_u64(), "{document}");
    Path::new(document["workspace"].as_str().unwrap())
}

trial!(
    Everyone,
    keep_on_failure_keeps_the_workspace_of_a_failed_run_only
);
fn keep_on_failure_keeps_the_workspace_of_a_failed_run_only() {
    let test_home = TestHome::new();
    let good = test_home.sh_json(&["--keep", "on-failure"], "echo x > f");
    assert!(good["kept_until"].is_null());
    test_home.assert_nothing_left();

    let make = "mkdir -p sub; echo result > sub/f; chmod 0 sub; exit 4";
    let bad = test_home.sh_json(&["--keep", "on-failure", "--id", "bad"], make);
    let path = kept_path(&bad);
    assert_eq!(path, test_home.workspace("bad"));
    let own = rustix::process::geteuid().as_raw();
    let now = analysis_now();
    let until = bad["kept_until"].as_u64().unwrap();
    assert!((now + 23 * 3600..=now + 25 * 3600).contains(&until), "24h");
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o700);
    for inner in [path.to_path_buf(), path.join("sub")] {
        assert_eq!(inner.metadata().unwrap().uid(), own, "{inner:?}");
    }
    set_mode(&path.join("sub"), 0o700);
    assert_eq!(path.join("sub/f").metadata().unwrap().uid(), own);
    assert_eq!(std::fs::read(path.join("sub/f")).unwrap(), b"result\n");
    // The private /tmp and home are not among the outputs.
    assert_eq!(names_in(path), ["sub"]);

    // While the workspace is kept, its id is in use, and neither a run nor `gc` removes it.
    test_home
        .sh(&["--id", "bad"], "true")
        .refused(125, "gc --kept bad");
    test_home.sh(&[], "true").good();
    let gc = test_home.gc(&[]);
    assert!(gc.err().contains("still kept"), "{}", gc.err());
    assert!(path.join("sub/f").exists());
    test_home.gc(&["--kept", "bad"]).good();
    test_home.assert_nothing_left();
    test_home.sh(&["--id", "bad", "--replace"], "true").good();
}

fn analysis_now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap().as_secs()
}

trial!(Everyone, keep_for_keeps_the_workspace_for_that_time);
fn keep_for_keeps_the_workspace_for_that_time() {
    let test_home = TestHome::new();
    let options = ["--keep", "always", "--keep-for", "1s", "--id", "brief"];
    let summary = test_home.sh(&options, "echo x > f");
    summary.good();
    assert!(summary.err().contains("kept for"), "{}", summary.err());
    let path = test_home.workspace("brief");
    assert!(path.join("f").exists());
    let record = std::fs::read(test_home.home.join("runs/brief/1/run.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    let until = record["state"]["kept"]["until"].as_u64().unwrap();
    eventually("its time is over", || analysis_now() >= until);
    test_home.sh(&[], "true").good();
    test_home.assert_nothing_left();
}

trial!(Everyone, gc_removes_one_kept_or_all);
fn gc_removes_one_kept_or_all() {
    let test_home = TestHome::new();
    for id in ["one", "two", "three"] {
        test_home
            .sh(&["--keep", "always", "--id", id], "echo x > f")
            .good();
    }
    test_home.gc(&["--kept", "two"]).good();
    let mut left = test_home.workspaces();
    left.sort();
    assert_eq!(left, ["scidex-analysis-one", "scidex-analysis-three"]);
    test_home
        .gc(&["--kept", "no-such-id"])
        .refused(125, "nothing is kept");
    assert_eq!(test_home.workspaces().len(), 2);
    // A foreign directory in the place of a kept workspace is not removed.
    std::fs::rename(test_home.workspace("one"), test_home.path("moved")).unwrap();
    std::fs::create_dir(test_home.workspace("one")).unwrap();
    std::fs::write(test_home.workspace("one").join("precious"), "x").unwrap();
    test_home.gc(&["--kept"]).good();
    assert_eq!(test_home.workspaces(), ["scidex-analysis-one"]);
    assert!(test_home.workspace("one").join("precious").exists());
    assert!(names_in(&test_home.home.join("runs")).is_empty());
}

trial!(Everyone, a_workspace_in_memory_is_removed);
fn a_workspace_in_memory_is_removed() {
    let test_home = TestHome::new();
    test_home.write("project/in.txt", "given\n");
    let script = "cat in.txt; stat -f -c %T .; echo x > out; ls";
    let options = ["--workspace", "memory", "--input", "in.txt"];
    assert_eq!(
        test_home.sh(&options, script).good(),
        "given\ntmpfs\nin.txt\nout\n"
    );
    test_home.assert_nothing_left();
    let document = test_home.sh_json(&["--workspace", "memory", "--keep", "always"], "true");
    assert!(document["kept_until"].is_null());
    assert!(document["notices"].to_string().contains("cannot be kept"));
    test_home.assert_nothing_left();
}

/// Runs a program that builds a hostile tree, and asserts that nothing of the tree is left, however the program ends.
#[track_caller]
fn builds_and_goes(test_home: &TestHome, script: &str) {
    let out = test_home.python(&["--timeout", "50s"], script).good();
    assert_eq!(out, "built\n");
    test_home.assert_nothing_left();
}

trial!(Everyone, locked_trees_are_removed);
fn locked_trees_are_removed() {
    let test_home = TestHome::new();
    builds_and_goes(
        &test_home,
        r#"
import os
os.makedirs("a/b/c")
for path in ["a/b/c/f", "a/b/f", "a/f"]:
    open(path, "w").close()
    os.chmod(path, 0)
for path in ["a/b/c", "a/b", "a"]:
    os.chmod(path, 0)
os.mkdir("write-only", 0o200)
os.mkdir("execute-only", 0o100)
os.chmod(".", 0)
print("built")
"#,
    );
}

trial!(Everyone, deep_trees_are_removed);
fn deep_trees_are_removed() {
    let test_home = TestHome::new();
    builds_and_goes(
        &test_home,
        r#"
import os
for level in range(3000):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
open("bottom", "w").close()
print("built")
"#,
    );
}

trial!(Everyone, odd_names_are_removed);
fn odd_names_are_removed() {
    let test_home = TestHome::new();
    builds_and_goes(
        &test_home,
        r#"
import os
for byte in range(1, 256):
    if byte != 0x2f and byte != 0x2e:
        os.mkdir(bytes([byte]))
        open(bytes([byte, 0x2f, byte]), "w").close()
for name in [b"-rf", b"...", b"\xff\xfe", b"a\nb", b"x" * 255, b"\x1b[2J", b"..x", b"**", b"$(reboot)"]:
    open(name, "w").close()
os.mkfifo("fifo")
import socket
socket.socket(socket.AF_UNIX).bind("socket")
os.symlink("self", "self")
print("built")
"#,
    );
}

trial!(Everyone, many_files_are_removed);
fn many_files_are_removed() {
    let test_home = TestHome::new();
    builds_and_goes(
        &test_home,
        r#"
import os
for d in range(10):
    os.mkdir(str(d))
    fd = os.open(str(d), os.O_RDONLY)
    for f in range(2000):
        os.mknod(str(f), 0o600, dir_fd=fd)
    os.close(fd)
print("built")
"#,
    );
}

trial!(Everyone, links_are_not_followed);
fn links_are_not_followed() {
    let test_home = TestHome::new();
    let victim = test_home.write("victim/deep/precious", "precious");
    test_home.write("project/data/d", "data");
    let top = test_home.path("victim");
    let script = format!(
        r#"
import os
top = {top:?}
os.symlink(top, "to-victim")
os.symlink(top + "/deep/precious", "to-file")
os.mkdir("inner")
os.symlink("../../../victim", "inner/climb")
os.symlink("../../..", "inner/up")
os.symlink("/", "root")
os.symlink(os.getcwd() + "/data", "to-data")
print("built")
"#
    );
    builds_and_goes(&test_home, &script);
    assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
    assert_eq!(
        std::fs::read(test_home.path("project/data/d")).unwrap(),
        b"data"
    );
}
