//! The connection to SQLite or PostgreSQL behind one blocking face, and the schema.

pub(crate) mod connection;
pub(crate) mod error;
mod json;
mod libpq;
pub(crate) mod location;
pub(crate) mod open;
pub(crate) mod rows;
pub(crate) mod schema;
pub(crate) mod sqlite;
