//! `fumehood submit`: resolves the request on this machine, as `run` would, and queues it with its files.

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

use super::args::{self, SubmitArgs};
use super::{exit, messages, print, record_access};
use engine::settings::{QueueOptions, ResolvedSubmission, Sources, SubmissionConfig};

pub fn submit(args: &SubmitArgs) -> anyhow::Result<u8> {
    let sources = Sources::from_process()?;
    let config = SubmissionConfig::new(args.given_settings(), &sources)?;
    let home = record_access::home()?;
    let recorder = Recorder::from_settings(&config.record()?, &home)?.context(
        "there is no queue with --db none; name a database with --db, FUMEHOOD_DB or FUMEHOOD_DB_FILE",
    )?;
    let mut session = SubmitSession {
        by: provenance::submitter_name(),
        private_paths: recorder.private_paths(),
        caller: CallerEnvironment::from_process(),
        json: config.presentation().json,
        config,
        pool: ContentPool::default(),
        recorder,
        home,
    };
    match &args.from {
        Some(from) => batch::submit(&mut session, from, args.continue_on_error),
        None => one(&mut session, args.command(&args::command_line())?),
    }
}

fn one(session: &mut SubmitSession<'_>, command: Command) -> anyhow::Result<u8> {
    let ready = session.config.resolve(command, Vec::new())?;
    let ready = session.prepare(ready, StdinUse::Allowed)?;
    let queued = match session.queue(std::slice::from_ref(&ready)) {
        Ok(queued) => queued,
        // There is only one submission, so do not say which one was refused.
        Err(e) => {
            return Err(batch::refused_submission(&e).map_or(e, |(_, why)| anyhow::anyhow!(why)));
        }
    };
    session.report(&queued, &[])?;
    Ok(0)
}

/// Whether a submission may read the standard input of this process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StdinUse {
    Allowed,
    /// There are several submissions, and standard input can be read once.
    Refused,
}

/// Prepares and queues the submissions of one command.
struct SubmitSession<'a> {
    config: SubmissionConfig<'a>,
    caller: CallerEnvironment,
    pool: ContentPool,
    recorder: Recorder,
    home: Home,
    private_paths: Vec<PathBuf>,
    by: String,
    json: bool,
}

/// One submission with everything that it needs already read. Not for printing: it may contain secrets.
struct PreparedSubmission {
    line: Option<usize>,
    submission: Submission,
    json: String,
    fingerprint: String,
    blobs: Vec<(ContentHash, Arc<Vec<u8>>)>,
    queue_options: QueueOptions,
    replace: bool,
    memory_bytes: Option<u64>,
    cpu_milli: Option<u64>,
}

/// The result of a submission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct QueuedEntry {
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    id: String,
    /// `null` for an earlier submission with the same key.
    attempt: Option<u32>,
    /// Whether its key was used before, for the same request.
    already: bool,
}

/// A line that was not queued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct RefusedLine {
    line: usize,
    message: String,
}

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    submitted: &'a [QueuedEntry],
    refused: &'a [RefusedLine],
}

impl SubmitSession<'_> {
    /// Reads everything that is stored with the submission.
    fn prepare(
        &mut self,
        resolved: ResolvedSubmission,
        stdin_use: StdinUse,
    ) -> anyhow::Result<PreparedSubmission> {
        let ResolvedSubmission {
            request,
            is_named,
            mut settings,
            queue_options,
        } = resolved;
        let private = PrivatePaths {
            home: self.home.path(),
            records: &self.private_paths,
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
            .filter(|_| !self.config.presentation().quiet)
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
        match (&request.stdin, &taken.stdin, stdin_use) {
            (Stdin::Caller, _, StdinUse::Refused) => anyhow::bail!(
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
            command: submitted_command(&taken.command, &request.command)?,
            settings,
            inputs: bundle.items,
            stdin: bundle.stdin,
        };
        let explicit =
            |limit: Option<RequestedLimit<u64>>| limit.filter(|l| l.explicit).map(|l| l.value);
        Ok(PreparedSubmission {
            line: None,
            json: submission.write()?,
            fingerprint: submission.fingerprint(is_named)?,
            submission,
            blobs,
            queue_options,
            replace: request.id_reuse == IdReuse::Replace,
            memory_bytes: explicit(request.limits.memory_bytes),
            cpu_milli: explicit(request.limits.cpu_milli),
        })
    }

    /// Queues all of them, or none.
    fn queue(&mut self, all: &[PreparedSubmission]) -> anyhow::Result<Vec<QueuedEntry>> {
        let submits: Vec<NewSubmission<'_>> =
            all.iter().map(|ready| ready.submit(&self.by)).collect();
        let queue_max = self.config.queue_max()?;
        let outcomes = self
            .recorder
            .with(|store| store.submit(&submits, queue_max))?;
        let queued = all.iter().zip(outcomes).map(|(ready, outcome)| {
            let (id, attempt) = match outcome {
                SubmitOutcome::Now { attempt } => (ready.submission.id.to_string(), Some(attempt)),
                SubmitOutcome::Already { id } => (id, None),
            };
            QueuedEntry {
                line: ready.line,
                id,
                attempt,
                already: attempt.is_none(),
            }
        });
        Ok(queued.collect())
    }

    fn report(&self, submitted: &[QueuedEntry], refused: &[RefusedLine]) -> anyhow::Result<()> {
        if self.json {
            return print::json(&Document {
                schema: "fumehood.submit/1",
                submitted,
                refused,
            });
        }
        print::lines(submitted.iter().map(|queued| &queued.id))
    }
}

impl PreparedSubmission {
    fn submit<'a>(&'a self, by: &'a str) -> NewSubmission<'a> {
        NewSubmission {
            id: self.submission.id.as_str(),
            submit_key: self.queue_options.key.as_deref(),
            fingerprint: &self.fingerprint,
            request_json: &self.json,
            submitter: by,
            priority: self.queue_options.priority,
            retries: self.queue_options.retries,
            retry_on: &self.queue_options.retry_on,
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

/// Returns the command as it is stored, with the original path of a script.
fn submitted_command(taken: &Command, asked: &Command) -> anyhow::Result<SubmittedCommand> {
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
