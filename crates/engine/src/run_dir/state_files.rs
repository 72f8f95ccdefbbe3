//! Reads and writes the files of a run directory. All access goes through the locked descriptor.

use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::dir::{RECORD, RunDir};
use super::record::{RunRecord, RunState};
use crate::home::{self, HomeError};

const RECORD_BYTES_MAX: u64 = 1 << 20;
/// Large enough that nearly every file is written by one call.
const WRITE_BUFFER_BYTES: usize = 64 << 10;

/// The JSON files besides `run.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateFile {
    /// The inputs that were copied into the workspace. The file is called `puts.json` for historical reasons.
    StagedInputs,
    /// What the result was made from.
    Provenance,
    /// How the program ended.
    Outcome,
    /// The list of outputs.
    Manifest,
}

impl StateFile {
    /// Returns the name of the file in the run directory.
    pub fn name(self) -> &'static str {
        match self {
            StateFile::StagedInputs => "puts.json",
            StateFile::Provenance => "provenance.json",
            StateFile::Outcome => "outcome.json",
            StateFile::Manifest => "manifest.json",
        }
    }

    /// Room for a million outputs with long names. A larger file was not written by Fumehood.
    const BYTES_MAX: u64 = 1 << 30;
}

/// Whether a write must survive a power cut before the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durability {
    Synced,
    Unsynced,
}

impl RunDir {
    /// Replaces the record atomically: a reader that has the lock finds the old record or the new one. A record that
    /// says that a workspace is the user's, now or later, also survives a power cut. The record of a live run may be
    /// lost together with the run.
    pub(crate) fn write_record(&self, record: &RunRecord) -> Result<(), HomeError> {
        if record.state != RunState::Live || record.prepared {
            return self.write_record_durably(record);
        }
        match self.overwrite_record(record) {
            Ok(true) => Ok(()),
            Ok(false) => {
                let written = self.replace_json(RECORD, record, Durability::Unsynced)?;
                *self.record.borrow_mut() = Some(written);
                Ok(())
            }
            Err(source) => Err(self.write_error(RECORD, source)),
        }
    }

    /// Overwrites the record that this process wrote before, if there is one and both fit in a page: the kernel copies
    /// a page in one go, and a kill cannot interrupt that. Creating a file, and on ext4 renaming over another, costs
    /// more than all the rest of the write.
    fn overwrite_record(&self, record: &RunRecord) -> io::Result<bool> {
        const PAGE_BYTES: usize = 4096;
        let held = self.record.borrow();
        let Some(file) = held.as_ref() else {
            return Ok(false);
        };
        let stat = rustix::fs::fstat(file)?;
        let mut text = serde_json::to_vec(record)?;
        let before = usize::try_from(stat.st_size).unwrap_or(usize::MAX);
        if text.len().max(before) > PAGE_BYTES {
            return Ok(false);
        }
        if stat.st_nlink == 0 {
            return Err(io::ErrorKind::NotFound.into());
        }
        // Pad with blanks: the rest of a longer record would not be valid JSON.
        text.resize(text.len().max(before), b' ');
        file.write_all_at(&text, 0).map(|()| true)
    }

    /// As [`write_record`](Self::write_record), and the record survives a power cut.
    pub(crate) fn write_record_durably(&self, record: &RunRecord) -> Result<(), HomeError> {
        let written = self.replace_json(RECORD, record, Durability::Synced)?;
        *self.record.borrow_mut() = Some(written);
        Ok(())
    }

    pub(crate) fn read_record(&self) -> Result<Option<RunRecord>, HomeError> {
        let Some(record) = self.read_json::<RunRecord>(RECORD, RECORD_BYTES_MAX)? else {
            return Ok(None);
        };
        match self.names_this_run(&record) {
            true => Ok(Some(record)),
            false => Err(self.read_error(
                RECORD,
                io::Error::other("it names things that do not belong to this run"),
            )),
        }
    }

    /// Whether a record names this directory's id, and paths that only a workspace of that id can have.
    fn names_this_run(&self, record: &RunRecord) -> bool {
        let id = record.id.as_str();
        let named = |path: &Path, start: String| {
            let name = path.file_name().and_then(|n| n.to_str());
            name.is_some_and(|n| n.starts_with(&start))
        };
        let directory = self.path.parent().and_then(Path::file_name);
        directory == Some(std::ffi::OsStr::new(id))
            && record.workspace.file_name()
                == Some(std::ffi::OsStr::new(&format!("scidex-analysis-{id}")))
            && named(&record.draft, format!(".scidex-analysis-{id}-"))
            && record.draft.parent() == record.workspace.parent()
    }

    /// Whether the machine stopped before the record reached the disk: the file is empty or all zeros, and older than
    /// this boot. Then nothing else in the directory is durable either.
    pub(crate) fn is_record_lost(&self) -> bool {
        let stat = rustix::fs::statat(&self.lock, RECORD, rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
        let older = stat.is_ok_and(|s| home::boot_seconds().is_some_and(|boot| s.st_mtime < boot));
        let bytes = || self.read_bytes(RECORD, RECORD_BYTES_MAX).ok().flatten();
        older && bytes().is_some_and(|bytes| bytes.iter().all(|byte| *byte == 0))
    }

    /// Lets the kernel start to write the record to the disk, so that a power cut during a long run leaves it whole.
    /// Most runs end before this is called.
    pub(crate) fn start_writeback(&self) {
        if let Some(record) = self.record.borrow().as_ref() {
            let advice = rustix::fs::Advice::DontNeed;
            // The kernel writes it sooner or later anyway.
            let _ = rustix::fs::fadvise(record, 0, None, advice);
        }
    }

    pub(crate) fn write_file<T: Serialize>(
        &self,
        file: StateFile,
        value: &T,
        durable: Durability,
    ) -> Result<(), HomeError> {
        self.replace_json(file.name(), value, durable).map(drop)
    }

    pub(crate) fn read_file<T: DeserializeOwned>(
        &self,
        file: StateFile,
    ) -> Result<Option<T>, HomeError> {
        self.read_json(file.name(), StateFile::BYTES_MAX)
    }

    /// The content of a file, up to a bound.
    pub(crate) fn read_bytes(
        &self,
        name: &str,
        bytes_max: u64,
    ) -> Result<Option<Vec<u8>>, HomeError> {
        let read = || -> io::Result<Option<Vec<u8>>> {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = match rustix::fs::openat(&self.lock, name, flags, Mode::empty()) {
                Ok(file) => file,
                Err(rustix::io::Errno::NOENT) => return Ok(None),
                Err(e) => return Err(e.into()),
            };
            if rustix::fs::fstat(&file)?.st_uid != rustix::process::geteuid().as_raw() {
                return Err(io::Error::other("it belongs to another user"));
            }
            let mut text = Vec::new();
            std::fs::File::from(file)
                .take(bytes_max)
                .read_to_end(&mut text)?;
            Ok(Some(text))
        };
        read().map_err(|source| self.read_error(name, source))
    }

    /// Creates an empty log file to append to.
    pub(crate) fn new_log(&self, name: &str) -> Result<std::fs::File, HomeError> {
        self.create(name)
            .map_err(|source| self.write_error(name, source))
    }

    /// Writes the final content of a log. Usually the same bytes have arrived in the file already. If not, the file is
    /// replaced atomically, so that a crash loses nothing that had arrived.
    pub(crate) fn write_log(&self, name: &str, bytes: &[u8]) -> Result<(), HomeError> {
        let write = || -> io::Result<()> {
            let found = rustix::fs::statat(&self.lock, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
            let length = match found {
                Ok(found) => u64::try_from(found.st_size).unwrap_or(u64::MAX),
                // A missing file counts as empty.
                Err(rustix::io::Errno::NOENT) => 0,
                Err(e) => return Err(e.into()),
            };
            if length == bytes.len() as u64 {
                return Ok(());
            }
            let draft = format!("{name}.new");
            let mut file = self.create(&draft)?;
            file.write_all(bytes)?;
            Ok(rustix::fs::renameat(&self.lock, &draft, &self.lock, name)?)
        };
        write().map_err(|source| self.write_error(name, source))
    }

    /// From here on, what finishing the attempt needs survives a power cut, except the list of inputs and the provenance.
    /// Without the list, inputs count as outputs; without the provenance, the record has none.
    pub(crate) fn make_durable(&self) -> Result<(), HomeError> {
        let logs = store::STREAMS.map(|stream| [stream.to_owned(), tail_name(stream)]);
        let state_files = [
            RECORD,
            StateFile::Outcome.name(),
            StateFile::Manifest.name(),
        ];
        let state_files = state_files.map(str::to_owned);
        self.release_reserve();
        for name in state_files.iter().chain(logs.as_flattened()) {
            self.sync(name)
                .map_err(|source| self.write_error(name, source))?;
        }
        self.sync_names()
            .map_err(|source| self.write_error("", source))
    }

    /// Reserves disk space for the outcome before the start. If the program or anybody else fills the disk, the outcome
    /// can still be written. File systems without fallocate reserve nothing.
    pub(crate) fn reserve_outcome_space(&self) {
        const BYTES: u64 = 128 << 10;
        let draft = format!("{}.new", StateFile::Outcome.name());
        if let Ok(file) = self.open_to_write(&draft, OFlags::empty()) {
            let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
            // See above: some file systems cannot.
            let _ = rustix::fs::fallocate(&file, flags, 0, BYTES);
        }
    }

    /// Frees the reserved space behind the end of the outcome: setting the length of a file frees the blocks beyond.
    fn release_reserve(&self) {
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.lock, StateFile::Outcome.name(), flags, Mode::empty());
        if let Ok(file) = file.map(std::fs::File::from) {
            // If this fails, the file only keeps its space.
            let _ = file.metadata().and_then(|meta| file.set_len(meta.len()));
        }
    }

    /// Syncs the content of a file, if the file exists.
    fn sync(&self, name: &str) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.lock, name, flags, Mode::empty()) {
            Ok(file) => Ok(rustix::fs::fdatasync(file)?),
            Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Writes a new file and renames it into place, through the locked descriptor: the path may name another attempt's
    /// directory by now.
    fn replace_json<T: Serialize>(
        &self,
        name: &str,
        value: &T,
        durable: Durability,
    ) -> Result<std::fs::File, HomeError> {
        let write = || -> io::Result<std::fs::File> {
            let draft = format!("{name}.new");
            let reserved = name == StateFile::Outcome.name();
            let file = match reserved {
                // Do not truncate: that would free the reserved blocks.
                true => self.open_to_write(&draft, OFlags::empty())?,
                false => self.create(&draft)?,
            };
            let mut writer = io::BufWriter::with_capacity(WRITE_BUFFER_BYTES, file);
            serde_json::to_writer(&mut writer, value)?;
            let mut file = writer
                .into_inner()
                .map_err(io::IntoInnerError::into_error)?;
            if reserved {
                let length = file.stream_position()?;
                // Cut off the rest of a longer file. Reserved space is freed with the file, or by `release_reserve`.
                if file.metadata()?.len() > length {
                    file.set_len(length)?;
                }
            }
            if durable == Durability::Synced {
                file.sync_data()?;
            }
            rustix::fs::renameat(&self.lock, &draft, &self.lock, name)?;
            if durable == Durability::Synced {
                self.sync_names()?;
            }
            Ok(file)
        };
        write().map_err(|source| self.write_error(name, source))
    }

    fn read_json<T: DeserializeOwned>(
        &self,
        name: &str,
        bytes_max: u64,
    ) -> Result<Option<T>, HomeError> {
        let Some(text) = self.read_bytes(name, bytes_max)? else {
            return Ok(None);
        };
        serde_json::from_slice(&text)
            .map(Some)
            .map_err(|e| self.read_error(name, e.into()))
    }

    fn create(&self, name: &str) -> io::Result<std::fs::File> {
        self.open_to_write(name, OFlags::TRUNC)
    }

    fn open_to_write(&self, name: &str, more: OFlags) -> io::Result<std::fs::File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | more;
        let file = rustix::fs::openat(&self.lock, name, flags, Mode::from_raw_mode(0o600))?;
        Ok(file.into())
    }
}

/// The file for the end of a log whose middle was dropped.
pub(crate) fn tail_name(stream: &str) -> String {
    format!("{stream}.tail")
}
