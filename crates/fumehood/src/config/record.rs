//! What is kept of a run and where: the collection's bounds, the database, the artifact store, the platform's own step.
//!
//! Whoever names the database reads every result, and the text that names it may hold a password. So it comes from the
//! caller or the operator and never from a project, and no error here repeats it.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};

use engine::request::{
    AnalysisId, AnalysisIdError, CollectionSettings, IdReuse, KeepPolicy, WorkspaceKind,
};

use super::file::{self, FileError, Privacy};
use super::layer::{self, Entry, Origin, Place, SettingError, Value};
use super::post_process::PostProcess;
use super::settings::{DB_FILE_VARIABLE, Key};
use super::{ConfigError, Merged, Project, Sources};
use crate::cli::args::StoreArgs;

const FREE_RESERVE_DEFAULT_BYTES: u64 = 1 << 30;
/// The word that stands for no database.
const NO_DB: &str = "none";

/// Where the record of a run goes, and what is done with it there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordSettings {
    /// `None`: the default, SQLite in FUMEHOOD_HOME.
    pub db: Option<DbChoice>,
    /// `None`: `artifacts` in FUMEHOOD_HOME.
    pub artifacts: Option<PathBuf>,
    /// Where the outputs are also exported to after the commit.
    pub to: Option<PathBuf>,
    /// Whether the export may overwrite.
    pub force: bool,
    /// The workspace made before, whose id is then the request's.
    pub in_workspace: Option<AnalysisId>,
    pub post_process: Option<PostProcess>,
    /// All that the artifact store may hold. `None`: no bound.
    pub store_quota_bytes: Option<u64>,
    /// What must stay free where results are kept, for a run to start.
    pub free_reserve_bytes: u64,
    /// The operator refuses runs without a record.
    pub required: bool,
}

/// The database as it was named; its form is the store's to judge. A relative path after `sqlite:` is made absolute.
#[derive(Clone, PartialEq, Eq)]
pub struct DbChoice {
    pub text: String,
    pub origin: DbOrigin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DbOrigin {
    CommandLine,
    Environment,
    /// The file that FUMEHOOD_DB_FILE names, or the user's own.
    File,
    /// The operator's policy: nothing that the caller sets may lead elsewhere.
    Policy,
}

/// The text may hold a password, and what is printed for debugging ends up in logs.
impl fmt::Debug for DbChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DbChoice")
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

impl DbChoice {
    pub fn records_nothing(&self) -> bool {
        self.text == NO_DB
    }

    /// What `shell` records: nothing, wherever `run` would.
    pub(super) fn nowhere() -> DbChoice {
        DbChoice {
            text: NO_DB.to_owned(),
            origin: DbOrigin::CommandLine,
        }
    }
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
    PasswordShared { place: Place },
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

/// What the commands that read or mend the record need. The project's file has no say in any of it, so it is not
/// read: a broken one must not hide the results of others.
pub fn record_settings(args: &StoreArgs, sources: &Sources) -> Result<RecordSettings, ConfigError> {
    let merged = Merged::gather(args.given(), sources, Project::Unheard)?;
    let db = merged.db(sources)?;
    merged.record(db)
}

/// What `workspace create` needs besides: where the workspace is made, and how long it is kept.
pub fn workspace_settings(
    given: Vec<(Key, Vec<OsString>)>,
    sources: &Sources,
) -> Result<(RecordSettings, PathBuf, u64), ConfigError> {
    let merged = Merged::gather(given, sources, Project::Unheard)?;
    let db = merged.db(sources)?;
    let root = merged.workspace_root();
    let keep_for_ms = merged.keep_for_ms()?;
    Ok((merged.record(db)?, root, keep_for_ms))
}

/// What `record` needs besides: what is taken of the directory, and whether the id may be there already.
pub fn handed_in_settings(
    given: Vec<(Key, Vec<OsString>)>,
    sources: &Sources,
) -> Result<(RecordSettings, CollectionSettings, IdReuse), ConfigError> {
    let merged = Merged::gather(given, sources, Project::Unheard)?;
    let db = merged.db(sources)?;
    let collection = merged.collection(merged.limits()?.disk_bytes.value)?;
    let again = merged.again();
    Ok((merged.record(db)?, collection, again))
}

/// Whether the text that names a database may hold a password: `user:password@`, or one among the parameters. Whatever
/// might be one counts, since an error costs the caller little and a password shown to everybody does not.
pub(super) fn holds_password(text: &str) -> bool {
    if sqlite_path(text).is_some() {
        return false;
    }
    let after_scheme = text.split_once("://").map_or(text, |(_, rest)| rest);
    let in_user = after_scheme
        .split_once('@')
        .is_some_and(|(user, _)| user.contains(':'));
    let names_it = text.to_ascii_lowercase().contains("password=");
    // A percent sign could spell any letter of the parameter's name.
    let hides_it = text.split_once('?').is_some_and(|(_, parameters)| {
        let name = |pair: &str| pair.split('=').next().is_some_and(|n| n.contains('%'));
        parameters.split('&').any(name)
    });
    in_user || names_it || hides_it
}

pub(super) fn is_relative_sqlite(text: &str) -> bool {
    sqlite_path(text).is_some_and(|path| !path.starts_with('/'))
}

/// As the store reads it, which takes `sqlite://x.db` for the relative path `x.db`.
pub(super) fn sqlite_path(text: &str) -> Option<&str> {
    let path = text.strip_prefix("sqlite:")?;
    Some(path.strip_prefix("//").unwrap_or(path))
}

/// A database asked for, and by whom, for messages.
struct AskedDb {
    choice: DbChoice,
    place: String,
}

impl Merged {
    /// What is taken of what the program leaves. The room that it has is the default for what may be kept.
    pub(super) fn collection(&self, disk_bytes: u64) -> Result<CollectionSettings, ConfigError> {
        let default = CollectionSettings::default();
        let total_bytes_max = self.limit(Key::MaxOutput, disk_bytes)?.value;
        let depth_max = self.limit(Key::MaxDepth, default.depth_max.into())?.value;
        let inline_bytes_max = self.limit(Key::InlineMax, default.inline_bytes_max)?.value;
        Ok(CollectionSettings {
            outputs: self.globs(Key::Output)?,
            expects: self.globs(Key::Expect)?,
            total_bytes_max,
            file_bytes_max: self.limit(Key::MaxOutputFile, total_bytes_max)?.value,
            outputs_max: self.limit(Key::MaxOutputs, default.outputs_max)?.value,
            depth_max: u32::try_from(depth_max).unwrap_or(default.depth_max),
            inline_bytes_max,
            // At least one output of the largest size that was asked for must fit.
            inline_total_bytes_max: default.inline_total_bytes_max.max(inline_bytes_max),
        })
    }

    pub(super) fn again(&self) -> IdReuse {
        match self.switch(Key::Replace) {
            true => IdReuse::Replace,
            false => IdReuse::Refuse,
        }
    }

    pub(super) fn record(&self, db: Option<DbChoice>) -> Result<RecordSettings, ConfigError> {
        let to = self.path(Key::To);
        let force = self.switch(Key::Force);
        if force && to.is_none() {
            return Err(RecordError::ForceWithoutTo.into());
        }
        let policys = self.policy.as_ref().and_then(|p| p.post_process.clone());
        Ok(RecordSettings {
            db,
            artifacts: self.path(Key::Artifacts),
            to,
            force,
            in_workspace: self.in_workspace()?,
            post_process: policys.or_else(|| self.user_post_process.clone()),
            store_quota_bytes: self
                .optional_limit(Key::StoreQuota, u64::MAX)?
                .map(|quota| quota.value),
            free_reserve_bytes: self
                .limit(Key::FreeReserve, FREE_RESERVE_DEFAULT_BYTES)?
                .value,
            required: self.policy.as_ref().is_some_and(|p| p.record_required),
        })
    }

    /// The workspace to run in, if it is there already. Options that speak of one still to be made are refused beside
    /// it; the same words in a file or a variable are meant for other runs, and [`Merged::keep`] and
    /// [`Merged::workspace_kind`] pass over them.
    pub(super) fn in_workspace(&self) -> Result<Option<AnalysisId>, RecordError> {
        let Some(Value::Text(text)) = self.last(Key::In).map(|entry| &entry.value) else {
            return Ok(None);
        };
        let id = AnalysisId::new(&text.to_string_lossy()).map_err(RecordError::In)?;
        let typed = |key| {
            self.last(key)
                .filter(|entry| entry.place.origin == Origin::Flag)
        };
        let memory = typed(Key::Workspace).filter(|entry| entry.value == Value::Word("memory"));
        for (given, flag, why) in [
            (typed(Key::Id), "--id", "the workspace's id is the run's"),
            (memory, "--workspace memory", "it is on disk"),
            (typed(Key::Keep), "--keep", "it stays until it is removed"),
        ] {
            if given.is_some() {
                return Err(RecordError::InConflicts { flag, why });
            }
        }
        Ok(Some(id))
    }

    pub(super) fn workspace_kind(&self) -> WorkspaceKind {
        match self.word(Key::Workspace) {
            Some("memory") if self.last(Key::In).is_none() => WorkspaceKind::Memory,
            _ => WorkspaceKind::Disk,
        }
    }

    pub(super) fn keep(&self) -> KeepPolicy {
        match self.word(Key::Keep) {
            _ if self.last(Key::In).is_some() => KeepPolicy::Never,
            Some("always") => KeepPolicy::Always,
            Some("on-failure") => KeepPolicy::OnFailure,
            _ => KeepPolicy::Never,
        }
    }

    /// The operator's database if the policy names one, which nobody may contradict; else the strongest place's.
    pub(super) fn db(&self, sources: &Sources) -> Result<Option<DbChoice>, ConfigError> {
        let asked = self.asked_db(sources)?;
        let Some(policy) = &self.policy else {
            return Ok(asked.map(|asked| asked.choice));
        };
        let path = || policy.path.clone();
        match (asked, &policy.db) {
            (Some(asked), Some(locked)) if asked.choice.text != *locked => {
                Err(RecordError::NotThePolicys {
                    place: asked.place,
                    policy: path(),
                }
                .into())
            }
            (Some(asked), _) if policy.record_required && asked.choice.records_nothing() => {
                Err(RecordError::Required {
                    place: asked.place,
                    policy: path(),
                }
                .into())
            }
            (_, Some(locked)) => Ok(Some(DbChoice {
                text: locked.clone(),
                origin: DbOrigin::Policy,
            })),
            (asked, None) => Ok(asked.map(|asked| asked.choice)),
        }
    }

    fn asked_db(&self, sources: &Sources) -> Result<Option<AskedDb>, ConfigError> {
        let entries = || {
            self.entries
                .iter()
                .filter(|e| e.place.setting.key == Key::Db)
        };
        // Each by itself: a password in the wrong place is there whether or not it is overridden.
        for entry in entries() {
            self.check_password(entry)?;
        }
        let of = |wanted: fn(&Origin) -> bool| entries().find(|e| wanted(&e.place.origin));
        let typed = of(|origin| *origin == Origin::Flag);
        let variable = of(|origin| *origin == Origin::Variable);
        let named_file = sources.env.get(OsStr::new(DB_FILE_VARIABLE));
        if variable.is_some() && named_file.is_some() {
            return Err(RecordError::BothVariables.into());
        }
        // A secret that is not needed is not read.
        match (typed.or(variable), named_file) {
            (Some(entry), _) => asked_by(entry).map(Some),
            (None, Some(name)) => from_db_file(name, sources).map(Some),
            (None, None) => of(|origin| matches!(origin, Origin::UserFile(_)))
                .map(asked_by)
                .transpose(),
        }
    }

    fn check_password(&self, entry: &Entry) -> Result<(), ConfigError> {
        if !holds_password(db_text(entry)?) {
            return Ok(());
        }
        match (&entry.place.origin, self.user_privacy) {
            (Origin::Flag | Origin::Line | Origin::Queue, _) => {
                Err(RecordError::PasswordTyped.into())
            }
            // Other users cannot read the environment of a process.
            (Origin::Variable, _) | (Origin::UserFile(_), Privacy::Private) => Ok(()),
            (Origin::UserFile(_) | Origin::ProjectFile(_), _) => Err(RecordError::PasswordShared {
                place: entry.place.clone(),
            }
            .into()),
        }
    }
}

/// Without the space around it, as the store reads it: ` none` must not pass for the name of a database.
fn db_text(entry: &Entry) -> Result<&str, ConfigError> {
    let text = match &entry.value {
        Value::Text(text) => text.to_str().map(str::trim),
        _ => None,
    };
    Ok(text.ok_or_else(|| SettingError::NotText {
        place: entry.place.clone(),
    })?)
}

fn asked_by(entry: &Entry) -> Result<AskedDb, ConfigError> {
    let text = rooted(db_text(entry)?, &entry.base).ok_or_else(|| SettingError::NotText {
        place: entry.place.clone(),
    })?;
    let origin = match entry.place.origin {
        Origin::Flag | Origin::Line | Origin::Queue => DbOrigin::CommandLine,
        Origin::Variable => DbOrigin::Environment,
        Origin::UserFile(_) | Origin::ProjectFile(_) => DbOrigin::File,
    };
    Ok(AskedDb {
        choice: DbChoice { text, origin },
        place: entry.place.to_string(),
    })
}

fn from_db_file(name: &OsStr, sources: &Sources) -> Result<AskedDb, ConfigError> {
    if name.is_empty() {
        return Err(RecordError::DbFileUnnamed.into());
    }
    let path = layer::absolute(name, &sources.cwd);
    let line = file::read_secret_line(&path, sources.uid).map_err(RecordError::DbFile)?;
    if line.is_empty() || line.contains('\0') {
        return Err(RecordError::DbFileEmpty(path).into());
    }
    let base = path.parent().unwrap_or(Path::new("/"));
    let Some(text) = rooted(&line, base) else {
        let path = path.clone();
        return Err(RecordError::DbFile(FileError::NotText { path }).into());
    };
    Ok(AskedDb {
        choice: DbChoice {
            text,
            origin: DbOrigin::File,
        },
        place: DB_FILE_VARIABLE.to_owned(),
    })
}

/// A relative path after `sqlite:` means the directory of whoever wrote it. `None`: that directory is not text.
/// What SQLite would keep in memory stays as it is, for the store to refuse.
fn rooted(text: &str, base: &Path) -> Option<String> {
    let is_relative = |path: &&str| !path.is_empty() && !path.starts_with('/');
    match sqlite_path(text).filter(|path| is_relative(path) && *path != ":memory:") {
        Some(path) => Some(format!(
            "sqlite:{}",
            layer::absolute(OsStr::new(path), base).to_str()?
        )),
        None => Some(text.to_owned()),
    }
}
