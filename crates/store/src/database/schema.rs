//! Versions of the schema and the way from one to the next.
//!
//! Within a major version migrations only add, so a runner of an older binary still commits after an upgrade: a binary
//! takes a database of its own major version whose minor version is at least its own.

use crate::database::connection::{Connection, Dialect, Purpose, Value};
use crate::database::error::StoreError;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Schema {
    pub major: u32,
    pub minor: u32,
}

impl Schema {
    pub const CURRENT: Schema = Schema {
        major: 1,
        minor: MIGRATIONS.len() as u32,
    };
}

impl std::fmt::Display for Schema {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What a migration did; the same on both sides if there was nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migrated {
    pub from: Option<Schema>,
    pub to: Schema,
}

struct Migration {
    sqlite: &'static str,
    postgres: &'static str,
}

/// The n-th makes minor version n. Never changed once released, only followed by another.
const MIGRATIONS: &[Migration] = &[
    Migration {
        sqlite: include_str!("migrations/sqlite/0001_init.sql"),
        postgres: include_str!("migrations/postgres/0001_init.sql"),
    },
    Migration {
        sqlite: include_str!("migrations/sqlite/0002_post_process.sql"),
        postgres: include_str!("migrations/postgres/0002_post_process.sql"),
    },
    Migration {
        sqlite: include_str!("migrations/sqlite/0003_queue.sql"),
        postgres: include_str!("migrations/postgres/0003_queue.sql"),
    },
];

/// What the role `fumehood_runner` needs to run analyses; executed by the tests exactly as it stands.
pub const GRANTS: &str = include_str!("grants/runner.sql");
/// What it needs beyond that to remove analyses.
pub const GRANTS_TO_REMOVE: &str = include_str!("grants/remover.sql");
/// What the role `fumehood_reader` of other programs needs.
pub const GRANTS_TO_READ: &str = include_str!("grants/reader.sql");

/// What was found in a database.
pub(crate) enum Found {
    Nothing,
    Ours {
        schema: Schema,
        id: String,
    },
    /// Tables, but not ours.
    Foreign,
}

pub(crate) fn find(db: &mut Connection) -> Result<Found, StoreError> {
    let what = "read the schema's version";
    // Anybody may ask this. A role without the right to the schema then asks it by name, and is told what it lacks; by
    // the search path alone the table would not even be there for it.
    let there = db.either(
        "SELECT COALESCE(SUM(name = 'meta'), 0), COUNT(*) FROM sqlite_schema WHERE type = 'table'",
        "SELECT COALESCE(SUM(CASE WHEN c.relname = 'meta' THEN 1 ELSE 0 END), 0), COUNT(*)
         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname = 'fumehood' AND c.relkind = 'r'",
    );
    let none = StoreError::BadValue { what };
    let mut row = db.query_one(what, there, &[])?.ok_or(none)?;
    match (row.int(what)?, row.int(what)?) {
        (_, 0) => return Ok(Found::Nothing),
        (0, _) => return Ok(Found::Foreign),
        _ => (),
    }
    Ok(read(db)?.map_or(Found::Foreign, |(schema, id)| Found::Ours { schema, id }))
}

/// What the table says that every database of ours has.
fn read(db: &mut Connection) -> Result<Option<(Schema, String)>, StoreError> {
    let what = "read the schema's version";
    let sql = db.either(
        "SELECT schema_major, schema_minor, database_id FROM main.meta WHERE one = 1",
        "SELECT schema_major, schema_minor, database_id FROM fumehood.meta WHERE one = 1",
    );
    let Some(mut row) = db.query_one(what, sql, &[])? else {
        return Ok(None);
    };
    let mut number = || -> Result<u32, StoreError> {
        u32::try_from(row.int(what)?).map_err(|_| StoreError::BadValue { what })
    };
    let schema = Schema {
        major: number()?,
        minor: number()?,
    };
    Ok(Some((schema, row.text(what)?)))
}

/// The database's own name, if this binary can use it.
pub(crate) fn check(db: &mut Connection) -> Result<String, StoreError> {
    // As a rule it is there. If not, or if we may not read it, it is asked for in a way that tells why.
    if let Ok(Some((schema, id))) = read(db)
        && schema.major == Schema::CURRENT.major
        && schema >= Schema::CURRENT
    {
        return Ok(id);
    }
    let location = db.location().to_string();
    match find(db)? {
        Found::Foreign => Err(StoreError::NotOurs { location }),
        Found::Nothing => Err(StoreError::NeedsMigration {
            location,
            found: None,
        }),
        Found::Ours { schema, .. } if schema.major > Schema::CURRENT.major => {
            Err(StoreError::NewerSchema {
                location,
                found: schema,
            })
        }
        Found::Ours { schema, .. } if schema < Schema::CURRENT => Err(StoreError::NeedsMigration {
            location,
            found: Some(schema),
        }),
        Found::Ours { id, .. } => Ok(id),
    }
}

/// Brings the database to `to`, in one transaction. `to` is the current version, except in the tests of older writers.
pub(crate) fn migrate(db: &mut Connection, to: Schema) -> Result<Migrated, StoreError> {
    let what = "migrate the database";
    db.transaction(what, Purpose::Write, |db| {
        if db.dialect() == Dialect::Postgres {
            ready_schema(db)?;
        }
        let location = db.location().to_string();
        let (from, id) = match find(db)? {
            Found::Foreign => return Err(StoreError::NotOurs { location }),
            Found::Nothing => (None, None),
            Found::Ours { schema, id } => (Some(schema), Some(id)),
        };
        if let Some(found) = from.filter(|found| found.major != to.major) {
            return Err(StoreError::NewerSchema { location, found });
        }
        let from_minor = from.map_or(0, |schema| schema.minor);
        if from_minor >= to.minor {
            let to = from.unwrap_or(to);
            return Ok(Migrated { from, to });
        }
        for migration in &MIGRATIONS[from_minor as usize..to.minor as usize] {
            db.script(what, db.either(migration.sqlite, migration.postgres))?;
        }
        note_version(db, to, id.is_none())?;
        Ok(Migrated { from, to })
    })
}

/// One migration at a time, in a schema that is ours, where only our tables are found.
fn ready_schema(db: &mut Connection) -> Result<(), StoreError> {
    let what = "prepare the schema `fumehood`";
    // Any number that no other program is likely to use.
    db.query(
        what,
        "SELECT 1::bigint FROM pg_advisory_xact_lock(7310025461889)",
        &[],
    )?;
    // IF NOT EXISTS would still ask for the right to create schemas, which an owner of this one need not have.
    let there = "SELECT pg_has_role(n.nspowner, 'USAGE'), CAST(pg_get_userbyid(n.nspowner) AS text)
                 FROM pg_namespace n WHERE n.nspname = 'fumehood'";
    match db.query_one(what, there, &[])? {
        None => db.script(what, "CREATE SCHEMA fumehood")?,
        Some(mut row) => {
            if !row.bool(what)? {
                let owner = row.text(what)?;
                let location = db.location().to_string();
                return Err(StoreError::SchemaOwner { location, owner });
            }
        }
    }
    db.script(
        what,
        "SET LOCAL search_path = fumehood, pg_temp; SET LOCAL statement_timeout = '1h'",
    )
}

fn note_version(db: &mut Connection, to: Schema, is_new: bool) -> Result<(), StoreError> {
    let what = "note the schema's version";
    let versions = [Value::int(to.major), Value::int(to.minor)];
    if !is_new {
        let sql = "UPDATE meta SET schema_major = $1, schema_minor = $2 WHERE one = 1";
        return db.execute(what, sql, &versions).map(drop);
    }
    let now = db.now_ms()?;
    let id = random_hex().map_err(StoreError::Runtime)?;
    let sql = "INSERT INTO meta (one, schema_major, schema_minor, database_id, created_ms) VALUES (1, $1, $2, $3, $4)";
    let [major, minor] = versions;
    db.execute(
        what,
        sql,
        &[major, minor, Value::text(&id), Value::int(now)],
    )
    .map(drop)
}

/// 128 bits from the kernel.
pub(crate) fn random_hex() -> std::io::Result<String> {
    let mut noise = [0u8; 16];
    let got = rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty())?;
    match got == noise.len() {
        true => Ok(noise.iter().map(|b| format!("{b:02x}")).collect()),
        false => Err(std::io::Error::other(
            "the kernel gave too few random bytes",
        )),
    }
}
