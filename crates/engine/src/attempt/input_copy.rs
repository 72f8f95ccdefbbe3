//! Copies the inputs into the workspace, and records what they were and where they came from.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use sandbox::spec::Limits;

use crate::attempt::context::PlannedRun;
use crate::attempt::error::AttemptError;
use crate::attempt::states::OwnedRun;
use crate::collect::{self, StagedInput};
use crate::plan::Plan;
use crate::provenance::{self, InspectionRights, Provenance};
use crate::request::{Command, QueueWriters, ReadRoot, RequestOrigin};
use crate::run_dir::{Durability, StateFile};
use crate::settings::Request;
use crate::workspace::copy_in::{self, CopyBudget, CopyError};

pub(super) fn copy_inputs(
    workspace: BorrowedFd<'_>,
    inputs: &[(PathBuf, PathBuf)],
    owner: Option<(u32, u32)>,
    limits: &Limits,
) -> Result<(), CopyError> {
    let mut budget = CopyBudget {
        bytes: limits.disk_bytes,
        files: limits.files,
    };
    for (source, name) in inputs {
        copy_in::copy_in(source, workspace, name, owner, &mut budget)?;
    }
    Ok(())
}

impl OwnedRun {
    /// Writes down the files in the workspace with their hashes. The record says what a result was made from, and a
    /// file that the program leaves unchanged is not an output.
    pub(super) fn record_staged_inputs(
        &self,
        workspace: BorrowedFd<'_>,
        plan: &Plan,
    ) -> Result<Vec<StagedInput>, AttemptError> {
        if plan.inputs.is_empty() && self.prepared_state.is_none() {
            return Ok(Vec::new());
        }
        let staged_inputs = collect::list_staged_inputs(workspace, self.owner_uid())?;
        if !staged_inputs.is_empty() {
            let file = StateFile::StagedInputs;
            self.dir
                .write_file(file, &staged_inputs, Durability::Unsynced)?;
        }
        Ok(staged_inputs)
    }

    /// Writes down what the result is made from. This takes time: it reads the project's history and the list of
    /// libraries.
    pub(super) fn record_provenance(
        &self,
        run: &PlannedRun<'_>,
        staged_inputs: &[StagedInput],
    ) -> Result<(), AttemptError> {
        let provenance = gather_provenance(run.request, run.plan, staged_inputs);
        let file = StateFile::Provenance;
        Ok(self
            .dir
            .write_file(file, &provenance, Durability::Unsynced)?)
    }
}

/// What the result is made from.
fn gather_provenance(request: &Request, plan: &Plan, staged_inputs: &[StagedInput]) -> Provenance {
    let workspace = crate::workspace::path_for(&plan.workspace_root, &request.id);
    let shown_at = |name: &str| {
        let at = workspace.join(name);
        let view = plan.views.iter().find(|view| view.target.as_path() == at);
        view.map(|view| view.source.as_path())
    };
    let script = match &request.command {
        Command::Script { script, .. } => {
            let name = script.file_name().map(|name| name.as_encoded_bytes());
            let mut puts = staged_inputs.iter();
            let put = puts.find(|put| Some(put.path.as_bytes()) == name);
            let lay_at = match &request.asked_by {
                RequestOrigin::Queue {
                    submitted_script: Some(from),
                    ..
                } => from,
                _ => script,
            };
            Some((lay_at.as_path(), put.map(|put| put.blake3)))
        }
        Command::Argv(_) | Command::Shell => None,
    };
    let input = |put: &StagedInput| (put.path.text(), put.bytes, put.blake3);
    let inputs: Vec<_> = staged_inputs.iter().map(input).collect();
    let inside = |read: &ReadRoot| read.inside.as_ref().unwrap_or(&read.host).clone();
    let reads = request.reads.iter();
    let reads: Vec<_> = reads.map(|r| (r.host.clone(), inside(r))).collect();
    let rights = match request.asked_by {
        RequestOrigin::Queue {
            writers: QueueWriters::OtherUsers,
            ..
        } => InspectionRights::WorkerOnly,
        _ => InspectionRights::SharedWithCaller,
    };
    // The variables of another user may name any directory, so do not look for libraries there.
    let asked: &[_] = match rights {
        InspectionRights::SharedWithCaller => &request.env,
        InspectionRights::WorkerOnly => &[],
    };
    let set = plan.runtime.env.iter().chain(asked);
    let inside_env: Vec<_> = set.cloned().collect();
    provenance::gather(&provenance::ProvenanceFacts {
        rights,
        argv: &plan.argv,
        script,
        inputs: &inputs,
        env: &request.env,
        secret_names: &request.secret_env,
        program: &plan.program,
        prefixes: plan.runtime.prefixes.get(..1).unwrap_or_default(),
        inside_env: &inside_env,
        project: match &request.asked_by {
            // The submission came without a project.
            RequestOrigin::Queue { staged, .. } if plan.project.starts_with(staged) => {
                Path::new("")
            }
            _ => &plan.project,
        },
        data: shown_at("data"),
        docs: shown_at("docs"),
        reads: &reads,
    })
}
