//! Acts that take too much: each in a run with a limit far below what the act takes unconfined.

use std::process::Command;

use anyhow::bail;
use sandbox::attack::RUN_ATTACKS;

use super::super::lab::{Confined, make_open};
use super::super::said::Said;
use super::{Battery, Came, outlived_timeout, outlives_its_parent, told};

/// The act, the option, and the limit's name.
const BOMBS: [(&str, [&str; 2], &str); 7] = [
    ("fork_bomb", ["--pids", "32"], "pids"),
    ("memory_bomb", ["--memory", "96M"], "memory"),
    ("oom_loop", ["--memory", "96M"], "memory"),
    ("disk_bomb", ["--disk", "8M"], "disk"),
    ("disk_held_by_calls", ["--disk", "8M"], "disk"),
    ("file_bomb", ["--files", "200"], "files"),
    ("unlinked_files", ["--files", "100"], "files"),
];
const LOG_LIMIT: [&str; 2] = ["--log-limit", "64K"];
/// Far above that limit, and below what the bomb prints.
const LOG_TOO_LARGE: usize = 1 << 20;
const TAKES_MEMORY: [&str; 2] = ["memory_bomb", "oom_loop"];
const SLOW_DEATH: &str = "slow_death";
/// On a host where the act is not ready by then, what it has made by then takes as long to end.
const SLOW_DEATH_FOR: [&str; 6] = ["--timeout", "2s", "--grace", "0s", "--cpus", "1"];

impl Battery<'_> {
    pub fn bombs(&mut self) -> anyhow::Result<()> {
        (self.go_on)()?;
        // Side by side, because they mostly wait.
        let mut controls = Vec::new();
        let mut confined = Vec::new();
        for (act, limit, _) in BOMBS {
            let dir = self.control.workspace.join(act);
            make_open(&dir, 0o755)?;
            let mut command = self.unconfined(RUN_ATTACKS, &[act]);
            command.current_dir(dir);
            let fits = !TAKES_MEMORY.contains(&act) || has_free_memory();
            controls.push(fits.then_some(command));
            confined.push(self.confined(&limit, &[act]));
        }
        let lab = self.lab;
        let mark = lab.mark()?;
        let words = [
            RUN_ATTACKS.to_owned(),
            mark.clone(),
            format!("{SLOW_DEATH}="),
        ];
        let options = [&["--json", "--db", "none"], &SLOW_DEATH_FOR[..]].concat();
        let slow = || lab.run(&self.confined.project, &options, &words);
        confined.push(slow());
        let finish = |command: Command| lab.finish(command);
        let (controls, slow_control) = std::thread::scope(|scope| {
            let slow = scope.spawn(|| outlives_its_parent(lab, SLOW_DEATH));
            let started: Vec<_> = controls
                .into_iter()
                .map(|command| command.map(|c| scope.spawn(move || finish(c))))
                .collect();
            let ended = started.into_iter().map(|s| s.map(|s| s.join()));
            (ended.collect::<Vec<_>>(), slow.join())
        });
        let finish = |command: Command| lab.finish_run(command);
        let mut confined: Vec<_> = std::thread::scope(|scope| {
            let started: Vec<_> = confined
                .into_iter()
                .map(|command| scope.spawn(move || finish(command)))
                .collect();
            started.into_iter().map(|s| s.join()).collect()
        });
        let (Some(Ok(ran)), Ok(control)) = (confined.pop(), slow_control) else {
            bail!("a run of {SLOW_DEATH} was lost");
        };
        let mut inside = outlived_timeout(&mark, &ran?);
        if !matches!(inside, Came::Refused(_)) {
            // A busy host may have been too slow for all of them at once.
            inside = outlived_timeout(&mark, &lab.finish_run(slow())?);
        }
        self.record(SLOW_DEATH, control?, inside);
        for (((act, limit, name), control), ran) in BOMBS.into_iter().zip(controls).zip(confined) {
            let control = match control {
                None => Came::Unable("too little memory is free here to try".into()),
                Some(Ok(ended)) => told(act, &Said::new(&ended?.stdout)),
                Some(Err(_)) => bail!("the control of {act} was lost"),
            };
            let Ok(ran) = ran else {
                bail!("the run of {act} was lost");
            };
            let ran = ran?;
            let inside = match ran.not_started() {
                None => bombed(act, limit, &ran),
                Some(_) => self.degraded(act, limit, name)?,
            };
            self.record(act, control, inside);
        }
        Ok(())
    }

    /// A limit that cannot be enforced firmly stops the run, which is what is promised. Whoever allows less gets a
    /// watch, which must hold as well.
    fn degraded(&self, act: &str, limit: [&str; 2], name: &str) -> anyhow::Result<Came> {
        let options = [&limit[..], &["--allow-degraded", name]].concat();
        let ran = self.lab.finish_run(self.confined(&options, &[act]))?;
        Ok(match (ran.not_started(), bombed(act, limit, &ran)) {
            (Some(why), _) => Came::Unable(why.to_owned()),
            (None, Came::Refused(how)) => {
                Came::Refused(format!("{how}, with --allow-degraded {name}"))
            }
            (None, done_or_unable) => done_or_unable,
        })
    }

    pub fn log(&mut self) -> anyhow::Result<()> {
        (self.go_on)()?;
        let act = "log_bomb";
        let size = |length: usize| format!("{} KiB were kept", length >> 10);
        let came = |length: usize| match length > LOG_TOO_LARGE {
            true => Came::Done(size(length)),
            false => Came::Refused(size(length)),
        };
        let control = self.lab.finish(self.unconfined(RUN_ATTACKS, &[act]))?;
        let ran = self.lab.finish_run(self.confined(&LOG_LIMIT, &[act]))?;
        let inside = match ran.not_started() {
            Some(why) => Came::Unable(why.to_owned()),
            None => came(ran.said.len()),
        };
        self.record(act, came(control.stdout.len()), inside);
        Ok(())
    }
}

/// A bomb that was ended together with its run has no more to say.
fn bombed(act: &str, limit: [&str; 2], ran: &Confined) -> Came {
    let said = Said::new(&ran.said);
    match (ran.not_started(), said.of(act), ran.status()) {
        (Some(why), ..) => Came::Unable(why.to_owned()),
        (None, Some(_), _) => told(act, &said),
        (None, None, "succeeded") => Came::Unable(said.brief(act)),
        (None, None, status) => Came::Refused(format!("{status} with {}", limit.join(" "))),
    }
}

/// The controls take 464 MiB in all; there must be much more.
fn has_free_memory() -> bool {
    const ENOUGH_KIB: u64 = 1 << 20;
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok());
    kib.unwrap_or(0) > ENOUGH_KIB
}
