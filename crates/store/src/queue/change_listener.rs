//! Being told that something was queued, cancelled or ended, without asking over and over.
//!
//! A thread listens and writes to an event descriptor that its owner polls. On PostgreSQL it has a connection of its own,
//! where notifications arrive when a transaction is through. SQLite tells nobody, but every transaction is a write to the
//! log beside the file, and the kernel tells of those. The log is deleted and made again as connections come and go, so
//! what is watched is the directory.

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
use crate::database::location::{Location, Server};
use crate::database::open;

/// What is listened to.
const CHANNELS: [&str; 2] = ["fumehood_queue", "fumehood_commit"];
/// Between attempts to reach the server again; each is twice the one before.
const PAUSE_MS: u64 = 250;
const PAUSE_MS_MAX: u64 = 30_000;
/// A transaction is many writes, and rings once: a moment after the first of them. While there is much going on, more of them
/// are taken together, so that who listens gets to do something else.
const GATHER: Duration = Duration::from_millis(1);
const GATHER_WHEN_BUSY: Duration = Duration::from_millis(5);
/// The log is written before what it says can be read: once more when that must be over. Then, on a slow disk, again.
const AGAIN_MS: [i64; 2] = [50, 500];
/// Room for many events at a time; one has at most a name of 255 bytes.
const EVENTS_BYTES: usize = 16 << 10;

/// Rings when the database may have news. Rings too often rather than too rarely; whoever listens looks for itself, and
/// looks from time to time even if it never rings. On PostgreSQL it rings once whenever the connection is there again,
/// because what was said meanwhile is lost; so also at the beginning.
pub struct Bell {
    rung: Arc<OwnedFd>,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

/// How the thread is ended.
enum Stop {
    /// Readable: end.
    Descriptor(Arc<OwnedFd>),
    Task(AbortHandle),
}

impl Bell {
    pub fn hang(location: &Location) -> Result<Bell, StoreError> {
        match location {
            Location::None => Err(StoreError::NoDatabase),
            Location::Sqlite(path) => watch(path),
            Location::Postgres(server) => listen(server),
        }
    }

    /// Takes all rings so far.
    pub fn silence(&mut self) {
        // It does not block; when nothing rang there is nothing to take.
        let mut count = [0; 8];
        let _ = rustix::io::read(&*self.rung, &mut count);
    }
}

/// Readable: it rang.
impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.rung.as_fd()
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        match &self.stop {
            Stop::Descriptor(stop) => ring(stop),
            Stop::Task(task) => task.abort(),
        }
        if let Some(thread) = self.thread.take() {
            // It cannot have panicked with anything of ours.
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

/// Fails only when it rang so often that it is readable anyway.
fn ring(rung: &OwnedFd) {
    let _ = rustix::io::write(rung, &1_u64.to_ne_bytes());
}

fn named(thread: &str) -> std::thread::Builder {
    std::thread::Builder::new().name(thread.to_owned())
}

fn watch(path: &Path) -> Result<Bell, StoreError> {
    let failed = |what, source: std::io::Error| StoreError::File {
        what,
        path: path.to_owned(),
        source,
    };
    let path = std::path::absolute(path).map_err(|e| failed("find", e))?;
    let name = path.file_name().unwrap_or(OsStr::new("")).to_owned();
    let parent = path.parent().unwrap_or(Path::new("/"));
    let watched = rustix::fs::inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
        .map_err(|e| failed("watch the database", e.into()))?;
    // Whoever closes the log has committed.
    let flags =
        WatchFlags::MODIFY | WatchFlags::CLOSE_WRITE | WatchFlags::CREATE | WatchFlags::MOVED_TO;
    rustix::fs::inotify::add_watch(&watched, parent, flags | WatchFlags::ONLYDIR)
        .map_err(|e| failed("watch the directory of the database", e.into()))?;
    let mut log = name.clone();
    log.push("-wal");
    let (rung, stop) = (event_descriptor()?, event_descriptor()?);
    let watcher = Watcher {
        watched,
        names: [name, log],
        rung: rung.clone(),
        stop: stop.clone(),
    };
    let thread = named("bell").spawn(move || watcher.run());
    Ok(Bell {
        rung,
        stop: Stop::Descriptor(stop),
        thread: Some(thread.map_err(StoreError::Runtime)?),
    })
}

struct Watcher {
    watched: OwnedFd,
    /// The database and its log.
    names: [OsString; 2],
    rung: Arc<OwnedFd>,
    stop: Arc<OwnedFd>,
}

impl Watcher {
    /// Until it is told to stop. When the watch itself fails it ends: then only the looks from time to time are left.
    fn run(self) {
        let mut room = [std::mem::MaybeUninit::uninit(); EVENTS_BYTES];
        // How often it is still to ring without being told.
        let mut again = AGAIN_MS.iter();
        let mut rang_at: Option<Instant> = None;
        loop {
            let mut fds = [
                PollFd::new(&self.watched, PollFlags::IN),
                PollFd::new(&*self.stop, PollFlags::IN),
            ];
            let wait = again.clone().next().map(|ms| Timespec {
                tv_sec: 0,
                tv_nsec: ms * 1_000_000,
            });
            match rustix::event::poll(&mut fds, wait.as_ref()) {
                Ok(0) => {
                    again.next();
                    ring(&self.rung);
                    continue;
                }
                Ok(_) | Err(Errno::INTR) => (),
                Err(_) => return ring(&self.rung),
            }
            if !fds[1].revents().is_empty() {
                return;
            }
            let is_busy = rang_at.is_some_and(|at| at.elapsed() < 4 * GATHER_WHEN_BUSY);
            std::thread::sleep(if is_busy { GATHER_WHEN_BUSY } else { GATHER });
            match self.hear(&mut room) {
                Some(true) => (again, rang_at) = (AGAIN_MS.iter(), Some(Instant::now())),
                Some(false) => {}
                None => return ring(&self.rung),
            }
        }
    }

    /// Whether it was about the database; `None`: the watch is broken.
    fn hear(&self, room: &mut [std::mem::MaybeUninit<u8>]) -> Option<bool> {
        let mut reader = Reader::new(&self.watched, room);
        let mut is_ours = false;
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event
                        .file_name()
                        .map(|name| OsStr::from_bytes(name.to_bytes()));
                    // Events without a name are about the directory, such as that some were lost.
                    is_ours |= name.is_none_or(|name| self.names.iter().any(|ours| ours == name));
                }
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(_) => return None,
            }
        }
        if is_ours {
            ring(&self.rung);
        }
        Some(is_ours)
    }
}

fn listen(server: &Server) -> Result<Bell, StoreError> {
    let rung = event_descriptor()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(StoreError::Runtime)?;
    let (tell, told) = mpsc::sync_channel(1);
    let (server, ringer) = (server.clone(), rung.clone());
    let thread = named("bell").spawn(move || run_listener(&runtime, server, ringer, &tell));
    let thread = thread.map_err(StoreError::Runtime)?;
    let task = told
        .recv()
        .map_err(|e| StoreError::Runtime(std::io::Error::other(e)))?;
    Ok(Bell {
        rung,
        stop: Stop::Task(task),
        thread: Some(thread),
    })
}

fn run_listener(
    runtime: &Runtime,
    server: Server,
    rung: Arc<OwnedFd>,
    tell: &mpsc::SyncSender<AbortHandle>,
) {
    let task = runtime.spawn(async move {
        let mut pause_ms = PAUSE_MS;
        loop {
            if hear_until_lost(&server, &rung).await == Heard::Something {
                pause_ms = PAUSE_MS;
            }
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            pause_ms = (pause_ms * 2).min(PAUSE_MS_MAX);
        }
    });
    let _ = tell.send(task.abort_handle());
    // Ended by the one who hung the bell.
    let _ = runtime.block_on(task);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    /// The server was there.
    Something,
    Nothing,
}

/// Returns when the connection is lost, or was never made.
async fn hear_until_lost(server: &Server, rung: &OwnedFd) -> Heard {
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .max_lifetime(None)
        .idle_timeout(None)
        .acquire_timeout(Duration::from_millis(server.connect_limit_ms))
        .connect_lazy_with(open::postgres_options(server));
    let Ok(mut listener) = PgListener::connect_with(&pool).await else {
        return Heard::Nothing;
    };
    listener.eager_reconnect(false);
    if listener.listen_all(CHANNELS).await.is_err() {
        return Heard::Nothing;
    }
    ring(rung);
    while let Ok(Some(_)) = listener.try_recv().await {
        ring(rung);
    }
    Heard::Something
}
