"""The bars: limits on Fumehood's own cost.

Each bar has a figure, a limit and a formula, and names the part of the benchmark that measures it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .tools import BUBBLEWRAP, ISOLATE_FULL, NO_DATABASE, POSTGRES, SQLITE

# A bar missed by less than this counts as missed but does not fail the run: the machine itself varies this much.
TOLERANCE = 0.10


@dataclass
class Bar:
    name: str
    part: str
    formula: str
    figure: Callable[[dict], float]
    limit: Callable[[dict], float]
    at_least: bool = False
    unit: str = "x"
    # A stretch goal is shown in the table but never fails the run.
    stretch: bool = False


def launch_row(name: str) -> Callable[[dict], dict]:
    return lambda part: part["true"]["rows"][name]


def launch_ratio(name: str) -> Callable[[dict], float]:
    return lambda part: launch_row(name)(part)["ratio"]["p50"]


def limit_with_syncs(part: dict) -> float:
    return 1.0 + 3 * part["true"]["fdatasync_ms"]["p50"] / launch_row(BUBBLEWRAP)(part)["p50_ms"]


def constant(value: float) -> Callable[[dict], float]:
    return lambda _: value


def parallel_ratio(parallel: str) -> Callable[[dict], float]:
    return lambda part: part[parallel][SQLITE]["ratio"]["p50"]


BARS = [
    Bar("a run of /bin/true without database", "launch", "<= 0.8 x bubblewrap", launch_ratio(NO_DATABASE), constant(0.8)),
    Bar("a run of /bin/true with SQLite", "launch", "<= 1.0 x bubblewrap + 3 fdatasyncs", launch_ratio(SQLITE), limit_with_syncs),
    Bar("a run of /bin/true with SQLite", "launch", "<= isolate's init + run + cleanup", launch_ratio(SQLITE), launch_ratio(ISOLATE_FULL)),
    Bar("a run of /bin/true with SQLite (stretch)", "launch", "<= 1.0 x bubblewrap", launch_ratio(SQLITE), constant(1.0), stretch=True),
    Bar("a run of /bin/true with PostgreSQL", "launch", "<= 1.5 x bubblewrap", launch_ratio(POSTGRES), constant(1.5)),
    Bar("p95 with SQLite", "launch", "<= 1.5 x its own p50 + 3 ms", lambda part: launch_row(SQLITE)(part)["p95_ms"],
        lambda part: 1.5 * launch_row(SQLITE)(part)["p50_ms"] + 3, unit="ms"),
    Bar("runs per second with SQLite, 2 in parallel", "parallel", ">= 1.0 x bubblewrap", parallel_ratio("2"), constant(1.0), at_least=True),
    Bar("runs per second with SQLite, 8 in parallel", "parallel", ">= 1.0 x bubblewrap", parallel_ratio("8"), constant(1.0), at_least=True),
    Bar("through the queue, per analysis, 8 slots", "queue", "<= 1.3 x direct runs, 8 in parallel",
        lambda part: part["SQLite"]["ratio"]["p50"], constant(1.3)),
    Bar("memory while the program sleeps", "memory", "<= 6000 kB", lambda part: part[SQLITE], constant(6000), unit="kB"),
    Bar("the last run against the first, over bubblewrap's", "age", "<= 1.1", lambda part: part["growth"], constant(1.1)),
    Bar("cgroups more after those runs than before", "age", "<= 1 % of the runs",
        lambda part: part["cgroups_after"] - part["cgroups_before"], lambda part: part["runs"] / 100, unit="groups"),
    Bar("collecting one large file", "collect", "<= 1.3 x b3sum", lambda part: part["one"]["ratio"]["p50"], constant(1.3)),
    Bar("bytes written by that run, its program's included", "collect", "<= 1.1 x the file: no second copy",
        lambda part: part["one"]["written_ratio"], constant(1.1)),
    Bar("collecting it across file systems", "collect", "<= 1.3 x cp + b3sum",
        lambda part: part["across"]["ratio"]["p50"], constant(1.3)),
    Bar("collecting many files of 10 kB", "collect", "<= 2 x cp -r + sync",
        lambda part: part["many_files"]["ratio"]["p50"], constant(2.0)),
    Bar("removing very many files", "remove", "<= 1.2 x rm -rf", lambda part: part["ratio"]["p50"], constant(1.2)),
]


@dataclass
class Verdict:
    bar: Bar
    figure: float
    limit: float
    # The figures of all measurements, if the part was measured more than once.
    all_figures: list[float]
    label: str


def excess(bar: Bar, figure: float, limit: float) -> float:
    """Returns by how much the bar is missed, as a fraction of the limit. If the result is 0 or less, the bar is met."""
    if bar.at_least:
        return limit / figure - 1 if figure > 0 else float("inf")
    return figure / limit - 1


def judge(bar: Bar, measurements: list[dict]) -> Verdict | None:
    """Judges the best of the measurements. Returns None if the figures for this bar were not measured."""
    seen = []
    for part in measurements:
        try:
            seen.append((bar.figure(part), bar.limit(part)))
        except KeyError:
            continue
    if not seen:
        return None
    best = min(seen, key=lambda pair: excess(bar, *pair))
    over = excess(bar, *best)
    label = "met" if over <= 0 else "missed, by less than 10 %" if over <= TOLERANCE else "MISSED"
    if bar.stretch and over > 0:
        label = "not reached"
    return Verdict(bar, *best, [figure for figure, _ in seen] if len(seen) > 1 else [], label)
