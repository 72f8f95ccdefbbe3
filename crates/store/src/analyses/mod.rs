//! What the queue and attempts share: data of an analysis as a whole.
//!
//! In reading order:
//!
//! - `analysis_row`: the lock of an analysis, the numbers of its attempts
//! - `events`: what happened to an analysis
//! - `notifications`: how listeners on PostgreSQL learn of changes
//! - `submitted_files`: the files of submissions, by hash
//! - `secrets`: erasing and restoring the values of secret variables

pub(crate) mod analysis_row;
pub(crate) mod events;
pub(crate) mod notifications;
pub(crate) mod secrets;
pub(crate) mod submitted_files;
