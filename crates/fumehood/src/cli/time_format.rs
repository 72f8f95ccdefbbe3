//! Times and durations as people write and read them. Dates are in UTC.

use jiff::SignedDuration;
use jiff::civil::DateTime;
use store::types::units::{format_duration, parse_duration_ms};

const SECOND_MS: i64 = 1_000;
const MINUTE_MS: i64 = 60 * SECOND_MS;
const HOUR_MS: i64 = 60 * MINUTE_MS;
const DAY_MS: i64 = 24 * HOUR_MS;

/// Unix time 0, in UTC.
const EPOCH: DateTime = DateTime::constant(1970, 1, 1, 0, 0, 0, 0);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{given:?} is no time; give how long ago, such as 2d or 1h30m, or a date in UTC, such as 2026-01-31 or 2026-01-31T12:00"
)]
pub struct TimeParseError {
    given: String,
}

/// Parses `2d` (before now), `2026-01-31`, `2026-01-31T12:00`, with optional seconds and `Z`. Returns Unix time in
/// milliseconds.
pub fn parse_since(text: &str, now_ms: i64) -> Result<i64, TimeParseError> {
    let bad = || TimeParseError {
        given: text.chars().take(80).collect(),
    };
    let text = text.trim();
    if text.contains('-') {
        return parse_date(text).ok_or_else(bad);
    }
    let ago_ms = parse_duration_ms(text).map_err(|_| bad())?;
    Ok(now_ms.saturating_sub(i64::try_from(ago_ms).unwrap_or(i64::MAX)))
}

fn parse_date(text: &str) -> Option<i64> {
    const FORM: &str = "2026-01-31T12:00:00";
    let mut text = text.strip_suffix('Z').unwrap_or(text).replacen(' ', "T", 1);
    match text.len() {
        10 => text.push_str("T00:00:00"),
        16 => text.push_str(":00"),
        _ => {}
    }
    let time: DateTime = text.parse().ok()?;
    // The parser takes further forms, and a leap second. Take only what is formatted like that again.
    let is_exact = text.len() == FORM.len() && time.to_string() == text;
    let since = is_exact.then(|| time.duration_since(EPOCH))?;
    i64::try_from(since.as_millis()).ok()
}

/// Formats `2026-01-31 12:00:05`, in UTC.
pub fn format_date(ms: i64) -> String {
    let seconds = SignedDuration::from_secs(ms.div_euclid(SECOND_MS));
    let time = EPOCH.saturating_add(seconds);
    time.to_string().replace('T', " ")
}

/// Formats `5s`, `12m`, `3h`, `8d`: the largest unit, truncated. A time in the future (clocks differ) is `0s`.
pub fn format_age(now_ms: i64, then_ms: i64) -> String {
    let ms = now_ms.saturating_sub(then_ms).max(0);
    match ms {
        DAY_MS.. => format!("{}d", ms / DAY_MS),
        HOUR_MS.. => format!("{}h", ms / HOUR_MS),
        MINUTE_MS.. => format!("{}m", ms / MINUTE_MS),
        _ => format!("{}s", ms / SECOND_MS),
    }
}

/// Formats a duration in about three digits: `12ms`, `3.4s`, `2m5s`, `1h20m`.
pub fn format_duration_brief(ms: u64) -> String {
    let step = match ms {
        0..1_000 => 1,
        1_000..60_000 => 100,
        60_000..3_600_000 => 1_000,
        3_600_000..86_400_000 => 60_000,
        _ => 3_600_000,
    };
    format_duration(ms - ms % step)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW_MS: i64 = 1_800_000_000_000;

    #[test]
    fn a_time_is_an_age_or_a_date() {
        for (text, ms) in [
            ("2d", NOW_MS - 2 * DAY_MS),
            ("1h30m", NOW_MS - 90 * MINUTE_MS),
            ("0", NOW_MS),
            ("1970-01-01", 0),
            ("2000-02-29", 951_782_400_000),
            ("2026-01-31T12:00", 1_769_860_800_000),
            ("2026-01-31 12:00:05Z", 1_769_860_805_000),
            ("1969-12-31", -DAY_MS),
        ] {
            assert_eq!(parse_since(text, NOW_MS), Ok(ms), "{text:?}");
        }
    }

    #[test]
    fn text_that_is_not_a_time_is_refused() {
        for text in [
            "",
            "x",
            "yesterday",
            "2026-02-29",
            "2026-13-01",
            "2026-1-1",
            "26-01-01",
            "2026-01-31T24:00",
            "2026-01-31T12",
            "2026-01-31T12:60",
            "2026-01-31T12:00:60",
            "-2d",
            "2026-01-31T12:00+01:00",
            "2026--1-31",
            "2026-01-31-01",
            "٢٠٢٦-01-31",
        ] {
            assert!(parse_since(text, NOW_MS).is_err(), "{text:?}");
        }
    }

    #[test]
    fn ages_and_durations_are_short() {
        assert_eq!(format_age(NOW_MS, NOW_MS - 59_999), "59s");
        assert_eq!(format_age(NOW_MS, NOW_MS - DAY_MS * 400), "400d");
        assert_eq!(format_age(NOW_MS, NOW_MS + 5), "0s");
        assert_eq!(
            format_age(i64::MAX, i64::MIN),
            format!("{}d", i64::MAX / DAY_MS)
        );
        assert_eq!(format_duration_brief(0), "0s");
        assert_eq!(format_duration_brief(999), "999ms");
        assert_eq!(format_duration_brief(3_456), "3.4s");
        assert_eq!(format_duration_brief(125_999), "2m5s");
        assert_eq!(format_duration_brief(4_859_000), "1h20m");
    }

    proptest! {
        #[test]
        fn a_shown_date_reads_back(seconds in -2_208_988_800i64..253_402_300_799) {
            let shown = format_date(seconds * SECOND_MS);
            prop_assert_eq!(parse_since(&shown, NOW_MS), Ok(seconds * SECOND_MS));
        }

        #[test]
        fn no_moment_makes_it_fail(ms in any::<i64>(), text in any::<String>()) {
            let _ = (format_date(ms), format_age(NOW_MS, ms), parse_since(&text, ms));
        }
    }
}
