/* The CUDA runtime. Compiled against the headers of the torch in use, whose structures and names differ
   between CUDA 12 and 13. What is missing here is the real library's, and fails there for want of a driver:
   loudly, and by name. */
#define _GNU_SOURCE
#include "nullgpu.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread cudaError_t last_error;

static cudaError_t fail(cudaError_t error) { return last_error = error; }

/* ---- streams, events, graphs: enough of them to know what is being captured ---- */

struct graph {
    uint64_t nodes;
    unsigned long long id;
    int ended;
};
struct CUstream_st {
    struct graph *graph;
    int device, priority;
};
struct CUevent_st {
    struct graph *graph;
};

static int captures;                  /* under way */
static unsigned long long last_graph; /* id */
static __thread enum cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

static struct graph *captured_by(cudaStream_t stream) {
    if ((uintptr_t)stream < 4096) return NULL; /* the default streams are 0, 1 and 2 */
    return stream->graph && !stream->graph->ended ? stream->graph : NULL;
}

void work(void *stream, enum counter which) {
    struct graph *graph = captured_by(stream);
    if (which == c_launches || which == c_blas_calls || which == c_cudnn_calls) forget_all();
    if (graph) __atomic_fetch_add(&graph->nodes, 1, __ATOMIC_RELAXED);
    else count(which, 1);
}

/* A host that waits while a graph is captured breaks the capture, as on a GPU. */
static int forbidden(void) { return captures && capture_mode != cudaStreamCaptureModeRelaxed; }

static cudaError_t waited(const char *what) {
    if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
    tell(what, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = calloc(1, sizeof **stream);
    (*stream)->device = current_device;
    (*stream)->priority = priority;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    free(stream);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = (uintptr_t)stream < 4096 ? 0 : stream->priority;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return waited("cudaStreamSynchronize"); }
EXPORT cudaError_t cudaDeviceSynchronize(void) { return waited("cudaDeviceSynchronize"); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) { return waited("cudaEventSynchronize"); }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    if ((uintptr_t)stream >= 4096 && event->graph && !event->graph->ended)
        stream->graph = event->graph; /* joins the capture */
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data,
                                         unsigned flags) {
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    if (captured_by(stream)) work(stream, c_launches);
    else function(data);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof **event);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    event->graph = captured_by(stream);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    *ms = 1; /* between any two: 0 would be no measure */
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    if ((uintptr_t)stream < 4096) return fail(cudaErrorStreamCaptureUnsupported); /* as on a GPU */
    stream->graph = calloc(1, sizeof *stream->graph);
    stream->graph->id = ++last_graph;
    capture_mode = mode;
    captures++;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    if (!captured_by(stream)) return fail(cudaErrorIllegalState);
    *graph = (cudaGraph_t)stream->graph;
    stream->graph->ended = 1;
    stream->graph = NULL;
    capture_mode = cudaStreamCaptureModeGlobal;
    captures--;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = captured_by(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return cudaSuccess;
}
#if CUDART_VERSION >= 13000
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies,
                                            const cudaGraphEdgeData **edges, size_t *n) {
    if (edges) *edges = NULL;
#else
EXPORT cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                               unsigned long long *id, cudaGraph_t *graph,
                                               const cudaGraphNode_t **dependencies, size_t *n) {
#endif
    struct graph *captured = captured_by(stream);
    *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = captured ? captured->id : 0;
    if (graph) *graph = (cudaGraph_t)captured;
    if (dependencies) *dependencies = NULL;
    if (n) *n = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *run, cudaGraph_t graph,
                                                 unsigned long long flags) {
    struct graph *copied = malloc(sizeof *copied);
    *copied = *(struct graph *)graph;
    *run = (cudaGraphExec_t)copied;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *run, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(run, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t run, cudaStream_t stream) {
    count(c_graph_launches, 1);
    count(c_graph_kernels, ((struct graph *)run)->nodes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphUpload(cudaGraphExec_t run, cudaStream_t stream) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes,
                                     size_t *n) { /* torch asks only whether there are any */
    *n = ((struct graph *)graph)->nodes;
    return cudaSuccess;
}
/* Streams that joined the capture still point at the graph, and look at whether it ended: it is kept. */
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }
EXPORT cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *data, cudaHostFn_t destroy,
                                        unsigned references, unsigned flags) {
    *object = (cudaUserObject_t)1;
    return cudaSuccess;
}
EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned references) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned references,
                                             unsigned flags) {
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t run) {
    free(run);
    return cudaSuccess;
}

/* ---- the device ---- */

EXPORT cudaError_t cudaGetDeviceCount(int *devices) {
    *devices = device_count();
    return *devices ? cudaSuccess : fail(cudaErrorNoDevice);
}
EXPORT cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
EXPORT cudaError_t cudaSetDeviceFlags(unsigned flags) { return cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

/* Limits of compute capability 9.0, which kernels ask for before they choose how to run. */
enum {
    threads_per_sm = 2048,
    registers_per_sm = 65536,
    shared_per_sm = 233472,
    shared_per_block = 49152,
    shared_optin = 232448,
    l2_bytes = 52428800
};

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p,
                                           int device) { /* CUDA 12 names it ..._v2 in its headers */
    if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", device_name);
    memcpy(p->uuid.bytes, "null gpu", 8);
    p->uuid.bytes[15] = (char)device;
    p->totalGlobalMem = device_memory();
    p->major = sm_major(), p->minor = sm_minor();
    p->multiProcessorCount = sm_count;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsPerMultiProcessor = threads_per_sm;
    p->maxBlocksPerMultiProcessor = 32;
    p->regsPerBlock = p->regsPerMultiprocessor = registers_per_sm;
    p->sharedMemPerBlock = shared_per_block;
    p->sharedMemPerBlockOptin = shared_optin;
    p->sharedMemPerMultiprocessor = shared_per_sm;
    p->totalConstMem = 65536;
    p->l2CacheSize = l2_bytes;
    p->memoryBusWidth = 6144;
    p->asyncEngineCount = 3;
    p->unifiedAddressing = p->concurrentKernels = p->canMapHostMemory = p->managedMemory = 1;
    p->pciBusID = device + 1;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = sm_major(); break;
    case cudaDevAttrComputeCapabilityMinor: *value = sm_minor(); break;
    case cudaDevAttrMultiProcessorCount: *value = sm_count; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = shared_per_block; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_optin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = shared_per_sm; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = registers_per_sm; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = threads_per_sm; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrL2CacheSize: *value = l2_bytes; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 6144; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    default: *value = 0; /* a feature that it has not */
    }
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    snprintf(id, (size_t)length, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* ---- memory ---- */

EXPORT cudaError_t cudaMalloc(void **address, size_t bytes) {
    *address = device_alloc(bytes);
    return *address ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
EXPORT cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream) {
    return cudaMalloc(address, bytes);
}
EXPORT cudaError_t cudaFree(void *address) {
    return !address || device_free(address) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }
EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = device_memory();
    *available = *total - device_memory_used(current_device);
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    if (posix_memalign(address, 4096, bytes ? bytes : 1)) return fail(cudaErrorMemoryAllocation);
    pin(*address, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMallocHost(void **address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
EXPORT cudaError_t cudaFreeHost(void *address) {
    if (!unpin(address)) return fail(cudaErrorInvalidValue);
    free(address);
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    pin(address, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void *address) {
    return unpin(address) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
EXPORT cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    *device = host;
    return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    int place = place_of(address);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = place >= 0    ? cudaMemoryTypeDevice
                       : place == -1 ? cudaMemoryTypeHost
                                     : cudaMemoryTypeUnregistered;
    attributes->device = place >= 0 ? place : current_device;
    attributes->devicePointer = place >= -1 ? (void *)address : NULL;
    attributes->hostPointer = place < 0 ? (void *)address : NULL;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    copy(to, from, bytes, stream, 0);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
    copy(to, from, bytes, NULL, 1);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                     size_t width, size_t height, enum cudaMemcpyKind kind,
                                     cudaStream_t stream) {
    if (place_of(to) >= 0)
        copy(to, from, width * height, stream,
             0); /* a read would have to keep to the pitch: nobody has needed one */
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                       size_t bytes, cudaStream_t stream) {
    copy(to, from, bytes, stream, 0);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
    work(stream, c_memsets);
    keep(address, NULL, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void *address, int value, size_t bytes) {
    return cudaMemsetAsync(address, value, bytes, NULL);
}
/* Variables of device code: an address that stands for each. */
EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = (void *)symbol;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                                      enum cudaMemcpyKind kind) {
    tell("cudaMemcpyToSymbol", bytes);
    return cudaSuccess;
}

/* Pools are not modelled: an allocation from one is a cudaMalloc. */
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)1;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr name, void *value) {
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr name, void *value) {
    *(uint64_t *)value = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep) { return cudaSuccess; }

/* ---- kernels ---- */

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configured; /* by <<<...>>>, popped by the kernel's stub on the host */

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configured.grid = grid, configured.block = block, configured.shared = shared, configured.stream = stream;
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configured.grid, *block = configured.block, *shared = configured.shared;
    *(void **)stream = configured.stream;
    return cudaSuccess;
}
EXPORT void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) { free(handle); }
EXPORT char __cudaInitModule(void **handle) { return 0; }
EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external,
                              size_t size, int constant, int global) {}
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                   void *tid, void *bid, void *block, void *grid, int *size) {}
EXPORT cudaError_t __cudaGetKernel(void **kernel, const void *host) {
    *kernel = (void *)host;
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                                    size_t shared, cudaStream_t stream) {
    work(stream, c_launches);
    return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                                               size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel,
                                       void **arguments) {
    work(config->stream, c_launches);
    return cudaSuccess;
}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = 10 * sm_major() + sm_minor();
    attributes->maxDynamicSharedSizeBytes = shared_per_block;
    return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute name, int value) {
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel,
                                                                          int threads, size_t shared,
                                                                          unsigned flags) {
    *blocks = threads > 0 && threads < threads_per_sm ? threads_per_sm / threads
                                                      : 1; /* as if nothing but threads were scarce */
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads,
                                                                 size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared, 0);
}

/* ---- the driver's functions, for those who ask the runtime for them ---- */

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *found) {
    *function = driver_function(symbol);
    if (found) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                           enum cudaDriverEntryPointQueryResult *found) {
    return cudaGetDriverEntryPointByVersion(symbol, function, 0, flags, found);
}
