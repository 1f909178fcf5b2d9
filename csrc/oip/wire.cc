#include "oip/wire.h"

#include <algorithm>
#include <utility>

namespace oip {
namespace {

enum : uint32_t { VARINT = 0, BYTES = 2 };
enum : size_t { FEW = 4096 }; /* bytes that are copied rather than given a slice of their own */

constexpr uint32_t tag(uint32_t field, uint32_t type) { return field << 3 | type; }

/* The fields of a message, from its first byte to its last. A call that returns false leaves it at
 * no place of use. */
class fields {
public:
    explicit fields(std::string_view bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}
    bool has_more() const { return at_ < end_; }
    bool next(uint32_t *found) {
        uint64_t v;
        if (!number(&v) || v > UINT32_MAX) return false;
        *found = uint32_t(v);
        return true;
    }
    bool number(uint64_t *v) {
        *v = 0;
        for (int shift = 0; at_ < end_ && shift < 64; shift += 7) {
            uint8_t byte = uint8_t(*at_++);
            *v |= uint64_t(byte & 127) << shift;
            if (byte < 128) return shift < 63 || byte < 2;
        }
        return false;
    }
    bool bytes(std::string_view *out) {
        uint64_t n;
        if (!number(&n) || n > uint64_t(end_ - at_)) return false;
        *out = {at_, size_t(n)};
        at_ += n;
        return true;
    }
    /* The same of a field that may come once. */
    bool bytes_once(std::string_view *out, bool *is_there) {
        if (*is_there) return false;
        *is_there = true;
        return bytes(out);
    }

private:
    const char *at_, *end_;
};

/* Valid UTF-8, as protobuf has strings; other such texts are equal to names that are known. */
bool is_ascii(std::string_view text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return uint8_t(c) < 128; });
}

/* InferParameter: a string, or an integer from 0 on. */
bool read_value(std::string_view value, std::string_view *text, uint64_t *number, bool *is_text) {
    fields in(value);
    uint32_t found;
    if (!in.has_more() || !in.next(&found)) return false;
    *is_text = found == tag(3, BYTES);
    if (*is_text) return in.bytes(text) && !in.has_more();
    return found == tag(2, VARINT) && in.number(number) && *number <= INT64_MAX && !in.has_more();
}

struct place_reader {
    place found;
    bool has_region = false, has_offset = false, has_bytes = false;

    /* An entry of the map of parameters. */
    bool read(std::string_view entry) {
        std::string_view key, value, text;
        uint64_t number = 0;
        bool has_key = false, has_value = false, is_text;
        fields in(entry);
        for (uint32_t t; in.has_more();)
            if (!in.next(&t) || !(t == tag(1, BYTES)   ? in.bytes_once(&key, &has_key)
                                  : t == tag(2, BYTES) ? in.bytes_once(&value, &has_value)
                                                       : false))
                return false;
        if (!has_value || !read_value(value, &text, &number, &is_text)) return false;
        if (key == "shared_memory_region" && is_text) {
            found.region = text;
            return !std::exchange(has_region, true);
        }
        if (key == "shared_memory_offset" && !is_text) {
            found.offset = number;
            return !std::exchange(has_offset, true);
        }
        if (key == "shared_memory_byte_size" && !is_text) {
            found.bytes = number;
            return !std::exchange(has_bytes, true);
        }
        return false;
    }
    /* All of a place, or nothing. */
    bool finish(bool *is_placed, place *where) const {
        *is_placed = has_region, *where = found;
        return has_region == has_bytes && (has_region || !has_offset);
    }
};

bool add_size(given_tensor *t, uint64_t size) {
    if (size > UINT32_MAX || t->rank == MOST_RANK) return false;
    t->shape[t->rank++] = uint32_t(size);
    return true;
}

bool add_sizes(given_tensor *t, std::string_view packed) {
    fields in(packed);
    for (uint64_t size; in.has_more();)
        if (!in.number(&size) || !add_size(t, size)) return false;
    return true;
}

bool read_given(std::string_view bytes, given_tensor *t) {
    bool has_name = false, has_type = false;
    place_reader parameters;
    fields in(bytes);
    for (uint32_t found; in.has_more();) {
        std::string_view part;
        uint64_t size;
        if (!in.next(&found)) return false;
        switch (found) {
        case tag(1, BYTES):
            if (!in.bytes_once(&t->name, &has_name)) return false;
            break;
        case tag(2, BYTES):
            if (!in.bytes_once(&t->datatype, &has_type)) return false;
            break;
        case tag(3, BYTES):
            if (!in.bytes(&part) || !add_sizes(t, part)) return false;
            break;
        case tag(3, VARINT):
            if (!in.number(&size) || !add_size(t, size)) return false;
            break;
        case tag(4, BYTES):
            if (!in.bytes(&part) || !parameters.read(part)) return false;
            break;
        default: return false;
        }
    }
    return parameters.finish(&t->is_placed, &t->where);
}

bool read_wanted(std::string_view bytes, wanted_tensor *t) {
    bool has_name = false;
    place_reader parameters;
    fields in(bytes);
    for (uint32_t found; in.has_more();) {
        std::string_view part;
        if (!in.next(&found)) return false;
        if (found == tag(1, BYTES)) {
            if (!in.bytes_once(&t->name, &has_name)) return false;
        } else if (found != tag(2, BYTES) || !in.bytes(&part) || !parameters.read(part)) {
            return false;
        }
    }
    return parameters.finish(&t->is_placed, &t->where);
}

/* Raw contents belong to the inputs that are not placed, in their order. */
bool give_values(infer_request *r, const std::vector<std::string_view> &raw) {
    size_t taken = 0;
    for (given_tensor &t : r->given) {
        if (t.is_placed) continue;
        if (taken == raw.size()) return false;
        t.values = raw[taken++];
    }
    return taken == raw.size();
}

struct request_reader {
    infer_request *out;
    std::vector<std::string_view> raw;
    bool has_model = false, has_version = false, has_id = false;

    bool read(uint32_t found, fields &in) {
        std::string_view part;
        switch (found) {
        case tag(1, BYTES): return in.bytes_once(&out->model, &has_model);
        case tag(2, BYTES): return in.bytes_once(&out->version, &has_version);
        case tag(3, BYTES): return in.bytes_once(&out->id, &has_id) && is_ascii(out->id);
        case tag(5, BYTES):
            if (out->given.size() == MOST_TENSORS || !in.bytes(&part)) return false;
            out->given.emplace_back();
            return read_given(part, &out->given.back());
        case tag(6, BYTES):
            if (out->wanted.size() == MOST_TENSORS || !in.bytes(&part)) return false;
            out->wanted.emplace_back();
            return read_wanted(part, &out->wanted.back());
        case tag(7, BYTES):
            if (raw.size() == MOST_TENSORS || !in.bytes(&part)) return false;
            raw.push_back(part);
            return true;
        default: return false; /* parameters of the request among them */
        }
    }
};

/* ---- writing --------------------------------------------------------------------------------- */

void put(std::string &to, uint64_t v) {
    for (; v > 127; v >>= 7) to += char(v | 128);
    to += char(v);
}

void put_bytes(std::string &to, uint32_t field, std::string_view bytes) {
    put(to, tag(field, BYTES));
    put(to, bytes.size());
    to += bytes;
}

void put_parameter(std::string &to, std::string_view name, const std::string &value) {
    std::string entry;
    put_bytes(entry, 1, name);
    put_bytes(entry, 2, value);
    put_bytes(to, 4, entry);
}

std::string as_number(uint64_t v) {
    std::string found;
    put(found, tag(2, VARINT));
    put(found, v);
    return found;
}

void put_place(std::string &to, const place &where) {
    std::string region;
    put_bytes(region, 3, where.region);
    put_parameter(to, "shared_memory_region", region);
    put_parameter(to, "shared_memory_byte_size", as_number(where.bytes));
    if (where.offset) put_parameter(to, "shared_memory_offset", as_number(where.offset));
}

} // namespace

bool read_request(std::string_view packet, infer_request *out) {
    request_reader reader{out, {}};
    fields in(packet);
    for (uint32_t found; in.has_more();)
        if (!in.next(&found) || !reader.read(found, in)) return false;
    return give_values(out, reader.raw);
}

answer_writer::answer_writer(std::string_view model, std::string_view version,
                             std::string_view id) {
    put_bytes(head_, 1, model);
    put_bytes(head_, 2, version);
    if (!id.empty()) put_bytes(head_, 3, id);
}

void answer_writer::output(std::string_view name, std::string_view datatype, const uint32_t *shape,
                           uint32_t rank, const place *where) {
    std::string tensor, sizes;
    put_bytes(tensor, 1, name);
    put_bytes(tensor, 2, datatype);
    for (uint32_t i = 0; i < rank; i++) put(sizes, shape[i]);
    if (rank) put_bytes(tensor, 3, sizes);
    if (where) put_place(tensor, *where);
    put_bytes(head_, 5, tensor);
}

void answer_writer::values(const void *bytes, size_t n) {
    if (n <= FEW) return put_bytes(head_, 6, {static_cast<const char *>(bytes), n});
    put(head_, tag(6, BYTES));
    put(head_, n);
    flush();
    slices_.emplace_back(bytes, n);
}

void answer_writer::flush() {
    if (!head_.empty()) slices_.emplace_back(head_);
    head_.clear();
}

grpc::ByteBuffer answer_writer::finish() {
    flush();
    return grpc::ByteBuffer(slices_.data(), slices_.size());
}

} // namespace oip
