//! What else makes runs fail or differ: uids, swap, locale, fonts, the caller's own limits, interpreters.

use std::collections::BTreeSet;
use std::io::Read;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Resource;
use sandbox::spec::{Enforcement, LimitName};

use super::host_facts::read_text;
use super::{Finding, LeaseResult, Remedy, Severity, Subject};
use engine::plan::limits::{self, error_chain};
use engine::workspace::uid_pool::{self, UidLease};

/// How long to wait for another program's answer. `getent` may ask a directory service on another machine.
const ANSWER_WAIT: Duration = Duration::from_millis(400);
const ANSWER_BYTES_MAX: usize = 64 << 10;

pub fn examine(subject: &Subject, limits: &[Enforcement], lease: LeaseResult<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    match lease {
        Some(Ok(lease)) => findings.extend(check_uids(lease)),
        Some(Err(e)) => {
            let text = format!("no uid for analyses is to be had: {}", error_chain(e));
            findings.push(Finding::new("uids", Severity::Stops, text));
        }
        None => {}
    }
    findings.push(check_swap(limits));
    findings.extend(check_own_limits(subject));
    findings.extend(check_locale());
    findings.push(check_fonts());
    findings.push(list_interpreters());
    findings
}

/// Checks that the range of uids under which root's analyses run belongs to nobody else.
fn check_uids(lease: &UidLease) -> Vec<Finding> {
    let range = uid_pool::RANGE;
    let mut taken = Vec::new();
    for (file, field) in [("/etc/passwd", 2), ("/etc/group", 2)] {
        for line in read_text(file).lines() {
            let number = line.split(':').nth(field).and_then(|n| n.parse().ok());
            if number.is_some_and(|n: u32| range.contains(&n)) {
                taken.push(format!("{file}: {line}"));
            }
        }
    }
    for file in ["/etc/subuid", "/etc/subgid"] {
        for line in read_text(file).lines() {
            let mut numbers = line
                .split(':')
                .skip(1)
                .filter_map(|n| n.parse::<u64>().ok());
            if let (Some(first), Some(count)) = (numbers.next(), numbers.next())
                && first < u64::from(range.end)
                && first.saturating_add(count) > u64::from(range.start)
            {
                taken.push(format!("{file}: {line}"));
            }
        }
    }
    // Ask the C library too: LDAP and other directory services have accounts that no file lists.
    let uid = lease.uid.to_string();
    for kind in ["passwd", "group"] {
        if let Some(line) = run_program("getent", &[kind, &uid]) {
            taken.push(format!("getent {kind} {uid}: {}", line.trim()));
        }
    }
    let foreign_uids = foreign_processes(lease.uid);
    let mut findings = Vec::new();
    if !foreign_uids.is_empty() {
        let list: Vec<String> = foreign_uids.iter().map(u32::to_string).collect();
        let text = format!(
            "processes run under uids {} that no analysis has leased; those are passed over",
            list.join(", ")
        );
        findings.push(
            Finding::new("uids_in_use", Severity::Warning, text).with(Remedy::new(
                "See who they are:",
                &[&format!("ps -u {} -o pid,user,lstart,args", list.join(","))],
            )),
        );
    }
    if taken.is_empty() {
        let text = format!(
            "uids {} to {} are nobody's; {uid} was leased and given back",
            range.start,
            range.end - 1
        );
        findings.push(Finding::fine("uids", text));
    } else {
        let text = format!(
            "the uids that analyses run under ({} to {}) are also somebody else's: {}",
            range.start,
            range.end - 1,
            taken.iter().take(3).cloned().collect::<Vec<_>>().join("; ")
        );
        findings.push(Finding::new("uids", Severity::Warning, text).with(Remedy::new(
            "Accounts in files are passed over. Of a directory service keep the range out (in sssd.conf: \
             ldap_idmap_range_max), or give it another one.",
            &[],
        )));
    }
    findings
}

/// Returns the uids of the range that a process has and no running analysis leases.
fn foreign_processes(ours: u32) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        if !name
            .as_encoded_bytes()
            .first()
            .is_some_and(u8::is_ascii_digit)
        {
            continue;
        }
        let status = read_text(&entry.path().join("status").to_string_lossy());
        let uids = status.lines().find_map(|l| l.strip_prefix("Uid:"));
        let numbers = uids.unwrap_or_default().split_ascii_whitespace();
        found.extend(
            numbers
                .filter_map(|n| n.parse().ok())
                .filter(|n| uid_pool::RANGE.contains(n)),
        );
    }
    // A uid whose lock can be taken is not leased.
    found.retain(|uid| *uid != ours && uid_pool::lock_uid(*uid).is_some());
    found
}

fn check_swap(limits: &[Enforcement]) -> Finding {
    let on = read_text("/proc/swaps").lines().count() > 1;
    let memory = limits.iter().find(|e| e.limit == LimitName::Memory);
    let by = memory.map_or("", |e| e.enforced_by.as_str());
    let counted = by.contains("memsw") || by.contains("memory.swap.max");
    match (on, counted) {
        (false, _) => Finding::fine("swap", "this machine has no swap"),
        (true, true) => Finding::fine("swap", "swap is counted with memory"),
        (true, false) => Finding::new(
            "swap",
            Severity::Warning,
            "this machine swaps, and nothing counts an analysis's swap: its memory limit bounds what is resident only",
        )
        .with(Remedy::new(
            "Use cgroup version 2, switch swap accounting on (swapaccount=1 on the kernel command line), or switch \
             swap off:",
            &["sudo swapoff -a"],
        )),
    }
}

/// Checks whether hard limits of this process are lower than what a run sets: the lower limit holds.
fn check_own_limits(subject: &Subject) -> Vec<Finding> {
    let limits = limits::resolve(&subject.limits);
    let wanted = [
        (Resource::Nofile, limits.open_files, "open files", "-n"),
        (
            Resource::Fsize,
            limits.disk_bytes / 1024,
            "KiB in a file",
            "-f",
        ),
        (Resource::Nproc, limits.pids, "processes of this user", "-u"),
    ];
    let mut findings = Vec::new();
    for (resource, least, what, flag) in wanted {
        let most = rustix::process::getrlimit(resource).maximum;
        let most = match resource {
            Resource::Fsize => most.map(|n| n / 1024),
            _ => most,
        };
        if let Some(most) = most.filter(|most| *most < least) {
            let text =
                format!("this shell allows at most {most} {what}, fewer than the {least} of a run");
            findings.push(Finding::new("own_limits", Severity::Warning, text).with(Remedy::new(
                "Raise the hard limit (/etc/security/limits.conf, LimitNOFILE= and its like of a service), then look:",
                &[&format!("ulimit -H {flag}")],
            )));
        }
    }
    if findings.is_empty() {
        findings.push(Finding::fine(
            "own_limits",
            "this process's own limits leave room for a run's",
        ));
    }
    findings
}

/// Asks the C library whether the locale exists with which every analysis starts.
fn check_locale() -> Option<Finding> {
    let charmap = run_program("locale", &["charmap"])?;
    Some(match charmap.trim() {
        "UTF-8" => Finding::fine("locale", "the locale C.UTF-8 is there"),
        other => Finding::new(
            "locale",
            Severity::Warning,
            format!("this host has no locale C.UTF-8: programs that ask the C library get {other}"),
        )
        .with(Remedy::new(
            "Install it (Debian, Ubuntu: libc-bin has it; Fedora, RHEL):",
            &["sudo dnf install glibc-langpack-en || sudo apt-get install --reinstall libc-bin"],
        )),
    })
}

fn check_fonts() -> Finding {
    let roots = ["/usr/share/fonts", "/usr/local/share/fonts"];
    match roots.iter().find(|root| has_font(Path::new(root), 5)) {
        Some(root) => Finding::fine("fonts", format!("there are fonts in {root}")),
        None => Finding::new(
            "fonts",
            Severity::Note,
            "there are no fonts in /usr/share/fonts: R, gnuplot and others plot without text (matplotlib has its own)",
        )
        .with(Remedy::new(
            "Install some:",
            &["sudo apt-get install fonts-dejavu-core    # dnf: dejavu-sans-fonts"],
        )),
    }
}

fn has_font(dir: &Path, depth: usize) -> bool {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let suffixes = [".ttf", ".otf", ".ttc", ".pfb", ".pcf.gz", ".pcf", ".woff"];
    entries.into_iter().any(|entry| {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().to_ascii_lowercase();
        suffixes.iter().any(|s| name.ends_with(s))
            || (depth > 0 && path.is_dir() && has_font(&path, depth - 1))
    })
}

/// Lists the interpreters that a script would find on PATH. For information only.
fn list_interpreters() -> Finding {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = |name: &str| {
        let mut dirs = std::env::split_paths(&path);
        dirs.find_map(|dir| {
            let file = dir.join(name);
            (dir.is_absolute() && rustix::fs::access(&file, rustix::fs::Access::EXEC_OK).is_ok())
                .then_some(file)
        })
    };
    let found: Vec<PathBuf> = ["python3", "Rscript", "julia", "bash"]
        .into_iter()
        .filter_map(on_path)
        .collect();
    let list: Vec<String> = found.iter().map(|p| p.display().to_string()).collect();
    Finding::fine(
        "interpreters",
        match list.is_empty() {
            true => String::from("no interpreter is on PATH"),
            false => format!("on PATH: {}", list.join(", ")),
        },
    )
}

/// Runs a small system program and returns what it prints if it succeeds, within a bound of time and size. The program
/// gets an empty environment but for PATH and the locale that every analysis gets.
fn run_program(program: &str, args: &[&str]) -> Option<String> {
    let mut child = Command::new(program)
        .args(args)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let answer = child.stdout.take().and_then(read_in_time);
    if answer.is_none() {
        // It may have ended by itself.
        let _ = child.kill();
    }
    let status = child.wait().ok()?;
    answer.filter(|_| status.success())
}

fn read_in_time(mut from: std::process::ChildStdout) -> Option<String> {
    let give_up = Instant::now() + ANSWER_WAIT;
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    while answer.len() < ANSWER_BYTES_MAX {
        let left = give_up.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok()?;
        let mut fds = [PollFd::from_borrowed_fd(from.as_fd(), PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&left)) {
            Ok(0) => return None,
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return None,
            Ok(_) => {}
        }
        match from.read(&mut buffer).ok()? {
            0 => break,
            n => answer.extend(&buffer[..n]),
        }
    }
    Some(String::from_utf8_lossy(&answer).into_owned())
}
