/* Put before a C source of ours (-include), makes every access to shared memory a point where the scheduler of
 * schedules.c may run the other side. The accesses themselves stay sequentially consistent, so what is explored is the
 * protocol, not the memory orders. */
#ifndef SCHEDULED_H
#define SCHEDULED_H
#define _GNU_SOURCE

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

void step_before(const volatile void *word); /* the running side is about to touch this word */
int step_aside(void);                        /* the running side has nothing to do until another one moved */

#if defined(__clang__)
#define RAW_LOAD(p) __c11_atomic_load(p, __ATOMIC_SEQ_CST)
#define RAW_STORE(p, v) __c11_atomic_store(p, v, __ATOMIC_SEQ_CST)
#define RAW_EXCHANGE(p, v) __c11_atomic_exchange(p, v, __ATOMIC_SEQ_CST)
#define RAW_FETCH(op, p, v) __c11_atomic_fetch_##op(p, v, __ATOMIC_SEQ_CST)
#else
#define RAW_LOAD(p) __atomic_load_n(p, __ATOMIC_SEQ_CST)
#define RAW_STORE(p, v) __atomic_store_n(p, v, __ATOMIC_SEQ_CST)
#define RAW_EXCHANGE(p, v) __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST)
#define RAW_FETCH(op, p, v) __atomic_fetch_##op(p, v, __ATOMIC_SEQ_CST)
#endif

#undef atomic_load
#undef atomic_load_explicit
#undef atomic_store
#undef atomic_store_explicit
#undef atomic_exchange
#undef atomic_exchange_explicit
#undef atomic_fetch_add
#undef atomic_fetch_or
#define atomic_load(p) (step_before(p), RAW_LOAD(p))
#define atomic_load_explicit(p, order) atomic_load(p)
#define atomic_store(p, v) (step_before(p), RAW_STORE(p, v))
#define atomic_store_explicit(p, v, order) atomic_store(p, v)
#define atomic_exchange(p, v) (step_before(p), RAW_EXCHANGE(p, v))
#define atomic_exchange_explicit(p, v, order) atomic_exchange(p, v)
#define atomic_fetch_add(p, v) (step_before(p), RAW_FETCH(add, p, v))
#define atomic_fetch_or(p, v) (step_before(p), RAW_FETCH(or, p, v))
#define sched_yield step_aside

#endif
