//! Taking work: whether this machine is fit for it, what fits, and a runner for each.

use std::io;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sandbox::probe;
use sandbox::spec::ConfinementLevel;

use super::slot::{ORDER_VERSION, Order};
use super::slot_table::{Busy, State};
use super::{News, Options, Worker, name};
use crate::attempt::check_room;
use crate::attempt::finalize::SettleError;
use crate::attempt::pipeline::PipelineError;
use crate::attempt::record::Reason;
use crate::plan::limits::error_chain;
use crate::request::AnalysisId;
use crate::run_dir;
use store::{Capacity, ClaimRequest, GrantedClaim, LossProof, LostAttempt, Store, StoreError};

/// A machine on which nothing starts must not use up the queue: after so many in a row it pauses.
const UNSTARTED_MAX: u32 = 3;
const UNSTARTED_PAUSE: Duration = Duration::from_secs(30);

impl Worker {
    /// Whether this machine is fit to run anything just now.
    pub(super) fn may_take(&mut self, tell: &mut dyn FnMut(News)) -> bool {
        let now = Instant::now();
        // It may as well be what was asked for: a miniature sandbox, which has nothing of any request in it, decides.
        if self.unstarted >= UNSTARTED_MAX && !self.can_start() {
            self.pause_until = Some(now + UNSTARTED_PAUSE);
            tell(News::Trouble(format!(
                "{UNSTARTED_MAX} analyses in a row could not be started here (`fumehood show` says why); no more are taken for {} s",
                UNSTARTED_PAUSE.as_secs()
            )));
        }
        self.unstarted %= UNSTARTED_MAX;
        if self.pause_until.is_some_and(|until| until > now) {
            return false;
        }
        self.pause_until = None;
        if self.sated {
            return true;
        }
        let (reserve, quota) = (
            self.options.free_reserve_bytes,
            self.options.store_quota_bytes,
        );
        let artifacts = self.ledger.artifacts().map_err(PipelineError::from);
        match artifacts.and_then(|artifacts| check_room(&artifacts, reserve, quota)) {
            Ok(()) => {
                self.no_room = false;
                true
            }
            Err(e) => {
                if !std::mem::replace(&mut self.no_room, true) {
                    tell(News::Trouble(format!(
                        "no work is taken: {}",
                        error_chain(&e)
                    )));
                }
                self.sated = true;
                false
            }
        }
    }

    fn can_start(&self) -> bool {
        let levels = [ConfinementLevel::Full, ConfinementLevel::Landlock];
        let try_level = |level| probe::try_level(&self.options.program, level);
        levels.into_iter().any(|level| try_level(level).is_ok())
    }

    /// Takes what fits.
    pub(super) fn take(&mut self, tell: &mut dyn FnMut(News)) -> Result<(), SettleError> {
        while !self.sated {
            let free: Vec<usize> = self.free_slots().collect();
            if free.is_empty() {
                return Ok(());
            }
            if self.keys.is_empty() {
                self.keys = free.iter().map(|_| run_dir::fresh_key()).collect();
            }
            let keys = self.keys.clone();
            let worker = format!("{}@{}", self.options.name, name::host_name());
            let claim = ClaimRequest {
                host: &self.host,
                boot_id: &self.boot_id,
                worker: &worker,
                lease_ms: self.options.lease_ms,
                free: self.free(),
                total: self.options.total,
                memory_default_bytes: self.options.memory_default_bytes,
                keys: &keys,
            };
            let claimed = self.ledger.with(|store| claim_next(store, &claim))?;
            let database_id = self.ledger.store()?.id().to_owned();
            self.keys.clear();
            self.nothing_queued = match claimed {
                Ok(_) => false,
                Err(queued) => queued == 0,
            };
            let claimed = claimed.unwrap_or_default();
            self.sated = claimed.len() < keys.len();
            for (at, claimed) in free.into_iter().zip(claimed) {
                let (id, attempt) = (claimed.id.clone(), claimed.attempt);
                match self.start(at, claimed, &database_id) {
                    Ok(()) => {
                        self.changes += 1;
                        tell(News::Took { id, attempt });
                    }
                    // The order stands, and says what to give up.
                    Err(e) => {
                        self.sated = true;
                        tell(News::Trouble(format!("start a runner for {id:?}: {e}")));
                    }
                }
            }
        }
        Ok(())
    }

    fn free_slots(&self) -> impl Iterator<Item = usize> {
        let slots = self.options.slots as usize;
        // Before a restart there may have been more, and their runners count.
        let left = slots.saturating_sub(self.running());
        let places = self.slots.iter().take(slots).enumerate();
        places
            .filter(|(_, place)| matches!(place.state, State::Free(_)))
            .map(|(at, _)| at)
            .take(left)
    }

    /// What is not promised to any runner.
    fn free(&self) -> Capacity {
        let mut free = self.options.total;
        for place in &self.slots {
            if let State::Busy(busy) = &place.state {
                free.memory_bytes = free.memory_bytes.saturating_sub(busy.counted.memory_bytes);
                free.cpu_milli = free.cpu_milli.saturating_sub(busy.counted.cpu_milli);
            }
        }
        free
    }

    fn start(&mut self, at: usize, claimed: GrantedClaim, database_id: &str) -> io::Result<()> {
        let Ok(id) = AnalysisId::new(&claimed.id) else {
            self.refuse(&claimed, "its id is none that Fumehood gives");
            return Err(io::Error::other("the database gave an id that is none"));
        };
        let place = &mut self.slots[at];
        let order = Order {
            version: ORDER_VERSION,
            id,
            attempt: claimed.attempt,
            key: claimed.key,
            database_id: database_id.to_owned(),
            request: claimed.request_json,
            submitter: claimed.submitter,
            lease_ms: self.options.lease_ms,
            memory_bytes: claimed.counted.memory_bytes,
            cpu_milli: claimed.counted.cpu_milli,
            cpu_milli_max: self.options.total.cpu_milli,
            slot: place.path.clone(),
            worker: self.lock.clone(),
        };
        let closing = State::Closing { key: None };
        let State::Free(mut slot) = std::mem::replace(&mut place.state, closing) else {
            return Err(io::Error::other("the slot is not free"));
        };
        let started = slot
            .write(&order)
            .and_then(|()| slot.order_for_runner())
            .and_then(|input| spawn(&self.options, input));
        place.state = match started {
            Ok(child) => {
                // From here on the lock is the runner's alone.
                drop(slot);
                State::Busy(Busy {
                    id: order.id.to_string(),
                    attempt: order.attempt,
                    key: order.key,
                    counted: Capacity {
                        memory_bytes: order.memory_bytes,
                        cpu_milli: order.cpu_milli,
                    },
                    child: Some(child),
                    told: false,
                })
            }
            Err(e) => {
                let until = Instant::now();
                place.state = State::Stuck { slot, until };
                return Err(e);
            }
        };
        Ok(())
    }

    /// Ends an attempt that no runner can be given.
    fn refuse(&mut self, claimed: &GrantedClaim, message: &str) {
        let lost = LostAttempt {
            id: &claimed.id,
            attempt: claimed.attempt,
            key: &claimed.key,
            by: &claimed.key,
            reason: Reason::Refused.as_str(),
            message,
            proof: LossProof::RunnerGone,
        };
        // Otherwise its lease ends, and with it the attempt.
        let _given_up_later = self.ledger.with(|store| store.give_up(&lost));
    }
}

/// What was taken; or, where nothing was there to be taken, how many are queued that cannot be yet.
fn claim_next(
    store: &mut Store,
    claim: &ClaimRequest,
) -> Result<Result<Vec<GrantedClaim>, u64>, StoreError> {
    let claimed = store.claim(claim)?;
    match claimed.is_empty() {
        false => Ok(Ok(claimed)),
        true => Ok(Err(store.overview(0)?.queued)),
    }
}

fn spawn(options: &Options, input: OwnedFd) -> io::Result<Child> {
    let mut command = Command::new(&options.program);
    command.args(&options.args).stdin(Stdio::from(input));
    command.stdout(Stdio::null());
    // What systemd told the worker is not for its runners.
    for name in ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"] {
        command.env_remove(name);
    }
    command.current_dir("/");
    // A group of its own: Ctrl-C on the worker's terminal is not meant for it.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command.spawn()
}
