"""Measures the cost of the queue: of one analysis, and of one claim from a short, a long and a very long queue."""

import json
import os
import random
import signal
import time

from . import launch, result_checks
from .host import Bench, query
from .launch import median, spread
from .tools import TRUE, Tool


def write_batch(bench: Bench, count: int) -> str:
    path = bench.path("batch.jsonl")
    with open(path, "w", encoding="utf-8") as file:
        file.write((json.dumps({"command": TRUE}) + "\n") * count)
    return path


class Queue:
    """A Fumehood home and database with its own queue."""

    def __init__(self, bench: Bench, kind: str) -> None:
        name = f"queue-{kind}-{random.randrange(10**9)}"
        self.bench, self.env = bench, bench.fumehood_env(f"home-{name}")
        self.url = bench.create_database(name) if kind == "PostgreSQL" else f"sqlite:{bench.path(f'home-{name}', 'fumehood.db')}"
        self.db = ["--db", self.url]

    def submit(self, count: int) -> float:
        return launch.run([self.bench.binary, "submit", *self.db, "--from", write_batch(self.bench, count)], self.env).ms

    def worker_argv(self, *options: str) -> list[str]:
        return [self.bench.binary, "worker", "-q", "--slots", "8", *self.db, *options]

    def last_event_seq(self) -> int:
        return int(query(self.url, "SELECT coalesce(max(seq), 0) FROM events_v1")[0][0])

    def event_times_ms(self, event: str, after: int = 0) -> list[float]:
        """Returns the times, in ms, of the events of one kind whose sequence number is above `after`.

        Reading only new events keeps the query short, so that the worker does not wait for the harness.
        """
        if self.url.startswith("postgres:"):
            at = "extract(epoch from at::timestamptz) * 1000"
        else:
            at = "(julianday(at) - 2440587.5) * 86400000"
        sql = f"SELECT {at} FROM events_v1 WHERE seq > {after} AND event = '{event}'"
        return sorted(float(row[0]) for row in query(self.url, sql))

    def check_record(self) -> None:
        result_checks.check_record(self.url, len(self.event_times_ms("claimed")), "the queue")


def measure_queue(bench: Bench, tools: list[Tool], again: bool) -> dict:
    """Compares submitting and processing a batch with direct runs, eight in parallel. The figures are per analysis."""
    rounds, count = (2, 60) if bench.quick else (5, 300)
    result = {}
    for kind in database_kinds(bench):
        direct = next(tool for tool in tools if tool.name == f"fumehood, {kind}")

        def commands(direct: Tool = direct) -> list[list[str]]:
            direct.run_count += 1
            return direct.commands(TRUE)

        if again and kind != "SQLite":
            continue
        queue, mine, theirs = Queue(bench, kind), [], []
        queue.submit(16)
        launch.run(queue.worker_argv("--until-idle"), queue.env)
        for _ in range(rounds):
            theirs.append(1000 / launch.measure_rate(commands, direct.env, 8, 1.0 if bench.quick else 3.0))
            submitting = queue.submit(count)
            working = launch.run(queue.worker_argv("--until-idle"), queue.env).ms
            mine.append((submitting + working) / count)
        queue.check_record()
        result[kind] = {"ms": median(mine), "direct_ms": median(theirs), "count": count,
                        "ratio": spread([a / b for a, b in zip(mine, theirs)])}
    return result


def database_kinds(bench: Bench) -> list[str]:
    return ["SQLite", "PostgreSQL"] if bench.postgres else ["SQLite"]


def measure_claim_ms(queue: Queue, wanted: int) -> float:
    """Lets a worker claim `wanted` analyses, drains the worker, and returns the ms per claim."""
    before = queue.last_event_seq()
    pid = launch.spawn(queue.worker_argv(), queue.env)
    until = time.monotonic() + 120
    while len(queue.event_times_ms("claimed", before)) < wanted:
        if time.monotonic() > until:
            raise launch.MeasurementError(f"the worker claimed fewer than {wanted} in two minutes: {launch.last_stderr_lines(queue.env)}")
        time.sleep(0.1)
    os.kill(pid, signal.SIGTERM)
    code, _ = launch.reap(pid)
    if code != 0:
        raise launch.MeasurementError(f"the worker ended with {code}: {launch.last_stderr_lines(queue.env)}")
    at = queue.event_times_ms("claimed", before)
    # Skip the first claims: the eight slots are still free, so these claims wait for no analysis.
    return (at[-1] - at[8]) / (len(at) - 9)


def measure_claims(bench: Bench, _tools: list[Tool], _again: bool) -> dict:
    """Measures the cost of claiming and finishing an analysis while the queue is short, long and very long."""
    lengths, wanted = ((1_000, 10_000), 60) if bench.quick else ((1_000, 100_000), 300)
    result: dict = {}
    for kind in database_kinds(bench):
        queue, rows = Queue(bench, kind), {}
        # The first command creates SQLite's file. Submit first, so that no worker fails because the file is missing.
        queue.submit(8)
        launch.run(queue.worker_argv("--until-idle"), queue.env)
        pid = launch.spawn(queue.worker_argv(), queue.env)
        one = [bench.binary, "submit", *queue.db, "--", *TRUE]
        waits = []
        for _ in range(5 if bench.quick else 20):
            before = queue.last_event_seq()
            launch.run(one, queue.env)
            until = time.monotonic() + 30
            while not queue.event_times_ms("committed", before):
                if time.monotonic() > until:
                    raise launch.MeasurementError(f"an idle worker claimed nothing in half a minute: {launch.last_stderr_lines(queue.env)}")
                time.sleep(0.02)
            waits.append(queue.event_times_ms("claimed", before)[0] - queue.event_times_ms("submitted", before)[0])
        os.kill(pid, signal.SIGTERM)
        launch.reap(pid)
        rows["1"] = {"submitted_to_claimed_ms": median(waits)}
        for length in lengths:
            queued = len(queue.event_times_ms("submitted")) - len(queue.event_times_ms("claimed"))
            submitting = queue.submit(length - queued)
            rows[str(length)] = {"ms": measure_claim_ms(queue, wanted), "submit_ms_each": submitting / (length - queued)}
        queue.check_record()
        short, long = (rows[str(length)]["ms"] for length in lengths)
        result[kind] = {"lengths": rows, "growth": long / short}
    return result
