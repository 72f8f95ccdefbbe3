//! The size of the database, and its whole content as JSON lines.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::{self, Write};

use serde::{Serialize, Serializer};
use serde_json::{Map, Value as Json};

use crate::Store;
use crate::database::connection::{Connection, TransactionKind};
use crate::database::error::StoreError;
use crate::database::location::Location;
use crate::database::migrations::SchemaVersion;
use crate::database::open;
use crate::database::schema::{self, DatabaseContent};
use crate::database::value::{Cell, SqlValue, values};
use crate::types::random_hex::to_hex;

/// How large the database is and how it grows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoreStatus {
    /// The id of the database.
    #[serde(rename = "database_id")]
    pub id: String,
    /// The version of the schema.
    #[serde(rename = "database_schema", serialize_with = "serialize_as_text")]
    pub schema: SchemaVersion,
    /// The size on disk.
    #[serde(rename = "database_bytes")]
    pub bytes: u64,
    /// The number of rows of each table.
    #[serde(serialize_with = "serialize_as_map")]
    pub rows: Vec<(&'static str, u64)>,
    /// The number of attempts in each state that occurs.
    #[serde(serialize_with = "serialize_as_map")]
    pub states: Vec<(String, u64)>,
    /// When the oldest attempt was created, by the database's clock. `None` if there are none.
    pub oldest_ms: Option<i64>,
    /// When the newest attempt was created.
    pub newest_ms: Option<i64>,
    /// Sum of the lengths of all outputs, wherever they are stored.
    pub output_bytes: u64,
    /// The number of attempts created in the last seven days.
    pub last_7_days_attempts: u64,
    /// Sum of the lengths of their outputs.
    pub last_7_days_output_bytes: u64,
    /// Attempts whose post-process is pending or failed.
    pub post_process_due: u64,
}

fn serialize_as_text<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

/// Keys in alphabetical order.
fn serialize_as_map<K: Ord + Serialize, S: Serializer>(
    pairs: &[(K, u64)],
    to: S,
) -> Result<S::Ok, S::Error> {
    let map: BTreeMap<&K, u64> = pairs.iter().map(|(key, value)| (key, *value)).collect();
    map.serialize(to)
}

const WEEK_MS: i64 = 7 * 24 * 3_600_000;
/// How many rows are in memory at a time. Contents of outputs are read one by one.
const PAGE: u32 = 200;
/// Log excerpts may be a mebibyte each.
const LOGS_PAGE: u32 = 8;
/// Requests may be four mebibytes each.
const REQUESTS_PAGE: u32 = 4;

/// SQLite stores JSON as text and booleans as 0 or 1. The export converts them, so that it is the same for both
/// databases.
const JSON_COLUMNS: [&str; 6] = [
    "isolation",
    "limits",
    "hints",
    "notices",
    "provenance",
    "result",
];
const BOOL_COLUMNS: [&str; 4] = ["superseded", "complete", "truncated", "draining"];

/// How to count the rows of a table and how to page through them.
struct ExportTable {
    table: &'static str,
    count: &'static str,
    page: &'static str,
    page_rows: u32,
    /// The types of the leading columns that form the key. The next page starts after the last key.
    key: &'static [KeyType],
}

#[derive(Clone, Copy)]
enum KeyType {
    Text,
    Int,
    Bytes,
}

/// Builds the statements of a table from its columns and its key.
macro_rules! export_table {
    ($table:literal, $columns:literal, $key:literal, $rows:expr, [$a:ident]) => {
        export_table!(@ $table, $columns, $key, "$1", "$2", $rows, [$a])
    };
    ($table:literal, $columns:literal, $key:literal, $rows:expr, [$a:ident, $b:ident]) => {
        export_table!(@ $table, $columns, $key, "$1, $2", "$3", $rows, [$a, $b])
    };
    ($table:literal, $columns:literal, $key:literal, $rows:expr, [$a:ident, $b:ident, $c:ident]) => {
        export_table!(@ $table, $columns, $key, "$1, $2, $3", "$4", $rows, [$a, $b, $c])
    };
    (@ $table:literal, $columns:literal, $key:literal, $after:literal, $limit:literal, $rows:expr, [$($type:ident),+]) => {
        ExportTable {
            table: $table,
            count: concat!("SELECT COUNT(*) FROM ", $table),
            page: concat!(
                "SELECT ", $columns, " FROM ", $table, " WHERE (", $key, ") > (", $after, ") ORDER BY ", $key,
                " LIMIT ", $limit
            ),
            page_rows: $rows,
            key: &[$(KeyType::$type),+],
        }
    };
}

/// The column `content` of `outputs` is left out here and read row by row.
const TABLES: [ExportTable; 12] = [
    export_table!("analyses", "*", "id", PAGE, [Text]),
    export_table!("attempts", "*", "id, attempt", PAGE, [Text, Int]),
    export_table!(
        "outputs",
        "id, attempt, path, path_text, bytes, media_type, blake3, modified_ms, artifact_store, host",
        "id, attempt, path",
        PAGE,
        [Text, Int, Bytes]
    ),
    export_table!(
        "logs",
        "id, attempt, stream, total_bytes, dropped_bytes, truncated, head, tail, blake3, artifact_store, object_bytes, object_head_bytes",
        "id, attempt, stream",
        LOGS_PAGE,
        [Text, Int, Text]
    ),
    export_table!(
        "remarks",
        "*",
        "id, attempt, position",
        PAGE,
        [Text, Int, Int]
    ),
    export_table!(
        "remark_counts",
        "id, attempt, remark, count",
        "id, attempt, remark",
        PAGE,
        [Text, Int, Text]
    ),
    export_table!("submissions", "*", "id", REQUESTS_PAGE, [Text]),
    export_table!("blobs", "blake3, bytes, content", "blake3", 1, [Text]),
    export_table!(
        "submission_blobs",
        "id, blake3",
        "id, blake3",
        PAGE,
        [Text, Text]
    ),
    export_table!("queue", "*", "id, attempt", PAGE, [Text, Int]),
    export_table!(
        "workers",
        "*",
        "host, account, name",
        PAGE,
        [Text, Text, Text]
    ),
    export_table!("events", "*", "seq", PAGE, [Int]),
];

impl Store {
    /// Measures the database.
    pub fn status(&mut self) -> Result<StoreStatus, StoreError> {
        let what = "look at the record";
        let bytes = self.size_bytes()?;
        self.db.transaction(what, TransactionKind::Snapshot, |db| {
            let location = db.location().to_string();
            let DatabaseContent::Fumehood { schema, id } = schema::inspect(db)? else {
                return Err(StoreError::ForeignDatabase { location });
            };
            let mut rows = Vec::new();
            for table in &TABLES {
                rows.push((table.table, db.query_single(what, table.count, &[])?.count(what)?));
            }
            let sql = "SELECT state, COUNT(*) FROM attempts GROUP BY state ORDER BY state";
            let states = db.query(what, sql, &[])?.into_iter();
            let states = states.map(|mut row| Ok((row.text(what)?, row.count(what)?)));
            let states = states.collect::<Result<_, StoreError>>()?;
            let sql = "SELECT MIN(created_ms), MAX(created_ms), CAST(COALESCE(SUM(output_bytes), 0) AS BIGINT) FROM attempts";
            let mut all = db.query_single(what, sql, &[])?;
            let since = db.now_ms()? - WEEK_MS;
            let sql = "SELECT COUNT(*), CAST(COALESCE(SUM(output_bytes), 0) AS BIGINT) FROM attempts WHERE created_ms >= $1";
            let mut recent = db.query_single(what, sql, &values![since])?;
            let sql = "SELECT COUNT(*) FROM attempts WHERE post_process IN ('pending', 'failed')";
            Ok(StoreStatus {
                schema,
                id,
                rows,
                bytes,
                states,
                oldest_ms: all.maybe_int(what)?,
                newest_ms: all.maybe_int(what)?,
                output_bytes: all.count(what)?,
                last_7_days_attempts: recent.count(what)?,
                last_7_days_output_bytes: recent.count(what)?,
                post_process_due: db.query_single(what, sql, &[])?.count(what)?,
            })
        })
    }

    fn size_bytes(&mut self) -> Result<u64, StoreError> {
        if let Location::Sqlite(path) = self.db.location() {
            return Ok(open::sqlite_size_bytes(path));
        }
        let sql = "SELECT CAST(COALESCE(SUM(pg_total_relation_size(c.oid)), 0) AS BIGINT)
                   FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                   WHERE n.nspname = 'fumehood' AND c.relkind = 'r'";
        self.db
            .query_single("look at the record", sql, &[])?
            .count("the size of the tables")
    }

    /// Writes the whole database, as of one moment: a line `{"table": …, "row": {…}}` for each row, with tables in an
    /// order in which they can be imported. Bytes become `{"hex": …}`. The export contains the keys of attempts and
    /// whole requests, so keep it as private as the database.
    pub fn export(&mut self, to: &mut dyn Write) -> Result<(), StoreError> {
        let what = "export the record";
        let (id, schema) = (self.id.clone(), self.schema()?);
        let allow_time = self
            .db
            .for_dialect("SELECT 1", "SET LOCAL statement_timeout = '1h'");
        self.db.transaction(what, TransactionKind::Snapshot, |db| {
            db.execute_script(what, allow_time)?;
            let first = serde_json::json!({
                "export_version": 1, "database": id, "schema": schema.to_string()
            });
            write_line(to, &first)?;
            for table in &TABLES {
                export_table(db, table, to)?;
            }
            Ok(())
        })
    }

    /// The version of the schema that the database has.
    pub fn schema(&mut self) -> Result<SchemaVersion, StoreError> {
        match schema::inspect(&mut self.db)? {
            DatabaseContent::Fumehood { schema, .. } => Ok(schema),
            _ => Err(StoreError::ForeignDatabase {
                location: self.db.location().to_string(),
            }),
        }
    }
}

fn write_line(to: &mut dyn Write, value: &Json) -> Result<(), StoreError> {
    let written = serde_json::to_writer(&mut *to, value).map_err(io::Error::from);
    written
        .and_then(|()| to.write_all(b"\n"))
        .map_err(StoreError::Callback)
}

fn export_table(
    db: &mut Connection,
    table: &ExportTable,
    to: &mut dyn Write,
) -> Result<(), StoreError> {
    let what = "export the record";
    // Start before every key: no id is empty, no attempt is 0, and no position is below 0.
    let mut after: Vec<Cell> = table.key.iter().map(KeyType::lowest).collect();
    loop {
        let mut values: Vec<SqlValue> = after.iter().map(cell_value).collect::<Result<_, _>>()?;
        values.push(SqlValue::int(table.page_rows));
        let page = db.table(what, table.page, &values)?;
        drop(values);
        let is_last = page.rows.len() < table.page_rows as usize;
        for row in page.rows {
            let cells: Vec<Cell> = row.cells().collect();
            let mut object = Map::new();
            for (name, cell) in page.columns.iter().zip(&cells) {
                object.insert(name.clone(), named_json(name, cell)?);
            }
            after = cells.into_iter().take(table.key.len()).collect();
            if table.table == "outputs" {
                object.insert("content".to_owned(), content(db, &after)?);
            }
            write_line(
                to,
                &serde_json::json!({"table": table.table, "row": object}),
            )?;
        }
        if is_last {
            return Ok(());
        }
    }
}

fn content(db: &mut Connection, key: &[Cell]) -> Result<Json, StoreError> {
    let sql = "SELECT content FROM outputs WHERE id = $1 AND attempt = $2 AND path = $3";
    let key: Vec<SqlValue> = key.iter().map(cell_value).collect::<Result<_, _>>()?;
    let mut cells = db.query_single("look at the record", sql, &key)?.cells();
    cells.next().map_or(Ok(Json::Null), |cell| cell_json(&cell))
}

impl KeyType {
    fn lowest(&self) -> Cell {
        match self {
            KeyType::Text => Cell::Text(String::new()),
            KeyType::Int => Cell::Int(-1),
            KeyType::Bytes => Cell::Bytes(Vec::new()),
        }
    }
}

fn cell_value(cell: &Cell) -> Result<SqlValue<'_>, StoreError> {
    match cell {
        Cell::Int(value) => Ok(SqlValue::int(*value)),
        Cell::Text(text) => Ok(SqlValue::text(text)),
        Cell::Bytes(bytes) => Ok(SqlValue::bytes(bytes)),
        _ => Err(StoreError::BadValue { what: "a key" }),
    }
}

fn named_json(name: &str, cell: &Cell) -> Result<Json, StoreError> {
    match cell {
        Cell::Text(text) if JSON_COLUMNS.contains(&name) => cell_json(&Cell::Json(text.clone())),
        Cell::Int(value) if BOOL_COLUMNS.contains(&name) => Ok(Json::from(*value != 0)),
        cell => cell_json(cell),
    }
}

fn cell_json(cell: &Cell) -> Result<Json, StoreError> {
    Ok(match cell {
        Cell::Null => Json::Null,
        Cell::Int(value) => Json::from(*value),
        Cell::Bool(value) => Json::from(*value),
        Cell::Text(text) => Json::from(text.as_str()),
        Cell::Bytes(bytes) => serde_json::json!({"hex": to_hex(bytes)}),
        Cell::Json(text) => {
            serde_json::from_str(text).map_err(|_| StoreError::BadValue { what: "JSON" })?
        }
    })
}
