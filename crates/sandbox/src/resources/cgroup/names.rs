//! Names of groups and scopes that this program makes, and how they are told from others.

use super::CgroupError;

/// Every group made for a run is called `fumehood-<id>-<pid of the runner>`; recovery touches no other.
const NAME_PREFIX: &str = "fumehood-";
pub(super) const ID_LEN_MAX: usize = 64;
/// The id is chosen by whoever asked for the run. It becomes part of a directory's name, so it is
/// checked here again although the request was checked before.
pub(super) fn check_id(id: &str) -> Result<(), CgroupError> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    let first = id.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    match first && id.len() <= ID_LEN_MAX && id.bytes().all(plain) {
        true => Ok(()),
        false => Err(CgroupError::BadName(id.to_owned())),
    }
}

/// The name of the group of run `id`, made by this process.
pub(super) fn name_for(id: &str) -> String {
    format!("{NAME_PREFIX}{id}-{}", std::process::id())
}

/// Whether [`name_for`], of some run and some process, gives this name.
pub(super) fn is_run_group(name: &str) -> bool {
    let suffix = name.strip_prefix(NAME_PREFIX);
    let parts = suffix.and_then(|rest| rest.rsplit_once('-'));
    parts.is_some_and(|(id, pid)| {
        check_id(id).is_ok() && !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit())
    })
}

/// The name of a scope that is asked for as delegated, for this process. No run's group is ever called so.
pub fn scope_name(noise: u64) -> String {
    format!("{NAME_PREFIX}{}-{noise:016x}.scope", std::process::id())
}

pub(super) fn is_scope_name(name: &str) -> bool {
    let between = name
        .strip_prefix(NAME_PREFIX)
        .and_then(|rest| rest.strip_suffix(".scope"));
    between
        .and_then(|rest| rest.split_once('-'))
        .is_some_and(|(pid, noise)| {
            let digits = !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit());
            digits && noise.len() == 16 && noise.bytes().all(|b| b.is_ascii_hexdigit())
        })
}
