/* The calls of clients: how many there may be, how long each has, and what they hold.
 *
 * A call *waits* until its message is whole, then the door *works* for it, and then its answer
 * *goes* to the client. A call that waits may have to yield its place to one of a machine that has
 * fewer; one that the door works for never does. A call whose answer goes has no place any more,
 * also where the answer is a refusal: it is bounded by its bytes and its time alone, so no client
 * is refused for what another one does not read. Where such answers take too much memory, those of
 * the machine that has most of them are cut.
 *
 * A call that waits, or whose answer goes, is ended when its time is over. All of it is looked at
 * four times a second (`look`), together with this process's memory: gRPC says nothing of messages
 * that are not whole, so they are what is left when all else is taken off. The rules and the words
 * are those of Python's door (driver/service/peer_limiter.py,
 * driver/gateways/oip/unread_answers.py), which is also the one that counts streams: here they have
 * no place, and only what they hold is counted. */
#ifndef OIP_VISITS_H
#define OIP_VISITS_H

#include <grpcpp/support/status.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

namespace oip {

struct limits {
    uint64_t message = 0, requests = 0, connections = 0, streams = 0;
    double patience = 0, slowest = 0, idle = 0;
    uint64_t incomplete = 0;
    /* "64,30.0,…", in this order. Throws std::invalid_argument. */
    static limits of(const std::string &text);
    double seconds_for(uint64_t bytes) const { return patience + double(bytes) / slowest; }
    static uint64_t of_all(uint64_t of_one) { return of_one + of_one / 2; }
};

/* What gRPC calls a peer, without its escapes: "ipv6:[::1]:80". */
std::string plain_peer(const std::string &peer);

/* A machine's name among those of visits, of what gRPC calls its peer. */
std::string machine_of(const std::string &peer);

class visit {
public:
    virtual ~visit() = default;
    virtual std::shared_ptr<visit> held() = 0; /* NULL: it is about to leave */
    /* From any thread. An answer that is not read is cut, without a word. */
    virtual void end(grpc::StatusCode code, const std::string &text) = 0;
    virtual void cut() = 0;

private:
    friend class visit_table;
    enum class state { WAITS, WORKS, GOES };
    std::string machine_;
    state state_ = state::WAITS;
    bool has_place_ = false, is_last_ = false, is_cut_ = false;
    uint64_t since_ = 0, until_ = 0;  /* CLOCK_MONOTONIC ns */
    uint64_t asked_ = 0, answer_ = 0; /* bytes */
};

/* Safe from any thread. What it ends is ended without its lock, for a visit's last owner leaves the
 * table. */
class visit_table {
public:
    explicit visit_table(const limits &its);
    /* Counts a call that waits, or whose refusal goes: what its client is told, else "". */
    std::string enter(visit *v, std::string machine, bool is_stream);
    /* Its message is there, and takes so many bytes; likewise. */
    std::string work(visit *v, uint64_t bytes);
    /* An answer of so many bytes goes to its client; `is_last`: and the call ends with it. */
    void go(visit *v, uint64_t bytes, bool is_last);
    void was_read(visit *v); /* of a stream: its client has the answer */
    void leave(visit *v);
    void look();

private:
    using visits = std::unordered_set<visit *>;
    struct account {
        uint64_t calls = 0, inside = 0, present = 0; /* present: they have places */
        uint64_t asked = 0;                          /* bytes */
    };
    struct ending {
        std::shared_ptr<visit> its;
        grpc::StatusCode code; /* OK: it is cut */
        std::string text;
    };
    using endings = std::vector<ending>;
    bool may_enter(const std::string &machine, bool is_stream, endings *to);
    bool make_room(const std::string &machine, endings *to);
    void refuse(visit *v, grpc::StatusCode code, const std::string &text, endings *to);
    void cut(visit *v, endings *to);
    static void carry_out(const endings &all);
    void hold(visit *v, uint64_t asked, uint64_t answer);
    void goes_now(visit *v, uint64_t bytes, bool is_last);
    void end_overdue(endings *to);
    void bound_memory(endings *to);
    void evict_waiting(uint64_t count, endings *to);
    void evict_unread(uint64_t bytes, endings *to);

    const limits limits_;
    std::mutex lock_;
    visits inside_, going_; /* calls that wait or that it works for; whose answer goes */
    std::map<std::string, account> accounts_;
    uint64_t present_ = 0, asked_ = 0, unread_ = 0, idle_bytes_ = 0;
    int with_answers_ = 0, beyond_ = 0; /* looks, as in `bound_memory` */
};

} // namespace oip
#endif
