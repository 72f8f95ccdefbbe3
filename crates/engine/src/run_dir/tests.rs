//! Locks, records and reserved space of run directories.

use std::io;
use std::path::{Path, PathBuf};

use super::dir::RECORD;
use super::*;
use crate::home::{Home, HomeError, boot_id, create_private_dir, machine_id};
use store::types::analysis_id::AnalysisId;

const ID: &str = "mine";

fn home() -> (tempfile::TempDir, Home) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("home");
    let home = Home::find(&|_| Some(path.clone())).unwrap().open().unwrap();
    (dir, home)
}

fn id() -> AnalysisId {
    AnalysisId::new(ID).unwrap()
}

fn record() -> RunRecord {
    RunRecord {
        version: RECORD_VERSION,
        id: id(),
        attempt: 1,
        host: machine_id(),
        boot_id: boot_id(),
        runner_pid: 1,
        workspace: PathBuf::from("/srv/w/scidex-analysis-mine"),
        draft: PathBuf::from("/srv/w/.scidex-analysis-mine-0123"),
        workspace_identity: None,
        uid: None,
        project_quota: None,
        cgroups: Vec::new(),
        init: None,
        state: RunState::Live,
        prepared: false,
        commit_plan: None,
    }
}

/// What may happen between the open and the lock: the directory is removed, and another attempt's is created in its
/// place.
fn replace(path: &Path) {
    std::fs::rename(path, path.with_extension("old")).unwrap();
    std::fs::remove_dir_all(path.with_extension("old")).unwrap();
    create_private_dir(path).unwrap();
}

#[test]
fn a_lock_on_a_replaced_directory_does_not_count() {
    let (_dir, home) = home();
    let dir = RunDir::claim(&home, &id(), 1).unwrap();
    assert!(dir.is_in_place());
    replace(&dir.path);
    assert!(!dir.is_in_place());
    let path = dir.path.clone();
    // The stale lock does not block the lock of the new directory.
    assert!(RunDir::try_lock(&path).unwrap().is_some());
}

/// A process that removes the directory holds its lock. So a process that gets a lock, and then compares it with the
/// directory at the path, must find the same directory, however many others came in between. Many threads try, so that
/// some are interrupted between open and lock.
#[test]
fn a_lock_is_never_given_on_a_directory_that_is_gone() {
    const CONTENDERS: u32 = 16;
    const TURNS: u32 = 1000;
    let (_dir, home) = home();
    let path = home.runs().join(ID).join("1");
    let contend = || {
        for _ in 0..TURNS {
            // This fails if another thread has just removed the parent.
            let _ = create_private_dir(&path);
            match RunDir::try_lock(&path) {
                Ok(Some(dir)) => {
                    assert!(dir.is_in_place());
                    dir.remove().unwrap();
                }
                Ok(None) => {}
                Err(HomeError::Lock { source, .. }) => {
                    assert_eq!(source.kind(), io::ErrorKind::NotFound);
                }
                Err(e) => panic!("{e}"),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..CONTENDERS {
            scope.spawn(contend);
        }
    });
}

#[test]
fn a_stale_run_directory_never_touches_the_new_one() {
    let (_dir, home) = home();
    let stale = RunDir::claim(&home, &id(), 1).unwrap();
    stale.write_record(&record()).unwrap();
    let path = stale.path.clone();
    replace(&path);
    let new = RunDir::try_lock(&path).unwrap().unwrap();
    let theirs = RunRecord {
        runner_pid: 2,
        ..record()
    };
    new.write_record(&theirs).unwrap();

    assert_eq!(stale.read_record().unwrap(), None, "its own record is gone");
    stale.write_record(&record()).unwrap_err();
    assert_eq!(new.read_record().unwrap(), Some(theirs.clone()));
    stale.remove().unwrap();
    assert!(new.is_in_place());
    assert_eq!(new.read_record().unwrap(), Some(theirs));
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1);
}

/// Covers records that fit into the page of the previous one, and records that do not.
#[test]
fn the_record_that_was_written_last_is_the_one_that_is_read() {
    let (_dir, home) = home();
    let dir = RunDir::claim(&home, &id(), 1).unwrap();
    for groups in [0, 30, 1, 500, 2, 0] {
        let written = RunRecord {
            cgroups: vec![PathBuf::from("/sys/fs/cgroup/pids/x"); groups],
            init: None,
            ..record()
        };
        dir.write_record(&written).unwrap();
        assert_eq!(
            dir.read_record().unwrap(),
            Some(written.clone()),
            "{groups}"
        );
        let text = std::fs::read(dir.path.join(RECORD)).unwrap();
        serde_json::from_slice::<RunRecord>(&text).unwrap();
        if groups == 1 {
            dir.write_record_durably(&written).unwrap();
            assert_eq!(dir.read_record().unwrap(), Some(written));
        }
    }
    let left = std::fs::read_dir(&dir.path).unwrap().count();
    assert_eq!(left, 1, "no draft stays");
    drop(dir);
    let path = home.runs().join(ID).join("1");
    let again = RunDir::try_lock(&path).unwrap().unwrap();
    assert_eq!(again.read_record().unwrap(), Some(record()));
}

/// The test also passes where the file system reserves nothing.
#[test]
fn a_durable_outcome_frees_its_reserved_space() {
    use std::os::unix::fs::MetadataExt;
    let (_dir, home) = home();
    let dir = RunDir::claim(&home, &id(), 1).unwrap();
    dir.reserve_outcome_space();
    dir.write_file(StateFile::Outcome, &"it ended", Durability::Unsynced)
        .unwrap();
    let path = dir.path.join(StateFile::Outcome.name());
    assert_eq!(
        dir.read_file(StateFile::Outcome).unwrap(),
        Some("it ended".to_owned())
    );
    let reserved = path.metadata().unwrap().blocks() * 512;
    dir.make_durable().unwrap();
    let kept = path.metadata().unwrap().blocks() * 512;
    assert!(kept <= 64 << 10, "{reserved} bytes before, {kept} now");
    assert_eq!(
        dir.read_file(StateFile::Outcome).unwrap(),
        Some("it ended".to_owned())
    );
}

#[test]
fn a_record_that_names_other_paths_is_refused() {
    let (_dir, home) = home();
    let dir = RunDir::claim(&home, &id(), 1).unwrap();
    dir.write_record(&record()).unwrap();
    assert_eq!(dir.read_record().unwrap(), Some(record()), "the control");
    let with = |change: &dyn Fn(&mut RunRecord)| {
        let mut changed = record();
        change(&mut changed);
        changed
    };
    let forged = [
        with(&|r| r.workspace = "/home/ada".into()),
        with(&|r| r.workspace = "/srv/w/scidex-analysis-other".into()),
        with(&|r| r.workspace = "/srv/w/scidex-analysis-mine2".into()),
        with(&|r| r.workspace = "/srv/w/scidex-analysis-mine/..".into()),
        with(&|r| r.workspace = "/".into()),
        with(&|r| r.draft = "/home/ada".into()),
        with(&|r| r.draft = "/srv/w/.scidex-analysis-other-0123".into()),
        with(&|r| r.draft = "/home/.scidex-analysis-mine-0123".into()),
        // Consistent in itself, but in the wrong directory.
        with(&|r| {
            r.id = AnalysisId::new("other").unwrap();
            r.workspace = "/srv/w/scidex-analysis-other".into();
            r.draft = "/srv/w/.scidex-analysis-other-0123".into();
        }),
    ];
    for record in forged {
        dir.write_record(&record).unwrap();
        let read = dir.read_record();
        assert!(matches!(read, Err(HomeError::Read { .. })), "{record:?}");
    }
}

#[test]
fn a_record_that_another_user_wrote_or_that_is_no_file_is_refused() {
    let (_dir, home) = home();
    let dir = RunDir::claim(&home, &id(), 1).unwrap();
    dir.write_record(&record()).unwrap();
    let path = dir.path.join(RECORD);
    let aside = dir.path.join("aside");
    // Only root can give a file away. Other users skip this part.
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(54321), None).unwrap();
        assert!(matches!(dir.read_record(), Err(HomeError::Read { .. })));
        std::os::unix::fs::chown(&path, Some(0), None).unwrap();
        dir.read_record().unwrap().unwrap();
    }
    std::fs::rename(&path, &aside).unwrap();
    std::os::unix::fs::symlink(&aside, &path).unwrap();
    assert!(matches!(dir.read_record(), Err(HomeError::Read { .. })));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(matches!(dir.read_record(), Err(HomeError::Read { .. })));
}

#[test]
fn a_damaged_record_is_not_treated_as_missing() {
    let (_dir, home) = home();
    let path = home.runs().join(ID).join("1");
    drop(RunDir::claim(&home, &id(), 1).unwrap());
    for text in ["", "{", "[]", "{\"version\":99}", "\0\0\0\0"] {
        std::fs::write(path.join(RECORD), text).unwrap();
        let claimed = RunDir::claim(&home, &id(), 1);
        assert!(matches!(claimed, Err(HomeError::Read { .. })), "{text:?}");
        let left = std::fs::read(path.join(RECORD)).unwrap();
        assert_eq!(left, text.as_bytes(), "left as it was, to be looked at");
    }
    std::fs::remove_file(path.join(RECORD)).unwrap();
    RunDir::claim(&home, &id(), 1).unwrap();
}
