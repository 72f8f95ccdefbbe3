//! The log of `FUMEHOOD_LOG`: it is off by default, it goes to stderr, and the record never contains it.

use std::process::Stdio;

use rustix::io::Errno;
use testkit::home::TestHome;
use testkit::trial;
use testkit::wait::eventually;

trial!(
    Everyone,
    the_log_shows_what_happens_and_stays_out_of_the_record
);
fn the_log_shows_what_happens_and_stays_out_of_the_record() {
    let test_home = TestHome::new();
    let script = "echo out; echo err >&2";
    let mut command = test_home.run_command(["--id", "logged", "--", "sh", "-c", script]);
    command.env("FUMEHOOD_LOG", "debug");
    let ended = testkit::command::finish(command);
    assert_eq!(ended.good(), "out\n");
    let err = ended.err();
    for word in [
        "DEBUG store::types::timings: reached point=\"workspace_made\"",
        "layer=\"seccomp\"",
        "exit=Some(Code(0))",
        "status=\"succeeded\"",
        "point=\"committed\"",
    ] {
        assert!(err.contains(word), "{word}: {err}");
    }
    for (stream, expected) in [("--stdout", "out\n"), ("--stderr", "err\n")] {
        let logs = test_home.ask(["logs", "logged", stream]);
        assert_eq!(logs.good(), expected);
    }

    // Without the variable, and with `off`, nothing is logged.
    for level in [None, Some("off"), Some("")] {
        let mut command = test_home.run_command(["-q", "--", "true"]);
        level.map(|level| command.env("FUMEHOOD_LOG", level));
        let ended = testkit::command::finish(command);
        assert_eq!((ended.good().as_str(), ended.err().as_str()), ("", ""));
    }
}

trial!(Everyone, a_log_level_that_does_not_exist_is_refused);
fn a_log_level_that_does_not_exist_is_refused() {
    let test_home = TestHome::new();
    let mut command = test_home.run_command(["--", "true"]);
    command.env("FUMEHOOD_LOG", "loud\u{1b}[2J");
    let ended = testkit::command::finish(command);
    assert_eq!(ended.code(), 125);
    assert_eq!(
        ended.err(),
        "fumehood: error: FUMEHOOD_LOG is \"loud\\u{1b}[2J\"; set it to off, error, warn, info, debug or trace\n"
    );
}

trial!(Everyone, a_log_that_nobody_reads_stops_no_run);
fn a_log_that_nobody_reads_stops_no_run() {
    let test_home = TestHome::new();
    // A full pipe, whose read end stays open.
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while rustix::io::write(&writer, &[0; 4096]) != Err(Errno::AGAIN) {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let mut command = test_home.run_command(["-q", "--", "true"]);
    command
        .env("FUMEHOOD_LOG", "debug")
        .stdout(Stdio::null())
        .stderr(writer);
    let mut child = command.spawn().unwrap();
    let mut ended = None;
    eventually("the run ends", || {
        ended = child.try_wait().unwrap();
        ended.is_some()
    });
    assert_eq!(ended.unwrap().code(), Some(0));
}
