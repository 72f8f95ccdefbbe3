//! Memory and CPUs, as requests ask for them and workers offer them.

/// An amount of memory and CPU that a request asks for or a worker has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Capacity {
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// CPUs, in thousandths.
    pub cpu_milli: u64,
}

impl Capacity {
    /// Whether this much fits into `available`.
    pub(crate) fn fits_in(self, available: Capacity) -> bool {
        self.memory_bytes <= available.memory_bytes && self.cpu_milli <= available.cpu_milli
    }

    /// What remains after `used` is subtracted. Saturates at zero.
    pub(crate) fn minus(self, used: Capacity) -> Capacity {
        Capacity {
            memory_bytes: self.memory_bytes.saturating_sub(used.memory_bytes),
            cpu_milli: self.cpu_milli.saturating_sub(used.cpu_milli),
        }
    }
}
