//! The battery itself: every act unconfined, as its control, and then in real runs of the product.

mod bombs;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use sandbox::attack::{
    LINKED_NAME_PREFIX, RUN_ATTACKS, RUN_ATTACKS_PRIVILEGED, SECRET_VARIABLE, victims,
};
use sandbox::promises::ACTS;
use sandbox::spec::ConfinementLevel;
use serde_json::Value;

use super::lab::{
    Confined, Lab, Live, make_open, open_terminal, processes_with, random_word, survivors,
};
use super::said::{Said, Word};
use super::stage::{Side, Stage};

/// Acts with runs of their own; all others share one.
const APART: [&str; 16] = [
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
/// Acts that the unprivileged can only do in namespaces of their own, where the control does them.
const PRIVILEGED: [&str; 3] = ["write_system", "packet", "mount"];
/// Below what every name of the hard-linked file comes to, and above the file itself.
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
/// Nobody's, on every Linux: what a control uses that must not be root.
const NOBODY: u32 = 65534;
/// No run of the battery needs as long; and none has anything to tidy up when it is stopped.
const RUN_FOR: [&str; 4] = ["--timeout", "60s", "--grace", "0s"];
/// How long a process may take to be gone after the run that it belonged to.
const GONE_WITHIN: Duration = Duration::from_secs(5);

/// What became of an act in one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Came {
    /// It was done: this shows it.
    Done(String),
    Refused(String),
    /// It could not be tried.
    Unable(String),
}

#[derive(Clone, Debug)]
pub struct Tried {
    pub control: Came,
    pub inside: Came,
}

pub struct Results {
    /// As the runs say it was in force.
    pub level: ConfinementLevel,
    /// Where the confined targets were.
    pub place: PathBuf,
    pub acts: BTreeMap<&'static str, Tried>,
}

struct Battery<'a> {
    lab: &'a Lab,
    control: Stage,
    confined: Stage,
    acts: BTreeMap<&'static str, Tried>,
    /// Asked between two steps whether to go on.
    go_on: &'a dyn Fn() -> anyhow::Result<()>,
}

pub fn run(lab: &Lab, go_on: &dyn Fn() -> anyhow::Result<()>) -> anyhow::Result<Results> {
    let id = format!("attack-other-{}", random_word()?);
    let other = start_other(lab, &id)?;
    let workspace = lab.workspace(&id);
    let mut battery = Battery {
        lab,
        control: Stage::set(lab, Side::Control, &workspace)?,
        confined: Stage::set(lab, Side::Confined, &workspace)?,
        acts: BTreeMap::new(),
        go_on,
    };
    let level = battery.most()?;
    battery.holder()?;
    battery.set_user_id()?;
    battery.terminal()?;
    battery.bombs()?;
    battery.log()?;
    battery.daemon_and_timeout()?;
    battery.daemon_and_runner()?;
    battery.collection()?;
    other.finish()?;
    Ok(Results {
        level,
        place: lab.path(""),
        acts: battery.acts,
    })
}

/// Another analysis, which runs all the while and is attacked.
fn start_other(lab: &Lab, id: &str) -> anyhow::Result<Live> {
    let project = lab.path("other");
    make_open(&project, 0o755)?;
    let options = ["--db", "none", "--id", id, "--stdin", "-"];
    let mut command = lab.run(&project, &options, &[victims::WITNESS]);
    command.stdin(Stdio::piped());
    let mut live = Live::start(command)?;
    if live.wait_for(victims::READY) {
        return Ok(live);
    }
    let ended = live.finish()?;
    bail!("start a run to attack: {}{}", ended.stdout, ended.stderr)
}

impl Battery<'_> {
    fn record(&mut self, act: &'static str, control: Came, inside: Came) {
        self.acts.insert(act, Tried { control, inside });
    }

    /// The words that make an attacker try these acts on a stage.
    fn words(stage: &Stage, how: &str, acts: &[&str]) -> Vec<OsString> {
        let aims = acts
            .iter()
            .map(|act| format!("{act}={}", stage.target(act)).into());
        [how.into(), stage.mark.clone().into()]
            .into_iter()
            .chain(aims)
            .collect()
    }

    fn unconfined(&self, how: &str, acts: &[&str]) -> Command {
        let mut command = self.lab.attacker(&Self::words(&self.control, how, acts));
        command.current_dir(&self.control.workspace);
        command
    }

    fn confined(&self, options: &[&str], acts: &[&str]) -> Command {
        let words = Self::words(&self.confined, RUN_ATTACKS, acts);
        let options = [&["--json", "--db", "none"], &RUN_FOR[..], options].concat();
        self.lab.run(&self.confined.project, &options, &words)
    }

    /// Everything that can share a run: one unconfined, one in the sandbox.
    fn most(&mut self) -> anyhow::Result<ConfinementLevel> {
        let shared: Vec<&'static str> = ACTS
            .iter()
            .map(|act| act.name)
            .filter(|name| !APART.contains(name))
            .collect();
        let ordinary: Vec<&str> = shared
            .iter()
            .copied()
            .filter(|name| !PRIVILEGED.contains(name))
            .chain(["signal_guardian"])
            .collect();
        let mut command = self.unconfined(RUN_ATTACKS, &ordinary);
        command.env(SECRET_VARIABLE, self.control.secret("secret_environment"));
        let handed = self.control.handed_on()?;
        let mut said = self.lab.finish(command)?.stdout;
        drop(handed);
        let command = self.unconfined(RUN_ATTACKS_PRIVILEGED, &PRIVILEGED);
        let privileged = Said::new(&self.lab.finish(command)?.stdout);
        let control = Said::new(&std::mem::take(&mut said));
        (self.go_on)()?;

        let mut command = self.confined(&[], &shared);
        command.env(SECRET_VARIABLE, self.confined.secret("secret_environment"));
        let handed = self.confined.handed_on()?;
        let ran = self.lab.finish_run(command)?;
        drop(handed);
        let level = level_of(&ran)?;
        let inside = Said::new(&ran.said);
        for act in shared {
            let of_control = match PRIVILEGED.contains(&act) {
                true => &privileged,
                false => &control,
            };
            let control = judge(&mut self.control, act, of_control);
            let inside = judge(&mut self.confined, act, &inside);
            self.record(act, control, inside);
        }
        let of_holder = judge(&mut self.control, "signal_guardian", &control);
        self.record("signal_guardian", of_holder, Came::Unable("not yet".into()));
        Ok(level)
    }

    /// Alone, because it may end the run.
    fn holder(&mut self) -> anyhow::Result<()> {
        (self.go_on)()?;
        let act = "signal_guardian";
        let ran = self.lab.finish_run(self.confined(&[], &[act]))?;
        let said = Said::new(&ran.said);
        let inside = match (ran.not_started(), ran.status()) {
            (Some(why), _) => Came::Unable(why.to_owned()),
            (None, "succeeded") => match said.got(act) {
                Some(_) => Came::Refused("accepted, without any effect".into()),
                None => Came::Refused(said.brief(act)),
            },
            (None, status) => Came::Done(format!("the run ended as {status}")),
        };
        if let Some(tried) = self.acts.get_mut(act) {
            tried.inside = inside;
        }
        Ok(())
    }

    fn set_user_id(&mut self) -> anyhow::Result<()> {
        (self.go_on)()?;
        let act = "set_user_id";
        let gains = |path: &&&str| {
            std::fs::metadata(path).is_ok_and(|m| m.uid() == 0 && m.mode() & 0o4001 == 0o4001)
        };
        let Some(program) = SET_USER_ID_PROGRAMS.iter().find(gains) else {
            let none = || Came::Unable("this host has no set-user-id program that we know".into());
            self.record(act, none(), none());
            return Ok(());
        };
        let words = |stage: &Stage| {
            let aim = format!("{act}={program}");
            [RUN_ATTACKS.to_owned(), stage.mark.clone(), aim]
        };
        let mut command = self.lab.attacker(&words(&self.control));
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        let watch = Watch::over(&self.control.mark);
        let said = Said::new(&self.lab.finish(command)?.stdout);
        let control = watch.came(act, &said);
        let watch = Watch::over(&self.confined.mark);
        let options = [&["--json", "--db", "none"], &RUN_FOR[..]].concat();
        let words = words(&self.confined);
        let command = self.lab.run(&self.confined.project, &options, &words);
        let ran = self.lab.finish_run(command)?;
        let inside = watch.came(act, &Said::new(&ran.said));
        self.record(act, control, inside);
        Ok(())
    }

    /// On a terminal that is the caller's, as a shell's is. Whoever holds it tells what was typed into it.
    fn terminal(&mut self) -> anyhow::Result<()> {
        (self.go_on)()?;
        let act = "terminal_injection";
        let (control, confined) = (
            self.unconfined(RUN_ATTACKS, &[act]),
            self.confined(&[], &[act]),
        );
        let mut came = Vec::new();
        for (inner, mark) in [
            (control, &self.control.mark),
            (confined, &self.confined.mark),
        ] {
            let mut words: Vec<OsString> = vec![victims::ON_TERMINAL.into()];
            words.push(inner.get_program().to_owned());
            words.extend(inner.get_args().map(OsString::from));
            let mut command = self.lab.attacker(&words);
            if let Some(dir) = inner.get_current_dir() {
                command.current_dir(dir);
            }
            let (_outer, terminal) = open_terminal()?;
            let ended = Live::start_on(command, terminal)?.finish()?;
            let heard = ended
                .stdout
                .lines()
                .rfind(|l| l.starts_with(victims::HEARD));
            came.push(match heard {
                None => Came::Unable("the terminal was lost".into()),
                Some(line) if line.contains(mark.as_str()) => {
                    Came::Done("the caller's shell would have read it".into())
                }
                Some(_) => Came::Refused(said_on_terminal(&ended.stdout).brief(act)),
            });
        }
        let inside = came.pop().context("two terminals")?;
        let control = came.pop().context("two terminals")?;
        self.record(act, control, inside);
        Ok(())
    }

    fn daemon_and_timeout(&mut self) -> anyhow::Result<()> {
        (self.go_on)()?;
        let act = "daemon_outlives_timeout";
        let control = outlives_its_parent(self.lab, act)?;
        let mark = self.lab.mark()?;
        let words = [RUN_ATTACKS.to_owned(), mark.clone(), format!("{act}=")];
        let options = ["--json", "--db", "none", "--timeout", "1s", "--grace", "0s"];
        let command = self.lab.run(&self.confined.project, &options, &words);
        let ran = self.lab.finish_run(command)?;
        self.record(act, control, outlived_timeout(&mark, &ran));
        Ok(())
    }

    /// Here the runner is ended, in a way that it cannot notice.
    fn daemon_and_runner(&mut self) -> anyhow::Result<()> {
        (self.go_on)()?;
        let act = "daemon_outlives_runner";
        let control = outlives_its_parent(self.lab, act)?;
        let mark = self.lab.mark()?;
        let words = [RUN_ATTACKS.to_owned(), mark.clone(), format!("{act}=")];
        let options = [&["--db", "none"], &RUN_FOR[..]].concat();
        let mut live = Live::start(self.lab.run(&self.confined.project, &options, &words))?;
        let held = live.wait_for("holding");
        live.kill();
        let left = survivors(&mark, GONE_WITHIN);
        let inside = match (held, left) {
            (false, _) => Came::Unable("the run did not get that far".into()),
            (true, 0) => Came::Refused("nothing is left".into()),
            (true, n) => Came::Done(format!("{n} processes outlived the runner")),
        };
        self.record(act, control, inside);
        Ok(())
    }

    /// With the record on, in a database of the battery's own: what is collected must neither hold the secret nor be
    /// more than is allowed.
    fn collection(&mut self) -> anyhow::Result<()> {
        (self.go_on)()?;
        let (farm, links) = ("symlink_farm", "hard_links");
        let mut controls = Vec::new();
        for act in [farm, links] {
            let dir = self.control.workspace.join(act);
            make_open(&dir, 0o755)?;
            let mut command = self.unconfined(RUN_ATTACKS, &[act]);
            command.current_dir(&dir);
            let said = Said::new(&self.lab.finish(command)?.stdout);
            // A collector that follows carries the secret out; one that counts a file once copies too much.
            let done = match act == farm {
                true => holding(&dir, self.control.secret(act))
                    .first()
                    .map(|path| format!("{} leads to the secret", path.display())),
                false => copies_beyond_count(&dir),
            };
            controls.push(done.map_or_else(|| Came::Refused(said.brief(act)), Came::Done));
        }
        let words = Self::words(&self.confined, RUN_ATTACKS, &[farm, links]);
        let options = [&["--json"], &RUN_FOR[..], &OUTPUT_LIMIT].concat();
        let ran = self
            .lab
            .finish_run(self.lab.run(&self.confined.project, &options, &words))?;
        let kept = holding(&self.lab.home(), self.confined.secret(farm));
        let outputs = ran.record["outputs"]
            .as_array()
            .map_or(&[][..], Vec::as_slice);
        let is_link = |output: &&Value| {
            output["path"]
                .as_str()
                .is_some_and(|p| p.starts_with(LINKED_NAME_PREFIX))
        };
        let (linked, ordinary): (Vec<_>, Vec<_>) = outputs.iter().partition(is_link);
        let inside = match (ran.not_started(), kept.first()) {
            (Some(why), _) => Came::Unable(why.to_owned()),
            (None, Some(path)) => Came::Done(format!("the secret is in {}", path.display())),
            (None, None) if ordinary.is_empty() => {
                Came::Unable("nothing was collected, not even what is ordinary".into())
            }
            (None, None) => Came::Refused(format!(
                "{} ordinary output, and the secret nowhere",
                ordinary.len()
            )),
        };
        let bytes: u64 = outputs.iter().filter_map(|o| o["bytes"].as_u64()).sum();
        let told = format!(
            "{} names, {} KiB in all, with {}",
            linked.len(),
            bytes >> 10,
            OUTPUT_LIMIT.join(" ")
        );
        let of_links = match (ran.not_started(), linked.len()) {
            (Some(why), _) => Came::Unable(why.to_owned()),
            (None, 0) => Came::Unable("none of the names was collected".into()),
            (None, _) if bytes > OUTPUT_BYTES_MAX => Came::Done(told),
            (None, _) => Came::Refused(told),
        };
        let control_of_links = controls.pop().context("two controls")?;
        let control = controls.pop().context("two controls")?;
        self.record(farm, control, inside);
        self.record(links, control_of_links, of_links);
        Ok(())
    }
}

/// Ends the process that was started, and it alone, as most programs do.
fn outlives_its_parent(lab: &Lab, act: &str) -> anyhow::Result<Came> {
    let mark = lab.mark()?;
    let words = [RUN_ATTACKS.to_owned(), mark.clone(), format!("{act}=")];
    let mut live = Live::start(lab.attacker(&words))?;
    let held = live.wait_for("holding");
    live.kill();
    Ok(match (held, survivors(&mark, Duration::ZERO)) {
        (false, _) => Came::Unable("it did not start".into()),
        (true, 0) => Came::Refused("nothing was left".into()),
        (true, n) => Came::Done(format!("{n} processes went on")),
    })
}

/// Whether a run that was stopped at its deadline left a process, or was not said to have been stopped for that.
fn outlived_timeout(mark: &str, ran: &Confined) -> Came {
    // At once: when the call returns, everything is dead.
    let left = survivors(mark, Duration::ZERO);
    let unkillable = ran.record["notices"].to_string().contains("unkillable");
    match (ran.not_started(), left, ran.status()) {
        (Some(why), ..) => Came::Unable(why.to_owned()),
        // It was not there any more at its deadline.
        (None, 0, "succeeded") => Came::Unable(ran.said.trim().to_owned()),
        (None, 0, _) if unkillable => {
            Came::Done("not every process could be shown dead in time".into())
        }
        (None, 0, "timed_out") => Came::Refused("timed_out, and nothing is left".into()),
        (None, 0, status) => Came::Done(format!(
            "the run ended as {status}, {}",
            ran.record["reason"].as_str().unwrap_or("without a reason")
        )),
        (None, n, _) => Came::Done(format!("{n} processes outlived the run")),
    }
}

fn level_of(ran: &Confined) -> anyhow::Result<ConfinementLevel> {
    if let Some(why) = ran.not_started() {
        bail!("the run that is attacked did not start: {why}");
    }
    match ran.record["isolation"]["level"].as_str() {
        Some("full") => Ok(ConfinementLevel::Full),
        Some("landlock") => Ok(ConfinementLevel::Landlock),
        other => bail!("the run says it was confined at level {other:?}"),
    }
}

/// From what the attacker says, and what the stage shows.
fn judge(stage: &mut Stage, act: &str, said: &Said) -> Came {
    if let Some(why) = stage.unable(act) {
        return Came::Unable(why.into());
    }
    match (stage.evidence(act, said), said.of(act)) {
        (Some(what), _) => Came::Done(what),
        (None, Some((Word::Unable, why))) => Came::Unable(why.to_owned()),
        (None, Some((Word::Got, what))) => {
            Came::Refused(format!("without effect on the host: {what}"))
        }
        (None, Some((Word::Refused, why))) => Came::Refused(why.to_owned()),
        (None, None) => Came::Unable(said.brief(act)),
    }
}

/// Where nothing but the attacker can tell.
fn told(act: &str, said: &Said) -> Came {
    match said.of(act) {
        Some((Word::Got, what)) => Came::Done(what.to_owned()),
        Some((Word::Refused, why)) => Came::Refused(why.to_owned()),
        Some((Word::Unable, why)) => Came::Unable(why.to_owned()),
        None => Came::Unable(said.brief(act)),
    }
}

/// Whether all names of the files here come to more than is allowed, and the files themselves do not.
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

/// Files below a directory that hold a text, symlinks to files followed, as a careless reader would.
fn holding(dir: &Path, text: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![dir.to_path_buf()];
    while let Some(dir) = pending.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                pending.push(path);
            } else if std::fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() < 1 << 26)
                && std::fs::read(&path)
                    .unwrap_or_default()
                    .windows(text.len())
                    .any(|w| w == text.as_bytes())
            {
                found.push(path);
            }
        }
    }
    found
}

/// Unconfined the attacker prints by itself; otherwise it is in the run's document.
fn said_on_terminal(stdout: &str) -> Said {
    let first = stdout.lines().next().unwrap_or_default();
    let document: serde_json::Value = serde_json::from_str(first).unwrap_or_default();
    Said::new(document["stdout"]["text"].as_str().unwrap_or(stdout))
}

/// Looks for a set-user-id program with the mark on its command line, and under which ids it runs.
struct Watch {
    stop: Arc<AtomicBool>,
    seen: std::thread::JoinHandle<Option<(u32, u32)>>,
}

impl Watch {
    fn over(mark: &str) -> Watch {
        let stop = Arc::new(AtomicBool::new(false));
        let (mark, over) = (mark.to_owned(), Arc::clone(&stop));
        let seen = std::thread::spawn(move || {
            let mut seen = None;
            while !over.load(Ordering::Relaxed) {
                for (pid, words) in processes_with(&mark) {
                    let it = words.get(1).is_some_and(|w| w == "--help");
                    if let (true, Some(ids)) = (it, ids_of(pid.as_raw_pid())) {
                        // Once seen with more, it stays so.
                        seen = seen
                            .filter(|(real, effective)| real != effective)
                            .or(Some(ids));
                    }
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            seen
        });
        Watch { stop, seen }
    }

    fn came(self, act: &str, said: &Said) -> Came {
        self.stop.store(true, Ordering::Relaxed);
        match self.seen.join().ok().flatten() {
            Some((real, 0)) if real != 0 => Came::Done(format!("uid {real} ran it as root")),
            Some((_, effective)) => Came::Refused(format!("it ran as uid {effective}")),
            None => match said.of(act) {
                Some((Word::Refused, why)) => Came::Refused(why.to_owned()),
                _ => Came::Unable(format!("it was not seen: {}", said.brief(act))),
            },
        }
    }
}

/// The real and the effective uid of a process, as this host numbers them.
fn ids_of(pid: i32) -> Option<(u32, u32)> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("Uid:"))?;
    let mut ids = line.split_whitespace().map_while(|n| n.parse().ok());
    Some((ids.next()?, ids.next()?))
}
