//! The same life step by step: `workspace create`, `run --in`, `post-process`, `workspace remove`; and `record`, for
//! results that were made without a sandbox.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::attempt;
use crate::attempt::finalize::{self, Ended, Left, SettleError};
use crate::attempt::post_process;
use crate::attempt::record::{PostProcessed, Record, Status};
use crate::attempt::record_builder;
use crate::attempt::recorder::Ledger;
use crate::collect::{self, CollectError, Modes};
use crate::home::{self, Home, HomeError};
use crate::recovery::reaper;
use crate::request::{Again, AnalysisId, Collection, Level};
use crate::run_dir::{Durable, Paper, RunDir, RunRecord, RunState, Task};
use crate::workspace::{Receipt, Workspace, WorkspaceError};
use store::State;
use store::artifacts::{Artifacts, ContentCheck, TransferMode};
use store::types::manifest::{self, Manifest, Output, OutputPath, OutputPathError};
use store::types::result_value;

#[derive(Debug, thiserror::Error)]
pub enum StepsError {
    #[error(transparent)]
    Home(#[from] HomeError),
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
    #[error(transparent)]
    Settle(#[from] SettleError),
    #[error("remove its workspace: {0}")]
    Remove(String),
    #[error(
        "{id} is {state} (attempt {attempt}, begun on {host}); what it left is in another FUMEHOOD_HOME or on another machine: finish it there, or give it up with `fumehood rm --force {id}`"
    )]
    NotHere {
        id: AnalysisId,
        attempt: u32,
        state: State,
        host: String,
    },
    #[error("nothing has run in the workspace of {id}; run in it with `fumehood run --in {id} …`")]
    NotRun { id: AnalysisId },
    #[error("{id} has nothing to finish: it is committed, and no post_process command awaits it")]
    NothingDue { id: AnalysisId },
    #[error(
        "{id} ran in its workspace and is not committed; `fumehood post-process {id}` commits it, `--discard` removes it with what it left"
    )]
    Uncommitted { id: AnalysisId },
    #[error("{id} was begun for the database {database}; name that one with --db")]
    OtherDatabase { id: AnalysisId, database: String },
    #[error("read {path:?}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path:?} is larger than {} bytes", RESULT_BYTES_MAX)]
    ResultTooLarge { path: PathBuf },
    #[error("{dir:?} holds a result.json of its own; leave out --result, or that file")]
    TwoResults { dir: PathBuf },
    #[error("read what is in the directory")]
    Collect(#[from] CollectError),
    #[error(transparent)]
    Path(#[from] OutputPathError),
}

/// A result that is handed in is read into memory.
const RESULT_BYTES_MAX: u64 = 64 << 20;

/// Makes a workspace in which `run --in` will run, and in which the caller may put what it likes before.
pub fn create_workspace(
    home: &Home,
    ledger: Option<&mut Ledger>,
    id: &AnalysisId,
    root: &Path,
    keep_for_ms: u64,
) -> Result<PathBuf, StepsError> {
    let number = match ledger {
        Some(ledger) => next_number(ledger, id)?,
        None => 1,
    };
    let root = std::fs::canonicalize(root).map_err(|source| WorkspaceError::Root {
        root: root.to_path_buf(),
        source,
    })?;
    let dir = RunDir::claim(home, id, number)?;
    let mut record = attempt::fresh_record(id, &root, number);
    dir.write(&record)?;
    let made = || -> Result<PathBuf, StepsError> {
        let mut made = Workspace::draft(record.workspace.clone(), &record.draft, None)?;
        record.workspace_is = Some(made.is());
        dir.write(&record)?;
        if let Err(e) = made.publish() {
            let _left_to_the_reaper = made.remove(Receipt::NothingRan);
            return Err(e.into());
        }
        record.state = RunState::Open {
            until: home::unix_seconds() + keep_for_ms.div_ceil(1000),
        };
        dir.write(&record)?;
        Ok(record.workspace.clone())
    };
    let mut made = made;
    match made() {
        Ok(path) => Ok(path),
        Err(e) => {
            let _left_to_the_reaper = dir.remove();
            Err(e)
        }
    }
}

fn next_number(ledger: &mut Ledger, id: &AnalysisId) -> Result<u32, StepsError> {
    Ok(ledger.with(|store| store.next_attempt_number(id.as_str()))?)
}

/// How a workspace's uncommitted end is treated when it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    Refused,
    Wanted,
}

/// Removes the workspace of an id. What ran in it and is not committed is only discarded on request; its end is then
/// committed without outputs.
pub fn remove_workspace(
    home: &Home,
    ledger: Option<&mut Ledger>,
    id: &AnalysisId,
    discard: Discard,
) -> Result<PathBuf, StepsError> {
    let found = RunDir::find(home, id)?;
    let (dir, record) = found.ok_or(HomeError::NoWorkspace { id: id.clone() })?;
    let unsettled = matches!(
        record.state,
        RunState::Ran | RunState::Live | RunState::Quarantined
    );
    if let Some(task) = record.task.as_ref().filter(|_| unsettled) {
        let Some(ledger) = ledger.filter(|_| discard == Discard::Wanted) else {
            return Err(StepsError::Uncommitted { id: id.clone() });
        };
        // A database that is gone for good must not hold on to it for ever.
        if ledger.store()?.id() == task.database_id {
            give_up(&dir, &record, task, ledger)?;
        }
    }
    reaper::remove(&record).map_err(StepsError::Remove)?;
    dir.remove()?;
    Ok(record.workspace)
}

/// Commits how it ended, without what it left. What never began has nothing to commit.
fn give_up(
    dir: &RunDir,
    run: &RunRecord,
    task: &Task,
    ledger: &mut Ledger,
) -> Result<(), StepsError> {
    let known = ledger.with(|store| store.attempt_with_key(&task.key))?;
    if known.is_none() && !task.begun {
        return Ok(());
    }
    if finalize::ending(dir)?.is_none() {
        finalize::write_lost(dir, &record_builder::runner_lost(run))?;
    }
    let nothing = Manifest {
        version: manifest::VERSION,
        collected: finalize::all_lost(),
        ..Manifest::default()
    };
    dir.put(Paper::Manifest, &nothing, Durable::Yes)?;
    reaper::settle_left(dir, run, task, None, ledger)?;
    Ok(())
}

/// What `post-process` did.
pub enum Processed {
    /// The attempt was committed now.
    Committed(Box<Record>),
    /// It was committed before; only the platform's own step was due.
    Stepped { attempt: u32, step: PostProcessed },
}

/// Collects and commits what ran by `run --in`; finishes what could not be committed before; repeats the platform's own
/// step where it failed.
pub fn post_process(
    home: &Home,
    ledger: &mut Ledger,
    id: &AnalysisId,
) -> Result<Processed, StepsError> {
    let Some((dir, mut run)) = RunDir::find(home, id)? else {
        return repeat_step(home, ledger, id);
    };
    let Some(task) = run.task.clone() else {
        return Err(StepsError::NotRun { id: id.clone() });
    };
    match run.state {
        RunState::Open { .. } => return Err(StepsError::NotRun { id: id.clone() }),
        RunState::Kept { .. } | RunState::Recorded => return repeat_in(ledger, &dir, &run),
        RunState::Live | RunState::Quarantined | RunState::Ran => {}
    }
    same_database(ledger, &run, &task)?;
    if run.state != RunState::Ran {
        drop(dir);
        return finish_dead(home, ledger, id);
    }
    let workspace = reaper::reopen(&run)?;
    let mut record = reaper::settle_left(&dir, &run, &task, workspace.as_ref(), ledger)?;
    run.state = RunState::Recorded;
    dir.write(&run)?;
    record.post_process = reaper::step_due(ledger, &task, &record, &dir);
    Ok(Processed::Committed(Box::new(record)))
}

/// The reaper's work for one id, with its problem told.
fn finish_dead(home: &Home, ledger: &mut Ledger, id: &AnalysisId) -> Result<Processed, StepsError> {
    let mut reaped = reaper::reap_one(home, ledger, id);
    match (reaped.finished.pop(), reaped.problems.pop()) {
        (Some(record), _) => Ok(Processed::Committed(Box::new(record))),
        (None, Some(problem)) => Err(StepsError::Read {
            path: home.pending().join(id.as_str()),
            source: io::Error::other(problem),
        }),
        (None, None) => Err(StepsError::NothingDue { id: id.clone() }),
    }
}

fn repeat_step(home: &Home, ledger: &mut Ledger, id: &AnalysisId) -> Result<Processed, StepsError> {
    let latest = ledger.with(|store| store.show(id.as_str(), None))?;
    let attempt = latest.summary.attempt;
    if !latest.summary.state.is_final() {
        return Err(StepsError::NotHere {
            id: id.clone(),
            attempt,
            state: latest.summary.state,
            host: latest.summary.host,
        });
    }
    // The lock keeps a second caller out, and the directory is where the outputs are laid out.
    let dir = RunDir::claim(home, id, attempt)?;
    let step = post_process::if_due(ledger, (id.as_str(), attempt), dir.path());
    dir.remove()?;
    stepped(id, attempt, step)
}

fn repeat_in(ledger: &mut Ledger, dir: &RunDir, run: &RunRecord) -> Result<Processed, StepsError> {
    let step = post_process::if_due(ledger, (run.id.as_str(), run.attempt), dir.path());
    stepped(&run.id, run.attempt, step)
}

fn stepped(
    id: &AnalysisId,
    attempt: u32,
    step: Option<PostProcessed>,
) -> Result<Processed, StepsError> {
    match step {
        Some(step) => Ok(Processed::Stepped { attempt, step }),
        None => Err(StepsError::NothingDue { id: id.clone() }),
    }
}

fn same_database(ledger: &mut Ledger, run: &RunRecord, task: &Task) -> Result<(), StepsError> {
    match ledger.store()?.id() == task.database_id {
        true => Ok(()),
        false => Err(StepsError::OtherDatabase {
            id: run.id.clone(),
            database: task.database.clone(),
        }),
    }
}

/// Results to be recorded that were made elsewhere.
pub struct HandedIn<'a> {
    pub id: &'a AnalysisId,
    pub again: Again,
    pub status: Status,
    /// Becomes `result.json`.
    pub result: Option<&'a Path>,
    /// Everything in it becomes outputs; it is only read.
    pub dir: Option<&'a Path>,
    pub collection: Collection,
}

/// Commits results made without a sandbox, marked as such. What is handed in is read by the same rules as what a
/// program left.
pub fn record(
    home: &Home,
    ledger: &mut Ledger,
    handed: &HandedIn<'_>,
    progress: &mut dyn FnMut(collect::Progress),
) -> Result<Record, StepsError> {
    let number = next_number(ledger, handed.id)?;
    let dir = RunDir::claim(home, handed.id, number)?;
    let mut begun = Begun::Not;
    let done = record_in(&dir, ledger, handed, number, &mut begun, progress);
    match (&done, begun) {
        (Ok(_), _) | (Err(_), Begun::Not) => dir.remove()?,
        // The reaper finishes it: everything is in the artifact store.
        (Err(_), Begun::InDatabase) => drop(dir),
    }
    done
}

#[derive(Clone, Copy)]
enum Begun {
    Not,
    InDatabase,
}

fn record_in(
    dir: &RunDir,
    ledger: &mut Ledger,
    handed: &HandedIn<'_>,
    number: u32,
    begun: &mut Begun,
    progress: &mut dyn FnMut(collect::Progress),
) -> Result<Record, StepsError> {
    let mut run = attempt::fresh_record(handed.id, Path::new("/tmp"), number);
    let artifacts = ledger.artifacts()?;
    let mut task = ledger.task(&handed.collection, &artifacts, None)?;
    task.taken_over = true;
    run.task = Some(task.clone());
    dir.write(&run)?;
    let mut record = record_builder::handed_in(
        handed.id,
        number,
        handed.dir.unwrap_or(Path::new("/")),
        handed.status,
    );
    record.isolation.level = Some(Level::None);
    let opened = handed.dir.map(open_dir).transpose()?;
    let left = match &opened {
        // Everything in it must belong to whom it belongs itself.
        Some((dir, owner_uid)) => Left::Directory {
            dir: dir.as_fd(),
            owner_uid: *owner_uid,
        },
        None => Left::Nothing,
    };
    let before = run.clone();
    let ended = Ended {
        dir,
        run: &before,
        task: &task,
        left,
        transfer: &|_| TransferMode::Copy,
        trust: ContentCheck::TrustManifest,
        modes: Modes::Respect,
    };
    let mut manifest = finalize::gather(&ended, progress)?;
    if let Some(path) = handed.result {
        add_result(dir, &mut manifest, path, handed.dir)?;
    }
    dir.put(Paper::Manifest, &manifest, Durable::Yes)?;
    // Everything is in the store before the database hears of it, so the reaper could finish it without the directory.
    finalize::keep_copy(&ended, ledger)?;
    run.attempt = attempt::begin_row(ledger, &run, &task, handed.again)?;
    *begun = Begun::InDatabase;
    record.attempt = run.attempt;
    finalize::write_lost(dir, &record)?;
    let ended = Ended { run: &run, ..ended };
    let mut record = finalize::settle(&ended, ledger, progress)?;
    let key = (handed.id.as_str(), record.attempt);
    record.post_process = post_process::if_due(ledger, key, dir.path());
    Ok(record)
}

fn open_dir(path: &Path) -> Result<(std::os::fd::OwnedFd, u32), StepsError> {
    use rustix::fs::{Mode, OFlags};
    let failed = |e: rustix::io::Errno| StepsError::Read {
        path: path.to_path_buf(),
        source: e.into(),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
    let owner = rustix::fs::fstat(&dir).map_err(failed)?.st_uid;
    Ok((dir, owner))
}

/// Never waits for the other end of a FIFO.
fn open_file(path: &Path) -> io::Result<std::fs::File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is not a regular file")),
    }
}

/// The file that was named becomes the output `result.json`.
fn add_result(
    dir: &RunDir,
    manifest: &mut Manifest,
    path: &Path,
    beside: Option<&Path>,
) -> Result<(), StepsError> {
    let failed = |source| StepsError::Read {
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
        return Err(StepsError::ResultTooLarge { path });
    }
    let name = OutputPath::new(b"result.json".to_vec())?;
    let outputs = &mut manifest.collected.outputs;
    let at = match outputs.binary_search_by(|o| o.path.cmp(&name)) {
        Ok(_) => {
            let dir = beside.unwrap_or(Path::new("")).to_path_buf();
            return Err(StepsError::TwoResults { dir });
        }
        Err(at) => at,
    };
    let aside = Artifacts::open(&dir.objects()).map_err(SettleError::from)?;
    let hold = aside.lock_shared().map_err(SettleError::from)?;
    let blake3 = aside.put(&hold, &bytes).map_err(SettleError::from)?;
    aside.make_durable().map_err(SettleError::from)?;
    let output = Output {
        path: name,
        bytes: bytes.len() as u64,
        blake3,
        media_type: String::from("application/json"),
        modified_ms: i64::try_from(crate::attempt::pipeline::unix_ms()).unwrap_or(i64::MAX),
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
