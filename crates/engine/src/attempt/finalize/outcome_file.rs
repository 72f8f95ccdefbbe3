//! How the program ended, as `outcome.json` in the run directory.

use serde::{Deserialize, Serialize};

use super::logs;
use crate::attempt::error::{CommitError, pass_crash_point};
use crate::attempt::finalize::ended_attempt::EndedAttempt;
use crate::attempt::record::Record;
use crate::home::HomeError;
use crate::run_dir::{Durability, RunDir, StateFile};
use store::types::crash_points::CrashPoint;

/// The content of `outcome.json`. The logs are in files beside it.
#[derive(Serialize, Deserialize)]
struct StoredOutcome<R> {
    version: u32,
    /// The logs in this record have no text.
    record: R,
}

const OUTCOME_VERSION: u32 = 1;

/// Writes the logs and the outcome. From here on a kill loses nothing of them. If the disk is full and the logs do not
/// fit, there is still reserved space for the outcome.
pub fn write(ended: &EndedAttempt<'_>) -> Result<(), CommitError> {
    let kept =
        logs::write(ended).and(pass_crash_point(CrashPoint::LogsKept).map_err(CommitError::from));
    kept.and(write_unsynced(ended.dir, ended.outcome))
}

/// Writes only the outcome, for a runner that died: its logs are the files that had arrived. Survives a power cut.
pub fn write_durably(dir: &RunDir, record: &Record) -> Result<(), CommitError> {
    write_unsynced(dir, record)?;
    Ok(dir.make_durable()?)
}

/// Writes the outcome without syncing it. A power cut may destroy it until the run directory is made durable.
pub(crate) fn write_unsynced(dir: &RunDir, record: &Record) -> Result<(), CommitError> {
    let outcome = StoredOutcome {
        version: OUTCOME_VERSION,
        record,
    };
    dir.write_file(StateFile::Outcome, &outcome, Durability::Unsynced)?;
    Ok(pass_crash_point(CrashPoint::OutcomeWritten)?)
}

/// Reads the outcome. One that a power cut tore counts as missing.
pub fn read(dir: &RunDir) -> Result<Option<Record>, HomeError> {
    match dir.read_file::<StoredOutcome<Record>>(StateFile::Outcome) {
        Err(e) if e.is_torn() => Ok(None),
        read => Ok(read?.map(|stored| stored.record)),
    }
}
