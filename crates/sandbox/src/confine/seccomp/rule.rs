//! The parts of a rule for one system call.

/// The action for a known call that is refused.
pub(super) const DENY: Action = Action::Errno(libc::EPERM);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Allow,
    /// The kernel does not make the call and returns this errno. `Errno(0)` makes the call succeed without effect.
    Errno(i32),
    /// The kernel does not make the call; the holder of the listener answers it.
    Notify,
}

/// One condition on the low half of one argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Test {
    /// The argument, after the mask, is one of these values. Invariant: there is at least one value.
    OneOf {
        arg: u8,
        mask: u32,
        values: Vec<u32>,
    },
    /// At least one of these bits is set.
    AnyBit { arg: u8, bits: u32 },
}

impl Test {
    /// Returns the argument that the test reads.
    pub(super) fn arg(&self) -> u8 {
        match self {
            Test::OneOf { arg, .. } | Test::AnyBit { arg, .. } => *arg,
        }
    }

    /// Whether the test holds for an argument whose low half is `value`.
    pub(super) fn holds_for(&self, value: u32) -> bool {
        match self {
            Test::OneOf { mask, values, .. } => values.contains(&(value & mask)),
            Test::AnyBit { bits, .. } => value & bits != 0,
        }
    }
}

/// An action that applies when every test holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Clause {
    pub(super) tests: Vec<Test>,
    pub(super) action: Action,
}

/// The rule for one call. The first clause that holds decides. A rule without clauses loads no argument, so the
/// kernel can prove that the call is always allowed and skips the filter for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CallRule {
    pub(super) clauses: Vec<Clause>,
    pub(super) otherwise: Action,
}

pub(super) fn always(action: Action) -> CallRule {
    rule(Vec::new(), action)
}

pub(super) fn rule(clauses: Vec<Clause>, otherwise: Action) -> CallRule {
    CallRule { clauses, otherwise }
}

/// A rule with a single clause.
pub(super) fn only_when<const N: usize>(
    tests: [Test; N],
    action: Action,
    otherwise: Action,
) -> CallRule {
    rule(vec![when(tests, action)], otherwise)
}

pub(super) fn when<const N: usize>(tests: [Test; N], action: Action) -> Clause {
    let tests = tests.into();
    Clause { tests, action }
}

/// A constant that libc types as one or the other.
pub(super) trait ArgumentValue: Copy {
    fn low_half(self) -> u32;
}

impl ArgumentValue for u32 {
    fn low_half(self) -> u32 {
        self
    }
}

impl ArgumentValue for i32 {
    fn low_half(self) -> u32 {
        self as u32
    }
}

pub(super) fn is(arg: u8, values: &[impl ArgumentValue]) -> Test {
    masked(arg, u32::MAX, values)
}

pub(super) fn masked(arg: u8, mask: u32, values: &[impl ArgumentValue]) -> Test {
    let values = values.iter().map(|value| value.low_half()).collect();
    Test::OneOf { arg, mask, values }
}

pub(super) fn has_any(arg: u8, bits: impl ArgumentValue) -> Test {
    let bits = bits.low_half();
    Test::AnyBit { arg, bits }
}
