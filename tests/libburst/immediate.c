/* Counts what a thread calls in rounds of burst_try_submit and burst_poll: allocations and locks by functions that stand before
 * the C library's here, system calls by a filter (seccomp) of that thread. Of these it lets pass the wake of a device that sleeps,
 * which is counted, and the clock, which is none where the kernel maps it.
 *
 *     immediate now|submit ROUNDS
 */
#define _GNU_SOURCE
#include <burst.h>

#include <dlfcn.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Thread_local int is_counted;
static int allocations, locks, wakes;
static volatile sig_atomic_t calls;

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void __libc_free(void *);

void *malloc(size_t n) { return allocations += is_counted, __libc_malloc(n); }
void *calloc(size_t n, size_t each) { return allocations += is_counted, __libc_calloc(n, each); }
void *realloc(void *at, size_t n) { return allocations += is_counted, __libc_realloc(at, n); }
void free(void *at) { allocations += is_counted, __libc_free(at); }

static int (*mutex_lock)(pthread_mutex_t *);
static int (*read_lock)(pthread_rwlock_t *);
static long (*call)(long, ...);

__attribute__((constructor)) static void find(void) {
    *(void **)&mutex_lock = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    *(void **)&read_lock = dlsym(RTLD_NEXT, "pthread_rwlock_rdlock");
    *(void **)&call = dlsym(RTLD_NEXT, "syscall");
}

int pthread_mutex_lock(pthread_mutex_t *lock) { return locks += is_counted, mutex_lock(lock); }
int pthread_rwlock_rdlock(pthread_rwlock_t *lock) { return locks += is_counted, read_lock(lock); }

long syscall(long number, ...) {
    long given[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) given[i] = va_arg(arguments, long);
    va_end(arguments);
    wakes += is_counted && number == SYS_futex;
    return call(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

static void on_call(int number) { (void)number, calls++; }

/* All system calls of this thread but a few are counted, and not made. */
static void confine(void) {
#define ALLOW(name) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOW(write), ALLOW(exit_group), ALLOW(rt_sigreturn), ALLOW(clock_gettime), ALLOW(getcpu),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_futex, 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, FUTEX_CMD_MASK),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, FUTEX_WAKE_BITSET, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
    };
    struct sock_fprog program = {sizeof steps / sizeof *steps, steps};
    struct sigaction action = {.sa_handler = on_call};
    sigaction(SIGSYS, &action, NULL);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) _exit(3);
}

static void check(int result) {
    if (!result) return;
    is_counted = 0;
    dprintf(2, "%d: %s\n", result, burst_why());
    _exit(1);
}

static burst_controller *burst;
static burst_request *request;

static void make(void) {
    static const uint32_t shape[] = {4}, x[] = {0}, y[] = {1};
    const burst_options options = {.size = sizeof options, .spin = 5000000000};
    burst_client *device;
    burst_builder *model;
    burst_compiled *compiled;
    burst_pool *pool;
    void *memory;
    check(burst_connect("reference", &device));
    check(burst_builder_new(&model));
    burst_builder_operand(model, BURST_FLOAT32_TENSOR, 1, shape, 0, 0);
    burst_builder_operand(model, BURST_FLOAT32_TENSOR, 1, shape, 0, 0);
    check(burst_builder_operation(model, "NEG", 1, x, 1, y));
    check(burst_builder_finish(model, 1, x, 1, y));
    check(burst_prepare(device, model, BURST_FOREVER, &compiled));
    check(burst_open(compiled, &options, &burst));
    check(burst_pool_new(32, &pool, &memory));
    const burst_tensor in = {.pool = pool, .length = 16}, out = {.pool = pool, .offset = 16, .length = 16};
    check(burst_request_new(burst, 1, &in, 1, &out, &request));
}

static void go_round(int is_now) {
    burst_outcome outcome;
    int r;
    check((is_now ? burst_try_submit : burst_submit)(burst, request, BURST_FOREVER, NULL));
    while ((r = burst_poll(burst, &outcome)) == -EAGAIN) {}
    check(r);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    int is_now = !strcmp(argv[1], "now"), rounds = atoi(argv[2]);
    make();
    for (int i = 0; i < 50; i++) go_round(1);
    confine();
    is_counted = 1;
    for (int i = 0; i < rounds; i++) go_round(is_now);
    is_counted = 0;
    char text[128];
    int n = snprintf(text, sizeof text, "%d %d %d %d\n", allocations, locks, (int)calls, wakes);
    if (write(1, text, (size_t)n) != n) _exit(4);
    _exit(0);
}
