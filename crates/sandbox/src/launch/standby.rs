//! A launcher that stands by: forked by the runner as its very first act, as pid 1 of a pid namespace, and waiting for a plan.
//!
//! At that moment the runner has one thread, has read no file and no variable, and its memory holds nothing but our own
//! code and the strings it was started with, which the launcher wipes. So nothing of the caller's is to be found in any
//! process inside, as if our binary had been executed anew with an empty environment, without what that costs. While
//! the runner reads its configuration, the launcher makes what every plan needs: the
//! namespaces, and a new root with the system runtime in it.

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

/// Forks the launcher, if the first word on the command line is one of these. To be called before anything else is done;
/// where it fails, one is executed later.
pub fn fork_launcher(words: &[&str]) {
    // The loader keeps copies of its own settings, which nobody could wipe.
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
                // Refused: the child begins on this CPU.
                let _ = cpus::move_off_this_cpu(child);
                standby_slot::put(ours, pid);
            }
        }
        Err(_) => {}
    }
}

/// Whether that is the first word that this process was started with. The standard library would leave copies of the whole
/// command line in memory.
fn is_first_argument(words: &[&str]) -> bool {
    let mut line = [0u8; 4096];
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let read = rustix::fs::open("/proc/self/cmdline", flags, Mode::empty())
        .and_then(|file| rustix::io::read(file, &mut line));
    let first = line.split(|byte| *byte == 0).nth(1).unwrap_or_default();
    let told = read.is_ok() && words.iter().any(|word| word.as_bytes() == first);
    line.fill(0);
    std::hint::black_box(&mut line);
    told
}

/// The launcher that waits, if it can serve this run. It is pid 1 of the run's.
pub(crate) fn take(program: &Path, spec: &Spec) -> Option<(OwnedFd, Pid)> {
    let standby = standby_slot::take()?;
    // A test may bring another binary.
    if program != Path::new("/proc/self/exe") || !namespaces::fits_early(spec) {
        standby_slot::end(standby);
        return None;
    }
    // One that could not settle in has ended.
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

/// Makes this process what an executed launcher is.
fn detach_from_caller(socket: &OwnedFd) -> io::Result<OwnedFd> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    sys::wipe_start_strings()?;
    // Not the caller's: others must be able to read what is made for them.
    rustix::process::umask(Mode::from_raw_mode(0o022));
    // The terminal's Ctrl-C is the runner's to handle.
    rustix::process::setsid()?;
    rustix::process::chdir("/")?;
    sys::set_process_name(c"fumehood-launch");
    sys::reset_sigchld();
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    for number in 0..3 {
        sys::place_descriptor(null.as_fd(), number)?;
    }
    drop(null);
    // What whoever started the runner left open is not for us.
    let socket = rustix::io::fcntl_dupfd_cloexec(socket, 3)?;
    sys::close_all_but(socket.as_fd())?;
    Ok(socket)
}
