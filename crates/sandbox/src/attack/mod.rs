//! The attacks: every act of [`promises`], really tried with system calls.
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
pub mod promises;
mod services;
mod terminal;
pub mod victims;

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions};

use self::promises::{ACTS, Act};
use crate::sys;

/// The first argument that makes this binary the attacker, or one of its victims.
pub const ARGUMENT: &str = "__attack";
/// The second argument: run the attacks that follow as `NAME=TARGET`, after the mark that identifies their traces.
pub const RUN_ATTACKS: &str = "strike";
/// As [`RUN_ATTACKS`], in namespaces where an unprivileged user has the privilege that an attack needs. Only for
/// controls.
pub const RUN_ATTACKS_PRIVILEGED: &str = "strike-privileged";
/// Separates the targets of an attack that has several.
const TARGET_SEPARATOR: u8 = b'|';
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

impl AttackFailure {
    /// Returns why the attack failed.
    fn reason(self) -> String {
        let (AttackFailure::Refused(why) | AttackFailure::Unable(why)) = self;
        why
    }
}

fn refused<T>(why: impl Into<String>) -> Result<T, AttackFailure> {
    Err(AttackFailure::Refused(why.into()))
}

fn unable<T>(why: impl Into<String>) -> Result<T, AttackFailure> {
    Err(AttackFailure::Unable(why.into()))
}

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
        match ACTS.iter().find(|act| act.name == name) {
            Some(act) => run_in_child(act, &AttackAim { target, mark })?,
            None => print_unbuffered(&format!("unable {name} there is no such attack\n")),
        }
    }
    Ok(())
}

/// Runs an attack in a child process: some refusals kill the process that tries, and must not stop the other attacks.
fn run_in_child(act: &Act, aim: &AttackAim<'_>) -> io::Result<()> {
    let name = act.name;
    let child = sys::fork_and_run(|| {
        // Without the alarm the attack merely has no time bound of its own.
        let _ = calls::alarm(ATTACK_SECONDS_MAX);
        print_unbuffered(&result_line(name, (act.attack)(aim)));
        0
    })?;
    let waited = rustix::process::waitpid(Some(child), WaitOptions::empty())?;
    match waited.and_then(|(_, status)| status.terminating_signal()) {
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
    let detail = detail.replace(char::is_control, " ");
    let detail: String = detail.chars().take(DETAIL_CHARS_MAX).collect();
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

/// The results of several ways to perform the same act. The act succeeds if at least one way succeeds.
#[derive(Default)]
struct Attempts {
    successes: Vec<String>,
    refusals: Vec<String>,
}

impl Attempts {
    /// Adds the result of one way, which achieves `success` if it succeeds.
    fn add<T, E: Into<AttackFailure>>(
        self,
        way: &str,
        success: &str,
        result: Result<T, E>,
    ) -> Attempts {
        self.add_result(way, result.map(|_| success.into()).map_err(E::into))
    }

    fn add_result(mut self, way: impl std::fmt::Display, result: AttackResult) -> Attempts {
        match result {
            Ok(what) => self.successes.push(format!("{way}: {what}")),
            Err(failure) => self.refusals.push(format!("{way} {}", failure.reason())),
        }
        self
    }

    /// Reports all ways that succeeded, or all refusals.
    fn result(self) -> AttackResult {
        all_or(self.successes, self.refusals.join(", "))
    }
}

/// Reports everything that was achieved, or why nothing was.
fn all_or(achieved: Vec<String>, why_not: impl Into<String>) -> AttackResult {
    match achieved.is_empty() {
        false => Ok(achieved.join("; ")),
        true => refused(why_not),
    }
}

fn c_string(bytes: &[u8]) -> Result<CString, AttackFailure> {
    CString::new(bytes).or_else(|_| unable("a target contains a NUL byte"))
}

fn errno_name(error: &io::Error) -> String {
    let name = error.raw_os_error().and_then(crate::probe::errno_name);
    name.map_or_else(|| error.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_every_act_survives_the_way_to_the_attacker_and_back() {
        for act in ACTS {
            assert!(!act.name.contains(['=', ' ']), "{}", act.name);
        }
    }

    #[test]
    fn a_result_is_one_line() {
        let text = result_line("x", Ok("a\nb\u{1b}[2Jc".into()));
        assert_eq!(text, "got x a b [2Jc\n");
        let refused = result_line("x", Err(io::Error::from_raw_os_error(13).into()));
        assert_eq!(refused, "refused x EACCES\n");
    }

    #[test]
    fn an_act_succeeds_if_one_way_succeeds() {
        let no = || Attempts::default().add_result("a", refused("EPERM"));
        let both = no().add_result("b", Ok("in".to_owned())).result();
        assert!(matches!(both, Ok(t) if t == "b: in"));
        assert!(matches!(no().result(), Err(AttackFailure::Refused(t)) if t == "a EPERM"));
    }
}
