//! Reads attempts, outputs, logs and remarks.

use crate::Store;
use crate::database::error::StoreError;
use crate::database::value::{FromRow, Row, SqlValue, from_row, values};
use crate::types::attempt::{AttemptUsage, PostProcessState, State};
use crate::types::manifest::{ContentHash, OutputPath};

/// Which attempts a listing shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttemptSelection {
    /// For each analysis the newest attempt that is not superseded.
    #[default]
    Latest,
    /// All attempts, including superseded ones.
    All,
}

/// What [`Store::list`] returns.
#[derive(Clone, Copy, Debug)]
pub struct AttemptFilter<'a> {
    /// Empty means all states.
    pub states: &'a [State],
    /// Only attempts created at this time or later, by the database's clock.
    pub since_ms: Option<i64>,
    /// Whether superseded and earlier attempts are listed.
    pub which: AttemptSelection,
    /// The largest number of attempts to return.
    pub limit: u32,
}

/// One line of a listing, and an attempt in every `--json` document. docs/database.md explains names and meanings.
/// Fields are only ever added.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct AttemptSummary {
    /// The id of the analysis.
    pub id: String,
    /// The number of the attempt, from 1.
    pub attempt: u32,
    /// The state, or [`State::Unknown`].
    #[serde(skip)]
    pub state: State,
    /// The state as stored, which may be one that [`State`] does not know.
    #[serde(rename = "status")]
    pub state_word: String,
    /// A word that says more about a final state.
    pub reason: Option<String>,
    /// A sentence for people, if there is one.
    pub message: Option<String>,
    /// Whether somebody else ended or removed the attempt before it was committed. It does not count then.
    pub superseded: bool,
    /// The machine that runs or ran it. Empty while it is queued.
    pub host: String,
    /// When it was queued, or begun by `run`, by the database's clock.
    pub created_ms: i64,
    /// When the program started, by the runner's clock. `None` if it did not run.
    pub started_ms: Option<i64>,
    /// When it ended, by the runner's clock.
    pub ended_ms: Option<i64>,
    /// When its state became final, by the database's clock. `None` if it is not final.
    pub committed_ms: Option<i64>,
    /// How long the program ran. `None` if it did not run or has not ended.
    pub wall_ms: Option<u64>,
    /// The exit status of the program, if it exited.
    pub exit_code: Option<i32>,
    /// The number of the signal that ended the program, if one did.
    pub signal: Option<i32>,
    /// `full` or `landlock`, or `none` for results that were made without a sandbox. `None` if it is not known.
    pub isolation_level: Option<String>,
    /// Whether the program succeeded and Fumehood took everything that it left. `None` if it has not ended.
    pub complete: Option<bool>,
    /// The number of outputs. `None` if it is not committed.
    pub outputs_count: Option<u64>,
    /// Sum of the lengths of all outputs. `None` if it is not committed.
    pub output_bytes: Option<u64>,
    /// The state of the post-process, or [`PostProcessState::Unknown`].
    #[serde(skip)]
    pub post_process: PostProcessState,
    /// The state of the post-process as stored.
    #[serde(rename = "post_process")]
    pub post_process_word: Option<String>,
}

/// Everything about an attempt except its outputs, logs and remarks. Fields ending in `_json` hold JSON text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptRow {
    /// What a listing shows.
    pub summary: AttemptSummary,
    /// The kernel's id of the boot during which it ran. Empty while it is queued.
    pub boot_id: String,
    /// The user who asked for it, if known.
    pub submitter: Option<String>,
    /// The path of its workspace on the host, if known.
    pub workspace: Option<String>,
    /// `None` if the attempt has not ended or was given up by somebody else.
    pub usage: Option<AttemptUsage>,
    /// The layers that were in force.
    pub isolation_json: Option<String>,
    /// Each limit, and what enforced it.
    pub limits_json: Option<String>,
    /// Guesses at why the program failed.
    pub hints_json: Option<String>,
    /// What the user was told.
    pub notices_json: Option<String>,
    /// What the result was made from: command, inputs, runtime, packages, host.
    pub provenance_json: Option<String>,
    /// How many things in the workspace were not collected. `None` if it is not committed.
    pub refused_count: Option<u64>,
    /// `result.json`, if there is one and both databases accept it.
    pub result_json: Option<String>,
    /// Why `result.json` is kept only as a file, if it is.
    pub result_note: Option<String>,
    /// How often the post-process has ended.
    pub post_process_tries: u64,
    /// The last message of the post-process.
    pub post_process_message: Option<String>,
    /// When the state of the post-process was last recorded, by the database's clock.
    pub post_process_ms: Option<i64>,
}

/// An output, also in every `--json` document. There the path is escaped; `fumehood outputs` accepts it in this form.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct StoredOutput {
    /// The path below the workspace.
    pub path: OutputPath,
    /// The length of the file.
    pub bytes: u64,
    /// A guess at the type of the content. Says nothing about safety.
    pub media_type: String,
    /// The hash of the content, which names its object in the artifact store.
    pub blake3: ContentHash,
    /// When the program last changed the file, as the program left it, so it proves nothing.
    pub modified_ms: i64,
    /// The id of the artifact store that holds the object.
    pub artifact_store: String,
    /// The machine of that artifact store.
    pub host: String,
    /// Whether the database holds the bytes.
    pub inline: bool,
}

/// The log of one standard stream. See [`crate::LogRow`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredLog {
    /// One of [`crate::STREAMS`].
    pub stream: String,
    /// How many bytes the program wrote.
    pub total_bytes: u64,
    /// How many of these bytes were not kept.
    pub dropped_bytes: u64,
    /// The first bytes that were kept, or an excerpt if there is an object.
    pub head: Vec<u8>,
    /// The last bytes that were kept, or an excerpt if there is an object.
    pub tail: Vec<u8>,
    /// The object with every byte that was kept. `None` if `head` and `tail` are everything.
    pub object: Option<ContentHash>,
    /// The id of the artifact store that holds the object.
    pub artifact_store: Option<String>,
    /// The length of the object.
    pub object_bytes: Option<u64>,
    /// How many bytes of the object come before the gap that was dropped.
    pub object_head_bytes: Option<u64>,
}

/// A remark on a path. The remark is text, because a newer Fumehood may know more of them than
/// [`crate::types::manifest::Remark`].
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct StoredRemark {
    /// The path, escaped.
    #[serde(rename = "path")]
    pub path_text: String,
    /// The word for the remark.
    pub remark: String,
}

/// How often one remark was made, listed or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemarkCount {
    /// The word for the remark.
    pub remark: String,
    /// How many paths it was made on.
    pub count: u64,
}

/// An attempt that has not ended as far as the database knows. Has no `Debug`, because it holds the key.
#[derive(Clone, PartialEq, Eq)]
pub struct UnfinishedAttempt {
    /// The id of the analysis.
    pub id: String,
    /// The number of the attempt.
    pub attempt: u32,
    /// The attempt's token. See [`crate::NewAttempt`].
    pub key: String,
    /// Running or collecting.
    pub state: State,
    /// The id of the machine that runs it.
    pub host: String,
    /// The kernel's id of the boot during which it was begun.
    pub boot_id: String,
    /// When it was queued, or begun by `run`, by the database's clock.
    pub created_ms: i64,
}

/// An attempt whose post-process is still to be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DuePostProcess {
    /// The id of the analysis.
    pub id: String,
    /// The number of the attempt.
    pub attempt: u32,
    /// The id of the machine that ran it.
    pub host: String,
    /// Pending or failed.
    pub state: PostProcessState,
    /// How often the post-process has ended already.
    pub tries: u64,
}

/// How many ids the error about an ambiguous prefix lists.
const CANDIDATES_MAX: usize = 5;

macro_rules! summary_columns {
    () => {
        "a.id, a.attempt, a.state, a.reason, a.message, a.superseded, a.host, a.created_ms, a.started_ms, a.ended_ms,
         a.committed_ms, a.wall_ms, a.exit_code, a.signal, a.isolation_level, a.complete, a.outputs_count,
         a.output_bytes, a.post_process"
    };
}

macro_rules! attempt_columns {
    () => {
        concat!(
            "SELECT ",
            summary_columns!(),
            ", a.boot_id, a.submitter, a.workspace, a.wall_ms, a.cpu_ms, a.memory_peak_bytes, a.pids_peak,
             a.disk_bytes, a.files, a.oom_kills, a.isolation, a.limits, a.hints, a.notices, a.provenance,
             a.refused_count, a.result, a.result_note, a.post_process_tries, a.post_process_message, a.post_process_ms
             FROM attempts a WHERE a.id = $1 "
        )
    };
}

impl Store {
    /// Lists attempts, newest first.
    pub fn list(&mut self, filter: &AttemptFilter) -> Result<Vec<AttemptSummary>, StoreError> {
        macro_rules! listing {
            ($of_states:literal) => {
                concat!(
                    "SELECT ",
                    summary_columns!(),
                    " FROM attempts a WHERE a.created_ms >= $1",
                    $of_states,
                    " AND ($2 OR (NOT a.superseded AND NOT EXISTS (
                        SELECT 1 FROM attempts b WHERE b.id = a.id AND b.attempt > a.attempt AND NOT b.superseded)))
                      ORDER BY a.created_ms DESC, a.id DESC, a.attempt DESC LIMIT $3"
                )
            };
        }
        let mut values = vec![
            SqlValue::int(filter.since_ms.unwrap_or(i64::MIN)),
            SqlValue::bool(filter.which == AttemptSelection::All),
            SqlValue::int(filter.limit),
        ];
        let sql = match filter.states.is_empty() {
            // Without a filter, also list attempts in states that this Fumehood does not know.
            true => listing!(""),
            false => {
                let states = ten_states(filter.states);
                values.extend(states.map(|state| SqlValue::text(state.as_str())));
                listing!(" AND a.state IN ($4, $5, $6, $7, $8, $9, $10, $11, $12, $13)")
            }
        };
        // A row whose attempt number is invalid is left out.
        self.db.fetch_readable("list the analyses", sql, &values)
    }

    /// Reads one attempt. Without a number, the newest one that is not superseded.
    pub fn show(&mut self, id: &str, attempt: Option<u32>) -> Result<AttemptRow, StoreError> {
        let what = "read the attempt";
        let id_value = SqlValue::text(id);
        let row = match attempt {
            Some(attempt) => {
                let sql = concat!(attempt_columns!(), "AND a.attempt = $2");
                self.db
                    .query_one(what, sql, &[id_value, SqlValue::int(attempt)])?
            }
            None => {
                let sql = concat!(
                    attempt_columns!(),
                    "ORDER BY a.superseded, a.attempt DESC LIMIT 1"
                );
                self.db.query_one(what, sql, &[id_value])?
            }
        };
        let given = match attempt {
            Some(attempt) => format!("{id} attempt {attempt}"),
            None => id.to_owned(),
        };
        row.ok_or(StoreError::NotFound { given })?
            .read("an attempt")
    }

    /// All attempts of an analysis, oldest first.
    pub fn attempts(&mut self, id: &str) -> Result<Vec<AttemptSummary>, StoreError> {
        let sql = concat!(
            "SELECT ",
            summary_columns!(),
            " FROM attempts a WHERE a.id = $1 ORDER BY a.attempt"
        );
        self.db.fetch_all("read the attempts", sql, &values![id])
    }

    /// The outputs of an attempt, sorted by path.
    pub fn outputs(&mut self, id: &str, attempt: u32) -> Result<Vec<StoredOutput>, StoreError> {
        let sql = "SELECT path, bytes, media_type, blake3, modified_ms, artifact_store, host, content IS NOT NULL
                   FROM outputs WHERE id = $1 AND attempt = $2 ORDER BY path";
        let rows = self
            .db
            .query("read the outputs", sql, &values![id, attempt])?;
        rows.into_iter()
            .map(|mut row| row.read("an output"))
            .collect()
    }

    /// The bytes of an output, if the database holds them.
    pub fn output_content(
        &mut self,
        id: &str,
        attempt: u32,
        path: &OutputPath,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let what = "read an output's content";
        let sql = "SELECT content FROM outputs WHERE id = $1 AND attempt = $2 AND path = $3";
        let values = values![id, attempt, path.as_bytes()];
        let row = self.db.query_one(what, sql, &values)?;
        row.map_or(Ok(None), |mut row| row.maybe_bytes(what))
    }

    /// The log of a stream. `None` if no log of it is stored.
    pub fn log(
        &mut self,
        id: &str,
        attempt: u32,
        stream: &str,
    ) -> Result<Option<StoredLog>, StoreError> {
        let what = "read the log";
        let sql = "SELECT stream, total_bytes, dropped_bytes, head, tail, blake3, artifact_store, object_bytes,
                   object_head_bytes FROM logs WHERE id = $1 AND attempt = $2 AND stream = $3";
        let values = values![id, attempt, stream];
        self.db.fetch_one(what, sql, &values)
    }

    /// The remarks about an attempt: the first ones in full, and the number of each kind.
    pub fn remarks(
        &mut self,
        id: &str,
        attempt: u32,
    ) -> Result<(Vec<StoredRemark>, Vec<RemarkCount>), StoreError> {
        let what = "read the remarks";
        let values = values![id, attempt];
        let sql = "SELECT path_text, remark FROM remarks WHERE id = $1 AND attempt = $2 ORDER BY position";
        let listed = self.db.fetch_all(what, sql, &values)?;
        let sql = "SELECT remark, count FROM remark_counts WHERE id = $1 AND attempt = $2 ORDER BY remark";
        Ok((listed, self.db.fetch_all(what, sql, &values)?))
    }

    /// Finds an id from what the user typed: the id itself, `@last`, or a prefix of exactly one id.
    pub fn resolve(&mut self, given: &str) -> Result<String, StoreError> {
        let what = "look for the analysis";
        let not_found = || StoreError::NotFound {
            given: given.chars().take(100).collect(),
        };
        if given == "@last" {
            let sql = "SELECT id FROM attempts ORDER BY created_ms DESC, id DESC LIMIT 1";
            let row = self.db.query_one(what, sql, &[])?;
            return row.ok_or_else(not_found)?.text(what);
        }
        if given.is_empty() {
            return Err(not_found());
        }
        // Ids are ASCII and compared by bytes, so all ids with a prefix lie between the prefix and the prefix
        // followed by DEL. A LIKE pattern would need escaping, and could not use the index on both databases.
        let after = format!("{given}\u{7f}");
        let sql = "SELECT id FROM analyses WHERE id >= $1 AND id < $2 ORDER BY id LIMIT $3";
        let limit = SqlValue::count(CANDIDATES_MAX as u64);
        let mut candidates: Vec<String> =
            self.db
                .fetch_all(what, sql, &values![given, &after, limit])?;
        match candidates.first() {
            None => Err(not_found()),
            Some(first) if first == given || candidates.len() == 1 => Ok(candidates.swap_remove(0)),
            Some(_) => Err(StoreError::Ambiguous {
                given: given.to_owned(),
                candidates,
            }),
        }
    }

    /// Running and collecting attempts of one host, or of all, oldest first.
    pub fn unfinished(&mut self, host: Option<&str>) -> Result<Vec<UnfinishedAttempt>, StoreError> {
        let what = "look for attempts that have not ended";
        let sql = "SELECT id, attempt, key, state, host, boot_id, created_ms FROM attempts
                   WHERE state IN ('running', 'collecting') AND ($1 IS NULL OR host = $1) ORDER BY created_ms, id";
        self.db.fetch_all(what, sql, &values![host])
    }

    /// Attempts of a host whose post-process is pending or failed, oldest first.
    pub fn post_process_due(
        &mut self,
        host: Option<&str>,
        limit: u32,
    ) -> Result<Vec<DuePostProcess>, StoreError> {
        let what = "look for post-processing to do";
        let sql = "SELECT id, attempt, host, post_process, post_process_tries FROM attempts
                   WHERE post_process IN ('pending', 'failed') AND ($1 IS NULL OR host = $1)
                   ORDER BY created_ms, id, attempt LIMIT $2";
        self.db.fetch_all(what, sql, &values![host, limit])
    }

    /// Records how a post-process ended. `Done` and `Failed` count as a try.
    pub fn mark_post_process(
        &mut self,
        id: &str,
        attempt: u32,
        mark: PostProcessState,
        message: Option<&str>,
    ) -> Result<(), StoreError> {
        let what = "note how the post-process ended";
        let now = self.db.now_ms()?;
        let tries = u32::from(matches!(
            mark,
            PostProcessState::Done | PostProcessState::Failed
        ));
        let sql = "UPDATE attempts SET post_process = $3, post_process_message = $4, post_process_ms = $5,
                   post_process_tries = post_process_tries + $6 WHERE id = $1 AND attempt = $2";
        let values = values![id, attempt, mark.as_str(), message, now, tries];
        match self.db.execute(what, sql, &values)? {
            0 => Err(StoreError::NotFound {
                given: format!("{id} attempt {attempt}"),
            }),
            _ => Ok(()),
        }
    }
}

/// Fills ten placeholders with the given states. Repeats the last one; uses all ten states if none is given.
pub(crate) fn ten_states(asked: &[State]) -> impl Iterator<Item = State> {
    let mut states: Vec<State> = State::ALL
        .into_iter()
        .filter(|s| asked.contains(s))
        .collect();
    match states.last() {
        None => states = State::ALL.to_vec(),
        Some(last) => states.resize(State::ALL.len(), *last),
    }
    states.into_iter()
}

/// Treats a number that Fumehood would not write as missing, so that one bad row does not make a listing fail.
fn lenient<T: TryFrom<i64>>(row: &mut Row, what: &'static str) -> Result<Option<T>, StoreError> {
    let value = row.maybe_int(what)?;
    Ok(value.and_then(|value| T::try_from(value).ok()))
}

impl FromRow for AttemptSummary {
    fn from_row(row: &mut Row, _what: &'static str) -> Result<AttemptSummary, StoreError> {
        let what = "an attempt";
        let mut summary = AttemptSummary {
            id: row.text(what)?,
            attempt: row.attempt()?,
            state: State::Unknown,
            state_word: row.text(what)?,
            reason: row.maybe_text(what)?,
            message: row.maybe_text(what)?,
            superseded: row.bool(what)?,
            host: row.text(what)?,
            created_ms: row.int(what)?,
            started_ms: row.maybe_int(what)?,
            ended_ms: row.maybe_int(what)?,
            committed_ms: row.maybe_int(what)?,
            wall_ms: lenient(row, what)?,
            exit_code: lenient(row, what)?,
            signal: lenient(row, what)?,
            isolation_level: row.maybe_text(what)?,
            complete: row.maybe_bool(what)?,
            outputs_count: lenient(row, what)?,
            output_bytes: lenient(row, what)?,
            post_process_word: row.maybe_text(what)?,
            post_process: PostProcessState::NotAsked,
        };
        summary.state = State::parse(&summary.state_word).unwrap_or(State::Unknown);
        summary.post_process = PostProcessState::parse(summary.post_process_word.as_deref());
        Ok(summary)
    }
}

impl FromRow for Option<AttemptUsage> {
    fn from_row(row: &mut Row, _what: &'static str) -> Result<Option<AttemptUsage>, StoreError> {
        let mut next = || row.maybe_count("what an attempt used");
        let wall_ms = next()?;
        let usage = AttemptUsage {
            wall_ms: wall_ms.unwrap_or(0),
            cpu_ms: next()?.unwrap_or(0),
            memory_peak_bytes: next()?,
            pids_peak: next()?,
            disk_bytes: next()?.unwrap_or(0),
            files: next()?.unwrap_or(0),
            oom_kills: next()?.unwrap_or(0),
        };
        Ok(wall_ms.map(|_| usage))
    }
}

from_row!(AttemptRow: summary, boot_id, submitter, workspace, usage, isolation_json, limits_json, hints_json,
    notices_json, provenance_json, refused_count, result_json, result_note, post_process_tries,
    post_process_message, post_process_ms);

from_row!(StoredOutput: path, bytes, media_type, blake3, modified_ms, artifact_store, host, inline);

from_row!(DuePostProcess: id, attempt, host, state, tries);

from_row!(StoredLog: stream, total_bytes, dropped_bytes, head, tail, object, artifact_store,
    object_bytes, object_head_bytes);

from_row!(StoredRemark: path_text, remark);

from_row!(RemarkCount: remark, count);

from_row!(UnfinishedAttempt: id, attempt, key, state, host, boot_id, created_ms);
