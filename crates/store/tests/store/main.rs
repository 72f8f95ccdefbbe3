//! The record, tried on SQLite and on a real PostgreSQL: every test in `on_both!` runs on each.

#![allow(clippy::unwrap_used)]

#[macro_use]
mod lab;
mod commit;
mod desk;
mod documented;
mod holding;
mod hostile;
mod queue;
mod queue_findings;
mod queue_model;
mod queue_races;
mod read;
mod retry;
mod roles;
mod schema;
mod secrets;
mod server;
mod trouble;
