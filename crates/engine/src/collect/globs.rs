//! The patterns of `--output` and `--expect`, matched against the bytes of paths.

use std::collections::HashSet;

use globset::{Candidate, GlobBuilder, GlobSet, GlobSetBuilder};

use store::types::manifest::{Output, OutputPath};

/// The most patterns, and the most bytes in one: compiled patterns take memory.
pub(crate) const GLOBS_MAX: usize = 64;
pub(crate) const GLOB_BYTES_MAX: usize = 512;
/// The most wildcards, classes and alternatives in all patterns together. Memory and matching time grow with them,
/// and a project's file may contain patterns.
pub(crate) const WILDCARDS_MAX: usize = 256;

/// Why patterns cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum GlobError {
    /// There are too many patterns.
    #[error("{count} patterns are more than {GLOBS_MAX}; join some of them as {{a,b}}")]
    TooMany { count: usize },
    /// A pattern is too long.
    #[error("the pattern {glob:?}... is longer than {GLOB_BYTES_MAX} bytes; shorten it with `*`")]
    TooLong { glob: String },
    /// All patterns together have too many wildcards, classes and alternatives.
    #[error(
        "the patterns have more than {WILDCARDS_MAX} wildcards and alternatives together; use fewer, or take everything"
    )]
    TooManyWildcards,
    /// The pattern is empty or absolute, or names no path below the working directory for another reason.
    #[error(
        "the pattern {glob:?} names no path below the working directory; write it as `plots/*.png`"
    )]
    NoPath { glob: String },
    /// The pattern's syntax is wrong.
    #[error(
        "the pattern {glob:?} cannot be understood; put a backslash before a plain `[`, `{{`, `*` or `?`"
    )]
    Invalid {
        glob: String,
        #[source]
        source: globset::Error,
    },
}

/// Compiled patterns. `*` and `?` match within a component (`?` matches one byte); `**` also matches slashes. A
/// pattern that names a directory matches everything below it; with a trailing `/` it matches only that.
#[derive(Clone, Debug)]
pub struct Globs {
    set: GlobSet,
    given: Vec<String>,
    /// For each pattern of the set, the index in `given` from which it was made.
    made_from: Vec<usize>,
    /// The patterns that match exactly one path.
    names: HashSet<Vec<u8>>,
}

impl Globs {
    /// Compiles patterns. Their number, length and wildcards are bounded.
    pub fn new(globs: &[String]) -> Result<Globs, GlobError> {
        if globs.len() > GLOBS_MAX {
            return Err(GlobError::TooMany { count: globs.len() });
        }
        let wild = |byte: &u8| b"*?[{,".contains(byte);
        let wildcards = globs.iter().flat_map(|glob| glob.bytes()).filter(wild);
        if wildcards.count() > WILDCARDS_MAX {
            return Err(GlobError::TooManyWildcards);
        }
        let mut builder = GlobSetBuilder::new();
        let mut made_from = Vec::new();
        for (index, glob) in globs.iter().enumerate() {
            for pattern in patterns(glob)? {
                let compiled = GlobBuilder::new(&pattern)
                    .literal_separator(true)
                    .backslash_escape(true)
                    .build()
                    .map_err(|source| invalid_pattern(glob, source))?;
                builder.add(compiled);
                made_from.push(index);
            }
        }
        let shown = globs.first().map_or("", |glob| glob);
        Ok(Globs {
            set: builder
                .build()
                .map_err(|source| invalid_pattern(shown, source))?,
            given: globs.to_vec(),
            made_from,
            names: globs.iter().filter_map(|glob| whole_path(glob)).collect(),
        })
    }

    /// Whether a pattern matches the whole path, or a directory above it.
    pub fn matches(&self, path: &OutputPath) -> bool {
        self.matches_bytes(path.as_bytes())
    }

    pub(super) fn matches_bytes(&self, path: &[u8]) -> bool {
        self.set.is_match_candidate(&Candidate::from_bytes(path))
    }

    /// Whether one of the patterns is this path, without a wildcard.
    pub(super) fn names(&self, path: &[u8]) -> bool {
        !self.names.is_empty() && self.names.contains(path)
    }

    /// The given patterns that match none of the outputs.
    pub(crate) fn unmatched(&self, outputs: &[Output]) -> Vec<String> {
        let mut missing = vec![true; self.given.len()];
        let mut matched = Vec::new();
        for output in outputs {
            let path = Candidate::from_bytes(output.path.as_bytes());
            self.set.matches_candidate_into(&path, &mut matched);
            for index in &matched {
                missing[self.made_from[*index]] = false;
            }
        }
        let given = self.given.iter().zip(missing);
        let missing = given.filter(|(_, missing)| *missing);
        missing.map(|(glob, _)| glob.clone()).collect()
    }
}

/// The path that a pattern without wildcards names.
fn whole_path(glob: &str) -> Option<Vec<u8>> {
    let mut path = glob;
    while let Some(after) = path.strip_prefix("./") {
        path = after;
    }
    let wild = |byte: u8| b"*?[]{},\\!".contains(&byte);
    let plain = !path.is_empty() && !path.ends_with('/') && !path.bytes().any(wild);
    plain.then(|| path.as_bytes().to_vec())
}

fn invalid_pattern(glob: &str, source: globset::Error) -> GlobError {
    GlobError::Invalid {
        glob: glob.to_owned(),
        source,
    }
}

/// The globs for one pattern: the pattern itself, and everything below a directory of that name.
fn patterns(glob: &str) -> Result<Vec<String>, GlobError> {
    if glob.len() > GLOB_BYTES_MAX {
        return Err(GlobError::TooLong {
            glob: glob.chars().take(60).collect(),
        });
    }
    let no_path = || GlobError::NoPath {
        glob: glob.to_owned(),
    };
    let mut rest = glob;
    while let Some(after) = rest.strip_prefix("./") {
        rest = after;
    }
    let plain = rest.trim_end_matches('/');
    let nowhere = |part: &str| part.is_empty() || part == "." || part == "..";
    // A trailing `\` would escape the slash that is appended below.
    if plain.split('/').any(nowhere) || plain.contains('\0') || plain.ends_with('\\') {
        return Err(no_path());
    }
    let below = format!("{plain}/**");
    Ok(match plain.len() < rest.len() {
        true => vec![below],
        false => vec![plain.to_owned(), below],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use store::types::manifest::ContentHash;

    fn globs(given: &[&str]) -> Result<Globs, GlobError> {
        Globs::new(&given.iter().map(|g| (*g).to_owned()).collect::<Vec<_>>())
    }

    fn path(bytes: &[u8]) -> OutputPath {
        OutputPath::new(bytes.to_vec()).unwrap()
    }

    type Paths = &'static [&'static [u8]];

    #[test]
    fn each_glob_matches_its_paths_and_no_others() {
        let cases: &[(&str, Paths, Paths)] = &[
            (
                "*.csv",
                &[b"a.csv", b".csv", b"\xff\n.csv", b"d.csv/inner"],
                &[b"d/a.csv", b"a.csv2"],
            ),
            ("**/*.csv", &[b"a.csv", b"d/e/a.csv"], &[b"a.txt"]),
            (
                "plots",
                &[b"plots", b"plots/a", b"plots/b/c\x1b", b"plots/\xff/\n"],
                &[b"plot", b"plots2/a", b"x/plots/a"],
            ),
            ("plots/", &[b"plots/a", b"plots/b/c"], &[b"plots"]),
            ("./plots/", &[b"plots/a"], &[b"plots"]),
            ("d/*/x", &[b"d/a/x", b"d/a/x/y"], &[b"d/x", b"d/a/b/x"]),
            (
                "{a,b}?",
                &[b"a1", b"b\xff", b"a1/z"],
                &[b"a", b"c1", b"a/z"],
            ),
            ("\\*", &[b"*"], &[b"a"]),
            ("**", &[b"a", b"a/b"], &[]),
            ("[ab]\\[1]", &[b"a[1]"], &[b"a1"]),
        ];
        for (glob, taken, left) in cases {
            let globs = globs(&[glob]).unwrap();
            for bytes in *taken {
                assert!(globs.matches(&path(bytes)), "{glob} {:?}", path(bytes));
            }
            for bytes in *left {
                assert!(!globs.matches(&path(bytes)), "{glob} {:?}", path(bytes));
            }
        }
        assert!(!globs(&[]).unwrap().matches(&path(b"a")));
    }

    #[test]
    fn a_glob_that_cannot_match_is_named_in_the_error() {
        for glob in [
            "", "/", "/abs", "../x", "a/../b", "a//b", ".", "./", "a\0", "a\\/", "a\\",
        ] {
            let error = globs(&["ok", glob]).unwrap_err();
            assert!(matches!(error, GlobError::NoPath { .. }), "{glob}: {error}");
        }
        for glob in ["[a", "{a", "a}", "[z-a]"] {
            let error = globs(&["ok", glob]).unwrap_err();
            assert!(
                matches!(&error, GlobError::Invalid { glob: g, .. } if g == glob),
                "{error}"
            );
        }
        let long = "a".repeat(GLOB_BYTES_MAX + 1);
        assert!(matches!(globs(&[&long]), Err(GlobError::TooLong { .. })));
        let wild = "*a".repeat(WILDCARDS_MAX / 2 + 1);
        assert!(matches!(
            globs(&[&wild, &wild]),
            Err(GlobError::TooManyWildcards | GlobError::TooLong { .. })
        ));
        let half = "*a".repeat(WILDCARDS_MAX / 2);
        globs(&[&half, &half]).unwrap();
        let many = vec!["a"; GLOBS_MAX + 1];
        assert!(matches!(globs(&many), Err(GlobError::TooMany { .. })));
    }

    #[test]
    fn the_worst_patterns_compile_and_match_in_bounded_time() {
        let deep = "{a,b*}".repeat(GLOB_BYTES_MAX / 6);
        let stars = "*a".repeat(GLOB_BYTES_MAX / 2);
        let many: Vec<String> = (0..GLOBS_MAX)
            .map(|n| match n % 2 {
                0 => deep.clone(),
                _ => stars.clone(),
            })
            .collect();
        // A set that is too large may be refused, but must not hang or exhaust memory.
        if let Ok(globs) = Globs::new(&many) {
            assert!(!globs.matches(&path(&[b'z'; 4000])));
        }
    }

    #[test]
    fn patterns_that_found_nothing_are_named() {
        let output = |name: &str| Output {
            path: path(name.as_bytes()),
            bytes: 0,
            blake3: ContentHash::of(b""),
            media_type: String::new(),
            modified_ms: 0,
            inode: 0,
        };
        let globs = globs(&["result.json", "plots/", "*.csv", "plots/a.png"]).unwrap();
        let found = [output("plots/a.png"), output("x/y.csv")];
        assert_eq!(globs.unmatched(&found), ["result.json", "*.csv"]);
        assert_eq!(globs.unmatched(&[]).len(), 4);
    }
}
