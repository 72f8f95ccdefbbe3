//! P17: the outcome says exactly how a run ended. It comes from facts of the kernel, and the program cannot forge it.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sandbox::outcome::{Exit, Stop};
use sandbox::spec::{Bytes, HostPath, InsidePath, ProgramIdentity, SpecError};
use sandbox::supervise::RunError;
use testkit::wait::poll_until;
use testkit::{is_root, trial};

use crate::confined_run::{ConfinedResult, ConfinedRun, at_landlock, chain, host_dir, path_of};
use crate::p11_deadline::{new_marker, up_before_deadline, wait_for_marked, wait_for_none};

trial!(Everyone, exit_codes_arrive);
fn exit_codes_arrive() {
    for code in [0, 1, 2, 7, 77, 124, 125, 126, 127, 128, 130, 137, 200, 255] {
        let script = format!("exit {code}");
        let ran = ConfinedRun::sh(&script).run();
        assert_eq!(
            (ran.outcome.exit, ran.stop()),
            (Some(Exit::Code(code)), None),
            "{}",
            ran.all()
        );
        let host = Command::new("/bin/sh")
            .args(["-c", &script])
            .status()
            .unwrap();
        assert_eq!(host.code(), Some(code));
    }
}

trial!(Everyone, signals_arrive);
fn signals_arrive() {
    let signals = [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGILL,
        libc::SIGABRT,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGKILL,
        libc::SIGSEGV,
        libc::SIGPIPE,
        libc::SIGALRM,
        libc::SIGTERM,
        libc::SIGUSR1,
        libc::SIGSYS,
        libc::SIGXCPU,
        34,
        50,
        64,
    ];
    for signal in signals {
        let script = format!(
            "
import os, signal
if {signal} != signal.SIGKILL:
    signal.signal({signal}, signal.SIG_DFL)
os.kill(os.getpid(), {signal})
"
        );
        let ran = ConfinedRun::python(&script).run();
        assert_eq!(
            (ran.outcome.exit, ran.stop()),
            (Some(Exit::Signal(signal)), None),
            "{}",
            ran.all()
        );
        let host = Command::new("/usr/bin/python3")
            .args(["-I", "-c", &script])
            .status()
            .unwrap();
        assert_eq!(host.signal(), Some(signal));
    }
    // The kernel sends a signal for a fault of the program, too.
    let crash = ConfinedRun::python("ctypes.string_at(0)").run();
    assert_eq!(
        crash.outcome.exit,
        Some(Exit::Signal(libc::SIGSEGV)),
        "{}",
        crash.all()
    );
}

/// The program exits with this code after its attempts, and with another code in the control. So the reported code is the
/// program's own.
fn still_tells(act: &str) -> ConfinedResult {
    let run =
        |code| ConfinedRun::python(&format!("{act}\nsys.stdout.flush()\nos._exit({code})")).run();
    let (first, ran) = (run(41), run(42));
    for (ran, code) in [(&first, 41), (&ran, 42)] {
        assert_eq!(
            (ran.outcome.exit, ran.stop()),
            (Some(Exit::Code(code)), None),
            "{}",
            ran.all()
        );
    }
    ran
}

const FORGED: &str = r#"{"ended":{"exit":{"code":0},"stop":"cancelled","usage":{"wall_ms":1,"cpu_ms":1,"memory_peak_bytes":null,"pids_peak":null,"disk_bytes":0,"files":0,"oom_kills":9}}}"#;

trial!(Everyone, descriptors_lead_nowhere);
fn descriptors_lead_nowhere() {
    let ran = still_tells(&format!(
        "
forged = b'{FORGED}'
taken = 0
for fd in range(3, 1024):
    for act in (lambda: os.write(fd, forged), lambda: os.close(fd), lambda: os.fstat(fd)):
        try:
            act()
            taken += 1
        except OSError as e:
            assert e.errno == errno.EBADF
print('taken', taken)
# The control: one that is there takes it.
read, write = os.pipe()
print('pipe took', os.write(write, forged) == len(forged))
"
    ));
    assert!(
        ran.printed("taken 0") && ran.printed("pipe took True"),
        "{}",
        ran.all()
    );
}

trial!(Everyone, init_cannot_be_killed);
fn init_cannot_be_killed() {
    let ran = still_tells(
        "
import signal
alive = True
for n in signal.valid_signals():
    try:
        os.kill(os.getppid(), n)
    except PermissionError:
        pass
# The control: the same on a child of its own.
if (child := os.fork()) == 0:
    signal.pause()
os.kill(child, signal.SIGKILL)
print('child', os.waitpid(child, 0)[1])
# All but itself and init.
if os.fork() == 0:
    signal.pause()
os.kill(-1, signal.SIGKILL)
print('then', os.wait()[1])
",
    );
    assert!(
        ran.printed("child 9") && ran.printed("then 9"),
        "{}",
        ran.all()
    );
}

trial!(Everyone, init_cannot_be_looked_into);
fn init_cannot_be_looked_into() {
    let ran = still_tells("
INIT = os.getppid()
def tries(name, act):
    try:
        act()
        print(name, 'succeeded')
    except OSError as e:
        print(name, 'refused')
def call(*args):
    if libc.syscall(*args) < 0:
        raise OSError(ctypes.get_errno(), '')
def ptrace(request, pid):
    call(101, request, pid, 0, 0)
def getfd():
    pidfd = os.pidfd_open(INIT)
    call(438, pidfd, 3, 0)
for act in ('attach', 'seize'):
    tries(act, lambda: ptrace(16 if act == 'attach' else 0x4206, INIT))
tries('getfd', getfd)
for file in ('mem', 'environ', 'maps', 'auxv', 'stack', 'syscall'):
    tries(file, lambda: open(f'/proc/{INIT}/{file}', 'rb').read(1))
tries('exe', lambda: os.readlink(f'/proc/{INIT}/exe'))
tries('fd', lambda: os.listdir(f'/proc/{INIT}/fd'))
tries('root', lambda: os.listdir(f'/proc/{INIT}/root/'))
# The control: its own are open to it.
print('own', len(os.listdir('/proc/self/fd')) > 2 and open('/proc/self/environ', 'rb').read(4) == b'PATH')
");
    assert!(
        ran.printed("own True") && !ran.stdout.contains("succeeded"),
        "{}",
        ran.all()
    );
}

trial!(Everyone, init_cannot_be_limited);
/// Limits and priorities are set by thread, and init has several threads. Without CPU time or descriptors any of them would
/// end or stop watching, and then no thread could report how the program ended.
fn init_cannot_be_limited() {
    let ran = ConfinedRun::python(
        "
import resource, signal, time
acts = {
    'idle': lambda id: os.sched_setscheduler(id, os.SCHED_IDLE, os.sched_param(0)),
    'nice': lambda id: os.setpriority(os.PRIO_PROCESS, id, 19),
    'files': lambda id: resource.prlimit(id, resource.RLIMIT_NOFILE, (0, 0)),
    'cpu': lambda id: resource.prlimit(id, resource.RLIMIT_CPU, (0, 0)),
}
def each(who, id):
    for name, act in acts.items():
        try:
            act(id)
            print(who, name, 'succeeded')
        except PermissionError:
            print(who, name, 'refused')
        except ProcessLookupError:
            pass
try: init = {int(name) for name in os.listdir('/proc/1/task')}
# The guardian's first thread, and where its others are, as the program must guess.
except PermissionError: init = set(range(os.getppid(), os.getppid() + 4)) - {os.getpid()}
print('threads', len(init))
for id in init | set(range(1, 9)) - {os.getpid()}:
    each('init' if id in init else 'other', id)
# The control: the same on a child of its own, and at last on itself.
if (child := os.fork()) == 0:
    signal.pause()
each('child', child)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
sys.stdout.flush()
# Some looks of the watch, which would use up what it had left.
time.sleep(1.5)
for name in ('idle', 'nice', 'files'):
    acts[name](0)
print('itself too', flush=True)
os._exit(7)
",
    )
    .run();
    assert_eq!(
        (ran.outcome.exit, ran.stop()),
        (Some(Exit::Code(7)), None),
        "{}",
        ran.all()
    );
    let threads = ran.stdout.lines().find_map(|l| l.strip_prefix("threads "));
    let threads: usize = threads.unwrap().parse().unwrap();
    assert!(threads > 1, "{}", ran.all());
    let count = |who: &str, answer: &str| {
        let lines = ran.stdout.lines();
        lines
            .filter(|l| l.starts_with(who) && l.ends_with(answer))
            .count()
    };
    assert_eq!(count("init ", " refused"), 4 * threads, "{}", ran.all());
    assert_eq!(count("init ", " succeeded"), 0, "{}", ran.all());
    assert_eq!(count("other ", " succeeded"), 0, "{}", ran.all());
    // Without a pid namespace the filter cannot tell a child from a stranger by its number, so it allows these calls on
    // the caller alone.
    let answer = if at_landlock() {
        " refused"
    } else {
        " succeeded"
    };
    assert_eq!(count("child ", answer), 4, "{}", ran.all());
    assert!(ran.printed("itself too"), "{}", ran.all());
}

/// Stops a thread with ptrace, prints so, and lets the thread go on when standard input ends.
const STOP_A_THREAD: &str = "
import ctypes, os, sys
PTRACE_SEIZE, PTRACE_INTERRUPT, WALL = 0x4206, 0x4207, 0x40000000
process, thread = int(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
def ptrace(request):
    if libc.ptrace(ctypes.c_long(request), ctypes.c_long(thread), None, None) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
# A thread that waits for its next turn holds no lock that the others need.
while open(f'/proc/{process}/task/{thread}/stat').read().rpartition(')')[2].split()[0] != 'S': pass
ptrace(PTRACE_SEIZE)
ptrace(PTRACE_INTERRUPT)
os.waitpid(thread, WALL)
print('stopped', flush=True)
sys.stdin.read()
";

/// A run that exits with 7 before its deadline, while the watch thread of its init is stopped until well after the deadline;
/// and whether the run ended only after the watch thread went on. None if the program did not end in time.
fn ended_before_the_deadline(wall: Duration) -> Option<(ConfinedResult, bool)> {
    /// How long after the deadline the watch thread stays stopped. The runner waits for a silent init until 0.7 seconds
    /// after the deadline.
    const AFTER_THE_DEADLINE: Duration = Duration::from_millis(1500);
    let marker = new_marker();
    let mut confined = ConfinedRun::sh(&format!(": {marker}; read line; exit 7"))
        .limits(|l| (l.wall_ms, l.grace_ms) = (wall.as_millis() as u64, 0));
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    confined.stdin = Some(read);
    let earliest_start = Instant::now();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| confined.run());
        let program = wait_for_marked(&marker, 1)[0];
        let latest_start = Instant::now();
        let mut stopper = stop_watch_thread(program);
        drop(write);
        wait_for_none(&marker);
        let is_in_time = earliest_start.elapsed() < wall;
        let until_release =
            (latest_start + wall + AFTER_THE_DEADLINE).saturating_duration_since(Instant::now());
        let has_ended = poll_until(until_release, Duration::from_millis(10), || {
            run.is_finished()
        });
        drop(stopper.stdin.take());
        assert!(stopper.wait().unwrap().success());
        let ran = run.join().unwrap();
        is_in_time.then_some((ran, !has_ended))
    })
}

/// Stops the watch thread of the init of this program. Init makes the watch thread before its other threads.
fn stop_watch_thread(program: i32) -> Child {
    let status = std::fs::read_to_string(format!("/proc/{program}/status")).unwrap();
    let init = status.lines().find_map(|l| l.strip_prefix("PPid:"));
    let init: i32 = init.unwrap().trim().parse().unwrap();
    let threads = std::fs::read_dir(format!("/proc/{init}/task")).unwrap();
    let threads = threads.map(|t| t.unwrap().file_name().to_str().unwrap().parse().unwrap());
    let watch_thread: i32 = threads.filter(|thread| *thread != init).min().unwrap();
    let mut stopper = Command::new("/usr/bin/python3")
        .args(["-I", "-c", STOP_A_THREAD])
        .args([init.to_string(), watch_thread.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut out = BufReader::new(stopper.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "stopped\n");
    stopper
}

trial!(
    Root,
    a_program_that_ends_before_the_deadline_has_not_timed_out
);
/// The last measurement of the files ends only after the deadline.
fn a_program_that_ends_before_the_deadline_has_not_timed_out() {
    // On a busy machine a program takes seconds to start and to end.
    let ran = [2, 4, 7].map(Duration::from_secs).into_iter();
    let ran = ran.filter_map(ended_before_the_deadline).next();
    let (ran, has_waited) = ran.expect("the program ends within seven seconds");
    let end = (ran.outcome.exit, ran.outcome.stop);
    assert_eq!(end, (Some(Exit::Code(7)), None), "{}", ran.all());
    // Control: the last measurement waited for the watch thread.
    assert!(has_waited, "{}", ran.all());
}

trial!(Everyone, printed_text_does_not_change_the_outcome);
fn printed_text_does_not_change_the_outcome() {
    let ran = still_tells(&format!(
        "
for fd in (1, 2):
    os.write(fd, b'{FORGED}\\n')
    os.write(fd, b'Killed\\nout of memory\\ntimed out\\nfumehood: stopped\\n')
"
    ));
    assert!(ran.printed(FORGED) && ran.stderr.contains(FORGED));
    assert_eq!(ran.outcome.usage.oom_kills, 0);
}

trial!(
    Everyone,
    exit_codes_of_children_and_orphans_do_not_change_the_outcome
);
fn exit_codes_of_children_and_orphans_do_not_change_the_outcome() {
    let ran = still_tells(
        "
import signal
# Children with other codes, waited for and not.
for code in range(10):
    if os.fork() == 0:
        os._exit(code)
# Orphans, which are init's to reap.
for code in range(10):
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            os._exit(100 + code)
        os._exit(0)
    os.waitpid(child, 0)
# A sub-reaper gets them in init's place.
assert libc.prctl(36, 1, 0, 0, 0) == 0
if (child := os.fork()) == 0:
    if (grandchild := os.fork()) == 0:
        os._exit(99)
    os.write(1, b'x')
    os._exit(0)
codes = []
try:
    while True:
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
except ChildProcessError:
    pass
print('\\nreaped 99', 99 in codes)
# One that outlives the program.
if os.fork() == 0:
    os.setsid()
    signal.pause()
",
    );
    assert!(ran.printed("reaped 99 True"), "{}", ran.all());
}

trial!(
    Everyone,
    an_execve_from_another_thread_keeps_the_programs_exit_code
);
/// A thread that is not the program's first executes another program. The process keeps its pid, so its exit code is
/// still the program's.
fn an_execve_from_another_thread_keeps_the_programs_exit_code() {
    let script = "
import threading, time
threading.Thread(target=lambda: os.execv('/bin/sh', ['sh', '-c', '(exit 3) & wait; exit CODE'])).start()
time.sleep(60)
";
    for code in [21, 22] {
        let ran = ConfinedRun::python(&script.replace("CODE", &code.to_string())).run();
        assert_eq!(
            (ran.outcome.exit, ran.stop()),
            (Some(Exit::Code(code)), None),
            "{}",
            ran.all()
        );
    }
}

const IGNORES_SIGTERM: &str = "
import signal, time
signal.signal(15, signal.SIG_IGN)
print('up', flush=True)
time.sleep(60)
";

trial!(Root, causes_of_death_are_told_apart);
fn causes_of_death_are_told_apart() {
    let run = |script: &str| {
        ConfinedRun::python(script)
            .limits(|l| l.memory_bytes = 96 << 20)
            .run()
    };
    let facts = |ran: &ConfinedResult| {
        (
            ran.outcome.exit,
            ran.stop(),
            ran.outcome.usage.oom_kills > 0,
        )
    };
    let kill = Some(Exit::Signal(libc::SIGKILL));
    let oom = run("x = b'x' * (192 << 20)");
    assert_eq!(facts(&oom), (kill, None, true), "{}", oom.all());
    let own = run("os.kill(os.getpid(), 9)");
    assert_eq!(facts(&own), (kill, None, false), "{}", own.all());
    let late = up_before_deadline(1000, |wall_ms| {
        ConfinedRun::python(IGNORES_SIGTERM)
            .limits(|l| (l.memory_bytes, l.wall_ms) = (96 << 20, wall_ms))
            .run()
    });
    assert_eq!(
        facts(&late),
        (kill, Some(Stop::WallTime), false),
        "{}",
        late.all()
    );
    let crash = run("ctypes.string_at(0)");
    assert_eq!(
        facts(&crash),
        (Some(Exit::Signal(libc::SIGSEGV)), None, false),
        "{}",
        crash.all()
    );
    let failed = run("sys.exit('MemoryError')");
    assert_eq!(
        facts(&failed),
        (Some(Exit::Code(1)), None, false),
        "{}",
        failed.all()
    );
}

trial!(Root, a_childs_oom_is_not_the_programs);
/// A child dies of an OOM kill. Long after that, the program dies of SIGKILL, which the outcome must not report as an
/// OOM kill.
fn a_childs_oom_is_not_the_programs() {
    let run = |act: &str| {
        let script = format!(
            "
import time
def child():
    if (pid := os.fork()) == 0:
        x = b'x' * (192 << 20)
        os._exit(0)
    print('child', os.waitpid(pid, 0)[1], flush=True)
{act}
"
        );
        ConfinedRun::python(&script)
            .limits(|l| l.memory_bytes = 96 << 20)
            .run()
    };
    let facts = |ran: &ConfinedResult| {
        let usage = &ran.outcome.usage;
        (
            ran.outcome.exit,
            ran.stop(),
            usage.oom_kills,
            usage.oom_killed_main,
        )
    };
    let kill = Some(Exit::Signal(libc::SIGKILL));
    let by_itself = run("x = b'x' * (192 << 20)");
    assert_eq!(
        facts(&by_itself),
        (kill, None, 1, Some(true)),
        "{}",
        by_itself.all()
    );
    let never = run("os.kill(os.getpid(), 9)");
    assert_eq!(
        facts(&never),
        (kill, None, 0, Some(false)),
        "{}",
        never.all()
    );
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        // cgroup v2 kills the program together with its child.
        return;
    }
    // The program itself waits three seconds, longer than the window in which a SIGKILL counts as an OOM kill.
    let later = run("child(); time.sleep(3); os.kill(os.getpid(), 9)");
    assert!(later.printed("child 9"), "{}", later.all());
    assert_eq!(
        facts(&later),
        (kill, None, 1, Some(false)),
        "{}",
        later.all()
    );
    // If a child and the program each die of an OOM kill, the program's own death decides.
    let both = run("child(); time.sleep(3); x = b'x' * (192 << 20)");
    assert_eq!(facts(&both), (kill, None, 2, Some(true)), "{}", both.all());
    let survived = run("child(); child()");
    assert_eq!(
        facts(&survived),
        (Some(Exit::Code(0)), None, 2, None),
        "{}",
        survived.all()
    );
}

trial!(Everyone, causes_of_death_without_a_group);
fn causes_of_death_without_a_group() {
    let run_within = |script: &str, wall_ms: u64| {
        let mut confined = ConfinedRun::python(script)
            .limits(|l| (l.memory_bytes, l.wall_ms) = (96 << 20, wall_ms));
        confined.with_group = false;
        confined.run()
    };
    let run = |script: &str| run_within(script, 60_000);
    let facts = |ran: &ConfinedResult| (ran.outcome.exit, ran.stop());
    let kill = Some(Exit::Signal(libc::SIGKILL));
    let memory = run("import time\nx = b'x' * (192 << 20)\ntime.sleep(60)");
    assert_eq!(
        facts(&memory),
        (kill, Some(Stop::Memory)),
        "{}",
        memory.all()
    );
    let own = run("os.kill(os.getpid(), 9)");
    assert_eq!(facts(&own), (kill, None), "{}", own.all());
    let late = up_before_deadline(1000, |wall_ms| run_within(IGNORES_SIGTERM, wall_ms));
    assert_eq!(facts(&late), (kill, Some(Stop::WallTime)), "{}", late.all());
    let crash = run("ctypes.string_at(0)");
    assert_eq!(
        facts(&crash),
        (Some(Exit::Signal(libc::SIGSEGV)), None),
        "{}",
        crash.all()
    );
}

trial!(Everyone, usage_is_what_the_program_measured);
fn usage_is_what_the_program_measured() {
    let act = "
import resource, time
begun = time.monotonic()
x = b'x' * (128 << 20)
with open('file', 'wb') as f:
    f.write(b'x' * (8 << 20))
for n in range(20):
    open(f'f{n}', 'w').close()
children = []
for _ in range(4):
    if (child := os.fork()) == 0:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        time.sleep(0.5)
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print('cpu', int(1000 * sum(u.ru_utime + u.ru_stime for u in used)))
print('memory', used[0].ru_maxrss * 1024)
print('wall', int(1000 * (time.monotonic() - begun)))
";
    let ran = ConfinedRun::python(act).run();
    assert_eq!((ran.code(), ran.stop()), (Some(0), None), "{}", ran.all());
    let own = |name: &str| -> u64 {
        let line = ran
            .stdout
            .lines()
            .find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap().parse().unwrap()
    };
    let usage = &ran.outcome.usage;
    let near =
        |ours: u64, theirs: u64, slack: u64| theirs / 2 <= ours && ours <= theirs * 2 + slack;
    assert!(
        own("cpu") >= 1200 && near(usage.cpu_ms, own("cpu"), 500),
        "{}",
        ran.all()
    );
    assert!(
        near(usage.memory_peak_bytes.unwrap(), own("memory"), 32 << 20),
        "{}",
        ran.all()
    );
    assert!(
        usage.wall_ms >= own("wall") && near(usage.wall_ms, own("wall"), 5000),
        "{}",
        ran.all()
    );
    assert!(
        (8 << 20..16 << 20).contains(&usage.disk_bytes),
        "{}",
        ran.all()
    );
    assert!((21..40).contains(&usage.files), "{}", ran.all());
    assert!(
        usage.pids_peak.is_some_and(|n| (5..10).contains(&n)),
        "{}",
        ran.all()
    );
}

/// The step that failed, its errno, and the whole message that a user reads.
fn failure(confined: ConfinedRun) -> (String, Option<i32>, String) {
    match confined.try_run() {
        Err(error) => {
            let text = chain(&error);
            match error {
                RunError::Launch { step, source, .. } => (
                    step.to_string(),
                    source.and_then(|e| e.raw_os_error()),
                    text,
                ),
                other => panic!("{other:?}"),
            }
        }
        Ok(ran) => panic!("it started: {}", ran.all()),
    }
}

trial!(Everyone, a_missing_program_is_named);
fn a_missing_program_is_named() {
    let (step, errno, text) = failure(ConfinedRun::new(&["/usr/bin/no-such-program"]));
    assert_eq!(
        (step.as_str(), errno),
        ("execute the program", Some(libc::ENOENT))
    );
    assert!(text.contains("/usr/bin/no-such-program"), "{text}");
    assert_eq!(ConfinedRun::new(&["/bin/true"]).run().code(), Some(0));
}

trial!(
    Everyone,
    a_file_that_cannot_be_executed_is_named_in_the_error
);
fn a_file_that_cannot_be_executed_is_named_in_the_error() {
    let with = |text: &str, mode: u32| {
        let mut confined = ConfinedRun::new(&["/bin/true"]);
        let program = confined.workspace().join("program");
        std::fs::write(&program, text).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(mode)).unwrap();
        confined.spec.program = InsidePath::new(&program);
        confined
    };
    let (step, errno, text) = failure(with("#!/bin/sh\nexit 6\n", 0o644));
    assert_eq!(
        (step.as_str(), errno),
        ("execute the program", Some(libc::EACCES))
    );
    assert!(text.contains("/program"), "{text}");
    let (step, errno, _) = failure(with("neither script nor binary", 0o755));
    assert_eq!(
        (step.as_str(), errno),
        ("execute the program", Some(libc::ENOEXEC))
    );
    let (step, errno, _) = failure(with("#!/no/such/interpreter\n", 0o755));
    assert_eq!(
        (step.as_str(), errno),
        ("execute the program", Some(libc::ENOENT))
    );
    let control = with("#!/bin/sh\nexit 6\n", 0o755).run();
    assert_eq!(control.code(), Some(6), "{}", control.all());
}

trial!(Everyone, a_missing_view_is_named);
fn a_missing_view_is_named() {
    let dir = host_dir();
    let (step, errno, text) =
        failure(ConfinedRun::sh("ls data").view(&path_of(&dir, "absent"), "data"));
    // At level `landlock` only root's run has a step about views: it checks whether the leased uid may read them.
    let by_landlock = at_landlock() && !is_root();
    assert!(step.contains("views") || by_landlock, "{step}");
    assert_eq!(errno, Some(libc::ENOENT), "{text}");
    assert!(text.contains("/absent"), "{text}");
    let present = path_of(&dir, "present");
    std::fs::create_dir(&present).unwrap();
    assert_eq!(
        ConfinedRun::sh("ls data")
            .view(&present, "data")
            .run()
            .code(),
        Some(0)
    );
}

trial!(Everyone, an_impossible_spec_is_refused);
fn an_impossible_spec_is_refused() {
    let refused = |change: fn(&mut ConfinedRun)| {
        let mut confined = ConfinedRun::sh("true");
        change(&mut confined);
        let checked = confined.spec.check().unwrap_err();
        match confined.try_run() {
            Err(RunError::Spec(error)) => assert_eq!(error.to_string(), checked.to_string()),
            other => panic!("{other:?}"),
        }
        checked
    };
    let nul = |what| move |e: &SpecError| matches!(e, SpecError::NulByte { what: w } if *w == what);
    assert!(nul("an argument")(&refused(|h| h
        .spec
        .argv
        .push(Bytes(b"a\0b".to_vec())))));
    assert!(nul("an environment value")(&refused(|h| h
        .spec
        .env
        .push((Bytes::from("A"), Bytes(b"a\0b".to_vec()))))));
    assert!(nul("an environment name")(&refused(|h| h
        .spec
        .env
        .push((Bytes(b"\0".to_vec()), Bytes::from(""))))));
    assert!(matches!(
        refused(|h| h.spec.argv.clear()),
        SpecError::EmptyCommand
    ));
    for path in ["relative", "/a/../b", "", "/a\0b"] {
        let mut confined = ConfinedRun::sh("true");
        confined.spec.program = InsidePath::new(path);
        assert!(
            matches!(confined.spec.check(), Err(SpecError::NotAbsolute(_))),
            "{path:?}"
        );
        let mut confined = ConfinedRun::sh("true");
        confined.spec.workspace = HostPath::new(path);
        assert!(
            matches!(confined.spec.check(), Err(SpecError::NotAbsolute(_))),
            "{path:?}"
        );
    }
    let mut confined = ConfinedRun::sh("true");
    for identity in [
        ProgramIdentity::Leased { uid: 0, gid: 0 },
        ProgramIdentity::Leased { uid: 0, gid: 1 },
        ProgramIdentity::Leased { uid: 1, gid: 0 },
        ProgramIdentity::Caller { uid: 0, gid: 1000 },
    ] {
        confined.spec.identity = identity;
        assert!(
            matches!(confined.spec.check(), Err(SpecError::RootIdentity)),
            "{identity:?}"
        );
    }
    // Control: without these changes the spec is accepted and the run succeeds.
    assert_eq!(ConfinedRun::sh("true").run().code(), Some(0));
}
