#!/usr/bin/python3 -I
"""Runs a command as Docker would have it inside an unprivileged container, as far as a sandbox can tell.

    docker_like.py [--user NAME] [--no-seccomp] [--no-masks] [--no-capabilities] -- COMMAND [ARGS]

The host stays the same. The script changes three things for the command:

- A filter refuses the system calls that Docker's default profile refuses without CAP_SYS_ADMIN. Nothing can remove the
  filter.
- Docker's masks lie over /proc and /sys in a separate mount namespace, and cgroups are read-only (as root only).
- Of root's capabilities, the command keeps the fourteen that Docker keeps.

It works on any x86_64 host, as root or as a plain user. A plain user cannot mount, so the script leaves the masks out
and says so. `--user NAME`, as root, sets everything up and then becomes that user, like `docker run --user`.

Each flag that leaves a part out stands for an option of Docker: `--no-seccomp` for `--security-opt seccomp=unconfined`,
`--no-masks` for `--security-opt systempaths=unconfined`, `--no-capabilities` for the part of `--privileged` that leaves
all capabilities.
"""

import argparse
import ctypes
import os
import platform
import pwd
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)

EPERM, ENOSYS = 1, 38

# System calls of x86_64 that the profile does not allow to a container without further capabilities. They get EPERM,
# the profile's default action.
REFUSED = {
    # Namespaces, mounts and roots: what CAP_SYS_ADMIN would allow.
    "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "sethostname": 170, "setdomainname": 171, "quotactl": 179, "quotactl_fd": 443, "lookup_dcookie": 212,
    "fanotify_init": 300, "syslog": 103,
    # Opening a file by its handle bypasses every mount: CAP_DAC_READ_SEARCH.
    "open_by_handle_at": 304,
    # Other processes: CAP_SYS_PTRACE.
    "kcmp": 312, "pidfd_getfd": 438, "process_madvise": 440,
    # Attack surface that no profile since version 25 leaves open.
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
    "keyctl": 250, "add_key": 248, "request_key": 249,
    # Memory placement: CAP_SYS_NICE.
    "mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "migrate_pages": 256, "move_pages": 279,
    "set_mempolicy_home_node": 450,
    # The machine itself.
    "init_module": 175, "finit_module": 313, "delete_module": 176, "create_module": 174, "query_module": 178,
    "get_kernel_syms": 177, "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "swapon": 167, "swapoff": 168,
    "acct": 163, "iopl": 172, "ioperm": 173, "settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305,
    "vhangup": 153, "nfsservctl": 180, "uselib": 134, "ustat": 136, "sysfs": 139, "_sysctl": 156,
}
CLONE, CLONE3, SOCKET, PERSONALITY = 56, 435, 41, 135
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
CLONE_NEW = 0x7E020000
AF_VSOCK = 40
PERSONALITIES = (0x0, 0x0008, 0x20000, 0x20008, 0xFFFFFFFF)

AUDIT_ARCH_X86_64 = 0xC000003E
LD, JEQ, JGE, JSET, RET = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NR, ARCH, ARG0 = 0, 4, 16

# CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE NET_RAW SYS_CHROOT MKNOD AUDIT_WRITE SETFCAP
KEPT = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)

# The paths that Docker's default specification masks by a mount, and the paths that it makes read-only.
MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
    "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
CLONE_NEWNS, CLONE_NEWCGROUP = 0x20000, 0x02000000
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 22, 24, 38, 47
CAPABILITY_VERSION_3 = 0x20080522
SYS_MOUNT_SETATTR, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, 0x8000, 1


def checked(result, what):
    if result != 0:
        errno = ctypes.get_errno()
        sys.exit(f"docker_like.py: {what}: {os.strerror(errno)}")


def mount(source, target, kind, flags, options=None):
    as_bytes = [None if text is None else text.encode() for text in (source, target, kind, options)]
    checked(libc.mount(as_bytes[0], as_bytes[1], as_bytes[2], ctypes.c_ulong(flags), as_bytes[3]), f"mount on {target}")


def read_only(path):
    mount(path, path, None, MS_BIND | MS_REC)
    mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def masks():
    # The cgroup namespace is made where Docker makes it; on cgroup v2 it is the default.
    checked(libc.unshare(CLONE_NEWNS | CLONE_NEWCGROUP), "unshare")
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    for path in MASKED:
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=0k")
        elif os.path.exists(path):
            mount("/dev/null", path, None, MS_BIND)
    for path in READ_ONLY:
        if os.path.exists(path):
            read_only(path)
    # /sys and the cgroups in it.
    attributes = struct.pack("=QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    made = libc.syscall(SYS_MOUNT_SETATTR, -100, b"/sys", AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))
    checked(made, "make /sys read-only")


def program():
    """Returns the filter as one list of instructions. Each test ends the filter or continues with the next test."""
    code = []

    def op(opcode, constant, on_true=0, on_false=0):
        code.append(struct.pack("=HBBI", opcode, on_true, on_false, constant))

    def refuse(errno):
        op(RET, ERRNO | errno)

    op(LD, ARCH)
    op(JEQ, AUDIT_ARCH_X86_64, 1, 0)
    # Docker filters 32-bit programs by the names of the same calls. The host's own tools need no 32-bit programs, so
    # this filter refuses all their calls.
    refuse(EPERM)
    op(LD, NR)
    # The x32 numbers.
    op(JGE, 0x40000000, 0, 1)
    refuse(EPERM)
    for number in sorted(REFUSED.values()):
        op(JEQ, number, 0, 1)
        refuse(EPERM)
    # clone3 gets ENOSYS, because its flags are in memory that a filter cannot read. C libraries then fall back to
    # clone.
    op(JEQ, CLONE3, 0, 1)
    refuse(ENOSYS)

    op(JEQ, CLONE, 0, 4)
    op(LD, ARG0)
    op(JSET, CLONE_NEW, 0, 1)
    refuse(EPERM)
    op(RET, ALLOW)

    op(JEQ, SOCKET, 0, 4)
    op(LD, ARG0)
    op(JEQ, AF_VSOCK, 0, 1)
    refuse(EPERM)
    op(RET, ALLOW)

    op(JEQ, PERSONALITY, 0, 2 + 2 * len(PERSONALITIES))
    op(LD, ARG0)
    for value in PERSONALITIES:
        op(JEQ, value, 0, 1)
        op(RET, ALLOW)
    refuse(EPERM)

    op(RET, ALLOW)
    return b"".join(code)


def install_filter():
    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    holder = ctypes.create_string_buffer(header, len(header))
    checked(libc.prctl(PR_SET_SECCOMP, 2, holder, 0, 0), "install the system call filter")


def bound_capabilities():
    with open("/proc/sys/kernel/cap_last_cap") as last:
        highest = int(last.read())
    for capability in range(highest + 1):
        if capability not in KEPT:
            checked(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), f"drop capability {capability}")
    libc.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0)


def set_capabilities(kept):
    mask = sum(1 << capability for capability in kept)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    # The effective and permitted sets. The inheritable set is empty, as in Docker since version 20.10.14.
    data = struct.pack("=IIIIII", low, low, 0, high, high, 0)
    checked(libc.capset(header, data), "set the capabilities")


def become(name):
    account = pwd.getpwnam(name)
    os.setgroups([])
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    os.environ.update(HOME=account.pw_dir, USER=name, LOGNAME=name)


def main():
    parser = argparse.ArgumentParser(usage=__doc__, add_help=False)
    parser.add_argument("--user")
    parser.add_argument("--no-seccomp", action="store_true")
    parser.add_argument("--no-masks", action="store_true")
    parser.add_argument("--no-capabilities", action="store_true")
    parser.add_argument("command", nargs="+")
    wanted = parser.parse_args()
    if platform.machine() != "x86_64":
        sys.exit("docker_like.py: the numbers of the system calls are those of x86_64")
    root = os.geteuid() == 0
    if wanted.user and not root:
        sys.exit("docker_like.py: --user needs root")

    if not wanted.no_masks:
        if root:
            masks()
        else:
            print("docker_like.py: a plain user cannot mask /proc", file=sys.stderr)
    if root and not wanted.no_capabilities:
        bound_capabilities()
    # Install the filter before giving up root. A plain user may install a filter only with no_new_privs, which disables
    # set-user-id programs, and Docker does not ask for that.
    if not wanted.no_seccomp:
        if not root:
            checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")
        install_filter()
    if wanted.user:
        become(wanted.user)
    elif root and not wanted.no_capabilities:
        set_capabilities(KEPT)
    os.execvp(wanted.command[0], wanted.command)


main()
