//! The events of an analysis, from submission to commit.

use crate::Store;
use crate::database::connection::Connection;
use crate::database::error::StoreError;
use crate::database::rows::{self, RowInserter};
use crate::database::value::{SqlValue, from_row, values};

/// A reason is a word or a sentence of Fumehood. The bound keeps it short, whatever it may be one day.
const REASON_CHARS_MAX: usize = 500;

/// The kinds of events that this Fumehood writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventKind {
    Submitted,
    Claimed,
    Started,
    Ended,
    Committed,
    Cancelled,
    Retried,
    Parked,
}

impl EventKind {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            EventKind::Submitted => "submitted",
            EventKind::Claimed => "claimed",
            EventKind::Started => "started",
            EventKind::Ended => "ended",
            EventKind::Committed => "committed",
            EventKind::Cancelled => "cancelled",
            EventKind::Retried => "retried",
            EventKind::Parked => "parked",
        }
    }
}

/// One event of an analysis. The event is text, because a newer Fumehood may know more kinds.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct AnalysisEvent {
    /// The number of the attempt.
    pub attempt: u32,
    /// When it happened, by the database's clock: Unix time in milliseconds.
    pub ms: i64,
    /// What happened, in one word.
    pub event: String,
    /// A word or a sentence that says more, if there is one.
    pub reason: Option<String>,
    /// Who caused the event: a user, a worker, or a runner.
    pub by: Option<String>,
}

/// An event to be written.
pub(crate) struct EventRecord<'a> {
    pub kind: EventKind,
    pub reason: Option<&'a str>,
    pub by: Option<&'a str>,
}

impl<'a> EventRecord<'a> {
    pub fn new(kind: EventKind, reason: Option<&'a str>, by: Option<&'a str>) -> Self {
        EventRecord { kind, reason, by }
    }
}

/// Writes an event, in the transaction of the change that it describes, so that neither exists without the other.
pub(crate) fn record_event(
    db: &mut Connection,
    id: &str,
    attempt: u32,
    event: &EventRecord,
) -> Result<(), StoreError> {
    let now = db.now_ms()?;
    record_event_at(db, id, attempt, now, event)
}

/// Like [`record_event`], for callers that have already read the database's clock.
pub(crate) fn record_event_at(
    db: &mut Connection,
    id: &str,
    attempt: u32,
    now: i64,
    event: &EventRecord,
) -> Result<(), StoreError> {
    let mut rows = RowInserter::new(db, "note what happened", &rows::EVENTS);
    rows.push(event_row(id, attempt, now, event))?;
    rows.finish()
}

pub(crate) fn event_row<'a>(
    id: &'a str,
    attempt: u32,
    now: i64,
    event: &EventRecord<'a>,
) -> [SqlValue<'a>; 6] {
    let cut = |text: &'a str| match text.char_indices().nth(REASON_CHARS_MAX) {
        Some((at, _)) => &text[..at],
        None => text,
    };
    values![
        id,
        attempt,
        now,
        event.kind.as_str(),
        event.reason.map(cut),
        event.by.map(cut)
    ]
}

impl Store {
    /// The events of an analysis, oldest first.
    pub fn events(&mut self, id: &str) -> Result<Vec<AnalysisEvent>, StoreError> {
        let what = "read what happened";
        let sql = "SELECT attempt, ms, event, reason, by FROM events WHERE id = $1 ORDER BY seq";
        self.db.fetch_all(what, sql, &values![id])
    }
}

from_row!(AnalysisEvent: attempt, ms, event, reason, by);
