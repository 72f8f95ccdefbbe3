//! Links the unwinder (libgcc_eh) statically where the compiler has it as an archive, so that each start of the binary
//! loads one shared library less.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let target = |name: &str| std::env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    if target("OS") != "linux" || target("ENV") != "gnu" || target("ARCH") != "x86_64" {
        return;
    }
    // The compiler prints the path of an archive that it has, and the bare name of one that it does not have.
    let found = Command::new("cc")
        .arg("-print-file-name=libgcc_eh.a")
        .output();
    let path = found.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    if path.is_ok_and(|path| Path::new(&path).is_absolute()) {
        println!("cargo:rustc-link-lib=static:-bundle=gcc_eh");
    }
}
