//! Tests of the filter. A small BPF interpreter runs the compiled filter; a model that reads the table line by line,
//! and answers written by hand, give the expected results.
use super::assembler::{IF_ANY_BIT, IF_AT_LEAST, IF_EQUAL, JUMP, NATIVE_ARCH, RETURN, assemble};
use super::rule::{Action, CallRule, Clause, Test};
use super::*;
use proptest::prelude::*;

const fn namespaces(watch: u32) -> OuterConfinement {
    OuterConfinement::Namespaces {
        watch,
        uid: 1000,
        gid: 1001,
    }
}
const OPEN: FilterOptions = FilterOptions {
    fallocate: Fallocate::Allowed,
    affinity: Affinity::Free,
    connect: Connect::Kernel,
    outer: namespaces(WATCH_TID_DEFAULT),
};
const TIGHT: FilterOptions = FilterOptions {
    fallocate: Fallocate::Refused,
    affinity: Affinity::Fixed,
    connect: Connect::Brokered,
    outer: namespaces(7),
};
/// Level `landlock`, on a kernel whose Landlock does not cover signals and truncation, and on one whose Landlock
/// does.
const LANDLOCK_ABI_1: FilterOptions = FilterOptions {
    outer: OuterConfinement::Landlock { abi: 1 },
    ..TIGHT
};
const LANDLOCK_ABI_6: FilterOptions = FilterOptions {
    outer: OuterConfinement::Landlock { abi: 6 },
    ..TIGHT
};
const ALLOW: u32 = 0x7fff_0000;
const NOTIFY: u32 = 0x7fc0_0000;

const fn errno(errno: i32) -> u32 {
    0x0005_0000 | errno as u32
}
const EPERM: u32 = errno(libc::EPERM);
const ENOSYS: u32 = errno(libc::ENOSYS);

/// Upper halves of arguments, which the kernel ignores.
const GARBAGE: u64 = 0xdead_beef_0000_0000;

#[derive(Debug)]
struct RunResult {
    answer: u32,
    steps: usize,
    loaded_argument: bool,
}

/// Interprets classic BPF, as far as the filters use it.
fn run(program: &[Instruction], arch: u32, nr: u32, args: [u64; 6]) -> RunResult {
    let mut data = [0_u8; 64];
    data[0..4].copy_from_slice(&nr.to_le_bytes());
    data[4..8].copy_from_slice(&arch.to_le_bytes());
    for (i, arg) in args.iter().enumerate() {
        data[16 + 8 * i..24 + 8 * i].copy_from_slice(&arg.to_le_bytes());
    }
    let (mut at, mut accumulator, mut loaded_argument) = (0, 0_u32, false);
    for steps in 1..=program.len() {
        let Instruction { code, jt, jf, k } = program[at];
        at += 1;
        let skip = |holds| usize::from(if holds { jt } else { jf });
        match code {
            0x20 => {
                let from = k as usize;
                accumulator = u32::from_le_bytes(data[from..from + 4].try_into().unwrap());
                loaded_argument |= from >= 16;
            }
            0x54 => accumulator &= k,
            0x05 => at += k as usize,
            0x15 => at += skip(accumulator == k),
            0x35 => at += skip(accumulator >= k),
            0x45 => at += skip(accumulator & k != 0),
            0x06 => {
                return RunResult {
                    answer: k,
                    steps,
                    loaded_argument,
                };
            }
            other => panic!("instruction {other:#x} at {}", at - 1),
        }
    }
    panic!("the program does not return");
}

/// Evaluates the table line by line, without compiling it.
fn model(rules: &[(u32, CallRule)], nr: u32, args: [u64; 6]) -> u32 {
    let Some((_, rule)) = rules.iter().find(|(listed, _)| *listed == nr) else {
        return ENOSYS;
    };
    let holds = |test: &Test| match test {
        Test::AnyBit { arg, bits } => args[usize::from(*arg)] as u32 & bits != 0,
        Test::OneOf { arg, mask, values } => {
            values.contains(&(args[usize::from(*arg)] as u32 & mask))
        }
    };
    let decided = rule.clauses.iter().find(|c| c.tests.iter().all(holds));
    match decided.map_or(rule.otherwise, |clause| clause.action) {
        Action::Allow => ALLOW,
        Action::Notify => NOTIFY,
        Action::Errno(number) => errno(number),
    }
}

fn all_options() -> Vec<FilterOptions> {
    let mut all = Vec::new();
    for fallocate in [Fallocate::Allowed, Fallocate::Refused] {
        for affinity in [Affinity::Free, Affinity::Fixed] {
            for connect in [Connect::Kernel, Connect::Brokered] {
                all.push(FilterOptions {
                    fallocate,
                    affinity,
                    connect,
                    outer: namespaces(3),
                });
            }
        }
    }
    for abi in 1..=7 {
        for affinity in [Affinity::Free, Affinity::Fixed] {
            all.push(FilterOptions {
                affinity,
                outer: OuterConfinement::Landlock { abi },
                ..TIGHT
            });
        }
    }
    all
}

/// Returns every value that some rule compares with, and its neighbours.
fn compared_values(rules: &[(u32, CallRule)]) -> Vec<u32> {
    let mut values = vec![0, 1, u32::MAX];
    for test in rules
        .iter()
        .flat_map(|(_, r)| &r.clauses)
        .flat_map(|c| &c.tests)
    {
        match test {
            Test::AnyBit { bits, .. } => {
                values.extend((0..32).map(|bit| 1 << bit).filter(|bit| bits & bit != 0));
                values.push(!bits);
            }
            Test::OneOf {
                mask, values: some, ..
            } => {
                values.extend(
                    some.iter()
                        .flat_map(|v| [*v, v | !mask, v ^ 1, v | 0x8_0000]),
                );
            }
        }
    }
    values.sort();
    values.dedup();
    values
}

#[test]
fn the_table_is_well_formed() {
    for options in all_options() {
        let rules = rules(&options);
        assert!(
            rules.windows(2).all(|two| two[0].0 < two[1].0),
            "a call is listed twice"
        );
        assert!(rules.iter().all(|(nr, _)| *nr < 0x4000_0000));
        for test in rules
            .iter()
            .flat_map(|(_, r)| &r.clauses)
            .flat_map(|c| &c.tests)
        {
            match test {
                Test::AnyBit { arg, bits } => assert!(*arg < 6 && *bits != 0),
                Test::OneOf { arg, mask, values } => {
                    assert!(*arg < 6 && !values.is_empty());
                    assert!(
                        values.iter().all(|v| v & mask == *v),
                        "a value can never match"
                    );
                }
            }
        }
    }
}

/// What the kernel's own checker demands (bpf_check_classic, seccomp_check_filter).
#[test]
fn the_filter_passes_the_kernels_checks() {
    assert_eq!(size_of::<Instruction>(), 8);
    for options in all_options() {
        let program = build_filter(&options);
        assert!(program.len() < 4096, "{} instructions", program.len());
        assert_eq!(program.last().unwrap().code, RETURN);
        for (at, i) in program.iter().enumerate() {
            let furthest = match i.code {
                RETURN => continue,
                JUMP => i.k as usize,
                IF_EQUAL | IF_AT_LEAST | IF_ANY_BIT => usize::from(i.jt.max(i.jf)),
                _ => 0,
            };
            assert!(
                at + 1 + furthest < program.len(),
                "jump out of the program at {at}"
            );
        }
    }
}

#[test]
fn every_number_agrees_with_the_table() {
    for options in all_options() {
        let (program, rules) = (build_filter(&options), rules(&options));
        for nr in (0..1024).chain([0x4000_0000, u32::MAX]) {
            for args in [[0; 6], [u64::MAX; 6], [GARBAGE; 6], [1; 6]] {
                let result = run(&program, NATIVE_ARCH, nr, args);
                assert_eq!(
                    result.answer,
                    model(&rules, nr, args),
                    "call {nr} {args:x?}"
                );
            }
        }
    }
}

#[test]
fn every_compared_value_agrees_with_the_table() {
    for options in [OPEN, TIGHT] {
        let (program, rules) = (build_filter(&options), rules(&options));
        let values = compared_values(&rules);
        let checked = rules.iter().filter(|(_, rule)| !rule.clauses.is_empty());
        for (nr, arg) in checked.flat_map(|(nr, _)| (0..6).map(move |arg| (*nr, arg))) {
            for value in &values {
                let mut args = [GARBAGE | 1; 6];
                args[arg] = GARBAGE | u64::from(*value);
                let result = run(&program, NATIVE_ARCH, nr, args);
                assert_eq!(
                    result.answer,
                    model(&rules, nr, args),
                    "call {nr} {args:x?}"
                );
            }
        }
    }
}

/// Returns values of one argument that lie on, beside and across every boundary of the rule's tests of this argument.
fn boundary_values(rule: &CallRule, arg: u8) -> Vec<u32> {
    let mut found = vec![0, 1, u32::MAX];
    let tests = rule.clauses.iter().flat_map(|clause| &clause.tests);
    for test in tests.filter(|test| test.arg() == arg) {
        match test {
            Test::AnyBit { bits, .. } => {
                found.extend((0..32).map(|bit| 1 << bit).filter(|bit| bits & bit != 0));
                found.extend([*bits, !bits, bits.wrapping_sub(1), bits.wrapping_add(1)]);
            }
            Test::OneOf { mask, values, .. } => {
                for value in values {
                    found.extend([*value, value.wrapping_sub(1), value.wrapping_add(1)]);
                    found.extend([value ^ 1, value | !mask, value | 0x8000_0000]);
                }
                if *mask != u32::MAX {
                    let bits = (0..32).map(|bit| 1 << bit);
                    found.extend(bits.map(|bit| values[0] ^ bit));
                }
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// The compiler skips loads and tests whose result follows from an earlier test on the same path. This test therefore
/// runs every combination of boundary values of all arguments that a rule reads, for every rule of every filter.
#[test]
fn every_combination_of_compared_values_agrees_with_the_table() {
    let mut checked: Vec<CallRule> = Vec::new();
    for options in all_options().into_iter().chain([OPEN, TIGHT]) {
        let (program, rules) = (build_filter(&options), rules(&options));
        for (nr, rule) in rules.iter().filter(|(_, rule)| !rule.clauses.is_empty()) {
            let tests = rule.clauses.iter().flat_map(|clause| &clause.tests);
            let args: std::collections::BTreeSet<u8> = tests.map(Test::arg).collect();
            let values: Vec<(usize, Vec<u32>)> = args
                .iter()
                .map(|arg| (usize::from(*arg), boundary_values(rule, *arg)))
                .collect();
            let combinations: usize = values.iter().map(|(_, values)| values.len()).product();
            let only = [(*nr, rule.clone())];
            for combination in 0..combinations {
                let (mut six, mut rest) = ([GARBAGE | 2; 6], combination);
                for (arg, values) in &values {
                    six[*arg] = GARBAGE | u64::from(values[rest % values.len()]);
                    rest /= values.len();
                }
                let result = run(&program, NATIVE_ARCH, *nr, six);
                assert_eq!(result.answer, model(&only, *nr, six), "call {nr} {six:x?}");
            }
            checked.push(rule.clone());
        }
    }
    assert!(checked.len() > 100, "only {} rules", checked.len());
}

/// Every instruction of the filter takes the kernel time in every run.
#[test]
fn the_filter_is_short() {
    for (options, most) in [(TIGHT, 460), (LANDLOCK_ABI_6, 460)] {
        let length = build_filter(&options).len();
        assert!(length <= most, "{length} instructions");
    }
}

#[test]
fn unconditional_calls_load_no_argument_and_take_few_steps() {
    for options in all_options() {
        let program = build_filter(&options);
        for (nr, rule) in rules(&options) {
            let result = run(&program, NATIVE_ARCH, nr, [0; 6]);
            if rule.clauses.is_empty() {
                assert!(!result.loaded_argument, "call {nr}");
                assert!(result.steps <= 16, "call {nr}: {} steps", result.steps);
            }
        }
    }
}

#[test]
fn a_foreign_abi_has_no_calls() {
    const AUDIT_ARCH_I386: u32 = 0x4000_0003;
    const AUDIT_ARCH_ARM: u32 = 0x4000_0028;
    let program = build_filter(&OPEN);
    for nr in 0..1024 {
        for arch in [
            AUDIT_ARCH_I386,
            AUDIT_ARCH_ARM,
            0,
            u32::MAX,
            NATIVE_ARCH ^ 1,
        ] {
            assert_eq!(run(&program, arch, nr, [0; 6]).answer, ENOSYS);
        }
        for bit in 10..32 {
            let result = run(&program, NATIVE_ARCH, nr | 1 << bit, [0; 6]);
            assert_eq!(
                result.answer, ENOSYS,
                "call {nr:#x} with bit {bit} (30 is x32)"
            );
        }
    }
}

/// Runs one call, with and without garbage in the upper halves of its arguments.
#[track_caller]
fn expect(options: FilterOptions, nr: libc::c_long, args: &[u64], answer: u32) {
    let program = build_filter(&options);
    for above in [0, GARBAGE] {
        let mut six = [above; 6];
        for (to, arg) in six.iter_mut().zip(args) {
            *to |= arg & 0xffff_ffff;
        }
        let result = run(&program, NATIVE_ARCH, nr as u32, six);
        assert_eq!(
            result.answer, answer,
            "got {:#x}, want {answer:#x}: call {nr} {six:x?}",
            result.answer
        );
    }
}

// From here on the expected answers and the arguments are written by hand, from the manual pages and the kernel's
// headers. They do not come from the table.

#[test]
fn the_options_decide_their_calls() {
    let cases = [
        (libc::SYS_fallocate, ALLOW, errno(libc::EOPNOTSUPP)),
        (libc::SYS_sched_setaffinity, ALLOW, EPERM),
        (libc::SYS_connect, ALLOW, NOTIFY),
    ];
    for (nr, open, tight) in cases {
        expect(OPEN, nr, &[], open);
        expect(TIGHT, nr, &[], tight);
    }
}

#[rustfmt::skip]
#[test]
fn some_calls_are_refused_or_absent_or_ignored() {
    let refused = [
        libc::SYS_unshare, libc::SYS_setns, libc::SYS_mount, libc::SYS_umount2, libc::SYS_pivot_root,
        libc::SYS_chroot, libc::SYS_move_mount, libc::SYS_open_tree, libc::SYS_fsopen, libc::SYS_fsconfig,
        libc::SYS_fsmount, libc::SYS_fspick, libc::SYS_mount_setattr, libc::SYS_bpf,
        libc::SYS_perf_event_open, libc::SYS_userfaultfd, libc::SYS_add_key, libc::SYS_request_key,
        libc::SYS_keyctl, libc::SYS_ptrace, libc::SYS_process_vm_readv, libc::SYS_process_vm_writev,
        libc::SYS_process_madvise, libc::SYS_kcmp, libc::SYS_pidfd_getfd, libc::SYS_init_module,
        libc::SYS_finit_module, libc::SYS_delete_module, libc::SYS_kexec_load, libc::SYS_reboot,
        libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_acct, libc::SYS_quotactl, libc::SYS_quotactl_fd,
        libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_clock_adjtime, libc::SYS_adjtimex,
        libc::SYS_syslog, libc::SYS_open_by_handle_at, libc::SYS_name_to_handle_at,
        libc::SYS_fanotify_init, libc::SYS_fanotify_mark, libc::SYS_lookup_dcookie, libc::SYS_vhangup,
        libc::SYS_sethostname, libc::SYS_setdomainname, libc::SYS_sched_setattr, 467, 469,
    ];
    let absent = [
        libc::SYS_clone3, libc::SYS_openat2, libc::SYS_io_uring_setup, libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register, libc::SYS_memfd_secret, 457, 458, 459, 460, 461, 470, 999,
    ];
    for options in [OPEN, TIGHT] {
        refused
            .iter()
            .for_each(|nr| expect(options, *nr, &[], EPERM));
        absent
            .iter()
            .for_each(|nr| expect(options, *nr, &[], ENOSYS));
        expect(options, libc::SYS_sync, &[], errno(0));
        expect(options, libc::SYS_syncfs, &[1], errno(0));
    }
}

#[test]
fn clone_makes_no_namespace() {
    for flag in [
        0x2_0000,
        0x200_0000,
        0x400_0000,
        0x800_0000,
        0x1000_0000,
        0x2000_0000,
        0x4000_0000_u64,
    ] {
        expect(OPEN, libc::SYS_clone, &[flag | 17], EPERM);
    }
    expect(OPEN, libc::SYS_clone, &[0x8000 | 17], EPERM); // CLONE_PARENT
    expect(OPEN, libc::SYS_clone, &[17], ALLOW); // fork
    expect(OPEN, libc::SYS_clone, &[0x003d_0f00], ALLOW); // pthread_create
    expect(OPEN, libc::SYS_clone, &[0x003d_0d00], EPERM); // without CLONE_FS
    expect(OPEN, libc::SYS_clone, &[0x003d_0b00], EPERM); // without CLONE_FILES
    expect(OPEN, libc::SYS_clone, &[0x4111], ALLOW); // posix_spawn
    expect(OPEN, libc::SYS_clone, &[0x80], ALLOW); // part of the exit signal here, not CLONE_NEWTIME
}

#[test]
fn sockets_are_of_known_kinds() {
    const FLAGS: u64 = 0o2_004_000; // SOCK_CLOEXEC | SOCK_NONBLOCK
    let no_family = errno(libc::EAFNOSUPPORT);
    let no_protocol = errno(libc::EPROTONOSUPPORT);
    // domain, type, protocol, answer without a broker, answer with one
    let cases = [
        (1, 1, 0, ALLOW, ALLOW),
        (1, 5, 0, ALLOW, ALLOW),
        (1, 2, 0, ALLOW, ALLOW),
        (1, 3, 0, ALLOW, ALLOW),
        (2, 1, 0, ALLOW, ALLOW),
        (2, 1, 6, ALLOW, ALLOW),
        (2, 2, 0, ALLOW, ALLOW),
        (10, 2, 17, ALLOW, ALLOW),
        (10, 1, 0, ALLOW, ALLOW),
        (2, 1, 132, no_protocol, no_protocol),
        (2, 1, 262, no_protocol, no_protocol),
        (2, 2, 1, no_protocol, no_protocol),
        (2, 3, 1, EPERM, EPERM),
        (10, 3, 58, EPERM, EPERM),
        (2, 5, 132, no_protocol, no_protocol),
        (2, 10, 3, no_protocol, no_protocol),
        (16, 3, 0, ALLOW, NOTIFY),
        (16, 2, 0, ALLOW, NOTIFY),
        (16, 3, 12, no_protocol, no_protocol),
        (16, 3, 15, no_protocol, no_protocol),
        (0, 1, 0, no_family, no_family),
        (17, 3, 0, no_family, no_family),
        (38, 5, 0, no_family, no_family),
        (40, 1, 0, no_family, no_family),
    ];
    for (domain, kind, protocol, open, brokered) in cases {
        for flags in [0, FLAGS] {
            expect(
                OPEN,
                libc::SYS_socket,
                &[domain, kind | flags, protocol],
                open,
            );
            expect(
                TIGHT,
                libc::SYS_socket,
                &[domain, kind | flags, protocol],
                brokered,
            );
        }
    }
    expect(TIGHT, libc::SYS_socketpair, &[1, 1 | FLAGS, 0], ALLOW);
    expect(TIGHT, libc::SYS_socketpair, &[1, 5, 0], ALLOW);
    expect(TIGHT, libc::SYS_socketpair, &[1, 2 | FLAGS, 0], ALLOW);
    expect(
        LANDLOCK_ABI_6,
        libc::SYS_socketpair,
        &[1, 2 | FLAGS, 0],
        no_protocol,
    );
    expect(OPEN, libc::SYS_socketpair, &[1, 2, 0], ALLOW);
    expect(OPEN, libc::SYS_socketpair, &[30, 1, 0], no_family);
    for option in [26, 50, 51, 52] {
        expect(OPEN, libc::SYS_setsockopt, &[3, 1, option], EPERM);
    }
    expect(
        OPEN,
        libc::SYS_setsockopt,
        &[3, 6, 31],
        errno(libc::ENOPROTOOPT),
    );
    expect(OPEN, libc::SYS_setsockopt, &[3, 1, 2], ALLOW); // SO_REUSEADDR
    for buffer in [7, 8 | GARBAGE] {
        expect(TIGHT, libc::SYS_setsockopt, &[3, 1, buffer], NOTIFY);
        expect(
            LANDLOCK_ABI_6,
            libc::SYS_setsockopt,
            &[3, 1, buffer],
            errno(0),
        );
    }
    for forced in [32, 33] {
        expect(TIGHT, libc::SYS_setsockopt, &[3, 1, forced], EPERM);
    }
    expect(OPEN, libc::SYS_setsockopt, &[3, 6, 1], ALLOW); // TCP_NODELAY
}

#[test]
fn sends_that_may_name_an_address_are_notified() {
    for (options, answer) in [(OPEN, ALLOW), (TIGHT, NOTIFY), (LANDLOCK_ABI_6, ALLOW)] {
        expect(options, libc::SYS_sendto, &[3, 1, 1, 0, 0, 0], ALLOW);
        // An address whose lower half is zero is still an address.
        let high = 1 << 32;
        expect(options, libc::SYS_sendto, &[3, 1, 1, 0, high, 110], answer);
        expect(options, libc::SYS_sendto, &[3, 1, 1, 0, 0, 1], answer);
        // The kernel uses the low half of the length, so this call names no address.
        expect(options, libc::SYS_sendto, &[3, 1, 1, 0, 7, GARBAGE], ALLOW);
        expect(options, libc::SYS_sendmsg, &[3, 0, 0], answer);
        expect(options, libc::SYS_sendmmsg, &[3, 0, 0, 0], answer);
    }
    // Threads share descriptors; processes must not.
    expect(TIGHT, libc::SYS_clone, &[0x400 | 17], EPERM);
    expect(TIGHT, libc::SYS_clone, &[0x400 | 0x100 | 17], EPERM);
}

#[test]
fn ids_of_others_are_refused_as_the_kernel_would() {
    const UNCHANGED: u64 = 0xffff_ffff;
    let (uid, gid) = (1000 | GARBAGE, 1001 | GARBAGE);
    expect(OPEN, libc::SYS_setuid, &[uid], ALLOW);
    expect(OPEN, libc::SYS_setuid, &[0], EPERM);
    expect(OPEN, libc::SYS_setuid, &[gid], EPERM);
    expect(OPEN, libc::SYS_setgid, &[gid], ALLOW);
    expect(OPEN, libc::SYS_setregid, &[UNCHANGED, gid], ALLOW);
    expect(OPEN, libc::SYS_setregid, &[gid, 0], EPERM);
    expect(OPEN, libc::SYS_setresuid, &[uid, UNCHANGED, uid], ALLOW);
    expect(OPEN, libc::SYS_setresuid, &[uid, uid, 0], EPERM);
    expect(OPEN, libc::SYS_fchown, &[3, uid, gid], ALLOW);
    expect(OPEN, libc::SYS_fchown, &[3, UNCHANGED, 0], EPERM);
    expect(OPEN, libc::SYS_fchownat, &[3, 0, uid, UNCHANGED, 0], ALLOW);
    expect(OPEN, libc::SYS_fchownat, &[3, 0, 0, gid, 0], EPERM);
    expect(LANDLOCK_ABI_6, libc::SYS_setuid, &[0], ALLOW);
}

#[test]
fn no_file_becomes_set_id_or_a_device() {
    for mode in [0o4755, 0o2755, 0o6000, 0o104_644_u64] {
        expect(OPEN, libc::SYS_fchmod, &[3, mode], EPERM);
        expect(OPEN, libc::SYS_fchmodat, &[3, 0, mode], EPERM);
        expect(OPEN, 452, &[3, 0, mode, 0], EPERM);
        expect(OPEN, libc::SYS_openat, &[3, 0, 0o101, mode], EPERM);
        expect(OPEN, libc::SYS_openat, &[3, 0, 0o20_200_002, mode], EPERM);
        expect(OPEN, libc::SYS_openat, &[3, 0, 0o20_000_002, mode], EPERM);
        expect(OPEN, libc::SYS_openat, &[3, 0, 0o200_000, mode], ALLOW); // a mode that is not used
        expect(OPEN, libc::SYS_mknodat, &[3, 0, mode], EPERM);
    }
    for mode in [0, 0o644, 0o1777] {
        expect(OPEN, libc::SYS_fchmod, &[3, mode], ALLOW);
        expect(OPEN, libc::SYS_fchmodat, &[3, 0, mode], ALLOW);
        expect(OPEN, libc::SYS_openat, &[3, 0, 0o101, mode], ALLOW);
        expect(OPEN, libc::SYS_mknodat, &[3, 0, mode], ALLOW);
        expect(OPEN, libc::SYS_mknodat, &[3, 0, 0o10_000 | mode], ALLOW); // a FIFO
        expect(OPEN, libc::SYS_mknodat, &[3, 0, 0o20_000 | mode], EPERM); // a character device
        expect(OPEN, libc::SYS_mknodat, &[3, 0, 0o60_000 | mode], EPERM); // a block device
    }
    expect(
        OPEN,
        libc::SYS_renameat2,
        &[3, 0, 3, 0, 4],
        errno(libc::EINVAL),
    );
    expect(OPEN, libc::SYS_renameat2, &[3, 0, 3, 0, 1], ALLOW);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn the_older_forms_follow_the_same_rules() {
    expect(OPEN, libc::SYS_chmod, &[0, 0o4755], EPERM);
    expect(OPEN, libc::SYS_chmod, &[0, 0o755], ALLOW);
    expect(OPEN, libc::SYS_creat, &[0, 0o2755], EPERM);
    expect(OPEN, libc::SYS_creat, &[0, 0o755], ALLOW);
    expect(OPEN, libc::SYS_open, &[0, 0o101, 0o4755], EPERM);
    expect(OPEN, libc::SYS_open, &[0, 0, 0o4755], ALLOW);
    expect(OPEN, libc::SYS_mknod, &[0, 0o20_644], EPERM);
    expect(OPEN, libc::SYS_mknod, &[0, 0o10_644], ALLOW);
    for nr in [libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt] {
        expect(OPEN, nr, &[], EPERM);
    }
    for nr in [
        libc::SYS_uselib,
        libc::SYS__sysctl,
        libc::SYS_ustat,
        libc::SYS_sysfs,
        libc::SYS_nfsservctl,
    ] {
        expect(OPEN, nr, &[], ENOSYS);
    }
}

#[rustfmt::skip]
#[test]
fn ioctls_are_of_known_kinds() {
    // TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD; the setters of flags, version and project id; SIOCSIFFLAGS,
    // SIOCBRADDBR.
    for command in [
        0x5412, 0x541c, 0x541d, 0x5423, 0x4008_6602, 0x4004_6602, 0x4008_7602, 0x4004_7602, 0x401c_5820,
        0x8914, 0x89a0,
    ] {
        expect(OPEN, libc::SYS_ioctl, &[0, command], EPERM);
    }
    // TCGETS, TCSETS, TIOCSCTTY, TIOCGPGRP, TIOCSPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, TIOCNOTTY, FIOCLEX, TIOCGPTN,
    // TIOCSPTLCK; FICLONE, FS_IOC_GETFLAGS, FS_IOC_FSGETXATTR, FS_IOC_FIEMAP; SIOCGIFCONF.
    for command in [
        0x5401, 0x5402, 0x540e, 0x540f, 0x5410, 0x5413, 0x541b, 0x5421, 0x5422, 0x5451, 0x8004_5430,
        0x4004_5431, 0x4004_9409, 0x8008_6601, 0x801c_581f, 0xc020_660b, 0x8912,
    ] {
        expect(OPEN, libc::SYS_ioctl, &[0, command], ALLOW);
    }
    // BTRFS_IOC_SUBVOL_CREATE, FS_IOC_RESVSP64, FS_IOC_ENABLE_VERITY, FS_IOC_ADD_ENCRYPTION_KEY, VT_ACTIVATE,
    // KDSKBENT, FIBMAP.
    for command in [
        0x5000_940e, 0x4030_582a, 0x4080_6685, 0xc050_6617, 0x5606, 0x4b47, 1,
    ] {
        expect(OPEN, libc::SYS_ioctl, &[0, command], errno(libc::ENOTTY));
    }
}

/// Level `landlock`: the rules for the host's own files, sockets and processes.
#[test]
fn level_landlock_refuses_or_proxies_what_landlock_does_not_cover() {
    let closed = errno(libc::EACCES);
    for options in [LANDLOCK_ABI_6, LANDLOCK_ABI_1] {
        for domain in [1, 2, 10, 16] {
            expect(options, libc::SYS_socket, &[domain, 1, 0], closed);
        }
        expect(
            options,
            libc::SYS_socket,
            &[40, 1, 0],
            errno(libc::EAFNOSUPPORT),
        );
        expect(options, libc::SYS_socketpair, &[1, 1, 0], ALLOW);
        expect(
            options,
            libc::SYS_socketpair,
            &[1, 2, 0],
            errno(libc::EPROTONOSUPPORT),
        );
        for nr in [
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_listen,
            libc::SYS_accept4,
        ] {
            expect(options, nr, &[3], closed);
        }
        expect(options, libc::SYS_fchmod, &[3, 0o644], NOTIFY);
        expect(options, libc::SYS_fchmod, &[3, 0o4644], EPERM);
        expect(options, libc::SYS_utimensat, &[3, 0, 0, 0], NOTIFY);
        expect(options, libc::SYS_fchown, &[3, 1, 1], EPERM);
        expect(options, libc::SYS_fsetxattr, &[3], errno(libc::EOPNOTSUPP));
        for nr in [
            libc::SYS_shmget,
            libc::SYS_mq_open,
            libc::SYS_inotify_add_watch,
        ] {
            expect(options, nr, &[], ENOSYS);
        }
        expect(options, libc::SYS_prlimit64, &[0, 7], ALLOW);
        expect(options, libc::SYS_prlimit64, &[4711, 7], EPERM);
        expect(options, libc::SYS_setpriority, &[0, 0], ALLOW);
        expect(options, libc::SYS_setpriority, &[0, 4711], EPERM);
        expect(options, libc::SYS_setpriority, &[2, 0], EPERM);
        // SIOCGIFCONF; SIOCATMARK.
        expect(options, libc::SYS_ioctl, &[3, 0x8912], EPERM);
        expect(options, libc::SYS_ioctl, &[3, 0x8905], ALLOW);
        // PR_SET_DUMPABLE: 0 would hide the process from the guardian, 1 does not.
        expect(options, libc::SYS_prctl, &[4, 0], EPERM);
        expect(options, libc::SYS_prctl, &[4, 1], ALLOW);
    }
    for nr in [
        libc::SYS_kill,
        libc::SYS_tgkill,
        libc::SYS_tkill,
        libc::SYS_truncate,
    ] {
        expect(LANDLOCK_ABI_1, nr, &[1, 9], NOTIFY);
        expect(LANDLOCK_ABI_6, nr, &[1, 9], ALLOW);
    }
    for nr in [libc::SYS_pidfd_send_signal, libc::SYS_rt_sigqueueinfo] {
        expect(LANDLOCK_ABI_1, nr, &[1, 9], EPERM);
        expect(LANDLOCK_ABI_6, nr, &[1, 9], ALLOW);
    }
    for (flags, answer) in [
        (0o1000, closed),
        (0o1003, closed),
        (0o1002, ALLOW),
        (0, ALLOW),
    ] {
        expect(LANDLOCK_ABI_1, libc::SYS_openat, &[3, 0, flags, 0], answer);
        expect(LANDLOCK_ABI_6, libc::SYS_openat, &[3, 0, flags, 0], ALLOW);
    }
    // F_SETOWN, FIOSETOWN.
    expect(LANDLOCK_ABI_1, libc::SYS_fcntl, &[3, 8, 1], EPERM);
    expect(LANDLOCK_ABI_1, libc::SYS_ioctl, &[3, 0x8901], EPERM);
    expect(LANDLOCK_ABI_6, libc::SYS_fcntl, &[3, 8, 1], ALLOW);
}

#[test]
fn personality_prctl_scheduling_and_fcntl_are_restricted() {
    for allowed in [0, 0xffff_ffff, 0x4_0000] {
        expect(OPEN, libc::SYS_personality, &[allowed], ALLOW);
    }
    for refused in [8, 0x40_0000, 0x10_0000, 0x44_0000, 0x4_0008] {
        expect(OPEN, libc::SYS_personality, &[refused], EPERM);
    }
    for option in [
        1,
        3,
        4,
        15,
        16,
        21,
        29,
        36,
        38,
        41,
        0x5356_4d41,
        0x5961_6d61,
    ] {
        expect(OPEN, libc::SYS_prctl, &[option], ALLOW);
    }
    for option in [8, 24, 26, 28, 31, 32, 33, 35, 57, 59, 62, 67] {
        expect(OPEN, libc::SYS_prctl, &[option], EPERM);
    }
    for option in [0, 9, 77, 78, 500, 0xffff_ffff] {
        expect(OPEN, libc::SYS_prctl, &[option], errno(libc::EINVAL));
    }
    expect(TIGHT, libc::SYS_prctl, &[22, 2], errno(libc::EINVAL));
    for flags in [0, 1 | 4, 8, 1 | 8 | 16 | 32] {
        expect(TIGHT, libc::SYS_seccomp, &[1, flags], errno(libc::EINVAL));
    }
    expect(OPEN, libc::SYS_prlimit64, &[0, 7], ALLOW);
    expect(OPEN, libc::SYS_prlimit64, &[1, 0], EPERM);
    for (policy, answer) in [
        (0, ALLOW),
        (3, ALLOW),
        (5, ALLOW),
        (1, EPERM),
        (2, EPERM),
        (6, EPERM),
    ] {
        expect(OPEN, libc::SYS_sched_setscheduler, &[0, policy], answer);
        expect(
            OPEN,
            libc::SYS_sched_setscheduler,
            &[0, policy | 0x4000_0000],
            answer,
        );
    }
    expect(OPEN, libc::SYS_fcntl, &[3, 1024, 0], EPERM);
    expect(OPEN, libc::SYS_fcntl, &[3, 1040, 0], EPERM);
    expect(OPEN, libc::SYS_fcntl, &[3, 1026, 1], errno(libc::EINVAL)); // F_NOTIFY
    for command in [0, 1, 2, 3, 4, 5, 6, 7, 8, 36, 37, 38, 1030, 1031, 1033] {
        expect(OPEN, libc::SYS_fcntl, &[3, command, 1], ALLOW);
    }
}

#[test]
fn memory_is_charged_and_not_merged() {
    let empty_pool = errno(libc::ENOMEM);
    // MAP_PRIVATE | MAP_ANONYMOUS; then with MAP_HUGETLB, also with a huge page size.
    expect(OPEN, libc::SYS_mmap, &[0, 4096, 3, 0x22], ALLOW);
    for flags in [0x4_0022, 0x4_0001, 0x5404_0022] {
        expect(OPEN, libc::SYS_mmap, &[0, 4096, 3, flags], empty_pool);
    }
    expect(OPEN, libc::SYS_memfd_create, &[0, 1 | 2 | 8], ALLOW);
    expect(OPEN, libc::SYS_memfd_create, &[0, 4], errno(libc::EINVAL));
    expect(OPEN, libc::SYS_shmget, &[0, 4096, 0o1600], ALLOW);
    expect(OPEN, libc::SYS_shmget, &[0, 4096, 0o5600], EPERM);
    for advice in [0, 4, 8, 13, 14, 25] {
        expect(OPEN, libc::SYS_madvise, &[0, 4096, advice], ALLOW);
    }
    expect(OPEN, libc::SYS_madvise, &[0, 4096, 12], errno(libc::EINVAL));
    for options in [OPEN, LANDLOCK_ABI_6] {
        expect(options, libc::SYS_mbind, &[], EPERM);
        expect(options, libc::SYS_set_mempolicy_home_node, &[], ENOSYS);
        expect(options, libc::SYS_set_mempolicy, &[3], ALLOW);
        expect(options, libc::SYS_inotify_init1, &[0], ENOSYS);
        expect(options, libc::SYS_inotify_add_watch, &[3], ENOSYS);
    }
}

#[test]
fn sends_and_options_that_store_data_outside_socket_buffers_are_refused() {
    let no_option = errno(libc::ENOPROTOOPT);
    for (nr, at) in [
        (libc::SYS_sendto, 3),
        (libc::SYS_sendmsg, 2),
        (libc::SYS_sendmmsg, 3),
    ] {
        for (flags, answer) in [
            (0, ALLOW),
            (0x4000 | 0x40, ALLOW), // MSG_NOSIGNAL | MSG_DONTWAIT
            (0x8000, errno(libc::EOPNOTSUPP)),
            (0x2000_4000, errno(libc::EOPNOTSUPP)),
        ] {
            let mut args = [0; 4];
            args[at] = flags;
            expect(OPEN, nr, &args, answer);
        }
    }
    expect(OPEN, libc::SYS_splice, &[3, 0, 4, 0, 1, 3], ALLOW);
    let more = [3, 0, 4, 0, 1, 4 | 2]; // SPLICE_F_MORE
    expect(OPEN, libc::SYS_splice, &more, errno(libc::EINVAL));
    for (level, option, answer) in [
        (1, 37, no_option),
        (1, 65, no_option),
        (1, 60, errno(libc::EOPNOTSUPP)),
        (0, 11, errno(0)),
        (41, 25, errno(0)),
        (0, 35, errno(libc::ENODEV)),
        (41, 20, errno(libc::ENODEV)),
        (41, 42, errno(libc::ENODEV)),
        (6, 14, no_option),
        (6, 38, no_option),
        (6, 30, no_option),
        (17, 1, no_option),
        (41, 24, no_option), // IPV6_MTU
        (17, 103, ALLOW),    // UDP_SEGMENT
        (41, 26, ALLOW),     // IPV6_V6ONLY
        (0, 1, ALLOW),       // IP_TOS
        (6, 3, ALLOW),       // TCP_CORK
        (1, 29, ALLOW),      // SO_TIMESTAMP
    ] {
        expect(OPEN, libc::SYS_setsockopt, &[3, level, option], answer);
    }
}

type Compiled = (Vec<Instruction>, Vec<(u32, CallRule)>, Vec<u32>);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// Arguments come from the values that the rules compare with, and from the whole range.
    #[test]
    fn random_calls_agree_with_the_table(
        nr in prop_oneof![0_u32..512, any::<u32>()],
        picks in any::<[prop::sample::Index; 6]>(),
        wild in any::<[u64; 6]>(),
        choose in any::<[bool; 6]>(),
        which in 0_usize..4,
    ) {
        thread_local! {
            static COMPILED: [Compiled; 4] = [OPEN, TIGHT, LANDLOCK_ABI_1, LANDLOCK_ABI_6].map(|options| {
                let rules = rules(&options);
                let values = compared_values(&rules);
                (build_filter(&options), rules, values)
            });
        }
        COMPILED.with(|compiled| {
            let (program, rules, values) = &compiled[which];
            let args = std::array::from_fn(|i| match choose[i] {
                true => wild[i] & GARBAGE | u64::from(*picks[i].get(values)),
                false => wild[i],
            });
            prop_assert_eq!(run(program, NATIVE_ARCH, nr, args).answer, model(rules, nr, args));
            Ok(())
        })?;
    }
}

/// Values, masks and arguments are few and small, so that the tests of a random rule often overlap, imply or contradict
/// each other.
fn any_test() -> impl Strategy<Value = Test> {
    let mask = || {
        prop_oneof![
            3 => Just(u32::MAX),
            2 => 0_u32..8,
            1 => any::<u32>(),
        ]
    };
    let value = prop_oneof![8 => 0_u32..8, 1 => Just(u32::MAX - 1), 1 => Just(u32::MAX)];
    let values = prop::collection::vec(value, 1..6);
    prop_oneof![
        3 => (0_u8..3, mask(), values).prop_map(|(arg, mask, values)| Test::OneOf { arg, mask, values }),
        1 => (0_u8..3, mask()).prop_map(|(arg, bits)| Test::AnyBit { arg, bits }),
        1 => (0_u8..3, mask()).prop_map(|(arg, mask)| Test::OneOf { arg, mask, values: vec![0] }),
    ]
}

fn any_rule() -> impl Strategy<Value = CallRule> {
    let action = || {
        prop_oneof![
            Just(Action::Allow),
            Just(Action::Notify),
            (0_i32..4).prop_map(Action::Errno),
        ]
    };
    let tests = prop::collection::vec(any_test(), 0..4);
    let clause = (tests, action()).prop_map(|(tests, action)| Clause { tests, action });
    let clauses = prop_oneof![
        1 => Just(Vec::new()),
        1 => prop::collection::vec(clause, 0..5),
    ];
    (clauses, action()).prop_map(|(clauses, otherwise)| CallRule { clauses, otherwise })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The compiler is right for every table, not only for the reviewed one. The numbers leave gaps of every small
    /// size, and the longest tables need jumps over more than 255 instructions.
    #[test]
    fn random_tables_are_compiled_to_what_they_say(
        table in prop::collection::vec((0_u32..4, any_rule()), 0..120),
        wild in any::<[u64; 6]>(),
    ) {
        let mut next = 0;
        let rules: Vec<(u32, CallRule)> = table.into_iter().map(|(gap, rule)| {
            let nr = next + gap;
            next = nr + 1;
            (nr, rule)
        }).collect();
        let program = assemble(&rules, Action::Errno(libc::ENOSYS));
        let values = [0, 1, 2, 3, 4, 5, 6, 7, 8, u64::from(u32::MAX - 1), u64::from(u32::MAX), wild[3]];
        for nr in (0..next + 2).chain([0x4000_0000, u32::MAX]) {
            let listed = rules.iter().filter(|(other, _)| *other == nr);
            let only: Vec<_> = listed.cloned().collect();
            if only.iter().all(|(_, rule)| rule.clauses.is_empty()) {
                prop_assert_eq!(run(&program, NATIVE_ARCH, nr, wild).answer, model(&only, nr, wild));
                continue;
            }
            for combination in 0..values.len().pow(3) {
                let mut args = wild;
                let (first, rest) = (combination % values.len(), combination / values.len());
                let (second, third) = (rest % values.len(), rest / values.len());
                for (arg, value) in [first, second, third].into_iter().enumerate() {
                    args[arg] = wild[arg] & GARBAGE | values[value] & 0xffff_ffff;
                }
                prop_assert_eq!(run(&program, NATIVE_ARCH, nr, args).answer, model(&only, nr, args));
            }
        }
    }
}
