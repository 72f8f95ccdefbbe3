//! The parser of `#!` lines, from the runtime's own file.

use std::os::unix::ffi::OsStrExt;

#[allow(dead_code)]
#[path = "../../crates/engine/src/plan/runtime/shebang.rs"]
mod shebang;

use shebang::Shebang;

/// Everything that a script's head asks for can go into an argument list, and is no more than was there. Says whether
/// it named an interpreter.
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
