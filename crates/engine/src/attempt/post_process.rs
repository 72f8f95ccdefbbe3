//! The platform's own, trusted step after the commit: `[post_process] command`.
//!
//! It is started with one JSON document on its standard input and, as its working directory, a read-only directory of
//! the collected outputs. It runs at least once for each (id, attempt): after a crash it may run again, so it must be
//! ready to see the same key twice. It works from the database and the artifact store alone, so it can be repeated
//! whenever somebody wants.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::attempt::finalize::{SettleError, reached};
use crate::attempt::record::{OutputEntry, PostProcessed};
use crate::attempt::recorder::Ledger;
use crate::plan::limits::error_chain;
use store::artifacts::Artifacts;
use store::types::crash_points::CrashPoint;
use store::types::escaping::escape_terminal;
use store::types::manifest::ContentHash;
use store::{AttemptRow, PostProcessState as Due, StoredOutput};

/// From the user's own configuration or the operator's policy; never from a project.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostProcess {
    /// The program, an absolute path, and its arguments.
    pub command: Vec<String>,
    pub timeout_ms: u64,
}

pub const SCHEMA: &str = "fumehood.post-process/1";
/// What is kept of what a failed step printed.
const SAID_BYTES_MAX: usize = 4096;

#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error("lay out the outputs in {path:?}")]
    LayOut { path: PathBuf, source: io::Error },
    #[error("start {program:?}")]
    Start { program: String, source: io::Error },
    #[error("tell {program:?} about the analysis")]
    Tell { program: String, source: io::Error },
    #[error("{program:?} did not end within {seconds} s and was killed{said}")]
    TimedOut {
        program: String,
        seconds: u64,
        said: String,
    },
    #[error("{program:?} ended with {status}{said}")]
    Failed {
        program: String,
        status: String,
        said: String,
    },
}

/// What the step is told.
#[derive(Serialize)]
struct Told<'a> {
    schema: &'static str,
    /// The same at every repeat.
    key: String,
    id: &'a str,
    attempt: u32,
    status: &'a str,
    reason: Option<&'a str>,
    message: Option<&'a str>,
    exit_code: Option<i32>,
    signal: Option<i32>,
    complete: Option<bool>,
    /// `result.json`, where both databases take it.
    result: Option<&'a RawValue>,
    /// Its working directory, too. Paths below are relative to it.
    outputs_dir: &'a Path,
    outputs: Vec<OutputEntry>,
}

/// Runs the step if one is configured and this attempt awaits it, and notes how it went. `scratch` is a directory of
/// ours, gone or empty of outputs afterwards.
pub fn if_due(
    ledger: &mut Ledger,
    (id, attempt): (&str, u32),
    scratch: &Path,
) -> Option<PostProcessed> {
    let step = ledger.post_process.clone()?;
    match take_turn(&step, ledger, (id, attempt), scratch) {
        Ok(None) => None,
        Ok(Some(Ok(()))) => Some(PostProcessed {
            done: true,
            message: None,
        }),
        Ok(Some(Err(e))) => Some(PostProcessed {
            done: false,
            message: Some(error_chain(&e)),
        }),
        Err(e) => Some(PostProcessed {
            done: false,
            message: Some(error_chain(&e)),
        }),
    }
}

/// The inner result is the step's, the outer one ours. `None`: it is not due.
fn take_turn(
    step: &PostProcess,
    ledger: &mut Ledger,
    (id, attempt): (&str, u32),
    scratch: &Path,
) -> Result<Option<Result<(), StepError>>, SettleError> {
    let artifacts = ledger.artifacts()?;
    let known = ledger.with(|store| store.show(id, Some(attempt)))?;
    match known.summary.post_process {
        Due::Pending | Due::Failed => {}
        Due::NotAsked | Due::Done | Due::Unknown => return Ok(None),
    }
    let outputs = ledger.with(|store| store.outputs(id, attempt))?;
    let ended = perform(step, &known, &outputs, &artifacts, scratch);
    reached(CrashPoint::PostProcessed)?;
    let message = ended.as_ref().err().map(|e| error_chain(e));
    let state = match ended {
        Ok(()) => Due::Done,
        Err(_) => Due::Failed,
    };
    ledger.with(|store| store.mark_post_process(id, attempt, state, message.as_deref()))?;
    // Only to be killed here: it is marked.
    let _marked = reached(CrashPoint::Marked);
    Ok(Some(ended))
}

/// Runs the step once. `scratch` is a directory of ours in which the outputs are laid out.
fn perform(
    step: &PostProcess,
    known: &AttemptRow,
    outputs: &[StoredOutput],
    artifacts: &Artifacts,
    scratch: &Path,
) -> Result<(), StepError> {
    let dir = scratch.join("outputs");
    lay_out(&dir, outputs, artifacts).map_err(|source| StepError::LayOut {
        path: dir.clone(),
        source,
    })?;
    let listed = &known.summary;
    let entry = |output: &StoredOutput| OutputEntry {
        path: output.path.clone(),
        bytes: output.bytes,
        media_type: output.media_type.clone(),
        blake3: output.blake3,
        modified_ms: output.modified_ms,
    };
    let result = known.result_json.as_deref();
    let told = Told {
        schema: SCHEMA,
        key: format!("{}/{}", listed.id, listed.attempt),
        id: &listed.id,
        attempt: listed.attempt,
        status: listed.state.as_str(),
        reason: listed.reason.as_deref(),
        message: listed.message.as_deref(),
        exit_code: listed.exit_code,
        signal: listed.signal,
        complete: listed.complete,
        result: result.and_then(|text| serde_json::from_str(text).ok()),
        outputs_dir: &dir,
        outputs: outputs.iter().map(entry).collect(),
    };
    let ended = call(step, &told, &dir);
    let _left_to_the_run_directory = clear(&dir);
    ended
}

/// Hard links to the objects, which are read-only themselves. Root writes to read-only files too, so for root, and where
/// the file system allows no link, copies that share their blocks where that is possible.
fn lay_out(outputs: &Path, items: &[StoredOutput], artifacts: &Artifacts) -> io::Result<()> {
    clear(outputs)?;
    make_dir(outputs)?;
    let mut dirs = vec![outputs.to_path_buf()];
    let mut copies: HashMap<ContentHash, PathBuf> = HashMap::new();
    for item in items {
        let mut at = outputs.to_path_buf();
        let parts: Vec<&[u8]> = item.path.components().collect();
        for (depth, part) in parts.iter().enumerate() {
            at.push(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(part));
            if depth + 1 < parts.len() && !at.is_dir() {
                make_dir(&at)?;
                dirs.push(at.clone());
            }
        }
        let object = artifacts
            .open_object(&item.blake3)
            .map_err(io::Error::other)?;
        let itself = format!("/proc/self/fd/{}", object.as_raw_fd());
        let follow = rustix::fs::AtFlags::SYMLINK_FOLLOW;
        let cwd = rustix::fs::CWD;
        let root = rustix::process::geteuid().is_root();
        if !root && rustix::fs::linkat(cwd, itself, cwd, &at, follow).is_ok() {
            continue;
        }
        // However many names a content has, it is copied once.
        if let Some(copy) = copies.get(&item.blake3)
            && std::fs::hard_link(copy, &at).is_ok()
        {
            continue;
        }
        let copy = std::fs::File::create_new(&at)?;
        if rustix::fs::ioctl_ficlone(&copy, &object).is_err() {
            copy_data(&object, &copy)?;
        }
        copy.set_permissions(std::fs::Permissions::from_mode(0o444))?;
        copies.insert(item.blake3, at);
    }
    for dir in dirs.iter().rev() {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o555))?;
    }
    Ok(())
}

/// Holes stay holes: a sparse file may be far longer than the disk is large.
fn copy_data(from: &std::fs::File, to: &std::fs::File) -> io::Result<()> {
    use rustix::fs::SeekFrom;
    let length = from.metadata()?.len();
    to.set_len(length)?;
    let mut at = 0;
    while at < length {
        let start = match rustix::fs::seek(from, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let end = rustix::fs::seek(from, SeekFrom::Hole(start))?;
        rustix::fs::seek(from, SeekFrom::Start(start))?;
        rustix::fs::seek(to, SeekFrom::Start(start))?;
        io::copy(&mut from.take(end - start), &mut { to })?;
        at = end;
    }
    Ok(())
}

fn make_dir(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().mode(0o755).create(path)
}

/// Removes what an earlier turn laid out.
fn clear(outputs: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (outputs.parent(), outputs.file_name()) else {
        return Ok(());
    };
    let parent = std::fs::File::open(parent)?;
    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    match rustix::fs::statat(&parent, name, flags) {
        Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
        Ok(stat) => {
            let which = (stat.st_dev, stat.st_ino);
            let parent = std::os::fd::AsFd::as_fd(&parent);
            crate::workspace::tree::remove(parent, name, which)
                .map(drop)
                .map_err(io::Error::other)
        }
    }
}

fn call(step: &PostProcess, told: &Told<'_>, outputs: &Path) -> Result<(), StepError> {
    let (program, arguments) = match step.command.split_first() {
        Some((program, arguments)) => (program.clone(), arguments),
        None => return Ok(()),
    };
    let document = serde_json::to_vec(told).map_err(|e| StepError::Tell {
        program: program.clone(),
        source: e.into(),
    })?;
    let started = Command::new(&program)
        .args(arguments)
        .current_dir(outputs)
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = started.map_err(|source| StepError::Start {
        program: program.clone(),
        source,
    })?;
    let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
    // Neither a step that reads nothing nor one that prints much may hold us up.
    std::thread::scope(|scope| {
        let telling = scope.spawn(move || match stdin {
            // A step that needs nothing need not read.
            Some(mut stdin) => match stdin.write_all(&document) {
                Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(e),
                _ => Ok(()),
            },
            None => Ok(()),
        });
        let hearing = scope.spawn(move || last_words(stderr));
        let status = wait(&mut child, Duration::from_millis(step.timeout_ms));
        // Whatever it started and left behind holds our pipes.
        if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            let _none_left = kill_process_group(group, Signal::KILL);
        }
        let _reaped = child.wait();
        let said = hearing.join().unwrap_or_default();
        let told = telling.join().unwrap_or(Ok(()));
        match status {
            Ok(Some(status)) if status.success() => told.map_err(|source| StepError::Tell {
                program: program.clone(),
                source,
            }),
            Ok(Some(status)) => Err(StepError::Failed {
                program: program.clone(),
                status: status.to_string(),
                said,
            }),
            Ok(None) => Err(StepError::TimedOut {
                program: program.clone(),
                seconds: step.timeout_ms / 1000,
                said,
            }),
            Err(source) => Err(StepError::Start {
                program: program.clone(),
                source,
            }),
        }
    })
}

/// `None`: its time is over.
fn wait(child: &mut Child, at_most: Duration) -> io::Result<Option<std::process::ExitStatus>> {
    let give_up = Instant::now() + at_most;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pidfd = pidfd_open(pid.ok_or(io::ErrorKind::InvalidInput)?, PidfdFlags::empty())?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let left = give_up.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        let timeout = Timespec {
            tv_sec: left.as_secs().min(3600) as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// The end of what it printed, for the message.
fn last_words(stderr: Option<impl Read>) -> String {
    let mut kept: Vec<u8> = Vec::new();
    let mut buffer = [0u8; 8192];
    let Some(mut stderr) = stderr else {
        return String::new();
    };
    while let Ok(n) = stderr.read(&mut buffer) {
        if n == 0 {
            break;
        }
        kept.extend_from_slice(&buffer[..n]);
        let over = kept.len().saturating_sub(SAID_BYTES_MAX);
        kept.drain(..over);
    }
    let text = kept.trim_ascii();
    match text.is_empty() {
        true => String::new(),
        false => format!("; it said: {}", escape_terminal(text)),
    }
}
