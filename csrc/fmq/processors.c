/* Looks at what polling meets: how many processors this process may use, which of them are threads
 * of one core, and whether a control group's quota pays for the time.
 *
 * Under a quota of less than two processors, or in a group that was throttled a moment ago,
 * whatever one side polls away the other side lacks. A wait then polls for about as long as a sleep
 * and a wake-up would cost, which is never more than twice the least that it could have cost. Not
 * polling at all would be worse: an exchange of 2 us costs less than one sleep.
 *
 * Files are read by the first wait of a process that polls for more than a microsecond, and then
 * seldom.
 */
#define _GNU_SOURCE
#include "fmq/processors.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const uint64_t SECOND = UINT64_C(1000000000);
static const uint64_t SEARCH_AGAIN = UINT64_C(10000000000);
/* ns: a sleep and a wake-up, as the processor counts them. */
static const uint64_t THRIFTY = 5000;
/* Thousandths of a processor: both sides of a queue can run all the time. */
static const uint64_t FOR_TWO = 2000;

enum { TEXT = 1024 };

/* The beginning of a file, as a string. */
static bool read_text(const char *path, char *text) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, TEXT - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    return n > 0;
}

static bool read_in(const char *directory, const char *name, char *text) {
    char path[PROCESSORS_PATH + 64];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return read_text(path, text);
}

/* ---- processors ------------------------------------------------------------------------------ */

static void count_usable(struct fmq_processors *p) {
    unsigned long mask[PROCESSORS_MOST * 8 / 8 / sizeof(unsigned long)] = {0}; /* 8192 processors */
    int found = sched_getaffinity(0, sizeof mask, (cpu_set_t *)mask)
                    ? 0
                    : CPU_COUNT_S(sizeof mask, (cpu_set_t *)mask);
    atomic_store(&p->usable, (uint32_t)found);
}

static void look_up_core(const char *root, struct fmq_processors *p, uint32_t cpu) {
    char path[PROCESSORS_PATH], text[TEXT];
    if (!cpu || cpu > PROCESSORS_MOST || processors_core(p, cpu)) return;
    snprintf(path, sizeof path, "%s/sys/devices/system/cpu/cpu%u/topology/thread_siblings_list",
             root, cpu - 1);
    unsigned long first = read_text(path, text) ? strtoul(text, NULL, 10) : cpu - 1;
    atomic_store(&p->core[cpu], (uint16_t)(first < PROCESSORS_MOST ? first + 1 : cpu));
}

static void find_siblings(const char *root, struct fmq_processors *p) {
    char path[PROCESSORS_PATH], text[TEXT];
    snprintf(path, sizeof path, "%s/sys/devices/system/cpu/smt/active", root);
    atomic_store(&p->has_siblings, read_text(path, text) && text[0] == '1');
}

/* ---- quotas ---------------------------------------------------------------------------------- */

/* In thousandths of a processor; 0: that group has none. Both versions of control groups. */
static uint64_t quota_of(const char *directory) {
    char text[TEXT];
    long long quota = 0, period = 0;
    if (read_in(directory, "cpu.max", text)) {
        if (sscanf(text, "%lld %lld", &quota, &period) != 2) return 0; /* max */
    } else {
        if (!read_in(directory, "cpu.cfs_quota_us", text) || sscanf(text, "%lld", &quota) != 1 ||
            quota <= 0)
            return 0;
        if (!read_in(directory, "cpu.cfs_period_us", text) || sscanf(text, "%lld", &period) != 1)
            return 0;
    }
    return quota > 0 && period > 0 ? (uint64_t)quota * 1000 / (uint64_t)period : 0;
}

static uint64_t throttled(const char *directory) {
    char text[TEXT];
    const char *found = read_in(directory, "cpu.stat", text) ? strstr(text, "nr_throttled ") : NULL;
    return found ? strtoull(found + strlen("nr_throttled "), NULL, 10) : 0;
}

/* The least quota of a group and those above it. In a container a path may begin above what is
 * mounted: such steps have no files. */
static uint64_t search(const char *mount, const char *path, char *where, uint64_t least) {
    char directory[PROCESSORS_PATH];
    int n = snprintf(directory, sizeof directory, "%s%s", mount, path);
    size_t top = strlen(mount), end = n > 0 && n < PROCESSORS_PATH ? (size_t)n : top;
    for (directory[end] = 0; end >= top; directory[end] = 0) {
        uint64_t quota = quota_of(directory);
        if (quota && (!least || quota < least)) {
            least = quota;
            memcpy(where, directory, end + 1);
        }
        if (end == top) break;
        while (end > top && directory[end - 1] != '/') end--;
        if (end > top) end--;
    }
    return least;
}

static bool names_cpu(const char *controllers) {
    const char *found = strstr(controllers, "cpu");
    for (; found; found = strstr(found + 1, "cpu"))
        if ((found == controllers || found[-1] == ',') && (!found[3] || found[3] == ','))
            return true;
    return false;
}

/* Through the lines of /proc/self/cgroup: number:controllers:path, without controllers in version
 * 2. */
static void find_quota(const char *root, struct fmq_processors *p) {
    char path[PROCESSORS_PATH], text[TEXT], where[PROCESSORS_PATH] = "", *rest = NULL;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    uint64_t least = 0;
    for (char *line = read_text(path, text) ? strtok_r(text, "\n", &rest) : NULL; line;
         line = strtok_r(NULL, "\n", &rest)) {
        char *controllers = strchr(line, ':'),
             *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        controllers++;
        if (*controllers && !names_cpu(controllers)) continue;
        snprintf(path, sizeof path, "%s/sys/fs/cgroup%s%s", root, *controllers ? "/" : "",
                 controllers);
        least = search(path, !strcmp(group, "/") ? "" : group, where, least);
    }
    memcpy(p->quota, where, sizeof where);
    p->throttled = *where ? throttled(where) : 0;
    atomic_store(&p->most_ns, least && least < FOR_TWO ? THRIFTY : 0);
}

static void look_at_quota(struct fmq_processors *p) {
    uint64_t quota = quota_of(p->quota), seen = throttled(p->quota);
    bool is_short = (quota && quota < FOR_TWO) || seen > p->throttled;
    p->throttled = seen;
    atomic_store(&p->most_ns, is_short ? THRIFTY : 0);
}

/* ---- both ------------------------------------------------------------------------------------ */

static void look(const char *root, struct fmq_processors *p, uint64_t now, uint32_t mine,
                 uint32_t theirs) {
    uint64_t before = atomic_load(&p->looked);
    if (!before) find_siblings(root, p);
    if (!before || now - before > SECOND) {
        count_usable(p);
        if (!before || now - p->searched > SEARCH_AGAIN) {
            find_quota(root, p);
            p->searched = now;
        } else if (*p->quota) {
            look_at_quota(p);
        }
        atomic_store(&p->looked, now);
    }
    if (!atomic_load(&p->has_siblings)) return;
    look_up_core(root, p, mine);
    look_up_core(root, p, theirs);
}

void processors_look_under(const char *root, struct fmq_processors *p, uint64_t now, uint32_t mine,
                           uint32_t theirs) {
    if (atomic_exchange(&p->is_looking, 1)) return; /* another thread looks already */
    look(root, p, now, mine, theirs);
    atomic_store(&p->is_looking, 0);
}

void processors_look(struct fmq_processors *p, uint64_t now, uint32_t mine, uint32_t theirs) {
    processors_look_under("", p, now, mine, theirs);
}

void processors_forget(struct fmq_processors *p) {
    atomic_store(&p->looked, 0);
    atomic_store(&p->is_looking, 0);
}
