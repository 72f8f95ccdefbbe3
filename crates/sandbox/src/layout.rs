//! What is the same in every sandbox: the program's ids, its private directories, and which parts of the host it sees.

/// Who the program is inside, always: the host's names and numbers are nobody's business there.
pub const INSIDE_UID: u32 = 1000;
pub const INSIDE_GID: u32 = 1000;
/// The program's /tmp: private to the run, below the workspace on the host, and empty when seen there from inside.
pub const HIDDEN_DIR: &str = ".fumehood";
/// The program's home: in its private /tmp, so counted as disk and never collected.
pub const INSIDE_HOME: &str = "/tmp/home";

/// The system runtime (promise P3). A symlink on the host is the same symlink inside.
pub const SYSTEM_DIRS: [&str; 7] = [
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
];

/// What of the host's /etc is shown, and why. Nothing here holds a credential.
pub const ETC_ENTRIES: &[(&str, &str)] = &[
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
pub const DEVICE_NAMES: [&str; 5] = ["null", "zero", "full", "random", "urandom"];
