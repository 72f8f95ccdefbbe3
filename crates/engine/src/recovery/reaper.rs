//! Finishes or removes what the dead left: cgroups with whatever is still in them, attempts that are not committed,
//! workspaces, run directories.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use sandbox::{cgroup, quota};

use crate::attempt::finalize::{self, Ended, Left, SettleError};
use crate::attempt::post_process;
use crate::attempt::record::{PostProcessed, Record};
use crate::attempt::record_builder;
use crate::attempt::recorder::Ledger;
use crate::collect::Modes;
use crate::home::{self, Home};
use crate::plan::limits::{self, error_chain};
use crate::request::AnalysisId;
use crate::run_dir::{RunDir, RunRecord, RunState, Task};
use crate::workspace::{self, Patience, Workspace, WorkspaceError};
use store::artifacts::{ContentCheck, TransferMode, refuse_network_fs};

/// What one pass did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reaped {
    pub removed: Vec<PathBuf>,
    pub kept: Vec<(PathBuf, u64)>,
    /// Attempts whose runner had died, or whose database had been away, and that are committed now.
    pub finished: Vec<Record>,
    /// Attempts that await something else than us, and what.
    pub waiting: Vec<String>,
    pub problems: Vec<String>,
}

/// Looks at every run directory whose runner is gone. Called before each run, so it must cost
/// nothing when there is nothing: two directory listings, and one lock tried for each living run.
/// Without a ledger, attempts that are to be recorded are left alone.
pub fn reap(home: &Home, ledger: Option<&mut Ledger>) -> Reaped {
    reap_some(home, ledger, &|record| match record.state {
        RunState::Kept { until } | RunState::Open { until } => until <= home::unix_seconds(),
        RunState::Live | RunState::Quarantined => true,
        RunState::Ran | RunState::Recorded => false,
    })
}

/// As [`reap`], and a kept workspace goes before its time.
pub fn reap_kept(home: &Home, ledger: Option<&mut Ledger>, id: Option<&str>) -> Reaped {
    reap_some(home, ledger, &|record| match record.state {
        RunState::Ran | RunState::Open { .. } => false,
        _ => id.is_none_or(|id| record.id.as_str() == id),
    })
}

/// Everything that can be finished of one id.
pub fn reap_one(home: &Home, ledger: &mut Ledger, id: &AnalysisId) -> Reaped {
    let mut reaped = Reaped::default();
    let due = |record: &RunRecord| matches!(record.state, RunState::Live | RunState::Quarantined);
    for base in [home.runs(), home.pending()] {
        reap_id(&base.join(id.as_str()), Some(ledger), &due, &mut reaped);
    }
    reaped
}

fn reap_some(
    home: &Home,
    mut ledger: Option<&mut Ledger>,
    due: &dyn Fn(&RunRecord) -> bool,
) -> Reaped {
    let mut reaped = Reaped::default();
    for base in [home.runs(), home.pending()] {
        for id in std::fs::read_dir(base).into_iter().flatten().flatten() {
            reap_id(&id.path(), ledger.as_deref_mut(), due, &mut reaped);
        }
    }
    reaped
}

fn reap_id(
    id: &Path,
    mut ledger: Option<&mut Ledger>,
    due: &dyn Fn(&RunRecord) -> bool,
    reaped: &mut Reaped,
) {
    let mut living = false;
    for attempt in std::fs::read_dir(id).into_iter().flatten().flatten() {
        match lock_of_the_dead(&attempt.path()) {
            Some(dir) => look_at(dir, due, ledger.as_deref_mut(), reaped),
            None => living = true,
        }
    }
    if !living {
        // Made and abandoned before its first attempt was.
        let _not_empty = std::fs::remove_dir(id);
    }
}

/// The run directory, if its runner is dead. One that was killed while it started its launcher leaves the lock
/// with that for a moment.
fn lock_of_the_dead(path: &Path) -> Option<RunDir> {
    const TRIES: u32 = 20;
    for _ in 0..TRIES {
        if let Some(dir) = RunDir::try_lock(path).ok()? {
            return Some(dir);
        }
        let runner = RunDir::runner_named_in(path)?;
        if Path::new(&format!("/proc/{runner}")).exists() {
            return None;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    None
}

fn look_at(
    dir: RunDir,
    due: &dyn Fn(&RunRecord) -> bool,
    ledger: Option<&mut Ledger>,
    reaped: &mut Reaped,
) {
    let record = match dir.read() {
        Ok(Some(record)) => record,
        // Claimed, and its runner died before it made anything.
        Ok(None) => return drop(dir.remove()),
        Err(_) if dir.was_cut_off() => return remove_cut_off(dir, Path::new(ROOT), reaped),
        Err(e) => return reaped.problems.push(error_chain(&e)),
    };
    // Another machine's (a home on a shared disk): its processes cannot be seen from here. On a local disk it is this
    // machine's, under another name, since we have its lock.
    if record.host != home::machine() && refuse_network_fs(dir.path()).is_err() {
        let waits = format!("{} is the machine {}'s", record.id, record.host);
        return reaped.waiting.push(waits);
    }
    if !due(&record) {
        match record.state {
            RunState::Kept { until } => reaped.kept.push((record.workspace, until)),
            RunState::Ran => reaped.waiting.push(format!(
                "{} ran in its workspace; `fumehood post-process {}` commits it",
                record.id, record.id
            )),
            _ => {}
        }
        return;
    }
    let unsettled = matches!(record.state, RunState::Live | RunState::Quarantined);
    match (&record.task, ledger) {
        (_, ledger) if unsettled && record.prepared => give_back(&dir, record, ledger, reaped),
        (Some(task), Some(ledger)) if unsettled => match finish(&dir, &record, task, ledger) {
            Ok(Finished::Committed(done)) => {
                reaped.finished.push(*done);
                let made = record.workspace_is.is_some();
                reaped.removed.extend(made.then_some(record.workspace));
                reaped
                    .problems
                    .extend(dir.remove().err().map(|e| error_chain(&e)));
            }
            Ok(Finished::NeverBegun) => remove_all(dir, record, reaped),
            Ok(Finished::OtherDatabase) => reaped.waiting.push(format!(
                "{} belongs to the database {}; `fumehood gc --db …` with that one finishes it",
                record.id, task.database
            )),
            Err(problem) => reaped.problems.push(problem),
        },
        (Some(task), None) if unsettled => reaped.waiting.push(format!(
            "{} awaits its commit to {}",
            record.id, task.database
        )),
        _ => remove_all(dir, record, reaped),
    }
}

/// Where a workspace stands, unless somebody wanted it elsewhere.
const ROOT: &str = "/tmp";

/// The machine stopped before it was known what the run had made. Its attempt, if the database has it, is given up by `gc`.
fn remove_cut_off(dir: RunDir, root: &Path, reaped: &mut Reaped) {
    let id = dir.path().parent().and_then(Path::file_name);
    let id = id.and_then(|id| AnalysisId::new(id.to_str()?).ok());
    let left = id
        .as_ref()
        .and_then(|id| workspace::without_record(root, id));
    if let Some((path, is)) = left {
        match workspace::remove_left_behind(&path, is, Patience::AMoment) {
            Ok(()) => reaped.removed.push(path),
            Err(e) => return reaped.problems.push(error_chain(&e)),
        }
    }
    let removed = dir.remove();
    reaped
        .problems
        .extend(removed.err().map(|e| error_chain(&e)));
}

/// The workspace is one that `workspace create` made: it is not ours to remove. What ran in it awaits `post-process`; if
/// nothing did, it can be run in.
fn give_back(
    dir: &RunDir,
    mut record: RunRecord,
    ledger: Option<&mut Ledger>,
    reaped: &mut Reaped,
) {
    if let Some(task) = record.task.as_mut().filter(|task| !task.begun) {
        match number_of(task, ledger) {
            Ok(None) => {}
            // The runner died before it could write that down.
            Ok(Some(number)) => (task.begun, record.attempt) = (true, number),
            Err(why) => {
                let waits = format!("{} waits in its workspace: {why}", record.id);
                return reaped.waiting.push(waits);
            }
        }
    }
    let mut back = || -> Result<(), String> {
        end_processes(&record)?;
        if let Some(workspace) = reopen(&record).map_err(|e| error_chain(&e))? {
            workspace.take_back().map_err(|e| error_chain(&e))?;
        }
        release_quota(&record)?;
        let began = record.task.as_ref().is_some_and(|task| task.begun);
        if began
            && finalize::ending(dir)
                .map_err(|e| error_chain(&e))?
                .is_none()
        {
            let lost = record_builder::runner_lost(&record);
            finalize::write_lost(dir, &lost).map_err(|e| error_chain(&e))?;
        }
        record.cgroups.clear();
        match (&mut record.task, began) {
            (Some(task), true) => {
                task.taken_over = true;
                record.state = RunState::Ran;
            }
            _ => {
                let until = home::unix_seconds() + PREPARED_AGAIN_S;
                (record.task, record.state) = (None, RunState::Open { until });
            }
        }
        dir.write(&record).map_err(|e| error_chain(&e))
    };
    match back() {
        Ok(()) => reaped.waiting.push(format!(
            "{} is back in its workspace as it was left",
            record.id
        )),
        Err(problem) => reaped.problems.push(problem),
    }
}

/// Which attempt the database has with the task's key, if any.
fn number_of(task: &Task, ledger: Option<&mut Ledger>) -> Result<Option<u32>, String> {
    let said = |e: SettleError| error_chain(&e);
    if let Some(ledger) = ledger
        && ledger.store().map_err(said)?.id() == task.database_id
    {
        let found = ledger.with(|store| store.attempt_with_key(&task.key));
        return found.map_err(said);
    }
    Err(format!(
        "`fumehood gc --db …` with the database {} finishes it",
        task.database
    ))
}

/// For how long a workspace stands that was prepared, and whose runner died before it began.
const PREPARED_AGAIN_S: u64 = 24 * 3600;

fn remove_all(dir: RunDir, record: RunRecord, reaped: &mut Reaped) {
    match remove(&record) {
        Ok(()) => {
            let made = record.workspace_is.is_some();
            reaped.removed.extend(made.then_some(record.workspace));
            reaped
                .problems
                .extend(dir.remove().err().map(|e| error_chain(&e)));
        }
        Err(problem) => reaped.problems.push(problem),
    }
}

enum Finished {
    Committed(Box<Record>),
    /// The database never heard of it: nothing ran.
    NeverBegun,
    OtherDatabase,
}

/// Takes up an attempt where its runner stopped, to its commit and the end of its workspace. The run directory
/// is left to be removed.
fn finish(
    dir: &RunDir,
    run: &RunRecord,
    task: &Task,
    ledger: &mut Ledger,
) -> Result<Finished, String> {
    let said = |e: SettleError| error_chain(&e);
    if ledger.store().map_err(said)?.id() != task.database_id {
        return Ok(Finished::OtherDatabase);
    }
    // First the processes: nothing is read or removed under a living one.
    end_processes(run)?;
    let mut run = run.clone();
    if finalize::ending(dir)
        .map_err(|e| error_chain(&e))?
        .is_none()
    {
        let begun = ledger.with(|store| store.attempt_with_key(&task.key));
        match (begun.map_err(said)?, task.begun) {
            (None, false) => return Ok(Finished::NeverBegun),
            // The database is an older copy of itself: it gets the attempt anew.
            (None, true) => {}
            (Some(number), _) => run.attempt = number,
        }
        let lost = record_builder::runner_lost(&run);
        finalize::write_outcome(dir, &lost).map_err(said)?;
    }
    let workspace = reopen(&run).map_err(|e| error_chain(&e))?;
    let mut record = settle_left(dir, &run, task, workspace.as_ref(), ledger).map_err(said)?;
    // The directory itself, its draft and its quota.
    drop(workspace);
    remove(&run)?;
    record.post_process = step_due(ledger, task, &record, dir);
    Ok(Finished::Committed(Box::new(record)))
}

/// The platform's own step, with the artifact store that the attempt was taken into.
pub(crate) fn step_due(
    ledger: &mut Ledger,
    task: &Task,
    record: &Record,
    dir: &RunDir,
) -> Option<PostProcessed> {
    let key = (record.id.as_str(), record.attempt);
    ledger.with_artifacts_of(task, |ledger| post_process::if_due(ledger, key, dir.path()))
}

/// The workspace of a dead runner, if it still stands.
pub(crate) fn reopen(run: &RunRecord) -> Result<Option<Workspace>, WorkspaceError> {
    match run.workspace_is {
        Some(is) => Workspace::reopen(run.workspace.clone(), is, patience(run)),
        None => Ok(None),
    }
}

/// Settles what a workspace holds that nobody runs in any more.
pub(crate) fn settle_left(
    dir: &RunDir,
    run: &RunRecord,
    task: &Task,
    workspace: Option<&Workspace>,
    ledger: &mut Ledger,
) -> Result<Record, SettleError> {
    let ours = rustix::process::geteuid().as_raw();
    let owner_uid = match (task.taken_over, run.uid) {
        (false, Some(uid)) => uid,
        _ => ours,
    };
    let left = match workspace {
        // What a workspace in memory held died with its runner; the directory on disk is empty.
        Some(workspace) if !task.memory => Left::Directory {
            dir: workspace.dir(),
            owner_uid,
        },
        // It never had one.
        _ if run.workspace_is.is_none() => Left::Nothing,
        _ => Left::Gone,
    };
    let transfer = |_: &Record| match run.state {
        RunState::Ran => TransferMode::Copy,
        _ => TransferMode::Move,
    };
    let ended = Ended {
        dir,
        run,
        task,
        left,
        transfer: &transfer,
        trust: ContentCheck::Rehash,
        modes: Modes::Override,
    };
    ledger.with_artifacts_of(task, |ledger| finalize::settle(&ended, ledger, &mut |_| {}))
}

/// What could not be killed is not waited for at every start.
fn patience(record: &RunRecord) -> Patience {
    match record.state {
        RunState::Quarantined => Patience::None,
        _ => Patience::AMoment,
    }
}

/// Kills what is left of the run, as far as it can be told from others, and refuses while some of it may live.
fn end_processes(record: &RunRecord) -> Result<(), String> {
    cgroup::remove_left_behind(&record.cgroups, &record.boot_id).map_err(|e| error_chain(&e))?;
    let same_boot = record.boot_id.trim() == home::boot_id().trim();
    match record.init.filter(|_| same_boot) {
        Some(init) if init.lives() => Err(format!(
            "{} has processes that cannot be killed; its workspace stays until they are gone",
            record.id
        )),
        _ => Ok(()),
    }
}

pub(crate) fn remove(record: &RunRecord) -> Result<(), String> {
    // First the processes: nothing is removed under a living one.
    end_processes(record)?;
    // Made and not yet noted, it can only stand under its draft name, which nobody else knew.
    let unnoted = match record.workspace_is {
        Some(_) => None,
        None => workspace::Identity::of(&record.draft),
    };
    let paths = [record.draft.as_path(), record.workspace.as_path()];
    let found = paths.map(|path| (path, record.workspace_is.or(unnoted)));
    for (path, is) in found.into_iter().filter_map(|(path, is)| Some((path, is?))) {
        workspace::remove_left_behind(path, is, patience(record)).map_err(|e| error_chain(&e))?;
    }
    release_quota(record)
}

/// Whoever has leased the uid has its projects: limits are freed only while the lease's lock is ours, lest they be those
/// of a living run. Without the lock they are left: they are replaced when the project is used next.
fn release_quota(record: &RunRecord) -> Result<(), String> {
    let (Some(project), Some(uid)) = (record.project_quota, record.uid) else {
        return Ok(());
    };
    let root = record.workspace.parent().map(std::fs::File::open);
    let (Some(Ok(root)), Some(_lock)) = (root, crate::workspace::uid_pool::lock(uid)) else {
        return Ok(());
    };
    // A number that does not go with the uid is none that we gave.
    if !limits::projects(uid).any(|p| p == project) {
        return Ok(());
    }
    quota::release_left_behind(root.as_fd(), project)
        .map_err(|e| format!("free project {project} of its limits: {e}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::request::AnalysisId;

    /// Whoever can write a record cannot have the reaper remove what is no workspace of that id, though the record
    /// tells the truth about it.
    #[test]
    fn a_forged_record_removes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("home");
        let env = |name: &str| (name == "FUMEHOOD_HOME").then(|| at.clone());
        let home = Home::find(&env).unwrap().open().unwrap();
        let root = dir.path().join("work");
        let own = root.join("scidex-analysis-mine");
        let others = root.join("scidex-analysis-other");
        let victim = root.join("victim");
        for path in [&own, &others, &victim] {
            std::fs::create_dir_all(path).unwrap();
        }
        let id = AnalysisId::new("mine").unwrap();
        let naming = |workspace: &Path| RunRecord {
            version: crate::run_dir::RECORD_VERSION,
            id: id.clone(),
            attempt: 1,
            host: home::machine(),
            boot_id: home::boot_id(),
            runner_pid: u32::MAX,
            workspace: workspace.to_path_buf(),
            draft: root.join(".scidex-analysis-mine-1"),
            workspace_is: workspace::Identity::of(workspace),
            uid: None,
            project_quota: None,
            cgroups: Vec::new(),
            init: None,
            state: RunState::Live,
            prepared: false,
            task: None,
        };
        let run = RunDir::claim(&home, &id, 1).unwrap();
        let path = run.path().to_path_buf();
        drop(run);
        for forged in [&others, &victim] {
            let run = RunDir::try_lock(&path).unwrap().unwrap();
            run.write(&naming(forged)).unwrap();
            drop(run);
            let reaped = reap_kept(&home, None, None);
            assert!(reaped.removed.is_empty(), "{reaped:?}");
            assert_eq!(reaped.problems.len(), 1, "{reaped:?}");
            assert!(forged.exists());
        }
        let run = RunDir::try_lock(&path).unwrap().unwrap();
        run.write(&naming(&own)).unwrap();
        drop(run);
        assert_eq!(reap(&home, None).problems, [""; 0]);
        assert!(!own.exists() && !path.exists(), "the control");
    }

    /// As a power cut leaves it: the name of the record is there, and nothing in it.
    #[test]
    fn a_run_that_was_cut_off_is_cleared_away() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("home");
        let env = |name: &str| (name == "FUMEHOOD_HOME").then(|| at.clone());
        let home = Home::find(&env).unwrap().open().unwrap();
        let (id, root) = (AnalysisId::new("cut").unwrap(), dir.path());
        let workspace = root.join("scidex-analysis-cut");
        let close = |path: &Path| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
            std::fs::set_permissions(path, mode).unwrap();
        };
        let run = RunDir::claim(&home, &id, 1).unwrap();
        let path = run.path().to_path_buf();
        drop(run);
        let cut_off = |content: &[u8]| {
            std::fs::write(path.join("run.json"), content).unwrap();
            let record = std::fs::File::open(path.join("run.json")).unwrap();
            record.set_modified(std::time::UNIX_EPOCH).unwrap();
            RunDir::try_lock(&path).unwrap().unwrap()
        };
        // Of this start of the machine, or with something in it: to be looked at by somebody.
        std::fs::write(path.join("run.json"), "").unwrap();
        assert_eq!(reap(&home, None).problems.len(), 1);
        assert!(!cut_off(b"{").was_cut_off() && !cut_off(b"{}").was_cut_off());
        assert_eq!(reap(&home, None).problems.len(), 1);

        // A directory of that name that is none of ours stays.
        std::fs::create_dir(&workspace).unwrap();
        close(&workspace);
        let mut reaped = Reaped::default();
        remove_cut_off(cut_off(b"\0\0\0"), root, &mut reaped);
        assert!(workspace.exists() && !path.exists(), "{reaped:?}");

        let hidden = workspace.join(sandbox::HIDDEN_DIR);
        std::fs::create_dir(&hidden).unwrap();
        close(&hidden);
        if rustix::process::geteuid().is_root() {
            let leased = Some(crate::workspace::uid_pool::RANGE.start);
            assert_eq!(workspace::without_record(root, &id), None, "root's own");
            std::os::unix::fs::chown(&workspace, leased, leased).unwrap();
            assert_eq!(workspace::without_record(root, &id), None);
            std::os::unix::fs::chown(&hidden, leased, leased).unwrap();
        }
        std::fs::create_dir_all(&path).unwrap();
        remove_cut_off(cut_off(b""), root, &mut reaped);
        assert_eq!(reaped.removed, std::slice::from_ref(&workspace));
        assert!(!workspace.exists() && !path.exists() && reaped.problems.is_empty());
    }
}
