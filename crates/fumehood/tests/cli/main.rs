//! End to end through the real binary: what a user types, what comes back, and what is left behind.
//!
//! A program of its own rather than the usual harness, because every trial runs twice: as root, and as a plain
//! user with a login of its own. As root the second kind is this binary started again under that user's id.

#![allow(clippy::unwrap_used)]

mod collection_bounds;
mod crash;
mod doctor;
mod doctor_attack;
mod durability;
mod ending;
mod findings;
mod hostile;
mod input_links;
mod keeping;
mod lab;
mod levels;
mod options;
mod output;
mod outsider;
mod plain_user;
mod policy;
mod postgres;
mod printed;
mod queue_cli;
mod queue_findings;
mod reading;
mod record;
mod runtimes;
mod shell;
mod slow_death;
mod standby;
mod stepwise;
mod submit;
mod together;
mod workspace;

use libtest_mimic::{Arguments, Failed, Trial};

/// Who a trial is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum For {
    Everyone,
    /// Needs root: mounts of its own, leased uids, files of another user.
    Root,
}

/// One trial: its name, whom it is for, and what it tries. It panics when the promise is broken.
pub type Entry = (&'static str, For, fn());

fn entries() -> Vec<(String, For, fn())> {
    let files: [(&str, &[Entry]); 29] = [
        ("collection_bounds", collection_bounds::TRIALS),
        ("crash", crash::TRIALS),
        ("doctor", doctor::TRIALS),
        ("doctor_attack", doctor_attack::TRIALS),
        ("durability", durability::TRIALS),
        ("ending", ending::TRIALS),
        ("findings", findings::TRIALS),
        ("hostile", hostile::TRIALS),
        ("input_links", input_links::TRIALS),
        ("keeping", keeping::TRIALS),
        ("levels", levels::TRIALS),
        ("options", options::TRIALS),
        ("output", output::TRIALS),
        ("outsider", outsider::TRIALS),
        ("policy", policy::TRIALS),
        ("postgres", postgres::TRIALS),
        ("printed", printed::TRIALS),
        ("queue_cli", queue_cli::TRIALS),
        ("queue_findings", queue_findings::TRIALS),
        ("reading", reading::TRIALS),
        ("record", record::TRIALS),
        ("runtimes", runtimes::TRIALS),
        ("shell", shell::TRIALS),
        ("slow_death", slow_death::TRIALS),
        ("standby", standby::TRIALS),
        ("stepwise", stepwise::TRIALS),
        ("submit", submit::TRIALS),
        ("together", together::TRIALS),
        ("workspace", workspace::TRIALS),
    ];
    let named = files.into_iter().flat_map(|(file, list)| {
        list.iter()
            .map(move |(name, whom, act)| (format!("{file}::{name}"), *whom, *act))
    });
    named.collect()
}

fn main() {
    if let Some(name) = plain_user::inner_trial() {
        let (_, _, act) = entries().into_iter().find(|(n, ..)| *n == name).unwrap();
        act();
        return;
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
                true => Trial::test(as_plain, move || {
                    plain_user::run(&name).map_err(Failed::from)
                }),
                false => Trial::test(as_plain, move || run(act)),
            });
        }
    }
    let conclusion = libtest_mimic::run(&Arguments::from_args(), trials);
    plain_user::clear();
    conclusion.exit();
}

fn run(act: fn()) -> Result<(), Failed> {
    act();
    Ok(())
}
