//! An outside witness of what runs: not the database's word, but the kernel's.
//!
//! One inotify queue, so that the order of its events is the order of what happened, over all machines of a trial.
//! Workspaces are seen as they get their name and lose it. Each analysis is shown a file of its own and keeps it open:
//! the file is opened when the program starts, and closed when the last process that had it is dead.

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

use crate::lab::eventually;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A workspace has got its name.
    Made,
    Removed,
    /// A program holds its file.
    Began,
    /// Nobody does any more.
    Ended,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub what: What,
    pub id: String,
    /// Which workspace root.
    pub root: Option<usize>,
}

#[derive(Default)]
struct Notes {
    seen: Vec<Seen>,
    marks: BTreeSet<String>,
    /// Owners of workspaces: the uids that analyses ran as.
    uids: BTreeSet<u32>,
    overflown: bool,
}

pub struct Witness {
    gates: PathBuf,
    notes: Arc<Mutex<Notes>>,
    marks: AtomicU32,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

const PREFIX: &str = "scidex-analysis-";
/// Files that tell a program to go on; that they are opened means nothing.
const GO: &str = "go-";
const MARK: &str = "mark-";

impl Witness {
    pub fn of(gates: &Path, roots: &[PathBuf]) -> Witness {
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
        let notes = Arc::new(Mutex::new(Notes::default()));
        let watcher = Watcher {
            watched,
            roots: roots.to_vec(),
            numbers,
            stop: stop.clone(),
            notes: notes.clone(),
        };
        Witness {
            gates: gates.to_path_buf(),
            notes,
            marks: AtomicU32::new(0),
            stop,
            thread: Some(std::thread::spawn(move || watcher.watch())),
        }
    }

    /// A file for an analysis to hold, and one whose content lets it go on.
    pub fn expect(&self, id: &str) {
        for name in [id.to_owned(), format!("{GO}{id}")] {
            self.make(&name);
        }
    }

    /// Made without being opened.
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

    /// All that has happened before this was asked.
    pub fn seen(&self) -> Vec<Seen> {
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

    /// Programs of these ids that run now.
    pub fn running(&self) -> BTreeSet<String> {
        let mut running = BTreeSet::new();
        for seen in self.seen() {
            match seen.what {
                What::Began => drop(running.insert(seen.id)),
                What::Ended => drop(running.remove(&seen.id)),
                _ => {}
            }
        }
        running
    }

    pub fn starts(&self, id: &str) -> usize {
        count(&self.seen(), id, What::Began)
    }
}

pub fn count(seen: &[Seen], id: &str, what: What) -> usize {
    seen.iter().filter(|s| s.id == id && s.what == what).count()
}

/// No id ever has two workspaces or two programs at once, whatever the machine.
#[track_caller]
pub fn assert_never_doubled(seen: &[Seen]) {
    let mut workspaces: BTreeMap<&str, i32> = BTreeMap::new();
    let mut programs: BTreeMap<&str, i32> = BTreeMap::new();
    for Seen { what, id, .. } in seen {
        let (at, by) = match what {
            What::Made => (&mut workspaces, 1),
            What::Removed => (&mut workspaces, -1),
            What::Began => (&mut programs, 1),
            What::Ended => (&mut programs, -1),
        };
        let now = at.entry(id).or_default();
        *now += by;
        let of_it = || seen.iter().filter(|s| s.id == *id).collect::<Vec<_>>();
        assert!((0..=1).contains(now), "{id}: {what:?}: {:?}", of_it());
    }
}

/// The largest sum that what ran at one time ever had.
pub fn most_at_once(seen: &[Seen], weight: impl Fn(&Seen) -> u64) -> u64 {
    let (mut now, mut most) = (0, 0);
    for seen in seen {
        match seen.what {
            What::Began => now += weight(seen),
            What::Ended => now -= weight(seen),
            _ => {}
        }
        most = most.max(now);
    }
    most
}

impl Drop for Witness {
    fn drop(&mut self) {
        let _told = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

struct Watcher {
    watched: OwnedFd,
    roots: Vec<PathBuf>,
    /// Roots by watch.
    numbers: BTreeMap<i32, usize>,
    stop: Arc<OwnedFd>,
    notes: Arc<Mutex<Notes>>,
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
                // It may be gone already.
                if made && let Ok(meta) = std::fs::symlink_metadata(self.roots[number].join(name)) {
                    notes.uids.insert(meta.uid());
                }
                (id, if made { What::Made } else { What::Removed })
            }
            None if name.starts_with(MARK) => {
                if flags.contains(ReadFlags::CREATE) {
                    notes.marks.insert(name.to_owned());
                }
                return;
            }
            None if name.is_empty() || name.starts_with(GO) => return,
            None if flags.contains(ReadFlags::OPEN) => (name, What::Began),
            None if flags.contains(ReadFlags::CLOSE_NOWRITE) => (name, What::Ended),
            None => return,
        };
        let id = id.to_owned();
        notes.seen.push(Seen { what, id, root });
    }
}
