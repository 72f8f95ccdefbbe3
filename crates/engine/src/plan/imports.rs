//! Finds the modules that a Python source names in its import statements, without executing anything.
//!
//! This is a scanner, not a parser. It drops strings and comments, joins continued lines, and looks at each statement
//! that begins with `import` or `from`. It may find a name that the program never imports; the caller only takes
//! files that exist. It does not find imports with computed names.

/// The longest name of a module; longer names are ignored.
const NAME_BYTES_MAX: usize = 128;
/// The most parts of a dotted name, and the most leading dots.
const PARTS_MAX: usize = 16;

/// One module that an import statement names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Import {
    /// The number of leading dots: how far above the importing module the name begins. 0 for an absolute import.
    pub dots: usize,
    pub parts: Vec<String>,
}

/// Calls `found` with every module that `source` names, until a call fails. `from a import b` names both `a` and
/// `a.b`, since `b` may be a module.
///
/// Nothing is collected here: a name of two bytes can stand for an [`Import`] of a thousand bytes, and a source may
/// hold millions of names.
pub(super) fn imports<E>(
    source: &[u8],
    mut found: impl FnMut(Import) -> Result<(), E>,
) -> Result<(), E> {
    let text = String::from_utf8_lossy(source);
    statements(&text, |statement| {
        if let Some(rest) = keyword(statement, "import") {
            for item in rest.split(',') {
                let name = item.split_whitespace().next().unwrap_or_default();
                if let Some(parts) = dotted(name) {
                    found(Import { dots: 0, parts })?;
                }
            }
        } else if let Some(rest) = keyword(statement, "from") {
            from(rest, &mut found)?;
        }
        Ok(())
    })
}

/// Parses what follows `from`, for example `.x import (y as z, w)`.
fn from<E>(rest: &str, found: &mut impl FnMut(Import) -> Result<(), E>) -> Result<(), E> {
    let rest = rest.trim_start();
    let after_dots = rest.trim_start_matches(['.', ' ', '\t']);
    let dots = rest[..rest.len() - after_dots.len()].matches('.').count();
    let end = after_dots
        .find(|c: char| c.is_whitespace())
        .unwrap_or(after_dots.len());
    // `from . import y` names no module after the dots.
    let (module, names) = match keyword(after_dots, "import") {
        Some(names) if dots > 0 => ("", names),
        _ => match keyword(after_dots[end..].trim_start(), "import") {
            Some(names) => (&after_dots[..end], names),
            None => return Ok(()),
        },
    };
    let base = match module.is_empty() {
        true => Some(Vec::new()),
        false => dotted(module),
    };
    let Some(base) = base.filter(|_| dots <= PARTS_MAX) else {
        return Ok(());
    };
    found(Import {
        dots,
        parts: base.clone(),
    })?;
    for item in names
        .trim_matches(|c: char| c.is_whitespace() || "()".contains(c))
        .split(',')
    {
        let name = item.split_whitespace().next().unwrap_or_default();
        if let Some(last) = dotted(name).filter(|parts| parts.len() == 1) {
            let parts = base.iter().cloned().chain(last).collect();
            found(Import { dots, parts })?;
        }
    }
    Ok(())
}

/// The text after `word`, if the statement begins with that keyword.
fn keyword<'a>(statement: &'a str, word: &str) -> Option<&'a str> {
    let rest = statement.strip_prefix(word)?;
    let ends = |c: char| c.is_whitespace() || c == '(' || c == '.' || c == '*';
    rest.starts_with(ends).then_some(rest)
}

/// The parts of a dotted name. `None` unless each part is an identifier, so that no part is a path.
fn dotted(name: &str) -> Option<Vec<String>> {
    let good = |part: &str| {
        !part.is_empty()
            && part.len() <= NAME_BYTES_MAX
            && !part.starts_with(|c: char| c.is_numeric())
            && part.chars().all(|c| c.is_alphanumeric() || c == '_')
    };
    let parts: Vec<&str> = name.split('.').take(PARTS_MAX + 1).collect();
    let all = parts.len() <= PARTS_MAX && parts.iter().all(|part| good(part));
    all.then(|| parts.into_iter().map(str::to_owned).collect())
}

/// Calls `each` with the statements of a source, trimmed and without strings and comments. A colon outside of
/// brackets also ends a statement: the body of a one-line `if` or `try` follows it.
fn statements<E>(text: &str, mut each: impl FnMut(&str) -> Result<(), E>) -> Result<(), E> {
    let mut one = String::new();
    let mut depth = 0usize;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let mut taken = c.len_utf8();
        match c {
            '#' => taken = rest.find('\n').unwrap_or(rest.len()),
            '"' | '\'' => {
                taken = string_bytes(rest, c);
                one.push('"');
            }
            // A continued line.
            '\\' => {
                let after = &rest[1..];
                let line_end = ["\r\n", "\n"].iter().find(|end| after.starts_with(**end));
                taken += line_end.map_or(0, |end| end.len());
                one.push(' ');
            }
            '\n' | '\r' | ';' | ':' if depth == 0 => {
                each(one.trim())?;
                one.clear();
            }
            '\n' | '\r' => one.push(' '),
            c => {
                match c {
                    '(' | '[' | '{' => depth += 1,
                    ')' | ']' | '}' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                one.push(c);
            }
        }
        rest = &rest[taken..];
    }
    each(one.trim())
}

/// The length of the string literal that `rest` begins with. An unclosed literal in single quotes ends with its line.
fn string_bytes(rest: &str, quote: char) -> usize {
    let triple: String = [quote; 3].iter().collect();
    let (open, close) = match rest.starts_with(&triple) {
        true => (3, triple.as_str()),
        false => (1, &triple[..1]),
    };
    let bytes = rest.as_bytes();
    let mut at = open;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 1,
            b'\n' if open == 1 => return at,
            _ if bytes[at..].starts_with(close.as_bytes()) => return at + close.len(),
            _ => {}
        }
        at += 1;
    }
    rest.len()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn found(source: &[u8]) -> Vec<Import> {
        let mut all = Vec::new();
        let Ok(()) = imports(source, |import| {
            all.push(import);
            Ok::<(), std::convert::Infallible>(())
        });
        all
    }

    fn names(source: &str) -> Vec<String> {
        let shown = |i: &Import| format!("{}{}", ".".repeat(i.dots), i.parts.join("."));
        found(source.as_bytes()).iter().map(shown).collect()
    }

    #[test]
    fn statements_name_modules() {
        for (source, expected) in [
            ("import a", "a"),
            ("import a.b as x, c", "a.b c"),
            ("import a,b # , c", "a b"),
            ("from a import b as x, c", "a a.b a.c"),
            ("from a.b import *", "a.b"),
            ("from . import x", ". .x"),
            ("from .y import (\n  z, # no\n  w,\n)", ".y .y.z .y.w"),
            ("from..p import q", "..p ..p.q"),
            ("from .import x", ". .x"),
            ("from a import(b)", "a a.b"),
            (
                "try: import a\nexcept ImportError: import b; import c",
                "a b c",
            ),
            ("if x:\n    import \\\n      a", "a"),
            ("'''\nimport no\n'''\nimport a", "a"),
            (
                "x = 'import no'\ny = \"\"\"a\nimport no \\\"\"\" \"\"\"\nimport a",
                "a",
            ),
            ("x = 'not closed\nimport a", "a"),
            ("f(x,\nimport_me)\nimportant = 1\nfromage = 2", ""),
            (
                "import ../a\nimport a/b\nimport ..\nimport 1a\nfrom /etc import b",
                "",
            ),
            ("import größe", "größe"),
        ] {
            assert_eq!(names(source).join(" "), expected, "{source}");
        }
        let deep = vec!["a"; PARTS_MAX + 1].join(".");
        assert_eq!(names(&format!("import {deep}")), [""; 0]);
    }

    #[test]
    fn the_first_failure_ends_the_scan() {
        let mut seen = 0;
        let ended = imports(b"import a, b\nfrom c import d, e", |_| {
            seen += 1;
            if seen == 3 { Err(()) } else { Ok(()) }
        });
        assert_eq!((ended, seen), (Err(()), 3));
    }

    proptest! {
        #[test]
        fn any_bytes_give_names_that_are_no_paths(source in prop::collection::vec(any::<u8>(), 0..400)) {
            for import in found(&source) {
                prop_assert!(import.parts.iter().all(|p| !p.contains(['/', '.', '\0']) && !p.is_empty()));
            }
        }

        #[test]
        fn pieces_of_python_never_panic(pieces in prop::collection::vec(prop::sample::select(vec!["import", "from", " ", ".", "a", ",", "(", ")", "\n", "\\", "'", "\"\"\"", "#", ":", ";", "*", "ä", "as"]), 0..60)) {
            found(pieces.concat().as_bytes());
        }
    }
}
