/* The device: its description, its memory, the counters, the hook. */
#define _GNU_SOURCE
#include "nullgpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

uint64_t nullgpu_counts[n_counters];
__thread int current_device;

static const char *const counter_names[] = {
#define X(name) #name,
    COUNTERS(X)
#undef X
};

static double setting(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text && *text ? atof(text) : otherwise;
}

/* ---- what the device is ---- */

enum { max_devices = 64 };

int device_count(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"); /* a list; "" and "-1" hide all */
    int devices = (int)setting("NULLGPU_DEVICES", 1);
    if (visible) {
        int listed = *visible && *visible != '-';
        for (const char *c = visible; *c; c++) listed += *c == ',';
        devices = listed < devices ? listed : devices;
    }
    return devices < max_devices ? devices : max_devices;
}

size_t device_memory(void) { return (size_t)(setting("NULLGPU_MEMORY_GB", 141) * 1e9); }
int sm_major(void) { return (int)setting("NULLGPU_SM", 9.0); }
int sm_minor(void) { return (int)(setting("NULLGPU_SM", 9.0) * 10 + 0.5) % 10; }

/* ---- the hook ---- */

static void (*hook)(const char *what, size_t bytes);
static __thread int in_hook; /* Python code that a hook runs may itself wait for the device */

EXPORT void nullgpu_hook(void (*function)(const char *, size_t)) { hook = function; }

void tell(const char *what, size_t bytes) {
    if (!hook || in_hook) return;
    in_hook = 1;
    hook(what, bytes);
    in_hook = 0;
}

/* ---- memory: a list of address ranges, few enough to search ---- */

struct range {
    char *start;
    size_t bytes;
    int device; /* -1: pinned host memory */
};
static struct range *ranges;
static size_t n_ranges, capacity;
static size_t used[max_devices];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add_range(void *start, size_t bytes, int device) {
    if (n_ranges == capacity) ranges = realloc(ranges, (capacity = 2 * capacity + 64) * sizeof *ranges);
    ranges[n_ranges++] = (struct range){start, bytes, device};
}

static struct range *range_of(const void *address) {
    for (size_t i = n_ranges; i-- > 0;)
        if ((char *)address >= ranges[i].start && (char *)address < ranges[i].start + ranges[i].bytes)
            return &ranges[i];
    return NULL;
}

static struct range take_range(const void *address, int on_device) {
    struct range gone = {0};
    pthread_mutex_lock(&lock);
    struct range *range = range_of(address);
    if (range && range->start == address && (range->device >= 0) == on_device) {
        gone = *range;
        *range = ranges[--n_ranges];
        if (on_device) used[gone.device] -= gone.bytes;
    }
    pthread_mutex_unlock(&lock);
    return gone;
}

static void *addresses(size_t bytes) {
    void *start =
        mmap(NULL, bytes ? bytes : 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

void *reserve_addresses(size_t bytes) {
    void *start = addresses(bytes);
    pthread_mutex_lock(&lock);
    if (start) add_range(start, bytes, current_device);
    pthread_mutex_unlock(&lock);
    return start;
}

void release_addresses(void *start, size_t bytes) {
    pthread_mutex_lock(&lock);
    struct range *range = range_of(start);
    if (range) *range = ranges[--n_ranges];
    pthread_mutex_unlock(&lock);
    munmap(start, bytes);
}

void *device_alloc(size_t bytes) {
    void *address = NULL;
    pthread_mutex_lock(&lock);
    if (used[current_device] + bytes <= device_memory()) address = addresses(bytes);
    if (address) {
        add_range(address, bytes, current_device);
        used[current_device] += bytes;
    }
    pthread_mutex_unlock(&lock);
    if (address) count(c_mallocs, 1);
    return address;
}

int device_free(void *address) {
    struct range gone = take_range(address, 1);
    if (!gone.start) return 0;
    munmap(gone.start, gone.bytes ? gone.bytes : 1);
    count(c_frees, 1);
    return 1;
}

size_t device_memory_used(int device) { return used[device]; }

int place_of(const void *address) {
    pthread_mutex_lock(&lock);
    struct range *range = range_of(address);
    int place = range ? range->device : -2;
    pthread_mutex_unlock(&lock);
    return place;
}

void pin(void *address, size_t bytes) {
    pthread_mutex_lock(&lock);
    add_range(address, bytes, -1);
    pthread_mutex_unlock(&lock);
    count(c_host_allocs, 1);
}

int unpin(void *address) { return take_range(address, 0).start != NULL; }

/* ---- copies ---- */

static float read_float;

EXPORT void nullgpu_reads(float as_float) { read_float = as_float; }

/* The size of a read is all that tells its type: 1 byte is a bool, and true; 2 are a bfloat16, 8 an integer.
 */
static void read_constant(void *to, size_t bytes) {
    uint32_t bits;
    memcpy(&bits, &read_float, sizeof bits);
    if (bytes == 1) {
        *(uint8_t *)to = 1;
    } else if (bytes == 2) {
        *(uint16_t *)to = (uint16_t)(bits >> 16);
    } else if (!bits || bytes == 8 || bytes % 4) {
        memset(to, 0, bytes);
    } else {
        for (size_t i = 0; i < bytes / 4; i++) ((uint32_t *)to)[i] = bits;
    }
}

void copy(void *to, const void *from, size_t bytes, void *stream, int blocking) {
    int to_place = place_of(to), from_place = place_of(from);
    if (in_hook) return;
    if (to_place < 0 && from_place < 0) {
        memmove(to, from, bytes);
    } else if (to_place >= 0 && from_place >= 0) {
        work(stream, c_d2d);
        keep_copy(to, from, bytes);
    } else {
        int reads = to_place < 0, pageable = (reads ? to_place : from_place) == -2;
        enum counter which =
            reads ? (pageable ? c_d2h_pageable : c_d2h_pinned) : (pageable ? c_h2d_pageable : c_h2d_pinned);
        work(stream, which);
        if (!reads) keep(to, from, bytes);
        else if (!recall(to, from, bytes)) read_constant(to, bytes);
        if (pageable && !blocking)
            tell(reads ? "pageable copy to the host" : "pageable copy to the device", bytes);
    }
    if (blocking) tell("cudaMemcpy", bytes);
}

/* ---- what Python sees ---- */

EXPORT const char *nullgpu_counter(int which, uint64_t *value) {
    if (which < 0 || which >= n_counters) return NULL;
    *value = nullgpu_counts[which];
    return counter_names[which];
}
