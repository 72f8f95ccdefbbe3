//! P11: at the deadline every process of the analysis is dead, and the call returns even if something holds a pipe.

use std::cell::RefCell;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sandbox::outcome::{Exit, Stop};
use sandbox::supervise::Control;
use testkit::wait::poll_until;
use testkit::{is_root, trial};

use crate::confined_run::{
    ConfinedResult, ConfinedRun, HostResource, alone_with, at_landlock, compile,
};

/// The bound of every wait.
pub const AT_MOST: Duration = Duration::from_secs(30);

/// A word that no other process on this host has among its arguments.
pub fn new_marker() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    format!(
        "fumehood-mark-{}-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed),
        now.as_nanos()
    )
}

/// The processes on this host that have the marker among their arguments. A zombie has no arguments.
pub fn marked(marker: &str) -> Vec<i32> {
    let has = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.windows(marker.len()).any(|w| w == marker.as_bytes())
    };
    pids().into_iter().filter(has).collect()
}

/// As [`marked`], repeated so often that a process which changes its pid all the time is seen too.
pub fn left_of(marker: &str) -> Vec<i32> {
    let seen: std::collections::BTreeSet<i32> = (0..10).flat_map(|_| marked(marker)).collect();
    seen.into_iter().collect()
}

fn pids() -> Vec<i32> {
    let names = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .map(|e| e.file_name());
    names
        .filter_map(|name| name.to_str()?.parse().ok())
        .collect()
}

/// Waits until at least `count` processes have the marker.
pub fn wait_for_marked(marker: &str, count: usize) -> Vec<i32> {
    look_until(marker, |found| found >= count)
}

/// Waits until no process has the marker.
pub fn wait_for_none(marker: &str) {
    look_until(marker, |found| found == 0);
}

fn look_until(marker: &str, enough: impl Fn(usize) -> bool) -> Vec<i32> {
    let mut found = Vec::new();
    let held = poll_until(AT_MOST, Duration::from_millis(5), || {
        found = marked(marker);
        enough(found.len())
    });
    assert!(held, "there are {found:?}");
    found
}

/// Kills the processes that a control left on the host. Only these processes have the marker.
pub fn kill_marked(marker: &str) {
    let give_up = Instant::now() + AT_MOST;
    loop {
        let left = left_of(marker);
        for pid in &left {
            let pid = rustix::process::Pid::from_raw(*pid).unwrap();
            let _gone = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < give_up, "{left:?} do not die");
    }
}

/// The host's processes that run under a uid.
fn of_uid(uid: u32) -> Vec<i32> {
    use std::os::unix::fs::MetadataExt;
    let has = |pid: &i32| std::fs::metadata(format!("/proc/{pid}")).is_ok_and(|m| m.uid() == uid);
    pids().into_iter().filter(has).collect()
}

const PRELUDE: &str = "
import os, signal, sys, threading, time
def up():
    os.write(1, b'up\\n')
def rest():
    while True:
        signal.pause()
";

fn script(marker: &str, act: &str) -> String {
    format!("# {marker}\n{PRELUDE}\n{act}")
}

/// Calls `run` with a time limit, and doubles the limit until `is_enough` holds. On a busy machine a program may need
/// many times as long as otherwise to get ready.
pub fn with_enough_time(
    first_ms: u64,
    is_enough: impl Fn(&ConfinedResult) -> bool,
    run: impl Fn(u64) -> ConfinedResult,
) -> ConfinedResult {
    let mut time_ms = first_ms;
    loop {
        let ran = run(time_ms);
        if is_enough(&ran) {
            return ran;
        }
        time_ms *= 2;
        assert!(Duration::from_millis(time_ms) < AT_MOST, "{}", ran.all());
    }
}

/// Calls `run` with a deadline that leaves the program time to print `up`.
pub fn up_before_deadline(wall_ms: u64, run: impl Fn(u64) -> ConfinedResult) -> ConfinedResult {
    with_enough_time(wall_ms, |ran| ran.printed("up"), run)
}

/// Runs the act to its deadline and asserts, from the host's side, that no process is left.
fn at_the_deadline(act: &str, wall_ms: u64, grace_ms: u64) -> ConfinedResult {
    up_before_deadline(wall_ms, |wall_ms| run_to_deadline(act, wall_ms, grace_ms))
}

fn run_to_deadline(act: &str, wall_ms: u64, grace_ms: u64) -> ConfinedResult {
    let marker = new_marker();
    let confined = ConfinedRun::python(&script(&marker, act)).limits(|l| {
        (l.wall_ms, l.grace_ms, l.pids) = (wall_ms, grace_ms, 64);
    });
    let uid = confined.spec.identity.uid();
    let ran = confined.run();
    assert_eq!(left_of(&marker), [0i32; 0], "{}", ran.all());
    if is_root() {
        assert_eq!(of_uid(uid), [0i32; 0], "{}", ran.all());
    }
    assert!(ran.outcome.all_dead);
    if at_landlock() && !is_root() && ran.stop() == Some(Stop::Pids) {
        // At level `landlock` the kernel counts all of a plain user's processes, so the watch may stop a fork bomb
        // first.
        return ran;
    }
    assert_eq!(ran.stop(), Some(Stop::WallTime), "{}", ran.all());
    ran
}

/// Control: unconfined, some processes of the program survive its death.
fn survives_on_the_host(act: &str) {
    let marker = new_marker();
    let mut program = Command::new("/usr/bin/python3")
        .args(["-I", "-c", &script(&marker, act)])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .current_dir(std::env::temp_dir())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut out = std::io::BufReader::new(program.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    assert_eq!(line, "up\n");
    program.kill().unwrap();
    program.wait().unwrap();
    // A single scan may miss a process that changes its pid all the time.
    let left = (0..200).any(|_| !left_of(&marker).is_empty());
    kill_marked(&marker);
    assert!(left, "the control leaves nothing behind");
}

trial!(Everyone, a_daemon_dies);
fn a_daemon_dies() {
    let act = "
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid() if os.getpid() == os.getpgid(0) else None
        for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(n, signal.SIG_IGN)
        up()
        rest()
    os._exit(0)
os.wait()
rest()
";
    survives_on_the_host(act);
    at_the_deadline(act, 1000, 200);
}

trial!(Everyone, a_program_that_ignores_sigterm_is_killed);
fn a_program_that_ignores_sigterm_is_killed() {
    let act = "
for n in signal.valid_signals():
    try:
        signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
if os.fork() == 0:
    up()
    time.sleep(600)
time.sleep(600)
";
    survives_on_the_host(act);
    let ran = at_the_deadline(act, 1000, 200);
    assert_eq!(ran.outcome.exit, Some(Exit::Signal(libc::SIGKILL)));
}

trial!(
    Everyone,
    stopped_processes_are_continued_and_receive_sigterm
);
fn stopped_processes_are_continued_and_receive_sigterm() {
    let act = "
child = os.fork()
if child == 0:
    def handle(*_):
        os.write(1, b'handled\\n')
        os._exit(0)
    signal.signal(signal.SIGTERM, handle)
    os.kill(os.getpid(), signal.SIGSTOP)
    rest()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
up()
os.waitpid(child, 0)
os._exit(4)
";
    survives_on_the_host(act);
    let ran = at_the_deadline(act, 1000, 20_000);
    assert!(ran.printed("handled"), "{}", ran.all());
    // The program used its grace period and exited by itself.
    assert_eq!(ran.code(), Some(4), "{}", ran.all());
}

trial!(Everyone, a_program_that_stops_itself_again_is_killed);
/// The program stops itself again whenever it is continued.
fn a_program_that_stops_itself_again_is_killed() {
    let act = "
def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGCONT, stop)
    stop()
    rest()
assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGCONT, stop)
up()
stop()
rest()
";
    survives_on_the_host(act);
    let ran = at_the_deadline(act, 1000, 300);
    assert_eq!(ran.outcome.exit, Some(Exit::Signal(libc::SIGKILL)));
}

trial!(
    Everyone,
    a_program_that_forks_and_exits_repeatedly_is_killed
);
fn a_program_that_forks_and_exits_repeatedly_is_killed() {
    let act = "
first = os.getpid()
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hops = 0
    # On the host, where the control runs, it comes to an end by itself.
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if os.fork() != 0:
            os._exit(0)
        hops += 1
        if hops == 50:
            up()
        PACE
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rest()
";
    // The control changes its pid so slowly that a scan of /proc sees it; the attack does it as fast as it can.
    survives_on_the_host(&act.replace("PACE", "time.sleep(0.01)"));
    at_the_deadline(&act.replace("PACE", "pass"), 1000, 200);
}

trial!(Everyone, a_fork_bomb_dies);
/// A fork bomb runs only in the sandbox. Its control is the number of processes that it got.
fn a_fork_bomb_dies() {
    let act = "
signal.signal(signal.SIGTERM, signal.SIG_IGN)
refused = 0
while True:
    try:
        os.fork()
    except BlockingIOError:
        refused += 1
        if refused == 3:
            up()
";
    let _alone = alone_with(HostResource::Processes);
    // The bomb delays the watch, which counts the processes.
    let pids = |ran: &ConfinedResult| ran.outcome.usage.pids_peak.unwrap_or(0);
    let is_enough = |ran: &ConfinedResult| ran.printed("up") && pids(ran) >= 30;
    let ran = with_enough_time(1500, is_enough, |wall_ms| {
        run_to_deadline(act, wall_ms, 200)
    });
    // At level `landlock` the limit has room for other processes of the user.
    let most = if at_landlock() { 192 } else { 64 };
    assert!(pids(&ran) <= most, "{}", ran.all());
}

trial!(Everyone, a_program_that_waits_in_vfork_is_killed);
fn a_program_that_waits_in_vfork_is_killed() {
    let source = r#"
#include <signal.h>
#include <unistd.h>
int main(void) {
    signal(SIGTERM, SIG_IGN);
    if (vfork() == 0) { write(1, "up\n", 3); for (;;) pause(); }
    for (;;) pause();
}"#;
    let marker = new_marker();
    let ran = up_before_deadline(1000, |wall_ms| {
        let mut confined = ConfinedRun::new(&["/bin/true", &marker])
            .limits(|l| (l.wall_ms, l.grace_ms) = (wall_ms, 200));
        let program = confined.workspace().join("vforks");
        compile(source, &program);
        confined.spec.program = sandbox::spec::InsidePath::new(&program);
        confined.run()
    });
    assert_eq!(left_of(&marker), [0i32; 0]);
    // Only SIGKILL can end a parent that waits in vfork.
    assert_eq!(
        (ran.stop(), ran.outcome.exit),
        (Some(Stop::WallTime), Some(Exit::Signal(libc::SIGKILL)))
    );
}

trial!(Everyone, all_threads_die);
fn all_threads_die() {
    let act = "
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def spin():
    while True:
        pass
for _ in range(8):
    threading.Thread(target=spin).start()
up()
# The leader of the group leaves; its threads stay.
ctypes.CDLL(None).pthread_exit(None)
";
    let ran = at_the_deadline(&format!("import ctypes\n{act}"), 1000, 200);
    assert_eq!(
        ran.outcome.exit,
        Some(Exit::Signal(libc::SIGKILL)),
        "{}",
        ran.all()
    );
}

trial!(
    Everyone,
    a_program_with_many_descriptors_is_killed_at_the_deadline
);
/// Init scans descriptors for files without names. However many there are, the deadline holds.
fn a_program_with_many_descriptors_is_killed_at_the_deadline() {
    let act = "
try:
    while True:
        os.open('/dev/null', os.O_RDONLY)
except OSError:
    pass
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(MANY):
    if os.fork() == 0:
        rest()
up()
rest()
";
    for many in ["0", "24"] {
        let marker = new_marker();
        let act = script(&marker, &act.replace("MANY", many));
        let (ran, late_by) = {
            let wall = std::cell::Cell::new(0);
            let ran = up_before_deadline(2000, |wall_ms| {
                wall.set(wall_ms);
                let limits = |l: &mut sandbox::spec::Limits| {
                    (l.wall_ms, l.grace_ms, l.open_files) = (wall_ms, 200, 4096)
                };
                ConfinedRun::python(&act).limits(limits).run()
            });
            let late_by = ran.outcome.usage.wall_ms.saturating_sub(wall.get());
            (ran, late_by)
        };
        assert_eq!(ran.stop(), Some(Stop::WallTime), "{}", ran.all());
        assert!(ran.outcome.all_dead, "{}", ran.all());
        assert_eq!(left_of(&marker), [0i32; 0]);
        // The bound is generous. It does not matter who ended the run: the kernel takes so long to close a million
        // descriptors that the runner's backstop may come first.
        assert!(late_by < 6000, "{}", ran.all());
        assert_ne!(ran.outcome.exit, Some(Exit::Code(0)), "{}", ran.all());
    }
}

const LAST_FILE: &str = "
def handle(*_):
    time.sleep(0.3)
    with open('last.txt', 'w') as f:
        f.write('saved')
    os._exit(3)
signal.signal(signal.SIGTERM, handle)
up()
rest()
";

fn read_last_file(workspace: &Path) -> Option<String> {
    std::fs::read_to_string(workspace.join("last.txt")).ok()
}

fn last_file(grace_ms: u64) -> (ConfinedResult, Option<String>) {
    let marker = new_marker();
    let file = RefCell::new(None);
    let ran = up_before_deadline(1000, |wall_ms| {
        let confined = ConfinedRun::python(&script(&marker, LAST_FILE))
            .limits(|l| (l.wall_ms, l.grace_ms) = (wall_ms, grace_ms));
        let (ran, last) = confined.run_then(read_last_file);
        file.replace(last);
        ran
    });
    let file = file.into_inner();
    assert_eq!(ran.stop(), Some(Stop::WallTime), "{}", ran.all());
    assert_eq!(left_of(&marker), [0i32; 0]);
    (ran, file)
}

trial!(Everyone, the_grace_is_for_a_last_file);
fn the_grace_is_for_a_last_file() {
    let (ran, file) = last_file(20_000);
    assert_eq!(
        (ran.code(), file.as_deref()),
        (Some(3), Some("saved")),
        "{}",
        ran.all()
    );
}

trial!(Everyone, the_grace_is_for_children_too);
/// A shell dies of SIGTERM at once. Its children still have the grace period.
fn the_grace_is_for_children_too() {
    let marker = new_marker();
    let child = script(&marker, LAST_FILE);
    let file = RefCell::new(None);
    let ran = up_before_deadline(1000, |wall_ms| {
        let confined = ConfinedRun::sh(&format!(
            "/usr/bin/python3 -I -c \"{child}\"; echo the shell goes on"
        ));
        let confined = confined.limits(|l| (l.wall_ms, l.grace_ms) = (wall_ms, 20_000));
        let (ran, last) = confined.run_then(read_last_file);
        file.replace(last);
        ran
    });
    let file = file.into_inner();
    assert!(!ran.printed("the shell goes on"), "{}", ran.all());
    assert_eq!(
        ran.outcome.exit,
        Some(Exit::Signal(libc::SIGTERM)),
        "{}",
        ran.all()
    );
    assert_eq!(file.as_deref(), Some("saved"), "{}", ran.all());
    assert_eq!(left_of(&marker), [0i32; 0]);
}

trial!(
    Everyone,
    without_a_grace_period_the_program_gets_no_time_to_clean_up
);
fn without_a_grace_period_the_program_gets_no_time_to_clean_up() {
    for grace_ms in [0, 1] {
        let (ran, file) = last_file(grace_ms);
        assert_eq!(
            ran.outcome.exit,
            Some(Exit::Signal(libc::SIGKILL)),
            "{}",
            ran.all()
        );
        assert_eq!(file, None);
    }
}

trial!(Everyone, a_held_pipe_holds_up_nobody);
fn a_held_pipe_holds_up_nobody() {
    let marker = new_marker();
    let confined = ConfinedRun::python(&script(&marker, "up()\nrest()"))
        .limits(|l| (l.wall_ms, l.grace_ms) = (3000, 200));
    let held = std::thread::scope(|scope| {
        let holder = scope.spawn(|| {
            let pid = wait_for_marked(&marker, 1)[0];
            let give_up = Instant::now() + AT_MOST;
            // Before the execve the descriptor is not yet the pipe.
            loop {
                let file = std::fs::File::options()
                    .write(true)
                    .open(format!("/proc/{pid}/fd/1"));
                if let Ok(file) = file
                    && file.metadata().unwrap().file_type().is_fifo()
                {
                    return file;
                }
                assert!(Instant::now() < give_up, "the pipe cannot be opened");
            }
        });
        let begun = Instant::now();
        let ran = confined.run();
        assert!(begun.elapsed() < AT_MOST);
        assert!(ran.printed("up"), "{}", ran.all());
        assert_eq!(ran.stop(), Some(Stop::WallTime), "{}", ran.all());
        holder.join().unwrap()
    });
    // EPIPE shows that this was the run's pipe, and that nobody reads it after the end of the run.
    let refused = std::io::Write::write(&mut &held, b"x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::BrokenPipe);
    assert_eq!(left_of(&marker), [0i32; 0]);
}

trial!(
    Everyone,
    a_background_process_is_killed_when_the_program_ends
);
fn a_background_process_is_killed_when_the_program_ends() {
    let act = "
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b'from the background\\n')
    os.write(write, b'x')
    rest()
os.read(read, 1)
up()
";
    let marker = new_marker();
    let ran = ConfinedRun::python(&script(&marker, act)).run();
    assert_eq!((ran.code(), ran.stop()), (Some(0), None), "{}", ran.all());
    assert!(
        ran.printed("up") && ran.printed("from the background"),
        "{}",
        ran.all()
    );
    assert_eq!(left_of(&marker), [0i32; 0]);
    // Unconfined the background process outlives the program.
    let marker = new_marker();
    let status = Command::new("/usr/bin/python3")
        .args(["-I", "-c", &script(&marker, act)])
        .stdout(Stdio::null())
        .status();
    assert!(status.unwrap().success());
    let left = left_of(&marker);
    kill_marked(&marker);
    assert_eq!(left.len(), 1);
}

const HANDLES: &str = "
def handle(*_):
    os.write(1, b'handled\\n')
    os._exit(5)
signal.signal(signal.SIGTERM, handle)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rest()
up()
rest()
";

/// Runs a program until a control or, without a control, the deadline ends the run. The child ignores SIGTERM, so the
/// whole grace period passes.
fn wished(wish: Option<Control>) -> ConfinedResult {
    let marker = new_marker();
    let has_grace = wish != Some(Control::Kill);
    let is_enough =
        |ran: &ConfinedResult| ran.printed("up") && (!has_grace || ran.printed("handled"));
    let ran = with_enough_time(1000, is_enough, |time_ms| {
        let wall_ms = if wish.is_some() { 60_000 } else { time_ms };
        let mut confined = ConfinedRun::python(&script(&marker, HANDLES))
            .limits(|l| (l.wall_ms, l.grace_ms) = (wall_ms, time_ms));
        confined.control_at_marker = wish.map(|wish| (&b"up"[..], wish));
        confined.run()
    });
    assert_eq!(left_of(&marker), [0i32; 0]);
    ran
}

trial!(Everyone, cancel_gives_the_grace);
fn cancel_gives_the_grace() {
    let ran = wished(Some(Control::Cancel));
    assert_eq!(
        (ran.stop(), ran.code()),
        (Some(Stop::Cancelled), Some(5)),
        "{}",
        ran.all()
    );
    assert!(ran.printed("handled"), "{}", ran.all());
    let control = wished(None);
    assert_eq!(
        (control.stop(), control.code()),
        (Some(Stop::WallTime), Some(5)),
        "{}",
        control.all()
    );
}

trial!(Everyone, kill_gives_no_grace);
fn kill_gives_no_grace() {
    let ran = wished(Some(Control::Kill));
    assert_eq!(ran.stop(), Some(Stop::Cancelled), "{}", ran.all());
    assert_eq!(
        ran.outcome.exit,
        Some(Exit::Signal(libc::SIGKILL)),
        "{}",
        ran.all()
    );
    assert!(!ran.printed("handled"), "{}", ran.all());
}

/// A FIFO in a workspace, by which a program reports progress to the host or waits for the host.
pub struct Fifo(std::fs::File);

impl Fifo {
    /// Opens the FIFO for reading and writing, so that no open waits for the other side.
    pub fn make(dir: &Path, name: &str) -> Fifo {
        let path = dir.join(name);
        let kind = rustix::fs::FileType::Fifo;
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
        let mut both = std::fs::File::options();
        Fifo(both.read(true).write(true).open(path).unwrap())
    }

    /// Waits until the program has written to the FIFO, and returns the text.
    pub fn wait(&self) -> String {
        let mut fds = [rustix::event::PollFd::new(
            &self.0,
            rustix::event::PollFlags::IN,
        )];
        let at_most = rustix::event::Timespec {
            tv_sec: AT_MOST.as_secs() as i64,
            tv_nsec: 0,
        };
        assert_eq!(rustix::event::poll(&mut fds, Some(&at_most)), Ok(1));
        let mut bytes = [0; 64];
        let len = std::io::Read::read(&mut &self.0, &mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    pub fn ring(&self) {
        std::io::Write::write_all(&mut &self.0, b"x").unwrap();
    }
}

/// Prints a byte, which wakes the runner, and reads the byte back from the pipe before the runner does. Reports when
/// the runner no longer reads standard error either, or after six seconds.
const STEALS: &str = r#"
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>
static int unread(int fd) { int n = 0; ioctl(fd, FIONREAD, &n); return n > 0; }
int main(void) {
    signal(SIGTERM, SIG_IGN);
    int tell = open("stolen", O_RDWR);
    int out = open("/proc/self/fd/1", O_RDONLY | O_NONBLOCK);
    int err = open("/proc/self/fd/2", O_RDONLY | O_NONBLOCK);
    if (tell < 0 || out < 0 || err < 0) { perror("open"); return 1; }
    time_t end = time(0) + 6;
    unsigned wait = 0, stolen = 0, blocked = 0;
    char c;
    while (!blocked && time(0) < end) {
        write(1, "x", 1);
        wait = (wait + 37) % 40000;
        for (volatile unsigned i = 0; i < wait; i++);
        if (read(out, &c, 1) != 1) continue;
        stolen++;
        write(2, ".", 1);
        usleep(2000);
        if (unread(err)) { usleep(300000); blocked = unread(err); }
    }
    dprintf(tell, "%u stolen", stolen);
    for (;;) pause();
}"#;

trial!(
    Everyone,
    a_program_that_reads_its_own_output_pipe_can_be_cancelled
);
fn a_program_that_reads_its_own_output_pipe_can_be_cancelled() {
    let marker = new_marker();
    // If the runner missed the cancel, this limit would end the run.
    let mut confined =
        ConfinedRun::new(&["/bin/true"]).limits(|l| (l.wall_ms, l.grace_ms) = (15_000, 200));
    let program = confined.workspace().join("steals");
    compile(STEALS, &program);
    confined.command(&[&program, Path::new(&marker)]);
    let stolen = Fifo::make(confined.workspace(), "stolen");
    let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    confined.control_by_eventfd = Some((eventfd.try_clone().unwrap(), Control::Cancel));
    std::thread::scope(|scope| {
        let wisher = scope.spawn(|| {
            let told = stolen.wait();
            rustix::io::write(&eventfd, &1u64.to_ne_bytes()).unwrap();
            told
        });
        let ran = confined.run();
        let told = wisher.join().unwrap();
        assert_eq!(ran.stop(), Some(Stop::Cancelled), "{told} {}", ran.all());
        assert_eq!(ran.outcome.exit, Some(Exit::Signal(libc::SIGKILL)));
        // Control: the program did win the race many times.
        assert!(told.ends_with(" stolen") && told != "0 stolen", "{told}");
    });
    assert_eq!(left_of(&marker), [0i32; 0]);
}
