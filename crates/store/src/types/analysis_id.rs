//! The id of an analysis.

use serde::{Deserialize, Serialize};

/// An id of the form `[A-Za-z0-9][A-Za-z0-9._-]{0,63}`. The id becomes the name of a directory, so no other character
/// is allowed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AnalysisId(String);

/// The text is not of the form of an [`AnalysisId`].
#[derive(Debug, thiserror::Error)]
#[error("analysis id {given:?} is not of the form [A-Za-z0-9][A-Za-z0-9._-]{{0,63}}")]
pub struct AnalysisIdError {
    given: String,
}

impl AnalysisId {
    /// The largest number of bytes in an id.
    pub const LEN_MAX: usize = 64;

    /// Checks the form of an id.
    pub fn new(text: &str) -> Result<Self, AnalysisIdError> {
        let bytes = text.as_bytes();
        let good = !bytes.is_empty()
            && bytes.len() <= Self::LEN_MAX
            && bytes[0].is_ascii_alphanumeric()
            && bytes
                .iter()
                .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(b));
        match good {
            true => Ok(AnalysisId(text.to_owned())),
            false => Err(AnalysisIdError {
                given: text.chars().take(200).collect(),
            }),
        }
    }

    /// Makes a new id from the time, so that ids sort by age, and 40 random bits, so that two never collide.
    pub fn generate() -> Self {
        let mut noise = [0u8; 5];
        let got = rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty());
        let seconds = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
        let noise = match got {
            Ok(5) => noise.iter().fold(0u64, |n, b| n << 8 | u64::from(*b)),
            _ => u64::from(std::process::id()),
        };
        AnalysisId(format!("a{seconds:x}-{noise:010x}"))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for AnalysisId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for AnalysisId {
    type Error = AnalysisIdError;
    fn try_from(text: String) -> Result<Self, AnalysisIdError> {
        AnalysisId::new(&text)
    }
}

impl From<AnalysisId> for String {
    fn from(id: AnalysisId) -> String {
        id.0
    }
}
