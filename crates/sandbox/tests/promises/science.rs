//! Ordinary analysis programs run unmodified and without settings. They are the controls for the refusals that the other
//! files test.

use std::fs;
use std::process::Command;

use sandbox::spec::SharedMemory;
use testkit::trial;

use crate::confined_run::{ConfinedResult, ConfinedRun, at_landlock, host_dir};

/// Defines `LANDLOCK` in front of the script. It is true at level `landlock`, where fewer of Python's own features
/// work.
fn told_the_level(script: &str) -> String {
    let level = if at_landlock() { "True" } else { "False" };
    format!("LANDLOCK = {level}\n{script}")
}

/// Asserts that the program printed `word` and exited with code 0, was not stopped, and left no process alive.
pub fn went_well(ran: &ConfinedResult, word: &str) {
    assert!(
        ran.code() == Some(0) && ran.printed(word) && ran.stop().is_none() && ran.outcome.all_dead,
        "{}",
        ran.all()
    );
}

pub fn roomy(confined: ConfinedRun) -> ConfinedRun {
    confined.limits(|l| {
        l.memory_bytes = 2 << 30;
        l.wall_ms = 120_000;
    })
}

trial!(Everyone, numpy_pandas_matplotlib);
fn numpy_pandas_matplotlib() {
    let script = "
import numpy as np, pandas as pd
import matplotlib
matplotlib.use('Agg')
import matplotlib.pyplot as plt
rng = np.random.default_rng(7)
m = rng.normal(size=(300, 300))
assert np.allclose(m @ np.linalg.inv(m), np.eye(300), atol=1e-6)
np.save('m.npy', m)
assert np.array_equal(np.load('m.npy', mmap_mode='r'), m)
big = np.memmap('big.dat', dtype='f8', mode='w+', shape=(1000, 100)); big[:] = 1; big.flush()
df = pd.DataFrame({'group': list('ab') * 50, 'x': rng.normal(size=100)})
df.groupby('group').x.describe().to_csv('table.csv')
assert len(pd.read_csv('table.csv')) == 2
plt.plot(df.x); plt.title('Größe in µm'); plt.savefig('plot.png'); plt.savefig('plot.pdf')
assert open('plot.png', 'rb').read(8) == bytes([137]) + b'PNG' + bytes([13, 10, 26, 10])
assert os.path.getsize('plot.pdf') > 1000
print('plotted')
";
    went_well(&roomy(ConfinedRun::python(script)).run(), "plotted");
}

trial!(Everyone, multiprocessing);
fn multiprocessing() {
    let script = "
import multiprocessing as mp
from multiprocessing import shared_memory
import numpy as np
def square(x): return x * x
def add(lock, value, queue):
    for _ in range(200):
        with lock: value.value += 1
    queue.put(os.getpid())
def fill(name):
    block = shared_memory.SharedMemory(name=name)
    np.ndarray((1000,), dtype='i8', buffer=block.buf)[:] = 7
    block.close()
if __name__ == '__main__':
    with mp.Pool(4) as pool: assert pool.map(square, range(100)) == [x * x for x in range(100)]
    lock, value, queue = mp.Lock(), mp.Value('i', 0), mp.Queue()
    workers = [mp.Process(target=add, args=(lock, value, queue)) for _ in range(4)]
    for w in workers: w.start()
    pids = {queue.get(timeout=60) for _ in workers}
    for w in workers: w.join()
    assert value.value == 800 and len(pids) == 4
    block = shared_memory.SharedMemory(create=True, size=8000)
    p = mp.Process(target=fill, args=(block.name,)); p.start(); p.join()
    assert np.ndarray((1000,), dtype='i8', buffer=block.buf).sum() == 7000
    block.close(); block.unlink()
    # A manager and a fork server are reached by sockets.
    if not LANDLOCK:
        with mp.Manager() as manager:
            d = manager.dict()
            p = mp.Process(target=d.update, args=({'a': 1},)); p.start(); p.join()
            assert dict(d) == {'a': 1}
    semaphore, event, barrier = mp.Semaphore(2), mp.Event(), mp.Barrier(1)
    semaphore.acquire(); semaphore.release(); event.set(); barrier.wait()
    # Fresh interpreters and a fork server find the program again by its file.
    for way in ('spawn',) if LANDLOCK else ('spawn', 'forkserver'):
        with mp.get_context(way).Pool(2) as pool: assert pool.map(abs, [-1, -2]) == [1, 2]
    print('pooled')
";
    // The script is a file, because `spawn` starts it again by its name.
    let mut confined = roomy(ConfinedRun::new(&["/usr/bin/python3", "parallel.py"]));
    // The locks of multiprocessing are in /dev/shm, which a run at level `landlock` has to ask for.
    confined.spec.shared_memory = SharedMemory::Host;
    fs::write(
        confined.workspace().join("parallel.py"),
        told_the_level(&format!("import os\n{script}")),
    )
    .unwrap();
    went_well(&confined.run(), "pooled");
}

trial!(Everyone, threads_and_subprocesses);
fn threads_and_subprocesses() {
    let script = "
import concurrent.futures as cf, subprocess, threading
with cf.ThreadPoolExecutor(16) as pool: assert sum(pool.map(lambda x: x, range(1000))) == 499500
local, seen = threading.local(), []
threads = [threading.Thread(target=seen.append, args=(i,)) for i in range(50)]
for t in threads: t.start()
for t in threads: t.join()
assert sorted(seen) == list(range(50))
assert subprocess.run('echo out; echo err >&2; exit 3', shell=True, capture_output=True, text=True).returncode == 3
assert subprocess.check_output(['sort', '-r'], input=b'a\\nb\\n') == b'b\\na\\n'
first = subprocess.Popen(['yes'], stdout=subprocess.PIPE)
assert subprocess.check_output(['head', '-n', '2'], stdin=first.stdout) == b'y\\ny\\n'
first.stdout.close(); first.wait()
try: subprocess.run(['sleep', '60'], timeout=0.1); assert False
except subprocess.TimeoutExpired: pass
try: subprocess.run(['/no/such/program']); assert False
except FileNotFoundError: pass
assert os.popen('nproc').read().strip().isdigit()
print('spawned')
";
    went_well(&ConfinedRun::python(script).run(), "spawned");
}

trial!(Everyone, temporary_files_and_sqlite);
fn temporary_files_and_sqlite() {
    let script = "
import sqlite3, tempfile, shutil, fcntl, mmap
with tempfile.TemporaryDirectory() as d:
    assert d.startswith(os.environ['TMPDIR'] + '/')
    open(os.path.join(d, 'x'), 'w').write('x')
with tempfile.NamedTemporaryFile() as f: f.write(b'x'); f.flush(); assert open(f.name).read() == 'x'
with tempfile.TemporaryFile() as f: f.write(b'x'); f.seek(0); assert f.read() == b'x'
with tempfile.SpooledTemporaryFile(10) as f: f.write(b'x' * 100)
for mode in ('DELETE', 'WAL', 'MEMORY'):
    db = sqlite3.connect(f'results-{mode}.db')
    db.execute(f'pragma journal_mode={mode}')
    db.execute('create table t (x)')
    with db: db.executemany('insert into t values (?)', [(i,) for i in range(1000)])
    other = sqlite3.connect(f'results-{mode}.db')
    assert other.execute('select sum(x) from t').fetchone() == (499500,)
    db.close(); other.close()
with open('locked', 'w+') as f:
    fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.posix_fallocate(f.fileno(), 0, 1 << 20)
    assert os.path.getsize('locked') == 1 << 20
os.link('locked', 'linked'); os.symlink('locked', 'pointing'); os.mkfifo('fifo')
try: os.setxattr('locked', 'user.unit', b'mm'); assert os.getxattr('locked', 'user.unit') == b'mm'
except OSError as e: assert LANDLOCK and e.errno == errno.EOPNOTSUPP
TMP = os.environ['TMPDIR']
shutil.copytree('.', TMP + '/copied', ignore=shutil.ignore_patterns('fifo', '.fumehood')); shutil.rmtree(TMP + '/copied')
shutil.make_archive(TMP + '/packed', 'gztar', '.', 'linked'); shutil.move(TMP + '/packed.tar.gz', 'packed.tar.gz')
assert os.environ['HOME'] and open(os.path.expanduser('~/.cache-probe'), 'w').write('x')
print('kept')
";
    went_well(&ConfinedRun::python(&told_the_level(script)).run(), "kept");
}

trial!(
    Everyone,
    asyncio_servers_and_clients,
    only_at_full = "there are no sockets but pairs; asyncio without servers is landlock_level::pairs_of_sockets_work"
);
fn asyncio_servers_and_clients() {
    let script = "
import asyncio
async def echo(reader, writer):
    writer.write(await reader.readline()); await writer.drain(); writer.close()
async def ask(reader, writer):
    writer.write(b'hello\\n'); answer = await reader.readline(); writer.close(); return answer
async def main():
    for place in ('here.sock', '/tmp/there.sock', '/dev/shm/shared.sock'):
        server = await asyncio.start_unix_server(echo, place)
        assert await ask(*await asyncio.open_unix_connection(place)) == b'hello\\n'
        server.close()
    for host in ('127.0.0.1', 'localhost', '::1'):
        server = await asyncio.start_server(echo, host, 0)
        port = server.sockets[0].getsockname()[1]
        answers = await asyncio.gather(*(asyncio.open_connection(host, port) for _ in range(20)))
        for pair in answers: assert await ask(*pair) == b'hello\\n'
        server.close()
    process = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)
    assert (await process.communicate(b'x'))[0] == b'x'
    # A refused connection is told apart from everything else, also by a socket that does not wait.
    try: await asyncio.open_connection('127.0.0.1', 1); assert False
    except ConnectionRefusedError: pass
    await asyncio.sleep(0.01)
asyncio.run(main())
a, b = socket.socketpair(); a.sendall(b'x'); assert b.recv(1) == b'x'
listener = socket.socket(socket.AF_UNIX); listener.bind('\\0abstract'); listener.listen()
client = socket.socket(socket.AF_UNIX); client.connect('\\0abstract'); listener.accept()
a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [1]); assert len(socket.recv_fds(b, 1, 1)[1]) == 1
print('served')
";
    went_well(&ConfinedRun::python(script).run(), "served");
}

trial!(
    Everyone,
    loopback_datagrams,
    only_at_full = "there are no sockets but pairs"
);
fn loopback_datagrams() {
    let script = "
for family, host in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')):
    receiver = socket.socket(family, socket.SOCK_DGRAM); receiver.bind((host, 0)); receiver.settimeout(30)
    sender = socket.socket(family, socket.SOCK_DGRAM)
    sender.sendto(b'first', receiver.getsockname()[:2])
    sender.connect(receiver.getsockname()[:2]); sender.send(b'second')
    assert [receiver.recv(10), receiver.recv(10)] == [b'first', b'second']
assert socket.gethostbyname('localhost') == '127.0.0.1' and socket.gethostbyname(socket.gethostname()) == '127.0.0.1'
assert [name for _, name in socket.if_nameindex()] == ['lo']
print('received')
";
    went_well(&ConfinedRun::python(script).run(), "received");
}

trial!(Everyone, compiled_extensions);
fn compiled_extensions() {
    let script = r#"
set -e
cat > model.c <<'END'
#include <math.h>
double model(double x) { return sqrt(x) + 1.0; }
END
gcc -O1 -shared -fPIC -o model.so model.c -lm
cat > main.c <<'END'
#include <stdio.h>
#include <pthread.h>
static void *work(void *p) { *(int *)p = 42; return 0; }
int main(void) { pthread_t t; int n = 0; pthread_create(&t, 0, work, &n); pthread_join(t, 0); printf("%d\n", n); return n != 42; }
END
gcc -o "$TMPDIR/main" main.c -lpthread
"$TMPDIR/main"
cp "$TMPDIR/main" ./main
./main
python3 -c 'import ctypes; m = ctypes.CDLL("./model.so").model; m.restype = ctypes.c_double; m.argtypes = [ctypes.c_double]; assert m(9.0) == 4.0'
chmod +x model.so; printf '#!/usr/bin/python3\nprint("script")\n' > run.py; chmod +x run.py; ./run.py
echo built
"#;
    went_well(
        &roomy(ConfinedRun::new(&["/bin/bash", "-c", script])).run(),
        "built",
    );
}

trial!(Everyone, statistics_in_r);
fn statistics_in_r() {
    let script = "
fit <- lm(dist ~ speed, data = cars)
stopifnot(abs(coef(fit)[['speed']] - 3.932409) < 1e-5)
write.csv(as.data.frame(summary(fit)$coefficients), 'fit.csv')
stopifnot(nrow(read.csv('fit.csv')) == 2)
png('plot.png', type = 'cairo'); plot(cars, main = 'Größe'); invisible(dev.off())
pdf('plot.pdf'); plot(cars); invisible(dev.off())
stopifnot(file.size('plot.png') > 1000, file.size('plot.pdf') > 1000)
squares <- parallel::mclapply(1:8, function(i) i^2, mc.cores = 2)
stopifnot(sum(unlist(squares)) == 204)
stopifnot(system('exit 3') == 3, nchar(tempdir()) > 0, nchar(Sys.info()[['user']]) > 0)
saveRDS(fit, 'fit.rds'); stopifnot(identical(coef(readRDS('fit.rds')), coef(fit)))
cat('fitted\n')
";
    let confined = roomy(ConfinedRun::new(&["/usr/bin/Rscript", "fit.R"]));
    fs::write(confined.workspace().join("fit.R"), script).unwrap();
    went_well(&confined.run(), "fitted");
}

trial!(Everyone, bash);
fn bash() {
    let script = r#"
set -euo pipefail
diff <(seq 3) <(printf '1\n2\n3\n')
seq 5 > >(cat > numbers); wait $! || true
text=$(cat <<END
here $((1 + 1))
END
)
[[ $text == "here 2" ]]
read -r a b <<< "x y"; [[ $b == y ]]
sleep 60 & kill %1; wait 2>/dev/null || true
trap 'echo trapped' EXIT
mkdir -p out/{a,b}; for d in out/*/; do touch "$d/f"; done
[[ $(find out -type f | wc -l) == 2 ]]
coproc cat; echo through >&"${COPROC[1]}"; read -r line <&"${COPROC[0]}"; [[ $line == through ]]
tar czf out.tgz out && tar tzf out.tgz | sort | tail -n 1
[[ $(ulimit -c) != unlimited && $(umask) == 0077 && $PWD == /tmp/scidex-analysis-* ]]
echo shelled
"#;
    let ran = ConfinedRun::new(&["/bin/bash", "-c", script]).run();
    went_well(&ran, "shelled");
    assert!(ran.printed("trapped"), "{}", ran.all());
}

/// Runs an interpreter if the host has it. The test command installs none of these interpreters.
fn if_present(program: &str, confined: impl FnOnce() -> ConfinedRun, word: &str) {
    if !std::path::Path::new(program).exists() {
        eprintln!("UNAVAILABLE: {program} is not on this host");
        return;
    }
    went_well(&confined().run(), word);
}

trial!(Everyone, perl);
fn perl() {
    let script = "use strict; use List::Util 'sum'; use File::Temp; my $f = File::Temp->new; print $f 'x'; \
                  my $n = `echo 4`; die unless sum(1, 2, $n) == 7; my $pid = fork // die; exit 0 unless $pid; waitpid $pid, 0; print \"summed\\n\"";
    if_present(
        "/usr/bin/perl",
        || ConfinedRun::new(&["/usr/bin/perl", "-e", script]),
        "summed",
    );
}

trial!(Everyone, java);
fn java() {
    let source = "public class Main { public static void main(String[] a) throws Exception { \
                  var sum = java.util.stream.IntStream.range(0, 1000).parallel().sum(); \
                  java.nio.file.Files.writeString(java.nio.file.Path.of(\"out.txt\"), \"\" + sum); \
                  var t = new Thread(() -> System.out.println(\"ran\")); t.start(); t.join(); } }";
    let make = || {
        let confined = roomy(ConfinedRun::new(&[
            "/usr/bin/java",
            "-Xmx256m",
            "Main.java",
        ]));
        fs::write(confined.workspace().join("Main.java"), source).unwrap();
        confined
    };
    // Running a source file needs the compiler module, which a runtime without it does not have.
    let has_compiler = Command::new("/usr/bin/java").arg("--list-modules").output();
    if has_compiler.is_ok_and(|o| String::from_utf8_lossy(&o.stdout).contains("jdk.compiler")) {
        if_present("/usr/bin/java", make, "ran");
    } else {
        if_present(
            "/usr/bin/java",
            || roomy(ConfinedRun::sh("java -Xmx256m -version && echo ran")),
            "ran",
        );
    }
}

trial!(Everyone, names_of_any_bytes);
fn names_of_any_bytes() {
    let script = "
for name in ('Größe µm.csv', '数据', '🧪', 'a\\nb', ' leading', '-dash', 'x' * 255, 'quote\"\\'', '*'):
    open(name, 'w').write(name); assert open(name).read() == name and name in os.listdir('.')
raw = bytes(range(128, 256)); open(raw, 'wb').close(); assert raw in os.listdir(b'.')
os.makedirs('目录/ÿ'); os.chdir('目录/ÿ'); assert os.getcwd().endswith('目录/ÿ')
print('naïve')
";
    went_well(&ConfinedRun::python(script).run(), "naïve");
}

trial!(Everyone, large_files);
fn large_files() {
    let script = "
with open('sparse', 'wb') as f: f.seek((1 << 30) - 1); f.write(b'x')
assert os.path.getsize('sparse') == 1 << 30 and os.stat('sparse').st_blocks < 1000
os.truncate('sparse', 3 << 30)
block = bytes(range(256)) * 4096
with open('full', 'wb') as f:
    for _ in range(200): f.write(block)
assert os.path.getsize('full') == 200 << 20
with open('full', 'rb') as f: f.seek(150 << 20); assert f.read(1 << 20) == block
with open('full', 'rb') as source, open('copied', 'wb') as target: assert os.copy_file_range(source.fileno(), target.fileno(), 1 << 20) == 1 << 20
print('stored')
";
    went_well(
        &ConfinedRun::python(script)
            .limits(|l| l.disk_bytes = 4 << 30)
            .run(),
        "stored",
    );
}

trial!(
    Everyone,
    the_program_sees_a_user_name_a_host_name_and_a_home
);
fn the_program_sees_a_user_name_a_host_name_and_a_home() {
    let script = "
import getpass, pwd, grp, pathlib, platform, locale
assert getpass.getuser() == 'analysis' and pwd.getpwnam('root').pw_uid == 0 and grp.getgrnam('root').gr_gid == 0
# At level landlock the list of users is the host's own, in which a leased uid has no name.
if LANDLOCK:
    try: assert pwd.getpwuid(os.getuid()).pw_uid == os.getuid() and pathlib.Path('.').owner()
    except KeyError: assert os.getuid() >= 1_900_000_000
else:
    assert pwd.getpwuid(os.getuid()).pw_name == getpass.getuser() == 'analysis'
    assert grp.getgrgid(os.getgid()).gr_name == 'analysis' and platform.node() == 'fumehood'
assert pathlib.Path.home() == pathlib.Path(os.environ['HOME']) and platform.freedesktop_os_release()
assert open('own', 'w') and os.stat('own').st_uid == os.getuid()
assert LANDLOCK or pathlib.Path('own').owner() == 'analysis'
assert len(os.urandom(64)) == 64 and os.cpu_count() >= 1 and len(os.sched_getaffinity(0)) >= 1
import zoneinfo, datetime; datetime.datetime.now(zoneinfo.ZoneInfo('Europe/Paris'))
print('analysis')
";
    // Every run has LOGNAME set. Many libraries ask for the user's name, and they read LOGNAME before the list of
    // users.
    let confined = ConfinedRun::python(&told_the_level(script)).env("LOGNAME", "analysis");
    went_well(&confined.run(), "analysis");
    let ran = ConfinedRun::sh("whoami; id -un; id -gn; hostname; uname -n; date >/dev/null; df . >/dev/null; ps -e >/dev/null 2>&1; echo asked").run();
    went_well(&ran, "asked");
    assert!(
        at_landlock() || ran.printed("analysis") && ran.printed("fumehood"),
        "{}",
        ran.all()
    );
}

trial!(Everyone, unknown_hosts_fail_fast);
/// The bound is the run's own wall time, far below the minutes that a resolver's retries would take.
fn unknown_hosts_fail_fast() {
    let script = "
for ask in (lambda: socket.gethostbyname('example.org'), lambda: socket.getaddrinfo('example.org', 443), lambda: socket.gethostbyaddr('192.0.2.1')):
    try: ask(); print('resolved')
    except (socket.gaierror, socket.herror): print('unknown')
import urllib.request
try: urllib.request.urlopen('http://example.org/', timeout=60); print('fetched')
except OSError as e: print('offline')
try: socket.create_connection(('192.0.2.1', 80), timeout=60); print('connected')
except OSError as e: print('unreachable', errno.errorcode[e.errno])
";
    let ran = ConfinedRun::python(script)
        .limits(|l| l.wall_ms = 20_000)
        .run();
    let unreachable = if at_landlock() {
        "EACCES"
    } else {
        "ENETUNREACH"
    };
    went_well(&ran, &format!("unreachable {unreachable}"));
    assert_eq!(
        (
            ran.stdout.matches("unknown").count(),
            ran.printed("offline")
        ),
        (3, true),
        "{}",
        ran.all()
    );
}

trial!(Everyone, signals_and_timers);
fn signals_and_timers() {
    let script = "
import signal, time, select
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1)); os.kill(os.getpid(), signal.SIGUSR1)
signal.signal(signal.SIGALRM, lambda *_: seen.append(2)); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()
assert seen == [1, 2]
pid = os.fork()
if pid == 0: signal.pause()
os.kill(pid, signal.SIGSTOP); os.waitpid(pid, os.WUNTRACED); os.kill(pid, signal.SIGCONT); os.kill(pid, signal.SIGKILL)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
e = select.epoll(); r, w = os.pipe(); e.register(r); os.write(w, b'x'); assert e.poll(10)
assert time.monotonic() > 0 and time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) >= 0
os.nice(1); import resource; assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
print('timed')
";
    went_well(&ConfinedRun::python(script).run(), "timed");
}

trial!(Everyone, ten_thousand_orphans);
/// Pid 1 becomes the parent of orphans. With a limit of 64 processes, ten thousand can only come and go if pid 1 reaps them.
fn ten_thousand_orphans() {
    let source = r#"
#include <errno.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
static pid_t spawn(void) {
    struct timespec pause = {0, 1000000};
    /* The dead still count until they are buried: being refused for a moment is not being out of room. */
    for (int tries = 0; tries < 20000; tries++) {
        pid_t pid = fork();
        if (pid >= 0 || errno != EAGAIN) return pid;
        nanosleep(&pause, 0);
    }
    return -1;
}
int main(void) {
    for (int i = 0; i < 10000; i++) {
        pid_t child = spawn();
        if (child < 0) { printf("stuck at %d\n", i); return 1; }
        if (child == 0) { _exit(spawn() < 0); }
        int status;
        if (waitpid(child, &status, 0) != child || status != 0) { printf("lost at %d\n", i); return 2; }
    }
    puts("buried");
    return 0;
}
"#;
    let dir = host_dir();
    fs::write(dir.path().join("orphans.c"), source).unwrap();
    let built = Command::new("gcc")
        .args(["-O1", "-static", "-o", "orphans", "orphans.c"])
        .current_dir(dir.path())
        .status()
        .unwrap();
    assert!(built.success());
    // Without a user namespace and without a cgroup, zombies count against the limit until they are reaped.
    let pids = if at_landlock() { 512 } else { 64 };
    let confined = ConfinedRun::new(&["./orphans"]).limits(|l| l.pids = pids);
    fs::copy(
        dir.path().join("orphans"),
        confined.workspace().join("orphans"),
    )
    .unwrap();
    let mut confined = confined;
    confined.spec.program = sandbox::spec::InsidePath::new(confined.workspace().join("orphans"));
    went_well(&confined.run(), "buried");
}

trial!(Everyone, ids_of_others_are_refused);
/// CPython's own tests (test_os, test_subprocess) expect EPERM for the ids of others, even if no such id exists.
fn ids_of_others_are_refused() {
    let script = told_the_level(
        r#"
import subprocess
open('f', 'w').close()
uid, gid = os.getuid(), os.getgid()
def refused(act, *args, **named):
    try: act(*args, **named)
    except PermissionError: return
    raise AssertionError((act, args, named))
for other in (0, 12345, 65534):
    refused(os.chown, 'f', other, -1); refused(os.chown, 'f', -1, other); refused(os.chown, 'f', uid, other)
    refused(os.lchown, 'f', other, gid); refused(os.fchown, os.open('f', os.O_RDONLY), other, gid)
    refused(os.setuid, other); refused(os.setgid, other); refused(os.setreuid, other, -1)
    refused(os.setregid, -1, other); refused(os.setresuid, uid, uid, other); refused(os.setresgid, other, gid, gid)
    refused(subprocess.run, ['/bin/true'], user=other); refused(subprocess.run, ['/bin/true'], group=other)
refused(os.setgroups, [0])
# What is its own already.
os.setuid(uid); os.setgid(gid); os.setreuid(uid, -1); os.setregid(-1, gid); os.setresuid(uid, uid, -1)
subprocess.run(['/bin/true'], user=uid, group=gid, check=True)
if not LANDLOCK: os.chown('f', uid, gid); os.chown('f', -1, -1); os.lchown('f', uid, -1)
print('REFUSED')
"#,
    );
    let ran = ConfinedRun::python(&script).run();
    assert!(ran.printed("REFUSED"), "{}", ran.all());
}

trial!(
    Everyone,
    unix_datagrams_in_the_standard_library,
    only_at_full = "there are no sockets but pairs of streams"
);
/// What CPython's own tests of asyncio, logging and socketserver do with unix datagrams.
fn unix_datagrams_in_the_standard_library() {
    let script = r#"
import asyncio, logging, logging.handlers, socket, socketserver, threading
here = os.getcwd()
async def talk():
    got = asyncio.get_running_loop().create_future()
    class Hear(asyncio.DatagramProtocol):
        def datagram_received(self, data, addr): got.set_result((data, addr))
    loop = asyncio.get_running_loop()
    server, _ = await loop.create_datagram_endpoint(Hear, local_addr=here + '/heard', family=socket.AF_UNIX)
    client, _ = await loop.create_datagram_endpoint(
        asyncio.DatagramProtocol, local_addr=here + '/said', remote_addr=here + '/heard', family=socket.AF_UNIX)
    client.sendto(b'hi')
    assert await got == (b'hi', here + '/said')
    client.close(); server.close()
asyncio.run(talk())

log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); log.bind(here + '/log')
handler = logging.handlers.SysLogHandler(here + '/log')
logging.getLogger().addHandler(handler); logging.getLogger().error('spam')
assert log.recv(100) == b'<11>spam\0'
handler.close(); logging.getLogger().removeHandler(handler)

class Echo(socketserver.BaseRequestHandler):
    def handle(self): self.request[1].sendto(self.request[0].upper(), self.client_address)
class Forking(socketserver.ForkingMixIn, socketserver.UnixDatagramServer): pass
for kind in (socketserver.UnixDatagramServer, socketserver.ThreadingUnixDatagramServer, Forking):
    name = here + '/' + kind.__name__
    with kind(name, Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); client.bind(name + '-client')
        client.sendto(b'shout', name)
        assert client.recv(100) == b'SHOUT', kind
        server.shutdown()
print('HEARD')
"#;
    let ran = ConfinedRun::python(script).run();
    assert!(ran.printed("HEARD"), "{}", ran.all());
}

trial!(
    Everyone,
    socket_buffer_sizes,
    only_at_full = "there the sizes of buffers are accepted without effect"
);
/// A smaller buffer takes effect. A buffer larger than the kernel's default gets the default size.
fn socket_buffer_sizes() {
    let script = r#"
import socket
for family, kind, most in ((socket.AF_INET, socket.SOCK_STREAM, 65536), (socket.AF_INET, socket.SOCK_DGRAM, 212992), (socket.AF_UNIX, socket.SOCK_STREAM, 212992)):
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        s = socket.socket(family, kind)
        get = lambda: s.getsockopt(socket.SOL_SOCKET, option)
        s.setsockopt(socket.SOL_SOCKET, option, 8192); assert get() == 16384, get()
        for large in (1 << 20, 1 << 30, -1):
            s.setsockopt(socket.SOL_SOCKET, option, large); assert get() == most, get()
        s.setsockopt(socket.SOL_SOCKET, option, 1); assert 0 < get() < 8192, get()
        for forced in (32, 33):
            try: s.setsockopt(socket.SOL_SOCKET, forced, 1 << 20); raise AssertionError(forced)
            except PermissionError: pass
        try: s.setsockopt(socket.SOL_SOCKET, option, b'1'); raise AssertionError('a short value')
        except OSError as e: assert e.errno == 22, e
# Sixteen times less fits: what was set is what holds.
def room(size):
    a, b = socket.socketpair(); a.setblocking(False)
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    n = 0
    try:
        while True: n += a.send(bytes(512))
    except BlockingIOError: return n
assert room(4096) * 4 < room(65536), (room(4096), room(65536))
print('SIZED')
"#;
    let ran = ConfinedRun::python(script).run();
    assert!(ran.printed("SIZED"), "{}", ran.all());
}
