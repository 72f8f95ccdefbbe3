//! The values of secret variables in a submission. They are kept until the last attempt has ended, and no longer.

use crate::database::connection::Connection;
use crate::database::error::StoreError;
use crate::database::value::values;
use crate::types::submission::Submission;

/// Removes the values of secret variables from the submission, if no attempt can need them any more. Runs in the
/// transaction that ended the last attempt, so no crash leaves them behind. The analysis is locked.
pub(crate) fn erase_secrets(db: &mut Connection, id: &str) -> Result<(), StoreError> {
    let sql = "
        SELECT request FROM submissions WHERE id = $1 AND request LIKE '%\"env\"%' AND NOT EXISTS
            (SELECT 1 FROM attempts WHERE id = $1 AND state IN ('queued', 'running', 'collecting'))";
    let what = "look for the secrets of the submission";
    let Some(mut row) = db.query_one(what, sql, &values![id])? else {
        return Ok(());
    };
    // No worker can run a request that cannot be parsed, so its secrets are never used.
    let Ok(mut submission) = Submission::read(&row.text(what)?, id) else {
        return Ok(());
    };
    if !submission.erase_secrets() {
        return Ok(());
    }
    let Ok(request) = submission.write() else {
        return Ok(());
    };
    // The fingerprint also covers the secrets, and could be used to guess a weak one. Only submissions with a key
    // need it.
    let sql = "
        UPDATE submissions SET request = $2, fingerprint = CASE WHEN submit_key IS NULL THEN '' ELSE fingerprint END
        WHERE id = $1";
    let values = values![id, &request];
    db.execute("erase the secrets of the submission", sql, &values)
        .map(drop)
}

/// Puts erased values of secret variables back. The caller must give all erased variables and no others.
pub(crate) fn restore_secrets(
    db: &mut Connection,
    id: &str,
    given: &[(String, String)],
) -> Result<(), StoreError> {
    let what = "look for the secrets of the submission";
    let sql = "SELECT request FROM submissions WHERE id = $1";
    let Some(mut row) = db.query_one(what, sql, &values![id])? else {
        return Ok(());
    };
    // If the request cannot be parsed, the worker reports that better than this process could.
    let Ok(mut submission) = Submission::read(&row.text(what)?, id) else {
        return Ok(());
    };
    let erased = submission.erased_names();
    if let Some((name, _)) = given.iter().find(|(name, _)| !erased.contains(name)) {
        let (id, name) = (id.to_owned(), name.clone());
        return Err(StoreError::NotErased { id, name });
    }
    let is_given = |name: &String| given.iter().any(|(given, _)| given == name);
    let names: Vec<String> = erased.into_iter().filter(|name| !is_given(name)).collect();
    if !names.is_empty() {
        let id = id.to_owned();
        return Err(StoreError::SecretsErased { id, names });
    }
    if given.is_empty() {
        return Ok(());
    }
    submission.restore_secrets(given);
    let request = submission.write().map_err(|source| StoreError::Request {
        id: id.to_owned(),
        source,
    })?;
    let sql = "UPDATE submissions SET request = $2 WHERE id = $1";
    let values = values![id, &request];
    db.execute("write the secrets of the submission", sql, &values)
        .map(drop)
}
