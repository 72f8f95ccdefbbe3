//! Attempts and outputs as `--json` shows them. Names and meanings are those of docs/database.md; only ever added to.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::value::RawValue;
use store::{AttemptSummary, StoredLog, StoredOutput, StoredRemark};

use super::detail::Everything;
use super::events::{EventEntry, PlaceEntry};

/// An attempt, as every `--json` shows it.
#[derive(Serialize)]
pub struct Entry<'a> {
    pub id: &'a str,
    pub attempt: u32,
    pub status: &'a str,
    pub reason: Option<&'a str>,
    pub message: Option<&'a str>,
    pub superseded: bool,
    pub host: &'a str,
    pub created_ms: i64,
    pub started_ms: Option<i64>,
    pub ended_ms: Option<i64>,
    pub committed_ms: Option<i64>,
    pub wall_ms: Option<u64>,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub isolation_level: Option<&'a str>,
    pub complete: Option<bool>,
    pub outputs_count: Option<u64>,
    pub output_bytes: Option<u64>,
    pub post_process: Option<&'a str>,
}

impl<'a> From<&'a AttemptSummary> for Entry<'a> {
    fn from(listed: &'a AttemptSummary) -> Entry<'a> {
        Entry {
            id: &listed.id,
            attempt: listed.attempt,
            status: &listed.state_word,
            reason: listed.reason.as_deref(),
            message: listed.message.as_deref(),
            superseded: listed.superseded,
            host: &listed.host,
            created_ms: listed.created_ms,
            started_ms: listed.started_ms,
            ended_ms: listed.ended_ms,
            committed_ms: listed.committed_ms,
            wall_ms: listed.wall_ms,
            exit_code: listed.exit_code,
            signal: listed.signal,
            isolation_level: listed.isolation_level.as_deref(),
            complete: listed.complete,
            outputs_count: listed.outputs_count,
            output_bytes: listed.output_bytes,
            post_process: listed.post_process_word.as_deref(),
        }
    }
}

#[derive(Serialize)]
pub struct Document<'a> {
    schema: &'static str,
    #[serde(flatten)]
    entry: Entry<'a>,
    boot_id: &'a str,
    submitter: Option<&'a str>,
    workspace: Option<&'a str>,
    usage: Option<Used>,
    isolation: Option<Box<RawValue>>,
    limits: Option<Box<RawValue>>,
    hints: Option<Box<RawValue>>,
    notices: Option<Box<RawValue>>,
    provenance: Option<Box<RawValue>>,
    result: Option<Box<RawValue>>,
    result_note: Option<&'a str>,
    refused: Option<u64>,
    outputs: Vec<OutputEntry<'a>>,
    remarks: Vec<RemarkEntry<'a>>,
    remark_counts: BTreeMap<&'a str, u64>,
    logs: BTreeMap<&'a str, LogEntry>,
    post_process_tries: u64,
    post_process_message: Option<&'a str>,
    post_process_ms: Option<i64>,
    attempts: Vec<Entry<'a>>,
    /// What it was submitted with, and where it stands; `null` if it never was.
    queue: Option<PlaceEntry<'a>>,
    /// Of all attempts, first to last.
    events: Vec<EventEntry<'a>>,
}

#[derive(Serialize)]
struct Used {
    cpu_ms: u64,
    memory_peak_bytes: Option<u64>,
    pids_peak: Option<u64>,
    disk_bytes: u64,
    files: u64,
    oom_kills: u64,
}

/// An output, as every `--json` shows it. The path is escaped, and `outputs` takes it so.
#[derive(Serialize)]
pub struct OutputEntry<'a> {
    path: String,
    bytes: u64,
    media_type: &'a str,
    blake3: String,
    modified_ms: i64,
    artifact_store: &'a str,
    host: &'a str,
    /// Whether the database has its bytes.
    inline: bool,
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

impl<'a> From<&'a StoredOutput> for OutputEntry<'a> {
    fn from(output: &'a StoredOutput) -> OutputEntry<'a> {
        OutputEntry {
            path: output.path.text(),
            bytes: output.bytes,
            media_type: &output.media_type,
            blake3: output.blake3.to_string(),
            modified_ms: output.modified_ms,
            artifact_store: &output.artifact_store,
            host: &output.host,
            inline: output.inline,
        }
    }
}

/// As the database has it; what is no JSON there is not passed off as such.
fn raw(text: &Option<String>) -> Option<Box<RawValue>> {
    text.as_deref().and_then(|t| serde_json::from_str(t).ok())
}

pub fn of(all: &Everything) -> Document<'_> {
    let attempt = &all.attempt;
    let log = |log: &StoredLog| LogEntry {
        bytes: log.total_bytes,
        dropped_bytes: log.dropped_bytes,
        blake3: log.object.map(|hash| hash.to_string()),
    };
    Document {
        schema: "fumehood.show/1",
        entry: Entry::from(&attempt.summary),
        boot_id: &attempt.boot_id,
        submitter: attempt.submitter.as_deref(),
        workspace: attempt.workspace.as_deref(),
        usage: attempt.usage.as_ref().map(|usage| Used {
            cpu_ms: usage.cpu_ms,
            memory_peak_bytes: usage.memory_peak_bytes,
            pids_peak: usage.pids_peak,
            disk_bytes: usage.disk_bytes,
            files: usage.files,
            oom_kills: usage.oom_kills,
        }),
        isolation: raw(&attempt.isolation_json),
        limits: raw(&attempt.limits_json),
        hints: raw(&attempt.hints_json),
        notices: raw(&attempt.notices_json),
        provenance: raw(&attempt.provenance_json),
        result: raw(&attempt.result_json),
        result_note: attempt.result_note.as_deref(),
        refused: attempt.refused_count,
        outputs: all.outputs.iter().map(OutputEntry::from).collect(),
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
        attempts: all.attempts.iter().map(Entry::from).collect(),
        queue: all.place.as_ref().map(PlaceEntry::from),
        events: all.events.iter().map(EventEntry::from).collect(),
    }
}
