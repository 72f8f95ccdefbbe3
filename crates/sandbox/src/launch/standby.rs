//! A standby launcher: a process that the runner forks before it reads its configuration, as pid 1 of a new pid
//! namespace, and that waits for a launch plan.
//!
//! At that moment the runner has one thread. It has read only its first argument, and whether the environment has
//! settings for the dynamic loader. Its memory holds only Fumehood's own code and the strings it was started with,
//! which the launcher wipes. No process inside therefore holds anything of the caller's, just as if the binary had been
//! executed again with an empty environment, but without the cost of an execve. While the runner reads its
//! configuration, the launcher makes what every launch plan needs: the namespaces, and a new root with the system
//! runtime.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Gid, Pid, Signal, Uid, WaitOptions};

use super::launcher;
use super::namespaces;
use crate::channel;
use crate::resources::cpus;
use crate::spec::Spec;
use crate::standby_slot;
pub use crate::standby_slot::dismiss;
use crate::step_report::Reporter;
use crate::sys::{self, ForkSide};

/// Forks the standby launcher if the first argument on the command line is one of `words`. Call this before anything
/// else. On failure no launcher stands by, and the runner executes one later.
pub fn fork_launcher(words: &[&str]) {
    // The dynamic loader copies its settings to memory that the launcher cannot wipe.
    if !is_first_argument(words) || sys::has_loader_settings() {
        return;
    }
    let Ok((ours, theirs)) = channel::pair() else {
        return;
    };
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    match sys::fork(namespaces::early_parentage()) {
        Ok(ForkSide::Child) => run_standby_launcher(&theirs, uid, gid),
        Ok(ForkSide::Parent { child }) => {
            if let Some(pid) = Pid::from_raw(child) {
                // On an error the child merely starts on this CPU.
                let _ = cpus::move_off_this_cpu(child);
                standby_slot::put(ours, pid);
            }
        }
        Err(_) => {}
    }
}

/// Returns whether the first argument of this process is one of `words`. Reads /proc, because the standard library
/// would leave copies of the whole command line in memory.
fn is_first_argument(words: &[&str]) -> bool {
    let mut line = [0u8; 4096];
    let read = sys::open("/proc/self/cmdline", OFlags::RDONLY)
        .and_then(|file| rustix::io::read(file, &mut line));
    let first = line.split(|byte| *byte == 0).nth(1).unwrap_or_default();
    let is_match = read.is_ok() && words.iter().any(|word| word.as_bytes() == first);
    line.fill(0);
    std::hint::black_box(&mut line);
    is_match
}

/// Takes the standby launcher if it can serve this run. The launcher becomes the run's pid 1.
pub(crate) fn take(program: &Path, spec: &Spec) -> Option<(OwnedFd, Pid)> {
    let standby = standby_slot::take()?;
    // A test may name another binary as the launcher.
    if program != Path::new("/proc/self/exe") || !namespaces::fits_early(spec) {
        standby_slot::end(standby);
        return None;
    }
    // A launcher that failed in `detach_from_caller` has exited.
    let ended = rustix::process::waitpid(Some(standby.1), WaitOptions::NOHANG);
    matches!(ended, Ok(None)).then_some(standby)
}

fn run_standby_launcher(socket: &OwnedFd, uid: Uid, gid: Gid) -> ! {
    match detach_from_caller(socket) {
        Ok(socket) => {
            let mut report = Reporter::new(socket);
            let entered = namespaces::enter_early(uid, gid, &mut report);
            launcher::run(report, entered)
        }
        Err(_) => sys::exit_now(125),
    }
}

/// Gives this process the state of a newly executed launcher.
fn detach_from_caller(socket: &OwnedFd) -> io::Result<OwnedFd> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    sys::wipe_start_strings()?;
    // Not the caller's umask: other users must be able to read the files of the new root.
    rustix::process::umask(Mode::from_raw_mode(0o022));
    // A new session, so that the terminal's Ctrl-C reaches only the runner.
    rustix::process::setsid()?;
    rustix::process::chdir("/")?;
    sys::set_process_name(c"fumehood-launch");
    sys::reset_sigchld();
    let null = sys::open("/dev/null", OFlags::RDWR)?;
    for number in 0..3 {
        sys::place_descriptor(null.as_fd(), number)?;
    }
    drop(null);
    // Close every descriptor that the runner inherited.
    let socket = rustix::io::fcntl_dupfd_cloexec(socket, 3)?;
    sys::close_all_but(socket.as_fd())?;
    Ok(socket)
}
