//! `fumehood run` and `fumehood shell`.

use std::io::{IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use analysis::artifacts::Overwrite;
use analysis::collect::Progress;
use analysis::description;
use analysis::home::Home;
use analysis::ledger::Ledger;
use analysis::logs::Captured;
use analysis::pipeline::{self, Audience, Done, NotRun, PipelineError, Place, Surroundings};
use analysis::record::{CommitState, Record};
use analysis::runtime::Caller;
use analysis::timings;
use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios};
use sandbox::spec::Terminal;
use sandbox::supervise::{RunError, Stream, Wish};

use super::args::{RunArgs, ShellArgs};
use super::progress::ProgressLine;
use super::{exit, ledger, show};
use crate::config::{self, Presentation, Resolved, Sources};

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;
const SIGWINCH: i32 = 28;

pub fn run(args: &RunArgs) -> anyhow::Result<u8> {
    let sources = Sources::from_process()?;
    let resolved = config::request(args, &sources)?;
    perform(&resolved, Terminal::None, None, args.timings)
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
    perform(&resolved, terminal, Some(raw), false)
}

fn perform(
    resolved: &Resolved,
    terminal: Terminal,
    raw: Option<RawTerminal>,
    tell_timings: bool,
) -> anyhow::Result<u8> {
    let Presentation { json, quiet } = resolved.presentation;
    let env = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let around = Surroundings {
        home: Home::find(&env)?.open()?,
        caller: Caller::from_process(),
        launcher: PathBuf::from("/proc/self/exe"),
        terminal,
        required_layers: resolved.required_layers.clone(),
        place: match resolved.record.in_workspace {
            Some(_) => Place::Prepared,
            None => Place::Fresh,
        },
        free_reserve_bytes: resolved.record.free_reserve_bytes,
        store_quota_bytes: resolved.record.store_quota_bytes,
        taken: None,
    };
    let mut ledger = match &raw {
        // Somebody looking around is no analysis.
        Some(_) => None,
        None => ledger::of(&resolved.record, &around.home)?,
    };
    if let (Some(to), None) = (&resolved.record.to, &ledger) {
        anyhow::bail!("--to {to:?} exports what was committed, and nothing is, with --db none");
    }
    let mut console = Console::new(json, quiet)?;
    let result = pipeline::run(&resolved.request, &around, ledger.as_mut(), &mut console);
    console.clear_progress();
    // What follows is ours to say, on a terminal that starts a new line when told to.
    drop(raw);
    let (mut record, logs) = match result {
        Ok(Done {
            record,
            stdout,
            stderr,
        }) => (record, Some((stdout, stderr))),
        Err(NotRun { error, record }) => {
            let mut record = record.map_or_else(
                || description::not_run(&resolved.request, 1, &error),
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
    let timings = timings::so_far();
    if json {
        record.timings = Some(timings);
        if let Some((stdout, stderr)) = &logs {
            record.stdout.text = stdout.text("stdout");
            record.stderr.text = stderr.text("stderr");
        }
        let mut out = std::io::stdout().lock();
        let text = serde_json::to_string(&record).context("write the result as JSON")?;
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
        console.finish(stdout, stderr);
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
fn export(ledger: &mut Ledger, record: &Record, to: &Path, resolved: &Resolved) -> Result<(), ()> {
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
    match ledger::export(ledger, (id, attempt), &[], to, overwrite) {
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
fn remedy(error: &PipelineError) -> Option<&'static str> {
    if let PipelineError::NoLevel { .. } = error {
        return Some(DOCTOR);
    }
    let PipelineError::Start(RunError::Step { step, source, .. }) = error else {
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
    fn new(json: bool, quiet: bool) -> anyhow::Result<Console> {
        // Taken off a descriptor between two events rather than in a handler at any moment.
        let wanted = [SIGHUP, SIGINT, SIGTERM, SIGWINCH];
        sandbox::block_signals(Some(&wanted)).context("block signals")?;
        let signals = sandbox::signal_fd(&wanted).context("listen for signals")?;
        let outlets = [Outlet::default(), Outlet::default()];
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
        if let Some(line) = &mut self.progress {
            line.clear();
        }
    }

    /// What was held back: the note, then the tail. May wait for a slow reader; everything else is done.
    fn finish(&mut self, stdout: &Captured, stderr: &Captured) {
        for (stream, captured) in [(Stream::Stdout, stdout), (Stream::Stderr, stderr)] {
            let outlet = &mut self.outlets[stream as usize];
            outlet.flush(descriptor(stream), Patience::Wait);
            if !captured.tail.is_empty() {
                let name = if stream == Stream::Stdout {
                    "stdout"
                } else {
                    "stderr"
                };
                outlet
                    .pending
                    .extend(captured.note(name).unwrap_or_default().bytes());
                outlet.pending.extend(&captured.tail);
                outlet.flush(descriptor(stream), Patience::Wait);
            }
        }
    }
}

impl Audience for Console {
    fn live(&mut self, stream: Stream, bytes: &[u8]) {
        if !self.json {
            let outlet = &mut self.outlets[stream as usize];
            outlet.pending.extend(bytes);
            outlet.flush(descriptor(stream), Patience::None);
        }
    }

    fn notice(&mut self, text: &str) {
        self.notices += 1;
        if !self.quiet && !self.json {
            show::line(text);
        }
    }

    fn progress(&mut self, progress: Progress) {
        if let Some(line) = &mut self.progress {
            line.show(progress);
        }
    }

    fn blocked_on(&self) -> Option<BorrowedFd<'_>> {
        let streams = [Stream::Stdout, Stream::Stderr];
        let full = streams
            .into_iter()
            .find(|s| !self.outlets[*s as usize].pending.is_empty());
        full.map(descriptor)
    }

    fn unblocked(&mut self) {
        for stream in [Stream::Stdout, Stream::Stderr] {
            self.outlets[stream as usize].flush(descriptor(stream), Patience::None);
        }
    }

    fn wishes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.signals.as_fd())
    }

    fn wish(&mut self) -> Option<Wish> {
        match sandbox::read_signal(self.signals.as_fd())? {
            SIGWINCH => {
                let size = rustix::termios::tcgetwinsize(rustix::stdio::stdin()).ok()?;
                Some(Wish::Resize {
                    rows: size.ws_row,
                    columns: size.ws_col,
                })
            }
            _ => {
                self.stops += 1;
                // The second one is impatient.
                Some(if self.stops == 1 {
                    Wish::Cancel
                } else {
                    Wish::Kill
                })
            }
        }
    }
}

fn descriptor(stream: Stream) -> BorrowedFd<'static> {
    match stream {
        Stream::Stdout => rustix::stdio::stdout(),
        Stream::Stderr => rustix::stdio::stderr(),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Patience {
    None,
    Wait,
}

/// Bytes on their way to one of our own streams. The descriptor is shared with other programs, so it is not made
/// non-blocking; instead no more is written at once than a ready pipe must take.
#[derive(Default)]
struct Outlet {
    pending: std::collections::VecDeque<u8>,
    closed: bool,
}

impl Outlet {
    fn flush(&mut self, to: BorrowedFd<'_>, patience: Patience) {
        const ALWAYS_FITS: usize = 4096;
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        while !self.pending.is_empty() {
            if self.closed {
                return self.pending.clear();
            }
            let mut fds = [PollFd::from_borrowed_fd(to, PollFlags::OUT)];
            let timeout = (patience == Patience::None).then_some(&at_once);
            match poll(&mut fds, timeout) {
                Ok(0) => return,
                Err(_) if patience == Patience::None => return,
                Ok(_) | Err(_) => {}
            }
            let (front, _) = self.pending.as_slices();
            match rustix::io::write(to, &front[..front.len().min(ALWAYS_FITS)]) {
                Ok(n) => drop(self.pending.drain(..n)),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                // The reader is gone. The program goes on; its output is still captured.
                Err(_) => self.closed = true,
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
