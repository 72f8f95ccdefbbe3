//! One attempt, from the claimed id to the committed record: a state machine whose states are types.
//!
//! Each state owns what may be released from it. A transition consumes a state and returns the next one, or an
//! `AbortedAttempt`, which owns what must be released then. (If `claim` fails, it has released everything itself.) The crash points are the durable steps of the transition, in
//! their order; ARCHITECTURE.md says what a crash at each of them leaves.
//!
//! | transition | file | from | to | durable steps |
//! |---|---|---|---|---|
//! | `LockedAttempt::claim` | `claim` | – | `LockedAttempt`: run directory, uid | `claimed` |
//! | `LockedAttempt::fill` | `fill` | `LockedAttempt` | `FilledAttempt`: and workspace, quota | `workspace_made`, `filled` |
//! | `FilledAttempt::create_cgroup` | `limit` | `FilledAttempt` | `ReadyAttempt`: and cgroup | – |
//! | `ReadyAttempt::execute` | `execute` | `ReadyAttempt` | `ExecutedAttempt`: and the outcome, in memory | `begun` |
//! | `ExecutedAttempt::commit` | `commit` | `ExecutedAttempt` | `AttemptToRelease`: and the committed record | `ended`, `logs_kept`, `outcome_written` |
//! | `finalize_attempt` | `finalize` | `EndedAttempt` | the committed record | `collected`, `manifest_written`, `object_moved`, `objects_durable`, `transaction_open`, `committed` |
//! | `AttemptToRelease::release` | `release` | `AttemptToRelease` | `CompletedRun` | `workspace_removed`, `post_processed`, `marked`, `finished` |
//! | `AbortedAttempt::record` | `fail` | `AbortedAttempt` | `StartFailure` | `begun` and `logs_kept` to `committed`, `post_processed` and `marked`, as far as they are due |
//!
//! The row in the database is begun (`row`) by whichever transition finds `RowState::NotBegun` when it needs the row:
//! `execute`; `fill`, if there are many inputs; or `fail`.
//!
//! `run` and the queue's runner enter at `claim`. The reaper and `post-process` enter at `finalize_attempt`, with an
//! `EndedAttempt` from the files of a run directory, and so does `record`, with one from the user's own directory. After the commit, `post_process` is the same for all.
//!
//! The other files, in reading order: `states` (the types), `context` (what every transition reads), `observer` (how
//! the caller follows the run), `error`, `recorder` (the database connection and the artifact store), `input_copy`
//! (copies inputs, records what they were), `isolation` (which level of confinement), `idle_timer`, `log_capture`,
//! `record` (the result document), `record_builder`, `hints` (guesses why the program failed), `post_process` (the
//! operator's own command after a commit), `systemd_scope` (a delegated cgroup), `terminal_filter`. This folder uses `run_dir` and never `recovery`.

mod claim;
mod commit;
pub(crate) mod context;
pub mod error;
mod execute;
pub(crate) mod fail;
mod fill;
pub(crate) mod finalize;
pub mod hints;
mod idle_timer;
mod input_copy;
pub(crate) mod isolation;
mod limit;
pub mod log_capture;
pub(crate) mod observer;
pub(crate) mod post_process;
pub mod record;
pub mod record_builder;
pub mod recorder;
pub(crate) mod release;
pub(crate) mod row;
pub(crate) mod states;
pub mod systemd_scope;
pub mod terminal_filter;

pub(crate) use claim::check_free_space;
use context::PlannedRun;
use fail::StartFailure;
use observer::RunObserver;
use recorder::Recorder;
use release::CompletedRun;
use states::LockedAttempt;
use store::types::timings;

/// Makes one attempt: all transitions in their order. Without a recorder nothing is recorded.
pub(crate) fn make_attempt(
    run: &PlannedRun<'_>,
    recorder: Option<&mut Recorder>,
    observer: &mut dyn RunObserver,
) -> Result<CompletedRun, StartFailure> {
    let claimed = LockedAttempt::claim(run, recorder)?;
    let ended = claimed.fill(run).and_then(|filled| {
        if filled.is_on_tmpfs() {
            observer.notice("the workspace root is a tmpfs: disk used there is memory");
        }
        let ready = filled.create_cgroup(run);
        timings::mark("cgroup_made");
        ready.execute(run, observer)
    });
    match ended {
        Ok(ended) => Ok(ended.commit(run, observer).release(run)),
        Err(failed) => Err(failed.record(run)),
    }
}
