//! What the queue looks like on a page or a screen.

use std::collections::HashMap;

use engine::home;
use store::types::units::{format_cpus, format_size};
use store::{ActiveAttempt, AttemptSummary, QueueOverview, State, WaitingAttempt, WorkerRow};

use super::Snapshot;
use super::grid::{Grid, Ink, Line, column};
use super::usage::Used;
use crate::cli::print::Align::{Left, Right};
use crate::cli::print::{clean, counted};
use crate::cli::{list, when};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub columns: usize,
    pub rows: usize,
}

/// A worker that was not heard of for this long is taken for gone.
const SEEN_MS: i64 = 60_000;
/// Without a screen, the last ones that ended.
const ENDED_ON_PAGE: usize = 10;
/// A smaller screen has better things to show.
const ROWS_FOR_ADVICE: usize = 12;
const CELL_CHARS_MAX: usize = 40;

/// All lines; on a screen, as many as it has, each as wide as it is.
pub fn page(now: &Snapshot, screen: Option<Size>, trouble: Option<&str>) -> Vec<Line> {
    let overview = &now.overview;
    let width = screen.map(|size| size.columns);
    let mut lines = vec![bar(overview, width)];
    lines.extend(trouble.map(|text| Line::inked(clean(text), Ink::Bad)));
    let names = host_names(overview);
    let sections = [
        workers(overview),
        running(now, &names),
        queued(overview),
        ended(overview.now_ms, &now.ended),
    ];
    let sections: Vec<Section> = sections.into_iter().filter(|s| s.grid.len() > 0).collect();
    let has_room = screen.is_none_or(|size| size.rows >= ROWS_FOR_ADVICE);
    if overview.workers.is_empty() && has_room {
        lines.push(Line::default());
        let text = "no worker is running; `fumehood worker` starts one";
        lines.push(Line::inked(text, Ink::Warning));
    }
    let shares = match screen {
        // Each has a blank line and a head.
        Some(size) => {
            let heads = lines.len() + 2 * sections.len();
            let wanted: Vec<usize> = sections.iter().map(Section::wanted).collect();
            share(&wanted, size.rows.saturating_sub(heads))
        }
        None => sections
            .iter()
            .map(|section| section.wanted().min(section.on_page))
            .collect(),
    };
    for (section, rows) in sections.iter().zip(shares) {
        if rows > 0 {
            lines.push(Line::default());
            lines.extend(section.lines(width, rows));
        }
    }
    if let Some(size) = screen {
        lines.truncate(size.rows);
        lines = lines
            .into_iter()
            .map(|line| line.cut(size.columns))
            .collect();
    }
    lines
}

fn bar(overview: &QueueOverview, width: Option<usize>) -> Line {
    let live = overview
        .workers
        .iter()
        .filter(|w| is_live(w, overview.now_ms));
    let mut facts = vec![
        format!("{} running", overview.running),
        match overview.delayed {
            0 => format!("{} queued", overview.queued),
            n => format!("{} queued ({n} delayed)", overview.queued),
        },
        counted(live.count() as u64, "worker", "workers"),
    ];
    let Some(width) = width else {
        facts.push(format!("{} UTC", when::date(overview.now_ms)));
        return Line::plain(facts.join(", "));
    };
    let left = format!(" fumehood  {}", facts.join(", "));
    let right = format!("{} UTC  q quits ", when::date(overview.now_ms));
    let room = width.saturating_sub(left.chars().count());
    let text = match room > right.chars().count() {
        true => format!("{left}{right:>room$}"),
        false => format!("{left:<width$}"),
    };
    Line::inked(text, Ink::Bar)
}

/// A table, of which there may be more than was fetched.
struct Section {
    grid: Grid,
    /// Rows that there are in all.
    of: u64,
    /// How many are printed where there is no screen to fill.
    on_page: usize,
    /// Whether what is left out is worth a word.
    counted: bool,
}

impl Section {
    /// Its rows, and one more for what was not even fetched.
    fn wanted(&self) -> usize {
        let unfetched = self.counted && self.of > self.grid.len() as u64;
        self.grid.len() + usize::from(unfetched)
    }

    /// The head and so many rows; the last one counts those that are left out.
    fn lines(&self, width: Option<usize>, rows: usize) -> Vec<Line> {
        let mut lines = self.grid.lines(width);
        let whole = rows >= self.wanted() && self.of <= self.grid.len() as u64;
        // The line on top has the numbers, so a single row is better spent on the first of them.
        if whole || !self.counted || rows < 2 {
            lines.truncate(1 + rows);
            return lines;
        }
        let shown = rows.saturating_sub(1).min(self.grid.len());
        lines.truncate(1 + shown);
        let more = self.of.saturating_sub(shown as u64);
        lines.push(Line::inked(format!("… and {more} more"), Ink::Faint));
        lines
    }
}

/// Divides lines among those who want them: nobody gets more than wanted, and what one does not need others have.
fn share(wanted: &[usize], room: usize) -> Vec<usize> {
    let mut shares = vec![0; wanted.len()];
    let mut left = room;
    while left > 0 && shares != wanted {
        for (share, wanted) in shares.iter_mut().zip(wanted) {
            if *share < *wanted && left > 0 {
                *share += 1;
                left -= 1;
            }
        }
    }
    shares
}

fn plain(text: impl Into<String>) -> (String, Ink) {
    (text.into(), Ink::Plain)
}

/// Names that people chose may be long; a table must stay one.
fn short(text: &str) -> String {
    let text = clean(text);
    match text.char_indices().nth(CELL_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn is_live(worker: &WorkerRow, now_ms: i64) -> bool {
    now_ms.saturating_sub(worker.seen_ms) < SEEN_MS
}

/// Machines are told apart by an id that nobody knows by heart.
fn host_names(overview: &QueueOverview) -> HashMap<String, String> {
    let known = overview.workers.iter();
    let mut names: HashMap<String, String> = known
        .map(|worker| (worker.host.clone(), short(&worker.host_name)))
        .collect();
    let own = rustix::system::uname();
    let own = own.nodename().to_string_lossy().into_owned();
    names
        .entry(home::machine_id())
        .or_insert_with(|| short(&own));
    names
}

fn host_name(names: &HashMap<String, String>, host: &str) -> String {
    let id = || host.chars().take(8).collect::<String>();
    names.get(host).cloned().unwrap_or_else(|| short(&id()))
}

/// An attempt names its worker with its host behind an at sign.
fn is_of(busy: &ActiveAttempt, worker: &WorkerRow) -> bool {
    let name = busy.worker.as_deref().unwrap_or_default();
    let plain = name.split_once('@').map_or(name, |(plain, _)| plain);
    busy.host == worker.host && plain == worker.name
}

fn workers(overview: &QueueOverview) -> Section {
    let mut grid = Grid::new(vec![
        column("WORKER", Left, 0),
        column("HOST", Left, 3),
        column("SLOTS", Right, 0),
        column("MEMORY", Right, 1),
        column("CPUS", Right, 1),
        column("UP", Right, 4),
        column("", Left, 2),
    ]);
    for worker in &overview.workers {
        let its: Vec<&ActiveAttempt> = overview.busy.iter().filter(|b| is_of(b, worker)).collect();
        // What it last told of itself is older than what it has; but of very many not all were fetched.
        let all_fetched = overview.busy.len() as u64 == overview.running;
        let running = match all_fetched {
            true => its.len() as u64,
            false => worker.running.into(),
        };
        let memory: u64 = its.iter().filter_map(|busy| busy.memory_bytes).sum();
        let cpu: u64 = its.iter().filter_map(|busy| busy.cpu_milli).sum();
        // What asks for none counts as the worker's own default, which only the worker knows.
        let and_more = match its.iter().all(|busy| busy.memory_bytes.is_some()) {
            true => "",
            false => "+",
        };
        let (note, ink) = match (is_live(worker, overview.now_ms), worker.draining) {
            (false, _) => (
                format!(
                    "not seen for {}",
                    when::age(overview.now_ms, worker.seen_ms)
                ),
                Ink::Bad,
            ),
            (true, true) => ("draining".to_owned(), Ink::Warning),
            (true, false) => (String::new(), Ink::Plain),
        };
        grid.row([
            plain(short(&worker.name)),
            plain(short(&worker.host_name)),
            plain(format!("{running}/{}", worker.slots)),
            plain(format!(
                "{}{and_more}/{}",
                format_size(memory),
                format_size(worker.total.memory_bytes)
            )),
            plain(format!(
                "{}/{}",
                format_cpus(cpu),
                format_cpus(worker.total.cpu_milli)
            )),
            plain(when::age(overview.now_ms, worker.started_ms)),
            (note, ink),
        ]);
    }
    Section {
        of: grid.len() as u64,
        on_page: usize::MAX,
        counted: true,
        grid,
    }
}

fn running(now: &Snapshot, names: &HashMap<String, String>) -> Section {
    let overview = &now.overview;
    let mut grid = Grid::new(vec![
        column("RUNNING", Left, 0),
        column("", Left, 2),
        column("FOR", Right, 0),
        column("MEMORY", Right, 1),
        column("CPUS", Right, 1),
        column("ASKED", Left, 4),
        column("BY", Left, 3),
        column("WORKER", Left, 5),
    ]);
    for busy in &overview.busy {
        let used = now.meters.of(busy);
        let state = match (busy.cancel_asked, busy.state) {
            (true, _) => ("cancelling".to_owned(), Ink::Warning),
            (false, State::Running) => plain(""),
            (false, state) => plain(state.as_str()),
        };
        let host = host_name(names, &busy.host);
        let by_worker = busy
            .worker
            .as_deref()
            .map(|worker| match worker.contains('@') {
                true => short(worker),
                false => format!("{}@{host}", short(worker)),
            });
        grid.row([
            plain(name(&busy.id, busy.attempt)),
            state,
            plain(when::age(
                overview.now_ms,
                busy.started_ms.unwrap_or(busy.created_ms),
            )),
            plain(used.memory_bytes.map_or(String::new(), format_size)),
            plain(cpus_used(used, busy, overview.now_ms)),
            plain(asked(busy.memory_bytes, busy.cpu_milli)),
            plain(short(busy.submitter.as_deref().unwrap_or_default())),
            plain(by_worker.unwrap_or_else(|| format!("run on {host}"))),
        ]);
    }
    Section {
        of: overview.running,
        on_page: usize::MAX,
        counted: true,
        grid,
    }
}

/// Since we looked before; at the first look, on average since it began.
fn cpus_used(used: Used, busy: &ActiveAttempt, now_ms: i64) -> String {
    let average = || {
        let ran_ms = now_ms.checked_sub(busy.started_ms?)?;
        let ran_ms = u64::try_from(ran_ms).ok().filter(|ms| *ms > 0)?;
        Some(used.cpu_us? / ran_ms)
    };
    let milli = used.cpu_milli.or_else(average);
    milli.map_or(String::new(), |milli| {
        // Two digits are all that such a reading is worth.
        let hundredths = milli.div_ceil(10);
        format!("{}.{:02}", hundredths / 100, hundredths % 100)
    })
}

/// `4 GiB, 2 CPUs`; nothing where the worker's defaults hold.
fn asked(memory_bytes: Option<u64>, cpu_milli: Option<u64>) -> String {
    let memory = memory_bytes.map(format_size);
    let cpus = cpu_milli.map(|milli| match milli {
        1_000 => "1 CPU".to_owned(),
        milli => format!("{} CPUs", format_cpus(milli)),
    });
    memory
        .into_iter()
        .chain(cpus)
        .collect::<Vec<_>>()
        .join(", ")
}

fn name(id: &str, attempt: u32) -> String {
    match attempt {
        1 => clean(id),
        n => format!("{}@{n}", clean(id)),
    }
}

fn queued(overview: &QueueOverview) -> Section {
    let mut grid = Grid::new(vec![
        column("QUEUED", Left, 0),
        column("FOR", Right, 0),
        column("PRIORITY", Right, 1),
        column("ASKED", Left, 3),
        column("BY", Left, 2),
        column("", Left, 1),
    ]);
    for waiting in &overview.next {
        grid.row([
            plain(name(&waiting.id, waiting.attempt)),
            plain(when::age(overview.now_ms, waiting.queued_ms)),
            plain(waiting.priority.to_string()),
            plain(asked(waiting.memory_bytes, waiting.cpu_milli)),
            plain(short(&waiting.submitter)),
            (delay(waiting, overview.now_ms), Ink::Faint),
        ]);
    }
    Section {
        of: overview.queued,
        on_page: 50,
        counted: true,
        grid,
    }
}

fn delay(waiting: &WaitingAttempt, now_ms: i64) -> String {
    let left = waiting.not_before_ms.map(|ms| ms.saturating_sub(now_ms));
    match left.and_then(|left| u64::try_from(left).ok()) {
        Some(left) if left > 0 => format!("tried again in {}", when::brief(left)),
        _ => String::new(),
    }
}

fn ended(now_ms: i64, ended: &[AttemptSummary]) -> Section {
    let mut grid = Grid::new(vec![
        column("ENDED", Left, 0),
        column("", Left, 0),
        column("AGO", Right, 1),
        column("TIME", Right, 2),
    ]);
    for listed in ended {
        let ink = match listed.state {
            State::Succeeded => Ink::Good,
            State::Cancelled => Ink::Warning,
            _ => Ink::Bad,
        };
        grid.row([
            plain(list::name(listed)),
            (list::ended(listed), ink),
            plain(when::age(
                now_ms,
                listed.committed_ms.unwrap_or(listed.created_ms),
            )),
            plain(listed.wall_ms.map_or(String::new(), when::brief)),
        ]);
    }
    Section {
        of: grid.len() as u64,
        on_page: ENDED_ON_PAGE,
        counted: false,
        grid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_divided_and_none_is_wasted() {
        assert_eq!(share(&[1, 10, 3], 9), [1, 5, 3]);
        assert_eq!(share(&[1, 2], 100), [1, 2]);
        assert_eq!(share(&[4, 4], 1), [1, 0]);
        assert_eq!(share(&[], 5), [0; 0]);
    }

    #[test]
    fn what_is_left_out_is_counted() {
        let mut grid = Grid::new(vec![column("ID", Left, 0)]);
        for id in ["a", "b", "c"] {
            grid.row([plain(id)]);
        }
        let section = Section {
            grid,
            of: 9,
            on_page: 50,
            counted: true,
        };
        let texts = |rows| -> Vec<String> {
            let lines = section.lines(None, rows);
            lines.iter().map(Line::text).collect()
        };
        assert_eq!(texts(1), ["ID", "a"]);
        assert_eq!(texts(2), ["ID", "a", "… and 8 more"]);
        assert_eq!(
            texts(section.wanted()),
            ["ID", "a", "b", "c", "… and 6 more"]
        );
    }
}
