//! P10: a program that hides its usage from the watch, or gives the watch much to read, stays within its limits.
//!
//! Each of these trials was once a way past a limit.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use sandbox::outcome::Stop;
use testkit::trial;

use crate::confined_run::{ConfinedRun, HostResource, alone_with, unconfined};
use crate::p10_limits::{DISK, MIB, WRITES, disk_limited, files_limited, stopped, unstopped};
use crate::p11_deadline::{Fifo, new_marker, up_before_deadline, wait_for_marked};

/// In a directory with mode 400 the names can be read, and the files cannot be inspected.
const BEHIND_MODE_400: &str = "
os.makedirs('shut/in')
inside = os.open('shut/in', os.O_RDONLY | os.O_DIRECTORY)
os.chmod('shut', 0o400)
";

trial!(Everyone, disk_behind_mode_400);
fn disk_behind_mode_400() {
    disk_limited(
        &format!(
            "{BEHIND_MODE_400}
for name in files(TOTAL):
    fd = new(name, dir_fd=inside)
    put(fd, PART)
    os.close(fd)
"
        ),
        256,
    );
}

trial!(
    Everyone,
    disk_that_is_taken_and_given_back_between_two_seconds
);
/// Right after a measurement, children take disk space. The program frees the space before the next measurement, a
/// second later. Nobody waits for the children, so no counter shows their writes.
fn disk_that_is_taken_and_given_back_between_two_seconds() {
    let _alone = alone_with(HostResource::Disk);
    let run = |count: u64| {
        // Each file stays below the limit, because RLIMIT_FSIZE would refuse a larger one.
        let script = format!(
            "{WRITES}
def fill(name):
    fd = new(name)
    put(fd, {each})
time.sleep(1.1)
for n in range({count}): unwaited(lambda: fill(str(n)))
time.sleep(0.5)
for n in range({count}): os.unlink(str(n))
",
            each = DISK / MIB / 2
        );
        ConfinedRun::python(&script)
            .limits(|l| l.disk_bytes = DISK)
            .run()
    };
    stopped(&run(4), Stop::Disk);
    unstopped(&run(1));
}

trial!(
    Everyone,
    names_that_are_made_and_removed_between_two_seconds
);
/// Hard links take no bytes and no inodes, but each of them counts as a file.
fn names_that_are_made_and_removed_between_two_seconds() {
    let _alone = alone_with(HostResource::Disk);
    let run = |count: u64| {
        let script = format!(
            "{WRITES}
open('x', 'w').close()
time.sleep(1.1)
for n in range({count}): os.link('x', str(n))
time.sleep(0.7)
for n in range({count}): os.unlink(str(n))
"
        );
        ConfinedRun::python(&script).limits(|l| l.files = 500).run()
    };
    stopped(&run(3000), Stop::Files);
    unstopped(&run(300));
}

trial!(
    Everyone,
    deleted_files_are_not_charged_beside_an_unreadable_directory
);
/// The run is charged for the files that exist, and not for files that it has deleted.
fn deleted_files_are_not_charged_beside_an_unreadable_directory() {
    let _alone = alone_with(HostResource::Disk);
    let script = format!(
        "{WRITES}
os.mkdir('closed')
os.chmod('closed', 0)
for _ in range(3 * {DISK} // {MIB} // PART):
    fd = new('t')
    put(fd, PART)
    os.close(fd)
    os.unlink('t')
"
    );
    let confined = ConfinedRun::python(&script).limits(|l| l.disk_bytes = DISK);
    let (ran, _) = confined.run_then(|dir| {
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(dir.join("closed"), open).unwrap();
    });
    unstopped(&ran);
}

trial!(
    Everyone,
    bytes_that_other_processes_wrote_before_the_start_are_not_charged
);
/// If something cannot be measured, the watch charges the program with the growth of the whole file system since the program
/// started.
fn bytes_that_other_processes_wrote_before_the_start_are_not_charged() {
    const LARGE: u64 = 3 << 30;
    let _alone = alone_with(HostResource::Disk);
    let confined = || {
        ConfinedRun::sh("mkdir d; chmod 000 d; sleep 0.6; chmod 700 d; echo up")
            .limits(|l| l.disk_bytes = LARGE / 3)
    };
    let ran = confined().run();
    assert!(
        ran.printed("up") && ran.stop().is_none(),
        "the control: {}",
        ran.all()
    );
    let confined = confined();
    let beside = confined.workspace().parent().unwrap();
    let others = tempfile::tempfile_in(beside).unwrap();
    let theirs = others.try_clone().unwrap();
    let ran = confined.run_after(move || {
        let flags = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&theirs, flags, 0, LARGE).unwrap();
    });
    assert_eq!(others.metadata().unwrap().len(), LARGE);
    assert!(ran.printed("up") && ran.stop().is_none(), "{}", ran.all());
}

trial!(Everyone, the_peak_disk_use_includes_a_file_that_was_deleted);
fn the_peak_disk_use_includes_a_file_that_was_deleted() {
    let script = format!(
        "{WRITES}
fd = new('t')
put(fd, PART)
os.close(fd)
time.sleep(0.7)
os.unlink('t')
"
    );
    let ran = ConfinedRun::python(&script).run();
    unstopped(&ran);
    assert!(ran.outcome.usage.disk_bytes >= 16 * MIB, "{}", ran.all());
}

trial!(Everyone, files_behind_mode_400);
fn files_behind_mode_400() {
    files_limited(&format!(
        "{BEHIND_MODE_400}
for n in range(COUNT):
    os.close(new(str(n), dir_fd=inside))
"
    ));
}

/// Replaces every mapping of its own executable by a copy in memory, and prints so. The file is then neither among its
/// descriptors nor among its maps; only the running process keeps it. If the program cannot read its maps, it uses what the
/// loader knows of them.
const HOLDER: &str = r#"
#define _GNU_SOURCE
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
static int loaded(struct dl_phdr_info *info, size_t size, void *to) {
    unsigned long (*parts)[2] = to;
    int count = 0;
    for (int i = 0; i < info->dlpi_phnum && count < 16; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD) {
            unsigned long from = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            unsigned long to = (from + info->dlpi_phdr[i].p_filesz + 4095) & ~4095ul;
            parts[count][0] = from & ~4095ul;
            parts[count++][1] = to - (from & ~4095ul);
        }
    return count;
}
static int mapped(unsigned long (*parts)[2]) {
    static int asked;
    char line[5000];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    if (!maps) return asked++ ? 0 : dl_iterate_phdr(loaded, parts);
    while (fgets(line, sizeof line, maps))
        if (strstr(line, "/held-") && count < 16) {
            unsigned long from, to;
            sscanf(line, "%lx-%lx", &from, &to);
            parts[count][0] = from;
            parts[count++][1] = to - from;
        }
    fclose(maps);
    return count;
}
int main(void) {
    unsigned long parts[16][2];
    int before = mapped(parts);
    for (int i = 0; i < before; i++) {
        void *at = (void *)parts[i][0];
        unsigned long size = parts[i][1];
        char *copy = mmap(0, size, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memcpy(copy, at, size);
        mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, at);
    }
    write(1, before > 0 && mapped(parts) == 0 ? "h" : "v", 1);
    for (int fd = 0; fd < 3; fd++) close(fd);
    for (;;) pause();
}"#;

trial!(Everyone, disk_of_unlinked_programs_that_run);
fn disk_of_unlinked_programs_that_run() {
    let act = "
holder = open('holder', 'rb').read()
for n in range(TOTAL // PART):
    name = f'held-{n}'
    fd = new(name)
    os.write(fd, holder)
    put(fd, PART)
    os.fchmod(fd, 0o700)
    os.close(fd)
    said, says = os.pipe()
    if os.fork() == 0:
        os.dup2(says, 1)
        os.execv(name, [name])
    os.close(says)
    assert os.read(said, 1) == b'h'
    os.close(said)
    os.unlink(name)
print('held all', flush=True)
time.sleep(3 if TOTAL > 128 else 0)
";
    let run = |total_mib: u64, disk_bytes: u64| {
        let script = format!("{WRITES}\nTOTAL = {total_mib}\n{act}");
        let confined = ConfinedRun::python(&script).limits(|l| l.disk_bytes = disk_bytes);
        compile_static(HOLDER, &confined.workspace().join("holder"));
        confined.run()
    };
    stopped(&run(256, DISK), Stop::Disk);
    let control = run(96, 1024 * MIB);
    unstopped(&control);
    assert!(control.stdout.contains("held all"), "{}", control.all());
}

/// Compiles a statically linked program, because the mappings of a dynamic loader would stay.
fn compile_static(source: &str, program: &Path) {
    let mut gcc = Command::new("gcc")
        .args(["-O1", "-w", "-static", "-x", "c", "-", "-o"])
        .arg(program)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut to_gcc = gcc.stdin.take().unwrap();
    to_gcc.write_all(source.as_bytes()).unwrap();
    drop(to_gcc);
    assert!(gcc.wait().unwrap().success());
}

/// The most memory that init may use: without a cgroup no limit of the run covers it.
const INIT_AT_MOST: u64 = 128 * MIB;

trial!(Everyone, long_maps_do_not_fill_init);
/// Init reads the maps of a process. In this trial the maps are some hundred MiB of text, because /proc writes each
/// line break in a name as four characters.
fn long_maps_do_not_fill_init() {
    let marker = new_marker();
    let confined = ConfinedRun::python(&format!(
        "# {marker}
import time
ready, go = os.open('ready', os.O_RDWR), os.open('go', os.O_RDWR)
for _ in range(14):
    os.mkdir('\\n' * 250)
    os.chdir('\\n' * 250)
fd = os.open('f', os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 4096)
libc.mmap.restype = ctypes.c_void_p
for _ in range(24_000):
    # The same part of the file each time, so that no two become one.
    assert libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0)) != ctypes.c_void_p(-1).value
# Many looks of the watch.
time.sleep(1.5)
os.write(ready, b'r')
os.read(go, 1)
"
    ));
    let (ready, go) = (
        Fifo::make(confined.workspace(), "ready"),
        Fifo::make(confined.workspace(), "go"),
    );
    std::thread::scope(|scope| {
        let looker = scope.spawn(|| {
            ready.wait();
            let program = wait_for_marked(&marker, 1)[0];
            let init = status_of(program, "PPid:");
            let peak = status_of(init as i32, "VmHWM:") * 1024;
            let maps = length_of(&format!("/proc/{program}/maps"));
            go.ring();
            (peak, maps)
        });
        let ran = confined.run();
        let (peak, maps) = looker.join().unwrap();
        unstopped(&ran);
        assert!(peak > 0 && peak < INIT_AT_MOST, "{peak} bytes in init");
        // Control: the maps are longer than what init may use.
        assert!(maps > INIT_AT_MOST, "{maps} bytes of maps");
    });
}

fn status_of(pid: i32, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix(name)).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn length_of(path: &str) -> u64 {
    let (mut file, mut chunk, mut length) = (File::open(path).unwrap(), vec![0; 1 << 20], 0);
    loop {
        match file.read(&mut chunk).unwrap() {
            0 => return length,
            read => length += read as u64,
        }
    }
}

/// How many bytes one TCP connection holds in both directions when nobody reads, inside and on the host. The kernel counts them
/// for the whole host and for no process. `wanted` is the requested size of the buffers.
fn held_by_a_connection(wanted: u64) -> (u64, u64) {
    let fill = format!(
        "
server, client = socket.socket(), socket.socket()
if {wanted}:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {wanted})
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, {wanted})
server.bind(('127.0.0.1', 0))
server.listen(1)
client.connect(server.getsockname())
ends, total = (client, server.accept()[0]), 0
for end in ends:
    end.setblocking(False)
    try:
        while True:
            total += end.send(b'x' * 65536)
    except BlockingIOError:
        pass
print(total)
"
    );
    let ran = ConfinedRun::python(&fill).run();
    unstopped(&ran);
    let number = |printed: &str| printed.trim().parse().unwrap();
    (number(&ran.stdout), number(&unconfined(&fill)))
}

const CONNECTION_AT_MOST: u64 = 2 * MIB;

trial!(
    Everyone,
    a_tcp_connection_holds_bounded_memory,
    only_at_full = "there is no network to connect by"
);
/// The kernel chooses the size of the buffers. On a host they can grow to many MiB.
fn a_tcp_connection_holds_bounded_memory() {
    let (inside, host) = held_by_a_connection(0);
    assert!((1..CONNECTION_AT_MOST).contains(&inside), "{inside} inside");
    assert!(host > inside, "{host} on the host, {inside} inside");
}

trial!(
    Everyone,
    a_tcp_connection_with_large_requested_buffers_holds_bounded_memory,
    only_at_full = "there is no network to connect by"
);
/// The program requests the size of the buffers. The settings of net.core bound this size, and not those of TCP.
fn a_tcp_connection_with_large_requested_buffers_holds_bounded_memory() {
    let (inside, host) = held_by_a_connection(4 * MIB);
    assert!((1..CONNECTION_AT_MOST).contains(&inside), "{inside} inside");
    assert!(host >= inside, "{host} on the host, {inside} inside");
}

/// Runs an act under a memory limit that only the watch enforces.
fn memory_watched(act: &str, memory_bytes: u64) -> crate::confined_run::ConfinedResult {
    let mut confined = ConfinedRun::python(act).limits(|l| {
        (l.memory_bytes, l.open_files, l.pids) = (memory_bytes, 4096, 256);
    });
    confined.with_group = false;
    confined.run()
}

trial!(Everyone, unmapped_shared_memory_is_counted);
/// Shared pages that nobody maps any more stay in memory, and no process is charged for them.
fn unmapped_shared_memory_is_counted() {
    let act = "
import mmap, time
kept = mmap.mmap(-1, 192 << 20)
for at in range(0, len(kept), 4096): kept[at] = 1
kept.madvise(mmap.MADV_DONTNEED)
print('taken', flush=True)
time.sleep(1.5)
assert kept[0] == 1
";
    stopped(&memory_watched(act, 96 * MIB), Stop::Memory);
    let control = memory_watched(act, 1024 * MIB);
    unstopped(&control);
    assert!(
        control.printed("taken") && control.code() == Some(0),
        "{}",
        control.all()
    );
}

trial!(Everyone, memory_behind_many_descriptors);
/// The processes have more descriptors than the watch reads, and the memory file is among the last.
fn memory_behind_many_descriptors() {
    let act = "
import time
def fill():
    try:
        while True: os.dup(0)
    except OSError: pass
for _ in range(8):
    if os.fork() == 0:
        fill()
        time.sleep(20)
        os._exit(0)
time.sleep(1)
fd = os.memfd_create('x')
for _ in range(192): os.write(fd, b'x' * (1 << 20))
print('taken', flush=True)
time.sleep(1.5)
";
    stopped(&memory_watched(act, 96 * MIB), Stop::Memory);
    let control = memory_watched(act, 1024 * MIB);
    unstopped(&control);
    assert!(control.printed("taken"), "{}", control.all());
}

trial!(Everyone, memory_that_two_processes_share_is_counted_once);
/// Between vfork and exec two processes share one memory, as at every start of a program.
fn memory_that_two_processes_share_is_counted_once() {
    let act = "
import subprocess
kept = bytearray(96 << 20)
for at in range(0, len(kept), 4096): kept[at] = 1
for _ in range(400): subprocess.run(['/bin/true'], check=True, close_fds=False)
print('done')
";
    let ran = memory_watched(act, 160 * MIB);
    unstopped(&ran);
    assert!(ran.printed("done"), "{}", ran.all());
    // Control: if two processes have separate memories, the watch counts both.
    let two = "
import time
kept = bytearray(96 << 20)
child = os.fork()
for at in range(0, len(kept), 4096): kept[at] = 1
time.sleep(1.5)
";
    stopped(&memory_watched(two, 160 * MIB), Stop::Memory);
}

trial!(Everyone, a_chain_of_300_nested_processes_is_killed);
/// Each process is the child of the one before, so walking up from each one would take very long.
fn a_chain_of_300_nested_processes_is_killed() {
    let source = r#"
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
int main(void) {
    signal(SIGTERM, SIG_IGN);
    for (int i = 0; i < 300; i++) {
        pid_t child = fork();
        if (child < 0) return 1;
        if (child > 0) for (;;) pause();
    }
    puts("up");
    fflush(stdout);
    for (;;) pause();
}"#;
    let marker = new_marker();
    let ran = up_before_deadline(2000, |wall_ms| {
        let mut confined = ConfinedRun::new(&["/bin/true"])
            .limits(|l| (l.wall_ms, l.grace_ms, l.pids) = (wall_ms, 200, 512));
        confined.with_group = false;
        let line = confined.workspace().join("line");
        crate::confined_run::compile(source, &line);
        confined.command(&[&line, Path::new(&marker)]);
        confined.run()
    });
    assert_eq!(ran.stop(), Some(Stop::WallTime), "{}", ran.all());
    assert!(ran.outcome.all_dead, "{}", ran.all());
    assert_eq!(crate::p11_deadline::left_of(&marker), [0i32; 0]);
}
