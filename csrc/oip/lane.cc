#include "oip/models.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace oip {
namespace {

enum : uint64_t {
    ALIGN = 64,
    LEAST_ROOM = 4096, /* for an output that is open */
    LARGE = 1 << 20,   /* bytes that are not kept without a use */
    REST_NS = UINT64_C(10000000000),
};
enum : size_t { MOST_LEFT = 8 };
enum : uint32_t { FEW = 64 }; /* answers */
enum : int { TRIES = 3 };

uint64_t aligned(uint64_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }

} // namespace

lane::lane(const model &its, burst::controller burst) : its_(its), burst_(std::move(burst)) {
    for (const port &p : its.options().outputs)
        room_.push_back(p.is_known() ? p.bytes() : uint64_t(LEAST_ROOM));
    told_ = room_, small_.resize(room_.size());
}

lane::~lane() {
    drop();
    burst_.reset(); /* takes back what the device has */
    for (const left &each : left_) burst_request_free(each.its);
}

void lane::leave(uint64_t bytes) {
    burst_request *its = std::exchange(request_, nullptr);
    if (its && burst_request_free(its) == -EBUSY) left_.push_back({its, bytes});
}

void lane::drop() {
    leave(bytes_);
    if (pool_) burst_pool_free(pool_);
    pool_ = nullptr, base_ = nullptr, bytes_ = 0;
}

/* 0, or what libburst says. */
int lane::lay_out(const job &j) {
    std::vector<uint32_t> key;
    for (const given_tensor *t : j.inputs) {
        key.push_back(t->rank);
        key.insert(key.end(), t->shape.begin(), t->shape.begin() + t->rank);
    }
    auto is_back = [](const left &each) { return burst_request_free(each.its) != -EBUSY; };
    left_.erase(std::remove_if(left_.begin(), left_.end(), is_back), left_.end());
    const model_options &o = its_.options();
    uint64_t bytes = 0;
    for (const left &each : left_) bytes += each.bytes;
    if (left_.size() > MOST_LEFT || bytes > o.most_bytes) return -EBUSY;
    if (request_ && key == key_) return 0;
    leave(0);
    uint64_t end = 0;
    tensors_.clear();
    for (size_t i = 0; i < o.inputs.size() + o.outputs.size(); i++) {
        const given_tensor *t = i < o.inputs.size() ? j.inputs[i] : nullptr;
        uint64_t n = t ? *bytes_of(t->shape.data(), t->rank, o.inputs[i].element, o.most_bytes)
                       : room_[i - o.inputs.size()];
        burst_tensor placed = {nullptr, end, n, 0, nullptr};
        if (t && !o.inputs[i].is_known()) placed.rank = t->rank, placed.shape = t->shape.data();
        tensors_.push_back(placed);
        end = aligned(end + n);
    }
    if (end > bytes_ || (bytes_ > LARGE && bytes_ / 4 > end)) {
        drop();
        if (int r = burst_pool_new(end, &pool_, &base_)) return r;
        bytes_ = end;
    }
    for (burst_tensor &t : tensors_) t.pool = pool_;
    key_ = std::move(key);
    uint32_t n = uint32_t(o.inputs.size());
    return burst_request_new(burst_.get(), n, tensors_.data(), uint32_t(o.outputs.size()),
                             tensors_.data() + n, &request_);
}

bool lane::fill(const job &j) {
    for (size_t i = 0; i < j.inputs.size(); i++) {
        const given_tensor &t = *j.inputs[i];
        if (t.is_placed ? !j.from[i]->read(t.where, at(i)) : t.values.size() != tensors_[i].length)
            return false;
        if (!t.is_placed) memcpy(at(i), t.values.data(), t.values.size());
    }
    return true;
}

/* The shape of an output of the last result; NULL: the device did not tell it. */
const uint32_t *lane::shape_of(uint32_t output, uint32_t *told, uint32_t *rank) const {
    const port &p = its_.options().outputs[output];
    *rank = uint32_t(p.sizes.size());
    if (p.is_known()) return p.sizes.data();
    int found = burst_output_shape(burst_.get(), output, told, MOST_RANK);
    *rank = uint32_t(found);
    return found < 0 || uint32_t(found) > MOST_RANK ? nullptr : told;
}

/* After a result that did not fit: room for what the device told. False: there will be none. */
bool lane::grow() {
    const model_options &o = its_.options();
    bool has_grown = false;
    uint64_t all = 0;
    for (uint32_t i = 0; i < o.outputs.size(); i++) {
        uint32_t told[MOST_RANK], rank;
        const uint32_t *shape = shape_of(i, told, &rank);
        auto n = shape ? bytes_of(shape, rank, o.outputs[i].element, o.most_bytes) : std::nullopt;
        if (!n || (all += *n) > o.most_bytes) return false;
        has_grown |= *n > room_[i];
        room_[i] = std::max(room_[i], *n), told_[i] = *n;
    }
    leave(0);
    return has_grown;
}

/* After an answer: no more room than outputs have needed for a while. */
void lane::shrink() {
    for (size_t i = 0; i < room_.size(); i++) {
        bool is_small = room_[i] > LARGE && told_[i] < room_[i] / 4;
        if ((small_[i] = is_small ? small_[i] + 1 : 0) < FEW) continue;
        room_[i] = std::max(told_[i], uint64_t(LEAST_ROOM));
        leave(0); /* the next one is laid out anew */
    }
}

outcome lane::failed(int result) {
    switch (result) {
    case -ETIMEDOUT: drop(); return outcome::LATE; /* the memory is the device's for now */
    case BURST_MISSED_DEADLINE_TRANSIENT:
    case BURST_MISSED_DEADLINE_PERSISTENT: return outcome::LATE;
    default: is_broken_ = result < 0; return outcome::FORWARDED;
    }
}

bool lane::write(const job &j, grpc::ByteBuffer *answer) {
    const model_options &o = its_.options();
    answer_writer to(j.asked.model, o.version, j.asked.id);
    std::vector<std::pair<const void *, size_t>> values;
    auto add = [&](uint32_t i) {
        uint32_t told[MOST_RANK], rank;
        const uint32_t *shape = shape_of(i, told, &rank);
        auto n = shape ? bytes_of(shape, rank, o.outputs[i].element,
                                  tensors_[j.inputs.size() + i].length)
                       : std::nullopt;
        if (!n) return false;
        told_[i] = *n;
        const char *bytes = at(j.inputs.size() + i);
        const wanted_tensor *t = j.outputs[i];
        if (!t->is_placed) {
            values.emplace_back(bytes, *n);
            return to.output(t->name, o.outputs[i].datatype, shape, rank, nullptr), true;
        }
        place where = t->where;
        if (*n > where.bytes || *n > MOST_COPIED) return false;
        where.bytes = *n;
        to.output(t->name, o.outputs[i].datatype, shape, rank, &where);
        return j.into[i]->write(where, bytes);
    };
    auto number = [&](const wanted_tensor &t) {
        return uint32_t(std::find(j.outputs.begin(), j.outputs.end(), &t) - j.outputs.begin());
    };
    for (const wanted_tensor &t : j.asked.wanted)
        if (!add(number(t))) return false;
    for (auto [bytes, n] : values) to.values(bytes, n);
    *answer = to.finish();
    return true;
}

outcome lane::run(job &j, grpc::ByteBuffer *answer) {
    used_ = burst_now();
    for (int tries = TRIES; tries; tries--) {
        int r = lay_out(j);
        if (r) return failed(r < 0 ? r : -EPROTO);
        if (!fill(j)) return outcome::FORWARDED;
        r = burst_run(burst_.get(), request_, j.deadline, nullptr);
        if (r == BURST_OUTPUT_INSUFFICIENT_SIZE && grow()) continue;
        if (r) return failed(r);
        uint64_t came = burst_now();
        if (!write(j, answer)) return outcome::FORWARDED;
        j.its->count(j, came - j.ready, burst_now() - came);
        used_ = burst_now();
        shrink();
        return outcome::ANSWERED;
    }
    return outcome::FORWARDED;
}

void lane::rest(uint64_t now) {
    if (bytes_ <= LARGE || now - used_ < REST_NS) return;
    drop();
    for (size_t i = 0; i < room_.size(); i++)
        if (!its_.options().outputs[i].is_known()) room_[i] = LEAST_ROOM;
}

} // namespace oip
