"""Measures single runs: the cost of one run, runs per second, and the memory of the supervisor."""

import os
import pathlib
import signal
import time

from . import launch, result_checks
from .host import Bench
from .launch import median, quantile, spread
from .tools import BUBBLEWRAP, PYTHON, SLEEP, SQLITE, TRUE, Program, Tool


def fdatasync_ms(bench: Bench) -> float:
    """Appends a little data to a file in the directory that holds the database, and returns how long fdatasync takes."""
    path = bench.path("home-sqlite", "bench-append")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, b"x" * 4096)
        begin = time.perf_counter_ns()
        os.fdatasync(file)
        return (time.perf_counter_ns() - begin) / 1e6
    finally:
        os.close(file)


def measure_latency(bench: Bench, tools: list[Tool], program: Program, rounds: int, passes: int) -> dict:
    """Runs every tool `passes` times in each round, alternating between the tools.

    The ratio of a round is the ratio of the medians within that round.
    """
    times = {tool.name: [] for tool in tools}
    cpu = {tool.name: [] for tool in tools}
    ratios = {tool.name: [] for tool in tools}
    syncs = []
    for number in range(-1, rounds):
        round_times = {tool.name: [] for tool in tools}
        for turn in range(passes):
            # Each turn starts with a different tool, which spreads the effects of order.
            first = (number + turn) % len(tools)
            for tool in tools[first:] + tools[:first]:
                timed = tool.run_once(program)
                # Round -1 is a warm-up, and its times are discarded.
                if number >= 0:
                    round_times[tool.name].append(timed.ms)
                    cpu[tool.name].append(timed.cpu_ms)
            syncs.append(fdatasync_ms(bench))
        for tool in tools:
            if tool.is_fumehood:
                result_checks.check_run(bench, tool)
        if number < 0:
            continue
        for name, values in round_times.items():
            times[name] += values
            ratios[name].append(median(values) / median(round_times[BUBBLEWRAP]))
    return {
        "fdatasync_ms": spread(syncs[passes:]),
        "rows": {
            name: {"p50_ms": median(values), "p95_ms": quantile(values, 0.95), "runs": len(values),
                   "ratio": spread(ratios[name]), "cpu_ms": sum(cpu[name]) / len(cpu[name])}
            for name, values in times.items()
        },
    }


def measure_throughput(tools: list[Tool], parallel: int, rounds: int, seconds: float) -> dict:
    rates = {tool.name: [] for tool in tools}
    for number in range(rounds):
        for tool in tools[number % len(tools):] + tools[:number % len(tools)]:
            def commands(tool: Tool = tool) -> list[list[str]]:
                tool.run_count += 1
                return tool.commands(TRUE)
            rates[tool.name].append(launch.measure_rate(commands, tool.env, parallel, seconds))
    return {name: {"per_second": median(values),
                   "ratio": spread([a / b for a, b in zip(values, rates[BUBBLEWRAP])])} for name, values in rates.items()}


def process_tree(pid: int) -> list[int]:
    """Returns the process and all its descendants."""
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


def supervisor_pss_kb(tool: Tool) -> int:
    """Returns the memory of the tool's own processes while the program sleeps.

    The figure is PSS, which divides each shared page among the processes that share it.
    """
    pid = launch.spawn(tool.commands(SLEEP)[0], tool.env)
    until = time.monotonic() + 10
    while not (asleep := [member for member in process_tree(pid) if is_sleep(member)]):
        if time.monotonic() > until:
            raise launch.MeasurementError(f"{tool.name}: its program did not start within ten seconds")
        time.sleep(0.02)
    # The launch is over when the program runs, but the supervisor still has some work to finish.
    time.sleep(2)
    try:
        return sum(process_pss_kb(member) for member in process_tree(pid) if member not in asleep)
    finally:
        for program in asleep:
            os.kill(program, signal.SIGKILL)
        launch.reap(pid)
        tool.run_count += 1
        tool.killed_count += 1


def process_pss_kb(pid: int) -> int:
    rollup = pathlib.Path("/proc", str(pid), "smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))


def measure_launch(bench: Bench, tools: list[Tool], again: bool) -> dict:
    quick = bench.quick or again
    if again:
        tools = [tool for tool in tools if tool.is_fumehood or tool.name.startswith((BUBBLEWRAP, "isolate, init"))]
    result = {"true": measure_latency(bench, tools, TRUE, 8 if bench.quick else 40, 5)}
    if not again:
        result["python"] = measure_latency(bench, tools, PYTHON, 4 if quick else 20, 3)
    return result


def measure_parallel(bench: Bench, tools: list[Tool], again: bool) -> dict:
    if again:
        tools = [tool for tool in tools if tool.name in (BUBBLEWRAP, SQLITE)]
    rounds, seconds = (2, 0.5) if bench.quick else (5, 1.0)
    return {str(parallel): measure_throughput(tools, parallel, rounds, seconds) for parallel in (2, 8)}


def measure_memory(bench: Bench, tools: list[Tool], again: bool) -> dict:
    rows = {}
    for tool in tools:
        if tool.measures_memory and (tool.is_fumehood or not again):
            try:
                rows[tool.name] = median([supervisor_pss_kb(tool) for _ in range(1 if again else 3)])
            except PermissionError:
                bench.leave_out(f"memory of {tool.name}", "only root may inspect its processes")
    return rows
