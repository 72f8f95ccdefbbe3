//! Removes unreferenced objects from the artifact store of this machine.
//!
//! An object may be referenced by rows of every database that ever used the store, and by manifests of uncommitted
//! attempts in every home. This process can ask one database and search one home. So before it removes anything, the
//! store's own list of users must name nobody but these two; the caller can remove others from the list with `gc
//! --forget-others`. Meanwhile this process holds the store's exclusive lock, so nobody adds objects or commits.

use std::collections::HashSet;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use engine::attempt::recorder::Recorder;
use engine::home::Home;
use engine::run_dir::StateFile;
use rustix::io::Errno;
use serde::Serialize;
use store::artifacts::{Artifacts, ExclusiveLock, StoreUser, SweepTotals};
use store::types::manifest::{ContentHash, Manifest};
use store::types::units::format_size;

use super::print::format_count;
use super::{messages, run_dirs};

/// How long to wait for commits in progress.
const COMMIT_WAIT: Duration = Duration::from_secs(20);
/// Enough for a million outputs with long names. A larger file is not a manifest of Fumehood.
const MANIFEST_BYTES_MAX: u64 = 1 << 30;

pub enum ObjectScope {
    /// Only these objects, if nobody refers to them any more.
    Only(HashSet<ContentHash>),
    All(ObjectGcOptions),
}

#[derive(Clone, Copy, Debug)]
pub struct ObjectGcOptions {
    pub dry_run: bool,
    pub others: OtherUsers,
}

/// What to do about users of the store that this process cannot ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherUsers {
    Respect,
    /// The caller says that the other users refer to nothing any more.
    Forget,
}

/// What was removed, or why nothing was.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ObjectGcReport {
    pub dry_run: bool,
    #[serde(flatten)]
    pub totals: SweepTotals,
    /// Why no object was removed.
    pub not_swept: Option<String>,
}

impl ObjectGcReport {
    pub fn print(&self) {
        if let Some(why) = &self.not_swept {
            messages::line(&format!("objects in the artifact store were left: {why}"));
            return;
        }
        let totals = &self.totals;
        let verb = if self.dry_run { "would free" } else { "freed" };
        if totals.objects + totals.stale > 0 {
            let what = format_count(totals.objects + totals.stale, "object", "objects");
            messages::line(&format!("{verb} {what} ({})", format_size(totals.bytes)));
        }
        if totals.failed > 0 {
            let what = format_count(totals.failed, "object", "objects");
            messages::line(&format!("could not remove {what} from the artifact store"));
        }
        if totals.foreign > 0 {
            let what = format_count(totals.foreign, "file", "files");
            messages::line(&format!(
                "left {what} in the artifact store that are none of Fumehood's"
            ));
        }
    }
}

/// Removes unreferenced objects. Does not fail: the report says what could not be done, and the next `gc` tries again.
pub fn remove_unreferenced(
    home: &Home,
    recorder: &mut Recorder,
    scope: &ObjectScope,
) -> ObjectGcReport {
    let dry_run = matches!(
        scope,
        ObjectScope::All(ObjectGcOptions { dry_run: true, .. })
    );
    let (totals, not_swept) = match try_remove(home, recorder, scope) {
        Ok(totals) => (totals, None),
        Err(e) => (SweepTotals::default(), Some(format!("{e:#}"))),
    };
    ObjectGcReport {
        dry_run,
        totals,
        not_swept,
    }
}

fn try_remove(
    home: &Home,
    recorder: &mut Recorder,
    scope: &ObjectScope,
) -> anyhow::Result<SweepTotals> {
    if !recorder.artifacts_at.join("store.json").exists() {
        // Opening the store would create it, and there is nothing to remove.
        return Ok(SweepTotals::default());
    }
    let artifacts = recorder.artifacts()?;
    let alone = artifacts.lock_exclusive(COMMIT_WAIT)?;
    let (dry_run, others) = match scope {
        ObjectScope::All(options) => (options.dry_run, options.others),
        ObjectScope::Only(_) => (false, OtherUsers::Respect),
    };
    check_users(&artifacts, &alone, (home, recorder), dry_run, others)?;
    let kept = referenced(home, recorder, &artifacts, scope)?;
    let is_kept = |hash: &ContentHash| match scope {
        ObjectScope::Only(objects) => !objects.contains(hash) || kept.binary_search(hash).is_ok(),
        ObjectScope::All(_) => kept.binary_search(hash).is_ok(),
    };
    Ok(artifacts.remove_unreferenced(&alone, &is_kept, dry_run)?)
}

/// Fails unless this database and this home are the store's only user.
fn check_users(
    artifacts: &Artifacts,
    alone: &ExclusiveLock,
    (home, recorder): (&Home, &mut Recorder),
    dry_run: bool,
    others: OtherUsers,
) -> anyhow::Result<()> {
    let database = recorder.location.to_string();
    let us = StoreUser::new(recorder.store()?.id(), &database, home.path());
    let users = artifacts.users()?;
    let other_users: Vec<&StoreUser> = users
        .iter()
        .filter(|user| !user.is_same_user(&us))
        .collect();
    if others == OtherUsers::Forget {
        if !dry_run {
            for user in other_users {
                artifacts.forget_user(alone, user)?;
            }
        }
        return Ok(());
    }
    if let Some(other) = other_users.first() {
        let who = match other.database_id == us.database_id && other.home != us.home {
            true => format!("the home {} has", other.home),
            false => format!("the database {} has", other.database),
        };
        anyhow::bail!(
            "{who} used {} as well, and may need them; if it is gone for good, `fumehood gc --forget-others`",
            artifacts.path().display()
        );
    }
    // The store has objects and lists no user, so it is unknown whose objects these are.
    anyhow::ensure!(
        !users.is_empty() || artifacts.usage()?.objects == 0,
        "nobody is noted in {} as having used it; if no other database needs them, `fumehood gc --forget-others`",
        artifacts.path().display()
    );
    Ok(())
}

/// Returns the objects that the database and the manifests in this home refer to, sorted. Skips objects outside the
/// scope.
fn referenced(
    home: &Home,
    recorder: &mut Recorder,
    artifacts: &Artifacts,
    scope: &ObjectScope,
) -> anyhow::Result<Vec<ContentHash>> {
    let mut kept = Vec::new();
    let mut keep = |hash: &ContentHash| match scope {
        ObjectScope::Only(objects) if !objects.contains(hash) => {}
        _ => kept.push(*hash),
    };
    // Keep this order: an attempt that could not be committed moves from the first directory to the second.
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
    recorder.with(|store| {
        store.for_each_referenced_object(&id, &mut |hash| {
            keep(hash);
            Ok(())
        })
    })?;
    kept.sort_unstable();
    kept.dedup();
    Ok(kept)
}

/// Lists a directory. One that cannot be listed is an error and must not pass for empty; one that is gone is empty.
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

/// Returns `None` if there is no manifest. A directory that is gone was committed, or moved to the directory that is
/// searched next.
fn read_manifest(dir: &Path) -> anyhow::Result<Option<Manifest>> {
    let file = match run_dirs::open_file(&dir.join(StateFile::Manifest.name())) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        file => file?,
    };
    let mut text = Vec::new();
    file.take(MANIFEST_BYTES_MAX).read_to_end(&mut text)?;
    Ok(Some(serde_json::from_slice(&text)?))
}
