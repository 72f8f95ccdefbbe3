//! What a container withholds, and the flags that would grant it. Each flag has a reason that a file of this host
//! gives: a seccomp filter on this process, its AppArmor profile, a masked part of /proc, a missing capability.

use super::host_facts::{Container, HostFacts};
use super::{Finding, Remedy, Severity};

/// One restriction that shows in a file of the host, with the words that lift it.
struct Restriction {
    because: String,
    /// The value of Docker's and of Podman's `--security-opt`.
    docker: &'static str,
    podman: &'static str,
    /// Lines of a pod's securityContext.
    kubernetes: &'static str,
}

/// Returns the restrictions on this process, as far as files of the host show them.
fn restrictions(facts: &HostFacts) -> Vec<Restriction> {
    let profile = facts.apparmor_profile.as_deref().unwrap_or("unconfined");
    let filter = Restriction {
        because: String::from("a seccomp filter (Seccomp: 2 in /proc/self/status)"),
        docker: "seccomp=unconfined",
        podman: "seccomp=unconfined",
        kubernetes: "      seccompProfile: {type: Unconfined}",
    };
    let apparmor = Restriction {
        because: format!("the AppArmor profile {profile}"),
        docker: "apparmor=unconfined",
        podman: "apparmor=unconfined",
        kubernetes: "      appArmorProfile: {type: Unconfined}",
    };
    let selinux = Restriction {
        because: String::from("SELinux, enforcing"),
        docker: "label=disable",
        podman: "label=disable",
        kubernetes: "",
    };
    let masked = Restriction {
        because: format!("{} covered parts of /proc", facts.masked_proc.len()),
        docker: "systempaths=unconfined",
        podman: "unmask=ALL",
        kubernetes: "",
    };
    let found = [
        facts.is_filtered.then_some(filter),
        (!profile.starts_with("unconfined")).then_some(apparmor),
        facts.selinux_enforcing.then_some(selinux),
        (!facts.masked_proc.is_empty()).then_some(masked),
    ];
    found.into_iter().flatten().collect()
}

/// Returns the finding that explains every failed mechanism in a container, or under a seccomp filter that somebody
/// else installed.
pub fn find_restrictions(facts: &HostFacts, severity: Severity) -> Option<Finding> {
    let restrictions = restrictions(facts);
    let mut because: Vec<&str> = restrictions.iter().map(|r| r.because.as_str()).collect();
    let lacks = format!("no {}", facts.lacks_capabilities.join(", no "));
    if !facts.lacks_capabilities.is_empty() {
        because.push(&lacks);
    }
    let because = because.join("; ");
    let Some(kind) = facts.container else {
        // Outside a container, only a seccomp filter shows that somebody restricted this process.
        return facts.is_filtered.then(|| {
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
    let (named, remedy) = match kind {
        Container::Kubernetes => ("Kubernetes", kubernetes(&restrictions, facts)),
        Container::Docker => ("Docker", docker(&restrictions, facts)),
        Container::Podman => ("Podman", podman(&restrictions)),
        Container::Lxc => (
            "LXC",
            Remedy::untried(
                "Let the container nest others (for LXD and Incus; then start it again):",
                &["incus config set CONTAINER security.nesting=true"],
            ),
        ),
        Container::Nspawn => (
            "systemd-nspawn",
            Remedy::untried(
                "Start it with the filter lifted and all of /proc:",
                &[
                    "systemd-nspawn --system-call-filter='@mount @keyring pivot_root unshare' --capability=CAP_NET_ADMIN …",
                ],
            ),
        ),
        Container::Other => (
            "unknown make",
            Remedy::untried(
                "Start it without that filter and profile, with all of /proc, and Fumehood in it as a plain user.",
                &[],
            ),
        ),
    };
    let text = format!("this container ({named}) withholds what level `full` takes: {because}");
    Some(Finding::new("container", severity, text).with(remedy))
}

fn service() -> Remedy {
    Remedy::untried(
        "If it is a systemd service, add to its [Service] section:",
        &[
            "RestrictNamespaces=no",
            "SystemCallFilter=",
            "ProtectProc=default",
            "ProtectKernelTunables=no",
        ],
    )
}

/// Derived from Docker's default seccomp profile: with SYS_ADMIN it allows mounts and namespaces, but neither
/// pivot_root nor keyctl. The filter has to go in either case.
fn docker(restrictions: &[Restriction], facts: &HostFacts) -> Remedy {
    let options = restrictions.iter().map(|r| r.docker);
    let options: Vec<String> = options.map(|o| format!("--security-opt {o}")).collect();
    let mut remedy = Remedy::untried(
        match facts.is_root {
            true => "Start the container with:",
            false => "Start the container with these flags; none of them is a capability:",
        },
        &[],
    );
    if facts.is_root && !facts.lacks_capabilities.is_empty() {
        let capabilities = facts.lacks_capabilities.iter();
        let capabilities: Vec<String> = capabilities.map(|c| format!("--cap-add {c}")).collect();
        remedy.lines = vec![
            wrapped("docker run", &[capabilities, options.clone()].concat()),
            String::from("# or with Fumehood as a plain user in it, without any capability:"),
            wrapped("docker run --user 1000:1000", &options),
        ];
    } else {
        remedy.lines = vec![wrapped("docker run", &options)];
    }
    remedy
}

fn podman(restrictions: &[Restriction]) -> Remedy {
    let options = restrictions.iter().map(|r| r.podman);
    let options: Vec<String> = options.map(|o| format!("--security-opt {o}")).collect();
    Remedy::untried(
        "Start the container so, and Fumehood in it as a plain user (a rootless container's root does not have \
         the uids that root's Fumehood leases):",
        &[&wrapped("podman run --user 1000:1000", &options)],
    )
}

/// Kubernetes accepts `procMount: Unmasked` only with `hostUsers: false`. Such a pod has 65536 uids, too few for the
/// uids that root's Fumehood leases, so Fumehood runs in it as a plain user.
fn kubernetes(restrictions: &[Restriction], facts: &HostFacts) -> Remedy {
    let masked = !facts.masked_proc.is_empty();
    let mut lines = vec!["spec:"];
    if masked {
        lines.push("  hostUsers: false            # Kubernetes 1.33 or later; procMount needs it");
    }
    lines.extend([
        "  containers:",
        "  - securityContext:",
        "      runAsUser: 1000",
    ]);
    if masked {
        lines.push("      procMount: Unmasked");
    }
    let profiles = restrictions.iter().map(|r| r.kubernetes);
    lines.extend(profiles.filter(|line| !line.is_empty()));
    Remedy::untried(
        "Add to the pod (its namespace must admit that: Pod Security level `privileged`):",
        &lines,
    )
}

/// Formats a command with one flag a line that can be pasted as one command.
fn wrapped(command: &str, flags: &[String]) -> String {
    let flags: String = flags.iter().map(|f| format!(" \\\n  {f}")).collect();
    format!("{command}{flags} IMAGE")
}
