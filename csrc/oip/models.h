/* Models, and the bursts on which they run.
 *
 * Who holds what. A `model` is held by the table of models and by each request that runs on it or
 * waits for it; when it has gone from the table it lives until the last of these has ended. Its
 * *lanes* are bursts, `instances` at most, opened as they are needed. A lane is with one thread, or
 * among those that are free; `take` hands it out, `pass_on` gives it to the next request that
 * waits, oldest first, or back. A lane that is of no more use is deleted instead, and the request
 * that comes next opens another one. Any thread may call a model; a lane, the thread that has it.
 *
 * Requests wait nowhere else, and `forget` takes one out that its client does not want any more. */
#ifndef OIP_MODELS_H
#define OIP_MODELS_H

#include "oip/regions.h"
#include "libburst/burst.hpp"

#include <deque>
#include <optional>

namespace oip {

/* Bytes of a tensor in shared memory that are copied here. A larger one goes by way of Python's
 * door, whose device reads and writes it in place. */
enum : uint64_t { MOST_COPIED = 1 << 20 };

/* An input or output. */
struct port {
    std::string name, datatype;
    uint32_t element = 0; /* bytes */
    bool has_rank = false;
    std::vector<uint32_t> sizes; /* 0: open */
    bool is_known() const;       /* nothing is open */
    uint64_t bytes() const;      /* if it is known */
};

/* Bytes of a tensor of that shape; nothing: more than `most`. */
std::optional<uint64_t> bytes_of(const uint32_t *shape, uint32_t rank, uint32_t element,
                                 uint64_t most);

class model;

/* A request, and what it runs on, in the model's order. */
struct job {
    infer_request asked;
    std::shared_ptr<model> its;
    std::vector<const given_tensor *> inputs;
    std::vector<const wanted_tensor *> outputs; /* NULL: not wanted */
    std::vector<std::shared_ptr<region>> from, into;
    uint64_t deadline = BURST_FOREVER, began = 0, ready = 0, rows = 1;
};

/* FORWARDED: let Python's door answer it. */
enum class outcome { ANSWERED, FORWARDED, LATE };

/* A burst, and memory for one request on it. */
class lane {
public:
    lane(const model &its, burst::controller burst);
    ~lane();
    outcome run(job &j, grpc::ByteBuffer *answer);
    bool is_usable() const { return !is_broken_; }
    bool is_late() const { return !left_.empty(); } /* the next request may wait for an old one */
    void give_up() { is_broken_ = true; }
    void stop() const { burst_close(burst_.get()); } /* any thread: what runs ends now */
    /* Gives memory back, if there is much of it and no request came for a while. */
    void rest(uint64_t now);

private:
    int lay_out(const job &j);
    bool fill(const job &j);
    bool grow();
    outcome failed(int result);
    bool write(const job &j, grpc::ByteBuffer *answer);
    const uint32_t *shape_of(uint32_t output, uint32_t *told, uint32_t *rank) const;
    void drop();
    char *at(size_t tensor) const { return static_cast<char *>(base_) + tensors_[tensor].offset; }

    const model &its_;
    burst::controller burst_;
    struct left {
        burst_request *its;
        uint64_t bytes; /* of the memory that is left with it */
    };
    void leave(uint64_t bytes);
    void shrink();
    std::vector<left> left_; /* which the device may have still */
    burst_request *request_ = nullptr;
    std::vector<uint32_t> key_; /* shapes of the inputs of `request_` */
    std::vector<burst_tensor> tensors_;
    std::vector<uint64_t> room_, told_; /* bytes for each output, and that it last had */
    std::vector<uint32_t> small_;       /* answers in a row that needed much less */
    burst_pool *pool_ = nullptr;
    void *base_ = nullptr;
    uint64_t bytes_ = 0, used_ = 0;
    bool is_broken_ = false;
};

/* A request that waits for a lane. */
class waiter {
public:
    virtual ~waiter() = default;
};

struct model_options {
    std::string name, version, device;
    uint32_t instances = 1;
    uint64_t most_rows = 0; /* 0: any number, and there is no batch */
    bool is_sustained = false;
    std::vector<port> inputs, outputs;
    owned_fd memory; /* the encoded model, at `offset` */
    uint64_t offset = 0, bytes = 0, most_bytes = 0;
};

/* What ModelStatistics tells of requests that were answered here. */
struct model_counts {
    uint64_t requests = 0, rows = 0, last_ms = 0, input_ns = 0, infer_ns = 0, output_ns = 0;
    uint64_t late = 0, late_ns = 0; /* whose deadline has passed */
};

class model {
public:
    explicit model(model_options options);
    const model_options &options() const { return options_; }
    /* Has its device compile it; until then no request runs here. False: why is in burst_why. By a
     * connection of its own: one serves who asks first, and that may take as long as compiling. */
    bool prepare();
    bool is_ready() const { return is_ready_; }
    /* Completes a request whose tensors are all as the model has them, else returns false. */
    bool bind(job *j, const region_table &regions) const;

    enum class turn { HAS_LANE, WAITS, NONE };
    /* HAS_LANE: *found is a lane, or NULL: open one. */
    turn take(const std::shared_ptr<waiter> &who, lane **found);
    lane *open(); /* in the place that `take` or `pass_on` gave; NULL: that failed */
    /* `its`: NULL, there is none in this place. The request that has it next; NULL: none waits. */
    std::shared_ptr<waiter> pass_on(lane *its);
    bool forget(const waiter *who); /* true: it waited */
    void count(const job &j, uint64_t infer_ns, uint64_t output_ns);
    void count_late(const job &j);
    model_counts counts() const;
    void rest();
    void stop(); /* ends what runs, at once */

private:
    model_options options_;
    burst::compiled compiled_;
    std::atomic<bool> is_ready_{false};
    mutable std::mutex lock_; /* of what is below */
    std::vector<std::unique_ptr<lane>> lanes_;
    std::vector<lane *> free_;
    uint32_t places_ = 0;    /* of lanes, also of those that are being opened */
    uint64_t closed_to_ = 0; /* CLOCK_MONOTONIC ns: the device could not be had */
    bool has_stopped_ = false;
    std::deque<std::shared_ptr<waiter>> waiting_;
    model_counts counts_;
};

} // namespace oip
#endif
