//! Why a request is refused before anything runs.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use crate::collect::GlobError;
use crate::request::{AnalysisIdError, LimitName};
use store::State;
use store::types::submission::SubmissionError;

use super::entries::{SettingError, SettingPlace};
use super::policy::PolicyFileError;
use super::suggestion::did_you_mean;
use super::table::{self, ENV_BYTES_MAX};
use super::trusted_file::FileError;

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("find the current directory")]
    CurrentDirectory(#[source] io::Error),
    #[error("refuse the configuration file")]
    File(#[source] FileError),
    #[error("refuse to run without the operator's policy")]
    PolicyFile(#[source] FileError),
    #[error(transparent)]
    Setting(#[from] SettingError),
    #[error(transparent)]
    Policy(#[from] PolicyFileError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Submission(SubmissionError),
    #[error("unknown setting `{name}` of the submission{}", did_you_mean(nearest))]
    UnknownQueued {
        name: String,
        nearest: Option<String>,
    },
    #[error("{place} must hold values (K=V): the variables of the worker are not handed on")]
    QueuedEnv { place: SettingPlace },
    #[error("{place} must be an absolute path")]
    QueuedRelative { place: SettingPlace },
    #[error(
        "{place} is {given}, and this worker, whose queue others can write, allows {most}; its operator can allow more in /etc/fumehood/policy.toml, [ceilings]"
    )]
    QueuedTooMuch {
        place: SettingPlace,
        given: String,
        most: String,
    },
    #[error(
        "{place} asks for the host's /dev/shm, which others than the worker's own user get only where its operator's policy \
         grants it (`floor.shared_memory = \"host\"`)"
    )]
    QueuedSharedMemory { place: SettingPlace },
    #[error("it asks for more memory or CPUs than it was queued with")]
    OverReservation,
    #[error("{place} cannot be submitted: {why}")]
    NotSubmitted {
        place: SettingPlace,
        why: &'static str,
    },
    #[error(
        "{place}: {given:?} holds a colon, and is not here when it is read again; give PATH:INSIDE"
    )]
    SubmittedColon { place: SettingPlace, given: PathBuf },
    #[error("{what} is not UTF-8 text, which a submission must be: {given:?}")]
    SubmittedText { what: &'static str, given: OsString },
    #[error(
        "{place}: {given:?} is no end after which an analysis can be tried again; these are {}",
        table::RETRY_ON.map(State::as_str).join(", ")
    )]
    RetryOn { place: SettingPlace, given: String },
    #[error(
        "{place} must have from 1 to {} characters, and no control characters",
        table::KEY_CHARS_MAX
    )]
    BadKey { place: SettingPlace },
    #[error("read --id")]
    Id(#[source] AnalysisIdError),
    #[error("the project {0:?} is not a directory")]
    NoProject(PathBuf),
    #[error(
        "{place}: {given:?} has nothing before or after its last colon; give PATH or PATH:{suffix}"
    )]
    EmptyPart {
        place: SettingPlace,
        given: OsString,
        suffix: &'static str,
    },
    #[error("{place}: {given:?} is not an absolute path without `..` outside /proc, /dev and /sys")]
    BadInside { place: SettingPlace, given: PathBuf },
    #[error("{place}: {given:?} is not a relative path without `..`")]
    BadName { place: SettingPlace, given: PathBuf },
    #[error("{place}: {given:?} is not a variable's name, [A-Za-z_][A-Za-z0-9_]*")]
    EnvName {
        place: SettingPlace,
        given: OsString,
    },
    #[error("{place}: names that begin with FUMEHOOD_ are reserved, {name:?} too")]
    EnvReserved { place: SettingPlace, name: OsString },
    #[error("{place}: {name:?} is longer than {ENV_BYTES_MAX} bytes")]
    EnvTooLong { place: SettingPlace, name: OsString },
    #[error("{place}: you have no variable {name:?} to hand on; give a value, {name:?}=…")]
    EnvMissing { place: SettingPlace, name: OsString },
    #[error(
        "{place}: the policy {policy:?} does not let {name:?} be handed on; the operator can \
         list it in `env.pass`"
    )]
    EnvNotPassed {
        place: SettingPlace,
        name: OsString,
        policy: PathBuf,
    },
    #[error("{place}: {given:?} is neither a variable's name nor the beginning of one and a star")]
    SecretName {
        place: SettingPlace,
        given: OsString,
    },
    #[error("read the globs of `{name}`")]
    Globs {
        name: &'static str,
        #[source]
        source: GlobError,
    },
    #[error(
        "{place}: there is no limit {given:?}; the limits are {}",
        table::limit_names()
    )]
    NoSuchLimit { place: SettingPlace, given: String },
    #[error(
        "{place}: the policy {policy:?} does not let {} be degraded; the operator can list it in \
         `degraded.allow`",
        limit.as_str()
    )]
    DegradedRefused {
        place: SettingPlace,
        limit: LimitName,
        policy: PathBuf,
    },
    #[error("{place} is {given}, above the ceiling of {ceiling} in the policy {policy:?}")]
    OverCeiling {
        place: SettingPlace,
        given: String,
        ceiling: String,
        policy: PathBuf,
    },
    #[error(
        "{place} is below the floor `full` in the policy {policy:?}; only the operator can lower it"
    )]
    BelowFloor {
        place: SettingPlace,
        policy: PathBuf,
    },
    #[error(
        "{place} asks for the host's /dev/shm, and the policy {policy:?} does not grant it (`floor.shared_memory = \"host\"`)"
    )]
    HostSharedMemory {
        place: SettingPlace,
        policy: PathBuf,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("FUMEHOOD_DB and FUMEHOOD_DB_FILE are both set; unset one")]
    BothVariables,
    #[error("FUMEHOOD_DB_FILE is empty; give the path of a file, or unset it")]
    DbFileUnnamed,
    #[error("refuse the file that FUMEHOOD_DB_FILE names")]
    DbFile(#[source] FileError),
    #[error(
        "the first line of {0:?}, which FUMEHOOD_DB_FILE names, is empty; it must be the database's URL"
    )]
    DbFileEmpty(PathBuf),
    #[error(
        "--db holds a password, which every user of this host could read there; leave it out and put it in the file \
         that PGPASSFILE names (~/.pgpass), or put the whole URL in a file that only you can read, named by \
         FUMEHOOD_DB_FILE"
    )]
    PasswordTyped,
    #[error(
        "{place} holds a password, and others may read that file; run `chmod 600` on it, or put the password in the \
         file that PGPASSFILE names (~/.pgpass), or the whole URL in one named by FUMEHOOD_DB_FILE"
    )]
    PasswordShared { place: SettingPlace },
    #[error(
        "{place} names another database than the policy {policy:?}, in which the operator decides where results go; \
         leave it out"
    )]
    NotThePolicys { place: String, policy: PathBuf },
    #[error(
        "{place} is `none`, but the policy {policy:?} requires every run to be recorded; name a database or leave \
         it out"
    )]
    Required { place: String, policy: PathBuf },
    #[error("--force says that --to may overwrite; give --to DIR with it")]
    ForceWithoutTo,
    #[error("read --in")]
    In(#[source] AnalysisIdError),
    #[error(
        "--in runs in a workspace that is there already, made by `fumehood workspace create`; leave out {flag}: {why}"
    )]
    InConflicts {
        flag: &'static str,
        why: &'static str,
    },
}
