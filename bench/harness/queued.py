"""What the queue costs: an analysis through it, and one taken from a queue that is short, long and very long."""

import json
import os
import random
import signal
import time

from . import honesty, launch
from .host import Bench, query
from .launch import median, spread
from .tools import TRUE, Tool


def batch(bench: Bench, count: int) -> str:
    path = bench.path("batch.jsonl")
    with open(path, "w", encoding="utf-8") as file:
        file.write((json.dumps({"command": TRUE}) + "\n") * count)
    return path


class Queue:
    """A Fumehood with a queue of its own."""

    def __init__(self, bench: Bench, kind: str) -> None:
        name = f"queue-{kind}-{random.randrange(10**9)}"
        self.bench, self.env = bench, bench.fumehood(f"home-{name}")
        self.url = bench.database(name) if kind == "PostgreSQL" else f"sqlite:{bench.path(f'home-{name}', 'fumehood.db')}"
        self.db = ["--db", self.url]

    def submit(self, count: int) -> float:
        return launch.run([self.bench.binary, "submit", *self.db, "--from", batch(self.bench, count)], self.env).ms

    def worker(self, *options: str) -> list[str]:
        return [self.bench.binary, "worker", "-q", "--slots", "8", *self.db, *options]

    def last(self) -> int:
        return int(query(self.url, "SELECT coalesce(max(seq), 0) FROM events_v1")[0][0])

    def events(self, event: str, after: int = 0) -> list[float]:
        """When each happened, in ms. Those before a known one are left out: a worker is not to wait for our reading."""
        if self.url.startswith("postgres:"):
            at = "extract(epoch from at::timestamptz) * 1000"
        else:
            at = "(julianday(at) - 2440587.5) * 86400000"
        sql = f"SELECT {at} FROM events_v1 WHERE seq > {after} AND event = '{event}'"
        return sorted(float(row[0]) for row in query(self.url, sql))

    def check(self) -> None:
        honesty.check_record(self.url, len(self.events("claimed")), "the queue")


def measure_queue(bench: Bench, tools: list[Tool], again: bool) -> dict:
    """Per analysis: submitting a batch and working it off, against as many direct runs, eight at once."""
    rounds, count = (2, 60) if bench.quick else (5, 300)
    result = {}
    for kind in kinds(bench):
        direct = next(tool for tool in tools if tool.name == f"fumehood, {kind}")

        def commands(direct: Tool = direct) -> list[list[str]]:
            direct.counted += 1
            return direct.commands(TRUE)

        if again and kind != "SQLite":
            continue
        queue, mine, theirs = Queue(bench, kind), [], []
        queue.submit(16)
        launch.run(queue.worker("--until-idle"), queue.env)
        for _ in range(rounds):
            theirs.append(1000 / launch.per_second(commands, direct.env, 8, 1.0 if bench.quick else 3.0))
            submitting = queue.submit(count)
            working = launch.run(queue.worker("--until-idle"), queue.env).ms
            mine.append((submitting + working) / count)
        queue.check()
        result[kind] = {"ms": median(mine), "direct_ms": median(theirs), "count": count,
                        "ratio": spread([a / b for a, b in zip(mine, theirs)])}
    return result


def kinds(bench: Bench) -> list[str]:
    return ["SQLite", "PostgreSQL"] if bench.postgres else ["SQLite"]


def work_some(queue: Queue, wanted: int) -> float:
    """Lets a worker claim `wanted`, drains it, and says how many ms it took per claim."""
    before = queue.last()
    pid = launch.spawn(queue.worker(), queue.env)
    until = time.monotonic() + 120
    while len(queue.events("claimed", before)) < wanted:
        if time.monotonic() > until:
            raise launch.Failed(f"the worker claimed fewer than {wanted} in two minutes: {launch.said(queue.env)}")
        time.sleep(0.1)
    os.kill(pid, signal.SIGTERM)
    code, _ = launch.reap(pid)
    if code != 0:
        raise launch.Failed(f"the worker ended with {code}: {launch.said(queue.env)}")
    at = queue.events("claimed", before)
    # The first eight find every slot free.
    return (at[-1] - at[8]) / (len(at) - 9)


def measure_claims(bench: Bench, _tools: list[Tool], _again: bool) -> dict:
    """What a claimed and finished analysis costs while the queue is short, long and very long."""
    lengths, wanted = ((1_000, 10_000), 60) if bench.quick else ((1_000, 100_000), 300)
    result: dict = {}
    for kind in kinds(bench):
        queue, rows = Queue(bench, kind), {}
        # SQLite's file is made by whoever comes first; a worker may not be refused for want of it.
        queue.submit(8)
        launch.run(queue.worker("--until-idle"), queue.env)
        pid = launch.spawn(queue.worker(), queue.env)
        one = [bench.binary, "submit", *queue.db, "--", *TRUE]
        waits = []
        for _ in range(5 if bench.quick else 20):
            before = queue.last()
            launch.run(one, queue.env)
            until = time.monotonic() + 30
            while not queue.events("committed", before):
                if time.monotonic() > until:
                    raise launch.Failed(f"an idle worker took nothing in half a minute: {launch.said(queue.env)}")
                time.sleep(0.02)
            waits.append(queue.events("claimed", before)[0] - queue.events("submitted", before)[0])
        os.kill(pid, signal.SIGTERM)
        launch.reap(pid)
        rows["1"] = {"submitted_to_claimed_ms": median(waits)}
        for length in lengths:
            queued = len(queue.events("submitted")) - len(queue.events("claimed"))
            submitting = queue.submit(length - queued)
            rows[str(length)] = {"ms": work_some(queue, wanted), "submit_ms_each": submitting / (length - queued)}
        queue.check()
        short, long = (rows[str(length)]["ms"] for length in lengths)
        result[kind] = {"lengths": rows, "growth": long / short}
    return result
