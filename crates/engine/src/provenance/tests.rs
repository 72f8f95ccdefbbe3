//! Real repositories made by git, real and hostile libraries, and what the record says about them.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::Command;

use super::*;

/// Longer than a real run allows, because other tests keep the machine busy.
const TEST_TIME_MAX: Duration = Duration::from_secs(60);

/// A temporary directory, in which git runs without any user's configuration.
struct TestDirectory {
    dir: tempfile::TempDir,
}

impl TestDirectory {
    fn new() -> TestDirectory {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        assert_eq!(real, dir.path(), "the tests need a canonical TMPDIR");
        TestDirectory { dir }
    }

    /// A directory with a repository of three committed files.
    fn repository() -> TestDirectory {
        let place = TestDirectory::new();
        place.git(&["init", "-q", "-b", "main", "."]);
        place.write("a.py", "print(1)\n");
        place.write("src/deep/b.py", "print(2)\n");
        place.write("run.sh", "#!/bin/sh\n");
        place.commit();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn git_in(&self, dir: &Path, args: &[&str]) -> String {
        let output = Command::new("git")
            .args(["-c", "protocol.file.allow=always", "-c", "gc.auto=0"])
            .args(args)
            .current_dir(dir)
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", "/nonexistent")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .envs(["AUTHOR", "COMMITTER"].map(|who| (format!("GIT_{who}_NAME"), "t")))
            .envs(["AUTHOR", "COMMITTER"].map(|who| (format!("GIT_{who}_EMAIL"), "t@t")))
            .output()
            .expect("git is installed (bin/test does it)");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "git {args:?}: {said}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn git(&self, args: &[&str]) -> String {
        self.git_in(self.dir.path(), args)
    }

    fn commit(&self) {
        self.git(&["add", "-A"]);
        self.git(&["commit", "-q", "-m", "x"]);
    }

    fn inspect(&self) -> (GitState, Vec<String>) {
        state(self.dir.path())
    }

    /// Compares Fumehood's result with git's own, and returns Fumehood's.
    fn agrees(&self, dirty: bool) -> GitState {
        agrees(self, self.dir.path(), dirty)
    }
}

fn agrees(place: &TestDirectory, dir: &Path, dirty: bool) -> GitState {
    let (git, notes) = state(dir);
    let head = place.git_in(dir, &["rev-parse", "HEAD"]);
    assert_eq!(git.commit, Some(head), "{notes:?}");
    assert_eq!(git.dirty, Some(dirty), "{notes:?}");
    let status = place.git_in(dir, &["status", "--porcelain", "-uno"]);
    assert_eq!(dirty, !status.is_empty(), "git says {status:?}");
    git
}

fn state(project: &Path) -> (GitState, Vec<String>) {
    let mut notes = Notes::default();
    let git = inspect_git(project, TEST_TIME_MAX, &mut notes);
    (git.unwrap_or_else(|| panic!("{notes:?}")), notes.0)
}

fn notes_without_repository(project: &Path) -> String {
    let mut notes = Notes::default();
    assert_eq!(inspect_git(project, TEST_TIME_MAX, &mut notes), None);
    notes.0.join("\n")
}

fn fifo(path: &Path) {
    let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU);
    rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, 0).unwrap();
}

#[test]
fn a_clean_repository_is_proved_clean() {
    let place = TestDirectory::repository();
    let git = place.agrees(false);
    assert_eq!(git.branch.as_deref(), Some("main"));
    assert_eq!(git.top, place.dir.path().to_str().unwrap());
    // Untracked files do not count.
    place.write("new.txt", "x");
    place.agrees(false);
}

#[test]
fn a_changed_file_is_dirty_and_changing_it_back_is_clean() {
    let place = TestDirectory::repository();
    place.write("src/deep/b.py", "print(3)\n");
    place.agrees(true);
    place.write("src/deep/b.py", "print(2)\n");
    // The times differ now, so the content is compared.
    assert_eq!(place.inspect().0.dirty, Some(false));
    place.agrees(false);
    place.write("a.py", "print(1000)\n");
    place.agrees(true);
}

#[test]
fn same_size_and_time_do_not_hide_a_change() {
    let place = TestDirectory::repository();
    let meta = fs::metadata(place.path("a.py")).unwrap();
    place.write("a.py", "print(7)\n");
    let file = File::options()
        .write(true)
        .open(place.path("a.py"))
        .unwrap();
    file.set_modified(meta.modified().unwrap()).unwrap();
    assert_eq!(place.inspect().0.dirty, Some(true));
}

/// A file that was written after git read it, but in the same clock tick: the index has its times, but other content.
#[test]
fn a_file_as_young_as_the_index_is_compared() {
    let place = TestDirectory::repository();
    place.write("a.py", "print(7)\n");
    let meta = fs::metadata(place.path("a.py")).unwrap();
    let mut index = fs::read(place.path(".git/index")).unwrap();
    // The first entry is that of a.py: two times, the device, the inode.
    let seconds = [
        meta.ctime(),
        meta.ctime_nsec(),
        meta.mtime(),
        meta.mtime_nsec(),
    ];
    let numbers = seconds
        .map(|n| n as u32)
        .into_iter()
        .chain([0, meta.ino() as u32]);
    let bytes: Vec<u8> = numbers.flat_map(u32::to_be_bytes).collect();
    index[12..12 + bytes.len()].copy_from_slice(&bytes);
    fs::write(place.path(".git/index"), index).unwrap();
    let file = File::options()
        .write(true)
        .open(place.path(".git/index"))
        .unwrap();
    let written = meta.modified().unwrap();
    file.set_modified(written).unwrap();
    assert_eq!(place.inspect().0.dirty, Some(true));
    // The control: if the index were younger, both git and Fumehood would trust it.
    file.set_modified(written + Duration::from_secs(1)).unwrap();
    assert_eq!(place.inspect().0.dirty, Some(false));
}

#[test]
fn deleted_replaced_and_made_executable() {
    let place = TestDirectory::repository();
    fs::set_permissions(place.path("run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    place.agrees(true);
    place.commit();
    place.agrees(false);
    fs::remove_file(place.path("a.py")).unwrap();
    place.agrees(true);
    symlink("run.sh", place.path("a.py")).unwrap();
    place.agrees(true);
    place.commit();
    place.agrees(false);
    fs::rename(place.path("src"), place.path("elsewhere")).unwrap();
    symlink("elsewhere", place.path("src")).unwrap();
    place.agrees(true);
    fs::remove_file(place.path("src")).unwrap();
    place.write("src", "a file");
    place.agrees(true);
}

#[test]
fn staged_changes_are_dirty_until_they_are_taken_back() {
    let place = TestDirectory::repository();
    place.write("src/deep/b.py", "print(9)\n");
    place.git(&["add", "-A"]);
    place.agrees(true);
    place.git(&["reset", "-q", "--hard"]);
    place.agrees(false);
    place.write("more/c.py", "x");
    place.git(&["add", "-A"]);
    place.agrees(true);
    place.git(&["rm", "-q", "--cached", "more/c.py"]);
    place.agrees(false);
    place.git(&["rm", "-q", "--cached", "a.py"]);
    place.agrees(true);
    place.git(&["add", "a.py"]);
    place.write("later.py", "x");
    place.agrees(false);
    place.git(&["add", "-N", "later.py"]);
    place.agrees(true);
}

#[test]
fn a_merge_that_is_not_finished_is_dirty() {
    let place = TestDirectory::repository();
    place.git(&["checkout", "-q", "-b", "other"]);
    place.write("a.py", "other\n");
    place.commit();
    place.git(&["checkout", "-q", "main"]);
    place.write("a.py", "main\n");
    place.commit();
    let merge = Command::new("git")
        .args([
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@t",
            "merge",
            "other",
        ])
        .current_dir(place.dir.path())
        .output();
    assert!(!merge.unwrap().status.success());
    place.agrees(true);
}

/// Many commits packed with deltas, so that commits, trees and blobs come from delta chains.
#[test]
fn packed_objects_and_references_are_read() {
    let place = TestDirectory::repository();
    for n in 0..12 {
        let lines = (0..400).map(|line| format!("{} x\n", line * line));
        let lines: String = lines.chain([format!("{n}\n")]).collect();
        place.write("a.py", &lines);
        for file in 0..20 {
            let version = if file == 3 { n } else { 0 };
            place.write(&format!("src/f{file}.py"), &format!("{file} {version}\n"));
        }
        place.commit();
    }
    place.git(&["checkout", "-q", "-b", "side/branch", "HEAD~7"]);
    place.git(&["tag", "-a", "-m", "t", "v1"]);
    place.git(&["gc", "-q", "--aggressive", "--prune=now"]);
    assert!(!place.path(".git/refs/heads/side/branch").exists());
    let git = place.agrees(false);
    assert_eq!(git.branch.as_deref(), Some("side/branch"));
    let every = |what: &str| {
        let check = format!("--batch-check=%({what})");
        place.git(&["cat-file", &check, "--batch-all-objects"])
    };
    let (ids, bases) = (every("objectname"), every("deltabase"));
    let id = place.git(&["rev-parse", "HEAD:a.py"]);
    let at = ids.lines().position(|line| line == id).unwrap();
    let base = bases.lines().nth(at).unwrap();
    assert!(!base.starts_with("00000000"), "a.py is not kept as a delta");
    // Without git's cached trees and with other times, every tree and blob is read from the pack.
    place.git(&["rm", "-rq", "--cached", "."]);
    place.agrees(true);
    place.git(&["add", "-A"]);
    for name in ["a.py", "src/f3.py", "run.sh"] {
        let file = File::options().write(true).open(place.path(name)).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
    }
    let (git, notes) = place.inspect();
    assert_eq!(git.dirty, Some(false), "{notes:?}");
    place.write("src/f3.py", "3 x2\n");
    place.agrees(true);
}

#[test]
fn every_version_of_the_index_is_read() {
    for version in ["2", "3", "4"] {
        let place = TestDirectory::repository();
        place.write("src/deep/besides.py", "x\n");
        place.commit();
        place.git(&["update-index", "--index-version", version]);
        place.agrees(false);
        // An entry with extended flags turns version 2 into version 3.
        place.write("later.py", "x");
        place.git(&["add", "-N", "later.py"]);
        place.agrees(true);
    }
}

#[test]
fn a_repository_that_cannot_be_read_is_not_reported_as_clean() {
    let place = TestDirectory::repository();
    place.git(&["update-index", "--split-index"]);
    let (git, notes) = place.inspect();
    assert_eq!(git.dirty, None);
    assert!(notes[0].contains("index"), "{notes:?}");

    let place = TestDirectory::repository();
    place.git(&["sparse-checkout", "set", "--cone", "--sparse-index", "src"]);
    assert_ne!(place.inspect().0.dirty, Some(true));

    let place = TestDirectory::repository();
    place.git(&["rm", "-q", "--cached", "a.py"]);
    place.git(&["add", "a.py"]);
    fs::remove_dir_all(place.path(".git/objects")).unwrap();
    let (git, notes) = place.inspect();
    assert_eq!((git.dirty, git.commit.is_some()), (None, true), "{notes:?}");
}

#[test]
fn no_repository_takes_longer_than_it_may() {
    let place = TestDirectory::repository();
    place.write("a.py", "print(3)\n");
    let mut notes = Notes::default();
    let git = inspect_git(place.dir.path(), Duration::ZERO, &mut notes).unwrap();
    assert!(git.commit.is_some() && git.dirty.is_none());
    assert!(notes.0[0].contains("time"), "{notes:?}");
    place.agrees(true);
}

#[test]
fn a_sparse_checkout_without_a_sparse_index_is_clean() {
    let place = TestDirectory::repository();
    place.write("other/x.py", "x");
    place.commit();
    place.git(&[
        "sparse-checkout",
        "set",
        "--cone",
        "--no-sparse-index",
        "src",
    ]);
    assert!(!place.path("other/x.py").exists());
    place.agrees(false);
}

#[test]
fn a_filter_is_not_taken_for_a_change_nor_for_none() {
    let place = TestDirectory::repository();
    place.write(".gitattributes", "*.txt text eol=crlf\n");
    place.write("t.txt", "one\r\ntwo\r\n");
    place.commit();
    place.git(&["checkout", "-q", "HEAD", "--", "."]);
    let file = File::options()
        .write(true)
        .open(place.path("t.txt"))
        .unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    let (git, notes) = place.inspect();
    assert_eq!(git.dirty, None);
    assert!(notes[0].contains("filter"), "{notes:?}");
}

#[test]
fn detached_heads_new_branches_and_subdirectories() {
    let place = TestDirectory::repository();
    let below = place.path("src/deep");
    assert_eq!(
        agrees(&place, &below, false).top,
        place.dir.path().to_str().unwrap()
    );
    place.git(&["checkout", "-q", "--detach"]);
    assert_eq!(place.agrees(false).branch, None);

    let new = TestDirectory::new();
    new.git(&["init", "-q", "-b", "m\u{e9}", "."]);
    let (git, notes) = new.inspect();
    assert_eq!((git.commit, git.dirty), (None, None));
    assert_eq!(git.branch.as_deref(), Some("m\u{e9}"));
    assert_eq!(notes.len(), 1);
    assert_eq!(
        notes_without_repository(TestDirectory::new().dir.path()),
        ""
    );
}

#[test]
fn a_repository_of_sha256() {
    let place = TestDirectory::new();
    place.git(&["init", "-q", "--object-format=sha256", "."]);
    place.write("a", "x\n");
    place.commit();
    assert_eq!(place.agrees(false).commit.unwrap().len(), 64);
    place.git(&["gc", "-q"]);
    place.git(&["rm", "-q", "--cached", "a"]);
    place.git(&["add", "a"]);
    place.agrees(false);
    place.write("a", "y\n");
    place.agrees(true);
}

#[test]
fn worktrees_are_read() {
    let place = TestDirectory::repository();
    let other = TestDirectory::new();
    let at = other.path("tree");
    place.git(&[
        "worktree",
        "add",
        "-q",
        "-b",
        "feature",
        at.to_str().unwrap(),
    ]);
    assert_eq!(
        agrees(&place, &at, false).branch.as_deref(),
        Some("feature")
    );
    fs::write(at.join("a.py"), "print(5)\n").unwrap();
    agrees(&place, &at, true);
    place.agrees(false);
    place.git(&["gc", "-q"]);
    agrees(&place, &at, true);
}

#[test]
fn submodules_are_looked_into() {
    let inner = TestDirectory::repository();
    let place = TestDirectory::repository();
    place.git(&[
        "submodule",
        "--quiet",
        "add",
        inner.dir.path().to_str().unwrap(),
        "sub",
    ]);
    place.commit();
    place.agrees(false);
    place.write("sub/a.py", "print(8)\n");
    place.agrees(true);
    place.git_in(&place.path("sub"), &["commit", "-q", "-a", "-m", "x"]);
    place.agrees(true);
    place.commit();
    place.agrees(false);
    place.git(&["submodule", "--quiet", "deinit", "-f", "sub"]);
    place.agrees(false);
}

/// No part of the secret may enter the record, and nothing may block.
#[test]
fn hostile_heads() {
    let secret = TestDirectory::new();
    secret.write("secret", &"5ec4e7".repeat(7)[..40]);
    type Make<'a> = &'a dyn Fn(&TestDirectory);
    let head = |place: &TestDirectory| place.path(".git/HEAD");
    let makes: [(&str, Make<'_>); 9] = [
        ("a symlink", &|p| {
            symlink(secret.path("secret"), head(p)).unwrap()
        }),
        ("a fifo", &|p| fifo(&head(p))),
        ("a directory", &|p| fs::create_dir(head(p)).unwrap()),
        ("endless", &|p| {
            File::create(head(p)).unwrap().set_len(1 << 40).unwrap()
        }),
        ("empty", &|p| p.write(".git/HEAD", "")),
        ("half an id", &|p| p.write(".git/HEAD", "abcdef")),
        ("out of it", &|p| {
            p.write(".git/HEAD", "ref: refs/../../secret\n")
        }),
        ("absolute", &|p| {
            p.write(
                ".git/HEAD",
                &format!("ref: {}\n", secret.path("secret").display()),
            )
        }),
        ("missing", &|_| {}),
    ];
    for (name, make) in makes {
        let place = TestDirectory::repository();
        fs::remove_file(head(&place)).unwrap();
        make(&place);
        let (git, notes) = place.inspect();
        assert_eq!((git.commit, git.dirty), (None, None), "{name}");
        assert!(notes[0].contains("HEAD"), "{name}: {notes:?}");
    }
}

#[test]
fn hostile_references() {
    type Make<'a> = &'a dyn Fn(&TestDirectory);
    let at = |place: &TestDirectory| place.path(".git/refs/heads/main");
    let secret = TestDirectory::new();
    secret.write("secret", &"5ec4e7".repeat(7)[..40]);
    let makes: [(&str, Make<'_>); 7] = [
        ("a loop", &|p| {
            p.write(".git/refs/heads/main", "ref: refs/heads/main\n")
        }),
        ("a symlink", &|p| {
            symlink(secret.path("secret"), at(p)).unwrap()
        }),
        ("behind a symlink", &|p| {
            fs::remove_dir_all(p.path(".git/refs/heads")).unwrap();
            secret.write("main", &"5ec4e7".repeat(7)[..40]);
            symlink(secret.dir.path(), p.path(".git/refs/heads")).unwrap();
        }),
        ("a fifo", &|p| fifo(&at(p))),
        ("a fifo of packed ones", &|p| {
            fifo(&p.path(".git/packed-refs"))
        }),
        ("endless packed ones", &|p| {
            let file = File::create(p.path(".git/packed-refs")).unwrap();
            file.set_len(1 << 40).unwrap();
        }),
        ("very many packed ones", &|p| {
            let line = format!("{} refs/heads/x\n", "a".repeat(40));
            let tail = format!("{} refs/heads/main\n", "b".repeat(40));
            p.write(".git/packed-refs", &(line.repeat(400_000) + &tail));
        }),
    ];
    for (name, make) in makes {
        let place = TestDirectory::repository();
        fs::remove_file(at(&place)).unwrap();
        make(&place);
        let (git, notes) = place.inspect();
        assert_eq!((git.commit, git.dirty), (None, None), "{name}");
        assert_eq!(git.branch.as_deref(), Some("main"), "{name}: {notes:?}");
    }
    // The control: a packed reference within the bounds is found.
    let place = TestDirectory::repository();
    fs::remove_file(at(&place)).unwrap();
    place.write(
        ".git/packed-refs",
        &format!("# x\n{} refs/heads/main\n^{0}\n", "b".repeat(40)),
    );
    assert_eq!(place.inspect().0.commit, Some("b".repeat(40)));
}

#[test]
fn hostile_git_directories() {
    let victim = TestDirectory::repository();
    let place = TestDirectory::new();
    symlink(victim.path(".git"), place.path(".git")).unwrap();
    assert!(notes_without_repository(place.dir.path()).contains(".git"));

    let place = TestDirectory::new();
    fifo(&place.path(".git"));
    assert!(notes_without_repository(place.dir.path()).contains(".git"));

    for text in [
        "",
        "gitdir:",
        "gitdir: /nonexistent",
        "gitdir: /etc/passwd",
        "nonsense",
    ] {
        let place = TestDirectory::new();
        place.write(".git", text);
        assert!(
            notes_without_repository(place.dir.path()).contains(".git"),
            "{text:?}"
        );
    }

    // Another user's repository, to which the project points, or which lies above it.
    if rustix::process::geteuid().is_root() {
        let chown = |path: &Path| std::os::unix::fs::chown(path, Some(54_321), None).unwrap();
        let place = TestDirectory::new();
        place.write(
            ".git",
            &format!("gitdir: {}\n", victim.path(".git").display()),
        );
        assert_eq!(place.inspect().0.branch.as_deref(), Some("main"));
        chown(&victim.path(".git"));
        assert!(notes_without_repository(place.dir.path()).contains("somebody else"));
        let place = TestDirectory::repository();
        fs::create_dir(place.path("theirs")).unwrap();
        chown(&place.path("theirs"));
        assert!(notes_without_repository(&place.path("theirs")).contains("somebody else"));
    }
}

#[test]
fn hostile_indexes() {
    type Make<'a> = &'a dyn Fn(&Path);
    let makes: [(&str, Make<'_>); 5] = [
        ("missing", &|_| {}),
        ("a fifo", &fifo),
        ("endless", &|at| {
            File::create(at).unwrap().set_len(1 << 40).unwrap()
        }),
        ("short", &|at| {
            fs::write(at, b"DIRC\0\0\0\x02\xff\xff\xff\xff").unwrap()
        }),
        ("a symlink", &|at| symlink("/etc/passwd", at).unwrap()),
    ];
    for (name, make) in makes {
        let place = TestDirectory::repository();
        let at = place.path(".git/index");
        fs::remove_file(&at).unwrap();
        make(&at);
        let (git, notes) = place.inspect();
        assert_eq!(git.dirty, None, "{name}");
        assert!(
            git.commit.is_some() && notes[0].contains("index"),
            "{name}: {notes:?}"
        );
    }
    // Each byte of a real index is changed in turn. Nothing blocks or panics, and the paths in the index lead
    // nowhere.
    let place = TestDirectory::repository();
    let index = fs::read(place.path(".git/index")).unwrap();
    for at in 0..index.len() {
        let mut damaged = index.clone();
        damaged[at] ^= 0x2e;
        fs::write(place.path(".git/index"), damaged).unwrap();
        place.inspect();
    }
    let name = index.windows(4).position(|part| part == b"a.py").unwrap();
    for path in [b"../x", b"/etc", b"a/..", b".///"] {
        let mut evil = index.clone();
        evil[name..name + 4].copy_from_slice(path);
        fs::write(place.path(".git/index"), evil).unwrap();
        assert_ne!(place.inspect().0.dirty, Some(false));
    }
}

/// A tracked file that has become a FIFO.
#[test]
fn hostile_files() {
    let place = TestDirectory::repository();
    fs::remove_file(place.path("a.py")).unwrap();
    fifo(&place.path("a.py"));
    assert_eq!(place.inspect().0.dirty, Some(true));
}

fn facts<'a>(program: &'a Path, project: &'a Path) -> ProvenanceFacts<'a> {
    ProvenanceFacts {
        rights: InspectionRights::SharedWithCaller,
        argv: &[],
        script: None,
        inputs: &[],
        env: &[],
        secret_names: &[],
        program,
        prefixes: &[],
        inside_env: &[],
        project,
        data: None,
        docs: None,
        reads: &[],
    }
}

fn listed(runtime: &ProvenanceRuntime) -> Vec<(String, String)> {
    let packages = runtime
        .libraries
        .iter()
        .flat_map(|library| &library.packages);
    packages
        .map(|p| (p.name.clone(), p.version.clone().unwrap_or_default()))
        .collect()
}

fn inspect_program(program: &Path) -> (ProvenanceRuntime, Vec<String>) {
    let mut notes = Notes::default();
    let runtime = inspect_runtime(&facts(program, Path::new("/")), &mut notes);
    (runtime, notes.0)
}

/// `3.11` for `Python 3.11.2`.
fn python_of(said: &str) -> String {
    packages::short_version(said.trim_start_matches("Python ")).unwrap()
}

#[test]
fn the_system_python_and_a_real_venv() {
    let (system, notes) = inspect_program(Path::new("/usr/bin/python3"));
    let version = Command::new("/usr/bin/python3").arg("-V").output().unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    let said = system.version.clone().unwrap();
    assert!(
        version.starts_with(&format!("Python {said}")),
        "{said} {version} {notes:?}"
    );
    assert_eq!(system.kind, RuntimeKind::Python);
    // The packages that Python itself reports.
    let ask = "import importlib.metadata as m\nfor d in m.distributions(path=['/usr/lib/python3/dist-packages']):\n print(d.metadata['Name'])";
    let theirs = Command::new("/usr/bin/python3")
        .args(["-I", "-c", ask])
        .output()
        .unwrap();
    let theirs = String::from_utf8(theirs.stdout).unwrap();
    let plain = |name: &str| name.to_lowercase().replace(['_', '.'], "-");
    let ours: Vec<String> = listed(&system)
        .iter()
        .map(|(name, _)| plain(name))
        .collect();
    assert!(theirs.lines().count() > 3);
    for name in theirs.lines() {
        assert!(ours.contains(&plain(name)), "{name} is missing");
    }

    let place = TestDirectory::new();
    let venv = place.path("venv");
    let made = Command::new("/usr/bin/python3")
        .args(["-m", "venv", "--without-pip"])
        .arg(&venv)
        .status();
    assert!(made.unwrap().success());
    let site = |name: &str| {
        format!(
            "venv/lib/python{}/site-packages/{name}",
            python_of(&version)
        )
    };
    place.write(
        &site("demo_x-1.5.dist-info/METADATA"),
        "Name: demo-x\nVersion: 1.5\n",
    );
    let (runtime, notes) = inspect_program(&venv.join("bin/python3"));
    assert_eq!(
        format!("Python {}", runtime.version.clone().unwrap()),
        version.trim()
    );
    let ask = "import importlib.metadata as m; print(m.version('demo-x'))";
    let theirs = Command::new(venv.join("bin/python3"))
        .args(["-I", "-c", ask])
        .output();
    assert_eq!(theirs.unwrap().stdout, b"1.5\n");
    assert_eq!(listed(&runtime), [("demo_x".into(), "1.5".into())]);
    assert_eq!(runtime.libraries.len(), 1, "{notes:?}");
    assert!(
        runtime
            .interpreter
            .unwrap()
            .starts_with("/usr/bin/python3.")
    );
    // Now with the system's packages.
    let config = fs::read_to_string(venv.join("pyvenv.cfg")).unwrap();
    let config = config.replace("packages = false", "packages = true");
    fs::write(venv.join("pyvenv.cfg"), &config).unwrap();
    assert!(inspect_program(&venv.join("bin/python3")).0.libraries.len() > 1);
    fs::write(
        venv.join("pyvenv.cfg"),
        config.replace("/usr/bin", "/home/ada/secret/bin"),
    )
    .unwrap();
    assert_eq!(
        inspect_program(&venv.join("bin/python3")).0.libraries.len(),
        1
    );
}

#[test]
fn the_packages_of_r() {
    if !Path::new("/usr/bin/Rscript").exists() {
        eprintln!("SKIPPED: R is not installed");
        return;
    }
    let place = TestDirectory::new();
    place.write(
        "mine/fits/DESCRIPTION",
        "Package: fits\nTitle: X\nVersion: 0.3-1\n",
    );
    place.write("mine/empty/other", "");
    let env = [("R_LIBS_USER".into(), place.path("mine").into_os_string())];
    let program = Path::new("/usr/bin/Rscript");
    let facts = ProvenanceFacts {
        inside_env: &env,
        ..facts(program, Path::new("/"))
    };
    let runtime = inspect_runtime(&facts, &mut Notes::default());
    let names = listed(&runtime);
    let version = runtime.version.unwrap();
    assert!(
        names.contains(&("stats".into(), version.clone())),
        "{names:?}"
    );
    assert!(
        names.contains(&("fits".into(), "0.3-1".into())),
        "{names:?}"
    );
    let said = Command::new(program).arg("--version").output().unwrap();
    let said = [said.stdout, said.stderr].concat();
    assert!(String::from_utf8_lossy(&said).contains(&version));
}

/// A prefix with every kind of package, good and hostile.
#[test]
fn hostile_libraries() {
    let place = TestDirectory::new();
    place.write("secret", "Name: stolen\nVersion: 6.6\n");
    fs::create_dir_all(place.path("p/bin")).unwrap();
    fs::write(place.path("p/bin/python3.12"), "").unwrap();
    symlink("python3.12", place.path("p/bin/python3")).unwrap();
    let site = "p/lib/python3.12/site-packages";
    place.write(
        "p/include/python3.12/patchlevel.h",
        "#define PY_VERSION      \"3.12.9\"\n",
    );
    place.write("p/conda-meta/history", "");
    place.write("p/conda-meta/numpy-base-1.26.4-py312hb5e798b_0.json", "{}");
    place.write("p/conda-meta/strange.json", "{}");
    let entry = |name: &str| place.path(&format!("{site}/{name}"));
    for dir in [
        "numpy-1.26.4.dist-info",
        "a_b-2!1.0rc1+x.dist-info",
        "Jinja2-3.1.2.egg-info",
        "old-1.0-py3.12.egg-info",
    ] {
        fs::create_dir_all(entry(dir)).unwrap();
    }
    place.write(
        &format!("{site}/dev.egg-info/PKG-INFO"),
        "Metadata-Version: 2.1\nname:  dev\r\nVersion: 0.0\n",
    );
    place.write(
        &format!("{site}/odd.dist-info/METADATA"),
        "Name: Odd\n\nVersion: 9\n",
    );
    place.write(&format!("{site}/flat.egg-info"), "Name: flat\nVersion: 7\n");
    for name in ["fifo", "link", "sparse", "behind", "dirlink"] {
        fs::create_dir_all(entry(&format!("{name}.dist-info"))).unwrap();
    }
    fifo(&entry("fifo.dist-info/METADATA"));
    symlink(place.path("secret"), entry("link.dist-info/METADATA")).unwrap();
    File::create(entry("sparse.dist-info/METADATA"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    fs::remove_dir(entry("dirlink.dist-info")).unwrap();
    place.write("secrets/METADATA", "Name: stolen\nVersion: 6.6\n");
    symlink(place.path("secrets"), entry("dirlink.dist-info")).unwrap();
    fs::create_dir(entry("behind.dist-info/METADATA")).unwrap();
    let bytes = OsString::from_vec(b"\xff\\\x01-1.dist-info".to_vec());
    fs::create_dir(place.path(site).join(bytes)).unwrap();

    let (runtime, notes) = inspect_program(&place.path("p/bin/python3"));
    assert_eq!(runtime.version.as_deref(), Some("3.12.9"));
    let names = listed(&runtime);
    let expected = [
        ("Jinja2", "3.1.2"),
        ("Odd", ""),
        ("\\xff\\\\\u{1}", "1"),
        ("a_b", "2!1.0rc1+x"),
        ("behind", ""),
        ("dev", "0.0"),
        ("dirlink", ""),
        ("fifo", ""),
        ("flat", "7"),
        ("link", ""),
        ("numpy", "1.26.4"),
        ("numpy-base", "1.26.4"),
        ("old", "1.0"),
        ("sparse", ""),
    ];
    for (name, version) in expected {
        assert!(
            names.contains(&(name.into(), version.into())),
            "{name}: {names:?}"
        );
    }
    assert_eq!(names.len(), expected.len(), "{names:?} {notes:?}");
}

#[test]
fn libraries_have_a_bound() {
    let place = TestDirectory::new();
    fs::create_dir_all(place.path("bin")).unwrap();
    let site = place.path("lib/python3.9/site-packages");
    fs::create_dir_all(&site).unwrap();
    for n in 0..25 {
        fs::write(site.join(format!("p{n}-1.egg-info")), "").unwrap();
    }
    for (bound, listed, noted) in [(PACKAGES_MAX, 25, 0), (25, 25, 0), (20, 20, 1), (0, 0, 1)] {
        let mut notes = Notes::default();
        let mut finder = PackageFinder::new(&mut notes);
        finder.packages_left = bound;
        finder.add_python(place.dir.path(), None);
        let found: usize = finder.libraries.iter().map(|l| l.packages.len()).sum();
        assert_eq!((found, notes.0.len()), (listed, noted));
    }
    // A library behind a symlink is not listed.
    let other = TestDirectory::new();
    fs::create_dir_all(other.path("bin")).unwrap();
    symlink(place.path("lib"), other.path("lib")).unwrap();
    assert_eq!(inspect_program(&other.path("bin/python3")).0.libraries, []);
}

#[test]
fn a_shell_gets_the_libraries_of_what_it_could_start() {
    let place = TestDirectory::new();
    fs::create_dir_all(place.path("venv/lib/python3.11/site-packages/x-1.dist-info")).unwrap();
    let prefixes = [place.path("venv")];
    let facts = ProvenanceFacts {
        prefixes: &prefixes,
        ..facts(Path::new("/usr/bin/bash"), Path::new("/"))
    };
    let runtime = inspect_runtime(&facts, &mut Notes::default());
    assert_eq!(
        (runtime.kind, runtime.version.as_deref()),
        (RuntimeKind::Other, None)
    );
    assert_eq!(runtime.libraries[0].packages[0].name, "x");
}

#[test]
fn secrets_are_withheld() {
    let made = |name: &str, value: &str| {
        record_variable(
            name.as_ref(),
            value.as_ref(),
            &["MY_*".into(), "HUSH".into()],
        )
    };
    assert_eq!(made("MY_X", "v").withheld, Some(SecretReason::Policy));
    assert_eq!(made("HUSH", "v").withheld, Some(SecretReason::Policy));
    assert_eq!(made("HUSHED", "v").value.as_deref(), Some("v"));
    assert_eq!(
        made("DB", "postgres://u:p@h/d").withheld,
        Some(SecretReason::Value)
    );
    assert_eq!(made("DB", "postgres://u@h:5432/d?x=a@b:c").withheld, None);
    let withheld = serde_json::to_value(made("TOKEN", "hunter2")).unwrap();
    assert_eq!(
        withheld,
        serde_json::json!({"name": "TOKEN", "value": null, "withheld": "name"})
    );
}

#[test]
fn everything_is_bounded_and_comes_back_from_json() {
    let place = TestDirectory::repository();
    let long = OsString::from_vec(vec![0xff; STRING_BYTES_MAX + 1]);
    let mut argv = vec![OsString::from_vec(b"a\x00\xff\\".to_vec()), long];
    argv.extend((0..5_000).map(|n| OsString::from(n.to_string())));
    let env: Vec<_> = argv.iter().map(|arg| ("X".into(), arg.clone())).collect();
    let hash = ContentHash::of(b"x");
    let mut inputs: Vec<_> = (0..INPUTS_MAX + 7)
        .map(|n| (format!("in/{n:05}"), 3, hash))
        .collect();
    let reads = [(PathBuf::from("/srv/x"), PathBuf::from("/srv/y"))];
    let program = Path::new("/usr/bin/python3");
    let whole = |inputs: &[(String, u64, ContentHash)]| {
        gather(&ProvenanceFacts {
            argv: &argv,
            script: Some((Path::new("/p/s.py"), Some(hash))),
            inputs,
            env: &env,
            data: Some(Path::new("/p/data")),
            reads: &reads,
            ..facts(program, place.dir.path())
        })
    };
    let made = whole(&inputs);
    assert_eq!(made.argv[0], "a\\x00\\xff\\\\");
    assert!(made.argv[1].ends_with(CUT));
    assert_eq!(
        made.argv.len() as u64 + made.argv_left_out,
        argv.len() as u64
    );
    assert_eq!(made.argv.len(), STRINGS_MAX);
    assert_eq!(made.env.len() as u64 + made.env_left_out, env.len() as u64);
    let listed = &made.inputs;
    assert_eq!(
        (listed.files.len(), listed.count, listed.bytes),
        (INPUTS_MAX, 1_007, 3_021)
    );
    let text = serde_json::to_string(&made).unwrap();
    assert!(!text.contains("\\u0000") && text.len() < 4 << 20);
    assert_eq!(serde_json::from_str::<Provenance>(&text).unwrap(), made);
    assert_ne!(made.git.as_ref().unwrap().dirty, Some(true));
    assert!(!made.host.name.is_empty() && !made.host.kernel.is_empty());
    assert_eq!(made.submitter.uid, rustix::process::getuid().as_raw());
    // The hash covers the whole set, independent of the order.
    inputs.reverse();
    assert_eq!(whole(&inputs).inputs, made.inputs);
    inputs[0].1 += 1;
    assert_ne!(whole(&inputs).inputs.blake3, made.inputs.blake3);
}

#[test]
fn users_have_names() {
    let passwd = b"root:x:0:0:root:/root:/bin/sh\n\n:::\nada:x:1000:1000::/home/ada:/bin/sh\n";
    assert_eq!(user_name(passwd, 1000).as_deref(), Some("ada"));
    assert_eq!(user_name(passwd, 0).as_deref(), Some("root"));
    assert_eq!(user_name(passwd, 7), None);
}
