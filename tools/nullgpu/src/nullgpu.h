/* A null GPU: CUDA calls succeed at once, compute nothing, and are counted. What the parts share. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Names and meanings of the counters. */
#define COUNTERS(X) \
    X(launches)    /* kernels that torch, triton or another user of the CUDA runtime launched */ \
    X(blas_calls)  /* cuBLAS and cuBLASLt calls that compute: one kernel or a few each */ \
    X(cudnn_calls) /* cuDNN calls that compute: one kernel or a few each */ \
    X(memsets) \
    X(graph_launches) /* of CUDA graphs */ \
    X(graph_kernels)  /* kernels, library calls, memsets and copies that those graphs hold */ \
    X(h2d_pinned) \
    X(h2d_pageable) /* from memory that is not pinned: the host waits, "async" or not */ \
    X(d2h_pinned) \
    X(d2h_pageable) \
    X(d2d) \
    X(mallocs)     /* cudaMalloc: what the caching allocator asks for */ \
    X(frees)       /* cudaFree, which waits for the device */ \
    X(host_allocs) /* of pinned memory */

enum counter {
#define X(name) c_##name,
    COUNTERS(X)
#undef X
        n_counters
};

extern uint64_t nullgpu_counts[n_counters];

static inline void count(enum counter which, uint64_t by) {
    __atomic_fetch_add(&nullgpu_counts[which], by, __ATOMIC_RELAXED);
}

/* Where the work of a stream goes: into the graph that it is captured into, or, counted as `which`, to the
 * device. */
void work(void *stream, enum counter which);

/* Tells the hook that the host waits here, copies pageable memory, or calls a collective. */
void tell(const char *what, size_t bytes);

/* Device memory. Addresses cost nothing and cannot be touched: a host that reads one crashes, as it should.
 * NULL: the device is full. */
void *device_alloc(size_t bytes);
int device_free(void *address);
size_t device_memory(void);
void *reserve_addresses(size_t bytes); /* on the device, with no memory behind them */
void release_addresses(void *start, size_t bytes);
size_t device_memory_used(int device);

/* The device that an address lies on, -1 for pinned host memory, -2 for other host memory. */
int place_of(const void *address);
void pin(void *address, size_t bytes);
int unpin(void *address);

/* A copy of any kind; `stream` NULL is the default one. Reads of device memory give what kept.c knows, else
 * constants. */
void copy(void *to, const void *from, size_t bytes, void *stream, int blocking);

/* kept.c: `values` NULL is a write of what nobody knows. `recall` says whether it knew. */
void keep(const void *at, const void *values, size_t bytes);
void keep_copy(const void *to, const void *from, size_t bytes);
int recall(void *to, const void *at, size_t bytes);
void forget_all(void);

extern __thread int current_device;
int device_count(void);
int sm_major(void);
int sm_minor(void);

static const char device_name[] = "Null GPU";
enum { sm_count = 132 };

/* The null driver's function of that name, or one that answers "not supported". */
void *driver_function(const char *name);
