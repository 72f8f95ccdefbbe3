//! Tests with processes that are killed, other file systems, and another user.

use super::*;

const JOB: &str = "FUMEHOOD_TEST_ARTIFACTS";

/// Runs tests of this module in a new process of this binary. /proc/self/exe works even if the file was replaced.
fn ourselves(test: &str) -> Command {
    let module = module_path!().split_once("::").unwrap().1;
    let mut command = Command::new("/proc/self/exe");
    command.arg(format!("{module}::{test}"));
    command
}

fn taker(workspace: &Path, store: &Path) -> Child {
    let mut command = ourselves("takes_everything_when_asked");
    command.args(["--exact", "--nocapture", "--test-threads=1"]);
    let job = [workspace.as_os_str(), store.as_os_str()].join(OsStr::new(":"));
    command.env(JOB, job);
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    pipes.spawn().unwrap()
}

/// Runs in a process of its own: prints `ready`, waits for a line on stdin, then takes all files of a workspace.
#[test]
fn takes_everything_when_asked() {
    let Ok(job) = std::env::var(JOB) else {
        return;
    };
    let (workspace, store) = job.split_once(':').unwrap();
    let workspace = Path::new(workspace);
    let outputs = outputs_in(workspace);
    let store = Artifacts::open(Path::new(store)).unwrap();
    let hold = store.lock_shared().unwrap();
    let dir = File::open(workspace).unwrap();
    let source = TransferSource::new(
        dir.as_fd(),
        program_uid(),
        TransferMode::Move,
        ContentCheck::Rehash,
    );
    println!("\nready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    for output in &outputs {
        store.take_output(&hold, &source, output).unwrap();
    }
    store.make_durable().unwrap();
}

fn outputs_in(workspace: &Path) -> Vec<Output> {
    let mut names: Vec<String> = workspace
        .read_dir()
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
        .iter()
        .map(|name| output_of(&workspace.join(name), name.as_bytes()))
        .collect()
}

fn wait_until_ready(child: &mut Child) {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "ready"));
}

fn start(child: &mut Child) {
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
}

/// After a kill at any moment, a repeat gives the same result as an undisturbed run.
#[test]
fn a_kill_at_any_instant_is_repaired_by_the_repeat() {
    const FILES: usize = 120;
    const ROUNDS: u32 = 24;
    let mut midway = 0;
    for round in 0..ROUNDS {
        let scene = match round % 4 {
            3 => TestStore::across_file_systems(),
            _ => TestStore::new(),
        };
        let TestStore {
            _dirs,
            workspace,
            store,
            hold,
        } = scene;
        drop(hold);
        for n in 0..FILES {
            let path = workspace.join(format!("{n:04}"));
            // Some files have equal content, some are hard links.
            match n % 10 {
                8 => std::fs::write(&path, "equal").unwrap(),
                9 => std::fs::hard_link(workspace.join(format!("{:04}", n - 9)), &path).unwrap(),
                _ => std::fs::write(&path, format!("{n}").repeat(1_000)).unwrap(),
            }
            give_to_program(&path);
        }
        let outputs = outputs_in(&workspace);
        let distinct: HashSet<ContentHash> = outputs.iter().map(|o| o.blake3).collect();
        let mut child = taker(&workspace, store.path());
        wait_until_ready(&mut child);
        let kill_at = count_to_wait_for(distinct.len());
        start(&mut child);
        // Kill after a chosen number of objects, plus a random delay.
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while count_objects(&store) < kill_at && std::time::Instant::now() < deadline {}
        for _ in 0..u16::from_ne_bytes(noise()) {
            std::hint::spin_loop();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let found = count_objects(&store) as usize;
        midway += u32::from(found > 0 && found < distinct.len());

        // The lock of the killed process is gone.
        let hold = store.lock_shared().unwrap();
        let dir = File::open(&workspace).unwrap();
        let source = TransferSource::new(
            dir.as_fd(),
            program_uid(),
            TransferMode::Move,
            ContentCheck::Rehash,
        );
        for output in &outputs {
            store.take_output(&hold, &source, output).unwrap();
        }
        store.make_durable().unwrap();
        assert_eq!(count_objects(&store) as usize, distinct.len());
        assert_eq!(store.path.join("staging").read_dir().unwrap().count(), 0);
        for output in &outputs {
            let verdict = store.verify(&output.blake3, output.bytes).unwrap();
            assert_eq!(verdict, ObjectCondition::Sound);
            assert_eq!(mode(&store.object_path(&output.blake3)), 0o444);
        }
    }
    assert!(midway > ROUNDS / 4, "only {midway} were killed midway");
}

fn count_to_wait_for(objects: usize) -> u64 {
    u64::from(u16::from_ne_bytes(noise())) % objects as u64
}

/// Eight processes, and then eight threads, add equal files at the same time. Each content becomes one object.
#[test]
fn equal_content_is_kept_once_however_many_bring_it() {
    const FILES: usize = 100;
    let dir = tempfile::tempdir().unwrap();
    let workspaces: Vec<PathBuf> = (0..8).map(|n| dir.path().join(n.to_string())).collect();
    for workspace in &workspaces {
        std::fs::create_dir(workspace).unwrap();
        for n in 0..FILES {
            let path = workspace.join(format!("{n:04}"));
            std::fs::write(&path, format!("{n}").repeat(5_000)).unwrap();
            give_to_program(&path);
        }
    }
    let store = Artifacts::open(&dir.path().join("store")).unwrap();
    let mut children: Vec<Child> = workspaces
        .iter()
        .map(|workspace| taker(workspace, store.path()))
        .collect();
    children.iter_mut().for_each(wait_until_ready);
    children.iter_mut().for_each(start);
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(count_objects(&store), FILES as u64);

    let threads = Artifacts::open(&dir.path().join("threads")).unwrap();
    let hold = threads.lock_shared().unwrap();
    std::thread::scope(|scope| {
        for workspace in &workspaces {
            let (threads, hold) = (&threads, &hold);
            scope.spawn(move || {
                let dir = File::open(workspace).unwrap();
                let (how, check) = (TransferMode::Copy, ContentCheck::TrustManifest);
                // Files that became objects now belong to the store.
                let source = TransferSource::new(dir.as_fd(), program_uid(), how, check);
                for output in outputs_in(workspace) {
                    threads.take_output(hold, &source, &output).unwrap();
                }
                threads.make_durable().unwrap();
            });
        }
    });
    assert_eq!(count_objects(&threads), FILES as u64);
    for output in outputs_in(&workspaces[0]) {
        for store in [&store, &threads] {
            let verdict = store.verify(&output.blake3, output.bytes).unwrap();
            assert_eq!(verdict, ObjectCondition::Sound);
        }
    }
}

/// A file system that stays mounted as long as this value lives.
struct Image {
    at: PathBuf,
    _dir: TempDir,
}

impl Image {
    /// A file system in an image file, made by the command `make`.
    fn new(make: &[&str], options: &str) -> Option<Image> {
        let dir = tempfile::tempdir().unwrap();
        let (image, at) = (dir.path().join("image"), dir.path().join("at"));
        File::create(&image).unwrap().set_len(400 << 20).unwrap();
        std::fs::create_dir(&at).unwrap();
        let mut mount = Command::new("mount");
        mount.arg("-o").arg(options).args([&image, &at]);
        let mounted = run(Command::new(make[0]).args(&make[1..]).arg(&image)) && run(&mut mount);
        mounted.then_some(Image { at, _dir: dir })
    }

    fn mounted_at(dir: TempDir) -> Image {
        Image {
            at: dir.path().to_path_buf(),
            _dir: dir,
        }
    }

    fn at(&self) -> &Path {
        &self.at
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // Unmount lazily: another test that has just forked holds this process's descriptors until it calls execve.
        run(Command::new("umount").arg("-l").arg(&self.at));
    }
}

fn run(command: &mut Command) -> bool {
    let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

#[test]
fn a_file_system_with_reflinks_shares_the_blocks_of_a_copy() {
    if !is_root() {
        println!("UNAVAILABLE: only root can mount a file system to try this on");
        return;
    }
    let Some(image) = Image::new(&["mkfs.xfs", "-q"], "loop") else {
        println!("UNAVAILABLE: no XFS can be made and mounted here");
        return;
    };
    let at = image.at();
    let scene = TestStore::with(Vec::new(), at.join("workspace"), at.join("store"));
    let output = scene.file(b"a", &[1; 1 << 20]);
    let taken = scene.take(&output, TransferMode::Copy).unwrap();
    assert_eq!(taken, TransferMethod::Reflinked);
    std::fs::write(scene.path(&output), "changed").unwrap();
    scene.assert_kept(&output);
    let moved = scene.file(b"b", &[2; 1 << 20]);
    assert_eq!(
        scene.take(&moved, TransferMode::Move).unwrap(),
        TransferMethod::Linked
    );
    scene.assert_kept(&moved);
    drop(scene);
}

#[test]
fn an_object_leaves_the_project_whose_quota_held_the_workspace() {
    if !is_root() {
        println!("UNAVAILABLE: only root can mount a file system to try this on");
        return;
    }
    // XFS records a file's project even if the kernel cannot enforce project quotas.
    let Some(image) = Image::new(&["mkfs.xfs", "-q"], "loop") else {
        println!("UNAVAILABLE: no XFS can be made and mounted here");
        return;
    };
    let at = image.at();
    let scene = TestStore::with(Vec::new(), at.join("workspace"), at.join("store"));
    let mut mark = Command::new("chattr");
    assert!(run(mark.args(["-p", "4711", "+P"]).arg(&scene.workspace)));
    let project = |path: &Path| {
        let told = Command::new("lsattr").arg("-p").arg(path).output().unwrap();
        let told = String::from_utf8(told.stdout).unwrap();
        told.split_whitespace().next().unwrap().to_owned()
    };
    let output = scene.file(b"a", b"content");
    assert_eq!(project(&scene.path(&output)), "4711", "the control");
    scene.take(&output, TransferMode::Move).unwrap();
    scene.assert_kept(&output);
    assert_eq!(project(&scene.object(&output)), "0");
    drop(scene);
}

#[test]
fn a_full_disk_is_told_and_leaves_nothing_behind() {
    if !is_root() {
        println!("UNAVAILABLE: only root can mount a file system to try this on");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=4m", "fumehood-test"]);
    assert!(run(mount.arg(dir.path())));
    let small = Image::mounted_at(dir);
    let disk = tempfile::tempdir().unwrap();
    let workspace = disk.path().join("workspace");
    let scene = TestStore::with(vec![disk], workspace, small.at().join("store"));
    let control = scene.file(b"control", &[1; 1 << 20]);
    scene.take(&control, TransferMode::Move).unwrap();
    let output = scene.file(b"a", &[2; 8 << 20]);
    let taken = scene.take(&output, TransferMode::Move);
    let Err(ArtifactError::Place { source, .. }) = &taken else {
        panic!("{taken:?}");
    };
    assert_eq!(source.kind(), io::ErrorKind::StorageFull);
    scene.assert_kept(&control);
    assert_eq!(count_objects(&scene.store), 1);
    // Another test that has just forked also holds the nameless file until it calls execve.
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    let free = || rustix::fs::statvfs(small.at()).map(|s| s.f_bfree * s.f_frsize);
    while free().unwrap() < 2 << 20 {
        assert!(std::time::Instant::now() < deadline, "the space is back");
        std::thread::yield_now();
    }
    drop(scene);
}

/// Runs all tests above and in the parent module as a user who is not root.
#[test]
fn all_of_this_as_a_plain_user() {
    if !is_root() {
        println!("this is the plain user, or root is not at hand");
        return;
    }
    let home = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(home.path(), Some(PLAIN_UID), Some(PLAIN_UID)).unwrap();
    let module = module_path!().split_once("::").unwrap().1;
    let parent = module.rsplit_once("::").unwrap().0;
    let mut command = Command::new("/proc/self/exe");
    command.args([parent, "--test-threads=2"]);
    command.env("TMPDIR", home.path()).current_dir("/");
    let out = command.uid(PLAIN_UID).gid(PLAIN_UID).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}");
    assert!(text.contains("a_moved_file_is_the_object_itself"), "{text}");
}
