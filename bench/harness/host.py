"""Prepares the host: packages, the build, temporary directories, a private PostgreSQL server."""

import glob
import json
import os
import pathlib
import platform
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
import time

from . import launch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGES = ["bubblewrap", "firejail", "crun", "runc", "b3sum", "nsjail", "isolate", "postgresql", "util-linux"]


def log(text: str) -> None:
    print(f"bench: {text}", flush=True)


def install_packages() -> None:
    """Installs missing packages if the host is Debian and the user is root. The packages stay installed."""
    def is_installed(package: str) -> bool:
        query = ["dpkg-query", "-W", "-f", "${db:Status-Status}", package]
        return subprocess.run(query, capture_output=True, text=True).stdout == "installed"

    if not shutil.which("dpkg-query") or not shutil.which("apt-get"):
        return log("this is not Debian: only peers that are already installed are measured")
    missing = [p for p in PACKAGES if not is_installed(p)]
    if not missing or os.geteuid() != 0:
        if missing:
            log(f"not root, so not installed: {' '.join(missing)}")
        return
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    if not glob.glob("/var/lib/apt/lists/*Packages*"):
        subprocess.run(["apt-get", "-qq", "update"], env=env, check=False)
    # Installing PostgreSQL would start a system-wide server; the harness starts its own.
    conf = pathlib.Path("/etc/postgresql-common/createcluster.conf")
    if "postgresql" in missing and not conf.exists():
        conf.parent.mkdir(exist_ok=True)
        conf.write_text("create_main_cluster = false\n")
    for package in missing:
        command = ["apt-get", "-qq", "install", "-y", "--no-install-recommends", package]
        if subprocess.run(command, env=env, capture_output=True).returncode != 0:
            log(f"{package}: cannot be installed from this machine's package archive")


def build() -> str:
    log("cargo build --release --locked")
    subprocess.run(["cargo", "build", "--release", "--locked", "-q", "-p", "fumehood"], cwd=ROOT, check=True)
    target = os.environ.get("CARGO_TARGET_DIR", ROOT / "target")
    return str(pathlib.Path(target) / "release" / "fumehood")


def machine_facts(binary: str) -> dict:
    def first_line(path: str) -> str:
        try:
            return pathlib.Path(path).read_text().splitlines()[0].strip()
        except (OSError, IndexError):
            return "unknown"

    def output(*argv: str) -> str:
        return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT).stdout.strip()

    model = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "kernel": platform.release(),
        "cpu": model[0] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "governor": first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
        "load_before": os.getloadavg()[0],
        "root": os.geteuid() == 0,
        "file_system": output("stat", "-f", "-c", "%T", "/var/tmp"),
        "fumehood": output(binary, "--version"),
        "commit": output("git", "describe", "--always", "--dirty"),
    }


def count_cgroups() -> int:
    """Counts the groups that the kernel holds.

    The count includes dying groups: they are removed, but some page is still charged to them.
    """
    count = 0
    for line in open("/proc/cgroups").read().splitlines()[1:]:
        name, hierarchy, groups, _ = line.split()
        if name == "memory" and hierarchy != "0":
            return int(groups)
    stat = pathlib.Path("/sys/fs/cgroup/cgroup.stat")
    if stat.exists():
        count = sum(int(line.split()[1]) for line in stat.read_text().splitlines()
                    if line.split()[0] in ("nr_descendants", "nr_dying_descendants"))
    return count


class Bench:
    """One invocation of the benchmark: its directories, its environment, its servers. `close` removes all of them."""

    def __init__(self, binary: str, quick: bool) -> None:
        self.binary, self.quick = binary, quick
        self.cleanups: list = []
        # A dict used as an ordered set: each home once, in order of creation.
        self.homes: dict[str, None] = {}
        self.left_out: list[str] = []
        self.failed: list[str] = []
        self.dir = tempfile.mkdtemp(prefix="fumehood-bench-", dir="/var/tmp")
        os.chmod(self.dir, 0o755)
        self.memory_dir = tempfile.mkdtemp(prefix="fumehood-bench-", dir="/dev/shm")
        self.env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": self.path("user"),
            "LANG": "C.UTF-8",
            "BENCH_STDERR": self.path("stderr"),
        }
        # Fumehood takes the current directory as the project. An empty project makes the readable files the same on every machine.
        os.makedirs(self.path("project"))
        os.chdir(self.path("project"))
        self.postgres: str | None = None
        # The path of the real program: Debian's /usr/bin/psql is a wrapper script.
        self.psql_path: str | None = None

    def path(self, *names: str) -> str:
        return os.path.join(self.dir, *names)

    def fumehood_env(self, home: str) -> dict[str, str]:
        """Returns the environment for a Fumehood whose home is `home`, and creates that home if it is missing."""
        where = self.path(home)
        os.makedirs(where, mode=0o700, exist_ok=True)
        self.homes[where] = None
        return self.env | {"FUMEHOOD_HOME": where}

    def disk_dir(self) -> str:
        """Returns a directory on a new private ext4, for benchmarks that create and remove very many files.

        The cost of a file depends on the history of the file system. For example, ext4 without a journal skips every
        inode that was freed in the last minutes. If no image can be mounted, the directory is on the file system of
        /var/tmp.
        """
        where = self.path("disk")
        if os.path.exists(where):
            return where
        os.mkdir(where)
        image = self.path("image")
        steps = [["truncate", "-s", "16G", image],
                 ["mkfs.ext4", "-q", "-F", "-N", "2500000", "-E", "lazy_itable_init=0,lazy_journal_init=0", image],
                 ["mount", "-o", "loop", image, where]]
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, env=self.env)
            if done.returncode != 0:
                self.leave_out("a file system of its own for the file benchmarks", f"{step[0]}: {done.stderr.strip()}")
                return where
        self.cleanups.append(lambda: subprocess.run(["umount", "-l", where], check=False))
        return where

    def start_postgres(self) -> None:
        """Starts a private server with default durability: fsync stays on.

        Authentication method `trust` is enough, because the socket is in a private directory.
        """
        found = sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"), key=lambda p: int(p.split("/")[4]))
        if not found:
            return self.leave_out("PostgreSQL", "it is not installed")
        programs = os.path.dirname(found[-1])
        where = self.path("pg")
        os.mkdir(where, 0o700)
        prefix = []
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            os.chown(where, account.pw_uid, account.pw_gid)
            prefix = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]

        def call(*argv: str) -> None:
            done = subprocess.run(prefix + list(argv), cwd=where, capture_output=True, text=True)
            if done.returncode != 0:
                raise launch.MeasurementError(f"{argv[0]}: {done.stderr.strip()}")

        data = os.path.join(where, "data")
        call(f"{programs}/initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C")
        self.cleanups.append(lambda: call(f"{programs}/pg_ctl", "-D", data, "-m", "immediate", "-s", "stop"))
        options = f"-k {where} -c listen_addresses=''"
        # The server inherits the harness's pipes from pg_ctl and would keep them open, so send its output to a log file.
        call(f"{programs}/pg_ctl", "-D", data, "-w", "-s", "-l", os.path.join(where, "log"), "-o", options, "start")
        self.postgres, self.psql_path = where, f"{programs}/psql"

    def create_database(self, name: str) -> str:
        """Creates a PostgreSQL database with Fumehood's schema and returns its URL."""
        run_psql(self.postgres, "postgres", f'CREATE DATABASE "{name}"')
        url = f"postgres:///{name}?host={self.postgres}&user=postgres"
        launch.run([self.binary, "db", "migrate", "--db", url], self.fumehood_env("home-migrate"))
        return url

    def leave_out(self, what: str, why: str) -> None:
        self.left_out.append(f"{what}: {why}")
        log(f"left out: {what}: {why}")

    def close(self) -> None:
        launch.terminate_all()
        for home in self.homes:
            gc = [self.binary, "gc"]
            subprocess.run(gc, env=self.env | {"FUMEHOOD_HOME": home}, capture_output=True, timeout=120)
        for cleanup in reversed(self.cleanups):
            try:
                cleanup()
            except (launch.MeasurementError, OSError) as error:
                log(f"clean-up failed: {error}")
        os.chdir("/")
        shutil.rmtree(self.dir, ignore_errors=True)
        shutil.rmtree(self.memory_dir, ignore_errors=True)


def run_psql(host: str, database: str, sql: str) -> list[list[str]]:
    argv = ["psql", "-h", host, "-U", "postgres", "-d", database, "-XAtq", "-F", "\x1f", "-v", "ON_ERROR_STOP=1", "-c", sql]
    # Search Fumehood's own schema, if the database has one.
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"PGOPTIONS": "-c search_path=fumehood"})
    if done.returncode != 0:
        raise launch.MeasurementError(f"psql: {done.stderr.strip()}")
    return [line.split("\x1f") for line in done.stdout.splitlines()]


def query(url: str, sql: str) -> list:
    """Reads Fumehood's public views from SQLite or PostgreSQL."""
    if url.startswith("postgres:"):
        name, host = url.split("///")[1].split("?host=")
        return run_psql(host.split("&")[0], name, sql)
    connection = sqlite3.connect(f"file:{url.removeprefix('sqlite:')}?mode=ro", uri=True, timeout=30)
    try:
        return [list(row) for row in connection.execute(sql)]
    finally:
        connection.close()


def read_json(path: str) -> dict:
    with open(path, encoding="utf-8") as file:
        return json.load(file)
