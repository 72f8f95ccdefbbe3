//! P3 through the binary: the runtime that the caller has is the one that runs, wherever it lies, and nothing is
//! shown that only claims to be one.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::lab::{Ended, Lab, finish, set_mode};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    ("a_venv_runs_with_its_packages", For::Everyone, venv),
    ("a_venv_in_the_project_runs", For::Everyone, venv_in_project),
    ("a_uv_venv_runs_with_its_base", For::Everyone, uv),
    ("a_real_uv_venv_runs", For::Everyone, real_uv),
    ("a_pyenv_shim_finds_its_version", For::Everyone, pyenv),
    ("a_conda_prefix_runs", For::Everyone, conda),
    ("r_has_the_users_library", For::Everyone, r_library),
    (
        "console_scripts_find_their_python",
        For::Everyone,
        console_script,
    ),
    ("a_closed_prefix_runs", For::Everyone, closed_prefix),
    ("runtime_names_one", For::Everyone, named),
    ("homes_and_projects_are_refused", For::Everyone, refused),
    (
        "a_venv_pointing_at_a_home_is_refused",
        For::Everyone,
        forged,
    ),
    (
        "another_python_is_never_taken_silently",
        For::Everyone,
        passed_over,
    ),
];

const WHERE: &str = "import sys; print(sys.prefix)";

fn python(prefix: &Path, version: &str) -> PathBuf {
    prefix.join("bin").join(format!("python{version}"))
}

/// `3.11`, as the system's Python calls itself.
fn version() -> String {
    let script = "import sys; print('%d.%d' % sys.version_info[:2], end='')";
    let output = Command::new("/usr/bin/python3")
        .args(["-I", "-c", script])
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// A whole Python of its own at `prefix`: the system's interpreter and what of its library a start needs.
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
fn activated(lab: &Lab, bin: &Path, variables: &[(&str, &Path)], args: &[&str]) -> Ended {
    let mut command = lab.run_command(args);
    command.env("PATH", format!("{}:/usr/bin:/bin", bin.display()));
    for (name, value) in variables {
        command.env(name, value);
    }
    finish(command)
}

/// It ran from this prefix, said so in one line, and could not change it.
#[track_caller]
fn assert_from(ended: &Ended, prefix: &Path) {
    assert_eq!(ended.good().trim_end(), prefix.to_str().unwrap());
    let line = ended
        .err()
        .lines()
        .filter(|l| l.contains("runtime: "))
        .count();
    assert_eq!(line, 1, "{}", ended.err());
}

fn venv() {
    let lab = Lab::new();
    let prefix = lab.path("envs/paper");
    make_venv(&prefix);
    let variables = [("VIRTUAL_ENV", prefix.as_path())];
    let bin = prefix.join("bin");
    assert_from(
        &activated(&lab, &bin, &variables, &["--", "python3", "-c", WHERE]),
        &prefix,
    );
    let script = "import ours, os, shutil; print(ours.answer, os.environ['VIRTUAL_ENV'], shutil.which('python3'))";
    lab.write("project/a.py", script);
    let out = activated(&lab, &bin, &variables, &["a.py"]).good();
    assert_eq!(out, format!("42 {0} {0}/bin/python3\n", prefix.display()));
    // A shell script gets the active one as well.
    let out = activated(
        &lab,
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
    // By its path, without being active.
    let direct = python(&prefix, "3");
    assert_from(
        &lab.run(["--", direct.to_str().unwrap(), "-c", WHERE]),
        &prefix,
    );
    let write = format!("touch {}/x || echo read-only", prefix.display());
    assert_eq!(
        activated(&lab, &bin, &variables, &["--", "sh", "-c", &write]).good(),
        "read-only\n"
    );
    // The control: without it the package is not there.
    assert_eq!(lab.python(&[], "import ours").code(), 1);
}

fn venv_in_project() {
    let lab = Lab::new();
    let prefix = lab.path("project/.venv");
    make_venv(&prefix);
    lab.write("project/.env", "SECRET");
    let variables = [("VIRTUAL_ENV", prefix.as_path())];
    let script = format!(
        "import ours, os; print(ours.answer, sorted(os.listdir({:?})))",
        lab.project
    );
    let ended = activated(
        &lab,
        &prefix.join("bin"),
        &variables,
        &["--", "python3", "-c", &script],
    );
    assert_eq!(ended.good(), "42 ['.venv']\n");
}

fn uv() {
    let lab = Lab::new();
    let base = lab.path("person/.local/share/uv/python/cpython-3-linux");
    let version = make_python(&base);
    let prefix = lab.path("project/.venv");
    make_uv_venv(&prefix, &base, &version);
    let variables = [("VIRTUAL_ENV", prefix.as_path())];
    let script = "import sys, ours; print(sys.prefix, sys.base_prefix, ours.answer)";
    let ended = activated(
        &lab,
        &prefix.join("bin"),
        &variables,
        &["--", "python", "-c", script],
    );
    assert_eq!(
        ended.good(),
        format!("{} {} 42\n", prefix.display(), base.display())
    );
    // Nothing else of the home comes along with the base.
    lab.write("person/.local/share/secret", "SECRET");
    let look = format!(
        "import os; print(os.listdir({:?}))",
        lab.path("person/.local/share")
    );
    let ended = activated(
        &lab,
        &prefix.join("bin"),
        &variables,
        &["--", "python", "-c", &look],
    );
    assert_eq!(ended.good(), "['uv']\n");
}

/// With the tool itself where a variable names it; it is not part of a plain host.
fn real_uv() {
    let Some(uv) = std::env::var_os("FUMEHOOD_TEST_UV") else {
        return;
    };
    let lab = Lab::new();
    let prefix = lab.path("project/.venv");
    let made = Command::new(uv)
        .args(["venv", "--offline", "--python", "/usr/bin/python3"])
        .arg(&prefix)
        .env("HOME", &lab.person)
        .status()
        .unwrap();
    assert!(made.success());
    let variables = [("VIRTUAL_ENV", prefix.as_path())];
    assert_from(
        &activated(
            &lab,
            &prefix.join("bin"),
            &variables,
            &["--", "python", "-c", WHERE],
        ),
        &prefix,
    );
}

fn pyenv() {
    let lab = Lab::new();
    let root = lab.path("person/.pyenv");
    let first = root.join("versions/3.11.1");
    make_python(&first);
    let second = root.join("versions/3.11.2");
    make_python(&second);
    lab.write_program(
        "person/.pyenv/shims/python3",
        "#!/usr/bin/env bash\nexec pyenv exec python3 \"$@\"\n",
    );
    lab.write("person/.pyenv/version", "3.11.1\n");
    let shims = root.join("shims");
    assert_from(
        &activated(&lab, &shims, &[], &["--", "python3", "-c", WHERE]),
        &first,
    );
    let chosen = [("PYENV_VERSION", Path::new("3.11.2"))];
    assert_from(
        &activated(&lab, &shims, &chosen, &["--", "python3", "-c", WHERE]),
        &second,
    );
    lab.write("project/.python-version", "3.11.2\n");
    lab.write("project/a.py", WHERE);
    assert_from(&activated(&lab, &shims, &[], &["a.py"]), &second);
    lab.write("project/.python-version", "9.9.9\n");
    activated(&lab, &shims, &[], &["a.py"]).refused(125, "9.9.9");
    lab.write("project/.python-version", "system\n");
    assert_eq!(activated(&lab, &shims, &[], &["a.py"]).good(), "/usr\n");
}

fn conda() {
    let lab = Lab::new();
    let prefix = lab.path("person/miniconda3/envs/paper");
    make_python(&prefix);
    std::fs::create_dir(prefix.join("conda-meta")).unwrap();
    lab.write("person/miniconda3/envs/paper/share/table.txt", "shared\n");
    let variables = [("CONDA_PREFIX", prefix.as_path())];
    let ended = activated(
        &lab,
        &prefix.join("bin"),
        &variables,
        &["--", "python", "-c", WHERE],
    );
    assert_from(&ended, &prefix);
    let script = "cat $CONDA_PREFIX/share/table.txt; python -c 'import sys; print(sys.prefix)'";
    let ended = activated(
        &lab,
        &prefix.join("bin"),
        &variables,
        &["--", "sh", "-c", script],
    );
    assert_eq!(ended.good(), format!("shared\n{}\n", prefix.display()));
}

fn r_library() {
    let lab = Lab::new();
    // A package as R sees one: enough of it for library() to list and for system.file() to find.
    let library = lab.path("person/R/library");
    lab.write(
        "person/R/library/ours/DESCRIPTION",
        "Package: ours\nVersion: 1.2.3\nTitle: Ours\n",
    );
    let script = "cat(system.file(package = 'ours'), '\\n')";
    lab.write("project/a.R", script);
    let mut command = lab.run_command(["a.R"]);
    command.env("R_LIBS_USER", &library);
    assert_eq!(
        finish(command).good().trim(),
        library.join("ours").to_str().unwrap()
    );
    assert_eq!(
        lab.run(["a.R"]).good().trim(),
        "",
        "the control: without it there is none"
    );
    let mut command = lab.run_command(["a.R"]);
    command.env("R_LIBS", &library);
    assert_eq!(
        finish(command).good().trim(),
        library.join("ours").to_str().unwrap()
    );
    // A home is no library.
    let mut command = lab.run_command(["a.R"]);
    command.env("R_LIBS_USER", &lab.person);
    finish(command).refused(125, "home directory");
}

fn console_script() {
    let lab = Lab::new();
    let prefix = lab.path("envs/paper");
    make_venv(&prefix);
    let body = format!(
        "#!{}/bin/python3\nimport sys, ours; print(ours.answer, sys.argv[1:])\n",
        prefix.display()
    );
    lab.write_program("envs/paper/bin/analyse", &body);
    let ended = activated(&lab, &prefix.join("bin"), &[], &["--", "analyse", "x"]);
    assert_eq!(ended.good(), "42 ['x']\n");
    // Through a link in a directory of programs, as pipx makes them.
    std::fs::create_dir_all(lab.path("person/.local/bin")).unwrap();
    symlink(
        prefix.join("bin/analyse"),
        lab.path("person/.local/bin/analyse"),
    )
    .unwrap();
    let ended = activated(
        &lab,
        &lab.path("person/.local/bin"),
        &[],
        &["--", "analyse", "y"],
    );
    assert_eq!(ended.good(), "42 ['y']\n");
    // With env in its first line it is the one on PATH.
    lab.write_program(
        "envs/paper/bin/other",
        "#!/usr/bin/env python3\nimport ours; print(ours.answer)\n",
    );
    assert_eq!(
        activated(&lab, &prefix.join("bin"), &[], &["--", "other"]).good(),
        "42\n"
    );
}

fn closed_prefix() {
    let lab = Lab::new();
    let prefix = lab.path("closed/deeper/env");
    std::fs::create_dir_all(prefix.parent().unwrap()).unwrap();
    make_venv(&prefix);
    for dir in ["closed", "closed/deeper"] {
        set_mode(&lab.path(dir), 0o700);
    }
    lab.write("closed/private", "SECRET");
    let script = format!(
        "import sys, os; print(sys.prefix, os.listdir({:?}))",
        lab.path("closed")
    );
    let ended = activated(
        &lab,
        &prefix.join("bin"),
        &[],
        &["--", "python3", "-c", &script],
    );
    assert_eq!(ended.good(), format!("{} ['deeper']\n", prefix.display()));
}

fn named() {
    let lab = Lab::new();
    let prefix = lab.path("envs/paper");
    make_venv(&prefix);
    let runtime = prefix.to_str().unwrap();
    assert_from(
        &lab.run(["--runtime", runtime, "--", "python3", "-c", WHERE]),
        &prefix,
    );
    lab.write(
        "project/a.py",
        "#!/usr/bin/python3\nimport sys; print(sys.prefix)\n",
    );
    assert_from(&lab.run(["--runtime", runtime, "a.py"]), &prefix);
    assert_from(&lab.run(["--runtime", "../envs/paper", "a.py"]), &prefix);
    // A prefix with nothing but programs is enough when it is named.
    lab.write_program("tools/bin/hello", "#!/bin/sh\necho hello\n");
    lab.write("tools/lib/x", "");
    let tools = lab.path("tools");
    assert_eq!(
        lab.run(["--runtime", tools.to_str().unwrap(), "--", "hello"])
            .good(),
        "hello\n"
    );
    lab.run([
        "--runtime",
        lab.path("nowhere").to_str().unwrap(),
        "--",
        "true",
    ])
    .refused(125, "runtime");
    let mut command = lab.run_command(["--", "python3", "-c", WHERE]);
    command.env("FUMEHOOD_RUNTIME", runtime);
    assert_from(&finish(command), &prefix);
}

fn refused() {
    let lab = Lab::new();
    for name in ["person", "project"] {
        lab.write_program(&format!("{name}/bin/tool"), "#!/bin/sh\necho ran\n");
        lab.write(&format!("{name}/lib/x"), "");
    }
    lab.write("person/.ssh/bin/tool", "");
    set_mode(&lab.path("person/.ssh/bin/tool"), 0o755);
    let above = lab.project.parent().unwrap().to_path_buf();
    let bad = [
        lab.person.clone(),
        lab.project.clone(),
        lab.path("person/.ssh"),
        above,
        "/".into(),
        "/etc".into(),
        "/home".into(),
    ];
    for prefix in bad {
        let ended = lab.run(["--runtime", prefix.to_str().unwrap(), "--", "tool"]);
        assert_eq!(ended.code(), 125, "{prefix:?}: {}", ended.err());
    }
    // Neither is a home shown because its bin is on PATH.
    let ended = activated(
        &lab,
        &lab.path("person/bin"),
        &[],
        &[
            "--",
            "sh",
            "-c",
            "tool; ls -A ~ $0 2>&-",
            lab.person.to_str().unwrap(),
        ],
    );
    assert!(!ended.out().contains(".ssh"), "{}", ended.out());
}

fn forged() {
    let lab = Lab::new();
    lab.write("person/.ssh/id_rsa", "SECRET");
    // A pyvenv.cfg in the project that calls the home a Python.
    for home in [lab.path("person/bin"), lab.person.clone()] {
        let prefix = lab.path("project/.venv");
        let _absent = std::fs::remove_dir_all(&prefix);
        std::fs::create_dir_all(prefix.join("bin")).unwrap();
        lab.write_program("person/bin/python3", "#!/bin/sh\ncat ~/.ssh/id_rsa\n");
        symlink(lab.path("person/bin/python3"), prefix.join("bin/python3")).unwrap();
        std::fs::write(
            prefix.join("pyvenv.cfg"),
            format!("home = {}\n", home.display()),
        )
        .unwrap();
        let variables = [("VIRTUAL_ENV", prefix.as_path())];
        let ended = activated(
            &lab,
            &prefix.join("bin"),
            &variables,
            &["--", "python3", "-c", WHERE],
        );
        assert_eq!(ended.code(), 125, "{} {}", ended.out(), ended.err());
        assert!(!ended.out().contains("SECRET"));
    }
    // A bin that leads into the keys.
    let prefix = lab.path("project/env2");
    std::fs::create_dir_all(&prefix).unwrap();
    set_mode(&lab.path("person/.ssh/id_rsa"), 0o755);
    symlink(lab.path("person/.ssh"), prefix.join("bin")).unwrap();
    std::fs::write(prefix.join("pyvenv.cfg"), "home = /usr/bin\n").unwrap();
    let program = prefix.join("bin/id_rsa");
    let ended = lab.run(["--", program.to_str().unwrap()]);
    assert_ne!(ended.code(), 0);
    assert!(!ended.out().contains("SECRET"));
}

fn passed_over() {
    let lab = Lab::new();
    let prefix = lab.path("envs/paper");
    make_venv(&prefix);
    // Active by its variable and absent from PATH, as in a service's unit: it leads.
    let variables = [("VIRTUAL_ENV", prefix.as_path())];
    let system = Path::new("/usr/bin");
    let ended = activated(&lab, system, &variables, &["--", "python3", "-c", WHERE]);
    assert_from(&ended, &prefix);
    // Active, but behind the system's on PATH: that is what the caller's shell would take, and it is said.
    let mut command = lab.run_command(["--", "python3", "-c", WHERE]);
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
    // A broken venv is passed over as the caller's shell would, but aloud.
    std::fs::remove_file(python(&prefix, "3")).unwrap();
    symlink("/nowhere/python3", python(&prefix, "3")).unwrap();
    let bin = prefix.join("bin");
    let ended = activated(&lab, &bin, &variables, &["--", "python3", "-c", WHERE]);
    let told = ended.err().contains("not the active venv");
    assert!(ended.code() != 0 || told, "{}{}", ended.out(), ended.err());
}
