//! Tests of the cgroup code: parsers on fixed and random text, then groups on the real kernel.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Component;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;
use rustix::fs::AtFlags;
use rustix::process::Pid;

use super::host::{cgroup_lines, host_from, unescape};
use super::names::ID_LEN_MAX;
use super::node::pids_in;
use super::*;

// --- parsers of the kernel's text files ---

const V1: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime master:1 propagate_from:2 - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

fn own(host: &Hierarchies, controller: Controller) -> Option<PathBuf> {
    let site = host.v1.iter().find(|s| s.controllers.contains(&controller));
    site.map(|s| s.own.clone())
}

#[test]
fn co_mounted_controllers_are_one_site_and_hybrid_is_seen() {
    let cgroup =
        "9:name=systemd:/\n8:pids:/user\n4:memory:/a/b\n3:cpuset:/\n2:cpu,cpuacct:/x\n0::/init\n";
    let host = host_from(V1.as_bytes(), cgroup.as_bytes());
    assert_eq!(host.v1.len(), 3);
    let both = host.v1.iter().find(|s| s.controllers.len() == 2).unwrap();
    assert_eq!(both.own, Path::new("/sys/fs/cgroup/cpu,cpuacct/x"));
    assert_eq!(
        own(&host, Controller::Memory).unwrap(),
        Path::new("/sys/fs/cgroup/memory/a/b")
    );
    let v2 = host.v2.as_ref().unwrap();
    assert_eq!(v2.own, Path::new("/sys/fs/cgroup/unified/init"));
    assert!(!host.is_none());
}

#[test]
fn the_cached_lines_give_the_same_hierarchies() {
    let others = "\
21 20 0:20 / /home/a-b rw - ext4 /dev/mapper/x--y-z rw
22 20 0:21 / /mnt/-\\040-\\040cgroup rw - tmpfs - rw
";
    let mounts = format!("{others}{V1}");
    let kept = cgroup_lines(mounts.as_bytes());
    assert_eq!(kept.split(|b| *b == b'\n').count(), V1.lines().count());
    let membership = b"8:pids:/user\n4:memory:/a/b\n2:cpu,cpuacct:/x\n0::/init\n";
    let expected = host_from(mounts.as_bytes(), membership);
    assert_eq!(expected.v1.len(), 3);
    let from_kept = host_from(&kept, membership);
    assert_eq!((from_kept.v1, from_kept.v2), (expected.v1, expected.v2));
}

#[test]
fn version_2_alone() {
    let mounts = b"30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
    let host = host_from(mounts, b"0::/user.slice/a:b.scope\n");
    assert!(host.v1.is_empty());
    assert_eq!(
        host.v2.unwrap().own,
        Path::new("/sys/fs/cgroup/user.slice/a:b.scope")
    );
}

#[test]
fn a_container_that_sees_a_part_of_the_hierarchy() {
    let mounts = b"35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
    let at_root = host_from(mounts, b"4:memory:/docker/abc\n");
    assert_eq!(
        own(&at_root, Controller::Memory).unwrap(),
        Path::new("/sys/fs/cgroup/memory")
    );
    let below = host_from(mounts, b"4:memory:/docker/abc/x\n");
    assert_eq!(
        own(&below, Controller::Memory).unwrap(),
        Path::new("/sys/fs/cgroup/memory/x")
    );
    // A sibling whose name only has the same prefix is not below it.
    assert!(host_from(mounts, b"4:memory:/docker/abcdef\n").is_none());
    assert!(host_from(mounts, b"4:memory:/\n").is_none());
}

#[test]
fn the_mount_that_shows_our_group_is_chosen() {
    let mounts = b"1 1 0:1 /other /a rw - cgroup cgroup rw,memory\n2 1 0:1 / /b rw - cgroup cgroup rw,memory\n";
    let host = host_from(mounts, b"4:memory:/mine\n");
    assert_eq!(
        own(&host, Controller::Memory).unwrap(),
        Path::new("/b/mine")
    );
}

#[test]
fn octal_escapes_are_decoded_once() {
    assert_eq!(unescape(br"/a\040b\011c\012d\134040"), b"/a b\tc\nd\\040");
    assert_eq!(unescape(br"\04"), br"\04");
    assert_eq!(unescape(br"\999\777\"), br"\999\777\");
    let host = host_from(
        br"1 1 0:1 / /a\040b rw - cgroup cgroup rw,pids",
        b"1:pids:/\n",
    );
    assert_eq!(own(&host, Controller::Pids).unwrap(), Path::new("/a b"));
}

#[test]
fn hostile_lines_are_skipped() {
    for mounts in [
        &b"1 1 0:1 / /x rw - fuse.cgroup cgroup rw,memory"[..],
        b"1 1 0:1 / /x rw - ext4 cgroup rw,memory",
        b"1 1 0:1 / /x rw - cgroup",
        b"1 1 0:1 / /x/../y rw - cgroup cgroup rw,memory",
        b"1 1 0:1 / relative rw - cgroup cgroup rw,memory",
        b"- - - - - - -",
        b"1 1 0:1 / /x rw cgroup cgroup rw,memory",
    ] {
        assert!(host_from(mounts, b"4:memory:/\n").is_none(), "{mounts:?}");
    }
    let good = b"1 1 0:1 / /x rw - cgroup cgroup rw,memory\n";
    for line in [
        &b"4:memory:/../up"[..],
        b"4:memory:",
        b"4:memory",
        b"memory",
        b"4:memory:x",
        b"::",
    ] {
        assert!(host_from(good, line).is_none(), "{line:?}");
    }
}

#[test]
fn ids_that_could_leave_their_directory_are_refused() {
    for id in [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "-a",
        ".a",
        "a b",
        "a\n",
        "a\0",
        "é",
        &"a".repeat(65),
    ] {
        assert!(check_id(id).is_err(), "{id:?}");
    }
    for id in ["a", "A.b_c-9", &"a".repeat(64)] {
        assert!(check_id(id).is_ok(), "{id:?}");
    }
}

#[test]
fn only_whole_positive_pids_of_others_are_signalled() {
    let text = format!("0\n-1\n77777\nx\n{}\n1234", std::process::id());
    assert_eq!(pids_in(&text), BTreeSet::from([77777]));
}

#[test]
fn numbers_are_parsed_and_rounded() {
    assert_eq!(keyed("oom 1\noom_kill 3\n", "oom_kill"), Some(3));
    assert_eq!(keyed("oom_kill_disable 0\n", "oom_kill"), None);
    assert_eq!(
        meminfo_bytes("MemTotal:  24 kB\nSwapTotal: 0 kB\n", "SwapTotal:"),
        Some(0)
    );
    assert_eq!(cpu_quota_us(1500), 150_000);
    assert_eq!(cpu_quota_us(1), 1000);
    assert!(is_rounded(10_000_001)("9998336"));
    assert!(!is_rounded(10_000_000)("10000001"));
    assert!(!is_rounded(10_000_000)("max"));
}

proptest! {
    #[test]
    fn no_text_makes_the_parsers_panic_or_escape_the_mount(
        mounts in "([0-9/ a-z.\\\\:,\\-\n]|cgroup2?|memory| - | / ){0,60}",
        groups in "([0-9/ a-z.:,\n]|memory|:/|\\.\\.){0,40}",
    ) {
        let host = host_from(mounts.as_bytes(), groups.as_bytes());
        for site in host.v1.iter().chain(&host.v2) {
            prop_assert!(site.own.starts_with(&site.mount));
            prop_assert!(!site.own.components().any(|c| c == Component::ParentDir));
        }
    }

    #[test]
    fn no_bytes_make_the_parsers_panic(mounts: Vec<u8>, groups: Vec<u8>, id: String) {
        let _ = host_from(&mounts, &groups);
        let _ = unescape(&mounts);
        let _ = left_behind(Path::new(&id), &mounts, &Hierarchies::default());
        if check_id(&id).is_ok() {
            prop_assert!(!id.contains('/') && id.len() <= ID_LEN_MAX);
        }
    }
}

// --- behaviour of the kernel ---

static SKIPPED: AtomicU32 = AtomicU32::new(0);

/// Returns `None` if the kernel has no cgroups at all, so that there is nothing to test. A partial setup makes the
/// tests fail.
pub(super) fn host() -> Option<Hierarchies> {
    let host = discover(OwnProcess::MayMove);
    if host.is_none() {
        let count = SKIPPED.fetch_add(1, Ordering::SeqCst) + 1;
        eprintln!("SKIPPED ({count} so far): no cgroup hierarchy with controllers is mounted");
        return None;
    }
    Some(host)
}

pub(super) const MIB: u64 = 1 << 20;

pub(super) fn limits(memory_bytes: u64, pids: u64, cpu_milli: u64) -> GroupLimits {
    GroupLimits {
        memory_bytes: Some(memory_bytes),
        pids: Some(pids),
        cpu_milli: Some(cpu_milli),
    }
}

/// Starts a shell that attaches itself to the group before it runs the script. `prefix` may change its credentials
/// first; the descriptors are still those that this process opened.
pub(super) fn start(group: &Group, prefix: &[&str], script: &str) -> Child {
    let fds = group.attach_fds().unwrap();
    let mut attach = String::new();
    for fd in &fds {
        use std::os::fd::AsRawFd;
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).unwrap();
        attach += &format!("echo 0 >&{0} || exit 99; exec {0}>&-; ", fd.as_raw_fd());
    }
    let words = prefix.iter().chain(&["bash", "-c"]);
    let mut words = words.map(|w| w.to_string()).collect::<Vec<_>>();
    words.push(attach + script);
    Command::new(&words[0])
        .args(&words[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn run(group: &Group, prefix: &[&str], script: &str) -> (ExitStatus, String) {
    let output = start(group, prefix, script).wait_with_output().unwrap();
    (output.status, String::from_utf8(output.stdout).unwrap())
}

fn read_line(child: &mut Child) -> String {
    use std::io::{BufRead, BufReader};
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    line.trim().to_owned()
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap()
}

/// Uses more memory than any limit here, but never more than 200 MiB of the host's.
const USE_200_MIB: &str = "head -c 200M /dev/zero | tail -c 200M | wc -c";

#[test]
fn every_limit_is_held_and_says_how() {
    let Some(host) = host() else { return };
    let group = Group::create(&host, "limits", &limits(64 * MIB + 5, 32, 1500)).unwrap();
    for limit in [LimitName::Memory, LimitName::Pids, LimitName::Cpus] {
        let enforced = group.enforces(limit);
        assert!(enforced.is_some(), "{limit:?}: {:?}", group.why_not(limit));
        eprintln!("{limit:?}: {}", enforced.unwrap().by);
    }
    assert!(group.enforces(LimitName::WallTime).is_none());
    let cpu = group.part(Controller::Cpu).unwrap();
    match cpu.node.version {
        Version::V1 => {
            assert_eq!(cpu.node.number("cpu.cfs_quota_us"), Some(150_000));
            assert_eq!(cpu.node.number("cpu.cfs_period_us"), Some(100_000));
        }
        Version::V2 => {
            assert_eq!(cpu.node.read("cpu.max").unwrap().trim(), "150000 100000");
            assert_eq!(cpu.node.read("memory.oom.group").unwrap().trim(), "1");
        }
    }
    assert_eq!(group.counters().oom_kills, Some(0));
    group.remove().unwrap();
}

#[test]
fn a_resource_without_a_limit_is_still_counted() {
    let Some(host) = host() else { return };
    let group = Group::create(&host, "free", &GroupLimits::default()).unwrap();
    assert!(group.enforces(LimitName::Memory).is_none());
    assert!(group.why_not(LimitName::Memory).is_none());
    let (status, out) = run(&group, &[], USE_200_MIB);
    assert!(status.success());
    assert_eq!(out.trim(), (200 * MIB).to_string());
    assert!(group.counters().oom_kills == Some(0));
    group.remove().unwrap();
}

#[test]
fn a_limit_the_kernel_refuses_is_reported_as_not_held() {
    let Some(host) = host() else { return };
    let group = Group::create(&host, "toolarge", &limits(MIB, u64::MAX, u64::MAX)).unwrap();
    for limit in [LimitName::Pids, LimitName::Cpus] {
        assert!(group.enforces(limit).is_none());
        assert!(group.why_not(limit).is_some());
    }
    group.remove().unwrap();
}

#[test]
fn over_the_memory_limit_one_process_dies_or_with_version_2_all() {
    let Some(host) = host() else { return };
    let group = Group::create(&host, "oom", &limits(48 * MIB, 32, 2000)).unwrap();
    let script = format!("{USE_200_MIB} >/dev/null; echo ${{PIPESTATUS[*]}}; echo alive");
    let script = script.replace("| wc -c", "");
    let (status, out) = run(&group, &[], &script);
    let counters = group.counters();
    eprintln!("{counters:?}");
    match group.part(Controller::Memory).unwrap().node.version {
        Version::V1 => {
            assert!(status.success(), "{status:?}");
            assert!(out.contains("137") && out.ends_with("alive\n"), "{out}");
            assert_eq!(counters.oom_kills, Some(1));
        }
        Version::V2 => {
            use std::os::unix::process::ExitStatusExt;
            assert_eq!((status.signal(), out.as_str()), (Some(9), ""));
            assert!(counters.oom_kills.unwrap() >= 2);
            assert!(counters.ooms_at_limit.unwrap() >= 1);
        }
    }
    if let Some(peak) = counters.memory_peak_bytes {
        assert!((40 * MIB..=48 * MIB).contains(&peak), "{peak}");
    }
    group.remove().unwrap();
}

#[test]
fn a_memory_limit_that_does_not_count_swap_is_not_hard() {
    let with_swap = limit_without_swap("cgroup v1 memory.limit_in_bytes".into(), true);
    assert_eq!(with_swap.how_hard, Hardness::Watched);
    assert!(with_swap.by.contains("(swap not counted)"));
    let without = limit_without_swap("cgroup v1 memory.limit_in_bytes".into(), false);
    assert_eq!(without, hard("cgroup v1 memory.limit_in_bytes"));
}

/// Makes a version 2 directory without controllers. A hybrid host, whose version 2 tree has no controllers, can do
/// this too.
fn plain_v2(name: &str) -> Option<Group> {
    let Some(site) = sites().v2 else {
        eprintln!("UNAVAILABLE: no version 2 tree is mounted");
        return None;
    };
    let parent = match v2::prepare_parent(&site, OwnProcess::MayMove) {
        Ok((parent, _)) => parent,
        Err(_) => Node::open(Version::V2, &site.own).unwrap(),
    };
    let name = name_for(name);
    let node = match parent.make_child(&name) {
        Err(e) if e.means_not_ours() && !rustix::process::geteuid().is_root() => {
            eprintln!("UNAVAILABLE: no part of the version 2 tree is ours");
            return None;
        }
        made => made.unwrap(),
    };
    let part = CreatedGroup {
        node,
        parent,
        name,
        controllers: Vec::new(),
    };
    Some(Group {
        parts: vec![part],
        enforcement: Vec::new(),
    })
}

#[test]
fn a_child_starts_in_the_group() {
    use crate::sys::{self, ForkSide};
    let Some(group) = plain_v2("born") else {
        return;
    };
    let none = File::open("/").unwrap();
    let cases = [
        (group.directory_fd(), GroupEntry::InGroup),
        (None, GroupEntry::Outside { refusal: None }),
        // Not a group at all: the child starts all the same, and learns the reason.
        (
            Some(none.as_fd()),
            GroupEntry::Outside {
                refusal: Some(Errno::BADF),
            },
        ),
    ];
    for (directory, expected) in cases {
        let (from_child, to_us) =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        // The test process has threads, and a process that forks into a group must have a single one.
        let child = match sys::fork_threaded().unwrap() {
            ForkSide::Child => sys::exit_now(fork_and_report_groups(directory, expected, &to_us)),
            ForkSide::Parent { child } => Pid::from_raw(child).unwrap(),
        };
        drop(to_us);
        let mut report = String::new();
        io::Read::read_to_string(&mut File::from(from_child), &mut report).unwrap();
        let (_, status) =
            rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty())
                .unwrap()
                .unwrap();
        assert_eq!(status.exit_status(), Some(7), "{report}");
        let inside = report
            .lines()
            .any(|line| line.starts_with("0::") && line.ends_with(&group.parts[0].name));
        assert_eq!(inside, expected == GroupEntry::InGroup, "{report}");
    }
    group.remove().unwrap();
}

/// Returns 7 if a child started as expected and reported its groups.
fn fork_and_report_groups(
    directory: Option<BorrowedFd<'_>>,
    expected: GroupEntry,
    to: &OwnedFd,
) -> i32 {
    use crate::sys::{self, ForkSide};
    match fork_into(directory) {
        Ok((ForkSide::Child, entry)) => {
            let groups = fs::read("/proc/self/cgroup").unwrap_or_default();
            let report = rustix::io::write(to, &groups).is_ok() && entry == expected;
            sys::exit_now(if report { 7 } else { 8 })
        }
        Ok((ForkSide::Parent { child }, entry)) if entry == expected => {
            let options = rustix::process::WaitOptions::empty();
            let ended = rustix::process::waitpid(Pid::from_raw(child), options);
            let code = ended.ok().flatten().and_then(|(_, s)| s.exit_status());
            code.unwrap_or(9)
        }
        _ => 10,
    }
}

/// As on a cluster or in an old container: root has delegated a directory in every hierarchy to a plain account.
#[test]
fn a_plain_account_has_the_same_limits_in_a_delegated_directory() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("UNAVAILABLE: only root can delegate");
        return;
    }
    let Some(host) = host() else { return };
    const UID: u32 = 54321;
    let group = Group::create(&host, "delegated", &GroupLimits::default()).unwrap();
    for path in group.paths() {
        let files = [
            "",
            "cgroup.procs",
            "cgroup.subtree_control",
            "cgroup.threads",
        ];
        for file in files.iter().map(|file| path.join(file)) {
            // Version 1 has only the first two files, and needs only the first.
            let _ = std::os::unix::fs::chown(file, Some(UID), Some(UID));
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(directory.path(), open).unwrap();
    let copy = directory.path().join("tests");
    // Another process makes the copy. If this process wrote the file, a child that another thread forks just then could
    // inherit the descriptor that is open for writing, and nobody can execute the copy while the child has it.
    let copied = Command::new("cp")
        .arg(std::env::current_exe().unwrap())
        .arg(&copy)
        .status();
    assert!(copied.unwrap().success());
    let tests = [
        "every_limit_is_held_and_says_how",
        "over_the_memory_limit_one_process_dies_or_with_version_2_all",
        "forks_beyond_the_process_limit_are_refused",
        "kill_reaches_daemonised_grandchildren",
        "an_existing_group_is_not_reused_and_not_removed",
    ];
    let names = tests
        .map(|name| format!("resources::cgroup::tests::{name}"))
        .join(" ");
    let script = format!(
        "cd / && exec setpriv --reuid={UID} --regid={UID} --clear-groups {copy:?} --exact --test-threads=1 {names} 2>&1"
    );
    let (status, out) = run(&group, &[], &script);
    assert!(status.success(), "{out}");
    assert!(out.contains(&format!("{} passed", tests.len())), "{out}");
    assert!(!out.contains("SKIPPED"), "{out}");
    // Control: the same account where nothing was delegated to it.
    let control = Command::new("setpriv")
        .args([
            &format!("--reuid={UID}"),
            &format!("--regid={UID}"),
            "--clear-groups",
        ])
        .arg(&copy)
        .args([
            "--exact",
            &format!("resources::cgroup::tests::{}", tests[0]),
        ])
        .current_dir("/")
        .output()
        .unwrap();
    assert!(!control.status.success());
    // With version 2 the account has moved itself into a leaf, which is empty now.
    for path in group.paths() {
        for entry in fs::read_dir(path).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                fs::remove_dir(entry.path()).unwrap();
            }
        }
    }
    group.remove().unwrap();
}

#[test]
fn forks_beyond_the_process_limit_are_refused() {
    let Some(host) = host() else { return };
    let script =
        "for i in {1..20}; do sleep 60 & done 2>/dev/null; jobs -p | wc -l; kill $(jobs -p); wait";
    let group = Group::create(&host, "forks", &limits(64 * MIB, 6, 2000)).unwrap();
    // A shell that cannot fork retries for long. Its group is killed instead of awaited.
    let child = start(&group, &[], "for i in {1..20}; do sleep 60 & done");
    let deadline = Instant::now() + Duration::from_secs(20);
    while group.counters().pids_denied == Some(0) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let counters = group.counters();
    group.kill();
    let _ = child.wait_with_output();
    eprintln!("{counters:?}");
    assert!(counters.pids_denied.unwrap() > 0);
    assert!(counters.pids_peak.is_none_or(|peak| peak <= 6));
    group.remove().unwrap();
    // Control: the same forks with a limit that allows them.
    let group = Group::create(&host, "forks2", &limits(64 * MIB, 60, 2000)).unwrap();
    let (_, out) = run(&group, &[], script);
    assert_eq!(out.trim(), "20");
    assert_eq!(group.counters().pids_denied, Some(0));
    group.remove().unwrap();
}

#[test]
fn cpu_time_is_counted_and_can_be_read_through_a_descriptor() {
    let Some(host) = host() else { return };
    let group = Group::create(&host, "cpu", &limits(64 * MIB, 32, 500)).unwrap();
    let (fd, unit) = group.cpu_usage_fd().unwrap();
    let before = unit.read_us(fd.as_fd()).unwrap();
    let begin = Instant::now();
    run(&group, &[], "for ((i = 0; i < 200000; i++)); do :; done");
    let (used, wall) = (unit.read_us(fd.as_fd()).unwrap() - before, begin.elapsed());
    assert!(used > 50_000, "{used}");
    assert!(group.counters().cpu_usage_us.unwrap() >= used);
    // Half a CPU: the wall time is at least about twice the CPU time.
    assert!(wall.as_micros() as u64 > used * 3 / 2, "{used} {wall:?}");
    group.remove().unwrap();
}

#[test]
fn a_process_of_another_uid_in_a_user_namespace_attaches_itself() {
    let Some(host) = host() else { return };
    let group = Group::create(&host, "userns", &limits(48 * MIB, 32, 2000)).unwrap();
    let as_other = [
        "setpriv",
        "--reuid=54321",
        "--regid=54321",
        "--clear-groups",
    ];
    let prefix = match rustix::process::geteuid().is_root() {
        true => [&as_other[..], &["unshare", "-Ur"]].concat(),
        false => vec!["unshare", "-Ur"],
    };
    let mut child = start(&group, &prefix, "echo in; read -r; exit 7");
    assert_eq!(read_line(&mut child), "in");
    assert!(!group.is_empty());
    let pid = i32::try_from(child.id()).unwrap();
    for part in &group.parts {
        assert!(
            part.node.pids().unwrap().contains(&pid),
            "{:?}",
            part.node.path
        );
    }
    assert!(matches!(
        CreatedGroup::remove(&group.parts[0], Instant::now()),
        Err(CgroupError::Busy(_))
    ));
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(7));
    assert!(group.is_empty());
    group.remove().unwrap();
}

#[test]
fn kill_reaches_daemonised_grandchildren() {
    let Some(host) = host() else { return };
    let group = Group::create(&host, "kill", &limits(64 * MIB, 64, 2000)).unwrap();
    let script = "for i in {1..20}; do setsid sleep 300 >/dev/null & done; echo ready; wait";
    let mut child = start(&group, &[], script);
    assert_eq!(read_line(&mut child), "ready");
    group.kill();
    assert!(!child.wait().unwrap().success());
    let paths = group.paths();
    group.remove().unwrap();
    assert!(paths.iter().all(|path| !path.exists()));
}

#[test]
fn an_existing_group_is_not_reused_and_not_removed() {
    let Some(host) = host() else { return };
    let first = Group::create(&host, "twice", &limits(64 * MIB, 8, 1000)).unwrap();
    let second = Group::create(&host, "twice", &limits(64 * MIB, 8, 1000));
    assert!(
        matches!(second, Err(CgroupError::Make { .. })),
        "{second:?}"
    );
    assert!(first.paths().iter().all(|path| path.exists()));
    assert!(Group::create(&host, "../x", &GroupLimits::default()).is_err());
    let paths = first.paths();
    drop(first);
    assert!(paths.iter().all(|path| !path.exists()));
}

#[test]
fn two_hundred_groups_leave_nothing() {
    let Some(host) = host() else { return };
    let groups_now = |parent: &Path| {
        let entries = fs::read_dir(parent).unwrap();
        let name = |e: &fs::DirEntry| e.file_name().to_string_lossy().into_owned();
        let ours = format!("-{}", std::process::id());
        let is_ours = |n: &String| n.starts_with("fumehood-cycle") && n.ends_with(&ours);
        entries.flatten().map(|e| name(&e)).filter(is_ours).count()
    };
    for round in 0..200 {
        let group = Group::create(&host, &format!("cycle{round}"), &limits(64 * MIB, 8, 1000));
        let group = group.unwrap();
        if round % 20 == 0 {
            assert!(run(&group, &[], "exit 0").0.success());
        }
        let parents: Vec<PathBuf> = group.parts.iter().map(|p| p.parent.path.clone()).collect();
        assert!(parents.iter().all(|p| groups_now(p) == 1));
        group.remove().unwrap();
        assert!(parents.iter().all(|p| groups_now(p) == 0));
    }
}

#[test]
fn left_behind_groups_are_killed_and_removed_only_in_their_own_boot() {
    let Some(host) = host() else { return };
    let group = Group::create(&host, "left", &limits(64 * MIB, 32, 1000)).unwrap();
    let mut child = start(
        &group,
        &[],
        "setsid sleep 300 >/dev/null & echo ready; sleep 300",
    );
    assert_eq!(read_line(&mut child), "ready");
    let paths = group.paths();
    // Dropping the group looks like the death of its runner: the group is in use and stays.
    drop(group);
    assert!(paths.iter().all(|path| path.exists()));
    assert_eq!(remove_left_behind(&paths, "another boot").unwrap(), 0);
    assert!(paths.iter().all(|path| path.exists()));
    assert_eq!(remove_left_behind(&paths, &boot_id()).unwrap(), paths.len());
    assert!(!child.wait().unwrap().success());
    assert!(paths.iter().all(|path| !path.exists()));
    // Repeating the removal changes nothing.
    assert_eq!(remove_left_behind(&paths, &boot_id()).unwrap(), 0);
}

#[test]
fn recovery_refuses_what_is_not_a_runs_group() {
    let Some(host) = host() else { return };
    let directory = tempfile::tempdir().unwrap();
    let outside = directory.path().join("fumehood-a-1");
    fs::create_dir(&outside).unwrap();
    let link = directory.path().join("fumehood-b-1");
    let group = Group::create(&host, "refuse", &GroupLimits::default()).unwrap();
    let target = &group.paths()[0];
    std::os::unix::fs::symlink(target, &link).unwrap();
    let own = host.v2.iter().chain(&host.v1).next().unwrap();
    let mount = &own.mount;
    for path in [
        outside.clone(),
        link,
        own.own.clone(),
        mount.clone(),
        mount.join("user.slice"),
        mount.join("fumehood_runner-1"),
        mount.join("fumehood-"),
        mount.join("fumehood-x"),
        mount.join("fumehood-x-"),
        mount.join("fumehood-x-1y"),
        mount.join("fumehood-.x-1"),
        mount.join("fumehood-x y-1"),
        mount.join("fumehood-x-1/../../etc"),
        target.join("..").join("fumehood-refuse-1"),
        PathBuf::from("fumehood-x-1"),
        PathBuf::from("/"),
        PathBuf::new(),
    ] {
        let answer = remove_left_behind(std::slice::from_ref(&path), &boot_id());
        let refused = matches!(answer, Err(CgroupError::Foreign { .. }));
        assert!(refused, "{path:?}: {answer:?}");
    }
    assert!(outside.exists() && target.exists());
    // One bad path does not prevent the removal of the others.
    let both = [vec![outside.clone()], group.paths()].concat();
    assert!(remove_left_behind(&both, &boot_id()).is_err());
    assert!(outside.exists() && !target.exists());
}

#[test]
fn available_memory_is_bounded_by_the_machine() {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo_bytes(&meminfo, "MemTotal:").unwrap();
    let available = memory_available_bytes();
    assert!(available > 0 && available <= total);
}

#[test]
fn a_limit_above_this_process_bounds_its_available_memory() {
    let Some(host) = host() else { return };
    let group = Group::create(&host, "above", &limits(64 * MIB, 8, 1000)).unwrap();
    let part = group.part(Controller::Memory).unwrap();
    let inner = part.node.make_child("inner").unwrap();
    let site = Site {
        version: part.node.version,
        controllers: vec![Controller::Memory],
        mount: part.parent.path.clone(),
        own: inner.path.clone(),
    };
    let found = match site.version {
        Version::V1 => v1::memory_limit(&site),
        Version::V2 => v2::memory_limit(&site),
    };
    rustix::fs::unlinkat(&part.node.fd, "inner", AtFlags::REMOVEDIR).unwrap();
    assert_eq!(found, Some(64 * MIB));
    group.remove().unwrap();
}
