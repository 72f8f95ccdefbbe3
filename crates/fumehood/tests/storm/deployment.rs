//! A home with a database and a post-process command, and the check that every analysis in it has ended and left
//! nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;
use store::types::manifest::ContentHash;
use store::{Location, LocationOrigin, Store};
use testkit::command::{FinishedCommand, RunningCommand, finish};
use testkit::fresh_id;
use testkit::home::TestHome;
use testkit::postgres::PrivatePostgres;
use testkit::process::{cgroups_of, names_in, processes_with};

use crate::database_rows::Rows;
use crate::expected_state::{self, ExpectedState, StoredState};

#[derive(Clone)]
pub enum Database {
    Sqlite(PathBuf),
    Postgres {
        server: &'static PrivatePostgres,
        name: String,
        user: &'static str,
    },
}

/// A `FUMEHOOD_HOME` with its workspace root. Several may share a database and an artifact store.
#[derive(Clone)]
pub struct Machine {
    pub home: PathBuf,
    pub root: PathBuf,
}

impl Machine {
    pub fn workspace(&self, id: &str) -> PathBuf {
        self.root.join(format!("scidex-analysis-{id}"))
    }

    pub fn run_dir(&self, id: &str) -> PathBuf {
        self.home.join("runs").join(id).join("1")
    }
}

/// Which command finishes what a dead runner left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    Gc,
    /// Every run recovers dead runners' attempts before it starts.
    NextRun,
    PostProcess,
}

pub struct TestDeployment {
    pub test_home: TestHome,
    pub database: Database,
    /// The prefix of every id, by which the checks find leftovers.
    pub stem: String,
    pub machine: Machine,
    others: AtomicU32,
}

/// The prefix of ids of runs that only recover others.
const NEXT: &str = "next-";

impl TestDeployment {
    pub fn sqlite(stem: &str) -> TestDeployment {
        TestDeployment::new(stem, |test_home| {
            Database::Sqlite(test_home.home.join("fumehood.db"))
        })
    }

    /// On the server that all trials of this process share.
    pub fn postgres(stem: &str) -> TestDeployment {
        TestDeployment::on(
            PrivatePostgres::shared().expect("PostgreSQL must be installed"),
            stem,
        )
    }

    pub fn on(server: &'static PrivatePostgres, stem: &str) -> TestDeployment {
        let deployment = TestDeployment::new(stem, |_| Database::Postgres {
            server,
            name: server.create_database(),
            user: "postgres",
        });
        Store::migrate(&deployment.location()).unwrap();
        deployment
    }

    fn new(stem: &str, database: impl FnOnce(&TestHome) -> Database) -> TestDeployment {
        let test_home = TestHome::new();
        // The command gets one JSON document on one line, and its working directory has the outputs.
        let journal = test_home.path("journal");
        let step = format!(
            "#!/bin/sh\nread -r told\nset -- * deep/*\nprintf '%s|%s\\n' \"$*\" \"$told\" >> {}\n",
            journal.display()
        );
        let step = test_home.write_program("step", step);
        let config = format!("[post_process]\ncommand = [{:?}]\n", step.to_str().unwrap());
        test_home.write("person/.config/fumehood/config.toml", config);
        TestDeployment {
            database: database(&test_home),
            stem: fresh_id(stem),
            machine: Machine {
                home: test_home.home.clone(),
                root: test_home.workspace_root.clone(),
            },
            others: AtomicU32::new(0),
            test_home,
        }
    }

    pub fn id(&self, name: &str) -> String {
        format!("{}-{name}", self.stem)
    }

    /// Another home beside the first.
    pub fn another_machine(&self, number: usize) -> Machine {
        let root = self.test_home.path(&format!("work-{number}"));
        std::fs::create_dir(&root).unwrap();
        Machine {
            home: self.test_home.path(&format!("home-{number}")),
            root,
        }
    }

    pub fn artifacts(&self) -> PathBuf {
        self.test_home.home.join("artifacts")
    }

    pub fn address(&self) -> String {
        match &self.database {
            Database::Sqlite(file) => format!("sqlite:{}", file.display()),
            Database::Postgres { server, name, user } => server.address(name, user),
        }
    }

    pub fn location(&self) -> Location {
        Location::parse(&self.address(), LocationOrigin::CommandLine, &|_| None).unwrap()
    }

    pub fn fumehood<S: AsRef<OsStr>>(
        &self,
        machine: &Machine,
        args: impl IntoIterator<Item = S>,
    ) -> Command {
        let mut command = self.test_home.fumehood();
        command
            .env("FUMEHOOD_DB", self.address())
            .env("FUMEHOOD_ARTIFACTS", self.artifacts())
            .env("FUMEHOOD_HOME", &machine.home)
            .env("FUMEHOOD_WORKSPACE_ROOT", &machine.root)
            .args(args);
        command
    }

    /// A run of the program with this id.
    pub fn program(&self, machine: &Machine, id: &str) -> Command {
        let options = [
            "run",
            "-q",
            "--inline-max",
            expected_state::INLINE_MAX,
            "--id",
            id,
        ];
        let words = ["--", "sh", "-c", expected_state::PROGRAM, id];
        self.fumehood(machine, options.into_iter().chain(words))
    }

    /// Starts the program, which waits for [`let_go`].
    pub fn start_waiting(&self, id: &str) -> RunningCommand {
        let mut command = self.fumehood(&self.machine, ["run", "-q", "--stdin", "-"]);
        command.args(["--inline-max", expected_state::INLINE_MAX, "--id", id]);
        command.args(["--", "sh", "-c", expected_state::PROGRAM, id, "wait"]);
        // A small disk has no room for the reserve.
        command
            .env("FUMEHOOD_FREE_RESERVE", "0")
            .stdin(Stdio::piped());
        let mut live = RunningCommand::start(command);
        live.wait_for("up");
        live
    }

    pub fn recovery(&self, machine: &Machine, how: Recovery, id: &str) -> Command {
        match how {
            Recovery::Gc => self.fumehood(machine, ["gc"]),
            Recovery::PostProcess => self.fumehood(machine, ["post-process", id]),
            Recovery::NextRun => {
                let number = self.others.fetch_add(1, Ordering::Relaxed);
                let next = format!("{NEXT}{}-{number}", self.stem);
                self.fumehood(machine, ["run", "-q", "--id", &next, "--", "true"])
            }
        }
    }

    /// Recovers once, which must be enough.
    #[track_caller]
    pub fn recover(&self, how: Recovery, id: &str) -> FinishedCommand {
        let ended = finish(self.recovery(&self.machine, how, id));
        ended.good();
        ended
    }

    pub fn rows(&self) -> Rows {
        let rows = match &self.database {
            Database::Sqlite(file) => Rows::of_sqlite(file),
            Database::Postgres { server, name, .. } => Rows::of_postgres(server, name),
        };
        rows.without(NEXT)
    }

    /// The keys of the attempts for which the post-process command ran at least once with all outputs in place.
    fn steps(&self) -> BTreeSet<String> {
        let journal = std::fs::read_to_string(self.test_home.path("journal")).unwrap_or_default();
        let key = |line: &str| -> Option<String> {
            let (files, told) = line.split_once('|')?;
            let files: BTreeSet<&str> = files.split(' ').collect();
            // If a runner died, the command may have got half of the document. The command then runs again.
            let told: Value = serde_json::from_str(told).ok()?;
            let outputs = told["outputs"].as_array()?;
            let seen = |output: &Value| files.contains(output["path"].as_str().unwrap());
            outputs
                .iter()
                .all(seen)
                .then(|| told["key"].as_str().unwrap().to_owned())
        };
        journal.lines().filter_map(key).collect()
    }

    /// Asserts that each analysis is in its expected state, and that nothing else is left of any.
    #[track_caller]
    pub fn check(&self, expected_states: &[(String, ExpectedState)]) {
        let (rows, steps, artifacts) = (self.rows(), self.steps(), self.artifacts());
        let kept = StoredState {
            rows: &rows,
            artifacts: &artifacts,
            steps: &steps,
        };
        for (id, expected) in expected_states {
            kept.check(id, expected);
            assert_eq!(processes_with(id), [0u32; 0], "processes of {id}");
        }
        let ours: BTreeSet<&str> = expected_states.iter().map(|(id, _)| id.as_str()).collect();
        for row in rows.all("attempts") {
            let id = crate::database_rows::text(row, "id").unwrap();
            assert!(ours.contains(id), "{id} came from nowhere");
        }
        kept.check_no_other_objects();
        self.check_disk(&self.machine);
        let groups = cgroups_of(&self.stem);
        assert!(groups.is_empty(), "{groups:?}");
    }

    /// Asserts that no workspace, run directory or pending commit is left.
    #[track_caller]
    pub fn check_disk(&self, machine: &Machine) {
        let nothing: [OsString; 0] = [];
        assert_eq!(names_in(&machine.root), nothing, "workspaces");
        for name in ["runs", "pending"] {
            assert_eq!(names_in(&machine.home.join(name)), nothing, "{name}");
        }
    }

    /// As [`TestDeployment::check`], and asserts that another recovery changes no row and no file.
    #[track_caller]
    pub fn check_for_good(&self, expected_states: &[(String, ExpectedState)], how: Recovery) {
        self.check(expected_states);
        let before = (self.rows(), self.files());
        self.recover(how, "");
        let after = (self.rows(), self.files());
        assert!(before == after, "{before:?}\nwas changed to\n{after:?}");
    }

    /// The hash of each file that is kept outside the database.
    fn files(&self) -> BTreeMap<PathBuf, ContentHash> {
        let is_database = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy();
            name.starts_with("fumehood.db")
        };
        let files = expected_state::files_below(&self.test_home.home).into_iter();
        files
            .filter(|path| !is_database(path))
            .map(|path| {
                let content = std::fs::read(&path).unwrap();
                (path, ContentHash::of(&content))
            })
            .collect()
    }
}

/// Lets a program of [`TestDeployment::start_waiting`] go on.
pub fn let_go(live: &mut RunningCommand) {
    live.write("go\n");
}

/// Whether the lock of a run directory is free: the runner and the processes that it was starting are gone.
pub fn is_unlocked(run_dir: &Path) -> bool {
    let Ok(dir) = std::fs::File::open(run_dir) else {
        return true;
    };
    rustix::fs::flock(&dir, rustix::fs::FlockOperation::NonBlockingLockShared).is_ok()
}
