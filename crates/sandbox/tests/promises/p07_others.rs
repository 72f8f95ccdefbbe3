//! P7: the analysis cannot see, signal, trace, read, write or slow to a halt another analysis, Fumehood itself, or
//! the host.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use sandbox::outcome::Stop;
use testkit::{is_root, trial};

use crate::confined_run::{
    ConfinedResult, ConfinedRun, at_landlock, attempts, unconfined, verdict,
};

/// A run in a thread of its own that continues until the trial ends it.
pub struct HeldRun {
    done: mpsc::Receiver<ConfinedResult>,
    let_go: Option<OwnedFd>,
    pub workspace: PathBuf,
}

impl HeldRun {
    /// Starts a run and waits until its script calls `hold()`. That call returns when the trial calls
    /// [`HeldRun::finish`].
    pub fn start(mut confined: ConfinedRun, script: &str) -> HeldRun {
        let workspace = confined.workspace().to_path_buf();
        let ready = workspace.join("ready");
        assert!(
            Command::new("mkfifo")
                .arg(&ready)
                .status()
                .unwrap()
                .success()
        );
        confined.script(&format!(
            "def hold():\n    fd = os.open('ready', os.O_WRONLY); os.close(fd); os.read(0, 1)\n{script}"
        ));
        let (inner, outer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        confined.stdin = Some(inner);
        let (tell_done, done) = mpsc::channel();
        let (tell_ready, is_ready) = mpsc::channel();
        let early = tell_ready.clone();
        std::thread::spawn(move || {
            let ran = confined.run();
            // If the run ended before it was ready, its output is the error.
            let _nobody_waits = early.send(Err(ran.all()));
            let _nobody_waits = tell_done.send(ran);
        });
        std::thread::spawn(move || {
            let opened = std::fs::read(&ready).map_err(|e| e.to_string());
            let _nobody_waits = tell_ready.send(opened.map(drop));
        });
        let first = is_ready
            .recv_timeout(Duration::from_secs(60))
            .expect("the run gets ready");
        first.unwrap_or_else(|words| panic!("the run ended before it was ready: {words}"));
        HeldRun {
            done,
            let_go: Some(outer),
            workspace,
        }
    }

    pub fn finish(mut self) -> ConfinedResult {
        drop(self.let_go.take());
        self.done
            .recv_timeout(Duration::from_secs(60))
            .expect("the run ends when it is let go")
    }
}

/// Host pids of processes whose command line contains the marker.
pub fn host_pids(marker: &str) -> Vec<i32> {
    let has_it = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(marker)
    };
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|e| e.file_name().to_str()?.parse().ok());
    pids.filter(has_it).collect()
}

/// The four user ids of a process, as the host numbers them.
pub fn host_uids(pid: i32) -> Vec<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("Uid:")).unwrap();
    line.split_whitespace()
        .map(|n| n.parse().unwrap())
        .collect()
}

/// `PID` is a process of the first analysis, `DIR` its workspace; `NAME` and `KEY` name its IPC objects.
const REACH_ANOTHER: &[(&str, &str)] = &[
    ("see", "os.stat('/proc/%d' % PID)"),
    (
        "see_its_command",
        "assert_(any(NAME in command(p) for p in os.listdir('/proc') if p.isdigit()))",
    ),
    ("ask_after_it", "os.kill(PID, 0)"),
    ("hold_it", "os.pidfd_open(PID)"),
    ("priority", "os.setpriority(os.PRIO_PROCESS, PID, 19)"),
    (
        "limits",
        "import resource; resource.prlimit(PID, resource.RLIMIT_NOFILE)",
    ),
    ("its_memory", "open('/proc/%d/mem' % PID, 'rb')"),
    (
        "its_environment",
        "open('/proc/%d/environ' % PID, 'rb').read()",
    ),
    ("its_descriptors", "os.listdir('/proc/%d/fd' % PID)"),
    ("its_root", "os.listdir('/proc/%d/root' % PID)"),
    ("shared_memory", "sc(29, KEY, 0, 0)"),
    ("semaphores", "sc(64, KEY, 0, 0)"),
    ("messages", "sc(68, KEY, 0)"),
    ("posix_shared_memory", "open('/dev/shm/' + NAME)"),
    (
        "abstract_socket",
        "socket.socket(socket.AF_UNIX).connect('\\0' + NAME)",
    ),
    ("tcp", "socket.create_connection(('127.0.0.1', PORT))"),
    ("its_tmp", "open('/tmp/' + NAME)"),
    ("its_home", "open(os.environ['HOME'] + '/' + NAME)"),
    ("its_workspace", "open(DIR + '/mine')"),
    (
        "its_workspace_listed",
        "assert_(DIR[5:] in os.listdir('/tmp'))",
    ),
    (
        "its_hidden_directory",
        "os.listdir(DIR + '/.fumehood/home')",
    ),
];

const FIRST_ANALYSIS: &str = r#"
sc(29, KEY, 4096, 0o1600); sc(64, KEY, 1, 0o1600); sc(68, KEY, 0o1600)
for path in ('/dev/shm/' + NAME, '/tmp/' + NAME, os.environ['HOME'] + '/' + NAME, 'mine'): open(path, 'w').write('mine')
named = socket.socket(socket.AF_UNIX); named.bind('\0' + NAME); named.listen()
tcp = socket.socket(); tcp.bind(('127.0.0.1', PORT)); tcp.listen()
"#;

/// At level `landlock` the first analysis cannot make these objects; landlock_level tries those of the host.
const NOT_MADE_AT_LANDLOCK: &[&str] = &[
    "see_its_command",
    "shared_memory",
    "semaphores",
    "messages",
    "posix_shared_memory",
    "abstract_socket",
    "tcp",
    "its_tmp",
    "its_home",
];
/// Without a pid namespace a program can ask whether a pid of another run exists.
const SEEN_AT_LANDLOCK: &[&str] = &["see", "hold_it"];

trial!(Everyone, two_runs_at_once_cannot_reach_each_other);
fn two_runs_at_once_cannot_reach_each_other() {
    let name = format!("first-{}-{}", std::process::id(), u8::from(is_root()));
    let reversed: String = name.chars().rev().collect();
    let key = 0x4600_0000 + std::process::id() % 0xff_ffff;
    let setup = |pid: &str, dir: &Path| {
        format!(
            "NAME, KEY, PORT, PID, DIR = {reversed:?}[::-1], {key}, 45454, {pid}, {dir:?}\n\
             def assert_(fact):\n    if not fact: raise OSError(errno.ENOENT, 'not there')\n\
             def command(pid):\n    try: return open('/proc/%s/cmdline' % pid).read()\n    except OSError: return ''\n"
        )
    };
    let first = ConfinedRun::python("");
    let own = first.workspace().to_path_buf();
    let all: Vec<_> = REACH_ANOTHER
        .iter()
        .copied()
        .filter(|(n, _)| !at_landlock() || !NOT_MADE_AT_LANDLOCK.contains(n))
        .collect();
    // Control: a process of the first analysis reaches what the first analysis made. The hidden directory is the exception: the
    // program itself cannot see it.
    let acts: Vec<_> = all
        .iter()
        .copied()
        .filter(|(n, _)| *n != "its_hidden_directory")
        .collect();
    // At level `landlock` a process reaches no process but itself, so the control runs on the host.
    let control = match at_landlock() {
        false => attempts(&(setup("os.getpid()", &own) + FIRST_ANALYSIS), &acts),
        true => String::from("open('mine', 'w').write('mine')\n"),
    };
    // The command line contains the name, by which the host and the control find the process.
    let held = HeldRun::start(first, &format!("# {name}\n{control}\nhold()\n"));
    let pids = host_pids(&name);
    let pid = *pids.first().expect("the host sees the first analysis");
    let reach = attempts(&setup(&pid.to_string(), &held.workspace), &all);
    let second = ConfinedRun::python(&reach).run();
    let on_host = at_landlock().then(|| unconfined(&reach));
    // Each run has a uid of its own, and none is root's.
    let first_uids = host_uids(pid);
    let second_kill = ConfinedRun::python(&format!("os.kill({pid}, 9)")).run();
    let ran = held.finish();
    assert_eq!(
        ran.code(),
        Some(0),
        "the first ends by itself: {}",
        ran.all()
    );
    assert_eq!(second_kill.code(), Some(1), "{}", second_kill.all());
    let control = on_host.as_ref().unwrap_or(&ran.stdout);
    for (act, _) in &acts {
        // Root in a container may not read the limits of another uid's process.
        let may_not = at_landlock() && is_root() && *act == "limits";
        assert!(
            verdict(control, act) == "done" || may_not,
            "control of {act}\n{control}"
        );
    }
    for (act, _) in &all {
        let inside = verdict(&second.stdout, act);
        let expected = match at_landlock() && SEEN_AT_LANDLOCK.contains(act) {
            true => "done",
            false => "refused",
        };
        assert!(
            inside.starts_with(expected),
            "{act}: {inside}\n{}",
            second.all()
        );
    }
    assert!(first_uids.iter().all(|uid| *uid != 0));
    if is_root() {
        two_leases(&first_uids);
    }
}

fn two_leases(first: &[u32]) {
    let mark = format!("second-{}", std::process::id());
    let held = HeldRun::start(ConfinedRun::python(""), &format!("# {mark}\nhold()\n"));
    let second = host_uids(host_pids(&mark)[0]);
    held.finish();
    assert!(
        second.iter().all(|uid| *uid != 0 && !first.contains(uid)),
        "{first:?} and {second:?}"
    );
}

/// A process of the host that waits, with the identity of the trial.
pub struct HostProcess(pub Child);

impl HostProcess {
    /// Starts the process in a group of its own, and waits until it has called execve.
    pub fn start() -> HostProcess {
        let mut command = Command::new("/bin/sleep");
        let child = command
            .arg("600")
            .stdin(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        while std::fs::read(format!("/proc/{}/cmdline", child.id()))
            .unwrap()
            .is_empty()
        {
            std::thread::yield_now();
        }
        HostProcess(child)
    }
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
    pub fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

const REACH_THE_HOST: &[(&str, &str)] = &[
    ("ask", "os.kill(PID, 0)"),
    ("continue", "os.kill(PID, signal.SIGCONT)"),
    ("group", "os.killpg(os.getpgid(PID), signal.SIGCONT)"),
    ("thread", "sc(234, PID, PID, signal.SIGCONT)"),
    (
        "queue",
        "sc(129, PID, signal.SIGCONT, ctypes.create_string_buffer(struct.pack('iii', signal.SIGCONT, 0, -1), 128))",
    ),
    (
        "hold",
        "signal.pidfd_send_signal(os.pidfd_open(PID), signal.SIGCONT)",
    ),
    ("priority", "os.setpriority(os.PRIO_PROCESS, PID, 5)"),
    ("input_output_priority", "sc(251, 1, PID, 2 << 13 | 7)"),
    (
        "affinity",
        "os.sched_setaffinity(PID, os.sched_getaffinity(0))",
    ),
    (
        "policy",
        "os.sched_setscheduler(PID, os.SCHED_BATCH, os.sched_param(0))",
    ),
    (
        "limits",
        "import resource; resource.prlimit(PID, resource.RLIMIT_CORE, (0, 0))",
    ),
    ("environment", "open('/proc/%d/environ' % PID).read()"),
    ("memory", "open('/proc/%d/mem' % PID, 'rb')"),
    ("descriptors", "os.listdir('/proc/%d/fd' % PID)"),
    ("root", "os.listdir('/proc/%d/root/' % PID)"),
    ("read_memory", "readv(PID)"),
    (
        "attach",
        "sc(101, 16, PID, 0, 0); os.waitpid(PID, 0x40000000); sc(101, 17, PID, 0, 0)",
    ),
];
const READV: &str = "def readv(pid):\n\
                     \x20   start = int(open('/proc/%d/maps' % pid).readline().split('-')[0], 16)\n\
                     \x20   into = ctypes.create_string_buffer(8)\n\
                     \x20   here = struct.pack('QQ', ctypes.addressof(into), 8); there = struct.pack('QQ', start, 8)\n\
                     \x20   sc(310, pid, ctypes.c_char_p(here), 1, ctypes.c_char_p(there), 1, 0)\n";

trial!(Everyone, processes_of_the_host);
fn processes_of_the_host() {
    let mut witness = HostProcess::start();
    let runner = std::process::id();
    let script = |pid: u32| attempts(&format!("PID = {pid}\n{READV}"), REACH_THE_HOST);
    let control = unconfined(&script(witness.pid()));
    for (act, _) in REACH_THE_HOST {
        assert_eq!(verdict(&control, act), "done", "control of {act}");
    }
    for target in [witness.pid(), runner] {
        let ran = ConfinedRun::python(&script(target)).run();
        for (act, _) in REACH_THE_HOST {
            let inside = verdict(&ran.stdout, act);
            assert!(
                inside.starts_with("refused"),
                "{act}: {inside}\n{}",
                ran.all()
            );
        }
    }
    // kill(-1) reaches only the program's own processes. In a pid namespace it does not mean the host's processes.
    let kill = format!(
        "import signal, subprocess\n\
         child = subprocess.Popen(['/bin/sleep', '60'])\n\
         for target in (-1, {0}, -{0}):\n\
         \x20   try: os.kill(target, signal.SIGKILL); print('sent to', target)\n\
         \x20   except OSError as e: print(target, errno.errorcode[e.errno])\n\
         print('child', child.wait())\n",
        witness.pid()
    );
    let ran = ConfinedRun::python(&kill).run();
    // Control: kill(-1) killed the program's own child.
    assert!(
        ran.printed("sent to -1") && ran.printed("child -9"),
        "{}",
        ran.all()
    );
    // If Landlock cannot restrict signals, the guardian answers, and does not tell whether other processes exist.
    let by_landlock = at_landlock() && sandbox::landlock_abi() >= 6;
    let refused = if by_landlock { "EPERM" } else { "ESRCH" };
    assert!(
        ran.printed(&format!("{} {refused}", witness.pid())),
        "{}",
        ran.all()
    );
    assert!(witness.lives());
}

/// The parent of the program: pid 1 or, at level `landlock`, the guardian.
const INIT: &str = "PID = os.getppid()\n";

const REACH_PID_1: &[(&str, &str)] = &[
    ("mem", "open('/proc/%d/mem' % PID, 'rb')"),
    ("environ", "open('/proc/%d/environ' % PID).read()"),
    ("maps", "open('/proc/%d/maps' % PID).read()"),
    ("auxv", "open('/proc/%d/auxv' % PID, 'rb').read()"),
    ("fd", "os.listdir('/proc/%d/fd' % PID)"),
    ("exe", "os.readlink('/proc/%d/exe' % PID)"),
    ("exe_opened", "open('/proc/%d/exe' % PID, 'rb')"),
    ("root", "os.listdir('/proc/%d/root/' % PID)"),
    ("cwd", "os.listdir('/proc/%d/cwd/' % PID)"),
    ("namespaces", "os.readlink('/proc/%d/ns/user' % PID)"),
    ("map_files", "os.listdir('/proc/%d/map_files' % PID)"),
];
/// Acts that seccomp and a read-only /proc refuse for every process. On the host they succeed for one's own child.
const REFUSED_ABOUT_ANY: &[(&str, &str)] = &[
    ("mem_for_writing", "open('/proc/%d/mem' % PID, 'r+b', 0)"),
    ("read_memory", "readv(PID)"),
    (
        "attach",
        "sc(101, 16, PID, 0, 0); os.waitpid(PID, 0x40000000); sc(101, 17, PID, 0, 0)",
    ),
    ("seize", "sc(101, 0x4206, PID, 0, 0)"),
    ("take_a_descriptor", "sc(438, os.pidfd_open(PID), 0, 0)"),
    ("compare", "sc(312, os.getpid(), PID, 0, 0, 0)"),
];
/// A child for the control. It holds descriptor 0 and waits.
const CHILD: &str = "import atexit, subprocess\nnull = subprocess.DEVNULL\n\
                     child = subprocess.Popen(['/bin/sleep', '60'], stdin=null, stdout=null, stderr=null, start_new_session=True)\n\
                     PID = child.pid; atexit.register(child.kill)\n\
                     while 'sleep' not in open('/proc/%d/cmdline' % PID).read(): os.sched_yield()\n";

trial!(Everyone, pid_1_cannot_be_signalled_or_traced);
fn pid_1_cannot_be_signalled_or_traced() {
    let all = [REACH_PID_1, REFUSED_ABOUT_ANY].concat();
    let control = unconfined(&attempts(&format!("{READV}{CHILD}"), REFUSED_ABOUT_ANY));
    // At level `landlock` the run's other processes are closed to the program too, so the control runs on the host.
    let own_child = match at_landlock() {
        false => {
            ConfinedRun::python(&attempts(CHILD, REACH_PID_1))
                .run()
                .stdout
        }
        true => unconfined(&attempts(CHILD, REACH_PID_1)),
    };
    let signals = "for s in (9, 15, 19, 2, 1, 17, 20, 34, 64):\n\
                   \x20   for send in (lambda: os.kill(PID, s), lambda: sc(234, PID, PID, s), lambda: signal.pidfd_send_signal(os.pidfd_open(PID), s)):\n\
                   \x20       try: send()\n\
                   \x20       except OSError: pass\n\
                   sys.stdout.flush(); os._exit(7)\n";
    // Landlock protects init from signals, and so does the kernel in a pid namespace. Either alone is enough.
    let without: [&[sandbox::spec::Layer]; 2] = [&[], &[sandbox::spec::Layer::Landlock]];
    for without in &without[..if at_landlock() { 1 } else { 2 }] {
        let script = attempts(&format!("{INIT}{READV}"), &all) + signals;
        let ran = ConfinedRun::python(&script).without(without).run();
        for (act, _) in &all {
            let inside = verdict(&ran.stdout, act);
            assert!(
                inside.starts_with("refused"),
                "{act}: {inside}\n{}",
                ran.all()
            );
        }
        assert_eq!((ran.code(), ran.stop()), (Some(7), None), "{}", ran.all());
    }
    for (act, _) in REACH_PID_1 {
        assert_eq!(
            verdict(&own_child, act),
            "done",
            "control of {act}\n{own_child}"
        );
    }
    for (act, _) in REFUSED_ABOUT_ANY {
        assert_eq!(verdict(&control, act), "done", "control of {act}");
    }
}

/// Pid 1 has the program's uid, and the kernel permits the scheduler's calls on any process of the same uid.
const SLOW: &[(&str, &str)] = &[
    ("priority", "os.setpriority(os.PRIO_PROCESS, PID, 19)"),
    (
        "priority_of_its_group",
        "os.setpriority(os.PRIO_PGRP, os.getpgid(PID), 19)",
    ),
    (
        "policy",
        "os.sched_setscheduler(PID, os.SCHED_IDLE, os.sched_param(0))",
    ),
    ("parameters", "os.sched_setparam(PID, os.sched_param(0))"),
    (
        "affinity",
        "os.sched_setaffinity(PID, {min(os.sched_getaffinity(0))})",
    ),
    ("input_output_priority", "sc(251, 1, PID, 3 << 13)"),
    (
        "limits",
        "import resource; resource.prlimit(PID, resource.RLIMIT_NOFILE, (3, 3))",
    ),
    (
        "attributes",
        "sc(314, PID, ctypes.create_string_buffer(struct.pack('IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 48), 0)",
    ),
];

trial!(Everyone, pid_1_cannot_be_slowed);
fn pid_1_cannot_be_slowed() {
    let control = unconfined(&attempts(CHILD, SLOW));
    let tell = "print('nice', os.getpriority(os.PRIO_PROCESS, PID), os.sched_getscheduler(PID), sc(252, 1, PID) >> 13)\n";
    // These calls change all processes of this uid. Pid 1 must not be among them.
    let everyone = "try: os.setpriority(os.PRIO_USER, 0, 19)\nexcept OSError: pass\n\
                    try: sc(251, 3, os.getuid(), 3 << 13)\nexcept OSError: pass\n";
    let untouched = ConfinedRun::python(&(attempts(INIT, &[]) + tell)).run();
    let ran = ConfinedRun::python(&(attempts(INIT, SLOW) + everyone + tell)).run();
    for (act, _) in SLOW {
        assert_eq!(verdict(&control, act), "done", "control of {act}");
        let inside = verdict(&ran.stdout, act);
        assert!(
            inside.starts_with("refused"),
            "{act} of pid 1: {inside}\n{}",
            ran.all()
        );
    }
    assert_eq!(
        ran.stdout.lines().last(),
        untouched.stdout.lines().last(),
        "{}",
        ran.all()
    );
}

trial!(Everyone, pid_1_keeps_its_deadline);
/// The program attacks pid 1 and occupies every CPU with its processes. The deadline holds, and the outcome names it.
fn pid_1_keeps_its_deadline() {
    let flood = "for _ in range(48):\n\
                 \x20   if os.fork() == 0:\n\
                 \x20       signal.signal(signal.SIGTERM, signal.SIG_IGN)\n\
                 \x20       while True: pass\n\
                 signal.signal(signal.SIGTERM, signal.SIG_IGN)\n\
                 while True:\n\
                 \x20   try: os.kill(PID, signal.SIGCHLD)\n\
                 \x20   except OSError: pass\n";
    let script = attempts(INIT, SLOW)
        + "try: os.setpriority(os.PRIO_USER, 0, 19)\nexcept OSError: pass\n"
        + flood;
    let start = std::time::Instant::now();
    let ran = ConfinedRun::python(&script)
        .limits(|l| (l.wall_ms, l.grace_ms) = (2000, 200))
        .run();
    assert_eq!(ran.stop(), Some(Stop::WallTime), "{}", ran.all());
    assert!(
        ran.outcome.all_dead && ran.outcome.exit.is_some(),
        "{}",
        ran.all()
    );
    // The bound is far above the promise. If init got no CPU time, the runner's backstop would end the run later.
    assert!(
        start.elapsed() < Duration::from_secs(20),
        "{:?}",
        start.elapsed()
    );
}

trial!(Everyone, host_wide_counters_are_not_used_up);
/// Some limits of the kernel, such as fs.aio-max-nr, bound the whole host. One analysis must leave most of them to
/// others.
fn host_wide_counters_are_not_used_up() {
    let script = "import struct\n\
                  context = ctypes.c_ulong(0)\n\
                  taken = libc.syscall(206, WHOLE // 4, ctypes.byref(context)) == 0\n\
                  print('MUCH' if taken else 'little')\n";
    let whole = std::fs::read_to_string("/proc/sys/fs/aio-max-nr").unwrap();
    let script = &format!("WHOLE = {}\n{script}", whole.trim());
    // The control takes a quarter of the limit, and only for a moment, because others use this host too.
    assert!(unconfined(script).contains("MUCH"), "the control takes it");
    let ran = ConfinedRun::python(script).run();
    assert!(ran.stdout.contains("little"), "fs.aio-nr: {}", ran.all());
}

trial!(Everyone, pid_1_holds_no_stream_open);
/// Init keeps no stream of the program open: when the last process that writes has closed its end, the reader gets an end of
/// file.
fn pid_1_holds_no_stream_open() {
    let mark = format!("streams-{}", std::process::id());
    let held = HeldRun::start(
        ConfinedRun::python(""),
        &format!("# {mark}\nprint(os.readlink('/proc/self/fd/1'), flush=True)\nhold()\n"),
    );
    let program = host_pids(&mark)[0];
    let status = std::fs::read_to_string(format!("/proc/{program}/status")).unwrap();
    let parent: i32 = status
        .lines()
        .find_map(|l| l.strip_prefix("PPid:"))
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let links = |pid: i32| -> std::io::Result<Vec<String>> {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd"))?;
        Ok(entries
            .flatten()
            .filter_map(|e| Some(std::fs::read_link(e.path()).ok()?.display().to_string()))
            .collect())
    };
    let of_init = links(parent);
    let ran = held.finish();
    let pipe = ran.stdout.lines().next().unwrap();
    assert!(pipe.starts_with("pipe:"), "{}", ran.all());
    match of_init {
        Ok(held_by_init) => assert!(
            !held_by_init.contains(&pipe.to_owned()),
            "{pipe} among {held_by_init:?}"
        ),
        // Init is not dumpable, so only root can read this.
        Err(e) => assert!(!is_root(), "{e}"),
    }
}

trial!(
    Everyone,
    a_program_cannot_observe_files_and_memory_of_other_processes
);
/// An inotify watch on a system directory would show which programs others start; merged pages would show what others have in
/// memory.
fn a_program_cannot_observe_files_and_memory_of_other_processes() {
    let script = r#"
import fcntl, mmap
def attempt(name, act):
    try: act(); print(f'{name}: done')
    except OSError as e: print(f'{name}: {errno.errorcode[e.errno]}')
def call(result):
    if result == -1: raise OSError(ctypes.get_errno(), '')
attempt('watch', lambda: call(libc.inotify_init1(0)))
attempt('add', lambda: call(libc.inotify_add_watch(libc.inotify_init1(0), b'/usr/bin', 0xfff)))
directory = os.open('/usr/bin', os.O_RDONLY)
attempt('notify', lambda: fcntl.fcntl(directory, fcntl.F_NOTIFY, 0))
memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
attempt('ordinary advice', lambda: memory.madvise(mmap.MADV_HUGEPAGE))
attempt('merge', lambda: memory.madvise(mmap.MADV_MERGEABLE))
"#;
    let outside = unconfined(script);
    for act in ["watch", "add", "notify", "merge"] {
        assert!(
            outside.contains(&format!("{act}: done")),
            "the control: {outside}"
        );
    }
    let ran = ConfinedRun::python(script).run();
    let expected =
        "watch: ENOSYS\nadd: ENOSYS\nnotify: EINVAL\nordinary advice: done\nmerge: EINVAL\n";
    assert_eq!(ran.stdout, expected, "{}", ran.all());
}
