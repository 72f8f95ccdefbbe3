//! Attempts in a few words, as several commands print them.

use anyhow::Context;
use store::types::units::{format_cpus, format_size};
use store::{AttemptSummary, State, StoredOutput};

use super::print::{self, escape};
use super::time_format;

/// Returns the name in the form that `show` and other commands accept: `ID`, or `ID@2` for a later attempt.
pub fn display_name(summary: &AttemptSummary) -> String {
    attempt_name(&summary.id, summary.attempt)
}

pub fn attempt_name(id: &str, attempt: u32) -> String {
    match attempt {
        1 => escape(id),
        n => format!("{}@{n}", escape(id)),
    }
}

/// Describes the resources that an attempt asks for: `4 GiB, 2 CPUs`.
pub fn resources_text(memory: Option<String>, cpu_milli: Option<u64>) -> String {
    let cpus = cpu_milli.map(|milli| match milli {
        1_000 => "1 CPU".to_owned(),
        milli => format!("{} CPUs", format_cpus(milli)),
    });
    let asked: Vec<String> = memory.into_iter().chain(cpus).collect();
    asked.join(", ")
}

/// Returns the status, with the reason where that adds something.
pub fn status_text(summary: &AttemptSummary) -> String {
    let status = escape(&summary.state_word).replace('_', " ");
    let reason = summary.reason.as_deref().unwrap_or_default();
    let why = match (summary.state, reason, summary.exit_code, summary.signal) {
        (State::Failed, "exit", Some(code), _) => format!("exit {code}"),
        (State::Failed, "signal", _, Some(signal)) => format!("signal {signal}"),
        (State::Succeeded, "exit", ..) | (_, "", ..) => return status,
        (state, reason, ..) if state.as_str() == reason => return status,
        (_, reason, ..) => escape(reason).replace('_', " "),
    };
    format!("{status} ({why})")
}

/// Returns the time that the program took, empty if it has not ended.
pub fn wall_time(summary: &AttemptSummary) -> String {
    summary
        .wall_ms
        .map_or(String::new(), time_format::format_duration_brief)
}

/// Returns size, media type and path of an output for a table.
pub fn output_cells(output: &StoredOutput) -> [String; 3] {
    [
        format_size(output.bytes),
        escape(&output.media_type),
        print::path(&output.path),
    ]
}

/// Parses names of states, with `-` or `_`.
pub fn parse_states(words: &[String]) -> anyhow::Result<Vec<State>> {
    let state = |word: &String| {
        State::parse(&word.trim().replace('-', "_")).with_context(|| {
            format!(
                "--status {word:?} is none; the states are {}",
                State::ALL.map(State::as_str).join(", ")
            )
        })
    };
    words.iter().map(state).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use engine::home;
    use store::PostProcessState;

    fn listed(state: State, reason: &str) -> AttemptSummary {
        AttemptSummary {
            id: "a".into(),
            attempt: 1,
            state,
            state_word: state.as_str().into(),
            reason: Some(reason.into()),
            message: None,
            superseded: false,
            host: home::machine_id(),
            created_ms: 0,
            started_ms: None,
            ended_ms: None,
            committed_ms: None,
            wall_ms: None,
            exit_code: None,
            signal: None,
            isolation_level: None,
            complete: Some(true),
            outputs_count: Some(0),
            output_bytes: Some(0),
            post_process: PostProcessState::NotAsked,
            post_process_word: None,
        }
    }

    #[test]
    fn a_status_says_why_in_a_word_or_two() {
        assert_eq!(status_text(&listed(State::Succeeded, "exit")), "succeeded");
        assert_eq!(
            status_text(&listed(State::Cancelled, "cancelled")),
            "cancelled"
        );
        assert_eq!(
            status_text(&listed(State::TimedOut, "wall_time")),
            "timed out (wall time)"
        );
        let mut failed = listed(State::Failed, "exit");
        failed.exit_code = Some(3);
        assert_eq!(status_text(&failed), "failed (exit 3)");
        let forged = listed(State::Error, "\u{1b}[31mx");
        assert_eq!(status_text(&forged), "error (\\x1b[31mx)");
    }

    #[test]
    fn states_are_words() {
        let parse =
            |words: &[&str]| parse_states(&words.iter().map(|w| w.to_string()).collect::<Vec<_>>());
        assert_eq!(
            parse(&["failed", "timed-out"]).unwrap(),
            [State::Failed, State::TimedOut]
        );
        assert!(
            parse(&["fine"])
                .unwrap_err()
                .to_string()
                .contains("out_of_memory")
        );
    }
}
