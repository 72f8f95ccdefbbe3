//! An analysis in steps: `workspace create`, `run --in`, `post-process`, `workspace remove`.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Context;
use engine::attempt::record::PostProcessReport;
use engine::attempt::recorder::Recorder;
use engine::recovery::staged_commands::{
    self, DiscardPolicy, PostProcessResult, StagedCommandError,
};
use engine::request::AnalysisId;
use serde::Serialize;
use store::types::escaping::escape_text;

use super::args::{self, StoreArgs};
use super::{attempt_text, exit, ids, messages, print, record_access};
use engine::settings::table::Key;
use engine::settings::{self, Sources};

/// Make or remove the workspace of an analysis that runs in steps.
///
/// `workspace create ID` makes the directory and prints its path; put into it what you like. `run --in ID …` runs there
/// and leaves everything in place. `post-process ID` collects and commits. `workspace remove ID` removes the directory.
#[derive(Clone, Debug, clap::Args)]
pub struct WorkspaceArgs {
    #[command(subcommand)]
    pub command: WorkspaceCommand,
}

#[derive(Clone, Debug, clap::Subcommand)]
pub enum WorkspaceCommand {
    Create(CreateArgs),
    Remove(RemoveArgs),
}

/// Make a workspace, and print its path.
#[derive(Clone, Debug, clap::Args)]
pub struct CreateArgs {
    /// The new analysis's name, [A-Za-z0-9][A-Za-z0-9._-]{0,63}
    #[arg(value_name = "ID")]
    pub id: OsString,

    /// The directory in which to make it [default: /tmp]
    #[arg(long, value_name = "DIR")]
    pub workspace_root: Option<OsString>,

    /// How long to keep it if nothing runs in it [default: 24h]
    #[arg(long, value_name = "TIME")]
    pub keep_for: Option<OsString>,

    /// Print one JSON document (fumehood.workspace/1)
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

/// Remove a workspace that `workspace create` made or a run kept.
#[derive(Clone, Debug, clap::Args)]
pub struct RemoveArgs {
    #[arg(value_name = "ID", help = ids::HELP_ANALYSIS)]
    pub id: OsString,

    /// Remove it even if what ran in it is not committed: its end is then recorded, without outputs
    #[arg(long)]
    pub discard: bool,

    /// Print one JSON document (fumehood.workspace/1)
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

/// Collect and commit what `run --in` left, or finish what could not be committed.
///
/// If all that is done, the configured post_process command is repeated if it failed. This command may be repeated at
/// any time: finished work stays as it is. The exit code is that of the run.
#[derive(Clone, Debug, clap::Args)]
pub struct PostProcessArgs {
    #[arg(value_name = "ID", help = ids::HELP_ANALYSIS)]
    pub id: OsString,

    /// Print one JSON document: the result (fumehood.result/1), or how the command went (fumehood.post-processed/1)
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    id: &'a str,
    workspace: String,
    state: &'static str,
}

pub fn workspace(args: &WorkspaceArgs) -> anyhow::Result<u8> {
    match &args.command {
        WorkspaceCommand::Create(args) => create(args),
        WorkspaceCommand::Remove(args) => remove(args),
    }
}

fn create(args: &CreateArgs) -> anyhow::Result<u8> {
    let id = AnalysisId::new(&args.id.to_string_lossy()).context("make a workspace")?;
    let mut given = args.store.given_settings();
    given.extend(args::one(Key::WorkspaceRoot, &args.workspace_root));
    given.extend(args::one(Key::KeepFor, &args.keep_for));
    let (settings, root, keep_for_ms) =
        settings::workspace_settings(given, &Sources::from_process()?)?;
    let home = record_access::home()?;
    let mut recorder = Recorder::from_settings(&settings, &home)?;
    let path =
        staged_commands::create_workspace(&home, recorder.as_mut(), &id, &root, keep_for_ms)?;
    match args.json {
        true => print_json(&id, &path, "created")?,
        false => print::lines([path.display().to_string()])?,
    }
    Ok(0)
}

fn remove(args: &RemoveArgs) -> anyhow::Result<u8> {
    let (home, mut recorder) = record_access::open_optional(&args.store)?;
    let id = ids::resolve_local(&home, recorder.as_mut(), &args.id)?;
    let discard = match args.discard {
        true => DiscardPolicy::Discard,
        false => DiscardPolicy::Refuse,
    };
    let path = staged_commands::remove_workspace(&home, recorder.as_mut(), &id, discard)?;
    match args.json {
        true => print_json(&id, &path, "removed")?,
        false => messages::line(&format!("removed {}", path.display())),
    }
    Ok(0)
}

fn print_json(id: &AnalysisId, path: &Path, state: &'static str) -> anyhow::Result<()> {
    print::json(&Document {
        schema: "fumehood.workspace/1",
        id: id.as_str(),
        workspace: escape_text(path.as_os_str().as_encoded_bytes()),
        state,
    })
}

#[derive(Serialize)]
struct PostProcessDocument<'a> {
    schema: &'static str,
    id: &'a str,
    attempt: u32,
    status: &'a str,
    /// `null`: there was nothing to do.
    post_process: Option<PostProcessReport>,
}

pub fn post_process(args: &PostProcessArgs) -> anyhow::Result<u8> {
    let (home, mut recorder) = record_access::open(&args.store)?;
    let id = ids::resolve_local(&home, Some(&mut recorder), &args.id)?;
    let (attempt, step) = match staged_commands::post_process(&home, &mut recorder, &id) {
        Ok(PostProcessResult::Committed(record)) => {
            match args.json {
                true => print::json(&record)?,
                false => messages::summary(&record),
            }
            return Ok(exit::code_of_record(&record));
        }
        Ok(PostProcessResult::CommandRun {
            attempt,
            report: step,
        }) => (Some(attempt), Some(step)),
        // Repeating the command gives the same answer.
        Err(StagedCommandError::NothingDue { .. }) => (None, None),
        Err(e) => return Err(e.into()),
    };
    report_post_process(&mut recorder, &id, attempt, step, args.json)
}

/// Reports on an attempt that was committed before.
fn report_post_process(
    recorder: &mut Recorder,
    id: &AnalysisId,
    attempt: Option<u32>,
    step: Option<PostProcessReport>,
    json: bool,
) -> anyhow::Result<u8> {
    let summary = recorder
        .with(|store| store.show(id.as_str(), attempt))?
        .summary;
    let code = match summary.state.is_final() {
        true => exit::code_of_stored(&summary),
        false => exit::NOT_FINISHED,
    };
    if json {
        print::json(&PostProcessDocument {
            schema: "fumehood.post-processed/1",
            id: id.as_str(),
            attempt: summary.attempt,
            status: &summary.state_word,
            post_process: step,
        })?;
        return Ok(code);
    }
    let ended = attempt_text::status_text(&summary);
    match step {
        None => messages::line(&format!(
            "{id} is committed ({ended}), and no post_process command awaits it"
        )),
        Some(PostProcessReport { done: true, .. }) => {
            messages::line(&format!("{id} ({ended}): post-processed"));
        }
        Some(PostProcessReport { message, .. }) => messages::line(&format!(
            "post_process failed: {}\nnothing is lost; repeat it with `fumehood post-process {id}`",
            message.unwrap_or_default()
        )),
    }
    Ok(code)
}
