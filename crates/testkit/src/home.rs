//! The directories of one trial, and the binary under test in them.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::command::{FinishedCommand, RunningCommand, finish};
use crate::is_root;
use crate::process::names_in;
use crate::program;

/// A project, a `FUMEHOOD_HOME`, a workspace root and a user's home directory for one trial.
pub struct TestHome {
    /// Removed when the trial ends.
    dir: TempDir,
    /// The working directory of every command.
    pub project: PathBuf,
    /// `FUMEHOOD_HOME`.
    pub home: PathBuf,
    /// `FUMEHOOD_WORKSPACE_ROOT`.
    pub workspace_root: PathBuf,
    /// `HOME`.
    pub user_home: PathBuf,
}

impl Default for TestHome {
    fn default() -> TestHome {
        TestHome::new()
    }
}

impl TestHome {
    pub fn new() -> TestHome {
        let dir = tempfile::Builder::new()
            .prefix("fumehood-lab-")
            .tempdir_in(parent_of_homes())
            .unwrap();
        let make = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir(&path).unwrap();
            set_mode(&path, 0o755);
            path
        };
        TestHome {
            project: make("project"),
            home: dir.path().join("home"),
            workspace_root: make("work"),
            user_home: make("person"),
            dir,
        }
    }

    /// The path of a name beside the project. Creates nothing.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file beside the project, with its directories, and returns its path.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    /// As [`TestHome::write`], and makes the file executable.
    pub fn write_program(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.write(name, content);
        set_mode(&path, 0o755);
        path
    }

    /// A command of `fumehood` without arguments, with nothing of this process's environment.
    pub fn fumehood(&self) -> Command {
        self.with_environment(Command::new(program::binary()))
    }

    /// Gives a command the directories of this home and nothing of this process's environment.
    pub fn with_environment(&self, mut command: Command) -> Command {
        command
            .env_clear()
            .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
            .env("HOME", &self.user_home)
            .env("FUMEHOOD_HOME", &self.home)
            .env("FUMEHOOD_WORKSPACE_ROOT", &self.workspace_root)
            .current_dir(&self.project)
            .stdin(Stdio::null());
        command
    }

    /// `fumehood run ARGS`, not started.
    pub fn run_command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = self.fumehood();
        command.arg("run").args(args);
        command
    }

    /// `fumehood run ARGS`, to its end.
    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> FinishedCommand {
        finish(self.run_command(args))
    }

    /// Runs a shell script inside, with options of `fumehood run`.
    pub fn sh(&self, options: &[&str], script: &str) -> FinishedCommand {
        self.run(options.iter().copied().chain(["--", "sh", "-c", script]))
    }

    /// Runs a Python script inside, with options of `fumehood run`.
    pub fn python(&self, options: &[&str], script: &str) -> FinishedCommand {
        let python = ["--", "/usr/bin/python3", "-c", script];
        self.run(options.iter().copied().chain(python))
    }

    /// As [`TestHome::sh`] with `--json`; returns the document, whatever the outcome.
    pub fn sh_json(&self, options: &[&str], script: &str) -> Value {
        let options: Vec<&str> = ["--json"].iter().chain(options).copied().collect();
        self.sh(&options, script).document()
    }

    /// `fumehood run ARGS`, started.
    pub fn start<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> RunningCommand {
        RunningCommand::start(self.run_command(args))
    }

    /// `fumehood gc ARGS`, to its end.
    pub fn gc(&self, args: &[&str]) -> FinishedCommand {
        let mut command = self.fumehood();
        command.arg("gc").args(args);
        finish(command)
    }

    /// `fumehood ARGS`, to its end.
    pub fn ask<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> FinishedCommand {
        let mut command = self.fumehood();
        command.args(args);
        finish(command)
    }

    /// As [`TestHome::ask`]; asserts exit code 0 and returns the JSON document.
    #[track_caller]
    pub fn ask_json<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Value {
        let ended = self.ask(args);
        ended.good();
        ended.document()
    }

    /// The rows that another program reads from the SQLite database, with bytes in hexadecimal.
    #[track_caller]
    pub fn sql(&self, query: &str) -> Vec<Vec<Value>> {
        let script = "import json, sqlite3, sys
db = sqlite3.connect('file:' + sys.argv[1] + '?mode=ro', uri=True)
plain = lambda v: v.hex() if isinstance(v, bytes) else v
print(json.dumps([[plain(v) for v in row] for row in db.execute(sys.argv[2])]))";
        let asked = Command::new("/usr/bin/python3")
            .args(["-c", script])
            .arg(self.home.join("fumehood.db"))
            .arg(query)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&asked.stderr);
        assert!(asked.status.success(), "{query}: {said}");
        serde_json::from_slice(&asked.stdout).unwrap()
    }

    /// The first value of the only row of a query.
    #[track_caller]
    pub fn sql_one(&self, query: &str) -> Value {
        let mut rows = self.sql(query);
        assert_eq!(rows.len(), 1, "{query}: {rows:?}");
        rows.remove(0).remove(0)
    }

    /// The path of the object with this hash in the artifact store.
    pub fn object(&self, hash: &str) -> PathBuf {
        let (first, rest) = hash.split_at(2);
        self.home.join("artifacts/objects").join(first).join(rest)
    }

    /// The names in the workspace root.
    pub fn workspaces(&self) -> Vec<OsString> {
        names_in(&self.workspace_root)
    }

    /// The path of an analysis's workspace.
    pub fn workspace(&self, id: &str) -> PathBuf {
        self.workspace_root.join(format!("scidex-analysis-{id}"))
    }

    /// Asserts that no workspace, no unfinished workspace and no run directory is left.
    pub fn assert_nothing_left(&self) {
        assert_eq!(self.workspaces(), Vec::<OsString>::new(), "workspaces");
        let runs = names_in(&self.home.join("runs"));
        assert_eq!(runs, Vec::<OsString>::new(), "run directories");
    }
}

impl Drop for TestHome {
    fn drop(&mut self) {
        // A trial that failed half-way leaves cgroups behind, and the records that name the cgroups go with the home.
        if std::thread::panicking() {
            let mut command = self.fumehood();
            let _ = command.args(["gc", "--kept"]).output();
        }
    }
}

/// The directory in which homes are made. It is not below /tmp or /var/tmp, because inside the sandbox these two are
/// the analysis's own. So if a path of the home exists inside, the run was really shown it.
fn parent_of_homes() -> PathBuf {
    match is_root() {
        true => PathBuf::from("/srv"),
        false => PathBuf::from(std::env::var_os("HOME").unwrap()),
    }
}

pub fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}
