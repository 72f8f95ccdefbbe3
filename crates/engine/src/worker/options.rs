//! How a worker is configured.

use std::ffi::OsString;
use std::path::PathBuf;

use store::Capacity;

/// What a worker is started with.
pub struct WorkerOptions {
    /// The worker's name, which no other live worker in the home has.
    pub name: String,
    /// The most analyses that run at the same time.
    pub slots: u32,
    /// The memory and CPUs for all running analyses together.
    pub total: Capacity,
    /// The memory that a request gets, and counts for, if it asks for none.
    pub memory_default_bytes: u64,
    /// How long a lease lasts after its last renewal, in milliseconds.
    pub lease_ms: u64,
    /// How long an analysis waits for a worker that is large enough while smaller workers are running. Then it is
    /// parked.
    pub park_after_ms: u64,
    /// Nothing is claimed while the artifact store has less free space than this, or holds more than its quota.
    pub free_reserve_bytes: u64,
    /// The size that the artifact store may reach. `None`: no bound.
    pub store_quota_bytes: Option<u64>,
    /// The `fumehood` binary, which is started as a runner.
    pub program: PathBuf,
    /// The arguments of that binary.
    pub args: Vec<OsString>,
}
