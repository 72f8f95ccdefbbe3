//! Level `landlock` as on older kernels. Before Landlock ABI 6 the guardian sends the program's signals. Before ABI 3
//! the guardian truncates its files. Before ABI 2 nothing moves between directories. The same promises hold, and
//! ordinary use works.
//!
//! The launcher uses no newer Landlock ABI than a trial names. Everything else is as on this kernel.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use sandbox::outcome::{Exit, Stop};
use sandbox::promises::{self, ACTS, PromiseStatus};
use sandbox::spec::ConfinementLevel;
use testkit::{is_root, trial};

use crate::confined_run::{
    ConfinedResult, ConfinedRun, attempts, landlock_abi, shown_dir, unconfined, verdict,
};
use crate::p07_others::HostProcess;
use crate::p11_deadline::{left_of, new_marker};

/// The newest ABI that cannot restrict signals. `BEFORE_TRUNCATION` is the newest that cannot restrict truncation.
const BEFORE_SIGNALS: i32 = 5;
const BEFORE_TRUNCATION: i32 = 2;
const OLDEST: i32 = 1;

fn with_landlock(abi: i32, mut confined: ConfinedRun) -> ConfinedResult {
    // If the kernel's own ABI is older, the launcher uses the kernel's.
    confined.landlock_abi_max = Some(abi.min(landlock_abi()));
    confined.run()
}

fn on_older(script: &str) -> ConfinedResult {
    with_landlock(BEFORE_SIGNALS, ConfinedRun::python(script))
}

trial!(
    Everyone,
    the_sandbox_uses_the_older_landlock_interface,
    only_at_landlock
);
fn the_sandbox_uses_the_older_landlock_interface() {
    for abi in [OLDEST, BEFORE_TRUNCATION, BEFORE_SIGNALS] {
        let ran = with_landlock(abi, ConfinedRun::sh("echo up"));
        let said = format!("ABI {}", abi.min(sandbox::landlock_abi()));
        assert!(
            ran.layers.iter().any(|(_, how)| *how == said),
            "{:?}",
            ran.layers
        );
        assert!(ran.printed("up"), "{}", ran.all());
    }
    let signal = ACTS.iter().find(|act| act.name == "signal_others").unwrap();
    let held = promises::promise_status(signal, ConfinementLevel::Landlock, BEFORE_SIGNALS);
    assert!(matches!(held, PromiseStatus::KeptByRefusing(_)), "{held:?}");
}

/// Sends signals to processes of its own, with kill(2) and similar calls, and prints the result of each call.
const OWN: &str = "
import signal, subprocess, threading, time
def sc(*args):
    result = libc.syscall(*[ctypes.c_long(a) for a in args])
    if result == -1: raise OSError(ctypes.get_errno(), 'refused')
def told(name, act):
    try: print(name, act(), flush=True)
    except OSError as e: print(name, errno.errorcode[e.errno], flush=True)
got = []
for n in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, 34, 50, 64): signal.signal(n, lambda n, f: got.append(int(n)))
def seen():
    result = list(got); got.clear(); return result
def child(act=signal.pause, group=False):
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        if group: os.setpgid(0, 0)
        for n in (signal.SIGUSR1, signal.SIGUSR2): signal.signal(n, signal.SIG_DFL)
        os.write(w, b'r'); act(); os._exit(0)
    os.read(r, 1); os.close(r); os.close(w)
    return pid
def end(pid): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
me = os.getpid()
told('itself', lambda: (os.kill(me, signal.SIGUSR1), seen()))
told('raise', lambda: (signal.raise_signal(signal.SIGUSR2), seen()))
told('tkill', lambda: (sc(200, me, signal.SIGUSR1), seen()))
told('tgkill', lambda: (sc(234, me, me, signal.SIGUSR1), seen()))
told('real_time', lambda: ([os.kill(me, n) for n in (34, 50, 64)], seen()))
told('ask', lambda: os.kill(me, 0))
told('thread', lambda: (signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1), seen()))
def from_thread():
    t = threading.Thread(target=lambda: os.kill(me, signal.SIGUSR1)); t.start(); t.join(); time.sleep(0); return seen()
told('from_a_thread', from_thread)
for n in (signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGABRT, 40):
    def one(n=n): pid = child(); os.kill(pid, n); return end(pid)
    told('child_%d' % n, one)
def stop_and_go():
    pid = child(); os.kill(pid, signal.SIGSTOP); a = os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    os.kill(pid, signal.SIGCONT); b = os.WIFCONTINUED(os.waitpid(pid, os.WCONTINUED)[1]); os.kill(pid, 9); return a, b, end(pid)
told('stop_and_continue', stop_and_go)
def group():
    pid = child(group=True); os.killpg(pid, signal.SIGTERM); return end(pid)
told('group', group)
def own_group():
    def leads():
        os.setpgid(0, 0); inner = child(); os.kill(0, signal.SIGUSR1); time.sleep(30)
    pid = child(leads); return end(pid)
told('own_group', own_group)
def grandchild():
    r, w = os.pipe()
    def act():
        inner = child(); os.write(w, b'%d\\n' % inner); signal.pause()
    pid = child(act); inner = int(os.read(r, 20)); os.kill(inner, 9); os.kill(pid, 9); return end(pid)
told('grandchild', grandchild)
def orphan():
    r, w = os.pipe()
    def act(): os.write(w, b'%d\\n' % child()); os._exit(0)
    end(child(act)); os.kill(int(os.read(r, 20)), 9); return 'sent'
told('orphan', orphan)
def popen():
    p = subprocess.Popen(['sleep', '60']); p.terminate(); a = p.wait()
    p = subprocess.Popen(['sleep', '60'], start_new_session=True); os.killpg(p.pid, 9); return a, p.wait()
told('popen', popen)
told('shell', lambda: subprocess.run('sleep 60 & kill -0 $! && kill $!; wait; kill -0 $$ && echo here', shell=True, capture_output=True).stdout)
def zombie():
    pid = child(lambda: os._exit(0)); os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT); os.kill(pid, 0); os.kill(pid, 9); end(pid); return 'sent'
told('zombie', zombie)
# What is wrong with a call is answered as the kernel does.
told('bad_signal', lambda: os.kill(me, 65))
told('negative_signal', lambda: os.kill(me, -1))
gone = child(lambda: os._exit(0)); end(gone)
told('gone', lambda: os.kill(gone, 0))
told('no_such_group', lambda: os.kill(-gone, 0))
told('bad_thread', lambda: sc(234, me, -1, 0))
told('zero_thread', lambda: sc(200, 0, 0))
told('gone_thread', lambda: sc(200, gone, 0))
told('foreign_thread', lambda: sc(234, me, gone, 0))
told('least', lambda: sc(62, -2147483648, 0))
";

trial!(
    Everyone,
    signals_within_the_run_work_as_unconfined,
    only_at_landlock
);
fn signals_within_the_run_work_as_unconfined() {
    let (ran, control) = (on_older(OWN), unconfined(OWN));
    assert_eq!(ran.stdout, control, "{}", ran.all());
    assert!(control.lines().count() > 28, "{control}");
}

trial!(
    Everyone,
    the_signal_that_ends_the_program_is_reported,
    only_at_landlock
);
fn the_signal_that_ends_the_program_is_reported() {
    for (script, signal) in [
        ("os.abort()", libc::SIGABRT),
        ("os.kill(os.getpid(), 9)", libc::SIGKILL),
        ("os.kill(os.getpid(), 15)", libc::SIGTERM),
        ("os.kill(os.getpid(), 44)", 44),
        (
            "libc.raise_ = libc['raise']; libc.raise_(11)",
            libc::SIGSEGV,
        ),
        ("ctypes.string_at(0)", libc::SIGSEGV),
        (
            "import signal, threading\nthreading.Thread(target=lambda: signal.raise_signal(6)).start()\nsignal.pause()",
            libc::SIGABRT,
        ),
    ] {
        let ran = on_older(script);
        assert_eq!(
            (ran.outcome.exit, ran.stop()),
            (Some(Exit::Signal(signal)), None),
            "{}",
            ran.all()
        );
        let script = format!("import ctypes, os\nlibc = ctypes.CDLL(None)\n{script}");
        let host = Command::new("/usr/bin/python3")
            .args(["-c", &script])
            .output()
            .unwrap();
        assert_eq!(host.status.signal(), Some(signal), "{script}");
    }
}

const TO_OTHERS: &[(&str, &str)] = &[
    ("ask", "os.kill(PID, 0)"),
    ("end", "os.kill(PID, 15)"),
    ("kill", "os.kill(PID, 9)"),
    ("stop", "os.kill(PID, signal.SIGSTOP)"),
    ("group", "os.kill(-PID, 9)"),
    ("thread", "sc(200, PID, 9)"),
    ("thread_of_group", "sc(234, PID, PID, 9)"),
    ("thread_of_its_own", "sc(234, os.getpid(), PID, 9)"),
    ("own_process_other_thread", "sc(234, PID, os.getpid(), 9)"),
];

trial!(Everyone, signals_to_others_are_refused, only_at_landlock);
fn signals_to_others_are_refused() {
    let mut witness = HostProcess::start();
    let script = |whom: &str| attempts(&format!("PID = {whom}"), TO_OTHERS);
    // Pid 1 is no target here, because kill(-1) means every process and not a group.
    for whom in [
        &witness.pid().to_string(),
        "os.getppid()",
        &std::process::id().to_string(),
    ] {
        let ran = on_older(&(script(whom) + "sys.stdout.flush(); os._exit(7)\n"));
        // If the guardian is the target, it survives and reports how the program ended.
        assert_eq!((ran.code(), ran.stop()), (Some(7), None), "{}", ran.all());
        for (act, _) in TO_OTHERS {
            let inside = verdict(&ran.stdout, act);
            assert!(
                inside.starts_with("refused"),
                "{act} of {whom}: {inside}\n{}",
                ran.all()
            );
        }
    }
    assert!(witness.lives());
    let ends = attempts(&format!("PID = {}", witness.pid()), &TO_OTHERS[..1]);
    assert_eq!(verdict(&unconfined(&ends), "ask"), "done");
    unconfined(&attempts(
        &format!("PID = {}", witness.pid()),
        &TO_OTHERS[4..5],
    ));
    while witness.lives() {}
}

trial!(
    Everyone,
    rarer_ways_to_send_signals_are_refused,
    only_at_landlock
);
/// Each of these calls could reach any process of the same user. The filter cannot see a target behind a pointer, and
/// some of the signals are sent only later.
fn rarer_ways_to_send_signals_are_refused() {
    let acts: &[(&str, &str)] = &[
        (
            "queue",
            "sc(129, os.getpid(), 0, ctypes.create_string_buffer(struct.pack('iii', 0, 0, -1), 128))",
        ),
        (
            "queue_thread",
            "sc(297, os.getpid(), os.getpid(), 0, ctypes.create_string_buffer(struct.pack('iii', 0, 0, -1), 128))",
        ),
        (
            "by_descriptor",
            "signal.pidfd_send_signal(os.pidfd_open(os.getpid()), 0)",
        ),
        (
            "owner",
            "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())",
        ),
        (
            "owner_ex",
            "import fcntl; fcntl.fcntl(0, 15, struct.pack('ii', 1, os.getpid()))",
        ),
        (
            "owner_by_ioctl",
            "import fcntl; fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', os.getpid()))",
        ),
        ("which_signal", "import fcntl; fcntl.fcntl(0, 10, 9)"),
    ];
    let ran = on_older(&attempts("", acts));
    let control = unconfined(&attempts("", acts));
    for (act, _) in acts {
        assert_eq!(
            verdict(&ran.stdout, act),
            "refused EPERM",
            "{act}\n{}",
            ran.all()
        );
        assert_eq!(verdict(&control, act), "done", "control of {act}");
    }
    let ordinary = "import fcntl; fd = os.dup(0); fcntl.fcntl(fd, fcntl.F_SETFD, 1); fcntl.fcntl(fd, fcntl.F_GETFL); print('locked', fcntl.lockf(open('f', 'w'), 2))";
    assert!(on_older(ordinary).printed("locked None"));
}

trial!(Everyone, kill_all_reaches_only_the_run, only_at_landlock);
/// kill(-1) means every process but the caller. Here it reaches the processes of the run, and no other process of the
/// same user.
fn kill_all_reaches_only_the_run() {
    let mut witness = HostProcess::start();
    let script = "
import signal
for _ in range(20):
    if os.fork() == 0:
        if os.fork() == 0: os.setsid()
        signal.pause(); os._exit(0)
import time; time.sleep(0.3)
os.kill(-1, signal.SIGKILL)
print(sorted({os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(20)}))
try: os.kill(-1, 0); print('more')
except OSError as e: print(errno.errorcode[e.errno])
os.chmod('.fumehood', 0o700)
print('serves on')
";
    let ran = on_older(script);
    assert!(
        ran.printed("[-9]") && ran.printed("serves on") && ran.code() == Some(0),
        "{}",
        ran.all()
    );
    assert!(witness.lives() && ran.outcome.all_dead);
}

trial!(
    Everyone,
    a_run_that_stops_itself_is_killed_at_its_deadline,
    only_at_landlock
);
fn a_run_that_stops_itself_is_killed_at_its_deadline() {
    let marker = new_marker();
    let script = format!(
        "# {marker}
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(10):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True: signal.pause()
        while True:
            try: os.kill(-1, signal.SIGSTOP)
            except OSError: pass
while True: os.kill(os.getpid(), 0)
"
    );
    let confined = ConfinedRun::python(&script).limits(|l| (l.wall_ms, l.grace_ms) = (1500, 200));
    let ran = with_landlock(BEFORE_SIGNALS, confined);
    assert_eq!(ran.stop(), Some(Stop::WallTime), "{}", ran.all());
    assert!(ran.outcome.all_dead, "{}", ran.all());
    assert_eq!(left_of(&marker), [0i32; 0]);
}

/// Truncates files of its own. The answers must be the same as unconfined.
const CUTS: &str = "
def told(name, act):
    try: act(); answer = 'done'
    except OSError as e: answer = errno.errorcode[e.errno]
    print(name, answer, os.path.getsize('f'), flush=True)
    open('f', 'w').write('0123456789')
open('f', 'w').write('0123456789'); os.mkdir('d'); os.symlink('f', 'l'); os.symlink('x', 'dangling'); os.mkfifo('fifo')
told('cut', lambda: os.truncate('f', 3))
told('lengthen', lambda: os.truncate('f', 30))
told('by_link', lambda: os.truncate('l', 4))
told('by_descriptor', lambda: os.ftruncate(os.open('f', os.O_RDWR), 5))
told('by_open', lambda: os.open('f', os.O_WRONLY | os.O_TRUNC))
told('by_open_for_both', lambda: os.open('f', os.O_RDWR | os.O_TRUNC))
told('by_creat', lambda: open('f', 'w').close())
told('from_below', lambda: (os.chdir('d'), os.truncate('../f', 2), os.chdir('..')))
told('negative', lambda: os.truncate('f', -1))
told('directory', lambda: os.truncate('d', 0))
told('missing', lambda: os.truncate('missing', 0))
told('dangling', lambda: os.truncate('dangling', 0))
told('fifo', lambda: os.truncate('fifo', 0))
os.chmod('f', 0o444)
try: os.truncate('f', 0); print('cut a read-only file')
except OSError as e: print('read_only', errno.errorcode[e.errno])
os.chmod('f', 0o644)
";

trial!(Everyone, own_files_can_be_truncated, only_at_landlock);
fn own_files_can_be_truncated() {
    let ran = with_landlock(BEFORE_TRUNCATION, ConfinedRun::python(CUTS));
    let dir = shown_dir();
    std::fs::set_permissions(
        dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o777),
    )
    .unwrap();
    let nobody: &[&str] = match is_root() {
        true => &[
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
        ],
        false => &[],
    };
    let control = crate::confined_run::unconfined_under(
        nobody,
        &format!("os.chdir({:?})\n{CUTS}", dir.path()),
    );
    assert_eq!(ran.stdout, control, "{}", ran.all());
    assert_eq!(control.lines().count(), 14);
    // A file cannot become longer than the run's disk limit.
    let far = ConfinedRun::python(
        "try: os.truncate('f', 1 << 40)\nexcept OSError as e: print(errno.errorcode[e.errno])",
    );
    std::fs::write(far.workspace().join("f"), "x").unwrap();
    assert!(with_landlock(BEFORE_TRUNCATION, far).printed("EFBIG"));
}

trial!(
    Everyone,
    files_of_others_cannot_be_truncated,
    only_at_landlock
);
fn files_of_others_cannot_be_truncated() {
    let acts: &[(&str, &str)] = &[
        ("truncate", "os.truncate(F, 0)"),
        ("lengthen", "os.truncate(F, 100)"),
        ("open_for_reading", "os.open(F, os.O_RDONLY | os.O_TRUNC)"),
        ("open_for_neither", "os.open(F, 3 | os.O_TRUNC)"),
        (
            "old_open",
            "sc(2, ctypes.c_char_p(F.encode()), os.O_TRUNC, 0)",
        ),
        ("open_for_writing", "os.open(F, os.O_WRONLY | os.O_TRUNC)"),
        ("creat", "sc(85, ctypes.c_char_p(F.encode()), 0o600)"),
        ("by_link", "os.symlink(F, L); os.truncate(L, 0)"),
        (
            "open_by_link",
            "os.symlink(F, L + '2'); os.open(L + '2', os.O_TRUNC)",
        ),
        (
            "by_own_descriptor",
            "os.truncate('/proc/self/fd/%d' % os.open(F, os.O_RDONLY), 0)",
        ),
        (
            "open_by_own_descriptor",
            "os.open('/proc/self/fd/%d' % os.open(F, os.O_PATH), os.O_TRUNC)",
        ),
        (
            "from_there",
            "os.chdir(os.path.dirname(F)); os.truncate('file', 0)",
        ),
    ];
    let dir = shown_dir();
    let (shown, hidden, scratch) = (
        dir.path().join("shown"),
        dir.path().join("hidden"),
        dir.path().join("scratch"),
    );
    for place in [&shown, &hidden, &scratch] {
        std::fs::create_dir(place).unwrap();
        std::fs::write(place.join("file"), "theirs").unwrap();
    }
    for abi in [OLDEST, BEFORE_TRUNCATION] {
        for place in [&shown, &hidden] {
            let file = place.join("file");
            let setup = format!("F, L = {file:?}, 'link'");
            let ran = with_landlock(
                abi,
                ConfinedRun::python(&attempts(&setup, acts)).view(&shown, "data"),
            );
            for (act, _) in acts {
                let inside = verdict(&ran.stdout, act);
                assert!(
                    inside.starts_with("refused"),
                    "{act}: {inside}\n{}",
                    ran.all()
                );
            }
            assert_eq!(std::fs::read(&file).unwrap(), b"theirs");
        }
    }
    let setup = format!(
        "F, L = {:?}, {:?}",
        scratch.join("file"),
        scratch.join("link")
    );
    let control = unconfined(&attempts(&setup, acts));
    for (act, _) in acts {
        assert_eq!(verdict(&control, act), "done", "control of {act}");
    }
}

trial!(Everyone, moves_between_directories, only_at_landlock);
/// ABI 1 refuses every move and link between two directories. From ABI 2 on, moves and links within the workspace work.
fn moves_between_directories() {
    let script = "
os.mkdir('a'); os.mkdir('b'); open('a/f', 'w').write('x'); open('a/g', 'w').write('x')
for name, act in (('rename', lambda: os.rename('a/f', 'b/f')), ('link', lambda: os.link('a/g', 'b/g')), ('within', lambda: os.rename('a/g', 'a/h'))):
    try: act(); print(name, 'done')
    except OSError as e: print(name, errno.errorcode[e.errno])
import shutil; open('a/m', 'w').write('x'); shutil.move('a/m', 'b/m'); print('moved', os.path.exists('b/m'))
";
    let oldest = with_landlock(OLDEST, ConfinedRun::python(script));
    assert_eq!(
        oldest.stdout,
        "rename EXDEV\nlink EXDEV\nwithin done\nmoved True\n",
        "{}",
        oldest.all()
    );
    let next = with_landlock(BEFORE_TRUNCATION, ConfinedRun::python(script));
    assert_eq!(
        next.stdout,
        "rename done\nlink done\nwithin done\nmoved True\n",
        "{}",
        next.all()
    );
}
