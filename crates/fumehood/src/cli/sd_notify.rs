//! Messages of a worker to the service manager that started it, as datagrams to the socket in `NOTIFY_SOCKET`
//! (sd_notify(3)): ready, alive, status, stopping. Without the variable it sends nothing.
//!
//! Implemented here because it is a single system call. The variable is read once, when the worker starts. Each message
//! is bounded in size and time, so that a manager that hangs does not block the worker.

use std::cell::{Cell, RefCell};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::time::{Duration, Instant};

/// These three variables are for the worker alone. A runner outlives the worker and must not be able to send messages
/// for the next worker, so the worker removes them from a runner's environment.
const SOCKET: &str = "NOTIFY_SOCKET";
const WATCHDOG_USEC: &str = "WATCHDOG_USEC";
const WATCHDOG_PID: &str = "WATCHDOG_PID";

/// systemd accepts messages of at most a page and shows the status in one line.
const STATUS_CHARS_MAX: usize = 200;
/// The socket's queue is short. If a manager does not read for so long, drop the message; the next one makes up for it.
const SEND_WITHIN: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum NotifyError {
    #[error(
        "{SOCKET} is {0:?}, which is neither an absolute path nor the name of an abstract socket"
    )]
    Address(OsString),
    #[error("address the service manager's socket {name:?}")]
    Resolve { name: OsString, source: io::Error },
    #[error("make a socket to the service manager")]
    Socket(#[source] io::Error),
    #[error("tell the service manager at {name:?} that this worker is ready")]
    Ready { name: OsString, source: io::Error },
}

/// The connection to the service manager, if there is one.
#[derive(Debug, Default)]
pub struct Notifier {
    manager: Option<Manager>,
    watchdog_interval: Option<Duration>,
    /// When the last watchdog message was sent.
    last_watchdog: Cell<Option<Instant>>,
    /// The last status line that was sent. An unchanged line is not sent again, because the manager forwards each to
    /// its observers.
    last_status: RefCell<String>,
}

#[derive(Debug)]
struct Manager {
    name: OsString,
    address: SocketAddr,
    socket: UnixDatagram,
}

impl Notifier {
    /// Reads the environment as the manager set it. A malformed address is an error, because the manager would wait for
    /// a message and then kill the worker.
    pub fn from_env() -> Result<Notifier, NotifyError> {
        Notifier::new(|name| std::env::var_os(name), std::process::id())
    }

    fn new(env: impl Fn(&str) -> Option<OsString>, pid: u32) -> Result<Notifier, NotifyError> {
        let Some(name) = env(SOCKET).filter(|name| !name.is_empty()) else {
            return Ok(Notifier::default());
        };
        let number = |name| env(name).and_then(|value| value.to_str()?.parse::<u64>().ok());
        // A variable for another pid was inherited by mistake and does not concern this process
        // (sd_watchdog_enabled(3)).
        let is_ours = env(WATCHDOG_PID).is_none() || number(WATCHDOG_PID) == Some(u64::from(pid));
        let period = number(WATCHDOG_USEC).filter(|usec| is_ours && *usec > 0);
        let address = address(&name)?;
        let socket = UnixDatagram::unbound().map_err(NotifyError::Socket)?;
        socket
            .set_write_timeout(Some(SEND_WITHIN))
            .map_err(NotifyError::Socket)?;
        Ok(Notifier {
            manager: Some(Manager {
                name,
                address,
                socket,
            }),
            watchdog_interval: period.map(|usec| Duration::from_micros(usec.div_ceil(2))),
            ..Notifier::default()
        })
    }

    /// Returns how often to call [`Notifier::watchdog`] at least: twice in the time after which the manager considers
    /// the worker hung. `None`: there is no watchdog.
    pub fn watchdog_interval(&self) -> Option<Duration> {
        self.watchdog_interval
    }

    /// Says that the worker takes work from now on. Call it once, after everything that may fail at the start.
    pub fn ready(&self, status: &str) -> Result<(), NotifyError> {
        let Some(manager) = &self.manager else {
            return Ok(());
        };
        let line = status_line(status);
        let sent = manager.send(&format!("READY=1\n{line}"));
        self.last_status.replace(line);
        sent.map_err(|source| NotifyError::Ready {
            name: manager.name.clone(),
            source,
        })
    }

    /// Says that the main loop is alive. Call it from that loop: a separate thread would go on in a worker that hangs.
    /// Calls more frequent than necessary send nothing.
    pub fn watchdog(&self) {
        let Some(interval) = self.watchdog_interval else {
            return;
        };
        let recently = |at: Instant| at.elapsed() < interval / 2;
        if !self.last_watchdog.get().is_some_and(recently) && self.send("WATCHDOG=1") {
            self.last_watchdog.set(Some(Instant::now()));
        }
    }

    /// Sends one line for `systemctl status`, if it has changed.
    pub fn status(&self, text: &str) {
        let line = status_line(text);
        if *self.last_status.borrow() != line && self.send(&line) {
            self.last_status.replace(line);
        }
    }

    /// Says that the worker is about to exit. Do not call it while waiting for runners: from here on the manager counts
    /// TimeoutStopSec= and then kills.
    pub fn stopping(&self, status: &str) {
        self.send(&format!("STOPPING=1\n{}", status_line(status)));
    }

    /// Returns whether the message was sent. A lost message is made up for by the next one, or by this process's exit.
    fn send(&self, message: &str) -> bool {
        let sent = self.manager.as_ref().map(|manager| manager.send(message));
        sent.is_some_and(|sent| sent.is_ok())
    }
}

impl Manager {
    fn send(&self, message: &str) -> io::Result<()> {
        let sent = self
            .socket
            .send_to_addr(message.as_bytes(), &self.address)?;
        match sent == message.len() {
            true => Ok(()),
            false => Err(io::Error::from(io::ErrorKind::WriteZero)),
        }
    }
}

/// Parses a path, or after `@` the name of an abstract socket, as managers in containers use.
fn address(name: &OsStr) -> Result<SocketAddr, NotifyError> {
    let bytes = name.as_bytes();
    let address = match bytes.split_first() {
        Some((b'@', rest)) if !rest.is_empty() => SocketAddr::from_abstract_name(rest),
        Some((b'/', _)) => SocketAddr::from_pathname(Path::new(name)),
        _ => return Err(NotifyError::Address(name.to_owned())),
    };
    address.map_err(|source| NotifyError::Resolve {
        name: name.to_owned(),
        source,
    })
}

/// Formats a status. Each line of a message is a separate assignment, so control characters are replaced: ids and
/// reasons in the text may contain new lines.
fn status_line(text: &str) -> String {
    let shown = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(STATUS_CHARS_MAX);
    format!("STATUS={}", shown.collect::<String>())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn notifier(env: &[(&str, &OsStr)]) -> Result<Notifier, NotifyError> {
        let env: BTreeMap<&str, OsString> = env.iter().map(|(k, v)| (*k, (*v).into())).collect();
        Notifier::new(|name| env.get(name).cloned(), 77)
    }

    fn receive(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 4096];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    }

    fn check_all_messages(to: &OsStr, listener: &UnixDatagram) {
        listener
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let usec = OsStr::new("3600000000");
        let notifier = notifier(&[(SOCKET, to), (WATCHDOG_USEC, usec)]).unwrap();
        notifier.ready("8 slots").unwrap();
        assert_eq!(receive(listener), "READY=1\nSTATUS=8 slots");
        notifier.watchdog();
        assert_eq!(receive(listener), "WATCHDOG=1");
        // Unchanged values are not sent again, so the next message is the new status.
        notifier.watchdog();
        notifier.status("8 slots");
        notifier.status("one\nMAINPID=1\0\u{1b}[m");
        assert_eq!(receive(listener), "STATUS=one MAINPID=1  [m");
        notifier.status(&"é".repeat(5000));
        assert_eq!(receive(listener).chars().count(), 7 + STATUS_CHARS_MAX);
        notifier.stopping("bye");
        assert_eq!(receive(listener), "STOPPING=1\nSTATUS=bye");
    }

    #[test]
    fn the_manager_hears_each_of_them_at_a_path_and_at_an_abstract_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let listener = UnixDatagram::bind(&path).unwrap();
        check_all_messages(path.as_os_str(), &listener);

        let name = format!("fumehood-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixDatagram::bind_addr(&address).unwrap();
        check_all_messages(OsStr::new(&format!("@{name}")), &listener);
    }

    #[test]
    fn without_a_manager_nothing_is_said_and_nothing_fails() {
        for env in [
            &[][..],
            &[(SOCKET, OsStr::new(""))][..],
            &[(WATCHDOG_USEC, OsStr::new("1000000"))][..],
        ] {
            let notifier = notifier(env).unwrap();
            assert_eq!(notifier.watchdog_interval(), None);
            notifier.ready("").unwrap();
            notifier.watchdog();
            notifier.stopping("");
        }
    }

    #[test]
    fn a_socket_that_cannot_be_is_an_error_at_the_start() {
        for name in ["relative/path", "@", "vsock:2:1234"] {
            let answer = notifier(&[(SOCKET, OsStr::new(name))]);
            assert!(
                matches!(answer, Err(NotifyError::Address(_))),
                "{name}: {answer:?}"
            );
        }
        let long = format!("/{}", "x".repeat(200));
        let answer = notifier(&[(SOCKET, OsStr::new(&long))]);
        assert!(
            matches!(answer, Err(NotifyError::Resolve { .. })),
            "{answer:?}"
        );
        let unreachable = notifier(&[(SOCKET, OsStr::new("/nonexistent/notify"))]).unwrap();
        assert!(matches!(
            unreachable.ready(""),
            Err(NotifyError::Ready { .. })
        ));
        // The worker goes on if the manager is gone.
        unreachable.watchdog();
        unreachable.status("");
    }

    #[test]
    fn a_manager_that_does_not_read_does_not_hold_up_the_worker() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let _listener = UnixDatagram::bind(&path).unwrap();
        let notifier = notifier(&[(SOCKET, path.as_os_str())]).unwrap();
        let full = (0..100_000).find_map(|_| notifier.ready("").err());
        let Some(NotifyError::Ready { source, .. }) = full else {
            panic!("the queue of the socket has no end");
        };
        assert_eq!(source.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn the_watchdog_is_ours_only_if_it_names_us_or_nobody() {
        let interval = |usec: &str, pid: Option<&str>| {
            let mut env = vec![
                (SOCKET, OsStr::new("/run/systemd/notify")),
                (WATCHDOG_USEC, OsStr::new(usec)),
            ];
            env.extend(pid.map(|pid| (WATCHDOG_PID, OsStr::new(pid))));
            notifier(&env).unwrap().watchdog_interval()
        };
        let half = Some(Duration::from_secs(15));
        assert_eq!(interval("30000000", None), half);
        assert_eq!(interval("30000000", Some("77")), half);
        assert_eq!(interval("1", None), Some(Duration::from_micros(1)));
        for (usec, pid) in [
            ("30000000", Some("78")),
            ("30000000", Some("")),
            ("0", None),
            ("-1", None),
            ("soon", None),
        ] {
            assert_eq!(interval(usec, pid), None, "{usec} {pid:?}");
        }
    }
}
