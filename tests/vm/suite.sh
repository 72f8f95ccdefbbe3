#!/bin/bash
# Inside a virtual machine: the promise tests, as root and as the plain account, less what tests/vm/left-out lists.
#
#   suite.sh PROMISES LEFT_OUT KERNEL
#
# PROMISES is the test program of crates/sandbox. KERNEL (6.1, 6.12) picks the lines of LEFT_OUT that are for one kernel.
set -uo pipefail
promises=/var/tmp/promises left_out=$2 kernel=$3
cp "$1" "$promises" || exit 1
account=fumehood-test
id "$account" >/dev/null 2>&1 || useradd --no-create-home "$account" || exit 1
# The machine's /home is fresh.
install -d -m 700 -o "$account" -g "$account" "/home/$account"
cd /
failed=0

# Patterns of what is left out for root or plain, one a line.
patterns() {
    awk -v kernel="$kernel" -v who="$1" '
        /^#/ || NF == 0 { next }
        ($2 == "*" || $2 == kernel) && ($3 == "*" || $3 == who) { print $1 }' "$left_out"
}

for who in root plain; do
    arguments=("$who::" --test-threads 1)
    while read -r pattern; do
        arguments+=(--skip "$pattern")
    done < <(patterns "$who")
    total=$("$promises" --list 2>/dev/null | grep -c "^$who::")
    # A plain user sits in some group below the root, as after a login. Root sits where it can make groups: without an
    # init system that is the root of the tree.
    (
        if [ "$who" = plain ]; then
            mkdir -p /sys/fs/cgroup/session && echo "$BASHPID" >/sys/fs/cgroup/session/cgroup.procs
        fi
        exec "$promises" "${arguments[@]}"
    ) >/var/tmp/log 2>&1 || failed=1
    grep -vE '^(running|test result|failures:|$)|\.\.\. (ok|ignored)$' /var/tmp/log
    passed=$(grep -c '\.\.\. ok$' /var/tmp/log) broken=$(grep -c '\.\.\. FAILED$' /var/tmp/log)
    echo "promises as $who: $passed passed, $broken failed, $((total - passed - broken)) of $total left out"
    # No trial at all would look like success.
    [ "$passed" -gt 0 ] || failed=1
done
exit $failed
