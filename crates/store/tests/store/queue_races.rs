//! Concurrent access to the queue, query plans, and the change listener.

use std::collections::HashSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use store::{CancelOutcome, ChangeListener, Location, State, Store, StoreError, UnfinishedPolicy};
use testkit::postgres::PrivatePostgres;
use testkit::trial;

use crate::queue_samples::{
    PLENTY, QUEUE_MAX, TestSubmission, claim, claim_from, claim_one, commit, fresh_keys, give_up,
    state, submit,
};
use crate::test_database::{TestDatabase, location};

/// Runs `work` in `count` threads at the same time. Each thread has a store of its own.
fn together<T: Send>(
    test_database: &TestDatabase,
    count: usize,
    work: impl Fn(usize, &mut Store) -> T + Sync,
) -> Vec<T> {
    let barrier = Barrier::new(count);
    let (barrier, work) = (&barrier, &work);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|n| {
                scope.spawn(move || {
                    let mut store = test_database.store();
                    barrier.wait();
                    work(n, &mut store)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

on_both!(eight_claim_and_none_twice);
fn eight_claim_and_none_twice(test_database: &TestDatabase) {
    let all: Vec<TestSubmission> = (0..400)
        .map(|n| TestSubmission::by(&format!("a{n:03}"), ["alice", "bob", "carol"][n % 3]))
        .collect();
    submit(&mut test_database.store(), &all).unwrap();
    let taken = together(test_database, 8, |n, store| {
        let mut taken = Vec::new();
        // A claim can be empty because other threads have locked the remaining rows, and they may still release them.
        while !store.overview(1).unwrap().next.is_empty() {
            taken.extend(claim(store, 1 + n % 4));
        }
        taken
    });
    let all: Vec<_> = taken.into_iter().flatten().collect();
    let different: HashSet<_> = all.iter().map(|c| c.id.clone()).collect();
    assert_eq!((all.len(), different.len()), (400, 400));
    let keys: HashSet<_> = all.iter().map(|c| &c.key).collect();
    assert_eq!(keys.len(), 400);
    assert_eq!(
        test_database.sql("SELECT COUNT(*) FROM events WHERE event = 'claimed'"),
        ["400"]
    );
    assert_eq!(
        test_database.sql("SELECT COUNT(*) FROM attempts WHERE state = 'running'"),
        ["400"]
    );
}

on_both!(cancelled_or_claimed_but_not_both);
fn cancelled_or_claimed_but_not_both(test_database: &TestDatabase) {
    let all: Vec<TestSubmission> = (0..200)
        .map(|n| TestSubmission::new(&format!("a{n:03}")))
        .collect();
    submit(&mut test_database.store(), &all).unwrap();
    let done = AtomicBool::new(false);
    let answers = together(test_database, 6, |n, store| {
        let (mut claimed, mut ended) = (Vec::new(), Vec::new());
        if n < 3 {
            while !done.load(Ordering::Relaxed) {
                claimed.extend(claim(store, 2).into_iter().map(|c| c.id));
            }
            return (claimed, ended);
        }
        // Cancel from the front of the queue, where the other threads claim.
        for ask in all.iter().skip(n - 3).step_by(3) {
            if let CancelOutcome::Now { .. } = store.cancel(&ask.id, "bob").unwrap() {
                ended.push(ask.id.clone());
            }
        }
        if n == 5 {
            done.store(true, Ordering::Relaxed);
        }
        (claimed, ended)
    });
    let claimed: HashSet<_> = answers.iter().flat_map(|(c, _)| c.clone()).collect();
    let ended: HashSet<_> = answers.iter().flat_map(|(_, e)| e.clone()).collect();
    assert!(claimed.is_disjoint(&ended));
    let mut store = test_database.store();
    for ask in &all {
        let wanted = match (claimed.contains(&ask.id), ended.contains(&ask.id)) {
            (true, _) => State::Running,
            (_, true) => State::Cancelled,
            _ => panic!("{} is neither", ask.id),
        };
        assert_eq!(state(&mut store, &ask.id, 1), wanted);
    }
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM queue"), ["0"]);
}

on_both!(batches_that_overlap_do_not_wait_for_each_other);
fn batches_that_overlap_do_not_wait_for_each_other(test_database: &TestDatabase) {
    // All threads submit the same names, half of them in the opposite order. One submission succeeds, the others get an
    // error, and none hangs in the lock of another.
    for round in 0..5 {
        let names: Vec<TestSubmission> = (0..40)
            .map(|n| {
                TestSubmission::new(&format!("r{round}-{n}"))
                    .with_file(format!("{}", n % 7).as_bytes())
            })
            .collect();
        let answers = together(test_database, 4, |n, store| {
            let mut batch = names.clone();
            if n % 2 == 1 {
                batch.reverse();
            }
            submit(store, &batch).map_err(|e| e.fault_kind())
        });
        let won = answers.iter().filter(|a| a.is_ok()).count();
        assert_eq!(won, 1, "{answers:?}");
        assert!(
            answers
                .iter()
                .all(|a| a.is_ok() || *a == Err(store::FaultKind::Other)),
            "{answers:?}"
        );
    }
}

on_both!(the_bound_holds_for_all_together);
fn the_bound_holds_for_all_together(test_database: &TestDatabase) {
    let refused = together(test_database, 8, |n, store| {
        let mut refused = 0;
        for m in 0..5 {
            let ask = TestSubmission::new(&format!("a{n}-{m}"));
            match store.submit(&[ask.submit()], 10) {
                Ok(_) => (),
                Err(StoreError::QueueFull { queued, .. }) => {
                    assert!(queued <= 10);
                    refused += 1;
                }
                Err(e) => panic!("{e}"),
            }
        }
        refused
    });
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM queue"), ["10"]);
    assert_eq!(refused.iter().sum::<u32>(), 30);
}

on_both!(concurrent_submissions_with_one_key_create_one_analysis);
fn concurrent_submissions_with_one_key_create_one_analysis(test_database: &TestDatabase) {
    let answers = together(test_database, 8, |n, store| {
        let ask = TestSubmission {
            key: Some("the-key".to_owned()),
            ..TestSubmission::new(&format!("a{n}"))
        };
        submit(store, &[ask]).unwrap().remove(0)
    });
    let made = answers
        .iter()
        .filter(|a| matches!(a, store::SubmitOutcome::Now { .. }));
    assert_eq!(made.count(), 1, "{answers:?}");
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM analyses"), ["1"]);
}

on_both!(files_that_come_and_go);
fn files_that_come_and_go(test_database: &TestDatabase) {
    // All submissions have the same two files. Removing the last submission removes the files, while other threads submit
    // them again.
    together(test_database, 6, |n, store| {
        for m in 0..15 {
            let id = format!("a{n}-{m}");
            let ask = TestSubmission::new(&id).with_file(b"one").with_file(b"two");
            submit(store, &[ask]).unwrap();
            store.remove(&id, UnfinishedPolicy::Remove).unwrap();
        }
    });
    for table in ["blobs", "submission_blobs", "queue", "events"] {
        assert_eq!(
            test_database.sql(&format!("SELECT COUNT(*) FROM {table}")),
            ["0"],
            "{table}"
        );
    }
}

/// Inserts rows such as submissions make, with one statement.
fn fill(test_database: &TestDatabase, count: u32) {
    let numbers = match test_database.is_postgres() {
        true => format!("SELECT n FROM generate_series(1, {count}) AS g (n)"),
        false => format!(
            "WITH RECURSIVE g (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g WHERE n < {count}) SELECT n FROM g"
        ),
    };
    let from = format!("FROM ({numbers}) AS numbers");
    let name = "'q' || CAST(1000000 + n AS TEXT)";
    test_database.sql(&format!(
        "INSERT INTO analyses (id, created_ms, attempt_last) SELECT {name}, n, 1 {from}"
    ));
    test_database.sql(&format!(
        "INSERT INTO attempts (id, attempt, key, state, host, boot_id, submitter, created_ms, retries_left)
         SELECT {name}, 1, {name}, 'queued', '', '', 's' || CAST(n % 10 AS TEXT), n, 0 {from}"
    ));
    test_database.sql(&format!(
        "INSERT INTO submissions (id, fingerprint, request, submitter, priority, retries, retry_on, created_ms)
         SELECT {name}, '', '{{}}', 's' || CAST(n % 10 AS TEXT), 5, 0, '', n {from}"
    ));
    test_database.sql(&format!(
        "INSERT INTO queue (id, attempt, submitter, priority, turn, queued_ms, ready_ms)
         SELECT {name}, 1, 's' || CAST(n % 10 AS TEXT), n % 3, n / 10, n, n {from}"
    ));
    if test_database.is_postgres() {
        test_database.sql("ANALYZE");
    }
}

/// The query plan of a statement, as the database explains it.
fn plan(test_database: &TestDatabase, sql: &str) -> String {
    let explain = match test_database.is_postgres() {
        true => "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF, BUFFERS OFF)",
        false => "EXPLAIN QUERY PLAN",
    };
    test_database.sql(&format!("{explain} {sql}")).join("\n")
}

/// The two candidate queries of `queue/claim.rs`, with values.
const CANDIDATE_QUERIES: [&str; 2] = [
    "SELECT id, attempt, submitter, ready_ms, COALESCE(memory_bytes, 1), COALESCE(cpu_milli, 0) FROM queue
     WHERE not_before_ms IS NULL
     ORDER BY priority DESC, turn, queued_ms, id LIMIT 50",
    "SELECT id, attempt, submitter, ready_ms, COALESCE(memory_bytes, 1), COALESCE(cpu_milli, 0) FROM queue
     WHERE not_before_ms IS NULL AND COALESCE(memory_bytes, 1) <= 10 AND COALESCE(cpu_milli, 0) <= 1000
     ORDER BY priority DESC, turn, queued_ms, id LIMIT 1000",
];

/// The largest number of rows in any step of a plan.
fn rows_read(plan: &str) -> u64 {
    let counts = plan.split("rows=").skip(1);
    let count = |text: &str| {
        text.split([' ', '.'])
            .next()
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    counts.map(count).max().unwrap_or(0)
}

on_both!(a_claim_is_not_slower_in_a_long_queue);
fn a_claim_is_not_slower_in_a_long_queue(test_database: &TestDatabase) {
    for count in [1, 1_000, 100_000] {
        let mut store = test_database.store();
        drop(store.overview(1));
        for table in ["events", "queue", "submissions", "attempts", "analyses"] {
            test_database.sql(&format!("DELETE FROM {table}"));
        }
        fill(test_database, count);
        for (query, rows_max) in CANDIDATE_QUERIES.into_iter().zip([50, 1_000]) {
            let plan = plan(test_database, query);
            match test_database.is_postgres() {
                // PostgreSQL may scan a short table. No plan reads more rows than the query's LIMIT.
                true => {
                    assert!(rows_read(&plan) <= rows_max, "{plan}");
                    let by_index = plan.contains("Index Scan using queue_ready");
                    assert!(by_index || u64::from(count) <= rows_max, "{plan}");
                }
                false => {
                    assert!(plan.contains("USING INDEX queue_ready"), "{plan}");
                    assert!(!plan.contains("TEMP B-TREE"), "{plan}");
                }
            }
        }
        let keys = fresh_keys(3);
        let claimed = store.claim(&claim_from(&keys, PLENTY, PLENTY)).unwrap();
        assert_eq!(claimed.len(), count.min(3) as usize);
        // A new submission's place in the queue is found by index too.
        let place = "SELECT (SELECT MAX(turn) FROM queue WHERE submitter = 's1' AND priority = 1 AND not_before_ms IS NULL),
            (SELECT MIN(turn) FROM queue WHERE priority = 1 AND not_before_ms IS NULL)";
        let plan = self::plan(test_database, place);
        if !test_database.is_postgres() || count > 1_000 {
            assert!(
                plan.contains("queue_turns") && plan.contains("queue_ready"),
                "{plan}"
            );
            assert!(!plan.contains("Seq Scan"), "{plan}");
        }
    }
}

on_both!(queries_about_leases_delays_and_events_use_indexes);
fn queries_about_leases_delays_and_events_use_indexes(test_database: &TestDatabase) {
    drop(test_database.store());
    fill(test_database, 20_000);
    test_database.sql("UPDATE attempts SET state = 'succeeded', lease_ms = 5, cancel_ms = 5");
    if test_database.is_postgres() {
        test_database.sql("ANALYZE");
    }
    let questions = [
        (
            "SELECT id, attempt, key, state, host, lease_ms FROM attempts
             WHERE state IN ('running', 'collecting') AND lease_ms < 5 ORDER BY lease_ms, id LIMIT 9",
            "attempts_state",
        ),
        (
            "SELECT id, attempt, key FROM attempts
             WHERE host = 'x' AND cancel_ms IS NOT NULL AND state IN ('running', 'collecting') ORDER BY id, attempt",
            "attempts_state",
        ),
        (
            "SELECT MIN(not_before_ms) FROM queue WHERE not_before_ms IS NOT NULL",
            "queue_delayed",
        ),
        (
            "SELECT id, attempt, submitter, priority FROM queue WHERE not_before_ms <= 7 ORDER BY not_before_ms LIMIT 2",
            "queue_delayed",
        ),
        (
            "SELECT attempt, ms, event, reason, by FROM events WHERE id = 'a' ORDER BY seq",
            "events_id",
        ),
    ];
    for (question, index) in questions {
        let plan = plan(test_database, question);
        // PostgreSQL scans an empty table instead of its index.
        if index != "events_id" || !test_database.is_postgres() {
            assert!(plan.contains(index), "{plan}");
        }
    }
}

fn is_signalled(listener: &ChangeListener, within: Duration) -> bool {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    let timeout = within.try_into().unwrap();
    rustix::event::poll(&mut fds, Some(&timeout)).unwrap() == 1
}

const SOON: Duration = Duration::from_secs(20);
/// A signal that is under way arrives within this time.
const QUIET: Duration = Duration::from_millis(300);

/// Consumes signals until none has come for `QUIET`.
fn wait_until_quiet(listener: &mut ChangeListener) {
    let until = Instant::now() + SOON;
    while is_signalled(listener, QUIET) {
        listener.consume();
        assert!(Instant::now() < until, "the listener is still signalled");
    }
}

on_both!(the_bell_rings);
fn the_bell_rings(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut listener = ChangeListener::subscribe(&test_database.location).unwrap();
    if test_database.is_postgres() {
        assert!(
            is_signalled(&listener, SOON),
            "no signal when the subscription begins"
        );
    }
    wait_until_quiet(&mut listener);
    submit(
        &mut store,
        &[
            TestSubmission::retried("a", 1),
            TestSubmission::new("b"),
            TestSubmission::new("c"),
        ],
    )
    .unwrap();
    assert!(is_signalled(&listener, SOON), "no signal for a submission");
    wait_until_quiet(&mut listener);
    // A read must not signal, or two listeners would wake each other for ever.
    store.overview(9).unwrap();
    store.expired_leases(9).unwrap();
    store.promote_delayed().unwrap();
    assert!(
        store
            .claim(&claim_from(&[], PLENTY, PLENTY))
            .unwrap()
            .is_empty()
    );
    std::fs::write(test_database.dir.path().join("something-else"), "x").unwrap();
    assert!(!is_signalled(&listener, QUIET), "a read has signalled");
    let a = claim_one(&mut store);
    let b = claim_one(&mut store);
    wait_until_quiet(&mut listener);
    let mut each = |what: &str, act: &mut dyn FnMut()| {
        act();
        assert!(is_signalled(&listener, SOON), "no signal: {what}");
        wait_until_quiet(&mut listener);
    };
    each("give up", &mut || {
        assert!(give_up(&mut test_database.store(), &a))
    });
    each("cancel what runs", &mut || {
        drop(test_database.store().cancel("b", "bob").unwrap())
    });
    each("commit", &mut || {
        commit(
            &mut test_database.store(),
            &b,
            State::Cancelled,
            "cancelled",
        )
        .unwrap();
    });
    each("cancel what waits", &mut || {
        drop(test_database.store().cancel("c", "bob").unwrap())
    });
    each("retry", &mut || {
        test_database.store().retry("c", "bob", &[]).unwrap();
    });
    if let Location::Sqlite(path) = &test_database.location {
        // SQLite removes the write-ahead log with the last connection, and creates a new one with the next.
        drop(store);
        wait_until_quiet(&mut listener);
        assert!(!path.with_file_name("record.db-wal").exists());
        test_database
            .store()
            .submit(&[TestSubmission::new("d").submit()], QUEUE_MAX)
            .unwrap();
        assert!(
            is_signalled(&listener, SOON),
            "no signal after SQLite made a new log"
        );
    }
}

trial!(
    Caller,
    the_change_listener_reconnects_after_the_server_restarts
);
fn the_change_listener_reconnects_after_the_server_restarts() {
    let Some(server) = PrivatePostgres::start() else {
        return;
    };
    let database = server.create_database();
    let location = location(&server, &database, "postgres");
    Store::migrate(&location).unwrap();
    let mut listener = ChangeListener::subscribe(&location).unwrap();
    assert!(is_signalled(&listener, SOON));
    wait_until_quiet(&mut listener);
    server.kill();
    server.start_again();
    // Notifications during the outage are lost, so the listener signals when it has reconnected.
    assert!(
        is_signalled(&listener, SOON),
        "no signal after the server came back"
    );
    wait_until_quiet(&mut listener);
    submit(
        &mut Store::open(&location).unwrap(),
        &[TestSubmission::new("a")],
    )
    .unwrap();
    assert!(
        is_signalled(&listener, SOON),
        "no signal for a change after the reconnection"
    );
    // A listener can be created and dropped while the server is down.
    server.kill();
    let started = Instant::now();
    drop(ChangeListener::subscribe(&location).unwrap());
    drop(listener);
    assert!(started.elapsed() < SOON);
}
