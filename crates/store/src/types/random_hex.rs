//! Random tokens.

/// 128 random bits from the kernel, as 32 hex digits.
pub(crate) fn random_hex() -> std::io::Result<String> {
    let mut noise = [0u8; 16];
    let got = rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty())?;
    match got == noise.len() {
        true => Ok(noise.iter().map(|b| format!("{b:02x}")).collect()),
        false => Err(std::io::Error::other(
            "the kernel gave too few random bytes",
        )),
    }
}
