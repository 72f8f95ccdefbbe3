//! The tools that an analysis calls work unmodified at every level: package managers, git, archives and the libraries
//! that write a file under one name and rename it to another. No trial here needs the network or a setting.

use std::fs;

use testkit::trial;

use crate::confined_run::{ConfinedResult, ConfinedRun};
use crate::science::{roomy, went_well};

/// Runs bash with `script`, which stops at its first failing command.
fn bash(script: &str) -> ConfinedResult {
    let script = format!("set -euo pipefail\n{script}");
    roomy(ConfinedRun::new(&["/bin/bash", "-c", &script])).run()
}

trial!(Everyone, moves_between_directories);
/// Renames and links between two directories, each of which may be below TMPDIR. Every part of the workspace has the
/// same rights, so no rename or link gives the program a new right.
fn moves_between_directories() {
    let script = "
TMP = os.environ['TMPDIR']
os.makedirs('a/b'); os.makedirs(TMP + '/t')
open('a/b/x', 'w').write('x'); os.rename('a/b/x', 'a/y'); assert open('a/y').read() == 'x'
os.link('a/y', 'a/b/linked'); assert os.stat('a/y').st_nlink == 2
os.rename('a/b', 'moved'); assert os.path.exists('moved/linked')
open('a/new', 'w').write('new'); os.replace('a/new', 'moved/linked'); assert open('moved/linked').read() == 'new'
# RENAME_EXCHANGE, which both directories must permit.
if libc.renameat2(-100, b'a/y', -100, b'moved/linked', 2) != 0: raise OSError(ctypes.get_errno(), 'exchange')
assert open('a/y').read() == 'new'
# Between TMPDIR and the workspace there may be a mount, over which the kernel moves nothing; shutil then copies.
import shutil
open(TMP + '/t/z', 'w').write('z'); shutil.move(TMP + '/t/z', 'z'); assert open('z').read() == 'z'
# As zarr and many others write: a temporary file elsewhere in the tree, then the name that readers know.
os.makedirs('array.zarr/.tmp')
for n in range(50):
    open(f'array.zarr/.tmp/{n}', 'w').write(str(n)); os.makedirs(f'array.zarr/c/{n}'); os.replace(f'array.zarr/.tmp/{n}', f'array.zarr/c/{n}/0')
print('moved')
";
    went_well(&ConfinedRun::python(script).run(), "moved");
}

trial!(Everyone, pip_installs_into_the_workspace);
fn pip_installs_into_the_workspace() {
    let script = r#"
cat > wheel.py <<'END'
import zipfile
info = 'measure-1.0.dist-info'
files = {
    'measure/__init__.py': 'UNIT = "mm"\ndef main(): print("measured in", UNIT)\n',
    f'{info}/METADATA': 'Metadata-Version: 2.1\nName: measure\nVersion: 1.0\n',
    f'{info}/WHEEL': 'Wheel-Version: 1.0\nGenerator: trial\nRoot-Is-Purelib: true\nTag: py3-none-any\n',
    f'{info}/entry_points.txt': '[console_scripts]\nmeasure = measure:main\n',
}
files[f'{info}/RECORD'] = ''.join(f'{name},,\n' for name in files) + f'{info}/RECORD,,\n'
with zipfile.ZipFile('measure-1.0-py3-none-any.whl', 'w') as z:
    for name, text in files.items(): z.writestr(name, text)
END
python3 wheel.py
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check --no-index ./measure-1.0-py3-none-any.whl
[[ $(env/bin/measure) == "measured in mm" ]]
env/bin/pip install --quiet --disable-pip-version-check --no-index --target lib ./measure-1.0-py3-none-any.whl
[[ $(PYTHONPATH=lib python3 -c 'import measure; print(measure.UNIT)') == mm ]]
env/bin/pip install --quiet --disable-pip-version-check --no-index --force-reinstall ./measure-1.0-py3-none-any.whl
env/bin/pip uninstall --quiet --yes measure
echo installed
"#;
    went_well(&bash(script), "installed");
}

trial!(Everyone, git_clones_and_commits);
fn git_clones_and_commits() {
    // The host's own configuration of git may hold a token, so it stays closed. The first variable tells git to do
    // without it.
    let script = r#"
export GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example.org GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example.org
/usr/bin/git init --quiet -b main origin
cd origin
for n in 1 2 3; do mkdir -p "d$n"; echo "$n" > "d$n/f"; /usr/bin/git add .; /usr/bin/git commit --quiet -m "change $n"; done
cd ..
/usr/bin/git clone --quiet origin linked
/usr/bin/git clone --quiet --no-local origin copied
cd copied
/usr/bin/git switch --quiet -c branch
/usr/bin/git mv d1/f d2/g
/usr/bin/git commit --quiet -m moved
/usr/bin/git gc --quiet
/usr/bin/git fsck --no-progress
/usr/bin/git push --quiet origin branch
/usr/bin/git stash list
/usr/bin/git worktree add --quiet ../tree main
/usr/bin/git config user.name kept
[[ $(/usr/bin/git -C ../origin rev-list --count branch) == 4 && -f ../tree/d3/f ]]
echo cloned
"#;
    went_well(&bash(script), "cloned");
}

trial!(Everyone, zip_and_tar);
fn zip_and_tar() {
    let script = r#"
mkdir -p in/a in/b; seq 1000 > in/a/f; ln in/a/f in/b/linked; ln -s ../a/f in/b/pointing
tar czf in.tgz in
mkdir out; tar xzf in.tgz -C out
[[ $(stat -c %h out/in/a/f) == 2 ]]
cmp in/a/f out/in/b/pointing
mv out/in/a/f out/g; cp -a in again; rm -r again
python3 - <<'END'
import shutil, tarfile, zipfile
shutil.make_archive('packed', 'zip', '.', 'in')
with zipfile.ZipFile('packed.zip') as z: z.extractall('unzipped'); assert z.testzip() is None
assert open('unzipped/in/a/f').read() == open('in/a/f').read()
with tarfile.open('in.tgz') as t: t.extractall('untarred')
shutil.copytree('in', 'copied', symlinks=True); shutil.move('copied', 'out/copied'); shutil.rmtree('out')
END
echo packed
"#;
    went_well(&bash(script), "packed");
}

trial!(Everyone, stores_of_arrays_and_rows);
fn stores_of_arrays_and_rows() {
    let script = "
import sqlite3, numpy as np, pandas as pd, pickle, gzip, json, dbm.dumb, shelve, logging, logging.handlers
a = np.arange(1_000_000, dtype='f8')
np.savez('arrays.npz', a=a, b=a[::2]); np.savez_compressed('small.npz', a=a)
with np.load('arrays.npz') as f: assert np.array_equal(f['b'], a[::2])
os.mkdir('store'); np.save('a.npy', a); os.replace('a.npy', 'store/a.npy'); assert np.load('store/a.npy', mmap_mode='r')[-1] == 999_999
os.makedirs('db/attached')
db = sqlite3.connect('db/rows.db'); db.execute('pragma journal_mode=wal')
db.execute(\"attach 'db/attached/more.db' as more\")
with db: db.execute('create table t (x)'); db.execute('create table more.t (x)'); db.executemany('insert into t values (?)', [(i,) for i in range(1000)])
db.execute('vacuum'); other = sqlite3.connect('copy.db'); db.backup(other)
assert other.execute('select count(*) from t').fetchone() == (1000,)
frame = pd.DataFrame({'x': a[:1000]}); frame.to_csv('x.csv.gz'); frame.to_pickle('x.pkl'); frame.to_sql('frame', other); assert len(pd.read_csv('x.csv.gz')) == 1000
with shelve.Shelf(dbm.dumb.open('shelf')) as s: s['k'] = [1, 2]
# A rotated log is a rename too.
os.mkdir('logs'); handler = logging.handlers.RotatingFileHandler('logs/l', maxBytes=100, backupCount=3)
for n in range(50): handler.emit(logging.LogRecord('n', 20, 'p', 1, 'line %d', (n,), None))
assert os.path.exists('logs/l.3')
print('stored')
";
    went_well(&roomy(ConfinedRun::python(script)).run(), "stored");
}

trial!(Everyone, a_figure_without_a_backend);
/// Nobody names a backend: matplotlib finds by itself that there is no display. Its font cache is written to the home.
fn a_figure_without_a_backend() {
    let script = "
import matplotlib, matplotlib.pyplot as plt
plt.plot([1, 2, 3]); plt.title('Größe in µm'); plt.savefig('plot.png'); plt.savefig('plot.svg')
assert matplotlib.get_backend().lower() == 'agg', matplotlib.get_backend()
assert open('plot.png', 'rb').read(4) == bytes([137]) + b'PNG'
cache = os.path.join(matplotlib.get_cachedir()); assert any(n.startswith('fontlist') for n in os.listdir(cache)), os.listdir(cache)
print('plotted')
";
    let ran = roomy(ConfinedRun::python(script)).run();
    went_well(&ran, "plotted");
    assert!(!ran.stderr.contains("Warning"), "{}", ran.all());
}

trial!(Everyone, r_installs_a_package);
fn r_installs_a_package() {
    let script = r#"
library(splines); library(grid); library(stats4); library(parallel)
dir.create('measure'); dir.create('measure/R'); dir.create('library')
writeLines(c('Package: measure', 'Version: 1.0', 'Title: A Trial', 'Description: Trial.', 'License: GPL-3', 'Author: a', 'Maintainer: a <a@example.org>'), 'measure/DESCRIPTION')
writeLines('export(unit)', 'measure/NAMESPACE')
writeLines('unit <- function() "mm"', 'measure/R/unit.R')
install.packages('measure', lib = 'library', repos = NULL, type = 'source', quiet = TRUE)
library(measure, lib.loc = 'library')
stopifnot(unit() == 'mm')
dir.create('a/b', recursive = TRUE); saveRDS(cars, 'a/b/cars.rds')
stopifnot(file.rename('a/b/cars.rds', 'a/cars.rds'), identical(readRDS('a/cars.rds'), cars))
zip <- tempfile(); tar(zip, 'measure'); stopifnot('measure/DESCRIPTION' %in% untar(zip, list = TRUE))
cat('loaded\n')
"#;
    let confined = roomy(ConfinedRun::new(&["/usr/bin/Rscript", "load.R"]));
    fs::write(confined.workspace().join("load.R"), script).unwrap();
    went_well(&confined.run(), "loaded");
}

trial!(Everyone, pipelines_of_commands);
fn pipelines_of_commands() {
    let script = r#"
seq 1000 | awk '{ s += $1 } END { print s }' > sum
[[ $(cat sum) == 500500 ]]
seq 1000 | xargs -P 4 -n 100 sh -c 'mkdir -p "p/$$"; echo "$@" > "p/$$/x"; mv "p/$$/x" "p/x.$$"' sh
[[ $(cat p/x.* | wc -w) == 1000 ]]
seq 200000 | shuf | sort -n --parallel=2 -S 1M -T "$TMPDIR" | tail -n 1 | tee last | gzip | zcat
sed -i 's/1/2/' sum; install -D -m 755 sum bin/sum; cp --reflink=auto -r p q; find q -name 'x.*' -print0 | xargs -0 rm
make --version > made 2>&1 || true
find . -type f -newer sum -exec stat -c %s {} + > sizes
( flock 9; echo locked ) 9> lock
timeout 10 split -n l/4 last part.
echo piped
"#;
    went_well(&bash(script), "piped");
}
