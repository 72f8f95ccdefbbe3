//! Memory that the kernel would give a program without charging its cgroup, or share with others.

use libc::c_long;

use super::rule::{Action, CallRule, Clause, has_any, is, rule, when};

/// Calls whose flags decide where memory comes from.
pub(super) fn rules() -> [(c_long, CallRule); 5] {
    let refused = |test, errno| {
        let clauses = vec![when([test], Action::Errno(errno))];
        rule(clauses, Action::Allow)
    };
    [
        // Pages from the host's reserved pool of huge pages are charged to no memory cgroup. The answers are those of an
        // empty pool, of a kernel without it, and of a caller who may not use it: allocators and the JVM fall back to
        // ordinary pages. Transparent huge pages are charged, and remain.
        (
            libc::SYS_mmap,
            refused(has_any(3, libc::MAP_HUGETLB as u32), libc::ENOMEM),
        ),
        (
            libc::SYS_memfd_create,
            refused(has_any(1, libc::MFD_HUGETLB), libc::EINVAL),
        ),
        (
            libc::SYS_shmget,
            refused(has_any(2, libc::SHM_HUGETLB as u32), libc::EPERM),
        ),
        // Merging equal pages tells by its timing what others hold in memory; PR_SET_MEMORY_MERGE is refused too. The
        // answer is that of a kernel without it.
        (
            libc::SYS_madvise,
            refused(is(2, &[libc::MADV_MERGEABLE as u32]), libc::EINVAL),
        ),
        // As MSG_MORE, for a splice into a socket. A caller takes the answer for descriptors that cannot be spliced, and
        // writes instead.
        (
            libc::SYS_splice,
            refused(has_any(5, libc::SPLICE_F_MORE), libc::EINVAL),
        ),
    ]
}

/// Flags of a send that leave something with the socket outside its two buffers, which are what a cgroup is charged for.
pub(super) fn sends(flags: u8) -> Vec<Clause> {
    // A datagram that is not yet whole: 64 kB for each socket, charged to nobody. For TCP it is a hint that hardly anybody gives.
    const MSG_MORE: u32 = libc::MSG_MORE as u32;
    // A connection that no broker has seen.
    const MSG_FASTOPEN: u32 = libc::MSG_FASTOPEN as u32;
    vec![when(
        [has_any(flags, MSG_MORE | MSG_FASTOPEN)],
        Action::Errno(libc::EOPNOTSUPP),
    )]
}

/// Options of a socket that do the same. The answers are those of a kernel or an interface without them.
#[rustfmt::skip]
pub(super) fn socket_options() -> Vec<Clause> {
    const UNKNOWN: Action = Action::Errno(libc::ENOPROTOOPT);
    const MCAST_JOIN_GROUP: i32 = 42;
    const MCAST_JOIN_SOURCE_GROUP: i32 = 46;
    const MCAST_MSFILTER: i32 = 48;
    let options = |level: i32, names: &[i32], action| {
        let names: Vec<u32> = names.iter().map(|name| *name as u32).collect();
        when([is(1, &[level as u32]), is(2, &names)], action)
    };
    vec![
        // A notice for each packet sent, with the packet, kept until read.
        options(libc::SOL_SOCKET, &[libc::SO_TIMESTAMPING, 65], UNKNOWN), // SO_TIMESTAMPING_NEW
        options(libc::SOL_SOCKET, &[libc::SO_ZEROCOPY], Action::Errno(libc::EOPNOTSUPP)),
        // An error for each packet refused, with the packet. It succeeds without effect: resolvers ask for it, and a
        // connected socket learns of a refusal without it.
        options(libc::IPPROTO_IP, &[libc::IP_RECVERR], Action::Errno(0)),
        options(libc::IPPROTO_IPV6, &[libc::IPV6_RECVERR], Action::Errno(0)),
        // Memberships without number. Only the loopback is there to be a member on, and without a route to it the
        // kernel gives this answer already.
        options(libc::IPPROTO_IP, &[
            libc::IP_ADD_MEMBERSHIP, libc::IP_ADD_SOURCE_MEMBERSHIP, libc::IP_MSFILTER, MCAST_JOIN_GROUP,
            MCAST_JOIN_SOURCE_GROUP, MCAST_MSFILTER,
        ], Action::Errno(libc::ENODEV)),
        options(libc::IPPROTO_IPV6, &[
            libc::IPV6_ADD_MEMBERSHIP, libc::IPV6_JOIN_ANYCAST, MCAST_JOIN_GROUP, MCAST_JOIN_SOURCE_GROUP, MCAST_MSFILTER,
        ], Action::Errno(libc::ENODEV)),
        // Keys for signed segments, 128 kB of them for each socket; and a connection that no broker has seen.
        options(libc::IPPROTO_TCP, &[
            libc::TCP_MD5SIG, 32, 38,               // TCP_MD5SIG_EXT, TCP_AO_ADD_KEY
            libc::TCP_FASTOPEN_CONNECT,
        ], UNKNOWN),
        // As MSG_MORE; and packets handed to IPsec.
        options(libc::IPPROTO_UDP, &[libc::UDP_CORK, libc::UDP_ENCAP], UNKNOWN),
        // `sendfile` may leave a datagram unfinished too. Its pages are charged, but not the header of each of its
        // fragments. The loopback's packets are so large that there is one, unless a smaller size is asked for.
        options(libc::IPPROTO_IPV6, &[libc::IPV6_MTU], UNKNOWN),
    ]
}
