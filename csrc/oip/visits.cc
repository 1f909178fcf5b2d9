#include "oip/visits.h"

#include "libburst/burst.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cstdio>
#include <cstring>
#include <malloc.h>
#include <sstream>
#include <stdexcept>
#include <unistd.h>
#include <utility>

namespace oip {
namespace {

const uint64_t OF_ONE = UINT64_C(1) << 30, OF_ALL = UINT64_C(3) << 29; /* bytes that are held */
const double YIELDS = 0.1; /* of the patience has a message before its call may have to yield */
const uint64_t SMALL = 16 << 10; /* bytes of a message for which there is always room */
const int FEW = 8;               /* looks */
const char EVICTED[] = "other calls need this one's place or memory, because its request was not "
                       "there: send it again";

uint64_t ns(double seconds) { return uint64_t(seconds * 1e9); }

std::string decoded(const std::string &text) {
    std::string found;
    for (size_t i = 0; i < text.size(); i++) {
        unsigned byte;
        if (text[i] == '%' && sscanf(text.c_str() + i + 1, "%2x", &byte) == 1) {
            found += char(byte), i += 2;
        } else {
            found += text[i];
        }
    }
    return found;
}

/* Of IPv6 the network, in which a machine has 2**64 addresses; not on a link, where all share one. */
std::string machine_of_ipv6(const std::string &host) {
    in6_addr a;
    char text[INET6_ADDRSTRLEN];
    if (inet_pton(AF_INET6, host.substr(0, host.find('%')).c_str(), &a) != 1) return host;
    if (IN6_IS_ADDR_V4MAPPED(&a)) return inet_ntop(AF_INET, a.s6_addr + 12, text, sizeof text);
    if (!IN6_IS_ADDR_LINKLOCAL(&a) && !IN6_IS_ADDR_LOOPBACK(&a)) memset(a.s6_addr + 8, 0, 8);
    return inet_ntop(AF_INET6, &a, text, sizeof text);
}

/* Bytes of this process that are no shared memory. */
uint64_t private_bytes() {
    unsigned long all = 0, resident = 0, shared = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (!file) return 0;
    int n = fscanf(file, "%lu %lu %lu", &all, &resident, &shared);
    fclose(file);
    return n == 3 && resident > shared ? (resident - shared) * uint64_t(sysconf(_SC_PAGESIZE)) : 0;
}

} // namespace

limits limits::of(const std::string &text) {
    limits l;
    char comma;
    std::istringstream in(text);
    in >> l.message >> comma >> l.requests >> comma >> l.connections >> comma >> l.streams >> comma;
    in >> l.patience >> comma >> l.slowest >> comma >> l.idle >> comma >> l.incomplete;
    if (!in || !l.message || l.slowest <= 0) throw std::invalid_argument("limits: " + text);
    return l;
}

std::string machine_of(const std::string &peer) {
    size_t colon = peer.find(':');
    if (colon == std::string::npos || peer.compare(0, 2, "ip")) return peer.substr(0, colon);
    std::string rest = decoded(peer.substr(colon + 1));
    std::string host = rest.substr(0, rest.rfind(':'));
    if (peer.compare(0, 5, "ipv6:")) return host;
    if (!host.empty() && host.front() == '[') host = host.substr(1, host.rfind(']') - 1);
    return machine_of_ipv6(host);
}

visit_table::visit_table(const limits &its) : limits_(its), idle_bytes_(private_bytes()) {}

std::string visit_table::enter(visit *v, std::string machine, bool is_stream) {
    endings ended;
    std::unique_lock guard(lock_);
    std::string why = enter_here(v, std::move(machine), is_stream, &ended);
    guard.unlock();
    carry_out(ended);
    return why;
}

/* Under the lock, as all below but what takes it. */
std::string visit_table::enter_here(visit *v, std::string machine, bool is_stream, endings *to) {
    account &its = accounts_[machine];
    uint64_t most = 2 * limits_.requests + limits_.streams; /* also those that have no place */
    if (its.calls >= most || all_.size() >= limits::of_all(most) ||
        (!is_stream && !make_room(machine, to))) {
        if (!its.calls) accounts_.erase(machine);
        return std::to_string(limits_.requests) + " requests run; send this one later";
    }
    v->machine_ = std::move(machine), v->has_place_ = !is_stream;
    v->state_ = is_stream ? visit::state::WORKS : visit::state::WAITS;
    v->since_ = burst_now();
    v->until_ = v->since_ + ns(limits_.seconds_for(limits_.message));
    all_.insert(v);
    its.calls++;
    its.present += v->has_place_, present_ += v->has_place_;
    return "";
}

/* A place for a call of that machine: that of one of its own that waits for long, or of a machine
 * that has more than it. */
bool visit_table::make_room(const std::string &machine, endings *to) {
    uint64_t its = accounts_[machine].present, now = burst_now();
    bool has_share = its >= limits_.requests;
    if (present_ < limits::of_all(limits_.requests) && !has_share) return true;
    visit *found = nullptr;
    for (visit *v : all_) {
        bool is_own = v->machine_ == machine;
        if (v->state_ != visit::state::WAITS || v->has_ended_ || (!is_own && has_share)) continue;
        if (is_own && now - v->since_ < ns(YIELDS * limits_.patience)) continue;
        if (!is_own && accounts_[v->machine_].present <= its) continue;
        auto rank = [&](visit *each) {
            return std::pair(~accounts_[each->machine_].present, each->since_);
        };
        if (!found || rank(v) < rank(found)) found = v;
    }
    if (found) evict(found, to);
    return found;
}

void visit_table::end(visit *v, grpc::StatusCode code, const std::string &text, endings *to) {
    if (auto its = v->held()) to->push_back({std::move(its), code, text});
}

void visit_table::carry_out(const endings &all) {
    for (const ending &each : all)
        if (each.code == grpc::StatusCode::OK) each.its->cut();
        else each.its->end(each.code, each.text);
}

/* Its place is free now; it leaves when its call has ended. */
void visit_table::evict(visit *v, endings *to) {
    give_place_up(v);
    v->has_ended_ = true;
    if (v->state_ == visit::state::IS_READ) end(v, grpc::StatusCode::OK, "", to);
    else end(v, grpc::StatusCode::RESOURCE_EXHAUSTED, EVICTED, to);
}

void visit_table::give_place_up(visit *v) {
    if (std::exchange(v->has_place_, false)) accounts_[v->machine_].present--, present_--;
}

void visit_table::hold(visit *v, uint64_t visit::*what, uint64_t bytes) {
    account &its = accounts_[v->machine_];
    its.held += bytes - v->*what, held_ += bytes - v->*what;
    v->*what = bytes;
}

std::string visit_table::work(visit *v, uint64_t bytes) {
    std::lock_guard guard(lock_);
    uint64_t its = accounts_[v->machine_].held;
    uint64_t more = bytes > v->asked_ ? bytes - v->asked_ : 0;
    if (more > SMALL && (its + more > OF_ONE || held_ + more > OF_ALL)) {
        auto mib = [](uint64_t n) { return std::to_string(n >> 20); };
        return "requests of yours hold " + mib(its) + " MiB of " + mib(OF_ONE) + ", and all " +
               mib(held_) + " of " + mib(OF_ALL) + ": there is no room for " + mib(bytes) +
               " more; send this one again later";
    }
    if (v->state_ == visit::state::WAITS) v->state_ = visit::state::WORKS;
    hold(v, &visit::asked_, bytes);
    return "";
}

void visit_table::is_read(visit *v, uint64_t bytes) {
    std::lock_guard guard(lock_);
    v->state_ = visit::state::IS_READ;
    v->since_ = burst_now();
    v->until_ = v->since_ + ns(limits_.seconds_for(bytes));
    hold(v, &visit::answer_, bytes);
}

void visit_table::was_read(visit *v) {
    std::lock_guard guard(lock_);
    v->state_ = visit::state::WORKS;
    hold(v, &visit::answer_, 0);
}

void visit_table::leave(visit *v) {
    std::lock_guard guard(lock_);
    if (!all_.erase(v)) return;
    hold(v, &visit::asked_, 0), hold(v, &visit::answer_, 0);
    give_place_up(v);
    if (!--accounts_[v->machine_].calls) accounts_.erase(v->machine_);
}

void visit_table::look() {
    endings ended;
    std::unique_lock guard(lock_);
    bound_memory(&ended);
    uint64_t now = burst_now();
    std::ostringstream told;
    told << "the request did not come whole within " << limits_.seconds_for(limits_.message)
         << " s: send large tensors in shared memory";
    for (visit *v : all_) {
        if (v->state_ == visit::state::WORKS || v->until_ > now) continue;
        bool is_read = v->state_ == visit::state::IS_READ;
        end(v, is_read ? grpc::StatusCode::OK : grpc::StatusCode::DEADLINE_EXCEEDED, told.str(),
            &ended);
    }
    guard.unlock();
    carry_out(ended);
}

/* Ends a call of the machine that has most of them, the one whose time is over first. */
bool visit_table::evict_one(visit::state state, endings *to) {
    visit *found = nullptr;
    auto rank = [&](visit *v) {
        const account &its = accounts_[v->machine_];
        return std::pair(~(state == visit::state::IS_READ ? its.held : its.present), v->until_);
    };
    for (visit *v : all_)
        if (v->state_ == state && !v->has_ended_ && (!found || rank(v) < rank(found))) found = v;
    if (found) evict(found, to);
    return found;
}

void visit_table::bound_memory(endings *to) {
    if (all_.empty()) {
        idle_bytes_ = private_bytes();
        with_answers_ = beyond_ = 0;
        return;
    }
    uint64_t answers = 0;
    bool has_answers = false;
    for (visit *v : all_) {
        has_answers |= v->state_ != visit::state::WAITS;
        answers += v->answer_;
    }
    with_answers_ = has_answers ? FEW : std::max(0, with_answers_ - 1);
    if (answers > limits_.incomplete) evict_one(visit::state::IS_READ, to);
    uint64_t usual = idle_bytes_ + held_ + limits_.incomplete;
    uint64_t found = private_bytes();
    if (found > usual) malloc_trim(0), found = private_bytes();
    uint64_t excess = found > usual ? found - usual : 0;
    beyond_ = excess ? beyond_ + 1 : 0;
    if (!excess) return;
    if (2 * answers > limits_.incomplete + excess) { /* gRPC has copies of them, too */
        beyond_ = 0;
        evict_one(visit::state::IS_READ, to);
        return;
    }
    /* What works for others may have taken it, and gives it back soon. */
    if (with_answers_ && beyond_ < FEW) return;
    for (uint64_t n = 1 + excess / limits_.message; n && evict_one(visit::state::WAITS, to); n--) {}
}

} // namespace oip
