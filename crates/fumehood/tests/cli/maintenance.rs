//! `rm`, `gc`, `verify` and `db`. None of them removes more than it reports.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::{Value, json};
use testkit::command::{RunningCommand, finish};
use testkit::home::{TestHome, set_mode};
use testkit::trial;

fn objects(test_home: &TestHome) -> u64 {
    let status = test_home.ask_json(["db", "status", "--json"]);
    status["artifacts"]["objects"].as_u64().unwrap()
}

trial!(Everyone, rm_removes_the_objects_that_no_other_analysis_has);
fn rm_removes_the_objects_that_no_other_analysis_has() {
    let test_home = TestHome::new();
    test_home
        .sh(&["--id", "one"], "echo shared > s; echo own > o")
        .good();
    test_home
        .sh(&["--id", "one", "--replace"], "echo newer > o")
        .good();
    test_home.sh(&["--id", "two"], "echo shared > s").good();
    assert_eq!(objects(&test_home), 3);
    test_home.ask(["rm", "one"]).good();
    assert_eq!(
        test_home.sql("SELECT id FROM attempts_v1"),
        [[json!("two")]]
    );
    assert_eq!(test_home.sql_one("SELECT COUNT(*) FROM outputs_v1"), 1);
    assert_eq!(
        test_home.sql_one("SELECT COUNT(*) FROM logs_v1 WHERE id = 'one'"),
        0
    );
    assert_eq!(objects(&test_home), 1, "what two refers to stays");
    assert_eq!(
        test_home.ask(["outputs", "two", "s", "-o", "-"]).good(),
        "shared\n"
    );
    assert_eq!(test_home.ask(["show", "one"]).code(), 125);
    // The id is free again.
    test_home.sh(&["--id", "one"], "true").good();
    test_home.ask(["rm", "@last"]).good();
    assert_eq!(
        test_home.sql("SELECT id FROM attempts_v1"),
        [[json!("two")]]
    );
    // A kept workspace blocks the removal.
    test_home
        .sh(&["--id", "k", "--keep", "always"], "echo x > f")
        .good();
    assert_eq!(test_home.ask(["rm", "k"]).code(), 125);
    test_home.ask(["workspace", "remove", "k"]).good();
    test_home.ask(["rm", "k"]).good();
    test_home.ask(["verify"]).good();
}

trial!(Everyone, rm_of_several_is_all_or_nothing);
fn rm_of_several_is_all_or_nothing() {
    let test_home = TestHome::new();
    for id in ["a", "b", "c"] {
        test_home.sh(&["--id", id], "true").good();
    }
    assert_eq!(test_home.ask(["rm", "a", "nothing", "b"]).code(), 125);
    assert_eq!(test_home.sql_one("SELECT COUNT(*) FROM analyses_v1"), 3);
    assert_eq!(test_home.ask(["rm"]).code(), 125);
    assert_eq!(
        test_home.ask(["rm", "a@1"]).code(),
        125,
        "an attempt is no analysis"
    );
    let document = test_home.ask_json(["rm", "a", "b", "a", "--json"]);
    assert_eq!(
        document["removed"].as_array().unwrap().len(),
        2,
        "{document}"
    );
    assert_eq!(test_home.sql("SELECT id FROM analyses_v1"), [[json!("c")]]);
}

/// Length, mode and modification time of every file below a directory, by path. The database's files and the lock files
/// are left out.
fn state_of(dir: &Path) -> BTreeMap<String, (u64, u32, i64)> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let (path, meta) = (entry.path(), entry.metadata().unwrap());
        let name = path.display().to_string();
        if meta.is_dir() {
            found.extend(state_of(&path));
        } else if !name.contains("/fumehood.db") && !name.ends_with("lock") {
            // Closing the database changes its file, because SQLite copies the log into it. The trials compare rows instead.
            found.insert(name, (meta.len(), meta.mode(), meta.mtime_nsec()));
        }
    }
    found
}

/// Starts a run and kills its runner while the program runs.
fn killed(test_home: &TestHome, id: &str) {
    let mut live = test_home.start([
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

trial!(Everyone, a_dry_run_changes_nothing);
fn a_dry_run_changes_nothing() {
    let test_home = TestHome::new();
    let fresh = TestHome::new();
    fresh.ask(["gc", "--dry-run"]).good();
    assert!(
        !fresh.home.join("fumehood.db").exists(),
        "not even an empty database"
    );
    test_home.sh(&["--id", "old"], "echo x > f").good();
    test_home
        .sh(&["--id", "kept", "--keep", "always"], "echo y > f")
        .good();
    killed(&test_home, "dead");
    // Make an object that no row names.
    let stray = test_home.write("stray", "nobody's");
    let hash = store::types::manifest::ContentHash::of(b"nobody's").to_string();
    let object = test_home.object(&hash);
    std::fs::create_dir_all(object.parent().unwrap()).unwrap();
    set_mode(object.parent().unwrap(), 0o700);
    std::fs::rename(stray, &object).unwrap();
    set_mode(&object, 0o444);
    let rows = || test_home.sql("SELECT * FROM attempts_v1");
    let before = (
        rows(),
        state_of(&test_home.home),
        state_of(&test_home.workspace_root),
    );
    let args = ["gc", "--dry-run", "--older-than", "0s", "--kept", "--json"];
    let would = test_home.ask_json(args);
    let said = test_home.ask(["gc", "-n", "--older-than", "0s", "--kept"]);
    assert_eq!(said.code(), 0);
    assert!(
        said.err().contains("would finish dead") && said.err().contains("would remove old"),
        "{}",
        said.err()
    );
    let after = (
        rows(),
        state_of(&test_home.home),
        state_of(&test_home.workspace_root),
    );
    assert_eq!(before, after);
    assert_eq!(would["finished"][0]["id"], "dead", "{would}");
    assert!(would["swept"]["objects"].as_u64().unwrap() >= 1, "{would}");
    // Without --dry-run, `gc` does what the dry run reported.
    let does = test_home.ask_json(["gc", "--older-than", "0s", "--kept", "--json"]);
    assert_eq!(does["finished"][0]["id"], "dead", "{does}");
    assert_eq!(
        test_home.sql_one("SELECT COUNT(*) FROM attempts_v1 WHERE id = 'old'"),
        0,
        "{does}"
    );
    assert!(!object.exists() && !test_home.workspace("kept").exists());
    test_home.assert_nothing_left();
}

trial!(Everyone, gc_removes_what_is_old);
fn gc_removes_what_is_old() {
    let test_home = TestHome::new();
    test_home.sh(&["--id", "fine"], "echo a > f").good();
    assert_eq!(
        test_home.sh(&["--id", "bad"], "echo b > f; exit 1").code(),
        1
    );
    killed(&test_home, "dead");
    // `gc` finishes the run of the dead runner and keeps its outputs. Nothing is old yet.
    let document = test_home.ask_json(["gc", "--older-than", "90d", "--json"]);
    assert_eq!(document["analyses"], json!([]));
    let row = test_home
        .sql("SELECT state, reason, complete, outputs_count FROM analyses_v1 WHERE id = 'dead'");
    assert_eq!(
        row,
        [[json!("error"), json!("runner_lost"), json!(0), json!(1)]]
    );
    assert_eq!(
        test_home.ask(["outputs", "dead", "f", "-o", "-"]).good(),
        "partial\n"
    );
    // Two milliseconds have passed on the database's clock by the time the command starts.
    test_home
        .ask(["gc", "--older-than", "1ms", "--status", "failed"])
        .good();
    let left: Vec<Vec<Value>> = test_home.sql("SELECT id FROM analyses_v1 ORDER BY id");
    assert_eq!(left, [[json!("dead")], [json!("fine")]]);
    assert_eq!(objects(&test_home), 2, "its object went with it");
    for wrong in [
        &["--status", "failed"][..],
        &["--older-than", "soon"],
        &["--older-than", "1d", "--status", "x"],
    ] {
        assert_eq!(test_home.gc(wrong).code(), 125, "{wrong:?}");
    }
    test_home.ask(["gc", "--older-than", "1ms"]).good();
    assert_eq!(test_home.sql_one("SELECT COUNT(*) FROM attempts_v1"), 0);
    assert_eq!(objects(&test_home), 0);
    test_home.ask(["verify"]).good();
}

trial!(Everyone, gc_spares_what_others_refer_to);
/// Two databases share an artifact store: `gc` for one does not remove objects that the other names.
fn gc_spares_what_others_refer_to() {
    let test_home = TestHome::new();
    let other = format!("sqlite:{}", test_home.path("person/other.db").display());
    test_home.sh(&["--id", "here"], "echo here > f").good();
    let document = test_home.sh_json(&["--db", &other, "--id", "there"], "echo there > f");
    let object = test_home.object(document["outputs"][0]["blake3"].as_str().unwrap());
    test_home.ask(["rm", "here"]).good();
    let said = test_home.gc(&[]);
    assert_eq!(said.code(), 0, "{}", said.err());
    assert!(
        object.exists() && said.err().contains("--forget-others"),
        "{}",
        said.err()
    );
    assert_eq!(
        test_home
            .ask(["outputs", "there", "f", "-o", "-", "--db", &other])
            .good(),
        "there\n"
    );
    test_home.gc(&["--forget-others"]).good();
    assert!(!object.exists(), "the control: on request it does");
}

trial!(Everyone, verify_finds_every_damage);
fn verify_finds_every_damage() {
    let test_home = TestHome::new();
    let script = "for i in sound short changed gone open; do echo $i > $i; done; printf 'x%.0s' 1 2 3 > more";
    let document = test_home.sh_json(&["--id", "v"], script);
    test_home.sh(&["--id", "w"], "echo gone > also").good();
    test_home.ask(["verify"]).good();
    let object = |path: &str| {
        let list = document["outputs"].as_array().unwrap();
        let output = list.iter().find(|o| o["path"] == path).unwrap();
        test_home.object(output["blake3"].as_str().unwrap())
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
    let ended = test_home.ask(["verify", "--json"]);
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
            .find(|d| test_home.object(d["blake3"].as_str().unwrap()) == name);
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
    // `verify` of one analysis only.
    assert_eq!(
        test_home.ask(["verify", "w", "--json"]).document()["damaged"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    let said = test_home.ask(["verify"]);
    assert_eq!(said.code(), 125);
    assert!(
        said.out().contains("missing") && said.err().contains("4 damaged"),
        "{}",
        said.err()
    );
    // A missing artifact store is not treated as an empty one.
    std::fs::rename(
        test_home.home.join("artifacts"),
        test_home.home.join("away"),
    )
    .unwrap();
    assert_eq!(test_home.ask(["verify"]).code(), 125);
}

trial!(Everyone, db_commands_report_migrate_and_export);
fn db_commands_report_migrate_and_export() {
    let test_home = TestHome::new();
    test_home
        .sh(
            &["--id", "d"],
            "echo x > f; ln -s x l; echo '{}' > result.json",
        )
        .good();
    let status = test_home.ask_json(["db", "status", "--json"]);
    assert_eq!(status["rows"]["outputs"], 2, "{status}");
    assert_eq!(status["states"], json!({"succeeded": 1}));
    assert_eq!(
        (&status["last_7_days_attempts"], &status["output_bytes"]),
        (&json!(1), &json!(5))
    );
    assert!(
        test_home
            .ask(["db", "status"])
            .good()
            .contains("1 succeeded")
    );
    test_home.ask(["db", "migrate"]).good();
    // Every row as JSON, readable by another program.
    let text = test_home.ask(["db", "export"]).good();
    let lines: Vec<Value> = text
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let of = |table: &str| lines.iter().filter(|l| l["table"] == table).count();
    assert_eq!(
        (of("analyses"), of("attempts"), of("outputs"), of("logs")),
        (1, 1, 2, 2)
    );
    let file = test_home.path("export");
    test_home
        .ask(["db", "export", "-o", file.to_str().unwrap()])
        .good();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o600);
    assert_eq!(
        test_home
            .ask(["db", "export", "-o", file.to_str().unwrap()])
            .code(),
        125,
        "it exists"
    );
    assert_eq!(
        test_home
            .home
            .join("fumehood.db")
            .metadata()
            .unwrap()
            .mode()
            & 0o7777,
        0o600
    );
    // Several runs and other commands can work at the same time.
    let lives: Vec<_> = (0..6)
        .map(|i| {
            let mut command = test_home.fumehood();
            match i % 2 {
                0 => command.args(["run", "--", "sh", "-c", "echo x > f"]),
                _ => command.args(["list", "--json"]),
            };
            RunningCommand::start(command)
        })
        .collect();
    for live in lives {
        live.finish().good();
    }
    assert_eq!(test_home.sql_one("SELECT COUNT(*) FROM analyses_v1"), 4);
}

trial!(Everyone, an_unsafe_database_is_refused);
fn an_unsafe_database_is_refused() {
    let test_home = TestHome::new();
    // A database of another program is neither used nor changed.
    let alien = test_home.write(
        "person/alien.db",
        "not a database at all, but long enough to be looked at. ".repeat(40),
    );
    let given = format!("sqlite:{}", alien.display());
    let ended = test_home.sh(&["--db", &given], "echo ran");
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
    let theirs = test_home.path("person/theirs.db");
    let made = std::process::Command::new("/usr/bin/python3")
        .args(["-c", "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('CREATE TABLE analyses (x)'); c.commit()"])
        .arg(&theirs)
        .status();
    assert!(made.unwrap().success());
    set_mode(&theirs, 0o600);
    let ended = test_home.sh(
        &["--db", &format!("sqlite:{}", theirs.display())],
        "echo ran",
    );
    assert_eq!(
        (ended.code(), ended.out().as_str()),
        (125, ""),
        "{}",
        ended.err()
    );
    // A database that other users can write is refused.
    let open = test_home.path("open");
    std::fs::create_dir(&open).unwrap();
    set_mode(&open, 0o777);
    let ended = test_home.sh(
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
    test_home
        .sh(
            &["--db", &format!("sqlite:{}/x.db", open.display())],
            "true",
        )
        .good();
    // A link is not followed, even to a database that is ours.
    std::os::unix::fs::symlink("x.db", open.join("l.db")).unwrap();
    assert_eq!(
        test_home
            .sh(
                &["--db", &format!("sqlite:{}/l.db", open.display())],
                "true"
            )
            .code(),
        125
    );
    for wrong in ["mysql://x", "sqlite:", "", "postgres"] {
        let mut command = test_home.run_command(["--db", wrong, "--", "true"]);
        command.env_remove("FUMEHOOD_DB");
        assert_eq!(finish(command).code(), 125, "{wrong:?}");
    }
}
