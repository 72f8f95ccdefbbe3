//! Constants that are the same in every sandbox: the program's ids, its private directories, and the parts of the
//! host it sees.

/// The program's uid inside. It never varies, so that the program learns nothing about the host's users.
pub const INSIDE_UID: u32 = 1000;
/// The program's gid inside.
pub const INSIDE_GID: u32 = 1000;
/// The directory in the workspace that holds the program's private /tmp. Inside, the program reaches it as /tmp;
/// under this name it sees an empty directory.
pub const HIDDEN_DIR: &str = ".fumehood";
/// The program's home. It is in the private /tmp, so it counts as disk and is never collected.
pub const INSIDE_HOME: &str = "/tmp/home";

/// The system runtime (promise P3). Where the host has a symlink, the sandbox has the same symlink.
pub const SYSTEM_DIRS: [&str; 7] = [
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
];

/// The entries of the host's /etc that the sandbox shows, each with its reason. None of them holds a credential.
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

/// Devices through which nobody can reach another process's state.
pub const DEVICE_NAMES: [&str; 5] = ["null", "zero", "full", "random", "urandom"];
