//! P10: no run uses up a table of the kernel that the whole host shares.
//!
//! The bounds of these trials are small, so that no trial comes near to what this host has. `tests/vm/host_tables.py` uses up
//! the tables of a virtual machine.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use sandbox::outcome::Stop;
use testkit::trial;

use crate::confined_run::{ConfinedResult, ConfinedRun, HostResource, alone_with};
use crate::p10_limits::{stopped, unstopped};
use crate::p11_deadline::{new_marker, wait_for_marked};

/// The run's share. Other processes are unlikely to open as many files on this host during a trial.
const SHARE: u64 = 10_000;

/// `hold(n)` keeps `n` files open through mappings alone, without descriptors.
const MAPPINGS: &str = "
libc.mmap.restype = ctypes.c_void_p
def hold(count):
    PAGE, PROT_READ, MAP_PRIVATE = ctypes.c_size_t(4096), 1, 2
    for n in range(count):
        fd = os.open(sys.executable, os.O_RDONLY)
        at = libc.mmap(None, PAGE, PROT_READ, MAP_PRIVATE, fd, ctypes.c_long(0))
        assert at != ctypes.c_void_p(-1).value
        os.close(fd)
";

fn run(act: &str, of_run: Option<u64>) -> ConfinedResult {
    let act = format!("import signal, time\n{act}\ntime.sleep(2)\nprint('all open')");
    let confined = ConfinedRun::python(&act).limits(|l| {
        (l.open_files, l.open_files_of_run) = (4096, of_run);
    });
    confined.run()
}

fn goes_on(ran: &ConfinedResult) {
    unstopped(ran);
    assert!(ran.printed("all open"), "{}", ran.all());
}

trial!(Everyone, open_files_of_all_processes);
/// Each process has fewer open files than its own limit and than the run's share. Together they have more than the
/// share.
fn open_files_of_all_processes() {
    let _alone = alone_with(HostResource::OpenFiles);
    let act = "
def open_files():
    for n in range(2000): os.open('/dev/null', os.O_RDONLY)
reader, writer = os.pipe()
open_files()
for _ in range(8):
    if os.fork() == 0:
        if EACH: open_files()
        os.write(writer, b'x')
        signal.pause()
for _ in range(8): os.read(reader, 1)
";
    let with = |each: &str| format!("EACH = {each}\n{act}");
    stopped(&run(&with("True"), Some(SHARE)), Stop::OpenFiles);
    goes_on(&run(&with("True"), None));
    goes_on(&run(&with("True"), Some(10 * SHARE)));
    // Control: the processes have many descriptors of few open files, which they share.
    goes_on(&run(&with("False"), Some(SHARE)));
}

trial!(Everyone, open_files_that_only_mappings_hold);
/// The limit also holds for a process whose descriptors and maps the watch cannot read.
fn open_files_that_only_mappings_hold() {
    let _alone = alone_with(HostResource::OpenFiles);
    let act = |hide: &str| format!("{MAPPINGS}\n{hide}\nhold(16000)");
    let hidden = act("PR_SET_DUMPABLE = 4; libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)");
    stopped(&run(&act(""), Some(SHARE)), Stop::OpenFiles);
    stopped(&run(&hidden, Some(SHARE)), Stop::OpenFiles);
    goes_on(&run(&act(""), None));
    goes_on(&run(&hidden, Some(10 * SHARE)));
}

trial!(Everyone, open_files_of_others_stop_nobody);
/// Another process opens more than the run's share while the run has few.
fn open_files_of_others_stop_nobody() {
    let _alone = alone_with(HostResource::OpenFiles);
    let marker = new_marker();
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let act =
        format!("# {marker}\nimport time\nsys.stdin.read()\ntime.sleep(1)\nprint('all open')");
    let mut confined = ConfinedRun::python(&act).limits(|l| l.open_files_of_run = Some(SHARE));
    confined.stdin = Some(read);
    let neighbour = format!(
        "import ctypes, os, sys\nlibc = ctypes.CDLL(None)\n{MAPPINGS}\nhold(16000)\nprint('open', flush=True)\nsys.stdin.read()"
    );
    std::thread::scope(|scope| {
        let ran = scope.spawn(|| confined.run());
        wait_for_marked(&marker, 1);
        let mut other = Command::new("/usr/bin/python3")
            .args(["-I", "-c", &neighbour])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut said = BufReader::new(other.stdout.take().unwrap());
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "open\n");
        drop(write);
        let ran = ran.join().unwrap();
        drop(other.stdin.take());
        assert!(other.wait().unwrap().success());
        goes_on(&ran);
    });
}

trial!(
    Everyone,
    memory_for_tcp,
    only_at_full = "there are no TCP sockets"
);
/// A run gets as many TCP sockets as fit into its share of the host's memory for TCP when all their buffers are full.
fn memory_for_tcp() {
    let act = "
listener = socket.create_server(('127.0.0.1', 0), backlog=8)
held = []
try:
    while len(held) < 400:
        held.append(socket.create_connection(listener.getsockname()))
        held.append(listener.accept()[0])
except OSError as e: print(errno.errorcode[e.errno])
print('sockets', len(held))
with open('/proc/sys/net/ipv4/tcp_rmem') as file: print('buffer', file.read().split()[2])
";
    let run = |tcp_bytes| {
        ConfinedRun::python(act)
            .limits(|l| l.tcp_bytes = tcp_bytes)
            .run()
    };
    const SOCKETS: u64 = 128;
    const BUFFER_BYTES: u64 = 128 << 10;
    let ran = run(SOCKETS * 2 * BUFFER_BYTES);
    unstopped(&ran);
    assert!(ran.printed("ENOBUFS"), "{}", ran.all());
    assert!(
        ran.printed(&format!("buffer {BUFFER_BYTES}")),
        "{}",
        ran.all()
    );
    let count = ran.stdout.lines().find_map(|l| l.strip_prefix("sockets "));
    let count: u64 = count.unwrap().parse().unwrap();
    // The listener counts as one socket. The broker may see one socket fewer while it serves another call.
    assert!((SOCKETS - 4..=SOCKETS).contains(&count), "{count}");
    let control = run(u64::MAX);
    assert!(control.printed("sockets 400"), "{}", control.all());
}
