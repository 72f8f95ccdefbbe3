//! The settings of all sources, merged, and the policy that bounds them.

use std::ffi::OsStr;
use std::path::PathBuf;

use crate::request::{RequestedLimit, RequestedLimits};

use super::entries::{self, FileSettings, SettingEntry, SettingOrigin, SettingValue};
use super::error::ConfigError;
use super::policy::Policy;
use super::post_process::PostProcessSettings;
use super::sources::Sources;
use super::table::{GivenSettings, Key};
use super::trusted_file::{self, FileTrust, Privacy};

/// The upper bound of the default for memory. The rest of the default depends on the host.
const MEMORY_DEFAULT_MAX_BYTES: u64 = 4 << 30;
const KEEP_FOR_DEFAULT_MS: u64 = 24 * 3600 * 1000;
const WORKSPACE_ROOT_DEFAULT: &str = "/tmp";

/// Whether to read the project's `fumehood.toml`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ProjectFile {
    Read,
    Ignored,
}

/// Every entry of every source, weakest source first, and the policy that bounds them.
#[derive(Clone)]
pub struct MergedSettings {
    pub(super) project: PathBuf,
    pub(super) entries: Vec<SettingEntry>,
    pub(super) policy: Option<Policy>,
    /// Who may read the user's own file.
    pub(super) user_privacy: Privacy,
    pub(super) user_post_process: Option<PostProcessSettings>,
}

impl MergedSettings {
    pub(super) fn read(
        given: GivenSettings,
        sources: &Sources,
        project_file: ProjectFile,
    ) -> Result<MergedSettings, ConfigError> {
        let operator = FileTrust::Operator {
            uid: sources.policy_owner_uid,
        };
        let policy = trusted_file::read_trusted(&sources.policy, operator)
            .map_err(ConfigError::PolicyFile)?
            .map(|policy| Policy::parse(&policy.text, &sources.policy))
            .transpose()?;
        let mut strongest = entries::from_variables(&sources.env, &sources.cwd)?;
        strongest.extend(entries::from_flags(given, &sources.cwd)?);
        let (user, user_privacy) = match sources.user_config.clone().map(SettingOrigin::UserFile) {
            Some(origin) => read_file(&origin, sources.uid)?,
            None => (FileSettings::default(), Privacy::Shared),
        };
        let mut merged = MergedSettings {
            // Only variables and options can name the project, so its file can be found before the files are merged.
            project: match last(&strongest, Key::Project).map(|entry| &entry.value) {
                Some(SettingValue::Path(path)) => path.clone(),
                _ => entries::absolute(OsStr::new(""), &sources.cwd),
            },
            entries: user.entries,
            policy,
            user_privacy,
            user_post_process: user.post_process,
        };
        if project_file == ProjectFile::Read {
            merged.read_project_file(sources.uid)?;
        }
        merged.entries.extend(strongest);
        Ok(merged)
    }

    pub(super) fn read_project_file(&mut self, uid: u32) -> Result<(), ConfigError> {
        // Without this check, a mistyped project would look like a project without data.
        if !self.project.is_dir() {
            return Err(ConfigError::NoProject(self.project.clone()));
        }
        let origin = SettingOrigin::ProjectFile(self.project.join("fumehood.toml"));
        let (settings, _) = read_file(&origin, uid)?;
        self.entries.extend(settings.entries);
        Ok(())
    }

    pub(super) fn last(&self, key: Key) -> Option<&SettingEntry> {
        last(&self.entries, key)
    }

    pub(super) fn path(&self, key: Key) -> Option<PathBuf> {
        match &self.last(key)?.value {
            SettingValue::Path(path) => Some(path.clone()),
            _ => None,
        }
    }

    pub(super) fn workspace_root(&self) -> PathBuf {
        let root = self.path(Key::WorkspaceRoot);
        root.unwrap_or_else(|| PathBuf::from(WORKSPACE_ROOT_DEFAULT))
    }

    pub(super) fn keep_for_ms(&self) -> Result<u64, ConfigError> {
        Ok(self.limit(Key::KeepFor, KEEP_FOR_DEFAULT_MS)?.value)
    }

    pub(super) fn word(&self, key: Key) -> Option<&'static str> {
        match self.last(key)?.value {
            SettingValue::Word(word) => Some(word),
            _ => None,
        }
    }

    pub(super) fn switch(&self, key: Key) -> bool {
        matches!(
            self.last(key),
            Some(SettingEntry {
                value: SettingValue::Switch(true),
                ..
            })
        )
    }

    pub(super) fn limits(&self) -> Result<RequestedLimits, ConfigError> {
        let default = RequestedLimits::default();
        Ok(RequestedLimits {
            wall_ms: self.limit(Key::Timeout, default.wall_ms.value)?,
            cpu_ms: self.optional_limit(Key::CpuTime, u64::MAX)?,
            idle_ms: self.optional_limit(Key::IdleTimeout, u64::MAX)?,
            grace_ms: self.limit(Key::Grace, default.grace_ms.value)?,
            memory_bytes: self.optional_limit(Key::Memory, MEMORY_DEFAULT_MAX_BYTES)?,
            cpu_milli: self.optional_limit(Key::Cpus, u64::MAX)?,
            pids: self.limit(Key::Pids, default.pids.value)?,
            open_files: self.limit(Key::OpenFiles, default.open_files.value)?,
            disk_bytes: self.limit(Key::Disk, default.disk_bytes.value)?,
            files: self.limit(Key::Files, default.files.value)?,
            log_bytes: self.limit(Key::LogLimit, default.log_bytes.value)?,
        })
    }

    /// Returns a limit that always holds. The caller did not ask for the default, so lower it to the ceiling without an
    /// error.
    pub(super) fn limit(&self, key: Key, default: u64) -> Result<RequestedLimit<u64>, ConfigError> {
        Ok(match self.requested(key)? {
            Some(SettingValue::Number(value)) => RequestedLimit::asked(value),
            _ => RequestedLimit::default_of(default.min(self.ceiling(key).unwrap_or(u64::MAX))),
        })
    }

    /// Returns a limit that is off, or left to the host, unless asked for. Under a ceiling the limit is never off.
    pub(super) fn optional_limit(
        &self,
        key: Key,
        default_max: u64,
    ) -> Result<Option<RequestedLimit<u64>>, ConfigError> {
        Ok(match (self.requested(key)?, self.ceiling(key)) {
            (Some(SettingValue::Number(value)), _) => Some(RequestedLimit::asked(value)),
            (_, Some(ceiling)) => Some(RequestedLimit::default_of(ceiling.min(default_max))),
            (_, None) => None,
        })
    }

    /// Returns the value asked for. A value above the ceiling is an error, and so is `off`.
    pub(super) fn requested(&self, key: Key) -> Result<Option<SettingValue>, ConfigError> {
        let Some(entry) = self.last(key) else {
            return Ok(None);
        };
        let kind = key.setting().kind;
        let over = |given: String, ceiling: u64, policy: &Policy| ConfigError::OverCeiling {
            place: entry.place.clone(),
            given,
            ceiling: kind.show(ceiling),
            policy: policy.path.clone(),
        };
        if let Some((policy, ceiling)) = self
            .policy
            .as_ref()
            .and_then(|p| Some((p, p.ceiling(key)?)))
        {
            match entry.value {
                SettingValue::Number(number) if number > ceiling => {
                    return Err(over(kind.show(number), ceiling, policy));
                }
                SettingValue::Off => return Err(over("off".to_owned(), ceiling, policy)),
                _ => {}
            }
        }
        Ok(Some(entry.value.clone()))
    }

    pub(super) fn ceiling(&self, key: Key) -> Option<u64> {
        self.policy.as_ref()?.ceiling(key)
    }
}

fn last(entries: &[SettingEntry], key: Key) -> Option<&SettingEntry> {
    entries
        .iter()
        .rev()
        .find(|entry| entry.place.setting.key == key)
}

fn read_file(origin: &SettingOrigin, uid: u32) -> Result<(FileSettings, Privacy), ConfigError> {
    let nothing = (FileSettings::default(), Privacy::Shared);
    let (SettingOrigin::UserFile(path) | SettingOrigin::ProjectFile(path)) = origin else {
        return Ok(nothing);
    };
    match trusted_file::read_trusted(path, FileTrust::Caller { uid }).map_err(ConfigError::File)? {
        Some(read) => Ok((entries::from_file(&read.text, origin)?, read.privacy)),
        None => Ok(nothing),
    }
}
