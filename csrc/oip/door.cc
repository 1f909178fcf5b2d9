#include "oip/calls.h"

#include <chrono>
#include <climits>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace oip {
namespace {

using namespace std::chrono_literals;

const auto GRACE = 10s;  /* for requests that run at the end */
const auto LOOK = 250ms; /* between two looks */
enum : int { EXPECTED = 8, LOOKS = 4 };

std::string contents_of(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream found;
    found << file.rdbuf();
    if (!file) throw std::runtime_error(path + " cannot be read");
    return found.str();
}

std::shared_ptr<grpc::ServerCredentials> credentials_of(const door_options &o) {
    if (o.certificate.empty()) return grpc::InsecureServerCredentials();
    grpc::SslServerCredentialsOptions tls;
    tls.pem_key_cert_pairs.push_back({contents_of(o.key), contents_of(o.certificate)});
    return grpc::SslServerCredentials(tls);
}

/* As Python's door has them. */
void set_limits(grpc::ServerBuilder *b, const limits &its) {
    b->SetMaxReceiveMessageSize(int(its.message));
    b->SetMaxSendMessageSize(int(its.message));
    b->AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0); /* `call::packing` */
    b->AddChannelArgument("grpc.max_metadata_size", 16 << 10);
    b->AddChannelArgument("grpc.max_connection_idle_ms", int(its.idle * 1000));
    b->AddChannelArgument("grpc.max_concurrent_streams", int(its.requests));
    b->AddChannelArgument("grpc.server_handshake_timeout_ms", 10000);
    b->AddChannelArgument("grpc.keepalive_time_ms", 30000);
    b->AddChannelArgument("grpc.keepalive_timeout_ms", 10000);
}

std::shared_ptr<grpc::Channel> channel_to(const std::string &path) {
    grpc::ChannelArguments to;
    to.SetMaxReceiveMessageSize(INT_MAX);
    to.SetMaxSendMessageSize(INT_MAX);
    to.SetInt("grpc.enable_http_proxy", 0);
    to.SetInt("grpc.initial_reconnect_backoff_ms", 100);
    to.SetInt("grpc.max_reconnect_backoff_ms", 1000);
    return grpc::CreateCustomChannel("unix:" + path, grpc::InsecureChannelCredentials(), to);
}

} // namespace

door::door(door_options o) : limits_(o.its), visits_(o.its) {
    grpc::ServerBuilder builder;
    set_limits(&builder, o.its);
    builder.RegisterAsyncGenericService(&service_);
    queue_ = builder.AddCompletionQueue();
    using how = grpc::ServerBuilder::experimental_type::ExternalConnectionType;
    auto to = builder.experimental().AddExternalConnectionAcceptor(how::FROM_FD, credentials_of(o));
    server_ = builder.BuildAndStart();
    if (!server_) throw std::runtime_error("gRPC does not start a server");
    behind_ = std::make_unique<grpc::GenericStub>(channel_to(o.behind));
    connections_ = std::make_unique<connections>(std::move(o.listener), o.its, std::move(to));
}

door::~door() { close(); }

void door::begin() {
    for (int i = 0; i < EXPECTED; i++) expect();
    for (int i = 0; i < THREADS; i++) threads_.emplace_back(&door::work, this);
    threads_.emplace_back(&door::look, this);
    connections_->begin();
}

void door::expect() {
    try {
        std::lock_guard hold(lock_);
        if (!is_closing_) std::make_shared<call>(*this)->begin();
    } catch (const std::bad_alloc &) {
        missing_++; /* until the next look */
    }
}

void door::work() {
    void *tag;
    bool ok;
    while (queue_->Next(&tag, &ok)) {
        std::unique_ptr<call::op> op(static_cast<call::op *>(tag));
        try {
            (op->of.get()->*op->then)(ok);
        } catch (const std::bad_alloc &) {
            op->of->end(grpc::StatusCode::RESOURCE_EXHAUSTED, "the server has no memory left");
        }
    }
}

/* Runs a request, and then those that wait for the same lane. False: it has not begun, and another
 * door is to answer it. */
bool door::serve(std::shared_ptr<call> first, const std::shared_ptr<model> &its) {
    struct place {
        std::atomic<int> &taken;
        ~place() { taken--; }
    } place = {running_};
    lane *on = nullptr;
    if (running_++ >= MOST_RUNNING) return false;
    auto turn = its->take(first, &on);
    if (turn == model::turn::HAS_LANE) {
        for (auto next = std::move(first); next;) {
            on = next->execute(on);
            bool is_usable = on && on->is_usable();
            next = std::static_pointer_cast<call>(its->pass_on(on));
            if (!is_usable) on = nullptr; /* pass_on has deleted it */
        }
    }
    return turn != model::turn::NONE;
}

void door::look() {
    std::unique_lock hold(lock_);
    for (int n = 0; !has_ended_; n++) {
        changed_.wait_for(hold, LOOK);
        hold.unlock();
        try {
            look_once(n);
        } catch (const std::bad_alloc &) {} /* the next look finds more */
        hold.lock();
    }
}

void door::look_once(int n) {
    for (int missing = missing_.exchange(0); missing; missing--) expect();
    visits_.look();
    connections_->look();
    if (n % LOOKS == 0) models.rest();
}

void door::stop_late() {
    std::unique_lock hold(lock_);
    if (!changed_.wait_for(hold, GRACE, [&] { return has_ended_; })) models.stop();
}

void door::close() {
    {
        std::lock_guard hold(lock_);
        if (std::exchange(is_closing_, true)) return;
    }
    connections_->close();
    std::thread late(&door::stop_late, this);
    server_->Shutdown(std::chrono::system_clock::now() + GRACE);
    {
        std::lock_guard hold(lock_);
        has_ended_ = true;
    }
    changed_.notify_all();
    late.join();
    models.stop(); /* who is left has no client any more */
    while (living_) std::this_thread::sleep_for(1ms);
    queue_->Shutdown();
    for (std::thread &each : threads_) each.join();
}

} // namespace oip
