#include "oip/regions.h"

#include "libburst/burst.h"

#include <cerrno>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace oip {

owned_fd &owned_fd::operator=(owned_fd &&other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

owned_fd::~owned_fd() {
    if (fd_ >= 0) close(fd_);
}

int owned_fd::release() { return std::exchange(fd_, -1); }

region::region(owned_fd fd, uint64_t begin, uint64_t bytes)
    : fd_(std::move(fd)), begin_(begin), bytes_(bytes), used_(burst_now()) {}

bool region::holds(const place &where) const {
    return where.bytes <= bytes_ && where.offset <= bytes_ - where.bytes;
}

bool region::read(const place &where, void *to) const {
    char *at = static_cast<char *>(to);
    uint64_t from = begin_ + where.offset, left = where.bytes;
    while (left) {
        ssize_t n = pread(fd_.get(), at, left, off_t(from));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n, from += uint64_t(n), left -= uint64_t(n);
    }
    return true;
}

bool region::write(const place &where, const void *from) const {
    struct stat found;
    uint64_t to = begin_ + where.offset, left = where.bytes;
    /* pwrite would make a file longer that has become too short */
    if (fstat(fd_.get(), &found) || uint64_t(found.st_size) < to + left) return false;
    const char *at = static_cast<const char *>(from);
    while (left) {
        ssize_t n = pwrite(fd_.get(), at, left, off_t(to));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n, to += uint64_t(n), left -= uint64_t(n);
    }
    return true;
}

void region::touch() { used_ = burst_now(); }

void region_table::add(uint64_t handle, std::string name, std::shared_ptr<region> its) {
    std::lock_guard hold(lock_);
    names_[handle] = name;
    by_name_[std::move(name)] = {handle, std::move(its)};
}

void region_table::remove(uint64_t handle) {
    std::lock_guard hold(lock_);
    auto name = names_.find(handle);
    if (name == names_.end()) return;
    auto found = by_name_.find(name->second);
    /* another one may have come by that name */
    if (found != by_name_.end() && found->second.handle == handle) by_name_.erase(found);
    names_.erase(name);
}

std::shared_ptr<region> region_table::find(std::string_view name) const {
    std::lock_guard hold(lock_);
    auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second.its;
}

uint64_t region_table::used(uint64_t handle) const {
    std::lock_guard hold(lock_);
    auto name = names_.find(handle);
    auto found = name == names_.end() ? by_name_.end() : by_name_.find(name->second);
    return found == by_name_.end() ? 0 : found->second.its->used();
}

} // namespace oip
