//! What a queued request is shown, checked on real files. Where the tests run as root, /root and /etc/shadow serve as
//! private files too.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use sandbox::spec::{Owner, SharedMemory, WorkspaceKind};
use tempfile::TempDir;

use sandbox::spec::ReadOnlyView;

use super::*;
use crate::plan::runtime::CallerEnvironment;
use crate::request::{
    AnalysisId, CollectionSettings, Command, IdReuse, Input, KeepPolicy, NamedBy, NamedDirectory,
    QueueWriters, ReadRoot, RequestFields, RequestOrigin, RequestedLimits, Stdin,
};
use crate::settings::Request;

fn named(path: PathBuf) -> Option<NamedDirectory> {
    let named_by = NamedBy::Caller;
    Some(NamedDirectory { path, named_by })
}

/// A directory that everybody may enter, with a staged submission in it.
struct SubmissionDirectory {
    dir: TempDir,
    at: PathBuf,
}

impl SubmissionDirectory {
    fn new() -> SubmissionDirectory {
        let dir = tempfile::tempdir().unwrap();
        chmod(dir.path(), 0o755);
        let at = dir.path().canonicalize().unwrap();
        for name in ["home", "work", "home/staged/inputs"] {
            fs::create_dir_all(at.join(name)).unwrap();
        }
        chmod(&at.join("home"), 0o700);
        fs::write(at.join("home/staged/inputs/in.txt"), "in").unwrap();
        fs::write(at.join("home/staged/stdin"), "in").unwrap();
        SubmissionDirectory { dir, at }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.at.join(name)
    }

    fn directory(&self, name: &str, mode: u32) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).unwrap();
        chmod(&path, mode);
        path
    }

    fn file(&self, name: &str, mode: u32) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, "x").unwrap();
        chmod(&path, mode);
        path
    }

    fn request(&self, writers: QueueWriters) -> RequestFields {
        let staged = self.path("home/staged");
        RequestFields {
            id: AnalysisId::new("q").unwrap(),
            command: Command::Argv(vec!["/bin/true".into()]),
            project: staged.join("inputs"),
            data: None,
            docs: None,
            reads: Vec::new(),
            inputs: vec![Input {
                host: staged.join("inputs/in.txt"),
                name: Some("in.txt".into()),
            }],
            runtime: None,
            env: Vec::new(),
            stdin: Stdin::File(staged.join("stdin")),
            limits: RequestedLimits::default(),
            workspace_kind: WorkspaceKind::Disk,
            workspace_root: self.path("work"),
            keep: KeepPolicy::Never,
            keep_for_ms: 1000,
            floor: crate::request::IsolationLevel::Landlock,
            level: None,
            required_layers: BTreeSet::new(),
            shared_memory: SharedMemory::Private,
            allow_degraded: BTreeSet::new(),
            readable_roots: None,
            collection: CollectionSettings::default(),
            siblings: crate::request::SiblingModules::Exclude,
            id_reuse: IdReuse::Refuse,
            secret_env: Vec::new(),
            asked_by: RequestOrigin::Queue {
                staged,
                writers,
                submitted_script: None,
            },
        }
    }

    fn plan(&self, request: &RequestFields) -> Result<Plan, PlanError> {
        let caller = CallerEnvironment {
            path: "/usr/bin:/bin".into(),
            cwd: self.at.clone(),
            env: Default::default(),
            homes: Vec::new(),
        };
        let home = self.path("home");
        let private = PrivatePaths {
            home: &home,
            records: &[],
        };
        plan(&Request::for_tests(request.clone()), &caller, &private)
    }

    fn reading(&self, path: &Path) -> RequestFields {
        let mut request = self.request(QueueWriters::OtherUsers);
        request.reads = vec![ReadRoot {
            host: path.to_path_buf(),
            inside: Some("/mnt/shown".into()),
        }];
        request
    }

    #[track_caller]
    fn refused(&self, path: &Path) {
        match self.plan(&self.reading(path)) {
            Err(PlanError::NotWorldReadable { .. } | PlanError::Refused { .. }) => {}
            other => panic!("{path:?}: {other:?}"),
        }
    }

    fn owners(&self, plan: &Plan, source: &Path) -> Vec<Owner> {
        let of = |view: &&ReadOnlyView| view.source.as_path() == source;
        plan.views.iter().filter(of).map(|v| v.owner).collect()
    }
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_submission_of_another_user_sees_world_readable_paths() {
    let submission_directory = SubmissionDirectory::new();
    let open = submission_directory.directory("open", 0o755);
    submission_directory.file("open/a", 0o644);
    let plan = submission_directory
        .plan(&submission_directory.reading(&open))
        .unwrap();
    // Never with mapped ownership: a private file that appears later stays private.
    assert_eq!(submission_directory.owners(&plan, &open), [Owner::AsIs]);
    let single = submission_directory.file("single", 0o644);
    let plan = submission_directory
        .plan(&submission_directory.reading(&single))
        .unwrap();
    assert_eq!(submission_directory.owners(&plan, &single), [Owner::AsIs]);
    // Through symlinks that everybody can follow.
    symlink("open", submission_directory.path("link")).unwrap();
    symlink(
        submission_directory.path("link"),
        submission_directory.path("link2"),
    )
    .unwrap();
    let plan = submission_directory
        .plan(&submission_directory.reading(&submission_directory.path("link2")))
        .unwrap();
    assert_eq!(submission_directory.owners(&plan, &open), [Owner::AsIs]);
    let plan = submission_directory
        .plan(&submission_directory.reading(&submission_directory.path("link2/../open/.")));
    assert!(plan.is_ok());
    // The submitted files are copied.
    let plan = plan.unwrap();
    assert_eq!(
        plan.inputs,
        [(
            submission_directory.path("home/staged/inputs/in.txt"),
            "in.txt".into()
        )]
    );
    assert_eq!(
        plan.stdin,
        Some(submission_directory.path("home/staged/stdin"))
    );
}

#[test]
fn a_submission_of_another_user_cannot_read_private_paths() {
    let submission_directory = SubmissionDirectory::new();
    let closed = [
        submission_directory.directory("d750", 0o750),
        submission_directory.directory("d711", 0o711),
        submission_directory.directory("d744", 0o744),
        submission_directory.file("f640", 0o640),
        submission_directory.directory("d750/open", 0o755),
        submission_directory.directory("d711b", 0o711),
    ];
    for path in &closed {
        submission_directory.refused(path);
        let link = submission_directory.path("link");
        symlink(path, &link).unwrap();
        submission_directory.refused(&link);
        let twice = submission_directory.path("twice");
        symlink("link", &twice).unwrap();
        submission_directory.refused(&twice);
        submission_directory.refused(&submission_directory.path("work/..").join("twice"));
        fs::remove_file(link).unwrap();
        fs::remove_file(twice).unwrap();
    }
    // Everybody can pass through a 0711 directory to what is readable in it.
    let within = submission_directory.directory("d711b/open", 0o755);
    submission_directory
        .plan(&submission_directory.reading(&within))
        .unwrap();
    for path in [
        "/root",
        "/root/.bashrc",
        "/etc/shadow",
        "/etc/ssl/private",
        "/",
        "/etc",
        "/proc/1",
    ] {
        if Path::new(path).exists() || path.starts_with("/root") {
            submission_directory.refused(Path::new(path));
        }
    }
    symlink("/etc/shadow", submission_directory.path("shadow")).unwrap();
    submission_directory.refused(&submission_directory.path("shadow"));
    symlink("/root", submission_directory.path("root")).unwrap();
    submission_directory.refused(&submission_directory.path("root"));
    submission_directory.refused(&submission_directory.path("root/.ssh"));
    for (slot, name) in [(0, "data"), (1, "docs"), (2, "project"), (3, "runtime")] {
        let mut request = submission_directory.request(QueueWriters::OtherUsers);
        let path = closed[0].clone();
        match slot {
            0 => request.data = named(path),
            1 => request.docs = named(path),
            2 => request.project = path,
            _ => request.runtime = Some(path),
        }
        let plan = submission_directory.plan(&request);
        assert!(
            matches!(plan, Err(PlanError::NotWorldReadable { .. })),
            "{name}: {plan:?}"
        );
    }
}

/// Behind a directory that is not world-readable, the answers for existing and missing files are the same.
#[test]
fn a_submission_of_another_user_does_not_learn_which_files_exist() {
    let submission_directory = SubmissionDirectory::new();
    submission_directory.directory("closed", 0o700);
    submission_directory.file("closed/there", 0o644);
    let said = |path: &str| {
        let path = submission_directory.path(path);
        let mut request = submission_directory.request(QueueWriters::OtherUsers);
        request.command = Command::Argv(vec![path.clone().into()]);
        let by_command = submission_directory.plan(&request).unwrap_err().to_string();
        let by_read = submission_directory
            .plan(&submission_directory.reading(&path))
            .unwrap_err()
            .to_string();
        let plain = |text: String| text.replace(path.to_str().unwrap(), "PATH");
        (plain(by_command), plain(by_read))
    };
    assert_eq!(said("closed/there"), said("closed/nothing"));
    assert!(
        said("closed/there")
            .1
            .contains("operator of the worker can list it")
    );
    // Nor through an argument, for which a direct run would get a suggestion.
    let mut request = submission_directory.request(QueueWriters::OtherUsers);
    let there = submission_directory.path("closed/there");
    request.command = Command::Argv(vec!["/bin/cat".into(), there.into()]);
    submission_directory.plan(&request).unwrap();
    request.command = Command::Argv(vec!["./tool".into()]);
    assert!(submission_directory.plan(&request).is_err());
}

#[test]
fn a_listed_private_directory_is_shown_with_mapped_ownership() {
    let submission_directory = SubmissionDirectory::new();
    let closed = submission_directory.directory("closed", 0o700);
    let inner = submission_directory.directory("closed/inner", 0o700);
    symlink("/usr/share", submission_directory.path("closed/out")).unwrap();
    let mut request = submission_directory.reading(&inner);
    request.readable_roots = Some(vec![closed.clone()]);
    let plan = submission_directory.plan(&request).unwrap();
    assert_eq!(submission_directory.owners(&plan, &inner), [Owner::Mapped]);
    // A symlink in a listed directory does not extend the list. /usr/share is world-readable, and shown as such.
    request.reads[0].host = submission_directory.path("closed/out");
    let plan = submission_directory.plan(&request).unwrap();
    assert_eq!(
        submission_directory.owners(&plan, Path::new("/usr/share")),
        [Owner::AsIs]
    );
    let open = submission_directory.directory("open", 0o755);
    request.reads[0].host = open;
    let refused = submission_directory.plan(&request);
    assert!(
        matches!(refused, Err(PlanError::NotInReadableRoots { .. })),
        "{refused:?}"
    );
}

#[test]
fn our_own_queue_is_shown_what_we_may_read() {
    let submission_directory = SubmissionDirectory::new();
    let closed = submission_directory.directory("closed", 0o700);
    let mut request = submission_directory.reading(&closed);
    let staged = submission_directory.path("home/staged");
    request.asked_by = RequestOrigin::Queue {
        staged,
        writers: QueueWriters::OnlyThisUser,
        submitted_script: None,
    };
    let plan = submission_directory.plan(&request).unwrap();
    assert_eq!(submission_directory.owners(&plan, &closed), [Owner::Mapped]);
}

#[test]
fn nothing_but_what_was_staged_is_copied() {
    let submission_directory = SubmissionDirectory::new();
    let open = submission_directory.file("open", 0o644);
    for writers in [QueueWriters::OtherUsers, QueueWriters::OnlyThisUser] {
        let mut request = submission_directory.request(writers);
        request.inputs[0].host = open.clone();
        assert!(matches!(
            submission_directory.plan(&request),
            Err(PlanError::Refused { .. })
        ));
        let mut request = submission_directory.request(writers);
        request.stdin = Stdin::File(open.clone());
        assert!(matches!(
            submission_directory.plan(&request),
            Err(PlanError::Refused { .. })
        ));
        let mut request = submission_directory.request(writers);
        let link = submission_directory.path("home/staged/inputs/link");
        // The second round finds the symlink of the first.
        let _ = symlink(&open, &link);
        request.inputs[0].host = link;
        assert!(matches!(
            submission_directory.plan(&request),
            Err(PlanError::Refused { .. })
        ));
        // Fumehood's own files are still not shown to anybody.
        let mut request = submission_directory.request(writers);
        request.data = named(submission_directory.path("home/staged/inputs"));
        assert!(submission_directory.plan(&request).is_err());
    }
}

/// A plain user's worker runs programs as that user, so private files in an open directory would be readable.
#[test]
fn a_plain_users_private_files_in_an_open_directory_are_found() {
    let submission_directory = SubmissionDirectory::new();
    let open = submission_directory.directory("open", 0o755);
    submission_directory.directory("open/sub", 0o755);
    submission_directory.file("open/sub/a", 0o644);
    symlink("/etc/shadow", submission_directory.path("open/link")).unwrap();
    world_readable::check_nothing_private(&open).unwrap();
    submission_directory.file("open/sub/b", 0o600);
    let found = world_readable::check_nothing_private(&open);
    assert!(
        matches!(&found, Err(PlanError::NotWorldReadable { closed, .. }) if closed.ends_with("sub/b")),
        "{found:?}"
    );
    fs::remove_file(submission_directory.path("open/sub/b")).unwrap();
    submission_directory.directory("open/sub/c", 0o700);
    assert!(world_readable::check_nothing_private(&open).is_err());
    // The control, through the plan: for root the mount keeps the files private, for others the check refuses.
    let plan = submission_directory.plan(&submission_directory.reading(&open));
    assert_eq!(plan.is_ok(), rustix::process::geteuid().is_root());
    drop(submission_directory.dir);
}

/// Exchanges two names while `act` runs again and again for two seconds. Whoever can write to the directory of the
/// names can do this. Returns whether `act` returned true every time.
fn holds_while_exchanged(one: &Path, other: &Path, act: impl Fn() -> bool) -> bool {
    let done = std::sync::atomic::AtomicBool::new(false);
    let ordering = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (cwd, exchange) = (rustix::fs::CWD, rustix::fs::RenameFlags::EXCHANGE);
            while !done.load(ordering) {
                rustix::fs::renameat_with(cwd, one, cwd, other, exchange).unwrap();
            }
        });
        let until = std::time::Instant::now() + std::time::Duration::from_secs(2);
        let mut holds = true;
        while holds && std::time::Instant::now() < until {
            holds = act();
        }
        done.store(true, ordering);
        holds
    })
}

/// Makes a symlink that belongs to another user, and returns whether that worked. Only root can make one; for anybody
/// else the symlink stays the caller's own.
fn make_foreign_link(to: &Path, at: &Path) -> bool {
    const OTHER: Option<u32> = Some(65_534);
    symlink(to, at).unwrap();
    let made = std::os::unix::fs::lchown(at, OTHER, OTHER);
    assert_eq!(made.is_ok(), rustix::process::geteuid().is_root());
    made.is_ok()
}

#[test]
fn a_script_that_is_exchanged_for_a_link_is_not_read_elsewhere() {
    let submission_directory = SubmissionDirectory::new();
    let shared = submission_directory.directory("shared", 0o777);
    let secret = submission_directory.file("secret.py", 0o600);
    let script = submission_directory.file("shared/x.py", 0o644);
    if !make_foreign_link(&secret, &shared.join("link")) {
        return;
    }
    let mut request = submission_directory.request(QueueWriters::OtherUsers);
    (request.inputs, request.stdin) = (Vec::new(), Stdin::Null);
    request.project = shared.clone();
    request.asked_by = RequestOrigin::Caller;
    request.command = Command::Script {
        script: script.clone(),
        args: Vec::new(),
    };
    assert_eq!(
        submission_directory.plan(&request).unwrap().inputs[0].0,
        script
    );
    let holds = holds_while_exchanged(&script, &shared.join("link"), || {
        let plan = submission_directory.plan(&request);
        plan.is_err() || plan.unwrap().inputs[0].0 == script
    });
    assert!(holds);
}

#[test]
fn a_queued_path_leads_through_roots_links_only() {
    let submission_directory = SubmissionDirectory::new();
    let shared = submission_directory.directory("shared", 0o777);
    for dir in ["meant", "other"] {
        submission_directory.directory(dir, 0o755);
        submission_directory.directory(&format!("{dir}/data"), 0o755);
    }
    symlink(submission_directory.path("meant"), shared.join("link")).unwrap();
    if !make_foreign_link(&submission_directory.path("other"), &shared.join("foreign")) {
        return;
    }
    let mut request = submission_directory.request(QueueWriters::OtherUsers);
    request.data = named(shared.join("link/data"));
    let (meant, other) = (
        submission_directory.path("meant/data"),
        submission_directory.path("other/data"),
    );
    let plan = submission_directory.plan(&request).unwrap();
    assert!(!submission_directory.owners(&plan, &meant).is_empty());
    let holds = holds_while_exchanged(&shared.join("link"), &shared.join("foreign"), || {
        let plan = submission_directory.plan(&request);
        plan.is_err()
            || submission_directory
                .owners(&plan.unwrap(), &other)
                .is_empty()
    });
    assert!(holds);
}

#[test]
fn outputs_are_written_through_no_link_of_another_user() {
    let submission_directory = SubmissionDirectory::new();
    let shared = submission_directory.directory("shared", 0o777);
    let meant = submission_directory.directory("meant", 0o755);
    symlink(&meant, shared.join("own")).unwrap();
    for (to, real) in [
        ("shared/new/deep", "shared/new/deep"),
        ("shared/own", "meant"),
        ("shared/own/new", "meant/new"),
        ("shared/own/../meant/.", "meant"),
    ] {
        let resolved = resolve_writable_directory(&submission_directory.path(to)).unwrap();
        assert_eq!(resolved, Some(submission_directory.path(real)), "{to}");
    }
    if make_foreign_link(&meant, &shared.join("foreign")) {
        for to in ["shared/foreign", "shared/foreign/new"] {
            let resolved = resolve_writable_directory(&submission_directory.path(to)).unwrap();
            assert_eq!(resolved, None, "{to}");
        }
    }
    // The export refuses a symlink that appears after the path was resolved.
    let mut nothing =
        |_: &store::types::manifest::ContentHash| Err(std::io::ErrorKind::NotFound.into());
    let to = shared.join("own");
    let never = store::artifacts::Overwrite::Never;
    let exported = store::artifacts::export(&mut nothing, &[], &to, never, 0);
    assert!(exported.is_err());
    assert!(store::artifacts::export(&mut nothing, &[], &meant, never, 0).is_ok());
}
