//! What else makes runs fail or differ: uids, swap, locale, fonts, the caller's own limits, interpreters.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Resource;
use sandbox::probe::mechanisms::output_in_time;
use sandbox::spec::{Enforcement, LimitName};

use super::host_facts::read_text;
use super::{Finding, LeaseResult, Subject, join_paths};
use engine::plan::limits::{self, error_chain};
use engine::workspace::uid_pool::{self, UidLease};

/// How long to wait for another program's answer. `getent` may ask a directory service on another machine.
const ANSWER_WAIT: Duration = Duration::from_millis(400);

pub fn examine(subject: &Subject, limits: &[Enforcement], lease: LeaseResult<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    match lease {
        Some(Ok(lease)) => findings.extend(check_uids(lease)),
        Some(Err(e)) => {
            let text = format!("no uid for analyses is to be had: {}", error_chain(e));
            findings.push(Finding::stops("uids", text));
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
    let numbers_of = |line: &str| -> Vec<u64> {
        let fields = line.split(':').skip(1);
        fields.filter_map(|n| n.parse().ok()).collect()
    };
    let is_account = |line: &str| {
        let number = line.split(':').nth(2).and_then(|n| n.parse().ok());
        number.is_some_and(|n: u32| range.contains(&n))
    };
    let is_subordinate = |line: &str| match numbers_of(line)[..] {
        [first, count, ..] => {
            first < u64::from(range.end) && first.saturating_add(count) > u64::from(range.start)
        }
        _ => false,
    };
    let mut taken = Vec::new();
    for (file, is_taken) in [
        ("/etc/passwd", &is_account as &dyn Fn(&str) -> bool),
        ("/etc/group", &is_account),
        ("/etc/subuid", &is_subordinate),
        ("/etc/subgid", &is_subordinate),
    ] {
        let text = read_text(file);
        let lines = text.lines().filter(|line| is_taken(line));
        taken.extend(lines.map(|line| format!("{file}: {line}")));
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
        let line = format!("ps -u {} -o pid,user,lstart,args", list.join(","));
        findings.push(Finding::warning("uids_in_use", text).remedy("See who they are:", &[&line]));
    }
    let (first, last) = (range.start, range.end - 1);
    if taken.is_empty() {
        let text = format!("uids {first} to {last} are nobody's; {uid} was leased and given back");
        findings.push(Finding::fine("uids", text));
    } else {
        taken.truncate(3);
        let text = format!(
            "the uids that analyses run under ({first} to {last}) are also somebody else's: {}",
            taken.join("; ")
        );
        findings.push(Finding::warning("uids", text).remedy(
            "Accounts in files are passed over. Of a directory service keep the range out (in sssd.conf: \
             ldap_idmap_range_max), or give it another one.",
            &[],
        ));
    }
    findings
}

/// Returns the uids of the range that a process has and no running analysis leases.
fn foreign_processes(ours: u32) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        // Nothing but processes has such a file there.
        let status = read_text(&entry.path().join("status").to_string_lossy());
        let uids = status.lines().find_map(|l| l.strip_prefix("Uid:"));
        let numbers = uids.unwrap_or_default().split_ascii_whitespace();
        let numbers = numbers.filter_map(|n| n.parse().ok());
        found.extend(numbers.filter(|n| uid_pool::RANGE.contains(n)));
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
        (true, false) => Finding::warning(
            "swap",
            "this machine swaps, and nothing counts an analysis's swap: its memory limit bounds what is resident only",
        )
        .remedy(
            "Use cgroup version 2, switch swap accounting on (swapaccount=1 on the kernel command line), or switch \
             swap off:",
            &["sudo swapoff -a"],
        ),
    }
}

/// Checks whether hard limits of this process are lower than what a run sets: the lower limit holds.
fn check_own_limits(subject: &Subject) -> Vec<Finding> {
    let limits = limits::resolve(&subject.limits);
    let own = |resource| rustix::process::getrlimit(resource).maximum;
    let file_kib = own(Resource::Fsize).map(|n| n / 1024);
    let mut findings = Vec::new();
    for (most, least, what, flag) in [
        (own(Resource::Nofile), limits.open_files, "open files", "-n"),
        (file_kib, limits.disk_bytes / 1024, "KiB in a file", "-f"),
        (
            own(Resource::Nproc),
            limits.pids,
            "processes of this user",
            "-u",
        ),
    ] {
        if let Some(most) = most.filter(|most| *most < least) {
            let text =
                format!("this shell allows at most {most} {what}, fewer than the {least} of a run");
            findings.push(Finding::warning("own_limits", text).remedy(
                "Raise the hard limit (/etc/security/limits.conf, LimitNOFILE= and its like of a service), then look:",
                &[&format!("ulimit -H {flag}")],
            ));
        }
    }
    if findings.is_empty() {
        let text = "this process's own limits leave room for a run's";
        findings.push(Finding::fine("own_limits", text));
    }
    findings
}

/// Asks the C library whether the locale exists with which every analysis starts.
fn check_locale() -> Option<Finding> {
    let charmap = run_program("locale", &["charmap"])?;
    Some(match charmap.trim() {
        "UTF-8" => Finding::fine("locale", "the locale C.UTF-8 is there"),
        other => Finding::warning(
            "locale",
            format!("this host has no locale C.UTF-8: programs that ask the C library get {other}"),
        )
        .remedy(
            "Install it (Debian, Ubuntu: libc-bin has it; Fedora, RHEL):",
            &["sudo dnf install glibc-langpack-en || sudo apt-get install --reinstall libc-bin"],
        ),
    })
}

fn check_fonts() -> Finding {
    let roots = ["/usr/share/fonts", "/usr/local/share/fonts"];
    match roots.iter().find(|root| has_font(Path::new(root), 5)) {
        Some(root) => Finding::fine("fonts", format!("there are fonts in {root}")),
        None => Finding::note(
            "fonts",
            "there are no fonts in /usr/share/fonts: R, gnuplot and others plot without text (matplotlib has its own)",
        )
        .remedy(
            "Install some:",
            &["sudo apt-get install fonts-dejavu-core    # dnf: dejavu-sans-fonts"],
        ),
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
    let may_execute = |file: &Path| rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_ok();
    let on_path = |name: &str| {
        let dirs = std::env::split_paths(&path).filter(|dir| dir.is_absolute());
        dirs.map(|dir| dir.join(name))
            .find(|file| may_execute(file))
    };
    let names = ["python3", "Rscript", "julia", "bash"];
    let found: Vec<PathBuf> = names.into_iter().filter_map(on_path).collect();
    let text = match found.is_empty() {
        true => String::from("no interpreter is on PATH"),
        false => format!("on PATH: {}", join_paths(&found, ", ")),
    };
    Finding::fine("interpreters", text)
}

/// Runs a small system program and returns what it prints if it succeeds, within a bound of time and size. The program
/// gets an empty environment but for PATH and the locale that every analysis gets.
fn run_program(program: &str, args: &[&str]) -> Option<String> {
    let mut command = Command::new(program);
    command
        .args(args)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("LC_ALL", "C.UTF-8");
    let output = output_in_time(&mut command, ANSWER_WAIT).ok()?;
    let answer = output.status.success().then_some(output.stdout)?;
    Some(String::from_utf8_lossy(&answer).into_owned())
}
