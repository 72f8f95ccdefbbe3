//! Exit codes. They are fixed and documented, and only `succeeded` exits with 0.

use engine::attempt::record::{CommitState, Reason, Record};
use store::{AttemptSummary, PostProcessState, State};

/// The program never started, or Fumehood failed.
pub const COULD_NOT_RUN: u8 = 125;
/// The --timeout of `wait` passed before all analyses had ended. Not 124, which means that an analysis timed out.
pub const NOT_ENDED: u8 = 119;
/// The program succeeded, but an output that `--expect` names is missing.
pub const MISSING_OUTPUT: u8 = 120;
/// The program ran. Its commit is pending, or its post_process command failed.
pub const NOT_FINISHED: u8 = 121;
pub const TIMED_OUT: u8 = 124;
pub const CANCELLED: u8 = 123;
pub const LIMIT_EXCEEDED: u8 = 122;
pub const NOT_EXECUTABLE: u8 = 126;
pub const NOT_FOUND: u8 = 127;
pub const OUT_OF_MEMORY: u8 = 137;
const SIGNAL_BASE: i32 = 128;

pub const HELP: &str = "Exit codes:
  the program's own   it ran to its end
  120  succeeded, but an --expect is missing   121  ran, but not committed (see the message)
  122  a limit was exceeded (disk, files,      123  cancelled (Ctrl-C, SIGTERM, SIGHUP)
       processes, open files)
  124  timed out (wall, CPU or idle time)      125  Fumehood could not run it
  126  not executable                          127  not found
  128+n  killed by signal n                    137  out of memory, or killed
121 also means that the post_process command failed after a success. `wait` exits as `run` would
have: for several analyses with the first code that is not 0, and with 119 if its own --timeout
passes before they have ended. The `reason` in --json always says more.";

pub fn code_of_record(record: &Record) -> u8 {
    let ran = record.isolation.level.is_some();
    let committed = !matches!(
        record.commit.state,
        CommitState::Pending | CommitState::InWorkspace
    );
    if ran && !committed {
        return NOT_FINISHED;
    }
    let unprocessed = record.post_process.as_ref().is_some_and(|p| !p.done);
    let state = State::parse(record.status.as_str()).unwrap_or(State::Unknown);
    let reason = record.reason.as_str();
    final_code(
        state,
        reason,
        (record.exit_code, record.signal),
        unprocessed,
    )
}

/// Returns the code with which `run` would have exited, from the recorded attempt.
pub fn code_of_stored(summary: &AttemptSummary) -> u8 {
    let unprocessed = matches!(
        summary.post_process,
        PostProcessState::Pending | PostProcessState::Failed
    );
    let reason = summary.reason.as_deref().unwrap_or_default();
    let wait_status = (summary.exit_code, summary.signal);
    final_code(summary.state, reason, wait_status, unprocessed)
}

fn final_code(
    state: State,
    reason: &str,
    (exit_code, signal): (Option<i32>, Option<i32>),
    unprocessed: bool,
) -> u8 {
    let is = |expected: Reason| reason == expected.as_str();
    match state {
        State::Queued | State::Running | State::Collecting => NOT_ENDED,
        State::Succeeded if unprocessed => NOT_FINISHED,
        State::Succeeded => 0,
        State::Failed if is(Reason::MissingOutput) => MISSING_OUTPUT,
        State::Failed => {
            let by_signal = signal.and_then(|n| SIGNAL_BASE.checked_add(n));
            let code = exit_code.or(by_signal);
            let code = code.and_then(|code| u8::try_from(code).ok());
            // A failed program never exits with 0, whatever the record says.
            code.filter(|code| *code != 0).unwrap_or(1)
        }
        State::TimedOut => TIMED_OUT,
        State::OutOfMemory => OUT_OF_MEMORY,
        State::LimitExceeded => LIMIT_EXCEEDED,
        State::Cancelled => CANCELLED,
        State::Error if is(Reason::NotFound) => NOT_FOUND,
        State::Error if is(Reason::NotExecutable) => NOT_EXECUTABLE,
        State::Error | State::Unknown => COULD_NOT_RUN,
    }
}
