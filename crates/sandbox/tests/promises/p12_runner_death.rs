//! P12: if the runner is killed with SIGKILL, its analysis dies with it. A runner that is only stopped suspends no limit.

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

/// The role of this process, if a trial started it as a runner to kill.
pub fn inner_role() -> Option<String> {
    let mut args = std::env::args().skip(1);
    (args.next()? == "__role").then(|| args.next().unwrap())
}

/// Acts as the runner: prints its workspace, runs the analysis, and prints the outcome.
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

/// A program and its daemon, which ignore SIGTERM, SIGHUP and SIGINT.
fn analysis(marker: &str, role: &str) -> String {
    let then = match role {
        // The program starts to write when a file shows that the runner is stopped.
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

/// A runner in a process of its own, killed at the end of the trial.
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

    /// The state of the process in /proc: `T` is stopped.
    fn state(&self) -> char {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
        stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let _dead = self.process.kill();
        let _reaped = self.process.wait();
        // A killed runner could not remove its workspace.
        let _gone = std::fs::remove_dir_all(&self.workspace);
    }
}

fn hold(pids: &[i32]) -> Vec<OwnedFd> {
    let open = |pid: &i32| pidfd_open(Pid::from_raw(*pid).unwrap(), PidfdFlags::empty());
    pids.iter().filter_map(|pid| open(pid).ok()).collect()
}

/// Waits on the pidfds until all processes are dead.
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
    // The two processes are the program and its daemon.
    let processes = hold(&wait_for_marked(&runner.marker, 2));
    assert!(!processes.is_empty());
    runner.signal(Signal::KILL);
    runner.process.wait().unwrap();
    wait_for_death(&processes);
    all_gone(&runner.marker);
}

/// Waits until no process has the marker. A process that was being forked when the processes were counted dies a moment
/// later.
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

/// Control: without a sandbox the same program outlives its parent.
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
    // The shell, the program and its daemon have the marker.
    wait_for_marked(&marker, 3);
    shell.kill().unwrap();
    shell.wait().unwrap();
    // The count may have included the short-lived process between the program and its daemon, before the daemon existed.
    let give_up = Instant::now() + AT_MOST;
    let mut left = marked(&marker).len();
    while left != 2 && Instant::now() < give_up {
        left = marked(&marker).len();
    }
    kill_marked(&marker);
    assert_eq!(left, 2, "the control's processes died with their parent");
}

trial!(Everyone, a_killed_runner_with_threads_leaves_no_process);
fn a_killed_runner_with_threads_leaves_no_process() {
    killed("threads");
}

trial!(Everyone, a_runner_killed_during_start_leaves_no_process);
/// Whenever the runner is killed, no process of the sandbox stays.
fn a_runner_killed_during_start_leaves_no_process() {
    for delay_ms in 0..20u64 {
        let mut runner = Runner::start("plain");
        let below = || children_of(runner.process.id());
        // This sleep waits for no event. It varies the moment of the interruption.
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

trial!(Everyone, the_program_does_not_run_before_the_start_order);
/// The runner sets the sandbox up, then records the run, then lets it start. A run that cannot be recorded does not start.
fn the_program_does_not_run_before_the_start_order() {
    let confined = || ConfinedRun::sh(": > ran; echo up");
    let has_run = |at: &std::path::Path| at.join("ran").exists();
    let (ran, has) = confined().run_then(has_run);
    assert!(ran.printed("up") && has, "the control: {}", ran.all());
    let early = |at: &std::path::Path| {
        // This sleep waits for nothing: it gives the program time to run, if it could.
        std::thread::sleep(std::time::Duration::from_millis(300));
        has_run(at)
    };
    assert_eq!(confined().call_off(early), [false, false]);
    // Cancel at once, while the sandbox is being set up.
    assert_eq!(confined().call_off(has_run), [false, false]);
    // The time before the start does not count against the program's limits.
    let brief = confined().limits(|l| (l.wall_ms, l.idle_ms, l.grace_ms) = (2000, Some(2000), 0));
    let ran = brief.run_after(|| std::thread::sleep(std::time::Duration::from_millis(3000)));
    assert_eq!((ran.stop(), ran.code()), (None, Some(0)), "{}", ran.all());
}

trial!(
    Everyone,
    a_run_that_is_cancelled_before_its_start_never_runs
);
/// The cancel comes at about the moment at which the run would start.
fn a_run_that_is_cancelled_before_its_start_never_runs() {
    for _ in 0..20 {
        let mut confined = ConfinedRun::sh(": > ran; echo up");
        let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        confined.control_by_eventfd = Some((eventfd.try_clone().unwrap(), Control::Cancel));
        confined.before_supervising = Some(Box::new(move || {
            // This sleep waits for no event. It varies the moment of the interruption.
            std::thread::sleep(std::time::Duration::from_millis(50));
            rustix::io::write(&eventfd, &1u64.to_ne_bytes()).unwrap();
        }));
        let (ran, has) = confined.run_then(|at| at.join("ran").exists());
        assert!(!has && !ran.printed("up"), "{}", ran.all());
        assert_eq!(ran.stop(), Some(Stop::Cancelled), "{}", ran.all());
        // A run that starts reports its layers first, so this run did not start.
        assert!(ran.layers.is_empty(), "{:?}", ran.layers);
    }
}

/// The descendants of a process in /proc.
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

/// Stops the runner when the program is up, and waits until the run is dead while the runner is stopped.
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
