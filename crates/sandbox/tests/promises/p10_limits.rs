//! P10: time, memory, processes, open files, disk bytes and file count are bounded, each by the mechanism that the outcome names.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use sandbox::outcome::{Exit, Stop};
use sandbox::spec::{Layer, WorkspaceKind};
use testkit::{is_root, trial};

use crate::confined_run::{ConfinedResult, ConfinedRun, HostResource, alone_with, at_landlock};
use crate::p11_deadline::{new_marker, wait_for_marked};

pub const MIB: u64 = 1 << 20;

pub fn stopped(ran: &ConfinedResult, why: Stop) {
    assert_eq!(ran.stop(), Some(why), "{}", ran.all());
    assert!(ran.outcome.all_dead);
}

pub fn unstopped(ran: &ConfinedResult) {
    assert_eq!((ran.stop(), ran.code()), (None, Some(0)), "{}", ran.all());
    assert_eq!(ran.outcome.usage.oom_kills, 0, "{}", ran.all());
}

// Time.

trial!(Everyone, wall_time);
fn wall_time() {
    let ran = ConfinedRun::sh("exec sleep 60")
        .limits(|l| l.wall_ms = 500)
        .run();
    stopped(&ran, Stop::WallTime);
    assert_eq!(
        ran.outcome.exit,
        Some(Exit::Signal(libc::SIGTERM)),
        "{}",
        ran.all()
    );
    unstopped(&ConfinedRun::sh("exec sleep 0.6").run());
}

/// `burn(s)` uses `s` seconds of CPU in this process. `unwaited(act)` runs `act` in a child. The parent ignores
/// SIGCHLD, so the kernel adds the child's CPU time to no process.
const BURN: &str = "
import signal, time
def burn(s):
    end = time.process_time() + s
    while time.process_time() < end:
        pass
def unwaited(act):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if os.fork() == 0:
        act()
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
";

/// The act never ends by itself. The limit on CPU time stops it; without that limit the wall-time limit does.
fn cpu_limited(act: &str) {
    let confined = || ConfinedRun::python(&format!("{BURN}\n{act}")).limits(|l| l.grace_ms = 100);
    stopped(
        &confined()
            .limits(|l| (l.wall_ms, l.cpu_ms) = (10_000, Some(500)))
            .run(),
        Stop::CpuTime,
    );
    stopped(
        &confined().limits(|l| l.wall_ms = 1500).run(),
        Stop::WallTime,
    );
}

trial!(Everyone, cpu_time);
fn cpu_time() {
    cpu_limited("while True: burn(1)");
    let below = ConfinedRun::python(&format!("{BURN}\nburn(0.2)"))
        .limits(|l| l.cpu_ms = Some(5000))
        .run();
    unstopped(&below);
}

trial!(Everyone, cpu_time_over_children);
fn cpu_time_over_children() {
    cpu_limited(
        "
for _ in range(3):
    if os.fork() == 0:
        break
while True:
    # In turn some children of each, waited for.
    if (child := os.fork()) == 0:
        burn(0.05)
        os._exit(0)
    os.waitpid(child, 0)
",
    );
}

trial!(Everyone, cpu_time_over_children_nobody_waits_for);
fn cpu_time_over_children_nobody_waits_for() {
    cpu_limited("while True: unwaited(lambda: burn(0.07))");
}

fn idle(act: &str) -> ConfinedResult {
    ConfinedRun::python(&format!("{BURN}\n{act}"))
        .limits(|l| (l.idle_ms, l.wall_ms) = (Some(1500), 20_000))
        .run()
}

trial!(Everyone, idle_time);
fn idle_time() {
    stopped(&idle("time.sleep(60)"), Stop::IdleTime);
    // Control: without the limit nothing stops the run.
    unstopped(&ConfinedRun::sh("exec sleep 2").run());
}

trial!(Everyone, a_program_that_prints_is_not_idle);
fn a_program_that_prints_is_not_idle() {
    unstopped(&idle(
        "
for _ in range(35):
    time.sleep(0.1)
    print('still here', flush=True)
",
    ));
}

trial!(Everyone, a_program_that_computes_is_not_idle);
fn a_program_that_computes_is_not_idle() {
    unstopped(&idle("burn(3.5)"));
}

trial!(
    Everyone,
    a_program_is_not_idle_while_children_that_it_does_not_wait_for_compute
);
fn a_program_is_not_idle_while_children_that_it_does_not_wait_for_compute() {
    unstopped(&idle(
        "
end = time.monotonic() + 4
while time.monotonic() < end:
    unwaited(lambda: burn(0.07))
",
    ));
}

// Memory.

const MEMORY: u64 = 96 * MIB;

/// Takes twice the limit in all, prints so, and holds the memory for a while, so that a watch with an interval sees it.
fn taking(act: &str) -> ConfinedRun {
    ConfinedRun::python(&format!(
        "
import mmap, time
SIZE = 192 << 20
MIB = b'x' * (1 << 20)
kept = []
{act}
print('taken', flush=True)
time.sleep(1.5)
"
    ))
}

const ONE: &str = "kept.append(b'x' * SIZE)";
const MANY: &str = "
for _ in range(8):
    if os.fork() == 0:
        kept.append(b'x' * (SIZE // 8))
        time.sleep(3)
        os._exit(0)
time.sleep(0.5)
";
const DEV_SHM: &str = "
# Of the size that /dev/shm itself has, and as much again beside it.
fd = os.open('/dev/shm/x', os.O_RDWR | os.O_CREAT)
for _ in range(80):
    os.write(fd, MIB)
os.close(fd)
kept.append(b'x' * (80 << 20))
";
const SYSV: &str = "
libc.shmat.restype = ctypes.c_void_p
for _ in range(6):
    segment = libc.shmget(0, ctypes.c_size_t(SIZE // 6), 0o1600)
    assert segment >= 0, os.strerror(ctypes.get_errno())
    at = libc.shmat(segment, None, 0)
    ctypes.memset(at, 1, SIZE // 6)
    # Attached to no process, the segment stays.
    assert libc.shmdt(ctypes.c_void_p(at)) == 0
";
const MEMFD: &str = "
for _ in range(6):
    fd = os.memfd_create('x')
    for _ in range(32):
        assert os.write(fd, MIB) == len(MIB)
";
/// The first thread of the process exits. /proc/<pid> then shows the state of that thread, which has no memory.
const LEADERLESS: &str = "
import threading
def take():
    # Not before the first thread is gone.
    while open('/proc/self/stat').read().split()[2] != 'Z':
        time.sleep(0.01)
    kept.append(b'x' * SIZE)
    print('taken', flush=True)
    time.sleep(1.5)
    os._exit(0)
threading.Thread(target=take).start()
libc.pthread_exit(None)
";
/// `hide()` closes /proc/<pid> to every user but root: with PR_SET_DUMPABLE where that is allowed, otherwise by executing a
/// program that the user may execute and not read.
pub const HIDE: &str = "
def hide():
    if libc.prctl(4, 0, 0, 0, 0) == 0: return
    if not os.path.exists('py'):
        import shutil
        shutil.copy('/usr/bin/python3', 'py')
        os.chmod('py', 0o111)
        os.execv('./py', ['./py'] + sys.orig_argv[1:])
";

fn with_cgroup(act: &str) {
    let ran = taking(act).limits(|l| l.memory_bytes = MEMORY).run();
    let kills = ran.outcome.usage.oom_kills;
    assert!(kills >= 1, "{}", ran.all());
    // The third OOM kill ends the run.
    let stop = ran.stop();
    assert!(
        stop.is_none() || kills >= 3 && stop == Some(Stop::Memory),
        "{}",
        ran.all()
    );
    let peak = ran.outcome.usage.memory_peak_bytes.unwrap();
    assert!((MEMORY / 2..=MEMORY).contains(&peak), "{}", ran.all());
    let control = taking(act).limits(|l| l.memory_bytes = 512 * MIB).run();
    unstopped(&control);
    assert!(control.printed("taken"), "{}", control.all());
    assert!(
        control.outcome.usage.memory_peak_bytes.unwrap() > 150 * MIB,
        "{}",
        control.all()
    );
}

/// The kernel kills the program itself, not a child.
fn with_cgroup_alone(act: &str) {
    with_cgroup(act);
    let ran = taking(act).limits(|l| l.memory_bytes = MEMORY).run();
    assert_eq!(
        ran.outcome.exit,
        Some(Exit::Signal(libc::SIGKILL)),
        "{}",
        ran.all()
    );
    assert!(!ran.printed("taken"), "{}", ran.all());
}

trial!(Root, memory_of_one);
fn memory_of_one() {
    with_cgroup_alone(ONE);
}
trial!(Root, memory_of_many);
fn memory_of_many() {
    with_cgroup(MANY);
}
trial!(
    Root,
    memory_in_dev_shm,
    only_at_full = "there is no /dev/shm of its own, and the host's is closed unless asked for"
);
fn memory_in_dev_shm() {
    with_cgroup_alone(DEV_SHM);
}
trial!(
    Root,
    memory_in_sysv_segments,
    only_at_full = "without an IPC namespace there are none: landlock_level::shared_keys_and_names_of_the_host_are_refused"
);
fn memory_in_sysv_segments() {
    with_cgroup_alone(SYSV);
}
trial!(Root, memory_in_memfds);
fn memory_in_memfds() {
    with_cgroup_alone(MEMFD);
}

trial!(Root, a_childs_oom_is_a_counter);
fn a_childs_oom_is_a_counter() {
    let act = |size: u64| {
        format!(
            "
if (child := os.fork()) == 0:
    x = b'x' * ({size})
    os._exit(0)
print('child', os.waitpid(child, 0)[1])
sys.exit(7)
"
        )
    };
    let run = |size| {
        ConfinedRun::python(&act(size))
            .limits(|l| l.memory_bytes = MEMORY)
            .run()
    };
    let ran = run(192 * MIB);
    match Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        // cgroup v2 kills the whole group at once, so no process waits for a dead worker.
        true => assert!(
            ran.outcome.usage.oom_kills >= 1 && ran.code().is_none(),
            "{}",
            ran.all()
        ),
        false => {
            assert_eq!((ran.stop(), ran.code()), (None, Some(7)), "{}", ran.all());
            assert!(
                ran.printed("child 9") && ran.outcome.usage.oom_kills == 1,
                "{}",
                ran.all()
            );
        }
    }
    let control = run(16 * MIB);
    assert!(
        control.printed("child 0") && control.outcome.usage.oom_kills == 0,
        "{}",
        control.all()
    );
}

trial!(Root, a_loop_of_ooms_ends_the_run);
/// A loop of OOM kills is a nuisance to the host: each writes dozens of lines into its log.
fn a_loop_of_ooms_ends_the_run() {
    let run = |children: u32| {
        let script = format!(
            "
for _ in range({children}):
    if (child := os.fork()) == 0:
        x = b'x' * (192 << 20)
        os._exit(0)
    os.waitpid(child, 0)
print('the end')
"
        );
        ConfinedRun::python(&script)
            .limits(|l| l.memory_bytes = MEMORY)
            .run()
    };
    let ran = run(100);
    assert!(!ran.printed("the end"), "{}", ran.all());
    let kills = ran.outcome.usage.oom_kills;
    match Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        // cgroup v2 kills the whole group at the first OOM.
        true => assert!(kills >= 1 && ran.code().is_none(), "{}", ran.all()),
        false => {
            stopped(&ran, Stop::Memory);
            assert!(kills >= 3, "{}", ran.all());
            let control = run(2);
            assert_eq!((control.stop(), control.code()), (None, Some(0)));
            assert!(control.printed("the end"), "{}", control.all());
            assert_eq!(control.outcome.usage.oom_kills, 2, "{}", control.all());
        }
    }
}

/// Without a cgroup, init adds up the memory of all processes ten times a second.
fn without_cgroup(act: &str) {
    let run = |memory_bytes| {
        let mut confined = taking(act).limits(|l| l.memory_bytes = memory_bytes);
        confined.with_group = false;
        confined.run()
    };
    stopped(&run(MEMORY), Stop::Memory);
    let control = run(1024 * MIB);
    unstopped(&control);
    assert!(control.printed("taken"), "{}", control.all());
}

trial!(Everyone, watched_memory_of_one);
fn watched_memory_of_one() {
    without_cgroup(ONE);
}
trial!(Everyone, watched_memory_of_many);
fn watched_memory_of_many() {
    without_cgroup(MANY);
}
trial!(
    Everyone,
    watched_memory_in_dev_shm,
    only_at_full = "there is no /dev/shm of its own, and the host's is closed unless asked for"
);
fn watched_memory_in_dev_shm() {
    without_cgroup(DEV_SHM);
}
trial!(
    Everyone,
    watched_memory_in_sysv_segments,
    only_at_full = "without an IPC namespace there are none: landlock_level::shared_keys_and_names_of_the_host_are_refused"
);
fn watched_memory_in_sysv_segments() {
    without_cgroup(SYSV);
}
trial!(Everyone, watched_memory_in_memfds);
fn watched_memory_in_memfds() {
    without_cgroup(MEMFD);
}
trial!(
    Everyone,
    the_watch_counts_memory_of_a_process_whose_first_thread_has_ended
);
fn the_watch_counts_memory_of_a_process_whose_first_thread_has_ended() {
    without_cgroup(LEADERLESS);
}
trial!(Everyone, watched_memory_of_an_undumpable_process);
fn watched_memory_of_an_undumpable_process() {
    hidden_without_cgroup(ONE);
}
trial!(Everyone, watched_memory_in_memfds_of_an_undumpable_process);
fn watched_memory_in_memfds_of_an_undumpable_process() {
    hidden_without_cgroup(MEMFD);
}

/// The watch charges a process that it cannot inspect, after some attempts, with the most that the process could have. So the
/// control is the same act in a process that can be inspected.
fn hidden_without_cgroup(act: &str) {
    let run = |hiding: &str, memory_bytes| {
        let act = format!("{HIDE}{hiding}\n{act}");
        let mut confined = taking(&format!(
            "{act}\ntime.sleep(30 if 'hide()' in {hiding:?} else 0)"
        ))
        .limits(|l| l.memory_bytes = memory_bytes);
        confined.with_group = false;
        confined.run()
    };
    stopped(&run("hide()", MEMORY), Stop::Memory);
    let control = run("", 1024 * MIB);
    unstopped(&control);
    assert!(control.printed("taken"), "{}", control.all());
}

// Processes and descriptors.

const FORKS: &str = "
made = 0
try:
    while made < WANTED:
        if os.fork() == 0:
            import signal
            signal.pause()
        made += 1
except OSError as e:
    print(errno.errorcode[e.errno])
print('made', made)
";
const THREADS: &str = "
import _thread, threading
lock = _thread.allocate_lock()
lock.acquire()
made = 0
try:
    while made < WANTED:
        _thread.start_new_thread(lock.acquire, ())
        made += 1
except RuntimeError:
    print('EAGAIN')
print('made', made)
";

/// How many processes the act made, and whether the kernel refused more.
fn made(act: &str, wanted: u64, with_group: bool) -> (u64, bool) {
    // At this level only the watch counts a plain user's processes, so the act must leave it time.
    let watched = at_landlock() && !with_group && !is_root();
    let pause = if watched { 1 } else { 0 };
    let end = format!("sys.stdout.flush()\nimport time; time.sleep({pause})\nos._exit(0)");
    let mut confined =
        ConfinedRun::python(&format!("WANTED = {wanted}\n{act}{end}")).limits(|l| l.pids = 64);
    confined.with_group = with_group;
    let ran = confined.run();
    if watched && ran.stop() == Some(Stop::Pids) {
        return (63, true);
    }
    unstopped(&ran);
    let line = ran.stdout.lines().find_map(|l| l.strip_prefix("made "));
    let count = line.map_or(0, |n| n.parse().unwrap());
    if at_landlock() && ran.printed("EAGAIN") && count <= 64 + 8 {
        // The kernel counts the guardian too, and the limit has room for it.
        return (63, true);
    }
    (count, ran.printed("EAGAIN"))
}

fn bounded(act: &str) {
    // Only root has a cgroup here. The limit holds with and without it.
    for with_group in [testkit::is_root(), false] {
        let tries = || {
            (
                made(act, 1000, with_group),
                made(act, 40, with_group) == (40, false),
            )
        };
        let holds = |((count, refused), control): ((u64, bool), bool)| {
            refused && (48..64).contains(&count) && control
        };
        // Without a user namespace the kernel counts all processes of the user, and other trials start and end theirs.
        let is_alone = is_root() || !at_landlock();
        let before_the_last = if is_alone { 0 } else { 9 };
        if (0..before_the_last).any(|_| holds(tries())) {
            continue;
        }
        let seen = tries();
        assert!(holds(seen), "{seen:?}");
    }
}

trial!(Everyone, processes);
fn processes() {
    bounded(FORKS);
}
trial!(Everyone, threads);
fn threads() {
    bounded(THREADS);
}

trial!(Everyone, processes_of_another_run_do_not_count);
/// Two runs of one user at once, each with more than half of the processes that it may have.
fn processes_of_another_run_do_not_count() {
    let (first, second) = (new_marker(), new_marker());
    // Without a user namespace the kernel counts all processes of the user. The limit adds those that ran before the start.
    let room = if at_landlock() && !is_root() { 256 } else { 64 };
    std::thread::scope(|scope| {
        let runs = [&first, &second].map(|marker| {
            let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
            let act =
                format!("# {marker}\nWANTED = 40\n{FORKS}\nsys.stdout.flush()\nsys.stdin.read()");
            let mut confined = ConfinedRun::python(&act).limits(|l| l.pids = room);
            confined.with_group = false;
            confined.stdin = Some(read);
            (scope.spawn(|| confined.run()), write)
        });
        // All processes of both runs live now. Then both runs are told to end.
        wait_for_marked(&first, 41);
        wait_for_marked(&second, 41);
        for (run, write) in runs {
            drop(write);
            let ran = run.join().unwrap();
            unstopped(&ran);
            assert!(ran.printed("made 40"), "{}", ran.all());
        }
    });
    // Control: the same number of processes in one run is too many.
    assert!(made(FORKS, 80, false).1);
}

trial!(Everyone, ten_thousand_orphans);
fn ten_thousand_orphans() {
    let source = r#"
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
    for (int i = 0; i < 10000; i++) {
        pid_t child = fork();
        if (child < 0) { perror("fork"); printf("failed at %d\n", i); return 1; }
        if (child == 0) _exit(fork() < 0 ? 1 : 0);
        int status;
        waitpid(child, &status, 0);
        if (status != 0) { printf("orphan refused at %d\n", i); return 1; }
    }
    puts("all");
    return 0;
}"#;
    let mut confined = ConfinedRun::new(&["/bin/true"]).limits(|l| l.pids = 1024);
    let program = confined.workspace().join("orphans");
    crate::confined_run::compile(source, &program);
    confined.spec.program = sandbox::spec::InsidePath::new(&program);
    let ran = confined.run();
    unstopped(&ran);
    assert!(ran.printed("all"), "{}", ran.all());
}

trial!(Everyone, open_files);
fn open_files() {
    let act = "
import resource
count = 0
try:
    while count < 200:
        os.open('/dev/null', os.O_RDONLY)
        count += 1
except OSError as e:
    print(errno.errorcode[e.errno], count)
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
except ValueError:
    print('not raised')
print('done')
";
    let ran = ConfinedRun::python(act).limits(|l| l.open_files = 64).run();
    unstopped(&ran);
    assert!(
        ran.printed("EMFILE 61") && ran.printed("not raised"),
        "{}",
        ran.all()
    );
    let control = ConfinedRun::python(act)
        .limits(|l| l.open_files = 1000)
        .run();
    assert!(
        !control.stdout.contains("EMFILE") && !control.printed("not raised"),
        "{}",
        control.all()
    );
}

// Disk.

pub const DISK: u64 = 64 * MIB;
/// How much the watch may let through: what all CPUs write in a tenth of a second, on a busy machine. The number is generous,
/// because it only has to distinguish a bound from no bound.
const OVERSHOOT: u64 = 1024 * MIB;

/// `put(fd, n)` writes `n` MiB and prints a dot for each, by which the host counts them. `files(n)` yields new files of 16 MiB,
/// for `n` MiB in all.
pub const WRITES: &str = "
import array, mmap, signal, time
MIB = b'x' * (1 << 20)
PART = 16
def put(fd, mib):
    for _ in range(mib):
        assert os.write(fd, MIB) == len(MIB)
        os.write(1, b'.')
def new(name, **at):
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, **at)
def files(mib):
    return (f'f{os.getpid()}-{n}' for n in range(mib // PART))
def unwaited(act):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if os.fork() == 0:
        act()
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
    # Slower than a watch looks.
    time.sleep(0.05)
def down(levels):
    for _ in range(levels):
        os.mkdir('d')
        os.chdir('d')
";

fn writing(act: &str, total_mib: u64, disk_bytes: u64) -> ConfinedResult {
    let confined = ConfinedRun::python(&format!(
        "{WRITES}\nTOTAL = {total_mib}\n{act}\nprint('wrote all', flush=True)\ntime.sleep(3 if TOTAL > 128 else 0)"
    ));
    let (ran, ()) = confined
        .limits(|l| l.disk_bytes = disk_bytes)
        .run_then(scrub);
    ran
}

/// Bytes and inodes in use on the file system of the workspaces.
fn in_use() -> (u64, u64) {
    let now = rustix::fs::statvfs("/tmp").unwrap();
    let blocks = now.f_blocks - now.f_bfree;
    (blocks * now.f_frsize, now.f_files - now.f_ffree)
}

/// Runs an attack. Runs it again if it was not stopped and other processes of the host freed much of the file system
/// meanwhile, because the watch sees some acts only by the growth of the file system.
pub fn undisturbed(attack: impl Fn() -> ConfinedResult) -> ConfinedResult {
    const TIMES: u32 = 5;
    for _ in 1..TIMES {
        let before = in_use();
        let ran = attack();
        let after = in_use();
        if ran.stop().is_some() || (after.0 + 16 * MIB > before.0 && after.1 + 100 > before.1) {
            return ran;
        }
    }
    attack()
}

/// The limit stops an act that writes far more; the same act with a higher limit is not stopped.
pub fn disk_limited(act: &str, total_mib: u64) {
    let _alone = alone_with(HostResource::Disk);
    let ran = undisturbed(|| writing(act, total_mib, DISK));
    stopped(&ran, Stop::Disk);
    let written = ran.stdout.matches('.').count() as u64 * MIB;
    assert!(written <= DISK + OVERSHOOT, "{} MiB written", written / MIB);
    let control = writing(act, 96, 1024 * MIB);
    unstopped(&control);
    assert!(control.stdout.contains("wrote all"), "{}", control.all());
}

/// Restores permissions, so that the owner can remove the directory.
fn scrub(dir: &Path) {
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)).unwrap();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            scrub(&entry.path());
        }
    }
}

trial!(Everyone, disk_of_one_file);
/// The file begins with a hole and the limit is high, so that nothing which others write meanwhile can be charged to the run.
fn disk_of_one_file() {
    const LIMIT: u64 = 16 << 30;
    let act = |start: u64| {
        format!(
            "
fd = new('x')
os.lseek(fd, {start}, os.SEEK_SET)
try:
    for _ in range(TOTAL):
        os.write(fd, MIB)
except OSError as e:
    print(errno.errorcode[e.errno], flush=True)
print('size', os.fstat(fd).st_size)
try:
    os.pwrite(fd, b'x', 1 << 40)
except OSError as e:
    print('far out', errno.errorcode[e.errno], flush=True)
"
        )
    };
    let _alone = alone_with(HostResource::Disk);
    let ran = writing(&act(LIMIT - DISK), 512, LIMIT);
    // The kernel holds a single file to the limit exactly, so nothing has to be stopped.
    unstopped(&ran);
    assert!(ran.printed("EFBIG"), "{}", ran.all());
    assert!(ran.printed(&format!("size {LIMIT}")), "{}", ran.all());
    assert!(ran.outcome.usage.disk_bytes <= LIMIT, "{}", ran.all());
    let control = writing(&act(LIMIT - 2 * DISK), 96, LIMIT);
    unstopped(&control);
    assert!(
        !control.printed("EFBIG") && control.printed("far out EFBIG"),
        "{}",
        control.all()
    );
}

trial!(Everyone, disk_file_size_signal);
fn disk_file_size_signal() {
    let act = "
fd = new('x')
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.pwrite(fd, b'x', 32 << 20)
print('written')
";
    let ran = writing(act, 0, 32 * MIB);
    assert_eq!(
        (ran.stop(), ran.outcome.exit),
        (None, Some(Exit::Signal(libc::SIGXFSZ))),
        "{}",
        ran.all()
    );
    unstopped(&writing(act, 0, 33 * MIB));
}

trial!(Everyone, disk_of_parallel_writers);
fn disk_of_parallel_writers() {
    disk_limited(
        "
for _ in range(7):
    if os.fork() == 0:
        break
for name in files(TOTAL // 8 // PART * PART):
    fd = new(name)
    put(fd, PART)
    os.close(fd)
",
        4096,
    );
}

trial!(Everyone, disk_in_tmp);
fn disk_in_tmp() {
    disk_limited(
        "
os.chdir(os.environ['TMPDIR'])
for name in files(TOTAL):
    put(new(name), PART)
",
        256,
    );
}

trial!(Everyone, disk_unlinked_but_open);
fn disk_unlinked_but_open() {
    disk_limited(
        "
for name in files(TOTAL):
    fd = new(name)
    os.unlink(name)
    put(fd, PART)
",
        256,
    );
}

trial!(Everyone, disk_unlinked_but_mapped);
fn disk_unlinked_but_mapped() {
    disk_limited(
        "
kept = []
libc.mmap.restype = ctypes.c_void_p
for name in files(TOTAL):
    fd = new(name)
    put(fd, PART)
    # Python's own mmap would keep a descriptor.
    kept.append(libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0)))
    os.unlink(name)
    os.close(fd)
",
        256,
    );
}

trial!(Everyone, disk_in_flight);
fn disk_in_flight() {
    disk_limited(
        "
left, right = socket.socketpair()
for name in files(TOTAL):
    fd = new(name)
    os.unlink(name)
    put(fd, PART)
    socket.send_fds(left, [b'x'], [fd])
    os.close(fd)
",
        256,
    );
}

trial!(Everyone, disk_behind_mode_000);
fn disk_behind_mode_000() {
    disk_limited(
        "
os.mkdir('shut')
for name in files(TOTAL):
    os.chmod('shut', 0o700)
    fd = new('shut/' + name)
    os.chmod('shut', 0)
    put(fd, PART)
    os.close(fd)
",
        256,
    );
}

trial!(Everyone, disk_below_200_levels);
fn disk_below_200_levels() {
    disk_limited(
        "
down(200)
for name in files(TOTAL):
    fd = new(name)
    put(fd, PART)
    os.close(fd)
",
        256,
    );
}

trial!(Everyone, disk_written_by_an_undumpable_process);
/// PR_SET_DUMPABLE closes /proc/<pid> to every user but root.
fn disk_written_by_an_undumpable_process() {
    disk_limited(
        &format!(
            "{HIDE}hide()
for name in files(TOTAL):
    fd = new(name)
    os.unlink(name)
    put(fd, PART)
"
        ),
        256,
    );
}

trial!(Everyone, disk_by_an_unreadable_program);
/// Executing a file that the user may execute but not read closes /proc/<pid> too.
fn disk_by_an_unreadable_program() {
    disk_limited(
        "
if not os.path.exists('py'):
    import shutil
    shutil.copy('/usr/bin/python3', 'py')
    os.chmod('py', 0o111)
    os.execv('./py', ['./py'] + sys.orig_argv[1:])
for name in files(TOTAL):
    fd = new(name)
    os.unlink(name)
    put(fd, PART)
",
        256,
    );
}

/// As many descriptors as the limit permits, in so many processes that reading all of /proc/<pid>/fd takes long.
const MUCH_TO_LOOK_AT: &str = "
fds = []
try:
    while True:
        fds.append(os.open('/dev/null', os.O_RDONLY))
except OSError:
    pass
os.close(fds.pop())
for _ in range(240):
    if os.fork() == 0:
        signal.pause()
";

trial!(Everyone, disk_beside_much_to_look_at);
/// While the watch reads so many descriptors, it must still see what the writer writes.
fn disk_beside_much_to_look_at() {
    disk_limited(
        &format!(
            "{MUCH_TO_LOOK_AT}
for name in files(TOTAL):
    fd = new(name)
    put(fd, PART)
    os.close(fd)
"
        ),
        2048,
    );
}

trial!(Everyone, disk_without_names_beside_much_to_look_at);
/// A file without a name is visible to the watch only through its descriptor.
fn disk_without_names_beside_much_to_look_at() {
    disk_limited(
        &format!(
            "{MUCH_TO_LOOK_AT}
for fd in fds[-TOTAL // PART:]:
    os.close(fd)
for name in files(TOTAL):
    fd = new(name)
    os.unlink(name)
    put(fd, PART)
"
        ),
        2048,
    );
}

trial!(Everyone, disk_written_after_the_first_thread_ended);
fn disk_written_after_the_first_thread_ended() {
    disk_limited(
        "
import threading
def write():
    for name in files(TOTAL):
        fd = new(name)
        os.unlink(name)
        put(fd, PART)
    print('wrote all', flush=True)
    time.sleep(3 if TOTAL > 128 else 0)
    os._exit(0)
threading.Thread(target=write).start()
libc.pthread_exit(None)
",
        256,
    );
}

trial!(Everyone, disk_by_a_thread_with_its_own_descriptors);
/// clone() can make a thread that shares everything but the table of descriptors.
fn disk_by_a_thread_with_its_own_descriptors() {
    let source = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int total;
static char mib[1 << 20];
static char stack[1 << 16];
static int writes(void *nothing) {
    for (int n = 0; n < total; n += 16) {
        int fd = open("x", O_RDWR | O_CREAT | O_EXCL, 0600);
        if (fd < 0 || unlink("x") != 0) _exit(1);
        for (int m = 0; m < 16; m++)
            if (write(fd, mib, sizeof mib) != sizeof mib) _exit(2);
    }
    write(1, "wrote all\n", 10);
    sleep(total > 128 ? 3 : 0);
    _exit(0);
}
int main(int argc, char **argv) {
    total = atoi(argv[1]);
    memset(mib, 'x', sizeof mib);
    if (clone(writes, stack + sizeof stack, CLONE_VM | CLONE_FS | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM, 0) < 0)
        return 3;
    for (;;) pause();
}"#;
    let run = |without: &[Layer]| {
        let mut confined = ConfinedRun::new(&["/bin/true", "96"]).without(without);
        let program = confined.workspace().join("writes");
        crate::confined_run::compile(source, &program);
        confined.spec.program = sandbox::spec::InsidePath::new(&program);
        confined.run()
    };
    // /proc/<pid>/fd would not list the files of such a thread, so the sandbox refuses to make it.
    let ran = run(&[]);
    assert_eq!(ran.code(), Some(3), "{}", ran.all());
    let control = run(&[Layer::Seccomp]);
    assert!(control.printed("wrote all"), "{}", control.all());
}

trial!(Everyone, disk_by_unwaited_writers);
fn disk_by_unwaited_writers() {
    disk_limited(
        "
for name in files(TOTAL):
    unwaited(lambda: put(new(name), PART))
",
        512,
    );
}

trial!(Everyone, disk_by_unwaited_writers_200_levels_down);
fn disk_by_unwaited_writers_200_levels_down() {
    disk_limited(
        "
down(200)
for name in files(TOTAL):
    unwaited(lambda: put(new(name), PART))
",
        512,
    );
}

trial!(Everyone, disk_by_unwaited_writers_behind_mode_000);
fn disk_by_unwaited_writers_behind_mode_000() {
    disk_limited(
        "
def write(name):
    os.chmod('shut', 0o700)
    fd = new('shut/' + name)
    os.chmod('shut', 0)
    put(fd, PART)
os.mkdir('shut')
for name in files(TOTAL):
    unwaited(lambda: write(name))
",
        512,
    );
}

trial!(Everyone, disk_by_unwaited_writers_mapped);
fn disk_by_unwaited_writers_mapped() {
    disk_limited(
        "
libc.mmap.restype = ctypes.c_void_p
def write(name):
    put(os.open(name, os.O_RDWR), PART)
for name in files(TOTAL):
    fd = new(name)
    os.ftruncate(fd, 4096)
    libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0))
    os.close(fd)
    unwaited(lambda: write(name))
    os.unlink(name)
",
        512,
    );
}

trial!(Everyone, rewriting_is_not_disk);
/// The limit counts the bytes that are there, not all bytes that were ever written.
fn rewriting_is_not_disk() {
    let act = "
fd = new('x')
for _ in range(TOTAL // 4):
    os.lseek(fd, 0, 0)
    put(fd, 4)
    # On the disk, so that the next round is counted as written again.
    os.fdatasync(fd)
for _ in range(TOTAL // PART):
    with open('y', 'wb') as f:
        put(f.fileno(), PART)
";
    let ran = writing(act, 128, DISK);
    unstopped(&ran);
    let written = ran.stdout.matches('.').count() as u64 * MIB;
    assert!(
        written > 3 * DISK && ran.outcome.usage.disk_bytes < DISK,
        "{}",
        ran.all()
    );
}

trial!(Everyone, fallocate_is_refused_and_falls_back);
fn fallocate_is_refused_and_falls_back() {
    let act = "
import ctypes, errno, os, tempfile
libc = ctypes.CDLL(None, use_errno=True)
file = tempfile.TemporaryFile()
fd = file.fileno()
got = libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(1 << 20))
print('fallocate', 'refused' if ctypes.get_errno() == errno.EOPNOTSUPP else got)
os.ftruncate(fd, 0)
os.posix_fallocate(fd, 0, 1 << 20)
print('allocated', os.fstat(fd).st_blocks >= 2048)
";
    let ran = ConfinedRun::python(act).run();
    assert!(
        ran.printed("fallocate refused") && ran.printed("allocated True"),
        "{}",
        ran.all()
    );
    let host = Command::new("/usr/bin/python3")
        .args(["-I", "-c", act])
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&host.stdout),
        "fallocate 0\nallocated True\n"
    );
    if at_landlock() {
        return;
    }
    // A workspace in memory has a fixed size, so fallocate is allowed there.
    let mut confined = ConfinedRun::python(act).env("TMPDIR", ".");
    confined.spec.workspace_kind = WorkspaceKind::Memory;
    let ran = confined.run();
    assert!(
        ran.printed("fallocate 0") && ran.printed("allocated True"),
        "{}",
        ran.all()
    );
}

// Files.

pub fn files_limited(act: &str) {
    let _alone = alone_with(HostResource::Disk);
    let run = |count: u64, most: u64| {
        let script = format!(
            "{WRITES}\nCOUNT = {count}\n{act}\nprint('made all', flush=True)\ntime.sleep(3 if COUNT > 500 else 0)"
        );
        ConfinedRun::python(&script)
            .limits(|l| l.files = most)
            .run_then(scrub)
            .0
    };
    stopped(&undisturbed(|| run(3000, 500)), Stop::Files);
    // A run with an unreadable directory is charged for the files that others of the host make at that moment, too.
    let disturbed = |ran: &ConfinedResult| ran.stop() == Some(Stop::Files);
    let control = (1..5).map(|_| run(400, 1000)).find(|ran| !disturbed(ran));
    let control = control.unwrap_or_else(|| run(400, 1000));
    unstopped(&control);
    assert!(control.printed("made all"), "{}", control.all());
    assert!(control.outcome.usage.files < 1000, "{}", control.all());
}

trial!(Everyone, files_in_many_directories);
fn files_in_many_directories() {
    files_limited(
        "
for n in range(COUNT // 10):
    os.mkdir(f'd{n}')
    for m in range(9):
        os.close(new(f'd{n}/{m}'))
",
    );
}

trial!(Everyone, files_as_hard_links);
fn files_as_hard_links() {
    files_limited(
        "
os.close(new('one'))
for n in range(COUNT):
    os.link('one', f'link{n}')
",
    );
}

trial!(Everyone, files_in_tmp);
fn files_in_tmp() {
    files_limited(
        "
for n in range(COUNT):
    os.close(new(os.environ['TMPDIR'] + f'/{n}'))
",
    );
}

trial!(Everyone, files_below_200_levels);
fn files_below_200_levels() {
    files_limited(
        "
down(200)
for n in range(COUNT):
    os.close(new(str(n)))
",
    );
}

trial!(Everyone, files_behind_mode_000);
fn files_behind_mode_000() {
    files_limited(
        "
for n in range(COUNT // 100):
    os.mkdir(f'shut{n}')
    for m in range(100):
        os.close(new(f'shut{n}/{m}'))
    os.chmod(f'shut{n}', 0)
",
    );
}

// A workspace in memory.

fn in_memory(act: &str) -> ConfinedResult {
    let mut confined = ConfinedRun::python(&format!("{WRITES}\n{act}"))
        .limits(|l| (l.disk_bytes, l.files) = (16 * MIB, 200));
    confined.spec.workspace_kind = WorkspaceKind::Memory;
    let ran = confined.run();
    unstopped(&ran);
    ran
}

trial!(
    Everyone,
    memory_workspace_is_full_at_its_size,
    only_at_full = "a workspace in memory needs a mount"
);
fn memory_workspace_is_full_at_its_size() {
    let ran = in_memory(
        "
fd = new('x')
count = 0
try:
    while count < 64:
        count += os.write(fd, MIB) // len(MIB)
except OSError as e:
    print(errno.errorcode[e.errno])
print(count, 'MiB', flush=True)
os.unlink('x')
os.close(fd)
put(new('y'), 8)
print('\\nroom again')
",
    );
    assert!(
        ran.printed("ENOSPC") && ran.printed("room again"),
        "{}",
        ran.all()
    );
    assert!(
        ran.printed("15 MiB") || ran.printed("16 MiB"),
        "{}",
        ran.all()
    );
    assert!(
        (8 * MIB..=16 * MIB).contains(&ran.outcome.usage.disk_bytes),
        "{}",
        ran.all()
    );
}

trial!(
    Everyone,
    memory_workspace_is_full_at_its_inodes,
    only_at_full = "a workspace in memory needs a mount"
);
fn memory_workspace_is_full_at_its_inodes() {
    let ran = in_memory(
        "
count = 0
try:
    while count < 1000:
        os.close(new(str(count)))
        count += 1
except OSError as e:
    print(errno.errorcode[e.errno])
print('enough' if 200 <= count <= 216 else count)
for n in range(count):
    os.unlink(str(n))
os.close(new('again'))
print('room again')
",
    );
    assert!(
        ran.printed("ENOSPC") && ran.printed("enough") && ran.printed("room again"),
        "{}",
        ran.all()
    );
}
