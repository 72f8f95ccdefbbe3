//! What may be typed, each option at least once, and what a run sees because of it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::lab::{Ended, Lab, Live, finish, set_mode};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    ("help_names_every_option", For::Everyone, help),
    (
        "a_word_that_is_nearly_a_command_brings_only_commands_to_mind",
        For::Everyone,
        nearly,
    ),
    (
        "the_default_of_pids_leaves_half_to_the_user",
        For::Everyone,
        pids_default,
    ),
    (
        "a_row_of_unknown_words_is_shown_and_hides_no_other",
        For::Everyone,
        unknown_words,
    ),
    ("scripts_run_by_their_ending", For::Everyone, by_ending),
    (
        "scripts_run_by_their_first_line",
        For::Everyone,
        by_first_line,
    ),
    (
        "arguments_after_the_script_are_its_own",
        For::Everyone,
        own_arguments,
    ),
    ("commands_run_as_given", For::Everyone, as_given),
    (
        "a_file_not_inside_is_mended_by_the_line",
        For::Everyone,
        mended,
    ),
    (
        "a_file_with_a_dot_is_mended_by_the_line",
        For::Everyone,
        mended_here,
    ),
    (
        "a_file_above_is_mended_by_the_line",
        For::Everyone,
        mended_above,
    ),
    ("input_copies_files_and_directories", For::Everyone, inputs),
    (
        "inputs_bring_nothing_else_along",
        For::Everyone,
        input_links,
    ),
    ("read_shows_a_path_here_or_there", For::Everyone, reads),
    ("what_read_names_is_executed", For::Everyone, reads_execute),
    (
        "read_refuses_what_must_stay_hidden",
        For::Everyone,
        reads_refused,
    ),
    ("siblings_come_if_asked_for", For::Everyone, siblings),
    ("env_sets_and_hands_on", For::Everyone, env),
    (
        "nothing_else_of_the_environment_is_there",
        For::Everyone,
        env_is_closed,
    ),
    ("stdin_is_empty_a_file_or_ours", For::Everyone, stdin),
    ("data_and_docs_are_shown_twice", For::Everyone, data),
    ("data_may_be_a_symlink", For::Everyone, data_symlink),
    ("data_may_lie_under_tmp", For::Everyone, data_under_tmp),
    (
        "data_may_lie_under_var_tmp",
        For::Everyone,
        data_under_var_tmp,
    ),
    ("data_may_lie_elsewhere", For::Everyone, data_elsewhere),
    ("data_of_roots_own_is_read", For::Everyone, closed_data),
    (
        "the_rest_of_the_project_is_absent",
        For::Everyone,
        project_absent,
    ),
    ("limits_reach_the_program", For::Everyone, limits),
    ("unfirm_limits_stop_the_run", For::Everyone, unfirm),
    ("variables_and_files_set_options", For::Everyone, places),
    ("the_project_is_where_we_say", For::Everyone, project),
];

fn help() {
    let lab = Lab::new();
    let text = lab.run(["--help"]).good();
    for option in [
        "--id",
        "--project",
        "--data",
        "--docs",
        "--read",
        "--input",
        "--runtime",
        "--env",
        "--stdin",
        "--timeout",
        "--cpu-time",
        "--idle-timeout",
        "--grace",
        "--memory",
        "--cpus",
        "--pids",
        "--open-files",
        "--disk",
        "--files",
        "--log-limit",
        "--workspace",
        "--workspace-root",
        "--keep",
        "--keep-for",
        "--isolation",
        "--allow-degraded",
        "--network",
        "--output",
        "--expect",
        "--max-output",
        "--max-output-file",
        "--max-outputs",
        "--max-depth",
        "--inline-max",
        "--to",
        "--force",
        "--db",
        "--artifacts",
        "--store-quota",
        "--free-reserve",
        "--secret-env",
        "--replace",
        "--in",
        "--json",
        "--quiet",
    ] {
        let named =
            |l: &str| l.trim_start().starts_with('-') && l.split([' ', ',']).any(|w| w == option);
        let line = text.lines().position(named);
        let line = line.unwrap_or_else(|| panic!("no {option} in {text}"));
        let paragraph = text.lines().skip(line).take_while(|l| !l.trim().is_empty());
        let paragraph: String = paragraph.collect();
        let switch = ["--json", "--quiet", "--force", "--replace"].contains(&option);
        let many = [
            "--read",
            "--input",
            "--env",
            "--allow-degraded",
            "--expect",
            "--secret-env",
        ]
        .contains(&option);
        assert!(
            paragraph.contains("[default:") || switch || many,
            "{option}: {paragraph}"
        );
    }
    let top = finish({
        let mut command = lab.fumehood();
        command.arg("--help");
        command
    });
    for code in [
        "120", "121", "122", "123", "124", "125", "126", "127", "128+n", "137",
    ] {
        assert!(top.good().contains(code), "{code}");
    }
}

fn nearly() {
    let lab = Lab::new();
    for (typed, meant) in [("ru", "run"), ("runer", "run"), ("submt", "submit")] {
        let mut command = lab.fumehood();
        command.arg(typed);
        let ended = finish(command);
        assert_eq!(ended.code(), 125);
        assert!(
            ended.err().contains(&format!("'{meant}'")),
            "{}",
            ended.err()
        );
        assert!(!ended.err().contains("__"), "{}", ended.err());
    }
}

fn by_ending() {
    let lab = Lab::new();
    lab.write("project/a.py", "import sys, os\nprint('py', sys.argv[1:], os.path.abspath(sys.argv[0]) == os.getcwd() + '/a.py')\n");
    lab.write(
        "project/a.sh",
        "echo sh \"$@\" [[ ${BASH_VERSION:+bash} ]]\n",
    );
    lab.write(
        "project/a.R",
        "cat('R', commandArgs(trailingOnly = TRUE), '\\n')\n",
    );
    lab.write("project/a.txt", "text");
    assert_eq!(
        lab.run(["a.py", "1", "two"]).good(),
        "py ['1', 'two'] True\n"
    );
    assert_eq!(
        lab.run(["a.sh", "1", "two"]).good(),
        "sh 1 two [[ bash ]]\n"
    );
    assert_eq!(lab.run(["a.R", "1", "two"]).good(), "R 1 two \n");
    lab.run(["a.txt"]).refused(125, "none of .py .R .sh .jl");
    lab.run(["missing.py"]).refused(125, "missing.py");
    lab.run(["."]).refused(125, "");
}

fn by_first_line() {
    let lab = Lab::new();
    // The line goes before the ending, and the file need not be executable.
    lab.write(
        "project/a.sh",
        "#!/usr/bin/env python3\nimport sys; print('py', sys.argv[1:])\n",
    );
    lab.write("project/tool", "#!/bin/sh -e\nfalse\necho not reached\n");
    lab.write(
        "project/sub/deep.py",
        "#!/usr/bin/python3 -u\nimport sys; print(sys.argv[0])\n",
    );
    lab.write("project/odd.py", "#!/nowhere/python3\n");
    assert_eq!(lab.run(["a.sh", "x"]).good(), "py ['x']\n");
    let failed = lab.run(["tool"]);
    assert_eq!((failed.code(), failed.out()), (1, String::new()));
    assert_eq!(lab.run(["sub/deep.py"]).good(), "deep.py\n");
    assert_eq!(
        lab.run([lab.path("project/sub/deep.py")]).good(),
        "deep.py\n"
    );
    lab.run(["odd.py"]).refused(127, "/nowhere/python3");
}

fn own_arguments() {
    let lab = Lab::new();
    lab.write("project/a.py", "import sys; print(sys.argv[1:])\n");
    let out = lab
        .run([
            "-q",
            "a.py",
            "--json",
            "--id",
            "../x",
            "--",
            "-h",
            "--timeout",
        ])
        .good();
    assert_eq!(out, "['--json', '--id', '../x', '--', '-h', '--timeout']\n");
}

fn as_given() {
    let lab = Lab::new();
    let out = lab
        .run(["--", "printf", "%s|", "a b", "", "$HOME", "*", "--json"])
        .good();
    assert_eq!(out, "a b||$HOME|*|--json|");
    use std::os::unix::ffi::OsStrExt;
    let odd = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    let ended = lab.run(["--".as_ref(), "printf".as_ref(), "%s".as_ref(), odd]);
    ended.good();
    assert_eq!(ended.stdout, b"\xff\xfe");
}

/// Reads the line that mends, as a user would, and types it before the command through a shell.
#[track_caller]
fn mend(lab: &Lab, options: &[&str], command: &[&str]) -> Ended {
    let first = lab.run(options.iter().chain(&["--"]).chain(command));
    first.refused(125, "exists here but will not inside");
    lab.assert_nothing_left();
    let err = first.err();
    let mut line = err
        .lines()
        .map(|l| l.trim_start_matches("fumehood: ").trim());
    let line = line.rfind(|l| l.starts_with("--input ") || l.starts_with("--read "));
    let line = line.unwrap_or_else(|| panic!("no line in {err}"));
    let mut again = lab.with_surroundings(Command::new("bash"));
    again
        .arg("-c")
        .arg(format!("exec \"$0\" run {line} -- \"$@\""))
        .arg(crate::plain_user::binary())
        .args(command);
    finish(again)
}

fn mended() {
    let lab = Lab::new();
    lab.write("project/notes.txt", "notes\n");
    lab.write("project/sub/deep.txt", "deep\n");
    lab.write("project/it's a file.txt", "spaces\n");
    let far = lab.write("far/away.txt", "far\n");
    let far = far.to_str().unwrap();
    for (arg, text) in [
        ("notes.txt", "notes\n"),
        ("sub/deep.txt", "deep\n"),
        ("it's a file.txt", "spaces\n"),
        (far, "far\n"),
    ] {
        assert_eq!(mend(&lab, &[], &["cat", arg]).good(), text, "{arg}");
    }
    assert_eq!(mend(&lab, &[], &["ls", "sub/"]).good(), "deep.txt\n");
    // What is shown anyway needs no mending.
    lab.write("project/data/d.txt", "data\n");
    for arg in ["data/d.txt", "/etc/hosts", "/usr/bin/env"] {
        lab.run(["--", "cat", arg]).good();
    }
}

fn mended_here() {
    let lab = Lab::new();
    lab.write("project/notes.txt", "notes\n");
    assert_eq!(mend(&lab, &[], &["cat", "./notes.txt"]).good(), "notes\n");
    lab.write("project/sub/deep.txt", "deep\n");
    assert_eq!(
        mend(&lab, &[], &["cat", "./sub/./deep.txt"]).good(),
        "deep\n"
    );
}

fn mended_above() {
    let lab = Lab::new();
    lab.write("up.txt", "up\n");
    assert_eq!(mend(&lab, &[], &["cat", "../up.txt"]).good(), "up\n");
}

fn inputs() {
    let lab = Lab::new();
    lab.write("project/one.csv", "1\n");
    set_mode(&lab.path("project/one.csv"), 0o640);
    lab.write_program("project/tools/run.sh", "#!/bin/sh\necho ran\n");
    lab.write("project/tools/deep/x.txt", "x\n");
    lab.write("with:colon", "colon\n");
    let colon = lab.path("with:colon").display().to_string();
    let far = lab.write("far.csv", "far\n").display().to_string();
    let renamed = format!("{far}:sub/renamed.csv");
    let options = [
        "--input",
        "one.csv",
        "--input",
        "one.csv:copy.csv",
        "--input",
        "tools",
        "--input",
        &renamed,
        "--input",
        &colon,
    ];
    let script = "find . -path './.*' -prune -o -type f -print | sort; ./tools/run.sh; cat copy.csv sub/renamed.csv; \
        echo more >> one.csv && cat one.csv";
    let out = lab.sh(&options, script).good();
    let files = "./copy.csv\n./one.csv\n./sub/renamed.csv\n./tools/deep/x.txt\n./tools/run.sh\n./with:colon\n";
    assert_eq!(out, format!("{files}ran\n1\nfar\n1\nmore\n"));
    // It was a copy.
    assert_eq!(std::fs::read(lab.path("project/one.csv")).unwrap(), b"1\n");
    for bad in [
        "one.csv:../out",
        "one.csv:/abs",
        "one.csv:",
        ":x",
        "one.csv:.",
    ] {
        let ended = lab.sh(&["--input", bad], "true");
        assert_eq!(ended.code(), 125, "{bad}: {}", ended.err());
    }
    // Two things of one name, or in the place of the data, are not mixed up silently.
    lab.write("project/data/d", "d");
    for pair in [
        ["one.csv:same", "tools:same"],
        ["one.csv:data", "one.csv:x"],
        ["one.csv", "tools:one.csv"],
    ] {
        let ended = lab.sh(&["--input", pair[0], "--input", pair[1]], "true");
        assert_eq!(ended.code(), 125, "{pair:?}: {}", ended.err());
    }
    let own = lab.write_program("project/mine", "#!/bin/sh\necho mine $1\n");
    assert_eq!(
        lab.run(["--input", "mine", "--", "./mine", "7"]).good(),
        "mine 7\n"
    );
    lab.run(["--".as_ref(), own.as_os_str()])
        .refused(125, "--input");
    lab.assert_nothing_left();
}

fn input_links() {
    let lab = Lab::new();
    let secret = lab.write("secret", "secret\n");
    lab.write("project/tree/file", "file\n");
    symlink(&secret, lab.path("project/tree/out")).unwrap();
    symlink("file", lab.path("project/tree/near")).unwrap();
    symlink("../../secret", lab.path("project/tree/climb")).unwrap();
    let out = lab.sh(
        &["--input", "tree"],
        "cat tree/file; cat tree/near; cat tree/out tree/climb",
    );
    assert!(!out.out().contains("secret"), "{}", out.out());
    assert!(
        out.out().starts_with("file\n") || out.code() == 125,
        "{}",
        out.err()
    );
    // A link named by the user is meant, as with cp.
    symlink(&secret, lab.path("project/named")).unwrap();
    assert_eq!(
        lab.sh(&["--input", "named"], "cat named").good(),
        "secret\n"
    );
}

fn reads() {
    let lab = Lab::new();
    let file = lab.write("ref/genome.fa", "ACGT\n");
    let dir = lab.path("ref").display().to_string();
    let cat = format!("cat {}", file.display());
    let control = lab.sh(&[], &cat);
    assert_eq!(control.code(), 1, "it is not visible without --read");
    assert_eq!(lab.sh(&["--read", &dir], &cat).good(), "ACGT\n");
    assert_eq!(
        lab.sh(&["--read", file.to_str().unwrap()], &cat).good(),
        "ACGT\n"
    );
    for (inside, path) in [
        ("/ref", "/ref/genome.fa"),
        ("/mnt/a/b", "/mnt/a/b/genome.fa"),
    ] {
        let both = format!("{dir}:{inside}");
        let script = format!("cat {path}; ! touch {inside}/x 2>&-; ! {cat} 2>&-");
        assert_eq!(lab.sh(&["--read", &both], &script).good(), "ACGT\n");
    }
    // By a relative path, and by a link: the place as written works as well as the real one.
    assert_eq!(lab.sh(&["--read", "../ref"], &cat).good(), "ACGT\n");
    let link = lab.path("link");
    symlink(&dir, &link).unwrap();
    let by_link = format!("cat {}/genome.fa; {cat}", link.display());
    assert_eq!(
        lab.sh(&["--read", link.to_str().unwrap()], &by_link).good(),
        "ACGT\nACGT\n"
    );
    assert!(!lab.path("ref/x").exists());
}

/// A tool or an environment may lie in a tree that is shown with --read; data and docs stay without.
fn reads_execute() {
    let lab = Lab::new();
    let libc = fs::read_to_string("/proc/self/maps").unwrap();
    let libc = libc.lines().find(|line| line.contains("/libc.so")).unwrap();
    let libm = Path::new(&libc[libc.find('/').unwrap()..]).with_file_name("libm.so.6");
    for top in ["opt", "project/data"] {
        let tool = lab.write(&format!("{top}/bin/tool"), "");
        fs::copy("/bin/echo", &tool).unwrap();
        fs::copy(&libm, tool.with_file_name("libown.so")).unwrap();
        set_mode(&tool, 0o755);
    }
    let script = |dir: &Path| {
        format!(
            "import ctypes, subprocess\n\
             print(subprocess.check_output(['{0}/bin/tool', 'ran']).decode().strip())\n\
             print(bool(ctypes.CDLL('{0}/bin/libown.so').cos))",
            dir.display()
        )
    };
    let (opt, data) = (lab.path("opt"), lab.path("project/data"));
    for level in ["full", "landlock"] {
        let shown = ["--level", level, "--read", opt.to_str().unwrap()];
        assert_eq!(lab.python(&shown, &script(&opt)).good(), "ran\nTrue\n");
        let tool = opt.join("bin/tool").display().to_string();
        let by_name = shown.iter().copied().chain(["--", "env", &tool, "named"]);
        assert_eq!(lab.run(by_name).good(), "named\n");
        let refused = lab.python(&["--level", level], &script(&data));
        assert!(
            refused.err().contains("Permission denied"),
            "{}",
            refused.err()
        );
        // Where the caller names the directory as well, both hold: it is data, and it is executed.
        let both = ["--level", level, "--read", data.to_str().unwrap()];
        assert_eq!(lab.python(&both, &script(&data)).good(), "ran\nTrue\n");
    }
    let mounts = "for line in open('/proc/self/mountinfo'):\n    if line.split()[4].endswith('/opt'): print(line.split()[5])";
    let flags = lab
        .python(&["--read", opt.to_str().unwrap()], mounts)
        .good();
    for flag in ["ro", "nosuid", "nodev"] {
        assert!(flags.trim().split(',').any(|f| f == flag), "{flags}");
    }
    assert!(!flags.contains("noexec"), "{flags}");
    // Landlock does not know of mapping.
    let load = "import ctypes; ctypes.CDLL('data/bin/libown.so')";
    let document = lab.python(&["--level", "full", "--json"], load).document();
    let hints = document["hints"].as_array().unwrap();
    assert!(
        hints.iter().any(|hint| hint["kind"] == "not_executable"),
        "{document}"
    );
    lab.assert_nothing_left();
}

fn reads_refused() {
    let lab = Lab::new();
    lab.sh(&[], "true").good();
    let home = lab.home.display().to_string();
    let root = lab.root.display().to_string();
    let above = lab.project.parent().unwrap().display().to_string();
    let dir = lab
        .write("ref/x", "x")
        .parent()
        .unwrap()
        .display()
        .to_string();
    let mut bad = vec![
        home,
        root,
        above,
        "/".into(),
        "/proc/self".into(),
        "/sys".into(),
        "/dev/shm".into(),
    ];
    for inside in [
        "/usr/lib", "/etc", "/", "/proc/x", "/dev/x", "relative", "/a/../b", "/tmp",
    ] {
        bad.push(format!("{dir}:{inside}"));
    }
    for read in bad {
        let ended = lab.sh(&["--read", &read], "true");
        assert_eq!(ended.code(), 125, "{read}: {}", ended.err());
    }
    lab.assert_nothing_left();
}

fn siblings() {
    let lab = Lab::new();
    let main = "import utils\nfrom lib import model\nprint(utils.X, model.Y)\n";
    lab.write("project/pkg/main.py", main);
    let utils = lab.write("project/pkg/utils.py", "X = 1\n");
    lab.write("project/pkg/lib/__init__.py", "");
    lab.write("project/pkg/lib/model.py", "import deeper\nY = deeper.Z\n");
    lab.write("project/pkg/deeper.py", "Z = 2\n");
    lab.write("project/pkg/unused.py", "");
    lab.write("project/main.py", "import api");
    lab.write("project/api.py", "");
    // Off unless asked for; the hint says what to do, and its line works.
    let document = lab.run(["--json", "pkg/main.py"]).document();
    let hint = document["hints"].to_string();
    assert!(
        hint.contains(&format!("--input {}", utils.display())),
        "{hint}"
    );
    assert!(
        hint.contains("--siblings") && !hint.contains("install"),
        "{hint}"
    );
    let input = utils.to_str().unwrap();
    let next = lab.run(["--input", input, "pkg/main.py"]);
    assert!(next.err().contains("'lib'"), "{}", next.err());
    for level in ["full", "landlock"] {
        let ended = lab.run(["--level", level, "--siblings", "pkg/main.py"]);
        assert_eq!(ended.good(), "1 2\n");
        for name in ["utils.py", "lib/__init__.py", "lib/model.py", "deeper.py"] {
            assert!(ended.err().contains(name), "{}", ended.err());
        }
        assert!(!ended.err().contains("unused.py"), "{}", ended.err());
    }
    // What is named as well comes once.
    let both = [
        "--siblings",
        "--input",
        "pkg/lib",
        "--input",
        "pkg/utils.py",
        "--input",
        "pkg/deeper.py",
        "pkg/main.py",
    ];
    assert_eq!(lab.run(both).good(), "1 2\n");
    // They are inputs, so what is left as it was is no output.
    let document = lab.run(["--json", "--siblings", "pkg/main.py"]).document();
    assert_eq!(document["outputs"], serde_json::json!([]), "{document}");
    lab.run(["--siblings", "main.py"])
        .refused(125, "below the project's root");
    lab.run(["--siblings", "--", "true"])
        .refused(125, "--siblings");
    lab.write("project/fumehood.toml", "siblings = true\n");
    lab.run(["pkg/main.py"]).refused(125, "--siblings");
    lab.assert_nothing_left();
}

fn env() {
    let lab = Lab::new();
    let script = "echo $SEED,$PASSED,$EMPTY-,$HOME,$TZ,$MPLBACKEND-";
    let options = [
        "--env",
        "SEED=7=8",
        "--env",
        "PASSED",
        "--env",
        "EMPTY=",
        "--env",
        "TZ=Asia/Tokyo",
    ];
    let mut command = lab.run_command(options.iter().chain(&["--", "sh", "-c", script]));
    command.env("PASSED", "on").env("SEED", "not this");
    assert_eq!(finish(command).good(), "7=8,on,-,/tmp/home,Asia/Tokyo,-\n");
    lab.sh(&["--env", "NOT_SET_HERE"], "true")
        .refused(125, "NOT_SET_HERE");
    for bad in ["1A=x", "=x", "A-B=x", "FUMEHOOD_ID=x", "FUMEHOOD_X=y"] {
        let ended = lab.sh(&["--env", bad], "true");
        assert_eq!(ended.code(), 125, "{bad}: {}", ended.err());
    }
}

fn env_is_closed() {
    let lab = Lab::new();
    let script = "cat /proc/*/environ | tr '\\0' '\\n'; env; cat /proc/*/cmdline";
    let mut command = lab.run_command(["--id", "closed", "--", "sh", "-c", script]);
    command
        .env("PGPASSWORD", "hush")
        .env("DATABASE_URL", "postgres://hush");
    let ended = finish(command);
    assert!(
        ended.out().contains("FUMEHOOD_ID=closed"),
        "{}",
        ended.out()
    );
    for word in [
        "hush",
        "PGPASSWORD",
        "DATABASE_URL",
        "FUMEHOOD_HOME",
        "FUMEHOOD_WORKSPACE_ROOT",
    ] {
        assert!(!ended.out().contains(word), "{word}: {}", ended.out());
    }
}

fn stdin() {
    let lab = Lab::new();
    lab.write("project/in.txt", "from a file\n");
    assert_eq!(lab.sh(&[], "cat; echo end").good(), "end\n");
    let script = "cat; readlink /proc/self/fd/0 | cut -d: -f1";
    assert_eq!(
        lab.sh(&["--stdin", "in.txt"], script).good(),
        "from a file\npipe\n"
    );
    let mut command =
        lab.run_command(["--stdin", "-", "--", "sh", "-c", "read a; echo got $a; cat"]);
    command.stdin(Stdio::piped());
    let mut live = Live::start(command);
    live.say("one\n");
    live.wait_for("got one");
    live.say("two\n");
    drop(live.child.stdin.take());
    assert_eq!(live.end().good(), "got one\ntwo\n");
    // Without --stdin ours is left alone, even if it is full.
    let mut command = lab.run_command(["--", "cat"]);
    command.stdin(Stdio::piped());
    let mut live = Live::start(command);
    live.say("not for the program\n");
    assert_eq!(live.end().good(), "");
    // A program that does not read, and a file larger than any pipe.
    let big = lab.write("project/big", vec![b'x'; 4 << 20]);
    let big = big.to_str().unwrap();
    lab.sh(&["--stdin", big], "true").good();
    assert_eq!(
        lab.sh(&["--stdin", big], "wc -c").good().trim(),
        (4 << 20).to_string()
    );
    lab.assert_nothing_left();
}

fn data() {
    let lab = Lab::new();
    let file = lab.write("project/data/sub/d.csv", "d\n");
    lab.write("project/docs/readme.md", "docs\n");
    let host = lab.project.display();
    let script = format!(
        "cat data/sub/d.csv {host}/data/sub/d.csv docs/readme.md {host}/docs/readme.md
        for d in data {host}/data docs; do touch $d/x || chmod 777 $d || mv $d/* $d/y || rm -rf $d/* || echo kept; done 2>&-
        ls {host}"
    );
    let out = lab.sh(&[], &script).good();
    assert_eq!(out, "d\nd\ndocs\ndocs\nkept\nkept\nkept\ndata\ndocs\n");
    assert_eq!(std::fs::read(&file).unwrap(), b"d\n");
    // The control: the same acts work where they are allowed.
    let control =
        "mkdir d; echo > d/f; touch d/x && chmod 777 d && mv d/f d/y && rm -rf d/* && echo done";
    assert_eq!(lab.sh(&[], control).good(), "done\n");
    // A project with neither is fine, and so is one where they are plain files.
    let bare = Lab::new();
    assert_eq!(bare.sh(&[], "ls").good(), "");
    bare.write("project/data", "a file");
    assert_eq!(bare.sh(&[], "ls").good(), "");
}

fn data_symlink() {
    let lab = Lab::new();
    lab.write("project/store/d.csv", "stored\n");
    symlink("store", lab.path("project/data")).unwrap();
    let script = format!(
        "cat data/d.csv {}/data/d.csv {}/d.csv",
        lab.project.display(),
        lab.path("project/store").display()
    );
    assert_eq!(lab.sh(&[], &script).good(), "stored\nstored\nstored\n");
    // A link inside that points out leads nowhere, unless --read shows its target.
    let out = lab.write("outside/o.csv", "outside\n");
    symlink(&out, lab.path("project/store/link.csv")).unwrap();
    assert_eq!(lab.sh(&[], "cat data/link.csv").code(), 1);
    let read = out.to_str().unwrap();
    assert_eq!(
        lab.sh(&["--read", read], "cat data/link.csv").good(),
        "outside\n"
    );
    // A dangling one is no data directory.
    std::fs::remove_file(lab.path("project/data")).unwrap();
    symlink("../nowhere", lab.path("project/data")).unwrap();
    assert_eq!(lab.sh(&[], "ls").good(), "");
}

/// Data that lies below `top`, by its host path and by its name.
fn data_below(top: &str) {
    let lab = Lab::new();
    let place = tempfile::Builder::new()
        .prefix("fumehood-data-")
        .tempdir_in(top)
        .unwrap();
    std::fs::write(place.path().join("d.csv"), "below\n").unwrap();
    let path = place.path().to_str().unwrap();
    let script = format!(
        "cat data/d.csv {path}/d.csv; ! touch {path}/x 2>&-; ls {top} | grep -c fumehood-data-; echo > /tmp/own"
    );
    for root in [lab.root.to_str().unwrap(), "/tmp"] {
        let options = ["--data", path, "--workspace-root", root];
        assert_eq!(
            lab.sh(&options, &script).good(),
            "below\nbelow\n1\n",
            "{root}"
        );
    }
    assert!(!Path::new("/tmp/own").exists());
}

fn data_under_tmp() {
    data_below("/tmp");
}

fn data_under_var_tmp() {
    data_below("/var/tmp");
}

fn data_elsewhere() {
    let lab = Lab::new();
    lab.write("project/data/d", "usual\n");
    lab.write("other/d", "other\n");
    lab.write("manual/d", "manual\n");
    let options = ["--data", "../other", "--docs", "../manual"];
    let script = format!(
        "cat data/d docs/d; ls {} 2>&- || echo absent",
        lab.project.display()
    );
    assert_eq!(lab.sh(&options, &script).good(), "other\nmanual\nabsent\n");
    let file = lab.write("file", "").display().to_string();
    lab.sh(&["--data", &file], "true")
        .refused(125, "is not a directory");
}

fn closed_data() {
    let lab = Lab::new();
    let file = lab.write("project/data/d", "closed\n");
    set_mode(&file, 0o600);
    set_mode(&lab.path("project/data"), 0o700);
    set_mode(&lab.project, 0o700);
    let script = "cat data/d; ! echo x > data/d; ! chmod 666 data/d";
    assert_eq!(lab.sh(&[], &format!("({script}) 2>&-")).good(), "closed\n");
    assert_eq!(std::fs::read(&file).unwrap(), b"closed\n");
}

fn project_absent() {
    let lab = Lab::new();
    for name in [
        "project/.env",
        "project/.git/config",
        "project/api.py",
        "project/site/x",
        "project/data/d",
    ] {
        lab.write(name, "x");
    }
    let script = format!(
        "ls -a {0}; ls -d {0}/.env {0}/.git {0}/api.py {0}/site 2>&- || true; ls -d data/../api.py 2>&- || true",
        lab.project.display()
    );
    assert_eq!(lab.sh(&[], &script).good(), ".\n..\ndata\n");
}

fn limits() {
    let lab = Lab::new();
    assert_eq!(lab.sh(&["--open-files", "64"], "ulimit -n").good(), "64\n");
    let two = lab
        .sh(&["--cpus", "1"], "nproc; echo $OMP_NUM_THREADS")
        .good();
    let threads: Vec<&str> = two.lines().collect();
    assert_eq!(threads[1], "1");
    let fork = "import os, time\nn = 0\ntry:\n  while n < 200:\n    if os.fork() == 0: time.sleep(60)\n    n += 1\nexcept OSError: pass\nprint(n < 20 and n > 4)";
    assert_eq!(
        lab.python(&["--pids", "20", "--grace", "0"], fork).good(),
        "True\n"
    );
    // The private /tmp counts as disk, and memory workspaces are full rather than watched.
    let fill = "head -c 64M /dev/zero > /tmp/f || echo full; rm -f /tmp/f";
    let memory = lab.sh(&["--workspace", "memory", "--disk", "4M"], fill);
    assert!(
        memory.out().contains("full"),
        "{} {}",
        memory.out(),
        memory.err()
    );
    lab.sh(&["--isolation", "full", "--network", "none"], "true")
        .good();
    let document = lab.sh_json(&["--isolation", "landlock"], "true");
    assert_eq!(
        document["isolation"]["level"], "full",
        "a floor is no ceiling"
    );
    lab.assert_nothing_left();
}

/// A limit asked for that cannot be held firmly stops the run, unless that was accepted by name.
fn unfirm() {
    let lab = Lab::new();
    let document = lab.sh_json(&["--memory", "256M", "--allow-degraded", "memory"], "true");
    let hardness = document["limits"]["memory"]["how_hard"]
        .as_str()
        .unwrap()
        .to_owned();
    let plain = lab.sh(&["--memory", "256M"], "true");
    match hardness.as_str() {
        "hard" => drop(plain.good()),
        _ => plain.refused(125, "--allow-degraded memory"),
    }
    // As a default it steps down, and the summary says so.
    assert!(lab.sh(&[], "true").err().contains("memory by"));
}

fn places() {
    let lab = Lab::new();
    let asked =
        |document: &serde_json::Value| document["limits"]["wall_time"]["asked"].as_u64().unwrap();
    assert_eq!(asked(&lab.sh_json(&[], "true")), 3_600_000);
    let config = lab.write("person/.config/fumehood/config.toml", "timeout = 50\n");
    assert_eq!(asked(&lab.sh_json(&[], "true")), 50_000);
    let file = lab.write(
        "project/fumehood.toml",
        "timeout = \"40s\"\nenv = [\"SEED=7\"]\n",
    );
    assert_eq!(asked(&lab.sh_json(&[], "true")), 40_000);
    assert_eq!(lab.sh(&[], "echo $SEED").good(), "7\n");
    let with_variable = |args: &[&str]| {
        let mut command = lab.run_command(["--json"].iter().chain(args).chain(&["--", "true"]));
        command.env("FUMEHOOD_TIMEOUT", "30");
        asked(&finish(command).document())
    };
    assert_eq!(with_variable(&[]), 30_000);
    assert_eq!(with_variable(&["--timeout", "20s"]), 20_000);

    let mut unknown = lab.run_command(["--", "true"]);
    unknown.env("FUMEHOOD_TIMEOT", "1");
    finish(unknown).refused(125, "FUMEHOOD_TIMEOUT");
    for (text, near) in [
        ("memroy = 1", "memory"),
        ("idle-timeout = 1", "idle_timeout"),
        ("log_limits = 5", "log_limit"),
    ] {
        std::fs::write(&file, text).unwrap();
        lab.sh(&[], "true")
            .refused(125, &format!("did you mean `{near}`"));
    }
    std::fs::write(&file, "").unwrap();
    std::fs::write(&config, "nonsense = 1").unwrap();
    lab.sh(&[], "true").refused(125, "nonsense");
    lab.assert_nothing_left();
}

fn project() {
    let lab = Lab::new();
    lab.write("project/data/d", "here\n");
    lab.write("elsewhere/keep", "");
    let project = lab.project.to_str().unwrap();
    let mut command = lab.run_command(["--project", project, "--", "cat", "data/d"]);
    command.current_dir(lab.path("elsewhere"));
    assert_eq!(finish(command).good(), "here\n");
    let mut command = lab.run_command(["--", "ls"]);
    command.current_dir(lab.path("elsewhere"));
    assert_eq!(finish(command).good(), "");
}

fn pids_default() {
    let lab = Lab::new();
    let pids = |limit: &str, option: &str| {
        let fumehood = crate::plain_user::binary();
        let script = format!(
            "ulimit -u {limit}; exec {} run --json --db none {option} -- true",
            fumehood.display()
        );
        let mut command = lab.with_surroundings(Command::new("bash"));
        command.args(["-c", &script]);
        let document = finish(command).document();
        document["limits"]["pids"]["asked"].as_u64().unwrap()
    };
    // The others are the processes of trials that run beside this one.
    let default = pids("1500", "");
    match crate::lab::is_root() {
        true => assert_eq!(default, 1024, "root shares no count with anybody"),
        false => assert!((8..=750).contains(&default), "{default}"),
    }
    // The controls: what is asked for stays, and a large limit is not looked into.
    assert_eq!(pids("1500", "--pids 900"), 900);
    assert_eq!(
        pids(
            "unlimited 2>/dev/null || ulimit -u $(ulimit -Hu)",
            "--pids 1024"
        ),
        1024
    );
}

fn unknown_words() {
    let lab = Lab::new();
    for id in ["a", "b"] {
        lab.sh(&["--id", id], "true").good();
    }
    let script = "import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
db.execute(\"UPDATE attempts SET post_process = 'by\\x1bgone', reason = 'unheard' WHERE id = 'a'\")
db.commit()";
    let written = Command::new("/usr/bin/python3")
        .args(["-c", script])
        .arg(lab.home.join("fumehood.db"))
        .status();
    assert!(written.unwrap().success());
    let listed = lab.ask(["list"]).good();
    assert!(
        listed.contains("post_process by") && listed.contains('b'),
        "{listed}"
    );
    assert!(!listed.contains('\x1b'));
    let listed = lab.ask_json(["list", "--json"]);
    let all = listed["analyses"].as_array().unwrap();
    assert_eq!(all.len(), 2, "{listed}");
    let a = all.iter().find(|one| one["id"] == "a").unwrap();
    assert_eq!(a["post_process"], "by\u{1b}gone");
    lab.ask(["top", "--once"]).good();
    lab.ask(["show", "a"]).good();
    lab.ask(["outputs", "b"]).good();
}
