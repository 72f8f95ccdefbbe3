//! Files that another user of the host or of the project plants to attack a run. They do not widen what a run can read, do
//! not block the runner, and do not lose a result.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::Value;
use testkit::account;
use testkit::command::{RunningCommand, finish};
use testkit::home::TestHome;
use testkit::process::names_in;
use testkit::wait::eventually;
use testkit::{fresh_id, trial};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn state_on_record(test_home: &TestHome, id: &str) -> Value {
    let path = test_home.home.join(format!("runs/{id}/1/run.json"));
    let record: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    record["state"].clone()
}

trial!(Everyone, a_kept_workspace_is_closed_whatever_was_done_to_it);
fn a_kept_workspace_is_closed_whatever_was_done_to_it() {
    let test_home = TestHome::new();
    for (id, mode) in [("open", "777"), ("sticky", "1777"), ("closed", "0")] {
        // The trial does not check the mode during the run, because init resets it at a time that the trial does not know.
        test_home
            .run(["--keep", "always", "--id", id, "--", "chmod", mode, "."])
            .good();
        let meta = test_home.workspace(id).metadata().unwrap();
        assert_eq!(meta.mode() & 0o7777, 0o700, "{id}");
        assert_eq!(meta.uid(), rustix::process::geteuid().as_raw(), "{id}");
        test_home.gc(&["--kept", id]).good();
    }
    test_home.assert_nothing_left();
}

trial!(Root, a_planted_file_does_not_lose_the_result);
/// A file that belongs to neither the run nor the caller is not collected. The rest of the result is complete.
fn a_planted_file_does_not_lose_the_result() {
    let test_home = TestHome::new();
    let id = fresh_id("planted");
    let script = "echo result > mine; echo up; read go; exit 7";
    let args = ["--keep", "always", "--id", &id, "--stdin", "-", "--json"];
    let mut command = test_home.run_command(args.iter().chain(&["--", "sh", "-c", script]));
    command.stdin(Stdio::piped());
    let mut live = RunningCommand::start(command);
    let workspace = test_home.workspace(&id);
    eventually("its result is there", || workspace.join("mine").exists());
    std::fs::create_dir(workspace.join("planted")).unwrap();
    for name in ["planted/file", "file", "planted"] {
        let path = workspace.join(name);
        if !path.exists() {
            std::fs::write(&path, "planted").unwrap();
        }
        lchown(&path, Some(54321), Some(54321)).unwrap();
    }
    drop(live.child.stdin.take());
    let ended = live.finish();
    assert_eq!(ended.code(), 7, "{}", ended.err());
    assert!(ended.document()["kept_until"].is_u64(), "{}", ended.out());
    assert_eq!(std::fs::read(workspace.join("mine")).unwrap(), b"result\n");
    assert_eq!(workspace.metadata().unwrap().uid(), 0);
    assert_eq!(workspace.metadata().unwrap().mode() & 0o7777, 0o700);
    // Its owner is unchanged: it may be a hard link to another user's file.
    assert_eq!(workspace.join("file").metadata().unwrap().uid(), 54321);
    assert!(state_on_record(&test_home, &id)["kept"]["until"].is_u64());
    test_home.gc(&["--kept", &id]).good();
    test_home.assert_nothing_left();
}

fn fifo(test_home: &TestHome, name: &str) -> PathBuf {
    let path = test_home.path(name);
    let made = Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    path
}

trial!(
    Everyone,
    a_run_whose_stdin_is_a_fifo_without_a_writer_can_be_stopped
);
fn a_run_whose_stdin_is_a_fifo_without_a_writer_can_be_stopped() {
    let test_home = TestHome::new();
    let path = fifo(&test_home, "fifo");
    // The runner starts the program although the FIFO has no writer, and can end the program.
    let mut live = test_home.start([
        "--stdin",
        text(&path),
        "--",
        "sh",
        "-c",
        "echo up; cat; echo end",
    ]);
    live.wait_for("up");
    live.signal(Signal::TERM);
    let ended = live.finish();
    assert_eq!(ended.code(), 123, "{}", ended.err());
    test_home.assert_nothing_left();
    let options = ["--stdin", text(&path), "--timeout", "1s", "--grace", "0"];
    let ended = test_home.sh(&options, "cat");
    assert_eq!(ended.code(), 124, "{}", ended.err());
    assert_eq!(ended.out(), "");
    test_home.assert_nothing_left();
}

trial!(Everyone, a_fifo_is_read_when_its_writer_comes);
/// A writer that opens the FIFO late is read to its end.
fn a_fifo_is_read_when_its_writer_comes() {
    let test_home = TestHome::new();
    let path = fifo(&test_home, "fifo");
    let script = "echo up; cat; echo end";
    let mut live = test_home.start(["--stdin", text(&path), "--", "sh", "-c", script]);
    live.wait_for("up");
    // The runner has the other end open by now, so this open does not block.
    let mut writer = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    writer.write_all(b"late\n").unwrap();
    drop(writer);
    assert_eq!(live.finish().good(), "up\nlate\nend\n");
    test_home.assert_nothing_left();
}

trial!(Everyone, a_fifo_is_waited_for_and_can_be_cancelled);
fn a_fifo_is_waited_for_and_can_be_cancelled() {
    let test_home = TestHome::new();
    let path = fifo(&test_home, "fifo");
    // Open both ends, so that the open does not block and the program's input does not end.
    let open = || {
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).open(&path).unwrap()
    };
    let script = "echo up; read line && echo got $line; sleep 600";
    let args = ["--stdin", text(&path), "--", "sh", "-c", script];
    let mut writer = open();
    let mut live = test_home.start(args);
    live.wait_for("up");
    // While the FIFO is empty, the program's read blocks, as on a terminal, and does not fail.
    writer.write_all(b"hello\n").unwrap();
    live.wait_for("got hello");
    live.signal(Signal::TERM);
    let ended = live.finish();
    assert_eq!(ended.code(), 123, "{}", ended.err());
    // The runner can also end the program if nothing is ever written into the FIFO.
    let mut live = test_home.start(args);
    live.wait_for("up");
    live.signal(Signal::TERM);
    assert_eq!(live.finish().code(), 123);
    test_home.assert_nothing_left();
}

trial!(Everyone, stdin_is_no_directory_socket_or_device);
fn stdin_is_no_directory_socket_or_device() {
    let test_home = TestHome::new();
    let socket = test_home.path("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let refused = [
        test_home.project.clone(),
        PathBuf::from("/"),
        socket,
        PathBuf::from("/dev/zero"),
        PathBuf::from("/dev/tty"),
    ];
    for path in refused {
        let ended = test_home.sh(&["--stdin", text(&path)], "head -c 1");
        assert_eq!(ended.code(), 125, "{path:?}: {}", ended.err());
        test_home.assert_nothing_left();
    }
    let file = test_home.write("file", "given");
    for (path, out) in [(file, "given"), (PathBuf::from("/dev/null"), "")] {
        assert_eq!(test_home.sh(&["--stdin", text(&path)], "cat").good(), out);
    }
}

/// Replaces the project's `data` by a link.
fn link_data(test_home: &TestHome, to: &Path) -> PathBuf {
    let data = test_home.project.join("data");
    let _not_yet = std::fs::remove_file(&data);
    symlink(to, &data).unwrap();
    data
}

trial!(Everyone, a_data_link_to_what_is_private_is_refused);
fn a_data_link_to_what_is_private_is_refused() {
    let test_home = TestHome::new();
    let ssh = test_home.write("person/.ssh/id", "secret\n");
    test_home.write("person/.config/deep/er/key", "secret\n");
    test_home.write("person/study/d", "fine\n");
    let ssh = ssh.parent().unwrap();
    let deep = test_home.path("person/.config/deep/er");
    let chain = test_home.path("chain");
    symlink(ssh, &chain).unwrap();
    let etc = Path::new("/etc/alternatives");
    assert!(etc.is_dir());
    for target in [
        &test_home.user_home,
        ssh,
        &deep,
        &chain,
        etc,
        Path::new("/etc"),
    ] {
        link_data(&test_home, target);
        let ended = test_home.sh(&[], "ls data");
        ended.refused(125, "    --data ");
        test_home.assert_nothing_left();
    }
    // A directory that the caller names is shown, whether the name is the link or its target.
    let data = link_data(&test_home, ssh);
    for given in [ssh, data.as_path()] {
        let ended = test_home.sh(&["--data", text(given)], "cat data/id");
        assert_eq!(ended.good(), "secret\n", "{given:?}");
    }
    let ended = test_home.sh(&["--data", text(&test_home.user_home)], "cat data/study/d");
    assert_eq!(ended.good(), "fine\n");
    // A link called `docs` is refused in the same way.
    std::fs::remove_file(test_home.project.join("data")).unwrap();
    symlink(ssh, test_home.project.join("docs")).unwrap();
    test_home.sh(&[], "true").refused(125, "    --docs ");
}

trial!(Everyone, a_data_link_into_a_home_behind_a_link_is_refused);
/// If the path `$HOME` contains a link, as /home is on many hosts, the hidden directories in it are just as private.
fn a_data_link_into_a_home_behind_a_link_is_refused() {
    let test_home = TestHome::new();
    test_home.write("person/.ssh/id", "secret\n");
    let home = test_home.path("linked-home");
    symlink(&test_home.user_home, &home).unwrap();
    for target in [
        test_home.path("person/.ssh"),
        home.join(".ssh"),
        test_home.user_home.clone(),
    ] {
        link_data(&test_home, &target);
        let mut command = test_home.run_command(["--", "ls", "data"]);
        command.env("HOME", &home);
        finish(command).refused(125, "    --data ");
    }
}

trial!(Root, a_data_link_that_another_made_is_refused);
fn a_data_link_that_another_made_is_refused() {
    let test_home = TestHome::new();
    let store = test_home.write("project/store/d", "stored\n");
    let store = store.parent().unwrap();
    let data = link_data(&test_home, store);
    assert_eq!(test_home.sh(&[], "cat data/d").good(), "stored\n");
    let (uid, gid) = account::uid_and_gid();
    lchown(&data, Some(uid), Some(gid)).unwrap();
    test_home.sh(&[], "cat data/d").refused(125, "    --data ");
    let ended = test_home.sh(&["--data", text(store)], "cat data/d");
    assert_eq!(ended.good(), "stored\n");
}

trial!(
    Everyone,
    read_refuses_the_directories_in_which_the_root_is_built
);
fn read_refuses_the_directories_in_which_the_root_is_built() {
    let test_home = TestHome::new();
    let file = test_home.write("ref/x", "shown\n");
    let dir = text(file.parent().unwrap());
    for inside in ["/empty", "/stage", "/empty/x", "/stage/x"] {
        let read = format!("{dir}:{inside}");
        let ended = test_home.sh(&["--read", &read], "true");
        assert_eq!(ended.code(), 125, "{read}: {}", ended.err());
        test_home.assert_nothing_left();
    }
    let read = format!("{dir}:/empties");
    let ended = test_home.sh(&["--read", &read], "cat /empties/x");
    assert_eq!(ended.good(), "shown\n", "the control");
}

/// Asserts that a file is refused by every option that gives a run something to read.
#[track_caller]
fn assert_kept_out(test_home: &TestHome, dir: &Path, file: &Path) {
    for (option, path) in [
        ("--read", dir),
        ("--read", file),
        ("--input", dir),
        ("--input", file),
        ("--data", dir),
        ("--docs", dir),
        ("--stdin", file),
    ] {
        let ended = test_home.sh(&[option, text(path)], "true");
        assert_eq!(ended.code(), 125, "{option} {path:?}: {}", ended.err());
    }
}

trial!(Everyone, another_analysis_is_not_shown_or_copied);
fn another_analysis_is_not_shown_or_copied() {
    let test_home = TestHome::new();
    for dir in [
        "other-root/scidex-analysis-x",
        "other-root/scidex-analysis-x/sub",
        "other-root/.scidex-analysis-x-0123456789abcdef",
        "work/scidex-analysis-y",
    ] {
        let file = test_home.write(&format!("{dir}/f"), "theirs\n");
        assert_kept_out(&test_home, &test_home.path(dir), &file);
        // A link to the directory is refused too.
        let link = test_home.path("link");
        symlink(test_home.path(dir), &link).unwrap();
        assert_kept_out(&test_home, &link, &link.join("f"));
        std::fs::remove_file(&link).unwrap();
    }
    let file = test_home.write("other-root/results/f", "ours\n");
    let ended = test_home.sh(&["--input", text(&file)], "cat f");
    assert_eq!(ended.good(), "ours\n", "the control");
}

trial!(Everyone, fumehoods_own_files_are_not_shown_or_copied);
fn fumehoods_own_files_are_not_shown_or_copied() {
    let test_home = TestHome::new();
    test_home
        .sh(&["--keep", "always", "--id", "kept"], "true")
        .good();
    let record = test_home.home.join("runs/kept/1/run.json");
    for dir in [
        &test_home.home,
        &test_home.home.join("runs"),
        &test_home.path(""),
    ] {
        assert_kept_out(&test_home, dir, &record);
    }
    test_home.gc(&["--kept"]).good();
    test_home.assert_nothing_left();
}

trial!(Everyone, a_workspace_in_the_kernels_directories_is_refused);
fn a_workspace_in_the_kernels_directories_is_refused() {
    let test_home = TestHome::new();
    let link = test_home.path("link");
    symlink("/dev/shm", &link).unwrap();
    for root in ["/dev/shm", "/dev", "/proc", "/sys", text(&link)] {
        let ended = test_home.sh(&["--workspace-root", root], "true");
        ended.refused(125, "it is the kernel's");
    }
    test_home.assert_nothing_left();
}

trial!(Everyone, a_relative_home_stops_the_run);
fn a_relative_home_stops_the_run() {
    let test_home = TestHome::new();
    for home in ["home", "./home", "."] {
        let mut command = test_home.run_command(["--", "true"]);
        command.env("FUMEHOOD_HOME", home);
        finish(command).refused(125, "must be an absolute path");
    }
    assert_eq!(names_in(&test_home.project).len(), 0);
}
