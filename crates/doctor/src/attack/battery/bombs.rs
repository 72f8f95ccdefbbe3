//! Acts that take too much of a resource, each in a run whose limit is far below what the act takes unconfined.

use std::panic::resume_unwind;

use sandbox::attack::RUN_ATTACKS;

use super::super::attack_output::{ActResult, AttackOutput};
use super::super::error::AttackError;
use super::super::testbed::{ConfinedRun, make_dir};
use super::{Battery, attack_words, control_outlives_parent, outlived_timeout};

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
const TOO_LITTLE_MEMORY: &str = "too little memory is free here to try";
const SLOW_DEATH: &str = "slow_death";
/// On a slow host the act may not be ready at the deadline. What it has made by then takes as long to die.
const SLOW_DEATH_FOR: [&str; 6] = ["--timeout", "2s", "--grace", "0s", "--cpus", "1"];

/// What a thread of the battery does.
type Job<'a, T> = Box<dyn FnOnce() -> Result<T, AttackError> + Send + 'a>;

/// Does the jobs at the same time, because they mostly wait.
fn run_together<T: Send>(jobs: Vec<Job<'_, T>>) -> Result<Vec<T>, AttackError> {
    std::thread::scope(|scope| {
        let started: Vec<_> = jobs.into_iter().map(|job| scope.spawn(job)).collect();
        let results = started.into_iter().map(|thread| thread.join());
        let results = results.map(|result| result.unwrap_or_else(|panic| resume_unwind(panic)));
        results.collect()
    })
}

impl Battery<'_> {
    pub fn limit_bombs(&mut self) -> Result<(), AttackError> {
        let testbed = self.testbed;
        let mark = testbed.mark()?;
        let words = attack_words(&mark, SLOW_DEATH, "");
        let options = [&["--json", "--db", "none"], &SLOW_DEATH_FOR[..]].concat();
        let project = self.confined.project.clone();
        let slow = || testbed.finish_run(testbed.run(&project, &options, &words));
        let slow_control = || control_outlives_parent(testbed, SLOW_DEATH);
        let mut controls: Vec<Job<'_, _>> = vec![Box::new(slow_control)];
        let mut confined: Vec<Job<'_, _>> = vec![Box::new(slow)];
        for (act, limit, _) in BOMBS {
            let dir = self.control.workspace.join(act);
            make_dir(&dir, 0o755)?;
            let mut command = self.unconfined(RUN_ATTACKS, &[act]);
            command.current_dir(dir);
            let fits = !TAKES_MEMORY.contains(&act) || has_free_memory();
            let control = move || match fits {
                true => Ok(AttackOutput::new(&testbed.finish(command)?.stdout).outcome(act)),
                false => Ok(ActResult::Unable(TOO_LITTLE_MEMORY.into())),
            };
            controls.push(Box::new(control));
            let command = self.confined(&limit, &[act]);
            confined.push(Box::new(move || testbed.finish_run(command)));
        }
        let mut controls = run_together(controls)?;
        let mut confined = run_together(confined)?;
        let mut inside = outlived_timeout(&mark, &confined.remove(0));
        if !matches!(inside, ActResult::Refused(_)) {
            // A busy host may have been too slow to run all of them at once. Try this one again, alone.
            inside = outlived_timeout(&mark, &slow()?);
        }
        self.record(SLOW_DEATH, controls.remove(0), inside);
        for (((act, limit, name), control), ran) in BOMBS.into_iter().zip(controls).zip(confined) {
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
    ) -> Result<ActResult, AttackError> {
        let options = [&limit[..], &["--allow-degraded", name]].concat();
        let ran = self.testbed.finish_run(self.confined(&options, &[act]))?;
        Ok(match bomb_outcome(act, limit, &ran) {
            ActResult::Refused(how) => {
                ActResult::Refused(format!("{how}, with --allow-degraded {name}"))
            }
            done_or_unable => done_or_unable,
        })
    }

    pub fn log_bomb(&mut self) -> Result<(), AttackError> {
        let act = "log_bomb";
        let size = |length: usize| format!("{} KiB were kept", length >> 10);
        let outcome = |length: usize| match length > LOG_TOO_LARGE {
            true => ActResult::Done(size(length)),
            false => ActResult::Refused(size(length)),
        };
        let control = self.testbed.finish(self.unconfined(RUN_ATTACKS, &[act]))?;
        let ran = self.testbed.finish_run(self.confined(&LOG_LIMIT, &[act]))?;
        let inside = ran.judge(|| outcome(ran.stdout.len()));
        self.record(act, outcome(control.stdout.len()), inside);
        Ok(())
    }
}

/// An attacker that was killed with its run prints no answer.
fn bomb_outcome(act: &str, limit: [&str; 2], ran: &ConfinedRun) -> ActResult {
    let attack_output = AttackOutput::new(&ran.stdout);
    ran.judge(|| match (attack_output.answer(act), ran.status()) {
        (Some(answer), _) => answer,
        (None, "succeeded") => ActResult::Unable(attack_output.brief(act)),
        (None, status) => ActResult::Refused(format!("{status} with {}", limit.join(" "))),
    })
}

/// The controls of the acts that take memory use 464 MiB together, so require much more.
fn has_free_memory() -> bool {
    const ENOUGH_KIB: u64 = 1 << 20;
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok());
    kib.unwrap_or(0) > ENOUGH_KIB
}
