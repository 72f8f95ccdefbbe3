//! One analysis from request to record, in order, on one screen: [`run`]. Read this file first.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use sandbox::cgroup::{self, Group};
use sandbox::outcome::Outcome;
use sandbox::quota::{self, ProjectQuota, QuotaError};
use sandbox::spec::{Enforcement, Identity, Layer, Limits, Terminal, WorkspaceKind};
use sandbox::supervise::{self, Attendant, Means, RunError, Stream, Wish};

use crate::copy_in::{self, Budget, CopyError};
use crate::description;
use crate::home::{self, Home, HomeError, RunDir, RunRecord, RunState};
use crate::lease::{Lease, LeaseError};
use crate::limits::{self, LimitError, Storage, error_chain};
use crate::logs::{Capture, Captured};
use crate::policy::{self, Plan, PolicyError, Private};
use crate::reaper;
use crate::record::{Reason, Record, Status};
use crate::request::{Keep, Request, Stdin};
use crate::runtime::Caller;
use crate::workspace::{Workspace, WorkspaceError};

#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Home(#[from] HomeError),
    #[error(transparent)]
    Lease(#[from] LeaseError),
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
    #[error(transparent)]
    Input(#[from] CopyError),
    #[error(transparent)]
    Limit(#[from] LimitError),
    #[error(transparent)]
    Quota(#[from] QuotaError),
    #[error("open {path:?} for standard input")]
    Stdin { path: PathBuf, source: io::Error },
    #[error("the operator requires the layer {layer}, which {why}")]
    LayerMissing { layer: String, why: &'static str },
    #[error("start the sandbox")]
    Start(#[source] RunError),
    #[error("cancelled before the start")]
    Cancelled,
}

impl PipelineError {
    /// Status, reason and exit code of a run that never was.
    pub fn verdict(&self) -> (Status, Reason) {
        match self {
            PipelineError::Policy(PolicyError::Runtime(e)) => match e.exit_code() {
                127 => (Status::Error, Reason::NotFound),
                126 => (Status::Error, Reason::NotExecutable),
                _ => (Status::Error, Reason::NotStarted),
            },
            PipelineError::Start(RunError::Step {
                step,
                source: Some(e),
                ..
            }) if step == "execute the program" => match e.kind() {
                io::ErrorKind::NotFound => (Status::Error, Reason::NotFound),
                _ => (Status::Error, Reason::NotExecutable),
            },
            PipelineError::Cancelled => (Status::Cancelled, Reason::Cancelled),
            _ => (Status::Error, Reason::NotStarted),
        }
    }
}

/// Whoever listens to a run as it goes.
pub trait Audience {
    /// Output to show now; what is past the limit is kept until the end.
    fn live(&mut self, stream: Stream, bytes: &[u8]);
    fn notice(&mut self, text: &str);
    fn blocked_on(&self) -> Option<BorrowedFd<'_>>;
    fn unblocked(&mut self);
    fn wishes(&self) -> Option<BorrowedFd<'_>>;
    fn wish(&mut self) -> Option<Wish>;
}

/// What a run needs beside its request.
pub struct Surroundings {
    pub home: Home,
    pub caller: Caller,
    /// Our own binary, to be started again as the launcher.
    pub launcher: PathBuf,
    pub terminal: Terminal,
    pub required_layers: BTreeSet<Layer>,
}

/// The record, and what the program printed, for whoever shows it.
pub struct Done {
    pub record: Record,
    pub stdout: Captured,
    pub stderr: Captured,
}

/// The whole life of one attempt. What is made on the way is removed on every way out.
pub fn run(
    request: &Request,
    around: &Surroundings,
    audience: &mut dyn Audience,
) -> Result<Done, PipelineError> {
    let limits = limits::resolve(&request.limits);
    let plan = policy::plan(
        request,
        &around.caller,
        &Private {
            home: around.home.path(),
        },
        &limits,
    )?;
    require_layers(&around.required_layers)?;
    plan.notices.iter().for_each(|n| audience.notice(n));
    reaper::reap(&around.home);

    let mut attempt = Attempt::begin(request, around, &plan)?;
    let storage = attempt.make_workspace(request, &plan, &limits)?;
    let enforcement = attempt.make_group(request, &limits, storage)?;
    if storage == Storage::DiskOnTmpfs {
        audience.notice("the workspace root is a tmpfs: disk used there is memory");
    }
    let ran = attempt.execute(request, around, &plan, &limits, storage, audience)?;
    let record = description::describe(request, &plan, &limits, &enforcement, &ran);
    attempt.end(request, record, ran)
}

fn require_layers(required: &BTreeSet<Layer>) -> Result<(), PipelineError> {
    let root = rustix::process::geteuid().is_root();
    match required.contains(&Layer::LeasedUid) && !root {
        // Every other layer is part of level `full`, and the launcher stops if one fails.
        true => Err(PipelineError::LayerMissing {
            layer: "leased_uid".into(),
            why: "only root can give",
        }),
        false => Ok(()),
    }
}

/// What has been made so far. Dropped early, it is undone; what cannot be is left to the reaper.
struct Attempt {
    dir: Option<RunDir>,
    record: RunRecord,
    lease: Option<Lease>,
    workspace: Option<Workspace>,
    quota: Option<ProjectQuota>,
    group: Result<Group, String>,
}

/// How the sandboxed part went.
pub(crate) struct Ran {
    pub outcome: Outcome,
    pub layers: Vec<(Layer, String)>,
    pub stdout: Captured,
    pub stderr: Captured,
    pub started_ms: u64,
    pub ended_ms: u64,
    pub pids_denied: u64,
}

impl Attempt {
    fn begin(
        request: &Request,
        around: &Surroundings,
        plan: &Plan,
    ) -> Result<Attempt, PipelineError> {
        let dir = RunDir::claim(&around.home, &request.id)?;
        let lease = rustix::process::geteuid()
            .is_root()
            .then(Lease::take)
            .transpose();
        let record = RunRecord {
            version: home::RECORD_VERSION,
            id: request.id.clone(),
            host: home::machine(),
            boot_id: home::boot_id(),
            runner_pid: std::process::id(),
            workspace: crate::workspace::path_for(&plan.workspace_root, &request.id),
            draft: crate::workspace::draft_for(&plan.workspace_root, &request.id),
            workspace_is: None,
            uid: lease.as_ref().ok().and_then(|l| l.as_ref().map(|l| l.uid)),
            project_quota: None,
            cgroups: Vec::new(),
            state: RunState::Live,
        };
        let no_group = Err(String::from("no cgroup was made"));
        let mut attempt = Attempt {
            dir: Some(dir),
            record,
            lease: None,
            workspace: None,
            quota: None,
            group: no_group,
        };
        attempt.lease = lease?;
        attempt.save()?;
        Ok(attempt)
    }

    fn save(&self) -> Result<(), HomeError> {
        self.dir
            .as_ref()
            .map_or(Ok(()), |dir| dir.write(&self.record))
    }

    fn owner(&self) -> Option<(u32, u32)> {
        self.lease.as_ref().map(|l| (l.uid, l.uid))
    }

    fn identity(&self) -> Identity {
        match &self.lease {
            Some(lease) => Identity::Leased {
                uid: lease.uid,
                gid: lease.uid,
            },
            None => Identity::Caller {
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
            },
        }
    }

    fn make_workspace(
        &mut self,
        request: &Request,
        plan: &Plan,
        limits: &Limits,
    ) -> Result<Storage, PipelineError> {
        // A crash between any two of these steps leaves something that the record proves to be ours.
        let owner = self.owner();
        let made = Workspace::draft(self.record.workspace.clone(), &self.record.draft, owner)?;
        self.record.workspace_is = Some(made.is());
        let on_tmpfs = made.is_on_tmpfs();
        self.workspace = Some(made);
        self.save()?;
        self.workspace.as_mut().map_or(Ok(()), Workspace::publish)?;
        let storage = match (request.workspace_kind, on_tmpfs) {
            (WorkspaceKind::Memory, _) => Storage::Memory,
            (WorkspaceKind::Disk, true) => Storage::DiskOnTmpfs,
            // Before the inputs: they count too.
            (WorkspaceKind::Disk, false) if self.limit_by_quota(limits)? => Storage::Quota,
            (WorkspaceKind::Disk, false) => Storage::Disk,
        };
        if let Some(workspace) = &self.workspace
            && storage != Storage::Memory
        {
            fill(workspace.dir(), &plan.inputs, owner, limits)?;
        }
        Ok(storage)
    }

    /// Whether the file system itself now holds the disk limits. Where it cannot, the watch does, as it says.
    fn limit_by_quota(&mut self, limits: &Limits) -> Result<bool, PipelineError> {
        let (Some(lease), Some(workspace)) = (&self.lease, &self.workspace) else {
            return Ok(false);
        };
        let Ok(project) = quota::unused(workspace.dir(), limits::projects(lease.uid)) else {
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

    fn make_group(
        &mut self,
        request: &Request,
        limits: &Limits,
        storage: Storage,
    ) -> Result<Vec<Enforcement>, PipelineError> {
        let host = cgroup::discover();
        self.record.cgroups = cgroup::paths_to_be(&host, request.id.as_str());
        self.save()?;
        let limits_of_group = limits::group_limits(limits);
        self.group = Group::create(&host, request.id.as_str(), &limits_of_group)
            .map_err(|e| error_chain(&e));
        let group = self.group.as_ref().map_err(Clone::clone);
        Ok(limits::enforcement(
            &request.limits,
            limits,
            group,
            storage,
            &request.allow_degraded,
        )?)
    }

    fn execute(
        &mut self,
        request: &Request,
        around: &Surroundings,
        plan: &Plan,
        limits: &Limits,
        storage: Storage,
        audience: &mut dyn Audience,
    ) -> Result<Ran, PipelineError> {
        let spec = policy::spec(
            plan,
            request,
            limits.clone(),
            self.identity(),
            storage.kind(),
            around.terminal,
        );
        let log_bytes = usize::try_from(limits.log_bytes).unwrap_or(usize::MAX);
        let mut ears = Ears {
            audience,
            captures: [Capture::new(log_bytes), Capture::new(log_bytes)],
            workspace: self.workspace.as_ref(),
            inputs: &plan.inputs,
            owner: self.owner(),
            limits,
            fill_error: None,
        };
        let means = Means {
            launcher: &around.launcher,
            workspace: self.workspace.as_ref().map(Workspace::dir),
            stdin: open_stdin(request, plan, around.terminal)?,
            group: self.group.as_ref().ok(),
        };
        let started_ms = unix_ms();
        let finished =
            supervise::spawn(&spec, means).and_then(|running| running.supervise(&mut ears));
        let ended_ms = unix_ms();
        if let Some(e) = ears.fill_error.take() {
            return Err(e.into());
        }
        let [stdout, stderr] = ears.captures.map(Capture::finish);
        let finished = finished.map_err(PipelineError::Start)?;
        let pids_denied = self
            .group
            .as_ref()
            .ok()
            .and_then(|g| g.counters().pids_denied)
            .unwrap_or(0);
        Ok(Ran {
            outcome: finished.outcome,
            layers: finished.layers,
            stdout,
            stderr,
            started_ms,
            ended_ms,
            pids_denied,
        })
    }

    /// Everything is dead, or is not: the workspace goes, stays, or is quarantined.
    fn end(
        mut self,
        request: &Request,
        mut record: Record,
        ran: Ran,
    ) -> Result<Done, PipelineError> {
        if !ran.outcome.all_dead {
            self.record.state = RunState::Quarantined;
            record
                .notices
                .extend(self.save().err().map(|e| error_chain(&e)));
            self.forget();
            record.notices.push("a process could not be killed; its workspace stays until `fumehood gc` finds it gone".into());
            return Ok(Done {
                record,
                stdout: ran.stdout,
                stderr: ran.stderr,
            });
        }
        let keep = match request.keep {
            Keep::Never => false,
            Keep::OnFailure => record.status != Status::Succeeded,
            Keep::Always => true,
        };
        if keep && request.workspace_kind == WorkspaceKind::Memory {
            record
                .notices
                .push("a workspace in memory cannot be kept".into());
        } else if keep {
            let until = home::unix_seconds() + request.keep_for_ms.div_ceil(1000);
            // The groups stay on record until they are gone, and the lease is held until nothing is the uid's any more.
            let left = self.finish_group();
            if left.is_none() {
                self.record.cgroups.clear();
            }
            record.notices.extend(left);
            self.record.state = RunState::Kept { until };
            record
                .notices
                .extend(self.save().err().map(|e| error_chain(&e)));
            let kept = self.workspace.take().map(Workspace::keep);
            if let Some(Err(e)) = kept {
                record
                    .notices
                    .push(format!("{}; it is kept as it is", error_chain(&e)));
            }
            record.kept_until = Some(until);
            record.notices.extend(self.release_quota());
            self.finish_lease();
            self.dir = None;
            return Ok(Done {
                record,
                stdout: ran.stdout,
                stderr: ran.stderr,
            });
        }
        if let Some(problem) = self.undo() {
            record.notices.push(problem);
        }
        Ok(Done {
            record,
            stdout: ran.stdout,
            stderr: ran.stderr,
        })
    }

    /// Leaves everything where it is, for the reaper.
    fn forget(&mut self) {
        self.dir = None;
        self.workspace = None;
        self.quota = None;
        self.lease = None;
        self.group = Err(String::new());
    }

    /// Before the lease ends, with which the project is ours.
    fn release_quota(&mut self) -> Option<String> {
        let quota = self.quota.take()?;
        let project = quota.project();
        let e = quota.release().err()?;
        Some(format!("free project {project} of its limits: {e}"))
    }

    /// Says why, if the group could not be removed.
    fn finish_group(&mut self) -> Option<String> {
        let group = std::mem::replace(&mut self.group, Err(String::new()));
        let failed = group.ok().and_then(|g| g.remove().err());
        failed.map(|e| error_chain(&e))
    }

    fn finish_lease(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.give_back_clean();
        }
    }

    /// Removes what was made, in an order that leaves the record until the end. Says what it could not.
    fn undo(&mut self) -> Option<String> {
        let mut problems = Vec::new();
        if let Some(workspace) = self.workspace.take()
            && let Err(e) = workspace.remove()
        {
            problems.push(error_chain(&e));
        }
        problems.extend(self.release_quota());
        problems.extend(self.finish_group());
        self.finish_lease();
        let dir = self.dir.take()?;
        if problems.is_empty() {
            problems.extend(dir.remove().err().map(|e| error_chain(&e)));
        }
        (!problems.is_empty())
            .then(|| format!("{}; `fumehood gc` tries again", problems.join("; ")))
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        // Only on the way out with an error, which is the one to be told: nothing ran, or all is dead.
        let _left_to_the_reaper = self.undo();
    }
}

fn fill(
    workspace: BorrowedFd<'_>,
    inputs: &[(PathBuf, PathBuf)],
    owner: Option<(u32, u32)>,
    limits: &Limits,
) -> Result<(), CopyError> {
    let mut budget = Budget {
        bytes: limits.disk_bytes,
        files: limits.files,
    };
    for (source, name) in inputs {
        copy_in::copy_in(source, workspace, name, owner, &mut budget)?;
    }
    Ok(())
}

fn open_stdin(
    request: &Request,
    plan: &Plan,
    terminal: Terminal,
) -> Result<Option<OwnedFd>, PipelineError> {
    let shell = matches!(terminal, Terminal::Own { .. });
    if shell || request.stdin == Stdin::Caller {
        return Ok(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).ok());
    }
    let opened = plan.stdin.as_ref().map(|path| {
        open_plainly(path).map_err(|source| PipelineError::Stdin {
            path: path.clone(),
            source,
        })
    });
    opened.transpose()
}

/// Opens a file to be piped in. Its path was resolved and checked when the plan was made; a link that stands there now
/// is somebody's trick. Never waits for the other end of a FIFO.
fn open_plainly(path: &Path) -> io::Result<OwnedFd> {
    use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
    let file = rustix::fs::openat2(
        rustix::fs::CWD,
        path,
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )?;
    match FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) {
        FileType::RegularFile | FileType::Fifo => Ok(file),
        _ if path == Path::new("/dev/null") => Ok(file),
        _ => Err(io::Error::other("it is not a plain file or a FIFO")),
    }
}

/// Between the sandbox and the audience: keeps the logs within their bounds.
struct Ears<'a> {
    audience: &'a mut dyn Audience,
    captures: [Capture; 2],
    workspace: Option<&'a Workspace>,
    inputs: &'a [(PathBuf, PathBuf)],
    owner: Option<(u32, u32)>,
    limits: &'a Limits,
    fill_error: Option<CopyError>,
}

impl Attendant for Ears<'_> {
    fn fill(&mut self, memory: BorrowedFd<'_>) -> io::Result<()> {
        if let Some(workspace) = self.workspace {
            workspace.furnish(memory, self.owner)?;
        }
        fill(memory, self.inputs, self.owner, self.limits).map_err(|e| {
            let text = error_chain(&e);
            self.fill_error = Some(e);
            io::Error::other(text)
        })
    }

    fn output(&mut self, stream: Stream, bytes: &[u8]) {
        let live = self.captures[stream as usize].push(bytes);
        self.audience.live(stream, live.bytes);
    }

    fn blocked_on(&self) -> Option<BorrowedFd<'_>> {
        self.audience.blocked_on()
    }

    fn unblocked(&mut self) {
        self.audience.unblocked();
    }

    fn wishes(&self) -> Option<BorrowedFd<'_>> {
        self.audience.wishes()
    }

    fn wish(&mut self) -> Option<Wish> {
        self.audience.wish()
    }
}

pub(crate) fn unix_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |d| d.as_millis() as u64)
}
