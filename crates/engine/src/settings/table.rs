//! The table of all settings. A setting's name is its key in files. With dashes, the name is the option; in capitals
//! with a prefix, it is the `FUMEHOOD_*` variable. The policy can set a ceiling for each numeric setting.
//!
//! A machine may have written a project's `fumehood.toml`. So the file cannot set anything that shows the program more
//! of the host, weakens its confinement or outlives the run.

use std::ffi::OsString;

use crate::request::LimitName;
use store::State;
use store::types::units::{self, UnitError};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const PIB: u64 = 1 << 50;
const SECOND_MS: u64 = 1000;
const HOUR_MS: u64 = 3600 * SECOND_MS;
const YEAR_MS: u64 = 365 * 24 * HOUR_MS;

/// execve accepts no longer string (MAX_ARG_STRLEN).
pub(crate) const ENV_BYTES_MAX: usize = 128 << 10;

/// Names a file that contains what `FUMEHOOD_DB` would; `record.rs` reads it.
pub(crate) const DB_FILE_VARIABLE: &str = "FUMEHOOD_DB_FILE";
/// Variables that other code reads; they are not settings of the table below.
pub(crate) const RESERVED_VARIABLES: [&str; 3] =
    ["FUMEHOOD_HOME", DB_FILE_VARIABLE, "FUMEHOOD_LOG"];
/// The prefix of variables with which Fumehood's own tests pass requirements.
pub(crate) const TEST_PREFIX: &str = "FUMEHOOD_TEST_";
pub(crate) const VARIABLE_PREFIX: &str = "FUMEHOOD_";

/// What a numeric setting accepts, in the unit of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberBounds {
    /// The smallest number.
    pub least: u64,
    /// The largest number.
    pub most: u64,
    /// Whether `off` may stand instead of a number.
    pub off: OffWord,
}

/// Whether the word `off` switches the limit off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffWord {
    /// `off` means no limit.
    Allowed,
    /// The setting always has a number.
    Refused,
}

/// What values a setting has, and in which unit numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingKind {
    /// Milliseconds.
    Duration(NumberBounds),
    /// Bytes.
    Size(NumberBounds),
    /// Thousandths of a CPU.
    Cpus(NumberBounds),
    /// A number of things.
    Count(NumberBounds),
    /// One of these words.
    Word(&'static [&'static str]),
    /// A path. A relative one is relative to the directory of its source.
    Path,
    /// Any text.
    Text,
    /// True or false.
    Switch,
    /// Texts of all sources together, instead of those of the strongest source.
    List,
}

/// Settings given as options, each with its words as typed.
pub type GivenSettings = Vec<(Key, Vec<OsString>)>;

/// Whether a setting may appear in one kind of source; if not, why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaceRule {
    /// It may.
    Yes,
    /// It may not, for this reason.
    No(&'static str),
}

/// One row of the table: what is the same for all values of a setting.
#[derive(Debug, PartialEq, Eq)]
pub struct Setting {
    /// Identifies the setting in code.
    pub key: Key,
    /// The key in files. The option and the variable are derived from it.
    pub name: &'static str,
    /// What values it has.
    pub kind: SettingKind,
    /// Whether the user's `config.toml` may set it.
    pub user_file: PlaceRule,
    /// Whether the project's `fumehood.toml` may set it.
    pub project_file: PlaceRule,
    /// Whether a `FUMEHOOD_*` variable may set it.
    pub variable: PlaceRule,
    /// In a submission in the queue. Whoever can write to the database can write one.
    pub queue: PlaceRule,
}

macro_rules! settings {
    ($($key:ident $name:literal $kind:expr, $user:expr, $project:expr, $variable:expr, $queue:expr;)*) => {
        /// Identifies a setting.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs, reason = "docs/configuration.md describes each setting")]
        pub enum Key { $($key),* }

        /// All settings, in the order of [`Key`].
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

const fn bounds(least: u64, most: u64) -> NumberBounds {
    NumberBounds {
        least,
        most,
        off: OffWord::Refused,
    }
}

const fn bounds_or_off(least: u64, most: u64) -> NumberBounds {
    NumberBounds {
        least,
        most,
        off: OffWord::Allowed,
    }
}

use PlaceRule::{No, Yes};
use SettingKind::{Count, Cpus, Duration, List, Path, Size, Switch, Text, Word};

const ONE_RUN: PlaceRule = No("it belongs to one run");
const SHOWS_MORE: PlaceRule = No("it would show the program more of this host");
const WEAKENS: PlaceRule = No("it decides how firmly the program is confined");
const OUTLIVES: PlaceRule = No("it decides what outlives the run");
const NO_SEPARATOR: PlaceRule = No("no character could separate the entries of such a list");
const CALLERS: PlaceRule = No("how a run is reported is the caller's choice");
const RECORDS: PlaceRule = No("it decides where results go and what room they take");
const WITHHOLDS: PlaceRule = No("it decides what the record withholds");
const BY_CONTENT: PlaceRule = No("a submission carries it by its content");
const WORKERS: PlaceRule = No("it is the worker's own to say");
const SUBMITTERS: PlaceRule = No("it is for whoever submits, and waits in no queue");
const ORDERS: PlaceRule = No("it decides about the analyses of others too");

settings! {
    // What the program sees. `input` and `read` copy or show files that the caller can read, `.env` and keys among
    // them, and `runtime` shows a whole directory. The project's file may set none of these.
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

    // Limits. The lower bounds are what the sandbox's init and the start of an interpreter need. The upper bounds are
    // what the kernel can count, or what only a mistyped unit exceeds.
    Timeout     "timeout"      Duration(bounds(1, YEAR_MS)), Yes, Yes, Yes, Yes;
    CpuTime     "cpu_time"     Duration(bounds_or_off(1, 100 * YEAR_MS)), Yes, Yes, Yes, Yes;
    // In less than a second, CPU use of 1 % cannot be distinguished from noise.
    IdleTimeout "idle_timeout" Duration(bounds_or_off(SECOND_MS, YEAR_MS)), Yes, Yes, Yes, Yes;
    Grace       "grace"        Duration(bounds(0, HOUR_MS)), Yes, Yes, Yes, Yes;
    Memory      "memory"       Size(bounds(16 * MIB, PIB)), Yes, Yes, Yes, Yes;
    // One hundredth of a CPU is the smallest quota that the kernel's scheduler accepts.
    Cpus        "cpus"         Cpus(bounds(10, 65_536_000)), Yes, Yes, Yes, Yes;
    Pids        "pids"         Count(bounds(8, 1 << 22)), Yes, Yes, Yes, Yes;
    OpenFiles   "open_files"   Count(bounds(16, 1 << 20)), Yes, Yes, Yes, Yes;
    Disk        "disk"         Size(bounds(MIB, PIB)), Yes, Yes, Yes, Yes;
    Files       "files"        Count(bounds(16, 1_000_000_000)), Yes, Yes, Yes, Yes;
    LogLimit    "log_limit"    Size(bounds(4 * KIB, 1024 * MIB)), Yes, No("it decides how much memory Fumehood itself takes"), Yes, Yes;
    AllowDegraded "allow_degraded" List, Yes, WEAKENS, Yes, Yes;

    // The workspace. Fumehood, perhaps as root, creates and removes directories in the workspace root.
    Workspace   "workspace"    Word(&["disk", "memory"]), Yes, Yes, Yes, Yes;
    WorkspaceRoot "workspace_root" Path, Yes, No("it decides where directories are made and removed"), Yes, WORKERS;
    Keep        "keep"         Word(&["never", "on-failure", "always"]), Yes, OUTLIVES, Yes, Yes;
    KeepFor     "keep_for"     Duration(bounds(SECOND_MS, YEAR_MS)), Yes, OUTLIVES, Yes, Yes;

    // Outputs. A project may lower these, like every limit. It may not decide how much goes into a database that others
    // share. A glob may contain a comma, so a variable cannot hold a list of globs.
    Output      "output"       List, Yes, Yes, NO_SEPARATOR, Yes;
    Expect      "expect"       List, Yes, Yes, NO_SEPARATOR, Yes;
    MaxOutput   "max_output"   Size(bounds(0, PIB)), Yes, Yes, Yes, Yes;
    MaxOutputFile "max_output_file" Size(bounds(0, PIB)), Yes, Yes, Yes, Yes;
    // The manifest of more outputs would be too large to hold in memory.
    MaxOutputs  "max_outputs"  Count(bounds(0, 1_000_000)), Yes, Yes, Yes, Yes;
    MaxDepth    "max_depth"    Count(bounds(1, 256)), Yes, Yes, Yes, Yes;
    // Committing a larger value takes longer than a lock on the database should last.
    InlineMax   "inline_max"   Size(bounds(0, 64 * MIB)), Yes, RECORDS, Yes, Yes;
    To          "to"           Path, ONE_RUN, ONE_RUN, ONE_RUN, SUBMITTERS;
    Force       "force"        Switch, ONE_RUN, ONE_RUN, ONE_RUN, SUBMITTERS;

    // The record. Whoever names the database can read every result, so a project cannot name it.
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

    // The queue. A higher priority goes before the analyses of others. The operator's ceilings bound all of these.
    Priority    "priority"     Count(bounds(0, 100)), Yes, ORDERS, Yes, SUBMITTERS;
    // Each attempt costs as much as the first.
    Retries     "retries"      Count(bounds(0, 20)), Yes, ORDERS, Yes, SUBMITTERS;
    RetryOn     "retry_on"     List, Yes, ORDERS, Yes, SUBMITTERS;
    SubmitOnce  "key"          Text, ONE_RUN, ONE_RUN, ONE_RUN, SUBMITTERS;
    QueueMax    "queue_max"    Count(bounds(1, 100_000_000)), Yes, ORDERS, Yes, SUBMITTERS;
}

/// The ends of a program after which `--retry-on` may ask for another attempt.
pub(crate) const RETRY_ON: [State; 4] = [
    State::Failed,
    State::TimedOut,
    State::OutOfMemory,
    State::LimitExceeded,
];
pub(crate) const KEY_CHARS_MAX: usize = 200;

pub(crate) fn limit_names() -> String {
    LimitName::ALL.map(LimitName::as_str).join(", ")
}

pub(crate) fn limit_name(name: &str) -> Option<LimitName> {
    LimitName::ALL
        .into_iter()
        .find(|limit| limit.as_str() == name)
}

impl Key {
    /// Returns the setting's row in the table.
    pub fn setting(self) -> &'static Setting {
        // The macro writes the enum and the table from one list, so they have one order.
        &SETTINGS[self as usize]
    }
}

impl Setting {
    /// Finds a setting by its key in files.
    pub fn named(name: &str) -> Option<&'static Setting> {
        SETTINGS.iter().find(|setting| setting.name == name)
    }

    /// Returns the option, such as `--cpu-time`.
    pub fn flag(&self) -> String {
        format!("--{}", self.name.replace('_', "-"))
    }

    /// Returns the name of the environment variable, such as `FUMEHOOD_CPU_TIME`.
    pub fn variable_name(&self) -> String {
        format!("{VARIABLE_PREFIX}{}", self.name.to_ascii_uppercase())
    }

    /// Whether the policy can set a ceiling. There is none for `free_reserve`: more free space harms nobody, and
    /// operators would mistake a ceiling for a required reserve.
    pub(crate) fn has_ceiling(&self) -> bool {
        self.kind.bounds().is_some() && self.key != Key::FreeReserve
    }

    /// Lists where the setting may be set, for the error about a place where it may not.
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

impl SettingKind {
    /// Returns the bounds of a numeric setting.
    pub fn bounds(self) -> Option<NumberBounds> {
        match self {
            Duration(bounds) | Size(bounds) | Cpus(bounds) | Count(bounds) => Some(bounds),
            Word(_) | Path | Text | Switch | List => None,
        }
    }

    pub(crate) fn parse_number(self, text: &str) -> Result<u64, UnitError> {
        match self {
            Duration(_) => units::parse_duration_ms(text),
            Size(_) => units::parse_size(text),
            Cpus(_) => units::parse_cpus(text),
            _ => units::parse_count(text),
        }
    }

    /// Returns text that [`SettingKind::parse_number`] reads as exactly this number.
    pub(crate) fn exact(self, number: u64) -> String {
        match self {
            Duration(_) => format!("{number}ms"),
            Cpus(_) => format!("{}.{:03}", number / 1000, number % 1000),
            _ => number.to_string(),
        }
    }

    /// Returns the number with its unit, for people. It may be rounded.
    pub fn show(self, number: u64) -> String {
        match self {
            Duration(_) => units::format_duration(number),
            Size(_) => units::format_size(number),
            Cpus(_) => units::format_cpus(number),
            _ => number.to_string(),
        }
    }
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

    /// Section 3 of the design: a project must never be able to set these.
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

    /// A submission must never be able to set these for a worker.
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
