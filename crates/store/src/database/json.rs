//! Cleans JSON that Fumehood wrote around untrusted strings. JSON that a program wrote is checked by `result_value`.

/// Replaces an escaped NUL by the four characters `\x00`, as in every other text. PostgreSQL's `jsonb` refuses
/// `\u0000`, which would fail the transaction.
pub(crate) fn without_nul(text: &str) -> String {
    if !text.contains("\\u0000") {
        return text.to_owned();
    }
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        clean.push_str(&rest[..at]);
        let tail = &rest[at..];
        if let Some(after) = tail.strip_prefix("\\u0000") {
            clean.push_str("\\\\x00");
            rest = after;
        } else {
            let two = tail.char_indices().nth(2).map_or(tail.len(), |(i, _)| i);
            clean.push_str(&tail[..two]);
            rest = &tail[two..];
        }
    }
    clean.push_str(rest);
    clean
}

#[cfg(test)]
mod tests {
    use super::without_nul;

    #[test]
    fn only_an_escaped_nul_is_replaced() {
        assert_eq!(without_nul(r#"{"a":"x\u0000y"}"#), r#"{"a":"x\\x00y"}"#);
        assert_eq!(without_nul(r#"{"a":"x\\u0000y"}"#), r#"{"a":"x\\u0000y"}"#);
        assert_eq!(without_nul(r#"{"é":"\\\u0000\n"}"#), r#"{"é":"\\\\x00\n"}"#);
        assert_eq!(without_nul(r#"["\u0000\"\u0000"]"#), r#"["\\x00\"\\x00"]"#);
    }
}
