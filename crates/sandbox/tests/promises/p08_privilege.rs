//! P8: the analysis gains no privilege: never host uid 0, no effect of set-id programs or file capabilities, no
//! capability, no namespace, no kernel machinery, no tracing of anything, no foreign system call ABI. A
//! refused call returns an errno, and the program lives on.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use sandbox::spec::{Exec, HostPath, InsidePath, Owner, ReadOnlyView, Spec, ViewContent};
use testkit::{is_root, trial};

use crate::confined_run::{
    ConfinedRun, at_landlock, attempts, compile, shown_dir, unconfined, unconfined_under, verdict,
};
use crate::p07_others::{HeldRun, host_pids, host_uids};

/// Asserts that every act was refused inside with one of these errnos, and that the process of the act survived to
/// print the errno.
fn refused(printed: &str, acts: &[(&str, &str)], errnos: &[&str]) {
    for (act, _) in acts {
        let inside = verdict(printed, act);
        let errno = inside
            .strip_prefix("refused ")
            .unwrap_or_else(|| panic!("{act}: {inside}\n{printed}"));
        assert!(errnos.contains(&errno), "{act}: {errno}, not {errnos:?}");
    }
}

fn done(printed: &str, acts: &[(&str, &str)]) {
    for (act, _) in acts {
        // If this kernel does not have a call, the control cannot succeed. The call must be refused inside all the same.
        let came = verdict(printed, act);
        assert!(
            came == "done" || came == "refused ENOSYS",
            "control of {act}\n{printed}"
        );
    }
}

trial!(Everyone, never_host_root);
/// Checks every process of the run, pid 1 included, from the host's side.
fn never_host_root() {
    let mark = format!("uids-{}-{}", std::process::id(), u8::from(is_root()));
    let script = format!(
        "# {mark}\nimport subprocess\npipe = subprocess.PIPE\n\
         child = subprocess.Popen(['/bin/sh', '-c', 'echo up; read x; : {mark}'], stdin=pipe, stdout=pipe)\n\
         child.stdout.readline()\nhold()\nchild.kill()\n"
    );
    let held = HeldRun::start(ConfinedRun::python(""), &script);
    let mut pids = host_pids(&mark);
    assert!(pids.len() >= 2, "{pids:?}");
    let status = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |text: &str, name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap();
        line.trim_start_matches(':').trim().to_owned()
    };
    let parents: Vec<i32> = pids
        .iter()
        .map(|p| field(&status(*p), "PPid").parse().unwrap())
        .collect();
    let init = *parents
        .iter()
        .find(|p| !pids.contains(p))
        .expect("pid 1 is the parent of one of them");
    pids.push(init);
    let facts: Vec<_> = pids
        .iter()
        .map(|pid| (*pid, host_uids(*pid), status(*pid)))
        .collect();
    held.finish();
    let own = rustix::process::geteuid().as_raw();
    for (pid, uids, text) in facts {
        assert!(
            uids.iter().all(|uid| *uid != 0 && *uid == uids[0]),
            "{pid}: {uids:?}"
        );
        assert_eq!(
            uids[0] == own,
            !is_root(),
            "leased under root, the caller's own otherwise"
        );
        // Pid 1 may keep its bounding set, because this set limits execve alone and pid 1 calls no execve.
        let sets = capability_sets().iter();
        for set in sets.filter(|set| pid != init || **set != "CapBnd") {
            assert_eq!(
                field(&text, set),
                "0000000000000000",
                "{set} of {pid}\n{text}"
            );
        }
        assert_eq!(field(&text, "NoNewPrivs"), "1", "{pid}\n{text}");
        // Pid 1 runs Fumehood's code without the filter, because it makes calls that the filter refuses to the program.
        assert_eq!(field(&text, "Seccomp") == "2", pid != init, "{pid}\n{text}");
        assert_eq!(
            field(&text, "Groups"),
            if is_root() {
                String::new()
            } else {
                field(&text, "Groups")
            }
        );
    }
}

/// The capability sets that must be empty. Emptying the bounding set needs CAP_SETPCAP, which a plain user has only in
/// a user namespace. With no_new_privs, a bounding set that is not empty gives no privilege.
fn capability_sets() -> &'static [&'static str] {
    match at_landlock() && !is_root() {
        true => &["CapInh", "CapPrm", "CapEff", "CapAmb"],
        false => &["CapInh", "CapPrm", "CapEff", "CapAmb", "CapBnd"],
    }
}

/// The program's own ids, as it sees them.
fn inside_ids(spec: &Spec) -> (u32, u32) {
    match at_landlock() {
        false => (sandbox::INSIDE_UID, sandbox::INSIDE_GID),
        true => (spec.identity.uid(), spec.identity.gid()),
    }
}

trial!(Everyone, no_capability);
fn no_capability() {
    let script = "for line in open('/proc/self/status'):\n\
                  \x20   if line.startswith(('Cap', 'NoNewPrivs', 'Seccomp:', 'Groups')): print(' '.join(line.split()))\n\
                  print('uids', os.getresuid(), os.getresgid(), os.getgroups())\n";
    let control = unconfined(script);
    assert!(
        !control.contains("CapBnd: 0000000000000000"),
        "the control has a bounding set: {control}"
    );
    let confined = ConfinedRun::python(script);
    let spec = confined.spec.clone();
    let ran = confined.run();
    for set in capability_sets() {
        assert!(
            ran.printed(&format!("{set}: 0000000000000000")),
            "{}",
            ran.all()
        );
    }
    for line in ["NoNewPrivs: 1", "Seccomp: 2"] {
        assert!(ran.printed(line), "{}", ran.all());
    }
    // In a user namespace the program always has the same ids; without one it has the host's.
    let (uid, gid) = inside_ids(&spec);
    let line = format!("uids ({uid}, {uid}, {uid}) ({gid}, {gid}, {gid})");
    assert!(ran.stdout.contains(&line), "{}", ran.all());
}

/// Prints its effective ids, and its effective and permitted capabilities.
const WHO: &str = r#"
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(void) {
    char line[256];
    FILE *f = fopen("/proc/self/status", "r");
    printf("euid %d egid %d\n", geteuid(), getegid());
    while (f && fgets(line, sizeof line, f)) if (!strncmp(line, "CapEff", 6) || !strncmp(line, "CapPrm", 6)) fputs(line, stdout);
    return 0;
}
"#;

trial!(Root, set_id_programs);
fn set_id_programs() {
    let dir = shown_dir();
    for (name, mode) in [("setuid", 0o4755), ("setgid", 0o2755), ("filecap", 0o755)] {
        let at = dir.path().join(name);
        compile(WHO, &at);
        std::fs::set_permissions(&at, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    // Grant CAP_CHOWN as permitted and effective, in a struct vfs_cap_data of revision 2.
    let grant = "import struct\nos.setxattr(F, 'security.capability', struct.pack('<IIIII', 0x02000001, 1, 0, 0, 0))";
    unconfined(&format!("F = {:?}\n{grant}", dir.path().join("filecap")));
    let control = |name: &str| {
        let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
        let output = Command::new("setpriv")
            .args(nobody)
            .arg(dir.path().join(name))
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(
        control("setuid").contains("euid 0 "),
        "{}",
        control("setuid")
    );
    assert!(
        control("setgid").contains("egid 0\n"),
        "{}",
        control("setgid")
    );
    assert!(
        control("filecap").contains("CapEff:\t0000000000000001"),
        "{}",
        control("filecap")
    );
    for owner in [Owner::AsIs, Owner::Mapped] {
        let mut confined = ConfinedRun::sh(&format!(
            "cd {}; ./setuid; ./setgid; ./filecap",
            dir.path().display()
        ));
        confined.spec.views.push(ReadOnlyView {
            source: HostPath::new(dir.path()),
            target: InsidePath::new(dir.path()),
            exec: Exec::Allowed,
            owner,
            content: ViewContent::Runtime,
        });
        let (uid, gid) = inside_ids(&confined.spec);
        let ran = confined.run();
        // Without nosuid mounts, the kernel refuses to execute a file whose capability it cannot grant.
        let executed = if at_landlock() { 2 } else { 3 };
        let who = format!("euid {uid} egid {gid}");
        assert_eq!(
            ran.stdout.matches(&who).count(),
            executed,
            "{owner:?} {}",
            ran.all()
        );
        // At level `landlock` the program cannot read /proc/<pid>/status of a child.
        let told = if at_landlock() { 0 } else { executed };
        for set in ["CapEff", "CapPrm"] {
            assert_eq!(
                ran.stdout
                    .matches(&format!("{set}:\t0000000000000000"))
                    .count(),
                told,
                "{owner:?} {}",
                ran.all()
            );
        }
    }
}

trial!(Everyone, set_id_programs_of_the_system);
/// The set-user-id programs in /usr exist and run, without the privilege of their owner.
fn set_id_programs_of_the_system() {
    // mount(8) reports whether it has root's privilege: "must be superuser" or "only root can".
    let script = "import glob, stat, subprocess\n\
                  found = [p for p in glob.glob('/usr/bin/*') + glob.glob('/usr/sbin/*') if os.path.isfile(p) and os.stat(p).st_mode & stat.S_ISUID]\n\
                  print('found', len(found))\n\
                  out = subprocess.run(['/usr/bin/mount', '-t', 'tmpfs', 'none', '/mnt' if os.path.isdir('/mnt') else '/tmp'], capture_output=True, text=True)\n\
                  print('mount', out.returncode != 0)\n\
                  s = subprocess.Popen(['/usr/bin/su', '-c', 'id -u'], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)\n\
                  text = s.communicate()[0]\n\
                  print('su', s.returncode != 0 and text.strip() != '0')\n\
                  print('writable', any(os.access(p, os.W_OK) for p in found))\n\
                  print('nosuid', bool(os.statvfs('/usr').f_flag & 2), bool(os.statvfs('.').f_flag & 2), bool(os.statvfs('/tmp').f_flag & 2), bool(os.statvfs('/dev/shm').f_flag & 2))\n";
    let ran = ConfinedRun::python(script).run();
    assert!(!ran.printed("found 0"), "there are some: {}", ran.all());
    for line in ["mount True", "su True", "writable False"] {
        assert!(ran.printed(line), "{line}\n{}", ran.all());
    }
    // At level `landlock` the mounts are the host's, and no_new_privs alone makes the set-id bits ineffective.
    assert!(
        at_landlock() || ran.printed("nosuid True True True True"),
        "{}",
        ran.all()
    );
    if is_root() {
        // Control: as root, su gives root without a password.
        let control = Command::new("su").args(["-c", "id -u"]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&control.stdout).trim(), "0");
    }
}

/// Each act asks for a user namespace too, because an unprivileged process gets the other namespaces only with it.
const NAMESPACES: &[(&str, &str)] = &[
    ("unshare_user", "sc(272, 0x10000000)"),
    ("unshare_mount", "sc(272, 0x10020000)"),
    ("unshare_cgroup", "sc(272, 0x12000000)"),
    ("unshare_uts", "sc(272, 0x14000000)"),
    ("unshare_ipc", "sc(272, 0x18000000)"),
    ("unshare_pid", "sc(272, 0x30000000)"),
    ("unshare_net", "sc(272, 0x50000000)"),
    ("unshare_time", "sc(272, 0x10000080)"),
    ("clone_user", "born(sc(56, 0x10000011, 0, 0, 0, 0))"),
    ("clone_mount", "born(sc(56, 0x10020011, 0, 0, 0, 0))"),
    ("clone_cgroup", "born(sc(56, 0x12000011, 0, 0, 0, 0))"),
    ("clone_uts", "born(sc(56, 0x14000011, 0, 0, 0, 0))"),
    ("clone_ipc", "born(sc(56, 0x18000011, 0, 0, 0, 0))"),
    ("clone_pid", "born(sc(56, 0x30000011, 0, 0, 0, 0))"),
    ("clone_net", "born(sc(56, 0x50000011, 0, 0, 0, 0))"),
    (
        "clone_garbage_above",
        "born(sc(56, 0x10000011 | 1 << 40, 0, 0, 0, 0))",
    ),
    (
        "clone3_user",
        "born(sc(435, ctypes.create_string_buffer(struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64), 64))",
    ),
    (
        "clone3_plain",
        "born(sc(435, ctypes.create_string_buffer(struct.pack('8Q', 0, 0, 0, 0, 17, 0, 0, 0), 64), 64))",
    ),
];
const BORN: &str = "def born(pid):\n    if pid == 0: os._exit(0)\n    os.waitpid(pid, 0)\n";
const ENTER: &[(&str, &str)] = &[
    (
        "setns_uts",
        "sc(308, os.open('/proc/self/ns/uts', os.O_RDONLY), 0)",
    ),
    (
        "setns_mount",
        "sc(308, os.open('/proc/self/ns/mnt', os.O_RDONLY), 0)",
    ),
    (
        "setns_by_pidfd",
        "sc(308, os.pidfd_open(os.getpid()), 0x4000000)",
    ),
];

trial!(Everyone, namespaces);
fn namespaces() {
    done(&unconfined(&attempts(BORN, NAMESPACES)), NAMESPACES);
    done(
        &unconfined_under(&["unshare", "-Urmu"], &attempts("", ENTER)),
        ENTER,
    );
    let ran = ConfinedRun::python(&attempts(BORN, &[NAMESPACES, ENTER].concat())).run();
    refused(&ran.stdout, NAMESPACES, &["EPERM", "ENOSYS"]);
    refused(&ran.stdout, ENTER, &["EPERM"]);
    // Second control: a program can still make ordinary processes and threads.
    let ordinary = "import threading\nt = threading.Thread(target=lambda: print('THREAD')); t.start(); t.join()\n\
                    if os.fork() == 0: print('CHILD', flush=True); os._exit(0)\nos.wait()\n";
    let ran = ConfinedRun::python(ordinary).run();
    assert!(
        ran.printed("THREAD") && ran.printed("CHILD"),
        "{}",
        ran.all()
    );
}

const MOUNTS: &[(&str, &str)] = &[
    (
        "mount_tmpfs",
        "sc(165, ctypes.c_char_p(b'none'), ctypes.c_char_p(T), ctypes.c_char_p(b'tmpfs'), 0, 0)",
    ),
    (
        "mount_proc",
        "sc(165, ctypes.c_char_p(T), ctypes.c_char_p(T), 0, 4096, 0)",
    ),
    (
        "remount",
        "sc(165, 0, ctypes.c_char_p(b'/'), 0, 0x40000, 0)",
    ),
    (
        "unmount",
        "sc(165, ctypes.c_char_p(b'none'), ctypes.c_char_p(T), ctypes.c_char_p(b'tmpfs'), 0, 0); sc(166, ctypes.c_char_p(T), 2)",
    ),
    ("fsopen", "sc(430, ctypes.c_char_p(b'tmpfs'), 0)"),
    ("open_tree", "sc(428, -100, ctypes.c_char_p(T), 1)"),
    (
        "mount_setattr",
        "sc(165, ctypes.c_char_p(b'none'), ctypes.c_char_p(T), ctypes.c_char_p(b'tmpfs'), 0, 0)\n\
                       sc(442, -100, ctypes.c_char_p(T), 0, ctypes.create_string_buffer(struct.pack('4Q', 1, 0, 0, 0), 32), 32)",
    ),
    ("chroot", "sc(161, ctypes.c_char_p(T))"),
    (
        "pivot_root",
        "sc(165, ctypes.c_char_p(b'none'), ctypes.c_char_p(T), ctypes.c_char_p(b'tmpfs'), 0, 0); os.chdir(T); sc(155, ctypes.c_char_p(b'.'), ctypes.c_char_p(b'.'))",
    ),
];
/// The same calls without the calls that prepare them. Each is refused on its own.
const MOUNT_CALLS: &[(&str, &str)] = &[
    ("bare_umount2", "sc(166, ctypes.c_char_p(T), 2)"),
    (
        "bare_pivot_root",
        "sc(155, ctypes.c_char_p(b'.'), ctypes.c_char_p(b'.'))",
    ),
    (
        "bare_mount_setattr",
        "sc(442, -100, ctypes.c_char_p(T), 0, ctypes.create_string_buffer(32), 32)",
    ),
    (
        "bare_move_mount",
        "sc(429, -100, ctypes.c_char_p(T), -100, ctypes.c_char_p(T), 0)",
    ),
    ("bare_fsmount", "sc(432, 0, 0, 0)"),
    ("bare_fsconfig", "sc(431, 0, 0, 0, 0, 0)"),
    ("bare_fspick", "sc(433, -100, ctypes.c_char_p(b'/'), 0)"),
    (
        "bare_open_tree_attr",
        "sc(467, -100, ctypes.c_char_p(T), 1, 0, 0)",
    ),
];

trial!(Everyone, mounts);
fn mounts() {
    let dir = shown_dir();
    let control = unconfined_under(
        &["unshare", "-Urm"],
        &attempts(&format!("T = {:?}.encode()", dir.path()), MOUNTS),
    );
    done(&control, MOUNTS);
    let ran = ConfinedRun::python(&attempts(
        "T = os.getcwd().encode()",
        &[MOUNTS, MOUNT_CALLS].concat(),
    ))
    .run();
    refused(&ran.stdout, MOUNTS, &["EPERM"]);
    refused(&ran.stdout, MOUNT_CALLS, &["EPERM"]);
}

const MACHINERY: &[(&str, &str)] = &[
    ("userfaultfd", "sc(323, 1)"),
    (
        "io_uring_setup",
        "sc(425, 4, ctypes.create_string_buffer(256))",
    ),
    (
        "add_key",
        "sc(248, ctypes.c_char_p(b'user'), ctypes.c_char_p(b'fumehood-test'), ctypes.c_char_p(b'x'), 1, -2)",
    ),
    ("keyctl", "sc(250, 0, -3, 1)"),
    ("keyctl_join", "sc(250, 1, 0)"),
    ("trace_me", "sc(101, 0, 0, 0, 0)"),
    ("personality", "sc(135, 0x400000)"),
    (
        "name_to_handle",
        "sc(303, -100, ctypes.c_char_p(b'/tmp'), ctypes.create_string_buffer(struct.pack('Ii', 128, 0), 256), ctypes.byref(ctypes.c_int()), 0)",
    ),
    ("memfd_secret", "sc(447, 0)"),
    (
        "listmount",
        "sc(458, ctypes.create_string_buffer(struct.pack('IIQQQ', 32, 0, 0xffffffffffffffff, 0, 0), 32), ctypes.create_string_buffer(800), 100, 0)",
    ),
];
/// On the host only root may make these calls, and some would change the host. So they have no control.
const ROOTS_MACHINERY: &[(&str, &str)] = &[
    ("bpf", "sc(321, 5, ctypes.create_string_buffer(128), 128)"),
    (
        "bpf_map",
        "sc(321, 0, ctypes.create_string_buffer(struct.pack('IIII', 2, 4, 4, 1), 72), 72)",
    ),
    (
        "perf_event_open",
        "sc(298, ctypes.create_string_buffer(struct.pack('IIQ', 1, 128, 0), 128), 0, -1, -1, 0)",
    ),
    (
        "request_key",
        "sc(249, ctypes.c_char_p(b'user'), ctypes.c_char_p(b'fumehood-test'), 0, 0)",
    ),
    (
        "init_module",
        "sc(175, ctypes.c_char_p(b'x'), 1, ctypes.c_char_p(b''))",
    ),
    ("finit_module", "sc(313, 0, ctypes.c_char_p(b''), 0)"),
    ("delete_module", "sc(176, ctypes.c_char_p(b'nonesuch'), 0)"),
    ("kexec_load", "sc(246, 0, 0, 0, 0)"),
    ("kexec_file_load", "sc(320, 0, 0, 0, 0, 0)"),
    ("reboot", "sc(169, 0, 0, 0, 0)"),
    ("swapon", "sc(167, ctypes.c_char_p(b'/nonesuch'), 0)"),
    ("settimeofday", "sc(164, 0, 0)"),
    ("sethostname", "sc(170, ctypes.c_char_p(b'x'), 1)"),
    ("syslog", "sc(103, 10, 0, 0)"),
    ("iopl", "sc(172, 3)"),
    ("ioperm", "sc(173, 0x80, 1, 1)"),
    ("acct", "sc(163, 0)"),
    ("quotactl", "sc(179, 0x800001 << 8, 0, 0, 0)"),
    (
        "open_by_handle_at",
        "sc(304, os.open('.', os.O_RDONLY), ctypes.create_string_buffer(256), 0)",
    ),
    ("fanotify_init", "sc(300, 0, 0)"),
    ("process_madvise", "sc(440, 0, 0, 0, 0, 0)"),
    ("modify_ldt", "sc(154, 0, 0, 0)"),
];

trial!(Everyone, kernel_machinery);
fn kernel_machinery() {
    let control = unconfined(&attempts("", MACHINERY));
    if cfg!(target_arch = "x86_64") {
        let as_control: Vec<_> = MACHINERY
            .iter()
            .copied()
            .filter(|(n, _)| *n != "memfd_secret")
            .collect();
        done(&control, &as_control);
    }
    let ran = ConfinedRun::python(&attempts("", &[MACHINERY, ROOTS_MACHINERY].concat())).run();
    refused(&ran.stdout, MACHINERY, &["EPERM", "ENOSYS"]);
    refused(&ran.stdout, ROOTS_MACHINERY, &["EPERM"]);
}

const SET_ID_FILES: &[(&str, &str)] = &[
    ("chmod_setuid", "sc(90, ctypes.c_char_p(F), 0o4755)"),
    ("chmod_setgid", "sc(90, ctypes.c_char_p(F), 0o2755)"),
    ("fchmod", "sc(91, os.open(F, os.O_RDWR), 0o4755)"),
    ("fchmodat", "sc(268, -100, ctypes.c_char_p(F), 0o4755)"),
    ("fchmodat2", "sc(452, -100, ctypes.c_char_p(F), 0o6755, 0)"),
    (
        "fchmod_garbage_above",
        "sc(91, os.open(F, os.O_RDWR), 0o4755 | 1 << 40)",
    ),
    (
        "open",
        "os.umask(0); sc(2, ctypes.c_char_p(F + b'1'), os.O_CREAT | os.O_WRONLY, 0o4755)",
    ),
    (
        "openat",
        "os.umask(0); os.open(F + b'2', os.O_CREAT | os.O_WRONLY, 0o4755)",
    ),
    (
        "openat2",
        "os.umask(0); sc(437, -100, ctypes.c_char_p(F + b'3'), ctypes.create_string_buffer(struct.pack('QQQ', os.O_CREAT | 1, 0o4755, 0), 24), 24)",
    ),
    (
        "creat",
        "os.umask(0); sc(85, ctypes.c_char_p(F + b'4'), 0o4755)",
    ),
    (
        "mknod_file",
        "os.umask(0); sc(133, ctypes.c_char_p(F + b'5'), 0o104755, 0)",
    ),
    (
        "temporary",
        "os.open(os.path.dirname(F), os.O_TMPFILE | os.O_RDWR, 0o4755)",
    ),
    (
        "whiteout",
        "open(F + b'6', 'w').close(); sc(316, -100, ctypes.c_char_p(F + b'6'), -100, ctypes.c_char_p(F + b'7'), 4)",
    ),
];
const DEVICES: &[(&str, &str)] = &[
    ("null", "os.mknod(F + b'8', 0o20666, os.makedev(1, 3))"),
    ("memory", "os.mknod(F + b'9', 0o20666, os.makedev(1, 1))"),
    ("disk", "os.mknod(F + b'10', 0o60666, os.makedev(8, 0))"),
    (
        "file_capability",
        "os.setxattr(F, 'security.capability', struct.pack('<IIIII', 0x02000001, 1, 0, 0, 0))",
    ),
    ("give_away", "os.chown(F, 65534, 65534)"),
];
const HARMLESS_FILES: &[(&str, &str)] = &[
    ("chmod", "os.chmod(F, 0o755)"),
    ("fifo", "os.mkfifo(F + b'11')"),
    ("sticky", "os.mkdir(F + b'12'); os.chmod(F + b'12', 0o1777)"),
];

trial!(Everyone, files_that_carry_privilege);
fn files_that_carry_privilege() {
    let dir = shown_dir();
    let control = attempts(
        &format!(
            "F = {:?}.encode()\nopen(F, 'w').close()",
            dir.path().join("f")
        ),
        SET_ID_FILES,
    );
    done(&unconfined(&control), SET_ID_FILES);
    if is_root() {
        let other = shown_dir();
        let script = attempts(
            &format!(
                "F = {:?}.encode()\nopen(F, 'w').close()",
                other.path().join("f")
            ),
            DEVICES,
        );
        done(&unconfined(&script), DEVICES);
    }
    let all = [SET_ID_FILES, DEVICES, HARMLESS_FILES].concat();
    let places = ["os.getcwd()", "os.environ['TMPDIR']", "'/dev/shm'"];
    for place in &places[..if at_landlock() { 2 } else { 3 }] {
        let ran = ConfinedRun::python(&attempts(
            &format!("F = {place}.encode() + b'/f'\nopen(F, 'w').close()"),
            &all,
        ))
        .run();
        refused(&ran.stdout, SET_ID_FILES, &["EPERM", "ENOSYS", "EINVAL"]);
        refused(&ran.stdout, DEVICES, &["EPERM", "EINVAL", "ENOTSUP"]);
        done(&ran.stdout, HARMLESS_FILES);
    }
}

const IDS: &[(&str, &str)] = &[
    ("setuid", "os.setuid(0)"),
    ("setresuid", "os.setresuid(0, 0, 0)"),
    ("setgid", "os.setgid(0)"),
    ("setgroups", "os.setgroups([0])"),
    (
        "capset",
        "sc(126, ctypes.create_string_buffer(struct.pack('Ii', 0x20080522, 0)), ctypes.create_string_buffer(struct.pack('6I', 0, 1 << 21, 0, 0, 0, 0)))",
    ),
    ("own_map", "open('/proc/self/uid_map', 'w').write('0 0 1')"),
    (
        "limit",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); resource.setrlimit(resource.RLIMIT_NOFILE, (64, 65))",
    ),
    ("nice", "os.nice(-5)"),
    (
        "real_time",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    ),
    (
        "oom",
        "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    ),
    (
        "core_pattern",
        "open('/proc/sys/kernel/core_pattern', 'w').write('x')",
    ),
];

trial!(Everyone, ids);
fn ids() {
    if is_root() {
        // The control leaves out the uid map, which can be written only once, the settings of the host, and what root
        // may not do in a container.
        let harmless: Vec<_> = IDS
            .iter()
            .copied()
            .filter(|(n, _)| {
                ![
                    "own_map",
                    "core_pattern",
                    "capset",
                    "real_time",
                    "oom",
                    "limit",
                ]
                .contains(n)
            })
            .collect();
        done(&unconfined(&attempts("", &harmless)), &harmless);
    }
    let ran = ConfinedRun::python(&attempts("", IDS)).run();
    for (act, _) in IDS {
        // Python reports a limit above the hard one as a ValueError.
        let inside = verdict(&ran.stdout, act);
        assert!(
            inside.starts_with("refused") || inside.starts_with("failed ValueError"),
            "{act}: {inside}\n{}",
            ran.all()
        );
    }
}

/// The same call, getuid, through three system call ABIs: x86-64, i386 and x32.
#[cfg(target_arch = "x86_64")]
const TONGUES: &str = r#"
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
static long i386(long nr, long b) { long r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(nr), "b"(b), "c"(0), "d"(0) : "memory", "r8", "r9", "r10", "r11"); return r; }
static long native(long nr, long a) { long r; __asm__ volatile("syscall" : "=a"(r) : "a"(nr), "D"(a), "S"(0), "d"(0) : "memory", "rcx", "r11"); return r; }
int main(void) {
    long me = getpid();
    printf("native %s\n", native(SYS_getpid, 0) == me ? "understood" : "refused");
    long r = i386(20, 0);
    printf("i386 %s\n", r == me ? "understood" : "refused");
    printf("i386 errno %ld\n", r);
    r = native(0x40000000 + SYS_getpid, 0);
    printf("x32 %s\n", r == me ? "understood" : "refused");
    printf("x32 errno %ld\n", r);
    /* What a foreign number would mean: unshare(CLONE_NEWUSER). */
    printf("i386 unshare %ld\n", i386(310, 0x10000000));
    printf("x32 unshare %ld\n", native(0x40000000 + SYS_unshare, 0x10000000));
    printf("negative %ld\n", native(-1L, 0));
    printf("garbage above %s\n", native((1L << 33) + SYS_getpid, 0) == me ? "understood" : "refused");
    puts("LIVES");
    return 0;
}
"#;

trial!(Everyone, foreign_calls);
#[cfg(target_arch = "x86_64")]
fn foreign_calls() {
    let dir = shown_dir();
    compile(TONGUES, &dir.path().join("tongues"));
    let output = Command::new(dir.path().join("tongues")).output().unwrap();
    let control = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(control.contains("native understood"), "{control}");
    // Not every kernel has i386 and x32. The control shows which.
    let has_i386 = control.contains("i386 understood");
    assert!(
        has_i386 || !Path::new("/proc/sys/abi/vsyscall32").exists(),
        "{control}"
    );
    let mut confined = ConfinedRun::new(&["/bin/true"]);
    let at = confined.workspace().join("tongues");
    std::fs::copy(dir.path().join("tongues"), &at).unwrap();
    confined.command(&[&at]);
    let ran = confined.run();
    for line in ["native understood", "i386 refused", "x32 refused", "LIVES"] {
        assert!(ran.printed(line), "{line}\n{}", ran.all());
    }
    let enosys = -i64::from(rustix::io::Errno::NOSYS.raw_os_error());
    for line in ["i386 errno", "x32 errno", "i386 unshare", "x32 unshare"] {
        assert!(
            ran.printed(&format!("{line} {enosys}")),
            "{line}\n{}",
            ran.all()
        );
    }
}

/// On this architecture a kernel without compat has one system call ABI, which the filter's unit tests cover.
#[cfg(not(target_arch = "x86_64"))]
fn foreign_calls() {}
