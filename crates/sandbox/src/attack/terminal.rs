//! The attack on the caller's terminal: it types text that the caller's shell would read.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use super::calls;
use super::{AttackAim, AttackResult, Attempts};

pub fn inject(aim: &AttackAim<'_>) -> AttackResult {
    let text = format!("{}\n", aim.mark);
    let inject_text = |terminal: BorrowedFd<'_>| -> io::Result<()> {
        text.bytes()
            .try_for_each(|byte| calls::inject_byte(terminal, byte))
    };
    let controlling = || {
        let mut options = File::options();
        let flags = libc::O_NOCTTY;
        let terminal = options
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open("/dev/tty")?;
        inject_text(terminal.as_fd())
    };
    let mut attempts = Attempts::default().add("/dev/tty", "typed", controlling());
    for (name, stream) in [
        ("standard input", rustix::stdio::stdin()),
        ("standard output", rustix::stdio::stdout()),
        ("standard error", rustix::stdio::stderr()),
    ] {
        attempts = attempts.add(name, "typed", inject_text(stream));
    }
    attempts.result()
}
