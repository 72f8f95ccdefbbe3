//! What comes after an attempt: another one or none, in the transaction that ended it.

use store::{CommitOutcome, State};

use crate::desk::{Ask, claim, claim_one, commit, give_up, ids, sample, state, story, submit};
use crate::lab::Lab;

on_both! {
    a_lost_runner_is_followed_by_another
    the_next_attempt_is_made_with_the_end_of_the_last
    the_pause_grows_and_has_a_bound
    whoever_waits_becomes_ready
    retries_run_out
    only_what_was_asked_for_is_tried_again
    a_late_attempt_does_not_count
}

/// As if the time had come.
fn let_time_pass(lab: &Lab) {
    lab.sql("UPDATE queue SET not_before_ms = 1 WHERE not_before_ms IS NOT NULL");
}

fn a_lost_runner_is_followed_by_another(lab: &Lab) {
    let mut store = lab.store();
    submit(&mut store, &[Ask::retried("a", 1)]).unwrap();
    let first = claim_one(&mut store);
    assert!(give_up(&mut store, &first));
    assert!(!give_up(&mut store, &first), "twice");
    assert_eq!(state(&mut store, "a", 1), State::Error);
    assert_eq!(state(&mut store, "a", 2), State::Queued);
    assert!(claim(&mut store, 1).is_empty(), "not at once");
    let wait = store.promote_delayed().unwrap().unwrap();
    assert!((1_000..=2_500).contains(&wait), "{wait}");
    let_time_pass(lab);
    let second = claim_one(&mut store);
    assert_eq!(
        (second.attempt, second.request_json),
        (2, first.request_json)
    );
    assert_ne!(second.key, first.key);
    assert_eq!(
        lab.sql("SELECT retries_left FROM attempts ORDER BY attempt"),
        ["1", "0"]
    );
    assert_eq!(
        story(&mut store, "a"),
        [
            "1 submitted",
            "1 claimed",
            "1 ended(runner_lost)",
            "2 retried(runner_lost)",
            "2 claimed"
        ]
    );
}

fn the_next_attempt_is_made_with_the_end_of_the_last(lab: &Lab) {
    let mut store = lab.store();
    let ask = Ask {
        retry_on: vec![State::Failed],
        ..Ask::retried("a", 1)
    };
    submit(&mut store, &[ask]).unwrap();
    let claimed = claim_one(&mut store);
    let mut ended = sample(&claimed);
    (ended.state, ended.reason) = (State::Failed, "exit".to_owned());
    // A commit that does not come about leaves no attempt behind it.
    let undone = ended.commit_with(&mut store, &mut |_| Ok(None), &mut || {
        Err(std::io::Error::other("no"))
    });
    undone.unwrap_err();
    assert_eq!(lab.sql("SELECT COUNT(*) FROM queue"), ["0"]);
    assert_eq!(lab.sql("SELECT COUNT(*) FROM attempts"), ["1"]);
    assert_eq!(ended.commit(&mut store).unwrap(), CommitOutcome::Now);
    assert_eq!(lab.sql("SELECT attempt FROM queue"), ["2"]);
    assert_eq!(ended.commit(&mut store).unwrap(), CommitOutcome::Already);
    assert_eq!(lab.sql("SELECT COUNT(*) FROM attempts"), ["2"]);
    assert_eq!(
        story(&mut store, "a")[2..],
        ["1 committed(failed)", "2 retried(exit)"]
    );
}

fn the_pause_grows_and_has_a_bound(lab: &Lab) {
    let mut store = lab.store();
    submit(&mut store, &[Ask::retried("a", 12)]).unwrap();
    let mut pauses = Vec::new();
    for _ in 0..12 {
        let claimed = claim_one(&mut store);
        give_up(&mut store, &claimed);
        let queued = lab.sql("SELECT not_before_ms - queued_ms FROM queue");
        pauses.push(queued[0].parse::<u64>().unwrap());
        let_time_pass(lab);
    }
    for (n, pause) in pauses.iter().enumerate() {
        let least = (2_000_u64 << n).min(300_000);
        assert!(
            (least..=least + least / 4).contains(pause),
            "{n}: {pauses:?}"
        );
    }
    assert!(
        pauses.iter().any(|p| p % 1_000 != 0),
        "all that fail together come back together"
    );
}

fn whoever_waits_becomes_ready(lab: &Lab) {
    let mut store = lab.store();
    assert_eq!(store.promote_delayed().unwrap(), None);
    submit(&mut store, &[Ask::retried("a", 3), Ask::retried("b", 3)]).unwrap();
    for claimed in claim(&mut store, 2) {
        give_up(&mut store, &claimed);
    }
    let many: Vec<Ask> = (0..5).map(|n| Ask::by(&format!("x{n}"), "bob")).collect();
    submit(&mut store, &many).unwrap();
    lab.sql("UPDATE queue SET not_before_ms = 1 WHERE id = 'b'");
    assert!(store.promote_delayed().unwrap().unwrap() > 0);
    assert_eq!(
        lab.sql("SELECT id FROM queue WHERE not_before_ms IS NOT NULL"),
        ["a"]
    );
    let_time_pass(lab);
    assert_eq!(store.promote_delayed().unwrap(), None);
    // While it waited the others moved on, but it lost no turn by it: the turns are given out when it is ready.
    let order = ids(&claim(&mut store, 9)).join(" ");
    assert_eq!(order, "b x0 a x1 x2 x3 x4");
}

fn retries_run_out(lab: &Lab) {
    let mut store = lab.store();
    submit(&mut store, &[Ask::retried("a", 2)]).unwrap();
    for _ in 0..3 {
        let claimed = claim_one(&mut store);
        give_up(&mut store, &claimed);
        let_time_pass(lab);
    }
    assert!(claim(&mut store, 1).is_empty());
    let story_of = story(&mut store, "a");
    assert_eq!(
        story_of[story_of.len() - 2..],
        ["3 ended(runner_lost)", "3 parked(runner_lost)"]
    );
    assert_eq!(state(&mut store, "a", 3), State::Error);
    // Whoever retries it by hand gives it as many tries as it had.
    assert_eq!(store.retry("a", "bob", &[]).unwrap(), 4);
    let claimed = claim_one(&mut store);
    give_up(&mut store, &claimed);
    assert_eq!(lab.sql("SELECT attempt FROM queue"), ["5"]);
    assert!(
        lab.sql("SELECT not_before_ms - queued_ms FROM queue")[0]
            .parse::<u64>()
            .unwrap()
            <= 2_500
    );
}

fn only_what_was_asked_for_is_tried_again(lab: &Lab) {
    let mut store = lab.store();
    let retry_on = vec![State::TimedOut, State::OutOfMemory];
    let ends = [
        (State::Succeeded, "exit", false),
        (State::Failed, "exit", false),
        (State::TimedOut, "wall_time", true),
        (State::OutOfMemory, "oom_killed", true),
        (State::LimitExceeded, "disk", false),
        (State::Cancelled, "cancelled", false),
        (State::Error, "init_lost", true),
        (State::Error, "lease_lost", true),
        (State::Error, "not_found", false),
        (State::Error, "not_executable", false),
        (State::Error, "refused", false),
        (State::Error, "does_not_fit", false),
    ];
    for (n, (state, reason, again)) in ends.into_iter().enumerate() {
        let id = format!("a{n}");
        let ask = Ask {
            retry_on: retry_on.clone(),
            ..Ask::retried(&id, 1)
        };
        submit(&mut store, &[ask]).unwrap();
        let claimed = claim_one(&mut store);
        commit(&mut store, &claimed, state, reason).unwrap();
        let queued = lab.sql(&format!("SELECT attempt FROM queue WHERE id = '{id}'"));
        assert_eq!(queued.len(), usize::from(again), "{state} {reason}");
        let last = story(&mut store, &id).pop().unwrap();
        let wanted = match (state, again) {
            (_, true) => format!("2 retried({reason})"),
            (State::Error, false) => format!("1 parked({reason})"),
            (state, false) => format!("1 committed({state})"),
        };
        assert_eq!(last, wanted);
    }
}

fn a_late_attempt_does_not_count(lab: &Lab) {
    let mut store = lab.store();
    submit(&mut store, &[Ask::retried("a", 1)]).unwrap();
    let late = claim_one(&mut store);
    assert!(give_up(&mut store, &late));
    // While the next one waits, and again when it runs.
    let committed = commit(&mut store, &late, State::Succeeded, "exit").unwrap();
    assert_eq!(committed, CommitOutcome::Superseded { attempt: 3 });
    assert_eq!(state(&mut store, "a", 2), State::Queued);
    assert_eq!(store.outputs("a", 3).unwrap().len(), 2, "kept");
    let_time_pass(lab);
    let second = claim_one(&mut store);
    assert_eq!(second.attempt, 2);
    let committed = commit(&mut store, &late, State::Succeeded, "exit").unwrap();
    assert_eq!(committed, CommitOutcome::Superseded { attempt: 3 });
    assert_eq!(
        commit(&mut store, &second, State::Failed, "exit").unwrap(),
        CommitOutcome::Now
    );
    assert_eq!(
        lab.sql("SELECT attempt, state FROM analyses_v1"),
        ["2|failed"]
    );
    assert_eq!(lab.sql("SELECT COUNT(*) FROM queue"), ["0"]);
}
