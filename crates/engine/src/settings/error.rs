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

/// Why the settings make no request. Nothing has run.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum ConfigError {
    /// The current directory could not be found out.
    #[error("find the current directory")]
    CurrentDirectory(#[source] io::Error),
    /// A user's or a project's file could not be read, or others may have written it.
    #[error("refuse the configuration file")]
    File(#[source] FileError),
    /// The policy exists and could not be read, or others than the operator may have written it.
    #[error("refuse to run without the operator's policy")]
    PolicyFile(#[source] FileError),
    /// The value of one source is wrong.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The policy's content is wrong.
    #[error(transparent)]
    Policy(#[from] PolicyFileError),
    /// The settings about the record are wrong or contradict each other.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The submission from the queue is not well formed.
    #[error(transparent)]
    Submission(SubmissionError),
    /// The submission has a setting that does not exist.
    #[error("unknown setting `{name}` of the submission{}", did_you_mean(nearest))]
    UnknownQueued {
        name: String,
        nearest: Option<String>,
    },
    /// The submission names a variable without a value.
    #[error("{place} must hold values (K=V): the variables of the worker are not handed on")]
    QueuedEnv { place: SettingPlace },
    /// The submission holds a relative path, and the worker has no directory to which it could be relative.
    #[error("{place} must be an absolute path")]
    QueuedRelative { place: SettingPlace },
    /// The submission asks for more than this worker allows to other users without a policy.
    #[error(
        "{place} is {given}, and this worker, whose queue others can write, allows {most}; its operator can allow more in /etc/fumehood/policy.toml, [ceilings]"
    )]
    QueuedTooMuch {
        place: SettingPlace,
        given: String,
        most: String,
    },
    /// The submission asks for the host's /dev/shm, and no policy grants it to other users.
    #[error(
        "{place} asks for the host's /dev/shm, which others than the worker's own user get only where its operator's policy \
         grants it (`floor.shared_memory = \"host\"`)"
    )]
    QueuedSharedMemory { place: SettingPlace },
    /// The request asks for more memory or CPUs than the worker reserved for the attempt.
    #[error("it asks for more memory or CPUs than it was queued with")]
    OverReservation,
    /// The setting cannot be part of a submission.
    #[error("{place} cannot be submitted: {why}")]
    NotSubmitted {
        place: SettingPlace,
        why: &'static str,
    },
    /// The path contains a colon, at which the worker would split it.
    #[error(
        "{place}: {given:?} holds a colon, and is not here when it is read again; give PATH:INSIDE"
    )]
    SubmittedColon { place: SettingPlace, given: PathBuf },
    /// A part of the submission is not UTF-8, and the queue stores text.
    #[error("{what} is not UTF-8 text, which a submission must be: {given:?}")]
    SubmittedText { what: &'static str, given: OsString },
    /// `--retry-on` names a state after which no attempt is repeated.
    #[error(
        "{place}: {given:?} is no end after which an analysis can be tried again; these are {}",
        table::RETRY_ON.map(State::as_str).join(", ")
    )]
    RetryOn { place: SettingPlace, given: String },
    /// The key under which to submit at most once is too long, empty, or has control characters.
    #[error(
        "{place} must have from 1 to {} characters, and no control characters",
        table::KEY_CHARS_MAX
    )]
    BadKey { place: SettingPlace },
    /// The id of the analysis is not valid.
    #[error("read --id")]
    Id(#[source] AnalysisIdError),
    /// The project is not a directory.
    #[error("the project {0:?} is not a directory")]
    NoProject(PathBuf),
    /// The path or the part after its last colon is empty.
    #[error(
        "{place}: {given:?} has nothing before or after its last colon; give PATH or PATH:{suffix}"
    )]
    EmptyPart {
        place: SettingPlace,
        given: OsString,
        suffix: &'static str,
    },
    /// The path inside the sandbox is not absolute and plain, or is below /proc, /dev or /sys.
    #[error("{place}: {given:?} is not an absolute path without `..` outside /proc, /dev and /sys")]
    BadInside { place: SettingPlace, given: PathBuf },
    /// The name of an input in the workspace is not a plain relative path.
    #[error("{place}: {given:?} is not a relative path without `..`")]
    BadName { place: SettingPlace, given: PathBuf },
    /// The name that is given for a variable is not valid.
    #[error("{place}: {given:?} is not a variable's name, [A-Za-z_][A-Za-z0-9_]*")]
    EnvName {
        place: SettingPlace,
        given: OsString,
    },
    /// The variable's name has the prefix of Fumehood's own variables.
    #[error("{place}: names that begin with FUMEHOOD_ are reserved, {name:?} too")]
    EnvReserved { place: SettingPlace, name: OsString },
    /// The variable is longer than execve accepts.
    #[error("{place}: {name:?} is longer than {ENV_BYTES_MAX} bytes")]
    EnvTooLong { place: SettingPlace, name: OsString },
    /// A variable is to be passed on that the caller does not have.
    #[error("{place}: you have no variable {name:?} to hand on; give a value, {name:?}=…")]
    EnvMissing { place: SettingPlace, name: OsString },
    /// The policy does not allow passing on this variable of the caller's.
    #[error(
        "{place}: the policy {policy:?} does not let {name:?} be handed on; the operator can \
         list it in `env.pass`"
    )]
    EnvNotPassed {
        place: SettingPlace,
        name: OsString,
        policy: PathBuf,
    },
    /// The text is not a pattern for names of variables whose values are not recorded.
    #[error("{place}: {given:?} is neither a variable's name nor the beginning of one and a star")]
    SecretName {
        place: SettingPlace,
        given: OsString,
    },
    /// The patterns for outputs are not valid.
    #[error("read the globs of `{name}`")]
    Globs {
        name: &'static str,
        #[source]
        source: GlobError,
    },
    /// `--allow-degraded` names a limit that does not exist.
    #[error(
        "{place}: there is no limit {given:?}; the limits are {}",
        table::limit_names()
    )]
    NoSuchLimit { place: SettingPlace, given: String },
    /// The policy does not let this limit be degraded.
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
    /// The value exceeds the policy's ceiling.
    #[error("{place} is {given}, above the ceiling of {ceiling} in the policy {policy:?}")]
    OverCeiling {
        place: SettingPlace,
        given: String,
        ceiling: String,
        policy: PathBuf,
    },
    /// The isolation level is weaker than the policy's floor.
    #[error(
        "{place} is below the floor `full` in the policy {policy:?}; only the operator can lower it"
    )]
    BelowFloor {
        place: SettingPlace,
        policy: PathBuf,
    },
    /// The policy does not grant the host's /dev/shm.
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
