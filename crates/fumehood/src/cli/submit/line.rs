//! One line of a batch, as docs/submission-v1.schema.json describes it: settings by name, limits in `limits`, lists in
//! the plural.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use engine::request::Command;
use serde::Deserialize;

use engine::settings::suggestion::{did_you_mean, excerpt, nearest};
use engine::settings::table::{GivenSettings, Key};

#[derive(Debug, thiserror::Error)]
pub enum BatchLineError {
    #[error("read it as JSON")]
    Json(#[source] serde_json::Error),
    #[error("unknown key `{key}`{}", did_you_mean(nearest))]
    UnknownKey {
        key: String,
        nearest: Option<String>,
    },
    #[error("give either `command` or `script`")]
    NotOneCommand,
    #[error("`args` go with `script`; after `command` they are its other words")]
    ArgsWithoutScript,
    #[error("`{0}` is empty")]
    Empty(&'static str),
    #[error("`stdin` is the path of a file here; `-` is read once, and there may be several lines")]
    Stdin,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BatchLine {
    id: Option<String>,
    command: Option<Vec<String>>,
    script: Option<String>,
    args: Option<Vec<String>>,
    inputs: Vec<String>,
    stdin: Option<String>,
    /// A value, or null for the submitter's own.
    env: BTreeMap<String, Option<String>>,
    limits: BatchLimits,
    outputs: Vec<String>,
    expect: Vec<String>,
    project: Option<String>,
    data: Option<String>,
    docs: Option<String>,
    read: Vec<String>,
    runtime: Option<String>,
    network: Option<String>,
    workspace: Option<String>,
    keep: Option<String>,
    keep_for: Option<NumberOrText>,
    isolation: Option<String>,
    level: Option<String>,
    shared_memory: Option<String>,
    allow_degraded: Vec<String>,
    secret_env: Vec<String>,
    priority: Option<NumberOrText>,
    retries: Option<NumberOrText>,
    retry_on: Vec<String>,
    key: Option<String>,
    replace: bool,
}

const KEYS: [&str; 29] = [
    "id",
    "command",
    "script",
    "args",
    "inputs",
    "stdin",
    "env",
    "limits",
    "outputs",
    "expect",
    "project",
    "data",
    "docs",
    "read",
    "runtime",
    "network",
    "workspace",
    "keep",
    "keep_for",
    "isolation",
    "level",
    "shared_memory",
    "allow_degraded",
    "secret_env",
    "priority",
    "retries",
    "retry_on",
    "key",
    "replace",
];

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct BatchLimits {
    timeout: Option<NumberOrText>,
    cpu_time: Option<NumberOrText>,
    idle_timeout: Option<NumberOrText>,
    grace: Option<NumberOrText>,
    memory: Option<NumberOrText>,
    cpus: Option<NumberOrText>,
    pids: Option<NumberOrText>,
    open_files: Option<NumberOrText>,
    disk: Option<NumberOrText>,
    files: Option<NumberOrText>,
    log_limit: Option<NumberOrText>,
    max_output: Option<NumberOrText>,
    max_output_file: Option<NumberOrText>,
    max_outputs: Option<NumberOrText>,
    max_depth: Option<NumberOrText>,
    inline_max: Option<NumberOrText>,
}

const LIMITS: [&str; 16] = [
    "timeout",
    "cpu_time",
    "idle_timeout",
    "grace",
    "memory",
    "cpus",
    "pids",
    "open_files",
    "disk",
    "files",
    "log_limit",
    "max_output",
    "max_output_file",
    "max_outputs",
    "max_depth",
    "inline_max",
];

/// A number, or a text with a unit, as in a configuration file.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Number(serde_json::Number),
    Text(String),
}

impl NumberOrText {
    fn word(&self) -> OsString {
        match self {
            NumberOrText::Text(text) => text.into(),
            // JSON has one kind of number, so accept 3.0 as 3.
            NumberOrText::Number(number) => match number.as_f64() {
                Some(float) if !number.is_u64() && float.fract() == 0.0 => format!("{float:.0}"),
                _ => number.to_string(),
            }
            .into(),
        }
    }
}

impl BatchLine {
    pub fn parse(text: &str) -> Result<BatchLine, BatchLineError> {
        serde_json::from_str(text).map_err(|e| unknown_key(text).unwrap_or(BatchLineError::Json(e)))
    }

    /// Returns the command, and every setting with its values as an option would have them.
    pub fn into_settings(self) -> Result<(Command, GivenSettings), BatchLineError> {
        let command = self.command()?;
        if self.stdin.as_deref() == Some("-") {
            return Err(BatchLineError::Stdin);
        }
        let env = self.env.iter().map(|(name, value)| match value {
            Some(value) => format!("{name}={value}"),
            None => name.clone(),
        });
        let mut given: GivenSettings = Vec::new();
        for (key, value) in [
            (Key::Id, &self.id),
            (Key::Stdin, &self.stdin),
            (Key::Project, &self.project),
            (Key::Data, &self.data),
            (Key::Docs, &self.docs),
            (Key::Runtime, &self.runtime),
            (Key::Network, &self.network),
            (Key::Workspace, &self.workspace),
            (Key::Keep, &self.keep),
            (Key::Isolation, &self.isolation),
            (Key::Level, &self.level),
            (Key::SharedMemory, &self.shared_memory),
            (Key::SubmitOnce, &self.key),
        ] {
            given.extend(value.as_ref().map(|text| (key, vec![text.into()])));
        }
        let limits = &self.limits;
        for (key, value) in [
            (Key::KeepFor, &self.keep_for),
            (Key::Priority, &self.priority),
            (Key::Retries, &self.retries),
            (Key::Timeout, &limits.timeout),
            (Key::CpuTime, &limits.cpu_time),
            (Key::IdleTimeout, &limits.idle_timeout),
            (Key::Grace, &limits.grace),
            (Key::Memory, &limits.memory),
            (Key::Cpus, &limits.cpus),
            (Key::Pids, &limits.pids),
            (Key::OpenFiles, &limits.open_files),
            (Key::Disk, &limits.disk),
            (Key::Files, &limits.files),
            (Key::LogLimit, &limits.log_limit),
            (Key::MaxOutput, &limits.max_output),
            (Key::MaxOutputFile, &limits.max_output_file),
            (Key::MaxOutputs, &limits.max_outputs),
            (Key::MaxDepth, &limits.max_depth),
            (Key::InlineMax, &limits.inline_max),
        ] {
            given.extend(value.as_ref().map(|amount| (key, vec![amount.word()])));
        }
        for (key, items) in [
            (Key::Env, &env.collect()),
            (Key::Input, &self.inputs),
            (Key::Output, &self.outputs),
            (Key::Expect, &self.expect),
            (Key::Read, &self.read),
            (Key::AllowDegraded, &self.allow_degraded),
            (Key::SecretEnv, &self.secret_env),
            (Key::RetryOn, &self.retry_on),
        ] {
            if !items.is_empty() {
                given.push((key, items.iter().map(OsString::from).collect()));
            }
        }
        if self.replace {
            given.push((Key::Replace, vec!["true".into()]));
        }
        Ok((command, given))
    }

    fn command(&self) -> Result<Command, BatchLineError> {
        match (&self.command, &self.script, &self.args) {
            (Some(_), None, Some(_)) => Err(BatchLineError::ArgsWithoutScript),
            (Some(words), None, None) => match words.first() {
                Some(first) if !first.is_empty() => {
                    Ok(Command::Argv(words.iter().map(OsString::from).collect()))
                }
                _ => Err(BatchLineError::Empty("command")),
            },
            (None, Some(script), _) if script.is_empty() => Err(BatchLineError::Empty("script")),
            (None, Some(script), args) => Ok(Command::Script {
                script: PathBuf::from(script),
                args: args.iter().flatten().map(OsString::from).collect(),
            }),
            _ => Err(BatchLineError::NotOneCommand),
        }
    }
}

/// Returns the unknown key, if that is what is wrong with the line.
fn unknown_key(text: &str) -> Option<BatchLineError> {
    let whole: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text).ok()?;
    let limits = whole.get("limits").and_then(|limits| limits.as_object());
    let in_limits = limits.and_then(|limits| limits.keys().find(|k| !LIMITS.contains(&k.as_str())));
    let (key, known, before) = match whole.keys().find(|key| !KEYS.contains(&key.as_str())) {
        Some(key) => (key, &KEYS[..], ""),
        None => (in_limits?, &LIMITS[..], "limits."),
    };
    let near = nearest(key, known.iter().copied()).map(|near| format!("{before}{near}"));
    // The most common mistake is a limit outside of `limits`.
    let near = near.or_else(|| {
        let near = nearest(key, LIMITS.iter().copied())?;
        Some(format!("limits.{near}"))
    });
    Some(BatchLineError::UnknownKey {
        key: format!("{before}{}", excerpt(key)),
        nearest: near,
    })
}
