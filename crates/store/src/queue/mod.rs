//! The queue: requests wait, workers claim them, runners hold a lease on them, failed ones are retried.
//!
//! In reading order:
//!
//! - `queue_types`: the data that callers pass and get
//! - `submit`: queue a batch of requests with their files
//! - `queue_row`: the row of a waiting attempt, and the order of the queue
//! - `workers`, `claim`: who takes work, and what they get
//! - `runner_lease`: start, lease and end of a claimed attempt
//! - `retry`, `cancel`, `unfit`: what follows an end, a user's request, or a request that no worker can run
//! - `queue_position`, `overview`: what users see
//! - `change_listener`: waking up those who wait

pub(crate) mod cancel;
pub(crate) mod change_listener;
pub(crate) mod claim;
pub(crate) mod overview;
pub(crate) mod queue_position;
pub(crate) mod queue_row;
pub(crate) mod queue_types;
pub(crate) mod retry;
pub(crate) mod runner_lease;
pub(crate) mod submit;
pub(crate) mod unfit;
pub(crate) mod workers;
