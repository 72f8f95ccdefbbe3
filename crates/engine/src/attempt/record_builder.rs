//! The record of a run in words and numbers: from what was asked, planned and measured.

use std::path::{Path, PathBuf};

use sandbox::outcome::{Exit, ResourceUsage, Stop};
use sandbox::spec::{Enforcement, Limits};

use crate::attempt::Ran;
use crate::attempt::hints::{self, Facts, HostKind, OnHost, Used};
use crate::attempt::log_capture::Captured;
use crate::attempt::pipeline::{Audience, EndedFor, PipelineError, unix_ms};
use crate::attempt::record::{
    self, Commit, CommitState, Isolation, Log, Reason, Record, Status, Times,
};
use crate::plan::limits::error_chain;
use crate::plan::{self, Plan};
use crate::request::{AnalysisId, Asker, Command, Request};
use crate::run_dir::RunRecord;

/// The record of a run that took place.
pub(crate) fn describe(
    request: &Request,
    attempt: u32,
    plan: &Plan,
    limits: &Limits,
    enforcement: &[Enforcement],
    ran: &Ran,
) -> Record {
    let (status, reason) = record::judge(&ran.outcome);
    let guesses = match status {
        Status::Failed | Status::OutOfMemory | Status::LimitExceeded => {
            guess(request, plan, limits, ran)
        }
        _ => Vec::new(),
    };
    let mut record = blank(
        &request.id,
        attempt,
        plan.workspace_root.as_path(),
        status,
        reason,
    );
    let usage = &ran.outcome.usage;
    record.exit_code = match ran.outcome.exit {
        Some(Exit::Code(code)) => Some(code),
        _ => None,
    };
    record.signal = match ran.outcome.exit {
        Some(Exit::Signal(signal)) => Some(signal),
        _ => None,
    };
    record.times = Times {
        started_ms: ran.started_ms,
        ended_ms: ran.ended_ms,
        wall_ms: usage.wall_ms,
    };
    record.cpu_ms = usage.cpu_ms;
    record.memory_peak_bytes = usage.memory_peak_bytes;
    record.pids_peak = usage.pids_peak;
    record.disk_bytes = usage.disk_bytes;
    record.files = usage.files;
    record.oom_kills = usage.oom_kills;
    record.stdout = Log::without_text(&ran.stdout);
    record.stderr = Log::without_text(&ran.stderr);
    record.isolation = Isolation {
        level: Some(ran.level.into()),
        landlock_abi: ran.landlock_abi(),
        layers: ran.layers.iter().cloned().collect(),
    };
    record.limits = record::limit_entries(enforcement);
    record.hints = guesses;
    record.notices = plan.notices.iter().chain(&ran.notices).cloned().collect();
    if !ran.outcome.all_dead {
        record.notices.push(QUARANTINED.into());
    }
    record
}

/// Stored with the record: the outputs were collected later than the run ended.
const QUARANTINED: &str = "unkillable: not every process could be shown dead in time, so the workspace was quarantined; the next run or `fumehood gc` collects and commits it once they are gone";

/// The record of a run that Fumehood could not start.
pub fn not_run(request: &Request, attempt: u32, error: &PipelineError) -> Record {
    let (status, reason) = error.verdict();
    let mut record = blank(
        &request.id,
        attempt,
        &request.workspace_root,
        status,
        reason,
    );
    record.message = Some(error_chain(error));
    record
}

/// The record of an attempt whose runner died before it could tell how the program ended.
pub(crate) fn runner_lost(run: &RunRecord) -> Record {
    let root = run.workspace.parent().unwrap_or(Path::new("/"));
    let (status, reason) = (Status::Error, Reason::RunnerLost);
    let mut record = blank(&run.id, run.attempt, root, status, reason);
    record.message =
        Some("the runner died before the program's end was known; the program died with it".into());
    record
}

/// A record of results that were made without a sandbox.
pub(crate) fn handed_in(id: &AnalysisId, attempt: u32, dir: &Path, status: Status) -> Record {
    let mut record = blank(id, attempt, dir, status, Reason::Recorded);
    record.workspace = dir.to_path_buf();
    record
}

fn blank(
    id: &AnalysisId,
    attempt: u32,
    workspace_root: &Path,
    status: Status,
    reason: Reason,
) -> Record {
    let now = unix_ms();
    let usage = ResourceUsage::default();
    let nothing = Captured::default();
    Record {
        schema: record::SCHEMA.into(),
        id: id.clone(),
        attempt,
        status,
        reason,
        message: None,
        exit_code: None,
        signal: None,
        times: Times {
            started_ms: now,
            ended_ms: now,
            wall_ms: 0,
        },
        cpu_ms: usage.cpu_ms,
        memory_peak_bytes: None,
        pids_peak: None,
        disk_bytes: 0,
        files: 0,
        oom_kills: 0,
        stdout: Log::without_text(&nothing),
        stderr: Log::without_text(&nothing),
        workspace: crate::workspace::path_for(workspace_root, id),
        kept_until: None,
        isolation: Isolation {
            level: None,
            landlock_abi: None,
            layers: Default::default(),
        },
        limits: Default::default(),
        outputs: Vec::new(),
        collection: Default::default(),
        commit: Commit {
            state: CommitState::Unrecorded,
            database: None,
            message: None,
        },
        post_process: None,
        hints: Vec::new(),
        notices: Vec::new(),
        timings: None,
    }
}

/// The program was ended for its runner's sake, not for anybody's wish. One that had ended by itself is what it was.
pub(crate) fn ended_for(record: &mut Record, audience: &mut dyn Audience) {
    if record.reason != Reason::Cancelled {
        return;
    }
    let (reason, message) = match audience.ended_for() {
        EndedFor::Wish => return,
        EndedFor::LeaseLost => (
            Reason::LeaseLost,
            "the database could not be reached to renew the lease, or had given the attempt up; the analysis was ended",
        ),
        EndedFor::Stopped => (
            Reason::RunnerStopped,
            "its runner was told to end, as when a machine is shut down, and nobody had cancelled it",
        ),
    };
    record.status = Status::Error;
    record.reason = reason;
    record.message = Some(String::from(message));
}

fn guess(request: &Request, plan: &Plan, limits: &Limits, ran: &Ran) -> Vec<hints::Hint> {
    let mut visible: Vec<PathBuf> = plan.views.iter().map(|v| v.target.to_path_buf()).collect();
    visible.extend(
        [
            "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/dev",
        ]
        .map(PathBuf::from),
    );
    let workspace = crate::workspace::path_for(&plan.workspace_root, &request.id);
    // What a queue's worker has in its place is a copy of what lay where it was submitted.
    let script_dir = match (&request.command, &request.asked_by) {
        (Command::Script { .. }, Asker::Caller) => plan.inputs.first(),
        _ => None,
    };
    let facts = Facts {
        visible: &visible,
        workspace: &workspace,
        project: &plan.project,
        script_dir: script_dir.and_then(|(script, _)| script.parent()),
        homes: &plan.homes,
        on_host: &|path| on_host(path).filter(|_| plan::may_tell(request, path)),
        network_off: true,
        disk: Some(Used {
            used_bytes: ran.outcome.usage.disk_bytes,
            limit_bytes: limits.disk_bytes,
        }),
        shm: None,
        runtime: plan.runtime.prefixes.first().map(PathBuf::as_path),
        oom_kills: ran.outcome.usage.oom_kills,
        pids_denied: ran.pids_denied,
    };
    if ran.outcome.stop == Some(Stop::Memory) && facts.oom_kills == 0 {
        // Nothing was printed, and the kernel killed nobody: the watch did.
        let text = String::from("guess: it needs more than the memory limit; raise --memory");
        let kind = hints::HintKind::Memory;
        return vec![hints::Hint { kind, text }];
    }
    if ran.outcome.stop == Some(Stop::OpenFiles) {
        let text = String::from(
            "its processes together had more than a tenth of the files open that this host can have (fs.file-max); \
             close some, start fewer processes, or have fs.file-max raised",
        );
        let kind = hints::HintKind::OpenFiles;
        return vec![hints::Hint { kind, text }];
    }
    let tail = if ran.stderr.tail.is_empty() {
        &ran.stderr.head
    } else {
        &ran.stderr.tail
    };
    hints::hints(tail, &facts)
}

fn on_host(path: &Path) -> Option<OnHost> {
    let real = std::fs::canonicalize(path).ok()?;
    let meta = std::fs::metadata(&real).ok()?;
    let kind = match (meta.is_file(), meta.is_dir()) {
        (true, _) => HostKind::File,
        (_, true) => HostKind::Directory,
        _ => HostKind::Other,
    };
    Some(OnHost { real, kind })
}
