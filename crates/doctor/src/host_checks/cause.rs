//! Finds the cause and the remedy of each mechanism that fails, from the result of trying it and from the host's files.

use std::path::Path;

use rustix::io::Errno;
use sandbox::probe::mechanisms::{Mechanism, MechanismResult, Need};

use super::host_facts::HostFacts;
use super::{Finding, Remedy, Severity, container, describe_errno, join_paths};

/// The AppArmor profile that lets Fumehood, and no other program, make user namespaces where AppArmor forbids them.
const APPARMOR_PROFILE: &str = include_str!("../../../../packaging/apparmor/fumehood");
/// The usual paths of the binary, as the profile writes them.
const PROFILE_PATHS: &str = "/usr/{,local/}bin/fumehood";
/// The first kernel release that has a mechanism. Mechanisms that every kernel in use has are not listed.
const KERNEL_SINCE: [(Mechanism, &str); 7] = [
    (Mechanism::Landlock, "5.13"),
    (Mechanism::ReadOnlyMounts, "5.12"),
    (Mechanism::IdmappedMounts, "5.12"),
    (Mechanism::Overlay, "5.11"),
    (Mechanism::CloseRange, "5.11"),
    (Mechanism::Openat2, "5.6"),
    (Mechanism::SeccompNotification, "5.0"),
];

/// Returns each cause with the mechanisms that fail because of it. `severity` says how much it matters here that level
/// `full` is missing.
pub fn find_causes(
    tried: &[MechanismResult],
    facts: &HostFacts,
    severity: Severity,
) -> Vec<Finding> {
    let mut failed: Vec<&MechanismResult> = tried.iter().filter(|t| t.failed().is_some()).collect();
    let mut findings = Vec::new();
    // Landlock is switched on at boot. Neither a container nor a sysctl controls it, so it gets a finding of its own.
    let is_landlock = |t: &&MechanismResult| t.mechanism == Mechanism::Landlock;
    if let Some(at) = failed.iter().position(is_landlock) {
        let tried = failed.remove(at);
        findings.push(with_mechanisms(landlock(tried, facts, severity), &[tried]));
    }
    let is_needed = |t: &&MechanismResult| t.mechanism.need() != Need::Neither;
    let (needed, optional): (Vec<_>, Vec<_>) = failed.into_iter().partition(is_needed);
    if needed.is_empty() {
        let missing = |t| with_mechanisms(optional_mechanism_missing(t, facts), &[t]);
        findings.extend(optional.into_iter().map(missing));
        return findings;
    }
    let cause = container::find_restrictions(facts, severity).or_else(|| {
        let cause = user_namespaces(&needed, facts)
            .or_else(|| namespace_count(&needed, facts))
            .or_else(|| uids_not_mapped(&needed, facts))
            .or_else(|| missing_capabilities(facts))?;
        Some(Finding { severity, ..cause })
    });
    let unexplained = |t: &&_| with_mechanisms(unexplained_failure(t, facts, severity), &[t]);
    match cause {
        // The optional mechanisms all need namespaces. They cannot be tried where namespaces fail, so they have the
        // same cause, or are not reported.
        Some(cause) => findings.push(with_mechanisms(cause, &[needed, optional].concat())),
        None => findings.extend(needed.iter().map(unexplained)),
    }
    findings
}

/// Reports a mechanism that runs can do without, and the consequence.
fn optional_mechanism_missing(tried: &MechanismResult, facts: &HostFacts) -> Finding {
    let instead = match tried.mechanism {
        Mechanism::Overlay => {
            "data is shown without an overlay, so a directory with a FIFO or socket in it is refused"
        }
        Mechanism::IdmappedMounts => "data must be readable by everyone, or the run is refused",
        _ => "runs go without",
    };
    let mut finding = unexplained_failure(tried, facts, Severity::Note);
    finding.text += &format!(": {instead}");
    finding
}

fn with_mechanisms(finding: Finding, failed: &[&MechanismResult]) -> Finding {
    Finding {
        mechanisms: failed.iter().map(|t| t.mechanism).collect(),
        ..finding
    }
}

fn has_errno(tried: &MechanismResult, any: &[Errno]) -> bool {
    let errno = tried.failed().and_then(|(_, errno)| errno);
    errno.is_some_and(|n| any.iter().any(|e| e.raw_os_error() == n))
}

/// Names the host setting that forbids unprivileged user namespaces, if there is one and the mechanism trial failed
/// with its errno.
fn user_namespaces(failed: &[&MechanismResult], facts: &HostFacts) -> Option<Finding> {
    if facts.is_root || !has_errno(failed.first()?, &[Errno::PERM, Errno::ACCESS]) {
        return None;
    }
    let apparmor = facts.sysctls.get("apparmor_restrict_unprivileged_userns");
    if facts.sysctls.get("unprivileged_userns_clone") == Some(0) {
        let text = "this host forbids plain users to make user namespaces (kernel.unprivileged_userns_clone = 0)";
        let lines = [
            "echo kernel.unprivileged_userns_clone=1 | sudo tee /etc/sysctl.d/90-fumehood.conf",
            "sudo sysctl --system",
        ];
        Some(
            Finding::note("userns_sysctl", text)
                .remedy("Allow them, as Debian does by default:", &lines),
        )
    } else if apparmor.is_some_and(|value| value != 0) {
        let text = "AppArmor forbids user namespaces to programs without a profile that allows them \
            (kernel.apparmor_restrict_unprivileged_userns = 1)";
        let exe = std::env::current_exe().ok();
        Some(Finding::note("apparmor_userns", text).with(apparmor_remedy(exe.as_deref())))
    } else if facts.in_chroot {
        let text = "the kernel gives no user namespace to a process in a chroot, and this one is in one: nothing is \
            mounted on its /";
        let remedy =
            "Enter the tree with pivot_root or switch_root instead of chroot, or run as root.";
        Some(Finding::note("chroot", text).remedy(remedy, &[]))
    } else {
        None
    }
}

/// Returns the profile for the path of this binary, with the commands that install it.
fn apparmor_remedy(exe: Option<&Path>) -> Remedy {
    let elsewhere = exe
        .and_then(Path::to_str)
        .filter(|p| !["/usr/bin/fumehood", "/usr/local/bin/fumehood"].contains(p))
        // These characters have a special meaning in an AppArmor profile.
        .filter(|p| !p.contains(['"', '*', '?', '[', '{', '@', '\\', '^', '\n']));
    let profile = match elsewhere {
        None => APPARMOR_PROFILE.to_owned(),
        Some(path) => APPARMOR_PROFILE.replace(PROFILE_PATHS, &format!("\"{path}\"")),
    };
    let rules = profile.lines();
    let rules: Vec<&str> = rules
        .filter(|l| !l.starts_with('#') && !l.is_empty())
        .collect();
    let lines = [
        &["sudo install -m 644 /dev/stdin /etc/apparmor.d/fumehood <<'END' &&"],
        &rules[..],
        &[
            "END",
            "sudo apparmor_parser -r /etc/apparmor.d/fumehood",
            "# or, for every program on this host:",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ],
    ];
    let text = match elsewhere {
        None => "Install the profile that lets Fumehood, and nothing else, have them:",
        Some(_) => {
            "Install a profile for this binary; whoever may replace the file gets what it allows:"
        }
    };
    Remedy::new(text, &lines.concat())
}

/// Names the namespace limit (`user.max_*_namespaces`) that is reached: the kernel answers ENOSPC for every kind of
/// namespace.
fn namespace_count(failed: &[&MechanismResult], facts: &HostFacts) -> Option<Finding> {
    let full = |t: &&&MechanismResult| has_errno(t, &[Errno::NOSPC, Errno::USERS]);
    let kind = match failed.iter().find(full)?.mechanism {
        Mechanism::UserNamespace | Mechanism::InnerUserNamespace => "user",
        Mechanism::MountNamespace => "mnt",
        other => other.as_str().strip_suffix("_namespace")?,
    };
    let name = format!("max_{kind}_namespaces");
    let value = facts.sysctls.get(&name)?;
    let text = match value {
        0 => format!("this host allows no {kind} namespaces (user.{name} = 0)"),
        n => format!(
            "no more such namespaces are to be had: user.{name} is {n}, and a namespace around this one may allow fewer"
        ),
    };
    let finding = Finding::note("namespace_count", text);
    Some(match value {
        // The limit belongs to the surrounding user namespace. Only its creator can raise it.
        _ if facts.in_user_namespace => finding.remedy(
            format!("Whoever made the user namespace that this process is in must allow more (user.{name})."),
            &[],
        ),
        0 => {
            let line = format!("echo user.{name}=10000 | sudo tee /etc/sysctl.d/90-fumehood.conf");
            finding.remedy("Allow them:", &[&line, "sudo sysctl --system"])
        }
        n => {
            let line = format!("sudo sysctl -w user.{name}={}", n.saturating_mul(2));
            finding.remedy("Allow them:", &[&line])
        }
    })
}

/// Root in a user namespace has only the uids that are mapped into that namespace.
fn uids_not_mapped(failed: &[&MechanismResult], facts: &HostFacts) -> Option<Finding> {
    let mut failed = failed.iter();
    let lease = failed.find(|t| t.mechanism == Mechanism::LeasedUid)?;
    if !facts.in_user_namespace || !has_errno(lease, &[Errno::INVAL, Errno::PERM]) {
        return None;
    }
    let text = "this root is a user namespace's, and the uids that root's analyses run under are not in it \
        (/proc/self/uid_map)";
    let remedy = "Run Fumehood as a plain user in it, who needs no other uids; or outside of it.";
    Some(Finding::note("uids_of_namespace", text).remedy(remedy, &[]))
}

fn missing_capabilities(facts: &HostFacts) -> Option<Finding> {
    if facts.lacks_capabilities.is_empty() {
        return None;
    }
    let lacks = facts.lacks_capabilities.join(", ");
    let text = format!("this root lacks capabilities that building a sandbox takes: {lacks}");
    let remedy = "Give them back (CapabilityBoundingSet= of a systemd service, --cap-add of a container), or run as a \
        plain user, who needs none.";
    Some(Finding::note("capabilities", text).remedy(remedy, &[]))
}

fn landlock(tried: &MechanismResult, facts: &HostFacts, without_full: Severity) -> Finding {
    // At level `full` Landlock is the second layer. Where level `full` is missing, Landlock is the only one.
    let severity = without_full.max(Severity::Warning);
    if has_errno(tried, &[Errno::OPNOTSUPP]) {
        let modules = facts.security_modules.as_deref().unwrap_or("").split(',');
        // The kernel always has `capability`, and the `lsm=` parameter does not list it.
        let listed = |m: &&str| !["", "landlock", "capability"].contains(m);
        let modules: Vec<&str> = modules.filter(listed).collect();
        let (modules, more) = match modules.is_empty() {
            false => (modules.join(","), ""),
            true => (
                String::from("lockdown,yama,integrity,apparmor,bpf"),
                ". Which modules this kernel has now it does not say (root reads it in /sys/kernel/security/lsm); \
                 keep those, with landlock first",
            ),
        };
        let line = format!("lsm=landlock,{modules}");
        let text = format!(
            "Add this word to the kernel command line (GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub) and \
             start the machine again{more}:"
        );
        let off = "Landlock is part of this kernel and not switched on";
        return Finding::new("landlock", severity, off).remedy(text, &[&line]);
    }
    if facts.is_filtered {
        let text = "Landlock's calls are refused by the seccomp filter that this process was started under";
        let remedy = container::find_restrictions(facts, severity).and_then(|f| f.remedy);
        return Finding::new("landlock", severity, text).with(remedy);
    }
    unexplained_failure(tried, facts, severity)
}

/// Reports a failure that no file of the host explains: the step that failed and the kernel's errno.
fn unexplained_failure(tried: &MechanismResult, facts: &HostFacts, severity: Severity) -> Finding {
    let (step, errno) = tried.failed().unwrap_or_default();
    let answer = errno.map_or(String::new(), |n| format!(": {}", describe_errno(n)));
    let name = tried.mechanism.as_str();
    let text = format!("{} cannot be had ({step}{answer})", name.replace('_', " "));
    let finding = Finding::new(name, severity, text);
    let since = KERNEL_SINCE.iter().find(|(m, _)| *m == tried.mechanism);
    match (tried.mechanism, since) {
        (_, Some((_, since))) if has_errno(tried, &[Errno::NOSYS]) && !facts.is_filtered => {
            let text = format!(
                "Linux has it from {since} on; this is {}. Start a newer kernel, or one built with it.",
                facts.kernel
            );
            finding.remedy(text, &[])
        }
        (Mechanism::NewProc, _) if !facts.masked_proc.is_empty() => finding.remedy(
            "The kernel refuses a new /proc where parts of the present one are covered. Uncover them:",
            &[&format!("sudo umount {}", join_paths(&facts.masked_proc, " "))],
        ),
        (Mechanism::MemoryOfChild, _) if facts.sysctls.get("yama_ptrace_scope") > Some(1) => finding
            .remedy(
                "Yama forbids it (kernel.yama.ptrace_scope); 1 is enough to keep strangers out:",
                &["sudo sysctl -w kernel.yama.ptrace_scope=1"],
            ),
        (Mechanism::IdmappedMounts, _) => finding.remedy(
            "Data on this file system must then be readable by everyone (chmod -R o+rX), or be copied to a file \
             system that can (ext4, XFS, Btrfs).",
            &[],
        ),
        _ => finding,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::host_checks::host_facts::{Container, Sysctls};
    use sandbox::probe::mechanisms::MechanismVerdict;
    use std::path::PathBuf;

    fn fails(mechanism: Mechanism, errno: Errno) -> MechanismResult {
        MechanismResult {
            mechanism,
            verdict: MechanismVerdict::Fails {
                step: String::from("unshare"),
                errno: Some(errno.raw_os_error()),
            },
        }
    }

    fn plain() -> HostFacts {
        HostFacts {
            kernel: String::from("6.8.0-31-generic"),
            uid: 1000,
            ..HostFacts::default()
        }
    }

    fn lines(finding: &Finding) -> String {
        finding.remedy.as_ref().unwrap().lines.join("\n")
    }

    #[test]
    fn apparmor_is_blamed_only_for_a_refusal() {
        let mut facts = plain();
        facts.sysctls = Sysctls::with("apparmor_restrict_unprivileged_userns", 1);
        for errno in [Errno::PERM, Errno::ACCESS] {
            let found = find_causes(
                &[fails(Mechanism::UserNamespace, errno)],
                &facts,
                Severity::Warning,
            );
            assert_eq!(found.len(), 1);
            assert_eq!(found[0].name, "apparmor_userns");
            let lines = lines(&found[0]);
            assert!(lines.contains("userns,") && lines.contains("apparmor_parser -r"));
        }
        // Without a failure there is no finding, whatever the sysctl says. Another errno does not come from AppArmor.
        assert!(find_causes(&[], &facts, Severity::Warning).is_empty());
        let found = find_causes(
            &[fails(Mechanism::UserNamespace, Errno::NOSYS)],
            &facts,
            Severity::Warning,
        );
        assert_eq!(found[0].name, "user_namespace");
        facts.sysctls = Sysctls::with("apparmor_restrict_unprivileged_userns", 0);
        let found = find_causes(
            &[fails(Mechanism::UserNamespace, Errno::PERM)],
            &facts,
            Severity::Warning,
        );
        assert_eq!(found[0].name, "user_namespace");
    }

    #[test]
    fn the_profile_names_the_binary_that_runs() {
        let usual = apparmor_remedy(Some(Path::new("/usr/bin/fumehood")))
            .lines
            .join("\n");
        assert!(usual.contains(PROFILE_PATHS), "{usual}");
        let own = apparmor_remedy(Some(Path::new("/home/ada/my bin/fumehood")))
            .lines
            .join("\n");
        assert!(own.contains("\"/home/ada/my bin/fumehood\"") && !own.contains(PROFILE_PATHS));
    }

    #[test]
    fn a_count_of_zero_is_told_from_one_that_is_used_up() {
        let mut facts = plain();
        let tried = [fails(Mechanism::UserNamespace, Errno::NOSPC)];
        facts.sysctls = Sysctls::with("max_user_namespaces", 0);
        let found = find_causes(&tried, &facts, Severity::Stops);
        assert!(found[0].text.contains("max_user_namespaces = 0"));
        assert!(lines(&found[0]).contains("user.max_user_namespaces=10000"));
        facts.sysctls = Sysctls::with("max_user_namespaces", 96_343);
        let found = find_causes(&tried, &facts, Severity::Stops);
        assert!(found[0].text.contains("is 96343"));
    }

    #[test]
    fn docker_is_told_exactly_what_it_withholds() {
        let mut facts = HostFacts {
            container: Some(Container::Docker),
            container_because: Some(String::from("/.dockerenv")),
            is_filtered: true,
            apparmor_profile: Some(String::from("docker-default (enforce)")),
            masked_proc: vec![PathBuf::from("/proc/kcore")],
            is_root: true,
            lacks_capabilities: vec!["NET_ADMIN", "SYS_ADMIN"],
            ..plain()
        };
        let tried = [
            fails(Mechanism::MountNamespace, Errno::PERM),
            fails(Mechanism::Overlay, Errno::PERM),
        ];
        let found = find_causes(&tried, &facts, Severity::Warning);
        let flags = lines(&found[0]);
        for flag in [
            "--cap-add SYS_ADMIN",
            "--cap-add NET_ADMIN",
            "seccomp=unconfined",
            "apparmor=unconfined",
            "systempaths=unconfined",
        ] {
            assert!(flags.contains(flag), "{flag}: {flags}");
        }
        // One cause covers both mechanisms: the second was not reached because the first failed.
        assert_eq!(found.len(), 1);
        let failing = [Mechanism::MountNamespace, Mechanism::Overlay];
        assert_eq!(found[0].mechanisms, failing);
        // The remedy asks only for what the container withholds.
        facts.apparmor_profile = Some(String::from("unconfined"));
        facts.masked_proc.clear();
        facts.is_root = false;
        facts.lacks_capabilities.clear();
        let flags = lines(&find_causes(&tried, &facts, Severity::Warning)[0]);
        assert!(flags.contains("seccomp=unconfined"), "{flags}");
        assert!(!flags.contains("apparmor") && !flags.contains("systempaths"));
        assert!(!flags.contains("cap-add"));
    }

    #[test]
    fn podman_and_kubernetes_have_words_of_their_own() {
        let mut facts = HostFacts {
            container: Some(Container::Podman),
            is_filtered: true,
            masked_proc: vec![PathBuf::from("/proc/kcore")],
            ..plain()
        };
        let tried = [fails(Mechanism::NewProc, Errno::PERM)];
        let flags = lines(&find_causes(&tried, &facts, Severity::Warning)[0]);
        assert!(flags.contains("unmask=ALL"), "{flags}");
        facts.container = Some(Container::Kubernetes);
        let flags = lines(&find_causes(&tried, &facts, Severity::Warning)[0]);
        for word in [
            "hostUsers: false",
            "procMount: Unmasked",
            "type: Unconfined",
        ] {
            assert!(flags.contains(word), "{word}: {flags}");
        }
    }

    #[test]
    fn landlock_that_is_off_is_switched_on_with_the_modules_there_are() {
        let facts = HostFacts {
            security_modules: Some(String::from("capability,yama,apparmor")),
            ..plain()
        };
        let found = find_causes(
            &[fails(Mechanism::Landlock, Errno::OPNOTSUPP)],
            &facts,
            Severity::Note,
        );
        assert_eq!(lines(&found[0]), "lsm=landlock,yama,apparmor");
        assert_eq!(found[0].severity, Severity::Warning);
        let found = find_causes(
            &[fails(Mechanism::Landlock, Errno::NOSYS)],
            &facts,
            Severity::Note,
        );
        assert!(found[0].remedy.as_ref().unwrap().text.contains("5.13"));
    }
}
