//! Trials as a real unprivileged user: an account with its own uid, made once by root.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

const ACCOUNT: &str = "fumehood-test";
const INNER: &str = "__plain_trial";

/// The name of the trial that this process was started for, as the plain user.
pub fn inner_trial() -> Option<String> {
    let mut args = std::env::args().skip(1);
    (args.next()? == INNER).then(|| args.next().unwrap())
}

/// Runs one trial under the test account.
pub fn run(name: &str) -> Result<(), String> {
    let (uid, gid) = account();
    let output = Command::new(reachable_copy())
        .args([INNER, name])
        .env_clear()
        .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
        .env("HOME", format!("/home/{ACCOUNT}"))
        .envs(std::env::var_os(crate::hood::LEVEL).map(|level| (crate::hood::LEVEL, level)))
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
    static ONCE: std::sync::OnceLock<(u32, u32)> = std::sync::OnceLock::new();
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

/// This binary where anyone can execute it: a checkout below a home directory is closed to the account.
fn reachable_copy() -> PathBuf {
    static ONCE: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    ONCE.get_or_init(|| {
        let own = std::env::current_exe().unwrap();
        let meta = std::fs::metadata(&own).unwrap();
        let dir = PathBuf::from(format!(
            "/var/tmp/fumehood-tests-{}-{}",
            meta.ino(),
            meta.mtime()
        ));
        let copy = dir.join("promises");
        if !copy.exists() {
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
            let draft = dir.join(format!("draft-{}", std::process::id()));
            // By another process: a descriptor of ours, open for writing, could be inherited by a child of another
            // thread just now, and the copy could not be executed while it is.
            let copied = Command::new("cp").arg(&own).arg(&draft).status();
            assert!(copied.unwrap().success());
            std::fs::rename(&draft, &copy).unwrap();
        }
        copy
    })
    .clone()
}
