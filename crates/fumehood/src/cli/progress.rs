//! One line on the terminal that shows the progress of something that takes long.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use engine::collect::CollectProgress;
use store::types::units::format_size;

/// Show nothing for what is faster than this.
const MOMENT: Duration = Duration::from_millis(700);
const REDRAWN: Duration = Duration::from_millis(100);

#[derive(Default)]
pub struct ProgressLine {
    began: Option<Instant>,
    drawn: Option<Instant>,
}

impl ProgressLine {
    /// Returns the text that redraws the line, if it is time to.
    pub fn show(&mut self, progress: CollectProgress) -> Option<String> {
        self.show_text(|| match progress {
            CollectProgress::Walked { entries } => {
                format!("collecting: looked at {entries} entries")
            }
            CollectProgress::Hashed { bytes, of } => {
                let percent = bytes.saturating_mul(100) / of.max(1);
                let (bytes, of) = (format_size(bytes), format_size(of));
                format!("collecting: {bytes} of {of} ({percent} %)")
            }
        })
    }

    fn show_text(&mut self, text: impl FnOnce() -> String) -> Option<String> {
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        let fresh = self.drawn.is_some_and(|drawn| now - drawn < REDRAWN);
        if now - began < MOMENT || fresh {
            return None;
        }
        self.drawn = Some(now);
        Some(format!("\r\x1b[Kfumehood: {}", text()))
    }

    /// Returns the text that clears the line, if it was drawn.
    pub fn clear(&mut self) -> Option<&'static str> {
        self.began = None;
        self.drawn.take().map(|_| "\r\x1b[K")
    }
}

/// A progress line on stderr, for commands that print nothing else meanwhile. Draws nothing if stderr is no terminal.
pub struct StderrProgress(Option<ProgressLine>);

impl StderrProgress {
    pub fn new() -> StderrProgress {
        StderrProgress(io::stderr().is_terminal().then(ProgressLine::default))
    }

    pub fn show(&mut self, progress: CollectProgress) {
        print(self.0.as_mut().and_then(|line| line.show(progress)));
    }

    pub fn show_text(&mut self, text: impl FnOnce() -> String) {
        print(self.0.as_mut().and_then(|line| line.show_text(text)));
    }

    pub fn clear(&mut self) {
        print(self.0.as_mut().and_then(ProgressLine::clear));
    }
}

fn print(text: Option<impl AsRef<[u8]>>) {
    if let Some(text) = text {
        // Nobody may be reading stderr. That is not a reason to fail.
        let _ = io::stderr().write_all(text.as_ref());
    }
}
