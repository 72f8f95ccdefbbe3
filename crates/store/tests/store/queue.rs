//! Each step of the queue, without concurrent access.

use store::types::manifest::ContentHash;
use store::{
    Capacity, CommitOutcome, FaultKind, State, StoreError, SubmitOutcome, UnfinishedPolicy,
};

use crate::queue_samples::{
    GIB, LEASE_MS, PLENTY, TestSubmission, claim, claim_from, claim_one, commit, events_of,
    fresh_keys, give_up, held, ids, now_ms, sample, state, submit, worker,
};
use crate::test_database::{TestAttempt, TestDatabase, key};

on_both!(from_submission_to_record);
fn from_submission_to_record(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let ask = TestSubmission {
        request: "{\"\u{1F9EA}\": \"a'b\\\\u0000\"}".to_owned(),
        ..TestSubmission::new("a")
    };
    let made = submit(&mut store, std::slice::from_ref(&ask)).unwrap();
    assert_eq!(made, [SubmitOutcome::Now { attempt: 1 }]);
    let shown = store.show("a", None).unwrap();
    assert_eq!(shown.summary.state, State::Queued);
    assert_eq!(shown.submitter.as_deref(), Some("alice"));
    assert_eq!(
        store.submission_request("a").unwrap(),
        Some(ask.request.clone())
    );
    assert_eq!(store.submission_request("b").unwrap(), None);
    // While the analysis is queued, another submission and a direct run with its id are refused.
    let error = submit(&mut store, &[TestSubmission::new("a")]).unwrap_err();
    let text = chain(&error);
    assert!(text.contains("fumehood cancel a"), "{text}");
    let error = TestAttempt::new("a", &key(1))
        .begin(&mut store)
        .unwrap_err();
    assert!(matches!(error, StoreError::Running { .. }), "{error}");

    let claimed = claim_one(&mut store);
    assert_eq!(claimed.request_json, ask.request);
    assert_eq!((claimed.attempt, claimed.submitter.as_str()), (1, "alice"));
    assert!(claim(&mut store, 1).is_empty());
    let taken = sample(&claimed);
    assert!(
        store
            .start_claimed(&taken.beginning(), 1, LEASE_MS)
            .unwrap()
    );
    assert!(
        store
            .mark_collecting(&held(&claimed), LEASE_MS, "exit_0")
            .unwrap()
    );
    assert_eq!(state(&mut store, "a", 1), State::Collecting);
    assert_eq!(taken.commit(&mut store).unwrap(), CommitOutcome::Now);
    assert_eq!(taken.commit(&mut store).unwrap(), CommitOutcome::Already);
    assert_eq!(
        events_of(&mut store, "a"),
        [
            "1 submitted",
            "1 claimed",
            "1 started",
            "1 ended(exit_0)",
            "1 committed(succeeded)"
        ]
    );
    assert_eq!(
        test_database.sql("SELECT worker, retries_left, host FROM analyses_v1"),
        ["w1|0|lab-1"]
    );
    // A direct run has events too.
    TestAttempt::new("b", &key(2)).record(&mut store).unwrap();
    assert_eq!(events_of(&mut store, "b"), ["1 committed(succeeded)"]);
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text += &format!(": {source}");
        next = source.source();
    }
    text
}

on_both!(a_key_is_used_once);
fn a_key_is_used_once(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let keyed = |id: &str, print: &str| TestSubmission {
        key: Some("nightly".to_owned()),
        fingerprint: print.to_owned(),
        ..TestSubmission::new(id)
    };
    let made = submit(&mut store, &[keyed("a", "x"), keyed("b", "x")]).unwrap();
    let already = SubmitOutcome::Already { id: "a".to_owned() };
    assert_eq!(made, [SubmitOutcome::Now { attempt: 1 }, already.clone()]);
    assert_eq!(submit(&mut store, &[keyed("c", "x")]).unwrap(), [already]);
    let error = submit(&mut store, &[TestSubmission::new("d"), keyed("e", "y")]).unwrap_err();
    let text = chain(&error);
    assert!(
        matches!(&error, StoreError::Submission { at: 1, source } if matches!(**source, StoreError::KeyUsed { .. })),
        "{text}"
    );
    assert!(text.contains("analysis a"), "{text}");
    assert_eq!(
        test_database.sql("SELECT id FROM analyses ORDER BY id"),
        ["a"]
    );
    // Removing the analysis also frees its idempotency key.
    store.remove("a", UnfinishedPolicy::Remove).unwrap();
    assert_eq!(
        submit(&mut store, &[keyed("e", "y")]).unwrap(),
        [SubmitOutcome::Now { attempt: 1 }]
    );
}

on_both!(all_or_nothing);
fn all_or_nothing(test_database: &TestDatabase) {
    let mut store = test_database.store();
    TestAttempt::new("there", &key(1))
        .record(&mut store)
        .unwrap();
    let bad = [
        vec![
            TestSubmission::new("z"),
            TestSubmission::new("there"),
            TestSubmission::new("a"),
        ],
        vec![TestSubmission::new("z"), TestSubmission::new("z")],
    ];
    for batch in bad {
        let error = submit(&mut store, &batch).unwrap_err();
        assert!(
            matches!(error, StoreError::Submission { at: 1, .. }),
            "{error}"
        );
        assert_eq!(error.fault_kind(), FaultKind::Other);
        assert!(error.to_string().contains("number 2"), "{error}");
    }
    assert_eq!(test_database.sql("SELECT id FROM analyses"), ["there"]);
    for table in ["queue", "submissions"] {
        assert_eq!(
            test_database.sql(&format!("SELECT COUNT(*) FROM {table}")),
            ["0"]
        );
    }
    // Control: the same submissions without the bad ones, and more of them than fit into one statement.
    let good: Vec<TestSubmission> = (0..130)
        .map(|n| TestSubmission::new(&format!("n{n:03}")))
        .collect();
    let made = submit(&mut store, &good).unwrap();
    assert!(made.iter().all(|m| *m == SubmitOutcome::Now { attempt: 1 }));
    let names: Vec<&str> = good.iter().map(|ask| ask.id.as_str()).collect();
    assert_eq!(ids(&claim(&mut store, 200)), names);
}

on_both!(the_queue_has_a_bound);
fn the_queue_has_a_bound(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let three = ["a", "b", "c"].map(TestSubmission::new);
    let all: Vec<_> = three.iter().map(TestSubmission::submit).collect();
    let error = store.submit(&all, 2).unwrap_err();
    assert!(
        matches!(
            error,
            StoreError::QueueFull {
                queued: 0,
                asked: 3,
                queue_max: 2
            }
        ),
        "{error}"
    );
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM analyses"), ["0"]);
    store.submit(&all[..2], 2).unwrap();
    store.submit(&all[2..], 2).unwrap_err();
    claim_one(&mut store);
    store.submit(&all[2..], 2).unwrap();
}

on_both!(a_request_that_fits_no_worker_is_refused);
fn a_request_that_fits_no_worker_is_refused(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let large = |id: &str| TestSubmission {
        memory_bytes: Some(8 * GIB),
        cpu_milli: Some(4_000),
        ..TestSubmission::new(id)
    };
    // Without a worker the size of a request is not checked.
    submit(&mut store, &[large("early")]).unwrap();
    store.record_worker(&worker("w1", 16 * GIB, 1_000)).unwrap();
    store.record_worker(&worker("w2", GIB, 64_000)).unwrap();
    let error = submit(&mut store, &[TestSubmission::new("small"), large("late")]).unwrap_err();
    let text = chain(&error);
    assert!(
        matches!(&error, StoreError::Submission { at: 1, source } if matches!(**source, StoreError::DoesNotFit { .. })),
        "{text}"
    );
    for part in ["8GiB", "4 CPUs", "16GiB", "64 CPUs", "--memory"] {
        assert!(
            text.replace(' ', "").contains(&part.replace(' ', "")),
            "{part} in {text}"
        );
    }
    store.record_worker(&worker("w1", 16 * GIB, 4_000)).unwrap();
    submit(&mut store, &[large("late")]).unwrap();
    // A worker that has not reported for a minute does not count.
    test_database.sql("UPDATE workers SET seen_ms = seen_ms - 61000");
    let huge = TestSubmission {
        memory_bytes: Some(u64::MAX),
        ..TestSubmission::new("huge")
    };
    submit(&mut store, &[huge]).unwrap();
}

on_both!(submitters_take_turns);
fn submitters_take_turns(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let many: Vec<TestSubmission> = (0..1_000)
        .map(|n| TestSubmission::by(&format!("a{n:04}"), "alice"))
        .collect();
    submit(&mut store, &many).unwrap();
    submit(&mut store, &[TestSubmission::by("b0", "bob")]).unwrap();
    let next = store.overview(3).unwrap().next;
    let next: Vec<&str> = next.iter().map(|w| w.id.as_str()).collect();
    assert_eq!(next, ["a0000", "b0", "a0001"]);
    assert_eq!(
        ids(&claim(&mut store, 4)),
        ["a0000", "b0", "a0001", "a0002"]
    );
    // A later submitter starts at the current turn. Attempts of one submitter get consecutive turns.
    let rest = [
        TestSubmission::by("b1", "bob"),
        TestSubmission::by("b2", "bob"),
        TestSubmission::by("c0", "carol"),
    ];
    submit(&mut store, &rest).unwrap();
    assert_eq!(
        ids(&claim(&mut store, 7)),
        ["a0003", "b1", "c0", "a0004", "b2", "a0005", "a0006"]
    );
}

on_both!(higher_priorities_first);
fn higher_priorities_first(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let with = |id: &str, priority| TestSubmission {
        priority,
        ..TestSubmission::new(id)
    };
    let all = [
        with("low", 0),
        with("mid1", 5),
        with("high", u32::MAX),
        with("mid2", 5),
    ];
    submit(&mut store, &all).unwrap();
    assert_eq!(ids(&claim(&mut store, 9)), ["high", "mid1", "mid2", "low"]);
}

fn sized(id: &str, gib: u64, cpu_milli: u64) -> TestSubmission {
    TestSubmission {
        memory_bytes: Some(gib * GIB),
        cpu_milli: Some(cpu_milli),
        ..TestSubmission::new(id)
    }
}

fn room(gib: u64, cpu_milli: u64) -> Capacity {
    Capacity {
        memory_bytes: gib * GIB,
        cpu_milli,
    }
}

on_both!(never_beyond_what_is_free);
fn never_beyond_what_is_free(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let all = [
        sized("a", 2, 1_000),
        sized("too-large", 9, 1_000),
        sized("b", 3, 1_000),
        sized("c", 2, 1_000),
        TestSubmission {
            memory_bytes: None,
            cpu_milli: None,
            ..TestSubmission::new("d")
        },
        sized("e", 1, 9_000),
    ];
    submit(&mut store, &all).unwrap();
    let keys = fresh_keys(9);
    let claimed = store
        .claim(&claim_from(&keys, room(5, 3_000), room(8, 4_000)))
        .unwrap();
    // b takes the last memory. A request without a memory size counts with the worker's default, and one without CPUs counts as
    // none.
    assert_eq!(ids(&claimed), ["a", "b"]);
    let keys = fresh_keys(9);
    let claimed = store
        .claim(&claim_from(&keys, room(3, 2_000), room(8, 4_000)))
        .unwrap();
    assert_eq!(ids(&claimed), ["c", "d"]);
    assert_eq!(claimed[1].counted, room(1, 0));
    // A claim takes at most as many attempts as it has keys. A claim without keys is valid and takes nothing.
    assert!(
        store
            .claim(&claim_from(&[], PLENTY, PLENTY))
            .unwrap()
            .is_empty()
    );
    assert_eq!(ids(&claim(&mut store, 1)), ["too-large"]);
}

on_both!(a_large_request_is_claimed_eventually);
fn a_large_request_is_claimed_eventually(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let small = |n: u32| sized(&format!("s{n}"), 1, 1_000);
    submit(
        &mut store,
        &[sized("large", 4, 1_000), small(1), small(2), small(3)],
    )
    .unwrap();
    let mut take = |free: u64| {
        let keys = fresh_keys(1);
        let claimed = store
            .claim(&claim_from(&keys, room(free, 8_000), room(4, 8_000)))
            .unwrap();
        ids(&claimed).join(" ")
    };
    assert_eq!(take(2), "s1");
    test_database.sql("UPDATE queue SET ready_ms = ready_ms - 61000 WHERE id = 'large'");
    assert_eq!(take(2), "");
    assert_eq!(take(4), "large");
    assert_eq!(take(4), "s2");
    // A worker ignores a request that is larger than its capacity, and takes the requests behind it.
    test_database.sql(
        "UPDATE queue SET ready_ms = ready_ms - 61000, memory_bytes = 106300440576 WHERE id = 's3'",
    );
    submit(&mut store, &[small(4)]).unwrap();
    let keys = fresh_keys(2);
    let claimed = store
        .claim(&claim_from(&keys, room(4, 8_000), room(4, 8_000)))
        .unwrap();
    assert_eq!(ids(&claimed), ["s4"]);
}

on_both!(too_large_ones_do_not_hide_the_others);
fn too_large_ones_do_not_hide_the_others(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut all: Vec<TestSubmission> = (0..1_200)
        .map(|n| sized(&format!("l{n}"), 9, 1_000))
        .collect();
    all.push(sized("small", 1, 1_000));
    submit(&mut store, &all).unwrap();
    let keys = fresh_keys(3);
    let claimed = store
        .claim(&claim_from(&keys, room(8, 8_000), room(8, 8_000)))
        .unwrap();
    assert_eq!(ids(&claimed), ["small"]);
}

on_both!(a_claim_can_be_repeated);
fn a_claim_can_be_repeated(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &["a", "b", "c"].map(TestSubmission::new)).unwrap();
    let keys = fresh_keys(20);
    let first = store
        .claim(&claim_from(&keys[..2], PLENTY, PLENTY))
        .unwrap();
    assert_eq!(ids(&first), ["a", "b"]);
    // A claim whose answer was lost is repeated with the same keys. It returns the same attempts, and they count against
    // the capacity.
    let again = store
        .claim(&claim_from(&keys, room(3, 9_000), PLENTY))
        .unwrap();
    let mut names = ids(&again);
    names.sort();
    assert_eq!(names, ["a", "b", "c"]);
    assert!(
        again
            .iter()
            .filter(|c| c.id != "c")
            .all(|c| first.contains(c))
    );
    assert_eq!(events_of(&mut store, "a"), ["1 submitted", "1 claimed"]);
    // A started attempt is not returned again.
    let taken = sample(&first[0]);
    store
        .start_claimed(&taken.beginning(), 1, LEASE_MS)
        .unwrap();
    let later = store.claim(&claim_from(&keys, PLENTY, PLENTY)).unwrap();
    assert!(!ids(&later).contains(&"a"));
}

on_both!(a_submission_is_replaced);
fn a_submission_is_replaced(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let first = TestSubmission::new("a")
        .with_file(b"old")
        .with_file(b"both");
    let neighbour = TestSubmission::new("b").with_file(b"both");
    submit(&mut store, &[first, neighbour]).unwrap();
    commit(
        &mut store,
        &claim_one(&mut test_database.store()),
        State::Failed,
        "exit",
    )
    .unwrap();
    let mut second = TestSubmission::retried("a", 7)
        .with_file(b"new")
        .with_file(b"both");
    second.request = "{\"second\": true}".to_owned();
    let error = submit(&mut store, std::slice::from_ref(&second)).unwrap_err();
    assert!(chain(&error).contains("--replace"), "{error}");
    second.replace = true;
    assert_eq!(
        submit(&mut store, std::slice::from_ref(&second)).unwrap(),
        [SubmitOutcome::Now { attempt: 2 }]
    );
    assert_eq!(store.submission_request("a").unwrap(), Some(second.request));
    let mut blob = |content: &[u8]| store.submitted_file(&ContentHash::of(content)).unwrap();
    assert_eq!(blob(b"old"), None);
    assert_eq!(blob(b"new").as_deref(), Some(&b"new"[..]));
    assert_eq!(blob(b"both").as_deref(), Some(&b"both"[..]));
    test_database.sql(
        "UPDATE blobs SET content = 'x' WHERE bytes = 4"
            .replace(
                "'x'",
                if test_database.is_postgres() {
                    "'x'"
                } else {
                    "x'78'"
                },
            )
            .as_str(),
    );
    let error = store.submitted_file(&ContentHash::of(b"both")).unwrap_err();
    assert_eq!(error.fault_kind(), FaultKind::Damaged, "{error}");
}

on_both!(nothing_is_left_of_what_is_removed);
fn nothing_is_left_of_what_is_removed(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let large = vec![7; 3 << 20];
    let a = TestSubmission::new("a")
        .with_file(b"shared")
        .with_file(&large);
    let b = TestSubmission::new("b").with_file(b"shared");
    submit(&mut store, &[a, b]).unwrap();
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM blobs"), ["2"]);
    assert_eq!(
        store.submitted_file(&ContentHash::of(&large)).unwrap(),
        Some(large)
    );
    let error = store.remove("a", UnfinishedPolicy::Refuse).unwrap_err();
    assert!(
        matches!(
            error,
            StoreError::Running {
                state: State::Queued,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(
        store
            .remove("a", UnfinishedPolicy::Remove)
            .unwrap()
            .attempts,
        1
    );
    assert_eq!(test_database.sql("SELECT bytes FROM blobs"), ["6"]);
    assert_eq!(ids(&claim(&mut store, 9)), ["b"]);
    store.remove("b", UnfinishedPolicy::Remove).unwrap();
    for table in [
        "analyses",
        "attempts",
        "submissions",
        "blobs",
        "submission_blobs",
        "queue",
        "events",
    ] {
        assert_eq!(
            test_database.sql(&format!("SELECT COUNT(*) FROM {table}")),
            ["0"],
            "{table}"
        );
    }
}

on_both!(workers_and_overview);
fn workers_and_overview(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut one = worker("w1", 16 * GIB, 8_000);
    store.record_worker(&one).unwrap();
    (one.running, one.draining) = (3, true);
    store.record_worker(&one).unwrap();
    store.record_worker(&worker("w2", GIB, 1_000)).unwrap();
    submit(
        &mut store,
        &[
            TestSubmission::by("a", "bob"),
            TestSubmission::retried("b", 2),
            TestSubmission::new("c"),
        ],
    )
    .unwrap();
    let claimed = claim(&mut store, 2);
    assert_eq!(ids(&claimed), ["a", "b"]);
    store
        .start_claimed(&sample(&claimed[0]).beginning(), 1, LEASE_MS)
        .unwrap();
    store.cancel("a", "bob").unwrap();
    assert!(give_up(&mut store, &claimed[1]));
    let seen = store.overview(9).unwrap();
    assert_eq!((seen.queued, seen.delayed, seen.running), (2, 1, 1));
    let next: Vec<_> = seen
        .next
        .iter()
        .map(|w| (w.id.as_str(), w.attempt))
        .collect();
    assert_eq!(next, [("c", 1), ("b", 2)]);
    assert!(seen.next[1].not_before_ms.unwrap() > seen.now_ms);
    let busy = &seen.busy[0];
    assert_eq!(
        (busy.id.as_str(), busy.submitter.as_deref()),
        ("a", Some("bob"))
    );
    assert_eq!((busy.cancel_asked, busy.memory_bytes), (true, Some(GIB)));
    assert!(busy.started_ms.is_some() && busy.worker.as_deref() == Some("w1"));
    assert_eq!(seen.workers.len(), 2);
    assert!(seen.workers[0].seen_ms >= seen.now_ms - 60_000);
    one.seen_ms = seen.workers[0].seen_ms;
    assert_eq!(seen.workers[0], one);
    assert_eq!(store.overview(1).unwrap().next.len(), 1);
    store.remove_worker(&one).unwrap();
    assert_eq!(store.overview(0).unwrap().workers.len(), 1);
    assert!(test_database.sql("SELECT seen_at FROM workers_v1")[0].starts_with("20"));
}

on_both!(a_request_that_fits_no_worker_is_parked);
fn a_request_that_fits_no_worker_is_parked(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let all = [
        sized("m", 9, 1_000),
        sized("c", 1, 9_000),
        sized("ok", 1, 1_000),
    ];
    submit(&mut store, &all).unwrap();
    let small = worker("w1", 8 * GIB, 8_000);
    assert!(store.park_unfit(&small, GIB, 3_600_000).unwrap().is_empty());
    test_database.sql("UPDATE queue SET ready_ms = ready_ms - 3600001");
    // Another live worker has the memory for "m", so only "c" is parked.
    store.record_worker(&worker("w2", 64 * GIB, 4_000)).unwrap();
    assert_eq!(store.park_unfit(&small, GIB, 3_600_000).unwrap(), ["c"]);
    test_database.sql("UPDATE workers SET seen_ms = seen_ms - 61000");
    assert_eq!(store.park_unfit(&small, GIB, 3_600_000).unwrap(), ["m"]);
    assert!(store.park_unfit(&small, GIB, 3_600_000).unwrap().is_empty());
    let shown = store.show("m", None).unwrap().summary;
    assert_eq!(
        (shown.state, shown.reason.as_deref()),
        (State::Error, Some("does_not_fit"))
    );
    assert_eq!(
        events_of(&mut store, "m"),
        ["1 submitted", "1 parked(does_not_fit)"]
    );
    assert_eq!(ids(&claim(&mut store, 9)), ["ok"]);
    // A parked analysis can be retried, for example after a larger worker was added.
    assert_eq!(store.retry("m", "bob", &[]).unwrap(), 2);
    assert_eq!(ids(&claim(&mut store, 9)), ["m"]);
}

on_both!(an_old_writer_removes_what_was_submitted);
/// The statements by which Fumehood with schema 1.2 commits and removes. Do not change them.
fn an_old_writer_removes_what_was_submitted(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(
        &mut store,
        &[
            TestSubmission::new("a").with_file(b"x"),
            TestSubmission::new("b"),
        ],
    )
    .unwrap();
    let claimed = claim_one(&mut store);
    drop(store);
    crate::schema::old_commit_of_1_2(test_database, "a", &claimed.key);
    let mut store = test_database.store();
    assert_eq!(state(&mut store, "a", 1), State::Failed);
    assert!(store.expired_leases(9).unwrap().is_empty());
    for table in [
        "outputs",
        "logs",
        "remarks",
        "remark_counts",
        "attempts",
        "analyses",
    ] {
        test_database.sql(&format!("DELETE FROM {table} WHERE id = 'a'"));
    }
    for table in ["submissions", "submission_blobs", "events"] {
        let left = test_database.sql(&format!("SELECT COUNT(*) FROM {table} WHERE id = 'a'"));
        assert_eq!(left, ["0"], "{table}");
    }
    assert_eq!(ids(&claim(&mut store, 9)), ["b"]);
}

on_both!(a_large_request_blocks_later_requests_half_of_the_time);
/// Regression: a request for all the memory waited for a small analysis that ran for a year. No worker took any other
/// request during that year.
fn a_large_request_blocks_later_requests_half_of_the_time(test_database: &TestDatabase) {
    let room = |gib: u64| Capacity {
        memory_bytes: gib * GIB,
        cpu_milli: 8_000,
    };
    let mut store = test_database.store();
    let large = TestSubmission {
        memory_bytes: Some(4 * GIB),
        ..TestSubmission::new("large")
    };
    submit(&mut store, &[large]).unwrap();
    // For how many seconds the large request has been ready, and whether a worker then takes the request behind it.
    let seconds = [
        (10, true),
        (70, false),
        (340, false),
        (380, true),
        (640, true),
        (680, false),
        (31_536_000 + 370, true),
    ];
    for (n, (ready_for, taken)) in seconds.into_iter().enumerate() {
        let id = format!("small{n}");
        submit(&mut store, &[TestSubmission::new(&id)]).unwrap();
        let since = now_ms() - ready_for * 1_000;
        test_database.sql(&format!(
            "UPDATE queue SET ready_ms = {since} WHERE id = 'large'"
        ));
        let keys = fresh_keys(1);
        let claimed = store.claim(&claim_from(&keys, room(3), room(4))).unwrap();
        assert_eq!(claimed.len(), usize::from(taken), "after {ready_for} s");
        assert!(claimed.iter().all(|one| one.id != "large"));
        test_database.sql("DELETE FROM queue WHERE id <> 'large'");
    }
    // Control: the large request is still queued, and a worker with enough memory takes it.
    let keys = fresh_keys(1);
    let claimed = store.claim(&claim_from(&keys, room(4), room(4))).unwrap();
    assert_eq!(ids(&claimed), ["large"]);
}
