/* Finding a device, or having it started; calls to it. docs/protocol.md, sections 1 to 4. */
#define _GNU_SOURCE
#include "libburst/plain.h"

#include "fmq/api.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <pwd.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static const uint64_t SECOND = 1000000000;
static const char FAST[] = "fast_single_answer";
enum { MEDIUM = 1, START_S = 60, WITHIN_S = 10, TRIES = 3 };

uint64_t burst_now(void) { return fmq_now(); }

/* ---- where a device is ----------------------------------------------------------------------- */

static bool is_ours(const char *folder) {
    struct stat s;
    return !lstat(folder, &s) && S_ISDIR(s.st_mode) && s.st_uid == getuid() && !(s.st_mode & 077);
}

/* The folder of the sockets: as all programs of this account choose it. */
static int find_folder(char *folder, size_t room) {
    const char *own = getenv("BURST_RUNTIME_DIR"), *session = getenv("XDG_RUNTIME_DIR"),
               *home = getenv("HOME");
    struct passwd *account = getpwuid(getuid());
    char host[65] = "";
    struct stat s;
    if (own && *own) return snprintf(folder, room, "%s", own), 0;
    if (session && !stat(session, &s) && s.st_uid == getuid()) {
        snprintf(folder, room, "%s/burst", session);
        if (is_ours(folder)) return 0;
    }
    gethostname(host, sizeof host - 1);
    snprintf(folder, room, "%s/.cache/burst/run-%s",
             account ? account->pw_dir
             : home  ? home
                     : "/",
             host);
    if (is_ours(folder)) return 0;
    snprintf(folder, room, "/var/tmp/burst-%u", getuid());
    if (is_ours(folder)) return 0;
    snprintf(folder, room, "/tmp/burst-%u", getuid());
    return is_ours(folder)
               ? 0
               : fail(-ENOENT,
                      "no device has run yet: there is no folder %s of mode 0700 that is yours",
                      folder);
}

static int socket_of(const char *name, char *path) {
    char folder[256], file[64];
    int r = find_folder(folder, sizeof folder), n = 0;
    if (r) return r;
    if (access(folder, F_OK) && errno == ENOENT) /* the Python that starts the device makes it */
        return fail(-ENOENT, "no device has run yet: there is no folder %s", folder);
    if (!is_ours(folder))
        return fail(-EACCES,
                    "%s is no folder of mode 0700 that is yours; remove it or change its mode",
                    folder);
    for (; name[n] && n < (int)sizeof file - 1; n++) {
        bool is_plain = (name[n] >= '0' && name[n] <= '9') || (name[n] >= 'A' && name[n] <= 'Z') ||
                        (name[n] >= 'a' && name[n] <= 'z');
        file[n] = is_plain || strchr("_.-", name[n]) ? name[n] : '_';
    }
    file[n] = 0;
    if (name[n] || snprintf(path, MOST_PATH, "%s/%s.sock", folder, file) >= MOST_PATH)
        return fail(-ENAMETOOLONG, "%s/%s.sock: a socket's path has at most %d bytes", folder, name,
                    MOST_PATH - 1);
    return 0;
}

/* A socket by its path alone: the folder says whose it is, and no other account may be able to put
 * another one there. */
static int check_folders(const char *path, uid_t *owner) {
    char rest[MOST_PATH], *at = rest;
    struct stat s;
    snprintf(rest, sizeof rest, "%s", path);
    at = dirname(rest);
    if (stat(at, &s)) return fail_kernel(at);
    *owner = s.st_uid;
    for (;;) {
        bool is_shared = s.st_mode & 022 && !(s.st_mode & S_ISVTX);
        if (is_shared && s.st_mode & 002)
            return fail(-EACCES, "every account may write to %s; a device there cannot be trusted",
                        at);
        if (s.st_uid && s.st_uid != *owner)
            return fail(-EACCES, "%s belongs to another account than the device", at);
        if (!strcmp(at, "/") || !strcmp(at, ".")) return 0;
        at = dirname(at);
        if (stat(at, &s)) return fail_kernel(at);
    }
}

static int connect_socket(const char *path, uid_t owner, int *out) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    struct timeval patience = {5, 0};
    struct ucred peer;
    socklen_t size = sizeof peer;
    snprintf(at.sun_path, sizeof at.sun_path, "%s", path);
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s < 0) return fail_kernel("socket");
    setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    int r = connect(s, (struct sockaddr *)&at, sizeof at) ? -errno : 0;
    if (r) fail(r, "no device at %s: %s", path, strerror(-r));
    else if (getsockopt(s, SOL_SOCKET, SO_PEERCRED, &peer, &size)) r = fail_kernel("SO_PEERCRED");
    else if (peer.uid != owner)
        r = fail(-EACCES, "the device at %s runs under uid %u, and the socket is of uid %u", path,
                 peer.uid, owner);
    if (r) return close(s), r;
    return *out = s, 0;
}

/* A device stays two seconds without clients: the one that starts it may leave. */
static int start_device(const char *name) {
    char code[] = "import sys\n"
                  "try:\n"
                  "    import driver\n"
                  "    driver.connect(sys.argv[1])\n"
                  "except Exception as error:\n"
                  "    sys.exit(f'burst: {error}')\n";
    char flag[] = "-c", given[256];
    const char *python = getenv("BURST_PYTHON");
    if (!python || !*python) python = "python3";
    snprintf(given, sizeof given, "%s", name);
    char program[256], *arguments[] = {program, flag, code, given, NULL};
    snprintf(program, sizeof program, "%s", python);
    pid_t pid;
    int status = 0, r = posix_spawnp(&pid, python, NULL, NULL, arguments, environ);
    if (r)
        return fail(-r,
                    "device '%s' is not there, and %s cannot be started (%s): set BURST_PYTHON to "
                    "the Python that has Burst",
                    name, python, strerror(r));
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    if (!WIFEXITED(status) || WEXITSTATUS(status))
        return fail(-ENOENT,
                    "device '%s' is not there, and %s could not start it; its complaint is above",
                    name, python);
    return 0;
}

static int find_device(client *c, int *socket) {
    char path[MOST_PATH];
    uid_t owner = getuid();
    int r;
    if (!c->is_named) {
        snprintf(path, sizeof path, "%.*s", MOST_PATH - 1, c->place);
        r = check_folders(path, &owner);
        return r ? r : connect_socket(path, owner, socket);
    }
    r = socket_of(c->place, path);
    if (!r) r = connect_socket(path, owner, socket);
    if (r != -ENOENT && r != -ECONNREFUSED) return r;
    if ((r = start_device(c->place)) || (r = socket_of(c->place, path))) return r;
    return connect_socket(path, owner, socket);
}

/* ---- calls ----------------------------------------------------------------------------------- */

message *client_begin(client *c, const char *method, uint32_t arguments) {
    message_reset(&c->m);
    put_array(&c->m, 2 + arguments);
    put_int(&c->m, ++c->number);
    put_text(&c->m, method);
    return &c->m;
}

static int lose(client *c, int code) {
    shutdown(c->socket, SHUT_RDWR);
    return code;
}

/* [number, 0, values...], or [number, status, text, ...]. 1: of an earlier call. */
static int read_answer(client *c, int64_t *values, int *result) {
    int64_t n, number, status;
    char text[400];
    if (!take_as(&c->m, ARRAY, &n) || n < 2 || !take_as(&c->m, INTEGER, &number))
        return fail(-EBADMSG, "an answer that is none");
    if (number == -1 && take_text(&c->m, text, sizeof text))
        return fail(-EPIPE, "the device ended: %s", text);
    if (number < c->number) return 1;
    if (number > c->number || !take_as(&c->m, INTEGER, &status) || status < 0 ||
        status > BURST_RESOURCE_EXHAUSTED_PERSISTENT)
        return fail(-EBADMSG, "an answer to another call, or with a status that is none");
    *values = n - 2, *result = (int)status;
    if (!status) return 0;
    if (n < 3 || !take_text(&c->m, text, sizeof text))
        return fail(-EBADMSG, "a refusal without a reason");
    return fail((int)status, "the device refuses: %s", text), 0;
}

bool client_is_foreign(const client *c) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    return !getsockopt(c->socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) && peer.uid != getuid();
}

int client_call(client *c, uint64_t deadline, int64_t *values) {
    if (c->socket < 0) return fail(-EPIPE, "the connection is gone");
    int r = message_send(c->socket, &c->m), result = 0;
    bool is_gone = r == -EPIPE;
    if (is_gone) r = 0, deadline = 0; /* it may have said why */
    while (!r) {
        r = message_receive(c->socket, &c->m, deadline);
        if (r && is_gone) return fail(-EPIPE, "the connection is gone");
        if (r) break;
        r = read_answer(c, values, &result);
        if (!r && !result) return 0;
        message_close_fds(&c->m);
        if (!r) return result;
        if (r == 1) r = 0;
    }
    return r == -EBADMSG ? lose(c, r) : r;
}

void client_tell(client *c, const char *method, int64_t number) {
    int64_t values;
    put_int(client_begin(c, method, 1), number);
    if (!client_call(c, burst_now() + SECOND, &values)) message_close_fds(&c->m);
}

int life_page(message *m, void **life) {
    struct stat s;
    int seals = m->n_fds == 1 ? fcntl(m->fds[0], F_GET_SEALS) : -1, r;
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(m->fds[0], &s) || s.st_size < PAGE)
        r = fail(-EBADMSG,
                 "the life page that came with an answer is missing, not sealed, or too small");
    else if ((r = fmq_map(m->fds[0], PAGE, 0, life)))
        fail(r, "the device's life page cannot be mapped");
    message_close_fds(m);
    return r;
}

/* ---- lives ----------------------------------------------------------------------------------- */

static void let_go(client *c) {
    if (c->socket < 0) return;
    fmq_unhang(c->watch);
    if (c->life) fmq_unmap(c->life, PAGE);
    shutdown(c->socket, SHUT_RDWR); /* a child of a fork may hold a copy */
    close(c->socket);
    c->socket = -1, c->life = NULL, c->watch = 0;
}

static int greet(client *c) {
    int64_t values;
    put_int(client_begin(c, "hello", 1), PROTOCOL);
    int r = client_call(c, burst_now() + START_S * SECOND, &values);
    if (r) return r;
    if ((r = life_page(&c->m, &c->life))) return r;
    if (values < 8) return fail(-EBADMSG, "hello was answered with %lld values", (long long)values);
    c->watch = fmq_watch(c->life, c->socket);
    return c->watch < 0 ? fail((int)c->watch, "the device's life cannot be watched") : 0;
}

/* A device that is just leaving ends the connection before it answers; then another one is
 * started. */
static int begin(client *c) {
    int r = -EPIPE;
    for (int tries = TRIES; r == -EPIPE && tries; tries--) {
        let_go(c);
        r = find_device(c, &c->socket);
        if (!r) r = greet(c);
        if (r) let_go(c);
    }
    if (!r) c->epoch++;
    return r;
}

int client_revive(client *c, uint64_t epoch) {
    pthread_mutex_lock(&c->lock);
    int r = 0;
    if (c->epoch == epoch || c->socket < 0) {
        uint64_t now = burst_now(), *oldest = &c->lives[c->epoch % MOST_LIVES];
        if (*oldest && now - *oldest < WITHIN_S * SECOND)
            r = fail(-EPIPE, "device '%s' died %d times within %d s; see its log", c->place,
                     MOST_LIVES, WITHIN_S);
        else *oldest = now, r = begin(c);
    }
    pthread_mutex_unlock(&c->lock);
    return r;
}

static void destroy(object *o) {
    client *c = (client *)o;
    if (o->generation == handle_generation()) plain_free(c->plain), let_go(c);
    message_free(&c->m);
    pthread_mutex_destroy(&c->lock);
    pthread_mutex_destroy(&c->executing);
    free(c);
}

static int new_client(const char *place, bool is_named, burst_client **out) {
    if (!place || !out) return fail(-EINVAL, "NULL where a device, and room for a client, are due");
    client *c = calloc(1, sizeof *c);
    if (!c) return fail(-ENOMEM, "no memory for a client");
    c->socket = -1, c->is_named = is_named, c->priority = MEDIUM, c->preference = FAST;
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->executing, NULL);
    int r = snprintf(c->place, is_named ? sizeof c->place : MOST_PATH, "%s", place);
    r = r >= (is_named ? 64 : MOST_PATH)
            ? fail(-ENAMETOOLONG, "%.40s...: a name has at most 63 bytes, a path %d", place,
                   MOST_PATH - 1)
            : begin(c);
    if (!r && !(r = handle_new(&c->head, CLIENT, destroy, out))) return 0;
    let_go(c);
    message_free(&c->m);
    free(c);
    return r;
}

int burst_connect(const char *name, burst_client **client) {
    return new_client(name, true, client);
}

int burst_connect_path(const char *path, burst_client **client) {
    return new_client(path, false, client);
}

int burst_prefer(burst_client *handle, int priority, int preference) {
    static const char *const words[] = {FAST, "low_power", "sustained_speed"};
    int r;
    if (priority < BURST_PRIORITY_LOW || priority > BURST_PRIORITY_HIGH || priority % 10)
        return fail(-EINVAL, "priority %d: %d, %d and %d are low, medium and high", priority,
                    BURST_PRIORITY_LOW, BURST_PRIORITY_MEDIUM, BURST_PRIORITY_HIGH);
    if (preference < 0 || preference > BURST_SUSTAINED_SPEED)
        return fail(-EINVAL, "preference %d: 0 to %d", preference, BURST_SUSTAINED_SPEED);
    client *c = handle_take(handle, CLIENT, &r);
    if (!c) return r;
    pthread_mutex_lock(&c->lock);
    c->priority = (priority - BURST_PRIORITY_LOW) / 10, c->preference = words[preference];
    pthread_mutex_unlock(&c->lock);
    object_put(c);
    return 0;
}

int burst_disconnect(burst_client *handle) {
    void *c;
    int r = handle_close(handle, CLIENT, &c);
    if (!r) object_put(c);
    return r;
}
