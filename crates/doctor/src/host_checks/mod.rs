//! What this host lets a run do, found by trying it: the examination behind `fumehood doctor`.
//!
//! No finding follows from a version number or the name of a distribution. A level works if a sandbox of that level was
//! built in miniature. A mechanism works if it was tried and did. A cause is named only if a trial failed *and* a
//! file of this host says why. Everything that the examination makes (a cgroup, a directory, a uid lease) is removed
//! when it ends.
//!
//! In reading order:
//! - `host_facts`: what files of the host say.
//! - `cause`, `container`: why a mechanism failed, and the remedy.
//! - `limits`: what would enforce each limit.
//! - `storage`, `temporary_workspace`: the file systems of workspaces, database and artifacts.
//! - `environment`: uids, swap, locale, fonts, interpreters.

mod cause;
mod container;
mod environment;
mod host_facts;
mod limits;
mod storage;
mod temporary_workspace;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use sandbox::probe;
use sandbox::probe::mechanisms::{self, Mechanism, MechanismResult, MechanismVerdict, TrialInputs};
use sandbox::spec::{ConfinementLevel, Enforcement, Layer, LimitName, WorkspaceKind};
use serde::Serialize;

use engine::plan::limits::error_chain;
use engine::request::RequestedLimits;
use engine::workspace::uid_pool::{UidLease, UidLeaseError};
pub use host_facts::HostFacts;
pub use sandbox::probe::{describe_errno, errno_name};

/// The binary that is executed as the launcher and to try the mechanisms: this one.
const LAUNCHER: &str = "/proc/self/exe";

/// The run that is examined: what `fumehood run` would do with the present configuration.
#[derive(Clone, Debug)]
pub struct Subject {
    /// `$FUMEHOOD_HOME`. The directory need not exist yet.
    pub home: PathBuf,
    /// The artifact store; `None` if nothing is recorded.
    pub artifacts: Option<PathBuf>,
    /// The database file; `None` if the database is not a file.
    pub database: Option<PathBuf>,
    /// Where workspaces are made.
    pub workspace_root: PathBuf,
    /// Whether a workspace is on disk or in memory.
    pub workspace_kind: WorkspaceKind,
    /// The project, whose data a run would show.
    pub project: PathBuf,
    /// The weakest level at which a run may start.
    pub floor: ConfinementLevel,
    /// Exactly this level, if the configuration asks for one.
    pub level: Option<ConfinementLevel>,
    /// The layers that the operator's policy requires.
    pub required_layers: BTreeSet<Layer>,
    /// The limits that the configuration asks for.
    pub limits: RequestedLimits,
    /// The limits that may be watched where they cannot be enforced.
    pub allow_degraded: BTreeSet<LimitName>,
    /// What must stay free where results are kept.
    pub free_reserve_bytes: u64,
}

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// All is well.
    Fine,
    /// Good to know; nothing has to be done.
    Note,
    /// Runs start, but with weaker or slower enforcement than possible.
    Warning,
    /// A run would not start.
    Stops,
}

/// How to solve a problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Remedy {
    /// What the remedy does, in a sentence.
    pub text: String,
    /// Lines to copy, for a shell unless the text says otherwise.
    pub lines: Vec<String>,
    /// Whether the remedy comes from documents and was never tried.
    pub untried: bool,
}

impl Remedy {
    /// A remedy that was tried.
    pub fn new(text: impl Into<String>, lines: &[&str]) -> Remedy {
        Remedy {
            text: text.into(),
            lines: lines.iter().map(|l| (*l).to_owned()).collect(),
            untried: false,
        }
    }

    fn untried(text: impl Into<String>, lines: &[&str]) -> Remedy {
        Remedy {
            untried: true,
            ..Remedy::new(text, lines)
        }
    }
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The name of the finding in documents.
    pub name: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What was found, without a final full stop.
    pub text: String,
    /// What to do, if something is to be done.
    pub remedy: Option<Remedy>,
    /// The mechanisms that fail for this reason.
    pub mechanisms: Vec<Mechanism>,
}

impl Finding {
    /// A finding without a remedy.
    pub fn new(name: &'static str, severity: Severity, text: impl Into<String>) -> Finding {
        Finding {
            name,
            severity,
            text: text.into(),
            remedy: None,
            mechanisms: Vec::new(),
        }
    }

    /// All is well.
    pub fn fine(name: &'static str, text: impl Into<String>) -> Finding {
        Finding::new(name, Severity::Fine, text)
    }

    /// Good to know; nothing has to be done.
    pub fn note(name: &'static str, text: impl Into<String>) -> Finding {
        Finding::new(name, Severity::Note, text)
    }

    fn warning(name: &'static str, text: impl Into<String>) -> Finding {
        Finding::new(name, Severity::Warning, text)
    }

    /// A run would not start.
    pub fn stops(name: &'static str, text: impl Into<String>) -> Finding {
        Finding::new(name, Severity::Stops, text)
    }

    /// Adds a remedy.
    pub fn with(self, remedy: impl Into<Option<Remedy>>) -> Finding {
        let remedy = remedy.into();
        Finding { remedy, ..self }
    }

    /// Adds a remedy: what it does, in a sentence, and lines to copy.
    pub fn remedy(self, text: impl Into<String>, lines: &[&str]) -> Finding {
        self.with(Remedy::new(text, lines))
    }
}

/// The result of building a sandbox of one level in miniature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LevelCheck {
    /// The level that was tried.
    pub level: ConfinementLevel,
    /// Whether the sandbox was built.
    pub works: bool,
    /// The layers in force.
    pub layers: Vec<EnforcedLayer>,
    /// Why the level does not work.
    pub message: Option<String>,
    /// The errno of the failure, if a system call failed.
    pub errno: Option<i32>,
}

/// One layer in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EnforcedLayer {
    /// The layer.
    pub layer: Layer,
    /// How it is enforced, in words.
    pub how: String,
}

/// The result of the whole examination.
#[derive(Clone, Debug, Serialize)]
pub struct Diagnosis {
    /// What files of the host say.
    pub facts: HostFacts,
    /// The level that a run would get: the level asked for, or the strongest that this host gives to this user.
    pub level: Option<ConfinementLevel>,
    /// The levels, strongest first.
    pub levels: Vec<LevelCheck>,
    /// The mechanisms, each tried by itself.
    pub mechanisms: Vec<MechanismResult>,
    /// What would enforce each limit.
    pub limits: Vec<Enforcement>,
    /// Worst first.
    pub findings: Vec<Finding>,
}

impl Diagnosis {
    /// Whether a run with the present configuration would start.
    pub fn starts(&self) -> bool {
        self.findings.iter().all(|f| f.severity < Severity::Stops)
    }

    /// Adds a finding of the caller's, such as which configuration files were read.
    pub fn add(&mut self, finding: Finding) {
        self.findings.push(finding);
        // The sort is stable: findings of one severity stay in the order of the examination.
        self.findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    }
}

/// Runs every check. A failed check is a finding, not an error, so every examination ends with a diagnosis.
pub fn examine(subject: &Subject) -> Diagnosis {
    let facts = HostFacts::read();
    let mut findings = Vec::new();
    let lease = match facts.is_root {
        true => Some(UidLease::acquire()),
        false => None,
    };
    let mechanisms = try_mechanisms(subject, lease.as_ref(), &mut findings);
    let levels: Vec<LevelCheck> = [ConfinementLevel::Full, ConfinementLevel::Landlock]
        .into_iter()
        .map(try_level)
        .collect();
    let level = chosen_level(subject, &levels).map(|l| l.level);
    findings.extend(check_confinement(subject, &facts, &mechanisms, &levels));
    let limits = limits::examine(subject, &facts, level, lease.as_ref(), &mut findings);
    findings.extend(storage::examine(subject));
    findings.extend(environment::examine(subject, &limits, lease.as_ref()));
    if let Some(Ok(lease)) = lease {
        // Every process that ran under the leased uid has been waited for, so the uid is clean.
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

type LeaseResult<'a> = Option<&'a Result<UidLease, UidLeaseError>>;

fn try_mechanisms(
    subject: &Subject,
    lease: LeaseResult<'_>,
    findings: &mut Vec<Finding>,
) -> Vec<MechanismResult> {
    let trial = TrialInputs {
        leased_uid: lease.and_then(|l| l.as_ref().ok()).map(|l| l.uid),
        shown: subject.project.clone(),
    };
    mechanisms::try_all(Path::new(LAUNCHER), &trial).unwrap_or_else(|e| {
        let text = format!("the mechanisms could not be tried: {}", error_chain(&e));
        findings.push(Finding::stops("probe", text));
        Vec::new()
    })
}

fn try_level(level: ConfinementLevel) -> LevelCheck {
    let tried = probe::try_level(Path::new(LAUNCHER), level);
    let error = tried.as_ref().err();
    LevelCheck {
        level,
        works: tried.is_ok(),
        message: error.map(|error| error_chain(error)),
        errno: error.and_then(|error| errno_of(error)),
        layers: tried
            .into_iter()
            .flatten()
            .map(|(layer, how)| EnforcedLayer { layer, how })
            .collect(),
    }
}

/// Returns the errno of the first I/O error in the chain of sources.
fn errno_of(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut chain = std::iter::successors(Some(error), |error| error.source());
    chain.find_map(|error| error.downcast_ref::<std::io::Error>()?.raw_os_error())
}

fn chosen_level<'a>(subject: &Subject, levels: &'a [LevelCheck]) -> Option<&'a LevelCheck> {
    let asked = |l: &&LevelCheck| subject.level.is_none_or(|asked| asked == l.level);
    levels.iter().filter(asked).find(|l| l.works)
}

/// Reports what is wrong with the confinement, and how much that matters under this configuration.
fn check_confinement(
    subject: &Subject,
    facts: &HostFacts,
    mechanisms: &[MechanismResult],
    levels: &[LevelCheck],
) -> Vec<Finding> {
    let level = chosen_level(subject, levels);
    let severity = match level.map(|l| l.level) {
        None => Severity::Stops,
        Some(level) if level < subject.floor => Severity::Stops,
        Some(ConfinementLevel::Full) => Severity::Note,
        Some(ConfinementLevel::Landlock) => Severity::Warning,
    };
    let mut findings = cause::find_causes(mechanisms, facts, severity);
    let explained = findings.iter().any(|f| f.severity >= Severity::Warning);
    for tried in levels.iter().filter(|l| !l.works) {
        let wanted = tried.level >= subject.floor && level.is_none_or(|l| l.level < tried.level);
        if wanted && !explained {
            // Every mechanism works alone and the whole level does not. The error message is all there is to report.
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
        let mut missing = subject.required_layers.clone();
        // The checks of the limits report whether a cgroup can be made.
        missing.retain(|l| *l != Layer::Cgroup && level.layers.iter().all(|e| e.layer != *l));
        if !missing.is_empty() {
            let missing: Vec<&str> = missing.into_iter().map(Layer::as_str).collect();
            let text = format!(
                "the operator's policy requires what this host does not give to this user: {}",
                missing.join(", ")
            );
            findings.push(Finding::stops("required_layers", text));
        }
    }
    findings
}

fn join_paths(paths: &[PathBuf], separator: &str) -> String {
    let paths: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();
    paths.join(separator)
}

/// Returns the Landlock ABI, if the trial showed that Landlock refuses something.
pub fn landlock_abi(mechanisms: &[MechanismResult]) -> Option<i32> {
    let found = mechanisms
        .iter()
        .find(|t| t.mechanism == Mechanism::Landlock)?;
    match &found.verdict {
        MechanismVerdict::Works { how } => how.rsplit(' ').next()?.parse().ok(),
        _ => None,
    }
}
