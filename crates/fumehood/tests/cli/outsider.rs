//! Somebody else on the host, or in the project, who has read the source: what they plant does not widen what a run is
//! shown, does not hold the runner up, and does not lose a result.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::Value;

use crate::lab::{Lab, Live, eventually, finish, fresh_id, names_in};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    (
        "a_kept_workspace_is_closed_whatever_was_done_to_it",
        For::Everyone,
        kept_is_closed,
    ),
    (
        "a_planted_file_does_not_lose_the_result",
        For::Root,
        planted_file,
    ),
    (
        "a_fifo_without_a_writer_is_no_trap",
        For::Everyone,
        fifo_without_writer,
    ),
    (
        "a_fifo_is_waited_for_and_can_be_cancelled",
        For::Everyone,
        fifo_with_writer,
    ),
    (
        "a_fifo_is_read_when_its_writer_comes",
        For::Everyone,
        fifo_with_late_writer,
    ),
    (
        "stdin_is_no_directory_socket_or_device",
        For::Everyone,
        odd_stdin,
    ),
    (
        "a_data_link_to_what_is_private_is_refused",
        For::Everyone,
        private_link,
    ),
    (
        "a_data_link_is_judged_by_where_homes_really_are",
        For::Everyone,
        private_link_of_linked_home,
    ),
    (
        "a_data_link_that_another_made_is_refused",
        For::Root,
        foreign_link,
    ),
    (
        "read_does_not_cover_the_makings_of_the_view",
        For::Everyone,
        read_targets,
    ),
    (
        "another_analysis_is_not_shown_or_copied",
        For::Everyone,
        other_workspaces,
    ),
    (
        "fumehoods_own_files_are_not_shown_or_copied",
        For::Everyone,
        own_files,
    ),
    (
        "the_kernels_directories_hold_no_workspace",
        For::Everyone,
        kernel_root,
    ),
    (
        "a_relative_home_stops_the_run",
        For::Everyone,
        relative_home,
    ),
];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn state_on_record(lab: &Lab, id: &str) -> Value {
    let path = lab.home.join(format!("runs/{id}/1/run.json"));
    let record: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    record["state"].clone()
}

fn kept_is_closed() {
    let lab = Lab::new();
    for (id, mode) in [("open", "777"), ("sticky", "1777"), ("closed", "0")] {
        // Not looked at inside: init closes it again at a time of its own.
        lab.run(["--keep", "always", "--id", id, "--", "chmod", mode, "."])
            .good();
        let meta = lab.workspace(id).metadata().unwrap();
        assert_eq!(meta.mode() & 0o7777, 0o700, "{id}");
        assert_eq!(meta.uid(), rustix::process::geteuid().as_raw(), "{id}");
        lab.gc(&["--kept", id]).good();
    }
    lab.assert_nothing_left();
}

/// What belongs to neither the run nor the caller cannot be taken over; the rest of the result is none the worse.
fn planted_file() {
    let lab = Lab::new();
    let id = fresh_id("planted");
    let script = "echo result > mine; echo up; read go; exit 7";
    let args = ["--keep", "always", "--id", &id, "--stdin", "-", "--json"];
    let mut command = lab.run_command(args.iter().chain(&["--", "sh", "-c", script]));
    command.stdin(Stdio::piped());
    let mut live = Live::start(command);
    let workspace = lab.workspace(&id);
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
    let ended = live.end();
    assert_eq!(ended.code(), 7, "{}", ended.err());
    assert!(ended.document()["kept_until"].is_u64(), "{}", ended.out());
    assert_eq!(std::fs::read(workspace.join("mine")).unwrap(), b"result\n");
    assert_eq!(workspace.metadata().unwrap().uid(), 0);
    assert_eq!(workspace.metadata().unwrap().mode() & 0o7777, 0o700);
    // Nor did it change hands: it may be a hard link to somebody's file elsewhere.
    assert_eq!(workspace.join("file").metadata().unwrap().uid(), 54321);
    assert!(state_on_record(&lab, &id)["kept"]["until"].is_u64());
    lab.gc(&["--kept", &id]).good();
    lab.assert_nothing_left();
}

fn fifo(lab: &Lab, name: &str) -> PathBuf {
    let path = lab.path(name);
    let made = Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    path
}

fn fifo_without_writer() {
    let lab = Lab::new();
    let path = fifo(&lab, "fifo");
    // The runner reaches the program's start, and stays in charge of its end.
    let mut live = lab.start([
        "--stdin",
        text(&path),
        "--",
        "sh",
        "-c",
        "echo up; cat; echo end",
    ]);
    live.wait_for("up");
    live.signal(Signal::TERM);
    let ended = live.end();
    assert_eq!(ended.code(), 123, "{}", ended.err());
    lab.assert_nothing_left();
    let options = ["--stdin", text(&path), "--timeout", "1s", "--grace", "0"];
    let ended = lab.sh(&options, "cat");
    assert_eq!(ended.code(), 124, "{}", ended.err());
    assert_eq!(ended.out(), "");
    lab.assert_nothing_left();
}

/// Who comes late and goes is heard to the end.
fn fifo_with_late_writer() {
    let lab = Lab::new();
    let path = fifo(&lab, "fifo");
    let script = "echo up; cat; echo end";
    let mut live = lab.start(["--stdin", text(&path), "--", "sh", "-c", script]);
    live.wait_for("up");
    // The runner has the other end open by now, so this does not wait.
    let mut writer = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    writer.write_all(b"late\n").unwrap();
    drop(writer);
    assert_eq!(live.end().good(), "up\nlate\nend\n");
    lab.assert_nothing_left();
}

fn fifo_with_writer() {
    let lab = Lab::new();
    let path = fifo(&lab, "fifo");
    // Both ends, so that opening it does not wait and the program's end is not ended.
    let open = || {
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).open(&path).unwrap()
    };
    let script = "echo up; read line && echo got $line; sleep 600";
    let args = ["--stdin", text(&path), "--", "sh", "-c", script];
    let mut writer = open();
    let mut live = lab.start(args);
    live.wait_for("up");
    // Nothing is there yet: the program waits for it, as on a terminal, and is not told of an error.
    writer.write_all(b"hello\n").unwrap();
    live.wait_for("got hello");
    live.signal(Signal::TERM);
    let ended = live.end();
    assert_eq!(ended.code(), 123, "{}", ended.err());
    // While nothing was written at all.
    let mut live = lab.start(args);
    live.wait_for("up");
    live.signal(Signal::TERM);
    assert_eq!(live.end().code(), 123);
    lab.assert_nothing_left();
}

fn odd_stdin() {
    let lab = Lab::new();
    let socket = lab.path("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let refused = [
        lab.project.clone(),
        PathBuf::from("/"),
        socket,
        PathBuf::from("/dev/zero"),
        PathBuf::from("/dev/tty"),
    ];
    for path in refused {
        let ended = lab.sh(&["--stdin", text(&path)], "head -c 1");
        assert_eq!(ended.code(), 125, "{path:?}: {}", ended.err());
        lab.assert_nothing_left();
    }
    let file = lab.write("file", "given");
    for (path, out) in [(file, "given"), (PathBuf::from("/dev/null"), "")] {
        assert_eq!(lab.sh(&["--stdin", text(&path)], "cat").good(), out);
    }
}

/// Replaces the project's `data` by a link.
fn link_data(lab: &Lab, to: &Path) -> PathBuf {
    let data = lab.project.join("data");
    let _not_yet = std::fs::remove_file(&data);
    symlink(to, &data).unwrap();
    data
}

fn private_link() {
    let lab = Lab::new();
    let ssh = lab.write("person/.ssh/id", "secret\n");
    lab.write("person/.config/deep/er/key", "secret\n");
    lab.write("person/study/d", "fine\n");
    let ssh = ssh.parent().unwrap();
    let deep = lab.path("person/.config/deep/er");
    let chain = lab.path("chain");
    symlink(ssh, &chain).unwrap();
    let etc = Path::new("/etc/alternatives");
    assert!(etc.is_dir());
    for target in [&lab.person, ssh, &deep, &chain, etc, Path::new("/etc")] {
        link_data(&lab, target);
        let ended = lab.sh(&[], "ls data");
        ended.refused(125, "    --data ");
        lab.assert_nothing_left();
    }
    // By its name it is meant, whether through the link or not.
    let data = link_data(&lab, ssh);
    for given in [ssh, data.as_path()] {
        let ended = lab.sh(&["--data", text(given)], "cat data/id");
        assert_eq!(ended.good(), "secret\n", "{given:?}");
    }
    let ended = lab.sh(&["--data", text(&lab.person)], "cat data/study/d");
    assert_eq!(ended.good(), "fine\n");
    // The same for docs.
    std::fs::remove_file(lab.project.join("data")).unwrap();
    symlink(ssh, lab.project.join("docs")).unwrap();
    lab.sh(&[], "true").refused(125, "    --docs ");
}

/// Where `$HOME` itself goes through a link, as /home does on many hosts, what is hidden in it is no less private.
fn private_link_of_linked_home() {
    let lab = Lab::new();
    lab.write("person/.ssh/id", "secret\n");
    let home = lab.path("linked-home");
    symlink(&lab.person, &home).unwrap();
    for target in [
        lab.path("person/.ssh"),
        home.join(".ssh"),
        lab.person.clone(),
    ] {
        link_data(&lab, &target);
        let mut command = lab.run_command(["--", "ls", "data"]);
        command.env("HOME", &home);
        finish(command).refused(125, "    --data ");
    }
}

fn foreign_link() {
    let lab = Lab::new();
    let store = lab.write("project/store/d", "stored\n");
    let store = store.parent().unwrap();
    let data = link_data(&lab, store);
    assert_eq!(lab.sh(&[], "cat data/d").good(), "stored\n");
    let (uid, gid) = crate::plain_user::account();
    lchown(&data, Some(uid), Some(gid)).unwrap();
    lab.sh(&[], "cat data/d").refused(125, "    --data ");
    let ended = lab.sh(&["--data", text(store)], "cat data/d");
    assert_eq!(ended.good(), "stored\n");
}

fn read_targets() {
    let lab = Lab::new();
    let file = lab.write("ref/x", "shown\n");
    let dir = text(file.parent().unwrap());
    for inside in ["/empty", "/stage", "/empty/x", "/stage/x"] {
        let read = format!("{dir}:{inside}");
        let ended = lab.sh(&["--read", &read], "true");
        assert_eq!(ended.code(), 125, "{read}: {}", ended.err());
        lab.assert_nothing_left();
    }
    let read = format!("{dir}:/empties");
    let ended = lab.sh(&["--read", &read], "cat /empties/x");
    assert_eq!(ended.good(), "shown\n", "the control");
}

/// Refused in every way in which a run is given something to read.
#[track_caller]
fn assert_kept_out(lab: &Lab, dir: &Path, file: &Path) {
    for (option, path) in [
        ("--read", dir),
        ("--read", file),
        ("--input", dir),
        ("--input", file),
        ("--data", dir),
        ("--docs", dir),
        ("--stdin", file),
    ] {
        let ended = lab.sh(&[option, text(path)], "true");
        assert_eq!(ended.code(), 125, "{option} {path:?}: {}", ended.err());
    }
}

fn other_workspaces() {
    let lab = Lab::new();
    for dir in [
        "other-root/scidex-analysis-x",
        "other-root/scidex-analysis-x/sub",
        "other-root/.scidex-analysis-x-0123456789abcdef",
        "work/scidex-analysis-y",
    ] {
        let file = lab.write(&format!("{dir}/f"), "theirs\n");
        assert_kept_out(&lab, &lab.path(dir), &file);
        // A link is not another name for it.
        let link = lab.path("link");
        symlink(lab.path(dir), &link).unwrap();
        assert_kept_out(&lab, &link, &link.join("f"));
        std::fs::remove_file(&link).unwrap();
    }
    let file = lab.write("other-root/results/f", "ours\n");
    let ended = lab.sh(&["--input", text(&file)], "cat f");
    assert_eq!(ended.good(), "ours\n", "the control");
}

fn own_files() {
    let lab = Lab::new();
    lab.sh(&["--keep", "always", "--id", "kept"], "true").good();
    let record = lab.home.join("runs/kept/1/run.json");
    for dir in [&lab.home, &lab.home.join("runs"), &lab.path("")] {
        assert_kept_out(&lab, dir, &record);
    }
    lab.gc(&["--kept"]).good();
    lab.assert_nothing_left();
}

fn kernel_root() {
    let lab = Lab::new();
    let link = lab.path("link");
    symlink("/dev/shm", &link).unwrap();
    for root in ["/dev/shm", "/dev", "/proc", "/sys", text(&link)] {
        let ended = lab.sh(&["--workspace-root", root], "true");
        ended.refused(125, "it is the kernel's");
    }
    lab.assert_nothing_left();
}

fn relative_home() {
    let lab = Lab::new();
    for home in ["home", "./home", "."] {
        let mut command = lab.run_command(["--", "true"]);
        command.env("FUMEHOOD_HOME", home);
        finish(command).refused(125, "must be an absolute path");
    }
    assert_eq!(names_in(&lab.project).len(), 0);
}
