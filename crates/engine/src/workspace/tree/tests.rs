//! Tests on the real file system, as root and as a plain user.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use super::walk::OPEN_DIR;
use super::*;

/// A tmpfs: renames need no journal, so a race gets many tries in little time.
const FAST: &str = "/dev/shm";
/// An id that no account has.
const PLAIN_ID: u32 = 54_321;

fn open(path: &Path) -> OwnedFd {
    File::open(path).unwrap().into()
}

fn remove_below(path: &Path) -> Result<RemovedEntries, TreeError> {
    remove_contents(open(path).as_fd())
}

fn is_empty(path: &Path) -> bool {
    fs::read_dir(path).unwrap().next().is_none()
}

/// Makes a chain of directories by descriptor, because its path is too long for the kernel.
fn make_chain(top: &Path, levels: usize, name: &str) {
    let mut dir = open(top);
    for _ in 0..levels {
        rustix::fs::mkdirat(&dir, name, Mode::RWXU).unwrap();
        dir = rustix::fs::openat(&dir, name, OPEN_DIR | OFlags::CLOEXEC, Mode::empty()).unwrap();
    }
}

/// Runs one test of this file again in another process, as another user or in namespaces of its own. Returns whether
/// this is that process, in which the test does its work.
fn inside(test: &str, wrapper: &[&str]) -> bool {
    if std::env::var_os("FUMEHOOD_TEST_INSIDE").is_some() {
        return true;
    }
    let module = module_path!().split_once("::").unwrap().1;
    let output = Command::new(wrapper[0])
        .args(&wrapper[1..])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("{module}::{test}"), "--nocapture"])
        .env("FUMEHOOD_TEST_INSIDE", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}\n{errors}"
    );
    false
}

#[test]
fn names_of_any_bytes_and_kinds_of_any_sort_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let victim = tempfile::tempdir().unwrap();
    fs::write(victim.path().join("keep"), "kept").unwrap();
    let names: [&[u8]; 6] = [
        b"a\nb",
        b"\xff\xfe",
        &[b'x'; 255],
        b" ",
        b"-rf",
        "日本".as_bytes(),
    ];
    for name in names {
        let name = std::ffi::OsString::from_vec(name.to_vec());
        let sub = dir.path().join(&name);
        fs::create_dir(&sub).unwrap();
        fs::write(sub.join(&name), "x").unwrap();
        symlink(victim.path(), sub.join("link")).unwrap();
        fs::create_dir(sub.join("empty")).unwrap();
        let fifo = open(&sub);
        let kind = FileType::Fifo;
        rustix::fs::mknodat(&fifo, "fifo", kind, Mode::RUSR, 0).unwrap();
    }
    let removed = remove_below(dir.path()).unwrap();
    assert_eq!(removed.entries, 5 * names.len() as u64);
    assert!(is_empty(dir.path()));
    assert_eq!(fs::read(victim.path().join("keep")).unwrap(), b"kept");
}

#[test]
fn twelve_thousand_levels_cost_a_constant_number_of_descriptors() {
    let test = "twelve_thousand_levels_cost_a_constant_number_of_descriptors";
    if !inside(test, &["prlimit", "--nofile=40"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    make_chain(dir.path(), 12_000, &"d".repeat(200));
    let measured = measure(open(dir.path()).as_fd(), u64::MAX);
    assert_eq!((measured.files, measured.unreadable), (12_000, false));
    assert_eq!(remove_below(dir.path()).unwrap().entries, 12_000);
    assert!(is_empty(dir.path()));
}

#[test]
fn wide_directories_are_read_in_batches() {
    let dir = tempfile::tempdir().unwrap();
    // More subdirectories than one batch may defer, so that reading resumes at a position.
    for n in 0..1500 {
        let sub = dir.path().join(format!("{n:0>100}"));
        fs::create_dir(&sub).unwrap();
        fs::write(sub.join("f"), "x").unwrap();
    }
    let measured = measure(open(dir.path()).as_fd(), u64::MAX);
    assert_eq!(
        (measured.files, measured.unreadable, measured.cut_short),
        (3000, false, false)
    );
    let bounded = measure(open(dir.path()).as_fd(), 100);
    assert_eq!((bounded.files, bounded.cut_short), (100, true));
    assert_eq!(remove_below(dir.path()).unwrap().entries, 3000);
    assert!(is_empty(dir.path()));
}

#[test]
fn hard_links_are_measured_once_and_holes_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a");
    fs::write(&file, vec![1; 100_000]).unwrap();
    fs::hard_link(&file, dir.path().join("b")).unwrap();
    File::create(dir.path().join("hole"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let measured = measure(open(dir.path()).as_fd(), u64::MAX);
    let blocks = |name| fs::metadata(dir.path().join(name)).unwrap().blocks() * 512;
    assert_eq!(
        (measured.files, measured.bytes),
        (2, blocks("a") + blocks("hole"))
    );
}

#[test]
fn only_the_expected_directory_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let parent = open(dir.path());
    let made = dir.path().join("w");
    fs::create_dir(&made).unwrap();
    fs::write(made.join("f"), "x").unwrap();
    let meta = fs::metadata(&made).unwrap();
    let (name, expect) = (OsStr::new("w"), (meta.dev(), meta.ino()));

    let other = remove(parent.as_fd(), name, (meta.dev(), meta.ino() + 1));
    assert!(
        matches!(other, Err(TreeError::NotExpected { .. })),
        "{other:?}"
    );
    fs::rename(&made, dir.path().join("moved")).unwrap();
    let absent = remove(parent.as_fd(), name, expect);
    assert!(
        matches!(absent, Err(TreeError::Absent { .. })),
        "{absent:?}"
    );
    symlink("moved", &made).unwrap();
    let link = remove(parent.as_fd(), name, expect);
    assert!(
        matches!(link, Err(TreeError::NotExpected { .. })),
        "{link:?}"
    );
    assert!(dir.path().join("moved/f").exists());

    let removed = remove(parent.as_fd(), OsStr::new("moved"), expect).unwrap();
    assert_eq!(removed.entries, 2);
    assert!(!dir.path().join("moved").exists());
}

fn make_locked(top: &Path) {
    let mut path = top.to_path_buf();
    let mut made = Vec::new();
    for n in 0..40 {
        path.push(format!("d{n}"));
        fs::create_dir(&path).unwrap();
        fs::write(path.join("f"), "x").unwrap();
        made.push(path.clone());
    }
    for path in made.iter().rev() {
        let mode = [0o000, 0o400, 0o100, 0o200][path.components().count() % 4];
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
}

/// Deeper than the number of directories held open, so that the way up also uses `..`.
#[test]
fn a_plain_user_removes_and_takes_over_what_has_no_permissions() {
    let id = format!("--reuid={PLAIN_ID}");
    let group = format!("--regid={PLAIN_ID}");
    let root = rustix::process::geteuid().is_root();
    if root
        && !inside(
            "a_plain_user_removes_and_takes_over_what_has_no_permissions",
            &["setpriv", &id, &group, "--clear-groups"],
        )
    {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    make_locked(dir.path());
    let measured = measure(open(dir.path()).as_fd(), u64::MAX);
    assert!(
        measured.unreadable,
        "the control: without permissions it cannot be read"
    );
    let (uid, gid) = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    let taken = take_over(open(dir.path()).as_fd(), uid, gid).unwrap();
    assert_eq!(taken.entries, 81);
    let measured = measure(open(dir.path()).as_fd(), u64::MAX);
    assert_eq!((measured.files, measured.unreadable), (80, false));
    assert_eq!(remove_below(dir.path()).unwrap().entries, 80);

    make_locked(dir.path());
    assert!(
        fs::remove_dir_all(dir.path().join("d0")).is_err(),
        "the control"
    );
    assert_eq!(remove_below(dir.path()).unwrap().entries, 80);
    assert!(is_empty(dir.path()));
}

#[test]
fn taking_over_drops_set_id_bits_and_leaves_other_peoples_files() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let other = tempfile::NamedTempFile::new().unwrap();
    let own = |path: &Path, id| std::os::unix::fs::lchown(path, Some(id), Some(id)).unwrap();
    let sub = dir.path().join("sub");
    fs::create_dir(&sub).unwrap();
    for name in ["suid", "sgid"] {
        fs::write(sub.join(name), "x").unwrap();
    }
    symlink(other.path(), sub.join("link")).unwrap();
    for path in [
        dir.path(),
        &sub,
        &sub.join("suid"),
        &sub.join("sgid"),
        &sub.join("link"),
    ] {
        own(path, PLAIN_ID);
    }
    let mode =
        |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    mode(&sub.join("suid"), 0o4755);
    mode(&sub.join("sgid"), 0o2644);
    mode(&sub, 0o2050);
    own(other.path(), PLAIN_ID + 1);
    fs::hard_link(other.path(), sub.join("planted")).unwrap();

    let error = take_over(open(dir.path()).as_fd(), 0, 0).unwrap_err();
    let text = format!("{error:?}");
    assert!(
        text.contains("Foreign(54322)") && text.contains("failed: 1"),
        "{text}"
    );
    let meta = |path: &Path| fs::symlink_metadata(path).unwrap();
    let got = |path: &Path| {
        (
            meta(path).uid(),
            meta(path).gid(),
            meta(path).mode() & 0o7777,
        )
    };
    assert_eq!(got(&sub), (0, 0, 0o750));
    assert_eq!(got(&sub.join("suid")), (0, 0, 0o755));
    assert_eq!(got(&sub.join("sgid")), (0, 0, 0o644));
    assert_eq!(meta(&sub.join("link")).uid(), 0);
    assert_eq!(
        meta(other.path()).uid(),
        PLAIN_ID + 1,
        "neither by link nor by symlink"
    );
}

#[test]
fn a_mount_inside_is_reported_and_not_entered() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let wrapper = ["unshare", "-m", "--propagation", "private"];
    if !inside("a_mount_inside_is_reported_and_not_entered", &wrapper) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let victim = tempfile::tempdir_in(dir.path().parent().unwrap()).unwrap();
    fs::write(victim.path().join("keep"), "kept").unwrap();
    let on = dir.path().join("sub/mnt");
    fs::create_dir_all(&on).unwrap();
    fs::write(dir.path().join("sub/file"), "x").unwrap();
    // The same file system, so device numbers do not differ.
    rustix::mount::mount_bind(victim.path(), &on).unwrap();

    let measured = measure(open(dir.path()).as_fd(), u64::MAX);
    assert!(measured.unreadable && measured.files == 2, "{measured:?}");
    for error in [
        remove_below(dir.path()).unwrap_err(),
        take_over(open(dir.path()).as_fd(), 0, 0).unwrap_err(),
    ] {
        let text = format!("{error:?}");
        assert!(
            text.contains("sub/mnt") && text.contains("MountPoint"),
            "{text}"
        );
    }
    assert_eq!(fs::read(victim.path().join("keep")).unwrap(), b"kept");
    assert!(!dir.path().join("sub/file").exists(), "the rest is removed");
    rustix::mount::unmount(&on, rustix::mount::UnmountFlags::empty()).unwrap();
    assert_eq!(remove_below(dir.path()).unwrap().entries, 2);
}

/// The user named the directory with all that is mounted below it. The way back out of the mount is longer than the
/// number of directories held open, so that it uses `..`.
#[test]
fn an_input_is_copied_with_what_is_mounted_below_it() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let wrapper = ["unshare", "-m", "--propagation", "private"];
    if !inside("an_input_is_copied_with_what_is_mounted_below_it", &wrapper) {
        return;
    }
    let [source, mounted, workspace] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let deep = vec!["d"; 40].join("/");
    fs::create_dir_all(mounted.path().join(&deep)).unwrap();
    fs::write(mounted.path().join(&deep).join("bottom"), "x").unwrap();
    for name in ["a/b/on", "a/b/z"] {
        fs::create_dir_all(source.path().join(name)).unwrap();
    }
    let on = source.path().join("a/b/on");
    rustix::mount::mount_bind(mounted.path(), &on).unwrap();
    let mut budget = crate::workspace::copy_in::CopyBudget {
        bytes: 1 << 20,
        files: 1000,
    };
    let copied = crate::workspace::copy_in::copy_in(
        source.path(),
        open(workspace.path()).as_fd(),
        Path::new("c"),
        None,
        &mut budget,
    );
    rustix::mount::unmount(&on, rustix::mount::UnmountFlags::empty()).unwrap();
    assert_eq!(copied.unwrap().files, 5 + 40 + 1);
    let copy = workspace.path().join("c/a/b");
    assert!(copy.join("on").join(&deep).join("bottom").is_file() && copy.join("z").is_dir());
}

#[test]
fn an_immutable_file_is_named_and_the_rest_removed() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("sub")).unwrap();
    let fixed = dir.path().join("sub/fixed");
    let file = File::create(&fixed).unwrap();
    fs::write(dir.path().join("sub/other"), "x").unwrap();
    // Only a privileged user can set the attribute, and only on some file systems.
    if rustix::fs::ioctl_setflags(&file, rustix::fs::IFlags::IMMUTABLE).is_err() {
        return;
    }
    let error = remove_below(dir.path()).unwrap_err();
    rustix::fs::ioctl_setflags(&file, rustix::fs::IFlags::empty()).unwrap();
    let text = format!("{error:?}");
    assert!(
        text.contains("sub/fixed") && text.contains("Immutable"),
        "{text}"
    );
    assert!(text.contains("done: 1, failed: 1"), "{text}");
    assert_eq!(remove_below(dir.path()).unwrap().entries, 2);
}

/// Calls `act` repeatedly in a second thread while `work` runs. `act` has run once before `work` starts.
fn while_racing<T>(act: impl Fn() + Sync, work: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    let begun = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            act();
            begun.wait();
            while !stop.load(Ordering::Relaxed) {
                act();
            }
        });
        begun.wait();
        let result = work();
        stop.store(true, Ordering::Relaxed);
        result
    })
}

/// The swap is atomic (RENAME_EXCHANGE), so each name is always a directory or a symlink: a directory when it is
/// listed and often a symlink when it is entered.
#[test]
fn swapping_in_symlinks_leads_nowhere() {
    let dir = tempfile::tempdir_in(FAST).unwrap();
    let stash = tempfile::tempdir_in(dir.path().parent().unwrap()).unwrap();
    let victim = tempfile::tempdir_in(FAST).unwrap();
    for n in 0..50 {
        fs::write(victim.path().join(n.to_string()), "kept").unwrap();
    }
    let (top, aside) = (open(dir.path()), open(stash.path()));
    let swap = || {
        for n in 0..100 {
            let (name, flags) = (n.to_string(), rustix::fs::RenameFlags::EXCHANGE);
            let _ = rustix::fs::renameat_with(&top, &name, &aside, &name, flags);
        }
    };
    for _ in 0..30 {
        for n in 0..100 {
            fs::create_dir_all(dir.path().join(format!("{n}/x/y"))).unwrap();
            symlink(victim.path(), stash.path().join(n.to_string())).unwrap();
        }
        // An entry that is swapped at the wrong moment in every round may be reported as remaining.
        let _ = while_racing(swap, || remove_below(dir.path()));
        for place in [&dir, &stash] {
            remove_below(place.path()).unwrap();
            assert!(is_empty(place.path()));
        }
    }
    assert_eq!(fs::read_dir(victim.path()).unwrap().count(), 50);
}

/// The directory in which the walk is deep down moves out of the tree. Its `..` is then the victim's directory, which
/// holds a directory with a name that the walk has yet to enter.
#[test]
fn moving_a_directory_out_does_not_take_the_walk_along() {
    let dir = tempfile::tempdir_in(FAST).unwrap();
    let victim = tempfile::tempdir_in(dir.path().parent().unwrap()).unwrap();
    let (top, out) = (open(dir.path()), open(victim.path()));
    for _ in 0..60 {
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        for place in [victim.path().to_path_buf(), dir.path().join("a")] {
            fs::create_dir_all(place.join("keep")).unwrap();
            fs::write(place.join("keep/file"), "kept").unwrap();
        }
        make_chain(&dir.path().join("a/b"), 300, "d");
        let there_and_back = || {
            let _ = rustix::fs::renameat(&top, "a/b", &out, "b");
            let _ = rustix::fs::renameat(&out, "b", &top, "a/b");
        };
        let _ = while_racing(there_and_back, || remove_below(dir.path()));
        assert_eq!(fs::read(victim.path().join("keep/file")).unwrap(), b"kept");
        let _ = fs::remove_dir_all(victim.path().join("b"));
        remove_below(dir.path()).unwrap();
    }
}

#[test]
fn an_unexpected_parent_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("a/b")).unwrap();
    fs::create_dir(dir.path().join("c")).unwrap();
    let (a, b) = (open(&dir.path().join("a")), open(&dir.path().join("a/b")));
    let id = walk::DirectoryKey::of(a.as_fd()).unwrap();
    assert!(walk::open_parent(b.as_fd(), id).is_ok(), "the control");
    fs::rename(dir.path().join("a/b"), dir.path().join("c/b")).unwrap();
    assert!(matches!(
        walk::open_parent(b.as_fd(), id),
        Err(EntryFault::Moved)
    ));
}

#[test]
fn a_racing_creator_does_not_hold_the_removal_for_ever() {
    for place in ["/dev/shm", "/tmp"] {
        let dir = tempfile::tempdir_in(place).unwrap();
        let create = || {
            for n in 0..100 {
                let _ = File::create(dir.path().join(n.to_string()));
            }
        };
        let result = while_racing(create, || {
            remove_at_most(open(dir.path()).as_fd(), 20_000, &mut || {
                Ok(TopState::Present)
            })
        });
        // The removal either finished between two calls of the creator, or gave up. In both cases it returned.
        assert!(
            matches!(result, Ok(_) | Err(TreeError::Busy { .. })),
            "{result:?}"
        );
        remove_below(dir.path()).unwrap();
    }
}
