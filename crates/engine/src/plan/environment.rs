//! The environment of the program. Nothing is inherited from the caller; only requested variables pass.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use sandbox::spec::{ConfinementLevel, Limits};

use crate::plan::runtime::Runtime;
use crate::settings::Request;

/// Builds the environment from nothing. Variables that the user set come last and win.
pub(super) fn environment(
    request: &Request,
    runtime: &Runtime,
    limits: &Limits,
    level: ConfinementLevel,
    workspace: &Path,
) -> Vec<(OsString, OsString)> {
    // At level landlock there is no private /tmp mount, so point the program at the hidden directory itself.
    let tmp = match level {
        ConfinementLevel::Full => PathBuf::from("/tmp"),
        ConfinementLevel::Landlock => workspace.join(sandbox::HIDDEN_DIR),
    };
    let home = tmp.join("home");
    let (tmp, home) = (tmp.to_string_lossy(), home.to_string_lossy());
    let threads = limits.cpu_milli.div_ceil(1000).max(1).to_string();
    let mut path = OsString::new();
    for dir in &runtime.path_dirs {
        path.push(dir);
        path.push(":");
    }
    path.push("/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin");
    let mut env: Vec<(OsString, OsString)> = vec![("PATH".into(), path)];
    let fixed = [
        ("HOME", home.to_string()),
        ("USER", "analysis".into()),
        ("LOGNAME", "analysis".into()),
        ("SHELL", "/bin/sh".into()),
        ("TMPDIR", tmp.to_string()),
        ("LANG", "C.UTF-8".into()),
        ("TZ", "UTC".into()),
        ("XDG_CACHE_HOME", format!("{home}/.cache")),
        ("XDG_CONFIG_HOME", format!("{home}/.config")),
        ("XDG_DATA_HOME", format!("{home}/.local/share")),
        ("XDG_RUNTIME_DIR", tmp.to_string()),
        ("MPLCONFIGDIR", format!("{home}/.config/matplotlib")),
        // Printed lines arrive at once, and are not lost when the process is killed.
        ("PYTHONUNBUFFERED", "1".into()),
        // Open MPI's single-copy shared memory uses system calls that the seccomp filter refuses.
        ("OMPI_MCA_btl_vader_single_copy_mechanism", "none".into()),
        ("OMPI_MCA_smsc", "^cma".into()),
        ("FUMEHOOD_ID", request.id.to_string()),
    ];
    env.extend(fixed.into_iter().map(|(k, v)| (k.into(), v.into())));
    if level == ConfinementLevel::Landlock {
        // git stops if /etc/gitconfig exists and cannot be read. That file may hold a token, so it stays unreadable.
        env.push(("GIT_CONFIG_NOSYSTEM".into(), "1".into()));
    }
    for name in [
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMEXPR_MAX_THREADS",
        "JULIA_NUM_THREADS",
    ] {
        env.push((name.into(), threads.clone().into()));
    }
    for (name, value) in runtime.env.iter().chain(&request.env) {
        env.retain(|(k, _)| k != name);
        env.push((name.clone(), value.clone()));
    }
    env
}
