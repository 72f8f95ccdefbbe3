//! The data that the database and the artifact store hold, and the bounds on it. Nothing here does SQL.
//!
//! In reading order:
//!
//! - `analysis_id`, `attempt`, `capacity`: what an analysis and its attempts are
//! - `manifest`: the outputs of an attempt; `result_value`: which `result.json` both databases accept
//! - `submission`, `input_name`, `secret_values`: a request in the queue
//! - `units`, `escaping`, `random_hex`: text forms of numbers, bytes and tokens
//! - `timings`, `crash_points`: how long each part of a run took, and where tests interrupt a run

pub mod analysis_id;
pub(crate) mod attempt;
pub(crate) mod capacity;
pub mod crash_points;
pub mod escaping;
pub mod input_name;
pub mod manifest;
pub(crate) mod random_hex;
pub mod result_value;
pub mod secret_values;
pub mod submission;
pub mod timings;
pub mod units;
