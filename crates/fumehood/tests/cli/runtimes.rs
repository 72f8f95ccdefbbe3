pub const TRIALS: &[crate::Entry] = &[];
