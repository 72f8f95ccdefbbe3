//! Checks whether the program will find the files that its arguments name.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use sandbox::spec::ReadOnlyView;
use store::types::escaping::quote_for_shell;

use super::error::PlanError;
use super::paths::{canonical, without_dot_components};

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
            let quoted = quote_for_shell(arg);
            let suggestion = self.suggested_option(path);
            return Err(PlanError::ArgumentNotVisible {
                arg: quoted,
                suggestion,
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
            let real = canonical(&self.cwd.join(path)).unwrap_or_else(|_| self.cwd.join(path));
            join_with_colon(&real, &without_dot_components(&self.workspace.join(path)))
        } else if plain.components().count() == 1 {
            return format!("--input {}", quote_for_shell(plain.as_os_str()));
        } else {
            // `--input sub/file.csv` alone would arrive as `file.csv`, but the argument names `sub/file.csv`.
            return format!(
                "--input {}",
                quote_for_shell(&join_with_colon(&plain, &plain))
            );
        };
        format!("--read {}", quote_for_shell(&option))
    }

    fn is_visible(&self, path: &Path) -> bool {
        let inside = without_dot_components(&self.workspace.join(path));
        let system = [
            "/usr", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/etc", "/dev",
        ];
        system.iter().any(|s| inside.starts_with(s))
            || self
                .views
                .iter()
                .any(|v| inside.starts_with(v.target.as_path()))
            || self
                .inputs
                .iter()
                .any(|(_, name)| inside.starts_with(self.workspace.join(name)))
    }
}

fn join_with_colon(first: &Path, second: &Path) -> OsString {
    let mut both = first.as_os_str().to_owned();
    both.push(":");
    both.push(second);
    both
}
