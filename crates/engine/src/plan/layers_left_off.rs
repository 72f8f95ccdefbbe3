//! Layers that the tests leave off, to see that `doctor --attack` notices.

use std::collections::BTreeSet;

use sandbox::spec::Layer;
use store::types::crash_points::VARIABLE;

/// Layers that the tests leave off, to see that `doctor --attack` notices: `FUMEHOOD_FAULT=without=seccomp,landlock`.
#[cfg(debug_assertions)]
pub fn layers_left_off() -> BTreeSet<Layer> {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    let words = text.strip_prefix("without=").unwrap_or_default();
    let layer = |word: &str| serde_json::from_value(serde_json::Value::from(word)).ok();
    words.split(',').filter_map(layer).collect()
}

#[cfg(not(debug_assertions))]
pub fn layers_left_off() -> BTreeSet<Layer> {
    BTreeSet::new()
}
