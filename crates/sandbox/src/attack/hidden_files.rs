//! Attacks on the limits of disk and files by files that no directory shows. Whoever looks for them is given time: each
//! attack holds what it has for as long as its target says.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::RecvTimeoutError;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::{AttackAim, AttackFailure, AttackResult, calls};

/// Fewer than the descriptors that any process may have.
const UNLINKED: usize = 200;
const HELD: usize = 8;
const HELD_BYTES: usize = 4 << 20;

fn unlinked_file() -> io::Result<File> {
    const NAME: &str = "unlinked";
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(NAME)?;
    std::fs::remove_file(NAME)?;
    Ok(file)
}

/// Files that only descriptors hold.
pub fn unlinked(aim: &AttackAim<'_>) -> AttackResult {
    let files: Vec<File> = (0..UNLINKED)
        .map(|_| unlinked_file())
        .collect::<Result<_, _>>()?;
    std::thread::sleep(aim.milliseconds()?);
    Ok(format!("{} files without a name held", files.len()))
}

/// Files that only system calls hold: a thread waits in `sendfile` for a peer that does not read, and another thread
/// closes the descriptor.
pub fn held_by_calls(aim: &AttackAim<'_>) -> AttackResult {
    const BEGINS_WITHIN: Timespec = Timespec {
        tv_sec: 10,
        tv_nsec: 0,
    };
    let (tell, ended) = std::sync::mpsc::channel();
    let content = vec![b'x'; HELD_BYTES];
    let mut sockets = Vec::new();
    for _ in 0..HELD {
        let mut file = unlinked_file()?;
        file.write_all(&content)?;
        file.rewind()?;
        let (sender, peer) = UnixStream::pair()?;
        let (to, from, tell) = (sender.as_raw_fd(), file.as_raw_fd(), tell.clone());
        std::thread::spawn(move || tell.send(calls::send_file(to, from, HELD_BYTES)));
        // Once something has arrived, the call has its file; and it waits, because the socket's queue is smaller.
        let mut waiting = [PollFd::new(&peer, PollFlags::IN)];
        if rustix::event::poll(&mut waiting, Some(&BEGINS_WITHIN))? == 0 {
            return Err(AttackFailure::Unable("sendfile did not begin".into()));
        }
        drop(file);
        sockets.push((sender, peer));
    }
    match ended.recv_timeout(aim.milliseconds()?) {
        Err(RecvTimeoutError::Timeout) => Ok(format!(
            "{} MiB held by {} calls",
            (HELD * HELD_BYTES) >> 20,
            sockets.len()
        )),
        Ok(_) | Err(RecvTimeoutError::Disconnected) => Err(AttackFailure::Refused(
            "the calls were interrupted and let go".into(),
        )),
    }
}
