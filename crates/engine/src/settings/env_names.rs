//! Names of environment variables.

/// Whether the text is a variable's name, or the beginning of one followed by a star. A star alone matches every name.
pub fn is_name_pattern(text: &str) -> bool {
    text == "*" || is_env_name(text.strip_suffix('*').unwrap_or(text).as_bytes())
}

pub fn is_env_name(name: &[u8]) -> bool {
    let starts_well = name
        .first()
        .is_some_and(|byte| byte.is_ascii_alphabetic() || *byte == b'_');
    starts_well
        && name
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}
