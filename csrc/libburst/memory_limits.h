/* Not exported. */
#ifndef LIBBURST_MEMORY_LIMITS_H
#define LIBBURST_MEMORY_LIMITS_H

#include <stdint.h>

uint64_t memory_left(void); /* bytes, by what the machine and the control groups say */

#endif
