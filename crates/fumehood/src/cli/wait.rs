//! `fumehood wait`: waits until analyses have ended, whoever runs them.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::Context;
use engine::attempt::error::CommitError;
use engine::attempt::recorder::Recorder;
use engine::home::Home;
use engine::request::AnalysisId;
use sandbox::events::{self, PollFlags};
use serde::Serialize;
use store::types::units::parse_duration_ms;
use store::{AttemptSummary, ChangeListener, PostProcessState, StoreError};

use super::args::StoreArgs;
use super::print::{self, escape};
use super::run_dirs::{self, NextAction};
use super::{attempt_text, exit, ids, messages, record_access};

/// Wait until analyses have ended, and report how.
///
/// An analysis that is going to be tried again has not ended. For one analysis the exit code is the one of `fumehood
/// run`. For several it is 0 if all succeeded, otherwise that of the first, in the order given, that did not. If
/// --timeout passes first, it is 119.
#[derive(Clone, Debug, clap::Args)]
pub struct WaitArgs {
    #[arg(value_name = "ID", required = true, help = ids::HELP_ANALYSIS)]
    pub ids: Vec<OsString>,

    /// Wait at most this long, such as 30s or 2h; then exit with 119. The analyses go on [default: for ever]
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<OsString>,

    /// Do not print a line for each analysis as it ends
    #[arg(long, short, conflicts_with = "json")]
    pub quiet: bool,

    /// Print one JSON document (fumehood.wait/1) at the end
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    /// Whether --timeout passed before all had ended.
    timed_out: bool,
    /// In the order given.
    analyses: &'a [AwaitedAnalysis],
}

/// How often to look even if no change is announced.
const POLL_INTERVAL_MAX: Duration = Duration::from_secs(2);
/// Changes that follow each other closely are read once, and many analyses are not polled all the time.
const POLL_INTERVAL_MIN: Duration = Duration::from_millis(50);
/// A database that restarts or moves comes back within this time. Longer outages are reported.
const DATABASE_AWAY_MAX: Duration = Duration::from_secs(300);
/// How long to wait for the post_process command after a commit, if the configuration here has no such command.
const POST_PROCESS_WAIT_MS: u64 = 600_000;

pub fn wait(args: &WaitArgs) -> anyhow::Result<u8> {
    let timeout = args.timeout.as_ref();
    let timeout_ms = timeout.map(|text| parse_duration_ms(&text.to_string_lossy()));
    let timeout_ms = timeout_ms.transpose().context("read --timeout")?;
    let deadline = timeout_ms.and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms)));
    let (home, mut recorder) = record_access::open(&args.store)?;
    let wanted = ids::resolve_analyses(&mut recorder, &args.ids)?;
    let mut on_ended = |summary: &AttemptSummary| match args.quiet || args.json {
        true => Ok(()),
        false => print::lines([format!(
            "{} {}",
            attempt_text::display_name(summary),
            attempt_text::status_text(summary)
        )]),
    };
    let all = until_ended(&home, &mut recorder, &wanted, deadline, &mut on_ended)?;
    let waiting: Vec<&str> = all
        .iter()
        .filter(|one| !one.ended)
        .map(|one| one.summary.id.as_str())
        .collect();
    if args.json {
        print::json(&Document {
            schema: "fumehood.wait/1",
            timed_out: !waiting.is_empty(),
            analyses: &all,
        })?;
    }
    if !waiting.is_empty() {
        messages::line(&format!(
            "the time is over, and {} not ended: {}",
            if waiting.len() == 1 {
                "one has"
            } else {
                "some have"
            },
            list_some(&waiting)
        ));
        return Ok(exit::NOT_ENDED);
    }
    let mut codes = all.iter().filter_map(|one| one.exit);
    Ok(codes.find(|code| *code != 0).unwrap_or(0))
}

fn list_some(ids: &[&str]) -> String {
    const NAMED_MAX: usize = 8;
    let named: Vec<String> = ids.iter().take(NAMED_MAX).map(|id| escape(id)).collect();
    match ids.len() > NAMED_MAX {
        true => format!("{}, … and {} more", named.join(", "), ids.len() - NAMED_MAX),
        false => named.join(", "),
    }
}

/// The last known status of an analysis.
#[derive(Serialize)]
pub struct AwaitedAnalysis {
    ended: bool,
    /// The exit code of `run`, if it has ended.
    exit: Option<u8>,
    /// The newest attempt that was not superseded.
    #[serde(flatten)]
    pub summary: AttemptSummary,
}

/// Waits until all have ended, and reports each as it ends. Returns them in the order given; if the deadline passed,
/// some have not ended.
pub fn until_ended(
    home: &Home,
    recorder: &mut Recorder,
    ids: &[String],
    deadline: Option<Instant>,
    on_ended: &mut dyn FnMut(&AttemptSummary) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<AwaitedAnalysis>> {
    let mut watch = RecordWatch::new(recorder);
    let mut found: Vec<Option<AwaitedAnalysis>> = ids.iter().map(|_| None).collect();
    let mut lost = LostRunners::default();
    loop {
        let began = Instant::now();
        for (id, last) in ids.iter().zip(&mut found) {
            if last.as_ref().is_some_and(|last| last.ended) {
                continue;
            }
            let now = watch.ask(recorder, |recorder| read_status(recorder, id), deadline)?;
            let Some(now) = now else { break };
            match now.ended {
                true => on_ended(&now.summary)?,
                false => lost.report(home, &now.summary),
            }
            *last = Some(now);
        }
        let waits = |last: &Option<AwaitedAnalysis>| last.as_ref().is_none_or(|last| !last.ended);
        let over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if over || !found.iter().any(waits) {
            let all = found.into_iter().collect::<Option<Vec<_>>>();
            return all.context("the time was over before the database answered");
        }
        let rest = POLL_INTERVAL_MIN.max(began.elapsed().saturating_mul(4));
        watch.pause(rest.min(POLL_INTERVAL_MAX), POLL_INTERVAL_MAX, deadline)?;
    }
}

/// Reads the status of an analysis. An analysis that the database no longer has is an error, because it never ends.
fn read_status(recorder: &mut Recorder, id: &str) -> Result<AwaitedAnalysis, CommitError> {
    let (mut attempts, now_ms) =
        recorder.with(|store| Ok((store.attempts(id)?, store.now_ms()?)))?;
    // Superseded attempts came too late and have numbers of their own, so skip them.
    let counts = attempts.iter().rposition(|attempt| !attempt.superseded);
    let counts = counts.or(attempts.len().checked_sub(1));
    let Some(at) = counts else {
        let given = id.to_owned();
        return Err(recorder.database_error(StoreError::NotFound { given }));
    };
    let summary = attempts.swap_remove(at);
    let step_ms = recorder.post_process.as_ref().map(|step| step.timeout_ms);
    let step_ms = i64::try_from(step_ms.unwrap_or(POST_PROCESS_WAIT_MS)).unwrap_or(i64::MAX);
    let since_ms = now_ms.saturating_sub(summary.committed_ms.unwrap_or(now_ms));
    let step_runs = summary.post_process == PostProcessState::Pending && since_ms < step_ms;
    // A newer version of Fumehood may have ended it in a state that this version does not know.
    let ended = (summary.state.is_final() || summary.committed_ms.is_some()) && !step_runs;
    Ok(AwaitedAnalysis {
        ended,
        exit: ended.then(|| exit::code_of_stored(&summary)),
        summary,
    })
}

/// Waits for changes of the record, and polls from time to time.
pub struct RecordWatch {
    listener: Option<ChangeListener>,
    away_since: Option<Instant>,
}

impl RecordWatch {
    /// Without notifications it only reacts later.
    pub fn new(recorder: &Recorder) -> RecordWatch {
        RecordWatch {
            listener: ChangeListener::subscribe(&recorder.location).ok(),
            away_since: None,
        }
    }

    /// Asks the database, and asks again while it is away. Returns `None` if the deadline passes.
    pub fn ask<T>(
        &mut self,
        recorder: &mut Recorder,
        mut question: impl FnMut(&mut Recorder) -> Result<T, CommitError>,
        deadline: Option<Instant>,
    ) -> anyhow::Result<Option<T>> {
        loop {
            let error = match question(recorder) {
                Ok(answer) => {
                    if self.away_since.take().is_some() {
                        messages::line("the database is back");
                        self.listener = ChangeListener::subscribe(&recorder.location).ok();
                    }
                    return Ok(Some(answer));
                }
                Err(error) => error,
            };
            recorder.disconnect();
            let since = match (is_away(&error), self.away_since) {
                (false, _) => return Err(ids::without_database_context(error)),
                (true, Some(since)) => since,
                (true, None) => {
                    let error = anyhow::Error::from(error);
                    messages::line(&format!("{error:#}; waiting for it"));
                    *self.away_since.insert(Instant::now())
                }
            };
            anyhow::ensure!(
                since.elapsed() < DATABASE_AWAY_MAX,
                "the database has been away for {} s; what runs goes on",
                DATABASE_AWAY_MAX.as_secs()
            );
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(None);
            }
            self.listener = None;
            self.pause(POLL_INTERVAL_MIN, POLL_INTERVAL_MAX, deadline)?;
        }
    }

    /// Waits at least for `rest`; then until a change is announced, for `most`, or until the deadline.
    pub fn pause(
        &mut self,
        rest: Duration,
        most: Duration,
        deadline: Option<Instant>,
    ) -> anyhow::Result<()> {
        let left = |most: Duration| match deadline {
            Some(deadline) => most.min(deadline.saturating_duration_since(Instant::now())),
            None => most,
        };
        // A change that is announced meanwhile is still pending afterwards.
        std::thread::sleep(left(rest));
        let most = left(most);
        let Some(listener) = &mut self.listener else {
            std::thread::sleep(most);
            return Ok(());
        };
        let wanted = [((), listener.as_fd(), PollFlags::IN)];
        let ready = events::wait_for_any(wanted, most).context("wait for news")?;
        if !ready.is_empty() {
            listener.consume();
        }
        Ok(())
    }
}

fn is_away(error: &CommitError) -> bool {
    matches!(error, CommitError::Database { source, .. } if source.is_database_fault())
}

/// Attempts whose runner died in this home, and that nobody finishes while this process waits.
#[derive(Default)]
struct LostRunners {
    reported: Vec<String>,
}

impl LostRunners {
    fn report(&mut self, home: &Home, summary: &AttemptSummary) {
        if summary.host != engine::home::machine_id() || self.reported.contains(&summary.id) {
            return;
        }
        let Ok(id) = AnalysisId::new(&summary.id) else {
            return;
        };
        let mut here = run_dirs::list_analysis(home, &id).into_iter();
        let finish = |run_dir: &run_dirs::RunDirInfo| {
            run_dir.record.attempt == summary.attempt && run_dir.next_action() == NextAction::Finish
        };
        if let Some(run_dir) = here.find(finish) {
            messages::line(&run_dir.advice());
            self.reported.push(summary.id.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_is_cut() {
        let ids: Vec<String> = (0..20).map(|n| format!("a{n}")).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        assert_eq!(list_some(&ids[..2]), "a0, a1");
        assert!(list_some(&ids).ends_with("a7, … and 12 more"));
    }
}
