//! P15 and P16 through the binary: runners, collectors and databases are killed for real, and whatever they left is
//! finished by the next start, exactly once.
//!
//! Every trial runs as root and as a plain user, as in `tests/cli`. `FUMEHOOD_TEST_STORM` is how many runners are
//! killed on each database, over all identities; `FUMEHOOD_TEST_QUEUE` how many analyses each identity queues on each
//! database while everything is killed; `FUMEHOOD_TEST_SEED` repeats the dice of an earlier run.

#![allow(clippy::unwrap_used)]

mod admission;
mod bench;
mod crowd;
mod faults;
// Shared with `tests/cli` and with the store's own tests, which use more of them.
#[allow(dead_code)]
#[path = "../cli/lab.rs"]
mod lab;
mod leases;
mod model;
mod outages;
#[path = "../cli/plain_user.rs"]
mod plain_user;
mod queue;
mod random;
mod rows;
#[allow(dead_code)]
#[path = "../../../store/tests/store/server.rs"]
mod server;
mod steps;
mod witness;
mod workers;
mod yard;

use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;

use libtest_mimic::{Arguments, Failed, Trial};

/// Who a trial is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum For {
    Everyone,
    /// Needs root: mounts of its own.
    Root,
}

/// One trial: its name, whom it is for, and what it tries. It panics when the promise is broken.
pub type Entry = (&'static str, For, fn());

fn entries() -> Vec<(String, For, fn())> {
    let files: [(&str, &[Entry]); 9] = [
        ("steps", steps::TRIALS),
        ("faults", faults::TRIALS),
        ("random", random::TRIALS),
        ("outages", outages::TRIALS),
        ("workers", workers::TRIALS),
        ("queue", queue::TRIALS),
        ("leases", leases::TRIALS),
        ("admission", admission::TRIALS),
        ("crowd", crowd::TRIALS),
    ];
    let named = files.into_iter().flat_map(|(file, list)| {
        list.iter()
            .map(move |(name, whom, act)| (format!("{file}::{name}"), *whom, *act))
    });
    named.collect()
}

/// What the environment asks for. A plain user's trial gets it with its name: its environment is empty.
pub struct Wishes {
    /// Runners to be killed on each database by this identity.
    pub kills: usize,
    /// Analyses to be queued on each database by this identity.
    pub queued: usize,
    pub seed: u64,
    /// Where a plain user's trial writes what is to be shown.
    report: Option<PathBuf>,
}

static WISHES: OnceLock<Wishes> = OnceLock::new();

pub fn wishes() -> &'static Wishes {
    WISHES.get().unwrap()
}

impl Wishes {
    fn from_environment() -> Wishes {
        let number = |name: &str| -> Option<u64> {
            let text = std::env::var(name).ok()?;
            Some(text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
        };
        let by_time = || {
            let now = std::time::SystemTime::now();
            let now = now.duration_since(std::time::UNIX_EPOCH).unwrap();
            u64::from(now.subsec_nanos()) ^ now.as_secs()
        };
        let kills = number("FUMEHOOD_TEST_STORM").unwrap_or(500) as usize;
        Wishes {
            kills: if lab::is_root() {
                kills.div_ceil(2)
            } else {
                kills
            },
            queued: number("FUMEHOOD_TEST_QUEUE").unwrap_or(60) as usize,
            seed: number("FUMEHOOD_TEST_SEED").unwrap_or_else(by_time),
            report: None,
        }
    }

    fn appended_to(&self, name: &str, report: &std::path::Path) -> String {
        let Wishes {
            kills,
            queued,
            seed,
            ..
        } = self;
        format!("{name}@{kills}@{queued}@{seed}@{}", report.display())
    }

    fn taken_from(name: &str) -> (String, Wishes) {
        let parts: Vec<&str> = name.splitn(5, '@').collect();
        let wishes = Wishes {
            kills: parts[1].parse().unwrap(),
            queued: parts[2].parse().unwrap(),
            seed: parts[3].parse().unwrap(),
            report: Some(parts[4].into()),
        };
        (parts[0].to_owned(), wishes)
    }
}

/// Shows a line of numbers, whether the trial succeeds or not.
pub fn say(line: &str) {
    match &wishes().report {
        None => println!("    {line}"),
        Some(path) => {
            let file = std::fs::File::options().append(true).open(path);
            writeln!(file.unwrap(), "    {line}").unwrap();
        }
    }
}

fn main() {
    if let Some(name) = plain_user::inner_trial() {
        let (name, given) = Wishes::taken_from(&name);
        assert!(WISHES.set(given).is_ok());
        let (_, _, act) = entries().into_iter().find(|(n, ..)| *n == name).unwrap();
        act();
        return;
    }
    let mut arguments = Arguments::from_args();
    // Most trials wait for disks and for the dead.
    arguments.test_threads = arguments.test_threads.or(Some(4));
    if !arguments.list {
        println!(
            "FUMEHOOD_TEST_SEED={}",
            WISHES.get_or_init(Wishes::from_environment).seed
        );
    }
    let root = lab::is_root();
    let mut trials = Vec::new();
    for (name, whom, act) in entries() {
        let as_root = format!("root::{name}");
        let as_plain = format!("plain::{name}");
        // A skipped trial is printed and counted as ignored; CI runs as root and permits none.
        trials.push(Trial::test(as_root, move || run(act)).with_ignored_flag(!root));
        if whom == For::Everyone {
            trials.push(match root {
                true => Trial::test(as_plain, move || run_as_plain_user(&name)),
                false => Trial::test(as_plain, move || run(act)),
            });
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    plain_user::clear();
    conclusion.exit();
}

fn run(act: fn()) -> Result<(), Failed> {
    act();
    Ok(())
}

fn run_as_plain_user(name: &str) -> Result<(), Failed> {
    let (uid, gid) = plain_user::account();
    let report = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    std::os::unix::fs::chown(report.path(), Some(uid), Some(gid)).unwrap();
    let ended = plain_user::run(&wishes().appended_to(name, report.path()));
    print!("{}", std::fs::read_to_string(report.path()).unwrap());
    ended.map_err(Failed::from)
}
