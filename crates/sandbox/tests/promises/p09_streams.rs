//! P9: the program cannot escape by a terminal or a standard stream. Its only descriptors are 0, 1 and 2, which are
//! pipes or /dev/null. It has no controlling terminal, and no way to type into one.

use std::fs;
use std::io::{IsTerminal, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Command, Stdio};

use sandbox::spec::Layer;
use testkit::{inner_arguments, is_root, trial};

use crate::confined_run::{ConfinedRun, host_dir, unconfined};

/// Prints `number target` for every descriptor that is open.
const LIST: &str = "
for fd in range(4096):
    try: os.fstat(fd)
    except OSError: continue
    print(fd, os.readlink(f'/proc/self/fd/{fd}').split(':')[0])
";

trial!(Everyone, three_descriptors_and_no_more);
fn three_descriptors_and_no_more() {
    let ran = ConfinedRun::python(LIST).run();
    assert_eq!(ran.stdout, "0 /dev/null\n1 pipe\n2 pipe\n", "{}", ran.all());
    let mut confined = ConfinedRun::python(LIST);
    confined.stdin = Some(fs::File::open("/dev/null").unwrap().into());
    let ran = confined.run();
    assert_eq!(ran.stdout, "0 pipe\n1 pipe\n2 pipe\n", "{}", ran.all());
    // Standard input is the device 1:3, which is /dev/null, and reading it returns nothing.
    let ran = ConfinedRun::python(
        "st = os.fstat(0)\nprint(os.major(st.st_rdev), os.minor(st.st_rdev), len(os.read(0, 10)))",
    )
    .run();
    assert!(ran.printed("1 3 0"), "{}", ran.all());
}

trial!(Everyone, an_inherited_descriptor_does_not_arrive);
fn an_inherited_descriptor_does_not_arrive() {
    let dir = host_dir();
    let path = dir.path().join("secret");
    fs::write(&path, "secret").unwrap();
    // These descriptors are not close-on-exec.
    let flags = rustix::fs::OFlags::RDWR;
    let low = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).unwrap();
    let directory = rustix::fs::open(
        dir.path(),
        rustix::fs::OFlags::DIRECTORY,
        rustix::fs::Mode::empty(),
    )
    .unwrap();
    for fd in [low.as_fd(), directory.as_fd()] {
        assert!(
            !rustix::io::fcntl_getfd(fd)
                .unwrap()
                .contains(rustix::io::FdFlags::CLOEXEC)
        );
    }
    let numbers = [low.as_raw_fd(), directory.as_raw_fd()];
    let script = format!(
        "{LIST}\nif os.path.exists('/proc/self/fd/{0}'): print('read', os.pread({0}, 10, 0))",
        numbers[0]
    );
    let ran = ConfinedRun::python(&script).run();
    assert_eq!(ran.stdout, "0 /dev/null\n1 pipe\n2 pipe\n", "{}", ran.all());
    // The program cannot reach the descriptor through a visible process either, such as init, which inherited the
    // runner's descriptors.
    let steal = "
count = 0
try: pids = [int(n) for n in os.listdir('/proc') if n.isdigit()]
except PermissionError: pids = [1, RUNNER, os.getppid()]
for pid in (n for n in pids if n != os.getpid()):
    for fd in range(256):
        for act in (lambda: os.open(f'/proc/{pid}/fd/{fd}', os.O_RDONLY), lambda: os.readlink(f'/proc/{pid}/fd/{fd}')):
            try: act(); count += 1
            except OSError: pass
    try: pidfd = os.pidfd_open(int(pid))
    except OSError: continue
    for fd in range(256):
        if libc.syscall(438, pidfd, fd, 0) >= 0: count += 1
print('stolen', count)
";
    let steal = format!("RUNNER = {}\n{steal}", std::process::id());
    let ran = ConfinedRun::python(&steal).run();
    assert!(ran.printed("stolen 0"), "{}", ran.all());
    let control = unconfined(&script);
    assert!(control.contains("read b'secret'"), "{control}");
    let own = "pid = os.fork()\nif pid == 0: import time; time.sleep(30)\nprint('fd', libc.syscall(438, os.pidfd_open(pid), 1, 0) >= 0)\nos.kill(pid, 9)";
    assert!(unconfined(own).contains("fd True"));
}

trial!(Everyone, streams_can_be_reopened);
fn streams_can_be_reopened() {
    let ran = ConfinedRun::sh(
        "echo one > /dev/stdout; echo two > /dev/stderr; echo three >> /dev/fd/1; echo four > /proc/self/fd/2; echo five | tee /dev/stderr",
    )
    .run();
    assert_eq!(
        (ran.code(), ran.stdout.as_str(), ran.stderr.as_str()),
        (Some(0), "one\nthree\nfive\n", "two\nfour\nfive\n")
    );
    let mut confined = ConfinedRun::python(
        "print(open('/dev/stdin').read(), file=open('/dev/stdout', 'w'))\nopen('/dev/stderr', 'w').write('seen')",
    );
    confined.stdin = Some(pipe_with(b"given"));
    let ran = confined.run();
    assert_eq!(
        (ran.stdout.as_str(), ran.stderr.as_str()),
        ("given\n", "seen")
    );
}

trial!(Everyone, an_empty_input_can_be_reopened);
/// A run without an input gets an empty one. The program can open it as `/dev/stdin`, as many programs do.
fn an_empty_input_can_be_reopened() {
    for script in [
        "cat < /dev/stdin && echo end",
        "cat /dev/stdin /dev/fd/0 /proc/self/fd/0 && echo end",
    ] {
        let ran = ConfinedRun::sh(script).run();
        assert!(ran.printed("end"), "{}", ran.all());
    }
}

/// A pipe that contains all its data and has no writer.
fn pipe_with(bytes: &[u8]) -> std::os::fd::OwnedFd {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    fs::File::from(write).write_all(bytes).unwrap();
    read
}

trial!(Everyone, no_host_file_behind_a_stream);
/// Standard input comes from a file that could be written through its descriptor. So the program gets a pipe instead.
fn no_host_file_behind_a_stream() {
    let dir = host_dir();
    let path = dir.path().join("input");
    fs::write(&path, "input").unwrap();
    let script = "
for act in (lambda: os.write(0, b'x'), lambda: os.pwrite(0, b'x', 0), lambda: os.ftruncate(0, 0), lambda: os.lseek(0, 0, 0),
            lambda: os.write(os.open('/proc/self/fd/0', os.O_RDWR | os.O_TRUNC), b'x') and os.lseek(0, 0, 0)):
    try: act(); print('did')
    except OSError: print('refused')
print(os.readlink('/proc/self/fd/0').split(':')[0])
";
    let both = || {
        fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap()
    };
    let mut confined = ConfinedRun::python(script);
    confined.stdin = Some(both().into());
    let ran = confined.run();
    assert!(
        ran.printed("pipe") && ran.stdout.matches("refused").count() == 5,
        "{}",
        ran.all()
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), "input");
    let script = format!("import os\n{script}");
    let control = Command::new("/usr/bin/python3")
        .args(["-c", &script])
        .stdin(both())
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&control.stdout)
            .matches("did")
            .count(),
        5
    );
    assert_ne!(fs::read_to_string(&path).unwrap(), "input");
}

trial!(Everyone, input_arrives_whole);
fn input_arrives_whole() {
    let dir = host_dir();
    let path = dir.path().join("input");
    // The input has every byte value, does not repeat after a block, and is many times larger than a pipe.
    let mut state = 1u32;
    let bytes: Vec<u8> = (0..3_000_001)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect();
    fs::write(&path, &bytes).unwrap();
    let script = "import hashlib, sys; data = sys.stdin.buffer.read(); print(len(data), hashlib.sha256(data).hexdigest())";
    let input = fs::File::open(&path).unwrap();
    let control = Command::new("/usr/bin/python3")
        .args(["-c", script])
        .stdin(input)
        .output()
        .unwrap();
    let expected = String::from_utf8(control.stdout).unwrap();
    assert!(expected.starts_with("3000001 "), "{expected}");
    let mut from_file = ConfinedRun::python(script);
    from_file.stdin = Some(fs::File::open(&path).unwrap().into());
    assert_eq!(from_file.run().stdout, expected);
    let mut cat = Command::new("/bin/cat")
        .arg(&path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut from_pipe = ConfinedRun::python(script);
    from_pipe.stdin = Some(cat.stdout.take().unwrap().into());
    assert_eq!(from_pipe.run().stdout, expected);
    cat.wait().unwrap();
    // A program that reads an empty input gets the end of file at once.
    let mut empty = ConfinedRun::python("print(len(sys.stdin.buffer.read()))");
    empty.stdin = Some(pipe_with(b""));
    assert!(empty.run().printed("0"));
}

trial!(Everyone, unread_standard_input_does_not_delay_the_end);
/// A program that does not read, or closes its input early, ends normally.
fn unread_standard_input_does_not_delay_the_end() {
    for script in [
        "echo done",
        "head -c 5 >/dev/null; exec <&-; echo done",
        "exec <&-; sleep 0.2; echo done",
    ] {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let feeder = std::thread::spawn(move || {
            let mut write = fs::File::from(write);
            // The write fails with EPIPE when the runner closes the other end.
            for _ in 0..64 {
                if write.write_all(&[b'x'; 65536]).is_err() {
                    return;
                }
            }
        });
        let mut confined = ConfinedRun::sh(script);
        confined.stdin = Some(read);
        let ran = confined.run();
        assert!(
            ran.printed("done") && ran.code() == Some(0) && ran.stop().is_none(),
            "{}",
            ran.all()
        );
        feeder.join().unwrap();
    }
}

/// Makes a terminal that becomes its controlling terminal. Tries to type into the terminal with TIOCSTI and to paste
/// with TIOCLINUX. The kernel reads the command as an unsigned int, so bits above it must not hide the command from the
/// filter.
const TYPE_INTO: &str = "
import pty
pid, master = pty.fork()
if pid == 0:
    for name, command in (('sti', 0x5412), ('linux', 0x541c), ('size', 0x5413)) + more:
        for high in (0, 1 << 32, 0xffffffff << 32):
            ctypes.set_errno(0)
            libc.syscall.restype = ctypes.c_long
            result = libc.syscall(ctypes.c_long(16), ctypes.c_long(0), ctypes.c_ulong(command | high), ctypes.create_string_buffer(b'Q', 64))
            print(name, high >> 32, 'did' if result == 0 else errno.errorcode[ctypes.get_errno()])
    sys.stdout.flush()
    os._exit(0)
text = b''
while True:
    try: part = os.read(master, 4096)
    except OSError: break
    if not part: break
    text += part
os.waitpid(pid, 0)
print(text.decode())
";

trial!(
    Everyone,
    no_typing_into_terminals,
    only_at_full = "the terminals that could be made are the host's; the one that is given is landlock_level::no_typing_into_its_terminal"
);
fn no_typing_into_terminals() {
    // The control leaves out TIOCCONS, which takes the console's output, because there it would take the host's.
    let ran = ConfinedRun::python(&format!("more = (('cons', 0x541d),)\n{TYPE_INTO}")).run();
    let every = |name: &str, answer: &str, printed: &str| {
        [0u64, 1, 0xffff_ffff]
            .iter()
            .all(|high| printed.contains(&format!("{name} {high} {answer}")))
    };
    for name in ["sti", "linux", "cons"] {
        assert!(every(name, "EPERM", &ran.stdout), "{}", ran.all());
    }
    // Control: the descriptor is a terminal, because it reports its size.
    assert!(every("size", "did", &ran.stdout), "{}", ran.all());
    // Unconfined, commands with the same extra bits reach the terminal. TIOCSTI works for root. A user whom
    // legacy_tiocsti refuses gets EIO.
    let script = format!("more = ()\n{TYPE_INTO}");
    let control = unconfined(&script);
    assert!(
        every("sti", "did", &control) || !is_root() && every("sti", "EIO", &control),
        "{control}"
    );
    assert!(!every("linux", "EPERM", &control), "{control}");
    let ran = ConfinedRun::python(&script)
        .without(&[Layer::Seccomp])
        .run();
    assert!(!every("sti", "EPERM", &ran.stdout), "{}", ran.all());
}

trial!(
    Everyone,
    terminals_of_its_own_work,
    only_at_full = "the terminals that could be made are the host's, so none can: landlock_level::private_directories_and_files_cannot_be_listed_or_opened"
);
fn terminals_of_its_own_work() {
    let ran = ConfinedRun::python(
        "import pty\nout = []\n\
         def read(fd):\n    data = os.read(fd, 1024); out.append(data); return data\n\
         status = pty.spawn(['/bin/sh', '-c', 'test -t 0 && test -t 1 && tty && stty size'], read)\n\
         print('status', status)",
    )
    .run();
    assert!(
        ran.printed("status 0") && ran.stdout.contains("/dev/pts/0"),
        "{}",
        ran.all()
    );
}

trial!(Everyone, the_runners_terminal_is_out_of_reach);
/// The trial runs itself again with a controlling terminal. A program inside must not find this terminal.
fn the_runners_terminal_is_out_of_reach() {
    const INNER: &str = "FUMEHOOD_TEST_TERMINAL";
    if std::env::var_os(INNER).is_none() {
        let own = std::env::current_exe().unwrap();
        let [inner, name] = inner_arguments!(the_runners_terminal_is_out_of_reach);
        let spawn = format!(
            "import pty\nos.environ[{INNER:?}] = '1'\n\
             sys.exit(os.waitstatus_to_exitcode(pty.spawn([{own:?}, {inner:?}, {name:?}])))"
        );
        unconfined(&spawn);
        return;
    }
    let look = "
import fcntl, termios
print('tty number', open('/proc/self/stat').read().rsplit(')', 1)[1].split()[4])
print('leader', os.getsid(0) == os.getpid())
def attempt(name, act):
    try: act(); print('did', name)
    except (OSError, termios.error): print('refused', name)
attempt('open', lambda: os.open('/dev/tty', os.O_RDWR))
attempt('open console', lambda: os.open('/dev/console', os.O_RDWR))
attempt('open made', lambda: (os.mknod('tty', 0o020666, os.makedev(5, 0)), os.open('tty', os.O_RDWR)))
for fd in (0, 1, 2):
    attempt('attributes', lambda: termios.tcgetattr(fd))
    attempt('group', lambda: os.tcgetpgrp(fd))
    attempt('take', lambda: fcntl.ioctl(fd, termios.TIOCSCTTY, 1))
    attempt('type', lambda: fcntl.ioctl(fd, termios.TIOCSTI, b'x'))
    attempt('hang up', lambda: fcntl.ioctl(fd, termios.TIOCNOTTY))
    attempt('console', lambda: fcntl.ioctl(fd, 0x541c, b'\\3'))
";
    // The control: this process has that terminal, by descriptor and by name.
    assert!(std::io::stdin().is_terminal() && std::io::stdout().is_terminal());
    fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/tty")
        .unwrap();
    let ran = ConfinedRun::python(look).run();
    assert!(
        ran.printed("tty number 0") && ran.printed("leader True"),
        "{}",
        ran.all()
    );
    assert_eq!(
        (
            ran.stdout.matches("refused").count(),
            ran.stdout.matches("did").count()
        ),
        (21, 0),
        "{}",
        ran.all()
    );
}
