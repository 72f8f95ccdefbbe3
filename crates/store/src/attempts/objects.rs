//! Which objects of artifact stores the database refers to, and whether the database itself is intact.

use std::io;

use crate::Store;
use crate::database::connection::Dialect;
use crate::database::error::StoreError;
use crate::database::value::{Row, from_row, parse_hash, values};
use crate::types::manifest::ContentHash;

/// How many objects of an artifact store the database refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArtifactStoreUse {
    /// The id of the artifact store.
    pub artifact_store: String,
    /// The machine whose runner stored the objects.
    pub host: String,
    /// The number of different objects.
    pub objects: u64,
}

/// The number of rows of a page.
const PAGE: u32 = 1_000;
/// How many faults are returned.
const FAULTS_MAX: usize = 100;

impl Store {
    /// The database's clock, which dates everything in the database.
    pub fn now_ms(&mut self) -> Result<i64, StoreError> {
        self.db.now_ms()
    }

    /// Calls `each` for every object of an artifact store that the database refers to, with its length. Objects come
    /// in order, each once.
    pub fn for_each_object(
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
        self.for_each_page_row(what, sql, artifact_store, &mut |hash, row| {
            each(hash, row.count(what)?).map_err(StoreError::Callback)
        })
    }

    /// Calls `each` for every row of a query that returns hashes in order, page by page, so that memory does not grow
    /// with the database. `$2` is the last hash of the page before, and `$3` the number of rows of a page.
    pub(crate) fn for_each_page_row(
        &mut self,
        what: &'static str,
        sql: &'static str,
        artifact_store: &str,
        each: &mut dyn FnMut(&ContentHash, &mut Row) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let mut after = String::new();
        loop {
            let values = values![artifact_store, &after, PAGE];
            let rows = self.db.query(what, sql, &values)?;
            let is_last = rows.len() < PAGE as usize;
            for mut row in rows {
                after = row.text(what)?;
                each(&parse_hash(&after)?, &mut row)?;
            }
            if is_last {
                return Ok(());
            }
        }
    }

    /// The first attempts that refer to an object.
    pub fn attempts_using(
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
        let values = values![artifact_store, &object, limit];
        let rows = self.db.query(what, sql, &values)?;
        rows.into_iter()
            .map(|mut row| Ok((row.text(what)?, row.attempt()?)))
            .collect()
    }

    /// The artifact stores that the database refers to.
    pub fn artifact_stores(&mut self) -> Result<Vec<ArtifactStoreUse>, StoreError> {
        let what = "look for artifact stores";
        let sql = "
            SELECT artifact_store, host, COUNT(*) FROM (
                SELECT artifact_store, host, blake3 FROM outputs
                UNION
                SELECT l.artifact_store, a.host, l.blake3
                FROM logs l JOIN attempts a ON a.id = l.id AND a.attempt = l.attempt
                WHERE l.blake3 IS NOT NULL AND l.artifact_store IS NOT NULL
            ) AS objects GROUP BY artifact_store, host ORDER BY artifact_store, host";
        self.db.fetch_all(what, sql, &[])
    }

    /// Runs SQLite's integrity checks and returns what they report; empty if all is well. `None` for PostgreSQL,
    /// which has tools of its own (`pg_amcheck`, data checksums).
    pub fn integrity_faults(&mut self) -> Result<Option<Vec<String>>, StoreError> {
        let what = "check the database";
        if self.db.dialect() != Dialect::Sqlite {
            return Ok(None);
        }
        let mut faults = Vec::new();
        for sql in ["PRAGMA integrity_check", "PRAGMA foreign_key_check"] {
            for row in self.db.query(what, sql, &[])? {
                let words: Vec<String> = row.cells().map(|cell| cell.into_text()).collect();
                faults.push(words.join(" "));
            }
        }
        faults.retain(|fault| fault != "ok");
        faults.truncate(FAULTS_MAX);
        Ok(Some(faults))
    }
}

from_row!(ArtifactStoreUse: artifact_store, host, objects);
