#!/usr/bin/python3 -I
"""Asserts what Fumehood does on hosts that lack something. Runs as root in a virtual machine.

    restricted.py FUMEHOOD GROUP [GROUP...]

GROUP is one of:
    plain       the control: nothing is missing
    namespaces  user namespaces switched off, by either of Debian's two switches
    cgroup      cgroups read-only, then not mounted at all
    docker      the confinement of Docker's default profile (see docker_like.py)
    landlock    the kernel was booted without Landlock; with and without user namespaces

Prints `ok NAME` or `FAILED NAME: why` for each, and exits with 1 if any failed. It changes the machine's settings and puts
them back only as far as the next case needs, so use a machine that has no other purpose.
"""

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
ACCOUNT = "fumehood-test"
BINARY = "/usr/local/bin/fumehood-vm"
# The bound for a program that hangs. It is generous, because emulated processors are slow.
WAIT_S = 120
REFUSED = 125

results = {"ok": 0, "failed": 0}


class Run:
    """One `fumehood run` of a small program, and its output."""

    def __init__(self, *options, user=None, under=(), lives_as=None, told="--json"):
        """Starts the run as `user`. The command `under` is put before it; `under` may need root and become the user
        `lives_as`, whose home the run then uses.

        Remedies and other messages for people are printed only without --json, so use told="--quiet" to check them."""
        command = [*under, BINARY, "run", "--db", "none", told, *options, "--", "/bin/sh", "-c", "echo inside"]
        home = pwd.getpwnam(lives_as or user or "root").pw_dir
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": home, "LANG": "C.UTF-8"}
        environment["FUMEHOOD_HOME"] = f"{home}/fumehood"
        ended = subprocess.run(
            command, env=environment, cwd=home, user=user, group=user, extra_groups=[] if user else None,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S,
        )
        self.command = " ".join(command)
        self.code, self.stdout, self.stderr = ended.returncode, ended.stdout, ended.stderr
        try:
            self.record = json.loads(self.stdout)
        except ValueError:
            self.record = {}

    level = property(lambda self: self.record.get("isolation", {}).get("level"))
    layers = property(lambda self: self.record.get("isolation", {}).get("layers", {}))
    notices = property(lambda self: " ".join(self.record.get("notices", [])))

    def how_hard(self, limit):
        return self.record.get("limits", {}).get(limit, {}).get("how_hard")

    def ran_at(self, level):
        """Asserts that the program ran to its end at that level, and that the record says so."""
        self.expect(self.code == 0, "exit code 0")
        self.expect(self.record.get("status") == "succeeded", "status succeeded")
        self.expect(self.record.get("stdout", {}).get("text") == "inside\n", "the program's own words")
        self.expect(self.level == level, f"level {level}")
        return self

    def refused(self, *words):
        """Asserts that the program did not run, and that the message has these words (regular expressions)."""
        self.expect(self.code == REFUSED, f"exit code {REFUSED}")
        self.expect("inside\n" not in self.record.get("stdout", {}).get("text", self.stdout), "that the program never ran")
        said = self.stderr + self.notices + str(self.record.get("message"))
        for word in words:
            self.expect(re.search(word, said), f"a message with {word!r}")
        return self

    def warned(self, word):
        self.expect(re.search(word, self.stderr + self.notices), f"a warning with {word!r}")
        self.expect(re.search(word, self.notices), f"the warning {word!r} in the record")
        return self

    def expect(self, holds, what):
        if not holds:
            raise AssertionError(f"expected {what}\n{self}")

    def __str__(self):
        return (
            f"  command: {self.command}\n  exit code {self.code}, level {self.level}, layers {sorted(self.layers)}\n"
            f"  limits {self.record.get('limits')}\n  stdout: {self.stdout[-2000:]}\n  stderr: {self.stderr[-2000:]}"
        )


def case(name, check):
    try:
        check()
    except Exception as error:
        results["failed"] += 1
        why = error if isinstance(error, AssertionError) else traceback.format_exc()
        print(f"FAILED {name}: {why}", flush=True)
    else:
        results["ok"] += 1
        print(f"ok {name}", flush=True)


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def read(path):
    with open(path) as file:
        return file.read()


def must(*command):
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def nothing_missing():
    everything = {"user_namespace", "mount_namespace", "pid_namespace", "net_namespace", "landlock", "seccomp"}

    def whole(user):
        run = Run(user=user).ran_at("full")
        run.expect(everything <= set(run.layers), "every layer")
        run.expect(run.notices == "", "no notice")

    case("nothing missing, root: full", lambda: whole(None))
    case("nothing missing, plain: full", lambda: whole(ACCOUNT))
    case("nothing missing, plain: landlock when asked for", lambda: Run("--level", "landlock", user=ACCOUNT).ran_at("landlock"))

    def limits_of_root():
        run = Run()
        for limit in ("memory", "pids", "cpus"):
            run.expect(run.how_hard(limit) == "hard", f"{limit} held hard by the cgroup")

    case("nothing missing, root: the cgroup holds the limits", limits_of_root)


def no_user_namespaces():
    def without(setting, value, check):
        before = read(setting)
        write(setting, value)
        try:
            # Control: the switch works on this kernel.
            made = subprocess.run(["unshare", "--user", "true"], user=ACCOUNT, stderr=subprocess.DEVNULL).returncode
            assert made != 0, f"user namespaces can still be made with {setting} at {value}"
            check()
        finally:
            write(setting, before)

    switches = {
        "max_user_namespaces": ("/proc/sys/user/max_user_namespaces", "0"),
        "unprivileged_userns_clone": ("/proc/sys/kernel/unprivileged_userns_clone", "0"),
    }
    for name, (setting, value) in switches.items():
        for what, check in (
            ("plain: landlock, with a warning", lambda: Run(user=ACCOUNT).ran_at("landlock").warned("level full cannot be had")),
            (
                "plain: full is refused with the remedy",
                lambda: Run("--isolation", "full", user=ACCOUNT, told="--quiet").refused("user namespace", "fumehood doctor"),
            ),
            ("plain: level full is refused too", lambda: Run("--level", "full", user=ACCOUNT).refused("user namespace")),
        ):
            case(f"{name}=0, {what}", lambda: without(setting, value, check))
    # unprivileged_userns_clone affects only unprivileged users. max_user_namespaces affects everybody.
    setting, value = switches["unprivileged_userns_clone"]
    case("unprivileged_userns_clone=0, root: full", lambda: without(setting, value, lambda: Run().ran_at("full")))
    setting, value = switches["max_user_namespaces"]
    case(
        "max_user_namespaces=0, root: landlock, with a warning",
        lambda: without(setting, value, lambda: Run().ran_at("landlock").warned("level full cannot be had")),
    )


def no_cgroup():
    def watched(user):
        run = Run(user=user).ran_at("full")
        for limit in ("memory", "pids", "cpus"):
            by = run.record["limits"][limit]["enforced_by"]
            run.expect("cgroup" not in by, f"no cgroup named for {limit}")
        run.expect(run.how_hard("memory") == "watched", "memory recorded as watched")

    def both(condition):
        case(f"{condition}, root: the limits are watched", lambda: watched(None))
        case(f"{condition}, plain: the limits are watched", lambda: watched(ACCOUNT))

    case("cgroup not delegated, plain: the limits are watched", lambda: watched(ACCOUNT))
    # Fumehood does not silently weaken a limit that was asked for.
    case(
        "cgroup not delegated, plain: a limit asked for is refused with the remedy",
        lambda: Run("--memory", "256M", user=ACCOUNT).refused("memory", "--allow-degraded"),
    )
    must("mount", "-o", "remount,ro,bind", "/sys/fs/cgroup")
    try:
        both("cgroup read-only")
    finally:
        must("mount", "-o", "remount,rw,bind", "/sys/fs/cgroup")
    must("umount", "/sys/fs/cgroup")
    try:
        both("cgroup not mounted")
    finally:
        must("mount", "-t", "cgroup2", "-o", "nosuid,nodev,noexec", "cgroup2", "/sys/fs/cgroup")


def in_docker():
    docker = ("/usr/bin/python3", "-I", f"{HERE}/docker_like.py")
    as_root = (*docker, "--")
    as_user = (*docker, "--user", ACCOUNT, "--")

    def refuses_namespaces():
        attempt = ("--", "unshare", "--mount", "true")
        made = subprocess.run([*docker, *attempt], stderr=subprocess.DEVNULL)
        assert made.returncode != 0, "the profile let a namespace be made"
        free = subprocess.run([*docker, "--no-seccomp", "--no-capabilities", *attempt])
        assert free.returncode == 0, "no namespace could be made without the profile either"

    def stepped_down(under, lives_as=None):
        run = Run(under=under, lives_as=lives_as).ran_at("landlock").warned("level full cannot be had")
        run.expect("cgroup" not in run.record["limits"]["memory"]["enforced_by"], "no cgroup named for memory")
        run.expect(run.how_hard("memory") == "watched", "memory recorded as watched")

    case("docker, the profile refuses namespaces", refuses_namespaces)
    case("docker, root: landlock, with a warning, limits watched", lambda: stepped_down(as_root))
    case("docker, plain: landlock, with a warning, limits watched", lambda: stepped_down(as_user, ACCOUNT))
    case(
        "docker, root: full is refused with the remedy",
        lambda: Run("--isolation", "full", under=as_root, told="--quiet").refused("namespace", "fumehood doctor"),
    )
    # With seccomp=unconfined alone, the masks still prevent the mount of a new /proc in a user namespace.
    masked = (*docker, "--no-seccomp", "--user", ACCOUNT, "--")
    case("docker without its profile, plain: landlock, for /proc is masked", lambda: stepped_down(masked, ACCOUNT))
    bare = (*docker, "--no-seccomp", "--no-masks", "--user", ACCOUNT, "--")
    case("docker without its profile and masks, plain: full", lambda: Run(under=bare, lives_as=ACCOUNT).ran_at("full"))


def no_landlock():
    def truly_off():
        assert "landlock" not in read("/sys/kernel/security/lsm"), "this kernel was booted with Landlock"

    case("no Landlock, the kernel says so", truly_off)
    for user in (None, ACCOUNT):
        who = "plain" if user else "root"

        def full(user=user):
            run = Run(user=user).ran_at("full")
            run.expect("landlock" not in run.layers, "no landlock layer in the record")
            run.expect("seccomp" in run.layers, "the seccomp layer in the record")
            run.warned("Landlock")

        case(f"no Landlock, {who}: full without that layer, with a notice", full)
        case(f"no Landlock, {who}: level landlock is refused", lambda user=user: Run("--level", "landlock", user=user).refused("Landlock"))
    write("/proc/sys/user/max_user_namespaces", "0")
    for user in (None, ACCOUNT):
        who = "plain" if user else "root"
        case(f"no Landlock, no user namespaces, {who}: refused", lambda user=user: Run(user=user).refused("Landlock", "user namespace"))


GROUPS = {
    "plain": nothing_missing,
    "namespaces": no_user_namespaces,
    "cgroup": no_cgroup,
    "docker": in_docker,
    "landlock": no_landlock,
}


def main():
    binary, *groups = sys.argv[1:]
    shutil.copy(binary, BINARY)
    os.chmod(BINARY, 0o755)
    # The policy and the accounts of the host must not affect this test.
    shutil.rmtree("/etc/fumehood", ignore_errors=True)
    try:
        account = pwd.getpwnam(ACCOUNT)
    except KeyError:
        must("useradd", "--no-create-home", ACCOUNT)
        account = pwd.getpwnam(ACCOUNT)
    os.makedirs(account.pw_dir, mode=0o700, exist_ok=True)
    os.chown(account.pw_dir, account.pw_uid, account.pw_gid)
    for group in groups:
        GROUPS[group]()
    print(f"{results['ok']} passed, {results['failed']} failed", flush=True)
    sys.exit(1 if results["failed"] or not results["ok"] else 0)


main()
