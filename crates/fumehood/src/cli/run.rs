//! `fumehood run` and `fumehood shell`.

use std::io::{IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use engine::attempt::log_capture::{CapturedLog, OutputChunk};
use engine::attempt::record::{CommitState, Record, Status};
use engine::attempt::record_builder;
use engine::attempt::recorder::Recorder;
use engine::collect::CollectProgress;
use engine::home::Home;
use engine::pipeline::{
    self, AttemptError, CompletedRun, RunContext, RunObserver, StartFailure, WorkspaceSource,
};
use engine::plan::runtime::CallerEnvironment;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios};
use sandbox::spec::Terminal;
use sandbox::supervise::{Control, RunError, Stream};
use store::artifacts::Overwrite;
use store::types::timings;

use super::args::{RunArgs, ShellArgs};
use super::outlet::{self, Outlet, View};
use super::print;
use super::progress::ProgressLine;
use super::{exit, ledger, show};
use crate::config::{self, Presentation, Resolved, Sources};

/// After the deadline, or after a stop, a reader who takes nothing is waited for this long.
const DRAINED_FOR: Duration = Duration::from_secs(1);

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;
const SIGWINCH: i32 = 28;

pub fn run(args: &RunArgs) -> anyhow::Result<u8> {
    let sources = Sources::from_process()?;
    let resolved = config::request(args, &sources)?;
    let view = match args.raw {
        true => View::Raw,
        false => View::Safe,
    };
    perform(&resolved, Terminal::None, None, view, args.timings)
}

pub fn shell(args: &ShellArgs) -> anyhow::Result<u8> {
    let sources = Sources::from_process()?;
    let mut resolved = config::shell_request(args, &sources)?;
    let terminal = rustix::stdio::stdin();
    let size = rustix::termios::tcgetwinsize(terminal)
        .context("`fumehood shell` needs a terminal; use `fumehood run -- sh -c …` without one")?;
    let kind = std::env::var_os("TERM").unwrap_or_else(|| "dumb".into());
    resolved.request.env.push(("TERM".into(), kind));
    // From here on every key goes to the sandbox's own terminal, Ctrl-C included.
    let raw = RawTerminal::enter()?;
    let terminal = Terminal::Own {
        rows: size.ws_row,
        columns: size.ws_col,
    };
    perform(&resolved, terminal, Some(raw), View::Session, false)
}

fn perform(
    resolved: &Resolved,
    terminal: Terminal,
    raw: Option<RawTerminal>,
    view: View,
    tell_timings: bool,
) -> anyhow::Result<u8> {
    let Presentation { json, quiet } = resolved.presentation;
    let env = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let around = RunContext {
        home: Home::find(&env)?.open()?,
        caller: CallerEnvironment::from_process(),
        launcher: PathBuf::from("/proc/self/exe"),
        terminal,
        required_layers: resolved.required_layers.clone(),
        workspace_source: match resolved.record.in_workspace {
            Some(_) => WorkspaceSource::Prepared,
            None => WorkspaceSource::Fresh,
        },
        free_reserve_bytes: resolved.record.free_reserve_bytes,
        store_quota_bytes: resolved.record.store_quota_bytes,
        claimed: None,
    };
    let mut ledger = match &raw {
        // Somebody looking around is no analysis.
        Some(_) => None,
        None => ledger::of(&resolved.record, &around.home)?,
    };
    if let (Some(to), None) = (&resolved.record.to, &ledger) {
        anyhow::bail!("--to {to:?} exports what was committed, and nothing is, with --db none");
    }
    let deadline = Instant::now() + Duration::from_millis(resolved.request.limits.wall_ms.value);
    let mut console = Console::new(json, quiet, view)?;
    let result = pipeline::run(&resolved.request, &around, ledger.as_mut(), &mut console);
    console.clear_progress();
    console.interrupt();
    // What follows is ours to say, on a terminal that starts a new line when told to.
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
                show::line(&format!(
                    "error: {}",
                    record.message.as_deref().unwrap_or_default()
                ));
                remedy(&error).into_iter().for_each(show::line);
                return Ok(exit::code(&record));
            }
            record.notices.extend(remedy(&error).map(String::from));
            (record, None)
        }
    };
    let exported = match (&resolved.record.to, &mut ledger) {
        (Some(to), Some(ledger)) if logs.is_some() => export(ledger, &record, to, resolved),
        _ => Ok(()),
    };
    let code = match (exit::code(&record), exported) {
        (0, Err(())) => exit::COULD_NOT_RUN,
        (code, _) => code,
    };
    let timings = timings::measured();
    if json {
        record.timings = Some(timings);
        if let Some((stdout, stderr)) = &logs {
            record.stdout.text = stdout.text("stdout");
            record.stderr.text = stderr.text("stderr");
        }
        let mut out = std::io::stdout().lock();
        let text = serde_json::to_string(&record).context("write the result as JSON")?;
        let text = print::plain_json(&text);
        let told = writeln!(out, "{text}").and_then(|()| out.flush());
        // The run is what it was; but who could not be told of a success must not take it for one.
        return Ok(match (told, code) {
            (Err(e), code) => {
                show::line(&format!("error: print the result: {e}"));
                code.max(if code == 0 { exit::COULD_NOT_RUN } else { 0 })
            }
            (Ok(()), code) => code,
        });
    }
    if let Some((stdout, stderr)) = &logs {
        let ended_by_itself = matches!(record.status, Status::Succeeded | Status::Failed);
        let until = match ended_by_itself {
            true => deadline.max(Instant::now()),
            false => Instant::now(),
        };
        if !console.finish(stdout, stderr, until + DRAINED_FOR) {
            // Nobody reads what we would say, and waiting for that would have no end.
            return Ok(code);
        }
    }
    if !quiet {
        record
            .notices
            .iter()
            .skip(console.notices)
            .for_each(|n| show::line(n));
        show::summary(&record);
    } else {
        show::trouble(&record);
    }
    if tell_timings {
        show::timings(&timings);
    }
    Ok(code)
}

/// `--to`: after the commit, so whatever goes wrong here loses nothing.
fn export(
    ledger: &mut Recorder,
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
    // It was collected just now, under its bound.
    match ledger::export(ledger, (id, attempt), &[], to, overwrite, u64::MAX) {
        Ok(_) => Ok(()),
        Err(e) => {
            show::line(&format!(
                "error: {e:#}\nthe outputs are committed; export them with `fumehood outputs {id} --to DIR`"
            ));
            Err(())
        }
    }
}

const DOCTOR: &str = "this host does not give what that takes; `fumehood doctor` says what is missing, and what to type to get it";

/// What to do about a host that does not let us.
fn remedy(error: &AttemptError) -> Option<&'static str> {
    if let AttemptError::NoLevel { .. } = error {
        return Some(DOCTOR);
    }
    let AttemptError::Start(RunError::Step { step, source, .. }) = error else {
        return None;
    };
    let errno = source.as_ref().and_then(std::io::Error::raw_os_error);
    match (step.as_str(), errno) {
        ("become the leased uid", Some(_)) => Some(
            "root without the capabilities CAP_SETUID and CAP_SETGID cannot give the program a uid of its own; run \
             Fumehood as a plain user instead",
        ),
        (
            "map the owners of the views"
            | "create namespaces"
            | "map the user"
            | "keep mounts to ourselves"
            | "make mounts private"
            | "make the new root"
            | "mount /dev"
            | "mount /proc"
            | "change the root"
            | "create the cgroup namespace"
            | "enter the inner user namespace"
            | "set up the network and the host name"
            | "restrict with seccomp",
            _,
        )
        | ("restrict with Landlock", None) => Some(DOCTOR),
        ("attach to the cgroup", _) => Some(
            "the run's cgroup vanished or refuses processes; is something else cleaning up cgroups?",
        ),
        _ => None,
    }
}

/// Where the program's output goes while it runs, and where orders to stop come from.
struct Console {
    json: bool,
    quiet: bool,
    outlets: [Outlet; 2],
    signals: OwnedFd,
    stops: u32,
    notices: usize,
    progress: Option<ProgressLine>,
}

impl Console {
    fn new(json: bool, quiet: bool, view: View) -> anyhow::Result<Console> {
        // Taken off a descriptor between two events rather than in a handler at any moment.
        let wanted = [SIGHUP, SIGINT, SIGTERM, SIGWINCH];
        sandbox::block_signals(Some(&wanted)).context("block signals")?;
        let signals = sandbox::signal_fd(&wanted).context("listen for signals")?;
        let outlets = [Stream::Stdout, Stream::Stderr].map(|stream| Outlet::new(stream, view));
        Ok(Console {
            json,
            quiet,
            outlets,
            signals,
            stops: 0,
            notices: 0,
            progress: (!quiet && std::io::stderr().is_terminal()).then(ProgressLine::default),
        })
    }

    fn clear_progress(&mut self) {
        if let Some(text) = self.progress.as_mut().and_then(ProgressLine::clear) {
            self.say(text);
        }
    }

    fn interrupt(&mut self) {
        self.outlets.iter_mut().for_each(Outlet::interrupt);
        self.flush();
    }

    /// On stderr, behind what the program printed, and without waiting for whoever reads it.
    fn say(&mut self, text: &str) {
        self.interrupt();
        self.outlets[Stream::Stderr as usize].say(text);
        self.flush();
    }

    /// Writes what is taken without waiting.
    fn flush(&mut self) {
        let [stdout, stderr] = &mut self.outlets;
        stdout.flush_beside(stderr);
        stderr.flush_beside(stdout);
    }

    /// Passes on the rest, once everything else is done. Who takes nothing is waited for until then, or until a signal
    /// comes. Whether there is still somebody to talk to on stderr.
    fn finish(&mut self, stdout: &CapturedLog, stderr: &CapturedLog, until: Instant) -> bool {
        self.outlets[Stream::Stdout as usize].show_end(stdout);
        self.outlets[Stream::Stderr as usize].show_end(stderr);
        self.flush();
        while self.wait_for_readers(until) {
            self.flush();
        }
        let [stdout, stderr] = &mut self.outlets;
        let dropped = [stdout.give_up(), stderr.give_up()];
        // Both may be one terminal, which is as full for us as it was for the program.
        if dropped[1] > 0 || dropped[0] > 0 && !outlet::stderr_is_ready() {
            return false;
        }
        if dropped[0] > 0 {
            show::line(&format!(
                "nobody read stdout in time: the last {} bytes of it were not passed on",
                dropped[0]
            ));
        }
        for outlet in &self.outlets {
            if let Some(errno) = outlet.failure() {
                let (name, error) = (outlet.name(), std::io::Error::from(errno));
                show::line(&format!(
                    "{name} could not be passed on to its end: {error}"
                ));
            }
        }
        true
    }

    /// False when nothing is left to be written, or it is not to be waited for any longer.
    fn wait_for_readers(&mut self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
        let blocked = self.outlets.iter().filter_map(Outlet::blocked_on);
        fds.extend(blocked.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::OUT)));
        if fds.len() == 1 || left.is_zero() {
            return false;
        }
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let heard = poll(&mut fds, Some(&timeout)).is_ok() && !fds[0].revents().is_empty();
        drop(fds);
        !heard
            || self
                .next_control()
                .is_none_or(|wish| matches!(wish, Control::Resize { .. }))
    }
}

impl RunObserver for Console {
    fn output(&mut self, stream: Stream, live: OutputChunk<'_>) {
        if !self.json {
            self.outlets[stream as usize].show(live);
            self.flush();
        }
    }

    fn notice(&mut self, text: &str) {
        self.notices += 1;
        if !self.quiet && !self.json {
            self.say(&show::lines(text));
        }
    }

    fn progress(&mut self, progress: CollectProgress) {
        let text = self.progress.as_mut().and_then(|line| line.show(progress));
        // A terminal that takes nothing would get a line for every tenth of a second at once.
        let waits = self.outlets.iter().any(|o| o.blocked_on().is_some());
        if let Some(text) = text.filter(|_| !waits) {
            self.say(&text);
        }
    }

    fn blocked_on(&self, stream: Stream) -> Option<BorrowedFd<'_>> {
        self.outlets[stream as usize].blocked_on()
    }

    fn unblocked(&mut self, _stream: Stream) {
        self.flush();
    }

    fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.signals.as_fd())
    }

    fn next_control(&mut self) -> Option<Control> {
        match sandbox::read_signal(self.signals.as_fd())? {
            SIGWINCH => {
                let size = rustix::termios::tcgetwinsize(rustix::stdio::stdin()).ok()?;
                Some(Control::Resize {
                    rows: size.ws_row,
                    columns: size.ws_col,
                })
            }
            _ => {
                self.stops += 1;
                // The second one is impatient.
                Some(if self.stops == 1 {
                    Control::Cancel
                } else {
                    Control::Kill
                })
            }
        }
    }
}

/// The caller's terminal passing every key through; itself again when dropped.
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
        let _terminal_gone = rustix::termios::tcsetattr(
            rustix::stdio::stdin(),
            OptionalActions::Drain,
            &self.before,
        );
    }
}
