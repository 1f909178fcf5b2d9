/* What failed, in words: of the last call of each thread that returned an error. Not exported. */
#ifndef BURST_FAILURE_H
#define BURST_FAILURE_H

/* Returns the code. */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
int fail_kernel(const char *what); /* of errno */
const char *last_failure(void);    /* of this thread; "": none */

#endif
