//! What the database and the artifact store hold, and the bounds on it.

pub mod analysis_id;
pub mod crash_points;
pub mod escaping;
pub mod input_name;
pub mod manifest;
pub mod result_value;
pub mod secret_values;
pub mod submission;
pub mod timings;
pub mod units;
