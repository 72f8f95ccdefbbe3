//! Resolves an id, the beginning of one, or `@last`; and an attempt, as in `ID@2`.

use std::ffi::{OsStr, OsString};

use anyhow::Context;
use engine::attempt::error::CommitError;
use engine::attempt::recorder::Recorder;
use engine::home::Home;
use engine::request::AnalysisId;
use store::{AttemptRow, StoreError};

use super::run_dirs;

pub const HELP_ANALYSIS: &str = "The id, the beginning of one, or @last";
pub const HELP: &str = "The id, the beginning of one, or @last; @2 after it means attempt 2";

/// Splits `ID@2`. `@last` begins with the at sign, so it does not name an attempt.
pub fn split(given: &OsStr) -> anyhow::Result<(String, Option<u32>)> {
    let text = given
        .to_str()
        .with_context(|| format!("{given:?} is no id: ids are of [A-Za-z0-9._-]"))?;
    match text.rsplit_once('@') {
        Some((id, number)) if !id.is_empty() => {
            let attempt = number.parse().ok().filter(|n| *n > 0);
            let attempt = attempt.with_context(|| {
                format!("{text:?}: after @ stands the number of an attempt, such as @2")
            })?;
            Ok((id.to_owned(), Some(attempt)))
        }
        _ => Ok((text.to_owned(), None)),
    }
}

/// Returns the id of the analysis in the database.
pub fn resolve_analysis(recorder: &mut Recorder, given: &OsStr) -> anyhow::Result<String> {
    let (text, attempt) = split(given)?;
    anyhow::ensure!(
        attempt.is_none(),
        "{given:?} names an attempt, and this is about the whole analysis; leave out what follows the @"
    );
    resolve(recorder, &text)
}

/// Returns the ids of several analyses in the database, each once.
pub fn resolve_analyses(
    recorder: &mut Recorder,
    given: &[OsString],
) -> anyhow::Result<Vec<String>> {
    let mut wanted = Vec::new();
    for given in given {
        let id = resolve_analysis(recorder, given)?;
        if !wanted.contains(&id) {
            wanted.push(id);
        }
    }
    Ok(wanted)
}

/// Returns the attempt in the database. Without a number, this is the newest attempt that was not superseded.
pub fn resolve_attempt(
    recorder: &mut Recorder,
    given: &OsStr,
    number: Option<u32>,
) -> anyhow::Result<AttemptRow> {
    let (text, named) = split(given)?;
    anyhow::ensure!(
        named.is_none() || number.is_none() || named == number,
        "{given:?} and --attempt name different attempts"
    );
    let id = resolve(recorder, &text)?;
    let found = recorder.with(|store| store.show(&id, number.or(named)));
    found.map_err(without_database_context)
}

fn resolve(recorder: &mut Recorder, text: &str) -> anyhow::Result<String> {
    let found = recorder.with(|store| store.resolve(text));
    found.map_err(without_database_context)
}

/// Drops the mention of the database from an error that is the caller's: a wrong id, or one that does not fit the
/// command.
pub fn without_database_context(error: CommitError) -> anyhow::Error {
    match error {
        CommitError::Database {
            source:
                source @ (StoreError::NotFound { .. }
                | StoreError::Ambiguous { .. }
                | StoreError::NeverSubmitted { .. }
                | StoreError::SecretsErased { .. }
                | StoreError::NotErased { .. }
                | StoreError::Request { .. }
                | StoreError::NotEnded { .. }),
            ..
        } => source.into(),
        error => error.into(),
    }
}

/// Returns an analysis that has a directory in this home, by its exact id, whether or not a database has it; else as
/// the database resolves it.
pub fn resolve_local(
    home: &Home,
    recorder: Option<&mut Recorder>,
    given: &OsStr,
) -> anyhow::Result<AnalysisId> {
    let exact = given.to_str().map(AnalysisId::new);
    if let Some(Ok(id)) = &exact
        && run_dirs::has_any(home, id)
    {
        return Ok(id.clone());
    }
    match (recorder, exact) {
        (Some(recorder), _) => Ok(AnalysisId::new(&resolve_analysis(recorder, given)?)?),
        (None, Some(exact)) => Ok(exact?),
        (None, None) => anyhow::bail!("{given:?} is no id: ids are of [A-Za-z0-9._-]"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_is_named_after_an_at_sign() {
        let split = |text: &str| split(OsStr::new(text)).ok();
        assert_eq!(split("gwas-7"), Some(("gwas-7".into(), None)));
        assert_eq!(split("gwas-7@2"), Some(("gwas-7".into(), Some(2))));
        assert_eq!(split("@last"), Some(("@last".into(), None)));
        assert_eq!(split("@last@3"), Some(("@last".into(), Some(3))));
        for wrong in ["a@", "a@0", "a@x", "a@-1", "a@99999999999"] {
            assert_eq!(split(wrong), None, "{wrong:?}");
        }
    }
}
