/* Objects in the frames of a camera, in C++: a model file on a device of its own, boxes on standard output, and no frame lost when the
 * device dies. The frames are generated, or raw RGB from a file or a pipe:
 *
 *     make install PREFIX=$HOME/.local
 *     c++ -std=c++17 -O2 -Wall -Wextra -Werror examples/camera.cpp $(pkg-config --cflags --libs libburst) -o camera
 *     ./camera yolo.onnx 640 640 300
 *     ffmpeg -i /dev/video0 -vf scale=640:640 -f rawvideo -pix_fmt rgb24 - | ./camera yolo.onnx 640 640 300 -
 *
 * The model: one input, float32[1, 3, height, width] with values from 0 to 1; one output, float32[1, boxes, 6], of which each row is left,
 * top, right, bottom (pixels), score and class, as detectors give it that suppress overlaps themselves ("end to end"). Two frames are
 * in flight: one is read and converted while the device looks at the other.
 */
#include <burst.hpp>

#include <cinttypes>
#include <cstring>
#include <fstream>
#include <iostream>

namespace {

constexpr float SURE = 0.4f;
constexpr std::uint32_t SIDE = 40; // of the square that generated frames show

struct shape {
    std::uint32_t width, height, boxes;
    std::size_t pixels() const { return std::size_t(width) * height; }
};

/* A bright square that wanders over a dark ground: its left upper corner in that frame. */
std::pair<std::uint32_t, std::uint32_t> corner(const shape &s, std::uint64_t number) {
    return {std::uint32_t(number * 7 % (s.width - SIDE)), std::uint32_t(number * 3 % (s.height - SIDE))};
}

/* Frames of 8-bit RGB, from wherever they come. */
class source {
public:
    source(const shape &s, const std::string &name, std::uint64_t most) : s_(s), most_(most), is_made_(name == "generated") {
        if (!is_made_ && name != "-") file_.open(name, std::ios::binary);
        if (!is_made_ && name != "-" && !file_) throw std::runtime_error(name + " cannot be read");
        in_ = name == "-" ? &std::cin : &file_;
    }
    bool read(std::vector<std::uint8_t> &rgb) {
        if (number_ == most_) return false;
        number_++;
        if (is_made_) return draw(rgb), true;
        return bool(in_->read(reinterpret_cast<char *>(rgb.data()), std::streamsize(rgb.size())));
    }

private:
    void draw(std::vector<std::uint8_t> &rgb) const {
        auto [left, top] = corner(s_, number_);
        std::fill(rgb.begin(), rgb.end(), std::uint8_t(20));
        for (std::uint32_t y = top; y < top + SIDE; y++) std::memset(&rgb[3 * (std::size_t(y) * s_.width + left)], 230, 3 * SIDE);
    }
    shape s_;
    std::uint64_t most_, number_ = 0;
    bool is_made_;
    std::ifstream file_;
    std::istream *in_;
};

/* Memory of one frame and of what was found in it, and the request that names both. */
struct place {
    place(burst::controller &burst, const shape &s)
        : rgb(3 * s.pixels()), pool(12 * s.pixels() + 24 * s.boxes), input(pool.view<float>(0, 3 * s.pixels())),
          found(pool.view<float>(12 * s.pixels(), 6 * s.boxes)),
          request(burst.request({pool.tensor(0, 12 * s.pixels())}, {pool.tensor(12 * s.pixels(), 24 * s.boxes)})) {}
    void convert() { /* plane after plane, from 0 to 1 */
        std::size_t n = rgb.size() / 3;
        for (std::size_t i = 0; i < n; i++)
            for (std::size_t c = 0; c < 3; c++) input[c * n + i] = float(rgb[3 * i + c]) / 255;
    }
    std::vector<std::uint8_t> rgb;
    burst::pool pool;
    burst::span<float> input, found;
    burst::request request;
};

/* The model is not believed: a box may lie anywhere. */
long within(float at, std::uint32_t size) { return at > 0 ? at < float(size) ? long(at) : long(size) - 1 : 0; }

void frame_box(std::vector<std::uint8_t> &rgb, const shape &s, const float *box) {
    const std::uint8_t red[] = {255, 0, 0};
    long left = within(box[0], s.width), top = within(box[1], s.height), right = within(box[2], s.width), bottom = within(box[3], s.height);
    for (long x = left; x <= right; x++)
        for (long y : {top, bottom}) std::memcpy(&rgb[3 * (std::size_t(y) * s.width + std::size_t(x))], red, 3);
    for (long y = top; y <= bottom; y++)
        for (long x : {left, right}) std::memcpy(&rgb[3 * (std::size_t(y) * s.width + std::size_t(x))], red, 3);
}

void tell(std::uint64_t number, place &p, const shape &s) {
    for (const float *box = p.found.begin(); box != p.found.end(); box += 6) {
        if (!(box[4] >= SURE)) continue;
        std::printf("%" PRIu64 ": class %d %.2f at %.0f %.0f %.0f %.0f\n", number, int(within(box[5], 1000)), double(box[4]), double(box[0]),
                    double(box[1]), double(box[2]), double(box[3]));
        frame_box(p.rgb, s, box);
    }
    std::fflush(stdout);
}

void save(const std::string &path, const shape &s, const std::vector<std::uint8_t> &rgb) {
    std::ofstream out(path, std::ios::binary);
    out << "P6 " << s.width << " " << s.height << " 255\n";
    out.write(reinterpret_cast<const char *>(rgb.data()), std::streamsize(rgb.size()));
    if (!out.flush()) throw std::runtime_error(path + " cannot be written");
}

burst::compiled prepare(burst::client &device, const std::string &path, const shape &s) {
    const std::uint32_t image[] = {1, 3, s.height, s.width}, boxes[] = {1, s.boxes, 6};
    return device.prepare_file(path, {{"float32", 4, image}}, {{"float32", 3, boxes}}, burst::after_ms(60000));
}

int watch(const std::string &path, const shape &s, source &frames, const std::string &picture) {
    burst::client device(path.size() > 7 && path.substr(path.size() - 7) == ".tflite" ? "litert" : "onnxruntime");
    burst_options options{};
    options.depth = 2, options.recover = 1;
    burst::controller burst(prepare(device, path, s), options);
    place places[] = {{burst, s}, {burst, s}};
    std::uint64_t sent = 0, told = 0, revivals = 0, begin = burst_now();
    for (bool is_more = true; is_more || told < sent;) {
        place &next = places[sent % 2];
        if (is_more && (is_more = frames.read(next.rgb))) next.convert(), burst.submit(next.request), sent++;
        if (is_more && sent - told < 2) continue;
        if (told == sent) break;
        burst.await(burst::after_ms(60000));
        tell(told + 1, places[told % 2], s);
        if (!picture.empty()) save(picture, s, places[told % 2].rgb);
        told++;
        if (burst.count().revivals > revivals) revivals = burst.count().revivals, std::fprintf(stderr, "camera: the device died and was started again\n");
    }
    std::printf("%" PRIu64 " frames, %.1f a second\n", told, double(told) * 1e9 / double(burst_now() - begin));
    return 0;
}

} // namespace

int main(int argc, char **argv) {
    auto number = [&](int i, unsigned long usual) { return argc > i ? std::strtoul(argv[i], nullptr, 10) : usual; };
    const shape s{std::uint32_t(number(2, 0)), std::uint32_t(number(3, 0)), std::uint32_t(number(4, 0))};
    if (argc < 5 || s.width <= SIDE || s.height <= SIDE || s.width > 8192 || s.height > 8192 || !s.boxes || s.boxes > 100000) {
        std::fprintf(stderr, "camera: camera MODEL WIDTH HEIGHT BOXES [generated, -, or FILE] [FRAMES] [PICTURE.ppm]\n");
        return 1;
    }
    try {
        source frames(s, argc > 5 ? argv[5] : "generated", number(6, 100));
        return watch(argv[1], s, frames, argc > 7 ? argv[7] : "");
    } catch (const std::exception &error) {
        std::fprintf(stderr, "camera: %s\n", error.what());
        return 1;
    }
}
