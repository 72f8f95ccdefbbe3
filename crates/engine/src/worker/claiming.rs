//! Claims work: checks whether this machine can run it, claims what fits, and starts a runner for each attempt.

use std::io;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sandbox::probe;
use sandbox::spec::ConfinementLevel;

use super::event::WorkerEvent;
use super::options::WorkerOptions;
use super::slot::{ORDER_VERSION, RunnerOrder};
use super::slot_table::{BusySlot, SlotState};
use super::{Worker, name};
use crate::attempt::check_free_space;
use crate::attempt::context::Claim;
use crate::attempt::error::{AttemptError, CommitError};
use crate::attempt::record::Reason;
use crate::plan::limits::error_chain;
use crate::run_dir;
use store::types::analysis_id::AnalysisId;
use store::{Capacity, ClaimRequest, GrantedClaim, LossProof, LostAttempt, Store, StoreError};

/// After this many failed starts in a row the worker pauses: a machine on which nothing starts must not use up the
/// queue.
const FAILED_STARTS_MAX: u32 = 3;
const FAILED_STARTS_PAUSE: Duration = Duration::from_secs(30);

impl Worker {
    /// Whether this machine can run anything just now.
    pub(super) fn can_claim(&mut self, on_event: &mut dyn FnMut(WorkerEvent)) -> bool {
        let now = Instant::now();
        // The requests may be the cause. A small sandbox that contains nothing of any request decides.
        if self.failed_starts >= FAILED_STARTS_MAX && !self.can_start_sandbox() {
            self.paused_until = Some(now + FAILED_STARTS_PAUSE);
            on_event(WorkerEvent::Problem(format!(
                "{FAILED_STARTS_MAX} analyses in a row could not be started here (`fumehood show` says why); no more are taken for {} s",
                FAILED_STARTS_PAUSE.as_secs()
            )));
        }
        self.failed_starts %= FAILED_STARTS_MAX;
        if self.paused_until.is_some_and(|until| until > now) {
            return false;
        }
        self.paused_until = None;
        if self.queue_seen_empty {
            return true;
        }
        let (reserve, quota) = (
            self.options.free_reserve_bytes,
            self.options.store_quota_bytes,
        );
        let artifacts = self.recorder.artifacts().map_err(AttemptError::from);
        match artifacts.and_then(|artifacts| check_free_space(&artifacts, reserve, quota)) {
            Ok(()) => {
                self.no_space_reported = false;
                true
            }
            Err(e) => {
                if !std::mem::replace(&mut self.no_space_reported, true) {
                    on_event(WorkerEvent::Problem(format!(
                        "no work is taken: {}",
                        error_chain(&e)
                    )));
                }
                self.queue_seen_empty = true;
                false
            }
        }
    }

    fn can_start_sandbox(&self) -> bool {
        let levels = [ConfinementLevel::Full, ConfinementLevel::Landlock];
        let try_level = |level| probe::try_level(&self.options.program, level);
        levels.into_iter().any(|level| try_level(level).is_ok())
    }

    /// Claims attempts that fit, until the slots are full or the queue has no more.
    pub(super) fn claim(
        &mut self,
        on_event: &mut dyn FnMut(WorkerEvent),
    ) -> Result<(), CommitError> {
        while !self.queue_seen_empty {
            let free: Vec<usize> = self.free_slots().collect();
            if free.is_empty() {
                return Ok(());
            }
            if self.claim_keys.is_empty() {
                self.claim_keys = free.iter().map(|_| run_dir::new_attempt_key()).collect();
            }
            let keys = self.claim_keys.clone();
            let worker = format!("{}@{}", self.options.name, name::host_name());
            let claim = ClaimRequest {
                host: &self.host,
                boot_id: &self.boot_id,
                worker: &worker,
                lease_ms: self.options.lease_ms,
                free: self.free_capacity(),
                total: self.options.total,
                memory_default_bytes: self.options.memory_default_bytes,
                keys: &keys,
            };
            let claimed = self
                .recorder
                .with(|store| claim_or_count_queued(store, &claim))?;
            let database_id = self.recorder.store()?.id().to_owned();
            self.claim_keys.clear();
            self.nothing_queued = match claimed {
                Ok(_) => false,
                Err(queued) => queued == 0,
            };
            let claimed = claimed.unwrap_or_default();
            self.queue_seen_empty = claimed.len() < keys.len();
            for (at, claimed) in free.into_iter().zip(claimed) {
                let (id, attempt) = (claimed.id.clone(), claimed.attempt);
                match self.start_runner(at, claimed, &database_id) {
                    Ok(()) => {
                        self.change_count += 1;
                        on_event(WorkerEvent::Claimed { id, attempt });
                    }
                    // The order is in the slot. Closing the slot gives the attempt up.
                    Err(e) => {
                        self.queue_seen_empty = true;
                        on_event(WorkerEvent::Problem(format!(
                            "start a runner for {id:?}: {e}"
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    fn free_slots(&self) -> impl Iterator<Item = usize> {
        let slots = self.options.slots as usize;
        // An earlier worker may have had more slots, and the runners in them count.
        let left = slots.saturating_sub(self.busy_slots());
        let entries = self.slots.iter().take(slots).enumerate();
        entries
            .filter(|(_, entry)| matches!(entry.state, SlotState::Free(_)))
            .map(|(at, _)| at)
            .take(left)
    }

    /// The memory and CPUs that no runner has.
    fn free_capacity(&self) -> Capacity {
        let mut free = self.options.total;
        for entry in &self.slots {
            if let SlotState::Busy(busy) = &entry.state {
                free.memory_bytes = free.memory_bytes.saturating_sub(busy.counted.memory_bytes);
                free.cpu_milli = free.cpu_milli.saturating_sub(busy.counted.cpu_milli);
            }
        }
        free
    }

    fn start_runner(
        &mut self,
        at: usize,
        claimed: GrantedClaim,
        database_id: &str,
    ) -> io::Result<()> {
        let Ok(id) = AnalysisId::new(&claimed.id) else {
            self.refuse_claim(&claimed, "its id is not valid");
            return Err(io::Error::other(
                "the database returned an id that is not valid",
            ));
        };
        let entry = &mut self.slots[at];
        let order = RunnerOrder {
            version: ORDER_VERSION,
            claim: Claim {
                id,
                attempt: claimed.attempt,
                key: claimed.key,
                database_id: database_id.to_owned(),
                lease_ms: self.options.lease_ms,
            },
            request: claimed.request_json,
            submitter: claimed.submitter,
            memory_bytes: claimed.counted.memory_bytes,
            cpu_milli: claimed.counted.cpu_milli,
            cpu_milli_max: self.options.total.cpu_milli,
            slot: entry.path.clone(),
            worker: self.lock.clone(),
        };
        let closing = SlotState::Closing { key: None };
        let SlotState::Free(mut slot) = std::mem::replace(&mut entry.state, closing) else {
            return Err(io::Error::other("the slot is not free"));
        };
        let started = slot
            .write(&order)
            .and_then(|()| slot.order_for_runner())
            .and_then(|input| spawn_runner(&self.options, input));
        entry.state = match started {
            Ok(child) => {
                tracing::debug!(id = %order.claim.id, attempt = order.claim.attempt, pid = child.id(), "runner started");
                // From here on only the runner holds the lock.
                drop(slot);
                SlotState::Busy(BusySlot {
                    counted: order.reserved_capacity(),
                    claim: Some(order.claim),
                    child: Some(child),
                    cancel_sent: false,
                })
            }
            Err(e) => {
                let until = Instant::now();
                entry.state = SlotState::Stuck { slot, until };
                return Err(e);
            }
        };
        Ok(())
    }

    /// Ends an attempt for which no runner can be started.
    fn refuse_claim(&mut self, claimed: &GrantedClaim, message: &str) {
        let lost = LostAttempt {
            id: &claimed.id,
            attempt: claimed.attempt,
            key: &claimed.key,
            by: &claimed.key,
            reason: Reason::Refused.as_str(),
            message,
            proof: LossProof::RunnerGone,
        };
        // If this fails, the attempt is given up when its lease expires.
        let _ = self.recorder.with(|store| store.give_up(&lost));
    }
}

/// The attempts that were claimed. If none was, the error is the number of queued analyses that cannot be claimed yet.
fn claim_or_count_queued(
    store: &mut Store,
    claim: &ClaimRequest,
) -> Result<Result<Vec<GrantedClaim>, u64>, StoreError> {
    let claimed = store.claim(claim)?;
    match claimed.is_empty() {
        false => Ok(Ok(claimed)),
        true => Ok(Err(store.overview(0)?.queued)),
    }
}

fn spawn_runner(options: &WorkerOptions, input: OwnedFd) -> io::Result<Child> {
    let mut command = Command::new(&options.program);
    command.args(&options.args).stdin(Stdio::from(input));
    command.stdout(Stdio::null());
    // These variables of systemd are for the worker only.
    for name in ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"] {
        command.env_remove(name);
    }
    command.current_dir("/");
    // Give the runner its own process group, so that Ctrl-C on the worker's terminal does not reach it.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command.spawn()
}
