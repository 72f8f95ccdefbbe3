//! Runs the operator's own, trusted command after the commit: `[post_process] command`.
//!
//! The command gets one JSON document on its standard input. Its working directory is a read-only directory with the
//! collected outputs. It runs at least once for each (id, attempt): after a crash it may run again, so it must accept
//! the same key twice. It needs only the database and the artifact store, so it can be repeated at any time.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, linkat};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use sandbox::events::{self, PollFlags};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::attempt::error::{CommitError, pass_crash_point};
use crate::attempt::record::{OutputSummary, PostProcessReport};
use crate::attempt::recorder::Recorder;
use crate::plan::limits::error_chain;
use crate::settings::PostProcessSettings;
use store::artifacts::{Artifacts, files};
use store::types::crash_points::CrashPoint;
use store::types::escaping::escape_terminal;
use store::types::manifest::ContentHash;
use store::{AttemptRow, PostProcessState, StoredOutput};

pub const SCHEMA: &str = "fumehood.post-process/1";
/// How much is kept of a failed command's standard error.
const STDERR_BYTES_MAX: usize = 4096;

#[derive(Debug, thiserror::Error)]
pub enum PostProcessRunError {
    #[error("lay out the outputs in {path:?}")]
    LayOut { path: PathBuf, source: io::Error },
    #[error("start {program:?}")]
    Start { program: String, source: io::Error },
    #[error("write the document to the standard input of {program:?}")]
    WriteInput { program: String, source: io::Error },
    #[error("{program:?} did not end within {seconds} s and was killed{stderr_tail}")]
    TimedOut {
        program: String,
        seconds: u64,
        stderr_tail: String,
    },
    #[error("{program:?} ended with {status}{stderr_tail}")]
    Failed {
        program: String,
        status: String,
        stderr_tail: String,
    },
}

/// The document on the standard input of the command.
#[derive(Serialize)]
struct PostProcessDocument<'a> {
    schema: &'static str,
    /// The same in every repetition.
    key: String,
    id: &'a str,
    attempt: u32,
    status: &'a str,
    reason: Option<&'a str>,
    message: Option<&'a str>,
    exit_code: Option<i32>,
    signal: Option<i32>,
    complete: Option<bool>,
    /// The content of `result.json`, if both databases accept it.
    result: Option<&'a RawValue>,
    /// Also the working directory. The paths of the outputs are relative to it.
    outputs_dir: &'a Path,
    outputs: Vec<OutputSummary>,
}

/// Runs the command if one is configured and this attempt awaits it, and stores how it went. `scratch` is a directory
/// of Fumehood; afterwards it has no outputs in it.
pub fn run_if_due(
    recorder: &mut Recorder,
    (id, attempt): (&str, u32),
    scratch: &Path,
) -> Option<PostProcessReport> {
    let command = recorder.post_process.clone()?;
    let message = match run_and_mark(&command, recorder, (id, attempt), scratch) {
        Ok(None) => return None,
        Ok(Some(Ok(()))) => None,
        Ok(Some(Err(e))) => Some(error_chain(&e)),
        Err(e) => Some(error_chain(&e)),
    };
    Some(PostProcessReport {
        done: message.is_none(),
        message,
    })
}

/// Returns `None` if the command is not due. The inner error is the command's, the outer one is Fumehood's.
fn run_and_mark(
    command: &PostProcessSettings,
    recorder: &mut Recorder,
    (id, attempt): (&str, u32),
    scratch: &Path,
) -> Result<Option<Result<(), PostProcessRunError>>, CommitError> {
    let artifacts = recorder.artifacts()?;
    let stored = recorder.with(|store| store.show(id, Some(attempt)))?;
    match stored.summary.post_process {
        PostProcessState::Pending | PostProcessState::Failed => {}
        PostProcessState::NotAsked | PostProcessState::Done | PostProcessState::Unknown => {
            return Ok(None);
        }
    }
    let outputs = recorder.with(|store| store.outputs(id, attempt))?;
    let result = run_once(command, &stored, &outputs, &artifacts, scratch);
    pass_crash_point(CrashPoint::PostProcessed)?;
    let message = result.as_ref().err().map(|e| error_chain(e));
    let state = match result {
        Ok(()) => PostProcessState::Done,
        Err(_) => PostProcessState::Failed,
    };
    recorder.with(|store| store.mark_post_process(id, attempt, state, message.as_deref()))?;
    // Tests may kill the process here. An injected error is ignored, because the result is already stored.
    let _ = pass_crash_point(CrashPoint::Marked);
    Ok(Some(result))
}

/// Runs the command once. The outputs are laid out in `scratch`, a directory of Fumehood.
fn run_once(
    command: &PostProcessSettings,
    stored: &AttemptRow,
    outputs: &[StoredOutput],
    artifacts: &Artifacts,
    scratch: &Path,
) -> Result<(), PostProcessRunError> {
    let dir = scratch.join("outputs");
    lay_out(&dir, outputs, artifacts).map_err(|source| PostProcessRunError::LayOut {
        path: dir.clone(),
        source,
    })?;
    let listed = &stored.summary;
    let entry = |output: &StoredOutput| OutputSummary {
        path: output.path.clone(),
        bytes: output.bytes,
        media_type: output.media_type.clone(),
        blake3: output.blake3,
        modified_ms: output.modified_ms,
    };
    let result = stored.result_json.as_deref();
    let document = PostProcessDocument {
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
    let result = call(command, &document, &dir);
    // If this fails, the directory goes with the run directory.
    let _ = clear(&dir);
    result
}

/// Creates hard links to the objects, which are read-only. Root can write to read-only files, so root gets copies. So
/// does everybody where the file system allows no link. Copies share their blocks with the object where that is
/// possible.
fn lay_out(outputs: &Path, items: &[StoredOutput], artifacts: &Artifacts) -> io::Result<()> {
    clear(outputs)?;
    make_dir(outputs)?;
    let mut dirs = vec![outputs.to_path_buf()];
    let mut copies: HashMap<ContentHash, PathBuf> = HashMap::new();
    for item in items {
        let mut at = outputs.to_path_buf();
        let parts: Vec<&[u8]> = item.path.components().collect();
        for (depth, part) in parts.iter().enumerate() {
            at.push(OsStr::from_bytes(part));
            if depth + 1 < parts.len() && !at.is_dir() {
                make_dir(&at)?;
                dirs.push(at.clone());
            }
        }
        let object = artifacts
            .open_object(&item.blake3)
            .map_err(io::Error::other)?;
        let itself = files::proc_path(object.as_fd());
        let root = rustix::process::geteuid().is_root();
        if !root && linkat(CWD, itself, CWD, &at, AtFlags::SYMLINK_FOLLOW).is_ok() {
            continue;
        }
        // Copy a content once, however many outputs have it.
        if let Some(copy) = copies.get(&item.blake3)
            && std::fs::hard_link(copy, &at).is_ok()
        {
            continue;
        }
        let copy = std::fs::File::create_new(&at)?;
        if rustix::fs::ioctl_ficlone(&copy, &object).is_err() {
            let bytes = object.metadata()?.len();
            files::read_through(object.as_fd(), Some(copy.as_fd()), bytes, &mut |_| {})?;
        }
        copy.set_permissions(std::fs::Permissions::from_mode(0o444))?;
        copies.insert(item.blake3, at);
    }
    for dir in dirs.iter().rev() {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o555))?;
    }
    Ok(())
}

fn make_dir(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().mode(0o755).create(path)
}

/// Removes what an earlier call laid out.
fn clear(outputs: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (outputs.parent(), outputs.file_name()) else {
        return Ok(());
    };
    let parent = std::fs::File::open(parent)?;
    let stat = match rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        stat => stat?,
    };
    crate::workspace::tree::remove(parent.as_fd(), name, (stat.st_dev, stat.st_ino))
        .map(drop)
        .map_err(io::Error::other)
}

fn call(
    command: &PostProcessSettings,
    document: &PostProcessDocument<'_>,
    outputs: &Path,
) -> Result<(), PostProcessRunError> {
    let Some((program, arguments)) = command.command.split_first() else {
        return Ok(());
    };
    let not_written = |source| PostProcessRunError::WriteInput {
        program: program.clone(),
        source,
    };
    let not_started = |source| PostProcessRunError::Start {
        program: program.clone(),
        source,
    };
    let json = serde_json::to_vec(document).map_err(|e| not_written(e.into()))?;
    let started = Command::new(program)
        .args(arguments)
        .current_dir(outputs)
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = started.map_err(not_started)?;
    let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
    // Two threads, so that neither a command that reads nothing nor one that prints much can block this process.
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || match stdin {
            // A command may end without reading its input.
            Some(mut stdin) => match stdin.write_all(&json) {
                Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(e),
                _ => Ok(()),
            },
            None => Ok(()),
        });
        let reader = scope.spawn(move || read_stderr_tail(stderr));
        let status = wait(&mut child, Duration::from_millis(command.timeout_ms));
        // Processes that the command left behind would keep the pipes open, so kill its process group.
        if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            // It fails if no process is left.
            let _ = kill_process_group(group, Signal::KILL);
        }
        // `wait` above has the status; this only reaps a command that was killed just now.
        let _ = child.wait();
        let stderr_tail = reader.join().unwrap_or_default();
        let written = writer.join().unwrap_or(Ok(()));
        match status {
            Ok(Some(status)) if status.success() => written.map_err(not_written),
            Ok(Some(status)) => Err(PostProcessRunError::Failed {
                program: program.clone(),
                status: status.to_string(),
                stderr_tail,
            }),
            Ok(None) => Err(PostProcessRunError::TimedOut {
                program: program.clone(),
                seconds: command.timeout_ms / 1000,
                stderr_tail,
            }),
            Err(source) => Err(not_started(source)),
        }
    })
}

/// Waits for the command. `None`: it did not end in time.
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
        events::wait_for_any([((), pidfd.as_fd(), PollFlags::IN)], left)?;
    }
}

/// The end of what the command printed to standard error, for the message.
fn read_stderr_tail(stderr: Option<impl Read>) -> String {
    let mut kept: Vec<u8> = Vec::new();
    let mut buffer = [0u8; 8192];
    let Some(mut stderr) = stderr else {
        return String::new();
    };
    while let Ok(n @ 1..) = stderr.read(&mut buffer) {
        kept.extend_from_slice(&buffer[..n]);
        let over = kept.len().saturating_sub(STDERR_BYTES_MAX);
        kept.drain(..over);
    }
    let text = kept.trim_ascii();
    match text.is_empty() {
        true => String::new(),
        false => format!("; it said: {}", escape_terminal(text)),
    }
}
