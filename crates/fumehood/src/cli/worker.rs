//! `fumehood worker`: takes analyses from the queue and starts a runner for each.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use engine::attempt::error::CommitError;
use engine::attempt::record::Status;
use engine::home::Home;
use engine::worker::{self, Worker, WorkerEvent, WorkerOptions};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, setrlimit};
use sandbox::events::{self, PollFlags, SignalQueue};
use store::types::units::{format_cpus, format_size, parse_cpus, parse_duration_ms, parse_size};
use store::{Capacity, FaultKind};

use super::args::StoreArgs;
use super::print::format_count;
use super::sd_notify::Notifier;
use super::{attempt_text, messages, record_access};
use engine::settings::{self, RecordSettings, Sources};

const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;
const SIGCHLD: i32 = 17;

const SLOT_MEMORY_MAX_BYTES: u64 = 4 << 30;
const SLOT_MEMORY_MIN_BYTES: u64 = 16 << 20;
const SLOTS_MAX: u32 = 4096;

/// Take analyses from the queue and run each in a process of its own, its runner.
///
/// Running analyses never exceed what the worker was given: its slots, and the sums of the memory and the CPUs that
/// they ask for. If a worker is killed or restarted, its runners go on, and the worker takes them over when it comes
/// back. SIGTERM drains it: it takes no more work, waits for its runners, and ends. SIGINT, or a second SIGTERM, ends
/// it at once; the runners finish and commit by themselves.
#[derive(Clone, Debug, clap::Args)]
pub struct WorkerArgs {
    /// How many analyses run at once, at most 4096 [default: the CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(SLOTS_MAX)))]
    pub slots: Option<u32>,

    /// Memory for all of them together. An analysis that asks for none gets, and counts as, its slot's share, at most
    /// 4G [default: four fifths of what this host or cgroup may use]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<OsString>,

    /// CPUs for all of them together. An analysis that asks for none may use them all, and counts as none [default:
    /// those this process may run on]
    #[arg(long, value_name = "N")]
    pub cpus: Option<OsString>,

    /// The worker's name, by which a restarted worker finds its runners; two workers of one name cannot run in one home
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub name: String,

    /// Take no more work: make the worker of this name drain, wait for what it runs, and finish what is left
    #[arg(long)]
    pub drain: bool,

    /// End when nothing is queued and nothing runs
    #[arg(long, conflicts_with = "drain")]
    pub until_idle: bool,

    /// How long a runner's lease on its attempt lasts without renewal, from 5s to 1h; a runner that cannot reach a
    /// PostgreSQL database ends its analysis before that
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub lease: OsString,

    /// How long an analysis that is larger than every worker waits for a larger worker before it ends as an error
    #[arg(long, value_name = "TIME", default_value = "10m")]
    pub park_after: OsString,

    /// Print only problems
    #[arg(long, short)]
    pub quiet: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

pub fn worker(args: &WorkerArgs) -> anyhow::Result<u8> {
    let settings =
        settings::record_settings(args.store.given_settings(), &Sources::from_process()?)?;
    let options = options(args, &settings)?;
    raise_file_limit();
    let signals = SignalQueue::block(&[SIGINT, SIGTERM, SIGCHLD]).context("listen for signals")?;
    let notifier = Notifier::from_env()?;
    let (home, mut recorder) = record_access::open(&args.store)?;
    // Report a wrong database before doing anything else. Wait for a database that is away.
    match recorder.store() {
        Err(CommitError::Database { source, .. })
            if source.fault_kind() == FaultKind::Unreachable => {}
        opened => drop(opened?),
    }
    if args.drain {
        ask_to_drain(&home, &args.name)?;
    }
    let given = format!(
        "{}, {} memory, {} CPUs",
        format_count(options.slots.into(), "slot", "slots"),
        format_size(options.total.memory_bytes),
        format_cpus(options.total.cpu_milli)
    );
    let mut worker = Worker::open(home, recorder, options)?;
    let mut session = WorkerSession {
        args,
        draining: false,
        leaving: false,
    };
    if args.drain {
        worker.drain();
        session.draining = true;
    }
    match worker.live_runners() {
        0 => session.print(&format!("worker {} is ready: {given}", args.name)),
        n => session.print(&format!(
            "worker {} is ready: {given}; {} from before",
            args.name,
            format_count(n as u64, "analysis runs on", "analyses run on")
        )),
    }
    notifier.ready(&status(&worker, false))?;
    loop {
        let wait = worker.run_once(&mut |news| session.print_event(&news))?;
        notifier.watchdog();
        notifier.status(&status(&worker, session.draining));
        let idle = args.until_idle && worker.is_idle();
        if session.leaving || idle || session.draining && worker.has_no_work_left() {
            break;
        }
        let beat = notifier.watchdog_interval().unwrap_or(Duration::MAX);
        let mut fds = worker.wake_fds();
        fds.push(signals.as_fd());
        let wake = fds.into_iter().map(|fd| ((), fd, PollFlags::IN));
        // A failed wait counts as woken.
        let _ = events::wait_for_any(wake, wait.min(beat));
        while let Some(signal) = signals.take() {
            session.handle_signal(signal, &mut worker);
        }
    }
    notifier.stopping(&status(&worker, session.draining));
    if worker.live_runners() > 0 {
        session.print(&format!(
            "left {} running; they commit by themselves",
            format_count(worker.live_runners() as u64, "analysis", "analyses")
        ));
    }
    worker.deregister();
    Ok(0)
}

/// Raises the limit of open files: every free slot holds a locked file. If the limit cannot be raised, opening a slot
/// reports that.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    let _ = setrlimit(Resource::Nofile, raised);
}

fn status(worker: &Worker, draining: bool) -> String {
    let draining = if draining { ", draining" } else { "" };
    format!(
        "{} of {} slots busy{draining}",
        worker.busy_slots(),
        worker.slots()
    )
}

fn options(args: &WorkerArgs, settings: &RecordSettings) -> anyhow::Result<WorkerOptions> {
    let cpus = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let number = |given: &Option<OsString>, parse: &dyn Fn(&str) -> anyhow::Result<u64>| {
        let text = given.as_ref().map(|text| text.to_string_lossy());
        text.map(|text| parse(&text)).transpose()
    };
    let memory = number(&args.memory, &|text| {
        parse_size(text).context("read --memory")
    })?;
    let cpu_milli = number(&args.cpus, &|text| parse_cpus(text).context("read --cpus"))?;
    let usable = sandbox::cgroup::memory_available_bytes();
    let slots = args
        .slots
        .unwrap_or(u32::try_from(cpus).unwrap_or(1))
        .min(SLOTS_MAX);
    let total = Capacity {
        memory_bytes: memory.unwrap_or(usable / 5 * 4),
        cpu_milli: cpu_milli.unwrap_or(cpus * 1000),
    };
    let time = |given: &OsString, what: &'static str| {
        parse_duration_ms(&given.to_string_lossy()).context(what)
    };
    let lease_ms = time(&args.lease, "read --lease")?;
    anyhow::ensure!(
        (5_000..=3_600_000).contains(&lease_ms),
        "--lease must be from 5s to 1h"
    );
    let share = total.memory_bytes / u64::from(slots);
    anyhow::ensure!(
        share >= SLOT_MEMORY_MIN_BYTES,
        "--memory is {}, which leaves each of {slots} slots less than 16M; raise it, or give fewer --slots",
        format_size(total.memory_bytes)
    );
    let mut runner: Vec<OsString> = vec![super::RUNNER.into()];
    // Hand on what these options meant here: a relative path means another file in a runner's working directory.
    if let (Some(_), Some(db)) = (&args.store.db, &settings.db) {
        runner.extend(["--db".into(), (&db.text).into()]);
    }
    if let (Some(_), Some(artifacts)) = (&args.store.artifacts, &settings.artifacts) {
        runner.extend(["--artifacts".into(), artifacts.into()]);
    }
    Ok(WorkerOptions {
        name: args.name.clone(),
        slots,
        total,
        memory_default_bytes: share.min(SLOT_MEMORY_MAX_BYTES),
        lease_ms,
        park_after_ms: time(&args.park_after, "read --park-after")?,
        free_reserve_bytes: settings.free_reserve_bytes,
        store_quota_bytes: settings.store_quota_bytes,
        program: PathBuf::from("/proc/self/exe"),
        args: runner,
    })
}

/// Signals the running worker of this name to drain, and waits until it is gone.
fn ask_to_drain(home: &Home, name: &str) -> anyhow::Result<()> {
    while let Some(pid) = worker::lock_holder(home, name) {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let process =
            pid.and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok());
        // The pidfd was opened before this check. If the name is still held, the pid was the holder's.
        let Some(process) = process.filter(|_| worker::lock_holder(home, name).is_some()) else {
            continue;
        };
        rustix::process::pidfd_send_signal(&process, Signal::TERM)
            .context("ask the running worker to drain")?;
        messages::line(&format!(
            "the worker {name} is told to drain; waiting for it"
        ));
        while !events::wait_for(&process, PollFlags::IN, Duration::MAX) {}
    }
    Ok(())
}

struct WorkerSession<'a> {
    args: &'a WorkerArgs,
    draining: bool,
    leaving: bool,
}

impl WorkerSession<'_> {
    fn print(&self, text: &str) {
        if !self.args.quiet {
            messages::line(text);
        }
    }

    fn handle_signal(&mut self, signal: i32, worker: &mut Worker) {
        match signal {
            SIGTERM if !self.draining => {
                self.draining = true;
                worker.drain();
                let n = worker.busy_slots();
                self.print(&format!(
                    "draining: no more work is taken, and {} waited for; once more to leave at once",
                    format_count(n as u64, "analysis is", "analyses are")
                ));
            }
            SIGTERM | SIGINT => self.leaving = true,
            // A runner has ended; the next turn of the loop sees that.
            _ => {}
        }
    }

    fn print_event(&self, news: &WorkerEvent) {
        let name = attempt_text::attempt_name;
        match news {
            WorkerEvent::Claimed { id, attempt } => {
                self.print(&format!("took {}", name(id, *attempt)))
            }
            WorkerEvent::RunnerEnded { .. } => {}
            WorkerEvent::Recovered {
                id,
                attempt,
                status,
            } => {
                let how = match status {
                    Status::Error => "lost its runner",
                    _ => "was left by its runner, and is committed",
                };
                self.print(&format!("{} {how}", name(id, *attempt)));
            }
            WorkerEvent::GivenUp { id, attempt } => {
                self.print(&format!(
                    "gave up {}: its runner is lost",
                    name(id, *attempt)
                ));
            }
            WorkerEvent::Parked { id } => {
                self.print(&format!("parked {id}: no worker is large enough for it"));
            }
            WorkerEvent::DatabaseUnavailable(why) => messages::line(&format!(
                "the database cannot be used for now; what runs goes on: {why}"
            )),
            WorkerEvent::DatabaseAvailable => self.print("the database is back"),
            WorkerEvent::Problem(what) => messages::line(what),
        }
    }
}
