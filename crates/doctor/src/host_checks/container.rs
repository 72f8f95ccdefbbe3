//! What a container withholds, and the flags that would grant it. Each flag has a reason that a file of this host
//! gives: a seccomp filter on this process, its AppArmor profile, a masked part of /proc, a missing capability.

use super::host_facts::{Container, HostFacts};
use super::{Finding, Remedy, Severity};

/// The restrictions on this process, as far as files of the host show them.
struct Restrictions {
    seccomp_filter: bool,
    apparmor_profile: bool,
    selinux: bool,
    masked_proc: bool,
}

impl Restrictions {
    fn find(facts: &HostFacts) -> Restrictions {
        let unconfined = |p: &String| p.starts_with("unconfined");
        Restrictions {
            seccomp_filter: facts.is_filtered,
            apparmor_profile: facts
                .apparmor_profile
                .as_ref()
                .is_some_and(|p| !unconfined(p)),
            selinux: facts.selinux_enforcing,
            masked_proc: !facts.masked_proc.is_empty(),
        }
    }

    fn because(&self, facts: &HostFacts) -> String {
        let mut because = Vec::new();
        if self.seccomp_filter {
            because.push(String::from(
                "a seccomp filter (Seccomp: 2 in /proc/self/status)",
            ));
        }
        if self.apparmor_profile {
            let profile = facts.apparmor_profile.as_deref().unwrap_or_default();
            because.push(format!("the AppArmor profile {profile}"));
        }
        if self.selinux {
            because.push(String::from("SELinux, enforcing"));
        }
        if self.masked_proc {
            because.push(format!(
                "{} covered parts of /proc",
                facts.masked_proc.len()
            ));
        }
        if !facts.lacks_capabilities.is_empty() {
            because.push(format!("no {}", facts.lacks_capabilities.join(", no ")));
        }
        because.join("; ")
    }
}

/// Returns the finding that explains every failed mechanism in a container, or under a seccomp filter that somebody
/// else installed.
pub fn find_restrictions(facts: &HostFacts, severity: Severity) -> Option<Finding> {
    let restrictions = Restrictions::find(facts);
    let because = restrictions.because(facts);
    let Some(kind) = facts.container else {
        // Outside a container, only a seccomp filter shows that somebody restricted this process.
        return restrictions.seccomp_filter.then(|| {
            let text = format!(
                "this process was started shut in: {because}; a systemd service with RestrictNamespaces= or \
                 SystemCallFilter=, a snap or a flatpak would look so"
            );
            Finding::new("shut_in", severity, text).with(service())
        });
    };
    if because.is_empty() {
        // The container restricts nothing, so look for another cause.
        return None;
    }
    let named = match kind {
        Container::Kubernetes => "Kubernetes",
        Container::Docker => "Docker",
        Container::Podman => "Podman",
        Container::Lxc => "LXC",
        Container::Nspawn => "systemd-nspawn",
        Container::Other => "unknown make",
    };
    let text = format!("this container ({named}) withholds what level `full` takes: {because}");
    let remedy = match kind {
        Container::Docker => docker(&restrictions, facts),
        Container::Podman => podman(&restrictions),
        Container::Kubernetes => kubernetes(&restrictions),
        Container::Lxc => Remedy::new(
            "Let the container nest others (for LXD and Incus; then start it again):",
            &["incus config set CONTAINER security.nesting=true"],
        )
        .untried(),
        Container::Nspawn => Remedy::new(
            "Start it with the filter lifted and all of /proc:",
            &["systemd-nspawn --system-call-filter='@mount @keyring pivot_root unshare' --capability=CAP_NET_ADMIN …"],
        )
        .untried(),
        Container::Other => Remedy::new(
            "Start it without that filter and profile, with all of /proc, and Fumehood in it as a plain user.",
            &[],
        )
        .untried(),
    };
    Some(Finding::new("container", severity, text).with(remedy))
}

fn service() -> Remedy {
    Remedy::new(
        "If it is a systemd service, add to its [Service] section:",
        &[
            "RestrictNamespaces=no",
            "SystemCallFilter=",
            "ProtectProc=default",
            "ProtectKernelTunables=no",
        ],
    )
    .untried()
}

/// Derived from Docker's default seccomp profile: with SYS_ADMIN it allows mounts and namespaces, but neither
/// pivot_root nor keyctl. The filter has to go in either case.
fn docker(restrictions: &Restrictions, facts: &HostFacts) -> Remedy {
    let mut flags = Vec::new();
    if facts.is_root {
        let capabilities = facts.lacks_capabilities.iter();
        flags.extend(capabilities.map(|c| format!("--cap-add {c}")));
    }
    if restrictions.seccomp_filter {
        flags.push(String::from("--security-opt seccomp=unconfined"));
    }
    if restrictions.apparmor_profile {
        flags.push(String::from("--security-opt apparmor=unconfined"));
    }
    if restrictions.selinux {
        flags.push(String::from("--security-opt label=disable"));
    }
    if restrictions.masked_proc {
        flags.push(String::from("--security-opt systempaths=unconfined"));
    }
    let mut remedy = Remedy::new(
        match facts.is_root {
            true => "Start the container with:",
            false => "Start the container with these flags; none of them is a capability:",
        },
        &[],
    );
    remedy.lines.push(wrapped("docker run", &flags));
    if facts.is_root && !facts.lacks_capabilities.is_empty() {
        let fewer: Vec<String> = flags
            .iter()
            .filter(|f| !f.starts_with("--cap-add"))
            .cloned()
            .collect();
        remedy.lines.push(String::from(
            "# or with Fumehood as a plain user in it, without any capability:",
        ));
        remedy
            .lines
            .push(wrapped("docker run --user 1000:1000", &fewer));
    }
    remedy.untried()
}

fn podman(restrictions: &Restrictions) -> Remedy {
    let mut flags = Vec::new();
    if restrictions.seccomp_filter {
        flags.push(String::from("--security-opt seccomp=unconfined"));
    }
    if restrictions.apparmor_profile {
        flags.push(String::from("--security-opt apparmor=unconfined"));
    }
    if restrictions.selinux {
        flags.push(String::from("--security-opt label=disable"));
    }
    if restrictions.masked_proc {
        flags.push(String::from("--security-opt unmask=ALL"));
    }
    let mut remedy = Remedy::new(
        "Start the container so, and Fumehood in it as a plain user (a rootless container's root does not have \
         the uids that root's Fumehood leases):",
        &[],
    );
    remedy
        .lines
        .push(wrapped("podman run --user 1000:1000", &flags));
    remedy.untried()
}

/// Kubernetes accepts `procMount: Unmasked` only with `hostUsers: false`. Such a pod has 65536 uids, too few for the
/// uids that root's Fumehood leases, so Fumehood runs in it as a plain user.
fn kubernetes(restrictions: &Restrictions) -> Remedy {
    let mut lines = vec!["spec:"];
    if restrictions.masked_proc {
        lines.push("  hostUsers: false            # Kubernetes 1.33 or later; procMount needs it");
    }
    lines.extend([
        "  containers:",
        "  - securityContext:",
        "      runAsUser: 1000",
    ]);
    if restrictions.masked_proc {
        lines.push("      procMount: Unmasked");
    }
    if restrictions.seccomp_filter {
        lines.push("      seccompProfile: {type: Unconfined}");
    }
    if restrictions.apparmor_profile {
        lines.push("      appArmorProfile: {type: Unconfined}");
    }
    Remedy::new(
        "Add to the pod (its namespace must admit that: Pod Security level `privileged`):",
        &lines,
    )
    .untried()
}

/// Formats a command with one flag a line that can be pasted as one command.
fn wrapped(command: &str, flags: &[String]) -> String {
    let mut text = command.to_owned();
    for flag in flags {
        text.push_str(&format!(" \\\n  {flag}"));
    }
    text.push_str(" IMAGE");
    text
}
