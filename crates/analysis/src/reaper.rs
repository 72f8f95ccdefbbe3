//! Finishes or removes what the dead left: cgroups with whatever is still in them, workspaces, run directories.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use sandbox::{cgroup, quota};

use crate::home::{self, Home, RunDir, RunRecord, RunState};
use crate::limits::{self, error_chain};
use crate::workspace::{self, Patience};

/// What one pass did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reaped {
    pub removed: Vec<PathBuf>,
    pub kept: Vec<(PathBuf, u64)>,
    pub problems: Vec<String>,
}

/// Looks at every run directory whose runner is gone. Called before each run, so it must cost
/// nothing when there is nothing: one directory listing, and one lock tried for each living run.
pub fn reap(home: &Home) -> Reaped {
    reap_some(home, &|record| match record.state {
        RunState::Kept { until } => until <= home::unix_seconds(),
        RunState::Live | RunState::Quarantined => true,
    })
}

/// As [`reap`], and a kept workspace goes before its time.
pub fn reap_kept(home: &Home, id: Option<&str>) -> Reaped {
    reap_some(home, &|record| id.is_none_or(|id| record.id.as_str() == id))
}

fn reap_some(home: &Home, due: &dyn Fn(&RunRecord) -> bool) -> Reaped {
    let mut reaped = Reaped::default();
    for id in std::fs::read_dir(home.runs())
        .into_iter()
        .flatten()
        .flatten()
    {
        for attempt in std::fs::read_dir(id.path()).into_iter().flatten().flatten() {
            if let Some(dir) = lock_of_the_dead(&attempt.path()) {
                look_at(dir, due, &mut reaped);
            }
        }
        // Made and abandoned before its first attempt was.
        let _not_empty = std::fs::remove_dir(id.path());
    }
    reaped
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

fn look_at(dir: RunDir, due: &dyn Fn(&RunRecord) -> bool, reaped: &mut Reaped) {
    let record = match dir.read() {
        Ok(Some(record)) => record,
        // Claimed, and its runner died before it made anything.
        Ok(None) => return drop(dir.remove()),
        Err(e) => return reaped.problems.push(error_chain(&e)),
    };
    // Another machine's (a home on a shared disk): its processes cannot be seen from here.
    if record.host != home::machine() {
        return;
    }
    if !due(&record) {
        if let RunState::Kept { until } = record.state {
            reaped.kept.push((record.workspace, until));
        }
        return;
    }
    match remove(&record) {
        Ok(()) => {
            reaped.removed.push(record.workspace);
            reaped
                .problems
                .extend(dir.remove().err().map(|e| error_chain(&e)));
        }
        Err(problem) => reaped.problems.push(problem),
    }
}

fn remove(record: &RunRecord) -> Result<(), String> {
    // First the processes: nothing is removed under a living one.
    cgroup::remove_left_behind(&record.cgroups, &record.boot_id).map_err(|e| error_chain(&e))?;
    // Made and not yet noted, it can only stand under its draft name, which nobody else knew.
    let unnoted = match record.workspace_is {
        Some(_) => None,
        None => workspace::Identity::of(&record.draft),
    };
    let paths = [record.draft.as_path(), record.workspace.as_path()];
    let found = paths.map(|path| (path, record.workspace_is.or(unnoted)));
    // What could not be killed is not waited for at every start.
    let patience = match record.state {
        RunState::Quarantined => Patience::None,
        RunState::Live | RunState::Kept { .. } => Patience::AMoment,
    };
    for (path, is) in found.into_iter().filter_map(|(path, is)| Some((path, is?))) {
        workspace::remove_left_behind(path, is, patience).map_err(|e| error_chain(&e))?;
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
    let (Some(Ok(root)), Some(_lock)) = (root, crate::lease::lock(uid)) else {
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
            version: home::RECORD_VERSION,
            id: id.clone(),
            host: home::machine(),
            boot_id: home::boot_id(),
            runner_pid: u32::MAX,
            workspace: workspace.to_path_buf(),
            draft: root.join(".scidex-analysis-mine-1"),
            workspace_is: workspace::Identity::of(workspace),
            uid: None,
            project_quota: None,
            cgroups: Vec::new(),
            state: RunState::Live,
        };
        let run = RunDir::claim(&home, &id).unwrap();
        let path = run.path().to_path_buf();
        drop(run);
        for forged in [&others, &victim] {
            let run = RunDir::try_lock(&path).unwrap().unwrap();
            run.write(&naming(forged)).unwrap();
            drop(run);
            let reaped = reap_kept(&home, None);
            assert!(reaped.removed.is_empty(), "{reaped:?}");
            assert_eq!(reaped.problems.len(), 1, "{reaped:?}");
            assert!(forged.exists());
        }
        let run = RunDir::try_lock(&path).unwrap().unwrap();
        run.write(&naming(&own)).unwrap();
        drop(run);
        assert_eq!(reap(&home).problems, [""; 0]);
        assert!(!own.exists() && !path.exists(), "the control");
    }
}
