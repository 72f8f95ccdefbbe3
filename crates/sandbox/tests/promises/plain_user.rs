//! Trials in a process of their own: as a real unprivileged user, with an account that root makes once, or at another
//! level than this process's.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use sandbox::spec::ConfinementLevel;

const ACCOUNT: &str = "fumehood-test";
const INNER: &str = "__plain_trial";

/// Whose trial it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Who {
    Root,
    Plain,
}

/// The name of the trial that this process was started for.
pub fn inner_trial() -> Option<String> {
    let mut args = std::env::args().skip(1);
    (args.next()? == INNER).then(|| args.next().unwrap())
}

/// Runs one trial in a process of its own; root's plain user is the test account.
pub fn run(name: &str, who: Who, level: ConfinementLevel) -> Result<(), String> {
    let mut command = match who {
        Who::Plain if crate::hood::is_root() => as_account(),
        Who::Plain | Who::Root => Command::new("/proc/self/exe"),
    };
    let output = command
        .args([INNER, name])
        .env(crate::hood::LEVEL, level.as_str())
        .output()
        .map_err(|e| format!("start {name} again: {e}"))?;
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

fn as_account() -> Command {
    let (uid, gid) = account();
    let mut command = Command::new(reachable_copy());
    command
        .env_clear()
        .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
        .env("HOME", format!("/home/{ACCOUNT}"))
        .current_dir("/")
        .uid(uid)
        .gid(gid);
    command
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
