use crate::Entry;

pub const TRIALS: &[Entry] = &[];
