#!/usr/bin/python3 -I
"""Shows who can exhaust the kernel tables that all processes of a host share. Runs as root in a virtual machine with
little memory.

    host_tables.py FUMEHOOD [files|filters|tcp...]

The same program attacks each table outside Fumehood, as a plain user (the control: the table is then used up for everybody),
and inside a run with default limits, started by root and by a plain user. Prints `ok NAME: figures` or `FAILED NAME: why` for
each, and exits with 1 if any failed. It changes settings of the machine, so use a machine
that has no other purpose.
"""

import errno
import json
import os
import pwd
import shutil
import subprocess
import sys
import time
import traceback

ACCOUNT = "fumehood-test"
BINARY = "/usr/local/bin/fumehood-vm"
PLACE = "/opt/host-tables"
ATTACK = f"{PLACE}/attack"
# The bound for a program that hangs. It is generous, because emulated processors are slow.
WAIT_S = 240

# `attack WHAT [HOW OFTEN]` takes what it can, prints `held`, and stays until its input ends. `probe-*` tries once and
# prints the name of the error, or `fine`.
SOURCE = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int filter(void) {
    enum { LENGTH = 4000 };
    static struct sock_filter code[LENGTH];
    for (int n = 0; n < LENGTH - 1; n++) code[n] = (struct sock_filter)BPF_STMT(BPF_ALU | BPF_ADD | BPF_K, n);
    code[LENGTH - 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = { LENGTH, code };
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
}
/* As many as one process may have. */
static int filters(void) {
    int made = 0;
    while (made < 8 && filter() == 0) made++;
    return made;
}
static void files(void) {
    while (open("/dev/null", O_RDONLY) >= 0) {}
}
/* Each is a file of its own to the kernel. */
static void mappings(void) {
    while (mmap(0, 4096, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0) != MAP_FAILED) {}
}
static void pour(int fd) {
    static char data[65536];
    while (send(fd, data, sizeof data, MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {}
}
static void connections(void) {
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (void *)&at, length) || listen(listener, 64) || getsockname(listener, (void *)&at, &length)) return;
    static int held[8192];
    int count = 0;
    while (count < 8000) {
        int near = socket(AF_INET, SOCK_STREAM, 0);
        if (near < 0 || connect(near, (void *)&at, length)) break;
        int far = accept(listener, 0, 0);
        if (far < 0) break;
        held[count++] = near, held[count++] = far;
        pour(near), pour(far);
    }
    /* What has arrived makes room for more to send. */
    for (int again = 0; again < 3; again++)
        for (int n = 0; n < count; n++) pour(held[n]);
}
static const char *told(int failed) {
    static char number[32];
    const char *name = strerrorname_np(errno);
    snprintf(number, sizeof number, "error-%d", errno);
    return !failed ? "fine" : name ? name : number;
}

int main(int argc, char **argv) {
    const char *what = argv[1];
    int times = argc > 2 ? atoi(argv[2]) : 1, done[2], told_of[2];
    struct rlimit most = { 4096, 4096 };
    setrlimit(RLIMIT_NOFILE, &most);
    setpgid(0, 0);
    if (!strcmp(what, "probe-files")) return !puts(told(open("/dev/null", O_RDONLY) < 0));
    if (!strcmp(what, "probe-filters")) return !puts(told(filter() < 0));
    pipe(done), pipe(told_of);
    int sum = 0;
    for (int n = 0; n < times; n++) {
        pid_t child = fork();
        if (child < 0) break;
        if (child == 0) {
            int made = 0;
            if (!strcmp(what, "files")) files();
            if (!strcmp(what, "mappings")) mappings();
            if (!strcmp(what, "connections")) connections();
            if (!strcmp(what, "filters")) made = filters();
            write(told_of[1], &made, sizeof made);
            pause();
        }
        int made = 0;
        read(told_of[0], &made, sizeof made);
        sum += made;
        if (!strcmp(what, "filters") && made < 8) break;
    }
    printf("held %d\n", sum);
    fflush(stdout);
    while (getchar() != EOF) {}
    signal(SIGTERM, SIG_IGN);
    kill(0, SIGTERM);
    while (wait(0) > 0) {}
    return 0;
}
"""

results = {"ok": 0, "failed": 0}


def read(path):
    with open(path) as file:
        return file.read()


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def open_files():
    return int(read("/proc/sys/fs/file-nr").split()[0])


def tcp_pages():
    line = next(line for line in read("/proc/net/sockstat").splitlines() if line.startswith("TCP:"))
    return int(line.split()[-1])


def compiled_bytes():
    """Returns how much memory the machine code of modules and filters takes."""
    names = ("bpf_jit", "bpf_prog_pack", "execmem", "module_alloc")
    lines = [line.split() for line in read("/proc/vmallocinfo").splitlines()]
    return sum(int(line[1]) for line in lines if line[2].startswith(names))


def as_plain(*command, **options):
    return subprocess.Popen(
        command, user=ACCOUNT, group=ACCOUNT, extra_groups=[], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True, **options,
    )


def ask(*what):
    """Tries once as a plain user outside, while somebody else attacks, and returns the result."""
    try:
        return as_plain(ATTACK, *what).communicate(timeout=WAIT_S)[0].split()
    except OSError as error:
        return [errno.errorcode[error.errno]]


class Outside:
    """A context manager: a plain user attacks outside until the block ends."""

    def __init__(self, *what):
        self.what = what

    def __enter__(self):
        self.process = as_plain(ATTACK, *self.what)
        said = self.process.stdout.readline()
        if not said.startswith("held"):
            raise AssertionError(f"the attack said {said!r}")
        return self

    def __exit__(self, *_):
        self.process.communicate(timeout=WAIT_S)


def inside(user, what, sample, *options):
    """Attacks in a run with default limits. Returns all samples, how the run ended, and its record."""
    home = pwd.getpwnam(user or "root").pw_dir
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": home, "FUMEHOOD_HOME": f"{home}/fumehood", "LANG": "C.UTF-8"}
    attack = " ".join([ATTACK, *what])
    # The attack's input ends after 15 seconds. Until then, an attack that is not stopped holds what it has.
    command = [BINARY, "run", "--db", "none", "--json", "--timeout", "200s", *options, "--read", PLACE]
    command += ["--", "/bin/sh", "-c", f"sleep 15 | {attack}"]
    who = dict(user=user, group=user, extra_groups=[]) if user else {}
    run = subprocess.Popen(
        command, env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, **who,
    )
    samples, until = [], time.monotonic() + WAIT_S
    while run.poll() is None and time.monotonic() < until:
        samples.append(sample())
        time.sleep(0.01)
    out, err = run.communicate(timeout=WAIT_S)
    try:
        record = json.loads(out)
    except ValueError:
        raise AssertionError(f"no record: {out[-500:]} {err[-500:]}") from None
    text = record.get("stdout", {}).get("text", "")
    return samples, f"{record['status']} ({record['reason']}) {text.strip()}".strip(), record


def case(name, check):
    try:
        figures = check()
    except Exception as error:
        results["failed"] += 1
        why = error if isinstance(error, AssertionError) else traceback.format_exc()
        print(f"FAILED {name}: {why}", flush=True)
    else:
        results["ok"] += 1
        print(f"ok {name}: {figures}", flush=True)


def expect(holds, what):
    if not holds:
        raise AssertionError(what)


def settle(sample, least):
    """Waits until the system has got back what an attack held."""
    until = time.monotonic() + 60
    while sample() > least and time.monotonic() < until:
        time.sleep(0.1)


def share(used, most):
    return f"{used} of {most}, {100 * used / most:.1f} %"


def file_table():
    most = int(read("/proc/sys/fs/file-max"))
    before = open_files()
    processes = str(most // 4000 + 8)

    def control(what, times):
        with Outside(what, times):
            got, held = ask("probe-files"), open_files()
        expect(got != ["fine"], f"the table was not used up: {held} of {most}")
        settle(open_files, before + most // 50)
        return f"{share(held, most)}; {' '.join(got) or 'no program starts'} for another user"

    def attack(user, what, times):
        samples, ended, _ = inside(user, [what, times], lambda: (open_files(), ask("probe-files") == ["fine"]))
        peak = max(count for count, _ in samples) - before
        fine = all(fine for _, fine in samples)
        figures = f"{share(peak, most)}; {ended}; {len(samples)} looks"
        expect(fine and peak < most / 2 and "open_files" in ended, figures)
        settle(open_files, before + most // 50)
        return figures

    for what, times in [("files", processes), ("mappings", "8")]:
        case(f"{what}, outside", lambda what=what, times=times: control(what, times))
        for user in (None, ACCOUNT):
            case(f"{what}, inside, {user or 'root'}", lambda user=user, what=what, times=times: attack(user, what, times))


def filters():
    """With all memory for filters taken, the kernel refuses or interprets one filter more. The control prints which."""
    most = 4 << 20
    write("/proc/sys/net/core/bpf_jit_limit", str(most))
    before = compiled_bytes()

    def control():
        with Outside("filters", "100"):
            held, got = compiled_bytes() - before, ask("probe-filters")
        settle(compiled_bytes, before + most // 50)
        # If there are many filters, the kernel takes 2 MiB of memory at a time.
        expect(held >= most * 0.9, f"{share(held, most)} bytes")
        return f"{share(held, most)} bytes; one more filter: {' '.join(got)}"

    def attack(user):
        samples, ended, _ = inside(user, ["filters", "100"], compiled_bytes)
        held = max(samples) - before
        figures = f"{share(held, most)} bytes; {ended}"
        # Fumehood's own filter may be the first in a block of 2 MiB, which many filters share.
        expect(held <= 2 << 20 and "held 0" in ended, figures)
        return figures

    case("seccomp filters, outside", control)
    for user in (None, ACCOUNT):
        case(f"seccomp filters, inside, {user or 'root'}", lambda user=user: attack(user))


def tcp_memory():
    most = int(read("/proc/sys/net/ipv4/tcp_mem").split()[2])

    def control():
        with Outside("connections", "2"):
            held = tcp_pages()
        settle(tcp_pages, most // 100)
        expect(held >= most, f"{share(held, most)} pages")
        return f"{share(held, most)} pages"

    def attack(user, options):
        samples, ended, _ = inside(user, ["connections", "2"], tcp_pages, *options)
        figures = f"{share(max(samples), most)} pages; {ended}"
        settle(tcp_pages, most // 100)
        expect(max(samples) < most / 4, figures)
        return figures

    case("TCP memory, outside", control)
    for user, options in [(None, []), (ACCOUNT, [])]:
        case(f"TCP memory, inside, {user or 'root'}", lambda user=user, options=options: attack(user, options))


def main():
    shutil.copy(sys.argv[1], BINARY)
    os.chmod(BINARY, 0o755)
    # The policy and the accounts of the host must not affect this test.
    shutil.rmtree("/etc/fumehood", ignore_errors=True)
    if ACCOUNT not in {account.pw_name for account in pwd.getpwall()}:
        subprocess.run(["useradd", "--no-create-home", ACCOUNT], check=True)
    account = pwd.getpwnam(ACCOUNT)
    os.makedirs(account.pw_dir, mode=0o700, exist_ok=True)
    os.chown(account.pw_dir, account.pw_uid, account.pw_gid)
    os.makedirs(PLACE, mode=0o755)
    subprocess.run(["gcc", "-O1", "-w", "-x", "c", "-", "-o", ATTACK], input=SOURCE, text=True, check=True)
    print(f"kernel {os.uname().release}; file-max {read('/proc/sys/fs/file-max').strip()}; tcp_mem {read('/proc/sys/net/ipv4/tcp_mem').strip()}; {os.cpu_count()} CPUs", flush=True)
    wanted = sys.argv[2:] or ["files", "filters", "tcp"]
    for name in wanted:
        {"files": file_table, "filters": filters, "tcp": tcp_memory}[name]()
    print(f"{results['ok']} passed, {results['failed']} failed")
    sys.exit(1 if results["failed"] else 0)


if __name__ == "__main__":
    main()
