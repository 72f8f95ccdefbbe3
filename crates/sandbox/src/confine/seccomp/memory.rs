//! Rules against memory that the kernel does not charge to a cgroup, or that it shares with other processes.

use libc::c_long;

use super::rule::{Action, CallRule, Clause, has_any, is, only_when, when};

/// Calls whose flags decide where memory comes from.
pub(super) fn rules() -> [(c_long, CallRule); 5] {
    let refuse_if = |test, errno| only_when([test], Action::Errno(errno), Action::Allow);
    [
        // Pages from the host's reserved pool of huge pages are charged to no memory cgroup. The errnos are those of
        // an empty pool, of a kernel without one, and of a caller who may not use it. Allocators and the JVM fall
        // back to ordinary pages. Transparent huge pages are charged, and stay allowed.
        (
            libc::SYS_mmap,
            refuse_if(has_any(3, libc::MAP_HUGETLB), libc::ENOMEM),
        ),
        (
            libc::SYS_memfd_create,
            refuse_if(has_any(1, libc::MFD_HUGETLB), libc::EINVAL),
        ),
        (
            libc::SYS_shmget,
            refuse_if(has_any(2, libc::SHM_HUGETLB), libc::EPERM),
        ),
        // The timing of merged pages reveals what other processes hold in memory. `table.rs` refuses
        // PR_SET_MEMORY_MERGE for the same reason. EINVAL is the answer of a kernel without page merging.
        (
            libc::SYS_madvise,
            refuse_if(is(2, &[libc::MADV_MERGEABLE]), libc::EINVAL),
        ),
        // Like MSG_MORE (see `send_clauses`), this flag of a splice into a socket leaves a datagram unfinished. A
        // caller takes EINVAL to mean that the descriptors cannot be spliced, and writes instead.
        (
            libc::SYS_splice,
            refuse_if(has_any(5, libc::SPLICE_F_MORE), libc::EINVAL),
        ),
    ]
}

/// Refuses the flags of a send that store data outside the socket's two buffers. A cgroup is charged only for these
/// buffers.
pub(super) fn send_clauses(flags: u8) -> Vec<Clause> {
    // An unfinished datagram: 64 kB for each socket, charged to nobody. For TCP the flag is a hint that hardly any
    // program gives.
    const UNFINISHED: i32 = libc::MSG_MORE;
    // Connects without passing the broker.
    const FAST_OPEN: i32 = libc::MSG_FASTOPEN;
    let refused = [has_any(flags, UNFINISHED | FAST_OPEN)];
    vec![when(refused, Action::Errno(libc::EOPNOTSUPP))]
}

/// Refuses socket options that store data in the same way. The errnos are those of a kernel or an interface without
/// the option.
#[rustfmt::skip]
pub(super) fn socket_option_clauses() -> Vec<Clause> {
    const UNKNOWN: Action = Action::Errno(libc::ENOPROTOOPT);
    const MCAST_JOIN_GROUP: i32 = 42;
    const MCAST_JOIN_SOURCE_GROUP: i32 = 46;
    const MCAST_MSFILTER: i32 = 48;
    let options = |level: i32, names: &[i32], action| when([is(1, &[level]), is(2, names)], action);
    vec![
        // The kernel queues a notice for each packet sent, with the packet, until it is read.
        options(libc::SOL_SOCKET, &[libc::SO_TIMESTAMPING, 65], UNKNOWN), // SO_TIMESTAMPING_NEW
        options(libc::SOL_SOCKET, &[libc::SO_ZEROCOPY], Action::Errno(libc::EOPNOTSUPP)),
        // The kernel queues an error for each packet refused, with the packet. The option succeeds without effect,
        // because resolvers set it, and a connected socket learns of a refusal without it.
        options(libc::IPPROTO_IP, &[libc::IP_RECVERR], Action::Errno(0)),
        options(libc::IPPROTO_IPV6, &[libc::IPV6_RECVERR], Action::Errno(0)),
        // The number of memberships is unbounded. Only the loopback could be joined, and without a route to it the
        // kernel already answers ENODEV.
        options(libc::IPPROTO_IP, &[
            libc::IP_ADD_MEMBERSHIP, libc::IP_ADD_SOURCE_MEMBERSHIP, libc::IP_MSFILTER, MCAST_JOIN_GROUP,
            MCAST_JOIN_SOURCE_GROUP, MCAST_MSFILTER,
        ], Action::Errno(libc::ENODEV)),
        options(libc::IPPROTO_IPV6, &[
            libc::IPV6_ADD_MEMBERSHIP, libc::IPV6_JOIN_ANYCAST, MCAST_JOIN_GROUP, MCAST_JOIN_SOURCE_GROUP, MCAST_MSFILTER,
        ], Action::Errno(libc::ENODEV)),
        // Keys for signed segments, 128 kB of them for each socket, and a connection that does not pass the broker.
        options(libc::IPPROTO_TCP, &[
            libc::TCP_MD5SIG, 32, 38,               // TCP_MD5SIG_EXT, TCP_AO_ADD_KEY
            libc::TCP_FASTOPEN_CONNECT,
        ], UNKNOWN),
        // UDP_CORK leaves a datagram unfinished, as MSG_MORE does (see `send_clauses`). UDP_ENCAP passes packets to
        // IPsec.
        options(libc::IPPROTO_UDP, &[libc::UDP_CORK, libc::UDP_ENCAP], UNKNOWN),
        // `sendfile` may leave a datagram unfinished too. Its pages are charged, but not the header of each of its
        // fragments. The loopback's MTU is so large that there is one fragment, unless a smaller MTU is set.
        options(libc::IPPROTO_IPV6, &[libc::IPV6_MTU], UNKNOWN),
    ]
}
