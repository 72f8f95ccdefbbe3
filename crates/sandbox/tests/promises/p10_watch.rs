//! P10: a program that holds files or memory where the watch does not see them, or makes the watch wait, stays within its
//! limits.
//!
//! Each of these trials was once a way past a limit.

use std::io::Write;
use std::path::Path;

use sandbox::outcome::Stop;
use sandbox::spec::WorkspaceKind;
use testkit::trial;

use crate::confined_run::{
    ConfinedResult, ConfinedRun, HostResource, alone_with, attempts, compile, unconfined, verdict,
};
use crate::p10_limits::{DISK, MIB, WRITES, files_limited, stopped, undisturbed, unstopped};
use crate::p11_deadline::Fifo;

/// How much the watch may let through, as in `p10_limits.rs`.
const OVERSHOOT: u64 = 1024 * MIB;

/// `main` calls `attack()` first. `write_files(mib, held)` writes `mib` MiB in files of 16 MiB, prints a dot for each MiB, unlinks
/// each file and passes it to `held`.
const C_WRITES: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/wait.h>
#include <unistd.h>
static char mib[1 << 20];
static void write_files(int total, void (*held)(int)) {
    memset(mib, 'x', sizeof mib);
    for (int n = 0; n < total; n += 16) {
        char name[32];
        snprintf(name, sizeof name, "f%d", n);
        int fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
        if (fd < 0 || held && unlink(name) != 0) _exit(1);
        for (int m = 0; m < 16; m++) {
            if (write(fd, mib, sizeof mib) != sizeof mib) _exit(2);
            write(1, ".", 1);
        }
        if (held) held(fd);
        close(fd);
    }
}
static int full_pipe(void) {
    int ends[2];
    pipe2(ends, O_NONBLOCK);
    while (write(ends[1], mib, 4096) > 0) {}
    fcntl(ends[1], F_SETFL, 0);
    return ends[1];
}
static void *map_much(size_t bytes) {
    char *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    madvise(at, bytes, MADV_NOHUGEPAGE);
    /* Page tables for the one page of zeros: 2 MiB of them for each GiB. */
    if (at == MAP_FAILED || madvise(at, bytes, 22 /* MADV_POPULATE_READ */) != 0) _exit(3);
    return at;
}
static void map_many(int count) {
    for (int n = 0; n < count; n++)
        mmap(0, 4096, n % 2 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}
static void attack(char **argv);
int main(int argc, char **argv) {
    attack(argv);
    int total = atoi(argv[1]);
    printf("wrote all\n");
    fflush(stdout);
    sleep(total > 128 ? 3 : 0);
    _exit(0);
}
"#;

/// A blocked call holds a file while another thread closes the descriptor.
const HELD_BY_CALL: &str = r#"
static int pipe_end;
static volatile int taken;
static void *hold(void *fd) {
    taken = 1;
    sendfile(pipe_end, (int)(long)fd, 0, 1);
    return 0;
}
static void held_by_call(int fd) {
    pthread_t thread;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 64 << 10);
    taken = 0;
    if (pthread_create(&thread, &small, hold, (void *)(long)fd) != 0) _exit(4);
    while (!taken) usleep(100);
    /* The thread is now about to be in the call. */
    usleep(3000);
}
"#;

fn run_c(act: &str, total_mib: u64, change: impl FnOnce(&mut ConfinedRun)) -> ConfinedResult {
    let mut confined = ConfinedRun::new(&["/bin/true"]);
    let program = confined.workspace().join("attack");
    compile(&format!("{C_WRITES}{act}"), &program);
    confined.command(&[&program, Path::new(&total_mib.to_string())]);
    change(&mut confined);
    confined.run()
}

fn disk_limited(act: &str, total_mib: u64, change: impl Fn(&mut ConfinedRun)) {
    let _alone = alone_with(HostResource::Disk);
    let run = |total: u64, disk_bytes: u64| {
        run_c(act, total, |confined| {
            change(confined);
            confined.spec.limits.disk_bytes = disk_bytes;
        })
    };
    let ran = undisturbed(|| run(total_mib, DISK));
    stopped(&ran, Stop::Disk);
    let written = ran.stdout.matches('.').count() as u64 * MIB;
    assert!(written <= DISK + OVERSHOOT, "{} MiB written", written / MIB);
    let control = run(96, 1024 * MIB);
    unstopped(&control);
    assert!(control.stdout.contains("wrote all"), "{}", control.all());
}

trial!(Everyone, disk_held_by_blocked_calls);
fn disk_held_by_blocked_calls() {
    let act = format!(
        "{HELD_BY_CALL}
static void attack(char **argv) {{
    pipe_end = full_pipe();
    write_files(atoi(argv[1]), held_by_call);
}}"
    );
    disk_limited(&act, 2048, |_| {});
}

trial!(
    Everyone,
    growth_by_other_processes_does_not_stop_a_run_that_rewrites_files
);
/// The watch does not charge the run for growth of the file system that others cause, however much the run itself has
/// written.
fn growth_by_other_processes_does_not_stop_a_run_that_rewrites_files() {
    let _alone = alone_with(HostResource::Disk);
    let act = format!(
        "{WRITES}
import threading
go = os.open('go', os.O_RDWR)
# Threads share descriptors, so that each might hold what another has closed.
threading.Thread(target=threading.Event().wait, daemon=True).start()
def rewrite(times):
    for _ in range(times):
        os.lseek(fd, 0, 0)
        put(fd, 4)
        os.fdatasync(fd)
fd = new('x')
rewrite(80)
os.read(go, 1)
rewrite(20)
time.sleep(1.2)
print('\\ndone')
"
    );
    let confined = ConfinedRun::python(&act).limits(|l| l.disk_bytes = DISK);
    let go = Fifo::make(confined.workspace(), "go");
    let beside = confined.workspace().parent().unwrap();
    let mut others = tempfile::tempfile_in(beside).unwrap();
    let ran = std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..8 * DISK / MIB {
                others.write_all(&vec![1; MIB as usize]).unwrap();
            }
            go.ring();
        });
        confined.run()
    });
    unstopped(&ran);
    assert!(
        ran.printed("done") && ran.code() == Some(0),
        "{}",
        ran.all()
    );
}

trial!(Everyone, disk_while_the_watch_waits_for_a_memory_map);
/// All threads contend for the lock of the process's memory map. The watch needs the same lock to read the maps, and
/// takes it again for each of many mappings.
fn disk_while_the_watch_waits_for_a_memory_map() {
    let act = "
#define MUCH (4ul << 30)
static pthread_barrier_t all_made;
static void *change(void *at) {
    /* A thread's stack is a mapping: one that began at once would keep the next from being made. */
    pthread_barrier_wait(&all_made);
    for (;;) {
        mprotect(at, MUCH, PROT_NONE);
        mprotect(at, MUCH, PROT_READ);
    }
    return 0;
}
static void attack(char **argv) {
    int ready[2];
    pipe(ready);
    if (fork() == 0) {
        void *at = map_much(MUCH);
        pthread_t thread;
        map_many(1000);
        pthread_barrier_init(&all_made, 0, 65);
        for (int n = 0; n < 64; n++) pthread_create(&thread, 0, change, at);
        pthread_barrier_wait(&all_made);
        write(ready[1], \"r\", 1);
        pause();
    }
    read(ready[0], mib, 1);
    sleep(1);
    write_files(atoi(argv[1]), 0);
}";
    disk_limited(act, 3072, |confined| {
        confined.with_group = false;
        confined.spec.limits.memory_bytes = 2048 * MIB;
    });
}

trial!(Everyone, disk_while_the_watch_waits_for_execve);
/// While a process with many mappings is in execve, nobody can read its counters.
fn disk_while_the_watch_waits_for_execve() {
    let act = "
static void attack(char **argv) {
    if (argv[2]) {
        map_many(60000);
        execv(argv[0], argv);
        _exit(5);
    }
    for (int n = 0; n < 24; n++)
        if (fork() == 0) execv(argv[0], (char *[]){argv[0], \"0\", \"again\", 0});
    sleep(2);
    write_files(atoi(argv[1]), 0);
}";
    disk_limited(act, 3072, |confined| {
        confined.spec.limits.memory_bytes = 4096 * MIB;
    });
}

trial!(Everyone, files_unlinked_but_open);
fn files_unlinked_but_open() {
    files_limited(
        "
for n in range(COUNT):
    name = str(n)
    new(name)
    os.unlink(name)
    if n % 100 == 0: time.sleep(0.1)
",
    );
}

trial!(
    Everyone,
    names_that_sockets_keep,
    only_at_full = "no socket has a name"
);
/// A socket keeps the inode of its removed name. With such sockets a run once held 17,000 inodes under a limit of 3000.
fn names_that_sockets_keep() {
    files_limited(
        "
done, tell = os.pipe()
for _ in range(COUNT // 100):
    if os.fork() == 0:
        kept = []
        for _ in range(100):
            kept.append(socket.socket(socket.AF_UNIX))
            kept[-1].bind('s')
            os.unlink('s')
        os.write(tell, b'.')
        time.sleep(60)
        os._exit(0)
    os.read(done, 1)
    time.sleep(0.1)
",
    );
}

fn in_memory(act: &str, memory_bytes: u64) -> ConfinedResult {
    let mut confined = ConfinedRun::python(&format!("{WRITES}\n{act}"))
        .limits(|l| (l.disk_bytes, l.memory_bytes) = (1024 * MIB, memory_bytes));
    confined.spec.workspace_kind = WorkspaceKind::Memory;
    confined.with_group = false;
    confined.run()
}

trial!(
    Everyone,
    a_memory_workspace_counts_as_memory,
    only_at_full = "there is no workspace in memory"
);
fn a_memory_workspace_counts_as_memory() {
    let act = "
put(new('x'), 80)
kept = bytearray(60 << 20)
for at in range(0, len(kept), 4096): kept[at] = 1
print('\\ntaken', flush=True)
time.sleep(1.5)
";
    stopped(&in_memory(act, 112 * MIB), Stop::Memory);
    let control = in_memory(act, 512 * MIB);
    unstopped(&control);
    assert!(control.printed("taken"), "{}", control.all());
}

trial!(
    Everyone,
    a_memory_workspace_holds_no_more_than_memory,
    only_at_full = "there is no workspace in memory"
);
fn a_memory_workspace_holds_no_more_than_memory() {
    let act = "
try:
    put(new('x'), 256)
except OSError as e:
    print(errno.errorcode[e.errno])
";
    let ran = in_memory(act, 96 * MIB);
    let written = ran.stdout.matches('.').count();
    assert!(written <= 96, "{}", ran.all());
    let control = in_memory(act, 512 * MIB);
    unstopped(&control);
    assert_eq!(control.stdout.matches('.').count(), 256);
}

/// Runs an act under a memory limit that only the watch enforces.
fn memory_limited(run: impl Fn(u64) -> ConfinedResult, memory_bytes: u64) {
    stopped(&run(memory_bytes), Stop::Memory);
    let control = run(4096 * MIB);
    unstopped(&control);
    assert!(control.stdout.contains("wrote all"), "{}", control.all());
}

/// As [`memory_limited`], for an act in C that takes 768 MiB.
fn c_memory_limited(act: &str) {
    let run = |memory_bytes| {
        run_c(act, 768, |confined| {
            confined.with_group = false;
            confined.spec.limits.memory_bytes = memory_bytes;
        })
    };
    let _alone = alone_with(HostResource::Memory);
    memory_limited(run, 96 * MIB);
}

trial!(Everyone, memory_held_by_blocked_calls);
fn memory_held_by_blocked_calls() {
    let act = format!(
        "{HELD_BY_CALL}
static void attack(char **argv) {{
    pipe_end = full_pipe();
    memset(mib, 'x', sizeof mib);
    for (int n = 0; n < 768; n += 16) {{
        int fd = memfd_create(\"x\", 0);
        for (int m = 0; m < 16; m++) write(fd, mib, sizeof mib);
        held_by_call(fd);
        close(fd);
        usleep(30000);
    }}
}}"
    );
    c_memory_limited(&act);
}

trial!(Everyone, memory_files_in_flight);
fn memory_files_in_flight() {
    let act = format!(
        "{WRITES}
left, right = socket.socketpair()
for _ in range(24):
    fd = os.memfd_create('x')
    put(fd, PART)
    socket.send_fds(left, [b'x'], [fd])
    os.close(fd)
print('wrote all', flush=True)
time.sleep(1.5)
"
    );
    let run = |memory_bytes| {
        let mut confined = ConfinedRun::python(&act).limits(|l| l.memory_bytes = memory_bytes);
        confined.with_group = false;
        confined.run()
    };
    let _alone = alone_with(HostResource::Memory);
    memory_limited(run, 96 * MIB);
}

/// Runs an act that makes 768 MiB of memory files of 16 MiB each. `held` defines `begin`, which gets each new file, and
/// `hold`, which gets each full file and keeps it in some way.
fn memory_files_limited(held: &str) {
    let act = format!(
        "{held}
static void attack(char **argv) {{
    if (strcmp(argv[1], \"child\") == 0) for (;;) pause();
    memset(mib, 'x', sizeof mib);
    for (int n = 0; n < 768; n += 16) {{
        int fd = memfd_create(\"x\", MFD_CLOEXEC);
        begin(fd, argv[0]);
        for (int m = 0; m < 16; m++) write(fd, mib, sizeof mib);
        hold(fd);
        usleep(30000);
    }}
}}"
    );
    c_memory_limited(&act);
}

trial!(Everyone, memory_files_mapped_in_part);
/// One mapped page keeps the whole file. With such pages a run once held 800 MB under a limit of 128 MB.
fn memory_files_mapped_in_part() {
    memory_files_limited(
        "
static void begin(int fd, char *own) {}
static void hold(int fd) {
    if (mmap(0, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED) _exit(3);
    close(fd);
}",
    );
}

trial!(Everyone, memory_files_that_are_running_programs);
/// A process keeps the whole file of its executable, even the part that it does not map.
fn memory_files_that_are_running_programs() {
    memory_files_limited(
        r#"
static void begin(int fd, char *own) {
    int from = open(own, O_RDONLY);
    char part[65536];
    ssize_t length;
    while ((length = read(from, part, sizeof part)) > 0) write(fd, part, length);
    close(from);
}
static void hold(int fd) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int program = open(path, O_RDONLY | O_CLOEXEC);
    if (program < 0) _exit(4);
    close(fd);
    if (fork() == 0) {
        char *argv[] = {"x", "child", 0};
        execveat(program, "", argv, argv + 2, AT_EMPTY_PATH);
        _exit(5);
    }
    close(program);
}"#,
    );
}

/// Fills the slots of pipes. Each slot keeps one byte of a file, and with it a whole large folio in memory, although
/// the file is truncated again.
const PIN: &str = r#"
static void pin(int folios) {
    size_t size = 2 << 20;
    char *bytes = malloc(size);
    memset(bytes, 1, size);
    int ends[2];
    for (int n = 0; n < folios; n++) {
        if (n % 16 == 0 && pipe(ends) != 0) _exit(3);
        int fd = open("x", O_RDWR | O_CREAT | O_TRUNC, 0600);
        off_t from = 0;
        if (write(fd, bytes, size) != size || sendfile(ends[1], fd, &from, 1) != 1) _exit(4);
        if (ftruncate(fd, 0) != 0) _exit(5);
        close(fd);
    }
    free(bytes);
}
"#;

trial!(Everyone, memory_held_by_pipes);
fn memory_held_by_pipes() {
    let _alone = alone_with(HostResource::Memory);
    let act = format!("{PIN}static void attack(char **argv) {{ pin(atoi(argv[1]) / 2); }}");
    let run = |memory_bytes| {
        run_c(&act, 768, |confined| {
            confined.with_group = false;
            confined.spec.limits.memory_bytes = memory_bytes;
        })
    };
    if !keeps_large_folios() {
        eprintln!("UNAVAILABLE: files here are kept in memory page by page");
        return;
    }
    memory_limited(run, 256 * MIB);
}

/// Whether the file system of the workspaces uses large folios, so that one byte in a pipe keeps much memory.
fn keeps_large_folios() -> bool {
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let program = dir.path().join("pins");
    let act = r#"
static long unaccounted(void) {
    char line[200], name[64];
    long rest = 0, value;
    FILE *info = fopen("/proc/meminfo", "r");
    while (fgets(line, sizeof line, info))
        if (sscanf(line, "%63s %ld", name, &value) == 2) {
            if (!strcmp(name, "MemTotal:")) rest += value;
            else if (strstr("MemFree: Buffers: Cached: SwapCached: AnonPages: Slab: KernelStack: PageTables: Percpu:", name)) rest -= value;
        }
    fclose(info);
    return rest >> 10;
}
static void attack(char **argv) {
    long before = unaccounted();
    pin(64);
    printf("%ld\n", unaccounted() - before);
    fflush(stdout);
    _exit(0);
}"#;
    compile(&format!("{C_WRITES}{PIN}{act}"), &program);
    let grown = || -> i64 {
        let mut command = std::process::Command::new(&program);
        let output = command.arg("0").current_dir(dir.path()).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout);
        printed.trim().parse().unwrap()
    };
    // Other processes take and free such memory at the same time, so one of several measurements is enough.
    (0..5).any(|_| grown() > 64)
}

trial!(Everyone, descriptors_of_a_threads_own_are_refused);
/// A thread with its own descriptor table holds files that /proc/<pid>/fd does not list. With such a thread a run once
/// held 300 MB under a limit of 64 MB.
fn descriptors_of_a_threads_own_are_refused() {
    let act = "
import threading
said = []
def unshare():
    # close_range(UINT_MAX, UINT_MAX, CLOSE_RANGE_UNSHARE)
    try: said.append(sc(436, 2**32 - 1, 2**32 - 1, 2))
    except OSError as e: said.append(e)
thread = threading.Thread(target=unshare); thread.start(); thread.join()
if isinstance(said[0], OSError): raise said[0]
";
    let script = attempts("", &[("close_range", act)]);
    let ran = ConfinedRun::python(&script).run();
    assert_eq!(verdict(&ran.stdout, "close_range"), "refused EINVAL");
    assert_eq!(verdict(&unconfined(&script), "close_range"), "done");
}

trial!(Everyone, a_working_directory_of_a_threads_own_is_refused);
/// A removed directory that had many names keeps its size. With twenty threads, each in such a directory, a run once
/// held 54 MB under a limit of 8 MB.
fn a_working_directory_of_a_threads_own_is_refused() {
    const SOURCE: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <unistd.h>
static char stack[65536] __attribute__((aligned(16)));
static int body(void *unused) { for (;;) pause(); }
int main(void) {
    int flags = CLONE_VM | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;
    int thread = clone(body, stack + sizeof stack, flags, 0);
    printf("%s\n", thread > 0 ? "done" : errno == EPERM ? "refused" : "failed");
    fflush(stdout);
    _exit(0);
}
"#;
    let mut confined = ConfinedRun::new(&["/bin/true"]);
    let program = confined.workspace().join("attack");
    compile(SOURCE, &program);
    let control = std::process::Command::new(&program).output().unwrap();
    confined.command(&[&program]);
    assert_eq!(confined.run().stdout.trim(), "refused");
    assert_eq!(control.stdout, b"done\n");
}

trial!(Everyone, files_held_by_landlock_rules_are_refused);
/// A Landlock rule keeps its file after the last name and descriptor are gone. With such rules a run once held 1 GB
/// under a limit of 64 MB.
fn files_held_by_landlock_rules_are_refused() {
    let act = "
handled = struct.pack('Q', 1 << 2)
ruleset = sc(444, handled, len(handled), 0)
held = os.open('.', os.O_RDONLY | os.O_CLOEXEC)
sc(445, ruleset, 1, struct.pack('=Qi', 1 << 2, held), 0)
";
    let script = attempts("", &[("rule", act)]);
    let ran = ConfinedRun::python(&script).run();
    assert_eq!(verdict(&ran.stdout, "rule"), "refused ENOSYS");
    assert_eq!(verdict(&unconfined(&script), "rule"), "done");
}

trial!(Everyone, vmsplice_is_refused);
fn vmsplice_is_refused() {
    let act = "
import mmap
class Piece(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]
reader, writer = os.pipe()
kept = ctypes.create_string_buffer(4096)
piece = Piece(ctypes.addressof(kept), 4096)
sc({'x86_64': 278, 'aarch64': 75}[os.uname().machine], writer, ctypes.byref(piece), 1, 0)
";
    let script = attempts("", &[("vmsplice", act)]);
    let ran = ConfinedRun::python(&script).run();
    assert_eq!(verdict(&ran.stdout, "vmsplice"), "refused ENOSYS");
    assert_eq!(verdict(&unconfined(&script), "vmsplice"), "done");
}
