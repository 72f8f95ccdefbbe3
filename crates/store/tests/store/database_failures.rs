//! A database that is unreachable, read-only, locked, full, damaged, or untrusted.

use std::error::Error;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;

use store::{CommitOutcome, FaultKind, Location, LocationOrigin, State, Store, StoreError};
use testkit::postgres::PrivatePostgres;
use testkit::trial;

use crate::test_database::{TestAttempt, TestDatabase, key, location};

/// A secret that must not appear in any output.
const MARKER: &str = "hunter2-the-marker";

/// The `Debug` and `Display` texts of the error and all its sources.
fn all_of(error: &StoreError) -> String {
    let mut text = format!("{error:?} {error:#?}");
    let mut next: Option<&dyn Error> = Some(error);
    while let Some(error) = next {
        text += &format!(" {error}");
        next = error.source();
    }
    text
}

fn refused(path: &Path, says: &str) {
    let error = Store::open(&Location::Sqlite(path.to_owned())).unwrap_err();
    assert_eq!(error.fault_kind(), FaultKind::Permission, "{error}");
    assert!(error.to_string().contains(says), "{error}");
}

trial!(Caller, files_that_others_could_change_are_refused);
fn files_that_others_could_change_are_refused() {
    let test_database = TestDatabase::sqlite();
    drop(test_database.store());
    let dir = test_database.dir.path();
    let real = dir.join("record.db");
    let mode =
        |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    symlink(&real, dir.join("link.db")).unwrap();
    refused(&dir.join("link.db"), "regular file");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        dir.join("fifo.db"),
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    refused(&dir.join("fifo.db"), "regular file");
    for bad in [0o640, 0o604, 0o620, 0o666] {
        mode(&real, bad);
        refused(&real, "chmod");
    }
    mode(&real, 0o600);
    fs::hard_link(&real, dir.join("second.db")).unwrap();
    refused(&real, "hard link");
    fs::remove_file(dir.join("second.db")).unwrap();
    for bad in [0o770, 0o707, 0o1777] {
        mode(dir, bad);
        refused(&real, "directory");
    }
    mode(dir, 0o755);
    drop(test_database.store());
}

trial!(Caller, a_damaged_file_is_said_to_be);
fn a_damaged_file_is_said_to_be() {
    let test_database = TestDatabase::sqlite();
    let path = test_database.dir.path().join("record.db");
    fs::write(
        &path,
        "this is not a database, whatever its name says".repeat(100),
    )
    .unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let error = Store::open(&test_database.location).unwrap_err();
    assert_eq!(error.fault_kind(), FaultKind::Damaged, "{}", all_of(&error));
    assert!(error.is_database_fault());
}

trial!(Caller, a_locked_file_is_busy_and_then_not);
fn a_locked_file_is_busy_and_then_not() {
    let test_database = TestDatabase::sqlite();
    let mut store = Store::open_with_lock_wait(&test_database.location, 50).unwrap();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    let holder = rusqlite::Connection::open(test_database.dir.path().join("record.db")).unwrap();
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    let error = sample.commit(&mut store).unwrap_err();
    assert_eq!(error.fault_kind(), FaultKind::Busy, "{}", all_of(&error));
    store.show("a", None).unwrap();
    holder.close().unwrap();
    assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Now);
}

trial!(Caller, a_locked_row_is_busy_and_then_not);
fn a_locked_row_is_busy_and_then_not() {
    let Some(test_database) = TestDatabase::postgres() else {
        return;
    };
    let mut store = Store::open_with_lock_wait(&test_database.location, 50).unwrap();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    let mut other = test_database.store();
    let mut busy = None;
    let mut while_held = || {
        busy = Some(sample.commit(&mut store).unwrap_err());
        Err(std::io::Error::other("let go"))
    };
    sample
        .commit_with(&mut other, &mut |_| Ok(None), &mut while_held)
        .unwrap_err();
    let busy = busy.unwrap();
    assert_eq!(busy.fault_kind(), FaultKind::Busy, "{}", all_of(&busy));
    assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Now);
}

/// A separate file system for one test. Only root can mount it.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(options: &str) -> Option<Mounted> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: only root can mount a small file system");
            return None;
        }
        let mounted = Mounted(tempfile::tempdir().unwrap());
        mounted.mount(&["-t", "tmpfs", "-o", options, "tmpfs"]);
        Some(mounted)
    }

    fn mount(&self, args: &[&str]) {
        let done = Command::new("mount")
            .args(args)
            .arg(self.0.path())
            .status()
            .unwrap();
        assert!(done.success(), "mount {args:?}");
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

trial!(Caller, a_full_disk_loses_nothing_and_is_repeated);
fn a_full_disk_loses_nothing_and_is_repeated() {
    let Some(disk) = Mounted::new("size=2m,mode=700") else {
        return;
    };
    let mut store = Store::open(&Location::Sqlite(disk.0.path().join("record.db"))).unwrap();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    let mut large = |_: &_| Ok(Some(vec![1; 3 << 20]));
    let error = sample
        .commit_with(&mut store, &mut large, &mut || Ok(()))
        .unwrap_err();
    assert_eq!(error.fault_kind(), FaultKind::Full, "{}", all_of(&error));
    assert_eq!(store.show("a", None).unwrap().summary.state, State::Running);
    disk.mount(&["-o", "remount,size=64m"]);
    assert_eq!(
        sample
            .commit_with(&mut store, &mut large, &mut || Ok(()))
            .unwrap(),
        CommitOutcome::Now
    );
}

trial!(Caller, a_read_only_disk_is_said_to_be);
fn a_read_only_disk_is_said_to_be() {
    let Some(disk) = Mounted::new("size=4m,mode=700") else {
        return;
    };
    let location = Location::Sqlite(disk.0.path().join("record.db"));
    drop(Store::open(&location).unwrap());
    disk.mount(&["-o", "remount,ro"]);
    let opened = Store::open(&location);
    let error = opened
        .and_then(|mut store| TestAttempt::new("a", &key(1)).begin(&mut store))
        .unwrap_err();
    assert_eq!(
        error.fault_kind(),
        FaultKind::ReadOnly,
        "{}",
        all_of(&error)
    );
    let error = Store::open(&Location::Sqlite(disk.0.path().join("new.db"))).unwrap_err();
    assert_eq!(
        error.fault_kind(),
        FaultKind::ReadOnly,
        "{}",
        all_of(&error)
    );
}

trial!(Caller, a_read_only_server_is_said_to_be);
fn a_read_only_server_is_said_to_be() {
    let Some(test_database) = TestDatabase::postgres() else {
        return;
    };
    let (server, database) = test_database.server.as_ref().unwrap();
    // A standby server refuses writes with the same error code.
    let mut store = test_database.store();
    server.psql(
        "postgres",
        &format!("ALTER DATABASE {database} SET default_transaction_read_only = on"),
    );
    let sample = TestAttempt::new("a", &key(1));
    let error = sample.begin(&mut test_database.store()).unwrap_err();
    assert_eq!(
        error.fault_kind(),
        FaultKind::ReadOnly,
        "{}",
        all_of(&error)
    );
    // Control: a session from before the change may write.
    sample.begin(&mut store).unwrap();
}

trial!(
    Caller,
    an_unreachable_server_is_reported_as_unreachable_without_the_password
);
fn an_unreachable_server_is_reported_as_unreachable_without_the_password() {
    let dir = tempfile::tempdir().unwrap();
    let silent = UnixListener::bind(dir.path().join(".s.PGSQL.5433")).unwrap();
    for port in [5432, 5433] {
        let address = format!(
            "postgres://alice:{MARKER}@/db?host={}&port={port}&connect_timeout=1",
            dir.path().display()
        );
        let location = Location::parse(&address, LocationOrigin::File, &|_| None).unwrap();
        let error = Store::open(&location).unwrap_err();
        assert_eq!(
            error.fault_kind(),
            FaultKind::Unreachable,
            "{}",
            all_of(&error)
        );
        assert!(error.is_database_fault());
        assert!(!all_of(&error).contains(MARKER), "{error}");
        assert!(all_of(&error).contains("alice"));
    }
    drop(silent);
    let location = Location::parse(
        "postgres://localhost:1/db?sslmode=disable",
        LocationOrigin::File,
        &|_| None,
    )
    .unwrap();
    assert_eq!(
        Store::open(&location).unwrap_err().fault_kind(),
        FaultKind::Unreachable
    );
    assert!(matches!(
        Store::open(&Location::None).unwrap_err(),
        StoreError::NoDatabase
    ));
}

trial!(
    Caller,
    passwords_come_from_the_password_file_and_are_never_shown
);
fn passwords_come_from_the_password_file_and_are_never_shown() {
    let Some(server) = PrivatePostgres::start() else {
        return;
    };
    let password = "s3cr:et\\x";
    server.psql(
        "postgres",
        &format!("CREATE ROLE fumehood_secret SUPERUSER LOGIN PASSWORD '{password}'"),
    );
    let file = server.dir().join("pass");
    let parse = |text: &str| {
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let env = |name: &str| (name == "PGPASSFILE").then(|| file.clone().into_os_string());
        let address = server.address("postgres", "fumehood_secret");
        Location::parse(&address, LocationOrigin::CommandLine, &env).unwrap()
    };
    let wrong = parse(&format!("*:*:*:*:{MARKER}\n"));
    let error = Store::open(&wrong).unwrap_err();
    assert_eq!(
        error.fault_kind(),
        FaultKind::Permission,
        "{}",
        all_of(&error)
    );
    assert!(!all_of(&error).contains(MARKER) && !format!("{wrong} {wrong:?}").contains(MARKER));
    let right = parse("*:*:*:fumehood_secret:s3cr\\:et\\\\x\n");
    Store::migrate(&right).unwrap();
    let store = Store::open(&right).unwrap();
    assert!(!format!("{store:?} {right} {right:?}").contains("s3cr"));
}

trial!(Caller, a_database_that_is_not_utf8_is_refused);
fn a_database_that_is_not_utf8_is_refused() {
    let Some(server) = PrivatePostgres::shared() else {
        return;
    };
    server.psql(
        "postgres",
        "CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0",
    );
    let error = Store::migrate(&location(server, "latin", "postgres")).unwrap_err();
    assert!(
        matches!(&error, StoreError::Encoding { encoding, .. } if encoding == "LATIN1"),
        "{error}"
    );
}

trial!(Caller, a_server_that_is_killed_loses_nothing);
fn a_server_that_is_killed_loses_nothing() {
    let Some(server) = PrivatePostgres::start() else {
        return;
    };
    let location = location(&server, "postgres", "postgres");
    Store::migrate(&location).unwrap();
    let mut store = Store::open(&location).unwrap();
    let kept = TestAttempt::new("kept", &key(1));
    kept.begin(&mut store).unwrap();
    let sample = TestAttempt::new("a", &key(2));
    sample.begin(&mut store).unwrap();
    // A begun row becomes durable with the next commit of any connection.
    kept.commit(&mut store).unwrap();
    // Kill the server first while rows are written, and the second time after all rows are written.
    let mut asked = 0;
    let mut content = |_: &_| {
        asked += 1;
        if asked == 2 {
            server.kill();
        }
        Ok(Some(vec![0; 600_000]))
    };
    let error = sample
        .commit_with(&mut store, &mut content, &mut || Ok(()))
        .unwrap_err();
    assert_eq!(
        error.fault_kind(),
        FaultKind::Unreachable,
        "{}",
        all_of(&error)
    );
    let error = store.show("a", None).unwrap_err();
    assert_eq!(
        error.fault_kind(),
        FaultKind::Unreachable,
        "{}",
        all_of(&error)
    );
    server.start_again();
    // The same store reconnects to its server.
    assert_eq!(store.show("a", None).unwrap().summary.state, State::Running);
    let mut kill = || {
        server.kill();
        Ok(())
    };
    let error = sample
        .commit_with(&mut store, &mut |_| Ok(None), &mut kill)
        .unwrap_err();
    assert_eq!(
        error.fault_kind(),
        FaultKind::Unreachable,
        "{}",
        all_of(&error)
    );
    server.start_again();
    assert_eq!(store.show("a", None).unwrap().summary.state, State::Running);
    assert_eq!(store.outputs("a", 1).unwrap().len(), 0);
    assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Now);
    assert_eq!(kept.commit(&mut store).unwrap(), CommitOutcome::Already);
}

/// A proxy between the store and the server. It forwards everything until the client sends COMMIT; it forwards the COMMIT too,
/// and drops the server's answer.
fn proxy_that_drops_the_commit_answer(listener: &UnixListener, server: &Path) {
    let (client, _) = listener.accept().unwrap();
    let behind = UnixStream::connect(server).unwrap();
    let (mut from_server, mut to_client) =
        (behind.try_clone().unwrap(), client.try_clone().unwrap());
    let answers = std::thread::spawn(move || std::io::copy(&mut from_server, &mut to_client));
    let (mut client, mut behind) = (client, behind);
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = client.read(&mut buffer).unwrap();
        let received = &buffer[..count];
        if received.windows(7).any(|w| w == b"COMMIT\0") {
            // Close the client's side first, then forward the COMMIT and the end of the stream to the server.
            client.shutdown(std::net::Shutdown::Both).unwrap();
            behind.write_all(received).unwrap();
            behind.shutdown(std::net::Shutdown::Write).unwrap();
            let _ = answers.join().unwrap();
            return;
        }
        behind.write_all(received).unwrap();
    }
}

trial!(Caller, a_commit_whose_answer_is_lost_is_found_by_a_repeat);
fn a_commit_whose_answer_is_lost_is_found_by_a_repeat() {
    let Some(test_database) = TestDatabase::postgres() else {
        return;
    };
    let (server, database) = test_database.server.as_ref().unwrap();
    let mut direct = test_database.store();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut direct).unwrap();
    let listener = UnixListener::bind(test_database.dir.path().join(".s.PGSQL.5432")).unwrap();
    let address = format!(
        "postgres:///{database}?host={}&user=postgres",
        test_database.dir.path().display()
    );
    let through = Location::parse(&address, LocationOrigin::File, &|_| None).unwrap();
    std::thread::scope(|scope| {
        let proxy = scope.spawn(|| proxy_that_drops_the_commit_answer(&listener, &server.socket()));
        let mut store = Store::open(&through).unwrap();
        let error = sample.commit(&mut store).unwrap_err();
        assert_eq!(
            error.fault_kind(),
            FaultKind::Unreachable,
            "{}",
            all_of(&error)
        );
        drop(store);
        proxy.join().unwrap();
    });
    assert_eq!(sample.commit(&mut direct).unwrap(), CommitOutcome::Already);
    assert_eq!(direct.outputs("a", 1).unwrap().len(), 2);
}
