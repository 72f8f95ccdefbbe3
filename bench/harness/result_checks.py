"""Checks that every measured run was isolated, limited and recorded as promised, so that no figure is bought with less.

The timed runs print no result. With a database, the harness reads every run back from the record. Without a database, it
makes one more run with --json in every round and checks that result.
"""

import json
import os

from . import launch
from .host import query, read_json

# The layers of level full. Root also gives each analysis its own uid (`leased_uid`); other users have their user namespace.
LAYERS = ["user_namespace", "mount_namespace", "pid_namespace", "net_namespace", "ipc_namespace", "uts_namespace",
          "cgroup_namespace", "no_new_privs", "capabilities", "landlock", "seccomp", "cgroup"]
CGROUP_LIMITS = ["memory", "cpus", "pids"]
LIMITS = CGROUP_LIMITS + ["wall_time", "open_files", "disk", "files", "logs"]


class GuaranteeError(Exception):
    """A measured run was not isolated, limited or recorded as promised."""


def check_guarantees(level: str, layers: dict, limits: dict, subject: str) -> None:
    wanted = LAYERS + (["leased_uid"] if os.geteuid() == 0 else [])
    missing = [layer for layer in wanted if not layers.get(layer)]
    if level != "full" or missing:
        raise GuaranteeError(f"{subject}: level {level}, without {', '.join(missing) or 'nothing'}")
    for name in LIMITS:
        limit = limits.get(name, {})
        by, how = limit.get("enforced_by") or "", limit.get("how_hard")
        if how not in ("hard", "watched") or (name in CGROUP_LIMITS and not (by.startswith("cgroup v") and how == "hard")):
            raise GuaranteeError(f"{subject}: the limit {name} is enforced by {by!r}, {how}")


def check_result(result: dict, subject: str, recorded: bool) -> None:
    if result["status"] != "succeeded" or result["exit_code"] != 0:
        raise GuaranteeError(f"{subject}: {result['status']}, {result['reason']}")
    check_guarantees(result["isolation"]["level"], result["isolation"]["layers"], result["limits"], subject)
    state = result["commit"]["state"]
    if state != ("committed" if recorded else "unrecorded"):
        raise GuaranteeError(f"{subject}: {state}")


def check_run(bench, tool) -> None:
    """Runs the command that is timed, with --json instead of -q, and checks its result."""
    argv = ["--json" if word == "-q" else word for word in tool.commands(["/bin/true"])[0]]
    path = bench.path("result.json")
    launch.run(argv, tool.env, stdout=path)
    tool.run_count += 1
    check_result(read_json(path), tool.name, recorded=tool.url is not None)


def check_record(url: str, expected: int, subject: str, killed: int = 0) -> None:
    """Reads back and checks every recorded run. The harness killed the programs of `killed` of them."""
    counted = failed = 0
    sql = "SELECT state, isolation_level, isolation, limits FROM attempts_v1 WHERE state <> 'queued'"
    for state, level, layers, limits in query(url, sql):
        if state not in ("succeeded", "failed"):
            raise GuaranteeError(f"{subject}: a recorded run is {state}")
        failed += state == "failed"
        check_guarantees(level, json.loads(layers), json.loads(limits), subject)
        counted += 1
    if counted != expected or failed != killed:
        made = f"{expected} runs were made, {killed} of them killed"
        raise GuaranteeError(f"{subject}: {made}; {counted} are recorded, {failed} of them failed")
