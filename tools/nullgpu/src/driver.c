/* The CUDA driver, which torch reaches through the runtime, triton and libcaffe2_nvrtc through libcuda.so.1:
   this library has that name. Handles are pointers and errors are ints, so no header is needed. */
#define _GNU_SOURCE
#include "nullgpu.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { success = 0, out_of_memory = 2, not_supported = 801 };

static int unsupported(void) { return not_supported; }

void *driver_function(const char *name) {
    /* Only ours: a real libcuda that lies about must not be asked. */
    static void *ours;
    Dl_info info;
    if (!ours && dladdr((void *)driver_function, &info))
        ours = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    void *found = ours ? dlsym(ours, name) : NULL;
    return found ? found : (void *)unsupported;
}

EXPORT int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    *function = driver_function(name);
    return success;
}
EXPORT int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found) {
    if (found) *found = 0;
    return cuGetProcAddress(name, function, version, flags);
}
EXPORT int cuInit(unsigned flags) { return success; }
EXPORT int cudaDriverGetVersion(int *version);
EXPORT int cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }
EXPORT int cuGetErrorString(int error, const char **text) {
    *text = error ? "error of the null GPU" : "no error";
    return success;
}
EXPORT int cuGetErrorName(int error, const char **text) {
    *text = error ? "CUDA_ERROR" : "CUDA_SUCCESS";
    return success;
}

/* ---- devices and contexts: a device's only context is its number plus one ---- */

EXPORT int cuDeviceGetCount(int *devices) {
    *devices = device_count();
    return success;
}
EXPORT int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return success;
}
EXPORT int cuDeviceGetName(char *name, int length, int device) {
    strncpy(name, device_name, (size_t)length);
    return success;
}
EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = device_memory();
    return success;
}
EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device); /* the same numbers */
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}
EXPORT int cuDeviceGetUuid_v2(char *uuid, int device) {
    memset(uuid, 0, 16);
    memcpy(uuid, "null gpu", 8);
    uuid[15] = (char)device;
    return success;
}
EXPORT int cuDeviceGetUuid(char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return success;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(intptr_t)(device + 1);
    return success;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) { return success; }
EXPORT int cuCtxGetCurrent(void **context) {
    *context = (void *)(intptr_t)(current_device + 1);
    return success;
}
EXPORT int cuCtxSetCurrent(void *context) {
    if (context) current_device = (int)(intptr_t)context - 1;
    return success;
}
EXPORT int cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
EXPORT int cuCtxPopCurrent_v2(void **context) { return cuCtxGetCurrent(context); }
EXPORT int cuCtxGetDevice(int *device) {
    *device = current_device;
    return success;
}
EXPORT int cuCtxGetLimit(size_t *value, int limit) {
    *value = 0;
    return success;
}
EXPORT int cuCtxSetLimit(int limit, size_t value) { return success; }
EXPORT int cuCtxSynchronize(void) {
    tell("cuCtxSynchronize", 0);
    return success;
}
EXPORT int cuStreamSynchronize(void *stream) {
    tell("cuStreamSynchronize", 0);
    return success;
}

/* ---- modules: what triton and nvrtc compiled; a function is its module ---- */

EXPORT int cuModuleLoadData(void **module, const void *image) {
    *module = malloc(1);
    return success;
}
EXPORT int cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *names, void *values) {
    return cuModuleLoadData(module, image);
}
EXPORT int cuModuleLoad(void **module, const char *path) { return cuModuleLoadData(module, path); }
EXPORT int cuModuleUnload(void *module) {
    free(module);
    return success;
}
EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = module;
    return success;
}
EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* threads of a block, registers of a thread */
    return success;
}
EXPORT int cuFuncSetAttribute(void *function, int attribute, int value) { return success; }
EXPORT int cuFuncSetCacheConfig(void *function, int config) { return success; }
EXPORT int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
    work(stream, c_launches);
    return success;
}
EXPORT int cuLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                     unsigned by, unsigned bz, unsigned shared, void *stream,
                                     void **arguments) {
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, NULL);
}
struct launch_config { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared;
    void *stream;
};
EXPORT int cuLaunchKernelEx(const struct launch_config *config, void *function, void **arguments,
                            void **extra) {
    work(config->stream, c_launches);
    return success;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads,
                                                       size_t shared) {
    *blocks = threads > 0 && threads < 2048 ? 2048 / threads : 1;
    return success;
}
EXPORT int cuOccupancyMaxActiveClusters(int *clusters, void *function, const struct launch_config *config) {
    *clusters = 16;
    return success;
}
EXPORT int cuTensorMapEncodeTiled(void *map) { /* the other arguments go unread */
    memset(map, 0, 128);
    return success;
}
EXPORT int cuTensorMapEncodeIm2col(void *map) { return cuTensorMapEncodeTiled(map); }

/* ---- memory; of expandable segments, physical blocks count where they are made ---- */

struct block {
    void *counted; /* a device allocation that stands for the block */
};

EXPORT int cuMemAlloc_v2(void **address, size_t bytes) {
    *address = device_alloc(bytes);
    return *address ? success : out_of_memory;
}
EXPORT int cuMemFree_v2(void *address) {
    device_free(address);
    return success;
}
EXPORT int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    *bytes = 2 << 20;
    return success;
}
EXPORT int cuMemAddressReserve(void **address, size_t bytes, size_t alignment, void *wanted, uint64_t flags) {
    *address = reserve_addresses(bytes);
    return success;
}
EXPORT int cuMemAddressFree(void *address, size_t bytes) {
    release_addresses(address, bytes);
    return success;
}
EXPORT int cuMemCreate(void **handle, size_t bytes, const void *properties, uint64_t flags) {
    void *counted = device_alloc(bytes);
    if (!counted) return out_of_memory;
    struct block *block = malloc(sizeof *block);
    block->counted = counted;
    *handle = block;
    return success;
}
EXPORT int cuMemRelease(void *handle) {
    device_free(((struct block *)handle)->counted);
    free(handle);
    return success;
}
EXPORT int cuMemMap(void *address, size_t bytes, size_t offset, void *handle, uint64_t flags) {
    return success;
}
EXPORT int cuMemSetAccess(void *address, size_t bytes, const void *access, size_t n) { return success; }
EXPORT int cuMemUnmap(void *address, size_t bytes) { return success; }

EXPORT int cuPointerGetAttribute(void *value, int attribute, const void *address) {
    int place = place_of(address);
    switch (attribute) {
    case 1: *(void **)value = (void *)(intptr_t)(current_device + 1); break; /* context */
    case 2: *(unsigned *)value = place >= 0 ? 2 : 1; break;                  /* memory type: device or host */
    case 3: *(const void **)value = address; break;                          /* device pointer */
    case 9: *(int *)value = place >= 0 ? place : current_device; break;      /* device */
    default: *(unsigned *)value = 0;
    }
    return place >= -1 ? success : 1;
}
EXPORT int cuPointerGetAttributes(unsigned n, int *attributes, void **values, const void *address) {
    for (unsigned i = 0; i < n; i++) cuPointerGetAttribute(values[i], attributes[i], address);
    return success;
}
EXPORT int cuMemcpyDtoH_v2(void *to, const void *from, size_t bytes) {
    copy(to, from, bytes, NULL, 1);
    return success;
}
EXPORT int cuMemcpyHtoD_v2(void *to, const void *from, size_t bytes) {
    copy(to, from, bytes, NULL, 1);
    return success;
}
EXPORT int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t bytes, void *stream) {
    copy(to, from, bytes, stream, 0);
    return success;
}
EXPORT int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t bytes, void *stream) {
    copy(to, from, bytes, stream, 0);
    return success;
}
