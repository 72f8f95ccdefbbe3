//! From an attempt that has ended to a committed record.
//!
//! Outcome -> collection -> manifest -> both durable -> files into the artifact store (durable) -> one transaction.
//! Where there is nothing to move into the store, the transaction is the first durable step, and the only one: until then
//! nobody was told of anything, and killing us loses nothing that is written. If it fails, whoever says that the attempt
//! awaits its commit makes the run directory durable first.
//!
//! Every step first looks whether it was done before, so the runner, the reaper and `post-process` all come through
//! here, and a repeat after a crash at any point ends in the same rows and files.

mod logs;
mod transaction;

use std::collections::HashSet;
use std::io::{self, Read};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use serde::{Deserialize, Serialize};

use crate::attempt::log_capture::Captured;
use crate::attempt::record::{Collection, OutputEntry, Reason, Record, Status};
use crate::attempt::recorder::Ledger;
use crate::collect::{self, Bounds, CollectError, GlobError, Globs, Modes, Progress, Put, Rules};
use crate::home::HomeError;
use crate::request::AnalysisId;
use crate::run_dir::{Durable, Paper, RunDir, RunRecord, Task};
use store::StoreError;
use store::artifacts::{
    ArtifactError, Artifacts, ContentCheck, SharedLock, StoreUser, TransferMode, TransferSource,
};
use store::types::crash_points::{self, CrashPoint};
use store::types::manifest::{
    self, CollectedOutputs, ContentHash, Manifest, Output, Remark, RemarkedPath,
};
use store::types::result_value;

#[derive(Debug, thiserror::Error)]
pub enum SettleError {
    #[error(transparent)]
    Home(#[from] HomeError),
    #[error("read what it left")]
    Collect(#[from] CollectError),
    #[error(transparent)]
    Glob(#[from] GlobError),
    #[error("keep its outputs")]
    Artifacts(#[from] ArtifactError),
    #[error("use the database {database}")]
    Database {
        database: String,
        #[source]
        source: StoreError,
    },
    #[error("after the step `{}`", step.name())]
    Step { step: CrashPoint, source: io::Error },
    #[error("how the attempt ended was not written down")]
    NoOutcome,
    #[error("{outputs} of its outputs, which were in memory, found no room and are lost")]
    LostWithMemory { outputs: usize },
    #[error("the attempt was begun in another database than the one that is now at {database}")]
    OtherDatabase { database: String },
    #[error(
        "files of the database {database} were moved or removed while it was in use, so this process writes nothing more there"
    )]
    PutAway { database: String },
    #[error(
        "{outputs} of its outputs were in an artifact store that is not at {path:?} any more; bring it back, or give them up with `fumehood workspace remove {id} --discard`"
    )]
    StoreGone {
        id: AnalysisId,
        path: PathBuf,
        outputs: usize,
    },
}

impl SettleError {
    /// Whether somebody else has only held the database for longer than we wait.
    pub fn is_busy(&self) -> bool {
        matches!(self, SettleError::Database { source, .. } if source.fault_kind() == store::FaultKind::Busy)
    }

    /// Whether the database did not answer.
    pub fn is_away(&self) -> bool {
        matches!(self, SettleError::Database { source, .. } if source.fault_kind() == store::FaultKind::Unreachable)
    }

    /// Whether it is the database's condition, which may be another in a moment.
    pub fn is_passing(&self) -> bool {
        let passing = [
            store::FaultKind::Unreachable,
            store::FaultKind::Busy,
            store::FaultKind::Full,
            store::FaultKind::ReadOnly,
        ];
        matches!(self, SettleError::Database { source, .. } if passing.contains(&source.fault_kind()))
    }

    /// Whether the outputs are safe in the artifact store, and only the database lacks them.
    pub fn is_of_the_database(&self) -> bool {
        matches!(
            self,
            SettleError::Database { .. }
                | SettleError::OtherDatabase { .. }
                | SettleError::PutAway { .. }
        )
    }
}

pub(crate) fn reached(step: CrashPoint) -> Result<(), SettleError> {
    crash_points::reach(step).map_err(|source| SettleError::Step { step, source })
}

/// How an attempt ended, as it stands in the run directory. The logs are beside it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ending {
    version: u32,
    /// Its logs have no text here.
    pub record: Record,
}

const ENDING_VERSION: u32 = 1;

/// Writes down how it ended. From here on killing us loses nothing of it. Where the disk is full and the logs do not fit,
/// there is still room for the outcome.
pub fn write_ending(
    dir: &RunDir,
    record: &Record,
    logs: [&Captured; 2],
) -> Result<(), SettleError> {
    let kept = logs::write(dir, logs).and(reached(CrashPoint::LogsKept));
    kept.and(write_outcome(dir, record))
}

/// As [`write_ending`] for a runner that died: the logs are what had arrived. Durable.
pub fn write_lost(dir: &RunDir, record: &Record) -> Result<(), SettleError> {
    write_outcome(dir, record)?;
    Ok(dir.make_durable()?)
}

/// As it is, until the attempt is settled or somebody makes it durable.
pub(crate) fn write_outcome(dir: &RunDir, record: &Record) -> Result<(), SettleError> {
    let ending = Ending {
        version: ENDING_VERSION,
        record: record.clone(),
    };
    dir.put(Paper::Outcome, &ending, Durable::No)?;
    reached(CrashPoint::OutcomeWritten)
}

/// One that a power cut tore is as good as none.
pub fn ending(dir: &RunDir) -> Result<Option<Ending>, HomeError> {
    match dir.get(Paper::Outcome) {
        Err(e) if e.is_torn() => Ok(None),
        read => read,
    }
}

/// What the program left.
#[derive(Clone, Copy)]
pub enum Left<'a> {
    Directory {
        dir: BorrowedFd<'a>,
        owner_uid: u32,
    },
    /// Nothing ever ran.
    Nothing,
    /// It ran, and its workspace is gone: with the memory it was in, or with /tmp at boot.
    Gone,
}

/// An attempt to be settled.
pub struct Ended<'a> {
    pub dir: &'a RunDir,
    pub run: &'a RunRecord,
    pub task: &'a Task,
    pub left: Left<'a>,
    /// Decided by the final status: a workspace that is to be kept is copied from.
    pub transfer: &'a dyn Fn(&Record) -> TransferMode,
    /// Whether the manifest, if there is one, is our own of a moment ago.
    pub trust: ContentCheck,
    pub modes: Modes,
}

/// Commits the attempt, taking up wherever a predecessor stopped.
pub fn settle(
    ended: &Ended<'_>,
    ledger: &mut Ledger,
    progress: &mut dyn FnMut(Progress),
) -> Result<Record, SettleError> {
    let record = outcome(ended)?;
    let (mut manifest, mut on_paper) = match read_manifest(ended)? {
        Some(manifest) => (manifest, true),
        None => {
            // The walk may take long, and the outcome should not hang on it.
            if takes_long(&record) {
                ended.dir.make_durable()?;
            }
            let manifest = gather(ended, progress)?;
            reached(CrashPoint::Collected)?;
            (manifest, false)
        }
    };
    let texts = logs::read(ended)?;
    let inline = ended.task.collection.inline_bytes_max;
    let moves =
        !manifest.collected.outputs.is_empty() || texts.iter().any(|text| text.bytes() > inline);
    // Else the workspace tells the same again.
    if !on_paper && (moves || ended.task.memory) {
        ended.dir.put(Paper::Manifest, &manifest, Durable::No)?;
        on_paper = true;
    }
    if moves {
        ended.dir.make_durable()?;
    }
    reached(CrashPoint::ManifestWritten)?;
    // Held until the transaction is through: no sweep takes an object for forgotten in between. It goes when the record is
    // told, since then all that was kept leaves memory, and nobody need wait for that.
    let mut hold = None;
    let done = match moves {
        true => take_and_commit(ended, ledger, &record, &mut manifest, texts, &mut hold),
        false => {
            let logs = logs::keep(ended, &record, texts, None)?;
            reached(CrashPoint::ObjectsDurable)?;
            conclude_and_commit(ended, ledger, &record, &manifest, None, &logs)
        }
    };
    if done.is_err() && !on_paper {
        // It is finished without the workspace.
        ended.dir.put(Paper::Manifest, &manifest, Durable::No)?;
    }
    let record = done?;
    // Only to be killed here: nothing that fails now could undo it.
    let _committed = reached(CrashPoint::Committed);
    drop(hold);
    Ok(record)
}

/// More than a moment's work to walk and hash.
fn takes_long(record: &Record) -> bool {
    const FILES: u64 = 1_000;
    const BYTES: u64 = 64 << 20;
    record.files > FILES || record.disk_bytes > BYTES
}

fn take_and_commit(
    ended: &Ended<'_>,
    ledger: &mut Ledger,
    record: &Record,
    manifest: &mut Manifest,
    texts: Vec<logs::Text>,
    hold: &mut Option<SharedLock>,
) -> Result<Record, SettleError> {
    let transfer = (ended.transfer)(&conclude(record, manifest));
    let artifacts = ledger.artifacts()?;
    let hold = hold.insert(artifacts.lock_shared()?);
    artifacts.note_user(hold, &user(ended))?;
    take_all(ended, manifest, (&artifacts, hold), transfer)?;
    let logs = logs::keep(ended, record, texts, Some((&artifacts, hold)))?;
    artifacts.make_durable()?;
    reached(CrashPoint::ObjectsDurable)?;
    conclude_and_commit(ended, ledger, record, manifest, Some(&artifacts), &logs)
}

fn conclude_and_commit(
    ended: &Ended<'_>,
    ledger: &mut Ledger,
    record: &Record,
    manifest: &Manifest,
    artifacts: Option<&Artifacts>,
    logs: &[store::LogRow],
) -> Result<Record, SettleError> {
    let mut record = conclude(record, manifest);
    let mut done = transaction::commit(ended, ledger, &mut record, manifest, artifacts, logs);
    // A connection that rested while the program ran may be one that the server has forgotten; a repeat is known by
    // its key.
    if done.as_ref().is_err_and(SettleError::is_away) && ledger.was_lent() {
        done = transaction::commit(ended, ledger, &mut record, manifest, artifacts, logs);
    }
    // Nor is it kept where somebody has put the database away meanwhile.
    if done.is_ok() && !ledger.is_in_place() {
        done = transaction::commit(ended, ledger, &mut record, manifest, artifacts, logs);
    }
    done.map(|()| record)
}

/// One that a power cut tore is made again: before anything was moved it was durable.
fn read_manifest(ended: &Ended<'_>) -> Result<Option<Manifest>, HomeError> {
    match ended.dir.get(Paper::Manifest) {
        Err(e) if e.is_torn() => Ok(None),
        read => read,
    }
}

/// Puts the outputs where even a lost artifact store does not matter: into the run directory itself.
pub fn set_aside(ended: &Ended<'_>) -> Result<(), SettleError> {
    let aside = Artifacts::open(&ended.dir.objects())?;
    if !ended.task.memory {
        return keep_in(ended, (&aside, &aside.lock_shared()?), TransferMode::Move);
    }
    // What does not fit dies with its memory; what does fit need not.
    let manifest: Option<Manifest> = ended.dir.get(Paper::Manifest)?;
    let manifest = manifest.ok_or(SettleError::NoOutcome)?;
    let hold = aside.lock_shared()?;
    let Left::Directory { dir, owner_uid } = ended.left else {
        return Err(SettleError::NoOutcome);
    };
    let source = TransferSource::new(dir, owner_uid, TransferMode::Move, ended.trust);
    let outputs = manifest.collected.outputs.iter();
    let taken = outputs.map(|output| aside.take_output(&hold, &source, output));
    let lost = taken.filter(Result::is_err).count();
    aside.make_durable()?;
    match lost {
        0 => Ok(()),
        outputs => Err(SettleError::LostWithMemory { outputs }),
    }
}

/// Copies everything on the manifest into the artifact store, without a word to the database.
pub(crate) fn keep_copy(ended: &Ended<'_>, ledger: &Ledger) -> Result<(), SettleError> {
    let artifacts = ledger.artifacts()?;
    let hold = artifacts.lock_shared()?;
    artifacts.note_user(&hold, &user(ended))?;
    keep_in(ended, (&artifacts, &hold), TransferMode::Copy)
}

/// On whose behalf objects are put into the store: a sweep must ask this database, and look through this home.
fn user(ended: &Ended<'_>) -> StoreUser {
    // HOME/runs/ID/ATTEMPT, or HOME/pending/ID/ATTEMPT.
    let path = ended.dir.path();
    let home = path.ancestors().nth(3).unwrap_or(path);
    StoreUser::new(&ended.task.database_id, &ended.task.database, home)
}

fn keep_in(
    ended: &Ended<'_>,
    (artifacts, hold): (&Artifacts, &SharedLock),
    transfer: TransferMode,
) -> Result<(), SettleError> {
    let manifest: Option<Manifest> = ended.dir.get(Paper::Manifest)?;
    let mut manifest = manifest.ok_or(SettleError::NoOutcome)?;
    take_all(ended, &mut manifest, (artifacts, hold), transfer)?;
    Ok(artifacts.make_durable().map(drop)?)
}

fn outcome(ended: &Ended<'_>) -> Result<Record, SettleError> {
    let ending = ending(ended.dir)?.ok_or(SettleError::NoOutcome)?;
    Ok(ending.record)
}

pub(crate) fn gather(
    ended: &Ended<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Manifest, SettleError> {
    let mut manifest = Manifest {
        version: manifest::VERSION,
        ..Manifest::default()
    };
    let rules = &ended.task.collection;
    let expects = Globs::new(&rules.expects)?;
    if let Left::Directory { dir, owner_uid } = ended.left {
        let wanted = Globs::new(&rules.outputs)?;
        // Damaged by a power cut: then inputs are outputs, too.
        let puts: Option<Vec<Put>> = ended.dir.get(Paper::Puts).unwrap_or_default();
        let puts = puts.unwrap_or_default();
        manifest.collected = collect::collect(
            dir,
            &Rules {
                bounds: Bounds {
                    total_bytes: rules.total_bytes_max,
                    file_bytes: rules.file_bytes_max,
                    outputs: rules.outputs_max,
                    depth: rules.depth_max,
                },
                owner_uid,
                wanted: (!rules.outputs.is_empty()).then_some(&wanted),
                expected: (!rules.expects.is_empty()).then_some(&expects),
                puts: &puts,
                modes: ended.modes,
            },
            progress,
        )?;
        match result_text(dir, &manifest.collected.outputs) {
            None => {}
            Some(Ok(text)) => manifest.result = Some(text),
            Some(Err(note)) => manifest.result_note = Some(note),
        }
    }
    if let Left::Gone = ended.left {
        manifest.collected = all_lost();
    }
    manifest.missing = expects.unmatched(&manifest.collected.outputs);
    Ok(manifest)
}

/// What is committed of a workspace that is gone, or given up.
pub(crate) fn all_lost() -> CollectedOutputs {
    let mut collected = CollectedOutputs::default();
    collected.remark_counts.insert(Remark::Lost, 1);
    collected.remarks.push(RemarkedPath {
        path: String::from("."),
        remark: Remark::Lost,
    });
    collected
}

/// `result.json` at the top, if it is an output and a value that both databases take.
fn result_text(dir: BorrowedFd<'_>, outputs: &[Output]) -> Option<Result<String, String>> {
    let output = outputs.iter().find(|o| o.path.as_bytes() == RESULT)?;
    if output.bytes > result_value::BYTES_MAX as u64 {
        let bytes = usize::try_from(output.bytes).unwrap_or(usize::MAX);
        return Some(Err(
            result_value::ResultRejection::TooLarge { bytes }.to_string()
        ));
    }
    let read = || -> io::Result<Vec<u8>> {
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let file = rustix::fs::openat2(dir, c"result.json", flags, Mode::empty(), resolve)?;
        let mut bytes = Vec::new();
        std::fs::File::from(file)
            .take(output.bytes + 1)
            .read_to_end(&mut bytes)?;
        match ContentHash::of(&bytes) == output.blake3 {
            true => Ok(bytes),
            false => Err(io::Error::other("it changed while it was read")),
        }
    };
    Some(match read() {
        Ok(bytes) => result_value::check(&bytes).map_err(|e| e.to_string()),
        Err(e) => Err(format!("it could not be read: {e}")),
    })
}

/// The final record: what the kernel told, and what collection found.
fn conclude(record: &Record, manifest: &Manifest) -> Record {
    let mut record = record.clone();
    let collected = &manifest.collected;
    if record.status == Status::Succeeded && !manifest.missing.is_empty() {
        record.status = Status::Failed;
        record.reason = Reason::MissingOutput;
        record.message = Some(format!("no output matches {}", manifest.missing.join(", ")));
    }
    let note = manifest.result_note.clone();
    record.collection = Collection::new(collected, &manifest.missing, note);
    record.collection.complete = record.status == Status::Succeeded && !collected.loses_content();
    record.outputs = collected.outputs.iter().map(OutputEntry::from).collect();
    record
}

/// Moves every output of the manifest into the store. What is nowhere any more is struck off, and said.
fn take_all(
    ended: &Ended<'_>,
    manifest: &mut Manifest,
    (artifacts, hold): (&Artifacts, &SharedLock),
    transfer: TransferMode,
) -> Result<(), SettleError> {
    let source = match ended.left {
        Left::Directory { dir, owner_uid } => {
            Some(TransferSource::new(dir, owner_uid, transfer, ended.trust))
        }
        Left::Nothing | Left::Gone => None,
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
            Some(Err(e)) if !is_lost(&e, ended.trust) => return Err(e.into()),
            Some(Err(_)) | None => drop(lost.insert(output.path.clone())),
        }
    }
    // It may all be safe where we do not look.
    if !lost.is_empty()
        && artifacts.path() == ended.task.artifacts
        && artifacts.id() != ended.task.artifacts_id
    {
        return Err(SettleError::StoreGone {
            id: ended.run.id.clone(),
            path: ended.task.artifacts.clone(),
            outputs: lost.len(),
        });
    }
    strike_off(manifest, &lost, &ended.task.collection.expects)
}

/// It is gone; or, in recovery, it is not what was hashed: a power cut took what was never synced.
fn is_lost(error: &ArtifactError, trust: ContentCheck) -> bool {
    match error {
        ArtifactError::Open { source, .. } => source.kind() == io::ErrorKind::NotFound,
        ArtifactError::Changed { .. } | ArtifactError::Damaged { .. } => {
            trust == ContentCheck::Rehash
        }
        _ => false,
    }
}

/// Everything that follows from the list follows from what is left of it.
fn strike_off(
    manifest: &mut Manifest,
    lost: &HashSet<manifest::OutputPath>,
    expects: &[String],
) -> Result<(), SettleError> {
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

/// The output that is also stored as JSON.
const RESULT: &[u8] = b"result.json";
