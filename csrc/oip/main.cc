/* burst-oip: the door for gRPC of `burst serve --oip`, which starts it:
 *
 *   burst-oip CONTROL LISTENER BEHIND LIMITS [CERTIFICATE KEY]
 *
 * CONTROL, LISTENER: numbers of descriptors. BEHIND: the path of the socket of Python's door.
 * LIMITS: as `limits::of` has them. It serves until SIGTERM, or until the other side of CONTROL has
 * ended, answers what runs, and exits with 0. SIGINT is left to Python. */
#include "oip/control.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

namespace {

/* A connection takes one, and so does a region. */
void allow_descriptors() {
    rlimit most;
    if (getrlimit(RLIMIT_NOFILE, &most)) return;
    most.rlim_cur = most.rlim_max;
    setrlimit(RLIMIT_NOFILE, &most);
}

enum : unsigned { LONGEST_END = 13 }; /* seconds: more than the door's own grace */

int told = -1; /* all that a handler of signals can know */

void tell(int number) {
    int before = errno;
    if (number == SIGALRM) _exit(0);
    if (number == SIGTERM) eventfd_write(told, 1);
    errno = before;
}

/* Handlers rather than a mask or SIG_IGN, which a device that is started here would inherit. */
oip::owned_fd signals() {
    oip::owned_fd found(eventfd(0, EFD_CLOEXEC));
    told = found.get();
    struct sigaction how = {};
    how.sa_handler = tell, how.sa_flags = SA_RESTART;
    for (int each : {SIGTERM, SIGINT, SIGPIPE, SIGALRM}) sigaction(each, &how, nullptr);
    return found;
}

oip::owned_fd inherited(const char *number) {
    oip::owned_fd found(atoi(number));
    fcntl(found.get(), F_SETFD, FD_CLOEXEC);
    return found;
}

int serve(char **words, int n) {
    oip::owned_fd ended = signals(), left(eventfd(0, EFD_CLOEXEC)), control = inherited(words[0]);
    oip::door_options o;
    o.its = oip::limits::of(words[3]);
    o.listener = inherited(words[1]), o.behind = words[2];
    if (n == 6) o.certificate = words[4], o.key = words[5];
    const oip::limits its = o.its;
    oip::door door(std::move(o));
    door.begin();
    std::thread obeys([&] {
        oip::obey(control.get(), door, its);
        eventfd_write(left.get(), 1);
    });
    const char ready[] = "ready";
    send(control.get(), ready, sizeof ready - 1, MSG_NOSIGNAL);
    pollfd waits[] = {{ended.get(), POLLIN, 0}, {left.get(), POLLIN, 0}};
    while (poll(waits, 2, -1) < 0) {}
    alarm(LONGEST_END); /* a device that stands still may keep a thread that opens or compiles */
    door.close();
    shutdown(control.get(), SHUT_RDWR); /* ends `obeys` */
    obeys.join();
    return 0;
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 5 && argc != 7) {
        fputs("burst-oip is started by `burst serve … --oip …`: set BURST_OIP_DOOR to its path\n",
              stderr);
        return 2;
    }
    try {
        allow_descriptors();
        return serve(argv + 1, argc - 1);
    } catch (const std::exception &error) {
        fprintf(stderr, "burst-oip: %s\n", error.what());
        return 1;
    }
}
