//! What is taken: never more at once than a worker was given, in the right order, and what can never fit ends with the reason.

use std::collections::BTreeMap;

use store::State;

use crate::lab::finish;
use crate::witness::{Seen, What, most_at_once};
use crate::workers::{SUCCEEDED, assert_states, waits_and_writes};
use crate::yard::Yard;
use crate::{Entry, For, say};

pub const TRIALS: &[Entry] = &[
    ("sums_are_never_exceeded_on_sqlite", For::Everyone, || {
        sums(&Yard::sqlite("sums"))
    }),
    ("sums_are_never_exceeded_on_postgres", For::Everyone, || {
        sums(&Yard::postgres("sums"))
    }),
    (
        "what_never_fits_ends_with_the_reason",
        For::Everyone,
        || never_fits(&Yard::sqlite("fits")),
    ),
    ("priorities_are_kept_on_sqlite", For::Everyone, || {
        priorities(&Yard::sqlite("prio"))
    }),
    ("submitters_take_turns_on_postgres", For::Root, || {
        turns(&Yard::postgres("turns"))
    }),
];

/// A plain user has no cgroup of its own; what admission counts is the same.
const WEAKLY: [&str; 4] = ["--allow-degraded", "memory", "--allow-degraded", "cpus"];

fn sums(yard: &Yard) {
    const MEMORY: [u64; 5] = [64, 128, 192, 256, 320];
    const CPUS: [&str; 4] = ["0.25", "0.5", "1", "1.5"];
    let mut asked: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for n in 0..20 {
        let (memory, cpus) = (MEMORY[n % MEMORY.len()], CPUS[n % CPUS.len()]);
        let options = ["--memory", &format!("{memory}M"), "--cpus", cpus];
        let options: Vec<&str> = options.iter().chain(&WEAKLY).copied().collect();
        let id = yard.submit(&n.to_string(), &options, "sleep 0.2\n");
        let milli = (cpus.parse::<f64>().unwrap() * 1000.0) as u64;
        asked.insert(id, (memory, milli));
    }
    let given = ["--slots", "6", "--memory", "512M", "--cpus", "2"];
    let workers: Vec<_> = yard
        .places
        .iter()
        .map(|place| yard.worker(place, "w", &given))
        .collect();
    let all: Vec<String> = asked.keys().cloned().collect();
    yard.wait_for_ends(&all);
    workers.into_iter().for_each(|worker| worker.drain(yard));
    // By machine: an id is where its workspace is.
    let seen = yard.witness.seen();
    for machine in 0..yard.places.len() {
        let is_here = |id: &str| {
            let made = seen.iter().find(|s| s.what == What::Made && s.id == id);
            made.and_then(|made| made.root) == Some(machine)
        };
        let here = |s: &Seen| u64::from(is_here(&s.id));
        let (slots, memory, cpus) = (
            most_at_once(&seen, here),
            most_at_once(&seen, |s| here(s) * asked[&s.id].0),
            most_at_once(&seen, |s| here(s) * asked[&s.id].1),
        );
        assert!(
            slots <= 6 && memory <= 512 && cpus <= 2000,
            "{slots} {memory}M {cpus}m"
        );
        say(&format!(
            "{}: at most {slots} at once, {memory}M, {cpus} thousandths of a CPU",
            yard.bench.stem
        ));
    }
    for id in &all {
        assert_states(yard, id, &[SUCCEEDED]);
        assert_eq!(yard.witness.starts(id), 1, "{id}");
    }
    yard.check(&all);
}

fn never_fits(yard: &Yard) {
    let large: Vec<&str> = ["--memory", "2G"].iter().chain(&WEAKLY).copied().collect();
    // Nobody knows yet that it never will.
    let parked = yard.submit("parked", &large, "true\n");
    // A worker looks for such when it comes, and then rarely: by then it must have waited long enough.
    yard.until("it has waited", || {
        let now = yard.overview().unwrap();
        now.next
            .first()
            .is_some_and(|first| now.now_ms > first.queued_ms + 1000)
    });
    let given = ["--slots", "2", "--memory", "512M", "--park-after", "1s"];
    let worker = yard.worker(&yard.places[0], "w", &given);
    let fits = yard.submit("fits", &[], "true\n");
    yard.until("what fits passes it", || yard.has_ended(&fits));
    // Now it is known.
    let words = yard.words(&yard.id("refused"), "true\n");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let all: Vec<&str> = ["submit"]
        .iter()
        .chain(&large)
        .chain(&words)
        .copied()
        .collect();
    let refused = yard.ask(&yard.places[0], &all);
    assert_eq!(refused.code(), 125, "{}", refused.err());
    assert!(
        refused.err().contains("2 GiB") || refused.err().contains("2G"),
        "{}",
        refused.err()
    );
    yard.until("it is parked", || yard.has_ended(&parked));
    assert_states(yard, &parked, &[(State::Error, "does_not_fit")]);
    assert_eq!(yard.story(&parked, 1).last().unwrap(), "parked");
    assert_eq!(yard.witness.starts(&parked), 0);
    worker.drain(yard);
    yard.check(&[parked, fits]);
}

fn priorities(yard: &Yard) {
    let gate = yard.submit("gate", &[], &waits_and_writes());
    let worker = yard.worker(&yard.places[0], "w", &["--slots", "1", "--memory", "256M"]);
    yard.wait_until_runs(&gate);
    let asked = [("c", "0"), ("a", "9"), ("d", "0"), ("b", "5"), ("e", "0")];
    let mut all: Vec<String> = asked
        .iter()
        .map(|(name, priority)| yard.submit(name, &["--priority", priority], "true\n"))
        .collect();
    yard.witness.let_go(&gate);
    all.push(gate);
    yard.wait_for_ends(&all);
    worker.drain(yard);
    let must = ["gate", "a", "b", "c", "d", "e"].map(|name| yard.id(name));
    assert_eq!(order(yard), must);
    yard.check(&all);
}

/// In the order in which their workspaces were made.
fn order(yard: &Yard) -> Vec<String> {
    let seen = yard.witness.seen().into_iter();
    seen.filter(|s| s.what == What::Made)
        .map(|s| s.id)
        .collect()
}

/// One account's dozen does not keep another's one from its turn.
fn turns(yard: &Yard) {
    let gate = yard.submit("gate", &[], &waits_and_writes());
    let worker = yard.worker(&yard.places[0], "w", &["--slots", "1", "--memory", "256M"]);
    yard.wait_until_runs(&gate);
    let mut all: Vec<String> = (0..12)
        .map(|n| yard.submit(&format!("many-{n}"), &[], "true\n"))
        .collect();
    // Root's, on behalf of another account, which may not read what is the trial's own.
    let one = yard.id("one");
    let mut command = yard
        .bench
        .fumehood(&yard.places[1], ["submit", "--id", &one, "--", "true"]);
    command.env("SUDO_USER", "nobody");
    finish(command).good();
    yard.witness.let_go(&gate);
    all.extend([gate, one.clone()]);
    yard.wait_for_ends(&all);
    worker.drain(yard);
    let place = order(yard).iter().position(|id| *id == one).unwrap();
    assert!(place <= 2, "it ran as number {place}");
    yard.check(&all);
}
