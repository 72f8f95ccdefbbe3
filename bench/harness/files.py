"""Measures the cost of files: collecting one large file and many small files, and removing a million files."""

import os
import shutil

from . import launch, result_checks
from .host import Bench, read_json
from .launch import median, spread
from .tools import Tool

# The programs write new random content every time: the store keeps equal content once, so it would skip repeated content.
ONE_FILE = """
import os, sys
block = os.urandom(1 << 20)
file = os.open("big", os.O_WRONLY | os.O_CREAT, 0o600)
for _ in range(int(sys.argv[1])): os.write(file, block)
if sys.argv[2] == "synced": os.fsync(file)
"""
MANY_FILES = """
import os, sys
count, size = int(sys.argv[1]), int(sys.argv[2])
for n in range(count):
    if n % 1000 == 0: os.mkdir(f"d{n // 1000}")
    file = os.open(f"d{n // 1000}/{n}", os.O_WRONLY | os.O_CREAT, 0o600)
    if size: os.write(file, os.urandom(size))
    os.close(file)
"""


def python_program(code: str, *args: object) -> list[str]:
    return ["/usr/bin/python3", "-c", code, *map(str, args)]


def steps_ms(result: dict) -> dict[str, float]:
    """Returns the duration of each step of a run, measured by the runner itself."""
    steps: dict[str, float] = {}
    if not result.get("timings"):
        raise launch.MeasurementError("the result has no timings: this fumehood is too old to be measured")
    for step in result["timings"]["steps"]:
        steps[step["name"]] = steps.get(step["name"], 0) + step["us"] / 1000
    return steps


def run_and_sum_steps_ms(bench: Bench, home: str, options: list[str], argv: list[str], names: list[str], outputs: int | None,
            written: list[int]) -> float:
    """Makes one run and returns how long its steps `names` took together.

    `outputs` is the number of outputs to expect; None means a run without a database, which collects nothing.
    """
    path = bench.path("result.json")
    limits = ["--files", "1200000", "--max-outputs", "1000000"]
    command = [bench.binary, "run", "--json", *limits, *options, "--", *argv]
    written.append(launch.run(command, bench.fumehood_env(home), stdout=path, may_fail=True).written_bytes)
    result = read_json(path)
    if result["status"] != "succeeded":
        raise launch.MeasurementError(f"{' '.join(options)}: {result['status']}, {result['reason']}: {result['message']}")
    result_checks.check_result(result, " ".join(["collection", *options]), recorded=outputs is not None)
    if outputs is not None and (len(result["outputs"]) != outputs or not result["collection"]["complete"]):
        raise launch.MeasurementError(f"collection: {len(result['outputs'])} of {outputs} outputs, {result['collection']}")
    steps = steps_ms(result)
    if names[-1] not in steps:
        raise launch.MeasurementError(f"the timings have no step {names[-1]}, but {', '.join(steps)}")
    return sum(steps.get(name, 0) for name in names)


def make_tree(bench: Bench, base: str, argv: list[str]) -> str:
    """Creates a directory tree for a peer, with the same program that Fumehood runs."""
    where = os.path.join(base, "tree")
    os.mkdir(where)
    os.chdir(where)
    launch.run(argv, bench.env)
    os.chdir(bench.path("project"))
    return where


def time_commands(bench: Bench, *commands: list[str]) -> float:
    return launch.run_sequence(list(commands), bench.env).ms


def compare(rounds: int, ours, peer) -> dict:
    """Alternates Fumehood and the peer, and computes the ratio within each round."""
    def measure_after_sync(measure) -> float:
        # Flush the data that the previous measurement left dirty, so that this measurement does not wait for it.
        os.sync()
        return measure()
    pairs = [(measure_after_sync(ours), measure_after_sync(peer)) for _ in range(rounds)]
    return {"ms": median([a for a, _ in pairs]), "peer_ms": median([b for _, b in pairs]),
            "ratio": spread([a / b for a, b in pairs])}


# COLLECT: the steps from the recorded end of the program until the outputs and the record are durable. REMOVE: the step after
# them.
COLLECT = ["collected", "manifest_written", "objects_durable", "transaction_open", "committed"]
REMOVE = ["workspace_removed"]


def measure_collect(bench: Bench, _tools: list[Tool], again: bool) -> dict:
    rounds = 1 if bench.quick else 3
    mib = 256 if bench.quick else 1024
    many, empty = (2_000, 10_000) if bench.quick else (10_000, 100_000)
    disk, memory = bench.disk_dir(), bench.memory_dir
    copy = os.path.join(disk, "copy")
    # The outputs kept by an earlier measurement take up space.
    shutil.rmtree(f"{disk}/home-collect", ignore_errors=True)
    on_disk, in_memory = ["--workspace-root", disk], ["--workspace", "memory"]
    result: dict = {"mib": mib, "many": many, "empty": empty}

    written: list[int] = []

    def measure_collection(options: list[str], argv: list[str], outputs: int):
        return lambda: run_and_sum_steps_ms(bench, f"{disk}/home-collect", options, argv, COLLECT, outputs, written)

    def peer_commands(base: str, argv: list[str], *commands: list[str]):
        def peer() -> float:
            tree = make_tree(bench, base, argv)
            try:
                return time_commands(bench, *[[word.replace("TREE", tree) for word in c] for c in commands])
            finally:
                shutil.rmtree(tree)
                shutil.rmtree(copy, ignore_errors=True)
        return peer

    if shutil.which("b3sum"):
        synced, dirty = python_program(ONE_FILE, mib, "synced"), python_program(ONE_FILE, mib, "dirty")
        b3sum = ["b3sum", "--no-names", "TREE/big"]
        result["one"] = compare(rounds, measure_collection(on_disk, synced, 1), peer_commands(disk, synced, b3sum))
        # This includes the program's own writes, so a second copy of the file would make the ratio 2.
        result["one"]["written_ratio"] = median(written) / (mib << 20)
        result["one_dirty"] = compare(rounds, measure_collection(on_disk, dirty, 1), peer_commands(disk, dirty, ["sync", "TREE/big"], b3sum))
        if shutil.disk_usage(memory).free < (3 * mib) << 20:
            bench.leave_out("collection across file systems", "too little room in /dev/shm")
        else:
            cp = [["cp", "-r", "TREE", copy], ["b3sum", "--no-names", f"{copy}/big"]]
            result["across"] = compare(rounds, measure_collection(in_memory, dirty, 1), peer_commands(memory, dirty, *cp))
            durable = [cp[0], ["sync", f"{copy}/big"], cp[1]]
            result["across_durable"] = compare(1, measure_collection(in_memory, dirty, 1), peer_commands(memory, dirty, *durable))
    else:
        bench.leave_out("collection of one large file", "b3sum is not installed")

    def peer_copy(argv: list[str]):
        def peer() -> float:
            tree = make_tree(bench, disk, argv)
            # Flush all dirty data, so that this copy does not wait for it.
            os.sync()
            try:
                return time_commands(bench, ["cp", "-r", tree, copy], ["sync"])
            finally:
                shutil.rmtree(tree)
                shutil.rmtree(copy)
        return peer

    files = python_program(MANY_FILES, many, 10_000)
    result["many_files"] = compare(rounds, measure_collection(on_disk, files, many), peer_copy(files))
    result["many_not_inline"] = compare(rounds, measure_collection([*on_disk, "--inline-max", "0"], files, many), peer_copy(files))
    if not again:
        empty_files = python_program(MANY_FILES, empty, 0)
        result["empty_files"] = compare(1, measure_collection(on_disk, empty_files, empty), peer_copy(empty_files))
    return result


def measure_remove(bench: Bench, _tools: list[Tool], again: bool) -> dict:
    count = 50_000 if bench.quick else 200_000 if again else 1_000_000
    disk = bench.disk_dir()
    argv = python_program(MANY_FILES, count, 0)
    options = ["--db", "none", "--workspace-root", disk, "--timeout", "10m"]

    def ours() -> float:
        return run_and_sum_steps_ms(bench, f"{disk}/home-remove", options, argv, REMOVE, None, [])

    def peer() -> float:
        return time_commands(bench, ["rm", "-rf", make_tree(bench, disk, argv)])

    return {"files": count} | compare(1 if count == 1_000_000 else 2, ours, peer)
