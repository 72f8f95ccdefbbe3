//! Completes a PostgreSQL address by libpq's rules: explicit settings first, then a service file, then environment
//! variables, then defaults; the password last, from a password file. The Rust driver implements only a part of these
//! rules.
//!
//! <https://www.postgresql.org/docs/current/libpq-connect.html>, libpq-pgservice.html, libpq-pgpass.html

use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use percent_encoding::percent_decode_str;

use crate::database::libpq_settings::{Environment, Secret, Settings, SslMode, VARIABLES};
use crate::database::location_error::LocationError;

/// Service and password files are short. A longer file is a mistake or an attack.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Parses `[USER[:PASSWORD]@][HOST][:PORT][/DATABASE][?NAME=VALUE[&…]]`, without the scheme.
pub(crate) fn parse_url(text: &str) -> Result<Settings, LocationError> {
    let (before, query) = text.split_once('?').unwrap_or((text, ""));
    let (authority, database) = before.split_once('/').unwrap_or((before, ""));
    let (login, place) = authority.rsplit_once('@').unwrap_or(("", authority));
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    if place.contains(',') {
        return Err(LocationError::SeveralHosts);
    }
    // The slash of a password that is not percent-encoded would end here, and messages would show the rest of the
    // password as the database's name.
    if database.contains(['@', ':', '/']) {
        return Err(LocationError::Form);
    }
    let (host, port) = match place.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']').ok_or(LocationError::Form)?;
            match after.strip_prefix(':') {
                Some(port) => (host, port),
                None if after.is_empty() => (host, ""),
                None => return Err(LocationError::Form),
            }
        }
        None => place.split_once(':').unwrap_or((place, "")),
    };
    let mut settings = Settings::default();
    // A setting in the query overrides the same setting in the rest of the address, so read the query first.
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').ok_or(LocationError::Form)?;
        settings.set_if_unset(&percent_decode(name)?, percent_decode(value)?)?;
    }
    for (name, value) in [
        ("user", user),
        ("password", password),
        ("host", host),
        ("port", port),
        ("dbname", database),
    ] {
        settings.set_if_unset(name, percent_decode(value)?)?;
    }
    Ok(settings)
}

fn percent_decode(text: &str) -> Result<String, LocationError> {
    let is_code = |after: &[u8]| {
        let code = after.get(..2);
        code.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    // The decoder would leave a percent sign without a code as it is.
    let mut after_signs = text.as_bytes().split(|byte| *byte == b'%').skip(1);
    if !after_signs.all(is_code) {
        return Err(LocationError::Encoding);
    }
    match percent_decode_str(text).decode_utf8() {
        Ok(text) if !text.contains('\0') => Ok(text.into_owned()),
        _ => Err(LocationError::Encoding),
    }
}

/// Adds settings from the service, if one is named, then from the environment.
pub(crate) fn complete(
    mut settings: Settings,
    env: Environment,
) -> Result<Settings, LocationError> {
    let service = match settings.get("service") {
        Some(service) => Some(service.to_owned()),
        None => variable("PGSERVICE", env)?,
    };
    if let Some(service) = service {
        read_service(&service, &mut settings, env)?;
    }
    for (name, variable_name) in VARIABLES {
        if let Some(value) = variable(variable_name, env)? {
            settings.set_if_unset(name, value)?;
        }
    }
    Ok(settings)
}

fn variable(name: &'static str, env: Environment) -> Result<Option<String>, LocationError> {
    let value = env(name).filter(|value| !value.is_empty());
    let text = value.map(|value| {
        value
            .into_string()
            .map_err(|_| LocationError::Variable { name })
    });
    text.transpose()
}

fn home(env: Environment) -> Option<PathBuf> {
    env("HOME")
        .filter(|home| !home.is_empty())
        .map(PathBuf::from)
}

/// Reads the user's service file, then the system's. The first file with the service counts.
fn read_service(
    service: &str,
    settings: &mut Settings,
    env: Environment,
) -> Result<(), LocationError> {
    let own = match variable("PGSERVICEFILE", env)? {
        Some(path) => Some(PathBuf::from(path)),
        None => home(env).map(|home| home.join(".pg_service.conf")),
    };
    let system = match variable("PGSYSCONFDIR", env)? {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from("/etc/postgresql-common"),
    };
    for path in own.into_iter().chain([system.join("pg_service.conf")]) {
        let text = match read_bounded(&path) {
            Ok((text, _)) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(LocationError::Read { path, source }),
        };
        if read_service_section(&text, service, settings, &path)? {
            return Ok(());
        }
    }
    Err(LocationError::NoService {
        service: service.to_owned(),
    })
}

fn read_service_section(
    text: &str,
    service: &str,
    settings: &mut Settings,
    path: &Path,
) -> Result<bool, LocationError> {
    let mut found = false;
    for (at, line) in text.lines().enumerate() {
        let bad = || LocationError::ServiceLine {
            path: path.to_owned(),
            line: at + 1,
        };
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            if found {
                return Ok(true);
            }
            found = name.strip_suffix(']').ok_or_else(bad)? == service;
        } else if found {
            let (name, value) = line.split_once('=').ok_or_else(bad)?;
            // A service must not name another service.
            let known = name != "service" && !value.contains('\0');
            let result = known.then(|| settings.set_if_unset(name, value.to_owned()));
            result.ok_or_else(bad)?.map_err(|_| bad())?;
        }
    }
    Ok(found)
}

/// The text and the mode of a file, read through one descriptor.
fn read_bounded(path: &Path) -> io::Result<(String, u32)> {
    let file = std::fs::File::open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut text = String::new();
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    match text.len() as u64 > FILE_BYTES_MAX {
        true => Err(io::Error::other("it is larger than 1 MiB")),
        false => Ok((text, found.permissions().mode())),
    }
}

/// The password from the first matching line of the password file. The file must not be readable for others.
pub(crate) fn password_from_file(
    host: &str,
    port: u16,
    database: &str,
    user: &str,
    settings: &Settings,
    env: Environment,
) -> Result<Option<Secret>, LocationError> {
    let named = settings.get("passfile").map(PathBuf::from);
    let path = match named
        .clone()
        .or_else(|| home(env).map(|home| home.join(".pgpass")))
    {
        Some(path) => path,
        None => return Ok(None),
    };
    let (text, mode) = match read_bounded(&path) {
        Ok(read) => read,
        // The default file may be missing or unreadable. A file that the user named must work.
        Err(_) if named.is_none() => return Ok(None),
        Err(source) => return Err(LocationError::Read { path, source }),
    };
    if mode & 0o077 != 0 {
        return match named {
            // Like libpq, ignore the file. The server then reports the missing password.
            None => Ok(None),
            Some(path) => Err(LocationError::PasswordFileMode { path }),
        };
    }
    // In password files the default socket directory is called localhost.
    let host = match host == SOCKET_DIR {
        true => "localhost",
        false => host,
    };
    let port = port.to_string();
    let wanted = [host, &port, database, user];
    Ok(text
        .lines()
        .find_map(|line| line_password(line, &wanted))
        .map(Secret))
}

/// Parses a line `host:port:database:user:password`. `*` matches anything; `\:` and `\\` are escapes.
fn line_password(line: &str, wanted: &[&str; 4]) -> Option<String> {
    if line.starts_with('#') {
        return None;
    }
    let mut rest = line;
    for wanted in wanted {
        let (raw, after) = split_field(rest)?;
        if raw != "*" && unescape(raw) != *wanted {
            return None;
        }
        rest = after;
    }
    let password = split_field(rest).map_or(rest, |(password, _)| password);
    Some(unescape(password)).filter(|password| !password.is_empty())
}

/// Splits at the first colon that has no backslash before it.
fn split_field(text: &str) -> Option<(&str, &str)> {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            ':' if !escaped => return Some((&text[..at], &text[at + 1..])),
            '\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    None
}

fn unescape(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => plain.extend(chars.next()),
            c => plain.push(c),
        }
    }
    plain
}

/// Debian's default. PostgreSQL's own default is /tmp, where anybody could have created a socket, so the user has to
/// name it.
const SOCKET_DIR: &str = "/var/run/postgresql";

/// The default socket directory if it has a socket for this port, otherwise TCP to this machine.
pub(crate) fn default_host(port: u16) -> String {
    let socket = format!("{}/.s.PGSQL.{port}", SOCKET_DIR);
    match Path::new(&socket).exists() {
        true => SOCKET_DIR.to_owned(),
        false => "localhost".to_owned(),
    }
}

/// The name of the user's account, as the driver determines it.
pub(crate) fn default_user() -> String {
    sqlx::postgres::PgConnectOptions::new_without_pgpass()
        .get_username()
        .to_owned()
}

/// The file with root certificates. `system` means the system's certificate authorities. Without a setting the
/// default file is used if it exists and the mode asks for verification.
pub(crate) fn root_certificate(
    settings: &Settings,
    mode: SslMode,
    env: Environment,
) -> Option<PathBuf> {
    match settings.get("sslrootcert") {
        Some("system") => None,
        Some(path) => Some(PathBuf::from(path)),
        None if matches!(mode, SslMode::VerifyCa | SslMode::VerifyFull) => home(env)
            .map(|home| home.join(".postgresql/root.crt"))
            .filter(|path| path.exists()),
        None => None,
    }
}
