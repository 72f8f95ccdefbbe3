//! What each PostgreSQL role may do with exactly the documented grants.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use store::types::manifest::ContentHash;
use store::{
    AttemptFilter, AttemptSelection, CommitOutcome, FaultKind, GRANTS, GRANTS_TO_READ,
    GRANTS_TO_REMOVE, LostAttempt, PostProcessState, Store, StoreError, UnfinishedPolicy,
};
use testkit::trial;

use crate::queue_samples::{
    GIB, LEASE_MS, TestSubmission, claim_one, give_up, held, sample, submit, worker,
};
use crate::test_database::{TestAttempt, TestDatabase, key, location};

trial!(Caller, a_runner_needs_the_grants_and_no_more);
fn a_runner_needs_the_grants_and_no_more() {
    let Some(test_database) = TestDatabase::postgres() else {
        return;
    };
    let (server, database) = test_database.server.as_ref().unwrap();
    let runner = location(server, database, "fumehood_runner");
    let without = Store::open(&runner).unwrap_err();
    assert_eq!(without.fault_kind(), FaultKind::Permission, "{without}");
    server.psql(database, GRANTS);

    let mut store = Store::open(&runner).unwrap();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Now);
    assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Already);
    let lost = TestAttempt::new("b", &key(2));
    lost.begin(&mut store).unwrap();
    let given_up = LostAttempt {
        id: "b",
        attempt: 1,
        key: &key(2),
        by: &key(9),
        reason: "runner_lost",
        message: "",
        proof: store::LossProof::RunnerGone,
    };
    assert!(store.give_up(&given_up).unwrap());
    assert_eq!(
        lost.commit(&mut store).unwrap(),
        CommitOutcome::Superseded { attempt: 2 }
    );
    TestAttempt::new("c", &key(3)).record(&mut store).unwrap();
    store
        .mark_post_process("a", 1, PostProcessState::Done, None)
        .unwrap();
    store
        .list(&AttemptFilter {
            states: &[],
            since_ms: None,
            which: AttemptSelection::All,
            limit: 9,
        })
        .unwrap();
    store.show("a", None).unwrap();
    store.outputs("a", 1).unwrap();
    store.log("a", 1, "stdout").unwrap();
    store.remarks("a", 1).unwrap();
    store.resolve("@last").unwrap();
    store.unfinished(None).unwrap();
    store.post_process_due(None, 9).unwrap();
    store.removable(i64::MAX, &[], 9).unwrap();
    store
        .for_each_referenced_object("store-1", &mut |_| Ok(()))
        .unwrap();
    store.export(&mut Vec::new()).unwrap();
    store.status().unwrap();

    let error = store.remove("a", UnfinishedPolicy::Refuse).unwrap_err();
    assert_eq!(error.fault_kind(), FaultKind::Permission, "{error}");
    assert!(error.to_string().contains("DELETE"), "{error}");
    store.show("a", None).unwrap();
    let error = Store::migrate(&runner).unwrap_err();
    assert!(matches!(error, StoreError::SchemaOwner { .. }), "{error}");
    for forbidden in [
        "CREATE TABLE fumehood.mine (x int)",
        "UPDATE fumehood.meta SET schema_minor = 99",
        "DROP TABLE fumehood.outputs",
        "TRUNCATE fumehood.outputs",
        "DELETE FROM fumehood.outputs",
    ] {
        let refused = server
            .psql_as(database, "fumehood_runner", forbidden)
            .unwrap_err();
        assert!(
            refused.contains("permission denied") || refused.contains("must be owner"),
            "{refused}"
        );
    }
    server.psql(database, GRANTS_TO_REMOVE);
    assert_eq!(
        store
            .remove("a", UnfinishedPolicy::Refuse)
            .unwrap()
            .attempts,
        1
    );
}

trial!(Caller, a_reader_sees_the_views_and_no_keys);
fn a_reader_sees_the_views_and_no_keys() {
    let Some(test_database) = TestDatabase::postgres() else {
        return;
    };
    let (server, database) = test_database.server.as_ref().unwrap();
    server.psql(database, GRANTS_TO_READ);
    TestAttempt::new("a", "the-secret-key")
        .record(&mut test_database.store())
        .unwrap();
    let secret = TestSubmission {
        request: "the-secret-key".to_owned(),
        key: Some("the-secret-key".to_owned()),
        ..TestSubmission::new("queued-one")
    };
    submit(
        &mut test_database.store(),
        &[secret.with_file(b"the-secret-key")],
    )
    .unwrap();
    let ask = |sql: &str| server.psql_as(database, "fumehood_reader", sql);
    let mut seen = String::new();
    for view in [
        "analyses_v1",
        "attempts_v1",
        "outputs_v1",
        "logs_v1",
        "remarks_v1",
        "remark_counts_v1",
        "queue_v1",
        "workers_v1",
        "events_v1",
    ] {
        seen += &ask(&format!("SELECT * FROM fumehood.{view}")).unwrap();
    }
    assert!(
        seen.contains("plot.png")
            && seen.contains("queued-one")
            && !seen.contains("the-secret-key"),
        "{seen}"
    );
    for forbidden in [
        "SELECT key FROM fumehood.attempts",
        "SELECT request FROM fumehood.submissions",
        "SELECT content FROM fumehood.blobs",
        "SELECT turn FROM fumehood.queue",
        "UPDATE fumehood.outputs_v1 SET bytes = 0",
        "DELETE FROM fumehood.remarks_v1",
        "INSERT INTO fumehood.remark_counts_v1 VALUES ('a', 1, 'x', 1)",
    ] {
        assert!(
            ask(forbidden).unwrap_err().contains("permission denied"),
            "{forbidden}"
        );
    }
}

trial!(Caller, a_runner_has_the_whole_queue);
fn a_runner_has_the_whole_queue() {
    let Some(test_database) = TestDatabase::postgres() else {
        return;
    };
    let (server, database) = test_database.server.as_ref().unwrap();
    server.psql(database, GRANTS);
    let mut store = Store::open(&location(server, database, "fumehood_runner")).unwrap();
    store.record_worker(&worker("w1", 64 * GIB, 8_000)).unwrap();
    let ask = TestSubmission::retried("a", 1).with_file(b"x");
    submit(
        &mut store,
        &[ask, TestSubmission::new("b"), TestSubmission::new("c")],
    )
    .unwrap();
    let a = claim_one(&mut store);
    let taken = sample(&a);
    assert!(
        store
            .start_claimed(&taken.beginning(), 1, LEASE_MS)
            .unwrap()
    );
    store.renew_lease(&held(&a), LEASE_MS).unwrap();
    assert!(store.mark_collecting(&held(&a), LEASE_MS, "exit").unwrap());
    assert!(give_up(&mut store, &a));
    store.promote_delayed().unwrap();
    store.cancel("a", "bob").unwrap();
    store.retry("a", "bob", &[]).unwrap();
    store.requested_cancels("lab-1").unwrap();
    store.expired_leases(9).unwrap();
    store.overview(9).unwrap();
    store.events("a").unwrap();
    store
        .submitted_file(&ContentHash::of(b"x"))
        .unwrap()
        .unwrap();
    store.cancel("a", "bob").unwrap();
    let again = TestSubmission {
        replace: true,
        ..TestSubmission::new("a").with_file(b"y")
    };
    submit(&mut store, &[again]).unwrap();
    server.psql(
        database,
        "UPDATE fumehood.queue SET ready_ms = 1, memory_bytes = 99999999999999 WHERE id = 'b'",
    );
    let parked = store.park_unfit(&worker("w1", GIB, 8_000), GIB, 1_000);
    assert_eq!(parked.unwrap(), ["b"]);
    store.remove_worker(&worker("w1", GIB, 8_000)).unwrap();
    for forbidden in [
        "DELETE FROM fumehood.events",
        "UPDATE fumehood.events SET by = 'somebody else'",
    ] {
        let refused = server.psql_as(database, "fumehood_runner", forbidden);
        assert!(refused.unwrap_err().contains("permission denied"));
    }
    server.psql(database, GRANTS_TO_REMOVE);
    for id in ["a", "b", "c"] {
        store.remove(id, UnfinishedPolicy::Remove).unwrap();
    }
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM events"), ["0"]);
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM blobs"), ["0"]);
}

trial!(Caller, a_commit_is_heard_by_those_who_listen);
/// psql prints notifications only after its next statement.
fn a_commit_is_heard_by_those_who_listen() {
    let Some(test_database) = TestDatabase::postgres() else {
        return;
    };
    let (server, database) = test_database.server.as_ref().unwrap();
    let mut listener = Command::new(server.bin().join("psql"))
        .args([
            "-X", "-q", "-A", "-t", "-U", "postgres", "-d", database, "-h",
        ])
        .arg(server.dir())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut say = listener.stdin.take().unwrap();
    let mut heard = BufReader::new(listener.stdout.take().unwrap()).lines();
    writeln!(say, "LISTEN fumehood_commit;\n\\echo listening").unwrap();
    assert_eq!(heard.next().unwrap().unwrap(), "listening");
    let mut store = test_database.store();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    let undone = sample.commit_with(&mut store, &mut |_| Ok(None), &mut || {
        Err(std::io::Error::other("no"))
    });
    undone.unwrap_err();
    sample.commit(&mut store).unwrap();
    sample.commit(&mut store).unwrap();
    writeln!(say, "SELECT 'asked';\n\\echo end").unwrap();
    drop(say);
    let heard: Vec<String> = heard.map(Result::unwrap).collect();
    let told: Vec<&String> = heard
        .iter()
        .filter(|line| line.contains("fumehood_commit"))
        .collect();
    assert_eq!(told.len(), 1, "{heard:?}");
    let payload = told[0]
        .split_once("payload \"")
        .unwrap()
        .1
        .split_once("\" received")
        .unwrap()
        .0;
    let payload: serde_json::Value = serde_json::from_str(payload).unwrap();
    assert_eq!(
        payload,
        serde_json::json!({"id": "a", "attempt": 1, "state": "succeeded"})
    );
    listener.wait().unwrap();
}
