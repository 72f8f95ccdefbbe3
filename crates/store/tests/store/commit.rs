//! The commit of an attempt: one transaction, exactly once, whatever fails.

use std::io;
use std::sync::Barrier;

use store::types::manifest::OutputPath;
use store::{
    CommitOutcome, FaultKind, LostAttempt, PostProcessState, State, Store, StoreError,
    UnfinishedPolicy,
};

use crate::test_database::{TestAttempt, TestDatabase, key, output, usage};

on_both!(everything_comes_back);
fn everything_comes_back(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut sample = TestAttempt::new("gwas-7", &key(1));
    sample.message = Some("ü ✓".to_owned());
    sample.logs[0].dropped_bytes = 5;
    sample.logs[0].total_bytes = 11;
    sample.logs[0].object = Some(sample.outputs[0].blake3);
    sample.logs[0].object_bytes = 6;
    sample.logs[0].object_head_bytes = 4;
    assert_eq!(store.next_attempt_number("gwas-7").unwrap(), 1);
    assert_eq!(sample.begin(&mut store).unwrap(), 1);
    assert_eq!(store.next_attempt_number("gwas-7").unwrap(), 2);
    let running = store.show("gwas-7", None).unwrap();
    assert_eq!(
        (running.summary.state, running.usage),
        (State::Running, None)
    );
    assert_eq!(store.unfinished(Some("lab-1")).unwrap().len(), 1);
    assert_eq!(store.unfinished(Some("lab-2")).unwrap().len(), 0);

    assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Now);
    assert_eq!(store.unfinished(None).unwrap().len(), 0);
    let shown = store.show("gwas-7", Some(1)).unwrap();
    assert_eq!(store.show("gwas-7", None).unwrap(), shown);
    let listed = &shown.summary;
    assert_eq!(
        (listed.id.as_str(), listed.attempt, listed.state),
        ("gwas-7", 1, State::Succeeded)
    );
    assert_eq!(listed.reason.as_deref(), Some("exit_0"));
    assert_eq!(listed.message.as_deref(), Some("ü ✓"));
    assert_eq!((listed.superseded, listed.complete), (false, Some(true)));
    assert_eq!(
        (listed.started_ms, listed.ended_ms),
        (Some(1_700_000_000_000), Some(1_700_000_001_500))
    );
    assert!(listed.committed_ms.unwrap() >= listed.created_ms);
    let now_ms = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis() as i64;
    assert!(
        (now_ms - listed.created_ms).abs() < 60_000,
        "the database's clock reads {}",
        listed.created_ms
    );
    assert_eq!(
        (listed.outputs_count, listed.output_bytes),
        (Some(2), Some(7))
    );
    assert_eq!((listed.exit_code, listed.signal), (Some(0), None));
    assert_eq!(shown.usage, Some(usage()));
    assert_eq!(shown.submitter.as_deref(), Some("alice"));
    let json = |text: &Option<String>| -> serde_json::Value {
        serde_json::from_str(text.as_deref().unwrap()).unwrap()
    };
    assert_eq!(json(&shown.result_json)["genes"][0], "BRCA1");
    assert_eq!(json(&shown.provenance_json)["argv"][1], "gwas.py");
    assert_eq!((shown.hints_json, shown.result_note), (None, None));

    let outputs = store.outputs("gwas-7", 1).unwrap();
    assert_eq!(outputs.len(), 2);
    assert_eq!(outputs[0].path, sample.outputs[0].path);
    assert_eq!(
        (outputs[0].blake3, outputs[0].bytes, outputs[0].inline),
        (sample.outputs[0].blake3, 3, true)
    );
    let content = store.output_content("gwas-7", 1, &outputs[1].path).unwrap();
    assert_eq!(content.as_deref(), Some(&b"a,b\n"[..]));
    let missing = OutputPath::new(b"nosuch".to_vec()).unwrap();
    assert_eq!(store.output_content("gwas-7", 1, &missing).unwrap(), None);
    let log = store.log("gwas-7", 1, "stdout").unwrap().unwrap();
    assert_eq!(
        (log.head.as_slice(), log.total_bytes, log.dropped_bytes),
        (&b"hello\n"[..], 11, 5)
    );
    assert_eq!(
        (log.object, log.object_head_bytes),
        (Some(sample.outputs[0].blake3), Some(4))
    );
    assert_eq!(log.artifact_store.as_deref(), Some("store-1"));
    assert_eq!(
        store.log("gwas-7", 1, "stderr").unwrap().unwrap().object,
        None
    );
    assert!(store.log("gwas-7", 2, "stderr").unwrap().is_none());
    let (remarks, counts) = store.remarks("gwas-7", 1).unwrap();
    assert_eq!(
        (remarks[0].path_text.as_str(), remarks[0].remark.as_str()),
        ("link", "symlink")
    );
    assert_eq!((counts[0].remark.as_str(), counts[0].count), ("symlink", 1));
}

on_both!(a_repeat_changes_nothing);
fn a_repeat_changes_nothing(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    sample.commit(&mut store).unwrap();
    let before = (
        store.show("a", None).unwrap(),
        store.outputs("a", 1).unwrap(),
    );
    let mut other = sample.clone();
    other.state = State::Failed;
    other.message = Some("something else".to_owned());
    other.outputs.push(output(b"new", b"new"));
    for mut again in [test_database.store(), store] {
        let mut asked = 0;
        let committed = other.commit_with(
            &mut again,
            &mut |_| {
                asked += 1;
                Ok(None)
            },
            &mut || Ok(()),
        );
        assert_eq!(committed.unwrap(), CommitOutcome::Already);
        assert_eq!(asked, 0, "content is read again for nothing");
        assert_eq!(
            before,
            (
                again.show("a", None).unwrap(),
                again.outputs("a", 1).unwrap()
            )
        );
        assert_eq!(again.attempts("a").unwrap().len(), 1);
    }
}

on_both!(an_id_is_taken_once);
fn an_id_is_taken_once(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    sample.commit(&mut store).unwrap();
    let mut second = TestAttempt::new("a", &key(2));
    let error = second.begin(&mut store).unwrap_err();
    let StoreError::Exists {
        attempt: 1,
        state: State::Succeeded,
        committed_ms: Some(_),
        ..
    } = error
    else {
        panic!("{error}");
    };
    assert!(error.to_string().contains("--replace"), "{error}");
    assert_eq!(error.fault_kind(), FaultKind::Other);
    second.replace = true;
    assert_eq!(second.begin(&mut store).unwrap(), 2);
    second.attempt = 2;
    second.state = State::Failed;
    assert_eq!(second.commit(&mut store).unwrap(), CommitOutcome::Now);
    let states: Vec<State> = store
        .attempts("a")
        .unwrap()
        .iter()
        .map(|a| a.state)
        .collect();
    assert_eq!(states, [State::Succeeded, State::Failed]);
    assert_eq!(store.show("a", None).unwrap().summary.attempt, 2);
    assert_eq!(
        store.outputs("a", 1).unwrap().len(),
        2,
        "the first attempt's outputs stay"
    );
}

on_both!(begin_can_be_repeated);
fn begin_can_be_repeated(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut sample = TestAttempt::new("a", &key(1));
    assert_eq!(sample.begin(&mut store).unwrap(), 1);
    assert_eq!(sample.begin(&mut store).unwrap(), 1);
    assert_eq!(store.attempts("a").unwrap().len(), 1);
    // Using the key of one analysis for another is an error.
    sample.id = "b".to_owned();
    assert!(matches!(
        sample.begin(&mut store).unwrap_err(),
        StoreError::WrongKey { .. }
    ));
    assert!(matches!(
        store.show("b", None).unwrap_err(),
        StoreError::NotFound { .. }
    ));
    assert_eq!(store.next_attempt_number("b").unwrap(), 1);
}

on_both!(a_running_attempt_is_not_replaced);
fn a_running_attempt_is_not_replaced(test_database: &TestDatabase) {
    let mut store = test_database.store();
    TestAttempt::new("a", &key(1)).begin(&mut store).unwrap();
    let mut second = TestAttempt::new("a", &key(2));
    for replace in [false, true] {
        second.replace = replace;
        let error = second.begin(&mut store).unwrap_err();
        assert!(
            matches!(error, StoreError::Running { attempt: 1, .. }),
            "{error}"
        );
    }
}

on_both!(eight_committers_make_one_record);
fn eight_committers_make_one_record(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    let barrier = Barrier::new(8);
    let committed: Vec<CommitOutcome> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let mut store = test_database.store();
                    barrier.wait();
                    sample.commit(&mut store).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(
        committed
            .iter()
            .filter(|c| **c == CommitOutcome::Now)
            .count(),
        1,
        "{committed:?}"
    );
    assert_eq!(
        committed
            .iter()
            .filter(|c| **c == CommitOutcome::Already)
            .count(),
        7,
        "{committed:?}"
    );
    assert_eq!(store.attempts("a").unwrap().len(), 1);
    assert_eq!(store.outputs("a", 1).unwrap().len(), 2);
}

on_both!(eight_replacers_make_one_attempt);
fn eight_replacers_make_one_attempt(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let sample = TestAttempt::new("a", &key(0));
    sample.begin(&mut store).unwrap();
    sample.commit(&mut store).unwrap();
    let barrier = Barrier::new(8);
    let begun: Vec<Result<u32, StoreError>> = std::thread::scope(|scope| {
        let barrier = &barrier;
        let threads: Vec<_> = (1..=8)
            .map(|number| {
                scope.spawn(move || {
                    let mut store = test_database.store();
                    let mut sample = TestAttempt::new("a", &key(number));
                    sample.replace = true;
                    barrier.wait();
                    sample.begin(&mut store)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let won: Vec<u32> = begun
        .iter()
        .filter_map(|b| b.as_ref().ok().copied())
        .collect();
    assert_eq!(won, [2]);
    let refused = begun
        .iter()
        .filter(|b| matches!(b, Err(StoreError::Running { attempt: 2, .. })));
    assert_eq!(refused.count(), 7, "{begun:?}");
    assert_eq!(
        store.next_attempt_number("a").unwrap(),
        3,
        "a refused attempt used up a number"
    );
}

fn lose(store: &mut Store, id: &str, attempt_key: &str) -> bool {
    let lost = LostAttempt {
        id,
        attempt: 1,
        key: attempt_key,
        by: &key(99),
        reason: "runner_lost",
        message: "its host does not answer",
        proof: store::LossProof::RunnerGone,
    };
    store.give_up(&lost).unwrap()
}

on_both!(the_late_commit_of_a_given_up_attempt_is_stored_as_superseded);
fn the_late_commit_of_a_given_up_attempt_is_stored_as_superseded(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    assert!(
        !lose(&mut store, "a", &key(5)),
        "another key's attempt was given up"
    );
    assert!(lose(&mut store, "a", &key(1)));
    assert!(!lose(&mut store, "a", &key(1)), "it was given up twice");
    for _ in 0..3 {
        assert_eq!(
            sample.commit(&mut store).unwrap(),
            CommitOutcome::Superseded { attempt: 2 }
        );
    }
    let attempts = store.attempts("a").unwrap();
    let facts: Vec<_> = attempts
        .iter()
        .map(|a| (a.attempt, a.state, a.superseded))
        .collect();
    assert_eq!(
        facts,
        [(1, State::Error, false), (2, State::Succeeded, true)]
    );
    assert_eq!(
        store.outputs("a", 2).unwrap().len(),
        2,
        "the late outputs are kept"
    );
    assert_eq!(store.outputs("a", 1).unwrap().len(), 0);
    let counts = store.show("a", None).unwrap();
    assert_eq!(
        (counts.summary.attempt, counts.summary.reason.as_deref()),
        (1, Some("runner_lost"))
    );
    assert_eq!(test_database.sql("SELECT attempt FROM analyses_v1"), ["1"]);
    // A new attempt gets the number after the late commit's.
    let mut third = TestAttempt::new("a", &key(3));
    third.replace = true;
    assert_eq!(third.begin(&mut store).unwrap(), 3);
}

on_both!(the_late_commit_of_a_removed_attempt_recreates_its_row);
fn the_late_commit_of_a_removed_attempt_recreates_its_row(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    let refused = store.remove("a", UnfinishedPolicy::Refuse).unwrap_err();
    assert!(matches!(refused, StoreError::Running { .. }), "{refused}");
    assert_eq!(
        store
            .remove("a", UnfinishedPolicy::Remove)
            .unwrap()
            .attempts,
        1
    );
    // The analysis has no other attempt, so this one becomes current. The same happens after an older copy of the database
    // was restored.
    assert_eq!(
        sample.commit(&mut store).unwrap(),
        CommitOutcome::Recreated { attempt: 1 }
    );
    assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Already);
    let attempts = store.attempts("a").unwrap();
    assert_eq!(
        (attempts.len(), attempts[0].superseded, attempts[0].state),
        (1, false, State::Succeeded)
    );
    assert_eq!(store.outputs("a", 1).unwrap().len(), 2);
    // If another run has taken the id since, the late commit is stored as superseded instead.
    let second = TestAttempt::new("b", &key(2));
    second.begin(&mut store).unwrap();
    store.remove("b", UnfinishedPolicy::Remove).unwrap();
    let usurper = TestAttempt::new("b", &key(3));
    usurper.begin(&mut store).unwrap();
    assert_eq!(
        second.commit(&mut store).unwrap(),
        CommitOutcome::Superseded { attempt: 2 }
    );
    assert_eq!(usurper.commit(&mut store).unwrap(), CommitOutcome::Now);
    assert_eq!(store.show("b", None).unwrap().summary.attempt, 1);
}

on_both!(a_wrong_key_commits_nothing);
fn a_wrong_key_commits_nothing(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    TestAttempt::new("b", &key(2)).begin(&mut store).unwrap();
    let mut thief = sample.clone();
    thief.key = key(2);
    assert!(matches!(
        thief.commit(&mut store).unwrap_err(),
        StoreError::WrongKey { .. }
    ));
    let mut misnumbered = sample.clone();
    misnumbered.attempt = 7;
    assert!(matches!(
        misnumbered.commit(&mut store).unwrap_err(),
        StoreError::WrongKey { .. }
    ));
    assert_eq!(store.show("a", None).unwrap().summary.state, State::Running);
    assert_eq!(store.show("b", None).unwrap().summary.state, State::Running);
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM outputs"), ["0"]);
    assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Now);
}

fn still_running(test_database: &TestDatabase, store: &mut Store) {
    assert_eq!(store.show("a", None).unwrap().summary.state, State::Running);
    for table in ["outputs", "logs", "remarks", "remark_counts"] {
        assert_eq!(
            test_database.sql(&format!("SELECT COUNT(*) FROM {table}")),
            ["0"],
            "{table}"
        );
    }
}

on_both!(a_failing_content_undoes_everything);
fn a_failing_content_undoes_everything(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut sample = TestAttempt::new("a", &key(1));
    sample.outputs = (0..300)
        .map(|n| output(format!("{n:04}").as_bytes(), b""))
        .collect();
    sample.begin(&mut store).unwrap();
    let mut content = |output: &store::types::manifest::Output| match output.path.as_bytes() {
        b"0250" => Err(io::Error::other("the artifact directory is gone")),
        _ => Ok(Some(Vec::new())),
    };
    let error = sample
        .commit_with(&mut store, &mut content, &mut || Ok(()))
        .unwrap_err();
    assert!(
        matches!(&error, StoreError::Content { path, .. } if path == "0250"),
        "{error}"
    );
    assert!(!error.is_database_fault());
    still_running(test_database, &mut store);
    assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Now);
    assert_eq!(store.outputs("a", 1).unwrap().len(), 300);
}

on_both!(a_failure_before_the_commit_undoes_everything);
fn a_failure_before_the_commit_undoes_everything(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    let mut fail = || Err(io::Error::other("a fault"));
    let error = sample
        .commit_with(&mut store, &mut |_| Ok(None), &mut fail)
        .unwrap_err();
    assert!(matches!(error, StoreError::BeforeCommit(_)), "{error}");
    still_running(test_database, &mut store);
    // A rolled-back late commit also frees its attempt number.
    lose(&mut store, "a", &key(1));
    sample
        .commit_with(&mut store, &mut |_| Ok(None), &mut fail)
        .unwrap_err();
    assert_eq!(store.attempts("a").unwrap().len(), 1);
    assert_eq!(
        sample.commit(&mut store).unwrap(),
        CommitOutcome::Superseded { attempt: 2 }
    );
}

on_both!(results_without_a_sandbox_are_one_transaction);
fn results_without_a_sandbox_are_one_transaction(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut sample = TestAttempt::new("a", &key(1));
    sample.post_process = PostProcessState::Pending;
    assert_eq!(sample.record(&mut store).unwrap(), (1, CommitOutcome::Now));
    assert_eq!(
        sample.record(&mut store).unwrap(),
        (1, CommitOutcome::Already)
    );
    assert_eq!(store.outputs("a", 1).unwrap().len(), 2);
    let mut second = TestAttempt::new("a", &key(2));
    assert!(matches!(
        second.record(&mut store).unwrap_err(),
        StoreError::Exists { .. }
    ));
    second.replace = true;
    assert_eq!(second.record(&mut store).unwrap(), (2, CommitOutcome::Now));
}

on_both!(ten_thousand_outputs);
fn ten_thousand_outputs(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut sample = TestAttempt::new("a", &key(1));
    sample.outputs = (0..10_000)
        .map(|n| output(format!("d/{n:05}").as_bytes(), b""))
        .collect();
    sample.begin(&mut store).unwrap();
    let started = std::time::Instant::now();
    let small = |_: &_| Ok(Some(vec![b'x'; 100]));
    assert_eq!(
        sample
            .commit_with(&mut store, &mut { small }, &mut || Ok(()))
            .unwrap(),
        CommitOutcome::Now
    );
    eprintln!("10,000 outputs committed in {:?}", started.elapsed());
    let outputs = store.outputs("a", 1).unwrap();
    assert_eq!(outputs.len(), 10_000);
    assert!(
        outputs
            .iter()
            .zip(&sample.outputs)
            .all(|(a, b)| a.path == b.path && a.inline)
    );
}

on_both!(a_state_that_is_not_final_is_refused);
fn a_state_that_is_not_final_is_refused(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut sample = TestAttempt::new("a", &key(1));
    sample.begin(&mut store).unwrap();
    sample.state = State::Collecting;
    assert!(matches!(
        sample.commit(&mut store).unwrap_err(),
        StoreError::NotFinal { .. }
    ));
}
