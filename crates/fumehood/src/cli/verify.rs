//! `fumehood verify`: whether everything that is recorded is there, and is what it was.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::Context;
use engine::attempt::recorder::Recorder;
use engine::home;
use serde::Serialize;
use store::STREAMS;
use store::artifacts::{Artifacts, ObjectCondition};
use store::types::manifest::ContentHash;
use store::types::units::format_size;

use super::args::StoreArgs;
use super::print::{self, Out, clean, counted};
use super::{exit, ids, ledger, show};

/// Check that everything recorded is there, whole and unchanged.
///
/// Every object that the record refers to in the artifact store of this machine is read, and SQLite checks its file. Those in the artifact stores of other machines are counted, not checked. The exit code is 0 only
/// if nothing is wrong.
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

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    sound: bool,
    checked: u64,
    bytes: u64,
    /// Objects of the artifact stores of other machines.
    elsewhere: u64,
    /// Some of those are on this machine, in another directory than the one that was looked at.
    beside: bool,
    damaged: Vec<Damaged>,
    /// `null`: the database was not checked.
    database_faults: Option<Vec<String>>,
}

#[derive(Serialize)]
struct Damaged {
    blake3: String,
    bytes: u64,
    what: String,
    /// The first attempts that refer to it.
    used_by: Vec<String>,
}

/// How many of those who refer to an object are named.
const USERS_MAX: u32 = 5;

pub fn verify(args: &VerifyArgs) -> anyhow::Result<u8> {
    let (_, mut ledger) = ledger::open(&args.store)?;
    let id = args
        .id
        .as_ref()
        .map(|given| ids::analysis(&mut ledger, given));
    let id = id.transpose()?;
    anyhow::ensure!(
        ledger.artifacts_at.join("store.json").exists(),
        "there is no artifact store in {}; is its disk mounted? Name another with --artifacts",
        ledger.artifacts_at.display()
    );
    let artifacts = ledger.artifacts()?;
    let mut check = Check {
        artifacts: &artifacts,
        report: Report {
            schema: "fumehood.verify/1",
            sound: true,
            checked: 0,
            bytes: 0,
            elsewhere: 0,
            beside: false,
            damaged: Vec::new(),
            database_faults: None,
        },
        bad: Vec::new(),
        progress: (!args.json && io::stderr().is_terminal()).then(Instant::now),
    };
    match &id {
        Some(id) => check.one(&mut ledger, id)?,
        None => check.all(&mut ledger)?,
    }
    check.name_users(&mut ledger)?;
    let mut report = check.report;
    let faults = report.database_faults.iter().flatten().count();
    // A store of this machine that is not where we look may be another, or gone: not to be taken for sound.
    report.sound = report.damaged.is_empty() && faults == 0 && !report.beside;
    match args.json {
        true => print::json(&report)?,
        false => tell(&report)?,
    }
    Ok(match report.sound {
        true => 0,
        false => exit::COULD_NOT_RUN,
    })
}

struct Check<'a> {
    artifacts: &'a Artifacts,
    report: Report,
    bad: Vec<(ContentHash, u64, String)>,
    /// When the line on the terminal was last drawn.
    progress: Option<Instant>,
}

impl Check<'_> {
    fn all(&mut self, ledger: &mut Recorder) -> anyhow::Result<()> {
        let faults = ledger.with(|store| store.integrity_faults())?;
        self.report.database_faults = faults;
        let here = self.artifacts.id().to_owned();
        let stores = ledger.with(|store| store.artifact_stores())?;
        for store in stores.iter().filter(|store| store.artifact_store != here) {
            self.report.elsewhere += store.objects;
            self.report.beside |= store.host == home::machine_id();
        }
        ledger.with(|store| {
            store.for_each_object(&here, &mut |hash, bytes| {
                self.object(hash, bytes).map_err(io::Error::other)
            })
        })?;
        Ok(())
    }

    fn one(&mut self, ledger: &mut Recorder, id: &str) -> anyhow::Result<()> {
        let mut objects = BTreeMap::new();
        let mut elsewhere = BTreeMap::new();
        let here = self.artifacts.id();
        let machine = home::machine_id();
        for listed in ledger.with(|store| store.attempts(id))? {
            for output in ledger.with(|store| store.outputs(id, listed.attempt))? {
                self.report.beside |= output.artifact_store != here && output.host == machine;
                match output.artifact_store == here {
                    true => objects.insert(output.blake3, output.bytes),
                    false => elsewhere.insert(output.blake3, output.bytes),
                };
            }
            for stream in STREAMS {
                let log = ledger.with(|store| store.log(id, listed.attempt, stream))?;
                let Some(log) = log else { continue };
                if let (Some(hash), Some(bytes)) = (log.object, log.object_bytes) {
                    match log.artifact_store.as_deref() == Some(here) {
                        true => objects.insert(hash, bytes),
                        false => elsewhere.insert(hash, bytes),
                    };
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
        self.draw();
        let what = match self.artifacts.verify(hash, bytes) {
            Ok(verdict) => described(&verdict, bytes),
            Err(e) => Some(format!("{:#}", anyhow::Error::from(e))),
        };
        self.report.checked += 1;
        self.report.bytes += bytes;
        if let Some(what) = what {
            self.bad.push((*hash, bytes, what));
        }
        Ok(())
    }

    /// What nobody refers to by now was removed while we looked, and is not missing.
    fn name_users(&mut self, ledger: &mut Recorder) -> anyhow::Result<()> {
        self.clear();
        let here = self.artifacts.id().to_owned();
        for (hash, bytes, what) in std::mem::take(&mut self.bad) {
            let users = ledger.with(|store| store.attempts_using(&here, &hash, USERS_MAX))?;
            if users.is_empty() {
                continue;
            }
            self.report.damaged.push(Damaged {
                blake3: hash.to_string(),
                bytes,
                what,
                used_by: users.iter().map(|(id, n)| format!("{id}@{n}")).collect(),
            });
        }
        Ok(())
    }

    fn draw(&mut self) {
        const REDRAWN: Duration = Duration::from_millis(200);
        if self
            .progress
            .is_some_and(|drawn| drawn.elapsed() >= REDRAWN)
        {
            self.progress = Some(Instant::now());
            let (n, bytes) = (self.report.checked, format_size(self.report.bytes));
            // Nobody may be listening; that is no reason to fail.
            let _unheard = write!(
                io::stderr(),
                "\r\x1b[Kfumehood: checked {n} objects, {bytes}"
            );
        }
    }

    fn clear(&self) {
        if self.progress.is_some() {
            let _unheard = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// What is wrong, in a few words.
fn described(verdict: &ObjectCondition, bytes: u64) -> Option<String> {
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

fn tell(report: &Report) -> anyhow::Result<()> {
    let mut out = Out::new();
    for damaged in &report.damaged {
        let users: Vec<String> = damaged.used_by.iter().map(|id| clean(id)).collect();
        out.line(&format!(
            "{}  {}  used by {}",
            damaged.blake3,
            clean(&damaged.what),
            users.join(", ")
        ))?;
    }
    for fault in report.database_faults.iter().flatten() {
        out.line(&format!("database: {}", clean(fault)))?;
    }
    out.finish().context("tell what was found")?;
    let checked = counted(report.checked, "object", "objects");
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
    show::line(&format!(
        "{checked} ({}) checked: {verdict}",
        format_size(report.bytes)
    ));
    if report.elsewhere > 0 {
        let what = counted(report.elsewhere, "object", "objects");
        let advice = match report.beside {
            true => {
                "some were on this machine: if their store is gone they are lost, else name its directory with --artifacts"
            }
            false => "run verify on their machines",
        };
        show::line(&format!(
            "{what} in other artifact stores not checked; {advice}"
        ));
    }
    Ok(())
}
