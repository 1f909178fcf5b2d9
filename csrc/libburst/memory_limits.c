/* How much memory is left: what a pool takes is taken when it is made, and too much would end processes of others. */
#include "libburst/memory_limits.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_TEXT = 16384 };

static bool read_text(const char *path, char *text) {
    FILE *file = fopen(path, "re");
    if (!file) return false;
    size_t n = fread(text, 1, MOST_TEXT - 1, file);
    fclose(file);
    text[n] = 0;
    return n > 0;
}

/* The number after a word at the beginning of a line; 0: there is none. */
static uint64_t figure(const char *text, const char *word) {
    for (const char *at = text; at; at = strchr(at, '\n')) {
        at += *at == '\n';
        if (!strncmp(at, word, strlen(word))) return strtoull(at + strlen(word), NULL, 10);
    }
    return 0;
}

static uint64_t left_by_machine(char *text) {
    if (!read_text("/proc/meminfo", text)) return UINT64_MAX;
    uint64_t available = figure(text, "MemAvailable:") + figure(text, "SwapFree:");
    return available ? 1024 * available : UINT64_MAX;
}

/* Pages of files that are not in use are taken back when they are needed, so they count as free. */
static uint64_t left_by_group(const char *group, char *text) {
    char path[600];
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.max", group);
    if (!read_text(path, text) || *text == 'm') return UINT64_MAX;
    uint64_t most = strtoull(text, NULL, 10);
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.current", group);
    if (!read_text(path, text)) return UINT64_MAX;
    uint64_t used = strtoull(text, NULL, 10);
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.stat", group);
    if (read_text(path, text)) most += figure(text, "inactive_file ");
    return most > used ? most - used : 0;
}

/* Of this process's group and all above it (version 2). */
static uint64_t left_by_groups(char *text) {
    char group[512] = "";
    if (!read_text("/proc/self/cgroup", text)) return UINT64_MAX;
    const char *found = strncmp(text, "0::", 3) ? strstr(text, "\n0::") : text;
    if (!found) return UINT64_MAX;
    found = strchr(found, '/');
    if (found) snprintf(group, sizeof group, "%.*s", (int)strcspn(found, "\n"), found);
    uint64_t least = UINT64_MAX;
    for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
        *end = 0;
        uint64_t left = left_by_group(group, text);
        if (left < least) least = left;
    }
    return least;
}

uint64_t memory_left(void) {
    char *text = malloc(MOST_TEXT);
    if (!text) return 0;
    uint64_t machine = left_by_machine(text), groups = left_by_groups(text);
    free(text);
    return machine < groups ? machine : groups;
}
