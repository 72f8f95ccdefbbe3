//! The output of a run, during and after it: live, bounded and escaped, with hints that are marked as guesses.

use std::io::Read;
use std::process::{Command, Stdio};

use serde_json::Value;
use testkit::command::{RunningCommand, finish};
use testkit::home::TestHome;
use testkit::program;
use testkit::trial;
use testkit::wait::eventually;

trial!(Everyone, output_arrives_while_the_program_runs);
fn output_arrives_while_the_program_runs() {
    let test_home = TestHome::new();
    let script = "echo out; echo err >&2; read go; echo more; printf unfinished";
    let mut command = test_home.run_command(["--stdin", "-", "--", "sh", "-c", script]);
    command.stdin(Stdio::piped());
    let mut live = RunningCommand::start(command);
    // The output arrives while the program still waits for input.
    live.wait_for("out");
    live.write("go\n");
    let ended = live.finish();
    assert_eq!(ended.good(), "out\nmore\nunfinished");
    assert!(ended.err().starts_with("err\n"), "{}", ended.err());
}

trial!(
    Everyone,
    json_output_is_one_document_whatever_the_program_prints
);
fn json_output_is_one_document_whatever_the_program_prints() {
    let test_home = TestHome::new();
    let script = "echo '{\"status\":\"succeeded\"}'; echo '[1,2]' >&2; printf '\\n\\n{'; exit 3";
    let document = test_home.sh_json(&[], script);
    assert_eq!(document["status"], "failed");
    assert_eq!(
        document["stdout"]["text"],
        "{\"status\":\"succeeded\"}\n\n\n{"
    );
    assert_eq!(document["stderr"]["text"], "[1,2]\n");
    // Fumehood's notices are in the document and not on stderr.
    let ended = test_home.sh(&["--json"], "true");
    assert_eq!(ended.err(), "");
}

trial!(Everyone, bytes_are_escaped_without_loss);
fn bytes_are_escaped_without_loss() {
    let test_home = TestHome::new();
    let all: String = (0..=255).map(|b| format!("\\{b:03o}")).collect();
    let document = test_home.sh_json(&[], &format!("printf '{all}'"));
    let text = document["stdout"]["text"].as_str().unwrap();
    assert_eq!(document["stdout"]["bytes"], 256);
    // ASCII is unchanged except NUL and the backslash. Every byte that is not UTF-8 is escaped.
    let ascii: String = (1..128u8)
        .map(char::from)
        .map(|c| {
            if c == '\\' {
                "\\\\".into()
            } else {
                c.to_string()
            }
        })
        .collect();
    let rest: String = (128..=255).map(|b| format!("\\x{b:02x}")).collect();
    assert_eq!(text, format!("\\x00{ascii}{rest}"));
    // The live output has the program's own bytes.
    let ended = test_home.sh(&["-q"], &format!("printf '{all}'"));
    assert_eq!(ended.stdout, (0..=255).collect::<Vec<u8>>());
}

trial!(Everyone, messages_of_fumehood_are_escaped_on_a_terminal);
fn messages_of_fumehood_are_escaped_on_a_terminal() {
    let test_home = TestHome::new();
    for args in [
        vec!["--", "\u{1b}[31mno-such"],
        vec!["\u{1b}]0;title\u{7}.py"],
        vec!["--input", "a\u{1b}[2Jb", "--", "true"],
        vec!["--id", "x\u{1b}[2J", "--", "true"],
        vec!["--timeout", "\u{1b}[2J", "--", "true"],
        vec!["--keep", "\u{1b}[2J", "--", "true"],
        vec!["--env", "\u{1b}[2J", "--", "true"],
        vec!["--project", "/\u{1b}[2J", "--", "true"],
        vec!["--runtime", "/\u{1b}[2J", "--", "true"],
        vec!["--\u{1b}[2J", "--", "true"],
    ] {
        let ended = test_home.run(&args);
        assert!(
            [125, 127].contains(&ended.code()),
            "{args:?}: {}",
            ended.err()
        );
        assert!(!ended.stderr.contains(&0x1b), "{args:?}: {:?}", ended.err());
    }
    // A hint quotes the program's output, so it must be escaped.
    let evil = test_home.write("project/e\u{1b}[2Jvil.csv", "");
    let script = format!(
        "echo \"cat: {}: No such file or directory\" >&2; exit 1",
        evil.display()
    );
    let ended = test_home.sh(&[], &script);
    let own: Vec<&str> = ended
        .err()
        .leak()
        .lines()
        .filter(|l| l.starts_with("fumehood:"))
        .collect();
    assert!(own.iter().all(|l| !l.contains('\u{1b}')), "{own:?}");
}

trial!(Everyone, quiet_prints_no_summary);
fn quiet_prints_no_summary() {
    let test_home = TestHome::new();
    let ended = test_home.sh(&["--quiet"], "echo out; exit 3");
    assert_eq!(
        (ended.code(), ended.out(), ended.err()),
        (3, "out\n".into(), String::new())
    );
    // Fumehood's own errors are printed even with -q.
    let ended = test_home.run(["-q", "--", "no-such-command"]);
    ended.refused(127, "no-such-command");
}

trial!(Everyone, the_summary_says_how_it_went);
fn the_summary_says_how_it_went() {
    let test_home = TestHome::new();
    let ended = test_home.sh(&["--id", "sum"], "exit 3");
    let err = ended.err();
    for word in [
        "sum failed with exit code 3",
        "CPU",
        "isolation full",
        "enforced:",
        "watched: ",
        "memory by",
    ] {
        assert!(err.contains(word), "{word}: {err}");
    }
    assert!(err.lines().all(|l| l.starts_with("fumehood: ")), "{err}");
    assert!(
        test_home
            .sh(&["--timeout", "200ms", "--grace", "0"], "sleep 60")
            .err()
            .contains("timed out (wall time)")
    );
}

const LONG: &str =
    "i=0; while [ $i -lt 5000 ]; do i=$((i+1)); echo line $i; done; echo end >&2; exit 6";

trial!(Everyone, the_middle_of_a_long_log_is_not_kept);
fn the_middle_of_a_long_log_is_not_kept() {
    let test_home = TestHome::new();
    let whole: String = (1..=5000).map(|i| format!("line {i}\n")).collect();
    let ended = test_home.sh(&["--log-limit", "4K"], LONG);
    assert_eq!(ended.code(), 6, "{}", ended.err());
    assert_eq!(
        ended.out(),
        whole,
        "what is kept has a limit; a pipe gets everything"
    );

    let document = test_home.sh_json(&["--log-limit", "4K"], LONG);
    let log = &document["stdout"];
    assert_eq!(
        (&log["bytes"], &log["truncated"]),
        (&Value::from(whole.len()), &Value::from(true))
    );
    assert!(log["text"].as_str().unwrap().len() < 4096 + 100);
    assert_eq!(document["stderr"]["truncated"], false);
    assert_eq!(document["exit_code"], 6);
    // Output that just fits is not cut.
    let fits = test_home
        .sh(
            &["--log-limit", "4K"],
            "head -c 4096 /dev/zero | tr '\\0' x",
        )
        .good();
    assert_eq!(fits, "x".repeat(4096));
}

trial!(
    Everyone,
    a_program_cannot_forge_the_note_about_dropped_output
);
/// Fumehood marks the gap with a text that no program can print.
fn a_program_cannot_forge_the_note_about_dropped_output() {
    let test_home = TestHome::new();
    let fake = "[fumehood: 5 bytes of stdout not shown]";
    let script = format!("echo '{fake}'; head -c 20000 /dev/zero | tr '\\0' x; echo '{fake}'");
    let document = test_home.sh_json(&["--log-limit", "4K"], &script);
    let text = document["stdout"]["text"].as_str().unwrap();
    let real: Vec<_> = text.match_indices("\\[fumehood: ").collect();
    // Fumehood doubles a backslash that the program prints, so a single backslash shows that the note is Fumehood's.
    assert_eq!(real.len(), 1);
    assert_eq!(text.matches("[fumehood: ").count(), 3);
}

/// Runs `fumehood`. Returns its exit code, its peak memory in KiB, and how many bytes it wrote to stdout.
fn peak_of(test_home: &TestHome, args: &[&str]) -> (i32, u64, usize) {
    let wrap = "import subprocess, sys, resource\n\
        p = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)\n\
        n = 0\n\
        while True:\n  b = p.stdout.read(65536)\n  if not b: break\n  n += len(b)\n\
        code = p.wait()\n\
        print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, n)";
    let mut command = test_home.with_environment(Command::new("/usr/bin/python3"));
    command
        .args(["-c", wrap])
        .arg(program::binary())
        .arg("run")
        .args(args);
    let out = finish(command).good();
    let mut numbers = out.split_whitespace();
    let mut next = || numbers.next().unwrap();
    (
        next().parse().unwrap(),
        next().parse().unwrap(),
        next().parse().unwrap(),
    )
}

#[track_caller]
fn assert_bounded(script: &str, code: i32, printed: usize) {
    let test_home = TestHome::new();
    let args = ["--log-limit", "1M", "--", "sh", "-c", script];
    let (got, peak_kib, shown) = peak_of(&test_home, &args);
    assert_eq!(got, code);
    assert!(peak_kib < 64 << 10, "{peak_kib} KiB");
    assert_eq!(shown, printed);
    test_home.assert_nothing_left();
}

trial!(Everyone, a_flood_costs_bounded_memory);
fn a_flood_costs_bounded_memory() {
    assert_bounded(
        "yes 'a line of output' | head -c 300M; exit 7",
        7,
        300 << 20,
    );
}

trial!(Everyone, an_endless_line_costs_bounded_memory);
fn an_endless_line_costs_bounded_memory() {
    assert_bounded(
        "head -c 100M /dev/zero | tr '\\0' x; head -c 30M /dev/zero >&2; exit 8",
        8,
        100 << 20,
    );
}

trial!(Everyone, a_closed_stdout_does_not_stop_the_program);
fn a_closed_stdout_does_not_stop_the_program() {
    let test_home = TestHome::new();
    let script = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); echo line $i; done; echo done > finished; \
        [ -e finished ] && exit 7";
    for also_stderr in [false, true] {
        let mut command = test_home.run_command(["--", "sh", "-c", script]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut first = [0; 7];
        child.stdout.take().unwrap().read_exact(&mut first).unwrap();
        assert_eq!(&first, b"line 1\n");
        let mut err = child.stderr.take();
        if also_stderr {
            drop(err.take());
        }
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(7), "{status}");
        if let Some(mut err) = err {
            let mut text = String::new();
            err.read_to_string(&mut text).unwrap();
            assert!(text.contains("exit code 7"), "{text}");
        }
        test_home.assert_nothing_left();
    }
    // The pipe has no reader from the start.
    let mut command = test_home.run_command(["--", "sh", "-c", "echo x; echo y >&2; exit 4"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command.stdout(writer.try_clone().unwrap()).stderr(writer);
    assert_eq!(command.status().unwrap().code(), Some(4));
    test_home.assert_nothing_left();
}

trial!(Everyone, an_unread_stdout_does_not_delay_the_deadline);
fn an_unread_stdout_does_not_delay_the_deadline() {
    let test_home = TestHome::new();
    let script = "while :; do echo a line that nobody reads; done";
    let mut command = test_home.run_command([
        "--timeout",
        "500ms",
        "--grace",
        "0",
        "--id",
        "slow",
        "--",
        "sh",
        "-c",
        script,
    ]);
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut child = command
        .stdout(writer)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(command);
    // Nothing is read until the program is dead and its workspace gone.
    eventually("the workspace is made", || {
        test_home.workspace("slow").exists()
    });
    eventually("the workspace is gone", || {
        !test_home.workspace("slow").exists()
    });
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(124));
    assert!(text.starts_with("a line that nobody reads\n"));
}

/// The text of the one hint of a kind.
#[track_caller]
fn hint<'a>(document: &'a Value, kind: &str) -> &'a str {
    let hints = document["hints"].as_array().unwrap();
    let found = hints.iter().find(|h| h["kind"] == kind);
    let text = found.unwrap_or_else(|| panic!("no {kind} in {hints:?}"))["text"]
        .as_str()
        .unwrap();
    assert!(text.starts_with("guess: "), "{text}");
    text
}

trial!(Everyone, a_hint_suggests_the_option_for_a_hidden_path);
fn a_hint_suggests_the_option_for_a_hidden_path() {
    let test_home = TestHome::new();
    let file = test_home.write("reference/table.csv", "table\n");
    let path = file.to_str().unwrap();
    let script = format!("cat {path}");
    let document = test_home.sh_json(&[], &script);
    assert_eq!(
        (document["status"].as_str(), document["reason"].as_str()),
        (Some("failed"), Some("exit"))
    );
    let text = hint(&document, "hidden_path");
    assert!(text.ends_with(&format!("--read {path}")), "{text}");
    let terminal = test_home.sh(&[], &script);
    assert!(
        terminal.err().contains(&format!("fumehood: guess: {path}")),
        "{}",
        terminal.err()
    );
    assert_eq!(test_home.sh(&["--read", path], &script).good(), "table\n");
    // A successful run has no hints.
    let fine = test_home.sh_json(&[], &format!("{script}; exit 0"));
    assert_eq!(fine["hints"], Value::Array(Vec::new()));
}

trial!(Everyone, a_hint_suggests_the_option_for_a_path_in_tmp);
/// The /tmp inside the sandbox is not the host's.
fn a_hint_suggests_the_option_for_a_path_in_tmp() {
    let test_home = TestHome::new();
    let there = tempfile::Builder::new()
        .prefix("fumehood-hint-")
        .tempfile_in("/tmp")
        .unwrap();
    let path = there.path().to_str().unwrap();
    let document = test_home.sh_json(&[], &format!("cat {path}"));
    assert!(hint(&document, "hidden_path").ends_with(&format!("--read {path}")));
}

trial!(Everyone, a_hint_suggests_the_option_for_a_project_file);
fn a_hint_suggests_the_option_for_a_project_file() {
    let test_home = TestHome::new();
    test_home.write("project/params/fit.yml", "params\n");
    let open = "print(open('params/fit.yml').read(), end='')";
    let ended = test_home.python(&["--json"], open);
    let document = ended.document();
    let text = hint(&document, "hidden_path");
    let (_, option) = text.split_once("--input ").unwrap();
    assert_eq!(
        test_home.python(&["--input", option], open).good(),
        "params\n"
    );
}

trial!(
    Everyone,
    hints_explain_a_missing_network_and_missing_modules
);
fn hints_explain_a_missing_network_and_missing_modules() {
    let test_home = TestHome::new();
    let fetch = "import urllib.request; urllib.request.urlopen('http://example.org/')";
    assert!(
        hint(&test_home.python(&["--json"], fetch).document(), "network")
            .contains("network is off")
    );
    let import = "import no_such_module_anywhere";
    let document = test_home.python(&["--json"], import).document();
    assert!(hint(&document, "module").contains("no_such_module_anywhere"));
    test_home.write("project/data/d", "d");
    let write = "open('data/x', 'w')";
    hint(
        &test_home.python(&["--json"], write).document(),
        "read_only",
    );
    let full = "open('/dev/shm/x', 'wb').write(bytes(1 << 30))";
    let document = test_home
        .python(
            &["--json", "--memory", "128M", "--allow-degraded", "memory"],
            full,
        )
        .document();
    assert_ne!(document["status"], "succeeded");
    assert!(
        !document["hints"].as_array().unwrap().is_empty(),
        "{document}"
    );
}

trial!(Everyone, hints_offer_no_secrets);
fn hints_offer_no_secrets() {
    let test_home = TestHome::new();
    let person = test_home.write("person/.ssh/id_rsa", "key");
    let secret = test_home.write("project/.env", "PASSWORD=x");
    for path in [
        "/etc/shadow",
        person.to_str().unwrap(),
        secret.to_str().unwrap(),
        "/root",
    ] {
        let script = format!("echo 'cat: {path}: No such file or directory' >&2; exit 1");
        let document = test_home.sh_json(&[], &script);
        let text = document["hints"].to_string();
        assert!(
            !text.contains("--read") && !text.contains("--input"),
            "{path}: {text}"
        );
    }
}

trial!(Everyone, timings_are_printed_on_request_only);
fn timings_are_printed_on_request_only() {
    let test_home = TestHome::new();
    let ended = test_home.sh(&["--timings", "--quiet"], "true");
    ended.good();
    let told = ended.err();
    for part in ["planned", "sandbox", "  mount /proc", "committed", "total"] {
        assert!(told.contains(&format!("fumehood: {part} ")), "{told}");
    }
    // Timings are printed only with --timings, and never on stdout.
    let quiet = test_home.sh(&["--quiet"], "true");
    assert_eq!((quiet.out(), quiet.err()), (String::new(), String::new()));
    let document = test_home.sh_json(&[], "true");
    let steps = document["timings"]["steps"].as_array().unwrap().clone();
    let sum: u64 = steps.iter().map(|step| step["us"].as_u64().unwrap()).sum();
    assert_eq!(document["timings"]["total_us"], sum, "{document}");
    assert!(steps.iter().any(|step| step["name"] == "committed"));
    // The record says how the run ended, and does not contain Fumehood's own timings.
    let id = document["id"].as_str().unwrap();
    let shown = test_home.ask_json(["show", id, "--json"]);
    assert!(shown.get("timings").is_none(), "{shown}");
}
