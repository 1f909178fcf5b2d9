/* A driver of Vulkan that fails when it is told to: everything else goes to another driver, whose path is in the file
 * `driver` beside this library. The file `fault`, beside it too, says what happens to which process: "lost 123": the GPU
 * falls off its bus; "memory 123": there is no more; "hang 123": work never ends. It is read before each submission and
 * allocation. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef void (*function)(void);
typedef function (*lookup)(void *owner, const char *name);

enum { VK_NOT_READY = 1, VK_TIMEOUT = 2, VK_ERROR_OUT_OF_DEVICE_MEMORY = -2, VK_ERROR_DEVICE_LOST = -4, VK_ERROR_INITIALIZATION_FAILED = -3 };

static lookup of_instance, of_device;
static int (*submit)(void *queue, uint32_t count, const void *infos, void *fence);
static int (*submit2)(void *queue, uint32_t count, const void *infos, void *fence);
static int (*wait_for)(void *device, uint32_t count, const void *fences, uint32_t all, uint64_t timeout);
static int (*status)(void *device, uint64_t fence);
static int (*allocate)(void *device, const void *info, const void *allocator, void *memory);

static void beside(const char *name, char *text, size_t size) {
    Dl_info info;
    char path[4096] = "";
    text[0] = 0;
    if (!dladdr((void *)beside, &info)) return;
    snprintf(path, sizeof path, "%s", info.dli_fname);
    char *end = strrchr(path, '/');
    if (!end) return;
    snprintf(end + 1, sizeof path - (size_t)(end + 1 - path), "%s", name);
    FILE *file = fopen(path, "r");
    if (!file) return;
    if (!fgets(text, (int)size, file)) text[0] = 0;
    text[strcspn(text, "\n")] = 0;
    fclose(file);
}

static int fault(const char *name) {
    char text[64], wanted[64];
    beside("fault", text, sizeof text);
    snprintf(wanted, sizeof wanted, "%s %d", name, (int)getpid());
    return !strcmp(text, wanted);
}

static int failed(void) { return fault("lost") ? VK_ERROR_DEVICE_LOST : 0; }

static int faulty_submit(void *queue, uint32_t count, const void *infos, void *fence) {
    int code = failed();
    return code ? code : submit(queue, count, infos, fence);
}

static int faulty_submit2(void *queue, uint32_t count, const void *infos, void *fence) {
    int code = failed();
    return code ? code : submit2(queue, count, infos, fence);
}

static int faulty_wait(void *device, uint32_t count, const void *fences, uint32_t all, uint64_t timeout) {
    if (!fault("hang")) return wait_for(device, count, fences, all, timeout);
    usleep(timeout < 1000000 ? 1 : 1000);
    return timeout == UINT64_MAX ? faulty_wait(device, count, fences, all, timeout) : VK_TIMEOUT;
}

static int faulty_status(void *device, uint64_t fence) {
    if (!fault("hang")) return status(device, fence);
    usleep(100);
    return VK_NOT_READY;
}

static int faulty_allocate(void *device, const void *info, const void *allocator, void *memory) {
    return fault("memory") ? VK_ERROR_OUT_OF_DEVICE_MEMORY : allocate(device, info, allocator, memory);
}

static function found(lookup in, void *owner, const char *name);

static function device_function(void *device, const char *name) { return found(of_device, device, name); }

static function found(lookup in, void *owner, const char *name) {
    function real = in(owner, name);
    if (!real) return real;
    if (!strcmp(name, "vkGetDeviceProcAddr")) {
        of_device = (lookup)real;
        return (function)device_function;
    }
    if (!strcmp(name, "vkQueueSubmit")) {
        submit = (int (*)(void *, uint32_t, const void *, void *))real;
        return (function)faulty_submit;
    }
    if (!strncmp(name, "vkQueueSubmit2", 14)) {
        submit2 = (int (*)(void *, uint32_t, const void *, void *))real;
        return (function)faulty_submit2;
    }
    if (!strcmp(name, "vkWaitForFences")) {
        wait_for = (int (*)(void *, uint32_t, const void *, uint32_t, uint64_t))real;
        return (function)faulty_wait;
    }
    if (!strcmp(name, "vkGetFenceStatus")) {
        status = (int (*)(void *, uint64_t))real;
        return (function)faulty_status;
    }
    if (!strcmp(name, "vkAllocateMemory")) {
        allocate = (int (*)(void *, const void *, const void *, void *))real;
        return (function)faulty_allocate;
    }
    return real;
}

static void *other(void) {
    static void *library;
    char path[4096];
    if (!library) {
        beside("driver", path, sizeof path);
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return library;
}

int vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
    int (*real)(uint32_t *) = other() ? (int (*)(uint32_t *))dlsym(other(), "vk_icdNegotiateLoaderICDInterfaceVersion") : 0;
    return real ? real(version) : VK_ERROR_INITIALIZATION_FAILED;
}

function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
    if (!other()) return 0;
    of_instance = (lookup)dlsym(other(), "vk_icdGetInstanceProcAddr");
    return of_instance ? found(of_instance, instance, name) : 0;
}

function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
    lookup real = other() ? (lookup)dlsym(other(), "vk_icdGetPhysicalDeviceProcAddr") : 0;
    return real ? real(instance, name) : 0;
}
