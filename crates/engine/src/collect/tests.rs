//! Tests on the real file system, as root and as a plain user.

#![allow(clippy::unwrap_used)]

mod model;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode, OFlags, RenameFlags};

use super::*;
use store::types::escaping::unescape_text;

/// Ids that no account has.
const PLAIN_ID: u32 = 54_321;
const OTHER_UID: u32 = 54_399;
const FAST: &str = "/dev/shm";
const SIGNATURE: &[u8] = b"Signature: 8a477f597d28d172789f06886806bc55";
const AMPLE_BOUNDS: CollectionBounds = CollectionBounds {
    total_bytes: u64::MAX,
    file_bytes: u64::MAX,
    outputs: 10_000,
    depth: 64,
};

fn current_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn open(path: &Path) -> OwnedFd {
    File::open(path).unwrap().into()
}

fn rules(bounds: CollectionBounds) -> CollectionRules<'static> {
    CollectionRules {
        bounds,
        owner_uid: current_uid(),
        wanted: None,
        expected: None,
        staged_inputs: &[],
        modes: ModePolicy::Override,
    }
}

fn collect_below(path: &Path, bounds: CollectionBounds) -> CollectedOutputs {
    collect(open(path).as_fd(), &rules(bounds), &mut |_| {}).unwrap()
}

fn names(collected: &CollectedOutputs) -> Vec<String> {
    collected.outputs.iter().map(|o| o.path.text()).collect()
}

fn remarks(collected: &CollectedOutputs) -> BTreeMap<String, Remark> {
    let listed = collected.remarks.iter();
    listed.map(|r| (r.path.clone(), r.remark)).collect()
}

/// Runs one test of this file again in another process, as another user, in namespaces or under limits of its own.
/// Returns whether this is that process, in which the test does its work.
fn inside(test: &str, wrapper: &[&str]) -> bool {
    const VARIABLE: &str = "FUMEHOOD_TEST_INSIDE";
    if std::env::var_os(VARIABLE).is_some() {
        return true;
    }
    let module = module_path!().split_once("::").unwrap().1;
    let output = Command::new(wrapper[0])
        .args(&wrapper[1..])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("{module}::{test}"), "--nocapture"])
        .env(VARIABLE, "1")
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

/// Whether this process belongs to a plain user and the test does its work here. Root runs the test again as a plain
/// user.
fn as_plain_user(test: &str) -> bool {
    let uid = format!("--reuid={PLAIN_ID}");
    let gid = format!("--regid={PLAIN_ID}");
    current_uid() != 0 || inside(test, &["setpriv", &uid, &gid, "--clear-groups"])
}

/// Compares the collector with the model on one generated tree.
fn check_case(case: &model::TreeCase) -> Result<(), TestCaseError> {
    let root = current_uid() == 0;
    let dir = tempfile::tempdir_in(FAST).unwrap();
    let (top, outside) = (dir.path().join("top"), dir.path().join("outside"));
    fs::create_dir(&top).unwrap();
    fs::create_dir(&outside).unwrap();
    let made = model::make(case, &top, &outside, root);
    let staged_input = |(path, (bytes, hash)): (Vec<u8>, (u64, blake3::Hash))| StagedInput {
        path: OutputPath::new(path).unwrap(),
        bytes,
        blake3: ContentHash::from_bytes(*hash.as_bytes()),
    };
    let staged_inputs: Vec<StagedInput> = made.inputs(case).into_iter().map(staged_input).collect();
    let wanted = case.wanted.map(|g| Globs::new(&[g.to_owned()]).unwrap());
    let expected_globs = case.expected.map(|g| Globs::new(&[g.to_owned()]).unwrap());
    let rules = CollectionRules {
        bounds: case.bounds,
        owner_uid: current_uid(),
        wanted: wanted.as_ref(),
        expected: expected_globs.as_ref(),
        staged_inputs: &staged_inputs,
        modes: ModePolicy::Override,
    };
    let collected = collect(open(&top).as_fd(), &rules, &mut |_| {}).unwrap();
    let expected = made.expected(case, root);

    // Equal inodes of the collector must be equal files of the model, and the other way round.
    let ours = collected.outputs.iter().map(|o| o.inode);
    let pairs: BTreeSet<_> = ours.zip(expected.outputs.iter().map(|o| o.3)).collect();
    let files: BTreeSet<usize> = expected.outputs.iter().map(|o| o.3).collect();
    prop_assert_eq!(pairs.len(), files.len());
    let got = model::ExpectedCollection {
        outputs: std::iter::zip(&collected.outputs, &expected.outputs)
            .map(|(o, e)| {
                (
                    o.path.as_bytes().to_vec(),
                    o.bytes,
                    o.blake3.to_string(),
                    e.3,
                )
            })
            .collect(),
        bytes: collected.bytes,
        remarks: collected
            .remarks
            .iter()
            .map(|r| (unescape_text(&r.path).unwrap(), r.remark))
            .collect(),
        inputs_unchanged: collected.inputs_unchanged,
        cached: collected.cached,
        not_asked: collected.not_asked,
    };
    prop_assert_eq!(
        collected.outputs.len(),
        expected.outputs.len(),
        "{:?}\n{:?}",
        collected,
        expected
    );
    prop_assert_eq!(
        got.remarks.len() as u64,
        collected.remark_counts.values().sum::<u64>()
    );
    prop_assert_eq!(got, expected);
    // A repetition gives the same result, except that modes were already changed.
    let mut again = collect(open(&top).as_fd(), &rules, &mut |_| {}).unwrap();
    let mut first = collected;
    for c in [&mut again, &mut first] {
        c.remarks.retain(|r| r.remark != Remark::ModeOverridden);
        c.remark_counts.remove(&Remark::ModeOverridden);
        c.remarks
            .sort_by(|a, b| (&a.path, a.remark).cmp(&(&b.path, b.remark)));
    }
    prop_assert_eq!(again, first);
    crate::workspace::tree::remove_contents(open(dir.path()).as_fd()).unwrap();
    Ok(())
}

fn check_many_cases() {
    let config = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(300)
    };
    proptest!(config, |(case in model::case())| {
        check_case(&case)?;
    });
}

#[test]
fn hostile_trees_are_collected_as_the_model_says() {
    check_many_cases();
}

#[test]
fn hostile_trees_are_collected_as_the_model_says_by_a_plain_user() {
    if as_plain_user("hostile_trees_are_collected_as_the_model_says_by_a_plain_user") {
        check_many_cases();
    }
}

#[test]
fn an_output_is_described() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("plots")).unwrap();
    fs::write(dir.path().join("plots/a.png"), b"\x89PNG\r\n\x1a\n....").unwrap();
    fs::write(dir.path().join("result.json"), b"{}").unwrap();
    let file = File::options()
        .write(true)
        .open(dir.path().join("result.json"))
        .unwrap();
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_millis(1_234_567);
    file.set_modified(time).unwrap();
    let mut reports = Vec::new();
    let collected = collect(open(dir.path()).as_fd(), &rules(AMPLE_BOUNDS), &mut |p| {
        reports.push(p)
    })
    .unwrap();
    assert_eq!(names(&collected), ["plots/a.png", "result.json"]);
    assert_eq!(collected.bytes, 14);
    assert!(!collected.loses_content() && collected.remarks.is_empty());
    let [png, json] = &collected.outputs[..] else {
        panic!("{collected:?}");
    };
    assert_eq!(png.media_type, "image/png");
    assert_eq!(
        (json.media_type.as_str(), json.modified_ms),
        ("application/json", 1_234_567)
    );
    assert_eq!(json.blake3, ContentHash::of(b"{}"));
    assert_eq!(
        json.inode,
        fs::metadata(dir.path().join("result.json")).unwrap().ino()
    );
    assert!(
        reports.contains(&CollectProgress::Walked { entries: 3 }),
        "{reports:?}"
    );
    assert_eq!(
        reports.last(),
        Some(&CollectProgress::Hashed { bytes: 14, of: 14 })
    );
}

#[test]
fn unchanged_inputs_are_subtracted() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("lib/__pycache__")).unwrap();
    for name in ["a.py", "b.csv", "c.csv", "d.csv", "lib/__pycache__/x.pyc"] {
        fs::write(dir.path().join(name), format!("content of {name}")).unwrap();
    }
    let staged_inputs = list_staged_inputs(open(dir.path()).as_fd(), current_uid()).unwrap();
    assert_eq!(staged_inputs.len(), 5);
    assert_eq!(staged_inputs[0].blake3, ContentHash::of(b"content of a.py"));
    fs::write(dir.path().join("b.csv"), "CONTENT of b.csv").unwrap();
    fs::write(dir.path().join("c.csv"), "longer than it was before").unwrap();
    fs::rename(dir.path().join("d.csv"), dir.path().join("e.csv")).unwrap();
    let rules = CollectionRules {
        staged_inputs: &staged_inputs,
        ..rules(AMPLE_BOUNDS)
    };
    let collected = collect(open(dir.path()).as_fd(), &rules, &mut |_| {}).unwrap();
    assert_eq!(names(&collected), ["b.csv", "c.csv", "e.csv"]);
    assert_eq!((collected.inputs_unchanged, collected.cached), (1, 1));
    assert!(collected.remarks.is_empty());
}

#[test]
fn holes_are_hashed_as_zeros_without_being_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = File::create(dir.path().join("s")).unwrap();
    let mut content = vec![0; 3 << 20];
    for at in [0, 70_000, 1 << 20, (2 << 20) + 5] {
        content[at..at + 4].copy_from_slice(b"data");
        file.write_all_at(b"data", at as u64).unwrap();
    }
    file.set_len(content.len() as u64).unwrap();
    File::create(dir.path().join("hole"))
        .unwrap()
        .set_len(1 << 28)
        .unwrap();
    let collected = collect_below(dir.path(), AMPLE_BOUNDS);
    assert_eq!(collected.bytes, (1 << 28) + content.len() as u64);
    assert_eq!(collected.outputs[1].blake3, ContentHash::of(&content));
    let mut zeros = blake3::Hasher::new();
    for _ in 0..256 {
        zeros.update(&content[content.len() - (1 << 19)..]);
        zeros.update(&content[content.len() - (1 << 19)..]);
    }
    let zeros = ContentHash::from_bytes(*zeros.finalize().as_bytes());
    assert_eq!(collected.outputs[0].blake3, zeros);
}

#[test]
fn a_sparse_file_is_refused_by_its_length_before_it_is_read() {
    let dir = tempfile::tempdir_in(FAST).unwrap();
    for n in 0..20 {
        File::create(dir.path().join(n.to_string()))
            .unwrap()
            .set_len(1 << 50)
            .unwrap();
    }
    let bounds = CollectionBounds {
        file_bytes: 1 << 40,
        ..AMPLE_BOUNDS
    };
    let collected = collect_below(dir.path(), bounds);
    assert_eq!(collected.remark_counts[&Remark::FileTooLarge], 20);
    let bounds = CollectionBounds {
        total_bytes: 1 << 40,
        ..AMPLE_BOUNDS
    };
    let collected = collect_below(dir.path(), bounds);
    assert_eq!(collected.remark_counts[&Remark::TotalTooLarge], 20);
    assert_eq!(collected.bytes, 0);
}

#[test]
fn the_longest_path_is_taken_and_a_longer_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let mut at = open(dir.path());
    let long = "d".repeat(255);
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    for _ in 0..7 {
        rustix::fs::mkdirat(&at, &long, Mode::RWXU).unwrap();
        at = rustix::fs::openat(&at, &long, flags, Mode::empty()).unwrap();
    }
    let make = |dir: &OwnedFd, name: &str| {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(dir, name, flags, Mode::RUSR).unwrap();
    };
    make(&at, &"f".repeat(255));
    make(&at, &"e".repeat(254));
    rustix::fs::mkdirat(&at, &long, Mode::RWXU).unwrap();
    at = rustix::fs::openat(&at, &long, flags, Mode::empty()).unwrap();
    make(&at, "f");
    rustix::fs::mkdirat(&at, "sub", Mode::RWXU).unwrap();
    let collected = collect_below(dir.path(), AMPLE_BOUNDS);
    let lengths: Vec<usize> = collected
        .outputs
        .iter()
        .map(|o| o.path.as_bytes().len())
        .collect();
    assert_eq!(lengths, [PATH_BYTES_MAX - 1, PATH_BYTES_MAX]);
    assert_eq!(collected.remark_counts[&Remark::NameTooLong], 2);
    assert!(collected.remarks.iter().all(|r| r.path.len() <= 4096));
    crate::workspace::tree::remove_contents(open(dir.path()).as_fd()).unwrap();
}

#[test]
fn hidden_places_and_views_are_not_outputs_but_a_data_directory_of_its_own_is() {
    let dir = tempfile::tempdir().unwrap();
    for name in [
        ".fumehood/tmp/home",
        "docs",
        "data/sub",
        "x/.fumehood",
        "x/data",
    ] {
        fs::create_dir_all(dir.path().join(name)).unwrap();
    }
    for name in [".fumehood/tmp/f", "data/sub/f", "x/.fumehood/f", "x/data/f"] {
        fs::write(dir.path().join(name), "f").unwrap();
    }
    let collected = collect_below(dir.path(), AMPLE_BOUNDS);
    assert_eq!(
        names(&collected),
        ["data/sub/f", "x/.fumehood/f", "x/data/f"]
    );
    assert!(collected.remarks.is_empty(), "{collected:?}");
}

#[test]
fn a_name_in_the_hidden_place_is_no_name_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir_in(dir.path().parent().unwrap()).unwrap();
    fs::create_dir_all(dir.path().join(".fumehood/tmp")).unwrap();
    for name in ["a", "b"] {
        fs::write(dir.path().join(name), name).unwrap();
        fs::hard_link(
            dir.path().join(name),
            dir.path().join(".fumehood/tmp").join(name),
        )
        .unwrap();
    }
    fs::hard_link(dir.path().join("b"), outside.path().join("b")).unwrap();
    let collected = collect_below(dir.path(), AMPLE_BOUNDS);
    assert_eq!(names(&collected), ["a"]);
    assert_eq!(remarks(&collected)["b"], Remark::LinkedElsewhere);
}

#[test]
fn mounts_are_not_entered() {
    if current_uid() != 0 {
        return;
    }
    let wrapper = ["unshare", "-m", "--propagation", "private"];
    if !inside("mounts_are_not_entered", &wrapper) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir_in(dir.path().parent().unwrap()).unwrap();
    fs::write(other.path().join("f"), "not ours to take").unwrap();
    for name in ["data", "docs", "mnt", "sub/data"] {
        fs::create_dir_all(dir.path().join(name)).unwrap();
        // The same file system, so device numbers do not differ.
        rustix::mount::mount_bind(other.path(), dir.path().join(name)).unwrap();
    }
    fs::write(dir.path().join("file"), "covered").unwrap();
    rustix::mount::mount_bind(other.path().join("f"), dir.path().join("file")).unwrap();
    fs::write(dir.path().join("mine"), "mine").unwrap();
    let collected = collect_below(dir.path(), AMPLE_BOUNDS);
    assert_eq!(names(&collected), ["mine"]);
    let expected = ["file", "mnt", "sub/data"].map(|n| (n.to_owned(), Remark::MountPoint));
    assert_eq!(remarks(&collected), BTreeMap::from(expected));
    for name in ["data", "docs", "mnt", "sub/data", "file"] {
        let path = dir.path().join(name);
        rustix::mount::unmount(&path, rustix::mount::UnmountFlags::empty()).unwrap();
    }
}

#[test]
fn only_the_first_thousand_are_listed_and_all_are_counted() {
    let dir = tempfile::tempdir_in(FAST).unwrap();
    for n in 0..1500 {
        symlink("/etc/passwd", dir.path().join(format!("link{n}"))).unwrap();
        File::create(dir.path().join(format!("file{n:04}"))).unwrap();
    }
    let bounds = CollectionBounds {
        outputs: 7,
        ..AMPLE_BOUNDS
    };
    let collected = collect_below(dir.path(), bounds);
    let kept: Vec<String> = (0..7).map(|n| format!("file{n:04}")).collect();
    assert_eq!(names(&collected), kept);
    assert_eq!(collected.remarks.len(), 1000);
    let counts = [(Remark::Symlink, 1500), (Remark::TooMany, 1493)];
    assert_eq!(collected.remark_counts, BTreeMap::from(counts));
    assert_eq!(collected.refused_count(), 2993);
}

/// The program may remove the permissions of its own working directory.
#[test]
fn a_top_without_permissions_is_read_all_the_same() {
    if !as_plain_user("a_top_without_permissions_is_read_all_the_same") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), "f").unwrap();
    let held = open(dir.path());
    for mode in [0o000, 0o400, 0o100, 0o300] {
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        assert!(
            fs::read_dir(dir.path())
                .and_then(|_| fs::read(dir.path().join("f")))
                .is_err(),
            "the control"
        );
        let collected = collect(held.as_fd(), &rules(AMPLE_BOUNDS), &mut |_| {}).unwrap();
        assert_eq!(names(&collected), ["f"]);
        assert_eq!(remarks(&collected)["."], Remark::ModeOverridden);
    }
}

#[test]
fn a_top_that_is_no_directory_is_an_error() {
    let file = tempfile::tempfile().unwrap();
    let error = collect(file.as_fd(), &rules(AMPLE_BOUNDS), &mut |_| {}).unwrap_err();
    assert!(matches!(error, CollectError::Top { .. }), "{error:?}");
}

/// With few descriptors left the result is either right or an error. No file gets a remark because of it.
#[test]
fn lack_of_descriptors_is_an_error_of_ours() {
    let test = "lack_of_descriptors_is_an_error_of_ours";
    if !inside(test, &["prlimit", "--nofile=64"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("a/b/c/d/e")).unwrap();
    for name in ["a/f", "a/b/f", "a/b/c/d/e/f", "g"] {
        fs::write(dir.path().join(name), "x").unwrap();
    }
    fs::hard_link(dir.path().join("g"), dir.path().join("h")).unwrap();
    let held = open(dir.path());
    let whole = collect(held.as_fd(), &rules(AMPLE_BOUNDS), &mut |_| {}).unwrap();
    assert_eq!(whole.outputs.len(), 5);
    let mut hogs: Vec<OwnedFd> = Vec::new();
    while let Ok(hog) = held.try_clone() {
        hogs.push(hog);
    }
    let (mut out_of_resources, mut fine) = (0, 0);
    for _ in 0..20 {
        match collect(held.as_fd(), &rules(AMPLE_BOUNDS), &mut |_| {}) {
            Ok(collected) => {
                assert_eq!(collected, whole);
                fine += 1;
            }
            Err(CollectError::OutOfResources { source, .. }) => {
                assert_eq!(source, Errno::MFILE);
                out_of_resources += 1;
            }
            Err(other) => panic!("{other:?}"),
        }
        hogs.pop();
    }
    assert!(
        out_of_resources >= 3 && fine >= 3,
        "{out_of_resources} {fine}"
    );
}

/// Memory depends on what is kept, not on what is found.
#[test]
fn many_files_cost_little_memory() {
    if !inside("many_files_cost_little_memory", &["env"]) {
        return;
    }
    let dir = tempfile::tempdir_in(FAST).unwrap();
    for n in 0..200_000u32 {
        let sub = dir.path().join(format!("{:03}", n % 500));
        if n < 500 {
            fs::create_dir(&sub).unwrap();
        }
        File::create(sub.join(format!("a-name-of-some-length-{n:09}"))).unwrap();
    }
    let peak_kib = || -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let before = peak_kib();
    let bounds = CollectionBounds {
        outputs: 1000,
        ..AMPLE_BOUNDS
    };
    let collected = collect_below(dir.path(), bounds);
    let more = peak_kib() - before;
    assert_eq!(collected.remark_counts[&Remark::TooMany], 199_000);
    assert!(
        collected
            .outputs
            .iter()
            .all(|o| o.path.as_bytes() < b"003".as_slice())
    );
    assert!(more < 16 * 1024, "{more} KiB");
}

/// Calls `act` repeatedly in a second thread while `work` runs. `act` has run once before `work` starts, and stops
/// when `work` ends or panics.
fn while_racing<T>(act: impl Fn() + Sync, work: impl FnOnce() -> T) -> T {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
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
        let _stop = Stop(&stop);
        work()
    })
}

/// As if processes were still alive: every name is swapped with a symlink to a secret, a FIFO, a socket or another
/// file, and directories with symlinks to a directory that holds secrets of the same names. All swaps are atomic, so
/// each name is a good file when it is listed and often something else when it is opened.
#[test]
fn swapping_brings_in_no_secret_and_never_blocks() {
    let dir = tempfile::tempdir_in(FAST).unwrap();
    let secrets = tempfile::tempdir_in(FAST).unwrap();
    let hidden = dir.path().join(".fumehood");
    fs::create_dir(&hidden).unwrap();
    let good = [b"first".to_vec(), b"other".to_vec()];
    let secret = b"s3cr3t";
    for n in 0..20 {
        let name = n.to_string();
        let (here, aside) = (dir.path().join(&name), hidden.join(&name));
        fs::write(&here, &good[0]).unwrap();
        match n % 4 {
            0 => symlink(secrets.path().join("f"), &aside).unwrap(),
            1 => rustix::fs::mknodat(CWD, &aside, FileType::Fifo, Mode::RWXU, 0).unwrap(),
            2 => rustix::fs::mknodat(CWD, &aside, FileType::Socket, Mode::RWXU, 0).unwrap(),
            _ => fs::write(&aside, &good[1]).unwrap(),
        }
        let sub = format!("d{n}");
        fs::create_dir_all(dir.path().join(&sub).join("e")).unwrap();
        fs::write(dir.path().join(&sub).join("e/f"), &good[0]).unwrap();
        fs::write(dir.path().join(&sub).join("f"), &good[1]).unwrap();
        symlink(secrets.path(), hidden.join(&sub)).unwrap();
    }
    fs::create_dir(secrets.path().join("e")).unwrap();
    fs::write(secrets.path().join("f"), secret).unwrap();
    fs::write(secrets.path().join("e/f"), secret).unwrap();

    let (top, aside) = (open(dir.path()), open(&hidden));
    let swap = || {
        for n in 0..40 {
            let name = match n % 2 {
                0 => (n / 2).to_string(),
                _ => format!("d{}", n / 2),
            };
            let _ = rustix::fs::renameat_with(&top, &name, &aside, &name, RenameFlags::EXCHANGE);
        }
    };
    let files = collect_below(&hidden, AMPLE_BOUNDS).outputs;
    let mut allowed: BTreeSet<_> = files.iter().map(|o| (o.inode, o.blake3)).collect();
    let files = collect_below(dir.path(), AMPLE_BOUNDS).outputs;
    allowed.extend(files.iter().map(|o| (o.inode, o.blake3)));
    assert_eq!(allowed.len(), 65, "each file holds what it was given");
    let mut seen: BTreeMap<Remark, u64> = BTreeMap::new();
    let mut taken = 0;
    while_racing(swap, || {
        for _ in 0..400 {
            let collected = collect(top.as_fd(), &rules(AMPLE_BOUNDS), &mut |_| {}).unwrap();
            taken += collected.outputs.len();
            for output in &collected.outputs {
                assert!(
                    allowed.contains(&(output.inode, output.blake3)),
                    "{output:?}"
                );
            }
            for (remark, count) in collected.remark_counts {
                *seen.entry(remark).or_default() += count;
            }
        }
    });
    // The race took place: swaps were found both when listing and later.
    assert!(
        taken > 0 && seen.contains_key(&Remark::Symlink),
        "{taken} {seen:?}"
    );
    assert!(seen.contains_key(&Remark::Changed), "{seen:?}");
    let known = [
        Remark::Symlink,
        Remark::Fifo,
        Remark::Socket,
        Remark::Changed,
    ];
    assert!(seen.keys().all(|r| known.contains(r)), "{seen:?}");
}

/// The same for content: one file grows and shrinks, one is overwritten and keeps its length.
#[test]
fn a_file_that_changes_while_it_is_hashed_gets_a_remark() {
    let dir = tempfile::tempdir_in(FAST).unwrap();
    let grown = File::create(dir.path().join("grown")).unwrap();
    let written = File::create(dir.path().join("written")).unwrap();
    fs::write(dir.path().join("good"), "good").unwrap();
    let write = || {
        grown.set_len(0).unwrap();
        grown.write_all_at(&[7; 400_000], 0).unwrap();
        written.write_all_at(&[7; 400_000], 0).unwrap();
    };
    let mut changed = BTreeSet::new();
    while_racing(write, || {
        for _ in 0..300 {
            let collected = collect_below(dir.path(), AMPLE_BOUNDS);
            assert!(names(&collected).contains(&"good".to_owned()));
            changed.extend(remarks(&collected));
        }
    });
    let expected = ["grown", "written"].map(|n| (n.to_owned(), Remark::Changed));
    assert_eq!(changed, BTreeSet::from(expected));
}

/// The directory in which the walk is deep down moves out of the workspace and back. Its `..` then leads to a
/// directory where secrets have the names that are still to be entered.
#[test]
fn moving_a_directory_out_does_not_take_the_collection_along() {
    let dir = tempfile::tempdir_in(FAST).unwrap();
    let outside = tempfile::tempdir_in(FAST).unwrap();
    let deep = dir.path().join("a/b").join("d/".repeat(40));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("f"), "good").unwrap();
    for (place, content) in [
        (dir.path().join("a"), "good"),
        (outside.path().into(), "s3cr3t"),
    ] {
        for name in ["c", "keep", "z"] {
            fs::create_dir(place.join(name)).unwrap();
            fs::write(place.join(name).join("f"), content).unwrap();
        }
    }
    let (top, out) = (open(dir.path()), open(outside.path()));
    let there_and_back = || {
        let _ = rustix::fs::renameat(&top, "a/b", &out, "b");
        let _ = rustix::fs::renameat(&out, "b", &top, "a/b");
    };
    while_racing(there_and_back, || {
        for _ in 0..400 {
            let collected = collect(top.as_fd(), &rules(AMPLE_BOUNDS), &mut |_| {}).unwrap();
            for output in &collected.outputs {
                assert_eq!(output.blake3, ContentHash::of(b"good"), "{output:?}");
            }
        }
    });
}

/// With `ModePolicy::Respect` no mode is changed. Root reads the files anyway.
#[test]
fn respected_modes_are_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("shut")).unwrap();
    fs::write(dir.path().join("shut/in"), "in").unwrap();
    fs::write(dir.path().join("closed"), "closed").unwrap();
    fs::write(dir.path().join("open"), "open").unwrap();
    let mode = |name: &str| {
        let meta = fs::symlink_metadata(dir.path().join(name)).unwrap();
        std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 0o7777
    };
    let set = |name: &str, mode: u32| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        fs::set_permissions(dir.path().join(name), mode).unwrap();
    };
    set("closed", 0);
    set("shut", 0);
    let lent = CollectionRules {
        modes: ModePolicy::Respect,
        ..rules(AMPLE_BOUNDS)
    };
    let collected = collect(open(dir.path()).as_fd(), &lent, &mut |_| {}).unwrap();
    assert_eq!((mode("closed"), mode("shut")), (0, 0));
    assert!(names(&collected).contains(&"open".to_owned()));
    if !rustix::process::geteuid().is_root() {
        assert_eq!(names(&collected), ["open"]);
        assert_eq!(remarks(&collected)["closed"], Remark::Unreadable);
        assert_eq!(remarks(&collected)["shut"], Remark::Unreadable);
        collect_below(dir.path(), AMPLE_BOUNDS);
        assert_ne!((mode("closed"), mode("shut")), (0, 0), "the control");
    }
    set("shut", 0o700);
}
