//! Sizes, durations, CPUs and counts: parsing what people write, and formatting.
//!
//! All arithmetic is in integers, so `0.1h` is the same number on every machine and nothing is ever NaN. Fractions
//! are cut off, never rounded up: a limit may become stricter than it was written, never looser.

const SECOND_MS: u64 = 1000;
const MINUTE_MS: u64 = 60 * SECOND_MS;
const HOUR_MS: u64 = 60 * MINUTE_MS;
const DAY_MS: u64 = 24 * HOUR_MS;

/// Largest first. A duration must name units in this order, each at most once.
const DURATION_UNITS: [(&str, u64); 5] = [
    ("d", DAY_MS),
    ("h", HOUR_MS),
    ("m", MINUTE_MS),
    ("s", SECOND_MS),
    ("ms", 1),
];

const SIZE_UNITS: [(&str, u64); 4] = [
    ("T", 1 << 40),
    ("G", 1 << 30),
    ("M", 1 << 20),
    ("K", 1 << 10),
];

/// People do not write more digits by hand. The bound keeps the arithmetic below within `u128`.
const DIGITS_MAX: usize = 20;

/// How much of a wrong value an error message repeats.
const GIVEN_CHARS_MAX: usize = 80;

/// Why a text is not a value of the wanted unit. `given` is the beginning of the text.
#[allow(missing_docs, reason = "the variants say what the fields are")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// The text is not a size.
    #[error(
        "{given:?} is not a size; give a number of bytes, or a number with K, M, G or T \
         (powers of 1024), such as 512M or 1.5G"
    )]
    Size { given: String },
    /// The text is not a duration.
    #[error(
        "{given:?} is not a duration; give a number of seconds, or numbers with d, h, m, s or ms \
         in that order, such as 30s, 1h30m or 250ms"
    )]
    Duration { given: String },
    /// The text is not a number of CPUs.
    #[error("{given:?} is not a number of CPUs; give a decimal number, such as 2 or 1.5")]
    Cpus { given: String },
    /// The text is not a whole number.
    #[error("{given:?} is not a count; give a whole number, such as 1024")]
    Count { given: String },
    /// The value does not fit into 64 bits.
    #[error("{given:?} is too large to be counted in 64 bits")]
    TooLarge { given: String },
}

/// Parses a size in bytes: `4096`, `64K`, `512MiB`, `1.5G`. Units are powers of 1024, in either case.
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    let bad = || UnitError::Size {
        given: excerpt(text),
    };
    let (number, unit) = Decimal::take(text.trim_ascii()).ok_or_else(bad)?;
    let unit = unit.trim_ascii_start().to_ascii_uppercase();
    // After a letter, `B`, `iB` and nothing mean the same. `iB` without a letter is an error.
    let letter = match unit.strip_suffix("IB") {
        Some(letter) if !letter.is_empty() => letter,
        Some(_) => return Err(bad()),
        None => unit.strip_suffix('B').unwrap_or(&unit),
    };
    let scale = match SIZE_UNITS.iter().find(|(name, _)| *name == letter) {
        Some((_, scale)) => *scale,
        None if letter.is_empty() && number.is_whole() => 1,
        None => return Err(bad()),
    };
    number.scaled(scale, text)
}

/// Parses a duration in milliseconds: `30` (seconds), `1.5h`, `1h30m`, `250ms`, `2d`.
pub fn parse_duration_ms(text: &str) -> Result<u64, UnitError> {
    let bad = || UnitError::Duration {
        given: excerpt(text),
    };
    let mut rest = text.trim_ascii();
    let (number, unit) = Decimal::take(rest).ok_or_else(bad)?;
    if unit.is_empty() {
        return number.scaled(SECOND_MS, text);
    }
    let mut total_ms = 0u64;
    let mut units = DURATION_UNITS.iter();
    while !rest.is_empty() {
        let (number, after) = Decimal::take(rest).ok_or_else(bad)?;
        let after = after.trim_ascii_start();
        let word_len = after.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (word, after) = after.split_at(word_len);
        // The iterator only moves forward, so it does not find a unit that is out of order or given twice.
        let (_, scale) = units.find(|(name, _)| *name == word).ok_or_else(bad)?;
        let sum_ms = total_ms.checked_add(number.scaled(*scale, text)?);
        total_ms = sum_ms.ok_or_else(|| too_large(text))?;
        rest = after.trim_ascii_start();
    }
    Ok(total_ms)
}

/// Parses a number of CPUs in thousandths: `2` is 2000, `1.5` is 1500.
pub fn parse_cpus(text: &str) -> Result<u64, UnitError> {
    match Decimal::take(text.trim_ascii()) {
        Some((number, "")) => number.scaled(1000, text),
        _ => Err(UnitError::Cpus {
            given: excerpt(text),
        }),
    }
}

/// Parses a whole number.
pub fn parse_count(text: &str) -> Result<u64, UnitError> {
    match Decimal::take(text.trim_ascii()) {
        Some((number, "")) if number.is_whole() => number.scaled(1, text),
        _ => Err(UnitError::Count {
            given: excerpt(text),
        }),
    }
}

/// Formats a size for people: `512 B`, `4 GiB`, `1.5 MiB`. At most one decimal, cut off.
pub fn format_size(bytes: u64) -> String {
    match SIZE_UNITS.iter().find(|(_, scale)| bytes >= *scale) {
        None => format!("{bytes} B"),
        Some((name, scale)) => {
            let whole = bytes / scale;
            let tenths = u128::from(bytes % scale) * 10 / u128::from(*scale);
            match tenths {
                0 => format!("{whole} {name}iB"),
                _ => format!("{whole}.{tenths} {name}iB"),
            }
        }
    }
}

/// Formats a duration exactly, in a form that [`parse_duration_ms`] reads: `1h30m`, `2.345s`, `250ms`, `0s`.
pub fn format_duration(ms: u64) -> String {
    if ms == 0 {
        return "0s".to_owned();
    }
    if ms < SECOND_MS {
        return format!("{ms}ms");
    }
    let mut text = String::new();
    let mut rest_ms = ms;
    for (name, scale) in &DURATION_UNITS[..3] {
        if rest_ms >= *scale {
            text.push_str(&format!("{}{name}", rest_ms / scale));
            rest_ms %= scale;
        }
    }
    match (rest_ms / SECOND_MS, rest_ms % SECOND_MS) {
        (0, 0) => {}
        (seconds, 0) => text.push_str(&format!("{seconds}s")),
        (seconds, ms) => {
            let fraction = format!("{ms:03}");
            text.push_str(&format!("{seconds}.{}s", fraction.trim_end_matches('0')));
        }
    }
    text
}

/// Formats thousandths of a CPU: `1.5` for 1500.
pub fn format_cpus(milli: u64) -> String {
    match milli % 1000 {
        0 => format!("{}", milli / 1000),
        part => {
            let fraction = format!("{part:03}");
            format!("{}.{}", milli / 1000, fraction.trim_end_matches('0'))
        }
    }
}

/// An unsigned decimal number: `digits / 10^places`.
#[derive(Clone, Copy)]
struct Decimal {
    digits: u128,
    places: u32,
}

impl Decimal {
    /// Splits `12` or `12.5` off the front. Refuses a sign, an exponent, digits outside ASCII, and a point without a
    /// digit on both sides: such input is more likely a mistake.
    fn take(text: &str) -> Option<(Decimal, &str)> {
        let whole_len = digits_len(text);
        let (whole, rest) = text.split_at(whole_len);
        let (fraction, rest) = match rest.strip_prefix('.') {
            Some(after) => after.split_at(digits_len(after)),
            None => ("", rest),
        };
        let point_alone = fraction.is_empty() && text[whole_len..].starts_with('.');
        if whole.is_empty() || point_alone {
            return None;
        }
        // Leading and trailing zeros do not change the value and must not count against the bound.
        let whole = whole.trim_start_matches('0');
        let fraction = fraction.trim_end_matches('0');
        if fraction.len() > 9 {
            return None;
        }
        let (digits, places) = match whole.len() > DIGITS_MAX {
            // Too large for any unit.
            true => (u128::MAX, 0),
            false => (
                format!("0{whole}{fraction}").parse().ok()?,
                fraction.len() as u32,
            ),
        };
        Some((Decimal { digits, places }, rest))
    }

    fn is_whole(self) -> bool {
        self.places == 0
    }

    /// The product, cut off to a whole number. The error repeats `text`.
    fn scaled(self, scale: u64, text: &str) -> Result<u64, UnitError> {
        let product = self.digits.checked_mul(u128::from(scale));
        let whole = product.map(|product| product / 10u128.pow(self.places));
        let fits = whole.and_then(|whole| u64::try_from(whole).ok());
        fits.ok_or_else(|| too_large(text))
    }
}

fn too_large(text: &str) -> UnitError {
    UnitError::TooLarge {
        given: excerpt(text),
    }
}

fn digits_len(text: &str) -> usize {
    text.bytes().take_while(u8::is_ascii_digit).count()
}

fn excerpt(text: &str) -> String {
    text.chars().take(GIVEN_CHARS_MAX).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_binary() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("10B", 10),
            ("1K", 1024),
            ("1k", 1024),
            ("1KB", 1024),
            ("1kib", 1024),
            ("2G", 2 << 30),
            ("2 GiB", 2 << 30),
            (" 1.5G ", 3 << 29),
            ("1.50G", 3 << 29),
            ("0.1K", 102),
            ("16777215T", 16_777_215 << 40),
            ("007", 7),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text:?}");
        }
    }

    #[test]
    fn odd_sizes_are_refused() {
        for text in [
            "",
            " ",
            "G",
            "-1",
            "+1",
            "1.5",
            "1.",
            ".5G",
            "1..5G",
            "1e9",
            "1_000",
            "1,5G",
            "NaN",
            "inf",
            "1GG",
            "1iB",
            "1 0",
            "1P",
            "٣",
            "１２",
            "0x10",
            "1G\0",
            "1.0000000001G",
            "1\u{a0}G",
        ] {
            assert!(
                matches!(parse_size(text), Err(UnitError::Size { .. })),
                "{text:?}"
            );
        }
        for text in ["18446744073709551616", "16777216T", &"9".repeat(5000)] {
            assert!(
                matches!(parse_size(text), Err(UnitError::TooLarge { .. })),
                "{text:?}"
            );
        }
    }

    #[test]
    fn durations_take_a_bare_number_as_seconds() {
        for (text, ms) in [
            ("30", 30_000),
            ("1.5", 1500),
            ("0", 0),
            ("30s", 30_000),
            ("1h30m", 5_400_000),
            ("1h 30m", 5_400_000),
            ("250ms", 250),
            ("2d", 172_800_000),
            ("1.5h", 5_400_000),
            ("1d1h1m1s1ms", 90_061_001),
            ("1m", 60_000),
            ("0.0001s", 0),
        ] {
            assert_eq!(parse_duration_ms(text), Ok(ms), "{text:?}");
        }
    }

    #[test]
    fn odd_durations_are_refused() {
        for text in [
            "", "s", "-1s", "+1s", "1h30", "30m1h", "1s1s", "1M", "1w", "1 2", "1e3", "NaN", "inf",
            "1h-2m", "٣s", "1sm", "1:30", "1s,", "never",
        ] {
            assert!(
                matches!(parse_duration_ms(text), Err(UnitError::Duration { .. })),
                "{text:?}"
            );
        }
        for text in [
            "213503982335d",
            "18446744073709551615",
            "18446744073709551615ms1ms",
        ] {
            assert!(parse_duration_ms(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn cpus_and_counts() {
        assert_eq!(parse_cpus("1.5"), Ok(1500));
        assert_eq!(parse_cpus("64"), Ok(64_000));
        assert_eq!(parse_cpus("0.0009"), Ok(0));
        assert_eq!(parse_count(" 1024 "), Ok(1024));
        for text in ["", "-1", "1.5.1", "1k", "NaN", "two", "1/2", "½"] {
            assert!(parse_cpus(text).is_err(), "{text:?}");
            assert!(parse_count(text).is_err(), "{text:?}");
        }
        assert!(parse_count("1.5").is_err());
        assert!(matches!(
            parse_cpus("18446744073709551615"),
            Err(UnitError::TooLarge { .. })
        ));
    }

    #[test]
    fn a_huge_value_is_not_repeated_whole() {
        let error = parse_size(&"x".repeat(100_000)).unwrap_err();
        assert!(error.to_string().len() < 400);
    }

    #[test]
    fn shown_for_people() {
        assert_eq!(format_size(0), "0 B");
        assert_eq!(format_size(1023), "1023 B");
        assert_eq!(format_size(4 << 30), "4 GiB");
        assert_eq!(format_size(1_610_612_735), "1.4 GiB");
        assert_eq!(format_duration(0), "0s");
        assert_eq!(format_duration(250), "250ms");
        assert_eq!(format_duration(62_345), "1m2.345s");
        assert_eq!(format_duration(5_400_000), "1h30m");
        assert_eq!(format_cpus(1500), "1.5");
        assert_eq!(format_cpus(2000), "2");
    }

    proptest! {
        #[test]
        fn nothing_panics(text in any::<String>()) {
            let _ = (parse_size(&text), parse_duration_ms(&text), parse_cpus(&text), parse_count(&text));
        }

        #[test]
        fn nearly_right_text_does_not_panic(text in "[0-9.]{0,30} ?(K|M|G|T|B|iB|ms|[dhms])?[0-9.]{0,30}[dhmsKB]{0,2}") {
            let _ = (parse_size(&text), parse_duration_ms(&text), parse_cpus(&text), parse_count(&text));
        }

        #[test]
        fn durations_round_trip(ms in any::<u64>()) {
            prop_assert_eq!(parse_duration_ms(&format_duration(ms)), Ok(ms));
        }

        #[test]
        fn cpus_round_trip(milli in any::<u64>()) {
            prop_assert_eq!(parse_cpus(&format_cpus(milli)), Ok(milli));
        }

        #[test]
        fn counts_round_trip(n in any::<u64>()) {
            prop_assert_eq!(parse_count(&n.to_string()), Ok(n));
            prop_assert_eq!(parse_size(&n.to_string()), Ok(n));
        }

        #[test]
        fn a_shown_size_reads_back_within_a_tenth_below(bytes in any::<u64>()) {
            let back = parse_size(&format_size(bytes)).unwrap();
            prop_assert!(back <= bytes);
            prop_assert!(u128::from(bytes - back) * 10 <= u128::from(bytes) + 10);
        }

        #[test]
        fn a_whole_unit_reads_back_exactly(n in 1u64..1024, unit in 0usize..4) {
            let bytes = n * SIZE_UNITS[unit].1;
            prop_assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
        }

        #[test]
        fn more_is_more(a in 0u64..1 << 50, b in 0u64..1 << 50, places in 0u32..4, unit in 0usize..5) {
            let write = |n: u64| match places {
                0 => format!("{n}{}", DURATION_UNITS[unit].0),
                _ => format!("{}.{:0width$}{}", n / 10u64.pow(places), n % 10u64.pow(places),
                             DURATION_UNITS[unit].0, width = places as usize),
            };
            if let (Ok(x), Ok(y)) = (parse_duration_ms(&write(a)), parse_duration_ms(&write(b))) {
                let (least, most) = if a <= b { (x, y) } else { (y, x) };
                prop_assert!(least <= most);
            }
        }
    }
}
