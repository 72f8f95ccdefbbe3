//! The attack on the caller's terminal: to type into it what the caller's shell will read.

use std::os::fd::AsFd;

use rustix::fs::{Mode, OFlags};

use super::calls;
use super::{AttackAim, AttackResult, any_of};

pub fn inject(aim: &AttackAim<'_>) -> AttackResult {
    let text = format!("{}\n", aim.mark);
    let type_into = |terminal: std::os::fd::BorrowedFd<'_>| -> AttackResult {
        for byte in text.bytes() {
            calls::type_into(terminal, byte)?;
        }
        Ok("typed".into())
    };
    let mut controlling = || {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
        let terminal = rustix::fs::open("/dev/tty", flags, Mode::empty())?;
        type_into(terminal.as_fd())
    };
    any_of(&mut [
        ("/dev/tty", &mut controlling),
        ("standard input", &mut || type_into(rustix::stdio::stdin())),
        (
            "standard output",
            &mut || type_into(rustix::stdio::stdout()),
        ),
        ("standard error", &mut || type_into(rustix::stdio::stderr())),
    ])
}
