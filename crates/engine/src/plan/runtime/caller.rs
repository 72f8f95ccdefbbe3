//! What is known of the caller: its PATH, a few variables, and the home directories of the host.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::host_files::{self, LinkPolicy};

/// The parts of the caller's environment that choose a runtime, and the home directories of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallerEnvironment {
    /// PATH.
    pub path: OsString,
    /// The current directory. Relative paths of the request start here.
    pub cwd: PathBuf,
    /// Those of HOME, VIRTUAL_ENV, CONDA_PREFIX, PYENV_VERSION, R_LIBS and R_LIBS_USER that are set.
    pub env: BTreeMap<OsString, OsString>,
    /// The home directories of the people on this host.
    pub homes: Vec<PathBuf>,
}

const CALLER_ENV: [&str; 6] = [
    "HOME",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYENV_VERSION",
    "R_LIBS",
    "R_LIBS_USER",
];

/// The most bytes of /etc/passwd to read. Large sites list many people.
const PASSWD_BYTES_MAX: usize = 16 << 20;

impl CallerEnvironment {
    /// Reads the environment of this process and the users of this host.
    pub fn from_process() -> CallerEnvironment {
        let env: BTreeMap<OsString, OsString> = CALLER_ENV
            .iter()
            .filter_map(|name| Some((OsString::from(name), std::env::var_os(name)?)))
            .collect();
        let passwd = host_files::read_head(
            Path::new("/etc/passwd"),
            LinkPolicy::Follow,
            PASSWD_BYTES_MAX,
        );
        let mut homes: Vec<PathBuf> = env
            .get(OsStr::new("HOME"))
            .map(PathBuf::from)
            .into_iter()
            .collect();
        homes.extend(homes_of(&passwd.unwrap_or_default()));
        CallerEnvironment {
            path: std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into()),
            cwd: std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
            env,
            homes,
        }
    }

    /// The directory that `~` stands for.
    pub(super) fn home(&self) -> Option<PathBuf> {
        let set = self.env.get(OsStr::new("HOME")).map(PathBuf::from);
        set.or_else(|| self.homes.first().cloned())
            .filter(|home| home.is_absolute())
    }

    /// The prefix of an activated environment; `name` is VIRTUAL_ENV or CONDA_PREFIX.
    pub(in crate::plan) fn active(&self, name: &str) -> Option<&Path> {
        self.env
            .get(OsStr::new(name))
            .map(Path::new)
            .filter(|prefix| prefix.is_absolute())
    }
}

/// The home directories of root and of people in passwd(5). Homes of system accounts are system directories, so they
/// are left out.
pub(super) fn homes_of(passwd: &[u8]) -> Vec<PathBuf> {
    let homes = passwd.split(|b| *b == b'\n').filter_map(|line| {
        let mut fields = line.split(|b| *b == b':').skip(2);
        let uid: u32 = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
        let home = PathBuf::from(OsStr::from_bytes(fields.nth(2)?));
        ((uid == 0 || uid >= 1000) && home.is_absolute() && home.parent().is_some()).then_some(home)
    });
    homes.collect()
}
