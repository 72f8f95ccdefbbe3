#![allow(clippy::unwrap_used)]

//! As root, the outputs belong to a leased uid, as in a real run. The whole file then runs once more as a plain user.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use super::file_system::NETWORK_FS;
use super::identity::IDENTITY;
use super::*;
use crate::types::manifest::Output;
use exporting::export_all;

const LEASED_UID: u32 = 54_321;
const PLAIN_UID: u32 = 54_322;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The uid that the program ran with.
fn program_uid() -> u32 {
    if is_root() { LEASED_UID } else { own_uid() }
}

/// A store, and the workspace of a program that has ended.
struct TestStore {
    _dirs: Vec<TempDir>,
    workspace: PathBuf,
    store: Artifacts,
    hold: SharedLock,
}

impl TestStore {
    fn new() -> TestStore {
        let dir = tempfile::tempdir().unwrap();
        let (workspace, store) = (dir.path().join("workspace"), dir.path().join("store"));
        TestStore::with(vec![dir], workspace, store)
    }

    /// The workspace on disk, the store on tmpfs.
    fn across_file_systems() -> TestStore {
        let dir = tempfile::tempdir().unwrap();
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        let (workspace, store) = (dir.path().join("workspace"), memory.path().join("store"));
        let device = |p: &Path| p.metadata().unwrap().dev();
        assert_ne!(device(dir.path()), device(memory.path()), "one file system");
        TestStore::with(vec![dir, memory], workspace, store)
    }

    fn with(dirs: Vec<TempDir>, workspace: PathBuf, store: PathBuf) -> TestStore {
        std::fs::create_dir(&workspace).unwrap();
        give_to_program(&workspace);
        let store = Artifacts::open(&store).unwrap();
        let hold = store.lock_shared().unwrap();
        TestStore {
            _dirs: dirs,
            workspace,
            store,
            hold,
        }
    }

    /// Creates a file as the program would, and returns its entry in the manifest.
    fn file(&self, name: &[u8], content: &[u8]) -> Output {
        let path = self.workspace.join(OsStr::from_bytes(name));
        make_parents(&self.workspace, &path);
        std::fs::write(&path, content).unwrap();
        give_to_program(&path);
        self.output(name)
    }

    fn output(&self, name: &[u8]) -> Output {
        let path = self.workspace.join(OsStr::from_bytes(name));
        output_of(&path, name)
    }

    fn path(&self, output: &Output) -> PathBuf {
        self.workspace
            .join(OsStr::from_bytes(output.path.as_bytes()))
    }

    fn take(
        &self,
        output: &Output,
        transfer: TransferMode,
    ) -> Result<TransferMethod, ArtifactError> {
        self.take_with(output, transfer, ContentCheck::TrustManifest)
    }

    fn take_with(
        &self,
        output: &Output,
        transfer: TransferMode,
        check: ContentCheck,
    ) -> Result<TransferMethod, ArtifactError> {
        let dir = File::open(&self.workspace).unwrap();
        let source = TransferSource::new(dir.as_fd(), program_uid(), transfer, check);
        self.store.take_output(&self.hold, &source, output)
    }

    fn object(&self, output: &Output) -> PathBuf {
        self.store.object_path(&output.blake3)
    }

    /// Asserts that the object is in place, complete, and owned by this process's user.
    fn assert_kept(&self, output: &Output) {
        let verdict = self.store.verify(&output.blake3, output.bytes).unwrap();
        assert_eq!(verdict, ObjectCondition::Sound, "{:?}", output.path);
        let staged = self.store.path.join("staging").read_dir().unwrap();
        assert_eq!(staged.count(), 0, "nothing is left in staging");
    }
}

fn make_parents(top: &Path, path: &Path) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    for dir in path.ancestors().skip(1).take_while(|p| *p != top) {
        give_to_program(dir);
    }
}

fn give_to_program(path: &Path) {
    if is_root() {
        std::os::unix::fs::lchown(path, Some(LEASED_UID), Some(LEASED_UID)).unwrap();
    }
}

fn output_of(path: &Path, name: &[u8]) -> Output {
    let file = File::open(path).unwrap();
    let meta = file.metadata().unwrap();
    Output {
        path: OutputPath::new(name.to_vec()).unwrap(),
        bytes: meta.len(),
        blake3: hashing::hash_of(file.as_fd(), meta.len()).unwrap(),
        media_type: String::new(),
        modified_ms: meta.mtime() * 1_000 + meta.mtime_nsec() / 1_000_000,
        inode: meta.ino(),
    }
}

fn mode(path: &Path) -> u32 {
    path.symlink_metadata().unwrap().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn noise<const N: usize>() -> [u8; N] {
    let mut noise = [0; N];
    rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty()).unwrap();
    noise
}

fn count_objects(store: &Artifacts) -> u64 {
    store.usage().unwrap().objects
}

#[test]
fn a_moved_file_is_the_object_itself() {
    let scene = TestStore::new();
    let output = scene.file(b"deep/er/plot \xff\n.png", b"content");
    assert_eq!(
        scene.take(&output, TransferMode::Move).unwrap(),
        TransferMethod::Linked
    );
    let meta = scene.object(&output).metadata().unwrap();
    assert_eq!(meta.ino(), output.inode, "no byte was copied");
    assert_eq!(meta.uid(), own_uid());
    assert_eq!(mode(&scene.object(&output)), 0o400, "not durable yet");
    scene.store.make_durable().unwrap();
    assert_eq!(mode(&scene.object(&output)), 0o444);
    assert_eq!(
        scene.take(&output, TransferMode::Move).unwrap(),
        TransferMethod::Present
    );
    assert_eq!(mode(&scene.object(&output)), 0o444);
    scene.assert_kept(&output);
    let mut text = String::new();
    let mut object = scene.store.open_object(&output.blake3).unwrap();
    object.read_to_string(&mut text).unwrap();
    assert_eq!(text, "content");
}

#[test]
fn a_copy_leaves_the_workspace_as_it_is() {
    for scene in [TestStore::new(), TestStore::across_file_systems()] {
        let output = scene.file(b"a", b"content");
        set_mode(&scene.path(&output), 0o640);
        let before = scene.path(&output).metadata().unwrap();
        let taken = scene.take(&output, TransferMode::Copy).unwrap();
        assert!(matches!(
            taken,
            TransferMethod::Copied | TransferMethod::Reflinked
        ));
        let after = scene.path(&output).metadata().unwrap();
        let facts = |m: &std::fs::Metadata| (m.ino(), m.uid(), m.mode(), m.nlink(), m.ctime_nsec());
        assert_eq!(facts(&before), facts(&after));
        // A user who works in the kept workspace does not change the object.
        std::fs::write(scene.path(&output), "changed").unwrap();
        scene.assert_kept(&output);
    }
}

#[test]
fn a_move_to_another_file_system_is_a_copy() {
    let scene = TestStore::across_file_systems();
    let output = scene.file(b"a/b", b"content");
    assert_eq!(
        scene.take(&output, TransferMode::Move).unwrap(),
        TransferMethod::Copied
    );
    scene.store.make_durable().unwrap();
    scene.assert_kept(&output);
    assert_eq!(mode(&scene.object(&output)), 0o444);
}

#[test]
fn a_copy_whose_content_is_not_what_was_hashed_is_refused() {
    let scene = TestStore::across_file_systems();
    let mut output = scene.file(b"a", b"content");
    output.blake3 = ContentHash::of(b"CONTENT");
    let taken = scene.take(&output, TransferMode::Move);
    assert!(matches!(taken, Err(ArtifactError::Damaged { .. })));
    assert_eq!(count_objects(&scene.store), 0);
}

#[test]
fn sparse_files_stay_sparse() {
    const LENGTH: u64 = 64 << 20;
    for scene in [TestStore::new(), TestStore::across_file_systems()] {
        let path = scene.workspace.join("sparse");
        let file = File::create(&path).unwrap();
        files::write_all_at(file.as_fd(), b"middle", LENGTH / 2).unwrap();
        file.set_len(LENGTH).unwrap();
        give_to_program(&path);
        let output = scene.output(b"sparse");
        for transfer in [TransferMode::Copy, TransferMode::Move] {
            scene.take(&output, transfer).unwrap();
            scene.assert_kept(&output);
            let meta = scene.object(&output).metadata().unwrap();
            assert_eq!(meta.len(), LENGTH);
            assert!(meta.blocks() * 512 < 1 << 20, "{}", meta.blocks());
            std::fs::remove_file(scene.object(&output)).unwrap();
            scene.store.lock_unsynced().clear();
        }
        let to = scene.workspace.join("exported");
        scene.take(&output, TransferMode::Copy).unwrap();
        export_all(&scene.store, &[output], &to, Overwrite::Never).unwrap();
        let meta = to.join("sparse").metadata().unwrap();
        assert_eq!(meta.len(), LENGTH);
        assert!(meta.blocks() * 512 < 1 << 20, "{}", meta.blocks());
    }
}

#[test]
fn attributes_access_lists_and_set_id_bits_are_gone() {
    // An access control list in the kernel's format: version 2, then tag, permissions and id of each entry.
    let entry = |tag: u16, permissions: u16, id: u32| {
        let mut bytes = tag.to_le_bytes().to_vec();
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
        bytes
    };
    let none = u32::MAX;
    let list = [
        2u32.to_le_bytes().to_vec(),
        entry(0x01, 6, none),
        entry(0x02, 6, PLAIN_UID + 1),
        entry(0x04, 6, none),
        entry(0x10, 6, none),
        entry(0x20, 4, none),
    ]
    .concat();
    let scene = TestStore::new();
    let output = scene.file(b"a", b"content");
    let path = scene.path(&output);
    let set = |name: &str, value: &[u8]| {
        rustix::fs::setxattr(&path, name, value, rustix::fs::XattrFlags::empty()).unwrap();
    };
    set("user.mine", b"x");
    set("user.other", b"y");
    set("system.posix_acl_access", &list);
    if is_root() {
        set("trusted.x", b"z");
    }
    set_mode(&path, 0o6755);
    assert_eq!(mode(&path), 0o6755, "the control");
    assert!(rustix::fs::listxattr_query(&path).unwrap() > 0);
    // The program may remove write permission, which keeps a plain user from removing `user.` attributes.
    set_mode(&path, 0o6455);
    assert_eq!(
        scene.take(&output, TransferMode::Move).unwrap(),
        TransferMethod::Linked
    );
    scene.store.make_durable().unwrap();
    let object = scene.object(&output);
    let mut names = [0u8; 1_000];
    let length = rustix::fs::listxattr(&object, &mut names).unwrap();
    assert_eq!(String::from_utf8_lossy(&names[..length]), "");
    assert_eq!(mode(&object), 0o444);
    assert_eq!(object.metadata().unwrap().uid(), own_uid());
}

#[test]
fn a_file_that_its_mode_forbids_to_read_is_taken() {
    for scene in [TestStore::new(), TestStore::across_file_systems()] {
        for transfer in [TransferMode::Copy, TransferMode::Move] {
            let content = noise::<32>();
            let output = scene.file(b"closed/too/a", &content);
            set_mode(&scene.path(&output), 0);
            set_mode(&scene.workspace.join("closed/too"), 0);
            set_mode(&scene.workspace.join("closed"), 0);
            scene.take(&output, transfer).unwrap();
            assert_eq!(mode(&scene.workspace.join("closed")), 0);
            set_mode(&scene.workspace.join("closed"), 0o700);
            set_mode(&scene.workspace.join("closed/too"), 0o700);
            if transfer == TransferMode::Copy {
                assert_eq!(mode(&scene.path(&output)), 0);
            }
            scene.assert_kept(&output);
            std::fs::remove_file(scene.path(&output)).unwrap();
        }
    }
}

#[test]
fn hard_links_and_equal_content_are_kept_once() {
    let scene = TestStore::new();
    let one = scene.file(b"one", b"content");
    std::fs::hard_link(scene.path(&one), scene.workspace.join("two")).unwrap();
    let two = scene.output(b"two");
    assert_eq!(one.inode, two.inode);
    let equal = scene.file(b"three", b"content");
    assert_eq!(
        scene.take(&one, TransferMode::Move).unwrap(),
        TransferMethod::Linked
    );
    assert_eq!(
        scene.take(&two, TransferMode::Move).unwrap(),
        TransferMethod::Present
    );
    assert_eq!(
        scene.take(&equal, TransferMode::Move).unwrap(),
        TransferMethod::Present
    );
    assert_eq!(count_objects(&scene.store), 1);
    // The remaining names in the workspace do not let the program's uid write to the object.
    let left = scene.path(&two).metadata().unwrap();
    assert_eq!((left.uid(), left.mode() & 0o7777), (own_uid(), 0o400));
    scene.assert_kept(&one);
    std::fs::remove_dir_all(&scene.workspace).unwrap();
    scene.assert_kept(&one);
}

#[test]
fn a_file_with_more_links_than_the_file_system_allows_is_copied() {
    let scene = TestStore::new();
    let output = scene.file(b"a", b"content");
    let many = scene.workspace.join("many");
    std::fs::create_dir(&many).unwrap();
    let full = (0..70_000).find_map(|n| {
        let made = std::fs::hard_link(scene.path(&output), many.join(n.to_string()));
        made.err().and_then(|e| e.raw_os_error())
    });
    if full != Some(Errno::MLINK.raw_os_error()) {
        println!("UNAVAILABLE: this file system allows more than 70,000 links");
        return;
    }
    assert_eq!(
        scene.take(&output, TransferMode::Move).unwrap(),
        TransferMethod::Copied
    );
    scene.assert_kept(&output);
}

fn replace(scene: &TestStore, with: &dyn Fn(&Path)) {
    std::fs::remove_file(scene.workspace.join("a/b")).unwrap();
    with(&scene.workspace.join("a/b"));
}

#[test]
fn a_file_that_differs_from_its_manifest_is_refused_and_not_stored() {
    type Change = dyn Fn(&TestStore, &mut Output);
    let changes: Vec<(&str, Box<Change>)> = vec![
        ("another file", Box::new(|_, o| o.inode += 1)),
        ("another length", Box::new(|_, o| o.bytes += 1)),
        ("another time", Box::new(|_, o| o.modified_ms += 1)),
        (
            "a link in its place",
            Box::new(|s, _| replace(s, &|p| symlink("/etc/passwd", p).unwrap())),
        ),
        (
            "a FIFO in its place",
            Box::new(|s, _| {
                replace(s, &|p| {
                    rustix::fs::mkfifoat(rustix::fs::CWD, p, Mode::RWXU).unwrap();
                });
            }),
        ),
        (
            "a directory in its place",
            Box::new(|s, _| replace(s, &|p| std::fs::create_dir(p).unwrap())),
        ),
        ("gone", Box::new(|s, _| replace(s, &|_| {}))),
        (
            "a link on the way",
            Box::new(|s, _| {
                let moved = s.workspace.join("moved");
                std::fs::rename(s.workspace.join("a"), &moved).unwrap();
                symlink(&moved, s.workspace.join("a")).unwrap();
            }),
        ),
        (
            "somebody else's",
            Box::new(|s, o| {
                let path = s.workspace.join("a/b");
                match is_root() {
                    true => std::os::unix::fs::chown(&path, Some(PLAIN_UID), None).unwrap(),
                    // Only root can give a file to another user.
                    false => o.inode += 1,
                }
            }),
        ),
    ];
    for (what, change) in changes {
        for transfer in [TransferMode::Move, TransferMode::Copy] {
            let scene = TestStore::new();
            let control = scene.file(b"a/control", b"control");
            let mut output = scene.file(b"a/b", b"content");
            if what != "a link on the way" {
                scene.take(&control, transfer).unwrap();
            }
            let before = count_objects(&scene.store);
            change(&scene, &mut output);
            let taken = scene.take(&output, transfer);
            let refused = matches!(
                taken,
                Err(ArtifactError::Open { .. } | ArtifactError::Changed { .. })
            );
            assert!(refused, "{what}: {taken:?}");
            assert_eq!(count_objects(&scene.store), before, "{what}");
        }
    }
}

#[test]
fn in_recovery_the_content_is_read_again() {
    let scene = TestStore::new();
    let output = scene.file(b"a", b"content");
    let path = scene.path(&output);
    let time = path.metadata().unwrap().modified().unwrap();
    // Simulates a power cut: everything is as it was, except for the content.
    std::fs::write(&path, [0; 7]).unwrap();
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(time)
        .unwrap();
    let taken = scene.take_with(&output, TransferMode::Move, ContentCheck::Rehash);
    assert!(matches!(taken, Err(ArtifactError::Changed { .. })));
    assert_eq!(count_objects(&scene.store), 0);
    std::fs::write(&path, "content").unwrap();
    let output = scene.output(b"a");
    let taken = scene.take_with(&output, TransferMode::Move, ContentCheck::Rehash);
    assert_eq!(taken.unwrap(), TransferMethod::Linked);
}

#[test]
fn a_torn_object_is_replaced_and_one_that_is_not_durable_is_read_before_it_is_believed() {
    for (torn, mode) in [
        (&b"con"[..], 0o444),
        (b"", 0o400),
        (b"\0\0\0\0\0\0\0", 0o400),
        (b"CONTENT", 0o600),
    ] {
        for scene in [TestStore::new(), TestStore::across_file_systems()] {
            let output = scene.file(b"a", b"content");
            let object = scene.object(&output);
            std::fs::create_dir_all(object.parent().unwrap()).unwrap();
            std::fs::write(&object, torn).unwrap();
            set_mode(&object, mode);
            let taken = scene.take(&output, TransferMode::Move).unwrap();
            assert_ne!(taken, TransferMethod::Present, "{torn:?}");
            scene.assert_kept(&output);
        }
    }
    // A complete object stays, although the process that placed it never marked it as durable.
    let scene = TestStore::new();
    let output = scene.file(b"a", b"content");
    let object = scene.object(&output);
    std::fs::create_dir_all(object.parent().unwrap()).unwrap();
    std::fs::write(&object, "content").unwrap();
    set_mode(&object, 0o400);
    assert_eq!(
        scene.take(&output, TransferMode::Move).unwrap(),
        TransferMethod::Present
    );
    let durable = scene.store.make_durable().unwrap();
    assert_eq!(durable, SyncMethod::Each { objects: 1 });
    assert_eq!(self::mode(&object), 0o444);
}

#[test]
fn a_torn_object_that_is_the_file_itself_is_no_replacement_for_itself() {
    let scene = TestStore::new();
    let output = scene.file(b"a", b"content");
    scene.take(&output, TransferMode::Move).unwrap();
    scene.store.lock_unsynced().clear();
    let path = scene.path(&output);
    set_mode(&path, 0o600);
    let time = path.metadata().unwrap().modified().unwrap();
    std::fs::write(&path, "CONTENT").unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_modified(time).unwrap();
    let taken = scene.take(&output, TransferMode::Move);
    assert!(
        matches!(taken, Err(ArtifactError::Damaged { .. })),
        "{taken:?}"
    );
}

/// Whether the first byte can be read without waiting for a disk.
fn is_in_memory(object: &std::fs::File) -> bool {
    let mut byte = [0];
    let mut buffers = [std::io::IoSliceMut::new(&mut byte)];
    let flags = rustix::io::ReadWriteFlags::NOWAIT;
    match rustix::io::preadv2(object, &mut buffers, 0, flags) {
        Ok(1) => true,
        Err(Errno::AGAIN) => false,
        other => panic!("{other:?}"),
    }
}

/// How many of `number` objects are still in the page cache after the lock is dropped.
fn stay_in_memory(number: u32) -> usize {
    const TMPFS_MAGIC: u32 = 0x0102_1994;
    let scene = TestStore::new();
    let outputs: Vec<Output> = (0..number)
        .map(|n| scene.file(format!("output-{n}").as_bytes(), &vec![n as u8; 10_000]))
        .collect();
    for output in &outputs {
        scene.take(output, TransferMode::Move).unwrap();
    }
    scene.store.make_durable().unwrap();
    let open = |output: &Output| scene.store.open_object(&output.blake3).unwrap();
    let objects: Vec<std::fs::File> = outputs.iter().map(open).collect();
    assert!(objects.iter().all(is_in_memory), "the control");
    let on_tmpfs = rustix::fs::fstatfs(&objects[0]).unwrap().f_type as u32 == TMPFS_MAGIC;
    drop(scene.hold);
    let stay = objects.iter().filter(|object| is_in_memory(object)).count();
    // tmpfs keeps its content only in memory.
    if on_tmpfs {
        assert_eq!(stay, objects.len());
        return 0;
    }
    stay
}

#[test]
fn releasing_the_lock_removes_durable_objects_from_the_page_cache() {
    // Regression: pages that a program had written kept its memory cgroup in the kernel after every run.
    for number in [2, SYNC_EACH_MAX as u32 + 1] {
        // The kernel does not drop a page that it is using at that moment, which is frequent on a busy machine: a
        // quarter of all single pages while three processes did nothing else.
        let all_went = (0..50).any(|_| stay_in_memory(number) == 0);
        assert!(all_went, "of {number} some stayed, every time");
    }
}

#[test]
fn few_are_synced_one_by_one_and_many_at_once() {
    let scene = TestStore::new();
    assert_eq!(
        scene.store.make_durable().unwrap(),
        SyncMethod::NothingToSync
    );
    for objects in [1, SYNC_EACH_MAX, SYNC_EACH_MAX + 1, 300] {
        let taken: Vec<Output> = (0..objects)
            .map(|n| {
                let name = format!("{objects}-{n}");
                let output = scene.file(name.as_bytes(), &noise::<16>());
                scene.take(&output, TransferMode::Move).unwrap();
                output
            })
            .collect();
        let expected = match objects {
            ..=SYNC_EACH_MAX => SyncMethod::Each { objects },
            _ => SyncMethod::FileSystem { objects },
        };
        assert_eq!(scene.store.make_durable().unwrap(), expected);
        for output in &taken {
            assert_eq!(mode(&scene.object(output)), 0o444);
            scene.take(output, TransferMode::Move).unwrap();
        }
        assert_eq!(
            scene.store.make_durable().unwrap(),
            SyncMethod::NothingToSync
        );
    }
}

#[test]
fn make_durable_retries_an_object_after_a_failed_sync() {
    let scene = TestStore::new();
    let output = scene.file(b"a", b"content");
    scene.take(&output, TransferMode::Move).unwrap();
    let aside = scene.store.path.join("aside");
    std::fs::rename(scene.object(&output), &aside).unwrap();
    let synced = scene.store.make_durable();
    assert!(matches!(synced, Err(ArtifactError::Sync { .. })));
    std::fs::rename(&aside, scene.object(&output)).unwrap();
    let synced = scene.store.make_durable().unwrap();
    assert_eq!(synced, SyncMethod::Each { objects: 1 });
}

#[test]
fn a_store_that_vanished_is_told_and_the_outputs_stay() {
    let scene = TestStore::new();
    let output = scene.file(b"a", b"content");
    std::fs::remove_dir_all(&scene.store.path).unwrap();
    let taken = scene.take(&output, TransferMode::Move);
    assert!(
        matches!(taken, Err(ArtifactError::Place { .. })),
        "{taken:?}"
    );
    assert_eq!(std::fs::read(scene.path(&output)).unwrap(), b"content");
}

/// The fallback for plain users of older kernels, for a file with a name and for one without.
#[test]
fn a_file_is_linked_by_its_descriptor_in_proc_too() {
    let scene = TestStore::new();
    let output = scene.file(b"a", b"content");
    let dir = File::open(&scene.store.path).unwrap();
    let file = File::open(scene.path(&output)).unwrap();
    let draft = scene.store.draft().unwrap();
    if !is_root() {
        files::link_by_proc(file.as_fd(), dir.as_fd(), "file").unwrap();
        let meta = scene.store.path.join("file").metadata().unwrap();
        assert_eq!(meta.ino(), output.inode);
    }
    files::link_by_proc(draft.as_fd(), dir.as_fd(), "draft").unwrap();
    let again = files::link_by_proc(draft.as_fd(), dir.as_fd(), "draft");
    assert_eq!(again, Err(Errno::EXIST));
}

#[test]
fn logs_are_put_in_once() {
    let scene = TestStore::new();
    for content in [&b""[..], b"one line\n"] {
        let hash = scene.store.put(&scene.hold, content).unwrap();
        assert_eq!(scene.store.put(&scene.hold, content).unwrap(), hash);
        let length = content.len() as u64;
        assert!(scene.store.contains(&hash, length));
        assert!(!scene.store.contains(&hash, length + 1));
        let verdict = scene.store.verify(&hash, length).unwrap();
        assert_eq!(verdict, ObjectCondition::Sound);
    }
    assert_eq!(count_objects(&scene.store), 2);
}

#[test]
fn objects_are_adopted_from_another_store_which_keeps_them() {
    for scene in [TestStore::new(), TestStore::across_file_systems()] {
        let pending = Artifacts::open(&scene.workspace.join("pending")).unwrap();
        let theirs = pending.lock_shared().unwrap();
        let hash = pending.put(&theirs, b"content").unwrap();
        let adopt = || scene.store.import_object(&scene.hold, &pending, &hash, 7);
        assert!(matches!(
            adopt().unwrap(),
            TransferMethod::Linked | TransferMethod::Copied
        ));
        assert_eq!(adopt().unwrap(), TransferMethod::Present);
        assert_eq!(pending.verify(&hash, 7).unwrap(), ObjectCondition::Sound);
        std::fs::remove_dir_all(pending.path()).unwrap();
        assert_eq!(
            scene.store.verify(&hash, 7).unwrap(),
            ObjectCondition::Sound
        );

        let pending = Artifacts::open(&scene.workspace.join("pending")).unwrap();
        let theirs = pending.lock_shared().unwrap();
        let hash = pending.put(&theirs, b"another").unwrap();
        let path = pending.object_path(&hash);
        set_mode(&path, 0o600);
        std::fs::write(&path, "ANOTHER").unwrap();
        let adopted = scene.store.import_object(&scene.hold, &pending, &hash, 7);
        assert!(matches!(adopted, Err(ArtifactError::Damaged { .. })));
        // A lock on one store does not permit changes of another.
        let adopted = scene.store.import_object(&theirs, &pending, &hash, 7);
        assert!(matches!(adopted, Err(ArtifactError::OtherStore { .. })));
    }
}

#[test]
fn damage_is_seen() {
    let scene = TestStore::new();
    let hash = scene.store.put(&scene.hold, b"content").unwrap();
    let path = scene.store.object_path(&hash);
    let verdict = || scene.store.verify(&hash, 7).unwrap();
    assert_eq!(verdict(), ObjectCondition::Sound);
    scene.store.make_durable().unwrap();
    assert_eq!(verdict(), ObjectCondition::Sound);
    set_mode(&path, 0o644);
    assert_eq!(verdict(), ObjectCondition::WrongMode { found: 0o644 });
    std::fs::write(&path, "CONTENT").unwrap();
    let found = ContentHash::of(b"CONTENT");
    assert_eq!(verdict(), ObjectCondition::WrongContent { found });
    // The damaged object is not relied on any more, and the next output with this content replaces it.
    assert_eq!(scene.store.put(&scene.hold, b"content").unwrap(), hash);
    scene.store.make_durable().unwrap();
    assert_eq!(verdict(), ObjectCondition::Sound);
    set_mode(&path, 0o644);
    if is_root() {
        std::os::unix::fs::chown(&path, Some(LEASED_UID), None).unwrap();
        let found = LEASED_UID;
        assert_eq!(verdict(), ObjectCondition::WrongOwner { found });
    }
    std::fs::write(&path, "con").unwrap();
    assert_eq!(verdict(), ObjectCondition::WrongLength { found: 3 });
    std::fs::remove_file(&path).unwrap();
    assert_eq!(verdict(), ObjectCondition::Missing);
    symlink("/etc/passwd", &path).unwrap();
    assert_eq!(verdict(), ObjectCondition::NotAFile);
    assert!(scene.store.open_object(&hash).is_err());
}

#[test]
fn a_fresh_store_gets_one_identity_however_many_open_it() {
    for _ in 0..20 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/store");
        let barrier = std::sync::Barrier::new(8);
        let ids: Vec<String> = std::thread::scope(|scope| {
            let open = || {
                barrier.wait();
                Artifacts::open(&path).unwrap().id().to_owned()
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
        assert_eq!(Artifacts::open(&path).unwrap().id(), ids[0]);
        assert_eq!(mode(&path), 0o700);
        let staged = path.join("staging").read_dir().unwrap();
        assert_eq!(staged.count(), 0);
    }
}

#[test]
fn a_store_that_is_not_ours_or_not_known_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    drop(Artifacts::open(&path).unwrap());
    set_mode(&path, 0o770);
    let opened = Artifacts::open(&path);
    assert!(matches!(opened, Err(ArtifactError::NotPrivate { .. })));
    set_mode(&path, 0o700);
    Artifacts::open(&path).unwrap();
    let identity = path.join(IDENTITY);
    let newer = format!("{{\"version\":2,\"id\":\"{:032x}\"}}", 1);
    std::fs::remove_file(&identity).unwrap();
    std::fs::write(&identity, newer).unwrap();
    let opened = Artifacts::open(&path);
    assert!(matches!(
        opened,
        Err(ArtifactError::Version { found: 2, .. })
    ));
    for damaged in ["", "{", "{\"version\":1,\"id\":\"../..\"}", "\0\0"] {
        std::fs::write(&identity, damaged).unwrap();
        let opened = Artifacts::open(&path);
        let told = matches!(opened, Err(ArtifactError::Identity { .. }));
        assert!(told, "{damaged:?}: {opened:?}");
    }
    std::fs::remove_dir_all(path.join("objects")).unwrap();
    symlink(dir.path(), path.join("objects")).unwrap();
    assert!(matches!(
        Artifacts::open(&path),
        Err(ArtifactError::Make { .. })
    ));
}

#[test]
fn local_file_systems_pass_and_others_are_named() {
    refuse_network_fs(Path::new("/dev/shm")).unwrap();
    refuse_network_fs(&std::env::temp_dir().join("not/there/yet")).unwrap();
    refuse_network_fs(Path::new("not-there-yet")).unwrap();
    // /proc, which is mounted on every Linux, shows that `f_type` and the table use the same numbers.
    let proc = rustix::fs::statfs("/proc").unwrap().f_type as u32;
    assert_eq!(proc, 0x9fa0, "the numbers are those of statfs");
    let numbers: HashSet<u32> = NETWORK_FS.iter().map(|(n, _)| *n).collect();
    assert_eq!(numbers.len(), NETWORK_FS.len());
}

#[test]
fn the_collector_waits_for_everyone_and_removes_only_what_nobody_refers_to() {
    let scene = TestStore::new();
    let kept = scene.file(b"kept", b"kept");
    let other = scene.file(b"other", &[7; 10_000]);
    for output in [&kept, &other] {
        scene.take(output, TransferMode::Copy).unwrap();
    }
    let strange = scene.store.path.join("objects/00/strange");
    std::fs::create_dir_all(strange.parent().unwrap()).unwrap();
    std::fs::write(&strange, "x").unwrap();
    let stale = scene.store.path.join("staging/stale");
    std::fs::write(&stale, "x").unwrap();

    let busy = scene.store.lock_exclusive(Duration::from_millis(20));
    let Err(ArtifactError::Busy { pids, .. }) = &busy else {
        panic!("{busy:?}");
    };
    assert_eq!(*pids, [std::process::id()]);
    let second = scene.store.lock_shared().unwrap();
    let TestStore { store, hold, .. } = &scene;
    store.put(hold, b"while others hold it, too").unwrap();
    let TestStore {
        store,
        hold,
        workspace: _workspace,
        _dirs,
    } = scene;
    drop(hold);
    assert!(store.lock_exclusive(Duration::ZERO).is_err(), "one is left");
    drop(second);
    // Another test that has just forked also holds the lock until it calls execve.
    let alone = store.lock_exclusive(Duration::from_secs(30)).unwrap();
    let referenced = |hash: &ContentHash| *hash == kept.blake3;
    let would = store
        .remove_unreferenced(&alone, &referenced, true)
        .unwrap();
    assert_eq!(count_objects(&store), 3, "a dry run removes nothing");
    let swept = store
        .remove_unreferenced(&alone, &referenced, false)
        .unwrap();
    assert_eq!(swept, would);
    assert_eq!((swept.objects, swept.stale, swept.failed), (2, 1, 0));
    assert!(swept.bytes >= 10_000 && swept.bytes < 100_000, "{swept:?}");
    assert_eq!(swept.foreign, 1);
    assert!(strange.exists() && !stale.exists());
    assert_eq!(count_objects(&store), 1);
    assert_eq!(
        store.verify(&kept.blake3, 4).unwrap(),
        ObjectCondition::Sound
    );
    let again = store.remove_unreferenced(&alone, &referenced, false);
    assert_eq!(again.unwrap().objects, 0);
    let elsewhere = Artifacts::open(&store.path.join("elsewhere")).unwrap();
    let swept = elsewhere.remove_unreferenced(&alone, &|_| false, false);
    assert!(matches!(swept, Err(ArtifactError::OtherStore { .. })));
}

mod exporting;
mod processes;
