#include "oip/model_table.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>

namespace oip {
namespace {

const int MOST_TRIES = 5; /* after the first */
const uint64_t FIRST_PAUSE_NS = UINT64_C(1000000000);

} // namespace

model_table::model_table() : thread_(&model_table::compile, this) {}

model_table::~model_table() {
    {
        std::lock_guard hold(queue_lock_);
        has_ended_ = true;
    }
    queued_.notify_all();
    thread_.join();
}

void model_table::add(uint64_t handle, const std::string &name, uint64_t version,
                      std::shared_ptr<model> its) {
    std::shared_ptr<model> before = its;
    {
        std::lock_guard hold(lock_);
        auto has_gone = [](const std::weak_ptr<model> &each) { return each.expired(); };
        added_.erase(std::remove_if(added_.begin(), added_.end(), has_gone), added_.end());
        if (its) added_.push_back(its);
        entry &place = by_name_[name][version];
        place.handle = handle;
        std::swap(place.its, before);
    }
    queue(std::move(before));
    queue(std::move(its));
}

void model_table::remove(uint64_t handle) {
    std::shared_ptr<model> its;
    {
        std::lock_guard hold(lock_);
        for (auto name = by_name_.begin(); name != by_name_.end();) {
            auto &versions = name->second;
            auto same = [&](const auto &each) { return each.second.handle == handle; };
            /* another one may be in its place by now */
            auto found = std::find_if(versions.begin(), versions.end(), same);
            if (found != versions.end()) its = std::move(found->second.its), versions.erase(found);
            name = versions.empty() ? by_name_.erase(name) : std::next(name);
        }
    }
    queue(std::move(its));
}

std::shared_ptr<model> model_table::find(std::string_view name, std::string_view version) const {
    uint64_t number = 0;
    const char *end = version.data() + version.size();
    if (!version.empty()) {
        auto [stop, error] = std::from_chars(version.data(), end, number);
        if (error != std::errc() || stop != end) return nullptr;
    }
    std::shared_lock hold(lock_);
    auto versions = by_name_.find(name);
    if (versions == by_name_.end()) return nullptr;
    auto found =
        version.empty() ? std::prev(versions->second.end()) : versions->second.find(number);
    if (found == versions->second.end()) return nullptr;
    const auto &its = found->second.its;
    return its && its->is_ready() ? its : nullptr;
}

std::vector<std::shared_ptr<model>> model_table::all() const {
    std::vector<std::shared_ptr<model>> found;
    std::shared_lock hold(lock_);
    for (const auto &each : added_)
        if (auto its = each.lock()) found.push_back(std::move(its));
    return found;
}

model_counts model_table::counts(uint64_t handle) const {
    std::shared_lock hold(lock_);
    for (const auto &[name, versions] : by_name_)
        for (const auto &[version, each] : versions)
            if (each.handle == handle && each.its) return each.its->counts();
    return {};
}

void model_table::rest() {
    for (const auto &each : all()) each->rest();
}

void model_table::stop() {
    for (const auto &each : all()) each->stop();
}

/* ---- compiling ------------------------------------------------------------------------------- */

/* A model that is queued already comes up once: nobody else has it then, if it was removed. */
void model_table::queue(std::shared_ptr<model> its, uint64_t due, int tries) {
    std::lock_guard hold(queue_lock_);
    auto same = [&](const auto &each) { return each.second.its == its; };
    if (!its || std::any_of(queue_.begin(), queue_.end(), same)) return;
    queue_.insert({due, {std::move(its), tries}});
    queued_.notify_all();
}

void model_table::compile() {
    std::unique_lock hold(queue_lock_);
    while (!has_ended_) {
        uint64_t now = burst_now();
        if (queue_.empty()) {
            queued_.wait(hold);
        } else if (uint64_t due = queue_.begin()->first; due > now) {
            queued_.wait_for(hold, std::chrono::nanoseconds(due - now));
        } else {
            waiting next = std::move(queue_.begin()->second);
            queue_.erase(queue_.begin());
            hold.unlock();
            prepare(std::move(next));
            hold.lock();
        }
    }
}

void model_table::prepare(waiting next) {
    if (next.its.use_count() == 1 || next.its->is_ready() || next.its->prepare()) return;
    const model_options &o = next.its->options();
    fprintf(stderr, "burst-oip: %s/%s goes by way of Python%s: %s\n", o.name.c_str(),
            o.version.c_str(), next.tries < MOST_TRIES ? " for now" : "", burst_why());
    if (next.tries >= MOST_TRIES) return;
    uint64_t pause = FIRST_PAUSE_NS << next.tries;
    queue(std::move(next.its), burst_now() + pause, next.tries + 1);
}

} // namespace oip
