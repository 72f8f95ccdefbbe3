//! Submissions for tests, and short forms of submit, claim and commit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use store::types::manifest::ContentHash;
use store::{
    Capacity, ClaimRequest, CommitOutcome, GrantedClaim, LeasedAttempt, LostAttempt, NewSubmission,
    State, Store, StoreError, SubmitOutcome, WorkerRow,
};

use crate::test_database::{TestAttempt, key};

pub const GIB: u64 = 1 << 30;
pub const PLENTY: Capacity = Capacity {
    memory_bytes: 1 << 50,
    cpu_milli: 1 << 40,
};
pub const LEASE_MS: u64 = 60_000;
pub const QUEUE_MAX: u64 = 1_000_000;

/// The owned data of one submission.
#[derive(Clone)]
pub struct TestSubmission {
    pub id: String,
    pub key: Option<String>,
    pub fingerprint: String,
    pub request: String,
    pub submitter: String,
    pub priority: u32,
    pub retries: u32,
    pub retry_on: Vec<State>,
    pub memory_bytes: Option<u64>,
    pub cpu_milli: Option<u64>,
    pub blobs: Vec<(ContentHash, Arc<Vec<u8>>)>,
    pub replace: bool,
}

impl TestSubmission {
    pub fn new(id: &str) -> TestSubmission {
        TestSubmission {
            id: id.to_owned(),
            key: None,
            fingerprint: "f".to_owned(),
            request: format!("{{\"id\": \"{id}\"}}"),
            submitter: "alice".to_owned(),
            priority: 5,
            retries: 0,
            retry_on: Vec::new(),
            memory_bytes: Some(GIB),
            cpu_milli: Some(1_000),
            blobs: Vec::new(),
            replace: false,
        }
    }

    pub fn by(id: &str, submitter: &str) -> TestSubmission {
        TestSubmission {
            submitter: submitter.to_owned(),
            ..TestSubmission::new(id)
        }
    }

    pub fn retried(id: &str, retries: u32) -> TestSubmission {
        TestSubmission {
            retries,
            ..TestSubmission::new(id)
        }
    }

    pub fn with_file(mut self, content: &[u8]) -> TestSubmission {
        self.blobs
            .push((ContentHash::of(content), Arc::new(content.to_vec())));
        self
    }

    pub fn submit(&self) -> NewSubmission<'_> {
        NewSubmission {
            id: &self.id,
            submit_key: self.key.as_deref(),
            fingerprint: &self.fingerprint,
            request_json: &self.request,
            submitter: &self.submitter,
            priority: self.priority,
            retries: self.retries,
            retry_on: &self.retry_on,
            memory_bytes: self.memory_bytes,
            cpu_milli: self.cpu_milli,
            blobs: &self.blobs,
            replace: self.replace,
        }
    }
}

pub fn submit(store: &mut Store, all: &[TestSubmission]) -> Result<Vec<SubmitOutcome>, StoreError> {
    let all: Vec<NewSubmission> = all.iter().map(TestSubmission::submit).collect();
    store.submit(&all, QUEUE_MAX)
}

pub fn fresh_keys(count: usize) -> Vec<String> {
    static LAST: AtomicU32 = AtomicU32::new(1_000_000);
    (0..count)
        .map(|_| key(LAST.fetch_add(1, Ordering::Relaxed)))
        .collect()
}

pub fn claim_from(keys: &[String], free: Capacity, total: Capacity) -> ClaimRequest<'_> {
    ClaimRequest {
        host: "lab-1",
        boot_id: "boot-1",
        worker: "w1",
        lease_ms: LEASE_MS,
        free,
        total,
        memory_default_bytes: GIB,
        keys,
    }
}

/// Claims up to `count` attempts, with capacity for all.
pub fn claim(store: &mut Store, count: usize) -> Vec<GrantedClaim> {
    let keys = fresh_keys(count);
    store.claim(&claim_from(&keys, PLENTY, PLENTY)).unwrap()
}

pub fn claim_one(store: &mut Store) -> GrantedClaim {
    let mut claimed = claim(store, 1);
    assert_eq!(claimed.len(), 1);
    claimed.remove(0)
}

pub fn ids(claimed: &[GrantedClaim]) -> Vec<&str> {
    claimed.iter().map(|c| c.id.as_str()).collect()
}

pub fn held(claimed: &GrantedClaim) -> LeasedAttempt<'_> {
    LeasedAttempt {
        id: &claimed.id,
        attempt: claimed.attempt,
        key: &claimed.key,
    }
}

pub fn sample(claimed: &GrantedClaim) -> TestAttempt {
    let mut sample = TestAttempt::new(&claimed.id, &claimed.key);
    sample.attempt = claimed.attempt;
    sample
}

pub fn commit(
    store: &mut Store,
    claimed: &GrantedClaim,
    state: State,
    reason: &str,
) -> Result<CommitOutcome, StoreError> {
    let mut sample = sample(claimed);
    (sample.state, sample.reason) = (state, reason.to_owned());
    sample.commit(store)
}

pub fn give_up(store: &mut Store, claimed: &GrantedClaim) -> bool {
    let lost = LostAttempt {
        id: &claimed.id,
        attempt: claimed.attempt,
        key: &claimed.key,
        by: "token-of-the-reaper",
        reason: "runner_lost",
        message: "its runner is gone",
        proof: store::LossProof::RunnerGone,
    };
    store.give_up(&lost).unwrap()
}

pub fn worker(name: &str, memory_bytes: u64, cpu_milli: u64) -> WorkerRow {
    WorkerRow {
        host: "lab-1".to_owned(),
        account: "0".to_owned(),
        name: name.to_owned(),
        host_name: "lab".to_owned(),
        pid: 7,
        version: "0.1.0".to_owned(),
        slots: 8,
        total: Capacity {
            memory_bytes,
            cpu_milli,
        },
        running: 0,
        draining: false,
        started_ms: 1_700_000_000_000,
        seen_ms: 0,
    }
}

/// The events of an analysis, oldest first, each as `ATTEMPT event` or `ATTEMPT event(reason)`.
pub fn events_of(store: &mut Store, id: &str) -> Vec<String> {
    let events = store.events(id).unwrap().into_iter();
    let line = |e: store::AnalysisEvent| match e.reason {
        Some(reason) => format!("{} {}({reason})", e.attempt, e.event),
        None => format!("{} {}", e.attempt, e.event),
    };
    events.map(line).collect()
}

pub fn state(store: &mut Store, id: &str, attempt: u32) -> State {
    store.show(id, Some(attempt)).unwrap().summary.state
}

/// The machine's clock, which is also the clock of the test's database.
pub fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    i64::try_from(since.as_millis()).unwrap()
}
