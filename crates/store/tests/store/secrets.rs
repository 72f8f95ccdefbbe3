//! The values of secret variables. The record keeps them while an attempt may need them. The transaction that ends the
//! last attempt erases them.

use store::{CancelOutcome, State, StoreError};

use crate::queue_samples::{GIB, TestSubmission, claim_one, commit, give_up, submit, worker};
use crate::test_database::TestDatabase;

const SECRET: &str = "hunter2-hunter2-hunter2";

fn ask(id: &str) -> TestSubmission {
    let request = format!(
        r#"{{"version":1,"id":"{id}","command":{{"argv":["true"]}},"settings":{{"env":{{"list":["SEED=7","PLAIN={SECRET}","API_TOKEN={SECRET}"]}},"secret_env":{{"list":["PLA*"]}}}},"inputs":[],"stdin":null}}"#
    );
    TestSubmission {
        request,
        ..TestSubmission::new(id)
    }
}

fn request(test_database: &TestDatabase, id: &str) -> String {
    test_database
        .sql(&format!(
            "SELECT request FROM submissions WHERE id = '{id}'"
        ))
        .join("\n")
}

fn is_erased(test_database: &TestDatabase, id: &str) {
    let request = request(test_database, id);
    assert!(!request.contains(SECRET), "{request}");
    assert!(
        request.contains(r#"["SEED=7","PLAIN","API_TOKEN"]"#),
        "{request}"
    );
}

on_both!(secrets_are_erased_with_the_last_end);
fn secrets_are_erased_with_the_last_end(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &[ask("a")]).unwrap();
    let claimed = claim_one(&mut store);
    assert!(claimed.request_json.contains(SECRET), "the control");
    assert!(
        request(test_database, "a").contains(SECRET),
        "it may be lost yet"
    );
    commit(&mut store, &claimed, State::Succeeded, "exited").unwrap();
    is_erased(test_database, "a");
    let print = test_database.sql("SELECT fingerprint FROM submissions WHERE id = 'a'");
    assert_eq!(print, [""], "it was made of the secret");
    // The secrets are also erased after an attempt that was cancelled while it ran, after one that failed, and after
    // one whose runner was lost.
    for (id, state) in [("c", State::Cancelled), ("f", State::Failed)] {
        submit(&mut store, &[ask(id)]).unwrap();
        let claimed = claim_one(&mut store);
        if state == State::Cancelled {
            let asked = store.cancel(id, "bob").unwrap();
            assert!(matches!(asked, CancelOutcome::Requested { .. }));
            assert!(request(test_database, id).contains(SECRET));
        }
        commit(&mut store, &claimed, state, "exited").unwrap();
        is_erased(test_database, id);
    }
    submit(&mut store, &[ask("l")]).unwrap();
    let claimed = claim_one(&mut store);
    assert!(give_up(&mut store, &claimed));
    is_erased(test_database, "l");
}

on_both!(secrets_stay_while_another_attempt_is_to_come);
fn secrets_stay_while_another_attempt_is_to_come(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let retried = TestSubmission {
        retries: 1,
        ..ask("a")
    };
    submit(&mut store, &[retried]).unwrap();
    let first = claim_one(&mut store);
    assert!(give_up(&mut store, &first));
    assert!(request(test_database, "a").contains(SECRET));
    test_database.sql("UPDATE queue SET not_before_ms = 1 WHERE not_before_ms IS NOT NULL");
    let second = claim_one(&mut store);
    assert!(second.request_json.contains(SECRET));
    commit(&mut store, &second, State::Failed, "exited").unwrap();
    is_erased(test_database, "a");
    // A late commit does not bring the secret back.
    let _late = commit(&mut store, &first, State::Succeeded, "exited");
    is_erased(test_database, "a");
}

on_both!(secrets_of_what_never_ran_are_erased);
fn secrets_of_what_never_ran_are_erased(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &[ask("q")]).unwrap();
    let cancelled = store.cancel("q", "bob").unwrap();
    assert!(matches!(cancelled, CancelOutcome::Now { .. }));
    is_erased(test_database, "q");
    let large = TestSubmission {
        memory_bytes: Some(900 * GIB),
        ..ask("p")
    };
    submit(&mut store, &[large]).unwrap();
    test_database.sql("UPDATE queue SET ready_ms = 1");
    let small = worker("w1", GIB, 1_000);
    assert_eq!(store.park_unfit(&small, GIB, 1).unwrap(), ["p"]);
    is_erased(test_database, "p");
}

on_both!(a_retry_requires_the_erased_secret_values);
fn a_retry_requires_the_erased_secret_values(test_database: &TestDatabase) {
    let mut store = test_database.store();
    submit(&mut store, &[ask("a"), TestSubmission::new("b")]).unwrap();
    for _ in 0..2 {
        let claimed = claim_one(&mut store);
        commit(&mut store, &claimed, State::Failed, "exited").unwrap();
    }
    let value = |name: &str| (name.to_owned(), format!("{name}-again"));
    let refused = |store: &mut store::Store, given: &[(String, String)]| {
        store.retry("a", "bob", given).unwrap_err()
    };
    let error = refused(&mut store, &[]);
    assert_eq!(error.code(), Some("secrets_erased"));
    let text = error.to_string();
    assert!(
        text.contains("PLAIN, API_TOKEN") && text.contains("--env"),
        "{text}"
    );
    let error = refused(&mut store, &[value("PLAIN")]);
    assert!(matches!(&error, StoreError::SecretsErased { names, .. } if names == &["API_TOKEN"]));
    let error = refused(
        &mut store,
        &[value("PLAIN"), value("API_TOKEN"), value("SEED")],
    );
    assert!(matches!(&error, StoreError::NotErased { name, .. } if name == "SEED"));
    assert_eq!(test_database.sql("SELECT COUNT(*) FROM queue"), ["0"]);
    // Controls: a retry with all of the values, and a retry of an analysis that had no secret.
    let all = [value("PLAIN"), value("API_TOKEN")];
    assert_eq!(store.retry("a", "bob", &all).unwrap(), 2);
    let claimed = claim_one(&mut store);
    let env = r#"["SEED=7","PLAIN=PLAIN-again","API_TOKEN=API_TOKEN-again"]"#;
    assert!(
        claimed.request_json.contains(env),
        "{}",
        claimed.request_json
    );
    commit(&mut store, &claimed, State::Succeeded, "exited").unwrap();
    is_erased(test_database, "a");
    assert_eq!(store.retry("b", "bob", &[]).unwrap(), 2);
}

on_both!(erased_secrets_are_nowhere_in_the_file);
/// Searches the file of SQLite itself. Fumehood promises nothing about the files of a PostgreSQL server.
fn erased_secrets_are_nowhere_in_the_file(test_database: &TestDatabase) {
    if test_database.is_postgres() {
        return;
    }
    let mut store = test_database.store();
    let mut long = ask("a");
    // The request is long enough for database pages of its own, which are freed.
    let padding = "x".repeat(30_000);
    long.request = long.request.replace("SEED=7", &format!("SEED={padding}"));
    submit(&mut store, &[long, ask("b")]).unwrap();
    let file = test_database.sql("SELECT file FROM pragma_database_list WHERE name = 'main'");
    let in_file = || {
        test_database.sql("PRAGMA wal_checkpoint(TRUNCATE)");
        let bytes = std::fs::read(&file[0]).unwrap();
        let found = bytes
            .windows(SECRET.len())
            .filter(|w| *w == SECRET.as_bytes());
        found.count()
    };
    assert!(in_file() >= 4, "the control");
    for _ in 0..2 {
        let claimed = claim_one(&mut store);
        commit(&mut store, &claimed, State::Succeeded, "exited").unwrap();
    }
    assert_eq!(in_file(), 0);
}
