//! The options of `run`, `submit` and `shell`, as typed. `engine::settings` decides what they mean, together with
//! files, variables and the policy.

use std::ffi::OsString;
use std::path::PathBuf;

use engine::request::Command;
use engine::settings::table::{GivenSettings, Key};

/// Run one analysis in the sandbox and report how it ended.
///
/// A SCRIPT is copied into the workspace and run by the interpreter that its `#!` line names, or else by its extension
/// (.py, .R, .sh, .jl). After `--` follows a command, run as given. Everything after SCRIPT or CMD belongs to the
/// program.
///
/// Every option except --id, --in, --input, --siblings, --stdin, --replace, --to, --force and --timings can also be set
/// in a file or by a FUMEHOOD_* variable; see docs/configuration.md. Options given here win, and the operator's
/// /etc/fumehood/policy.toml bounds them all.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(
    override_usage = "fumehood run [OPTIONS] SCRIPT [ARGS]...\n       fumehood run [OPTIONS] -- CMD [ARGS]..."
)]
pub struct RunArgs {
    #[command(flatten)]
    pub task: TaskArgs,

    /// Run in the workspace that `fumehood workspace create ID` made, under its id. Not with --id, --keep or
    /// --workspace memory [default: a new workspace]
    #[arg(long = "in", value_name = "ID", help_heading = "Workspace")]
    pub in_workspace: Option<OsString>,

    /// Print on stderr how long each part of the run took; --json always includes it
    #[arg(long, help_heading = "Report")]
    pub timings: bool,

    /// Do not escape control sequences that the program prints on a terminal: only for programs that you trust. By
    /// default colours, erasing in the line, carriage return and backspace pass, and all others are escaped
    #[arg(long, help_heading = "Report")]
    pub raw: bool,

    /// The script or command with its arguments. The usage line above describes it.
    #[arg(
        value_name = "SCRIPT or -- CMD",
        required = true,
        trailing_var_arg = true,
        hide = true
    )]
    pub words: Vec<OsString>,
}

/// Queue an analysis for a worker to run, and print its id.
///
/// SCRIPT, CMD and the options are as for `run`. The files that --input, --stdin and SCRIPT name are read now and
/// stored with the submission, up to 64M; show larger data with --data or --read, at its path on the worker's machine.
///
/// With --from each line of a file is one analysis, a JSON object as docs/submission-v1.schema.json describes. Options
/// given here apply to every line that does not say otherwise, and lists add up. Either all are queued or none, unless
/// --continue is given. Relative paths are relative to the current directory.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(
    override_usage = "fumehood submit [OPTIONS] SCRIPT [ARGS]...\n       fumehood submit [OPTIONS] -- CMD [ARGS]...\n       fumehood submit [OPTIONS] --from FILE"
)]
pub struct SubmitArgs {
    #[command(flatten)]
    pub task: TaskArgs,

    /// Runs before analyses of lower priority, from 0 to 100 [default: 0]
    #[arg(long, value_name = "N", help_heading = "Queue")]
    pub priority: Option<OsString>,

    /// How often to try again after the runner was lost or Fumehood failed, at most 20 [default: 2]
    #[arg(long, value_name = "N", help_heading = "Queue")]
    pub retries: Option<OsString>,

    /// Also try again after the program ended as: failed, timed_out, out_of_memory, limit_exceeded; separated by
    /// commas. Repeatable [default: none]
    #[arg(long, value_name = "END", help_heading = "Queue")]
    pub retry_on: Vec<OsString>,

    /// Submit only once: submitting the same request again with the same key returns the id of the first
    #[arg(long, value_name = "TEXT", help_heading = "Queue")]
    pub key: Option<OsString>,

    /// Refuse if this many are queued already [default: 200000]
    #[arg(long, value_name = "N", help_heading = "Queue")]
    pub queue_max: Option<OsString>,

    /// Read submissions from this file, or `-` for standard input, one JSON object a line
    #[arg(long, value_name = "FILE|-", help_heading = "Queue")]
    pub from: Option<OsString>,

    /// With --from: queue the valid lines even if others are invalid, and exit with 125
    #[arg(
        long = "continue",
        requires = "from",
        conflicts_with = "words",
        help_heading = "Queue"
    )]
    pub continue_on_error: bool,

    /// The script or command with its arguments. The usage line above describes it.
    #[arg(
        value_name = "SCRIPT or -- CMD",
        required_unless_present = "from",
        conflicts_with = "from",
        trailing_var_arg = true,
        hide = true
    )]
    pub words: Vec<OsString>,
}

/// The options that `run` and `submit` share.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TaskArgs {
    #[command(flatten)]
    pub analysis: AnalysisArgs,

    /// The program's standard input: a file, or `-` for Fumehood's own. The program reads it through a pipe and never
    /// holds the file itself [default: empty]
    #[arg(long, value_name = "FILE|-", help_heading = "What it sees")]
    pub stdin: Option<OsString>,

    /// Also copy the Python modules beside SCRIPT that its imports name, and those that these import in turn: at most
    /// 256 and 16M, listed, and only if SCRIPT is in a directory below the project
    #[arg(long, help_heading = "What it sees")]
    pub siblings: bool,

    #[command(flatten)]
    pub outputs: OutputArgs,

    #[command(flatten)]
    pub store: StoreArgs,

    /// Refuse to start if the artifact store is larger than this, or off [default: off]
    #[arg(long, value_name = "SIZE", help_heading = "Record")]
    pub store_quota: Option<OsString>,

    /// Refuse to start unless this much is free where results are kept [default: 1G]
    #[arg(long, value_name = "SIZE", help_heading = "Record")]
    pub free_reserve: Option<OsString>,

    /// Do not record the value of this variable; a star at the end matches every name that begins so (AWS_*).
    /// Repeatable
    #[arg(long, value_name = "NAME", help_heading = "Record")]
    pub secret_env: Vec<OsString>,

    /// Run an id again that is recorded already, as a new attempt; earlier attempts stay in its history
    #[arg(long, help_heading = "Record")]
    pub replace: bool,

    /// Print one JSON document on stdout instead of the program's own output
    #[arg(long, help_heading = "Report")]
    pub json: bool,
}

/// Which files of the workspace are kept as outputs.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct OutputArgs {
    /// Take only files whose path in the workspace matches, such as 'figures/**' or '*.csv'. Repeatable [default: every
    /// file except unchanged inputs and caches]
    #[arg(long, value_name = "GLOB", help_heading = "Outputs")]
    pub output: Vec<OsString>,

    /// A file that must be among the outputs; otherwise the run counts as failed, and all its outputs are kept all the
    /// same. Repeatable
    #[arg(long, value_name = "GLOB", help_heading = "Outputs")]
    pub expect: Vec<OsString>,

    /// Total size of the outputs; files beyond it are refused and counted [default: as --disk]
    #[arg(long, value_name = "SIZE", help_heading = "Outputs")]
    pub max_output: Option<OsString>,

    /// Size of one output [default: as --max-output]
    #[arg(long, value_name = "SIZE", help_heading = "Outputs")]
    pub max_output_file: Option<OsString>,

    /// Number of outputs, at most 1000000 [default: 10000]
    #[arg(long, value_name = "N", help_heading = "Outputs")]
    pub max_outputs: Option<OsString>,

    /// How deep in the workspace an output may be, from 1 to 256 [default: 32]
    #[arg(long, value_name = "N", help_heading = "Outputs")]
    pub max_depth: Option<OsString>,

    /// Also store outputs and log excerpts up to this size in the database, so that another machine can read them; at
    /// most 64M [default: 1M]
    #[arg(long, value_name = "SIZE", help_heading = "Outputs")]
    pub inline_max: Option<OsString>,

    /// Also export the outputs to this directory after they are recorded; does not overwrite [default: no export]
    #[arg(long, value_name = "DIR", help_heading = "Outputs")]
    pub to: Option<OsString>,

    /// Let --to overwrite
    #[arg(long, help_heading = "Outputs")]
    pub force: bool,
}

/// Where results are recorded: the options of every command that reads or writes the record.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct StoreArgs {
    /// The database: sqlite:PATH, postgres://USER@HOST/NAME, or none. Put a password in the file that PGPASSFILE names,
    /// not here; FUMEHOOD_DB_FILE may name a file that contains the URL [default: SQLite in FUMEHOOD_HOME]
    #[arg(long, value_name = "URL", help_heading = "Record")]
    pub db: Option<OsString>,

    /// The directory that holds the outputs' content [default: artifacts in FUMEHOOD_HOME]
    #[arg(long, value_name = "DIR", help_heading = "Record")]
    pub artifacts: Option<OsString>,
}

/// Open a shell on a terminal in the same sandbox that `run` would use, to look at what a program sees there.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ShellArgs {
    #[command(flatten)]
    pub analysis: AnalysisArgs,
}

/// The options that `run`, `submit` and `shell` share.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct AnalysisArgs {
    /// The analysis's name, [A-Za-z0-9][A-Za-z0-9._-]{0,63}; the workspace is
    /// ROOT/scidex-analysis-ID [default: generated]
    #[arg(long, value_name = "ID", help_heading = "What it sees")]
    pub id: Option<OsString>,

    /// The project: its data/ and docs/ are shown read-only, its fumehood.toml is read
    /// [default: the current directory]
    #[arg(long, value_name = "DIR", help_heading = "What it sees")]
    pub project: Option<OsString>,

    /// Show this directory, read-only, as data/ [default: data in the project, if there]
    #[arg(long, value_name = "DIR", help_heading = "What it sees")]
    pub data: Option<OsString>,

    /// Show this directory, read-only, as docs/ [default: docs in the project, if there]
    #[arg(long, value_name = "DIR", help_heading = "What it sees")]
    pub docs: Option<OsString>,

    /// Show another host path read-only, at the same path or at INSIDE (absolute). Programs and libraries in it can be
    /// executed. If PATH exists with its colons, it is not split. Repeatable
    #[arg(long, value_name = "PATH[:INSIDE]", help_heading = "What it sees")]
    pub read: Vec<OsString>,

    /// Copy a file or directory into the workspace, under its own name or NAME (relative). If PATH exists with its
    /// colons, it is not split. Repeatable
    #[arg(long, value_name = "PATH[:NAME]", help_heading = "What it sees")]
    pub input: Vec<OsString>,

    /// Show this runtime (a venv, conda or pyenv prefix) and put its bin first on PATH [default: found
    /// from the command on the caller's PATH]
    #[arg(long, value_name = "PREFIX", help_heading = "What it sees")]
    pub runtime: Option<OsString>,

    /// Set a variable for the program (K=V), or pass on the caller's (K). It replaces the value that Fumehood would
    /// set, also of HOME, TMPDIR and PATH. Repeatable
    #[arg(long, value_name = "K=V|K", help_heading = "What it sees")]
    pub env: Vec<OsString>,

    /// Network for the program; none is the only value so far [default: none]
    #[arg(long, value_name = "KIND", help_heading = "What it sees")]
    pub network: Option<OsString>,

    /// Wall-clock time, such as 90 (seconds), 30s, 1h30m, 2d [default: 1h]
    #[arg(long, value_name = "TIME", help_heading = "Limits")]
    pub timeout: Option<OsString>,

    /// CPU time summed over all processes, or off [default: off]
    #[arg(long, value_name = "TIME", help_heading = "Limits")]
    pub cpu_time: Option<OsString>,

    /// Stop after this long with neither log output nor CPU use above 1 %, or off; waiting for a slow reader of its
    /// output does not count as idle [default: off]
    #[arg(long, value_name = "TIME", help_heading = "Limits")]
    pub idle_timeout: Option<OsString>,

    /// Time between SIGTERM to all processes and SIGKILL [default: 10s]
    #[arg(long, value_name = "TIME", help_heading = "Limits")]
    pub grace: Option<OsString>,

    /// Memory and swap of all processes, tmpfs included, such as 512M or 2G (binary) [default: the lesser of 4G and
    /// half of what this cgroup or job may use]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub memory: Option<OsString>,

    /// CPUs, such as 2 or 1.5 [default: those this process may run on]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub cpus: Option<OsString>,

    /// Processes and threads at once [default: 1024]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub pids: Option<OsString>,

    /// Open files of each process; all together may have a tenth of fs.file-max [default: 4096]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub open_files: Option<OsString>,

    /// Total size of the files in the workspace and the private /tmp [default: 10G]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub disk: Option<OsString>,

    /// Number of files there [default: 100000]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub files: Option<OsString>,

    /// Stored size of stdout and of stderr each; beyond it the middle is dropped and counted, and the program goes on.
    /// A file or pipe still gets everything [default: 10M]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub log_limit: Option<OsString>,

    /// Run even if this host cannot enforce this limit firmly: cpu_time, memory, cpus or pids. The names of the other
    /// limits (wall_time, idle_time, open_files, disk, files, logs) have no effect. Repeatable
    #[arg(long, value_name = "LIMIT", help_heading = "Limits")]
    pub allow_degraded: Vec<OsString>,

    /// Where the workspace is: disk or memory (it then counts as memory) [default: disk]
    #[arg(long, value_name = "KIND", help_heading = "Workspace")]
    pub workspace: Option<OsString>,

    /// The directory in which workspaces are made [default: /tmp]
    #[arg(long, value_name = "DIR", help_heading = "Workspace")]
    pub workspace_root: Option<OsString>,

    /// Keep the workspace after the run: never, on-failure or always [default: never]
    #[arg(long, value_name = "WHEN", help_heading = "Workspace")]
    pub keep: Option<OsString>,

    /// How long to keep a kept workspace [default: 24h]
    #[arg(long, value_name = "TIME", help_heading = "Workspace")]
    pub keep_for: Option<OsString>,

    /// The lowest level of confinement with which the run may start: full or landlock. It can raise the operator's
    /// floor, never lower it [default: the operator's floor; without a policy, landlock]
    #[arg(long, value_name = "LEVEL", help_heading = "Confinement")]
    pub isolation: Option<OsString>,

    /// Exactly this level, full or landlock, if the floor allows it [default: the strongest that this host gives]
    #[arg(long, value_name = "LEVEL", help_heading = "Confinement")]
    pub level: Option<OsString>,

    /// Which /dev/shm the program has at level landlock: private (none; no POSIX semaphores, so no Python
    /// multiprocessing) or host (the host's own, with the files of others) [default: private]
    #[arg(long, value_name = "WHICH", help_heading = "Confinement")]
    pub shared_memory: Option<OsString>,

    /// Do not print the summary on stderr
    #[arg(long, short, help_heading = "Report")]
    pub quiet: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ArgsError {
    #[error("the command is not the end of the command line; this is a bug in Fumehood")]
    NotTheTail,
    #[error("the script's name is empty")]
    EmptyScript,
    #[error("the command is empty")]
    EmptyCommand,
}

impl RunArgs {
    pub fn command(&self, argv: &[OsString]) -> Result<Command, ArgsError> {
        command(&self.words, argv)
    }

    /// Returns every setting that was given, with its values as typed.
    pub fn given_settings(&self) -> GivenSettings {
        let mut given = self.task.given_settings();
        given.extend(one(Key::In, &self.in_workspace));
        given
    }
}

impl SubmitArgs {
    pub fn command(&self, argv: &[OsString]) -> Result<Command, ArgsError> {
        command(&self.words, argv)
    }

    pub fn given_settings(&self) -> GivenSettings {
        let mut given = self.task.given_settings();
        let own = [
            one(Key::Priority, &self.priority),
            one(Key::Retries, &self.retries),
            many(Key::RetryOn, &self.retry_on),
            one(Key::SubmitOnce, &self.key),
            one(Key::QueueMax, &self.queue_max),
        ];
        given.extend(own.into_iter().flatten());
        given
    }
}

/// Returns the whole command line, the program's own name first.
pub fn command_line() -> Vec<OsString> {
    std::env::args_os().collect()
}

/// Distinguishes `run SCRIPT` from `run -- CMD`. clap removes the `--`. But the words are the end of the command line,
/// because nothing after the first is parsed as an option, so the argument before them decides. An option's value is
/// never mistaken for it: clap does not accept `--` as a value.
fn command(words: &[OsString], argv: &[OsString]) -> Result<Command, ArgsError> {
    let head = argv.strip_suffix(words).ok_or(ArgsError::NotTheTail)?;
    let (first, args) = words.split_first().ok_or(ArgsError::EmptyCommand)?;
    match head.last().is_some_and(|word| word == "--") {
        true if first.is_empty() => Err(ArgsError::EmptyCommand),
        true => Ok(Command::Argv(words.to_vec())),
        false if first.is_empty() => Err(ArgsError::EmptyScript),
        false => Ok(Command::Script {
            script: PathBuf::from(first),
            args: args.to_vec(),
        }),
    }
}

impl TaskArgs {
    fn given_settings(&self) -> GivenSettings {
        let mut given = self.analysis.given_settings();
        given.extend(self.outputs.given_settings());
        given.extend(self.store.given_settings());
        let own = [
            one(Key::Stdin, &self.stdin),
            switch(Key::Siblings, self.siblings),
            one(Key::StoreQuota, &self.store_quota),
            one(Key::FreeReserve, &self.free_reserve),
            many(Key::SecretEnv, &self.secret_env),
            switch(Key::Replace, self.replace),
            switch(Key::Json, self.json),
        ];
        given.extend(own.into_iter().flatten());
        given
    }
}

impl OutputArgs {
    fn given_settings(&self) -> GivenSettings {
        [
            many(Key::Output, &self.output),
            many(Key::Expect, &self.expect),
            one(Key::MaxOutput, &self.max_output),
            one(Key::MaxOutputFile, &self.max_output_file),
            one(Key::MaxOutputs, &self.max_outputs),
            one(Key::MaxDepth, &self.max_depth),
            one(Key::InlineMax, &self.inline_max),
            one(Key::To, &self.to),
            switch(Key::Force, self.force),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

impl StoreArgs {
    pub fn given_settings(&self) -> GivenSettings {
        [one(Key::Db, &self.db), one(Key::Artifacts, &self.artifacts)]
            .into_iter()
            .flatten()
            .collect()
    }
}

impl ShellArgs {
    pub fn given_settings(&self) -> GivenSettings {
        self.analysis.given_settings()
    }
}

impl AnalysisArgs {
    fn given_settings(&self) -> GivenSettings {
        [
            one(Key::Id, &self.id),
            one(Key::Project, &self.project),
            one(Key::Data, &self.data),
            one(Key::Docs, &self.docs),
            many(Key::Read, &self.read),
            many(Key::Input, &self.input),
            one(Key::Runtime, &self.runtime),
            many(Key::Env, &self.env),
            one(Key::Network, &self.network),
            one(Key::Timeout, &self.timeout),
            one(Key::CpuTime, &self.cpu_time),
            one(Key::IdleTimeout, &self.idle_timeout),
            one(Key::Grace, &self.grace),
            one(Key::Memory, &self.memory),
            one(Key::Cpus, &self.cpus),
            one(Key::Pids, &self.pids),
            one(Key::OpenFiles, &self.open_files),
            one(Key::Disk, &self.disk),
            one(Key::Files, &self.files),
            one(Key::LogLimit, &self.log_limit),
            many(Key::AllowDegraded, &self.allow_degraded),
            one(Key::Workspace, &self.workspace),
            one(Key::WorkspaceRoot, &self.workspace_root),
            one(Key::Keep, &self.keep),
            one(Key::KeepFor, &self.keep_for),
            one(Key::Isolation, &self.isolation),
            one(Key::Level, &self.level),
            one(Key::SharedMemory, &self.shared_memory),
            switch(Key::Quiet, self.quiet),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

pub fn one(key: Key, value: &Option<OsString>) -> Option<(Key, Vec<OsString>)> {
    value.as_ref().map(|value| (key, vec![value.clone()]))
}

pub fn many(key: Key, values: &[OsString]) -> Option<(Key, Vec<OsString>)> {
    match values.is_empty() {
        true => None,
        false => Some((key, values.to_vec())),
    }
}

pub fn switch(key: Key, on: bool) -> Option<(Key, Vec<OsString>)> {
    on.then(|| (key, vec![OsString::from("true")]))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};
    use engine::settings::table::{SETTINGS, SettingKind};
    use std::collections::BTreeSet;
    use std::os::unix::ffi::OsStringExt;

    #[derive(Parser)]
    struct Program {
        #[command(subcommand)]
        verb: Verb,
    }
    #[derive(clap::Subcommand)]
    enum Verb {
        Run(Box<RunArgs>),
        Submit(Box<SubmitArgs>),
        Shell(Box<ShellArgs>),
    }

    fn argv(words: &[&str]) -> Vec<OsString> {
        ["fumehood"].iter().chain(words).map(Into::into).collect()
    }

    fn run(words: &[&str]) -> Result<Command, clap::Error> {
        let argv = argv(words);
        match Program::try_parse_from(&argv)?.verb {
            Verb::Run(args) => Ok(args.command(&argv).unwrap()),
            Verb::Submit(args) => Ok(args.command(&argv).unwrap()),
            Verb::Shell(_) => Ok(Command::Shell),
        }
    }

    fn script(words: &[&str]) -> Command {
        Command::Script {
            script: words[0].into(),
            args: words[1..].iter().map(Into::into).collect(),
        }
    }

    fn command(words: &[&str]) -> Command {
        Command::Argv(words.iter().map(Into::into).collect())
    }

    #[test]
    fn a_script_keeps_everything_after_it() {
        for (typed, meant) in [
            (
                &["run", "a.py", "--chrom", "7"][..],
                script(&["a.py", "--chrom", "7"]),
            ),
            (
                &["run", "--id", "x", "a.py", "--help"],
                script(&["a.py", "--help"]),
            ),
            (&["run", "a.py", "--", "b"], script(&["a.py", "--", "b"])),
            (&["run", "a.py", "--json"], script(&["a.py", "--json"])),
            (&["run", "--json", "run", "--"], script(&["run", "--"])),
        ] {
            assert_eq!(run(typed).unwrap(), meant, "{typed:?}");
        }
    }

    #[test]
    fn a_command_follows_two_dashes() {
        for (typed, meant) in [
            (&["run", "--", "ls", "-l"][..], command(&["ls", "-l"])),
            (&["run", "--json", "--", "a.py"], command(&["a.py"])),
            (&["run", "--", "--", "x"], command(&["--", "x"])),
            (&["run", "--", "--json"], command(&["--json"])),
            (
                &["run", "--id", "x", "--", "sh", "-c", "--", "ls"],
                command(&["sh", "-c", "--", "ls"]),
            ),
        ] {
            assert_eq!(run(typed).unwrap(), meant, "{typed:?}");
        }
    }

    #[test]
    fn an_invalid_command_line_is_refused() {
        for typed in [
            &["run"][..],
            &["run", "--"],
            &["run", "--id", "--", "x"],
            &["run", "--tmeout", "3", "a.py"],
            &["run", "-x", "a.py"],
            &["shell", "a.py"],
            &["shell", "--json"],
            &["shell", "--db", "none"],
            &["shell", "--replace"],
            &["shell", "--output", "*"],
            &["run", "--force=yes", "a.py"],
        ] {
            assert!(run(typed).is_err(), "{typed:?}");
        }
        let args = RunArgs {
            words: vec!["".into()],
            ..RunArgs::default()
        };
        assert!(args.command(&argv(&["run", ""])).is_err());
        assert!(args.command(&argv(&["run", "--", ""])).is_err());
        assert!(args.command(&argv(&["run", "other"])).is_err());
    }

    #[test]
    fn words_of_any_bytes_survive() {
        let odd = OsString::from_vec(vec![0xff, b'x', 0x80]);
        let mut argv = argv(&["run", "--read"]);
        argv.extend([odd.clone(), "--".into(), odd.clone()]);
        let Verb::Run(args) = Program::try_parse_from(&argv).unwrap().verb else {
            panic!("run")
        };
        assert_eq!(args.task.analysis.read, std::slice::from_ref(&odd));
        assert_eq!(args.command(&argv).unwrap(), Command::Argv(vec![odd]));
    }

    #[test]
    fn each_setting_is_an_option_and_each_option_a_setting() {
        let program = Program::command();
        let not_settings = ["help", "from", "continue", "raw", "timings"];
        let options: BTreeSet<String> = ["run", "submit"]
            .into_iter()
            .flat_map(|verb| program.find_subcommand(verb).unwrap().get_arguments())
            .filter_map(|arg| arg.get_long())
            .filter(|long| !not_settings.contains(long))
            .map(str::to_owned)
            .collect();
        let settings: BTreeSet<String> =
            SETTINGS.iter().map(|s| s.flag()[2..].to_owned()).collect();
        assert_eq!(options, settings);
    }

    #[test]
    fn each_option_given_is_handed_on() {
        let program = Program::command();
        let mut handed_on = BTreeSet::new();
        for verb in ["run", "submit"] {
            let known = program.find_subcommand(verb).unwrap();
            let has = |flag: &str| known.get_arguments().any(|a| a.get_long() == Some(flag));
            let mut typed = argv(&[verb]);
            for setting in SETTINGS.iter().filter(|s| has(&s.flag()[2..])) {
                typed.push(setting.flag().into());
                if setting.kind != SettingKind::Switch {
                    typed.push("x".into());
                }
            }
            typed.push("a.py".into());
            let given = match Program::try_parse_from(&typed).unwrap().verb {
                Verb::Run(args) => args.given_settings(),
                Verb::Submit(args) => args.given_settings(),
                Verb::Shell(_) => panic!("shell"),
            };
            handed_on.extend(given.into_iter().map(|(key, _)| key));
        }
        assert_eq!(handed_on, SETTINGS.iter().map(|s| s.key).collect());
    }

    #[test]
    fn help_states_each_default() {
        let mut program = Program::command();
        let mut long = |verb: &str| {
            let known = program.find_subcommand_mut(verb).unwrap();
            known.render_long_help().to_string()
        };
        let help = long("run") + &long("submit");
        for setting in SETTINGS {
            assert!(help.contains(&setting.flag()), "{}", setting.flag());
        }
        for default in [
            "1h]",
            "10s]",
            "4G and",
            "1024]",
            "4096]",
            "10G]",
            "100000]",
            "10M]",
            "24h]",
            "never]",
            "as --disk]",
            "as --max-output]",
            "10000]",
            "32]",
            "1M]",
            "off]",
            "1G]",
            "artifacts in FUMEHOOD_HOME]",
            "SQLite in FUMEHOOD_HOME]",
            "from 0 to 100",
            "at most 20",
            "200000]",
        ] {
            assert!(help.contains(default), "{default}");
        }
        assert!(help.contains("\nOutputs:\n") && help.contains("\nRecord:\n"));
        assert!(help.contains("fumehood run [OPTIONS] -- CMD [ARGS]..."));
    }
}
