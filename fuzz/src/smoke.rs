//! Runs the fuzz targets without a fuzzer, on seeds and a bounded number of mutations. The inputs are the same in every
//! run. It is for machines that have only a stable compiler; libFuzzer finds more (see CONTRIBUTING).

use fumehood_fuzz::TARGETS;

/// The number of mutated inputs for each target. The first argument overrides it.
const ROUNDS: u64 = 20_000;
const INPUT_BYTES_MAX: usize = 4096;

/// At least one valid input of each format, so that mutations get past the parsers' first checks.
const SEEDS: &[&[u8]] = &[
    b"",
    b"10GiB",
    b"1h30m15s250ms",
    b"1.5",
    b"gwas-7.x_y",
    b"#!/usr/bin/env -S python3 -u 'a b'\nprint(1)\n",
    b"#!/bin/sh\n'''exec' \"/long path/bin/python\" \"$0\" \"$@\"\n' '''\n",
    b"import os\n\0home = HOME/secrets\nbase-prefix = /usr\n\x003.11.2\nsystem\n",
    b"#!HOME/bin/python\n\0home = HOME\n\0../../..\n",
    b"FileNotFoundError: [Errno 2] No such file or directory: '/srv/ref/hg38.fa'\n",
    b"ModuleNotFoundError: No module named 'scipy.stats'\nOSError: [Errno 28] No space left on device\n",
    b"\x1b]0;title\x07\xff\xfe caf\xc3\xa9 \\x41 \r\n",
    b"3\x1b[1;31mred\x1b[0m\x1b[K\r 50 % \x1b[2J\x1b]52;c;aGk=\x07\xc2\x9b31m\xe2\x80\xae\n",
    b"import os, a.b as c\nfrom . import (x as y,\n z)\nfrom ..up import *\ns = 'import no'\n",
    b"timeout = \"20s\"\nmemory = 1e9\ncpus = 1.5\ndata = \"in\"\nenv = [\"A=1\"]\noutput = [\"*.csv\"]\n",
    b"[floor]\nlevel = \"full\"\nlayers = [\"seccomp\"]\n[ceilings]\nmemory = \"2G\"\n[read]\nroots = [\"/srv\"]\n[record]\ndb = \"sqlite:/srv/x\"\n[post_process]\ncommand = [\"/bin/true\"]\n",
    br#"{"init":{"pid":7}}"#,
    br#"{"failed":{"step":"ReceivePlan","errno":1,"detail":"y"}}"#,
    br#"{"ended":{"end":{"exit":{"code":0},"stop":null,"usage":{"wall_ms":1,"cpu_ms":1,"memory_peak_bytes":null,"pids_peak":1,"disk_bytes":0,"files":0,"oom_kills":0}},"alone":true}}"#,
    br#"{"spec":{"program":"/bin/sh","argv":["sh",[255,0]],"env":[["A","b"]],"workspace":"/tmp/x","workspace_kind":"disk","views":[{"source":"/srv","target":"/srv","exec":"refused","owner":"mapped","content":"data"}],"identity":{"leased":{"uid":5,"gid":5}},"limits":{"wall_ms":1,"cpu_ms":null,"idle_ms":null,"grace_ms":1,"memory_bytes":1,"cpu_milli":1,"pids":1,"open_files":1,"open_files_of_run":1,"tcp_bytes":1,"disk_bytes":1,"files":1,"log_bytes":1},"host_name":"h","terminal":"none","level":"landlock","shared_memory":"private","purpose":"run","required":["seccomp"],"disabled_layers":{}},"stdin":true,"attach_files":1,"group_directory":true,"cpu_counter":null,"oom_counter":true,"memory":"hard","pids":"watched","pin_to_cpus":1,"pinned_for_good":true}"#,
    br#"{"version":1,"id":"x","host":"h","boot_id":"b","runner_pid":1,"workspace":"/tmp/x","draft":"/tmp/y","workspace_is":{"device":1,"inode":2,"born":null},"uid":null,"cgroups":["/sys/fs/cgroup/x"],"state":"live"}"#,
];

/// A xorshift generator of pseudo-random numbers.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below.max(1) as u64) as usize
    }

    fn mutate(&mut self, input: &mut Vec<u8>) {
        let at = self.next(input.len() + 1);
        match self.next(6) {
            0 => input.truncate(at),
            1 => input.insert(at, self.next(256) as u8),
            2 if at < input.len() => input[at] ^= 1 << self.next(8),
            3 if at < input.len() => drop(input.remove(at)),
            4 => {
                let other = SEEDS[self.next(SEEDS.len())];
                let from = self.next(other.len() + 1);
                input.splice(at..at, other[from..].iter().copied());
            }
            _ => {
                let word: &[u8] = [
                    &b"/"[..],
                    b"..",
                    b"\0",
                    b"=",
                    b"9999999999999999999",
                    b"\xff",
                    b"\"",
                    b"\n",
                ][self.next(8)];
                input.splice(at..at, word.iter().copied());
            }
        }
        input.truncate(INPUT_BYTES_MAX);
    }
}

fn main() {
    let rounds = std::env::args()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or(ROUNDS);
    for (name, target) in TARGETS {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        // This target writes files, which takes a thousand times as long.
        let rounds = if *name == "runtime" {
            rounds / 20
        } else {
            rounds
        };
        let mut accepted = SEEDS.iter().filter(|seed| target(seed)).count() as u64;
        for _ in 0..rounds {
            let mut input = SEEDS[random.next(SEEDS.len())].to_vec();
            for _ in 0..1 + random.next(8) {
                random.mutate(&mut input);
            }
            let outcome = std::panic::catch_unwind(|| target(&input));
            match outcome {
                Ok(valid) => accepted += u64::from(valid),
                Err(_) => {
                    eprintln!("{name} fails on \"{}\"", input.escape_ascii());
                    std::process::exit(1);
                }
            }
        }
        println!(
            "{name}: {} inputs, {accepted} of them accepted",
            rounds + SEEDS.len() as u64
        );
        assert!(
            accepted > 0,
            "{name} accepts none of its inputs: update its seeds"
        );
    }
}
