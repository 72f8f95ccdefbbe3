//! What is particular to level `landlock`. The program sees the host's own file tree, and a guardian process does what pid 1
//! does at level `full`. The trials confirm what the table in `sandbox::promises` says about this level.

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
use testkit::harness::{TrialLevel, is_tried_at};
use testkit::{inner_arguments, is_root, trial};

use crate::confined_run::{
    ConfinedRun, attempts, chain, host_dir, landlock_abi, shown_dir, unconfined, verdict,
};
use crate::p07_others::{HeldRun, HostProcess, host_pids};
use crate::p10_limits::HIDE;
use crate::p11_deadline::{kill_marked, left_of, new_marker, up_before_deadline, wait_for_none};

/// Each trial of this level, with the acts of [`ACTS`] that it tries.
#[rustfmt::skip]
const TRIED: &[(&str, &[&str])] = &[
    ("p02_inputs::content_and_metadata_stay", &[
        "write_data", "write_docs", "truncate_data", "chmod_data", "utime_data", "xattr_data", "link_data"]),
    ("landlock_level::the_rest_of_the_project_cannot_be_read", &["read_project", "list_project"]),
    ("landlock_level::acts_listed_as_not_held_succeed", &["stat_project", "lock_data"]),
    ("p03_runtime::files_of_the_host_are_absent", &["read_secret_file", "read_host_tmp"]),
    ("p04_writes::files_are_made_in_its_own_directories_only", &["write_site", "write_api_py", "write_system"]),
    ("p04_writes::another_analysis_is_absent", &["write_other_workspace"]),
    ("p04_writes::shared_memory_and_tmp_are_private", &["write_host_tmp", "write_host_shm"]),
    ("p04_writes::times_of_devices_stay", &["utime_device"]),
    ("p06_services::postgresql_cannot_be_reached", &["postgres_tcp", "postgres_socket", "postgres_abstract"]),
    ("p06_services::services_of_the_host_cannot_be_reached", &["unix_datagram", "tcp_fast_open", "udp", "dns"]),
    ("p06_services::kinds_of_sockets", &["vsock", "packet", "netlink"]),
    ("p09_streams::an_inherited_descriptor_does_not_arrive", &["inherited_descriptor"]),
    ("p06_services::secrets_stay_outside", &["secret_environment"]),
    ("p07_others::processes_of_the_host", &["signal_others", "ptrace_others", "proc_of_others", "limits_of_others"]),
    ("p07_others::pid_1_cannot_be_signalled_or_traced", &["signal_guardian", "init_memory"]),
    ("landlock_level::signals_by_input_and_output", &["signal_by_descriptor"]),
    ("landlock_level::shared_keys_and_names_of_the_host_are_refused", &["system_v_ipc", "message_queue"]),
    ("p07_others::a_program_cannot_observe_files_and_memory_of_other_processes", &["watch_system"]),
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
/// Acts that other tests try: the tests of the code that reads the streams, and of the code that collects outputs.
const TRIED_ELSEWHERE: &[&str] = &["log_bomb", "symlink_farm", "hard_links"];

trial!(Everyone, every_act_has_its_trial, only_at_landlock);
fn every_act_has_its_trial() {
    for act in ACTS {
        let times = TRIED.iter().filter(|(_, acts)| acts.contains(&act.name));
        let elsewhere = TRIED_ELSEWHERE.contains(&act.name);
        assert_eq!(times.count() + usize::from(elsewhere), 1, "{}", act.name);
    }
    for (trial, acts) in TRIED {
        assert!(
            is_tried_at(trial, TrialLevel::Landlock),
            "{trial} is not tried"
        );
        for name in *acts {
            assert!(ACTS.iter().any(|act| act.name == *name), "{name}");
        }
    }
}

fn table(name: &str) -> PromiseStatus {
    let act = ACTS.iter().find(|act| act.name == name).unwrap();
    promises::promise_status(act, ConfinementLevel::Landlock, landlock_abi())
}

trial!(Everyone, acts_listed_as_not_held_succeed, only_at_landlock);
/// The two acts that the table lists as not held do succeed.
fn acts_listed_as_not_held_succeed() {
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
        // The content of the same project's files cannot be read.
        ("read_project", "open(DIR + '/secret').read()"),
    ];
    let script = attempts(&format!("DIR = {:?}", dir.path()), acts);
    let ran = ConfinedRun::python(&script).view(&data, "data").run();
    for (name, _) in acts {
        let done = verdict(&ran.stdout, name) == "done";
        assert_eq!(done, !table(name).is_kept(), "{name}\n{}", ran.all());
        assert_eq!(verdict(&unconfined(&script), name), "done");
    }
    // The table lists exactly the acts tried here as not held.
    let open: Vec<_> = ACTS
        .iter()
        .filter(|act| !table(act.name).is_kept())
        .collect();
    assert_eq!(open.len(), 2);
}

trial!(
    Everyone,
    the_rest_of_the_project_cannot_be_read,
    only_at_landlock
);
fn the_rest_of_the_project_cannot_be_read() {
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
    let ran = ConfinedRun::python(&script)
        .view(&project.join("data"), "data")
        .view(&project.join("docs"), "docs")
        .run();
    for (act, _) in acts {
        let inside = verdict(&ran.stdout, act);
        assert!(inside.starts_with("refused"), "{act}: {inside}");
    }
    let shown = ConfinedRun::python(
        "print(open('data/x').read(), os.listdir('docs'), os.readlink('data'))",
    )
    .view(&project.join("data"), "data")
    .view(&project.join("docs"), "docs")
    .run();
    let line = format!("text ['y'] {}", project.join("data").display());
    assert!(shown.printed(&line), "{}", shown.all());
    let control = unconfined(&format!("os.chdir({:?})\n{script}", dir.path()));
    for (act, _) in &acts[..acts.len() - 1] {
        assert_eq!(verdict(&control, act), "done", "control of {act}");
    }
}

trial!(
    Root,
    owner_only_data_is_refused_with_a_reason,
    only_at_landlock
);
/// Files that only root may read cannot be shown to a leased uid: the run is refused, and the message names them.
fn owner_only_data_is_refused_with_a_reason() {
    let dir = shown_dir();
    let data = dir.path().join("data");
    fs::create_dir(&data).unwrap();
    fs::write(data.join("closed"), "measured").unwrap();
    let run = |mode| {
        fs::set_permissions(data.join("closed"), Permissions::from_mode(mode)).unwrap();
        ConfinedRun::sh("cat data/closed")
            .view(&data, "data")
            .try_run()
    };
    let text = chain(&run(0o600).map(|ran| ran.all()).unwrap_err());
    assert!(
        text.contains("data/closed") && text.contains("owner"),
        "{text}"
    );
    assert_eq!(run(0o644).unwrap().stdout, "measured");
}

trial!(
    Everyone,
    private_directories_and_files_cannot_be_listed_or_opened,
    only_at_landlock
);
fn private_directories_and_files_cannot_be_listed_or_opened() {
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
    let ran = ConfinedRun::python(look).run();
    assert!(
        ran.printed("listed")
            && ran.printed("opened")
            && ran.printed("changed")
            && ran.printed("terminal False"),
        "{}",
        ran.all()
    );
    let used = "used /etc/passwd /etc/group /etc/hosts /etc/nsswitch.conf /etc/ld.so.cache /usr/bin/env /dev/null /dev/zero /dev/urandom /proc/cpuinfo /proc/meminfo";
    assert!(ran.printed(used), "{}", ran.all());
    let control = unconfined(look);
    assert!(
        control.contains("listed / /etc /dev") && control.contains("opened /etc/fstab"),
        "{control}"
    );
    assert!(control.contains("terminal True"), "{control}");
}

trial!(
    Everyone,
    proc_shows_the_program_itself_and_nothing_of_the_host,
    only_at_landlock
);
/// /proc shows nothing of the host's processes, network, mounts and cgroups. The program can read there what it needs
/// about itself.
fn proc_shows_the_program_itself_and_nothing_of_the_host() {
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
    let ran = ConfinedRun::python(&script).run();
    assert!(ran.printed("opened"), "{}", ran.all());
    assert!(
        ran.printed("own self/maps self/stat self/statm self/cmdline self/fd self/environ"),
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

trial!(
    Everyone,
    shared_keys_and_names_of_the_host_are_refused,
    only_at_landlock
);
/// The whole host shares one space of IPC keys and of message queue names.
fn shared_keys_and_names_of_the_host_are_refused() {
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
    let ran = ConfinedRun::python(&attempts(&setup, acts)).run();
    let control = unconfined(&attempts(&setup, acts));
    unconfined(&format!(
        "{setup}\nlibc.shmctl(libc.shmget(KEY, 0, 0), 0, None); libc.semctl(libc.semget(KEY, 0, 0), 0, 0); libc.msgctl(libc.msgget(KEY, 0), 0, None); libc.syscall(241, NAME)"
    ));
    for (act, _) in acts {
        // A kernel without the feature gives the same errno.
        assert_eq!(verdict(&ran.stdout, act), "refused ENOSYS", "{}", ran.all());
        assert_eq!(verdict(&control, act), "done", "control of {act}");
    }
}

trial!(Everyone, watches_on_directories, only_at_landlock);
/// An inotify watch on a directory would report the names that appear in it.
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
    let (ran, control) = (ConfinedRun::python(&script).run(), unconfined(&script));
    for (act, _) in acts {
        let inside = verdict(&ran.stdout, act);
        assert!(inside.starts_with("refused"), "{act}: {inside}");
        assert_eq!(verdict(&control, act), "done", "control of {act}");
    }
}

/// A process of the host, in its own process group, that SIGIO or SIGUSR1 ends.
fn sensitive() -> Child {
    Command::new("/bin/sleep")
        .arg("600")
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap()
}

trial!(Everyone, signals_by_input_and_output, only_at_landlock);
/// After F_SETOWN, input and output on a descriptor send a signal to the process that the caller named. A pidfd and a
/// queued signal can reach any process too.
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
    let ran = ConfinedRun::python(&script(witness.id())).run();
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

trial!(Everyone, signals_at_the_end_of_a_child, only_at_landlock);
/// When a process ends, its parent gets the signal that clone() was given. The guardian becomes the parent of orphans,
/// so an orphan's signal must be SIGCHLD.
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
    let mut confined = ConfinedRun::new(&["/bin/true"]);
    let program = confined.workspace().join("ends");
    crate::confined_run::compile(source, &program);
    confined.command(&[&program]);
    let ran = confined.run();
    assert_eq!((ran.code(), ran.stop()), (Some(7), None), "{}", ran.all());
    assert!(
        ran.outcome.all_dead && ran.printed("sibling refused, killed by 9"),
        "{}",
        ran.all()
    );
}

trial!(Everyone, pairs_of_sockets_work, only_at_landlock);
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
    let ran = ConfinedRun::python(script).run();
    assert!(
        ran.printed("PAIRED") && !ran.stdout.contains("DID"),
        "{}",
        ran.all()
    );
}

trial!(Everyone, no_typing_into_its_terminal, only_at_landlock);
/// The program's terminal is one of the host's. The program can use this terminal, but it can type into no terminal.
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
    let mut confined = ConfinedRun::python(script);
    confined.spec.terminal = Terminal::Own {
        rows: 24,
        columns: 80,
    };
    // A terminal of the host, for the control.
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
    let ran = confined.run();
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
        ran.printed("tty True") && ran.printed("over") && !ran.stdout.contains("OPENED"),
        "{}",
        ran.all()
    );
}

trial!(Everyone, shared_memory_of_the_host, only_at_landlock);
fn shared_memory_of_the_host() {
    let name = format!("fumehood-shm-{}", std::process::id());
    let script = format!(
        "import glob\ntry: open('/dev/shm/{name}', 'w').write('x'); print('made')\nexcept OSError: print('refused')\n\
         try: from multiprocessing import Lock; Lock(); print('lock')\nexcept OSError: print('no lock')"
    );
    let closed = ConfinedRun::python(&script).run();
    assert!(
        closed.printed("refused") && closed.printed("no lock"),
        "{}",
        closed.all()
    );
    let path = std::path::Path::new("/dev/shm").join(&name);
    assert!(!path.exists());
    let mut confined = ConfinedRun::python(&script);
    confined.spec.shared_memory = SharedMemory::Host;
    let open = confined.run();
    // With this option the program uses the host's shared memory.
    let there = path.exists();
    let _gone = fs::remove_file(&path);
    assert!(
        open.printed("made") && open.printed("lock") && there,
        "{}",
        open.all()
    );
}

trial!(Everyone, a_killed_guardian_is_reported, only_at_landlock);
/// No process inside can kill the guardian, but the run's owner and root can. Then nobody can prove that all processes
/// are dead, unless a cgroup or a leased uid identifies them. The outcome reports this.
fn a_killed_guardian_is_reported() {
    let mark = new_marker();
    let held = HeldRun::start(
        ConfinedRun::python(""),
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
    // As root, the leased uid identifies the processes, and all are dead when the run ends. As a plain user, the kill
    // helper kills the processes after the guardian's death, if Landlock can restrict signals. Nobody waits for these
    // deaths or proves them.
    match is_root() {
        true => assert_eq!(left_of(&mark), [0i32; 0], "{}", ran.all()),
        false if sandbox::landlock_abi() >= 6 => wait_for_none(&mark),
        false => {}
    }
    kill_marked(&mark);
}

trial!(
    Root,
    processes_that_hidepid_hides_are_killed,
    only_at_landlock
);
/// Many shared hosts mount /proc with hidepid, which hides processes that the reader may not trace, and a process can make
/// itself untraceable. The trial runs itself again under such a mount.
fn processes_that_hidepid_hides_are_killed() {
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
            .args(inner_arguments!(processes_that_hidepid_hides_are_killed))
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
    // The first round is the control: its processes do not hide.
    for hidden in ["False", "True"] {
        for with_group in [true, false] {
            let ran = up_before_deadline(1500, |wall_ms| {
                let mut confined = ConfinedRun::python(&script.replace("HIDDEN", hidden))
                    .limits(|l| (l.wall_ms, l.grace_ms) = (wall_ms, 100));
                confined.with_group = with_group;
                confined.run()
            });
            let left = left_of(&marker);
            kill_marked(&marker);
            assert_eq!(left, [0i32; 0], "{hidden} {with_group} {}", ran.all());
            assert!(
                ran.outcome.all_dead,
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

trial!(
    Everyone,
    a_missing_required_layer_stops_the_run,
    only_at_landlock
);
fn a_missing_required_layer_stops_the_run() {
    let run = |layers: &[Layer]| {
        let mut confined = ConfinedRun::sh("echo x > ran; echo STARTED");
        confined.spec.required = BTreeSet::from_iter(layers.iter().copied());
        confined.try_run()
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
    assert!(run(&there).unwrap().printed("STARTED"));
    // Only root has a cgroup here.
    assert_eq!(run(&[Layer::Cgroup]).is_ok(), is_root());
}

trial!(Everyone, a_failed_launch_reads_nothing, only_at_landlock);
/// If the launch fails at one level, the caller tries the next level. So a failed launch must not have read any of the
/// input.
fn a_failed_launch_reads_nothing() {
    let start = |required: &[Layer]| {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        rustix::io::write(&write, b"given").unwrap();
        drop(write);
        let kept = rustix::io::fcntl_dupfd_cloexec(&read, 3).unwrap();
        let mut confined = ConfinedRun::sh("cat");
        confined.spec.required = BTreeSet::from_iter(required.iter().copied());
        confined.stdin = Some(read);
        let ran = confined.try_run();
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

trial!(Everyone, a_probe_leaves_nothing_behind, only_at_landlock);
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

trial!(
    Root,
    a_probe_kills_nobodys_processes_but_its_own,
    only_at_landlock
);
/// As root a probe uses the uid `nobody`, and services of the host may have the same uid.
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

/// Acts that one layer alone refuses: with the layer the act is refused, without it the act succeeds.
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
/// Acts that one layer alone refuses, on objects of the host that have the program's own uid. The objects of a plain
/// user have it.
#[rustfmt::skip]
const OWNED_BY_UID: &[(Layer, &str, &str)] = &[
    (Layer::Landlock, "a signal to a process of the same user", "os.kill(WITNESS, 0)"),
    (Layer::Seccomp, "the mode of a file of the same user", "os.chmod(DIR + '/file', 0o600); os.chmod(DIR + '/file', 0o644)"),
    (Layer::Seccomp, "the times of a file of the same user", "os.utime(DIR + '/file', (1, 2))"),
    (Layer::Seccomp, "the priority of a process of the same user", "os.setpriority(os.PRIO_PROCESS, WITNESS, 1)"),
];

trial!(
    Everyone,
    each_layer_alone_stops_its_own_acts,
    only_at_landlock
);
fn each_layer_alone_stops_its_own_acts() {
    let dir = host_dir();
    fs::write(dir.path().join("file"), "theirs").unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let witness = HostProcess::start();
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
        ConfinedRun::python(&attempts(&setup, &acts))
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
