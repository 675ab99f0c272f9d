/* Small values that the host sent, and that no kernel can have changed yet: they come back as they went.
   Without them DistributedDataParallel, which compares the ranks' parameters through the device and agrees on
   buckets there, would read constants and stop. A kernel may write anywhere, so each launch forgets
   everything. */
#include "nullgpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { most_records = 4096, most_bytes = 1 << 20 };

struct record {
    const char *at;
    size_t bytes;
    char *values; /* NULL: nobody knows */
};
static struct record records[most_records]; /* the newest last */
static size_t n;
static uint64_t launches, launches_at_last; /* in all, and when the newest record was made */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void forget_all(void) { __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED); }

void keep(const void *at, const void *values, size_t bytes) {
    pthread_mutex_lock(&lock);
    uint64_t now = __atomic_load_n(&launches, __ATOMIC_RELAXED);
    if (now != launches_at_last || n == most_records) {
        while (n) free(records[--n].values);
        launches_at_last = now;
    }
    char *copied = values && bytes <= most_bytes ? malloc(bytes ? bytes : 1) : NULL;
    if (copied) memcpy(copied, values, bytes);
    records[n++] = (struct record){at, bytes, copied};
    pthread_mutex_unlock(&lock);
}

int recall(void *to, const void *at, size_t bytes) {
    int found = 0;
    const char *start = at;
    pthread_mutex_lock(&lock);
    if (__atomic_load_n(&launches, __ATOMIC_RELAXED) == launches_at_last)
        for (size_t i = n; i-- > 0;) {
            struct record *record = &records[i];
            if (start + bytes <= record->at || start >= record->at + record->bytes) continue; /* elsewhere */
            found = record->values && start >= record->at && start + bytes <= record->at + record->bytes;
            if (found) memcpy(to, record->values + (start - record->at), bytes);
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

void keep_copy(const void *to, const void *from, size_t bytes) {
    char *values = bytes <= most_bytes ? malloc(bytes ? bytes : 1) : NULL;
    keep(to, values && recall(values, from, bytes) ? values : NULL, bytes);
    free(values);
}
