//! P12: if the runner dies, by kill -9, its analysis dies with it; a runner that is merely stopped suspends no limit.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use sandbox::outcome::Stop;
use sandbox::supervise::Control;
use testkit::trial;

use crate::confined_run::{ConfinedResult, ConfinedRun};
use crate::p11_deadline::{AT_MOST, kill_marked, marked, new_marker, wait_for_marked};

const MARKER: &str = "FUMEHOOD_TEST_MARKER";

/// What this process was started to be, when a trial needs a runner that it can kill.
pub fn inner_role() -> Option<String> {
    let mut args = std::env::args().skip(1);
    (args.next()? == "__role").then(|| args.next().unwrap())
}

/// The runner: says where its workspace is, runs, and says how the run ended.
pub fn play(role: &str) {
    let marker = std::env::var(MARKER).unwrap();
    let mut confined = ConfinedRun::python(&analysis(&marker, role));
    confined.with_group = false;
    println!("{}", confined.workspace().display());
    let ran = match role {
        "deadline" => confined
            .limits(|l| (l.wall_ms, l.grace_ms) = (3000, 200))
            .run(),
        "disk" => confined.limits(|l| l.disk_bytes = 16 << 20).run(),
        "threads" => run_among_threads(confined),
        _ => confined.run(),
    };
    println!(
        "{:?} {:?} dead={} said={}",
        ran.stop(),
        ran.outcome.exit,
        ran.outcome.all_dead,
        ran.printed("up")
    );
}

fn run_among_threads(confined: ConfinedRun) -> ConfinedResult {
    for _ in 0..4 {
        std::thread::spawn(|| {
            loop {
                std::thread::park()
            }
        });
    }
    std::thread::spawn(move || confined.run()).join().unwrap()
}

/// A program and a daemon of its own, neither of which goes for a SIGTERM or SIGHUP.
fn analysis(marker: &str, role: &str) -> String {
    let then = match role {
        // Not before the runner is stopped, which the trial says with a file.
        "disk" => {
            "
while not os.path.exists('go'):
    time.sleep(0.01)
while True:
    with open(f'f{time.monotonic()}', 'wb') as f:
        f.write(b'x' * (1 << 20))
    time.sleep(0.02)
"
        }
        _ => {
            "
while True:
    signal.pause()
"
        }
    };
    format!(
        "# {marker}
import signal, time
for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(n, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            signal.pause()
    os._exit(0)
os.wait()
os.write(1, b'up\\n')
{then}"
    )
}

/// A runner in a process of its own, ended with the trial whatever comes.
struct Runner {
    process: Child,
    out: BufReader<ChildStdout>,
    workspace: PathBuf,
    marker: String,
}

impl Runner {
    fn start(role: &str) -> Runner {
        let marker = new_marker();
        let mut process = Command::new("/proc/self/exe")
            .args(["__role", role])
            .env(MARKER, &marker)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        Runner {
            process,
            out,
            workspace: PathBuf::from(line.trim_end()),
            marker,
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// As the kernel shows it: `T` is stopped.
    fn state(&self) -> char {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
        stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let _dead = self.process.kill();
        let _reaped = self.process.wait();
        // A runner that was killed could not do it.
        let _gone = std::fs::remove_dir_all(&self.workspace);
    }
}

fn hold(pids: &[i32]) -> Vec<OwnedFd> {
    let open = |pid: &i32| pidfd_open(Pid::from_raw(*pid).unwrap(), PidfdFlags::empty());
    pids.iter().filter_map(|pid| open(pid).ok()).collect()
}

/// Waits for the event of each one's death.
fn wait_for_death(processes: &[OwnedFd]) {
    let give_up = Instant::now() + AT_MOST;
    for process in processes {
        let left = give_up.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap();
        let died = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&timeout)).unwrap();
        assert_eq!(died, 1, "a process outlives its runner");
    }
}

fn killed(role: &str) {
    let mut runner = Runner::start(role);
    // The program and its daemon.
    let processes = hold(&wait_for_marked(&runner.marker, 2));
    assert!(!processes.is_empty());
    runner.signal(Signal::KILL);
    runner.process.wait().unwrap();
    wait_for_death(&processes);
    all_gone(&runner.marker);
}

/// One that was being forked when they were counted dies with them, a moment later.
fn all_gone(marker: &str) {
    let give_up = Instant::now() + AT_MOST;
    while !marked(marker).is_empty() {
        assert!(Instant::now() < give_up, "something outlives its runner");
    }
}

trial!(Everyone, a_killed_runner_takes_the_analysis_with_it);
fn a_killed_runner_takes_the_analysis_with_it() {
    control();
    killed("plain");
}

/// Without a sandbox between them the same program outlives whoever started it.
fn control() {
    let marker = new_marker();
    let start = format!(
        "/usr/bin/python3 -I -c 'import os\n{}' >/dev/null & wait",
        analysis(&marker, "plain").replace('\'', "\"")
    );
    let mut shell = Command::new("/bin/sh")
        .args(["-c", &start])
        .spawn()
        .unwrap();
    // The shell itself has the marker too.
    wait_for_marked(&marker, 3);
    shell.kill().unwrap();
    shell.wait().unwrap();
    // The one between the program and its daemon may have been counted, and the daemon not yet be there.
    let give_up = Instant::now() + AT_MOST;
    let mut left = marked(&marker).len();
    while left != 2 && Instant::now() < give_up {
        left = marked(&marker).len();
    }
    kill_marked(&marker);
    assert_eq!(left, 2, "the control's processes died with their parent");
}

trial!(Everyone, so_does_one_with_threads);
fn so_does_one_with_threads() {
    killed("threads");
}

trial!(Everyone, so_does_one_killed_while_it_starts);
/// At whatever step the runner is killed, nothing of the sandbox stays.
fn so_does_one_killed_while_it_starts() {
    for delay_ms in 0..20u64 {
        let mut runner = Runner::start("plain");
        let below = || children_of(runner.process.id());
        // Not to wait for anything: to strike at different moments.
        std::thread::sleep(std::time::Duration::from_millis(delay_ms * 3));
        let processes = hold(&below());
        runner.signal(Signal::KILL);
        runner.process.wait().unwrap();
        wait_for_death(&processes);
        let give_up = Instant::now() + AT_MOST;
        while !marked(&runner.marker).is_empty() {
            assert!(
                Instant::now() < give_up,
                "killed after {delay_ms} steps, something stays"
            );
        }
    }
}

trial!(Everyone, nothing_runs_before_the_word_to_go);
/// The runner builds first and has the run recorded then: what it may not record does not run.
fn nothing_runs_before_the_word_to_go() {
    let confined = || ConfinedRun::sh(": > ran; echo up");
    let has_run = |at: &std::path::Path| at.join("ran").exists();
    let (ran, has) = confined().run_then(has_run);
    assert!(ran.printed("up") && has, "the control: {}", ran.all());
    let early = |at: &std::path::Path| {
        // Not to wait for anything: it has time enough to run, if it could.
        std::thread::sleep(std::time::Duration::from_millis(300));
        has_run(at)
    };
    assert_eq!(confined().call_off(early), [false, false]);
    // At once, while the sandbox is being built.
    assert_eq!(confined().call_off(has_run), [false, false]);
    // The wait is not the program's time.
    let brief = confined().limits(|l| (l.wall_ms, l.idle_ms, l.grace_ms) = (2000, Some(2000), 0));
    let ran = brief.run_after(|| std::thread::sleep(std::time::Duration::from_millis(3000)));
    assert_eq!((ran.stop(), ran.code()), (None, Some(0)), "{}", ran.all());
}

trial!(Everyone, what_is_cancelled_while_it_waits_never_runs);
/// Also if the wish comes at the very moment at which it might have been let run.
fn what_is_cancelled_while_it_waits_never_runs() {
    for _ in 0..20 {
        let mut confined = ConfinedRun::sh(": > ran; echo up");
        let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        confined.control_by_eventfd = Some((eventfd.try_clone().unwrap(), Control::Cancel));
        confined.before_supervising = Some(Box::new(move || {
            // Not to wait for anything: to strike at different moments.
            std::thread::sleep(std::time::Duration::from_millis(50));
            rustix::io::write(&eventfd, &1u64.to_ne_bytes()).unwrap();
        }));
        let (ran, has) = confined.run_then(|at| at.join("ran").exists());
        assert!(!has && !ran.printed("up"), "{}", ran.all());
        assert_eq!(ran.stop(), Some(Stop::Cancelled), "{}", ran.all());
        // What is let run says first what is in force.
        assert!(ran.layers.is_empty(), "{:?}", ran.layers);
    }
}

/// Everything that descends from a process, as far as /proc shows it.
fn children_of(pid: u32) -> Vec<i32> {
    let list =
        std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children: Vec<i32> = list
        .split_ascii_whitespace()
        .filter_map(|p| p.parse().ok())
        .collect();
    let below = children.iter().flat_map(|child| children_of(*child as u32));
    children.iter().copied().chain(below).collect()
}

/// Stops the runner once the program is up, and waits for the death of the run while it is stopped.
fn stopped(role: &str) -> String {
    let mut runner = Runner::start(role);
    let processes = hold(&wait_for_marked(&runner.marker, 2));
    assert!(!processes.is_empty());
    runner.signal(Signal::STOP);
    std::fs::write(runner.workspace.join("go"), "").unwrap();
    wait_for_death(&processes);
    all_gone(&runner.marker);
    assert_eq!(
        runner.state(),
        'T',
        "the runner was not stopped all the while"
    );
    runner.signal(Signal::CONT);
    let mut end = String::new();
    runner.out.read_to_string(&mut end).unwrap();
    assert!(runner.process.wait().unwrap().success());
    end
}

trial!(Everyone, a_stopped_runner_suspends_no_deadline);
fn a_stopped_runner_suspends_no_deadline() {
    let end = stopped("deadline");
    assert_eq!(end, "Some(WallTime) Some(Signal(9)) dead=true said=true\n");
}

trial!(Everyone, a_stopped_runner_suspends_no_disk_limit);
fn a_stopped_runner_suspends_no_disk_limit() {
    let end = stopped("disk");
    assert_eq!(end, "Some(Disk) Some(Signal(9)) dead=true said=true\n");
}
