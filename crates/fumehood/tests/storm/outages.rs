//! What a run needs to keep its results goes away while it runs: the exit code and the message tell it, nothing is
//! lost, and when it is back everything is finished.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;

use crate::bench::{Bench, Database, Recovery, let_go};
use crate::lab::{Ended, Live, eventually, finish, is_root, names_in, set_mode};
use crate::model::Fate;
use crate::random::Dice;
use crate::server::Server;
use crate::{Entry, For, say};

pub const TRIALS: &[Entry] = &[
    (
        "postgres_is_killed_while_runs_commit",
        For::Everyone,
        postgres_killed,
    ),
    (
        "postgres_is_away_or_forbids_it",
        For::Everyone,
        postgres_forbids,
    ),
    (
        "sqlite_is_locked_by_another_process",
        For::Everyone,
        sqlite_locked,
    ),
    ("sqlite_cannot_be_written", For::Everyone, sqlite_read_only),
    (
        "the_artifact_store_is_gone_or_closed",
        For::Everyone,
        artifacts_gone,
    ),
    ("the_home_is_full", For::Root, home_full),
];

/// It ran, it is not committed, and what to do is said.
#[track_caller]
fn assert_not_committed(ended: &Ended, id: &str) {
    ended.refused(121, "NOT COMMITTED: ");
    ended.refused(121, &format!("fumehood post-process {id}"));
}

/// A server of this trial's own. It goes when this process does.
pub fn own_server() -> &'static Server {
    Box::leak(Box::new(
        Server::start().expect("PostgreSQL must be installed"),
    ))
}

fn postgres_killed() {
    const ROUNDS: usize = 8;
    const RUNS: usize = 3;
    let server = own_server();
    let bench = Bench::on(server, "killed");
    let mut dice = Dice::new(77);
    let mut fates = Vec::new();
    let mut codes = Vec::new();
    let began = std::time::Instant::now();
    finish(bench.program(&bench.place, &bench.id("pace"))).good();
    fates.push((bench.id("pace"), Fate::Whole));
    let pace = began.elapsed();
    for round in 0..ROUNDS {
        let ids: Vec<String> = (0..RUNS)
            .map(|run| bench.id(&format!("{round}-{run}")))
            .collect();
        let mut lives: Vec<Live> = ids.iter().map(|id| bench.start_waiting(id)).collect();
        // The first time it is away before any can commit; later it is struck while they do.
        if round == 0 {
            server.kill();
        }
        lives.iter_mut().for_each(let_go);
        if round > 0 {
            // Not to wait for anything: to strike at different moments.
            std::thread::sleep(dice.moment(pace));
            match round % 2 {
                0 => server.kill(),
                _ => stop_at_once(server),
            }
        }
        let mut unmarked = Vec::new();
        for (live, id) in lives.into_iter().zip(ids) {
            let ended = live.end();
            match ended.code() {
                // Committed, and then the server was gone before it heard of the platform's own step.
                121 if ended.err().contains("post_process failed: ") => {
                    unmarked.push(id.clone());
                }
                121 => assert_not_committed(&ended, &id),
                code => assert_eq!((code, round > 0), (0, true), "{}", ended.err()),
            }
            codes.push(ended.code());
            fates.push((id, Fate::Whole));
        }
        server.start_again();
        bench.recover(Recovery::Gc, "");
        for id in unmarked {
            bench.recover(Recovery::PostProcess, &id);
        }
        bench.check(&fates);
    }
    bench.check_for_good(&fates, Recovery::Gc);
    let waited = codes.iter().filter(|code| **code == 121).count();
    say(&format!(
        "{}: {waited} of {} runs could not commit",
        bench.stem,
        codes.len()
    ));
}

/// `pg_ctl stop -m immediate`: every process of the server is told to quit at once.
pub fn stop_at_once(server: &Server) {
    let text = std::fs::read_to_string(server.dir().join("data/postmaster.pid")).unwrap();
    let pid = text.lines().next().unwrap().parse().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, Signal::QUIT).unwrap();
}

fn postgres_forbids() {
    let server = own_server();
    let mut bench = Bench::on(server, "forbidden");
    let Database::Postgres { name, .. } = bench.database.clone() else {
        unreachable!()
    };
    server.psql("postgres", "CREATE ROLE fumehood_runner LOGIN");
    server.psql(&name, store::GRANTS);
    bench.database = Database::Postgres {
        server,
        name: name.clone(),
        user: "fumehood_runner",
    };
    let mut fates = Vec::new();
    // Each takes away the right to write, and gives it back.
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
        let id = bench.id(&number.to_string());
        let mut live = bench.start_waiting(&id);
        until_let_go(&bench, &live);
        // A database is not renamed from within, nor made writable by one who may only read.
        let at = |sql: &str| {
            if sql.starts_with("ALTER DATABASE") {
                "postgres"
            } else {
                name.as_str()
            }
        };
        server.psql(at(forbid), forbid);
        let_go(&mut live);
        assert_not_committed(&live.end(), &id);
        assert!(
            !bench.place.workspace(&id).exists(),
            "what is safe elsewhere needs no workspace"
        );
        // Nor does anything start that could not be recorded.
        let refused = bench.id("refused");
        let ended = finish(bench.program(&bench.place, &refused));
        assert_eq!(ended.code(), 125, "{}", ended.err());
        server.psql(at(allow), allow);
        bench.recover([Recovery::PostProcess, Recovery::Gc][number % 2], &id);
        fates.push((id, Fate::Whole));
        bench.check(&fates);
    }
    bench.check_for_good(&fates, Recovery::Gc);
}

/// Until the runner has let go of the database, which it holds for a moment in case the program ends soon. What is
/// committed in that moment is committed, whatever becomes of the right to open it anew.
fn until_let_go(bench: &Bench, live: &Live) {
    eventually("the database is let go", || match &bench.database {
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

/// Another program in the middle of a transaction.
struct Holder(Child);

impl Holder {
    fn of(file: &Path) -> Holder {
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
        Holder(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _reaped = self.0.wait();
    }
}

fn sqlite_locked() {
    let bench = Bench::sqlite("locked");
    let id = bench.id("run");
    let mut live = bench.start_waiting(&id);
    let holder = Holder::of(&bench.lab.home.join("fumehood.db"));
    let_go(&mut live);
    assert_not_committed(&live.end(), &id);
    drop(holder);
    bench.recover(Recovery::PostProcess, &id);
    bench.check_for_good(&[(id, Fate::Whole)], Recovery::Gc);
}

/// A directory that cannot be written to, not even by root, until it is dropped.
struct Closed {
    dir: PathBuf,
}

impl Closed {
    fn new(dir: &Path) -> Closed {
        match is_root() {
            // Modes do not bind root; a read-only mount does.
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
        Closed {
            dir: dir.to_path_buf(),
        }
    }
}

impl Drop for Closed {
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

fn sqlite_read_only() {
    let mut bench = Bench::sqlite("closed");
    let dir = bench.lab.path("records");
    std::fs::create_dir(&dir).unwrap();
    set_mode(&dir, 0o700);
    bench.database = Database::Sqlite(dir.join("fumehood.db"));
    let mut fates = Vec::new();
    for (number, how) in [Recovery::Gc, Recovery::PostProcess]
        .into_iter()
        .enumerate()
    {
        let id = bench.id(&number.to_string());
        let mut live = bench.start_waiting(&id);
        until_let_go(&bench, &live);
        let closed = Closed::new(&dir);
        let_go(&mut live);
        assert_not_committed(&live.end(), &id);
        assert!(
            !bench.place.workspace(&id).exists(),
            "what is safe elsewhere needs no workspace"
        );
        drop(closed);
        bench.recover(how, &id);
        fates.push((id, Fate::Whole));
        bench.check(&fates);
    }
    bench.check_for_good(&fates, Recovery::Gc);
}

fn artifacts_gone() {
    let bench = Bench::sqlite("store");
    let (store, elsewhere) = (bench.artifacts(), bench.lab.path("elsewhere"));
    // Removed whole: a new one is made, and what is committed from now on is in that.
    let id = bench.id("removed");
    let mut live = bench.start_waiting(&id);
    std::fs::rename(&store, &elsewhere).unwrap();
    let_go(&mut live);
    let ended = live.end();
    if ended.code() != 0 {
        assert_not_committed(&ended, &id);
        bench.recover(Recovery::Gc, &id);
    }
    let mut fates = vec![(id, Fate::Whole)];
    bench.check(&fates);

    // Something else stands in its place.
    let id = bench.id("replaced");
    let mut live = bench.start_waiting(&id);
    std::fs::remove_dir_all(&elsewhere).unwrap();
    std::fs::rename(&store, &elsewhere).unwrap();
    std::fs::write(&store, "no directory").unwrap();
    let_go(&mut live);
    assert_not_committed(&live.end(), &id);
    assert!(
        !bench.place.workspace(&id).exists(),
        "what is safe elsewhere needs no workspace"
    );
    std::fs::remove_file(&store).unwrap();
    std::fs::rename(&elsewhere, &store).unwrap();
    bench.recover(Recovery::PostProcess, &id);
    fates.push((id, Fate::Whole));
    bench.check(&fates);

    // It can be read, and not written to.
    let id = bench.id("closed");
    let mut live = bench.start_waiting(&id);
    let closed = [
        Closed::new(&store.join("objects")),
        Closed::new(&store.join("staging")),
    ];
    let_go(&mut live);
    assert_not_committed(&live.end(), &id);
    drop(closed);
    bench.recover(Recovery::Gc, &id);
    fates.push((id, Fate::Whole));
    bench.check_for_good(&fates, Recovery::Gc);
}

/// A small file system of its own, with as much room as is wanted.
struct Small(PathBuf);

impl Small {
    fn new(dir: &Path) -> Small {
        std::fs::create_dir(dir).unwrap();
        mount(
            &["-t", "tmpfs", "-o", "size=2m,mode=0700"],
            Path::new("tmpfs"),
            dir,
        );
        Small(dir.to_path_buf())
    }

    fn grow(&self) {
        mount(&["-o", "remount,size=64m"], Path::new("tmpfs"), &self.0);
    }

    /// Until not one byte is left.
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

impl Drop for Small {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}

fn home_full() {
    let bench = Bench::sqlite("full");
    let small = Small::new(&bench.lab.home);
    let mut fates = Vec::new();
    for (number, how) in [Recovery::Gc, Recovery::PostProcess, Recovery::NextRun]
        .into_iter()
        .enumerate()
    {
        let id = bench.id(&number.to_string());
        let mut live = bench.start_waiting(&id);
        let filler = small.fill();
        let_go(&mut live);
        assert_not_committed(&live.end(), &id);
        std::fs::remove_file(filler).unwrap();
        // Room for what any run wants to have free, in the end.
        small.grow();
        let mut command = bench.recovery(&bench.place, how, &id);
        command.env("FUMEHOOD_FREE_RESERVE", "0");
        finish(command).good();
        fates.push((id, Fate::WholeButLogs));
        bench.check(&fates);
    }
    bench.check_for_good(&fates, Recovery::Gc);
}
