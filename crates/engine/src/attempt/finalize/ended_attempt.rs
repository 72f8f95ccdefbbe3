//! The input of [`finalize_attempt`](super::finalize_attempt): an attempt whose program has ended, and what it left.

use std::os::fd::BorrowedFd;

use crate::attempt::log_capture::CapturedLog;
use crate::attempt::record::{Record, Status};
use crate::collect::ModePolicy;
use crate::request::KeepPolicy;
use crate::run_dir::{CommitPlan, RunDir, RunRecord, RunState};
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

/// Who finishes the attempt. This decides how the files are handled.
#[derive(Clone, Copy)]
pub enum Finisher<'a> {
    /// The runner, which still has the logs in memory.
    Runner {
        keep: KeepPolicy,
        logs: [&'a CapturedLog; 2],
    },
    /// The reaper or `post-process`, from the files of the run directory.
    Recovery,
    /// `record`: the files are the user's, and are only read.
    Import,
}

/// An attempt that is to be finalized. Its outcome is in the run directory too.
pub struct EndedAttempt<'a> {
    pub dir: &'a RunDir,
    pub run: &'a RunRecord,
    pub commit_plan: &'a CommitPlan,
    pub outcome: &'a Record,
    pub leftovers: Leftovers<'a>,
    finisher: Finisher<'a>,
}

impl<'a> EndedAttempt<'a> {
    pub fn new(
        dir: &'a RunDir,
        run: &'a RunRecord,
        commit_plan: &'a CommitPlan,
        outcome: &'a Record,
        leftovers: Leftovers<'a>,
        finisher: Finisher<'a>,
    ) -> EndedAttempt<'a> {
        EndedAttempt {
            dir,
            run,
            commit_plan,
            outcome,
            leftovers,
            finisher,
        }
    }

    /// Whether outputs are moved or copied out of the workspace. The final status decides: a workspace that is kept is
    /// copied from.
    pub(super) fn transfer(&self, status: Status) -> TransferMode {
        let stays = match self.finisher {
            Finisher::Runner { keep, .. } => is_kept(keep, status),
            Finisher::Recovery => self.run.state == RunState::Ran,
            Finisher::Import => true,
        };
        match stays {
            true => TransferMode::Copy,
            false => TransferMode::Move,
        }
    }

    /// Whether the files may be assumed to match the manifest: yes for the process that collected, no in recovery.
    pub(super) fn content_check(&self) -> ContentCheck {
        match self.finisher {
            Finisher::Runner { .. } | Finisher::Import => ContentCheck::TrustManifest,
            Finisher::Recovery => ContentCheck::Rehash,
        }
    }

    pub(super) fn modes(&self) -> ModePolicy {
        match self.finisher {
            Finisher::Runner { .. } | Finisher::Recovery => ModePolicy::Override,
            Finisher::Import => ModePolicy::Respect,
        }
    }

    /// The logs, if this process captured them.
    pub(super) fn captured_logs(&self) -> Option<[&'a CapturedLog; 2]> {
        match self.finisher {
            Finisher::Runner { logs, .. } => Some(logs),
            Finisher::Recovery | Finisher::Import => None,
        }
    }
}

/// Whether the workspace of an attempt with this status stays.
pub(crate) fn is_kept(keep: KeepPolicy, status: Status) -> bool {
    match keep {
        KeepPolicy::Never => false,
        KeepPolicy::OnFailure => status != Status::Succeeded,
        KeepPolicy::Always => true,
    }
}
