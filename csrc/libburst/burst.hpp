/* burst.h for C++17, header only. Everything is freed with its last owner; objects may go in any
 * order.
 *
 * Each function that can fail throws burst::error, or, without exceptions (-fno-exceptions), ends
 * the program with the reason. To go on after a failure, use `try_connect`, `try_prepare`,
 * `try_open`, `try_execute`, `try_run`, `try_submit` and `try_await`, which return burst.h's
 * results. Threads, blocking, and what is of use after an error: as burst.h says of the function of
 * that name.
 */
#ifndef BURST_HPP
#define BURST_HPP

#include "burst.h"

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#if defined(__cpp_exceptions)
#include <stdexcept>
#endif

namespace burst {

#if defined(__cpp_exceptions)
/* `code`: a burst_status, or -errno. */
class error : public std::runtime_error {
public:
    explicit error(int code) : std::runtime_error(burst_why()), code(code) {}
    const int code;
};
[[noreturn]] inline void raise(int code) { throw error(code); }
#else
[[noreturn]] inline void raise(int) {
    std::fprintf(stderr, "burst: %s\n", burst_why());
    std::abort();
}
#endif

inline int checked(int result) {
    if (result) raise(result);
    return result;
}

inline std::uint64_t after_ms(std::uint64_t ms) { return burst_now() + ms * 1000000; }

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

/* The only owner of a handle. */
template <class T, int (*release)(T *)> class handle {
public:
    handle() = default;
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
    T *held_ = nullptr;
};

class compiled : public handle<burst_compiled, burst_compiled_free> {
public:
    using handle::handle;
    /* Executes once, without a burst. */
    burst_outcome execute(const std::vector<burst_tensor> &inputs,
                          const std::vector<burst_tensor> &outputs,
                          std::uint64_t deadline = BURST_FOREVER, burst_execution how = {}) const {
        burst_outcome outcome;
        checked(try_execute(inputs, outputs, deadline, how, &outcome));
        return outcome;
    }
    int try_execute(const std::vector<burst_tensor> &inputs,
                    const std::vector<burst_tensor> &outputs, std::uint64_t deadline,
                    burst_execution how = {}, burst_outcome *outcome = nullptr) const {
        how.size = sizeof how;
        return burst_execute(get(), std::uint32_t(inputs.size()), inputs.data(),
                             std::uint32_t(outputs.size()), outputs.data(), &how, deadline,
                             outcome);
    }
};

class model : public handle<burst_builder, burst_builder_free> {
public:
    model() : handle(make()) {}
    std::uint32_t operand(int type, const std::vector<std::uint32_t> &shape, float scale = 0,
                          std::int32_t zero_point = 0) {
        return index(burst_builder_operand(get(), type, std::uint32_t(shape.size()), shape.data(),
                                           scale, zero_point));
    }
    template <class T>
    std::uint32_t constant(int type, const std::vector<std::uint32_t> &shape,
                           const std::vector<T> &values, float scale = 0,
                           std::int32_t zero_point = 0) {
        return index(burst_builder_constant(get(), type, std::uint32_t(shape.size()), shape.data(),
                                            scale, zero_point, values.data(),
                                            values.size() * sizeof(T)));
    }
    void operation(const std::string &name, const std::vector<std::uint32_t> &inputs,
                   const std::vector<std::uint32_t> &outputs) {
        checked(burst_builder_operation(get(), name.c_str(), std::uint32_t(inputs.size()),
                                        inputs.data(), std::uint32_t(outputs.size()),
                                        outputs.data()));
    }
    void finish(const std::vector<std::uint32_t> &inputs,
                const std::vector<std::uint32_t> &outputs) {
        checked(burst_builder_finish(get(), std::uint32_t(inputs.size()), inputs.data(),
                                     std::uint32_t(outputs.size()), outputs.data()));
    }

private:
    static burst_builder *make() {
        burst_builder *made = nullptr;
        checked(burst_builder_new(&made));
        return made;
    }
    static std::uint32_t index(int result) {
        if (result < 0) raise(result);
        return std::uint32_t(result);
    }
};

class client : public handle<burst_client, burst_disconnect> {
public:
    /* The device of that name, started if need be. */
    explicit client(const std::string &name) : handle(make(burst_connect, name)) {}
    /* The device of that name into *out, or burst_connect's result. */
    static int try_connect(const std::string &name, client *out) {
        burst_client *made = nullptr;
        int result = burst_connect(name.c_str(), &made);
        if (!result) *out = client(made);
        return result;
    }
    client() = default; /* none */
    /* The device at that socket. */
    static client at(const std::string &path) { return client(make(burst_connect_path, path)); }
    compiled prepare(const model &m, std::uint64_t deadline = BURST_FOREVER) {
        burst_compiled *made = nullptr;
        checked(burst_prepare(get(), m.get(), deadline, &made));
        return compiled(made);
    }
    /* The same, as burst_prepare's result. */
    int try_prepare(const model &m, compiled *out, std::uint64_t deadline = BURST_FOREVER) {
        burst_compiled *made = nullptr;
        int result = burst_prepare(get(), m.get(), deadline, &made);
        if (!result) *out = compiled(made);
        return result;
    }
    /* A model in sealed memory, as burst_prepare_encoded wants it; the descriptor stays yours. */
    compiled prepare_encoded(int memory, std::uint64_t offset, std::uint64_t bytes,
                             std::uint64_t deadline = BURST_FOREVER) {
        burst_compiled *made = nullptr;
        checked(burst_prepare_encoded(get(), memory, offset, bytes, deadline, &made));
        return compiled(made);
    }
    /* Of models that are prepared from now on. */
    void prefer(burst_priority priority, burst_preference preference = BURST_FAST_SINGLE_ANSWER) {
        checked(burst_prefer(get(), priority, preference));
    }
    compiled prepare_file(const std::string &path, const std::vector<burst_file_tensor> &inputs,
                          const std::vector<burst_file_tensor> &outputs,
                          std::uint64_t deadline = BURST_FOREVER) {
        burst_compiled *made = nullptr;
        checked(burst_prepare_file(get(), path.c_str(), std::uint32_t(inputs.size()), inputs.data(),
                                   std::uint32_t(outputs.size()), outputs.data(), deadline, &made));
        return compiled(made);
    }

private:
    explicit client(burst_client *made) : handle(made) {}
    static burst_client *make(int (*connect)(const char *, burst_client **),
                              const std::string &where) {
        burst_client *made = nullptr;
        checked(connect(where.c_str(), &made));
        return made;
    }
};

/* Shared memory. What `view` returns is valid as long as the pool. */
class pool : public handle<burst_pool, burst_pool_free> {
public:
    explicit pool(std::size_t bytes) : size_(bytes) {
        burst_pool *made = nullptr;
        checked(burst_pool_new(bytes, &made, &base_));
        static_cast<handle &>(*this) = handle(made);
    }
    template <class T> span<T> view(std::size_t offset = 0, std::size_t count = SIZE_MAX) const {
        std::size_t most = offset < size_ ? (size_ - offset) / sizeof(T) : 0;
        return {reinterpret_cast<T *>(static_cast<char *>(base_) + offset),
                count < most ? count : most};
    }
    burst_tensor tensor(std::uint64_t offset, std::uint64_t length) const {
        return {get(), offset, length, 0, nullptr};
    }

private:
    std::size_t size_;
    void *base_ = nullptr;
};

class request : public handle<burst_request, burst_request_free> {
    using handle::handle;
};

class controller : public handle<burst_controller, burst_close> {
public:
    explicit controller(const compiled &model, burst_options options = {}) {
        options.size = sizeof options;
        burst_controller *made = nullptr;
        checked(burst_open(model.get(), &options, &made));
        static_cast<handle &>(*this) = handle(made);
    }
    controller() = default; /* none */
    /* A burst into *out, or burst_open's result. */
    static int try_open(const compiled &model, burst_options options, controller *out) {
        options.size = sizeof options;
        burst_controller *made = nullptr;
        int result = burst_open(model.get(), &options, &made);
        if (!result) static_cast<handle &>(*out) = handle(made);
        return result;
    }
    burst::request request(const std::vector<burst_tensor> &inputs,
                           const std::vector<burst_tensor> &outputs) {
        burst_request *made = nullptr;
        checked(burst_request_new(get(), std::uint32_t(inputs.size()), inputs.data(),
                                  std::uint32_t(outputs.size()), outputs.data(), &made));
        return burst::request(made);
    }
    burst_outcome run(const burst::request &r, std::uint64_t deadline = BURST_FOREVER) {
        burst_outcome outcome;
        checked(try_run(r, deadline, &outcome));
        return outcome;
    }
    int try_run(const burst::request &r, std::uint64_t deadline, burst_outcome *outcome = nullptr) {
        return burst_run(get(), r.get(), deadline, outcome);
    }
    std::uint64_t submit(const burst::request &r, std::uint64_t deadline = BURST_FOREVER) {
        std::uint64_t number = 0;
        checked(try_submit(r, deadline, &number));
        return number;
    }
    int try_submit(const burst::request &r, std::uint64_t deadline,
                   std::uint64_t *number = nullptr) {
        return burst_submit(get(), r.get(), deadline, number);
    }
    burst_outcome await(std::uint64_t deadline = BURST_FOREVER) {
        burst_outcome outcome;
        checked(try_await(deadline, &outcome));
        return outcome;
    }
    int try_await(std::uint64_t deadline, burst_outcome *outcome = nullptr) {
        return burst_await(get(), deadline, outcome);
    }
    /* Without waiting: -EAGAIN where there is no room, or no result. */
    int submit_now(const burst::request &r, std::uint64_t deadline = BURST_FOREVER,
                   std::uint64_t *number = nullptr) noexcept {
        return burst_try_submit(get(), r.get(), deadline, number);
    }
    int poll(burst_outcome *outcome = nullptr) noexcept { return burst_poll(get(), outcome); }
    void cancel(std::uint64_t number) { checked(burst_cancel(get(), number)); }
    /* The dimensions of an output of the last outcome. */
    std::vector<std::uint32_t> output_shape(std::uint32_t output) const {
        std::vector<std::uint32_t> found(32);
        int rank = burst_output_shape(get(), output, found.data(), 32);
        if (rank < 0) raise(rank);
        if (rank > 32)
            found.resize(std::size_t(rank)),
                burst_output_shape(get(), output, found.data(), std::uint32_t(rank));
        found.resize(std::size_t(rank));
        return found;
    }
    burst_statistics count() const {
        burst_statistics found;
        checked(burst_count(get(), &found));
        return found;
    }
};

} // namespace burst
#endif
