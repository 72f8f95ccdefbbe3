//! The files of submissions, by hash. Several submissions may refer to the same file.

use crate::Store;
use crate::database::connection::Connection;
use crate::database::error::StoreError;
use crate::database::value::values;
use crate::types::manifest::ContentHash;
use crate::types::submission::INPUT_BYTES_MAX;

/// How often others may remove a file between the check and the insert before this process reports an error.
const REMOVALS_MAX: usize = 5;

impl Store {
    /// Reads a file of a submission. A file whose content does not match its hash is damaged, or another program
    /// wrote it.
    pub fn submitted_file(&mut self, hash: &ContentHash) -> Result<Option<Vec<u8>>, StoreError> {
        let what = "read a submitted file";
        // Fumehood never submits a longer file, so do not even fetch one.
        let sql = self.db.for_dialect(
            "SELECT content FROM blobs WHERE blake3 = $1 AND LENGTH(content) <= $2",
            "SELECT content FROM blobs WHERE blake3 = $1 AND OCTET_LENGTH(content) <= $2",
        );
        let name = hash.to_string();
        let of = values![&name, INPUT_BYTES_MAX];
        let Some(mut row) = self.db.query_one(what, sql, &of)? else {
            return Ok(None);
        };
        let content = row.bytes(what)?;
        match ContentHash::of(&content) == *hash {
            true => Ok(Some(content)),
            false => Err(StoreError::BadValue {
                what: "a submitted file",
            }),
        }
    }
}

/// The hashes of an analysis's files, sorted.
pub(crate) fn list_files_of(db: &mut Connection, id: &str) -> Result<Vec<String>, StoreError> {
    let what = "look for the submission's files";
    let sql = "SELECT blake3 FROM submission_blobs WHERE id = $1 ORDER BY blake3";
    db.fetch_all(what, sql, &values![id])
}

/// Stores a file if it is not stored yet. The file then exists until the end of the transaction.
pub(crate) fn store_file(
    db: &mut Connection,
    hash: &str,
    content: &[u8],
) -> Result<(), StoreError> {
    let what = "store a submitted file";
    let hold = db.for_dialect(
        "SELECT bytes FROM blobs WHERE blake3 = $1",
        "SELECT bytes FROM blobs WHERE blake3 = $1 FOR KEY SHARE",
    );
    for _ in 0..REMOVALS_MAX {
        if db.query_one(what, hold, &values![hash])?.is_some() {
            return Ok(());
        }
        let sql = "INSERT INTO blobs (blake3, bytes, content) VALUES ($1, $2, $3) ON CONFLICT (blake3) DO NOTHING";
        let values = values![hash, content.len() as u64, content];
        db.execute(what, sql, &values)?;
    }
    Err(StoreError::BadValue {
        what: "a submitted file",
    })
}

/// Locks a file. Transactions that added a reference to it have ended, and none can add one until the end of this
/// transaction.
pub(crate) fn lock_file(db: &mut Connection, hash: &str) -> Result<(), StoreError> {
    let sql = db.for_dialect(
        "SELECT bytes FROM blobs WHERE blake3 = $1",
        "SELECT bytes FROM blobs WHERE blake3 = $1 FOR UPDATE",
    );
    db.query("hold a submitted file", sql, &values![hash])
        .map(drop)
}

/// Removes a locked file unless a submission refers to it.
pub(crate) fn remove_unused_file(db: &mut Connection, hash: &str) -> Result<(), StoreError> {
    let sql = "DELETE FROM blobs WHERE blake3 = $1
               AND NOT EXISTS (SELECT 1 FROM submission_blobs s WHERE s.blake3 = $1)";
    db.execute("remove a submitted file", sql, &values![hash])
        .map(drop)
}
