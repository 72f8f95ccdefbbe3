//! Retries: the transaction that ends an attempt also decides whether another attempt is queued.

use store::{CommitOutcome, State};

use crate::queue_samples::{
    TestSubmission, claim, claim_one, commit, events_of, give_up, ids, sample, state, submit,
};
use crate::test_database::TestDatabase;

/// Makes every delayed attempt due.
fn make_delayed_attempts_due(test_database: &TestDatabase) {
    test_database.sql("UPDATE queue SET not_before_ms = 1 WHERE not_before_ms IS NOT NULL");
}

on_both!(a_lost_runner_is_followed_by_another);
fn a_lost_runner_is_followed_by_another(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &[TestSubmission::retried("a", 1)]).unwrap();
    let first = claim_one(&mut store);
    assert!(give_up(&mut store, &first));
    assert!(!give_up(&mut store, &first), "twice");
    assert_eq!(state(&mut store, "a", 1), State::Error);
    assert_eq!(state(&mut store, "a", 2), State::Queued);
    assert!(claim(&mut store, 1).is_empty(), "not at once");
    let wait = store.promote_delayed().unwrap().unwrap();
    assert!((1_000..=2_500).contains(&wait), "{wait}");
    make_delayed_attempts_due(test_database);
    let second = claim_one(&mut store);
    assert_eq!(
        (second.attempt, second.request_json),
        (2, first.request_json)
    );
    assert_ne!(second.key, first.key);
    assert_eq!(
        test_database.sql("SELECT retries_left FROM attempts ORDER BY attempt"),
        ["1", "0"]
    );
    assert_eq!(
        events_of(&mut store, "a"),
        [
            "1 submitted",
            "1 claimed",
            "1 ended(runner_lost)",
            "2 retried(runner_lost)",
            "2 claimed"
        ]
    );
}

on_both!(the_next_attempt_is_made_with_the_end_of_the_last);
fn the_next_attempt_is_made_with_the_end_of_the_last(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let ask = TestSubmission {
        retry_on: vec![State::Failed],
        ..TestSubmission::retried("a", 1)
    };
    submit(&mut store, &[ask]).unwrap();
    let claimed = claim_one(&mut store);
    let mut ended = sample(&claimed);
    (ended.state, ended.reason) = (State::Failed, "exit".to_owned());
    // A commit that is rolled back queues no retry.
    let undone = ended.commit_with(&mut store, &mut |_| Ok(None), &mut || {
        Err(std::io::Error::other("no"))
    });
    undone.unwrap_err();
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM queue"), ["0"]);
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM attempts"), ["1"]);
    assert_eq!(ended.commit(&mut store).unwrap(), CommitOutcome::Now);
    assert_eq!(test_database.sql("SELECT attempt FROM queue"), ["2"]);
    assert_eq!(ended.commit(&mut store).unwrap(), CommitOutcome::Already);
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM attempts"), ["2"]);
    assert_eq!(
        events_of(&mut store, "a")[2..],
        ["1 committed(failed)", "2 retried(exit)"]
    );
}

on_both!(the_pause_grows_and_has_a_bound);
fn the_pause_grows_and_has_a_bound(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &[TestSubmission::retried("a", 12)]).unwrap();
    let mut pauses = Vec::new();
    for _ in 0..12 {
        let claimed = claim_one(&mut store);
        give_up(&mut store, &claimed);
        let queued = test_database.sql("SELECT not_before_ms - queued_ms FROM queue");
        pauses.push(queued[0].parse::<u64>().unwrap());
        make_delayed_attempts_due(test_database);
    }
    for (n, pause) in pauses.iter().enumerate() {
        let least = (2_000_u64 << n).min(300_000);
        assert!(
            (least..=least + least / 4).contains(pause),
            "{n}: {pauses:?}"
        );
    }
    assert!(
        pauses.iter().any(|p| p % 1_000 != 0),
        "all that fail together come back together"
    );
}

on_both!(whoever_waits_becomes_ready);
fn whoever_waits_becomes_ready(test_database: &TestDatabase) {
    let mut store = test_database.store();
    assert_eq!(store.promote_delayed().unwrap(), None);
    submit(
        &mut store,
        &[
            TestSubmission::retried("a", 3),
            TestSubmission::retried("b", 3),
        ],
    )
    .unwrap();
    for claimed in claim(&mut store, 2) {
        give_up(&mut store, &claimed);
    }
    let many: Vec<TestSubmission> = (0..5)
        .map(|n| TestSubmission::by(&format!("x{n}"), "bob"))
        .collect();
    submit(&mut store, &many).unwrap();
    test_database.sql("UPDATE queue SET not_before_ms = 1 WHERE id = 'b'");
    assert!(store.promote_delayed().unwrap().unwrap() > 0);
    assert_eq!(
        test_database.sql("SELECT id FROM queue WHERE not_before_ms IS NOT NULL"),
        ["a"]
    );
    make_delayed_attempts_due(test_database);
    assert_eq!(store.promote_delayed().unwrap(), None);
    // A delayed attempt gets its turn when it becomes ready, so waiting does not put it further behind.
    let order = ids(&claim(&mut store, 9)).join(" ");
    assert_eq!(order, "b x0 a x1 x2 x3 x4");
}

on_both!(retries_run_out);
fn retries_run_out(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &[TestSubmission::retried("a", 2)]).unwrap();
    for _ in 0..3 {
        let claimed = claim_one(&mut store);
        give_up(&mut store, &claimed);
        make_delayed_attempts_due(test_database);
    }
    assert!(claim(&mut store, 1).is_empty());
    let events = events_of(&mut store, "a");
    assert_eq!(
        events[events.len() - 2..],
        ["3 ended(runner_lost)", "3 parked(runner_lost)"]
    );
    assert_eq!(state(&mut store, "a", 3), State::Error);
    // A retry by hand starts with the original number of retries.
    assert_eq!(store.retry("a", "bob", &[]).unwrap(), 4);
    let claimed = claim_one(&mut store);
    give_up(&mut store, &claimed);
    assert_eq!(test_database.sql("SELECT attempt FROM queue"), ["5"]);
    assert!(
        test_database.sql("SELECT not_before_ms - queued_ms FROM queue")[0]
            .parse::<u64>()
            .unwrap()
            <= 2_500
    );
}

on_both!(only_what_was_asked_for_is_tried_again);
fn only_what_was_asked_for_is_tried_again(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let retry_on = vec![State::TimedOut, State::OutOfMemory];
    let ends = [
        (State::Succeeded, "exit", false),
        (State::Failed, "exit", false),
        (State::TimedOut, "wall_time", true),
        (State::OutOfMemory, "oom_killed", true),
        (State::LimitExceeded, "disk", false),
        (State::Cancelled, "cancelled", false),
        (State::Error, "init_lost", true),
        (State::Error, "lease_lost", true),
        (State::Error, "not_found", false),
        (State::Error, "not_executable", false),
        (State::Error, "refused", false),
        (State::Error, "does_not_fit", false),
        (State::Error, "unkillable", false),
    ];
    for (n, (state, reason, again)) in ends.into_iter().enumerate() {
        let id = format!("a{n}");
        let ask = TestSubmission {
            retry_on: retry_on.clone(),
            ..TestSubmission::retried(&id, 1)
        };
        submit(&mut store, &[ask]).unwrap();
        let claimed = claim_one(&mut store);
        commit(&mut store, &claimed, state, reason).unwrap();
        let queued = test_database.sql(&format!("SELECT attempt FROM queue WHERE id = '{id}'"));
        assert_eq!(queued.len(), usize::from(again), "{state} {reason}");
        let last = events_of(&mut store, &id).pop().unwrap();
        let wanted = match (state, again) {
            (_, true) => format!("2 retried({reason})"),
            (State::Error, false) => format!("1 parked({reason})"),
            (state, false) => format!("1 committed({state})"),
        };
        assert_eq!(last, wanted);
    }
}

on_both!(a_late_attempt_does_not_count);
fn a_late_attempt_does_not_count(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &[TestSubmission::retried("a", 1)]).unwrap();
    let late = claim_one(&mut store);
    assert!(give_up(&mut store, &late));
    // A late commit is superseded while the next attempt waits, and again while it runs.
    let committed = commit(&mut store, &late, State::Succeeded, "exit").unwrap();
    assert_eq!(committed, CommitOutcome::Superseded { attempt: 3 });
    assert_eq!(state(&mut store, "a", 2), State::Queued);
    assert_eq!(store.outputs("a", 3).unwrap().len(), 2, "kept");
    make_delayed_attempts_due(test_database);
    let second = claim_one(&mut store);
    assert_eq!(second.attempt, 2);
    let committed = commit(&mut store, &late, State::Succeeded, "exit").unwrap();
    assert_eq!(committed, CommitOutcome::Superseded { attempt: 3 });
    assert_eq!(
        commit(&mut store, &second, State::Failed, "exit").unwrap(),
        CommitOutcome::Now
    );
    assert_eq!(
        test_database.sql("SELECT attempt, state FROM analyses_v1"),
        ["2|failed"]
    );
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM queue"), ["0"]);
}
