//! How a worker is configured.

use std::ffi::OsString;
use std::path::PathBuf;

use store::Capacity;

pub struct WorkerOptions {
    pub name: String,
    pub slots: u32,
    pub total: Capacity,
    /// The memory that a request gets, and counts for, if it asks for none.
    pub memory_default_bytes: u64,
    pub lease_ms: u64,
    /// How long an analysis waits for a worker that is large enough while smaller workers are running. Then it is
    /// parked.
    pub park_after_ms: u64,
    /// Nothing is claimed while the artifact store has less free space than this, or holds more than its quota.
    pub free_reserve_bytes: u64,
    pub store_quota_bytes: Option<u64>,
    /// The `fumehood` binary and its arguments, which start a runner.
    pub program: PathBuf,
    pub args: Vec<OsString>,
}
