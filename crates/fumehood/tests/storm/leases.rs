//! Leases on PostgreSQL. A runner that cannot renew its lease ends its analysis, and a worker gives up an attempt whose lease
//! has expired, so that an analysis runs in at most one place.

use rustix::process::Signal;
use store::State;
use testkit::trial;

use crate::cluster::TestCluster;
use crate::database_rows::{number, text, truth};
use crate::execution_monitor::{ExecutionEvent, most_at_once};
use crate::outages::own_server;
use crate::workers::{LOST, SUCCEEDED, assert_states, waits_and_writes};

/// A runner can renew a lease of 20 s even on a machine where a hundred others run. With 5 s, leases of live runners
/// expired.
const SLOTS: [&str; 6] = ["--slots", "2", "--memory", "512M", "--lease", "20s"];

trial!(
    Everyone,
    the_late_result_of_a_stopped_runner_is_stored_beside_the_retry
);
/// Stopping the runner with SIGSTOP stands for a machine that was suspended.
fn the_late_result_of_a_stopped_runner_is_stored_beside_the_retry() {
    let cluster = &TestCluster::postgres("stopped");
    let [here, there] = &cluster.machines[..] else {
        unreachable!()
    };
    let first = cluster.worker(here, "w", &SLOTS);
    let script = format!("echo half > half.txt\n{}", waits_and_writes());
    let id = cluster.submit("late", &[], &script);
    cluster.wait_until_runs(&id);
    let runner = cluster.runner_of(&id).unwrap();
    first.kill();
    assert!(runner.signal(Signal::STOP));
    let second = cluster.worker(there, "w", &SLOTS);
    // The other machine gives the attempt up and runs the analysis again. The first program continues while its runner is
    // stopped.
    cluster.until("it is tried again", || {
        cluster.attempts(&id).len() == 2 && cluster.monitor.starts(&id) == 2
    });
    assert_eq!(cluster.states(&id)[0], (LOST.0, LOST.1.to_owned()));
    assert!(second.output().contains("gave up "), "{}", second.output());
    // Control: the monitor does see two programs at once, so it would have reported them in the other trials too.
    assert_eq!(most_at_once(&cluster.monitor.seen(), |_| 1), 2);
    assert!(runner.signal(Signal::CONT));
    cluster.until("the late one ends", || {
        let seen = cluster.monitor.seen();
        seen.iter()
            .any(|s| s.id == id && s.what == ExecutionEvent::Ended)
    });
    // The late result is stored as another attempt, and does not change the current one.
    cluster.until("it is stored", || cluster.attempts(&id).len() == 3);
    let second_state = cluster.attempts(&id)[1].state;
    assert_eq!(second_state, State::Running, "{}", cluster.everything());
    cluster.monitor.let_go(&id);
    cluster.wait_for_ends(std::slice::from_ref(&id));
    let first = cluster.worker(here, "w", &SLOTS);
    first.drain(cluster);
    second.drain(cluster);
    let rows = cluster.deployment.rows();
    let of = |attempt: i64| {
        let rows = rows.of("attempts", &id);
        rows.into_iter()
            .find(|row| number(row, "attempt") == Some(attempt))
            .unwrap()
    };
    let must = [
        (1, "error", "runner_lost", false),
        (2, "succeeded", "exit", false),
        (3, "error", "lease_lost", true),
    ];
    for (attempt, state, reason, superseded) in must {
        let row = of(attempt);
        let is = (
            text(row, "state"),
            text(row, "reason"),
            truth(row, "superseded"),
        );
        assert_eq!(is, (Some(state), Some(reason), Some(superseded)), "{row:?}");
    }
    let kept: Vec<_> = rows
        .of("outputs", &id)
        .iter()
        .map(|row| number(row, "attempt"))
        .collect();
    assert_eq!(
        kept.iter().filter(|n| **n == Some(3)).count(),
        1,
        "the late one's output"
    );
    assert_eq!(kept.iter().filter(|n| **n == Some(2)).count(), 2);
    let shown = cluster.ask(there, &["show", &id]).good();
    assert!(shown.contains("succeeded"), "{shown}");
    assert!(rows.all("queue").is_empty() && rows.all("workers").is_empty());
    cluster.check_nothing_left();
}

trial!(
    Everyone,
    a_server_outage_longer_than_the_lease_ends_the_attempt_as_lease_lost
);
fn a_server_outage_longer_than_the_lease_ends_the_attempt_as_lease_lost() {
    let server = own_server();
    let cluster = &TestCluster::on(server, "away");
    let worker = cluster.worker(&cluster.machines[0], "w", &SLOTS);
    let id = cluster.submit(
        "long",
        &[],
        &format!("echo half > half.txt\n{}", waits_and_writes()),
    );
    cluster.wait_until_runs(&id);
    server.kill();
    // The runner cannot reach the server. It ends the analysis because it cannot renew the lease.
    cluster.until("it ends while the server is away", || {
        !cluster.monitor.running().contains(&id)
    });
    cluster.monitor.let_go(&id);
    server.start_again();
    cluster.wait_for_ends(std::slice::from_ref(&id));
    worker.drain(cluster);
    assert_states(cluster, &id, &[(State::Error, "lease_lost"), SUCCEEDED]);
    let lost = &cluster.attempts(&id)[0];
    let rows = cluster.deployment.rows();
    let first = rows
        .of("attempts", &id)
        .into_iter()
        .find(|row| number(row, "attempt") == Some(1))
        .unwrap();
    // Compares the runner's clock with the server's. Here both are the clock of this machine.
    assert!(
        number(first, "ended_ms").unwrap() < number(first, "lease_ms").unwrap(),
        "{first:?}"
    );
    assert_eq!(
        (lost.outputs_count, lost.complete),
        (Some(1), Some(false)),
        "{lost:?}"
    );
    cluster.check(&[id]);
}

trial!(Everyone, a_short_server_outage_costs_no_attempt);
fn a_short_server_outage_costs_no_attempt() {
    let server = own_server();
    let cluster = &TestCluster::on(server, "moment");
    let worker = cluster.worker(
        &cluster.machines[0],
        "w",
        &["--slots", "2", "--memory", "512M"],
    );
    let id = cluster.submit("long", &[], &waits_and_writes());
    cluster.wait_until_runs(&id);
    for _ in 0..3 {
        server.kill();
        server.start_again();
        cluster.until("the database answers", || cluster.queued() == 0);
    }
    let next = cluster.submit("next", &[], "echo \"$0\" > a.txt\n");
    cluster.until("work is taken again", || cluster.has_ended(&next));
    assert!(
        cluster.monitor.running().contains(&id),
        "{}",
        cluster.everything()
    );
    // The server becomes unreachable just as the program ends.
    cluster.monitor.let_go(&id);
    cluster.until("it ends", || !cluster.monitor.running().contains(&id));
    server.kill();
    server.start_again();
    let all = [id, next];
    cluster.wait_for_ends(&all);
    worker.drain(cluster);
    for id in &all {
        assert_states(cluster, id, &[SUCCEEDED]);
        assert_eq!(cluster.monitor.starts(id), 1);
    }
    cluster.check(&all);
    let seen = cluster.monitor.seen();
    assert_eq!(
        seen.iter()
            .filter(|s| s.what == ExecutionEvent::Made)
            .count(),
        2
    );
}
