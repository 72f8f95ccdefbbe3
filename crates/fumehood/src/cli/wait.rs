//! `fumehood wait`: until analyses have ended, whoever runs them.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::Context;
use engine::attempt::error::CommitError;
use engine::attempt::recorder::Recorder;
use engine::home::Home;
use engine::request::AnalysisId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use store::types::units::parse_duration_ms;
use store::{AttemptSummary, ChangeListener, PostProcessState, StoreError};

use super::args::StoreArgs;
use super::document::Entry;
use super::print::{self, Out, clean};
use super::standing::{self, Next};
use super::{exit, ids, ledger, list, show};

/// Wait until analyses have ended, and tell how.
///
/// One that is tried again has not ended. Of one analysis the exit code is what `fumehood run` would have exited with; of
/// several it is 0 if all succeeded, else that of the first, in the order given, that did not. If --timeout is over first
/// it is 119.
#[derive(Clone, Debug, clap::Args)]
pub struct WaitArgs {
    #[arg(value_name = "ID", required = true, help = ids::HELP_WHOLE)]
    pub ids: Vec<OsString>,

    /// Wait at most so long, such as 30s or 2h; then exit with 119. The analyses go on [default: for ever]
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<OsString>,

    /// Do not print a line for each as it ends
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
    /// Whether --timeout was over before all had ended.
    timed_out: bool,
    /// In the order given.
    analyses: Vec<Awaited<'a>>,
}

#[derive(Serialize)]
struct Awaited<'a> {
    ended: bool,
    exit: Option<u8>,
    #[serde(flatten)]
    entry: Entry<'a>,
}

/// We look this often even if nothing tells of news.
const LOOK_AT_MOST: Duration = Duration::from_secs(2);
/// A crowd of news is one piece of news, and many analyses are not looked at all the time.
const LOOK_AT_LEAST: Duration = Duration::from_millis(50);
/// A database that is started anew, or moved, comes back within this; else somebody should know.
const AWAY_MAX: Duration = Duration::from_secs(300);
/// How long the platform's own step after a commit is waited for, where our configuration has none.
const STEP_MS: u64 = 600_000;

pub fn wait(args: &WaitArgs) -> anyhow::Result<u8> {
    let deadline = match &args.timeout {
        Some(text) => {
            let ms = parse_duration_ms(&text.to_string_lossy()).context("read --timeout")?;
            Instant::now().checked_add(Duration::from_millis(ms))
        }
        None => None,
    };
    let (home, mut ledger) = ledger::open(&args.store)?;
    let mut wanted = Vec::new();
    for given in &args.ids {
        let id = ids::analysis(&mut ledger, given)?;
        if !wanted.contains(&id) {
            wanted.push(id);
        }
    }
    let mut tell = |listed: &AttemptSummary| match args.quiet || args.json {
        true => Ok(()),
        false => tell(listed),
    };
    let all = until_ended(&home, &mut ledger, &wanted, deadline, &mut tell)?;
    let waiting: Vec<&str> = all.iter().filter(|one| !one.ended).map(Last::id).collect();
    if args.json {
        print::json(&Document {
            schema: "fumehood.wait/1",
            timed_out: !waiting.is_empty(),
            analyses: all.iter().map(Awaited::from).collect(),
        })?;
    }
    if !waiting.is_empty() {
        show::line(&format!(
            "the time is over, and {} not ended: {}",
            if waiting.len() == 1 {
                "one has"
            } else {
                "some have"
            },
            shortened(&waiting)
        ));
        return Ok(exit::NOT_ENDED);
    }
    let codes = all.iter().map(|one| exit::of_stored(&one.listed));
    Ok(codes.into_iter().find(|code| *code != 0).unwrap_or(0))
}

fn tell(listed: &AttemptSummary) -> anyhow::Result<()> {
    let mut out = Out::new();
    out.line(&format!("{} {}", list::name(listed), list::ended(listed)))?;
    out.finish()
}

fn shortened(ids: &[&str]) -> String {
    const TOLD_MAX: usize = 8;
    let told: Vec<String> = ids.iter().take(TOLD_MAX).map(|id| clean(id)).collect();
    match ids.len() > TOLD_MAX {
        true => format!("{}, … and {} more", told.join(", "), ids.len() - TOLD_MAX),
        false => told.join(", "),
    }
}

/// An analysis as it was when we last looked.
pub struct Last {
    pub ended: bool,
    /// The attempt that counts.
    pub listed: AttemptSummary,
}

impl Last {
    fn id(&self) -> &str {
        &self.listed.id
    }
}

impl<'a> From<&'a Last> for Awaited<'a> {
    fn from(last: &'a Last) -> Awaited<'a> {
        Awaited {
            ended: last.ended,
            exit: last.ended.then(|| exit::of_stored(&last.listed)),
            entry: Entry::from(&last.listed),
        }
    }
}

/// Waits for all of them, and tells of each as it ends. In the order given; if the time is over, some have not ended.
pub fn until_ended(
    home: &Home,
    ledger: &mut Recorder,
    ids: &[String],
    deadline: Option<Instant>,
    tell: &mut dyn FnMut(&AttemptSummary) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<Last>> {
    let mut watch = Watch::over(ledger);
    let mut found: Vec<Option<Last>> = ids.iter().map(|_| None).collect();
    let mut lost = LostRunners::default();
    loop {
        let began = Instant::now();
        for (id, last) in ids.iter().zip(&mut found) {
            if last.as_ref().is_some_and(|last| last.ended) {
                continue;
            }
            let now = watch.ask(ledger, |ledger| look(ledger, id), deadline)?;
            let Some(now) = now else { break };
            match now.ended {
                true => tell(&now.listed)?,
                false => lost.tell_of(home, &now.listed),
            }
            *last = Some(now);
        }
        let waits = |last: &Option<Last>| last.as_ref().is_none_or(|last| !last.ended);
        let over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if over || !found.iter().any(waits) {
            let all = found.into_iter().collect::<Option<Vec<_>>>();
            return all.context("the time was over before the database answered");
        }
        let rest = LOOK_AT_LEAST.max(began.elapsed().saturating_mul(4));
        watch.pause(rest.min(LOOK_AT_MOST), LOOK_AT_MOST, deadline)?;
    }
}

/// How an analysis stands. One that nobody has any more will never end.
fn look(ledger: &mut Recorder, id: &str) -> Result<Last, CommitError> {
    let (mut attempts, now_ms) = ledger.with(|store| Ok((store.attempts(id)?, store.now_ms()?)))?;
    // Superseded ones came too late, and have numbers of their own.
    let counts = attempts.iter().rposition(|attempt| !attempt.superseded);
    let counts = counts.or(attempts.len().checked_sub(1));
    let Some(at) = counts else {
        let given = id.to_owned();
        return Err(ledger.database_error(StoreError::NotFound { given }));
    };
    let listed = attempts.swap_remove(at);
    let step_ms = ledger.post_process.as_ref().map(|step| step.timeout_ms);
    let step_ms = i64::try_from(step_ms.unwrap_or(STEP_MS)).unwrap_or(i64::MAX);
    let since_ms = now_ms.saturating_sub(listed.committed_ms.unwrap_or(now_ms));
    let step_runs = listed.post_process == PostProcessState::Pending && since_ms < step_ms;
    Ok(Last {
        // A newer Fumehood may have ended it in a state of its own.
        ended: (listed.state.is_final() || listed.committed_ms.is_some()) && !step_runs,
        listed,
    })
}

/// Looking again when there may be news, and from time to time.
pub struct Watch {
    bell: Option<ChangeListener>,
    away_since: Option<Instant>,
}

impl Watch {
    /// Without a bell it is only slower.
    pub fn over(ledger: &Recorder) -> Watch {
        Watch {
            bell: ChangeListener::subscribe(&ledger.location).ok(),
            away_since: None,
        }
    }

    /// Asks the database, again and again while it is away. `None`: the time is over.
    pub fn ask<T>(
        &mut self,
        ledger: &mut Recorder,
        mut question: impl FnMut(&mut Recorder) -> Result<T, CommitError>,
        deadline: Option<Instant>,
    ) -> anyhow::Result<Option<T>> {
        loop {
            let error = match question(ledger) {
                Ok(answer) => {
                    if self.away_since.take().is_some() {
                        show::line("the database is back");
                        self.bell = ChangeListener::subscribe(&ledger.location).ok();
                    }
                    return Ok(Some(answer));
                }
                Err(error) => error,
            };
            ledger.disconnect();
            let since = match (is_away(&error), self.away_since) {
                (false, _) => return Err(ids::plainly(error)),
                (true, Some(since)) => since,
                (true, None) => {
                    let told = anyhow::Error::from(error);
                    show::line(&format!("{told:#}; waiting for it"));
                    *self.away_since.insert(Instant::now())
                }
            };
            anyhow::ensure!(
                since.elapsed() < AWAY_MAX,
                "the database has been away for {} s; what runs goes on",
                AWAY_MAX.as_secs()
            );
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(None);
            }
            self.bell = None;
            self.pause(LOOK_AT_LEAST, LOOK_AT_MOST, deadline)?;
        }
    }

    /// At least for `rest`; then until there may be news, for `most`, or until the deadline.
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
        // What rings meanwhile is heard afterwards.
        std::thread::sleep(left(rest));
        let most = left(most);
        let Some(bell) = &mut self.bell else {
            std::thread::sleep(most);
            return Ok(());
        };
        let timeout = Timespec {
            tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: most.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(bell, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => bell.consume(),
            Err(e) => return Err(e).context("wait for news"),
        }
        Ok(())
    }
}

fn is_away(error: &CommitError) -> bool {
    matches!(error, CommitError::Database { source, .. } if source.is_database_fault())
}

/// Attempts whose runner died here, and that nobody finishes while we wait.
#[derive(Default)]
struct LostRunners {
    told: Vec<String>,
}

impl LostRunners {
    fn tell_of(&mut self, home: &Home, listed: &AttemptSummary) {
        if listed.host != engine::home::machine_id() || self.told.contains(&listed.id) {
            return;
        }
        let Ok(id) = AnalysisId::new(&listed.id) else {
            return;
        };
        let mut here = standing::of_id(home, &id).into_iter();
        let finish = |standing: &standing::Standing| {
            standing.record.attempt == listed.attempt && standing.next() == Next::Finish
        };
        if let Some(standing) = here.find(finish) {
            show::line(&standing.advice());
            self.told.push(listed.id.clone());
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
        assert_eq!(shortened(&ids[..2]), "a0, a1");
        assert!(shortened(&ids).ends_with("a7, … and 12 more"));
    }
}
