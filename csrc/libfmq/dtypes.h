/* The types of elements, as Python's side writes them into a queue. Not exported. */
#ifndef LIBFMQ_DTYPES_H
#define LIBFMQ_DTYPES_H

#include <stddef.h>
#include <stdint.h>

enum { DTYPE_AT = 1024, DTYPE_ROOM = 40 }; /* where the text lies in a control page */

/* The text of numpy's name, or (NULL) of so many plain bytes; its length, or -EINVAL for a name
 * that is none of that size. */
int dtype_text(const char *dtype, uint32_t element_bytes, char text[DTYPE_ROOM]);
int64_t dtype_size(const char *dtype);           /* bytes, or -EINVAL */
uint64_t dtype_hash(const char *text, size_t n); /* n < 128 */

#endif
