//! Memory of this process: its start-up strings, its pages, its allocator, and memory shared with its children.

use std::ffi::CStr;
use std::io;
use std::sync::atomic::AtomicU64;

use super::{check, procfs};

/// Unmaps the resident pages of code and constants of this program and its libraries. They come back from the page
/// cache on access. For a process that is about to sleep for long.
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
            let is_file_backed = fields.nth(3).is_some_and(|name| name.starts_with('/'));
            // Only mappings that are not writable.
            mapping = bounds.filter(|_| is_file_backed && matches!(second, "r-xp" | "r--p"));
        }
        // Skip a mapping that has private pages, in memory or in swap: the loader wrote to it before making it
        // read-only.
        if first == "Anonymous:" && second != "0" {
            mapping = None;
        }
        if first == "Swap:"
            && let (Some((from, to)), "0") = (mapping.take(), second)
        {
            // SAFETY: every page of this private mapping equals the file's page, as checked above, so a later read
            // finds the same bytes.
            unsafe { libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_DONTNEED) };
        }
    }
}

/// Returns how many bytes the reaped children, and their reaped descendants, have dirtied, by the kernel's count.
pub fn bytes_written_by_reaped() -> u64 {
    // SAFETY: all-zero bytes are a valid `rusage`, which holds only integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `rusage` to the pointer, which borrows a local of that type.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    // The kernel counts in units of 512 bytes, whatever the disk's block size.
    (usage.ru_oublock as u64).saturating_mul(512)
}

/// Makes all threads allocate from one arena. For a process whose second thread allocates little.
pub fn use_one_malloc_arena() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt sets an integer inside the allocator and has no memory preconditions.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1)
    };
}

/// Overwrites with zeroes the strings that this process was started with: its arguments and its environment.
///
/// # Errors If /proc/self/stat does not say where the strings are.
pub fn wipe_start_strings() -> io::Result<()> {
    let stat = procfs::read("/proc/self/stat", 4096).unwrap_or_default();
    // The process name may contain any byte. Fields 48 to 51 are the bounds of the arguments and of the environment.
    let after_name = stat.rsplit_once(')').map(|(_, rest)| rest);
    let fields = after_name.unwrap_or_default().split_ascii_whitespace();
    let bounds: Vec<usize> = fields.skip(45).take(4).flat_map(str::parse).collect();
    let &[arguments, _, _, end] = bounds.as_slice() else {
        return Err(io::Error::other(
            "/proc/self/stat lacks the bounds of the arguments and environment",
        ));
    };
    match arguments > 0 && arguments < end && end - arguments <= 64 << 20 {
        // SAFETY: the kernel put these strings one after the other at the end of the initial stack, and
        // /proc/self/stat gives their bounds. They are writable. Nobody holds a reference to them, since std copies
        // them when asked.
        true => unsafe { std::ptr::write_bytes(arguments as *mut u8, 0, end - arguments) },
        false => {
            return Err(io::Error::other(
                "/proc/self/stat has invalid bounds of the arguments and environment",
            ));
        }
    }
    // SAFETY: getauxval has no preconditions. It returns the name under which this program was executed, which the
    // kernel put above those strings, or null.
    let name = unsafe { libc::getauxval(libc::AT_EXECFN) } as *mut libc::c_char;
    if !name.is_null() {
        // SAFETY: `name` is not null and the kernel terminates the string with a NUL.
        let length = unsafe { libc::strlen(name) };
        // SAFETY: the string is on the same writable stack, `length` bytes long, and nobody reads it again.
        unsafe { std::ptr::write_bytes(name, 0, length) };
    }
    Ok(())
}

/// Returns whether the environment has settings for the C library or its loader. Copies nothing.
pub fn has_loader_settings() -> bool {
    unsafe extern "C" {
        static environ: *const *const libc::c_char;
    }
    // SAFETY: the C library's own variable, which nobody changes while there is one thread. It is null after
    // clearenv.
    let mut at = unsafe { environ };
    // SAFETY: the array ends with a null pointer, and the loop stops there, so `at` points to an element.
    while let Some(entry) = unsafe { at.as_ref() }.filter(|entry| !entry.is_null()) {
        // SAFETY: an element that is not null points to a NUL-terminated string.
        let entry = unsafe { CStr::from_ptr(*entry) }.to_bytes();
        let prefixes: [&[u8]; 3] = [b"LD_", b"GLIBC_", b"MALLOC_"];
        if prefixes.iter().any(|prefix| entry.starts_with(prefix)) {
            return true;
        }
        // SAFETY: this element is not the terminating null pointer, so another element follows.
        at = unsafe { at.add(1) };
    }
    false
}

/// Returns whether two processes share one address space, as between vfork and exec. Fails where this process may not
/// inspect or compare them.
pub fn share_memory(one: u32, other: u32) -> io::Result<bool> {
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: kcmp compares kernel pointers of the two processes and accesses no memory of this process.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0usize, 0usize) };
    check(order).map(|order| order == 0)
}

/// Returns zeroed counters in memory that this process shares with its future children. The memory is never unmapped.
pub fn shared_counters(count: usize) -> io::Result<&'static [AtomicU64]> {
    // SAFETY: a new anonymous mapping at an address that the kernel chooses touches no existing memory.
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
    // SAFETY: the mapping is page-aligned, zeroed, large enough, and never unmapped, and all access to it is atomic.
    Ok(unsafe { std::slice::from_raw_parts(memory.cast::<AtomicU64>(), count) })
}
