//! The versions of the schema, the SQL that creates each of them, and the grants that roles need.

/// A version of the schema. Within a major version, each minor version only adds to the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SchemaVersion {
    /// Another major version cannot be used.
    pub major: u32,
    /// How many migrations created the schema.
    pub minor: u32,
}

impl SchemaVersion {
    /// The version that this Fumehood creates, and the oldest that it can use.
    pub const CURRENT: SchemaVersion = SchemaVersion {
        major: 1,
        minor: MIGRATIONS.len() as u32,
    };
}

impl std::fmt::Display for SchemaVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

pub(crate) struct Migration {
    pub sqlite: &'static str,
    pub postgres: &'static str,
}

/// The n-th migration creates minor version n. A released migration never changes; another one follows it.
pub(crate) const MIGRATIONS: &[Migration] = &[
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

/// The grants that the role `fumehood_runner` needs to run analyses. The tests execute this text unchanged.
pub const GRANTS: &str = include_str!("grants/runner.sql");
/// The further grants that it needs to remove analyses.
pub const GRANTS_TO_REMOVE: &str = include_str!("grants/remover.sql");
/// The grants that the role `fumehood_reader`, for other programs, needs.
pub const GRANTS_TO_READ: &str = include_str!("grants/reader.sql");
