//! One function for each thing that parses bytes somebody else wrote. Each panics when a property is broken; that it
//! comes back at all, in bounded time and memory, is the first of them. Each says whether it understood the input, so
//! that a fuzzer which only ever feeds it nonsense can be told from one that does not.
//!
//! Modules that their crate keeps to itself are compiled again here, from the same files.

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
use sandbox::LaunchPlan;
use store::types::{escaping, units};
// What channel.rs calls `crate::outcome` and `crate::spec`.
pub use sandbox::{outcome, spec};

#[allow(dead_code)]
#[path = "../../crates/sandbox/src/channel.rs"]
mod channel;

mod interpreter;

#[allow(dead_code)]
#[path = "../../crates/engine/src/plan/imports.rs"]
mod python_imports;

/// The target's name and the function, for whoever goes through all of them.
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
];

/// Sizes, durations, CPUs and counts from options, files and variables.
pub fn units(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let again = |shown: String, value: u64, parse: fn(&str) -> Result<u64, units::UnitError>| {
        // What is shown may be rounded, but never beyond what was meant, and it can be typed in again.
        let typed = shown.replace(' ', "");
        let back = parse(&typed).unwrap_or_else(|e| panic!("{value} is shown as {shown:?}: {e}"));
        assert!(
            back <= value,
            "{value} is shown as {shown:?}, which is {back}"
        );
    };
    let mut understood = false;
    if let Ok(bytes) = units::parse_size(&text) {
        understood = true;
        again(units::format_size(bytes), bytes, units::parse_size);
    }
    if let Ok(ms) = units::parse_duration_ms(&text) {
        understood = true;
        again(units::format_duration(ms), ms, units::parse_duration_ms);
    }
    if let Ok(milli) = units::parse_cpus(&text) {
        understood = true;
        again(units::format_cpus(milli), milli, units::parse_cpus);
    }
    if let Ok(count) = units::parse_count(&text) {
        assert_eq!(units::parse_count(&count.to_string()).ok(), Some(count));
        understood = true;
    }
    understood
}

/// An id names a directory: one plain component, or it is no id.
pub fn ids(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let id = AnalysisId::new(&text);
    let understood = id.is_ok();
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
    understood
}

/// Output of any bytes, in any pieces, within a limit; and what makes it safe to show.
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
    let harmless = |c: char| !c.is_control() || c == '\n' || c == '\t';
    assert!(shown.chars().all(harmless), "{shown:?}");
    if let Ok(text) = std::str::from_utf8(bytes) {
        // Whatever it says, it does not fall over.
        let _any = escaping::unescape_text(text);
    }
    captured.truncated
}

/// What a person's terminal is sent. How the stream is cut into pieces does not matter, and the terminal acts on nothing
/// but colours, erasing in the line, and movement within the line.
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
            let parameter = |c: char| c.is_ascii_digit() || c == ';' || c == ':';
            let sequence = text[at..].strip_prefix("\u{1b}[").unwrap_or_default();
            let end = sequence.trim_start_matches(parameter).chars().next();
            assert!(matches!(end, Some('m' | 'K')), "{text:?}");
        }
    }
    text.as_bytes() == bytes
}

/// The modules that a Python file names. Anybody may have written the file.
pub fn imports(data: &[u8]) -> bool {
    let mut understood = false;
    let Ok(()) = python_imports::imports(data, |import| {
        // Each part becomes the name of a file.
        let is_name = |part: &String| !part.is_empty() && !part.contains(['/', '.', '\0']);
        assert!(import.parts.iter().all(is_name), "{import:?}");
        understood = true;
        Ok::<(), std::convert::Infallible>(())
    });
    understood
}

/// What a program printed last, which it can choose to mislead a person with.
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
        // Never a line to paste that would show a home or the project.
        for kept_out in ["--read /home/ada", "--read /srv/project"] {
            assert!(!hint.text.contains(kept_out), "{:?}", hint.text);
        }
    }
    !found.is_empty()
}

/// The first lines of a script.
pub fn shebang(data: &[u8]) -> bool {
    interpreter::check(&[b"#!", data].concat());
    interpreter::check(&[b"#!/usr/bin/env -S ", data].concat());
    interpreter::check(data)
}

/// A project that was written to be shown more than it should be: its script, its venv's pyvenv.cfg and
/// its .python-version, separated by NUL bytes.
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
    // A path in the text may name this host's home by the word HOME.
    let placed = |text: &[u8]| -> Vec<u8> {
        let text = String::from_utf8_lossy(text);
        text.replace("HOME", home.to_str().unwrap_or("/"))
            .into_bytes()
    };
    write(script.clone(), &placed(next()));
    write(project.join(".venv/pyvenv.cfg"), &placed(next()));
    write(project.join(".python-version"), &placed(next()));
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
    let mut understood = false;
    for found in resolved.into_iter().flatten() {
        understood = true;
        for shown in &found.prefixes {
            assert!(!home.starts_with(shown), "{shown:?} contains the home");
            assert!(
                !project.starts_with(shown),
                "{shown:?} contains the project"
            );
        }
    }
    understood
}

/// One packet on the control socket.
pub fn channel(data: &[u8]) -> bool {
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("a socket pair");
    // Longer than a socket takes at once is no packet.
    if rustix::net::send(&theirs, data, SendFlags::DONTWAIT).is_err() {
        return false;
    }
    let heard = channel::receive::<channel::SandboxReport>(ours.as_fd(), channel::Wait::No);
    let understood = matches!(&heard, Ok(Some(_)));
    if let Ok(Some((report, _))) = heard {
        let text = serde_json::to_vec(&report).expect("a report is JSON");
        let again: channel::SandboxReport = serde_json::from_slice(&text).expect("its own JSON");
        assert_eq!(again, report);
    }
    let _any = serde_json::from_slice::<channel::InitOrder>(data);
    understood
}

/// The plan that the launcher reads before it has given anything up.
pub fn plan(data: &[u8]) -> bool {
    let Ok(plan) = serde_json::from_slice::<LaunchPlan>(data) else {
        return false;
    };
    let text = serde_json::to_vec(&plan).expect("a plan is JSON");
    let again: LaunchPlan = serde_json::from_slice(&text).expect("its own JSON");
    assert_eq!(again, plan);
    if plan.spec.check().is_ok() {
        assert_ne!(plan.spec.identity.uid(), 0);
        assert!(!plan.spec.argv.is_empty() && plan.spec.program.as_path().is_absolute());
    }
    true
}

/// What the reaper finds of a dead runner, in a directory that only its owner writes.
pub fn run_record(data: &[u8]) -> bool {
    let record = serde_json::from_slice::<RunRecord>(data);
    record.is_ok_and(|record| {
        assert!(AnalysisId::new(record.id.as_str()).is_ok());
        true
    })
}
