//! P13 through the real sandbox. Whatever a program leaves, the run ends. Fumehood collects the regular files within
//! the bounds, and lists every other file with the reason. A hostile name or content does nothing to a terminal, a
//! shell or the database.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStringExt;
use std::process::Command;

use serde_json::{Value, json};
use store::types::manifest::ContentHash;
use testkit::command::{FinishedCommand, RunningCommand, finish};
use testkit::home::TestHome;
use testkit::process::{names_in, status_number};
use testkit::wait::eventually;
use testkit::{is_root, program, trial};

/// Asserts that the bytes contain no control sequence.
#[track_caller]
pub fn assert_plain(what: &str, bytes: &[u8]) {
    let text = std::str::from_utf8(bytes).unwrap_or_else(|e| panic!("{what}: {e}"));
    let odd = |c: &char| (c.is_control() && !matches!(c, '\n' | '\t')) || *c == '\u{202e}';
    let found: Vec<char> = text.chars().filter(odd).collect();
    assert!(found.is_empty(), "{what}: {found:?} in {text:?}");
}

/// Asserts that every command that shows an analysis prints no control sequence.
fn assert_all_commands_print_plain(test_home: &TestHome, id: &str, run: &FinishedCommand) {
    assert_plain("run", &run.stderr);
    let asked: [&[&str]; 9] = [
        &["list"],
        &["list", "--json"],
        &["show", id],
        &["show", id, "--json"],
        &["outputs", id],
        &["outputs", id, "--json"],
        &["logs", id, "--json"],
        &["verify", id],
        &["db", "status"],
    ];
    for args in asked {
        let ended = test_home.ask(args);
        ended.good();
        assert_plain(&format!("{args:?}"), &ended.stdout);
        assert_plain(&format!("{args:?}"), &ended.stderr);
    }
}

fn counts(document: &Value) -> BTreeMap<String, u64> {
    let counts = document["collection"]["remark_counts"].as_object().unwrap();
    let count = |(k, v): (&String, &Value)| (k.clone(), v.as_u64().unwrap());
    counts.iter().map(count).collect()
}

fn paths(document: &Value) -> Vec<&str> {
    let outputs = document["outputs"].as_array().unwrap();
    outputs
        .iter()
        .map(|o| o["path"].as_str().unwrap())
        .collect()
}

fn remarks(document: &Value) -> Vec<(&str, &str)> {
    let remarks = document["collection"]["remarks"].as_array().unwrap();
    let mut found: Vec<(&str, &str)> = remarks
        .iter()
        .map(|r| (r["path"].as_str().unwrap(), r["remark"].as_str().unwrap()))
        .collect();
    found.sort();
    found
}

trial!(
    Everyone,
    outputs_that_are_not_regular_files_are_not_collected
);
fn outputs_that_are_not_regular_files_are_not_collected() {
    let test_home = TestHome::new();
    let script = "
import os, socket
open('good', 'w').write('good')
os.mkdir('sub')
open('sub/good', 'w').write('good, too')
os.symlink('/etc/passwd', 'passwd')
os.symlink('good', 'alias')
os.symlink('sub', 'subalias')
os.symlink('nowhere', 'sub/dangling')
os.mkfifo('pipe')
s = socket.socket(socket.AF_UNIX); s.bind('sock')
try: os.mknod('device', 0o020666, os.makedev(1, 3))
except OSError: print('no devices')
";
    let document = test_home
        .python(&["--json", "--id", "kinds"], script)
        .document();
    assert_eq!(document["status"], "succeeded", "{document}");
    assert_eq!(document["stdout"]["text"], "no devices\n");
    assert_eq!(paths(&document), ["good", "sub/good"]);
    let expected = [
        ("alias", "symlink"),
        ("passwd", "symlink"),
        ("pipe", "fifo"),
        ("sock", "socket"),
        ("sub/dangling", "symlink"),
        ("subalias", "symlink"),
    ];
    assert_eq!(remarks(&document), expected);
    assert_eq!(document["collection"]["refused"], 6);
    assert_eq!(
        document["collection"]["complete"], true,
        "no content was lost"
    );
    let shown = test_home.ask_json(["show", "kinds", "--json"]);
    assert_eq!(shown["remarks"].as_array().unwrap().len(), 6, "{shown}");
    assert_eq!(
        shown["remark_counts"],
        json!({"fifo": 1, "socket": 1, "symlink": 4})
    );
    let text = test_home.ask(["show", "kinds"]).good();
    assert!(
        text.contains("4 symlink") && text.contains("sub/dangling"),
        "{text}"
    );
    test_home.assert_nothing_left();
}

trial!(Everyone, links_bring_no_content_from_outside);
/// No link of any kind makes a file of the host, of the project, of another workspace or of the data an output.
fn links_bring_no_content_from_outside() {
    let test_home = TestHome::new();
    test_home.write("project/data/table.csv", "precious data\n");
    test_home.write("project/in.txt", "an input\n");
    test_home
        .sh(&["--id", "other", "--keep", "always"], "echo other > f")
        .good();
    let other = test_home.workspace("other");
    let script = format!(
        "import os
def act(f, *a):
    try: f(*a)
    except OSError as e: print(e.errno)
open('good', 'w').write('good')
os.link('good', 'twin')
act(os.link, 'data/table.csv', 'stolen')
act(os.link, '/etc/passwd', 'passwd')
act(os.link, {other:?} + '/f', 'foreign')
act(os.symlink, {other:?}, 'elsewhere')
act(os.symlink, '/proc/self/cwd', 'cwd')
act(os.symlink, 'data', 'more')
act(os.symlink, '..', 'up')
os.link('/tmp', 'tmpdir') if False else None
open('/tmp/hidden', 'w').write('hidden')
act(os.link, '/tmp/hidden', 'unhidden')
act(os.rename, 'in.txt', 'renamed')"
    );
    let document = test_home
        .python(&["--json", "--input", "in.txt"], &script)
        .document();
    assert_eq!(document["status"], "succeeded", "{document}");
    let stored: Vec<&str> = document["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|o| o["blake3"].as_str().unwrap())
        .collect();
    for foreign in [
        b"precious data\n".as_slice(),
        b"other\n",
        &std::fs::read("/etc/passwd").unwrap(),
    ] {
        assert!(
            !stored.contains(&ContentHash::of(foreign).to_string().as_str()),
            "{document}"
        );
    }
    let taken = paths(&document);
    assert!(
        taken.contains(&"good") && taken.contains(&"twin"),
        "{taken:?}"
    );
    assert!(
        taken
            .iter()
            .all(|p| ["good", "twin", "renamed", "unhidden"].contains(p)),
        "{taken:?}"
    );
    assert_eq!(counts(&document)["symlink"], 4, "{document}");
    assert_eq!(std::fs::read(other.join("f")).unwrap(), b"other\n");
    test_home.gc(&["--kept"]).good();
    test_home.assert_nothing_left();
}

/// Names that do harm if a terminal, a shell or a database interprets them.
fn hostile_names() -> Vec<Vec<u8>> {
    let mut names: Vec<Vec<u8>> = [
        b"new\nline".as_slice(),
        b"esc\x1b[31mred\x1b[0m",
        b"title\x1b]0;owned\x07",
        b"bell\x07back\x08return\r",
        b"\xff\xfe invalid \xc3\x28",
        b"c1 \xc2\x9b31m",
        "bidi \u{202e}txt.exe".as_bytes(),
        b"'; DROP TABLE analyses; --",
        b"\"; DROP VIEW outputs_v1; --",
        b"%s%n%x",
        b"$(touch owned)",
        b"`touch owned`",
        b"-rf",
        b"--output=x",
        b"back\\slash",
        b"\\x41",
        b" leading and trailing ",
        b"*",
        b"...",
        b"\x01\x02\x7f",
        b"{0} {id} \\[cut]",
    ]
    .iter()
    .map(|n| n.to_vec())
    .collect();
    names.push(vec![b'n'; 255]);
    names.push([[0xe4].as_slice(), &[b'l'; 254]].concat());
    names
}

trial!(Everyone, file_names_of_any_bytes_are_recorded);
fn file_names_of_any_bytes_are_recorded() {
    let test_home = TestHome::new();
    let list = hostile_names();
    let hex: Vec<String> = list
        .iter()
        .map(|n| n.iter().map(|b| format!("{b:02x}")).collect())
        .collect();
    test_home.write("project/names", hex.join("\n"));
    let script = "
for i, line in enumerate(open('names')):
    name = bytes.fromhex(line.strip())
    open(name, 'wb').write(b'content %d' % i)
import os
os.mkdir(b'dir\\x1b[2J\\n')
open(b'dir\\x1b[2J\\n/\\xff', 'w').write('below')
os.symlink('x', b'link\\x1b[5m\\n')
";
    let options = ["--id", "names", "--input", "names"];
    let run = test_home.python(&options, script);
    run.good();
    let rows =
        test_home.sql("SELECT path, path_text, blake3, CAST(content AS TEXT) FROM outputs_v1");
    assert_eq!(rows.len(), list.len() + 1, "{}", run.err());
    for (i, name) in list.iter().enumerate() {
        let row = rows.iter().find(|row| row[0] == hex[i].as_str());
        let row = row.unwrap_or_else(|| panic!("{name:?} did not arrive"));
        let content = format!("content {i}");
        assert_eq!(row[3], content.as_str());
        assert_eq!(row[2], ContentHash::of(content.as_bytes()).to_string());
        assert_plain(
            "path_text",
            row[1]
                .as_str()
                .unwrap()
                .replace(|c: char| c.is_control() || c == '\u{202e}', "")
                .as_bytes(),
        );
    }
    assert_all_commands_print_plain(&test_home, "names", &run);
    // `outputs` finds each file by the bytes of its name, and by the text that the lists show for the name.
    let listed = test_home.ask_json(["outputs", "names", "--json"]);
    let listed = listed["outputs"].as_array().unwrap();
    for entry in listed {
        let shown = entry["path"].as_str().unwrap();
        let got = test_home
            .ask(["outputs", "names", "-o", "-", "--", shown])
            .stdout;
        assert_eq!(
            ContentHash::of(&got).to_string(),
            entry["blake3"].as_str().unwrap(),
            "{shown}"
        );
    }
    let mut command = test_home.fumehood();
    command.args(["outputs", "names", "-o", "-", "--"]);
    command.arg(std::ffi::OsString::from_vec(list[4].clone()));
    assert_eq!(finish(command).good(), "content 4");
    exported_names(&test_home, &list);
    // The database is complete, and no shell executed a part of a name.
    assert_eq!(test_home.sql_one("SELECT COUNT(*) FROM analyses_v1"), 1);
    assert!(!test_home.path("project/owned").exists());
    assert_eq!(test_home.ask(["verify"]).code(), 0);
    test_home.assert_nothing_left();
}

/// Asserts that the files are exported under the same bytes, and that `sha256sum` accepts the printed hashes.
fn exported_names(test_home: &TestHome, list: &[Vec<u8>]) {
    let to = test_home.path("exported");
    let sums = test_home.ask(["outputs", "names", "--to", to.to_str().unwrap()]);
    assert_eq!(sums.code(), 0, "{}", sums.err());
    assert_plain("export", &sums.stderr);
    for (i, name) in list.iter().enumerate() {
        let path = to.join(std::ffi::OsString::from_vec(name.clone()));
        assert_eq!(
            std::fs::read(path).unwrap(),
            format!("content {i}").as_bytes()
        );
    }
    let file = test_home.path("sums");
    std::fs::write(&file, &sums.stdout).unwrap();
    let mut command = test_home.with_environment(Command::new("sha256sum"));
    command
        .args(["--strict", "--quiet", "-c"])
        .arg(&file)
        .current_dir(&to);
    finish(command).good();
    assert_eq!(names_in(&to).len(), list.len() + 1);
}

trial!(Everyone, outputs_with_closed_modes_are_collected);
fn outputs_with_closed_modes_are_collected() {
    let test_home = TestHome::new();
    let script = "
import os
os.makedirs('closed/inner')
for path in ['none', 'writeonly', 'closed/f', 'closed/inner/g', 'plain', 'exec']:
    open(path, 'w').write(path)
os.chmod('none', 0); os.chmod('writeonly', 0o222); os.chmod('exec', 0o755)
os.chmod('closed/f', 0)
os.chmod('closed/inner', 0); os.chmod('closed', 0)
os.chmod('.', 0)
";
    let document = test_home
        .python(&["--json", "--id", "modes"], script)
        .document();
    assert_eq!(document["status"], "succeeded", "{document}");
    let all = [
        "closed/f",
        "closed/inner/g",
        "exec",
        "none",
        "plain",
        "writeonly",
    ];
    assert_eq!(paths(&document), all, "{document}");
    assert_eq!(document["collection"]["complete"], true);
    // Root ignores file modes. For a plain user, Fumehood must override the modes, and reports that.
    if !is_root() {
        assert!(counts(&document)["mode_overridden"] >= 3, "{document}");
    }
    for path in all {
        assert_eq!(
            test_home.ask(["outputs", "modes", path, "-o", "-"]).good(),
            path
        );
    }
    test_home.assert_nothing_left();
    // A kept workspace with such modes is collected as well, and `gc` can remove it.
    test_home
        .python(&["--id", "kept", "--keep", "always"], script)
        .good();
    assert_eq!(
        test_home.sql_one("SELECT outputs_count FROM analyses_v1 WHERE id = 'kept'"),
        6
    );
    test_home.gc(&["--kept"]).good();
    test_home.assert_nothing_left();
}

trial!(Everyone, deep_and_long_trees_are_bounded);
fn deep_and_long_trees_are_bounded() {
    let test_home = TestHome::new();
    let script = "
import os
open('good', 'w').write('good')
top = os.getcwd()
for i in range(270):
    os.mkdir('d'); os.chdir('d')
    open('f', 'w').write(str(i))
os.chdir(top)
name = 'n' * 250
for i in range(30):
    os.mkdir(name); os.chdir(name)
    if i == 6: open('fits', 'w').write('fits')
open('long', 'w').write('long')
";
    let document = test_home.python(&["--json"], script).document();
    assert_eq!(document["status"], "succeeded", "{document}");
    // The default bound on depth is 32. Fumehood counts the deeper entries that it meets as `too_deep`.
    let found = paths(&document);
    assert!(found.contains(&"good"), "{found:?}");
    let depth = found.iter().map(|p| p.split('/').count()).max().unwrap();
    assert_eq!(depth, 32);
    assert_eq!(document["collection"]["complete"], false);
    let refused = counts(&document);
    assert!(refused["too_deep"] >= 1, "{refused:?}");
    let all = test_home
        .python(&["--json", "--max-depth", "256"], script)
        .document();
    let depth = paths(&all).iter().map(|p| p.split('/').count()).max();
    assert_eq!(depth, Some(256), "{}", all["status"]);
    let id = all["id"].as_str().unwrap();
    let longest = paths(&all)
        .iter()
        .copied()
        .max_by_key(|p| p.len())
        .unwrap()
        .to_owned();
    // A path within the bound on length is collected. A longer path is reported.
    assert!(longest.ends_with("/fits"), "{longest}");
    assert_eq!(longest.len(), 7 * 251 + 4);
    assert_eq!(
        test_home.ask(["outputs", id, &longest, "-o", "-"]).good(),
        "fits"
    );
    assert!(counts(&all)["name_too_long"] >= 1, "{}", all["collection"]);
    assert_eq!(all["collection"]["complete"], false);
    let to = test_home.path("out");
    let exported = test_home.ask_json(["outputs", id, "--json", "--to", to.to_str().unwrap()]);
    let exported = exported["outputs"].as_array().unwrap().len();
    assert_eq!(exported, paths(&all).len());
    test_home.assert_nothing_left();
}

trial!(Everyone, a_sparse_file_is_stored_sparsely);
fn a_sparse_file_is_stored_sparsely() {
    const BYTES: u64 = 5 << 30;
    let test_home = TestHome::new();
    let script = format!("truncate -s {BYTES} hole; printf end >> hole; echo small > small");
    let document = test_home.sh_json(&["--id", "sparse"], &script);
    assert_eq!(document["status"], "succeeded", "{document}");
    assert_eq!(paths(&document), ["hole", "small"]);
    let hole = &document["outputs"][0];
    assert_eq!(hole["bytes"], BYTES + 3);
    let object = test_home.object(hole["blake3"].as_str().unwrap());
    let meta = object.metadata().unwrap();
    let on_disk = std::os::unix::fs::MetadataExt::blocks(&meta) * 512;
    assert_eq!(meta.len(), BYTES + 3);
    assert!(on_disk < 1 << 20, "{on_disk} bytes on disk");
    // The bound on output bytes counts the file's length, not the space that it takes on disk.
    let bounded = test_home.sh_json(&["--max-output", "4G"], &script);
    assert_eq!(paths(&bounded), ["small"]);
    assert_eq!(bounded["collection"]["complete"], false, "{bounded}");
    test_home.assert_nothing_left();
}

const PEAK_KIB_MAX: u64 = 64 << 10;

/// A Python program that makes `count` empty files, a thousand in each directory, with two processes. Then it writes
/// the file `good`.
fn make_many_files(count: u32) -> String {
    format!(
        "import os
half = os.fork()
for d in range(0 if half else 1, {count} // 1000, 2):
    os.mkdir(str(d))
    at = os.open(str(d), os.O_RDONLY)
    for f in range(1000): os.close(os.open(str(f), os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=at))
    os.close(at)
if half:
    assert os.wait()[1] == 0
    open('good', 'w').write('good')"
    )
}

/// Runs a program that leaves `count` files. Returns the document, and the runner's peak memory, which the kernel
/// reports while the runner lives. The trial sees the final peak, because the runner prints the document before it
/// frees its memory, and printing takes longer than the time between two checks.
fn run_with_many_files(count: u32, more: &[&str]) -> (TestHome, Value, u64) {
    let test_home = TestHome::new();
    let script = make_many_files(count);
    let options = ["--json", "--id", "crowd", "--files", "3000000"];
    let program = ["--", "/usr/bin/python3", "-c", &script];
    let argv = options.iter().chain(more).chain(&program);
    // The output goes into a file, because the trial reads no pipe while it watches the peak.
    let mut command = test_home.with_environment(Command::new("sh"));
    command
        .args(["-c", "exec \"$0\" run \"$@\" > document"])
        .arg(program::binary())
        .args(argv);
    let mut live = RunningCommand::start(command);
    let mut peak = 0;
    eventually("the run ends", || {
        peak = status_number(live.pid(), "VmHWM").unwrap_or(0).max(peak);
        live.child.try_wait().unwrap().is_some()
    });
    live.finish();
    let document = std::fs::read(test_home.path("project/document")).unwrap();
    let document = serde_json::from_slice(&document).unwrap();
    (test_home, document, peak)
}

trial!(Everyone, many_files_cost_bounded_memory);
fn many_files_cost_bounded_memory() {
    // On disk, Fumehood collects as many outputs as the bound allows.
    let (test_home, document, peak) = run_with_many_files(2_000, &["--max-outputs", "900"]);
    assert_eq!(document["status"], "succeeded", "{}", document["message"]);
    let kept = document["outputs"].as_array().unwrap().len() as u64;
    assert_eq!(kept, 900);
    assert_eq!(counts(&document)["too_many"], 2_001 - kept);
    assert_eq!(document["collection"]["complete"], false);
    let listed = document["collection"]["remarks"].as_array().unwrap();
    assert_eq!(listed.len(), 1000);
    assert_eq!(test_home.sql_one("SELECT COUNT(*) FROM outputs_v1"), kept);
    assert_eq!(test_home.sql_one("SELECT COUNT(*) FROM remarks_v1"), 1000);
    assert!(peak > 0 && peak < PEAK_KIB_MAX, "{peak} KiB");
    test_home.assert_nothing_left();
    // In memory it costs little to make files, so the program makes more of them.
    let (test_home, document, peak) =
        run_with_many_files(100_000, &["--workspace", "memory", "--max-outputs", "3"]);
    assert_eq!(document["status"], "succeeded", "{}", document["message"]);
    assert_eq!(counts(&document)["too_many"], 99_998, "{document}");
    assert!(peak > 0 && peak < PEAK_KIB_MAX, "{peak} KiB");
    test_home.assert_nothing_left();
}

trial!(Root, two_million_files_cost_bounded_memory);
fn two_million_files_cost_bounded_memory() {
    let (test_home, document, peak) =
        run_with_many_files(2_000_000, &["--workspace", "memory", "--memory", "6G"]);
    assert_eq!(document["status"], "succeeded", "{}", document["message"]);
    let kept = document["outputs"].as_array().unwrap().len() as u64;
    assert_eq!(kept, 10_000);
    assert_eq!(counts(&document)["too_many"], 2_000_001 - kept);
    assert!(peak > 0 && peak < PEAK_KIB_MAX, "{peak} KiB");
    test_home.assert_nothing_left();
}

trial!(
    Everyone,
    a_thousand_refused_files_are_listed_and_the_rest_counted
);
fn a_thousand_refused_files_are_listed_and_the_rest_counted() {
    let test_home = TestHome::new();
    let script = "import os
for i in range(1500): os.symlink('x', 'l%d' % i)
for i in range(50): os.mkfifo('p%d' % i)
open('good', 'w').write('good')";
    let document = test_home
        .python(&["--json", "--id", "r"], script)
        .document();
    assert_eq!(paths(&document), ["good"]);
    assert_eq!(
        document["collection"]["remarks"].as_array().unwrap().len(),
        1000
    );
    assert_eq!(
        document["collection"]["remark_counts"],
        json!({"symlink": 1500, "fifo": 50})
    );
    assert_eq!(
        test_home.sql_one("SELECT refused_count FROM analyses_v1"),
        1550
    );
    assert_eq!(
        test_home.sql_one("SELECT SUM(count) FROM remark_counts_v1"),
        1550
    );
}

trial!(Everyone, an_invalid_result_is_stored_as_a_file_only);
fn an_invalid_result_is_stored_as_a_file_only() {
    let test_home = TestHome::new();
    let nested = |n: usize| format!("'[' * {n} + ']' * {n}");
    let cases = [
        ("nul", r#"'{"a": "x\\u0000y"}'"#.to_owned(), "u0000"),
        ("surrogate", r#"'{"a": "\\ud800"}'"#.to_owned(), "surrogate"),
        ("huge", "'{\"a\": 1e400000}'".to_owned(), "number"),
        ("deep", nested(100_000), "nested"),
        ("twice", r#"'{"a": 1, "a": 2}'"#.to_owned(), "twice"),
        ("large", "'\"' + 'x' * (5 << 20) + '\"'".to_owned(), "bytes"),
        ("empty", "''".to_owned(), "empty"),
        ("cut", "'{\"a\": '".to_owned(), "middle"),
        ("nan", "'{\"a\": NaN}'".to_owned(), "NaN"),
        ("binary", "'\\udcff\\udcfe'".to_owned(), "UTF-8"),
        ("digits", "'9' * 200000".to_owned(), "digits"),
    ];
    for (id, text, why) in &cases {
        let script = format!(
            "open('result.json', 'wb').write(({text}).encode('utf-8', 'surrogateescape'))\nopen('good', 'w').write('good')"
        );
        let ended = test_home.python(&["--id", id], &script);
        ended.good();
        let said = ended.err();
        let line = said
            .lines()
            .find(|l| l.contains("result.json is kept as a file only"));
        let line = line.unwrap_or_else(|| panic!("{id}: {said}"));
        assert!(line.contains(why), "{id}: {line}");
        let row = test_home.sql(&format!(
            "SELECT result, result_note, outputs_count, complete FROM analyses_v1 WHERE id = '{id}'"
        ));
        assert_eq!(row[0][0], Value::Null, "{id}");
        assert!(row[0][1].as_str().unwrap().contains(why), "{id}");
        assert_eq!(row[0][2..], [json!(2), json!(1)], "{id}");
        assert_eq!(
            test_home.ask(["outputs", id, "good", "-o", "-"]).good(),
            "good"
        );
        test_home.ask(["show", id]).good();
    }
    // A link or a directory named result.json is no result file.
    test_home
        .sh(&["--id", "link"], "ln -s /etc/passwd result.json")
        .good();
    test_home
        .sh(
            &["--id", "dir"],
            "mkdir result.json; echo 1 > result.json/x",
        )
        .good();
    test_home.sh(&["--id", "pipe"], "mkfifo result.json").good();
    for id in ["link", "dir", "pipe"] {
        let result =
            test_home.sql_one(&format!("SELECT result FROM analyses_v1 WHERE id = '{id}'"));
        assert_eq!(result, Value::Null, "{id}");
    }
    test_home
        .sh(&["--id", "fine"], "echo '{\"a\": 1}' > result.json")
        .good();
    assert_eq!(
        test_home.sql_one("SELECT result ->> 'a' FROM analyses_v1 WHERE id = 'fine'"),
        1,
        "the control"
    );
}

trial!(
    Everyone,
    a_daemon_cannot_change_outputs_after_the_program_ends
);
/// The daemon replaces files by links as fast as it can. Fumehood kills the daemon before it reads any output.
fn a_daemon_cannot_change_outputs_after_the_program_ends() {
    let test_home = TestHome::new();
    let script = "
import os, sys
open('good', 'w').write('good')
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        while True:
            open('t', 'w').write('target'); os.rename('t', 'swap')
            os.symlink('/etc/passwd', 't'); os.rename('t', 'swap')
    os._exit(0)
os.wait()
while not os.path.lexists('swap'): pass
";
    let passwd = ContentHash::of(&std::fs::read("/etc/passwd").unwrap()).to_string();
    for _ in 0..8 {
        let document = test_home.python(&["--json"], script).document();
        assert_eq!(document["status"], "succeeded", "{document}");
        assert!(paths(&document).contains(&"good"), "{document}");
        assert!(!document.to_string().contains(&passwd));
        let refused = counts(&document);
        assert!(refused.keys().all(|k| k == "symlink"), "{refused:?}");
    }
    test_home.ask(["verify"]).good();
    test_home.assert_nothing_left();
}

/// Runs `fumehood` with a pseudo-terminal as stdout, and returns the bytes that the terminal received.
fn on_terminal(test_home: &TestHome, args: &[&str]) -> Vec<u8> {
    let mut line = vec![program::binary().display().to_string()];
    line.extend(args.iter().map(|a| format!("'{a}'")));
    let mut command = test_home.with_environment(Command::new("script"));
    command.args(["-q", "-e", "-c", &line.join(" "), "/dev/null"]);
    let ended = finish(command);
    ended.stdout.into_iter().filter(|b| *b != b'\r').collect()
}

trial!(Everyone, logs_are_escaped_on_a_terminal);
fn logs_are_escaped_on_a_terminal() {
    let test_home = TestHome::new();
    let evil = "\\033]0;owned\\007\\033[2Jtext\\x9b31m\\u202e";
    test_home
        .sh(
            &["--id", "l"],
            &format!(
                "printf '{}'; printf '\\033[31merr\\n' >&2",
                evil.replace("\\x9b", "\\302\\233")
                    .replace("\\u202e", "\\342\\200\\256\\n")
            ),
        )
        .good();
    let piped = test_home.ask(["logs", "l"]);
    assert!(
        piped.stdout.contains(&0x1b),
        "a pipe gets the bytes as they are: the control"
    );
    assert_plain("terminal", &on_terminal(&test_home, &["logs", "l"]));
    // Colours pass, and Fumehood resets them at the end.
    assert_eq!(
        on_terminal(&test_home, &["logs", "l", "--stderr"]),
        b"\x1b[31merr\n\x1b[0m"
    );
    assert!(
        on_terminal(&test_home, &["logs", "l", "--raw"]).contains(&0x1b),
        "on request"
    );
    let json = test_home.ask(["logs", "l", "--json"]);
    assert_plain("json", &json.stdout);
    let document = json.document();
    assert!(
        document["logs"][0]["text"]
            .as_str()
            .unwrap()
            .contains("\u{1b}]0;owned"),
        "{document}"
    );
}

trial!(Everyone, a_result_is_escaped_on_a_terminal);
fn a_result_is_escaped_on_a_terminal() {
    let test_home = TestHome::new();
    let script = "import json
open('result.json', 'w').write(json.dumps({'\\x1b[31mkey': 'v\\x1b]0;x\\x07\\u202e', 'plain': '\\u009b'}, ensure_ascii=False).replace('\\\\u001b', '\\\\u001b'))
open('evil.txt', 'w').write('\\x1b[2J')";
    let run = test_home.python(&["--id", "r", "--env", "X=\u{1b}[31m"], script);
    run.good();
    assert_all_commands_print_plain(&test_home, "r", &run);
    let shown = on_terminal(&test_home, &["show", "r"]);
    assert_plain("show", &shown);
    // `outputs -o -` refuses to write a file with control sequences to a terminal.
    let refused = on_terminal(&test_home, &["outputs", "r", "evil.txt", "-o", "-"]);
    assert_plain("outputs -o -", &refused);
    assert!(
        String::from_utf8_lossy(&refused).contains("not written to a terminal"),
        "{refused:?}"
    );
    assert_eq!(
        test_home
            .ask(["outputs", "r", "evil.txt", "-o", "-"])
            .stdout,
        b"\x1b[2J"
    );
    // Error messages quote the caller's arguments, and escape them.
    for args in [
        ["show", "\u{1b}[31m"],
        ["outputs", "r@\u{1b}"],
        ["list", "--status=\u{1b}["],
        ["logs", "'; DROP TABLE analyses; --"],
    ] {
        let ended = test_home.ask(args);
        assert_eq!(ended.code(), 125, "{args:?}");
        assert_plain("an error", &ended.stderr);
    }
    assert_eq!(test_home.sql_one("SELECT COUNT(*) FROM analyses_v1"), 1);
}

trial!(Everyone, extended_attributes_are_not_stored);
fn extended_attributes_are_not_stored() {
    let test_home = TestHome::new();
    let script = "import os\nopen('f', 'w').write('x')\n\
        try: os.setxattr('f', 'security.selinux', b'A' * 100)\nexcept OSError as e: print(e)\n\
        try: os.setxattr('f', 'user.mine', b'A')\nexcept OSError as e: print(e)";
    test_home.python(&["--id", "x"], script).good();
    let hash = test_home.sql_one("SELECT blake3 FROM outputs_v1");
    let object = test_home.object(hash.as_str().unwrap());
    let mut command = Command::new("getfattr");
    let listed = command.args(["-m", "-", "--absolute-names"]).arg(&object);
    let listed = listed.output().unwrap();
    assert!(listed.status.success());
    assert_eq!(String::from_utf8_lossy(&listed.stdout), "");
}

trial!(
    Everyone,
    a_sparse_file_with_many_names_is_laid_out_as_one_file
);
fn a_sparse_file_with_many_names_is_laid_out_as_one_file() {
    let test_home = TestHome::new();
    let size = test_home.path("size");
    let script = format!(
        "#!/bin/sh\nls | wc -l > {0}.names\ndu -sk . | cut -f1 > {0}\n",
        size.display()
    );
    let step = test_home.write_program("step", script);
    test_home.write(
        "person/.config/fumehood/config.toml",
        format!("[post_process]\ncommand = [{step:?}]\n"),
    );
    let script = "truncate -s 200M f; for n in 1 2 3 4 5 6 7 8 9; do ln f f$n; done";
    test_home.sh(&["--id", "n"], script).good();
    let read = |path: String| -> u64 {
        let text = std::fs::read_to_string(path).unwrap();
        text.trim().parse().unwrap()
    };
    assert_eq!(read(format!("{}.names", size.display())), 10, "the control");
    assert!(read(size.display().to_string()) < 10_000, "KiB on disk");
}
