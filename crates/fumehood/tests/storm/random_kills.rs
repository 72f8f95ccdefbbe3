//! Runners are killed at random instants, and so are those who recover from it. In the end every analysis that was
//! accepted is in exactly one final state, and nothing is lost, doubled or left.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use store::Store;
use testkit::command::{RunningCommand, finish};
use testkit::process::processes_with;
use testkit::trial;
use testkit::wait::eventually;

use crate::deployment::{Database, Machine, Recovery, TestDeployment, is_unlocked};
use crate::expected_state::{self, ExpectedState};
use crate::{report, settings};

/// Runners at the same time.
const LANES: usize = 3;
/// Of how many kills one is in a home that several runners share, where each also recovers the others.
const CROWDED_EVERY: usize = 5;

/// Numbers that look random and are the same for the same seed.
pub struct RandomNumbers(u64);

impl RandomNumbers {
    pub fn new(salt: u64) -> RandomNumbers {
        let mut random = RandomNumbers(settings().seed ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        random.below(2);
        random
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound.max(1)
    }

    pub fn moment(&mut self, at_most: Duration) -> Duration {
        Duration::from_micros(self.below(at_most.as_micros() as u64))
    }
}

/// What things take on this machine, just now.
#[derive(Clone, Copy)]
struct MeasuredDurations {
    run: Duration,
    /// From the program's last word to the runner's end.
    ending: Duration,
    gc: Duration,
}

impl MeasuredDurations {
    fn measure(
        deployment: &TestDeployment,
        fates: &mut Vec<(String, ExpectedState)>,
    ) -> MeasuredDurations {
        let (mut run, mut ending) = (Duration::MAX, Duration::MAX);
        for turn in 0..3 {
            let id = deployment.id(&format!("pace-{turn}"));
            let began = Instant::now();
            let mut live = RunningCommand::start(deployment.program(&deployment.machine, &id));
            live.wait_for("last");
            let last = Instant::now();
            live.finish().good();
            run = run.min(began.elapsed());
            ending = ending.min(last.elapsed());
            fates.push((id, ExpectedState::Whole));
        }
        let began = Instant::now();
        deployment.recover(Recovery::Gc, "");
        MeasuredDurations {
            run,
            ending,
            gc: began.elapsed(),
        }
    }
}

/// A busy machine is slower than it was measured, and quicker when others are done: one in four comes too late.
fn pace_by(pace: &mut Duration, in_time: bool) {
    *pace = match in_time {
        true => *pace * 21 / 20,
        false => *pace * 17 / 20,
    };
}

/// How far an analysis had come when its runner died, told by what it left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum KillMoment {
    BeforeTheClaim,
    Claimed,
    Begun,
    Running,
    Ended,
    Moving,
    Committed,
    Finished,
    /// In a crowded home another may have recovered it before anybody could look.
    Unseen,
}

#[derive(Default)]
struct KillResults {
    landed: BTreeMap<KillMoment, usize>,
    recoveries_killed: usize,
    fates: Vec<(String, ExpectedState)>,
}

trial!(Everyone, runners_killed_on_sqlite);
fn runners_killed_on_sqlite() {
    storm(&TestDeployment::sqlite("storm"), 1);
}

trial!(Everyone, runners_killed_on_postgres);
fn runners_killed_on_postgres() {
    storm(&TestDeployment::postgres("storm"), 2);
}

fn storm(deployment: &TestDeployment, salt: u64) {
    let kills = settings().kills;
    let mut fates = Vec::new();
    let pace = MeasuredDurations::measure(deployment, &mut fates);
    let crowded = deployment.another_machine(0);
    let machines: Vec<Machine> = (1..=LANES)
        .map(|lane| deployment.another_machine(lane))
        .collect();
    let lane = |lane: usize| {
        let mut kill_lane = KillLane {
            deployment,
            pace,
            own: &machines[lane],
            crowded: &crowded,
            store: Store::open(&deployment.location()).unwrap(),
            random: RandomNumbers::new(salt << 8 | lane as u64),
            tally: KillResults::default(),
        };
        for turn in (lane..kills).step_by(LANES) {
            kill_lane.throw(turn);
        }
        kill_lane.tally
    };
    let tallies: Vec<KillResults> = std::thread::scope(|scope| {
        let lane = &lane;
        let lanes: Vec<_> = (0..LANES)
            .map(|number| scope.spawn(move || lane(number)))
            .collect();
        lanes.into_iter().map(|lane| lane.join().unwrap()).collect()
    });
    let mut landed = BTreeMap::new();
    let mut recoveries_killed = 0;
    for tally in tallies {
        tally
            .landed
            .into_iter()
            .for_each(|(at, n)| *landed.entry(at).or_default() += n);
        recoveries_killed += tally.recoveries_killed;
        fates.extend(tally.fates);
    }
    report(&format!(
        "{}: {kills} kills landed {landed:?}; {recoveries_killed} recoveries killed",
        deployment.stem
    ));
    for machine in machines.iter().chain([&crowded]) {
        finish(deployment.recovery(machine, Recovery::Gc, "")).good();
        deployment.check_disk(machine);
    }
    deployment.check_for_good(&fates, Recovery::Gc);
    assert_spread(&landed, kills);
}

/// A storm that never struck where it matters shows nothing.
fn assert_spread(landed: &BTreeMap<KillMoment, usize>, kills: usize) {
    let of = |at: &[KillMoment]| -> usize { at.iter().filter_map(|at| landed.get(at)).sum() };
    let early = of(&[KillMoment::BeforeTheClaim, KillMoment::Claimed]);
    let running = of(&[KillMoment::Begun, KillMoment::Running]);
    let between = of(&[KillMoment::Ended, KillMoment::Moving]);
    // With few kills chance may have it so.
    let enough = kills < 100 || early.min(running).min(between) > 0;
    assert!(
        enough,
        "{early} early, {running} while running, {between} between end and commit"
    );
}

struct KillLane<'a> {
    deployment: &'a TestDeployment,
    pace: MeasuredDurations,
    own: &'a Machine,
    crowded: &'a Machine,
    store: Store,
    random: RandomNumbers,
    tally: KillResults,
}

impl KillLane<'_> {
    /// One runner is killed; then, as the dice will, somebody recovers at once, is killed at that, or the next runner
    /// finds what is left.
    fn throw(&mut self, turn: usize) {
        let id = self.deployment.id(&turn.to_string());
        let is_crowded = (turn / LANES).is_multiple_of(CROWDED_EVERY);
        let machine = if is_crowded { self.crowded } else { self.own };
        self.kill_one(machine, &id);
        let (landed, fate) = match is_crowded {
            true => (KillMoment::Unseen, ExpectedState::OneOfThem),
            false => self.look(machine, &id),
        };
        *self.tally.landed.entry(landed).or_default() += 1;
        self.tally.fates.push((id.clone(), fate));
        match self.random.below(3) {
            0 => {}
            1 => drop(finish(self.deployment.recovery(machine, Recovery::Gc, &id))),
            _ => self.kill_recovery(machine, &id),
        }
    }

    fn kill_one(&mut self, machine: &Machine, id: &str) {
        let mut live = RunningCommand::start(self.deployment.program(machine, id));
        // Not to wait for anything: to strike at different moments. Every second one at the end, where most is to lose.
        let at_the_end = self.random.below(2) == 0;
        let pause = match at_the_end {
            true => {
                live.wait_for("last");
                self.random.moment(self.pace.ending * 3 / 2)
            }
            false => self.random.moment(self.pace.run * 3 / 2),
        };
        // Not to wait for anything: to strike at different moments.
        std::thread::sleep(pause);
        live.signal(Signal::KILL);
        let status = live.child.wait().unwrap();
        let killed = status.signal() == Some(Signal::KILL.as_raw());
        assert!(killed || status.code() == Some(0), "{id}: {status}");
        let pace = match at_the_end {
            true => &mut self.pace.ending,
            false => &mut self.pace.run,
        };
        pace_by(pace, killed);
        eventually("it and its program are dead", || {
            processes_with(id).is_empty() && is_unlocked(&machine.run_dir(id))
        });
    }

    fn kill_recovery(&mut self, machine: &Machine, id: &str) {
        let mut live = RunningCommand::start(self.deployment.recovery(machine, Recovery::Gc, id));
        // Not to wait for anything: to strike at different moments.
        std::thread::sleep(self.random.moment(self.pace.gc + self.pace.ending));
        live.signal(Signal::KILL);
        let status = live.child.wait().unwrap();
        self.tally.recoveries_killed += usize::from(status.signal().is_some());
    }

    /// Nobody else works in this home, so what is there is what the runner left.
    fn look(&mut self, machine: &Machine, id: &str) -> (KillMoment, ExpectedState) {
        let dir = machine.run_dir(id);
        let has = |name: &str| dir.join(name).exists();
        let known = self.store.attempts(id).unwrap();
        let workspace = machine.workspace(id);
        let Some(attempt) = known.first() else {
            let landed = match has("run.json") {
                true => KillMoment::Claimed,
                false => KillMoment::BeforeTheClaim,
            };
            // The server goes on with what a dead client had asked for.
            return match self.deployment.database {
                Database::Postgres { .. } if landed == KillMoment::Claimed => {
                    (landed, ExpectedState::PerhapsUnknown)
                }
                _ => (landed, ExpectedState::Unknown),
            };
        };
        match (attempt.state.is_final(), has("outcome.json")) {
            (true, true) => (KillMoment::Committed, ExpectedState::Whole),
            (true, false) => (KillMoment::Finished, ExpectedState::Whole),
            (false, true) if has("manifest.json") => (KillMoment::Moving, ExpectedState::Whole),
            (false, true) => (KillMoment::Ended, ExpectedState::Whole),
            (false, false) => {
                let left = expected_state::left_in(&workspace, id);
                let landed = if workspace.exists() {
                    KillMoment::Running
                } else {
                    KillMoment::Begun
                };
                (landed, ExpectedState::Lost(left))
            }
        }
    }
}
