//! `[post_process]`: a command that the platform runs after each commit. The command is trusted: it runs unconfined, as
//! the caller. So only the user's own file and the operator's policy may set it.

use std::path::Path;

use store::types::units::{self, UnitError};

use super::suggestion::{did_you_mean, excerpt, nearest};

/// The name of the table in both files.
pub(crate) const SECTION: &str = "post_process";

const TIMEOUT_DEFAULT_MS: u64 = 10 * 60 * 1000;
const TIMEOUT_LEAST_MS: u64 = 1000;
const TIMEOUT_MOST_MS: u64 = 365 * 24 * 3600 * 1000;
const WORDS_MAX: usize = 1000;

/// A command that Fumehood runs unconfined after each commit, from the user's `config.toml` or the policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostProcessSettings {
    /// The program, as an absolute path, and its arguments.
    pub command: Vec<String>,
    /// How long the command may take before it is killed, in milliseconds.
    pub timeout_ms: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum PostProcessError {
    #[error("`post_process` must be a table with `command` and, if wanted, `timeout`")]
    NotATable,
    #[error("unknown key `post_process.{key}`{}", did_you_mean(nearest))]
    UnknownKey {
        key: String,
        nearest: Option<String>,
    },
    #[error(
        "`post_process.command` must be an array of 1 to {WORDS_MAX} strings without NUL bytes, such as \
         [\"/usr/local/bin/publish\", \"--quiet\"]"
    )]
    Command,
    #[error(
        "`post_process.command` begins with {0:?}; the program must be an absolute path, so that neither PATH nor \
         the current directory decides what is run"
    )]
    Relative(String),
    #[error("`post_process.timeout` must be a number or a string")]
    TimeoutType,
    #[error("read `post_process.timeout`")]
    Timeout(#[source] UnitError),
    #[error("`post_process.timeout` is {given}; it must be from 1s to 365d")]
    TimeoutBounds { given: String },
}

impl PostProcessSettings {
    pub(crate) fn read(value: &toml::Value) -> Result<PostProcessSettings, PostProcessError> {
        let table = value.as_table().ok_or(PostProcessError::NotATable)?;
        const KEYS: [&str; 2] = ["command", "timeout"];
        if let Some(key) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return Err(PostProcessError::UnknownKey {
                key: excerpt(key),
                nearest: nearest(key, KEYS).map(|near| format!("{SECTION}.{near}")),
            });
        }
        Ok(PostProcessSettings {
            command: command(table.get("command"))?,
            timeout_ms: timeout_ms(table.get("timeout"))?,
        })
    }
}

fn command(value: Option<&toml::Value>) -> Result<Vec<String>, PostProcessError> {
    let words: Option<Vec<String>> = value
        .and_then(toml::Value::as_array)
        .filter(|items| items.len() <= WORDS_MAX)
        .and_then(|items| {
            items
                .iter()
                .map(|item| item.as_str().map(str::to_owned))
                .collect()
        });
    let words = words
        .filter(|words| words.iter().all(|word| !word.contains('\0')))
        .ok_or(PostProcessError::Command)?;
    let program = Path::new(words.first().ok_or(PostProcessError::Command)?);
    match program.is_absolute() {
        true => Ok(words),
        false => Err(PostProcessError::Relative(excerpt(
            &program.to_string_lossy(),
        ))),
    }
}

fn timeout_ms(value: Option<&toml::Value>) -> Result<u64, PostProcessError> {
    let text = match value {
        None => return Ok(TIMEOUT_DEFAULT_MS),
        Some(toml::Value::String(text)) => text.clone(),
        Some(toml::Value::Integer(number)) => number.to_string(),
        Some(toml::Value::Float(number)) => number.to_string(),
        Some(_) => return Err(PostProcessError::TimeoutType),
    };
    let ms = units::parse_duration_ms(&text).map_err(PostProcessError::Timeout)?;
    match (TIMEOUT_LEAST_MS..=TIMEOUT_MOST_MS).contains(&ms) {
        true => Ok(ms),
        false => Err(PostProcessError::TimeoutBounds {
            given: units::format_duration(ms),
        }),
    }
}
