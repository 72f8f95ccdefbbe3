//! Targets of attacks that are neither files nor sockets: processes, segments, queues and a terminal of the host.
//! Also the namespaces in which an unprivileged user can show that a privileged act would work.

use std::ffi::{CString, OsString};
use std::io::{self, Read};

use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::process::{PTracer, Signal};

use super::calls::OpenQueue;
use super::print_unbuffered;
use crate::sys::Arg::{Bytes, Number, Text};
use crate::sys::{self, Call};

/// A process that waits, and that any signal ends.
pub const WITNESS: &str = "witness";
/// A process that makes its standard input its controlling terminal and starts the command that follows on it.
pub const ON_TERMINAL: &str = "on-terminal";
/// The word before the text that was typed into that terminal.
pub const HEARD: &str = "heard";
/// What a witness prints when it is ready to be attacked.
pub const READY: &str = "ready";

/// Waits until its standard input ends.
pub(super) fn witness() -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // Where Yama allows only ancestors to trace, this allows the control. A kernel without Yama does not know the
    // call.
    let _ = rustix::process::set_ptracer(PTracer::Any);
    print_unbuffered(&format!("{READY}\n"));
    let mut word = [0u8; 64];
    while io::stdin().read(&mut word)? > 0 {}
    Ok(())
}

/// Runs the command, and then prints what was typed meanwhile: the text that the caller's shell would read next.
pub(super) fn on_terminal(command: &[OsString]) -> io::Result<()> {
    rustix::process::setsid()?;
    let terminal = rustix::stdio::stdin();
    sys::make_controlling_terminal(terminal)?;
    let (program, args) = command
        .split_first()
        .ok_or_else(|| io::Error::other("no command"))?;
    std::process::Command::new(program).args(args).status()?;
    rustix::io::ioctl_fionbio(terminal, true)?;
    let mut typed = [0u8; 4096];
    let n = rustix::io::read(terminal, &mut typed).unwrap_or(0);
    let text = String::from_utf8_lossy(&typed[..n]);
    print_unbuffered(&format!("\n{HEARD} {}\n", text.trim()));
    Ok(())
}

/// Enters new namespaces in which this process may mount and open any socket, with an empty file system on /usr.
pub(super) fn gain_privilege() -> io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let spaces = libc::CLONE_NEWNS | libc::CLONE_NEWNET;
    match uid.is_root() {
        true => sys::unshare(spaces)?,
        false => {
            sys::unshare(spaces | libc::CLONE_NEWUSER)?;
            std::fs::write("/proc/self/setgroups", "deny")?;
            std::fs::write("/proc/self/uid_map", format!("0 {} 1", uid.as_raw()))?;
            std::fs::write("/proc/self/gid_map", format!("0 {} 1", gid.as_raw()))?;
        }
    }
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    rustix::mount::mount("none", "/usr", "tmpfs", MountFlags::empty(), None)?;
    Ok(())
}

/// A System V segment open to all users. It disappears with this process, however the process ends.
pub struct Segment {
    id: i64,
    own: i32,
}

impl Segment {
    /// Makes a segment, and attaches this process to it.
    pub fn make() -> io::Result<Segment> {
        const PRIVATE: i64 = 0;
        let id = sys::attempt(Call::SHMGET, &mut [PRIVATE, 4096, 0o666].map(Number))?;
        let attached = sys::attempt(Call::SHMAT, &mut [id, 0, 0].map(Number));
        // The kernel removes the segment when nobody is attached any more. Its id stays valid until then.
        let remove = [id, libc::IPC_RMID.into(), 0];
        sys::attempt(Call::SHMCTL, &mut remove.map(Number))?;
        attached?;
        let mut segment = Segment { id, own: 0 };
        segment.own = segment.last_process()?;
        Ok(segment)
    }

    /// Returns the number by which any process may try to attach.
    pub fn id(&self) -> i64 {
        self.id
    }

    /// Returns whether any other process has ever attached to the segment.
    pub fn was_reached(&self) -> io::Result<bool> {
        Ok(self.last_process()? != self.own)
    }

    /// Returns the process that attached or detached last.
    fn last_process(&self) -> io::Result<i32> {
        const AT: usize = std::mem::offset_of!(libc::shmid_ds, shm_lpid);
        let mut state = [0u8; size_of::<libc::shmid_ds>()];
        let [id, command] = [self.id, libc::IPC_STAT.into()].map(Number);
        sys::attempt(Call::SHMCTL, &mut [id, command, Bytes(&mut state)])?;
        let mut pid = [0u8; 4];
        pid.copy_from_slice(&state[AT..AT + 4]);
        Ok(i32::from_ne_bytes(pid))
    }
}

/// A POSIX message queue open to all users. It is removed when dropped.
pub struct Queue {
    name: CString,
    queue: OpenQueue,
}

impl Queue {
    /// Makes an empty queue. Fails if one has that name.
    pub fn make(name: &str) -> io::Result<Queue> {
        let name = CString::new(name)?;
        let flags = libc::O_RDONLY | libc::O_CREAT | libc::O_EXCL;
        let queue = OpenQueue::open(&name, flags)?;
        Ok(Queue { name, queue })
    }

    /// Takes the first message in the queue, if there is one.
    pub fn take(&self) -> Option<Vec<u8>> {
        let mut message = vec![0u8; 8192];
        let n = self.queue.receive(&mut message).ok()?;
        message.truncate(n);
        Some(message)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let _ = sys::attempt(Call::MQ_UNLINK, &mut [Text(&self.name)]);
    }
}
