//! `fumehood top`: shows the queue, live on a terminal.

mod frame;
mod screen;
mod usage;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::Context;
use engine::attempt::recorder::Recorder;
use engine::home::Home;
use serde::Serialize;
use store::types::units::{format_duration, parse_duration_ms};
use store::{
    ActiveAttempt, AttemptFilter, AttemptSelection, AttemptSummary, ChangeListener, QueueOverview,
    State, WaitingAttempt, WorkerRow,
};

use super::args::StoreArgs;
use super::print::{self, StyledLine};
use super::record_access;
use screen::{Screen, ScreenEvent};
use usage::UsageMeter;

/// Show running and queued analyses, workers, and what ended last: live on a terminal, otherwise once.
///
/// Memory and CPU use are shown for analyses that run in this FUMEHOOD_HOME. `q` quits.
#[derive(Clone, Debug, clap::Args)]
pub struct TopArgs {
    /// Print it once, as text
    #[arg(long)]
    pub once: bool,

    /// How often to refresh, besides when something changes
    #[arg(long, value_name = "TIME", default_value = "2s")]
    pub interval: OsString,

    /// Print one JSON document (fumehood.top/1), once
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

const INTERVAL_MIN_MS: u64 = 200;
/// Changes that follow each other closely cause one refresh.
const NEWS_AT_LEAST: Duration = Duration::from_millis(300);
/// The number of rows to fetch. No screen is longer; the rest is counted.
const ROWS_MAX: u32 = 200;
/// The number of ended attempts to fetch. The database lists them by when they began; the last to end are among these.
const ENDED_MAX: u32 = 100;

/// Everything that is shown, at one moment.
pub struct Snapshot {
    pub overview: QueueOverview,
    /// The last to end first.
    pub ended: Vec<AttemptSummary>,
    pub meter: UsageMeter,
}

pub fn top(args: &TopArgs) -> anyhow::Result<u8> {
    let ms = parse_duration_ms(&args.interval.to_string_lossy()).context("read --interval")?;
    anyhow::ensure!(
        ms >= INTERVAL_MIN_MS,
        "--interval must be at least {}",
        format_duration(INTERVAL_MIN_MS)
    );
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    let live = std::io::stdout().is_terminal() && !is_dumb && !args.once && !args.json;
    if live {
        return watch(args, Duration::from_millis(ms));
    }
    let (home, mut recorder) = record_access::open(&args.store)?;
    let now = gather(&home, &mut recorder, UsageMeter::default())?;
    if args.json {
        print::json(&document(&now))?;
        return Ok(0);
    }
    let page = frame::page(&now, None, None);
    print::lines(page.iter().map(StyledLine::text))?;
    Ok(0)
}

fn gather(home: &Home, recorder: &mut Recorder, mut meter: UsageMeter) -> anyhow::Result<Snapshot> {
    const FINAL: [State; 7] = [
        State::Succeeded,
        State::Failed,
        State::TimedOut,
        State::OutOfMemory,
        State::LimitExceeded,
        State::Cancelled,
        State::Error,
    ];
    let filter = AttemptFilter {
        states: &FINAL,
        since_ms: None,
        which: AttemptSelection::All,
        limit: ENDED_MAX,
    };
    let overview = recorder.with(|store| store.overview(ROWS_MAX))?;
    let mut ended = recorder.with(|store| store.list(&filter))?;
    ended.sort_by_key(|summary| std::cmp::Reverse(summary.committed_ms));
    meter.read(home);
    Ok(Snapshot {
        overview,
        ended,
        meter,
    })
}

/// Shows the queue until the user quits.
fn watch(args: &TopArgs, interval: Duration) -> anyhow::Result<u8> {
    // Block signals before any thread exists, so that no thread receives them instead of this one.
    let mut screen = Screen::open()?;
    let (home, mut recorder) = record_access::open(&args.store)?;
    let mut listener = ChangeListener::subscribe(&recorder.location).ok();
    let mut now = gather(&home, &mut recorder, UsageMeter::default())?;
    let mut trouble = None;
    screen.enter()?;
    loop {
        let looked = Instant::now();
        let mut next = looked + interval;
        loop {
            let lines = frame::page(&now, Some(screen.size()), trouble.as_deref());
            screen.draw(&lines)?;
            match screen.wait_for_event(listener.as_ref(), next)? {
                ScreenEvent::Timeout => break,
                ScreenEvent::Redraw => {}
                ScreenEvent::Quit => return Ok(0),
                ScreenEvent::Signal(n) => return Ok(128 + n),
                ScreenEvent::Changed => {
                    next = next.min(looked + NEWS_AT_LEAST);
                    // Wait for keys and signals only; the next change counts after the refresh.
                    match screen.wait_for_event(None, next)? {
                        ScreenEvent::Quit => return Ok(0),
                        ScreenEvent::Signal(n) => return Ok(128 + n),
                        ScreenEvent::Redraw => {}
                        ScreenEvent::Timeout | ScreenEvent::Changed => break,
                    }
                }
            }
        }
        if let Some(listener) = &mut listener {
            listener.consume();
        }
        match gather(&home, &mut recorder, now.meter.clone()) {
            Ok(new) => {
                now = new;
                if trouble.take().is_some() {
                    listener = ChangeListener::subscribe(&recorder.location).ok();
                }
            }
            Err(e) => {
                recorder.disconnect();
                listener = None;
                trouble = Some(format!("{e:#}"));
            }
        }
    }
}

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    now_ms: i64,
    queued: u64,
    delayed: u64,
    running: u64,
    workers: &'a [WorkerRow],
    /// The running analyses, and the next ones in the queue, up to a bound.
    busy: Vec<BusyEntry<'a>>,
    next: &'a [WaitingAttempt],
    ended: &'a [AttemptSummary],
}

#[derive(Serialize)]
struct BusyEntry<'a> {
    #[serde(flatten)]
    attempt: &'a ActiveAttempt,
    memory_bytes: Option<u64>,
    cpu_ms: Option<u64>,
}

fn document(now: &Snapshot) -> Document<'_> {
    let overview = &now.overview;
    let busy = overview.busy.iter().map(|attempt| {
        let used = now.meter.of(attempt);
        BusyEntry {
            attempt,
            memory_bytes: used.memory_bytes,
            cpu_ms: used.cpu_us.map(|us| us / 1_000),
        }
    });
    Document {
        schema: "fumehood.top/1",
        now_ms: overview.now_ms,
        queued: overview.queued,
        delayed: overview.delayed,
        running: overview.running,
        workers: &overview.workers,
        busy: busy.collect(),
        next: &overview.next,
        ended: &now.ended,
    }
}
