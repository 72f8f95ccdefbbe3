//! Named points in the course of an attempt at which tests kill the runner or make a system call fail.
//!
//! The points are active only in builds with debug assertions. `FUMEHOOD_FAULT=POINT=kill` kills the process;
//! `=enospc`, `=eio` and `=emfile` return that error; `POINT:3=kill` acts when the point is reached for the third
//! time. In a release build [`reach`] only records the time. ARCHITECTURE.md lists for each point what a crash there
//! leaves behind and who repairs it. The tidy test checks that its table agrees with [`CrashPoint::ALL`].

use std::io;

use crate::types::timings;

macro_rules! crash_points {
    ($($name:ident $point_name:literal $why:literal;)*) => {
        /// The points, in the order in which an attempt reaches them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum CrashPoint { $(#[doc = $why] $name,)* }

        impl CrashPoint {
            /// Every point, in order.
            pub const ALL: &[CrashPoint] = &[$(CrashPoint::$name,)*];

            /// The name that tests, timings and ARCHITECTURE.md use for the point.
            pub fn name(self) -> &'static str {
                match self { $(CrashPoint::$name => $point_name,)* }
            }
        }
    };
}

crash_points! {
    Claimed "claimed" "The run directory is locked and its record written; this process has written nothing to the database.";
    WorkspaceMade "workspace_made" "The workspace has its name; nothing is in it.";
    Filled "filled" "The inputs are in the workspace and listed in the run directory.";
    Begun "begun" "The attempt is a row in the database, state `running`; the sandbox is being built, and nothing runs in it.";
    Ended "ended" "Every process is dead; nothing is written about it yet.";
    LogsKept "logs_kept" "The logs are complete in the run directory.";
    OutcomeWritten "outcome_written" "The outcome is written in the run directory.";
    Collected "collected" "The workspace was walked and hashed; nothing is written about it yet.";
    ManifestWritten "manifest_written" "The manifest is written, and durable if it lists any file; no file has moved.";
    ObjectMoved "object_moved" "One file is linked or copied into the artifact store; its name in the workspace stays.";
    ObjectsDurable "objects_durable" "Every file is durable in the artifact store.";
    TransactionOpen "transaction_open" "Everything is written in the transaction, which is not committed.";
    Committed "committed" "The transaction is committed; the workspace still exists.";
    WorkspaceRemoved "workspace_removed" "The workspace is removed; the run directory still exists.";
    PostProcessed "post_processed" "The post-process has ended; the database has not recorded it yet.";
    Marked "marked" "The database has recorded the post-process; the run directory still exists.";
    Finished "finished" "Only the record is left.";
}

/// Records the time. In debug builds then kills the process or returns an error, if `FUMEHOOD_FAULT` says so.
pub fn reach(point: CrashPoint) -> io::Result<()> {
    // An attempt may reach `ObjectMoved` any number of times, so it is not timed.
    if point != CrashPoint::ObjectMoved {
        timings::mark(point.name());
    }
    inject_fault(point)
}

#[cfg(debug_assertions)]
fn inject_fault(point: CrashPoint) -> io::Result<()> {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};
    static FAULT: OnceLock<Option<(String, u32, String)>> = OnceLock::new();
    static REACHED: AtomicU32 = AtomicU32::new(0);
    let fault = FAULT.get_or_init(|| {
        let text = std::env::var(VARIABLE).ok()?;
        let (place, action) = text.split_once('=')?;
        let (point, time) = place.split_once(':').unwrap_or((place, "1"));
        Some((point.to_owned(), time.parse().ok()?, action.to_owned()))
    });
    let Some((_, time, action)) = fault.as_ref().filter(|(s, _, _)| s == point.name()) else {
        return Ok(());
    };
    if REACHED.fetch_add(1, Ordering::Relaxed) + 1 != *time {
        return Ok(());
    }
    let errno = match action.as_str() {
        "kill" => {
            let ourselves = rustix::process::getpid();
            rustix::process::kill_process(ourselves, rustix::process::Signal::KILL)?;
            loop {
                std::thread::park();
            }
        }
        "enospc" => rustix::io::Errno::NOSPC,
        "emfile" => rustix::io::Errno::MFILE,
        _ => rustix::io::Errno::IO,
    };
    Err(errno.into())
}

#[cfg(not(debug_assertions))]
fn inject_fault(_step: CrashPoint) -> io::Result<()> {
    Ok(())
}

/// The environment variable that tests set. It is not a setting for users.
pub const VARIABLE: &str = "FUMEHOOD_FAULT";
