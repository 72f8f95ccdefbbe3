//! What a machine can check of the project's rules: where `unsafe` is, which way crates and modules depend on each other, which
//! names public types have, how long files are, what the documents must mention, which licences come in.

#![allow(clippy::unwrap_used)]

mod documents;
mod graph;
mod layout;
mod licences;
mod sources;
mod trials;
mod types;
