//! What the runner of a claimed attempt does with its row. Every change is guarded by attempt number, key and state.
//! A repeat after a lost answer gives the same answer.

use crate::Store;
use crate::analyses::analysis_row::lock_analysis;
use crate::analyses::events::{self, EventKind, EventRecord};
use crate::database::connection::{Connection, TransactionKind};
use crate::database::error::StoreError;
use crate::database::value::{Row, SqlValue, values};
use crate::queue::queue_types::{ExpiredLease, LeasedAttempt, RenewOutcome};
use crate::types::attempt::NewAttempt;

impl Store {
    /// Marks a claimed attempt as started by its runner: stores the workspace and writes the event `started`. Returns
    /// false if the runner has lost the attempt, or if another runner with the same key but another workspace has
    /// started it.
    pub fn start_claimed(
        &mut self,
        begin: &NewAttempt,
        attempt: u32,
        lease_ms: u64,
    ) -> Result<bool, StoreError> {
        let what = "take up the attempt";
        self.db.transaction(what, TransactionKind::Write, |db| {
            lock_analysis(db, begin.id)?;
            let sql = "SELECT workspace FROM attempts WHERE id = $1 AND attempt = $2 AND key = $3 AND state = 'running'";
            let of = values![begin.id, attempt, begin.key];
            let Some(mut row) = db.query_one(what, sql, &of)? else {
                return Ok(false);
            };
            // Store an empty text rather than NULL, so that a second runner sees that there was a first.
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
            let values = values![id, number, key, workspace, SqlValue::json(begin.provenance), until];
            db.execute(what, sql, &values)?;
            if is_new {
                let event = EventRecord::new(EventKind::Started, None, Some(begin.host));
                events::record_event(db, begin.id, attempt, &event)?;
            }
            Ok(true)
        })
    }

    /// Renews the lease. Takes no lock on the analysis: a runner must learn soon whether it may continue, whatever
    /// other transactions do.
    pub fn renew_lease(
        &mut self,
        leased: &LeasedAttempt,
        lease_ms: u64,
    ) -> Result<RenewOutcome, StoreError> {
        let what = "renew the lease";
        let until = lease_until(&mut self.db, lease_ms)?;
        let sql = "
            UPDATE attempts SET lease_ms = $4
            WHERE id = $1 AND attempt = $2 AND key = $3 AND state IN ('running', 'collecting')
            RETURNING cancel_ms, cancel_by";
        let values = values![leased.id, leased.attempt, leased.key, until];
        let Some(mut row) = self.db.query_one(what, sql, &values)? else {
            return Ok(RenewOutcome::Lost);
        };
        Ok(match row.maybe_int(what)? {
            None => RenewOutcome::Renewed,
            Some(_) => RenewOutcome::CancelRequested {
                by: row.maybe_text(what)?.unwrap_or_default(),
            },
        })
    }

    /// Marks the program as ended: `running` becomes `collecting`, with a new lease and the event `ended`. Returns
    /// false if the runner has lost the attempt.
    pub fn mark_collecting(
        &mut self,
        leased: &LeasedAttempt,
        lease_ms: u64,
        reason: &str,
    ) -> Result<bool, StoreError> {
        let what = "note that the program has ended";
        self.db.transaction(what, TransactionKind::Write, |db| {
            lock_analysis(db, leased.id)?;
            let until = lease_until(db, lease_ms)?;
            let values = values![leased.id, leased.attempt, leased.key, until];
            let sql = "
                UPDATE attempts SET state = 'collecting', lease_ms = $4
                WHERE id = $1 AND attempt = $2 AND key = $3 AND state = 'running'";
            if db.execute(what, sql, &values)? == 1 {
                let event = EventRecord::new(EventKind::Ended, Some(reason), None);
                events::record_event(db, leased.id, leased.attempt, &event)?;
                return Ok(true);
            }
            let sql = "
                UPDATE attempts SET lease_ms = $4
                WHERE id = $1 AND attempt = $2 AND key = $3 AND state = 'collecting'";
            Ok(db.execute(what, sql, &values)? == 1)
        })
    }

    /// The attempts of a host for which cancellation is requested: id, attempt, key.
    pub fn requested_cancels(
        &mut self,
        host: &str,
    ) -> Result<Vec<(String, u32, String)>, StoreError> {
        let what = "look for attempts to cancel";
        let sql = "
            SELECT id, attempt, key FROM attempts
            WHERE host = $1 AND cancel_ms IS NOT NULL AND state IN ('running', 'collecting')
            ORDER BY id, attempt";
        let rows = self.db.query(what, sql, &values![host])?;
        let cancel = |mut row: Row| -> Result<_, StoreError> {
            Ok((row.text(what)?, row.attempt()?, row.text(what)?))
        };
        // Skip a row that cannot be read: no runner has such an attempt, and the row must not hide the others.
        Ok(rows
            .into_iter()
            .filter_map(|row| cancel(row).ok())
            .collect())
    }

    /// Running or collecting attempts whose lease has expired, oldest first, at most `limit`.
    pub fn expired_leases(&mut self, limit: u32) -> Result<Vec<ExpiredLease>, StoreError> {
        let what = "look for leases that are over";
        let now = self.db.now_ms()?;
        let sql = "
            SELECT id, attempt, key, state, host, lease_ms FROM attempts
            WHERE state IN ('running', 'collecting') AND lease_ms < $1 ORDER BY lease_ms, id LIMIT $2";
        let rows = self.db.query(what, sql, &values![now, limit])?;
        let expired = |mut row: Row| -> Result<_, StoreError> {
            Ok(ExpiredLease {
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

/// The end of a new lease, by the database's clock. The runner's clock does not matter.
fn lease_until(db: &mut Connection, lease_ms: u64) -> Result<i64, StoreError> {
    let lease = i64::try_from(lease_ms).unwrap_or(i64::MAX);
    Ok(db.now_ms()?.saturating_add(lease))
}
