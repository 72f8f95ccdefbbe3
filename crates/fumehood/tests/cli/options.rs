//! The command line: each option at least once, and its effect on a run.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use testkit::command::{FinishedCommand, RunningCommand, finish};
use testkit::home::{TestHome, set_mode};
use testkit::program;
use testkit::{is_root, trial};

trial!(Everyone, help_names_every_option);
fn help_names_every_option() {
    let test_home = TestHome::new();
    let text = test_home.run(["--help"]).good();
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
        let mut command = test_home.fumehood();
        command.arg("--help");
        command
    });
    for code in [
        "120", "121", "122", "123", "124", "125", "126", "127", "128+n", "137",
    ] {
        assert!(top.good().contains(code), "{code}");
    }
}

trial!(Everyone, a_mistyped_command_suggests_only_visible_commands);
fn a_mistyped_command_suggests_only_visible_commands() {
    let test_home = TestHome::new();
    for (typed, meant) in [("ru", "run"), ("runer", "run"), ("submt", "submit")] {
        let mut command = test_home.fumehood();
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

trial!(Everyone, scripts_run_by_their_ending);
fn scripts_run_by_their_ending() {
    let test_home = TestHome::new();
    test_home.write("project/a.py", "import sys, os\nprint('py', sys.argv[1:], os.path.abspath(sys.argv[0]) == os.getcwd() + '/a.py')\n");
    test_home.write(
        "project/a.sh",
        "echo sh \"$@\" [[ ${BASH_VERSION:+bash} ]]\n",
    );
    test_home.write(
        "project/a.R",
        "cat('R', commandArgs(trailingOnly = TRUE), '\\n')\n",
    );
    test_home.write("project/a.txt", "text");
    assert_eq!(
        test_home.run(["a.py", "1", "two"]).good(),
        "py ['1', 'two'] True\n"
    );
    assert_eq!(
        test_home.run(["a.sh", "1", "two"]).good(),
        "sh 1 two [[ bash ]]\n"
    );
    assert_eq!(test_home.run(["a.R", "1", "two"]).good(), "R 1 two \n");
    test_home
        .run(["a.txt"])
        .refused(125, "none of .py .R .sh .jl");
    test_home.run(["missing.py"]).refused(125, "missing.py");
    test_home.run(["."]).refused(125, "");
}

trial!(Everyone, scripts_run_by_their_first_line);
fn scripts_run_by_their_first_line() {
    let test_home = TestHome::new();
    // A script's `#!` line takes precedence over the suffix of its name, and the file need not be executable.
    test_home.write(
        "project/a.sh",
        "#!/usr/bin/env python3\nimport sys; print('py', sys.argv[1:])\n",
    );
    test_home.write("project/tool", "#!/bin/sh -e\nfalse\necho not reached\n");
    test_home.write(
        "project/sub/deep.py",
        "#!/usr/bin/python3 -u\nimport sys; print(sys.argv[0])\n",
    );
    test_home.write("project/odd.py", "#!/nowhere/python3\n");
    assert_eq!(test_home.run(["a.sh", "x"]).good(), "py ['x']\n");
    let failed = test_home.run(["tool"]);
    assert_eq!((failed.code(), failed.out()), (1, String::new()));
    assert_eq!(test_home.run(["sub/deep.py"]).good(), "deep.py\n");
    assert_eq!(
        test_home
            .run([test_home.path("project/sub/deep.py")])
            .good(),
        "deep.py\n"
    );
    test_home.run(["odd.py"]).refused(127, "/nowhere/python3");
}

trial!(Everyone, arguments_after_the_script_go_to_the_script);
fn arguments_after_the_script_go_to_the_script() {
    let test_home = TestHome::new();
    test_home.write("project/a.py", "import sys; print(sys.argv[1:])\n");
    let out = test_home
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

trial!(Everyone, commands_run_as_given);
fn commands_run_as_given() {
    let test_home = TestHome::new();
    let out = test_home
        .run(["--", "printf", "%s|", "a b", "", "$HOME", "*", "--json"])
        .good();
    assert_eq!(out, "a b||$HOME|*|--json|");
    use std::os::unix::ffi::OsStrExt;
    let odd = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    let ended = test_home.run(["--".as_ref(), "printf".as_ref(), "%s".as_ref(), odd]);
    ended.good();
    assert_eq!(ended.stdout, b"\xff\xfe");
}

/// Takes the options that the error message suggests, and runs the command with them through a shell.
#[track_caller]
fn mend(test_home: &TestHome, options: &[&str], command: &[&str]) -> FinishedCommand {
    let first = test_home.run(options.iter().chain(&["--"]).chain(command));
    first.refused(125, "exists here but will not inside");
    test_home.assert_nothing_left();
    let err = first.err();
    let mut line = err
        .lines()
        .map(|l| l.trim_start_matches("fumehood: ").trim());
    let line = line.rfind(|l| l.starts_with("--input ") || l.starts_with("--read "));
    let line = line.unwrap_or_else(|| panic!("no line in {err}"));
    let mut again = test_home.with_environment(Command::new("bash"));
    again
        .arg("-c")
        .arg(format!("exec \"$0\" run {line} -- \"$@\""))
        .arg(program::binary())
        .args(command);
    finish(again)
}

trial!(Everyone, the_suggested_option_makes_a_missing_file_visible);
fn the_suggested_option_makes_a_missing_file_visible() {
    let test_home = TestHome::new();
    test_home.write("project/notes.txt", "notes\n");
    test_home.write("project/sub/deep.txt", "deep\n");
    test_home.write("project/it's a file.txt", "spaces\n");
    let far = test_home.write("far/away.txt", "far\n");
    let far = far.to_str().unwrap();
    for (arg, text) in [
        ("notes.txt", "notes\n"),
        ("sub/deep.txt", "deep\n"),
        ("it's a file.txt", "spaces\n"),
        (far, "far\n"),
    ] {
        assert_eq!(mend(&test_home, &[], &["cat", arg]).good(), text, "{arg}");
    }
    assert_eq!(mend(&test_home, &[], &["ls", "sub/"]).good(), "deep.txt\n");
    // A file that is shown anyway gets no suggestion.
    test_home.write("project/data/d.txt", "data\n");
    for arg in ["data/d.txt", "/etc/hosts", "/usr/bin/env"] {
        test_home.run(["--", "cat", arg]).good();
    }
}

trial!(Everyone, the_suggested_option_accepts_dot_components);
fn the_suggested_option_accepts_dot_components() {
    let test_home = TestHome::new();
    test_home.write("project/notes.txt", "notes\n");
    assert_eq!(
        mend(&test_home, &[], &["cat", "./notes.txt"]).good(),
        "notes\n"
    );
    test_home.write("project/sub/deep.txt", "deep\n");
    assert_eq!(
        mend(&test_home, &[], &["cat", "./sub/./deep.txt"]).good(),
        "deep\n"
    );
}

trial!(
    Everyone,
    the_suggested_option_shows_a_file_in_a_parent_directory
);
fn the_suggested_option_shows_a_file_in_a_parent_directory() {
    let test_home = TestHome::new();
    test_home.write("up.txt", "up\n");
    assert_eq!(mend(&test_home, &[], &["cat", "../up.txt"]).good(), "up\n");
}

trial!(Everyone, input_copies_files_and_directories);
fn input_copies_files_and_directories() {
    let test_home = TestHome::new();
    test_home.write("project/one.csv", "1\n");
    set_mode(&test_home.path("project/one.csv"), 0o640);
    test_home.write_program("project/tools/run.sh", "#!/bin/sh\necho ran\n");
    test_home.write("project/tools/deep/x.txt", "x\n");
    test_home.write("with:colon", "colon\n");
    let colon = test_home.path("with:colon").display().to_string();
    let far = test_home.write("far.csv", "far\n").display().to_string();
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
    let out = test_home.sh(&options, script).good();
    let files = "./copy.csv\n./one.csv\n./sub/renamed.csv\n./tools/deep/x.txt\n./tools/run.sh\n./with:colon\n";
    assert_eq!(out, format!("{files}ran\n1\nfar\n1\nmore\n"));
    // The program changed a copy.
    assert_eq!(
        std::fs::read(test_home.path("project/one.csv")).unwrap(),
        b"1\n"
    );
    for bad in [
        "one.csv:../out",
        "one.csv:/abs",
        "one.csv:",
        ":x",
        "one.csv:.",
    ] {
        let ended = test_home.sh(&["--input", bad], "true");
        assert_eq!(ended.code(), 125, "{bad}: {}", ended.err());
    }
    // Two inputs with one name, or one with the name of the data directory, are refused.
    test_home.write("project/data/d", "d");
    for pair in [
        ["one.csv:same", "tools:same"],
        ["one.csv:data", "one.csv:x"],
        ["one.csv", "tools:one.csv"],
    ] {
        let ended = test_home.sh(&["--input", pair[0], "--input", pair[1]], "true");
        assert_eq!(ended.code(), 125, "{pair:?}: {}", ended.err());
    }
    let own = test_home.write_program("project/mine", "#!/bin/sh\necho mine $1\n");
    assert_eq!(
        test_home
            .run(["--input", "mine", "--", "./mine", "7"])
            .good(),
        "mine 7\n"
    );
    test_home
        .run(["--".as_ref(), own.as_os_str()])
        .refused(125, "--input");
    test_home.assert_nothing_left();
}

trial!(
    Everyone,
    copying_an_input_directory_follows_no_symlink_out_of_it
);
fn copying_an_input_directory_follows_no_symlink_out_of_it() {
    let test_home = TestHome::new();
    let secret = test_home.write("secret", "secret\n");
    test_home.write("project/tree/file", "file\n");
    symlink(&secret, test_home.path("project/tree/out")).unwrap();
    symlink("file", test_home.path("project/tree/near")).unwrap();
    symlink("../../secret", test_home.path("project/tree/climb")).unwrap();
    let out = test_home.sh(
        &["--input", "tree"],
        "cat tree/file; cat tree/near; cat tree/out tree/climb",
    );
    assert!(!out.out().contains("secret"), "{}", out.out());
    assert!(
        out.out().starts_with("file\n") || out.code() == 125,
        "{}",
        out.err()
    );
    // A link that the user names is followed, as cp does.
    symlink(&secret, test_home.path("project/named")).unwrap();
    assert_eq!(
        test_home.sh(&["--input", "named"], "cat named").good(),
        "secret\n"
    );
}

trial!(Everyone, read_shows_a_path_at_its_own_or_another_path);
fn read_shows_a_path_at_its_own_or_another_path() {
    let test_home = TestHome::new();
    let file = test_home.write("ref/genome.fa", "ACGT\n");
    let dir = test_home.path("ref").display().to_string();
    let cat = format!("cat {}", file.display());
    let control = test_home.sh(&[], &cat);
    assert_eq!(control.code(), 1, "it is not visible without --read");
    assert_eq!(test_home.sh(&["--read", &dir], &cat).good(), "ACGT\n");
    assert_eq!(
        test_home
            .sh(&["--read", file.to_str().unwrap()], &cat)
            .good(),
        "ACGT\n"
    );
    for (inside, path) in [
        ("/ref", "/ref/genome.fa"),
        ("/mnt/a/b", "/mnt/a/b/genome.fa"),
    ] {
        let both = format!("{dir}:{inside}");
        let script = format!("cat {path}; ! touch {inside}/x 2>&-; ! {cat} 2>&-");
        assert_eq!(test_home.sh(&["--read", &both], &script).good(), "ACGT\n");
    }
    // A relative path and a link: the path as written and the real path both work inside.
    assert_eq!(test_home.sh(&["--read", "../ref"], &cat).good(), "ACGT\n");
    let link = test_home.path("link");
    symlink(&dir, &link).unwrap();
    let by_link = format!("cat {}/genome.fa; {cat}", link.display());
    assert_eq!(
        test_home
            .sh(&["--read", link.to_str().unwrap()], &by_link)
            .good(),
        "ACGT\nACGT\n"
    );
    assert!(!test_home.path("ref/x").exists());
}

trial!(Everyone, programs_in_a_tree_shown_by_read_can_be_executed);
/// Programs in a tree that --read shows can be executed. Those in data and docs cannot.
fn programs_in_a_tree_shown_by_read_can_be_executed() {
    let test_home = TestHome::new();
    let libc = fs::read_to_string("/proc/self/maps").unwrap();
    let libc = libc.lines().find(|line| line.contains("/libc.so")).unwrap();
    let libm = Path::new(&libc[libc.find('/').unwrap()..]).with_file_name("libm.so.6");
    for top in ["opt", "project/data"] {
        let tool = test_home.write(&format!("{top}/bin/tool"), "");
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
    let (opt, data) = (test_home.path("opt"), test_home.path("project/data"));
    for level in ["full", "landlock"] {
        let shown = ["--level", level, "--read", opt.to_str().unwrap()];
        assert_eq!(
            test_home.python(&shown, &script(&opt)).good(),
            "ran\nTrue\n"
        );
        let tool = opt.join("bin/tool").display().to_string();
        let by_name = shown.iter().copied().chain(["--", "env", &tool, "named"]);
        assert_eq!(test_home.run(by_name).good(), "named\n");
        let refused = test_home.python(&["--level", level], &script(&data));
        assert!(
            refused.err().contains("Permission denied"),
            "{}",
            refused.err()
        );
        // If the caller names the data directory with --read as well, its programs can be executed.
        let both = ["--level", level, "--read", data.to_str().unwrap()];
        assert_eq!(
            test_home.python(&both, &script(&data)).good(),
            "ran\nTrue\n"
        );
    }
    let mounts = "for line in open('/proc/self/mountinfo'):\n    if line.split()[4].endswith('/opt'): print(line.split()[5])";
    let flags = test_home
        .python(&["--read", opt.to_str().unwrap()], mounts)
        .good();
    for flag in ["ro", "nosuid", "nodev"] {
        assert!(flags.trim().split(',').any(|f| f == flag), "{flags}");
    }
    assert!(!flags.contains("noexec"), "{flags}");
    // Landlock does not restrict mapping a file as executable.
    let load = "import ctypes; ctypes.CDLL('data/bin/libown.so')";
    let document = test_home
        .python(&["--level", "full", "--json"], load)
        .document();
    let hints = document["hints"].as_array().unwrap();
    assert!(
        hints.iter().any(|hint| hint["kind"] == "not_executable"),
        "{document}"
    );
    test_home.assert_nothing_left();
}

trial!(Everyone, read_refuses_what_must_stay_hidden);
fn read_refuses_what_must_stay_hidden() {
    let test_home = TestHome::new();
    test_home.sh(&[], "true").good();
    let home = test_home.home.display().to_string();
    let root = test_home.workspace_root.display().to_string();
    let above = test_home.project.parent().unwrap().display().to_string();
    let dir = test_home
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
        let ended = test_home.sh(&["--read", &read], "true");
        assert_eq!(ended.code(), 125, "{read}: {}", ended.err());
    }
    test_home.assert_nothing_left();
}

trial!(Everyone, siblings_shows_the_modules_beside_the_script);
fn siblings_shows_the_modules_beside_the_script() {
    let test_home = TestHome::new();
    let main = "import utils\nfrom lib import model\nprint(utils.X, model.Y)\n";
    test_home.write("project/pkg/main.py", main);
    let utils = test_home.write("project/pkg/utils.py", "X = 1\n");
    test_home.write("project/pkg/lib/__init__.py", "");
    test_home.write("project/pkg/lib/model.py", "import deeper\nY = deeper.Z\n");
    test_home.write("project/pkg/deeper.py", "Z = 2\n");
    test_home.write("project/pkg/unused.py", "");
    test_home.write("project/main.py", "import api");
    test_home.write("project/api.py", "");
    // Siblings are not copied by default. The hint suggests the option, and the suggested line works.
    let document = test_home.run(["--json", "pkg/main.py"]).document();
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
    let next = test_home.run(["--input", input, "pkg/main.py"]);
    assert!(next.err().contains("'lib'"), "{}", next.err());
    for level in ["full", "landlock"] {
        let ended = test_home.run(["--level", level, "--siblings", "pkg/main.py"]);
        assert_eq!(ended.good(), "1 2\n");
        for name in ["utils.py", "lib/__init__.py", "lib/model.py", "deeper.py"] {
            assert!(ended.err().contains(name), "{}", ended.err());
        }
        assert!(!ended.err().contains("unused.py"), "{}", ended.err());
    }
    // A file that is also named explicitly is copied once.
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
    assert_eq!(test_home.run(both).good(), "1 2\n");
    // Siblings are inputs, so an unchanged one is no output.
    let document = test_home
        .run(["--json", "--siblings", "pkg/main.py"])
        .document();
    assert_eq!(document["outputs"], serde_json::json!([]), "{document}");
    test_home
        .run(["--siblings", "main.py"])
        .refused(125, "below the project's root");
    test_home
        .run(["--siblings", "--", "true"])
        .refused(125, "--siblings");
    test_home.write("project/fumehood.toml", "siblings = true\n");
    test_home.run(["pkg/main.py"]).refused(125, "--siblings");
    test_home.assert_nothing_left();
}

trial!(Everyone, env_sets_variables_and_passes_them_on);
fn env_sets_variables_and_passes_them_on() {
    let test_home = TestHome::new();
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
    let mut command = test_home.run_command(options.iter().chain(&["--", "sh", "-c", script]));
    command.env("PASSED", "on").env("SEED", "not this");
    assert_eq!(finish(command).good(), "7=8,on,-,/tmp/home,Asia/Tokyo,-\n");
    test_home
        .sh(&["--env", "NOT_SET_HERE"], "true")
        .refused(125, "NOT_SET_HERE");
    for bad in ["1A=x", "=x", "A-B=x", "FUMEHOOD_ID=x", "FUMEHOOD_X=y"] {
        let ended = test_home.sh(&["--env", bad], "true");
        assert_eq!(ended.code(), 125, "{bad}: {}", ended.err());
    }
}

trial!(Everyone, no_other_variable_is_in_the_environment);
fn no_other_variable_is_in_the_environment() {
    let test_home = TestHome::new();
    let script = "cat /proc/*/environ | tr '\\0' '\\n'; env; cat /proc/*/cmdline";
    let mut command = test_home.run_command(["--id", "closed", "--", "sh", "-c", script]);
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

trial!(Everyone, stdin_is_empty_by_default_a_file_or_the_callers);
fn stdin_is_empty_by_default_a_file_or_the_callers() {
    let test_home = TestHome::new();
    test_home.write("project/in.txt", "from a file\n");
    assert_eq!(test_home.sh(&[], "cat; echo end").good(), "end\n");
    let script = "cat; readlink /proc/self/fd/0 | cut -d: -f1";
    assert_eq!(
        test_home.sh(&["--stdin", "in.txt"], script).good(),
        "from a file\npipe\n"
    );
    let mut command =
        test_home.run_command(["--stdin", "-", "--", "sh", "-c", "read a; echo got $a; cat"]);
    command.stdin(Stdio::piped());
    let mut live = RunningCommand::start(command);
    live.write("one\n");
    live.wait_for("got one");
    live.write("two\n");
    drop(live.child.stdin.take());
    assert_eq!(live.finish().good(), "got one\ntwo\n");
    // Without --stdin nobody reads our standard input, even if it has data.
    let mut command = test_home.run_command(["--", "cat"]);
    command.stdin(Stdio::piped());
    let mut live = RunningCommand::start(command);
    live.write("not for the program\n");
    assert_eq!(live.finish().good(), "");
    // The runner ends if the program does not read its input, and it passes on an input larger than any pipe.
    let big = test_home.write("project/big", vec![b'x'; 4 << 20]);
    let big = big.to_str().unwrap();
    test_home.sh(&["--stdin", big], "true").good();
    assert_eq!(
        test_home.sh(&["--stdin", big], "wc -c").good().trim(),
        (4 << 20).to_string()
    );
    test_home.assert_nothing_left();
}

trial!(Everyone, data_and_docs_are_shown_twice);
fn data_and_docs_are_shown_twice() {
    let test_home = TestHome::new();
    let file = test_home.write("project/data/sub/d.csv", "d\n");
    test_home.write("project/docs/readme.md", "docs\n");
    let host = test_home.project.display();
    let script = format!(
        "cat data/sub/d.csv {host}/data/sub/d.csv docs/readme.md {host}/docs/readme.md
        for d in data {host}/data docs; do touch $d/x || chmod 777 $d || mv $d/* $d/y || rm -rf $d/* || echo kept; done 2>&-
        ls {host}"
    );
    let out = test_home.sh(&[], &script).good();
    assert_eq!(out, "d\nd\ndocs\ndocs\nkept\nkept\nkept\ndata\ndocs\n");
    assert_eq!(std::fs::read(&file).unwrap(), b"d\n");
    // Control: the same acts work where they are allowed.
    let control =
        "mkdir d; echo > d/f; touch d/x && chmod 777 d && mv d/f d/y && rm -rf d/* && echo done";
    assert_eq!(test_home.sh(&[], control).good(), "done\n");
    // A project may have neither directory, and may have plain files with these names.
    let bare = TestHome::new();
    assert_eq!(bare.sh(&[], "ls").good(), "");
    bare.write("project/data", "a file");
    assert_eq!(bare.sh(&[], "ls").good(), "");
}

trial!(Everyone, data_may_be_a_symlink);
fn data_may_be_a_symlink() {
    let test_home = TestHome::new();
    test_home.write("project/store/d.csv", "stored\n");
    symlink("store", test_home.path("project/data")).unwrap();
    let script = format!(
        "cat data/d.csv {}/data/d.csv {}/d.csv",
        test_home.project.display(),
        test_home.path("project/store").display()
    );
    assert_eq!(
        test_home.sh(&[], &script).good(),
        "stored\nstored\nstored\n"
    );
    // A link in data that points out of it is broken inside, unless --read shows its target.
    let out = test_home.write("outside/o.csv", "outside\n");
    symlink(&out, test_home.path("project/store/link.csv")).unwrap();
    assert_eq!(test_home.sh(&[], "cat data/link.csv").code(), 1);
    let read = out.to_str().unwrap();
    assert_eq!(
        test_home.sh(&["--read", read], "cat data/link.csv").good(),
        "outside\n"
    );
    // A dangling link is no data directory.
    std::fs::remove_file(test_home.path("project/data")).unwrap();
    symlink("../nowhere", test_home.path("project/data")).unwrap();
    assert_eq!(test_home.sh(&[], "ls").good(), "");
}

/// Reads data below `top` by its host path and by its name in the workspace.
fn data_below(top: &str) {
    let test_home = TestHome::new();
    let place = tempfile::Builder::new()
        .prefix("fumehood-data-")
        .tempdir_in(top)
        .unwrap();
    std::fs::write(place.path().join("d.csv"), "below\n").unwrap();
    let path = place.path().to_str().unwrap();
    let script = format!(
        "cat data/d.csv {path}/d.csv; ! touch {path}/x 2>&-; ls {top} | grep -c fumehood-data-; echo > /tmp/own"
    );
    for root in [test_home.workspace_root.to_str().unwrap(), "/tmp"] {
        let options = ["--data", path, "--workspace-root", root];
        assert_eq!(
            test_home.sh(&options, &script).good(),
            "below\nbelow\n1\n",
            "{root}"
        );
    }
    assert!(!Path::new("/tmp/own").exists());
}

trial!(Everyone, data_may_lie_under_tmp);
fn data_may_lie_under_tmp() {
    data_below("/tmp");
}

trial!(Everyone, data_may_lie_under_var_tmp);
fn data_may_lie_under_var_tmp() {
    data_below("/var/tmp");
}

trial!(Everyone, data_may_lie_elsewhere);
fn data_may_lie_elsewhere() {
    let test_home = TestHome::new();
    test_home.write("project/data/d", "usual\n");
    test_home.write("other/d", "other\n");
    test_home.write("manual/d", "manual\n");
    let options = ["--data", "../other", "--docs", "../manual"];
    let script = format!(
        "cat data/d docs/d; ls {} 2>&- || echo absent",
        test_home.project.display()
    );
    assert_eq!(
        test_home.sh(&options, &script).good(),
        "other\nmanual\nabsent\n"
    );
    let file = test_home.write("file", "").display().to_string();
    test_home
        .sh(&["--data", &file], "true")
        .refused(125, "is not a directory");
}

trial!(Everyone, data_that_only_its_owner_may_read_is_readable);
fn data_that_only_its_owner_may_read_is_readable() {
    let test_home = TestHome::new();
    let file = test_home.write("project/data/d", "closed\n");
    set_mode(&file, 0o600);
    set_mode(&test_home.path("project/data"), 0o700);
    set_mode(&test_home.project, 0o700);
    let script = "cat data/d; ! echo x > data/d; ! chmod 666 data/d";
    assert_eq!(
        test_home.sh(&[], &format!("({script}) 2>&-")).good(),
        "closed\n"
    );
    assert_eq!(std::fs::read(&file).unwrap(), b"closed\n");
}

trial!(
    Everyone,
    files_of_the_project_that_were_not_asked_for_are_absent
);
fn files_of_the_project_that_were_not_asked_for_are_absent() {
    let test_home = TestHome::new();
    for name in [
        "project/.env",
        "project/.git/config",
        "project/api.py",
        "project/site/x",
        "project/data/d",
    ] {
        test_home.write(name, "x");
    }
    let script = format!(
        "ls -a {0}; ls -d {0}/.env {0}/.git {0}/api.py {0}/site 2>&- || true; ls -d data/../api.py 2>&- || true",
        test_home.project.display()
    );
    assert_eq!(test_home.sh(&[], &script).good(), ".\n..\ndata\n");
}

trial!(Everyone, limits_reach_the_program);
fn limits_reach_the_program() {
    let test_home = TestHome::new();
    assert_eq!(
        test_home.sh(&["--open-files", "64"], "ulimit -n").good(),
        "64\n"
    );
    let two = test_home
        .sh(&["--cpus", "1"], "nproc; echo $OMP_NUM_THREADS")
        .good();
    let threads: Vec<&str> = two.lines().collect();
    assert_eq!(threads[1], "1");
    let fork = "import os, time\nn = 0\ntry:\n  while n < 200:\n    if os.fork() == 0: time.sleep(60)\n    n += 1\nexcept OSError: pass\nprint(n < 20 and n > 4)";
    assert_eq!(
        test_home
            .python(&["--pids", "20", "--grace", "0"], fork)
            .good(),
        "True\n"
    );
    // The private /tmp counts towards the disk limit. Fumehood does not watch a workspace in memory, because the file
    // system itself is full at the limit.
    let fill = "head -c 64M /dev/zero > /tmp/f || echo full; rm -f /tmp/f";
    let memory = test_home.sh(&["--workspace", "memory", "--disk", "4M"], fill);
    assert!(
        memory.out().contains("full"),
        "{} {}",
        memory.out(),
        memory.err()
    );
    test_home
        .sh(&["--isolation", "full", "--network", "none"], "true")
        .good();
    let document = test_home.sh_json(&["--isolation", "landlock"], "true");
    assert_eq!(
        document["isolation"]["level"], "full",
        "a floor is no ceiling"
    );
    test_home.assert_nothing_left();
}

trial!(
    Everyone,
    a_limit_that_cannot_be_enforced_firmly_stops_the_run
);
/// A requested limit that this host cannot enforce firmly stops the run, unless --allow-degraded names it.
fn a_limit_that_cannot_be_enforced_firmly_stops_the_run() {
    let test_home = TestHome::new();
    let document = test_home.sh_json(&["--memory", "256M", "--allow-degraded", "memory"], "true");
    let hardness = document["limits"]["memory"]["how_hard"]
        .as_str()
        .unwrap()
        .to_owned();
    let plain = test_home.sh(&["--memory", "256M"], "true");
    match hardness.as_str() {
        "hard" => drop(plain.good()),
        _ => plain.refused(125, "--allow-degraded memory"),
    }
    // A default limit is enforced as well as possible, and the summary says how.
    assert!(test_home.sh(&[], "true").err().contains("memory by"));
}

trial!(
    Everyone,
    environment_variables_and_settings_files_set_options
);
fn environment_variables_and_settings_files_set_options() {
    let test_home = TestHome::new();
    let asked =
        |document: &serde_json::Value| document["limits"]["wall_time"]["asked"].as_u64().unwrap();
    assert_eq!(asked(&test_home.sh_json(&[], "true")), 3_600_000);
    let config = test_home.write("person/.config/fumehood/config.toml", "timeout = 50\n");
    assert_eq!(asked(&test_home.sh_json(&[], "true")), 50_000);
    let file = test_home.write(
        "project/fumehood.toml",
        "timeout = \"40s\"\nenv = [\"SEED=7\"]\n",
    );
    assert_eq!(asked(&test_home.sh_json(&[], "true")), 40_000);
    assert_eq!(test_home.sh(&[], "echo $SEED").good(), "7\n");
    let with_variable = |args: &[&str]| {
        let mut command =
            test_home.run_command(["--json"].iter().chain(args).chain(&["--", "true"]));
        command.env("FUMEHOOD_TIMEOUT", "30");
        asked(&finish(command).document())
    };
    assert_eq!(with_variable(&[]), 30_000);
    assert_eq!(with_variable(&["--timeout", "20s"]), 20_000);

    let mut unknown = test_home.run_command(["--", "true"]);
    unknown.env("FUMEHOOD_TIMEOT", "1");
    finish(unknown).refused(125, "FUMEHOOD_TIMEOUT");
    for (text, near) in [
        ("memroy = 1", "memory"),
        ("idle-timeout = 1", "idle_timeout"),
        ("log_limits = 5", "log_limit"),
    ] {
        std::fs::write(&file, text).unwrap();
        test_home
            .sh(&[], "true")
            .refused(125, &format!("did you mean `{near}`"));
    }
    std::fs::write(&file, "").unwrap();
    std::fs::write(&config, "nonsense = 1").unwrap();
    test_home.sh(&[], "true").refused(125, "nonsense");
    test_home.assert_nothing_left();
}

trial!(Everyone, project_sets_the_project_directory);
fn project_sets_the_project_directory() {
    let test_home = TestHome::new();
    test_home.write("project/data/d", "here\n");
    test_home.write("elsewhere/keep", "");
    let project = test_home.project.to_str().unwrap();
    let mut command = test_home.run_command(["--project", project, "--", "cat", "data/d"]);
    command.current_dir(test_home.path("elsewhere"));
    assert_eq!(finish(command).good(), "here\n");
    let mut command = test_home.run_command(["--", "ls"]);
    command.current_dir(test_home.path("elsewhere"));
    assert_eq!(finish(command).good(), "");
}

trial!(Everyone, the_default_of_pids_leaves_half_to_the_user);
fn the_default_of_pids_leaves_half_to_the_user() {
    let test_home = TestHome::new();
    let pids = |limit: &str, option: &str| {
        let fumehood = program::binary();
        let script = format!(
            "ulimit -u {limit}; exec {} run --json --db none {option} -- true",
            fumehood.display()
        );
        let mut command = test_home.with_environment(Command::new("bash"));
        command.args(["-c", &script]);
        let document = finish(command).document();
        document["limits"]["pids"]["asked"].as_u64().unwrap()
    };
    // The default depends on the processes of other trials, which run at the same time.
    let default = pids("1500", "");
    match is_root() {
        true => assert_eq!(default, 1024, "root shares no count with anybody"),
        false => assert!((8..=750).contains(&default), "{default}"),
    }
    // Controls: a requested limit is kept, and a large system limit changes nothing.
    assert_eq!(pids("1500", "--pids 900"), 900);
    assert_eq!(
        pids(
            "unlimited 2>/dev/null || ulimit -u $(ulimit -Hu)",
            "--pids 1024"
        ),
        1024
    );
}

trial!(Everyone, a_row_of_unknown_words_is_shown_and_hides_no_other);
fn a_row_of_unknown_words_is_shown_and_hides_no_other() {
    let test_home = TestHome::new();
    for id in ["a", "b"] {
        test_home.sh(&["--id", id], "true").good();
    }
    let script = "import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
db.execute(\"UPDATE attempts SET post_process = 'by\\x1bgone', reason = 'unheard' WHERE id = 'a'\")
db.commit()";
    let written = Command::new("/usr/bin/python3")
        .args(["-c", script])
        .arg(test_home.home.join("fumehood.db"))
        .status();
    assert!(written.unwrap().success());
    let listed = test_home.ask(["list"]).good();
    assert!(
        listed.contains("post_process by") && listed.contains('b'),
        "{listed}"
    );
    assert!(!listed.contains('\x1b'));
    let listed = test_home.ask_json(["list", "--json"]);
    let all = listed["analyses"].as_array().unwrap();
    assert_eq!(all.len(), 2, "{listed}");
    let a = all.iter().find(|one| one["id"] == "a").unwrap();
    assert_eq!(a["post_process"], "by\u{1b}gone");
    test_home.ask(["top", "--once"]).good();
    test_home.ask(["show", "a"]).good();
    test_home.ask(["outputs", "b"]).good();
}
