//! Checks whether the program will find the files that its arguments name.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use sandbox::spec::ReadOnlyView;
use store::types::escaping::quote_for_shell;

use super::error::PlanError;
use super::paths::without_dot_components;

/// The paths that the program will see.
pub(super) struct VisiblePaths<'a> {
    pub(super) views: &'a [ReadOnlyView],
    pub(super) inputs: &'a [(PathBuf, PathBuf)],
    pub(super) workspace: &'a Path,
    pub(super) cwd: &'a Path,
}

impl VisiblePaths<'_> {
    /// Fails if an argument names a file that exists on the host and that the program will not find.
    pub(super) fn check_arguments<'a>(
        &self,
        args: impl IntoIterator<Item = &'a OsString>,
    ) -> Result<(), PlanError> {
        for arg in args {
            let path = Path::new(arg);
            let bytes = arg.as_encoded_bytes();
            if bytes.is_empty() || bytes.len() > 4096 || bytes[0] == b'-' || bytes.contains(&b'\n')
            {
                continue;
            }
            let Ok(meta) = std::fs::metadata(self.cwd.join(path)) else {
                continue;
            };
            // A word without a slash may be the name of a directory by chance; a word with a slash is meant as a
            // path.
            let meant =
                meta.is_file() || meta.is_dir() && bytes.contains(&b'/') && path != Path::new("/");
            if !meant || self.is_visible(path) {
                continue;
            }
            return Err(PlanError::ArgumentNotVisible {
                arg: quote_for_shell(arg),
                suggestion: self.suggested_option(path),
            });
        }
        Ok(())
    }

    /// The option that would put the file where the argument expects it.
    fn suggested_option(&self, path: &Path) -> String {
        let plain: PathBuf = path
            .components()
            .filter(|c| *c != Component::CurDir)
            .collect();
        let option = if path.is_absolute() {
            plain.into_os_string()
        } else if plain.components().any(|c| c == Component::ParentDir) {
            // The path leads out of the workspace, where only a view can appear.
            let host = self.cwd.join(path);
            let real = host.canonicalize().unwrap_or(host);
            join_with_colon(&real, &without_dot_components(&self.workspace.join(path)))
        } else {
            // `--input sub/file.csv` alone would arrive as `file.csv`, but the argument names `sub/file.csv`.
            let both = match plain.components().count() {
                1 => plain.into_os_string(),
                _ => join_with_colon(&plain, &plain),
            };
            return format!("--input {}", quote_for_shell(&both));
        };
        format!("--read {}", quote_for_shell(&option))
    }

    fn is_visible(&self, path: &Path) -> bool {
        let inside = without_dot_components(&self.workspace.join(path));
        let system = [
            "/usr", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/etc", "/dev",
        ];
        let is_copied = |name: &PathBuf| inside.starts_with(self.workspace.join(name));
        let mut views = self.views.iter();
        system.iter().any(|s| inside.starts_with(s))
            || views.any(|v| inside.starts_with(v.target.as_path()))
            || self.inputs.iter().any(|(_, name)| is_copied(name))
    }
}

fn join_with_colon(first: &Path, second: &Path) -> OsString {
    let mut both = first.as_os_str().to_owned();
    both.push(":");
    both.push(second);
    both
}
