//! The settings of a PostgreSQL address, under libpq's names.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;

/// Looks up an environment variable. Tests pass their own function.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The settings that Fumehood supports, as the user wrote them. No value is empty.
#[derive(Clone, Default)]
pub(crate) struct Settings(BTreeMap<&'static str, String>);

/// The name of each setting and of the variable that holds its default.
pub(crate) const VARIABLES: [(&str, &str); 12] = [
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
    /// The names of all settings.
    pub fn names() -> [&'static str; VARIABLES.len()] {
        VARIABLES.map(|(name, _)| name)
    }

    pub fn get(&self, name: &'static str) -> Option<&str> {
        debug_assert!(Settings::names().contains(&name), "{name}");
        self.0.get(name).map(String::as_str)
    }

    /// Sets a setting that is not set yet. An empty value is ignored, as in libpq's variables.
    pub fn set_if_unset(&mut self, name: &str, value: String) -> Result<(), UnknownSetting> {
        let known = Settings::names().into_iter().find(|known| *known == name);
        let name = known.ok_or(UnknownSetting)?;
        if !value.is_empty() {
            self.0.entry(name).or_insert(value);
        }
        Ok(())
    }
}

/// A name that is not in [`Settings::names`].
pub(crate) struct UnknownSetting;

/// Whether to use TLS and what to check, with libpq's names. Not used for sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SslMode {
    /// Never use TLS.
    Disable,
    /// Like `Disable`, because the driver does not implement libpq's `allow`.
    Allow,
    /// Use TLS if the server offers it.
    #[default]
    Prefer,
    /// Refuse connections without TLS.
    Require,
    /// Like `Require`, and check that a trusted authority signed the certificate.
    VerifyCa,
    /// Like `VerifyCa`, and check that the certificate is for this host.
    VerifyFull,
}

impl SslMode {
    pub(crate) fn parse(text: &str) -> Option<SslMode> {
        Some(match text {
            "disable" => SslMode::Disable,
            "allow" => SslMode::Allow,
            "prefer" => SslMode::Prefer,
            "require" => SslMode::Require,
            "verify-ca" => SslMode::VerifyCa,
            "verify-full" => SslMode::VerifyFull,
            _ => return None,
        })
    }
}

/// A string that `Debug` does not print.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub(crate) String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(withheld)")
    }
}
