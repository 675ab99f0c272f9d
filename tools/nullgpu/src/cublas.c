/* cuBLAS and cuBLASLt: handles and descriptors that hold nothing, products that are counted. */
#include "nullgpu.h"

#include <stdlib.h>
#include <string.h>

struct handle {
    void *stream;
    int math_mode, pointer_mode;
};

EXPORT int cublasCreate_v2(struct handle **handle) {
    *handle = calloc(1, sizeof **handle);
    return 0;
}
EXPORT int cublasDestroy_v2(struct handle *handle) {
    free(handle);
    return 0;
}
EXPORT int cublasSetStream_v2(struct handle *handle, void *stream) {
    handle->stream = stream;
    return 0;
}
EXPORT int cublasGetStream_v2(struct handle *handle, void **stream) {
    *stream = handle->stream;
    return 0;
}
EXPORT int cublasSetWorkspace_v2(struct handle *handle, void *space, size_t bytes) { return 0; }
EXPORT int cublasSetMathMode(struct handle *handle, int mode) {
    handle->math_mode = mode;
    return 0;
}
EXPORT int cublasGetMathMode(struct handle *handle, int *mode) {
    *mode = handle->math_mode;
    return 0;
}
EXPORT int cublasSetPointerMode_v2(struct handle *handle, int mode) {
    handle->pointer_mode = mode;
    return 0;
}
EXPORT int cublasGetPointerMode_v2(struct handle *handle, int *mode) {
    *mode = handle->pointer_mode;
    return 0;
}
EXPORT int cublasSetSmCountTarget(struct handle *handle, int count) { return 0; }

/* All arguments but the handle go unread: on x86-64 and aarch64 a callee may ignore them. */
#define COUNTED(name) \
    EXPORT int name(struct handle *handle) { \
        work(handle->stream, c_blas_calls); \
        return 0; \
    }
#define SDCZ(rest) COUNTED(cublasS##rest) COUNTED(cublasD##rest) COUNTED(cublasC##rest) COUNTED(cublasZ##rest)
SDCZ(gemm_v2);
SDCZ(gemv_v2);
SDCZ(gemmBatched);
SDCZ(gemmStridedBatched);
SDCZ(trsm_v2);
SDCZ(trsmBatched);
SDCZ(getrfBatched);
SDCZ(getrsBatched);
SDCZ(geqrfBatched);
SDCZ(gelsBatched);
SDCZ(axpy_v2);
SDCZ(copy_v2);
SDCZ(scal_v2);
SDCZ(swap_v2);
COUNTED(cublasSdot_v2);
COUNTED(cublasDdot_v2);
COUNTED(cublasCdotu_v2);
COUNTED(cublasCdotc_v2);
COUNTED(cublasZdotu_v2);
COUNTED(cublasZdotc_v2);
COUNTED(cublasDotEx);
COUNTED(cublasSgemmEx);
COUNTED(cublasGemmEx);
COUNTED(cublasGemmBatchedEx);
COUNTED(cublasGemmStridedBatchedEx);
COUNTED(cublasGemmGroupedBatchedEx);
COUNTED(cublasSgemmGroupedBatched);

/* ---- cuBLASLt ---- */

#define DESCRIPTOR(name) \
    EXPORT int cublasLt##name##Create(void **made) { \
        *made = malloc(1); \
        return 0; \
    } \
    EXPORT int cublasLt##name##Destroy(void *made) { \
        free(made); \
        return 0; \
    } \
    EXPORT int cublasLt##name##SetAttribute(void *made) { return 0; }
DESCRIPTOR(MatmulDesc)
DESCRIPTOR(MatrixLayout) DESCRIPTOR(MatmulPreference)

    EXPORT int cublasLtCreate(void **handle) {
    *handle = malloc(1);
    return 0;
}
EXPORT int cublasLtDestroy(void *handle) {
    free(handle);
    return 0;
}

struct heuristic { /* cublasLtMatmulHeuristicResult_t */
    uint64_t algorithm[8];
    size_t workspace;
    int state; /* 0: success */
    float waves;
    int reserved[4];
};

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                          void *preference, int wanted, struct heuristic *found, int *n) {
    *n = wanted > 0;
    if (*n) memset(found, 0, sizeof *found), found->waves = 1;
    return 0;
}
EXPORT int cublasLtMatmulAlgoInit(void) { return 0; }
EXPORT int cublasLtMatmulAlgoConfigSetAttribute(void) { return 0; }
EXPORT int cublasLtMatmulAlgoConfigGetAttribute(const void *algorithm, int name, void *value, size_t bytes,
                                                size_t *written) {
    if (value) memset(value, 0, bytes);
    if (written) *written = bytes;
    return 0;
}
EXPORT int cublasLtMatmulAlgoCheck(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   const void *algorithm, struct heuristic *found) {
    memset(found, 0, sizeof *found);
    return 0;
}
EXPORT int cublasLtMatmul(void *handle, void *operation, const void *alpha, const void *a, void *a_layout,
                          const void *b, void *b_layout, const void *beta, const void *c, void *c_layout,
                          void *d, void *d_layout, const void *algorithm, void *space, size_t bytes,
                          void *stream) {
    work(stream, c_blas_calls);
    return 0;
}
