//! Links or copies the outputs of a manifest into an artifact store.

use std::collections::HashSet;
use std::io;

use crate::attempt::error::CommitError;
use crate::attempt::finalize::ended_attempt::{EndedAttempt, Leftovers};
use crate::attempt::finalize::manifest_builder::RESULT;
use crate::attempt::recorder::Recorder;
use crate::collect::Globs;
use crate::run_dir::StateFile;
use store::artifacts::{
    ArtifactError, Artifacts, ContentCheck, SharedLock, StoreUser, TransferMode, TransferSource,
};
use store::types::manifest::{self, Manifest, Remark, RemarkedPath};

/// Puts every output of the manifest into the artifact store. An output that cannot be found anywhere is removed from the
/// manifest, with a remark.
pub(super) fn store_outputs(
    ended: &EndedAttempt<'_>,
    manifest: &mut Manifest,
    (artifacts, hold): (&Artifacts, &SharedLock),
    transfer: TransferMode,
) -> Result<(), CommitError> {
    let source = match ended.leftovers {
        Leftovers::Directory { dir, owner_uid } => Some(TransferSource::new(
            dir,
            owner_uid,
            transfer,
            ended.content_check(),
        )),
        Leftovers::Nothing | Leftovers::Gone => None,
    };
    let aside = match ended.dir.objects() {
        path if path != artifacts.path() && path.exists() => Some(Artifacts::open(&path)?),
        _ => None,
    };
    let mut lost = HashSet::new();
    for output in &manifest.collected.outputs {
        if let Some(aside) = &aside
            && aside.contains(&output.blake3, output.bytes)
        {
            artifacts.import_object(hold, aside, &output.blake3, output.bytes)?;
            continue;
        }
        if artifacts.has_object(&output.blake3, output.bytes)? {
            continue;
        }
        match source
            .as_ref()
            .map(|s| artifacts.take_output(hold, s, output))
        {
            Some(Ok(_)) => {}
            Some(Err(e)) if !is_lost(&e, ended.content_check()) => return Err(e.into()),
            Some(Err(_)) | None => drop(lost.insert(output.path.clone())),
        }
    }
    // Another store is at the path where the outputs may have been put, so they may be safe in the right one.
    if !lost.is_empty()
        && artifacts.path() == ended.commit_plan.artifacts
        && artifacts.id() != ended.commit_plan.artifacts_id
    {
        return Err(CommitError::ArtifactStoreMissing {
            id: ended.run.id.clone(),
            path: ended.commit_plan.artifacts.clone(),
            outputs: lost.len(),
        });
    }
    remove_lost_outputs(manifest, &lost, &ended.commit_plan.collection.expects)
}

/// Whether the output is gone. In recovery, an output that differs from its hash is gone too: a power cut destroyed
/// data that was never synced.
fn is_lost(error: &ArtifactError, trust: ContentCheck) -> bool {
    match error {
        ArtifactError::Open { source, .. } => source.kind() == io::ErrorKind::NotFound,
        ArtifactError::Changed { .. } | ArtifactError::Damaged { .. } => {
            trust == ContentCheck::Rehash
        }
        _ => false,
    }
}

/// Removes the lost outputs, and updates everything in the manifest that depends on the list.
fn remove_lost_outputs(
    manifest: &mut Manifest,
    lost: &HashSet<manifest::OutputPath>,
    expects: &[String],
) -> Result<(), CommitError> {
    if lost.is_empty() {
        return Ok(());
    }
    if lost.iter().any(|path| path.as_bytes() == RESULT) {
        manifest.result = None;
    }
    let collected = &mut manifest.collected;
    collected.outputs.retain(|o| !lost.contains(&o.path));
    collected.bytes = collected.outputs.iter().map(|o| o.bytes).sum();
    *collected.remark_counts.entry(Remark::Lost).or_default() += lost.len() as u64;
    let room = manifest::REMARKS_MAX.saturating_sub(collected.remarks.len());
    let remarked = lost.iter().take(room).map(|path| RemarkedPath {
        path: path.text(),
        remark: Remark::Lost,
    });
    collected.remarks.extend(remarked);
    manifest.missing = Globs::new(expects)?.unmatched(&collected.outputs);
    Ok(())
}

/// Puts the outputs into a small artifact store in the run directory (`objects/`), because the commit failed for another
/// reason than the database.
pub fn store_outputs_aside(ended: &EndedAttempt<'_>) -> Result<(), CommitError> {
    let aside = Artifacts::open(&ended.dir.objects())?;
    if !ended.commit_plan.memory {
        return store_manifest_outputs(ended, (&aside, &aside.lock_shared()?), TransferMode::Move);
    }
    // The memory is about to disappear, so keep each output that fits.
    let manifest: Option<Manifest> = ended.dir.read_file(StateFile::Manifest)?;
    let manifest = manifest.ok_or(CommitError::NoOutcome)?;
    let hold = aside.lock_shared()?;
    let Leftovers::Directory { dir, owner_uid } = ended.leftovers else {
        return Err(CommitError::NoOutcome);
    };
    let source = TransferSource::new(dir, owner_uid, TransferMode::Move, ended.content_check());
    let outputs = manifest.collected.outputs.iter();
    let taken = outputs.map(|output| aside.take_output(&hold, &source, output));
    let lost = taken.filter(Result::is_err).count();
    aside.make_durable()?;
    match lost {
        0 => Ok(()),
        outputs => Err(CommitError::LostWithMemory { outputs }),
    }
}

/// Copies everything in the manifest into the artifact store. The database is not told.
pub(crate) fn copy_outputs(
    ended: &EndedAttempt<'_>,
    recorder: &Recorder,
) -> Result<(), CommitError> {
    let artifacts = recorder.artifacts()?;
    let hold = artifacts.lock_shared()?;
    artifacts.note_user(&hold, &store_user(ended))?;
    store_manifest_outputs(ended, (&artifacts, &hold), TransferMode::Copy)
}

fn store_manifest_outputs(
    ended: &EndedAttempt<'_>,
    (artifacts, hold): (&Artifacts, &SharedLock),
    transfer: TransferMode,
) -> Result<(), CommitError> {
    let manifest: Option<Manifest> = ended.dir.read_file(StateFile::Manifest)?;
    let mut manifest = manifest.ok_or(CommitError::NoOutcome)?;
    store_outputs(ended, &mut manifest, (artifacts, hold), transfer)?;
    Ok(artifacts.make_durable().map(drop)?)
}

/// Who puts the objects into the store: a sweep must ask this database and look through this home before it removes
/// objects.
pub(super) fn store_user(ended: &EndedAttempt<'_>) -> StoreUser {
    // The path is HOME/runs/ID/ATTEMPT or HOME/pending/ID/ATTEMPT.
    let path = ended.dir.path();
    let home = path.ancestors().nth(3).unwrap_or(path);
    StoreUser::new(
        &ended.commit_plan.database_id,
        &ended.commit_plan.database,
        home,
    )
}
