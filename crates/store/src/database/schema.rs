//! Checks the version of the schema and migrates it.
//!
//! Within a major version, migrations only add, so a runner with an older binary can still commit after an upgrade. A
//! binary accepts a database of its own major version whose minor version is not lower than its own.

use crate::database::connection::{Connection, Dialect, TransactionKind};
use crate::database::error::StoreError;
use crate::database::migrations::{MIGRATIONS, SchemaVersion};
use crate::database::value::values;
use crate::types::random_hex::random_hex;

/// The versions before and after a migration. They are equal if there was nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigrationResult {
    /// The version before. `None` if the database was empty.
    pub from: Option<SchemaVersion>,
    /// The version after.
    pub to: SchemaVersion,
}

/// What a database contains.
pub(crate) enum DatabaseContent {
    Empty,
    Fumehood {
        schema: SchemaVersion,
        id: String,
    },
    /// Tables of another program.
    Foreign,
}

pub(crate) fn inspect(db: &mut Connection) -> Result<DatabaseContent, StoreError> {
    let what = "read the schema's version";
    // Every role may ask this. A role without rights on the schema fails later, when it reads the table by its full
    // name, with a message about the missing right. Through the search path it would only see that there is no such
    // table.
    let there = db.for_dialect(
        "SELECT COALESCE(SUM(name = 'meta'), 0), COUNT(*) FROM sqlite_schema WHERE type = 'table'",
        "SELECT COALESCE(SUM(CASE WHEN c.relname = 'meta' THEN 1 ELSE 0 END), 0), COUNT(*)
         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname = 'fumehood' AND c.relkind = 'r'",
    );
    let mut row = db.query_single(what, there, &[])?;
    match (row.int(what)?, row.int(what)?) {
        (_, 0) => return Ok(DatabaseContent::Empty),
        (0, _) => return Ok(DatabaseContent::Foreign),
        _ => (),
    }
    Ok(read(db)?.map_or(DatabaseContent::Foreign, |(schema, id)| {
        DatabaseContent::Fumehood { schema, id }
    }))
}

/// Reads the version and the id from the table `meta`, which every database of Fumehood has.
fn read(db: &mut Connection) -> Result<Option<(SchemaVersion, String)>, StoreError> {
    let what = "read the schema's version";
    let sql = db.for_dialect(
        "SELECT schema_major, schema_minor, database_id FROM main.meta WHERE one = 1",
        "SELECT schema_major, schema_minor, database_id FROM fumehood.meta WHERE one = 1",
    );
    let Some(mut row) = db.query_one(what, sql, &[])? else {
        return Ok(None);
    };
    let (major, minor) = (row.small(what)?, row.small(what)?);
    let schema = SchemaVersion { major, minor };
    Ok(Some((schema, row.text(what)?)))
}

/// The id of the database, if this binary can use the schema.
pub(crate) fn check(db: &mut Connection) -> Result<String, StoreError> {
    // Usually the version is readable. If not, `inspect` finds out why.
    if let Ok(Some((schema, id))) = read(db)
        && schema.major == SchemaVersion::CURRENT.major
        && schema >= SchemaVersion::CURRENT
    {
        return Ok(id);
    }
    let location = db.location().to_string();
    match inspect(db)? {
        DatabaseContent::Foreign => Err(StoreError::ForeignDatabase { location }),
        DatabaseContent::Empty => Err(StoreError::NeedsMigration {
            location,
            found: None,
        }),
        DatabaseContent::Fumehood { schema, .. } if schema.major > SchemaVersion::CURRENT.major => {
            Err(StoreError::NewerSchema {
                location,
                found: schema,
            })
        }
        DatabaseContent::Fumehood { schema, .. } if schema < SchemaVersion::CURRENT => {
            Err(StoreError::NeedsMigration {
                location,
                found: Some(schema),
            })
        }
        DatabaseContent::Fumehood { id, .. } => Ok(id),
    }
}

/// Migrates the database to the version `to`, in one transaction. Only tests of older writers pass another version
/// than the current one.
pub(crate) fn migrate(
    db: &mut Connection,
    to: SchemaVersion,
) -> Result<MigrationResult, StoreError> {
    let what = "migrate the database";
    db.transaction(what, TransactionKind::Write, |db| {
        if db.dialect() == Dialect::Postgres {
            prepare_schema(db)?;
        }
        let location = db.location().to_string();
        let (from, id) = match inspect(db)? {
            DatabaseContent::Foreign => return Err(StoreError::ForeignDatabase { location }),
            DatabaseContent::Empty => (None, None),
            DatabaseContent::Fumehood { schema, id } => (Some(schema), Some(id)),
        };
        if let Some(found) = from.filter(|found| found.major != to.major) {
            return Err(StoreError::NewerSchema { location, found });
        }
        let from_minor = from.map_or(0, |schema| schema.minor);
        if from_minor >= to.minor {
            let to = from.unwrap_or(to);
            return Ok(MigrationResult { from, to });
        }
        for migration in &MIGRATIONS[from_minor as usize..to.minor as usize] {
            db.execute_script(what, db.for_dialect(migration.sqlite, migration.postgres))?;
        }
        note_version(db, to, id.is_none())?;
        Ok(MigrationResult { from, to })
    })
}

/// Takes the migration lock, creates the schema or checks its owner, and limits the search path to it.
fn prepare_schema(db: &mut Connection) -> Result<(), StoreError> {
    let what = "prepare the schema `fumehood`";
    // An arbitrary number that no other program is likely to use.
    db.query(
        what,
        "SELECT 1::bigint FROM pg_advisory_xact_lock(7310025461889)",
        &[],
    )?;
    // CREATE SCHEMA IF NOT EXISTS would require the right to create schemas even if the schema exists. Its owner may
    // not have that right.
    let there = "SELECT pg_has_role(n.nspowner, 'USAGE'), CAST(pg_get_userbyid(n.nspowner) AS text)
                 FROM pg_namespace n WHERE n.nspname = 'fumehood'";
    match db.query_one(what, there, &[])? {
        None => db.execute_script(what, "CREATE SCHEMA fumehood")?,
        Some(mut row) => {
            if !row.bool(what)? {
                let owner = row.text(what)?;
                let location = db.location().to_string();
                return Err(StoreError::SchemaOwner { location, owner });
            }
        }
    }
    db.execute_script(
        what,
        "SET LOCAL search_path = fumehood, pg_temp; SET LOCAL statement_timeout = '1h'",
    )
}

fn note_version(db: &mut Connection, to: SchemaVersion, is_new: bool) -> Result<(), StoreError> {
    let what = "note the schema's version";
    let versions = values![to.major, to.minor];
    if !is_new {
        let sql = "UPDATE meta SET schema_major = $1, schema_minor = $2 WHERE one = 1";
        return db.execute(what, sql, &versions).map(drop);
    }
    let now = db.now_ms()?;
    let id = random_hex().map_err(StoreError::Runtime)?;
    let sql = "INSERT INTO meta (one, schema_major, schema_minor, database_id, created_ms) VALUES (1, $1, $2, $3, $4)";
    let [major, minor] = versions;
    db.execute(what, sql, &values![major, minor, &id, now])
        .map(drop)
}
