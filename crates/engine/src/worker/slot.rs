//! A worker's slots. Each is a directory that contains an order: what its runner is to run.
//!
//! The worker opens and locks the order, and the runner gets it as its standard input. So the lock lasts from the start
//! of the runner to its end, whatever happens to the worker. A process that gets the lock knows that the runner is
//! dead, and reads in the order what it was doing. A worker that is restarted finds its slots as they are.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};

use crate::attempt::context::Claim;
use crate::home::{Home, create_private_dir};
use store::Capacity;

pub(crate) const ORDER_VERSION: u32 = 1;
const ORDER_BYTES_MAX: u64 = 16 << 20;
const ORDER: &str = "order";
/// Ends an order. JSON on one line does not contain it. The rest of a longer, earlier order may follow it.
const END: u8 = b'\n';
const PID: &str = "pid";
/// Stands in the pid file if there is no runner. It is as long as any pid.
const NO_PID: &[u8] = b"          ";
const INPUTS: &str = "inputs";

/// What a runner is to do. It has no `Debug`: it contains the key of the attempt, and the request may contain secrets.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunnerOrder {
    /// The format of the order: [`ORDER_VERSION`].
    pub(crate) version: u32,
    /// The attempt, and the lease on it.
    #[serde(flatten)]
    pub claim: Claim,
    /// JSON of [`store::types::submission::Submission`].
    pub(crate) request: String,
    /// Who submitted the analysis.
    pub(crate) submitter: String,
    /// What the attempt counts for in the worker's sums.
    pub(crate) memory_bytes: u64,
    /// The same for CPUs, in thousandths of one.
    pub(crate) cpu_milli: u64,
    /// All CPUs that the worker has. A request that asks for no number may use them.
    pub(crate) cpu_milli_max: u64,
    /// The directory of the slot.
    pub(crate) slot: PathBuf,
    /// The file that the worker keeps locked while it lives.
    pub(crate) worker: PathBuf,
}

impl RunnerOrder {
    pub(crate) fn reserved_capacity(&self) -> Capacity {
        Capacity {
            memory_bytes: self.memory_bytes,
            cpu_milli: self.cpu_milli,
        }
    }

    /// Where the runner puts the submitted inputs before they are copied into the workspace.
    pub(crate) fn inputs_dir(&self) -> PathBuf {
        self.slot.join(INPUTS)
    }
}

/// A slot without a live runner. This process holds the lock on its order.
#[derive(Debug)]
pub(crate) struct Slot {
    path: PathBuf,
    order: File,
}

impl Slot {
    /// Locks a slot. `None`: a live runner has it.
    pub(crate) fn lock(path: &Path) -> io::Result<Option<Slot>> {
        create_private_dir(path).map_err(io::Error::other)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let order = rustix::fs::open(path.join(ORDER), flags, Mode::RUSR | Mode::WUSR)?;
        match rustix::fs::flock(&order, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Slot {
                path: path.to_path_buf(),
                order: File::from(order),
            })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The order of the last runner. An order that was not written completely was never given to a runner.
    pub(crate) fn order(&mut self) -> io::Result<Option<RunnerOrder>> {
        parse_order(&mut self.order)
    }

    pub(crate) fn write(&mut self, order: &RunnerOrder) -> io::Result<()> {
        self.clear()?;
        let mut text = serde_json::to_vec(order).map_err(io::Error::other)?;
        text.push(END);
        self.order.write_all(&text)?;
        // The runner shares the file offset.
        self.order.rewind()
    }

    /// Removes the order: nothing is left to do in this slot.
    pub(crate) fn clear(&mut self) -> io::Result<()> {
        match open_pid(&self.path, OFlags::empty()) {
            Ok(pid) => overwrite(&pid, NO_PID)?,
            Err(rustix::io::Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
        }
        overwrite_order(self.order.as_fd())?;
        self.order.rewind()
    }

    pub(crate) fn inputs_dir(&self) -> PathBuf {
        self.path.join(INPUTS)
    }

    /// The standard input for the runner. The lock goes with it.
    pub(crate) fn order_for_runner(&self) -> io::Result<OwnedFd> {
        self.order.try_clone().map(OwnedFd::from)
    }
}

/// Reads the order of a slot without its lock.
pub(crate) fn read_order(path: &Path) -> Option<RunnerOrder> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let order = rustix::fs::open(path.join(ORDER), flags, Mode::empty()).ok()?;
    parse_order(&mut File::from(order)).ok()?
}

fn parse_order(order: &mut File) -> io::Result<Option<RunnerOrder>> {
    let mut text = Vec::with_capacity(4096);
    order.rewind()?;
    order.take(ORDER_BYTES_MAX).read_to_end(&mut text)?;
    let text = text.split(|byte| *byte == END).next().unwrap_or_default();
    let read: Option<RunnerOrder> = serde_json::from_slice(text).ok();
    Ok(read.filter(|order| order.version == ORDER_VERSION))
}

/// For the runner: reads the order from standard input. The runner must keep the returned descriptor, which holds the
/// lock, until its end.
pub(crate) fn receive_order() -> io::Result<(RunnerOrder, OwnedFd)> {
    let held = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // Processes that the runner starts must not keep the lock.
    rustix::stdio::dup2_stdin(&null)?;
    let mut file = File::from(held);
    let order = parse_order(&mut file)?;
    let order = order.ok_or_else(|| io::Error::other("standard input is no order of a worker"))?;
    let pid = format!("{:<width$}", std::process::id(), width = NO_PID.len());
    overwrite(&open_pid(&order.slot, OFlags::CREATE)?, pid.as_bytes())?;
    Ok((order, file.into()))
}

/// For the runner: nothing is left to do for this order.
pub(crate) fn clear_order(held: &OwnedFd) -> io::Result<()> {
    overwrite_order(held.as_fd())
}

/// Makes the file contain no order. An order may contain secrets, so its bytes are overwritten, and a long file is
/// truncated. A short file keeps its length for the next order, because truncating and refilling a file makes some file
/// systems write at once.
fn overwrite_order(order: BorrowedFd<'_>) -> io::Result<()> {
    const KEPT_BYTES: usize = 64 << 10;
    let length = usize::try_from(rustix::fs::fstat(order)?.st_size).unwrap_or(usize::MAX);
    match length <= KEPT_BYTES {
        true => overwrite(order, &vec![END; length]),
        false => Ok(rustix::fs::ftruncate(order, 0)?),
    }
}

fn open_pid(slot: &Path, more: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | more;
    rustix::fs::open(slot.join(PID), flags, Mode::RUSR | Mode::WUSR)
}

fn overwrite(file: impl AsFd, bytes: &[u8]) -> io::Result<()> {
    match rustix::io::pwrite(file, bytes, 0)? == bytes.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Clears what dead workers left in their slots for attempts that are over: the order and the inputs, which may contain
/// secrets. A worker of the same name would do that when it starts, but it may never be started again.
pub fn clear_finished_orders(
    home: &Home,
    is_over: impl Fn(&RunnerOrder) -> bool,
) -> io::Result<()> {
    for worker in entries(&home.workers())? {
        // A live worker takes care of its own slots.
        if is_locked(&worker.join("lock")) {
            continue;
        }
        for path in entries(&worker.join("slots"))? {
            if !read_order(&path).is_some_and(|order| is_over(&order)) {
                continue;
            }
            let Some(mut slot) = Slot::lock(&path)? else {
                continue;
            };
            // Another order may have been written before this process got the lock.
            if slot.order()?.is_some_and(|order| is_over(&order)) {
                match std::fs::remove_dir_all(slot.inputs_dir()) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                    _ => slot.clear()?,
                }
            }
        }
    }
    Ok(())
}

fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    match std::fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read?.map(|entry| Ok(entry?.path())).collect(),
    }
}

/// Whether some process holds a lock on this file.
pub(crate) fn is_locked(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::open(path, flags, Mode::empty()) else {
        return false;
    };
    // Try a shared lock, so that two processes that test at the same time do not see each other.
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err()
}

/// Asks the slot's runner to end its analysis. False: there is no runner.
pub(crate) fn signal_runner(path: &Path) -> bool {
    let pid = std::fs::read_to_string(path.join(PID)).ok();
    let pid = pid.and_then(|text| Pid::from_raw(text.trim().parse().ok()?));
    let Some(Ok(process)) = pid.map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()))
    else {
        return false;
    };
    // The pidfd was opened before this test. So if the lock is held now, the pid was the runner's when the pidfd was
    // opened.
    is_locked(&path.join(ORDER))
        && rustix::process::pidfd_send_signal(process.as_fd(), Signal::TERM).is_ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use store::types::analysis_id::AnalysisId;

    fn order(slot: &Path, request: String) -> RunnerOrder {
        RunnerOrder {
            version: ORDER_VERSION,
            claim: Claim {
                id: AnalysisId::new("mine").unwrap(),
                attempt: 1,
                key: "k".into(),
                database_id: "d".into(),
                lease_ms: 1,
            },
            request,
            submitter: "ada".into(),
            memory_bytes: 1,
            cpu_milli: 1,
            cpu_milli_max: 1,
            slot: slot.to_path_buf(),
            worker: slot.join("lock"),
        }
    }

    /// After an order is cleared nothing of it can be read, and the next order is read whole, whatever its length.
    #[test]
    fn an_order_is_written_over_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("slot");
        let mut slot = Slot::lock(&path).unwrap().unwrap();
        assert!(slot.order().unwrap().is_none());
        for length in [10, 5000, 3, 200_000, 7] {
            let written = order(&path, "secret\n".repeat(length));
            slot.write(&written).unwrap();
            assert!(slot.order().unwrap().is_some_and(|read| read == written));
            assert!(read_order(&path).is_some_and(|read| read == written));
            if length != 5000 {
                clear_order(&slot.order_for_runner().unwrap()).unwrap();
                assert!(slot.order().unwrap().is_none() && read_order(&path).is_none());
                let left = std::fs::read_to_string(path.join(ORDER)).unwrap();
                assert!(!left.contains("secret"));
            }
        }
    }

    /// A worker of another version reads these names.
    #[test]
    fn the_names_of_an_order_do_not_change() {
        let text = r#"{"version":1,"id":"mine","attempt":1,"key":"k","database_id":"d","request":"r","submitter":"ada",
            "lease_ms":1,"memory_bytes":1,"cpu_milli":1,"cpu_milli_max":1,"slot":"/s","worker":"/s/lock"}"#;
        let expected = order(Path::new("/s"), "r".into());
        let read: RunnerOrder = serde_json::from_str(text).unwrap();
        assert!(read == expected);
        let names = |value: serde_json::Value| -> Vec<String> {
            value.as_object().unwrap().keys().cloned().collect()
        };
        let written = serde_json::to_value(&expected).unwrap();
        assert_eq!(names(written), names(serde_json::from_str(text).unwrap()));
        // An older worker names no database.
        let older = text.replace("\"database_id\":\"d\",", "");
        let read: RunnerOrder = serde_json::from_str(&older).unwrap();
        assert_eq!(read.claim.database_id, "");
    }

    /// A pid from an earlier runner must not be signalled.
    #[test]
    fn a_stale_pid_is_not_signalled() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("slot");
        let mut slot = Slot::lock(&path).unwrap().unwrap();
        let mut sleeper = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = format!("{:<width$}", sleeper.id(), width = NO_PID.len());
        overwrite(open_pid(&path, OFlags::CREATE).unwrap(), pid.as_bytes()).unwrap();
        slot.clear().unwrap();
        assert!(
            !signal_runner(&path),
            "the slot is locked, and has no runner"
        );
        assert!(sleeper.try_wait().unwrap().is_none());
        overwrite(open_pid(&path, OFlags::CREATE).unwrap(), pid.as_bytes()).unwrap();
        assert!(signal_runner(&path), "the control");
        sleeper.wait().unwrap();
    }
}
