//! Level `landlock`: what is particular to it. The program sees the host's own tree, and a guardian stands where pid 1
//! would. What the table of `sandbox::promises` says of this level is what the trials find.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sandbox::outcome::Stop;
use sandbox::promises::{self, ACTS, PromiseStatus};
use sandbox::spec::{ConfinementLevel, Layer, SharedMemory, Terminal};

use crate::hood::{
    Hood, attempts, chain, host_dir, is_root, landlock_abi, shown_dir, unconfined, verdict,
};
use crate::p07_others::{Held as Running, Witness, host_pids};
use crate::p10_limits::HIDE;
use crate::p11_deadline::{kill_marked, left_of, new_marker, wait_for_none};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    (
        "every_act_has_its_trial",
        For::Everyone,
        every_act_has_its_trial,
    ),
    ("what_is_not_held", For::Everyone, what_is_not_held),
    (
        "the_rest_of_the_project",
        For::Everyone,
        the_rest_of_the_project,
    ),
    (
        "owner_only_data_is_said_to_be",
        For::Root,
        owner_only_data_is_said_to_be,
    ),
    ("what_can_be_listed", For::Everyone, what_can_be_listed),
    ("what_proc_tells", For::Everyone, what_proc_tells),
    (
        "keys_and_names_of_all",
        For::Everyone,
        keys_and_names_of_all,
    ),
    (
        "watches_on_directories",
        For::Everyone,
        watches_on_directories,
    ),
    (
        "signals_by_input_and_output",
        For::Everyone,
        signals_by_input_and_output,
    ),
    (
        "signals_at_the_end_of_a_child",
        For::Everyone,
        signals_at_the_end_of_a_child,
    ),
    (
        "pairs_of_sockets_work",
        For::Everyone,
        pairs_of_sockets_work,
    ),
    (
        "no_typing_into_its_terminal",
        For::Everyone,
        no_typing_into_its_terminal,
    ),
    (
        "shared_memory_of_the_host",
        For::Everyone,
        shared_memory_of_the_host,
    ),
    (
        "a_killed_guardian_is_told_of",
        For::Everyone,
        a_killed_guardian_is_told_of,
    ),
    (HIDING, For::Root, what_proc_hides_dies_too),
    ("required_layers", For::Everyone, required_layers),
    (
        "a_failed_launch_reads_nothing",
        For::Everyone,
        a_failed_launch_reads_nothing,
    ),
    (
        "a_probe_leaves_nothing_behind",
        For::Everyone,
        a_probe_leaves_nothing_behind,
    ),
    (
        "a_probe_kills_nobodys_processes_but_its_own",
        For::Root,
        a_probe_kills_nobodys_processes_but_its_own,
    ),
    (
        "each_layer_owns_its_acts",
        For::Everyone,
        each_layer_owns_its_acts,
    ),
];

const HIDING: &str = "what_proc_hides_dies_too";

/// Where each act of the table is tried at this level.
#[rustfmt::skip]
const TRIED: &[(&str, &[&str])] = &[
    ("p02_inputs::content_and_metadata_stay", &[
        "write_data", "write_docs", "truncate_data", "chmod_data", "utime_data", "xattr_data", "link_data"]),
    ("landlock_level::the_rest_of_the_project", &["read_project", "list_project"]),
    ("landlock_level::what_is_not_held", &["stat_project", "lock_data"]),
    ("p03_runtime::files_of_the_host_are_absent", &["read_secret_file", "read_host_tmp"]),
    ("p04_writes::files_are_made_in_its_own_directories_only", &["write_site", "write_api_py", "write_system"]),
    ("p04_writes::another_analysis_is_absent", &["write_other_workspace"]),
    ("p04_writes::shared_memory_and_tmp_are_private", &["write_host_tmp", "write_host_shm"]),
    ("p04_writes::times_of_devices_stay", &["utime_device"]),
    ("p06_services::postgresql", &["postgres_tcp", "postgres_socket", "postgres_abstract"]),
    ("p06_services::any_service", &["unix_datagram", "tcp_fast_open", "udp", "dns"]),
    ("p06_services::kinds_of_sockets", &["vsock", "packet", "netlink"]),
    ("p09_streams::an_inherited_descriptor_does_not_arrive", &["inherited_descriptor"]),
    ("p06_services::secrets_stay_outside", &["secret_environment"]),
    ("p07_others::processes_of_the_host", &["signal_others", "ptrace_others", "proc_of_others", "limits_of_others"]),
    ("p07_others::pid_1_is_out_of_reach", &["signal_guardian", "init_memory"]),
    ("landlock_level::signals_by_input_and_output", &["signal_by_descriptor"]),
    ("landlock_level::keys_and_names_of_all", &["system_v_ipc", "message_queue"]),
    ("p07_others::what_others_open_and_start", &["watch_system"]),
    ("p08_privilege::ids", &["set_user_id"]),
    ("p08_privilege::files_that_carry_privilege", &["set_user_id_file"]),
    ("p08_privilege::namespaces", &["user_namespace"]),
    ("p08_privilege::mounts", &["mount"]),
    ("p08_privilege::kernel_machinery", &["io_uring", "bpf", "perf", "keyring", "userfaultfd"]),
    ("p08_privilege::foreign_calls", &["foreign_abi"]),
    ("landlock_level::no_typing_into_its_terminal", &["terminal_injection"]),
    ("p11_deadline::a_fork_bomb_dies", &["fork_bomb"]),
    ("p10_limits::watched_memory_of_one", &["memory_bomb"]),
    ("p10_limits::a_loop_of_ooms_ends_the_run", &["oom_loop"]),
    ("p10_kernel_memory::huge_pages", &["uncharged_memory"]),
    ("p10_limits::disk_of_parallel_writers", &["disk_bomb"]),
    ("p10_limits::files_in_many_directories", &["file_bomb"]),
    ("p10_watch::disk_held_by_blocked_calls", &["disk_held_by_calls"]),
    ("p10_watch::files_unlinked_but_open", &["unlinked_files"]),
    ("p11_deadline::a_daemon_dies", &["daemon_outlives_timeout"]),
    ("p11_slow_death::large_page_tables_do_not_hide_a_timeout", &["slow_death"]),
    ("p12_runner_death::a_killed_runner_takes_the_analysis_with_it", &["daemon_outlives_runner"]),
];
/// Tried where they are kept: by whoever reads the streams, and by whoever collects.
const TRIED_ELSEWHERE: &[&str] = &["log_bomb", "symlink_farm", "hard_links"];

fn every_act_has_its_trial() {
    for act in ACTS {
        let times = TRIED.iter().filter(|(_, acts)| acts.contains(&act.name));
        let elsewhere = TRIED_ELSEWHERE.contains(&act.name);
        assert_eq!(times.count() + usize::from(elsewhere), 1, "{}", act.name);
    }
    for (trial, acts) in TRIED {
        assert!(crate::is_tried_at_landlock(trial), "{trial} is not tried");
        for name in *acts {
            assert!(ACTS.iter().any(|act| act.name == *name), "{name}");
        }
    }
}

fn table(name: &str) -> PromiseStatus {
    let act = ACTS.iter().find(|act| act.name == name).unwrap();
    promises::promise_status(act, ConfinementLevel::Landlock, landlock_abi())
}

/// The two acts that the table says are not held, and are not.
fn what_is_not_held() {
    let dir = shown_dir();
    let data = dir.path().join("data");
    fs::create_dir(&data).unwrap();
    fs::write(data.join("file"), "measured").unwrap();
    fs::write(dir.path().join("secret"), "secret").unwrap();
    let acts: &[(&str, &str)] = &[
        (
            "stat_project",
            "assert os.stat(DIR + '/secret').st_size == 6",
        ),
        (
            "lock_data",
            "import fcntl; fcntl.flock(os.open(DIR + '/data/file', os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)",
        ),
        // Content stays closed.
        ("read_project", "open(DIR + '/secret').read()"),
    ];
    let script = attempts(&format!("DIR = {:?}", dir.path()), acts);
    let ran = Hood::python(&script).view(&data, "data").run();
    for (name, _) in acts {
        let done = verdict(&ran.stdout, name) == "done";
        assert_eq!(done, !table(name).is_kept(), "{name}\n{}", ran.all());
        assert_eq!(verdict(&unconfined(&script), name), "done");
    }
    // As many as were tried here are not held, and no more.
    let open: Vec<_> = ACTS
        .iter()
        .filter(|act| !table(act.name).is_kept())
        .collect();
    assert_eq!(open.len(), 2);
}

fn the_rest_of_the_project() {
    let dir = shown_dir();
    let project = dir.path().join("project");
    for inner in ["data", "docs", "site", ".git"] {
        fs::create_dir_all(project.join(inner)).unwrap();
    }
    for file in [
        "api.py",
        ".env",
        "data/x",
        "docs/y",
        "site/z",
        ".git/config",
    ] {
        fs::write(project.join(file), "text").unwrap();
    }
    let acts: &[(&str, &str)] = &[
        ("list", "os.listdir(P)"),
        ("list_above", "os.listdir(P + '/..')"),
        ("list_site", "os.listdir(P + '/site')"),
        ("read", "open(P + '/.env').read()"),
        ("read_by_data", "open(P + '/data/../.env').read()"),
        (
            "read_by_link",
            "os.symlink(P + '/.env', 'link'); open('link').read()",
        ),
        ("read_from_there", "os.chdir(P); open('.env').read()"),
        ("read_git", "open(P + '/.git/config').read()"),
        (
            "read_by_directory",
            "open('.env', opener=lambda n, f: os.open(n, f, dir_fd=os.open(P, os.O_PATH))).read()",
        ),
        ("write", "open(P + '/api.py', 'a')"),
        ("make", "open(P + '/site/new', 'w')"),
        ("remove", "os.unlink(P + '/site/z')"),
        ("rename", "os.rename(P + '/docs', P + '/gone')"),
        ("execute", "os.execv(P + '/api.py', ['x'])"),
    ];
    let script = attempts(&format!("P = {project:?}"), acts);
    let ran = Hood::python(&script)
        .view(&project.join("data"), "data")
        .view(&project.join("docs"), "docs")
        .run();
    for (act, _) in acts {
        let inside = verdict(&ran.stdout, act);
        assert!(inside.starts_with("refused"), "{act}: {inside}");
    }
    let shown =
        Hood::python("print(open('data/x').read(), os.listdir('docs'), os.readlink('data'))")
            .view(&project.join("data"), "data")
            .view(&project.join("docs"), "docs")
            .run();
    let line = format!("text ['y'] {}", project.join("data").display());
    assert!(shown.said(&line), "{}", shown.all());
    let control = unconfined(&format!("os.chdir({:?})\n{script}", dir.path()));
    for (act, _) in &acts[..acts.len() - 1] {
        assert_eq!(verdict(&control, act), "done", "control of {act}");
    }
}

/// Root's files that nobody else may read cannot be shown under a leased uid: the run is refused, and says which.
fn owner_only_data_is_said_to_be() {
    let dir = shown_dir();
    let data = dir.path().join("data");
    fs::create_dir(&data).unwrap();
    fs::write(data.join("closed"), "measured").unwrap();
    let run = |mode| {
        fs::set_permissions(data.join("closed"), Permissions::from_mode(mode)).unwrap();
        Hood::sh("cat data/closed").view(&data, "data").try_run()
    };
    let text = chain(&run(0o600).map(|ran| ran.all()).unwrap_err());
    assert!(
        text.contains("data/closed") && text.contains("owner"),
        "{text}"
    );
    assert_eq!(run(0o644).unwrap().stdout, "measured");
}

fn what_can_be_listed() {
    let look = "
def can(act):
    try: act(); return True
    except OSError: return False
print('listed', *[d for d in ('/', '/etc', '/dev', '/dev/pts', '/dev/shm', '/proc', '/sys', '/home', '/root', '/run', '/var', '/var/log', '/tmp', '/var/tmp', '/srv', '/opt', '/mnt') if can(lambda: os.listdir(d))])
print('opened', *[f for f in ('/etc/fstab', '/etc/shadow', '/etc/gshadow', '/etc/passwd-', '/etc/hostname', '/etc/machine-id', '/etc/gitconfig', '/etc/resolv.conf', '/etc/environment',
                              '/dev/tty', '/dev/ptmx', '/dev/kmsg', '/dev/mem', '/dev/vda', '/dev/fuse', '/dev/net/tun', '/sys/class/net', '/var/log/dpkg.log') if can(lambda: os.open(f, os.O_RDONLY))])
print('used', *[f for f in ('/etc/passwd', '/etc/group', '/etc/hosts', '/etc/nsswitch.conf', '/etc/ld.so.cache', '/usr/bin/env', '/dev/null', '/dev/zero', '/dev/urandom', '/proc/cpuinfo', '/proc/meminfo') if can(lambda: os.open(f, os.O_RDONLY))])
print('terminal', can(lambda: os.openpty()))
print('changed', *[f for f in ('/etc/passwd', '/etc/group', '/etc/hosts', '/etc/nsswitch.conf') if can(lambda: os.open(f, os.O_RDWR)) or can(lambda: os.link(f, 'linked'))])
";
    let ran = Hood::python(look).run();
    assert!(
        ran.said("listed")
            && ran.said("opened")
            && ran.said("changed")
            && ran.said("terminal False"),
        "{}",
        ran.all()
    );
    let used = "used /etc/passwd /etc/group /etc/hosts /etc/nsswitch.conf /etc/ld.so.cache /usr/bin/env /dev/null /dev/zero /dev/urandom /proc/cpuinfo /proc/meminfo";
    assert!(ran.said(used), "{}", ran.all());
    let control = unconfined(look);
    assert!(
        control.contains("listed / /etc /dev") && control.contains("opened /etc/fstab"),
        "{control}"
    );
    assert!(control.contains("terminal True"), "{control}");
}

/// Of the host's processes and of its network, mounts and groups it tells nothing; of the program itself what it needs.
fn what_proc_tells() {
    let name = |pid: u32| format!("/proc/{pid}");
    let runner = name(std::process::id());
    let script = format!("RUNNER = {runner:?}\n{}", "
closed = [f'{d}/{f}' for d in ('/proc/1', RUNNER, '/proc/%d' % os.getppid()) for f in ('status', 'cmdline', 'environ', 'maps', 'mem', 'fd', 'root/etc/hostname', 'cwd', 'net/tcp')]
closed += ['/proc/self/' + f for f in ('net/tcp', 'net/unix', 'net/dev', 'mountinfo', 'mounts', 'cgroup', 'task', 'root', 'attr/current')]
closed += ['/proc/' + f for f in ('net/tcp', 'net/unix', 'mounts', 'kallsyms', 'keys', 'modules', 'cmdline', 'sysvipc/shm', 'sys/kernel/hostname', 'sys/kernel/random/boot_id', 'locks', 'partitions')]
def opens(path):
    try: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)); return True
    except OSError: return False
print('opened', *[p for p in closed if opens(p)])
print('own', *['self/' + f for f in ('maps', 'stat', 'statm', 'cmdline', 'fd', 'environ') if opens('/proc/self/' + f)])
pid = os.fork()
if pid == 0: print('child', opens('/proc/self/status'), opens('/proc/%d/status' % os.getppid()), flush=True); os._exit(0)
os.wait()
");
    let ran = Hood::python(&script).run();
    assert!(ran.said("opened"), "{}", ran.all());
    assert!(
        ran.said("own self/maps self/stat self/statm self/cmdline self/fd self/environ"),
        "{}",
        ran.all()
    );
    let control = unconfined(&script);
    for path in [
        "/proc/1/status",
        "/proc/self/net/tcp",
        "/proc/self/mountinfo",
        "/proc/net/unix",
        "/proc/mounts",
    ] {
        assert!(control.contains(path), "{path} in {control}");
    }
}

/// Keys and names of which all of the host has one space.
fn keys_and_names_of_all() {
    let key = 0x4700_0000 + std::process::id() % 0xff_ffff;
    let name = format!("fumehood-level-{}", std::process::id());
    let acts: &[(&str, &str)] = &[
        ("segment", "sc(29, KEY, 0, 0)"),
        ("semaphores", "sc(64, KEY, 0, 0)"),
        ("messages", "sc(68, KEY, 0)"),
        ("private_segment", "sc(31, sc(29, 0, 4096, 0o1600), 0, 0)"),
        ("private_semaphores", "sc(66, sc(64, 0, 1, 0o1600), 0, 0)"),
        ("private_messages", "sc(71, sc(68, 0, 0o1600), 0, 0)"),
        (
            "list_segments",
            "sc(31, 0, 14, ctypes.create_string_buffer(256))",
        ),
        ("queue", "sc(240, ctypes.c_char_p(NAME), 2, 0o666, 0)"),
        (
            "new_queue",
            "sc(240, ctypes.c_char_p(NAME + b'-new'), 0o102, 0o666, 0); sc(241, ctypes.c_char_p(NAME + b'-new'))",
        ),
    ];
    let setup = format!("KEY, NAME = {key}, {name:?}.encode()");
    let make = format!(
        "{setup}\nfor made in (libc.shmget(KEY, 4096, 0o1666), libc.semget(KEY, 1, 0o1666), libc.msgget(KEY, 0o1666), libc.syscall(240, NAME, 0o102, 0o666, None)):\n    assert made >= 0"
    );
    unconfined(&make);
    let ran = Hood::python(&attempts(&setup, acts)).run();
    let control = unconfined(&attempts(&setup, acts));
    unconfined(&format!(
        "{setup}\nlibc.shmctl(libc.shmget(KEY, 0, 0), 0, None); libc.semctl(libc.semget(KEY, 0, 0), 0, 0); libc.msgctl(libc.msgget(KEY, 0), 0, None); libc.syscall(241, NAME)"
    ));
    for (act, _) in acts {
        // As on a kernel that was built without.
        assert_eq!(verdict(&ran.stdout, act), "refused ENOSYS", "{}", ran.all());
        assert_eq!(verdict(&control, act), "done", "control of {act}");
    }
}

/// A watch on a directory that can be named tells which names appear in it.
fn watches_on_directories() {
    let dir = host_dir();
    let acts: &[(&str, &str)] = &[
        (
            "foreign",
            "sc(254, sc(294, 0), ctypes.c_char_p(DIR), 0x100)",
        ),
        (
            "tmp",
            "sc(254, sc(294, 0), ctypes.c_char_p(b'/tmp'), 0x100)",
        ),
        (
            "by_descriptor",
            "sc(254, sc(294, 0), ctypes.c_char_p(b'/proc/self/fd/%d' % os.open(DIR, os.O_PATH)), 0x100)",
        ),
    ];
    let script = attempts(&format!("DIR = {:?}.encode()", dir.path()), acts);
    let (ran, control) = (Hood::python(&script).run(), unconfined(&script));
    for (act, _) in acts {
        let inside = verdict(&ran.stdout, act);
        assert!(inside.starts_with("refused"), "{act}: {inside}");
        assert_eq!(verdict(&control, act), "done", "control of {act}");
    }
}

/// A process of the host's that ends when it is sent SIGIO or SIGUSR1, in a group of its own.
fn sensitive() -> Child {
    Command::new("/bin/sleep")
        .arg("600")
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap()
}

/// Input and output can raise a signal in whichever process is named for it; so can a descriptor of a process.
fn signals_by_input_and_output() {
    let script = |pid: u32| {
        let ways: &[(&str, &str)] = &[
            (
                "owner",
                "import fcntl; fcntl.fcntl(a, fcntl.F_SETOWN, PID); go()",
            ),
            (
                "group",
                "import fcntl; fcntl.fcntl(a, fcntl.F_SETOWN, -PID); go()",
            ),
            (
                "owner_ex",
                "import fcntl; fcntl.fcntl(a, 15, struct.pack('ii', 1, PID)); go()",
            ),
            (
                "ioctl",
                "import fcntl; fcntl.ioctl(a, 0x8901, struct.pack('i', PID)); go()",
            ),
            (
                "descriptor",
                "signal.pidfd_send_signal(os.pidfd_open(PID), signal.SIGUSR1)",
            ),
            (
                "queue",
                "sc(129, PID, signal.SIGUSR1, ctypes.create_string_buffer(struct.pack('iii', signal.SIGUSR1, 0, -1), 128))",
            ),
        ];
        attempts(
            &format!(
                "PID = {pid}\na, b = socket.socketpair()\ndef go():\n    import fcntl\n    fcntl.fcntl(a, fcntl.F_SETFL, fcntl.fcntl(a, fcntl.F_GETFL) | os.O_ASYNC); b.send(b'x')\n"
            ),
            ways,
        )
    };
    let mut witness = sensitive();
    let ran = Hood::python(&script(witness.id())).run();
    assert_eq!(ran.code(), Some(0), "{}", ran.all());
    assert!(
        witness.try_wait().unwrap().is_none(),
        "it was reached: {}",
        ran.all()
    );
    for way in ["descriptor", "queue"] {
        assert!(
            verdict(&ran.stdout, way).starts_with("refused"),
            "{}",
            ran.all()
        );
    }
    unconfined(&script(witness.id()));
    let until = Instant::now() + Duration::from_secs(20);
    while witness.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "the control reached nobody");
    }
}

/// The signal that a child's end sends goes to its parent. An orphan's parent is the guardian: it must be no other
/// than SIGCHLD by then.
fn signals_at_the_end_of_a_child() {
    let source = r#"
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
    int way[2];
    pipe(way);
    if (fork() == 0) {
        /* A child whose end is a SIGKILL, and which outlives its parent. */
        if (syscall(SYS_clone, SIGKILL, 0, 0, 0, 0) == 0) {
            char c;
            close(way[1]); read(way[0], &c, 1);
            _exit(0);
        }
        _exit(0);
    }
    wait(0);
    close(way[1]); close(way[0]);
    /* CLONE_PARENT makes a sibling: the guardian's child. */
    long sibling = syscall(SYS_clone, CLONE_PARENT | SIGKILL, 0, 0, 0, 0);
    if (sibling == 0) _exit(0);
    usleep(200000);
    /* The control: to a parent that lives it is what was asked for. */
    if (fork() == 0) {
        if (syscall(SYS_clone, SIGKILL, 0, 0, 0, 0) == 0) _exit(0);
        sleep(30); _exit(0);
    }
    int status;
    wait(&status);
    printf("sibling %s, killed by %d\n", sibling < 0 ? "refused" : "made", WTERMSIG(status));
    return 7;
}"#;
    let mut hood = Hood::new(&["/bin/true"]);
    let program = hood.workspace().join("ends");
    crate::hood::compile(source, &program);
    hood.command(&[&program]);
    let ran = hood.run();
    assert_eq!((ran.code(), ran.stop()), (Some(7), None), "{}", ran.all());
    assert!(
        ran.outcome.all_dead && ran.said("sibling refused, killed by 9"),
        "{}",
        ran.all()
    );
}

fn pairs_of_sockets_work() {
    let script = "
import asyncio, concurrent.futures
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    a, b = socket.socketpair(type=kind); a.sendall(b'hello'); assert b.recv(5) == b'hello'
    r, w = os.pipe(); os.write(w, b'passed')
    if os.fork() == 0: socket.send_fds(a, [b'x'], [r]); os._exit(0)
    os.close(r); os.wait(); fd = socket.recv_fds(b, 1, 1)[1][0]; assert os.read(fd, 6) == b'passed'
for refused in (lambda: socket.socketpair(type=socket.SOCK_DGRAM), lambda: a.connect('x'), lambda: a.bind('x'), lambda: a.listen()):
    try: refused(); print('DID')
    except OSError: pass
async def main():
    process = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)
    assert (await process.communicate(b'x'))[0] == b'x'
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, lambda: 5) == 5
    reader, writer = await asyncio.open_connection(sock=a); b.send(b'line\\n'); assert await reader.readline() == b'line\\n'
a, b = socket.socketpair()
asyncio.run(main())
with concurrent.futures.ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, [-1, -2])) == [1, 2]
print('PAIRED')
";
    let ran = Hood::python(script).run();
    assert!(
        ran.said("PAIRED") && !ran.stdout.contains("DID"),
        "{}",
        ran.all()
    );
}

/// The terminal that the program is given is one of the host's. It is its own all the same, and it types into none.
fn no_typing_into_its_terminal() {
    let script = "
import glob
for name, command in (('sti', 0x5412), ('linux', 0x541c), ('cons', 0x541d), ('size', 0x5413)):
    for high in (0, 1 << 32, 0xffffffff << 32):
        result = libc.syscall(ctypes.c_long(16), ctypes.c_long(0), ctypes.c_ulong(command | high), ctypes.create_string_buffer(b'Q', 64))
        print(name, 'did' if result == 0 else errno.errorcode[ctypes.get_errno()])
own = os.ttyname(0) if os.isatty(0) else 'none'
print('tty', os.isatty(0) and os.isatty(1))
for n in range(64):
    path = '/dev/pts/%d' % n
    try: os.open(path, os.O_RDWR | os.O_NOCTTY); print('OPENED' if path != own else 'own', path)
    except OSError: pass
print('over')
";
    let mut hood = Hood::python(script);
    hood.spec.terminal = Terminal::Own {
        rows: 24,
        columns: 80,
    };
    // A terminal of the host's, for the control.
    let held =
        rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY)
            .unwrap();
    rustix::pty::grantpt(&held).unwrap();
    rustix::pty::unlockpt(&held).unwrap();
    let other = rustix::pty::ptsname(&held, Vec::new()).unwrap();
    fs::File::options()
        .read(true)
        .write(true)
        .open(other.to_str().unwrap())
        .unwrap();
    let ran = hood.run();
    for name in ["sti", "linux", "cons"] {
        assert_eq!(
            ran.stdout.matches(&format!("{name} EPERM")).count(),
            3,
            "{}",
            ran.all()
        );
    }
    assert_eq!(ran.stdout.matches("size did").count(), 3, "{}", ran.all());
    assert!(
        ran.said("tty True") && ran.said("over") && !ran.stdout.contains("OPENED"),
        "{}",
        ran.all()
    );
}

fn shared_memory_of_the_host() {
    let name = format!("fumehood-shm-{}", std::process::id());
    let script = format!(
        "import glob\ntry: open('/dev/shm/{name}', 'w').write('x'); print('made')\nexcept OSError: print('refused')\n\
         try: from multiprocessing import Lock; Lock(); print('lock')\nexcept OSError: print('no lock')"
    );
    let closed = Hood::python(&script).run();
    assert!(
        closed.said("refused") && closed.said("no lock"),
        "{}",
        closed.all()
    );
    let path = std::path::Path::new("/dev/shm").join(&name);
    assert!(!path.exists());
    let mut hood = Hood::python(&script);
    hood.spec.shared_memory = SharedMemory::Host;
    let open = hood.run();
    // As it says: the host's.
    let there = path.exists();
    let _gone = fs::remove_file(&path);
    assert!(
        open.said("made") && open.said("lock") && there,
        "{}",
        open.all()
    );
}

/// Nobody inside can kill it. Whoever can from outside, the run's owner or root, makes the proof impossible that all is
/// dead, where neither a group nor a uid of its own tells what is the run's; the outcome says so.
fn a_killed_guardian_is_told_of() {
    let mark = new_marker();
    let held = Running::start(
        Hood::python(""),
        &format!(
            "# {mark}\nif os.fork() == 0: os.setsid(); import time; time.sleep(600)\nhold()\n"
        ),
    );
    let pids = host_pids(&mark);
    let parent_of = |pid: i32| -> i32 {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("PPid:"));
        line.unwrap().trim().parse().unwrap()
    };
    let guardian = pids
        .iter()
        .map(|pid| parent_of(*pid))
        .find(|parent| !pids.contains(parent))
        .unwrap();
    kill_process(Pid::from_raw(guardian).unwrap(), Signal::KILL).unwrap();
    let ran = held.finish();
    assert_eq!(ran.outcome.exit, None, "{}", ran.all());
    assert_eq!(ran.outcome.all_dead, is_root(), "{}", ran.all());
    // As root it was made true. As a plain user the sweeper strikes when the guardian is gone, where Landlock knows of
    // signals; nobody is there to prove it, or waits for it.
    match is_root() {
        true => assert_eq!(left_of(&mark), [0i32; 0], "{}", ran.all()),
        false if sandbox::landlock_abi() >= 6 => wait_for_none(&mark),
        false => {}
    }
    kill_marked(&mark);
}

/// On many shared hosts /proc is mounted with hidepid: it then hides whatever its reader may not trace, and a process
/// can make itself such. Runs itself again where it is so.
fn what_proc_hides_dies_too() {
    const INNER: &str = "FUMEHOOD_TEST_HIDEPID";
    if std::env::var_os(INNER).is_none() {
        let hide = "mount -t proc -o hidepid=2 proc /proc && exec \"$@\"";
        let again = Command::new("unshare")
            .args([
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                hide,
                "sh",
            ])
            .arg(std::env::current_exe().unwrap())
            .args(["__plain_trial", &format!("landlock_level::{HIDING}")])
            .env(INNER, "1")
            .output()
            .unwrap();
        let complaint = String::from_utf8_lossy(&again.stderr);
        assert!(again.status.success(), "{complaint}");
        return;
    }
    let marker = new_marker();
    let script = format!(
        "# {marker}
import signal
{HIDE}
if HIDDEN: hide()
for n in (signal.SIGTERM, signal.SIGHUP): signal.signal(n, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, b'up\\n')
        while True: signal.pause()
    os._exit(0)
os.wait()
while True: signal.pause()
"
    );
    // The control: those that do not hide.
    for hidden in ["False", "True"] {
        for with_group in [true, false] {
            let mut hood = Hood::python(&script.replace("HIDDEN", hidden))
                .limits(|l| (l.wall_ms, l.grace_ms) = (1500, 100));
            hood.with_group = with_group;
            let ran = hood.run();
            let left = left_of(&marker);
            kill_marked(&marker);
            assert_eq!(left, [0i32; 0], "{hidden} {with_group} {}", ran.all());
            assert!(
                ran.said("up") && ran.outcome.all_dead,
                "hidden: {hidden}, group: {with_group}\n{}",
                ran.all()
            );
            assert_eq!(ran.stop(), Some(Stop::WallTime), "{}", ran.all());
            assert!(
                ran.outcome.exit.is_some(),
                "{hidden} {with_group} {}",
                ran.all()
            );
        }
    }
}

fn required_layers() {
    let run = |layers: &[Layer]| {
        let mut hood = Hood::sh("echo x > ran; echo STARTED");
        hood.spec.required = BTreeSet::from_iter(layers.iter().copied());
        hood.try_run()
    };
    for absent in [
        Layer::UserNamespace,
        Layer::MountNamespace,
        Layer::NetNamespace,
    ] {
        let text = chain(
            &run(&[Layer::Landlock, absent])
                .map(|ran| ran.all())
                .unwrap_err(),
        );
        assert!(
            text.contains("required") && text.contains(absent.as_str()),
            "{text}"
        );
    }
    let there = [
        Layer::Landlock,
        Layer::Seccomp,
        Layer::Guardian,
        Layer::NoNewPrivs,
    ];
    assert!(run(&there).unwrap().said("STARTED"));
    // A group is there for root alone, here.
    assert_eq!(run(&[Layer::Cgroup]).is_ok(), is_root());
}

/// A level that cannot be had is followed by another: the input is then still whole.
fn a_failed_launch_reads_nothing() {
    let start = |required: &[Layer]| {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        rustix::io::write(&write, b"given").unwrap();
        drop(write);
        let kept = rustix::io::fcntl_dupfd_cloexec(&read, 3).unwrap();
        let mut hood = Hood::sh("cat");
        hood.spec.required = BTreeSet::from_iter(required.iter().copied());
        hood.stdin = Some(read);
        let ran = hood.try_run();
        let mut left = String::new();
        fs::File::from(kept).read_to_string(&mut left).unwrap();
        (ran, left)
    };
    let (failed, left) = start(&[Layer::MountNamespace]);
    assert!(failed.is_err());
    assert_eq!(left, "given");
    let (ran, left) = start(&[]);
    assert_eq!((ran.unwrap().stdout.as_str(), left.as_str()), ("given", ""));
}

fn a_probe_leaves_nothing_behind() {
    let children = || {
        let own = std::process::id();
        let tasks = fs::read_dir(format!("/proc/{own}/task")).unwrap().flatten();
        let texts = tasks.filter_map(|t| fs::read_to_string(t.path().join("children")).ok());
        texts.collect::<Vec<_>>().concat()
    };
    let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    for (level, own) in [
        (ConfinementLevel::Full, Layer::MountNamespace),
        (ConfinementLevel::Landlock, Layer::Guardian),
    ] {
        let launcher = std::path::Path::new("/proc/self/exe");
        let layers = sandbox::probe::try_level(launcher, level).unwrap();
        let has = |layer| layers.iter().any(|(l, _)| *l == layer);
        assert!(
            has(own) && has(Layer::Landlock) && has(Layer::Seccomp),
            "{layers:?}"
        );
        assert!(!std::path::Path::new("/tmp/scidex-analysis-probe").exists());
        assert_eq!(children().trim(), "");
        assert_eq!(descriptors(), before);
    }
}

/// As root a probe takes the uid `nobody`, which services of the host have too.
fn a_probe_kills_nobodys_processes_but_its_own() {
    const NOBODY: u32 = 65_534;
    let mut service = Command::new("sleep")
        .arg("300")
        .uid(NOBODY)
        .gid(NOBODY)
        .spawn()
        .unwrap();
    for level in [ConfinementLevel::Full, ConfinementLevel::Landlock] {
        let launcher = std::path::Path::new("/proc/self/exe");
        sandbox::probe::try_level(launcher, level).unwrap();
        assert_eq!(service.try_wait().unwrap(), None, "{level:?}");
    }
    service.kill().unwrap();
    service.wait().unwrap();
}

/// Two runs that differ in one layer: with it the act is refused, without it the act succeeds.
#[rustfmt::skip]
const OWNED: &[(Layer, &str, &str)] = &[
    (Layer::Landlock, "read a file of the host", "open(DIR + '/file').read()"),
    (Layer::Landlock, "list a directory of the host", "os.listdir(DIR)"),
    (Layer::Landlock, "write where anyone may", "open(DIR + '/made', 'w').close()"),
    (Layer::Landlock, "read of another process", "open('/proc/1/cmdline').read()"),
    (Layer::Seccomp, "loopback TCP of the host", "socket.create_connection(('127.0.0.1', TCP))"),
    (Layer::Seccomp, "a datagram socket", "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)"),
    (Layer::Seccomp, "System V memory", "sc(31, sc(29, 0, 4096, 0o1600), 0, 0)"),
    (Layer::Seccomp, "a watch on a directory of the host", "sc(254, sc(294, 0), ctypes.c_char_p(DIR.encode()), 0x100)"),
    (Layer::Seccomp, "priority of a process of its own", "os.setpriority(os.PRIO_PROCESS, os.getpid(), 5)"),
    (Layer::Seccomp, "attributes of files", "open('own', 'w').close(); os.setxattr('own', 'user.x', b'1')"),
    (Layer::Seccomp, "a user namespace", "sc(272, 0x10000000)"),
    (Layer::Seccomp, "a set-user-id file", "open('mine', 'w').close(); sc(90, ctypes.c_char_p(b'mine'), 0o4755)"),
];
/// The same where the host's object is of the program's own uid, which a plain user's is.
#[rustfmt::skip]
const OWNED_BY_UID: &[(Layer, &str, &str)] = &[
    (Layer::Landlock, "a signal to a process of the same user", "os.kill(WITNESS, 0)"),
    (Layer::Seccomp, "the mode of a file of the same user", "os.chmod(DIR + '/file', 0o600); os.chmod(DIR + '/file', 0o644)"),
    (Layer::Seccomp, "the times of a file of the same user", "os.utime(DIR + '/file', (1, 2))"),
    (Layer::Seccomp, "the priority of a process of the same user", "os.setpriority(os.PRIO_PROCESS, WITNESS, 1)"),
];

fn each_layer_owns_its_acts() {
    let dir = host_dir();
    fs::write(dir.path().join("file"), "theirs").unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let witness = Witness::start();
    let setup = format!(
        "DIR, TCP, WITNESS = {:?}, {}, {}",
        dir.path(),
        tcp.local_addr().unwrap().port(),
        witness.pid()
    );
    let mut owned = OWNED.to_vec();
    if !is_root() {
        owned.extend(OWNED_BY_UID);
    }
    let acts: Vec<(&str, &str)> = owned.iter().map(|(_, name, code)| (*name, *code)).collect();
    let run = |without: &[Layer]| {
        Hood::python(&attempts(&setup, &acts))
            .without(without)
            .run()
    };
    let all = run(&[]);
    for layer in [Layer::Landlock, Layer::Seccomp] {
        let without = run(&[layer]);
        for (owner, name, _) in &owned {
            let (on, off) = (verdict(&all.stdout, name), verdict(&without.stdout, name));
            assert!(on.starts_with("refused"), "{name}: {on}");
            assert_eq!(
                off == "done",
                *owner == layer,
                "without {layer:?}, {name}: {off}"
            );
        }
    }
}
