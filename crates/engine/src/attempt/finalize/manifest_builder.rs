//! Builds the manifest from what the program left, and the final record from the manifest.

use std::io::{self, Read};
use std::os::fd::BorrowedFd;

use crate::attempt::error::CommitError;
use crate::attempt::finalize::ended_attempt::{EndedAttempt, Leftovers};
use crate::attempt::record::{CollectionSummary, OutputSummary, Reason, Record, Status};
use crate::collect::{
    self, CollectProgress, CollectionBounds, CollectionRules, Globs, StagedInput,
};
use crate::provenance::files::open_regular;
use crate::run_dir::StateFile;
use store::types::manifest::{
    self, CollectedOutputs, ContentHash, Manifest, Output, Remark, RemarkedPath,
};
use store::types::result_value;

/// The output that is also stored as JSON.
pub(super) const RESULT: &[u8] = b"result.json";

pub(crate) fn build_manifest(
    ended: &EndedAttempt<'_>,
    progress: &mut dyn FnMut(CollectProgress),
) -> Result<Manifest, CommitError> {
    let mut manifest = Manifest {
        version: manifest::VERSION,
        ..Manifest::default()
    };
    let rules = &ended.commit_plan.collection;
    let expects = Globs::new(&rules.expects)?;
    if let Leftovers::Directory { dir, owner_uid } = ended.leftovers {
        let wanted = Globs::new(&rules.outputs)?;
        // If a power cut damaged the list of inputs, the inputs are collected as outputs.
        let staged_inputs: Option<Vec<StagedInput>> = ended
            .dir
            .read_file(StateFile::StagedInputs)
            .unwrap_or_default();
        let staged_inputs = staged_inputs.unwrap_or_default();
        manifest.collected = collect::collect(
            dir,
            &CollectionRules {
                bounds: CollectionBounds {
                    total_bytes: rules.total_bytes_max,
                    file_bytes: rules.file_bytes_max,
                    outputs: rules.outputs_max,
                    depth: rules.depth_max,
                },
                owner_uid,
                wanted: (!rules.outputs.is_empty()).then_some(&wanted),
                expected: (!rules.expects.is_empty()).then_some(&expects),
                staged_inputs: &staged_inputs,
                modes: ended.modes(),
            },
            progress,
        )?;
        match result_text(dir, &manifest.collected.outputs) {
            None => {}
            Some(Ok(text)) => manifest.result = Some(text),
            Some(Err(note)) => manifest.result_note = Some(note),
        }
    }
    if let Leftovers::Gone = ended.leftovers {
        manifest.collected = all_outputs_lost();
    }
    manifest.missing = expects.unmatched(&manifest.collected.outputs);
    Ok(manifest)
}

/// What is committed for a workspace that is gone or was discarded.
pub(crate) fn all_outputs_lost() -> CollectedOutputs {
    let mut collected = CollectedOutputs::default();
    collected.remark_counts.insert(Remark::Lost, 1);
    collected.remarks.push(RemarkedPath {
        path: String::from("."),
        remark: Remark::Lost,
    });
    collected
}

/// The text of `result.json` at the top of the workspace, if it is an output and both databases accept its value.
fn result_text(dir: BorrowedFd<'_>, outputs: &[Output]) -> Option<Result<String, String>> {
    let output = outputs.iter().find(|o| o.path.as_bytes() == RESULT)?;
    if output.bytes > result_value::BYTES_MAX as u64 {
        let bytes = usize::try_from(output.bytes).unwrap_or(usize::MAX);
        return Some(Err(
            result_value::ResultRejection::TooLarge { bytes }.to_string()
        ));
    }
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = open_regular(dir, RESULT)?;
        file.take(output.bytes + 1).read_to_end(&mut bytes)?;
        match ContentHash::of(&bytes) == output.blake3 {
            true => Ok(bytes),
            false => Err(io::Error::other("it changed while it was read")),
        }
    };
    Some(match read() {
        Ok(bytes) => result_value::check(&bytes).map_err(|e| e.to_string()),
        Err(e) => Err(format!("it could not be read: {e}")),
    })
}

/// The final record: the outcome of the program, changed and completed by what collection found.
pub(super) fn final_record(record: &Record, manifest: &Manifest) -> Record {
    let mut record = record.clone();
    let collected = &manifest.collected;
    if record.status == Status::Succeeded && !manifest.missing.is_empty() {
        record.status = Status::Failed;
        record.reason = Reason::MissingOutput;
        record.message = Some(format!("no output matches {}", manifest.missing.join(", ")));
    }
    let note = manifest.result_note.clone();
    record.collection = CollectionSummary::new(collected, &manifest.missing, note);
    record.collection.complete = record.status == Status::Succeeded && !collected.loses_content();
    record.outputs = collected.outputs.iter().map(OutputSummary::from).collect();
    record
}
