//! P4: the analysis writes only to its workspace, its private /tmp and its private /dev/shm.

use std::fs::{self, Permissions};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use testkit::{is_root, trial};

use crate::confined_run::{ConfinedRun, at_landlock, home, unconfined};

/// Tries to make a file in every directory, by name and by descriptor.
const MAKE_EVERYWHERE: &str = "
def listed(root):
    try: os.listdir(root); return True
    except OSError: return False
def make_everywhere(root):
    tried = 0
    # What cannot be listed may be writable all the same.
    for top, below, files in os.walk(root) if listed(root) else [(root, [], [])]:
        below[:] = [d for d in below if not os.path.islink(os.path.join(top, d))]
        tried += 1
        made = False
        for make in (lambda: os.close(os.open(top + '/fumehood-probe', os.O_WRONLY | os.O_CREAT | os.O_EXCL)),
                     lambda: os.close(os.open(top, os.O_WRONLY | os.O_TMPFILE)),
                     lambda: os.mkdir(top + '/fumehood-made')):
            try: make(); made = True
            except OSError: pass
        if made: print('made', top)
    print('tried', tried)
";

fn places(printed: &str) -> Vec<&str> {
    let mut places: Vec<&str> = printed
        .lines()
        .filter_map(|l| l.strip_prefix("made "))
        .collect();
    places.sort_unstable();
    places
}

trial!(Everyone, files_are_made_in_its_own_directories_only);
fn files_are_made_in_its_own_directories_only() {
    let open = tempfile::Builder::new()
        .prefix("fumehood-host-")
        .tempdir_in("/tmp")
        .unwrap();
    for dir in [open.path().join("below"), open.path().to_path_buf()] {
        fs::create_dir_all(&dir).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o777)).unwrap();
    }
    // At level `landlock` the program cannot list `/`. There the test tries the directories of the host's root, and those that
    // everybody may write.
    let walk = match at_landlock() {
        false => String::from("os.makedirs('/dev/shm/deep')\nmake_everywhere('/')"),
        true => format!(
            "for top in ('/', '/usr', '/etc', '/dev', '/dev/shm', '/tmp', '/var/tmp', '/var', '/run', '/run/lock', '/home', '/srv', '/proc', '/sys', \
             {:?}, os.getcwd()): make_everywhere(top)",
            open.path()
        ),
    };
    let script = format!("{MAKE_EVERYWHERE}os.makedirs('deep/deeper')\n{walk}");
    let confined = ConfinedRun::python(&script).view(open.path(), "data");
    let workspace = confined.workspace().to_str().unwrap().to_owned();
    let tmp = home(confined.workspace()).parent().unwrap().to_path_buf();
    fs::create_dir(confined.workspace().join("given")).unwrap();
    let ran = confined.run();
    assert_eq!(ran.code(), Some(0), "{}", ran.all());
    // Compare the whole list, so that a walk which missed the program's own directories fails too.
    let inner = ["", "/deep", "/deep/deeper", "/given"].map(|inner| format!("{workspace}{inner}"));
    let mut own = inner.to_vec();
    own.extend([&tmp, &tmp.join("home")].map(|path| path.to_str().unwrap().to_owned()));
    if !at_landlock() {
        own.extend(["/dev/shm", "/dev/shm/deep"].map(str::to_owned));
    }
    own.sort_unstable();
    assert_eq!(places(&ran.stdout), own, "{}", ran.stderr);
    let tried = ran.stdout.lines().filter_map(|l| l.strip_prefix("tried "));
    let tried: u32 = tried.map(|n| n.parse::<u32>().unwrap()).sum();
    assert!(tried > 1000, "only {tried} directories");
    // Control: on the host, the same script can make a file in the view's source, where it was refused above.
    assert!(fs::read_dir(open.path()).unwrap().count() == 1);
    let control = unconfined(&format!(
        "{MAKE_EVERYWHERE}make_everywhere({:?})",
        open.path()
    ));
    assert_eq!(places(&control).len(), 2, "{control}");
}

trial!(Everyone, files_of_the_system_cannot_be_opened_for_writing);
fn files_of_the_system_cannot_be_opened_for_writing() {
    let script = "
count = 0
for root in ('/etc', '/usr/bin', '/usr/lib/python3', '/bin', '/lib64'):
    for top, below, files in os.walk(root):
        for path in (os.path.join(top, name) for name in files):
            count += 1
            if count > LIMIT: break
            for act in (lambda: os.close(os.open(path, os.O_WRONLY)), lambda: os.chmod(path, 0o777), lambda: os.utime(path),
                        lambda: os.unlink(path), lambda: os.rename(path, path + '.old')):
                try: act(); print('did', path)
                except OSError: pass
print('enough' if count > 500 else count)
";
    // At level `landlock` the guardian handles every change of a mode or a time, so the trial tries fewer files.
    let limit = if at_landlock() { 600 } else { 100_000 };
    let ran = ConfinedRun::python(&format!("LIMIT = {limit}\n{script}")).run();
    assert!(
        ran.printed("enough") && !ran.stdout.contains("did"),
        "{}",
        ran.all()
    );
    // Control: the same acts succeed on a file of the program's own.
    let own = "open('own', 'w').close(); os.chmod('own', 0o600); os.utime('own'); os.rename('own', 'new'); os.unlink('new'); print('did')";
    assert!(ConfinedRun::python(own).run().printed("did"));
}

trial!(
    Everyone,
    files_in_the_workspace_are_visible_outside_and_temporary_files_are_not
);
/// The workspace is the same directory inside and outside. The program's /tmp and /dev/shm are not the host's.
fn files_in_the_workspace_are_visible_outside_and_temporary_files_are_not() {
    let mark = format!("fumehood-mark-{}", std::process::id());
    // At level `landlock` the program has the directory that TMPDIR names, but no /tmp of its own and no shared memory.
    let elsewhere = match at_landlock() {
        false => format!(
            "echo x > /tmp/{mark}; echo x > /dev/shm/{mark}; test -s /tmp/{mark} && test -s /dev/shm/{mark} && test -s /var/tmp/{mark}"
        ),
        true => format!(
            "echo x > $TMPDIR/{mark}; for d in /tmp /var/tmp /dev/shm; do (echo x > $d/{mark}) 2>&- && exit; done; test -s $TMPDIR/{mark}"
        ),
    };
    let script = format!(
        "echo result > result.txt; mkdir -p a/b; echo deep > a/b/c; {elsewhere} && echo written; echo y > ready; read line"
    );
    let mut confined = ConfinedRun::sh(&script);
    let workspace = confined.workspace().to_path_buf();
    let (ready, release) = wait_at_fifo(&mut confined);
    let running = std::thread::spawn(move || confined.run());
    until_ready(ready);
    assert_eq!(
        fs::read_to_string(workspace.join("result.txt")).unwrap(),
        "result\n"
    );
    assert_eq!(
        fs::read_to_string(workspace.join("a/b/c")).unwrap(),
        "deep\n"
    );
    for place in ["/tmp", "/var/tmp", "/dev/shm"] {
        assert!(!Path::new(place).join(&mark).exists(), "{place}");
    }
    drop(release);
    let ran = running.join().unwrap();
    assert!(ran.printed("written"), "{}", ran.all());
}

/// Gives the run a FIFO named `ready` to report on, and a standard input that ends when the returned descriptor is dropped.
fn wait_at_fifo(confined: &mut ConfinedRun) -> (fs::File, OwnedFd) {
    let fifo = confined.workspace().join("ready");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let ready = fs::File::options()
        .read(true)
        .custom_flags(nonblocking)
        .open(&fifo)
        .unwrap();
    let (input, release) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    confined.stdin = Some(input);
    (ready, release)
}

fn until_ready(mut ready: fs::File) {
    let bound = Timespec {
        tv_sec: 30,
        tv_nsec: 0,
    };
    let events = poll(
        &mut [PollFd::from_borrowed_fd(ready.as_fd(), PollFlags::IN)],
        Some(&bound),
    )
    .unwrap();
    assert_eq!(
        (events, ready.read(&mut [0]).unwrap()),
        (1, 1),
        "the first never got ready"
    );
}

trial!(
    Everyone,
    the_hidden_directory_is_empty_and_closed,
    only_at_full = "nothing can be mounted over it: it is the program's own, and holds its temporary files and nothing of ours"
);
fn the_hidden_directory_is_empty_and_closed() {
    let script = "
def attempt(name, act):
    try: print('did', name, act())
    except OSError as e: print('refused', name)
def all_on(hidden):
    attempt('make', lambda: open(hidden + '/x', 'w'))
    attempt('mkdir', lambda: os.mkdir(hidden + '/tmp'))
    attempt('rename', lambda: os.rename(hidden, hidden + '-moved'))
    attempt('replace', lambda: (os.mkdir('other'), os.rename('other', hidden)))
    attempt('remove', lambda: os.rmdir(hidden))
    attempt('chmod', lambda: os.chmod(hidden, 0o777))
    attempt('attribute', lambda: os.setxattr(hidden, 'user.x', b'1'))
    attempt('look up', lambda: os.listdir(hidden + '/tmp'))
print('holds', *os.listdir('.fumehood'))
all_on('.fumehood')
";
    let ran = ConfinedRun::python(script).run();
    assert!(
        ran.printed("holds") && ran.stdout.matches("refused").count() == 8,
        "{}",
        ran.all()
    );
    // Control: on a directory of its own whose name begins with a dot, the program can do the same, except for the
    // look-up.
    let control = "
for name in ('make', 'mkdir', 'chmod', 'attribute', 'rename'):
    os.makedirs('.own', exist_ok=True)
    {'make': lambda: open('.own/x', 'w').close(), 'mkdir': lambda: os.mkdir('.own/tmp'), 'chmod': lambda: os.chmod('.own', 0o777),
     'attribute': lambda: os.setxattr('.own', 'user.x', b'1'), 'rename': lambda: os.rename('.own', '.new')}[name]()
os.mkdir('other'); os.rename('other', '.own'); os.rmdir('.own')
print('did all')
";
    let ran = ConfinedRun::python(control).run();
    assert!(ran.printed("did all"), "{}", ran.all());
}

trial!(Everyone, shared_memory_and_tmp_are_private);
/// At level `full` the program can create files under names that the host's /tmp and /dev/shm already have. They are
/// other files.
fn shared_memory_and_tmp_are_private() {
    for place in ["/tmp", "/dev/shm"] {
        let host = tempfile::Builder::new()
            .prefix("fumehood-host-")
            .tempfile_in(place)
            .unwrap();
        fs::write(host.path(), "the host's").unwrap();
        fs::set_permissions(host.path(), Permissions::from_mode(0o666)).unwrap();
        let script = format!(
            "path = {:?}\nprint('there' if os.path.exists(path) else 'absent')\nopen(path, 'x').write('mine')\nprint(open(path).read())",
            host.path()
        );
        if at_landlock() {
            closed_to_it(host.path());
            continue;
        }
        let ran = ConfinedRun::python(&script).run();
        assert!(
            ran.printed("absent") && ran.printed("mine"),
            "{}",
            ran.all()
        );
        assert_eq!(fs::read_to_string(host.path()).unwrap(), "the host's");
    }
    if is_root() {
        // The host's message queue has a name. Inside, names of message queues belong to another namespace.
        let name = format!("fumehood-test-{}", std::process::id());
        let open = |flags| {
            format!(
                "print('opened' if libc.syscall(240, b'{name}', {flags}, 0o666, None) >= 0 else 'absent')"
            )
        };
        let made = unconfined(&open(0o102));
        let (ran, control) = (
            ConfinedRun::python(&open(0o2)).run(),
            unconfined(&open(0o2)),
        );
        unconfined(&format!("libc.syscall(241, b'{name}')"));
        assert!(
            made.contains("opened") && control.contains("opened"),
            "{made}{control}"
        );
        assert!(ran.printed("absent"), "{}", ran.all());
    }
}

/// Level `landlock`: the program can neither read nor write the host's file, and can put no other file beside it.
fn closed_to_it(file: &Path) {
    let acts = format!(
        "import os\nfor act in (lambda: open({file:?}).read(), lambda: open({file:?}, 'r+'), lambda: open({file:?} + '-new', 'x'), \
         lambda: os.unlink({file:?} + '-new'), lambda: os.listdir(os.path.dirname({file:?}))):\n    \
             try: act(); print('did')\n    \
             except OSError: print('refused')"
    );
    let ran = ConfinedRun::python(&acts).run();
    assert_eq!(ran.stdout, "refused\n".repeat(5), "{}", ran.all());
    assert_eq!(fs::read_to_string(file).unwrap(), "the host's");
    assert_eq!(unconfined(&acts), "did\n".repeat(5));
}

trial!(Everyone, another_analysis_is_absent);
/// Two analyses run at once. The first one writes to a FIFO when it runs, and ends when its standard input ends.
fn another_analysis_is_absent() {
    let first = "open('secret', 'w').write('secret')\n\
                 os.chmod('secret', 0o666)\n\
                 try: os.chmod('.', 0o777)\n\
                 except PermissionError: pass\n\
                 out = os.open('ready', os.O_WRONLY); os.write(out, b'r')\n\
                 sys.stdin.read()\n\
                 print('seen', *sorted(os.listdir('.')))";
    let mut confined = ConfinedRun::python(first);
    let theirs = confined.workspace().to_path_buf();
    let (ready, release) = wait_at_fifo(&mut confined);
    let running = std::thread::spawn(move || confined.run());
    until_ready(ready);

    // At level `landlock` the program sees the host's tree, so the names exist, but nothing can be opened.
    let see = if at_landlock() {
        "os.open(path, 0)"
    } else {
        "os.stat(path)"
    };
    let look = format!(
        "try: print('listed', len([n for n in os.listdir('/tmp') if n.startswith('scidex-')]))\n\
         except PermissionError: print('listed 1')\n\
         for path in ('{0}', '{0}/secret', '/proc/self/cwd/../{1}/secret', '/proc/1/root{0}/secret'):\n    \
             try: {see}; print('there', path)\n    \
             except OSError: print('absent')\n\
         try: open('{0}/planted', 'w'); print('planted')\n\
         except OSError: print('refused')",
        theirs.display(),
        theirs.file_name().unwrap().to_str().unwrap(),
    );
    let ran = ConfinedRun::python(&look).run();
    assert!(
        ran.printed("listed 1") && ran.printed("refused"),
        "{}",
        ran.all()
    );
    assert_eq!(ran.stdout.matches("absent").count(), 4, "{}", ran.all());
    let control = unconfined(&look);
    assert!(
        control.contains("there") && control.contains("planted"),
        "{control}"
    );
    drop(release);
    let ran = running.join().unwrap();
    assert!(
        ran.printed("seen .fumehood planted ready secret"),
        "{}",
        ran.all()
    );
}

trial!(Everyone, times_of_devices_stay);
/// A process that may write to a file may also set the file's times to now, and every process may write to these
/// devices. The devices still work after the refusals.
fn times_of_devices_stay() {
    let script = "
def attempt(name, act):
    try: act(); print(f'{name}: done')
    except OSError as e: print(f'{name}: refused')
open('own', 'w').close()
for name in 'own', '/dev/null', '/dev/zero', '/dev/full', '/dev/random', '/dev/urandom':
    attempt(name, lambda: os.utime(name))
    fd = os.open(name, os.O_RDONLY)
    attempt(name + ' held', lambda: os.utime(fd))
os.system('echo x > /dev/null; echo x >> /dev/null')
open('/dev/null', 'w+').write('x')
assert open('/dev/zero', 'rb').read(3) == bytes(3) and len(open('/dev/urandom', 'rb').read(3)) == 3
try: os.write(os.open('/dev/full', os.O_RDWR), b'x')
except OSError as e: print(errno.errorcode[e.errno])
";
    let devices = ["null", "zero", "full", "random", "urandom"];
    let ran = ConfinedRun::python(script).run();
    let mut expected = String::from("own: done\nown held: done\n");
    for device in devices {
        expected += &format!("/dev/{device}: refused\n/dev/{device} held: refused\n");
    }
    expected += "ENOSPC\n";
    assert_eq!(ran.stdout, expected, "{}", ran.all());
}
