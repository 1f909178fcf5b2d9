/* Prints what processors.c finds out about the machine whose files lie under a folder: machine FOLDER MINE THEIRS [SECONDS].
 * With SECONDS it looks a second time, so much later, once a line has been read. */
#include "fmq/processors.h"

#include <stdio.h>
#include <stdlib.h>

static struct fmq_processors found;

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    uint32_t mine = (uint32_t)atoi(argv[2]), theirs = (uint32_t)atoi(argv[3]);
    uint64_t now = UINT64_C(1000000000000), later = argc > 4 ? strtoull(argv[4], NULL, 10) * UINT64_C(1000000000) : 0;
    for (int looks = 0; looks < (later ? 2 : 1); looks++, now += later) {
        if (looks && getchar() == EOF) return 3;
        processors_look_under(argv[1], &found, now, mine, theirs);
        printf("most %llu usable %u siblings %d quota %s\n", (unsigned long long)found.most_ns, (unsigned)found.usable,
               (int)processors_are_siblings(&found, mine, theirs), found.quota);
        fflush(stdout);
    }
    return 0;
}
