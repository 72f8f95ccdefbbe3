//! P11, P17: if a program's processes take seconds to die, the sandbox waits for them, and the outcome keeps the reason
//! for which the program was stopped.

use sandbox::outcome::Stop;
use sandbox::spec::Bytes;
use sandbox::supervise::Control;
use testkit::trial;

use crate::confined_run::{ConfinedResult, ConfinedRun};
use crate::p11_deadline::{left_of, new_marker};

/// Forks for four seconds. Each fork copies 262,144 page table entries, which all show the kernel's one page of zeros.
/// All processes are pinned to one CPU, so the kernel takes about four seconds to free the tables, too. The tables
/// bound the memory: 2 MiB for each child.
const SLOW_TO_DIE: &str = "
import mmap, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
MAP_NORESERVE, MADV_NOHUGEPAGE, MADV_POPULATE_READ = 0x4000, 15, 22
m = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
m.madvise(MADV_NOHUGEPAGE)
# Only a mapping that was written to has its tables copied by fork.
m[0] = 1
m.madvise(MADV_POPULATE_READ)
begun = time.monotonic()
for _ in range(200):
    if os.fork() == 0:
        while True:
            signal.pause()
    if time.monotonic() - begun > 4:
        break
print('up', flush=True)
";

fn slow_to_die(
    then: &str,
    wall_ms: u64,
    control_at_marker: Option<(&'static [u8], Control)>,
) -> ConfinedResult {
    let marker = new_marker();
    let mut confined = ConfinedRun::python(&format!("{SLOW_TO_DIE}{then}")).limits(|l| {
        (l.wall_ms, l.grace_ms, l.cpu_milli) = (wall_ms, 100, 1000);
        (l.memory_bytes, l.pids) = (1 << 30, 400);
    });
    confined.spec.argv.push(Bytes::from(&marker));
    confined.control_at_marker = control_at_marker;
    let ran = confined.run();
    assert!(ran.printed("up"), "{}", ran.all());
    assert!(ran.outcome.all_dead, "{}", ran.all());
    assert_eq!(left_of(&marker), [0i32; 0]);
    ran
}

const REST: &str = "
while True:
    signal.pause()
";

trial!(Everyone, large_page_tables_do_not_hide_a_timeout);
fn large_page_tables_do_not_hide_a_timeout() {
    let ran = slow_to_die(REST, 12_000, None);
    assert_eq!(ran.stop(), Some(Stop::WallTime), "{}", ran.all());
}

trial!(Everyone, large_page_tables_do_not_hide_a_cancel);
fn large_page_tables_do_not_hide_a_cancel() {
    let ran = slow_to_die(REST, 60_000, Some((b"up", Control::Kill)));
    assert_eq!(ran.stop(), Some(Stop::Cancelled), "{}", ran.all());
}

trial!(
    Everyone,
    slowly_dying_children_do_not_change_the_programs_exit_code
);
/// The first process ends by itself. The outcome has its exit code, however long its children take to die.
fn slowly_dying_children_do_not_change_the_programs_exit_code() {
    let ran = slow_to_die("sys.exit(3)", 60_000, None);
    assert_eq!((ran.code(), ran.stop()), (Some(3), None), "{}", ran.all());
}
