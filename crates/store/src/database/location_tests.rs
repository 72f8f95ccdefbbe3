use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::*;

/// A password that must not appear in any output.
const MARKER: &str = "hunter2-the-marker";

fn parse_with(
    text: &str,
    origin: LocationOrigin,
    variables: &[(&str, &str)],
) -> Result<Location, LocationError> {
    let find = |name: &str| {
        let found = variables.iter().find(|(n, _)| *n == name);
        found.map(|(_, value)| OsString::from(value))
    };
    Location::parse(text, origin, &find)
}

fn server_of(text: &str, variables: &[(&str, &str)]) -> PostgresAddress {
    match parse_with(text, LocationOrigin::Environment, variables) {
        Ok(Location::Postgres(server)) => *server,
        other => panic!("{text}: {other:?}"),
    }
}

fn write(dir: &Path, name: &str, text: &str, mode: u32) -> String {
    let path = dir.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn none_and_files() {
    let parse = |text| parse_with(text, LocationOrigin::CommandLine, &[]);
    assert_eq!(parse("none").unwrap(), Location::None);
    assert_eq!(parse(" none\n").unwrap(), Location::None);
    for (text, path) in [
        ("sqlite:a.db", "a.db"),
        ("sqlite:/x/a b?c#d%41.db", "/x/a b?c#d%41.db"),
        ("sqlite://a.db", "a.db"),
        ("sqlite:///x/a.db", "/x/a.db"),
    ] {
        assert_eq!(parse(text).unwrap(), Location::Sqlite(PathBuf::from(path)));
    }
    for bad in [
        "",
        "sqlite:",
        "sqlite://",
        "sqlite::memory:",
        "mysql://x",
        "a.db",
        "postgres:x",
        "NONE",
    ] {
        assert!(parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn an_address_in_full() {
    let server = server_of(
        "postgres://al%40ice:p%2fw@[::1]:5433/my%20db?sslmode=verify-full&connect_timeout=3",
        &[],
    );
    assert_eq!((server.host.as_str(), server.port), ("::1", 5433));
    assert_eq!(
        (server.user.as_str(), server.database.as_str()),
        ("al@ice", "my db")
    );
    assert_eq!(server.password(), Some("p/w"));
    assert_eq!(
        (server.ssl_mode, server.connect_limit_ms),
        (SslMode::VerifyFull, 3_000)
    );
    let server = server_of("postgresql:///lab?host=/run/x&port=7&user=bob", &[]);
    assert_eq!(
        (server.host.as_str(), server.port, server.user.as_str()),
        ("/run/x", 7, "bob")
    );
    assert_eq!(
        server_of("postgres://h", &[("PGUSER", "carol")]).database,
        "carol"
    );
}

#[test]
fn a_displayed_location_parses_to_the_same_server() {
    for text in [
        "postgres://u:pw@host:99/db",
        "postgres://u%40x@host/d%2Fb%20c",
        "postgres:///db?host=/run/a b&user=u",
        "postgres://u@[::1]:5433/db",
    ] {
        let once = server_of(text, &[]);
        let shown = Location::Postgres(Box::new(once.clone())).to_string();
        let twice = server_of(&shown, &[]);
        assert!(!shown.contains("pw"), "{shown}");
        assert_eq!(
            (once.host, once.port, once.user, once.database),
            (twice.host, twice.port, twice.user, twice.database)
        );
    }
}

#[test]
fn a_password_on_the_command_line_is_refused_with_the_remedy() {
    for text in [
        format!("postgres://u:{MARKER}@h/db"),
        format!("postgres://h/db?password={MARKER}"),
        format!("postgres://h/db?pass%77ord={MARKER}"),
    ] {
        let error = parse_with(&text, LocationOrigin::CommandLine, &[]).unwrap_err();
        let shown = format!("{error} {error:?}");
        assert!(
            shown.contains("PGPASSFILE") && shown.contains("FUMEHOOD_DB_FILE"),
            "{shown}"
        );
        assert!(!shown.contains(MARKER));
        // The control: from another origin the same text is accepted.
        for origin in [LocationOrigin::Environment, LocationOrigin::File] {
            let location = parse_with(&text, origin, &[]).unwrap();
            assert_eq!(location.secret(), Some(MARKER));
            assert!(!format!("{location} {location:?} {location:#?}").contains(MARKER));
        }
    }
}

#[test]
fn no_error_repeats_a_mistyped_address() {
    for text in [
        format!("postgres//u:{MARKER}@h/db"),
        format!("u:{MARKER}@h/db"),
        format!("postgres://u:12/{MARKER}@h/db"),
        format!("postgres://u:{MARKER}%zz@h/db"),
        format!("postgres://u:{MARKER}@h:port/db"),
        format!("postgres://h/db?{MARKER}"),
        format!("postgres://h/db?passwort={MARKER}"),
        format!("postgres://h/db?sslmode={MARKER}"),
        format!("postgres://[{MARKER}/db"),
        format!("postgres://u:{MARKER}@h1,h2/db"),
        format!("postgres://u:{MARKER}%00@h/db"),
    ] {
        let error = parse_with(&text, LocationOrigin::Environment, &[]).unwrap_err();
        assert!(!format!("{error} {error:?}").contains(MARKER), "{error:?}");
    }
}

#[test]
fn given_before_service_before_environment_before_default() {
    let dir = tempfile::tempdir().unwrap();
    let file = "# ours\n[other]\nhost=wrong\n[lab]\nhost=svc-host\nport=6001\n user=svc-user \n\n[after]\ndbname=wrong\n";
    let path = write(dir.path(), "services", file, 0o644);
    let variables = [
        ("PGSERVICEFILE", path.as_str()),
        ("PGSERVICE", "lab"),
        ("PGHOST", "env-host"),
        ("PGPORT", "6002"),
        ("PGUSER", "env-user"),
        ("PGDATABASE", "env-db"),
        ("PGSSLMODE", "require"),
        ("PGSSLROOTCERT", "/ca.pem"),
        ("PGPASSWORD", MARKER),
    ];
    let server = server_of("postgres://given-host", &variables);
    assert_eq!((server.host.as_str(), server.port), ("given-host", 6001));
    assert_eq!(
        (server.user.as_str(), server.database.as_str()),
        ("svc-user", "env-db")
    );
    assert_eq!(server.ssl_mode, SslMode::Require);
    assert_eq!(server.ssl_root_cert, Some(PathBuf::from("/ca.pem")));
    assert_eq!(server.password(), Some(MARKER));
    // The service is named in the address, and its file is in a default place.
    let server = server_of("postgres://?service=after", &variables[..1]);
    assert_eq!(server.database, "wrong");
    fs::rename(&path, dir.path().join(".pg_service.conf")).unwrap();
    let home = dir.path().to_str().unwrap();
    let server = server_of("postgres://?service=lab", &[("HOME", home)]);
    assert_eq!(server.host, "svc-host");
    fs::rename(
        dir.path().join(".pg_service.conf"),
        dir.path().join("pg_service.conf"),
    )
    .unwrap();
    let server = server_of("postgres://?service=lab", &[("PGSYSCONFDIR", home)]);
    assert_eq!(server.host, "svc-host");
}

#[test]
fn a_service_that_is_missing_or_misspelt_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!(
        "[lab]\nhost=h\npasswort={MARKER}\n[loop]\nservice=lab\n[ldap]\nldap://x/y\n[open\n"
    );
    let path = write(dir.path(), "services", &text, 0o600);
    for service in ["lab", "loop", "ldap", "nosuch"] {
        let variables = [
            ("PGSERVICEFILE", path.as_str()),
            ("PGSERVICE", service),
            ("PGSYSCONFDIR", "/nonexistent"),
        ];
        let error = parse_with("postgres://", LocationOrigin::Environment, &variables).unwrap_err();
        assert!(!format!("{error} {error:?}").contains(MARKER));
    }
}

#[test]
fn password_files_follow_libpq() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!(
        "# h:1:db:u:comment\nh:1:db:short\nother:*:*:*:no\nh:1:db:wrong:no\nh\\:x:*:*:*:colon\n\
         h:1:db:u\\\\v:back\\:slash\\\\\nlocalhost:5432:db:u:socket\nh:*:*:u:{MARKER}\nh:*:*:u:later\n*:*:*:empty:\n"
    );
    let path = write(dir.path(), "pass", &text, 0o600);
    let password = |address: &str| {
        let server = server_of(address, &[("PGPASSFILE", path.as_str())]);
        server.password().map(str::to_owned)
    };
    assert_eq!(password("postgres://u@h:1/db").as_deref(), Some(MARKER));
    assert_eq!(
        password("postgres://u%5Cv@h:1/db").as_deref(),
        Some("back:slash\\")
    );
    assert_eq!(
        password("postgres://u@h%3Ax:9/any").as_deref(),
        Some("colon")
    );
    assert_eq!(password("postgres://u@other/db").as_deref(), Some("no"));
    assert_eq!(
        password("postgres:///db?host=/var/run/postgresql&user=u").as_deref(),
        Some("socket")
    );
    assert_eq!(password("postgres:///db?host=/elsewhere&user=u"), None);
    assert_eq!(password("postgres://empty@z/db"), None);
    // An explicit password overrides the file.
    assert_eq!(
        password("postgres://u:given@h:1/db").as_deref(),
        Some("given")
    );
}

#[test]
fn a_password_file_that_others_may_read_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    for mode in [0o640, 0o604, 0o660, 0o602] {
        let path = write(dir.path(), ".pgpass", &format!("*:*:*:*:{MARKER}\n"), mode);
        let error = parse_with(
            "postgres://h",
            LocationOrigin::Environment,
            &[("PGPASSFILE", &path)],
        )
        .unwrap_err();
        assert!(
            matches!(error, LocationError::PasswordFileMode { .. }),
            "{error}"
        );
        assert!(!format!("{error} {error:?}").contains(MARKER));
        // In its default place such a file is ignored, as libpq does.
        let server = server_of("postgres://h", &[("HOME", dir.path().to_str().unwrap())]);
        assert_eq!(server.password(), None);
    }
    write(dir.path(), ".pgpass", &format!("*:*:*:*:{MARKER}\n"), 0o600);
    let server = server_of("postgres://h", &[("HOME", dir.path().to_str().unwrap())]);
    assert_eq!(server.password(), Some(MARKER));
    let missing = parse_with(
        "postgres://h",
        LocationOrigin::Environment,
        &[("PGPASSFILE", "/nonexistent")],
    );
    assert!(matches!(missing.unwrap_err(), LocationError::Read { .. }));
}
