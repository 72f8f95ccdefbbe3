//! P12, P16 and P18 with a queue: workers, runners and the database die one at a time, where it is known what must come
//! of it. The storm over all of them is in `queue.rs`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::process::Signal;
use store::State;

use crate::witness::most_at_once;
use crate::yard::{WAIT, Yard};
use crate::{Entry, For, say};

pub const TRIALS: &[Entry] = &[
    (
        "a_killed_worker_leaves_its_runners_on_sqlite",
        For::Everyone,
        || killed_worker(&Yard::sqlite("kw")),
    ),
    (
        "a_killed_worker_leaves_its_runners_on_postgres",
        For::Everyone,
        || killed_worker(&Yard::postgres("kw")),
    ),
    (
        "a_killed_runner_is_tried_again_on_sqlite",
        For::Everyone,
        || killed_runner(&Yard::sqlite("kr")),
    ),
    (
        "a_killed_runner_is_tried_again_on_postgres",
        For::Everyone,
        || killed_runner(&Yard::postgres("kr")),
    ),
    (
        "cancel_reaches_another_home_on_sqlite",
        For::Everyone,
        || cancelled(&Yard::sqlite("cn")),
    ),
    (
        "cancel_reaches_another_machine_on_postgres",
        For::Everyone,
        || cancelled(&Yard::postgres("cn")),
    ),
    ("a_worker_drains_on_sqlite", For::Everyone, || {
        drained(&Yard::sqlite("dr"))
    }),
    ("a_worker_drains_on_postgres", For::Everyone, || {
        drained(&Yard::postgres("dr"))
    }),
    (
        "names_are_taken_once_and_share_the_queue",
        For::Everyone,
        || names(&Yard::sqlite("nm")),
    ),
    (
        "cleaning_beside_workers_disturbs_nothing_on_sqlite",
        For::Everyone,
        || cleaned(&Yard::sqlite("gc")),
    ),
    (
        "cleaning_beside_workers_disturbs_nothing_on_postgres",
        For::Everyone,
        || cleaned(&Yard::postgres("gc")),
    ),
];

/// Waits, and leaves one output.
pub fn waits_and_writes() -> String {
    format!("{WAIT}echo \"$0\" > a.txt\n")
}

pub const SUCCEEDED: (State, &str) = (State::Succeeded, "exit");
pub const LOST: (State, &str) = (State::Error, "runner_lost");

#[track_caller]
pub fn assert_states(yard: &Yard, id: &str, must: &[(State, &str)]) {
    let states = yard.states(id);
    let is: Vec<(State, &str)> = states.iter().map(|(s, r)| (*s, r.as_str())).collect();
    assert_eq!(
        is,
        must,
        "{id}: {:?}\n{}",
        yard.attempts(id),
        yard.everything()
    );
}

fn killed_worker(yard: &Yard) {
    let place = yard.places.last().unwrap();
    let slots = ["--slots", "3", "--memory", "768M"];
    let submit = |name: &str| yard.submit(name, &[], &waits_and_writes());
    let first: Vec<String> = ["a", "b", "c"].map(submit).into();
    let worker = yard.worker(place, "w", &slots);
    first.iter().for_each(|id| yard.wait_until_runs(id));
    worker.kill();
    let more: Vec<String> = ["d", "e", "f"].map(submit).into();
    // One commits while there is no worker at all.
    yard.witness.let_go(&first[0]);
    yard.until("it ends without a worker", || yard.has_ended(&first[0]));
    assert_states(yard, &first[0], &[SUCCEEDED]);
    yard.until("its runner ends", || yard.runner_of(&first[0]).is_none());
    assert_eq!(yard.queued(), 3, "nobody was there to take any");
    let worker = yard.worker(place, "w", &slots);
    yard.until("a slot is free, and used", || {
        yard.witness.running().len() == 3
    });
    assert!(
        worker.said().contains("2 analyses run on from before"),
        "{}",
        worker.said()
    );
    for id in first[1..].iter().chain(&more) {
        yard.wait_until_runs(id);
        yard.witness.let_go(id);
    }
    let all: Vec<String> = first.into_iter().chain(more).collect();
    yard.wait_for_ends(&all);
    worker.drain(yard);
    let seen = yard.witness.seen();
    assert_eq!(most_at_once(&seen, |_| 1), 3);
    for id in &all {
        assert_states(yard, id, &[SUCCEEDED]);
        assert_eq!(yard.witness.starts(id), 1, "{id}");
        assert_eq!(yard.attempts(id)[0].outputs_count, Some(1), "{id}");
    }
    yard.check(&all);
}

fn killed_runner(yard: &Yard) {
    let worker = yard.worker(&yard.places[0], "w", &["--slots", "3", "--memory", "768M"]);
    let script = format!(
        "echo half > half.txt\nsleep 1000 &\nsleep 1000 &\n{}",
        waits_and_writes()
    );
    let once = yard.submit("once", &["--retries", "2"], &script);
    let never = yard.submit("never", &["--retries", "0"], &script);
    let always = yard.submit("always", &["--retries", "2"], &script);
    for id in [&once, &never, &always] {
        yard.wait_until_runs(id);
        yard.kill_runner(id);
        yard.until("its analysis dies with it", || {
            !yard.witness.running().contains(id)
        });
    }
    yard.until("it is parked", || yard.has_ended(&never));
    assert_states(yard, &never, &[LOST]);
    assert_eq!(yard.story(&never, 1).last().unwrap(), "parked");
    yard.until("it is tried again", || yard.witness.starts(&once) == 2);
    yard.witness.let_go(&once);
    for turn in 2..=3 {
        yard.until("it is tried again", || yard.witness.starts(&always) == turn);
        yard.kill_runner(&always);
    }
    let all = [once, never, always];
    yard.wait_for_ends(&all);
    worker.drain(yard);
    let [once, never, always] = &all;
    assert_states(yard, once, &[LOST, SUCCEEDED]);
    assert_states(yard, never, &[LOST]);
    assert_states(yard, always, &[LOST, LOST, LOST]);
    let second = yard
        .events(once)
        .into_iter()
        .find(|e| e.attempt == 2)
        .unwrap();
    assert_eq!(
        (second.event.as_str(), second.reason.as_deref()),
        ("retried", Some("runner_lost"))
    );
    assert_eq!(yard.story(always, 3).last().unwrap(), "parked");
    // What it had written is kept, and not taken for all of it.
    let lost = &yard.attempts(once)[0];
    assert_eq!(
        (lost.outputs_count, lost.complete),
        (Some(1), Some(false)),
        "{lost:?}"
    );
    yard.check(&all);
}

fn cancelled(yard: &Yard) {
    let (here, there) = (&yard.places[0], yard.places.last().unwrap());
    let script = format!("echo half > half.txt\necho written\n{}", waits_and_writes());
    let slots = ["--slots", "2", "--memory", "512M"];
    let worker = yard.worker(there, "w", &slots);
    let running = yard.submit("running", &[], &script);
    let orphan = yard.submit("orphan", &[], &script);
    yard.wait_until_runs(&running);
    yard.wait_until_runs(&orphan);
    let queued = yard.submit("queued", &[], &script);
    // In a home that has none of them, also on one machine: only the database can tell the runner.
    let elsewhere = yard.bench.another_place(7);
    for id in [&running, &orphan] {
        yard.until("it has written", || {
            yard.bench
                .fumehood(there, ["logs", id])
                .output()
                .unwrap()
                .stdout
                .ends_with(b"written\n")
        });
    }
    yard.ask(&elsewhere, &["cancel", &queued]).good();
    assert_states(yard, &queued, &[(State::Cancelled, "cancelled")]);
    let began = Instant::now();
    yard.ask(&elsewhere, &["cancel", &running]).good();
    yard.until("it ends", || !yard.witness.running().contains(&running));
    let by_worker = began.elapsed();
    // Nobody but its runner is there to look.
    worker.kill();
    let began = Instant::now();
    yard.ask(&elsewhere, &["cancel", &orphan]).good();
    yard.until("it ends", || !yard.witness.running().contains(&orphan));
    let by_itself = began.elapsed();
    say(&format!(
        "{}: cancelled within {by_worker:?} by the worker, {by_itself:?} by the runner alone",
        yard.bench.stem
    ));
    let all = [running, orphan, queued];
    yard.wait_for_ends(&all);
    for id in &all[..2] {
        assert_states(yard, id, &[(State::Cancelled, "cancelled")]);
        let attempt = &yard.attempts(id)[0];
        assert_eq!(
            (attempt.outputs_count, attempt.complete),
            (Some(1), Some(false)),
            "{attempt:?}"
        );
        let must = [
            "submitted",
            "claimed",
            "started",
            "cancelled",
            "ended",
            "committed",
        ];
        assert_eq!(yard.story(id, 1), must, "{id}");
    }
    assert_eq!(yard.witness.starts(&all[2]), 0);
    // What has ended stays as it is.
    assert_eq!(yard.ask(here, &["cancel", &all[0]]).code(), 125);
    yard.worker(there, "w", &slots).drain(yard);
    yard.check(&all);
}

/// Submits two that wait to be let go, and has them run.
fn two_running(yard: &Yard) -> [String; 2] {
    let both = ["a", "b"].map(|name| yard.submit(name, &[], &waits_and_writes()));
    both.iter().for_each(|id| yard.wait_until_runs(id));
    both
}

fn drained(yard: &Yard) {
    let place = &yard.places[0];
    let slots = ["--slots", "2", "--memory", "512M"];
    // SIGTERM: nothing more is taken, and what runs is waited for.
    let mut worker = yard.worker(place, "w", &slots);
    let [a, b] = two_running(yard);
    let later = yard.submit("later", &[], "echo \"$0\" > a.txt\n");
    worker.signal(Signal::TERM);
    yard.until("it drains", || worker.said().contains("draining: "));
    yard.witness.let_go(&a);
    yard.until("one ends", || yard.has_ended(&a));
    assert!(!worker.has_ended(), "one still runs");
    assert_eq!(yard.queued(), 1, "a slot is free, and nothing is taken");
    // Once more: it leaves at once, and its runner goes on.
    worker.signal(Signal::TERM);
    let said = worker.said();
    assert_eq!(worker.end(yard), 0, "{said}");
    assert!(yard.witness.running().contains(&b));
    yard.witness.let_go(&b);
    yard.until("it ends without a worker", || yard.has_ended(&b));
    assert_eq!(yard.queued(), 1);
    // SIGINT leaves at once.
    let worker = yard.worker(place, "w", &slots);
    yard.until("it is taken", || yard.has_ended(&later));
    let c = yard.submit("c", &[], &waits_and_writes());
    yard.wait_until_runs(&c);
    worker.signal(Signal::INT);
    assert_eq!(worker.end(yard), 0);
    assert!(yard.witness.running().contains(&c));
    // `worker --drain` has the running worker drain, and waits for it.
    let worker = yard.worker(place, "w", &slots);
    yard.until("it listens", || worker.is_ready());
    let drainer = yard.worker(place, "w", &["--drain"]);
    yard.until("it waits", || {
        drainer.has_said("the worker w is told to drain; waiting for it")
    });
    // Until it has heard that, it may still take something.
    yard.until("it drains", || worker.has_said("draining: "));
    let last = yard.submit("last", &[], &waits_and_writes());
    assert!(yard.witness.running().contains(&c));
    yard.witness.let_go(&c);
    assert_eq!(worker.end(yard), 0);
    assert_eq!(drainer.end(yard), 0);
    assert_eq!(yard.queued(), 1, "whoever drains takes nothing");
    yard.ask(place, &["cancel", &last]).good();
    for id in [&a, &b, &later, &c] {
        assert_states(yard, id, &[SUCCEEDED]);
        assert_eq!(yard.witness.starts(id), 1, "{id}");
    }
    yard.check(&[a, b, later, c, last]);
}

fn names(yard: &Yard) {
    let place = &yard.places[0];
    let slots = ["--slots", "1", "--memory", "256M"];
    let first = yard.worker(place, "one", &slots);
    yard.until("it holds its name", || first.is_ready());
    let mut second = yard.bench.fumehood(place, ["worker", "--name", "one"]);
    second.args(slots);
    crate::lab::finish(second).refused(125, "a worker named one is running already");
    let other = yard.worker(place, "two", &slots);
    // Each has one slot, so two that run have a worker each.
    let [a, b] = two_running(yard);
    let workers: Vec<Option<String>> = [&a, &b]
        .map(|id| {
            let claimed = yard.events(id).into_iter().find(|e| e.event == "claimed");
            claimed.unwrap().by
        })
        .into();
    assert_ne!(workers[0], workers[1]);
    let more: Vec<String> = (0..6)
        .map(|n| yard.submit(&n.to_string(), &[], "echo \"$0\" > a.txt\n"))
        .collect();
    yard.witness.let_go(&a);
    yard.witness.let_go(&b);
    let all: Vec<String> = [a, b].into_iter().chain(more).collect();
    yard.wait_for_ends(&all);
    // What a dead worker's runner has, its neighbour in the same home leaves alone.
    let alone = yard.submit("alone", &[], &waits_and_writes());
    yard.wait_until_runs(&alone);
    first.kill();
    other.kill();
    let other = yard.worker(place, "two", &slots);
    let first = yard.worker(place, "one", &slots);
    yard.until("both look around", || other.is_ready() && first.is_ready());
    yard.witness.let_go(&alone);
    let all: Vec<String> = all.into_iter().chain([alone]).collect();
    yard.wait_for_ends(&all);
    first.drain(yard);
    other.drain(yard);
    for id in &all {
        assert_states(yard, id, &[SUCCEEDED]);
        assert_eq!(yard.witness.starts(id), 1, "{id}");
    }
    assert_eq!(most_at_once(&yard.witness.seen(), |_| 1), 2);
    yard.check(&all);
}

fn cleaned(yard: &Yard) {
    let slots = ["--slots", "3", "--memory", "768M"];
    let workers: Vec<_> = yard
        .places
        .iter()
        .map(|place| yard.worker(place, "w", &slots))
        .collect();
    let stop = AtomicBool::new(false);
    let clean = || {
        let mut times = 0;
        while !stop.load(Ordering::Relaxed) {
            for place in &yard.places {
                let said = yard.ask(place, &["gc"]);
                said.good();
                times += 1;
            }
        }
        times
    };
    let (all, times) = std::thread::scope(|scope| {
        let cleaners = [scope.spawn(clean), scope.spawn(clean)];
        let waits = yard.submit("waits", &[], &waits_and_writes());
        yard.wait_until_runs(&waits);
        let mut all: Vec<String> = (0..15)
            .map(|n| yard.submit(&n.to_string(), &[], "echo \"$0\" > a.txt\n"))
            .collect();
        // A runner that is killed is finished once, whoever is first at it.
        let lost = yard.submit("lost", &["--retries", "0"], &waits_and_writes());
        yard.wait_until_runs(&lost);
        yard.kill_runner(&lost);
        all.push(lost);
        yard.wait_for_ends(&all);
        assert!(yard.witness.running().contains(&waits));
        yard.witness.let_go(&waits);
        all.push(waits);
        yard.wait_for_ends(&all);
        stop.store(true, Ordering::Relaxed);
        let times: usize = cleaners
            .into_iter()
            .map(|cleaner| cleaner.join().unwrap())
            .sum();
        (all, times)
    });
    workers.into_iter().for_each(|worker| worker.drain(yard));
    for id in &all {
        let must = if id.ends_with("lost") {
            LOST
        } else {
            SUCCEEDED
        };
        assert_states(yard, id, &[must]);
        assert_eq!(yard.witness.starts(id), 1, "{id}");
    }
    say(&format!(
        "{}: cleaned {times} times beside {} analyses",
        yard.bench.stem,
        all.len()
    ));
    yard.check(&all);
}
