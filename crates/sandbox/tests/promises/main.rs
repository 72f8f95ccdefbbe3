//! The promises of the design, one file each, tried on this kernel.
//!
//! A program of its own rather than the usual harness, because the sandbox starts this very binary again as
//! its launcher, and because every trial runs as root and as a plain user with a login of its own, at level `full`
//! and at level `landlock`. All but the first kind are this binary started again: under that user's id, or with
//! the level in its environment. What a level cannot give is in the lists `ONLY_AT_FULL`, each with its reason.

#![allow(clippy::unwrap_used)]

mod hood;
mod landlock_calls;
mod landlock_level;
mod landlock_older;
mod layers;
mod p02_inputs;
mod p03_runtime;
mod p04_writes;
mod p06_services;
mod p07_others;
mod p08_privilege;
mod p09_streams;
mod p10_hiding;
mod p10_host_tables;
mod p10_kernel_memory;
mod p10_limits;
mod p10_watch;
mod p11_deadline;
mod p11_slow_death;
mod p12_runner_death;
mod p17_truth;
mod plain_user;
mod science;
mod science_tools;

use libtest_mimic::{Arguments, Failed, Trial};
use sandbox::spec::ConfinementLevel;

use plain_user::Who;

/// Who a trial is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum For {
    Everyone,
    /// Needs root: cgroups, leased uids, loop devices.
    Root,
}

/// One trial: its name, whom it is for, and what it tries. It panics when the promise is broken.
pub type Entry = (&'static str, For, fn());

/// A trial that means nothing at level `landlock`, and why; its counterpart there, if it has one, is in the reason.
pub type OnlyAtFull = (&'static str, &'static str);

/// At which levels the trials of a file are run.
#[derive(Clone, Copy)]
enum Levels {
    Both(&'static [OnlyAtFull]),
    Landlock,
}

const FILES: &[(&str, &[Entry], Levels)] = &[
    ("layers", layers::TRIALS, Levels::Both(layers::ONLY_AT_FULL)),
    (
        "p02_inputs",
        p02_inputs::TRIALS,
        Levels::Both(p02_inputs::ONLY_AT_FULL),
    ),
    (
        "p03_runtime",
        p03_runtime::TRIALS,
        Levels::Both(p03_runtime::ONLY_AT_FULL),
    ),
    (
        "p04_writes",
        p04_writes::TRIALS,
        Levels::Both(p04_writes::ONLY_AT_FULL),
    ),
    (
        "p06_services",
        p06_services::TRIALS,
        Levels::Both(p06_services::ONLY_AT_FULL),
    ),
    ("p07_others", p07_others::TRIALS, Levels::Both(&[])),
    ("p08_privilege", p08_privilege::TRIALS, Levels::Both(&[])),
    (
        "p09_streams",
        p09_streams::TRIALS,
        Levels::Both(p09_streams::ONLY_AT_FULL),
    ),
    (
        "p10_hiding",
        p10_hiding::TRIALS,
        Levels::Both(p10_hiding::ONLY_AT_FULL),
    ),
    (
        "p10_host_tables",
        p10_host_tables::TRIALS,
        Levels::Both(p10_host_tables::ONLY_AT_FULL),
    ),
    (
        "p10_kernel_memory",
        p10_kernel_memory::TRIALS,
        Levels::Both(p10_kernel_memory::ONLY_AT_FULL),
    ),
    (
        "p10_limits",
        p10_limits::TRIALS,
        Levels::Both(p10_limits::ONLY_AT_FULL),
    ),
    (
        "p10_watch",
        p10_watch::TRIALS,
        Levels::Both(p10_watch::ONLY_AT_FULL),
    ),
    ("p11_deadline", p11_deadline::TRIALS, Levels::Both(&[])),
    ("p11_slow_death", p11_slow_death::TRIALS, Levels::Both(&[])),
    (
        "p12_runner_death",
        p12_runner_death::TRIALS,
        Levels::Both(&[]),
    ),
    ("p17_truth", p17_truth::TRIALS, Levels::Both(&[])),
    (
        "science",
        science::TRIALS,
        Levels::Both(science::ONLY_AT_FULL),
    ),
    ("science_tools", science_tools::TRIALS, Levels::Both(&[])),
    ("landlock_calls", landlock_calls::TRIALS, Levels::Landlock),
    ("landlock_level", landlock_level::TRIALS, Levels::Landlock),
    ("landlock_older", landlock_older::TRIALS, Levels::Landlock),
];

struct Registered {
    name: String,
    whom: For,
    act: fn(),
    at: &'static [ConfinementLevel],
}

fn registered() -> Vec<Registered> {
    let mut all = Vec::new();
    for (file, trials, levels) in FILES {
        if let Levels::Both(only_at_full) = levels {
            let known = |name| trials.iter().any(|(trial, ..)| *trial == name);
            let unknown = only_at_full.iter().find(|(name, _)| !known(*name));
            assert!(unknown.is_none(), "{file} has no trial {unknown:?}");
        }
        for (name, whom, act) in *trials {
            let at: &[ConfinementLevel] = match levels {
                Levels::Both(only) if only.iter().any(|(n, _)| n == name) => {
                    &[ConfinementLevel::Full]
                }
                Levels::Both(_) => &[ConfinementLevel::Full, ConfinementLevel::Landlock],
                Levels::Landlock => &[ConfinementLevel::Landlock],
            };
            all.push(Registered {
                name: format!("{file}::{name}"),
                whom: *whom,
                act: *act,
                at,
            });
        }
    }
    all
}

/// Whether a trial of this name, `file::trial`, is run at level `landlock`.
pub fn is_tried_at_landlock(name: &str) -> bool {
    let all = registered();
    all.iter()
        .any(|r| r.name == name && r.at.contains(&ConfinementLevel::Landlock))
}

fn main() {
    if sandbox::launch::is_launcher() {
        match hood::older_landlock() {
            Some(abi) => sandbox::launch::main_on_older_landlock(abi),
            None => sandbox::launch::main(),
        }
    }
    if let Some(name) = plain_user::inner_trial() {
        let trial = registered().into_iter().find(|r| r.name == name).unwrap();
        (trial.act)();
        return;
    }
    if let Some(role) = p12_runner_death::inner_role() {
        p12_runner_death::play(&role);
        return;
    }
    let root = hood::is_root();
    let mut trials = Vec::new();
    for Registered {
        name,
        whom,
        act,
        at,
    } in registered()
    {
        for level in at {
            let suffix = match level {
                ConfinementLevel::Full => "",
                ConfinementLevel::Landlock => "-landlock",
            };
            // A skipped trial is printed and counted as ignored; CI runs as root and permits none.
            let title = format!("root{suffix}::{name}");
            trials.push(trial(title, &name, act, Who::Root, *level).with_ignored_flag(!root));
            if whom == For::Everyone {
                let title = format!("plain{suffix}::{name}");
                trials.push(trial(title, &name, act, Who::Plain, *level));
            }
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Here, if this process is already who and where it must be; otherwise in a process that is.
fn trial(title: String, name: &str, act: fn(), who: Who, level: ConfinementLevel) -> Trial {
    let is_who = hood::is_root() == (who == Who::Root);
    if is_who && level == hood::level() {
        return Trial::test(title, move || {
            act();
            Ok(())
        });
    }
    let name = name.to_owned();
    Trial::test(title, move || {
        plain_user::run(&name, who, level).map_err(Failed::from)
    })
}
