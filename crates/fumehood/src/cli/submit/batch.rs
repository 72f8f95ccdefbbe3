//! `submit --from`: many submissions, one a line. All are queued or none, unless `--continue` queues the valid ones.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};

use anyhow::Context;
use engine::attempt::error::CommitError;
use engine::plan::limits::error_chain;
use store::StoreError;

use super::line::BatchLine;
use super::{
    PreparedSubmission, QueuedEntry, RefusedLine, StdinUse, SubmitSession, exit, messages,
};

const LINE_BYTES_MAX: usize = 4 << 20;
const LINES_MAX: usize = 100_000;
/// The total size of the requests of a batch, which are held in memory until all are read.
const REQUESTS_BYTES_MAX: usize = 1 << 30;
/// More errors than this are only counted.
const ERRORS_SHOWN: usize = 20;
/// With `--continue`, this many are queued in one transaction; one by one if one of them is refused.
const CHUNK_LINES: usize = 200;

pub fn submit(
    session: &mut SubmitSession<'_>,
    from: &OsStr,
    continue_on_error: bool,
) -> anyhow::Result<u8> {
    let mut lines: Box<dyn BufRead> = match from == "-" {
        true => Box::new(std::io::stdin().lock()),
        false => {
            let file = File::open(from).with_context(|| format!("open {from:?}"))?;
            Box::new(BufReader::new(file))
        }
    };
    let (ready, mut refused) = read(session, &mut *lines)?;
    if !refused.is_empty() && !continue_on_error {
        print_refused(
            &refused,
            "nothing is queued; correct them, or give --continue to queue the others",
        );
        return Ok(exit::COULD_NOT_RUN);
    }
    let queued = match continue_on_error {
        false => match session.queue(&ready) {
            Ok(queued) => queued,
            Err(e) => return Err(name_line(e, &ready)),
        },
        true => queue_valid_lines(session, &ready, &mut refused)?,
    };
    refused.sort_by_key(|refused| refused.line);
    session.report(&queued, &refused)?;
    if refused.is_empty() {
        return Ok(0);
    }
    print_refused(&refused, "the others are queued");
    Ok(exit::COULD_NOT_RUN)
}

/// Reads every line. Returns the prepared submissions and the refused lines.
fn read(
    session: &mut SubmitSession<'_>,
    lines: &mut dyn BufRead,
) -> anyhow::Result<(Vec<PreparedSubmission>, Vec<RefusedLine>)> {
    let (mut all, mut refused) = (Vec::new(), Vec::new());
    let mut ids: HashMap<String, usize> = HashMap::new();
    let mut bytes = 0;
    for number in 1.. {
        let Some(text) = next_line(lines).context("read the batch")? else {
            break;
        };
        anyhow::ensure!(
            number <= LINES_MAX,
            "the batch has more than {LINES_MAX} lines; submit it in parts"
        );
        if text.as_ref().is_ok_and(|text| text.trim().is_empty()) {
            continue;
        }
        match text.and_then(|text| one(session, &text, number, &mut ids)) {
            Ok(ready) => {
                bytes += ready.json.len();
                anyhow::ensure!(
                    bytes <= REQUESTS_BYTES_MAX,
                    "the batch has more than 1G of requests up to line {number}; submit it in parts"
                );
                all.push(ready);
            }
            Err(e) => refused.push(RefusedLine {
                line: number,
                message: format!("{e:#}"),
            }),
        }
    }
    Ok((all, refused))
}

/// Returns the next line without its line feed, or `None` at the end. The inner error concerns this line, not the
/// batch.
fn next_line(lines: &mut dyn BufRead) -> std::io::Result<Option<anyhow::Result<String>>> {
    let mut bytes = Vec::new();
    let most = LINE_BYTES_MAX as u64 + 1;
    let mut limited = (&mut *lines).take(most);
    if limited.read_until(b'\n', &mut bytes)? == 0 {
        return Ok(None);
    }
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
    }
    if bytes.len() > LINE_BYTES_MAX {
        lines.skip_until(b'\n')?;
        return Ok(Some(Err(anyhow::anyhow!(
            "it is longer than {LINE_BYTES_MAX} bytes; files travel by `inputs`, not in the line"
        ))));
    }
    Ok(Some(
        String::from_utf8(bytes).context("it is not UTF-8 text"),
    ))
}

fn one(
    session: &mut SubmitSession<'_>,
    text: &str,
    number: usize,
    ids: &mut HashMap<String, usize>,
) -> anyhow::Result<PreparedSubmission> {
    let (command, given) = BatchLine::parse(text)?.into_settings()?;
    let resolved = session.config.resolve(command, given)?;
    let id = resolved.request.id.to_string();
    let is_named = resolved.is_named;
    let mut ready = session.prepare(resolved, StdinUse::Refused)?;
    ready.line = Some(number);
    if is_named && let Some(before) = ids.insert(id.clone(), number) {
        anyhow::bail!("the id {id} is in line {before} already");
    }
    Ok(ready)
}

fn queue_valid_lines(
    session: &mut SubmitSession<'_>,
    ready: &[PreparedSubmission],
    refused: &mut Vec<RefusedLine>,
) -> anyhow::Result<Vec<QueuedEntry>> {
    let mut queued = Vec::new();
    for some in ready.chunks(CHUNK_LINES) {
        match session.queue(some) {
            Ok(done) => {
                queued.extend(done);
                continue;
            }
            Err(e) if refused_submission(&e).is_none() => {
                return Err(stopped_midway(e, &queued, session));
            }
            Err(_) => {}
        }
        for one in some {
            match session.queue(std::slice::from_ref(one)) {
                Ok(done) => queued.extend(done),
                Err(e) => match refused_submission(&e) {
                    Some((_, message)) => refused.push(RefusedLine {
                        line: one.line.unwrap_or_default(),
                        message,
                    }),
                    None => return Err(stopped_midway(e, &queued, session)),
                },
            }
        }
    }
    Ok(queued)
}

/// Prints what is queued before the command fails in the middle.
fn stopped_midway(
    error: anyhow::Error,
    queued: &[QueuedEntry],
    session: &SubmitSession<'_>,
) -> anyhow::Error {
    // Return the first error even if this fails.
    let _ = session.report(queued, &[]);
    error.context(format!("stopped after {} were queued", queued.len()))
}

/// Returns which of several submissions the database refused, and why, if that is the error.
pub(super) fn refused_submission(error: &anyhow::Error) -> Option<(usize, String)> {
    match error.downcast_ref::<CommitError>() {
        Some(CommitError::Database {
            source: StoreError::Submission { at, source },
            ..
        }) => Some((*at, error_chain(&**source))),
        _ => None,
    }
}

fn name_line(error: anyhow::Error, ready: &[PreparedSubmission]) -> anyhow::Error {
    let found = refused_submission(&error).and_then(|(at, message)| {
        let line = ready.get(at)?.line?;
        Some(anyhow::anyhow!("line {line}: {message}\nnothing is queued"))
    });
    found.unwrap_or(error)
}

fn print_refused(refused: &[RefusedLine], then: &str) {
    for RefusedLine { line, message } in refused.iter().take(ERRORS_SHOWN) {
        messages::line(&format!("error: line {line}: {message}"));
    }
    if let Some(more) = refused.len().checked_sub(ERRORS_SHOWN).filter(|n| *n > 0) {
        messages::line(&format!("and {more} more lines"));
    }
    messages::line(then);
}
