/* cuDNN's graph API, which torch's convolutions and attention use: it offers one engine, with no knobs and no
   notes, that needs no workspace. The old API's batch norm is here too. The rest of cuDNN is the real
   library's, and fails there. Numbers are cudnn_graph.h's, the same since cuDNN 8. */
#include "nullgpu.h"

#include <stdlib.h>
#include <string.h>

struct handle {
    void *stream;
};

EXPORT int cudnnCreate(struct handle **handle) {
    *handle = calloc(1, sizeof **handle);
    return 0;
}
EXPORT int cudnnDestroy(struct handle *handle) {
    free(handle);
    return 0;
}
EXPORT int cudnnSetStream(struct handle *handle, void *stream) {
    handle->stream = stream;
    return 0;
}
EXPORT int cudnnGetStream(struct handle *handle, void **stream) {
    *stream = handle->stream;
    return 0;
}

/* ---- descriptors remember what they are told, since builders ask them for it ---- */

enum attribute_name {
    ENGINEHEUR_RESULTS = 202,
    ENGINECFG_ENGINE = 300,
    EXECUTION_PLAN_ENGINE_CONFIG = 401,
    OPERATIONGRAPH_ENGINE_GLOBAL_COUNT = 802,
};
enum attribute_type {
    TYPE_HANDLE = 0,
    TYPE_BOOLEAN = 2,
    TYPE_INT64 = 3,
    TYPE_DOUBLE = 5,
    TYPE_VOID_PTR = 6,
    TYPE_DESCRIPTOR = 15,
    TYPE_INT32 = 23,
    TYPE_CHAR = 24,
};

struct attribute {
    int name;
    int64_t elements;
    void *values;
    struct attribute *next;
};
struct descriptor {
    struct attribute *attributes;
};

static size_t size_of(int type) {
    switch (type) {
    case TYPE_HANDLE:
    case TYPE_INT64:
    case TYPE_DOUBLE:
    case TYPE_VOID_PTR:
    case TYPE_DESCRIPTOR: return 8;
    case TYPE_BOOLEAN:
    case TYPE_CHAR: return 1;
    default: return 4; /* enumerations */
    }
}

EXPORT int cudnnBackendCreateDescriptor(int type, struct descriptor **made) {
    *made = calloc(1, sizeof **made);
    return 0;
}
EXPORT int cudnnBackendDestroyDescriptor(struct descriptor *made) {
    for (struct attribute *next, *a = made ? made->attributes : NULL; a; a = next)
        next = a->next, free(a->values), free(a);
    free(made);
    return 0;
}
EXPORT int cudnnBackendFinalize(struct descriptor *made) { return 0; }
EXPORT int cudnnBackendSetAttribute(struct descriptor *made, int name, int type, int64_t elements,
                                    const void *values) {
    struct attribute *attribute = calloc(1, sizeof *attribute);
    size_t bytes = size_of(type) * (size_t)elements;
    /* The newest first. */
    *attribute = (struct attribute){name, elements, malloc(bytes ? bytes : 1), made->attributes};
    if (values) memcpy(attribute->values, values, bytes);
    made->attributes = attribute;
    return 0;
}
EXPORT int cudnnBackendGetAttribute(const struct descriptor *made, int name, int type, int64_t most,
                                    int64_t *elements, void *values) {
    int64_t n = 0;
    const struct attribute *told = made->attributes;
    while (told && told->name != name) told = told->next;
    if (told && type != TYPE_DESCRIPTOR) { /* a descriptor is the asker's own, who has one to fill */
        n = told->elements;
        if (values) memcpy(values, told->values, size_of(type) * (size_t)(n < most ? n : most));
    } else if (name == ENGINEHEUR_RESULTS || name == ENGINECFG_ENGINE ||
               name == EXECUTION_PLAN_ENGINE_CONFIG) {
        n = 1; /* the asker brings the descriptor, which has nothing to hold */
    } else if (type == TYPE_INT64 || type == TYPE_INT32) { /* indices and sizes are 0, there is one engine */
        n = 1;
        if (values && most) memset(values, 0, size_of(type));
        if (values && most && name == OPERATIONGRAPH_ENGINE_GLOBAL_COUNT) *(int64_t *)values = 1;
    }
    if (elements) *elements = n;
    return 0;
}
EXPORT int cudnnBackendExecute(struct handle *handle, struct descriptor *plan, struct descriptor *pointers) {
    work(handle->stream, c_cudnn_calls);
    return 0;
}

/* ---- batch norm ---- */

#define DESCRIPTOR(name) \
    EXPORT int cudnnCreate##name##Descriptor(void **made) { \
        *made = calloc(1, 64); \
        return 0; \
    } \
    EXPORT int cudnnDestroy##name##Descriptor(void *made) { \
        free(made); \
        return 0; \
    }
DESCRIPTOR(Tensor);
DESCRIPTOR(Filter);
DESCRIPTOR(Convolution);
DESCRIPTOR(Activation);
EXPORT int cudnnSetTensorNdDescriptor(void) { return 0; }
EXPORT int cudnnSetFilterNdDescriptor(void) { return 0; }
EXPORT int cudnnSetActivationDescriptor(void) { return 0; }

#define COUNTED(name) \
    EXPORT int name(struct handle *handle) { \
        work(handle->stream, c_cudnn_calls); \
        return 0; \
    }
COUNTED(cudnnBatchNormalizationForwardTrainingEx);
COUNTED(cudnnBatchNormalizationBackwardEx);
COUNTED(cudnnBatchNormalizationForwardInference);

EXPORT int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int mode, int ops, void *x,
                                                                    void *z, void *y, void *scale, void *act,
                                                                    size_t *bytes) {
    *bytes = 0;
    return 0;
}
EXPORT int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int ops, void *x, void *y,
                                                             void *dy, void *dz, void *dx, void *scale,
                                                             void *act, size_t *bytes) {
    *bytes = 0;
    return 0;
}
EXPORT int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int ops, void *act,
                                                                void *x, size_t *bytes) {
    *bytes = 0;
    return 0;
}
