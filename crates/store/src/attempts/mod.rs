//! Attempts as rows: begun, committed in one transaction, read, exported, removed.

pub(crate) mod attempt;
pub(crate) mod commit;
pub(crate) mod events;
pub(crate) mod export;
pub(crate) mod objects;
pub(crate) mod read;
pub(crate) mod remove;
pub(crate) mod secrets;
