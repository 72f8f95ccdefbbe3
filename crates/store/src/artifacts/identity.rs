//! The identity of a store: the file `store.json`.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{ArtifactError, files};
use crate::types::random_hex::random_hex;

pub(super) const VERSION: u32 = 1;
pub(super) const IDENTITY: &str = "store.json";
const IDENTITY_BYTES_MAX: u64 = 4_096;

#[derive(Serialize, Deserialize)]
struct Identity {
    version: u32,
    id: String,
}

/// Reads the identity of the store, or creates one. If several processes create it at the same time, one wins and all
/// read the same identity.
pub(super) fn read_or_create(
    path: &Path,
    dir: BorrowedFd<'_>,
    staging: BorrowedFd<'_>,
) -> Result<String, ArtifactError> {
    let path = path.join(IDENTITY);
    let failed = |source| ArtifactError::Identity {
        path: path.clone(),
        source,
    };
    let read = || files::read_small(dir, IDENTITY, IDENTITY_BYTES_MAX).map_err(failed);
    let text = match read()? {
        Some(text) => text,
        None => {
            make_identity(dir, staging).map_err(failed)?;
            read()?.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?
        }
    };
    let identity: Identity = serde_json::from_slice(&text).map_err(|e| failed(e.into()))?;
    let is_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    match identity.version {
        VERSION if identity.id.len() == 32 && identity.id.bytes().all(is_hex) => Ok(identity.id),
        VERSION => Err(failed(io::Error::other("its id is not 32 hex digits"))),
        found => Err(ArtifactError::Version { path, found }),
    }
}

/// Writes a new identity, which is durable before anything refers to the store.
fn make_identity(dir: BorrowedFd<'_>, staging: BorrowedFd<'_>) -> io::Result<()> {
    let identity = Identity {
        version: VERSION,
        id: random_hex()?,
    };
    files::write_small(staging, dir, IDENTITY, &serde_json::to_vec(&identity)?)
}
