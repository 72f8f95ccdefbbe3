//! Runners are killed at random instants, and so are those who recover from it. In the end every analysis that was
//! accepted is in exactly one final state, and nothing is lost, doubled or left.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use store::Store;

use crate::bench::{Bench, Database, Place, Recovery, is_unlocked};
use crate::lab::{Live, eventually, finish, processes_with};
use crate::model::{self, Fate};
use crate::{Entry, For, say, wishes};

pub const TRIALS: &[Entry] = &[
    ("runners_killed_on_sqlite", For::Everyone, || {
        storm(&Bench::sqlite("storm"), 1)
    }),
    ("runners_killed_on_postgres", For::Everyone, || {
        storm(&Bench::postgres("storm"), 2)
    }),
];

/// Runners at the same time.
const LANES: usize = 3;
/// Of how many kills one is in a home that several runners share, where each also recovers the others.
const CROWDED_EVERY: usize = 5;

/// Numbers that look random and are the same for the same seed.
pub struct Dice(u64);

impl Dice {
    pub fn new(salt: u64) -> Dice {
        let mut dice = Dice(wishes().seed ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        dice.below(2);
        dice
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
struct Pace {
    run: Duration,
    /// From the program's last word to the runner's end.
    ending: Duration,
    gc: Duration,
}

impl Pace {
    fn measure(bench: &Bench, fates: &mut Vec<(String, Fate)>) -> Pace {
        let (mut run, mut ending) = (Duration::MAX, Duration::MAX);
        for turn in 0..3 {
            let id = bench.id(&format!("pace-{turn}"));
            let began = Instant::now();
            let mut live = Live::start(bench.program(&bench.place, &id));
            live.wait_for("last");
            let last = Instant::now();
            live.end().good();
            run = run.min(began.elapsed());
            ending = ending.min(last.elapsed());
            fates.push((id, Fate::Whole));
        }
        let began = Instant::now();
        bench.recover(Recovery::Gc, "");
        Pace {
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
enum Landed {
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
struct Tally {
    landed: BTreeMap<Landed, usize>,
    recoveries_killed: usize,
    fates: Vec<(String, Fate)>,
}

fn storm(bench: &Bench, salt: u64) {
    let kills = wishes().kills;
    let mut fates = Vec::new();
    let pace = Pace::measure(bench, &mut fates);
    let crowded = bench.another_place(0);
    let places: Vec<Place> = (1..=LANES).map(|lane| bench.another_place(lane)).collect();
    let lane = |lane: usize| {
        let mut thrower = Thrower {
            bench,
            pace,
            own: &places[lane],
            crowded: &crowded,
            store: Store::open(&bench.location()).unwrap(),
            dice: Dice::new(salt << 8 | lane as u64),
            tally: Tally::default(),
        };
        for turn in (lane..kills).step_by(LANES) {
            thrower.throw(turn);
        }
        thrower.tally
    };
    let tallies: Vec<Tally> = std::thread::scope(|scope| {
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
    say(&format!(
        "{}: {kills} kills landed {landed:?}; {recoveries_killed} recoveries killed",
        bench.stem
    ));
    for place in places.iter().chain([&crowded]) {
        finish(bench.recovery(place, Recovery::Gc, "")).good();
        bench.check_disk(place);
    }
    bench.check_for_good(&fates, Recovery::Gc);
    assert_spread(&landed, kills);
}

/// A storm that never struck where it matters shows nothing.
fn assert_spread(landed: &BTreeMap<Landed, usize>, kills: usize) {
    let of = |at: &[Landed]| -> usize { at.iter().filter_map(|at| landed.get(at)).sum() };
    let early = of(&[Landed::BeforeTheClaim, Landed::Claimed]);
    let running = of(&[Landed::Begun, Landed::Running]);
    let between = of(&[Landed::Ended, Landed::Moving]);
    // With few kills chance may have it so.
    let enough = kills < 100 || early.min(running).min(between) > 0;
    assert!(
        enough,
        "{early} early, {running} while running, {between} between end and commit"
    );
}

struct Thrower<'a> {
    bench: &'a Bench,
    pace: Pace,
    own: &'a Place,
    crowded: &'a Place,
    store: Store,
    dice: Dice,
    tally: Tally,
}

impl Thrower<'_> {
    /// One runner is killed; then, as the dice will, somebody recovers at once, is killed at that, or the next runner
    /// finds what is left.
    fn throw(&mut self, turn: usize) {
        let id = self.bench.id(&turn.to_string());
        let is_crowded = (turn / LANES).is_multiple_of(CROWDED_EVERY);
        let place = if is_crowded { self.crowded } else { self.own };
        self.kill_one(place, &id);
        let (landed, fate) = match is_crowded {
            true => (Landed::Unseen, Fate::OneOfThem),
            false => self.look(place, &id),
        };
        *self.tally.landed.entry(landed).or_default() += 1;
        self.tally.fates.push((id.clone(), fate));
        match self.dice.below(3) {
            0 => {}
            1 => drop(finish(self.bench.recovery(place, Recovery::Gc, &id))),
            _ => self.kill_recovery(place, &id),
        }
    }

    fn kill_one(&mut self, place: &Place, id: &str) {
        let mut live = Live::start(self.bench.program(place, id));
        // Not to wait for anything: to strike at different moments. Every second one at the end, where most is to lose.
        let at_the_end = self.dice.below(2) == 0;
        let pause = match at_the_end {
            true => {
                live.wait_for("last");
                self.dice.moment(self.pace.ending * 3 / 2)
            }
            false => self.dice.moment(self.pace.run * 3 / 2),
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
            processes_with(id).is_empty() && is_unlocked(&place.run_dir(id))
        });
    }

    fn kill_recovery(&mut self, place: &Place, id: &str) {
        let mut live = Live::start(self.bench.recovery(place, Recovery::Gc, id));
        // Not to wait for anything: to strike at different moments.
        std::thread::sleep(self.dice.moment(self.pace.gc + self.pace.ending));
        live.signal(Signal::KILL);
        let status = live.child.wait().unwrap();
        self.tally.recoveries_killed += usize::from(status.signal().is_some());
    }

    /// Nobody else works in this home, so what is there is what the runner left.
    fn look(&mut self, place: &Place, id: &str) -> (Landed, Fate) {
        let dir = place.run_dir(id);
        let has = |name: &str| dir.join(name).exists();
        let known = self.store.attempts(id).unwrap();
        let workspace = place.workspace(id);
        let Some(attempt) = known.first() else {
            let landed = match has("run.json") {
                true => Landed::Claimed,
                false => Landed::BeforeTheClaim,
            };
            // The server goes on with what a dead client had asked for.
            return match self.bench.database {
                Database::Postgres { .. } if landed == Landed::Claimed => {
                    (landed, Fate::PerhapsUnknown)
                }
                _ => (landed, Fate::Unknown),
            };
        };
        match (attempt.state.is_final(), has("outcome.json")) {
            (true, true) => (Landed::Committed, Fate::Whole),
            (true, false) => (Landed::Finished, Fate::Whole),
            (false, true) if has("manifest.json") => (Landed::Moving, Fate::Whole),
            (false, true) => (Landed::Ended, Fate::Whole),
            (false, false) => {
                let left = model::left_in(&workspace, id);
                let landed = if workspace.exists() {
                    Landed::Running
                } else {
                    Landed::Begun
                };
                (landed, Fate::Lost(left))
            }
        }
    }
}
