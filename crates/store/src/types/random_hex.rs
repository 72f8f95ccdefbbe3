//! Bytes and random tokens in hex digits.

/// Two lower-case digits for each byte.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// 128 random bits from the kernel, as 32 hex digits.
pub(crate) fn random_hex() -> std::io::Result<String> {
    let mut noise = [0u8; 16];
    let got = rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty())?;
    match got == noise.len() {
        true => Ok(to_hex(&noise)),
        false => Err(std::io::Error::other(
            "the kernel gave too few random bytes",
        )),
    }
}
