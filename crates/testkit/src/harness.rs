//! Trials: registered beside their functions, run by libtest-mimic once per identity and level.
//!
//! The name of a trial on the command line is `IDENTITY::FILE::FUNCTION`. IDENTITY is `root` or `plain`, with
//! `-landlock` appended at level `landlock`.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};

use crate::{account, is_root, program};

/// The environment variable that tells a test program which level its trials use.
const LEVEL_VARIABLE: &str = "FUMEHOOD_TEST_LEVEL";

/// With this environment variable a program runs each trial for one identity at one level: for the plain user if the
/// trial is for everyone, otherwise for root, and at level `full` if the trial exists there.
const QUICK_VARIABLE: &str = "FUMEHOOD_TEST_QUICK";

/// The environment variable that names the file to which test programs append how many seconds each trial took.
const TIMES_VARIABLE: &str = "FUMEHOOD_TEST_TIMES";

/// The identities that run a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrialIdentities {
    /// Root, and the plain user.
    Everyone,
    /// Root alone: the trial needs cgroups, mounts, uids or files of other users.
    Root,
    /// Whoever runs the test program, once. The name of the trial has no identity.
    Caller,
}

/// The levels at which a trial runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrialLevels {
    Both,
    /// The trial means nothing at level `landlock`. The text says why, and names the counterpart there if it has one.
    OnlyFull(&'static str),
    OnlyLandlock,
}

/// The isolation level of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrialLevel {
    Full,
    Landlock,
}

impl TrialLevel {
    fn word(self) -> &'static str {
        match self {
            TrialLevel::Full => "full",
            TrialLevel::Landlock => "landlock",
        }
    }

    /// The level that this process's trials use.
    pub fn of_this_process() -> TrialLevel {
        match std::env::var_os(LEVEL_VARIABLE) {
            Some(level) if level == "landlock" => TrialLevel::Landlock,
            _ => TrialLevel::Full,
        }
    }
}

/// One function that [`trial!`](crate::trial) has registered. The function panics when the trial fails.
pub struct RegisteredTrial {
    /// The path of the module, with the name of the test program in front.
    pub module: &'static str,
    pub name: &'static str,
    pub line: u32,
    pub identities: TrialIdentities,
    pub levels: TrialLevels,
    pub run: fn(),
}

inventory::collect!(RegisteredTrial);

impl RegisteredTrial {
    /// `FILE::FUNCTION`.
    fn path(&self) -> String {
        trial_path(self.module, self.name)
    }

    fn is_in(&self, files: &[&str]) -> bool {
        let path = self.path();
        files.contains(&path.split("::").next().unwrap_or_default())
    }
}

/// Registers the function below as a trial.
///
/// ```
/// use testkit::trial;
///
/// trial!(Everyone, two_runs_do_not_see_each_other);
/// fn two_runs_do_not_see_each_other() {}
///
/// trial!(Root, a_terminal_can_be_made, only_at_full = "the terminals are the host's");
/// fn a_terminal_can_be_made() {}
///
/// trial!(Everyone, sockets_are_refused, only_at_landlock);
/// fn sockets_are_refused() {}
/// ```
#[macro_export]
macro_rules! trial {
    ($who:ident, $function:ident $(,)?) => {
        $crate::register!($who, $function, Both);
    };
    ($who:ident, $function:ident, only_at_full = $why:literal $(,)?) => {
        $crate::register!($who, $function, OnlyFull($why));
    };
    ($who:ident, $function:ident, only_at_landlock $(,)?) => {
        $crate::register!($who, $function, OnlyLandlock);
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! register {
    ($who:ident, $function:ident, $levels:ident $(($why:literal))?) => {
        $crate::inventory::submit! {
            $crate::harness::RegisteredTrial {
                module: module_path!(),
                name: stringify!($function),
                line: line!(),
                identities: $crate::harness::TrialIdentities::$who,
                levels: $crate::harness::TrialLevels::$levels $(($why))?,
                run: $function,
            }
        }
    };
}

/// The arguments with which a trial starts the test program again, to run itself in another environment.
#[macro_export]
macro_rules! inner_arguments {
    ($function:ident) => {
        $crate::program::inner_arguments(&$crate::harness::trial_path(
            module_path!(),
            stringify!($function),
        ))
    };
}

/// `FILE::FUNCTION` of a function in a module of the test program.
#[doc(hidden)]
pub fn trial_path(module: &str, function: &str) -> String {
    let (_, file) = module
        .split_once("::")
        .expect("trials are in modules of the test program");
    format!("{file}::{function}")
}

/// Whether a trial with this name, `FILE::FUNCTION`, runs at a level.
pub fn is_tried_at(name: &str, level: TrialLevel) -> bool {
    let runs_there = |trial: &RegisteredTrial| match trial.levels {
        TrialLevels::Both => true,
        TrialLevels::OnlyFull(_) => level == TrialLevel::Full,
        TrialLevels::OnlyLandlock => level == TrialLevel::Landlock,
    };
    inventory::iter::<RegisteredTrial>().any(|trial| trial.path() == name && runs_there(trial))
}

/// The user that runs a trial.
#[derive(Clone, Copy, PartialEq, Eq)]
enum User {
    Root,
    Plain,
}

/// The main function of a test program.
#[derive(Default)]
pub struct Harness {
    with_levels: bool,
    shows_output: bool,
    threads: Option<usize>,
    first_files: &'static [&'static str],
    spread_files: &'static [&'static str],
    inner_environment: Vec<(&'static str, String)>,
}

impl Harness {
    pub fn new() -> Harness {
        Harness::default()
    }

    /// Runs trials at both isolation levels. Otherwise each trial runs once per identity.
    pub fn with_levels(mut self) -> Harness {
        self.with_levels = true;
        self
    }

    /// Sets the binary that [`program::binary`] returns.
    pub fn with_binary(self, path: &str) -> Harness {
        program::set_binary(Path::new(path));
        self
    }

    /// Runs this many trials at a time, unless the command line has another number.
    pub fn with_threads(mut self, threads: usize) -> Harness {
        self.threads = Some(threads);
        self
    }

    /// Starts the trials of these files first, because they take longest.
    pub fn with_first(mut self, files: &'static [&'static str]) -> Harness {
        self.first_files = files;
        self
    }

    /// Spreads the trials of these files evenly over all others, because many of them wait for one another.
    pub fn with_spread(mut self, files: &'static [&'static str]) -> Harness {
        self.spread_files = files;
        self
    }

    /// Sets a variable for the trials of the test account, whose environment is otherwise empty.
    pub fn with_variable(mut self, name: &'static str, value: impl ToString) -> Harness {
        self.inner_environment.push((name, value.to_string()));
        self
    }

    /// Prints the standard output of trials in other processes even when they pass.
    pub fn showing_output(mut self) -> Harness {
        self.shows_output = true;
        self
    }

    /// Runs the trial that this process was started again for, or the trials that the command line selects, and exits.
    pub fn run(self) -> ! {
        let mut registered: Vec<&'static RegisteredTrial> =
            inventory::iter::<RegisteredTrial>().collect();
        registered.sort_by_key(|trial| {
            let is_first = trial.is_in(self.first_files);
            (!is_first, trial.module, trial.line)
        });
        let (spread, others) = registered
            .into_iter()
            .partition(|trial| trial.is_in(self.spread_files));
        let registered = merge_evenly(spread, others);
        if let Some(name) = program::inner_trial() {
            let trial = registered.into_iter().find(|trial| trial.path() == name);
            let trial = trial.unwrap_or_else(|| panic!("there is no trial {name}"));
            (trial.run)();
            std::process::exit(0);
        }
        let mut arguments = Arguments::from_args();
        arguments.test_threads = arguments.test_threads.or(self.threads);
        let is_quick = std::env::var_os(QUICK_VARIABLE).is_some();
        // All trials of the process share one harness. It is never freed, because the process ends with its trials.
        let harness: &'static Harness = Box::leak(Box::new(self));
        let trials = registered.into_iter().flat_map(|trial| {
            let mut runs = harness.runs_of(trial);
            if is_quick {
                // The last run at the first level: for the plain user, if the trial is for everyone.
                let first_level = runs[0].1;
                let quick = runs.iter().rposition(|(_, level)| *level == first_level);
                runs = vec![runs[quick.expect("a trial has runs")]];
            }
            runs.into_iter()
                .map(|(user, level)| harness.trial(trial, user, level))
        });
        let trials: Vec<Trial> = trials.collect();
        libtest_mimic::run(&arguments, trials).exit()
    }

    /// The users and levels of a trial. A `None` user is whoever runs the test program.
    fn runs_of(&self, trial: &RegisteredTrial) -> Vec<(Option<User>, TrialLevel)> {
        let levels: &[TrialLevel] = match trial.levels {
            _ if !self.with_levels => &[TrialLevel::Full],
            TrialLevels::Both => &[TrialLevel::Full, TrialLevel::Landlock],
            TrialLevels::OnlyFull(_) => &[TrialLevel::Full],
            TrialLevels::OnlyLandlock => &[TrialLevel::Landlock],
        };
        let users: &[Option<User>] = match trial.identities {
            TrialIdentities::Everyone => &[Some(User::Root), Some(User::Plain)],
            TrialIdentities::Root => &[Some(User::Root)],
            TrialIdentities::Caller => &[None],
        };
        let at = |level: &TrialLevel| {
            let level = *level;
            users.iter().map(move |user| (*user, level))
        };
        levels.iter().flat_map(at).collect()
    }

    fn trial(
        &'static self,
        trial: &'static RegisteredTrial,
        user: Option<User>,
        level: TrialLevel,
    ) -> Trial {
        let suffix = match level {
            TrialLevel::Full => "",
            TrialLevel::Landlock => "-landlock",
        };
        let path = trial.path();
        let title = match user {
            Some(User::Root) => format!("root{suffix}::{path}"),
            Some(User::Plain) => format!("plain{suffix}::{path}"),
            None => path.clone(),
        };
        // A trial that this user cannot run is printed and counted as ignored. CI runs as root and permits no ignored
        // trial.
        let is_ignored = user == Some(User::Root) && !is_root();
        let is_user = user.is_none_or(|user| is_root() == (user == User::Root));
        let runs_here = is_user && level == TrialLevel::of_this_process();
        let title_in_times = title.clone();
        let run = move || {
            let start = Instant::now();
            let result = match runs_here {
                true => {
                    (trial.run)();
                    Ok(())
                }
                false => self.run_in_another_process(&path, user, level),
            };
            note_time(&title_in_times, start.elapsed());
            result
        };
        Trial::test(title, run).with_ignored_flag(is_ignored)
    }

    fn run_in_another_process(
        &self,
        path: &str,
        user: Option<User>,
        level: TrialLevel,
    ) -> Result<(), Failed> {
        let mut command = match user {
            Some(User::Plain) if is_root() => self.command_as_test_account(),
            _ => Command::new("/proc/self/exe"),
        };
        let output = command
            .args(program::inner_arguments(path))
            .env(LEVEL_VARIABLE, level.word())
            .output()
            .map_err(|e| format!("start {path} again: {e}"))?;
        match output.status.success() {
            true if self.shows_output => {
                let _ = std::io::stdout().write_all(&output.stdout);
                Ok(())
            }
            true => Ok(()),
            false => Err(Failed::from(format!(
                "{}\n{}{}",
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            ))),
        }
    }

    fn command_as_test_account(&self) -> Command {
        let (uid, gid) = account::uid_and_gid();
        let mut command = Command::new(program::own_copy());
        command
            .env_clear()
            .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
            .env("HOME", format!("/home/{}", account::ACCOUNT))
            .envs(self.inner_environment.iter().map(|(n, v)| (n, v)))
            .current_dir("/")
            .uid(uid)
            .gid(gid);
        command
    }
}

/// Merges two lists so that the elements of each are evenly spaced. Keeps the order of each.
fn merge_evenly<T>(first: Vec<T>, second: Vec<T>) -> Vec<T> {
    let mut placed: Vec<(f64, T)> = Vec::new();
    for list in [first, second] {
        let length = list.len() as f64;
        let places = (0..list.len()).map(|n| (n as f64 + 0.5) / length);
        placed.extend(places.zip(list));
    }
    placed.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    placed.into_iter().map(|(_, element)| element).collect()
}

/// Appends the time of a trial to the file that [`TIMES_VARIABLE`] names. A trial that panics in this process is left out.
fn note_time(title: &str, took: Duration) {
    let Some(path) = std::env::var_os(TIMES_VARIABLE) else {
        return;
    };
    let mut times = std::fs::File::options()
        .append(true)
        .create(true)
        .open(path)
        .expect("the file of times can be opened");
    // One write, so that lines of several trials do not mix.
    let line = format!("{:.2} {title}\n", took.as_secs_f64());
    times
        .write_all(line.as_bytes())
        .expect("the file of times can be written");
}

#[cfg(test)]
mod tests {
    use super::merge_evenly;

    #[test]
    fn merged_lists_keep_their_order_and_are_evenly_spaced() {
        let merged = merge_evenly(vec![1, 2], vec![10, 11, 12, 13, 14, 15]);
        assert_eq!(merged, [10, 1, 11, 12, 13, 2, 14, 15]);
        assert_eq!(merge_evenly(vec![], vec![1, 2]), [1, 2]);
    }
}
