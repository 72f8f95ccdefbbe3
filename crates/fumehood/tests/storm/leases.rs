//! Leases on PostgreSQL: who may not know that an attempt is still its own ends it, and who does not hear of its runner any
//! more gives it up, so that it runs in one place at most.

use rustix::process::Signal;
use store::State;

use crate::outages::own_server;
use crate::rows::{number, text, truth};
use crate::witness::{What, most_at_once};
use crate::workers::{LOST, SUCCEEDED, assert_states, waits_and_writes};
use crate::yard::Yard;
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    (
        "a_server_away_for_longer_than_the_lease",
        For::Everyone,
        server_away,
    ),
    (
        "a_server_away_for_a_moment",
        For::Everyone,
        server_restarted,
    ),
    (
        "a_stopped_runner_is_given_up_and_comes_late",
        For::Everyone,
        stopped_runner,
    ),
];

/// Long enough for a runner to renew it on a machine where a hundred others run: what must not be lost here was lost with 5 s.
const SLOTS: [&str; 6] = ["--slots", "2", "--memory", "512M", "--lease", "20s"];

/// All machines but one are asleep, as far as this runner goes.
fn stopped_runner() {
    let yard = &Yard::postgres("stopped");
    let [here, there] = &yard.places[..] else {
        unreachable!()
    };
    let first = yard.worker(here, "w", &SLOTS);
    let script = format!("echo half > half.txt\n{}", waits_and_writes());
    let id = yard.submit("late", &[], &script);
    yard.wait_until_runs(&id);
    let runner = yard.runner_of(&id).unwrap();
    first.kill();
    assert!(runner.signal(Signal::STOP));
    let second = yard.worker(there, "w", &SLOTS);
    // The other machine gives it up, and runs it again. This one's program runs on as long as its runner is stopped.
    yard.until("it is tried again", || {
        yard.attempts(&id).len() == 2 && yard.witness.starts(&id) == 2
    });
    assert_eq!(yard.states(&id)[0], (LOST.0, LOST.1.to_owned()));
    assert!(second.said().contains("gave up "), "{}", second.said());
    // The witness would have seen it, had any of the other trials had two at once.
    assert_eq!(most_at_once(&yard.witness.seen(), |_| 1), 2);
    assert!(runner.signal(Signal::CONT));
    yard.until("the late one ends", || {
        let seen = yard.witness.seen();
        seen.iter().any(|s| s.id == id && s.what == What::Ended)
    });
    // What it had is stored beside, and changes nothing.
    yard.until("it is stored", || yard.attempts(&id).len() == 3);
    let second_state = yard.attempts(&id)[1].state;
    assert_eq!(second_state, State::Running, "{}", yard.everything());
    yard.witness.let_go(&id);
    yard.wait_for_ends(std::slice::from_ref(&id));
    let first = yard.worker(here, "w", &SLOTS);
    first.drain(yard);
    second.drain(yard);
    let rows = yard.bench.rows();
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
    let shown = yard.ask(there, &["show", &id]).good();
    assert!(shown.contains("succeeded"), "{shown}");
    assert!(rows.all("queue").is_empty() && rows.all("workers").is_empty());
    yard.check_nothing_left();
}

fn server_away() {
    let server = own_server();
    let yard = &Yard::on(server, "away");
    let worker = yard.worker(&yard.places[0], "w", &SLOTS);
    let id = yard.submit(
        "long",
        &[],
        &format!("echo half > half.txt\n{}", waits_and_writes()),
    );
    yard.wait_until_runs(&id);
    server.kill();
    // Nobody can tell it anything: it ends because it cannot know that it is still its own.
    yard.until("it ends while the server is away", || {
        !yard.witness.running().contains(&id)
    });
    yard.witness.let_go(&id);
    server.start_again();
    yard.wait_for_ends(std::slice::from_ref(&id));
    worker.drain(yard);
    assert_states(yard, &id, &[(State::Error, "lease_lost"), SUCCEEDED]);
    let lost = &yard.attempts(&id)[0];
    let rows = yard.bench.rows();
    let first = rows
        .of("attempts", &id)
        .into_iter()
        .find(|row| number(row, "attempt") == Some(1))
        .unwrap();
    // By two clocks that are one here: the runner's, and the server's.
    assert!(
        number(first, "ended_ms").unwrap() < number(first, "lease_ms").unwrap(),
        "{first:?}"
    );
    assert_eq!(
        (lost.outputs_count, lost.complete),
        (Some(1), Some(false)),
        "{lost:?}"
    );
    yard.check(&[id]);
}

fn server_restarted() {
    let server = own_server();
    let yard = &Yard::on(server, "moment");
    let worker = yard.worker(&yard.places[0], "w", &["--slots", "2", "--memory", "512M"]);
    let id = yard.submit("long", &[], &waits_and_writes());
    yard.wait_until_runs(&id);
    for _ in 0..3 {
        server.kill();
        server.start_again();
        yard.until("the database answers", || yard.queued() == 0);
    }
    let next = yard.submit("next", &[], "echo \"$0\" > a.txt\n");
    yard.until("work is taken again", || yard.has_ended(&next));
    assert!(
        yard.witness.running().contains(&id),
        "{}",
        yard.everything()
    );
    // The server goes away just as it ends.
    yard.witness.let_go(&id);
    yard.until("it ends", || !yard.witness.running().contains(&id));
    server.kill();
    server.start_again();
    let all = [id, next];
    yard.wait_for_ends(&all);
    worker.drain(yard);
    for id in &all {
        assert_states(yard, id, &[SUCCEEDED]);
        assert_eq!(yard.witness.starts(id), 1);
    }
    yard.check(&all);
    let seen = yard.witness.seen();
    assert_eq!(seen.iter().filter(|s| s.what == What::Made).count(), 2);
}
