//! Attempts and outputs in `--json` documents. docs/database.md explains names and meanings. Fields are only ever
//! added.

use serde::Serialize;
use store::{AttemptSummary, StoredOutput};

/// An attempt in every `--json` document.
#[derive(Serialize)]
pub struct AttemptEntry<'a> {
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

impl<'a> From<&'a AttemptSummary> for AttemptEntry<'a> {
    fn from(summary: &'a AttemptSummary) -> AttemptEntry<'a> {
        AttemptEntry {
            id: &summary.id,
            attempt: summary.attempt,
            status: &summary.state_word,
            reason: summary.reason.as_deref(),
            message: summary.message.as_deref(),
            superseded: summary.superseded,
            host: &summary.host,
            created_ms: summary.created_ms,
            started_ms: summary.started_ms,
            ended_ms: summary.ended_ms,
            committed_ms: summary.committed_ms,
            wall_ms: summary.wall_ms,
            exit_code: summary.exit_code,
            signal: summary.signal,
            isolation_level: summary.isolation_level.as_deref(),
            complete: summary.complete,
            outputs_count: summary.outputs_count,
            output_bytes: summary.output_bytes,
            post_process: summary.post_process_word.as_deref(),
        }
    }
}

/// An output in every `--json` document. The path is escaped; `fumehood outputs` accepts it in this form.
#[derive(Serialize)]
pub struct StoredOutputEntry<'a> {
    path: String,
    bytes: u64,
    media_type: &'a str,
    blake3: String,
    modified_ms: i64,
    artifact_store: &'a str,
    host: &'a str,
    /// Whether the database contains the output's bytes.
    inline: bool,
}

impl<'a> From<&'a StoredOutput> for StoredOutputEntry<'a> {
    fn from(output: &'a StoredOutput) -> StoredOutputEntry<'a> {
        StoredOutputEntry {
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
