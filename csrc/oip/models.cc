#include "oip/models.h"

#include <algorithm>
#include <chrono>

namespace oip {
namespace {

const uint64_t RETRY_NS = UINT64_C(1000000000), COMPILED_NS = UINT64_C(600000000000);

/* Sizes of 0 have values of no bytes, which Python's door tells apart from none. */
bool fits(const port &p, const given_tensor &t) {
    if (!p.has_rank || t.datatype != p.datatype || t.rank != p.sizes.size()) return false;
    for (uint32_t i = 0; i < t.rank; i++)
        if (!t.shape[i] || (p.sizes[i] && p.sizes[i] != t.shape[i])) return false;
    return true;
}

uint64_t wall_ms() {
    using namespace std::chrono;
    auto since = system_clock::now().time_since_epoch();
    return uint64_t(duration_cast<milliseconds>(since).count());
}

} // namespace

std::optional<uint64_t> bytes_of(const uint32_t *shape, uint32_t rank, uint32_t element,
                                 uint64_t most) {
    uint64_t n = element;
    for (uint32_t i = 0; i < rank; i++)
        if (__builtin_mul_overflow(n, uint64_t(shape[i]), &n)) return std::nullopt;
    return n > most ? std::nullopt : std::optional(n);
}

bool port::is_known() const {
    return has_rank && std::find(sizes.begin(), sizes.end(), 0u) == sizes.end();
}

uint64_t port::bytes() const {
    return *bytes_of(sizes.data(), uint32_t(sizes.size()), element, UINT64_MAX);
}

model::model(model_options options) : options_(std::move(options)) {}

bool model::prepare() {
    bool is_path = options_.device.find('/') != std::string::npos;
    burst_client *raw = nullptr;
    if ((is_path ? burst_connect_path : burst_connect)(options_.device.c_str(), &raw)) return false;
    burst::handle<burst_client, burst_disconnect> device(raw);
    burst_compiled *made = nullptr;
    int preference = options_.is_sustained ? BURST_SUSTAINED_SPEED : BURST_FAST_SINGLE_ANSWER;
    if (burst_prefer(raw, BURST_PRIORITY_MEDIUM, preference) ||
        burst_prepare_encoded(raw, options_.memory.get(), options_.offset, options_.bytes,
                              burst_now() + COMPILED_NS, &made))
        return false;
    compiled_ = burst::compiled(made);
    options_.memory = owned_fd();
    is_ready_ = true;
    return true;
}

bool model::bind(job *j, const region_table &regions) const {
    const model_options &o = options_;
    infer_request &asked = j->asked;
    if (asked.given.size() != o.inputs.size()) return false;
    j->inputs.resize(o.inputs.size()), j->from.resize(o.inputs.size());
    j->outputs.resize(o.outputs.size()), j->into.resize(o.outputs.size());
    auto found = [&](const place &where) {
        bool is_short = where.bytes && where.bytes <= MOST_COPIED;
        auto its = is_short ? regions.find(where.region) : nullptr;
        if (!its || !its->holds(where)) return std::shared_ptr<region>();
        its->touch();
        return its;
    };
    auto number = [](const std::vector<port> &ports, std::string_view name) {
        auto same = [&](const port &p) { return p.name == name; };
        return size_t(std::find_if(ports.begin(), ports.end(), same) - ports.begin());
    };
    uint64_t all = 0;
    for (const given_tensor &t : asked.given) {
        size_t i = number(o.inputs, t.name);
        if (i == o.inputs.size() || j->inputs[i] || !fits(o.inputs[i], t)) return false;
        auto n = bytes_of(t.shape.data(), t.rank, o.inputs[i].element, o.most_bytes);
        if (!n || *n != (t.is_placed ? t.where.bytes : t.values.size())) return false;
        if ((all += *n) > o.most_bytes || (t.is_placed && !(j->from[i] = found(t.where))))
            return false;
        if (o.most_rows && t.rank && t.shape[0] > o.most_rows) return false;
        j->inputs[i] = &t;
    }
    if (o.most_rows && !o.inputs.empty() && j->inputs[0]->rank) j->rows = j->inputs[0]->shape[0];
    if (asked.wanted.empty())
        for (const port &p : o.outputs) asked.wanted.push_back({p.name, false, {}});
    for (const wanted_tensor &t : asked.wanted) {
        size_t i = number(o.outputs, t.name);
        if (i == o.outputs.size() || j->outputs[i]) return false;
        if (t.is_placed && !(j->into[i] = found(t.where))) return false;
        if (t.is_placed && o.outputs[i].is_known() && o.outputs[i].bytes() > t.where.bytes)
            return false;
        j->outputs[i] = &t;
    }
    return true;
}

/* ---- lanes ----------------------------------------------------------------------------------- */

model::turn model::take(const std::shared_ptr<waiter> &who, lane **found) {
    std::lock_guard hold(lock_);
    *found = nullptr;
    if (has_stopped_) return turn::NONE;
    if (!free_.empty()) {
        *found = free_.back(); /* the one whose memory is warm */
        free_.pop_back();
        return turn::HAS_LANE;
    }
    if (places_ < options_.instances) {
        if (burst_now() < closed_to_) return turn::NONE;
        places_++;
        return turn::HAS_LANE;
    }
    waiting_.push_back(who);
    return turn::WAITS;
}

lane *model::open() {
    {
        std::lock_guard hold(lock_);
        if (has_stopped_ || burst_now() < closed_to_) return nullptr;
    }
    burst_options how = {};
    how.recover = 1;
    burst::controller made;
    int r = burst::controller::try_open(compiled_, how, &made);
    std::unique_ptr<lane> opened(r ? nullptr : new lane(*this, std::move(made)));
    std::lock_guard hold(lock_);
    if (r) closed_to_ = burst_now() + RETRY_NS;
    if (r || has_stopped_) return nullptr;
    lanes_.push_back(std::move(opened));
    return lanes_.back().get();
}

std::shared_ptr<waiter> model::pass_on(lane *its) {
    std::unique_ptr<lane> broken; /* deleted without the lock: that ends its burst */
    std::lock_guard hold(lock_);
    if (its && !its->is_usable()) {
        auto same = [&](const std::unique_ptr<lane> &each) { return each.get() == its; };
        auto found = std::find_if(lanes_.begin(), lanes_.end(), same);
        broken = std::move(*found);
        lanes_.erase(found);
        its = nullptr;
    }
    if (!waiting_.empty()) {
        auto next = waiting_.front();
        waiting_.pop_front();
        return next;
    }
    if (its) free_.insert(its->is_late() ? free_.begin() : free_.end(), its);
    else places_--;
    return nullptr;
}

bool model::forget(const waiter *who) {
    std::lock_guard hold(lock_);
    auto same = [&](const std::shared_ptr<waiter> &each) { return each.get() == who; };
    auto found = std::find_if(waiting_.begin(), waiting_.end(), same);
    if (found == waiting_.end()) return false;
    waiting_.erase(found);
    return true;
}

void model::rest() {
    std::lock_guard hold(lock_);
    for (lane *each : free_) each->rest(burst_now());
}

void model::stop() {
    std::lock_guard hold(lock_);
    has_stopped_ = true;
    for (auto &each : lanes_) each->stop();
}

/* ---- figures --------------------------------------------------------------------------------- */

void model::count(const job &j, uint64_t infer_ns, uint64_t output_ns) {
    std::lock_guard hold(lock_);
    counts_.requests++;
    counts_.rows += j.rows;
    counts_.last_ms = wall_ms();
    counts_.input_ns += j.ready - j.began;
    counts_.infer_ns += infer_ns;
    counts_.output_ns += output_ns;
}

void model::count_late(const job &j) {
    std::lock_guard hold(lock_);
    counts_.late++;
    counts_.late_ns += burst_now() - j.began;
}

model_counts model::counts() const {
    std::lock_guard hold(lock_);
    return counts_;
}

} // namespace oip
