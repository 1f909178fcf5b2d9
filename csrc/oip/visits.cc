#include "oip/visits.h"

#include "libburst/burst.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cstdio>
#include <cstring>
#include <malloc.h>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <unistd.h>
#include <utility>

namespace oip {
namespace {

const uint64_t OF_ONE = UINT64_C(1) << 30, OF_ALL = UINT64_C(3) << 29; /* bytes that are held */
const double YIELDS = 0.1; /* of the patience has a message before its call may have to yield */
const uint64_t SMALL = 16 << 10;   /* bytes of a message for which there is always room */
const uint64_t OF_CALL = 64 << 10; /* bytes that count for a call whose answer goes: 12 and more */
const uint64_t LARGE = 16 << 20;   /* bytes that are worth giving back */
const int FEW = 8;                 /* looks */
const char EVICTED[] = "other calls need this one's place or memory, because its request was not "
                       "there: send it again";

uint64_t ns(double seconds) { return uint64_t(seconds * 1e9); }

/* Of IPv6 the network, in which a machine has 2**64 addresses; not on a link, which all share. */
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

std::string plain_peer(const std::string &peer) {
    std::string found;
    for (size_t i = 0; i < peer.size(); i++) {
        unsigned byte;
        if (peer[i] == '%' && sscanf(peer.c_str() + i + 1, "%2x", &byte) == 1) {
            found += char(byte), i += 2;
        } else {
            found += peer[i];
        }
    }
    return found;
}

std::string machine_of(const std::string &peer) {
    size_t colon = peer.find(':');
    if (colon == std::string::npos || peer.compare(0, 2, "ip")) return peer.substr(0, colon);
    std::string rest = plain_peer(peer.substr(colon + 1));
    std::string host = rest.substr(0, rest.rfind(':'));
    if (peer.compare(0, 5, "ipv6:")) return host;
    if (!host.empty() && host.front() == '[') host = host.substr(1, host.rfind(']') - 1);
    return machine_of_ipv6(host);
}

visit_table::visit_table(const limits &its) : limits_(its), idle_bytes_(private_bytes()) {}

std::string visit_table::enter(visit *v, std::string machine, bool is_stream) {
    endings ended;
    std::unique_lock guard(lock_);
    bool is_in = may_enter(machine, is_stream, &ended);
    account &its = accounts_[machine];
    v->machine_ = std::move(machine), v->has_place_ = is_in && !is_stream;
    v->state_ = is_stream ? visit::state::WORKS : visit::state::WAITS;
    v->since_ = burst_now();
    v->until_ = v->since_ + ns(limits_.seconds_for(limits_.message));
    inside_.insert(v), its.inside++, its.calls++;
    its.present += v->has_place_, present_ += v->has_place_;
    if (!is_in) goes_now(v, 0, true);
    guard.unlock();
    carry_out(ended);
    return is_in ? "" : std::to_string(limits_.requests) + " requests run; send this one later";
}

/* Under the lock, as all below but what takes it. */
bool visit_table::may_enter(const std::string &machine, bool is_stream, endings *to) {
    uint64_t most = 2 * limits_.requests + limits_.streams; /* also those that have no place */
    if (inside_.size() >= limits::of_all(most)) return false;
    auto its = accounts_.find(machine);
    if (its != accounts_.end() && its->second.inside >= most) return false;
    return is_stream || make_room(machine, to);
}

/* A place for a call of that machine: that of one of its own that waits for long, or of a machine
 * that has more than it. */
bool visit_table::make_room(const std::string &machine, endings *to) {
    auto present = [&](const std::string &name) {
        auto found = accounts_.find(name);
        return found == accounts_.end() ? 0 : found->second.present;
    };
    uint64_t its = present(machine), now = burst_now();
    bool has_share = its >= limits_.requests;
    if (present_ < limits::of_all(limits_.requests) && !has_share) return true;
    visit *found = nullptr;
    auto rank = [&](visit *each) { return std::pair(~present(each->machine_), each->since_); };
    for (visit *v : inside_) {
        bool is_own = v->machine_ == machine;
        if (v->state_ != visit::state::WAITS || (!is_own && has_share)) continue;
        if (is_own && now - v->since_ < ns(YIELDS * limits_.patience)) continue;
        if (!is_own && present(v->machine_) <= its) continue;
        if (!found || rank(v) < rank(found)) found = v;
    }
    if (found) refuse(found, grpc::StatusCode::RESOURCE_EXHAUSTED, EVICTED, to);
    return found;
}

/* Of a call that waits. Its place is free now. */
void visit_table::refuse(visit *v, grpc::StatusCode code, const std::string &text, endings *to) {
    goes_now(v, 0, true);
    if (auto its = v->held()) to->push_back({std::move(its), code, text});
}

/* Of a call whose answer goes. Its bytes are counted until it has left. */
void visit_table::cut(visit *v, endings *to) {
    v->is_cut_ = true;
    if (auto its = v->held()) to->push_back({std::move(its), grpc::StatusCode::OK, ""});
}

void visit_table::carry_out(const endings &all) {
    for (const ending &each : all)
        if (each.code == grpc::StatusCode::OK) each.its->cut();
        else each.its->end(each.code, each.text);
}

void visit_table::hold(visit *v, uint64_t asked, uint64_t answer) {
    accounts_[v->machine_].asked += asked - v->asked_, asked_ += asked - v->asked_;
    unread_ += answer - v->answer_;
    v->asked_ = asked, v->answer_ = answer;
}

void visit_table::goes_now(visit *v, uint64_t bytes, bool is_last) {
    account &its = accounts_[v->machine_];
    if (std::exchange(v->has_place_, false)) its.present--, present_--;
    if (inside_.erase(v)) its.inside--, going_.insert(v);
    v->state_ = visit::state::GOES, v->is_last_ = is_last;
    v->until_ = burst_now() + ns(limits_.seconds_for(bytes));
    hold(v, v->asked_, bytes + OF_CALL);
}

std::string visit_table::work(visit *v, uint64_t bytes) {
    std::lock_guard guard(lock_);
    uint64_t its = accounts_[v->machine_].asked;
    uint64_t more = bytes > v->asked_ ? bytes - v->asked_ : 0;
    if (more > SMALL && (its + more > OF_ONE || asked_ + more > OF_ALL)) {
        auto mib = [](uint64_t n) { return std::to_string(n >> 20); };
        return "requests of yours hold " + mib(its) + " MiB of " + mib(OF_ONE) + ", and all " +
               mib(asked_) + " of " + mib(OF_ALL) + ": there is no room for " + mib(bytes) +
               " more; send this one again later";
    }
    if (v->state_ == visit::state::WAITS) v->state_ = visit::state::WORKS;
    hold(v, bytes, v->answer_);
    return "";
}

void visit_table::go(visit *v, uint64_t bytes, bool is_last) {
    std::lock_guard guard(lock_);
    if (!v->is_last_) goes_now(v, bytes, is_last);
}

void visit_table::was_read(visit *v) {
    std::lock_guard guard(lock_);
    if (v->is_last_ || !going_.erase(v)) return;
    accounts_[v->machine_].inside++, inside_.insert(v);
    v->state_ = visit::state::WORKS;
    hold(v, v->asked_, 0);
}

void visit_table::leave(visit *v) {
    std::lock_guard guard(lock_);
    if (!inside_.count(v) && !going_.count(v)) return;
    goes_now(v, 0, true);
    going_.erase(v);
    hold(v, 0, 0);
    if (!--accounts_[v->machine_].calls) accounts_.erase(v->machine_);
}

void visit_table::look() {
    endings ended;
    std::unique_lock guard(lock_);
    bound_memory(&ended);
    end_overdue(&ended);
    guard.unlock();
    carry_out(ended);
}

void visit_table::end_overdue(endings *to) {
    std::ostringstream told;
    told << "the request did not come whole within " << limits_.seconds_for(limits_.message)
         << " s: send large tensors in shared memory";
    uint64_t now = burst_now();
    std::vector<visit *> overdue;
    for (visit *v : going_)
        if (!v->is_cut_ && v->until_ <= now) cut(v, to);
    for (visit *v : inside_)
        if (v->state_ == visit::state::WAITS && v->until_ <= now) overdue.push_back(v);
    for (visit *v : overdue) refuse(v, grpc::StatusCode::DEADLINE_EXCEEDED, told.str(), to);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* What is beyond the usual is of answers if these are most of it, else of messages that are not
 * whole. Those pay for answers that are being made, or that were cut a moment ago, only if it
 * stays. */
void visit_table::bound_memory(endings *to) {
    if (inside_.empty() && going_.empty()) {
        /* what the C library keeps of freed memory would be usual from now on, also where it comes
         * little by little: so the least is what is usual */
        uint64_t found = private_bytes();
        if (found > idle_bytes_ + LARGE) malloc_trim(0), idle_bytes_ = found = private_bytes();
        idle_bytes_ = std::min(idle_bytes_, found);
        with_answers_ = beyond_ = 0;
        return;
    }
    auto works = [](const visit *v) { return v->state_ == visit::state::WORKS; };
    bool has_answers = !going_.empty() || std::any_of(inside_.begin(), inside_.end(), works);
    with_answers_ = has_answers ? FEW : std::max(0, with_answers_ - 1);
    uint64_t usual = idle_bytes_ + asked_ + limits_.incomplete;
    uint64_t found = private_bytes();
    if (found > usual) malloc_trim(0), found = private_bytes();
    uint64_t excess = found > usual ? found - usual : 0;
    uint64_t over = unread_ > limits_.incomplete ? unread_ - limits_.incomplete : 0;
    beyond_ = excess ? beyond_ + 1 : 0;
    if (over || (excess && 2 * unread_ > limits_.incomplete + excess)) {
        beyond_ = 0;
        evict_unread(std::max(over, excess), to);
    } else if (excess && (!with_answers_ || beyond_ >= FEW)) {
        evict_waiting(1 + excess / limits_.message, to);
    }
}

/* Ends so many calls, each of the machine that has most, and there the one whose time is over
 * first. */
void visit_table::evict_waiting(uint64_t count, endings *to) {
    auto rank = [&](visit *v) { return std::pair(~accounts_[v->machine_].present, v->until_); };
    for (; count; count--) {
        visit *found = nullptr;
        for (visit *v : inside_)
            if (v->state_ == visit::state::WAITS && (!found || rank(v) < rank(found))) found = v;
        if (!found) return;
        refuse(found, grpc::StatusCode::RESOURCE_EXHAUSTED, EVICTED, to);
    }
}

/* Cuts answers until so many bytes are or will be free; likewise, but by the bytes of answers. */
void visit_table::evict_unread(uint64_t bytes, endings *to) {
    struct pile {
        uint64_t bytes = 0;
        std::vector<visit *> calls;
    };
    std::map<std::string_view, pile> piles;
    uint64_t free = 0;
    for (visit *v : going_) {
        if (v->is_cut_) {
            free += v->answer_;
            continue;
        }
        pile &its = piles[v->machine_];
        its.bytes += v->answer_, its.calls.push_back(v);
    }
    for (auto &[name, its] : piles)
        std::sort(its.calls.begin(), its.calls.end(),
                  [](visit *a, visit *b) { return a->until_ > b->until_; });
    auto by_bytes = [](const auto &a, const auto &b) { return a.second.bytes < b.second.bytes; };
    while (free < bytes && !piles.empty()) {
        auto most = std::max_element(piles.begin(), piles.end(), by_bytes);
        pile &its = most->second;
        visit *v = its.calls.back();
        its.calls.pop_back(), its.bytes -= v->answer_, free += v->answer_;
        if (its.calls.empty()) piles.erase(most);
        cut(v, to);
    }
}

} // namespace oip
