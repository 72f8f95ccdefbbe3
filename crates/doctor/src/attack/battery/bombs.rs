//! Acts that take too much of a resource, each in a run whose limit is far below what the act takes unconfined.

use std::process::Command;

use sandbox::attack::RUN_ATTACKS;

use super::super::attack_output::AttackOutput;
use super::super::error::AttackError;
use super::super::testbed::{ConfinedRun, make_dir};
use super::{ActOutcome, Battery, control_outlives_parent, outcome_from_output, outlived_timeout};

/// The act, the option that limits it, and the name of the limit.
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
/// Far above that limit, and below what the act prints.
const LOG_TOO_LARGE: usize = 1 << 20;
const TAKES_MEMORY: [&str; 2] = ["memory_bomb", "oom_loop"];
const SLOW_DEATH: &str = "slow_death";
/// On a slow host the act may not be ready at the deadline. What it has made by then takes as long to die.
const SLOW_DEATH_FOR: [&str; 6] = ["--timeout", "2s", "--grace", "0s", "--cpus", "1"];

impl Battery<'_> {
    pub fn limit_bombs(&mut self) -> Result<(), AttackError> {
        self.check_stop()?;
        // Run them at the same time, because they mostly wait.
        let mut controls = Vec::new();
        let mut confined = Vec::new();
        for (act, limit, _) in BOMBS {
            let dir = self.control.workspace.join(act);
            make_dir(&dir, 0o755)?;
            let mut command = self.unconfined(RUN_ATTACKS, &[act]);
            command.current_dir(dir);
            let fits = !TAKES_MEMORY.contains(&act) || has_free_memory();
            controls.push(fits.then_some(command));
            confined.push(self.confined(&limit, &[act]));
        }
        let testbed = self.testbed;
        let mark = testbed.mark()?;
        let words = [
            RUN_ATTACKS.to_owned(),
            mark.clone(),
            format!("{SLOW_DEATH}="),
        ];
        let options = [&["--json", "--db", "none"], &SLOW_DEATH_FOR[..]].concat();
        let slow = || testbed.run(&self.confined.project, &options, &words);
        confined.push(slow());
        let finish = |command: Command| testbed.finish(command);
        let (controls, slow_control) = std::thread::scope(|scope| {
            let slow = scope.spawn(|| control_outlives_parent(testbed, SLOW_DEATH));
            let started: Vec<_> = controls
                .into_iter()
                .map(|command| command.map(|c| scope.spawn(move || finish(c))))
                .collect();
            let output = started.into_iter().map(|s| s.map(|s| s.join()));
            (output.collect::<Vec<_>>(), slow.join())
        });
        let finish = |command: Command| testbed.finish_run(command);
        let mut confined: Vec<_> = std::thread::scope(|scope| {
            let started: Vec<_> = confined
                .into_iter()
                .map(|command| scope.spawn(move || finish(command)))
                .collect();
            started.into_iter().map(|s| s.join()).collect()
        });
        let (Some(Ok(ran)), Ok(control)) = (confined.pop(), slow_control) else {
            return Err(AttackError::ThreadPanicked { act: SLOW_DEATH });
        };
        let mut inside = outlived_timeout(&mark, &ran?);
        if !matches!(inside, ActOutcome::Refused(_)) {
            // A busy host may have been too slow to run all of them at once. Try this one again, alone.
            inside = outlived_timeout(&mark, &testbed.finish_run(slow())?);
        }
        self.record(SLOW_DEATH, control?, inside);
        for (((act, limit, name), control), ran) in BOMBS.into_iter().zip(controls).zip(confined) {
            let control = match control {
                None => ActOutcome::Unable("too little memory is free here to try".into()),
                Some(Ok(output)) => outcome_from_output(act, &AttackOutput::new(&output?.stdout)),
                Some(Err(_)) => return Err(AttackError::ThreadPanicked { act }),
            };
            let Ok(ran) = ran else {
                return Err(AttackError::ThreadPanicked { act });
            };
            let ran = ran?;
            let inside = match ran.why_not_started() {
                None => bomb_outcome(act, limit, &ran),
                Some(_) => self.run_degraded(act, limit, name)?,
            };
            self.record(act, control, inside);
        }
        Ok(())
    }

    /// A limit that cannot be enforced firmly stops the run, as promised. With `--allow-degraded` the run starts and
    /// Fumehood watches the limit; the watch must hold as well.
    fn run_degraded(
        &self,
        act: &str,
        limit: [&str; 2],
        name: &str,
    ) -> Result<ActOutcome, AttackError> {
        let options = [&limit[..], &["--allow-degraded", name]].concat();
        let ran = self.testbed.finish_run(self.confined(&options, &[act]))?;
        Ok(
            match (ran.why_not_started(), bomb_outcome(act, limit, &ran)) {
                (Some(why), _) => ActOutcome::Unable(why.to_owned()),
                (None, ActOutcome::Refused(how)) => {
                    ActOutcome::Refused(format!("{how}, with --allow-degraded {name}"))
                }
                (None, done_or_unable) => done_or_unable,
            },
        )
    }

    pub fn log_bomb(&mut self) -> Result<(), AttackError> {
        self.check_stop()?;
        let act = "log_bomb";
        let size = |length: usize| format!("{} KiB were kept", length >> 10);
        let outcome = |length: usize| match length > LOG_TOO_LARGE {
            true => ActOutcome::Done(size(length)),
            false => ActOutcome::Refused(size(length)),
        };
        let control = self.testbed.finish(self.unconfined(RUN_ATTACKS, &[act]))?;
        let ran = self.testbed.finish_run(self.confined(&LOG_LIMIT, &[act]))?;
        let inside = match ran.why_not_started() {
            Some(why) => ActOutcome::Unable(why.to_owned()),
            None => outcome(ran.stdout.len()),
        };
        self.record(act, outcome(control.stdout.len()), inside);
        Ok(())
    }
}

/// An attacker that was killed with its run prints no answer.
fn bomb_outcome(act: &str, limit: [&str; 2], ran: &ConfinedRun) -> ActOutcome {
    let attack_output = AttackOutput::new(&ran.stdout);
    match (
        ran.why_not_started(),
        attack_output.answer(act),
        ran.status(),
    ) {
        (Some(why), ..) => ActOutcome::Unable(why.to_owned()),
        (None, Some(_), _) => outcome_from_output(act, &attack_output),
        (None, None, "succeeded") => ActOutcome::Unable(attack_output.brief(act)),
        (None, None, status) => ActOutcome::Refused(format!("{status} with {}", limit.join(" "))),
    }
}

/// The controls of the acts that take memory use 464 MiB together, so require much more.
fn has_free_memory() -> bool {
    const ENOUGH_KIB: u64 = 1 << 20;
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok());
    kib.unwrap_or(0) > ENOUGH_KIB
}
