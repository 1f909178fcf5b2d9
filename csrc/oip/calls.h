/* The door: gRPC's server, its threads, and the calls of clients.
 *
 * What a client asks for in the usual form, of a model that runs here, is answered here. Everything
 * else goes to Python's door as it came, and its answer comes back as it is: errors, streams,
 * loading, registering of memory, and each request that this door does not answer for
 * whatever reason, also after it has tried. So a client sees one server, and this one can be small.
 *
 * A call is held by what it has begun (`op`) and by the queue of a model. Each completed operation
 * runs one function of its call, in any of the threads; what two of them touch is under its lock,
 * under which nothing but gRPC is called. An operation that answers is begun once (`has_ended_`).
 * Threads: a request is executed in the thread that has read it, so MOST_RUNNING of THREADS do
 * that at most, and the others read on.
 *
 * The end: no connection is accepted, calls have a while to be answered, then their bursts are
 * closed, and when gRPC has no call any more, its queue is emptied, and the threads end. */
#ifndef OIP_CALLS_H
#define OIP_CALLS_H

#include "oip/connections.h"
#include "oip/model_table.h"

#include <condition_variable>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

namespace oip {

enum : int { THREADS = 20, MOST_RUNNING = 16 };

class door;

class call final : public visit, public waiter, public std::enable_shared_from_this<call> {
public:
    explicit call(door &its);
    ~call() override;
    void begin(); /* waits for a client to make it */
    std::shared_ptr<visit> held() override { return weak_from_this().lock(); }
    void end(grpc::StatusCode code, const std::string &text) override;
    void cut() override;
    /* Runs its job on a lane, NULL: on one that it opens; returns the lane if there is one still */
    lane *execute(lane *its);

    /* An operation that was begun; deleted by the thread that completes it. */
    struct op {
        std::shared_ptr<call> of;
        void (call::*then)(bool ok);
    };

private:
    op *tag(void (call::*then)(bool)) { return new op{shared_from_this(), then}; }
    void accepted(bool ok);
    void has_come(bool ok);
    void is_done(bool ok);
    void came_back(bool ok);
    void is_answered(bool ok) { (void)ok; }
    bool try_here();
    grpc_compression_algorithm packing();
    void begin_behind();
    void forward();
    bool ends();
    void answer();
    /* a stream: from the client to Python's door, and back */
    void begin_stream();
    void stream_begun(bool ok);
    void from_client(bool ok);
    void to_behind(bool ok);
    void from_behind(bool ok);
    void to_client(bool ok);

    door &door_;
    grpc::GenericServerContext context_;
    grpc::GenericServerAsyncReaderWriter stream_{&context_};
    op *done_ = nullptr;
    grpc::Slice packet_;
    grpc::ByteBuffer request_, reply_;
    std::unique_ptr<job> job_;
    std::mutex lock_; /* of what is below */
    bool has_ended_ = false, is_cancelled_ = false;
    std::shared_ptr<model> waits_for_;
    std::optional<grpc::ClientContext> behind_;
    grpc::Status status_;
    std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> unary_;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> both_;
};

struct door_options {
    limits its;
    owned_fd listener;
    std::string behind;           /* the path of Python's socket */
    std::string certificate, key; /* PEM; "": no TLS */
};

class door {
public:
    explicit door(door_options options); /* throws std::runtime_error */
    ~door();
    void begin();
    void close(); /* as above */

    region_table regions;
    model_table models;

private:
    friend class call;
    void expect(); /* one more call */
    void work();
    void look();
    void look_once(int n);
    bool serve(std::shared_ptr<call> first, const std::shared_ptr<model> &its);
    void stop_late();

    const limits limits_;
    visit_table visits_;
    grpc::AsyncGenericService service_;
    std::unique_ptr<grpc::ServerCompletionQueue> queue_;
    std::unique_ptr<connections> connections_;
    std::unique_ptr<grpc::Server> server_;
    std::unique_ptr<grpc::GenericStub> behind_;
    std::vector<std::thread> threads_;
    std::atomic<int> running_{0};
    std::mutex lock_; /* of what is below */
    std::condition_variable changed_;
    bool is_closing_ = false, has_ended_ = false;
    std::atomic<int> missing_{0}; /* calls that could not be expected */
    std::atomic<int> living_{0};  /* calls: they alone begin operations */
};

} // namespace oip
#endif
