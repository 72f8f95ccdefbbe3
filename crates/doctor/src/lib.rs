//! What this host can enforce, and whether it holds.
//!
//! - [`host_checks`] examines the host: it tries each mechanism, level and limit, and names a cause and a remedy for
//!   what does not work. This is `fumehood doctor`.
//! - [`attack`] runs the attack battery: it makes targets, does each forbidden act unconfined (the control) and in a
//!   real sandbox, and compares the results with the promises. This is `fumehood doctor --attack`. The acts themselves
//!   need raw system calls and are in `sandbox::attack`.
//!
//! This crate prints nothing and reads no settings. The caller passes values in and prints what comes back.
//!
//! # Example
//!
//! Examines whether a run with the default limits would start here. The process must also serve as the launcher and the
//! mechanism trials: see [`sandbox::launch::main`] and [`sandbox::probe::mechanisms::main`].
//!
//! ```no_run
//! use doctor::host_checks::{self, Subject};
//! use sandbox::spec::{ConfinementLevel, WorkspaceKind};
//!
//! let diagnosis = host_checks::examine(&Subject {
//!     home: "/var/lib/analyses".into(),
//!     artifacts: None,
//!     database: None,
//!     workspace_root: "/tmp".into(),
//!     workspace_kind: WorkspaceKind::Disk,
//!     project: "/srv/project".into(),
//!     floor: ConfinementLevel::Landlock,
//!     level: None,
//!     required_layers: Default::default(),
//!     limits: Default::default(),
//!     allow_degraded: Default::default(),
//!     free_reserve_bytes: 1 << 30,
//! });
//! assert!(diagnosis.starts());
//! ```

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod attack;
pub mod host_checks;
