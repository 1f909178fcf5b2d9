#include "oip/control.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <stdexcept>
#include <sys/socket.h>

namespace oip {
namespace {

enum : size_t { LONGEST = 1 << 16 };

/* The fields of a packet, one after another. Throws std::invalid_argument at its end. */
class words {
public:
    words(const char *bytes, size_t n) : at_(bytes), end_(bytes + n) {}
    bool has_more() const { return at_ < end_; }
    std::string text() {
        if (!has_more()) throw std::invalid_argument("a packet that is too short");
        const char *stop = std::find(at_, end_, '\0');
        std::string found(at_, stop);
        at_ = stop == end_ ? end_ : stop + 1;
        return found;
    }
    uint64_t number() { return number_of(text()); }
    static uint64_t number_of(const std::string &text) {
        uint64_t found = 0;
        const char *end = text.data() + text.size();
        auto [stop, error] = std::from_chars(text.data(), end, found);
        if (error != std::errc() || stop != end) throw std::invalid_argument("number: " + text);
        return found;
    }

private:
    const char *at_, *end_;
};

port port_of(words &in) {
    port p;
    p.name = in.text(), p.datatype = in.text();
    p.element = uint32_t(in.number());
    std::string sizes = in.text();
    p.has_rank = sizes != "?";
    for (size_t at = 0; p.has_rank && at < sizes.size();) {
        size_t comma = std::min(sizes.find(',', at), sizes.size());
        p.sizes.push_back(uint32_t(words::number_of(sizes.substr(at, comma - at))));
        at = comma + 1;
    }
    return p;
}

class servant {
public:
    servant(door &its, const limits &most) : door_(its), most_(most) {}
    std::string obey(words in, owned_fd fd) {
        std::string what = in.text();
        uint64_t handle = in.number();
        if (what == "model") return add_model(handle, in, std::move(fd)), "ok";
        if (what == "gone") return door_.models.remove(handle), "ok";
        if (what == "region") return add_region(handle, in, std::move(fd)), "ok";
        if (what == "lost") return door_.regions.remove(handle), "ok";
        if (what == "used") return std::to_string(door_.regions.used(handle));
        if (what == "count") return figures(door_.models.counts(handle));
        throw std::invalid_argument(what);
    }

private:
    void add_region(uint64_t handle, words &in, owned_fd fd) {
        std::string name = in.text();
        uint64_t begin = in.number(), bytes = in.number();
        if (fd.get() < 0) throw std::invalid_argument("a region without its file");
        door_.regions.add(handle, name, std::make_shared<region>(std::move(fd), begin, bytes));
    }
    void add_model(uint64_t handle, words &in, owned_fd fd) {
        model_options o;
        o.name = in.text(), o.version = in.text();
        uint64_t version = words::number_of(o.version);
        std::string name = o.name;
        if (fd.get() < 0) return door_.models.add(handle, name, version, nullptr);
        o.device = in.text();
        o.instances = uint32_t(in.number()), o.most_rows = in.number();
        o.is_sustained = in.number();
        o.offset = in.number(), o.bytes = in.number();
        for (uint64_t n = in.number(); n; n--) o.inputs.push_back(port_of(in));
        while (in.has_more()) o.outputs.push_back(port_of(in));
        o.most_bytes = most_.message, o.memory = std::move(fd);
        if (!fits(o)) return door_.models.add(handle, name, version, nullptr);
        door_.models.add(handle, name, version, std::make_shared<model>(std::move(o)));
    }
    /* What the model is known to need is no more than a message may have. */
    static bool fits(const model_options &o) {
        uint64_t all = 0;
        for (const auto *side : {&o.inputs, &o.outputs})
            for (const port &p : *side) {
                auto n =
                    bytes_of(p.sizes.data(), uint32_t(p.sizes.size()), p.element, o.most_bytes);
                if (p.sizes.size() > MOST_RANK || !n || (all += *n) > o.most_bytes) return false;
            }
        return true;
    }
    static std::string figures(const model_counts &c) {
        std::string found;
        for (uint64_t each : {c.requests, c.rows, c.last_ms, c.input_ns, c.infer_ns, c.output_ns,
                              c.late, c.late_ns})
            found += std::to_string(each) + ' ';
        return found;
    }

    door &door_;
    const limits most_;
};

/* Bytes of a packet, and the descriptor that came along, unless this process may have no more of
 * them; 0: the other side has ended. */
size_t receive(int socket, char *bytes, owned_fd *fd) {
    alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))];
    iovec part = {bytes, LONGEST};
    msghdr m = {};
    m.msg_iov = &part, m.msg_iovlen = 1, m.msg_control = room, m.msg_controllen = sizeof room;
    ssize_t n;
    do n = recvmsg(socket, &m, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n <= 0 || m.msg_flags & MSG_TRUNC) return 0;
    const cmsghdr *head = CMSG_FIRSTHDR(&m);
    int found = -1;
    if (head && head->cmsg_type == SCM_RIGHTS) memcpy(&found, CMSG_DATA(head), sizeof found);
    *fd = owned_fd(found);
    return size_t(n);
}

} // namespace

void obey(int socket, door &its, const limits &most) {
    servant servant(its, most);
    std::vector<char> bytes(LONGEST);
    for (;;) {
        owned_fd fd;
        size_t n = receive(socket, bytes.data(), &fd);
        if (!n) return;
        std::string said;
        try {
            said = servant.obey(words(bytes.data(), n), std::move(fd));
        } catch (const std::exception &error) {
            said = std::string("no ") + error.what();
        }
        if (send(socket, said.data(), said.size(), MSG_NOSIGNAL) < 0) return;
    }
}

} // namespace oip
