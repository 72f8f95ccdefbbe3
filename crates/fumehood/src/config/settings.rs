//! The one table of settings. Its names are the keys of the files; with dashes they are the options,
//! in capitals the `FUMEHOOD_*` variables, and those with bounds are the policy's ceilings.
//!
//! A project's `fumehood.toml` may have been written by a machine, so whatever would show the program
//! more of the host, weaken its confinement or outlive the run is closed to it (design, section 3).

use store::types::units::{self, UnitError};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const PIB: u64 = 1 << 50;
const SECOND_MS: u64 = 1000;
const HOUR_MS: u64 = 3600 * SECOND_MS;
const YEAR_MS: u64 = 365 * 24 * HOUR_MS;

/// Names a file that holds what `FUMEHOOD_DB` would; read in `record.rs`.
pub const DB_FILE_VARIABLE: &str = "FUMEHOOD_DB_FILE";
/// Variables that are read elsewhere; no settings of the table below.
pub const RESERVED_VARIABLES: [&str; 3] = ["FUMEHOOD_HOME", DB_FILE_VARIABLE, "FUMEHOOD_LOG"];
/// Fumehood's own tests say through these what they need.
pub const TEST_PREFIX: &str = "FUMEHOOD_TEST_";
pub const VARIABLE_PREFIX: &str = "FUMEHOOD_";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    pub least: u64,
    pub most: u64,
    pub off: Off,
}

/// Whether the word `off` switches the limit off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Off {
    Allowed,
    Refused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Milliseconds.
    Duration(Bounds),
    /// Bytes.
    Size(Bounds),
    /// Thousandths of a CPU.
    Cpus(Bounds),
    Count(Bounds),
    Word(&'static [&'static str]),
    Path,
    Text,
    Switch,
    /// Texts that add up over all places, instead of the strongest place winning.
    List,
}

/// Whether a setting may stand in one kind of place; if not, why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    Yes,
    No(&'static str),
}

#[derive(Debug, PartialEq, Eq)]
pub struct Setting {
    pub key: Key,
    pub name: &'static str,
    pub kind: Kind,
    pub user_file: Rule,
    pub project_file: Rule,
    pub variable: Rule,
    /// In a submission that waits in the queue. Whoever can write to the database can write one.
    pub queue: Rule,
}

macro_rules! settings {
    ($($key:ident $name:literal $kind:expr, $user:expr, $project:expr, $variable:expr, $queue:expr;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Key { $($key),* }

        pub static SETTINGS: &[Setting] = &[$(Setting {
            key: Key::$key,
            name: $name,
            kind: $kind,
            user_file: $user,
            project_file: $project,
            variable: $variable,
            queue: $queue,
        }),*];
    };
}

const fn bounds(least: u64, most: u64) -> Bounds {
    Bounds {
        least,
        most,
        off: Off::Refused,
    }
}

const fn bounds_or_off(least: u64, most: u64) -> Bounds {
    Bounds {
        least,
        most,
        off: Off::Allowed,
    }
}

use Kind::{Count, Cpus, Duration, List, Path, Size, Switch, Text, Word};
use Rule::{No, Yes};

const ONE_RUN: Rule = No("it belongs to one run");
const SHOWS_MORE: Rule = No("it would show the program more of this host");
const WEAKENS: Rule = No("it decides how firmly the program is confined");
const OUTLIVES: Rule = No("it decides what outlives the run");
const NO_SEPARATOR: Rule = No("no character could separate the entries of such a list");
const CALLERS: Rule = No("how a run is reported is the caller's choice");
const RECORDS: Rule = No("it decides where results go and what room they take");
const WITHHOLDS: Rule = No("it decides what the record withholds");
const BY_CONTENT: Rule = No("a submission carries it by its content");
const WORKERS: Rule = No("it is the worker's own to say");
const SUBMITTERS: Rule = No("it is for whoever submits, and waits in no queue");
const ORDERS: Rule = No("it decides about the analyses of others too");

settings! {
    // What the program sees. Inputs, like `read`, copy or show files that the caller can read, `.env` and
    // keys among them; a runtime is a whole directory shown: all closed to the project's file.
    Id          "id"           Text, ONE_RUN, ONE_RUN, ONE_RUN, BY_CONTENT;
    Project     "project"      Path, ONE_RUN, No("it is the directory that holds this file"), Yes, Yes;
    Data        "data"         Path, Yes, Yes, Yes, Yes;
    Docs        "docs"         Path, Yes, Yes, Yes, Yes;
    Read        "read"         List, Yes, SHOWS_MORE, NO_SEPARATOR, Yes;
    Input       "input"        List, ONE_RUN, SHOWS_MORE, NO_SEPARATOR, BY_CONTENT;
    Siblings    "siblings"     Switch, ONE_RUN, SHOWS_MORE, ONE_RUN, BY_CONTENT;
    Runtime     "runtime"      Path, Yes, SHOWS_MORE, Yes, Yes;
    Env         "env"          List, Yes, Yes, NO_SEPARATOR, Yes;
    Stdin       "stdin"        Text, ONE_RUN, SHOWS_MORE, ONE_RUN, BY_CONTENT;
    Network     "network"      Word(&["none"]), Yes, WEAKENS, Yes, Yes;

    // Limits. The least values are what the sandbox's own init and an interpreter's start need, the
    // most what the kernel can count or a mistyped unit would exceed.
    Timeout     "timeout"      Duration(bounds(1, YEAR_MS)), Yes, Yes, Yes, Yes;
    CpuTime     "cpu_time"     Duration(bounds_or_off(1, 100 * YEAR_MS)), Yes, Yes, Yes, Yes;
    // Use of CPU beyond 1 % cannot be told from noise in less than a second.
    IdleTimeout "idle_timeout" Duration(bounds_or_off(SECOND_MS, YEAR_MS)), Yes, Yes, Yes, Yes;
    Grace       "grace"        Duration(bounds(0, HOUR_MS)), Yes, Yes, Yes, Yes;
    Memory      "memory"       Size(bounds(16 * MIB, PIB)), Yes, Yes, Yes, Yes;
    // One hundredth is the least quota that the kernel's scheduler takes.
    Cpus        "cpus"         Cpus(bounds(10, 65_536_000)), Yes, Yes, Yes, Yes;
    Pids        "pids"         Count(bounds(8, 1 << 22)), Yes, Yes, Yes, Yes;
    OpenFiles   "open_files"   Count(bounds(16, 1 << 20)), Yes, Yes, Yes, Yes;
    Disk        "disk"         Size(bounds(MIB, PIB)), Yes, Yes, Yes, Yes;
    Files       "files"        Count(bounds(16, 1_000_000_000)), Yes, Yes, Yes, Yes;
    LogLimit    "log_limit"    Size(bounds(4 * KIB, 1024 * MIB)), Yes, No("it decides how much memory Fumehood itself takes"), Yes, Yes;
    AllowDegraded "allow_degraded" List, Yes, WEAKENS, Yes, Yes;

    // The workspace. Its root is where Fumehood, perhaps as root, makes and removes directories.
    Workspace   "workspace"    Word(&["disk", "memory"]), Yes, Yes, Yes, Yes;
    WorkspaceRoot "workspace_root" Path, Yes, No("it decides where directories are made and removed"), Yes, WORKERS;
    Keep        "keep"         Word(&["never", "on-failure", "always"]), Yes, OUTLIVES, Yes, Yes;
    KeepFor     "keep_for"     Duration(bounds(SECOND_MS, YEAR_MS)), Yes, OUTLIVES, Yes, Yes;

    // What is taken of what the program leaves. A project may ask for less of it, as it may of every limit; how much goes
    // into a database that others share is not the project's to say. A glob may hold a comma.
    Output      "output"       List, Yes, Yes, NO_SEPARATOR, Yes;
    Expect      "expect"       List, Yes, Yes, NO_SEPARATOR, Yes;
    MaxOutput   "max_output"   Size(bounds(0, PIB)), Yes, Yes, Yes, Yes;
    MaxOutputFile "max_output_file" Size(bounds(0, PIB)), Yes, Yes, Yes, Yes;
    // The manifest of more would be too large to hold in memory.
    MaxOutputs  "max_outputs"  Count(bounds(0, 1_000_000)), Yes, Yes, Yes, Yes;
    MaxDepth    "max_depth"    Count(bounds(1, 256)), Yes, Yes, Yes, Yes;
    // Beyond this a value takes longer to commit than a lock on the database should last.
    InlineMax   "inline_max"   Size(bounds(0, 64 * MIB)), Yes, RECORDS, Yes, Yes;
    To          "to"           Path, ONE_RUN, ONE_RUN, ONE_RUN, SUBMITTERS;
    Force       "force"        Switch, ONE_RUN, ONE_RUN, ONE_RUN, SUBMITTERS;

    // The record. Whoever names the database reads every result, so a project cannot.
    Db          "db"           Text, Yes, RECORDS, Yes, WORKERS;
    Artifacts   "artifacts"    Path, Yes, RECORDS, Yes, WORKERS;
    StoreQuota  "store_quota"  Size(bounds_or_off(MIB, PIB)), Yes, RECORDS, Yes, WORKERS;
    FreeReserve "free_reserve" Size(bounds(0, PIB)), Yes, RECORDS, Yes, WORKERS;
    SecretEnv   "secret_env"   List, Yes, WITHHOLDS, Yes, Yes;
    Replace     "replace"      Switch, ONE_RUN, ONE_RUN, ONE_RUN, SUBMITTERS;
    In          "in"           Text, ONE_RUN, ONE_RUN, ONE_RUN, SUBMITTERS;

    Isolation   "isolation"    Word(&["landlock", "full"]), Yes, WEAKENS, Yes, Yes;
    Level       "level"        Word(&["landlock", "full"]), Yes, WEAKENS, Yes, Yes;
    SharedMemory "shared_memory" Word(&["private", "host"]), Yes, WEAKENS, Yes, Yes;
    Json        "json"         Switch, Yes, CALLERS, Yes, SUBMITTERS;
    Quiet       "quiet"        Switch, Yes, CALLERS, Yes, SUBMITTERS;

    // The queue. Higher priorities go first, before what others wait for; the operator's ceilings bound all of these.
    Priority    "priority"     Count(bounds(0, 100)), Yes, ORDERS, Yes, SUBMITTERS;
    // Each try costs as much as the first.
    Retries     "retries"      Count(bounds(0, 20)), Yes, ORDERS, Yes, SUBMITTERS;
    RetryOn     "retry_on"     List, Yes, ORDERS, Yes, SUBMITTERS;
    SubmitOnce  "key"          Text, ONE_RUN, ONE_RUN, ONE_RUN, SUBMITTERS;
    QueueMax    "queue_max"    Count(bounds(1, 100_000_000)), Yes, ORDERS, Yes, SUBMITTERS;
}

impl Key {
    pub fn setting(self) -> &'static Setting {
        // The macro writes the enum and the table from one list, so the order is the same.
        &SETTINGS[self as usize]
    }
}

impl Setting {
    pub fn named(name: &str) -> Option<&'static Setting> {
        SETTINGS.iter().find(|setting| setting.name == name)
    }

    pub fn flag(&self) -> String {
        format!("--{}", self.name.replace('_', "-"))
    }

    pub fn variable_name(&self) -> String {
        format!("{VARIABLE_PREFIX}{}", self.name.to_ascii_uppercase())
    }

    /// Whether the policy can bound it from above. More room left free harms nobody, so a ceiling on it would only
    /// be mistaken for what it is not: a reserve that the operator insists on.
    pub fn has_ceiling(&self) -> bool {
        self.kind.bounds().is_some() && self.key != Key::FreeReserve
    }

    /// The places where it may be set, for the error about one where it may not.
    pub fn places(&self) -> String {
        let mut places = vec![format!("the option {}", self.flag())];
        if self.variable == Yes {
            places.push(format!("the variable {}", self.variable_name()));
        }
        if self.user_file == Yes {
            places.push("your own config.toml".to_owned());
        }
        if self.project_file == Yes {
            places.push("the project's fumehood.toml".to_owned());
        }
        places.join(" or ")
    }
}

impl Kind {
    /// The bounds of a setting that is a number.
    pub fn bounds(self) -> Option<Bounds> {
        match self {
            Duration(bounds) | Size(bounds) | Cpus(bounds) | Count(bounds) => Some(bounds),
            Word(_) | Path | Text | Switch | List => None,
        }
    }

    pub fn parse_number(self, text: &str) -> Result<u64, UnitError> {
        match self {
            Duration(_) => units::parse_duration_ms(text),
            Size(_) => units::parse_size(text),
            Cpus(_) => units::parse_cpus(text),
            _ => units::parse_count(text),
        }
    }

    /// Text that [`Kind::parse_number`] reads as this very number.
    pub fn exact(self, number: u64) -> String {
        match self {
            Duration(_) => format!("{number}ms"),
            Cpus(_) => format!("{}.{:03}", number / 1000, number % 1000),
            _ => number.to_string(),
        }
    }

    pub fn show(self, number: u64) -> String {
        match self {
            Duration(_) => units::format_duration(number),
            Size(_) => units::format_size(number),
            Cpus(_) => units::format_cpus(number),
            _ => number.to_string(),
        }
    }
}

/// The candidate that `word` was most likely meant to be, if one is near.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Case and the choice of dash are the commonest slips; they should cost nothing.
    let plain = |text: &str| -> Vec<char> {
        text.chars()
            .take(WORD_CHARS_MAX)
            .map(|c| {
                if c == '-' {
                    '_'
                } else {
                    c.to_ascii_lowercase()
                }
            })
            .collect()
    };
    let word = plain(word);
    let near_enough = (word.len() / 3).max(1);
    candidates
        .into_iter()
        .map(|candidate| (distance(&word, &plain(candidate)), candidate))
        .filter(|(distance, _)| *distance <= near_enough)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// A word beyond this is no slip; the bound keeps the comparison small.
const WORD_CHARS_MAX: usize = 64;

/// How many characters must be put in, left out or exchanged (Levenshtein), row by row.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let exchanged = above[j] + usize::from(x != y);
            row.push(exchanged.min(above[j + 1] + 1).min(row[j] + 1));
        }
        above = row;
    }
    above[b.len()]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_enum_and_the_table_agree() {
        for (at, setting) in SETTINGS.iter().enumerate() {
            assert_eq!(setting.key as usize, at);
            assert_eq!(setting.key.setting(), setting);
            assert_eq!(Setting::named(setting.name), Some(setting));
        }
    }

    /// Design, section 3, by name: these must never become settable by a project.
    #[test]
    fn the_project_cannot_reach_what_the_design_denies_it() {
        for key in [
            Key::Isolation,
            Key::Read,
            Key::Input,
            Key::Siblings,
            Key::Runtime,
            Key::Stdin,
            Key::AllowDegraded,
            Key::WorkspaceRoot,
            Key::Network,
            Key::Keep,
            Key::KeepFor,
            Key::Db,
            Key::Artifacts,
            Key::InlineMax,
            Key::StoreQuota,
            Key::FreeReserve,
            Key::SecretEnv,
            Key::To,
            Key::Force,
            Key::Replace,
            Key::In,
            Key::Priority,
            Key::Retries,
            Key::QueueMax,
        ] {
            assert!(matches!(key.setting().project_file, No(_)), "{key:?}");
        }
    }

    /// What a submission must never say to a worker.
    #[test]
    fn a_submission_cannot_reach_what_is_the_workers() {
        for key in [
            Key::WorkspaceRoot,
            Key::Db,
            Key::Artifacts,
            Key::StoreQuota,
            Key::FreeReserve,
            Key::To,
            Key::Force,
            Key::In,
            Key::Replace,
            Key::Json,
            Key::Quiet,
            Key::Input,
            Key::Siblings,
            Key::Stdin,
            Key::Id,
        ] {
            assert!(matches!(key.setting().queue, No(_)), "{key:?}");
        }
    }

    #[test]
    fn slips_find_the_right_word() {
        let names = || SETTINGS.iter().map(|s| s.name);
        assert_eq!(nearest("memroy", names()), Some("memory"));
        assert_eq!(nearest("cpu-time", names()), Some("cpu_time"));
        assert_eq!(nearest("TIMEOUT", names()), Some("timeout"));
        assert_eq!(nearest("logs_limit", names()), Some("log_limit"));
        assert_eq!(nearest("zzzzzz", names()), None);
        assert_eq!(nearest("", names()), None);
        assert_eq!(nearest(&"m".repeat(1 << 20), names()), None);
    }

    #[test]
    fn the_documentation_names_every_setting() {
        let page = include_str!("../../../../docs/configuration.md");
        for setting in SETTINGS {
            assert!(
                page.contains(&format!("| `{}` |", setting.name)),
                "{}",
                setting.name
            );
        }
    }
}
