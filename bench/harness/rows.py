"""The table: what one run costs, how many fit into a second, what a supervisor weighs."""

import os
import pathlib
import signal
import time

from . import honesty, launch
from .host import Bench
from .launch import median, quantile, spread
from .tools import BUBBLEWRAP, PYTHON, SLEEP, SQLITE, TRUE, Program, Tool


def fdatasync_ms(bench: Bench) -> float:
    """One small append made durable, in the directory that holds the database."""
    path = bench.path("home-sqlite", "bench-append")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, b"x" * 4096)
        begin = time.perf_counter_ns()
        os.fdatasync(file)
        return (time.perf_counter_ns() - begin) / 1e6
    finally:
        os.close(file)


def latency(bench: Bench, tools: list[Tool], program: Program, rounds: int, passes: int) -> dict:
    """In each round every tool runs `passes` times, in turn; a round's ratio is of medians within that round."""
    times = {tool.name: [] for tool in tools}
    cpu = {tool.name: [] for tool in tools}
    ratios = {tool.name: [] for tool in tools}
    syncs = []
    for number in range(-1, rounds):
        here = {tool.name: [] for tool in tools}
        for turn in range(passes):
            # Another one goes first each time, so that nobody always follows the same neighbour.
            first = (number + turn) % len(tools)
            for tool in tools[first:] + tools[:first]:
                timed = tool.once(program)
                # The round before the first one warms up, and is thrown away.
                if number >= 0:
                    here[tool.name].append(timed.ms)
                    cpu[tool.name].append(timed.cpu_ms)
            syncs.append(fdatasync_ms(bench))
        for tool in tools:
            if tool.ours:
                honesty.check_run(bench, tool)
        if number < 0:
            continue
        for name, values in here.items():
            times[name] += values
            ratios[name].append(median(values) / median(here[BUBBLEWRAP]))
    return {
        "fdatasync_ms": spread(syncs[passes:]),
        "rows": {
            name: {"p50_ms": median(values), "p95_ms": quantile(values, 0.95), "runs": len(values),
                   "ratio": spread(ratios[name]), "cpu_ms": sum(cpu[name]) / len(cpu[name])}
            for name, values in times.items()
        },
    }


def throughput(tools: list[Tool], parallel: int, rounds: int, seconds: float) -> dict:
    rates = {tool.name: [] for tool in tools}
    for number in range(rounds):
        for tool in tools[number % len(tools):] + tools[:number % len(tools)]:
            def commands(tool: Tool = tool) -> list[list[str]]:
                tool.counted += 1
                return tool.commands(TRUE)
            rates[tool.name].append(launch.per_second(commands, tool.env, parallel, seconds))
    return {name: {"per_second": median(values),
                   "ratio": spread([a / b for a, b in zip(values, rates[BUBBLEWRAP])])} for name, values in rates.items()}


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = pathlib.Path("/proc", entry, "stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def is_sleep(pid: int) -> bool:
    try:
        return pathlib.Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")[:2] == [b"/bin/sleep", b"60"]
    except OSError:
        return False


def pss_kb(tool: Tool) -> int:
    """What the tool's own processes hold while the program sleeps, shared pages divided among those who share them."""
    pid = launch.spawn(tool.commands(SLEEP)[0], tool.env)
    until = time.monotonic() + 10
    while not (asleep := [member for member in family(pid) if is_sleep(member)]):
        if time.monotonic() > until:
            raise launch.Failed(f"{tool.name}: its program was not seen within ten seconds")
        time.sleep(0.02)
    # The launch is over when the program runs; what the supervisor still has to do after that takes a moment.
    time.sleep(2)
    try:
        return sum(held_kb(member) for member in family(pid) if member not in asleep)
    finally:
        for program in asleep:
            os.kill(program, signal.SIGKILL)
        launch.reap(pid)
        tool.counted += 1
        tool.killed += 1


def held_kb(pid: int) -> int:
    rollup = pathlib.Path("/proc", str(pid), "smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))


def measure_launch(bench: Bench, tools: list[Tool], again: bool) -> dict:
    quick = bench.quick or again
    if again:
        tools = [tool for tool in tools if tool.ours or tool.name.startswith((BUBBLEWRAP, "isolate, init"))]
    result = {"true": latency(bench, tools, TRUE, 8 if bench.quick else 40, 5)}
    if not again:
        result["python"] = latency(bench, tools, PYTHON, 4 if quick else 20, 3)
    return result


def measure_parallel(bench: Bench, tools: list[Tool], again: bool) -> dict:
    if again:
        tools = [tool for tool in tools if tool.name in (BUBBLEWRAP, SQLITE)]
    rounds, seconds = (2, 0.5) if bench.quick else (5, 1.0)
    return {str(parallel): throughput(tools, parallel, rounds, seconds) for parallel in (2, 8)}


def measure_memory(bench: Bench, tools: list[Tool], again: bool) -> dict:
    rows = {}
    for tool in tools:
        if tool.memory and (tool.ours or not again):
            try:
                rows[tool.name] = median([pss_kb(tool) for _ in range(1 if again else 3)])
            except PermissionError:
                bench.leave_out(f"memory of {tool.name}", "only root may look at its processes")
    return rows
