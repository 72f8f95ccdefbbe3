//! Removing objects that nobody refers to from the artifact store of this machine.
//!
//! Who may refer to one: the rows of every database that was ever used with the store, and the manifests of attempts that
//! are not committed, in every home. We can ask one database and look through one home. So before anything is removed,
//! the store's own list of its users must name nobody but these two; whoever else is on it has to be struck off by hand
//! (`gc --forget-others`). While we look, the store is held alone: nobody puts objects in or commits.

use std::collections::HashSet;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use engine::attempt::recorder::Recorder;
use engine::home::Home;
use engine::run_dir::StateFile;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::Serialize;
use store::artifacts::{Artifacts, ExclusiveLock, StoreUser, SweepTotals};
use store::types::manifest::{ContentHash, Manifest};
use store::types::units::format_size;

use super::print::counted;
use super::show;

/// How long commits in progress are waited for.
const PATIENCE: Duration = Duration::from_secs(20);
/// A million outputs with long names; what is larger is none of ours.
const MANIFEST_BYTES_MAX: u64 = 1 << 30;

pub enum Scope {
    /// These, where nobody refers to them any more.
    Only(HashSet<ContentHash>),
    All(Sweeping),
}

#[derive(Clone, Copy, Debug)]
pub struct Sweeping {
    pub dry_run: bool,
    pub others: Others,
}

/// What to do about users of the store whom we cannot ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    Respected,
    /// The caller says that they refer to nothing any more.
    Forgotten,
}

/// What was removed, or why nothing was.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Sweep {
    pub dry_run: bool,
    pub objects: u64,
    pub bytes: u64,
    pub stale: u64,
    pub failed: u64,
    pub foreign: u64,
    /// Why the store was not swept.
    pub not_swept: Option<String>,
}

impl Sweep {
    pub fn tell(&self) {
        if let Some(why) = &self.not_swept {
            show::line(&format!("objects in the artifact store were left: {why}"));
            return;
        }
        let verb = if self.dry_run { "would free" } else { "freed" };
        if self.objects + self.stale > 0 {
            let what = counted(self.objects + self.stale, "object", "objects");
            show::line(&format!("{verb} {what} ({})", format_size(self.bytes)));
        }
        if self.failed > 0 {
            let what = counted(self.failed, "object", "objects");
            show::line(&format!("could not remove {what} from the artifact store"));
        }
        if self.foreign > 0 {
            let what = counted(self.foreign, "file", "files");
            show::line(&format!(
                "left {what} in the artifact store that are none of Fumehood's"
            ));
        }
    }
}

/// Never fails: what could not be done is said, and done by the next `gc`.
pub fn sweep(home: &Home, ledger: &mut Recorder, scope: &Scope) -> Sweep {
    let dry_run = matches!(scope, Scope::All(Sweeping { dry_run: true, .. }));
    match try_sweep(home, ledger, scope) {
        Ok(swept) => Sweep {
            dry_run,
            objects: swept.objects,
            bytes: swept.bytes,
            stale: swept.stale,
            failed: swept.failed,
            foreign: swept.foreign,
            not_swept: None,
        },
        Err(e) => Sweep {
            dry_run,
            not_swept: Some(format!("{e:#}")),
            ..Sweep::default()
        },
    }
}

fn try_sweep(home: &Home, ledger: &mut Recorder, scope: &Scope) -> anyhow::Result<SweepTotals> {
    if !ledger.artifacts_at.join("store.json").exists() {
        // Opening would make it, and there is nothing to sweep.
        return Ok(SweepTotals::default());
    }
    let artifacts = ledger.artifacts()?;
    let alone = artifacts.lock_exclusive(PATIENCE)?;
    let (dry_run, others) = match scope {
        Scope::All(sweeping) => (sweeping.dry_run, sweeping.others),
        Scope::Only(_) => (false, Others::Respected),
    };
    check_users(&artifacts, &alone, (home, ledger), dry_run, others)?;
    let kept = referenced(home, ledger, &artifacts, scope)?;
    let is_kept = |hash: &ContentHash| match scope {
        Scope::Only(objects) => !objects.contains(hash) || kept.binary_search(hash).is_ok(),
        Scope::All(_) => kept.binary_search(hash).is_ok(),
    };
    Ok(artifacts.remove_unreferenced(&alone, &is_kept, dry_run)?)
}

/// Fails unless we are the store's only user.
fn check_users(
    artifacts: &Artifacts,
    alone: &ExclusiveLock,
    (home, ledger): (&Home, &mut Recorder),
    dry_run: bool,
    others: Others,
) -> anyhow::Result<()> {
    let database = ledger.location.to_string();
    let us = StoreUser::new(ledger.store()?.id(), &database, home.path());
    let users = artifacts.users()?;
    let strangers: Vec<&StoreUser> = users
        .iter()
        .filter(|user| !user.is_same_user(&us))
        .collect();
    if others == Others::Forgotten {
        if !dry_run {
            for user in strangers {
                artifacts.forget_user(alone, user)?;
            }
        }
        return Ok(());
    }
    if let Some(other) = strangers.first() {
        let who = match other.database_id == us.database_id && other.home != us.home {
            true => format!("the home {} has", other.home),
            false => format!("the database {} has", other.database),
        };
        anyhow::bail!(
            "{who} used {} as well, and may need them; if it is gone for good, `fumehood gc --forget-others`",
            artifacts.path().display()
        );
    }
    // Nobody noted, and yet objects: then we do not know whose they are.
    anyhow::ensure!(
        !users.is_empty() || artifacts.usage()?.objects == 0,
        "nobody is noted in {} as having used it; if no other database needs them, `fumehood gc --forget-others`",
        artifacts.path().display()
    );
    Ok(())
}

/// What the database and the manifests in this home refer to, in order. Of objects that are no candidates nothing need
/// be remembered.
fn referenced(
    home: &Home,
    ledger: &mut Recorder,
    artifacts: &Artifacts,
    scope: &Scope,
) -> anyhow::Result<Vec<ContentHash>> {
    let mut kept = Vec::new();
    let mut keep = |hash: &ContentHash| match scope {
        Scope::Only(objects) if !objects.contains(hash) => {}
        _ => kept.push(*hash),
    };
    // In this order: an attempt that could not be committed moves from the first to the second.
    for base in [home.runs(), home.pending()] {
        for id in entries(&base)? {
            for dir in entries(&id)? {
                let manifest = read_manifest(&dir)
                    .with_context(|| format!("read the manifest in {}", dir.display()))?;
                let outputs = manifest.iter().flat_map(|m| &m.collected.outputs);
                outputs.for_each(|output| keep(&output.blake3));
            }
        }
    }
    let id = artifacts.id().to_owned();
    ledger.with(|store| {
        store.for_each_referenced_object(&id, &mut |hash| {
            keep(hash);
            Ok(())
        })
    })?;
    kept.sort_unstable();
    kept.dedup();
    Ok(kept)
}

/// None of what cannot be listed may be taken for empty; what is gone by now is.
fn entries(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let list = || -> io::Result<Vec<PathBuf>> {
        std::fs::read_dir(dir)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect()
    };
    match list() {
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(Vec::new())
        }
        list => list.with_context(|| format!("list {}", dir.display())),
    }
}

/// `None`: there is none. A directory that is gone was committed, or moved to where we look next.
fn read_manifest(dir: &Path) -> anyhow::Result<Option<Manifest>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let path = dir.join(StateFile::Manifest.name());
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        file => file?,
    };
    let mut text = Vec::new();
    let file = std::fs::File::from(file);
    file.take(MANIFEST_BYTES_MAX).read_to_end(&mut text)?;
    Ok(Some(serde_json::from_slice(&text)?))
}
