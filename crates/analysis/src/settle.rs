//! From an attempt that has ended to a committed record.
//!
//! Outcome (durable) -> collection -> manifest (durable) -> files into the artifact store (durable) -> one transaction.
//! Every step first looks whether it was done before, so the runner, the reaper and `post-process` all come through
//! here, and a repeat after a crash at any point ends in the same rows and files.

use std::collections::HashSet;
use std::io::{self, Read};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use serde::{Deserialize, Serialize};

use crate::artifacts::{ArtifactError, Artifacts, Hold, Source, Transfer, Trust, User};
use crate::collect::{self, Bounds, CollectError, GlobError, Globs, Modes, Progress, Put, Rules};
use crate::fault::{self, Step};
use crate::home::HomeError;
use crate::ledger::Ledger;
use crate::logs::Captured;
use crate::manifest::{self, Collected, ContentHash, Manifest, Output, Remark, Remarked};
use crate::provenance;
use crate::record::{Collection, Commit, CommitState, OutputEntry, Reason, Record, Status};
use crate::request::{AnalysisId, Level};
use crate::result_value;
use crate::run_dir::{Durable, Paper, RunDir, RunRecord, Task};
use crate::store::{self, Committed, StoreError};

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
    #[error("after the step `{}`", step.word())]
    Step { step: Step, source: io::Error },
    #[error("how the attempt ended was not written down")]
    NoOutcome,
    #[error("{outputs} of its outputs, which were in memory, found no room and are lost")]
    LostWithMemory { outputs: usize },
    #[error("the attempt was begun in another database than the one that is now at {database}")]
    OtherDatabase { database: String },
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
        matches!(self, SettleError::Database { source, .. } if source.trouble() == store::Trouble::Busy)
    }

    /// Whether it is the database's condition, which may be another in a moment.
    pub fn is_passing(&self) -> bool {
        let passing = [
            store::Trouble::Away,
            store::Trouble::Busy,
            store::Trouble::Full,
            store::Trouble::ReadOnly,
        ];
        matches!(self, SettleError::Database { source, .. } if passing.contains(&source.trouble()))
    }

    /// Whether the outputs are safe in the artifact store, and only the database lacks them.
    pub fn is_of_the_database(&self) -> bool {
        matches!(
            self,
            SettleError::Database { .. } | SettleError::OtherDatabase { .. }
        )
    }
}

pub(crate) fn reached(step: Step) -> Result<(), SettleError> {
    fault::at(step).map_err(|source| SettleError::Step { step, source })
}

/// How an attempt ended, as it stands in the run directory. The logs are beside it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ending {
    version: u32,
    /// Its logs have no text here.
    pub record: Record,
}

const ENDING_VERSION: u32 = 1;

/// Writes down how it ended. From here on a crash loses nothing of it. Where the disk is full and the logs do not fit,
/// there is still room for the outcome.
pub fn write_ending(
    dir: &RunDir,
    record: &Record,
    logs: [&Captured; 2],
) -> Result<(), SettleError> {
    let kept = write_logs(dir, logs)
        .and(reached(Step::LogsKept))
        .and(dir.sync_record().map_err(SettleError::from));
    kept.and(write_lost(dir, record))
}

fn write_logs(dir: &RunDir, logs: [&Captured; 2]) -> Result<(), SettleError> {
    for (name, captured) in store::STREAMS.into_iter().zip(logs) {
        dir.keep_log(name, &captured.head)?;
        if !captured.tail.is_empty() {
            dir.keep_log(&tail_name(name), &captured.tail)?;
        }
    }
    Ok(())
}

/// As [`write_ending`] for a runner that died: the logs are what had arrived.
pub fn write_lost(dir: &RunDir, record: &Record) -> Result<(), SettleError> {
    let ending = Ending {
        version: ENDING_VERSION,
        record: record.clone(),
    };
    dir.put(Paper::Outcome, &ending, Durable::Yes)?;
    reached(Step::OutcomeDurable)
}

pub fn ending(dir: &RunDir) -> Result<Option<Ending>, HomeError> {
    dir.get(Paper::Outcome)
}

fn tail_name(stream: &str) -> String {
    format!("{stream}.tail")
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
    pub transfer: &'a dyn Fn(&Record) -> Transfer,
    /// Whether the manifest, if there is one, is our own of a moment ago.
    pub trust: Trust,
    pub modes: Modes,
}

/// Commits the attempt, taking up wherever a predecessor stopped.
pub fn settle(
    ended: &Ended<'_>,
    ledger: &mut Ledger,
    progress: &mut dyn FnMut(Progress),
) -> Result<Record, SettleError> {
    let record = outcome(ended)?;
    let mut manifest = match read_manifest(ended)? {
        Some(manifest) => manifest,
        None => {
            let manifest = gather(ended, progress)?;
            reached(Step::Collected)?;
            ended.dir.put(Paper::Manifest, &manifest, Durable::Yes)?;
            reached(Step::ManifestDurable)?;
            manifest
        }
    };
    let transfer = (ended.transfer)(&conclude(&record, &manifest));
    let artifacts = ledger.artifacts()?;
    // Held until the transaction is through: no sweep takes an object for forgotten in between.
    let hold = artifacts.hold()?;
    artifacts.note_user(&hold, &user(ended))?;
    take_all(ended, &mut manifest, (&artifacts, &hold), transfer)?;
    let logs = keep_logs(ended, &record, (&artifacts, &hold))?;
    artifacts.make_durable()?;
    reached(Step::ObjectsDurable)?;
    let mut record = conclude(&record, &manifest);
    commit(ended, ledger, &mut record, &manifest, &artifacts, &logs)?;
    // Only to be killed here: nothing that fails now could undo it.
    let _committed = reached(Step::Committed);
    Ok(record)
}

/// A damaged one is made again as long as there is something to make it from.
fn read_manifest(ended: &Ended<'_>) -> Result<Option<Manifest>, HomeError> {
    match (ended.dir.get(Paper::Manifest), ended.left) {
        (Err(HomeError::Read { .. }), Left::Directory { .. }) => Ok(None),
        (read, _) => read,
    }
}

/// Puts the outputs where even a lost artifact store does not matter: into the run directory itself.
pub fn set_aside(ended: &Ended<'_>) -> Result<(), SettleError> {
    let aside = Artifacts::open(&ended.dir.objects())?;
    if !ended.task.memory {
        return keep_in(ended, (&aside, &aside.hold()?), Transfer::Move);
    }
    // What does not fit dies with its memory; what does fit need not.
    let manifest: Option<Manifest> = ended.dir.get(Paper::Manifest)?;
    let manifest = manifest.ok_or(SettleError::NoOutcome)?;
    let hold = aside.hold()?;
    let Left::Directory { dir, owner_uid } = ended.left else {
        return Err(SettleError::NoOutcome);
    };
    let source = Source::new(dir, owner_uid, Transfer::Move, ended.trust);
    let outputs = manifest.collected.outputs.iter();
    let taken = outputs.map(|output| aside.take(&hold, &source, output));
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
    let hold = artifacts.hold()?;
    artifacts.note_user(&hold, &user(ended))?;
    keep_in(ended, (&artifacts, &hold), Transfer::Copy)
}

/// On whose behalf objects are put into the store: a sweep must ask this database, and look through this home.
fn user(ended: &Ended<'_>) -> User {
    // HOME/runs/ID/ATTEMPT, or HOME/pending/ID/ATTEMPT.
    let path = ended.dir.path();
    let home = path.ancestors().nth(3).unwrap_or(path);
    User::new(&ended.task.database_id, &ended.task.database, home)
}

fn keep_in(
    ended: &Ended<'_>,
    (artifacts, hold): (&Artifacts, &Hold),
    transfer: Transfer,
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
pub(crate) fn all_lost() -> Collected {
    let mut collected = Collected::default();
    collected.remark_counts.insert(Remark::Lost, 1);
    collected.remarks.push(Remarked {
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
        return Some(Err(result_value::NotStored::TooLarge { bytes }.to_string()));
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
    (artifacts, hold): (&Artifacts, &Hold),
    transfer: Transfer,
) -> Result<(), SettleError> {
    let source = match ended.left {
        Left::Directory { dir, owner_uid } => {
            Some(Source::new(dir, owner_uid, transfer, ended.trust))
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
            artifacts.adopt(hold, aside, &output.blake3, output.bytes)?;
            continue;
        }
        if artifacts.has(&output.blake3, output.bytes)? {
            continue;
        }
        match source.as_ref().map(|s| artifacts.take(hold, s, output)) {
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
fn is_lost(error: &ArtifactError, trust: Trust) -> bool {
    match error {
        ArtifactError::Open { source, .. } => source.kind() == io::ErrorKind::NotFound,
        ArtifactError::Changed { .. } | ArtifactError::Damaged { .. } => trust == Trust::Nothing,
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
    let mut counted = HashSet::new();
    let once = collected
        .outputs
        .iter()
        .filter(|o| o.inode == 0 || counted.insert(o.inode));
    collected.bytes = once.map(|o| o.bytes).sum();
    *collected.remark_counts.entry(Remark::Lost).or_default() += lost.len() as u64;
    let room = manifest::REMARKS_MAX.saturating_sub(collected.remarks.len());
    let remarked = lost.iter().take(room).map(|path| Remarked {
        path: path.text(),
        remark: Remark::Lost,
    });
    collected.remarks.extend(remarked);
    manifest.missing = Globs::new(expects)?.unmatched(&collected.outputs);
    Ok(())
}

/// The output that is also stored as JSON.
const RESULT: &[u8] = b"result.json";

/// The logs as they are committed: excerpts, and the whole as an object where it is longer.
fn keep_logs(
    ended: &Ended<'_>,
    record: &Record,
    (artifacts, hold): (&Artifacts, &Hold),
) -> Result<Vec<store::Log>, SettleError> {
    let of = [&record.stdout, &record.stderr];
    let mut logs = Vec::new();
    for (stream, facts) in store::STREAMS.into_iter().zip(of) {
        let read = |name: &str| -> Result<Vec<u8>, HomeError> {
            let bytes = ended.dir.bytes(name, u64::MAX)?;
            Ok(bytes.unwrap_or_default())
        };
        let (mut head, mut tail) = (read(stream)?, read(&tail_name(stream))?);
        let head_bytes = head.len();
        let whole = (head.len() + tail.len()) as u64;
        // A runner that died has not told; then what arrived is all there is.
        let total_bytes = facts.bytes.max(whole);
        let mut object = None;
        if whole > ended.task.collection.inline_bytes_max {
            head.append(&mut tail);
            object = Some(artifacts.put(hold, &head)?);
            let half = usize::try_from(ended.task.collection.inline_bytes_max / 2);
            let half = half.unwrap_or(usize::MAX).min(head.len());
            tail = head.split_off(head.len().saturating_sub(half).max(half));
            head.truncate(half);
            head.shrink_to_fit();
        }
        logs.push(store::Log {
            stream,
            total_bytes,
            dropped_bytes: total_bytes - whole,
            head,
            tail,
            object,
            object_bytes: whole,
            object_head_bytes: head_bytes as u64,
        });
    }
    Ok(logs)
}

fn commit(
    ended: &Ended<'_>,
    ledger: &mut Ledger,
    record: &mut Record,
    manifest: &Manifest,
    artifacts: &Artifacts,
    logs: &[store::Log],
) -> Result<(), SettleError> {
    let rules = &ended.task.collection;
    let mut room = rules.inline_total_bytes_max;
    let mut content = |output: &Output| -> io::Result<Option<Vec<u8>>> {
        if output.bytes > rules.inline_bytes_max.min(room) {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        let object = artifacts.open_object(&output.blake3);
        object
            .map_err(io::Error::other)?
            .take(output.bytes)
            .read_to_end(&mut bytes)?;
        room -= output.bytes;
        Ok(Some(bytes))
    };
    let provenance = ended
        .dir
        .bytes(Paper::Provenance.name(), PROVENANCE_BYTES_MAX)?;
    let provenance = provenance.and_then(|bytes| String::from_utf8(bytes).ok());
    let [isolation, limits, hints, notices] = json_of(record);
    let workspace = record.workspace.to_string_lossy().into_owned();
    let database = ledger.location.to_string();
    let ms = |time: u64| i64::try_from(time).ok();
    let ran = record.isolation.level.is_some();
    let mut commit = store::Commit {
        begin: store::Begin {
            id: record.id.as_str(),
            key: &ended.task.key,
            replace: false,
            host: &ended.run.host,
            boot_id: &ended.run.boot_id,
            submitter: Some(&provenance::submitter_name()),
            workspace: Some(&workspace),
            provenance: provenance.as_deref(),
        },
        attempt: record.attempt,
        state: state_of(record.status),
        reason: record.reason.as_str(),
        message: record.message.as_deref(),
        started_ms: ran.then(|| ms(record.times.started_ms)).flatten(),
        ended_ms: ms(record.times.ended_ms),
        usage: ran.then(|| usage_of(record)),
        exit_code: record.exit_code,
        signal: record.signal,
        isolation_level: record.isolation.level.map(Level::as_str),
        isolation_json: Some(&isolation),
        limits_json: Some(&limits),
        hints_json: Some(&hints),
        notices_json: Some(&notices),
        complete: record.collection.complete,
        output_bytes: manifest.collected.bytes,
        refused_count: record.collection.refused,
        result: manifest.result.as_deref(),
        result_note: manifest.result_note.as_deref(),
        post_process: match ledger.post_process {
            Some(_) => store::PostProcess::Pending,
            None => store::PostProcess::NotAsked,
        },
        outputs: &manifest.collected.outputs,
        artifact_store: artifacts.id(),
        remarks: &manifest.collected.remarks,
        remark_counts: &manifest.collected.remark_counts,
        logs,
        content: &mut content,
        before_commit: &mut || fault::at(Step::TransactionOpen),
    };
    if ledger.store()?.id() != ended.task.database_id {
        return Err(SettleError::OtherDatabase { database });
    }
    let committed = ledger.with(|store| store.commit(&mut commit))?;
    let state = match committed {
        Committed::Now | Committed::Already => CommitState::Committed,
        Committed::Anew { attempt } => {
            record.attempt = attempt;
            CommitState::Committed
        }
        Committed::Superseded { attempt } => {
            record.attempt = attempt;
            CommitState::Superseded
        }
    };
    record.commit = Commit {
        state,
        database: Some(database),
        message: None,
    };
    Ok(())
}

/// As much as the database takes of packages and inputs; more is none of ours.
const PROVENANCE_BYTES_MAX: u64 = 64 << 20;

/// What we write of our own cannot fail to be written.
fn json_of(record: &Record) -> [String; 4] {
    fn json<T: Serialize>(value: &T) -> String {
        serde_json::to_string(value).unwrap_or_else(|_| String::from("null"))
    }
    [
        json(&record.isolation.layers),
        json(&record.limits),
        json(&record.hints),
        json(&record.notices),
    ]
}

fn state_of(status: Status) -> store::State {
    match status {
        Status::Succeeded => store::State::Succeeded,
        Status::Failed => store::State::Failed,
        Status::TimedOut => store::State::TimedOut,
        Status::OutOfMemory => store::State::OutOfMemory,
        Status::LimitExceeded => store::State::LimitExceeded,
        Status::Cancelled => store::State::Cancelled,
        Status::Error => store::State::Error,
    }
}

fn usage_of(record: &Record) -> store::Usage {
    store::Usage {
        wall_ms: record.times.wall_ms,
        cpu_ms: record.cpu_ms,
        memory_peak_bytes: record.memory_peak_bytes,
        pids_peak: record.pids_peak,
        disk_bytes: record.disk_bytes,
        files: record.files,
        oom_kills: record.oom_kills,
    }
}
