//! The queue: submissions wait, workers claim them, runners hold them by a lease, failed ones are tried again.

pub(crate) mod change_listener;
pub(crate) mod claim;
pub(crate) mod queue_position;
pub(crate) mod queue_types;
pub(crate) mod retry;
pub(crate) mod runner_lease;
pub(crate) mod submit;
