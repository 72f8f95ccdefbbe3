//! No two public types of the workspace share a name, so that a name in a message or a review means one thing.

use std::collections::BTreeMap;

use crate::graph::{CrateModules, workspace};
use crate::sources::none;

/// Each name that more than one public type has, with the modules.
fn twins(crates: &[(String, CrateModules)]) -> BTreeMap<String, Vec<String>> {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, modules) in crates {
        for (path, module) in &modules.modules {
            for public_type in &module.public_types {
                let place = format!("{name}::{}", path.join("::"));
                places.entry(public_type.clone()).or_default().push(place);
            }
        }
    }
    places.retain(|_, found| found.len() > 1);
    places
}

#[test]
fn no_two_public_types_share_a_name() {
    let unknown = twins(workspace())
        .into_iter()
        .map(|(name, places)| format!("{name}: {}", places.join(", ")));
    none(unknown.collect(), "two public types with one name");
}

#[test]
fn types_with_one_name_are_found() {
    let crate_of = |name: &str, text: &'static str| {
        let read = move |file: &str| (file == "lib.rs").then(|| text.to_owned());
        (name.to_owned(), CrateModules::read("lib.rs", &read))
    };
    let crates = [
        crate_of(
            "a",
            "pub struct Level; struct Private; pub trait Only {} #[cfg(test)] pub struct Test;",
        ),
        crate_of(
            "b",
            "mod inner { pub(super) enum Level {} } pub use inner::Only; struct Private; pub(crate) type Test = u8;",
        ),
    ];
    let found = twins(&crates);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["Level"]);
    assert_eq!(found["Level"], ["a::", "b::inner"]);
}
