//! What the text that names a database reveals without opening it.

/// Whether the text that names a database may contain a password: `user:password@`, or a parameter. Anything that could
/// be one counts: a needless error costs the caller little, and a password that everybody can read costs much.
pub fn holds_password(text: &str) -> bool {
    if sqlite_path(text).is_some() {
        return false;
    }
    let after_scheme = text.split_once("://").map_or(text, |(_, rest)| rest);
    let in_user = after_scheme
        .split_once('@')
        .is_some_and(|(user, _)| user.contains(':'));
    let names_it = text.to_ascii_lowercase().contains("password=");
    // A percent-encoded name may spell `password`.
    let hides_it = text.split_once('?').is_some_and(|(_, parameters)| {
        let name = |pair: &str| pair.split('=').next().is_some_and(|n| n.contains('%'));
        parameters.split('&').any(name)
    });
    in_user || names_it || hides_it
}

pub fn is_relative_sqlite(text: &str) -> bool {
    sqlite_path(text).is_some_and(|path| !path.starts_with('/'))
}

/// Returns the path after `sqlite:`, as the store reads it: the store takes `sqlite://x.db` for the relative path
/// `x.db`.
pub fn sqlite_path(text: &str) -> Option<&str> {
    let path = text.strip_prefix("sqlite:")?;
    Some(path.strip_prefix("//").unwrap_or(path))
}
