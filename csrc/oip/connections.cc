#include "oip/connections.h"

#include "libburst/burst.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <new>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

namespace oip {
namespace {

enum { PAUSE_MS = 100 };     /* while there are no descriptors */
const double PATIENCE = 1.0; /* seconds for a client of which a call was cut */

ino_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) || !S_ISSOCK(found.st_mode) ? 0 : found.st_ino;
}

/* As `plain_peer` has it. */
std::string peer_of(const sockaddr_storage &peer) {
    char text[INET6_ADDRSTRLEN] = "";
    if (peer.ss_family == AF_INET) {
        const auto &its = reinterpret_cast<const sockaddr_in &>(peer);
        inet_ntop(AF_INET, &its.sin_addr, text, sizeof text);
        return std::string("ipv4:") + text + ":" + std::to_string(ntohs(its.sin_port));
    }
    if (peer.ss_family != AF_INET6) return "unix:";
    const auto &its = reinterpret_cast<const sockaddr_in6 &>(peer);
    bool is_mapped = IN6_IS_ADDR_V4MAPPED(&its.sin6_addr);
    const void *bytes = its.sin6_addr.s6_addr + (is_mapped ? 12 : 0);
    inet_ntop(is_mapped ? AF_INET : AF_INET6, bytes, text, sizeof text);
    std::string host = is_mapped ? std::string("ipv4:") + text : std::string("ipv6:[") + text + "]";
    return host + ":" + std::to_string(ntohs(its.sin6_port));
}

/* gRPC may have closed it by now, and the number be another file's: so by a duplicate. */
void hang_up(int fd, ino_t inode) {
    owned_fd same(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (same.get() >= 0 && inode_of(same.get()) == inode) shutdown(same.get(), SHUT_RDWR);
}

} // namespace

connections::connections(owned_fd listener, const limits &its, std::unique_ptr<acceptor> to)
    : listener_(std::move(listener)), ended_(eventfd(0, EFD_CLOEXEC)), limits_(its),
      to_(std::move(to)) {
    fcntl(listener_.get(), F_SETFL, fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
}

connections::~connections() { close(); }

void connections::begin() { thread_ = std::thread(&connections::run, this); }

void connections::close() {
    if (!thread_.joinable()) return;
    eventfd_write(ended_.get(), 1);
    thread_.join();
    listener_ = owned_fd();
}

void connections::run() {
    pollfd waits[] = {{ended_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (;;) {
        if (poll(waits, 2, -1) < 0 && errno != EINTR) return;
        if (waits[0].revents) return;
        if (!waits[1].revents) continue;
        errno = 0;
        try {
            accept_one();
        } catch (const std::bad_alloc &) {
            errno = ENOMEM;
        }
        bool is_short = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
        if (is_short) poll(waits, 1, PAUSE_MS);
    }
}

void connections::accept_one() {
    sockaddr_storage peer = {};
    socklen_t n = sizeof peer;
    owned_fd fd(accept4(listener_.get(), reinterpret_cast<sockaddr *>(&peer), &n,
                        SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.get() < 0) return;
    connection its = {inode_of(fd.get()), peer_of(peer), machine_of(peer_of(peer))};
    int one = 1;
    if (peer.ss_family != AF_UNIX) setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    {
        std::lock_guard hold(lock_);
        forget_ended();
        if (!has_room(its.machine)) return;
        all_[fd.get()] = std::move(its);
    }
    acceptor::NewConnectionParameters parameters;
    parameters.listener_fd = listener_.get();
    parameters.fd = fd.release();
    to_->HandleNewConnection(&parameters);
    errno = 0;
}

void connections::forget_ended() {
    for (auto each = all_.begin(); each != all_.end();)
        each = inode_of(each->first) == each->second.inode ? std::next(each) : all_.erase(each);
}

bool connections::has_room(const std::string &machine) const {
    auto same = [&](const auto &each) { return each.second.machine == machine; };
    auto its = std::count_if(all_.begin(), all_.end(), same);
    return all_.size() < limits::of_all(limits_.connections) && uint64_t(its) < limits_.connections;
}

void connections::note(const std::string &peer) {
    std::string name = plain_peer(peer);
    if (name.compare(0, 2, "ip")) return;
    std::lock_guard hold(lock_);
    for (auto &[fd, its] : all_) its.is_noted |= its.peer == name;
}

void connections::look() {
    std::lock_guard hold(lock_);
    forget_ended();
    uint64_t now = burst_now();
    for (auto &[fd, its] : all_) {
        int unsent = 0;
        if (ioctl(fd, SIOCOUTQ, &unsent)) continue;
        its.is_noted &= unsent > 0;
        double patience = its.is_noted ? std::min(PATIENCE, limits_.patience) : limits_.patience;
        if (unsent != its.unsent || !unsent) its.unsent = unsent, its.since = now;
        else if (now - its.since > uint64_t(patience * 1e9)) hang_up(fd, its.inode);
    }
}

} // namespace oip
