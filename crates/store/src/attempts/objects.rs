//! Objects of artifact stores as the record knows them, and whether the record itself is sound.

use std::io;

use crate::Store;
use crate::database::connection::{Dialect, Value};
use crate::database::error::StoreError;
use crate::types::manifest::ContentHash;

/// How many objects are in which artifact store, as far as the record knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InStore {
    pub artifact_store: String,
    /// The machine whose runner put them there.
    pub host: String,
    pub objects: u64,
}

/// Rows per question, so that memory does not grow with the record.
const PAGE: u32 = 1_000;
/// What SQLite lists before it stops looking.
const FAULTS_MAX: usize = 100;

impl Store {
    /// The time by the database's own clock, by which everything in it is dated.
    pub fn now_ms(&mut self) -> Result<i64, StoreError> {
        self.db.now_ms()
    }

    /// Every object that the record refers to in one artifact store, with its length, in order, each once.
    pub fn objects(
        &mut self,
        artifact_store: &str,
        each: &mut dyn FnMut(&ContentHash, u64) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let what = "look for objects that are referred to";
        let sql = "
            SELECT blake3, CAST(MAX(bytes) AS BIGINT) FROM (
                SELECT blake3, bytes FROM outputs WHERE artifact_store = $1 AND blake3 > $2
                UNION
                SELECT blake3, object_bytes AS bytes FROM logs
                WHERE artifact_store = $1 AND blake3 IS NOT NULL AND blake3 > $2
            ) AS objects GROUP BY blake3 ORDER BY blake3 LIMIT $3";
        let mut after = String::new();
        loop {
            let values = [
                Value::text(artifact_store),
                Value::text(&after),
                Value::int(PAGE),
            ];
            let rows = self.db.query(what, sql, &values)?;
            let is_last = rows.len() < PAGE as usize;
            for mut row in rows {
                after = row.text(what)?;
                let hash = ContentHash::parse(&after)
                    .map_err(|_| StoreError::BadValue { what: "a hash" })?;
                each(&hash, row.count(what)?).map_err(StoreError::Callback)?;
            }
            if is_last {
                return Ok(());
            }
        }
    }

    /// The first attempts that refer to an object.
    pub fn users_of(
        &mut self,
        artifact_store: &str,
        object: &ContentHash,
        limit: u32,
    ) -> Result<Vec<(String, u32)>, StoreError> {
        let what = "look for who refers to an object";
        let sql = "
            SELECT id, attempt FROM (
                SELECT id, attempt FROM outputs WHERE artifact_store = $1 AND blake3 = $2
                UNION
                SELECT id, attempt FROM logs WHERE artifact_store = $1 AND blake3 = $2
            ) AS users ORDER BY id, attempt LIMIT $3";
        let object = object.to_string();
        let values = [
            Value::text(artifact_store),
            Value::text(&object),
            Value::int(limit),
        ];
        let rows = self.db.query(what, sql, &values)?;
        rows.into_iter()
            .map(|mut row| Ok((row.text(what)?, row.attempt()?)))
            .collect()
    }

    /// The artifact stores that the record refers to.
    pub fn artifact_stores(&mut self) -> Result<Vec<InStore>, StoreError> {
        let what = "look for artifact stores";
        let sql = "
            SELECT artifact_store, host, COUNT(*) FROM (
                SELECT artifact_store, host, blake3 FROM outputs
                UNION
                SELECT l.artifact_store, a.host, l.blake3
                FROM logs l JOIN attempts a ON a.id = l.id AND a.attempt = l.attempt
                WHERE l.blake3 IS NOT NULL AND l.artifact_store IS NOT NULL
            ) AS objects GROUP BY artifact_store, host ORDER BY artifact_store, host";
        let rows = self.db.query(what, sql, &[])?;
        let stores = rows.into_iter().map(|mut row| {
            Ok(InStore {
                artifact_store: row.text(what)?,
                host: row.text(what)?,
                objects: row.count(what)?,
            })
        });
        stores.collect()
    }

    /// What SQLite finds wrong with its file: nothing, if all is well. `None`: PostgreSQL keeps its own house
    /// (`pg_amcheck`, data checksums).
    pub fn faults(&mut self) -> Result<Option<Vec<String>>, StoreError> {
        let what = "check the database";
        if self.db.dialect() != Dialect::Sqlite {
            return Ok(None);
        }
        let mut faults = Vec::new();
        for sql in ["PRAGMA integrity_check", "PRAGMA foreign_key_check"] {
            for row in self.db.query(what, sql, &[])? {
                let words: Vec<String> = row.cells().map(|cell| cell.shown()).collect();
                faults.push(words.join(" "));
            }
        }
        faults.retain(|fault| fault != "ok");
        faults.truncate(FAULTS_MAX);
        Ok(Some(faults))
    }
}
