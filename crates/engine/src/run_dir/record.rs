//! `run.json`: what recovery must know of an attempt. The result of an attempt is another type,
//! [`crate::attempt::record::Record`].

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::home;
use crate::request::CollectionSettings;
use crate::workspace::DirectoryIdentity;
use store::types::analysis_id::AnalysisId;

/// What recovery must know of an attempt. It is written before the things that it names are created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The version of the document's format.
    pub(crate) version: u32,
    /// The analysis.
    pub id: AnalysisId,
    /// The number of the attempt, from 1.
    #[serde(default = "first_attempt")]
    pub attempt: u32,
    /// The machine, as [`home::machine_id`] names it.
    pub host: String,
    /// The boot of the machine, as [`home::boot_id`] names it. A pid is good only for this boot.
    pub boot_id: String,
    /// The pid of the runner, or of the `workspace create` that made the workspace.
    pub runner_pid: u32,
    /// The path of the workspace.
    pub workspace: PathBuf,
    /// A name that nobody else knows. The workspace is created under it and then renamed.
    pub(crate) draft: PathBuf,
    /// The identity of the workspace after its creation: proof that the directory belongs to this run.
    #[serde(rename = "workspace_is")]
    pub(crate) workspace_identity: Option<DirectoryIdentity>,
    /// The uid of the program, if one was leased for it.
    pub(crate) uid: Option<u32>,
    /// The project whose quota limits the workspace, where the file system has project quotas.
    #[serde(default)]
    pub(crate) project_quota: Option<u32>,
    /// The cgroups that were made for the attempt.
    pub cgroups: Vec<PathBuf>,
    /// For a quarantined run: its init, which ends after every other process of the run. Its lock on the workspace is
    /// no proof of life: the kernel closes a process's files before it waits for the rest of the pid namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) init: Option<ProcessIdentity>,
    /// How far the attempt is.
    pub state: RunState,
    /// `workspace create` made the workspace, so it is the user's to remove, whatever happens.
    #[serde(default)]
    pub(crate) prepared: bool,
    /// `None`: nothing is recorded, and recovery only removes what is left.
    #[serde(rename = "task", default)]
    pub commit_plan: Option<CommitPlan>,
}

fn first_attempt() -> u32 {
    1
}

/// A process of this boot. It differs from a later process with the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pid: u32,
    /// The start time, in clock ticks since boot.
    started: u64,
}

impl ProcessIdentity {
    /// `None`: there is no such process, or it has ended.
    pub(crate) fn of(pid: u32) -> Option<ProcessIdentity> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The process name may contain anything; the fields follow the last parenthesis.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let state = fields.next()?;
        let started = fields.nth(18)?.parse().ok()?;
        (!matches!(state, "Z" | "X")).then_some(ProcessIdentity { pid, started })
    }

    pub(crate) fn is_alive(self) -> bool {
        ProcessIdentity::of(self.pid) == Some(self)
    }
}

/// What finishing the attempt needs. It is decided at the start, so that every process that finishes the attempt does
/// the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitPlan {
    /// Distinguishes this attempt from all others, whatever their id and number.
    pub key: String,
    /// The database that has the attempt: its id, and its location, which is for people.
    pub database_id: String,
    /// The location of that database, for messages.
    pub database: String,
    /// Which files become outputs.
    pub collection: CollectionSettings,
    /// The artifact store for the outputs, whoever finishes the attempt: its path and its id.
    pub artifacts: PathBuf,
    /// The id of that artifact store.
    pub(crate) artifacts_id: String,
    /// The database has, or had, a row for the attempt.
    pub begun: bool,
    /// The workspace is in memory and disappears with the runner.
    pub memory: bool,
    /// The workspace's files belong to the user who runs Fumehood now. The leased uid may be in use by another run.
    #[serde(rename = "taken_over")]
    pub(crate) workspace_reowned: bool,
}

/// How far an attempt is, as recovery needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// The attempt is running, or its runner left it unfinished.
    Live,
    /// The workspace is kept until this time (Unix seconds).
    Kept {
        /// The end of that time.
        until: u64,
    },
    /// Some process could not be killed. Nothing may be removed before it is gone.
    Quarantined,
    /// `workspace create` made the workspace, and keeps it until this time. Nothing has run in it.
    Open {
        /// The end of that time, in Unix seconds.
        until: u64,
    },
    /// `run --in` has ended; `post-process` collects and commits.
    Ran,
    /// Nothing is left to commit; `workspace remove` removes the workspace.
    Recorded,
}

pub(crate) const RECORD_VERSION: u32 = 1;

impl RunRecord {
    /// The record of an attempt for which nothing was created yet.
    pub(crate) fn new(id: &AnalysisId, root: &Path, number: u32) -> RunRecord {
        RunRecord {
            version: RECORD_VERSION,
            id: id.clone(),
            attempt: number,
            host: home::machine_id(),
            boot_id: home::boot_id(),
            runner_pid: std::process::id(),
            workspace: crate::workspace::path_for(root, id),
            draft: crate::workspace::draft_path_for(root, id),
            workspace_identity: None,
            uid: None,
            project_quota: None,
            cgroups: Vec::new(),
            init: None,
            state: RunState::Live,
            prepared: false,
            commit_plan: None,
        }
    }
}

/// A key that no other attempt has.
pub fn new_attempt_key() -> String {
    let mut noise = [0u8; 16];
    // Without randomness, use the time and the pid. The database refuses a key that it has already.
    let filled = rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty());
    if filled != Ok(noise.len()) {
        let time = home::unix_ms().to_ne_bytes();
        noise[..8].copy_from_slice(&time);
        noise[8..12].copy_from_slice(&std::process::id().to_ne_bytes());
    }
    format!("{:032x}", u128::from_ne_bytes(noise))
}
