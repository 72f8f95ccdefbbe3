//! What has gathered is looked after: `rm`, `gc`, `verify` and `db`, and none of them takes more than it says.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::{Value, json};

use crate::lab::{Lab, finish, set_mode};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    ("rm_takes_what_only_it_has", For::Everyone, rm),
    ("rm_of_several_is_all_or_nothing", For::Everyone, rm_several),
    ("a_dry_run_changes_nothing", For::Everyone, dry_run),
    ("gc_removes_what_is_old", For::Everyone, older),
    ("gc_spares_what_others_refer_to", For::Everyone, others),
    ("verify_finds_every_damage", For::Everyone, verify),
    ("the_database_tells_of_itself", For::Everyone, db),
    (
        "an_unsafe_database_is_refused",
        For::Everyone,
        unsafe_database,
    ),
];

fn objects(lab: &Lab) -> u64 {
    let status = lab.ask_json(["db", "status", "--json"]);
    status["artifacts"]["objects"].as_u64().unwrap()
}

fn rm() {
    let lab = Lab::new();
    lab.sh(&["--id", "one"], "echo shared > s; echo own > o")
        .good();
    lab.sh(&["--id", "one", "--replace"], "echo newer > o")
        .good();
    lab.sh(&["--id", "two"], "echo shared > s").good();
    assert_eq!(objects(&lab), 3);
    lab.ask(["rm", "one"]).good();
    assert_eq!(lab.sql("SELECT id FROM attempts_v1"), [[json!("two")]]);
    assert_eq!(lab.sql_one("SELECT COUNT(*) FROM outputs_v1"), 1);
    assert_eq!(
        lab.sql_one("SELECT COUNT(*) FROM logs_v1 WHERE id = 'one'"),
        0
    );
    assert_eq!(objects(&lab), 1, "what two refers to stays");
    assert_eq!(
        lab.ask(["outputs", "two", "s", "-o", "-"]).good(),
        "shared\n"
    );
    assert_eq!(lab.ask(["show", "one"]).code(), 125);
    // The id is free again.
    lab.sh(&["--id", "one"], "true").good();
    lab.ask(["rm", "@last"]).good();
    assert_eq!(lab.sql("SELECT id FROM attempts_v1"), [[json!("two")]]);
    // A kept workspace is in the way.
    lab.sh(&["--id", "k", "--keep", "always"], "echo x > f")
        .good();
    assert_eq!(lab.ask(["rm", "k"]).code(), 125);
    lab.ask(["workspace", "remove", "k"]).good();
    lab.ask(["rm", "k"]).good();
    lab.ask(["verify"]).good();
}

fn rm_several() {
    let lab = Lab::new();
    for id in ["a", "b", "c"] {
        lab.sh(&["--id", id], "true").good();
    }
    assert_eq!(lab.ask(["rm", "a", "nothing", "b"]).code(), 125);
    assert_eq!(lab.sql_one("SELECT COUNT(*) FROM analyses_v1"), 3);
    assert_eq!(lab.ask(["rm"]).code(), 125);
    assert_eq!(
        lab.ask(["rm", "a@1"]).code(),
        125,
        "an attempt is no analysis"
    );
    let document = lab.ask_json(["rm", "a", "b", "a", "--json"]);
    assert_eq!(
        document["removed"].as_array().unwrap().len(),
        2,
        "{document}"
    );
    assert_eq!(lab.sql("SELECT id FROM analyses_v1"), [[json!("c")]]);
}

/// Everything below a directory: path, length, mode, modification time. The database's own side files come and go.
fn state_of(dir: &Path) -> BTreeMap<String, (u64, u32, i64)> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let (path, meta) = (entry.path(), entry.metadata().unwrap());
        let name = path.display().to_string();
        if meta.is_dir() {
            found.extend(state_of(&path));
        } else if !name.contains("/fumehood.db") && !name.ends_with("lock") {
            // Whoever closes the database puts what is in its log into the file: its rows are asked for.
            found.insert(name, (meta.len(), meta.mode(), meta.mtime_nsec()));
        }
    }
    found
}

/// A run whose runner was killed while the program was there.
fn killed(lab: &Lab, id: &str) {
    let mut live = lab.start([
        "--id",
        id,
        "--",
        "sh",
        "-c",
        "echo partial > f; echo up; sleep 600",
    ]);
    live.wait_for("up");
    live.signal(rustix::process::Signal::KILL);
    live.child.wait().unwrap();
}

fn dry_run() {
    let lab = Lab::new();
    let fresh = Lab::new();
    fresh.ask(["gc", "--dry-run"]).good();
    assert!(
        !fresh.home.join("fumehood.db").exists(),
        "not even an empty database"
    );
    lab.sh(&["--id", "old"], "echo x > f").good();
    lab.sh(&["--id", "kept", "--keep", "always"], "echo y > f")
        .good();
    killed(&lab, "dead");
    // An object that nobody refers to.
    let stray = lab.write("stray", "nobody's");
    let hash = store::types::manifest::ContentHash::of(b"nobody's").to_string();
    let object = lab.object(&hash);
    std::fs::create_dir_all(object.parent().unwrap()).unwrap();
    set_mode(object.parent().unwrap(), 0o700);
    std::fs::rename(stray, &object).unwrap();
    set_mode(&object, 0o444);
    let rows = || lab.sql("SELECT * FROM attempts_v1");
    let before = (rows(), state_of(&lab.home), state_of(&lab.root));
    let args = ["gc", "--dry-run", "--older-than", "0s", "--kept", "--json"];
    let would = lab.ask_json(args);
    let said = lab.ask(["gc", "-n", "--older-than", "0s", "--kept"]);
    assert_eq!(said.code(), 0);
    assert!(
        said.err().contains("would finish dead") && said.err().contains("would remove old"),
        "{}",
        said.err()
    );
    let after = (rows(), state_of(&lab.home), state_of(&lab.root));
    assert_eq!(before, after);
    assert_eq!(would["finished"][0]["id"], "dead", "{would}");
    assert!(would["swept"]["objects"].as_u64().unwrap() >= 1, "{would}");
    // Then it does what it said.
    let does = lab.ask_json(["gc", "--older-than", "0s", "--kept", "--json"]);
    assert_eq!(does["finished"][0]["id"], "dead", "{does}");
    assert_eq!(
        lab.sql_one("SELECT COUNT(*) FROM attempts_v1 WHERE id = 'old'"),
        0,
        "{does}"
    );
    assert!(!object.exists() && !lab.workspace("kept").exists());
    lab.assert_nothing_left();
}

fn older() {
    let lab = Lab::new();
    lab.sh(&["--id", "fine"], "echo a > f").good();
    assert_eq!(lab.sh(&["--id", "bad"], "echo b > f; exit 1").code(), 1);
    killed(&lab, "dead");
    // The dead one is finished, its outputs kept; nothing is old yet.
    let document = lab.ask_json(["gc", "--older-than", "90d", "--json"]);
    assert_eq!(document["analyses"], json!([]));
    let row =
        lab.sql("SELECT state, reason, complete, outputs_count FROM analyses_v1 WHERE id = 'dead'");
    assert_eq!(
        row,
        [[json!("error"), json!("runner_lost"), json!(0), json!(1)]]
    );
    assert_eq!(
        lab.ask(["outputs", "dead", "f", "-o", "-"]).good(),
        "partial\n"
    );
    // Two milliseconds of the database's clock are over by the time the command has begun.
    lab.ask(["gc", "--older-than", "1ms", "--status", "failed"])
        .good();
    let left: Vec<Vec<Value>> = lab.sql("SELECT id FROM analyses_v1 ORDER BY id");
    assert_eq!(left, [[json!("dead")], [json!("fine")]]);
    assert_eq!(objects(&lab), 2, "its object went with it");
    for wrong in [
        &["--status", "failed"][..],
        &["--older-than", "soon"],
        &["--older-than", "1d", "--status", "x"],
    ] {
        assert_eq!(lab.gc(wrong).code(), 125, "{wrong:?}");
    }
    lab.ask(["gc", "--older-than", "1ms"]).good();
    assert_eq!(lab.sql_one("SELECT COUNT(*) FROM attempts_v1"), 0);
    assert_eq!(objects(&lab), 0);
    lab.ask(["verify"]).good();
}

/// Two databases, one artifact store: neither sweeps what the other refers to.
fn others() {
    let lab = Lab::new();
    let other = format!("sqlite:{}", lab.path("person/other.db").display());
    lab.sh(&["--id", "here"], "echo here > f").good();
    let document = lab.sh_json(&["--db", &other, "--id", "there"], "echo there > f");
    let object = lab.object(document["outputs"][0]["blake3"].as_str().unwrap());
    lab.ask(["rm", "here"]).good();
    let said = lab.gc(&[]);
    assert_eq!(said.code(), 0, "{}", said.err());
    assert!(
        object.exists() && said.err().contains("--forget-others"),
        "{}",
        said.err()
    );
    assert_eq!(
        lab.ask(["outputs", "there", "f", "-o", "-", "--db", &other])
            .good(),
        "there\n"
    );
    lab.gc(&["--forget-others"]).good();
    assert!(!object.exists(), "the control: on request it does");
}

fn verify() {
    let lab = Lab::new();
    let script = "for i in sound short changed gone open; do echo $i > $i; done; printf 'x%.0s' 1 2 3 > more";
    let document = lab.sh_json(&["--id", "v"], script);
    lab.sh(&["--id", "w"], "echo gone > also").good();
    lab.ask(["verify"]).good();
    let object = |path: &str| {
        let list = document["outputs"].as_array().unwrap();
        let output = list.iter().find(|o| o["path"] == path).unwrap();
        lab.object(output["blake3"].as_str().unwrap())
    };
    let rewrite = |path: &str, content: &str| {
        set_mode(&object(path), 0o644);
        std::fs::write(object(path), content).unwrap();
        set_mode(&object(path), 0o444);
    };
    rewrite("short", "sho");
    rewrite("changed", "Changed\n");
    std::fs::remove_file(object("gone")).unwrap();
    set_mode(&object("open"), 0o666);
    let ended = lab.ask(["verify", "--json"]);
    assert_eq!(ended.code(), 125);
    let report = ended.document();
    assert_eq!(
        (&report["sound"], &report["checked"]),
        (&json!(false), &json!(6)),
        "{report}"
    );
    let damaged = report["damaged"].as_array().unwrap();
    let what = |path: &str| {
        let name = object(path);
        let of = damaged
            .iter()
            .find(|d| lab.object(d["blake3"].as_str().unwrap()) == name);
        of.map(|d| d["what"].as_str().unwrap().to_owned())
            .unwrap_or_default()
    };
    assert!(
        what("short").contains("3 bytes long instead of 6"),
        "{report}"
    );
    assert!(what("changed").contains("changed"), "{report}");
    assert!(what("gone").contains("missing"), "{report}");
    assert!(what("open").contains("mode 0666"), "{report}");
    assert_eq!(damaged.len(), 4, "{report}");
    let gone = damaged.iter().find(|d| d["what"] == "missing").unwrap();
    assert_eq!(gone["used_by"], json!(["v@1", "w@1"]));
    // Of one analysis alone.
    assert_eq!(
        lab.ask(["verify", "w", "--json"]).document()["damaged"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    let said = lab.ask(["verify"]);
    assert_eq!(said.code(), 125);
    assert!(
        said.out().contains("missing") && said.err().contains("4 damaged"),
        "{}",
        said.err()
    );
    // An artifact store that is not there is not taken for an empty one.
    std::fs::rename(lab.home.join("artifacts"), lab.home.join("away")).unwrap();
    assert_eq!(lab.ask(["verify"]).code(), 125);
}

fn db() {
    let lab = Lab::new();
    lab.sh(
        &["--id", "d"],
        "echo x > f; ln -s x l; echo '{}' > result.json",
    )
    .good();
    let status = lab.ask_json(["db", "status", "--json"]);
    assert_eq!(status["rows"]["outputs"], 2, "{status}");
    assert_eq!(status["states"], json!({"succeeded": 1}));
    assert_eq!(
        (&status["last_7_days_attempts"], &status["output_bytes"]),
        (&json!(1), &json!(5))
    );
    assert!(lab.ask(["db", "status"]).good().contains("1 succeeded"));
    lab.ask(["db", "migrate"]).good();
    // Every row as JSON, readable by another program.
    let text = lab.ask(["db", "export"]).good();
    let lines: Vec<Value> = text
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let of = |table: &str| lines.iter().filter(|l| l["table"] == table).count();
    assert_eq!(
        (of("analyses"), of("attempts"), of("outputs"), of("logs")),
        (1, 1, 2, 2)
    );
    let file = lab.path("export");
    lab.ask(["db", "export", "-o", file.to_str().unwrap()])
        .good();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o600);
    assert_eq!(
        lab.ask(["db", "export", "-o", file.to_str().unwrap()])
            .code(),
        125,
        "it exists"
    );
    assert_eq!(
        lab.home.join("fumehood.db").metadata().unwrap().mode() & 0o7777,
        0o600
    );
    // Two commands and a run at once do not get in each other's way.
    let lives: Vec<_> = (0..6)
        .map(|i| {
            let mut command = lab.fumehood();
            match i % 2 {
                0 => command.args(["run", "--", "sh", "-c", "echo x > f"]),
                _ => command.args(["list", "--json"]),
            };
            crate::lab::Live::start(command)
        })
        .collect();
    for live in lives {
        live.end().good();
    }
    assert_eq!(lab.sql_one("SELECT COUNT(*) FROM analyses_v1"), 4);
}

fn unsafe_database() {
    let lab = Lab::new();
    // Somebody else's file is neither taken for ours nor changed.
    let alien = lab.write(
        "person/alien.db",
        "not a database at all, but long enough to be looked at. ".repeat(40),
    );
    let given = format!("sqlite:{}", alien.display());
    let ended = lab.sh(&["--db", &given], "echo ran");
    assert_eq!(
        (ended.code(), ended.out().as_str()),
        (125, ""),
        "{}",
        ended.err()
    );
    assert!(
        std::fs::read_to_string(&alien)
            .unwrap()
            .starts_with("not a database")
    );
    let theirs = lab.path("person/theirs.db");
    let made = std::process::Command::new("/usr/bin/python3")
        .args(["-c", "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('CREATE TABLE analyses (x)'); c.commit()"])
        .arg(&theirs)
        .status();
    assert!(made.unwrap().success());
    set_mode(&theirs, 0o600);
    let ended = lab.sh(
        &["--db", &format!("sqlite:{}", theirs.display())],
        "echo ran",
    );
    assert_eq!(
        (ended.code(), ended.out().as_str()),
        (125, ""),
        "{}",
        ended.err()
    );
    // One that others could write is no record.
    let open = lab.path("open");
    std::fs::create_dir(&open).unwrap();
    set_mode(&open, 0o777);
    let ended = lab.sh(
        &["--db", &format!("sqlite:{}/x.db", open.display())],
        "echo ran",
    );
    assert_eq!(
        (ended.code(), ended.out().as_str()),
        (125, ""),
        "{}",
        ended.err()
    );
    set_mode(&open, 0o755);
    lab.sh(
        &["--db", &format!("sqlite:{}/x.db", open.display())],
        "true",
    )
    .good();
    // A link in its place is not followed to somebody else's.
    std::os::unix::fs::symlink(&alien, open.join("l.db")).unwrap();
    assert_eq!(
        lab.sh(
            &["--db", &format!("sqlite:{}/l.db", open.display())],
            "true"
        )
        .code(),
        125
    );
    for wrong in ["mysql://x", "sqlite:", "", "postgres"] {
        let mut command = lab.run_command(["--db", wrong, "--", "true"]);
        command.env_remove("FUMEHOOD_DB");
        assert_eq!(finish(command).code(), 125, "{wrong:?}");
    }
}
