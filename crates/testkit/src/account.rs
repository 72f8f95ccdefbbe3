//! The plain user: an account with a uid of its own, which root makes once.

use std::process::Command;
use std::sync::OnceLock;

/// The name of the account.
pub const ACCOUNT: &str = "fumehood-test";

/// The account's uid and gid. Makes the account if it does not exist.
pub fn uid_and_gid() -> (u32, u32) {
    static ONCE: OnceLock<(u32, u32)> = OnceLock::new();
    *ONCE.get_or_init(|| {
        find_in_passwd().unwrap_or_else(|| {
            let made = Command::new("useradd")
                .args(["--create-home", ACCOUNT])
                .status()
                .unwrap();
            // useradd fails if another test process has just made the account.
            find_in_passwd().unwrap_or_else(|| panic!("useradd {ACCOUNT}: {made}"))
        })
    })
}

fn find_in_passwd() -> Option<(u32, u32)> {
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap();
    let line = passwd
        .lines()
        .find(|l| l.starts_with(&format!("{ACCOUNT}:")))?;
    let mut fields = line.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}
