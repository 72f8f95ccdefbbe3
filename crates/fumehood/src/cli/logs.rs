//! `fumehood logs`: what an attempt printed; while it runs, as it prints it.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use engine::attempt::log_capture::CapturedLog;
use engine::attempt::recorder::Recorder;
use engine::attempt::terminal_filter::TerminalFilter;
use engine::home::Home;
use engine::request::AnalysisId;
use engine::run_dir::StateFile;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use serde::Serialize;
use store::{STREAMS, State, StoredLog};

use super::args::StoreArgs;
use super::print::{self, Out, clean};
use super::standing::{self, Next, Process, Standing};
use super::wait::Watch;
use super::{ids, ledger, show};

/// Print what an attempt printed.
///
/// The whole of what was kept is printed where its artifact store is on this machine, else the beginning and the end from
/// the database, with a line that says what is missing between them. On a terminal colours,
/// erasing in the line, carriage return and backspace pass; every other control sequence is spelled out.
#[derive(Clone, Debug, clap::Args)]
pub struct LogsArgs {
    #[arg(value_name = "ID[@ATTEMPT]", help = ids::HELP)]
    pub id: OsString,

    /// Its standard output [default]
    #[arg(long)]
    pub stdout: bool,

    /// Its standard error. With --stdout, too, both are printed, each to our own stream of that name
    #[arg(long)]
    pub stderr: bool,

    /// While it runs in this FUMEHOOD_HOME, go on until the attempt has ended; while it is queued, wait for it to start
    #[arg(long, short)]
    pub follow: bool,

    /// Leave control sequences as they are on a terminal, too: only for programs that you trust
    #[arg(long)]
    pub raw: bool,

    /// Print one JSON document (fumehood.logs/1) with what the database has of both, or of the one named
    #[arg(long, conflicts_with_all = ["follow", "raw"])]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    id: &'a str,
    attempt: u32,
    logs: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    stream: String,
    /// Bytes that are not UTF-8 are `\xNN`, a backslash is `\\`. A gap is marked `\[fumehood: …]`.
    text: String,
    bytes: u64,
    /// Kept nowhere.
    dropped_bytes: u64,
    /// All that was kept, where that is more than this.
    blake3: Option<String>,
}

pub fn logs(args: &LogsArgs) -> anyhow::Result<u8> {
    let (home, mut ledger) = ledger::open(&args.store)?;
    let streams = streams(args);
    // What has no row (yet) may still be in this home.
    let mut here = running_here(&home, &mut ledger, args)?;
    if args.follow && here.is_none() {
        here = until_it_runs(&home, &mut ledger, args)?;
    }
    if let (true, Some(standing)) = (args.follow, here) {
        follow(&home, &mut ledger, standing, &streams, args.raw)?;
        return Ok(0);
    }
    let listed = ids::attempt(&mut ledger, &args.id, None)?.summary;
    let key = (listed.id.as_str(), listed.attempt);
    if args.json {
        let mut entries = Vec::new();
        for stream in &streams {
            entries.extend(ledger.with(|s| s.log(key.0, key.1, stream))?.map(entry));
        }
        print::json(&Document {
            schema: "fumehood.logs/1",
            id: key.0,
            attempt: key.1,
            logs: entries,
        })?;
        return Ok(0);
    }
    let mut here = standing::all(&home).into_iter();
    let standing = here.find(|s| s.record.id.as_str() == key.0);
    for stream in streams {
        let mut sink = Sink::new(stream, streams_differ(args), args.raw);
        match (ledger.with(|s| s.log(key.0, key.1, stream))?, &standing) {
            (Some(log), _) => print_stored(&mut ledger, &log, 0, &mut sink)?,
            (None, Some(standing)) => print_files(&standing.path, stream, 0, &mut sink)?,
            (None, None) if listed.state.is_final() => {}
            (None, None) if listed.state == State::Queued => anyhow::bail!(
                "{} is queued, and has printed nothing yet; -f waits for it to start",
                clean(&listed.id)
            ),
            (None, None) => anyhow::bail!(
                "{} is {} on {}; its logs are there until it has ended",
                clean(&listed.id),
                listed.state,
                clean(&listed.host)
            ),
        }
        sink.finish()?;
    }
    Ok(0)
}

/// Between two looks for an attempt that is about to start, and for one that waits.
const MOMENT: Duration = Duration::from_millis(50);
const QUEUED_MOMENT: Duration = Duration::from_millis(450);

fn streams(args: &LogsArgs) -> Vec<&'static str> {
    match (args.stdout, args.stderr) {
        (true, true) => STREAMS.to_vec(),
        (false, false) if args.json => STREAMS.to_vec(),
        (false, true) => vec!["stderr"],
        _ => vec!["stdout"],
    }
}

/// Whether each goes to our own stream of its name; a single one goes to stdout, where it can be piped.
fn streams_differ(args: &LogsArgs) -> bool {
    args.stdout && args.stderr
}

fn entry(log: StoredLog) -> Entry {
    let captured = captured(&log);
    Entry {
        text: captured.text(&log.stream),
        bytes: log.total_bytes,
        dropped_bytes: log.dropped_bytes,
        blake3: log.object.map(|hash| hash.to_string()),
        stream: log.stream,
    }
}

/// The excerpts, with everything that is not in them as the gap.
fn captured(log: &StoredLog) -> CapturedLog {
    let shown = (log.head.len() + log.tail.len()) as u64;
    let dropped_bytes = log.total_bytes.saturating_sub(shown);
    CapturedLog {
        head: log.head.clone(),
        tail: log.tail.clone(),
        dropped_bytes,
        total_bytes: log.total_bytes,
        truncated: dropped_bytes > 0,
    }
}

/// Where a log goes: as it is, or made safe for a terminal.
struct Sink {
    to: Box<dyn Write>,
    filter: Option<TerminalFilter>,
    /// What the filter lets pass.
    shown: Vec<u8>,
}

impl Sink {
    fn new(stream: &str, differ: bool, raw: bool) -> Sink {
        let to_stderr = differ && stream == "stderr";
        let terminal = match to_stderr {
            true => io::stderr().is_terminal(),
            false => io::stdout().is_terminal(),
        };
        Sink {
            to: match to_stderr {
                true => Box::new(io::stderr()),
                false => Box::new(Out::new()),
            },
            filter: (terminal && !raw).then(TerminalFilter::default),
            shown: Vec::new(),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        match &mut self.filter {
            None => self.to.write_all(bytes).context(PRINT),
            Some(filter) => {
                filter.push(bytes, &mut self.shown);
                self.write_shown()
            }
        }
    }

    /// A line of our own, which no colour of the program's changes.
    fn say(&mut self, line: &str) -> anyhow::Result<()> {
        if let Some(filter) = &mut self.filter {
            filter.interrupt(&mut self.shown);
        }
        self.write_shown()?;
        self.to.write_all(line.as_bytes()).context(PRINT)
    }

    fn write_shown(&mut self) -> anyhow::Result<()> {
        let written = self.to.write_all(&self.shown).context(PRINT);
        self.shown.clear();
        written
    }

    fn flush(&mut self) -> anyhow::Result<()> {
        self.to.flush().context(PRINT)
    }

    fn finish(mut self) -> anyhow::Result<()> {
        self.say("")?;
        self.flush()
    }
}

const PRINT: &str = "print the log";

/// A committed log from some byte on: whole if its object is here.
fn print_stored(
    ledger: &mut Recorder,
    log: &StoredLog,
    seen: u64,
    sink: &mut Sink,
) -> anyhow::Result<()> {
    let object = log.object.and_then(|hash| {
        let artifacts = ledger.artifacts().ok()?;
        let here = Some(artifacts.id()) == log.artifact_store.as_deref();
        here.then(|| artifacts.open_object(&hash).ok()).flatten()
    });
    match object {
        Some(file) => print_object(log, file, seen, sink),
        None => print_parts(&captured(log), &log.stream, seen, sink),
    }
}

fn print_object(log: &StoredLog, mut file: File, seen: u64, sink: &mut Sink) -> anyhow::Result<()> {
    let head_bytes = log.object_head_bytes.unwrap_or(u64::MAX);
    let from = seen.min(head_bytes);
    file.seek(SeekFrom::Start(from)).context("read the log")?;
    copy(&mut (&file).take(head_bytes - from), sink)?;
    let gap = CapturedLog {
        dropped_bytes: log.dropped_bytes,
        truncated: log.dropped_bytes > 0,
        ..CapturedLog::default()
    };
    note(&gap, &log.stream, sink)?;
    copy(&mut file, sink)
}

fn print_parts(log: &CapturedLog, stream: &str, seen: u64, sink: &mut Sink) -> anyhow::Result<()> {
    let seen = usize::try_from(seen)
        .unwrap_or(usize::MAX)
        .min(log.head.len());
    sink.write(&log.head[seen..])?;
    note(log, stream, sink)?;
    sink.write(&log.tail)
}

/// A line of our own where something is missing.
fn note(log: &CapturedLog, stream: &str, sink: &mut Sink) -> anyhow::Result<()> {
    match log.note(stream) {
        Some(note) => sink.say(&format!("\n{note}\n")),
        None => Ok(()),
    }
}

fn copy(from: &mut dyn Read, sink: &mut Sink) -> anyhow::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer).context("read the log")? {
            0 => return Ok(()),
            n => sink.write(&buffer[..n])?,
        }
    }
}

/// What is in a run directory: all of it, or what has arrived.
fn print_files(dir: &Path, stream: &str, seen: u64, sink: &mut Sink) -> anyhow::Result<()> {
    if let Some(mut file) = open(dir, stream) {
        file.seek(SeekFrom::Start(seen)).context("read the log")?;
        copy(&mut file, sink)?;
    }
    if let Some(mut tail) = open(dir, &format!("{stream}.tail")) {
        sink.say(&format!(
            "\n[fumehood: what followed of {stream} was too long; its end:]\n"
        ))?;
        copy(&mut tail, sink)?;
    }
    Ok(())
}

fn open(dir: &Path, name: &str) -> Option<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(dir.join(name), flags, Mode::empty()).ok()?;
    Some(file.into())
}

/// The attempt of this home that is meant, if it is one that runs.
fn running_here(
    home: &Home,
    ledger: &mut Recorder,
    args: &LogsArgs,
) -> anyhow::Result<Option<Standing>> {
    let (given, number) = ids::split(&args.id)?;
    let runs = |standing: &Standing| matches!(standing.next(), Next::Runs);
    let named = |standing: &Standing, id: &str| {
        standing.record.id.as_str() == id && number.is_none_or(|n| n == standing.record.attempt)
    };
    let mut here: Vec<Standing> = standing::all(home).into_iter().filter(runs).collect();
    if here.is_empty() {
        return Ok(None);
    }
    let id = match here.iter().any(|s| named(s, &given)) {
        true => given,
        false => match ledger.with(|store| store.resolve(&given)) {
            Ok(id) => id,
            Err(_) => return Ok(None),
        },
    };
    here.retain(|standing| named(standing, &id));
    Ok(here.pop())
}

/// Waits for an attempt that is queued, or was just taken, to run in this home. `None`: there is nothing to wait for, or it
/// has ended, or runs elsewhere; then the caller tells what there is.
fn until_it_runs(
    home: &Home,
    ledger: &mut Recorder,
    args: &LogsArgs,
) -> anyhow::Result<Option<Standing>> {
    let mut now = ids::attempt(ledger, &args.id, None)?;
    let (id, attempt) = (now.summary.id.clone(), now.summary.attempt);
    if now.summary.state == State::Queued {
        let id = clean(&id);
        show::line(&format!("{id} is queued; waiting for it to start"));
    }
    let id = AnalysisId::new(&id).context("read an id from the database")?;
    let mut watch = Watch::over(ledger);
    loop {
        // A runner makes its directory before it notes its workspace, so it is looked for after that.
        let runs = |standing: &Standing| {
            standing.record.attempt == attempt && standing.next() == Next::Runs
        };
        let mut here = standing::of_id(home, &id).into_iter();
        if let Some(standing) = here.find(runs) {
            return Ok(Some(standing));
        }
        let taken = now.summary.host == engine::home::machine_id() && now.workspace.is_none();
        // Nothing rings when it is taken, nor when its directory is made.
        let most = match now.summary.state {
            State::Queued => QUEUED_MOMENT,
            State::Running if taken => Duration::ZERO,
            _ => return Ok(None),
        };
        watch.pause(MOMENT, most, None)?;
        let asked = watch.ask(
            ledger,
            |ledger| ledger.with(|store| store.show(id.as_str(), Some(attempt))),
            None,
        )?;
        match asked {
            Some(asked) => now = asked,
            None => return Ok(None),
        }
    }
}

/// Prints what arrives until the runner has ended or let go of the directory, then the rest from wherever it is now.
fn follow(
    home: &Home,
    ledger: &mut Recorder,
    standing: Standing,
    streams: &[&'static str],
    raw: bool,
) -> anyhow::Result<()> {
    let differ = streams.len() > 1;
    let mut followed: Vec<Followed> = streams
        .iter()
        .map(|stream| Followed {
            stream,
            file: None,
            seen: 0,
            sink: Sink::new(stream, differ, raw),
        })
        .collect();
    // A connection is not held while a program runs for hours.
    ledger.disconnect();
    let runner = Runner::of(&standing);
    loop {
        let gone = !runner.is_at_it(&standing.path);
        for one in &mut followed {
            one.take_up(&standing.path)?;
        }
        if gone {
            break;
        }
        runner.wait()?;
    }
    finish(home, ledger, &standing, followed)
}

struct Followed {
    stream: &'static str,
    /// Held open, so that what was written is read even if the directory goes.
    file: Option<File>,
    seen: u64,
    sink: Sink,
}

impl Followed {
    fn take_up(&mut self, dir: &Path) -> anyhow::Result<()> {
        if self.file.is_none() {
            self.file = open(dir, self.stream);
        }
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        // Written anew at the end, from the beginning; so what was seen is still where it was.
        file.seek(SeekFrom::Start(self.seen))
            .context("read the log")?;
        let mut buffer = vec![0; 64 << 10];
        loop {
            match file.read(&mut buffer).context("read the log")? {
                0 => break,
                n => {
                    self.sink.write(&buffer[..n])?;
                    self.seen += n as u64;
                }
            }
        }
        self.sink.flush()
    }
}

/// The process whose program prints.
struct Runner {
    process: Option<Process>,
}

impl Runner {
    fn of(standing: &Standing) -> Runner {
        Runner {
            process: Process::of(&standing.record),
        }
    }

    /// Whether it lives and the directory is still where it was: it is removed, or moved, at the very end.
    fn is_at_it(&self, dir: &Path) -> bool {
        let alive = self.process.as_ref().is_some_and(|p| !p.has_ended());
        alive && standing::read(dir).is_some_and(|record| !is_over(&record.state))
    }

    /// Until it has ended, or nobody reads us any more, or a moment has passed and we look again.
    fn wait(&self) -> anyhow::Result<()> {
        let moment = Timespec {
            tv_sec: 0,
            tv_nsec: 100_000_000,
        };
        let stdout = io::stdout();
        // Asked for nothing, poll still tells of a pipe whose other end is closed.
        let mut fds = vec![PollFd::from_borrowed_fd(stdout.as_fd(), PollFlags::empty())];
        fds.extend(self.process.as_ref().map(|p| PollFd::new(p, PollFlags::IN)));
        match poll(&mut fds, Some(&moment)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e).context("wait for the log"),
        }
        match fds[0].revents().contains(PollFlags::ERR) {
            true => Err(io::Error::new(io::ErrorKind::BrokenPipe, print::ReaderGone).into()),
            false => Ok(()),
        }
    }
}

/// The workspace is left standing, and the runner is done with it.
fn is_over(state: &engine::run_dir::RunState) -> bool {
    use engine::run_dir::RunState::{Kept, Live, Open, Quarantined, Ran, Recorded};
    match state {
        Kept { .. } | Quarantined | Ran | Recorded => true,
        Live | Open { .. } => false,
    }
}

/// What was held back until the end, from the database, or from where it awaits that.
fn finish(
    home: &Home,
    ledger: &mut Recorder,
    standing: &Standing,
    followed: Vec<Followed>,
) -> anyhow::Result<()> {
    let record = &standing.record;
    let key = record.commit_plan.as_ref().map(|task| task.key.clone());
    let attempt = match key {
        // Its number may be another than it was told at first.
        Some(key) => ledger
            .with(|store| store.attempt_with_key(&key))
            .unwrap_or(None),
        None => None,
    };
    let left = || -> Option<PathBuf> {
        let mut here = standing::of_id(home, &record.id).into_iter();
        let found = here.find(|s| s.record.attempt == record.attempt)?;
        found
            .path
            .join(StateFile::Outcome.name())
            .exists()
            .then_some(found.path)
    };
    let mut ended = true;
    for mut one in followed {
        let stored = match attempt {
            Some(attempt) => ledger.with(|s| s.log(record.id.as_str(), attempt, one.stream))?,
            None => None,
        };
        match (stored, left()) {
            (Some(log), _) => print_stored(ledger, &log, one.seen, &mut one.sink)?,
            (None, Some(dir)) => print_files(&dir, one.stream, one.seen, &mut one.sink)?,
            (None, None) => ended = false,
        }
        one.sink.finish()?;
    }
    if !ended {
        show::line(&match &record.commit_plan {
            Some(_) => format!(
                "the runner of {} is gone; `fumehood gc` finishes it",
                record.id
            ),
            None => format!(
                "{} ran without a record; what it printed last may be missing",
                record.id
            ),
        });
    }
    Ok(())
}
