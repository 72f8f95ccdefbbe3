//! From an attempt that has ended to a committed record.
//!
//! The order is: outcome, collection, manifest, outcome and manifest durable, files into the artifact store (durable), one transaction.
//! If nothing has to go into the store, the transaction is the first and only durable step: until then nobody was told
//! of a result, and a kill loses nothing that is written. If that transaction fails, the caller makes the run directory
//! durable before it says that the attempt awaits its commit.
//!
//! Every step first checks whether an earlier process has already done it. So the runner, the reaper and `post-process`
//! all use this code, and a repetition after a crash at any point ends in the same rows and files.
//!
//! In reading order: `ended_attempt` (the input), `outcome_file` (how the program ended, in the run directory),
//! `manifest_builder` (what to take, and the final record), `output_transfer` (files into the artifact store), `logs`,
//! `transaction`.

pub(crate) mod ended_attempt;
mod logs;
pub(crate) mod manifest_builder;
pub(crate) mod outcome_file;
pub(crate) mod output_transfer;
mod transaction;

use crate::attempt::error::{CommitError, pass_crash_point};
use crate::attempt::finalize::ended_attempt::EndedAttempt;
use crate::attempt::finalize::manifest_builder::{build_manifest, final_record};
use crate::attempt::finalize::output_transfer::{store_outputs, store_user};
use crate::attempt::record::Record;
use crate::attempt::recorder::Recorder;
use crate::collect::CollectProgress;
use crate::home::HomeError;
use crate::run_dir::{Durability, StateFile};
use store::artifacts::{Artifacts, SharedLock};
use store::types::crash_points::CrashPoint;
use store::types::manifest::Manifest;

/// Commits the attempt. Continues wherever an earlier process stopped.
///
/// Durable steps: [`CrashPoint::Collected`], [`CrashPoint::ManifestWritten`], [`CrashPoint::ObjectMoved`] for each output,
/// [`CrashPoint::ObjectsDurable`], [`CrashPoint::TransactionOpen`], [`CrashPoint::Committed`].
pub fn finalize_attempt(
    ended: &EndedAttempt<'_>,
    recorder: &mut Recorder,
    progress: &mut dyn FnMut(CollectProgress),
) -> Result<Record, CommitError> {
    let (mut manifest, mut is_written) = match read_manifest(ended)? {
        Some(manifest) => (manifest, true),
        None => {
            // The walk may take long, so make the outcome durable before it.
            if is_large(ended.outcome) {
                ended.dir.make_durable()?;
            }
            let manifest = build_manifest(ended, progress)?;
            pass_crash_point(CrashPoint::Collected)?;
            (manifest, false)
        }
    };
    let log_excerpts = logs::excerpts(ended)?;
    let inline = ended.commit_plan.collection.inline_bytes_max;
    let has_objects = !manifest.collected.outputs.is_empty()
        || log_excerpts.iter().any(|text| text.bytes() > inline);
    // If nothing is stored and the workspace is on disk, the manifest need not be written: a repetition builds the same
    // one from the workspace.
    if !is_written && (has_objects || ended.commit_plan.memory) {
        ended
            .dir
            .write_file(StateFile::Manifest, &manifest, Durability::Unsynced)?;
        is_written = true;
    }
    if has_objects {
        ended.dir.make_durable()?;
    }
    pass_crash_point(CrashPoint::ManifestWritten)?;
    // The lock keeps a sweep from removing objects that no row names yet, so it is held until the transaction is done.
    // It is released last: releasing the lock also removes the stored objects from the page cache, and the commit does
    // not wait for that.
    let mut artifacts_lock = None;
    let committed = match has_objects {
        true => store_and_commit(
            ended,
            recorder,
            &mut manifest,
            log_excerpts,
            &mut artifacts_lock,
        ),
        false => {
            let logs = logs::log_rows(ended, log_excerpts, None)?;
            pass_crash_point(CrashPoint::ObjectsDurable)?;
            commit_final_record(ended, recorder, &manifest, None, &logs)
        }
    };
    if committed.is_err() && !is_written {
        // The attempt is then finished from the manifest, without the workspace.
        ended
            .dir
            .write_file(StateFile::Manifest, &manifest, Durability::Unsynced)?;
    }
    let record = committed?;
    // Tests may kill the process here. An injected error is ignored, because the commit cannot be undone.
    let _ = pass_crash_point(CrashPoint::Committed);
    drop(artifacts_lock);
    Ok(record)
}

/// A manifest that a power cut tore counts as missing: it is durable before the first file moves, so nothing has moved
/// yet.
fn read_manifest(ended: &EndedAttempt<'_>) -> Result<Option<Manifest>, HomeError> {
    match ended.dir.read_file(StateFile::Manifest) {
        Err(e) if e.is_torn() => Ok(None),
        read => read,
    }
}

/// Whether walking and hashing the workspace takes more than a moment.
fn is_large(record: &Record) -> bool {
    const FILES: u64 = 1_000;
    const BYTES: u64 = 64 << 20;
    record.files > FILES || record.disk_bytes > BYTES
}

fn store_and_commit(
    ended: &EndedAttempt<'_>,
    recorder: &mut Recorder,
    manifest: &mut Manifest,
    log_excerpts: Vec<logs::LogExcerpt>,
    artifacts_lock: &mut Option<SharedLock>,
) -> Result<Record, CommitError> {
    let transfer = ended.transfer(final_record(ended.outcome, manifest).status);
    let artifacts = recorder.artifacts()?;
    let artifacts_lock = artifacts_lock.insert(artifacts.lock_shared()?);
    artifacts.note_user(artifacts_lock, &store_user(ended))?;
    store_outputs(ended, manifest, (&artifacts, artifacts_lock), transfer)?;
    let logs = logs::log_rows(ended, log_excerpts, Some((&artifacts, artifacts_lock)))?;
    artifacts.make_durable()?;
    pass_crash_point(CrashPoint::ObjectsDurable)?;
    commit_final_record(ended, recorder, manifest, Some(&artifacts), &logs)
}

fn commit_final_record(
    ended: &EndedAttempt<'_>,
    recorder: &mut Recorder,
    manifest: &Manifest,
    artifacts: Option<&Artifacts>,
    logs: &[store::LogRow],
) -> Result<Record, CommitError> {
    let mut record = final_record(ended.outcome, manifest);
    let mut committed =
        transaction::commit(ended, recorder, &mut record, manifest, artifacts, logs);
    // The server may have closed a connection that was unused while the program ran. Repeating is safe: the key
    // identifies the attempt.
    if committed.as_ref().is_err_and(CommitError::is_unavailable) && recorder.was_idle() {
        committed = transaction::commit(ended, recorder, &mut record, manifest, artifacts, logs);
    }
    // If the database file was replaced meanwhile, the commit went to the old one, so repeat it. `store` then reports
    // the replacement.
    if committed.is_ok() && !recorder.is_in_place() {
        committed = transaction::commit(ended, recorder, &mut record, manifest, artifacts, logs);
    }
    committed.map(|()| record)
}
