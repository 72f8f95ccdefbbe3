//! `fumehood verify`: checks that everything recorded exists and is unchanged.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;

use anyhow::Context;
use engine::attempt::recorder::Recorder;
use engine::home;
use serde::Serialize;
use store::STREAMS;
use store::artifacts::{Artifacts, ObjectCondition};
use store::types::manifest::ContentHash;
use store::types::units::format_size;

use super::args::StoreArgs;
use super::print::{self, StdoutWriter, escape, format_count};
use super::progress::StderrProgress;
use super::{exit, ids, messages, record_access};

/// Check that everything recorded exists and is unchanged.
///
/// Reads every object that the record refers to in the artifact store of this machine, and lets SQLite check its file.
/// Objects in the artifact stores of other machines are counted, not checked. The exit code is 0 only if nothing is
/// wrong.
#[derive(Clone, Debug, clap::Args)]
pub struct VerifyArgs {
    #[arg(
        value_name = "ID",
        help = "Only what this analysis refers to, in all its attempts; not the database"
    )]
    pub id: Option<OsString>,

    /// Print one JSON document (fumehood.verify/1)
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Default, Serialize)]
struct VerifyReport {
    schema: &'static str,
    sound: bool,
    checked: u64,
    bytes: u64,
    /// Objects in the artifact stores of other machines.
    elsewhere: u64,
    /// Whether some of those are on this machine, in another directory than the one checked.
    beside: bool,
    damaged: Vec<DamagedObject>,
    /// `null`: the database was not checked.
    database_faults: Option<Vec<String>>,
}

#[derive(Serialize)]
struct DamagedObject {
    blake3: String,
    bytes: u64,
    what: String,
    /// The first attempts that refer to it.
    used_by: Vec<String>,
}

/// The number of attempts that are named for an object.
const USERS_MAX: u32 = 5;

pub fn verify(args: &VerifyArgs) -> anyhow::Result<u8> {
    let (_, mut recorder) = record_access::open(&args.store)?;
    let id = args
        .id
        .as_ref()
        .map(|given| ids::resolve_analysis(&mut recorder, given));
    let id = id.transpose()?;
    anyhow::ensure!(
        recorder.artifacts_at.join("store.json").exists(),
        "there is no artifact store in {}; is its disk mounted? Name another with --artifacts",
        recorder.artifacts_at.display()
    );
    let artifacts = recorder.artifacts()?;
    let mut check = ObjectCheck {
        artifacts: &artifacts,
        report: VerifyReport {
            schema: "fumehood.verify/1",
            ..VerifyReport::default()
        },
        bad: Vec::new(),
        progress: (!args.json).then(StderrProgress::new),
    };
    match &id {
        Some(id) => check.one(&mut recorder, id)?,
        None => check.all(&mut recorder)?,
    }
    check.name_users(&mut recorder)?;
    let mut report = check.report;
    let faults = report.database_faults.iter().flatten().count();
    // A store of this machine that is not in the checked directory may be elsewhere or gone. Do not report that as
    // sound.
    report.sound = report.damaged.is_empty() && faults == 0 && !report.beside;
    match args.json {
        true => print::json(&report)?,
        false => print_report(&report)?,
    }
    Ok(match report.sound {
        true => 0,
        false => exit::COULD_NOT_RUN,
    })
}

struct ObjectCheck<'a> {
    artifacts: &'a Artifacts,
    report: VerifyReport,
    bad: Vec<(ContentHash, u64, String)>,
    progress: Option<StderrProgress>,
}

impl ObjectCheck<'_> {
    fn all(&mut self, recorder: &mut Recorder) -> anyhow::Result<()> {
        let faults = recorder.with(|store| store.integrity_faults())?;
        self.report.database_faults = faults;
        let here = self.artifacts.id().to_owned();
        let stores = recorder.with(|store| store.artifact_stores())?;
        for store in stores.iter().filter(|store| store.artifact_store != here) {
            self.report.elsewhere += store.objects;
            self.report.beside |= store.host == home::machine_id();
        }
        recorder.with(|store| {
            store.for_each_object(&here, &mut |hash, bytes| {
                self.object(hash, bytes).map_err(io::Error::other)
            })
        })?;
        Ok(())
    }

    fn one(&mut self, recorder: &mut Recorder, id: &str) -> anyhow::Result<()> {
        let mut objects = BTreeMap::new();
        let mut elsewhere = BTreeMap::new();
        let here = self.artifacts.id();
        let mut note = |is_here: bool, hash, bytes| {
            let objects = if is_here {
                &mut objects
            } else {
                &mut elsewhere
            };
            objects.insert(hash, bytes);
        };
        let machine = home::machine_id();
        for summary in recorder.with(|store| store.attempts(id))? {
            for output in recorder.with(|store| store.outputs(id, summary.attempt))? {
                self.report.beside |= output.artifact_store != here && output.host == machine;
                note(output.artifact_store == here, output.blake3, output.bytes);
            }
            for stream in STREAMS {
                let log = recorder.with(|store| store.log(id, summary.attempt, stream))?;
                let Some(log) = log else { continue };
                if let (Some(hash), Some(bytes)) = (log.object, log.object_bytes) {
                    note(log.artifact_store.as_deref() == Some(here), hash, bytes);
                }
            }
        }
        self.report.elsewhere = elsewhere.len() as u64;
        for (hash, bytes) in &objects {
            self.object(hash, *bytes)?;
        }
        Ok(())
    }

    fn object(&mut self, hash: &ContentHash, bytes: u64) -> anyhow::Result<()> {
        if let Some(progress) = &mut self.progress {
            let (n, bytes) = (self.report.checked, self.report.bytes);
            progress.show_text(|| format!("checked {n} objects, {}", format_size(bytes)));
        }
        let what = match self.artifacts.verify(hash, bytes) {
            Ok(verdict) => describe(&verdict, bytes),
            Err(e) => Some(format!("{:#}", anyhow::Error::from(e))),
        };
        self.report.checked += 1;
        self.report.bytes += bytes;
        if let Some(what) = what {
            self.bad.push((*hash, bytes, what));
        }
        Ok(())
    }

    /// Names the attempts that refer to damaged objects. An object that nobody refers to by now was removed during the
    /// check and is not missing.
    fn name_users(&mut self, recorder: &mut Recorder) -> anyhow::Result<()> {
        if let Some(mut progress) = self.progress.take() {
            progress.clear();
        }
        let here = self.artifacts.id().to_owned();
        for (hash, bytes, what) in std::mem::take(&mut self.bad) {
            let users = recorder.with(|store| store.attempts_using(&here, &hash, USERS_MAX))?;
            if users.is_empty() {
                continue;
            }
            self.report.damaged.push(DamagedObject {
                blake3: hash.to_string(),
                bytes,
                what,
                used_by: users.iter().map(|(id, n)| format!("{id}@{n}")).collect(),
            });
        }
        Ok(())
    }
}

/// Describes what is wrong in a few words.
fn describe(verdict: &ObjectCondition, bytes: u64) -> Option<String> {
    Some(match verdict {
        ObjectCondition::Sound => return None,
        ObjectCondition::Missing => "missing".to_owned(),
        ObjectCondition::NotAFile => "no file".to_owned(),
        ObjectCondition::WrongLength { found } => format!("{found} bytes long instead of {bytes}"),
        ObjectCondition::WrongContent { .. } => "changed: its content has another hash".to_owned(),
        ObjectCondition::WrongMode { found } => {
            format!("mode {found:04o}, which lets it be changed or not be read")
        }
        ObjectCondition::WrongOwner { found } => format!("owned by uid {found}"),
    })
}

fn print_report(report: &VerifyReport) -> anyhow::Result<()> {
    let mut out = StdoutWriter::new();
    for damaged in &report.damaged {
        let users: Vec<String> = damaged.used_by.iter().map(|id| escape(id)).collect();
        out.line(&format!(
            "{}  {}  used by {}",
            damaged.blake3,
            escape(&damaged.what),
            users.join(", ")
        ))?;
    }
    for fault in report.database_faults.iter().flatten() {
        out.line(&format!("database: {}", escape(fault)))?;
    }
    out.finish().context("print what was found")?;
    let checked = format_count(report.checked, "object", "objects");
    let verdict = match report.sound {
        true => "all sound".to_owned(),
        false if report.damaged.is_empty() && report.beside => {
            "sound, but not everything that this machine kept could be".to_owned()
        }
        false => format!(
            "{} damaged or missing; restore them from a backup, or `fumehood rm` what uses them",
            report.damaged.len()
        ),
    };
    messages::line(&format!(
        "{checked} ({}) checked: {verdict}",
        format_size(report.bytes)
    ));
    if report.elsewhere > 0 {
        let what = format_count(report.elsewhere, "object", "objects");
        let advice = match report.beside {
            true => {
                "some were on this machine: if their store is gone they are lost, else name its directory with --artifacts"
            }
            false => "run verify on their machines",
        };
        messages::line(&format!(
            "{what} in other artifact stores not checked; {advice}"
        ));
    }
    Ok(())
}
