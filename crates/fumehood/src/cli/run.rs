//! `fumehood run` and `fumehood shell`.

use std::io::{IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use engine::attempt::log_capture::{CapturedLog, OutputChunk};
use engine::attempt::record::{CommitState, Record, Status};
use engine::attempt::record_builder;
use engine::attempt::recorder::Recorder;
use engine::collect::CollectProgress;
use engine::pipeline::{self, AttemptError, CompletedRun, RunContext, RunObserver, StartFailure};
use rustix::termios::{OptionalActions, Termios};
use sandbox::cgroup::OwnProcess;
use sandbox::events::{self, PollFlags, SignalQueue};
use sandbox::spec::Terminal;
use sandbox::supervise::{Control, LaunchStep, RunError, Stream};
use store::artifacts::Overwrite;
use store::types::timings;

use super::args::{self, RunArgs, ShellArgs};
use super::print;
use super::progress::ProgressLine;
use super::stream_forwarder::{self, OutputMode, StreamForwarder};
use super::{exit, messages, record_access};
use engine::settings::{self, Presentation, Resolved, Sources};

/// How long to wait, after the deadline or a stop, for a reader who takes no output.
const DRAIN_WAIT: Duration = Duration::from_secs(1);

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;
const SIGWINCH: i32 = 28;

pub fn run(args: &RunArgs) -> anyhow::Result<u8> {
    let sources = Sources::from_process()?;
    let command = args.command(&args::command_line())?;
    let resolved = settings::run_request(command, args.given_settings(), &sources)?;
    let mode = match args.raw {
        true => OutputMode::Raw,
        false => OutputMode::Filtered,
    };
    run_attempt(&resolved, Terminal::None, None, mode, args.timings)
}

pub fn shell(args: &ShellArgs) -> anyhow::Result<u8> {
    let sources = Sources::from_process()?;
    let resolved = settings::shell_request(args.given_settings(), &sources)?;
    let terminal = rustix::stdio::stdin();
    let size = rustix::termios::tcgetwinsize(terminal)
        .context("`fumehood shell` needs a terminal; use `fumehood run -- sh -c …` without one")?;
    // From here on every key goes to the sandbox's own terminal, Ctrl-C included.
    let raw = RawTerminal::enter()?;
    let terminal = Terminal::Own {
        rows: size.ws_row,
        columns: size.ws_col,
    };
    run_attempt(&resolved, terminal, Some(raw), OutputMode::Session, false)
}

fn run_attempt(
    resolved: &Resolved,
    terminal: Terminal,
    raw: Option<RawTerminal>,
    mode: OutputMode,
    print_timings: bool,
) -> anyhow::Result<u8> {
    let Presentation { json, quiet } = resolved.presentation;
    let context = run_context(resolved, terminal)?;
    let mut recorder = match &raw {
        // A shell session is not recorded.
        Some(_) => None,
        None => Recorder::from_settings(&resolved.record, &context.home)?,
    };
    if let (Some(to), None) = (&resolved.record.to, &recorder) {
        anyhow::bail!("--to {to:?} exports what was committed, and nothing is, with --db none");
    }
    let deadline = Instant::now() + Duration::from_millis(resolved.request.limits.wall_ms.value);
    let mut console = Console::new(json, quiet, mode)?;
    let result = pipeline::run(&resolved.request, &context, recorder.as_mut(), &mut console);
    console.clear_progress();
    console.interrupt();
    // The messages below come from Fumehood: leave raw mode first, so that a new line starts at the left margin.
    drop(raw);
    let (mut record, logs) = match result {
        Ok(CompletedRun {
            record,
            stdout,
            stderr,
        }) => (record, Some((stdout, stderr))),
        Err(StartFailure { error, record }) => {
            let mut record = record.map_or_else(
                || record_builder::start_failure_record(&resolved.request, 1, &error),
                |record| *record,
            );
            if !json {
                messages::line(&format!(
                    "error: {}",
                    record.message.as_deref().unwrap_or_default()
                ));
                remedy(&error).into_iter().for_each(messages::line);
                return Ok(exit::code_of_record(&record));
            }
            record.notices.extend(remedy(&error).map(String::from));
            (record, None)
        }
    };
    let exported = match (&resolved.record.to, &mut recorder) {
        (Some(to), Some(recorder)) if logs.is_some() => export(recorder, &record, to, resolved),
        _ => Ok(()),
    };
    let code = match (exit::code_of_record(&record), exported) {
        (0, Err(())) => exit::COULD_NOT_RUN,
        (code, _) => code,
    };
    let timings = timings::read();
    if json {
        record.timings = Some(timings);
        if let Some((stdout, stderr)) = &logs {
            record.stdout.text = stdout.text("stdout");
            record.stderr.text = stderr.text("stderr");
        }
        return print_json(&record, code);
    }
    if let Some((stdout, stderr)) = &logs {
        let ended_by_itself = matches!(record.status, Status::Succeeded | Status::Failed);
        let until = match ended_by_itself {
            true => deadline.max(Instant::now()),
            false => Instant::now(),
        };
        if !console.finish(stdout, stderr, until + DRAIN_WAIT) {
            // Nobody reads stderr, and waiting for a reader would have no end.
            return Ok(code);
        }
    }
    if !quiet {
        record
            .notices
            .iter()
            .skip(console.notices)
            .for_each(|n| messages::line(n));
        messages::summary(&record);
    } else {
        messages::unfinished_work(&record);
    }
    if print_timings {
        messages::timings(&timings);
    }
    Ok(code)
}

fn run_context(resolved: &Resolved, terminal: Terminal) -> anyhow::Result<RunContext> {
    Ok(RunContext {
        terminal,
        own_process: OwnProcess::MayMove,
        ..RunContext::new(record_access::home()?, &resolved.record)
    })
}

/// Prints the result as one document. Returns the exit code, which is not 0 if the result cannot be printed.
fn print_json(record: &Record, code: u8) -> anyhow::Result<u8> {
    let mut out = std::io::stdout().lock();
    let text = serde_json::to_string(record).context("write the result as JSON")?;
    let text = print::plain_json(&text);
    let printed = writeln!(out, "{text}").and_then(|()| out.flush());
    Ok(match (printed, code) {
        (Err(e), code) => {
            messages::line(&format!("error: print the result: {e}"));
            // The record does not change. But if the success cannot be printed, do not exit with 0.
            code.max(if code == 0 { exit::COULD_NOT_RUN } else { 0 })
        }
        (Ok(()), code) => code,
    })
}

/// Exports outputs for `--to`. The commit has happened, so a failure here loses nothing.
fn export(
    recorder: &mut Recorder,
    record: &Record,
    to: &Path,
    resolved: &Resolved,
) -> Result<(), ()> {
    if !matches!(
        record.commit.state,
        CommitState::Committed | CommitState::Superseded
    ) {
        return Err(());
    }
    let overwrite = match resolved.record.force {
        true => Overwrite::Files,
        false => Overwrite::Never,
    };
    let (id, attempt) = (record.id.as_str(), record.attempt);
    // The outputs were collected just now, within their bound.
    match record_access::export(recorder, (id, attempt), &[], to, overwrite, u64::MAX) {
        Ok(_) => Ok(()),
        Err(e) => {
            messages::line(&format!(
                "error: {e:#}\nthe outputs are committed; export them with `fumehood outputs {id} --to DIR`"
            ));
            Err(())
        }
    }
}

const DOCTOR_HINT: &str = "this host does not allow that; `fumehood doctor` shows what is missing and the commands that provide it";

/// Returns advice about a host that does not allow something.
fn remedy(error: &AttemptError) -> Option<&'static str> {
    if let AttemptError::NoLevel { .. } = error {
        return Some(DOCTOR_HINT);
    }
    let AttemptError::Start(RunError::Launch { step, source, .. }) = error else {
        return None;
    };
    let errno = source.as_ref().and_then(std::io::Error::raw_os_error);
    match (step, errno) {
        (LaunchStep::BecomeLeasedUid, Some(_)) => Some(
            "root without the capabilities CAP_SETUID and CAP_SETGID cannot give the program a uid of its own; run \
             Fumehood as a plain user instead",
        ),
        (
            LaunchStep::MapViewOwners
            | LaunchStep::CreateNamespaces
            | LaunchStep::MapUser
            | LaunchStep::KeepMounts
            | LaunchStep::MakeMountsPrivate
            | LaunchStep::MakeRoot
            | LaunchStep::MountProc
            | LaunchStep::ChangeRoot
            | LaunchStep::CreateCgroupNamespace
            | LaunchStep::EnterInnerUserNamespace
            | LaunchStep::SetUpNetwork
            | LaunchStep::RestrictWithSeccomp,
            _,
        )
        | (LaunchStep::RestrictWithLandlock, None) => Some(DOCTOR_HINT),
        (LaunchStep::AttachToCgroup, _) => Some(
            "the run's cgroup vanished or refuses processes; is something else cleaning up cgroups?",
        ),
        _ => None,
    }
}

/// Forwards the program's output while it runs, and receives signals that ask to stop.
struct Console {
    json: bool,
    quiet: bool,
    forwarders: [StreamForwarder; 2],
    signals: SignalQueue,
    stop_signals: u32,
    notices: usize,
    progress: Option<ProgressLine>,
}

impl Console {
    fn new(json: bool, quiet: bool, mode: OutputMode) -> anyhow::Result<Console> {
        // Read signals from a descriptor between two events, instead of handling them at any moment.
        let wanted = [SIGHUP, SIGINT, SIGTERM, SIGWINCH];
        let signals = SignalQueue::block(&wanted).context("listen for signals")?;
        let forwarders =
            [Stream::Stdout, Stream::Stderr].map(|stream| StreamForwarder::new(stream, mode));
        Ok(Console {
            json,
            quiet,
            forwarders,
            signals,
            stop_signals: 0,
            notices: 0,
            progress: (!quiet && std::io::stderr().is_terminal()).then(ProgressLine::default),
        })
    }

    fn clear_progress(&mut self) {
        if let Some(text) = self.progress.as_mut().and_then(ProgressLine::clear) {
            self.print_message(text);
        }
    }

    fn interrupt(&mut self) {
        self.forwarders
            .iter_mut()
            .for_each(StreamForwarder::interrupt);
        self.flush();
    }

    /// Prints on stderr, after what the program printed, without waiting for the reader.
    fn print_message(&mut self, text: &str) {
        self.interrupt();
        self.forwarders[Stream::Stderr as usize].write_message(text);
        self.flush();
    }

    /// Writes as much as the readers take without waiting.
    fn flush(&mut self) {
        let [stdout, stderr] = &mut self.forwarders;
        stdout.flush_unless_split(stderr);
        stderr.flush_unless_split(stdout);
    }

    /// Forwards the rest of the output after everything else is done. Waits for a reader who takes nothing until
    /// `until`, or until a signal arrives. Returns whether stderr still takes messages.
    fn finish(&mut self, stdout: &CapturedLog, stderr: &CapturedLog, until: Instant) -> bool {
        self.forwarders[Stream::Stdout as usize].forward_tail(stdout);
        self.forwarders[Stream::Stderr as usize].forward_tail(stderr);
        self.flush();
        while self.wait_for_readers(until) {
            self.flush();
        }
        let [stdout, stderr] = &mut self.forwarders;
        let dropped = [stdout.give_up(), stderr.give_up()];
        // Both streams may be one terminal, which is as full for Fumehood as for the program.
        if dropped[1] > 0 || dropped[0] > 0 && !stream_forwarder::stderr_is_ready() {
            return false;
        }
        if dropped[0] > 0 {
            messages::line(&format!(
                "nobody read stdout in time: the last {} bytes of it were not passed on",
                dropped[0]
            ));
        }
        for forwarder in &self.forwarders {
            if let Some(errno) = forwarder.failure() {
                let (name, error) = (forwarder.name(), std::io::Error::from(errno));
                messages::line(&format!(
                    "{name} could not be passed on to its end: {error}"
                ));
            }
        }
        true
    }

    /// Returns false if nothing is left to write, or if waiting should end.
    fn wait_for_readers(&mut self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let blocked = self
            .forwarders
            .iter()
            .filter_map(StreamForwarder::blocked_on);
        // Each with whether it is the queue of signals.
        let mut wanted = vec![(true, self.signals.as_fd(), PollFlags::IN)];
        wanted.extend(blocked.map(|fd| (false, fd, PollFlags::OUT)));
        if wanted.len() == 1 || left.is_zero() {
            return false;
        }
        let ready = events::wait_for_any(wanted, left).unwrap_or_default();
        let signalled = ready.iter().any(|(is_signal, _)| *is_signal);
        !signalled
            || self
                .next_control()
                .is_none_or(|control| matches!(control, Control::Resize { .. }))
    }
}

impl RunObserver for Console {
    fn output(&mut self, stream: Stream, live: OutputChunk<'_>) {
        if !self.json {
            self.forwarders[stream as usize].forward_output(live);
            self.flush();
        }
    }

    fn notice(&mut self, text: &str) {
        self.notices += 1;
        if !self.quiet && !self.json {
            self.print_message(&messages::format_lines(text));
        }
    }

    fn progress(&mut self, progress: CollectProgress) {
        let text = self.progress.as_mut().and_then(|line| line.show(progress));
        // A terminal that takes nothing now would later show a line for every tenth of a second at once.
        let waits = self.forwarders.iter().any(|o| o.blocked_on().is_some());
        if let Some(text) = text.filter(|_| !waits) {
            self.print_message(&text);
        }
    }

    fn blocked_on(&self, stream: Stream) -> Option<BorrowedFd<'_>> {
        self.forwarders[stream as usize].blocked_on()
    }

    fn unblocked(&mut self, _stream: Stream) {
        self.flush();
    }

    fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.signals.as_fd())
    }

    fn next_control(&mut self) -> Option<Control> {
        match self.signals.take()? {
            SIGWINCH => {
                let size = rustix::termios::tcgetwinsize(rustix::stdio::stdin()).ok()?;
                Some(Control::Resize {
                    rows: size.ws_row,
                    columns: size.ws_col,
                })
            }
            _ => {
                self.stop_signals += 1;
                // A second signal asks to kill at once.
                Some(if self.stop_signals == 1 {
                    Control::Cancel
                } else {
                    Control::Kill
                })
            }
        }
    }
}

/// The caller's terminal in raw mode. Dropping it restores the settings.
struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    fn enter() -> anyhow::Result<RawTerminal> {
        let terminal = rustix::stdio::stdin();
        let before =
            rustix::termios::tcgetattr(terminal).context("read the terminal's settings")?;
        let mut raw = before.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(terminal, OptionalActions::Now, &raw)
            .context("change the terminal's settings")?;
        Ok(RawTerminal { before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Fails only if the terminal is gone.
        let _ = rustix::termios::tcsetattr(
            rustix::stdio::stdin(),
            OptionalActions::Drain,
            &self.before,
        );
    }
}
