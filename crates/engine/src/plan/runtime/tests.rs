//! Real directories, real symlinks, and real tools where the host has them. The code under test executes nothing.
//! Each attack has a control: the same layout without the attack is accepted.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;

use super::caller::homes_of;
use super::*;

/// A test host: a home, a project in it, another user's home, and directories for runtimes.
struct Host {
    _dir: tempfile::TempDir,
    home: PathBuf,
    project: PathBuf,
    victim: PathBuf,
}

impl Host {
    fn new() -> Host {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        let (home, victim) = (top.join("homes/ada"), top.join("homes/victim"));
        let project = home.join("project");
        for path in [&project, &victim.join(".ssh"), &victim.join("notes")] {
            fs::create_dir_all(path).unwrap();
        }
        Host {
            _dir: dir,
            home,
            project,
            victim,
        }
    }

    fn caller(&self, path_dirs: &[PathBuf]) -> CallerEnvironment {
        let system = [PathBuf::from("/usr/bin"), PathBuf::from("/bin")];
        CallerEnvironment {
            path: std::env::join_paths(path_dirs.iter().chain(&system)).unwrap(),
            cwd: self.project.clone(),
            env: [("HOME".into(), self.home.clone().into())].into(),
            homes: vec![self.home.clone(), self.victim.clone()],
        }
    }

    fn run(
        &self,
        command: impl AsRef<OsStr>,
        caller: &CallerEnvironment,
    ) -> Result<Runtime, RuntimeError> {
        for_command(command.as_ref(), caller, None, &self.project)
    }

    fn script(
        &self,
        name: &str,
        text: &str,
        caller: &CallerEnvironment,
    ) -> Result<Runtime, RuntimeError> {
        write(&self.project.join(name), text);
        for_script(Path::new(name), caller, None, &self.project)
    }
}

fn write(path: &Path, text: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn program(path: &Path, text: impl AsRef<[u8]>) {
    write(path, text);
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn link(target: impl AsRef<Path>, at: &Path) {
    fs::create_dir_all(at.parent().unwrap()).unwrap();
    symlink(target, at).unwrap();
}

/// Makes the files of a relocatable Python: interpreter, symlinks beside it, standard library.
fn python(prefix: &Path) -> PathBuf {
    program(&prefix.join("bin/python3.12"), b"\x7fELF");
    link("python3.12", &prefix.join("bin/python3"));
    link("python3", &prefix.join("bin/python"));
    write(&prefix.join("lib/python3.12/os.py"), "");
    prefix.to_path_buf()
}

/// Makes the files of `python -m venv`, based on an interpreter.
fn venv(dir: &Path, base: &Path) -> PathBuf {
    write(
        &dir.join("pyvenv.cfg"),
        format!("home = {}\n", base.parent().unwrap().display()),
    );
    link(base, &dir.join("bin/python3"));
    link("python3", &dir.join("bin/python"));
    fs::create_dir_all(dir.join("lib/python3.12/site-packages")).unwrap();
    dir.to_path_buf()
}

fn env_of<'a>(runtime: &'a Runtime, name: &str) -> Option<&'a OsStr> {
    runtime
        .env
        .iter()
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.as_os_str())
}

#[test]
fn system_programs_need_no_prefix() {
    let host = Host::new();
    let runtime = host.run("sh", &host.caller(&[])).unwrap();
    assert_eq!(runtime.program, Path::new("/usr/bin/sh"));
    assert_eq!(
        (runtime.prefixes, runtime.path_dirs, runtime.notice),
        (vec![], vec![], None)
    );
    let typed = host.run("/bin/sh", &host.caller(&[])).unwrap();
    assert_eq!(typed.program, Path::new("/bin/sh"));
}

#[test]
fn not_found_and_not_executable_are_told_apart() {
    let host = Host::new();
    let dir = host.home.join("tools");
    write(&dir.join("plain"), "");
    let caller = host.caller(std::slice::from_ref(&dir));
    let missing = host.run("no-such-command", &caller).unwrap_err();
    assert_eq!(missing.exit_code(), 127);
    assert!(
        missing.to_string().contains(dir.to_str().unwrap()),
        "{missing}"
    );
    assert_eq!(host.run("plain", &caller).unwrap_err().exit_code(), 126);
    assert_eq!(
        host.run(dir.join("plain"), &caller)
            .unwrap_err()
            .exit_code(),
        126
    );
    assert_eq!(host.run("/usr/bin", &caller).unwrap_err().exit_code(), 126);
    for name in ["", "./nothing", "a\0b", "..", "/"] {
        let error = host.run(name, &caller).unwrap_err();
        assert!([126, 127].contains(&error.exit_code()), "{name:?}: {error}");
    }
}

#[test]
fn a_file_of_the_callers_own_is_an_input() {
    let host = Host::new();
    let elsewhere = host.home.join("elsewhere");
    for path in [
        host.project.join("tool"),
        host.project.join("bin/tool"),
        elsewhere.join("tool"),
        host.home.join("tool"),
    ] {
        program(&path, b"\x7fELF");
        let caller = host.caller(&[]);
        let error = host.run(&path, &caller).unwrap_err();
        assert!(
            matches!(error, RuntimeError::InCallerTree { .. }),
            "{path:?}: {error}"
        );
    }
    let relative = host.run("./tool", &host.caller(&[])).unwrap_err();
    assert!(
        matches!(relative, RuntimeError::InCallerTree { .. }),
        "{relative}"
    );
    // Neither a relative entry of PATH nor one in the project makes the file a runtime.
    for entry in [
        PathBuf::from("bin"),
        host.project.join("bin"),
        PathBuf::from("."),
    ] {
        let error = host.run("tool", &host.caller(&[entry])).unwrap_err();
        assert!(
            matches!(error, RuntimeError::InCallerTree { .. }),
            "{error}"
        );
    }
    // The control: a directory of programs on the caller's PATH is shown, and only that directory.
    let runtime = host
        .run("tool", &host.caller(std::slice::from_ref(&elsewhere)))
        .unwrap();
    assert_eq!(runtime.prefixes, [elsewhere]);
}

#[test]
fn venv_made_by_python_itself() {
    let host = Host::new();
    let dir = host.home.join("venvs/paper");
    let made = Command::new("/usr/bin/python3")
        .args(["-m", "venv", "--without-pip"])
        .arg(&dir)
        .status()
        .unwrap();
    assert!(
        made.success(),
        "python3 -m venv needs Debian's python3-venv"
    );
    let runtime = host
        .run("python3", &host.caller(&[dir.join("bin")]))
        .unwrap();
    assert_eq!(
        runtime.program,
        dir.join("bin/python3"),
        "the symlink itself, or pyvenv.cfg is not found"
    );
    assert_eq!(runtime.prefixes, std::slice::from_ref(&dir));
    assert_eq!(runtime.path_dirs, [dir.join("bin")]);
    assert_eq!(env_of(&runtime, "VIRTUAL_ENV"), Some(dir.as_os_str()));
    assert_eq!(
        runtime.notice.unwrap(),
        format!("runtime: {} (read-only)", dir.display())
    );
}

#[test]
fn a_venv_in_the_project_works_without_showing_the_project() {
    let host = Host::new();
    let base = python(&host.home.join("py/3.12"));
    let dir = venv(&host.project.join(".venv"), &base.join("bin/python3.12"));
    for command in [
        "python3".as_ref(),
        dir.join("bin/python").as_os_str(),
        ".venv/bin/python3".as_ref(),
    ] {
        let runtime = host.run(command, &host.caller(&[dir.join("bin")])).unwrap();
        assert_eq!(runtime.prefixes, [dir.clone(), base.clone()]);
    }
    // The venv is not active, but holds nothing else than a venv.
    assert!(host.run(".venv/bin/python3", &host.caller(&[])).is_ok());
}

#[test]
fn an_active_environment_not_on_path_comes_first() {
    let host = Host::new();
    let dir = venv(&host.home.join("v"), Path::new("/usr/bin/python3"));
    let mut caller = host.caller(&[]);
    caller.env.insert("VIRTUAL_ENV".into(), dir.clone().into());
    assert_eq!(
        host.run("python3", &caller).unwrap().program,
        dir.join("bin/python3")
    );
    // `python` in a shell script is the caller's too.
    let shell = host.script("a.sh", "python x.py", &caller).unwrap();
    assert_eq!(
        (shell.prefixes, shell.path_dirs),
        (vec![dir.clone()], vec![dir.join("bin")])
    );
    // A notice says that the active venv is not used.
    let other = host.run("/usr/bin/python3", &caller).unwrap();
    assert!(other.notice.unwrap().contains("not the active venv"));
    // An active environment that may not be shown does not stop a shell, and a notice says so.
    caller
        .env
        .insert("VIRTUAL_ENV".into(), host.home.clone().into());
    let shell = host.run("bash", &caller).unwrap();
    assert!(shell.prefixes.is_empty());
    assert!(shell.notice.unwrap().contains("without VIRTUAL_ENV"));
}

#[test]
fn uv_managed_python_behind_a_symlinked_directory() {
    let host = Host::new();
    let store = host.home.join(".local/share/uv/python");
    let full = python(&store.join("cpython-3.12.4-linux-x86_64-gnu"));
    let minor = store.join("cpython-3.12-linux-x86_64-gnu");
    link("cpython-3.12.4-linux-x86_64-gnu", &minor);
    let dir = venv(&host.project.join(".venv"), &minor.join("bin/python3.12"));
    let runtime = host
        .run("python", &host.caller(&[dir.join("bin")]))
        .unwrap();
    assert_eq!(runtime.prefixes, [full.clone(), dir]);
    assert_eq!(
        runtime.aliases,
        [RuntimeAlias {
            at: minor,
            source: full.clone()
        }]
    );

    // `uv python install` puts a symlink into ~/.local/bin. Its target is run, and the directory stays hidden.
    let bin = host.home.join(".local/bin");
    link(full.join("bin/python3.12"), &bin.join("python3.12"));
    write(
        &host.home.join(".local/share/keyrings/login.keyring"),
        "secret",
    );
    fs::create_dir_all(host.home.join(".local/lib")).unwrap();
    let runtime = host.run("python3.12", &host.caller(&[bin])).unwrap();
    assert_eq!(runtime.program, full.join("bin/python3.12"));
    assert_eq!(runtime.prefixes, [full]);
}

#[test]
fn a_venv_made_by_uv_itself() {
    let host = Host::new();
    let named = std::env::var_os("FUMEHOOD_TEST_UV").unwrap_or_else(|| "uv".into());
    if Command::new(&named).arg("--version").output().is_err() {
        assert!(
            std::env::var_os("CI").is_none(),
            "uv on PATH, or its path in FUMEHOOD_TEST_UV"
        );
        eprintln!("SKIPPED: no uv on PATH, nor in FUMEHOOD_TEST_UV");
        return;
    }
    let base = python(&host.home.join("unused"));
    let dir = host.project.join(".venv");
    let made = Command::new(&named)
        .args(["venv", "--offline", "-q", "--python", "/usr/bin/python3"])
        .arg(&dir)
        .env("UV_CACHE_DIR", host.home.join("uv-cache"))
        .env_remove("VIRTUAL_ENV")
        .current_dir(&host.project)
        .status()
        .unwrap();
    assert!(made.success());
    let runtime = host
        .run(".venv/bin/python", &host.caller(&[base.join("bin")]))
        .unwrap();
    assert_eq!(
        (runtime.program, runtime.prefixes),
        (dir.join("bin/python"), vec![dir])
    );
}

#[test]
fn a_program_of_many_names_keeps_its_name() {
    let host = Host::new();
    let (bin, opt) = (host.home.join("tools"), host.home.join("opt/many/bin"));
    program(&bin.join("many"), b"\x7fELF");
    link("many", &bin.join("one"));
    let runtime = host
        .run("one", &host.caller(std::slice::from_ref(&bin)))
        .unwrap();
    assert_eq!(runtime.program, bin.join("one"));
    // A plain installation is shown whole if its bin is on PATH and it has no unknown entries.
    program(&opt.join("many"), b"\x7fELF");
    fs::create_dir_all(host.home.join("opt/many/lib")).unwrap();
    let caller = host.caller(std::slice::from_ref(&opt));
    let prefix = host.home.join("opt/many");
    assert_eq!(
        host.run("many", &caller).unwrap().prefixes,
        std::slice::from_ref(&prefix)
    );
    write(&prefix.join("secrets"), "");
    assert_eq!(host.run("many", &caller).unwrap().prefixes, [opt]);
}

/// Makes the files of pyenv: shims, versions, a global version and one environment of pyenv-virtualenv.
fn pyenv(host: &Host) -> PathBuf {
    let root = host.home.join(".pyenv");
    for version in ["3.12.1", "3.12.10", "3.11.7"] {
        python(&root.join("versions").join(version));
    }
    program(&root.join("versions/3.11.7/bin/only-old"), b"\x7fELF");
    let base = root.join("versions/3.11.7");
    venv(&base.join("envs/paper"), &base.join("bin/python3.12"));
    link(base.join("envs/paper"), &root.join("versions/paper"));
    for name in ["python3", "python", "only-old"] {
        program(
            &root.join("shims").join(name),
            format!("#!/usr/bin/env bash\nexec {root:?}/libexec/pyenv exec\n"),
        );
    }
    write(&root.join("version"), "3.12.1\n");
    root
}

#[test]
fn pyenv_shims_are_asked_in_pyenvs_order() {
    let host = Host::new();
    let root = pyenv(&host);
    let version = |name: &str| root.join("versions").join(name);
    let mut caller = host.caller(&[root.join("shims")]);
    let prefixes = |caller: &CallerEnvironment| host.run("python3", caller).unwrap().prefixes;
    assert_eq!(prefixes(&caller), [version("3.12.1")], "the global version");
    assert_eq!(
        host.run(root.join("shims/python3"), &caller)
            .unwrap()
            .prefixes,
        [version("3.12.1")]
    );
    write(&host.home.join(".python-version"), "# comment\n\n3.12\n");
    assert_eq!(
        prefixes(&caller),
        [version("3.12.10")],
        "the newest that completes it"
    );
    write(&host.project.join(".python-version"), "3.12.1\n3.11.7\n");
    assert_eq!(prefixes(&caller), [version("3.12.1")], "the nearest file");
    assert_eq!(
        host.run("only-old", &caller).unwrap().prefixes,
        [version("3.11.7")],
        "the first that has it"
    );
    caller.env.insert("PYENV_VERSION".into(), "system".into());
    assert_eq!(
        host.run("python3", &caller).unwrap().program,
        Path::new("/usr/bin/python3")
    );
    caller
        .env
        .insert("PYENV_VERSION".into(), "9.9:3.12.1".into());
    assert_eq!(prefixes(&caller), [version("3.12.1")]);
    caller.env.insert("PYENV_VERSION".into(), "9.9".into());
    let error = host.run("python3", &caller).unwrap_err();
    assert!(error.to_string().contains("9.9"), "{error}");
    caller.env.insert("PYENV_VERSION".into(), "paper".into());
    let runtime = host.run("python3", &caller).unwrap();
    assert_eq!(runtime.program, version("3.11.7/envs/paper/bin/python3"));
    assert_eq!(
        runtime.prefixes,
        [version("3.11.7")],
        "the environment lies in its base"
    );
    assert_eq!(
        runtime.aliases,
        [RuntimeAlias {
            at: version("paper"),
            source: version("3.11.7/envs/paper")
        }]
    );
}

#[test]
fn a_python_version_file_cannot_lead_out_of_pyenv() {
    let host = Host::new();
    let root = pyenv(&host);
    let caller = host.caller(&[root.join("shims")]);
    python(&host.victim.join("py"));
    let file = host.project.join(".python-version");
    write(
        &file,
        format!("../../../victim/py\n{}\n", host.victim.join("py").display()),
    );
    // Both lines are ignored, which for pyenv means `system`.
    assert_eq!(
        host.run("python3", &caller).unwrap().program,
        Path::new("/usr/bin/python3")
    );
    fs::remove_file(&file).unwrap();
    write(&host.victim.join(".ssh/key"), "PRIVATE");
    link(host.victim.join(".ssh/key"), &file);
    let error = host.run("python3", &caller).unwrap_err();
    assert!(
        matches!(error, RuntimeError::VersionFile { .. }) && !error.to_string().contains("PRIVATE"),
        "{error}"
    );
}

/// The pyenv of the user who runs the tests, if there is one. Root's pyenv lies in a 0700 directory.
#[test]
fn the_hosts_own_pyenv() {
    let mut caller = CallerEnvironment::from_process();
    let shims = std::env::split_paths(&caller.path).find(|dir| python::pyenv_root(dir).is_some());
    let Some(shims) = shims else {
        eprintln!(
            "UNAVAILABLE: this host has no pyenv of its own; the pyenv-shaped tests need none"
        );
        return;
    };
    let root = python::pyenv_root(&shims).unwrap();
    let project = tempfile::tempdir().unwrap();
    caller.cwd = project.path().to_path_buf();
    caller.path = std::env::join_paths([shims]).unwrap();
    caller.env.remove(OsStr::new("VIRTUAL_ENV"));
    let versions = fs::read_dir(root.join("versions"))
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    for version in
        versions.filter(|dir| dir.join("bin/python3").exists() && !dir.join("pyvenv.cfg").exists())
    {
        caller
            .env
            .insert("PYENV_VERSION".into(), version.file_name().unwrap().into());
        let runtime = for_command("python3".as_ref(), &caller, None, project.path()).unwrap();
        assert_eq!(runtime.prefixes, [version.canonicalize().unwrap()]);
        assert_eq!(
            runtime.path_dirs,
            [version.canonicalize().unwrap().join("bin")]
        );
    }
}

#[test]
fn other_version_managers_are_named_not_guessed() {
    let host = Host::new();
    let shims = host.home.join(".asdf/shims");
    program(
        &shims.join("python3"),
        "#!/usr/bin/env bash\nexec asdf exec python3\n",
    );
    let error = host.run("python3", &host.caller(&[shims])).unwrap_err();
    assert!(
        matches!(error, RuntimeError::VersionManagerShim { .. }),
        "{error}"
    );
    let juliaup = host.home.join(".juliaup/bin");
    program(&juliaup.join("julialauncher"), b"\x7fELF");
    link("julialauncher", &juliaup.join("julia"));
    let error = host.run("julia", &host.caller(&[juliaup])).unwrap_err();
    assert!(
        matches!(error, RuntimeError::VersionManagerShim { .. }),
        "{error}"
    );
}

#[test]
fn a_conda_environment_is_shown_without_its_base() {
    let host = Host::new();
    let base = host.home.join("miniconda3");
    let env = base.join("envs/stats");
    for prefix in [&base, &env] {
        python(prefix);
        write(&prefix.join("conda-meta/history"), "");
    }
    program(
        &env.join("bin/snakemake"),
        format!("#!{}/bin/python\n", env.display()),
    );
    let mut caller = host.caller(&[env.join("bin"), base.join("condabin")]);
    caller.env.insert("CONDA_PREFIX".into(), env.clone().into());
    for command in ["python", "snakemake"] {
        let runtime = host.run(command, &caller).unwrap();
        assert_eq!(runtime.prefixes, std::slice::from_ref(&env));
        assert_eq!(env_of(&runtime, "CONDA_PREFIX"), Some(env.as_os_str()));
    }
}

#[test]
fn console_scripts_bring_their_interpreter() {
    let host = Host::new();
    let base = python(&host.home.join("py"));
    let tool = venv(
        &host.home.join("pipx/venvs/tool"),
        &base.join("bin/python3.12"),
    );
    let bin = host.home.join("bin");
    program(
        &bin.join("tool"),
        format!("#!{}/bin/python\n", tool.display()),
    );
    let runtime = host
        .run("tool", &host.caller(std::slice::from_ref(&bin)))
        .unwrap();
    assert_eq!(runtime.prefixes, [bin.clone(), tool, base.clone()]);
    assert_eq!(runtime.program, bin.join("tool"));

    program(&bin.join("by-env"), "#!/usr/bin/env python3\n");
    let runtime = host
        .run("by-env", &host.caller(&[bin.clone(), base.join("bin")]))
        .unwrap();
    assert_eq!(runtime.prefixes, [bin.clone(), base.clone()]);
    assert_eq!(
        runtime.path_dirs,
        [base.join("bin"), bin.clone()],
        "env must find the same python3 inside"
    );

    program(&bin.join("gone"), "#!/no/such/python\n");
    assert_eq!(
        host.run("gone", &host.caller(std::slice::from_ref(&bin)))
            .unwrap_err()
            .exit_code(),
        127
    );
    program(
        &bin.join("loop"),
        format!("#!{}\n", bin.join("loop").display()),
    );
    let error = host.run("loop", &host.caller(&[bin])).unwrap_err();
    assert!(
        matches!(error, RuntimeError::TooManySteps { .. }),
        "{error}"
    );
}

#[test]
fn scripts_by_their_first_line_else_by_their_ending() {
    let host = Host::new();
    let caller = host.caller(&[]);
    let program = |name: &str, text: &str| {
        host.script(name, text, &caller)
            .map(|runtime| runtime.program)
    };
    assert_eq!(
        program("a.py", "print()").unwrap(),
        Path::new("/usr/bin/python3")
    );
    assert_eq!(program("a.sh", "true").unwrap(), Path::new("/usr/bin/bash"));
    assert_eq!(
        program("b.py", "#!/bin/sh\n").unwrap(),
        Path::new("/bin/sh")
    );
    let runtime = host
        .script("c", "#!/usr/bin/env -S python3 -u -B\n", &caller)
        .unwrap();
    assert_eq!(
        (runtime.program, runtime.leading_args),
        ("/usr/bin/python3".into(), vec!["-u".into(), "-B".into()])
    );
    for (name, text, code) in [
        ("d", "no line", 125),
        ("e.txt", "", 125),
        ("f.py", "#!/no/such/python3\n", 127),
        ("g.py", "#!python3\n", 125),
        ("h.py", "#!/usr/bin/env no-such-interpreter\n", 127),
        ("i.py", "#!/etc/passwd\n", 126),
    ] {
        assert_eq!(program(name, text).unwrap_err().exit_code(), code, "{name}");
    }
    // A FIFO must not block the reader.
    let fifo = host.project.join("fifo.py");
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    let error = for_script(&fifo, &caller, None, &host.project).unwrap_err();
    assert!(matches!(error, RuntimeError::ReadScript { .. }), "{error}");
}

#[test]
fn a_named_runtime_comes_first_and_is_never_substituted() {
    let host = Host::new();
    let base = python(&host.home.join("py"));
    let caller = host.caller(&[]);
    let named = |command: &str, prefix: &Path| {
        for_command(command.as_ref(), &caller, Some(prefix), &host.project)
    };
    assert_eq!(
        named("python3", &base).unwrap().program,
        base.join("bin/python3")
    );
    let shell = named("sh", &base).unwrap();
    assert_eq!(
        (shell.prefixes, shell.path_dirs),
        (vec![base.clone()], vec![base.join("bin")])
    );
    assert_eq!(named("Rscript", &base).unwrap_err().exit_code(), 127);
    // The named runtime also replaces the python3 that a script's first line names.
    write(&host.project.join("a.py"), "#!/usr/bin/python3 -u\n");
    let runtime = for_script(Path::new("a.py"), &caller, Some(&base), &host.project).unwrap();
    assert_eq!(
        (runtime.program, runtime.leading_args),
        (base.join("bin/python3"), vec!["-u".into()])
    );
    // A runtime named through a symlink appears at both paths.
    let alias = host.home.join("current");
    link(&base, &alias);
    let runtime = named("python3", &alias).unwrap();
    assert_eq!(
        (runtime.prefixes, runtime.aliases),
        (
            vec![base.clone()],
            vec![RuntimeAlias {
                at: alias,
                source: base
            }]
        )
    );
    for prefix in [
        &host.home,
        &host.project,
        &host.victim.join("notes"),
        &host.home.join("none"),
        Path::new("/"),
        Path::new("/etc"),
    ] {
        program(&host.home.join("bin/python3"), b"\x7fELF");
        program(&host.project.join("bin/python3"), b"\x7fELF");
        let error = named("python3", prefix).unwrap_err();
        let refused = matches!(
            error,
            RuntimeError::Refused { .. } | RuntimeError::NamedHasNoPrograms { .. }
        );
        assert!(refused, "{prefix:?}: {error}");
    }
}

#[test]
fn r_brings_its_user_library() {
    let host = Host::new();
    let prefix = host.home.join("R-4.3");
    program(&prefix.join("bin/Rscript"), b"\x7fELF");
    write(
        &prefix.join("lib/R/library/base/DESCRIPTION"),
        "Package: base\nVersion: 4.3.1\n",
    );
    write(
        &prefix.join("lib/R/etc/Renviron"),
        "R_PLATFORM=${R_PLATFORM-'x86_64-pc-linux-gnu'}\n",
    );
    let mut caller = host.caller(&[prefix.join("bin")]);
    assert_eq!(
        host.script("a.R", "1", &caller).unwrap().prefixes,
        std::slice::from_ref(&prefix)
    );
    let library = host.home.join("R/x86_64-pc-linux-gnu-library/4.3");
    write(&library.join("jsonlite/DESCRIPTION"), "");
    let runtime = host.script("a.R", "1", &caller).unwrap();
    assert_eq!(runtime.prefixes, [library.clone(), prefix]);
    assert_eq!(env_of(&runtime, "R_LIBS_USER"), Some(library.as_os_str()));
    caller.env.insert("R_LIBS_USER".into(), "~".into());
    assert!(matches!(
        host.script("a.R", "1", &caller),
        Err(RuntimeError::Refused { .. })
    ));
    caller
        .env
        .insert("R_LIBS_USER".into(), "~/none:~/R/%p-library/%v".into());
    let runtime = host.script("a.r", "1", &caller).unwrap();
    assert_eq!(env_of(&runtime, "R_LIBS_USER"), Some(library.as_os_str()));
}

/// Untrusted pointers to private paths. Each has a control with the same layout and a harmless target.
#[test]
fn no_pointer_shows_what_is_no_runtime() {
    let host = Host::new();
    let key = host.victim.join(".ssh/x");
    program(&key, "secret");
    program(&host.victim.join("notes/bin/run"), "secret");
    program(&host.victim.join("bin/python3"), "secret");
    fs::create_dir_all(host.victim.join("notes/lib")).unwrap();
    let targets = [
        key,
        host.victim.join("notes/bin/run"),
        host.victim.join("bin/python3"),
    ];
    for (i, target) in targets.iter().enumerate() {
        let dir = venv(
            &host.project.join(format!("v{i}")),
            Path::new("/usr/bin/python3"),
        );
        assert!(host.run(dir.join("bin/python3"), &host.caller(&[])).is_ok());
        fs::remove_file(dir.join("bin/python3")).unwrap();
        link(target, &dir.join("bin/python3"));
        // It makes no difference whether the venv is active: the caller chose the venv, not what it points at.
        for caller in [host.caller(&[]), host.caller(&[dir.join("bin")])] {
            let error = host.run(dir.join("bin/python3"), &caller).unwrap_err();
            assert!(
                error.to_string().contains(target.to_str().unwrap()),
                "{error}"
            );
        }
        let error = host
            .script(
                "x.py",
                &format!("#!{}\n", target.display()),
                &host.caller(&[]),
            )
            .unwrap_err();
        assert_eq!(error.exit_code(), 125, "{error}");
    }
}

#[test]
fn a_pyvenv_cfg_cannot_name_a_home() {
    let host = Host::new();
    let dir = venv(&host.project.join(".venv"), Path::new("/usr/bin/python3"));
    let caller = host.caller(&[dir.join("bin")]);
    assert!(host.run("python3", &caller).is_ok());
    program(&host.victim.join("python3"), "x");
    python(&host.victim.join(".ssh/py"));
    let victim = host.victim.display().to_string();
    let homes = [
        "/etc",
        "/",
        "/var/lib/postgresql",
        "/root",
        "/proc/self/root/usr/bin",
        "relative",
        "/usr/../etc",
        "/a\0b",
        "/no/such",
    ];
    let own = [
        victim.clone(),
        format!("{victim}/.ssh"),
        format!("{victim}/.ssh/py/bin"),
        format!("{victim}/notes"),
    ];
    for home in homes.into_iter().map(str::to_owned).chain(own) {
        for key in ["home", "home = /usr/bin\nbase-prefix"] {
            write(&dir.join("pyvenv.cfg"), format!("{key} = {home}\n"));
            match host.run("python3", &caller) {
                Err(_) => {}
                // A base-prefix that does not exist, or leads to the system, shows nothing.
                Ok(runtime) => assert_eq!(runtime.prefixes, std::slice::from_ref(&dir), "{home}"),
            }
        }
        write(&dir.join("pyvenv.cfg"), format!("home = {home}\n"));
        assert!(
            host.run("python3", &caller).is_err() || home.starts_with("/proc"),
            "{home}"
        );
    }
}

#[test]
fn marks_are_not_believed_through_symlinks() {
    let host = Host::new();
    let real = python(&host.home.join("py"));
    let forge = |name: &str| {
        let dir = host.victim.join(name);
        program(&dir.join("bin/python3"), "x");
        dir
    };
    let lib = forge("lib-link");
    link(real.join("lib"), &lib.join("lib"));
    let conda = forge("conda-link");
    link(&real, &conda.join("conda-meta"));
    let config = forge("config-link");
    write(&host.home.join("cfg"), "home = /usr/bin\n");
    link(host.home.join("cfg"), &config.join("pyvenv.cfg"));
    for dir in [lib, conda, config] {
        let error = host
            .run(dir.join("bin/python3"), &host.caller(&[]))
            .unwrap_err();
        assert!(
            matches!(error, RuntimeError::InCallerTree { .. }),
            "{dir:?}: {error}"
        );
    }
    assert!(
        host.run(real.join("bin/python3"), &host.caller(&[]))
            .is_ok()
    );
}

#[test]
fn marks_dropped_into_the_project_do_not_open_it() {
    let host = Host::new();
    let site = host.project.join("site");
    write(&site.join("secrets.db"), "");
    venv(&site, Path::new("/usr/bin/python3"));
    let line = format!("#!{}/bin/python3\n", site.display());
    let error = host.script("x.py", &line, &host.caller(&[])).unwrap_err();
    assert!(
        matches!(error, RuntimeError::MoreThanVenv { .. }),
        "{error}"
    );
    // A conda environment cannot be told from a forged one, so in the project it must be active.
    let env = python(&host.project.join(".pixi/envs/default"));
    write(&env.join("conda-meta/history"), "");
    let line = format!("#!{}/bin/python3\n", env.display());
    let error = host.script("x.py", &line, &host.caller(&[])).unwrap_err();
    assert!(matches!(error, RuntimeError::NotChosen { .. }), "{error}");
    assert_eq!(
        host.run("python3", &host.caller(&[env.join("bin")]))
            .unwrap()
            .prefixes,
        [env]
    );
}

#[test]
fn a_prefix_that_is_a_home_or_the_project_is_refused() {
    let host = Host::new();
    for dir in [
        &host.home,
        &host.project,
        host.home.parent().unwrap(),
        &host.victim,
        &host.home.join(".local"),
    ] {
        python(dir);
        let error = host
            .run("python3", &host.caller(&[dir.join("bin")]))
            .unwrap_err();
        assert!(
            matches!(error, RuntimeError::Refused { .. }),
            "{dir:?}: {error}"
        );
        fs::remove_dir_all(dir.join("bin")).unwrap();
    }
    // The same through a symlink.
    python(&host.project);
    let alias = host.home.join("alias");
    link(&host.project, &alias);
    let error = host
        .run("python3", &host.caller(&[alias.join("bin")]))
        .unwrap_err();
    assert!(matches!(error, RuntimeError::Refused { .. }), "{error}");
}

#[test]
fn refusals_cover_what_belongs_to_all() {
    let homes = [PathBuf::from("/home/ada"), PathBuf::from("/root")];
    let project = Path::new("/data/project");
    let refused = |dir: &str| prefix::refuse(Path::new(dir), &homes, project).is_err();
    for dir in [
        "/",
        "/home",
        "/home/ada",
        "/home/ldap-user",
        "/root",
        "/data",
        "/data/project",
        "/tmp",
        "/var",
        "/var/tmp",
        "/etc",
        "/etc/x",
        "/run/user/1000/venv",
        "/proc/1/root",
        "/dev/shm",
        "/home/ada/.ssh",
        "/home/ada/.ssh/venv",
        "/home/ada/.local",
        "/home/ada/.config",
        "/tmp/scidex-analysis-a1/venv",
        "relative",
        "/a/../home/ada",
        "",
    ] {
        assert!(refused(dir), "{dir}");
    }
    for dir in [
        "/opt/conda",
        "/venv",
        "/home/ada/venv",
        "/home/ada/.local/share/uv/python/x",
        "/data/project/.venv",
        "/tmp/x/venv",
    ] {
        assert!(!refused(dir), "{dir}");
    }
}

#[test]
fn the_notice_cannot_steer_a_terminal() {
    let host = Host::new();
    let dir = python(&host.home.join("py\x1b[2J\nruntime fine"));
    let notice = host
        .run("python3", &host.caller(&[dir.join("bin")]))
        .unwrap()
        .notice
        .unwrap();
    assert!(!notice.contains(char::is_control), "{notice:?}");
}

#[test]
fn homes_are_those_of_people() {
    let passwd = b"root:x:0:0::/root:/bin/sh\ndaemon:x:1:1::/usr/sbin:\nada:x:1000:1000:A:/home/ada:/bin/sh\nbad\nx:x:1001:1::/:\n";
    assert_eq!(
        homes_of(passwd),
        [Path::new("/root"), Path::new("/home/ada")]
    );
    assert!(!CallerEnvironment::from_process().homes.is_empty());
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    /// Whatever the untrusted files say, nothing panics and nothing of the other user is shown.
    #[test]
    fn arbitrary_files_show_nothing_foreign(
        config in "(home|base-prefix|HOME)? ?=? ?[/.a-z\\PC\\x00]{0,60}\n?(home = /usr/bin)?",
        version in "[\\PC\\n./:]{0,60}",
        line in "#!( ?/usr/bin/env (-S )?)?[\\PC/ ]{0,60}\n?",
    ) {
        let host = Host::new();
        let root = pyenv(&host);
        let dir = venv(&host.project.join(".venv"), Path::new("/usr/bin/python3"));
        write(&dir.join("pyvenv.cfg"), &config);
        write(&host.project.join(".python-version"), &version);
        let caller = host.caller(&[root.join("shims")]);
        let results =
            [host.run(".venv/bin/python3", &caller), host.run("python3", &caller), host.script("s.py", &line, &caller)];
        for runtime in results.into_iter().flatten() {
            let known = |prefix: &PathBuf| prefix == &dir || prefix.starts_with(root.join("versions"));
            proptest::prop_assert!(runtime.prefixes.iter().all(known), "{:?}", runtime.prefixes);
        }
    }
}
