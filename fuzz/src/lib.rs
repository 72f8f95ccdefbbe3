//! Fuzz targets: one function for each parser of untrusted bytes.
//!
//! Each function panics if a property of the parser does not hold. The first property is that the parser returns at
//! all, in bounded time and memory. Each function returns whether the parser accepted the input, which shows whether a
//! fuzzer produces any valid inputs.
//!
//! Modules that are private to their crate are compiled again here, from the same source files.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use engine::attempt::hints::{self, HintFacts, HostPathKind, HostPath, SpaceUsage};
use engine::attempt::log_capture::LogCapture;
use engine::attempt::terminal_filter::TerminalFilter;
use engine::plan::runtime::{self, CallerEnvironment};
use engine::request::AnalysisId;
use engine::run_dir::RunRecord;
use engine::settings::entries::{self, SettingOrigin, SettingValue};
use engine::settings::policy::Policy;
use engine::settings::table::{PlaceRule, SETTINGS};
use sandbox::LaunchPlan;
use store::types::{escaping, units};
// channel.rs refers to these modules as `crate::outcome`, `crate::spec` and `crate::launch_step`.
pub use sandbox::{outcome, spec, supervise as launch_step};

#[allow(dead_code)]
#[path = "../../crates/sandbox/src/channel.rs"]
mod channel;

mod interpreter;

#[allow(dead_code)]
#[path = "../../crates/engine/src/plan/imports.rs"]
mod python_imports;

/// The name and the function of a fuzz target.
pub type Target = (&'static str, fn(&[u8]) -> bool);

pub const TARGETS: &[Target] = &[
    ("units", units),
    ("ids", ids),
    ("logs", logs),
    ("terminal", terminal),
    ("imports", imports),
    ("hints", hints),
    ("shebang", shebang),
    ("runtime", runtime),
    ("channel", channel),
    ("plan", plan),
    ("run_record", run_record),
    ("settings", settings),
];

/// Parses sizes, durations, CPUs and counts, which come from options, files and variables.
pub fn units(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let check_round_trip =
        |shown: String, value: u64, parse: fn(&str) -> Result<u64, units::UnitError>| {
            // The displayed value may be rounded down but not up, and the parser accepts it.
            let typed = shown.replace(' ', "");
            let reparsed =
                parse(&typed).unwrap_or_else(|e| panic!("{value} is shown as {shown:?}: {e}"));
            assert!(
                reparsed <= value,
                "{value} is shown as {shown:?}, which is {reparsed}"
            );
        };
    let mut accepted = false;
    if let Ok(bytes) = units::parse_size(&text) {
        accepted = true;
        check_round_trip(units::format_size(bytes), bytes, units::parse_size);
    }
    if let Ok(ms) = units::parse_duration_ms(&text) {
        accepted = true;
        check_round_trip(units::format_duration(ms), ms, units::parse_duration_ms);
    }
    if let Ok(milli) = units::parse_cpus(&text) {
        accepted = true;
        check_round_trip(units::format_cpus(milli), milli, units::parse_cpus);
    }
    if let Ok(count) = units::parse_count(&text) {
        assert_eq!(units::parse_count(&count.to_string()).ok(), Some(count));
        accepted = true;
    }
    accepted
}

/// Parses an analysis id. An id names a directory, so a valid id is a single path component.
pub fn ids(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let id = AnalysisId::new(&text);
    let accepted = id.is_ok();
    match id {
        Err(e) => assert!(e.to_string().len() < 2048),
        Ok(id) => {
            assert_eq!(id.as_str(), text);
            let path = engine::workspace::path_for(Path::new("/r"), &id);
            assert_eq!(path.parent(), Some(Path::new("/r")));
            assert_eq!(path.components().count(), 3);
            assert!(text.len() <= AnalysisId::LEN_MAX && text.is_ascii());
        }
    }
    let json = serde_json::from_slice::<AnalysisId>(data);
    assert!(json.is_err() || json.is_ok_and(|id| AnalysisId::new(id.as_str()).is_ok()));
    accepted
}

/// Captures output of any bytes, in any pieces, within a limit, and escapes it for display.
pub fn logs(data: &[u8]) -> bool {
    let Some((&seed, bytes)) = data.split_first() else {
        return false;
    };
    let limit = 1 + usize::from(seed);
    let mut capture = LogCapture::new(limit);
    let mut head = Vec::new();
    for piece in bytes.chunks(1 + usize::from(seed % 7)) {
        let live = capture.push(piece);
        assert_eq!(live.bytes, piece);
        head.extend_from_slice(live.head);
    }
    let captured = capture.finish();
    assert!(captured.head.len() + captured.tail.len() <= limit);
    assert_eq!(captured.head, head);
    assert!(bytes.starts_with(&captured.head) && bytes.ends_with(&captured.tail));
    let kept = (captured.head.len() + captured.tail.len()) as u64;
    assert_eq!(kept + captured.dropped_bytes, bytes.len() as u64);
    assert_eq!(captured.truncated, captured.dropped_bytes > 0);

    let escaped = escaping::escape_text(bytes);
    assert_eq!(escaping::unescape_text(&escaped).as_deref(), Some(bytes));
    let shown = escaping::escape_terminal(bytes);
    let is_harmless = |c: char| !c.is_control() || c == '\n' || c == '\t';
    assert!(shown.chars().all(is_harmless), "{shown:?}");
    if let Ok(text) = std::str::from_utf8(bytes) {
        // The result does not matter; the call must not panic.
        let _ = escaping::unescape_text(text);
    }
    captured.truncated
}

/// Filters output for a terminal. The result does not depend on how the stream is cut into pieces. The filtered output
/// makes the terminal change colours, erase within the line and move within the line, and nothing else.
pub fn terminal(data: &[u8]) -> bool {
    let Some((&seed, bytes)) = data.split_first() else {
        return false;
    };
    let filter = |pieces: &mut dyn Iterator<Item = &[u8]>| {
        let (mut filter, mut shown) = (TerminalFilter::default(), Vec::new());
        pieces.for_each(|piece| filter.push(piece, &mut shown));
        filter.interrupt(&mut shown);
        shown
    };
    let shown = filter(&mut bytes.chunks(1 + usize::from(seed % 7)));
    assert_eq!(shown, filter(&mut std::iter::once(bytes)));
    let text = String::from_utf8(shown).expect("what is shown is UTF-8");
    for (at, c) in text.char_indices() {
        let plain = !c.is_control() || matches!(c, '\n' | '\r' | '\t' | '\u{8}');
        assert!(plain || c == '\u{1b}', "{text:?}");
        if c == '\u{1b}' {
            let is_parameter = |c: char| c.is_ascii_digit() || c == ';' || c == ':';
            let sequence = text[at..].strip_prefix("\u{1b}[").unwrap_or_default();
            let end = sequence.trim_start_matches(is_parameter).chars().next();
            assert!(matches!(end, Some('m' | 'K')), "{text:?}");
        }
    }
    text.as_bytes() == bytes
}

/// Finds the modules that an untrusted Python file imports.
pub fn imports(data: &[u8]) -> bool {
    let mut accepted = false;
    let Ok(()) = python_imports::imports(data, |import| {
        // Each part becomes a file name.
        let is_name = |part: &String| !part.is_empty() && !part.contains(['/', '.', '\0']);
        assert!(import.parts.iter().all(is_name), "{import:?}");
        accepted = true;
        Ok::<(), std::convert::Infallible>(())
    });
    accepted
}

/// Derives hints from a program's last output, which the program can choose so as to mislead the user.
pub fn hints(data: &[u8]) -> bool {
    let lookups = std::cell::Cell::new(0);
    let on_host = |path: &Path| {
        lookups.set(lookups.get() + 1);
        let even = path.as_os_str().len().is_multiple_of(2);
        even.then(|| HostPath {
            real: path.to_path_buf(),
            kind: HostPathKind::File,
        })
    };
    let facts = HintFacts {
        visible: &[PathBuf::from("/usr"), PathBuf::from("/srv/data")],
        workspace: Path::new("/tmp/scidex-analysis-x"),
        project: Path::new("/srv/project"),
        script_dir: Some(Path::new("/srv/project/pkg")),
        homes: &[PathBuf::from("/home/ada")],
        on_host: &on_host,
        network_off: true,
        disk: Some(SpaceUsage {
            used_bytes: 10,
            limit_bytes: 10,
        }),
        shm: None,
        runtime: None,
        oom_kills: u64::from(data.first().copied().unwrap_or(0) % 2),
        pids_denied: 0,
    };
    let found = hints::hints(data, &facts);
    assert!(found.len() <= hints::HINTS_MAX && lookups.get() <= 32);
    for hint in &found {
        assert!(hint.text.starts_with("guess: "), "{:?}", hint.text);
        assert!(!hint.text.chars().any(char::is_control), "{:?}", hint.text);
        // A hint never suggests an option that would make a home or the project visible.
        for forbidden in ["--read /home/ada", "--read /srv/project"] {
            assert!(!hint.text.contains(forbidden), "{:?}", hint.text);
        }
    }
    !found.is_empty()
}

/// Parses the first lines of a script.
pub fn shebang(data: &[u8]) -> bool {
    interpreter::check(&[b"#!", data].concat());
    interpreter::check(&[b"#!/usr/bin/env -S ", data].concat());
    interpreter::check(data)
}

/// Resolves the runtime of a hostile project, which tries to make more of the host visible than it should. The input
/// holds the script, the venv's pyvenv.cfg and .python-version, separated by NUL bytes.
pub fn runtime(data: &[u8]) -> bool {
    thread_local! {
        static HOST: tempfile::TempDir = tempfile::tempdir().expect("a directory for the runtime target");
    }
    HOST.with(|host| resolve_in(host.path(), data))
}

fn resolve_in(host: &Path, data: &[u8]) -> bool {
    let write = |path: PathBuf, text: &[u8]| std::fs::write(path, text).expect("write an input");
    let (project, home) = (host.join("project"), host.join("home"));
    let venv = project.join(".venv/bin");
    for dir in [&venv, &home.join("secrets")] {
        std::fs::create_dir_all(dir).expect("make a directory");
    }
    let python = venv.join("python");
    if !python.exists() {
        std::os::unix::fs::symlink("/usr/bin/python3", &python).expect("make a link");
    }
    let mut parts = data.splitn(3, |b| *b == 0);
    let mut next = || parts.next().unwrap_or_default();
    let script = project.join("analysis.py");
    // In the input, the word HOME stands for the path of the home directory.
    let expand_home = |text: &[u8]| -> Vec<u8> {
        let text = String::from_utf8_lossy(text);
        text.replace("HOME", home.to_str().unwrap_or("/"))
            .into_bytes()
    };
    write(script.clone(), &expand_home(next()));
    write(project.join(".venv/pyvenv.cfg"), &expand_home(next()));
    write(project.join(".python-version"), &expand_home(next()));
    let caller = CallerEnvironment {
        path: std::env::join_paths([venv.as_path(), Path::new("/usr/bin")]).expect("plain paths"),
        cwd: project.clone(),
        env: Default::default(),
        homes: vec![home.clone()],
    };
    let resolved = [
        runtime::for_script(&script, &caller, None, &project),
        runtime::for_command(OsStr::from_bytes(b"python"), &caller, None, &project),
    ];
    let mut accepted = false;
    for found in resolved.into_iter().flatten() {
        accepted = true;
        for shown in &found.prefixes {
            assert!(!home.starts_with(shown), "{shown:?} contains the home");
            assert!(
                !project.starts_with(shown),
                "{shown:?} contains the project"
            );
        }
    }
    accepted
}

/// Receives one packet on the control socket.
pub fn channel(data: &[u8]) -> bool {
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("a socket pair");
    // The socket rejects data that is too long for one packet.
    if rustix::net::send(&theirs, data, SendFlags::DONTWAIT).is_err() {
        return false;
    }
    let received = channel::receive::<channel::SandboxReport>(ours.as_fd(), channel::Wait::No);
    let accepted = matches!(&received, Ok(Some(_)));
    if let Ok(Some((report, _))) = received {
        let encoded = serde_json::to_vec(&report).expect("a report is JSON");
        let decoded: channel::SandboxReport =
            serde_json::from_slice(&encoded).expect("its own JSON");
        assert_eq!(decoded, report);
    }
    let _ = serde_json::from_slice::<channel::InitCommand>(data);
    accepted
}

/// Parses the plan that the launcher reads while it still has all its privileges.
pub fn plan(data: &[u8]) -> bool {
    let Ok(plan) = serde_json::from_slice::<LaunchPlan>(data) else {
        return false;
    };
    let encoded = serde_json::to_vec(&plan).expect("a plan is JSON");
    let decoded: LaunchPlan = serde_json::from_slice(&encoded).expect("its own JSON");
    assert_eq!(decoded, plan);
    if plan.spec.check().is_ok() {
        assert_ne!(plan.spec.identity.uid(), 0);
        assert!(!plan.spec.argv.is_empty() && plan.spec.program.as_path().is_absolute());
    }
    true
}

/// Parses the record that a dead runner left for the reaper. Only the owner can write the record's directory.
pub fn run_record(data: &[u8]) -> bool {
    let record = serde_json::from_slice::<RunRecord>(data);
    record.is_ok_and(|record| {
        assert!(AnalysisId::new(record.id.as_str()).is_ok());
        true
    })
}

/// Parses settings files. A program may have written a project's file. People whom Fumehood trusts write the other
/// files, and make mistakes.
pub fn settings(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let project = SettingOrigin::ProjectFile("/p/fumehood.toml".into());
    let user = SettingOrigin::UserFile("/u/config.toml".into());
    let policy = Policy::parse(&text, Path::new("/etc/policy.toml"));
    if let Ok(policy) = &policy {
        for setting in SETTINGS {
            let bounds = setting.kind.bounds();
            let ceiling = policy.ceiling(setting.key);
            assert!(ceiling.is_none_or(|n| bounds.is_some_and(|b| (b.least..=b.most).contains(&n))));
        }
    }
    let files = [project, user].map(|origin| entries::from_file(&text, &origin));
    for entry in files.iter().flatten().flat_map(|file| &file.entries) {
        let setting = entry.place.setting;
        let allowed = match entry.place.origin {
            SettingOrigin::ProjectFile(_) => setting.project_file,
            _ => setting.user_file,
        };
        assert_eq!(allowed, PlaceRule::Yes, "{}", setting.name);
        if let SettingValue::Number(n) = entry.value {
            let bounds = setting.kind.bounds();
            assert!(bounds.is_some_and(|b| (b.least..=b.most).contains(&n)));
        }
    }
    policy.is_ok_and(|policy| policy.db.is_some()) || files.iter().flatten().any(|f| !f.entries.is_empty())
}
