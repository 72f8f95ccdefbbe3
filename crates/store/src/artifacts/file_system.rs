//! Refuses file systems on which locks or syncs cannot be relied on.

use std::path::Path;

use rustix::io::Errno;

use super::ArtifactError;

/// Refuses a path on a network file system, where a lock or an fsync may have no effect. SQLite and the artifact
/// store need both. The path need not exist yet.
pub fn refuse_network_fs(path: &Path) -> Result<(), ArtifactError> {
    let found = path
        .ancestors()
        .map(|p| {
            if p == Path::new("") {
                Path::new(".")
            } else {
                p
            }
        })
        .map(rustix::fs::statfs)
        .find(|stat| !matches!(stat, Err(Errno::NOENT)));
    let stat = found.unwrap_or(Err(Errno::NOENT));
    let stat = stat.map_err(|e| ArtifactError::StatFs {
        path: path.to_path_buf(),
        source: e.into(),
    })?;
    // The magic numbers have 32 bits, whatever the width and sign of the field.
    let magic = stat.f_type as u32;
    match NETWORK_FS.iter().find(|(number, _)| *number == magic) {
        None => Ok(()),
        Some((_, kind)) => Err(ArtifactError::NetworkFs {
            path: path.to_path_buf(),
            kind,
        }),
    }
}

/// From linux/magic.h, and for file systems outside the kernel's tree from their own sources.
pub(super) const NETWORK_FS: &[(u32, &str)] = &[
    (0x6969, "NFS"),
    (0x0bd0_0bd0, "Lustre"),
    // Also virtiofs, GlusterFS, sshfs, MooseFS.
    (0x6573_5546, "FUSE"),
    (0x517b, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x00c3_6400, "CephFS"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    // Also the Windows drives of WSL.
    (0x0102_1997, "9P"),
    (0x2003_0528, "OrangeFS"),
    (0x7375_7245, "Coda"),
    (0xaad7_aaea, "PanFS"),
    (0x786f_4256, "a VirtualBox shared folder"),
];
