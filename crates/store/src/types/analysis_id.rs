//! The id of an analysis.

use serde::{Deserialize, Serialize};

/// `[A-Za-z0-9][A-Za-z0-9._-]{0,63}`. Names a directory, so nothing else is let through.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AnalysisId(String);

#[derive(Debug, thiserror::Error)]
#[error("analysis id {given:?} is not of the form [A-Za-z0-9][A-Za-z0-9._-]{{0,63}}")]
pub struct BadId {
    given: String,
}

impl AnalysisId {
    pub const LEN_MAX: usize = 64;

    pub fn new(text: &str) -> Result<Self, BadId> {
        let bytes = text.as_bytes();
        let good = !bytes.is_empty()
            && bytes.len() <= Self::LEN_MAX
            && bytes[0].is_ascii_alphanumeric()
            && bytes
                .iter()
                .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(b));
        match good {
            true => Ok(AnalysisId(text.to_owned())),
            false => Err(BadId {
                given: text.chars().take(200).collect(),
            }),
        }
    }

    /// A fresh id: the time, so that a listing sorts, and enough chance that two never meet.
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
    type Error = BadId;
    fn try_from(text: String) -> Result<Self, BadId> {
        AnalysisId::new(&text)
    }
}

impl From<AnalysisId> for String {
    fn from(id: AnalysisId) -> String {
        id.0
    }
}
