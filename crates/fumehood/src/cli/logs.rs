//! `fumehood logs`: prints what an attempt printed; while it runs, as it prints it.

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
use sandbox::events::{self, PollFlags};
use serde::Serialize;
use store::{STREAMS, State, StoredLog};

use super::args::StoreArgs;
use super::print::{self, StdoutWriter, escape};
use super::run_dirs::{self, NextAction, RunDirInfo, RunnerProcess};
use super::wait::RecordWatch;
use super::{ids, messages, record_access};

/// Print what an attempt printed.
///
/// Prints everything that was kept if the artifact store is on this machine; else the beginning and the end from the
/// database, with a line that says what is missing between them. On a terminal colours, erasing in the line, carriage
/// return and backspace pass; every other control sequence is escaped.
#[derive(Clone, Debug, clap::Args)]
pub struct LogsArgs {
    #[arg(value_name = "ID[@ATTEMPT]", help = ids::HELP)]
    pub id: OsString,

    /// Its standard output [default]
    #[arg(long)]
    pub stdout: bool,

    /// Its standard error. With --stdout as well, each is printed to our own stream of that name
    #[arg(long)]
    pub stderr: bool,

    /// If it runs in this FUMEHOOD_HOME, go on until the attempt has ended; if it is queued, wait for it to start
    #[arg(long, short)]
    pub follow: bool,

    /// Do not escape control sequences on a terminal: only for programs that you trust
    #[arg(long)]
    pub raw: bool,

    /// Print one JSON document (fumehood.logs/1) with what the database has of both streams, or of the one named
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
    logs: Vec<LogEntry>,
}

#[derive(Serialize)]
struct LogEntry {
    stream: String,
    /// Bytes that are not UTF-8 are `\xNN`, a backslash is `\\`. A gap is marked `\[fumehood: …]`.
    text: String,
    bytes: u64,
    /// Bytes that were not kept anywhere.
    dropped_bytes: u64,
    /// The object with everything that was kept, if that is more than this text.
    blake3: Option<String>,
}

pub fn logs(args: &LogsArgs) -> anyhow::Result<u8> {
    let (home, mut recorder) = record_access::open(&args.store)?;
    let streams = streams(args);
    // An attempt without a row (yet) may still be in this home.
    let mut here = running_here(&home, &mut recorder, args)?;
    if args.follow && here.is_none() {
        here = wait_until_it_runs(&home, &mut recorder, args)?;
    }
    if let (true, Some(run_dir)) = (args.follow, here) {
        follow(&home, &mut recorder, run_dir, &streams, args.raw)?;
        return Ok(0);
    }
    let summary = ids::resolve_attempt(&mut recorder, &args.id, None)?.summary;
    let key = (summary.id.as_str(), summary.attempt);
    if args.json {
        let mut entries = Vec::new();
        for stream in &streams {
            entries.extend(
                recorder
                    .with(|s| s.log(key.0, key.1, stream))?
                    .map(json_entry),
            );
        }
        print::json(&Document {
            schema: "fumehood.logs/1",
            id: key.0,
            attempt: key.1,
            logs: entries,
        })?;
        return Ok(0);
    }
    let mut here = run_dirs::list_all(&home).into_iter();
    let run_dir = here.find(|s| s.record.id.as_str() == key.0);
    for stream in streams {
        let mut sink = LogSink::new(stream, separate_streams(args), args.raw);
        match (recorder.with(|s| s.log(key.0, key.1, stream))?, &run_dir) {
            (Some(log), _) => print_stored(&mut recorder, &log, 0, &mut sink)?,
            (None, Some(run_dir)) => print_files(&run_dir.path, stream, 0, &mut sink)?,
            (None, None) if summary.state.is_final() => {}
            (None, None) if summary.state == State::Queued => anyhow::bail!(
                "{} is queued, and has printed nothing yet; -f waits for it to start",
                escape(&summary.id)
            ),
            (None, None) => anyhow::bail!(
                "{} is {} on {}; its logs are there until it has ended",
                escape(&summary.id),
                summary.state,
                escape(&summary.host)
            ),
        }
        sink.finish()?;
    }
    Ok(0)
}

/// How often to look for an attempt that is about to start, and how much longer to wait for one in the queue.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
const LOOK_AGAIN_QUEUED: Duration = Duration::from_millis(450);

fn streams(args: &LogsArgs) -> Vec<&'static str> {
    match (args.stdout, args.stderr) {
        (true, true) => STREAMS.to_vec(),
        (false, false) if args.json => STREAMS.to_vec(),
        (false, true) => vec!["stderr"],
        _ => vec!["stdout"],
    }
}

/// Whether each stream goes to this process's stream of that name. A single one goes to stdout, so that it can be
/// piped.
fn separate_streams(args: &LogsArgs) -> bool {
    args.stdout && args.stderr
}

fn json_entry(log: StoredLog) -> LogEntry {
    let captured = captured(&log);
    LogEntry {
        text: captured.text(&log.stream),
        bytes: log.total_bytes,
        dropped_bytes: log.dropped_bytes,
        blake3: log.object.map(|hash| hash.to_string()),
        stream: log.stream,
    }
}

/// Returns the excerpts, and counts everything that is not in them as the gap.
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

/// Where a log goes: unchanged, or escaped for a terminal.
struct LogSink {
    to: Box<dyn Write>,
    filter: Option<TerminalFilter>,
    /// What the filter has let pass.
    shown: Vec<u8>,
}

impl LogSink {
    fn new(stream: &str, separate: bool, raw: bool) -> LogSink {
        let to_stderr = separate && stream == "stderr";
        let terminal = match to_stderr {
            true => io::stderr().is_terminal(),
            false => io::stdout().is_terminal(),
        };
        LogSink {
            to: match to_stderr {
                true => Box::new(io::stderr()),
                false => Box::new(StdoutWriter::new()),
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

    /// Writes a line of Fumehood, unaffected by colours of the program.
    fn write_message(&mut self, line: &str) -> anyhow::Result<()> {
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
        self.write_message("")?;
        self.flush()
    }
}

const PRINT: &str = "print the log";

/// Prints a committed log from byte `seen` on: the whole log if its object is on this machine.
fn print_stored(
    recorder: &mut Recorder,
    log: &StoredLog,
    seen: u64,
    sink: &mut LogSink,
) -> anyhow::Result<()> {
    let object = log.object.and_then(|hash| {
        let artifacts = recorder.artifacts().ok()?;
        let here = Some(artifacts.id()) == log.artifact_store.as_deref();
        here.then(|| artifacts.open_object(&hash).ok()).flatten()
    });
    match object {
        Some(file) => print_object(log, file, seen, sink),
        None => print_parts(&captured(log), &log.stream, seen, sink),
    }
}

fn print_object(
    log: &StoredLog,
    mut file: File,
    seen: u64,
    sink: &mut LogSink,
) -> anyhow::Result<()> {
    let head_bytes = log.object_head_bytes.unwrap_or(u64::MAX);
    let from = seen.min(head_bytes);
    file.seek(SeekFrom::Start(from)).context("read the log")?;
    copy(&mut (&file).take(head_bytes - from), sink)?;
    let gap = CapturedLog {
        dropped_bytes: log.dropped_bytes,
        truncated: log.dropped_bytes > 0,
        ..CapturedLog::default()
    };
    write_gap_note(&gap, &log.stream, sink)?;
    copy(&mut file, sink)?;
    Ok(())
}

fn print_parts(
    log: &CapturedLog,
    stream: &str,
    seen: u64,
    sink: &mut LogSink,
) -> anyhow::Result<()> {
    let seen = usize::try_from(seen)
        .unwrap_or(usize::MAX)
        .min(log.head.len());
    sink.write(&log.head[seen..])?;
    write_gap_note(log, stream, sink)?;
    sink.write(&log.tail)
}

/// Writes a line that says what is missing.
fn write_gap_note(log: &CapturedLog, stream: &str, sink: &mut LogSink) -> anyhow::Result<()> {
    match log.note(stream) {
        Some(note) => sink.write_message(&format!("\n{note}\n")),
        None => Ok(()),
    }
}

/// Returns how many bytes were copied.
fn copy(from: &mut dyn Read, sink: &mut LogSink) -> anyhow::Result<u64> {
    let mut buffer = vec![0; 64 << 10];
    let mut copied = 0;
    loop {
        match from.read(&mut buffer).context("read the log")? {
            0 => return Ok(copied),
            n => {
                sink.write(&buffer[..n])?;
                copied += n as u64;
            }
        }
    }
}

/// Prints the log files of a run directory: the whole log, or what has arrived so far.
fn print_files(dir: &Path, stream: &str, seen: u64, sink: &mut LogSink) -> anyhow::Result<()> {
    if let Some(mut file) = open(dir, stream) {
        file.seek(SeekFrom::Start(seen)).context("read the log")?;
        copy(&mut file, sink)?;
    }
    if let Some(mut tail) = open(dir, &format!("{stream}.tail")) {
        sink.write_message(&format!(
            "\n[fumehood: what followed of {stream} was too long; its end:]\n"
        ))?;
        copy(&mut tail, sink)?;
    }
    Ok(())
}

fn open(dir: &Path, name: &str) -> Option<File> {
    run_dirs::open_file(&dir.join(name)).ok()
}

/// Returns the attempt of this home that the arguments name, if it is running.
fn running_here(
    home: &Home,
    recorder: &mut Recorder,
    args: &LogsArgs,
) -> anyhow::Result<Option<RunDirInfo>> {
    let (given, number) = ids::split(&args.id)?;
    let runs = |run_dir: &RunDirInfo| matches!(run_dir.next_action(), NextAction::AwaitRunner);
    let named = |run_dir: &RunDirInfo, id: &str| {
        run_dir.record.id.as_str() == id && number.is_none_or(|n| n == run_dir.record.attempt)
    };
    let mut here: Vec<RunDirInfo> = run_dirs::list_all(home).into_iter().filter(runs).collect();
    if here.is_empty() {
        return Ok(None);
    }
    let id = match here.iter().any(|s| named(s, &given)) {
        true => given,
        false => match recorder.with(|store| store.resolve(&given)) {
            Ok(id) => id,
            Err(_) => return Ok(None),
        },
    };
    here.retain(|run_dir| named(run_dir, &id));
    Ok(here.pop())
}

/// Waits until an attempt that is queued, or was just claimed, runs in this home. Returns `None` if there is nothing to
/// wait for, it has ended, or it runs elsewhere; the caller then prints what there is.
fn wait_until_it_runs(
    home: &Home,
    recorder: &mut Recorder,
    args: &LogsArgs,
) -> anyhow::Result<Option<RunDirInfo>> {
    let mut now = ids::resolve_attempt(recorder, &args.id, None)?;
    let (id, attempt) = (now.summary.id.clone(), now.summary.attempt);
    if now.summary.state == State::Queued {
        let id = escape(&id);
        messages::line(&format!("{id} is queued; waiting for it to start"));
    }
    let id = AnalysisId::new(&id).context("read an id from the database")?;
    let mut watch = RecordWatch::new(recorder);
    loop {
        // A runner makes its directory before it records its workspace, so look for the directory after reading the
        // row.
        let runs = |run_dir: &RunDirInfo| {
            run_dir.record.attempt == attempt && run_dir.next_action() == NextAction::AwaitRunner
        };
        let mut here = run_dirs::list_analysis(home, &id).into_iter();
        if let Some(run_dir) = here.find(runs) {
            return Ok(Some(run_dir));
        }
        let taken = now.summary.host == engine::home::machine_id() && now.workspace.is_none();
        // No notification is sent when an attempt is claimed or its directory is made, so poll.
        let most = match now.summary.state {
            State::Queued => LOOK_AGAIN_QUEUED,
            State::Running if taken => Duration::ZERO,
            _ => return Ok(None),
        };
        watch.pause(LOOK_AGAIN, most, None)?;
        let asked = watch.ask(
            recorder,
            |recorder| recorder.with(|store| store.show(id.as_str(), Some(attempt))),
            None,
        )?;
        match asked {
            Some(asked) => now = asked,
            None => return Ok(None),
        }
    }
}

/// Prints what arrives until the runner has ended or released the directory, then the rest from wherever it is.
fn follow(
    home: &Home,
    recorder: &mut Recorder,
    run_dir: RunDirInfo,
    streams: &[&'static str],
    raw: bool,
) -> anyhow::Result<()> {
    let separate = streams.len() > 1;
    let mut followed: Vec<FollowedStream> = streams
        .iter()
        .map(|stream| FollowedStream {
            stream,
            file: None,
            seen: 0,
            sink: LogSink::new(stream, separate, raw),
        })
        .collect();
    // Do not hold a connection while a program runs for hours.
    recorder.disconnect();
    let runner = RunnerWatch::new(&run_dir);
    loop {
        let gone = !runner.is_writing(&run_dir.path);
        for one in &mut followed {
            one.copy_new(&run_dir.path)?;
        }
        if gone {
            break;
        }
        runner.wait()?;
    }
    print_rest(home, recorder, &run_dir, followed)
}

struct FollowedStream {
    stream: &'static str,
    /// Held open, so that the log can be read even if the directory is removed.
    file: Option<File>,
    seen: u64,
    sink: LogSink,
}

impl FollowedStream {
    fn copy_new(&mut self, dir: &Path) -> anyhow::Result<()> {
        if self.file.is_none() {
            self.file = open(dir, self.stream);
        }
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        // At the end the file is rewritten from the beginning, so the bytes up to `seen` stay at their offsets.
        file.seek(SeekFrom::Start(self.seen))
            .context("read the log")?;
        self.seen += copy(file, &mut self.sink)?;
        self.sink.flush()
    }
}

/// The runner of the attempt that is followed.
struct RunnerWatch {
    process: Option<RunnerProcess>,
}

impl RunnerWatch {
    fn new(run_dir: &RunDirInfo) -> RunnerWatch {
        RunnerWatch {
            process: RunnerProcess::open(&run_dir.record),
        }
    }

    /// Whether the runner is alive and the directory is in place. The runner removes or moves the directory at the very
    /// end.
    fn is_writing(&self, dir: &Path) -> bool {
        let alive = self.process.as_ref().is_some_and(|p| !p.has_ended());
        alive && run_dirs::read_record(dir).is_some_and(|record| !runner_is_done(&record.state))
    }

    /// Waits until the runner has ended, nobody reads this process's stdout any more, or a tenth of a second has
    /// passed.
    fn wait(&self) -> anyhow::Result<()> {
        let stdout = io::stdout();
        // Even without requested events, poll reports a pipe whose other end is closed.
        let mut wanted = vec![(true, stdout.as_fd(), PollFlags::empty())];
        let process = self.process.as_ref();
        wanted.extend(process.map(|p| (false, p.as_fd(), PollFlags::IN)));
        let moment = Duration::from_millis(100);
        let ready = events::wait_for_any(wanted, moment).context("wait for the log")?;
        let is_gone =
            |&(is_stdout, flags): &(bool, PollFlags)| is_stdout && flags.contains(PollFlags::ERR);
        match ready.iter().any(is_gone) {
            true => Err(io::Error::new(io::ErrorKind::BrokenPipe, print::ReaderGone).into()),
            false => Ok(()),
        }
    }
}

/// Whether the runner is done and has left the workspace in place.
fn runner_is_done(state: &engine::run_dir::RunState) -> bool {
    use engine::run_dir::RunState::{Kept, Live, Open, Quarantined, Ran, Recorded};
    match state {
        Kept { .. } | Quarantined | Ran | Recorded => true,
        Live | Open { .. } => false,
    }
}

/// Prints the tail that was held back, from the database, or from the directory that awaits its commit.
fn print_rest(
    home: &Home,
    recorder: &mut Recorder,
    run_dir: &RunDirInfo,
    followed: Vec<FollowedStream>,
) -> anyhow::Result<()> {
    let record = &run_dir.record;
    let key = record.commit_plan.as_ref().map(|task| task.key.clone());
    let attempt = match key {
        // The attempt's number may have changed since the start, so look it up by its key.
        Some(key) => recorder
            .with(|store| store.attempt_with_key(&key))
            .unwrap_or(None),
        None => None,
    };
    let left = || -> Option<PathBuf> {
        let mut here = run_dirs::list_analysis(home, &record.id).into_iter();
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
            Some(attempt) => recorder.with(|s| s.log(record.id.as_str(), attempt, one.stream))?,
            None => None,
        };
        match (stored, left()) {
            (Some(log), _) => print_stored(recorder, &log, one.seen, &mut one.sink)?,
            (None, Some(dir)) => print_files(&dir, one.stream, one.seen, &mut one.sink)?,
            (None, None) => ended = false,
        }
        one.sink.finish()?;
    }
    if !ended {
        messages::line(&match &record.commit_plan {
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
