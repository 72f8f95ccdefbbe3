//! Attacks on files: change, read, list, measure and lock files that are not the program's own.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FlockOperation, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, XattrFlags,
};

use super::{AttackAim, AttackResult, Attempts, LINKED_NAME_PREFIX, c_string, refused, unable};
use crate::sys::{self, Arg, Call};

/// Attempts the attack on every target. Each target is another path to the same file.
pub fn try_each_path(
    aim: &AttackAim<'_>,
    mut attempt: impl FnMut(&Path) -> AttackResult,
) -> AttackResult {
    let mut attempts = Attempts::default();
    for path in aim.paths() {
        attempts = attempts.add_result(path.display(), attempt(path));
    }
    attempts.result()
}

/// Changes the content of a file, or the entries of its directory.
pub fn change(aim: &AttackAim<'_>) -> AttackResult {
    let write = |options: &OpenOptions, path: &Path| -> io::Result<()> {
        options.open(path)?.write_all(aim.mark.as_bytes())
    };
    try_each_path(aim, |path| {
        let beside = |suffix: &str| OsString::from_iter([path.as_os_str(), suffix.as_ref()]);
        let rename = || {
            std::fs::rename(path, beside(".moved"))?;
            std::fs::rename(beside(".moved"), path)
        };
        let overwrite = write(File::options().write(true), path);
        let append = write(File::options().append(true), path);
        Attempts::default()
            .add("overwrite", "written", overwrite)
            .add("append", "written", append)
            .add("create", "made", std::fs::write(beside(".new"), aim.mark))
            .add("mkdir", "made", std::fs::create_dir(beside(".dir")))
            .add("rename", "done", rename())
            .add("unlink", "done", std::fs::remove_file(path))
            .result()
    })
}

/// Makes a new file at each target.
pub fn create(aim: &AttackAim<'_>) -> AttackResult {
    try_each_path(aim, |path| {
        let mut file = File::options().write(true).create_new(true).open(path)?;
        file.write_all(aim.mark.as_bytes())?;
        Ok("made".into())
    })
}

pub fn truncate(aim: &AttackAim<'_>) -> AttackResult {
    try_each_path(aim, |path| {
        let name = c_string(path.as_os_str().as_bytes())?;
        let by_name = sys::attempt(Call::TRUNCATE, &mut [Arg::Text(&name), Arg::Number(0)]);
        let flags = OFlags::RDONLY | OFlags::TRUNC | OFlags::CLOEXEC;
        let by_opening = rustix::fs::open(path, flags, Mode::empty());
        Attempts::default()
            .add("truncate", "done", by_name)
            .add("open with O_TRUNC", "done", by_opening)
            .result()
    })
}

pub fn change_mode(aim: &AttackAim<'_>) -> AttackResult {
    let mode = || std::fs::Permissions::from_mode(0o640);
    try_each_path(aim, |path| {
        let name = c_string(path.as_os_str().as_bytes())?;
        let by_descriptor = || File::open(path)?.set_permissions(mode());
        let by_link = || std::fs::set_permissions(descriptor_path(&File::open(path)?), mode());
        let here = Arg::Number(i64::from(libc::AT_FDCWD));
        let args = &mut [here, Arg::Text(&name), Arg::Number(0o640), Arg::Number(0)];
        Attempts::default()
            .add("chmod", "done", std::fs::set_permissions(path, mode()))
            .add("fchmod", "done", by_descriptor())
            .add("chmod of /proc/self/fd", "done", by_link())
            .add("fchmodat2", "done", sys::attempt(Call::FCHMODAT2, args))
            .result()
    })
}

fn descriptor_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

pub fn change_times(aim: &AttackAim<'_>) -> AttackResult {
    let long_ago = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    set_times(aim, long_ago)
}

/// Sets the times to now. A process that may write to a file may do this, and everybody may write to some devices.
pub fn set_times_to_now(aim: &AttackAim<'_>) -> AttackResult {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    set_times(aim, now)
}

fn set_times(aim: &AttackAim<'_>, time: Timespec) -> AttackResult {
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    try_each_path(aim, |path| {
        let by_descriptor = || Ok::<_, io::Error>(rustix::fs::futimens(File::open(path)?, &times)?);
        let by_name = rustix::fs::utimensat(CWD, path, &times, AtFlags::empty());
        Attempts::default()
            .add("utimensat", "done", by_name)
            .add("futimens", "done", by_descriptor())
            .result()
    })
}

pub fn change_attributes(aim: &AttackAim<'_>) -> AttackResult {
    let (name, value, flags) = ("user.fumehood", aim.mark.as_bytes(), XattrFlags::empty());
    try_each_path(aim, |path| {
        let by_descriptor = || -> io::Result<()> {
            Ok(rustix::fs::fsetxattr(
                File::open(path)?,
                name,
                value,
                flags,
            )?)
        };
        let by_name = rustix::fs::setxattr(path, name, value, flags);
        Attempts::default()
            .add("setxattr", "set", by_name)
            .add("fsetxattr", "set", by_descriptor())
            .result()
    })
}

/// Gives somebody else's file a name of the attacker's own, through which the file could be changed, or kept alive.
pub fn link(aim: &AttackAim<'_>) -> AttackResult {
    let own = format!("linked-{}", aim.mark);
    try_each_path(aim, |path| {
        let by_descriptor = || -> io::Result<()> {
            let file = File::open(path)?;
            let own = format!("{own}-by-descriptor");
            let flags = AtFlags::SYMLINK_FOLLOW;
            Ok(rustix::fs::linkat(
                CWD,
                descriptor_path(&file),
                CWD,
                own,
                flags,
            )?)
        };
        let by_rename = || std::fs::rename(path, format!("{own}-moved"));
        Attempts::default()
            .add("link", "made", std::fs::hard_link(path, &own))
            .add("link of a descriptor", "made", by_descriptor())
            .add("rename", "moved", by_rename())
            .result()
    })
}

pub fn read(aim: &AttackAim<'_>) -> AttackResult {
    try_each_path(aim, |path| {
        let content = std::fs::read(path)?;
        Ok(String::from_utf8_lossy(&content).into_owned())
    })
}

pub fn list(aim: &AttackAim<'_>) -> AttackResult {
    try_each_path(aim, |path| {
        let names = std::fs::read_dir(path)?.flatten().map(|e| e.file_name());
        let names: Vec<String> = names.map(|n| n.to_string_lossy().into_owned()).collect();
        Ok(names.join(" "))
    })
}

pub fn size(aim: &AttackAim<'_>) -> AttackResult {
    try_each_path(aim, |path| {
        Ok(format!("size {}", std::fs::metadata(path)?.size()))
    })
}

/// Tries to lock a file that the caller has locked. If the attacker sees that lock, it could also have taken the lock
/// first and kept the caller waiting.
pub fn lock(aim: &AttackAim<'_>) -> AttackResult {
    try_each_path(aim, |path| {
        let file = File::open(path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => Ok("met the lock that the host holds".into()),
            Err(e) => Err(e.into()),
            Ok(()) => refused("is locked apart from the host"),
        }
    })
}

/// Makes entries that betray a collector which follows names: direct and indirect links to the secret, through
/// directories and descriptors; files that block a reader; and names that lead upwards.
pub fn farm(aim: &AttackAim<'_>) -> AttackResult {
    let paths = aim.paths();
    let [secret, directory] = paths[..] else {
        return unable("a secret file and its directory are needed");
    };
    let relative = secret.strip_prefix("/").unwrap_or(secret);
    std::fs::create_dir("farm")?;
    for (leads_to, name) in [
        (secret, "secret.txt"),
        (Path::new("secret.txt"), "farm/chained.txt"),
        (Path::new("../secret.txt"), "farm/up.txt"),
        (
            &Path::new(&"../".repeat(7)).join(relative),
            "farm/roundabout.txt",
        ),
        (directory, "farm/directory"),
        (Path::new("/"), "farm/root"),
        (
            &Path::new("/proc/self/root").join(relative),
            "farm/by-proc.txt",
        ),
        (Path::new("/proc/self/environ"), "farm/environ"),
        (Path::new("loop"), "farm/loop"),
        (secret, "result.json"),
    ] {
        symlink(leads_to, name)?;
    }
    let owner = Mode::from_raw_mode(0o600);
    // A reader of a FIFO or socket would wait forever. Where they cannot be made, this part of the attack is void.
    let _ = rustix::fs::mknodat(CWD, "farm/fifo", rustix::fs::FileType::Fifo, owner, 0);
    let _listener = std::os::unix::net::UnixListener::bind("farm/socket");
    // The kernel refuses a hard link across file systems.
    let _ = std::fs::hard_link(secret, "farm/hard.txt");
    // The collector's control: an ordinary file, which must be collected.
    let mut options = File::options();
    let ordinary = options.write(true).create_new(true).mode(0o600);
    ordinary
        .open("ordinary.txt")?
        .write_all(aim.mark.as_bytes())?;
    Ok("grown".into())
}

/// Makes one file with many names. A collector that counts its bytes once and copies every name copies far more than
/// it counted.
pub fn hard_links(_aim: &AttackAim<'_>) -> AttackResult {
    const NAMES: usize = 16;
    const BYTES: usize = 256 << 10;
    let name = |n: usize| format!("{LINKED_NAME_PREFIX}{n}");
    std::fs::write(name(0), vec![b'x'; BYTES])?;
    for n in 1..NAMES {
        std::fs::hard_link(name(0), name(n))?;
    }
    Ok(format!("{NAMES} names of {} KiB", BYTES >> 10))
}
