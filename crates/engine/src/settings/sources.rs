//! The inputs of a request besides the options.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use super::error::ConfigError;
use super::policy::POLICY_PATH;

/// Everything besides the options that decides about a request. The rest of this folder does not look at the process.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The caller's environment variables.
    pub env: BTreeMap<OsString, OsString>,
    /// The directory to which relative paths in options and variables are relative.
    pub cwd: PathBuf,
    /// The effective uid. The configuration files must belong to this user or to root.
    pub uid: u32,
    /// The path of the user's `config.toml`. `None`: the variables name no directory for it. The file need not exist.
    pub user_config: Option<PathBuf>,
    /// The path of the operator's policy. The file need not exist.
    pub policy: PathBuf,
    /// Who must own the policy: root, except in tests that do not run as root.
    pub policy_owner_uid: u32,
}

impl Sources {
    /// Takes the environment, the directory and the user of this process, and the policy's usual path.
    pub fn from_process() -> Result<Sources, ConfigError> {
        let env: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        Ok(Sources {
            cwd: std::env::current_dir().map_err(ConfigError::CurrentDirectory)?,
            uid: rustix::process::geteuid().as_raw(),
            user_config: user_config(&env),
            env,
            policy: PathBuf::from(POLICY_PATH),
            policy_owner_uid: 0,
        })
    }
}

/// Returns `$XDG_CONFIG_HOME/fumehood/config.toml`, or the same below `~/.config`. The XDG specification says to ignore
/// a path that is not absolute.
pub(super) fn user_config(env: &BTreeMap<OsString, OsString>) -> Option<PathBuf> {
    let absolute = |name: &str| {
        let path = PathBuf::from(env.get(OsStr::new(name))?);
        path.is_absolute().then_some(path)
    };
    let base = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")))?;
    Some(base.join("fumehood/config.toml"))
}
