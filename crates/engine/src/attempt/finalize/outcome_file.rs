//! How the program ended, as `outcome.json` in the run directory.

use serde::{Deserialize, Serialize};

use super::logs;
use crate::attempt::error::{CommitError, pass_crash_point};
use crate::attempt::log_capture::CapturedLog;
use crate::attempt::record::Record;
use crate::home::HomeError;
use crate::run_dir::{Durability, RunDir, StateFile};
use store::types::crash_points::CrashPoint;

/// The content of `outcome.json`. The logs are in files beside it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StoredOutcome {
    version: u32,
    /// The logs in this record have no text.
    pub record: Record,
}

const OUTCOME_VERSION: u32 = 1;

/// Writes the logs and the outcome. From here on a kill loses nothing of them. If the disk is full and the logs do not
/// fit, there is still reserved space for the outcome.
pub fn write(dir: &RunDir, record: &Record, logs: [&CapturedLog; 2]) -> Result<(), CommitError> {
    let kept = logs::write(dir, logs)
        .and(pass_crash_point(CrashPoint::LogsKept).map_err(CommitError::from));
    kept.and(write_unsynced(dir, record))
}

/// Writes only the outcome, for a runner that died: its logs are the files that had arrived. Survives a power cut.
pub fn write_durably(dir: &RunDir, record: &Record) -> Result<(), CommitError> {
    write_unsynced(dir, record)?;
    Ok(dir.make_durable()?)
}

/// Writes the outcome without syncing it. A power cut may destroy it until the run directory is made durable.
pub(crate) fn write_unsynced(dir: &RunDir, record: &Record) -> Result<(), CommitError> {
    let ending = StoredOutcome {
        version: OUTCOME_VERSION,
        record: record.clone(),
    };
    dir.write_file(StateFile::Outcome, &ending, Durability::Unsynced)?;
    Ok(pass_crash_point(CrashPoint::OutcomeWritten)?)
}

/// Reads the outcome. One that a power cut tore counts as missing.
pub fn read(dir: &RunDir) -> Result<Option<StoredOutcome>, HomeError> {
    match dir.read_file(StateFile::Outcome) {
        Err(e) if e.is_torn() => Ok(None),
        read => read,
    }
}
