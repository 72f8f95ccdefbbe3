//! One confined run for a promise test. Nothing is mocked: each run is a real sandbox on this kernel, with a real workspace and,
//! as root, a real cgroup.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use sandbox::cgroup::{self, Group, GroupLimits};
use sandbox::outcome::{Exit, Outcome, Stop};
use sandbox::spec::{
    Bytes, ConfinementLevel, DisabledLayers, Exec, HostPath, InsidePath, Layer, Limits, Owner,
    ProgramIdentity, ReadOnlyView, Spec, Terminal, ViewContent, WorkspaceKind,
};
use sandbox::supervise::{
    self, Control, FinishedRun, RunError, Running, SpawnResources, Stream, SupervisorHandler,
};
use testkit::harness::TrialLevel;
use testkit::is_root;

/// As root, each run gets a uid from this number upwards. Nothing else on a host uses these uids.
const TEST_UID_FIRST: u32 = 1_900_100_000;

const PRELUDE: &str =
    "import ctypes, errno, os, socket, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n";

/// A marker that no program prints. A run with this marker gets its control through the eventfd only.
const UNPRINTED: &[u8] = b"\0fumehood: only the bell\0";

pub struct ConfinedRun {
    pub spec: Spec,
    pub dir: tempfile::TempDir,
    pub stdin: Option<OwnedFd>,
    pub with_group: bool,
    /// Sends this control when the program has printed these bytes.
    pub control_at_marker: Option<(&'static [u8], Control)>,
    /// Sends this control when another thread writes to the eventfd.
    pub control_by_eventfd: Option<(OwnedFd, Control)>,
    /// Runs after the spawn and before supervision begins.
    pub before_supervising: Option<Box<dyn FnOnce() + Send>>,
    /// The newest Landlock ABI that the launcher may use. A trial sets this to test the behaviour on an older kernel.
    pub landlock_abi_max: Option<i32>,
}

#[derive(Debug)]
pub struct ConfinedResult {
    pub outcome: Outcome,
    pub layers: Vec<(Layer, String)>,
    pub stdout: String,
    pub stderr: String,
}

impl ConfinedResult {
    pub fn code(&self) -> Option<i32> {
        match self.outcome.exit {
            Some(Exit::Code(code)) => Some(code),
            _ => None,
        }
    }
    pub fn stop(&self) -> Option<Stop> {
        self.outcome.stop
    }
    /// Whether the program printed exactly this line on its standard output.
    pub fn printed(&self, line: &str) -> bool {
        self.stdout.lines().any(|l| l.trim() == line)
    }
    pub fn all(&self) -> String {
        format!(
            "{:?}\n--- stdout\n{}\n--- stderr\n{}",
            self.outcome, self.stdout, self.stderr
        )
    }
}

/// The level of this process's trials. Each trial at level `landlock` runs in a process of its own.
pub fn level() -> ConfinementLevel {
    match TrialLevel::of_this_process() {
        TrialLevel::Full => ConfinementLevel::Full,
        TrialLevel::Landlock => ConfinementLevel::Landlock,
    }
}

/// Whether this process's trials use level `landlock`.
pub fn at_landlock() -> bool {
    level() == ConfinementLevel::Landlock
}

/// The program's home. Its parent directory is where the program's temporary files are.
pub fn home(workspace: &Path) -> PathBuf {
    match level() {
        ConfinementLevel::Full => PathBuf::from(sandbox::INSIDE_HOME),
        ConfinementLevel::Landlock => workspace.join(sandbox::HIDDEN_DIR).join("home"),
    }
}

/// The prefix of a launcher's name. The number after the prefix is the newest Landlock ABI that the launcher uses.
const OLDER: &str = "launcher-with-landlock-";

/// The Landlock ABI in the name under which this launcher was started.
pub fn older_landlock() -> Option<i32> {
    let own = PathBuf::from(std::env::args_os().next()?);
    let name = own.file_name()?.to_str()?;
    name.strip_prefix(OLDER)?.parse().ok()
}

/// The Landlock ABI of this kernel.
pub fn landlock_abi() -> i32 {
    sandbox::probe::landlock_abi()
}

fn identity() -> ProgramIdentity {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    if is_root() {
        // Trials run in several processes at once: the pid keeps their uids apart.
        let uid = TEST_UID_FIRST
            + (std::process::id() % 5000) * 100
            + NEXT.fetch_add(1, Ordering::Relaxed) % 100;
        return ProgramIdentity::Leased { uid, gid: uid };
    }
    ProgramIdentity::Caller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
    }
}

impl ConfinedRun {
    /// A run of this command; `argv[0]` is an absolute path.
    pub fn new(argv: &[&str]) -> ConfinedRun {
        let dir = tempfile::Builder::new()
            .prefix("scidex-analysis-test-")
            .tempdir_in("/tmp")
            .unwrap();
        let spec = Spec {
            program: InsidePath::new(argv[0]),
            argv: argv.iter().map(|a| Bytes::from(*a)).collect(),
            env: vec![
                (Bytes::from("PATH"), Bytes::from("/usr/bin:/bin")),
                (Bytes::from("HOME"), Bytes::from(&home(dir.path()))),
                (
                    Bytes::from("TMPDIR"),
                    Bytes::from(home(dir.path()).parent().unwrap()),
                ),
                (Bytes::from("LANG"), Bytes::from("C.UTF-8")),
            ],
            workspace: HostPath::new(dir.path()),
            workspace_kind: WorkspaceKind::Disk,
            views: Vec::new(),
            identity: identity(),
            limits: Limits {
                wall_ms: 60_000,
                cpu_ms: None,
                idle_ms: None,
                grace_ms: 500,
                memory_bytes: 512 << 20,
                cpu_milli: 2000,
                pids: 256,
                open_files: 1024,
                open_files_of_run: None,
                tcp_bytes: u64::MAX,
                // Far more than other processes write during a trial. The watch charges their growth of the file system
                // to a run that has a process or a directory which the watch cannot read.
                disk_bytes: 64 << 30,
                files: 100_000,
                log_bytes: 10 << 20,
            },
            host_name: String::from("fumehood"),
            terminal: Terminal::None,
            level: level(),
            shared_memory: sandbox::spec::SharedMemory::Private,
            purpose: sandbox::spec::LaunchPurpose::Run,
            required: Default::default(),
            disabled_layers: DisabledLayers::none(),
        };
        ConfinedRun {
            spec,
            dir,
            stdin: None,
            with_group: is_root(),
            control_at_marker: None,
            control_by_eventfd: None,
            before_supervising: None,
            landlock_abi_max: None,
        }
    }

    pub fn sh(script: &str) -> ConfinedRun {
        ConfinedRun::new(&["/bin/sh", "-c", script])
    }

    /// Runs the system's Python in isolated mode, after `import ctypes, os, sys, errno, socket` and with `libc` loaded.
    pub fn python(script: &str) -> ConfinedRun {
        ConfinedRun::new(&[
            "/usr/bin/python3",
            "-I",
            "-c",
            &format!("{PRELUDE}{script}"),
        ])
    }

    /// As `python`, for a script that needs the workspace's path.
    pub fn python_in(script: impl FnOnce(&Path) -> String) -> ConfinedRun {
        let mut confined = ConfinedRun::python("");
        let script = script(confined.workspace());
        confined.spec.argv[3] = Bytes::from(&format!("{PRELUDE}{script}"));
        confined
    }

    pub fn without(mut self, layers: &[Layer]) -> ConfinedRun {
        self.spec.disabled_layers.extend(layers.iter().copied());
        self
    }

    pub fn limits(mut self, change: impl FnOnce(&mut Limits)) -> ConfinedRun {
        change(&mut self.spec.limits);
        self
    }

    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> ConfinedRun {
        self.spec
            .env
            .push((Bytes::from(name), Bytes::from(value.as_ref())));
        self
    }

    pub fn workspace(&self) -> &Path {
        self.dir.path()
    }

    /// Shows a host directory read-only, at its own path and as `name` in the workspace.
    pub fn view(mut self, host: &Path, name: &str) -> ConfinedRun {
        let mut targets = vec![host.to_path_buf()];
        match level() {
            ConfinementLevel::Full => targets.push(self.workspace().join(name)),
            // Without mounts the second name is a symlink.
            ConfinementLevel::Landlock => {
                std::os::unix::fs::symlink(host, self.workspace().join(name)).unwrap()
            }
        }
        for target in targets {
            self.spec.views.push(ReadOnlyView {
                source: HostPath::new(host),
                target: InsidePath::new(target),
                exec: Exec::Refused,
                owner: Owner::Mapped,
                content: ViewContent::Data,
            });
        }
        self
    }

    /// Replaces the Python script, for a script that must name the workspace.
    pub fn script(&mut self, script: &str) {
        self.spec.argv = ConfinedRun::python(script).spec.argv;
    }

    /// Replaces the command; its program is an absolute path.
    pub fn command(&mut self, argv: &[&Path]) {
        self.spec.program = InsidePath::new(argv[0]);
        self.spec.argv = argv.iter().map(|a| Bytes::from(*a)).collect();
    }

    pub fn run(self) -> ConfinedResult {
        self.try_run()
            .unwrap_or_else(|e| panic!("the run did not start: {}", chain(&e)))
    }

    /// Runs the program, and calls `look` before the workspace is removed.
    pub fn run_then<T>(mut self, look: impl FnOnce(&Path) -> T) -> (ConfinedResult, T) {
        let ran = self
            .run_here()
            .unwrap_or_else(|e| panic!("the run did not start: {}", chain(&e)));
        (ran, look(self.dir.path()))
    }

    pub fn try_run(mut self) -> Result<ConfinedResult, RunError> {
        self.run_here()
    }

    /// Runs the program, and calls `before_supervising` between the spawn and the supervision.
    pub fn run_after(
        mut self,
        before_supervising: impl FnOnce() + Send + 'static,
    ) -> ConfinedResult {
        self.before_supervising = Some(Box::new(before_supervising));
        self.run()
    }

    /// Sets the sandbox up, calls `look`, cancels the run before it starts, and calls `look` again. The cancel must leave no
    /// process alive.
    pub fn call_off<T>(mut self, look: impl Fn(&Path) -> T) -> [T; 2] {
        let at = self.dir.path().to_path_buf();
        let (seen, _) = self
            .with_running(|running, _| {
                let before = look(&at);
                assert!(
                    running.cancel_before_start(),
                    "not all of it is known to be dead"
                );
                [before, look(&at)]
            })
            .unwrap_or_else(|e| panic!("it was not built: {}", chain(&e)));
        seen
    }

    fn run_here(&mut self) -> Result<ConfinedResult, RunError> {
        let before_supervising = self.before_supervising.take();
        let (finished, listener) = self.with_running(|running, listener| {
            before_supervising.into_iter().for_each(|act| act());
            running.supervise(listener)
        })?;
        let FinishedRun {
            outcome, layers, ..
        } = finished?;
        Ok(ConfinedResult {
            outcome,
            layers,
            stdout: String::from_utf8_lossy(&listener.out).into_owned(),
            stderr: String::from_utf8_lossy(&listener.err).into_owned(),
        })
    }

    fn with_running<T>(
        &mut self,
        act: impl FnOnce(Running<'_>, &mut Listener) -> T,
    ) -> Result<(T, Listener), RunError> {
        let hidden = self.dir.path().join(sandbox::HIDDEN_DIR);
        for dir in [hidden.clone(), hidden.join("home")] {
            std::fs::create_dir(&dir).unwrap();
        }
        own_tree(self.dir.path(), self.spec.identity);
        let open = rustix::fs::OFlags::RDONLY
            | rustix::fs::OFlags::DIRECTORY
            | rustix::fs::OFlags::CLOEXEC;
        let workspace = rustix::fs::open(self.dir.path(), open, rustix::fs::Mode::empty()).unwrap();
        let group = self
            .with_group
            .then(|| make_group(&self.spec.limits))
            .flatten();
        let mut listener = Listener {
            control_at_marker: self.control_at_marker.take(),
            ..Listener::new()
        };
        if let Some((eventfd, control)) = self.control_by_eventfd.take() {
            (listener.eventfd, listener.control_at_marker) = (eventfd, Some((UNPRINTED, control)));
        }
        let launcher = Launcher::new(self.landlock_abi_max);
        let means = SpawnResources {
            launcher: launcher.path(),
            workspace: Some(workspace.as_fd()),
            stdin: self.stdin.take(),
            group: group.as_ref(),
        };
        let done = act(supervise::spawn(&self.spec, means)?, &mut listener);
        if let Some(group) = group {
            group.remove().unwrap();
        }
        Ok((done, listener))
    }
}

/// This test program as the launcher, possibly under a name that limits the Landlock ABI.
enum Launcher {
    Itself,
    Named(tempfile::TempDir, PathBuf),
}

impl Launcher {
    fn new(landlock_abi_max: Option<i32>) -> Launcher {
        let Some(abi) = landlock_abi_max else {
            return Launcher::Itself;
        };
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join(format!("{OLDER}{abi}"));
        std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &path).unwrap();
        Launcher::Named(dir, path)
    }

    fn path(&self) -> &Path {
        match self {
            Launcher::Itself => Path::new("/proc/self/exe"),
            Launcher::Named(_dir, path) => path,
        }
    }
}

fn make_group(limits: &Limits) -> Option<Group> {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let host = cgroup::discover(cgroup::OwnProcess::MayMove);
    let name = format!("test{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let limits = GroupLimits {
        memory_bytes: Some(limits.memory_bytes),
        pids: Some(limits.pids),
        cpu_milli: Some(limits.cpu_milli),
    };
    Group::create(&host, &name, &limits).ok()
}

fn own_tree(path: &Path, identity: ProgramIdentity) {
    let meta = std::fs::symlink_metadata(path).unwrap();
    if let ProgramIdentity::Leased { uid, gid } = identity {
        std::os::unix::fs::lchown(path, Some(uid), Some(gid)).unwrap();
    }
    if meta.is_dir() {
        std::fs::set_permissions(
            path,
            std::fs::Permissions::from_mode(meta.mode() & 0o777 | 0o700),
        )
        .unwrap();
        for entry in std::fs::read_dir(path).unwrap() {
            own_tree(&entry.unwrap().path(), identity);
        }
    }
}

/// Collects the output, and sends its control when the marker appears.
struct Listener {
    out: Vec<u8>,
    err: Vec<u8>,
    control_at_marker: Option<(&'static [u8], Control)>,
    eventfd: OwnedFd,
}

impl Listener {
    fn new() -> Self {
        let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        Listener {
            out: Vec::new(),
            err: Vec::new(),
            control_at_marker: None,
            eventfd,
        }
    }
}

impl SupervisorHandler for Listener {
    fn fill(&mut self, _workspace: BorrowedFd<'_>) -> io::Result<()> {
        let open = rustix::fs::Mode::from_raw_mode(0o755);
        for dir in [".fumehood", ".fumehood/home"] {
            rustix::fs::mkdirat(_workspace, dir, open)?;
            let owner = rustix::fs::fstat(_workspace)?;
            let (uid, gid) = (
                rustix::fs::Uid::from_raw(owner.st_uid),
                rustix::fs::Gid::from_raw(owner.st_gid),
            );
            rustix::fs::chownat(
                _workspace,
                dir,
                Some(uid),
                Some(gid),
                rustix::fs::AtFlags::empty(),
            )?;
        }
        Ok(())
    }
    fn output(&mut self, stream: Stream, bytes: &[u8]) {
        match stream {
            Stream::Stdout => self.out.extend_from_slice(bytes),
            Stream::Stderr => self.err.extend_from_slice(bytes),
        }
        if let Some((marker, _)) = &self.control_at_marker
            && self.out.windows(marker.len()).any(|w| w == *marker)
        {
            rustix::io::write(&self.eventfd, &1u64.to_ne_bytes()).unwrap();
        }
    }
    fn blocked_on(&self, _stream: Stream) -> Option<BorrowedFd<'_>> {
        None
    }
    fn unblocked(&mut self, _stream: Stream) {}
    fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.eventfd.as_fd())
    }
    fn next_control(&mut self) -> Option<Control> {
        rustix::io::read(&self.eventfd, &mut [0u8; 8]).unwrap();
        self.control_at_marker.take().map(|(_, control)| control)
    }
}

/// The message of an error and of all its sources, as a user reads it.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(e) = source {
        text = format!("{text}: {e}");
        source = e.source();
    }
    text
}

/// A host directory outside every sandbox. It is removed after the test.
pub fn host_dir() -> tempfile::TempDir {
    let dir = tempfile::Builder::new()
        .prefix("fumehood-host-")
        .tempdir_in("/var/tmp")
        .unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

pub fn path_of(dir: &tempfile::TempDir, name: &str) -> PathBuf {
    dir.path().join(name)
}

/// Runs the same Python on the host, as the control, and returns its output. The script must succeed.
pub fn unconfined(script: &str) -> String {
    unconfined_under(&[], script)
}

/// As [`unconfined`], with words such as `unshare` in front of the command.
pub fn unconfined_under(before: &[&str], script: &str) -> String {
    let script = format!("{PRELUDE}{script}");
    let argv: Vec<&str> = before
        .iter()
        .copied()
        .chain(["/usr/bin/python3", "-I", "-c", &script])
        .collect();
    let output = std::process::Command::new(argv[0])
        .args(&argv[1..])
        .current_dir("/")
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success(),
        "the control failed: {}\n{out}\n{err}",
        output.status
    );
    out.into_owned()
}

/// A script that makes each attempt in a process of its own. For each attempt the script prints `= name done`,
/// `= name refused ERRNO`, `= name failed EXCEPTION` or `= name died SIGNAL`. An attempt is Python code that raises
/// OSError when it is refused. `sc` makes a raw system call and raises OSError too.
pub fn attempts(setup: &str, acts: &[(&str, &str)]) -> String {
    let mut script = format!(
        "import signal, struct, time\n\
         def sc(*args):\n\
         \x20   result = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in args])\n\
         \x20   if result == -1: raise OSError(ctypes.get_errno(), 'refused')\n\
         \x20   return result\n\
         def attempt(name, code):\n\
         \x20   sys.stdout.flush()\n\
         \x20   child = os.fork()\n\
         \x20   if child == 0:\n\
         \x20       signal.alarm(20)\n\
         \x20       try: exec(compile(code, name, 'exec'), globals()); answer = 'done'\n\
         \x20       except OSError as e: answer = 'refused ' + errno.errorcode.get(e.errno, str(e))\n\
         \x20       except BaseException as e: answer = 'failed ' + repr(e)\n\
         \x20       os.write(1, ('= %s %s\\n' % (name, answer)).encode()); os._exit(0)\n\
         \x20   status = os.waitpid(child, 0)[1]\n\
         \x20   if os.WIFSIGNALED(status): print('=', name, 'died', os.WTERMSIG(status), flush=True)\n\
         {setup}\n"
    );
    for (name, code) in acts {
        script.push_str(&format!("attempt({name:?}, r'''\n{code}\n''')\n"));
    }
    script
}

/// What the script of [`attempts`] printed about one attempt.
pub fn verdict<'a>(printed: &'a str, name: &str) -> &'a str {
    let prefix = format!("= {name} ");
    let line = printed.lines().find_map(|l| l.strip_prefix(&prefix));
    line.unwrap_or_else(|| panic!("nothing was said about {name}:\n{printed}"))
}

/// A host directory that can be shown inside at its own path. It is removed after the test. It is not below /tmp or
/// /var/tmp, because inside the sandbox the program has its own /tmp and /var/tmp.
pub fn shown_dir() -> tempfile::TempDir {
    let below = if is_root() {
        String::from("/srv")
    } else {
        std::env::var("HOME").unwrap()
    };
    let dir = tempfile::Builder::new()
        .prefix("fumehood-shown-")
        .tempdir_in(below)
        .unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

/// Compiles a C program to `at`.
pub fn compile(source: &str, at: &Path) {
    use std::io::Write;
    let mut gcc = std::process::Command::new("gcc")
        .args(["-O1", "-w", "-pthread", "-x", "c", "-", "-o"])
        .arg(at)
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    gcc.stdin
        .take()
        .unwrap()
        .write_all(source.as_bytes())
        .unwrap();
    assert!(gcc.wait().unwrap().success(), "gcc failed");
}

/// Resources that a host has only one of. Trials that measure or use up much of one must not run at the same time.
#[derive(Clone, Copy)]
pub enum HostResource {
    /// The file system of the workspaces. The watch charges a run for what it cannot measure by the growth of the whole
    /// file system. So each of two trials that fill the file system would be charged for both.
    Disk,
    /// Memory. The watch charges a run for memory that no process shows by the growth of what the kernel reports for
    /// the whole host.
    Memory,
    /// Open files, which the kernel counts for the whole host.
    OpenFiles,
    /// The processes of the plain user. At level `landlock` the kernel counts all of them against a run's limit, and the
    /// run gets the room of those that end.
    Processes,
}

/// Waits until no other trial, in this process or another, has this resource. Other trials wait as long as the returned
/// file is open.
pub fn alone_with(resource: HostResource) -> std::fs::File {
    let lock = match resource {
        HostResource::Disk => "/var/tmp/fumehood-tests-alone",
        HostResource::Memory => "/var/tmp/fumehood-tests-alone-memory",
        HostResource::OpenFiles => "/var/tmp/fumehood-tests-alone-open-files",
        HostResource::Processes => "/var/tmp/fumehood-tests-alone-processes",
    };
    // The file is opened without O_CREAT first: fs.protected_regular refuses O_CREAT for another user's file in a sticky
    // directory.
    let opened = std::fs::File::open(lock).or_else(|_| {
        let _made_by_another = std::fs::File::create(lock);
        std::fs::File::open(lock)
    });
    let lock = opened.unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    lock
}
