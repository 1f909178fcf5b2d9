/* Protobuf by hand: what of a ModelInferRequest this door answers itself, and the answers.
 *
 * A message is looked at where it lies, and nothing is allocated by what it claims: at most
 * MOST_TENSORS views of it. `read_request` takes the usual form alone, each field at most once. For
 * any other message it returns false, whether that is wrong or only unusual: Python's door decodes
 * it then, and says what is wrong. So no text of an error stands here, and none can differ. */
#ifndef OIP_WIRE_H
#define OIP_WIRE_H

#include <grpcpp/support/byte_buffer.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace oip {

enum : uint32_t { MOST_RANK = 8, MOST_TENSORS = 64 };

/* A part of a region of shared memory. */
struct place {
    std::string_view region;
    uint64_t offset = 0, bytes = 0;
};

struct given_tensor {
    std::string_view name, datatype;
    std::array<uint32_t, MOST_RANK> shape;
    uint32_t rank = 0;
    bool is_placed = false;
    place where;             /* if it is placed */
    std::string_view values; /* if not */
};

struct wanted_tensor {
    std::string_view name;
    bool is_placed = false;
    place where;
};

/* Views of the message. */
struct infer_request {
    std::string_view model, version, id;
    std::vector<given_tensor> given;
    std::vector<wanted_tensor> wanted;
};

bool read_request(std::string_view packet, infer_request *out);

/* A ModelInferResponse: all outputs first, then the values of those that are not placed. */
class answer_writer {
public:
    answer_writer(std::string_view model, std::string_view version, std::string_view id);
    void output(std::string_view name, std::string_view datatype, const uint32_t *shape,
                uint32_t rank, const place *where);
    void values(const void *bytes, size_t n); /* copied */
    grpc::ByteBuffer finish();

private:
    void flush();

    std::string head_;
    std::vector<grpc::Slice> slices_;
};

} // namespace oip
#endif
