//! The events of an analysis and its position in the queue, as `show` prints them.

use serde::Serialize;
use store::types::units::format_size;
use store::{AHEAD_MAX, AnalysisEvent, QueuePosition};

use super::print::{Align, Table, escape, format_count};
use super::{attempt_text, time_format};

/// How an attempt was submitted, and its position in the queue.
#[derive(Serialize)]
pub struct QueuePositionEntry<'a> {
    #[serde(flatten)]
    position: &'a QueuePosition,
    queued_ms: Option<i64>,
    not_before_ms: Option<i64>,
    ahead: Option<u64>,
}

impl<'a> From<&'a QueuePosition> for QueuePositionEntry<'a> {
    fn from(place: &'a QueuePosition) -> QueuePositionEntry<'a> {
        let waiting = place.waiting.as_ref();
        QueuePositionEntry {
            position: place,
            queued_ms: waiting.map(|waiting| waiting.queued_ms),
            not_before_ms: waiting.and_then(|waiting| waiting.not_before_ms),
            ahead: waiting.map(|waiting| waiting.ahead),
        }
    }
}

/// Describes the position in the queue: `for 12m, priority 5, 3 before it`.
pub fn waiting_text(place: &QueuePosition, now_ms: i64) -> Option<String> {
    let waiting = place.waiting.as_ref()?;
    let since = time_format::format_age(now_ms, waiting.queued_ms);
    let turn = match (waiting.not_before_ms, waiting.ahead) {
        (Some(ms), _) if ms > now_ms => {
            let left = u64::try_from(ms.saturating_sub(now_ms)).unwrap_or(0);
            format!(
                "not before {} UTC (in {})",
                time_format::format_date(ms),
                time_format::format_duration_brief(left)
            )
        }
        (Some(_), _) => "its time has come".to_owned(),
        (None, 0) => "the next one".to_owned(),
        (None, AHEAD_MAX..) => format!("{AHEAD_MAX} or more before it"),
        (None, n) => format!("{n} before it"),
    };
    Some(format!("for {since}, priority {}, {turn}", place.priority))
}

/// Describes the resources that an attempt asks for: `4 GiB, 2 CPUs`.
pub fn resources_text(memory_bytes: Option<u64>, cpu_milli: Option<u64>) -> String {
    let memory = memory_bytes.map_or("the worker's default of memory".to_owned(), format_size);
    attempt_text::resources_text(Some(memory), cpu_milli)
}

/// Describes how often an analysis is tried again, and after which ends.
pub fn retries_text(place: &QueuePosition) -> Option<String> {
    let left = place.retries_left.unwrap_or(0);
    if place.retries == 0 && left == 0 {
        return None;
    }
    let on = match place.retry_on.is_empty() {
        true => String::new(),
        false => format!(
            ", also when {}",
            escape(&place.retry_on.join(", ")).replace('_', " ")
        ),
    };
    let of = format_count(place.retries, "retry", "retries");
    Some(format!("{left} left of {of}{on}"))
}

/// Returns a table of the events, first to last. The record identifies machines by an id; `host` is such an id and the
/// machine's name.
pub fn event_table(events: &[AnalysisEvent], host: (&str, &str)) -> Table {
    let columns = [Align::Left; 5];
    let mut table = Table::new(&columns);
    for event in events {
        let by = event.by.as_deref().map(|by| match by == host.0 {
            true => format!("on {}", escape(host.1)),
            false => format!("by {}", escape(by)),
        });
        table.row([
            format!("{} UTC", time_format::format_date(event.ms)),
            format!("@{}", event.attempt),
            escape(&event.event),
            escape(event.reason.as_deref().unwrap_or_default()).replace('_', " "),
            by.unwrap_or_default(),
        ]);
    }
    table
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use store::QueueWait;

    fn place(waiting: QueueWait) -> QueuePosition {
        QueuePosition {
            priority: 5,
            retries: 2,
            retry_on: vec!["failed".into(), "timed_out".into()],
            retries_left: Some(1),
            memory_bytes: Some(4 << 30),
            cpu_milli: Some(1_500),
            worker: None,
            lease_ms: None,
            cancel_ms: None,
            cancel_by: None,
            waiting: Some(waiting),
        }
    }

    #[test]
    fn a_place_is_told_in_words() {
        let waiting = |not_before_ms, ahead| QueueWait {
            queued_ms: 0,
            not_before_ms,
            ahead,
        };
        let text = |waiting| waiting_text(&place(waiting), 120_000).unwrap();
        assert_eq!(text(waiting(None, 0)), "for 2m, priority 5, the next one");
        assert_eq!(text(waiting(None, 7)), "for 2m, priority 5, 7 before it");
        assert!(text(waiting(None, AHEAD_MAX)).contains("10000 or more"));
        assert!(text(waiting(Some(124_000), 0)).ends_with("UTC (in 4s)"));
        assert!(text(waiting(Some(1), 0)).ends_with("its time has come"));
    }

    #[test]
    fn requested_resources_and_retries_are_shown_in_words() {
        assert_eq!(
            resources_text(Some(4 << 30), Some(1_500)),
            "4 GiB, 1.5 CPUs"
        );
        assert_eq!(resources_text(Some(1 << 20), Some(1_000)), "1 MiB, 1 CPU");
        assert_eq!(resources_text(None, None), "the worker's default of memory");
        let mut place = place(QueueWait {
            queued_ms: 0,
            not_before_ms: None,
            ahead: 0,
        });
        assert_eq!(
            retries_text(&place).unwrap(),
            "1 left of 2 retries, also when failed, timed out"
        );
        (place.retries, place.retries_left) = (0, Some(0));
        assert_eq!(retries_text(&place), None);
    }

    #[test]
    fn a_story_cannot_speak_to_the_terminal() {
        let event = AnalysisEvent {
            attempt: 1,
            ms: 0,
            event: "cancelled".into(),
            reason: Some("\u{1b}[2J".into()),
            by: Some("a\nb".into()),
        };
        let lines = event_table(&[event], ("m", "fox")).lines();
        assert_eq!(
            lines,
            ["1970-01-01 00:00:00 UTC  @1  cancelled  \\x1b[2J  by a\\nb"]
        );
    }
}
