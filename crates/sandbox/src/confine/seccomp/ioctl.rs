//! The rule for ioctl: which commands the program may use.

use super::rule::{self, Action, CallRule, DENY, is, masked, when};

/// Composes an ioctl command as the kernel's _IOC does on both architectures. Direction 1 writes, 2 reads.
const fn command(direction: u32, group: u8, number: u8, size: u32) -> u32 {
    direction << 30 | size << 16 | (group as u32) << 8 | number as u32
}

/// The commands that some reachable descriptor understands and that an analysis may need. The others get ENOTTY,
/// which a descriptor that does not know a command answers. Among those are encryption keys and policies, fs-verity,
/// btrfs subvolumes (which the reaper could not remove), space reservation that bypasses fallocate (FS_IOC_RESVSP),
/// virtual consoles, and every device driver.
#[rustfmt::skip]
pub(super) fn rule() -> CallRule {
    const GROUP: u32 = 0xff00;
    const TERMINAL: u32 = 0x5400;
    const SOCKET: u32 = 0x8900;
    // TIOCSTI injects input into a terminal and TIOCLINUX pastes into one. TIOCCONS redirects the console's output.
    // TIOCSETD (0x5423) puts rarely used kernel drivers between the two ends of a terminal.
    let terminal_denied = [libc::TIOCSTI as u32, libc::TIOCLINUX as u32, libc::TIOCCONS as u32, 0x5423];
    // A file's flags (immutable, append-only) would keep the workspace from being removed. A file's project id
    // decides against which disk quota it counts. Each command is listed in its encodings for long and for int.
    let file_denied = [
        command(1, b'f', 2, 8), command(1, b'f', 2, 4), // FS_IOC_SETFLAGS
        command(1, b'v', 2, 8), command(1, b'v', 2, 4), // FS_IOC_SETVERSION
        command(1, b'X', 32, 28),                       // FS_IOC_FSSETXATTR
    ];
    let file_allowed = [
        2,                                              // FIGETBSZ, the block size
        command(2, b'f', 1, 8), command(2, b'f', 1, 4), // FS_IOC_GETFLAGS
        command(2, b'v', 1, 8), command(2, b'v', 1, 4), // FS_IOC_GETVERSION
        command(2, b'X', 31, 28),                       // FS_IOC_FSGETXATTR
        command(3, b'f', 11, 32),                       // FS_IOC_FIEMAP, by which cp finds holes
        command(1, 0x94, 9, 4),                         // FICLONE
        command(1, 0x94, 13, 32),                       // FICLONERANGE
        command(2, b'R', 0, 4),                         // RNDGETENTCNT, by which libsodium waits for entropy
    ];
    // Queries about interfaces; the only one is the loopback. The setters need CAP_NET_ADMIN, and some others
    // (bridges, VLANs) load modules before they check for it.
    let socket_allowed = [
        0x8901, 0x8902, 0x8903, 0x8904, 0x8905, 0x8906, // FIOSETOWN, SIOCSPGRP, their getters, SIOCATMARK, SIOCGSTAMP
        0x8910, 0x8912, 0x8913, 0x8915, 0x8917, 0x8919, // SIOCGIF: NAME, CONF, FLAGS, ADDR, DSTADDR, BRDADDR
        0x891b, 0x891d, 0x8921, 0x8927, 0x8933, 0x8942, // SIOCGIF: NETMASK, METRIC, MTU, HWADDR, INDEX, TXQLEN
        0x8946,                                         // SIOCETHTOOL, by which psutil asks for a link's speed
    ];
    rule::rule(
        vec![
            when([is(1, &terminal_denied)], DENY),
            // Every other terminal command, and FIONREAD, FIONBIO, FIOCLEX, FIOASYNC, which share the group. Job
            // control needs TIOCSPGRP and TCSETS. script, tmux and pty.spawn need TIOCSCTTY on a pty of their own,
            // which is harmless: the only reachable terminals are those of the sandbox's own devpts.
            when([masked(1, GROUP, &[TERMINAL])], Action::Allow),
            when([is(1, &file_allowed)], Action::Allow),
            when([is(1, &file_denied)], DENY),
            when([is(1, &socket_allowed)], Action::Allow),
            when([masked(1, GROUP, &[SOCKET])], DENY),
        ],
        Action::Errno(libc::ENOTTY),
    )
}
