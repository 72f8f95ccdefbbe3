//! Sixty-four analyses at once on one machine. Four of them are bombs, and the other sixty have the right result.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use testkit::command::finish;
use testkit::trial;

use crate::deployment::TestDeployment;
use crate::report;

const GOOD: u64 = 60;
/// How many multiples of its own number each program adds up. No two programs have the same result.
const TERMS: u64 = 100_000;

trial!(Everyone, sixty_runs_succeed_beside_four_bombs);
fn sixty_runs_succeed_beside_four_bombs() {
    run_beside_four_bombs(&TestDeployment::sqlite("crowd"));
}

fn run_beside_four_bombs(deployment: &TestDeployment) {
    let bombs = [
        (
            "fork",
            json!(["sh", "-c", "b(){ b|b& };b; while :; do :; done"]),
            json!({"timeout": "15s", "pids": 100}),
        ),
        (
            "memory",
            json!([
                "python3",
                "-c",
                "x = []\nwhile True: x.append(b'x' * 10_000_000)"
            ]),
            json!({"memory": "256M"}),
        ),
        (
            "disk",
            json!(["sh", "-c", "while :; do cat /dev/zero > big; done"]),
            json!({"timeout": "15s", "disk": "64M"}),
        ),
        ("log", json!(["yes"]), json!({"timeout": "10s"})),
    ];
    let mut lines = Vec::new();
    for (name, command, limits) in bombs {
        lines.push(json!({
            "id": deployment.id(name), "command": command, "limits": limits, "retries": 0,
            // Without a delegated cgroup, Fumehood enforces a plain user's memory limit by watching it.
            "allow_degraded": ["memory"],
        }));
    }
    for number in 0..GOOD {
        // Each program sleeps in the middle of its work, so that all of them run at the same time.
        let program = format!(
            "import json, time\ns = sum(k * {number} for k in range({TERMS}))\ntime.sleep(4)\n\
             json.dump({{'sum': s}}, open('result.json', 'w'))"
        );
        lines.push(json!({
            "id": deployment.id(&number.to_string()), "command": ["python3", "-c", program], "retries": 0,
        }));
    }
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    let batch = deployment.test_home.write("batch.jsonl", text.join("\n"));
    let submit = deployment.fumehood(
        &deployment.machine,
        ["submit".as_ref(), "--from".as_ref(), batch.as_os_str()],
    );
    finish(submit).good();
    let slots = (GOOD + 4).to_string();
    let worker = [
        "worker",
        "-q",
        "--slots",
        &slots,
        "--memory",
        "20G",
        "--until-idle",
    ];
    finish(deployment.fumehood(&deployment.machine, worker)).good();

    let list = ["list", "--json", "--limit", "100"];
    let document = finish(deployment.fumehood(&deployment.machine, list)).document();
    let listed = document["analyses"].as_array().unwrap();
    let status: BTreeMap<&str, &str> = listed
        .iter()
        .map(|one| (one["id"].as_str().unwrap(), one["status"].as_str().unwrap()))
        .collect();
    assert_eq!(status.len() as u64, GOOD + 4, "{document}");
    for number in 0..GOOD {
        let id = deployment.id(&number.to_string());
        assert_eq!(status[id.as_str()], "succeeded", "{id}: {document}");
        let read = deployment.fumehood(
            &deployment.machine,
            ["outputs", &id, "result.json", "-o", "-"],
        );
        let result: Value = serde_json::from_str(&finish(read).good()).unwrap();
        assert_eq!(
            result["sum"],
            json!(number * (TERMS * (TERMS - 1) / 2)),
            "{id}"
        );
    }
    let told: Vec<String> = ["fork", "memory", "disk", "log"]
        .map(|name| format!("{name}: {}", status[deployment.id(name).as_str()]))
        .to_vec();
    assert_eq!(status[deployment.id("fork").as_str()], "timed_out");
    assert_eq!(status[deployment.id("memory").as_str()], "out_of_memory");
    assert!(
        ["timed_out", "failed", "limit_exceeded"].contains(&status[deployment.id("disk").as_str()])
    );
    assert_eq!(status[deployment.id("log").as_str()], "timed_out");
    report(&format!("64 at once: 60 correct; {}", told.join(", ")));
    deployment.test_home.assert_nothing_left();
}
