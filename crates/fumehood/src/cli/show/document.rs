//! The document of `show --json`: fumehood.show/1.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::value::RawValue;
use store::{StoredLog, StoredRemark};

use super::AttemptDetails;
use super::events::{EventEntry, QueuePositionEntry};
use crate::cli::attempt_json::{AttemptEntry, StoredOutputEntry};

#[derive(Serialize)]
pub struct ShowDocument<'a> {
    schema: &'static str,
    #[serde(flatten)]
    entry: AttemptEntry<'a>,
    boot_id: &'a str,
    submitter: Option<&'a str>,
    workspace: Option<&'a str>,
    usage: Option<UsageEntry>,
    isolation: Option<Box<RawValue>>,
    limits: Option<Box<RawValue>>,
    hints: Option<Box<RawValue>>,
    notices: Option<Box<RawValue>>,
    provenance: Option<Box<RawValue>>,
    result: Option<Box<RawValue>>,
    result_note: Option<&'a str>,
    refused: Option<u64>,
    outputs: Vec<StoredOutputEntry<'a>>,
    remarks: Vec<RemarkEntry<'a>>,
    remark_counts: BTreeMap<&'a str, u64>,
    logs: BTreeMap<&'a str, LogEntry>,
    post_process_tries: u64,
    post_process_message: Option<&'a str>,
    post_process_ms: Option<i64>,
    attempts: Vec<AttemptEntry<'a>>,
    /// How it was submitted, and its position in the queue; `null` if it was never submitted.
    queue: Option<QueuePositionEntry<'a>>,
    /// The events of all attempts, first to last.
    events: Vec<EventEntry<'a>>,
}

#[derive(Serialize)]
struct UsageEntry {
    cpu_ms: u64,
    memory_peak_bytes: Option<u64>,
    pids_peak: Option<u64>,
    disk_bytes: u64,
    files: u64,
    oom_kills: u64,
}

#[derive(Serialize)]
struct RemarkEntry<'a> {
    path: &'a str,
    remark: &'a str,
}

impl<'a> From<&'a StoredRemark> for RemarkEntry<'a> {
    fn from(remark: &'a StoredRemark) -> RemarkEntry<'a> {
        RemarkEntry {
            path: &remark.path_text,
            remark: &remark.remark,
        }
    }
}

#[derive(Serialize)]
struct LogEntry {
    bytes: u64,
    dropped_bytes: u64,
    blake3: Option<String>,
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
        blake3: log.object.map(|hash| hash.to_string()),
    };
    ShowDocument {
        schema: "fumehood.show/1",
        entry: AttemptEntry::from(&attempt.summary),
        boot_id: &attempt.boot_id,
        submitter: attempt.submitter.as_deref(),
        workspace: attempt.workspace.as_deref(),
        usage: attempt.usage.as_ref().map(|usage| UsageEntry {
            cpu_ms: usage.cpu_ms,
            memory_peak_bytes: usage.memory_peak_bytes,
            pids_peak: usage.pids_peak,
            disk_bytes: usage.disk_bytes,
            files: usage.files,
            oom_kills: usage.oom_kills,
        }),
        isolation: raw_json(&attempt.isolation_json),
        limits: raw_json(&attempt.limits_json),
        hints: raw_json(&attempt.hints_json),
        notices: raw_json(&attempt.notices_json),
        provenance: raw_json(&attempt.provenance_json),
        result: raw_json(&attempt.result_json),
        result_note: attempt.result_note.as_deref(),
        refused: attempt.refused_count,
        outputs: all.outputs.iter().map(StoredOutputEntry::from).collect(),
        remarks: all.remarks.iter().map(RemarkEntry::from).collect(),
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
        post_process_message: attempt.post_process_message.as_deref(),
        post_process_ms: attempt.post_process_ms,
        attempts: all.attempts.iter().map(AttemptEntry::from).collect(),
        queue: all.place.as_ref().map(QueuePositionEntry::from),
        events: all.events.iter().map(EventEntry::from).collect(),
    }
}
