//! Names of the groups and scopes that Fumehood makes, and how to recognise them.

use super::CgroupError;

/// Every group made for a run is called `fumehood-<id>-<pid of the runner>`. Recovery touches no other group.
const NAME_PREFIX: &str = "fumehood-";
pub(super) const ID_LEN_MAX: usize = 64;
/// Checks an id. The submitter of the run chose it and it becomes part of a directory's name, so it is checked here
/// again although the request was checked before.
pub(super) fn check_id(id: &str) -> Result<(), CgroupError> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    let first = id.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    match first && id.len() <= ID_LEN_MAX && id.bytes().all(plain) {
        true => Ok(()),
        false => Err(CgroupError::BadName(id.to_owned())),
    }
}

/// Returns the name of the group of run `id`, made by this process.
pub(super) fn name_for(id: &str) -> String {
    format!("{NAME_PREFIX}{id}-{}", std::process::id())
}

/// Returns whether [`name_for`] gives this name for some run and some process.
pub(super) fn is_run_group(name: &str) -> bool {
    let suffix = name.strip_prefix(NAME_PREFIX);
    let parts = suffix.and_then(|rest| rest.rsplit_once('-'));
    parts.is_some_and(|(id, pid)| {
        check_id(id).is_ok() && !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit())
    })
}

/// Returns the name of a scope that this process asks its manager to delegate. No run's group ever has such a name.
pub fn scope_name(random: u64) -> String {
    format!("{NAME_PREFIX}{}-{random:016x}.scope", std::process::id())
}

pub(super) fn is_scope_name(name: &str) -> bool {
    let between = name
        .strip_prefix(NAME_PREFIX)
        .and_then(|rest| rest.strip_suffix(".scope"));
    between
        .and_then(|rest| rest.split_once('-'))
        .is_some_and(|(pid, random)| {
            let digits = !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit());
            digits && random.len() == 16 && random.bytes().all(|b| b.is_ascii_hexdigit())
        })
}
