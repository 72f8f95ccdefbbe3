//! Decides which environment variables hold secrets. The record never keeps their values.

use serde::{Deserialize, Serialize};

/// Why a value counts as secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SecretReason {
    /// The operator's policy names the variable.
    Policy,
    /// The variable's name contains a word for a secret.
    Name,
    /// The value is a URL with a password.
    Value,
}

/// Why a variable's value counts as secret, if it does. A name in `secret_names` that ends in `*` stands for every
/// name with that beginning.
pub fn secret_reason(name: &[u8], value: &[u8], secret_names: &[String]) -> Option<SecretReason> {
    let named = |pattern: &String| match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning.as_bytes()),
        None => name == pattern.as_bytes(),
    };
    match () {
        () if secret_names.iter().any(named) => Some(SecretReason::Policy),
        () if names_a_secret(name) => Some(SecretReason::Name),
        () if has_password(value) => Some(SecretReason::Value),
        () => None,
    }
}

/// Whether a word of the name is a word for a secret. Anything but letters and digits separates words, and so does a
/// capital after a small letter. The end of a word is enough (PGPASSWORD); the beginning is not
/// (TOKENIZERS_PARALLELISM).
fn names_a_secret(name: &[u8]) -> bool {
    const WORDS: [&[u8]; 10] = [
        b"TOKEN",
        b"SECRET",
        b"PASSWORD",
        b"PASSWD",
        b"PASSPHRASE",
        b"PASS",
        b"KEY",
        b"CREDENTIAL",
        b"COOKIE",
        b"AUTH",
    ];
    let mut words: Vec<Vec<u8>> = vec![Vec::new()];
    let mut before = 0u8;
    for byte in name {
        if !byte.is_ascii_alphanumeric()
            || (byte.is_ascii_uppercase() && before.is_ascii_lowercase())
        {
            words.push(Vec::new());
        }
        if let Some(word) = words.last_mut().filter(|_| byte.is_ascii_alphanumeric()) {
            word.push(byte.to_ascii_uppercase());
        }
        before = *byte;
    }
    words.iter().any(|word| {
        // Also match KEY1 and TOKENS.
        let word = word.trim_ascii_end();
        let digits = word.iter().rev().take_while(|b| b.is_ascii_digit()).count();
        let word = &word[..word.len() - digits];
        let one = word.strip_suffix(b"S").unwrap_or(word);
        WORDS
            .iter()
            .any(|secret| word.ends_with(secret) || one.ends_with(secret))
    })
}

/// Whether the value contains `scheme://user:password@host`.
fn has_password(value: &[u8]) -> bool {
    let schemes = value
        .windows(3)
        .enumerate()
        .filter(|(_, part)| *part == b"://");
    schemes.map(|(at, _)| &value[at + 3..]).any(|rest| {
        let authority = rest
            .split(|b| b"/?# ".contains(b))
            .next()
            .unwrap_or_default();
        let user = authority.rsplitn(2, |b| *b == b'@').nth(1);
        user.is_some_and(|user| user.contains(&b':'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_secrets_are_known() {
        for name in [
            "TOKEN",
            "GITHUB_TOKEN",
            "github_token",
            "githubToken",
            "PGPASSWORD",
            "AWS_SECRET_ACCESS_KEY",
            "API_KEY",
            "APIKEY",
            "apiKey2",
            "DB_PASS",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "SSH.KEYS",
            "COOKIE",
            "HTTP_AUTH",
        ] {
            assert!(names_a_secret(name.as_bytes()), "{name}");
        }
        for name in [
            "TOKENIZERS_PARALLELISM",
            "KEYBOARD",
            "PATH",
            "SEED",
            "SECRETARY",
            "PASSES_MAX_N",
            "AUTHOR",
            "",
            "_",
        ] {
            assert!(!names_a_secret(name.as_bytes()), "{name}");
        }
    }
}
