//! The steps of a launch, and their names.
//!
//! Error messages and `--timings` print these names, so they are stable. Code compares the variants.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! launch_steps {
    ($($step:ident $name:literal;)*) => {
        /// One step from the start of the launcher to the execution of the program.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum LaunchStep { $(#[doc = $name] $step,)* }

        impl LaunchStep {
            pub(crate) const ALL: &[LaunchStep] = &[$(LaunchStep::$step,)*];

            /// The step's printed name.
            pub fn name(self) -> &'static str {
                match self { $(LaunchStep::$step => $name,)* }
            }
        }
    };
}

launch_steps! {
    // The launcher.
    StartLauncher "start the launcher";
    ReceivePlan "receive the plan";
    MapViewOwners "map the owners of the views";
    CreateNamespaces "create namespaces";
    MapUser "map the user";
    StartInit "start pid 1";
    StartGuardian "start the guardian";
    // Pid 1 or the guardian.
    LeaveSession "leave the caller's session";
    SetUpInit "set up init";
    SetUpGuardian "set up the guardian";
    LookAtWorkspace "look at the workspace";
    LookAtViews "look at the read-only views";
    KeepMounts "keep mounts to ourselves";
    OpenSystemRuntime "open the system runtime";
    MakeRoot "make the new root";
    MakeMountsPrivate "make mounts private";
    OpenViews "open the read-only views";
    OpenWorkspace "open the workspace";
    FillWorkspace "fill the workspace";
    PlaceSystemRuntime "put the system runtime in place";
    PlaceWorkspace "put the workspace in place";
    PlaceViews "put the read-only views in place";
    MountSharedMemory "mount /dev/shm";
    MountProc "mount /proc";
    MakeRootReadOnly "make the new root read-only";
    ChangeRoot "change the root";
    SetUpNetwork "set up the network and the host name";
    BecomeLeasedUid "become the leased uid";
    OpenTerminal "open a terminal";
    StartChild "start the child";
    StartWatch "start the watch";
    // The child.
    AttachToCgroup "attach to the cgroup";
    CreateCgroupNamespace "create the cgroup namespace";
    EnterInnerUserNamespace "enter the inner user namespace";
    SetUpStreams "set up the streams";
    EnterWorkspace "enter the workspace";
    LeaveKeyring "leave the session keyring";
    SetResourceLimits "set resource limits";
    DropCapabilities "drop capabilities";
    ForbidNewPrivileges "forbid new privileges";
    StartKillHelper "start the kill helper";
    RestrictWithLandlock "restrict with Landlock";
    WaitForFilter "wait for the seccomp filter";
    RestrictWithSeccomp "restrict with seccomp";
    CheckRequired "check what is required";
    ExecuteProgram "execute the program";
}

impl fmt::Display for LaunchStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
