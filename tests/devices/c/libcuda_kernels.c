/* The rest of tests' libcuda.so.1, which libcuda.c begins: devices, kernels, and memory that processes share. */
#include "libcuda.c"

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

/* add_scalar(const float *from, float *to, float value, uint32_t n) */
static CUresult add_scalar(void **arguments) {
    uint32_t n = *(uint32_t *)arguments[3];
    float value = *(float *)arguments[2];
    const float *from = (const float *)(void *)bytes_at(*(uint64_t *)arguments[0], n * sizeof *from);
    float *to = (float *)(void *)bytes_at(*(uint64_t *)arguments[1], n * sizeof *to);
    if (!from || !to) return ILLEGAL_ADDRESS;
    for (uint32_t i = 0; i < n; i++) to[i] = from[i] + value;
    return SUCCESS;
}

static CUresult trap(void **arguments) { return (void)arguments, LAUNCH_FAILED; }

typedef struct {
    const char *name;
    kernel_function *function;
    int n;
    uint8_t bytes[4]; /* of each argument */
} built_in;

static const built_in KERNELS_BY_NAME[] = {{"add_scalar", add_scalar, 4, {8, 8, 4, 4}}, {"trap", trap, 0, {0}}};

CUresult cuModuleLoadData(char **module, const char *image) {
    CUresult r = begin(ANY);
    if (r) return r;
    if (!strstr(image, ".entry")) return INVALID_IMAGE;
    *module = strdup(image);
    return SUCCESS;
}

CUresult cuModuleUnload(char *module) {
    free(module);
    return SUCCESS;
}

CUresult cuModuleGetFunction(const built_in **function, const char *module, const char *name) {
    char entry[128];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    if (!strstr(module, entry)) return NOT_FOUND;
    for (size_t i = 0; i < sizeof KERNELS_BY_NAME / sizeof *KERNELS_BY_NAME; i++)
        if (!strcmp(KERNELS_BY_NAME[i].name, name)) return *function = &KERNELS_BY_NAME[i], SUCCESS;
    return NOT_FOUND;
}

CUresult cuLaunchKernel(const built_in *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared_bytes, stream *s, void **arguments, void **extra) {
    (void)shared_bytes, (void)extra;
    CUresult r = begin(LAUNCH);
    if (r || !gx || !gy || !gz || !bx || !by || !bz || (uint64_t)bx * by * bz > 1024) return r ? r : INVALID_VALUE;
    work w = {.kind = KERNEL, .kernel = f->function};
    for (int i = 0; i < f->n; i++) memcpy(&w.values[i], arguments[i], f->bytes[i]);
    return add(s, &w);
}

/* ---- memory that processes share --------------------------------------------------------------------------------- */

typedef struct {
    int type, requestedHandleTypes;
    struct { int type, id; } location;
} properties; /* the beginning of CUmemAllocationProp */

static const size_t GRANULE = 2u << 20;

CUresult cuMemGetAllocationGranularity(size_t *bytes, const properties *p, int option) {
    (void)option;
    *bytes = GRANULE;
    return p->type == 1 && p->location.type == 1 ? begin(ANY) : INVALID_VALUE;
}

CUresult cuMemCreate(uint64_t *handle, size_t bytes, const properties *p, unsigned long long flags) {
    (void)flags;
    CUresult r = begin(CREATE);
    if (r || bytes % GRANULE || p->requestedHandleTypes != 1) return r ? r : INVALID_VALUE;
    pthread_mutex_lock(&lock);
    physical *made = new_physical(bytes);
    pthread_mutex_unlock(&lock);
    *handle = (uint64_t)(uintptr_t)made;
    return made ? SUCCESS : OUT_OF_MEMORY;
}

CUresult cuMemRelease(uint64_t handle) {
    pthread_mutex_lock(&lock);
    release((physical *)(uintptr_t)handle);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

CUresult cuMemExportToShareableHandle(int *fd, uint64_t handle, int type, unsigned long long flags) {
    (void)flags;
    CUresult r = begin(EXPORT);
    if (r || type != 1) return r ? r : INVALID_VALUE;
    *fd = fcntl(((physical *)(uintptr_t)handle)->fd, F_DUPFD_CLOEXEC, 0);
    return *fd < 0 ? OUT_OF_MEMORY : SUCCESS;
}

/* Counted in the process that made it. */
CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *exported, int type) {
    CUresult r = begin(IMPORT);
    off_t bytes = lseek((int)(intptr_t)exported, 0, SEEK_END);
    if (r || type != 1 || bytes <= 0 || (size_t)bytes % GRANULE) return r ? r : INVALID_VALUE;
    physical *p = calloc(1, sizeof *p);
    *p = (physical){fcntl((int)(intptr_t)exported, F_DUPFD_CLOEXEC, 0), (size_t)bytes, 1};
    count_bytes((int64_t)bytes); /* release takes them off again */
    *handle = (uint64_t)(uintptr_t)p;
    return SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    (void)alignment, (void)wanted, (void)flags;
    CUresult r = begin(ANY);
    if (r || bytes % GRANULE) return r ? r : INVALID_VALUE;
    pthread_mutex_lock(&lock);
    *address = reserve(bytes);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { return (void)bytes, free_range(address); }

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)flags;
    CUresult r = begin(MAP);
    physical *p = (physical *)(uintptr_t)handle;
    if (r || offset || bytes > p->bytes) return r ? r : INVALID_VALUE;
    pthread_mutex_lock(&lock);
    range *found = *range_at(address);
    if (found && !found->storage) {
        p->references++;
        attach(found, p);
    }
    pthread_mutex_unlock(&lock);
    return found ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    (void)bytes;
    pthread_mutex_lock(&lock);
    range *found = *range_at(address);
    if (found) detach(found);
    pthread_mutex_unlock(&lock);
    return found ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const void *access, size_t n) {
    (void)address, (void)bytes, (void)access, (void)n;
    return begin(ANY);
}

/* ---- devices ----------------------------------------------------------------------------------------------------- */

static void open_page(void) {
    Dl_info self;
    char path[4096];
    if (!dladdr((void *)(uintptr_t)open_page, &self)) abort();
    snprintf(path, sizeof path, "%s.control", self.dli_fname);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) abort();
    words = mmap(NULL, WORDS * sizeof *words, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    space = mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    space += (2u << 20) - (uintptr_t)space % (2u << 20);
    if (words == MAP_FAILED || space == MAP_FAILED) abort();
}

CUresult cuDriverGetVersion(int *version) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_page);
    *version = (int)words[VERSION];
    return SUCCESS;
}

CUresult cuInit(unsigned flags) {
    (void)flags;
    if (!row && words[DEVICES]) take_row();
    return words[DEVICES] ? (CUresult)words[LOST] : NO_DEVICE;
}

CUresult cuDeviceGetCount(int *count) { return *count = (int)words[DEVICES], SUCCESS; }
CUresult cuDeviceGet(int *device, int ordinal) { return *device = ordinal, SUCCESS; }
CUresult cuDeviceGetName(char *name, int room, int device) { return snprintf(name, (size_t)room, "Fake %d", device), SUCCESS; }
CUresult cuDeviceGetUuid_v2(char *uuid, int device) { return memset(uuid, 0xA0 + device, 16), SUCCESS; }
CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = words[TOTAL], SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 113 ? !words[NO_READ_ONLY] : attribute == 40 ? 2 : attribute == 75 ? 9 : 0;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return (void)device, (void)flags, SUCCESS; }

CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    atomic_fetch_add(&words[CALLS_AT + CONTEXT], 1);
    if (words[LOST]) return (CUresult)words[LOST];
    *context = (void *)(uintptr_t)(device + 1);
    if (!row[3]) row[3] = 1;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, SUCCESS; }
CUresult cuCtxGetCurrent(uintptr_t *context) { return *context = current(), SUCCESS; }

CUresult cuCtxPushCurrent_v2(uintptr_t context) {
    if (n_contexts == 8) abort();
    return contexts[n_contexts++] = context, SUCCESS;
}

CUresult cuCtxPopCurrent_v2(uintptr_t *context) {
    if (!n_contexts) return INVALID_CONTEXT;
    return *context = contexts[--n_contexts], SUCCESS;
}

CUresult cuCtxSetCurrent(uintptr_t context) {
    n_contexts -= !!n_contexts;
    return context ? cuCtxPushCurrent_v2(context) : SUCCESS;
}

CUresult cuCtxSynchronize(void) { return begin(SYNCHRONIZE); }

CUresult cuGetErrorName(CUresult code, const char **name) {
    static const struct { CUresult code; const char *name; } NAMES[] = {
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"}, {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"}, {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
        {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
        {801, "CUDA_ERROR_NOT_SUPPORTED"}, {UNKNOWN, "CUDA_ERROR_UNKNOWN"}};
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (NAMES[i].code == code) return *name = NAMES[i].name, SUCCESS;
    return INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char **text) { return *text = "told by the fake", code ? SUCCESS : INVALID_VALUE; }
