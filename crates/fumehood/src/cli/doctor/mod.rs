//! `fumehood doctor`: prints what this host can enforce, and the remedy for what it cannot. The checks are in the crate
//! `doctor`.

mod attack;
mod report;

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Context;
use doctor::host_checks::{self, Finding, Subject};
use engine::home::Home;
use engine::plan::limits::error_chain;
use engine::request::{self, Command};
use sandbox::spec::{ConfinementLevel, WorkspaceKind};
use store::Location;

use crate::cli::{args, exit, record_access};
use engine::settings::table::Key;
use engine::settings::{self, RecordSettings, Resolved, Sources};

/// The policy that packages install, printed as a remedy where there is none.
const SHIPPED_POLICY: &str = include_str!("../../../../../packaging/policy.toml");

/// Show what this host can enforce, by trying each mechanism, and how to get what is missing.
///
/// The first line says whether `fumehood run` would start now, in this directory, with the present configuration, and
/// at which level. Then follow the problems, worst first, with lines to copy.
///
/// Exits with 0 if a run would start and with 125 if not; warnings do not matter for that.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct DoctorArgs {
    /// Also show what is fine
    #[arg(long, short)]
    pub verbose: bool,

    /// Print one JSON document (fumehood.doctor/1)
    #[arg(long)]
    pub json: bool,

    /// Examine runs that make their workspaces in this directory [default: as configured]
    #[arg(long, value_name = "DIR")]
    pub workspace_root: Option<OsString>,

    /// Examine runs with this floor, full or landlock [default: as configured]
    #[arg(long, value_name = "LEVEL")]
    pub isolation: Option<OsString>,

    /// Instead, try to break every promise in real sandboxes. Each act is first done unconfined, to show that it works
    /// on this host. Exits with 1 if anything escaped; --json prints fumehood.attack/1
    #[arg(long, conflicts_with_all = ["verbose", "workspace_root", "isolation"])]
    pub attack: bool,

    /// Attack exactly this level, full or landlock [default: the strongest that this host gives]
    #[arg(long, value_name = "LEVEL", requires = "attack", value_parser = attack::level)]
    pub level: Option<ConfinementLevel>,

    /// Also exit with 1 if an act is refused that the table in SECURITY.md does not promise to refuse
    #[arg(long, requires = "attack", hide = true)]
    pub strict: bool,
}

pub fn doctor(args: &DoctorArgs) -> anyhow::Result<u8> {
    if args.attack {
        return attack::run(args);
    }
    let mut found = Vec::new();
    let sources = Sources::from_process()?;
    let configured = configuration(args, &sources);
    let resolved = configured.map_err(|refused| found.push(*refused)).ok();
    let floor = resolved.as_ref().map(|r| level(r.request.floor));
    let subject = subject(resolved.as_deref(), &sources, &mut found)?;
    let mut diagnosis = host_checks::examine(&subject);
    found.push(policy_finding(&sources, floor));
    found.push(settings_finding(&sources));
    found.into_iter().for_each(|finding| diagnosis.add(finding));
    match args.json {
        true => report::print_json(&diagnosis, &subject)?,
        false => report::print_text(&diagnosis, &subject, args.verbose)?,
    }
    Ok(match diagnosis.starts() {
        true => 0,
        false => exit::COULD_NOT_RUN,
    })
}

fn level(floor: request::IsolationLevel) -> ConfinementLevel {
    match floor {
        request::IsolationLevel::Full => ConfinementLevel::Full,
        request::IsolationLevel::Landlock | request::IsolationLevel::None => {
            ConfinementLevel::Landlock
        }
    }
}

/// Resolves `fumehood run -- true` with every file, variable and policy. The error is the finding that says why it is
/// refused.
fn configuration(args: &DoctorArgs, sources: &Sources) -> Result<Box<Resolved>, Box<Finding>> {
    let command = Command::Argv(vec![OsString::from("true")]);
    let given = [
        args::one(Key::WorkspaceRoot, &args.workspace_root),
        args::one(Key::Isolation, &args.isolation),
    ];
    let given = given.into_iter().flatten().collect();
    let resolved = settings::run_request(command, given, sources);
    resolved.map(Box::new).map_err(|e| {
        let text = format!("the configuration is refused: {}", error_chain(&e));
        Box::new(Finding::stops("configuration", text))
    })
}

fn subject(
    resolved: Option<&Resolved>,
    sources: &Sources,
    found: &mut Vec<Finding>,
) -> anyhow::Result<Subject> {
    let env = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let home = Home::find(&env).context("find where Fumehood keeps its files")?;
    let (artifacts, database) = match resolved {
        Some(resolved) => record_paths(&resolved.record, &home, found),
        None => (Some(home.artifacts()), Some(home.database())),
    };
    let request = resolved.map(|resolved| &resolved.request);
    let in_memory = request.is_some_and(|r| r.workspace_kind == request::WorkspaceKind::Memory);
    Ok(Subject {
        home: home.path().to_path_buf(),
        artifacts,
        database,
        workspace_root: request.map_or_else(|| "/tmp".into(), |r| r.workspace_root.clone()),
        workspace_kind: match in_memory {
            true => WorkspaceKind::Memory,
            false => WorkspaceKind::Disk,
        },
        project: request.map_or_else(|| sources.cwd.clone(), |r| r.project.clone()),
        floor: request.map_or(ConfinementLevel::Landlock, |r| level(r.floor)),
        level: request.and_then(|r| r.level),
        required_layers: resolved
            .map_or_else(Default::default, |r| r.request.required_layers.clone()),
        limits: request.map_or_else(Default::default, |r| r.limits.clone()),
        allow_degraded: request.map_or_else(Default::default, |r| r.allow_degraded.clone()),
        free_reserve_bytes: resolved.map_or(0, |r| r.record.free_reserve_bytes),
    })
}

/// Returns the artifact store and, if it is a file, the database.
fn record_paths(
    record: &RecordSettings,
    home: &Home,
    found: &mut Vec<Finding>,
) -> (Option<PathBuf>, Option<PathBuf>) {
    match record_access::location(record, home) {
        Ok(Location::None) => (None, None),
        Ok(location) => {
            let artifacts = record.artifacts.clone();
            let database = match location {
                Location::Sqlite(path) => Some(path),
                _ => None,
            };
            (artifacts.or_else(|| Some(home.artifacts())), database)
        }
        Err(e) => {
            found.push(Finding::stops("database", format!("{e:#}")));
            (None, None)
        }
    }
}

/// Reports the operator's policy. A broken policy has already been reported: it makes the configuration refused.
fn policy_finding(sources: &Sources, floor: Option<ConfinementLevel>) -> Finding {
    let path = sources.policy.display();
    let floor = floor.map_or(String::new(), |f| {
        format!("; the floor is `{}`", f.as_str())
    });
    if sources.policy.exists() {
        let text = format!("the operator's policy {path} is in force{floor}");
        return Finding::fine("policy", text);
    }
    let text =
        format!("there is no operator's policy at {path}: users decide for themselves{floor}");
    let shipped = SHIPPED_POLICY.lines();
    let mut lines = vec!["sudo install -D -m 644 /dev/stdin /etc/fumehood/policy.toml <<'END'"];
    lines.extend(shipped.filter(|l| !l.starts_with('#') && !l.is_empty()));
    lines.push("END");
    Finding::note("policy", text).remedy(
        "If others rely on this host, install the one that packages ship, and read it:",
        &lines,
    )
}

/// Reports which files and variables set something.
fn settings_finding(sources: &Sources) -> Finding {
    let project = sources.cwd.join("fumehood.toml");
    let files = std::iter::once(&sources.policy).chain(&sources.user_config);
    let read = files.chain([&project]).filter(|p| p.exists());
    let mut list: Vec<String> = read.map(|p| p.display().to_string()).collect();
    let variables = sources.env.keys().filter_map(|k| k.to_str());
    let ours = variables.filter(|k| k.starts_with("FUMEHOOD_"));
    list.extend(ours.map(str::to_owned));
    let text = match list.is_empty() {
        true => {
            "no configuration file and no FUMEHOOD_* variable: all settings are the defaults".into()
        }
        false => format!("settings come from {}", list.join(", ")),
    };
    Finding::fine("settings", text)
}
