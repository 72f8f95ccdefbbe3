//! `fumehood db`: migrates, measures and exports the database.

use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use engine::attempt::recorder::Recorder;
use serde::Serialize;
use store::types::units::format_size;
use store::{MigrationResult, Store, StoreStatus};

use super::args::StoreArgs;
use super::print::{self, Align, StdoutWriter, Table, escape, format_count};
use super::run_dirs::{self, NextAction};
use super::{messages, record_access, time_format};

/// Manage the database: its schema, its size, an export.
#[derive(Clone, Debug, clap::Args)]
pub struct DbArgs {
    #[command(subcommand)]
    pub command: DbCommand,
}

#[derive(Clone, Debug, clap::Subcommand)]
pub enum DbCommand {
    Migrate(MigrateArgs),
    Status(StatusArgs),
    Export(ExportArgs),
}

/// Create the schema, or bring it up to date.
///
/// SQLite is migrated automatically. On PostgreSQL the owner of the schema `fumehood` does this once; the owner need
/// not be the role that runs use. Within a major version migrations only add things, so older runners continue to work.
#[derive(Clone, Debug, clap::Args)]
pub struct MigrateArgs {
    /// Print one JSON document (fumehood.db-migrate/1)
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

/// Show how large the record is, how it grows, and what awaits its commit.
#[derive(Clone, Debug, clap::Args)]
pub struct StatusArgs {
    /// Print one JSON document (fumehood.db-status/1)
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

/// Write the whole database as JSON lines, as it is at one moment.
///
/// Each line is a row: {"table": …, "row": {…}}; bytes are {"hex": …}. The files of the artifact store are not
/// included. The export contains the keys of attempts and everything that was recorded: keep it as private as the
/// database.
#[derive(Clone, Debug, clap::Args)]
pub struct ExportArgs {
    /// Write to this file, readable by you alone, instead of stdout; does not overwrite
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Overwrite the file
    #[arg(long, short, requires = "output")]
    pub force: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

pub fn db(args: &DbArgs) -> anyhow::Result<u8> {
    match &args.command {
        DbCommand::Migrate(args) => migrate(args),
        DbCommand::Status(args) => status(args),
        DbCommand::Export(args) => export(args),
    }
}

#[derive(Serialize)]
struct MigrateDocument {
    schema: &'static str,
    database: String,
    from: Option<String>,
    to: String,
}

fn migrate(args: &MigrateArgs) -> anyhow::Result<u8> {
    let (_, recorder) = record_access::open(&args.store)?;
    let migrated = Store::migrate(&recorder.location).map_err(|e| recorder.database_error(e))?;
    let MigrationResult { from, to } = migrated;
    if args.json {
        print::json(&MigrateDocument {
            schema: "fumehood.db-migrate/1",
            database: recorder.location.to_string(),
            from: from.map(|from| from.to_string()),
            to: to.to_string(),
        })?;
        return Ok(0);
    }
    let database = &recorder.location;
    messages::line(&match from {
        None => format!("made schema {to} in {database}"),
        Some(from) if from == to => format!("{database} has schema {to}; nothing to do"),
        Some(from) => format!("migrated {database} from schema {from} to {to}"),
    });
    Ok(0)
}

#[derive(Serialize)]
struct StatusDocument<'a> {
    schema: &'static str,
    database: String,
    #[serde(flatten)]
    status: &'a StoreStatus,
    artifacts: DirectoryUsage,
    home: DirectoryUsage,
    /// Attempts in this home that await their commit.
    awaiting_commit: u64,
}

/// A directory, what Fumehood stores in it, and the free space on its file system.
#[derive(Serialize)]
struct DirectoryUsage {
    path: String,
    objects: Option<u64>,
    bytes: Option<u64>,
    free_bytes: Option<u64>,
}

fn status(args: &StatusArgs) -> anyhow::Result<u8> {
    let (home, mut recorder) = record_access::open(&args.store)?;
    let status = recorder.with(|store| store.status())?;
    let artifacts = artifacts_usage(&recorder)?;
    let waits = |s: &run_dirs::RunDirInfo| {
        matches!(
            s.next_action(),
            NextAction::Finish | NextAction::PostProcess
        )
    };
    let waiting = run_dirs::list_all(&home)
        .iter()
        .filter(|s| waits(s))
        .count() as u64;
    match args.json {
        true => print::json(&StatusDocument {
            schema: "fumehood.db-status/1",
            database: recorder.location.to_string(),
            status: &status,
            artifacts,
            home: DirectoryUsage {
                path: home.path().display().to_string(),
                objects: None,
                bytes: None,
                free_bytes: free_bytes(home.path()),
            },
            awaiting_commit: waiting,
        })?,
        false => {
            let now_ms = recorder.with(|store| store.now_ms())?;
            print_status(&status, &recorder, &artifacts, waiting, now_ms)?;
        }
    }
    Ok(0)
}

fn free_bytes(path: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(path).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Measures the artifact store. Does not create one.
fn artifacts_usage(recorder: &Recorder) -> anyhow::Result<DirectoryUsage> {
    let path = &recorder.artifacts_at;
    let used = match path.join("store.json").exists() {
        true => Some(recorder.artifacts()?.usage()?),
        false => None,
    };
    Ok(DirectoryUsage {
        path: path.display().to_string(),
        objects: used.map(|used| used.objects),
        bytes: used.map(|used| used.bytes),
        free_bytes: free_bytes(path),
    })
}

fn print_status(
    status: &StoreStatus,
    recorder: &Recorder,
    artifacts: &DirectoryUsage,
    waiting: u64,
    now_ms: i64,
) -> anyhow::Result<()> {
    let mut table = Table::new(&[Align::Left, Align::Left]);
    let mut fact = |name: &str, text: String| table.row([name.to_owned(), text]);
    fact("database", escape(&recorder.location.to_string()));
    fact("schema", status.schema.to_string());
    fact("size", format_size(status.bytes));
    let rows: Vec<String> = status
        .rows
        .iter()
        .map(|(t, n)| format!("{n} {}", t.replace('_', " ")))
        .collect();
    fact("rows", rows.join(", "));
    let states: Vec<String> = status
        .states
        .iter()
        .map(|(state, n)| format!("{n} {}", escape(state).replace('_', " ")))
        .collect();
    if !states.is_empty() {
        fact("attempts", states.join(", "));
    }
    if let (Some(oldest), Some(newest)) = (status.oldest_ms, status.newest_ms) {
        let [oldest, newest] = [oldest, newest].map(|ms| time_format::format_age(now_ms, ms));
        fact("from", format!("{oldest} ago to {newest} ago"));
    }
    fact("outputs", format_size(status.output_bytes));
    fact(
        "last 7 days",
        format!(
            "{}, {} of outputs",
            format_count(status.last_7_days_attempts, "attempt", "attempts"),
            format_size(status.last_7_days_output_bytes)
        ),
    );
    let used = match (artifacts.objects, artifacts.bytes) {
        (Some(objects), Some(bytes)) => {
            format!(
                "{}, {} on disk",
                format_count(objects, "object", "objects"),
                format_size(bytes)
            )
        }
        _ => "not there yet".to_owned(),
    };
    fact("artifacts", format!("{}: {used}", escape(&artifacts.path)));
    if let Some(free) = artifacts.free_bytes {
        fact("free there", format_size(free));
    }
    print::lines(table.lines())?;
    if waiting > 0 {
        let what = format_count(
            waiting,
            "attempt awaits its commit",
            "attempts await their commit",
        );
        messages::line(&format!(
            "{what}; `fumehood gc` finishes what it can, `fumehood list` names them"
        ));
    }
    if status.post_process_due > 0 {
        let what = format_count(status.post_process_due, "attempt awaits", "attempts await");
        messages::line(&format!(
            "{what} the post_process command; `fumehood post-process ID` repeats it"
        ));
    }
    Ok(())
}

fn export(args: &ExportArgs) -> anyhow::Result<u8> {
    let (_, mut recorder) = record_access::open(&args.store)?;
    match &args.output {
        None => {
            anyhow::ensure!(
                !io::stdout().is_terminal(),
                "an export is long, and holds keys; redirect it, or name a file with -o"
            );
            let mut out = StdoutWriter::new();
            recorder.with(|store| store.export(&mut out))?;
            out.finish()?;
        }
        Some(path) => export_to(&mut recorder, path, args.force)?,
    }
    Ok(0)
}

/// Writes to a temporary name and renames the file when it is complete.
fn export_to(recorder: &mut Recorder, path: &Path, force: bool) -> anyhow::Result<()> {
    let there = std::fs::symlink_metadata(path);
    match &there {
        Ok(meta) if !meta.is_file() => {
            anyhow::bail!("{path:?} is no plain file, so it is not replaced; redirect stdout to it")
        }
        Ok(_) if !force => anyhow::bail!("{path:?} exists; move it away, or use --force"),
        _ => {}
    }
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".{}.part", std::process::id()));
    let draft = PathBuf::from(draft);
    let write = |recorder: &mut Recorder| -> anyhow::Result<()> {
        let file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&draft)
            .with_context(|| format!("write {draft:?}"))?;
        let mut file = io::BufWriter::new(file);
        recorder.with(|store| store.export(&mut file))?;
        file.flush().context("write the export")?;
        file.get_ref().sync_all().context("write the export")?;
        let flags = match force {
            true => rustix::fs::RenameFlags::empty(),
            false => rustix::fs::RenameFlags::NOREPLACE,
        };
        let here = rustix::fs::CWD;
        rustix::fs::renameat_with(here, &draft, here, path, flags)
            .with_context(|| format!("write {path:?}"))
    };
    let written = write(recorder);
    if written.is_err() {
        // Report the first error; ignore a failure to remove the temporary file.
        let _ = std::fs::remove_file(&draft);
    }
    written
}
