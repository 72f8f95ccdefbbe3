//! Rows that Fumehood would not write, cannot read, or that are too long. Such a row affects its own attempt only.

use store::types::manifest::ContentHash;
use store::types::submission::{INPUT_BYTES_MAX, REQUEST_BYTES_MAX};
use store::{CommitOutcome, State};

use crate::queue_samples::{
    GIB, PLENTY, TestSubmission, claim, claim_from, claim_one, commit, fresh_keys, give_up, ids,
    state, submit, worker,
};
use crate::test_database::TestDatabase;

on_both!(an_attempt_ends_though_there_is_no_next_number);
/// Regression: the transaction that ends an attempt always failed if the next attempt could not get a number, so the
/// attempt kept its slot for ever.
fn an_attempt_ends_though_there_is_no_next_number(test_database: &TestDatabase) {
    let mut store = test_database.store();
    for (n, last) in [i64::MAX, i64::from(u32::MAX), i64::MIN, -1]
        .into_iter()
        .enumerate()
    {
        let ids = [format!("lost{n}"), format!("failed{n}")];
        let again = |id: &String| TestSubmission {
            retry_on: vec![State::Failed],
            ..TestSubmission::retried(id, 1)
        };
        submit(&mut store, &ids.each_ref().map(again)).unwrap();
        let claimed = claim(&mut store, 2);
        test_database.sql(&format!("UPDATE analyses SET attempt_last = {last}"));
        assert!(give_up(&mut store, &claimed[0]), "{last}");
        let committed = commit(&mut store, &claimed[1], State::Failed, "exit");
        assert_eq!(committed.unwrap(), CommitOutcome::Now, "{last}");
        assert_eq!(state(&mut store, &ids[0], 1), State::Error);
        assert_eq!(state(&mut store, &ids[1], 1), State::Failed);
        assert_eq!(
            test_database.sql("SELECT COUNT(*) FROM queue"),
            ["0"],
            "{last}"
        );
    }
    // Control: if a number is free, the next attempt is queued.
    submit(&mut store, &[TestSubmission::retried("a", 1)]).unwrap();
    let claimed = claim_one(&mut store);
    assert!(give_up(&mut store, &claimed));
    assert_eq!(test_database.sql("SELECT id, attempt FROM queue"), ["a|2"]);
}

on_both!(a_row_that_fumehood_would_not_write_cannot_be_written);
/// Regression: one such row stopped every worker, every submission, or both, for ever. Either the row could not be read,
/// and no row behind it was read; or adding its value to the time overflowed and ended the process.
fn a_row_that_fumehood_would_not_write_cannot_be_written(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(
        &mut store,
        &[TestSubmission::new("a"), TestSubmission::new("b")],
    )
    .unwrap();
    store.record_worker(&worker("w1", GIB, 1_000)).unwrap();
    let (most, least) = (i64::MAX, "-9223372036854775807");
    let rows = [
        "queue SET memory_bytes = -1".to_owned(),
        "queue SET cpu_milli = -5".to_owned(),
        "queue SET attempt = -3".to_owned(),
        "queue SET attempt = 5000000000".to_owned(),
        "queue SET priority = -1, not_before_ms = 5".to_owned(),
        format!("queue SET ready_ms = {least}"),
        format!("queue SET not_before_ms = {least}"),
        format!("queue SET turn = {most}"),
        "submissions SET priority = -1".to_owned(),
        "submissions SET retries = -1".to_owned(),
        "submissions SET memory_bytes = -1".to_owned(),
        "attempts SET retries_left = -1".to_owned(),
        format!("attempts SET lease_ms = {most}"),
        "workers SET memory_bytes = -1".to_owned(),
        format!("workers SET seen_ms = {most}"),
    ];
    for row in rows {
        let refused = test_database.try_sql(&format!("UPDATE {row}"));
        let refused = refused.expect_err(&row).to_lowercase();
        assert!(refused.contains("check constraint"), "{row}: {refused}");
    }
    // Control: another program can write values that Fumehood would write.
    test_database.sql("UPDATE queue SET memory_bytes = 1, priority = 9, turn = 7 WHERE id = 'b'");
    assert_eq!(ids(&claim(&mut store, 2)), ["b", "a"]);
    submit(&mut store, &[TestSubmission::new("c")]).unwrap();
}

on_both!(an_attempt_that_cannot_be_read_hides_no_other);
/// Regression: one row of `attempts` with an unreadable number, on the worker's own host, stopped the worker: it passed on
/// no cancellations, claimed nothing, and gave up no attempt.
fn an_attempt_that_cannot_be_read_hides_no_other(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(
        &mut store,
        &[TestSubmission::new("a"), TestSubmission::new("b")],
    )
    .unwrap();
    let claimed = claim(&mut store, 2);
    test_database.sql(
        "INSERT INTO attempts (id, attempt, key, state, host, boot_id, created_ms, lease_ms, cancel_ms)
         VALUES ('a', 5000000000, 'k', 'running', 'lab-1', 'boot-1', 1, 1, 1)",
    );
    store.cancel("b", "bob").unwrap();
    test_database.sql("UPDATE attempts SET lease_ms = 1000 WHERE id = 'b'");
    let requested_cancel = ("b".to_owned(), 1, claimed[1].key.clone());
    assert_eq!(
        store.requested_cancels("lab-1").unwrap(),
        [requested_cancel]
    );
    let expired = store.expired_leases(9).unwrap();
    let found: Vec<_> = expired.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(found, ["b"]);
}

fn long_text(test_database: &TestDatabase, bytes: usize) -> String {
    match test_database.is_postgres() {
        true => format!("repeat('x', {bytes})"),
        false => format!("printf('%.*c', {bytes}, 'x')"),
    }
}

on_both!(a_request_that_is_too_long_is_not_fetched);
/// Regression: the worker read requests of any length into its memory, three times over, before it checked their length.
fn a_request_that_is_too_long_is_not_fetched(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(
        &mut store,
        &[TestSubmission::new("long"), TestSubmission::new("longest")],
    )
    .unwrap();
    let most = long_text(test_database, REQUEST_BYTES_MAX);
    let more = long_text(test_database, REQUEST_BYTES_MAX + 1);
    test_database.sql(&format!(
        "UPDATE submissions SET request = {more} WHERE id = 'longest'"
    ));
    test_database.sql(&format!(
        "UPDATE submissions SET request = {most} WHERE id = 'long'"
    ));
    let keys = fresh_keys(2);
    // Twice, because a claim whose answer was lost is repeated and returns the same attempts.
    for _ in 0..2 {
        let mut claimed = store.claim(&claim_from(&keys, PLENTY, PLENTY)).unwrap();
        claimed.sort_by(|a, b| a.id.cmp(&b.id));
        let bytes: Vec<usize> = claimed.iter().map(|one| one.request_json.len()).collect();
        assert_eq!(bytes, [REQUEST_BYTES_MAX, 0]);
    }
}

on_both!(a_file_that_is_too_long_is_not_fetched);
/// Regression: a runner fetched a file of any length before it checked the length.
fn a_file_that_is_too_long_is_not_fetched(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let bytes = usize::try_from(INPUT_BYTES_MAX).unwrap() + 1;
    // The hash is correct, so that only the length can be the reason for a refusal.
    let hash = ContentHash::of(&vec![b'x'; bytes]);
    let text = long_text(test_database, bytes);
    let content = match test_database.is_postgres() {
        true => format!("convert_to({text}, 'UTF8')"),
        false => format!("CAST({text} AS BLOB)"),
    };
    test_database.sql(&format!(
        "INSERT INTO blobs (blake3, bytes, content) VALUES ('{hash}', 1, {content})"
    ));
    assert!(store.submitted_file(&hash).unwrap().is_none());
    // Control: a file that is short enough is fetched.
    submit(&mut store, &[TestSubmission::new("a").with_file(b"short")]).unwrap();
    let short = store.submitted_file(&ContentHash::of(b"short")).unwrap();
    assert_eq!(short.as_deref(), Some(&b"short"[..]));
}
