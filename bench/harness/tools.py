"""The tools that are measured: each peer, started as its users start it, and Fumehood's configurations."""

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from . import launch, result_checks
from .host import Bench

Program = list[str]
TRUE: Program = ["/bin/true"]
PYTHON: Program = ["/usr/bin/python3", "-c", "pass"]
# Sleeps longer than a memory measurement takes. The harness kills the program after the measurement.
SLEEP: Program = ["/bin/sleep", "60"]


@dataclass
class Tool:
    name: str
    # Returns the commands that make one run of a program, in order.
    commands: Callable[[Program], list[list[str]]]
    env: dict[str, str]
    # The database that holds Fumehood's record of the runs; None for peers and for --db none.
    url: str | None = None
    is_fumehood: bool = False
    measures_memory: bool = True
    version: str = ""
    # The number of runs, and the number of programs that the harness killed. The record must agree with both.
    run_count: int = 0
    killed_count: int = 0

    def run_once(self, program: Program) -> launch.Timing:
        self.run_count += 1
        return launch.run_sequence(self.commands(program), self.env)


BUBBLEWRAP = "bubblewrap"
NO_DATABASE, SQLITE, POSTGRES = "fumehood, no database", "fumehood, SQLite", "fumehood, PostgreSQL"
ISOLATE_FULL = "isolate, init + run + cleanup"
BUBBLEWRAP_PSQL = "bubblewrap, then psql"
CONTAINER_NUMBERS = itertools.count()


def prefix_program(*argv: str) -> Callable[[Program], list[list[str]]]:
    return lambda program: [[*argv, *program]]


def bubblewrap_argv() -> list[str]:
    links = [word for name in ("bin", "sbin", "lib", "lib64") if os.path.islink(f"/{name}")
             for word in ("--symlink", f"usr/{name}", f"/{name}")]
    return ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr", *links,
            "--ro-bind", "/etc", "/etc", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp", "--"]


def make_bundle(bench: Bench, program: Program) -> str:
    """Creates the OCI bundle of a program, once. The bundle's root file system shows the host's /usr read-only."""
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


def hide_unified_cgroups(bench: Bench) -> list[str]:
    """Returns the command prefix that hides cgroup v2 from crun, or nothing if crun does not need it.

    crun refuses a host with both cgroup v1 and v2 controllers. On such a host, and as root, the harness creates one mount
    namespace without v2 and runs crun in it. Entering the namespace costs one more exec, about a millisecond.
    """
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


def oci_commands(bench: Bench, runtime: str, prefix: list[str]) -> Callable[[Program], list[list[str]]]:
    state = bench.path(f"oci-{runtime}")

    def commands(program: Program) -> list[list[str]]:
        name = f"fumehood-bench-{os.getpid()}-{next(CONTAINER_NUMBERS)}"
        return [[*prefix, runtime, "--root", state, "run", "--bundle", make_bundle(bench, program), name]]

    return commands


def installed_peers(bench: Bench) -> list[Tool]:
    as_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    firejail = ["firejail", "--quiet", "--noprofile", "--net=none", "--caps.drop=all", "--seccomp", "--private-tmp", "--private-dev"]
    nsjail = ["nsjail", "-Mo", "--really_quiet", "--disable_rlimits", "-R", "/usr", "-R", "/etc", "-s", "usr/bin:/bin",
              "-s", "usr/lib:/lib", "-s", "usr/lib64:/lib64", "-T", "/tmp", "--"]
    isolate = ["isolate", "--silent", "--run", "--"]
    rows = [
        Tool("posix_spawn", prefix_program(), bench.env, measures_memory=False),
        Tool("unshare", prefix_program("unshare", *as_user, "--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "--"), bench.env),
        Tool(BUBBLEWRAP, prefix_program(*bubblewrap_argv()), bench.env),
        Tool("firejail", prefix_program(*firejail), bench.env),
        Tool("crun", oci_commands(bench, "crun", hide_unified_cgroups(bench)), bench.env),
        Tool("runc", oci_commands(bench, "runc", []), bench.env),
        Tool("nsjail", prefix_program(*nsjail), bench.env),
        Tool("isolate, run only", prefix_program(*isolate), bench.env),
        Tool(ISOLATE_FULL,
             lambda program: [["isolate", "--init"], [*isolate, *program], ["isolate", "--cleanup"]], bench.env, measures_memory=False),
    ]
    if bench.postgres:
        # The lowest cost of recording a run by hand: one connection and an empty query.
        connect = [bench.psql_path, "-h", bench.postgres, "-U", "postgres", "-d", "postgres", "-XAtq", "-c", "SELECT"]
        rows.append(Tool(BUBBLEWRAP_PSQL, lambda program: [[*bubblewrap_argv(), *program], connect], bench.env, measures_memory=False))
    runnable = []
    for tool in rows:
        words = tool.commands(TRUE)[0]
        command = tool.name if tool.name in words else words[0]
        if not shutil.which(command, path=bench.env["PATH"]):
            bench.leave_out(tool.name, "it is not installed")
            continue
        try:
            if tool.name == "isolate, run only":
                launch.run(["isolate", "--init"], bench.env)
                bench.cleanups.append(lambda: launch.run(["isolate", "--cleanup"], bench.env))
            for program in (TRUE, PYTHON):
                tool.run_once(program)
        except launch.MeasurementError as error:
            bench.leave_out(tool.name, f"it does not run here: {error}")
            continue
        flag = [] if tool.name in ("posix_spawn", "nsjail", BUBBLEWRAP_PSQL) else ["--version"]
        if flag:
            answer = subprocess.run([command, *flag], capture_output=True, text=True).stdout
            tool.version = answer.splitlines()[0] if answer else ""
        runnable.append(tool)
    return runnable


def fumehood_tools(bench: Bench) -> list[Tool]:
    run = [bench.binary, "run", "-q"]
    none, sqlite = bench.fumehood_env("home-none"), bench.fumehood_env("home-sqlite")
    rows = [
        Tool(NO_DATABASE, prefix_program(*run, "--db", "none", "--"), none, is_fumehood=True),
        Tool(SQLITE, prefix_program(*run, "--"), sqlite, url=f"sqlite:{bench.path('home-sqlite', 'fumehood.db')}", is_fumehood=True),
    ]
    if bench.postgres:
        url = bench.create_database("direct")
        rows.append(Tool(POSTGRES, prefix_program(*run, "--db", url, "--"), bench.fumehood_env("home-postgres"), url=url, is_fumehood=True))
    runnable = []
    for tool in rows:
        try:
            for program in (TRUE, PYTHON):
                tool.run_once(program)
            # Check before timing: a configuration that lacks a guarantee on this host is not measured.
            result_checks.check_run(bench, tool)
        except (launch.MeasurementError, result_checks.GuaranteeError) as error:
            # Root can have every guarantee, so this is an error. Another user may lack a delegated cgroup.
            if os.geteuid() == 0:
                raise
            bench.leave_out(tool.name, f"as this user: {error}")
            continue
        runnable.append(tool)
    return runnable
