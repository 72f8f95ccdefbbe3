//! P3: the analysis sees the system runtime and what it was shown, and nothing else of the host: no home, no
//! service's directory, no other process, no device, no credential.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use sandbox::spec::Layer;
use testkit::{inner_arguments, is_root, trial};

use crate::confined_run::{ConfinedResult, ConfinedRun, at_landlock, unconfined};

/// Finds the line that begins with `key ` and returns the rest of the line.
fn told<'a>(printed: &'a str, key: &str) -> &'a str {
    let found = printed
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("nothing said of {key}:\n{printed}"))
}

fn words<'a>(printed: &'a str, key: &str) -> Vec<&'a str> {
    let mut words: Vec<&str> = told(printed, key).split_whitespace().collect();
    words.sort_unstable();
    words
}

fn well(ran: &ConfinedResult) -> &str {
    assert_eq!(ran.code(), Some(0), "{}", ran.all());
    &ran.stdout
}

trial!(Everyone, the_runtime_is_there);
fn the_runtime_is_there() {
    let ran = ConfinedRun::sh("test -x /usr/bin/env && test -r /etc/ld.so.cache && ls /usr/lib /bin/ /lib/ >/dev/null && echo there").run();
    assert!(ran.printed("there"), "{}", ran.all());
}

trial!(
    Everyone,
    the_root_holds_only_what_is_listed,
    only_at_full = "it is the host's root; that it cannot be listed is landlock_level::private_directories_and_files_cannot_be_listed_or_opened"
);
fn the_root_holds_only_what_is_listed() {
    let list = "print('root', *os.listdir('/'))\n\
                for name in ('home', 'root', 'run', 'var', 'tmp', 'empty', 'sys', 'boot', 'opt', 'srv', 'mnt'):\n    \
                    print(name, *(sorted(os.listdir('/' + name)) if os.path.isdir('/' + name) else ('absent',)))";
    let ran = ConfinedRun::python(list).run();
    let printed = well(&ran);
    let system = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];
    let ours = [
        "etc", "dev", "proc", "tmp", "var", "empty", "home", "root", "run",
    ];
    for name in words(printed, "root") {
        assert!(
            system.contains(&name) || ours.contains(&name),
            "/{name} is there: {printed}"
        );
    }
    for name in ["home", "root", "run", "empty"] {
        assert!(
            printed.lines().any(|l| l.trim() == name),
            "/{name} is not empty: {printed}"
        );
    }
    assert_eq!(told(printed, "var"), "tmp");
    for name in ["sys", "boot", "opt", "srv", "mnt"] {
        assert_eq!(told(printed, name), "absent", "/{name}: {printed}");
    }
    // /tmp holds the workspace and the home. Both belong to the program.
    assert!(
        words(printed, "tmp")
            .iter()
            .all(|n| *n == "home" || n.starts_with("scidex-analysis-test-")),
        "{printed}"
    );
    assert_eq!(words(printed, "tmp").len(), 2, "{printed}");
    let control = unconfined(
        "for name in ('', 'sys', 'var'): print(name or 'root', *os.listdir('/' + name))",
    );
    assert!(
        words(&control, "root").contains(&"sys") && words(&control, "sys").len() > 3,
        "{control}"
    );
    assert!(words(&control, "var").len() > 3, "{control}");
}

trial!(Everyone, files_of_the_host_are_absent);
/// The trial makes a file that everyone may read in each of these places of the host where its user may make one.
fn files_of_the_host_are_absent() {
    let places = [
        "/tmp", "/var/tmp", "/dev/shm", "/run", "/root", "/srv", "/opt", "/mnt", "/home",
        "/var/lib", "/etc",
    ];
    let home = std::env::var("HOME").unwrap_or_default();
    let places = places.into_iter().chain([home.as_str()]);
    let canaries: Vec<tempfile::NamedTempFile> = places
        .filter_map(|place| {
            tempfile::Builder::new()
                .prefix("fumehood-canary-")
                .tempfile_in(place)
                .ok()
        })
        .collect();
    assert!(
        canaries.len() >= if is_root() { 10 } else { 4 },
        "only {} canaries",
        canaries.len()
    );
    let paths: Vec<PathBuf> = canaries
        .iter()
        .map(|file| file.path().to_path_buf())
        .collect();
    for path in &paths {
        fs::write(path, "canary").unwrap();
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    }
    let look = format!(
        "found = 0\nfor path in {paths:?}:\n    \
             for before in ('', '/proc/self/root', '/proc/1/root', '/proc/self/cwd/../../../..', '/proc/1/cwd'):\n        \
                 try: open(before + path).read(); found += 1; print('read', before + path)\n        \
                 except OSError as e: pass\n\
         print('found', found)"
    );
    let ran = ConfinedRun::python(&look).run();
    assert!(ran.printed("found 0"), "{}", ran.all());
    let control = unconfined(&look);
    assert!(
        told(&control, "found").parse::<usize>().unwrap() >= paths.len(),
        "{control}"
    );
}

trial!(Everyone, credentials_are_absent);
/// Other trials show that home directories are empty. This trial tries the places outside them.
fn credentials_are_absent() {
    // At level `landlock` the names exist, because the root directory is the host's, but nothing can be opened.
    let seen = match at_landlock() {
        false => "os.path.lexists(path)",
        true => "opens(path)",
    };
    let look = "
def opens(path):
    try: os.close(os.open(path, os.O_RDONLY)); return True
    except OSError: return False
for path in ('/etc/shadow', '/etc/gshadow', '/etc/shadow-', '/etc/ssh', '/etc/sudoers', '/etc/sudoers.d', '/etc/ssl/private',
             '/etc/krb5.keytab', '/etc/machine-id', '/etc/security', '/etc/NetworkManager', '/etc/fumehood', '/etc/postgresql',
             '/etc/fstab', '/etc/crontab', '/etc/netrc', '/etc/environment', '/etc/profile.d', '/run/secrets', '/run/user',
             '/var/run', '/var/lib', '/var/spool', '/var/log'):
    if SEEN: print('there', path)
print('looked')
";
    let look = look.replace("SEEN", seen);
    let ran = ConfinedRun::python(&look).run();
    assert!(
        ran.printed("looked") && !ran.stdout.contains("there"),
        "{}",
        ran.all()
    );
    if at_landlock() {
        let control = unconfined(&look);
        assert!(control.contains("there /etc/fstab\n") && control.contains("there /var/lib\n"));
    }
    // The control only checks that the names exist on this host, and opens none of them.
    for path in ["/etc/shadow", "/etc/security", "/var/lib", "/var/log"] {
        assert!(
            fs::symlink_metadata(path).is_ok(),
            "this host has no {path}"
        );
    }
}

trial!(
    Everyone,
    etc_is_made_up,
    only_at_full = "it is the host's /etc, of which few files are open: landlock_level::private_directories_and_files_cannot_be_listed_or_opened"
);
fn etc_is_made_up() {
    let look = "import pwd, grp\n\
                for name in ('passwd', 'group', 'hosts', 'hostname', 'resolv.conf', 'nsswitch.conf'):\n    \
                    text = open('/etc/' + name).read()\n    \
                    print(name, text.replace('\\n', ';'))\n\
                print('user', pwd.getpwuid(os.getuid()).pw_name, pwd.getpwuid(os.getuid()).pw_dir, os.path.expanduser('~'))\n\
                print('group_name', grp.getgrgid(os.getgid()).gr_name)\n\
                print('users', *(p.pw_name for p in pwd.getpwall()))";
    let ran = ConfinedRun::python(look).run();
    let printed = well(&ran);
    assert_eq!(words(printed, "users"), ["analysis", "nobody", "root"]);
    assert_eq!(
        words(printed, "user"),
        ["/tmp/home", "/tmp/home", "analysis"]
    );
    assert_eq!(told(printed, "group_name"), "analysis");
    assert_eq!(told(printed, "resolv.conf"), "");
    assert_eq!(told(printed, "hostname"), "fumehood;");
    for line in told(printed, "hosts").split_terminator(';') {
        assert!(
            line.starts_with("127.0.0.1 ") || line.starts_with("::1 "),
            "{line:?}"
        );
    }
    for line in told(printed, "nsswitch.conf").split_terminator(';') {
        assert!(line.ends_with(": files"), "{line:?}");
    }
    // Control: this host has users that are not listed inside.
    let here = fs::read_to_string("/etc/passwd").unwrap();
    assert!(
        here.lines().count() > 10 && here.contains("\ndaemon:"),
        "{here}"
    );
}

trial!(
    Everyone,
    dev_holds_only_what_is_listed,
    only_at_full = "it is the host's /dev, of which few devices are open: landlock_level::private_directories_and_files_cannot_be_listed_or_opened"
);
fn dev_holds_only_what_is_listed() {
    let list = "print('dev', *os.listdir('/dev'))\nprint('pts', *os.listdir('/dev/pts'))\nprint('shm', len(os.listdir('/dev/shm')))\n\
                for name in sorted(os.listdir('/dev')):\n    \
                    if os.path.islink('/dev/' + name): print('link', name, os.readlink('/dev/' + name))\n\
                print('bytes', len(open('/dev/zero', 'rb').read(3) + open('/dev/urandom', 'rb').read(3) + open('/dev/null', 'rb').read(3)))\n\
                try: open('/dev/full', 'wb', 0).write(b'x')\n\
                except OSError as e: print('full', errno.errorcode[e.errno])";
    let ran = ConfinedRun::python(list).run();
    let printed = well(&ran);
    let listed = [
        "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout",
        "urandom", "zero",
    ];
    assert_eq!(words(printed, "dev"), listed);
    // /dev/ptmx leads to the sandbox's own terminals and not to a device of the host.
    assert!(
        ran.printed("link ptmx pts/ptmx") && ran.printed("pts ptmx") && ran.printed("shm 0"),
        "{}",
        ran.all()
    );
    for link in [
        "fd /proc/self/fd",
        "stdin /proc/self/fd/0",
        "stdout /proc/self/fd/1",
        "stderr /proc/self/fd/2",
    ] {
        assert!(ran.printed(&format!("link {link}")), "{}", ran.all());
    }
    assert!(
        ran.printed("bytes 6") && ran.printed("full ENOSPC"),
        "{}",
        ran.all()
    );
    let more = fs::read_dir("/dev")
        .unwrap()
        .flatten()
        .filter(|e| e.file_type().unwrap().is_char_device())
        .count();
    assert!(more > 6, "the control: this host has {more} devices");
}

trial!(
    Everyone,
    proc_shows_only_its_own,
    only_at_full = "it is the host's /proc, which is closed: landlock_level::proc_shows_the_program_itself_and_nothing_of_the_host"
);
fn proc_shows_only_its_own() {
    let list = "print('pids', *(n for n in os.listdir('/proc') if n.isdigit()))\nprint('me', os.getpid())\n\
                print('parent', os.getppid())\nprint('net', open('/proc/net/dev').read().count(':'))";
    let ran = ConfinedRun::python(list).run();
    let printed = well(&ran);
    assert_eq!(words(printed, "pids").len(), 2, "{printed}");
    assert_eq!(
        (told(printed, "parent"), told(printed, "net")),
        ("1", "1"),
        "{printed}"
    );
    assert!(
        words(printed, "pids").contains(&told(printed, "me")),
        "{printed}"
    );
    let control = unconfined(list);
    assert!(words(&control, "pids").len() > 2, "{control}");
}

/// Opens every file below `top` for writing, except links and files below /fd/. Writes nothing.
const OPEN_ALL: &str = "
def open_all(top):
    count = 0
    for top, below, files in os.walk(top):
        for path in (os.path.join(top, name) for name in files):
            if os.path.islink(path) or '/fd/' in path: continue
            count += 1
            try: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)); print('writable', path)
            except OSError: pass
    print('tried', count)
";

/// The files below some directories of the host's /proc, as this process sees them.
fn names_below(tops: &[&str]) -> Vec<PathBuf> {
    let mut pending: Vec<PathBuf> = tops.iter().map(PathBuf::from).collect();
    let mut found = Vec::new();
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let kind = entry.file_type().unwrap();
            let inner = ["fd", "task", "map_files"].map(std::ffi::OsString::from);
            match kind.is_dir() {
                true if !inner.contains(&entry.file_name()) => pending.push(entry.path()),
                false if kind.is_file() => found.push(entry.path()),
                _ => {}
            }
        }
    }
    found
}

trial!(Everyone, proc_cannot_be_written);
fn proc_cannot_be_written() {
    // If /proc cannot be listed inside, try the names of the host's /proc.
    let names = match at_landlock() {
        false => Vec::new(),
        true => names_below(&["/proc/self", "/proc/sys", "/proc/1"]),
    };
    let by_name = format!(
        "for path in {names:?}:\n    \
             try: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)); print('writable', path)\n    \
             except OSError: pass\n"
    );
    let mut confined = ConfinedRun::new(&["/usr/bin/python3", "-I", "look.py"]);
    let script = format!("import os\n{OPEN_ALL}{by_name}open_all('/proc')");
    fs::write(confined.workspace().join("look.py"), script).unwrap();
    confined.spec.limits.wall_ms = 60_000;
    let ran = confined.run();
    assert!(!well(&ran).contains("writable"), "{}", ran.all());
    let tried: usize = told(&ran.stdout, "tried").parse().unwrap();
    assert!(tried + names.len() > 500, "{}", ran.all());
    // The control opens files of its own process and, as root, one file of the host. It writes to none of them.
    let control = unconfined(&format!("{OPEN_ALL}open_all('/proc/self')"));
    assert!(control.contains("/oom_score_adj\n"), "{control}");
    if is_root() {
        fs::File::options()
            .write(true)
            .open("/proc/sys/kernel/core_pattern")
            .unwrap();
    }
    // Now write, too. These files belong to the process alone, and their modes would allow the write.
    let write = "for name in ('oom_score_adj', 'comm', 'coredump_filter', 'timerslack_ns', 'clear_refs'):\n    \
                     try: os.write(os.open('/proc/self/' + name, os.O_WRONLY), b'1'); print('wrote', name)\n    \
                     except OSError as e: print('refused', name)";
    let ran = ConfinedRun::python(write).run();
    assert!(
        !well(&ran).contains("wrote") && ran.stdout.lines().count() == 5,
        "{}",
        ran.all()
    );
    assert_eq!(unconfined(write).matches("wrote").count(), 5);
}

trial!(Everyone, kernel_memory_is_closed);
fn kernel_memory_is_closed() {
    let look = "
def opened(*paths):
    for path in paths:
        try: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)); print('opened', path)
        except OSError as e: print('closed', path)
opened('/proc/self/maps', '/proc/self/environ', '/dev/null')
try: symbols = open('/proc/kallsyms').read(4000).split('\\n')[:20]
except OSError: symbols = []
print('addresses', sum(line[:16].strip('0') != '' for line in symbols if line))
";
    let closed = "opened('/proc/kcore', '/proc/kmsg', '/dev/mem', '/dev/kmsg', '/dev/vda', '/proc/1/mem', '/proc/1/environ')";
    let ran = ConfinedRun::python(&format!("{look}{closed}")).run();
    assert_eq!(well(&ran).matches("closed").count(), 7, "{}", ran.all());
    assert_eq!(ran.stdout.matches("opened").count(), 3, "{}", ran.all());
    assert_eq!(told(&ran.stdout, "addresses"), "0");
    if is_root() {
        assert_ne!(told(&unconfined(look), "addresses"), "0");
    }
}

trial!(Everyone, keys_are_not_named);
/// The kernel shows keys by uid and not by namespace. A host process of the same uid holds a key during the run.
fn keys_are_not_named() {
    use std::io::{BufRead, BufReader};
    const NAME: &str = "fumehood-test-key";
    let look = "for name in ('keys', 'key-users'):\n    \
                    try: print(name, len(open('/proc/' + name).read()))\n    \
                    except PermissionError: print(name, 0)\n";
    let holder = format!(
        "import ctypes, sys
# Into the keyring of this process, which ends with it.
assert ctypes.CDLL(None).syscall({}, b'user', b'{NAME}', b'x', ctypes.c_size_t(1), -2) > 0
print('{NAME}' in open('/proc/keys').read(), flush=True)
sys.stdin.read()",
        libc::SYS_add_key
    );
    let mut holder = Command::new("/usr/bin/python3")
        .args(["-I", "-c", &holder])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut printed = BufReader::new(holder.stdout.take().unwrap());
    printed.read_line(&mut line).unwrap();
    assert_eq!(line, "True\n");
    let (ran, control) = (ConfinedRun::python(look).run(), unconfined(look));
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    for name in ["keys", "key-users"] {
        assert_eq!(told(well(&ran), name), "0", "{}", ran.all());
        assert_ne!(told(&control, name), "0", "{control}");
    }
}

trial!(
    Everyone,
    no_cgroup_tree,
    only_at_full =
        "there is no cgroup namespace, and the mounts are the host's: /proc/self tells their names"
);
fn no_cgroup_tree() {
    let look = "print('paths', *{line.strip().split(':', 2)[2] for line in open('/proc/self/cgroup')})\n\
                kinds = {line.split(' - ')[1].split()[0] for line in open('/proc/self/mountinfo')}\n\
                print('kinds', *kinds)";
    let ran = ConfinedRun::python(look).run();
    assert_eq!(words(well(&ran), "paths"), ["/"], "{}", ran.all());
    let kinds = words(&ran.stdout, "kinds");
    for kind in [
        "cgroup",
        "cgroup2",
        "sysfs",
        "debugfs",
        "tracefs",
        "securityfs",
        "bpf",
    ] {
        assert!(!kinds.contains(&kind), "{}", ran.all());
    }
    let control = unconfined(look);
    assert!(
        words(&control, "kinds")
            .iter()
            .any(|k| k.starts_with("cgroup")),
        "{control}"
    );
    if is_root() {
        // Without a cgroup namespace the program sees the path that its group has on the host.
        let ran = ConfinedRun::python(look)
            .without(&[Layer::CgroupNamespace])
            .run();
        assert_ne!(words(well(&ran), "paths"), ["/"], "{}", ran.all());
    }
}

trial!(
    Everyone,
    the_host_name_is_not_the_hosts,
    only_at_full = "without a namespace for it the name is the host's"
);
fn the_host_name_is_not_the_hosts() {
    let look = "print('names', socket.gethostname(), os.uname().nodename, open('/proc/sys/kernel/hostname').read().strip())";
    let mut confined = ConfinedRun::python(look);
    confined.spec.host_name = String::from("not-this-host");
    let ran = confined.run();
    assert_eq!(words(well(&ran), "names"), ["not-this-host"; 3]);
    assert!(!unconfined(look).contains("not-this-host"));
    let ran = ConfinedRun::python(&format!(
        "name = b'mine'\nprint('set', libc.sethostname(name, 4))\n{look}"
    ))
    .run();
    assert!(
        ran.printed("set -1") && !ran.stdout.contains("mine"),
        "{}",
        ran.all()
    );
}

trial!(
    Everyone,
    no_writable_mount_of_the_host,
    only_at_full = "the mounts are the host's; Landlock decides what can be written there (P4)"
);
fn no_writable_mount_of_the_host() {
    let look = "for line in open('/proc/self/mountinfo'):\n    \
                    own, rest = line.split(' - ')\n    \
                    point, options = own.split()[4:6]\n    \
                    if 'ro' not in options.split(',') and 'ro' not in rest.split()[2].split(','): print('writable', point)";
    let data = tempfile::tempdir_in("/tmp").unwrap();
    let confined = ConfinedRun::python(look).view(data.path(), "data");
    let workspace = confined.workspace().to_str().unwrap().to_owned();
    let ran = confined.run();
    let devices = ["null", "zero", "full", "random", "urandom", "pts", "shm"]
        .map(|name| format!("/dev/{name}"));
    let found: Vec<&str> = well(&ran)
        .lines()
        .filter_map(|l| l.strip_prefix("writable "))
        .collect();
    for point in &found {
        let own = *point == workspace || *point == "/tmp" || devices.iter().any(|d| d == point);
        assert!(own, "{point} is writable: {}", ran.all());
    }
    assert!(
        found.contains(&workspace.as_str()) && found.contains(&"/tmp"),
        "{}",
        ran.all()
    );
    assert!(unconfined(look).lines().any(|l| l == "writable /"));
}

trial!(Everyone, devices_stay_as_they_are);
/// The program may write to these devices of the host, which stores nothing. It cannot change their modes or owners, or
/// remove or rename them.
fn devices_stay_as_they_are() {
    let mode = |name: &str| {
        fs::metadata(format!("/dev/{name}"))
            .map(|m| (m.mode(), m.uid(), m.ctime()))
            .unwrap()
    };
    let before = ["null", "zero", "full", "random", "urandom"].map(mode);
    let ran = ConfinedRun::python(
        "for name in ('null', 'zero', 'full', 'random', 'urandom'):\n    \
             for act in (lambda p: os.chmod(p, 0), lambda p: os.chown(p, 1000, 1000), os.unlink, lambda p: os.rename(p, '/tmp/x')):\n        \
                 try: act('/dev/' + name); print('did', name)\n        \
                 except OSError: print('refused')",
    )
    .run();
    assert_eq!(well(&ran).matches("refused").count(), 20, "{}", ran.all());
    assert_eq!(
        before,
        ["null", "zero", "full", "random", "urandom"].map(mode)
    );
}

trial!(Everyone, the_environment_is_built_from_nothing);
/// The trial runs itself again with a secret in its environment. No process that is visible inside has the secret.
fn the_environment_is_built_from_nothing() {
    const SECRET: (&str, &str) = ("PGPASSWORD", "fumehood-test-secret");
    if std::env::var_os(SECRET.0).is_none() {
        let again = Command::new(std::env::current_exe().unwrap())
            .args(inner_arguments!(the_environment_is_built_from_nothing))
            .env(SECRET.0, SECRET.1)
            .output()
            .unwrap();
        assert!(
            again.status.success(),
            "{}",
            String::from_utf8_lossy(&again.stderr)
        );
        return;
    }
    let look = "print('names', *os.environ)\n\
                found = 0\n\
                try: pids = [n for n in os.listdir('/proc') if n.isdigit()]\n\
                except PermissionError: pids = [1, os.getppid(), os.getpid(), RUNNER]\n\
                for pid in pids:\n    \
                    for name in ('environ', 'cmdline', 'stat', 'status', 'mem'):\n        \
                        try:\n            \
                            if b'fumehood-test-' + b'secret' in open(f'/proc/{pid}/{name}', 'rb').read(): found += 1\n        \
                        except OSError: pass\n\
                print('found', found)";
    let look = format!("RUNNER = {}\n{look}", std::process::id());
    let ran = ConfinedRun::python(&look).run();
    let given = ["HOME", "LANG", "PATH", "TMPDIR"];
    assert_eq!(words(well(&ran), "names"), given);
    assert_eq!(told(&ran.stdout, "found"), "0");
    let control = unconfined(&look);
    assert!(words(&control, "names").contains(&SECRET.0), "{control}");
    assert_ne!(told(&control, "found"), "0", "{control}");
}
