//! Trials as a real unprivileged user: an account with its own uid, made once by root.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

pub const ACCOUNT: &str = "fumehood-test";
const INNER: &str = "__plain_trial";

/// Where the account can execute this test and the binary: a checkout below a home directory is closed to it.
static REACHABLE: OnceLock<PathBuf> = OnceLock::new();

/// The name of the trial that this process was started for, as the plain user.
pub fn inner_trial() -> Option<String> {
    let mut args = std::env::args().skip(1);
    (args.next()? == INNER).then(|| args.next().unwrap())
}

/// The binary under test, where whoever runs this can execute it.
pub fn binary() -> PathBuf {
    match inner_trial() {
        Some(_) => std::env::current_exe().unwrap().with_file_name("fumehood"),
        None => PathBuf::from(env!("CARGO_BIN_EXE_fumehood")),
    }
}

/// Runs one trial under the test account.
pub fn run(name: &str) -> Result<(), String> {
    let (uid, gid) = account();
    let output = Command::new(reachable().join("cli"))
        .args([INNER, name])
        .env_clear()
        .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
        .env("HOME", format!("/home/{ACCOUNT}"))
        .current_dir("/")
        .uid(uid)
        .gid(gid)
        .output()
        .map_err(|e| format!("start as {ACCOUNT}: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!(
            "{}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}

/// The account's uid and gid; makes the account if it is not there.
pub fn account() -> (u32, u32) {
    static ONCE: OnceLock<(u32, u32)> = OnceLock::new();
    *ONCE.get_or_init(|| {
        find().unwrap_or_else(|| {
            let made = Command::new("useradd")
                .args(["--create-home", ACCOUNT])
                .status()
                .unwrap();
            // Another test process may have been first.
            find().unwrap_or_else(|| panic!("useradd {ACCOUNT}: {made}"))
        })
    })
}

fn find() -> Option<(u32, u32)> {
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap();
    let line = passwd
        .lines()
        .find(|l| l.starts_with(&format!("{ACCOUNT}:")))?;
    let mut fields = line.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// A directory with copies of this test and of the binary that anyone can execute.
pub fn reachable() -> &'static Path {
    REACHABLE.get_or_init(|| {
        let dir = tempfile::Builder::new()
            .prefix("fumehood-tests-")
            .tempdir_in("/var/tmp")
            .unwrap()
            .keep();
        for (from, name) in [
            (std::env::current_exe().unwrap(), "cli"),
            (PathBuf::from(env!("CARGO_BIN_EXE_fumehood")), "fumehood"),
        ] {
            // By another process: a descriptor of ours, open for writing, could be inherited by a child of another
            // thread just now, and the copy could not be executed while it is.
            let copied = Command::new("cp").arg(from).arg(dir.join(name)).status();
            assert!(copied.unwrap().success());
        }
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        dir
    })
}

/// Removes the copies.
pub fn clear() {
    if let Some(dir) = REACHABLE.get() {
        std::fs::remove_dir_all(dir).unwrap();
    }
}
