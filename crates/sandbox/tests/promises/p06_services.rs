//! P6: the analysis cannot reach PostgreSQL or any other service of the host, by any kind of address, an
//! inherited descriptor, or a credential that it finds. The processes of one analysis reach each other.

use std::io::Read;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use sandbox::supervise::Control;
use testkit::postgres::PrivatePostgres;
use testkit::{inner_arguments, is_root, trial};

use crate::confined_run::{
    ConfinedRun, at_landlock, attempts, compile, shown_dir, unconfined, verdict,
};

fn unique(what: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!(
        "fumehood-{what}-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}

/// A PostgreSQL server of the host that listens on TCP, on a path and on an abstract name.
struct HostPostgres {
    _server: PrivatePostgres,
    port: u16,
}

impl HostPostgres {
    fn start(dir: &Path, abstract_name: &str) -> HostPostgres {
        let probe = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = probe.local_addr().unwrap().port();
        drop(probe);
        let listen = format!(
            "-p {port} -c listen_addresses=127.0.0.1 -k {},@{abstract_name}",
            dir.display()
        );
        let server = PrivatePostgres::start_in(dir.to_path_buf(), &listen);
        HostPostgres {
            _server: server.expect("PostgreSQL must be installed"),
            port,
        }
    }
}

/// Each act sends a startup packet and expects the server's answer "R", which asks for authentication or grants it.
const POSTGRES_ACTS: &[(&str, &str)] = &[
    ("tcp", "speak(socket.AF_INET, ('127.0.0.1', PORT))"),
    ("path", "speak(socket.AF_UNIX, DIR + '/.s.PGSQL.%d' % PORT)"),
    (
        "path_in_the_workspace",
        "speak(socket.AF_UNIX, HERE + '/.s.PGSQL.%d' % PORT)",
    ),
    (
        "abstract",
        "speak(socket.AF_UNIX, '\\0' + NAME + '/.s.PGSQL.%d' % PORT)",
    ),
];

trial!(Everyone, postgresql_cannot_be_reached);
fn postgresql_cannot_be_reached() {
    let dir = shown_dir();
    let name = unique("pg");
    let postgres = HostPostgres::start(dir.path(), &name);
    let setup = |here: &Path| {
        format!(
            "PORT, DIR, HERE, NAME = {}, {:?}, {here:?}, {name:?}\n\
             def speak(family, address):\n\
             \x20   s = socket.socket(family); s.connect(address)\n\
             \x20   body = struct.pack('!I', 196608) + b'user\\0postgres\\0database\\0postgres\\0\\0'\n\
             \x20   s.sendall(struct.pack('!I', len(body) + 4) + body)\n\
             \x20   assert s.recv(1) == b'R'\n",
            postgres.port,
            dir.path()
        )
    };
    let control = unconfined(&attempts(&setup(dir.path()), POSTGRES_ACTS));
    let mut confined = ConfinedRun::python("");
    // Level `landlock` has no mounts, so it cannot show root's private directory to a leased uid. The socket exists anyway.
    if !(at_landlock() && is_root()) {
        confined = confined.view(dir.path(), "data");
    }
    let here = confined.workspace().join("data");
    confined.script(&attempts(&setup(&here), POSTGRES_ACTS));
    let ran = confined.run();
    for (act, _) in POSTGRES_ACTS {
        assert_eq!(verdict(&control, act), "done", "control");
        let inside = verdict(&ran.stdout, act);
        assert!(
            inside.starts_with("refused"),
            "{act}: {inside}\n{}",
            ran.all()
        );
    }
    // EACCES: the sandbox refuses the path. ENOENT would mean that the socket is not there.
    for act in ["path", "path_in_the_workspace"] {
        assert_eq!(verdict(&ran.stdout, act), "refused EACCES", "{}", ran.all());
    }
}

/// One service of each kind. None reads: connections and datagrams wait in the kernel until the trial counts them.
struct Services {
    tcp: TcpListener,
    udp: UdpSocket,
    path: UnixListener,
    datagrams: UnixDatagram,
    named: UnixListener,
}

impl Services {
    fn start(dir: &Path, name: &str) -> Services {
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let services = Services {
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            udp: UdpSocket::bind("127.0.0.1:0").unwrap(),
            path: UnixListener::bind(dir.join("socket")).unwrap(),
            datagrams: UnixDatagram::bind(dir.join("log")).unwrap(),
            named: UnixListener::bind_addr(&address).unwrap(),
        };
        for file in ["socket", "log"] {
            // The hard case: the file's mode permits everybody, so only the sandbox refuses.
            std::fs::set_permissions(dir.join(file), std::fs::Permissions::from_mode(0o777))
                .unwrap();
        }
        services.tcp.set_nonblocking(true).unwrap();
        services.udp.set_nonblocking(true).unwrap();
        services.path.set_nonblocking(true).unwrap();
        services.datagrams.set_nonblocking(true).unwrap();
        services.named.set_nonblocking(true).unwrap();
        services
    }

    /// How often each service was reached since the last count: TCP, UDP, path, datagram, abstract.
    fn count(&self) -> [usize; 5] {
        fn all<T>(mut take: impl FnMut() -> std::io::Result<T>) -> usize {
            std::iter::from_fn(|| take().ok()).count()
        }
        let mut byte = [0u8; 64];
        [
            all(|| self.tcp.accept()),
            all(|| self.udp.recv(&mut byte)),
            all(|| self.path.accept()),
            all(|| self.datagrams.recv(&mut [0u8; 64])),
            all(|| self.named.accept()),
        ]
    }
}

/// `D` is the directory of the sockets, `W` a directory that the program can write to.
const SERVICE_ACTS: &[(&str, &str)] = &[
    ("tcp", "socket.create_connection(('127.0.0.1', TCP))"),
    (
        "tcp_without_blocking",
        "s = socket.socket(); s.setblocking(False); wait(s, s.connect_ex(('127.0.0.1', TCP)))",
    ),
    // TCP fast open sends data in the first packet: a connection without connect().
    (
        "tcp_fast_open",
        "socket.socket().sendto(b'x', 0x20000000, ('127.0.0.1', TCP))",
    ),
    // Where nobody listens, the first datagram is lost and the second send reports ECONNREFUSED.
    (
        "udp",
        "s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('127.0.0.1', UDP)); s.send(b'x'); s.send(b'x')",
    ),
    (
        "udp_query",
        "s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('127.0.0.1', UDP))\n\
                   for _ in range(2): s.send(struct.pack('!6H', 7, 256, 1, 0, 0, 0) + b'\\2db\\0\\0\\1\\0\\1')",
    ),
    ("path", "stream(D + '/socket')"),
    (
        "path_without_blocking",
        "s = socket.socket(socket.AF_UNIX); s.setblocking(False); s.connect(D + '/socket')",
    ),
    (
        "link",
        "os.symlink(D + '/socket', W + '/link'); stream(W + '/link')",
    ),
    (
        "link_to_directory",
        "os.symlink(D, W + '/dir'); stream(W + '/dir/socket')",
    ),
    (
        "link_to_link",
        "os.symlink(W + '/two', W + '/one'); os.symlink(D + '/socket', W + '/two'); stream(W + '/one')",
    ),
    (
        "hard_link",
        "os.link(D + '/socket', W + '/hard'); stream(W + '/hard')",
    ),
    ("relative", "os.chdir(D); stream('socket')"),
    (
        "relative_dots",
        "os.chdir(D); stream('../' + os.path.basename(D) + '/./socket')",
    ),
    (
        "by_own_proc_cwd",
        "os.chdir(D); stream('/proc/%d/cwd/socket' % os.getpid())",
    ),
    (
        "by_own_proc_root",
        "stream('/proc/%d/root' % os.getpid() + D + '/socket')",
    ),
    (
        "by_own_descriptor",
        "stream('/proc/%d/fd/%d' % (os.getpid(), os.open(D + '/socket', os.O_PATH)))",
    ),
    (
        "by_directory_descriptor",
        "stream('/proc/%d/fd/%d/socket' % (os.getpid(), os.open(D, os.O_PATH)))",
    ),
    (
        "from_a_thread",
        "import threading\nseen = []\ndef go():\n  try: stream(D + '/socket')\n  except OSError as e: seen.append(e)\n\
                       t = threading.Thread(target=go); t.start(); t.join()\nif seen: raise seen[0]",
    ),
    (
        "datagram",
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', D + '/log')",
    ),
    (
        "raw_datagram",
        "socket.socket(socket.AF_UNIX, socket.SOCK_RAW).sendto(b'x', D + '/log')",
    ),
    (
        "datagram_from_a_pair",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', D + '/log')",
    ),
    (
        "datagram_message",
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendmsg([b'x'], [], 0, D + '/log')",
    ),
    (
        "datagram_messages",
        "several(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), (D + '/log').encode())",
    ),
    (
        "datagram_connected",
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect(D + '/log'); s.send(b'x')",
    ),
    (
        "datagram_with_descriptor",
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendmsg([b'x'], [(1, 1, struct.pack('i', 0))], 0, D + '/log')",
    ),
    (
        "datagram_by_link",
        "os.symlink(D + '/log', W + '/loglink'); socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', W + '/loglink')",
    ),
    (
        "datagram_from_a_thread",
        "import threading\nseen = []\ndef go():\n  try: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', D + '/log')\n  except OSError as e: seen.append(e)\n\
                       t = threading.Thread(target=go); t.start(); t.join()\nif seen: raise seen[0]",
    ),
    ("abstract", "stream('\\0' + NAME)"),
];

/// A sendmmsg call with two messages, each with an address.
const SEVERAL: &str = "\
def several(s, path):
    import ctypes, struct
    name = ctypes.create_string_buffer(struct.pack('H', 1) + path + b'\\0')
    data = ctypes.create_string_buffer(b'x')
    part = (ctypes.c_uint64 * 2)(ctypes.addressof(data), 1)
    one = struct.pack('QIxxxxQQQQIxxxxIxxxx', ctypes.addressof(name), len(path) + 2, ctypes.addressof(part), 1, 0, 0, 0, 0)
    all = ctypes.create_string_buffer(one * 2)
    n = ctypes.CDLL(None, use_errno=True).sendmmsg(s.fileno(), all, 2, 0)
    if n < 0: raise OSError(ctypes.get_errno(), 'sendmmsg')
    lengths = [struct.unpack_from('I', all, 64 * i + 56)[0] for i in range(n)]
    assert lengths == [1, 1], lengths
";

trial!(Everyone, services_of_the_host_cannot_be_reached);
fn services_of_the_host_cannot_be_reached() {
    let dir = shown_dir();
    let name = unique("abstract");
    let services = Services::start(dir.path(), &name);
    let setup = |d: &Path, w: &Path| {
        format!(
            "D, W, NAME, TCP, UDP = {d:?}, {w:?}, {name:?}, {}, {}\n{SEVERAL}\
             def stream(path): socket.socket(socket.AF_UNIX).connect(path)\n\
             def wait(s, error):\n\
             \x20   import select\n\
             \x20   if error == errno.EINPROGRESS: select.select([], [s], []); error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)\n\
             \x20   if error: raise OSError(error, 'refused')\n",
            services.tcp.local_addr().unwrap().port(),
            services.udp.local_addr().unwrap().port()
        )
    };
    let scratch = shown_dir();
    let control = unconfined(&attempts(&setup(dir.path(), scratch.path()), SERVICE_ACTS));
    for (act, _) in SERVICE_ACTS {
        assert_eq!(verdict(&control, act), "done", "control of {act}");
    }
    assert!(
        services.count().iter().all(|n| *n > 0),
        "the control reached every service"
    );
    for shown_at in ["its own path", "the workspace"] {
        let mut confined = ConfinedRun::python("").view(dir.path(), "data");
        let own = confined.workspace().to_path_buf();
        let d = if shown_at == "the workspace" {
            own.join("data")
        } else {
            dir.path().to_path_buf()
        };
        confined.script(&attempts(&setup(&d, &own), SERVICE_ACTS));
        let ran = confined.run();
        for (act, _) in SERVICE_ACTS {
            let inside = verdict(&ran.stdout, act);
            assert!(
                inside.starts_with("refused"),
                "{act} at {shown_at}: {inside}\n{}",
                ran.all()
            );
        }
        assert_eq!(
            services.count(),
            [0; 5],
            "something came through at {shown_at}\n{}",
            ran.all()
        );
    }
}

/// Kinds of sockets that lead out of a network namespace, or into kernel code that no analysis needs.
const OTHER_KINDS: &[(&str, &str)] = &[
    ("netlink_generic", "socket.socket(16, socket.SOCK_RAW, 16)"),
    ("netlink_uevent", "socket.socket(16, socket.SOCK_RAW, 15)"),
    ("netlink_sock_diag", "socket.socket(16, socket.SOCK_RAW, 4)"),
    (
        "netlink_netfilter",
        "socket.socket(16, socket.SOCK_RAW, 12)",
    ),
    (
        "netlink_with_garbage_above",
        "sc(41, 16 | 1 << 40, 3, 16 | 1 << 40)",
    ),
];
/// Kinds of sockets that not every host has, because most hosts load a module on the first request. Inside, all of
/// these calls are refused.
const SELDOM_KINDS: &[(&str, &str)] = &[
    ("vsock", "socket.socket(40, socket.SOCK_STREAM)"),
    ("packet", "socket.socket(17, socket.SOCK_RAW, 0x300)"),
    (
        "packet_datagram",
        "socket.socket(17, socket.SOCK_DGRAM, 0x300)",
    ),
    ("alg", "socket.socket(38, socket.SOCK_SEQPACKET)"),
    ("raw", "socket.socket(2, socket.SOCK_RAW, 1)"),
    ("ping", "socket.socket(2, socket.SOCK_DGRAM, 1)"),
    ("netlink_audit", "socket.socket(16, socket.SOCK_RAW, 9)"),
    ("netlink_crypto", "socket.socket(16, socket.SOCK_RAW, 21)"),
    ("sctp", "socket.socket(2, socket.SOCK_STREAM, 132)"),
    ("mptcp", "socket.socket(2, socket.SOCK_STREAM, 262)"),
    ("bluetooth", "socket.socket(31, socket.SOCK_RAW, 1)"),
    ("key", "socket.socket(15, socket.SOCK_RAW, 2)"),
    ("tipc", "socket.socket(30, socket.SOCK_STREAM)"),
    ("xdp", "socket.socket(44, socket.SOCK_RAW)"),
    // Addresses of other machines: there is no route to them, and no name resolves to one.
    (
        "another_machine",
        "s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('192.0.2.1', 53))",
    ),
    (
        "another_machine_6",
        "s = socket.socket(10, socket.SOCK_DGRAM); s.connect(('2001:db8::1', 53))",
    ),
    ("a_name", "socket.getaddrinfo('postgres.example', 5432)"),
    ("io_uring", "sc(425, 4, ctypes.create_string_buffer(256))"),
];
/// The kinds of sockets that libc and ordinary programs use.
const ORDINARY_KINDS: &[(&str, &str)] = &[
    ("tcp", "socket.socket()"),
    ("tcp_6", "socket.socket(10)"),
    ("udp", "socket.socket(type=socket.SOCK_DGRAM)"),
    ("stream", "socket.socket(socket.AF_UNIX)"),
    (
        "seqpacket",
        "socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
    ),
    ("pair", "socket.socketpair()"),
    (
        "unix_datagram",
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",
    ),
    (
        "pair_of_datagrams",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    ),
    ("netlink_route", "socket.socket(16, socket.SOCK_RAW, 0)"),
    (
        "interfaces",
        "assert [n for _, n in socket.if_nameindex()] == ['lo']",
    ),
    ("loopback_by_name", "socket.getaddrinfo('localhost', 80)"),
];

trial!(Everyone, kinds_of_sockets);
fn kinds_of_sockets() {
    let control = unconfined(&attempts("", OTHER_KINDS));
    let all: Vec<_> = [OTHER_KINDS, SELDOM_KINDS, ORDINARY_KINDS].concat();
    let ran = ConfinedRun::python(&attempts("", &all)).run();
    for (act, _) in OTHER_KINDS {
        assert_eq!(verdict(&control, act), "done", "control of {act}");
    }
    for (act, _) in OTHER_KINDS.iter().chain(SELDOM_KINDS) {
        let inside = verdict(&ran.stdout, act);
        assert!(
            inside.starts_with("refused"),
            "{act}: {inside}\n{}",
            ran.all()
        );
    }
    for (act, _) in ORDINARY_KINDS {
        // Level `landlock` has no network namespace. There, only socket pairs and names in /etc/hosts work.
        let works = !at_landlock() || ["pair", "loopback_by_name"].contains(act);
        let inside = verdict(&ran.stdout, act);
        assert_eq!(inside == "done", works, "{act}\n{}", ran.all());
        assert!(works || inside.starts_with("refused"), "{act}: {inside}");
    }
}

/// One thread connects; another swaps the address between the program's own socket and the host's.
const RACE: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
static struct sockaddr_un shared, own, host;
static volatile int over;
static int listener;
static void *swap(void *x) {
    while (!over) {
        memcpy(&shared, &host, sizeof host); __asm__ volatile("" ::: "memory");
        memcpy(&shared, &own, sizeof own); __asm__ volatile("" ::: "memory");
    }
    return x;
}
static void *serve(void *x) {
    for (;;) { int fd = accept(listener, 0, 0); if (fd >= 0) close(fd); }
    return x;
}
int main(int argc, char **argv) {
    int tries = atoi(argv[3]), done = 0, refused = 0;
    own.sun_family = host.sun_family = AF_UNIX;
    strcpy(own.sun_path, argv[1]); strcpy(host.sun_path, argv[2]);
    shared = own;
    listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&own, sizeof own) || listen(listener, 64)) return 2;
    pthread_t a, b;
    pthread_create(&a, 0, swap, 0); pthread_create(&b, 0, serve, 0);
    for (int i = 0; i < tries; i++) {
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&shared, sizeof shared)) refused++; else done++;
        close(fd);
    }
    over = 1;
    printf("done %d refused %d\n", done, refused);
    return 0;
}
"#;

trial!(
    Everyone,
    an_address_that_changes_during_the_call_reaches_no_service,
    only_at_full = "connect is refused there, whatever the address; its race is landlock_file_metadata::a_path_that_changes_during_the_call_reaches_no_other_file"
);
fn an_address_that_changes_during_the_call_reaches_no_service() {
    let dir = shown_dir();
    let socket = dir.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o777)).unwrap();
    let counted = std::sync::Arc::new(AtomicU32::new(0));
    let count = std::sync::Arc::clone(&counted);
    // This thread runs until the process ends. It counts each connection, then closes it.
    std::thread::spawn(move || {
        for _connection in listener.incoming() {
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    // Connections are accepted in order. When this one is closed, all earlier ones have been counted.
    let count_so_far = || {
        let mut last = UnixStream::connect(&socket).unwrap();
        assert_eq!(last.read(&mut [0u8]).unwrap(), 0);
        counted.swap(0, Ordering::SeqCst) - 1
    };
    let program = shown_dir();
    compile(RACE, &program.path().join("race"));
    let control = Command::new(program.path().join("race"))
        .arg(program.path().join("own"))
        .arg(&socket)
        .arg("3000")
        .output()
        .unwrap();
    assert!(control.status.success(), "{control:?}");
    let unconfined = count_so_far();
    assert!(
        unconfined > 0,
        "the swap never met a connect: the race is not one"
    );

    let mut confined = ConfinedRun::new(&["/bin/true"]).view(dir.path(), "data");
    let own = confined.workspace().to_path_buf();
    std::fs::copy(program.path().join("race"), own.join("race")).unwrap();
    confined.command(&[
        &own.join("race"),
        &own.join("own"),
        &socket,
        Path::new("3000"),
    ]);
    let ran = confined.run();
    assert_eq!(ran.code(), Some(0), "{}", ran.all());
    let numbers: Vec<u32> = ran
        .stdout
        .split_whitespace()
        .filter_map(|w| w.parse().ok())
        .collect();
    assert!(
        numbers[0] > 0 && numbers[1] > 0,
        "both addresses were met: {}",
        ran.stdout
    );
    assert_eq!(
        count_so_far(),
        0,
        "{unconfined} unconfined; inside it was told {}",
        ran.stdout
    );
}

trial!(
    Everyone,
    the_broker_tells_nothing_of_the_host,
    only_at_full = "connect is refused there; and names of the host can be asked for by stat"
);
/// The broker resolves paths on the program's behalf. The broker's own /proc/self is not the program's, and its answers
/// must not depend on which files the host has.
fn the_broker_tells_nothing_of_the_host() {
    let dir = shown_dir();
    std::fs::write(dir.path().join("exists"), "").unwrap();
    let script = r#"
def ask(path):
    try: socket.socket(socket.AF_UNIX).connect(path); return 'connected'
    except OSError as e: return errno.errorcode[e.errno]
open('exists', 'w').close()
assert ask('exists') != ask('missing'), 'a difference can be seen where the files are its own'
up = '/..' * 12
ways = ['', '/proc/self/root', '/proc/self/cwd' + up, '/proc/1/root', '/proc/1/cwd' + up]
ways += ['/proc/%s/fd/%d%s' % (who, n, up) for who in ('self', '1') for n in range(64)]
for way in ways:
    if ask(way + DIR + '/exists') != ask(way + DIR + '/missing'): print('TOLD by', way)
print('OVER')
"#;
    let ran = ConfinedRun::python(&format!("DIR = {:?}\n{script}", dir.path())).run();
    assert!(ran.printed("OVER"), "{}", ran.all());
    assert!(
        !ran.stdout.contains("TOLD"),
        "the host's files show through the broker\n{}",
        ran.all()
    );
}

trial!(
    Everyone,
    its_own_sockets_work,
    only_at_full = "there are none but pairs: landlock_level::pairs_of_sockets_work"
);
fn its_own_sockets_work() {
    let script = r#"
import array, asyncio, multiprocessing.connection, threading
def meet(family, address, kind=socket.SOCK_STREAM, blocking=True, times=1):
    listener = socket.socket(family, kind); listener.bind(address); listener.listen(256)
    address = listener.getsockname()
    for _ in range(times):
        s = socket.socket(family, kind); s.setblocking(blocking)
        error = s.connect_ex(address)
        assert error in (0, errno.EINPROGRESS), errno.errorcode[error]
        peer = listener.accept()[0]
        s.setblocking(True); s.sendall(b'hello'); assert peer.recv(5) == b'hello'
        s.close(); peer.close()
here = os.getcwd()
for where in ('/tmp', here, '/dev/shm'):
    meet(socket.AF_UNIX, where + '/s1')
    meet(socket.AF_UNIX, where + '/s2', blocking=False)
    meet(socket.AF_UNIX, where + '/s3', socket.SOCK_SEQPACKET)
meet(socket.AF_UNIX, 'relative')
meet(socket.AF_UNIX, '\0own-name'); meet(socket.AF_UNIX, '\0own-name-2', blocking=False)
meet(socket.AF_INET, ('127.0.0.1', 0)); meet(socket.AF_INET, ('127.0.0.1', 0), blocking=False)
meet(socket.AF_INET6, ('::1', 0))
meet(socket.AF_UNIX, here + '/many', times=200)
a = socket.socket(type=socket.SOCK_DGRAM); a.bind(('127.0.0.1', 0))
b = socket.socket(type=socket.SOCK_DGRAM); b.sendto(b'x', a.getsockname()); assert a.recv(1) == b'x'
os.symlink('relative', 'link')
l = socket.socket(socket.AF_UNIX); os.unlink('relative'); l.bind('relative'); l.listen(); socket.socket(socket.AF_UNIX).connect('link')
# A descriptor goes from process to process.
one, two = socket.socketpair()
if os.fork() == 0:
    r, w = os.pipe(); os.write(w, b'passed'); socket.send_fds(one, [b'x'], [r]); os._exit(0)
fd = socket.recv_fds(two, 1, 1)[1][0]; assert os.read(fd, 6) == b'passed'
# One that waits does not keep the others from connecting.
full = socket.socket(socket.AF_UNIX); full.bind(here + '/full'); full.listen(0)
held = [socket.socket(socket.AF_UNIX)]; held[0].connect(here + '/full')
threading.Thread(target=lambda: socket.socket(socket.AF_UNIX).connect(here + '/full'), daemon=True).start()
meet(socket.AF_UNIX, here + '/meanwhile', times=20)
async def talk():
    async def echo(r, w): w.write(await r.read(2)); await w.drain(); w.close()
    server = await asyncio.start_unix_server(echo, here + '/aio')
    r, w = await asyncio.open_unix_connection(here + '/aio'); w.write(b'hi'); assert await r.read(2) == b'hi'
    w.close(); server.close()
asyncio.run(talk())
for bad, expected in (('nowhere', errno.ENOENT), ('.', errno.ECONNREFUSED)):
    assert socket.socket(socket.AF_UNIX).connect_ex(bad) == expected, bad
assert socket.socket().connect_ex(('127.0.0.1', 1)) == errno.ECONNREFUSED
print('MET', flush=True)
os._exit(0)
"#;
    let ran = ConfinedRun::python(script).run();
    assert!(ran.printed("MET"), "{}", ran.all());
}

trial!(
    Everyone,
    its_own_datagrams_work,
    only_at_full = "there are no unix datagram sockets"
);
fn its_own_datagrams_work() {
    let script = r#"
import array, threading
here = os.getcwd()
new = lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
def passed(a, b, to):
    r, w = os.pipe(); os.write(w, b'passed')
    if to: a.sendmsg([b'one', b'two'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [r]))], 0, to)
    else: socket.send_fds(a, [b'onetwo'], [r])
    data, fds, _, _ = socket.recv_fds(b, 100, 4)
    assert data == b'onetwo' and len(fds) == 1 and os.read(fds[0], 6) == b'passed'
    for fd in (r, w, fds[0]): os.close(fd)
def all_ways():
    for n, address in enumerate((here + '/path', '\0name', 'relative', '/tmp/private')):
        b = new(); b.bind(address); a = new(); a.bind(here + '/sender')
        a.sendto(b'x', address); assert b.recvfrom(9) == (b'x', here + '/sender')
        a.sendto(b'', address); assert b.recv(9) == b''
        a.sendto(bytes(60000), address); assert len(b.recv(99999)) == 60000
        several(a, address.encode()); assert b.recv(9) + b.recv(9) == b'xx'
        passed(a, b, address)
        b.sendto(b'back', here + '/sender'); assert a.recv(9) == b'back'
        a.connect(address); a.send(b'y'); assert b.recv(9) == b'y'
        passed(a, b, None)
        os.write(a.fileno(), b'z'); assert b.recv(9) == b'z'
        a.close(); b.close()
        for name in (address, 'sender'):
            if name[0] != '\0': os.unlink(name)
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        a, b = socket.socketpair(socket.AF_UNIX, kind); passed(a, b, None); a.close(); b.close()
    u = socket.socket(type=socket.SOCK_DGRAM); u.bind(('127.0.0.1', 0))
    u.sendto(b'udp', u.getsockname()); assert u.recv(9) == b'udp'
    u.sendmsg([b'u', b'dp'], [], 0, u.getsockname()); assert u.recv(9) == b'udp'
    # A stream takes more than one copy holds, as it does from the kernel.
    a, b = socket.socketpair(); got = []
    t = threading.Thread(target=lambda: [got.append(len(d)) for d in iter(lambda: b.recv(1 << 20), b'')]); t.start()
    assert a.sendmsg([bytes(700000), bytes(700000)]) == 1400000
    a.close(); t.join(); assert sum(got) == 1400000
    # A full queue: an error, or a wait until there is room.
    b = new(); b.bind('full'); a = new(); a.setblocking(False)
    try:
        while True: a.sendto(b'x', 'full')
    except BlockingIOError: pass
    a.setblocking(True); t = threading.Thread(target=lambda: a.sendto(b'last', 'full')); t.start()
    while b.recv(9) != b'last': pass
    t.join(); a.settimeout(None); os.unlink('full'); a.close(); b.close()
    for to, expected in (('nowhere', errno.ENOENT), ('.', errno.ECONNREFUSED), ('\0nobody', errno.ECONNREFUSED)):
        for send in (lambda: new().sendto(b'x', to), lambda: new().sendmsg([b'x'], [], 0, to)):
            try: send(); raise AssertionError(to)
            except OSError as e: assert e.errno == expected, (to, e)
    a, b = socket.socketpair(); b.close()
    try: a.sendmsg([b'x']); raise AssertionError('sent to nobody')
    except BrokenPipeError: pass
all_ways()
# Once more where the broker makes every send itself: a process with threads.
threading.Thread(target=threading.Event().wait, daemon=True).start()
all_ways()
# Lengths that no address has, and messages that describe no memory.
import struct, ctypes
s = new(); s.bind('own'); fd = s.fileno()
name = ctypes.create_string_buffer(struct.pack('H', 1) + b'own' + bytes(200))
def errno_of(call, *args):
    n = getattr(ctypes.CDLL(None, use_errno=True), call)(*args)
    return 0 if n >= 0 else ctypes.get_errno()
lengths = {n: errno_of('sendto', fd, b'x', 1, 0, name, n) for n in (1, 2, 6, 110, 111, 128, 129, -1)}
assert lengths == {1: 22, 2: 22, 6: 0, 110: 0, 111: 22, 128: 22, 129: 22, -1: 22}, lengths
assert errno_of('sendto', fd, b'x', 1, 0, ctypes.c_void_p(8), 6) == errno.EFAULT
for header, expected in (((0, 0, 8, 1, 0, 0), errno.EFAULT), ((0, 0, 0, 1 << 40, 0, 0), errno.EMSGSIZE), ((8, 6, 0, 0, 0, 0), errno.EFAULT),
                         ((0, 0, 0, 0, 8, 64), errno.EFAULT), ((0, 0, 0, 0, 8, 1 << 50), errno.ENOBUFS)):
    packed = struct.pack('QIxxxxQQQQIxxxx', *header, 0)
    assert errno_of('sendmsg', fd, packed, 0) == expected, (header, expected)
assert errno_of('sendmsg', fd, ctypes.c_void_p(8), 0) == errno.EFAULT
for closed in (-1, -100, 500):
    assert errno_of('sendmsg', closed, packed, 0) == errno_of('connect', closed, name, 6) == errno.EBADF
assert errno_of('sendmsg', os.open('.', os.O_RDONLY), packed, 0) == errno.ENOTSOCK
# Control data that lies about its lengths: no descriptor of anybody else's comes along.
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
def control(data):
    keep = ctypes.create_string_buffer(data, len(data)); byte = ctypes.create_string_buffer(b'x'); part = (ctypes.c_uint64 * 2)(ctypes.addressof(byte), 1)
    packed = struct.pack('QIxxxxQQQQIxxxx', 0, 0, ctypes.addressof(part), 1, ctypes.addressof(keep), len(data), 0)
    return errno_of('sendmsg', a.fileno(), packed, 0)
for n in range(3, 64):
    hidden = struct.pack('Qiii', 20, 1, 1, n)
    one = struct.pack('Qii', 16 + 9, 1, 1) + struct.pack('ii', 0, 1) + hidden + bytes(16)
    for data in (one, struct.pack('Qii', 17, 1, 1) + hidden, struct.pack('Qiii', 20, 1, 1, n)):
        if control(data): continue
        _, fds, _, _ = socket.recv_fds(b, 9, 64)
        for fd in fds:
            link = os.readlink('/proc/self/fd/%d' % fd)
            assert link in [os.readlink('/proc/self/fd/%d' % m) for m in range(64) if m != fd and os.path.lexists('/proc/self/fd/%d' % m)], link
            os.close(fd)
print('MET', flush=True)
os._exit(0)
"#;
    let ran = ConfinedRun::python(&format!("{SEVERAL}{script}")).run();
    assert!(ran.printed("MET"), "{}", ran.all());
}

/// Some threads swap the address and the socket while others send. The host's socket is below /usr, the hard case,
/// because /usr is a plain bind mount.
const DATAGRAM_RACE: &str = r#"
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
static struct sockaddr_un shared, own, host;
static volatile int over;
static int swapped, stream[2], datagram;
static void *swap(void *x) {
    while (!over) {
        memcpy(&shared, &host, sizeof host); __asm__ volatile("" ::: "memory");
        memcpy(&shared, &own, sizeof own); __asm__ volatile("" ::: "memory");
    }
    return x;
}
static void *swap_socket(void *x) {
    while (!over) { dup2(stream[0], swapped); dup2(datagram, swapped); }
    return x;
}
static void *drain(void *x) {
    char byte[64]; int fd = *(int *)x;
    while (recv(fd, byte, sizeof byte, 0) > 0) {}
    return x;
}
static int message(int fd, struct sockaddr_un *to) {
    struct iovec part = { "x", 1 };
    struct msghdr m = { .msg_name = to, .msg_namelen = sizeof *to, .msg_iov = &part, .msg_iovlen = 1 };
    return sendmsg(fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT) == 1;
}
int main(int argc, char **argv) {
    int tries = atoi(argv[3]), done = 0, refused = 0;
    own.sun_family = host.sun_family = AF_UNIX;
    strcpy(own.sun_path, argv[1]); strcpy(host.sun_path, argv[2]);
    shared = own;
    int receiver = socket(AF_UNIX, SOCK_DGRAM, 0);
    datagram = socket(AF_UNIX, SOCK_DGRAM, 0);
    socketpair(AF_UNIX, SOCK_STREAM, 0, stream);
    swapped = dup(stream[0]);
    if (bind(receiver, (struct sockaddr *)&own, sizeof own)) return 2;
    pthread_t a, b, c, d;
    pthread_create(&a, 0, swap, 0); pthread_create(&b, 0, swap_socket, 0);
    pthread_create(&c, 0, drain, &receiver); pthread_create(&d, 0, drain, &stream[1]);
    for (int i = 0; i < tries; i++) {
        int sent = 0;
        switch (i % 3) {
        case 0: sent = sendto(datagram, "x", 1, MSG_DONTWAIT, (struct sockaddr *)&shared, sizeof shared) == 1; break;
        case 1: sent = message(datagram, &shared); break;
        case 2: message(swapped, &host); continue;
        }
        if (sent) done++; else refused++;
    }
    over = 1;
    printf("done %d refused %d\n", done, refused);
    fflush(stdout);
    _exit(0);
}
"#;

trial!(
    Root,
    a_datagram_whose_address_changes_during_the_call_reaches_no_service,
    only_at_full = "there are no unix datagram sockets"
);
fn a_datagram_whose_address_changes_during_the_call_reaches_no_service() {
    let dir = tempfile::Builder::new()
        .prefix("fumehood-test-")
        .tempdir_in("/usr/local")
        .unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("log");
    let host = UnixDatagram::bind(&path).unwrap();
    host.set_nonblocking(true).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
    let count = || std::iter::from_fn(|| host.recv(&mut [0u8; 64]).ok()).count();
    let program = shown_dir();
    compile(DATAGRAM_RACE, &program.path().join("race"));
    // Unconfined, a round takes a few milliseconds, and the thread that swaps the address may not run in that time. So
    // the control makes many rounds.
    let reached = (0..100).any(|_| {
        let control = Command::new(program.path().join("race"))
            .arg(program.path().join("own"))
            .arg(&path)
            .arg("3000")
            .output()
            .unwrap();
        assert!(control.status.success(), "{control:?}");
        std::fs::remove_file(program.path().join("own")).unwrap();
        count() > 0
    });
    assert!(reached, "the control never reached the host's socket");
    let mut confined = ConfinedRun::new(&["/bin/true"]);
    let own = confined.workspace().to_path_buf();
    std::fs::copy(program.path().join("race"), own.join("race")).unwrap();
    confined.command(&[
        &own.join("race"),
        &own.join("own"),
        &path,
        Path::new("6000"),
    ]);
    let ran = confined.run();
    assert_eq!(ran.code(), Some(0), "{}", ran.all());
    let numbers: Vec<u32> = ran
        .stdout
        .split_whitespace()
        .filter_map(|w| w.parse().ok())
        .collect();
    assert!(
        numbers[0] > 0 && numbers[1] > 0,
        "both addresses were met: {}",
        ran.stdout
    );
    assert_eq!(count(), 0, "datagrams came through: {}", ran.stdout);
}

/// One thread sends on a stream socket while another puts a datagram socket in its place and exits. The broker refuses the
/// address; the kernel would accept it.
const SOCKET_RACE: &str = r#"
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>
static volatile int go, delay, lives;
static int datagram, fd = 100;
static int replace(void *x) {
    while (!go);
    for (volatile int i = 0; i < delay; i++);
    syscall(SYS_dup3, datagram, fd, 0);
    syscall(SYS_exit, 0);
    return 0;
}
int main(int argc, char **argv) {
    static char stack[65536] __attribute__((aligned(16)));
    int pair[2], tid, sent = 0, rounds = atoi(argv[2]);
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    datagram = socket(AF_UNIX, SOCK_DGRAM, 0);
    int receiver = socket(AF_UNIX, SOCK_DGRAM, 0);
    struct sockaddr_un own = {.sun_family = AF_UNIX}, through = {.sun_family = AF_UNIX};
    strcpy(own.sun_path, argv[1]);
    snprintf(through.sun_path, sizeof through.sun_path, "/proc/self/root%s", argv[1]);
    if (bind(receiver, (void *)&own, sizeof own)) return 2;
    /* So that the broker does not always find a CPU free. */
    pid_t busy[2];
    for (int i = 0; i < 2; i++) if (!(busy[i] = fork())) for (;;);
    char text[] = "raced", junk[256];
    struct iovec part = {text, sizeof text};
    struct msghdr message = {.msg_name = &through, .msg_namelen = sizeof through, .msg_iov = &part, .msg_iovlen = 1};
    for (int n = 0; n < rounds; n++) {
        dup2(pair[0], fd);
        go = 0; lives = 1; delay = rand() % 30000;
        int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_CHILD_CLEARTID;
        if (clone(replace, stack + sizeof stack, flags, 0, &tid, 0, &lives) < 0) return 3;
        for (volatile int i = 0; i < 2000; i++);
        go = 1;
        /* The control: the other socket is there before the call. */
        while (argc > 3 && lives);
        if (sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) sent++;
        while (lives);
        while (recv(receiver, junk, sizeof junk, MSG_DONTWAIT) > 0);
        while (recv(pair[1], junk, sizeof junk, MSG_DONTWAIT) > 0);
    }
    for (int i = 0; i < 2; i++) kill(busy[i], SIGKILL);
    printf("SENT %d of %d\n", sent, rounds);
    return 0;
}
"#;

trial!(
    Everyone,
    a_socket_that_changes_during_the_call_sends_nothing,
    only_at_full = "there are no unix datagram sockets"
);
fn a_socket_that_changes_during_the_call_sends_nothing() {
    let program = shown_dir();
    compile(SOCKET_RACE, &program.path().join("race"));
    let control = Command::new(program.path().join("race"))
        .arg(program.path().join("own"))
        .args(["10", "control"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&control.stdout);
    assert!(control.status.success(), "{control:?}");
    assert!(said.contains("SENT 10 of 10"), "{said}");
    let mut confined = ConfinedRun::new(&["/bin/true"]);
    let own = confined.workspace().to_path_buf();
    std::fs::copy(program.path().join("race"), own.join("race")).unwrap();
    let (race, socket) = (own.join("race"), own.join("own"));
    confined.command(&[&race, &socket, Path::new("6000")]);
    let ran = confined.limits(|l| l.wall_ms = 120_000).run();
    assert!(ran.printed("SENT 0 of 6000"), "{}", ran.all());
}

trial!(
    Everyone,
    the_brokers_cpu_time_is_charged_to_the_run,
    only_at_full = "there is no such broker"
);
/// The run may use a tenth of a CPU, and nearly all of it goes into connects that the broker makes. The recorded CPU time is at
/// least what the broker's process reports, and stays within the limit where a cgroup enforces it.
fn the_brokers_cpu_time_is_charged_to_the_run() {
    let script = r#"
import time
listener = socket.socket(socket.AF_UNIX); listener.bind('busy'); listener.listen(1)
listener.setblocking(False)
end = time.monotonic() + 3
while time.monotonic() < end:
    s = socket.socket(socket.AF_UNIX)
    s.connect('busy')
    s.close()
    listener.accept()[0].close()
others = [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]
ticks = [sum(map(int, open('/proc/%s/stat' % p).read().rsplit(')', 1)[1].split()[11:13])) for p in others]
init = sum(map(int, open('/proc/1/stat').read().rsplit(')', 1)[1].split()[11:15]))
own = os.times()
print('MS', *(round(s * 1000) for s in (sum(ticks) / os.sysconf('SC_CLK_TCK'), own.user + own.system, init / os.sysconf('SC_CLK_TCK'))))
print('CPUS', *(len(os.sched_getaffinity(int(p))) for p in others), len(os.sched_getaffinity(0)))
"#;
    let ran = ConfinedRun::python(script)
        .limits(|limits| limits.cpu_milli = 100)
        .run();
    assert_eq!(ran.code(), Some(0), "{}", ran.all());
    let line = |name: &str| -> Vec<u64> {
        let line = ran.stdout.lines().find_map(|l| l.strip_prefix(name));
        let words = line.unwrap_or_default().split_whitespace();
        words.filter_map(|word| word.parse().ok()).collect()
    };
    let [broker, own, init] = line("MS")[..] else {
        panic!("{}", ran.all());
    };
    assert!(broker > 0, "the broker did something: {}", ran.all());
    let used = ran.outcome.usage.cpu_ms;
    // The kernel rounds the times of both processes down to ticks of a hundredth of a second.
    assert!(used + 50 >= broker + own, "{used} recorded: {}", ran.all());
    let wall = ran.outcome.usage.wall_ms;
    assert!(init * 5 < wall, "init works for nobody: {}", ran.all());
    match is_root() {
        true => assert!(used * 4 < wall, "{used} of {wall}: {}", ran.all()),
        false => assert!(line("CPUS").iter().all(|n| *n == 1), "{}", ran.all()),
    }
}

trial!(
    Everyone,
    the_broker_does_not_delay_the_end,
    only_at_full = "there is no such broker"
);
/// The broker does not delay the end of a program that obeys SIGTERM. If the program kills the broker, another one
/// replaces it.
fn the_broker_does_not_delay_the_end() {
    let script = r#"
import signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
listener = socket.socket(socket.AF_UNIX); listener.bind('l'); listener.listen(9)
def meet(): s = socket.socket(socket.AF_UNIX); s.connect('l'); s.close(); listener.accept()[0].close()
meet()
others = [int(p) for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]
assert len(others) == 1, others
for path in ('mem', 'environ', 'maps', 'fd/3', 'cwd', 'exe', 'root'):
    for act in (lambda p: open(p, 'rb').read(1), os.readlink):
        try: act('/proc/%d/%s' % (others[0], path)); print('SEEN', path)
        except OSError: pass
try: os.kill(others[0], signal.SIGKILL)
except PermissionError: pass
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    try: meet(); break
    except BlockingIOError: pass
print('MET', flush=True)
while True: signal.pause()
"#;
    let mut confined = ConfinedRun::python(script).limits(|limits| limits.grace_ms = 30_000);
    confined.control_at_marker = Some((b"MET", Control::Cancel));
    let ran = confined.run();
    assert!(
        ran.printed("MET") && !ran.stdout.contains("SEEN"),
        "{}",
        ran.all()
    );
    assert!(ran.outcome.usage.wall_ms < 25_000, "{}", ran.all());
}

trial!(Everyone, descriptors_lead_nowhere);
/// The program inherits three streams and nothing else, and none of them is a socket or a file of the host.
fn descriptors_lead_nowhere() {
    let script = "for n in os.listdir('/proc/self/fd'):\n\
                  \x20   try: print(n, os.readlink('/proc/self/fd/' + n))\n\
                  \x20   except FileNotFoundError: pass\n";
    // Control: an unconfined program inherits a descriptor that is not close-on-exec.
    let held =
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(unique("held")).unwrap()).unwrap();
    let kept = rustix::io::dup(held.as_fd()).unwrap();
    assert!(
        unconfined(script).contains("socket:"),
        "the control inherits the socket"
    );
    let ran = ConfinedRun::python(script).run();
    drop(kept);
    for line in ran.stdout.lines() {
        let (number, to) = line.split_once(' ').unwrap();
        assert!(["0", "1", "2"].contains(&number), "descriptor {line}");
        assert!(
            to == "/dev/null" || to.starts_with("pipe:"),
            "descriptor {line}"
        );
    }
    assert_eq!(ran.stdout.lines().count(), 3, "{}", ran.all());
}

/// The secrets are written backwards, so that the script that searches for them does not find itself.
const SECRETS_REVERSED: [&str; 2] = ["3f9a1c7e-terces-gp", "77b0d2aa-lru-esabatad"];
const ALLOWED_REVERSED: &str = "51c44e09-dewolla";

trial!(Everyone, secrets_stay_outside);
fn secrets_stay_outside() {
    let right_way = |s: &str| s.chars().rev().collect::<String>();
    if std::env::var_os("PGPASSWORD").is_none() {
        // Run the trial again in a process that has the secrets in its environment, as an orchestrator has.
        let status = Command::new("/proc/self/exe")
            .args(inner_arguments!(secrets_stay_outside))
            .env("PGPASSWORD", right_way(SECRETS_REVERSED[0]))
            .env("DATABASE_URL", right_way(SECRETS_REVERSED[1]))
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let script = format!(
        "SECRETS = [s[::-1].encode() for s in {SECRETS_REVERSED:?}]\nALLOWED = {ALLOWED_REVERSED:?}[::-1].encode()\nRUNNER = {}\n{}",
        std::process::id(),
        r#"
import subprocess
child = subprocess.Popen(['/bin/sleep', '60'])
try:
    while 'sleep' not in open('/proc/%d/cmdline' % child.pid).read(): os.sched_yield()
    pids = [p for p in os.listdir('/proc') if p.isdigit()]
except PermissionError: pids = [1, RUNNER, os.getppid(), os.getpid(), child.pid]
found = set()
def look(where, data):
    for s in SECRETS:
        if s in data: print('FOUND in', where)
    if ALLOWED in data: found.add(where.rsplit('/', 1)[1])
for pid in pids:
    for name in ('environ', 'cmdline', 'status', 'comm', 'auxv', 'mountinfo'):
        path = '/proc/%s/%s' % (pid, name)
        try: look(path, open(path, 'rb').read())
        except OSError: pass
    if int(pid) == os.getpid(): continue
    try: maps, mem = open('/proc/%s/maps' % pid), open('/proc/%s/mem' % pid, 'rb', 0)
    except OSError: continue
    for line in maps:
        start, end = (int(x, 16) for x in line.split()[0].split('-'))
        try: mem.seek(start); look(mem.name, mem.read(end - start))
        except (OSError, ValueError, OverflowError): pass
look('/own/environment', repr(os.environ).encode())
print('CONTROL', sorted(found & {'environ', 'mem'}))
child.kill()
"#
    );
    let ran = ConfinedRun::python(&script)
        .env("ALLOWED", right_way(ALLOWED_REVERSED))
        .run();
    // Control: the search finds the value that was passed on purpose, in both places where a child can be inspected.
    let found = match at_landlock() {
        false => "CONTROL ['environ', 'mem']",
        true => "CONTROL ['environ']",
    };
    assert!(ran.printed(found), "{}", ran.all());
    assert!(!ran.stdout.contains("FOUND"), "{}", ran.all());
}
