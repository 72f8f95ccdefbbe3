//! One directory of a hierarchy, held by descriptor: its files, its processes, its removal.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

use super::{CgroupError, Controller, Version};
use crate::events::{self, PollFlags};
use crate::sys;

/// The kernel's own files are far smaller. A longer text is cut off.
const FILE_BYTES_MAX: usize = 1 << 20;
const KILL_WAIT: Duration = Duration::from_secs(2);
/// How many pidfds to hold at once while killing, well below any usual RLIMIT_NOFILE.
const KILL_CHUNK: usize = 128;

/// The directory of one cgroup, held open.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) version: Version,
    pub(super) fd: OwnedFd,
    pub(super) path: PathBuf,
}

impl Node {
    pub(super) fn open(version: Version, path: &Path) -> Result<Node, CgroupError> {
        let fd = sys::open_resolved(CWD, path, OFlags::RDONLY | OFlags::DIRECTORY);
        Node::checked(version, fd, path.to_path_buf())
    }

    pub(super) fn open_child(&self, name: &str) -> Result<Node, CgroupError> {
        let fd = sys::open_at(&self.fd, name, sys::DIRECTORY);
        Node::checked(self.version, fd, self.path.join(name))
    }

    pub(super) fn checked(
        version: Version,
        fd: rustix::io::Result<OwnedFd>,
        path: PathBuf,
    ) -> Result<Node, CgroupError> {
        let opened = fd.and_then(|fd| Ok((rustix::fs::fstatfs(&fd)?.f_type as u64, fd)));
        match opened {
            Ok((magic, fd)) if magic == version.magic() => Ok(Node { version, fd, path }),
            Ok(_) => Err(CgroupError::NotCgroup(path)),
            Err(e) => Err(CgroupError::Open {
                path,
                source: e.into(),
            }),
        }
    }

    /// Makes a group below this one. An existing group is an error: it may hold processes and limits of another
    /// program.
    pub(super) fn make_child(&self, name: &str) -> Result<Node, CgroupError> {
        let mode = Mode::from_raw_mode(0o755);
        rustix::fs::mkdirat(&self.fd, name, mode).map_err(|e| CgroupError::Make {
            path: self.path.join(name),
            source: e.into(),
        })?;
        self.open_child(name).inspect_err(|_| {
            // The new directory is of no use. If it cannot be removed, the error that is returned names it already.
            let _ = rustix::fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR);
        })
    }

    pub(super) fn open_file(&self, file: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        sys::open_at(&self.fd, file, flags | OFlags::NOFOLLOW)
    }

    pub(super) fn read(&self, file: &'static str) -> Result<String, CgroupError> {
        self.open_file(file, OFlags::RDONLY)
            .map_err(io::Error::from)
            .and_then(|fd| {
                use io::Read;
                // Most files are one line and none is much longer. A large buffer avoids repeated reads.
                let mut text = String::with_capacity(4096);
                fs::File::from(fd)
                    .take(FILE_BYTES_MAX as u64)
                    .read_to_string(&mut text)?;
                Ok(text)
            })
            .map_err(|source| CgroupError::Read {
                path: self.path.clone(),
                file,
                source,
            })
    }

    /// Writes the value in one call, as the kernel's files demand.
    pub(super) fn write(&self, file: &'static str, value: &str) -> Result<(), CgroupError> {
        self.open_file(file, OFlags::WRONLY)
            .and_then(|fd| rustix::io::write(fd, value.as_bytes()))
            .map(|_| ())
            .map_err(|e| self.write_error(file, value, e))
    }

    fn write_error(&self, file: &'static str, value: &str, why: Errno) -> CgroupError {
        CgroupError::Write {
            path: self.path.clone(),
            file,
            value: value.to_owned(),
            source: why.into(),
        }
    }

    pub(super) fn number(&self, file: &'static str) -> Option<u64> {
        self.read(file).ok()?.trim().parse().ok()
    }

    /// Returns the number after `key` in a file of `key value` lines.
    pub(super) fn keyed(&self, file: &'static str, key: &str) -> Option<u64> {
        keyed(&self.read(file).ok()?, key)
    }

    /// Sets a limit and checks that the kernel keeps it: the value read back must satisfy `kept`.
    pub(super) fn write_kept(
        &self,
        file: &'static str,
        value: &str,
        kept: impl Fn(&str) -> bool,
    ) -> Result<(), CgroupError> {
        let mut found = [0; 64];
        let length = self
            .open_file(file, OFlags::RDWR)
            .and_then(|fd| {
                rustix::io::write(&fd, value.as_bytes())?;
                rustix::io::pread(&fd, &mut found[..], 0)
            })
            .map_err(|e| self.write_error(file, value, e))?;
        let found = String::from_utf8_lossy(&found[..length]);
        match kept(found.trim()) {
            true => Ok(()),
            false => Err(CgroupError::NotKept {
                path: self.path.clone(),
                file,
                wrote: value.to_owned(),
                found: found.trim().to_owned(),
            }),
        }
    }

    /// As [`Self::write_kept`], for a value that the kernel keeps as it is.
    pub(super) fn write_exact(&self, file: &'static str, value: &str) -> Result<(), CgroupError> {
        self.write_kept(file, value, |found| found == value)
    }

    pub(super) fn pids(&self) -> Result<BTreeSet<i32>, CgroupError> {
        Ok(pids_in(&self.read("cgroup.procs")?))
    }

    pub(super) fn is_empty(&self) -> bool {
        match self.version {
            Version::V2 => self.keyed("cgroup.events", "populated") == Some(0),
            Version::V1 => self.read("tasks").is_ok_and(|text| text.trim().is_empty()),
        }
    }

    pub(super) fn kill(&self) {
        if self.version == Version::V2 && self.write("cgroup.kill", "1").is_ok() {
            return;
        }
        let deadline = Instant::now() + KILL_WAIT;
        while Instant::now() < deadline {
            let pids: Vec<i32> = self.pids().unwrap_or_default().into_iter().collect();
            if pids.is_empty() {
                return;
            }
            // Signal all processes before waiting for any, or the others would go on forking.
            let mut last = None;
            for chunk in pids.chunks(KILL_CHUNK) {
                last = self.kill_chunk(chunk).or(last);
            }
            if let Some(last) = last {
                events::wait_for(last, PollFlags::IN, Duration::from_millis(20));
            }
        }
    }

    /// Kills those of the processes that are still members, and returns a pidfd of one of them to wait for.
    ///
    /// Another process may take over a pid at any time. Each pid is therefore first held by a pidfd and then looked
    /// up again: a pid that is listed after it is held belongs to the held process, or the held process is gone, and
    /// then the signal reaches nobody.
    pub(super) fn kill_chunk(&self, pids: &[i32]) -> Option<OwnedFd> {
        let open_pidfd = |raw: &i32| {
            let fd = rustix::process::pidfd_open(Pid::from_raw(*raw)?, PidfdFlags::empty());
            Some((*raw, fd.ok()?))
        };
        let held: Vec<(i32, OwnedFd)> = pids.iter().filter_map(open_pidfd).collect();
        let members = self.pids().unwrap_or_default();
        let mut signalled = None;
        for (_, fd) in held.into_iter().filter(|(pid, _)| members.contains(pid)) {
            if rustix::process::pidfd_send_signal(&fd, Signal::KILL).is_ok() {
                signalled = Some(fd);
            }
        }
        signalled
    }
}

/// Returns the pids that can be signalled. A last line without its newline was cut off inside a number and would name
/// another process. Zero stands for a process of another pid namespace. The pid of this process is left out.
pub(super) fn pids_in(text: &str) -> BTreeSet<i32> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let complete_lines = text
        .rsplit_once('\n')
        .map_or("", |(complete_lines, _)| complete_lines);
    let pids = complete_lines
        .lines()
        .filter_map(|line| line.trim().parse().ok());
    pids.filter(|pid| *pid > 0 && *pid != own).collect()
}

pub(super) fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))
        .and_then(|value| value.trim().parse().ok())
}

/// A group that Fumehood made: its directory, and its parent's directory, from which it is removed.
#[derive(Debug)]
pub(super) struct CreatedGroup {
    pub(super) node: Node,
    pub(super) parent: Node,
    pub(super) name: String,
    pub(super) controllers: Vec<Controller>,
}

impl CreatedGroup {
    pub(super) fn has(&self, controller: Controller) -> bool {
        self.controllers.contains(&controller)
    }

    pub(super) fn rmdir(&self) -> rustix::io::Result<()> {
        match rustix::fs::unlinkat(&self.parent.fd, &self.name, AtFlags::REMOVEDIR) {
            Err(Errno::NOENT) => Ok(()),
            other => other,
        }
    }

    pub(super) fn remove(&self, deadline: Instant) -> Result<(), CgroupError> {
        let path = || self.node.path.clone();
        let mut pause = Duration::from_millis(1);
        loop {
            match self.rmdir() {
                Ok(()) => return Ok(()),
                Err(Errno::BUSY) if Instant::now() < deadline => self.wait_for_exit(pause),
                Err(Errno::BUSY) => return Err(CgroupError::Busy(path())),
                Err(e) => {
                    return Err(CgroupError::Remove {
                        path: path(),
                        source: e.into(),
                    });
                }
            }
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// Waits until the group may be empty. Version 2 reports that a group becomes empty: a change of `cgroup.events`
    /// is an exceptional condition for poll. Version 1 has no event that is cheaper than polling.
    pub(super) fn wait_for_exit(&self, pause: Duration) {
        match self.node.open_file("cgroup.events", OFlags::RDONLY) {
            Ok(fd) if self.node.version == Version::V2 => {
                // Reading arms the event: the first poll reports changes from here on.
                let mut text = [0; 256];
                let _ = rustix::io::read(&fd, &mut text[..]);
                if !self.node.is_empty() {
                    events::wait_for(fd, PollFlags::PRI, Duration::from_millis(100));
                } else {
                    std::thread::sleep(pause);
                }
            }
            _ => std::thread::sleep(pause),
        }
    }
}
