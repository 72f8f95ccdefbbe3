//! Guesses the media type of a file, for people and for the header with which it is served. Nothing is parsed: known
//! first bytes decide, or else the file name extension chooses among text types. The type says nothing about safety,
//! except that content which a browser would run as HTML or SVG never gets a harmless type.

/// The number of first bytes to look at.
pub(super) const HEAD_BYTES: usize = 512;

const UNKNOWN: &str = "application/octet-stream";
const GZIP: &str = "application/gzip";
const ZIP: &str = "application/zip";
const HTML: &str = "text/html";
const SVG: &str = "image/svg+xml";
const R_DATA: &str = "application/x-r-data";

/// (offset, bytes at that offset, media type).
const MAGIC: &[(usize, &[u8], &str)] = &[
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF87a", "image/gif"),
    (0, b"GIF89a", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (8, b"WAVE", "audio/wav"),
    (0, b"II*\0", "image/tiff"),
    (0, b"MM\0*", "image/tiff"),
    (0, b"II+\0\x08\0\0\0", "image/tiff"),
    (0, b"SIMPLE  =", "image/fits"),
    (0, b"%PDF-", "application/pdf"),
    (0, b"%!PS-", "application/postscript"),
    (0, b"\x1f\x8b", GZIP),
    (0, b"\x28\xb5\x2f\xfd", "application/zstd"),
    (0, b"\xfd7zXZ\0", "application/x-xz"),
    (4, b"1AY&SY", "application/x-bzip2"),
    (0, b"PK\x03\x04", ZIP),
    (0, b"PK\x05\x06", ZIP),
    (257, b"ustar", "application/x-tar"),
    (0, b"\x89HDF\r\n\x1a\n", "application/x-hdf5"),
    (0, b"CDF\x01", "application/x-netcdf"),
    (0, b"CDF\x02", "application/x-netcdf"),
    (0, b"CDF\x05", "application/x-netcdf"),
    (0, b"PAR1", "application/vnd.apache.parquet"),
    (0, b"ARROW1\0\0", "application/vnd.apache.arrow.file"),
    (0, b"SQLite format 3\0", "application/vnd.sqlite3"),
    (0, b"\x93NUMPY", "application/x-npy"),
    (0, b"MATLAB 5.0 MAT-file", "application/x-matlab-data"),
    (0, b"RDX2\nX\n", R_DATA),
    (0, b"RDX3\nX\n", R_DATA),
    (0, b"X\n\0\0\0\x02", R_DATA),
    (0, b"X\n\0\0\0\x03", R_DATA),
    (0, b"\x7fELF", "application/x-elf"),
];

/// Bytes at the start of the file that must accompany the entries of [`MAGIC`] with these offsets.
const CONTAINERS: &[(usize, &[u8])] = &[(8, b"RIFF"), (4, b"BZh")];

/// (media type of a container, file name extension, media type of the content).
const CONTAINER_CONTENT: &[(&str, &str, &str)] = &[
    (ZIP, "npz", "application/x-npz"),
    (
        ZIP,
        "xlsx",
        "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    ),
    (
        ZIP,
        "docx",
        "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    ),
    (
        ZIP,
        "pptx",
        "application/vnd.openxmlformats-officedocument.presentationml.presentation",
    ),
    (ZIP, "ods", "application/vnd.oasis.opendocument.spreadsheet"),
    (ZIP, "odt", "application/vnd.oasis.opendocument.text"),
    (GZIP, "rds", R_DATA),
    (GZIP, "rda", R_DATA),
    (GZIP, "rdata", R_DATA),
    // A browser decompresses it and runs the content.
    (GZIP, "svgz", SVG),
    ("application/x-bzip2", "rdata", R_DATA),
    ("application/x-xz", "rdata", R_DATA),
];

/// (file name extension, media type) for content that is text.
const TEXT_BY_EXTENSION: &[(&str, &str)] = &[
    ("csv", "text/csv"),
    ("tsv", "text/tab-separated-values"),
    ("json", "application/json"),
    ("geojson", "application/geo+json"),
    ("jsonl", "application/x-ndjson"),
    ("ndjson", "application/x-ndjson"),
    ("ipynb", "application/x-ipynb+json"),
    ("md", "text/markdown"),
    ("markdown", "text/markdown"),
    ("xml", "application/xml"),
    ("yaml", "application/yaml"),
    ("yml", "application/yaml"),
    ("toml", "application/toml"),
    ("tex", "text/x-tex"),
    ("css", "text/css"),
    ("js", "text/javascript"),
    ("mjs", "text/javascript"),
    ("py", "text/x-python"),
    ("r", "text/x-r"),
    ("sh", "text/x-shellscript"),
    ("log", "text/plain"),
    ("txt", "text/plain"),
];

/// (file name extension, media type) for any content: browsers run these in any encoding, and with anything before
/// the first tag.
const ACTIVE_BY_EXTENSION: &[(&str, &str)] = &[
    ("html", HTML),
    ("htm", HTML),
    ("xhtml", "application/xhtml+xml"),
    ("svg", SVG),
];

/// Tags that make a browser which guesses the type guess HTML.
const HTML_TAGS: &[&[u8]] = &[
    b"<!doctype html",
    b"<html",
    b"<head",
    b"<body",
    b"<script",
    b"<iframe",
    b"<title",
    b"<style",
    b"<table",
    b"<div",
    b"<h1",
    b"<img",
    b"<a ",
    b"<p>",
    b"<br",
    b"<b>",
    b"<font",
];

/// What the first bytes of a file look like, regardless of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentGuess {
    Magic(&'static str),
    Markup(&'static str),
    Text,
    Empty,
    Binary,
}

/// `head` is the beginning of the content, up to [`HEAD_BYTES`]; `whole_bytes` is the length of the content.
pub(super) fn guess_content(head: &[u8], whole_bytes: u64) -> ContentGuess {
    let head = &head[..head.len().min(HEAD_BYTES)];
    match (by_magic(head), by_tag(head)) {
        (Some(kind), _) => ContentGuess::Magic(kind),
        _ if !is_text(head, whole_bytes) => ContentGuess::Binary,
        (None, Some(kind)) => ContentGuess::Markup(kind),
        _ if head.is_empty() => ContentGuess::Empty,
        _ => ContentGuess::Text,
    }
}

pub(super) fn media_type(path: &[u8], guess: ContentGuess) -> &'static str {
    let extension = extension(path);
    let find = |rows: &[(&str, &'static str)]| {
        let mut rows = rows.iter();
        rows.find(|row| row.0 == extension).map(|row| row.1)
    };
    let active = || find(ACTIVE_BY_EXTENSION);
    let text = || find(TEXT_BY_EXTENSION);
    match guess {
        ContentGuess::Magic(kind) => {
            let inside = |row: &&(&str, &str, &str)| row.0 == kind && row.1 == extension;
            let mut rows = CONTAINER_CONTENT.iter();
            rows.find(inside).map_or(kind, |row| row.2)
        }
        ContentGuess::Markup(kind) => active().unwrap_or(kind),
        ContentGuess::Text => active().or_else(text).unwrap_or("text/plain"),
        ContentGuess::Empty => active().or_else(text).unwrap_or(UNKNOWN),
        ContentGuess::Binary => active().unwrap_or(UNKNOWN),
    }
}

/// The file name extension in lower case. Empty if there is none, or if it is too long to be known.
fn extension(path: &[u8]) -> String {
    let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
    match name.iter().rposition(|b| *b == b'.') {
        Some(dot) if dot > 0 && name.len() - dot <= 12 => {
            String::from_utf8_lossy(&name[dot + 1..]).to_ascii_lowercase()
        }
        _ => String::new(),
    }
}

fn by_magic(head: &[u8]) -> Option<&'static str> {
    let stands =
        |at: usize, bytes: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(bytes));
    let (_, _, kind) = MAGIC.iter().find(|(at, bytes, _)| {
        let before = CONTAINERS.iter().find(|c| c.0 == *at);
        stands(*at, bytes) && before.is_none_or(|(_, bytes)| stands(0, bytes))
    })?;
    Some(kind)
}

/// Whether the head is UTF-8 without control characters other than those of texts and terminals. A character may be
/// cut off at the end of the head, but not at the end of the content.
fn is_text(head: &[u8], whole_bytes: u64) -> bool {
    let control = |b: &u8| {
        *b < 0x20 && !matches!(b, b'\t' | b'\n' | b'\r' | 0x0c | 0x08 | 0x1b) || *b == 0x7f
    };
    if head.iter().any(control) {
        return false;
    }
    match std::str::from_utf8(head) {
        Ok(_) => true,
        Err(e) => e.error_len().is_none() && (head.len() as u64) < whole_bytes,
    }
}

fn by_tag(head: &[u8]) -> Option<&'static str> {
    let text = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    let start = text.trim_ascii_start().to_ascii_lowercase();
    // Only content that begins as markup counts: a table that mentions a tag stays a table.
    if !start.starts_with(b"<") {
        return None;
    }
    let has = |tag: &[u8]| start.windows(tag.len()).any(|w| w == tag);
    if has(b"<svg") || has(b"<!doctype svg") {
        return Some(SVG);
    }
    if HTML_TAGS.iter().any(|tag| has(tag)) || has(b"http://www.w3.org/1999/xhtml") {
        return Some(HTML);
    }
    start.starts_with(b"<?xml").then_some("application/xml")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(path: &str, content: &[u8]) -> &'static str {
        media_type(
            path.as_bytes(),
            guess_content(content, content.len() as u64),
        )
    }

    #[test]
    fn first_bytes_come_before_the_ending() {
        let cases: &[(&str, &[u8], &str)] = &[
            ("x.txt", b"\x89PNG\r\n\x1a\n....", "image/png"),
            ("x", b"\xff\xd8\xff\xe0", "image/jpeg"),
            ("x", b"GIF89a..", "image/gif"),
            ("x", b"RIFF\x10\0\0\0WEBPVP8 ", "image/webp"),
            ("x", b"RIFF\x10\0\0\0WAVEfmt ", "audio/wav"),
            ("x", b"12345678WEBP", "text/plain"),
            ("x", b"%PDF-1.7", "application/pdf"),
            ("x.gz", b"\x1f\x8b\x08", "application/gzip"),
            ("fit.rds", b"\x1f\x8b\x08", R_DATA),
            ("fit.RData", b"\x1f\x8b\x08", R_DATA),
            ("a.svgz", b"\x1f\x8b\x08", SVG),
            (
                "t.xlsx",
                b"PK\x03\x04",
                "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
            ),
            (
                "t.docx",
                b"PK\x03\x04",
                "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
            ),
            ("t.npz", b"PK\x03\x04", "application/x-npz"),
            ("t.zip", b"PK\x03\x04", "application/zip"),
            ("t.h5", b"\x89HDF\r\n\x1a\n", "application/x-hdf5"),
            ("t", b"PAR1\x15", "application/vnd.apache.parquet"),
            ("t", b"ARROW1\0\0", "application/vnd.apache.arrow.file"),
            ("t", b"SQLite format 3\0", "application/vnd.sqlite3"),
            ("t", b"\x93NUMPY\x01", "application/x-npy"),
            ("t", b"\x28\xb5\x2f\xfd", "application/zstd"),
            ("t", b"\xfd7zXZ\0", "application/x-xz"),
            ("t", b"BZh91AY&SY", "application/x-bzip2"),
            ("t", b"xxxx1AY&SY", "text/plain"),
            ("t", b"II*\0\x08", "image/tiff"),
            ("t", b"RDX3\nX\n\0\0", R_DATA),
            ("t.html", b"GIF89a<script>", "image/gif"),
        ];
        for (path, content, want) in cases {
            assert_eq!(kind(path, content), *want, "{path}");
        }
    }

    #[test]
    fn texts_by_their_ending() {
        let cases: &[(&str, &[u8], &str)] = &[
            ("d/x.csv", b"a,b\n", "text/csv"),
            ("d.csv/x", b"a,b\n", "text/plain"),
            ("x.CSV", b"a,b\n", "text/csv"),
            ("x.tsv", b"a\tb\n", "text/tab-separated-values"),
            ("result.json", b"{}", "application/json"),
            ("n.ipynb", b"{}", "application/x-ipynb+json"),
            ("README.md", b"# x", "text/markdown"),
            ("x.vcf", b"##fileformat=VCFv4.2", "text/plain"),
            ("x.fasta", b">seq\nACGT", "text/plain"),
            ("x.xml", b"<a/>", "application/xml"),
            ("x", b"<?xml version='1.0'?><a/>", "application/xml"),
            ("x.csv", b"a\0b", UNKNOWN),
            ("x.csv", b"\xff\xfe", UNKNOWN),
            ("x.csv", b"", "text/csv"),
            ("done", b"", UNKNOWN),
            (".csv", b"a", "text/plain"),
            ("", b"a", "text/plain"),
            ("x.log", b"\x1b[31mred\x1b[0m", "text/plain"),
        ];
        for (path, content, want) in cases {
            assert_eq!(kind(path, content), *want, "{path}");
        }
    }

    #[test]
    fn content_that_a_browser_would_run_is_typed_as_such() {
        for (path, content, want) in [
            ("x.txt", "  \n<!DOCTYPE HTML><p>", HTML),
            ("x.csv", "<script>alert(1)</script>", HTML),
            ("x", "<!-- c --><HTML>", HTML),
            ("x.html", "plain words", HTML),
            ("x.HTM", "", HTML),
            ("x.svg", "<!-- nothing yet -->", SVG),
            (
                "x.txt",
                "<?xml version='1.0'?>\n<!-- c --><svg onload='x'>",
                SVG,
            ),
            ("x.png", "\u{feff}<svg/>", SVG),
        ] {
            assert_eq!(kind(path, content.as_bytes()), want, "{path} {content}");
        }
        assert_eq!(kind("x.html", b"\xff\xfe<\0h\0"), HTML);
        assert_eq!(kind("x.csv", b"name,tag\na,<script>\n"), "text/csv");
    }

    #[test]
    fn a_character_cut_by_the_head_is_no_fault() {
        let mut text = vec![b'a'; HEAD_BYTES - 1];
        text.extend("é and more".as_bytes());
        assert_eq!(kind("x.txt", &text), "text/plain");
        text.truncate(HEAD_BYTES);
        assert_eq!(kind("x.txt", &text), UNKNOWN);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_have_a_type(
            path in proptest::collection::vec(proptest::num::u8::ANY, 0..40),
            head in proptest::collection::vec(proptest::num::u8::ANY, 0..600),
        ) {
            let kind = media_type(&path, guess_content(&head, head.len() as u64));
            proptest::prop_assert!(kind.contains('/') && kind.is_ascii());
        }
    }
}
