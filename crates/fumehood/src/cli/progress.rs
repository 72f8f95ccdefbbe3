//! One line on a terminal that tells how far collection has come, when it takes more than a moment.

use std::io::Write;
use std::time::{Duration, Instant};

use analysis::collect::Progress;
use analysis::units::format_size;

/// Before this, nobody has begun to wonder.
const MOMENT: Duration = Duration::from_millis(700);
const REDRAWN: Duration = Duration::from_millis(100);

#[derive(Default)]
pub struct ProgressLine {
    began: Option<Instant>,
    drawn: Option<Instant>,
}

impl ProgressLine {
    pub fn show(&mut self, progress: Progress) {
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        let fresh = self.drawn.is_some_and(|drawn| now - drawn < REDRAWN);
        if now - began < MOMENT || fresh {
            return;
        }
        self.drawn = Some(now);
        let text = match progress {
            Progress::Walked { entries } => format!("looked at {entries} entries"),
            Progress::Hashed { bytes, of } => {
                let percent = bytes.saturating_mul(100) / of.max(1);
                format!(
                    "{} of {} ({percent} %)",
                    format_size(bytes),
                    format_size(of)
                )
            }
        };
        // Nobody may be listening; that is no reason to fail.
        let _unheard = write!(std::io::stderr(), "\r\x1b[Kfumehood: collecting: {text}");
    }

    /// Leaves the line as if nothing had been there.
    pub fn clear(&mut self) {
        if self.drawn.take().is_some() {
            let _unheard = write!(std::io::stderr(), "\r\x1b[K");
        }
        self.began = None;
    }
}
