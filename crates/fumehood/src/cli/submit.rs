//! `fumehood submit`: what `run` would do here is resolved here, and put in the queue with its files.

mod batch;
mod line;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use engine::attempt::recorder::Recorder;
use engine::home::Home;
use engine::plan::runtime::CallerEnvironment;
use engine::plan::{self, PrivatePaths};
use engine::provenance;
use engine::request::bundle::{Bundle, ContentPool};
use engine::request::{Command, IdReuse, RequestedLimit, Stdin};
use serde::Serialize;
use store::types::manifest::ContentHash;
use store::types::submission::{Submission, SubmittedCommand, SubmittedSetting, VERSION};
use store::{NewSubmission, SubmitOutcome};

use super::args::SubmitArgs;
use super::print::{self, Out};
use super::{exit, ledger, show};
use crate::config::{Queueing, Sources, Submitter, ToSubmit};

pub fn submit(args: &SubmitArgs) -> anyhow::Result<u8> {
    let sources = Sources::from_process()?;
    let submitter = Submitter::new(args.given(), &sources)?;
    let home = ledger::home()?;
    let ledger = ledger::of(&submitter.record()?, &home)?.context(
        "there is no queue with --db none; name a database with --db, FUMEHOOD_DB or FUMEHOOD_DB_FILE",
    )?;
    let mut counter = Counter {
        by: provenance::submitter_name(),
        kept: ledger.private_paths(),
        caller: CallerEnvironment::from_process(),
        json: submitter.presentation().json,
        submitter,
        pool: ContentPool::default(),
        ledger,
        home,
    };
    match &args.from {
        Some(from) => batch::submit(&mut counter, from, args.go_on),
        None => one(&mut counter, args.command(&sources.argv)?),
    }
}

fn one(counter: &mut Counter<'_>, command: Command) -> anyhow::Result<u8> {
    let ready = counter.submitter.resolve(command, Vec::new())?;
    let ready = counter.prepare(ready, Reader::Allowed)?;
    let queued = match counter.queue(std::slice::from_ref(&ready)) {
        Ok(queued) => queued,
        // There are no others to speak of.
        Err(e) => return Err(batch::refused_at(&e).map_or(e, |(_, why)| anyhow::anyhow!(why))),
    };
    counter.report(&queued, &[])?;
    Ok(0)
}

/// Whether a submission may read our own standard input.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    Allowed,
    /// There are several, and it is read once.
    Refused,
}

/// Where submissions are made.
struct Counter<'a> {
    submitter: Submitter<'a>,
    caller: CallerEnvironment,
    pool: ContentPool,
    ledger: Recorder,
    home: Home,
    kept: Vec<PathBuf>,
    by: String,
    json: bool,
}

/// One submission, whole: everything that it needs has been read. Not for printing: it may hold secrets.
struct Ready {
    line: Option<usize>,
    submission: Submission,
    json: String,
    fingerprint: String,
    blobs: Vec<(ContentHash, Arc<Vec<u8>>)>,
    queueing: Queueing,
    replace: bool,
    memory_bytes: Option<u64>,
    cpu_milli: Option<u64>,
}

/// What came of a submission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Queued {
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    id: String,
    /// `null`: of an earlier submission with the same key.
    attempt: Option<u32>,
    /// Whether its key was used before, for the same request.
    already: bool,
}

/// A line that was not queued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Refused {
    line: usize,
    message: String,
}

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    submitted: &'a [Queued],
    refused: &'a [Refused],
}

impl Counter<'_> {
    /// Reads everything that travels with the submission.
    fn prepare(&mut self, asked: ToSubmit, reader: Reader) -> anyhow::Result<Ready> {
        let ToSubmit {
            request,
            is_named,
            mut settings,
            queueing,
        } = asked;
        let private = PrivatePaths {
            home: self.home.path(),
            records: &self.kept,
        };
        let taken = plan::resolve_submit_inputs(&request, &self.caller, &private)?;
        for (name, path) in [
            ("data", &taken.data),
            ("docs", &taken.docs),
            ("runtime", &taken.runtime),
        ] {
            if let Some(path) = path {
                let path = path
                    .to_str()
                    .with_context(|| not_text(name, path.as_os_str()))?;
                settings.insert(name.to_owned(), SubmittedSetting::Text(path.to_owned()));
            }
        }
        if let Some(notice) = taken
            .notice
            .as_ref()
            .filter(|_| !self.submitter.presentation().quiet)
        {
            eprintln!(
                "fumehood: {}",
                store::types::escaping::escape_terminal(notice.as_bytes())
            );
        }
        let mut bundle = Bundle::default();
        for (source, name) in &taken.inputs {
            bundle.add(source, name, &mut self.pool)?;
        }
        match (&request.stdin, &taken.stdin, reader) {
            (Stdin::Caller, _, Reader::Refused) => anyhow::bail!(
                "`-` as stdin is read once, and there may be several submissions; name a file"
            ),
            (Stdin::Caller, ..) => bundle.add_stdin(std::io::stdin().lock(), &mut self.pool)?,
            (_, Some(path), _) => bundle.add_stdin_file(path, &mut self.pool)?,
            (_, None, _) => {}
        }
        let blobs = bundle.contents(&self.pool);
        let submission = Submission {
            version: VERSION,
            id: request.id.clone(),
            command: what(&taken.command, &request.command)?,
            settings,
            inputs: bundle.items,
            stdin: bundle.stdin,
        };
        let explicit =
            |limit: Option<RequestedLimit<u64>>| limit.filter(|l| l.explicit).map(|l| l.value);
        Ok(Ready {
            line: None,
            json: submission.write()?,
            fingerprint: submission.fingerprint(is_named)?,
            submission,
            blobs,
            queueing,
            replace: request.id_reuse == IdReuse::Replace,
            memory_bytes: explicit(request.limits.memory_bytes),
            cpu_milli: explicit(request.limits.cpu_milli),
        })
    }

    /// Queues all of them, or none.
    fn queue(&mut self, all: &[Ready]) -> anyhow::Result<Vec<Queued>> {
        let submits: Vec<NewSubmission<'_>> =
            all.iter().map(|ready| ready.submit(&self.by)).collect();
        let queue_max = self.submitter.queue_max()?;
        let came_of_it = self
            .ledger
            .with(|store| store.submit(&submits, queue_max))?;
        let queued = all.iter().zip(came_of_it).map(|(ready, came)| match came {
            SubmitOutcome::Now { attempt } => Queued {
                line: ready.line,
                id: ready.submission.id.to_string(),
                attempt: Some(attempt),
                already: false,
            },
            SubmitOutcome::Already { id } => Queued {
                line: ready.line,
                id,
                attempt: None,
                already: true,
            },
        });
        Ok(queued.collect())
    }

    fn report(&self, submitted: &[Queued], refused: &[Refused]) -> anyhow::Result<()> {
        if self.json {
            return print::json(&Document {
                schema: "fumehood.submit/1",
                submitted,
                refused,
            });
        }
        let mut out = Out::new();
        for queued in submitted {
            out.line(&queued.id)?;
        }
        out.finish()
    }
}

impl Ready {
    fn submit<'a>(&'a self, by: &'a str) -> NewSubmission<'a> {
        NewSubmission {
            id: self.submission.id.as_str(),
            submit_key: self.queueing.key.as_deref(),
            fingerprint: &self.fingerprint,
            request_json: &self.json,
            submitter: by,
            priority: self.queueing.priority,
            retries: self.queueing.retries,
            retry_on: &self.queueing.retry_on,
            memory_bytes: self.memory_bytes,
            cpu_milli: self.cpu_milli,
            blobs: &self.blobs,
            replace: self.replace,
        }
    }
}

fn not_text(what: &str, given: &std::ffi::OsStr) -> String {
    format!("{what} is not UTF-8 text, which a submission must be: {given:?}")
}

/// The command as it waits, and for a script where it came from.
fn what(taken: &Command, asked: &Command) -> anyhow::Result<SubmittedCommand> {
    let texts = |words: &[std::ffi::OsString]| -> anyhow::Result<Vec<String>> {
        let text = |word: &std::ffi::OsString| match word.to_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(anyhow::anyhow!(not_text("a word of the command", word))),
        };
        words.iter().map(text).collect()
    };
    match (taken, asked) {
        (Command::Script { script, args }, Command::Script { script: from, .. }) => {
            for path in [script, from] {
                path.to_str()
                    .with_context(|| not_text("the script's path", path.as_os_str()))?;
            }
            Ok(SubmittedCommand::Script {
                name: script.clone(),
                from: from.clone(),
                args: texts(args)?,
            })
        }
        (Command::Argv(words), _) => Ok(SubmittedCommand::Argv(texts(words)?)),
        _ => anyhow::bail!("a shell cannot be queued"),
    }
}
