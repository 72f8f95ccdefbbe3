//! P10, P7: memory that the kernel holds for a program is charged to the program's cgroup, bounded in another way, or
//! refused. The same holds for the tables that the whole host has one of.

use sandbox::outcome::Stop;
use testkit::trial;

use crate::confined_run::{ConfinedRun, unconfined};

/// Prints what became of each attempt, as `name: done` or `name: ERRNO`.
const TRY: &str = "
def attempt(name, act):
    try: act(); print(f'{name}: done')
    except OSError as e: print(f'{name}: {errno.errorcode[e.errno]}')
def call(result):
    if result in (-1, 0xffffffffffffffff): raise OSError(ctypes.get_errno(), '')
    return result
";

fn tried(script: &str) -> crate::confined_run::ConfinedResult {
    let ran = ConfinedRun::python(&format!("{TRY}{script}")).run();
    assert_eq!(ran.code(), Some(0), "{}", ran.all());
    ran
}

trial!(
    Everyone,
    netlink_sockets_are_few_and_small,
    only_at_full = "there are none: landlock_level::sockets"
);
/// Unread answers wait in buffers that no cgroup is charged for, so a run may have few netlink sockets. The bound
/// counts the sockets of all processes, and those whose descriptors are in flight. A closed socket makes room for a new
/// one.
fn netlink_sockets_are_few_and_small() {
    let ran = tried(
        r#"
import time
def some():
    held = []
    try:
        while len(held) < 600: held.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
    except OSError as e: assert e.errno == errno.ENOBUFS, e
    return held
first = some()
size = first[0].getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
try: first[0].send(b'\0' * 100_000); large = 'sent'
except OSError as e: large = errno.errorcode[e.errno]
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, str(len(some())).encode()); os._exit(0)
os.wait()
elsewhere = int(os.read(reader, 10))
left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
count = len(first)
for s in first: socket.send_fds(left, [b'x'], [s.fileno()]); s.close()
in_flight = len(some())
for _ in range(count):
    for fd in socket.recv_fds(right, 1, 1)[1]: os.close(fd)
# The kernel frees a closed socket after a grace period of RCU.
again, give_up = some(), time.monotonic() + 20
while len(again) < count and time.monotonic() < give_up: again += some()
again = len(again)
print(f'{count} {elsewhere} {in_flight} {again} {size} {large}')
"#,
    );
    assert_eq!(
        ran.stdout.trim(),
        "32 0 0 32 32768 EMSGSIZE",
        "{}",
        ran.all()
    );
    // Control: a program on the host can have more.
    unconfined("held = [socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) for _ in range(100)]");
}

trial!(
    Everyone,
    interfaces_can_be_listed,
    only_at_full = "netlink is refused, as the table of the level says"
);
fn interfaces_can_be_listed() {
    let ran = tried(
        r#"
print(socket.if_nameindex()[0][1])
class Ifaddrs(ctypes.Structure): pass
Ifaddrs._fields_ = [('next', ctypes.POINTER(Ifaddrs)), ('name', ctypes.c_char_p)]
head = ctypes.POINTER(Ifaddrs)()
call(libc.getifaddrs(ctypes.byref(head)))
print('getifaddrs', head.contents.name.decode())
print(socket.getaddrinfo('localhost', 80, flags=socket.AI_ADDRCONFIG)[0][4][1])
s = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, 0)
print('close on exec', not os.get_inheritable(s.fileno()), 'blocking', os.get_blocking(s.fileno()))
"#,
    );
    let expected = "lo\ngetifaddrs lo\n80\nclose on exec True blocking False\n";
    assert_eq!(ran.stdout, expected, "{}", ran.all());
}

trial!(
    Everyone,
    connections_nobody_accepts,
    only_at_full = "there are no internet sockets"
);
/// The kernel charges a connection to a cgroup only when it is accepted, so the number of TCP sockets is bounded. With
/// a memory limit of 64 MiB a run may have 1024 of them, accepted or not.
fn connections_nobody_accepts() {
    const SOCKETS: u64 = 1024;
    // Calls that the broker serves at the same time may together exceed the bound by this many sockets.
    const MARGIN: u64 = 64;
    let script = "
made = 0
try:
    while made < 3000:
        listener = socket.create_server(('127.0.0.1', 0), backlog=400)
        address = listener.getsockname(); listener.detach()
        for _ in range(200):
            with socket.socket() as s: s.connect(address); s.send(bytes(1000))
            made += 1
except OSError as e: print(errno.errorcode[e.errno])
print('connections', made)
";
    let ran = ConfinedRun::python(script)
        .limits(|l| l.memory_bytes = 64 << 20)
        .run();
    assert!(ran.printed("ENOBUFS"), "{}", ran.all());
    let made = ran
        .stdout
        .lines()
        .find_map(|l| l.strip_prefix("connections "));
    let made: u64 = made.unwrap().parse().unwrap();
    // The kernel also counts the closed end of each connection for a while.
    let expected = SOCKETS / 2 - MARGIN..SOCKETS + MARGIN;
    assert!(expected.contains(&made), "{}", ran.all());
}

trial!(Everyone, huge_pages);
/// The program cannot take huge pages from the host's reserved pool. The mappings use MAP_NORESERVE, because without
/// this flag a host that reserves no huge pages refuses them too.
fn huge_pages() {
    let script = r#"
libc.mmap.restype = ctypes.c_ulong
mmap = lambda flags: call(libc.mmap(None, ctypes.c_size_t(2 << 20), 3, 0x4022 | flags, -1, ctypes.c_long(0)))
attempt('ordinary', lambda: mmap(0))
attempt('mmap', lambda: mmap(0x40000))
attempt('memfd', lambda: os.memfd_create('x', os.MFD_HUGETLB))
attempt('ordinary memfd', lambda: os.memfd_create('x'))
"#;
    let outside = unconfined(&format!("{TRY}{script}"));
    for line in ["mmap: done", "memfd: done"] {
        assert!(outside.contains(line), "the control: {outside}");
    }
    let ran = tried(script);
    for line in [
        "ordinary: done",
        "mmap: ENOMEM",
        "memfd: EINVAL",
        "ordinary memfd: done",
    ] {
        assert!(ran.printed(line), "{line}: {}", ran.all());
    }
}

trial!(Everyone, memory_policies);
/// The kernel keeps a policy for each range of a memory file and charges it to nobody, so mbind is refused. A thread
/// may still set its own policy.
fn memory_policies() {
    let ran = tried(
        r#"
import mmap
fd = os.memfd_create('x'); os.ftruncate(fd, 1 << 20)
mapped = mmap.mmap(fd, 1 << 20)
at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
mask = ctypes.c_ulong(1)
attempt('mbind', lambda: call(libc.syscall(237, ctypes.c_void_p(at), 4096, 2, ctypes.byref(mask), 64, 0)))
attempt('set_mempolicy', lambda: call(libc.syscall(238, 3, ctypes.byref(mask), 64)))
"#,
    );
    assert!(ran.printed("mbind: EPERM"), "{}", ran.all());
    assert!(ran.printed("set_mempolicy: done"), "{}", ran.all());
}

trial!(
    Everyone,
    queues_outside_the_limit,
    only_at_full = "there are no internet sockets"
);
/// A socket's two buffers are charged. These calls would make a socket keep more: half a datagram, keys, memberships or
/// notices.
fn queues_outside_the_limit() {
    let script = r#"
MORE, FASTOPEN = 0x8000, 0x20000000
udp = lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
tcp = lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)
there = ('127.0.0.1', 9)
attempt('whole', lambda: udp().sendto(b'x', there))
attempt('half', lambda: udp().sendto(b'x', MORE, there))
attempt('half by sendmsg', lambda: udp().sendmsg([b'x'], [], MORE, there))
attempt('half by cork', lambda: udp().setsockopt(17, 1, 1))
out, into = os.pipe(); os.write(into, b'xy')
def splice(flags):
    s = udp(); s.connect(there); call(libc.splice(out, None, s.fileno(), None, 1, flags))
attempt('whole by splice', lambda: splice(0))
attempt('half by splice', lambda: splice(4))
attempt('fast open', lambda: tcp().sendto(b'x', FASTOPEN, there))
attempt('notices', lambda: udp().setsockopt(socket.SOL_SOCKET, 37, 2 | 16 | 128))
attempt('copies', lambda: udp().setsockopt(socket.SOL_SOCKET, 60, 1))
attempt('signatures', lambda: tcp().setsockopt(6, 14, b'\2\0' + b'\0' * 126 + b'\0\0\4\0' + b'\0' * 4 + b'key!' + b'\0' * 76))
group = socket.inet_aton('224.1.2.3') + socket.inet_aton('127.0.0.1')
attempt('membership', lambda: udp().setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group))
six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
group = socket.inet_pton(socket.AF_INET6, 'ff01::4711') + b'\1\0\0\0'
attempt('fragments', lambda: six.setsockopt(41, 24, 1280))
attempt('membership 6', lambda: six.setsockopt(41, 20, group))
attempt('reuse', lambda: tcp().setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1))
errors = udp(); errors.setsockopt(socket.IPPROTO_IP, 11, 1)
print('errors kept:', errors.getsockopt(socket.IPPROTO_IP, 11))
"#;
    let outside = unconfined(&format!("{TRY}{script}"));
    for line in [
        "half: done",
        "half by cork: done",
        "half by splice: done",
        "fragments: done",
        "membership 6: done",
        "errors kept: 1",
    ] {
        assert!(outside.contains(line), "the control: {outside}");
    }
    let ran = tried(script);
    for line in [
        "whole: done",
        "half: ENOTSUP",
        "half by sendmsg: ENOTSUP",
        "half by cork: ENOPROTOOPT",
        "whole by splice: done",
        "half by splice: EINVAL",
        "fragments: ENOPROTOOPT",
        "fast open: ENOTSUP",
        "notices: ENOPROTOOPT",
        "copies: ENOTSUP",
        "signatures: ENOPROTOOPT",
        "membership: ENODEV",
        "membership 6: ENODEV",
        "reuse: done",
        "errors kept: 0",
    ] {
        assert!(ran.printed(line), "{line}: {}", ran.all());
    }
}

trial!(Everyone, filters_of_its_own);
/// The kernel compiles each filter, and the whole host has one bound on the memory for compiled filters.
fn filters_of_its_own() {
    let script = r#"
class Fprog(ctypes.Structure): _fields_ = [('len', ctypes.c_ushort), ('at', ctypes.c_char_p)]
allow = Fprog(1, b'\x06\0\0\0\0\0\xff\x7f')
attempt('prctl', lambda: call(libc.prctl(22, 2, ctypes.byref(allow), 0, 0)))
attempt('seccomp', lambda: call(libc.syscall(317, 1, 0, ctypes.byref(allow))))
"#;
    let outside = unconfined(&format!("{TRY}libc.prctl(38, 1, 0, 0, 0)\n{script}"));
    assert_eq!(outside, "prctl: done\nseccomp: done\n", "the control");
    let ran = tried(script);
    for line in ["prctl: EINVAL", "seccomp: EINVAL"] {
        assert!(ran.printed(line), "{line}: {}", ran.all());
    }
}

trial!(Root, kernel_memory_stays_within_the_limit);
/// Eight processes each make as many objects of one kind as they can, under a limit of 64 MiB. Either the memory is
/// charged, and the run meets its limit, or the kernel's own memory has hardly grown. The bound leaves room for the
/// host's other work.
fn kernel_memory_stays_within_the_limit() {
    const GROWTH_MAX_MIB: i64 = 256;
    let kinds = [
        (
            "netlink",
            "
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0); keep.append(s)
try:
    for size in [8000] * 64: s.send(struct.pack('IHHII', size, 9999, 5, 0, 0) + bytes(size - 16))
except BlockingIOError: pass
except OSError as e:
    if e.errno != errno.ENOBUFS: raise
",
        ),
        (
            "mbind",
            "
fd = os.memfd_create('x'); keep.append(fd); os.ftruncate(fd, 16 << 20)
m = mmap.mmap(fd, 16 << 20); at = ctypes.addressof(ctypes.c_char.from_buffer(m)); keep.append(m)
mask = ctypes.c_ulong(1)
for page in range(0, 4096, 2):
    if libc.syscall(237, ctypes.c_void_p(at + page * 4096), 4096, 2 + len(keep) // 2 % 2, ctypes.byref(mask), 64, 0): raise OSError
",
        ),
        (
            "datagrams",
            "
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK); keep.append(s)
s.sendto(bytes(60000), 0x8000, ('127.0.0.1', 9))
",
        ),
        (
            "sockets",
            "
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK); keep.extend([a, b])
try:
    while True: a.send(bytes(4096))
except BlockingIOError: pass
",
        ),
        (
            "pipes",
            "
r, w = os.pipe2(os.O_NONBLOCK); keep.extend([r, w])
try:
    while True: os.write(w, bytes(4096))
except BlockingIOError: pass
",
        ),
    ];
    for (kind, one) in kinds {
        let one = one.trim().replace('\n', "\n        ");
        let script = format!(
            r#"
import mmap, signal, struct, time
def kernels_own():
    fields = dict(line.split(':') for line in open('/proc/meminfo'))
    total, *others = (int(fields[name].split()[0]) for name in
        ('MemTotal', 'MemFree', 'Buffers', 'Cached', 'SwapCached', 'AnonPages', 'SReclaimable'))
    return (total - sum(others)) // 1024
before = kernels_own()
deadline = time.monotonic() + 8
keep = []
def fill():
    while time.monotonic() < deadline and kernels_own() - before < 600:
        {one}
reader, writer = os.pipe()
children = []
for _ in range(8):
    children.append(os.fork())
    if children[-1] == 0:
        try: fill()
        except OSError: pass
        os.write(writer, b'x'); signal.pause()
for _ in children: os.read(reader, 1)
print('grown by', kernels_own() - before)
for child in children: os.kill(child, signal.SIGKILL)
"#
        );
        let mut confined = ConfinedRun::python(&script).limits(|l| {
            l.memory_bytes = 64 << 20;
            l.open_files = 1024;
        });
        confined.spec.limits.wall_ms = 40_000;
        let ran = confined.run();
        let charged = ran.outcome.usage.oom_kills > 0 || ran.stop() == Some(Stop::Memory);
        let grown = ran
            .stdout
            .lines()
            .find_map(|l| l.strip_prefix("grown by ")?.parse::<i64>().ok());
        let held = charged || grown.is_some_and(|mib| mib < GROWTH_MAX_MIB);
        assert!(held, "{kind}: {}", ran.all());
    }
}
