//! R's user libraries: where R looks for packages that its user installed.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::caller::CallerEnvironment;
use super::host_files::{self, LinkPolicy};

/// The most directories that one variable may list.
const LIBRARIES_MAX: usize = 64;

pub(super) fn is_r(program: &Path) -> bool {
    matches!(
        program.file_name().and_then(OsStr::to_str),
        Some("R" | "Rscript")
    )
}

/// The values of R's `%v`, `%V` and `%p`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Version {
    /// For example `4.2`.
    short: String,
    /// For example `4.2.2`.
    full: String,
    /// For example `x86_64-pc-linux-gnu`.
    platform: String,
}

/// The variables to set, each with the existing directories that it names. R_LIBS_USER is set explicitly, because `~`
/// is another directory inside.
pub(super) fn libraries(
    program: &Path,
    caller: &CallerEnvironment,
) -> Vec<(OsString, Vec<PathBuf>)> {
    let version = version(program);
    let home = caller.home();
    let mut found = Vec::new();
    for name in ["R_LIBS", "R_LIBS_USER"] {
        let given = caller
            .env
            .get(OsStr::new(name))
            .filter(|value| !value.is_empty());
        let value = match (given, name) {
            (Some(value), _) => value.clone(),
            (None, "R_LIBS_USER") => OsString::from("%U"),
            (None, _) => continue,
        };
        let parts = value.as_bytes().split(|b| *b == b':').take(LIBRARIES_MAX);
        let dirs: Vec<PathBuf> = parts
            .filter_map(|part| expand(part, home.as_deref(), version.as_ref()))
            .filter_map(|path| path.canonicalize().ok())
            .filter(|path| path.is_dir())
            .collect();
        if !dirs.is_empty() {
            found.push((OsString::from(name), dirs));
        }
    }
    found
}

/// Expands `~` and R's `%` conversions. `None` for a relative path, which R would not find either, and for a
/// conversion that cannot be known without starting R.
fn expand(part: &[u8], home: Option<&Path>, version: Option<&Version>) -> Option<PathBuf> {
    let part = match part {
        b"%U" => b"~/R/%p-library/%v".as_slice(),
        _ => part,
    };
    let mut out: Vec<u8> = Vec::new();
    let mut bytes = part.iter().copied();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        match bytes.next()? {
            b'%' => out.push(b'%'),
            b'v' => out.extend(version?.short.bytes()),
            b'V' => out.extend(version?.full.bytes()),
            b'p' => out.extend(version?.platform.bytes()),
            b'o' => out.extend(b"linux-gnu"),
            b'a' => out.extend(version?.platform.split('-').next()?.bytes()),
            _ => return None,
        }
    }
    let path = match out.strip_prefix(b"~") {
        Some(rest) if rest.is_empty() || rest[0] == b'/' => {
            [home?.as_os_str().as_bytes(), rest].concat()
        }
        _ => out,
    };
    let path = PathBuf::from(OsString::from_vec(path));
    host_files::is_plain_absolute(&path).then_some(path)
}

/// Reads R's version from its base package and its configuration, which lie beside the program.
fn version(program: &Path) -> Option<Version> {
    let real = program.canonicalize().ok()?;
    let top = real.parent()?.parent()?;
    let mut homes = ["lib/R", "lib64/R"].iter().map(|dir| top.join(dir));
    let home = homes.find(|dir| dir.join("library/base").is_dir())?;
    let text = host_files::read_text(&home.join("library/base/DESCRIPTION"), LinkPolicy::Follow)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let full = text
        .lines()
        .find_map(|line| line.strip_prefix("Version:"))?
        .trim()
        .to_owned();
    let mut numbers = full.split('.').map(plain_number);
    let short = format!("{}.{}", numbers.next()??, numbers.next()??);
    let usual = || format!("{}-pc-linux-gnu", std::env::consts::ARCH);
    let platform = platform(&home).unwrap_or_else(usual);
    let plain = full.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    plain.then_some(Version {
        short,
        full,
        platform,
    })
}

fn plain_number(text: &str) -> Option<&str> {
    (!text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())).then_some(text)
}

/// Parses `R_PLATFORM=${R_PLATFORM-'x86_64-pc-linux-gnu'}` in R's etc/Renviron.
fn platform(home: &Path) -> Option<String> {
    let text = host_files::read_text(&home.join("etc/Renviron"), LinkPolicy::Follow)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix("R_PLATFORM="))?;
    let value = value
        .trim_start_matches("${R_PLATFORM-")
        .trim_end_matches('}')
        .trim_matches('\'');
    let good = !value.is_empty()
        && value
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b));
    good.then(|| value.to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn expands_what_r_expands() {
        let version = Version {
            short: "4.2".into(),
            full: "4.2.2".into(),
            platform: "x86_64-pc-linux-gnu".into(),
        };
        let home = Path::new("/home/ada");
        let expanded = |part: &str| expand(part.as_bytes(), Some(home), Some(&version));
        assert_eq!(
            expanded("%U").unwrap(),
            Path::new("/home/ada/R/x86_64-pc-linux-gnu-library/4.2")
        );
        assert_eq!(
            expanded("~/lib/%V-%a").unwrap(),
            Path::new("/home/ada/lib/4.2.2-x86_64")
        );
        assert_eq!(expanded("/opt/r%%").unwrap(), Path::new("/opt/r%"));
        for nothing in [
            "", "NULL", "lib", "~bob/R", "/a/../b", "/x/%z", "/x/%", "/a\0b",
        ] {
            assert_eq!(expanded(nothing), None, "{nothing:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_do_not_panic(part in proptest::collection::vec(proptest::num::u8::ANY, 0..80)) {
            expand(&part, Some(Path::new("/home/ada")), None);
        }
    }
}
