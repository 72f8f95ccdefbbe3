//! The database or the disk becomes unavailable while a program runs. The exit code and the message report it, nothing is
//! lost, and a recovery finishes everything once the database or the disk is back.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use testkit::command::{FinishedCommand, RunningCommand, finish};
use testkit::home::set_mode;
use testkit::postgres::PrivatePostgres;
use testkit::process::names_in;
use testkit::wait::eventually;
use testkit::{is_root, trial};

use crate::deployment::{Database, Recovery, TestDeployment, let_go};
use crate::expected_state::ExpectedState;
use crate::random_kills::RandomNumbers;
use crate::report;

/// Asserts that the program ran, that its attempt is not committed, and that the message names the remedy.
#[track_caller]
fn assert_not_committed(ended: &FinishedCommand, id: &str) {
    ended.refused(121, "NOT COMMITTED: ");
    ended.refused(121, &format!("fumehood post-process {id}"));
}

/// A server for one trial. It ends with this process.
pub fn own_server() -> &'static PrivatePostgres {
    Box::leak(Box::new(
        PrivatePostgres::start().expect("PostgreSQL must be installed"),
    ))
}

trial!(Everyone, postgres_is_killed_while_runs_commit);
fn postgres_is_killed_while_runs_commit() {
    const ROUNDS: usize = 8;
    const RUNS: usize = 3;
    let server = own_server();
    let deployment = TestDeployment::on(server, "killed");
    let mut random = RandomNumbers::new(77);
    let mut expected_states = Vec::new();
    let mut codes = Vec::new();
    let began = std::time::Instant::now();
    finish(deployment.program(&deployment.machine, &deployment.id("pace"))).good();
    expected_states.push((deployment.id("pace"), ExpectedState::Whole));
    let run_duration = began.elapsed();
    for round in 0..ROUNDS {
        let ids: Vec<String> = (0..RUNS)
            .map(|run| deployment.id(&format!("{round}-{run}")))
            .collect();
        let mut lives: Vec<RunningCommand> =
            ids.iter().map(|id| deployment.start_waiting(id)).collect();
        // In the first round the server is killed before any attempt can commit, and later while attempts commit.
        if round == 0 {
            server.kill();
        }
        lives.iter_mut().for_each(let_go);
        if round > 0 {
            // This sleep waits for no event. It varies the moment of the interruption.
            std::thread::sleep(random.moment(run_duration));
            match round % 2 {
                0 => server.kill(),
                _ => stop_at_once(server),
            }
        }
        let mut unmarked = Vec::new();
        for (live, id) in lives.into_iter().zip(ids) {
            let ended = live.finish();
            match ended.code() {
                // The attempt was committed, and the server went down before the post-process command was recorded.
                121 if ended.err().contains("post_process failed: ") => {
                    unmarked.push(id.clone());
                }
                121 => assert_not_committed(&ended, &id),
                code => assert_eq!((code, round > 0), (0, true), "{}", ended.err()),
            }
            codes.push(ended.code());
            expected_states.push((id, ExpectedState::Whole));
        }
        server.start_again();
        deployment.recover(Recovery::Gc, "");
        for id in unmarked {
            deployment.recover(Recovery::PostProcess, &id);
        }
        deployment.check(&expected_states);
    }
    deployment.check_for_good(&expected_states, Recovery::Gc);
    let waited = codes.iter().filter(|code| **code == 121).count();
    report(&format!(
        "{}: {waited} of {} runs could not commit",
        deployment.stem,
        codes.len()
    ));
}

/// Stops the server like `pg_ctl stop -m immediate`: every process of the server quits at once.
pub fn stop_at_once(server: &PrivatePostgres) {
    let text = std::fs::read_to_string(server.dir().join("data/postmaster.pid")).unwrap();
    let pid = text.lines().next().unwrap().parse().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, Signal::QUIT).unwrap();
}

trial!(
    Everyone,
    runs_stay_pending_while_postgres_refuses_logins_or_writes
);
fn runs_stay_pending_while_postgres_refuses_logins_or_writes() {
    let server = own_server();
    let mut deployment = TestDeployment::on(server, "forbidden");
    let Database::Postgres { name, .. } = deployment.database.clone() else {
        unreachable!()
    };
    server.psql("postgres", "CREATE ROLE fumehood_runner LOGIN");
    server.psql(&name, store::GRANTS);
    deployment.database = Database::Postgres {
        server,
        name: name.clone(),
        user: "fumehood_runner",
    };
    let mut expected_states = Vec::new();
    // Each pair of statements revokes the right to write, and restores it.
    let tables = "ALL TABLES IN SCHEMA fumehood";
    let ways = [
        (
            format!("REVOKE INSERT, UPDATE ON {tables} FROM fumehood_runner"),
            store::GRANTS.to_owned(),
        ),
        (
            "ALTER ROLE fumehood_runner NOLOGIN".to_owned(),
            "ALTER ROLE fumehood_runner LOGIN".to_owned(),
        ),
        (
            format!("ALTER DATABASE {name} RENAME TO elsewhere"),
            format!("ALTER DATABASE elsewhere RENAME TO {name}"),
        ),
        (
            format!("ALTER DATABASE {name} SET default_transaction_read_only = on"),
            format!("ALTER DATABASE {name} RESET default_transaction_read_only"),
        ),
    ];
    for (number, (forbid, allow)) in ways.iter().enumerate() {
        let id = deployment.id(&number.to_string());
        let mut live = deployment.start_waiting(&id);
        wait_until_disconnected(&deployment, &live);
        // A session cannot rename its own database, and a read-only session cannot make its database writable. Such
        // statements therefore run in the database `postgres`.
        let at = |sql: &str| {
            if sql.starts_with("ALTER DATABASE") {
                "postgres"
            } else {
                name.as_str()
            }
        };
        server.psql(at(forbid), forbid);
        let_go(&mut live);
        assert_not_committed(&live.finish(), &id);
        assert!(
            !deployment.machine.workspace(&id).exists(),
            "what is safe elsewhere needs no workspace"
        );
        // A run that cannot be recorded does not start.
        let refused = deployment.id("refused");
        let ended = finish(deployment.program(&deployment.machine, &refused));
        assert_eq!(ended.code(), 125, "{}", ended.err());
        server.psql(at(allow), allow);
        deployment.recover([Recovery::PostProcess, Recovery::Gc][number % 2], &id);
        expected_states.push((id, ExpectedState::Whole));
        deployment.check(&expected_states);
    }
    deployment.check_for_good(&expected_states, Recovery::Gc);
}

/// Waits until the runner has closed its database connection, which it keeps for a moment in case the program ends soon. Over
/// that connection the runner could commit even if it may no longer open a new one.
fn wait_until_disconnected(deployment: &TestDeployment, live: &RunningCommand) {
    eventually("the database is let go", || match &deployment.database {
        Database::Sqlite(path) => {
            let held = std::fs::read_dir(format!("/proc/{}/fd", live.pid())).unwrap();
            let mut names = held.flatten().filter_map(|fd| fd.path().read_link().ok());
            !names.any(|name| name == *path)
        }
        Database::Postgres { server, name, .. } => {
            let count = format!("SELECT COUNT(*) FROM pg_stat_activity WHERE datname = '{name}'");
            server.psql("postgres", &count).trim() == "0"
        }
    });
}

/// Another program with an open transaction.
struct OpenTransaction(Child);

impl OpenTransaction {
    fn of(file: &Path) -> OpenTransaction {
        const HOLD: &str = "import sqlite3, sys\n\
             db = sqlite3.connect(sys.argv[1], isolation_level=None)\n\
             db.execute('BEGIN EXCLUSIVE')\n\
             print('held', flush=True)\n\
             sys.stdin.read()\n";
        let mut child = Command::new("/usr/bin/python3")
            .args(["-c", HOLD])
            .arg(file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = std::io::BufReader::new(child.stdout.as_mut().unwrap());
        std::io::BufRead::read_line(&mut out, &mut line).unwrap();
        assert_eq!(line, "held\n");
        OpenTransaction(child)
    }
}

impl Drop for OpenTransaction {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _reaped = self.0.wait();
    }
}

trial!(Everyone, sqlite_is_locked_by_another_process);
fn sqlite_is_locked_by_another_process() {
    let deployment = TestDeployment::sqlite("locked");
    let id = deployment.id("run");
    let mut live = deployment.start_waiting(&id);
    let holder = OpenTransaction::of(&deployment.test_home.home.join("fumehood.db"));
    let_go(&mut live);
    assert_not_committed(&live.finish(), &id);
    drop(holder);
    deployment.recover(Recovery::PostProcess, &id);
    deployment.check_for_good(&[(id, ExpectedState::Whole)], Recovery::Gc);
}

/// A directory that cannot be written to, not even by root, until it is dropped.
struct ReadOnlyDirectory {
    dir: PathBuf,
}

impl ReadOnlyDirectory {
    fn new(dir: &Path) -> ReadOnlyDirectory {
        match is_root() {
            // Root ignores file modes, but not a read-only mount.
            true => {
                mount(&["--bind"], dir, dir);
                mount(&["-o", "remount,bind,ro"], dir, dir);
            }
            false => {
                for name in names_in(dir) {
                    let path = dir.join(name);
                    if path.is_file() {
                        set_mode(&path, 0o400);
                    }
                }
                set_mode(dir, 0o500);
            }
        }
        ReadOnlyDirectory {
            dir: dir.to_path_buf(),
        }
    }
}

impl Drop for ReadOnlyDirectory {
    fn drop(&mut self) {
        match is_root() {
            true => unmount(&self.dir),
            false => {
                set_mode(&self.dir, 0o700);
                for name in names_in(&self.dir) {
                    let path = self.dir.join(name);
                    if path.is_file() {
                        set_mode(&path, 0o600);
                    }
                }
            }
        }
    }
}

fn mount(options: &[&str], from: &Path, to: &Path) {
    let mounted = Command::new("mount")
        .args(options)
        .arg(from)
        .arg(to)
        .status();
    assert!(
        mounted.unwrap().success(),
        "mount {options:?} {from:?} {to:?}"
    );
}

fn unmount(dir: &Path) {
    let gone = Command::new("umount").arg("--lazy").arg(dir).status();
    assert!(gone.unwrap().success(), "umount {dir:?}");
}

trial!(Everyone, sqlite_cannot_be_written);
fn sqlite_cannot_be_written() {
    let mut deployment = TestDeployment::sqlite("closed");
    let dir = deployment.test_home.path("records");
    std::fs::create_dir(&dir).unwrap();
    set_mode(&dir, 0o700);
    deployment.database = Database::Sqlite(dir.join("fumehood.db"));
    let mut expected_states = Vec::new();
    for (number, how) in [Recovery::Gc, Recovery::PostProcess]
        .into_iter()
        .enumerate()
    {
        let id = deployment.id(&number.to_string());
        let mut live = deployment.start_waiting(&id);
        wait_until_disconnected(&deployment, &live);
        let closed = ReadOnlyDirectory::new(&dir);
        let_go(&mut live);
        assert_not_committed(&live.finish(), &id);
        assert!(
            !deployment.machine.workspace(&id).exists(),
            "what is safe elsewhere needs no workspace"
        );
        drop(closed);
        deployment.recover(how, &id);
        expected_states.push((id, ExpectedState::Whole));
        deployment.check(&expected_states);
    }
    deployment.check_for_good(&expected_states, Recovery::Gc);
}

trial!(Everyone, the_artifact_store_is_gone_or_closed);
fn the_artifact_store_is_gone_or_closed() {
    let deployment = TestDeployment::sqlite("store");
    let (store, elsewhere) = (
        deployment.artifacts(),
        deployment.test_home.path("elsewhere"),
    );
    // The whole artifact store is removed. Fumehood makes a new one, and later commits use it.
    let id = deployment.id("removed");
    let mut live = deployment.start_waiting(&id);
    std::fs::rename(&store, &elsewhere).unwrap();
    let_go(&mut live);
    let ended = live.finish();
    if ended.code() != 0 {
        assert_not_committed(&ended, &id);
        deployment.recover(Recovery::Gc, &id);
    }
    let mut expected_states = vec![(id, ExpectedState::Whole)];
    deployment.check(&expected_states);

    // A regular file replaces the directory of the artifact store.
    let id = deployment.id("replaced");
    let mut live = deployment.start_waiting(&id);
    std::fs::remove_dir_all(&elsewhere).unwrap();
    std::fs::rename(&store, &elsewhere).unwrap();
    std::fs::write(&store, "no directory").unwrap();
    let_go(&mut live);
    assert_not_committed(&live.finish(), &id);
    assert!(
        !deployment.machine.workspace(&id).exists(),
        "what is safe elsewhere needs no workspace"
    );
    std::fs::remove_file(&store).unwrap();
    std::fs::rename(&elsewhere, &store).unwrap();
    deployment.recover(Recovery::PostProcess, &id);
    expected_states.push((id, ExpectedState::Whole));
    deployment.check(&expected_states);

    // The artifact store is readable, but not writable.
    let id = deployment.id("closed");
    let mut live = deployment.start_waiting(&id);
    let closed = [
        ReadOnlyDirectory::new(&store.join("objects")),
        ReadOnlyDirectory::new(&store.join("staging")),
    ];
    let_go(&mut live);
    assert_not_committed(&live.finish(), &id);
    drop(closed);
    deployment.recover(Recovery::Gc, &id);
    expected_states.push((id, ExpectedState::Whole));
    deployment.check_for_good(&expected_states, Recovery::Gc);
}

/// A separate small file system that can grow.
struct SmallFileSystem(PathBuf);

impl SmallFileSystem {
    fn new(dir: &Path) -> SmallFileSystem {
        std::fs::create_dir(dir).unwrap();
        mount(
            &["-t", "tmpfs", "-o", "size=2m,mode=0700"],
            Path::new("tmpfs"),
            dir,
        );
        SmallFileSystem(dir.to_path_buf())
    }

    fn grow(&self) {
        mount(&["-o", "remount,size=64m"], Path::new("tmpfs"), &self.0);
    }

    /// Fills the file system until no byte is free.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("filler");
        let mut file = std::fs::File::create(&path).unwrap();
        let blocks = [0; 4096];
        let full = loop {
            if let Err(e) = std::io::Write::write_all(&mut file, &blocks) {
                break e;
            }
        };
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
        path
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}

trial!(Root, the_home_is_full);
fn the_home_is_full() {
    let deployment = TestDeployment::sqlite("full");
    let small = SmallFileSystem::new(&deployment.test_home.home);
    let mut expected_states = Vec::new();
    for (number, how) in [Recovery::Gc, Recovery::PostProcess, Recovery::NextRun]
        .into_iter()
        .enumerate()
    {
        let id = deployment.id(&number.to_string());
        let mut live = deployment.start_waiting(&id);
        let filler = small.fill();
        let_go(&mut live);
        assert_not_committed(&live.finish(), &id);
        std::fs::remove_file(filler).unwrap();
        // Finally make room for the free-space reserve of any run.
        small.grow();
        let mut command = deployment.recovery(&deployment.machine, how, &id);
        command.env("FUMEHOOD_FREE_RESERVE", "0");
        finish(command).good();
        expected_states.push((id, ExpectedState::WholeButLogs));
        deployment.check(&expected_states);
    }
    deployment.check_for_good(&expected_states, Recovery::Gc);
}
