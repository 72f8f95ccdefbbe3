//! Opens the database and the artifact store that a command works with.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use engine::attempt::recorder::Recorder;
use engine::home::Home;
use store::artifacts::{self, Artifacts, ExportContent, ExportedFile, Overwrite};
use store::types::manifest::{ContentHash, OutputPath};
use store::{Location, StoredOutput};

use super::args::StoreArgs;
use engine::settings::{self, RecordSettings, Sources};

/// Opens the record for commands that need one.
pub fn open(args: &StoreArgs) -> anyhow::Result<(Home, Recorder)> {
    let (home, recorder) = open_optional(args)?;
    Ok((home, recorder.context(NO_RECORD)?))
}

const NO_RECORD: &str =
    "there is no record with --db none; name a database with --db, FUMEHOOD_DB or FUMEHOOD_DB_FILE";

/// Opens the record that the settings name.
pub fn open_required(settings: &RecordSettings, home: &Home) -> anyhow::Result<Recorder> {
    Recorder::from_settings(settings, home)?.context(NO_RECORD)
}

/// Opens the record for commands that can also work without one.
pub fn open_optional(args: &StoreArgs) -> anyhow::Result<(Home, Option<Recorder>)> {
    let settings = settings::record_settings(args.given_settings(), &Sources::from_process()?)?;
    let home = home()?;
    let recorder = Recorder::from_settings(&settings, &home)?;
    Ok((home, recorder))
}

pub fn home() -> anyhow::Result<Home> {
    Ok(Home::from_process()?.open()?)
}

/// Returns the location of the record.
pub fn location(settings: &RecordSettings, home: &Home) -> anyhow::Result<Location> {
    Ok(settings.location(home, &|name| std::env::var_os(name))?)
}

/// Exports outputs of an attempt to a directory: those named, or all. Reads from the artifact store of this machine,
/// else from the database. Copies at most `bytes_max`, the size that the record gives.
pub fn export(
    recorder: &mut Recorder,
    (id, attempt): (&str, u32),
    named: &[OutputPath],
    to: &Path,
    overwrite: Overwrite,
    bytes_max: u64,
) -> anyhow::Result<Vec<ExportedFile>> {
    let stored = recorder.with(|store| store.outputs(id, attempt))?;
    let named: HashSet<&OutputPath> = named.iter().collect();
    let wanted = |output: &&StoredOutput| named.is_empty() || named.contains(&output.path);
    let wanted: Vec<&StoredOutput> = stored.iter().filter(wanted).collect();
    let list: Vec<_> = wanted
        .iter()
        .map(|output| (output.path.clone(), output.bytes, output.blake3))
        .collect();
    let by_hash: HashMap<ContentHash, &StoredOutput> = wanted
        .iter()
        .map(|output| (output.blake3, *output))
        .collect();
    let artifacts = recorder.artifacts().ok();
    let mut source = |hash: &ContentHash| {
        let output = by_hash.get(hash);
        let output = output.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        open_output(recorder, artifacts.as_ref(), (id, attempt), output)
    };
    Ok(artifacts::export(
        &mut source,
        &list,
        &resolve_export_directory(to)?,
        overwrite,
        bytes_max,
    )?)
}

/// Resolves the directory to export to. A program chooses the names of its outputs, so nobody but the caller may choose
/// the directory.
pub fn resolve_export_directory(to: &Path) -> anyhow::Result<PathBuf> {
    let resolved = engine::plan::resolve_writable_directory(to);
    let resolved = resolved.with_context(|| format!("open the directory {to:?} to export to"))?;
    resolved.with_context(|| {
        format!("export to {to:?}: it leads through a link that another user made; name the directory itself")
    })
}

/// Returns an output's bytes from the artifact store of this machine or from the database.
pub fn open_output(
    recorder: &mut Recorder,
    artifacts: Option<&Artifacts>,
    (id, attempt): (&str, u32),
    output: &StoredOutput,
) -> io::Result<ExportContent> {
    let here = artifacts.filter(|a| a.id() == output.artifact_store);
    let object = here.map(|artifacts| artifacts.open_object(&output.blake3));
    if let Some(Ok(file)) = object {
        return Ok(ExportContent::File(file));
    }
    let bytes = recorder.with(|store| store.output_content(id, attempt, &output.path));
    match (bytes.map_err(io::Error::other)?, object) {
        (Some(bytes), _) => Ok(ExportContent::Bytes(bytes)),
        (None, Some(Err(e))) => Err(io::Error::other(e)),
        (None, _) => Err(io::Error::other(format!(
            "it is in the artifact store {} of the host {}, and too large to be in the database; fetch it there",
            output.artifact_store, output.host
        ))),
    }
}
