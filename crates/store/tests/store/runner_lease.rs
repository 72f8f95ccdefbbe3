//! How a runner starts, renews and loses an attempt, and requests to cancel or retry one.

use store::{CancelOutcome, LossProof, LostAttempt, RenewOutcome, State, Store, StoreError};

use crate::queue_samples::{
    LEASE_MS, TestSubmission, claim, claim_one, commit, events_of, give_up, held, ids, sample,
    state, submit,
};
use crate::test_database::{TestAttempt, TestDatabase, key};

on_both!(a_runner_takes_up_its_attempt_once);
fn a_runner_takes_up_its_attempt_once(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &[TestSubmission::new("a")]).unwrap();
    let claimed = claim_one(&mut store);
    let taken = sample(&claimed);
    let begin = taken.beginning();
    let mut other = begin;
    other.key = "another";
    assert!(!store.start_claimed(&other, 1, LEASE_MS).unwrap());
    assert!(!store.start_claimed(&begin, 2, LEASE_MS).unwrap());
    assert!(store.start_claimed(&begin, 1, LEASE_MS).unwrap());
    assert!(
        store.start_claimed(&begin, 1, LEASE_MS).unwrap(),
        "repeated"
    );
    let mut second = begin;
    second.workspace = Some("/tmp/of-another-runner");
    assert!(!store.start_claimed(&second, 1, LEASE_MS).unwrap());
    assert_eq!(
        events_of(&mut store, "a"),
        ["1 submitted", "1 claimed", "1 started"]
    );
    assert!(give_up(&mut store, &claimed));
    assert!(!store.start_claimed(&begin, 1, LEASE_MS).unwrap());
}

on_both!(a_lease_is_renewed_until_it_is_lost);
fn a_lease_is_renewed_until_it_is_lost(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &[TestSubmission::new("a")]).unwrap();
    let claimed = claim_one(&mut store);
    let lease = |test_database: &TestDatabase| {
        test_database.sql("SELECT lease_ms FROM attempts")[0]
            .parse::<i64>()
            .unwrap()
    };
    let before = lease(test_database);
    assert_eq!(
        store.renew_lease(&held(&claimed), 2 * LEASE_MS).unwrap(),
        RenewOutcome::Renewed
    );
    assert!(lease(test_database) > before + 50_000);
    let mut other = held(&claimed);
    other.key = "another";
    assert_eq!(
        store.renew_lease(&other, LEASE_MS).unwrap(),
        RenewOutcome::Lost
    );
    assert!(!store.mark_collecting(&other, LEASE_MS, "x").unwrap());
    assert!(
        store
            .mark_collecting(&held(&claimed), LEASE_MS, "exit")
            .unwrap()
    );
    assert!(
        store
            .mark_collecting(&held(&claimed), LEASE_MS, "exit")
            .unwrap(),
        "repeated"
    );
    assert_eq!(
        store.renew_lease(&held(&claimed), LEASE_MS).unwrap(),
        RenewOutcome::Renewed
    );
    assert!(give_up(&mut store, &claimed));
    assert_eq!(
        store.renew_lease(&held(&claimed), LEASE_MS).unwrap(),
        RenewOutcome::Lost
    );
    assert!(
        !store
            .mark_collecting(&held(&claimed), LEASE_MS, "exit")
            .unwrap()
    );
    assert_eq!(
        events_of(&mut store, "a"),
        [
            "1 submitted",
            "1 claimed",
            "1 ended(exit)",
            "1 ended(runner_lost)",
            "1 parked(runner_lost)"
        ]
    );
}

on_both!(leases_that_are_over);
fn leases_that_are_over(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &["a", "b", "c", "d"].map(TestSubmission::new)).unwrap();
    let claimed = claim(&mut store, 3);
    // A direct run has no lease.
    TestAttempt::new("run", &key(1)).begin(&mut store).unwrap();
    assert!(store.expired_leases(9).unwrap().is_empty());
    store
        .mark_collecting(&held(&claimed[1]), LEASE_MS, "exit")
        .unwrap();
    test_database.sql("UPDATE attempts SET lease_ms = lease_ms - 100000 WHERE id = 'a'");
    test_database.sql("UPDATE attempts SET lease_ms = lease_ms - 200000 WHERE id = 'b'");
    let expired = store.expired_leases(9).unwrap();
    let found: Vec<_> = expired.iter().map(|e| (e.id.as_str(), e.state)).collect();
    assert_eq!(found, [("b", State::Collecting), ("a", State::Running)]);
    assert!(expired[0].expired_ms >= 140_000 && expired[0].expired_ms < 200_000);
    assert_eq!(expired[1].key, claimed[0].key);
    assert_eq!(store.expired_leases(1).unwrap().len(), 1);
    store.renew_lease(&held(&claimed[0]), LEASE_MS).unwrap();
    commit(&mut store, &claimed[1], State::Failed, "exit").unwrap();
    assert!(store.expired_leases(9).unwrap().is_empty());
}

on_both!(cancel_while_queued);
fn cancel_while_queued(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(
        &mut store,
        &[
            TestSubmission::retried("a", 3),
            TestSubmission::retried("b", 3),
        ],
    )
    .unwrap();
    assert_eq!(
        store.cancel("a", "bob").unwrap(),
        CancelOutcome::Now { attempt: 1 }
    );
    let ended = CancelOutcome::AlreadyEnded {
        attempt: 1,
        state: State::Cancelled,
    };
    assert_eq!(store.cancel("a", "bob").unwrap(), ended);
    assert_eq!(events_of(&mut store, "a"), ["1 submitted", "1 cancelled"]);
    let shown = store.show("a", None).unwrap().summary;
    assert_eq!(shown.reason.as_deref(), Some("cancelled"));
    assert!(shown.message.unwrap().contains("bob") && shown.committed_ms.is_some());
    assert_eq!(ids(&claim(&mut store, 9)), ["b"]);
    let error = store.cancel("nothing", "bob").unwrap_err();
    assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
    // An attempt that is delayed after a failure is queued too.
    let b = store.unfinished(None).unwrap().remove(0);
    let lost = store::LostAttempt {
        id: "b",
        attempt: 1,
        key: &b.key,
        by: "x",
        reason: "runner_lost",
        message: "",
        proof: store::LossProof::RunnerGone,
    };
    assert!(store.give_up(&lost).unwrap());
    assert_eq!(
        store.cancel("b", "bob").unwrap(),
        CancelOutcome::Now { attempt: 2 }
    );
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM queue"), ["0"]);
}

on_both!(cancel_while_running);
fn cancel_while_running(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(
        &mut store,
        &[
            TestSubmission::retried("a", 3),
            TestSubmission::retried("b", 3),
        ],
    )
    .unwrap();
    let claimed = claim(&mut store, 2);
    let asked = CancelOutcome::Requested {
        attempt: 1,
        host: "lab-1".to_owned(),
    };
    assert_eq!(store.cancel("a", "bob").unwrap(), asked);
    assert_eq!(
        store.cancel("a", "carol").unwrap(),
        asked,
        "the first stays"
    );
    let by = "bob".to_owned();
    assert_eq!(
        store.renew_lease(&held(&claimed[0]), LEASE_MS).unwrap(),
        RenewOutcome::CancelRequested { by: by.clone() }
    );
    assert_eq!(
        store.requested_cancels("lab-1").unwrap(),
        [("a".to_owned(), 1, claimed[0].key.clone())]
    );
    assert!(store.requested_cancels("lab-2").unwrap().is_empty());
    store
        .mark_collecting(&held(&claimed[0]), LEASE_MS, "cancelled")
        .unwrap();
    assert_eq!(
        store.cancel("a", "bob").unwrap(),
        asked,
        "while it is collected"
    );
    commit(&mut store, &claimed[0], State::Cancelled, "cancelled").unwrap();
    assert!(store.requested_cancels("lab-1").unwrap().is_empty());
    assert_eq!(
        test_database.sql("SELECT cancel_by FROM analyses_v1 WHERE id = 'a'"),
        ["bob"]
    );
    assert_eq!(
        events_of(&mut store, "a"),
        [
            "1 submitted",
            "1 claimed",
            "1 cancelled",
            "1 ended(cancelled)",
            "1 committed(cancelled)"
        ]
    );
    // A cancelled attempt is not retried, however it ends.
    store.cancel("b", "bob").unwrap();
    assert!(give_up(&mut store, &claimed[1]));
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM queue"), ["0"]);
}

on_both!(retry_on_wish);
fn retry_on_wish(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &[TestSubmission::retried("a", 1)]).unwrap();
    let error = store.retry("a", "bob", &[]).unwrap_err();
    assert!(
        matches!(
            error,
            StoreError::NotEnded {
                state: State::Queued,
                ..
            }
        ),
        "{error}"
    );
    let claimed = claim_one(&mut store);
    let error = store.retry("a", "bob", &[]).unwrap_err();
    assert!(error.to_string().contains("fumehood wait a"), "{error}");
    commit(&mut store, &claimed, State::Succeeded, "exit").unwrap();
    assert_eq!(store.retry("a", "bob", &[]).unwrap(), 2);
    let second = claim_one(&mut store);
    assert_eq!(
        (second.attempt, &second.request_json),
        (2, &claimed.request_json)
    );
    assert_eq!(
        test_database.sql("SELECT retries_left FROM attempts WHERE attempt = 2"),
        ["1"]
    );
    let events = store.events("a").unwrap();
    let retried = events.iter().find(|e| e.event == "retried").unwrap();
    assert_eq!((retried.attempt, retried.by.as_deref()), (2, Some("bob")));
    TestAttempt::new("run", &key(1)).record(&mut store).unwrap();
    let error = store.retry("run", "bob", &[]).unwrap_err();
    assert!(
        matches!(error, StoreError::NeverSubmitted { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("fumehood run"), "{error}");
    let error = store.retry("nothing", "bob", &[]).unwrap_err();
    assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
    // A direct run that replaces a submitted analysis is not retried by the old request.
    commit(&mut store, &second, State::Succeeded, "exit").unwrap();
    let mut run = TestAttempt::new("a", &key(2));
    (run.replace, run.attempt) = (true, 3);
    (run.state, run.reason) = (State::Error, "runner_lost".to_owned());
    assert_eq!(run.begin(&mut store).unwrap(), 3);
    run.commit(&mut store).unwrap();
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM queue"), ["0"]);
    assert_eq!(
        events_of(&mut store, "a").pop().unwrap(),
        "3 committed(error)"
    );
}

on_both!(a_renewed_lease_is_not_given_up);
/// Regression: a process that had read a lease could end the attempt even if the lease had since been renewed, or had never
/// expired.
fn a_renewed_lease_is_not_given_up(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &[TestSubmission::retried("a", 1)]).unwrap();
    let claimed = claim_one(&mut store);
    let by_lease = |store: &mut Store| {
        let lost = LostAttempt {
            id: &claimed.id,
            attempt: claimed.attempt,
            key: &claimed.key,
            by: "token-of-another-worker",
            reason: "runner_lost",
            message: "its runner did not renew its lease",
            proof: LossProof::LeaseExpired,
        };
        store.give_up(&lost).unwrap()
    };
    assert!(!by_lease(&mut store), "it has never been over");
    test_database.sql("UPDATE attempts SET lease_ms = 1000");
    assert_eq!(
        store.expired_leases(9).unwrap().len(),
        1,
        "it is seen to be over"
    );
    store.renew_lease(&held(&claimed), LEASE_MS).unwrap();
    assert!(!by_lease(&mut store), "and was renewed then");
    assert_eq!(state(&mut store, "a", 1), State::Running);
    assert_eq!(events_of(&mut store, "a"), ["1 submitted", "1 claimed"]);
    // Control: an expired lease is a sufficient proof.
    test_database.sql("UPDATE attempts SET lease_ms = 1000");
    assert!(by_lease(&mut store));
    assert_eq!(state(&mut store, "a", 1), State::Error);
    assert_eq!(state(&mut store, "a", 2), State::Queued);
}

on_both!(an_attempt_that_was_cancelled_and_given_up_ends_as_cancelled);
/// Regression: an attempt that was cancelled before it had begun got the state `error`, with the name of the canceller.
fn an_attempt_that_was_cancelled_and_given_up_ends_as_cancelled(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(
        &mut store,
        &[
            TestSubmission::retried("a", 3),
            TestSubmission::retried("b", 3),
        ],
    )
    .unwrap();
    let claimed = claim(&mut store, 2);
    store.cancel("a", "bob").unwrap();
    for one in &claimed {
        assert!(give_up(&mut store, one));
    }
    assert_eq!(state(&mut store, "a", 1), State::Cancelled);
    assert_eq!(
        test_database.sql("SELECT cancel_by FROM analyses_v1 WHERE id = 'a'"),
        ["bob"]
    );
    // Control: nobody cancelled "b", so it is retried.
    assert_eq!(state(&mut store, "b", 1), State::Error);
    assert_eq!(test_database.sql("SELECT id, attempt FROM queue"), ["b|2"]);
}
