//! Named steps of an attempt at which the tests kill the runner or let the system fail.
//!
//! Only builds with debug assertions listen: `FUMEHOOD_FAULT=STEP=kill` or `=enospc`, `=eio`, `=emfile`, and
//! `STEP:3=kill` for the third time it is reached. In a release build [`at`] only notes the time. ARCHITECTURE.md lists for each step what a crash there leaves, and
//! who repairs it; the tidy test holds that table equal to [`Step::ALL`].

use std::io;

use crate::types::timings;

macro_rules! steps {
    ($($name:ident $word:literal $why:literal;)*) => {
        /// In the order in which an attempt comes through them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Step { $(#[doc = $why] $name,)* }

        impl Step {
            pub const ALL: &[Step] = &[$(Step::$name,)*];

            pub fn word(self) -> &'static str {
                match self { $(Step::$name => $word,)* }
            }
        }
    };
}

steps! {
    Claimed "claimed" "The run directory is locked and its record written; the database knows nothing yet.";
    WorkspaceMade "workspace_made" "The workspace has its name; nothing is in it.";
    Filled "filled" "The inputs are in the workspace and listed in the run directory.";
    Begun "begun" "The attempt is a row in the database, state `running`; the sandbox is being built, and nothing runs in it.";
    Ended "ended" "Every process is dead; nothing is written about it yet.";
    LogsKept "logs_kept" "The logs are whole in the run directory.";
    OutcomeWritten "outcome_written" "How it ended is written in the run directory.";
    Collected "collected" "The workspace was walked and hashed; nothing is written about it yet.";
    ManifestWritten "manifest_written" "What is to be taken is known, and durable if there is any; no file has moved.";
    ObjectMoved "object_moved" "One file has moved into the artifact store.";
    ObjectsDurable "objects_durable" "Every file is durable in the artifact store.";
    TransactionOpen "transaction_open" "Everything is written in the transaction, which is not committed.";
    Committed "committed" "The transaction is committed; the workspace stands.";
    WorkspaceRemoved "workspace_removed" "The workspace is gone; the run directory stands.";
    PostProcessed "post_processed" "The platform's own step has ended; the database does not know yet.";
    Marked "marked" "The database knows; the run directory stands.";
    Finished "finished" "Nothing is left but the record.";
}

/// Notes the time, and comes back at once, with an error, or not at all, as the tests wish.
pub fn at(step: Step) -> io::Result<()> {
    // There may be any number of those.
    if step != Step::ObjectMoved {
        timings::mark(step.word());
    }
    as_wished(step)
}

#[cfg(debug_assertions)]
fn as_wished(step: Step) -> io::Result<()> {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};
    static WISH: OnceLock<Option<(String, u32, String)>> = OnceLock::new();
    static REACHED: AtomicU32 = AtomicU32::new(0);
    let wish = WISH.get_or_init(|| {
        let text = std::env::var(VARIABLE).ok()?;
        let (at, what) = text.split_once('=')?;
        let (step, time) = at.split_once(':').unwrap_or((at, "1"));
        Some((step.to_owned(), time.parse().ok()?, what.to_owned()))
    });
    let Some((_, time, what)) = wish.as_ref().filter(|(s, _, _)| s == step.word()) else {
        return Ok(());
    };
    if REACHED.fetch_add(1, Ordering::Relaxed) + 1 != *time {
        return Ok(());
    }
    let errno = match what.as_str() {
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
fn as_wished(_step: Step) -> io::Result<()> {
    Ok(())
}

/// The variable that the tests set; not a setting.
pub const VARIABLE: &str = "FUMEHOOD_FAULT";
