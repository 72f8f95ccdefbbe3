//! The users of a store: `users/` has one small file for each pair of database and home that ever added objects.
//!
//! An object that one database does not refer to may be referred to by another database, or by the manifest of a
//! pending attempt in another home. Whoever adds objects is noted here first, so that a sweep knows whom to ask.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::Mode;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{ArtifactError, Artifacts, ExclusiveLock, SharedLock, files};
use crate::types::escaping::escape_text;
use crate::types::manifest::ContentHash;

const USERS: &str = "users";
const USER_BYTES_MAX: u64 = 16 << 10;

/// A database and a home whose outputs are in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreUser {
    /// The id of the database.
    pub database_id: String,
    /// The address of the database, for people.
    pub database: String,
    /// The home whose run directories may hold manifests, escaped by [`escape_text`].
    pub home: String,
}

impl StoreUser {
    /// Describes a user of the store. Resolves the links in `home` if it exists.
    pub fn new(database_id: &str, database: &str, home: &Path) -> StoreUser {
        let home = std::fs::canonicalize(home).unwrap_or_else(|_| home.to_path_buf());
        StoreUser {
            database_id: database_id.to_owned(),
            database: database.to_owned(),
            home: escape_text(home.as_os_str().as_encoded_bytes()),
        }
    }

    /// Whether both have the same database at the same address, and the same home.
    pub fn is_same_user(&self, other: &StoreUser) -> bool {
        // The id alone is not enough: an older copy of a database has the same id, but not the newer attempts.
        self == other
    }

    fn file_name(&self) -> String {
        let key = format!("{}\0{}\0{}", self.database_id, self.database, self.home);
        ContentHash::of(key.as_bytes()).to_string()
    }
}

impl Artifacts {
    /// Notes a user. Call before adding the first object. The note is durable on return.
    pub fn note_user(&self, hold: &SharedLock, user: &StoreUser) -> Result<(), ArtifactError> {
        self.check_shared(hold)?;
        let note = || -> io::Result<()> {
            let name = user.file_name();
            // True in all runs but a user's first.
            match files::open_object(self.dir.as_fd(), &format!("{USERS}/{name}")) {
                Err(Errno::NOENT) => {}
                there => return Ok(there.map(drop)?),
            }
            match rustix::fs::mkdirat(&self.dir, USERS, Mode::RWXU) {
                Ok(()) => rustix::fs::fsync(&self.dir)?,
                Err(Errno::EXIST) => {}
                Err(e) => return Err(e.into()),
            }
            let users = files::open_dir(self.dir.as_fd(), USERS)?;
            let text = serde_json::to_vec(user)?;
            files::write_small(self.staging.as_fd(), users.as_fd(), &name, &text)
        };
        note().map_err(|source| self.users_failed(source))
    }

    /// All users. A note that cannot be read is an error, since its user could not be asked.
    pub fn users(&self) -> Result<Vec<StoreUser>, ArtifactError> {
        let read = || -> io::Result<Vec<StoreUser>> {
            let users = match files::open_dir(self.dir.as_fd(), USERS) {
                Err(Errno::NOENT) => return Ok(Vec::new()),
                users => users?,
            };
            let mut names = Vec::new();
            files::each_entry(users.as_fd(), &mut |name| names.push(name.to_owned()))?;
            let mut found = Vec::new();
            for name in names {
                let name = name.to_str().map_err(io::Error::other)?;
                let text = files::read_small(users.as_fd(), name, USER_BYTES_MAX)?;
                let text = text.ok_or(io::ErrorKind::NotFound)?;
                found.push(serde_json::from_slice::<StoreUser>(&text)?);
            }
            found.sort_by(|a, b| (&a.database, &a.home).cmp(&(&b.database, &b.home)));
            Ok(found)
        };
        read().map_err(|source| self.users_failed(source))
    }

    /// Removes a user that is known to refer to nothing any more.
    pub fn forget_user(
        &self,
        alone: &ExclusiveLock,
        user: &StoreUser,
    ) -> Result<(), ArtifactError> {
        self.check_exclusive(alone)?;
        let forget = || -> io::Result<()> {
            let users = files::open_dir(self.dir.as_fd(), USERS)?;
            let flags = rustix::fs::AtFlags::empty();
            match rustix::fs::unlinkat(&users, user.file_name(), flags) {
                Ok(()) | Err(Errno::NOENT) => Ok(()),
                Err(e) => Err(e.into()),
            }
        };
        forget().map_err(|source| self.users_failed(source))
    }

    fn users_failed(&self, source: io::Error) -> ArtifactError {
        ArtifactError::Users {
            path: self.path.join(USERS),
            source,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn users_are_noted_once_and_a_broken_note_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(&dir.path().join("store")).unwrap();
        assert_eq!(artifacts.users().unwrap(), []);
        let one = StoreUser::new("aa", "sqlite:/one.db", Path::new("/nowhere/home"));
        let moved = StoreUser::new("aa", "sqlite:/moved.db", Path::new("/nowhere/home"));
        let other = StoreUser::new("bb", "sqlite:/two.db", Path::new("/nowhere/home"));
        let hold = artifacts.lock_shared().unwrap();
        for user in [&one, &moved, &other, &one] {
            artifacts.note_user(&hold, user).unwrap();
        }
        drop(hold);
        // A copy of a database has the same id, but not the newer attempts, so it is another user.
        assert!(one.is_same_user(&one) && !one.is_same_user(&moved) && !one.is_same_user(&other));
        let noted = artifacts.users().unwrap();
        assert_eq!(noted.len(), 3, "{noted:?}");
        let alone = artifacts.lock_exclusive(Duration::ZERO).unwrap();
        artifacts.forget_user(&alone, &other).unwrap();
        artifacts.forget_user(&alone, &moved).unwrap();
        assert_eq!(artifacts.users().unwrap(), [one]);
        std::fs::write(dir.path().join("store/users/x"), "{").unwrap();
        assert!(artifacts.users().is_err());
    }
}
