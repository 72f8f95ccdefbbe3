"""Isolation and durability are never the price: what each of Fumehood's results says was in force.

The timed runs are quiet. With a database, every one of them is read back from the record; without one, a run with
--json is looked at in every round.
"""

import json
import os

from . import launch
from .host import query, read_json

# The layers of level full. One uid for each analysis is what root can give; others have their user namespace.
LAYERS = ["user_namespace", "mount_namespace", "pid_namespace", "net_namespace", "ipc_namespace", "uts_namespace",
          "cgroup_namespace", "no_new_privs", "capabilities", "landlock", "seccomp", "cgroup"]
BY_CGROUP = ["memory", "cpus", "pids"]
LIMITS = BY_CGROUP + ["wall_time", "open_files", "disk", "files", "logs"]


class Dishonest(Exception):
    """A run was measured that did not do all that it promises."""


def check(level: str, layers: dict, limits: dict, whose: str) -> None:
    wanted = LAYERS + (["leased_uid"] if os.geteuid() == 0 else [])
    missing = [layer for layer in wanted if not layers.get(layer)]
    if level != "full" or missing:
        raise Dishonest(f"{whose}: level {level}, without {', '.join(missing) or 'nothing'}")
    for name in LIMITS:
        limit = limits.get(name, {})
        by, how = limit.get("enforced_by") or "", limit.get("how_hard")
        if how not in ("hard", "watched") or (name in BY_CGROUP and not (by.startswith("cgroup v") and how == "hard")):
            raise Dishonest(f"{whose}: the limit {name} is enforced by {by!r}, {how}")


def check_result(result: dict, whose: str, recorded: bool) -> None:
    if result["status"] != "succeeded" or result["exit_code"] != 0:
        raise Dishonest(f"{whose}: {result['status']}, {result['reason']}")
    check(result["isolation"]["level"], result["isolation"]["layers"], result["limits"], whose)
    state = result["commit"]["state"]
    if state != ("committed" if recorded else "unrecorded"):
        raise Dishonest(f"{whose}: {state}")


def check_run(bench, tool) -> None:
    """The command that is timed, with --json in the place of -q."""
    argv = ["--json" if word == "-q" else word for word in tool.commands(["/bin/true"])[0]]
    path = bench.path("result.json")
    launch.run(argv, tool.env, stdout=path)
    tool.counted += 1
    check_result(read_json(path), tool.name, recorded=tool.url is not None)


def check_record(url: str, expected: int, whose: str, killed: int = 0) -> None:
    """Reads back every run that was made; `killed` of them had their program ended by the harness."""
    counted = failed = 0
    sql = "SELECT state, isolation_level, isolation, limits FROM attempts_v1 WHERE state <> 'queued'"
    for state, level, layers, limits in query(url, sql):
        if state not in ("succeeded", "failed"):
            raise Dishonest(f"{whose}: a recorded run is {state}")
        failed += state == "failed"
        check(level, json.loads(layers), json.loads(limits), whose)
        counted += 1
    if counted != expected or failed != killed:
        made = f"{expected} runs were made, {killed} of them killed"
        raise Dishonest(f"{whose}: {made}; {counted} are recorded, {failed} of them failed")
