//! The rules by which PostgreSQL's own programs complete an address: what is given, then a service file, then the
//! environment, then defaults; the password last, from a password file. The driver knows only part of them.
//!
//! <https://www.postgresql.org/docs/current/libpq-connect.html>, libpq-pgservice.html, libpq-pgpass.html

use std::fmt::Write as _;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::database::location::{Environment, LocationError, Secret, SslMode};

/// Service and password files are short; one that is not is a mistake or an attack.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The settings that Fumehood takes, as they were written.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    pub host: Option<String>,
    pub port: Option<String>,
    pub user: Option<String>,
    pub dbname: Option<String>,
    pub password: Option<Secret>,
    pub passfile: Option<String>,
    pub sslmode: Option<String>,
    pub sslrootcert: Option<String>,
    pub sslcert: Option<String>,
    pub sslkey: Option<String>,
    pub connect_timeout: Option<String>,
    pub service: Option<String>,
}

/// A setting's name and the variable that gives its default.
const VARIABLES: [(&str, &str); 12] = [
    ("host", "PGHOST"),
    ("port", "PGPORT"),
    ("user", "PGUSER"),
    ("dbname", "PGDATABASE"),
    ("password", "PGPASSWORD"),
    ("passfile", "PGPASSFILE"),
    ("sslmode", "PGSSLMODE"),
    ("sslrootcert", "PGSSLROOTCERT"),
    ("sslcert", "PGSSLCERT"),
    ("sslkey", "PGSSLKEY"),
    ("connect_timeout", "PGCONNECT_TIMEOUT"),
    ("service", "PGSERVICE"),
];

impl Settings {
    pub const NAMES: [&str; 12] = {
        let mut names = [""; 12];
        let mut at = 0;
        while at < names.len() {
            names[at] = VARIABLES[at].0;
            at += 1;
        }
        names
    };

    /// The first one to say something is heard. An empty value says nothing, as with libpq's variables.
    fn offer(&mut self, name: &str, value: String) -> Result<(), LocationError> {
        let slot = match name {
            "password" => {
                if self.password.is_none() && !value.is_empty() {
                    self.password = Some(Secret(value));
                }
                return Ok(());
            }
            "host" => &mut self.host,
            "port" => &mut self.port,
            "user" => &mut self.user,
            "dbname" => &mut self.dbname,
            "passfile" => &mut self.passfile,
            "sslmode" => &mut self.sslmode,
            "sslrootcert" => &mut self.sslrootcert,
            "sslcert" => &mut self.sslcert,
            "sslkey" => &mut self.sslkey,
            "connect_timeout" => &mut self.connect_timeout,
            "service" => &mut self.service,
            _ => return Err(LocationError::UnknownSetting),
        };
        if slot.is_none() && !value.is_empty() {
            *slot = Some(value);
        }
        Ok(())
    }
}

/// `[USER[:PASSWORD]@][HOST][:PORT][/DATABASE][?NAME=VALUE[&…]]`, the scheme already off.
pub(crate) fn parse_url(text: &str) -> Result<Settings, LocationError> {
    let (before, query) = text.split_once('?').unwrap_or((text, ""));
    let (authority, database) = before.split_once('/').unwrap_or((before, ""));
    let (login, place) = authority.rsplit_once('@').unwrap_or(("", authority));
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    if place.contains(',') {
        return Err(LocationError::SeveralHosts);
    }
    // A password with a bare slash in it would end up here, and be shown as the database's name.
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
    // In the query a later setting overrules an earlier part, so it is asked first.
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').ok_or(LocationError::Form)?;
        settings.offer(&percent_decode(name)?, percent_decode(value)?)?;
    }
    for (name, value) in [
        ("user", user),
        ("password", password),
        ("host", host),
        ("port", port),
        ("dbname", database),
    ] {
        settings.offer(name, percent_decode(value)?)?;
    }
    Ok(settings)
}

fn percent_decode(text: &str) -> Result<String, LocationError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digit = |b: u8| {
            char::from(b)
                .to_digit(16)
                .and_then(|d| u8::try_from(d).ok())
        };
        match rest {
            [high, low, after @ ..] => match (digit(*high), digit(*low)) {
                (Some(high), Some(low)) => {
                    bytes.push(high << 4 | low);
                    rest = after;
                }
                _ => return Err(LocationError::Encoding),
            },
            _ => return Err(LocationError::Encoding),
        }
    }
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(LocationError::Encoding),
    }
}

/// All but what every part of an address may hold, and what the caller says this part may.
pub(crate) fn percent_encode(text: &str, also: &[u8]) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte.is_ascii_alphanumeric() || b"._-".contains(&byte) || also.contains(&byte) {
            true => encoded.push(char::from(byte)),
            // Writing to a String cannot fail.
            false => drop(write!(encoded, "%{byte:02X}")),
        }
    }
    encoded
}

/// Fills in from the service, if one is named, then from the environment.
pub(crate) fn complete(
    mut settings: Settings,
    env: Environment,
) -> Result<Settings, LocationError> {
    let service = match settings.service.clone() {
        Some(service) => Some(service),
        None => variable("PGSERVICE", env)?,
    };
    if let Some(service) = service {
        read_service(&service, &mut settings, env)?;
    }
    for (name, variable_name) in VARIABLES {
        if let Some(value) = variable(variable_name, env)? {
            settings.offer(name, value)?;
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

/// The user's file first, then the system's; the first that has the service is the one.
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
        if offer_service(&text, service, settings, &path)? {
            return Ok(());
        }
    }
    Err(LocationError::NoService {
        service: service.to_owned(),
    })
}

fn offer_service(
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
            // A service cannot name another one.
            let known = name != "service" && !value.contains('\0');
            let offered = known.then(|| settings.offer(name, value.to_owned()));
            offered.ok_or_else(bad)?.map_err(|_| bad())?;
        }
    }
    Ok(found)
}

/// A file's text and mode, from one descriptor.
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

/// The first line that matches, of a file that nobody else can read.
pub(crate) fn password_from_file(
    host: &str,
    port: u16,
    database: &str,
    user: &str,
    settings: &Settings,
    env: Environment,
) -> Result<Option<Secret>, LocationError> {
    let named = settings.passfile.as_ref().map(PathBuf::from);
    let path = match named
        .clone()
        .or_else(|| home(env).map(|home| home.join(".pgpass")))
    {
        Some(path) => path,
        None => return Ok(None),
    };
    let (text, mode) = match read_bounded(&path) {
        Ok(read) => read,
        // The usual place may well be empty or closed; a file that was named is meant.
        Err(_) if named.is_none() => return Ok(None),
        Err(source) => return Err(LocationError::Read { path, source }),
    };
    if mode & 0o077 != 0 {
        return match named {
            // As libpq: not used. The server then says that a password is missing.
            None => Ok(None),
            Some(path) => Err(LocationError::PasswordFileMode { path }),
        };
    }
    // The default socket directory goes by the name of localhost.
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

/// `host:port:database:user:password`, `*` for any, `\:` and `\\` for themselves.
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

/// Up to the next colon without a backslash before it.
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

/// Debian's default. PostgreSQL's own is /tmp, where anybody could have put a socket: it has to be named.
const SOCKET_DIR: &str = "/var/run/postgresql";

/// A socket that is there, else TCP to this machine.
pub(crate) fn default_host(port: u16) -> String {
    let socket = format!("{}/.s.PGSQL.{port}", SOCKET_DIR);
    match Path::new(&socket).exists() {
        true => SOCKET_DIR.to_owned(),
        false => "localhost".to_owned(),
    }
}

/// The name of the account, as the driver finds it.
pub(crate) fn default_user() -> String {
    sqlx::postgres::PgConnectOptions::new_without_pgpass()
        .get_username()
        .to_owned()
}

/// `system` and nothing both mean the system's authorities, unless the usual file is there and verification was asked for.
pub(crate) fn root_certificate(
    settings: &Settings,
    mode: SslMode,
    env: Environment,
) -> Option<PathBuf> {
    match settings.sslrootcert.as_deref() {
        Some("system") => None,
        Some(path) => Some(PathBuf::from(path)),
        None if matches!(mode, SslMode::VerifyCa | SslMode::VerifyFull) => home(env)
            .map(|home| home.join(".postgresql/root.crt"))
            .filter(|path| path.exists()),
        None => None,
    }
}
