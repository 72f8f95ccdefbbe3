//! Learns from the kernel which programs run, independently of the database.
//!
//! One inotify queue covers all machines of a trial, so the order of its events is the order of what happened. A workspace
//! appears and disappears with its name. Each analysis opens a gate file of its own: an open means that the program started, and
//! a close means that the last process which had the file is dead.

use testkit::wait::eventually;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init};
use rustix::fs::{CWD, FileType, Mode, mknodat};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutionEvent {
    /// A workspace appeared under its name.
    Made,
    Removed,
    /// A program opened its gate file.
    Began,
    /// The last process that had the gate file closed it.
    Ended,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedEvent {
    pub what: ExecutionEvent,
    pub id: String,
    /// The number of the workspace root.
    pub root: Option<usize>,
}

#[derive(Default)]
struct MonitorLog {
    seen: Vec<ObservedEvent>,
    marks: BTreeSet<String>,
    /// The owners of workspaces, which are the uids that analyses ran as.
    uids: BTreeSet<u32>,
    overflown: bool,
}

pub struct ExecutionMonitor {
    gates: PathBuf,
    notes: Arc<Mutex<MonitorLog>>,
    marks: AtomicU32,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

const PREFIX: &str = "scidex-analysis-";
/// The prefix of files that tell a program to go on. The monitor ignores opens of these.
const GO: &str = "go-";
const MARK: &str = "mark-";

impl ExecutionMonitor {
    pub fn of(gates: &Path, roots: &[PathBuf]) -> ExecutionMonitor {
        let watched = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        let flags = WatchFlags::MOVED_TO | WatchFlags::MOVED_FROM | WatchFlags::DELETE;
        let numbers: BTreeMap<i32, usize> = roots
            .iter()
            .enumerate()
            .map(|(number, root)| (add_watch(&watched, root, flags).unwrap(), number))
            .collect();
        let flags = WatchFlags::OPEN | WatchFlags::CLOSE_NOWRITE | WatchFlags::CREATE;
        add_watch(&watched, gates, flags).unwrap();
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let notes = Arc::new(Mutex::new(MonitorLog::default()));
        let watcher = Watcher {
            watched,
            roots: roots.to_vec(),
            numbers,
            stop: stop.clone(),
            notes: notes.clone(),
        };
        ExecutionMonitor {
            gates: gates.to_path_buf(),
            notes,
            marks: AtomicU32::new(0),
            stop,
            thread: Some(std::thread::spawn(move || watcher.watch())),
        }
    }

    /// Makes the gate file of an analysis, and the file whose content lets the analysis go on.
    pub fn expect(&self, id: &str) {
        for name in [id.to_owned(), format!("{GO}{id}")] {
            self.make(&name);
        }
    }

    /// Makes a file without opening it.
    fn make(&self, name: &str) {
        let mode = Mode::from_raw_mode(0o644);
        mknodat(CWD, self.gates.join(name), FileType::RegularFile, mode, 0).unwrap();
    }

    pub fn gate(&self, id: &str) -> PathBuf {
        self.gates.join(id)
    }

    pub fn go_file(&self, id: &str) -> PathBuf {
        self.gates.join(format!("{GO}{id}"))
    }

    pub fn let_go(&self, id: &str) {
        std::fs::write(self.go_file(id), "go\n").unwrap();
    }

    /// All events until now.
    pub fn seen(&self) -> Vec<ObservedEvent> {
        let mark = format!("{MARK}{}", self.marks.fetch_add(1, Ordering::Relaxed));
        self.make(&mark);
        eventually("the witness sees the mark", || {
            self.notes.lock().unwrap().marks.remove(&mark)
        });
        std::fs::remove_file(self.gates.join(mark)).unwrap();
        let notes = self.notes.lock().unwrap();
        assert!(
            !notes.overflown,
            "the kernel dropped what the witness was to see"
        );
        notes.seen.clone()
    }

    pub fn uids(&self) -> BTreeSet<u32> {
        self.notes.lock().unwrap().uids.clone()
    }

    /// The ids of the programs that run now.
    pub fn running(&self) -> BTreeSet<String> {
        let mut running = BTreeSet::new();
        for seen in self.seen() {
            match seen.what {
                ExecutionEvent::Began => drop(running.insert(seen.id)),
                ExecutionEvent::Ended => drop(running.remove(&seen.id)),
                _ => {}
            }
        }
        running
    }

    pub fn starts(&self, id: &str) -> usize {
        count(&self.seen(), id, ExecutionEvent::Began)
    }
}

pub fn count(seen: &[ObservedEvent], id: &str, what: ExecutionEvent) -> usize {
    seen.iter().filter(|s| s.id == id && s.what == what).count()
}

/// Asserts that no id ever has two workspaces or two programs at once, on any machine.
#[track_caller]
pub fn assert_never_doubled(seen: &[ObservedEvent]) {
    let mut workspaces: BTreeMap<&str, i32> = BTreeMap::new();
    let mut programs: BTreeMap<&str, i32> = BTreeMap::new();
    for ObservedEvent { what, id, .. } in seen {
        let (at, by) = match what {
            ExecutionEvent::Made => (&mut workspaces, 1),
            ExecutionEvent::Removed => (&mut workspaces, -1),
            ExecutionEvent::Began => (&mut programs, 1),
            ExecutionEvent::Ended => (&mut programs, -1),
        };
        let now = at.entry(id).or_default();
        *now += by;
        let of_it = || seen.iter().filter(|s| s.id == *id).collect::<Vec<_>>();
        assert!((0..=1).contains(now), "{id}: {what:?}: {:?}", of_it());
    }
}

/// The largest sum of the weights of programs that ran at one time.
pub fn most_at_once(seen: &[ObservedEvent], weight: impl Fn(&ObservedEvent) -> u64) -> u64 {
    let (mut now, mut most) = (0, 0);
    for seen in seen {
        match seen.what {
            ExecutionEvent::Began => now += weight(seen),
            ExecutionEvent::Ended => now -= weight(seen),
            _ => {}
        }
        most = most.max(now);
    }
    most
}

impl Drop for ExecutionMonitor {
    fn drop(&mut self) {
        let _told = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

struct Watcher {
    watched: OwnedFd,
    roots: Vec<PathBuf>,
    /// The number of the workspace root of each watch.
    numbers: BTreeMap<i32, usize>,
    stop: Arc<OwnedFd>,
    notes: Arc<Mutex<MonitorLog>>,
}

impl Watcher {
    fn watch(&self) {
        let mut buffer = [MaybeUninit::uninit(); 64 << 10];
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(self.watched.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN),
            ];
            let _interrupted = poll(&mut fds, None);
            if !fds[1].revents().is_empty() {
                return;
            }
            let mut reader = Reader::new(self.watched.as_fd(), &mut buffer);
            while let Ok(event) = reader.next() {
                self.note(event.wd(), event.events(), event.file_name());
            }
        }
    }

    fn note(&self, watch: i32, flags: ReadFlags, name: Option<&CStr>) {
        let mut notes = self.notes.lock().unwrap();
        notes.overflown |= flags.contains(ReadFlags::QUEUE_OVERFLOW);
        let name = name.unwrap_or_default().to_str().unwrap();
        let root = self.numbers.get(&watch).copied();
        let (id, what) = match root {
            Some(number) => {
                let Some(id) = name.strip_prefix(PREFIX) else {
                    return;
                };
                let made = flags.contains(ReadFlags::MOVED_TO);
                // The workspace may be gone already.
                if made && let Ok(meta) = std::fs::symlink_metadata(self.roots[number].join(name)) {
                    notes.uids.insert(meta.uid());
                }
                (
                    id,
                    if made {
                        ExecutionEvent::Made
                    } else {
                        ExecutionEvent::Removed
                    },
                )
            }
            None if name.starts_with(MARK) => {
                if flags.contains(ReadFlags::CREATE) {
                    notes.marks.insert(name.to_owned());
                }
                return;
            }
            None if name.is_empty() || name.starts_with(GO) => return,
            None if flags.contains(ReadFlags::OPEN) => (name, ExecutionEvent::Began),
            None if flags.contains(ReadFlags::CLOSE_NOWRITE) => (name, ExecutionEvent::Ended),
            None => return,
        };
        let id = id.to_owned();
        notes.seen.push(ObservedEvent { what, id, root });
    }
}
