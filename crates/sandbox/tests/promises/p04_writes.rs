//! P4: the analysis writes only to its workspace, its private /tmp and its private /dev/shm.

use std::fs::{self, Permissions};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::hood::{Hood, is_root, unconfined};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    (
        "files_are_made_in_its_own_directories_only",
        For::Everyone,
        files_are_made_in_its_own_directories_only,
    ),
    (
        "files_of_the_system_cannot_be_opened_for_writing",
        For::Everyone,
        files_of_the_system_cannot_be_opened,
    ),
    (
        "what_it_writes_arrives",
        For::Everyone,
        what_it_writes_arrives,
    ),
    (
        "the_hidden_directory_is_empty_and_closed",
        For::Everyone,
        the_hidden_directory_is_empty_and_closed,
    ),
    (
        "shared_memory_and_tmp_are_private",
        For::Everyone,
        shared_memory_and_tmp_are_private,
    ),
    (
        "another_analysis_is_absent",
        For::Everyone,
        another_analysis_is_absent,
    ),
];

/// Every directory there is: tries to make a file in each, by its name and by its descriptor.
const MAKE_EVERYWHERE: &str = "
def make_everywhere(root):
    tried = 0
    for top, below, files in os.walk(root):
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

fn files_are_made_in_its_own_directories_only() {
    let open = tempfile::Builder::new()
        .prefix("fumehood-host-")
        .tempdir_in("/tmp")
        .unwrap();
    for dir in [open.path().join("below"), open.path().to_path_buf()] {
        fs::create_dir_all(&dir).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o777)).unwrap();
    }
    let script = format!(
        "{MAKE_EVERYWHERE}os.makedirs('deep/deeper')\nos.makedirs('/dev/shm/deep')\nmake_everywhere('/')"
    );
    let hood = Hood::python(&script).view(open.path(), "data");
    let workspace = hood.workspace().to_str().unwrap().to_owned();
    fs::create_dir(hood.workspace().join("given")).unwrap();
    let ran = hood.run();
    assert_eq!(ran.code(), Some(0), "{}", ran.all());
    // The whole list, so that a walk which missed its own places would be seen as well.
    let inner = ["", "/deep", "/deep/deeper", "/given"].map(|inner| format!("{workspace}{inner}"));
    let mut own: Vec<&str> = vec!["/dev/shm", "/dev/shm/deep", "/tmp", "/tmp/home"];
    own.extend(inner.iter().map(String::as_str));
    own.sort_unstable();
    assert_eq!(places(&ran.stdout), own, "{}", ran.stderr);
    let tried = ran
        .stdout
        .lines()
        .find_map(|l| l.strip_prefix("tried "))
        .unwrap();
    assert!(
        tried.parse::<u32>().unwrap() > 1000,
        "only {tried} directories"
    );
    // The control: the view's source, which was refused above, takes a file from the same script on the host.
    assert!(fs::read_dir(open.path()).unwrap().count() == 1);
    let control = unconfined(&format!(
        "{MAKE_EVERYWHERE}make_everywhere({:?})",
        open.path()
    ));
    assert_eq!(places(&control).len(), 2, "{control}");
}

fn files_of_the_system_cannot_be_opened() {
    let script = "
count = 0
for root in ('/etc', '/usr/bin', '/usr/lib/python3', '/bin', '/lib64'):
    for top, below, files in os.walk(root):
        for path in (os.path.join(top, name) for name in files):
            count += 1
            for act in (lambda: os.close(os.open(path, os.O_WRONLY)), lambda: os.chmod(path, 0o777), lambda: os.utime(path),
                        lambda: os.unlink(path), lambda: os.rename(path, path + '.old')):
                try: act(); print('did', path)
                except OSError: pass
print('enough' if count > 500 else count)
";
    let ran = Hood::python(script).run();
    assert!(
        ran.said("enough") && !ran.stdout.contains("did"),
        "{}",
        ran.all()
    );
    // The same acts on a file of its own.
    let own = "open('own', 'w').close(); os.chmod('own', 0o600); os.utime('own'); os.rename('own', 'new'); os.unlink('new'); print('did')";
    assert!(Hood::python(own).run().said("did"));
}

/// The workspace is the same directory inside and outside; /tmp and /dev/shm are not the host's.
fn what_it_writes_arrives() {
    let mark = format!("fumehood-mark-{}", std::process::id());
    let script = format!(
        "echo result > result.txt; mkdir -p a/b; echo deep > a/b/c; echo x > /tmp/{mark}; echo x > /dev/shm/{mark}; \
         test -s /tmp/{mark} && test -s /dev/shm/{mark} && test -s /var/tmp/{mark} && echo written; echo y > ready; read line"
    );
    let mut hood = Hood::sh(&script);
    let workspace = hood.workspace().to_path_buf();
    let (ready, release) = wait_at_fifo(&mut hood);
    let running = std::thread::spawn(move || hood.run());
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
    assert!(ran.said("written"), "{}", ran.all());
}

/// Gives the hood a FIFO named `ready` to report on and a standard input that ends when the second is dropped.
fn wait_at_fifo(hood: &mut Hood) -> (fs::File, OwnedFd) {
    let fifo = hood.workspace().join("ready");
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
    hood.stdin = Some(input);
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
    let ran = Hood::python(script).run();
    assert!(
        ran.said("holds") && ran.stdout.matches("refused").count() == 8,
        "{}",
        ran.all()
    );
    // The control: a directory of its own with a dot allows all but the last two, which find it gone.
    let control = "
for name in ('make', 'mkdir', 'chmod', 'attribute', 'rename'):
    os.makedirs('.own', exist_ok=True)
    {'make': lambda: open('.own/x', 'w').close(), 'mkdir': lambda: os.mkdir('.own/tmp'), 'chmod': lambda: os.chmod('.own', 0o777),
     'attribute': lambda: os.setxattr('.own', 'user.x', b'1'), 'rename': lambda: os.rename('.own', '.new')}[name]()
os.mkdir('other'); os.rename('other', '.own'); os.rmdir('.own')
print('did all')
";
    let ran = Hood::python(control).run();
    assert!(ran.said("did all"), "{}", ran.all());
}

/// Names that exist on the host in its /tmp and /dev/shm can be made anew inside, and are other files.
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
        let ran = Hood::python(&script).run();
        assert!(ran.said("absent") && ran.said("mine"), "{}", ran.all());
        assert_eq!(fs::read_to_string(host.path()).unwrap(), "the host's");
    }
    if is_root() {
        // A message queue of the host's, opened by its name: inside, names of queues are another namespace's.
        let name = format!("fumehood-test-{}", std::process::id());
        let open = |flags| {
            format!(
                "print('opened' if libc.syscall(240, b'{name}', {flags}, 0o666, None) >= 0 else 'absent')"
            )
        };
        let made = unconfined(&open(0o102));
        let (ran, control) = (Hood::python(&open(0o2)).run(), unconfined(&open(0o2)));
        unconfined(&format!("libc.syscall(241, b'{name}')"));
        assert!(
            made.contains("opened") && control.contains("opened"),
            "{made}{control}"
        );
        assert!(ran.said("absent"), "{}", ran.all());
    }
}

/// Two at once. The first says on a FIFO that it is there, and waits for the end of its standard input.
fn another_analysis_is_absent() {
    let first = "open('secret', 'w').write('secret')\n\
                 os.chmod('secret', 0o666); os.chmod('.', 0o777)\n\
                 out = os.open('ready', os.O_WRONLY); os.write(out, b'r')\n\
                 sys.stdin.read()\n\
                 print('seen', *sorted(os.listdir('.')))";
    let mut hood = Hood::python(first);
    let theirs = hood.workspace().to_path_buf();
    let (ready, release) = wait_at_fifo(&mut hood);
    let running = std::thread::spawn(move || hood.run());
    until_ready(ready);

    let look = format!(
        "print('listed', len([n for n in os.listdir('/tmp') if n.startswith('scidex-')]))\n\
         for path in ('{0}', '{0}/secret', '/proc/self/cwd/../{1}/secret', '/proc/1/root{0}/secret'):\n    \
             try: os.stat(path); print('there', path)\n    \
             except OSError: print('absent')\n\
         try: open('{0}/planted', 'w'); print('planted')\n\
         except OSError: print('refused')",
        theirs.display(),
        theirs.file_name().unwrap().to_str().unwrap(),
    );
    let ran = Hood::python(&look).run();
    assert!(ran.said("listed 1") && ran.said("refused"), "{}", ran.all());
    assert_eq!(ran.stdout.matches("absent").count(), 4, "{}", ran.all());
    let control = unconfined(&look);
    assert!(
        control.contains("there") && control.contains("planted"),
        "{control}"
    );
    drop(release);
    let ran = running.join().unwrap();
    assert!(
        ran.said("seen .fumehood planted ready secret"),
        "{}",
        ran.all()
    );
}
