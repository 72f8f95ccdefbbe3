#!/bin/bash
# Runs in bin/vm-systemd: the worker as packaging/systemd ships it, under the system's manager and under a user's own.
# The worker is restarted, killed, hung, drained and stopped. Meanwhile the analyses that it started go on in the same
# processes, and each commits once. Arguments: system, user (both if there are none). With version 1 of cgroups only
# system works, because the kernel then holds no limits for a plain user.
set -uo pipefail
failures=0
work=$(mktemp -d)
chmod 755 "$work"
packaged=$(cd "$(dirname "$0")/../../../packaging/systemd" && pwd)
cgroups=1; [ ! -e /sys/fs/cgroup/cgroup.controllers ] || cgroups=2
version=$(systemctl --version | awk 'NR == 1 { print $2 }')
echo "$(systemctl --version | head -1), Linux $(uname -r)"

# One check: its name, then a command that must succeed. Its output is shown only if the command fails.
check() {
    local name=$1; shift
    if "$@" >"$work/said" 2>&1; then
        echo "ok   $manager: $name"
    else
        echo "FAIL $manager: $name"; sed 's/^/     | /' "$work/said" | cut -c1-2000 | tail -n 30
        failures=$((failures + 1))
    fi
}

# Waits until the command succeeds. The bound is long enough for an emulated machine.
until_true() {
    local deadline=$((SECONDS + 90))
    until "$@"; do
        [ $SECONDS -lt $deadline ] || { echo "not in time: $*"; return 1; }
        sleep 0.3
    done
}

# Each program waits in its workspace for the file `go`, and has its id among its arguments.
PROGRAM='mkdir -p out; echo "$0" >>out/starts; n=0
until [ -e go ] || [ $n = 900 ]; do sleep 1; n=$((n + 1)); done; [ -e go ]'
submit() { local id; for id; do fh submit --id "$id" --memory 64M --pids 20 --output 'out/*' -- sh -c "$PROGRAM" "witness-$id" || return 1; done; }
let_go() { local id; for id; do touch "/tmp/scidex-analysis-$id/go" || return 1; done; }

# Writes a line for each start of one of these programs that it sees: id, pid and start time of the process.
cat >"$work/watch.py" <<'PY'
import os, sys, time
def words(pid):
    return open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")
seen = set()
with open(sys.argv[1], "w", buffering=1) as out:
    while True:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                mine = words(pid)
                stat = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
                # A shell that has forked and not yet executed has the same words as its parent.
                if not mine[0].endswith(b"/sh") or len(mine) < 5 or words(stat[1]) == mine:
                    continue
            except OSError:
                continue
            start = (mine[3].decode(), pid, stat[19])
            if start[0].startswith("witness-") and start not in seen:
                seen.add(start)
                print(*start, file=out)
        time.sleep(0.5)
PY
# The processes of these lines that still live.
alive() {
    local id pid born now
    while read -r id pid born; do
        now=$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null | cut -d' ' -f20)
        [ "$now" = "$born" ] && echo "$id $pid $born"
    done <"$work/starts" | sort
}
live() { [ "$(alive | wc -l)" = "$1" ]; }
same_as_before() { local now; now=$(alive); [ "$now" = "$before" ] || { echo "before: $before"; echo "now: $now"; false; }; }

main() { ctl show -P MainPID fumehood-worker.service; }
state() { ctl show -P ActiveState fumehood-worker.service; }
is() { [ "$(state)" = "$1" ] || { echo "it is $(state), not $1"; false; }; }
another_main() { local pid; pid=$(main); [ "$pid" != 0 ] && [ "$pid" != "$old" ] && [ "$(state)" = active ]; }
field() { fh show "$1" --json | python3 -c "import json, sys; print(json.load(sys.stdin)[sys.argv[1]])" "$2"; }
in_state() { [ "$(field "$1" status)" = "$2" ] || { echo "$1 is $(field "$1" status), not $2"; false; }; }

# Each analysis succeeded at its first attempt, and its program was seen to start only once.
ended_well() {
    local id
    fh wait --timeout 120s "$@" || return 1
    for id; do
        [ "$(field "$id" status) $(field "$id" attempt) $(field "$id" outputs_count)" = "succeeded 1 1" ] || { fh show "$id" --json; return 1; }
        [ "$(grep -c "^witness-$id " "$work/starts")" = 1 ] || { cat "$work/starts"; return 1; }
    done
}

# The pids of the runners, whose first argument is `__runner`.
runners() {
    local file words
    for file in /proc/[0-9]*/cmdline; do
        mapfile -d '' -t words <"$file" 2>/dev/null || continue
        [ "${words[1]-}" = __runner ] && { file=${file#/proc/}; echo "${file%/cmdline}"; }
    done
}
# With version 2 each runner is in a scope beside the worker's unit, in the same slice. With version 1 the runners are
# in the unit, and its KillMode= keeps them.
each_in_its_place() {
    local pid place wanted count=0
    for pid in $(runners); do
        case $cgroups in
            2) place=$(sed -n 's/^0:://p' "/proc/$pid/cgroup") wanted="$tree/fumehood.slice/fumehood-$pid-*.scope/*" ;;
            1) place=$(sed -n 's/^[0-9]*:name=systemd://p' "/proc/$pid/cgroup") wanted=$tree/fumehood.slice/fumehood-worker.service ;;
        esac
        [[ $place == $wanted ]] || { echo "runner $pid is in $place"; return 1; }
        # A runner must not inherit the variables by which the worker talks to the manager.
        ! grep -qz '^NOTIFY_SOCKET=\|^WATCHDOG_' "/proc/$pid/environ" || { echo "runner $pid can speak for the worker"; return 1; }
        count=$((count + 1))
    done
    [ $count = "$1" ] || { echo "$count runners"; ctl status fumehood-worker.service; false; }
}
limits_are_the_kernels() {
    fh show "$1" --json | python3 -c "
import json, sys
d = json.load(sys.stdin)
held = d['limits']['memory']['enforced_by']
sys.exit(0 if d['isolation_level'] == 'full' and held.startswith('cgroup v') else f'{d[\"isolation_level\"]}, memory by {held}')"
}

drop_in() {
    mkdir -p "$units/fumehood-worker.service.d"
    printf '%s\n' '[Service]' "${@:2}" >"$units/fumehood-worker.service.d/$1.conf"
    ctl daemon-reload
}
no_drop_in() { rm -f "$units/fumehood-worker.service.d/$1.conf"; ctl daemon-reload; }
# The restart must be quick, as far as an emulated machine allows. A restart that waits for the programs would take a
# quarter of an hour.
restart() { quickly restart && another_main; }
quickly() {
    local begin=$SECONDS
    ctl "$1" fumehood-worker.service && [ $((SECONDS - begin)) -lt 60 ] || { echo "$1 took $((SECONDS - begin)) s"; return 1; }
}

# The unit must not become active before the worker itself says that it is ready.
ready_when_it_says() {
    ctl start --no-block fumehood-worker.service
    until_true eval '[ "$(main)" != 0 ]' && sleep 3 && is activating && touch "$1" && until_true is active
}
# Some of the systemd versions are older than the key DelegateSubgroup.
well_formed() {
    local said
    said=$(verify 2>&1 | grep -i fumehood | grep -v DelegateSubgroup)
    [ -z "$said" ] || { echo "$said"; false; }
}
never_active() {
    local deadline=$((SECONDS + 8))
    ctl start --no-block fumehood-worker.service
    while [ $SECONDS -lt $deadline ]; do
        [ "$(state)" != active ] || { echo "active with a database that is none"; return 1; }
        sleep 0.3
    done
    ctl stop fumehood-worker.service
}

# systemd learns by an event, a moment later, that a group is empty.
groups() { find /sys/fs/cgroup -name 'fumehood[-_]*' ! -name fumehood-worker.service; }
nothing() { [ -z "$(ctl list-units --all --no-legend --plain 'fumehood-*.scope')$(groups)$(runners)" ]; }
nothing_left() { until_true nothing || { ctl list-units --all 'fumehood-*.scope'; groups; runners; return 1; }; }

scenario() {
    rm -f "$work/starts"; : >"$work/starts"
    python3 "$work/watch.py" "$work/starts" &
    local watcher=$!
    cp "$packaged/fumehood.slice" "$units/"
    cp "$1" "$units/fumehood-worker.service"
    drop_in 1-trial ExecStart= 'ExecStart=/usr/bin/fumehood worker --slots 3' WatchdogSec=20s RestartSec=1s
    check "the units are well-formed" well_formed

    drop_in 2-wrong 'Environment=FUMEHOOD_DB=sqlite:/etc/passwd'
    check "with a database that is none it is not ready, however often" never_active
    no_drop_in 2-wrong
    drop_in 2-slow ExecStart= "ExecStart=/bin/sh -c 'until [ -e $work/slow-$manager ]; do sleep 0.2; done; exec /usr/bin/fumehood worker --slots 3'"
    check "it is ready when it says so" ready_when_it_says "$work/slow-$manager"
    ctl stop fumehood-worker.service
    no_drop_in 2-slow
    ctl set-property --runtime fumehood.slice MemoryMax=1200M
    check "it starts" eval 'ctl start fumehood-worker.service && is active && [ -n "$(ctl show -P StatusText fumehood-worker.service)" ]'

    check "three are submitted" submit w1 w2 w3
    check "and run" until_true live 3
    before=$(alive)
    check "each has its place beside the worker's unit, in the slice" each_in_its_place 3
    old=$(main)
    check "the unit is restarted, without waiting for them" restart
    check "and the programs are the same processes" same_as_before
    check "a fourth is submitted" submit x1
    sleep 4 # There is no event to wait for, because nothing must happen.
    check "and waits, since the new worker counts the three" eval 'same_as_before && in_state x1 queued'
    check "one may end" let_go w1
    check "it commits" ended_well w1
    check "and makes room for the fourth" until_true eval '[ -n "$(alive | grep "^witness-x1 ")" ] && live 3'
    check "its limits were the kernel's" limits_are_the_kernels w1

    before=$(alive) old=$(main)
    check "the worker is killed, and started anew" eval 'kill -9 $old && until_true another_main'
    check "the programs go on" same_as_before
    old=$(main)
    check "the worker hangs, and the watchdog has it started anew" eval 'kill -STOP $old && until_true another_main && [ ! -e /proc/$old ]'
    check "the programs go on without it" same_as_before
    check "all may end" let_go w2 w3 x1
    check "they commit" ended_well w2 w3 x1
    check "the worker answers its watchdog" eval "sleep 25; [ \"\$(main)\" = $(main) ]"

    check "one to be waited for" submit d1
    until_true live 1
    check "the worker is told to drain" ctl kill -s TERM --kill-whom=main fumehood-worker.service
    check "one more is submitted" submit d2
    sleep 4 # As above.
    check "it is not taken, and the worker waits for the first" eval 'is active && live 1 && in_state d2 queued'
    check "the first may end" let_go d1
    check "and commits" ended_well d1
    check "then the worker is gone" until_true is inactive
    check "the next worker takes the other" eval 'ctl start fumehood-worker.service && until_true live 1'
    before=$(alive)
    check "the unit is stopped, at once" eval 'quickly stop && is inactive'
    check "the program goes on" same_as_before
    check "it may end" let_go d2
    check "and commits with no worker there" ended_well d2
    check "nothing is left" nothing_left

    if [ "$version" -ge 254 ] && [ "$manager" = system ]; then
        drop_in 2-limit MemoryMax=900M
        check "with a limit on the unit, an analysis" eval 'ctl start fumehood-worker.service && submit l1 && until_true live 1'
        check "stays in the unit" eval '[[ $(sed -n "s/^0:://p" /proc/$(runners)/cgroup) == /fumehood.slice/fumehood-worker.service/* ]]'
        before=$(alive) old=$(main)
        check "which can be restarted" restart
        check "and leaves it alone" same_as_before
        check "so that it may end" let_go l1
        check "and commits" ended_well l1
        check "with limits that are the kernel's" limits_are_the_kernels l1
        ctl stop fumehood-worker.service
        no_drop_in 2-limit
        check "nothing is left of that" nothing_left
    fi
    kill $watcher; wait $watcher 2>/dev/null
    ctl stop fumehood-worker.service
    [ $failures = 0 ] || journalctl -q -b --no-pager -t fumehood -t systemd | grep -i fumehood | tail -n 60 | cut -c1-300
}

ln -sf /usr/local/bin/fumehood /usr/bin/fumehood
[ $# -gt 0 ] || { [ $cgroups = 1 ] && set -- system || set -- system user; }
for manager; do
    case $manager in
        system)
            ctl() { systemctl "$@"; }
            fh() { fumehood "$@"; }
            units=/etc/systemd/system tree=
            verify() { systemd-analyze verify $units/fumehood-worker.service; }
            scenario "$packaged/fumehood-worker.service"
            ;;
        user)
            lab() { runuser -u lab -- env -C / HOME=/home/lab XDG_RUNTIME_DIR=/run/user/1000 "$@"; }
            ctl() { lab systemctl --user "$@"; }
            fh() { lab fumehood "$@"; }
            units=/etc/systemd/user tree=/user.slice/user-1000.slice/user@1000.service
            verify() { lab systemd-analyze --user verify $units/fumehood-worker.service; }
            scenario "$packaged/user/fumehood-worker.service"
            ;;
        *) echo "system or user, not $manager"; exit 2 ;;
    esac
done
echo "$failures failed"
[ $failures = 0 ]
