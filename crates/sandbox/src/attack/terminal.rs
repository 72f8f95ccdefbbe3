//! The attack on the caller's terminal: it types text that the caller's shell would read.

use std::os::fd::AsFd;

use rustix::fs::{Mode, OFlags};

use super::calls;
use super::{AttackAim, AttackResult, any_of};

pub fn inject(aim: &AttackAim<'_>) -> AttackResult {
    let text = format!("{}\n", aim.mark);
    let inject_text = |terminal: std::os::fd::BorrowedFd<'_>| -> AttackResult {
        for byte in text.bytes() {
            calls::inject_byte(terminal, byte)?;
        }
        Ok("typed".into())
    };
    let mut controlling = || {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
        let terminal = rustix::fs::open("/dev/tty", flags, Mode::empty())?;
        inject_text(terminal.as_fd())
    };
    any_of(&mut [
        ("/dev/tty", &mut controlling),
        (
            "standard input",
            &mut || inject_text(rustix::stdio::stdin()),
        ),
        ("standard output", &mut || {
            inject_text(rustix::stdio::stdout())
        }),
        ("standard error", &mut || {
            inject_text(rustix::stdio::stderr())
        }),
    ])
}
