"""The rows: each peer as its users run it, and Fumehood's configurations."""

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from . import honesty, launch
from .host import Bench

Program = list[str]
TRUE: Program = ["/bin/true"]
PYTHON: Program = ["/usr/bin/python3", "-c", "pass"]
# Longer than any measurement of memory takes; it is ended as soon as that is done.
SLEEP: Program = ["/bin/sleep", "60"]


@dataclass
class Tool:
    name: str
    # One run of a program: the commands that make it, one after another.
    commands: Callable[[Program], list[list[str]]]
    env: dict[str, str]
    # Where Fumehood's record of the runs is; None for peers and for --db none.
    url: str | None = None
    ours: bool = False
    memory: bool = True
    version: str = ""
    # How many runs were made, and how many of their programs the harness killed: the record must say the same.
    counted: int = 0
    killed: int = 0

    def once(self, program: Program) -> launch.Timed:
        self.counted += 1
        return launch.sequence(self.commands(program), self.env)


BUBBLEWRAP = "bubblewrap"
NONE, SQLITE, POSTGRES = "fumehood, no database", "fumehood, SQLite", "fumehood, PostgreSQL"
ISOLATE_WHOLE = "isolate, init + run + cleanup"
BY_HAND = "bubblewrap, then psql"
NAMES = itertools.count()


def simple(*argv: str) -> Callable[[Program], list[list[str]]]:
    return lambda program: [[*argv, *program]]


def bubblewrap() -> list[str]:
    links = [word for name in ("bin", "sbin", "lib", "lib64") if os.path.islink(f"/{name}")
             for word in ("--symlink", f"usr/{name}", f"/{name}")]
    return ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr", *links,
            "--ro-bind", "/etc", "/etc", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp", "--"]


def bundle(bench: Bench, program: Program) -> str:
    """An OCI bundle whose root is the host's /usr, read-only. One for each program, made once."""
    where = bench.path("oci", os.path.basename(program[0]))
    if os.path.exists(f"{where}/config.json"):
        return where
    root = f"{where}/rootfs"
    for name in ("usr", "proc", "dev", "tmp"):
        os.makedirs(f"{root}/{name}")
    for name in ("bin", "sbin", "lib", "lib64"):
        os.symlink(f"usr/{name}", f"{root}/{name}")
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]},
        {"destination": "/usr", "type": "none", "source": "/usr", "options": ["rbind", "ro", "nosuid", "nodev"]},
    ]
    none = {kind: [] for kind in ("bounding", "effective", "permitted")}
    config = {
        "ociVersion": "1.0.2",
        "process": {"terminal": False, "user": {"uid": 0, "gid": 0}, "args": program, "cwd": "/",
                    "env": ["PATH=/usr/bin:/bin"], "capabilities": none, "noNewPrivileges": True},
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "bench",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "network", "ipc", "uts")]},
    }
    with open(f"{where}/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    return where


def without_unified(bench: Bench) -> list[str]:
    """crun refuses a host that has cgroup v1 and v2 controllers both. There it is run, as root, in a mount namespace
    that is made once and does not show v2; entering it is one more exec, about a millisecond."""
    unified = "/sys/fs/cgroup/unified"
    try:
        with open(f"{unified}/cgroup.controllers", encoding="ascii") as file:
            if not file.read().strip() or os.geteuid() != 0:
                return []
    except OSError:
        return []
    hold = f"umount {unified} && touch {bench.path('hidden')} && exec sleep infinity"
    pid = launch.spawn(["unshare", "--mount", "--propagation", "private", "sh", "-c", hold], bench.env)
    until = time.monotonic() + 5
    while not os.path.exists(bench.path("hidden")) and time.monotonic() < until:
        time.sleep(0.01)
    return ["nsenter", f"--mount=/proc/{pid}/ns/mnt", "--"]


def oci(bench: Bench, runtime: str, prefix: list[str]) -> Callable[[Program], list[list[str]]]:
    state = bench.path(f"oci-{runtime}")

    def commands(program: Program) -> list[list[str]]:
        name = f"fumehood-bench-{os.getpid()}-{next(NAMES)}"
        return [[*prefix, runtime, "--root", state, "run", "--bundle", bundle(bench, program), name]]

    return commands


def peers(bench: Bench) -> list[Tool]:
    as_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    firejail = ["firejail", "--quiet", "--noprofile", "--net=none", "--caps.drop=all", "--seccomp", "--private-tmp", "--private-dev"]
    nsjail = ["nsjail", "-Mo", "--really_quiet", "--disable_rlimits", "-R", "/usr", "-R", "/etc", "-s", "usr/bin:/bin",
              "-s", "usr/lib:/lib", "-s", "usr/lib64:/lib64", "-T", "/tmp", "--"]
    isolate = ["isolate", "--silent", "--run", "--"]
    rows = [
        Tool("posix_spawn", simple(), bench.env, memory=False),
        Tool("unshare", simple("unshare", *as_user, "--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "--"), bench.env),
        Tool(BUBBLEWRAP, simple(*bubblewrap()), bench.env),
        Tool("firejail", simple(*firejail), bench.env),
        Tool("crun", oci(bench, "crun", without_unified(bench)), bench.env),
        Tool("runc", oci(bench, "runc", []), bench.env),
        Tool("nsjail", simple(*nsjail), bench.env),
        Tool("isolate, run only", simple(*isolate), bench.env),
        Tool(ISOLATE_WHOLE,
             lambda program: [["isolate", "--init"], [*isolate, *program], ["isolate", "--cleanup"]], bench.env, memory=False),
    ]
    if bench.postgres:
        # What a record by hand costs at the least.
        connect = [bench.psql, "-h", bench.postgres, "-U", "postgres", "-d", "postgres", "-XAtq", "-c", "SELECT"]
        rows.append(Tool(BY_HAND, lambda program: [[*bubblewrap(), *program], connect], bench.env, memory=False))
    there = []
    for tool in rows:
        words = tool.commands(TRUE)[0]
        command = tool.name if tool.name in words else words[0]
        if not shutil.which(command, path=bench.env["PATH"]):
            bench.leave_out(tool.name, "it is not installed")
            continue
        try:
            if tool.name == "isolate, run only":
                launch.run(["isolate", "--init"], bench.env)
                bench.closers.append(lambda: launch.run(["isolate", "--cleanup"], bench.env))
            for program in (TRUE, PYTHON):
                tool.once(program)
        except launch.Failed as error:
            bench.leave_out(tool.name, f"it does not run here: {error}")
            continue
        flag = [] if tool.name in ("posix_spawn", "nsjail", BY_HAND) else ["--version"]
        if flag:
            answer = subprocess.run([command, *flag], capture_output=True, text=True).stdout
            tool.version = answer.splitlines()[0] if answer else ""
        there.append(tool)
    return there


def fumehood(bench: Bench) -> list[Tool]:
    run = [bench.binary, "run", "-q"]
    none, sqlite = bench.fumehood("home-none"), bench.fumehood("home-sqlite")
    rows = [
        Tool(NONE, simple(*run, "--db", "none", "--"), none, ours=True),
        Tool(SQLITE, simple(*run, "--"), sqlite, url=f"sqlite:{bench.path('home-sqlite', 'fumehood.db')}", ours=True),
    ]
    if bench.postgres:
        url = bench.database("direct")
        rows.append(Tool(POSTGRES, simple(*run, "--db", url, "--"), bench.fumehood("home-postgres"), url=url, ours=True))
    there = []
    for tool in rows:
        try:
            for program in (TRUE, PYTHON):
                tool.once(program)
            # Before anything is timed: what is not whole here is not measured here.
            honesty.check_run(bench, tool)
        except (launch.Failed, honesty.Dishonest) as error:
            # Root can have everything; others may lack a cgroup of their own.
            if os.geteuid() == 0:
                raise
            bench.leave_out(tool.name, f"as this user: {error}")
            continue
        there.append(tool)
    return there
