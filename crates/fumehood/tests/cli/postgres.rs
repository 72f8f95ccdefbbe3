//! The record in PostgreSQL: a real server for the trials, the documented grants, several machines, and a password that appears
//! in no output.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;
use testkit::command::{FinishedCommand, RunningCommand, finish};
use testkit::home::{TestHome, set_mode};
use testkit::postgres::{PASSWORD_ROLE, PrivatePostgres};
use testkit::process::names_in;
use testkit::trial;
use testkit::wait::eventually;

use crate::record::files_with;

/// The server that all trials of this process share, with a superuser that must give a password.
fn shared_server() -> &'static PrivatePostgres {
    static WITH_ROLE: OnceLock<&'static PrivatePostgres> = OnceLock::new();
    WITH_ROLE.get_or_init(|| {
        let server = PrivatePostgres::shared().expect("PostgreSQL must be installed");
        let role =
            format!("CREATE ROLE {PASSWORD_ROLE} LOGIN SUPERUSER PASSWORD 'marker-pass word'");
        server.psql("postgres", &role);
        server
    })
}

/// A test home whose commands use a separate database on the server.
pub struct PostgresHome {
    pub test_home: TestHome,
    server: &'static PrivatePostgres,
    database: String,
    pub url: String,
}

impl PostgresHome {
    /// A home whose database has its schema. Commands connect as the superuser.
    pub fn new() -> PostgresHome {
        let postgres_home = PostgresHome::bare("postgres");
        postgres_home.ask(&["db", "migrate"]).good();
        postgres_home
    }

    fn bare(user: &str) -> PostgresHome {
        let server = shared_server();
        let database = server.create_database();
        let url = server.address(&database, user);
        PostgresHome {
            test_home: TestHome::new(),
            server,
            database,
            url,
        }
    }

    fn with_url(&self, url: &str, args: &[&str]) -> FinishedCommand {
        let mut command = self.test_home.fumehood();
        command.args(args).env("FUMEHOOD_DB", url);
        finish(command)
    }

    fn ask(&self, args: &[&str]) -> FinishedCommand {
        self.with_url(&self.url, args)
    }

    fn sh(&self, options: &[&str], script: &str) -> FinishedCommand {
        let args: Vec<&str> = ["run"]
            .iter()
            .chain(options)
            .chain(&["--", "sh", "-c", script])
            .copied()
            .collect();
        self.ask(&args)
    }

    fn sql(&self, sql: &str) -> String {
        let printed = self.server.psql(&self.database, sql);
        printed.trim_end().to_owned()
    }
}

trial!(Everyone, a_run_is_recorded_on_postgresql);
fn a_run_is_recorded_on_postgresql() {
    let postgres_home = PostgresHome::new();
    let script = "echo '{\"p_value\": 0.03, \"big\": 12345678901234567890}' > result.json; head -c 2M /dev/zero > large; echo out; echo err >&2; ln -s x l; exit 3";
    let ended = postgres_home.sh(&["--id", "pg"], script);
    assert_eq!(ended.code(), 3, "{}", ended.err());
    let row = postgres_home.sql("SELECT state, reason, exit_code, complete, outputs_count, refused_count FROM fumehood.analyses_v1");
    assert_eq!(row, "failed|exit|3|f|2|1");
    assert_eq!(
        postgres_home
            .sql("SELECT CAST(result ->> 'p_value' AS double precision) FROM fumehood.analyses_v1"),
        "0.03"
    );
    assert_eq!(
        postgres_home.sql("SELECT result ->> 'big' FROM fumehood.analyses_v1"),
        "12345678901234567890"
    );
    let outputs = "SELECT path_text, bytes, content IS NULL, encode(content, 'escape') FROM fumehood.outputs_v1 ORDER BY path";
    let rows = postgres_home.sql(outputs);
    assert!(
        rows.starts_with("large|2097152|t|\nresult.json|47|f|{"),
        "{rows}"
    );
    assert_eq!(
        postgres_home
            .sql("SELECT stream, encode(head, 'escape') FROM fumehood.logs_v1 ORDER BY stream"),
        "stderr|err\n\nstdout|out"
    );
    assert_eq!(
        postgres_home.sql("SELECT remark, count FROM fumehood.remark_counts_v1"),
        "symlink|1"
    );
    assert_eq!(postgres_home.sql("SELECT provenance ->> 'version', isolation ->> 'seccomp' IS NOT NULL FROM fumehood.analyses_v1"), "1|t");
    // Other commands find the database by the same setting.
    assert_eq!(
        postgres_home
            .ask(&["outputs", "@last", "result.json", "-o", "-"])
            .good()
            .len(),
        47
    );
    assert_eq!(
        postgres_home.ask(&["logs", "p", "--stderr"]).good(),
        "err\n"
    );
    let shown = postgres_home.ask(&["show", "pg", "--json"]).document();
    assert_eq!(shown["result"]["p_value"], 0.03);
    assert!(
        postgres_home
            .ask(&["list"])
            .good()
            .contains("failed (exit 3)")
    );
    assert_eq!(postgres_home.sh(&["--id", "pg"], "true").code(), 125);
    postgres_home
        .sh(&["--id", "pg", "--replace"], "echo 2 > f")
        .good();
    postgres_home.ask(&["verify"]).good();
    assert_eq!(
        postgres_home.ask(&["db", "status", "--json"]).document()["rows"]["attempts"],
        2
    );
    assert!(postgres_home.ask(&["db", "export"]).good().lines().count() >= 6);
    postgres_home.ask(&["rm", "pg"]).good();
    for table in [
        "analyses",
        "attempts",
        "outputs",
        "logs",
        "remarks",
        "remark_counts",
    ] {
        assert_eq!(
            postgres_home.sql(&format!("SELECT COUNT(*) FROM fumehood.{table}")),
            "0",
            "{table}"
        );
    }
    assert!(!postgres_home.test_home.home.join("fumehood.db").exists());
    postgres_home.test_home.assert_nothing_left();
    // The commands for the single steps of a run work too, and so does `record`.
    postgres_home.ask(&["workspace", "create", "w"]).good();
    postgres_home
        .ask(&["run", "--in", "w", "--", "sh", "-c", "echo w > f"])
        .good();
    postgres_home.ask(&["post-process", "w"]).good();
    postgres_home.ask(&["workspace", "remove", "w"]).good();
    let result = postgres_home
        .test_home
        .write("project/r.json", "{\"n\": 1}");
    postgres_home
        .ask(&["record", "r", "--result", result.to_str().unwrap()])
        .good();
    assert_eq!(
        postgres_home
            .sql("SELECT isolation_level, result ->> 'n' FROM fumehood.analyses_v1 WHERE id = 'r'"),
        "none|1"
    );
    postgres_home.test_home.assert_nothing_left();
}

trial!(Everyone, hostile_outputs_are_recorded_on_postgresql);
/// Nothing a program writes makes the transaction fail.
fn hostile_outputs_are_recorded_on_postgresql() {
    let postgres_home = PostgresHome::new();
    let script = r#"
import os
names = [b"a\nb", b"e\x1b[31m", b"\xff\xfe", b"'; DROP TABLE fumehood.analyses; --", b"$1", b"%s", b"\\x00", b"n" * 255, "\u202e".encode()]
for i, n in enumerate(names): open(n, 'wb').write(b'\x00\xff%d' % i)
os.symlink(b'/\xff', b'l\xff')
# Long, and nothing that an index could compress: 2,047 bytes.
import random
random.seed(7)
part = lambda n: bytes(random.choice([b for b in range(1, 256) if b != 47]) for _ in range(n))
long = b'/'.join(part(255) for _ in range(7)) + b'/' + part(255)
os.makedirs(os.path.dirname(long)); open(long, 'w').write('long')
assert len(long) == 2047
open('result.json', 'w').write('{"a": "\\u0000"}')
os.write(1, b'\x00\xff\x1b out')
"#;
    let args = [
        "run",
        "--id",
        "h",
        "--env",
        "ODD=\u{1}\u{7f}",
        "--",
        "/usr/bin/python3",
        "-c",
        script,
    ];
    let ended = postgres_home.ask(&args);
    assert_eq!(ended.code(), 0, "{}", ended.err());
    crate::hostile_outputs::assert_plain("run", &ended.stderr);
    assert_eq!(postgres_home.sql("SELECT outputs_count, result IS NULL, result_note LIKE '%u0000%' FROM fumehood.analyses_v1"), "11|t|t");
    assert_eq!(
        postgres_home.sql("SELECT COUNT(*) FROM fumehood.outputs_v1 WHERE path = '\\xfffe'"),
        "1"
    );
    assert_eq!(
        postgres_home
            .sql("SELECT encode(head, 'hex') FROM fumehood.logs_v1 WHERE stream = 'stdout'"),
        "00ff1b206f7574"
    );
    for args in [
        &["list"][..],
        &["show", "h"],
        &["outputs", "h"],
        &["show", "h", "--json"],
        &["logs", "h", "--json"],
    ] {
        let told = postgres_home.ask(args);
        told.good();
        crate::hostile_outputs::assert_plain(&format!("{args:?}"), &told.stdout);
    }
    assert_eq!(
        postgres_home
            .ask(&["show", "h'; DROP TABLE fumehood.analyses; --"])
            .code(),
        125
    );
    assert_eq!(
        postgres_home.sql("SELECT COUNT(*) FROM fumehood.analyses_v1"),
        "1"
    );
}

trial!(Everyone, a_schema_is_made_by_its_owner_alone);
fn a_schema_is_made_by_its_owner_alone() {
    let postgres_home = PostgresHome::bare("postgres");
    // A run never creates the schema by itself.
    let ended = postgres_home.sh(&[], "echo ran");
    ended.refused(125, "db migrate");
    assert_eq!(ended.out(), "");
    postgres_home.ask(&["list"]).refused(125, "db migrate");
    assert_eq!(
        postgres_home.sql("SELECT COUNT(*) FROM pg_namespace WHERE nspname = 'fumehood'"),
        "0"
    );
    // A role that may not create the schema gets an error, and nothing is changed.
    let stranger = postgres_home
        .server
        .address(&postgres_home.database, "fumehood_runner");
    let refused = postgres_home.with_url(&stranger, &["db", "migrate"]);
    assert_eq!(refused.code(), 125);
    assert!(
        refused.err().contains("grants") || refused.err().contains("permission"),
        "{}",
        refused.err()
    );
    let made = postgres_home.ask(&["db", "migrate", "--json"]).document();
    assert_eq!(made["from"], Value::Null, "{made}");
    let again = postgres_home.ask(&["db", "migrate", "--json"]).document();
    assert_eq!(again["from"], again["to"], "{again}");
    postgres_home.sh(&[], "true").good();
}

/// The SQL blocks of the documentation that contain the grants.
fn documented_grants() -> Vec<&'static str> {
    let text = include_str!("../../../../docs/database.md");
    let blocks: Vec<&str> = text
        .split("```sql grants\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap())
        .collect();
    assert_eq!(blocks.len(), 3);
    blocks
}

trial!(Everyone, the_documented_grants_are_enough);
fn the_documented_grants_are_enough() {
    let postgres_home = PostgresHome::bare("fumehood_owner");
    postgres_home.sql(&format!(
        "GRANT CREATE ON DATABASE {} TO fumehood_owner",
        postgres_home.database
    ));
    postgres_home.ask(&["db", "migrate"]).good();
    let runner = postgres_home
        .server
        .address(&postgres_home.database, "fumehood_runner");
    let as_runner = |args: &[&str]| postgres_home.with_url(&runner, args);
    let run = [
        "run",
        "--id",
        "g",
        "--",
        "sh",
        "-c",
        "echo g > f; echo said",
    ];
    let refused = as_runner(&run);
    assert_eq!(refused.code(), 125, "before the grants: {}", refused.err());
    let blocks = documented_grants();
    postgres_home.sql(blocks[0]);
    as_runner(&run).good();
    as_runner(&["run", "--id", "g", "--replace", "--", "sh", "-c", "exit 2"]);
    assert!(as_runner(&["list"]).good().contains("g@2"));
    as_runner(&["show", "g@1"]).good();
    assert_eq!(as_runner(&["outputs", "g@1", "f", "-o", "-"]).good(), "g\n");
    assert_eq!(as_runner(&["logs", "g@1"]).good(), "said\n");
    as_runner(&["verify"]).good();
    as_runner(&["db", "status"]).good();
    as_runner(&["db", "export"]).good();
    as_runner(&["workspace", "create", "w"]).good();
    as_runner(&["run", "--in", "w", "--", "true"]).good();
    as_runner(&["post-process", "w"]).good();
    as_runner(&["workspace", "remove", "w"]).good();
    // `rm` needs more rights, and its error says so.
    let refused = as_runner(&["rm", "g"]);
    refused.refused(125, "grants");
    assert_eq!(as_runner(&["gc", "--older-than", "1ms"]).code(), 125);
    assert_eq!(
        postgres_home.sql("SELECT COUNT(*) FROM fumehood.attempts_v1 WHERE id = 'g'"),
        "2"
    );
    assert_eq!(
        as_runner(&["db", "migrate"]).code(),
        125,
        "it is not the owner"
    );
    assert_eq!(
        as_runner(&["outputs", "g@1", "f", "-o", "-"]).good(),
        "g\n",
        "nothing was swept"
    );
    postgres_home.sql(blocks[1]);
    as_runner(&["rm", "g"]).good();
    assert_eq!(
        postgres_home.sql("SELECT COUNT(*) FROM fumehood.attempts_v1 WHERE id = 'g'"),
        "0"
    );
}

trial!(Everyone, another_machine_reads_inline_outputs);
/// A second home stands for a second machine: the two share no files.
fn another_machine_reads_inline_outputs() {
    let postgres_home = PostgresHome::new();
    let script = "echo small > small; head -c 3M /dev/urandom > large; for i in 1 2 3 4; do echo line $i; done";
    postgres_home.sh(&["--id", "m"], script).good();
    let there = TestHome::new();
    let ask = |args: &[&str]| {
        let mut command = there.fumehood();
        command.args(args).env("FUMEHOOD_DB", &postgres_home.url);
        finish(command)
    };
    assert!(ask(&["list"]).good().contains('m'));
    assert_eq!(ask(&["outputs", "m", "small", "-o", "-"]).good(), "small\n");
    assert_eq!(
        ask(&["logs", "m"]).good(),
        "line 1\nline 2\nline 3\nline 4\n"
    );
    ask(&["show", "m"]).good();
    let host = postgres_home.sql("SELECT host FROM fumehood.outputs_v1 WHERE path_text = 'large'");
    let store = postgres_home
        .sql("SELECT artifact_store FROM fumehood.outputs_v1 WHERE path_text = 'large'");
    let ended = ask(&["outputs", "m", "large", "-o", "-"]);
    assert_eq!((ended.code(), ended.stdout.len()), (125, 0));
    assert!(
        ended.err().contains(&host) && ended.err().contains(&store),
        "{}",
        ended.err()
    );
    let to = there.path("to");
    assert_eq!(
        ask(&["outputs", "m", "--to", to.to_str().unwrap()]).code(),
        125
    );
    assert!(!to.join("large").exists());
    ask(&[
        "outputs",
        "m",
        "small",
        "--to",
        to.to_str().unwrap(),
        "--force",
    ])
    .good();
    // An id is unique over all machines.
    assert_eq!(ask(&["run", "--id", "m", "--", "true"]).code(), 125);
    ask(&[
        "run",
        "--id",
        "m",
        "--replace",
        "--",
        "sh",
        "-c",
        "echo there > f",
    ])
    .good();
    assert_eq!(
        postgres_home
            .ask(&["outputs", "m@2", "f", "-o", "-"])
            .good(),
        "there\n"
    );
    // The `gc` of one machine removes nothing of the other.
    ask(&["gc"]).good();
    postgres_home.ask(&["gc"]).good();
    assert_eq!(
        postgres_home
            .ask(&["outputs", "m@1", "large", "-o", "-"])
            .stdout
            .len(),
        3 << 20
    );
    assert_eq!(
        postgres_home.ask(&["verify", "--json"]).document()["elsewhere"],
        1
    );
}

trial!(Everyone, a_password_is_never_shown);
fn a_password_is_never_shown() {
    const MARKER: &str = "marker-pass word";
    const WRITTEN: &str = "marker-pass%20word";
    let postgres_home = PostgresHome::new();
    let dir = postgres_home.server.dir().display().to_string();
    let with = format!(
        "postgres://{PASSWORD_ROLE}:{WRITTEN}@/{}?host={dir}",
        postgres_home.database
    );
    let hidden = |what: &str, ended: &FinishedCommand| {
        for text in [ended.out(), ended.err()] {
            assert!(!text.contains("marker-pass"), "{what}: {text}");
        }
    };
    // The password works, and no file or output contains it afterwards.
    let run = [
        "run",
        "--id",
        "p",
        "--keep",
        "always",
        "--json",
        "--",
        "sh",
        "-c",
        "echo x > f; env",
    ];
    let ended = postgres_home.with_url(&with, &run);
    assert_eq!(ended.code(), 0, "{}", ended.err());
    hidden("run", &ended);
    for args in [
        &["list"][..],
        &["show", "p", "--json"],
        &["db", "status"],
        &["db", "export"],
        &["verify", "--json"],
        &["gc", "--json"],
    ] {
        let ended = postgres_home.with_url(&with, args);
        ended.good();
        hidden(&format!("{args:?}"), &ended);
    }
    postgres_home.with_url(&with, &["gc", "--kept"]).good();
    // An absent server, a wrong password and a malformed address: no message shows the password.
    let dead = format!("postgres://u:{WRITTEN}@127.0.0.1:9/d");
    let wrong = with.replace(WRITTEN, &format!("{WRITTEN}x"));
    let odd = format!("postgres://u:{WRITTEN}@h:notaport/d?nonsense=marker-pass");
    for url in [&dead, &wrong, &odd] {
        for args in [
            &["run", "--", "echo", "ran"][..],
            &["run", "--json", "--", "echo", "ran"],
            &["list"],
            &["db", "migrate"],
        ] {
            let ended = postgres_home.with_url(url, args);
            assert_eq!(ended.code(), 125, "{args:?}: {}", ended.err());
            assert!(!ended.out().contains("ran\n"), "{args:?}");
            hidden(&format!("{args:?}"), &ended);
        }
    }
    // A password on the command line is refused, however it is spelled.
    let spelled = format!("postgres:///d?user={PASSWORD_ROLE}&pass%77ord={WRITTEN}&host={dir}");
    for url in [
        &with,
        &dead,
        &format!("postgres:///d?user=u&password={WRITTEN}"),
        &spelled,
    ] {
        let mut command = postgres_home.test_home.fumehood();
        command.args(["list", "--db", url]);
        let ended = finish(command);
        ended.refused(125, "password");
        hidden("--db", &ended);
    }
    // The password may be in a private file or in PostgreSQL's password file.
    let file = postgres_home
        .test_home
        .write("person/url", format!("{with}\n"));
    set_mode(&file, 0o600);
    let by_file = |path: &PathBuf| {
        let mut command = postgres_home.test_home.fumehood();
        command.args(["list"]).env("FUMEHOOD_DB_FILE", path);
        finish(command)
    };
    by_file(&file).good();
    set_mode(&file, 0o644);
    let ended = by_file(&file);
    ended.refused(125, "600");
    hidden("FUMEHOOD_DB_FILE", &ended);
    let pass = postgres_home
        .test_home
        .write("person/pass", format!("*:*:*:{PASSWORD_ROLE}:{MARKER}\n"));
    set_mode(&pass, 0o600);
    let mut command = postgres_home.test_home.fumehood();
    command
        .args([
            "list",
            "--db",
            &postgres_home
                .server
                .address(&postgres_home.database, PASSWORD_ROLE),
        ])
        .env("PGPASSFILE", &pass);
    finish(command).good();
    for marker in [MARKER, WRITTEN] {
        assert_eq!(
            files_with(&postgres_home.test_home.home, marker.as_bytes()),
            [""; 0]
        );
    }
    assert_eq!(
        postgres_home.sql(
            "SELECT COUNT(*) FROM fumehood.attempts WHERE attempts::text LIKE '%marker-pass%'"
        ),
        "0"
    );
}

trial!(
    Everyone,
    a_run_that_ends_while_the_server_is_away_is_committed_later
);
/// The server's socket is removed while the program runs, and restored later.
fn a_run_that_ends_while_the_server_is_away_is_committed_later() {
    let postgres_home = PostgresHome::new();
    let front = postgres_home.test_home.path("front");
    std::fs::create_dir(&front).unwrap();
    let socket = postgres_home.server.socket();
    let link = front.join(".s.PGSQL.5432");
    std::os::unix::fs::symlink(&socket, &link).unwrap();
    let url = format!(
        "postgres:///{}?host={}&user=postgres",
        postgres_home.database,
        front.display()
    );
    let gate = postgres_home.test_home.path("project/gate");
    assert!(
        Command::new("mkfifo")
            .arg(&gate)
            .status()
            .unwrap()
            .success()
    );
    let script = "echo precious > f; head -c 2M /dev/zero > big; echo up; read x; echo last";
    let mut command = postgres_home.test_home.run_command([
        "--id",
        "a",
        "--stdin",
        gate.to_str().unwrap(),
        "--",
        "sh",
        "-c",
        script,
    ]);
    command.env("FUMEHOOD_DB", &url);
    let mut live = RunningCommand::start(command);
    let mut hold = std::fs::OpenOptions::new().write(true).open(&gate).unwrap();
    live.wait_for("up");
    // The runner keeps its connection for a moment, in case the program ends soon.
    eventually("the connection is let go", || {
        let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
        postgres_home.sql(others) == "0"
    });
    std::fs::remove_file(&link).unwrap();
    std::io::Write::write_all(&mut hold, b"go\n").unwrap();
    drop(hold);
    let ended = live.finish();
    ended.refused(121, "NOT COMMITTED");
    assert!(
        ended.err().contains("fumehood post-process a"),
        "{}",
        ended.err()
    );
    postgres_home.test_home.assert_nothing_left();
    assert_eq!(
        names_in(&postgres_home.test_home.home.join("pending")),
        ["a"]
    );
    // While the server is unreachable, `post-process` reports it and loses nothing.
    assert_eq!(
        postgres_home.with_url(&url, &["post-process", "a"]).code(),
        125
    );
    assert_eq!(
        postgres_home.sql("SELECT state FROM fumehood.analyses_v1"),
        "running"
    );
    std::os::unix::fs::symlink(&socket, &link).unwrap();
    postgres_home.with_url(&url, &["run", "--", "true"]).good();
    assert_eq!(
        postgres_home
            .sql("SELECT state, outputs_count, complete FROM fumehood.analyses_v1 WHERE id = 'a'"),
        "succeeded|2|t"
    );
    assert_eq!(
        postgres_home
            .with_url(&url, &["outputs", "a", "f", "-o", "-"])
            .good(),
        "precious\n"
    );
    assert_eq!(
        postgres_home.with_url(&url, &["logs", "a"]).good(),
        "up\nlast\n"
    );
    assert_eq!(
        names_in(&postgres_home.test_home.home.join("pending")),
        [""; 0]
    );
}

/// A proxy between a client and the server. When the client sends the statement that begins an attempt, the proxy closes the
/// client's connection and still forwards the statement, so that the answer is lost. It does so for the first `cut` of these
/// statements.
fn proxy_that_drops_answers(listener: &UnixListener, server: &Path, mut cut: u32) {
    while let Ok((client, _)) = listener.accept() {
        let Ok(behind) = UnixStream::connect(server) else {
            return;
        };
        let (mut answers, mut to_client) =
            (behind.try_clone().unwrap(), client.try_clone().unwrap());
        let passing = std::thread::spawn(move || {
            // The copy fails when the connection is cut.
            let _ = std::io::copy(&mut answers, &mut to_client);
            let _ = to_client.shutdown(Shutdown::Both);
        });
        let (mut client, mut behind) = (client, behind);
        let (mut buffer, mut beginning) = (vec![0; 1 << 16], false);
        while let Ok(count @ 1..) = client.read(&mut buffer) {
            let said = &buffer[..count];
            beginning |= said.windows(20).any(|w| w == b"INSERT INTO analyses");
            // `B` is the protocol's Bind message; Execute follows it.
            if cut > 0 && beginning && said[0] == b'B' {
                cut -= 1;
                client.shutdown(Shutdown::Both).unwrap();
            }
            if behind.write_all(said).is_err() {
                break;
            }
        }
        let _ = behind.shutdown(Shutdown::Write);
        passing.join().unwrap();
    }
}

trial!(Everyone, begin_is_repeated_when_the_servers_answer_is_lost);
fn begin_is_repeated_when_the_servers_answer_is_lost() {
    for (cut, state) in [(1, "succeeded|exit"), (2, "error|runner_lost")] {
        let postgres_home = PostgresHome::new();
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join(".s.PGSQL.5432")).unwrap();
        let server = postgres_home.server.socket();
        // The thread ends with the process.
        let _proxy = std::thread::spawn(move || proxy_that_drops_answers(&listener, &server, cut));
        let url = format!(
            "postgres:///{}?host={}&user=postgres",
            postgres_home.database,
            dir.path().display()
        );
        let ended = postgres_home.with_url(&url, &["run", "--id", "a", "--", "echo", "up"]);
        match cut {
            1 => assert_eq!(ended.good(), "up\n"),
            _ => {
                assert_eq!(ended.code(), 125, "{}", ended.err());
                assert!(!ended.out().contains("up"), "{}", ended.out());
                let row = postgres_home.sql("SELECT state FROM fumehood.analyses_v1");
                assert_eq!(row, "running", "the control");
                postgres_home.ask(&["gc"]).good();
            }
        }
        let row = postgres_home.sql("SELECT state, reason FROM fumehood.analyses_v1");
        assert_eq!(row, state);
        postgres_home.test_home.assert_nothing_left();
    }
}
