//! What a rule for one system call is made of.

/// The answer to a call that is known and refused.
pub(super) const DENY: Action = Action::Errno(libc::EPERM);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Allow,
    /// The call is not made. `Errno(0)` makes it succeed without effect.
    Errno(i32),
    /// The call is not made; whoever holds the listener answers in its place.
    Notify,
}

/// One question about the low half of one argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Test {
    /// The argument, after the mask, is one of these. Invariant: there is at least one.
    OneOf {
        arg: u8,
        mask: u32,
        values: Vec<u32>,
    },
    /// At least one of these bits is set.
    AnyBit { arg: u8, bits: u32 },
}

/// When every test holds, the action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Clause {
    pub(super) tests: Vec<Test>,
    pub(super) action: Action,
}

/// The first clause that holds decides. Without clauses no argument is loaded, so that the kernel can
/// see that the call is always allowed and then skips the filter altogether.
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

pub(super) fn when<const N: usize>(tests: [Test; N], action: Action) -> Clause {
    let tests = tests.into();
    Clause { tests, action }
}

pub(super) fn is(arg: u8, values: &[u32]) -> Test {
    masked(arg, u32::MAX, values)
}

pub(super) fn masked(arg: u8, mask: u32, values: &[u32]) -> Test {
    let values = values.to_vec();
    Test::OneOf { arg, mask, values }
}

pub(super) fn has_any(arg: u8, bits: u32) -> Test {
    Test::AnyBit { arg, bits }
}
