//! P10: time, memory, processes, open files, disk bytes and file count are each bounded, each by the mechanism it names.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use sandbox::outcome::{Exit, Stop};
use sandbox::spec::{Layer, WorkspaceKind};

use crate::hood::{Hood, Ran, alone, at_landlock, is_root};
use crate::p11_deadline::{new_marker, wait_for_marked};
use crate::{Entry, For, OnlyAtFull};

pub const TRIALS: &[Entry] = &[
    ("wall_time", For::Everyone, wall_time),
    ("cpu_time", For::Everyone, cpu_time),
    (
        "cpu_time_over_children",
        For::Everyone,
        cpu_time_over_children,
    ),
    (
        "cpu_time_over_children_nobody_waits_for",
        For::Everyone,
        cpu_time_over_children_nobody_waits_for,
    ),
    ("idle_time", For::Everyone, idle_time),
    (
        "who_prints_is_not_idle",
        For::Everyone,
        who_prints_is_not_idle,
    ),
    (
        "who_computes_is_not_idle",
        For::Everyone,
        who_computes_is_not_idle,
    ),
    (
        "whose_unwaited_children_compute_is_not_idle",
        For::Everyone,
        whose_unwaited_children_compute_is_not_idle,
    ),
    ("memory_of_one", For::Root, memory_of_one),
    ("memory_of_many", For::Root, memory_of_many),
    ("memory_in_dev_shm", For::Root, memory_in_dev_shm),
    (
        "memory_in_sysv_segments",
        For::Root,
        memory_in_sysv_segments,
    ),
    ("memory_in_memfds", For::Root, memory_in_memfds),
    (
        "a_childs_oom_is_a_counter",
        For::Root,
        a_childs_oom_is_a_counter,
    ),
    (
        "a_loop_of_ooms_ends_the_run",
        For::Root,
        a_loop_of_ooms_ends_the_run,
    ),
    (
        "watched_memory_of_one",
        For::Everyone,
        watched_memory_of_one,
    ),
    (
        "watched_memory_of_many",
        For::Everyone,
        watched_memory_of_many,
    ),
    (
        "watched_memory_in_dev_shm",
        For::Everyone,
        watched_memory_in_dev_shm,
    ),
    (
        "watched_memory_in_sysv_segments",
        For::Everyone,
        watched_memory_in_sysv_segments,
    ),
    (
        "watched_memory_in_memfds",
        For::Everyone,
        watched_memory_in_memfds,
    ),
    (
        "watched_memory_of_the_leaderless",
        For::Everyone,
        watched_memory_of_the_leaderless,
    ),
    (
        "watched_memory_of_the_undumpable",
        For::Everyone,
        watched_memory_of_the_undumpable,
    ),
    (
        "watched_memory_in_memfds_of_the_undumpable",
        For::Everyone,
        watched_memory_in_memfds_of_the_undumpable,
    ),
    ("processes", For::Everyone, processes),
    ("threads", For::Everyone, threads),
    (
        "processes_of_another_run_do_not_count",
        For::Everyone,
        processes_of_another_run_do_not_count,
    ),
    ("ten_thousand_orphans", For::Everyone, ten_thousand_orphans),
    ("open_files", For::Everyone, open_files),
    ("disk_of_one_file", For::Everyone, disk_of_one_file),
    (
        "disk_file_size_signal",
        For::Everyone,
        disk_file_size_signal,
    ),
    (
        "disk_of_parallel_writers",
        For::Everyone,
        disk_of_parallel_writers,
    ),
    ("disk_in_tmp", For::Everyone, disk_in_tmp),
    (
        "disk_unlinked_but_open",
        For::Everyone,
        disk_unlinked_but_open,
    ),
    (
        "disk_unlinked_but_mapped",
        For::Everyone,
        disk_unlinked_but_mapped,
    ),
    ("disk_in_flight", For::Everyone, disk_in_flight),
    ("disk_behind_mode_000", For::Everyone, disk_behind_mode_000),
    (
        "disk_below_200_levels",
        For::Everyone,
        disk_below_200_levels,
    ),
    (
        "disk_by_the_undumpable",
        For::Everyone,
        disk_by_the_undumpable,
    ),
    (
        "disk_by_an_unreadable_program",
        For::Everyone,
        disk_by_an_unreadable_program,
    ),
    (
        "disk_beside_much_to_look_at",
        For::Everyone,
        disk_beside_much_to_look_at,
    ),
    (
        "disk_without_names_beside_much_to_look_at",
        For::Everyone,
        disk_without_names_beside_much_to_look_at,
    ),
    (
        "disk_by_the_leaderless",
        For::Everyone,
        disk_by_the_leaderless,
    ),
    (
        "disk_by_a_thread_with_its_own_descriptors",
        For::Everyone,
        disk_by_a_thread_with_its_own_descriptors,
    ),
    (
        "disk_by_unwaited_writers",
        For::Everyone,
        disk_by_unwaited_writers,
    ),
    (
        "disk_by_unwaited_writers_200_levels_down",
        For::Everyone,
        disk_by_unwaited_writers_200_levels_down,
    ),
    (
        "disk_by_unwaited_writers_behind_mode_000",
        For::Everyone,
        disk_by_unwaited_writers_behind_mode_000,
    ),
    (
        "disk_by_unwaited_writers_mapped",
        For::Everyone,
        disk_by_unwaited_writers_mapped,
    ),
    (
        "rewriting_is_not_disk",
        For::Everyone,
        rewriting_is_not_disk,
    ),
    (
        "fallocate_is_refused_and_falls_back",
        For::Everyone,
        fallocate_is_refused_and_falls_back,
    ),
    (
        "files_in_many_directories",
        For::Everyone,
        files_in_many_directories,
    ),
    ("files_as_hard_links", For::Everyone, files_as_hard_links),
    ("files_in_tmp", For::Everyone, files_in_tmp),
    (
        "files_below_200_levels",
        For::Everyone,
        files_below_200_levels,
    ),
    (
        "files_behind_mode_000",
        For::Everyone,
        files_behind_mode_000,
    ),
    (
        "memory_workspace_is_full_at_its_size",
        For::Everyone,
        memory_workspace_is_full_at_its_size,
    ),
    (
        "memory_workspace_is_full_at_its_inodes",
        For::Everyone,
        memory_workspace_is_full_at_its_inodes,
    ),
];

#[rustfmt::skip]
pub const ONLY_AT_FULL: &[OnlyAtFull] = &[
    ("memory_in_dev_shm", "there is no /dev/shm of its own, and the host's is closed unless asked for"),
    ("watched_memory_in_dev_shm", "there is no /dev/shm of its own, and the host's is closed unless asked for"),
    ("memory_in_sysv_segments", "without an IPC namespace there are none: landlock_level::keys_and_names_of_all"),
    ("watched_memory_in_sysv_segments", "without an IPC namespace there are none: landlock_level::keys_and_names_of_all"),
    ("memory_workspace_is_full_at_its_size", "a workspace in memory needs a mount"),
    ("memory_workspace_is_full_at_its_inodes", "a workspace in memory needs a mount"),
];

pub const MIB: u64 = 1 << 20;

pub fn stopped(ran: &Ran, why: Stop) {
    assert_eq!(ran.stop(), Some(why), "{}", ran.all());
    assert!(ran.outcome.all_dead);
}

pub fn unstopped(ran: &Ran) {
    assert_eq!((ran.stop(), ran.code()), (None, Some(0)), "{}", ran.all());
    assert_eq!(ran.outcome.usage.oom_kills, 0, "{}", ran.all());
}

// Time.

fn wall_time() {
    let ran = Hood::sh("exec sleep 60").limits(|l| l.wall_ms = 500).run();
    stopped(&ran, Stop::WallTime);
    assert_eq!(
        ran.outcome.exit,
        Some(Exit::Signal(libc::SIGTERM)),
        "{}",
        ran.all()
    );
    unstopped(&Hood::sh("exec sleep 0.6").run());
}

/// `burn(s)` uses so many seconds of CPU in this process; `unwaited(act)` does it in a child whose end the
/// kernel notes down for nobody, because its parent ignores SIGCHLD.
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

/// The act never ends by itself. With a limit on CPU time that is what stops it, and without one it is not.
fn cpu_limited(act: &str) {
    let hood = || Hood::python(&format!("{BURN}\n{act}")).limits(|l| l.grace_ms = 100);
    stopped(
        &hood()
            .limits(|l| (l.wall_ms, l.cpu_ms) = (10_000, Some(500)))
            .run(),
        Stop::CpuTime,
    );
    stopped(&hood().limits(|l| l.wall_ms = 1500).run(), Stop::WallTime);
}

fn cpu_time() {
    cpu_limited("while True: burn(1)");
    let below = Hood::python(&format!("{BURN}\nburn(0.2)"))
        .limits(|l| l.cpu_ms = Some(5000))
        .run();
    unstopped(&below);
}

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

fn cpu_time_over_children_nobody_waits_for() {
    cpu_limited("while True: unwaited(lambda: burn(0.07))");
}

fn idle(act: &str) -> Ran {
    Hood::python(&format!("{BURN}\n{act}"))
        .limits(|l| (l.idle_ms, l.wall_ms) = (Some(1500), 20_000))
        .run()
}

fn idle_time() {
    stopped(&idle("time.sleep(60)"), Stop::IdleTime);
    // The control: no limit, no stop.
    unstopped(&Hood::sh("exec sleep 2").run());
}

fn who_prints_is_not_idle() {
    unstopped(&idle(
        "
for _ in range(35):
    time.sleep(0.1)
    print('still here', flush=True)
",
    ));
}

fn who_computes_is_not_idle() {
    unstopped(&idle("burn(3.5)"));
}

fn whose_unwaited_children_compute_is_not_idle() {
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

/// Takes twice the limit in all, says so, and holds it for a while: whoever only looks now and then must see it.
fn taking(act: &str) -> Hood {
    Hood::python(&format!(
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
/// The thread that the process began with leaves; /proc/<pid> shows what that one has: nothing.
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
/// `hide()` closes /proc/<pid> to whoever is not root: by asking for it where that is allowed, else by executing a
/// program that may be executed and not read.
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
    // The third kill ends the run.
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
    assert!(control.said("taken"), "{}", control.all());
    assert!(
        control.outcome.usage.memory_peak_bytes.unwrap() > 150 * MIB,
        "{}",
        control.all()
    );
}

/// The program itself is the one that is killed.
fn with_cgroup_alone(act: &str) {
    with_cgroup(act);
    let ran = taking(act).limits(|l| l.memory_bytes = MEMORY).run();
    assert_eq!(
        ran.outcome.exit,
        Some(Exit::Signal(libc::SIGKILL)),
        "{}",
        ran.all()
    );
    assert!(!ran.said("taken"), "{}", ran.all());
}

fn memory_of_one() {
    with_cgroup_alone(ONE);
}
fn memory_of_many() {
    with_cgroup(MANY);
}
fn memory_in_dev_shm() {
    with_cgroup_alone(DEV_SHM);
}
fn memory_in_sysv_segments() {
    with_cgroup_alone(SYSV);
}
fn memory_in_memfds() {
    with_cgroup_alone(MEMFD);
}

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
        Hood::python(&act(size))
            .limits(|l| l.memory_bytes = MEMORY)
            .run()
    };
    let ran = run(192 * MIB);
    match Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        // Version 2 ends the whole group at once: nobody waits for a worker that will not come back.
        true => assert!(
            ran.outcome.usage.oom_kills >= 1 && ran.code().is_none(),
            "{}",
            ran.all()
        ),
        false => {
            assert_eq!((ran.stop(), ran.code()), (None, Some(7)), "{}", ran.all());
            assert!(
                ran.said("child 9") && ran.outcome.usage.oom_kills == 1,
                "{}",
                ran.all()
            );
        }
    }
    let control = run(16 * MIB);
    assert!(
        control.said("child 0") && control.outcome.usage.oom_kills == 0,
        "{}",
        control.all()
    );
}

/// Each kill writes dozens of lines into the host's log.
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
        Hood::python(&script)
            .limits(|l| l.memory_bytes = MEMORY)
            .run()
    };
    let ran = run(100);
    assert!(!ran.said("the end"), "{}", ran.all());
    let kills = ran.outcome.usage.oom_kills;
    match Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        // Version 2 ends the whole group at the first.
        true => assert!(kills >= 1 && ran.code().is_none(), "{}", ran.all()),
        false => {
            stopped(&ran, Stop::Memory);
            assert!(kills >= 3, "{}", ran.all());
            let control = run(2);
            assert_eq!((control.stop(), control.code()), (None, Some(0)));
            assert!(control.said("the end"), "{}", control.all());
            assert_eq!(control.outcome.usage.oom_kills, 2, "{}", control.all());
        }
    }
}

/// Without a cgroup init adds up what the processes have, ten times a second.
fn without_cgroup(act: &str) {
    let run = |memory_bytes| {
        let mut hood = taking(act).limits(|l| l.memory_bytes = memory_bytes);
        hood.with_group = false;
        hood.run()
    };
    stopped(&run(MEMORY), Stop::Memory);
    let control = run(1024 * MIB);
    unstopped(&control);
    assert!(control.said("taken"), "{}", control.all());
}

fn watched_memory_of_one() {
    without_cgroup(ONE);
}
fn watched_memory_of_many() {
    without_cgroup(MANY);
}
fn watched_memory_in_dev_shm() {
    without_cgroup(DEV_SHM);
}
fn watched_memory_in_sysv_segments() {
    without_cgroup(SYSV);
}
fn watched_memory_in_memfds() {
    without_cgroup(MEMFD);
}
fn watched_memory_of_the_leaderless() {
    without_cgroup(LEADERLESS);
}
fn watched_memory_of_the_undumpable() {
    hidden_without_cgroup(ONE);
}
fn watched_memory_in_memfds_of_the_undumpable() {
    hidden_without_cgroup(MEMFD);
}

/// Who lets nobody look answers for the most there is, after some looks: so the control is the same act done openly.
fn hidden_without_cgroup(act: &str) {
    let run = |hiding: &str, memory_bytes| {
        let act = format!("{HIDE}{hiding}\n{act}");
        let mut hood = taking(&format!(
            "{act}\ntime.sleep(4 if 'hide()' in {hiding:?} else 0)"
        ))
        .limits(|l| l.memory_bytes = memory_bytes);
        hood.with_group = false;
        hood.run()
    };
    stopped(&run("hide()", MEMORY), Stop::Memory);
    let control = run("", 1024 * MIB);
    unstopped(&control);
    assert!(control.said("taken"), "{}", control.all());
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

/// How many were made, and whether more were refused.
fn made(act: &str, wanted: u64, with_group: bool) -> (u64, bool) {
    // Nothing but the watch counts a plain user's at this level, so there must be time to look.
    let watched = at_landlock() && !with_group && !is_root();
    let pause = if watched { 1 } else { 0 };
    let end = format!("sys.stdout.flush()\nimport time; time.sleep({pause})\nos._exit(0)");
    let mut hood = Hood::python(&format!("WANTED = {wanted}\n{act}{end}")).limits(|l| l.pids = 64);
    hood.with_group = with_group;
    let ran = hood.run();
    if watched && ran.stop() == Some(Stop::Pids) {
        return (63, true);
    }
    unstopped(&ran);
    let line = ran.stdout.lines().find_map(|l| l.strip_prefix("made "));
    let count = line.map_or(0, |n| n.parse().unwrap());
    if at_landlock() && ran.said("EAGAIN") && count <= 64 + 8 {
        // The kernel counts the guardian too, and leaves it room.
        return (63, true);
    }
    (count, ran.said("EAGAIN"))
}

fn bounded(act: &str) {
    // A group is for root only, here; with or without it the same holds.
    for with_group in [crate::hood::is_root(), false] {
        let (count, refused) = made(act, 1000, with_group);
        assert!(refused && (48..64).contains(&count), "{count} {refused}");
        assert_eq!(made(act, 40, with_group), (40, false));
    }
}

fn processes() {
    bounded(FORKS);
}
fn threads() {
    bounded(THREADS);
}

/// Two runs at once of the same user, each with more than half of what either may have.
fn processes_of_another_run_do_not_count() {
    let (first, second) = (new_marker(), new_marker());
    // Without a user namespace the kernel counts all that one user has, those before the start apart.
    let room = if at_landlock() && !is_root() { 256 } else { 64 };
    std::thread::scope(|scope| {
        let runs = [&first, &second].map(|marker| {
            let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
            let act =
                format!("# {marker}\nWANTED = 40\n{FORKS}\nsys.stdout.flush()\nsys.stdin.read()");
            let mut hood = Hood::python(&act).limits(|l| l.pids = room);
            hood.with_group = false;
            hood.stdin = Some(read);
            (scope.spawn(|| hood.run()), write)
        });
        // All of both live at this moment; then each is told to end.
        wait_for_marked(&first, 41);
        wait_for_marked(&second, 41);
        for (run, write) in runs {
            drop(write);
            let ran = run.join().unwrap();
            unstopped(&ran);
            assert!(ran.said("made 40"), "{}", ran.all());
        }
    });
    // The control: as many within one run are too many.
    assert!(made(FORKS, 80, false).1);
}

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
    let mut hood = Hood::new(&["/bin/true"]).limits(|l| l.pids = 1024);
    let program = hood.workspace().join("orphans");
    crate::hood::compile(source, &program);
    hood.spec.program = sandbox::spec::InsidePath::new(&program);
    let ran = hood.run();
    unstopped(&ran);
    assert!(ran.said("all"), "{}", ran.all());
}

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
    let ran = Hood::python(act).limits(|l| l.open_files = 64).run();
    unstopped(&ran);
    assert!(
        ran.said("EMFILE 61") && ran.said("not raised"),
        "{}",
        ran.all()
    );
    let control = Hood::python(act).limits(|l| l.open_files = 1000).run();
    assert!(
        !control.stdout.contains("EMFILE") && !control.said("not raised"),
        "{}",
        control.all()
    );
}

// Disk.

pub const DISK: u64 = 64 * MIB;
/// What a watch may let through: a tenth of a second of all CPUs writing, on a machine that is busy with other things.
/// Generous, because what it must tell apart is a bound and none.
const OVERSHOOT: u64 = 1024 * MIB;

/// `put(fd, n)` writes so many MiB and prints a dot for each, by which the host counts them. `files(n)` goes through
/// new files of 16 MiB, for `n` MiB in all.
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

fn writing(act: &str, total_mib: u64, disk_bytes: u64) -> Ran {
    let hood = Hood::python(&format!(
        "{WRITES}\nTOTAL = {total_mib}\n{act}\nprint('wrote all', flush=True)\ntime.sleep(3 if TOTAL > 128 else 0)"
    ));
    let (ran, ()) = hood.limits(|l| l.disk_bytes = disk_bytes).run_then(scrub);
    ran
}

/// Far more than the limit is stopped; the same, with room for it, is not.
pub fn disk_limited(act: &str, total_mib: u64) {
    let _alone = alone();
    let ran = writing(act, total_mib, DISK);
    stopped(&ran, Stop::Disk);
    let written = ran.stdout.matches('.').count() as u64 * MIB;
    assert!(written <= DISK + OVERSHOOT, "{} MiB written", written / MIB);
    let control = writing(act, 96, 1024 * MIB);
    unstopped(&control);
    assert!(control.stdout.contains("wrote all"), "{}", control.all());
}

/// So that the directory can be removed by whoever owns it.
fn scrub(dir: &Path) {
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)).unwrap();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            scrub(&entry.path());
        }
    }
}

fn disk_of_one_file() {
    let act = "
fd = new('x')
try:
    for _ in range(TOTAL):
        os.write(fd, MIB)
except OSError as e:
    print(errno.errorcode[e.errno], flush=True)
try:
    os.pwrite(fd, b'x', 1 << 40)
except OSError as e:
    print('far out', errno.errorcode[e.errno], flush=True)
";
    let ran = writing(act, 512, DISK);
    // The kernel holds a single file to the limit exactly, so that there is nothing to stop.
    unstopped(&ran);
    assert!(ran.said("EFBIG"), "{}", ran.all());
    let at_most = DISK + MIB;
    assert!(ran.outcome.usage.disk_bytes <= at_most, "{}", ran.all());
    let control = writing(act, 96, 1024 * MIB);
    unstopped(&control);
    assert!(
        !control.said("EFBIG") && control.said("far out EFBIG"),
        "{}",
        control.all()
    );
}

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

/// PR_SET_DUMPABLE closes /proc/<pid> to whoever is not root.
fn disk_by_the_undumpable() {
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

/// So does executing a file that one may execute but not read.
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

/// As many descriptors as may be, in as many processes as it takes to make every look at them long.
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

/// A watch that takes its time over so many descriptors must not let the writer go on meanwhile.
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

/// Nor where that is the only way to see what it writes.
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

fn disk_by_the_leaderless() {
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

/// A thread may be made that shares everything but the table of descriptors.
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
        let mut hood = Hood::new(&["/bin/true", "96"]).without(without);
        let program = hood.workspace().join("writes");
        crate::hood::compile(source, &program);
        hood.spec.program = sandbox::spec::InsidePath::new(&program);
        hood.run()
    };
    // Its files would be in no process's list, so such a thread is not made: threads share descriptors.
    let ran = run(&[]);
    assert_eq!(ran.code(), Some(3), "{}", ran.all());
    let control = run(&[Layer::Seccomp]);
    assert!(control.said("wrote all"), "{}", control.all());
}

fn disk_by_unwaited_writers() {
    disk_limited(
        "
for name in files(TOTAL):
    unwaited(lambda: put(new(name), PART))
",
        512,
    );
}

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

/// What counts is what is there, not what was ever written.
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
    let ran = Hood::python(act).run();
    assert!(
        ran.said("fallocate refused") && ran.said("allocated True"),
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
    // A workspace in memory has its size: nothing outruns that, and the call is allowed.
    let mut hood = Hood::python(act).env("TMPDIR", ".");
    hood.spec.workspace_kind = WorkspaceKind::Memory;
    let ran = hood.run();
    assert!(
        ran.said("fallocate 0") && ran.said("allocated True"),
        "{}",
        ran.all()
    );
}

// Files.

pub fn files_limited(act: &str) {
    let _alone = alone();
    let run = |count: u64, most: u64| {
        let script = format!(
            "{WRITES}\nCOUNT = {count}\n{act}\nprint('made all', flush=True)\ntime.sleep(3 if COUNT > 500 else 0)"
        );
        Hood::python(&script)
            .limits(|l| l.files = most)
            .run_then(scrub)
            .0
    };
    stopped(&run(3000, 500), Stop::Files);
    let control = run(400, 1000);
    unstopped(&control);
    assert!(control.said("made all"), "{}", control.all());
    assert!(control.outcome.usage.files < 1000, "{}", control.all());
}

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

fn files_as_hard_links() {
    files_limited(
        "
os.close(new('one'))
for n in range(COUNT):
    os.link('one', f'link{n}')
",
    );
}

fn files_in_tmp() {
    files_limited(
        "
for n in range(COUNT):
    os.close(new(os.environ['TMPDIR'] + f'/{n}'))
",
    );
}

fn files_below_200_levels() {
    files_limited(
        "
down(200)
for n in range(COUNT):
    os.close(new(str(n)))
",
    );
}

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

fn in_memory(act: &str) -> Ran {
    let mut hood = Hood::python(&format!("{WRITES}\n{act}"))
        .limits(|l| (l.disk_bytes, l.files) = (16 * MIB, 200));
    hood.spec.workspace_kind = WorkspaceKind::Memory;
    let ran = hood.run();
    unstopped(&ran);
    ran
}

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
        ran.said("ENOSPC") && ran.said("room again"),
        "{}",
        ran.all()
    );
    assert!(ran.said("15 MiB") || ran.said("16 MiB"), "{}", ran.all());
    assert!(
        (8 * MIB..=16 * MIB).contains(&ran.outcome.usage.disk_bytes),
        "{}",
        ran.all()
    );
}

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
        ran.said("ENOSPC") && ran.said("enough") && ran.said("room again"),
        "{}",
        ran.all()
    );
}
