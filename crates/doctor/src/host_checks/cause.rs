//! Finds the cause and the remedy of each mechanism that fails, from the result of trying it and from the host's files.

use std::path::Path;

use rustix::io::Errno;
use sandbox::probe::mechanisms::{Mechanism, MechanismResult, Need};

use super::host_facts::{HostFacts, Sysctls};
use super::{Finding, Remedy, Severity, container, errno_name};

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
    if let Some(at) = failed
        .iter()
        .position(|t| t.mechanism == Mechanism::Landlock)
    {
        let tried = failed.remove(at);
        findings.push(with_mechanisms(landlock(tried, facts, severity), &[tried]));
    }
    let (needed, rest): (Vec<&MechanismResult>, Vec<&MechanismResult>) = failed
        .iter()
        .copied()
        .partition(|t| t.mechanism.need() != Need::Neither);
    let cause = match needed.is_empty() {
        true => None,
        false => container::find_restrictions(facts, severity)
            .or_else(|| user_namespaces(&needed, facts, severity))
            .or_else(|| namespace_count(&needed, facts, severity))
            .or_else(|| uids_not_mapped(&needed, facts, severity))
            .or_else(|| missing_capabilities(facts, severity)),
    };
    // A mechanism that needs namespaces cannot be tried where namespaces fail. Do not report it separately.
    let (unreached, rest): (Vec<&MechanismResult>, Vec<&MechanismResult>) = rest
        .into_iter()
        .partition(|t| !needed.is_empty() && needs_namespaces(t.mechanism));
    match cause {
        Some(finding) => findings.push(with_mechanisms(finding, &[needed, unreached].concat())),
        None => findings.extend(
            needed
                .iter()
                .map(|t| with_mechanisms(unexplained_failure(t, facts, severity), &[t])),
        ),
    }
    for tried in rest {
        findings.push(with_mechanisms(
            optional_mechanism_missing(tried, facts),
            &[tried],
        ));
    }
    findings
}

fn needs_namespaces(mechanism: Mechanism) -> bool {
    matches!(mechanism, Mechanism::Overlay | Mechanism::IdmappedMounts)
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
    let finding = unexplained_failure(tried, facts, Severity::Note);
    let text = format!("{}: {instead}", finding.text);
    Finding { text, ..finding }
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

/// Names the host setting that forbids unprivileged user namespaces, if there is one and the attempt failed with its
/// errno.
fn user_namespaces(
    failed: &[&MechanismResult],
    facts: &HostFacts,
    severity: Severity,
) -> Option<Finding> {
    let first = failed.first()?;
    if facts.is_root {
        return None;
    }
    let refused = has_errno(first, &[Errno::PERM, Errno::ACCESS]);
    let Sysctls {
        apparmor_restrict_unprivileged_userns: apparmor,
        unprivileged_userns_clone: clone,
        ..
    } = facts.sysctls;
    if refused && clone == Some(0) {
        let text = "this host forbids plain users to make user namespaces (kernel.unprivileged_userns_clone = 0)";
        let remedy = Remedy::new(
            "Allow them, as Debian does by default:",
            &[
                "echo kernel.unprivileged_userns_clone=1 | sudo tee /etc/sysctl.d/90-fumehood.conf",
                "sudo sysctl --system",
            ],
        );
        return Some(Finding::new("userns_sysctl", severity, text).with(remedy));
    }
    if refused && apparmor.is_some_and(|value| value != 0) {
        let text = "AppArmor forbids user namespaces to programs without a profile that allows them \
            (kernel.apparmor_restrict_unprivileged_userns = 1)";
        let exe = std::env::current_exe().ok();
        let remedy = apparmor_remedy(exe.as_deref());
        return Some(Finding::new("apparmor_userns", severity, text).with(remedy));
    }
    if refused && facts.in_chroot {
        let text = "the kernel gives no user namespace to a process in a chroot, and this one is in one: nothing is \
            mounted on its /";
        let remedy = Remedy::new(
            "Enter the tree with pivot_root or switch_root instead of chroot, or run as root.",
            &[],
        );
        return Some(Finding::new("chroot", severity, text).with(remedy));
    }
    None
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
    let mut lines = vec![String::from(
        "sudo install -m 644 /dev/stdin /etc/apparmor.d/fumehood <<'END' &&",
    )];
    let rules = profile
        .lines()
        .filter(|l| !l.starts_with('#') && !l.is_empty());
    lines.extend(rules.map(str::to_owned));
    lines.push(String::from("END"));
    lines.push(String::from(
        "sudo apparmor_parser -r /etc/apparmor.d/fumehood",
    ));
    lines.push(String::from("# or, for every program on this host:"));
    lines.push(String::from(
        "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ));
    Remedy {
        text: match elsewhere {
            None => {
                String::from("Install the profile that lets Fumehood, and nothing else, have them:")
            }
            Some(_) => String::from(
                "Install a profile for this binary; whoever may replace the file gets what it allows:",
            ),
        },
        lines,
        untried: false,
    }
}

/// Names the namespace limit (`user.max_*_namespaces`) that is reached: the kernel answers ENOSPC for every kind of
/// namespace.
fn namespace_count(
    failed: &[&MechanismResult],
    facts: &HostFacts,
    severity: Severity,
) -> Option<Finding> {
    let full: Vec<&&MechanismResult> = failed
        .iter()
        .filter(|t| has_errno(t, &[Errno::NOSPC, Errno::USERS]))
        .collect();
    let of = |mechanism: Mechanism| {
        let s = &facts.sysctls;
        Some(match mechanism {
            Mechanism::UserNamespace | Mechanism::InnerUserNamespace => {
                ("max_user_namespaces", s.max_user_namespaces)
            }
            Mechanism::MountNamespace => ("max_mnt_namespaces", s.max_mnt_namespaces),
            Mechanism::PidNamespace => ("max_pid_namespaces", s.max_pid_namespaces),
            Mechanism::NetNamespace => ("max_net_namespaces", s.max_net_namespaces),
            Mechanism::IpcNamespace => ("max_ipc_namespaces", s.max_ipc_namespaces),
            Mechanism::UtsNamespace => ("max_uts_namespaces", s.max_uts_namespaces),
            Mechanism::CgroupNamespace => ("max_cgroup_namespaces", s.max_cgroup_namespaces),
            _ => return None,
        })
    };
    let (name, value) = full.first().and_then(|t| of(t.mechanism))?;
    let kind = name.trim_start_matches("max_");
    let kind = kind.trim_end_matches("_namespaces");
    let (text, line) = match value {
        Some(0) => (
            format!("this host allows no {kind} namespaces (user.{name} = 0)"),
            format!("echo user.{name}=10000 | sudo tee /etc/sysctl.d/90-fumehood.conf"),
        ),
        Some(n) => (
            format!(
                "no more such namespaces are to be had: user.{name} is {n}, and a namespace around this one may \
                 allow fewer"
            ),
            format!("sudo sysctl -w user.{name}={}", n.saturating_mul(2)),
        ),
        None => return None,
    };
    let mut remedy = Remedy::new("Allow them:", &[&line]);
    if value == Some(0) {
        remedy.lines.push(String::from("sudo sysctl --system"));
    }
    let finding = Finding::new("namespace_count", severity, text);
    Some(match facts.in_user_namespace {
        // The limit belongs to the surrounding user namespace. Only its creator can raise it.
        true => finding.with(Remedy::new(
            format!("Whoever made the user namespace that this process is in must allow more (user.{name})."),
            &[],
        )),
        false => finding.with(remedy),
    })
}

/// Root in a user namespace has only the uids that are mapped into that namespace.
fn uids_not_mapped(
    failed: &[&MechanismResult],
    facts: &HostFacts,
    severity: Severity,
) -> Option<Finding> {
    let lease = failed
        .iter()
        .find(|t| t.mechanism == Mechanism::LeasedUid)?;
    if !facts.in_user_namespace || !has_errno(lease, &[Errno::INVAL, Errno::PERM]) {
        return None;
    }
    let text = "this root is a user namespace's, and the uids that root's analyses run under are not in it \
        (/proc/self/uid_map)";
    let remedy = Remedy::new(
        "Run Fumehood as a plain user in it, who needs no other uids; or outside of it.",
        &[],
    );
    Some(Finding::new("uids_of_namespace", severity, text).with(remedy))
}

fn missing_capabilities(facts: &HostFacts, severity: Severity) -> Option<Finding> {
    if facts.lacks_capabilities.is_empty() {
        return None;
    }
    let lacks = facts.lacks_capabilities.join(", ");
    let text = format!("this root lacks capabilities that building a sandbox takes: {lacks}");
    let remedy = Remedy::new(
        "Give them back (CapabilityBoundingSet= of a systemd service, --cap-add of a container), or run as a plain \
         user, who needs none.",
        &[],
    );
    Some(Finding::new("capabilities", severity, text).with(remedy))
}

fn landlock(tried: &MechanismResult, facts: &HostFacts, without_full: Severity) -> Finding {
    // At level `full` Landlock is the second layer. Where level `full` is missing, Landlock is the only one.
    let severity = without_full.max(Severity::Warning);
    if has_errno(tried, &[Errno::OPNOTSUPP]) {
        let modules = facts.security_modules.as_deref().unwrap_or("");
        let list = modules
            .split(',')
            .filter(|m| !m.is_empty() && *m != "landlock");
        // The kernel always has `capability`, and the `lsm=` parameter does not list it.
        let list: Vec<&str> = list.filter(|m| *m != "capability").collect();
        let (line, text) = match list.is_empty() {
            false => (
                format!("lsm=landlock,{}", list.join(",")),
                "Add this word to the kernel command line (GRUB_CMDLINE_LINUX in /etc/default/grub, then \
                 update-grub) and start the machine again:",
            ),
            true => (
                String::from("lsm=landlock,lockdown,yama,integrity,apparmor,bpf"),
                "Add this word to the kernel command line (GRUB_CMDLINE_LINUX in /etc/default/grub, then \
                 update-grub) and start the machine again. Which modules this kernel has now it does not say (root \
                 reads it in /sys/kernel/security/lsm); keep those, with landlock first:",
            ),
        };
        return Finding::new(
            "landlock",
            severity,
            "Landlock is part of this kernel and not switched on",
        )
        .with(Remedy::new(text, &[&line]));
    }
    if facts.is_filtered {
        let text = "Landlock's calls are refused by the seccomp filter that this process was started under";
        return match container::find_restrictions(facts, severity).and_then(|f| f.remedy) {
            Some(remedy) => Finding::new("landlock", severity, text).with(remedy),
            None => Finding::new("landlock", severity, text),
        };
    }
    unexplained_failure(tried, facts, severity)
}

/// Reports a failure that no file of the host explains: the step that failed and the kernel's errno.
fn unexplained_failure(tried: &MechanismResult, facts: &HostFacts, severity: Severity) -> Finding {
    let (step, errno) = tried.failed().unwrap_or_default();
    let answer = match errno {
        Some(n) => errno_name(n).map_or_else(|| format!(": errno {n}"), |name| format!(": {name}")),
        None => String::new(),
    };
    let name = tried.mechanism.as_str();
    let finding = Finding::new(
        name,
        severity,
        format!("{} cannot be had ({step}{answer})", name.replace('_', " ")),
    );
    let since = KERNEL_SINCE.iter().find(|(m, _)| *m == tried.mechanism);
    match (tried.mechanism, since) {
        (_, Some((_, since))) if has_errno(tried, &[Errno::NOSYS]) && !facts.is_filtered => finding
            .with(Remedy::new(
                format!(
                    "Linux has it from {since} on; this is {}. Start a newer kernel, or one built with it.",
                    facts.kernel
                ),
                &[],
            )),
        (Mechanism::NewProc, _) if !facts.masked_proc.is_empty() => finding.with(Remedy::new(
            "The kernel refuses a new /proc where parts of the present one are covered. Uncover them:",
            &[&format!(
                "sudo umount {}",
                facts
                    .masked_proc
                    .iter()
                    .map(|p| p.display().to_string())
                    .collect::<Vec<_>>()
                    .join(" ")
            )],
        )),
        (Mechanism::MemoryOfChild, _) if facts.sysctls.yama_ptrace_scope.is_some_and(|n| n > 1) => {
            finding.with(Remedy::new(
                "Yama forbids it (kernel.yama.ptrace_scope); 1 is enough to keep strangers out:",
                &["sudo sysctl -w kernel.yama.ptrace_scope=1"],
            ))
        }
        (Mechanism::IdmappedMounts, _) => finding.with(Remedy::new(
            "Data on this file system must then be readable by everyone (chmod -R o+rX), or be copied to a file \
             system that can (ext4, XFS, Btrfs).",
            &[],
        )),
        _ => finding,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::host_checks::host_facts::Container;
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
        facts.sysctls.apparmor_restrict_unprivileged_userns = Some(1);
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
        facts.sysctls.apparmor_restrict_unprivileged_userns = Some(0);
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
        facts.sysctls.max_user_namespaces = Some(0);
        let found = find_causes(&tried, &facts, Severity::Stops);
        assert!(found[0].text.contains("max_user_namespaces = 0"));
        assert!(lines(&found[0]).contains("user.max_user_namespaces=10000"));
        facts.sysctls.max_user_namespaces = Some(96_343);
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
