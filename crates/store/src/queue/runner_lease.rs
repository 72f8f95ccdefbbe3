//! What the runner of a claimed attempt does to its row, and what others see of it. Every change is guarded by number, key
//! and state, and says the same when it is repeated after an answer that was lost.

use crate::Store;
use crate::attempts::attempt::Begin;
use crate::attempts::commit::lock;
use crate::attempts::events::{self, Told};
use crate::database::connection::Purpose;
use crate::database::connection::{Connection, Row, Value};
use crate::database::error::StoreError;
use crate::queue::queue_types::{Expired, Happened, Held, Renewed};

impl Store {
    /// The runner that was started for a claimed attempt takes it up, once: notes its workspace, event `started`. False: it
    /// is not its own any more, or another runner with the same key, but another workspace, took it up before.
    pub fn take_up(
        &mut self,
        begin: &Begin,
        attempt: u32,
        lease_ms: u64,
    ) -> Result<bool, StoreError> {
        let what = "take up the attempt";
        self.db.transaction(what, Purpose::Write, |db| {
            lock(db, begin.id)?;
            let sql = "SELECT workspace FROM attempts WHERE id = $1 AND attempt = $2 AND key = $3 AND state = 'running'";
            let of = [
                Value::text(begin.id),
                Value::int(attempt),
                Value::text(begin.key),
            ];
            let Some(mut row) = db.query_one(what, sql, &of)? else {
                return Ok(false);
            };
            // It may be empty, but not NULL any more, so that the second one sees that there was a first.
            let workspace = begin.workspace.unwrap_or("");
            let is_new = match row.maybe_text(what)? {
                None => true,
                Some(noted) if noted == workspace => false,
                Some(_) => return Ok(false),
            };
            let until = lease_until(db, lease_ms)?;
            let sql = "
                UPDATE attempts SET workspace = $4, provenance = COALESCE($5, provenance), lease_ms = $6
                WHERE id = $1 AND attempt = $2 AND key = $3 AND state = 'running'";
            let [id, number, key] = of;
            let values = [
                id,
                number,
                key,
                Value::text(workspace),
                Value::json(begin.provenance),
                Value::int(until),
            ];
            db.execute(what, sql, &values)?;
            if is_new {
                let told = Told {
                    happened: Happened::Started,
                    reason: None,
                    by: Some(begin.host),
                };
                events::tell(db, begin.id, attempt, &told)?;
            }
            Ok(true)
        })
    }

    /// Without the lock of the analysis: a runner must learn soon whether it may go on, whoever else is at work there.
    pub fn renew(&mut self, held: &Held, lease_ms: u64) -> Result<Renewed, StoreError> {
        let what = "renew the lease";
        let until = lease_until(&mut self.db, lease_ms)?;
        let sql = "
            UPDATE attempts SET lease_ms = $4
            WHERE id = $1 AND attempt = $2 AND key = $3 AND state IN ('running', 'collecting')
            RETURNING cancel_ms, cancel_by";
        let values = [
            Value::text(held.id),
            Value::int(held.attempt),
            Value::text(held.key),
            Value::int(until),
        ];
        let Some(mut row) = self.db.query_one(what, sql, &values)? else {
            return Ok(Renewed::Lost);
        };
        Ok(match row.maybe_int(what)? {
            None => Renewed::Held,
            Some(_) => Renewed::CancelAsked {
                by: row.maybe_text(what)?.unwrap_or_default(),
            },
        })
    }

    /// The program has ended: `running` becomes `collecting`, with a fresh lease; event `ended`. False: not its own any more.
    pub fn collecting(
        &mut self,
        held: &Held,
        lease_ms: u64,
        reason: &str,
    ) -> Result<bool, StoreError> {
        let what = "note that the program has ended";
        self.db.transaction(what, Purpose::Write, |db| {
            lock(db, held.id)?;
            let until = lease_until(db, lease_ms)?;
            let values = [
                Value::text(held.id),
                Value::int(held.attempt),
                Value::text(held.key),
                Value::int(until),
            ];
            let sql = "
                UPDATE attempts SET state = 'collecting', lease_ms = $4
                WHERE id = $1 AND attempt = $2 AND key = $3 AND state = 'running'";
            if db.execute(what, sql, &values)? == 1 {
                let told = Told {
                    happened: Happened::Ended,
                    reason: Some(reason),
                    by: None,
                };
                events::tell(db, held.id, held.attempt, &told)?;
                return Ok(true);
            }
            let sql = "
                UPDATE attempts SET lease_ms = $4
                WHERE id = $1 AND attempt = $2 AND key = $3 AND state = 'collecting'";
            Ok(db.execute(what, sql, &values)? == 1)
        })
    }

    /// Attempts of a host that somebody wants cancelled: id, attempt, key.
    pub fn cancels(&mut self, host: &str) -> Result<Vec<(String, u32, String)>, StoreError> {
        let what = "look for attempts to cancel";
        let sql = "
            SELECT id, attempt, key FROM attempts
            WHERE host = $1 AND cancel_ms IS NOT NULL AND state IN ('running', 'collecting')
            ORDER BY id, attempt";
        let rows = self.db.query(what, sql, &[Value::text(host)])?;
        let wish = |mut row: Row| -> Result<_, StoreError> {
            Ok((row.text(what)?, row.attempt()?, row.text(what)?))
        };
        // One that cannot be read is nobody's, and must not hide the others.
        Ok(rows.into_iter().filter_map(|row| wish(row).ok()).collect())
    }

    /// Running or collecting attempts whose lease is over, oldest first, at most `limit`.
    pub fn expired(&mut self, limit: u32) -> Result<Vec<Expired>, StoreError> {
        let what = "look for leases that are over";
        let now = self.db.now_ms()?;
        let sql = "
            SELECT id, attempt, key, state, host, lease_ms FROM attempts
            WHERE state IN ('running', 'collecting') AND lease_ms < $1 ORDER BY lease_ms, id LIMIT $2";
        let rows = self
            .db
            .query(what, sql, &[Value::int(now), Value::int(limit)])?;
        let expired = |mut row: Row| -> Result<_, StoreError> {
            Ok(Expired {
                id: row.text(what)?,
                attempt: row.attempt()?,
                key: row.text(what)?,
                state: row.state()?,
                host: row.text(what)?,
                expired_ms: u64::try_from(now.saturating_sub(row.int(what)?)).unwrap_or(0),
            })
        };
        Ok(rows
            .into_iter()
            .filter_map(|row| expired(row).ok())
            .collect())
    }
}

/// By the database's clock, whatever the runner's says.
fn lease_until(db: &mut Connection, lease_ms: u64) -> Result<i64, StoreError> {
    let lease = i64::try_from(lease_ms).unwrap_or(i64::MAX);
    Ok(db.now_ms()?.saturating_add(lease))
}
