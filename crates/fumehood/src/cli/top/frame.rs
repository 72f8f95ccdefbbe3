//! Formats a snapshot of the queue for a page or a screen.

use std::collections::HashMap;

use engine::home;
use store::types::units::{format_cpus, format_size};
use store::{ActiveAttempt, AttemptSummary, QueueOverview, State, WaitingAttempt, WorkerRow};

use super::Snapshot;
use super::usage::MeasuredUsage;
use crate::cli::print::Align::{Left, Right};
use crate::cli::print::{self, StyledLine, Table, TextStyle, column, escape, format_count};
use crate::cli::{attempt_text, time_format};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScreenSize {
    pub columns: usize,
    pub rows: usize,
}

/// A worker that has not reported for this long counts as gone.
const SEEN_MS: i64 = 60_000;
/// The number of ended analyses on a page.
const ENDED_ON_PAGE: usize = 10;
/// A screen with fewer rows shows no advice.
const ROWS_FOR_ADVICE: usize = 12;
const CELL_CHARS_MAX: usize = 40;

/// Returns all lines; for a screen, as many as it has, cut to its width.
pub fn page(now: &Snapshot, screen: Option<ScreenSize>, trouble: Option<&str>) -> Vec<StyledLine> {
    let overview = &now.overview;
    let width = screen.map(|size| size.columns);
    let mut lines = vec![bar(overview, width)];
    lines.extend(trouble.map(|text| StyledLine::styled(escape(text), TextStyle::Bad)));
    let names = host_names(overview);
    let sections = [
        workers(overview),
        running(now, &names),
        queued(overview),
        ended_section(overview.now_ms, &now.ended),
    ];
    let sections: Vec<Section> = sections.into_iter().filter(|s| s.table.len() > 0).collect();
    let has_room = screen.is_none_or(|size| size.rows >= ROWS_FOR_ADVICE);
    if overview.workers.is_empty() && has_room {
        lines.push(StyledLine::default());
        let text = "no worker is running; `fumehood worker` starts one";
        lines.push(StyledLine::styled(text, TextStyle::Warning));
    }
    let shares = match screen {
        // Each section has a blank line and a header.
        Some(size) => {
            let heads = lines.len() + 2 * sections.len();
            let wanted: Vec<usize> = sections.iter().map(Section::rows_needed).collect();
            divide_rows(&wanted, size.rows.saturating_sub(heads))
        }
        None => sections
            .iter()
            .map(|section| section.rows_needed().min(section.on_page))
            .collect(),
    };
    for (section, rows) in sections.iter().zip(shares) {
        if rows > 0 {
            lines.push(StyledLine::default());
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

fn bar(overview: &QueueOverview, width: Option<usize>) -> StyledLine {
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
        format_count(live.count() as u64, "worker", "workers"),
    ];
    let Some(width) = width else {
        facts.push(format!("{} UTC", time_format::format_date(overview.now_ms)));
        return StyledLine::plain(facts.join(", "));
    };
    let left = format!(" fumehood  {}", facts.join(", "));
    let right = format!(
        "{} UTC  q quits ",
        time_format::format_date(overview.now_ms)
    );
    let room = width.saturating_sub(left.chars().count());
    let text = match room > right.chars().count() {
        true => format!("{left}{right:>room$}"),
        false => format!("{left:<width$}"),
    };
    StyledLine::styled(text, TextStyle::Bar)
}

/// A table, of which there may be more rows than were fetched.
struct Section {
    table: Table,
    /// The number of rows in the database.
    of: u64,
    /// The number of rows on a page without a screen.
    on_page: usize,
    /// Whether to say how many rows are left out.
    counted: bool,
}

impl Section {
    /// Returns the number of fetched rows, and one more if there are rows that were not fetched.
    fn rows_needed(&self) -> usize {
        let unfetched = self.counted && self.of > self.table.len() as u64;
        self.table.len() + usize::from(unfetched)
    }

    /// Returns the header and the given number of rows; the last one counts the rows that are left out.
    fn lines(&self, width: Option<usize>, rows: usize) -> Vec<StyledLine> {
        let mut lines = self.table.styled_lines(width);
        let whole = rows >= self.rows_needed() && self.of <= self.table.len() as u64;
        // The top line shows the total, so a single row is better used for the first entry.
        if whole || !self.counted || rows < 2 {
            lines.truncate(1 + rows);
            return lines;
        }
        let shown = rows.saturating_sub(1).min(self.table.len());
        lines.truncate(1 + shown);
        let more = self.of.saturating_sub(shown as u64);
        lines.push(StyledLine::styled(
            format!("… and {more} more"),
            TextStyle::Faint,
        ));
        lines
    }
}

/// Divides the rows of the screen among the sections. No section gets more than it wants, and what one does not need
/// goes to others.
fn divide_rows(wanted: &[usize], room: usize) -> Vec<usize> {
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

fn plain(text: impl Into<String>) -> (String, TextStyle) {
    (text.into(), TextStyle::Plain)
}

/// Cuts long names, so that a table stays readable.
fn short(text: &str) -> String {
    print::shorten(&escape(text), CELL_CHARS_MAX)
}

fn is_live(worker: &WorkerRow, now_ms: i64) -> bool {
    now_ms.saturating_sub(worker.seen_ms) < SEEN_MS
}

/// Returns the names of machines by id. The record identifies machines by id.
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

/// Whether an attempt runs under this worker. An attempt names its worker, with the host after an at sign.
fn is_of(busy: &ActiveAttempt, worker: &WorkerRow) -> bool {
    let name = busy.worker.as_deref().unwrap_or_default();
    let plain = name.split_once('@').map_or(name, |(plain, _)| plain);
    busy.host == worker.host && plain == worker.name
}

fn workers(overview: &QueueOverview) -> Section {
    let mut table = Table::with_header(vec![
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
        // The count from the attempts is newer than what the worker last reported. But of very many attempts not all
        // were fetched.
        let all_fetched = overview.busy.len() as u64 == overview.running;
        let running = match all_fetched {
            true => its.len() as u64,
            false => worker.running.into(),
        };
        let memory: u64 = its.iter().filter_map(|busy| busy.memory_bytes).sum();
        let cpu: u64 = its.iter().filter_map(|busy| busy.cpu_milli).sum();
        // An attempt that asks for no memory counts as the worker's default, which only the worker knows.
        let and_more = match its.iter().all(|busy| busy.memory_bytes.is_some()) {
            true => "",
            false => "+",
        };
        let (note, style) = match (is_live(worker, overview.now_ms), worker.draining) {
            (false, _) => (
                format!(
                    "not seen for {}",
                    time_format::format_age(overview.now_ms, worker.seen_ms)
                ),
                TextStyle::Bad,
            ),
            (true, true) => ("draining".to_owned(), TextStyle::Warning),
            (true, false) => (String::new(), TextStyle::Plain),
        };
        table.styled_row([
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
            plain(time_format::format_age(overview.now_ms, worker.started_ms)),
            (note, style),
        ]);
    }
    Section {
        of: table.len() as u64,
        on_page: usize::MAX,
        counted: true,
        table,
    }
}

fn running(now: &Snapshot, names: &HashMap<String, String>) -> Section {
    let overview = &now.overview;
    let mut table = Table::with_header(vec![
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
        let used = now.meter.of(busy);
        let state = match (busy.cancel_asked, busy.state) {
            (true, _) => ("cancelling".to_owned(), TextStyle::Warning),
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
        table.styled_row([
            plain(attempt_text::attempt_name(&busy.id, busy.attempt)),
            state,
            plain(time_format::format_age(
                overview.now_ms,
                busy.started_ms.unwrap_or(busy.created_ms),
            )),
            plain(used.memory_bytes.map_or(String::new(), format_size)),
            plain(cpus_used(used, busy, overview.now_ms)),
            plain(format_capacity(busy.memory_bytes, busy.cpu_milli)),
            plain(short(busy.submitter.as_deref().unwrap_or_default())),
            plain(by_worker.unwrap_or_else(|| format!("run on {host}"))),
        ]);
    }
    Section {
        of: overview.running,
        on_page: usize::MAX,
        counted: true,
        table,
    }
}

/// Formats the CPU use since the last look; at the first look, the average since it began.
fn cpus_used(used: MeasuredUsage, busy: &ActiveAttempt, now_ms: i64) -> String {
    let average = || {
        let ran_ms = now_ms.checked_sub(busy.started_ms?)?;
        let ran_ms = u64::try_from(ran_ms).ok().filter(|ms| *ms > 0)?;
        Some(used.cpu_us? / ran_ms)
    };
    let milli = used.cpu_milli.or_else(average);
    milli.map_or(String::new(), |milli| {
        // Show two digits: the reading is not more precise.
        let hundredths = milli.div_ceil(10);
        format!("{}.{:02}", hundredths / 100, hundredths % 100)
    })
}

/// Formats `4 GiB, 2 CPUs`; empty if the worker's defaults hold.
fn format_capacity(memory_bytes: Option<u64>, cpu_milli: Option<u64>) -> String {
    attempt_text::resources_text(memory_bytes.map(format_size), cpu_milli)
}

fn queued(overview: &QueueOverview) -> Section {
    let mut table = Table::with_header(vec![
        column("QUEUED", Left, 0),
        column("FOR", Right, 0),
        column("PRIORITY", Right, 1),
        column("ASKED", Left, 3),
        column("BY", Left, 2),
        column("", Left, 1),
    ]);
    for waiting in &overview.next {
        table.styled_row([
            plain(attempt_text::attempt_name(&waiting.id, waiting.attempt)),
            plain(time_format::format_age(overview.now_ms, waiting.queued_ms)),
            plain(waiting.priority.to_string()),
            plain(format_capacity(waiting.memory_bytes, waiting.cpu_milli)),
            plain(short(&waiting.submitter)),
            (delay(waiting, overview.now_ms), TextStyle::Faint),
        ]);
    }
    Section {
        of: overview.queued,
        on_page: 50,
        counted: true,
        table,
    }
}

fn delay(waiting: &WaitingAttempt, now_ms: i64) -> String {
    let left = waiting.not_before_ms.map(|ms| ms.saturating_sub(now_ms));
    match left.and_then(|left| u64::try_from(left).ok()) {
        Some(left) if left > 0 => format!(
            "tried again in {}",
            time_format::format_duration_brief(left)
        ),
        _ => String::new(),
    }
}

fn ended_section(now_ms: i64, ended: &[AttemptSummary]) -> Section {
    let mut table = Table::with_header(vec![
        column("ENDED", Left, 0),
        column("", Left, 0),
        column("AGO", Right, 1),
        column("TIME", Right, 2),
    ]);
    for summary in ended {
        let style = match summary.state {
            State::Succeeded => TextStyle::Good,
            State::Cancelled => TextStyle::Warning,
            _ => TextStyle::Bad,
        };
        table.styled_row([
            plain(attempt_text::display_name(summary)),
            (attempt_text::status_text(summary), style),
            plain(time_format::format_age(
                now_ms,
                summary.committed_ms.unwrap_or(summary.created_ms),
            )),
            plain(attempt_text::wall_time(summary)),
        ]);
    }
    Section {
        of: table.len() as u64,
        on_page: ENDED_ON_PAGE,
        counted: false,
        table,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever writes to the database chooses these texts.
    const HOSTILE: &str = "\u{1b}[2J\u{9b}31m\r\n\u{202e}王\u{200b}e\u{301}\u{7f}";

    fn hostile_snapshot() -> Snapshot {
        let text = || HOSTILE.to_owned();
        let worker = WorkerRow {
            host: text(),
            host_name: text(),
            account: text(),
            name: text(),
            pid: 1,
            version: text(),
            slots: 1,
            running: 1,
            total: store::Capacity::default(),
            draining: true,
            started_ms: 0,
            seen_ms: 0,
        };
        let waiting = WaitingAttempt {
            id: text(),
            attempt: 2,
            submitter: text(),
            priority: 0,
            queued_ms: 0,
            not_before_ms: Some(9_000),
            memory_bytes: Some(1),
            cpu_milli: Some(1),
        };
        let active = |host: &str, worker: Option<String>| ActiveAttempt {
            id: text(),
            attempt: 1,
            state: State::Running,
            submitter: Some(text()),
            host: host.to_owned(),
            worker,
            created_ms: 0,
            started_ms: None,
            memory_bytes: None,
            cpu_milli: None,
            cancel_asked: false,
        };
        Snapshot {
            overview: QueueOverview {
                now_ms: 1_000,
                queued: 1,
                delayed: 1,
                next: vec![waiting],
                running: 2,
                busy: vec![active(HOSTILE, Some(text())), active("\u{1b}c", None)],
                workers: vec![worker],
            },
            ended: Vec::new(),
            meter: Default::default(),
        }
    }

    #[test]
    fn text_of_others_neither_steers_the_terminal_nor_leaves_the_screen() {
        let now = hostile_snapshot();
        let whole = page(&now, None, Some(HOSTILE));
        let shown: String = whole.iter().map(StyledLine::text).collect();
        assert!(
            shown.contains("\\x1b[2J\\u{9b}31m\\r\\n\\u{202e}王\\u{200b}"),
            "{shown}"
        );
        for columns in (0..200).step_by(7) {
            let screen = ScreenSize { columns, rows: 30 };
            for line in page(&now, Some(screen), Some(HOSTILE)) {
                assert!(line.width() <= columns, "{columns}: {line:?}");
                let text = line.text();
                assert!(
                    !text.chars().any(store::types::escaping::is_misleading),
                    "{text:?}"
                );
                assert!(!text.contains(char::is_control), "{text:?}");
            }
        }
    }

    #[test]
    fn lines_are_divided_and_none_is_wasted() {
        assert_eq!(divide_rows(&[1, 10, 3], 9), [1, 5, 3]);
        assert_eq!(divide_rows(&[1, 2], 100), [1, 2]);
        assert_eq!(divide_rows(&[4, 4], 1), [1, 0]);
        assert_eq!(divide_rows(&[], 5), [0; 0]);
    }

    #[test]
    fn rows_that_do_not_fit_are_counted() {
        let mut table = Table::with_header(vec![column("ID", Left, 0)]);
        for id in ["a", "b", "c"] {
            table.styled_row([plain(id)]);
        }
        let section = Section {
            table,
            of: 9,
            on_page: 50,
            counted: true,
        };
        let texts = |rows| -> Vec<String> {
            let lines = section.lines(None, rows);
            lines.iter().map(StyledLine::text).collect()
        };
        assert_eq!(texts(1), ["ID", "a"]);
        assert_eq!(texts(2), ["ID", "a", "… and 8 more"]);
        assert_eq!(
            texts(section.rows_needed()),
            ["ID", "a", "b", "c", "… and 6 more"]
        );
    }
}
