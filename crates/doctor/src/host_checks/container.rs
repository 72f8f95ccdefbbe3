//! What a container withholds, and the flags that would grant it. Each flag has a reason that a file of this host
//! gives: a seccomp filter on this process, its AppArmor profile, a masked part of /proc, a missing capability.

use super::host_facts::{Container, HostFacts};
use super::{Finding, Remedy, Severity};

/// One restriction that shows in a file of the host, with the words that lift it.
struct Restriction {
    because: String,
    /// The value of Docker's `--security-opt`, and of Podman's with one exception.
    option: &'static str,
    /// A line of a pod's securityContext, if one lifts it.
    kubernetes: Option<&'static str>,
}

const ALL_OF_PROC: &str = "systempaths=unconfined";

/// Returns the restrictions on this process, as far as files of the host show them.
fn restrictions(facts: &HostFacts) -> Vec<Restriction> {
    let profile = facts.apparmor_profile.as_deref().unwrap_or("unconfined");
    let filter = "a seccomp filter (Seccomp: 2 in /proc/self/status)";
    let apparmor = format!("the AppArmor profile {profile}");
    let masked = format!("{} covered parts of /proc", facts.masked_proc.len());
    let mut found = Vec::new();
    let mut add = |applies: bool, because: &str, option, kubernetes| {
        if applies {
            found.push(Restriction {
                because: because.to_owned(),
                option,
                kubernetes,
            });
        }
    };
    let pod_filter = Some("      seccompProfile: {type: Unconfined}");
    add(facts.is_filtered, filter, "seccomp=unconfined", pod_filter);
    let is_profiled = !profile.starts_with("unconfined");
    let pod_profile = Some("      appArmorProfile: {type: Unconfined}");
    add(is_profiled, &apparmor, "apparmor=unconfined", pod_profile);
    let selinux = "SELinux, enforcing";
    add(facts.selinux_enforcing, selinux, "label=disable", None);
    add(!facts.masked_proc.is_empty(), &masked, ALL_OF_PROC, None);
    found
}

fn security_options(restrictions: &[Restriction], all_of_proc: &str) -> Vec<String> {
    let option = |r: &Restriction| r.option.replace(ALL_OF_PROC, all_of_proc);
    let options = restrictions.iter().map(option);
    options.map(|o| format!("--security-opt {o}")).collect()
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
    let options = security_options(restrictions, ALL_OF_PROC);
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
    let options = security_options(restrictions, "unmask=ALL");
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
    lines.extend(restrictions.iter().filter_map(|r| r.kubernetes));
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
