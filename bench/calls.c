/* Times system calls, for bench/calls. Prints one line for each kind of call: the nanoseconds for one call, as the median of
 * batches of 50.
 *
 *     calls COUNT
 *
 * Only the named calls are timed. The program receives the sent data between the batches. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 50, LENGTH = 16 };

static void require(int condition, const char *what)
{
    if (!condition) {
        perror(what);
        exit(1);
    }
}

static long long now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void unix_pair(int type, int pair[2])
{
    require(socketpair(AF_UNIX, type, 0, pair) == 0, "socketpair");
}

/* Connects a pair over the loopback interface: pair[0] sends, pair[1] receives. */
static void inet_pair(int type, int pair[2])
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int server = socket(AF_INET, type, 0);
    require(server >= 0 && bind(server, (struct sockaddr *)&address, length) == 0, "bind");
    require(getsockname(server, (struct sockaddr *)&address, &length) == 0, "getsockname");
    if (type == SOCK_STREAM)
        require(listen(server, 1) == 0, "listen");
    pair[0] = socket(AF_INET, type, 0);
    require(connect(pair[0], (struct sockaddr *)&address, length) == 0, "connect");
    pair[1] = type == SOCK_STREAM ? accept(server, NULL, NULL) : server;
    require(pair[1] >= 0, "accept");
}

static int sockets[2];
static char data[LENGTH];

static long call_write(void) { return write(sockets[0], data, LENGTH); }
static long call_send(void) { return send(sockets[0], data, LENGTH, 0); }

static long call_sendmsg(void)
{
    struct iovec part = {data, LENGTH};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    return sendmsg(sockets[0], &message, 0);
}

/* Sends a descriptor along, as Python's multiprocessing does. */
static long call_sendmsg_descriptor(void)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.header = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    int passed = 0;
    memcpy(CMSG_DATA(&control.header), &passed, sizeof passed);
    struct iovec part = {data, LENGTH};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    return sendmsg(sockets[0], &message, 0);
}

static void *mapped[BATCH];
static int mapped_count;

static long call_mmap(void)
{
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mapped[mapped_count++] = page;
    return page == MAP_FAILED ? -1 : LENGTH;
}

static void unmap(void)
{
    while (mapped_count > 0)
        munmap(mapped[--mapped_count], 4096);
}

static void receive(void)
{
    char buffer[LENGTH];
    for (int i = 0; i < BATCH; i++)
        require(recv(sockets[1], buffer, LENGTH, MSG_WAITALL) == LENGTH, "recv");
}

static int compare(const void *a, const void *b)
{
    long long x = *(const long long *)a, y = *(const long long *)b;
    return (x > y) - (x < y);
}

static void time_call(const char *name, long (*call)(void), void (*between)(void), int count)
{
    int batches = count / BATCH;
    long long *durations = calloc(batches, sizeof *durations);
    require(durations != NULL, "calloc");
    /* Batch -1 is not counted: it may start the broker. */
    for (int batch = -1; batch < batches; batch++) {
        long long start = now_ns();
        for (int i = 0; i < BATCH; i++)
            require(call() == LENGTH, name);
        if (batch >= 0)
            durations[batch] = now_ns() - start;
        between();
    }
    qsort(durations, batches, sizeof *durations, compare);
    printf("%s\t%.1f\n", name, (double)durations[batches / 2] / BATCH);
    free(durations);
}

static void *sleeper(void *unused)
{
    pause();
    return unused;
}

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 100000;
    pthread_t thread;
    require(count >= BATCH, "a count");
    time_call("mmap", call_mmap, unmap, count);
    unix_pair(SOCK_STREAM, sockets);
    time_call("write, unix stream", call_write, receive, count);
    time_call("send, unix stream", call_send, receive, count);
    time_call("sendmsg, unix stream", call_sendmsg, receive, count);
    time_call("sendmsg with a descriptor", call_sendmsg_descriptor, receive, count);
    inet_pair(SOCK_STREAM, sockets);
    time_call("send, TCP", call_send, receive, count);
    time_call("sendmsg, TCP", call_sendmsg, receive, count);
    inet_pair(SOCK_DGRAM, sockets);
    time_call("send, UDP", call_send, receive, count);
    time_call("sendmsg, UDP", call_sendmsg, receive, count);
    require(pthread_create(&thread, NULL, sleeper, NULL) == 0, "pthread_create");
    time_call("sendmsg, UDP, two threads", call_sendmsg, receive, count);
    inet_pair(SOCK_STREAM, sockets);
    time_call("sendmsg, TCP, two threads", call_sendmsg, receive, count);
    unix_pair(SOCK_STREAM, sockets);
    time_call("sendmsg, unix stream, two threads", call_sendmsg, receive, count);
    time_call("sendmsg with a descriptor, two threads", call_sendmsg_descriptor, receive, count);
    return 0;
}
