//! Ends requests that no worker is large enough for.

use crate::Store;
use crate::analyses::analysis_row::lock_analysis;
use crate::analyses::events::{self, EventKind, EventRecord};
use crate::analyses::notifications::notify_commit;
use crate::analyses::secrets::erase_secrets;
use crate::database::connection::TransactionKind;
use crate::database::error::StoreError;
use crate::database::value::values;
use crate::queue::queue_row::{QueueExit, end_queued};
use crate::queue::queue_types::{CPU_DEFAULT_MILLI, WorkerRow};
use crate::queue::workers::live_workers;
use crate::types::attempt::State;
use crate::types::capacity::Capacity;

const PARK_ROWS_MAX: u32 = 100;

impl Store {
    /// Ends attempts that have been ready for `after_ms` and that no live worker is large enough for. Returns their
    /// ids.
    ///
    /// Scans the whole queue, so a worker calls it about once a minute, not with every claim.
    pub fn park_unfit(
        &mut self,
        worker: &WorkerRow,
        memory_default_bytes: u64,
        after_ms: u64,
    ) -> Result<Vec<String>, StoreError> {
        let what = "look for analyses that no worker is large enough for";
        let now = self.db.now_ms()?;
        let mut live = live_workers(&mut self.db, now)?;
        live.push(worker.total);
        let since = now.saturating_sub(i64::try_from(after_ms).unwrap_or(i64::MAX));
        let sql = "
            SELECT id, attempt, COALESCE(memory_bytes, $2), COALESCE(cpu_milli, $4) FROM queue
            WHERE not_before_ms IS NULL AND ready_ms <= $1
                AND (COALESCE(memory_bytes, $2) > $3 OR COALESCE(cpu_milli, $4) > $5)
            ORDER BY priority DESC, turn, queued_ms, id LIMIT $6";
        let values = values![
            since,
            memory_default_bytes,
            worker.total.memory_bytes,
            CPU_DEFAULT_MILLI,
            worker.total.cpu_milli,
            PARK_ROWS_MAX
        ];
        let mut parked = Vec::new();
        for mut row in self.db.query(what, sql, &values)? {
            let (id, attempt) = (row.text(what)?, row.attempt()?);
            let asked: Capacity = row.read(what)?;
            // Use one transaction for each attempt. Only a submission may hold the locks of several analyses, because
            // it sorts them.
            if !live.iter().any(|total| asked.fits_in(*total))
                && self.park(&id, attempt, asked, &worker.name)?
            {
                parked.push(id);
            }
        }
        Ok(parked)
    }

    fn park(
        &mut self,
        id: &str,
        attempt: u32,
        asked: Capacity,
        by: &str,
    ) -> Result<bool, StoreError> {
        let what = "park the analysis";
        let message = format!(
            "it asks for {} of memory and {} CPUs, and no worker has that much; ask for less, or start a larger worker and retry it",
            crate::types::units::format_size(asked.memory_bytes),
            crate::types::units::format_cpus(asked.cpu_milli),
        );
        self.db.transaction(what, TransactionKind::Write, |db| {
            lock_analysis(db, id)?;
            let end = QueueExit {
                state: State::Error,
                reason: "does_not_fit",
                message: &message,
            };
            if !end_queued(db, id, attempt, &end)? {
                return Ok(false);
            }
            let event = EventRecord::new(EventKind::Parked, Some("does_not_fit"), Some(by));
            events::record_event(db, id, attempt, &event)?;
            erase_secrets(db, id)?;
            notify_commit(db, id, attempt, State::Error)?;
            Ok(true)
        })
    }
}
