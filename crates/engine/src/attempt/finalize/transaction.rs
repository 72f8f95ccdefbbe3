//! The one transaction that commits an attempt.

use std::io::{self, Read};

use serde::Serialize;
use serde_json::value::RawValue;

use crate::attempt::error::CommitError;
use crate::attempt::finalize::ended_attempt::EndedAttempt;
use crate::attempt::record::{CommitState, CommitSummary, Record};
use crate::attempt::recorder::Recorder;
use crate::provenance;
use crate::request::{CollectionSettings, IsolationLevel};
use crate::run_dir::StateFile;
use store::CommitOutcome;
use store::artifacts::Artifacts;
use store::types::crash_points::{self, CrashPoint};
use store::types::manifest::{Manifest, Output};

/// If not all outputs fit into the database, the smallest are stored there: there are usually more small outputs than
/// large ones, and people look at the small ones first. Returns the size of the largest of those, and how many of that
/// size fit.
fn largest_inline(outputs: &[Output], rules: &CollectionSettings) -> (u64, usize) {
    let mut sizes: Vec<u64> = outputs.iter().map(|output| output.bytes).collect();
    sizes.sort_unstable();
    let mut room = rules.inline_total_bytes_max;
    let fits = |bytes: &u64| {
        let fits = *bytes <= rules.inline_bytes_max.min(room);
        room = room.saturating_sub(*bytes);
        fits
    };
    let small: Vec<u64> = sizes.into_iter().take_while(fits).collect();
    let largest = small.last().copied().unwrap_or(0);
    let remaining_of_largest = small.iter().filter(|bytes| **bytes == largest).count();
    (largest, remaining_of_largest)
}

pub(super) fn commit(
    ended: &EndedAttempt<'_>,
    recorder: &mut Recorder,
    record: &mut Record,
    manifest: &Manifest,
    artifacts: Option<&Artifacts>,
    logs: &[store::LogRow],
) -> Result<(), CommitError> {
    let rules = &ended.commit_plan.collection;
    let (largest, mut remaining_of_largest) = largest_inline(&manifest.collected.outputs, rules);
    let mut content = |output: &Output| -> io::Result<Option<Vec<u8>>> {
        let Some(artifacts) = artifacts else {
            return Ok(None);
        };
        if output.bytes > largest || output.bytes == largest && remaining_of_largest == 0 {
            return Ok(None);
        }
        remaining_of_largest -= usize::from(output.bytes == largest);
        let mut bytes = Vec::new();
        let object = artifacts.open_object(&output.blake3);
        object
            .map_err(io::Error::other)?
            .take(output.bytes)
            .read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    };
    let provenance = ended
        .dir
        .read_bytes(StateFile::Provenance.name(), PROVENANCE_BYTES_MAX)?;
    let provenance = provenance.and_then(|bytes| String::from_utf8(bytes).ok());
    // Leave out provenance that a power cut tore, so that the database does not refuse the rest.
    let provenance = provenance.filter(|text| serde_json::from_str::<&RawValue>(text).is_ok());
    let [isolation, limits, hints, notices] = json_of(record);
    let workspace = record.workspace.to_string_lossy().into_owned();
    let database = recorder.location.to_string();
    let ms = |time: u64| i64::try_from(time).ok();
    let ran = record.isolation.level.is_some();
    let mut commit = store::Commit {
        begin: store::NewAttempt {
            id: record.id.as_str(),
            key: &ended.commit_plan.key,
            replace: false,
            host: &ended.run.host,
            boot_id: &ended.run.boot_id,
            submitter: Some(&provenance::submitter_name()),
            workspace: Some(&workspace),
            provenance: provenance.as_deref(),
        },
        attempt: record.attempt,
        state: record.status.into(),
        reason: record.reason.as_str(),
        message: record.message.as_deref(),
        started_ms: ran.then(|| ms(record.times.started_ms)).flatten(),
        ended_ms: ms(record.times.ended_ms),
        usage: ran.then(|| usage_of(record)),
        exit_code: record.exit_code,
        signal: record.signal,
        isolation_level: record.isolation.level.map(IsolationLevel::as_str),
        isolation_json: Some(&isolation),
        limits_json: Some(&limits),
        hints_json: Some(&hints),
        notices_json: Some(&notices),
        complete: record.collection.complete,
        output_bytes: manifest.collected.bytes,
        refused_count: record.collection.refused,
        result: manifest.result.as_deref(),
        result_note: manifest.result_note.as_deref(),
        post_process: match recorder.post_process {
            Some(_) => store::PostProcessState::Pending,
            None => store::PostProcessState::NotAsked,
        },
        outputs: &manifest.collected.outputs,
        artifact_store: artifacts.map_or(&ended.commit_plan.artifacts_id, Artifacts::id),
        remarks: &manifest.collected.remarks,
        remark_counts: &manifest.collected.remark_counts,
        logs,
        content: &mut content,
        before_commit: &mut || crash_points::reach(CrashPoint::TransactionOpen),
    };
    if recorder.store()?.id() != ended.commit_plan.database_id {
        return Err(CommitError::OtherDatabase { database });
    }
    let committed = recorder.with(|store| store.commit(&mut commit))?;
    let state = match committed {
        CommitOutcome::Now | CommitOutcome::Already => CommitState::Committed,
        CommitOutcome::Recreated { attempt } => {
            record.attempt = attempt;
            CommitState::Committed
        }
        CommitOutcome::Superseded { attempt } => {
            record.attempt = attempt;
            CommitState::Superseded
        }
    };
    record.commit = CommitSummary {
        state,
        database: Some(database),
        message: None,
    };
    Ok(())
}

/// More than the database takes of packages and inputs. A larger file was not written by Fumehood.
const PROVENANCE_BYTES_MAX: u64 = 64 << 20;

/// Serializing these types cannot fail.
fn json_of(record: &Record) -> [String; 4] {
    fn json<T: Serialize>(value: &T) -> String {
        serde_json::to_string(value).unwrap_or_else(|_| String::from("null"))
    }
    [
        json(&record.isolation.layers),
        json(&record.limits),
        json(&record.hints),
        json(&record.notices),
    ]
}

fn usage_of(record: &Record) -> store::AttemptUsage {
    store::AttemptUsage {
        wall_ms: record.times.wall_ms,
        cpu_ms: record.cpu_ms,
        memory_peak_bytes: record.memory_peak_bytes,
        pids_peak: record.pids_peak,
        disk_bytes: record.disk_bytes,
        files: record.files,
        oom_kills: record.oom_kills,
    }
}
