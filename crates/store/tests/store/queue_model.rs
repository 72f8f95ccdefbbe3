//! The queue as a state machine: random steps on the record and on a simple model of it must have the same results.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use store::{
    AttemptFilter, AttemptSelection, CancelOutcome, Capacity, CommitOutcome, GrantedClaim,
    RenewOutcome, State, Store, StoreError, SubmitOutcome, UnfinishedPolicy,
};

use crate::queue_samples::{
    GIB, LEASE_MS, TestSubmission, claim_from, commit, fresh_keys, give_up, held, sample, submit,
};
use crate::test_database::TestDatabase;

/// The number of analyses: few enough that steps often concern the same analysis, and enough that their turns differ.
const IDS: u8 = 10;
const TOTAL: Capacity = Capacity {
    memory_bytes: 4 * GIB,
    cpu_milli: 4_000,
};

#[derive(Clone, Debug)]
enum Step {
    Submit {
        id: u8,
        submitter: u8,
        priority: u32,
        retries: u32,
        on_failed: bool,
        gib: u64,
        replace: bool,
    },
    Claim {
        count: usize,
        free_gib: u64,
    },
    /// Steps of a runner, by the number of its claim. The claim may be an old one that no longer holds its attempt.
    TakeUp(usize),
    Renew(usize),
    Collecting(usize),
    Commit(usize, State),
    GiveUp(usize),
    Cancel(u8),
    Retry(u8),
    TimePasses,
    Promote,
    Remove(u8, UnfinishedPolicy),
}

fn step() -> impl Strategy<Value = Step> {
    let id = 0..IDS;
    // Mostly recent claims, which still hold their attempts.
    let claim = prop_oneof![3 => 0..3_usize, 1 => 0..40_usize];
    let ends = prop::sample::select(vec![
        State::Succeeded,
        State::Failed,
        State::TimedOut,
        State::Cancelled,
        State::Error,
    ]);
    let modes = prop::sample::select(vec![UnfinishedPolicy::Refuse, UnfinishedPolicy::Remove]);
    let submit = (
        id.clone(),
        0..3_u8,
        0..2_u32,
        0..3_u32,
        any::<bool>(),
        1..6_u64,
        any::<bool>(),
    );
    prop_oneof![
        6 => submit.prop_map(|(id, submitter, priority, retries, on_failed, gib, replace)| Step::Submit {
            id, submitter, priority, retries, on_failed, gib, replace
        }),
        6 => (1..4_usize, 0..6_u64).prop_map(|(count, free_gib)| Step::Claim { count, free_gib }),
        2 => claim.clone().prop_map(Step::TakeUp),
        1 => claim.clone().prop_map(Step::Renew),
        2 => claim.clone().prop_map(Step::Collecting),
        5 => (claim.clone(), ends).prop_map(|(n, state)| Step::Commit(n, state)),
        3 => claim.prop_map(Step::GiveUp),
        2 => id.clone().prop_map(Step::Cancel),
        2 => id.clone().prop_map(Step::Retry),
        3 => Just(Step::TimePasses),
        1 => Just(Step::Promote),
        1 => (id, modes).prop_map(|(id, mode)| Step::Remove(id, mode)),
    ]
}

/// An attempt in the model.
#[derive(Clone, Debug)]
struct Try {
    key: String,
    state: State,
    superseded: bool,
    /// The runner ended the attempt with the attempt's own key.
    by_itself: bool,
    retries_left: Option<u32>,
    cancelled: bool,
    taken_up: bool,
}

#[derive(Clone, Debug)]
struct Entry {
    id: String,
    attempt: u32,
    turn: i64,
    delayed: bool,
    due: bool,
}

#[derive(Clone, Debug)]
struct Asked {
    submitter: String,
    priority: u32,
    retries: u32,
    on_failed: bool,
    gib: u64,
}

#[derive(Default)]
struct Model {
    tries: BTreeMap<String, BTreeMap<u32, Try>>,
    asked: BTreeMap<String, Asked>,
    queue: Vec<Entry>,
    /// By the key of a late attempt: the analysis, and the number that the late commit got.
    late: BTreeMap<String, (String, u32)>,
    claims: Vec<GrantedClaim>,
}

fn name(id: u8) -> String {
    format!("n{id}")
}

impl Model {
    fn of(&self, id: &str) -> impl DoubleEndedIterator<Item = (u32, &Try)> {
        self.tries
            .get(id)
            .into_iter()
            .flatten()
            .map(|(n, t)| (*n, t))
    }

    fn unfinished(&self, id: &str) -> Option<(u32, State)> {
        let mut open = self.of(id).filter(|(_, t)| !t.state.is_final());
        let found = open.next().map(|(n, t)| (n, t.state));
        assert!(open.next().is_none(), "two attempts of {id} have not ended");
        found
    }

    /// The newest attempt that is not superseded.
    fn newest(&self, id: &str) -> Option<(u32, State)> {
        let counting = self.of(id).rev().find(|(_, t)| !t.superseded);
        counting
            .or(self.of(id).next_back())
            .map(|(n, t)| (n, t.state))
    }

    fn add(&mut self, id: &str, made: Try) -> u32 {
        let tries = self.tries.entry(id.to_owned()).or_default();
        let number = tries.keys().next_back().map_or(1, |last| last + 1);
        tries.insert(number, made);
        number
    }

    fn next_turn(&self, asked: &Asked) -> i64 {
        let ready =
            |entry: &&Entry| !entry.delayed && self.asked[&entry.id].priority == asked.priority;
        let own = self.queue.iter().filter(ready);
        let own = own.filter(|entry| self.asked[&entry.id].submitter == asked.submitter);
        let last = own.map(|entry| entry.turn).max();
        let lowest = self
            .queue
            .iter()
            .filter(ready)
            .map(|entry| entry.turn)
            .min();
        last.map_or(0, |turn| turn + 1).max(lowest.unwrap_or(0))
    }

    fn enqueue(&mut self, id: &str, retries_left: u32, delayed: bool) -> u32 {
        let attempt = self.add(
            id,
            Try {
                key: String::new(),
                state: State::Queued,
                superseded: false,
                by_itself: false,
                retries_left: Some(retries_left),
                cancelled: false,
                taken_up: false,
            },
        );
        let turn = match delayed {
            true => 0,
            false => self.next_turn(&self.asked[id]),
        };
        self.queue.push(Entry {
            id: id.to_owned(),
            attempt,
            turn,
            delayed,
            due: false,
        });
        attempt
    }

    fn promote(&mut self) {
        let mut due: Vec<usize> = (0..self.queue.len())
            .filter(|n| self.queue[*n].due)
            .collect();
        due.sort_by_key(|n| self.queue[*n].id.clone());
        for n in due {
            let turn = self.next_turn(&self.asked[&self.queue[n].id]);
            let entry = &mut self.queue[n];
            (entry.turn, entry.delayed, entry.due) = (turn, false, false);
        }
    }

    /// The ready entries by priority and turn, and within one turn by the time in the record.
    fn order(&self, times: &BTreeMap<(String, u32), i64>) -> Vec<Entry> {
        let mut ready: Vec<Entry> = self.queue.iter().filter(|e| !e.delayed).cloned().collect();
        ready.sort_by_key(|e| {
            let time = times[&(e.id.clone(), e.attempt)];
            let priority = u32::MAX - self.asked[&e.id].priority;
            (priority, e.turn, time, e.id.clone())
        });
        ready
    }

    fn ended(&mut self, id: &str, attempt: u32) {
        let ended = &self.tries[id][&attempt];
        let (Some(left), false, Some(asked)) =
            (ended.retries_left, ended.cancelled, self.asked.get(id))
        else {
            return;
        };
        let again =
            ended.state == State::Error || (ended.state == State::Failed && asked.on_failed);
        if again && left > 0 {
            self.enqueue(id, left - 1, true);
        }
    }

    /// The attempt of a claim, if the claim still holds it.
    fn held(&mut self, claimed: &GrantedClaim) -> Option<&mut Try> {
        let found = self.tries.get_mut(&claimed.id)?.get_mut(&claimed.attempt)?;
        (found.key == claimed.key && !found.state.is_final()).then_some(found)
    }

    fn commit(&mut self, claimed: &GrantedClaim, state: State) -> CommitOutcome {
        let id = claimed.id.as_str();
        if let Some(held) = self.held(claimed) {
            (held.state, held.by_itself) = (state, true);
            self.ended(id, claimed.attempt);
            return CommitOutcome::Now;
        }
        let found = self.of(id).find(|(_, t)| t.key == claimed.key);
        let found = found.map(|(number, t)| (number, t.by_itself, t.superseded));
        let row = |superseded, key: &str| Try {
            key: key.to_owned(),
            state,
            superseded,
            by_itself: true,
            retries_left: None,
            cancelled: false,
            taken_up: true,
        };
        match found {
            Some((_, true, false)) => CommitOutcome::Already,
            Some((attempt, true, true)) => CommitOutcome::Superseded { attempt },
            Some((_, false, _)) => {
                if let Some((_, attempt)) = self.late.get(&claimed.key) {
                    return CommitOutcome::Superseded { attempt: *attempt };
                }
                let attempt = self.add(id, row(true, "of a late one"));
                self.late
                    .insert(claimed.key.clone(), (id.to_owned(), attempt));
                CommitOutcome::Superseded { attempt }
            }
            None => {
                let counts = self.of(id).all(|(_, t)| t.superseded);
                let attempt = self.add(id, row(!counts, &claimed.key));
                match counts {
                    true => CommitOutcome::Recreated { attempt },
                    false => CommitOutcome::Superseded { attempt },
                }
            }
        }
    }

    fn remove(&mut self, id: &str) {
        self.tries.remove(id);
        self.asked.remove(id);
        self.queue.retain(|entry| entry.id != id);
        self.late.retain(|_, (of, _)| of != id);
    }
}

struct Trial<'a> {
    test_database: &'a TestDatabase,
    store: &'a mut Store,
    model: Model,
}

impl Trial<'_> {
    fn try_step(&mut self, step: &Step) {
        let claim = |n: &usize, claims: &[GrantedClaim]| {
            (!claims.is_empty()).then(|| claims[claims.len() - 1 - n % claims.len()].clone())
        };
        match step {
            Step::Submit { .. } => self.submit(step),
            Step::Claim { count, free_gib } => self.claim(*count, *free_gib),
            Step::TakeUp(n) => {
                if let Some(claimed) = claim(n, &self.model.claims) {
                    self.take_up(&claimed);
                }
            }
            Step::Renew(n) => {
                if let Some(claimed) = claim(n, &self.model.claims) {
                    let wanted = match self.model.held(&claimed) {
                        None => RenewOutcome::Lost,
                        Some(held) if held.cancelled => RenewOutcome::CancelRequested {
                            by: "bob".to_owned(),
                        },
                        Some(_) => RenewOutcome::Renewed,
                    };
                    assert_eq!(
                        self.store.renew_lease(&held(&claimed), LEASE_MS).unwrap(),
                        wanted
                    );
                }
            }
            Step::Collecting(n) => {
                if let Some(claimed) = claim(n, &self.model.claims) {
                    let said = self
                        .store
                        .mark_collecting(&held(&claimed), LEASE_MS, "exit")
                        .unwrap();
                    let held = self.model.held(&claimed);
                    assert_eq!(said, held.is_some());
                    if let Some(held) = held {
                        held.state = State::Collecting;
                    }
                }
            }
            Step::Commit(n, state) => {
                if let Some(claimed) = claim(n, &self.model.claims) {
                    let said = commit(self.store, &claimed, *state, "why").unwrap();
                    assert_eq!(said, self.model.commit(&claimed, *state));
                }
            }
            Step::GiveUp(n) => {
                if let Some(claimed) = claim(n, &self.model.claims) {
                    let held = self.model.held(&claimed);
                    assert_eq!(give_up(self.store, &claimed), held.is_some());
                    if let Some(held) = held {
                        held.state = match held.cancelled {
                            true => State::Cancelled,
                            false => State::Error,
                        };
                        self.model.ended(&claimed.id, claimed.attempt);
                    }
                }
            }
            Step::Cancel(id) => self.cancel(&name(*id)),
            Step::Retry(id) => self.retry(&name(*id)),
            Step::TimePasses => {
                self.test_database
                    .sql("UPDATE queue SET not_before_ms = 1 WHERE not_before_ms IS NOT NULL");
                let delayed = self.model.queue.iter_mut().filter(|e| e.delayed);
                delayed.for_each(|entry| entry.due = true);
            }
            Step::Promote => {
                let said = self.store.promote_delayed().unwrap();
                self.model.promote();
                let wait = self.model.queue.iter().any(|e| e.delayed);
                assert_eq!(said.is_some(), wait);
            }
            Step::Remove(id, mode) => self.remove(&name(*id), *mode),
        }
    }

    fn submit(&mut self, step: &Step) {
        let Step::Submit {
            id,
            submitter,
            priority,
            retries,
            on_failed,
            gib,
            replace,
        } = step
        else {
            unreachable!()
        };
        let ask = TestSubmission {
            submitter: format!("s{submitter}"),
            priority: *priority,
            retries: *retries,
            retry_on: if *on_failed {
                vec![State::Failed]
            } else {
                Vec::new()
            },
            memory_bytes: Some(gib * GIB),
            replace: *replace,
            ..TestSubmission::new(&name(*id)).with_file(&[*gib as u8])
        };
        let said = submit(self.store, std::slice::from_ref(&ask));
        let id = ask.id.as_str();
        let open = self.model.unfinished(id).is_some();
        if open || (self.model.newest(id).is_some() && !replace) {
            let StoreError::Submission { at: 0, source } = said.unwrap_err() else {
                panic!("another error");
            };
            let is_open = matches!(*source, StoreError::Running { .. });
            assert!(is_open == open && (open || matches!(*source, StoreError::Exists { .. })));
            return;
        }
        let asked = Asked {
            submitter: ask.submitter.clone(),
            priority: *priority,
            retries: *retries,
            on_failed: *on_failed,
            gib: *gib,
        };
        self.model.asked.insert(id.to_owned(), asked);
        let attempt = self.model.enqueue(id, *retries, false);
        assert_eq!(said.unwrap(), [SubmitOutcome::Now { attempt }]);
    }

    fn claim(&mut self, count: usize, free_gib: u64) {
        // The record's times order the entries of one turn.
        let seen = self.store.overview(1_000).unwrap().next.into_iter();
        let times = seen.map(|w| ((w.id, w.attempt), w.queued_ms)).collect();
        if !self.model.queue.is_empty() {
            self.model.promote();
        }
        let mut free = free_gib;
        let mut wanted = Vec::new();
        for entry in self.model.order(&times) {
            let gib = self.model.asked[&entry.id].gib;
            if wanted.len() < count && gib <= 4 && gib <= free {
                free -= gib;
                wanted.push((entry.id, entry.attempt));
            }
        }
        let keys = fresh_keys(count);
        let free = Capacity {
            memory_bytes: free_gib * GIB,
            cpu_milli: 4_000,
        };
        let said = self.store.claim(&claim_from(&keys, free, TOTAL)).unwrap();
        let taken: Vec<_> = said.iter().map(|c| (c.id.clone(), c.attempt)).collect();
        assert_eq!(taken, wanted);
        for claimed in said {
            let is_it = |e: &Entry| e.id == claimed.id && e.attempt == claimed.attempt;
            self.model.queue.retain(|entry| !is_it(entry));
            let tries = self.model.tries.get_mut(&claimed.id).unwrap();
            let made = tries.get_mut(&claimed.attempt).unwrap();
            (made.state, made.key) = (State::Running, claimed.key.clone());
            self.model.claims.push(claimed);
        }
    }

    fn take_up(&mut self, claimed: &GrantedClaim) {
        let begun = sample(claimed);
        let said = self
            .store
            .start_claimed(&begun.beginning(), claimed.attempt, LEASE_MS)
            .unwrap();
        let held = self
            .model
            .held(claimed)
            .filter(|t| t.state == State::Running);
        assert_eq!(said, held.is_some());
        if let Some(held) = held {
            held.taken_up = true;
        }
    }

    fn cancel(&mut self, id: &str) {
        let said = self.store.cancel(id, "bob");
        match (self.model.unfinished(id), self.model.newest(id)) {
            (Some((attempt, state)), _) => {
                let tries = self.model.tries.get_mut(id).unwrap();
                tries.get_mut(&attempt).unwrap().cancelled = true;
                let wanted = match state {
                    State::Queued => {
                        tries.get_mut(&attempt).unwrap().state = State::Cancelled;
                        self.model.queue.retain(|entry| entry.id != id);
                        CancelOutcome::Now { attempt }
                    }
                    _ => CancelOutcome::Requested {
                        attempt,
                        host: "lab-1".to_owned(),
                    },
                };
                assert_eq!(said.unwrap(), wanted);
            }
            (None, Some((attempt, state))) => {
                assert_eq!(
                    said.unwrap(),
                    CancelOutcome::AlreadyEnded { attempt, state }
                );
            }
            (None, None) => assert!(matches!(said, Err(StoreError::NotFound { .. }))),
        }
    }

    fn retry(&mut self, id: &str) {
        let said = self.store.retry(id, "bob", &[]);
        let asked = self.model.asked.get(id).map(|asked| asked.retries);
        match (self.model.unfinished(id), self.model.newest(id), asked) {
            (Some(_), ..) => assert!(matches!(said, Err(StoreError::NotEnded { .. }))),
            (None, None, _) => assert!(matches!(said, Err(StoreError::NotFound { .. }))),
            (None, Some(_), None) => {
                assert!(matches!(said, Err(StoreError::NeverSubmitted { .. })));
            }
            (None, Some(_), Some(retries)) => {
                assert_eq!(said.unwrap(), self.model.enqueue(id, retries, false));
            }
        }
    }

    fn remove(&mut self, id: &str, mode: UnfinishedPolicy) {
        let said = self.store.remove(id, mode);
        let open = self.model.unfinished(id).is_some();
        if self.model.newest(id).is_none() {
            assert!(matches!(said, Err(StoreError::NotFound { .. })));
        } else if open && mode == UnfinishedPolicy::Refuse {
            assert!(matches!(said, Err(StoreError::Running { .. })));
        } else {
            let attempts = self.model.of(id).count() as u64;
            assert_eq!(said.unwrap().attempts, attempts);
            self.model.remove(id);
        }
    }

    /// Asserts that the record and the model have the same attempts in the same states, and the same order.
    fn compare(&mut self) {
        let seen = self.store.overview(1_000).unwrap();
        let times = seen
            .next
            .iter()
            .map(|w| ((w.id.clone(), w.attempt), w.queued_ms));
        let times = times.collect();
        let ready = self
            .model
            .order(&times)
            .into_iter()
            .map(|e| (e.id, e.attempt));
        let shown = seen.next.iter().filter(|w| w.not_before_ms.is_none());
        let shown: Vec<_> = shown.map(|w| (w.id.clone(), w.attempt)).collect();
        assert_eq!(shown, ready.collect::<Vec<_>>());
        assert_eq!(seen.queued as usize, self.model.queue.len());
        let delayed = self.model.queue.iter().filter(|e| e.delayed).count();
        assert_eq!(seen.delayed as usize, delayed);
        let all = AttemptFilter {
            states: &[],
            since_ms: None,
            which: AttemptSelection::All,
            limit: 10_000,
        };
        let found = self.store.list(&all).unwrap().into_iter();
        let found = found.map(|l| ((l.id, l.attempt), (l.state, l.superseded)));
        let found: BTreeMap<_, _> = found.collect();
        let wanted = self.model.tries.iter().flat_map(|(id, tries)| {
            let each = tries.iter();
            each.map(|(n, t)| ((id.clone(), *n), (t.state, t.superseded)))
        });
        assert_eq!(found, wanted.collect());
        let queued = found.values().filter(|(s, _)| *s == State::Queued).count();
        assert_eq!(
            queued,
            self.model.queue.len(),
            "a row of the queue for each that is queued"
        );
    }
}

/// Asserts the invariants of the tables, which hold after any steps.
fn check_tables(test_database: &TestDatabase) {
    let nothing = [
        "SELECT a.id FROM attempts a LEFT JOIN queue q ON q.id = a.id AND q.attempt = a.attempt
         WHERE (a.state = 'queued') <> (q.id IS NOT NULL)",
        "SELECT id FROM attempts WHERE state IN ('queued', 'running', 'collecting') GROUP BY id HAVING COUNT(*) > 1",
        "SELECT id FROM attempts WHERE superseded AND state IN ('queued', 'running', 'collecting')",
        "SELECT b.blake3 FROM blobs b WHERE NOT EXISTS (SELECT 1 FROM submission_blobs s WHERE s.blake3 = b.blake3)",
        "SELECT id FROM attempts WHERE (committed_ms IS NULL) <> (state IN ('queued', 'running', 'collecting'))",
    ];
    for question in nothing {
        assert_eq!(test_database.sql(question), [""; 0], "{question}");
    }
}

on_both!(the_queue_is_as_its_model);
fn the_queue_is_as_its_model(test_database: &TestDatabase) {
    let seed = std::env::var("FUMEHOOD_QUEUE_SEED")
        .ok()
        .and_then(|s| s.parse().ok());
    let seed = seed.unwrap_or_else(|| std::process::id().into());
    println!("FUMEHOOD_QUEUE_SEED={seed}");
    let config = Config {
        cases: 12,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(seed),
        max_shrink_iters: 200,
        ..Config::default()
    };
    let tried = TestRunner::new(config).run(&prop::collection::vec(step(), 40..90), |steps| {
        let mut store = test_database.store();
        for id in (0..IDS).map(name) {
            // Remove the rows of the last case. There may be none.
            let _ = store.remove(&id, UnfinishedPolicy::Remove);
        }
        let mut trial = Trial {
            test_database,
            store: &mut store,
            model: Model::default(),
        };
        for step in &steps {
            trial.try_step(step);
            trial.compare();
        }
        check_tables(test_database);
        Ok(())
    });
    if let Err(e) = tried {
        panic!("seed {seed}: {e}");
    }
}
