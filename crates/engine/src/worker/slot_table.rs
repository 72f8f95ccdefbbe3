//! The slots of a worker, and what is in each.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Instant;

use super::error::{WorkerError, slot_error};
use super::slot::{self, RunnerOrder, Slot};
use crate::attempt::context::Claim;
use store::Capacity;

/// One slot of the worker.
pub(super) struct SlotEntry {
    pub path: PathBuf,
    pub state: SlotState,
}

pub(super) enum SlotState {
    Free(Slot),
    /// A live runner has it: a child of this process, or one that an earlier worker started.
    Busy(BusySlot),
    /// A maintenance thread finishes what its runner left.
    Closing {
        key: Option<String>,
    },
    /// It could not be closed. The worker tries again at this time.
    Stuck {
        slot: Slot,
        until: Instant,
    },
}

pub(super) struct BusySlot {
    /// `None`: the runner has cleared its order and is about to end.
    pub claim: Option<Claim>,
    pub counted: Capacity,
    pub child: Option<Child>,
    /// The runner was told to cancel already.
    pub cancel_sent: bool,
}

impl BusySlot {
    pub fn has_key(&self, key: &str) -> bool {
        self.claim.as_ref().is_some_and(|claim| claim.key == key)
    }
}

/// Opens every slot directory that exists, and creates more until there are `slots`.
pub(super) fn open_slots(slots_at: &Path, slots: u32) -> Result<Vec<SlotEntry>, WorkerError> {
    let there = std::fs::read_dir(slots_at).into_iter().flatten().flatten();
    let numbers = there.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let count = numbers.map(|n| n.saturating_add(1)).max().unwrap_or(0);
    let mut entries = Vec::new();
    for n in 0..count.max(slots) {
        let path = slots_at.join(n.to_string());
        let locked = Slot::lock(&path).map_err(|e| slot_error(&path, e))?;
        let state = match locked {
            Some(slot) => SlotState::Free(slot),
            None => SlotState::Busy(adopted_runner(&path)),
        };
        entries.push(SlotEntry { path, state });
    }
    Ok(entries)
}

/// A runner that an earlier worker started.
fn adopted_runner(path: &Path) -> BusySlot {
    let order = slot::read_order(path);
    BusySlot {
        counted: order
            .as_ref()
            .map_or_else(Capacity::default, RunnerOrder::reserved_capacity),
        claim: order.map(|order| order.claim),
        child: None,
        cancel_sent: false,
    }
}
