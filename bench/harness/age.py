"""Compares the 10,000th run with the first: the cost of a run must not grow with the number of earlier runs."""

import random

from . import launch, result_checks
from .host import Bench, count_cgroups
from .launch import median
from .tools import BUBBLEWRAP, SQLITE, TRUE, Tool


def measure_block(ours: Tool, peer: Tool, runs: int) -> dict:
    """Alternates Fumehood and bubblewrap, so that other load on the machine cancels out in the ratio."""
    pairs = [(ours.run_once(TRUE).ms, peer.run_once(TRUE).ms) for _ in range(runs)]
    ours_ms, peer_ms = median([a for a, _ in pairs]), median([b for _, b in pairs])
    return {"p50_ms": ours_ms, "bubblewrap_p50_ms": peer_ms, "ratio": ours_ms / peer_ms}


def measure_age(bench: Bench, tools: list[Tool], again: bool) -> dict:
    total, size = (600, 60) if bench.quick else (10_000, 200)
    if again:
        total //= 4
    peer = next(tool for tool in tools if tool.name == BUBBLEWRAP)
    home = f"home-age-{random.randrange(10**9)}"
    ours = Tool(SQLITE, lambda program: [[bench.binary, "run", "-q", "--", *program]], bench.fumehood_env(home), is_fumehood=True,
                url=f"sqlite:{bench.path(home, 'fumehood.db')}")
    # Creates the database, so that the first timed run does not pay for it.
    ours.run_once(TRUE)
    groups = count_cgroups()
    first = measure_block(ours, peer, size)

    def commands() -> list[list[str]]:
        ours.run_count += 1
        return ours.commands(TRUE)

    while ours.run_count < total - size:
        # The runs between the two blocks are not timed, so four run in parallel.
        launch.measure_rate(commands, ours.env, 4, min(5.0, (total - size - ours.run_count) * 0.005))
    last = measure_block(ours, peer, size)
    result_checks.check_record(ours.url, ours.run_count, "the 10,000 runs")
    return {"runs": ours.run_count, "block": size, "first": first, "last": last, "growth": last["ratio"] / first["ratio"],
            "cgroups_before": groups, "cgroups_after": count_cgroups()}
