"""The 10,000th run against the first: what must not grow with the runs that were made before."""

import random

from . import honesty, launch
from .host import Bench, cgroups
from .launch import median
from .tools import BUBBLEWRAP, SQLITE, TRUE, Tool


def block(ours: Tool, peer: Tool, runs: int) -> dict:
    """Ours and bubblewrap in turn, so that what the machine does meanwhile divides out."""
    pairs = [(ours.once(TRUE).ms, peer.once(TRUE).ms) for _ in range(runs)]
    mine, theirs = median([a for a, _ in pairs]), median([b for _, b in pairs])
    return {"p50_ms": mine, "bubblewrap_p50_ms": theirs, "ratio": mine / theirs}


def measure_age(bench: Bench, tools: list[Tool], again: bool) -> dict:
    total, size = (600, 60) if bench.quick else (10_000, 200)
    if again:
        total //= 4
    peer = next(tool for tool in tools if tool.name == BUBBLEWRAP)
    home = f"home-age-{random.randrange(10**9)}"
    ours = Tool(SQLITE, lambda program: [[bench.binary, "run", "-q", "--", *program]], bench.fumehood(home), ours=True,
                url=f"sqlite:{bench.path(home, 'fumehood.db')}")
    # Makes the database, which the first run of all would otherwise be charged with.
    ours.once(TRUE)
    groups = cgroups()
    first = block(ours, peer, size)

    def commands() -> list[list[str]]:
        ours.counted += 1
        return ours.commands(TRUE)

    while ours.counted < total - size:
        # In between nothing is timed, so several go at once.
        launch.per_second(commands, ours.env, 4, min(5.0, (total - size - ours.counted) * 0.005))
    last = block(ours, peer, size)
    honesty.check_record(ours.url, ours.counted, "the 10,000 runs")
    return {"runs": ours.counted, "block": size, "first": first, "last": last, "growth": last["ratio"] / first["ratio"],
            "cgroups_before": groups, "cgroups_after": cgroups()}
