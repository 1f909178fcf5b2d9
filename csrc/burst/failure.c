/* What failed, in words. */
#define _GNU_SOURCE
#include "burst/failure.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char why[512];

const char *last_failure(void) { return why; }

int fail(int code, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(why, sizeof why, format, values);
    va_end(values);
    return code;
}

int fail_kernel(const char *what) {
    int error = errno;
    return fail(-error, "%s: %s", what, strerror(error));
}
