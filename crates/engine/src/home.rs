//! The directory in which Fumehood keeps its own files: run directories, attempts that await their commit, and by
//! default the database and the artifact store. Also: which machine and which boot this is.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use store::types::analysis_id::AnalysisId;

/// Why the home, or the run directory of an analysis in it, cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum HomeError {
    /// No variable says where the home should be.
    #[error("find a home for Fumehood: set FUMEHOOD_HOME, or HOME, to an absolute path")]
    NoHome,
    /// `FUMEHOOD_HOME` is not an absolute path.
    #[error("FUMEHOOD_HOME is {path:?}; it must be an absolute path")]
    Relative { path: PathBuf },
    /// A directory could not be created or examined.
    #[error("make the directory {path:?}")]
    Make { path: PathBuf, source: io::Error },
    /// A directory belongs to another user, or others may write to it.
    #[error(
        "{path:?} belongs to another user or can be written by others; chmod 700 it, or set FUMEHOOD_HOME to a directory of your own"
    )]
    NotPrivate { path: PathBuf },
    /// Another process holds the run directory of the analysis, or an attempt of it is not cleaned up yet.
    #[error(
        "analysis {id} is running already, or its directory is being cleaned up; choose another --id, or wait for it"
    )]
    Running { id: AnalysisId },
    /// An ended attempt of the analysis has a workspace that is still kept.
    #[error(
        "analysis {id} left a kept workspace at {workspace:?}; remove it with `fumehood gc --kept {id}`, or choose another --id"
    )]
    Kept { id: AnalysisId, workspace: PathBuf },
    /// An attempt of the analysis has ended and is not committed.
    #[error(
        "analysis {id} has ended and awaits its commit; finish it with `fumehood post-process {id}`"
    )]
    Pending { id: AnalysisId },
    /// The analysis has a prepared workspace in which nothing has run.
    #[error(
        "analysis {id} has a workspace made by `fumehood workspace create`; run in it with `--in {id}`, or remove it with `fumehood workspace remove {id}`"
    )]
    Open { id: AnalysisId },
    /// The analysis has no prepared workspace in this home.
    #[error("analysis {id} has no workspace here; make one with `fumehood workspace create {id}`")]
    NoWorkspace { id: AnalysisId },
    /// The analysis has run in its prepared workspace and is not committed.
    #[error(
        "analysis {id} ran in its workspace already; commit it with `fumehood post-process {id}`, or remove it with `fumehood workspace remove {id}`"
    )]
    RanAlready { id: AnalysisId },
    /// A run directory could not be opened or locked.
    #[error("lock {path:?}")]
    Lock { path: PathBuf, source: io::Error },
    /// A file or directory below the home could not be written or removed.
    #[error("write {path:?}")]
    Write { path: PathBuf, source: io::Error },
    /// A file below the home could not be read, or is not what Fumehood wrote.
    #[error("read {path:?}")]
    Read { path: PathBuf, source: io::Error },
}

impl HomeError {
    /// Whether the file is not a document of Fumehood: a power cut tore it, or somebody overwrote it.
    pub(crate) fn is_torn(&self) -> bool {
        let torn = [io::ErrorKind::UnexpectedEof, io::ErrorKind::InvalidData];
        matches!(self, HomeError::Read { source, .. } if torn.contains(&source.kind()))
    }
}

/// Fumehood's home directory: `$FUMEHOOD_HOME`, else `/var/lib/fumehood` for root and a directory in the user's data
/// directory for everybody else.
#[derive(Clone, Debug)]
pub struct Home {
    path: PathBuf,
}

impl Home {
    /// Finds the home by the variables of this process.
    pub fn from_process() -> Result<Home, HomeError> {
        Home::find(&|name| std::env::var_os(name).map(PathBuf::from))
    }

    /// Finds the home by the variables that `env` returns and by the effective uid. Creates nothing.
    pub fn find(env: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Home, HomeError> {
        let root = rustix::process::geteuid().is_root();
        let absolute = |path: &PathBuf| path.is_absolute();
        if let Some(given) = env("FUMEHOOD_HOME").filter(|path| !path.is_absolute()) {
            return Err(HomeError::Relative { path: given });
        }
        let path = env("FUMEHOOD_HOME")
            .or_else(|| root.then(|| PathBuf::from("/var/lib/fumehood")))
            .or_else(|| {
                env("XDG_DATA_HOME")
                    .filter(absolute)
                    .map(|p| p.join("fumehood"))
            })
            .or_else(|| {
                env("HOME")
                    .filter(absolute)
                    .map(|p| p.join(".local/share/fumehood"))
            })
            .ok_or(HomeError::NoHome)?;
        Ok(Home { path })
    }

    /// Creates the directory with mode 0700. Fails if it exists and another user owns it or may write to it.
    pub fn open(self) -> Result<Home, HomeError> {
        create_private_dir(&self.path)?;
        create_private_dir(&self.runs())?;
        create_private_dir(&self.pending())?;
        Ok(self)
    }

    /// Returns the home's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the directory of the run directories: `{id}/{attempt}` for each attempt that is not cleaned up yet.
    pub fn runs(&self) -> PathBuf {
        self.path.join("runs")
    }

    /// Attempts that ended and could not be committed. They are not below the workspace root, because /tmp is emptied
    /// at boot.
    pub fn pending(&self) -> PathBuf {
        self.path.join("pending")
    }

    /// The workers' slots and locks.
    pub fn workers(&self) -> PathBuf {
        self.path.join("workers")
    }

    /// Returns the path of the SQLite database that is used if no other is named.
    pub fn database(&self) -> PathBuf {
        self.path.join("fumehood.db")
    }

    /// Returns the path of the artifact store that is used if no other is named.
    pub fn artifacts(&self) -> PathBuf {
        self.path.join("artifacts")
    }
}

pub(crate) fn create_private_dir(path: &Path) -> Result<(), HomeError> {
    let failed = |source| HomeError::Make {
        path: path.to_path_buf(),
        source,
    };
    let meta = match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => meta,
        _ => {
            let mut builder = std::fs::DirBuilder::new();
            let created = builder.recursive(true).mode(0o700).create(path);
            created.map_err(failed)?;
            std::fs::metadata(path).map_err(failed)?
        }
    };
    let is_private = meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o022 == 0;
    match is_private {
        true => Ok(()),
        false => Err(HomeError::NotPrivate {
            path: path.to_path_buf(),
        }),
    }
}

/// The id of this machine. It does not change when the host name changes.
pub fn machine_id() -> String {
    let id = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    match id.trim() {
        "" => rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned(),
        id => id.to_owned(),
    }
}

/// Distinguishes this boot of the machine from every other boot.
pub fn boot_id() -> String {
    static READ: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let read = || std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    READ.get_or_init(|| read().trim().to_owned()).clone()
}

/// When this machine was booted, in Unix seconds.
pub fn boot_seconds() -> Option<i64> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("btime "))?;
    line.trim().parse().ok()
}

pub(crate) fn unix_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |d| d.as_millis() as u64)
}

/// Returns the time in seconds since 1970, or 0 if the clock shows an earlier time.
pub fn unix_seconds() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map(|d| d.as_secs()).unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_home_is_refused() {
        let find = |given: &'static str| {
            Home::find(&move |name| match name {
                "FUMEHOOD_HOME" => Some(given.into()),
                _ => Some("/home/ada".into()),
            })
        };
        for relative in ["", ".", "runs", "../runs"] {
            let found = find(relative);
            let refused = matches!(found, Err(HomeError::Relative { .. }));
            assert!(refused, "{relative:?}: {found:?}");
        }
        assert_eq!(find("/srv/fume").unwrap().path(), Path::new("/srv/fume"));
    }
}
