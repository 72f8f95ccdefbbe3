//! Transfers a filter from init, which compiles it, to the child, which installs it.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::net::{RecvFlags, SendFlags};

use crate::sys::Instruction;

/// The maximal number of instructions that the kernel accepts.
const INSTRUCTIONS_MAX: usize = 4096;

/// Sends a filter to the process that is to install it, over a socket that preserves message boundaries.
pub fn send(to: BorrowedFd<'_>, filter: &[Instruction]) -> io::Result<()> {
    let bytes = |i: &Instruction| -> [u8; 8] {
        let ([a, b], [e, f, g, h]) = (i.code.to_ne_bytes(), i.k.to_ne_bytes());
        [a, b, i.jt, i.jf, e, f, g, h]
    };
    let message: Vec<u8> = filter.iter().flat_map(bytes).collect();
    rustix::net::send(to, &message, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Waits for a filter.
///
/// # Errors Fails if the sender has closed the socket, or if the message is not a filter.
pub fn receive(from: BorrowedFd<'_>) -> io::Result<Vec<Instruction>> {
    let mut message = vec![0; 8 * INSTRUCTIONS_MAX];
    let (_, len) = rustix::net::recv(from, &mut message, RecvFlags::TRUNC)?;
    let (instructions, rest) = message.get(..len).unwrap_or_default().as_chunks();
    if instructions.is_empty() || !rest.is_empty() {
        return Err(io::Error::other("no valid filter was received"));
    }
    let read = |[a, b, jt, jf, e, f, g, h]: &[u8; 8]| Instruction {
        code: u16::from_ne_bytes([*a, *b]),
        jt: *jt,
        jf: *jf,
        k: u32::from_ne_bytes([*e, *f, *g, *h]),
    };
    Ok(instructions.iter().map(read).collect())
}
