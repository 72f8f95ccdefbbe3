//! The record, tried on SQLite and on a real PostgreSQL: every function in `on_both!` runs on each.

#![allow(clippy::unwrap_used)]

#[macro_use]
mod test_database;
mod commit;
mod database_failures;
mod documentation;
mod hostile_values;
mod queue;
mod queue_bad_rows;
mod queue_model;
mod queue_races;
mod queue_samples;
mod reading_attempts;
mod retry;
mod roles;
mod runner_lease;
mod schema;
mod secrets;

fn main() {
    testkit::Harness::new().run();
}
