//! The system runtime: which parts of the host every run sees, why, and what stands for each inside.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::{Piece, open_piece};
use crate::channel::{During, StepError};
use crate::sys;

/// The system runtime (promise P3). A symlink on the host is the same symlink inside.
pub const SYSTEM: [&str; 7] = [
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
];

/// What of the host's /etc is shown, and why. Nothing here holds a credential.
pub(crate) const ETC: &[(&str, &str)] = &[
    ("ImageMagick-6", "policy and delegates of convert"),
    ("OpenCL", "which OpenCL drivers there are"),
    (
        "R",
        "Renviron and Rprofile.site, without which R does not start",
    ),
    (
        "alternatives",
        "/usr/bin/awk, libblas.so.3 and many more are links through it",
    ),
    ("debian_version", "asked by platform probes"),
    ("fonts", "fontconfig: no plots with text without it"),
    ("fonts.conf", "fontconfig, elsewhere"),
    ("ghostscript", "fonts of gs"),
    ("gnuplot", "terminal defaults"),
    ("inputrc", "readline in an interactive shell"),
    ("java", "the JVM's conf directory is a link to it"),
    ("java-11-openjdk", "as above"),
    ("java-17-openjdk", "as above"),
    ("java-21-openjdk", "as above"),
    ("julia", "startup.jl of a packaged Julia"),
    ("ld.so.cache", "where shared libraries are"),
    ("ld.so.conf", "read by ldconfig -p and some loaders"),
    ("ld.so.conf.d", "as above"),
    ("locale.alias", "names of locales"),
    ("localtime", "the zone, for programs that ignore TZ"),
    ("lsb-release", "asked by platform probes"),
    ("magic", "file(1)"),
    ("magic.mime", "file(1)"),
    ("matplotlibrc", "matplotlib's packaged defaults"),
    ("mime.types", "Python's mimetypes"),
    ("octave.conf", "packaged Octave"),
    ("openmpi", "MPI on one machine"),
    ("os-release", "asked by platform probes"),
    ("papersize", "R's pdf()"),
    ("perl", "packaged Perl's include path"),
    ("protocols", "getprotobyname"),
    ("python3", "packaged Python's defaults"),
    ("python3.9", "sitecustomize is a link to it"),
    ("python3.10", "as above"),
    ("python3.11", "as above"),
    ("python3.12", "as above"),
    ("python3.13", "as above"),
    ("python3.14", "as above"),
    ("services", "getservbyname"),
    ("terminfo", "terminals in fumehood shell"),
    ("texmf", "LaTeX"),
    ("timezone", "the zone's name"),
];

/// Devices that hold no state of anyone's.
pub(crate) const DEVICES: [&str; 5] = ["null", "zero", "full", "random", "urandom"];

/// No larger file of /etc is copied.
const COPY_BYTES_MAX: u64 = 16 << 10;

/// The parts of the system runtime that this host has, and what stands for each inside.
#[derive(Default)]
pub struct System {
    pub pieces: Vec<Piece>,
    pub links: Vec<(PathBuf, PathBuf)>,
    /// What everybody may read and is small: a copy costs less than a mount, which every run makes and takes down.
    pub copies: Vec<(PathBuf, Vec<u8>)>,
}

impl System {
    pub fn open() -> Result<System, StepError> {
        let mut system = System::default();
        for name in SYSTEM {
            system.add(Path::new(name))?;
        }
        for (name, _reason) in ETC {
            system.add(&Path::new("/etc").join(name))?;
        }
        for name in DEVICES {
            let path = Path::new("/dev").join(name);
            // Read-only: who may write to a file may also set its times. Writing to a device asks nothing of its mount.
            let attributes =
                sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NOEXEC;
            system.pieces.push(open_piece(&path, &path, attributes)?);
        }
        Ok(system)
    }

    fn add(&mut self, path: &Path) -> Result<(), StepError> {
        let Ok(found) = rustix::fs::lstat(path) else {
            return Ok(());
        };
        let what = || format!("read {}", path.display());
        let kind = rustix::fs::FileType::from_raw_mode(found.st_mode);
        if kind == rustix::fs::FileType::Symlink {
            let to = std::fs::read_link(path).during(what)?;
            self.links.push((path.to_path_buf(), to));
            return Ok(());
        }
        if is_small_and_open(&found)
            && let Some(bytes) = read_small(path).during(what)?
        {
            self.copies.push((path.to_path_buf(), bytes));
            return Ok(());
        }
        let attributes = sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV;
        self.pieces.push(open_piece(path, path, attributes)?);
        Ok(())
    }
}

fn is_small_and_open(stat: &rustix::fs::Stat) -> bool {
    rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::RegularFile
        && stat.st_mode & 0o004 != 0
        && (0..=COPY_BYTES_MAX as i64).contains(&stat.st_size)
}

/// `None`: it is another file by now.
fn read_small(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    if !is_small_and_open(&rustix::fs::fstat(&file)?) {
        return Ok(None);
    }
    let mut bytes = Vec::with_capacity(COPY_BYTES_MAX as usize);
    let file = std::fs::File::from(file);
    io::Read::read_to_end(&mut io::Read::take(file, COPY_BYTES_MAX), &mut bytes)?;
    Ok(Some(bytes))
}
