//! P12, P16 and P18 with a queue: workers, runners and the database are killed one at a time, and each trial knows the exact
//! result. `queue_under_kills.rs` kills them at random.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::process::Signal;
use store::State;
use testkit::command::finish;
use testkit::trial;

use crate::cluster::{TestCluster, WAIT};
use crate::execution_monitor::most_at_once;
use crate::report;

/// A script that waits until the trial lets it go on, and then writes one output.
pub fn waits_and_writes() -> String {
    format!("{WAIT}echo \"$0\" > a.txt\n")
}

pub const SUCCEEDED: (State, &str) = (State::Succeeded, "exit");
pub const LOST: (State, &str) = (State::Error, "runner_lost");

#[track_caller]
pub fn assert_states(cluster: &TestCluster, id: &str, must: &[(State, &str)]) {
    let states = cluster.states(id);
    let is: Vec<(State, &str)> = states.iter().map(|(s, r)| (*s, r.as_str())).collect();
    assert_eq!(
        is,
        must,
        "{id}: {:?}\n{}",
        cluster.attempts(id),
        cluster.everything()
    );
}

trial!(Everyone, a_killed_worker_leaves_its_runners_on_sqlite);
fn a_killed_worker_leaves_its_runners_on_sqlite() {
    killed_worker(&TestCluster::sqlite("kw"));
}

trial!(Everyone, a_killed_worker_leaves_its_runners_on_postgres);
fn a_killed_worker_leaves_its_runners_on_postgres() {
    killed_worker(&TestCluster::postgres("kw"));
}

fn killed_worker(cluster: &TestCluster) {
    let machine = cluster.machines.last().unwrap();
    let slots = ["--slots", "3", "--memory", "768M"];
    let submit = |name: &str| cluster.submit(name, &[], &waits_and_writes());
    let first: Vec<String> = ["a", "b", "c"].map(submit).into();
    let worker = cluster.worker(machine, "w", &slots);
    first.iter().for_each(|id| cluster.wait_until_runs(id));
    worker.kill();
    let more: Vec<String> = ["d", "e", "f"].map(submit).into();
    // The first analysis commits while no worker runs.
    cluster.monitor.let_go(&first[0]);
    cluster.until("it ends without a worker", || cluster.has_ended(&first[0]));
    assert_states(cluster, &first[0], &[SUCCEEDED]);
    cluster.until("its runner ends", || cluster.runner_of(&first[0]).is_none());
    assert_eq!(cluster.queued(), 3, "nobody was there to take any");
    let worker = cluster.worker(machine, "w", &slots);
    cluster.until("a slot is free, and used", || {
        cluster.monitor.running().len() == 3
    });
    assert!(
        worker.output().contains("2 analyses run on from before"),
        "{}",
        worker.output()
    );
    for id in first[1..].iter().chain(&more) {
        cluster.wait_until_runs(id);
        cluster.monitor.let_go(id);
    }
    let all: Vec<String> = first.into_iter().chain(more).collect();
    cluster.wait_for_ends(&all);
    worker.drain(cluster);
    let seen = cluster.monitor.seen();
    assert_eq!(most_at_once(&seen, |_| 1), 3);
    for id in &all {
        assert_states(cluster, id, &[SUCCEEDED]);
        assert_eq!(cluster.monitor.starts(id), 1, "{id}");
        assert_eq!(cluster.attempts(id)[0].outputs_count, Some(1), "{id}");
    }
    cluster.check(&all);
}

trial!(Everyone, a_killed_runner_is_tried_again_on_sqlite);
fn a_killed_runner_is_tried_again_on_sqlite() {
    killed_runner(&TestCluster::sqlite("kr"));
}

trial!(Everyone, a_killed_runner_is_tried_again_on_postgres);
fn a_killed_runner_is_tried_again_on_postgres() {
    killed_runner(&TestCluster::postgres("kr"));
}

fn killed_runner(cluster: &TestCluster) {
    let worker = cluster.worker(
        &cluster.machines[0],
        "w",
        &["--slots", "3", "--memory", "768M"],
    );
    let script = format!(
        "echo half > half.txt\nsleep 1000 &\nsleep 1000 &\n{}",
        waits_and_writes()
    );
    let once = cluster.submit("once", &["--retries", "2"], &script);
    let never = cluster.submit("never", &["--retries", "0"], &script);
    let always = cluster.submit("always", &["--retries", "2"], &script);
    for id in [&once, &never, &always] {
        cluster.wait_until_runs(id);
        let half = cluster.machines[0].workspace(id).join("half.txt");
        cluster.until("it has written a file", || half.exists());
        cluster.kill_runner(id);
        cluster.until("its analysis dies with it", || {
            !cluster.monitor.running().contains(id)
        });
    }
    cluster.until("it is parked", || cluster.has_ended(&never));
    assert_states(cluster, &never, &[LOST]);
    assert_eq!(cluster.event_names(&never, 1).last().unwrap(), "parked");
    cluster.until("it is tried again", || cluster.monitor.starts(&once) == 2);
    cluster.monitor.let_go(&once);
    for turn in 2..=3 {
        cluster.until("it is tried again", || {
            cluster.monitor.starts(&always) == turn
        });
        cluster.kill_runner(&always);
    }
    let all = [once, never, always];
    cluster.wait_for_ends(&all);
    worker.drain(cluster);
    let [once, never, always] = &all;
    assert_states(cluster, once, &[LOST, SUCCEEDED]);
    assert_states(cluster, never, &[LOST]);
    assert_states(cluster, always, &[LOST, LOST, LOST]);
    let second = cluster
        .events(once)
        .into_iter()
        .find(|e| e.attempt == 2)
        .unwrap();
    assert_eq!(
        (second.event.as_str(), second.reason.as_deref()),
        ("retried", Some("runner_lost"))
    );
    assert_eq!(cluster.event_names(always, 3).last().unwrap(), "parked");
    // The lost attempt's outputs are kept, and recorded as incomplete.
    let lost = &cluster.attempts(once)[0];
    assert_eq!(
        (lost.outputs_count, lost.complete),
        (Some(1), Some(false)),
        "{lost:?}"
    );
    cluster.check(&all);
}

trial!(Everyone, cancel_reaches_another_home_on_sqlite);
fn cancel_reaches_another_home_on_sqlite() {
    cancelled(&TestCluster::sqlite("cn"));
}

trial!(Everyone, cancel_reaches_another_machine_on_postgres);
fn cancel_reaches_another_machine_on_postgres() {
    cancelled(&TestCluster::postgres("cn"));
}

fn cancelled(cluster: &TestCluster) {
    let (here, there) = (&cluster.machines[0], cluster.machines.last().unwrap());
    let script = format!("echo half > half.txt\necho written\n{}", waits_and_writes());
    let slots = ["--slots", "2", "--memory", "512M"];
    let worker = cluster.worker(there, "w", &slots);
    let running = cluster.submit("running", &[], &script);
    let orphan = cluster.submit("orphan", &[], &script);
    cluster.wait_until_runs(&running);
    cluster.wait_until_runs(&orphan);
    let queued = cluster.submit("queued", &[], &script);
    // `cancel` runs in a home without these runs, even on one machine, so the runner learns of it only from the database.
    let elsewhere = cluster.deployment.another_machine(7);
    for id in [&running, &orphan] {
        cluster.until("it has written", || {
            cluster
                .deployment
                .fumehood(there, ["logs", id])
                .output()
                .unwrap()
                .stdout
                .ends_with(b"written\n")
        });
    }
    cluster.ask(&elsewhere, &["cancel", &queued]).good();
    assert_states(cluster, &queued, &[(State::Cancelled, "cancelled")]);
    let began = Instant::now();
    cluster.ask(&elsewhere, &["cancel", &running]).good();
    cluster.until("it ends", || !cluster.monitor.running().contains(&running));
    let by_worker = began.elapsed();
    // Without a worker, only the runner itself can see the cancellation.
    worker.kill();
    let began = Instant::now();
    cluster.ask(&elsewhere, &["cancel", &orphan]).good();
    cluster.until("it ends", || !cluster.monitor.running().contains(&orphan));
    let by_itself = began.elapsed();
    report(&format!(
        "{}: cancelled within {by_worker:?} by the worker, {by_itself:?} by the runner alone",
        cluster.deployment.stem
    ));
    let all = [running, orphan, queued];
    cluster.wait_for_ends(&all);
    for id in &all[..2] {
        assert_states(cluster, id, &[(State::Cancelled, "cancelled")]);
        let attempt = &cluster.attempts(id)[0];
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
        assert_eq!(cluster.event_names(id, 1), must, "{id}");
    }
    assert_eq!(cluster.monitor.starts(&all[2]), 0);
    // An ended analysis cannot be cancelled.
    assert_eq!(cluster.ask(here, &["cancel", &all[0]]).code(), 125);
    cluster.worker(there, "w", &slots).drain(cluster);
    cluster.check(&all);
}

/// Submits two analyses that wait to be let go, and waits until both run.
fn two_running(cluster: &TestCluster) -> [String; 2] {
    let both = ["a", "b"].map(|name| cluster.submit(name, &[], &waits_and_writes()));
    both.iter().for_each(|id| cluster.wait_until_runs(id));
    both
}

trial!(Everyone, a_worker_drains_on_sqlite);
fn a_worker_drains_on_sqlite() {
    drained(&TestCluster::sqlite("dr"));
}

trial!(Everyone, a_worker_drains_on_postgres);
fn a_worker_drains_on_postgres() {
    drained(&TestCluster::postgres("dr"));
}

fn drained(cluster: &TestCluster) {
    let machine = &cluster.machines[0];
    let slots = ["--slots", "2", "--memory", "512M"];
    // On SIGTERM the worker takes nothing more and waits for its running analyses.
    let mut worker = cluster.worker(machine, "w", &slots);
    let [a, b] = two_running(cluster);
    let later = cluster.submit("later", &[], "echo \"$0\" > a.txt\n");
    worker.signal(Signal::TERM);
    cluster.until("it drains", || worker.output().contains("draining: "));
    cluster.monitor.let_go(&a);
    cluster.until("one ends", || cluster.has_ended(&a));
    assert!(!worker.has_ended(), "one still runs");
    assert_eq!(cluster.queued(), 1, "a slot is free, and nothing is taken");
    // On a second SIGTERM the worker exits at once, and its runner continues.
    worker.signal(Signal::TERM);
    let output = worker.output();
    assert_eq!(worker.end(cluster), 0, "{output}");
    assert!(cluster.monitor.running().contains(&b));
    cluster.monitor.let_go(&b);
    cluster.until("it ends without a worker", || cluster.has_ended(&b));
    assert_eq!(cluster.queued(), 1);
    // On SIGINT the worker exits at once.
    let worker = cluster.worker(machine, "w", &slots);
    cluster.until("it is taken", || cluster.has_ended(&later));
    let c = cluster.submit("c", &[], &waits_and_writes());
    cluster.wait_until_runs(&c);
    worker.signal(Signal::INT);
    assert_eq!(worker.end(cluster), 0);
    assert!(cluster.monitor.running().contains(&c));
    // `worker --drain` makes the running worker drain, and waits for its end.
    let worker = cluster.worker(machine, "w", &slots);
    cluster.until("it listens", || worker.is_ready());
    let drainer = cluster.worker(machine, "w", &["--drain"]);
    cluster.until("it waits", || {
        drainer.has_printed("the worker w is told to drain; waiting for it")
    });
    // Before the worker has seen the request to drain, it may still claim an attempt.
    cluster.until("it drains", || worker.has_printed("draining: "));
    let last = cluster.submit("last", &[], &waits_and_writes());
    assert!(cluster.monitor.running().contains(&c));
    cluster.monitor.let_go(&c);
    assert_eq!(worker.end(cluster), 0);
    assert_eq!(drainer.end(cluster), 0);
    assert_eq!(
        cluster.queued(),
        1,
        "a draining worker has taken an attempt"
    );
    cluster.ask(machine, &["cancel", &last]).good();
    for id in [&a, &b, &later, &c] {
        assert_states(cluster, id, &[SUCCEEDED]);
        assert_eq!(cluster.monitor.starts(id), 1, "{id}");
    }
    cluster.check(&[a, b, later, c, last]);
}

trial!(
    Everyone,
    two_workers_cannot_have_one_name_and_two_names_share_the_queue
);
fn two_workers_cannot_have_one_name_and_two_names_share_the_queue() {
    names(&TestCluster::sqlite("nm"));
}

fn names(cluster: &TestCluster) {
    let machine = &cluster.machines[0];
    let slots = ["--slots", "1", "--memory", "256M"];
    let first = cluster.worker(machine, "one", &slots);
    cluster.until("it holds its name", || first.is_ready());
    let mut second = cluster
        .deployment
        .fumehood(machine, ["worker", "--name", "one"]);
    second.args(slots);
    finish(second).refused(125, "a worker named one is running already");
    let other = cluster.worker(machine, "two", &slots);
    // Each worker has one slot, so two running analyses have different workers.
    let [a, b] = two_running(cluster);
    let workers: Vec<Option<String>> = [&a, &b]
        .map(|id| {
            let claimed = cluster
                .events(id)
                .into_iter()
                .find(|e| e.event == "claimed");
            claimed.unwrap().by
        })
        .into();
    assert_ne!(workers[0], workers[1]);
    let more: Vec<String> = (0..6)
        .map(|n| cluster.submit(&n.to_string(), &[], "echo \"$0\" > a.txt\n"))
        .collect();
    cluster.monitor.let_go(&a);
    cluster.monitor.let_go(&b);
    let all: Vec<String> = [a, b].into_iter().chain(more).collect();
    cluster.wait_for_ends(&all);
    // Another worker in the same home does not take over an attempt whose worker is dead and whose runner lives.
    let alone = cluster.submit("alone", &[], &waits_and_writes());
    cluster.wait_until_runs(&alone);
    first.kill();
    other.kill();
    let other = cluster.worker(machine, "two", &slots);
    let first = cluster.worker(machine, "one", &slots);
    cluster.until("both look around", || other.is_ready() && first.is_ready());
    cluster.monitor.let_go(&alone);
    let all: Vec<String> = all.into_iter().chain([alone]).collect();
    cluster.wait_for_ends(&all);
    first.drain(cluster);
    other.drain(cluster);
    for id in &all {
        assert_states(cluster, id, &[SUCCEEDED]);
        assert_eq!(cluster.monitor.starts(id), 1, "{id}");
    }
    assert_eq!(most_at_once(&cluster.monitor.seen(), |_| 1), 2);
    cluster.check(&all);
}

trial!(Everyone, cleaning_beside_workers_disturbs_nothing_on_sqlite);
fn cleaning_beside_workers_disturbs_nothing_on_sqlite() {
    cleaned(&TestCluster::sqlite("gc"));
}

trial!(
    Everyone,
    cleaning_beside_workers_disturbs_nothing_on_postgres
);
fn cleaning_beside_workers_disturbs_nothing_on_postgres() {
    cleaned(&TestCluster::postgres("gc"));
}

fn cleaned(cluster: &TestCluster) {
    let slots = ["--slots", "3", "--memory", "768M"];
    let workers: Vec<_> = cluster
        .machines
        .iter()
        .map(|machine| cluster.worker(machine, "w", &slots))
        .collect();
    let stop = AtomicBool::new(false);
    let clean = || {
        let mut times = 0;
        while !stop.load(Ordering::Relaxed) {
            for machine in &cluster.machines {
                let cleaned = cluster.ask(machine, &["gc"]);
                cleaned.good();
                times += 1;
            }
        }
        times
    };
    let (all, times) = std::thread::scope(|scope| {
        let cleaners = [scope.spawn(clean), scope.spawn(clean)];
        let waits = cluster.submit("waits", &[], &waits_and_writes());
        cluster.wait_until_runs(&waits);
        let mut all: Vec<String> = (0..15)
            .map(|n| cluster.submit(&n.to_string(), &[], "echo \"$0\" > a.txt\n"))
            .collect();
        // The attempt of a killed runner is finished exactly once, by whichever process is first.
        let lost = cluster.submit("lost", &["--retries", "0"], &waits_and_writes());
        cluster.wait_until_runs(&lost);
        cluster.kill_runner(&lost);
        all.push(lost);
        cluster.wait_for_ends(&all);
        assert!(cluster.monitor.running().contains(&waits));
        cluster.monitor.let_go(&waits);
        all.push(waits);
        cluster.wait_for_ends(&all);
        stop.store(true, Ordering::Relaxed);
        let times: usize = cleaners
            .into_iter()
            .map(|cleaner| cleaner.join().unwrap())
            .sum();
        (all, times)
    });
    workers.into_iter().for_each(|worker| worker.drain(cluster));
    for id in &all {
        let must = if id.ends_with("lost") {
            LOST
        } else {
            SUCCEEDED
        };
        assert_states(cluster, id, &[must]);
        assert_eq!(cluster.monitor.starts(id), 1, "{id}");
    }
    report(&format!(
        "{}: cleaned {times} times beside {} analyses",
        cluster.deployment.stem,
        all.len()
    ));
    cluster.check(&all);
}
