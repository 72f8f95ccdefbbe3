//! The document of `show --json`: fumehood.show/1.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::value::RawValue;
use store::types::manifest::ContentHash;
use store::{AnalysisEvent, AttemptSummary, AttemptUsage, StoredLog, StoredOutput, StoredRemark};

use super::AttemptDetails;
use super::events::QueuePositionEntry;

#[derive(Serialize)]
pub struct ShowDocument<'a> {
    schema: &'static str,
    #[serde(flatten)]
    summary: &'a AttemptSummary,
    boot_id: &'a str,
    submitter: &'a Option<String>,
    workspace: &'a Option<String>,
    usage: &'a Option<AttemptUsage>,
    isolation: Option<Box<RawValue>>,
    limits: Option<Box<RawValue>>,
    hints: Option<Box<RawValue>>,
    notices: Option<Box<RawValue>>,
    provenance: Option<Box<RawValue>>,
    result: Option<Box<RawValue>>,
    result_note: &'a Option<String>,
    refused: Option<u64>,
    outputs: &'a [StoredOutput],
    remarks: &'a [StoredRemark],
    remark_counts: BTreeMap<&'a str, u64>,
    logs: BTreeMap<&'a str, LogEntry>,
    post_process_tries: u64,
    post_process_message: &'a Option<String>,
    post_process_ms: Option<i64>,
    attempts: &'a [AttemptSummary],
    /// How it was submitted, and its position in the queue; `null` if it was never submitted.
    queue: Option<QueuePositionEntry<'a>>,
    /// The events of all attempts, first to last.
    events: &'a [AnalysisEvent],
}

#[derive(Serialize)]
struct LogEntry {
    bytes: u64,
    dropped_bytes: u64,
    blake3: Option<ContentHash>,
}

/// Returns the JSON text of the database as it is. Text that is not valid JSON is left out.
fn raw_json(text: &Option<String>) -> Option<Box<RawValue>> {
    text.as_deref().and_then(|t| serde_json::from_str(t).ok())
}

pub fn from_details(all: &AttemptDetails) -> ShowDocument<'_> {
    let attempt = &all.attempt;
    let log = |log: &StoredLog| LogEntry {
        bytes: log.total_bytes,
        dropped_bytes: log.dropped_bytes,
        blake3: log.object,
    };
    ShowDocument {
        schema: "fumehood.show/1",
        summary: &attempt.summary,
        boot_id: &attempt.boot_id,
        submitter: &attempt.submitter,
        workspace: &attempt.workspace,
        usage: &attempt.usage,
        isolation: raw_json(&attempt.isolation_json),
        limits: raw_json(&attempt.limits_json),
        hints: raw_json(&attempt.hints_json),
        notices: raw_json(&attempt.notices_json),
        provenance: raw_json(&attempt.provenance_json),
        result: raw_json(&attempt.result_json),
        result_note: &attempt.result_note,
        refused: attempt.refused_count,
        outputs: &all.outputs,
        remarks: &all.remarks,
        remark_counts: all
            .remark_counts
            .iter()
            .map(|count| (count.remark.as_str(), count.count))
            .collect(),
        logs: all
            .logs
            .iter()
            .map(|l| (l.stream.as_str(), log(l)))
            .collect(),
        post_process_tries: attempt.post_process_tries,
        post_process_message: &attempt.post_process_message,
        post_process_ms: attempt.post_process_ms,
        attempts: &all.attempts,
        queue: all.place.as_ref().map(QueuePositionEntry::from),
        events: &all.events,
    }
}
