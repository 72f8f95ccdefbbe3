//! A database for one test, and attempts to commit to it.

use std::collections::BTreeMap;
use std::io;

use store::types::manifest::{ContentHash, Output, OutputPath, Remark, RemarkedPath};
use store::{
    AttemptUsage, Commit, CommitOutcome, Location, LocationOrigin, LogRow, NewAttempt,
    PostProcessState, State, Store, StoreError,
};
use tempfile::TempDir;
use testkit::postgres::PrivatePostgres;

/// Registers a function that takes a database as two trials: `FILE::sqlite::FUNCTION` and `FILE::postgres::FUNCTION`.
macro_rules! on_both {
    ($function:ident) => {
        on_both!($function, "sqlite", || $function(
            &crate::test_database::TestDatabase::sqlite()
        ));
        on_both!($function, "postgres", || {
            if let Some(database) = crate::test_database::TestDatabase::postgres() {
                $function(&database);
            }
        });
    };
    ($function:ident, $kind:literal, $run:expr) => {
        testkit::inventory::submit! {
            testkit::harness::RegisteredTrial {
                module: concat!(module_path!(), "::", $kind),
                name: stringify!($function),
                line: line!(),
                identities: testkit::harness::TrialIdentities::Caller,
                levels: testkit::harness::TrialLevels::Both,
                run: $run,
            }
        }
    };
}

pub struct TestDatabase {
    pub location: Location,
    /// For PostgreSQL: the server and the name of the database.
    pub server: Option<(&'static PrivatePostgres, String)>,
    pub dir: TempDir,
}

impl TestDatabase {
    pub fn sqlite() -> TestDatabase {
        let dir = tempfile::tempdir().unwrap();
        let location = Location::Sqlite(dir.path().join("record.db"));
        TestDatabase {
            location,
            server: None,
            dir,
        }
    }

    /// A database on the shared server, with the schema.
    pub fn postgres() -> Option<TestDatabase> {
        let test_database = TestDatabase::postgres_empty()?;
        Store::migrate(&test_database.location).unwrap();
        Some(test_database)
    }

    pub fn postgres_empty() -> Option<TestDatabase> {
        let server = PrivatePostgres::shared()?;
        let database = server.create_database();
        Some(TestDatabase {
            location: location(server, &database, "postgres"),
            server: Some((server, database)),
            dir: tempfile::tempdir().unwrap(),
        })
    }

    pub fn store(&self) -> Store {
        Store::open(&self.location).unwrap()
    }

    pub fn is_postgres(&self) -> bool {
        self.server.is_some()
    }

    /// Runs SQL as another program would. Each row is a line, with its columns joined by `|`.
    pub fn sql(&self, sql: &str) -> Vec<String> {
        self.try_sql(sql).unwrap_or_else(|e| panic!("{sql}: {e}"))
    }

    pub fn try_sql(&self, sql: &str) -> Result<Vec<String>, String> {
        match &self.server {
            Some((server, database)) => {
                let path = "SET search_path = fumehood";
                let out = server.psql_as(database, "postgres", &format!("{path}; {sql}"))?;
                Ok(out.lines().map(str::to_owned).collect())
            }
            None => {
                let Location::Sqlite(path) = &self.location else {
                    unreachable!()
                };
                sqlite_sql(path, sql)
            }
        }
    }
}

/// The location of a server's database for a role.
pub fn location(server: &PrivatePostgres, database: &str, user: &str) -> Location {
    Location::parse(
        &server.address(database, user),
        LocationOrigin::CommandLine,
        &|_| None,
    )
    .unwrap()
}

fn sqlite_sql(path: &std::path::Path, sql: &str) -> Result<Vec<String>, String> {
    asked(path, sql).map_err(|e| e.to_string())
}

fn asked(path: &std::path::Path, sql: &str) -> rusqlite::Result<Vec<String>> {
    use rusqlite::fallible_iterator::FallibleIterator as _;
    let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_WRITE;
    let wire = rusqlite::Connection::open_with_flags(path, flags)?;
    wire.busy_timeout(std::time::Duration::from_secs(5))?;
    let mut lines = Vec::new();
    let mut statements = rusqlite::Batch::new(&wire, sql);
    while let Some(mut statement) = statements.next()? {
        let columns = statement.column_count();
        let mut rows = statement.raw_query();
        while let Some(row) = rows.next()? {
            let cell = |at| Ok(shown(row.get_ref(at)?));
            let cells: rusqlite::Result<Vec<String>> = (0..columns).map(cell).collect();
            lines.push(cells?.join("|"));
        }
    }
    Ok(lines)
}

fn shown(value: rusqlite::types::ValueRef) -> String {
    use rusqlite::types::ValueRef;
    match value {
        ValueRef::Null => String::new(),
        ValueRef::Integer(value) => value.to_string(),
        ValueRef::Real(value) => value.to_string(),
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => match str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(e) => e.to_string(),
        },
    }
}

/// The owned data of a commit. A test changes it and commits it as often as it likes.
#[derive(Clone)]
pub struct TestAttempt {
    pub id: String,
    pub key: String,
    pub replace: bool,
    pub host: String,
    pub attempt: u32,
    pub state: State,
    pub reason: String,
    pub message: Option<String>,
    pub result: Option<String>,
    pub provenance: Option<String>,
    pub notices: Option<String>,
    pub outputs: Vec<Output>,
    pub artifact_store: String,
    pub remarks: Vec<RemarkedPath>,
    pub remark_counts: BTreeMap<Remark, u64>,
    pub logs: Vec<LogRow>,
    pub post_process: PostProcessState,
}

impl TestAttempt {
    pub fn new(id: &str, key: &str) -> TestAttempt {
        TestAttempt {
            id: id.to_owned(),
            key: key.to_owned(),
            replace: false,
            host: "lab-1".to_owned(),
            attempt: 1,
            state: State::Succeeded,
            reason: "exit_0".to_owned(),
            message: None,
            result: Some(r#"{"p_value": 0.04, "genes": ["BRCA1"]}"#.to_owned()),
            provenance: Some(r#"{"argv": ["python3", "gwas.py"]}"#.to_owned()),
            notices: None,
            outputs: vec![
                output(b"plot.png", b"PNG"),
                output(b"tables/a.csv", b"a,b\n"),
            ],
            artifact_store: "store-1".to_owned(),
            remarks: vec![RemarkedPath {
                path: "link".to_owned(),
                remark: Remark::Symlink,
            }],
            remark_counts: BTreeMap::from([(Remark::Symlink, 1)]),
            logs: vec![log("stdout", b"hello\n"), log("stderr", b"")],
            post_process: PostProcessState::NotAsked,
        }
    }

    pub fn begin(&self, store: &mut Store) -> Result<u32, StoreError> {
        store.begin(&self.beginning())
    }

    pub fn beginning(&self) -> NewAttempt<'_> {
        NewAttempt {
            id: &self.id,
            key: &self.key,
            replace: self.replace,
            host: &self.host,
            boot_id: "boot-1",
            submitter: Some("alice"),
            workspace: Some("/tmp/scidex-analysis-x"),
            provenance: self.provenance.as_deref(),
        }
    }

    pub fn commit(&self, store: &mut Store) -> Result<CommitOutcome, StoreError> {
        self.commit_with(store, &mut small_content, &mut || Ok(()))
    }

    pub fn commit_with(
        &self,
        store: &mut Store,
        content: &mut dyn FnMut(&Output) -> io::Result<Option<Vec<u8>>>,
        before_commit: &mut dyn FnMut() -> io::Result<()>,
    ) -> Result<CommitOutcome, StoreError> {
        store.commit(&mut self.whole(content, before_commit))
    }

    pub fn record(&self, store: &mut Store) -> Result<(u32, CommitOutcome), StoreError> {
        store.record(&mut self.whole(&mut small_content, &mut || Ok(())))
    }

    fn whole<'a>(
        &'a self,
        content: &'a mut (dyn FnMut(&Output) -> io::Result<Option<Vec<u8>>> + 'a),
        before_commit: &'a mut (dyn FnMut() -> io::Result<()> + 'a),
    ) -> Commit<'a> {
        Commit {
            begin: self.beginning(),
            attempt: self.attempt,
            state: self.state,
            reason: &self.reason,
            message: self.message.as_deref(),
            started_ms: Some(1_700_000_000_000),
            ended_ms: Some(1_700_000_001_500),
            usage: Some(usage()),
            exit_code: Some(0),
            signal: None,
            isolation_level: Some("full"),
            isolation_json: Some(r#"{"level": "full", "layers": []}"#),
            limits_json: Some("[]"),
            hints_json: None,
            notices_json: self.notices.as_deref(),
            complete: true,
            output_bytes: self.outputs.iter().map(|o| o.bytes).sum(),
            refused_count: 1,
            result: self.result.as_deref(),
            result_note: None,
            post_process: self.post_process,
            outputs: &self.outputs,
            artifact_store: &self.artifact_store,
            remarks: &self.remarks,
            remark_counts: &self.remark_counts,
            logs: &self.logs,
            content,
            before_commit,
        }
    }
}

pub fn usage() -> AttemptUsage {
    AttemptUsage {
        wall_ms: 1_500,
        cpu_ms: 900,
        memory_peak_bytes: Some(1 << 20),
        pids_peak: None,
        disk_bytes: 7,
        files: 2,
        oom_kills: 0,
    }
}

pub fn output(path: &[u8], content: &[u8]) -> Output {
    Output {
        path: OutputPath::new(path.to_vec()).unwrap(),
        bytes: content.len() as u64,
        blake3: ContentHash::of(content),
        media_type: "application/octet-stream".to_owned(),
        modified_ms: 1_700_000_000_123,
        inode: 1,
    }
}

pub fn log(stream: &'static str, head: &[u8]) -> LogRow {
    LogRow {
        stream,
        total_bytes: head.len() as u64,
        dropped_bytes: 0,
        head: head.to_vec(),
        tail: Vec::new(),
        object: None,
        object_bytes: 0,
        object_head_bytes: 0,
    }
}

/// The content of the outputs of [`TestAttempt::new`].
pub fn small_content(output: &Output) -> io::Result<Option<Vec<u8>>> {
    Ok(match output.path.as_bytes() {
        b"plot.png" => Some(b"PNG".to_vec()),
        b"tables/a.csv" => Some(b"a,b\n".to_vec()),
        _ => None,
    })
}

/// A key in the form of real attempts' keys.
pub fn key(number: u32) -> String {
    format!("{number:032x}")
}
