//! Compares `check` with real databases. PostgreSQL and SQLite must accept everything that `check` accepts, and read
//! it alike. For documents that `check` refuses because of a database, at least one database must refuse them too.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use proptest::strategy::{Strategy, ValueTree};

use super::check;
use super::tests::{bad, good};

const PYTHON: &str = "/usr/bin/python3";

/// A private PostgreSQL server without TCP. Stopped and removed on drop.
struct Cluster {
    dir: tempfile::TempDir,
    bin: PathBuf,
}

impl Cluster {
    /// `None` if PostgreSQL is not installed.
    fn start() -> Option<Cluster> {
        let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
        let bins = versions.map(|entry| entry.unwrap().path().join("bin"));
        let bin = bins.filter(|bin| bin.join("initdb").exists()).max()?;
        let dir = tempfile::tempdir().unwrap();
        let cluster = Cluster { dir, bin };
        if rustix::process::geteuid().is_root() {
            let chown = Command::new("chown")
                .arg("postgres:")
                .arg(cluster.dir.path())
                .status();
            assert!(chown.unwrap().success());
        }
        let data = cluster.dir.path().join("data");
        let mut initdb = cluster.command("initdb");
        initdb.args([
            "-U",
            "postgres",
            "-A",
            "trust",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C",
            "-D",
        ]);
        assert!(
            initdb
                .arg(&data)
                .stdout(Stdio::null())
                .status()
                .unwrap()
                .success()
        );
        let options = format!(
            "-k {} -c listen_addresses='' -c fsync=off",
            cluster.dir.path().display()
        );
        let mut start = cluster.command("pg_ctl");
        start.args(["-w", "-s", "-o", &options, "-l"]);
        start
            .arg(cluster.dir.path().join("log"))
            .arg("-D")
            .arg(&data)
            .arg("start");
        assert!(start.stdout(Stdio::null()).status().unwrap().success());
        Some(cluster)
    }

    /// PostgreSQL refuses to run as root.
    fn command(&self, program: &str) -> Command {
        let program = self.bin.join(program);
        let mut command = match rustix::process::geteuid().is_root() {
            true => {
                let mut command = Command::new("setpriv");
                command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]);
                command.arg(program);
                command
            }
            false => Command::new(program),
        };
        command.current_dir(self.dir.path());
        command
    }

    /// For each document the text that jsonb returns, or `None` if PostgreSQL refuses the document.
    fn read(&self, docs: &[Vec<u8>]) -> Vec<Option<Vec<u8>>> {
        let mut sql = String::from(
            r"create function pg_temp.judge(doc bytea) returns text language plpgsql as $$
              begin return encode(convert_to(convert_from(doc, 'UTF8')::jsonb::text, 'UTF8'), 'hex');
              exception when others then return 'refused'; end $$;
              create temp table docs (n int, doc bytea);
              copy docs from stdin;
",
        );
        for (n, doc) in docs.iter().enumerate() {
            writeln!(sql, "{n}\t\\\\x{}", hex(doc)).unwrap();
        }
        sql.push_str("\\.\nselect pg_temp.judge(doc) from docs order by n;\n");
        let mut psql = self.command("psql");
        psql.args([
            "-XqAt",
            "-v",
            "ON_ERROR_STOP=1",
            "-U",
            "postgres",
            "-d",
            "postgres",
            "-h",
        ])
        .arg(self.dir.path());
        let lines = answers(psql, sql.into_bytes());
        assert_eq!(lines.len(), docs.len());
        let read = |line: &String| (line != "refused").then(|| unhex(line));
        lines.iter().map(read).collect()
    }

    /// For each document whether PostgreSQL or SQLite refuses it.
    fn either_refuses(&self, docs: &[&[u8]]) -> Vec<bool> {
        let docs: Vec<Vec<u8>> = docs.iter().map(|doc| doc.to_vec()).collect();
        let postgres = self.read(&docs);
        let sqlite = sqlite(&docs, &vec![None; docs.len()]);
        let both = postgres.iter().zip(sqlite);
        both.map(|(theirs, said)| theirs.is_none() || said == "refused")
            .collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let data = self.dir.path().join("data");
        let mut stop = self.command("pg_ctl");
        stop.args(["-s", "-m", "immediate", "-D"]).arg(data);
        let _ = stop.arg("stop").status();
    }
}

/// Prints SQLite's answer for each document: `refused`, `same` as the text from PostgreSQL, `differs`, or `accepted`
/// if there is no text from PostgreSQL. Numbers are compared as doubles.
const SQLITE: &str = r"
import json, sqlite3, sys
db = sqlite3.connect(':memory:')
read = lambda text: json.loads(text, parse_int=float)
for line in sys.stdin:
    doc, theirs = line.rstrip('\n').split('\t')
    try:
        valid, text = db.execute('select json_valid(t), json(t) from (select cast(? as text) as t)', [bytes.fromhex(doc)]).fetchone()
    except Exception:
        valid = 0
    if not valid:
        print('refused')
    elif not theirs:
        print('accepted')
    else:
        print('same' if read(text) == read(bytes.fromhex(theirs).decode()) else 'differs')
";

fn sqlite(docs: &[Vec<u8>], theirs: &[Option<Vec<u8>>]) -> Vec<String> {
    let mut lines = String::new();
    for (doc, theirs) in docs.iter().zip(theirs) {
        let theirs = theirs.as_deref().unwrap_or_default();
        writeln!(lines, "{}\t{}", hex(doc), hex(theirs)).unwrap();
    }
    let mut python = Command::new(PYTHON);
    python.args(["-I", "-c", SQLITE]);
    let said = answers(python, lines.into_bytes());
    assert_eq!(said.len(), docs.len());
    said
}

fn answers(mut command: Command, questions: Vec<u8>) -> Vec<String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&questions));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success(), "{command:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(str::to_owned).collect()
}

fn hex(bytes: &[u8]) -> String {
    let digit = |n: u8| char::from(b"0123456789abcdef"[usize::from(n)]);
    let pairs = bytes.iter().map(|b| [digit(b >> 4), digit(b & 15)]);
    pairs.flatten().collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |b: u8| char::from(b).to_digit(16).unwrap() as u8;
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|p| digit(p[0]) << 4 | digit(p[1])).collect()
}

/// Generates documents from dangerous parts: escapes at every boundary, numbers at every bound, keys that are nearly
/// equal.
fn made_up() -> Vec<Vec<u8>> {
    use proptest::collection::vec;
    use proptest::prelude::{Just, any, prop_oneof};
    let string = vec(
        prop_oneof![
            any::<char>().prop_map(|c| serde_json::to_string(&c)
                .unwrap()
                .trim_matches('"')
                .to_owned()),
            any::<u16>().prop_map(|u| format!("\\u{u:04X}")),
            Just(String::from("\\ud83d\\ude00")),
            Just(String::from("\\u0000")),
        ],
        0..6,
    )
    .prop_map(|parts| format!("\"{}\"", parts.concat()));
    let number = (
        "-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,30})?",
        proptest::option::of((prop_oneof!["e", "E", "e-", "E\\+"], 0u32..420)),
    )
        .prop_map(|(mantissa, exponent)| match exponent {
            Some((e, power)) => format!("{mantissa}{e}{power}"),
            None => mantissa,
        });
    let scalar = prop_oneof![
        string.clone(),
        number,
        Just(String::from("null")),
        Just(String::from("true"))
    ];
    let value = scalar.prop_recursive(6, 40, 6, move |inner| {
        let key = prop_oneof![
            string.clone(),
            Just(String::from("\"a\"")),
            Just(String::from("\"\\u0061\""))
        ];
        prop_oneof![
            vec(inner.clone(), 0..6).prop_map(|items| format!("[{}]", items.join(" ,"))),
            vec((key, inner), 0..6).prop_map(|members| {
                let members: Vec<String> =
                    members.iter().map(|(k, v)| format!("{k}:{v}")).collect();
                format!("{{{}}}", members.join(",\n"))
            }),
        ]
    });
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut next = || value.new_tree(&mut runner).unwrap().current().into_bytes();
    (0..1_500).map(|_| next()).collect()
}

#[test]
fn both_databases_take_what_is_accepted_and_read_it_alike() {
    let tools = Path::new(PYTHON).exists() && Command::new("psql").arg("-V").output().is_ok();
    let Some(cluster) = tools.then(Cluster::start).flatten() else {
        eprintln!("SKIPPED: PostgreSQL or {PYTHON} is not installed");
        return;
    };

    let mut docs = good();
    docs.extend(made_up());
    let all = docs.len();
    docs.retain(|doc| check(doc).is_ok());
    assert!(
        docs.len() > all / 4 && docs.len() < all,
        "{} of {all}",
        docs.len()
    );
    let theirs = cluster.read(&docs);
    for ((doc, theirs), ours) in docs.iter().zip(&theirs).zip(sqlite(&docs, &theirs)) {
        let shown = String::from_utf8_lossy(&doc[..doc.len().min(200)]);
        assert!(theirs.is_some(), "PostgreSQL refuses {shown}");
        assert_eq!(ours, "same", "SQLite on {shown}");
    }

    // The control: the databases are the reason to refuse these. Without the check they would fail inside the
    // transaction.
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let named: [&[u8]; 10] = [
        br#""\u0000""#,
        br#"{"\u0000":1}"#,
        br#""\ud800""#,
        br#""\udc00\ud800""#,
        b"1e400000",
        b"[1e-400000]",
        b"NaN",
        b"\"\0\"",
        b"\"\xff\"",
        deep.as_bytes(),
    ];
    for (doc, refused) in named.iter().zip(cluster.either_refuses(&named)) {
        let shown = String::from_utf8_lossy(&doc[..doc.len().min(40)]);
        assert!(check(doc).is_err(), "{shown} is accepted");
        assert!(refused, "both databases take {shown}");
    }
    let bad = bad();
    let small = bad.iter().map(|(doc, _)| doc.as_slice());
    let refused: Vec<&[u8]> = small.filter(|doc| doc.len() < 1 << 16).collect();
    let hard = cluster.either_refuses(&refused);
    assert!(hard.iter().filter(|hard| **hard).count() * 2 > refused.len());
}
