//! What a worker tells the service manager that started it, by datagrams to the socket named in `NOTIFY_SOCKET`
//! (sd_notify(3)): that it takes work, that it is alive, what it does, that it is leaving. Without such a socket it
//! tells nobody.
//!
//! By hand, because it is one system call. The socket is asked for once, when the worker starts; what goes to it is
//! bounded in size and in the time it may take, so that a manager that hangs does not hold up the worker.

use std::cell::{Cell, RefCell};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::time::{Duration, Instant};

/// All three are for the worker alone: a runner outlives it, and must not be able to speak for the one that comes after. So
/// whoever starts a runner removes them from its environment.
const SOCKET: &str = "NOTIFY_SOCKET";
const WATCHDOG_USEC: &str = "WATCHDOG_USEC";
const WATCHDOG_PID: &str = "WATCHDOG_PID";

/// systemd takes messages of at most a page, and shows the status in one line.
const STATUS_CHARS_MAX: usize = 200;
/// The socket's queue is short. A manager that does not read for so long is asked again with the next message.
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

/// The way to the service manager, if there is one.
#[derive(Debug, Default)]
pub struct Notifier {
    to: Option<Manager>,
    watchdog_interval: Option<Duration>,
    /// When it was last told that we live.
    lived_at: Cell<Option<Instant>>,
    /// The line it has of us. Each costs it a message to whoever looks on.
    told: RefCell<String>,
}

#[derive(Debug)]
struct Manager {
    name: OsString,
    address: SocketAddr,
    socket: UnixDatagram,
}

impl Notifier {
    /// The environment is our own, as the manager set it; a name that is there and is wrong is an error, because a
    /// manager that waits for us would end us after its time.
    pub fn from_env() -> Result<Notifier, NotifyError> {
        Notifier::new(|name| std::env::var_os(name), std::process::id())
    }

    fn new(env: impl Fn(&str) -> Option<OsString>, pid: u32) -> Result<Notifier, NotifyError> {
        let Some(name) = env(SOCKET).filter(|name| !name.is_empty()) else {
            return Ok(Notifier::default());
        };
        let number = |name| env(name).and_then(|value| value.to_str()?.parse::<u64>().ok());
        // One that names another process was inherited by mistake and is not about us (sd_watchdog_enabled(3)).
        let is_ours = env(WATCHDOG_PID).is_none() || number(WATCHDOG_PID) == Some(u64::from(pid));
        let period = number(WATCHDOG_USEC).filter(|usec| is_ours && *usec > 0);
        let address = address(&name)?;
        let socket = UnixDatagram::unbound().map_err(NotifyError::Socket)?;
        socket
            .set_write_timeout(Some(SEND_WITHIN))
            .map_err(NotifyError::Socket)?;
        Ok(Notifier {
            to: Some(Manager {
                name,
                address,
                socket,
            }),
            watchdog_interval: period.map(|usec| Duration::from_micros(usec.div_ceil(2))),
            ..Notifier::default()
        })
    }

    /// How often [`Notifier::watchdog`] is to be called at least: twice in the time after which the manager takes the worker for
    /// hung. `None`: nobody watches.
    pub fn watchdog_interval(&self) -> Option<Duration> {
        self.watchdog_interval
    }

    /// The worker takes work from now on. To be said once, after everything that may fail at the start.
    pub fn ready(&self, status: &str) -> Result<(), NotifyError> {
        let Some(manager) = &self.to else {
            return Ok(());
        };
        let line = status_line(status);
        let sent = manager.send(&format!("READY=1\n{line}"));
        self.told.replace(line);
        sent.map_err(|source| NotifyError::Ready {
            name: manager.name.clone(),
            source,
        })
    }

    /// The loop goes round. To be called from that loop itself: a thread of its own would live on in a worker that
    /// does nothing any more. However often it is called, the manager hears of it as often as it must.
    pub fn watchdog(&self) {
        let Some(interval) = self.watchdog_interval else {
            return;
        };
        let recently = |at: Instant| at.elapsed() < interval / 2;
        if !self.lived_at.get().is_some_and(recently) && self.tell("WATCHDOG=1") {
            self.lived_at.set(Some(Instant::now()));
        }
    }

    /// One line for `systemctl status`, which is sent if it is another than before.
    pub fn status(&self, text: &str) {
        let line = status_line(text);
        if *self.told.borrow() != line && self.tell(&line) {
            self.told.replace(line);
        }
    }

    /// The worker is about to exit. Not to be said by one that waits for its runners: from here on the manager counts
    /// TimeoutStopSec= and kills.
    pub fn stopping(&self, status: &str) {
        self.tell(&format!("STOPPING=1\n{}", status_line(status)));
    }

    /// Whether it was heard. What is lost of these is made up for by the next, or by our exit.
    fn tell(&self, message: &str) -> bool {
        let sent = self.to.as_ref().map(|manager| manager.send(message));
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

/// A path, or after `@` the name of a socket that is on no file system, as managers in containers have it.
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

/// Each line of a message is a statement of its own, so a text must not bring another: ids and reasons may be in it.
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

    fn heard(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 4096];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    }

    fn says_all_of_it(to: &OsStr, listener: &UnixDatagram) {
        listener
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let usec = OsStr::new("3600000000");
        let notifier = notifier(&[(SOCKET, to), (WATCHDOG_USEC, usec)]).unwrap();
        notifier.ready("8 slots").unwrap();
        assert_eq!(heard(listener), "READY=1\nSTATUS=8 slots");
        notifier.watchdog();
        assert_eq!(heard(listener), "WATCHDOG=1");
        // What it knows already is not told again: the next it hears is something else.
        notifier.watchdog();
        notifier.status("8 slots");
        notifier.status("one\nMAINPID=1\0\u{1b}[m");
        assert_eq!(heard(listener), "STATUS=one MAINPID=1  [m");
        notifier.status(&"é".repeat(5000));
        assert_eq!(heard(listener).chars().count(), 7 + STATUS_CHARS_MAX);
        notifier.stopping("bye");
        assert_eq!(heard(listener), "STOPPING=1\nSTATUS=bye");
    }

    #[test]
    fn the_manager_hears_each_of_them_at_a_path_and_at_an_abstract_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let listener = UnixDatagram::bind(&path).unwrap();
        says_all_of_it(path.as_os_str(), &listener);

        let name = format!("fumehood-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixDatagram::bind_addr(&address).unwrap();
        says_all_of_it(OsStr::new(&format!("@{name}")), &listener);
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
        let nobody = notifier(&[(SOCKET, OsStr::new("/nonexistent/notify"))]).unwrap();
        assert!(matches!(nobody.ready(""), Err(NotifyError::Ready { .. })));
        // A manager that is gone is no reason for the worker to go.
        nobody.watchdog();
        nobody.status("");
    }

    #[test]
    fn a_manager_that_does_not_read_does_not_hold_up_the_worker() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let _deaf = UnixDatagram::bind(&path).unwrap();
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
