#!/bin/bash
# Runs in bin/vm-systemd. Wherever systemd permits it, a run has limits that the kernel holds, as root and as a plain
# user, and leaves nothing behind. Where a run must not leave its group, Fumehood says why. With an argument, only the
# checks run whose names contain these words.
set -uo pipefail
only=${1-}
failures=0
work=$(mktemp -d)
chmod 755 "$work"
LIMITS="--memory 64M --pids 20"
RUN="fumehood run --json $LIMITS --"

# One check: its name, then a command that must succeed. Its output is shown only if the command fails.
check() {
    local name=$1; shift
    [[ $name == *"$only"* ]] || return 0
    if "$@" >"$work/said" 2>&1; then
        echo "ok   $name"
    else
        echo "FAIL $name"; sed 's/^/     | /' "$work/said" | cut -c1-3000
        failures=$((failures + 1))
    fi
}

# The places from which people start Fumehood. Each function takes a command line.
plain_service() { systemd-run --quiet --wait --pipe --collect "$@"; }
delegated_service() { plain_service -p Delegate=yes "$@"; }
as_lab() { plain_service --uid=lab -E HOME=/home/lab "$@"; }
delegated_as_lab() { as_lab -p Delegate=yes "$@"; }
lab_manager() { as_lab -E XDG_RUNTIME_DIR=/run/user/1000 systemd-run --user --quiet --wait --pipe --collect "$@"; }
lab_delegated() { lab_manager -p Delegate=yes "$@"; }
# Fumehood runs beside another process of the same scope, as in a terminal.
lab_beside() { as_lab -E XDG_RUNTIME_DIR=/run/user/1000 systemd-run --user --quiet --scope bash -c 'read -r < <(:); "$@"; exit' bash "$@"; }
lab_session() {
    # A session scope of logind, as a login makes it: `su` asks PAM.
    plain_service su -l lab -c "$(printf '%q ' "$@")"
}

says() { python3 -c "import json, sys; d = json.load(open('$work/document')); sys.exit(0 if ($1) else f'not {sys.argv[1]}: {d}')" "$1"; }

held() {
    "$@" $RUN true >"$work/document" || { cat "$work/document"; return 1; }
    kernel_holds
}
kernel_holds() {
    says "d['limits']['memory']['enforced_by'].startswith('cgroup v2 memory.max')" &&
        says "d['limits']['memory']['how_hard'] == 'hard'" &&
        says "d['limits']['pids']['enforced_by'] == 'cgroup v2 pids.max'" &&
        says "d['limits']['cpus']['enforced_by'] == 'cgroup v2 cpu.max'"
}

# The parent waits for ever for its worker, so it must be killed together with the worker. The runner survives and
# writes the document.
out_of_memory() {
    "$@" $RUN python3 -c "
import os, signal
if os.fork() == 0:
    x = bytearray(200 << 20)
signal.pause()" >"$work/document"
    [ $? = 137 ] && says "d['status'] == 'out_of_memory' and d['oom_kills'] >= 2" && kernel_holds
}

forks_refused() {
    "$@" $RUN python3 -c "
import os, sys
made = []
try:
    while len(made) < 200:
        r, w = os.pipe()
        if (pid := os.fork()) == 0:
            os.read(r, 1)
            os._exit(0)
        made.append(pid)
except BlockingIOError:
    print(len(made))
    sys.exit(5 if len(made) < 20 else 6)" >"$work/document"
    [ $? = 5 ] && says "d['limits']['pids']['how_hard'] == 'hard'"
}

scopes() { systemctl list-units --all --no-legend --plain 'fumehood-*.scope'; lab_units 'fumehood-*.scope'; }
lab_units() { runuser -u lab -- env XDG_RUNTIME_DIR=/run/user/1000 systemctl --user list-units --all --no-legend --plain "$@"; }

# systemd learns by an event, a moment later, that a group is empty.
nothing_left() {
    local deadline=$((SECONDS + 15))
    while [ $SECONDS -lt $deadline ]; do
        [ -n "$(scopes)$(find /sys/fs/cgroup -name 'fumehood[-_]*')" ] || return 0
        sleep 0.2
    done
    scopes; find /sys/fs/cgroup -name 'fumehood[-_]*'
    return 1
}

# The pid of the process that was started as `fumehood run --stdin`, whatever started it.
runner() {
    local file words
    for file in /proc/[0-9]*/cmdline; do
        mapfile -d '' -t words <"$file" 2>/dev/null || continue
        [[ ${words[0]-} == *fumehood && ${words[*]:1:2} == "run --stdin" ]] && { file=${file#/proc/}; echo "${file%/cmdline}"; return; }
    done
}

# Looks at a run while its program waits: where its runner is, and which scopes there are.
during() {
    local look=$1; shift
    rm -f "$work/in" "$work/out"; mkfifo -m 666 "$work/in" "$work/out"
    "$@" fumehood run --stdin - $LIMITS -- sh -c 'echo ready; read -r line' <"$work/in" >"$work/out" 2>"$work/err" &
    local started=$!
    exec 7>"$work/in" 8<"$work/out"
    local line=; read -r -t 60 line <&8
    seen=1
    if [ "$line" = ready ]; then
        runner=$(runner)
        place=$(sed -n 's/^0:://p' "/proc/$runner/cgroup")
        $look; seen=$?
        [ $seen = 0 ] || echo "runner $runner in $place; scopes: $(scopes)"
    fi
    echo done >&7; exec 7>&-
    wait $started; local ended=$?
    exec 8<&-
    cat "$work/err"
    [ $seen = 0 ] && [ $ended = 0 ]
}
placed_in_system_scope() { [[ $place == /system.slice/fumehood-$runner-*.scope/fumehood_runner-$runner ]]; }
placed_in_lab_scope() { [[ $place == /user.slice/user-1000.slice/user@1000.service/app.slice/fumehood-$runner-*.scope/fumehood_runner-$runner ]]; }
in_system_scope() { placed_in_system_scope && [ -n "$(systemctl list-units --no-legend 'fumehood-*.scope')" ]; }
in_lab_scope() { placed_in_lab_scope && [ -n "$(lab_units 'fumehood-*.scope')" ]; }
in_no_scope() { [[ $place == *.service/fumehood_runner-$runner ]] && [ -z "$(scopes)" ]; }
tasks_kept() { in_system_scope && [ "$(cat "/sys/fs/cgroup$(dirname "$place")/pids.max")" = 77 ]; }
kill_runner() { in_system_scope && kill -9 "$runner"; }

# The run makes no scope, and the user learns why: the exit code is 125, and standard error has the words.
refused() {
    local words=$1; shift
    "$@" >"$work/refused" 2>&1
    local ended=$?
    [ $ended = 125 ] && grep -q -- "$words" "$work/refused" && [ -z "$(scopes)" ] && return 0
    echo "ended $ended"; cat "$work/refused"; scopes; return 1
}

echo "$(systemctl --version | head -1), Linux $(uname -r)"
# The first unit of a user's manager starts slowly, so start one before the checks.
as_lab true
for place in plain_service delegated_service as_lab lab_manager; do
    check "$place: out of memory as a whole, and the runner lives to tell" out_of_memory $place
    check "$place: forks beyond the limit are refused" forks_refused $place
done
for place in delegated_as_lab lab_delegated lab_beside lab_session; do
    check "$place: every limit is the kernel's" held $place
done
check "root without delegation gets a scope" during in_system_scope plain_service
check "root with delegation gets none" during in_no_scope delegated_service
check "a plain user gets one of its own manager's" during in_lab_scope as_lab
check "also out of a unit of that manager's, delegated or not" during in_lab_scope lab_delegated
check "with delegation it gets none" during in_no_scope delegated_as_lab
check "a limit on tasks goes along" during tasks_kept plain_service -p TasksMax=77
check "nothing is left" nothing_left
check "a runner that is killed takes its scope along" eval '! during kill_runner plain_service && [ $seen = 0 ] && nothing_left'

check "a limit on memory is not left behind" refused 'limits this process by its memory.max' plain_service -p MemoryMax=1G $RUN true
check "nor one on CPUs" refused 'limits this process by its cpu.max' plain_service -p CPUQuota=50% $RUN true
check "nor a Slurm job" refused 'part of a Slurm job' plain_service -E SLURM_JOB_ID=7 $RUN true
check "without a manager there is no scope" refused 'runtime directory' plain_service --uid=guest -E HOME=/home/guest $RUN true

# A directory of another user, with a socket that would answer.
mkdir -m 777 "$work/evil"; mkdir -p "$work/evil/systemd"; chmod 777 "$work/evil/systemd"
python3 -c "
import socket, sys
s = socket.socket(socket.AF_UNIX); s.bind('$work/evil/systemd/private'); s.listen()
open('$work/listening', 'w').close()
s.accept(); open('$work/fooled', 'w').close()" &
fake=$!
until [ -e "$work/listening" ]; do sleep 0.1; done
chmod 777 "$work/evil/systemd/private"
check "a socket in a directory of somebody else's is not talked to" refused 'runtime directory' plain_service --uid=guest -E HOME=/home/guest -E "XDG_RUNTIME_DIR=$work/evil" $RUN true
check "so the listener heard nobody" test ! -e "$work/fooled"
kill $fake

# The files that packaging/systemd ships.
here=$(cd "$(dirname "$0")/../../../packaging/systemd" && pwd)
mkdir -p /etc/systemd/system/user@.service.d
cp "$here"/fumehood-gc.* /etc/systemd/system/ && cp "$here"/user@.service.d/*.conf /etc/systemd/system/user@.service.d/
ln -sf /usr/local/bin/fumehood /usr/bin/fumehood
systemctl daemon-reload
check "the units are well-formed" eval 'systemd-analyze verify /etc/systemd/system/fumehood-gc.timer && systemctl start fumehood-gc.service'
check "the users' managers are given every controller" eval '[ "$(systemctl show -P DelegateControllers user@1000.service)" = "cpu cpuset io memory pids" ]'
# A service that is not alone in its group, like the service of a platform that starts runs.
if [ "$(systemctl --version | awk "NR == 1 { print \$2 }")" -ge 254 ]; then
    mkdir -p /etc/systemd/system/platform@.service.d
    cp "$here/delegate.conf" /etc/systemd/system/platform@.service.d/fumehood.conf
    platform() {
        printf '%s\n' '[Service]' Type=oneshot "User=$user" "MemoryMax=1G" StandardOutput=file:/run/platform.out \
            "ExecStart=/bin/bash -c '$*; exit \$\$?'" >/etc/systemd/system/platform@.service
        systemctl daemon-reload; rm -f /run/platform.out
        systemctl start "platform@$user.service"; local ended=$?
        cat /run/platform.out; return $ended
    }
    for user in root lab; do
        check "delegate.conf: limits within the service's own, as $user" held platform
    done
fi

# Without their private sockets, Fumehood asks the managers over the message buses. systemctl itself needs the sockets.
mv /run/systemd/private /run/systemd/private.away
mv /run/user/1000/systemd/private /run/user/1000/systemd/private.away
check "over the system's bus" during placed_in_system_scope plain_service
check "over the user's bus" during placed_in_lab_scope as_lab
mv /run/user/1000/systemd/private.away /run/user/1000/systemd/private
mv /run/systemd/private.away /run/systemd/private

# A manager that does not answer delays a run by two seconds and no more.
kill -STOP "$(systemctl show -P MainPID user@1000.service)"
begin=$SECONDS
check "a manager that hangs is not waited for" eval "systemd-run --quiet --wait --pipe --collect --uid=lab -E HOME=/home/lab $RUN true >$work/hung 2>&1; [ \$? = 125 ] && grep -q 'in time' $work/hung || { cat $work/hung; false; }"
echo "     ($((SECONDS - begin)) s)"
kill -CONT "$(systemctl show -P MainPID user@1000.service)"

check "nothing is left at the end" nothing_left
journalctl -q -b _PID=1 _UID=0 -g 'Scheduled restart|segfault|oom-kill' --no-pager | tail -5
echo "$failures failed"
[ $failures = 0 ]
