//! Attacks that would gain privilege, or that use kernel subsystems through which others have gained it.

use std::fs::OpenOptions;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{CWD, Mode};
use rustix::mount::{FsOpenFlags, MountFlags, OpenTreeFlags, UnmountFlags};

use super::calls;
use super::{AttackAim, AttackFailure, AttackResult, any_of};
use crate::sys::{self, Arg, Call, ForkSide};

/// How long the set-user-id program runs so that the host can examine it.
const OBSERVATION_TIME: Duration = Duration::from_millis(600);

/// Runs a set-user-id program of the system with the mark on its command line. The program is only asked for its help
/// text, and its output is a full pipe, so it blocks, and an observer outside sees under which ids it runs.
pub fn set_user_id(aim: &AttackAim<'_>) -> AttackResult {
    let program = Path::new(aim.target);
    let metadata = std::fs::metadata(program)?;
    if metadata.mode() & 0o4000 == 0 {
        return Err(AttackFailure::Unable(
            "it is not a set-user-id program".into(),
        ));
    }
    let (_read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&write, true)?;
    let page = [0u8; 4096];
    while rustix::io::write(&write, &page).is_ok() {}
    rustix::io::ioctl_fionbio(&write, false)?;
    let mut child = Command::new(program)
        .args(["--help", aim.mark])
        .stdin(Stdio::null())
        .stdout(write.try_clone()?)
        .stderr(write)
        .spawn()?;
    std::thread::sleep(OBSERVATION_TIME);
    let ended = child.try_wait()?;
    let _ = child.kill();
    let ended = match ended {
        Some(status) => status,
        None => return Ok("ran until it was stopped".into()),
    };
    Err(AttackFailure::Refused(match ended.signal() {
        Some(n) => format!("ended at once by signal {n}"),
        None => format!("ended at once with {}", ended.code().unwrap_or(-1)),
    }))
}

/// Makes a file that would give the attacker's identity to whoever executes it.
pub fn set_user_id_file(aim: &AttackAim<'_>) -> AttackResult {
    const MODE: u32 = 0o4755;
    let name = |how: &str| format!("{how}-{}", aim.mark);
    rustix::process::umask(Mode::empty());
    let check_set_id_bit = |path: &str| match std::fs::metadata(path)?.mode() & 0o6000 {
        0 => Err(AttackFailure::Refused("has no such bit".into())),
        _ => Ok("it carries the bit".to_owned()),
    };
    let mut by_chmod = || {
        let path = name("chmod");
        std::fs::write(&path, "")?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(MODE))?;
        check_set_id_bit(&path)
    };
    let mut by_fchmod = || {
        let path = name("fchmod");
        let file = std::fs::File::create_new(&path)?;
        file.set_permissions(std::fs::Permissions::from_mode(MODE))?;
        check_set_id_bit(&path)
    };
    let mut by_open = || {
        let path = name("open");
        let mut options = OpenOptions::new();
        options
            .write(true)
            .create_new(true)
            .mode(MODE)
            .open(&path)?;
        check_set_id_bit(&path)
    };
    let mut by_mknod = || {
        let path = name("mknod");
        let kind = rustix::fs::FileType::RegularFile;
        rustix::fs::mknodat(CWD, &path, kind, Mode::from_raw_mode(MODE), 0)?;
        check_set_id_bit(&path)
    };
    any_of(&mut [
        ("chmod", &mut by_chmod),
        ("fchmod", &mut by_fchmod),
        ("open", &mut by_open),
        ("mknod", &mut by_mknod),
    ])
}

pub fn user_namespace(_aim: &AttackAim<'_>) -> AttackResult {
    let mut by_unshare = || {
        sys::unshare(libc::CLONE_NEWUSER)?;
        Ok("entered".into())
    };
    let result_of = |forked: ForkSide| match forked {
        ForkSide::Child => sys::exit_now(0),
        ForkSide::Parent { .. } => "made".to_owned(),
    };
    let mut by_clone = || Ok(result_of(calls::clone_into(libc::CLONE_NEWUSER)?));
    let mut by_clone3 = || Ok(result_of(calls::clone3_into(libc::CLONE_NEWUSER)?));
    any_of(&mut [
        ("clone", &mut by_clone),
        ("clone3", &mut by_clone3),
        ("unshare", &mut by_unshare),
    ])
}

pub fn mount(aim: &AttackAim<'_>) -> AttackResult {
    let mount_point = format!("mount-{}", aim.mark);
    std::fs::create_dir(&mount_point)?;
    let mut tmpfs = || {
        rustix::mount::mount(
            "none",
            mount_point.as_str(),
            "tmpfs",
            MountFlags::empty(),
            None,
        )?;
        Ok("mounted".into())
    };
    let mut bind = || {
        rustix::mount::mount_bind("/", mount_point.as_str())?;
        Ok("mounted".into())
    };
    let mut remount = || {
        rustix::mount::mount_remount("/", MountFlags::BIND, "")?;
        Ok("changed".into())
    };
    let mut tree = || {
        rustix::mount::open_tree(CWD, "/", OpenTreeFlags::OPEN_TREE_CLONE)?;
        Ok("copied".into())
    };
    let mut context = || {
        rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        Ok("opened".into())
    };
    let mut unmount = || {
        rustix::mount::unmount(mount_point.as_str(), UnmountFlags::DETACH)?;
        Ok("done".into())
    };
    let mut root = || {
        rustix::process::chroot(mount_point.as_str())?;
        Ok("changed".into())
    };
    any_of(&mut [
        ("tmpfs", &mut tmpfs),
        ("bind", &mut bind),
        ("remount", &mut remount),
        ("open_tree", &mut tree),
        ("fsopen", &mut context),
        ("umount", &mut unmount),
        ("chroot", &mut root),
    ])
}

pub fn io_uring(_aim: &AttackAim<'_>) -> AttackResult {
    let mut parameters = [0u8; 256];
    let args = &mut [Arg::Number(4), Arg::Bytes(&mut parameters)];
    sys::attempt(Call::IO_URING_SETUP, args)?;
    Ok("a ring".into())
}

pub fn bpf(_aim: &AttackAim<'_>) -> AttackResult {
    const BPF_MAP_CREATE: i64 = 0;
    // An array of one 4-byte value.
    let mut map = [0u8; 128];
    for (n, field) in [2u32, 4, 4, 1].into_iter().enumerate() {
        map[n * 4..n * 4 + 4].copy_from_slice(&field.to_ne_bytes());
    }
    let size = map.len() as i64;
    let args = &mut [
        Arg::Number(BPF_MAP_CREATE),
        Arg::Bytes(&mut map),
        Arg::Number(size),
    ];
    sys::attempt(Call::BPF, args)?;
    Ok("a map".into())
}

pub fn perf(_aim: &AttackAim<'_>) -> AttackResult {
    // PERF_TYPE_SOFTWARE, this size, PERF_COUNT_SW_TASK_CLOCK, for this process, user-space code only.
    let mut event = [0u8; 64];
    event[..4].copy_from_slice(&1u32.to_ne_bytes());
    event[4..8].copy_from_slice(&64u32.to_ne_bytes());
    event[8..16].copy_from_slice(&1u64.to_ne_bytes());
    const EXCLUDE_KERNEL_AND_HYPERVISOR: u64 = 1 << 5 | 1 << 6;
    event[40..48].copy_from_slice(&EXCLUDE_KERNEL_AND_HYPERVISOR.to_ne_bytes());
    let args = &mut [
        Arg::Bytes(&mut event),
        Arg::Number(0),
        Arg::Number(-1),
        Arg::Number(-1),
        Arg::Number(0),
    ];
    sys::attempt(Call::PERF_EVENT_OPEN, args)?;
    Ok("a counter".into())
}

pub fn keyring(aim: &AttackAim<'_>) -> AttackResult {
    // Adds a key to a keyring. -2 is the process keyring.
    let add = |ring: i64| {
        let name = std::ffi::CString::new(aim.mark)
            .map_err(|_| AttackFailure::Unable("a mark with a NUL byte".into()))?;
        let mut content = *b"kept";
        let args = &mut [
            Arg::Text(c"user"),
            Arg::Text(&name),
            Arg::Bytes(&mut content),
            Arg::Number(4),
            Arg::Number(ring),
        ];
        sys::attempt(Call::ADD_KEY, args)?;
        Ok("a key".to_owned())
    };
    let mut describe = || {
        const KEYCTL_GET_KEYRING_ID: i64 = 0;
        const USER_KEYRING: i64 = -4;
        let args = &mut [
            Arg::Number(KEYCTL_GET_KEYRING_ID),
            Arg::Number(USER_KEYRING),
            Arg::Number(0),
        ];
        sys::attempt(Call::KEYCTL, args)?;
        Ok("the user's is known".into())
    };
    any_of(&mut [
        ("of the process", &mut || add(-2)),
        ("keyctl", &mut describe),
    ])
}

pub fn userfaultfd(_aim: &AttackAim<'_>) -> AttackResult {
    const USER_MODE_ONLY: i64 = 1;
    let mut user_mode = || {
        sys::attempt(Call::USERFAULTFD, &mut [Arg::Number(USER_MODE_ONLY)])?;
        Ok("a descriptor".into())
    };
    let mut device = || {
        OpenOptions::new().read(true).open("/dev/userfaultfd")?;
        Ok("opened".into())
    };
    any_of(&mut [("the call", &mut user_mode), ("the device", &mut device)])
}

/// Calls the kernel through another ABI, in which the numbers mean other calls to a filter.
#[cfg(target_arch = "x86_64")]
pub fn foreign_abi(_aim: &AttackAim<'_>) -> AttackResult {
    let own = rustix::process::getpid().as_raw_pid();
    let check_answer = |answer: i32| match answer == own {
        true => Ok("answered".to_owned()),
        false => Err(std::io::Error::from_raw_os_error(-answer).into()),
    };
    let mut x32 = || check_answer(sys::attempt(Call::X32_GETPID, &mut [])? as i32);
    // Last: where this ABI is refused or unknown, the kernel may kill the process.
    let mut i386 = || check_answer(sys::getpid_i386());
    any_of(&mut [("x32", &mut x32), ("i386", &mut i386)])
}

#[cfg(not(target_arch = "x86_64"))]
pub fn foreign_abi(_aim: &AttackAim<'_>) -> AttackResult {
    // A process can enter the 32-bit ARM ABI only by executing a 32-bit program.
    Err(AttackFailure::Unable(
        "this machine has no second table of calls".into(),
    ))
}
