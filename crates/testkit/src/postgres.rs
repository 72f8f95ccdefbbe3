//! A private PostgreSQL server with its own directory and socket. It ends when the test process ends.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Pid, Signal, kill_process};

use crate::is_root;

/// The one role that must give a password.
pub const PASSWORD_ROLE: &str = "fumehood_secret";

/// Makes the cluster, prints `ready`, and waits for the end of its standard input, which ends with the test process,
/// for whatever reason. Then stops the server and removes the directory.
const KEEPER: &str = r#"
set -eu
dir=$1 bin=$2 as=$3 role=$4 options=$5
cd "$dir"
$as "$bin/initdb" -D "$dir/data" -U postgres -A trust --no-sync -E UTF8 --locale=C >"$dir/initdb.log" 2>&1
printf 'local all %s scram-sha-256\nlocal all all trust\nhost all all 127.0.0.1/32 trust\n' "$role" |
    $as tee "$dir/data/pg_hba.conf" >/dev/null
$as "$bin/pg_ctl" -D "$dir/data" -w -s -l "$dir/log" start -o "$options" </dev/null >/dev/null 2>&1
echo ready
cat >/dev/null
$as "$bin/pg_ctl" -D "$dir/data" -w -s -m immediate stop </dev/null >/dev/null 2>&1 || true
cd /
rm -rf "$dir"
"#;

/// Starts the server of an existing cluster.
const START_AGAIN: &str = r#"$3 "$2/pg_ctl" -D "$1/data" -w -s -l "$1/log" start -o "$4""#;

/// A running server.
pub struct PrivatePostgres {
    dir: PathBuf,
    bin: PathBuf,
    run_as: &'static str,
    options: String,
    keeper: Child,
    stdin: Option<ChildStdin>,
}

static DATABASES: AtomicU32 = AtomicU32::new(0);

impl PrivatePostgres {
    /// The server that all trials of this process share. It has the roles `fumehood_runner`, `fumehood_reader`,
    /// `fumehood_owner` and `fumehood_stranger`. Returns `None`, and prints so, where PostgreSQL is not installed.
    pub fn shared() -> Option<&'static PrivatePostgres> {
        static SHARED: OnceLock<Option<PrivatePostgres>> = OnceLock::new();
        SHARED
            .get_or_init(|| {
                let server = PrivatePostgres::start()?;
                for role in ["runner", "reader", "owner", "stranger"] {
                    server.psql("postgres", &format!("CREATE ROLE fumehood_{role} LOGIN"));
                }
                Some(server)
            })
            .as_ref()
    }

    /// Starts a server that listens on a Unix socket in its directory.
    pub fn start() -> Option<PrivatePostgres> {
        // The path of a socket must be short.
        let dir = tempfile::Builder::new()
            .prefix("fh-pg")
            .tempdir_in("/tmp")
            .unwrap()
            .keep();
        let listen = format!("-k {} -c listen_addresses=", dir.display());
        PrivatePostgres::start_in(dir, &listen)
    }

    /// Starts a server whose cluster is in `dir`, with options of `postgres` that say where it listens. The first
    /// socket directory must be `dir`.
    pub fn start_in(dir: PathBuf, listen: &str) -> Option<PrivatePostgres> {
        let Some(bin) = newest_bin() else {
            eprintln!("SKIPPED: PostgreSQL's programs are not in /usr/lib/postgresql");
            return None;
        };
        // The server refuses to run as root.
        let run_as = match is_root() {
            true => "setpriv --reuid=postgres --regid=postgres --clear-groups",
            false => "",
        };
        if is_root() {
            let owned = Command::new("chown").arg("postgres:").arg(&dir).status();
            assert!(owned.unwrap().success());
        }
        let options = format!("{listen} -c fsync=off -c max_connections=200");
        let mut keeper = Command::new("sh")
            .args(["-c", KEEPER, "keeper"])
            .args([dir.as_os_str(), bin.as_os_str()])
            .args([run_as, PASSWORD_ROLE, &options])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // The keeper ends a moment after the test process, and must not hold the output of that process open.
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(keeper.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "ready\n", "see {}", dir.display());
        let stdin = keeper.stdin.take();
        Some(PrivatePostgres {
            dir,
            bin,
            run_as,
            options,
            keeper,
            stdin,
        })
    }

    /// Creates a database for one trial and returns its name.
    pub fn create_database(&self) -> String {
        let number = DATABASES.fetch_add(1, Ordering::Relaxed);
        let name = format!("test_{number}");
        self.psql("postgres", &format!("CREATE DATABASE {name}"));
        name
    }

    /// The URL by which a role reaches a database.
    pub fn address(&self, database: &str, user: &str) -> String {
        format!(
            "postgres:///{database}?host={}&user={user}",
            self.dir.display()
        )
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join(".s.PGSQL.5432")
    }

    /// The directory of PostgreSQL's programs.
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What psql prints for the superuser. The statement must succeed.
    pub fn psql(&self, database: &str, sql: &str) -> String {
        self.psql_as(database, "postgres", sql)
            .unwrap_or_else(|e| panic!("{sql}: {e}"))
    }

    /// What psql prints for a role, or its error.
    pub fn psql_as(&self, database: &str, user: &str, sql: &str) -> Result<String, String> {
        let ran = Command::new(self.bin.join("psql"))
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"])
            .args(["-d", database, "-U", user, "-h"])
            .arg(&self.dir)
            .args(["-c", sql])
            .output()
            .unwrap();
        match ran.status.success() {
            true => Ok(String::from_utf8(ran.stdout).unwrap()),
            false => Err(String::from_utf8(ran.stderr).unwrap()),
        }
    }

    /// Kills the server and all its children, as a power cut would. The children could otherwise finish their work.
    pub fn kill(&self) {
        let pid = fs::read_to_string(self.dir.join("data/postmaster.pid")).unwrap();
        let server: i32 = pid.lines().next().unwrap().parse().unwrap();
        kill(server);
        // The children have another parent now, but their working directory is still the data directory.
        let data = self.dir.join("data");
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            let Ok(pid) = name.parse() else {
                continue;
            };
            if fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd == data) {
                kill(pid);
            }
        }
    }

    /// Starts the server after [`PrivatePostgres::kill`]. A new server refuses to start until the children of the old
    /// one are gone, so this tries several times.
    pub fn start_again(&self) {
        for _ in 0..200 {
            let started = Command::new("sh")
                .args(["-c", START_AGAIN, "again"])
                .args([self.dir.as_os_str(), self.bin.as_os_str()])
                .args([self.run_as, &self.options])
                .current_dir(&self.dir)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
            if started.unwrap().success() {
                return;
            }
        }
        panic!(
            "PostgreSQL does not start again; see {}",
            self.dir.display()
        );
    }
}

impl Drop for PrivatePostgres {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.keeper.wait();
    }
}

fn kill(pid: i32) {
    let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
}

fn newest_bin() -> Option<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .ok()?
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let version = path.file_name()?.to_str()?.parse().ok()?;
            let bin = path.join("bin");
            bin.join("initdb").exists().then_some((version, bin))
        })
        .collect();
    found.sort();
    found.pop().map(|(_, bin)| bin)
}
