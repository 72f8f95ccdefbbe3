//! Checks the parser of `#!` lines, which is compiled here from the engine's source file.

use std::os::unix::ffi::OsStrExt;

#[allow(dead_code)]
#[path = "../../crates/engine/src/plan/runtime/shebang.rs"]
mod shebang;

use shebang::Shebang;

/// Checks that the parsed words fit into an argument list and are together no longer than `head`. Returns whether
/// `head` names an interpreter.
pub fn check(head: &[u8]) -> bool {
    let words = match shebang::parse(head) {
        None | Some(Shebang::Unsupported { .. }) => return false,
        Some(Shebang::Path { interpreter, args }) => {
            [vec![interpreter.into_os_string()], args].concat()
        }
        Some(Shebang::Env { name, args }) => [vec![name], args].concat(),
    };
    let bytes: usize = words.iter().map(|w| w.len()).sum();
    let no_nul = words.iter().all(|w| !w.as_bytes().contains(&0));
    assert!(!words[0].is_empty() && no_nul && bytes <= head.len() && words.len() <= 65);
    true
}
