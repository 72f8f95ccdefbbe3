//! What a container withholds, and the flags that would give it. Each flag is named for a reason that was read: a filter
//! on this process, a profile it runs under, a covered part of /proc, a capability that is not there.

use super::host::{Container, Facts};
use super::{Finding, Remedy, Severity};

/// What is in the way, as far as files tell.
struct InTheWay {
    filter: bool,
    profile: bool,
    label: bool,
    covers: bool,
}

impl InTheWay {
    fn of(facts: &Facts) -> InTheWay {
        let unconfined = |p: &String| p.starts_with("unconfined");
        InTheWay {
            filter: facts.is_filtered,
            profile: facts
                .apparmor_profile
                .as_ref()
                .is_some_and(|p| !unconfined(p)),
            label: facts.selinux_enforcing,
            covers: !facts.masked_proc.is_empty(),
        }
    }

    fn because(&self, facts: &Facts) -> String {
        let mut because = Vec::new();
        if self.filter {
            because.push(String::from(
                "a seccomp filter (Seccomp: 2 in /proc/self/status)",
            ));
        }
        if self.profile {
            let profile = facts.apparmor_profile.as_deref().unwrap_or_default();
            because.push(format!("the AppArmor profile {profile}"));
        }
        if self.label {
            because.push(String::from("SELinux, enforcing"));
        }
        if self.covers {
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

/// The finding that accounts for every failed mechanism in a container, or under somebody's filter.
pub fn withholds(facts: &Facts, severity: Severity) -> Option<Finding> {
    let way = InTheWay::of(facts);
    let because = way.because(facts);
    let Some(kind) = facts.container else {
        // Outside of a container only a filter says that somebody shut this process in.
        return way.filter.then(|| {
            let text = format!(
                "this process was started shut in: {because}; a systemd service with RestrictNamespaces= or \
                 SystemCallFilter=, a snap or a flatpak would look so"
            );
            Finding::new("shut_in", severity, text).with(service())
        });
    };
    if because.is_empty() {
        // A container that is in nobody's way: look for another cause.
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
        Container::Docker => docker(&way, facts),
        Container::Podman => podman(&way),
        Container::Kubernetes => kubernetes(&way),
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

/// Worked out from Docker's own profile: with SYS_ADMIN it lets mounts and namespaces through, but neither pivot_root
/// nor keyctl, so the filter has to go in either case.
fn docker(way: &InTheWay, facts: &Facts) -> Remedy {
    let mut flags = Vec::new();
    if facts.is_root {
        let capabilities = facts.lacks_capabilities.iter();
        flags.extend(capabilities.map(|c| format!("--cap-add {c}")));
    }
    if way.filter {
        flags.push(String::from("--security-opt seccomp=unconfined"));
    }
    if way.profile {
        flags.push(String::from("--security-opt apparmor=unconfined"));
    }
    if way.label {
        flags.push(String::from("--security-opt label=disable"));
    }
    if way.covers {
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

fn podman(way: &InTheWay) -> Remedy {
    let mut flags = Vec::new();
    if way.filter {
        flags.push(String::from("--security-opt seccomp=unconfined"));
    }
    if way.profile {
        flags.push(String::from("--security-opt apparmor=unconfined"));
    }
    if way.label {
        flags.push(String::from("--security-opt label=disable"));
    }
    if way.covers {
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

/// `procMount: Unmasked` is accepted with `hostUsers: false` only; a pod of that kind has 65536 uids, so Fumehood runs
/// in it as a plain user.
fn kubernetes(way: &InTheWay) -> Remedy {
    let mut lines = vec!["spec:"];
    if way.covers {
        lines.push("  hostUsers: false            # Kubernetes 1.33 or later; procMount needs it");
    }
    lines.extend([
        "  containers:",
        "  - securityContext:",
        "      runAsUser: 1000",
    ]);
    if way.covers {
        lines.push("      procMount: Unmasked");
    }
    if way.filter {
        lines.push("      seccompProfile: {type: Unconfined}");
    }
    if way.profile {
        lines.push("      appArmorProfile: {type: Unconfined}");
    }
    Remedy::new(
        "Add to the pod (its namespace must admit that: Pod Security level `privileged`):",
        &lines,
    )
    .untried()
}

/// A command of several lines that can be pasted as one.
fn wrapped(command: &str, flags: &[String]) -> String {
    let mut text = command.to_owned();
    for flag in flags {
        text.push_str(&format!(" \\\n  {flag}"));
    }
    text.push_str(" IMAGE");
    text
}
