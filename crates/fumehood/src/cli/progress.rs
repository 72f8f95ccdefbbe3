//! One line on the terminal that shows the progress of a collection that takes long.

use std::time::{Duration, Instant};

use engine::collect::CollectProgress;
use store::types::units::format_size;

/// Show nothing for collections that are faster than this.
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
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        let fresh = self.drawn.is_some_and(|drawn| now - drawn < REDRAWN);
        if now - began < MOMENT || fresh {
            return None;
        }
        self.drawn = Some(now);
        let text = match progress {
            CollectProgress::Walked { entries } => format!("looked at {entries} entries"),
            CollectProgress::Hashed { bytes, of } => {
                let percent = bytes.saturating_mul(100) / of.max(1);
                format!(
                    "{} of {} ({percent} %)",
                    format_size(bytes),
                    format_size(of)
                )
            }
        };
        Some(format!("\r\x1b[Kfumehood: collecting: {text}"))
    }

    /// Returns the text that clears the line, if it was drawn.
    pub fn clear(&mut self) -> Option<&'static str> {
        self.began = None;
        self.drawn.take().map(|_| "\r\x1b[K")
    }
}
