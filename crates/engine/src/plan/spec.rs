//! From a [`Plan`] to the sandbox's [`Spec`].

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

use sandbox::spec::{
    Bytes, ConfinementLevel, HostPath, InsidePath, LaunchPurpose, Layer, Limits, ProgramIdentity,
    ReadOnlyView, Spec, Terminal, WorkspaceKind,
};

use super::environment::environment;
use super::error::PlanError;
use super::planning::Plan;
use super::views::merge;
use crate::settings::Request;

/// The parameters of a run that are known only when it starts.
pub struct StartParameters<'a> {
    pub identity: ProgramIdentity,
    pub kind: WorkspaceKind,
    pub terminal: Terminal,
    pub level: ConfinementLevel,
    pub required: &'a BTreeSet<Layer>,
}

/// Builds the spec of one run.
pub fn build_spec(
    plan: &Plan,
    request: &Request,
    limits: &Limits,
    place: StartParameters<'_>,
) -> Result<Spec, PlanError> {
    let workspace = crate::workspace::path_for(&plan.workspace_root, &request.id);
    let views = match place.level {
        ConfinementLevel::Full => plan.views.clone(),
        ConfinementLevel::Landlock => views_at_source_paths(&plan.views),
    };
    let env = environment(request, &plan.runtime, limits, place.level, &workspace);
    let bytes = |text: &OsString| Bytes::from(text.as_os_str());
    Ok(Spec {
        program: InsidePath::new(&plan.program),
        argv: plan.argv.iter().map(bytes).collect(),
        env: env.iter().map(|(k, v)| (bytes(k), bytes(v))).collect(),
        workspace: HostPath::new(workspace),
        workspace_kind: place.kind,
        views,
        identity: place.identity,
        limits: limits.clone(),
        host_name: String::from("fumehood"),
        terminal: place.terminal,
        level: place.level,
        shared_memory: request.shared_memory,
        purpose: LaunchPurpose::Run,
        required: place.required.clone(),
        disabled_layers: sandbox::spec::DisabledLayers::from_environment(),
    })
}

/// Without mounts each source is visible only at its own path, so each source becomes one view.
fn views_at_source_paths(views: &[ReadOnlyView]) -> Vec<ReadOnlyView> {
    let mut own: Vec<ReadOnlyView> = Vec::new();
    for view in views {
        let target = InsidePath::new(view.source.as_path());
        match own.iter_mut().find(|known| known.source == view.source) {
            Some(known) => merge(known, view),
            None => own.push(ReadOnlyView {
                target,
                ..view.clone()
            }),
        }
    }
    own
}

/// The symlinks to create in the workspace at level `landlock`, as (name, target). They replace the mounts of level
/// `full`. Outside the workspace a view cannot have another path than its source, unless the host already has such a
/// path.
pub fn workspace_links(
    plan: &Plan,
    request: &Request,
) -> Result<Vec<(PathBuf, PathBuf)>, PlanError> {
    let workspace = crate::workspace::path_for(&plan.workspace_root, &request.id);
    let mut links = Vec::new();
    for view in &plan.views {
        let (source, target) = (view.source.as_path(), view.target.as_path());
        match target.strip_prefix(&workspace) {
            Ok(name) if name.components().count() == 1 => {
                links.push((name.to_path_buf(), source.to_path_buf()));
            }
            Err(_) if target.canonicalize().is_ok_and(|real| real == source) => {}
            _ => {
                return Err(PlanError::BadTarget {
                    inside: target.to_path_buf(),
                    why: "at level landlock a path is seen where it is, or by a name at the top of the workspace",
                });
            }
        }
    }
    Ok(links)
}
