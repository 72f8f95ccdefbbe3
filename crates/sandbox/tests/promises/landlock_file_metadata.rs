//! Level `landlock`: the guardian makes the calls that change modes and times of files. On the program's own files
//! these calls do the same as unconfined, and fail with the same errno. On the files of others, whatever name the
//! program uses, the calls are refused and change nothing.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use testkit::trial;

use crate::confined_run::{ConfinedRun, compile, host_dir, shown_dir, unconfined};

/// The system calls themselves, without libc's wrappers. Each raises OSError when it fails. A time is a pair of
/// numbers.
const CALLS: &str = "
import struct, threading
NOW, OMIT, NOFOLLOW, EMPTY = 0x3fffffff, 0x3ffffffe, 0x100, 0x1000
def sc(*args):
    args = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) if isinstance(a, bytes) else a for a in args]
    if libc.syscall(*args) == -1: raise OSError(ctypes.get_errno(), 'refused')
def two(form, times):
    return None if times is None else struct.pack(form, *times)
def chmod(path, mode): sc(90, path, mode)
def fchmod(fd, mode): sc(91, fd, mode)
def fchmodat(at, path, mode): sc(268, at, path, mode)
def fchmodat2(at, path, mode, flags=0): sc(452, at, path, mode, flags)
def utime(path, times): sc(132, path, two('qq', times))
def utimes(path, times): sc(235, path, two('4q', times))
def futimesat(at, path, times): sc(261, at, path, two('4q', times))
def utimensat(at, path, times, flags=0): sc(280, at, path, two('4q', times), flags)
HERE = -100
";

/// Acts on the files that the script of [`each_on_new_files`] makes. `f`, `d` and `l` are a file, a directory and a
/// link to the file.
#[rustfmt::skip]
const ON_ITS_OWN: &[&str] = &[
    "chmod(b'f', 0o640)", "chmod(b'd', 0o1777)", "chmod(b'l', 0o600)", "chmod(b'd/../f', 0o444)", "chmod(b'f', 0)",
    "fchmod(os.open('d', os.O_RDONLY), 0o700)", "fchmod(F, 0o611)", "fchmod(READ, 0o755)", "fchmod(GONE, 0o640)",
    "fchmodat(HERE, b'f', 0o604)", "fchmodat(D, b'in', 0o600)", "fchmodat(D, b'../f', 0o640)",
    "fchmodat2(HERE, b'f', 0o600)", "fchmodat2(D, b'in', 0o640)", "fchmodat2(HERE, b'f', 0o644, NOFOLLOW)",
    "fchmodat2(HERE, b'l', 0o600, NOFOLLOW)", "fchmodat2(F, b'', 0o600, EMPTY)",
    "utime(b'f', (1, 2))", "utime(b'f', None)", "utime(b'd', (5, 6))", "utime(b'l', (7, 8))",
    "utimes(b'f', (1, 500000, 2, 999999))", "utimes(b'f', None)", "utimes(b'f', (1, 1000000, 2, 0))", "utimes(b'f', (1, -1, 2, 0))",
    "futimesat(D, b'in', (3, 1, 4, 2))", "futimesat(F, None, (3, 1, 4, 2))", "futimesat(HERE, b'f', None)",
    "utimensat(HERE, b'f', (9, 1, 10, 999999999))", "utimensat(HERE, b'f', None)", "utimensat(F, None, (11, 1, 12, 2))",
    "utimensat(READ, None, (11, 1, 12, 2))", "utimensat(D, b'in', (13, 1, 14, 2))", "utimensat(HERE, b'f', (0, NOW, 0, OMIT))",
    "utimensat(HERE, b'f', (0, OMIT, 0, OMIT))", "utimensat(HERE, b'f', (0, OMIT, 21, 0))", "utimensat(HERE, b'l', (15, 0, 16, 0), NOFOLLOW)",
    "utimensat(HERE, b'l', (17, 0, 18, 0))", "utimensat(HERE, b'f', (1, 1000000000, 1, 0))", "utimensat(HERE, b'f', (-5, 0, -6, 0))",
    "utimensat(F, b'', (19, 0, 20, 0), EMPTY)",
    // Paths that do not exist or may not be searched, bad descriptors, bad pointers, and a FIFO.
    "chmod(b'missing', 0o600)", "fchmodat(HERE, b'missing', 0o600)", "utime(b'missing', None)", "utimensat(HERE, b'd/missing', None)",
    "chmod(b'', 0o600)", "utimensat(HERE, b'', None)", "chmod(b'f/x', 0o600)", "chmod(b'dangling', 0o600)",
    "utimensat(HERE, b'dangling', (1, 0, 2, 0), NOFOLLOW)", "fchmod(999, 0o600)", "fchmodat(999, b'f', 0o600)", "fchmodat(F, b'in', 0o600)",
    "fchmodat(999, os.getcwd().encode() + b'/f', 0o600)", "utimensat(999, None, None)", "chmod(b'x' * 300, 0o600)", "chmod(b'd/' * 3000, 0o600)",
    "sc(90, 8, 0o600)", "sc(280, HERE, b'f', 8, 0)", "chmod(b'shut/f', 0o600)", "chmod(b'fifo', 0o600)", "utime(b'fifo', (1, 2))",
    // Paths relative to a changed working directory, and calls from a thread and from a child.
    "os.chdir('d'); chmod(b'in', 0o660); os.chdir('..')", "os.chdir('d'); chmod(b'../f', 0o660); os.chdir('..')",
    "os.chdir('d'); utimensat(HERE, b'in', (31, 0, 32, 0)); os.chdir('..')", "in_thread(lambda: chmod(b'f', 0o606))",
    "in_thread(lambda: utimensat(F, None, (33, 0, 34, 0)))", "in_child(lambda: chmod(b'f', 0o642))", "in_child(lambda: fchmod(F, 0o624))",
];

/// A script that makes new files for each act and does the act. The script prints the errno, and the modes and times
/// that changed. For a time of about now it prints `now`.
fn each_on_new_files(acts: &[&str]) -> String {
    let list: Vec<String> = acts
        .iter()
        .map(|act| format!("    ({act:?}, lambda: [{}]),\n", act.replace("; ", ", ")))
        .collect();
    format!(
        "{CALLS}
import shutil, time
START = time.time() - 5
def in_thread(act):
    seen = []
    def go():
        try: act()
        except OSError as e: seen.append(e)
    t = threading.Thread(target=go); t.start(); t.join()
    if seen: raise seen[0]
def in_child(act):
    if (pid := os.fork()) == 0:
        try: act(); os._exit(0)
        except OSError as e: os._exit(e.errno)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code: raise OSError(code, 'refused')
def make():
    global F, D, READ, GONE
    os.mkdir('d'); os.mkdir('shut')
    for name in ('f', 'd/in', 'gone', 'shut/f'): open(name, 'w').close()
    os.symlink('f', 'l'); os.symlink('nowhere', 'dangling'); os.mkfifo('fifo')
    F, D, READ, GONE = os.open('f', os.O_RDWR), os.open('d', os.O_RDONLY), os.open('f', os.O_RDONLY), os.open('gone', os.O_RDWR)
    os.unlink('gone')
    os.chmod('shut', 0)
    for name in ('f', 'd/in', 'fifo', 'l', 'd'): os.utime(name, (1000, 1000), follow_symlinks=False)
def told(stat):
    when = lambda t: 'now' if t > START * 1e9 else t
    return oct(stat.st_mode), when(stat.st_atime_ns), when(stat.st_mtime_ns)
def state():
    # A directory is read by whoever measures the workspace, which is a time of access.
    return [told(os.lstat(name))[(name == 'd') * 2:] for name in ('f', 'd', 'd/in', 'l', 'fifo')] + [oct(os.stat('d').st_mode), told(os.fstat(GONE))]
os.umask(0o022)
for n, (name, act) in enumerate([
{}]):
    os.mkdir(f'case{{n}}'); os.chdir(f'case{{n}}')
    make()
    before = state()
    try: act(); answer = 'done'
    except OSError as e: answer = errno.errorcode[e.errno]
    changed = [b for a, b in zip(before, state()) if a != b]
    print(name[:70], '->', answer, changed, flush=True)
    for fd in (F, D, READ, GONE): os.close(fd)
    os.chmod('shut', 0o700); os.chdir('..')
",
        list.concat()
    )
}

/// Runs the same script on the host. Root runs it under another uid, because root may change the files of others.
fn on_the_host(script: &str) -> String {
    let dir = host_dir();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
    let script = format!("os.chdir({:?})\n{script}", dir.path());
    if !testkit::is_root() {
        return unconfined(&script);
    }
    let nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ];
    crate::confined_run::unconfined_under(&nobody, &script)
}

trial!(
    Everyone,
    metadata_calls_on_own_files_answer_as_unconfined,
    only_at_landlock
);
fn metadata_calls_on_own_files_answer_as_unconfined() {
    let script = each_on_new_files(ON_ITS_OWN);
    let ran = ConfinedRun::python(&script).run();
    let control = on_the_host(&script);
    assert_eq!(control.lines().count(), ON_ITS_OWN.len(), "{control}");
    // A call that this kernel lacks cannot be compared. fchmodat2 came with Linux 6.6.
    let different: Vec<String> = control
        .lines()
        .zip(ran.stdout.lines())
        .filter(|(host, inside)| host != inside && !host.contains("-> ENOSYS"))
        .map(|(host, inside)| format!("host   {host}\ninside {inside}\n"))
        .collect();
    assert!(different.is_empty(), "{}", different.concat());
    assert_eq!(
        ran.stdout.lines().count(),
        ON_ITS_OWN.len(),
        "{}",
        ran.all()
    );
    // Many of the calls succeed, so the trial does not only compare refusals.
    assert!(control.matches("-> done").count() > 30, "{control}");
}

trial!(Everyone, tools_that_copy_and_unpack, only_at_landlock);
/// Archivers, copying tools and installers set the same modes and times inside as unconfined.
fn tools_that_copy_and_unpack() {
    let script = r#"
import subprocess, shutil, tarfile, zipfile
def run(command): subprocess.run(command, shell=True, check=True)
os.umask(0o022)
os.makedirs('from/sub')
for name, mode in (('a', 0o640), ('sub/b', 0o755), ('sub/c', 0o400)):
    open('from/' + name, 'w').write(name); os.chmod('from/' + name, mode); os.utime('from/' + name, (1e9, 1e9 + len(name)))
os.symlink('a', 'from/link'); os.chmod('from/sub', 0o750); os.utime('from/sub', (1e9, 1e9 + 7))
run('tar cf x.tar from && mkdir by-tar && tar xpf x.tar -C by-tar')
run('mkdir by-cpio && cd from && find . | cpio -pdm --quiet ../by-cpio') if shutil.which('cpio') else None
run('cp -a from by-cp')
run('mkdir by-install && install -m 604 -p from/a by-install/a')
run('rsync -a from/ by-rsync/') if shutil.which('rsync') else None
shutil.copytree('from', 'by-copytree', symlinks=True)
with tarfile.open('x.tar') as t: t.extractall('by-tarfile')
with zipfile.ZipFile('x.zip', 'w') as z: z.write('from/a')
zipfile.ZipFile('x.zip').extractall('by-zip')
run('cp from/a touched && touch -d @1234567890 touched && touch -r from/a -a touched && chmod -R g-rwx,o=r by-install')
run('touch new && touch -h -d @1000 -c from/link && chmod u=rwx,go= new && mv new renamed')
import tempfile
fd, name = tempfile.mkstemp(dir='.'); os.close(fd); os.chmod(name, 0o644); os.replace(name, 'written')
for top, below, files in sorted(os.walk('.')):
    for name in sorted(below + files):
        path = os.path.join(top, name)
        st = os.lstat(path)
        kept = int(st.st_mtime) if st.st_mtime < 1.5e9 else 'now'
        if '.fumehood' not in path and top != '.': print(path, oct(st.st_mode), kept)
for name in ('touched', 'renamed', 'written'): st = os.stat(name); print(name, oct(st.st_mode), int(min(st.st_mtime, 1.5e9)), int(min(st.st_atime, 1.5e9)))
"#;
    let ran = ConfinedRun::python(script).run();
    let control = on_the_host(script);
    assert_eq!(ran.stdout, control, "{}", ran.all());
    assert!(control.lines().count() > 30 && ran.stderr.is_empty());
}

/// Acts on the file `F`, named `N`, in the directory `D`. Neither belongs to the run. Each act raises OSError when it
/// is refused. `W` is a directory of the program, new for each act.
#[rustfmt::skip]
const ON_OTHERS: &[&str] = &[
    "chmod(F, 0o777)", "fchmod(os.open(F, os.O_RDONLY), 0o777)", "fchmodat(HERE, F, 0o777)", "fchmodat2(HERE, F, 0o777)",
    "fchmodat2(HERE, F, 0o777, NOFOLLOW)", "fchmod(os.open(D, os.O_RDONLY), 0o777)", "chmod(D, 0o777)", "fchmodat(os.open(D, os.O_RDONLY), N, 0o777)",
    "fchmodat(os.open(D, os.O_PATH), N, 0o777)", "utime(F, (1, 2))", "utime(F, None)", "utimes(F, (1, 0, 2, 0))", "utimes(F, None)",
    "futimesat(HERE, F, (1, 0, 2, 0))", "futimesat(os.open(F, os.O_RDONLY), None, (1, 0, 2, 0))", "utimensat(HERE, F, (1, 0, 2, 0))",
    "utimensat(HERE, F, None)", "utimensat(HERE, F, (1, 0, 2, 0), NOFOLLOW)", "utimensat(os.open(F, os.O_RDONLY), None, (1, 0, 2, 0))",
    "utimensat(os.open(F, os.O_RDONLY), None, None)", "utimensat(os.open(D, os.O_RDONLY), None, (1, 0, 2, 0))",
    "utimensat(os.open(D, os.O_RDONLY), N, (1, 0, 2, 0))",
    // The file under another name.
    "os.symlink(F, W + b'/l'); chmod(W + b'/l', 0o777)", "os.symlink(F, W + b'/l'); utime(W + b'/l', (1, 2))",
    "os.symlink(D, W + b'/l'); chmod(W + b'/l/' + N, 0o777)", "os.symlink(os.path.relpath(F, W), W + b'/l'); chmod(W + b'/l', 0o777)",
    "chmod(W + b'/' + os.path.relpath(F, W), 0o777)", "chmod(os.path.relpath(F, os.getcwdb()), 0o777)", "os.chdir(D); chmod(N, 0o777)",
    "os.chdir(D); utimensat(HERE, N, (1, 0, 2, 0))", "os.chdir(D); fchmodat(HERE, b'./' + N, 0o777)", "fchmodat(os.open(W, os.O_RDONLY), os.path.relpath(F, W), 0o777)",
    "os.link(F, W + b'/h'); chmod(W + b'/h', 0o777)", "os.rename(F, W + b'/h'); chmod(W + b'/h', 0o777)",
    // The file through /proc. The guardian's own /proc/self is not the program's.
    "chmod(b'/proc/self/fd/%d' % os.open(F, os.O_RDONLY), 0o777)", "chmod(b'/proc/self/fd/%d' % os.open(F, os.O_PATH), 0o777)",
    "utime(b'/proc/self/fd/%d' % os.open(F, os.O_RDONLY), (1, 2))", "chmod(b'/proc/%d/fd/%d' % (os.getpid(), os.open(F, os.O_PATH)), 0o777)",
    "os.chdir(D); chmod(b'/proc/self/cwd/' + N, 0o777)", "chmod(b'/proc/self/root' + F, 0o777)", "chmod(b'/proc/thread-self/root' + F, 0o777)",
    "os.chdir('/proc/self/fd'); fd = os.open(F, os.O_PATH); chmod(b'%d' % fd, 0o777)",
    "d = os.open('/proc/self/fd', os.O_RDONLY); fd = os.open(F, os.O_PATH); fchmodat(d, b'%d' % fd, 0o777)",
    // The call from another thread.
    "import concurrent.futures as c; c.ThreadPoolExecutor(1).submit(chmod, F, 0o777).result()",
    "import concurrent.futures as c; c.ThreadPoolExecutor(1).submit(utimensat, os.open(F, os.O_RDONLY), None, (1, 0, 2, 0)).result()",
];

fn on_others(place: &Path, scratch: &str) -> String {
    let mut script = format!("{CALLS}\nD, SCRATCH = {place:?}.encode(), {scratch}\n");
    for (n, act) in ON_OTHERS.iter().enumerate() {
        let body = act.replace("; ", "\n    ");
        script += &format!(
            "W, N = SCRATCH + b'/w{n}', b'f{n}'\nF = D + b'/' + N\nos.makedirs(W)\ndef act():\n    {body}\n\
             if os.fork() == 0:\n    try: act(); os.write(1, b'did {n}\\n')\n    \
             except OSError as e: os.write(1, b'refused {n}\\n')\n    os._exit(0)\nos.wait()\n"
        );
    }
    script
}

/// The mode, owner, link count, inode and times of each file in a directory, and of the directory.
fn facts(dir: &Path) -> Vec<[i64; 8]> {
    let names = (0..ON_OTHERS.len()).map(|n| dir.join(format!("f{n}")));
    let all = names.chain([dir.to_path_buf()]);
    all.map(|path| {
        let m = fs::symlink_metadata(path).unwrap();
        [
            m.mode().into(),
            m.uid().into(),
            m.nlink() as i64,
            m.ino() as i64,
            m.mtime(),
            m.mtime_nsec(),
            m.ctime(),
            m.ctime_nsec(),
        ]
    })
    .collect()
}

trial!(Everyone, files_of_others_are_refused, only_at_landlock);
fn files_of_others_are_refused() {
    let fill = |dir: &Path| {
        fs::create_dir_all(dir).unwrap();
        for n in 0..ON_OTHERS.len() {
            fs::write(dir.join(format!("f{n}")), "theirs").unwrap();
        }
    };
    let home = shown_dir();
    let (shown, hidden, copy) = (
        home.path().join("shown"),
        home.path().join("hidden"),
        home.path().join("copy"),
    );
    for dir in [&shown, &hidden, &copy] {
        fill(dir);
    }
    let refused: String = (0..ON_OTHERS.len())
        .map(|n| format!("refused {n}\n"))
        .collect();
    // The run sees the first directory read-only, and the second one not at all.
    for place in [&shown, &hidden] {
        let before = facts(place);
        let script = on_others(place, "os.getcwdb()");
        let ran = ConfinedRun::python(&script).view(&shown, "data").run();
        assert_eq!(ran.stdout, refused, "{}", ran.all());
        assert_eq!(before, facts(place), "something changed");
    }
    let scratch = format!("{:?}.encode()", home.path().join("scratch"));
    let control = unconfined(&on_others(&copy, &scratch));
    assert_eq!(control, refused.replace("refused", "did"));
}

/// Three threads swap a link, the text of a path and a descriptor between the program's own file and the host's. The
/// main thread changes the mode and the times of whatever file they lead to.
const RACE: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
static char shared[256], own[256], host[256];
static volatile int over;
static void *swap_links(void *x) {
    while (!over) syscall(SYS_renameat2, AT_FDCWD, "one", AT_FDCWD, "two", 2);
    return x;
}
static void *swap_text(void *x) {
    while (!over) {
        memcpy(shared, host, sizeof host); __asm__ volatile("" ::: "memory");
        memcpy(shared, own, sizeof own); __asm__ volatile("" ::: "memory");
    }
    return x;
}
static void *swap_descriptor(void *x) {
    int a = open(own, O_RDONLY), b = open(host, O_RDONLY);
    while (!over) { dup2(a, 100); dup2(b, 100); }
    return x;
}
int main(int argc, char **argv) {
    int tries = atoi(argv[3]), done = 0, refused = 0;
    strcpy(own, argv[1]); strcpy(host, argv[2]); strcpy(shared, own);
    close(open(own, O_CREAT | O_WRONLY, 0600));
    if (symlink(own, "one") || symlink(host, "two")) return 2;
    struct timespec old[2] = {{1, 0}, {2, 0}};
    pthread_t a, b, c;
    pthread_create(&a, 0, swap_links, 0); pthread_create(&b, 0, swap_text, 0); pthread_create(&c, 0, swap_descriptor, 0);
    for (int i = 0; i < tries; i++) {
        if (chmod("one", 0606)) refused++; else done++;
        if (chmod(shared, 0606)) refused++; else done++;
        if (utimensat(AT_FDCWD, "one", old, 0)) refused++; else done++;
        if (fchmod(100, 0606)) refused++; else done++;
        if (futimens(100, old)) refused++; else done++;
    }
    over = 1;
    printf("done %d refused %d\n", done, refused);
    return 0;
}
"#;

trial!(
    Everyone,
    a_path_that_changes_during_the_call_reaches_no_other_file,
    only_at_landlock
);
fn a_path_that_changes_during_the_call_reaches_no_other_file() {
    let dir = shown_dir();
    let victim = dir.path().join("victim");
    let program = shown_dir();
    compile(RACE, &program.path().join("race"));
    let known = || {
        let m = fs::metadata(&victim).unwrap();
        (m.mode(), m.mtime(), m.ctime(), m.ctime_nsec())
    };
    fs::write(&victim, "theirs").unwrap();
    let before = known();
    let mut confined = ConfinedRun::new(&["/bin/true"]).view(dir.path(), "data");
    let own = confined.workspace().to_path_buf();
    fs::copy(program.path().join("race"), own.join("race")).unwrap();
    confined.command(&[
        &own.join("race"),
        &own.join("own"),
        &victim,
        Path::new("400"),
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
        "both were met: {}",
        ran.stdout
    );
    assert_eq!(before, known(), "{}", ran.all());
    let control = Command::new(program.path().join("race"))
        .arg(program.path().join("own"))
        .arg(&victim)
        // Without the guardian a call is over much sooner, so the control needs more calls.
        .arg("40000")
        .current_dir(program.path())
        .status()
        .unwrap();
    assert!(control.success());
    assert_ne!(before, known(), "the swap never met a call");
}

trial!(
    Everyone,
    ten_thousand_calls_from_eight_threads_get_their_own_answers,
    only_at_landlock
);
/// Eight threads make ten thousand changes in total. After each change the thread finds the mode and the times that it
/// has set.
fn ten_thousand_calls_from_eight_threads_get_their_own_answers() {
    let source = r#"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
static void *change(void *nth) {
    char name[32];
    struct stat st;
    snprintf(name, sizeof name, "file%ld", (long)nth);
    int fd = open(name, O_CREAT | O_RDWR, 0600);
    for (int i = 0; i < 625; i++) {
        struct timespec times[2] = {{i, 5}, {i + 1, 7}};
        if (chmod(name, 0600 | i % 64) || futimens(fd, times)) { perror("change"); exit(1); }
        if (fstat(fd, &st) || (st.st_mode & 0777) != (0600 | i % 64) || st.st_atime != i || st.st_mtime != i + 1) exit(2);
    }
    return 0;
}
int main(void) {
    pthread_t threads[8];
    for (long n = 0; n < 8; n++) pthread_create(&threads[n], 0, change, (void *)n);
    for (int n = 0; n < 8; n++) pthread_join(threads[n], 0);
    puts("all");
    return 0;
}"#;
    let mut confined = ConfinedRun::new(&["/bin/true"]);
    let program = confined.workspace().join("change");
    compile(source, &program);
    confined.command(&[&program]);
    let ran = confined.run();
    assert!(ran.printed("all") && ran.code() == Some(0), "{}", ran.all());
}

trial!(
    Everyone,
    more_calls_at_once_than_the_guardian_serves_all_succeed,
    only_at_landlock
);
/// Two hundred processes call at the same moment, more than the guardian serves at once. The guardian serves each
/// process in its turn.
fn more_calls_at_once_than_the_guardian_serves_all_succeed() {
    let script = "
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
r, w = os.pipe()
for n in range(200):
    if os.fork() == 0:
        os.close(w); open(f'f{n}', 'w').close(); os.write(1, b'.'); os.read(r, 1)
        try:
            for mode in (0o600, 0o644, 0o606): os.chmod(f'f{n}', mode)
            os.utime(f'f{n}', (1, 2)); os._exit(0)
        except OSError as e: os._exit(e.errno)
os.close(w)
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(200)]
print('\\ncodes', *sorted(set(codes)))
print('right', sum(os.stat(f'f{n}').st_mode & 0o777 == 0o606 and os.stat(f'f{n}').st_mtime == 2 for n in range(200)))
";
    let ran = ConfinedRun::python(script).run();
    assert!(
        ran.printed("codes 0") && ran.printed("right 200"),
        "{}",
        ran.all()
    );
}

trial!(
    Everyone,
    the_workspace_directory_stays_closed_to_others,
    only_at_landlock
);
/// With another mode, other processes of the host, of the same uid or another, could look into the workspace.
fn the_workspace_directory_stays_closed_to_others() {
    let script = format!(
        "{CALLS}
for act in (lambda: chmod(b'.', 0o777), lambda: chmod(os.getcwdb(), 0o755), lambda: fchmod(os.open('.', os.O_RDONLY), 0o777),
            lambda: fchmodat(HERE, b'sub/..', 0o711), lambda: fchmodat2(HERE, b'.', 0o701, NOFOLLOW), lambda: chmod(b'link', 0o777),
            lambda: chmod(b'.', 0)):
    os.makedirs('sub', exist_ok=True)
    if not os.path.lexists('link'): os.symlink('.', 'link')
    try: act(); print('did')
    except PermissionError: print('refused')
# The control: its times, and the mode of a directory below.
os.utime('.', (1, 2)); print('times', os.stat('.').st_atime == 1)
chmod(b'sub', 0o755); print('below', oct(os.stat('sub').st_mode))
"
    );
    let (ran, mode) =
        ConfinedRun::python(&script).run_then(|dir| fs::metadata(dir).unwrap().mode());
    assert_eq!(ran.stdout.matches("refused").count(), 7, "{}", ran.all());
    assert!(
        ran.printed("times True") && ran.printed("below 0o40755"),
        "{}",
        ran.all()
    );
    assert_eq!(mode & 0o7777, 0o700);
}

trial!(Everyone, owners_and_attributes, only_at_landlock);
/// The filter cannot tell whose file a call would change the owner or an attribute of, so it refuses these calls on
/// every file.
fn owners_and_attributes() {
    let acts = "
import ctypes
def sc(*args):
    args = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in args]
    if libc.syscall(*args) == -1: raise OSError(ctypes.get_errno(), 'refused')
ME = os.getuid(), os.getgid()
fd = os.open('f', os.O_RDWR | os.O_CREAT)
os.symlink('f', 'l')
for name, act in (('chown', lambda: os.chown('f', *ME)), ('lchown', lambda: os.lchown('l', *ME)), ('fchown', lambda: os.fchown(fd, *ME)),
                  ('fchownat', lambda: sc(260, -100, b'f', *ME, 0)), ('setxattr', lambda: os.setxattr('f', 'user.a', b'1')),
                  ('lsetxattr', lambda: os.setxattr('f', 'user.b', b'1', follow_symlinks=False)), ('fsetxattr', lambda: os.setxattr(fd, 'user.c', b'1')),
                  ('getxattr', lambda: os.getxattr('f', 'user.a')), ('listxattr', lambda: os.listxattr('f')), ('flistxattr', lambda: os.listxattr(fd)),
                  ('removexattr', lambda: os.removexattr('f', 'user.a')), ('fremovexattr', lambda: os.removexattr(fd, 'user.b'))):
    try: act(); print(name, 'done')
    except OSError as e: print(name, errno.errorcode[e.errno])
";
    let ran = ConfinedRun::python(acts).run();
    let expected = |name: &str| match name.contains("chown") {
        true => "EPERM",
        // A file system without attributes answers ENOTSUP, and programs that copy files then continue.
        false => "ENOTSUP",
    };
    let control = on_the_host(acts);
    for line in control.lines() {
        let (name, answer) = line.split_once(' ').unwrap();
        assert_eq!(answer, "done", "control of {name}");
        let inside = format!("{name} {}", expected(name));
        assert!(ran.printed(&inside), "{inside}\n{}", ran.all());
    }
    assert_eq!(control.lines().count(), 12);
}
