//! The promises of the design, one file each, tried on this kernel.
//!
//! A program of its own rather than the usual harness, because the sandbox starts this very binary again as
//! its launcher, and because every trial runs twice: as root, and as a plain user with a login of its own.
//! As root the second kind is this binary started again under that user's id.

#![allow(clippy::unwrap_used)]

mod hood;
mod layers;
mod p02_inputs;
mod p03_runtime;
mod p04_writes;
mod p06_services;
mod p07_others;
mod p08_privilege;
mod p09_streams;
mod p10_hiding;
mod p10_limits;
mod p11_deadline;
mod p12_runner_death;
mod p17_truth;
mod plain_user;
mod science;

use libtest_mimic::{Arguments, Failed, Trial};

/// Who a trial is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum For {
    Everyone,
    /// Needs root: cgroups, leased uids, loop devices.
    Root,
}

/// One trial: its name, whom it is for, and what it tries. It panics when the promise is broken.
pub type Entry = (&'static str, For, fn());

fn entries() -> Vec<(String, For, fn())> {
    let files: [(&str, &[Entry]); 14] = [
        ("layers", layers::TRIALS),
        ("p02_inputs", p02_inputs::TRIALS),
        ("p03_runtime", p03_runtime::TRIALS),
        ("p04_writes", p04_writes::TRIALS),
        ("p06_services", p06_services::TRIALS),
        ("p07_others", p07_others::TRIALS),
        ("p08_privilege", p08_privilege::TRIALS),
        ("p09_streams", p09_streams::TRIALS),
        ("p10_hiding", p10_hiding::TRIALS),
        ("p10_limits", p10_limits::TRIALS),
        ("p11_deadline", p11_deadline::TRIALS),
        ("p12_runner_death", p12_runner_death::TRIALS),
        ("p17_truth", p17_truth::TRIALS),
        ("science", science::TRIALS),
    ];
    let named = files.into_iter().flat_map(|(file, list)| {
        list.iter()
            .map(move |(name, whom, act)| (format!("{file}::{name}"), *whom, *act))
    });
    named.collect()
}

fn main() {
    if sandbox::launch::is_launcher() {
        sandbox::launch::main();
    }
    if let Some(name) = plain_user::inner_trial() {
        let (_, _, act) = entries().into_iter().find(|(n, ..)| *n == name).unwrap();
        act();
        return;
    }
    if let Some(role) = p12_runner_death::inner_role() {
        p12_runner_death::play(&role);
        return;
    }
    let root = hood::is_root();
    let mut trials = Vec::new();
    for (name, whom, act) in entries() {
        let as_root = format!("root::{name}");
        let as_plain = format!("plain::{name}");
        // A skipped trial is printed and counted as ignored; CI runs as root and permits none.
        trials.push(Trial::test(as_root, move || run(act)).with_ignored_flag(!root));
        if whom == For::Everyone {
            trials.push(match root {
                true => Trial::test(as_plain, move || {
                    plain_user::run(&name).map_err(Failed::from)
                }),
                false => Trial::test(as_plain, move || run(act)),
            });
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn run(act: fn()) -> Result<(), Failed> {
    act();
    Ok(())
}
