//! What attackers of the queue found at the database: each trial names its finding, and says what it saw then.

use std::time::{SystemTime, UNIX_EPOCH};

use store::types::manifest::ContentHash;
use store::types::submission::{INPUT_BYTES_MAX, REQUEST_BYTES_MAX};
use store::{Capacity, CommitOutcome, LossProof, LostAttempt, State, Store};

use crate::desk::{
    Ask, GIB, LEASE_MS, PLENTY, claim, claim_from, claim_one, commit, fresh_keys, give_up, held,
    ids, state, story, submit, worker,
};
use crate::lab::Lab;

on_both! {
    a_renewed_lease_is_not_given_up
    what_was_cancelled_and_given_up_is_cancelled
    an_attempt_ends_though_there_is_no_next_number
    a_row_that_fumehood_would_not_write_cannot_be_written
    an_attempt_that_cannot_be_read_hides_no_other
    a_large_one_holds_others_back_half_of_the_time
    a_request_that_is_too_long_is_not_fetched
    a_file_that_is_too_long_is_not_fetched
}

/// The machine's clock, which is the database's here.
fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    i64::try_from(since.as_millis()).unwrap()
}

/// Second attacker, F8 and F9: whoever had looked at a lease ended the attempt, also when the lease had been renewed
/// since, or had never been over.
fn a_renewed_lease_is_not_given_up(lab: &Lab) {
    let mut store = lab.store();
    submit(&mut store, &[Ask::retried("a", 1)]).unwrap();
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
    lab.sql("UPDATE attempts SET lease_ms = 1000");
    assert_eq!(
        store.expired_leases(9).unwrap().len(),
        1,
        "it is seen to be over"
    );
    store.renew_lease(&held(&claimed), LEASE_MS).unwrap();
    assert!(!by_lease(&mut store), "and was renewed then");
    assert_eq!(state(&mut store, "a", 1), State::Running);
    assert_eq!(story(&mut store, "a"), ["1 submitted", "1 claimed"]);
    // The control: one that is over is reason enough.
    lab.sql("UPDATE attempts SET lease_ms = 1000");
    assert!(by_lease(&mut store));
    assert_eq!(state(&mut store, "a", 1), State::Error);
    assert_eq!(state(&mut store, "a", 2), State::Queued);
}

/// Second attacker, F13: one that was cancelled before it had begun became an `error`, with the name of who had cancelled it.
fn what_was_cancelled_and_given_up_is_cancelled(lab: &Lab) {
    let mut store = lab.store();
    submit(&mut store, &[Ask::retried("a", 3), Ask::retried("b", 3)]).unwrap();
    let claimed = claim(&mut store, 2);
    store.cancel("a", "bob").unwrap();
    for one in &claimed {
        assert!(give_up(&mut store, one));
    }
    assert_eq!(state(&mut store, "a", 1), State::Cancelled);
    assert_eq!(
        lab.sql("SELECT cancel_by FROM analyses_v1 WHERE id = 'a'"),
        ["bob"]
    );
    // The control: nobody wished for that one's end, so it is tried again.
    assert_eq!(state(&mut store, "b", 1), State::Error);
    assert_eq!(lab.sql("SELECT id, attempt FROM queue"), ["b|2"]);
}

/// First attacker, L and L': the transaction that ends an attempt failed every time, because the next one had no number;
/// its slot was taken for ever.
fn an_attempt_ends_though_there_is_no_next_number(lab: &Lab) {
    let mut store = lab.store();
    for (n, last) in [i64::MAX, i64::from(u32::MAX), i64::MIN, -1]
        .into_iter()
        .enumerate()
    {
        let ids = [format!("lost{n}"), format!("failed{n}")];
        let again = |id: &String| Ask {
            retry_on: vec![State::Failed],
            ..Ask::retried(id, 1)
        };
        submit(&mut store, &ids.each_ref().map(again)).unwrap();
        let claimed = claim(&mut store, 2);
        lab.sql(&format!("UPDATE analyses SET attempt_last = {last}"));
        assert!(give_up(&mut store, &claimed[0]), "{last}");
        let committed = commit(&mut store, &claimed[1], State::Failed, "exit");
        assert_eq!(committed.unwrap(), CommitOutcome::Now, "{last}");
        assert_eq!(state(&mut store, &ids[0], 1), State::Error);
        assert_eq!(state(&mut store, &ids[1], 1), State::Failed);
        assert_eq!(lab.sql("SELECT COUNT(*) FROM queue"), ["0"], "{last}");
    }
    // The control: where there is a number, there is a next attempt.
    submit(&mut store, &[Ask::retried("a", 1)]).unwrap();
    let claimed = claim_one(&mut store);
    assert!(give_up(&mut store, &claimed));
    assert_eq!(lab.sql("SELECT id, attempt FROM queue"), ["a|2"]);
}

/// First attacker, B, B2, B3 and L: one such row stopped every worker, every submission, or both, for ever: it could not be
/// read, and nothing behind it was; or a sum of it and the time ended the process.
fn a_row_that_fumehood_would_not_write_cannot_be_written(lab: &Lab) {
    let mut store = lab.store();
    submit(&mut store, &[Ask::new("a"), Ask::new("b")]).unwrap();
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
        let refused = lab.try_sql(&format!("UPDATE {row}"));
        let refused = refused.expect_err(&row).to_lowercase();
        assert!(refused.contains("check constraint"), "{row}: {refused}");
    }
    // The control: what Fumehood would write can be written by others, too.
    lab.sql("UPDATE queue SET memory_bytes = 1, priority = 9, turn = 7 WHERE id = 'b'");
    assert_eq!(ids(&claim(&mut store, 2)), ["b", "a"]);
    submit(&mut store, &[Ask::new("c")]).unwrap();
}

/// First attacker, B4: one row of `attempts` whose number nobody can read, on the worker's own host, and it passed on no
/// wishes, took nothing more, and gave up nothing.
fn an_attempt_that_cannot_be_read_hides_no_other(lab: &Lab) {
    let mut store = lab.store();
    submit(&mut store, &[Ask::new("a"), Ask::new("b")]).unwrap();
    let claimed = claim(&mut store, 2);
    lab.sql(
        "INSERT INTO attempts (id, attempt, key, state, host, boot_id, created_ms, lease_ms, cancel_ms)
         VALUES ('a', 5000000000, 'k', 'running', 'lab-1', 'boot-1', 1, 1, 1)",
    );
    store.cancel("b", "bob").unwrap();
    lab.sql("UPDATE attempts SET lease_ms = 1000 WHERE id = 'b'");
    let wish = ("b".to_owned(), 1, claimed[1].key.clone());
    assert_eq!(store.requested_cancels("lab-1").unwrap(), [wish]);
    let expired = store.expired_leases(9).unwrap();
    let found: Vec<_> = expired.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(found, ["b"]);
}

/// First attacker, Q: beside something small that runs for a year, one that needed all the memory kept every other from
/// being taken, for that year.
fn a_large_one_holds_others_back_half_of_the_time(lab: &Lab) {
    let room = |gib: u64| Capacity {
        memory_bytes: gib * GIB,
        cpu_milli: 8_000,
    };
    let mut store = lab.store();
    let large = Ask {
        memory_bytes: Some(4 * GIB),
        ..Ask::new("large")
    };
    submit(&mut store, &[large]).unwrap();
    // It has been ready for so many seconds: whether what is behind it is taken.
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
        submit(&mut store, &[Ask::new(&id)]).unwrap();
        let since = now_ms() - ready_for * 1_000;
        lab.sql(&format!(
            "UPDATE queue SET ready_ms = {since} WHERE id = 'large'"
        ));
        let keys = fresh_keys(1);
        let claimed = store.claim(&claim_from(&keys, room(3), room(4))).unwrap();
        assert_eq!(claimed.len(), usize::from(taken), "after {ready_for} s");
        assert!(claimed.iter().all(|one| one.id != "large"));
        lab.sql("DELETE FROM queue WHERE id <> 'large'");
    }
    // The control: it was there all the time, and is taken once there is room.
    let keys = fresh_keys(1);
    let claimed = store.claim(&claim_from(&keys, room(4), room(4))).unwrap();
    assert_eq!(ids(&claimed), ["large"]);
}

fn long_text(lab: &Lab, bytes: usize) -> String {
    match lab.is_postgres() {
        true => format!("repeat('x', {bytes})"),
        false => format!("printf('%.*c', {bytes}, 'x')"),
    }
}

/// First attacker, G: the worker itself took requests of any length into its memory, three times over, before anybody
/// looked at how long they were.
fn a_request_that_is_too_long_is_not_fetched(lab: &Lab) {
    let mut store = lab.store();
    submit(&mut store, &[Ask::new("long"), Ask::new("longest")]).unwrap();
    let most = long_text(lab, REQUEST_BYTES_MAX);
    let more = long_text(lab, REQUEST_BYTES_MAX + 1);
    lab.sql(&format!(
        "UPDATE submissions SET request = {more} WHERE id = 'longest'"
    ));
    lab.sql(&format!(
        "UPDATE submissions SET request = {most} WHERE id = 'long'"
    ));
    let keys = fresh_keys(2);
    // Twice: a claim whose answer was lost is told again what it took.
    for _ in 0..2 {
        let mut claimed = store.claim(&claim_from(&keys, PLENTY, PLENTY)).unwrap();
        claimed.sort_by(|a, b| a.id.cmp(&b.id));
        let bytes: Vec<usize> = claimed.iter().map(|one| one.request_json.len()).collect();
        assert_eq!(bytes, [REQUEST_BYTES_MAX, 0]);
    }
}

/// First attacker, G2: a runner fetched a file of any length before it looked at its length.
fn a_file_that_is_too_long_is_not_fetched(lab: &Lab) {
    let mut store = lab.store();
    let bytes = usize::try_from(INPUT_BYTES_MAX).unwrap() + 1;
    // With its true hash, by which it would be found good.
    let hash = ContentHash::of(&vec![b'x'; bytes]);
    let text = long_text(lab, bytes);
    let content = match lab.is_postgres() {
        true => format!("convert_to({text}, 'UTF8')"),
        false => format!("CAST({text} AS BLOB)"),
    };
    lab.sql(&format!(
        "INSERT INTO blobs (blake3, bytes, content) VALUES ('{hash}', 1, {content})"
    ));
    assert!(store.submitted_file(&hash).unwrap().is_none());
    // The control: one that is not too long is fetched.
    submit(&mut store, &[Ask::new("a").with_file(b"short")]).unwrap();
    let short = store.submitted_file(&ContentHash::of(b"short")).unwrap();
    assert_eq!(short.as_deref(), Some(&b"short"[..]));
}
