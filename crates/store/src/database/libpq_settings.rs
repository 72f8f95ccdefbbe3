//! The settings of a PostgreSQL address, under libpq's names.

use std::ffi::OsString;
use std::fmt;

/// Looks up an environment variable. Tests pass their own function.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The settings that Fumehood supports, as the user wrote them.
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
    pub const NAMES: [&str; 12] = {
        let mut names = [""; 12];
        let mut at = 0;
        while at < names.len() {
            names[at] = VARIABLES[at].0;
            at += 1;
        }
        names
    };

    /// Sets a setting that is not set yet. An empty value is ignored, as in libpq's variables.
    pub fn set_if_unset(&mut self, name: &str, value: String) -> Result<(), UnknownSetting> {
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
            _ => return Err(UnknownSetting),
        };
        if slot.is_none() && !value.is_empty() {
            *slot = Some(value);
        }
        Ok(())
    }
}

/// A name that is not in [`Settings::NAMES`].
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
