//! Wakes up whoever waits for changes of the queue or for commits, without polling the database.
//!
//! A thread listens for changes and signals an event descriptor, which the owner polls. On PostgreSQL the thread has
//! a connection of its own, on which notifications arrive after each commit. SQLite has no notifications, but every
//! transaction writes to the log beside the file, and the kernel reports such writes through inotify. The thread
//! watches the directory, because SQLite deletes and recreates the log as connections come and go.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::inotify::{CreateFlags, Reader, WatchFlags};
use rustix::io::Errno;
use sqlx::postgres::{PgListener, PgPoolOptions};
use tokio::runtime::Runtime;
use tokio::task::AbortHandle;

use crate::database::error::StoreError;
use crate::database::location::{Location, PostgresAddress};
use crate::database::postgres;

/// The PostgreSQL channels to listen on.
const CHANNELS: [&str; 2] = ["fumehood_queue", "fumehood_commit"];
/// The first pause before reconnecting to the server. Each pause is twice the one before.
const RECONNECT_PAUSE_MS: u64 = 250;
const RECONNECT_PAUSE_MS_MAX: u64 = 30_000;
/// A transaction consists of many writes. The thread waits this long after the first write, so that a transaction
/// causes one signal. Under load it waits longer and signals for several transactions at once, so that the owner gets
/// to do other work.
const COALESCE: Duration = Duration::from_millis(1);
const COALESCE_WHEN_BUSY: Duration = Duration::from_millis(5);
/// A write to the log comes before its transaction is visible to readers. Signal again after the first pause, when
/// the transaction should be visible, and once more for slow disks.
const REPEAT_SIGNAL_MS: [i64; 2] = [50, 500];
/// Room for many inotify events. An event carries a name of at most 255 bytes.
const EVENTS_BYTES: usize = 16 << 10;

/// Signals that the database may have changed. There may be more signals than changes, so the owner must check for
/// itself. Signals may also be missing (for example if the watch fails), so the owner must also check from time to
/// time. On PostgreSQL the listener signals after every connect, the first included, because notifications sent
/// meanwhile are lost.
pub struct ChangeListener {
    signal_fd: Arc<OwnedFd>,
    stop: StopHandle,
    thread: Option<JoinHandle<()>>,
}

/// How to end the thread.
enum StopHandle {
    /// The thread ends when this descriptor is readable.
    Descriptor(Arc<OwnedFd>),
    Task(AbortHandle),
}

impl ChangeListener {
    /// Starts a thread that listens to the database at this address. There is no such thing for [`Location::None`].
    pub fn subscribe(location: &Location) -> Result<ChangeListener, StoreError> {
        match location {
            Location::None => Err(StoreError::NoDatabase),
            Location::Sqlite(path) => watch(path),
            Location::Postgres(server) => listen(server),
        }
    }

    /// Consumes all signals so far.
    pub fn consume(&mut self) {
        // The descriptor does not block. An error means that there was no signal.
        let mut count = [0; 8];
        let _ = rustix::io::read(&*self.signal_fd, &mut count);
    }
}

/// The descriptor is readable after a signal.
impl AsFd for ChangeListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signal_fd.as_fd()
    }
}

impl Drop for ChangeListener {
    fn drop(&mut self) {
        match &self.stop {
            StopHandle::Descriptor(stop) => signal(stop),
            StopHandle::Task(task) => task.abort(),
        }
        if let Some(thread) = self.thread.take() {
            // The thread owns nothing of the caller, so a panic in it needs no handling.
            let _ = thread.join();
        }
    }
}

fn event_descriptor() -> Result<Arc<OwnedFd>, StoreError> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let made = rustix::event::eventfd(0, flags);
    made.map(Arc::new)
        .map_err(|e| StoreError::Runtime(e.into()))
}

/// Fails only if the counter is full, and then the descriptor is readable anyway.
fn signal(signal_fd: &OwnedFd) {
    let _ = rustix::io::write(signal_fd, &1_u64.to_ne_bytes());
}

fn thread_named(thread: &str) -> std::thread::Builder {
    std::thread::Builder::new().name(thread.to_owned())
}

fn watch(path: &Path) -> Result<ChangeListener, StoreError> {
    let failed = |what, source: std::io::Error| StoreError::File {
        what,
        path: path.to_owned(),
        source,
    };
    let path = std::path::absolute(path).map_err(|e| failed("find", e))?;
    let name = path.file_name().unwrap_or(OsStr::new("")).to_owned();
    let parent = path.parent().unwrap_or(Path::new("/"));
    let inotify = rustix::fs::inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
        .map_err(|e| failed("watch the database", e.into()))?;
    // A process that closes the log has committed.
    let flags =
        WatchFlags::MODIFY | WatchFlags::CLOSE_WRITE | WatchFlags::CREATE | WatchFlags::MOVED_TO;
    rustix::fs::inotify::add_watch(&inotify, parent, flags | WatchFlags::ONLYDIR)
        .map_err(|e| failed("watch the directory of the database", e.into()))?;
    let mut log = name.clone();
    log.push("-wal");
    let (signal_fd, stop) = (event_descriptor()?, event_descriptor()?);
    let watcher = Watcher {
        inotify,
        names: [name, log],
        signal_fd: signal_fd.clone(),
        stop: stop.clone(),
    };
    let thread = thread_named("change-listener").spawn(move || watcher.run());
    Ok(ChangeListener {
        signal_fd,
        stop: StopHandle::Descriptor(stop),
        thread: Some(thread.map_err(StoreError::Runtime)?),
    })
}

struct Watcher {
    inotify: OwnedFd,
    /// The names of the database and its log.
    names: [OsString; 2],
    signal_fd: Arc<OwnedFd>,
    stop: Arc<OwnedFd>,
}

impl Watcher {
    /// Runs until the stop descriptor is readable. If the watch fails, the thread ends; the owner then relies on its
    /// periodic checks.
    fn run(self) {
        let mut buffer = [std::mem::MaybeUninit::uninit(); EVENTS_BYTES];
        // The repeated signals that are still due.
        let mut repeats = REPEAT_SIGNAL_MS.iter();
        let mut signalled_at: Option<Instant> = None;
        loop {
            let mut fds = [
                PollFd::new(&self.inotify, PollFlags::IN),
                PollFd::new(&*self.stop, PollFlags::IN),
            ];
            let wait = repeats.clone().next().map(|ms| Timespec {
                tv_sec: 0,
                tv_nsec: ms * 1_000_000,
            });
            match rustix::event::poll(&mut fds, wait.as_ref()) {
                Ok(0) => {
                    repeats.next();
                    signal(&self.signal_fd);
                    continue;
                }
                Ok(_) | Err(Errno::INTR) => (),
                Err(_) => return signal(&self.signal_fd),
            }
            if !fds[1].revents().is_empty() {
                return;
            }
            let is_busy = signalled_at.is_some_and(|at| at.elapsed() < 4 * COALESCE_WHEN_BUSY);
            std::thread::sleep(if is_busy {
                COALESCE_WHEN_BUSY
            } else {
                COALESCE
            });
            match self.read_events(&mut buffer) {
                Some(true) => {
                    (repeats, signalled_at) = (REPEAT_SIGNAL_MS.iter(), Some(Instant::now()))
                }
                Some(false) => {}
                None => return signal(&self.signal_fd),
            }
        }
    }

    /// Reads all pending events and signals if one concerns the database. Returns whether one did; `None` if the
    /// watch failed.
    fn read_events(&self, buffer: &mut [std::mem::MaybeUninit<u8>]) -> Option<bool> {
        let mut reader = Reader::new(&self.inotify, buffer);
        let mut is_ours = false;
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event
                        .file_name()
                        .map(|name| OsStr::from_bytes(name.to_bytes()));
                    // An event without a name concerns the directory itself, such as a queue overflow, which means
                    // lost events.
                    is_ours |= name.is_none_or(|name| self.names.iter().any(|ours| ours == name));
                }
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(_) => return None,
            }
        }
        if is_ours {
            signal(&self.signal_fd);
        }
        Some(is_ours)
    }
}

fn listen(server: &PostgresAddress) -> Result<ChangeListener, StoreError> {
    let signal_fd = event_descriptor()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(StoreError::Runtime)?;
    let (send_handle, receive_handle) = mpsc::sync_channel(1);
    let (server, thread_signal_fd) = (server.clone(), signal_fd.clone());
    let thread = thread_named("change-listener")
        .spawn(move || run_listener(&runtime, server, thread_signal_fd, &send_handle));
    let thread = thread.map_err(StoreError::Runtime)?;
    let task = receive_handle
        .recv()
        .map_err(|e| StoreError::Runtime(std::io::Error::other(e)))?;
    Ok(ChangeListener {
        signal_fd,
        stop: StopHandle::Task(task),
        thread: Some(thread),
    })
}

fn run_listener(
    runtime: &Runtime,
    server: PostgresAddress,
    signal_fd: Arc<OwnedFd>,
    send_handle: &mpsc::SyncSender<AbortHandle>,
) {
    let task = runtime.spawn(async move {
        let mut pause_ms = RECONNECT_PAUSE_MS;
        loop {
            if listen_until_disconnected(&server, &signal_fd).await == ListenResult::Connected {
                pause_ms = RECONNECT_PAUSE_MS;
            }
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            pause_ms = (pause_ms * 2).min(RECONNECT_PAUSE_MS_MAX);
        }
    });
    let _ = send_handle.send(task.abort_handle());
    // Dropping the listener aborts the task.
    let _ = runtime.block_on(task);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ListenResult {
    /// The connection was established.
    Connected,
    NotConnected,
}

/// Listens until the connection is lost, or returns at once if it cannot be made.
async fn listen_until_disconnected(server: &PostgresAddress, signal_fd: &OwnedFd) -> ListenResult {
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .max_lifetime(None)
        .idle_timeout(None)
        .acquire_timeout(Duration::from_millis(server.connect_limit_ms))
        .connect_lazy_with(postgres::connect_options(server));
    let Ok(mut listener) = PgListener::connect_with(&pool).await else {
        return ListenResult::NotConnected;
    };
    listener.eager_reconnect(false);
    if listener.listen_all(CHANNELS).await.is_err() {
        return ListenResult::NotConnected;
    }
    signal(signal_fd);
    while let Ok(Some(_)) = listener.try_recv().await {
        signal(signal_fd);
    }
    ListenResult::Connected
}
