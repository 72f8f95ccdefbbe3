"""Starts programs and times them.

Everything is started by posix_spawn, which in glibc shares the parent's memory until the exec: what the harness itself
holds does not add to anybody's figure. Every exit status is checked; a run that failed is never a fast run.
"""

import atexit
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

# What was started and not yet reaped, so that Ctrl-C can end it.
live: dict[int, list[str]] = {}


class Group:
    """A cpuacct group of version 1 with the harness, and so all that it starts, in it.

    wait4 counts only children that were waited for. bubblewrap ends without waiting for the pid 1 of its sandbox, so
    wait4 misses more than half of what it uses.
    """

    def __init__(self, path: Path):
        self.path = path
        path.mkdir()
        self.enter(path)
        atexit.register(self.remove)

    @staticmethod
    def enter(path: Path) -> None:
        (path / "cgroup.procs").write_text("0")

    def remove(self) -> None:
        self.enter(self.path.parent)
        try:
            self.path.rmdir()
        except OSError:
            pass  # Something that was killed is still dying; an empty group costs nothing.

    def cpu_ms(self) -> float:
        """All CPU time so far but the harness's own, once what was started has gone."""
        until = time.monotonic() + 1
        while time.monotonic() < until and len((self.path / "cgroup.procs").read_text().split()) > 1:
            time.sleep(0.0005)
        usage = int((self.path / "cpuacct.usage").read_text()) / 1e6
        return usage - time.process_time() * 1000


def own_group() -> Group | None:
    """None: no version 1 hierarchy with cpuacct, or no right to make a group there."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if "cpuacct" in controllers.split(","):
                mount = Path("/sys/fs/cgroup") / controllers
                return Group(mount / own.lstrip("/") / f"fumehood-bench-{os.getpid()}")
    except OSError:
        pass
    return None


# Made when something is first timed alone; False where there can be none.
group: Group | bool | None = None


class Failed(Exception):
    """Something that was measured did not do its work."""


@dataclass
class Timed:
    ms: float
    cpu_ms: float
    # What it, and all that it waited for, gave the file systems to write.
    written_bytes: int


def spawn(argv: list[str], env: dict[str, str], stdout: str = "/dev/null", stderr: str | None = None) -> int:
    create = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    streams = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, stdout, create, 0o600),
        (os.POSIX_SPAWN_OPEN, 2, stderr or env["BENCH_STDERR"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
    ]
    pid = os.posix_spawnp(argv[0], argv, env, file_actions=streams)
    live[pid] = argv
    return pid


def reap(pid: int) -> tuple[int, resource.struct_rusage]:
    """The exit code (negative: the signal), and what the process and all that it waited for used."""
    _, status, usage = os.wait4(pid, 0)
    live.pop(pid, None)
    return os.waitstatus_to_exitcode(status), usage


def run(argv: list[str], env: dict[str, str], stdout: str = "/dev/null", may_fail: bool = False) -> Timed:
    global group
    if group is None:
        group = own_group() or False
    before = group.cpu_ms() if group else 0
    begin = time.perf_counter_ns()
    code, usage = reap(spawn(argv, env, stdout))
    ms = (time.perf_counter_ns() - begin) / 1e6
    cpu_ms = group.cpu_ms() - before if group else (usage.ru_utime + usage.ru_stime) * 1000
    if code != 0 and not may_fail:
        raise Failed(f"{' '.join(argv)[:200]}: exit code {code}: {said(env)}")
    return Timed(ms, cpu_ms, usage.ru_oublock * 512)


def said(env: dict[str, str]) -> str:
    """The last lines that what was started wrote to its standard error, said once."""
    try:
        with open(env["BENCH_STDERR"], "r+b") as file:
            file.seek(max(0, os.path.getsize(file.name) - 2000))
            lines = file.read().decode(errors="replace").strip().splitlines()
            file.truncate(0)
            return " / ".join(lines[-4:])
    except OSError:
        return ""


def sequence(commands: list[list[str]], env: dict[str, str]) -> Timed:
    timed = [run(argv, env) for argv in commands]
    return Timed(sum(t.ms for t in timed), sum(t.cpu_ms for t in timed), sum(t.written_bytes for t in timed))


def per_second(commands, env: dict[str, str], parallel: int, seconds: float) -> float:
    """Keeps `parallel` runs going for `seconds`, waits for the last ones, and says how many ended in a second."""
    begin = time.perf_counter()
    running: dict[int, list[list[str]]] = {}
    ended = 0

    def start() -> None:
        rest = commands()
        running[spawn(rest[0], env)] = rest[1:]

    for _ in range(parallel):
        start()
    while running:
        pid, status, _ = os.wait4(-1, 0)
        live.pop(pid, None)
        if pid not in running:
            continue
        if status != 0:
            raise Failed(f"{parallel} in parallel: wait status {status}: {said(env)}")
        rest = running.pop(pid)
        if rest:
            running[spawn(rest[0], env)] = rest[1:]
            continue
        ended += 1
        if time.perf_counter() - begin < seconds:
            start()
    return ended / (time.perf_counter() - begin)


def end_all() -> None:
    """Ends what still runs: politely, so that each tool clears up after itself, then not."""
    for sign, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        for pid in list(live):
            try:
                os.kill(pid, sign)
            except ProcessLookupError:
                live.pop(pid, None)
        until = time.monotonic() + patience_s
        while live and time.monotonic() < until:
            for pid in list(live):
                try:
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        live.pop(pid, None)
                except ChildProcessError:
                    live.pop(pid, None)
            time.sleep(0.02)


def quantile(values: list[float], q: float) -> float:
    """By linear interpolation between the two nearest values."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median(values: list[float]) -> float:
    return quantile(values, 0.5)


def spread(values: list[float]) -> dict[str, float]:
    return {"p50": median(values), "p10": quantile(values, 0.1), "p90": quantile(values, 0.9), "n": len(values)}
