/* Shared memory of clients', as Python's table of regions has checked and counted it. Its bytes are
 * copied by pread and pwrite, never through a mapping: its owner may make the file shorter at any
 * time, and then a copy is short, and no signal comes. Safe from any thread. */
#ifndef OIP_REGIONS_H
#define OIP_REGIONS_H

#include "oip/wire.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

namespace oip {

/* A descriptor, closed with its owner. */
class owned_fd {
public:
    explicit owned_fd(int fd = -1) : fd_(fd) {}
    owned_fd(owned_fd &&other) noexcept : fd_(other.release()) {}
    owned_fd &operator=(owned_fd &&other) noexcept;
    ~owned_fd();
    int get() const { return fd_; }
    int release();

private:
    int fd_;
};

class region {
public:
    region(owned_fd fd, uint64_t begin, uint64_t bytes);
    /* False: the file is shorter by now, or cannot be read or written. */
    bool read(const place &where, void *to) const;
    bool write(const place &where, const void *from) const;
    bool holds(const place &where) const;
    void touch(); /* a request uses it */
    uint64_t used() const { return used_; }

private:
    owned_fd fd_;
    const uint64_t begin_, bytes_;
    std::atomic<uint64_t> used_; /* CLOCK_MONOTONIC ns */
};

/* By the names that clients gave them. A request that has one keeps it until its end. */
class region_table {
public:
    void add(uint64_t handle, std::string name, std::shared_ptr<region> its);
    void remove(uint64_t handle);
    std::shared_ptr<region> find(std::string_view name) const;
    uint64_t used(uint64_t handle) const; /* 0: it is not here */

private:
    struct entry {
        uint64_t handle;
        std::shared_ptr<region> its;
    };
    mutable std::mutex lock_;
    std::map<std::string, entry, std::less<>> by_name_;
    std::map<uint64_t, std::string> names_;
};

} // namespace oip
#endif
