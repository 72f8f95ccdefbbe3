//! Builds the record of an attempt from what was requested, planned and measured.

use std::path::{Path, PathBuf};

use sandbox::outcome::{Exit, ResourceUsage, Stop};
use sandbox::spec::{Enforcement, Limits};

use crate::attempt::context::PlannedRun;
use crate::attempt::error::AttemptError;
use crate::attempt::hints::{self, Hint, HintFacts, HintKind, HostPath, HostPathKind, SpaceUsage};
use crate::attempt::log_capture::CapturedLog;
use crate::attempt::observer::{CancelCause, RunObserver};
use crate::attempt::record::{
    self, CommitState, CommitSummary, Isolation, LogSummary, Reason, Record, Status, Times,
};
use crate::attempt::states::ProgramRun;
use crate::home::unix_ms;
use crate::plan::limits::error_chain;
use crate::plan::{self, Plan};
use crate::request::{Command, RequestOrigin};
use crate::run_dir::RunRecord;
use crate::settings::Request;
use store::types::analysis_id::AnalysisId;

/// The record of a program that ran.
pub(crate) fn program_record(
    run: &PlannedRun<'_>,
    attempt: u32,
    enforcement: &[Enforcement],
    ran: &ProgramRun,
) -> Record {
    let (request, plan) = (run.request, run.plan);
    let (status, reason) = record::status_of(&ran.outcome);
    let guesses = match status {
        Status::Failed | Status::OutOfMemory | Status::LimitExceeded => {
            guess_hints(request, plan, run.limits, ran)
        }
        _ => Vec::new(),
    };
    let root = plan.workspace_root.as_path();
    let mut record = empty_record(&request.id, attempt, root, status, reason);
    let usage = &ran.outcome.usage;
    match ran.outcome.exit {
        Some(Exit::Code(code)) => record.exit_code = Some(code),
        Some(Exit::Signal(signal)) => record.signal = Some(signal),
        None => {}
    }
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
    record.stdout = LogSummary::without_text(&ran.stdout);
    record.stderr = LogSummary::without_text(&ran.stderr);
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

/// Stored with the record of a quarantined run.
const QUARANTINED: &str = "unkillable: not every process could be shown dead in time, so the workspace was quarantined; the next run or `fumehood gc` collects and commits it once they are gone";

/// The record of a run that Fumehood could not start.
pub fn start_failure_record(request: &Request, attempt: u32, error: &AttemptError) -> Record {
    let (status, reason) = error.status_and_reason();
    let root = &request.workspace_root;
    let mut record = empty_record(&request.id, attempt, root, status, reason);
    record.message = Some(error_chain(error));
    record
}

/// The record of an attempt whose runner died before the outcome of the program was known.
pub(crate) fn runner_lost_record(run: &RunRecord) -> Record {
    let root = run.workspace.parent().unwrap_or(Path::new("/"));
    let (status, reason) = (Status::Error, Reason::RunnerLost);
    let mut record = empty_record(&run.id, run.attempt, root, status, reason);
    record.message =
        Some("the runner died before the program's end was known; the program died with it".into());
    record
}

/// The record of results that were made without a sandbox.
pub(crate) fn external_result_record(
    id: &AnalysisId,
    attempt: u32,
    dir: &Path,
    status: Status,
) -> Record {
    let mut record = empty_record(id, attempt, dir, status, Reason::Recorded);
    record.workspace = dir.to_path_buf();
    record
}

fn empty_record(
    id: &AnalysisId,
    attempt: u32,
    workspace_root: &Path,
    status: Status,
    reason: Reason,
) -> Record {
    let now = unix_ms();
    let usage = ResourceUsage::default();
    let nothing = CapturedLog::default();
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
        stdout: LogSummary::without_text(&nothing),
        stderr: LogSummary::without_text(&nothing),
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
        commit: CommitSummary {
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

/// Changes the status of a cancelled program to `error` if nobody asked for the cancellation: the runner lost its lease
/// or was stopped. A program that ended by itself keeps its status.
pub(crate) fn apply_cancel_cause(record: &mut Record, observer: &mut dyn RunObserver) {
    if record.reason != Reason::Cancelled {
        return;
    }
    let (reason, message) = match observer.cancel_cause() {
        CancelCause::Requested => return,
        CancelCause::LeaseLost => (
            Reason::LeaseLost,
            "the database could not be reached to renew the lease, or had given the attempt up; the analysis was ended",
        ),
        CancelCause::RunnerStopped => (
            Reason::RunnerStopped,
            "its runner was told to stop, as when a machine is shut down, and nobody had cancelled the analysis",
        ),
    };
    record.status = Status::Error;
    record.reason = reason;
    record.message = Some(String::from(message));
}

/// What every run sees.
const SYSTEM: [&str; 8] = [
    "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/dev",
];

fn guess_hints(request: &Request, plan: &Plan, limits: &Limits, ran: &ProgramRun) -> Vec<Hint> {
    let mut visible: Vec<PathBuf> = plan.views.iter().map(|v| v.target.to_path_buf()).collect();
    visible.extend(SYSTEM.map(PathBuf::from));
    let workspace = crate::workspace::path_for(&plan.workspace_root, &request.id);
    // A queue's worker runs a copy of the script, so the directory of the script says nothing to the submitter.
    let script_dir = match (&request.command, &request.asked_by) {
        (Command::Script { .. }, RequestOrigin::Caller) => plan.inputs.first(),
        _ => None,
    };
    let facts = HintFacts {
        visible: &visible,
        workspace: &workspace,
        project: &plan.project,
        script_dir: script_dir.and_then(|(script, _)| script.parent()),
        homes: &plan.homes,
        on_host: &|path| look_up_on_host(path).filter(|_| plan::may_reveal_path(request, path)),
        network_off: true,
        disk: Some(SpaceUsage {
            used_bytes: ran.outcome.usage.disk_bytes,
            limit_bytes: limits.disk_bytes,
        }),
        shm: None,
        runtime: plan.runtime.prefixes.first().map(PathBuf::as_path),
        oom_kills: ran.outcome.usage.oom_kills,
        pids_denied: ran.pids_denied,
    };
    if ran.outcome.stop == Some(Stop::Memory) && facts.oom_kills == 0 {
        // The program printed nothing and the kernel killed nothing: the memory watch stopped the program.
        let text = "it needs more than the memory limit; raise --memory";
        return vec![Hint::guess(HintKind::Memory, text)];
    }
    if ran.outcome.stop == Some(Stop::OpenFiles) {
        let text = "its processes together had more than a tenth of the files open that this host can have (fs.file-max); \
                    close some, start fewer processes, or have fs.file-max raised";
        return vec![Hint::guess(HintKind::OpenFiles, text)];
    }
    let tail = match ran.stderr.tail.is_empty() {
        true => &ran.stderr.head,
        false => &ran.stderr.tail,
    };
    hints::hints(tail, &facts)
}

fn look_up_on_host(path: &Path) -> Option<HostPath> {
    let real = std::fs::canonicalize(path).ok()?;
    let meta = std::fs::metadata(&real).ok()?;
    let kind = match (meta.is_file(), meta.is_dir()) {
        (true, _) => HostPathKind::File,
        (_, true) => HostPathKind::Directory,
        _ => HostPathKind::Other,
    };
    Some(HostPath { real, kind })
}
