//! Finishes or removes what dead runners left: cgroups with processes in them, attempts that are not committed,
//! workspaces, run directories.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use sandbox::{cgroup, quota};

use crate::attempt::error::CommitError;
use crate::attempt::finalize;
use crate::attempt::finalize::ended_attempt::{EndedAttempt, Finisher, Leftovers};
use crate::attempt::finalize::outcome_file;
use crate::attempt::post_process;
use crate::attempt::record::{PostProcessReport, Record};
use crate::attempt::record_builder;
use crate::attempt::recorder::Recorder;
use crate::home::{self, Home};
use crate::plan::limits::{self, error_chain};
use crate::run_dir::{CommitPlan, RunDir, RunRecord, RunState};
use crate::workspace::{self, LockWait, Workspace, WorkspaceError};
use store::artifacts::refuse_network_fs;
use store::types::analysis_id::AnalysisId;

/// What one pass did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReapReport {
    /// The workspaces and other paths that were removed.
    pub removed: Vec<PathBuf>,
    /// Workspaces that stay, each with the Unix time at which the reaper removes it.
    pub kept: Vec<(PathBuf, u64)>,
    /// Attempts that are committed now. Their runner had died, or the database had been unavailable.
    pub finished: Vec<Record>,
    /// Attempts that wait for something that the reaper cannot do, and for what.
    pub waiting: Vec<String>,
    /// What failed, as messages. The next pass tries it again.
    pub problems: Vec<String>,
}

impl ReapReport {
    /// Removes the run directory as the last thing, after the workspace.
    fn remove_run_dir(&mut self, dir: RunDir, record: RunRecord) {
        let had_workspace = record.workspace_identity.is_some();
        self.removed
            .extend(had_workspace.then_some(record.workspace));
        self.problems
            .extend(dir.remove().err().map(|e| error_chain(&e)));
    }
}

/// Handles every run directory whose runner is dead. It runs before each run, so it must be cheap if there is nothing
/// to do: two directory listings, and one try of a lock for each live run. Without a recorder it leaves attempts alone
/// that are to be recorded.
pub fn reap(home: &Home, recorder: Option<&mut Recorder>) -> ReapReport {
    reap_some(home, recorder, &|record| match record.state {
        RunState::Kept { until } | RunState::Open { until } => until <= home::unix_seconds(),
        RunState::Live | RunState::Quarantined => true,
        RunState::Ran | RunState::Recorded => false,
    })
}

/// As [`reap`], and removes kept workspaces before their time.
pub fn reap_kept(home: &Home, recorder: Option<&mut Recorder>, id: Option<&str>) -> ReapReport {
    reap_some(home, recorder, &|record| match record.state {
        RunState::Ran | RunState::Open { .. } => false,
        _ => id.is_none_or(|id| record.id.as_str() == id),
    })
}

/// Finishes everything of one id that can be finished.
pub(crate) fn reap_one(home: &Home, recorder: &mut Recorder, id: &AnalysisId) -> ReapReport {
    let mut reaped = ReapReport::default();
    let due = |record: &RunRecord| matches!(record.state, RunState::Live | RunState::Quarantined);
    for base in [home.runs(), home.pending()] {
        reap_id(&base.join(id.as_str()), Some(recorder), &due, &mut reaped);
    }
    reaped
}

fn reap_some(
    home: &Home,
    mut recorder: Option<&mut Recorder>,
    due: &dyn Fn(&RunRecord) -> bool,
) -> ReapReport {
    let mut reaped = ReapReport::default();
    for base in [home.runs(), home.pending()] {
        for id in std::fs::read_dir(base).into_iter().flatten().flatten() {
            reap_id(&id.path(), recorder.as_deref_mut(), due, &mut reaped);
        }
    }
    reaped
}

fn reap_id(
    id: &Path,
    mut recorder: Option<&mut Recorder>,
    due: &dyn Fn(&RunRecord) -> bool,
    reaped: &mut ReapReport,
) {
    let mut living = false;
    for attempt in std::fs::read_dir(id).into_iter().flatten().flatten() {
        match lock_if_runner_dead(&attempt.path()) {
            Some(dir) => {
                tracing::debug!(dir = ?dir.path(), "look at what a dead runner left");
                reap_dir(dir, due, recorder.as_deref_mut(), reaped);
            }
            None => living = true,
        }
    }
    if !living {
        // The directory of an id whose runner died before it created its first attempt. Fails if it is not empty.
        let _ = std::fs::remove_dir(id);
    }
}

/// Locks the run directory if its runner is dead. If a runner is killed while it starts its launcher, the launcher
/// holds the lock for another moment.
fn lock_if_runner_dead(path: &Path) -> Option<RunDir> {
    const TRIES: u32 = 20;
    for _ in 0..TRIES {
        if let Some(dir) = RunDir::try_lock(path).ok()? {
            return Some(dir);
        }
        let runner = RunDir::recorded_runner_pid(path)?;
        if Path::new(&format!("/proc/{runner}")).exists() {
            return None;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    None
}

fn reap_dir(
    dir: RunDir,
    due: &dyn Fn(&RunRecord) -> bool,
    recorder: Option<&mut Recorder>,
    reaped: &mut ReapReport,
) {
    let record = match dir.read_record() {
        Ok(Some(record)) => record,
        // The runner died after the claim, before it created anything.
        Ok(None) => return drop(dir.remove()),
        Err(_) if dir.is_record_lost() => {
            return remove_unrecorded_run(dir, Path::new(ROOT), reaped);
        }
        Err(e) => return reaped.problems.push(error_chain(&e)),
    };
    // If the home is on a shared disk, the attempt belongs to another machine, whose processes cannot be seen from
    // here. On a local disk it is this machine under another name, because this process has the lock.
    if record.host != home::machine_id() && refuse_network_fs(dir.path()).is_err() {
        let message = format!("{} belongs to the machine {}", record.id, record.host);
        return reaped.waiting.push(message);
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
    match (&record.commit_plan, recorder) {
        (_, recorder) if unsettled && record.prepared => {
            return_prepared_workspace(&dir, record, recorder, reaped)
        }
        (Some(commit_plan), Some(recorder)) if unsettled => {
            match finish_attempt(&dir, &record, commit_plan, recorder) {
                Ok(FinishResult::Committed(done)) => {
                    reaped.finished.push(*done);
                    reaped.remove_run_dir(dir, record);
                }
                Ok(FinishResult::NeverBegun) => remove_run(dir, record, reaped),
                Ok(FinishResult::OtherDatabase) => reaped.waiting.push(format!(
                    "{} belongs to the database {}; `fumehood gc --db …` with that one finishes it",
                    record.id, commit_plan.database
                )),
                Err(problem) => reaped.problems.push(problem),
            }
        }
        (Some(commit_plan), None) if unsettled => reaped.waiting.push(format!(
            "{} awaits its commit to {}",
            record.id, commit_plan.database
        )),
        _ => remove_run(dir, record, reaped),
    }
}

/// The default directory for workspaces.
const ROOT: &str = "/tmp";

/// The machine stopped before the record reached the disk, so it is unknown what the run had created. Removes the
/// workspace if it is in the default place. `gc` gives up the attempt in the database.
fn remove_unrecorded_run(dir: RunDir, root: &Path, reaped: &mut ReapReport) {
    let id = dir.path().parent().and_then(Path::file_name);
    let id = id.and_then(|id| AnalysisId::new(id.to_str()?).ok());
    let leftovers = id
        .as_ref()
        .and_then(|id| workspace::find_unrecorded(root, id));
    if let Some((path, identity)) = leftovers {
        match workspace::remove_abandoned(&path, identity, LockWait::Brief) {
            Ok(()) => reaped.removed.push(path),
            Err(e) => return reaped.problems.push(error_chain(&e)),
        }
    }
    let removed = dir.remove();
    reaped
        .problems
        .extend(removed.err().map(|e| error_chain(&e)));
}

/// `workspace create` made this workspace, so it is the user's to remove. If a program ran in it, it awaits
/// `post-process`. If not, it can be used again.
fn return_prepared_workspace(
    dir: &RunDir,
    mut record: RunRecord,
    recorder: Option<&mut Recorder>,
    reaped: &mut ReapReport,
) {
    if let Some(commit_plan) = record
        .commit_plan
        .as_mut()
        .filter(|commit_plan| !commit_plan.begun)
    {
        match attempt_number_in_database(commit_plan, recorder) {
            Ok(None) => {}
            // The runner died before it could save that the row exists.
            Ok(Some(number)) => (commit_plan.begun, record.attempt) = (true, number),
            Err(why) => {
                let message = format!("{} waits in its workspace: {why}", record.id);
                return reaped.waiting.push(message);
            }
        }
    }
    let mut give_back = || -> Result<(), String> {
        kill_processes(&record)?;
        if let Some(workspace) = reopen_workspace(&record).map_err(|e| error_chain(&e))? {
            workspace.reclaim_ownership().map_err(|e| error_chain(&e))?;
        }
        release_quota(&record)?;
        let began = record
            .commit_plan
            .as_ref()
            .is_some_and(|commit_plan| commit_plan.begun);
        if began
            && outcome_file::read(dir)
                .map_err(|e| error_chain(&e))?
                .is_none()
        {
            let lost = record_builder::runner_lost_record(&record);
            outcome_file::write_durably(dir, &lost).map_err(|e| error_chain(&e))?;
        }
        record.cgroups.clear();
        match (&mut record.commit_plan, began) {
            (Some(commit_plan), true) => {
                commit_plan.workspace_reowned = true;
                record.state = RunState::Ran;
            }
            _ => {
                let until = home::unix_seconds() + REOPENED_FOR_S;
                (record.commit_plan, record.state) = (None, RunState::Open { until });
            }
        }
        dir.write_record(&record).map_err(|e| error_chain(&e))
    };
    match give_back() {
        Ok(()) => reaped.waiting.push(format!(
            "the workspace of {} is as its runner left it",
            record.id
        )),
        Err(problem) => reaped.problems.push(problem),
    }
}

/// The number of the attempt that has the plan's key in the database, if there is one.
fn attempt_number_in_database(
    commit_plan: &CommitPlan,
    recorder: Option<&mut Recorder>,
) -> Result<Option<u32>, String> {
    let to_text = |e: CommitError| error_chain(&e);
    if let Some(recorder) = recorder
        && recorder.store().map_err(to_text)?.id() == commit_plan.database_id
    {
        let found = recorder.with(|store| store.attempt_with_key(&commit_plan.key));
        return found.map_err(to_text);
    }
    Err(format!(
        "`fumehood gc --db …` with the database {} finishes it",
        commit_plan.database
    ))
}

/// How long a prepared workspace is kept after its runner died before the row was begun.
const REOPENED_FOR_S: u64 = 24 * 3600;

fn remove_run(dir: RunDir, record: RunRecord, reaped: &mut ReapReport) {
    match remove_leftovers(&record) {
        Ok(()) => reaped.remove_run_dir(dir, record),
        Err(problem) => reaped.problems.push(problem),
    }
}

enum FinishResult {
    Committed(Box<Record>),
    /// The database has no row, so nothing ran.
    NeverBegun,
    OtherDatabase,
}

/// Continues an attempt where its runner stopped: commits it and removes its workspace. The caller removes the run
/// directory.
fn finish_attempt(
    dir: &RunDir,
    run: &RunRecord,
    commit_plan: &CommitPlan,
    recorder: &mut Recorder,
) -> Result<FinishResult, String> {
    let to_text = |e: CommitError| error_chain(&e);
    if recorder.store().map_err(to_text)?.id() != commit_plan.database_id {
        return Ok(FinishResult::OtherDatabase);
    }
    // Kill the processes first: nothing is read or removed under a live one.
    kill_processes(run)?;
    let mut run = run.clone();
    let outcome = match outcome_file::read(dir).map_err(|e| error_chain(&e))? {
        Some(outcome) => outcome,
        None => {
            let number = recorder.with(|store| store.attempt_with_key(&commit_plan.key));
            match (number.map_err(to_text)?, commit_plan.begun) {
                (None, false) => return Ok(FinishResult::NeverBegun),
                // The database is an older copy of itself. The commit inserts the attempt again.
                (None, true) => {}
                (Some(number), _) => run.attempt = number,
            }
            let lost = record_builder::runner_lost_record(&run);
            outcome_file::write_unsynced(dir, &lost).map_err(to_text)?;
            lost
        }
    };
    let workspace = reopen_workspace(&run).map_err(|e| error_chain(&e))?;
    let mut record = finalize_leftovers(
        dir,
        &run,
        commit_plan,
        &outcome,
        workspace.as_ref(),
        recorder,
    )
    .map_err(to_text)?;
    // Removes the directory itself, its draft and its quota.
    drop(workspace);
    remove_leftovers(&run)?;
    record.post_process = run_post_process(recorder, commit_plan, &record, dir);
    Ok(FinishResult::Committed(Box::new(record)))
}

/// Runs the configured post_process command, if it is due, with the attempt's own artifact store.
pub(crate) fn run_post_process(
    recorder: &mut Recorder,
    commit_plan: &CommitPlan,
    record: &Record,
    dir: &RunDir,
) -> Option<PostProcessReport> {
    let key = (record.id.as_str(), record.attempt);
    recorder.with_artifact_store_of(commit_plan, |recorder| {
        post_process::run_if_due(recorder, key, dir.path())
    })
}

/// The workspace of a dead runner, if it still exists.
pub(crate) fn reopen_workspace(run: &RunRecord) -> Result<Option<Workspace>, WorkspaceError> {
    match run.workspace_identity {
        Some(identity) => Workspace::reopen(run.workspace.clone(), identity, lock_wait(run)),
        None => Ok(None),
    }
}

/// Commits what a workspace holds in which nothing runs any more.
pub(crate) fn finalize_leftovers(
    dir: &RunDir,
    run: &RunRecord,
    commit_plan: &CommitPlan,
    outcome: &Record,
    workspace: Option<&Workspace>,
    recorder: &mut Recorder,
) -> Result<Record, CommitError> {
    let own_uid = rustix::process::geteuid().as_raw();
    let owner_uid = match (commit_plan.workspace_reowned, run.uid) {
        (false, Some(uid)) => uid,
        _ => own_uid,
    };
    let leftovers = match workspace {
        // The content of a workspace in memory disappeared with its runner; its directory on disk is empty.
        Some(workspace) if !commit_plan.memory => Leftovers::Directory {
            dir: workspace.dir(),
            owner_uid,
        },
        // The attempt never had a workspace.
        _ if run.workspace_identity.is_none() => Leftovers::Nothing,
        _ => Leftovers::Gone,
    };
    let finisher = Finisher::Recovery;
    let ended = EndedAttempt::new(dir, run, commit_plan, outcome, leftovers, finisher);
    recorder.with_artifact_store_of(commit_plan, |recorder| {
        finalize::finalize_attempt(&ended, recorder, &mut |_| {})
    })
}

/// Do not wait, at every start, for a run that could not be killed.
fn lock_wait(record: &RunRecord) -> LockWait {
    match record.state {
        RunState::Quarantined => LockWait::NoWait,
        _ => LockWait::Brief,
    }
}

/// Kills the processes that are known to belong to the run. Fails while some of them may be alive.
fn kill_processes(record: &RunRecord) -> Result<(), String> {
    cgroup::remove_left_behind(&record.cgroups, &record.boot_id).map_err(|e| error_chain(&e))?;
    let same_boot = record.boot_id.trim() == home::boot_id().trim();
    match record.init.filter(|_| same_boot) {
        Some(init) if init.is_alive() => Err(format!(
            "{} has processes that cannot be killed; its workspace stays until they are gone",
            record.id
        )),
        _ => Ok(()),
    }
}

pub(crate) fn remove_leftovers(record: &RunRecord) -> Result<(), String> {
    // Kill the processes first: nothing is removed under a live one.
    kill_processes(record)?;
    // If the runner died before it saved the identity, the workspace can only have the draft name, which nobody else
    // knew.
    let draft_identity = match record.workspace_identity {
        Some(_) => None,
        None => workspace::DirectoryIdentity::of(&record.draft),
    };
    let paths = [record.draft.as_path(), record.workspace.as_path()];
    let found = paths.map(|path| (path, record.workspace_identity.or(draft_identity)));
    for (path, identity) in found
        .into_iter()
        .filter_map(|(path, identity)| Some((path, identity?)))
    {
        workspace::remove_abandoned(path, identity, lock_wait(record))
            .map_err(|e| error_chain(&e))?;
    }
    release_quota(record)
}

/// Frees the quota project of the run. The project belongs to whoever leases the uid, so it is freed only under the
/// lock of the uid: otherwise the limits could be those of a live run. Without the lock they stay, and the next use of
/// the project replaces them.
fn release_quota(record: &RunRecord) -> Result<(), String> {
    let (Some(project), Some(uid)) = (record.project_quota, record.uid) else {
        return Ok(());
    };
    let root = record.workspace.parent().map(std::fs::File::open);
    let (Some(Ok(root)), Some(_lock)) = (root, crate::workspace::uid_pool::lock_uid(uid)) else {
        return Ok(());
    };
    // A project that does not go with the uid was not set by Fumehood.
    if !limits::quota_project_ids(uid).any(|p| p == project) {
        return Ok(());
    }
    quota::release_left_behind(root.as_fd(), project)
        .map_err(|e| format!("free project {project} of its limits: {e}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A forged record cannot make the reaper remove a directory that is not a workspace of that id, even if the record
    /// states the identity of the directory correctly.
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
            host: home::machine_id(),
            boot_id: home::boot_id(),
            runner_pid: u32::MAX,
            workspace: workspace.to_path_buf(),
            draft: root.join(".scidex-analysis-mine-1"),
            workspace_identity: workspace::DirectoryIdentity::of(workspace),
            uid: None,
            project_quota: None,
            cgroups: Vec::new(),
            init: None,
            state: RunState::Live,
            prepared: false,
            commit_plan: None,
        };
        let run = RunDir::claim(&home, &id, 1).unwrap();
        let path = run.path().to_path_buf();
        drop(run);
        for forged in [&others, &victim] {
            let run = RunDir::try_lock(&path).unwrap().unwrap();
            run.write_record(&naming(forged)).unwrap();
            drop(run);
            let reaped = reap_kept(&home, None, None);
            assert!(reaped.removed.is_empty(), "{reaped:?}");
            assert_eq!(reaped.problems.len(), 1, "{reaped:?}");
            assert!(forged.exists());
        }
        let run = RunDir::try_lock(&path).unwrap().unwrap();
        run.write_record(&naming(&own)).unwrap();
        drop(run);
        assert_eq!(reap(&home, None).problems, [""; 0]);
        assert!(!own.exists() && !path.exists(), "the control");
    }

    /// A power cut leaves the name of the record, and no content.
    #[test]
    fn a_run_without_a_durable_record_is_removed() {
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
        // A record of this boot, or one with content, is left for a person to look at.
        std::fs::write(path.join("run.json"), "").unwrap();
        assert_eq!(reap(&home, None).problems.len(), 1);
        assert!(!cut_off(b"{").is_record_lost() && !cut_off(b"{}").is_record_lost());
        assert_eq!(reap(&home, None).problems.len(), 1);

        // A directory of that name that is not a workspace of Fumehood stays.
        std::fs::create_dir(&workspace).unwrap();
        close(&workspace);
        let mut reaped = ReapReport::default();
        remove_unrecorded_run(cut_off(b"\0\0\0"), root, &mut reaped);
        assert!(workspace.exists() && !path.exists(), "{reaped:?}");

        let hidden = workspace.join(sandbox::HIDDEN_DIR);
        std::fs::create_dir(&hidden).unwrap();
        close(&hidden);
        if rustix::process::geteuid().is_root() {
            let leased = Some(crate::workspace::uid_pool::RANGE.start);
            assert_eq!(workspace::find_unrecorded(root, &id), None, "root's own");
            std::os::unix::fs::chown(&workspace, leased, leased).unwrap();
            assert_eq!(workspace::find_unrecorded(root, &id), None);
            std::os::unix::fs::chown(&hidden, leased, leased).unwrap();
        }
        std::fs::create_dir_all(&path).unwrap();
        remove_unrecorded_run(cut_off(b""), root, &mut reaped);
        assert_eq!(reaped.removed, std::slice::from_ref(&workspace));
        assert!(!workspace.exists() && !path.exists() && reaped.problems.is_empty());
    }
}
