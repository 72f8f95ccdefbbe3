//! Notifications to listeners on other connections. Only PostgreSQL has them; see `queue/change_listener.rs` for
//! SQLite.

use crate::database::connection::{Connection, Dialect};
use crate::database::error::StoreError;
use crate::database::value::values;
use crate::types::attempt::State;

/// Notifies listeners on `fumehood_commit`. PostgreSQL delivers the notification when the transaction commits.
pub(crate) fn notify_commit(
    db: &mut Connection,
    id: &str,
    attempt: u32,
    state: State,
) -> Result<(), StoreError> {
    if db.dialect() != Dialect::Postgres {
        return Ok(());
    }
    let payload = serde_json::json!({"id": id, "attempt": attempt, "state": state.as_str()});
    let sql = "SELECT pg_notify('fumehood_commit', $1)";
    let payload = payload.to_string();
    db.execute("tell of the commit", sql, &values![&payload])
        .map(drop)
}

/// Notifies workers, which listen on `fumehood_queue`.
pub(crate) fn notify_queue(db: &mut Connection) -> Result<(), StoreError> {
    if db.dialect() != Dialect::Postgres {
        return Ok(());
    }
    let sql = "SELECT pg_notify('fumehood_queue', '')";
    db.execute("tell the workers", sql, &[]).map(drop)
}
