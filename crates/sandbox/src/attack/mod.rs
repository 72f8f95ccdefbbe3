//! The attacks: every act of `promises.rs`, really tried with system calls.
//!
//! `doctor --attack` starts this binary inside a sandbox, with a hidden first argument, and starts it unconfined in
//! the same way for the control. An attack prints its result in one line. The caller relies on this line only where
//! nothing outside can show the result. Whether a file changed, a service received data, or a process died is checked
//! on the host.
//!
//! Every attack takes its target from the caller, runs in a process of its own and for a bounded time, and harms
//! nothing but the caller's target, because in the unconfined control, as root, all attacks succeed.

mod calls;
mod files;
mod hidden_files;
mod kernel;
mod limits;
mod privilege;
mod processes;
mod services;
mod terminal;
pub mod victims;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions};

use crate::sys::{self, ForkSide};

/// The first argument that makes this binary the attacker, or one of its victims.
pub const ARGUMENT: &str = "__attack";
/// The second argument: run the attacks that follow as `NAME=TARGET`, after the mark that identifies their traces.
pub const RUN_ATTACKS: &str = "strike";
/// As [`RUN_ATTACKS`], in namespaces where an unprivileged user has the privilege that an attack needs. Only for
/// controls.
pub const RUN_ATTACKS_PRIVILEGED: &str = "strike-privileged";
/// Separates the targets of an attack that has several.
pub const TARGET_SEPARATOR: u8 = b'|';
/// In place of a pid: the attacker's parent, which inside the sandbox is init or the guardian.
pub const PARENT_TARGET: &str = "parent";

/// The prefix of every secret that the caller plants for an attack to find.
pub const SECRET_PREFIX: &str = "fumehood-bait-";
/// The variable of the caller's environment that holds a planted secret.
pub const SECRET_VARIABLE: &str = "PGPASSWORD";

/// The variable that holds the secret of a witness process.
pub const WITNESS_VARIABLE: &str = "WITNESS_SECRET";
/// The prefix of every name of the hard-linked file.
pub const LINKED_NAME_PREFIX: &str = "linked-name-";
/// The maximal length of an attack's result.
const DETAIL_CHARS_MAX: usize = 4000;
/// An attack is ended after this time, which is much more than it needs on any host.
const ATTACK_SECONDS_MAX: u64 = 30;

pub struct Attack {
    /// The name of an act in `promises::ACTS`.
    pub name: &'static str,
    run: fn(&AttackAim<'_>) -> AttackResult,
}

/// The result of an attack: what it achieved, or why it failed.
type AttackResult = Result<String, AttackFailure>;

enum AttackFailure {
    /// The system refused the act.
    Refused(String),
    /// The attack could not be tried.
    Unable(String),
}

impl From<io::Error> for AttackFailure {
    fn from(error: io::Error) -> AttackFailure {
        AttackFailure::Refused(errno_name(&error))
    }
}

impl From<rustix::io::Errno> for AttackFailure {
    fn from(error: rustix::io::Errno) -> AttackFailure {
        io::Error::from(error).into()
    }
}

/// Every attack, in the order of the acts.
#[rustfmt::skip]
pub const ATTACKS: &[Attack] = &[
    Attack { name: "write_data", run: files::change },
    Attack { name: "write_docs", run: files::change },
    Attack { name: "truncate_data", run: files::truncate },
    Attack { name: "chmod_data", run: files::change_mode },
    Attack { name: "utime_data", run: files::change_times },
    Attack { name: "xattr_data", run: files::change_attributes },
    Attack { name: "link_data", run: files::link },
    Attack { name: "read_project", run: files::read },
    Attack { name: "list_project", run: files::list },
    Attack { name: "stat_project", run: files::size },
    Attack { name: "lock_data", run: files::lock },
    Attack { name: "read_secret_file", run: files::read },
    Attack { name: "read_host_tmp", run: files::read },
    Attack { name: "write_site", run: files::change },
    Attack { name: "write_api_py", run: files::change },
    Attack { name: "write_system", run: files::create },
    Attack { name: "write_other_workspace", run: files::create },
    Attack { name: "write_host_tmp", run: files::create },
    Attack { name: "write_host_shm", run: files::create },
    Attack { name: "utime_device", run: files::set_times_to_now },
    Attack { name: "postgres_tcp", run: services::tcp },
    Attack { name: "postgres_socket", run: services::path_socket },
    Attack { name: "postgres_abstract", run: services::abstract_socket },
    Attack { name: "unix_datagram", run: services::datagram },
    Attack { name: "tcp_fast_open", run: services::fast_open },
    Attack { name: "udp", run: services::udp },
    Attack { name: "dns", run: services::dns },
    Attack { name: "vsock", run: services::vsock },
    Attack { name: "packet", run: services::packet },
    Attack { name: "netlink", run: services::netlink },
    Attack { name: "inherited_descriptor", run: services::inherited },
    Attack { name: "secret_environment", run: services::environment },
    Attack { name: "signal_others", run: processes::signal },
    Attack { name: "signal_guardian", run: processes::signal_holder },
    Attack { name: "signal_by_descriptor", run: processes::signal_by_descriptor },
    Attack { name: "ptrace_others", run: processes::trace },
    Attack { name: "proc_of_others", run: processes::look_at },
    Attack { name: "init_memory", run: processes::memory },
    Attack { name: "limits_of_others", run: processes::limit },
    Attack { name: "system_v_ipc", run: processes::segment },
    Attack { name: "message_queue", run: processes::queue },
    Attack { name: "watch_system", run: kernel::watch_system },
    Attack { name: "set_user_id", run: privilege::set_user_id },
    Attack { name: "set_user_id_file", run: privilege::set_user_id_file },
    Attack { name: "user_namespace", run: privilege::user_namespace },
    Attack { name: "mount", run: privilege::mount },
    Attack { name: "io_uring", run: privilege::io_uring },
    Attack { name: "bpf", run: privilege::bpf },
    Attack { name: "perf", run: privilege::perf },
    Attack { name: "keyring", run: privilege::keyring },
    Attack { name: "userfaultfd", run: privilege::userfaultfd },
    Attack { name: "foreign_abi", run: privilege::foreign_abi },
    Attack { name: "terminal_injection", run: terminal::inject },
    Attack { name: "fork_bomb", run: limits::fork },
    Attack { name: "memory_bomb", run: limits::memory },
    Attack { name: "oom_loop", run: limits::oom_loop },
    Attack { name: "uncharged_memory", run: kernel::uncharged_memory },
    Attack { name: "disk_bomb", run: limits::disk },
    Attack { name: "disk_held_by_calls", run: hidden_files::held_by_calls },
    Attack { name: "file_bomb", run: limits::files },
    Attack { name: "unlinked_files", run: hidden_files::unlinked },
    Attack { name: "log_bomb", run: limits::log },
    Attack { name: "daemon_outlives_timeout", run: limits::daemon },
    Attack { name: "slow_death", run: limits::slow_death },
    Attack { name: "daemon_outlives_runner", run: limits::daemon },
    Attack { name: "symlink_farm", run: files::farm },
    Attack { name: "hard_links", run: files::hard_links },
];

/// The target of an attack.
struct AttackAim<'a> {
    target: &'a OsStr,
    /// Attacks write this text wherever they can write, so that their traces can be recognised.
    mark: &'a str,
}

impl AttackAim<'_> {
    fn parts(&self) -> Vec<&OsStr> {
        let parts = self.target.as_bytes().split(|b| *b == TARGET_SEPARATOR);
        parts.map(OsStr::from_bytes).collect()
    }

    fn paths(&self) -> Vec<&Path> {
        self.parts().into_iter().map(Path::new).collect()
    }

    /// Parses a target that is a number of milliseconds.
    fn milliseconds(&self) -> Result<Duration, AttackFailure> {
        self.number().map(Duration::from_millis)
    }

    fn number<T: std::str::FromStr>(&self) -> Result<T, AttackFailure> {
        let text = self.target.to_str().and_then(|t| t.parse().ok());
        text.ok_or_else(|| AttackFailure::Unable(format!("{:?} is no number", self.target)))
    }
}

/// The pid of the attacker's parent. It is read before the first fork, after which the parent is the attacker itself.
static ATTACKER_PARENT: OnceLock<i32> = OnceLock::new();

/// Returns whether this process was started as the attacker or as a victim. Call it before any thread exists.
pub fn is_attacker() -> bool {
    std::env::args_os().nth(1).is_some_and(|a| a == ARGUMENT)
}

/// Runs the attacks, or a victim, and exits.
pub fn main() -> ! {
    let words: Vec<OsString> = std::env::args_os().skip(2).collect();
    let role = words.first().and_then(|w| w.to_str()).unwrap_or_default();
    let rest = words.get(1..).unwrap_or_default();
    let result = match role {
        RUN_ATTACKS => run_attacks(rest),
        RUN_ATTACKS_PRIVILEGED => victims::gain_privilege().and_then(|()| run_attacks(rest)),
        victims::WITNESS => victims::witness(),
        victims::ON_TERMINAL => victims::on_terminal(rest),
        _ => Err(io::Error::other("this is for `fumehood doctor --attack`")),
    };
    match result {
        Ok(()) => sys::exit_now(0),
        Err(e) => {
            print_unbuffered(&format!("unable all {e}\n"));
            sys::exit_now(125)
        }
    }
}

fn run_attacks(words: &[OsString]) -> io::Result<()> {
    let no_mark = || io::Error::other("the mark is missing");
    let (mark, aims) = words.split_first().ok_or_else(no_mark)?;
    let mark = mark.to_str().ok_or_else(no_mark)?;
    let parent = rustix::process::getppid().map_or(0, Pid::as_raw_pid);
    ATTACKER_PARENT.get_or_init(|| parent);
    for word in aims {
        let bytes = word.as_bytes();
        let middle = bytes.iter().position(|b| *b == b'=').unwrap_or(bytes.len());
        let name = String::from_utf8_lossy(&bytes[..middle]).into_owned();
        let target = OsStr::from_bytes(bytes.get(middle + 1..).unwrap_or_default());
        match ATTACKS.iter().find(|a| a.name == name) {
            Some(attack) => run_in_child(attack, &AttackAim { target, mark })?,
            None => print_unbuffered(&format!("unable {name} there is no such attack\n")),
        }
    }
    Ok(())
}

/// Runs an attack in a child process: some refusals kill the process that tries, and must not stop the other attacks.
fn run_in_child(attack: &Attack, aim: &AttackAim<'_>) -> io::Result<()> {
    let name = attack.name;
    let child = match sys::fork_threaded()? {
        ForkSide::Child => {
            // Without the alarm the attack merely has no time bound of its own.
            let _ = calls::alarm(ATTACK_SECONDS_MAX);
            print_unbuffered(&result_line(name, (attack.run)(aim)));
            sys::exit_now(0)
        }
        ForkSide::Parent { child } => Pid::from_raw(child),
    };
    let Some((_, status)) = rustix::process::waitpid(child, WaitOptions::empty())? else {
        return Ok(());
    };
    match status.terminating_signal() {
        Some(n) if n == Signal::ALARM.as_raw() => print_unbuffered(&format!(
            "unable {name} no answer within {ATTACK_SECONDS_MAX} s\n"
        )),
        Some(n) => print_unbuffered(&format!("refused {name} ended by signal {n}\n")),
        None => {}
    }
    Ok(())
}

fn result_line(name: &str, result: AttackResult) -> String {
    let (word, detail) = match result {
        Ok(detail) => ("got", detail),
        Err(AttackFailure::Refused(detail)) => ("refused", detail),
        Err(AttackFailure::Unable(detail)) => ("unable", detail),
    };
    // Keep the result on one line, whatever an attack found in a file or a process.
    let printable = |c: char| match c.is_control() {
        true => ' ',
        false => c,
    };
    let detail: String = detail
        .chars()
        .map(printable)
        .take(DETAIL_CHARS_MAX)
        .collect();
    format!("{word} {name} {detail}\n")
}

/// Writes to standard output without a buffer, because the process may be killed at any moment.
fn print_unbuffered(text: &str) {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        match rustix::io::write(rustix::stdio::stdout(), rest) {
            Ok(n) => rest = &rest[n..],
            Err(rustix::io::Errno::INTR) => {}
            // Nobody reads the output.
            Err(_) => return,
        }
    }
}

/// One of several ways to perform the same act.
type Attempt<'a> = (&'a str, &'a mut dyn FnMut() -> AttackResult);

/// Tries every way. Succeeds if at least one way succeeds, and reports all that do.
fn any_of(ways: &mut [Attempt<'_>]) -> AttackResult {
    let mut successes = Vec::new();
    let mut refusals = Vec::new();
    for (way, attempt) in ways {
        match attempt() {
            Ok(what) => successes.push(format!("{way}: {what}")),
            Err(AttackFailure::Refused(why) | AttackFailure::Unable(why)) => {
                refusals.push(format!("{way} {why}"))
            }
        }
    }
    match successes.is_empty() {
        false => Ok(successes.join("; ")),
        true => Err(AttackFailure::Refused(refusals.join(", "))),
    }
}

fn c_path(path: &Path) -> Result<std::ffi::CString, AttackFailure> {
    let text = std::ffi::CString::new(path.as_os_str().as_bytes());
    text.map_err(|_| AttackFailure::Unable("a target contains a NUL byte".into()))
}

fn with_suffix(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Returns the errno's usual name, for the errnos that matter here.
fn errno_name(error: &io::Error) -> String {
    use rustix::io::Errno;
    let names = [
        (Errno::ACCESS, "EACCES"),
        (Errno::AFNOSUPPORT, "EAFNOSUPPORT"),
        (Errno::AGAIN, "EAGAIN"),
        (Errno::BADF, "EBADF"),
        (Errno::CONNREFUSED, "ECONNREFUSED"),
        (Errno::EXIST, "EEXIST"),
        (Errno::FAULT, "EFAULT"),
        (Errno::INVAL, "EINVAL"),
        (Errno::IO, "EIO"),
        (Errno::NETUNREACH, "ENETUNREACH"),
        (Errno::NOENT, "ENOENT"),
        (Errno::NOMEM, "ENOMEM"),
        (Errno::NOSPC, "ENOSPC"),
        (Errno::NOSYS, "ENOSYS"),
        (Errno::NOTTY, "ENOTTY"),
        (Errno::NXIO, "ENXIO"),
        (Errno::OPNOTSUPP, "EOPNOTSUPP"),
        (Errno::PERM, "EPERM"),
        (Errno::PROTONOSUPPORT, "EPROTONOSUPPORT"),
        (Errno::ROFS, "EROFS"),
        (Errno::SRCH, "ESRCH"),
        (Errno::XDEV, "EXDEV"),
    ];
    let known = names
        .iter()
        .find(|(e, _)| error.raw_os_error() == Some(e.raw_os_error()));
    known.map_or_else(|| error.to_string(), |(_, name)| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::promises::ACTS;

    #[test]
    fn every_act_has_its_attack_and_no_attack_is_without_an_act() {
        let acts: Vec<&str> = ACTS.iter().map(|a| a.name).collect();
        let attacks: Vec<&str> = ATTACKS.iter().map(|a| a.name).collect();
        assert_eq!(acts, attacks);
    }

    #[test]
    fn a_result_is_one_line() {
        let text = result_line("x", Ok("a\nb\u{1b}[2Jc".into()));
        assert_eq!(text, "got x a b [2Jc\n");
        let refused = result_line("x", Err(io::Error::from_raw_os_error(13).into()));
        assert_eq!(refused, "refused x EACCES\n");
    }

    #[test]
    fn one_successful_way_is_enough() {
        let mut no = || Err(AttackFailure::Refused("EPERM".into()));
        let mut yes = || Ok("in".to_owned());
        assert!(matches!(any_of(&mut [("a", &mut no), ("b", &mut yes)]), Ok(t) if t == "b: in"));
        let mut no = || Err(AttackFailure::Refused("EPERM".into()));
        let result = any_of(&mut [("a", &mut no)]);
        assert!(matches!(result, Err(AttackFailure::Refused(t)) if t == "a EPERM"));
    }
}
