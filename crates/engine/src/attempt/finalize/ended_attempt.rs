//! The input of [`finalize_attempt`](super::finalize_attempt): an attempt whose program has ended, and what it left.

use std::os::fd::BorrowedFd;

use crate::attempt::record::Record;
use crate::collect::ModePolicy;
use crate::run_dir::{CommitPlan, RunDir, RunRecord};
use store::artifacts::{ContentCheck, TransferMode};

/// What the program left.
#[derive(Clone, Copy)]
pub enum Leftovers<'a> {
    Directory {
        dir: BorrowedFd<'a>,
        owner_uid: u32,
    },
    /// Nothing ever ran.
    Nothing,
    /// The program ran and its workspace is gone: with the memory it was in, or with /tmp at boot.
    Gone,
}

/// An attempt that is to be finalized.
pub struct EndedAttempt<'a> {
    pub dir: &'a RunDir,
    pub run: &'a RunRecord,
    pub commit_plan: &'a CommitPlan,
    pub leftovers: Leftovers<'a>,
    /// Whether outputs are moved or copied out of the workspace. The final status decides: a workspace that is kept is
    /// copied from.
    pub transfer: &'a dyn Fn(&Record) -> TransferMode,
    /// Whether the files may be assumed to match the manifest: yes if this process has just written it, no in recovery.
    pub trust: ContentCheck,
    pub modes: ModePolicy,
}
