/* NCCL: communicators of any size whose collectives move nothing. Each rank is a process of its own, which
   meets the others through torch's store alone: that the ranks call the same collectives is for a test to
   compare. The hook hears of a collective with the bytes of the whole tensor, as nccl-tests do. What a rank
   gathers is its own values once for each rank, what it reduces is its own values: right where ranks agree,
   on what kept.c knows. */
#include "nullgpu.h"

#include <stdlib.h>
#include <string.h>

struct comm {
    int ranks, rank, device;
};

static struct comm *joined(int ranks, int rank) {
    struct comm *comm = malloc(sizeof *comm);
    *comm = (struct comm){ranks, rank, current_device};
    return comm;
}

struct id {
    char bytes[128];
};

EXPORT int ncclGetUniqueId(struct id *id) {
    memset(id, 0, sizeof *id);
    return 0;
}
EXPORT int ncclCommInitRank(struct comm **comm, int ranks, struct id id, int rank) {
    *comm = joined(ranks, rank);
    return 0;
}
EXPORT int ncclCommInitRankConfig(struct comm **comm, int ranks, struct id id, int rank, void *config) {
    return ncclCommInitRank(comm, ranks, id, rank);
}
EXPORT int ncclCommInitRankScalable(struct comm **comm, int ranks, int rank, int n, struct id *ids,
                                    void *config) {
    *comm = joined(ranks, rank);
    return 0;
}
EXPORT int ncclCommInitAll(struct comm **comms, int n, const int *devices) {
    for (int i = 0; i < n; i++) comms[i] = joined(n, i);
    return 0;
}
EXPORT int ncclCommSplit(struct comm *comm, int color, int key, struct comm **part, void *config) {
    /* Its size is the parent's: only the caller knows better. */
    *part = color < 0 ? NULL : joined(comm->ranks, key);
    return 0;
}
EXPORT int ncclCommFinalize(struct comm *comm) { return 0; }
EXPORT int ncclCommDestroy(struct comm *comm) {
    free(comm);
    return 0;
}
EXPORT int ncclCommAbort(struct comm *comm) {
    free(comm);
    return 0;
}
EXPORT int ncclCommGetAsyncError(struct comm *comm, int *error) {
    *error = 0;
    return 0;
}
EXPORT int ncclCommCount(struct comm *comm, int *ranks) {
    *ranks = comm->ranks;
    return 0;
}
EXPORT int ncclCommUserRank(struct comm *comm, int *rank) {
    *rank = comm->rank;
    return 0;
}
EXPORT int ncclCommCuDevice(struct comm *comm, int *device) {
    *device = comm->device;
    return 0;
}
EXPORT int ncclCommRegister(struct comm *comm, void *buffer, size_t bytes, void **handle) {
    *handle = buffer;
    return 0;
}
EXPORT int ncclCommDeregister(struct comm *comm, void *handle) { return 0; }
EXPORT int ncclMemAlloc(void **address, size_t bytes) {
    *address = device_alloc(bytes);
    return *address ? 0 : 1;
}
EXPORT int ncclMemFree(void *address) {
    device_free(address);
    return 0;
}
EXPORT int ncclRedOpCreatePreMulSum(int *op) {
    *op = 5;
    return 0;
}
EXPORT int ncclRedOpDestroy(void) { return 0; }
EXPORT int ncclGroupStart(void) { return 0; }
EXPORT int ncclGroupEnd(void) { return 0; }

static size_t size_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by ncclDataType_t */
    return type < 12 ? sizes[type] : 1;
}

static int called(const char *what, size_t elements, int type, int ranks) {
    tell(what, elements * (size_t)ranks * size_of(type));
    return 0;
}

EXPORT int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, struct comm *comm,
                         void *stream) {
    keep_copy(to, from, n * size_of(type));
    return called("all_reduce", n, type, 1);
}
EXPORT int ncclAllGather(const void *from, void *to, size_t n, int type, struct comm *comm, void *stream) {
    for (int rank = 0; rank < comm->ranks; rank++)
        keep_copy((char *)to + (size_t)rank * n * size_of(type), from, n * size_of(type));
    return called("all_gather", n, type, comm->ranks);
}
EXPORT int ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, struct comm *comm,
                             void *stream) {
    return called("reduce_scatter", n, type, comm->ranks);
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, struct comm *comm,
                         void *stream) {
    keep_copy(to, from, n * size_of(type));
    return called("broadcast", n, type, 1);
}
EXPORT int ncclBcast(void *buffer, size_t n, int type, int root, struct comm *comm, void *stream) {
    return ncclBroadcast(buffer, buffer, n, type, root, comm, stream);
}
EXPORT int ncclReduce(const void *from, void *to, size_t n, int type, int op, int root, struct comm *comm,
                      void *stream) {
    return called("reduce", n, type, 1);
}
EXPORT int ncclGather(const void *from, void *to, size_t n, int type, int root, struct comm *comm,
                      void *stream) {
    return called("gather", n, type, comm->ranks);
}
EXPORT int ncclAlltoAll(const void *from, void *to, size_t n, int type, struct comm *comm, void *stream) {
    return called("all_to_all", n, type, comm->ranks);
}
EXPORT int ncclSend(const void *from, size_t n, int type, int peer, struct comm *comm, void *stream) {
    return called("send", n, type, 1);
}
EXPORT int ncclRecv(void *to, size_t n, int type, int peer, struct comm *comm, void *stream) {
    return called("recv", n, type, 1);
}
