//! What this process itself has in memory.

use std::ffi::CStr;
use std::io;
use std::sync::atomic::AtomicU64;

use super::{check, procfs};

/// Lets go of the code and constants of this program and its libraries that happen to be mapped: they come back from the
/// page cache when they are needed. For a process that is about to sleep for long.
pub fn drop_code_pages() {
    let Ok(maps) = std::fs::read_to_string("/proc/self/smaps") else {
        return;
    };
    let mut mapping = None;
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (first, second) = (fields.next().unwrap_or(""), fields.next().unwrap_or(""));
        if let Some((from, to)) = first.split_once('-') {
            let bounds = usize::from_str_radix(from, 16)
                .ok()
                .zip(usize::from_str_radix(to, 16).ok());
            let of_a_file = fields.nth(3).is_some_and(|name| name.starts_with('/'));
            // Not written to, and never to be.
            mapping = bounds.filter(|_| of_a_file && matches!(second, "r-xp" | "r--p"));
        }
        // Not even by the loader, before it was made read-only; in memory or in swap.
        if first == "Anonymous:" && second != "0" {
            mapping = None;
        }
        if first == "Swap:"
            && let (Some((from, to)), "0") = (mapping.take(), second)
        {
            // SAFETY: every page of this private mapping is the file's own, so letting go of it changes nothing of what
            // is read there.
            unsafe { libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_DONTNEED) };
        }
    }
}

/// Bytes that the children which this process waited for, and theirs, have dirtied, by the kernel's count.
pub fn bytes_written_by_reaped() -> u64 {
    // SAFETY: zeroes are a valid value of this struct of numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the struct is ours, and of the kind that is written.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    // In units of 512 bytes, whatever the disk's are.
    (usage.ru_oublock as u64).saturating_mul(512)
}

/// One heap for all threads: for a process whose second thread does little, and rarely.
pub fn use_one_malloc_arena() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number of the allocator's.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1)
    };
}

/// Wipes the strings that this process was started with, its arguments and its environment, out of its memory.
///
/// # Errors
/// Where /proc does not tell where they are.
pub fn wipe_start_strings() -> io::Result<()> {
    let stat = procfs::read("/proc/self/stat", 4096).unwrap_or_default();
    // The name may hold anything; fields 48 to 51 are the bounds of the arguments and of the environment.
    let after_name = stat.rsplit_once(')').map(|(_, rest)| rest);
    let fields = after_name.unwrap_or_default().split_ascii_whitespace();
    let bounds: Vec<usize> = fields.skip(45).take(4).flat_map(str::parse).collect();
    let &[arguments, _, _, end] = bounds.as_slice() else {
        return Err(io::Error::other("/proc/self/stat does not tell"));
    };
    match arguments > 0 && arguments < end && end - arguments <= 64 << 20 {
        // SAFETY: the kernel put these strings at the far end of this process's first stack, one after the other, and says
        // where. They are writable, and nobody holds a reference to them: std copies them when it is asked.
        true => unsafe { std::ptr::write_bytes(arguments as *mut u8, 0, end - arguments) },
        false => return Err(io::Error::other("/proc/self/stat tells nonsense")),
    }
    // SAFETY: the name under which this program was executed, which the kernel put above those strings; or null.
    let name = unsafe { libc::getauxval(libc::AT_EXECFN) } as *mut libc::c_char;
    if !name.is_null() {
        // SAFETY: it ends with a zero.
        let length = unsafe { libc::strlen(name) };
        // SAFETY: it is writable as they are, and is not read again.
        unsafe { std::ptr::write_bytes(name, 0, length) };
    }
    Ok(())
}

/// Whether this process was started with settings for the C library or its loader. Nothing is copied.
pub fn has_loader_settings() -> bool {
    unsafe extern "C" {
        static environ: *const *const libc::c_char;
    }
    // SAFETY: the C library's own list, which nobody changes while there is one thread; null where it was cleared.
    let mut at = unsafe { environ };
    // SAFETY: it ends with a null pointer, before which every element points to a string that ends with a zero.
    while let Some(entry) = unsafe { at.as_ref() }.filter(|entry| !entry.is_null()) {
        // SAFETY: as above.
        let entry = unsafe { CStr::from_ptr(*entry) }.to_bytes();
        let known: [&[u8]; 3] = [b"LD_", b"GLIBC_", b"MALLOC_"];
        if known.iter().any(|start| entry.starts_with(start)) {
            return true;
        }
        // SAFETY: not the end yet, so there is another element.
        at = unsafe { at.add(1) };
    }
    false
}

/// Whether two processes are one in memory, as between vfork and exec. An error where we may not look, or not compare.
pub fn share_memory(one: u32, other: u32) -> io::Result<bool> {
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: kcmp compares kernel pointers of the two processes and touches no memory of ours.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0usize, 0usize) };
    check(order).map(|order| order == 0)
}

/// Zeroes in memory that this process shares with those it forks from now on, for as long as it lives.
pub fn shared_counters(count: usize) -> io::Result<&'static [AtomicU64]> {
    // SAFETY: a new mapping where the kernel likes.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            count * size_of::<AtomicU64>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is page-aligned, zeroed, large enough, never unmapped, and all access to it is atomic.
    Ok(unsafe { std::slice::from_raw_parts(memory.cast::<AtomicU64>(), count) })
}
