//! What else stands in the home of the same id, or of the same attempt.

use std::io;
use std::path::{Path, PathBuf};

use super::{RECORD, RunDir, RunRecord, RunState};
use crate::home::{Home, HomeError};
use crate::request::AnalysisId;

/// Whether something of this attempt is here, running or not yet finished.
pub fn stands(home: &Home, id: &AnalysisId, attempt: u32) -> bool {
    let name = Path::new(id.as_str()).join(attempt.to_string());
    [home.runs(), home.pending()]
        .iter()
        .any(|base| base.join(&name).exists())
}

/// Whether what stands here of this attempt is of this very one, and can be finished.
pub fn holds(home: &Home, id: &AnalysisId, attempt: u32, key: &str) -> bool {
    let name = Path::new(id.as_str()).join(attempt.to_string());
    let record = |base: PathBuf| -> Option<RunRecord> {
        let text = std::fs::read(base.join(&name).join(RECORD)).ok()?;
        serde_json::from_slice(&text).ok()
    };
    let of_it = |record: RunRecord| record.task.is_some_and(|task| task.key == key);
    let bases = [home.runs(), home.pending()];
    bases.into_iter().filter_map(record).any(of_it)
}

/// Every attempt of an id that has a directory, wherever it stands.
pub(super) fn siblings(home: &Home, id: &AnalysisId) -> impl Iterator<Item = PathBuf> {
    let list = |base: PathBuf| std::fs::read_dir(base.join(id.as_str()));
    let entries = [list(home.runs()), list(home.pending())];
    entries
        .into_iter()
        .flatten()
        .flatten()
        .flatten()
        .map(|e| e.path())
}

/// Another attempt of the same id has the same workspace.
pub(super) fn refuse_beside(other: &Path, id: &AnalysisId) -> Result<(), HomeError> {
    match RunDir::try_lock(other) {
        Ok(Some(dir)) => dir.read()?.map_or(Ok(()), |record| Err(in_the_way(record))),
        Ok(None) => match other.join(RECORD).exists() {
            true => Err(HomeError::Running { id: id.clone() }),
            false => Ok(()),
        },
        Err(HomeError::Lock { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

/// Why an id cannot be begun while this attempt of it, whose runner is gone, has a directory.
pub(super) fn in_the_way(record: RunRecord) -> HomeError {
    let RunRecord {
        id,
        workspace,
        state,
        task,
        ..
    } = record;
    match state {
        RunState::Kept { .. } | RunState::Recorded => HomeError::Kept { id, workspace },
        RunState::Open { .. } => HomeError::Open { id },
        RunState::Ran => HomeError::RanAlready { id },
        RunState::Live if task.is_some() => HomeError::Pending { id },
        // It could not be reaped just now.
        RunState::Live | RunState::Quarantined => HomeError::Running { id },
    }
}
