//! What is kept of a run and where: the bounds of the collection, the database, the artifact store, the post_process
//! command.
//!
//! Whoever names the database can read every result, and the text that names it may contain a password. So the text
//! comes from the caller or the operator and never from a project, and no error repeats it.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};

use store::{Location, LocationError, LocationOrigin};

use crate::home::Home;
use crate::request::{AnalysisId, CollectionSettings, IdReuse, KeepPolicy, WorkspaceKind};

use super::database_url::{holds_password, sqlite_path};
use super::entries::{self, SettingEntry, SettingError, SettingOrigin, SettingValue};
use super::error::{ConfigError, RecordError};
use super::merged::{MergedSettings, ProjectFile};
use super::post_process::PostProcessSettings;
use super::sources::Sources;
use super::table::{DB_FILE_VARIABLE, GivenSettings, Key};
use super::trusted_file::{self, FileError, Privacy};

const FREE_RESERVE_DEFAULT_BYTES: u64 = 1 << 30;
/// The word for no database.
const NO_DB: &str = "none";

/// Where the record of a run goes, and what happens to its outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordSettings {
    /// `None`: the default, SQLite in FUMEHOOD_HOME.
    pub db: Option<DbChoice>,
    /// `None`: `artifacts` in FUMEHOOD_HOME.
    pub artifacts: Option<PathBuf>,
    /// The directory to which outputs are also exported after the commit.
    pub to: Option<PathBuf>,
    /// Whether the export may overwrite files.
    pub force: bool,
    /// The prepared workspace to run in. Its id is the id of the request.
    pub in_workspace: Option<AnalysisId>,
    /// The command to run after the commit: the policy's, else the user's. `None`: no command.
    pub post_process: Option<PostProcessSettings>,
    /// The size that the artifact store may reach. `None`: no bound.
    pub store_quota_bytes: Option<u64>,
    /// The space that must be free where results are kept for a run to start.
    pub free_reserve_bytes: u64,
    /// Whether the operator refuses runs that are not recorded.
    pub required: bool,
}

/// The database as the caller named it, with a relative path after `sqlite:` made absolute. The store validates the
/// text.
#[derive(Clone, PartialEq, Eq)]
pub struct DbChoice {
    pub text: String,
    pub origin: DbOrigin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DbOrigin {
    CommandLine,
    Environment,
    /// The file that FUMEHOOD_DB_FILE names, or the user's config.toml.
    File,
    /// The operator's policy. Nothing that the caller sets may lead to another database.
    Policy,
}

/// Leaves the text out: it may contain a password, and debug output ends up in logs.
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

    /// The choice of `shell`, which records nothing.
    pub(super) fn none() -> DbChoice {
        DbChoice {
            text: NO_DB.to_owned(),
            origin: DbOrigin::CommandLine,
        }
    }
}

/// Variables with which a caller may always identify itself to a database server.
const CALLER_VARIABLES: [&str; 6] = [
    "PGUSER",
    "PGPASSWORD",
    "PGPASSFILE",
    "PGSSLCERT",
    "PGSSLKEY",
    "HOME",
];

/// Why the settings name no place for the record.
#[derive(Debug, thiserror::Error)]
pub enum RecordLocationError {
    /// The text that names the database cannot be read.
    #[error("use the database")]
    Database(#[source] LocationError),
    /// The caller asked for no record, and the policy demands one.
    #[error("the operator's policy requires a record; leave out --db none")]
    Required,
}

impl RecordSettings {
    /// Returns the location of the database. `env` has the caller's variables.
    pub fn location(
        &self,
        home: &Home,
        env: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Location, RecordLocationError> {
        let location = match &self.db {
            None => Location::Sqlite(home.database()),
            Some(choice) => {
                let origin = match choice.origin {
                    DbOrigin::CommandLine => LocationOrigin::CommandLine,
                    DbOrigin::Environment => LocationOrigin::Environment,
                    DbOrigin::File | DbOrigin::Policy => LocationOrigin::File,
                };
                // Nothing that the caller sets may lead the operator's address elsewhere or weaken it.
                let is_ours = choice.origin != DbOrigin::Policy;
                let env = |name: &str| match is_ours || CALLER_VARIABLES.contains(&name) {
                    true => env(name),
                    false => None,
                };
                let location = Location::parse(&choice.text, origin, &env);
                location.map_err(RecordLocationError::Database)?
            }
        };
        match location {
            Location::None if self.required => Err(RecordLocationError::Required),
            location => Ok(location),
        }
    }
}

/// Returns the settings of commands that read or repair the record. Does not read the project's file: the file cannot
/// set any of these, and a broken file must not make the results of other projects inaccessible.
pub fn record_settings(
    given: GivenSettings,
    sources: &Sources,
) -> Result<RecordSettings, ConfigError> {
    let merged = MergedSettings::read(given, sources, ProjectFile::Ignored)?;
    let db = merged.db(sources)?;
    merged.record(db)
}

/// Returns the settings of `workspace create`: also where to make the workspace, and how long to keep it.
pub fn workspace_settings(
    given: GivenSettings,
    sources: &Sources,
) -> Result<(RecordSettings, PathBuf, u64), ConfigError> {
    let merged = MergedSettings::read(given, sources, ProjectFile::Ignored)?;
    let db = merged.db(sources)?;
    let root = merged.workspace_root();
    let keep_for_ms = merged.keep_for_ms()?;
    Ok((merged.record(db)?, root, keep_for_ms))
}

/// Returns the settings of `record`: also which files of the directory to take, and whether the id may exist already.
pub fn record_command_settings(
    given: GivenSettings,
    sources: &Sources,
) -> Result<(RecordSettings, CollectionSettings, IdReuse), ConfigError> {
    let merged = MergedSettings::read(given, sources, ProjectFile::Ignored)?;
    let db = merged.db(sources)?;
    let collection = merged.collection(merged.limits()?.disk_bytes.value)?;
    let again = merged.again();
    Ok((merged.record(db)?, collection, again))
}

/// A database that the caller asked for, and the place that names it, for messages.
struct RequestedDatabase {
    choice: DbChoice,
    place: String,
}

impl MergedSettings {
    /// Returns which of the program's files to keep as outputs. The default for their total size is the disk limit.
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
            // At least one output of the largest inline size must fit.
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

    /// Returns the prepared workspace to run in, if `--in` names one. Refuses options that concern a workspace still to
    /// be made. The same settings in a file or a variable are meant for other runs; [`MergedSettings::keep`] and
    /// [`MergedSettings::workspace_kind`] ignore them.
    pub(super) fn in_workspace(&self) -> Result<Option<AnalysisId>, RecordError> {
        let Some(SettingValue::Text(text)) = self.last(Key::In).map(|entry| &entry.value) else {
            return Ok(None);
        };
        let id = AnalysisId::new(&text.to_string_lossy()).map_err(RecordError::In)?;
        let typed = |key| {
            self.last(key)
                .filter(|entry| entry.place.origin == SettingOrigin::Flag)
        };
        let memory =
            typed(Key::Workspace).filter(|entry| entry.value == SettingValue::Word("memory"));
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

    /// Returns the database of the policy, if the policy names one and nobody contradicts it; else the one that the
    /// strongest source names.
    pub(super) fn db(&self, sources: &Sources) -> Result<Option<DbChoice>, ConfigError> {
        let asked = self.requested_database(sources)?;
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

    fn requested_database(
        &self,
        sources: &Sources,
    ) -> Result<Option<RequestedDatabase>, ConfigError> {
        let entries = || {
            self.entries
                .iter()
                .filter(|e| e.place.setting.key == Key::Db)
        };
        // Check every entry: a password in the wrong place can be read even if a stronger source overrides it.
        for entry in entries() {
            self.check_password(entry)?;
        }
        let of = |wanted: fn(&SettingOrigin) -> bool| entries().find(|e| wanted(&e.place.origin));
        let typed = of(|origin| *origin == SettingOrigin::Flag);
        let variable = of(|origin| *origin == SettingOrigin::Variable);
        let named_file = sources.env.get(OsStr::new(DB_FILE_VARIABLE));
        if variable.is_some() && named_file.is_some() {
            return Err(RecordError::BothVariables.into());
        }
        // Read the file that holds the secret only if nothing stronger names a database.
        match (typed.or(variable), named_file) {
            (Some(entry), _) => database_of_entry(entry).map(Some),
            (None, Some(name)) => from_db_file(name, sources).map(Some),
            (None, None) => of(|origin| matches!(origin, SettingOrigin::UserFile(_)))
                .map(database_of_entry)
                .transpose(),
        }
    }

    fn check_password(&self, entry: &SettingEntry) -> Result<(), ConfigError> {
        if !holds_password(db_text(entry)?) {
            return Ok(());
        }
        match (&entry.place.origin, self.user_privacy) {
            (SettingOrigin::Flag | SettingOrigin::Line | SettingOrigin::Queue, _) => {
                Err(RecordError::PasswordTyped.into())
            }
            // Other users cannot read the environment of a process.
            (SettingOrigin::Variable, _) | (SettingOrigin::UserFile(_), Privacy::Private) => Ok(()),
            (SettingOrigin::UserFile(_) | SettingOrigin::ProjectFile(_), _) => {
                Err(RecordError::PasswordShared {
                    place: entry.place.clone(),
                }
                .into())
            }
        }
    }
}

/// Trims spaces, as the store does, so that ` none` does not pass for the name of a database.
fn db_text(entry: &SettingEntry) -> Result<&str, ConfigError> {
    let text = match &entry.value {
        SettingValue::Text(text) => text.to_str().map(str::trim),
        _ => None,
    };
    Ok(text.ok_or_else(|| SettingError::NotText {
        place: entry.place.clone(),
    })?)
}

fn database_of_entry(entry: &SettingEntry) -> Result<RequestedDatabase, ConfigError> {
    let text =
        with_absolute_path(db_text(entry)?, &entry.base).ok_or_else(|| SettingError::NotText {
            place: entry.place.clone(),
        })?;
    let origin = match entry.place.origin {
        SettingOrigin::Flag | SettingOrigin::Line | SettingOrigin::Queue => DbOrigin::CommandLine,
        SettingOrigin::Variable => DbOrigin::Environment,
        SettingOrigin::UserFile(_) | SettingOrigin::ProjectFile(_) => DbOrigin::File,
    };
    Ok(RequestedDatabase {
        choice: DbChoice { text, origin },
        place: entry.place.to_string(),
    })
}

fn from_db_file(name: &OsStr, sources: &Sources) -> Result<RequestedDatabase, ConfigError> {
    if name.is_empty() {
        return Err(RecordError::DbFileUnnamed.into());
    }
    let path = entries::absolute(name, &sources.cwd);
    let line = trusted_file::read_secret_line(&path, sources.uid).map_err(RecordError::DbFile)?;
    if line.is_empty() || line.contains('\0') {
        return Err(RecordError::DbFileEmpty(path).into());
    }
    let base = path.parent().unwrap_or(Path::new("/"));
    let Some(text) = with_absolute_path(&line, base) else {
        let path = path.clone();
        return Err(RecordError::DbFile(FileError::NotText { path }).into());
    };
    Ok(RequestedDatabase {
        choice: DbChoice {
            text,
            origin: DbOrigin::File,
        },
        place: DB_FILE_VARIABLE.to_owned(),
    })
}

/// Makes a relative path after `sqlite:` absolute: it is relative to the directory of whoever wrote it. Returns `None`
/// if that directory is not UTF-8. Leaves an in-memory database as it is, for the store to refuse.
fn with_absolute_path(text: &str, base: &Path) -> Option<String> {
    let is_relative = |path: &&str| !path.is_empty() && !path.starts_with('/');
    match sqlite_path(text).filter(|path| is_relative(path) && *path != ":memory:") {
        Some(path) => Some(format!(
            "sqlite:{}",
            entries::absolute(OsStr::new(path), base).to_str()?
        )),
        None => Some(text.to_owned()),
    }
}
