//! Attacks that would gain privilege, or that use kernel subsystems through which others have gained it.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode};
use rustix::mount::{FsOpenFlags, MountFlags, OpenTreeFlags, UnmountFlags};

use super::{AttackAim, AttackResult, Attempts, c_string, refused, unable};
use crate::sys::Arg::{Bytes, Number, Text};
use crate::sys::{self, Call, ForkSide};

/// How long the set-user-id program runs so that the host can examine it.
const OBSERVATION_TIME: Duration = Duration::from_millis(600);

/// Runs a set-user-id program of the system with the mark on its command line. The program is only asked for its help
/// text, and its output is a full pipe, so it blocks, and an observer outside sees under which ids it runs.
pub fn set_user_id(aim: &AttackAim<'_>) -> AttackResult {
    let program = Path::new(aim.target);
    let metadata = std::fs::metadata(program)?;
    if metadata.mode() & 0o4000 == 0 {
        return unable("it is not a set-user-id program");
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
    let Some(ended) = ended else {
        return Ok("ran until it was stopped".into());
    };
    refused(match ended.signal() {
        Some(n) => format!("ended at once by signal {n}"),
        None => format!("ended at once with {}", ended.code().unwrap_or(-1)),
    })
}

/// Makes a file that would give the attacker's identity to whoever executes it.
pub fn set_user_id_file(aim: &AttackAim<'_>) -> AttackResult {
    const MODE: u32 = 0o4755;
    let mode = || std::fs::Permissions::from_mode(MODE);
    rustix::process::umask(Mode::empty());
    let try_way = |way: &str, make: &dyn Fn(&str) -> io::Result<()>| {
        let path = format!("{way}-{}", aim.mark);
        make(&path)?;
        match std::fs::metadata(path)?.mode() & 0o6000 {
            0 => refused("has no such bit"),
            _ => Ok("it carries the bit".to_owned()),
        }
    };
    let chmod = |path: &str| {
        std::fs::write(path, "")?;
        std::fs::set_permissions(path, mode())
    };
    let fchmod = |path: &str| File::create_new(path)?.set_permissions(mode());
    let open = |path: &str| {
        let mut options = File::options();
        let options = options.write(true).create_new(true).mode(MODE);
        options.open(path).map(drop)
    };
    let mknod = |path: &str| {
        let (kind, mode) = (FileType::RegularFile, Mode::from_raw_mode(MODE));
        Ok(rustix::fs::mknodat(CWD, path, kind, mode, 0)?)
    };
    Attempts::default()
        .add_result("chmod", try_way("chmod", &chmod))
        .add_result("fchmod", try_way("fchmod", &fchmod))
        .add_result("open", try_way("open", &open))
        .add_result("mknod", try_way("mknod", &mknod))
        .result()
}

pub fn user_namespace(_aim: &AttackAim<'_>) -> AttackResult {
    let made = |forked: io::Result<ForkSide>| match forked {
        Ok(ForkSide::Child) => sys::exit_now(0),
        parent => parent,
    };
    let namespace = libc::CLONE_NEWUSER;
    Attempts::default()
        .add("clone", "made", made(sys::clone_into(namespace)))
        .add("clone3", "made", made(sys::clone3_into(namespace)))
        .add("unshare", "entered", sys::unshare(namespace))
        .result()
}

pub fn mount(aim: &AttackAim<'_>) -> AttackResult {
    use rustix::mount;
    let point = format!("mount-{}", aim.mark);
    std::fs::create_dir(&point)?;
    let tmpfs = || mount::mount("none", &point, "tmpfs", MountFlags::empty(), None);
    let remount = || mount::mount_remount("/", MountFlags::BIND, "");
    let tree = || mount::open_tree(CWD, "/", OpenTreeFlags::OPEN_TREE_CLONE);
    let context = || mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC);
    let unmount = || mount::unmount(&point, UnmountFlags::DETACH);
    Attempts::default()
        .add("tmpfs", "mounted", tmpfs())
        .add("bind", "mounted", mount::mount_bind("/", &point))
        .add("remount", "changed", remount())
        .add("open_tree", "copied", tree())
        .add("fsopen", "opened", context())
        .add("umount", "done", unmount())
        .add("chroot", "changed", rustix::process::chroot(&point))
        .result()
}

pub fn io_uring(_aim: &AttackAim<'_>) -> AttackResult {
    let mut parameters = [0u8; 256];
    let args = &mut [Number(4), Bytes(&mut parameters)];
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
    let args = &mut [Number(BPF_MAP_CREATE), Bytes(&mut map), Number(128)];
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
    let [pid, cpu, group, flags] = [0, -1, -1, 0].map(Number);
    let args = &mut [Bytes(&mut event), pid, cpu, group, flags];
    sys::attempt(Call::PERF_EVENT_OPEN, args)?;
    Ok("a counter".into())
}

pub fn keyring(aim: &AttackAim<'_>) -> AttackResult {
    const PROCESS_KEYRING: i64 = -2;
    const KEYCTL_GET_KEYRING_ID: i64 = 0;
    const USER_KEYRING: i64 = -4;
    let name = c_string(aim.mark.as_bytes())?;
    let mut content = *b"kept";
    let (kind, [size, ring]) = (Text(c"user"), [4, PROCESS_KEYRING].map(Number));
    let add = &mut [kind, Text(&name), Bytes(&mut content), size, ring];
    let describe = [KEYCTL_GET_KEYRING_ID, USER_KEYRING, 0];
    let describe = || sys::attempt(Call::KEYCTL, &mut describe.map(Number));
    Attempts::default()
        .add("of the process", "a key", sys::attempt(Call::ADD_KEY, add))
        .add("keyctl", "the user's is known", describe())
        .result()
}

pub fn userfaultfd(_aim: &AttackAim<'_>) -> AttackResult {
    const USER_MODE_ONLY: i64 = 1;
    let by_call = || sys::attempt(Call::USERFAULTFD, &mut [Number(USER_MODE_ONLY)]);
    Attempts::default()
        .add("the call", "a descriptor", by_call())
        .add("the device", "opened", File::open("/dev/userfaultfd"))
        .result()
}

/// Calls the kernel through another ABI, in which the numbers mean other calls to a filter.
#[cfg(target_arch = "x86_64")]
pub fn foreign_abi(_aim: &AttackAim<'_>) -> AttackResult {
    let own = rustix::process::getpid().as_raw_pid();
    let check_answer = |answer: i32| match answer == own {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(-answer)),
    };
    let x32 = || check_answer(sys::attempt(Call::X32_GETPID, &mut [])? as i32);
    Attempts::default()
        .add("x32", "answered", x32())
        // Last: where this ABI is refused or unknown, the kernel may kill the process.
        .add("i386", "answered", check_answer(sys::getpid_i386()))
        .result()
}

#[cfg(not(target_arch = "x86_64"))]
pub fn foreign_abi(_aim: &AttackAim<'_>) -> AttackResult {
    // A process can enter the 32-bit ARM ABI only by executing a 32-bit program.
    unable("this machine has no second table of calls")
}
