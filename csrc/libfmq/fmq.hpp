/* fmq.h for C++17, header only. A queue's elements have a C++ type: numbers are what numpy calls
 * them, anything else that can be copied by its bytes is "|V<its size>". Everything is freed with
 * its last owner; objects may go in any order.
 *
 * Each function that can fail throws fmq::error, or, without exceptions (-fno-exceptions), ends the
 * program with the reason. `try_write`, `try_read` and `try_reserve` return fmq.h's results
 * instead.
 */
#ifndef FMQ_HPP
#define FMQ_HPP

#include "fmq.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__cpp_exceptions)
#include <stdexcept>
#endif

namespace fmq {

#if defined(__cpp_exceptions)
/* `code`: -errno. */
class error : public std::runtime_error {
public:
    explicit error(int code) : std::runtime_error(fmq_queue_why()), code(code) {}
    const int code;
};
[[noreturn]] inline void raise(int code) { throw error(code); }
#else
[[noreturn]] inline void raise(int) {
    std::fprintf(stderr, "fmq: %s\n", fmq_queue_why());
    std::abort();
}
#endif

template <class R> R checked(R result) {
    if (result < 0) raise(int(result));
    return result;
}

inline std::uint64_t after_ms(std::uint64_t ms) { return fmq_now() + ms * 1000000; }

enum class flavour {
    synchronized = FMQ_QUEUE_SYNCHRONIZED,
    unsynchronized = FMQ_QUEUE_UNSYNCHRONIZED,
    broadcast = FMQ_QUEUE_BROADCAST
};

/* A pointer and a count, as std::span of C++20. */
template <class T> class span {
public:
    span() = default;
    span(T *data, std::size_t size) : data_(data), size_(size) {}
    T *data() const { return data_; }
    std::size_t size() const { return size_; }
    T *begin() const { return data_; }
    T *end() const { return data_ + size_; }
    T &operator[](std::size_t i) const { return data_[i]; }

private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

/* What was reserved: up to where the ring wraps, and from its beginning. */
template <class T> struct spans {
    span<T> first, second;
};

/* numpy's name of T; of a type that is no number, that of its bytes. */
template <class T> std::string dtype_of() {
    static_assert(std::is_trivially_copyable<T>::value, "elements are copied by their bytes");
    const std::string size = std::to_string(sizeof(T));
    if (std::is_same<T, bool>::value) return "|b1";
    if (std::is_floating_point<T>::value && sizeof(T) <= 8) return "<f" + size;
    if (std::is_integral<T>::value)
        return (sizeof(T) > 1 ? "<" : "|") + std::string(std::is_signed<T>::value ? "i" : "u") +
               size;
    return "|V" + size;
}

/* The only owner of a handle. */
template <class T, int (*release)(T *)> class handle {
public:
    explicit handle(T *held) : held_(held) {}
    handle(handle &&other) noexcept : held_(std::exchange(other.held_, nullptr)) {}
    handle &operator=(handle &&other) noexcept {
        reset();
        held_ = std::exchange(other.held_, nullptr);
        return *this;
    }
    handle(const handle &) = delete;
    handle &operator=(const handle &) = delete;
    ~handle() { reset(); }
    void reset() {
        if (held_) release(std::exchange(held_, nullptr));
    }
    T *get() const { return held_; }

private:
    T *held_;
};

/* A role in a queue, until it goes. One thread at a time. */
class end : public handle<fmq_queue_end, fmq_queue_leave> {
public:
    std::uint64_t available() const { return std::uint64_t(checked(fmq_queue_available(get()))); }
    fmq_queue_peer peer() const { return fmq_queue_peer(checked(fmq_queue_get_peer(get()))); }
    void spin(std::uint64_t ns) { checked(fmq_queue_spin(get(), ns)); }
    void commit(std::uint64_t n) { checked(fmq_queue_commit(get(), n)); }
    std::uint64_t position() const { return std::uint64_t(checked(fmq_queue_position(get()))); }
    int pollable(std::uint64_t n = 1) { return checked(fmq_queue_pollable(get(), n)); }

protected:
    using handle::handle;
    template <class T>
    int try_reserve_of(std::uint64_t n, spans<T> *found, std::uint64_t deadline) {
        fmq_queue_spans raw;
        int result = fmq_queue_reserve(get(), n, &raw, deadline);
        if (result >= 0)
            *found = {{static_cast<T *>(raw.first), std::size_t(raw.n_first)},
                      {static_cast<T *>(raw.second), std::size_t(raw.n_second)}};
        return result;
    }
};

template <class T> class writer : public end {
public:
    explicit writer(fmq_queue_end *held) : end(held) {}
    void write(const T &element, std::uint64_t deadline = FMQ_FOREVER) {
        write(&element, 1, deadline);
    }
    void write(const T *elements, std::size_t n, std::uint64_t deadline = FMQ_FOREVER) {
        checked(try_write(elements, n, deadline));
    }
    int try_write(const T *elements, std::size_t n, std::uint64_t deadline) {
        return fmq_queue_write(get(), elements, n, deadline);
    }
    spans<T> reserve(std::uint64_t n, std::uint64_t deadline = FMQ_FOREVER) {
        spans<T> found;
        checked(try_reserve(n, &found, deadline));
        return found;
    }
    int try_reserve(std::uint64_t n, spans<T> *found, std::uint64_t deadline) {
        return try_reserve_of(n, found, deadline);
    }
    /* A record, on a queue of unsigned char. */
    void send(const void *bytes, std::size_t n, std::uint64_t deadline = FMQ_FOREVER) {
        checked(fmq_queue_send(get(), bytes, n, deadline));
    }
    /* Of a broadcast queue. */
    std::vector<fmq_queue_listener> readers() const {
        std::vector<fmq_queue_listener> found(64);
        found.resize(std::size_t(checked(fmq_queue_get_readers(get(), found.data(), 64))));
        return found;
    }
    void evict(const fmq_queue_listener &reader) {
        checked(fmq_queue_evict(get(), reader.seat, reader.turn));
    }
};

template <class T> class reader : public end {
public:
    explicit reader(fmq_queue_end *held) : end(held) {}
    T read(std::uint64_t deadline = FMQ_FOREVER) {
        T element;
        read(&element, 1, deadline);
        return element;
    }
    void read(T *elements, std::size_t n, std::uint64_t deadline = FMQ_FOREVER) {
        checked(try_read(elements, n, deadline));
    }
    int try_read(T *elements, std::size_t n, std::uint64_t deadline) {
        return fmq_queue_read(get(), elements, n, deadline);
    }
    spans<const T> reserve(std::uint64_t n, std::uint64_t deadline = FMQ_FOREVER) {
        spans<const T> found;
        checked(try_reserve(n, &found, deadline));
        return found;
    }
    int try_reserve(std::uint64_t n, spans<const T> *found, std::uint64_t deadline) {
        return try_reserve_of(n, found, deadline);
    }
    /* A record of at most `room` bytes, which returns how many it has. */
    std::size_t receive(void *bytes, std::size_t room, std::uint64_t deadline = FMQ_FOREVER) {
        return std::size_t(checked(fmq_queue_receive(get(), bytes, room, deadline)));
    }
    void keep_latest(std::uint64_t n) { checked(fmq_queue_keep_latest(get(), n)); }
    std::uint64_t lost() const { return std::uint64_t(checked(fmq_queue_lost(get()))); }
};

/* Memory that holds a queue of T. */
template <class T> class queue : public handle<fmq_queue, fmq_queue_close> {
    using base = handle<fmq_queue, fmq_queue_close>;

public:
    /* A new one; `name` empty: it has none. */
    explicit queue(std::uint64_t capacity, const std::string &name = "",
                   flavour kind = flavour::synchronized)
        : base(create(capacity, name, kind)) {}
    static queue open(const std::string &name) {
        fmq_queue *opened = nullptr;
        checked(fmq_queue_open(name.c_str(), dtype_of<T>().c_str(), &opened));
        return queue(opened);
    }
    static queue open_fd(int fd) {
        fmq_queue *opened = nullptr;
        checked(fmq_queue_open_fd(fd, dtype_of<T>().c_str(), &opened));
        return queue(opened);
    }
    int fd() const { return checked(fmq_queue_fd(this->get())); }
    std::uint64_t capacity() const {
        fmq_queue_shape shape;
        checked(fmq_queue_get_shape(this->get(), &shape));
        return shape.capacity;
    }
    fmq::writer<T> writer() { return fmq::writer<T>(take(fmq_queue_writer)); }
    fmq::reader<T> reader() { return fmq::reader<T>(take(fmq_queue_reader)); }

private:
    explicit queue(fmq_queue *opened) : base(opened) {}
    static fmq_queue *create(std::uint64_t capacity, const std::string &name, flavour kind) {
        fmq_queue *made = nullptr;
        const char *where = name.empty() ? nullptr : name.c_str();
        checked(
            fmq_queue_create(where, dtype_of<T>().c_str(), sizeof(T), capacity, int(kind), &made));
        return made;
    }
    fmq_queue_end *take(int (*role)(fmq_queue *, fmq_queue_end **)) {
        fmq_queue_end *taken = nullptr;
        checked(role(this->get(), &taken));
        return taken;
    }
};

inline void unlink(const std::string &name) { checked(fmq_queue_unlink(name.c_str())); }

} // namespace fmq
#endif
