/* The plain path of a connection: executions without a burst. Not exported. */
#ifndef LIBBURST_PLAIN_H
#define LIBBURST_PLAIN_H

#include "libburst/client.h"

typedef struct plain plain;

void plain_free(plain *p); /* NULL: nothing */

#endif
