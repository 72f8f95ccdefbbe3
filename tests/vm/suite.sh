#!/bin/bash
# Runs inside a virtual machine, as root: all that bin/test-vm tries there, beginning with the parts that tell most.
#
#   suite.sh DIRECTORY KERNEL PICKED
#
# DIRECTORY has the programs `fumehood` and `promises` (the test program of crates/sandbox). PICKED is the list of promise
# tests to run, or `all`; KERNEL (6.1, 6.12) picks the lines of it that are for one kernel.
set -uo pipefail
here=$(dirname "$0") directory=$1 kernel=$2 picked=$3
failed=0

"$here/restricted.py" "$directory/fumehood" plain namespaces cgroup docker || failed=1

# restricted.py has made this account.
account=fumehood-test
# Runs a command as the plain account, in a group below the root of the tree, as after a login. Root stays in the root
# of the tree, because without an init system that is where it can make groups.
as_plain() {
    (
        mkdir -p /sys/fs/cgroup/session && echo "$BASHPID" >/sys/fs/cgroup/session/cgroup.procs || exit 1
        cd "/home/$account" || exit 1
        exec setpriv --reuid "$account" --regid "$account" --clear-groups env "HOME=/home/$account" "$@"
    )
}
as_root() { (cd /root && exec env HOME=/root "$@"); }

# At least this many acts must be proven on any kernel. If there are fewer, the battery itself is broken.
held_at_least=50
attack() {
    local who=$1 level=$2 counts held
    "as_$who" /usr/local/bin/fumehood-vm doctor --attack --strict --level "$level" >/var/tmp/log 2>&1 || failed=1
    grep -E '^ +(unproven|better|ESCAPED) |^fumehood: ' /var/tmp/log
    counts=$(tail -n 1 /var/tmp/log) held=${counts%% held*}
    [[ $held =~ ^[0-9]+$ && $held -ge $held_at_least ]] || { cat /var/tmp/log; failed=1; }
    echo "attacks as $who at level $level: $counts"
}
attack plain landlock
# On the older kernel Fumehood must do most itself. The newer kernel is more like the host's, where bin/test tries all
# four combinations of user and level.
case $kernel in
    6.1) attack plain full ;;
    *) attack root landlock ;;
esac

cp "$directory/promises" /var/tmp/promises || exit 1
/var/tmp/promises --list 2>/dev/null | sed -n 's/: test$//p' >/var/tmp/trials
if [ "$picked" = all ]; then
    cp /var/tmp/trials /var/tmp/picked
else
    awk -v kernel="$kernel" '
        /^#/ || NF == 0 { next }
        $2 == "*" || $2 == kernel { for (i = 3; i <= NF; i++) print $i "::" $1 }' "$picked" >/var/tmp/picked
fi
# Runs one trial alone, with its output in /var/tmp/log.
try() {
    (
        if [[ $1 == plain* ]]; then echo "$BASHPID" >/sys/fs/cgroup/session/cgroup.procs; fi
        cd / && exec timeout 300 /var/tmp/promises --exact "$1" --test-threads 1
    ) </dev/null >/var/tmp/log 2>&1
    ended=$?
    [ "$ended" = 0 ] && grep -q '\.\.\. ok$' /var/tmp/log && return
    echo "FAILED $1 (exit status $ended)"
    grep -vE '^(running|test result|failures:|$)' /var/tmp/log | sed 's/^/    /'
    return 1
}
passed=0 broken=0 flaky=0 again=()
while read -r trial; do
    # With a name that no trial has, the program would run nothing and succeed.
    if ! grep -qxF "$trial" /var/tmp/trials; then
        echo "FAILED $trial: there is no such trial"
        broken=$((broken + 1))
    elif try "$trial"; then
        passed=$((passed + 1))
    else
        again+=("$trial")
    fi
done </var/tmp/picked
# Try failed trials once more, as bin/test-again does on the host. If more than a few failed, they are not flaky.
for trial in "${again[@]}"; do
    if [ ${#again[@]} -le 5 ] && try "$trial"; then
        echo "flaky: $trial"
        flaky=$((flaky + 1))
        passed=$((passed + 1))
    else
        broken=$((broken + 1))
    fi
done
total=$(wc -l </var/tmp/trials)
echo "promises: $passed passed, $flaky of them flaky, $broken failed, $((total - passed - broken)) of $total not run here"
# A suite without any trial would look like success.
[ "$passed" -gt 0 ] && [ "$broken" = 0 ] || failed=1
exit $failed
