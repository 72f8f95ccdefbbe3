//! docs/database.md says what is true: its grants are the ones in the code, its queries run, its columns exist.

use store::{GRANTS, GRANTS_TO_READ, GRANTS_TO_REMOVE};
use testkit::trial;

use crate::queue_samples::{TestSubmission, claim_one, give_up, submit};
use crate::test_database::{TestAttempt, TestDatabase, key};

fn page() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/database.md");
    std::fs::read_to_string(path).unwrap()
}

/// The contents of the page's code blocks of one kind.
fn fenced(kind: &str) -> Vec<String> {
    let page = page();
    let open = format!("\n```{kind}\n");
    let found = page
        .split(&open)
        .skip(1)
        .map(|rest| rest.split_once("```").unwrap().0.to_owned());
    found.collect()
}

on_both!(every_query_runs);
fn every_query_runs(test_database: &TestDatabase) {
    let mut store = test_database.store();
    TestAttempt::new("a", &key(1)).record(&mut store).unwrap();
    let mut failed = TestAttempt::new("b", &key(2));
    failed.state = store::State::Failed;
    failed.record(&mut store).unwrap();
    submit(
        &mut store,
        &[TestSubmission::new("c"), TestSubmission::new("d")],
    )
    .unwrap();
    let claimed = claim_one(&mut store);
    assert!(give_up(&mut store, &claimed));
    let own = if test_database.is_postgres() {
        "sql postgres"
    } else {
        "sql sqlite"
    };
    let queries: Vec<String> = fenced("sql").into_iter().chain(fenced(own)).collect();
    assert!(queries.len() >= 5, "{queries:?}");
    for query in queries {
        let rows = test_database.sql(&query);
        assert!(
            !rows.is_empty() || query.starts_with("LISTEN"),
            "nothing found: {query}"
        );
    }
}

trial!(Caller, the_grants_are_the_ones_in_the_code);
fn the_grants_are_the_ones_in_the_code() {
    assert_eq!(
        fenced("sql grants"),
        [GRANTS, GRANTS_TO_REMOVE, GRANTS_TO_READ]
    );
}

trial!(
    Caller,
    every_column_is_described_and_every_described_one_exists
);
fn every_column_is_described_and_every_described_one_exists() {
    let test_database = TestDatabase::sqlite();
    drop(test_database.store());
    let page = page();
    let views = page
        .split_once("## The views")
        .unwrap()
        .1
        .split_once("## Queries")
        .unwrap()
        .0;
    let mut described = Vec::new();
    for section in views.split("\n### ").skip(1) {
        let (title, body) = section.split_once('\n').unwrap();
        let rows = body.lines().filter(|line| line.starts_with("| `"));
        let cells = rows.map(|line| line.split('|').nth(1).unwrap().trim());
        let columns: Vec<&str> = cells
            .flat_map(|cell| cell.split(", "))
            .map(|c| c.trim_matches('`'))
            .collect();
        for view in title.split(", ") {
            described.push((
                view.to_owned(),
                columns.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>(),
            ));
        }
    }
    assert_eq!(described.len(), 9);
    for (view, columns) in described {
        let mut found = test_database.sql(&format!(
            "SELECT name FROM pragma_table_info('{view}') ORDER BY cid"
        ));
        // One table of the page describes both views of remarks, and each view has a column that the other lacks.
        if view.starts_with("remark") {
            assert!(
                found.iter().all(|c| columns.contains(c)),
                "{view}: {found:?}"
            );
            continue;
        }
        let mut wanted = columns;
        found.sort();
        wanted.sort();
        assert_eq!(found, wanted, "{view}");
    }
}
