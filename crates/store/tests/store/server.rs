//! A private PostgreSQL: its own directory and socket, no TCP, gone when the test process is.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use store::{Location, LocationOrigin};

/// Makes the cluster, says `ready`, and waits for its standard input to end, which happens however the tests end.
/// Passwords are asked of the role `fumehood_secret` alone.
const KEEPER: &str = r#"
set -eu
dir=$1 bin=$2 as=$3
cd "$dir"
$as "$bin/initdb" -D "$dir/data" -U postgres -A trust --no-sync -E UTF8 --locale=C >"$dir/initdb.log" 2>&1
printf 'local all fumehood_secret scram-sha-256\nlocal all all trust\n' | $as tee "$dir/data/pg_hba.conf" >/dev/null
$as "$bin/pg_ctl" -D "$dir/data" -w -s -l "$dir/log" start \
    -o "-k $dir -c listen_addresses= -c fsync=off -c max_connections=200" </dev/null >/dev/null 2>&1
echo ready
cat >/dev/null
$as "$bin/pg_ctl" -D "$dir/data" -w -s -m immediate stop </dev/null >/dev/null 2>&1 || true
cd /
rm -rf "$dir"
"#;

pub struct Server {
    dir: PathBuf,
    bin: PathBuf,
    run_as: &'static str,
    keeper: Child,
    stdin: Option<ChildStdin>,
}

static DATABASES: AtomicU32 = AtomicU32::new(0);

impl Server {
    /// The one that all tests of this process share; `None`, said aloud, where PostgreSQL is not installed.
    pub fn shared() -> Option<&'static Server> {
        static SHARED: OnceLock<Option<Server>> = OnceLock::new();
        SHARED
            .get_or_init(|| {
                let server = Server::start()?;
                for role in ["runner", "reader", "owner", "stranger"] {
                    server.psql("postgres", &format!("CREATE ROLE fumehood_{role} LOGIN"));
                }
                Some(server)
            })
            .as_ref()
    }

    pub fn start() -> Option<Server> {
        let Some(bin) = newest_bin() else {
            eprintln!("SKIPPED: PostgreSQL's programs are not in /usr/lib/postgresql");
            return None;
        };
        let is_root = rustix::process::geteuid().is_root();
        let run_as = match is_root {
            true => "setpriv --reuid=postgres --regid=postgres --clear-groups",
            false => "",
        };
        let dir = tempfile::Builder::new()
            .prefix("fh-pg")
            .tempdir()
            .unwrap()
            .keep();
        if is_root {
            let owned = Command::new("chown")
                .arg("postgres:")
                .arg(&dir)
                .status()
                .unwrap();
            assert!(owned.success());
        }
        let mut keeper = Command::new("sh")
            .args(["-c", KEEPER, "keeper"])
            .args([dir.as_os_str(), bin.as_os_str()])
            .arg(run_as)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(keeper.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "ready\n", "see {}", dir.display());
        let stdin = keeper.stdin.take();
        Some(Server {
            dir,
            bin,
            run_as,
            keeper,
            stdin,
        })
    }

    /// A database of its own for one test.
    pub fn database(&self) -> String {
        let number = DATABASES.fetch_add(1, Ordering::Relaxed);
        let name = format!("test_{number}");
        self.psql("postgres", &format!("CREATE DATABASE {name}"));
        name
    }

    pub fn address(&self, database: &str, user: &str) -> String {
        format!(
            "postgres:///{database}?host={}&user={user}",
            self.dir.display()
        )
    }

    pub fn location(&self, database: &str, user: &str) -> Location {
        Location::parse(
            &self.address(database, user),
            LocationOrigin::CommandLine,
            &|_| None,
        )
        .unwrap()
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join(".s.PGSQL.5432")
    }

    /// Where its programs are.
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What a psql of the superuser prints.
    pub fn psql(&self, database: &str, sql: &str) -> String {
        self.psql_as(database, "postgres", sql).unwrap()
    }

    pub fn psql_as(&self, database: &str, user: &str, sql: &str) -> Result<String, String> {
        let ran = Command::new(self.bin.join("psql"))
            .args([
                "-X",
                "-q",
                "-A",
                "-t",
                "-v",
                "ON_ERROR_STOP=1",
                "-d",
                database,
                "-U",
                user,
                "-h",
            ])
            .arg(&self.dir)
            .args(["-c", sql])
            .output()
            .unwrap();
        match ran.status.success() {
            true => Ok(String::from_utf8(ran.stdout).unwrap()),
            false => Err(String::from_utf8(ran.stderr).unwrap()),
        }
    }

    /// As a power cut would: the server and all its children, which could otherwise still finish what they are at.
    pub fn kill(&self) {
        let pid = fs::read_to_string(self.dir.join("data/postmaster.pid")).unwrap();
        let server: i32 = pid.lines().next().unwrap().parse().unwrap();
        kill(server);
        // Its children have another parent now, but their working directory is its data still.
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

    /// The old server's children may take a moment to see that it is gone, and until then a new one refuses.
    pub fn start_again(&self) {
        let script = r#"$3 "$2/pg_ctl" -D "$1/data" -w -s -l "$1/log" start -o "-k $1 -c listen_addresses= -c fsync=off""#;
        for _ in 0..200 {
            let started = Command::new("sh")
                .args(["-c", script, "again"])
                .args([self.dir.as_os_str(), self.bin.as_os_str()])
                .arg(self.run_as)
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

impl Drop for Server {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.keeper.wait();
    }
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
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
