//! Compiles rules to classic BPF.

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

/// Compiles these rules, which are sorted by number. A call without a rule, and every call of a foreign ABI, gets
/// `unlisted`.
pub(super) fn assemble(rules: &[(u32, CallRule)], unlisted: Action) -> Vec<Instruction> {
    let mut code = Assembler::default();
    let spans = spans(rules, unlisted, &mut code);
    let search = code.emit_search(&spans);
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
    let mut spans = vec![(0, Target::Return(unlisted))];
    for (nr, rule) in rules {
        // Calls with equal rules share their instructions.
        let shared = compiled.iter().find(|(other, _)| *other == rule);
        let target = match shared {
            Some((_, target)) => *target,
            None => {
                let target = code.emit_rule(rule);
                compiled.push((rule, target));
                target
            }
        };
        spans.push((*nr, target));
        spans.push((nr + 1, Target::Return(unlisted)));
    }
    // Where two ranges start at the same number, the first is empty: the listed call replaces the gap before it.
    let mut kept: Vec<(u32, Target)> = Vec::new();
    for span in spans {
        kept.pop_if(|last| last.0 == span.0);
        if kept.last().is_none_or(|last| last.1 != span.1) {
            kept.push(span);
        }
    }
    kept
}

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
    /// The index of the latest return instruction for each action.
    returns: Vec<(Action, usize)>,
}

impl Assembler {
    /// A branch reaches 255 instructions. A few are reserved for the jumps that [`Self::emit_branch`] inserts.
    const REACH: usize = 250;

    fn emit_rule(&mut self, rule: &CallRule) -> Target {
        let mut next = Target::Return(rule.otherwise);
        for clause in rule.clauses.iter().rev() {
            let mut if_true = Target::Return(clause.action);
            for test in clause.tests.iter().rev() {
                if_true = self.emit_test(test, if_true, next);
            }
            next = if_true;
        }
        next
    }

    fn emit_test(&mut self, test: &Test, if_true: Target, if_false: Target) -> Target {
        match test {
            Test::AnyBit { arg, bits } => {
                let branch = self.emit_branch(IF_ANY_BIT, *bits, if_true, if_false);
                self.emit_load(argument_offset(*arg), branch)
            }
            Test::OneOf { arg, mask, values } => {
                let mut first = if_false;
                for value in values.iter().rev() {
                    first = self.emit_branch(IF_EQUAL, *value, if_true, first);
                }
                if *mask != u32::MAX {
                    first = self.emit_before(AND, *mask, first);
                }
                self.emit_load(argument_offset(*arg), first)
            }
        }
    }

    /// Emits a binary search of the ranges for the call number, which is in the accumulator.
    fn emit_search(&mut self, spans: &[(u32, Target)]) -> Target {
        if let [(_, target)] = spans {
            return *target;
        }
        let (below, above) = spans.split_at(spans.len() / 2);
        let start = above[0].0;
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
        let emitted = self
            .returns
            .iter()
            .rev()
            .find(|(other, _)| *other == action);
        match emitted {
            Some((_, index)) if self.code.len() - index < Self::REACH => *index,
            _ => {
                let index = self.push(RETURN, 0, 0, return_value(action));
                self.returns.push((action, index));
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
