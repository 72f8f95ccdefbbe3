//! The terminal while `top` uses it: the alternate screen, keys without line editing. Dropping the screen restores
//! everything.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::time::Instant;

use anyhow::Context;
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios};
use sandbox::events::{self, PollFlags, SignalQueue};
use store::ChangeListener;

use super::frame::ScreenSize;
use crate::cli::print::{StyledLine, TextStyle};

const SIGHUP: u8 = 1;
const SIGINT: u8 = 2;
const SIGTERM: u8 = 15;
const SIGWINCH: u8 = 28;

/// Alternate screen, no cursor, no wrapping: a character may be wider than computed.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
/// Synchronized update (DEC mode 2026): the terminal shows the whole frame at once. Terminals without it ignore this.
const BEGIN: &str = "\x1b[?2026h\x1b[H";
const END: &str = "\x1b[J\x1b[?2026l";

/// What happened first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScreenEvent {
    Timeout,
    Redraw,
    Quit,
    /// The signal's number.
    Signal(u8),
    Changed,
}

/// What a wait waits for. If several are ready, the first counts.
#[derive(Clone, Copy)]
enum EventSource {
    Signals,
    Keys,
    Changes,
}

pub struct Screen {
    signals: SignalQueue,
    colours: bool,
    entered: bool,
    /// The settings to restore. `None` if stdin is not a terminal; then keys are not read.
    keys: Option<Termios>,
}

impl Screen {
    /// Blocks signals and opens a descriptor for them. The terminal stays unchanged until [`Screen::enter`].
    pub fn open() -> anyhow::Result<Screen> {
        let wanted = [SIGHUP, SIGINT, SIGTERM, SIGWINCH].map(i32::from);
        Ok(Screen {
            signals: SignalQueue::block(&wanted).context("listen for signals")?,
            colours: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
            entered: false,
            keys: None,
        })
    }

    pub fn enter(&mut self) -> anyhow::Result<()> {
        let stdin = rustix::stdio::stdin();
        if io::stdin().is_terminal() {
            let before =
                rustix::termios::tcgetattr(stdin).context("read the terminal's settings")?;
            restore_on_panic(before.clone());
            let mut raw = before.clone();
            // Ctrl-C and Ctrl-Z arrive as keys: a program that is stopped here would leave the terminal in this state.
            raw.local_modes -=
                LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG | LocalModes::IEXTEN;
            raw.special_codes[SpecialCodeIndex::VMIN] = 1;
            raw.special_codes[SpecialCodeIndex::VTIME] = 0;
            rustix::termios::tcsetattr(stdin, OptionalActions::Flush, &raw)
                .context("change the terminal's settings")?;
            self.keys = Some(before);
        }
        self.entered = true;
        write_all(ENTER)
    }

    pub fn size(&self) -> ScreenSize {
        const UNKNOWN: ScreenSize = ScreenSize {
            columns: 80,
            rows: 24,
        };
        let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout());
        size.map_or(UNKNOWN, |size| match (size.ws_col, size.ws_row) {
            (0, _) | (_, 0) => UNKNOWN,
            (columns, rows) => ScreenSize {
                columns: columns.into(),
                rows: rows.into(),
            },
        })
    }

    /// Writes the whole frame at once. Each line is overwritten and its rest cleared, so that nothing flickers.
    pub fn draw(&self, lines: &[StyledLine]) -> anyhow::Result<()> {
        let mut frame = String::from(BEGIN);
        for (n, line) in lines.iter().enumerate() {
            if n > 0 {
                frame.push_str("\r\n");
            }
            for (text, style) in &line.0 {
                let code = self.code(*style);
                match code.is_empty() {
                    true => frame.push_str(text),
                    false => frame.push_str(&format!("\x1b[{code}m{text}\x1b[0m")),
                }
            }
            frame.push_str("\x1b[K");
        }
        frame.push_str(END);
        write_all(&frame)
    }

    fn code(&self, style: TextStyle) -> &'static str {
        match (style, self.colours) {
            (TextStyle::Plain, _) => "",
            (TextStyle::Head, _) => "1",
            (TextStyle::Bar, _) => "7",
            (TextStyle::Faint, _) => "2",
            (TextStyle::Good, true) => "32",
            (TextStyle::Bad, true) => "31",
            (TextStyle::Warning, true) => "33",
            (TextStyle::Good | TextStyle::Bad | TextStyle::Warning, false) => "",
        }
    }

    /// Waits until something happens, or until the given time.
    pub fn wait_for_event(
        &self,
        listener: Option<&ChangeListener>,
        until: Instant,
    ) -> anyhow::Result<ScreenEvent> {
        let signals = (EventSource::Signals, self.signals.as_fd());
        let keys = (EventSource::Keys, rustix::stdio::stdin());
        let changes = listener.map(|listener| (EventSource::Changes, listener.as_fd()));
        let sources = [Some(signals), self.keys.is_some().then_some(keys), changes];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let wanted = sources.into_iter().flatten();
            let wanted = wanted.map(|(source, fd)| (source, fd, PollFlags::IN));
            let ready = events::wait_for_any(wanted, left).context("wait for keys")?;
            let event = match ready.first() {
                Some((EventSource::Signals, _)) => self.signal(),
                Some((EventSource::Keys, _)) => read_key(),
                Some((EventSource::Changes, _)) => Some(ScreenEvent::Changed),
                None => (Instant::now() >= until).then_some(ScreenEvent::Timeout),
            };
            if let Some(event) = event {
                return Ok(event);
            }
        }
    }

    fn signal(&self) -> Option<ScreenEvent> {
        match u8::try_from(self.signals.take()?).ok()? {
            SIGWINCH => Some(ScreenEvent::Redraw),
            // Like Ctrl-C as a key.
            SIGINT => Some(ScreenEvent::Quit),
            other => Some(ScreenEvent::Signal(other)),
        }
    }
}

fn read_key() -> Option<ScreenEvent> {
    const CTRL_C: u8 = 3;
    const CTRL_L: u8 = 12;
    let mut keys = [0u8; 64];
    let count = match rustix::io::read(rustix::stdio::stdin(), &mut keys) {
        // The terminal is gone.
        Ok(0) => return Some(ScreenEvent::Quit),
        Ok(count) => count,
        Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => return None,
        Err(_) => return Some(ScreenEvent::Quit),
    };
    let keys = keys.get(..count).unwrap_or_default();
    if keys.iter().any(|key| matches!(*key, b'q' | b'Q' | CTRL_C)) {
        return Some(ScreenEvent::Quit);
    }
    keys.contains(&CTRL_L).then_some(ScreenEvent::Redraw)
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.entered {
            leave(self.keys.as_ref());
        }
    }
}

fn leave(keys: Option<&Termios>) {
    // If the terminal is gone there is nothing to restore, so ignore errors.
    let _ = write_all(LEAVE);
    if let Some(before) = keys {
        let stdin = rustix::stdio::stdin();
        let _ = rustix::termios::tcsetattr(stdin, OptionalActions::Flush, before);
    }
}

/// Restores the terminal before a panic message is printed. Otherwise the message would be lost with the alternate
/// screen.
fn restore_on_panic(before: Termios) {
    let previous_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        leave(Some(&before));
        previous_hook(info);
    }));
}

fn write_all(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("draw on the terminal")
}
