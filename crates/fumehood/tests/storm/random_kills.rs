//! The trials kill runners, and the commands that recover from such a kill, at random instants. In the end every accepted
//! analysis is in exactly one final state, and nothing is lost, doubled or left over.

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

/// How many runners run at the same time.
const LANES: usize = 3;
/// One kill in this many happens in a home that all lanes share. There each runner also recovers the attempts of the
/// others.
const SHARED_HOME_EVERY: usize = 5;

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

/// Durations that were measured on this machine at the start of the trial, and adapted since.
#[derive(Clone, Copy)]
struct MeasuredDurations {
    run: Duration,
    /// From the program's last output to the runner's end.
    ending: Duration,
    gc: Duration,
}

impl MeasuredDurations {
    fn measure(
        deployment: &TestDeployment,
        expected_states: &mut Vec<(String, ExpectedState)>,
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
            expected_states.push((id, ExpectedState::Whole));
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

/// Adapts a measured duration to the machine's current load, so that about one kill in four comes too late.
fn adapt(duration: &mut Duration, in_time: bool) {
    *duration = match in_time {
        true => *duration * 21 / 20,
        false => *duration * 17 / 20,
    };
}

/// How far an analysis had come when its runner was killed, judged by the files that the runner left.
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
    /// Unknown: in the shared home another runner may have recovered the attempt before the trial could look.
    Unseen,
}

#[derive(Default)]
struct KillResults {
    moments: BTreeMap<KillMoment, usize>,
    recoveries_killed: usize,
    expected_states: Vec<(String, ExpectedState)>,
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
    let mut expected_states = Vec::new();
    let durations = MeasuredDurations::measure(deployment, &mut expected_states);
    let shared_home = deployment.another_machine(0);
    let machines: Vec<Machine> = (1..=LANES)
        .map(|lane| deployment.another_machine(lane))
        .collect();
    let lane = |lane: usize| {
        let mut kill_lane = KillLane {
            deployment,
            durations,
            own: &machines[lane],
            shared_home: &shared_home,
            store: Store::open(&deployment.location()).unwrap(),
            random: RandomNumbers::new(salt << 8 | lane as u64),
            results: KillResults::default(),
        };
        for turn in (lane..kills).step_by(LANES) {
            kill_lane.kill_one_runner(turn);
        }
        kill_lane.results
    };
    let all_results: Vec<KillResults> = std::thread::scope(|scope| {
        let lane = &lane;
        let lanes: Vec<_> = (0..LANES)
            .map(|number| scope.spawn(move || lane(number)))
            .collect();
        lanes.into_iter().map(|lane| lane.join().unwrap()).collect()
    });
    let mut moments = BTreeMap::new();
    let mut recoveries_killed = 0;
    for results in all_results {
        results
            .moments
            .into_iter()
            .for_each(|(at, n)| *moments.entry(at).or_default() += n);
        recoveries_killed += results.recoveries_killed;
        expected_states.extend(results.expected_states);
    }
    report(&format!(
        "{}: {kills} kills landed {moments:?}; {recoveries_killed} recoveries killed",
        deployment.stem
    ));
    for machine in machines.iter().chain([&shared_home]) {
        finish(deployment.recovery(machine, Recovery::Gc, "")).good();
        deployment.check_disk(machine);
    }
    deployment.check_for_good(&expected_states, Recovery::Gc);
    assert_spread(&moments, kills);
}

/// Fails if no kill hit one of the moments that matter, because the trial would then prove nothing.
fn assert_spread(moments: &BTreeMap<KillMoment, usize>, kills: usize) {
    let of = |at: &[KillMoment]| -> usize { at.iter().filter_map(|at| moments.get(at)).sum() };
    let early = of(&[KillMoment::BeforeTheClaim, KillMoment::Claimed]);
    let running = of(&[KillMoment::Begun, KillMoment::Running]);
    let between = of(&[KillMoment::Ended, KillMoment::Moving]);
    // With few kills this can happen by chance.
    let enough = kills < 100 || early.min(running).min(between) > 0;
    assert!(
        enough,
        "{early} early, {running} while running, {between} between end and commit"
    );
}

struct KillLane<'a> {
    deployment: &'a TestDeployment,
    durations: MeasuredDurations,
    own: &'a Machine,
    shared_home: &'a Machine,
    store: Store,
    random: RandomNumbers,
    results: KillResults,
}

impl KillLane<'_> {
    /// Kills one runner. Then, chosen at random, a recovery runs at once, a recovery runs and is killed too, or the next runner
    /// recovers the attempt.
    fn kill_one_runner(&mut self, turn: usize) {
        let id = self.deployment.id(&turn.to_string());
        let in_shared_home = (turn / LANES).is_multiple_of(SHARED_HOME_EVERY);
        let machine = if in_shared_home {
            self.shared_home
        } else {
            self.own
        };
        self.kill_one(machine, &id);
        let (moment, expected_state) = match in_shared_home {
            true => (KillMoment::Unseen, ExpectedState::OneOfThem),
            false => self.look(machine, &id),
        };
        *self.results.moments.entry(moment).or_default() += 1;
        self.results
            .expected_states
            .push((id.clone(), expected_state));
        match self.random.below(3) {
            0 => {}
            1 => drop(finish(self.deployment.recovery(machine, Recovery::Gc, &id))),
            _ => self.kill_recovery(machine, &id),
        }
    }

    fn kill_one(&mut self, machine: &Machine, id: &str) {
        let mut live = RunningCommand::start(self.deployment.program(machine, id));
        // Every second kill hits the end of the run, where most can be lost.
        let at_the_end = self.random.below(2) == 0;
        let pause = match at_the_end {
            true => {
                live.wait_for("last");
                self.random.moment(self.durations.ending * 3 / 2)
            }
            false => self.random.moment(self.durations.run * 3 / 2),
        };
        // This sleep waits for no event. It varies the moment of the interruption.
        std::thread::sleep(pause);
        live.signal(Signal::KILL);
        let status = live.child.wait().unwrap();
        let killed = status.signal() == Some(Signal::KILL.as_raw());
        assert!(killed || status.code() == Some(0), "{id}: {status}");
        let duration = match at_the_end {
            true => &mut self.durations.ending,
            false => &mut self.durations.run,
        };
        adapt(duration, killed);
        eventually("it and its program are dead", || {
            processes_with(id).is_empty() && is_unlocked(&machine.run_dir(id))
        });
    }

    fn kill_recovery(&mut self, machine: &Machine, id: &str) {
        let mut live = RunningCommand::start(self.deployment.recovery(machine, Recovery::Gc, id));
        // This sleep waits for no event. It varies the moment of the interruption.
        std::thread::sleep(
            self.random
                .moment(self.durations.gc + self.durations.ending),
        );
        live.signal(Signal::KILL);
        let status = live.child.wait().unwrap();
        self.results.recoveries_killed += usize::from(status.signal().is_some());
    }

    /// Judges by the files in the home. No other runner uses this home, so the killed runner left them.
    fn look(&mut self, machine: &Machine, id: &str) -> (KillMoment, ExpectedState) {
        let dir = machine.run_dir(id);
        let has = |name: &str| dir.join(name).exists();
        let known = self.store.attempts(id).unwrap();
        let workspace = machine.workspace(id);
        let Some(attempt) = known.first() else {
            let moment = match has("run.json") {
                true => KillMoment::Claimed,
                false => KillMoment::BeforeTheClaim,
            };
            // The server completes a statement whose client has died, so the database may know the analysis soon.
            return match self.deployment.database {
                Database::Postgres { .. } if moment == KillMoment::Claimed => {
                    (moment, ExpectedState::PerhapsUnknown)
                }
                _ => (moment, ExpectedState::Unknown),
            };
        };
        match (attempt.state.is_final(), has("outcome.json")) {
            (true, true) => (KillMoment::Committed, ExpectedState::Whole),
            (true, false) => (KillMoment::Finished, ExpectedState::Whole),
            (false, true) if has("manifest.json") => (KillMoment::Moving, ExpectedState::Whole),
            (false, true) => (KillMoment::Ended, ExpectedState::Whole),
            (false, false) => {
                let left = expected_state::left_in(&workspace, id);
                let moment = if workspace.exists() {
                    KillMoment::Running
                } else {
                    KillMoment::Begun
                };
                (moment, ExpectedState::Lost(left))
            }
        }
    }
}
