//! P2: the analysis may read `data/` and `docs/`, at their host path and in its working directory, and can change
//! neither their content nor their metadata. Inside, nothing else of the project exists.
//!
//! Every act below is tried inside, at both paths, and unconfined on a copy as its control. Afterwards the trial compares the
//! host's tree, change times included, so that a false report of a refusal is noticed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::{inner_arguments, is_root, trial};

use crate::confined_run::{
    ConfinedResult, ConfinedRun, at_landlock, host_dir, unconfined, unconfined_under,
};

/// Acts on the file `F`, named `N`, in the directory `D`, with `W` a writable directory. Each is Python that
/// raises when it is refused. Each act has a file of its own.
#[rustfmt::skip]
const ACTS: &[(&str, &str)] = &[
    ("open_for_writing", "os.open(F, os.O_WRONLY)"),
    ("open_for_both", "os.open(F, os.O_RDWR)"),
    ("open_for_appending", "os.open(F, os.O_WRONLY | os.O_APPEND)"),
    ("open_truncating", "os.open(F, os.O_RDONLY | os.O_TRUNC)"),
    ("truncate", "os.truncate(F, 0)"),
    ("create", "os.open(D + '/created', os.O_WRONLY | os.O_CREAT | os.O_EXCL)"),
    ("chmod", "os.chmod(F, 0o777)"),
    ("chmod_by_descriptor", "os.fchmod(os.open(F, os.O_RDONLY), 0o777)"),
    ("chmod_the_directory", "os.chmod(D, 0o777)"),
    ("chown", "os.chown(F, os.getuid(), os.getgid())"),
    ("chown_by_descriptor", "os.fchown(os.open(F, os.O_RDONLY), os.getuid(), os.getgid())"),
    ("utime", "os.utime(F, (1, 1))"),
    ("utime_now", "os.utime(F)"),
    ("utime_by_descriptor", "os.utime(os.open(F, os.O_RDONLY), (1, 1))"),
    ("set_attribute", "os.setxattr(F, 'user.mine', b'1')"),
    ("set_attribute_by_descriptor", "os.setxattr(os.open(F, os.O_RDONLY), 'user.mine', b'1')"),
    ("remove_attribute", "os.removexattr(F, 'user.kept')"),
    ("set_file_flags", "set_flags(os.open(F, os.O_RDONLY))"),
    ("rename_within", "os.rename(F, F + '.renamed')"),
    ("rename_out", "os.rename(F, W + '/' + N)"),
    ("rename_in", "open(W + '/' + N, 'w').close(); os.rename(W + '/' + N, F)"),
    ("rename_exchange", "open(W + '/' + N, 'w').close()\ncheck(libc.renameat2(-100, (W + '/' + N).encode(), -100, F.encode(), 2))"),
    ("unlink", "os.unlink(F)"),
    ("rmdir", "os.rmdir(D + '/hollow')"),
    ("mkdir", "os.mkdir(D + '/made')"),
    ("symlink", "os.symlink('/', D + '/pointing')"),
    ("make_fifo", "os.mkfifo(D + '/piped')"),
    ("bind_socket", "os.chdir(D); socket.socket(socket.AF_UNIX).bind('bound')"),
    ("link_within", "os.link(F, F + '.linked')"),
    ("link_out", "os.link(F, W + '/' + N)"),
    ("link_in", "open(W + '/' + N, 'w').close(); os.link(W + '/' + N, D + '/linked')"),
    ("link_out_by_descriptor", "link_fd(os.open(F, os.O_RDONLY), W + '/' + N)"),
    ("nameless_file", "os.open(D, os.O_TMPFILE | os.O_RDWR)"),
    ("nameless_file_linked_in", "link_fd(os.open(W, os.O_TMPFILE | os.O_RDWR), D + '/named')"),
    ("map_shared", "import mmap; mmap.mmap(os.open(F, os.O_RDWR), 0)[0] = 88"),
    ("through_dot_dot", "os.open(W + '/' + os.path.relpath(F, W), os.O_WRONLY)"),
    ("through_symlink", "os.symlink(F, W + '/' + N); os.open(W + '/' + N, os.O_WRONLY)"),
    ("through_symlinked_directory", "os.symlink(D, W + '/' + N); os.open(W + '/' + N + '/' + N, os.O_WRONLY)"),
    ("through_symlink_truncate", "os.symlink(F, W + '/' + N); os.truncate(W + '/' + N, 0)"),
    ("through_own_fd", "os.open(fd_path(os.open(F, os.O_RDONLY)), os.O_RDWR)"),
    ("through_own_fd_opened_as_path", "os.open(fd_path(os.open(F, os.O_PATH)), os.O_RDWR)"),
    ("through_own_fd_truncate", "os.truncate(fd_path(os.open(F, os.O_PATH)), 0)"),
    ("through_own_fd_chmod", "os.chmod(fd_path(os.open(F, os.O_PATH)), 0o777)"),
    ("through_own_fd_of_directory", "os.open(fd_path(os.open(D, os.O_PATH)) + '/' + N, os.O_WRONLY)"),
    ("through_own_root", "os.open('/proc/self/root' + F, os.O_WRONLY)"),
    ("through_own_directory", "os.chdir(D); os.open('/proc/self/cwd/' + N, os.O_WRONLY)"),
    ("through_childs_root", "with_child(lambda pid: os.open(f'/proc/{pid}/root' + F, os.O_WRONLY))"),
    ("through_childs_fd", "fd = os.open(F, os.O_RDONLY)\nwith_child(lambda pid: os.open(f'/proc/{pid}/fd/{fd}', os.O_RDWR))"),
];

/// Acts on mounts. The control does them as root of a new user namespace and mount namespace.
#[rustfmt::skip]
const MOUNT_ACTS: &[(&str, &str)] = &[
    ("bind_over", "check(libc.mount(W.encode(), D.encode(), None, BIND, None))"),
    ("bind_elsewhere", "check(libc.mount(D.encode(), W.encode(), None, BIND, None))"),
    ("tmpfs_over", "check(libc.mount(b'none', D.encode(), b'tmpfs', 0, None))"),
    ("remount_writable", "bound(); check(libc.mount(None, D.encode(), None, BIND | REMOUNT, None))"),
    ("set_writable", "bound(); check(libc.syscall(442, -100, D.encode(), 0, b'\\0' * 8 + b'\\1' + b'\\0' * 23, 32))"),
    ("unmount", "bound(); check(libc.umount2(D.encode(), 0))"),
    ("detach", "bound(); check(libc.umount2(D.encode(), 2))"),
    ("copy_the_mount", "check(libc.syscall(428, -100, D.encode(), 1))"),
    ("open_a_file_system", "check(libc.syscall(430, b'tmpfs', 0))"),
    ("new_mount_namespace", "check(libc.unshare(0x20000))"),
    ("new_user_namespace", "check(libc.unshare(0x10000000))"),
    ("change_root", "check(libc.chroot(D.encode()))"),
];

const TOOLS: &str = "
import fcntl
BIND, REMOUNT = 4096, 32
def check(result):
    if result < 0: raise OSError(ctypes.get_errno(), 'refused')
def bound():
    # The control needs a mount there to act on; inside there is one already.
    libc.mount(D.encode(), D.encode(), None, BIND, None)
def fd_path(fd):
    return f'/proc/self/fd/{fd}'
def set_flags(fd):
    # FS_IOC_GETFLAGS and FS_IOC_SETFLAGS, to add \"no dump\".
    flags = int.from_bytes(fcntl.ioctl(fd, 0x80086601, bytes(8)), 'little')
    fcntl.ioctl(fd, 0x40086602, (flags | 0x40).to_bytes(8, 'little'))
def link_fd(fd, to):
    check(libc.linkat(-100, fd_path(fd).encode(), -100, to.encode(), 0x400))
def with_child(act):
    end, other = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(other)
        os.read(end, 1)
        os._exit(0)
    try: act(pid)
    finally: os.close(other); os.waitpid(pid, 0)
def attempt(name, act):
    # A child for each: what one act leaves behind, a mount or a working directory, is not there for the next.
    if os.fork():
        os.wait()
        return
    try: act(name, D + '/' + name); print('did', name, flush=True)
    except OSError as e: print('refused', name, e.errno, flush=True)
    os._exit(0)
";

/// A Python script that tries every act on `data`, and makes `scratch` as a writable directory.
fn attack(acts: &[(&str, &str)], data: &Path, scratch: &Path) -> String {
    let mut script = format!("D, W = {data:?}, {scratch:?}\nos.makedirs(W)\n{TOOLS}");
    for (name, body) in acts {
        let body = body.replace('\n', "\n    ");
        script += &format!("def act(N, F):\n    {body}\nattempt({name:?}, act)\n");
    }
    script
}

/// The names of the acts whose result is `verdict`, in order.
fn came_out<'a>(verdict: &str, printed: &'a str) -> Vec<&'a str> {
    let told = printed.lines().filter_map(|line| line.split_once(' '));
    told.filter(|(word, _)| *word == verdict)
        .filter_map(|(_, rest)| rest.split(' ').next())
        .collect()
}

fn all_of<'a>(acts: &'a [(&'a str, &'a str)]) -> Vec<&'a str> {
    acts.iter().map(|(name, _)| *name).collect()
}

/// A directory like that of a project: outside /tmp and /var/tmp, and writable for the user who runs the trial.
fn project_dir() -> tempfile::TempDir {
    let home = if is_root() {
        "/srv".into()
    } else {
        std::env::var("HOME").unwrap()
    };
    let dir = tempfile::Builder::new()
        .prefix("fumehood-host-")
        .tempdir_in(home)
        .unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    dir
}

fn below_tmp() -> tempfile::TempDir {
    let dir = tempfile::Builder::new()
        .prefix("fumehood-host-")
        .tempdir_in("/tmp")
        .unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    dir
}

/// Makes a file for every act, each with an extended attribute that the act could remove.
fn fill_data(data: &Path) {
    fs::create_dir_all(data.join("hollow")).unwrap();
    for (name, _) in ACTS {
        let file = data.join(name);
        fs::write(&file, "measured\n").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        rustix::fs::setxattr(&file, "user.kept", b"yes", rustix::fs::XattrFlags::empty()).unwrap();
    }
    fs::set_permissions(data, Permissions::from_mode(0o755)).unwrap();
}

/// The metadata of a path on the host, without the access time.
#[derive(Debug, PartialEq, Eq)]
struct FileFacts {
    numbers: [u64; 6],
    times: [i64; 4],
    attributes: Vec<u8>,
    content: Vec<u8>,
}

fn snapshot(root: &Path) -> BTreeMap<PathBuf, FileFacts> {
    let mut seen = BTreeMap::new();
    let mut pending = vec![root.to_path_buf()];
    while let Some(path) = pending.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let content = match meta.file_type() {
            kind if kind.is_file() => fs::read(&path).unwrap(),
            kind if kind.is_symlink() => fs::read_link(&path)
                .unwrap()
                .as_os_str()
                .as_bytes()
                .to_vec(),
            kind if kind.is_dir() => {
                let mut names: Vec<OsString> = fs::read_dir(&path)
                    .unwrap()
                    .map(|e| e.unwrap().file_name())
                    .collect();
                names.sort();
                pending.extend(names.iter().map(|n| path.join(n)));
                names.join(std::ffi::OsStr::new("/")).as_bytes().to_vec()
            }
            kind => vec![u8::from(kind.is_fifo()), u8::from(kind.is_socket())],
        };
        let mut attributes = vec![0; 4096];
        let length = rustix::fs::llistxattr(&path, &mut attributes[..]).unwrap();
        attributes.truncate(length);
        let known = FileFacts {
            numbers: [
                meta.ino(),
                meta.mode().into(),
                meta.uid().into(),
                meta.gid().into(),
                meta.nlink(),
                meta.size(),
            ],
            times: [
                meta.mtime(),
                meta.mtime_nsec(),
                meta.ctime(),
                meta.ctime_nsec(),
            ],
            attributes,
            content,
        };
        seen.insert(path, known);
    }
    seen
}

/// Runs a script twice with a view of `data`: once with the host path, once with the path in the workspace.
fn at_both_paths(data: &Path, script: impl Fn(&Path, &Path) -> String) -> [ConfinedResult; 2] {
    let at_host = ConfinedRun::python_in(|work| script(data, &work.join("scratch")));
    let at_work = ConfinedRun::python_in(|work| script(&work.join("data"), &work.join("scratch")));
    [at_host, at_work].map(|confined| confined.view(data, "data").run())
}

/// Tries all acts on a view of `data` at both paths; each is refused and the host's tree stays as it was.
fn all_refused(acts: &[(&str, &str)], data: &Path) {
    let before = snapshot(data);
    for ran in at_both_paths(data, |data, scratch| attack(acts, data, scratch)) {
        assert_eq!(
            came_out("refused", &ran.stdout),
            all_of(acts),
            "{}",
            ran.all()
        );
    }
    assert_eq!(before, snapshot(data), "the host's tree changed");
}

trial!(Everyone, content_and_metadata_stay);
fn content_and_metadata_stay() {
    closed_below(project_dir());
}

trial!(Everyone, mounts_stay);
fn mounts_stay() {
    let dir = project_dir();
    let data = dir.path().join("data");
    fill_data(&data);
    let own = ["unshare", "--user", "--map-root-user", "--mount"];
    let control = unconfined_under(
        &own,
        &attack(MOUNT_ACTS, &data, &dir.path().join("scratch")),
    );
    assert_eq!(came_out("did", &control), all_of(MOUNT_ACTS), "{control}");
    all_refused(MOUNT_ACTS, &data);
}

trial!(
    Everyone,
    reading_leaves_no_trace,
    only_at_full = "only a mount of one's own can be without times of access"
);
/// Reading a file in a view does not change the file's access time.
fn reading_leaves_no_trace() {
    let dir = project_dir();
    let data = dir.path().join("data");
    fs::create_dir(&data).unwrap();
    let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    let atime = |path: &Path| fs::metadata(path).unwrap().atime();
    for name in ["inside", "control"] {
        let file = fs::File::create(data.join(name)).unwrap();
        fs::write(data.join(name), "measured\n").unwrap();
        file.set_times(fs::FileTimes::new().set_accessed(old))
            .unwrap();
    }
    let read = |data: &Path, _: &Path| format!("print(open({:?}).read())", data.join("inside"));
    for ran in at_both_paths(&data, read) {
        assert!(ran.printed("measured"), "{}", ran.all());
    }
    assert_eq!(atime(&data.join("inside")), 1_000_000_000);
    unconfined(&format!("open({:?}).read()", data.join("control")));
    let options = rustix::fs::statvfs(&data).unwrap().f_flag;
    if !options.contains(rustix::fs::StatVfsMountFlags::NOATIME) {
        assert_ne!(
            atime(&data.join("control")),
            1_000_000_000,
            "the control left no trace"
        );
    }
}

trial!(Everyone, data_below_tmp);
/// A view of data below the host's /tmp is mounted in the program's own, writable /tmp. The view itself is read-only all the
/// same.
fn data_below_tmp() {
    closed_below(below_tmp());
}

trial!(Everyone, data_below_var_tmp);
/// Inside, /var/tmp is a link to the private /tmp. A view whose host path is below /var/tmp must exist inside.
fn data_below_var_tmp() {
    closed_below(host_dir());
}

fn closed_below(dir: tempfile::TempDir) {
    let (data, copy) = (dir.path().join("data"), dir.path().join("copy"));
    fill_data(&data);
    fill_data(&copy);
    let before = snapshot(&copy);
    let control = unconfined(&attack(ACTS, &copy, &dir.path().join("scratch")));
    assert_eq!(came_out("did", &control), all_of(ACTS), "{control}");
    assert_ne!(before, snapshot(&copy), "the witness saw nothing of it");
    all_refused(ACTS, &data);
}

trial!(Everyone, a_fifo_cannot_be_written);
/// A read-only mount alone does not refuse a write to a FIFO, because the bytes go to the reader and not to the file system.
fn a_fifo_cannot_be_written() {
    for dir in [project_dir(), below_tmp()] {
        let data = dir.path().join("data");
        fs::create_dir(&data).unwrap();
        let fifo = data.join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            0o666.into(),
            0,
        )
        .unwrap();
        fs::set_permissions(&fifo, Permissions::from_mode(0o666)).unwrap();
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let mut reader = fs::File::options()
            .read(true)
            .custom_flags(nonblocking)
            .open(&fifo)
            .unwrap();
        let mut bytes = [0; 64];
        let script = |data: &Path, scratch: &Path| {
            let acts: &[(&str, &str)] = &[
                (
                    "write",
                    "os.write(os.open(D + '/fifo', os.O_WRONLY | os.O_NONBLOCK), b'x')",
                ),
                (
                    "write_opened_for_both",
                    "os.write(os.open(D + '/fifo', os.O_RDWR | os.O_NONBLOCK), b'x')",
                ),
                (
                    "through_symlink",
                    "os.symlink(D + '/fifo', W + '/f'); os.write(os.open(W + '/f', os.O_WRONLY | os.O_NONBLOCK), b'x')",
                ),
                (
                    "through_own_fd",
                    "fd = os.open(D + '/fifo', os.O_RDONLY | os.O_NONBLOCK)\nos.write(os.open(fd_path(fd), os.O_WRONLY | os.O_NONBLOCK), b'x')",
                ),
                (
                    "through_path_fd",
                    "os.write(os.open(fd_path(os.open(D + '/fifo', os.O_PATH)), os.O_WRONLY | os.O_NONBLOCK), b'x')",
                ),
            ];
            attack(acts, data, scratch)
        };
        for ran in at_both_paths(&data, script) {
            // At level `full` the FIFO belongs to the overlay: both of its ends can be opened, and no byte reaches the
            // host. The number of results shows that every act was tried. Below, the host's reader shows that no byte
            // arrived.
            let tried = ["did", "refused"].map(|word| came_out(word, &ran.stdout).len());
            assert_eq!(tried.iter().sum::<usize>(), 5, "{}", ran.all());
        }
        assert!(
            !matches!(reader.read(&mut bytes), Ok(n) if n > 0),
            "the host's reader got bytes"
        );
        let control = unconfined(&script(&data, &dir.path().join("scratch")));
        assert_eq!(came_out("did", &control).len(), 5, "{control}");
        assert_eq!(reader.read(&mut bytes).unwrap(), 5);
    }
}

trial!(Everyone, a_stream_socket_cannot_be_connected);
fn a_stream_socket_cannot_be_connected() {
    for dir in [project_dir(), below_tmp()] {
        let data = dir.path().join("data");
        fs::create_dir(&data).unwrap();
        let listener = UnixListener::bind(data.join("s")).unwrap();
        listener.set_nonblocking(true).unwrap();
        fs::set_permissions(data.join("s"), Permissions::from_mode(0o777)).unwrap();
        let script = |data: &Path, scratch: &Path| {
            let acts: &[(&str, &str)] = &[
                ("connect", "socket.socket(socket.AF_UNIX).connect(D + '/s')"),
                (
                    "relative",
                    "os.chdir(D); socket.socket(socket.AF_UNIX).connect('s')",
                ),
                (
                    "through_symlink",
                    "os.symlink(D + '/s', W + '/s'); socket.socket(socket.AF_UNIX).connect(W + '/s')",
                ),
                (
                    "through_own_fd",
                    "socket.socket(socket.AF_UNIX).connect(fd_path(os.open(D + '/s', os.O_PATH)))",
                ),
                (
                    "through_own_root",
                    "os.chdir(D); socket.socket(socket.AF_UNIX).connect('/proc/self/cwd/s')",
                ),
                (
                    "from_a_thread",
                    "import concurrent.futures as c\nc.ThreadPoolExecutor(1).submit(socket.socket(socket.AF_UNIX).connect, D + '/s').result()",
                ),
            ];
            attack(acts, data, scratch)
        };
        for ran in at_both_paths(&data, script) {
            assert_eq!(came_out("refused", &ran.stdout).len(), 6, "{}", ran.all());
            assert_eq!(
                listener.accept().unwrap_err().kind(),
                std::io::ErrorKind::WouldBlock
            );
        }
        let control = unconfined(&script(&data, &dir.path().join("scratch")));
        assert_eq!(came_out("did", &control).len(), 6, "{control}");
        for _ in 0..6 {
            listener.accept().unwrap();
        }
    }
}

trial!(Everyone, a_datagram_socket_cannot_be_sent_to);
fn a_datagram_socket_cannot_be_sent_to() {
    let dir = project_dir();
    let data = dir.path().join("data");
    fs::create_dir(&data).unwrap();
    let receiver = UnixDatagram::bind(data.join("s")).unwrap();
    receiver.set_nonblocking(true).unwrap();
    fs::set_permissions(data.join("s"), Permissions::from_mode(0o777)).unwrap();
    let script = |data: &Path, scratch: &Path| {
        let acts: &[(&str, &str)] = &[
            (
                "send",
                "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', D + '/s')",
            ),
            (
                "send_from_pair",
                "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', D + '/s')",
            ),
            (
                "send_raw",
                "socket.socket(socket.AF_UNIX, socket.SOCK_RAW).sendto(b'x', D + '/s')",
            ),
        ];
        attack(acts, data, scratch)
    };
    for ran in at_both_paths(&data, script) {
        assert_eq!(came_out("refused", &ran.stdout).len(), 3, "{}", ran.all());
        assert_eq!(
            receiver.recv(&mut [0]).unwrap_err().kind(),
            std::io::ErrorKind::WouldBlock
        );
    }
    let control = unconfined(&script(&data, &dir.path().join("scratch")));
    assert_eq!(came_out("did", &control).len(), 3, "{control}");
    receiver.recv(&mut [0]).unwrap();
}

trial!(Everyone, a_link_out_leads_nowhere);
fn a_link_out_leads_nowhere() {
    let dir = project_dir();
    let data = dir.path().join("project/data");
    fs::create_dir_all(&data).unwrap();
    fs::write(data.join("kept"), "kept").unwrap();
    fs::write(dir.path().join("project/secret"), "secret").unwrap();
    symlink(dir.path().join("project/secret"), data.join("absolute")).unwrap();
    symlink("../secret", data.join("relative")).unwrap();
    symlink("../../../../../../../../etc/hostname", data.join("far")).unwrap();
    symlink(dir.path(), data.join("directory")).unwrap();
    symlink("kept", data.join("inward")).unwrap();
    let script = |data: &Path, _: &Path| {
        format!(
            "for name in ('absolute', 'relative', 'directory/project/secret', 'inward', 'far'):\n    \
                 try: print(name, open(os.path.join({data:?}, name)).read())\n    \
                 except OSError as e: print(name, errno.errorcode[e.errno])"
        )
    };
    for ran in at_both_paths(&data, script) {
        // At level `full` the file does not exist inside. At level `landlock` the file exists and cannot be opened.
        let refused = if at_landlock() { "EACCES" } else { "ENOENT" };
        for name in ["absolute", "relative", "directory/project/secret"] {
            assert!(ran.printed(&format!("{name} {refused}")), "{}", ran.all());
        }
        assert!(ran.printed("inward kept"), "{}", ran.all());
        // At level `full`, `..` stops at the sandbox's own root, where another file has this name.
        let far = if at_landlock() { "EACCES" } else { "fumehood" };
        assert!(ran.printed(&format!("far {far}")), "{}", ran.all());
    }
    let control = unconfined(&script(&data, dir.path()));
    for line in [
        "absolute secret",
        "relative secret",
        "directory/project/secret secret",
        "inward kept",
    ] {
        assert!(control.lines().any(|l| l == line), "no {line:?}: {control}");
    }
}

trial!(Everyone, nothing_in_data_executes);
fn nothing_in_data_executes() {
    let dir = project_dir();
    let (data, copy) = (dir.path().join("data"), dir.path().join("copy"));
    let acts: &[(&str, &str)] = &[
        (
            "execute",
            "import subprocess; subprocess.run([D + '/true'], check=True)",
        ),
        (
            "execute_by_descriptor",
            "import subprocess; subprocess.run([fd_path(os.open(D + '/true', os.O_RDONLY))], close_fds=False)",
        ),
        (
            "map_executable",
            "import mmap; mmap.mmap(os.open(D + '/true', os.O_RDONLY), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)",
        ),
    ];
    for place in [&data, &copy] {
        fs::create_dir(place).unwrap();
        fs::copy("/bin/true", place.join("true")).unwrap();
    }
    // Landlock refuses execve. But a program may map a file as executable if it may read the file.
    let refused = if at_landlock() { &acts[..2] } else { acts };
    for ran in at_both_paths(&data, |data, scratch| attack(acts, data, scratch)) {
        assert_eq!(
            came_out("refused", &ran.stdout),
            all_of(refused),
            "{}",
            ran.all()
        );
    }
    let control = unconfined(&attack(acts, &copy, &dir.path().join("scratch")));
    assert_eq!(came_out("did", &control), all_of(acts), "{control}");
    // Control: a program in the workspace executes, so it is the view that refuses.
    let ran = ConfinedRun::sh("cp /bin/true ./own && ./own && echo ran").run();
    assert!(ran.printed("ran"), "{}", ran.all());
}

trial!(
    Everyone,
    the_rest_of_the_project_is_absent,
    only_at_full = "names can be asked for; that nothing of it can be read or listed is landlock_level::the_rest_of_the_project_cannot_be_read"
);
fn the_rest_of_the_project_is_absent() {
    let dir = project_dir();
    let project = dir.path().join("project");
    for inner in ["data", "docs", "site", ".git/objects"] {
        fs::create_dir_all(project.join(inner)).unwrap();
    }
    for file in [
        "api.py",
        ".env",
        "data/x",
        "docs/y",
        "site/z",
        ".git/config",
        "scidex.db",
    ] {
        fs::write(project.join(file), "text").unwrap();
    }
    let list = format!(
        "found = sorted(os.path.relpath(os.path.join(top, n), {project:?}) for top, ds, fs in os.walk({project:?}) for n in ds + fs)\n\
         print('found', *found)\n\
         print('above', *os.listdir({:?}))",
        dir.path()
    );
    let ran = ConfinedRun::python(&list)
        .view(&project.join("data"), "data")
        .view(&project.join("docs"), "docs")
        .run();
    assert!(
        ran.printed("found data data/x docs docs/y"),
        "{}",
        ran.all()
    );
    assert!(ran.printed("above project"), "{}", ran.all());
    fs::write(dir.path().join("beside"), "").unwrap();
    let control = unconfined(&list);
    assert!(
        control.contains(".env .git .git/config") && control.contains("scidex.db"),
        "{control}"
    );
}

trial!(
    Root,
    owner_only_data_is_read_not_written,
    only_at_full = "only a mount can show another owner; that the run is refused is landlock_level::owner_only_data_is_refused_with_a_reason"
);
/// The idmapped mount shows root's files as the program's own. The program can read them and cannot change them.
fn owner_only_data_is_read_not_written() {
    let dir = project_dir();
    let data = dir.path().join("data");
    fill_data(&data);
    fs::write(data.join("secret"), "measured\n").unwrap();
    for (path, mode) in [(data.join("secret"), 0o600), (data.clone(), 0o700)] {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }
    for ran in at_both_paths(&data, |data, _| {
        format!("print(open({:?}).read())", data.join("secret"))
    }) {
        assert!(ran.printed("measured"), "{}", ran.all());
    }
    all_refused(ACTS, &data);
    // Control: another unprivileged user of this host cannot read the file.
    let (uid, gid) = testkit::account::uid_and_gid();
    let mut stranger = Command::new("/bin/cat");
    std::os::unix::process::CommandExt::uid(&mut stranger, uid);
    std::os::unix::process::CommandExt::gid(&mut stranger, gid);
    assert!(
        !stranger
            .arg(data.join("secret"))
            .output()
            .unwrap()
            .status
            .success()
    );
}

trial!(Root, a_mount_in_data_is_read_only_too);
/// The trial runs itself again in a new mount namespace, so that no other process sees its mount. The outer process owns the
/// directory, and removes it when that namespace and its mount are gone.
fn a_mount_in_data_is_read_only_too() {
    const INNER: &str = "FUMEHOOD_TEST_SUBMOUNT";
    assert!(is_root());
    let Some(data) = std::env::var_os(INNER).map(PathBuf::from) else {
        let dir = project_dir();
        let again = Command::new("unshare")
            .args(["--mount", "--propagation", "private"])
            .arg(std::env::current_exe().unwrap())
            .args(inner_arguments!(a_mount_in_data_is_read_only_too))
            .env(INNER, dir.path().join("data"))
            .output()
            .unwrap();
        let complaint = String::from_utf8_lossy(&again.stderr);
        assert!(again.status.success(), "{complaint}");
        return;
    };
    let deeper = data.join("mounted/deeper");
    for (place, source) in [(data.join("mounted"), "first"), (deeper.clone(), "second")] {
        fs::create_dir_all(&place).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", source])
            .arg(&place)
            .status()
            .unwrap();
        assert!(mounted.success());
        fill_data(&place);
    }
    for place in [data.join("mounted"), deeper] {
        // Control: the same mount is writable on the host.
        fs::write(place.join("control"), "").unwrap();
        let inner = place.strip_prefix(&data).unwrap().to_path_buf();
        let before = snapshot(&place);
        for ran in at_both_paths(&data, |data, scratch| {
            attack(ACTS, &data.join(&inner), scratch)
        }) {
            assert_eq!(
                came_out("refused", &ran.stdout),
                all_of(ACTS),
                "{}",
                ran.all()
            );
        }
        assert_eq!(before, snapshot(&place));
    }
}
