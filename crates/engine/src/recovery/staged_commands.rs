//! The stages of an attempt as separate commands: `workspace create`, `run --in`, `post-process`, `workspace remove`.
//! Also `record`, which stores results that were made without a sandbox.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::attempt::error::CommitError;
use crate::attempt::finalize;
use crate::attempt::finalize::ended_attempt::{EndedAttempt, Finisher, Leftovers};
use crate::attempt::finalize::manifest_builder::{all_outputs_lost, build_manifest};
use crate::attempt::finalize::outcome_file;
use crate::attempt::finalize::output_transfer;
use crate::attempt::post_process;
use crate::attempt::record::{PostProcessReport, Record, Status};
use crate::attempt::record_builder;
use crate::attempt::recorder::Recorder;
use crate::attempt::row::begin_row;
use crate::collect::{self, CollectError};
use crate::home::{self, Home, HomeError};
use crate::recovery::reaper;
use crate::request::{CollectionSettings, IdReuse, IsolationLevel};
use crate::run_dir::{CommitPlan, Durability, RunDir, RunRecord, RunState, StateFile};
use crate::workspace::{Receipt, Workspace, WorkspaceError};
use store::State;
use store::artifacts::Artifacts;
use store::types::analysis_id::AnalysisId;
use store::types::manifest::{self, Manifest, Output, OutputPath, OutputPathError};
use store::types::result_value;

/// Why a command for a prepared workspace, or for a result made elsewhere, failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum StagedCommandError {
    /// The home or the run directory cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The workspace could not be made or used.
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
    /// The database or the commit failed.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// The workspace, or something else that the attempt left, could not be removed.
    #[error("remove its workspace: {0}")]
    Remove(String),
    /// The attempt has not ended, and this home has no directory of it.
    #[error(
        "{id} is {state} (attempt {attempt}, begun on {host}); what it left is in another FUMEHOOD_HOME or on another machine: finish it there, or give it up with `fumehood rm --force {id}`"
    )]
    NotHere {
        id: AnalysisId,
        attempt: u32,
        state: State,
        host: String,
    },
    /// Nothing has run in the workspace, so there is nothing to commit.
    #[error("nothing has run in the workspace of {id}; run in it with `fumehood run --in {id} …`")]
    NotRun { id: AnalysisId },
    /// The attempt is committed, and no command awaits it.
    #[error("{id} has nothing to finish: it is committed, and no post_process command awaits it")]
    NothingDue { id: AnalysisId },
    /// The workspace holds results that are not committed, and the caller did not discard them.
    #[error(
        "{id} ran in its workspace and is not committed; `fumehood post-process {id}` commits it, `--discard` removes it with what it left"
    )]
    Uncommitted { id: AnalysisId },
    /// The attempt was begun for another database than the one in use.
    #[error("{id} was begun for the database {database}; name that one with --db")]
    OtherDatabase { id: AnalysisId, database: String },
    /// A file could not be read, or what a dead runner left could not be finished.
    #[error("read {path:?}")]
    Read { path: PathBuf, source: io::Error },
    /// The file for `result.json` is too large.
    #[error("{path:?} is larger than {} bytes", RESULT_BYTES_MAX)]
    ResultTooLarge { path: PathBuf },
    /// Both the given file and the directory would become `result.json`.
    #[error("{dir:?} holds a result.json of its own; leave out --result, or that file")]
    TwoResults { dir: PathBuf },
    /// The files of the directory could not be collected.
    #[error("read what is in the directory")]
    Collect(#[from] CollectError),
    /// The path of an output is not valid.
    #[error(transparent)]
    Path(#[from] OutputPathError),
}

/// The result file of `record` is read into memory, so it is bounded.
const RESULT_BYTES_MAX: u64 = 64 << 20;

/// Creates a workspace for a later `run --in`. The caller may put files into it first.
pub fn create_workspace(
    home: &Home,
    recorder: Option<&mut Recorder>,
    id: &AnalysisId,
    root: &Path,
    keep_for_ms: u64,
) -> Result<PathBuf, StagedCommandError> {
    let number = match recorder {
        Some(recorder) => recorder.next_attempt_number(id)?,
        None => 1,
    };
    let root = std::fs::canonicalize(root).map_err(|source| WorkspaceError::Root {
        root: root.to_path_buf(),
        source,
    })?;
    let dir = RunDir::claim(home, id, number)?;
    let mut record = RunRecord::new(id, &root, number);
    dir.write_record(&record)?;
    let mut create = || -> Result<PathBuf, StagedCommandError> {
        let mut workspace = Workspace::draft(record.workspace.clone(), &record.draft, None)?;
        record.workspace_identity = Some(workspace.identity());
        dir.write_record(&record)?;
        if let Err(e) = workspace.publish() {
            // On failure the reaper removes it.
            let _ = workspace.remove(Receipt::NothingRan);
            return Err(e.into());
        }
        record.state = RunState::Open {
            until: home::unix_seconds() + keep_for_ms.div_ceil(1000),
        };
        dir.write_record(&record)?;
        Ok(record.workspace.clone())
    };
    match create() {
        Ok(path) => Ok(path),
        Err(e) => {
            // On failure the reaper removes it.
            let _ = dir.remove();
            Err(e)
        }
    }
}

/// Whether `workspace remove` may discard results that are not committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiscardPolicy {
    /// Fail if results are not committed.
    Refuse,
    /// Commit the outcome without outputs, and remove the results.
    Discard,
}

/// Removes the workspace of an id. Results that are not committed are only discarded on request; the outcome is then
/// committed without outputs.
pub fn remove_workspace(
    home: &Home,
    recorder: Option<&mut Recorder>,
    id: &AnalysisId,
    discard: DiscardPolicy,
) -> Result<PathBuf, StagedCommandError> {
    let found = RunDir::find(home, id)?;
    let (dir, record) = found.ok_or(HomeError::NoWorkspace { id: id.clone() })?;
    let unsettled = matches!(
        record.state,
        RunState::Ran | RunState::Live | RunState::Quarantined
    );
    if let Some(commit_plan) = record.commit_plan.as_ref().filter(|_| unsettled) {
        let Some(recorder) = recorder.filter(|_| discard == DiscardPolicy::Discard) else {
            return Err(StagedCommandError::Uncommitted { id: id.clone() });
        };
        // If the database was replaced by another, remove the workspace without a commit.
        if recorder.store()?.id() == commit_plan.database_id {
            commit_without_outputs(&dir, &record, commit_plan, recorder)?;
        }
    }
    reaper::remove_leftovers(&record).map_err(StagedCommandError::Remove)?;
    dir.remove()?;
    Ok(record.workspace)
}

/// Commits the outcome without outputs. If the row was never begun, there is nothing to commit.
fn commit_without_outputs(
    dir: &RunDir,
    run: &RunRecord,
    commit_plan: &CommitPlan,
    recorder: &mut Recorder,
) -> Result<(), StagedCommandError> {
    let known = recorder.with(|store| store.attempt_with_key(&commit_plan.key))?;
    if known.is_none() && !commit_plan.begun {
        return Ok(());
    }
    let outcome = match outcome_file::read(dir)? {
        Some(outcome) => outcome,
        None => {
            let lost = record_builder::runner_lost_record(run);
            outcome_file::write_durably(dir, &lost)?;
            lost
        }
    };
    let nothing = Manifest {
        version: manifest::VERSION,
        collected: all_outputs_lost(),
        ..Manifest::default()
    };
    dir.write_file(StateFile::Manifest, &nothing, Durability::Synced)?;
    reaper::finalize_leftovers(dir, run, commit_plan, &outcome, None, recorder)?;
    Ok(())
}

/// What `post-process` did.
pub enum PostProcessResult {
    /// It committed the attempt.
    Committed(Box<Record>),
    /// The attempt was committed before. Only the configured post_process command was due, and was run.
    CommandRun {
        /// The number of the attempt.
        attempt: u32,
        /// How the command ended.
        report: PostProcessReport,
    },
}

/// Collects and commits what ran by `run --in`, or finishes an attempt that could not be committed, or repeats the
/// configured post_process command if it failed.
pub fn post_process(
    home: &Home,
    recorder: &mut Recorder,
    id: &AnalysisId,
) -> Result<PostProcessResult, StagedCommandError> {
    let Some((dir, mut run)) = RunDir::find(home, id)? else {
        return repeat_post_process(home, recorder, id);
    };
    let Some(commit_plan) = run.commit_plan.clone() else {
        return Err(StagedCommandError::NotRun { id: id.clone() });
    };
    match run.state {
        RunState::Open { .. } => return Err(StagedCommandError::NotRun { id: id.clone() }),
        RunState::Kept { .. } | RunState::Recorded => return repeat_in_dir(recorder, &dir, &run),
        RunState::Live | RunState::Quarantined | RunState::Ran => {}
    }
    check_database(recorder, &run, &commit_plan)?;
    if run.state != RunState::Ran {
        drop(dir);
        return finish_dead(home, recorder, id);
    }
    let workspace = reaper::reopen_workspace(&run)?;
    let outcome = outcome_file::read(&dir)?.ok_or(CommitError::NoOutcome)?;
    let mut record = reaper::finalize_leftovers(
        &dir,
        &run,
        &commit_plan,
        &outcome,
        workspace.as_ref(),
        recorder,
    )?;
    run.state = RunState::Recorded;
    dir.write_record(&run)?;
    record.post_process = reaper::run_post_process(recorder, &commit_plan, &record, &dir);
    Ok(PostProcessResult::Committed(Box::new(record)))
}

/// Lets the reaper finish one id, and returns its problem as an error.
fn finish_dead(
    home: &Home,
    recorder: &mut Recorder,
    id: &AnalysisId,
) -> Result<PostProcessResult, StagedCommandError> {
    let mut reaped = reaper::reap_one(home, recorder, id);
    match (reaped.finished.pop(), reaped.problems.pop()) {
        (Some(record), _) => Ok(PostProcessResult::Committed(Box::new(record))),
        (None, Some(problem)) => Err(StagedCommandError::Read {
            path: home.pending().join(id.as_str()),
            source: io::Error::other(problem),
        }),
        (None, None) => Err(StagedCommandError::NothingDue { id: id.clone() }),
    }
}

fn repeat_post_process(
    home: &Home,
    recorder: &mut Recorder,
    id: &AnalysisId,
) -> Result<PostProcessResult, StagedCommandError> {
    let latest = recorder.with(|store| store.show(id.as_str(), None))?;
    let attempt = latest.summary.attempt;
    if !latest.summary.state.is_final() {
        return Err(StagedCommandError::NotHere {
            id: id.clone(),
            attempt,
            state: latest.summary.state,
            host: latest.summary.host,
        });
    }
    // The lock keeps other callers out, and the outputs are laid out in the directory.
    let dir = RunDir::claim(home, id, attempt)?;
    let report = post_process::run_if_due(recorder, (id.as_str(), attempt), dir.path());
    dir.remove()?;
    command_result(id, attempt, report)
}

fn repeat_in_dir(
    recorder: &mut Recorder,
    dir: &RunDir,
    run: &RunRecord,
) -> Result<PostProcessResult, StagedCommandError> {
    let report = post_process::run_if_due(recorder, (run.id.as_str(), run.attempt), dir.path());
    command_result(&run.id, run.attempt, report)
}

fn command_result(
    id: &AnalysisId,
    attempt: u32,
    report: Option<PostProcessReport>,
) -> Result<PostProcessResult, StagedCommandError> {
    match report {
        Some(report) => Ok(PostProcessResult::CommandRun { attempt, report }),
        None => Err(StagedCommandError::NothingDue { id: id.clone() }),
    }
}

fn check_database(
    recorder: &mut Recorder,
    run: &RunRecord,
    commit_plan: &CommitPlan,
) -> Result<(), StagedCommandError> {
    match recorder.store()?.id() == commit_plan.database_id {
        true => Ok(()),
        false => Err(StagedCommandError::OtherDatabase {
            id: run.id.clone(),
            database: commit_plan.database.clone(),
        }),
    }
}

/// Results that were made elsewhere and are to be recorded.
pub struct ExternalResult<'a> {
    /// The id to record them under.
    pub id: &'a AnalysisId,
    /// Whether the id may exist already.
    pub id_reuse: IdReuse,
    /// The status to record.
    pub status: Status,
    /// This file becomes the output `result.json`.
    pub result: Option<&'a Path>,
    /// Everything in this directory becomes an output. The directory is only read.
    pub dir: Option<&'a Path>,
    /// Which files to take from the directory.
    pub collection: CollectionSettings,
}

/// Commits results that were made without a sandbox, and marks them as such. The files are collected by the same rules
/// as the outputs of a program.
pub fn record(
    home: &Home,
    recorder: &mut Recorder,
    external: &ExternalResult<'_>,
    progress: &mut dyn FnMut(collect::CollectProgress),
) -> Result<Record, StagedCommandError> {
    let number = recorder.next_attempt_number(external.id)?;
    let dir = RunDir::claim(home, external.id, number)?;
    let mut row = RecordedRow::Absent;
    let done = record_in(&dir, recorder, external, number, &mut row, progress);
    match (&done, row) {
        (Ok(_), _) | (Err(_), RecordedRow::Absent) => dir.remove()?,
        // The reaper finishes it: everything is in the artifact store.
        (Err(_), RecordedRow::Begun) => drop(dir),
    }
    done
}

#[derive(Clone, Copy)]
enum RecordedRow {
    Absent,
    Begun,
}

fn record_in(
    dir: &RunDir,
    recorder: &mut Recorder,
    external: &ExternalResult<'_>,
    number: u32,
    row: &mut RecordedRow,
    progress: &mut dyn FnMut(collect::CollectProgress),
) -> Result<Record, StagedCommandError> {
    let mut run = RunRecord::new(external.id, Path::new("/tmp"), number);
    let artifacts = recorder.artifacts()?;
    let mut commit_plan = recorder.new_commit_plan(&external.collection, &artifacts, None)?;
    commit_plan.workspace_reowned = true;
    run.commit_plan = Some(commit_plan.clone());
    dir.write_record(&run)?;
    let mut record = record_builder::external_result_record(
        external.id,
        number,
        external.dir.unwrap_or(Path::new("/")),
        external.status,
    );
    record.isolation.level = Some(IsolationLevel::None);
    let opened = external.dir.map(open_dir).transpose()?;
    let leftovers = match &opened {
        // Every file must have the same owner as the directory.
        Some((dir, owner_uid)) => Leftovers::Directory {
            dir: dir.as_fd(),
            owner_uid: *owner_uid,
        },
        None => Leftovers::Nothing,
    };
    let finisher = Finisher::Import;
    let ended = EndedAttempt::new(dir, &run, &commit_plan, &record, leftovers, finisher);
    let mut manifest = build_manifest(&ended, progress)?;
    if let Some(path) = external.result {
        add_result(dir, &mut manifest, path, external.dir)?;
    }
    dir.write_file(StateFile::Manifest, &manifest, Durability::Synced)?;
    // Everything is in the store before the row exists, so the reaper can finish the attempt without the directory.
    output_transfer::copy_outputs(&ended, recorder)?;
    run.attempt = begin_row(recorder, &run, &commit_plan, external.id_reuse)?;
    *row = RecordedRow::Begun;
    record.attempt = run.attempt;
    outcome_file::write_durably(dir, &record)?;
    let ended = EndedAttempt::new(dir, &run, &commit_plan, &record, leftovers, finisher);
    let mut record = finalize::finalize_attempt(&ended, recorder, progress)?;
    let key = (external.id.as_str(), record.attempt);
    record.post_process = post_process::run_if_due(recorder, key, dir.path());
    Ok(record)
}

fn open_dir(path: &Path) -> Result<(std::os::fd::OwnedFd, u32), StagedCommandError> {
    use rustix::fs::{Mode, OFlags};
    let failed = |e: rustix::io::Errno| StagedCommandError::Read {
        path: path.to_path_buf(),
        source: e.into(),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
    let owner = rustix::fs::fstat(&dir).map_err(failed)?.st_uid;
    Ok((dir, owner))
}

/// Opens a regular file. Never waits for the other end of a FIFO.
fn open_file(path: &Path) -> io::Result<std::fs::File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is not a regular file")),
    }
}

/// Adds the file as the output `result.json`.
fn add_result(
    dir: &RunDir,
    manifest: &mut Manifest,
    path: &Path,
    beside: Option<&Path>,
) -> Result<(), StagedCommandError> {
    let failed = |source| StagedCommandError::Read {
        path: path.to_path_buf(),
        source,
    };
    let mut bytes = Vec::new();
    let file = open_file(path).map_err(failed)?;
    file.take(RESULT_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > RESULT_BYTES_MAX {
        let path = path.to_path_buf();
        return Err(StagedCommandError::ResultTooLarge { path });
    }
    let name = OutputPath::new(b"result.json".to_vec())?;
    let outputs = &mut manifest.collected.outputs;
    let at = match outputs.binary_search_by(|o| o.path.cmp(&name)) {
        Ok(_) => {
            let dir = beside.unwrap_or(Path::new("")).to_path_buf();
            return Err(StagedCommandError::TwoResults { dir });
        }
        Err(at) => at,
    };
    let aside = Artifacts::open(&dir.objects()).map_err(CommitError::from)?;
    let hold = aside.lock_shared().map_err(CommitError::from)?;
    let blake3 = aside.put(&hold, &bytes).map_err(CommitError::from)?;
    aside.make_durable().map_err(CommitError::from)?;
    let output = Output {
        path: name,
        bytes: bytes.len() as u64,
        blake3,
        media_type: String::from("application/json"),
        modified_ms: i64::try_from(home::unix_ms()).unwrap_or(i64::MAX),
        inode: 0,
    };
    outputs.insert(at, output);
    manifest.collected.bytes += bytes.len() as u64;
    match result_value::check(&bytes) {
        Ok(text) => (manifest.result, manifest.result_note) = (Some(text), None),
        Err(e) => manifest.result_note = Some(e.to_string()),
    }
    Ok(())
}
