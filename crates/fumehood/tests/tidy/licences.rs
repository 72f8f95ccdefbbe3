//! Which licences come in with dependencies.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

use crate::sources::{none, read, root};

/// Every dependency's licence is on the list in deny.toml. Read from what cargo has already fetched.
#[test]
fn licences_are_on_the_list() {
    let deny: toml::Table = read("deny.toml").parse().unwrap();
    let list = deny["licenses"]["allow"].as_array().unwrap();
    let allowed: BTreeSet<&str> = list.iter().map(|l| l.as_str().unwrap()).collect();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked", "--offline"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(
        packages.len() > 20,
        "only {} packages were found",
        packages.len()
    );
    let bad = packages.iter().filter_map(|package| {
        let licence = package["license"].as_str().unwrap_or("none given");
        (!permitted(licence, &allowed)).then(|| format!("{}: {licence}", package["name"]))
    });
    none(bad.collect(), "a licence that deny.toml does not allow");
}

/// Whether an SPDX expression is permitted. The function knows `OR`, `AND` and one level of parentheses; the old `/`
/// means OR. Of the choices of an OR, one must be allowed.
fn permitted(expression: &str, allowed: &BTreeSet<&str>) -> bool {
    let text = expression.replace('/', " OR ");
    let mut rest = text.as_str();
    let mut flat = String::new();
    while let Some((before, after)) = rest.split_once('(') {
        let Some((inner, after)) = after.split_once(')') else {
            return false;
        };
        flat.push_str(before);
        flat.push_str(if permitted(inner, allowed) {
            "@yes"
        } else {
            "@no"
        });
        rest = after;
    }
    flat.push_str(rest);
    // AND binds tighter than OR.
    flat.split(" OR ").any(|choice| {
        choice
            .split(" AND ")
            .all(|one| one.trim() == "@yes" || allowed.contains(one.trim()))
    })
}

#[test]
fn licence_expressions_are_understood() {
    let allowed = BTreeSet::from(["MIT", "Apache-2.0 WITH LLVM-exception"]);
    for fine in [
        "MIT",
        "GPL-3.0 OR MIT",
        "MIT/GPL-3.0",
        "(MIT OR GPL-3.0) AND MIT",
        "Apache-2.0 WITH LLVM-exception OR X",
    ] {
        assert!(permitted(fine, &allowed), "{fine}");
    }
    for bad in [
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "(GPL-3.0 OR X) AND MIT",
        "none given",
        "",
        "(MIT",
        "@yes AND GPL",
    ] {
        assert!(!permitted(bad, &allowed), "{bad}");
    }
}
