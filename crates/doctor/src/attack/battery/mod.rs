//! The battery: does every act unconfined, as its control, and then in real runs of the installed binary.

mod bombs;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use sandbox::attack::{
    LINKED_NAME_PREFIX, RUN_ATTACKS, RUN_ATTACKS_PRIVILEGED, SECRET_VARIABLE, victims,
};
use sandbox::promises::ACTS;
use sandbox::spec::ConfinementLevel;
use serde::Deserialize;
use serde_json::Value;

use super::attack_output::{ActResult, AttackOutput};
use super::error::{AttackError, OperationContext};
use super::targets::{TargetSet, TargetSide, contains};
use super::testbed::{
    BatteryProcess, ConfinedRun, ProcessOutput, Testbed, kill_survivors, make_dir, open_terminal,
    processes_with, random_word,
};

/// Acts with runs of their own; all others share one run.
const SEPARATE_ACTS: [&str; 16] = [
    "signal_guardian",
    "set_user_id",
    "terminal_injection",
    "fork_bomb",
    "memory_bomb",
    "oom_loop",
    "disk_bomb",
    "disk_held_by_calls",
    "file_bomb",
    "unlinked_files",
    "log_bomb",
    "daemon_outlives_timeout",
    "slow_death",
    "daemon_outlives_runner",
    "symlink_farm",
    "hard_links",
];
/// Acts that an unprivileged user can do only in namespaces of their own. The control does them in such namespaces.
const PRIVILEGED: [&str; 3] = ["write_system", "packet", "mount"];
/// The limit is below the sum over all names of the hard-linked file, and above the size of the file itself.
const OUTPUT_LIMIT: [&str; 2] = ["--max-output", "1M"];
const OUTPUT_BYTES_MAX: u64 = 1 << 20;
const SET_USER_ID_PROGRAMS: [&str; 9] = [
    "/usr/bin/su",
    "/bin/su",
    "/usr/bin/passwd",
    "/usr/bin/chsh",
    "/usr/bin/mount",
    "/usr/bin/umount",
    "/usr/bin/newgrp",
    "/usr/bin/sudo",
    "/usr/bin/fusermount3",
];
/// The uid `nobody`, for a control that must not be root.
const NOBODY: u32 = 65534;
/// No run of the battery needs that long, and none needs a grace period when it is stopped.
const RUN_OPTIONS: [&str; 4] = ["--timeout", "60s", "--grace", "0s"];
/// How long a process may live after the run that it belongs to.
const DEATH_WAIT: Duration = Duration::from_secs(5);

/// The outcome of the control, and of the act in the sandbox.
pub struct TriedAct {
    pub control: ActResult,
    pub inside: ActResult,
}

pub struct BatteryResults {
    /// The level that was in force, as the runs recorded it.
    pub level: ConfinementLevel,
    /// The directory of the testbed.
    pub testbed_dir: PathBuf,
    pub acts: BTreeMap<&'static str, TriedAct>,
}

struct Battery<'a> {
    testbed: &'a Testbed,
    control: TargetSet,
    confined: TargetSet,
    acts: BTreeMap<&'static str, TriedAct>,
    stop_signal: &'a dyn Fn() -> Option<i32>,
}

pub fn run(
    testbed: &Testbed,
    stop_signal: &dyn Fn() -> Option<i32>,
) -> Result<BatteryResults, AttackError> {
    let id = format!("attack-other-{}", random_word()?);
    let other = start_other(testbed, &id)?;
    let workspace = testbed.workspace(&id);
    let mut battery = Battery {
        testbed,
        control: TargetSet::create(testbed, TargetSide::Control, &workspace)?,
        confined: TargetSet::create(testbed, TargetSide::Confined, &workspace)?,
        acts: BTreeMap::new(),
        stop_signal,
    };
    let level = battery.shared_acts()?;
    for act in [
        Battery::signal_guardian,
        Battery::set_user_id,
        Battery::terminal_injection,
        Battery::limit_bombs,
        Battery::log_bomb,
        Battery::daemon_outlives_timeout,
        Battery::daemon_outlives_runner,
        Battery::collection,
    ] {
        battery.check_stop()?;
        act(&mut battery)?;
    }
    other.finish()?;
    Ok(BatteryResults {
        level,
        testbed_dir: testbed.path(""),
        acts: battery.acts,
    })
}

/// Starts another analysis, which runs during the whole battery and is attacked.
fn start_other(testbed: &Testbed, id: &str) -> Result<BatteryProcess, AttackError> {
    let project = testbed.path("other");
    make_dir(&project, 0o755)?;
    let options = ["--db", "none", "--id", id, "--stdin", "-"];
    let mut command = testbed.run(&project, &options, &[victims::WITNESS]);
    command.stdin(Stdio::piped());
    let mut process = BatteryProcess::start(command)?;
    if process.wait_for(victims::READY) {
        return Ok(process);
    }
    let output = process.finish()?;
    Err(AttackError::TargetRunNotStarted {
        output: format!("{}{}", output.stdout, output.stderr),
    })
}

impl Battery<'_> {
    /// Fails if a signal asks the battery to stop. Called between two acts, so that the targets are removed.
    fn check_stop(&self) -> Result<(), AttackError> {
        match (self.stop_signal)() {
            None => Ok(()),
            Some(signal) => Err(AttackError::Stopped { signal }),
        }
    }

    fn record(&mut self, act: &'static str, control: ActResult, inside: ActResult) {
        self.acts.insert(act, TriedAct { control, inside });
    }

    /// Returns the arguments that make the attacker try these acts on a set of targets.
    fn words(targets: &TargetSet, how: &str, acts: &[&str]) -> Vec<String> {
        let aims = acts
            .iter()
            .map(|act| format!("{act}={}", targets.target(act)));
        let words = [how.to_owned(), targets.mark.clone()];
        words.into_iter().chain(aims).collect()
    }

    fn unconfined(&self, how: &str, acts: &[&str]) -> Command {
        let words = Self::words(&self.control, how, acts);
        let mut command = self.testbed.attacker(&words);
        command.current_dir(&self.control.workspace);
        command
    }

    fn confined(&self, options: &[&str], acts: &[&str]) -> Command {
        let words = Self::words(&self.confined, RUN_ATTACKS, acts);
        let options = [&["--json", "--db", "none"], &RUN_OPTIONS[..], options].concat();
        self.testbed.run(&self.confined.project, &options, &words)
    }

    /// Tries every act that can share a run: one process unconfined, one run in the sandbox.
    fn shared_acts(&mut self) -> Result<ConfinementLevel, AttackError> {
        let mut shared: Vec<&str> = ACTS.iter().map(|act| act.name).collect();
        shared.retain(|name| !SEPARATE_ACTS.contains(name));
        let mut ordinary = [&shared[..], &["signal_guardian"]].concat();
        ordinary.retain(|name| !PRIVILEGED.contains(name));
        let mut command = self.unconfined(RUN_ATTACKS, &ordinary);
        command.env(SECRET_VARIABLE, self.control.secret("secret_environment"));
        let inherited = self.control.inherited_descriptor()?;
        let control = AttackOutput::new(&self.testbed.finish(command)?.stdout);
        drop(inherited);
        let command = self.unconfined(RUN_ATTACKS_PRIVILEGED, &PRIVILEGED);
        let privileged = AttackOutput::new(&self.testbed.finish(command)?.stdout);
        self.check_stop()?;

        let mut command = self.confined(&[], &shared);
        command.env(SECRET_VARIABLE, self.confined.secret("secret_environment"));
        let inherited = self.confined.inherited_descriptor()?;
        let ran = self.testbed.finish_run(command)?;
        drop(inherited);
        let level = confinement_level(&ran)?;
        let inside = AttackOutput::new(&ran.stdout);
        for act in shared {
            let of_control = match PRIVILEGED.contains(&act) {
                true => &privileged,
                false => &control,
            };
            let control = classify_act(&mut self.control, act, of_control);
            let inside = classify_act(&mut self.confined, act, &inside);
            self.record(act, control, inside);
        }
        let act = "signal_guardian";
        let of_holder = classify_act(&mut self.control, act, &control);
        self.record(act, of_holder, ActResult::Unable("not yet".into()));
        Ok(level)
    }

    /// Tries the act in a run of its own, because it may end the run.
    fn signal_guardian(&mut self) -> Result<(), AttackError> {
        let act = "signal_guardian";
        let ran = self.testbed.finish_run(self.confined(&[], &[act]))?;
        let attack_output = AttackOutput::new(&ran.stdout);
        let inside = ran.judge(|| match (ran.status(), attack_output.success(act)) {
            ("succeeded", Some(_)) => ActResult::Refused("accepted, without any effect".into()),
            ("succeeded", None) => ActResult::Refused(attack_output.brief(act)),
            (status, _) => ActResult::Done(format!("the run ended as {status}")),
        });
        if let Some(tried) = self.acts.get_mut(act) {
            tried.inside = inside;
        }
        Ok(())
    }

    fn set_user_id(&mut self) -> Result<(), AttackError> {
        let act = "set_user_id";
        let gains = |path: &&&str| {
            std::fs::metadata(path).is_ok_and(|m| m.uid() == 0 && m.mode() & 0o4001 == 0o4001)
        };
        let Some(program) = SET_USER_ID_PROGRAMS.iter().find(gains) else {
            let none = "this host has no set-user-id program that we know";
            let none = ActResult::Unable(none.into());
            self.record(act, none.clone(), none);
            return Ok(());
        };
        let words = |targets: &TargetSet| attack_words(&targets.mark, act, program);
        let mut command = self.testbed.attacker(&words(&self.control));
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        let (output, seen) = watch_set_user_id(command, &self.control.mark)?;
        let control = judge_set_user_id(seen, act, &AttackOutput::new(&output.stdout));
        let options = [&["--json", "--db", "none"], &RUN_OPTIONS[..]].concat();
        let words = words(&self.confined);
        let command = self.testbed.run(&self.confined.project, &options, &words);
        let (output, seen) = watch_set_user_id(command, &self.confined.mark)?;
        let ran = ConfinedRun::read(&output)?;
        let inside = judge_set_user_id(seen, act, &AttackOutput::new(&ran.stdout));
        self.record(act, control, inside);
        Ok(())
    }

    /// Tries to type into the caller's terminal. The process that holds the terminal reports what was typed into it.
    fn terminal_injection(&mut self) -> Result<(), AttackError> {
        let act = "terminal_injection";
        let (control, confined) = (
            self.unconfined(RUN_ATTACKS, &[act]),
            self.confined(&[], &[act]),
        );
        let inject = |inner: Command, mark: &str| {
            let mut words = vec![OsStr::new(victims::ON_TERMINAL), inner.get_program()];
            words.extend(inner.get_args());
            let mut command = self.testbed.attacker(&words);
            if let Some(dir) = inner.get_current_dir() {
                command.current_dir(dir);
            }
            let (_outer, terminal) = open_terminal()?;
            let error = terminal.try_clone().operation("copy a descriptor")?;
            command.stdin(terminal).stderr(error);
            let output = BatteryProcess::start_with_own_stderr(command)?.finish()?;
            let mut lines = output.stdout.lines();
            let typed = lines.rfind(|l| l.starts_with(victims::HEARD));
            Ok::<ActResult, AttackError>(match typed {
                None => ActResult::Unable("the terminal was lost".into()),
                Some(line) if line.contains(mark) => {
                    ActResult::Done("the caller's shell would have read it".into())
                }
                Some(_) => ActResult::Refused(output_on_terminal(&output.stdout).brief(act)),
            })
        };
        let control = inject(control, &self.control.mark)?;
        let inside = inject(confined, &self.confined.mark)?;
        self.record(act, control, inside);
        Ok(())
    }

    fn daemon_outlives_timeout(&mut self) -> Result<(), AttackError> {
        let act = "daemon_outlives_timeout";
        let control = control_outlives_parent(self.testbed, act)?;
        let mark = self.testbed.mark()?;
        let words = attack_words(&mark, act, "");
        let options = ["--json", "--db", "none", "--timeout", "1s", "--grace", "0s"];
        let command = self.testbed.run(&self.confined.project, &options, &words);
        let ran = self.testbed.finish_run(command)?;
        self.record(act, control, outlived_timeout(&mark, &ran));
        Ok(())
    }

    /// Kills the runner with SIGKILL, which it cannot handle.
    fn daemon_outlives_runner(&mut self) -> Result<(), AttackError> {
        let act = "daemon_outlives_runner";
        let control = control_outlives_parent(self.testbed, act)?;
        let mark = self.testbed.mark()?;
        let options = [&["--db", "none"], &RUN_OPTIONS[..]].concat();
        let words = attack_words(&mark, act, "");
        let command = self.testbed.run(&self.confined.project, &options, &words);
        let mut process = BatteryProcess::start(command)?;
        let held = process.wait_for("holding");
        process.kill();
        let left = kill_survivors(&mark, DEATH_WAIT);
        let inside = match (held, left) {
            (false, _) => ActResult::Unable("the run did not get that far".into()),
            (true, 0) => ActResult::Refused("nothing is left".into()),
            (true, n) => ActResult::Done(format!("{n} processes outlived the runner")),
        };
        self.record(act, control, inside);
        Ok(())
    }

    /// Runs with a database of the battery's own. The collected outputs must neither contain the secret nor exceed the
    /// limit.
    fn collection(&mut self) -> Result<(), AttackError> {
        let (farm, links) = ("symlink_farm", "hard_links");
        let control_of = |act: &str| {
            let dir = self.control.workspace.join(act);
            make_dir(&dir, 0o755)?;
            let mut command = self.unconfined(RUN_ATTACKS, &[act]);
            command.current_dir(&dir);
            let attack_output = AttackOutput::new(&self.testbed.finish(command)?.stdout);
            // A collector that follows symlinks exports the secret. A collector that counts a hard-linked file once
            // exports too much.
            let done = match act == farm {
                true => files_containing(&dir, &self.control.secret(act))
                    .first()
                    .map(|path| format!("{} leads to the secret", path.display())),
                false => copies_beyond_count(&dir),
            };
            let refused = || ActResult::Refused(attack_output.brief(act));
            Ok::<ActResult, AttackError>(done.map_or_else(refused, ActResult::Done))
        };
        let control = control_of(farm)?;
        let control_of_links = control_of(links)?;
        let words = Self::words(&self.confined, RUN_ATTACKS, &[farm, links]);
        let options = [&["--json"], &RUN_OPTIONS[..], &OUTPUT_LIMIT].concat();
        let command = self.testbed.run(&self.confined.project, &options, &words);
        let ran = self.testbed.finish_run(command)?;
        let kept = files_containing(&self.testbed.home(), &self.confined.secret(farm));
        let outputs = ran.record["outputs"].as_array();
        let outputs = outputs.map_or(&[][..], Vec::as_slice);
        let is_link = |output: &&Value| {
            let path = output["path"].as_str();
            path.is_some_and(|p| p.starts_with(LINKED_NAME_PREFIX))
        };
        let (linked, ordinary): (Vec<_>, Vec<_>) = outputs.iter().partition(is_link);
        let inside = ran.judge(|| match (kept.first(), ordinary.len()) {
            (Some(path), _) => ActResult::Done(format!("the secret is in {}", path.display())),
            (None, 0) => {
                ActResult::Unable("nothing was collected, not even what is ordinary".into())
            }
            (None, n) => ActResult::Refused(format!("{n} ordinary output, and the secret nowhere")),
        });
        let bytes: u64 = outputs.iter().filter_map(|o| o["bytes"].as_u64()).sum();
        let (names, limit) = (linked.len(), OUTPUT_LIMIT.join(" "));
        let size = format!("{names} names, {} KiB in all, with {limit}", bytes >> 10);
        let of_links = ran.judge(|| match names {
            0 => ActResult::Unable("none of the names was collected".into()),
            _ if bytes > OUTPUT_BYTES_MAX => ActResult::Done(size),
            _ => ActResult::Refused(size),
        });
        self.record(farm, control, inside);
        self.record(links, control_of_links, of_links);
        Ok(())
    }
}

/// Returns the arguments that make the attacker try one act on a target.
fn attack_words(mark: &str, act: &str, target: &str) -> [String; 3] {
    [RUN_ATTACKS.into(), mark.into(), format!("{act}={target}")]
}

/// The control: kills only the process that was started, as most programs do, and counts the processes that go on.
fn control_outlives_parent(testbed: &Testbed, act: &str) -> Result<ActResult, AttackError> {
    let mark = testbed.mark()?;
    let mut process = BatteryProcess::start(testbed.attacker(&attack_words(&mark, act, "")))?;
    let held = process.wait_for("holding");
    process.kill();
    Ok(match (held, kill_survivors(&mark, Duration::ZERO)) {
        (false, _) => ActResult::Unable("it did not start".into()),
        (true, 0) => ActResult::Refused("nothing was left".into()),
        (true, n) => ActResult::Done(format!("{n} processes went on")),
    })
}

/// Checks that a run that reached its deadline left no process and is recorded as timed out.
fn outlived_timeout(mark: &str, ran: &ConfinedRun) -> ActResult {
    // Do not wait: when the call returns, every process must be dead.
    let left = kill_survivors(mark, Duration::ZERO);
    let unkillable = ran.record["notices"].to_string().contains("unkillable");
    let reason = ran.record["reason"].as_str().unwrap_or("without a reason");
    ran.judge(|| match (left, ran.status()) {
        // The run ended before its deadline, so the act was not tried.
        (0, "succeeded") => ActResult::Unable(ran.stdout.trim().to_owned()),
        (0, _) if unkillable => {
            ActResult::Done("not every process could be shown dead in time".into())
        }
        (0, "timed_out") => ActResult::Refused("timed_out, and nothing is left".into()),
        (0, status) => ActResult::Done(format!("the run ended as {status}, {reason}")),
        (n, _) => ActResult::Done(format!("{n} processes outlived the run")),
    })
}

fn confinement_level(ran: &ConfinedRun) -> Result<ConfinementLevel, AttackError> {
    if let Some(why) = ran.why_not_started() {
        return Err(AttackError::AttackedRunNotStarted {
            reason: why.to_owned(),
        });
    }
    let level = &ran.record["isolation"]["level"];
    ConfinementLevel::deserialize(level).map_err(|_| AttackError::UnknownLevel {
        level: level.as_str().map(str::to_owned),
    })
}

/// Judges an act from the evidence on the host and the attacker's answer.
fn classify_act(targets: &mut TargetSet, act: &str, attack_output: &AttackOutput) -> ActResult {
    if let Some(why) = targets.why_impossible(act) {
        return ActResult::Unable(why.into());
    }
    match (
        targets.evidence(act, attack_output),
        attack_output.outcome(act),
    ) {
        (Some(what), _) => ActResult::Done(what),
        (None, ActResult::Done(what)) => {
            ActResult::Refused(format!("without effect on the host: {what}"))
        }
        (None, refused_or_unable) => refused_or_unable,
    }
}

/// Returns a description if the names of the files here add up to more than the limit and the files themselves do not.
fn copies_beyond_count(dir: &Path) -> Option<String> {
    let (mut files, mut copied) = (BTreeMap::new(), 0);
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let meta = entry.metadata().ok()?;
        files.insert(meta.ino(), meta.len());
        copied += meta.len();
    }
    let counted: u64 = files.values().sum();
    (counted <= OUTPUT_BYTES_MAX && copied > OUTPUT_BYTES_MAX)
        .then(|| format!("{} KiB become {} KiB", counted >> 10, copied >> 10))
}

/// Returns the files below a directory that contain a text. Follows symlinks to files, as a careless reader would.
fn files_containing(dir: &Path, text: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![dir.to_path_buf()];
    while let Some(dir) = pending.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                pending.push(path);
            } else if std::fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() < 1 << 26)
                && contains(&std::fs::read(&path).unwrap_or_default(), text)
            {
                found.push(path);
            }
        }
    }
    found
}

/// An unconfined attacker prints its answers directly; a confined one's are in the run's document.
fn output_on_terminal(stdout: &str) -> AttackOutput {
    let first = stdout.lines().next().unwrap_or_default();
    let document: serde_json::Value = serde_json::from_str(first).unwrap_or_default();
    AttackOutput::new(document["stdout"]["text"].as_str().unwrap_or(stdout))
}

/// What a host sees of a set-user-id program: its real and effective uid, if it ran.
type SeenIds = Option<(u32, u32)>;

/// Runs an attacker to its end and looks for the set-user-id program with the mark on its command line.
fn watch_set_user_id(
    command: Command,
    mark: &str,
) -> Result<(ProcessOutput, SeenIds), AttackError> {
    let mut process = BatteryProcess::start(command)?;
    let mut seen: SeenIds = None;
    process.watch(|| {
        for (pid, words) in processes_with(mark) {
            let it = words.get(1).is_some_and(|w| w == "--help");
            if let (true, Some(ids)) = (it, real_and_effective_uid(pid.as_raw_pid())) {
                // Keep an observation with differing uids: a later one must not hide it.
                seen = seen
                    .filter(|(real, effective)| real != effective)
                    .or(Some(ids));
            }
        }
    });
    Ok((process.finish()?, seen))
}

fn judge_set_user_id(seen: SeenIds, act: &str, attack_output: &AttackOutput) -> ActResult {
    match seen {
        Some((real, 0)) if real != 0 => ActResult::Done(format!("uid {real} ran it as root")),
        Some((_, effective)) => ActResult::Refused(format!("it ran as uid {effective}")),
        None => match attack_output.answer(act) {
            Some(refused @ ActResult::Refused(_)) => refused,
            _ => ActResult::Unable(format!("it was not seen: {}", attack_output.brief(act))),
        },
    }
}

/// Returns the real and the effective uid of a process, as this host numbers them.
fn real_and_effective_uid(pid: i32) -> Option<(u32, u32)> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("Uid:"))?;
    let mut ids = line.split_whitespace().map_while(|n| n.parse().ok());
    Some((ids.next()?, ids.next()?))
}
