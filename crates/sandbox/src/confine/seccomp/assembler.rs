//! From rules to classic BPF.

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

/// Compiles the filter of these rules, sorted by number. A call that has no rule, and every call of a foreign ABI, gets `unlisted`.
pub(super) fn assemble(rules: &[(u32, CallRule)], unlisted: Action) -> Vec<Instruction> {
    let mut code = Assembler::default();
    let spans = spans(rules, unlisted, &mut code);
    let search = code.search(&spans);
    let number = code.load(DATA_NR, search);
    let foreign = Target::Return(unlisted);
    let check = code.branch(IF_EQUAL, NATIVE_ARCH, number, foreign);
    code.load(DATA_ARCH, check);
    code.finish()
}

/// Ranges of numbers with one target each, sorted, the first from zero and the last without an end.
fn spans(rules: &[(u32, CallRule)], unlisted: Action, code: &mut Assembler) -> Vec<(u32, Target)> {
    let mut compiled: Vec<(&CallRule, Target)> = Vec::new();
    let mut spans = vec![(0, Target::Return(unlisted))];
    for (nr, rule) in rules {
        // Calls with equal rules share their instructions.
        let known = compiled.iter().find(|(other, _)| *other == rule);
        let target = match known {
            Some((_, target)) => *target,
            None => {
                let target = code.rule(rule);
                compiled.push((rule, target));
                target
            }
        };
        spans.push((*nr, target));
        spans.push((nr + 1, Target::Return(unlisted)));
    }
    // Where two ranges begin at one number, the first is empty; the listed call replaces the gap before it.
    let mut kept: Vec<(u32, Target)> = Vec::new();
    for span in spans {
        kept.pop_if(|last| last.0 == span.0);
        if kept.last().is_none_or(|last| last.1 != span.1) {
            kept.push(span);
        }
    }
    kept
}

/// Where a branch leads: an answer, or an instruction by its place in [`Assembler`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Return(Action),
    At(usize),
}

/// A program under construction, last instruction first: BPF only jumps forward, so whatever a jump leads
/// to is already there and its distance is known.
#[derive(Default)]
struct Assembler {
    code: Vec<Instruction>,
    /// Where each answer was last written.
    returns: Vec<(Action, usize)>,
}

impl Assembler {
    /// Branches reach 255 instructions; a few are left for what [`Self::branch`] puts in between.
    const REACH: usize = 250;

    fn rule(&mut self, rule: &CallRule) -> Target {
        let mut next = Target::Return(rule.otherwise);
        for clause in rule.clauses.iter().rev() {
            let mut holds = Target::Return(clause.action);
            for test in clause.tests.iter().rev() {
                holds = self.test(test, holds, next);
            }
            next = holds;
        }
        next
    }

    fn test(&mut self, test: &Test, holds: Target, fails: Target) -> Target {
        match test {
            Test::AnyBit { arg, bits } => {
                let branch = self.branch(IF_ANY_BIT, *bits, holds, fails);
                self.load(argument(*arg), branch)
            }
            Test::OneOf { arg, mask, values } => {
                let mut first = fails;
                for value in values.iter().rev() {
                    first = self.branch(IF_EQUAL, *value, holds, first);
                }
                if *mask != u32::MAX {
                    first = self.before(AND, *mask, first);
                }
                self.load(argument(*arg), first)
            }
        }
    }

    /// The number is in the accumulator; halves the spans until one is left.
    fn search(&mut self, spans: &[(u32, Target)]) -> Target {
        if let [(_, target)] = spans {
            return *target;
        }
        let (below, above) = spans.split_at(spans.len() / 2);
        let start = above[0].0;
        let above = self.search(above);
        let below = self.search(below);
        self.branch(IF_AT_LEAST, start, above, below)
    }

    fn load(&mut self, offset: u32, then: Target) -> Target {
        self.before(LOAD, offset, then)
    }

    /// An instruction that runs on into `then`.
    fn before(&mut self, code: u16, k: u32, then: Target) -> Target {
        let next = self.place(then);
        if next + 1 != self.code.len() {
            self.push(JUMP, 0, 0, distance(self.code.len(), next));
        }
        Target::At(self.push(code, 0, 0, k))
    }

    fn branch(&mut self, code: u16, k: u32, yes: Target, no: Target) -> Target {
        let no = self.near(no);
        let yes = self.near(yes);
        let here = self.code.len();
        let short = |to| {
            u8::try_from(distance(here, to))
                .expect("near() keeps a branch's targets within its reach")
        };
        let (jt, jf) = (short(yes), short(no));
        Target::At(self.push(code, jt, jf, k))
    }

    /// A place that a branch can reach and that leads to the target.
    fn near(&mut self, target: Target) -> usize {
        let place = self.place(target);
        match self.code.len() - place < Self::REACH {
            true => place,
            false => self.push(JUMP, 0, 0, distance(self.code.len(), place)),
        }
    }

    /// Where the target is; an answer that is out of reach is written anew, which is cheaper than a jump to it.
    fn place(&mut self, target: Target) -> usize {
        let action = match target {
            Target::At(place) => return place,
            Target::Return(action) => action,
        };
        let written = self
            .returns
            .iter()
            .rev()
            .find(|(other, _)| *other == action);
        match written {
            Some((_, place)) if self.code.len() - place < Self::REACH => *place,
            _ => {
                let place = self.push(RETURN, 0, 0, answer(action));
                self.returns.push((action, place));
                place
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

/// How many instructions a jump at `from` skips to land on `to`, both counted from the program's end.
fn distance(from: usize, to: usize) -> u32 {
    u32::try_from(from - to - 1).expect("a filter has at most 4096 instructions")
}

/// The offset of an argument's low half.
fn argument(arg: u8) -> u32 {
    DATA_ARGS + 8 * u32::from(arg)
}

fn answer(action: Action) -> u32 {
    match action {
        Action::Allow => libc::SECCOMP_RET_ALLOW,
        Action::Errno(errno) => libc::SECCOMP_RET_ERRNO | errno as u32,
        Action::Notify => libc::SECCOMP_RET_USER_NOTIF,
    }
}
