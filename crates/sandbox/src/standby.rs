//! A launcher that stands by: forked by the runner as its very first act, as pid 1 of a pid namespace, and waiting for a plan.
//!
//! At that moment the runner has one thread, has read no file and no variable, and its memory holds nothing but our own
//! code and the strings it was started with, which the launcher wipes. So nothing of the caller's is to be found in any
//! process inside, as if our binary had been executed anew with an empty environment, without what that costs. While
//! the runner reads its configuration, the launcher makes what every plan needs: the
//! namespaces, and a new root with the system runtime in it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::process::{Gid, Pid, PidfdFlags, Signal, Uid, WaitOptions};

use crate::channel::{self, Reporter};
use crate::cpus;
use crate::launch::{self, Plan};
use crate::namespaces;
use crate::spec::Spec;
use crate::supervise::{RunError, start};
use crate::sys::{self, Forked};

/// The one that waits, if any: the socket to it, and its pid.
static STANDBY: Mutex<Option<(OwnedFd, Pid)>> = Mutex::new(None);

/// Forks the launcher, if the first word on the command line is one of these. To be called before anything else is done;
/// where it fails, one is executed later.
pub fn stand_by(words: &[&str]) {
    // The loader keeps copies of its own settings, which nobody could wipe.
    if !was_told(words) || sys::has_loader_settings() {
        return;
    }
    let Ok((ours, theirs)) = channel::pair() else {
        return;
    };
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    match sys::fork(namespaces::early_birth()) {
        Ok(Forked::Child) => be_launcher(&theirs, uid, gid),
        Ok(Forked::Parent { child }) => {
            if let (Some(pid), Ok(mut standby)) = (Pid::from_raw(child), STANDBY.lock()) {
                let _where_it_was_born = cpus::move_from_here(child);
                *standby = Some((ours, pid));
            }
        }
        Err(_) => {}
    }
}

/// Whether that is the first word that this process was started with. The standard library would leave copies of the whole
/// command line in memory.
fn was_told(words: &[&str]) -> bool {
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
    let standby = STANDBY.lock().ok()?.take()?;
    // A test may bring another binary.
    if program != Path::new("/proc/self/exe") || !namespaces::fits_early(spec) {
        end(standby);
        return None;
    }
    // One that could not settle in has ended.
    let ended = rustix::process::waitpid(Some(standby.1), WaitOptions::NOHANG);
    matches!(ended, Ok(None)).then_some(standby)
}

pub(crate) fn pid() -> Option<u32> {
    let standby = STANDBY.lock().ok()?;
    u32::try_from(standby.as_ref()?.1.as_raw_nonzero().get()).ok()
}

/// Sends it away: what it was born into is not where runs are to be any more.
pub fn dismiss() {
    let standby = STANDBY.lock().ok().and_then(|mut standby| standby.take());
    if let Some(standby) = standby {
        end(standby);
    }
}

/// Also of one that somebody has stopped.
fn end((socket, pid): (OwnedFd, Pid)) {
    drop(socket);
    // Not reaped by anybody else, so the number is still its own.
    let _gone = rustix::process::kill_process(pid, Signal::KILL);
    while matches!(
        rustix::process::waitpid(Some(pid), WaitOptions::empty()),
        Err(rustix::io::Errno::INTR)
    ) {}
}

/// A child of ours: nobody else reaps it, so the number cannot have been given to another process.
pub(crate) fn hold(child: Pid) -> Result<(Pid, OwnedFd), RunError> {
    let pidfd = rustix::process::pidfd_open(child, PidfdFlags::empty());
    Ok((child, pidfd.map_err(|e| start("find init")(e.into()))?))
}

/// Our own binary, once more. An empty environment: nothing of the caller's is to be found in any process inside. Its
/// own process group: the terminal's Ctrl-C is the runner's to handle.
pub(crate) fn start_launcher(program: &Path) -> Result<(OwnedFd, Child), RunError> {
    let (ours, theirs) = channel::pair().map_err(|e| start("make the control socket")(e.into()))?;
    let launcher = Command::new(program)
        .arg(launch::ARGUMENT)
        .env_clear()
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(start("start the launcher"))?;
    Ok((ours, launcher))
}

/// The plan as nobody can change it any more.
pub(crate) fn plan_file(plan: &Plan) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(
        c"fumehood-plan",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    let mut file = std::fs::File::from(fd);
    serde_json::to_writer(io::BufWriter::new(&mut file), plan)?;
    io::Seek::rewind(&mut file)?;
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL,
    )?;
    Ok(file.into())
}

fn be_launcher(socket: &OwnedFd, uid: Uid, gid: Gid) -> ! {
    match settle_in(socket) {
        Ok(socket) => {
            let mut report = Reporter::new(socket);
            let entered = namespaces::enter_early(uid, gid, &mut report);
            launch::work(report, entered)
        }
        Err(_) => sys::exit_now(125),
    }
}

/// Makes this process what an executed launcher is.
fn settle_in(socket: &OwnedFd) -> io::Result<OwnedFd> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    sys::forget_beginnings()?;
    // Not the caller's: others must be able to read what is made for them.
    rustix::process::umask(Mode::from_raw_mode(0o022));
    // The terminal's Ctrl-C is the runner's to handle.
    rustix::process::setsid()?;
    rustix::process::chdir("/")?;
    launch::be_called(c"fumehood-launch");
    sys::hear_of_children();
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    for number in 0..3 {
        sys::place(null.as_fd(), number)?;
    }
    drop(null);
    // What whoever started the runner left open is not for us.
    let socket = rustix::io::fcntl_dupfd_cloexec(socket, 3)?;
    sys::close_all_but(socket.as_fd())?;
    Ok(socket)
}
