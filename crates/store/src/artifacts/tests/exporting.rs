//! Tests of the export: what it writes, and where it must not write.

use super::*;

pub(super) fn export_all(
    store: &Artifacts,
    outputs: &[Output],
    to: &Path,
    overwrite: Overwrite,
) -> Result<Vec<ExportedFile>, ExportError> {
    let outputs: Vec<_> = outputs
        .iter()
        .map(|o| (o.path.clone(), o.bytes, o.blake3))
        .collect();
    let mut source = |hash: &ContentHash| {
        let file = store.open_object(hash).map_err(io::Error::other)?;
        Ok(ExportContent::File(file))
    };
    export(&mut source, &outputs, to, overwrite, u64::MAX)
}

/// A store with three outputs, and a directory to export to.
fn to_export() -> (TestStore, Vec<Output>, PathBuf) {
    let scene = TestStore::new();
    let outputs = vec![
        scene.file(b"a", b"content of a"),
        scene.file(b"dir/b \xff", b"content of b"),
        scene.file(b"dir/deeper/c", b""),
    ];
    for output in &outputs {
        scene.take(output, TransferMode::Move).unwrap();
    }
    let to = scene._dirs[0].path().join("to");
    (scene, outputs, to)
}

fn list(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for entry in dir.read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.symlink_metadata().unwrap().is_dir() {
            found.extend(list(&path));
        }
        found.push(path);
    }
    found.sort();
    found
}

#[test]
fn an_export_writes_everything_with_its_sha256() {
    let (scene, outputs, to) = to_export();
    let exported = export_all(&scene.store, &outputs, &to, Overwrite::Never).unwrap();
    assert_eq!(exported.len(), 3);
    assert_eq!(
        exported[2].sha256, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "of nothing"
    );
    let name = to.join(OsStr::from_bytes(b"dir/b \xff"));
    assert_eq!(std::fs::read(&name).unwrap(), b"content of b");
    // umask can only be read by setting it, which would affect files of other tests.
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let umask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    let umask = u32::from_str_radix(umask.unwrap().trim(), 8).unwrap();
    assert_eq!(mode(&name), 0o644 & !umask);
    assert_eq!(mode(&to.join("dir")), 0o755 & !umask);
    assert_eq!(list(&to).len(), 5, "and nothing else");
    // The same from bytes in the database.
    let bytes = [(outputs[0].path.clone(), 12, outputs[0].blake3)];
    let mut source = |_: &ContentHash| Ok(ExportContent::Bytes(b"content of a".to_vec()));
    let again = export(
        &mut source,
        &bytes,
        &to.join("again"),
        Overwrite::Never,
        u64::MAX,
    )
    .unwrap();
    assert_eq!(again[0].sha256, exported[0].sha256);
}

#[test]
fn an_export_overwrites_nothing_and_finds_all_conflicts_before_it_writes() {
    let (scene, outputs, to) = to_export();
    std::fs::create_dir_all(to.join("dir/deeper")).unwrap();
    std::fs::write(to.join("dir/deeper/c"), "mine").unwrap();
    let before = list(&to);
    let refused = export_all(&scene.store, &outputs, &to, Overwrite::Never);
    let Err(ExportError::Conflicts { first, count, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(count, 1);
    assert!(first[0].starts_with("dir/deeper/c exists"), "{first:?}");
    assert_eq!(list(&to), before, "nothing was written");
    assert_eq!(std::fs::read(to.join("dir/deeper/c")).unwrap(), b"mine");

    export_all(&scene.store, &outputs, &to, Overwrite::Files).unwrap();
    assert_eq!(std::fs::read(to.join("dir/deeper/c")).unwrap(), b"");
    assert_eq!(std::fs::read(to.join("a")).unwrap(), b"content of a");

    // Not even `--force` replaces a directory.
    std::fs::remove_file(to.join("a")).unwrap();
    std::fs::create_dir(to.join("a")).unwrap();
    for overwrite in [Overwrite::Never, Overwrite::Files] {
        let refused = export_all(&scene.store, &outputs, &to, overwrite);
        assert!(matches!(refused, Err(ExportError::Conflicts { .. })));
    }
    let twice = [outputs[1].clone(), outputs[1].clone()];
    let below = Output {
        path: OutputPath::new(b"dir/deeper/c/d".to_vec()).unwrap(),
        ..outputs[0].clone()
    };
    for wrong in [&twice[..], &[outputs[2].clone(), below]] {
        let elsewhere = to.join("elsewhere");
        let refused = export_all(&scene.store, wrong, &elsewhere, Overwrite::Files);
        assert!(matches!(refused, Err(ExportError::Conflicts { .. })));
        assert_eq!(list(&elsewhere).len(), 0);
    }
}

#[test]
fn an_export_never_goes_through_a_link() {
    let (scene, outputs, to) = to_export();
    let outside = scene._dirs[0].path().join("outside");
    std::fs::create_dir_all(&outside).unwrap();
    std::fs::write(outside.join("victim"), "precious").unwrap();
    std::fs::create_dir(&to).unwrap();
    let links = [
        ("dir", outside.clone()),
        ("a", outside.join("victim")),
        ("a", outside.join("not there")),
    ];
    for (name, target) in links {
        for overwrite in [Overwrite::Never, Overwrite::Files] {
            std::fs::remove_dir_all(&to).unwrap();
            std::fs::create_dir(&to).unwrap();
            symlink(&target, to.join(name)).unwrap();
            let exported = export_all(&scene.store, &outputs, &to, overwrite);
            if (name, overwrite) == ("a", Overwrite::Files) {
                exported.unwrap();
                let meta = to.join("a").symlink_metadata().unwrap();
                assert!(meta.is_file(), "the link itself was replaced");
            } else {
                assert!(matches!(exported, Err(ExportError::Conflicts { .. })));
                assert_eq!(list(&to).len(), 1, "nothing was written");
            }
            assert_eq!(list(&outside), [outside.join("victim")]);
            let victim = std::fs::read(outside.join("victim")).unwrap();
            assert_eq!(victim, b"precious");
        }
    }
}

/// The directory to export to may lead through a link, and may have missing parts behind the link.
#[test]
fn an_export_makes_no_directory_behind_a_link() {
    let (scene, outputs, to) = to_export();
    let outside = scene._dirs[0].path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::create_dir(&to).unwrap();
    symlink(&outside, to.join("link")).unwrap();
    symlink(outside.join("not there"), to.join("dangling")).unwrap();
    for below in [
        "link/new",
        "link/new/deep/",
        "new/../link/deep",
        "dangling/new",
    ] {
        let refused = export_all(&scene.store, &outputs, &to.join(below), Overwrite::Never);
        let Err(ExportError::Open { path, source }) = refused else {
            panic!("{below}: {refused:?}");
        };
        assert_eq!(path, to.join(below));
        assert_eq!(Errno::from_io_error(&source), Some(Errno::LOOP), "{below}");
        assert_eq!(list(&outside).len(), 0, "{below}");
    }
    // Without a link, every missing part is made.
    for below in ["x/y/", "x/z/../../v/./w"] {
        export_all(&scene.store, &outputs, &to.join(below), Overwrite::Never).unwrap();
    }
    assert!(to.join("x/y/a").is_file() && to.join("v/w/a").is_file() && to.join("x/z").is_dir());
}

/// Another thread puts a link in the place of a missing part of the directory all the time, and takes it away again.
#[test]
fn an_export_makes_no_directory_behind_a_link_that_appears_meanwhile() {
    let (scene, outputs, to) = to_export();
    let outside = scene._dirs[0].path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::create_dir(&to).unwrap();
    let part = to.join("part");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // Both fail while the part is a directory that the export made.
                let _ = symlink(&outside, &part);
                let _ = std::fs::remove_file(&part);
            }
        });
        let (mut done, mut refused) = (0, 0);
        for _ in 0..20_000 {
            let deep = part.join("new/deep");
            match export_all(&scene.store, &outputs[..1], &deep, Overwrite::Never) {
                Ok(_) => {
                    std::fs::remove_dir_all(&part).unwrap();
                    done += 1;
                }
                Err(_) => refused += 1,
            }
            if done >= 50 && refused >= 50 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(done > 0 && refused > 0, "both were met: {done}, {refused}");
    });
    assert_eq!(list(&outside).len(), 0);
}

/// Another thread exchanges the directory and a link all the time.
#[test]
fn an_export_never_goes_through_a_link_that_appears_meanwhile() {
    let (scene, outputs, to) = to_export();
    let outside = scene._dirs[0].path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::create_dir_all(to.join("dir")).unwrap();
    let (dir, link) = (to.join("dir"), to.join("link"));
    symlink(&outside, &link).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let cwd = rustix::fs::CWD;
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(cwd, &dir, cwd, &link, flags).unwrap();
            }
        });
        let (mut done, mut refused) = (0, 0);
        for _ in 0..20_000 {
            match export_all(&scene.store, &outputs[1..2], &to, Overwrite::Files) {
                Ok(_) => done += 1,
                Err(_) => refused += 1,
            }
            if done >= 50 && refused >= 50 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(done > 0 && refused > 0, "both were met: {done}, {refused}");
    });
    assert_eq!(list(&outside).len(), 0);
}

/// A file that appears after the check for conflicts is not overwritten either.
#[test]
fn an_export_overwrites_nothing_that_appears_meanwhile() {
    let (scene, outputs, to) = to_export();
    let outside = scene._dirs[0].path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    let name = |o: &Output| (o.path.clone(), o.bytes, o.blake3);
    let all: Vec<_> = outputs.iter().map(name).collect();
    let mut source = |hash: &ContentHash| {
        if *hash == outputs[0].blake3 {
            std::fs::write(to.join("a"), "mine").unwrap();
        }
        Ok(ExportContent::File(scene.store.open_object(hash).unwrap()))
    };
    let exported = export(&mut source, &all, &to, Overwrite::Never, u64::MAX);
    assert!(matches!(exported, Err(ExportError::Write { .. })));
    assert_eq!(std::fs::read(to.join("a")).unwrap(), b"mine");
    assert_eq!(list(&to), [to.join("a")], "no draft is left");

    let mut source = |hash: &ContentHash| {
        if *hash == outputs[1].blake3 {
            symlink(&outside, to.join("dir")).unwrap();
        }
        Ok(ExportContent::File(scene.store.open_object(hash).unwrap()))
    };
    let exported = export(&mut source, &all, &to, Overwrite::Files, u64::MAX);
    let Err(ExportError::Write { path, written, .. }) = exported else {
        panic!("{exported:?}");
    };
    assert_eq!((path, written.len()), (outputs[1].path.clone(), 1));
    assert_eq!(list(&outside).len(), 0);
}

#[test]
fn a_damaged_object_is_not_exported_and_what_was_written_is_told() {
    let (scene, outputs, to) = to_export();
    let object = scene.object(&outputs[1]);
    set_mode(&object, 0o600);
    std::fs::write(&object, "CONTENT of b").unwrap();
    let exported = export_all(&scene.store, &outputs, &to, Overwrite::Never);
    let Err(ExportError::Damaged { path, written }) = exported else {
        panic!("{exported:?}");
    };
    assert_eq!(path, outputs[1].path);
    assert_eq!(written.len(), 1);
    assert_eq!(list(&to), [to.join("a"), to.join("dir")]);
    std::fs::remove_file(&object).unwrap();
    let exported = export_all(&scene.store, &outputs, &to.join("2"), Overwrite::Never);
    assert!(matches!(exported, Err(ExportError::Write { .. })));
}

/// One content under many names: copies within the bound, and no more. A write to one file does not change another.
#[test]
fn equal_outputs_are_files_of_their_own_within_the_bound() {
    let scene = TestStore::new();
    let one = scene.file(b"a", &[7; 100_000]);
    scene.take(&one, TransferMode::Move).unwrap();
    let names: Vec<_> = ["a", "b", "dir/c", "d"]
        .map(|name| OutputPath::new(name.into()).unwrap())
        .map(|path| (path, one.bytes, one.blake3))
        .into();
    let export_within = |to: &Path, bytes_max: u64| {
        let mut source =
            |hash: &ContentHash| Ok(ExportContent::File(scene.store.open_object(hash).unwrap()));
        export(&mut source, &names, to, Overwrite::Never, bytes_max)
    };
    let inodes = |to: &Path| -> HashSet<u64> {
        let files = list(to).into_iter().filter(|path| path.is_file());
        files
            .map(|path| std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap()))
            .collect()
    };
    let to = scene._dirs[0].path().join("to");
    let exported = export_within(&to, 400_000).unwrap();
    let paths: Vec<_> = exported.iter().map(|e| e.path.text()).collect();
    assert_eq!(paths, ["a", "b", "dir/c", "d"], "in the order given");
    assert!(exported.iter().all(|e| e.sha256 == exported[0].sha256));
    assert_eq!(inodes(&to).len(), 4);
    std::fs::write(to.join("a"), "changed").unwrap();
    assert_eq!(std::fs::read(to.join("b")).unwrap(), [7; 100_000]);

    // A record from before every name counted towards the size.
    let old = scene._dirs[0].path().join("old");
    let exported = export_within(&old, 200_000).unwrap();
    assert_eq!(exported.len(), 4);
    for name in ["a", "b", "dir/c", "d"] {
        assert_eq!(std::fs::read(old.join(name)).unwrap(), [7; 100_000]);
    }
    let cloned = inodes(&old).len() == 4;
    assert!(cloned || inodes(&old).len() == 2, "copied or linked");

    let none = scene._dirs[0].path().join("none");
    let exported = export_within(&none, 99_999);
    assert!(matches!(exported, Err(ExportError::Write { .. })));
    assert_eq!(list(&none).len(), 0);
}
