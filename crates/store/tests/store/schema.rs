//! Schema versions: migration before use, and commits by older versions of Fumehood.

use std::os::unix::fs::PermissionsExt;
use std::sync::Barrier;

use store::types::manifest::ContentHash;
use store::{
    CommitOutcome, FaultKind, Location, MigrationResult, SchemaVersion, State, Store, StoreError,
};
use testkit::trial;

use crate::test_database::{TestAttempt, TestDatabase, key, location};

const V1: SchemaVersion = SchemaVersion { major: 1, minor: 1 };

trial!(Caller, a_new_file_is_made_private_and_durable);
fn a_new_file_is_made_private_and_durable() {
    let test_database = TestDatabase::sqlite();
    let Location::Sqlite(path) = &test_database.location else {
        unreachable!()
    };
    let below = test_database.dir.path().join("a/b/record ?#%41.db");
    for path in [path, &below] {
        let store = Store::open(&Location::Sqlite(path.clone())).unwrap();
        assert_eq!(store.id().len(), 32);
        for name in [path.clone(), format!("{}-wal", path.display()).into()] {
            let mode = std::fs::metadata(&name).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", name.display());
        }
        drop(store);
        assert!(
            !std::path::Path::new(&format!("{}-wal", path.display())).exists(),
            "the log is left behind"
        );
    }
    for made in ["a", "a/b"] {
        let mode = std::fs::metadata(test_database.dir.path().join(made))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o700);
    }
    assert_eq!(test_database.sql("PRAGMA journal_mode"), ["wal"]);
}

trial!(Caller, postgresql_is_migrated_on_request_only);
fn postgresql_is_migrated_on_request_only() {
    let Some(test_database) = TestDatabase::postgres_empty() else {
        return;
    };
    let error = Store::open(&test_database.location).unwrap_err();
    assert!(
        matches!(error, StoreError::NeedsMigration { found: None, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("fumehood db migrate"), "{error}");
    assert_eq!(error.fault_kind(), FaultKind::Schema);
    let done = Store::migrate_to(&test_database.location, V1).unwrap();
    assert_eq!(done, MigrationResult { from: None, to: V1 });
    let error = Store::open(&test_database.location).unwrap_err();
    assert!(
        matches!(
            error,
            StoreError::NeedsMigration {
                found: Some(V1),
                ..
            }
        ),
        "{error}"
    );
    let done = Store::migrate(&test_database.location).unwrap();
    assert_eq!(
        done,
        MigrationResult {
            from: Some(V1),
            to: SchemaVersion::CURRENT
        }
    );
    let id = test_database.store().id().to_owned();
    let done = Store::migrate(&test_database.location).unwrap();
    assert_eq!(
        done,
        MigrationResult {
            from: Some(SchemaVersion::CURRENT),
            to: SchemaVersion::CURRENT
        }
    );
    assert_eq!(test_database.store().id(), id);
}

trial!(Caller, a_schema_of_somebody_else_is_not_migrated);
fn a_schema_of_somebody_else_is_not_migrated() {
    let Some(test_database) = TestDatabase::postgres_empty() else {
        return;
    };
    let (server, database) = test_database.server.as_ref().unwrap();
    server.psql(
        database,
        "CREATE SCHEMA fumehood AUTHORIZATION fumehood_stranger",
    );
    server.psql(database, &format!("GRANT ALL ON SCHEMA fumehood TO fumehood_owner; GRANT CREATE ON DATABASE {database} TO fumehood_owner"));
    let error = Store::migrate(&location(server, database, "fumehood_owner")).unwrap_err();
    assert!(
        matches!(&error, StoreError::SchemaOwner { owner, .. } if owner == "fumehood_stranger"),
        "{error}"
    );
    // Control: a role that owns the schema may migrate without the right to create schemas.
    server.psql(database, &format!("ALTER SCHEMA fumehood OWNER TO fumehood_owner; REVOKE CREATE ON DATABASE {database} FROM fumehood_owner"));
    Store::migrate(&location(server, database, "fumehood_owner")).unwrap();
}

trial!(Caller, both_databases_have_the_same_columns);
fn both_databases_have_the_same_columns() {
    let sqlite = TestDatabase::sqlite();
    drop(sqlite.store());
    let Some(postgres) = TestDatabase::postgres() else {
        return;
    };
    let of_sqlite = sqlite.sql(
        "SELECT m.name || '.' || c.name FROM sqlite_schema m, pragma_table_info(m.name) c
         WHERE m.type IN ('table', 'view') ORDER BY m.name, c.cid",
    );
    let of_postgres = postgres.sql(
        "SELECT table_name || '.' || column_name FROM information_schema.columns
         WHERE table_schema = 'fumehood' ORDER BY table_name COLLATE \"C\", ordinal_position",
    );
    assert!(of_sqlite.len() > 100, "{of_sqlite:?}");
    assert_eq!(of_sqlite, of_postgres);
    let indexes = |test_database: &TestDatabase, sql| test_database.sql(sql);
    assert_eq!(
        indexes(&sqlite, "SELECT name FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL ORDER BY name"),
        indexes(
            &postgres,
            "SELECT i.relname FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_namespace n ON n.oid = i.relnamespace
             WHERE n.nspname = 'fumehood' AND NOT x.indisunique ORDER BY i.relname COLLATE \"C\"",
        ),
    );
}

trial!(
    Caller,
    objects_in_other_schemas_do_not_shadow_the_stores_tables
);
fn objects_in_other_schemas_do_not_shadow_the_stores_tables() {
    let Some(test_database) = TestDatabase::postgres() else {
        return;
    };
    let (server, database) = test_database.server.as_ref().unwrap();
    server.psql(
        database,
        "CREATE TABLE public.attempts (x int); CREATE TABLE public.analyses (x int); CREATE TABLE public.outputs (x int);
         CREATE FUNCTION public.pg_notify(text, text) RETURNS void LANGUAGE sql AS 'SELECT 1/0';
         CREATE FUNCTION public.clock_timestamp() RETURNS int LANGUAGE sql AS 'SELECT 1';
         ALTER ROLE postgres SET search_path = public, fumehood",
    );
    let sample = TestAttempt::new("a", &key(1));
    let mut store = test_database.store();
    sample.begin(&mut store).unwrap();
    assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Now);
    server.psql(database, "ALTER ROLE postgres RESET search_path");
}

fn set_version(test_database: &TestDatabase, major: u32, minor: u32) {
    drop(test_database.store());
    test_database.sql(&format!(
        "UPDATE meta SET schema_major = {major}, schema_minor = {minor}"
    ));
}

on_both!(a_newer_minor_version_is_used);
fn a_newer_minor_version_is_used(test_database: &TestDatabase) {
    set_version(test_database, 1, 99);
    test_database.sql("ALTER TABLE attempts ADD COLUMN of_the_future TEXT");
    let mut store = test_database.store();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    sample.commit(&mut store).unwrap();
    assert_eq!(
        store.show("a", None).unwrap().summary.state,
        State::Succeeded
    );
    store.export(&mut Vec::new()).unwrap();
    assert_eq!(
        store.status().unwrap().schema,
        SchemaVersion {
            major: 1,
            minor: 99
        }
    );
    let done = Store::migrate(&test_database.location).unwrap();
    assert_eq!(
        done.to,
        SchemaVersion {
            major: 1,
            minor: 99
        }
    );
}

on_both!(a_newer_major_version_is_refused);
fn a_newer_major_version_is_refused(test_database: &TestDatabase) {
    set_version(test_database, 2, 0);
    for error in [
        Store::open(&test_database.location).unwrap_err(),
        Store::migrate(&test_database.location).unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::NewerSchema { .. }), "{error}");
        assert_eq!(error.fault_kind(), FaultKind::Schema);
    }
}

on_both!(something_else_is_refused);
fn something_else_is_refused(test_database: &TestDatabase) {
    drop(test_database.store());
    test_database.sql("DROP VIEW analyses_v1");
    test_database.sql("DROP TABLE meta");
    for error in [
        Store::open(&test_database.location).unwrap_err(),
        Store::migrate(&test_database.location).unwrap_err(),
    ] {
        assert!(
            matches!(error, StoreError::ForeignDatabase { .. }),
            "{error}"
        );
    }
}

on_both!(eight_concurrent_connections_create_one_schema);
fn eight_concurrent_connections_create_one_schema(_: &TestDatabase) {
    // The argument's database already has a schema, so the trial makes databases without one.
    for test_database in [Some(TestDatabase::sqlite()), TestDatabase::postgres_empty()]
        .into_iter()
        .flatten()
    {
        let barrier = Barrier::new(8);
        let ids: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        if test_database.is_postgres() {
                            Store::migrate(&test_database.location).unwrap();
                        }
                        test_database.store().id().to_owned()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
        assert_eq!(test_database.sql("SELECT COUNT(*) FROM meta"), ["1"]);
    }
}

on_both!(earlier_records_survive_a_migration);
fn earlier_records_survive_a_migration(test_database: &TestDatabase) {
    let empty = match test_database.is_postgres() {
        true => TestDatabase::postgres_empty().unwrap(),
        false => TestDatabase::sqlite(),
    };
    Store::migrate_to(&empty.location, V1).unwrap();
    old_writer(&empty, "before");
    if empty.is_postgres() {
        Store::migrate(&empty.location).unwrap();
    }
    read_what_the_old_writer_wrote(&empty, "before");
}

on_both!(an_old_writer_still_commits);
fn an_old_writer_still_commits(test_database: &TestDatabase) {
    drop(test_database.store());
    old_writer(test_database, "after");
    read_what_the_old_writer_wrote(test_database, "after");
}

/// A value for a statement of an older version.
enum Lit<'a> {
    Int(i64),
    Text(&'a str),
    Bytes(&'a [u8]),
    Bool(bool),
    Null,
}

impl Lit<'_> {
    fn sql(&self, postgres: bool) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        match self {
            Lit::Int(value) => value.to_string(),
            Lit::Text(text) => format!("'{text}'"),
            Lit::Bytes(bytes) if postgres => format!("'\\x{}'", hex(bytes)),
            Lit::Bytes(bytes) => format!("x'{}'", hex(bytes)),
            Lit::Bool(value) => value.to_string(),
            Lit::Null => "NULL".to_owned(),
        }
    }
}

/// Runs a statement of an older version. Replaces the placeholders from the last to the first, so that `$1` does not match in
/// `$10`.
fn frozen(test_database: &TestDatabase, statement: &str, values: &[Lit]) {
    let literals: Vec<String> = values
        .iter()
        .map(|v| v.sql(test_database.is_postgres()))
        .collect();
    if test_database.is_postgres() {
        test_database.sql(&format!(
            "PREPARE frozen AS {statement}; EXECUTE frozen({})",
            literals.join(", ")
        ));
        return;
    }
    let mut sql = statement.to_owned();
    for (at, literal) in literals.iter().enumerate().rev() {
        sql = sql.replace(&format!("${}", at + 1), literal);
    }
    test_database.sql(&sql);
}

/// The statements of Fumehood 0.1 with schema 1.1. Do not change them.
fn old_writer(test_database: &TestDatabase, id: &str) {
    use Lit::{Bool, Bytes, Int, Null, Text};
    let hash = ContentHash::of(b"x").to_string();
    frozen(
        test_database,
        include_str!("old_writer/begin_analysis.sql"),
        &[Text(id), Int(1_000)],
    );
    frozen(
        test_database,
        include_str!("old_writer/number.sql"),
        &[Text(id)],
    );
    let begin = [
        Text(id),
        Int(1),
        Text("k1"),
        Bool(false),
        Text("old-host"),
        Text("boot"),
        Null,
        Text("/tmp/w"),
        Text("{}"),
        Int(1_000),
    ];
    frozen(
        test_database,
        include_str!("old_writer/begin_attempt.sql"),
        &begin,
    );
    let commit = [
        Text(id),
        Int(1),
        Text("k1"),
        Int(2_000),
        Text("failed"),
        Text("exit_code"),
        Text("exit 3"),
        Int(1_100),
        Int(1_900),
        Int(800),
        Int(700),
        Int(5),
        Null,
        Int(6),
        Int(7),
        Int(0),
        Int(3),
        Null,
        Text("full"),
        Text("{}"),
        Text("[]"),
        Null,
        Text("[\"n\"]"),
        Bool(true),
        Int(1),
        Int(1),
        Int(2),
        Text("{\"a\": 1}"),
        Null,
    ];
    frozen(
        test_database,
        include_str!("old_writer/commit.sql"),
        &commit,
    );
    let output = [
        Text(id),
        Int(1),
        Bytes(b"o\xff"),
        Text("o\\xff"),
        Int(1),
        Text("text/plain"),
        Text(&hash),
        Int(3),
        Text("s"),
        Text("old-host"),
        Bytes(b"x"),
    ];
    frozen(
        test_database,
        include_str!("old_writer/output.sql"),
        &output,
    );
    let log = [
        Text(id),
        Int(1),
        Text("stdout"),
        Int(2),
        Int(0),
        Bool(false),
        Bytes(b"hi"),
        Bytes(b""),
        Null,
        Null,
        Null,
        Null,
    ];
    frozen(test_database, include_str!("old_writer/log.sql"), &log);
    frozen(
        test_database,
        include_str!("old_writer/remark.sql"),
        &[Text(id), Int(1), Int(0), Text("f"), Text("fifo")],
    );
    frozen(
        test_database,
        include_str!("old_writer/remark_count.sql"),
        &[Text(id), Int(1), Text("fifo"), Int(2)],
    );
}

/// The statements by which Fumehood with schema 1.2 commits a claimed attempt. Do not change them.
pub fn old_commit_of_1_2(test_database: &TestDatabase, id: &str, key: &str) {
    use Lit::{Bool, Int, Null, Text};
    let commit = [
        Text(id),
        Int(1),
        Text(key),
        Int(2_000),
        Text("failed"),
        Text("exit"),
        Text("exit 3"),
        Int(1_100),
        Int(1_900),
        Int(800),
        Int(700),
        Int(5),
        Null,
        Int(6),
        Int(7),
        Int(0),
        Int(3),
        Null,
        Text("full"),
        Text("{}"),
        Text("[]"),
        Null,
        Null,
        Text("{}"),
        Bool(true),
        Int(0),
        Int(0),
        Int(0),
        Null,
        Null,
        Null,
    ];
    frozen(
        test_database,
        include_str!("old_writer/commit_1_2.sql"),
        &commit,
    );
}

fn read_what_the_old_writer_wrote(test_database: &TestDatabase, id: &str) {
    let mut store = test_database.store();
    let shown = store.show(id, None).unwrap();
    assert_eq!(
        (shown.summary.state, shown.summary.exit_code),
        (State::Failed, Some(3))
    );
    assert_eq!(shown.summary.committed_ms, Some(2_000));
    assert_eq!(
        (
            shown.summary.post_process.as_str(),
            shown.post_process_tries
        ),
        (None, 0)
    );
    assert_eq!(shown.result_json.as_deref(), Some("{\"a\": 1}"));
    let outputs = store.outputs(id, 1).unwrap();
    assert_eq!(outputs[0].path.as_bytes(), b"o\xff");
    assert_eq!(
        store
            .output_content(id, 1, &outputs[0].path)
            .unwrap()
            .as_deref(),
        Some(&b"x"[..])
    );
    assert_eq!(store.log(id, 1, "stdout").unwrap().unwrap().head, b"hi");
    assert_eq!(store.remarks(id, 1).unwrap().1[0].count, 2);
    assert_eq!(
        test_database.sql("SELECT state, post_process_tries FROM analyses_v1"),
        ["failed|0"]
    );
    // The new version continues with the next attempt number, and recognizes the key of the old version.
    let mut sample = TestAttempt::new(id, &key(2));
    sample.replace = true;
    assert_eq!(sample.begin(&mut store).unwrap(), 2);
    let mut repeat = TestAttempt::new(id, "k1");
    repeat.attempt = 1;
    assert_eq!(repeat.commit(&mut store).unwrap(), CommitOutcome::Already);
}
