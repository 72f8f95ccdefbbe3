//! A message that the caller wants to send, copied from the caller's memory once, with every length bounded, before the
//! broker decides anything.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::inside::caller::{CallingThread, errno};
use crate::sys;

/// The size of struct sockaddr_storage.
pub const ADDRESS_BYTES_MAX: usize = 128;
/// More than the descriptors of one message take, and more than any other control data needs.
const CONTROL_BYTES_MAX: usize = 16 << 10;
/// The kernel's SCM_MAX_FD.
const DESCRIPTORS_MAX: usize = 253;
/// The kernel's MAX_RW_COUNT: the most bytes that it moves in one call.
const DATA_BYTES_MAX: usize = 0x7fff_f000;
/// The size of struct cmsghdr: the whole length, a level and a type.
const CONTROL_HEADER_BYTES: usize = 16;

/// The size of struct user_msghdr.
pub const HEADER_BYTES: usize = 56;
/// The size of struct mmsghdr: a user_msghdr, and the length that was sent.
pub const MULTI_HEADER_BYTES: usize = 64;

/// A message to send. The data itself stays in the caller's memory until it is sent.
pub struct Message {
    pub address: Vec<u8>,
    /// The address and the length of each part of the data in the caller's memory.
    pub parts: Vec<(u64, usize)>,
    pub control: ControlData,
}

/// Control data in which the numbers of the caller's descriptors are replaced by those of the broker's copies.
#[derive(Default)]
pub struct ControlData {
    pub bytes: Vec<u8>,
    /// The copies of the caller's descriptors, open for as long as `bytes` names them.
    descriptors: Vec<OwnedFd>,
}

impl Message {
    /// The message of a sendto call: one part of data, and an address.
    pub fn from_sendto(
        caller: &CallingThread,
        data: (u64, u64),
        address: (u64, u64),
    ) -> io::Result<Message> {
        let length = address.1 as u32 as i32;
        let length = usize::try_from(length).map_err(|_| errno(libc::EINVAL))?;
        if length > ADDRESS_BYTES_MAX {
            return Err(errno(libc::EINVAL));
        }
        Ok(Message {
            address: read_address(caller, address.0, length)?,
            parts: bound_parts(vec![(data.0, data.1)])?,
            control: ControlData::default(),
        })
    }

    /// The message of a sendmsg call: reads everything that the header points to except the data.
    pub fn from_header(caller: &CallingThread, header: &[u8; HEADER_BYTES]) -> io::Result<Message> {
        let number = |at: usize| {
            let bytes = header[at..at + 8].try_into().unwrap_or_default();
            u64::from_ne_bytes(bytes)
        };
        let name_length = number(8) as u32 as i32;
        let name_length = usize::try_from(name_length).map_err(|_| errno(libc::EINVAL))?;
        let address = read_address(caller, number(0), name_length.min(ADDRESS_BYTES_MAX))?;
        let parts = read_parts(caller, number(16), number(24))?;
        let control = ControlData::read(caller, number(32), number(40))?;
        Ok(Message {
            address,
            parts,
            control,
        })
    }

    pub fn length(&self) -> usize {
        self.parts.iter().map(|(_, len)| len).sum()
    }

    /// Reads the data from `start` on, at most `at_most` bytes.
    pub fn read_data(
        &self,
        caller: &CallingThread,
        start: usize,
        at_most: usize,
    ) -> io::Result<Vec<u8>> {
        let (mut skip, mut left) = (start, at_most);
        let mut wanted = Vec::new();
        for (address, len) in &self.parts {
            let skipped = skip.min(*len);
            skip -= skipped;
            let taken = (len - skipped).min(left);
            left -= taken;
            if taken > 0 {
                wanted.push((address.wrapping_add(skipped as u64), taken));
            }
        }
        caller.read_parts(&wanted)
    }
}

fn read_address(caller: &CallingThread, at: u64, length: usize) -> io::Result<Vec<u8>> {
    match at {
        // A null pointer means no address, whatever the length says.
        0 => Ok(Vec::new()),
        at => caller.read_parts(&[(at, length)]),
    }
}

fn read_parts(caller: &CallingThread, at: u64, count: u64) -> io::Result<Vec<(u64, usize)>> {
    if count > sys::PARTS_MAX as u64 {
        return Err(errno(libc::EMSGSIZE));
    }
    let bytes = caller.read_parts(&[(at, 16 * count as usize)])?;
    let (pairs, _) = bytes.as_chunks::<8>();
    let numbers: Vec<u64> = pairs.iter().map(|b| u64::from_ne_bytes(*b)).collect();
    bound_parts(
        numbers
            .as_chunks::<2>()
            .0
            .iter()
            .map(|[a, l]| (*a, *l))
            .collect(),
    )
}

/// Cuts the parts off after [`DATA_BYTES_MAX`], as the kernel does.
fn bound_parts(parts: Vec<(u64, u64)>) -> io::Result<Vec<(u64, usize)>> {
    let mut left = DATA_BYTES_MAX;
    let each = |(address, length): (u64, u64)| {
        if i64::try_from(length).is_err() {
            return Err(errno(libc::EINVAL));
        }
        let taken = usize::try_from(length).unwrap_or(usize::MAX).min(left);
        left -= taken;
        Ok((address, taken))
    };
    parts.into_iter().map(each).collect()
}

impl ControlData {
    fn read(caller: &CallingThread, at: u64, length: u64) -> io::Result<ControlData> {
        if at == 0 || length == 0 {
            return Ok(ControlData::default());
        }
        let length = usize::try_from(length).ok();
        let length = length.filter(|length| *length <= CONTROL_BYTES_MAX);
        let length = length.ok_or_else(|| errno(libc::ENOBUFS))?;
        let theirs = caller.read_parts(&[(at, length)])?;
        let mut ours = ControlData::default();
        let mut rest = theirs.as_slice();
        while rest.len() >= CONTROL_HEADER_BYTES {
            let (header, _) = rest.as_chunks::<8>();
            let whole = usize::try_from(u64::from_ne_bytes(header[0])).unwrap_or(usize::MAX);
            if !(CONTROL_HEADER_BYTES..=rest.len()).contains(&whole) {
                return Err(errno(libc::EINVAL));
            }
            let [level, kind] = [&header[1][..4], &header[1][4..]]
                .map(|b| i32::from_ne_bytes(b.try_into().unwrap_or_default()));
            ours.add(caller, (level, kind), &rest[CONTROL_HEADER_BYTES..whole])?;
            rest = rest.get(whole.next_multiple_of(8)..).unwrap_or_default();
        }
        Ok(ours)
    }

    /// Adds one control message.
    ///
    /// Invariant: the list is built anew, with the broker's own lengths. The kernel must find only the broker's copies
    /// of descriptors in it, never a number that the caller chose: such a number would be a descriptor of this process.
    fn add(&mut self, caller: &CallingThread, kind: (i32, i32), data: &[u8]) -> io::Result<()> {
        match kind {
            // Drop the credentials: the kernel fills in those of the sender, which is this process.
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {}
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                let (numbers, _) = data.as_chunks::<4>();
                if self.descriptors.len() + numbers.len() > DESCRIPTORS_MAX {
                    return Err(errno(libc::EINVAL));
                }
                let mut copies = Vec::new();
                for number in numbers {
                    let copy = caller.descriptor(u64::from(u32::from_ne_bytes(*number)))?;
                    copies.extend(copy.as_raw_fd().to_ne_bytes());
                    self.descriptors.push(copy);
                }
                self.push(kind, &copies);
            }
            // All other kinds of control messages hold plain values.
            _ => self.push(kind, data),
        }
        Ok(())
    }

    fn push(&mut self, (level, kind): (i32, i32), data: &[u8]) {
        let whole = (CONTROL_HEADER_BYTES + data.len()) as u64;
        self.bytes.extend(whole.to_ne_bytes());
        self.bytes.extend(level.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(data);
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
    }
}
