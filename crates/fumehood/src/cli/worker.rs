//! `fumehood worker`.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use engine::attempt::error::CommitError;
use engine::attempt::record::Status;
use engine::home::Home;
use engine::worker::{self, Worker, WorkerEvent, WorkerOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, setrlimit};
use store::types::units::{format_cpus, format_size, parse_cpus, parse_duration_ms, parse_size};
use store::{Capacity, FaultKind};

use super::args::StoreArgs;
use super::notify::Notifier;
use super::print::counted;
use super::{ledger, show};
use crate::config::{self, RecordSettings, Sources};

const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;
const SIGCHLD: i32 = 17;

const MEMORY_MAX_BYTES: u64 = 4 << 30;
const MEMORY_LEAST_BYTES: u64 = 16 << 20;
const SLOTS_MAX: u32 = 4096;

/// Take analyses from the queue and run each in a process of its own, its runner.
///
/// What runs never exceeds what the worker was given: slots, and the sums of the memory and the CPUs that the analyses ask
/// for. A worker that is killed or restarted leaves its runners running, and takes them up again when it comes back.
/// SIGTERM drains it: it takes no more work, waits for its runners, and ends. SIGINT, or a second SIGTERM, ends it at once;
/// the runners finish and commit by themselves.
#[derive(Clone, Debug, clap::Args)]
pub struct WorkerArgs {
    /// How many analyses run at once, at most 4096 [default: the CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(SLOTS_MAX)))]
    pub slots: Option<u32>,

    /// Memory for all of them together. One that asks for none counts as, and gets, its slot's share, at most 4G
    /// [default: four fifths of what this host or cgroup may use]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<OsString>,

    /// CPUs for all of them together. One that asks for none may use them all, and counts as none
    /// [default: those this process may run on]
    #[arg(long, value_name = "N")]
    pub cpus: Option<OsString>,

    /// The worker's name, by which a restarted one finds its runners; two with one name cannot run in one home
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub name: String,

    /// Take no more work: have the worker of this name drain, wait for what it runs, and finish what is left
    #[arg(long)]
    pub drain: bool,

    /// End when nothing is queued and nothing runs
    #[arg(long, conflicts_with = "drain")]
    pub until_idle: bool,

    /// How long a runner's hold on its attempt lasts without being renewed, from 5s to 1h; a runner that cannot reach a
    /// PostgreSQL database ends its analysis before that
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub lease: OsString,

    /// How long an analysis that is larger than every worker waits for a larger one before it ends as an error
    #[arg(long, value_name = "TIME", default_value = "10m")]
    pub park_after: OsString,

    /// Say nothing but what goes wrong
    #[arg(long, short)]
    pub quiet: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

pub fn worker(args: &WorkerArgs) -> anyhow::Result<u8> {
    let settings = config::record_settings(&args.store, &Sources::from_process()?)?;
    let options = options(args, &settings)?;
    raise_file_limit();
    let signals = Signals::listen()?;
    let notifier = Notifier::from_env()?;
    let (home, mut ledger) = ledger::open(&args.store)?;
    // A wrong database is told before anything is taken up; one that is away for now is waited for.
    match ledger.store() {
        Err(CommitError::Database { source, .. })
            if source.fault_kind() == FaultKind::Unreachable => {}
        opened => drop(opened?),
    }
    if args.drain {
        ask_to_drain(&home, &args.name)?;
    }
    let given = format!(
        "{}, {} memory, {} CPUs",
        counted(options.slots.into(), "slot", "slots"),
        format_size(options.total.memory_bytes),
        format_cpus(options.total.cpu_milli)
    );
    let mut worker = Worker::open(home, ledger, options)?;
    let mut duty = Duty {
        args,
        draining: false,
        leaving: false,
    };
    if args.drain {
        worker.drain();
        duty.draining = true;
    }
    match worker.live_runners() {
        0 => duty.say(&format!("worker {} is ready: {given}", args.name)),
        n => duty.say(&format!(
            "worker {} is ready: {given}; {} from before",
            args.name,
            counted(n as u64, "analysis runs on", "analyses run on")
        )),
    }
    notifier.ready(&status(&worker, false))?;
    loop {
        let wait = worker.run_once(&mut |news| duty.tell(&news))?;
        notifier.watchdog();
        notifier.status(&status(&worker, duty.draining));
        let idle = args.until_idle && worker.is_idle();
        if duty.leaving || idle || duty.draining && worker.is_drained() {
            break;
        }
        let beat = notifier.watchdog_interval().unwrap_or(Duration::MAX);
        let mut fds = worker.wake_fds();
        fds.push(signals.fd.as_fd());
        sleep_until_woken(&fds, wait.min(beat));
        while let Some(signal) = signals.next() {
            duty.hear(signal, &mut worker);
        }
    }
    notifier.stopping(&status(&worker, duty.draining));
    if worker.live_runners() > 0 {
        duty.say(&format!(
            "left {} running; they commit by themselves",
            counted(worker.live_runners() as u64, "analysis", "analyses")
        ));
    }
    worker.deregister();
    Ok(0)
}

/// Every free slot is a locked file. What cannot be raised is told when a slot cannot be opened.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    let _as_it_was = setrlimit(Resource::Nofile, raised);
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
        share >= MEMORY_LEAST_BYTES,
        "--memory is {}, which leaves each of {slots} slots less than 16M; raise it, or give fewer --slots",
        format_size(total.memory_bytes)
    );
    let mut runner: Vec<OsString> = vec![super::RUNNER.into()];
    for (flag, value) in [
        ("--db", &args.store.db),
        ("--artifacts", &args.store.artifacts),
    ] {
        if let Some(value) = value {
            runner.extend([OsString::from(flag), absolute(flag, value)?]);
        }
    }
    Ok(WorkerOptions {
        name: args.name.clone(),
        slots,
        total,
        memory_default_bytes: share.min(MEMORY_MAX_BYTES),
        lease_ms,
        park_after_ms: time(&args.park_after, "read --park-after")?,
        free_reserve_bytes: settings.free_reserve_bytes,
        store_quota_bytes: settings.store_quota_bytes,
        program: PathBuf::from("/proc/self/exe"),
        args: runner,
    })
}

/// Runners work elsewhere, and must find the same files.
fn absolute(flag: &str, value: &OsString) -> anyhow::Result<OsString> {
    let here = || std::env::current_dir().context("find the current directory");
    let text = value.to_string_lossy();
    Ok(match (flag, text.strip_prefix("sqlite:")) {
        ("--db", Some(path)) if !path.starts_with('/') => {
            let mut whole = OsString::from("sqlite:");
            whole.push(here()?.join(path));
            whole
        }
        ("--db", _) => value.clone(),
        _ => here()?.join(value).into_os_string(),
    })
}

/// The running worker of this name is told, and its place taken once it is gone.
fn ask_to_drain(home: &Home, name: &str) -> anyhow::Result<()> {
    while let Some(pid) = worker::lock_holder(home, name) {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let process =
            pid.and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok());
        // The descriptor was had before: if the name is still held, the number was its holder's.
        let Some(process) = process.filter(|_| worker::lock_holder(home, name).is_some()) else {
            continue;
        };
        rustix::process::pidfd_send_signal(&process, Signal::TERM)
            .context("ask the running worker to drain")?;
        show::line(&format!(
            "the worker {name} is told to drain; waiting for it"
        ));
        let mut fds = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
        while poll(&mut fds, None).is_err() {}
    }
    Ok(())
}

struct Duty<'a> {
    args: &'a WorkerArgs,
    draining: bool,
    leaving: bool,
}

impl Duty<'_> {
    fn say(&self, text: &str) {
        if !self.args.quiet {
            show::line(text);
        }
    }

    fn hear(&mut self, signal: i32, worker: &mut Worker) {
        match signal {
            SIGTERM if !self.draining => {
                self.draining = true;
                worker.drain();
                let n = worker.busy_slots();
                self.say(&format!(
                    "draining: no more work is taken, and {} waited for; once more to leave at once",
                    counted(n as u64, "analysis is", "analyses are")
                ));
            }
            SIGTERM | SIGINT => self.leaving = true,
            // A runner has ended, which the next turn sees.
            _ => {}
        }
    }

    fn tell(&self, news: &WorkerEvent) {
        let name = |id: &str, attempt: u32| match attempt {
            1 => id.to_owned(),
            n => format!("{id}@{n}"),
        };
        match news {
            WorkerEvent::Claimed { id, attempt } => {
                self.say(&format!("took {}", name(id, *attempt)))
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
                self.say(&format!("{} {how}", name(id, *attempt)));
            }
            WorkerEvent::GivenUp { id, attempt } => {
                self.say(&format!(
                    "gave up {}: its runner is lost",
                    name(id, *attempt)
                ));
            }
            WorkerEvent::Parked { id } => {
                self.say(&format!("parked {id}: no worker is large enough for it"));
            }
            WorkerEvent::DatabaseUnavailable(why) => show::line(&format!(
                "the database cannot be used for now; what runs goes on: {why}"
            )),
            WorkerEvent::DatabaseAvailable => self.say("the database is back"),
            WorkerEvent::Problem(what) => show::line(what),
        }
    }
}

struct Signals {
    fd: OwnedFd,
}

impl Signals {
    fn listen() -> anyhow::Result<Signals> {
        let wanted = [SIGINT, SIGTERM, SIGCHLD];
        sandbox::block_signals(Some(&wanted)).context("block signals")?;
        let fd = sandbox::signal_fd(&wanted).context("listen for signals")?;
        Ok(Signals { fd })
    }

    fn next(&self) -> Option<i32> {
        sandbox::read_signal(self.fd.as_fd())
    }
}

fn sleep_until_woken(fds: &[BorrowedFd<'_>], at_most: Duration) {
    let mut fds: Vec<PollFd<'_>> = fds
        .iter()
        .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
        .collect();
    let timeout = Timespec {
        tv_sec: i64::try_from(at_most.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: at_most.subsec_nanos().into(),
    };
    let _interrupted_is_woken = poll(&mut fds, Some(&timeout));
}
