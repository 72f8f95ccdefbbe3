//! A worker's slots. Each is a directory with an order in it: which attempt is to be run.
//!
//! The runner's standard input is the order, opened and locked by the worker, so the lock lives from the runner's birth to
//! its death, whatever becomes of the worker. Whoever gets the lock knows that the runner is dead, and reads in the
//! order what it was doing. A worker that is started anew finds its slots as they are.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};

use crate::home::{Home, make_private};
use crate::request::AnalysisId;
use store::{Capacity, LeasedAttempt};

pub const ORDER_VERSION: u32 = 1;
const ORDER_BYTES_MAX: u64 = 16 << 20;
const ORDER: &str = "order";
/// What an order ends with. JSON on one line has none, and behind it there may be the rest of a longer one.
const END: u8 = b'\n';
const PID: &str = "pid";
/// In the place of a runner's number, as long as any: there is no runner.
const NOBODY: &[u8] = b"          ";
const STAGED: &str = "inputs";

/// What a runner is to do. Not for printing: it has the attempt's key, and the request may hold secrets.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    pub version: u32,
    pub id: AnalysisId,
    pub attempt: u32,
    pub key: String,
    /// Which database has it; of a worker before this one it may be unknown.
    #[serde(default)]
    pub database_id: String,
    /// JSON of [`store::types::submission::Submission`].
    pub request: String,
    pub submitter: String,
    pub lease_ms: u64,
    /// What it counts for in the worker's sums.
    pub memory_bytes: u64,
    pub cpu_milli: u64,
    /// All CPUs that the worker has: what a request may use that asks for none.
    pub cpu_milli_max: u64,
    /// The slot's own directory.
    pub slot: PathBuf,
    /// The file that the worker keeps locked while it lives.
    pub worker: PathBuf,
}

impl Order {
    pub fn counted(&self) -> Capacity {
        Capacity {
            memory_bytes: self.memory_bytes,
            cpu_milli: self.cpu_milli,
        }
    }

    pub fn held(&self) -> LeasedAttempt<'_> {
        LeasedAttempt {
            id: self.id.as_str(),
            attempt: self.attempt,
            key: &self.key,
        }
    }

    /// Where the runner lays out the inputs before they are copied into the workspace.
    pub fn staged(&self) -> PathBuf {
        self.slot.join(STAGED)
    }
}

/// A slot whose runner is dead, or which has none: its order is locked by us.
#[derive(Debug)]
pub struct Slot {
    path: PathBuf,
    order: File,
}

impl Slot {
    /// `None`: a runner lives in it.
    pub fn lock(path: &Path) -> io::Result<Option<Slot>> {
        make_private(path).map_err(io::Error::other)?;
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

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What its runner was doing. An order that was not written to its end was never handed to anybody.
    pub fn order(&mut self) -> io::Result<Option<Order>> {
        read(&mut self.order)
    }

    pub fn write(&mut self, order: &Order) -> io::Result<()> {
        self.clear()?;
        let mut text = serde_json::to_vec(order).map_err(io::Error::other)?;
        text.push(END);
        self.order.write_all(&text)?;
        // The runner reads from the same place.
        self.order.rewind()
    }

    /// Nothing is to be done here any more.
    pub fn clear(&mut self) -> io::Result<()> {
        match open_pid(&self.path, OFlags::empty()) {
            Ok(pid) => overwrite(&pid, NOBODY)?,
            Err(rustix::io::Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
        }
        wipe(self.order.as_fd())?;
        self.order.rewind()
    }

    pub fn staged(&self) -> PathBuf {
        self.path.join(STAGED)
    }

    /// What the runner gets as its standard input: the lock goes with it.
    pub fn order_for_runner(&self) -> io::Result<OwnedFd> {
        self.order.try_clone().map(OwnedFd::from)
    }
}

/// The order of a slot that may be somebody else's: only to be told what it says.
pub fn peek(path: &Path) -> Option<Order> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let order = rustix::fs::open(path.join(ORDER), flags, Mode::empty()).ok()?;
    read(&mut File::from(order)).ok()?
}

fn read(order: &mut File) -> io::Result<Option<Order>> {
    let mut text = Vec::with_capacity(4096);
    order.rewind()?;
    order.take(ORDER_BYTES_MAX).read_to_end(&mut text)?;
    let text = text.split(|byte| *byte == END).next().unwrap_or_default();
    let read: Option<Order> = serde_json::from_slice(text).ok();
    Ok(read.filter(|order| order.version == ORDER_VERSION))
}

/// The runner's side: its order, and the lock, which must be held until the end.
pub fn taken() -> io::Result<(Order, OwnedFd)> {
    let held = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // Whatever the runner starts must not keep the lock alive.
    rustix::stdio::dup2_stdin(&null)?;
    let mut file = File::from(held);
    let order = read(&mut file)?;
    let order = order.ok_or_else(|| io::Error::other("standard input is no order of a worker"))?;
    let pid = format!("{:<width$}", std::process::id(), width = NOBODY.len());
    overwrite(&open_pid(&order.slot, OFlags::CREATE)?, pid.as_bytes())?;
    Ok((order, file.into()))
}

/// The runner's side: nothing is left to be done about it.
pub fn done(held: &OwnedFd) -> io::Result<()> {
    wipe(held.as_fd())
}

/// Makes an order be none. It may hold secrets: what was written is written over, and takes no room if that was much. Of a
/// short one the room is kept for the next, since to cut a file and fill it again makes some file systems write at once.
fn wipe(order: BorrowedFd<'_>) -> io::Result<()> {
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

/// Clears what dead workers left in their slots for attempts that are over: the order and the inputs that were laid out, both of
/// which may hold secrets. A worker of the same name would do so when it starts, and there may never be one.
pub fn clear_over(home: &Home, is_over: impl Fn(&Order) -> bool) -> io::Result<()> {
    for worker in entries(&home.workers())? {
        // One that lives looks after its slots itself.
        if is_held(&worker.join("lock")) {
            continue;
        }
        for path in entries(&worker.join("slots"))? {
            if !peek(&path).is_some_and(|order| is_over(&order)) {
                continue;
            }
            let Some(mut slot) = Slot::lock(&path)? else {
                continue;
            };
            // Another may have been written before the lock was ours.
            if slot.order()?.is_some_and(|order| is_over(&order)) {
                match std::fs::remove_dir_all(slot.staged()) {
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

/// Whether somebody holds this file locked.
pub fn is_held(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::open(path, flags, Mode::empty()) else {
        return false;
    };
    // Shared, so that two who ask do not see each other.
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err()
}

/// Asks the slot's runner to end its analysis. False: there is none to be asked.
pub fn signal(path: &Path) -> bool {
    let pid = std::fs::read_to_string(path.join(PID)).ok();
    let pid = pid.and_then(|text| Pid::from_raw(text.trim().parse().ok()?));
    let Some(Ok(process)) = pid.map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()))
    else {
        return false;
    };
    // The descriptor was had before: if the lock is held now, the number was the runner's own then.
    is_held(&path.join(ORDER))
        && rustix::process::pidfd_send_signal(process.as_fd(), Signal::TERM).is_ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn order(slot: &Path, request: String) -> Order {
        Order {
            version: ORDER_VERSION,
            id: AnalysisId::new("mine").unwrap(),
            attempt: 1,
            key: "k".into(),
            database_id: "d".into(),
            request,
            submitter: "ada".into(),
            lease_ms: 1,
            memory_bytes: 1,
            cpu_milli: 1,
            cpu_milli_max: 1,
            slot: slot.to_path_buf(),
            worker: slot.join("lock"),
        }
    }

    /// Of one that is done nothing is left to be read, and the next is read whole, whatever its length.
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
            assert!(peek(&path).is_some_and(|read| read == written));
            if length != 5000 {
                done(&slot.order_for_runner().unwrap()).unwrap();
                assert!(slot.order().unwrap().is_none() && peek(&path).is_none());
                let left = std::fs::read_to_string(path.join(ORDER)).unwrap();
                assert!(!left.contains("secret"));
            }
        }
    }

    /// A number that stood there before is nobody's.
    #[test]
    fn nobody_is_signalled_by_a_number_that_is_no_longer_the_runners() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("slot");
        let mut slot = Slot::lock(&path).unwrap().unwrap();
        let mut sleeper = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = format!("{:<width$}", sleeper.id(), width = NOBODY.len());
        overwrite(open_pid(&path, OFlags::CREATE).unwrap(), pid.as_bytes()).unwrap();
        slot.clear().unwrap();
        assert!(!signal(&path), "the slot is locked, and has no runner");
        assert!(sleeper.try_wait().unwrap().is_none());
        overwrite(open_pid(&path, OFlags::CREATE).unwrap(), pid.as_bytes()).unwrap();
        assert!(signal(&path), "the control");
        sleeper.wait().unwrap();
    }
}
