/* How much memory is left: what a pool takes is taken when it is made, and too much would end
 * processes of others. */
#define _GNU_SOURCE
#include "libburst/memory_limits.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

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

/* What a group's file says, under its name in version 2 of control groups or in version 1;
 * UINT64_MAX: no limit. */
static uint64_t group_figure(const char *group, const char *name, const char *name_1, char *text) {
    char path[700];
    snprintf(path, sizeof path, "%s/%s", group, name);
    if (!read_text(path, text)) {
        snprintf(path, sizeof path, "%s/%s", group, name_1);
        if (!read_text(path, text)) return UINT64_MAX;
    }
    uint64_t found = *text == 'm' ? UINT64_MAX : strtoull(text, NULL, 10);
    return found >> 62 ? UINT64_MAX : found;
}

/* Pages of files that are not in use are taken back when they are needed, so they count as free. */
static uint64_t left_by_group(const char *group, char *text) {
    uint64_t most = group_figure(group, "memory.max", "memory.limit_in_bytes", text);
    uint64_t used = most == UINT64_MAX
                        ? most
                        : group_figure(group, "memory.current", "memory.usage_in_bytes", text);
    if (used == UINT64_MAX) return UINT64_MAX;
    char path[700];
    snprintf(path, sizeof path, "%s/memory.stat", group);
    if (read_text(path, text)) {
        uint64_t below = figure(text, "total_inactive_file ");
        most += below ? below : figure(text, "inactive_file ");
    }
    return most > used ? most - used : 0;
}

/* Of the group with this path and all above it that lie below `top`. In a container its path may
 * begin above that. */
static uint64_t left_below(const char *top, const char *path, char *text) {
    char group[600];
    struct stat there;
    do snprintf(group, sizeof group, "%s%s", top, path);
    while (stat(group, &there) && *path &&
           (path = strchr(path + 1, '/') ? strchr(path + 1, '/') : ""));
    uint64_t least = UINT64_MAX;
    for (char *end = group + strlen(group); end && end >= group + strlen(top);
         end = strrchr(group, '/')) {
        *end = 0;
        uint64_t left = left_by_group(group, text);
        if (left < least) least = left;
    }
    return least;
}

/* Of this process's groups of either version, and all above them. */
static uint64_t left_by_groups(char *text) {
    char rows[4096], *rest = rows;
    if (!read_text("/proc/self/cgroup", text)) return UINT64_MAX;
    snprintf(rows, sizeof rows, "%s", text);
    uint64_t least = UINT64_MAX;
    for (char *row; (row = strsep(&rest, "\n"));) {
        strsep(&row, ":");
        const char *names = strsep(&row, ":"), *path = row ? row : "", *tops[] = {NULL, NULL};
        if (names && !*names) tops[0] = "/sys/fs/cgroup", tops[1] = "/sys/fs/cgroup/unified";
        else if (names && strstr(names, "memory")) tops[0] = "/sys/fs/cgroup/memory";
        for (int i = 0; i < 2 && tops[i]; i++) {
            uint64_t left = left_below(tops[i], strcmp(path, "/") ? path : "", text);
            if (left < least) least = left;
        }
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
