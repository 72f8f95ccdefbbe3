//! Admission: a worker never runs more at once than its capacity, takes requests in the right order, and parks a request
//! that can never fit, with the reason.

use std::collections::BTreeMap;

use store::State;
use testkit::command::finish;
use testkit::trial;

use crate::cluster::TestCluster;
use crate::execution_monitor::{ExecutionEvent, ObservedEvent, most_at_once};
use crate::report;
use crate::workers::{SUCCEEDED, assert_states, waits_and_writes};

/// A plain user has no cgroup of its own. Admission counts the same values anyway.
const ALLOW_DEGRADED: [&str; 4] = ["--allow-degraded", "memory", "--allow-degraded", "cpus"];

trial!(Everyone, sums_are_never_exceeded_on_sqlite);
fn sums_are_never_exceeded_on_sqlite() {
    sums(&TestCluster::sqlite("sums"));
}

trial!(Everyone, sums_are_never_exceeded_on_postgres);
fn sums_are_never_exceeded_on_postgres() {
    sums(&TestCluster::postgres("sums"));
}

fn sums(cluster: &TestCluster) {
    const MEMORY: [u64; 5] = [64, 128, 192, 256, 320];
    const CPUS: [&str; 4] = ["0.25", "0.5", "1", "1.5"];
    let mut asked: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for n in 0..20 {
        let (memory, cpus) = (MEMORY[n % MEMORY.len()], CPUS[n % CPUS.len()]);
        let options = ["--memory", &format!("{memory}M"), "--cpus", cpus];
        let options: Vec<&str> = options.iter().chain(&ALLOW_DEGRADED).copied().collect();
        let id = cluster.submit(&n.to_string(), &options, "sleep 0.2\n");
        let milli = (cpus.parse::<f64>().unwrap() * 1000.0) as u64;
        asked.insert(id, (memory, milli));
    }
    let given = ["--slots", "6", "--memory", "512M", "--cpus", "2"];
    let workers: Vec<_> = cluster
        .machines
        .iter()
        .map(|machine| cluster.worker(machine, "w", &given))
        .collect();
    let all: Vec<String> = asked.keys().cloned().collect();
    cluster.wait_for_ends(&all);
    workers.into_iter().for_each(|worker| worker.drain(cluster));
    // Check each machine separately. An analysis ran on the machine that has its workspace.
    let seen = cluster.monitor.seen();
    for machine in 0..cluster.machines.len() {
        let is_here = |id: &str| {
            let made = seen
                .iter()
                .find(|s| s.what == ExecutionEvent::Made && s.id == id);
            made.and_then(|made| made.root) == Some(machine)
        };
        let here = |s: &ObservedEvent| u64::from(is_here(&s.id));
        let (slots, memory, cpus) = (
            most_at_once(&seen, here),
            most_at_once(&seen, |s| here(s) * asked[&s.id].0),
            most_at_once(&seen, |s| here(s) * asked[&s.id].1),
        );
        assert!(
            slots <= 6 && memory <= 512 && cpus <= 2000,
            "{slots} {memory}M {cpus}m"
        );
        report(&format!(
            "{}: at most {slots} at once, {memory}M, {cpus} thousandths of a CPU",
            cluster.deployment.stem
        ));
    }
    for id in &all {
        assert_states(cluster, id, &[SUCCEEDED]);
        assert_eq!(cluster.monitor.starts(id), 1, "{id}");
    }
    cluster.check(&all);
}

trial!(Everyone, a_request_that_never_fits_ends_with_the_reason);
fn a_request_that_never_fits_ends_with_the_reason() {
    never_fits(&TestCluster::sqlite("fits"));
}

fn never_fits(cluster: &TestCluster) {
    let large: Vec<&str> = ["--memory", "2G"]
        .iter()
        .chain(&ALLOW_DEGRADED)
        .copied()
        .collect();
    // No worker has reported its size yet, so the request waits.
    let parked = cluster.submit("parked", &large, "true\n");
    // A worker looks for requests to park when it starts, and then rarely. The request must have waited long enough by the
    // time the worker starts.
    cluster.until("it has waited", || {
        let now = cluster.overview().unwrap();
        now.next
            .first()
            .is_some_and(|first| now.now_ms > first.queued_ms + 1000)
    });
    let given = ["--slots", "2", "--memory", "512M", "--park-after", "1s"];
    let worker = cluster.worker(&cluster.machines[0], "w", &given);
    let fits = cluster.submit("fits", &[], "true\n");
    cluster.until("what fits passes it", || cluster.has_ended(&fits));
    // The worker has reported its size, so the next such request is refused.
    let words = cluster.words(&cluster.id("refused"), "true\n");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let all: Vec<&str> = ["submit"]
        .iter()
        .chain(&large)
        .chain(&words)
        .copied()
        .collect();
    let refused = cluster.ask(&cluster.machines[0], &all);
    assert_eq!(refused.code(), 125, "{}", refused.err());
    assert!(
        refused.err().contains("2 GiB") || refused.err().contains("2G"),
        "{}",
        refused.err()
    );
    cluster.until("it is parked", || cluster.has_ended(&parked));
    assert_states(cluster, &parked, &[(State::Error, "does_not_fit")]);
    assert_eq!(cluster.event_names(&parked, 1).last().unwrap(), "parked");
    assert_eq!(cluster.monitor.starts(&parked), 0);
    worker.drain(cluster);
    cluster.check(&[parked, fits]);
}

trial!(Everyone, priorities_are_kept_on_sqlite);
fn priorities_are_kept_on_sqlite() {
    priorities(&TestCluster::sqlite("prio"));
}

fn priorities(cluster: &TestCluster) {
    let gate = cluster.submit("gate", &[], &waits_and_writes());
    let worker = cluster.worker(
        &cluster.machines[0],
        "w",
        &["--slots", "1", "--memory", "256M"],
    );
    cluster.wait_until_runs(&gate);
    let asked = [("c", "0"), ("a", "9"), ("d", "0"), ("b", "5"), ("e", "0")];
    let mut all: Vec<String> = asked
        .iter()
        .map(|(name, priority)| cluster.submit(name, &["--priority", priority], "true\n"))
        .collect();
    cluster.monitor.let_go(&gate);
    all.push(gate);
    cluster.wait_for_ends(&all);
    worker.drain(cluster);
    let must = ["gate", "a", "b", "c", "d", "e"].map(|name| cluster.id(name));
    assert_eq!(order(cluster), must);
    cluster.check(&all);
}

/// The ids of the analyses, in the order in which their workspaces were made.
fn order(cluster: &TestCluster) -> Vec<String> {
    let seen = cluster.monitor.seen().into_iter();
    seen.filter(|s| s.what == ExecutionEvent::Made)
        .map(|s| s.id)
        .collect()
}

trial!(Root, submitters_take_turns_on_postgres);
fn submitters_take_turns_on_postgres() {
    turns(&TestCluster::postgres("turns"));
}

/// Twelve analyses of one account do not delay the one of another account.
fn turns(cluster: &TestCluster) {
    let gate = cluster.submit("gate", &[], &waits_and_writes());
    let worker = cluster.worker(
        &cluster.machines[0],
        "w",
        &["--slots", "1", "--memory", "256M"],
    );
    cluster.wait_until_runs(&gate);
    let mut all: Vec<String> = (0..12)
        .map(|n| cluster.submit(&format!("many-{n}"), &[], "true\n"))
        .collect();
    // Root submits on behalf of another account, which may not read the trial's files.
    let one = cluster.id("one");
    let mut command = cluster
        .deployment
        .fumehood(&cluster.machines[1], ["submit", "--id", &one, "--", "true"]);
    command.env("SUDO_USER", "nobody");
    finish(command).good();
    cluster.monitor.let_go(&gate);
    all.extend([gate, one.clone()]);
    cluster.wait_for_ends(&all);
    worker.drain(cluster);
    let machine = order(cluster).iter().position(|id| *id == one).unwrap();
    assert!(machine <= 2, "it ran as number {machine}");
    cluster.check(&all);
}
