//! Numbers of calls that libc 0.2 does not name on every target that Fumehood is built for. Since Linux 5.1 a new call
//! has the same number on every architecture (include/uapi/asm-generic/unistd.h). Older numbers are given per target.

use libc::c_long;

#[cfg(target_arch = "aarch64")]
mod older {
    pub const RENAMEAT: super::c_long = 38;
    pub const SYNC_FILE_RANGE: super::c_long = 84;
    pub const GETRLIMIT: super::c_long = 163;
    pub const SETRLIMIT: super::c_long = 164;
    pub const IO_PGETEVENTS: super::c_long = 292;
    pub const KEXEC_FILE_LOAD: super::c_long = 294;
}
#[cfg(target_arch = "x86_64")]
mod older {
    pub const RENAMEAT: super::c_long = libc::SYS_renameat;
    pub const SYNC_FILE_RANGE: super::c_long = libc::SYS_sync_file_range;
    pub const GETRLIMIT: super::c_long = libc::SYS_getrlimit;
    pub const SETRLIMIT: super::c_long = libc::SYS_setrlimit;
    pub const IO_PGETEVENTS: super::c_long = 333;
    pub const KEXEC_FILE_LOAD: super::c_long = libc::SYS_kexec_file_load;
    pub const URETPROBE: super::c_long = 335;
    pub const UPROBE: super::c_long = 336;
}
pub use older::*;

pub const CACHESTAT: c_long = 451;
pub const FCHMODAT2: c_long = 452;
pub const MAP_SHADOW_STACK: c_long = 453;
pub const FUTEX_WAKE: c_long = 454;
pub const FUTEX_WAIT: c_long = 455;
pub const FUTEX_REQUEUE: c_long = 456;
pub const STATMOUNT: c_long = 457;
pub const LISTMOUNT: c_long = 458;
pub const LSM_GET_SELF_ATTR: c_long = 459;
pub const LSM_SET_SELF_ATTR: c_long = 460;
pub const LSM_LIST_MODULES: c_long = 461;
pub const MSEAL: c_long = 462;
pub const SETXATTRAT: c_long = 463;
pub const GETXATTRAT: c_long = 464;
pub const LISTXATTRAT: c_long = 465;
pub const REMOVEXATTRAT: c_long = 466;
pub const OPEN_TREE_ATTR: c_long = 467;
pub const FILE_GETATTR: c_long = 468;
pub const FILE_SETATTR: c_long = 469;
