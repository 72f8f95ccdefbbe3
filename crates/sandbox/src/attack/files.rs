//! Attacks on files: change, read, list, measure and lock files that are not the program's own.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FlockOperation, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, XattrFlags,
};

use super::{
    AttackAim, AttackFailure, AttackResult, LINKED_NAME_PREFIX, any_of, c_path, with_suffix,
};
use crate::sys::{self, Arg, Call};

/// Attempts the attack on every target. Each target is another path to the same file.
fn try_each_path(
    aim: &AttackAim<'_>,
    mut attempt: impl FnMut(&Path) -> AttackResult,
) -> AttackResult {
    let mut successes = Vec::new();
    let mut refusals = Vec::new();
    for path in aim.paths() {
        match attempt(path) {
            Ok(what) => successes.push(format!("{}: {what}", path.display())),
            Err(AttackFailure::Refused(why) | AttackFailure::Unable(why)) => {
                refusals.push(format!("{} {why}", path.display()));
            }
        }
    }
    match successes.is_empty() {
        false => Ok(successes.join("; ")),
        true => Err(AttackFailure::Refused(refusals.join(", "))),
    }
}

/// Changes the content of a file, or the entries of its directory.
pub fn change(aim: &AttackAim<'_>) -> AttackResult {
    try_each_path(aim, |path| {
        let mut overwrite = || {
            let mut file = OpenOptions::new().write(true).open(path)?;
            file.write_all(aim.mark.as_bytes())?;
            Ok("written".into())
        };
        let mut append = || {
            let mut file = OpenOptions::new().append(true).open(path)?;
            file.write_all(aim.mark.as_bytes())?;
            Ok("written".into())
        };
        let mut create = || {
            std::fs::write(with_suffix(path, ".new"), aim.mark)?;
            Ok("made".into())
        };
        let mut directory = || {
            std::fs::create_dir(with_suffix(path, ".dir"))?;
            Ok("made".into())
        };
        let mut rename = || {
            std::fs::rename(path, with_suffix(path, ".moved"))?;
            std::fs::rename(with_suffix(path, ".moved"), path)?;
            Ok("done".into())
        };
        let mut remove = || {
            std::fs::remove_file(path)?;
            Ok("done".into())
        };
        any_of(&mut [
            ("overwrite", &mut overwrite),
            ("append", &mut append),
            ("create", &mut create),
            ("mkdir", &mut directory),
            ("rename", &mut rename),
            ("unlink", &mut remove),
        ])
    })
}

/// Makes a new file at each target.
pub fn create(aim: &AttackAim<'_>) -> AttackResult {
    try_each_path(aim, |path| {
        let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
        file.write_all(aim.mark.as_bytes())?;
        Ok("made".into())
    })
}

pub fn truncate(aim: &AttackAim<'_>) -> AttackResult {
    try_each_path(aim, |path| {
        let name = c_path(path)?;
        let mut by_name = || {
            sys::attempt(Call::TRUNCATE, &mut [Arg::Text(&name), Arg::Number(0)])?;
            Ok("done".into())
        };
        let mut by_opening = || {
            let flags = OFlags::RDONLY | OFlags::TRUNC | OFlags::CLOEXEC;
            rustix::fs::open(path, flags, Mode::empty())?;
            Ok("done".into())
        };
        any_of(&mut [
            ("truncate", &mut by_name),
            ("open with O_TRUNC", &mut by_opening),
        ])
    })
}

pub fn change_mode(aim: &AttackAim<'_>) -> AttackResult {
    let mode = || std::fs::Permissions::from_mode(0o640);
    try_each_path(aim, |path| {
        let name = c_path(path)?;
        let mut by_name = || {
            std::fs::set_permissions(path, mode())?;
            Ok("done".into())
        };
        let mut by_descriptor = || {
            File::open(path)?.set_permissions(mode())?;
            Ok("done".into())
        };
        let mut by_link = || {
            let file = File::open(path)?;
            let link = format!("/proc/self/fd/{}", file.as_raw_fd());
            std::fs::set_permissions(link, mode())?;
            Ok("done".into())
        };
        let mut by_newer_call = || {
            let here = Arg::Number(i64::from(libc::AT_FDCWD));
            let args = &mut [here, Arg::Text(&name), Arg::Number(0o640), Arg::Number(0)];
            sys::attempt(Call::FCHMODAT2, args)?;
            Ok("done".into())
        };
        any_of(&mut [
            ("chmod", &mut by_name),
            ("fchmod", &mut by_descriptor),
            ("chmod of /proc/self/fd", &mut by_link),
            ("fchmodat2", &mut by_newer_call),
        ])
    })
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
        let mut by_name = || {
            rustix::fs::utimensat(CWD, path, &times, AtFlags::empty())?;
            Ok("done".into())
        };
        let mut by_descriptor = || {
            rustix::fs::futimens(File::open(path)?, &times)?;
            Ok("done".into())
        };
        any_of(&mut [
            ("utimensat", &mut by_name),
            ("futimens", &mut by_descriptor),
        ])
    })
}

pub fn change_attributes(aim: &AttackAim<'_>) -> AttackResult {
    let (name, value) = ("user.fumehood", aim.mark.as_bytes());
    try_each_path(aim, |path| {
        let mut by_name = || {
            rustix::fs::setxattr(path, name, value, XattrFlags::empty())?;
            Ok("set".into())
        };
        let mut by_descriptor = || {
            rustix::fs::fsetxattr(File::open(path)?, name, value, XattrFlags::empty())?;
            Ok("set".into())
        };
        any_of(&mut [
            ("setxattr", &mut by_name),
            ("fsetxattr", &mut by_descriptor),
        ])
    })
}

/// Gives somebody else's file a name of the attacker's own, through which the file could be changed, or kept alive.
pub fn link(aim: &AttackAim<'_>) -> AttackResult {
    let own = format!("linked-{}", aim.mark);
    try_each_path(aim, |path| {
        let mut by_name = || {
            std::fs::hard_link(path, &own)?;
            Ok("made".into())
        };
        let mut by_descriptor = || {
            let file = File::open(path)?;
            let descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
            let own = format!("{own}-by-descriptor");
            rustix::fs::linkat(CWD, descriptor, CWD, own, AtFlags::SYMLINK_FOLLOW)?;
            Ok("made".into())
        };
        let mut by_rename = || {
            std::fs::rename(path, format!("{own}-moved"))?;
            Ok("moved".into())
        };
        any_of(&mut [
            ("link", &mut by_name),
            ("link of a descriptor", &mut by_descriptor),
            ("rename", &mut by_rename),
        ])
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
            Ok(()) => Err(AttackFailure::Refused(
                "is locked apart from the host".into(),
            )),
        }
    })
}

/// Makes entries that betray a collector which follows names: direct and indirect links to the secret, through
/// directories and descriptors; files that block a reader; and names that lead upwards.
pub fn farm(aim: &AttackAim<'_>) -> AttackResult {
    let paths = aim.paths();
    let [secret, directory] = paths[..] else {
        return Err(AttackFailure::Unable(
            "a secret file and its directory are needed".into(),
        ));
    };
    let above = Path::new("..").join("..").join("..").join("..").join("..");
    let relative = secret.strip_prefix("/").unwrap_or(secret);
    std::fs::create_dir("farm")?;
    symlink(secret, "secret.txt")?;
    symlink("secret.txt", "farm/chained.txt")?;
    symlink("../secret.txt", "farm/up.txt")?;
    symlink(
        above.join("..").join("..").join(relative),
        "farm/roundabout.txt",
    )?;
    symlink(directory, "farm/directory")?;
    symlink("/", "farm/root")?;
    symlink(
        Path::new("/proc/self/root").join(relative),
        "farm/by-proc.txt",
    )?;
    symlink("/proc/self/environ", "farm/environ")?;
    symlink("loop", "farm/loop")?;
    symlink(secret, "result.json")?;
    let owner = Mode::from_raw_mode(0o600);
    // A reader of a FIFO or socket would wait forever. Where they cannot be made, this part of the attack is void.
    let _ = rustix::fs::mknodat(CWD, "farm/fifo", rustix::fs::FileType::Fifo, owner, 0);
    let _listener = std::os::unix::net::UnixListener::bind("farm/socket");
    // The kernel refuses a hard link across file systems.
    let _ = std::fs::hard_link(secret, "farm/hard.txt");
    // The collector's control: an ordinary file, which must be collected.
    let mut ordinary = OpenOptions::new();
    let ordinary = ordinary.write(true).create_new(true).mode(0o600);
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
