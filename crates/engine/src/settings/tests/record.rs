//! Where results go, who may decide that, and what of a run is kept.

use super::*;
use crate::request::{CollectionSettings, IdReuse};

use crate::settings::database_url::holds_password;
use crate::settings::record::DbOrigin;

impl TestConfig {
    fn record(&self, options: &[&str]) -> RecordSettings {
        self.run(options)
            .unwrap_or_else(|error| panic!("{}", chain(&error)))
            .record
    }

    /// The database, and where it was named.
    fn db(&self, options: &[&str]) -> Option<(String, DbOrigin)> {
        let db = self.record(options).db;
        db.map(|choice| (choice.text, choice.origin))
    }

    /// A file that only its owner can read.
    fn private(&self, name: &str, text: &str) -> PathBuf {
        let path = self.write(name, text);
        chmod(&path, 0o600);
        path
    }

    fn db_file(self, text: &str) -> TestConfig {
        let path = self.private("user/db", text);
        self.var("FUMEHOOD_DB_FILE", path.to_str().unwrap())
    }
}

fn some(text: &str, origin: DbOrigin) -> Option<(String, DbOrigin)> {
    Some((text.to_owned(), origin))
}

const PASSWORD: &str = "postgres://me:secret@db.example/results";
const PLAIN: &str = "postgres://me@db.example:5432/results?sslmode=require";

#[test]
fn defaults_of_the_record_are_those_documented() {
    let config = TestConfig::new();
    let resolved = config.run(&[]).unwrap();
    assert_eq!(
        resolved.record,
        RecordSettings {
            db: None,
            artifacts: None,
            to: None,
            force: false,
            in_workspace: None,
            post_process: None,
            store_quota_bytes: None,
            free_reserve_bytes: 1 << 30,
            required: false,
        }
    );
    assert_eq!(resolved.request.collection, CollectionSettings::default());
    assert_eq!(resolved.request.id_reuse, IdReuse::Generated);
    assert!(resolved.request.secret_env.is_empty());
}

#[test]
fn each_place_of_the_database_beats_the_weaker_ones() {
    let config = TestConfig::new().user("db = \"sqlite:results.db\"");
    let beside = format!("sqlite:{}", config.path("user/results.db").display());
    assert_eq!(config.db(&[]), some(&beside, DbOrigin::File));
    let config = config.db_file(" postgres://a/b \nignored\n");
    assert_eq!(config.db(&[]), some("postgres://a/b", DbOrigin::File));
    assert_eq!(
        config.db(&["--db", "none"]),
        some("none", DbOrigin::CommandLine)
    );
    let config = TestConfig::new()
        .user("db = \"none\"")
        .var("FUMEHOOD_DB", "sqlite:/srv/x.db");
    assert_eq!(
        config.db(&[]),
        some("sqlite:/srv/x.db", DbOrigin::Environment)
    );
    let here = format!("sqlite:{}", config.path("project/x.db").display());
    assert_eq!(
        config.db(&["--db", "sqlite:x.db"]),
        some(&here, DbOrigin::CommandLine)
    );
    for relative in ["sqlite://x.db", " sqlite:./x.db\n"] {
        assert_eq!(
            config.db(&["--db", relative]),
            some(&here, DbOrigin::CommandLine)
        );
    }
    for kept in ["sqlite:", "sqlite::memory:", "sqlite:///srv/x.db", PLAIN] {
        assert_eq!(
            config.db(&["--db", kept]),
            some(kept, DbOrigin::CommandLine)
        );
    }
}

#[test]
fn two_variables_that_name_a_database_are_refused() {
    let config = TestConfig::new()
        .db_file("postgres://a/b")
        .var("FUMEHOOD_DB", "postgres://a/b");
    config.fails(&[], &["FUMEHOOD_DB and FUMEHOOD_DB_FILE"]);
    config.fails(&["--db", "none"], &["FUMEHOOD_DB and FUMEHOOD_DB_FILE"]);
}

#[test]
fn a_database_file_keeps_its_secret() {
    for mode in [0o640, 0o604, 0o644, 0o620, 0o602, 0o610] {
        let config = TestConfig::new().db_file(PASSWORD);
        assert_eq!(config.db(&[]), some(PASSWORD, DbOrigin::File));
        chmod(&config.path("user/db"), mode);
        config.fails(&[], &["FUMEHOOD_DB_FILE", "others", "chmod"]);
    }
    for empty in ["", "\n", "  \npostgres://a/b"] {
        TestConfig::new()
            .db_file(empty)
            .fails(&[], &["FUMEHOOD_DB_FILE", "first line"]);
    }
    let config = TestConfig::new().var("FUMEHOOD_DB_FILE", "nowhere");
    config.fails(&[], &["FUMEHOOD_DB_FILE", "nowhere", "No such file"]);
    // The file is not needed, so it is not read.
    assert!(config.record(&["--db", "none"]).db.is_some());
    TestConfig::new()
        .var("FUMEHOOD_DB_FILE", "")
        .fails(&[], &["FUMEHOOD_DB_FILE is empty"]);
    TestConfig::new()
        .var("FUMEHOOD_DB", "")
        .fails(&[], &["FUMEHOOD_DB is empty"]);
    let mut config = TestConfig::new().db_file(PASSWORD);
    let stranger = 65_000;
    match config.sources.uid {
        0 => {
            let owner = Some(rustix::process::Uid::from_raw(stranger));
            rustix::fs::chown(config.path("user/db"), owner, None).unwrap();
        }
        _ => config.sources.uid = stranger,
    }
    config.fails(&[], &["belongs to uid"]);
}

#[test]
fn a_database_password_is_accepted_only_in_private_places() {
    let remedies = ["password", "PGPASSFILE", "FUMEHOOD_DB_FILE"];
    let config = TestConfig::new();
    config.fails(&["--db", PASSWORD], &remedies);
    let message = chain(&config.run(&["--db", PASSWORD]).unwrap_err());
    assert!(!message.contains("secret"), "{message}");
    let config = config.var("FUMEHOOD_DB", PASSWORD);
    assert_eq!(config.db(&[]), some(PASSWORD, DbOrigin::Environment));
    let shown = format!("{:?}", config.record(&[]));
    assert!(!shown.contains("secret"), "{shown}");

    let config = TestConfig::new().user(&format!("db = {PASSWORD:?}"));
    for mode in [0o644, 0o640, 0o604] {
        chmod(&config.path("user/config.toml"), mode);
        config.fails(&[], &remedies);
        config.fails(&[], &["chmod 600", "config.toml"]);
        // Others can read the password whether or not it is used.
        config.fails(&["--db", "none"], &remedies);
    }
    chmod(&config.path("user/config.toml"), 0o600);
    assert_eq!(config.db(&[]), some(PASSWORD, DbOrigin::File));
    assert_eq!(
        TestConfig::new().user(&format!("db = {PLAIN:?}")).db(&[]),
        some(PLAIN, DbOrigin::File)
    );
    TestConfig::new()
        .policy(&format!("[record]\ndb = {PASSWORD:?}"))
        .fails(&[], &["policy", "password", "PGPASSFILE"]);
}

#[test]
fn text_that_may_contain_a_password_counts_as_a_password() {
    for text in [
        "postgres://u:p@h/d",
        "postgresql://u:p@h",
        "POSTGRES://u:p@h/d",
        "postgres://u:@h/d",
        "postgres://:p@h/d",
        "postgres://u:p/w@h/d",
        "postgres://u:p?w@h/d",
        "postgres://u:p@w@h/d",
        "postgres://h/d?password=p",
        "postgres://h/d?user=u&PassWord=p",
        "postgres://h/d?pass%77ord=p",
        "postgres://h/d?a=b&%70assword=p",
        "u:p@h",
        "host=h password=p",
    ] {
        assert!(holds_password(text), "{text}");
    }
    for text in [
        "none",
        PLAIN,
        "postgres://h",
        "postgres:///d",
        "postgres://[::1]:5432/d",
        "postgres://u@[::1]:5432/d",
        "postgres://h/d?application_name=a%20b",
        "postgres://%2Frun%2Fpostgresql/d",
        "sqlite:/srv/a:b@c/x.db",
    ] {
        assert!(!holds_password(text), "{text}");
    }
}

#[test]
fn the_policys_database_cannot_be_contradicted() {
    let policy = format!("[record]\ndb = {PLAIN:?}");
    let config = TestConfig::new().policy(&policy);
    assert_eq!(config.db(&[]), some(PLAIN, DbOrigin::Policy));
    assert_eq!(config.db(&["--db", PLAIN]), some(PLAIN, DbOrigin::Policy));
    for other in ["none", "sqlite:x.db", "postgres://elsewhere/x"] {
        config.fails(&["--db", other], &["--db", "policy.toml", "operator"]);
    }
    let config = TestConfig::new().policy(&policy).var("FUMEHOOD_DB", "none");
    config.fails(&[], &["FUMEHOOD_DB", "policy.toml"]);
    assert_eq!(config.db(&["--db", PLAIN]), some(PLAIN, DbOrigin::Policy));
    let config = TestConfig::new().policy(&policy).user("db = \"none\"");
    config.fails(&[], &["`db` in", "config.toml", "policy.toml"]);
    let config = TestConfig::new()
        .policy(&policy)
        .db_file("postgres://u:p@h/d");
    config.fails(&[], &["FUMEHOOD_DB_FILE", "policy.toml"]);
    let message = chain(&config.run(&[]).unwrap_err());
    assert!(!message.contains("u:p"), "{message}");
}

#[test]
fn a_required_record_cannot_be_left_out() {
    let config = TestConfig::new().policy("[record]\nrequired = true");
    let record = config.record(&[]);
    assert!(record.required && record.db.is_none());
    assert!(config.db(&["--db", "sqlite:x.db"]).is_some());
    for none in ["none", " none", "none\n", "\u{a0}none"] {
        config.fails(&["--db", none], &["--db", "requires", "policy.toml"]);
    }
    let config = config.var("FUMEHOOD_DB", "none");
    config.fails(&[], &["FUMEHOOD_DB", "requires"]);
    assert!(config.db(&["--db", "sqlite:x.db"]).is_some());
    TestConfig::new()
        .policy("[record]\nrequired = true")
        .user("db = \"none\"")
        .fails(&[], &["config.toml", "requires"]);
    let free = TestConfig::new().policy("[record]\nrequired = false");
    assert!(free.db(&["--db", "none"]).is_some() && !free.record(&[]).required);
}

#[test]
fn the_collection_follows_the_limits_and_the_ceilings() {
    let collection = TestConfig::new().ok(&["--disk", "2G"]).collection;
    assert_eq!(collection.total_bytes_max, 2 << 30);
    assert_eq!(collection.file_bytes_max, 2 << 30);
    let config = TestConfig::new()
        .user("max_outputs = 5\nmax_depth = 4\ninline_max = 0")
        .project("max_output = \"1G\"\nmax_depth = 256\nmax_outputs = 1000000")
        .var("FUMEHOOD_MAX_OUTPUTS", "7");
    let collection = config.ok(&["--max-output-file", "0"]).collection;
    assert_eq!(
        collection,
        CollectionSettings {
            total_bytes_max: 1 << 30,
            file_bytes_max: 0,
            outputs_max: 7,
            depth_max: 256,
            inline_bytes_max: 0,
            ..CollectionSettings::default()
        }
    );
    let large = TestConfig::new().ok(&["--inline-max", "64M"]).collection;
    assert_eq!(large.inline_total_bytes_max, 64 << 20);
    for (flag, value, word) in [
        ("--max-outputs", "1000001", "to 1000000"),
        ("--max-depth", "0", "from 1"),
        ("--max-depth", "257", "to 256"),
        ("--inline-max", "65M", "to 64 MiB"),
        ("--max-output", "off", "not a size"),
    ] {
        TestConfig::new().fails(&[flag, value], &[flag, word]);
    }
    let config = TestConfig::new().policy(
        "[ceilings]\nmax_output = \"1G\"\nmax_output_file = \"1M\"\nmax_outputs = 9\nmax_depth = 3\n\
         inline_max = \"1K\"\nstore_quota = \"5G\"",
    );
    let resolved = config.run(&[]).unwrap();
    assert_eq!(
        resolved.request.collection,
        CollectionSettings {
            total_bytes_max: 1 << 30,
            file_bytes_max: 1 << 20,
            outputs_max: 9,
            depth_max: 3,
            inline_bytes_max: 1 << 10,
            ..CollectionSettings::default()
        }
    );
    assert_eq!(resolved.record.store_quota_bytes, Some(5 << 30));
    for (flag, value) in [
        ("--max-output", "2G"),
        ("--max-output-file", "2M"),
        ("--max-outputs", "10"),
        ("--max-depth", "4"),
        ("--inline-max", "2K"),
        ("--store-quota", "6G"),
        ("--store-quota", "off"),
    ] {
        config.fails(&[flag, value], &[flag, "ceiling"]);
    }
}

#[test]
fn globs_add_up_and_stay_inside() {
    let config = TestConfig::new()
        .user("expect = [\"log.txt\"]")
        .project("output = [\"*.csv\", \"{a,b}/**\"]\nexpect = [\"result.json\"]");
    let collection = config
        .ok(&["--output", "*.png", "--output", "*.csv"])
        .collection;
    assert_eq!(collection.outputs, ["*.csv", "{a,b}/**", "*.png"]);
    assert_eq!(collection.expects, ["log.txt", "result.json"]);
    for bad in [
        "/etc/*",
        "../x",
        "a/../b",
        "..",
        "[",
        "{a",
        &"x".repeat(1 << 14),
    ] {
        config.fails(&["--output", bad], &["`output`", "pattern"]);
        config.fails(&["--expect", bad], &["`expect`", "pattern"]);
    }
    assert!(config.run(&["--output", "..a/b.."]).is_ok());
    config.fails(&["--output", ""], &["--output is empty"]);
    let many: Vec<String> = (0..900).map(|n| format!("{n:?}")).collect();
    TestConfig::new()
        .project(&format!("output = {many:?}"))
        .fails(&[], &["`output`", "900 patterns"]);
}

#[test]
fn the_store_has_its_place_and_its_room() {
    let config = TestConfig::new().user(
        "artifacts = \"objects\"\nstore_quota = \"1T\"\nfree_reserve = \"2G\"\nsecret_env = [\"TOKEN\"]",
    );
    let record = config.record(&[]);
    assert_eq!(record.artifacts, Some(config.path("user/objects")));
    assert_eq!(record.store_quota_bytes, Some(1 << 40));
    assert_eq!(record.free_reserve_bytes, 2 << 30);
    let config = config
        .var("FUMEHOOD_ARTIFACTS", "/srv/objects")
        .var("FUMEHOOD_STORE_QUOTA", "2T")
        .var("FUMEHOOD_FREE_RESERVE", "0");
    let record = config.record(&[]);
    assert_eq!(record.artifacts, Some("/srv/objects".into()));
    assert_eq!(record.store_quota_bytes, Some(2 << 40));
    assert_eq!(record.free_reserve_bytes, 0);
    let record = config.record(&["--artifacts", "x", "--store-quota", "off"]);
    assert_eq!(record.artifacts, Some(config.path("project/x")));
    assert_eq!(record.store_quota_bytes, None);
}

#[test]
fn secret_names_add_up() {
    let config = TestConfig::new()
        .policy("[env]\nsecret = [\"PGPASSWORD\", \"AWS_*\"]")
        .user("secret_env = [\"TOKEN\", \"AWS_*\"]")
        .var("FUMEHOOD_SECRET_ENV", "API_KEY, *");
    assert_eq!(
        config.ok(&["--secret-env", "X"]).secret_env,
        ["*", "API_KEY", "AWS_*", "PGPASSWORD", "TOKEN", "X"]
    );
    for bad in ["A*B", "1A", "A=1", "**"] {
        config.fails(&["--secret-env", bad], &["--secret-env", "star"]);
    }
}

#[test]
fn export_and_repetition_belong_to_one_run() {
    let config = TestConfig::new();
    assert_eq!(config.ok(&["--replace"]).id_reuse, IdReuse::Replace);
    assert_eq!(config.ok(&["--id", "mine"]).id_reuse, IdReuse::Refuse);
    let record = config.record(&["--to", "results", "--force"]);
    assert_eq!(record.to, Some(config.path("project/results")));
    assert!(record.force);
    assert!(!config.record(&["--to", "results"]).force);
    config.fails(&["--force"], &["--force", "--to"]);
}

#[test]
fn a_workspace_that_is_there_names_the_run() {
    let config = TestConfig::new();
    let resolved = config.run(&["--in", "gwas-7"]).unwrap();
    assert_eq!(resolved.request.id.as_str(), "gwas-7");
    assert_eq!(
        resolved.record.in_workspace,
        Some(resolved.request.id.clone())
    );
    config.fails(&["--in", "../x"], &["--in", "[A-Za-z0-9]"]);
    config.fails(&["--in", "a", "--id", "a"], &["--in", "--id"]);
    config.fails(&["--in", "a", "--keep", "never"], &["--in", "--keep"]);
    config.fails(
        &["--in", "a", "--workspace", "memory"],
        &["--in", "--workspace memory"],
    );
    assert!(config.run(&["--in", "a", "--workspace", "disk"]).is_ok());
    // What a file or a variable says about workspaces is meant for workspaces that a run makes.
    let config = TestConfig::new()
        .project("workspace = \"memory\"")
        .var("FUMEHOOD_KEEP", "always");
    let request = config.ok(&["--in", "a"]);
    assert_eq!(request.workspace_kind, WorkspaceKind::Disk);
    assert_eq!(request.keep, KeepPolicy::Never);
    let request = config.ok(&[]);
    assert_eq!(request.workspace_kind, WorkspaceKind::Memory);
    assert_eq!(request.keep, KeepPolicy::Always);
}

#[test]
fn the_platforms_step_is_the_users_or_the_operators() {
    let step = |program: &str, timeout_ms| {
        Some(PostProcessSettings {
            command: vec![program.to_owned(), "--quiet".to_owned()],
            timeout_ms,
        })
    };
    let users = "[post_process]\ncommand = [\"/opt/mine\", \"--quiet\"]";
    let config = TestConfig::new().user(users);
    assert_eq!(config.record(&[]).post_process, step("/opt/mine", 600_000));
    let config =
        config.policy("[post_process]\ncommand = [\"/opt/theirs\", \"--quiet\"]\ntimeout = \"1m\"");
    assert_eq!(config.record(&[]).post_process, step("/opt/theirs", 60_000));
    TestConfig::new()
        .project(users)
        .fails(&[], &["fumehood.toml", "post_process", "unconfined"]);
    TestConfig::new()
        .var("FUMEHOOD_POST_PROCESS", "/opt/x")
        .fails(&[], &["unknown variable"]);
    for (text, word) in [
        ("post_process = \"/opt/x\"", "a table"),
        ("[post_process]", "an array"),
        ("[post_process]\ncommand = []", "an array"),
        ("[post_process]\ncommand = \"/opt/x\"", "an array"),
        ("[post_process]\ncommand = [\"/opt/x\", 3]", "an array"),
        ("[post_process]\ncommand = [\"/opt/x\\u0000\"]", "NUL"),
        ("[post_process]\ncommand = [\"x\"]", "absolute path"),
        ("[post_process]\ncommand = [\"./x\"]", "absolute path"),
        ("[post_process]\ncommand = [\"\"]", "absolute path"),
        (
            "[post_process]\ncommnad = [\"/x\"]",
            "`post_process.command`",
        ),
        ("[post_process]\ncommand = [\"/x\"]\ntimeout = 0", "from 1s"),
        (
            "[post_process]\ncommand = [\"/x\"]\ntimeout = \"off\"",
            "not a duration",
        ),
        (
            "[post_process]\ncommand = [\"/x\"]\ntimeout = true",
            "a number or a string",
        ),
        ("[post_proces]\ncommand = [\"/x\"]", "`post_process`"),
    ] {
        TestConfig::new()
            .user(text)
            .fails(&[], &["config.toml", word]);
    }
}

#[test]
fn record_settings_ignore_the_projects_file() {
    let config = TestConfig::new()
        .project("this is not TOML")
        .user("db = \"sqlite:/srv/x.db\"\n[post_process]\ncommand = [\"/opt/mine\"]")
        .var("FUMEHOOD_PROJECT", "nowhere");
    config.fails(&[], &["nowhere"]);
    let record = record_settings(GivenSettings::new(), &config.sources).unwrap();
    assert_eq!(record.db.unwrap().text, "sqlite:/srv/x.db");
    assert!(record.post_process.is_some());
    let options = given(&["--db", "none", "--artifacts", "objects"]);
    let record = record_settings(options, &config.sources).unwrap();
    assert!(record.db.unwrap().records_nothing());
    assert_eq!(record.artifacts, Some(config.path("project/objects")));
    // The policy and the rules for passwords hold for these commands too.
    assert!(record_settings(given(&["--db", PASSWORD]), &config.sources).is_err());
    let config = config.policy("[record]\ndb = \"sqlite:/srv/y.db\"");
    let error = record_settings(GivenSettings::new(), &config.sources).unwrap_err();
    assert!(chain(&error).contains("policy.toml"));
}

#[test]
fn the_shell_records_nothing() {
    // The database is not needed, so the file that names it is not read.
    let config = TestConfig::new().var("FUMEHOOD_DB_FILE", "nowhere");
    let resolved = shell_request(GivenSettings::new(), &config.sources).unwrap();
    assert!(resolved.record.db.unwrap().records_nothing());
    assert!(config.run(&[]).is_err());
}

/// A release build injects no faults, so it refuses the variable like any unknown name.
#[test]
fn only_debug_builds_accept_fumehood_fault() {
    let config = TestConfig::new().var(store::types::crash_points::VARIABLE, "committed=kill");
    match cfg!(debug_assertions) {
        true => drop(config.ok(&[])),
        false => config.fails(&[], &["unknown variable FUMEHOOD_FAULT"]),
    }
}
