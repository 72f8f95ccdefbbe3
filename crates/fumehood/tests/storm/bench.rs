//! A laboratory with a database, a platform's own step, and the check that everything in it came to its end.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;
use store::types::manifest::ContentHash;
use store::{Location, LocationOrigin, Store};

use crate::lab::{Ended, Lab, Live, cgroups_of, finish, fresh_id, names_in, processes_with};
use crate::model::{self, Fate, Kept};
use crate::rows::Rows;
use crate::server::Server;

#[derive(Clone)]
pub enum Database {
    Sqlite(PathBuf),
    Postgres {
        server: &'static Server,
        name: String,
        user: &'static str,
    },
}

/// A home of Fumehood's with its workspaces. Several may share a database and an artifact store.
#[derive(Clone)]
pub struct Place {
    pub home: PathBuf,
    pub root: PathBuf,
}

impl Place {
    pub fn workspace(&self, id: &str) -> PathBuf {
        self.root.join(format!("scidex-analysis-{id}"))
    }

    pub fn run_dir(&self, id: &str) -> PathBuf {
        self.home.join("runs").join(id).join("1")
    }
}

/// Who finishes what the dead left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    Gc,
    /// Every run looks after the dead before it starts.
    NextRun,
    PostProcess,
}

pub struct Bench {
    pub lab: Lab,
    pub database: Database,
    /// Begins every id, so that what is left of any of them can be found.
    pub stem: String,
    pub place: Place,
    others: AtomicU32,
}

/// The ids of runs that only come to recover others.
const NEXT: &str = "next-";

impl Bench {
    pub fn sqlite(stem: &str) -> Bench {
        Bench::new(stem, |lab| Database::Sqlite(lab.home.join("fumehood.db")))
    }

    /// On the server that all trials of this process share.
    pub fn postgres(stem: &str) -> Bench {
        Bench::on(
            Server::shared().expect("PostgreSQL must be installed"),
            stem,
        )
    }

    pub fn on(server: &'static Server, stem: &str) -> Bench {
        let bench = Bench::new(stem, |_| Database::Postgres {
            server,
            name: server.database(),
            user: "postgres",
        });
        Store::migrate(&bench.location()).unwrap();
        bench
    }

    fn new(stem: &str, database: impl FnOnce(&Lab) -> Database) -> Bench {
        let lab = Lab::new();
        // It is told one document on one line, and sees the outputs where it stands.
        let journal = lab.path("journal");
        let step = format!(
            "#!/bin/sh\nread -r told\nset -- * deep/*\nprintf '%s|%s\\n' \"$*\" \"$told\" >> {}\n",
            journal.display()
        );
        let step = lab.write_program("step", step);
        let config = format!("[post_process]\ncommand = [{:?}]\n", step.to_str().unwrap());
        lab.write("person/.config/fumehood/config.toml", config);
        Bench {
            database: database(&lab),
            stem: fresh_id(stem),
            place: Place {
                home: lab.home.clone(),
                root: lab.root.clone(),
            },
            others: AtomicU32::new(0),
            lab,
        }
    }

    pub fn id(&self, name: &str) -> String {
        format!("{}-{name}", self.stem)
    }

    /// Another home beside the first.
    pub fn another_place(&self, number: usize) -> Place {
        let root = self.lab.path(&format!("work-{number}"));
        std::fs::create_dir(&root).unwrap();
        Place {
            home: self.lab.path(&format!("home-{number}")),
            root,
        }
    }

    pub fn artifacts(&self) -> PathBuf {
        self.lab.home.join("artifacts")
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
        place: &Place,
        args: impl IntoIterator<Item = S>,
    ) -> Command {
        let mut command = self.lab.fumehood();
        command
            .env("FUMEHOOD_DB", self.address())
            .env("FUMEHOOD_ARTIFACTS", self.artifacts())
            .env("FUMEHOOD_HOME", &place.home)
            .env("FUMEHOOD_WORKSPACE_ROOT", &place.root)
            .args(args);
        command
    }

    /// The program under an id.
    pub fn program(&self, place: &Place, id: &str) -> Command {
        let options = ["run", "-q", "--inline-max", model::INLINE_MAX, "--id", id];
        let words = ["--", "sh", "-c", model::PROGRAM, id];
        self.fumehood(place, options.into_iter().chain(words))
    }

    /// The program, up and waiting for [`let_go`].
    pub fn start_waiting(&self, id: &str) -> Live {
        let mut command = self.fumehood(&self.place, ["run", "-q", "--stdin", "-"]);
        command.args(["--inline-max", model::INLINE_MAX, "--id", id]);
        command.args(["--", "sh", "-c", model::PROGRAM, id, "wait"]);
        // What a small disk has is for the run.
        command
            .env("FUMEHOOD_FREE_RESERVE", "0")
            .stdin(Stdio::piped());
        let mut live = Live::start(command);
        live.wait_for("up");
        live
    }

    pub fn recovery(&self, place: &Place, how: Recovery, id: &str) -> Command {
        match how {
            Recovery::Gc => self.fumehood(place, ["gc"]),
            Recovery::PostProcess => self.fumehood(place, ["post-process", id]),
            Recovery::NextRun => {
                let number = self.others.fetch_add(1, Ordering::Relaxed);
                let next = format!("{NEXT}{}-{number}", self.stem);
                self.fumehood(place, ["run", "-q", "--id", &next, "--", "true"])
            }
        }
    }

    /// Recovers once; that alone must be enough.
    #[track_caller]
    pub fn recover(&self, how: Recovery, id: &str) -> Ended {
        let ended = finish(self.recovery(&self.place, how, id));
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

    /// The keys that the platform's own step was told at least once with all outputs in place.
    fn steps(&self) -> BTreeSet<String> {
        let journal = std::fs::read_to_string(self.lab.path("journal")).unwrap_or_default();
        let key = |line: &str| -> Option<String> {
            let (files, told) = line.split_once('|')?;
            let files: BTreeSet<&str> = files.split(' ').collect();
            // One whose runner died was told only half of it, and is told again.
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

    /// Each analysis has the fate it must have, and nothing else is left of any.
    #[track_caller]
    pub fn check(&self, fates: &[(String, Fate)]) {
        let (rows, steps, artifacts) = (self.rows(), self.steps(), self.artifacts());
        let kept = Kept {
            rows: &rows,
            artifacts: &artifacts,
            steps: &steps,
        };
        for (id, fate) in fates {
            kept.check(id, fate);
            assert_eq!(processes_with(id), [0u32; 0], "processes of {id}");
        }
        let ours: BTreeSet<&str> = fates.iter().map(|(id, _)| id.as_str()).collect();
        for row in rows.all("attempts") {
            let id = crate::rows::text(row, "id").unwrap();
            assert!(ours.contains(id), "{id} came from nowhere");
        }
        kept.check_no_other_objects();
        self.check_disk(&self.place);
        let groups = cgroups_of(&self.stem);
        assert!(groups.is_empty(), "{groups:?}");
    }

    /// Neither a workspace, a run directory, nor anything that awaits its commit.
    #[track_caller]
    pub fn check_disk(&self, place: &Place) {
        let nothing: [OsString; 0] = [];
        assert_eq!(names_in(&place.root), nothing, "workspaces");
        for name in ["runs", "pending"] {
            assert_eq!(names_in(&place.home.join(name)), nothing, "{name}");
        }
    }

    /// As [`Bench::check`], and another recovery changes neither a row nor a file.
    #[track_caller]
    pub fn check_for_good(&self, fates: &[(String, Fate)], how: Recovery) {
        self.check(fates);
        let before = (self.rows(), self.files());
        self.recover(how, "");
        let after = (self.rows(), self.files());
        assert!(before == after, "{before:?}\nwas changed to\n{after:?}");
    }

    /// All that is kept outside of the database, by its content.
    fn files(&self) -> BTreeMap<PathBuf, ContentHash> {
        let is_database = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy();
            name.starts_with("fumehood.db")
        };
        let files = model::files_below(&self.lab.home).into_iter();
        files
            .filter(|path| !is_database(path))
            .map(|path| {
                let content = std::fs::read(&path).unwrap();
                (path, ContentHash::of(&content))
            })
            .collect()
    }
}

/// Lets a program go on that was started with [`Bench::start_waiting`].
pub fn let_go(live: &mut Live) {
    live.say("go\n");
}

/// Whether a run directory's lock is free: its runner, and whatever it was starting just then, is gone.
pub fn is_unlocked(run_dir: &Path) -> bool {
    let Ok(dir) = std::fs::File::open(run_dir) else {
        return true;
    };
    rustix::fs::flock(&dir, rustix::fs::FlockOperation::NonBlockingLockShared).is_ok()
}
