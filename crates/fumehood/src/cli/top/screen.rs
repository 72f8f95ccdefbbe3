//! The terminal while `top` has it: another screen, keys as they are pressed, and everything as it was when we go.

use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios};
use store::ChangeListener;

use super::frame::Size;
use super::grid::{Ink, Line};

const SIGHUP: u8 = 1;
const SIGINT: u8 = 2;
const SIGTERM: u8 = 15;
const SIGWINCH: u8 = 28;

/// The other screen, no cursor, and no wrapping: a character may be wider than we think.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
/// Shown at once where the terminal knows how (DEC mode 2026); others ignore it.
const BEGIN: &str = "\x1b[?2026h\x1b[H";
const END: &str = "\x1b[J\x1b[?2026l";

/// What happened first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    Time,
    Redraw,
    Quit,
    /// Its number.
    Signal(u8),
    Bell,
}

pub struct Screen {
    signals: OwnedFd,
    colours: bool,
    entered: bool,
    /// Keys are not listened to where they do not come from a terminal.
    keys: Option<Termios>,
}

impl Screen {
    /// Listens for signals; the terminal stays as it is until [`Screen::enter`].
    pub fn open() -> anyhow::Result<Screen> {
        let wanted = [SIGHUP, SIGINT, SIGTERM, SIGWINCH].map(i32::from);
        sandbox::block_signals(Some(&wanted)).context("block signals")?;
        let signals = sandbox::signal_fd(&wanted).context("listen for signals")?;
        Ok(Screen {
            signals,
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
            // Ctrl-C and Ctrl-Z come as keys: a program that is stopped here would leave the terminal as it is now.
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

    pub fn size(&self) -> Size {
        const UNKNOWN: Size = Size {
            columns: 80,
            rows: 24,
        };
        let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout());
        size.map_or(UNKNOWN, |size| match (size.ws_col, size.ws_row) {
            (0, _) | (_, 0) => UNKNOWN,
            (columns, rows) => Size {
                columns: columns.into(),
                rows: rows.into(),
            },
        })
    }

    /// One write for the whole frame; each line is overwritten and its rest cleared, so that nothing flickers.
    pub fn draw(&self, lines: &[Line]) -> anyhow::Result<()> {
        let mut frame = String::from(BEGIN);
        for (n, line) in lines.iter().enumerate() {
            if n > 0 {
                frame.push_str("\r\n");
            }
            for (text, ink) in &line.0 {
                let code = self.code(*ink);
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

    fn code(&self, ink: Ink) -> &'static str {
        match (ink, self.colours) {
            (Ink::Plain, _) => "",
            (Ink::Head, _) => "1",
            (Ink::Bar, _) => "7",
            (Ink::Faint, _) => "2",
            (Ink::Good, true) => "32",
            (Ink::Bad, true) => "31",
            (Ink::Warning, true) => "33",
            (Ink::Good | Ink::Bad | Ink::Warning, false) => "",
        }
    }

    /// Until something happens, or the time has come.
    pub fn listen(&self, bell: Option<&ChangeListener>, until: Instant) -> anyhow::Result<Heard> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let stdin = io::stdin();
            let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
            let keys = self.keys.is_some();
            fds.extend(keys.then(|| PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN)));
            fds.extend(bell.map(|bell| PollFd::new(bell, PollFlags::IN)));
            match poll(&mut fds, Some(&timeout)) {
                Ok(0) => return Ok(Heard::Time),
                Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(e) => return Err(e).context("wait for keys"),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            let is_ready = |at: usize| ready.get(at).copied().unwrap_or(false);
            let heard = match () {
                () if is_ready(0) => self.signal(),
                () if keys && is_ready(1) => pressed(),
                () => Some(Heard::Bell),
            };
            if let Some(heard) = heard {
                return Ok(heard);
            }
        }
    }

    fn signal(&self) -> Option<Heard> {
        let signal = sandbox::read_signal(self.signals.as_fd())?;
        match u8::try_from(signal).ok()? {
            SIGWINCH => Some(Heard::Redraw),
            // As the key does.
            SIGINT => Some(Heard::Quit),
            other => Some(Heard::Signal(other)),
        }
    }
}

fn pressed() -> Option<Heard> {
    const CTRL_C: u8 = 3;
    const CTRL_L: u8 = 12;
    let mut keys = [0u8; 64];
    let count = match rustix::io::read(rustix::stdio::stdin(), &mut keys) {
        // The terminal is gone.
        Ok(0) => return Some(Heard::Quit),
        Ok(count) => count,
        Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => return None,
        Err(_) => return Some(Heard::Quit),
    };
    let keys = keys.get(..count).unwrap_or_default();
    if keys.iter().any(|key| matches!(*key, b'q' | b'Q' | CTRL_C)) {
        return Some(Heard::Quit);
    }
    keys.contains(&CTRL_L).then_some(Heard::Redraw)
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.entered {
            leave(self.keys.as_ref());
        }
    }
}

fn leave(keys: Option<&Termios>) {
    // The terminal may be gone, and then there is nothing to give back.
    let _gone = write_all(LEAVE);
    if let Some(before) = keys {
        let stdin = rustix::stdio::stdin();
        let _gone = rustix::termios::tcsetattr(stdin, OptionalActions::Flush, before);
    }
}

/// What a panic says would go to the other screen, and be lost with it.
fn restore_on_panic(before: Termios) {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        leave(Some(&before));
        tell(info);
    }));
}

fn write_all(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("draw on the terminal")
}
