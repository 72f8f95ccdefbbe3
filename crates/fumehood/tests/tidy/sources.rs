//! The files of the repository, and their text without comments and literals.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap().to_path_buf()
}

/// Every file of the repository with its path from the root; what is built or fetched is left out.
pub fn files() -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    let mut pending = vec![root()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if ["target", ".git", "corpus", "artifacts"].contains(&name.as_str()) {
                continue;
            }
            let path = entry.path();
            match entry.file_type().unwrap().is_dir() {
                true => pending.push(path),
                false => {
                    let below = path.strip_prefix(root()).unwrap();
                    found.push((below.to_str().unwrap().to_owned(), path));
                }
            }
        }
    }
    found.sort();
    assert!(found.len() > 50, "only {} files were found", found.len());
    found
}

/// Rust files with their text.
pub fn sources() -> Vec<(String, String)> {
    files()
        .into_iter()
        .filter(|(name, _)| name.ends_with(".rs"))
        .map(|(name, path)| (name, fs::read_to_string(path).unwrap()))
        .collect()
}

pub fn read(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Whether a file is for tests alone, as all of testkit is.
pub fn is_test(name: &str) -> bool {
    name.starts_with("crates/testkit/") || name.contains("/tests/") || name.ends_with("/tests.rs")
}

/// The same lines with comments and the insides of literals blanked, so that words are only found in code.
pub fn code(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let blank = |out: &mut Vec<u8>, from: usize, to: usize| {
        for b in &mut out[from..to] {
            if *b != b'\n' {
                *b = b' ';
            }
        }
    };
    let find = |from: usize, what: &[u8]| {
        let found = bytes[from..].windows(what.len()).position(|w| w == what);
        found.map_or(bytes.len(), |at| from + at)
    };
    let mut i = 0;
    while i < bytes.len() {
        let rest = &bytes[i..];
        let end = if rest.starts_with(b"//") {
            find(i, b"\n")
        } else if rest.starts_with(b"/*") {
            (find(i, b"*/") + 2).min(bytes.len())
        } else if let Some(hashes) = raw_string(bytes, i) {
            let close = format!("\"{}", "#".repeat(hashes));
            (find(i + hashes + 2, close.as_bytes()) + close.len()).min(bytes.len())
        } else if rest[0] == b'"' {
            let mut j = i + 1;
            while j < bytes.len() && bytes[j] != b'"' {
                j += if bytes[j] == b'\\' { 2 } else { 1 };
            }
            (j + 1).min(bytes.len())
        } else if rest.starts_with(b"'\\") {
            find(i + 3, b"'") + 1
        } else if rest[0] == b'\'' && rest.get(2) == Some(&b'\'') {
            i + 3
        } else {
            i += 1;
            continue;
        };
        blank(&mut out, i, end);
        i = end;
    }
    String::from_utf8(out).unwrap()
}

/// If a raw string (`r"` or `r#"`) begins here, the number of its hashes.
fn raw_string(bytes: &[u8], at: usize) -> Option<usize> {
    let before = at.checked_sub(1).map(|i| bytes[i]);
    let word = before.is_some_and(|b| b.is_ascii_alphanumeric() && b != b'b' || b == b'_');
    let rest = bytes[at..].strip_prefix(b"r")?;
    let hashes = rest.iter().take_while(|b| **b == b'#').count();
    (!word && rest.get(hashes) == Some(&b'"')).then_some(hashes)
}

pub fn has_word(line: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back().is_some_and(part);
        let after = line[at + word.len()..].chars().next().is_some_and(part);
        !before && !after
    })
}

/// The lines of code that `want` accepts, each with its file and line number. `want` gets the file's name and the line.
pub fn lines_of_code(want: impl Fn(&str, &str) -> bool) -> Vec<String> {
    static CODE: OnceLock<Vec<(String, String)>> = OnceLock::new();
    let all = CODE.get_or_init(|| {
        let blanked = |(name, text): (String, String)| (name, code(&text));
        sources().into_iter().map(blanked).collect()
    });
    let mut found = Vec::new();
    for (name, code) in all {
        for (n, line) in code.lines().enumerate() {
            if want(name, line) {
                found.push(format!("{name}:{}: {}", n + 1, line.trim()));
            }
        }
    }
    found
}

#[track_caller]
pub fn none(found: Vec<String>, rule: &str) {
    assert!(found.is_empty(), "{rule}:\n{}", found.join("\n"));
}

#[test]
fn comments_and_strings_are_removed_before_the_checks() {
    let text = "let a = \"unsafe\"; // unsafe\nlet c = '\"'; unsafe {}\nr#\"todo!() \"x\" \"#;/* mark */ 'a: loop {}";
    let seen = code(text);
    assert_eq!(seen.lines().count(), 3);
    assert!(!seen.lines().next().unwrap().contains("unsafe"));
    assert!(has_word(seen.lines().nth(1).unwrap(), "unsafe"));
    assert!(!seen.contains("todo") && !seen.contains("mark") && seen.contains("loop {}"));
    assert!(!has_word("#![deny(unsafe_code)]", "unsafe"));
}

/// A file of the repository, if it exists.
pub fn read_if_there(name: &str) -> Option<String> {
    fs::read_to_string(root().join(name)).ok()
}

/// The directories of the workspace's crates.
pub fn crates() -> Vec<String> {
    let entries = fs::read_dir(root().join("crates")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    assert!(names.len() >= 5, "only {names:?} were found");
    names
}
