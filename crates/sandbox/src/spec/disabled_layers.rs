//! Layers that a test leaves off, to show which attacks each layer stops.
//!
//! The type holds layers only under the cargo feature `disable-layers`. The tests of this crate and of the binary
//! enable that feature, and a build without debug assertions refuses it. In every other build the type is empty, and no
//! code exists that could leave a layer off.

#[cfg(feature = "disable-layers")]
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::Layer;

#[cfg(all(feature = "disable-layers", not(debug_assertions)))]
compile_error!(
    "the feature disable-layers is for tests: it is not part of a build without debug assertions"
);

/// The layers to leave off. Always empty without the feature `disable-layers`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisabledLayers {
    #[cfg(feature = "disable-layers")]
    layers: BTreeSet<Layer>,
}

#[cfg(feature = "disable-layers")]
impl DisabledLayers {
    /// No layers.
    pub fn none() -> DisabledLayers {
        DisabledLayers {
            layers: BTreeSet::new(),
        }
    }

    /// Reads the layers that a test names, as in `FUMEHOOD_FAULT=without=seccomp,landlock`. Ignores other words.
    pub fn from_environment() -> DisabledLayers {
        let text = std::env::var("FUMEHOOD_FAULT").unwrap_or_default();
        let words = text.strip_prefix("without=").unwrap_or_default();
        let layer = |word: &str| serde_json::from_value(serde_json::Value::from(word)).ok();
        let layers = words.split(',').filter_map(layer).collect();
        DisabledLayers { layers }
    }

    /// Adds layers to leave off.
    pub fn extend(&mut self, layers: impl IntoIterator<Item = Layer>) {
        self.layers.extend(layers);
    }

    pub(super) fn contains(&self, layer: Layer) -> bool {
        self.layers.contains(&layer)
    }
}

#[cfg(not(feature = "disable-layers"))]
impl DisabledLayers {
    /// No layers.
    pub fn none() -> DisabledLayers {
        DisabledLayers {}
    }

    /// Returns no layers: only the feature `disable-layers` reads the environment.
    pub fn from_environment() -> DisabledLayers {
        DisabledLayers::none()
    }

    pub(super) fn contains(&self, _layer: Layer) -> bool {
        false
    }
}
