/* A libnvidia-ml.so.1 for machines without a GPU: what `burst top` asks of NVML, with figures from the environment.
 *
 * FAKE_NVML_ERROR   what nvmlInit returns, and then every question; 0: success
 * FAKE_NVML_USERS   "pid:bytes,pid:bytes": the processes on GPU 0
 * GPU 0 tells everything. GPU 1 has a name and memory, and supports no other question, as under MIG. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };

struct memory { unsigned long long total, free, used; };
struct utilisation { unsigned gpu, memory; };
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

static char gpus[2];

static int error(void) {
    const char *word = getenv("FAKE_NVML_ERROR");
    return word ? atoi(word) : SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return error(); }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "an error"; }

int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "580.42");
    return error();
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = sizeof gpus;
    return error();
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
    *gpu = &gpus[index];
    return error();
}

int nvmlDeviceGetName(void *gpu, char *text, unsigned length) {
    snprintf(text, length, "Fake GPU %d\033", (int)((char *)gpu - gpus));
    return error();
}

int nvmlDeviceGetMemoryInfo(void *gpu, struct memory *memory) {
    (void)gpu;
    *memory = (struct memory){8000000000ULL, 6500000000ULL, 1500000000ULL};
    return error();
}

int nvmlDeviceGetUtilizationRates(void *gpu, struct utilisation *rates) {
    if (gpu != gpus)
        return NOT_SUPPORTED;
    *rates = (struct utilisation){37, 12};
    return error();
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, struct process *processes) {
    const char *users = getenv("FAKE_NVML_USERS");
    unsigned room = *count, found = 0;
    if (gpu != gpus)
        return NOT_SUPPORTED;
    for (const char *at = users; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : "") {
        struct process one = {0};
        if (sscanf(at, "%u:%llu", &one.pid, &one.used) == 2 && found++ < room)
            processes[found - 1] = one;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : error();
}
