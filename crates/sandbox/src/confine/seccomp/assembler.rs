//! Compiles rules to classic BPF.
//!
//! Two things keep the filter short. Every path through a rule tracks what its earlier tests have established
//! ([`PathState`]), so the code loads no argument that is loaded already, and contains no test whose result follows
//! from an earlier one. And the search for the call number treats up to four single numbers within a range as
//! exceptions ([`SearchRange`]), because an exception takes one comparison and a range of its own takes two.

use super::rule::{Action, CallRule, Test};
use crate::sys::Instruction;

#[cfg(target_arch = "x86_64")]
pub(super) const NATIVE_ARCH: u32 = 0xc000_003e; // AUDIT_ARCH_X86_64
#[cfg(target_arch = "aarch64")]
pub(super) const NATIVE_ARCH: u32 = 0xc000_00b7; // AUDIT_ARCH_AARCH64

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the system call table is reviewed for x86_64 and aarch64 only");
#[cfg(target_endian = "big")]
compile_error!("arguments are loaded by the offset of their low half on little-endian machines");

// Offsets in the kernel's struct seccomp_data.
const DATA_NR: u32 = 0;
const DATA_ARCH: u32 = 4;
const DATA_ARGS: u32 = 16;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
pub(super) const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
pub(super) const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
pub(super) const IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
pub(super) const IF_ANY_BIT: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
pub(super) const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// Larger than every call number of the table and every filter: the initial capacity of the lists of rules and
/// instructions, so that no list grows while a filter is built.
pub(super) const CAPACITY: usize = 512;

/// Compiles these rules, which are sorted by number. A call without a rule, and every call of a foreign ABI, gets
/// `unlisted`.
pub(super) fn assemble(rules: &[(u32, CallRule)], unlisted: Action) -> Vec<Instruction> {
    let mut code = Assembler::default();
    code.code.reserve(CAPACITY);
    let spans = spans(rules, unlisted, &mut code);
    let search = code.emit_search(&search_ranges(&spans));
    let number = code.emit_load(DATA_NR, search);
    let foreign_abi = Target::Return(unlisted);
    let check = code.emit_branch(IF_EQUAL, NATIVE_ARCH, number, foreign_abi);
    code.emit_load(DATA_ARCH, check);
    code.finish()
}

/// Returns ranges of call numbers with one target each, as (first number, target). They are sorted, start at zero,
/// and the last has no end.
fn spans(rules: &[(u32, CallRule)], unlisted: Action, code: &mut Assembler) -> Vec<(u32, Target)> {
    let mut compiled: Vec<(&CallRule, Target)> = Vec::new();
    let mut spans: Vec<(u32, Target)> = Vec::with_capacity(CAPACITY / 2);
    // Where two ranges start at the same number, the first is empty: the listed call replaces the gap before it.
    let mut start_span = |nr: u32, target: Target| {
        spans.pop_if(|last| last.0 == nr);
        if spans.last().is_none_or(|last| last.1 != target) {
            spans.push((nr, target));
        }
    };
    start_span(0, Target::Return(unlisted));
    for (nr, rule) in rules {
        // Calls with equal rules share their instructions. A rule without clauses is a return and has none.
        let mut with_code = compiled.iter().filter(|_| !rule.clauses.is_empty());
        let target = match with_code.find(|(other, _)| *other == rule) {
            Some((_, target)) => *target,
            None if rule.clauses.is_empty() => Target::Return(rule.otherwise),
            None => {
                let target = code.emit_rule(rule);
                compiled.push((rule, target));
                target
            }
        };
        start_span(*nr, target);
        start_span(nr + 1, Target::Return(unlisted));
    }
    spans
}

/// Adjacent spans that the search treats as one range. Every span whose target is not `target` is an exception: it
/// holds a single number. A range has at most [`EXCEPTIONS_MAX`] exceptions.
struct SearchRange<'a> {
    target: Target,
    spans: &'a [(u32, Target)],
}

/// The most exceptions in one range. The range compares the call number with them one after the other.
const EXCEPTIONS_MAX: usize = 4;

/// Groups the spans into ranges. Each range takes as many spans as possible, with the target of its first or of its
/// second span.
fn search_ranges(spans: &[(u32, Target)]) -> Vec<SearchRange<'_>> {
    let mut ranges = Vec::with_capacity(spans.len());
    let mut rest = spans;
    while let Some((_, first)) = rest.first() {
        let second = rest.get(1).map_or(*first, |span| span.1);
        let with_first = range_length(rest, *first);
        let with_second = range_length(rest, second);
        let target = match with_second > with_first {
            true => second,
            false => *first,
        };
        let (spans, after) = rest.split_at(with_first.max(with_second));
        ranges.push(SearchRange { target, spans });
        rest = after;
    }
    ranges
}

/// Returns how many of these spans, from the first on, one range with this target can hold.
fn range_length(spans: &[(u32, Target)], target: Target) -> usize {
    let mut exceptions = 0;
    for (at, span) in spans.iter().enumerate() {
        if span.1 != target {
            // The last span of all has no end, so it is never a single number.
            let is_single = spans.get(at + 1).is_some_and(|next| next.0 == span.0 + 1);
            exceptions += 1;
            if !is_single || exceptions > EXCEPTIONS_MAX {
                return at;
            }
        }
    }
    spans.len()
}

/// What the tests on one path through a rule have established.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct PathState {
    /// The argument whose low half is in the accumulator, unmasked.
    loaded: Option<u8>,
    /// An argument, and the value that its low half has.
    equal: Option<(u8, u32)>,
}

impl PathState {
    /// Returns the state after this test of the loaded argument, as (if the test holds, if it fails).
    fn after(self, test: &Test) -> (PathState, PathState) {
        let Test::OneOf { arg, mask, values } = test else {
            return (self, self);
        };
        match values[..] {
            [value] if *mask == u32::MAX => {
                let equal = Some((*arg, value));
                (PathState { equal, ..self }, self)
            }
            _ if *mask == u32::MAX || is_no_bit_set(*mask, values) => (self, self),
            _ => {
                // The test's code masks the accumulator, which then no longer holds the argument.
                let loaded = None;
                let masked = PathState { loaded, ..self };
                (masked, masked)
            }
        }
    }
}

/// Whether a [`Test::OneOf`] asks that no bit of the mask is set. One instruction tests this without changing the
/// accumulator.
fn is_no_bit_set(mask: u32, values: &[u32]) -> bool {
    mask != u32::MAX && *values == [0]
}

/// A place in a rule: the index of a clause, and of a test in that clause.
type TestPosition = (usize, usize);

/// Where a branch leads: to a return, or to an instruction by its index in [`Assembler`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Return(Action),
    At(usize),
}

/// A program under construction, last instruction first. BPF only jumps forward, so the target of a jump already
/// exists and its distance is known.
#[derive(Default)]
struct Assembler {
    code: Vec<Instruction>,
    /// The index of the latest return instruction for each value that is returned.
    returns: Vec<(u32, usize)>,
    /// The parts of the current rule that are already compiled: for a position and the state there, where the code is.
    compiled_paths: Vec<(TestPosition, PathState, Target)>,
}

impl Assembler {
    /// A branch reaches 255 instructions. A few are reserved for the jumps that [`Self::emit_branch`] inserts.
    const REACH: usize = 250;

    fn emit_rule(&mut self, rule: &CallRule) -> Target {
        self.compiled_paths.clear();
        self.emit_path(rule, (0, 0), PathState::default())
    }

    /// Emits the rest of a rule from one position on, for every call that gets there in this state.
    fn emit_path(
        &mut self,
        rule: &CallRule,
        position: TestPosition,
        mut state: PathState,
    ) -> Target {
        let (clause_index, test_index) = position;
        let Some(clause) = rule.clauses.get(clause_index) else {
            return Target::Return(rule.otherwise);
        };
        let Some(test) = clause.tests.get(test_index) else {
            return Target::Return(clause.action);
        };
        let if_true_at = (clause_index, test_index + 1);
        let if_false_at = (clause_index + 1, 0);
        // Forget a value that no later test reads, so that paths which differ only in that value share their code.
        let mut remaining = rule.clauses[clause_index..].iter().flat_map(|c| &c.tests);
        state.equal = state
            .equal
            .filter(|(arg, _)| remaining.any(|test| test.arg() == *arg));
        if let Some((arg, value)) = state.equal
            && arg == test.arg()
        {
            return match test.holds_for(value) {
                true => self.emit_path(rule, if_true_at, state),
                false => self.emit_path(rule, if_false_at, state),
            };
        }
        let here = (position, state);
        let mut compiled = self.compiled_paths.iter();
        if let Some(path) = compiled.find(|path| (path.0, path.1) == here) {
            return path.2;
        }
        let target = match state.loaded == Some(test.arg()) {
            true => {
                let (holding, failing) = state.after(test);
                let if_false = self.emit_path(rule, if_false_at, failing);
                let if_true = self.emit_path(rule, if_true_at, holding);
                self.emit_test(test, if_true, if_false)
            }
            false => {
                let loaded = Some(test.arg());
                let then = self.emit_path(rule, position, PathState { loaded, ..state });
                self.emit_load(argument_offset(test.arg()), then)
            }
        };
        self.compiled_paths.push((position, state, target));
        target
    }

    /// Emits a test of the argument that is in the accumulator.
    fn emit_test(&mut self, test: &Test, if_true: Target, if_false: Target) -> Target {
        match test {
            Test::AnyBit { bits, .. } => self.emit_branch(IF_ANY_BIT, *bits, if_true, if_false),
            Test::OneOf { mask, values, .. } if is_no_bit_set(*mask, values) => {
                self.emit_branch(IF_ANY_BIT, *mask, if_false, if_true)
            }
            Test::OneOf { mask, values, .. } => {
                let first = self.emit_one_of(values, if_true, if_false);
                match *mask {
                    u32::MAX => first,
                    mask => self.emit_before(AND, mask, first),
                }
            }
        }
    }

    /// Emits a comparison of the accumulator with each value. Three or more consecutive values become a range, which
    /// takes two comparisons.
    fn emit_one_of(&mut self, values: &[u32], if_true: Target, if_false: Target) -> Target {
        let mut sorted;
        let values = match values.len() {
            ..=2 => values,
            _ => {
                sorted = values.to_vec();
                sorted.sort_unstable();
                &sorted
            }
        };
        let runs = values.chunk_by(|one, next| one.checked_add(1) == Some(*next));
        runs.rev().fold(if_false, |others, run| match run {
            [least, _, .., most] if *most < u32::MAX => {
                let below_end = self.emit_branch(IF_AT_LEAST, most + 1, others, if_true);
                self.emit_branch(IF_AT_LEAST, *least, below_end, others)
            }
            _ => run.iter().rev().fold(others, |others, value| {
                self.emit_branch(IF_EQUAL, *value, if_true, others)
            }),
        })
    }

    /// Emits a binary search of the ranges for the call number, which is in the accumulator.
    fn emit_search(&mut self, ranges: &[SearchRange<'_>]) -> Target {
        if let [range] = ranges {
            let exceptions = range.spans.iter().filter(|span| span.1 != range.target);
            return exceptions
                .rev()
                .fold(range.target, |others, (number, target)| {
                    self.emit_branch(IF_EQUAL, *number, *target, others)
                });
        }
        let (below, above) = ranges.split_at(ranges.len() / 2);
        let start = above[0].spans[0].0;
        let above = self.emit_search(above);
        let below = self.emit_search(below);
        self.emit_branch(IF_AT_LEAST, start, above, below)
    }

    fn emit_load(&mut self, offset: u32, then: Target) -> Target {
        self.emit_before(LOAD, offset, then)
    }

    /// Emits an instruction that continues with `then`.
    fn emit_before(&mut self, code: u16, k: u32, then: Target) -> Target {
        let next = self.index_of(then);
        if next + 1 != self.code.len() {
            self.push(JUMP, 0, 0, distance(self.code.len(), next));
        }
        Target::At(self.push(code, 0, 0, k))
    }

    fn emit_branch(&mut self, code: u16, k: u32, yes: Target, no: Target) -> Target {
        let no = self.index_in_reach(no);
        let yes = self.index_in_reach(yes);
        let here = self.code.len();
        let short = |to| {
            u8::try_from(distance(here, to))
                .expect("index_in_reach() keeps a branch's targets within its reach")
        };
        let (jt, jf) = (short(yes), short(no));
        Target::At(self.push(code, jt, jf, k))
    }

    /// Returns an index within a branch's reach that leads to the target.
    fn index_in_reach(&mut self, target: Target) -> usize {
        let index = self.index_of(target);
        match self.code.len() - index < Self::REACH {
            true => index,
            false => self.push(JUMP, 0, 0, distance(self.code.len(), index)),
        }
    }

    /// Returns the target's index. A return that is out of reach is emitted again, which is cheaper than a jump to
    /// it.
    fn index_of(&mut self, target: Target) -> usize {
        let action = match target {
            Target::At(index) => return index,
            Target::Return(action) => action,
        };
        let value = return_value(action);
        let mut emitted = self.returns.iter().rev();
        match emitted.find(|(other, _)| *other == value) {
            Some((_, index)) if self.code.len() - index < Self::REACH => *index,
            _ => {
                let index = self.push(RETURN, 0, 0, value);
                self.returns.push((value, index));
                index
            }
        }
    }

    fn push(&mut self, code: u16, jt: u8, jf: u8, k: u32) -> usize {
        self.code.push(Instruction { code, jt, jf, k });
        self.code.len() - 1
    }

    fn finish(mut self) -> Vec<Instruction> {
        self.code.reverse();
        self.code
    }
}

/// Returns how many instructions a jump at `from` skips to land on `to`. Both are counted from the program's end.
fn distance(from: usize, to: usize) -> u32 {
    u32::try_from(from - to - 1).expect("a filter has at most 4096 instructions")
}

/// Returns the offset of an argument's low half.
fn argument_offset(arg: u8) -> u32 {
    DATA_ARGS + 8 * u32::from(arg)
}

fn return_value(action: Action) -> u32 {
    match action {
        Action::Allow => libc::SECCOMP_RET_ALLOW,
        Action::Errno(errno) => libc::SECCOMP_RET_ERRNO | errno as u32,
        Action::Notify => libc::SECCOMP_RET_USER_NOTIF,
    }
}
