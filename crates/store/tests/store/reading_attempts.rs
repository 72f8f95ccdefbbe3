//! Attempts are listed, resolved, removed and exported.

use std::collections::BTreeSet;

use store::types::manifest::ContentHash;
use store::{
    AttemptFilter, AttemptSelection, FaultKind, PostProcessState, State, Store, StoreError,
    UnfinishedPolicy,
};

use crate::test_database::{TestAttempt, TestDatabase, key, log, output};

on_both!(a_row_of_unknown_words_is_listed_and_hides_no_other);
fn a_row_of_unknown_words_is_listed_and_hides_no_other(test_database: &TestDatabase) {
    let mut store = test_database.store();
    for (number, id) in ["a", "b", "c", "d"].into_iter().enumerate() {
        made(&mut store, id, number as u32 + 1, State::Succeeded);
        age(test_database, id, 1, 9 - number as i64);
    }
    test_database
        .sql("UPDATE attempts SET post_process = 'bygone', reason = 'unheard of' WHERE id = 'a'");
    test_database.sql("UPDATE attempts SET wall_ms = -1, exit_code = 99999999999 WHERE id = 'b'");
    test_database.sql("UPDATE attempts SET state = 'dreaming' WHERE id = 'c'");
    let listed = names(&mut store, &ALL);
    assert_eq!(listed, ["a/1", "b/1", "c/1", "d/1"]);
    let listed = store.list(&ALL).unwrap();
    assert_eq!(listed[0].post_process, PostProcessState::Unknown);
    assert_eq!(listed[0].post_process_word.as_deref(), Some("bygone"));
    assert_eq!(listed[0].reason.as_deref(), Some("unheard of"));
    assert_eq!((listed[1].wall_ms, listed[1].exit_code), (None, None));
    assert_eq!(
        (listed[2].state, listed[2].state_word.as_str()),
        (State::Unknown, "dreaming")
    );
    let whole = store.show("a", None).unwrap();
    assert_eq!(whole.summary.post_process, PostProcessState::Unknown);
    assert_eq!(store.show("c", None).unwrap().summary, listed[2]);
    assert!(store.post_process_due(None, 10).unwrap().is_empty());
    store.overview(10).unwrap();
}

fn made(store: &mut Store, id: &str, number: u32, state: State) {
    let mut sample = TestAttempt::new(id, &key(number));
    sample.state = state;
    sample.replace = true;
    sample.attempt = sample.begin(store).unwrap();
    sample.commit(store).unwrap();
}

const ALL: AttemptFilter = AttemptFilter {
    states: &[],
    since_ms: None,
    which: AttemptSelection::Latest,
    limit: 100,
};

fn names(store: &mut Store, filter: &AttemptFilter) -> Vec<String> {
    let listed = store.list(filter).unwrap();
    listed
        .iter()
        .map(|l| format!("{}/{}", l.id, l.attempt))
        .collect()
}

/// Sets the times of an attempt. Without this, two attempts may get the same millisecond, and then their times do not
/// order them.
fn age(test_database: &TestDatabase, id: &str, attempt: u32, ms: i64) {
    test_database.sql(&format!(
        "UPDATE attempts SET created_ms = {ms}, committed_ms = {ms} WHERE id = '{id}' AND attempt = {attempt}"
    ));
}

on_both!(listings_are_newest_first);
fn listings_are_newest_first(test_database: &TestDatabase) {
    let mut store = test_database.store();
    assert_eq!(names(&mut store, &ALL), Vec::<String>::new());
    made(&mut store, "a", 1, State::Succeeded);
    made(&mut store, "b", 2, State::Failed);
    made(&mut store, "a", 3, State::TimedOut);
    made(&mut store, "c", 4, State::Error);
    for (id, attempt, ms) in [
        ("a", 1, 1_000),
        ("b", 1, 2_000),
        ("a", 2, 3_000),
        ("c", 1, 4_000),
    ] {
        age(test_database, id, attempt, ms);
    }
    assert_eq!(names(&mut store, &ALL), ["c/1", "a/2", "b/1"]);
    let all = AttemptFilter {
        which: AttemptSelection::All,
        ..ALL
    };
    assert_eq!(names(&mut store, &all), ["c/1", "a/2", "b/1", "a/1"]);
    assert_eq!(
        names(&mut store, &AttemptFilter { limit: 2, ..ALL }),
        ["c/1", "a/2"]
    );
    assert_eq!(
        names(
            &mut store,
            &AttemptFilter {
                since_ms: Some(3_000),
                ..ALL
            }
        ),
        ["c/1", "a/2"]
    );
    let failed = AttemptFilter {
        states: &[State::Failed, State::TimedOut],
        ..ALL
    };
    assert_eq!(names(&mut store, &failed), ["a/2", "b/1"]);
    let succeeded = AttemptFilter {
        states: &[State::Succeeded],
        ..ALL
    };
    assert_eq!(
        names(&mut store, &succeeded),
        Vec::<String>::new(),
        "an earlier attempt does not count"
    );
}

on_both!(ids_are_resolved);
fn ids_are_resolved(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let missing = store.resolve("@last").unwrap_err();
    assert!(matches!(missing, StoreError::NotFound { .. }));
    for (number, id) in ["gwas-7", "gwas-70", "gwas_7", "GWAS-7", "x.y", "x%y"]
        .into_iter()
        .enumerate()
    {
        made(&mut store, id, number as u32 + 1, State::Succeeded);
        age(test_database, id, 1, number as i64);
    }
    assert_eq!(
        store.resolve("gwas-7").unwrap(),
        "gwas-7",
        "exact before prefix"
    );
    assert_eq!(store.resolve("gwas-70").unwrap(), "gwas-70");
    assert_eq!(store.resolve("gwas_").unwrap(), "gwas_7", "no wildcard");
    assert_eq!(store.resolve("G").unwrap(), "GWAS-7", "case counts");
    assert_eq!(store.resolve("@last").unwrap(), "x%y");
    match store.resolve("gwas").unwrap_err() {
        StoreError::Ambiguous { candidates, .. } => {
            assert_eq!(candidates, ["gwas-7", "gwas-70", "gwas_7"])
        }
        other => panic!("{other}"),
    }
    for nothing in ["", "%", "x_", "gwas-8", "' OR 1=1 --", "\0", "@first", "ü"] {
        let error = store.resolve(nothing).unwrap_err();
        assert!(
            matches!(error, StoreError::NotFound { .. }),
            "{nothing:?}: {error}"
        );
        assert_eq!(error.fault_kind(), FaultKind::Other);
    }
}

on_both!(removal_takes_all_of_it_and_nothing_else);
fn removal_takes_all_of_it_and_nothing_else(test_database: &TestDatabase) {
    let mut store = test_database.store();
    made(&mut store, "a", 1, State::Succeeded);
    made(&mut store, "a", 2, State::Failed);
    made(&mut store, "b", 3, State::Failed);
    let removed = store.remove("a", UnfinishedPolicy::Refuse).unwrap();
    assert_eq!((removed.attempts, removed.outputs), (2, 4));
    for table in [
        "analyses",
        "attempts",
        "outputs",
        "logs",
        "remarks",
        "remark_counts",
    ] {
        let left: BTreeSet<String> = test_database
            .sql(&format!("SELECT id FROM {table}"))
            .into_iter()
            .collect();
        assert_eq!(left, BTreeSet::from(["b".to_owned()]), "{table}");
    }
    assert!(matches!(
        store.remove("a", UnfinishedPolicy::Refuse).unwrap_err(),
        StoreError::NotFound { .. }
    ));
}

on_both!(removable_lists_only_old_ended_analyses_in_the_given_states);
fn removable_lists_only_old_ended_analyses_in_the_given_states(test_database: &TestDatabase) {
    let mut store = test_database.store();
    for (number, (id, state, ms)) in [
        ("old", State::Succeeded, 1_000),
        ("older", State::Failed, 500),
        ("new", State::Succeeded, 9_000),
        ("redone", State::Succeeded, 100),
        ("busy", State::Failed, 100),
    ]
    .into_iter()
    .enumerate()
    {
        made(&mut store, id, number as u32, state);
        age(test_database, id, 1, ms);
    }
    made(&mut store, "redone", 10, State::Failed);
    age(test_database, "redone", 2, 9_000);
    let mut busy = TestAttempt::new("busy", &key(11));
    busy.replace = true;
    busy.begin(&mut store).unwrap();
    let mut found = |before, states: &[State]| -> Vec<String> {
        store
            .removable(before, states, 100)
            .unwrap()
            .into_iter()
            .map(|r| r.id)
            .collect()
    };
    assert_eq!(found(5_000, &[]), ["older", "old"]);
    assert_eq!(found(5_000, &[State::Failed]), ["older"]);
    assert_eq!(found(10_000, &[State::Failed]), ["older", "redone"]);
    assert_eq!(found(100, &[]), Vec::<String>::new());
    let one = store.removable(5_000, &[], 1).unwrap();
    assert_eq!(
        (one[0].id.as_str(), one[0].attempts, one[0].output_bytes),
        ("older", 1, 7)
    );
}

on_both!(references_are_walked_in_pages);
fn references_are_walked_in_pages(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut sample = TestAttempt::new("a", &key(1));
    sample.outputs = (0..2_500u32)
        .map(|n| output(format!("{n}").as_bytes(), &(n % 2_400).to_le_bytes()))
        .collect();
    let whole_log = ContentHash::of(b"the whole log");
    sample.logs = vec![log("stdout", b"")];
    sample.logs[0].object = Some(whole_log);
    sample.record(&mut store).unwrap();
    let mut other = TestAttempt::new("b", &key(2));
    other.artifact_store = "store-2".to_owned();
    other.record(&mut store).unwrap();
    let mut seen = Vec::new();
    store
        .for_each_referenced_object("store-1", &mut |hash| {
            seen.push(*hash);
            Ok(())
        })
        .unwrap();
    let mut wanted: Vec<ContentHash> = sample
        .outputs
        .iter()
        .map(|o| o.blake3)
        .chain([whole_log])
        .collect();
    wanted.sort();
    wanted.dedup();
    assert_eq!(seen, wanted);
    let stop =
        store.for_each_referenced_object("store-2", &mut |_| Err(std::io::Error::other("stop")));
    assert!(matches!(stop.unwrap_err(), StoreError::Callback(_)));
}

on_both!(post_processing_is_kept_until_done);
fn post_processing_is_kept_until_done(test_database: &TestDatabase) {
    let mut store = test_database.store();
    for (number, (id, host)) in [("a", "lab-1"), ("b", "lab-2")].into_iter().enumerate() {
        let mut sample = TestAttempt::new(id, &key(number as u32));
        sample.host = host.to_owned();
        sample.post_process = PostProcessState::Pending;
        sample.record(&mut store).unwrap();
        age(test_database, id, 1, number as i64);
    }
    made(&mut store, "c", 7, State::Succeeded);
    let ids = |store: &mut Store, host| -> Vec<String> {
        store
            .post_process_due(host, 10)
            .unwrap()
            .into_iter()
            .map(|d| d.id)
            .collect()
    };
    assert_eq!(ids(&mut store, None), ["a", "b"]);
    assert_eq!(ids(&mut store, Some("lab-2")), ["b"]);
    store
        .mark_post_process("a", 1, PostProcessState::Failed, Some("exit 3"))
        .unwrap();
    let due = store.post_process_due(Some("lab-1"), 10).unwrap();
    assert_eq!((due[0].state, due[0].tries), (PostProcessState::Failed, 1));
    let shown = store.show("a", None).unwrap();
    assert_eq!(shown.post_process_message.as_deref(), Some("exit 3"));
    assert!(shown.post_process_ms.is_some());
    store
        .mark_post_process("a", 1, PostProcessState::Done, None)
        .unwrap();
    assert_eq!(ids(&mut store, None), ["b"]);
    let shown = store.show("a", None).unwrap();
    assert_eq!(
        (shown.summary.post_process, shown.post_process_tries),
        (PostProcessState::Done, 2)
    );
    let missing = store.mark_post_process("a", 9, PostProcessState::Done, None);
    assert!(matches!(missing.unwrap_err(), StoreError::NotFound { .. }));
}

on_both!(the_export_has_everything);
fn the_export_has_everything(test_database: &TestDatabase) {
    let mut store = test_database.store();
    for number in 0..3 {
        let mut sample = TestAttempt::new(&format!("a{number}"), &key(number));
        sample
            .outputs
            .extend((0..205).map(|n| output(format!("f\u{e9}/{n:03}").as_bytes(), b"")));
        sample.outputs.push(output(b"bytes-\xff\x01", b""));
        sample.record(&mut store).unwrap();
    }
    let mut text = Vec::new();
    store.export(&mut text).unwrap();
    let lines: Vec<serde_json::Value> = String::from_utf8(text)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines[0]["database"], store.id());
    let count = |table: &str| lines.iter().filter(|l| l["table"] == table).count();
    assert_eq!(
        (count("analyses"), count("attempts"), count("outputs")),
        (3, 3, 3 * 208)
    );
    assert_eq!(
        (count("logs"), count("remarks"), count("remark_counts")),
        (6, 3, 3)
    );
    let attempt = &lines.iter().find(|l| l["table"] == "attempts").unwrap()["row"];
    assert_eq!(attempt["result"]["genes"][0], "BRCA1");
    assert_eq!(
        (
            &attempt["superseded"],
            &attempt["complete"],
            &attempt["hints"]
        ),
        (&false.into(), &true.into(), &serde_json::Value::Null)
    );
    let plot = lines
        .iter()
        .find(|l| l["row"]["path_text"] == "plot.png")
        .unwrap();
    assert_eq!(plot["row"]["content"]["hex"], "504e47");
    let odd = lines
        .iter()
        .find(|l| l["row"]["path_text"] == "bytes-\\xff\u{1}")
        .unwrap();
    assert_eq!(odd["row"]["path"]["hex"], "62797465732dff01");
    assert_eq!(odd["row"]["content"], serde_json::Value::Null);
}

on_both!(the_status_counts);
fn the_status_counts(test_database: &TestDatabase) {
    let mut store = test_database.store();
    assert_eq!(store.status().unwrap().oldest_ms, None);
    made(&mut store, "a", 1, State::Succeeded);
    made(&mut store, "b", 2, State::Failed);
    age(test_database, "b", 1, 1_000);
    let status = store.status().unwrap();
    assert_eq!(status.id, store.id());
    assert!(
        status.rows.contains(&("attempts", 2)) && status.rows.contains(&("outputs", 4)),
        "{status:?}"
    );
    assert_eq!(
        status.states,
        [("failed".to_owned(), 1), ("succeeded".to_owned(), 1)]
    );
    assert_eq!(status.oldest_ms, Some(1_000));
    assert_eq!(
        (
            status.output_bytes,
            status.last_7_days_attempts,
            status.last_7_days_output_bytes
        ),
        (14, 1, 7)
    );
    assert!(status.bytes > 10_000, "{status:?}");
}
