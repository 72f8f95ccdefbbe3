//! Attacks on the limits of disk and files with files that no directory shows. Each attack holds its files for as
//! long as its target says, so that a watch has time to find them.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::RecvTimeoutError;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::{AttackAim, AttackResult, calls, refused, unable};

/// Fewer than the descriptors that any process may have.
const UNLINKED_FILES: usize = 200;
const HELD_FILES: usize = 8;
const HELD_FILE_BYTES: usize = 4 << 20;

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

/// Makes files that only descriptors hold.
pub fn unlinked(aim: &AttackAim<'_>) -> AttackResult {
    let files: Vec<File> = (0..UNLINKED_FILES)
        .map(|_| unlinked_file())
        .collect::<Result<_, _>>()?;
    std::thread::sleep(aim.milliseconds()?);
    Ok(format!("{} files without a name held", files.len()))
}

/// Makes files that only system calls hold: a thread waits in `sendfile` for a peer that does not read, and another
/// thread closes the file's descriptor.
pub fn held_by_calls(aim: &AttackAim<'_>) -> AttackResult {
    const START_TIMEOUT: Timespec = Timespec {
        tv_sec: 10,
        tv_nsec: 0,
    };
    let (result_sender, results) = std::sync::mpsc::channel();
    let content = vec![b'x'; HELD_FILE_BYTES];
    let mut sockets = Vec::new();
    for _ in 0..HELD_FILES {
        let mut file = unlinked_file()?;
        file.write_all(&content)?;
        file.rewind()?;
        let (sender, peer) = UnixStream::pair()?;
        let (to, from, result_sender) =
            (sender.as_raw_fd(), file.as_raw_fd(), result_sender.clone());
        std::thread::spawn(move || result_sender.send(calls::send_file(to, from, HELD_FILE_BYTES)));
        // Once data has arrived, the call holds its file. The call blocks, because the socket's queue is smaller than
        // the file.
        let mut waiting = [PollFd::new(&peer, PollFlags::IN)];
        if rustix::event::poll(&mut waiting, Some(&START_TIMEOUT))? == 0 {
            return unable("sendfile did not begin");
        }
        drop(file);
        sockets.push((sender, peer));
    }
    match results.recv_timeout(aim.milliseconds()?) {
        Err(RecvTimeoutError::Timeout) => Ok(format!(
            "{} MiB held by {} calls",
            (HELD_FILES * HELD_FILE_BYTES) >> 20,
            sockets.len()
        )),
        Ok(_) | Err(RecvTimeoutError::Disconnected) => {
            refused("the calls were interrupted and let go")
        }
    }
}
