//! The slots as the worker sees them.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Instant;

use super::slot::{self, Slot};
use super::{WorkerError, of_slot};
use store::Capacity;

/// A slot as the worker sees it.
pub(super) struct Place {
    pub path: PathBuf,
    pub state: State,
}

pub(super) enum State {
    Free(Slot),
    /// A runner lives in it: our child, or a predecessor's.
    Busy(Busy),
    /// The keeper has it.
    Closing {
        key: Option<String>,
    },
    /// Could not be closed; tried again then.
    Stuck {
        slot: Slot,
        until: Instant,
    },
}

pub(super) struct Busy {
    pub id: String,
    pub attempt: u32,
    pub key: String,
    pub counted: Capacity,
    pub child: Option<Child>,
    /// Told to end already.
    pub told: bool,
}

/// Every slot that is there, and as many more as we were given.
pub(super) fn take_up(slots_at: &Path, slots: u32) -> Result<Vec<Place>, WorkerError> {
    let there = std::fs::read_dir(slots_at).into_iter().flatten().flatten();
    let numbers = there.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let count = numbers.map(|n| n.saturating_add(1)).max().unwrap_or(0);
    let mut places = Vec::new();
    for n in 0..count.max(slots) {
        let path = slots_at.join(n.to_string());
        let locked = Slot::lock(&path).map_err(|e| of_slot(&path, e))?;
        let state = match locked {
            Some(slot) => State::Free(slot),
            None => State::Busy(adopted(&path)),
        };
        places.push(Place { path, state });
    }
    Ok(places)
}

/// A runner that another worker started.
fn adopted(path: &Path) -> Busy {
    match slot::peek(path) {
        Some(order) => Busy {
            id: order.id.to_string(),
            attempt: order.attempt,
            counted: order.counted(),
            key: order.key,
            child: None,
            told: false,
        },
        // About to end: it has nothing more to do.
        None => Busy {
            id: String::new(),
            attempt: 0,
            counted: Capacity::default(),
            key: String::new(),
            child: None,
            told: false,
        },
    }
}
