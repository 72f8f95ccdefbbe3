//! P3 through the binary: a run uses the caller's runtime, wherever it is installed, and a directory that only claims to be a
//! runtime is not shown.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::command::{FinishedCommand, finish};
use testkit::home::{TestHome, set_mode};
use testkit::trial;

const WHERE: &str = "import sys; print(sys.prefix)";

fn python(prefix: &Path, version: &str) -> PathBuf {
    prefix.join("bin").join(format!("python{version}"))
}

/// The version of the system's Python, such as `3.11`.
fn version() -> String {
    let script = "import sys; print('%d.%d' % sys.version_info[:2], end='')";
    let output = Command::new("/usr/bin/python3")
        .args(["-I", "-c", script])
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Makes a separate Python installation at `prefix`: the system's interpreter and the part of its library that a start needs.
fn make_python(prefix: &Path) -> String {
    let version = version();
    let from = PathBuf::from(format!("/usr/lib/python{version}"));
    let to = prefix.join("lib").join(format!("python{version}"));
    std::fs::create_dir_all(&to).unwrap();
    std::fs::create_dir_all(prefix.join("bin")).unwrap();
    let program = python(prefix, &version);
    std::fs::copy(format!("/usr/bin/python{version}"), &program).unwrap();
    symlink(program.file_name().unwrap(), prefix.join("bin/python3")).unwrap();
    symlink("python3", prefix.join("bin/python")).unwrap();
    for name in [
        "encodings",
        "collections",
        "importlib",
        "json",
        "re",
        "lib-dynload",
    ] {
        let copied = Command::new("cp")
            .arg("-rL")
            .arg(from.join(name))
            .arg(&to)
            .status()
            .unwrap();
        assert!(copied.success(), "{name}");
    }
    for entry in std::fs::read_dir(&from).unwrap().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|e| e == "py")
            && !entry
                .file_name()
                .to_string_lossy()
                .starts_with("sitecustomize")
        {
            std::fs::copy(&path, to.join(entry.file_name())).unwrap();
        }
    }
    version
}

/// A venv as `python3 -m venv` makes it, with one package.
fn make_venv(prefix: &Path) {
    let made = Command::new("/usr/bin/python3")
        .args(["-m", "venv", "--without-pip"])
        .arg(prefix)
        .env_clear()
        .status()
        .unwrap();
    assert!(made.success());
    let packages = prefix.join(format!("lib/python{}/site-packages", version()));
    std::fs::write(packages.join("ours.py"), "answer = 42\n").unwrap();
}

/// A venv as uv makes it: absolute links straight to the base, and a pyvenv.cfg of its own form.
fn make_uv_venv(prefix: &Path, base: &Path, version: &str) {
    let packages = prefix.join(format!("lib/python{version}/site-packages"));
    std::fs::create_dir_all(&packages).unwrap();
    std::fs::create_dir_all(prefix.join("bin")).unwrap();
    symlink("lib", prefix.join("lib64")).unwrap();
    symlink(python(base, version), prefix.join("bin/python")).unwrap();
    symlink("python", prefix.join("bin/python3")).unwrap();
    let home = base.join("bin");
    let config = format!(
        "home = {}\nimplementation = CPython\nuv = 0.5.0\nversion_info = {version}.0\ninclude-system-site-packages = false\n",
        home.display()
    );
    std::fs::write(prefix.join("pyvenv.cfg"), config).unwrap();
    std::fs::write(prefix.join(".gitignore"), "*").unwrap();
    std::fs::write(prefix.join("CACHEDIR.TAG"), "").unwrap();
    std::fs::write(packages.join("ours.py"), "answer = 42\n").unwrap();
}

/// `fumehood run` with `bin` before PATH and other variables, as an activated shell has them.
fn activated(
    test_home: &TestHome,
    bin: &Path,
    variables: &[(&str, &Path)],
    args: &[&str],
) -> FinishedCommand {
    let mut command = test_home.run_command(args);
    command.env("PATH", format!("{}:/usr/bin:/bin", bin.display()));
    for (name, value) in variables {
        command.env(name, value);
    }
    finish(command)
}

/// Asserts that the program ran from this prefix, that one line reports it, and that the program could not write to it.
#[track_caller]
fn assert_from(ended: &FinishedCommand, prefix: &Path) {
    assert_eq!(ended.good().trim_end(), prefix.to_str().unwrap());
    let line = ended
        .err()
        .lines()
        .filter(|l| l.contains("runtime: "))
        .count();
    assert_eq!(line, 1, "{}", ended.err());
}

trial!(Everyone, a_venv_runs_with_its_packages);
fn a_venv_runs_with_its_packages() {
    let test_home = TestHome::new();
    let prefix = test_home.path("envs/paper");
    make_venv(&prefix);
    let variables = [("VIRTUAL_ENV", prefix.as_path())];
    let bin = prefix.join("bin");
    assert_from(
        &activated(
            &test_home,
            &bin,
            &variables,
            &["--", "python3", "-c", WHERE],
        ),
        &prefix,
    );
    let script = "import ours, os, shutil; print(ours.answer, os.environ['VIRTUAL_ENV'], shutil.which('python3'))";
    test_home.write("project/a.py", script);
    let out = activated(&test_home, &bin, &variables, &["a.py"]).good();
    assert_eq!(out, format!("42 {0} {0}/bin/python3\n", prefix.display()));
    // A shell script gets the active environment as well.
    let out = activated(
        &test_home,
        &bin,
        &variables,
        &[
            "--",
            "sh",
            "-c",
            "python3 -c 'import ours; print(ours.answer)'",
        ],
    );
    assert_eq!(out.good(), "42\n");
    // An interpreter that is named by its path need not be active.
    let direct = python(&prefix, "3");
    assert_from(
        &test_home.run(["--", direct.to_str().unwrap(), "-c", WHERE]),
        &prefix,
    );
    let write = format!("touch {}/x || echo read-only", prefix.display());
    assert_eq!(
        activated(&test_home, &bin, &variables, &["--", "sh", "-c", &write]).good(),
        "read-only\n"
    );
    // Control: without the environment the package is missing.
    assert_eq!(test_home.python(&[], "import ours").code(), 1);
}

trial!(Everyone, a_venv_in_the_project_runs);
fn a_venv_in_the_project_runs() {
    let test_home = TestHome::new();
    let prefix = test_home.path("project/.venv");
    make_venv(&prefix);
    test_home.write("project/.env", "SECRET");
    let variables = [("VIRTUAL_ENV", prefix.as_path())];
    let script = format!(
        "import ours, os; print(ours.answer, sorted(os.listdir({:?})))",
        test_home.project
    );
    let ended = activated(
        &test_home,
        &prefix.join("bin"),
        &variables,
        &["--", "python3", "-c", &script],
    );
    assert_eq!(ended.good(), "42 ['.venv']\n");
}

trial!(Everyone, a_uv_venv_runs_with_its_base);
fn a_uv_venv_runs_with_its_base() {
    let test_home = TestHome::new();
    let base = test_home.path("person/.local/share/uv/python/cpython-3-linux");
    let version = make_python(&base);
    let prefix = test_home.path("project/.venv");
    make_uv_venv(&prefix, &base, &version);
    let variables = [("VIRTUAL_ENV", prefix.as_path())];
    let script = "import sys, ours; print(sys.prefix, sys.base_prefix, ours.answer)";
    let ended = activated(
        &test_home,
        &prefix.join("bin"),
        &variables,
        &["--", "python", "-c", script],
    );
    assert_eq!(
        ended.good(),
        format!("{} {} 42\n", prefix.display(), base.display())
    );
    // No other file of the home is shown with the base installation.
    test_home.write("person/.local/share/secret", "SECRET");
    let look = format!(
        "import os; print(os.listdir({:?}))",
        test_home.path("person/.local/share")
    );
    let ended = activated(
        &test_home,
        &prefix.join("bin"),
        &variables,
        &["--", "python", "-c", &look],
    );
    assert_eq!(ended.good(), "['uv']\n");
}

trial!(Everyone, a_real_uv_venv_runs);
/// Runs only where a variable names the uv tool, which a plain host does not have.
fn a_real_uv_venv_runs() {
    let Some(uv) = std::env::var_os("FUMEHOOD_TEST_UV") else {
        return;
    };
    let test_home = TestHome::new();
    let prefix = test_home.path("project/.venv");
    let made = Command::new(uv)
        .args(["venv", "--offline", "--python", "/usr/bin/python3"])
        .arg(&prefix)
        .env("HOME", &test_home.user_home)
        .status()
        .unwrap();
    assert!(made.success());
    let variables = [("VIRTUAL_ENV", prefix.as_path())];
    assert_from(
        &activated(
            &test_home,
            &prefix.join("bin"),
            &variables,
            &["--", "python", "-c", WHERE],
        ),
        &prefix,
    );
}

trial!(Everyone, a_pyenv_shim_finds_its_version);
fn a_pyenv_shim_finds_its_version() {
    let test_home = TestHome::new();
    let root = test_home.path("person/.pyenv");
    let first = root.join("versions/3.11.1");
    make_python(&first);
    let second = root.join("versions/3.11.2");
    make_python(&second);
    test_home.write_program(
        "person/.pyenv/shims/python3",
        "#!/usr/bin/env bash\nexec pyenv exec python3 \"$@\"\n",
    );
    test_home.write("person/.pyenv/version", "3.11.1\n");
    let shims = root.join("shims");
    assert_from(
        &activated(&test_home, &shims, &[], &["--", "python3", "-c", WHERE]),
        &first,
    );
    let chosen = [("PYENV_VERSION", Path::new("3.11.2"))];
    assert_from(
        &activated(&test_home, &shims, &chosen, &["--", "python3", "-c", WHERE]),
        &second,
    );
    test_home.write("project/.python-version", "3.11.2\n");
    test_home.write("project/a.py", WHERE);
    assert_from(&activated(&test_home, &shims, &[], &["a.py"]), &second);
    test_home.write("project/.python-version", "9.9.9\n");
    activated(&test_home, &shims, &[], &["a.py"]).refused(125, "9.9.9");
    test_home.write("project/.python-version", "system\n");
    assert_eq!(
        activated(&test_home, &shims, &[], &["a.py"]).good(),
        "/usr\n"
    );
}

trial!(Everyone, a_conda_prefix_runs);
fn a_conda_prefix_runs() {
    let test_home = TestHome::new();
    let prefix = test_home.path("person/miniconda3/envs/paper");
    make_python(&prefix);
    std::fs::create_dir(prefix.join("conda-meta")).unwrap();
    test_home.write("person/miniconda3/envs/paper/share/table.txt", "shared\n");
    let variables = [("CONDA_PREFIX", prefix.as_path())];
    let ended = activated(
        &test_home,
        &prefix.join("bin"),
        &variables,
        &["--", "python", "-c", WHERE],
    );
    assert_from(&ended, &prefix);
    let script = "cat $CONDA_PREFIX/share/table.txt; python -c 'import sys; print(sys.prefix)'";
    let ended = activated(
        &test_home,
        &prefix.join("bin"),
        &variables,
        &["--", "sh", "-c", script],
    );
    assert_eq!(ended.good(), format!("shared\n{}\n", prefix.display()));
}

trial!(Everyone, r_has_the_users_library);
fn r_has_the_users_library() {
    let test_home = TestHome::new();
    // The part of a package that library() needs to list it, and that system.file() needs to find it.
    let library = test_home.path("person/R/library");
    test_home.write(
        "person/R/library/ours/DESCRIPTION",
        "Package: ours\nVersion: 1.2.3\nTitle: Ours\n",
    );
    let script = "cat(system.file(package = 'ours'), '\\n')";
    test_home.write("project/a.R", script);
    let mut command = test_home.run_command(["a.R"]);
    command.env("R_LIBS_USER", &library);
    assert_eq!(
        finish(command).good().trim(),
        library.join("ours").to_str().unwrap()
    );
    assert_eq!(
        test_home.run(["a.R"]).good().trim(),
        "",
        "the control: without it there is none"
    );
    let mut command = test_home.run_command(["a.R"]);
    command.env("R_LIBS", &library);
    assert_eq!(
        finish(command).good().trim(),
        library.join("ours").to_str().unwrap()
    );
    // A home directory is not accepted as a library.
    let mut command = test_home.run_command(["a.R"]);
    command.env("R_LIBS_USER", &test_home.user_home);
    finish(command).refused(125, "home directory");
}

trial!(Everyone, console_scripts_find_their_python);
fn console_scripts_find_their_python() {
    let test_home = TestHome::new();
    let prefix = test_home.path("envs/paper");
    make_venv(&prefix);
    let body = format!(
        "#!{}/bin/python3\nimport sys, ours; print(ours.answer, sys.argv[1:])\n",
        prefix.display()
    );
    test_home.write_program("envs/paper/bin/analyse", &body);
    let ended = activated(
        &test_home,
        &prefix.join("bin"),
        &[],
        &["--", "analyse", "x"],
    );
    assert_eq!(ended.good(), "42 ['x']\n");
    // A link to the script in another directory of programs works too, as pipx makes it.
    std::fs::create_dir_all(test_home.path("person/.local/bin")).unwrap();
    symlink(
        prefix.join("bin/analyse"),
        test_home.path("person/.local/bin/analyse"),
    )
    .unwrap();
    let ended = activated(
        &test_home,
        &test_home.path("person/.local/bin"),
        &[],
        &["--", "analyse", "y"],
    );
    assert_eq!(ended.good(), "42 ['y']\n");
    // With `env` in its first line, a script gets the interpreter on PATH.
    test_home.write_program(
        "envs/paper/bin/other",
        "#!/usr/bin/env python3\nimport ours; print(ours.answer)\n",
    );
    assert_eq!(
        activated(&test_home, &prefix.join("bin"), &[], &["--", "other"]).good(),
        "42\n"
    );
}

trial!(Everyone, an_environment_in_a_closed_directory_runs);
fn an_environment_in_a_closed_directory_runs() {
    let test_home = TestHome::new();
    let prefix = test_home.path("closed/deeper/env");
    std::fs::create_dir_all(prefix.parent().unwrap()).unwrap();
    make_venv(&prefix);
    for dir in ["closed", "closed/deeper"] {
        set_mode(&test_home.path(dir), 0o700);
    }
    test_home.write("closed/private", "SECRET");
    let script = format!(
        "import sys, os; print(sys.prefix, os.listdir({:?}))",
        test_home.path("closed")
    );
    let ended = activated(
        &test_home,
        &prefix.join("bin"),
        &[],
        &["--", "python3", "-c", &script],
    );
    assert_eq!(ended.good(), format!("{} ['deeper']\n", prefix.display()));
}

trial!(Everyone, the_runtime_option_selects_an_environment);
fn the_runtime_option_selects_an_environment() {
    let test_home = TestHome::new();
    let prefix = test_home.path("envs/paper");
    make_venv(&prefix);
    let runtime = prefix.to_str().unwrap();
    assert_from(
        &test_home.run(["--runtime", runtime, "--", "python3", "-c", WHERE]),
        &prefix,
    );
    test_home.write(
        "project/a.py",
        "#!/usr/bin/python3\nimport sys; print(sys.prefix)\n",
    );
    assert_from(&test_home.run(["--runtime", runtime, "a.py"]), &prefix);
    assert_from(
        &test_home.run(["--runtime", "../envs/paper", "a.py"]),
        &prefix,
    );
    // A prefix that has only programs is accepted if the caller names it.
    test_home.write_program("tools/bin/hello", "#!/bin/sh\necho hello\n");
    test_home.write("tools/lib/x", "");
    let tools = test_home.path("tools");
    assert_eq!(
        test_home
            .run(["--runtime", tools.to_str().unwrap(), "--", "hello"])
            .good(),
        "hello\n"
    );
    test_home
        .run([
            "--runtime",
            test_home.path("nowhere").to_str().unwrap(),
            "--",
            "true",
        ])
        .refused(125, "runtime");
    let mut command = test_home.run_command(["--", "python3", "-c", WHERE]);
    command.env("FUMEHOOD_RUNTIME", runtime);
    assert_from(&finish(command), &prefix);
}

trial!(Everyone, homes_and_projects_are_refused_as_runtimes);
fn homes_and_projects_are_refused_as_runtimes() {
    let test_home = TestHome::new();
    for name in ["person", "project"] {
        test_home.write_program(&format!("{name}/bin/tool"), "#!/bin/sh\necho ran\n");
        test_home.write(&format!("{name}/lib/x"), "");
    }
    test_home.write("person/.ssh/bin/tool", "");
    set_mode(&test_home.path("person/.ssh/bin/tool"), 0o755);
    let above = test_home.project.parent().unwrap().to_path_buf();
    let bad = [
        test_home.user_home.clone(),
        test_home.project.clone(),
        test_home.path("person/.ssh"),
        above,
        "/".into(),
        "/etc".into(),
        "/home".into(),
    ];
    for prefix in bad {
        let ended = test_home.run(["--runtime", prefix.to_str().unwrap(), "--", "tool"]);
        assert_eq!(ended.code(), 125, "{prefix:?}: {}", ended.err());
    }
    // A bin directory on PATH does not make the home around it visible.
    let ended = activated(
        &test_home,
        &test_home.path("person/bin"),
        &[],
        &[
            "--",
            "sh",
            "-c",
            "tool; ls -A ~ $0 2>&-",
            test_home.user_home.to_str().unwrap(),
        ],
    );
    assert!(!ended.out().contains(".ssh"), "{}", ended.out());
}

trial!(Everyone, a_venv_pointing_at_a_home_is_refused);
fn a_venv_pointing_at_a_home_is_refused() {
    let test_home = TestHome::new();
    test_home.write("person/.ssh/id_rsa", "SECRET");
    // A pyvenv.cfg in the project claims that the home is a Python installation.
    for home in [test_home.path("person/bin"), test_home.user_home.clone()] {
        let prefix = test_home.path("project/.venv");
        let _absent = std::fs::remove_dir_all(&prefix);
        std::fs::create_dir_all(prefix.join("bin")).unwrap();
        test_home.write_program("person/bin/python3", "#!/bin/sh\ncat ~/.ssh/id_rsa\n");
        symlink(
            test_home.path("person/bin/python3"),
            prefix.join("bin/python3"),
        )
        .unwrap();
        std::fs::write(
            prefix.join("pyvenv.cfg"),
            format!("home = {}\n", home.display()),
        )
        .unwrap();
        let variables = [("VIRTUAL_ENV", prefix.as_path())];
        let ended = activated(
            &test_home,
            &prefix.join("bin"),
            &variables,
            &["--", "python3", "-c", WHERE],
        );
        assert_eq!(ended.code(), 125, "{} {}", ended.out(), ended.err());
        assert!(!ended.out().contains("SECRET"));
    }
    // The environment's bin directory is a link to the directory of keys.
    let prefix = test_home.path("project/env2");
    std::fs::create_dir_all(&prefix).unwrap();
    set_mode(&test_home.path("person/.ssh/id_rsa"), 0o755);
    symlink(test_home.path("person/.ssh"), prefix.join("bin")).unwrap();
    std::fs::write(prefix.join("pyvenv.cfg"), "home = /usr/bin\n").unwrap();
    let program = prefix.join("bin/id_rsa");
    let ended = test_home.run(["--", program.to_str().unwrap()]);
    assert_ne!(ended.code(), 0);
    assert!(!ended.out().contains("SECRET"));
}

trial!(
    Everyone,
    another_python_than_the_active_one_is_used_only_with_a_notice
);
fn another_python_than_the_active_one_is_used_only_with_a_notice() {
    let test_home = TestHome::new();
    let prefix = test_home.path("envs/paper");
    make_venv(&prefix);
    // VIRTUAL_ENV names an environment that is not on PATH, as in a service's unit. Fumehood uses the environment.
    let variables = [("VIRTUAL_ENV", prefix.as_path())];
    let system = Path::new("/usr/bin");
    let ended = activated(
        &test_home,
        system,
        &variables,
        &["--", "python3", "-c", WHERE],
    );
    assert_from(&ended, &prefix);
    // The system's Python precedes the environment on PATH. Fumehood uses the system's Python, as the caller's shell
    // does, and prints a notice.
    let mut command = test_home.run_command(["--", "python3", "-c", WHERE]);
    command
        .env("VIRTUAL_ENV", &prefix)
        .env("PATH", format!("/usr/bin:{}/bin", prefix.display()));
    let ended = finish(command);
    assert_eq!(ended.good(), "/usr\n");
    assert!(
        ended.err().contains("not the active venv"),
        "{}",
        ended.err()
    );
    // A broken venv is skipped, as in the caller's shell, but with a notice.
    std::fs::remove_file(python(&prefix, "3")).unwrap();
    symlink("/nowhere/python3", python(&prefix, "3")).unwrap();
    let bin = prefix.join("bin");
    let ended = activated(
        &test_home,
        &bin,
        &variables,
        &["--", "python3", "-c", WHERE],
    );
    let told = ended.err().contains("not the active venv");
    assert!(ended.code() != 0 || told, "{}{}", ended.out(), ended.err());
}
