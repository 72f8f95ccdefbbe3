"""What files cost: collecting one large one and very many small ones, and removing a million."""

import os
import shutil

from . import honesty, launch
from .host import Bench, read_json
from .launch import median, spread
from .tools import Tool

# Each content is new every time: the store keeps equal content once, and would have nothing to do.
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


def program(code: str, *args: object) -> list[str]:
    return ["/usr/bin/python3", "-c", code, *map(str, args)]


def steps_ms(result: dict) -> dict[str, float]:
    """What each step of a run cost, by the runner's own clock."""
    steps: dict[str, float] = {}
    if not result.get("timings"):
        raise launch.Failed("the result has no timings: this fumehood is too old to be measured")
    for step in result["timings"]["steps"]:
        steps[step["name"]] = steps.get(step["name"], 0) + step["us"] / 1000
    return steps


def ours_ms(bench: Bench, home: str, options: list[str], argv: list[str], names: list[str], outputs: int | None,
            written: list[int]) -> float:
    """What the named steps of one run took; None outputs: it runs without a database, and nothing is collected."""
    path = bench.path("result.json")
    limits = ["--files", "1200000", "--max-outputs", "1000000"]
    command = [bench.binary, "run", "--json", *limits, *options, "--", *argv]
    written.append(launch.run(command, bench.fumehood(home), stdout=path, may_fail=True).written_bytes)
    result = read_json(path)
    if result["status"] != "succeeded":
        raise launch.Failed(f"{' '.join(options)}: {result['status']}, {result['reason']}: {result['message']}")
    honesty.check_result(result, " ".join(["collection", *options]), recorded=outputs is not None)
    if outputs is not None and (len(result["outputs"]) != outputs or not result["collection"]["complete"]):
        raise launch.Failed(f"collection: {len(result['outputs'])} of {outputs} outputs, {result['collection']}")
    steps = steps_ms(result)
    if names[-1] not in steps:
        raise launch.Failed(f"the timings have no step {names[-1]}, but {', '.join(steps)}")
    return sum(steps.get(name, 0) for name in names)


def made(bench: Bench, base: str, argv: list[str]) -> str:
    """A tree for a peer, made by the same program as ours."""
    where = os.path.join(base, "tree")
    os.mkdir(where)
    os.chdir(where)
    launch.run(argv, bench.env)
    os.chdir(bench.path("project"))
    return where


def timed(bench: Bench, *commands: list[str]) -> float:
    return launch.sequence(list(commands), bench.env).ms


def compare(rounds: int, ours, peer) -> dict:
    """Ours and the peer in turn; the ratio is of each round."""
    def settled(measure) -> float:
        # What the one before left to be written is not this one's to wait for.
        os.sync()
        return measure()
    pairs = [(settled(ours), settled(peer)) for _ in range(rounds)]
    return {"ms": median([a for a, _ in pairs]), "peer_ms": median([b for _, b in pairs]),
            "ratio": spread([a / b for a, b in pairs])}


# The steps from a program that is dead, its end recorded, to outputs and record that are durable; and what is removed then.
COLLECT = ["collected", "manifest_written", "objects_durable", "transaction_open", "committed"]
REMOVE = ["workspace_removed"]


def measure_collect(bench: Bench, _tools: list[Tool], again: bool) -> dict:
    rounds = 1 if bench.quick else 3
    mib = 256 if bench.quick else 1024
    many, empty = (2_000, 10_000) if bench.quick else (10_000, 100_000)
    disk, memory = bench.disk(), bench.memory_dir
    copy = os.path.join(disk, "copy")
    # What was kept when this was measured before takes room.
    shutil.rmtree(f"{disk}/home-collect", ignore_errors=True)
    on_disk, in_memory = ["--workspace-root", disk], ["--workspace", "memory"]
    result: dict = {"mib": mib, "many": many, "empty": empty}

    written: list[int] = []

    def collected(options: list[str], argv: list[str], outputs: int):
        return lambda: ours_ms(bench, f"{disk}/home-collect", options, argv, COLLECT, outputs, written)

    def against(base: str, argv: list[str], *commands: list[str]):
        def peer() -> float:
            tree = made(bench, base, argv)
            try:
                return timed(bench, *[[word.replace("TREE", tree) for word in c] for c in commands])
            finally:
                shutil.rmtree(tree)
                shutil.rmtree(copy, ignore_errors=True)
        return peer

    if shutil.which("b3sum"):
        synced, dirty = program(ONE_FILE, mib, "synced"), program(ONE_FILE, mib, "dirty")
        b3sum = ["b3sum", "--no-names", "TREE/big"]
        result["one"] = compare(rounds, collected(on_disk, synced, 1), against(disk, synced, b3sum))
        # The program's own writing included: a second copy of its bytes would make this two.
        result["one"]["written_ratio"] = median(written) / (mib << 20)
        result["one_dirty"] = compare(rounds, collected(on_disk, dirty, 1), against(disk, dirty, ["sync", "TREE/big"], b3sum))
        if shutil.disk_usage(memory).free < (3 * mib) << 20:
            bench.leave_out("collection across file systems", "too little room in /dev/shm")
        else:
            cp = [["cp", "-r", "TREE", copy], ["b3sum", "--no-names", f"{copy}/big"]]
            result["across"] = compare(rounds, collected(in_memory, dirty, 1), against(memory, dirty, *cp))
            durable = [cp[0], ["sync", f"{copy}/big"], cp[1]]
            result["across_durable"] = compare(1, collected(in_memory, dirty, 1), against(memory, dirty, *durable))
    else:
        bench.leave_out("collection of one large file", "b3sum is not installed")

    def copied(argv: list[str]):
        def peer() -> float:
            tree = made(bench, disk, argv)
            # What others left to be written is not this copy's to wait for.
            os.sync()
            try:
                return timed(bench, ["cp", "-r", tree, copy], ["sync"])
            finally:
                shutil.rmtree(tree)
                shutil.rmtree(copy)
        return peer

    files = program(MANY_FILES, many, 10_000)
    result["many_files"] = compare(rounds, collected(on_disk, files, many), copied(files))
    result["many_not_inline"] = compare(rounds, collected([*on_disk, "--inline-max", "0"], files, many), copied(files))
    if not again:
        nothing = program(MANY_FILES, empty, 0)
        result["empty_files"] = compare(1, collected(on_disk, nothing, empty), copied(nothing))
    return result


def measure_remove(bench: Bench, _tools: list[Tool], again: bool) -> dict:
    count = 50_000 if bench.quick else 200_000 if again else 1_000_000
    disk = bench.disk()
    argv = program(MANY_FILES, count, 0)
    options = ["--db", "none", "--workspace-root", disk, "--timeout", "10m"]

    def ours() -> float:
        return ours_ms(bench, f"{disk}/home-remove", options, argv, REMOVE, None, [])

    def peer() -> float:
        return timed(bench, ["rm", "-rf", made(bench, disk, argv)])

    return {"files": count} | compare(1 if count == 1_000_000 else 2, ours, peer)
