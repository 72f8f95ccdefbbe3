//! How an attempt gets its run directory, and what else the home has of the same id.

use std::io;
use std::path::{Path, PathBuf};

use super::dir::{RECORD, RunDir};
use super::record::{RunRecord, RunState};
use crate::home::{Home, HomeError, create_private_dir};
use store::types::analysis_id::AnalysisId;

impl RunDir {
    /// Claims `runs/{id}/{attempt}`. Fails while any attempt of the id has a directory.
    pub fn claim(home: &Home, id: &AnalysisId, attempt: u32) -> Result<RunDir, HomeError> {
        let path = home.runs().join(id.as_str()).join(attempt.to_string());
        for other in sibling_dirs(home, id).filter(|other| *other != path) {
            check_sibling(&other, id)?;
        }
        // A reaper may remove the empty directory, or hold its lock for a moment. Then try again.
        const TRIES: u32 = 200;
        for _ in 0..TRIES {
            match RunDir::try_claim(&path, id) {
                Ok(Some(dir)) => return Ok(dir),
                Err(HomeError::Make { source, .. } | HomeError::Lock { source, .. })
                    if source.kind() == io::ErrorKind::NotFound => {}
                Ok(None) => {}
                Err(e) => return Err(e),
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        Err(HomeError::Running { id: id.clone() })
    }

    fn try_claim(path: &Path, id: &AnalysisId) -> Result<Option<RunDir>, HomeError> {
        create_private_dir(path)?;
        let Some(dir) = RunDir::try_lock(path)? else {
            return check_holder(path, id).map(|()| None);
        };
        match dir.read_record() {
            Ok(Some(record)) => Err(conflict_error(record)),
            // Remove files of an earlier attempt whose removal was interrupted: they must not be taken for files of
            // this attempt.
            Ok(None) => dir.clear().map(|()| Some(dir)),
            Err(e) => Err(e),
        }
    }

    /// Opens the directory that an id has: of a workspace that `workspace create` made, or of an attempt that awaits
    /// its commit.
    pub fn find(home: &Home, id: &AnalysisId) -> Result<Option<(RunDir, RunRecord)>, HomeError> {
        for path in sibling_dirs(home, id) {
            let Some(dir) = RunDir::try_lock(&path)? else {
                return Err(HomeError::Running { id: id.clone() });
            };
            if let Some(record) = dir.read_record()? {
                return Ok(Some((dir, record)));
            }
        }
        Ok(None)
    }
}

/// Whether this attempt has a directory here, running or not yet finished.
pub fn attempt_exists(home: &Home, id: &AnalysisId, attempt: u32) -> bool {
    let name = Path::new(id.as_str()).join(attempt.to_string());
    [home.runs(), home.pending()]
        .iter()
        .any(|base| base.join(&name).exists())
}

/// Whether this attempt has a directory here and its key is the given one, so that it can be finished here.
pub fn attempt_exists_with_key(home: &Home, id: &AnalysisId, attempt: u32, key: &str) -> bool {
    let name = Path::new(id.as_str()).join(attempt.to_string());
    [home.runs(), home.pending()]
        .iter()
        .filter_map(|base| RunDir::peek(&base.join(&name))?.commit_plan)
        .any(|commit_plan| commit_plan.key == key)
}

/// The directories of all attempts of an id, running or pending.
fn sibling_dirs(home: &Home, id: &AnalysisId) -> impl Iterator<Item = PathBuf> {
    let list = |base: PathBuf| std::fs::read_dir(base.join(id.as_str()));
    let entries = [list(home.runs()), list(home.pending())];
    entries
        .into_iter()
        .flatten()
        .flatten()
        .flatten()
        .map(|e| e.path())
}

/// Fails if another attempt of the same id exists, because both would have the same workspace.
fn check_sibling(other: &Path, id: &AnalysisId) -> Result<(), HomeError> {
    match RunDir::try_lock(other) {
        Ok(Some(dir)) => dir
            .read_record()?
            .map_or(Ok(()), |record| Err(conflict_error(record))),
        Ok(None) => check_holder(other, id),
        Err(HomeError::Lock { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

/// Fails if a runner holds the lock of a directory. A runner writes its record at once. Without a record, the lock
/// holder is a reaper or a runner that has just started.
fn check_holder(path: &Path, id: &AnalysisId) -> Result<(), HomeError> {
    match path.join(RECORD).exists() {
        true => Err(HomeError::Running { id: id.clone() }),
        false => Ok(()),
    }
}

/// Why an id cannot be claimed while this attempt of it, whose runner is gone, has a directory.
fn conflict_error(record: RunRecord) -> HomeError {
    let RunRecord {
        id,
        workspace,
        state,
        commit_plan,
        ..
    } = record;
    match state {
        RunState::Kept { .. } | RunState::Recorded => HomeError::Kept { id, workspace },
        RunState::Open { .. } => HomeError::Open { id },
        RunState::Ran => HomeError::RanAlready { id },
        RunState::Live if commit_plan.is_some() => HomeError::Pending { id },
        // The reaper could not finish it just now.
        RunState::Live | RunState::Quarantined => HomeError::Running { id },
    }
}
