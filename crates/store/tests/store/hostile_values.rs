//! Names, messages, logs, JSON and times that a program chooses are stored as data and never interpreted.

use store::CommitOutcome;
use store::types::manifest::{Remark, RemarkedPath};

use crate::test_database::{TestAttempt, TestDatabase, key, log, output};

/// Each of these would end a literal, a statement or an identifier if it were not escaped.
const WORDS: [&str; 8] = [
    "'; DROP TABLE attempts; --",
    "\"; DELETE FROM outputs; --",
    "$1",
    "') ON CONFLICT DO NOTHING; --",
    "\\'; SELECT pg_sleep(100); --",
    "$$ $tag$",
    "%s %n {} ?1 :a @b",
    "/* */ \u{1b}[2J \u{202e} \u{7f} \u{fffd} \r\n\t",
];

on_both!(text_that_would_be_sql_is_text);
fn text_that_would_be_sql_is_text(test_database: &TestDatabase) {
    let mut store = test_database.store();
    for (number, word) in WORDS.into_iter().enumerate() {
        let id = format!("a{number}");
        let mut sample = TestAttempt::new(&id, &format!("{word}{number}"));
        sample.host = word.to_owned();
        sample.reason = word.to_owned();
        sample.message = Some(word.to_owned());
        sample.artifact_store = word.to_owned();
        sample.outputs = vec![output(word.replace('/', "_").as_bytes(), b"")];
        sample.outputs[0].media_type = word.to_owned();
        sample.remarks = vec![RemarkedPath {
            path: word.to_owned(),
            remark: Remark::Fifo,
        }];
        sample.logs = vec![log("stdout", word.as_bytes())];
        let json = serde_json::json!({ word: [word] }).to_string();
        sample.provenance = Some(json.clone());
        sample.notices = Some(json.clone());
        sample.result = Some(json);
        sample.begin(&mut store).unwrap();
        assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Now);
        assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Already);

        let shown = store.show(&id, None).unwrap();
        assert_eq!(shown.summary.message.as_deref(), Some(word));
        assert_eq!(shown.summary.reason.as_deref(), Some(word));
        assert_eq!(shown.summary.host, word);
        for json in [shown.result_json, shown.provenance_json, shown.notices_json] {
            let json: serde_json::Value = serde_json::from_str(&json.unwrap()).unwrap();
            assert_eq!(json[word][0], word);
        }
        let outputs = store.outputs(&id, 1).unwrap();
        assert_eq!(outputs[0].path, sample.outputs[0].path);
        assert_eq!(
            (
                outputs[0].media_type.as_str(),
                outputs[0].artifact_store.as_str()
            ),
            (word, word)
        );
        assert_eq!(
            store.log(&id, 1, "stdout").unwrap().unwrap().head,
            word.as_bytes()
        );
        assert!(store.log(&id, 1, word).unwrap().is_none());
        assert_eq!(store.remarks(&id, 1).unwrap().0[0].path_text, word);
        assert!(store.show(word, None).is_err());
        let mut referenced = 0;
        store
            .for_each_referenced_object(word, &mut |_| {
                referenced += 1;
                Ok(())
            })
            .unwrap();
        assert_eq!(referenced, 1);
        assert_eq!(store.unfinished(Some(word)).unwrap().len(), 0);
    }
    assert_eq!(
        test_database.sql("SELECT COUNT(*) FROM attempts"),
        [WORDS.len().to_string()]
    );
}

on_both!(nul_and_odd_characters_are_kept_or_escaped);
fn nul_and_odd_characters_are_kept_or_escaped(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut sample = TestAttempt::new("a", &key(1));
    sample.message = Some("a\0b".to_owned());
    sample.outputs = vec![output(b"\x01\xff\xfe\\x00 \xe2\x82", b"")];
    sample.outputs[0].media_type = "x\0y".to_owned();
    sample.logs = vec![log("stdout", b"\0\xff\x80\0")];
    sample.provenance = Some("{\"a\\u0000b\": \"\\u0000\", \"kept\": \"\\\\u0000\"}".to_owned());
    let mut content = |_: &_| Ok(Some(vec![0, 255, 0]));
    sample.begin(&mut store).unwrap();
    assert_eq!(
        sample
            .commit_with(&mut store, &mut content, &mut || Ok(()))
            .unwrap(),
        CommitOutcome::Now
    );
    let shown = store.show("a", None).unwrap();
    assert_eq!(shown.summary.message.as_deref(), Some("a\\x00b"));
    let provenance: serde_json::Value =
        serde_json::from_str(&shown.provenance_json.unwrap()).unwrap();
    assert_eq!(
        provenance,
        serde_json::json!({"a\\x00b": "\\x00", "kept": "\\u0000"})
    );
    let outputs = store.outputs("a", 1).unwrap();
    assert_eq!(outputs[0].path, sample.outputs[0].path);
    assert_eq!(
        store.output_content("a", 1, &outputs[0].path).unwrap(),
        Some(vec![0, 255, 0])
    );
    assert_eq!(
        store.log("a", 1, "stdout").unwrap().unwrap().head,
        b"\0\xff\x80\0"
    );
    let text = test_database.sql("SELECT path_text FROM outputs_v1");
    assert_eq!(text, ["\u{1}\\xff\\xfe\\\\x00 \\xe2\\x82"]);
}

on_both!(the_longest_path_that_is_collected_fits_the_key);
/// Regression: an index compresses values, so the path consists of bytes that do not compress.
fn the_longest_path_that_is_collected_fits_the_key(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let id = "i".repeat(64);
    let mut sample = TestAttempt::new(&id, &key(1));
    let mut noise: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut path = Vec::new();
    while path.len() < store::types::manifest::PATH_BYTES_MAX {
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        // The high bit is set, so the byte is neither NUL nor a slash.
        path.push((noise >> 32) as u8 | 0x80);
    }
    sample.outputs = vec![output(&path, b"x")];
    sample.begin(&mut store).unwrap();
    assert_eq!(sample.commit(&mut store).unwrap(), CommitOutcome::Now);
    assert_eq!(store.outputs(&id, 1).unwrap()[0].path.as_bytes(), path);
}

on_both!(results_that_a_database_refuses_cost_nothing);
fn results_that_a_database_refuses_cost_nothing(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let deep = "[".repeat(5_000) + &"]".repeat(5_000);
    let bad = [
        "\"\\u0000\"",
        "\"\\ud800\"",
        "1e400000",
        "1e-400000",
        "{",
        "",
        deep.as_str(),
    ];
    for (number, result) in bad.into_iter().enumerate() {
        let mut sample = TestAttempt::new(&format!("a{number}"), &key(number as u32));
        sample.result = Some(result.to_owned());
        assert_eq!(
            sample.record(&mut store).unwrap().1,
            CommitOutcome::Now,
            "{result:.20}"
        );
        let shown = store.show(&sample.id, None).unwrap();
        assert_eq!(shown.result_json, None);
        assert!(
            shown.result_note.is_some_and(|note| !note.is_empty()),
            "{result:.20}"
        );
    }
}

on_both!(huge_values_are_kept);
fn huge_values_are_kept(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut sample = TestAttempt::new("a", &key(1));
    let long = "x".repeat(3 << 20);
    sample.message = Some(long.clone());
    sample.logs = vec![log("stdout", &vec![7; 5 << 20])];
    let path = vec![b"d".repeat(200); 20].join(&b'/');
    sample.outputs = (0..20)
        .map(|n| output(format!("{n}").as_bytes(), b""))
        .collect();
    sample.outputs.push(output(&path, b""));
    sample.outputs[0].bytes = u64::MAX;
    let mut content = |_: &_| Ok(Some(vec![9; 1 << 20]));
    sample.outputs.sort_by(|a, b| a.path.cmp(&b.path));
    sample.begin(&mut store).unwrap();
    // The caller adds up the lengths, and with `u64::MAX` the sum would overflow.
    let mut small = sample.clone();
    small
        .outputs
        .iter_mut()
        .for_each(|o| o.bytes = o.bytes.min(1 << 40));
    assert_eq!(
        small
            .commit_with(&mut store, &mut content, &mut || Ok(()))
            .unwrap(),
        CommitOutcome::Now
    );
    assert_eq!(store.show("a", None).unwrap().summary.message, Some(long));
    assert_eq!(
        store.log("a", 1, "stdout").unwrap().unwrap().head.len(),
        5 << 20
    );
    let outputs = store.outputs("a", 1).unwrap();
    assert_eq!(outputs.len(), 21);
    for output in outputs {
        assert_eq!(
            store
                .output_content("a", 1, &output.path)
                .unwrap()
                .unwrap()
                .len(),
            1 << 20
        );
    }
}

on_both!(times_out_of_range_do_not_break_the_views);
fn times_out_of_range_do_not_break_the_views(test_database: &TestDatabase) {
    let mut store = test_database.store();
    let mut sample = TestAttempt::new("a", &key(1));
    let times = [
        i64::MIN,
        -62_135_596_800_001,
        0,
        253_402_300_799_999,
        i64::MAX,
    ];
    sample.outputs = times
        .into_iter()
        .enumerate()
        .map(|(n, ms)| {
            let mut output = output(format!("{n}").as_bytes(), b"");
            output.modified_ms = ms;
            output
        })
        .collect();
    sample.record(&mut store).unwrap();
    let seen =
        test_database.sql("SELECT path_text, modified_at FROM outputs_v1 ORDER BY path_text");
    assert_eq!(
        (seen[0].as_str(), seen[1].as_str(), seen[4].as_str()),
        ("0|", "1|", "4|")
    );
    assert!(
        seen[2].contains("1970-01-01") && seen[3].contains("9999-12-31"),
        "{seen:?}"
    );
    let kept: Vec<i64> = store
        .outputs("a", 1)
        .unwrap()
        .iter()
        .map(|o| o.modified_ms)
        .collect();
    assert_eq!(kept, times);
}
