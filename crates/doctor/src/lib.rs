//! What this host lets a run do, found by trying it: the examination behind `fumehood doctor`.
//!
//! Nothing here is concluded from a version number or the name of a distribution. A level is what building it in
//! miniature gave, a mechanism is what trying it gave, and a cause is named only where an attempt failed *and* a file of
//! this host says why. What is made for an attempt (a group, a directory, a lease) is gone when it is over.

#![forbid(unsafe_code)]

mod cause;
mod container;
mod host;
mod limit;
mod storage;
mod surroundings;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use sandbox::probe;
use sandbox::probe::mechanisms::{self, Mechanism, MechanismResult, MechanismVerdict, ProbeInputs};
use sandbox::spec::{ConfinementLevel, Enforcement, Layer, LimitName, WorkspaceKind};
use serde::Serialize;

use engine::plan::limits::error_chain;
use engine::request::RequestedLimits;
use engine::workspace::uid_pool::{UidLease, UidLeaseError};
pub use host::Facts;

/// The run that is asked about: what the present configuration would make of `fumehood run`.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Our own binary, to be started again.
    pub launcher: PathBuf,
    /// `$FUMEHOOD_HOME`, which need not exist yet.
    pub home: PathBuf,
    /// `None` where nothing is recorded.
    pub artifacts: Option<PathBuf>,
    /// `None` where it is no file.
    pub database: Option<PathBuf>,
    pub workspace_root: PathBuf,
    pub workspace_kind: WorkspaceKind,
    /// What a run would show.
    pub project: PathBuf,
    pub floor: ConfinementLevel,
    /// Exactly this level, if one was asked for.
    pub level: Option<ConfinementLevel>,
    pub required_layers: BTreeSet<Layer>,
    pub limits: RequestedLimits,
    pub allow_degraded: BTreeSet<LimitName>,
    pub free_reserve_bytes: u64,
}

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// As it should be.
    Fine,
    /// Good to know; nothing has to be done.
    Note,
    /// Runs start, but weaker or more expensive than they could be.
    Warning,
    /// A run would not start.
    Stops,
}

/// How to mend something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Remedy {
    /// What it does, in a sentence.
    pub text: String,
    /// Lines to copy, for a shell unless the text says otherwise.
    pub lines: Vec<String>,
    /// Whether it was worked out from documents rather than tried.
    pub untried: bool,
}

impl Remedy {
    fn new(text: impl Into<String>, lines: &[&str]) -> Remedy {
        Remedy {
            text: text.into(),
            lines: lines.iter().map(|l| (*l).to_owned()).collect(),
            untried: false,
        }
    }

    fn untried(self) -> Remedy {
        Remedy {
            untried: true,
            ..self
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub name: &'static str,
    pub severity: Severity,
    pub text: String,
    pub remedy: Option<Remedy>,
    /// The mechanisms that fail for this reason.
    pub mechanisms: Vec<Mechanism>,
}

impl Finding {
    pub fn new(name: &'static str, severity: Severity, text: impl Into<String>) -> Finding {
        Finding {
            name,
            severity,
            text: text.into(),
            remedy: None,
            mechanisms: Vec::new(),
        }
    }

    pub fn fine(name: &'static str, text: impl Into<String>) -> Finding {
        Finding::new(name, Severity::Fine, text)
    }

    pub fn with(self, remedy: Remedy) -> Finding {
        Finding {
            remedy: Some(remedy),
            ..self
        }
    }
}

/// A level, built in miniature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LevelTried {
    pub level: ConfinementLevel,
    pub works: bool,
    pub layers: Vec<LayerHeld>,
    /// Why it does not work.
    pub message: Option<String>,
    pub errno: Option<i32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerHeld {
    pub layer: Layer,
    pub how: String,
}

/// Everything that was found.
#[derive(Clone, Debug, Serialize)]
pub struct Diagnosis {
    pub facts: Facts,
    /// The level a run would have: the one asked for, or the strongest that this host gives to this user.
    pub level: Option<ConfinementLevel>,
    pub levels: Vec<LevelTried>,
    pub mechanisms: Vec<MechanismResult>,
    pub limits: Vec<Enforcement>,
    /// The worst first.
    pub findings: Vec<Finding>,
}

impl Diagnosis {
    /// Whether a run with the present configuration would start.
    pub fn starts(&self) -> bool {
        self.findings.iter().all(|f| f.severity < Severity::Stops)
    }

    /// For what is found out elsewhere, such as which files were read.
    pub fn add(&mut self, finding: Finding) {
        self.findings.push(finding);
        // Stable: among equals the order of the examination stays.
        self.findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    }
}

/// Looks at everything. Nothing that is found is an error: an examination always ends with a diagnosis.
pub fn examine(subject: &Subject) -> Diagnosis {
    let facts = Facts::read();
    let mut findings = Vec::new();
    let lease = match facts.is_root {
        true => Some(UidLease::acquire()),
        false => None,
    };
    let mechanisms = try_mechanisms(subject, lease.as_ref(), &mut findings);
    let levels: Vec<LevelTried> = [ConfinementLevel::Full, ConfinementLevel::Landlock]
        .into_iter()
        .map(|level| try_level(&subject.launcher, level))
        .collect();
    let level = chosen(subject, &levels).map(|l| l.level);
    findings.extend(confinement(subject, &facts, &mechanisms, &levels));
    let limits = limit::examine(subject, &facts, level, lease.as_ref(), &mut findings);
    findings.extend(storage::examine(subject));
    findings.extend(surroundings::examine(subject, &limits, lease.as_ref()));
    if let Some(Ok(lease)) = lease {
        // Every process that had it was waited for.
        lease.release_clean();
    }
    findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    Diagnosis {
        facts,
        level,
        levels,
        mechanisms,
        limits,
        findings,
    }
}

type Leased<'a> = Option<&'a Result<UidLease, UidLeaseError>>;

fn try_mechanisms(
    subject: &Subject,
    lease: Leased<'_>,
    findings: &mut Vec<Finding>,
) -> Vec<MechanismResult> {
    let trial = ProbeInputs {
        leased_uid: lease.and_then(|l| l.as_ref().ok()).map(|l| l.uid),
        shown: subject.project.clone(),
    };
    mechanisms::try_all(&subject.launcher, &trial).unwrap_or_else(|e| {
        let text = format!("the mechanisms could not be tried: {}", error_chain(&e));
        findings.push(Finding::new("probe", Severity::Stops, text));
        Vec::new()
    })
}

fn try_level(launcher: &Path, level: ConfinementLevel) -> LevelTried {
    match probe::try_level(launcher, level) {
        Ok(layers) => LevelTried {
            level,
            works: true,
            layers: layers
                .into_iter()
                .map(|(layer, how)| LayerHeld { layer, how })
                .collect(),
            message: None,
            errno: None,
        },
        Err(error) => LevelTried {
            level,
            works: false,
            layers: Vec::new(),
            errno: errno_of(&error),
            message: Some(error_chain(&error)),
        },
    }
}

/// The kernel's own answer, wherever in the chain it is.
fn errno_of(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        let io = error.downcast_ref::<std::io::Error>();
        if let Some(errno) = io.and_then(std::io::Error::raw_os_error) {
            return Some(errno);
        }
        next = error.source();
    }
    None
}

fn chosen<'a>(subject: &Subject, levels: &'a [LevelTried]) -> Option<&'a LevelTried> {
    let asked = |l: &&LevelTried| subject.level.is_none_or(|asked| asked == l.level);
    levels.iter().filter(asked).find(|l| l.works)
}

/// What is wrong with the confinement, and how much that matters under this configuration.
fn confinement(
    subject: &Subject,
    facts: &Facts,
    mechanisms: &[MechanismResult],
    levels: &[LevelTried],
) -> Vec<Finding> {
    let level = chosen(subject, levels);
    let severity = match level.map(|l| l.level) {
        None => Severity::Stops,
        Some(level) if level < subject.floor => Severity::Stops,
        Some(ConfinementLevel::Full) => Severity::Note,
        Some(ConfinementLevel::Landlock) => Severity::Warning,
    };
    let mut findings = cause::of(mechanisms, facts, severity);
    let explained = findings.iter().any(|f| f.severity >= Severity::Warning);
    for tried in levels.iter().filter(|l| !l.works) {
        let wanted = tried.level >= subject.floor && level.is_none_or(|l| l.level < tried.level);
        if wanted && !explained {
            // Every mechanism works by itself, so the whole is what fails: its own words are all there is.
            let name = match tried.level {
                ConfinementLevel::Full => "level_full",
                ConfinementLevel::Landlock => "level_landlock",
            };
            let why = tried.message.as_deref().unwrap_or_default();
            let text = format!("level `{}` does not start: {why}", tried.level.as_str());
            findings.push(Finding::new(name, severity, text));
        }
    }
    if let Some(level) = level {
        let held = |layer: &&Layer| !level.layers.iter().any(|l| l.layer == **layer);
        let missing: Vec<String> = subject
            .required_layers
            .iter()
            // Whether a group can be had is the limits' business, and is told there.
            .filter(|layer| **layer != Layer::Cgroup)
            .filter(held)
            .filter_map(|layer| Some(serde_json::to_value(layer).ok()?.as_str()?.to_owned()))
            .collect();
        if !missing.is_empty() {
            let text = format!(
                "the operator's policy requires what this host does not give to this user: {}",
                missing.join(", ")
            );
            findings.push(Finding::new("required_layers", Severity::Stops, text));
        }
    }
    findings
}

/// The name by which people look an errno up.
pub fn errno_name(errno: i32) -> Option<&'static str> {
    use rustix::io::Errno;
    let known = [
        (Errno::PERM, "EPERM"),
        (Errno::NOENT, "ENOENT"),
        (Errno::INTR, "EINTR"),
        (Errno::IO, "EIO"),
        (Errno::AGAIN, "EAGAIN"),
        (Errno::NOMEM, "ENOMEM"),
        (Errno::ACCESS, "EACCES"),
        (Errno::BUSY, "EBUSY"),
        (Errno::EXIST, "EEXIST"),
        (Errno::XDEV, "EXDEV"),
        (Errno::NODEV, "ENODEV"),
        (Errno::NOTDIR, "ENOTDIR"),
        (Errno::INVAL, "EINVAL"),
        (Errno::MFILE, "EMFILE"),
        (Errno::NOSPC, "ENOSPC"),
        (Errno::ROFS, "EROFS"),
        (Errno::NOSYS, "ENOSYS"),
        (Errno::LOOP, "ELOOP"),
        (Errno::OPNOTSUPP, "EOPNOTSUPP"),
        (Errno::USERS, "EUSERS"),
        (Errno::DQUOT, "EDQUOT"),
        (Errno::SRCH, "ESRCH"),
    ];
    let found = known.iter().find(|(e, _)| e.raw_os_error() == errno);
    found.map(|(_, name)| *name)
}

/// The Landlock ABI that refused something, if any did.
pub fn landlock_abi(mechanisms: &[MechanismResult]) -> Option<i32> {
    let found = mechanisms
        .iter()
        .find(|t| t.mechanism == Mechanism::Landlock)?;
    match &found.verdict {
        MechanismVerdict::Works { how } => how.rsplit(' ').next()?.parse().ok(),
        _ => None,
    }
}
