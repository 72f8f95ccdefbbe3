//! Access to SQLite or PostgreSQL behind one blocking interface.
//!
//! In reading order:
//!
//! - `location`, `libpq`, `libpq_settings`, `location_error`: the address of a database
//! - `fault`, `error`: what can go wrong
//! - `value`, `json`: values for statements, and rows
//! - `sqlite`, `postgres`: the two drivers
//! - `open`: checks before a connection is used
//! - `connection`: statements and transactions, the interface that the rest of the crate uses
//! - `rows`: bulk inserts
//! - `migrations`, `schema`: the schema and its versions

pub(crate) mod connection;
pub(crate) mod error;
pub(crate) mod fault;
mod json;
mod libpq;
pub(crate) mod libpq_settings;
pub(crate) mod location;
pub(crate) mod location_error;
pub(crate) mod migrations;
pub(crate) mod open;
pub(crate) mod postgres;
pub(crate) mod rows;
pub(crate) mod schema;
pub(crate) mod sqlite;
pub(crate) mod value;
