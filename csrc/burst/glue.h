/* What the generated glue needs above it; the other half of api.h. */
#include <stdint.h>

#include "burst/api.h"
