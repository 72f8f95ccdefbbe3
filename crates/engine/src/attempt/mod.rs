//! One attempt as it is made: run directory, lease, row, workspace, quota, cgroup. What runs in it and how it is left
//! are in `running.rs` and `ending.rs`.

mod ending;
pub mod finalize;
pub mod hints;
pub mod isolation;
pub mod log_capture;
pub mod pipeline;
pub mod post_process;
pub mod record;
pub mod record_builder;
pub mod recorder;
mod resting;
mod running;
pub mod systemd_scope;
pub mod terminal_filter;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use sandbox::cgroup::{self, AncestorLimits, Group, Hierarchies};
use sandbox::outcome::Outcome;
use sandbox::quota::{self, ProjectQuota, QuotaError};
use sandbox::spec::{ConfinementLevel, Enforcement, Layer, Limits, ProgramIdentity, WorkspaceKind};
use sandbox::supervise::InitExit;

use crate::attempt::finalize::SettleError;
use crate::attempt::log_capture::Captured;
use crate::attempt::pipeline::{PipelineError, Place, Surroundings, Taken};
use crate::attempt::recorder::Ledger;
use crate::collect::{self, Put};
use crate::home::{self, HomeError};
use crate::plan::Plan;
use crate::plan::limits::{self, Ground, Storage, error_chain};
use crate::provenance::{self, Provenance, Rights};
use crate::request::{Again, AnalysisId, Asker, Command, Request, Writers};
use crate::run_dir::{self, Durable, Paper, RunDir, RunRecord, RunState, Task};
use crate::workspace::uid_pool::Lease;
use crate::workspace::{Patience, Workspace};
use running::fill;
use store::Store;
use store::artifacts::Artifacts;
use store::types::crash_points::{self, CrashPoint};

/// What has been made so far. Dropped early, it is undone; what cannot be is left to the reaper.
pub(crate) struct Attempt {
    dir: Option<RunDir>,
    record: RunRecord,
    lease: Option<Lease>,
    workspace: Option<Workspace>,
    quota: Option<ProjectQuota>,
    group: Result<Group, String>,
    /// Why it could not be removed.
    group_stays: Option<String>,
    /// Where its groups are made.
    groups_in: Hierarchies,
    /// The sandbox's init on its way out, when all else is dead.
    leaving: Option<InitExit>,
    /// It was not seen to end: whoever has the uid next looks for it.
    init_stays: bool,
    /// The database's connection while the program runs.
    lent: Option<Store>,
    /// Where what it leaves is to be kept: it is to be recorded, and the database does not know of it yet.
    artifacts: Option<Artifacts>,
    /// What was put into the workspace, until it is written down what it came from.
    unexplained: Option<Vec<Put>>,
    /// Whether the database has a row for it is not known.
    unanswered: bool,
    /// The database has a row for it, which must come to an end.
    begun: bool,
    /// The workspace is one that the user made before, and its state then.
    prepared: Option<RunState>,
}

/// How the sandboxed part went.
pub(crate) struct Ran {
    pub outcome: Outcome,
    pub level: ConfinementLevel,
    pub layers: Vec<(Layer, String)>,
    /// What was weaker than it might be, in words.
    pub notices: Vec<String>,
    pub stdout: Captured,
    pub stderr: Captured,
    pub started_ms: u64,
    pub ended_ms: u64,
    pub pids_denied: u64,
    /// A workspace that lived in memory.
    pub memory: Option<OwnedFd>,
    /// See [`sandbox::supervise::FinishedRun`].
    pub undead_init: Option<u32>,
}

impl Ran {
    pub fn landlock_abi(&self) -> Option<i32> {
        let in_force = self
            .layers
            .iter()
            .any(|(layer, _)| *layer == Layer::Landlock);
        in_force.then(sandbox::probe::landlock_abi)
    }
}

impl Attempt {
    /// Claims the id, here only. The database learns of it while the sandbox is being built, or before much is copied.
    pub fn begin(
        request: &Request,
        around: &Surroundings,
        plan: &Plan,
        mut ledger: Option<&mut Ledger>,
    ) -> Result<Attempt, PipelineError> {
        check_globs(request)?;
        let artifacts = ledger.as_deref().map(Ledger::artifacts).transpose()?;
        if let Some(artifacts) = &artifacts {
            check_room(
                artifacts,
                around.free_reserve_bytes,
                around.store_quota_bytes,
            )?;
        }
        let (dir, record, prepared) = match around.place {
            Place::Fresh => {
                let number = match (&around.taken, ledger.as_deref_mut()) {
                    (Some(taken), _) => taken.attempt,
                    (None, Some(ledger)) if request.again != Again::New => {
                        next_number(ledger, request)?
                    }
                    _ => 1,
                };
                let dir = RunDir::claim(&around.home, &request.id, number)?;
                let record = fresh_record(&request.id, &plan.workspace_root, number);
                (dir, record, None)
            }
            Place::Prepared => prepared(request, around)?,
        };
        let lease = rustix::process::geteuid()
            .is_root()
            .then(Lease::take)
            .transpose();
        if ledger.is_some() {
            dir.reserve_for_outcome();
        }
        // Before the groups are looked for: it may move this process to where it can have some.
        let _said_when_they_are_made = crate::attempt::systemd_scope::ensure();
        let mut attempt = Attempt {
            dir: Some(dir),
            record,
            lease: None,
            workspace: None,
            quota: None,
            group: Err(String::from("no cgroup was made")),
            group_stays: None,
            groups_in: cgroup::discover(),
            leaving: None,
            init_stays: false,
            lent: None,
            artifacts,
            unexplained: None,
            unanswered: false,
            begun: false,
            prepared,
        };
        // One that cannot have been there before is looked up nowhere.
        if let (true, Some(ledger)) = (request.again != Again::New, ledger) {
            let artifacts = attempt.artifacts.as_ref();
            let task = artifacts.map(|at| task(request, ledger, at, around.taken.as_ref()));
            attempt.record.task = task.transpose()?;
        }
        attempt.lease = lease?;
        attempt.record.uid = attempt.lease.as_ref().map(|l| l.uid);
        let id = request.id.as_str();
        attempt.record.cgroups = cgroup::planned_paths(&attempt.groups_in, id);
        attempt.save()?;
        reached(CrashPoint::Claimed)?;
        Ok(attempt)
    }

    /// An answer that was lost on its way is asked for again, by the same key. If nobody gives one, whoever next cleans up
    /// asks, and finds the key in the run directory.
    fn begin_surely(
        &mut self,
        ledger: &mut Ledger,
        task: &Task,
        again: Again,
    ) -> Result<u32, SettleError> {
        // A database that was away before anything was asked has heard of nothing.
        ledger.store()?;
        match begin_row(ledger, &self.record, task, again) {
            Err(e) if e.is_away() => ledger.rest(),
            answer => return answer,
        }
        let answer = begin_row(ledger, &self.record, task, again);
        self.unanswered = answer.as_ref().is_err_and(SettleError::is_away);
        answer
    }

    /// Before anything of the program's runs: the attempt becomes a row in the database, if it is none yet.
    fn begin_in(
        &mut self,
        ledger: Option<&mut Ledger>,
        request: &Request,
        taken: Option<&Taken>,
    ) -> Result<(), PipelineError> {
        let (Some(ledger), Some(artifacts)) = (ledger, self.artifacts.take()) else {
            return Ok(());
        };
        let task = match &self.record.task {
            Some(task) => task.clone(),
            None => {
                let task = task(request, ledger, &artifacts, taken)?;
                self.record.task = Some(task.clone());
                // The key first: whoever finds us dead asks the database whether it knows of it.
                self.save()?;
                task
            }
        };
        match taken {
            Some(taken) => take_up(ledger, &self.record, &task, taken)?,
            // Another number than we thought: somebody on another machine was faster with an attempt of the same id.
            None => self.record.attempt = self.begin_surely(ledger, &task, request.again)?,
        }
        self.begun = true;
        self.record.task = Some(Task {
            begun: true,
            ..task
        });
        self.save()?;
        reached(CrashPoint::Begun)?;
        ledger.ends_soon();
        self.lent = ledger.lend();
        Ok(())
    }

    pub fn number(&self) -> u32 {
        self.record.attempt
    }

    fn save(&self) -> Result<(), HomeError> {
        self.dir
            .as_ref()
            .map_or(Ok(()), |dir| dir.write(&self.record))
    }

    fn owner(&self) -> Option<(u32, u32)> {
        self.lease.as_ref().map(|l| (l.uid, l.uid))
    }

    fn identity(&self) -> ProgramIdentity {
        match &self.lease {
            Some(lease) => ProgramIdentity::Leased {
                uid: lease.uid,
                gid: lease.uid,
            },
            None => ProgramIdentity::Caller {
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
            },
        }
    }

    pub fn make_workspace(
        &mut self,
        request: &Request,
        around: &Surroundings,
        plan: &Plan,
        limits: &Limits,
        ledger: Option<&mut Ledger>,
    ) -> Result<Storage, PipelineError> {
        match around.place {
            Place::Fresh => self.make_new_workspace()?,
            Place::Prepared => self.take_up_workspace()?,
        }
        reached(CrashPoint::WorkspaceMade)?;
        if !are_soon_copied(&plan.inputs) {
            self.begin_in(ledger, request, around.taken.as_ref())?;
        }
        let on_tmpfs = self.workspace.as_ref().is_some_and(Workspace::is_on_tmpfs);
        let fresh = around.place == Place::Fresh;
        let storage = match (request.workspace_kind, on_tmpfs) {
            (WorkspaceKind::Memory, _) => Storage::Memory,
            (WorkspaceKind::Disk, true) => Storage::DiskOnTmpfs,
            // Before the inputs: they count too.
            (WorkspaceKind::Disk, false) if fresh && self.limit_by_quota(limits)? => Storage::Quota,
            (WorkspaceKind::Disk, false) => Storage::Disk,
        };
        if let Some(workspace) = &self.workspace
            && storage != Storage::Memory
        {
            fill(workspace.dir(), &plan.inputs, self.owner(), limits)?;
            self.unexplained = Some(self.note_puts(workspace.dir(), plan)?);
        }
        reached(CrashPoint::Filled)?;
        Ok(storage)
    }

    fn make_new_workspace(&mut self) -> Result<(), PipelineError> {
        // A crash between any two of these steps leaves something that the record proves to be ours.
        let owner = self.owner();
        let made = Workspace::draft(self.record.workspace.clone(), &self.record.draft, owner)?;
        self.record.workspace_is = Some(made.is());
        self.workspace = Some(made);
        self.save()?;
        self.workspace.as_mut().map_or(Ok(()), Workspace::publish)?;
        Ok(())
    }

    /// The one that `workspace create` made, if it still is that one.
    fn take_up_workspace(&mut self) -> Result<(), PipelineError> {
        let gone = || HomeError::NoWorkspace {
            id: self.record.id.clone(),
        };
        let is = self.record.workspace_is.ok_or_else(gone)?;
        let path = self.record.workspace.clone();
        let workspace = Workspace::reopen(path, is, Patience::None)?.ok_or_else(gone)?;
        workspace.prepare(self.owner())?;
        self.workspace = Some(workspace);
        Ok(())
    }

    /// What was put there, by hash: the record tells what a result was made from, and what is left unchanged
    /// is no output.
    fn note_puts(&self, workspace: BorrowedFd<'_>, plan: &Plan) -> Result<Vec<Put>, PipelineError> {
        let Some(dir) = self.dir.as_ref().filter(|_| self.is_recorded()) else {
            return Ok(Vec::new());
        };
        if plan.inputs.is_empty() && self.prepared.is_none() {
            return Ok(Vec::new());
        }
        let puts = collect::puts(workspace, self.owner_uid())?;
        if !puts.is_empty() {
            dir.put(Paper::Puts, &puts, Durable::No)?;
        }
        Ok(puts)
    }

    /// What the result will have been made from. The project's history and the list of libraries take time to read.
    fn note_provenance(
        &self,
        request: &Request,
        plan: &Plan,
        puts: &[Put],
    ) -> Result<(), PipelineError> {
        if let Some(dir) = self.dir.as_ref().filter(|_| self.is_recorded()) {
            let provenance = made_from(request, plan, puts);
            dir.put(Paper::Provenance, &provenance, Durable::No)?;
        }
        Ok(())
    }

    fn is_recorded(&self) -> bool {
        self.artifacts.is_some() || self.record.task.is_some()
    }

    fn owner_uid(&self) -> u32 {
        let ours = rustix::process::geteuid().as_raw();
        self.lease.as_ref().map_or(ours, |lease| lease.uid)
    }

    /// Whether the file system itself now holds the disk limits. Where it cannot, the watch does, as it says.
    fn limit_by_quota(&mut self, limits: &Limits) -> Result<bool, PipelineError> {
        let (Some(lease), Some(workspace)) = (&self.lease, &self.workspace) else {
            return Ok(false);
        };
        let Ok(project) = quota::unused_project(workspace.dir(), limits::projects(lease.uid))
        else {
            return Ok(false);
        };
        self.record.project_quota = Some(project);
        self.save()?;
        // The workspace's own directory counts as an inode and is none of the program's files.
        let inodes = limits.files.saturating_add(1);
        match quota::limit(workspace.dir(), project, limits.disk_bytes, inodes) {
            Ok(quota) => self.quota = Some(quota),
            Err(e @ QuotaError::Undo { .. }) => return Err(e.into()),
            Err(_not_here) => self.record.project_quota = None,
        }
        self.save()?;
        Ok(self.quota.is_some())
    }

    pub fn make_group(&mut self, request: &Request, limits: &Limits) -> Result<(), PipelineError> {
        let limits_of_group = limits::group_limits(limits);
        let made = Group::create(&self.groups_in, request.id.as_str(), &limits_of_group);
        self.group = made.map_err(|e| match crate::attempt::systemd_scope::ensure() {
            Ok(_) => error_chain(&e),
            Err(why) => format!("{}; {}", error_chain(&e), error_chain(why)),
        });
        Ok(())
    }

    /// Who holds each limit at that level. Stops the run if one that was asked for would not be held.
    pub fn enforcement(
        &self,
        request: &Request,
        limits: &Limits,
        storage: Storage,
        level: ConfinementLevel,
    ) -> Result<Vec<Enforcement>, PipelineError> {
        let group = self.group.as_ref().map_err(Clone::clone);
        let outer = match group.as_ref().is_ok_and(|g| limits::holds_alone(g)) {
            true => AncestorLimits::default(),
            false => cgroup::ancestor_limits(),
        };
        let ground = Ground {
            level,
            leased: self.lease.is_some(),
            storage,
        };
        Ok(limits::enforcement(
            &request.limits,
            limits,
            group,
            &outer,
            ground,
            &request.allow_degraded,
        )?)
    }
}

fn reached(step: CrashPoint) -> Result<(), PipelineError> {
    crash_points::reach(step).map_err(|source| PipelineError::Step { step, source })
}

/// A bad pattern is found before anything runs.
fn check_globs(request: &Request) -> Result<(), PipelineError> {
    collect::Globs::new(&request.collection.outputs)?;
    collect::Globs::new(&request.collection.expects)?;
    Ok(())
}

/// Whether they are in the workspace before anybody looks for the analysis in the database.
fn are_soon_copied(inputs: &[(PathBuf, PathBuf)]) -> bool {
    const FILES_MAX: usize = 16;
    const BYTES_MAX: u64 = 1 << 20;
    let is_small = |(source, _): &(PathBuf, PathBuf)| {
        std::fs::symlink_metadata(source)
            .is_ok_and(|meta| meta.is_file() && meta.len() <= BYTES_MAX)
    };
    inputs.len() <= FILES_MAX && inputs.iter().all(is_small)
}

/// The number that the next attempt of this id gets, unless another is faster.
fn next_number(ledger: &mut Ledger, request: &Request) -> Result<u32, PipelineError> {
    Ok(ledger.with(|store| store.next_attempt_number(request.id.as_str()))?)
}

fn task(
    request: &Request,
    ledger: &mut Ledger,
    artifacts: &Artifacts,
    taken: Option<&Taken>,
) -> Result<Task, PipelineError> {
    let database_id = taken.map(|taken| taken.database_id.as_str());
    let known = database_id.filter(|id| !id.is_empty());
    let mut task = ledger.task(&request.collection, artifacts, known)?;
    if let Some(taken) = taken {
        task.key.clone_from(&taken.key);
    }
    task.memory = request.workspace_kind == WorkspaceKind::Memory;
    Ok(task)
}

pub(crate) fn fresh_record(id: &AnalysisId, root: &Path, number: u32) -> RunRecord {
    RunRecord {
        version: run_dir::RECORD_VERSION,
        id: id.clone(),
        attempt: number,
        host: home::machine(),
        boot_id: home::boot_id(),
        runner_pid: std::process::id(),
        workspace: crate::workspace::path_for(root, id),
        draft: crate::workspace::draft_for(root, id),
        workspace_is: None,
        uid: None,
        project_quota: None,
        cgroups: Vec::new(),
        init: None,
        state: RunState::Live,
        prepared: false,
        task: None,
    }
}

/// The run directory that `workspace create` made for this id, if nothing has run in it.
fn prepared(
    request: &Request,
    around: &Surroundings,
) -> Result<(RunDir, RunRecord, Option<RunState>), PipelineError> {
    let id = request.id.clone();
    let found = RunDir::find(&around.home, &id)?;
    let (dir, mut record) = found.ok_or(HomeError::NoWorkspace { id: id.clone() })?;
    let before = record.state;
    match before {
        RunState::Open { .. } => {}
        _ => return Err(HomeError::RanAlready { id }.into()),
    }
    record.state = RunState::Live;
    record.prepared = true;
    record.runner_pid = std::process::id();
    record.boot_id = home::boot_id();
    Ok((dir, record, Some(before)))
}

/// What the result will have been made from.
fn made_from(request: &Request, plan: &Plan, puts: &[Put]) -> Provenance {
    let workspace = crate::workspace::path_for(&plan.workspace_root, &request.id);
    let shown_at = |name: &str| {
        let at = workspace.join(name);
        let view = plan.views.iter().find(|view| view.target.as_path() == at);
        view.map(|view| view.source.as_path())
    };
    let script = match &request.command {
        Command::Script { script, .. } => {
            let name = script.file_name().map(|name| name.as_encoded_bytes());
            let put = puts.iter().find(|put| Some(put.path.as_bytes()) == name);
            let lay_at = match &request.asked_by {
                Asker::Queue {
                    script_from: Some(from),
                    ..
                } => from,
                _ => script,
            };
            Some((lay_at.as_path(), put.map(|put| put.blake3)))
        }
        Command::Argv(_) | Command::Shell => None,
    };
    let inputs: Vec<_> = puts
        .iter()
        .map(|put| (put.path.text(), put.bytes, put.blake3))
        .collect();
    let reads: Vec<_> = request
        .reads
        .iter()
        .map(|read| {
            let inside = read.inside.clone();
            (
                read.host.clone(),
                inside.unwrap_or_else(|| read.host.clone()),
            )
        })
        .collect();
    let rights = match request.asked_by {
        Asker::Queue {
            writers: Writers::Others,
            ..
        } => Rights::Ours,
        _ => Rights::Callers,
    };
    // Its variables may name any directory to look for libraries in.
    let asked: &[_] = match rights {
        Rights::Callers => &request.env,
        Rights::Ours => &[],
    };
    let set = plan.runtime.env.iter().chain(asked);
    let inside_env: Vec<_> = set.cloned().collect();
    provenance::gather(&provenance::Facts {
        rights,
        argv: &plan.argv,
        script,
        inputs: &inputs,
        env: &request.env,
        secret_names: &request.secret_env,
        program: &plan.program,
        prefixes: plan.runtime.prefixes.get(..1).unwrap_or_default(),
        inside_env: &inside_env,
        project: match &request.asked_by {
            // It came with none.
            Asker::Queue { staged, .. } if plan.project.starts_with(staged) => Path::new(""),
            _ => &plan.project,
        },
        data: shown_at("data"),
        docs: shown_at("docs"),
        reads: &reads,
    })
}

/// The attempt becomes a row, state `running`.
pub(crate) fn begin_row(
    ledger: &mut Ledger,
    run: &RunRecord,
    task: &Task,
    again: Again,
) -> Result<u32, SettleError> {
    let workspace = run.workspace.to_string_lossy();
    let submitter = provenance::submitter_name();
    let mut begin = row(run, task, &workspace);
    begin.replace = again == Again::Replace;
    begin.submitter = Some(&submitter);
    ledger.with(|store| store.begin(&begin))
}

/// The row that a worker claimed is ours, if it still is: nobody has given it up, and no other process has it.
fn take_up(
    ledger: &mut Ledger,
    run: &RunRecord,
    task: &Task,
    taken: &Taken,
) -> Result<(), PipelineError> {
    let workspace = run.workspace.to_string_lossy();
    let begin = row(run, task, &workspace);
    let ours = ledger.with(|store| store.start_claimed(&begin, taken.attempt, taken.lease_ms))?;
    match ours {
        true => Ok(()),
        false => Err(PipelineError::TakenAway {
            id: run.id.clone(),
            attempt: taken.attempt,
        }),
    }
}

fn row<'a>(run: &'a RunRecord, task: &'a Task, workspace: &'a str) -> store::NewAttempt<'a> {
    store::NewAttempt {
        id: run.id.as_str(),
        key: &task.key,
        replace: false,
        host: &run.host,
        boot_id: &run.boot_id,
        submitter: None,
        workspace: Some(workspace),
        provenance: None,
    }
}

/// Not begun where it could not be kept.
pub(crate) fn check_room(
    artifacts: &Artifacts,
    free_reserve_bytes: u64,
    store_quota_bytes: Option<u64>,
) -> Result<(), PipelineError> {
    let free = rustix::fs::statvfs(artifacts.path())
        .map(|s| s.f_bavail.saturating_mul(s.f_frsize))
        .unwrap_or(u64::MAX);
    if free < free_reserve_bytes {
        return Err(PipelineError::NoRoom {
            what: artifacts.path().to_path_buf(),
            free: store::types::units::format_size(free),
            reserve: store::types::units::format_size(free_reserve_bytes),
        });
    }
    if let Some(quota) = store_quota_bytes {
        let used = artifacts.usage().map_err(SettleError::from)?.bytes;
        if used >= quota {
            return Err(PipelineError::StoreFull {
                used: store::types::units::format_size(used),
                quota: store::types::units::format_size(quota),
            });
        }
    }
    Ok(())
}
