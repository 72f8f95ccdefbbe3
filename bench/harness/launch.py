"""Starts programs and times them.

The harness starts every program with posix_spawn. In glibc, posix_spawn shares the parent's memory until the exec, so the
memory of the harness does not add to any figure. The harness checks every exit status, so that a failed run never counts
as a fast run.
"""

import atexit
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

# Processes that were started and not yet reaped, by pid, so that Ctrl-C can end them.
live_processes: dict[int, list[str]] = {}


class CpuAccountingGroup:
    """A cpuacct group (cgroup version 1) that contains the harness and every program it starts.

    wait4 counts only children that their parent waited for. bubblewrap exits without waiting for the pid 1 of its sandbox,
    so wait4 misses more than half of the CPU time that bubblewrap uses.
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
            pass  # A killed process is still exiting. The group it leaves behind is empty and costs nothing.

    def cpu_ms(self) -> float:
        """Waits until the started programs are gone, and returns all CPU time so far except the harness's own."""
        until = time.monotonic() + 1
        while time.monotonic() < until and len((self.path / "cgroup.procs").read_text().split()) > 1:
            time.sleep(0.0005)
        usage = int((self.path / "cpuacct.usage").read_text()) / 1e6
        return usage - time.process_time() * 1000


def create_accounting_group() -> CpuAccountingGroup | None:
    """Returns None if there is no version 1 hierarchy with cpuacct, or no permission to create a group in it."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if "cpuacct" in controllers.split(","):
                mount = Path("/sys/fs/cgroup") / controllers
                return CpuAccountingGroup(mount / own.lstrip("/") / f"fumehood-bench-{os.getpid()}")
    except OSError:
        pass
    return None


# Created at the first call of `run`; False if the host does not allow one.
accounting_group: CpuAccountingGroup | bool | None = None


class MeasurementError(Exception):
    """A measured program failed or did not do its work."""


@dataclass
class Timing:
    ms: float
    cpu_ms: float
    # Bytes that the process, and the children it waited for, submitted to file systems.
    written_bytes: int


def spawn(argv: list[str], env: dict[str, str], stdout: str = "/dev/null", stderr: str | None = None) -> int:
    create = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    streams = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, stdout, create, 0o600),
        (os.POSIX_SPAWN_OPEN, 2, stderr or env["BENCH_STDERR"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
    ]
    pid = os.posix_spawnp(argv[0], argv, env, file_actions=streams)
    live_processes[pid] = argv
    return pid


def reap(pid: int) -> tuple[int, resource.struct_rusage]:
    """Returns the exit code (or minus the signal), and the usage of the process and the children it waited for."""
    _, status, usage = os.wait4(pid, 0)
    live_processes.pop(pid, None)
    return os.waitstatus_to_exitcode(status), usage


def run(argv: list[str], env: dict[str, str], stdout: str = "/dev/null", may_fail: bool = False) -> Timing:
    global accounting_group
    if accounting_group is None:
        accounting_group = create_accounting_group() or False
    before = accounting_group.cpu_ms() if accounting_group else 0
    begin = time.perf_counter_ns()
    code, usage = reap(spawn(argv, env, stdout))
    ms = (time.perf_counter_ns() - begin) / 1e6
    cpu_ms = accounting_group.cpu_ms() - before if accounting_group else (usage.ru_utime + usage.ru_stime) * 1000
    if code != 0 and not may_fail:
        raise MeasurementError(f"{' '.join(argv)[:200]}: exit code {code}: {last_stderr_lines(env)}")
    return Timing(ms, cpu_ms, usage.ru_oublock * 512)


def last_stderr_lines(env: dict[str, str]) -> str:
    """Returns the last lines that the started programs wrote to standard error, and empties that file."""
    try:
        with open(env["BENCH_STDERR"], "r+b") as file:
            file.seek(max(0, os.path.getsize(file.name) - 2000))
            lines = file.read().decode(errors="replace").strip().splitlines()
            file.truncate(0)
            return " / ".join(lines[-4:])
    except OSError:
        return ""


def run_sequence(commands: list[list[str]], env: dict[str, str]) -> Timing:
    timed = [run(argv, env) for argv in commands]
    return Timing(sum(t.ms for t in timed), sum(t.cpu_ms for t in timed), sum(t.written_bytes for t in timed))


def measure_rate(commands, env: dict[str, str], parallel: int, seconds: float) -> float:
    """Keeps `parallel` runs going for `seconds`, waits for the last ones, and returns the runs per second."""
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
        live_processes.pop(pid, None)
        if pid not in running:
            continue
        if status != 0:
            raise MeasurementError(f"{parallel} in parallel: wait status {status}: {last_stderr_lines(env)}")
        rest = running.pop(pid)
        if rest:
            running[spawn(rest[0], env)] = rest[1:]
            continue
        ended += 1
        if time.perf_counter() - begin < seconds:
            start()
    return ended / (time.perf_counter() - begin)


def terminate_all() -> None:
    """Ends the programs that still run: first with SIGTERM, so that each tool can clean up, then with SIGKILL."""
    for sign, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        for pid in list(live_processes):
            try:
                os.kill(pid, sign)
            except ProcessLookupError:
                live_processes.pop(pid, None)
        until = time.monotonic() + patience_s
        while live_processes and time.monotonic() < until:
            for pid in list(live_processes):
                try:
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        live_processes.pop(pid, None)
                except ChildProcessError:
                    live_processes.pop(pid, None)
            time.sleep(0.02)


def quantile(values: list[float], q: float) -> float:
    """Returns the quantile, by linear interpolation between the two nearest values."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median(values: list[float]) -> float:
    return quantile(values, 0.5)


def spread(values: list[float]) -> dict[str, float]:
    return {"p50": median(values), "p10": quantile(values, 0.1), "p90": quantile(values, 0.9), "n": len(values)}
