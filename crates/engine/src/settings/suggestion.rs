//! Suggestions for mistyped names, and how much of a name an error repeats.

/// Returns the candidate that is most similar to `word`, if one is similar enough.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Upper case and dashes are the most common mistakes, so ignore both.
    let plain = |text: &str| -> Vec<char> {
        text.chars()
            .take(WORD_CHARS_MAX)
            .map(|c| {
                if c == '-' {
                    '_'
                } else {
                    c.to_ascii_lowercase()
                }
            })
            .collect()
    };
    let word = plain(word);
    let near_enough = (word.len() / 3).max(1);
    candidates
        .into_iter()
        .map(|candidate| (distance(&word, &plain(candidate)), candidate))
        .filter(|(distance, _)| *distance <= near_enough)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// A longer word is not a mistyped name. The bound keeps the comparison small.
const WORD_CHARS_MAX: usize = 64;

/// Returns the Levenshtein distance, computed row by row.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let exchanged = above[j] + usize::from(x != y);
            row.push(exchanged.min(above[j + 1] + 1).min(row[j] + 1));
        }
        above = row;
    }
    above[b.len()]
}

/// Returns the end of an error message that suggests `nearest`, or nothing if there is no suggestion.
pub fn did_you_mean(nearest: &Option<String>) -> String {
    match nearest {
        Some(word) => format!("; did you mean `{word}`?"),
        None => String::new(),
    }
}

/// Returns the first 80 characters of text that somebody else wrote, for an error message.
pub fn excerpt(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::table::SETTINGS;

    #[test]
    fn slips_find_the_right_word() {
        let names = || SETTINGS.iter().map(|s| s.name);
        assert_eq!(nearest("memroy", names()), Some("memory"));
        assert_eq!(nearest("cpu-time", names()), Some("cpu_time"));
        assert_eq!(nearest("TIMEOUT", names()), Some("timeout"));
        assert_eq!(nearest("logs_limit", names()), Some("log_limit"));
        assert_eq!(nearest("zzzzzz", names()), None);
        assert_eq!(nearest("", names()), None);
        assert_eq!(nearest(&"m".repeat(1 << 20), names()), None);
    }
}
