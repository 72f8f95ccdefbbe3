//! The same record in PostgreSQL: a real server of the trial's own, the documented grants, several machines, and a password
//! that nobody sees.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

use crate::lab::{Ended, Lab, finish, is_root, set_mode};
use crate::record::files_with;
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    ("a_run_is_recorded_there", For::Everyone, recorded),
    ("hostile_outputs_are_recorded_there", For::Everyone, hostile),
    (
        "a_schema_is_made_by_its_owner_alone",
        For::Everyone,
        migrated,
    ),
    ("the_documented_grants_are_enough", For::Everyone, grants),
    (
        "another_machine_reads_what_is_small",
        For::Everyone,
        another_machine,
    ),
    ("a_password_is_never_shown", For::Everyone, password),
    (
        "an_end_while_it_is_away_is_committed_later",
        For::Everyone,
        away,
    ),
    (
        "a_beginning_whose_answer_is_lost_is_asked_for_again",
        For::Everyone,
        answer_lost,
    ),
];

/// Makes the cluster, says `ready`, and waits for its standard input to end, which happens however the trials end.
const KEEPER: &str = r#"
set -eu
dir=$1 bin=$2 as=$3
cd "$dir"
$as "$bin/initdb" -D "$dir/data" -U postgres -A trust --no-sync -E UTF8 --locale=C >"$dir/initdb.log" 2>&1
printf 'local all secret scram-sha-256\nlocal all all trust\n' | $as tee "$dir/data/pg_hba.conf" >/dev/null
$as "$bin/pg_ctl" -D "$dir/data" -w -s -l "$dir/log" start \
    -o "-k $dir -c listen_addresses= -c fsync=off -c max_connections=100" </dev/null >/dev/null 2>&1
echo ready
cat >/dev/null
$as "$bin/pg_ctl" -D "$dir/data" -w -s -m immediate stop </dev/null >/dev/null 2>&1 || true
cd /
rm -rf "$dir"
"#;

pub struct Server {
    dir: PathBuf,
    bin: PathBuf,
    _keeper: Child,
    _stdin: ChildStdin,
}

impl Server {
    /// One for all trials of this process.
    fn shared() -> &'static Server {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| {
            let server = Server::start();
            for role in ["fumehood_runner", "fumehood_reader", "fumehood_owner"] {
                server.psql("postgres", &format!("CREATE ROLE {role} LOGIN"));
            }
            server.psql(
                "postgres",
                "CREATE ROLE secret LOGIN SUPERUSER PASSWORD 'marker-pass word'",
            );
            server
        })
    }

    fn start() -> Server {
        let mut bins: Vec<PathBuf> = crate::lab::names_in("/usr/lib/postgresql".as_ref())
            .into_iter()
            .map(|version| {
                PathBuf::from("/usr/lib/postgresql")
                    .join(version)
                    .join("bin")
            })
            .filter(|bin| bin.join("initdb").exists())
            .collect();
        bins.sort();
        let bin = bins.pop().expect("PostgreSQL's programs are installed");
        let run_as = match is_root() {
            true => "setpriv --reuid=postgres --regid=postgres --clear-groups",
            false => "",
        };
        // A socket's path must be short.
        let dir = tempfile::Builder::new()
            .prefix("fh-pg")
            .tempdir_in("/tmp")
            .unwrap()
            .keep();
        if is_root() {
            let owned = Command::new("chown").arg("postgres:").arg(&dir).status();
            assert!(owned.unwrap().success());
        }
        let mut keeper = Command::new("sh")
            .args(["-c", KEEPER, "keeper"])
            .args([dir.as_os_str(), bin.as_os_str()])
            .arg(run_as)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(keeper.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "ready\n", "see {}", dir.display());
        let stdin = keeper.stdin.take().unwrap();
        Server {
            dir,
            bin,
            _keeper: keeper,
            _stdin: stdin,
        }
    }

    /// A database of its own for one trial.
    fn database(&self) -> String {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("trial_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        self.psql("postgres", &format!("CREATE DATABASE {name}"));
        name
    }

    fn url(&self, database: &str, user: &str) -> String {
        format!(
            "postgres:///{database}?host={}&user={user}",
            self.dir.display()
        )
    }

    fn psql(&self, database: &str, sql: &str) -> String {
        let ran = Command::new(self.bin.join("psql"))
            .args([
                "-X",
                "-q",
                "-A",
                "-t",
                "-v",
                "ON_ERROR_STOP=1",
                "-U",
                "postgres",
                "-d",
                database,
                "-h",
            ])
            .arg(&self.dir)
            .args(["-c", sql])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{sql}: {said}");
        String::from_utf8(ran.stdout).unwrap().trim_end().to_owned()
    }
}

/// A lab whose commands all use a database of their own on the server.
pub struct Bench {
    pub lab: Lab,
    server: &'static Server,
    database: String,
    pub url: String,
}

impl Bench {
    /// With its schema, as the superuser.
    pub fn new() -> Bench {
        let bench = Bench::bare("postgres");
        bench.ask(&["db", "migrate"]).good();
        bench
    }

    fn bare(user: &str) -> Bench {
        let server = Server::shared();
        let database = server.database();
        let url = server.url(&database, user);
        Bench {
            lab: Lab::new(),
            server,
            database,
            url,
        }
    }

    fn with_url(&self, url: &str, args: &[&str]) -> Ended {
        let mut command = self.lab.fumehood();
        command.args(args).env("FUMEHOOD_DB", url);
        finish(command)
    }

    fn ask(&self, args: &[&str]) -> Ended {
        self.with_url(&self.url, args)
    }

    fn sh(&self, options: &[&str], script: &str) -> Ended {
        let args: Vec<&str> = ["run"]
            .iter()
            .chain(options)
            .chain(&["--", "sh", "-c", script])
            .copied()
            .collect();
        self.ask(&args)
    }

    fn sql(&self, sql: &str) -> String {
        self.server.psql(&self.database, sql)
    }
}

fn recorded() {
    let bench = Bench::new();
    let script = "echo '{\"p_value\": 0.03, \"big\": 12345678901234567890}' > result.json; head -c 2M /dev/zero > large; echo out; echo err >&2; ln -s x l; exit 3";
    let ended = bench.sh(&["--id", "pg"], script);
    assert_eq!(ended.code(), 3, "{}", ended.err());
    let row = bench.sql("SELECT state, reason, exit_code, complete, outputs_count, refused_count FROM fumehood.analyses_v1");
    assert_eq!(row, "failed|exit|3|f|2|1");
    assert_eq!(
        bench
            .sql("SELECT CAST(result ->> 'p_value' AS double precision) FROM fumehood.analyses_v1"),
        "0.03"
    );
    assert_eq!(
        bench.sql("SELECT result ->> 'big' FROM fumehood.analyses_v1"),
        "12345678901234567890"
    );
    let outputs = "SELECT path_text, bytes, content IS NULL, encode(content, 'escape') FROM fumehood.outputs_v1 ORDER BY path";
    let rows = bench.sql(outputs);
    assert!(
        rows.starts_with("large|2097152|t|\nresult.json|47|f|{"),
        "{rows}"
    );
    assert_eq!(
        bench.sql("SELECT stream, encode(head, 'escape') FROM fumehood.logs_v1 ORDER BY stream"),
        "stderr|err\n\nstdout|out"
    );
    assert_eq!(
        bench.sql("SELECT remark, count FROM fumehood.remark_counts_v1"),
        "symlink|1"
    );
    assert_eq!(bench.sql("SELECT provenance ->> 'version', isolation ->> 'seccomp' IS NOT NULL FROM fumehood.analyses_v1"), "1|t");
    // Read again by every command.
    assert_eq!(
        bench
            .ask(&["outputs", "@last", "result.json", "-o", "-"])
            .good()
            .len(),
        47
    );
    assert_eq!(bench.ask(&["logs", "p", "--stderr"]).good(), "err\n");
    let shown = bench.ask(&["show", "pg", "--json"]).document();
    assert_eq!(shown["result"]["p_value"], 0.03);
    assert!(bench.ask(&["list"]).good().contains("failed (exit 3)"));
    assert_eq!(bench.sh(&["--id", "pg"], "true").code(), 125);
    bench.sh(&["--id", "pg", "--replace"], "echo 2 > f").good();
    bench.ask(&["verify"]).good();
    assert_eq!(
        bench.ask(&["db", "status", "--json"]).document()["rows"]["attempts"],
        2
    );
    assert!(bench.ask(&["db", "export"]).good().lines().count() >= 6);
    bench.ask(&["rm", "pg"]).good();
    for table in [
        "analyses",
        "attempts",
        "outputs",
        "logs",
        "remarks",
        "remark_counts",
    ] {
        assert_eq!(
            bench.sql(&format!("SELECT COUNT(*) FROM fumehood.{table}")),
            "0",
            "{table}"
        );
    }
    assert!(!bench.lab.home.join("fumehood.db").exists());
    bench.lab.assert_nothing_left();
    // Step by step, and results from elsewhere.
    bench.ask(&["workspace", "create", "w"]).good();
    bench
        .ask(&["run", "--in", "w", "--", "sh", "-c", "echo w > f"])
        .good();
    bench.ask(&["post-process", "w"]).good();
    bench.ask(&["workspace", "remove", "w"]).good();
    let result = bench.lab.write("project/r.json", "{\"n\": 1}");
    bench
        .ask(&["record", "r", "--result", result.to_str().unwrap()])
        .good();
    assert_eq!(
        bench
            .sql("SELECT isolation_level, result ->> 'n' FROM fumehood.analyses_v1 WHERE id = 'r'"),
        "none|1"
    );
    bench.lab.assert_nothing_left();
}

/// Nothing a program writes makes the transaction fail.
fn hostile() {
    let bench = Bench::new();
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
    let ended = bench.ask(&args);
    assert_eq!(ended.code(), 0, "{}", ended.err());
    crate::hostile::assert_plain("run", &ended.stderr);
    assert_eq!(bench.sql("SELECT outputs_count, result IS NULL, result_note LIKE '%u0000%' FROM fumehood.analyses_v1"), "11|t|t");
    assert_eq!(
        bench.sql("SELECT COUNT(*) FROM fumehood.outputs_v1 WHERE path = '\\xfffe'"),
        "1"
    );
    assert_eq!(
        bench.sql("SELECT encode(head, 'hex') FROM fumehood.logs_v1 WHERE stream = 'stdout'"),
        "00ff1b206f7574"
    );
    for args in [
        &["list"][..],
        &["show", "h"],
        &["outputs", "h"],
        &["show", "h", "--json"],
        &["logs", "h", "--json"],
    ] {
        let told = bench.ask(args);
        told.good();
        crate::hostile::assert_plain(&format!("{args:?}"), &told.stdout);
    }
    assert_eq!(
        bench
            .ask(&["show", "h'; DROP TABLE fumehood.analyses; --"])
            .code(),
        125
    );
    assert_eq!(bench.sql("SELECT COUNT(*) FROM fumehood.analyses_v1"), "1");
}

fn migrated() {
    let bench = Bench::bare("postgres");
    // Never by itself.
    let ended = bench.sh(&[], "echo ran");
    ended.refused(125, "db migrate");
    assert_eq!(ended.out(), "");
    bench.ask(&["list"]).refused(125, "db migrate");
    assert_eq!(
        bench.sql("SELECT COUNT(*) FROM pg_namespace WHERE nspname = 'fumehood'"),
        "0"
    );
    // By a role that may not create it: said, and nothing done.
    let stranger = bench.server.url(&bench.database, "fumehood_runner");
    let refused = bench.with_url(&stranger, &["db", "migrate"]);
    assert_eq!(refused.code(), 125);
    assert!(
        refused.err().contains("grants") || refused.err().contains("permission"),
        "{}",
        refused.err()
    );
    let made = bench.ask(&["db", "migrate", "--json"]).document();
    assert_eq!(made["from"], Value::Null, "{made}");
    let again = bench.ask(&["db", "migrate", "--json"]).document();
    assert_eq!(again["from"], again["to"], "{again}");
    bench.sh(&[], "true").good();
}

/// The SQL blocks of the documentation that begin so.
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

fn grants() {
    let bench = Bench::bare("fumehood_owner");
    bench.sql(&format!(
        "GRANT CREATE ON DATABASE {} TO fumehood_owner",
        bench.database
    ));
    bench.ask(&["db", "migrate"]).good();
    let runner = bench.server.url(&bench.database, "fumehood_runner");
    let as_runner = |args: &[&str]| bench.with_url(&runner, args);
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
    bench.sql(blocks[0]);
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
    // Removing needs more, and says so.
    let refused = as_runner(&["rm", "g"]);
    refused.refused(125, "grants");
    assert_eq!(as_runner(&["gc", "--older-than", "1ms"]).code(), 125);
    assert_eq!(
        bench.sql("SELECT COUNT(*) FROM fumehood.attempts_v1 WHERE id = 'g'"),
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
    bench.sql(blocks[1]);
    as_runner(&["rm", "g"]).good();
    assert_eq!(
        bench.sql("SELECT COUNT(*) FROM fumehood.attempts_v1 WHERE id = 'g'"),
        "0"
    );
}

/// A second home is a second machine as far as files go.
fn another_machine() {
    let bench = Bench::new();
    let script = "echo small > small; head -c 3M /dev/urandom > large; for i in 1 2 3 4; do echo line $i; done";
    bench.sh(&["--id", "m"], script).good();
    let there = Lab::new();
    let ask = |args: &[&str]| {
        let mut command = there.fumehood();
        command.args(args).env("FUMEHOOD_DB", &bench.url);
        finish(command)
    };
    assert!(ask(&["list"]).good().contains('m'));
    assert_eq!(ask(&["outputs", "m", "small", "-o", "-"]).good(), "small\n");
    assert_eq!(
        ask(&["logs", "m"]).good(),
        "line 1\nline 2\nline 3\nline 4\n"
    );
    ask(&["show", "m"]).good();
    let host = bench.sql("SELECT host FROM fumehood.outputs_v1 WHERE path_text = 'large'");
    let store =
        bench.sql("SELECT artifact_store FROM fumehood.outputs_v1 WHERE path_text = 'large'");
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
    // The id is one for all machines.
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
        bench.ask(&["outputs", "m@2", "f", "-o", "-"]).good(),
        "there\n"
    );
    // Neither sweeps what is the other's.
    ask(&["gc"]).good();
    bench.ask(&["gc"]).good();
    assert_eq!(
        bench
            .ask(&["outputs", "m@1", "large", "-o", "-"])
            .stdout
            .len(),
        3 << 20
    );
    assert_eq!(bench.ask(&["verify", "--json"]).document()["elsewhere"], 1);
}

fn password() {
    const MARKER: &str = "marker-pass word";
    const WRITTEN: &str = "marker-pass%20word";
    let bench = Bench::new();
    let dir = bench.server.dir.display().to_string();
    let with = format!("postgres://secret:{WRITTEN}@/{}?host={dir}", bench.database);
    let hidden = |what: &str, ended: &Ended| {
        for text in [ended.out(), ended.err()] {
            assert!(!text.contains("marker-pass"), "{what}: {text}");
        }
    };
    // It works, and stands nowhere afterwards.
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
    let ended = bench.with_url(&with, &run);
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
        let ended = bench.with_url(&with, args);
        ended.good();
        hidden(&format!("{args:?}"), &ended);
    }
    bench.with_url(&with, &["gc", "--kept"]).good();
    // A server that is not there, a wrong password, and an address that is wrong.
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
            let ended = bench.with_url(url, args);
            assert_eq!(ended.code(), 125, "{args:?}: {}", ended.err());
            assert!(!ended.out().contains("ran\n"), "{args:?}");
            hidden(&format!("{args:?}"), &ended);
        }
    }
    // Not on the command line, by any spelling.
    let spelled = format!("postgres:///d?user=secret&pass%77ord={WRITTEN}&host={dir}");
    for url in [
        &with,
        &dead,
        &format!("postgres:///d?user=u&password={WRITTEN}"),
        &spelled,
    ] {
        let mut command = bench.lab.fumehood();
        command.args(["list", "--db", url]);
        let ended = finish(command);
        ended.refused(125, "password");
        hidden("--db", &ended);
    }
    // In a file that is private, or the password file.
    let file = bench.lab.write("person/url", format!("{with}\n"));
    set_mode(&file, 0o600);
    let by_file = |path: &PathBuf| {
        let mut command = bench.lab.fumehood();
        command.args(["list"]).env("FUMEHOOD_DB_FILE", path);
        finish(command)
    };
    by_file(&file).good();
    set_mode(&file, 0o644);
    let ended = by_file(&file);
    ended.refused(125, "600");
    hidden("FUMEHOOD_DB_FILE", &ended);
    let pass = bench
        .lab
        .write("person/pass", format!("*:*:*:secret:{MARKER}\n"));
    set_mode(&pass, 0o600);
    let mut command = bench.lab.fumehood();
    command
        .args(["list", "--db", &bench.server.url(&bench.database, "secret")])
        .env("PGPASSFILE", &pass);
    finish(command).good();
    for marker in [MARKER, WRITTEN] {
        assert_eq!(files_with(&bench.lab.home, marker.as_bytes()), [""; 0]);
    }
    assert_eq!(
        bench.sql(
            "SELECT COUNT(*) FROM fumehood.attempts WHERE attempts::text LIKE '%marker-pass%'"
        ),
        "0"
    );
}

/// The server's socket goes away while the program runs, and comes back.
fn away() {
    let bench = Bench::new();
    let front = bench.lab.path("front");
    std::fs::create_dir(&front).unwrap();
    let socket = bench.server.dir.join(".s.PGSQL.5432");
    let link = front.join(".s.PGSQL.5432");
    std::os::unix::fs::symlink(&socket, &link).unwrap();
    let url = format!(
        "postgres:///{}?host={}&user=postgres",
        bench.database,
        front.display()
    );
    let gate = bench.lab.path("project/gate");
    assert!(
        Command::new("mkfifo")
            .arg(&gate)
            .status()
            .unwrap()
            .success()
    );
    let script = "echo precious > f; head -c 2M /dev/zero > big; echo up; read x; echo last";
    let mut command = bench.lab.run_command([
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
    let mut live = crate::lab::Live::start(command);
    let mut hold = std::fs::OpenOptions::new().write(true).open(&gate).unwrap();
    live.wait_for("up");
    // The connection is held for a moment, in case the program ends soon.
    crate::lab::eventually("the connection is let go", || {
        let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
        bench.sql(others) == "0"
    });
    std::fs::remove_file(&link).unwrap();
    std::io::Write::write_all(&mut hold, b"go\n").unwrap();
    drop(hold);
    let ended = live.end();
    ended.refused(121, "NOT COMMITTED");
    assert!(
        ended.err().contains("fumehood post-process a"),
        "{}",
        ended.err()
    );
    bench.lab.assert_nothing_left();
    assert_eq!(crate::lab::names_in(&bench.lab.home.join("pending")), ["a"]);
    // While it is away a repeat says so, and loses nothing.
    assert_eq!(bench.with_url(&url, &["post-process", "a"]).code(), 125);
    assert_eq!(
        bench.sql("SELECT state FROM fumehood.analyses_v1"),
        "running"
    );
    std::os::unix::fs::symlink(&socket, &link).unwrap();
    bench.with_url(&url, &["run", "--", "true"]).good();
    assert_eq!(
        bench.sql("SELECT state, outputs_count, complete FROM fumehood.analyses_v1 WHERE id = 'a'"),
        "succeeded|2|t"
    );
    assert_eq!(
        bench
            .with_url(&url, &["outputs", "a", "f", "-o", "-"])
            .good(),
        "precious\n"
    );
    assert_eq!(bench.with_url(&url, &["logs", "a"]).good(), "up\nlast\n");
    assert_eq!(
        crate::lab::names_in(&bench.lab.home.join("pending")),
        [""; 0]
    );
}

/// Between a client and the server. Of the first connections the one is cut in which an attempt is begun: the server hears of it, and its
/// answer is lost. So many are cut.
fn forgetful(listener: &UnixListener, server: &Path, mut cut: u32) {
    while let Ok((client, _)) = listener.accept() {
        let Ok(behind) = UnixStream::connect(server) else {
            return;
        };
        let (mut answers, mut to_client) =
            (behind.try_clone().unwrap(), client.try_clone().unwrap());
        let passing = std::thread::spawn(move || {
            let _until_cut = std::io::copy(&mut answers, &mut to_client);
            let _told = to_client.shutdown(Shutdown::Both);
        });
        let (mut client, mut behind) = (client, behind);
        let (mut buffer, mut beginning) = (vec![0; 1 << 16], false);
        while let Ok(count @ 1..) = client.read(&mut buffer) {
            let said = &buffer[..count];
            beginning |= said.windows(20).any(|w| w == b"INSERT INTO analyses");
            // Bind, and execute.
            if cut > 0 && beginning && said[0] == b'B' {
                cut -= 1;
                client.shutdown(Shutdown::Both).unwrap();
            }
            if behind.write_all(said).is_err() {
                break;
            }
        }
        let _heard_all = behind.shutdown(Shutdown::Write);
        passing.join().unwrap();
    }
}

fn answer_lost() {
    for (cut, state) in [(1, "succeeded|exit"), (2, "error|runner_lost")] {
        let bench = Bench::new();
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join(".s.PGSQL.5432")).unwrap();
        let server = bench.server.dir.join(".s.PGSQL.5432");
        // It ends with the trials.
        let _proxy = std::thread::spawn(move || forgetful(&listener, &server, cut));
        let url = format!(
            "postgres:///{}?host={}&user=postgres",
            bench.database,
            dir.path().display()
        );
        let ended = bench.with_url(&url, &["run", "--id", "a", "--", "echo", "up"]);
        match cut {
            1 => assert_eq!(ended.good(), "up\n"),
            _ => {
                assert_eq!(ended.code(), 125, "{}", ended.err());
                assert!(!ended.out().contains("up"), "{}", ended.out());
                let row = bench.sql("SELECT state FROM fumehood.analyses_v1");
                assert_eq!(row, "running", "the control");
                bench.ask(&["gc"]).good();
            }
        }
        let row = bench.sql("SELECT state, reason FROM fumehood.analyses_v1");
        assert_eq!(row, state);
        bench.lab.assert_nothing_left();
    }
}
