//! A request in the queue: what the user asked for, resolved on the submitting machine, with the hashes of its files.
//!
//! Anybody who can write to the database can write a submission, so it is untrusted. The worker that runs it applies
//! its own policy, as to a command line, and checks every path again.

use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::types::analysis_id::AnalysisId;
use crate::types::input_name::{self, InputNameError};
use crate::types::manifest::ContentHash;
use crate::types::secret_values;

/// The version of [`Submission`] that this Fumehood writes, and the only one that it reads.
pub const VERSION: u32 = 1;
/// The largest total size of the files of one submission.
pub const INPUT_BYTES_MAX: u64 = 64 << 20;
/// The largest number of inputs in one submission: files, directories and links.
pub const INPUT_FILES_MAX: usize = 10_000;
/// The largest size of the request itself, as JSON.
pub const REQUEST_BYTES_MAX: usize = 4 << 20;

/// A submission of version 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Submission {
    /// Always [`VERSION`] in a submission that was checked.
    pub version: u32,
    /// The id of the analysis.
    pub id: AnalysisId,
    /// What to run.
    pub command: SubmittedCommand,
    /// The settings that the user gave, under their names in the configuration files.
    pub settings: BTreeMap<String, SubmittedSetting>,
    /// The entries of the workspace before the program starts.
    pub inputs: Vec<InputItem>,
    /// The hash of the content of standard input.
    pub stdin: Option<ContentHash>,
}

/// What a submission runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SubmittedCommand {
    /// A script among the inputs. `from` is the path that it was submitted from, for the record.
    Script {
        /// The name of the script at the top of the workspace.
        name: PathBuf,
        /// The path on the submitting machine.
        from: PathBuf,
        /// The arguments after the script.
        args: Vec<String>,
    },
    /// A program and its arguments. The program is not empty.
    Argv(Vec<String>),
}

/// The value of a setting. The worker checks it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SubmittedSetting {
    /// A number, in the smallest unit of its setting.
    Number(u64),
    /// The word `off`, for a limit.
    Off,
    /// A word, a text or an absolute path.
    Text(String),
    /// Whether an option is on.
    Switch(bool),
    /// The values of an option that can be given several times.
    List(Vec<String>),
}

/// An entry of the workspace, by its name there. A directory comes before its entries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum InputItem {
    /// A directory.
    Directory {
        /// The name in the workspace.
        name: PathBuf,
    },
    /// A regular file.
    File {
        /// The name in the workspace.
        name: PathBuf,
        /// The hash of the content, which is stored beside the submission.
        blake3: ContentHash,
        /// Whether the file has permission to be executed.
        executable: bool,
    },
    /// The target is relative and within the same input.
    Link {
        /// The name in the workspace.
        name: PathBuf,
        /// What the link contains.
        target: PathBuf,
    },
}

/// Why a submission is refused.
#[allow(missing_docs, reason = "the variants say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum SubmissionError {
    /// The JSON text is longer than [`REQUEST_BYTES_MAX`].
    #[error("the submission has {bytes} bytes, and at most {REQUEST_BYTES_MAX} are allowed")]
    TooLong { bytes: usize },
    /// The text is not the JSON of a submission.
    #[error("read the submission")]
    Json(#[source] serde_json::Error),
    /// The submission cannot be written as JSON.
    #[error("write the submission")]
    Unwritable(#[source] serde_json::Error),
    /// The submission has another version than [`VERSION`].
    #[error(
        "the submission is of version {version}; this Fumehood knows {VERSION}, so use a newer one"
    )]
    Version { version: u32 },
    /// The submission names another analysis than the row of the queue that holds it.
    #[error("the submission is of {found}, and waits under the name {row:?}")]
    OtherId { found: AnalysisId, row: String },
    /// There are more than [`INPUT_FILES_MAX`] inputs.
    #[error("the submission has more than {INPUT_FILES_MAX} inputs")]
    TooManyItems,
    /// An input has a name that is not allowed.
    #[error("name an input of the submission")]
    Name(#[from] InputNameError),
    /// Two inputs have the same name.
    #[error("the submission's input {name:?} is there twice")]
    DuplicateName { name: PathBuf },
    /// No directory came before the input that would contain it.
    #[error("the submission's input {name:?} is in no directory that came before it")]
    NoParent { name: PathBuf },
    /// A link leads out of the input that it belongs to.
    #[error(
        "the submission's input {name:?} is a link to {target:?}, which leads out of the copied directory"
    )]
    LinkLeadsOut { name: PathBuf, target: PathBuf },
    /// The script is not a file at the top of the inputs.
    #[error("the submission's script {name:?} is no file at the top of its inputs")]
    Script { name: PathBuf },
    /// The command has no program.
    #[error("the submission's command is empty")]
    NoCommand,
    /// A word of the command contains a NUL byte.
    #[error("the submission's command contains a NUL byte")]
    NulByte,
}

impl Submission {
    /// Parses the request that is queued under the id `row`, and checks everything that needs no policy.
    pub fn read(json: &str, row: &str) -> Result<Submission, SubmissionError> {
        if json.len() > REQUEST_BYTES_MAX {
            return Err(SubmissionError::TooLong { bytes: json.len() });
        }
        let submission: Submission = serde_json::from_str(json).map_err(SubmissionError::Json)?;
        if submission.id.as_str() != row {
            return Err(SubmissionError::OtherId {
                found: submission.id,
                row: row.chars().take(AnalysisId::LEN_MAX).collect(),
            });
        }
        submission.check()?;
        Ok(submission)
    }

    /// The JSON text for the queue. Refuses a submission that [`Submission::read`] would refuse.
    pub fn write(&self) -> Result<String, SubmissionError> {
        self.check()?;
        let json = serde_json::to_string(self).map_err(SubmissionError::Unwritable)?;
        match json.len() > REQUEST_BYTES_MAX {
            true => Err(SubmissionError::TooLong { bytes: json.len() }),
            false => Ok(json),
        }
    }

    /// A hash that tells this request from others. It covers everything except an id that Fumehood generated.
    pub fn fingerprint(&self, is_named: bool) -> Result<String, SubmissionError> {
        let mut whole = serde_json::to_value(self).map_err(SubmissionError::Unwritable)?;
        if let (false, Some(fields)) = (is_named, whole.as_object_mut()) {
            fields.remove("id");
        }
        let text = serde_json::to_string(&whole).map_err(SubmissionError::Unwritable)?;
        Ok(ContentHash::of(text.as_bytes()).to_string())
    }

    /// Removes the values of secret variables and keeps their names. A worker refuses to run with a name alone.
    /// Returns whether there was any value to remove.
    pub(crate) fn erase_secrets(&mut self) -> bool {
        let secret_names = match self.settings.get("secret_env") {
            Some(SubmittedSetting::List(names)) => names.clone(),
            _ => Vec::new(),
        };
        let mut erased = false;
        for variable in self.env_mut() {
            let Some((name, value)) = variable.split_once('=') else {
                continue;
            };
            if secret_values::secret_reason(name.as_bytes(), value.as_bytes(), &secret_names)
                .is_some()
            {
                variable.truncate(name.len());
                erased = true;
            }
        }
        erased
    }

    /// The names of the variables whose values were removed.
    pub(crate) fn erased_names(&self) -> Vec<String> {
        let Some(SubmittedSetting::List(variables)) = self.settings.get("env") else {
            return Vec::new();
        };
        let names = variables.iter().filter(|variable| !variable.contains('='));
        names.cloned().collect()
    }

    /// Puts the values of variables back.
    pub(crate) fn restore_secrets(&mut self, values: &[(String, String)]) {
        for variable in self.env_mut() {
            if let Some((name, value)) = values.iter().find(|(name, _)| name == variable) {
                *variable = format!("{name}={value}");
            }
        }
    }

    fn env_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let variables = match self.settings.get_mut("env") {
            Some(SubmittedSetting::List(variables)) => variables.as_mut_slice(),
            _ => &mut [],
        };
        variables.iter_mut()
    }

    /// Checks everything that needs no policy: version, inputs and command.
    pub fn check(&self) -> Result<(), SubmissionError> {
        if self.version != VERSION {
            return Err(SubmissionError::Version {
                version: self.version,
            });
        }
        if self.inputs.len() > INPUT_FILES_MAX {
            return Err(SubmissionError::TooManyItems);
        }
        let mut known: HashMap<&Path, &InputItem> = HashMap::new();
        for item in &self.inputs {
            item.check(&known)?;
            if known.insert(item.name(), item).is_some() {
                return Err(SubmissionError::DuplicateName {
                    name: item.name().to_path_buf(),
                });
            }
        }
        self.check_command(&known)
    }

    fn check_command(&self, known: &HashMap<&Path, &InputItem>) -> Result<(), SubmissionError> {
        let words = match &self.command {
            SubmittedCommand::Script { name, args, .. } => {
                let single = name.components().count() == 1;
                let file = matches!(known.get(name.as_path()), Some(InputItem::File { .. }));
                if !single || !file {
                    return Err(SubmissionError::Script { name: name.clone() });
                }
                args
            }
            SubmittedCommand::Argv(words) => match words.first() {
                Some(first) if !first.is_empty() => words,
                _ => return Err(SubmissionError::NoCommand),
            },
        };
        match words.iter().any(|word| word.contains('\0')) {
            true => Err(SubmissionError::NulByte),
            false => Ok(()),
        }
    }
}

impl InputItem {
    /// The name of the entry in the workspace.
    pub fn name(&self) -> &Path {
        match self {
            InputItem::Directory { name }
            | InputItem::File { name, .. }
            | InputItem::Link { name, .. } => name,
        }
    }

    fn check(&self, known: &HashMap<&Path, &InputItem>) -> Result<(), SubmissionError> {
        let name = input_name::name_for(self.name(), Some(self.name()))?;
        // Accept only one spelling of a name; otherwise two names could mean the same file.
        let plain: PathBuf = name.components().collect();
        if plain.as_os_str() != name.as_os_str() {
            return Err(InputNameError::BadName { name }.into());
        }
        let parents: Vec<&Path> = name
            .ancestors()
            .skip(1)
            .filter(|parent| !parent.as_os_str().is_empty())
            .collect();
        if let Some(parent) = parents.first()
            && !matches!(known.get(parent), Some(InputItem::Directory { .. }))
        {
            return Err(SubmissionError::NoParent { name });
        }
        let InputItem::Link { target, .. } = self else {
            return Ok(());
        };
        // A link at the top of the workspace is an input of its own, so any target is outside of it.
        let inside = match parents.len() {
            0 => false,
            depth => input_name::stays_inside(target, depth - 1),
        };
        let sane = target.components().next().is_some()
            && target.components().all(|part| part != Component::RootDir)
            && !target.as_os_str().as_encoded_bytes().contains(&0);
        match inside && sane {
            true => Ok(()),
            false => Err(SubmissionError::LinkLeadsOut {
                name,
                target: target.clone(),
            }),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn file(name: &str) -> InputItem {
        InputItem::File {
            name: name.into(),
            blake3: ContentHash::of(b""),
            executable: false,
        }
    }

    fn dir(name: &str) -> InputItem {
        InputItem::Directory { name: name.into() }
    }

    fn link(name: &str, target: &str) -> InputItem {
        InputItem::Link {
            name: name.into(),
            target: target.into(),
        }
    }

    fn with(inputs: Vec<InputItem>) -> Submission {
        Submission {
            version: VERSION,
            id: AnalysisId::new("x").unwrap(),
            command: SubmittedCommand::Argv(vec!["true".into()]),
            settings: BTreeMap::new(),
            inputs,
            stdin: None,
        }
    }

    #[test]
    fn good_items_are_taken() {
        let good = vec![
            file("a.py"),
            dir("d"),
            dir("d/e"),
            file("d/e/f"),
            link("d/e/up", "../g"),
            link("d/e/here", "f"),
            file("data.csv"),
        ];
        with(good).check().unwrap();
    }

    /// What an attacker with write access to the database could submit.
    #[test]
    fn hostile_items_are_refused() {
        let deep = vec!["d"; 200].join("/");
        for bad in [
            vec![file("../x")],
            vec![file("/etc/passwd")],
            vec![file("")],
            vec![file(".")],
            vec![file("./a")],
            vec![file("a/")],
            vec![dir("d"), file("d//x")],
            vec![dir("d"), file("d/../x")],
            vec![dir("d"), file("d/./x")],
            vec![file("a\0b")],
            vec![file("data")],
            vec![dir("docs")],
            vec![dir(".fumehood")],
            vec![file(".fumehood/x")],
            vec![file("a"), file("a")],
            vec![dir("a"), file("a")],
            vec![file("a"), file("a/b")],
            vec![file("d/x")],
            vec![file("d/x"), dir("d")],
            vec![file(&deep)],
            vec![link("l", "/etc/shadow")],
            vec![link("l", "x")],
            vec![dir("d"), link("d/l", "/etc/shadow")],
            vec![dir("d"), link("d/l", "../../etc/shadow")],
            vec![dir("d"), link("d/l", "../x")],
            vec![dir("d"), link("d/l", "x/../../..")],
            vec![dir("d"), link("d/l", "")],
            vec![dir("d"), link("d/l", "a\0b")],
            // A file below a link would be written to the link's target.
            vec![dir("d"), dir("d/e"), link("d/l", "e"), file("d/l/x")],
            (0..=INPUT_FILES_MAX)
                .map(|n| file(&format!("f{n}")))
                .collect(),
        ] {
            let shown = format!("{:?}", &bad[..bad.len().min(4)]);
            assert!(with(bad).check().is_err(), "{shown}");
        }
    }

    #[test]
    fn commands_are_checked() {
        let script = |name: &str| SubmittedCommand::Script {
            name: name.into(),
            from: "/a.py".into(),
            args: Vec::new(),
        };
        for (bad, inputs) in [
            (SubmittedCommand::Argv(Vec::new()), vec![]),
            (SubmittedCommand::Argv(vec![String::new()]), vec![]),
            (SubmittedCommand::Argv(vec!["a\0".into()]), vec![]),
            (script("a.py"), vec![]),
            (script("a.py"), vec![dir("a.py")]),
            (script("d/a.py"), vec![dir("d"), file("d/a.py")]),
            (script("/etc/passwd"), vec![file("a.py")]),
        ] {
            let mut submission = with(inputs);
            submission.command = bad;
            assert!(submission.check().is_err(), "{submission:?}");
        }
        let mut good = with(vec![file("a.py")]);
        good.command = script("a.py");
        good.check().unwrap();
    }

    #[test]
    fn text_is_read_within_bounds() {
        let json = with(vec![file("a")]).write().unwrap();
        assert_eq!(Submission::read(&json, "x").unwrap(), with(vec![file("a")]));
        assert!(matches!(
            Submission::read(&json, "y"),
            Err(SubmissionError::OtherId { .. })
        ));
        for bad in [
            json.replace("\"version\":1", "\"version\":2"),
            json.replace("\"inputs\"", "\"more\":1,\"inputs\""),
            json.replace("\"x\"", "\"../x\""),
            String::from("{}"),
            "[".repeat(100_000),
            " ".repeat(REQUEST_BYTES_MAX + 1),
        ] {
            assert!(Submission::read(&bad, "x").is_err());
        }
    }

    #[test]
    fn a_made_up_id_tells_nothing_apart() {
        let (mut one, mut other) = (with(Vec::new()), with(Vec::new()));
        other.id = AnalysisId::new("other").unwrap();
        assert_eq!(
            one.fingerprint(false).unwrap(),
            other.fingerprint(false).unwrap()
        );
        assert_ne!(
            one.fingerprint(true).unwrap(),
            other.fingerprint(true).unwrap()
        );
        one.command = SubmittedCommand::Argv(vec!["false".into()]);
        assert_ne!(
            one.fingerprint(false).unwrap(),
            other.fingerprint(false).unwrap()
        );
    }
}
