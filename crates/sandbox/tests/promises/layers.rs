//! The layers. Each layer refuses acts that no other layer refuses. With any one layer off, every promise holds, except
//! those that [`RESTS_ON_ONE_LAYER`] names. SECURITY.md documents the same lists.
//!
//! Two runs show that one layer refuses an act. The layers that overlap this layer are off in both runs; with the layer
//! the act is refused, without it the act succeeds. The mount namespace and the leased uid cannot be switched off:
//! without the first there is no new root to run in, without the second an analysis would run as root. The tests of P2
//! to P4 and P8 cover these two.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use sandbox::spec::Layer::{
    self, Capabilities, CgroupNamespace, IpcNamespace, Landlock, NetNamespace, NoNewPrivs,
    PidNamespace, Seccomp, UserNamespace, UtsNamespace,
};
use sandbox::spec::{Exec, HostPath, InsidePath, Owner, ReadOnlyView, ViewContent};
use testkit::{is_root, trial};

use crate::confined_run::{ConfinedResult, ConfinedRun, at_landlock, attempts, shown_dir, verdict};
use crate::p07_others::HostProcess;

/// Every layer that can be left off.
const SWITCHES: [Layer; 10] = [
    UserNamespace,
    PidNamespace,
    NetNamespace,
    IpcNamespace,
    UtsNamespace,
    CgroupNamespace,
    NoNewPrivs,
    Capabilities,
    Landlock,
    Seccomp,
];

/// The layers that this user can leave off. A plain user gets a /proc only together with a pid namespace, so without a
/// pid namespace no run starts.
fn switches() -> impl Iterator<Item = Layer> {
    SWITCHES
        .into_iter()
        .filter(|layer| is_root() || *layer != PidNamespace)
}

/// Each entry has the layer, the name of the act, the layers that overlap this layer and are off in both runs, and the
/// Python code of the act, which raises OSError when the act is refused.
#[rustfmt::skip]
pub const OWNED: &[(Layer, &str, &[Layer], &str)] = &[
    // Parts of the kernel that unprivileged programs may otherwise use.
    (Seccomp, "keyrings", &[], "sc(248, ctypes.c_char_p(b'user'), ctypes.c_char_p(b'own'), ctypes.c_char_p(b'x'), 1, -2)"),
    (Seccomp, "userfaultfd", &[], "sc(323, 1)"),
    (Seccomp, "io_uring", &[], "sc(425, 4, ctypes.create_string_buffer(256))"),
    (Seccomp, "tracing a child", &[], "sc(101, 0, 0, 0, 0)"),
    (Seccomp, "generic netlink", &[], "socket.socket(16, socket.SOCK_RAW, 16)"),
    (Seccomp, "clone3, whose flags cannot be seen", &[], "born(sc(435, ctypes.create_string_buffer(struct.pack('8Q', 0, 0, 0, 0, 17, 0, 0, 0), 64), 64))"),
    (Seccomp, "a personality without protections", &[], "sc(135, 0x400000)"),
    (Seccomp, "file handles", &[], "sc(303, -100, ctypes.c_char_p(b'/tmp'), ctypes.create_string_buffer(struct.pack('Ii', 128, 0), 256), ctypes.byref(ctypes.c_int()), 0)"),
    // A set-id file gives its owner's identity to any user who runs it.
    (Seccomp, "a set-user-id file", &[], "open('mine', 'w').close(); sc(90, ctypes.c_char_p(b'mine'), 0o4755)"),
    // fallocate takes much space with one call.
    (Seccomp, "space taken faster than a watch can see", &[], "sc(285, os.open('big', os.O_CREAT | os.O_RDWR), 0, 0, 1 << 20)"),
    // A Landlock domain confines signals even if sender and receiver share the uid or the pid namespace.
    (Landlock, "a signal to pid 1", &[], "os.kill(1, 0)"),
    (UserNamespace, "a user namespace of its own", &[Seccomp], "sc(272, 0x10000000)"),
    (NetNamespace, "loopback TCP of the host", &[], "socket.create_connection(('127.0.0.1', TCP))"),
    // The broker connects on the program's behalf and is in no Landlock domain, so Landlock's scope does not apply.
    (NetNamespace, "an abstract socket of the host", &[], "socket.socket(socket.AF_UNIX).connect('\\0' + NAME)"),
    (NetNamespace, "interfaces of the host", &[], "if [n for _, n in socket.if_nameindex()] == ['lo'] and HOST_HAS_MORE: raise OSError(errno.ENODEV, 'none')"),
    (PidNamespace, "processes of the host seen", &[], "os.stat('/proc/%d' % WITNESS)"),
    (PidNamespace, "priority of a process of the same user", &[], "os.getpriority(os.PRIO_PROCESS, WITNESS)"),
    (IpcNamespace, "shared memory of the host", &[], "sc(29, KEY, 0, 0)"),
    (UtsNamespace, "the host's name", &[], "if socket.gethostname() != HOST: raise OSError(errno.ENOENT, 'another name')"),
    (CgroupNamespace, "where in the host's cgroups it is", &[], "if not any(len(l.strip().split(':', 2)[2]) > 1 for l in open('/proc/self/cgroup')): raise OSError(errno.ENOENT, 'all are roots')"),
    (Capabilities, "a bounding set to gain from", &[], "if sc(157, 23, 21, 0, 0, 0) != 1: raise OSError(errno.EPERM, 'not in the set')"),
    // Every mount inside is nosuid as well, and uid 0 has no name in the inner user namespace. So no set-id program
    // could show whether no_new_privs is on, and the act reads the bit itself. Landlock and seccomp cannot be on
    // without this bit.
    (NoNewPrivs, "executing with more privilege", &[Landlock, Seccomp], "if sc(157, 39, 0, 0, 0, 0) == 1: raise OSError(errno.EPERM, 'forbidden')"),
];

/// The callers for whom a promise rests on one layer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    Anyone,
    Root,
}

/// Promises that one layer alone holds. Each entry has the layer, the callers, the act that succeeds without the layer,
/// and why nothing else refuses the act. The list is exact: without the layer these acts succeed, and all other acts
/// fail.
#[rustfmt::skip]
pub const RESTS_ON_ONE_LAYER: &[(Layer, Caller, &str, &str)] = &[
    (NetNamespace, Caller::Anyone, "host_tcp",
        "seccomp cannot see addresses, and Landlock knows ports but not whose loopback it is"),
    (NetNamespace, Caller::Anyone, "host_abstract_socket",
        "Landlock scopes abstract names, but the broker connects on the program's behalf and is in no domain"),
    (PidNamespace, Caller::Root, "see_host_pids",
        "/proc is that of the pid namespace; a plain user's run does not start without one"),
    (IpcNamespace, Caller::Anyone, "host_shared_memory",
        "System V IPC has keys, not paths: only the mode of a segment protects it otherwise"),
    (Seccomp, Caller::Anyone, "set_user_id_file",
        "the workspace is nosuid inside, but the host sees the same files"),
    (Seccomp, Caller::Anyone, "keyring",
        "keys are counted by uid, and outlive the processes that made them"),
];

/// The promises in short: acts that must fail whatever single layer is off.
#[rustfmt::skip]
const BATTERY: &[(&str, &str)] = &[
    ("write_to_data", "open(VIEW + '/file', 'r+')"),
    ("create_in_data", "open(VIEW + '/new', 'w')"),
    ("chmod_data", "os.chmod(VIEW + '/file', 0o777)"),
    ("write_to_the_system", "open('/usr/fumehood-test', 'w')"),
    ("remount_data", "sc(165, 0, ctypes.c_char_p(VIEW.encode()), 0, 0x1020, 0)"),
    ("read_shadow", "open('/etc/shadow')"),
    ("read_the_rest_of_the_host", "os.listdir(OUTSIDE)"),
    ("leave_by_proc", "os.listdir('/proc/1/root/' + OUTSIDE)"),
    ("leave_by_witness", "os.listdir('/proc/%d/root/' % WITNESS + OUTSIDE)"),
    ("host_environment", "open('/proc/%d/environ' % WITNESS).read()"),
    ("host_memory", "open('/proc/%d/mem' % WITNESS, 'rb')"),
    ("signal_host", "os.kill(WITNESS, 0)"),
    ("signal_pid_1", "os.kill(1, 9); os.stat('/proc/1'); raise OSError(errno.EPERM, 'it lives')"),
    ("see_host_pids", "os.stat('/proc/%d' % WITNESS)"),
    ("trace_host", "sc(101, 16, WITNESS, 0, 0)"),
    ("read_pid_1", "open('/proc/1/mem', 'rb')"),
    ("host_tcp", "socket.create_connection(('127.0.0.1', TCP))"),
    ("host_abstract_socket", "socket.socket(socket.AF_UNIX).connect('\\0' + NAME)"),
    ("host_socket_in_a_view", "socket.socket(socket.AF_UNIX).connect(VIEW + '/socket')"),
    ("fifo_in_a_view", "os.open(VIEW + '/fifo', os.O_WRONLY | os.O_NONBLOCK)"),
    ("host_socket_in_a_runtime", "socket.socket(socket.AF_UNIX).connect(RUNTIME + '/socket')"),
    ("fifo_in_a_runtime", "os.open(RUNTIME + '/fifo', os.O_WRONLY | os.O_NONBLOCK)"),
    ("host_shared_memory", "sc(29, KEY, 0, 0)"),
    ("become_root", "os.setuid(0)"),
    ("new_user_namespace", "sc(272, 0x10000000)"),
    ("mount", "sc(165, ctypes.c_char_p(b'none'), ctypes.c_char_p(b'/tmp'), ctypes.c_char_p(b'tmpfs'), 0, 0)"),
    ("device", "os.mknod('dev', 0o20666, os.makedev(1, 1))"),
    ("set_host_name", "sc(170, ctypes.c_char_p(b'x'), 1)"),
    ("module", "sc(313, 0, ctypes.c_char_p(b''), 0)"),
    ("bpf", "sc(321, 0, ctypes.create_string_buffer(struct.pack('IIII', 2, 4, 4, 1), 72), 72)"),
    ("packet_socket", "socket.socket(17, socket.SOCK_RAW, 0x300)"),
    ("core_pattern", "open('/proc/sys/kernel/core_pattern', 'w')"),
    ("set_user_id_file", "open('mine', 'w').close(); sc(90, ctypes.c_char_p(b'mine'), 0o4755)"),
    ("keyring", "sc(248, ctypes.c_char_p(b'user'), ctypes.c_char_p(b'own'), ctypes.c_char_p(b'x'), 1, -2)"),
];

/// The objects of the host that the acts try to reach.
struct Host {
    tcp: TcpListener,
    _named: UnixListener,
    data: Shown,
    runtime: Shown,
    outside: tempfile::TempDir,
    witness: HostProcess,
    name: String,
    memory: SharedMemory,
}

/// A host directory that is shown inside. It has a socket and a FIFO that everyone may use.
struct Shown {
    dir: tempfile::TempDir,
    _socket: UnixListener,
    _fifo: std::fs::File,
}

impl Shown {
    fn make() -> Shown {
        let dir = shown_dir();
        let at = |file: &str| dir.path().join(file);
        std::fs::write(at("file"), "data").unwrap();
        let made = Command::new("mkfifo").arg(at("fifo")).status().unwrap();
        assert!(made.success());
        let socket = UnixListener::bind(at("socket")).unwrap();
        for file in ["fifo", "socket"] {
            std::fs::set_permissions(at(file), std::fs::Permissions::from_mode(0o666)).unwrap();
        }
        let mut reader = std::fs::OpenOptions::new();
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let fifo = reader
            .read(true)
            .custom_flags(nonblocking)
            .open(at("fifo"))
            .unwrap();
        Shown {
            dir,
            _socket: socket,
            _fifo: fifo,
        }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// A System V shared memory segment of the host that everyone may use. Dropping this value removes the segment.
struct SharedMemory(u32);

impl SharedMemory {
    fn make(nth: u32) -> SharedMemory {
        let key = 0x4c00_0000 + std::process::id() * 4 + nth;
        crate::confined_run::unconfined(&format!(
            "if libc.shmget({key}, 4096, 0o1666) == -1: sys.exit(1)"
        ));
        SharedMemory(key)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        let _gone = Command::new("ipcrm")
            .arg("-M")
            .arg(self.0.to_string())
            .status();
    }
}

impl Host {
    fn new() -> Host {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fumehood-layers-{}-{nth}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        Host {
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            _named: UnixListener::bind_addr(&address).unwrap(),
            data: Shown::make(),
            runtime: Shown::make(),
            outside: shown_dir(),
            witness: HostProcess::start(),
            name,
            memory: SharedMemory::make(nth),
        }
    }

    fn setup(&self) -> String {
        let host_name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let interfaces = std::fs::read_dir("/sys/class/net").unwrap().count();
        format!(
            "VIEW, RUNTIME, OUTSIDE, NAME = {:?}, {:?}, {:?}, {:?}\n\
             TCP, WITNESS, KEY, HOST, HOST_HAS_MORE = {}, {}, {}, {:?}, {}\n\
             def born(pid):\n    if pid == 0: os._exit(0)\n    os.waitpid(pid, 0)\n",
            self.data.path(),
            self.runtime.path(),
            self.outside.path(),
            self.name,
            self.tcp.local_addr().unwrap().port(),
            self.witness.pid(),
            self.memory.0,
            host_name.trim(),
            if interfaces > 1 { "True" } else { "False" },
        )
    }

    /// Runs the acts without some layers, with a view of data and a view of a runtime.
    fn run(&self, without: &[Layer], acts: &[(&str, &str)]) -> ConfinedResult {
        let mut confined = ConfinedRun::python(&attempts(&self.setup(), acts)).without(without);
        for (shown, exec, owner) in [
            (&self.data, Exec::Refused, Owner::Mapped),
            (&self.runtime, Exec::Allowed, Owner::AsIs),
        ] {
            confined.spec.views.push(ReadOnlyView {
                source: HostPath::new(shown.path()),
                target: InsidePath::new(shown.path()),
                exec,
                owner,
                content: ViewContent::Runtime,
            });
        }
        confined.run()
    }
}

trial!(
    Everyone,
    each_layer_alone_stops_its_own_acts,
    only_at_full = "most are namespaces'; what Landlock, seccomp and the guardian own is landlock_level::each_layer_alone_stops_its_own_acts"
);
fn each_layer_alone_stops_its_own_acts() {
    let host = Host::new();
    let mut wrong = Vec::new();
    // Acts with the same layer and the same overlaps share their two runs.
    let mut groups: Vec<(Layer, &[Layer])> = OWNED
        .iter()
        .map(|(layer, _, overlaps, _)| (*layer, *overlaps))
        .collect();
    groups.retain(|(layer, _)| switches().any(|l| l == *layer));
    groups.dedup();
    for (layer, overlaps) in groups {
        let acts: Vec<(&str, &str)> = OWNED
            .iter()
            .filter(|(l, _, o, _)| *l == layer && *o == overlaps)
            .map(|(_, name, _, code)| (*name, *code))
            .collect();
        let with = host.run(overlaps, &acts);
        let without = host.run(&[overlaps, &[layer]].concat(), &acts);
        for (name, _) in acts {
            let (on, off) = (verdict(&with.stdout, name), verdict(&without.stdout, name));
            if !on.starts_with("refused") || off != "done" {
                wrong.push(format!("{layer:?}, {name}: with it {on}, without it {off}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for layer in SWITCHES {
        assert!(
            OWNED.iter().any(|(l, ..)| *l == layer),
            "{layer:?} owns nothing"
        );
    }
}

fn applies(whom: Caller) -> bool {
    match whom {
        Caller::Anyone => true,
        Caller::Root => is_root(),
    }
}

trial!(
    Everyone,
    another_layer_holds_when_one_is_off,
    only_at_full = "there most promises rest on one layer: what is open without it is landlock_level::each_layer_alone_stops_its_own_acts"
);
fn another_layer_holds_when_one_is_off() {
    let mut host = Host::new();
    let all_on = host.run(&[], BATTERY);
    for (act, _) in BATTERY {
        assert!(
            !verdict(&all_on.stdout, act).starts_with("done"),
            "{act} with every layer on\n{}",
            all_on.all()
        );
    }
    let mut broken = Vec::new();
    for layer in switches() {
        // Without a pid namespace a signal to pid 1 would go to the host's pid 1. The kernel refuses the signal to
        // root's leased uid, but the trial makes no attempt that would do harm if it succeeded.
        let acts: Vec<_> = BATTERY
            .iter()
            .copied()
            .filter(|(n, _)| layer != PidNamespace || *n != "signal_pid_1")
            .collect();
        let ran = host.run(&[layer], &acts);
        for (act, _) in &acts {
            let listed = RESTS_ON_ONE_LAYER
                .iter()
                .any(|(l, whom, a, _)| *l == layer && a == act && applies(*whom));
            if (verdict(&ran.stdout, act) == "done") != listed {
                broken.push(format!(
                    "without {layer:?}: {act}: {}, listed: {listed}",
                    verdict(&ran.stdout, act)
                ));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    assert!(host.witness.lives());
    assert_eq!(
        std::fs::read(host.data.path().join("file")).unwrap(),
        b"data"
    );
}

trial!(Everyone, an_unavailable_layer_stops_the_run);
/// A layer that was asked for and is unavailable stops the run. Without no_new_privs the kernel demands CAP_SYS_ADMIN
/// for seccomp. It demands the same for Landlock, but the Landlock library sets the bit itself. A plain user's /proc
/// demands a pid namespace.
fn an_unavailable_layer_stops_the_run() {
    assert_eq!(ConfinedRun::sh("true").run().code(), Some(0), "the control");
    let stops = |without: &[Layer], step: &str| {
        let stopped = ConfinedRun::sh("echo STARTED").without(without).try_run();
        let error = stopped.map(|ran| ran.all()).expect_err(step);
        assert!(
            crate::confined_run::chain(&error).contains(step),
            "{}",
            crate::confined_run::chain(&error)
        );
    };
    stops(&[NoNewPrivs, Landlock], "seccomp");
    if !is_root() && !at_landlock() {
        stops(&[PidNamespace], "/proc");
    }
}

trial!(Everyone, the_record_lists_exactly_the_active_layers);
fn the_record_lists_exactly_the_active_layers() {
    let expected = |without: Option<Layer>| {
        let of_root = [Layer::LeasedUid, Layer::Cgroup];
        let always = [Layer::MountNamespace, Layer::Guardian]
            .into_iter()
            .chain(of_root.into_iter().filter(|_| is_root()));
        let mut list: Vec<Layer> = SWITCHES
            .into_iter()
            .chain(always)
            .filter(|l| crate::confined_run::level().has(*l) && Some(*l) != without)
            .collect();
        list.sort();
        list
    };
    for without in [
        None,
        Some(Seccomp),
        Some(Landlock),
        Some(UserNamespace),
        Some(NetNamespace),
        Some(CgroupNamespace),
    ] {
        let confined = ConfinedRun::sh("true").without(without.as_slice());
        assert!(Path::new(confined.workspace()).exists());
        let ran = confined.run();
        let mut said: Vec<Layer> = ran.layers.iter().map(|(layer, _)| *layer).collect();
        said.sort();
        assert_eq!(said, expected(without), "{}", ran.all());
    }
}
