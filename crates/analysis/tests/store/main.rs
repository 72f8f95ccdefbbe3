//! The record, tried on SQLite and on a real PostgreSQL: every test in `on_both!` runs on each.

#![allow(clippy::unwrap_used)]

#[macro_use]
mod lab;
mod commit;
mod documented;
mod hostile;
mod read;
mod roles;
mod schema;
mod server;
mod trouble;
