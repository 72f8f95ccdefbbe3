//! `submit --from`: many submissions, one a line; all of them or none, unless the good ones are to go on.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};

use anyhow::Context;
use engine::attempt::error::CommitError;
use engine::plan::limits::error_chain;
use store::StoreError;

use super::line::Line;
use super::{Counter, Queued, Reader, Ready, Refused, exit, show};

const LINE_BYTES_MAX: usize = 4 << 20;
const LINES_MAX: usize = 100_000;
/// All requests of a batch, which are held until all are good.
const REQUESTS_BYTES_MAX: usize = 1 << 30;
/// More errors than this are counted only.
const ERRORS_SHOWN: usize = 20;
/// With `--continue`: so many are queued at once, and one by one where one of them is refused.
const GOOD_AT_ONCE: usize = 200;

pub fn submit(counter: &mut Counter<'_>, from: &OsStr, go_on: bool) -> anyhow::Result<u8> {
    let mut lines: Box<dyn BufRead> = match from == "-" {
        true => Box::new(std::io::stdin().lock()),
        false => {
            let file = File::open(from).with_context(|| format!("open {from:?}"))?;
            Box::new(BufReader::new(file))
        }
    };
    let (ready, mut refused) = read(counter, &mut *lines)?;
    if !refused.is_empty() && !go_on {
        tell(
            &refused,
            "nothing is queued; mend them, or give --continue to queue the others",
        );
        return Ok(exit::COULD_NOT_RUN);
    }
    let queued = match go_on {
        false => match counter.queue(&ready) {
            Ok(queued) => queued,
            Err(e) => return Err(with_line(e, &ready)),
        },
        true => good_ones(counter, &ready, &mut refused)?,
    };
    refused.sort_by_key(|refused| refused.line);
    counter.report(&queued, &refused)?;
    if refused.is_empty() {
        return Ok(0);
    }
    tell(&refused, "the others are queued");
    Ok(exit::COULD_NOT_RUN)
}

/// Every line, whole, and those with which something is wrong.
fn read(
    counter: &mut Counter<'_>,
    lines: &mut dyn BufRead,
) -> anyhow::Result<(Vec<Ready>, Vec<Refused>)> {
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
        match text.and_then(|text| one(counter, &text, number, &mut ids)) {
            Ok(ready) => {
                bytes += ready.json.len();
                anyhow::ensure!(
                    bytes <= REQUESTS_BYTES_MAX,
                    "the batch has more than 1G of requests up to line {number}; submit it in parts"
                );
                all.push(ready);
            }
            Err(e) => refused.push(Refused {
                line: number,
                message: format!("{e:#}"),
            }),
        }
    }
    Ok((all, refused))
}

/// The next line without its end. `None`: there is none. What is wrong with it is the line's, not the batch's.
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
    counter: &mut Counter<'_>,
    text: &str,
    number: usize,
    ids: &mut HashMap<String, usize>,
) -> anyhow::Result<Ready> {
    let (command, given) = Line::parse(text)?.asked()?;
    let asked = counter.submitter.resolve(command, given)?;
    let id = asked.request.id.to_string();
    let is_named = asked.is_named;
    let mut ready = counter.prepare(asked, Reader::Refused)?;
    ready.line = Some(number);
    if is_named && let Some(before) = ids.insert(id.clone(), number) {
        anyhow::bail!("the id {id} is in line {before} already");
    }
    Ok(ready)
}

fn good_ones(
    counter: &mut Counter<'_>,
    ready: &[Ready],
    refused: &mut Vec<Refused>,
) -> anyhow::Result<Vec<Queued>> {
    let mut queued = Vec::new();
    for some in ready.chunks(GOOD_AT_ONCE) {
        match counter.queue(some) {
            Ok(done) => {
                queued.extend(done);
                continue;
            }
            Err(e) if refused_at(&e).is_none() => return Err(unfinished(e, &queued, counter)),
            Err(_) => {}
        }
        for one in some {
            match counter.queue(std::slice::from_ref(one)) {
                Ok(done) => queued.extend(done),
                Err(e) => match refused_at(&e) {
                    Some((_, message)) => refused.push(Refused {
                        line: one.line.unwrap_or_default(),
                        message,
                    }),
                    None => return Err(unfinished(e, &queued, counter)),
                },
            }
        }
    }
    Ok(queued)
}

/// Whoever stops half-way says first what is queued.
fn unfinished(error: anyhow::Error, queued: &[Queued], counter: &Counter<'_>) -> anyhow::Error {
    let _first_error_counts = counter.report(queued, &[]);
    error.context(format!("stopped after {} were queued", queued.len()))
}

/// Which submission of several it was, and why, if the database took offence at one.
pub(super) fn refused_at(error: &anyhow::Error) -> Option<(usize, String)> {
    match error.downcast_ref::<CommitError>() {
        Some(CommitError::Database {
            source: StoreError::Submission { at, source },
            ..
        }) => Some((*at, error_chain(&**source))),
        _ => None,
    }
}

fn with_line(error: anyhow::Error, ready: &[Ready]) -> anyhow::Error {
    let found = refused_at(&error).and_then(|(at, message)| {
        let line = ready.get(at)?.line?;
        Some(anyhow::anyhow!("line {line}: {message}\nnothing is queued"))
    });
    found.unwrap_or(error)
}

fn tell(refused: &[Refused], then: &str) {
    for Refused { line, message } in refused.iter().take(ERRORS_SHOWN) {
        show::line(&format!("error: line {line}: {message}"));
    }
    if let Some(more) = refused.len().checked_sub(ERRORS_SHOWN).filter(|n| *n > 0) {
        show::line(&format!("and {more} more lines"));
    }
    show::line(then);
}
