//! The record as other programs see it: every table, read with Python's sqlite3 or with psql and not with the store's code.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use testkit::postgres::PrivatePostgres;

use serde_json::{Map, Value};

const TABLES: [&str; 13] = [
    "meta",
    "analyses",
    "attempts",
    "outputs",
    "logs",
    "remarks",
    "remark_counts",
    "submissions",
    "blobs",
    "submission_blobs",
    "queue",
    "workers",
    "events",
];

/// All rows of all tables, sorted. Bytes are written as PostgreSQL writes them: `\x` and hexadecimal.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows(BTreeMap<String, Vec<Row>>);

pub type Row = Map<String, Value>;

const BY_PYTHON: &str = r#"
import json, sqlite3, sys
cell = lambda v: "\\x" + v.hex() if isinstance(v, bytes) else v
db = sqlite3.connect(sys.argv[1], timeout=60)
tables = {}
for table in sys.argv[2:]:
    rows = db.execute("SELECT * FROM " + table)
    names = [column[0] for column in rows.description]
    tables[table] = [dict(zip(names, map(cell, row))) for row in rows]
assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
print(json.dumps(tables))
"#;

impl Rows {
    pub fn of_sqlite(file: &Path) -> Rows {
        let mut python = Command::new("/usr/bin/python3");
        python.args(["-c", BY_PYTHON]).arg(file).args(TABLES);
        let ran = python.output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{said}");
        Rows::sorted(serde_json::from_slice(&ran.stdout).unwrap())
    }

    pub fn of_postgres(server: &PrivatePostgres, database: &str) -> Rows {
        let each = TABLES.map(|table| {
            format!("'{table}', (SELECT COALESCE(json_agg(t), '[]'::json) FROM fumehood.{table} t)")
        });
        let sql = format!("SELECT json_build_object({})", each.join(", "));
        let text = server.psql(database, &sql);
        Rows::sorted(serde_json::from_str(&text).unwrap())
    }

    fn sorted(mut tables: BTreeMap<String, Vec<Row>>) -> Rows {
        for rows in tables.values_mut() {
            rows.sort_by_cached_key(|row| Value::from(row.clone()).to_string());
        }
        Rows(tables)
    }

    /// The rows of one analysis.
    pub fn of(&self, table: &str, id: &str) -> Vec<&Row> {
        let rows = &self.0[table];
        rows.iter()
            .filter(|row| text(row, "id") == Some(id))
            .collect()
    }

    pub fn all(&self, table: &str) -> &[Row] {
        &self.0[table]
    }

    /// Removes the rows of runs that only recovered others.
    pub fn without(mut self, stem: &str) -> Rows {
        for rows in self.0.values_mut() {
            rows.retain(|row| !text(row, "id").is_some_and(|id| id.starts_with(stem)));
        }
        self
    }
}

pub fn text<'a>(row: &'a Row, column: &str) -> Option<&'a str> {
    row.get(column)?.as_str()
}

pub fn number(row: &Row, column: &str) -> Option<i64> {
    row[column].as_i64()
}

/// A boolean column; SQLite stores 0 or 1.
pub fn truth(row: &Row, column: &str) -> Option<bool> {
    row[column]
        .as_bool()
        .or(number(row, column).map(|n| n != 0))
}

pub fn bytes(row: &Row, column: &str) -> Option<Vec<u8>> {
    let hex = text(row, column)?.strip_prefix("\\x").unwrap();
    let digits = hex.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    Some(digits.map(byte).collect())
}
