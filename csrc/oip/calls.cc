#include "oip/calls.h"

#include <new>
#include <utility>

/* Exported by gRPC, but in none of its headers: how a call's client has packed its messages. */
grpc_compression_algorithm grpc_call_test_only_get_compression_algorithm(grpc_call *call);

namespace oip {
namespace {

const char PEER[] = "burst-peer"; /* tells Python's door whose call it is */
const double MOST_SECONDS = 1e6;  /* a later deadline is none */
const char INFER[] = "/inference.GRPCInferenceService/ModelInfer";
const char NO_MEMORY[] = "the server has no memory left";
const char STREAM[] = "/inference.GRPCInferenceService/ModelStreamInfer";

uint64_t deadline_of(gpr_timespec t) {
    gpr_timespec left =
        gpr_time_sub(gpr_convert_clock_type(t, GPR_CLOCK_MONOTONIC), gpr_now(GPR_CLOCK_MONOTONIC));
    double seconds = double(left.tv_sec) + double(left.tv_nsec) / 1e9;
    if (seconds >= MOST_SECONDS) return BURST_FOREVER;
    return burst_now() + (seconds > 0 ? uint64_t(seconds * 1e9) : 0);
}

} // namespace

call::call(door &its) : door_(its) { door_.living_++; }

call::~call() {
    door_.visits_.leave(this);
    door_.living_--;
}

void call::begin() {
    done_ = tag(&call::is_done);
    context_.AsyncNotifyWhenDone(done_);
    auto *queue = door_.queue_.get();
    door_.service_.RequestCall(&context_, &stream_, queue, queue, tag(&call::accepted));
}

void call::accepted(bool ok) {
    if (!ok) { /* the server ends; is_done never comes */
        delete done_;
        return;
    }
    door_.expect();
    bool is_stream = context_.method() == STREAM;
    std::string why = door_.visits_.enter(this, machine_of(context_.peer()), is_stream);
    if (!why.empty()) return end(grpc::StatusCode::RESOURCE_EXHAUSTED, why);
    if (is_stream) return begin_stream();
    std::lock_guard hold(lock_);
    if (!has_ended_) stream_.Read(&request_, tag(&call::has_come));
}

/* Without a message: as if it were an empty one. */
void call::has_come(bool ok) {
    {
        std::lock_guard hold(lock_);
        if (has_ended_ || is_cancelled_) return;
    }
    std::string why = door_.visits_.work(this, request_.Length());
    if (!why.empty()) return end(grpc::StatusCode::RESOURCE_EXHAUSTED, why);
    bool is_here =
        ok && context_.method() == INFER && packing() == GRPC_COMPRESS_NONE && try_here();
    if (!is_here) forward();
}

void call::is_done(bool ok) {
    (void)ok;
    std::shared_ptr<model> waits_for;
    {
        std::lock_guard hold(lock_);
        is_cancelled_ = context_.IsCancelled();
        if (!is_cancelled_) return;
        if (behind_) behind_->TryCancel();
        waits_for = std::move(waits_for_);
    }
    if (waits_for) waits_for->forget(this);
}

/* True: the caller is to begin the last operation. */
bool call::ends() {
    std::lock_guard hold(lock_);
    if (std::exchange(has_ended_, true)) return false;
    if (behind_) behind_->TryCancel();
    return true;
}

void call::end(grpc::StatusCode code, const std::string &text) {
    if (!ends()) return;
    door_.visits_.go(this, 0, true);
    stream_.Finish(grpc::Status(code, text), tag(&call::is_answered));
}

void call::answer() {
    request_.Clear();
    packet_ = grpc::Slice();
    job_.reset();
    door_.visits_.work(this, 0);
    if (!ends()) return;
    door_.visits_.go(this, reply_.Length(), true);
    stream_.WriteAndFinish(reply_, grpc::WriteOptions(), grpc::Status::OK, tag(&call::is_answered));
}

void call::cut() {
    context_.TryCancel();
    door_.connections_->note(context_.peer());
}

/* ---- here ------------------------------------------------------------------------------------ */

/* False: it goes to Python's door. */
bool call::try_here() {
    auto made = std::make_unique<job>();
    made->began = burst_now();
    if (!request_.TrySingleSlice(&packet_).ok()) {
        if (!request_.DumpToSingleSlice(&packet_).ok()) return false;
        request_ = grpc::ByteBuffer(&packet_, 1);
    }
    std::string_view packet(reinterpret_cast<const char *>(packet_.begin()), packet_.size());
    if (!read_request(packet, &made->asked)) return false;
    made->its = door_.models.find(made->asked.model, made->asked.version);
    if (!made->its || !made->its->bind(made.get(), door_.regions)) return false;
    made->deadline = deadline_of(context_.raw_deadline());
    made->ready = burst_now();
    auto its = made->its;
    {
        std::lock_guard hold(lock_);
        job_ = std::move(made);
        waits_for_ = its;
    }
    return door_.serve(shared_from_this(), its);
}

lane *call::execute(lane *its) {
    {
        std::lock_guard hold(lock_);
        if (has_ended_ || is_cancelled_) return its;
    }
    outcome found = outcome::FORWARDED;
    try {
        if (!its) its = job_->its->open();
        if (its) found = its->run(*job_, &reply_);
        if (found == outcome::LATE) {
            job_->its->count_late(*job_);
            end(grpc::StatusCode::DEADLINE_EXCEEDED, "the deadline has passed");
        } else if (found == outcome::ANSWERED) {
            answer();
        } else {
            forward();
        }
    } catch (const std::bad_alloc &) {
        if (its) its->give_up();
        end(grpc::StatusCode::RESOURCE_EXHAUSTED, NO_MEMORY);
    }
    return its;
}

/* ---- behind ---------------------------------------------------------------------------------- */

/* A few bytes can become any number, and gRPC 1.51 unpacks them before it looks at their size: so
 * messages stay as they came, and Python's door unpacks them, whose gRPC stops in time. */
grpc_compression_algorithm call::packing() {
    return grpc_call_test_only_get_compression_algorithm(context_.c_call());
}

/* Under the lock. */
void call::begin_behind() {
    behind_.emplace();
    behind_->set_compression_algorithm(packing());
    behind_->set_deadline(context_.raw_deadline());
    behind_->AddMetadata(PEER, context_.peer());
}

void call::forward() {
    std::lock_guard hold(lock_);
    if (has_ended_ || is_cancelled_) return;
    begin_behind();
    auto *queue = door_.queue_.get();
    unary_ = door_.behind_->PrepareUnaryCall(&*behind_, context_.method(), request_, queue);
    unary_->StartCall();
    unary_->Finish(&reply_, &status_, tag(&call::came_back));
}

void call::came_back(bool ok) {
    (void)ok;
    if (status_.ok() && !both_) answer();
    else end(status_.error_code(), status_.error_message());
}

/* ---- streams --------------------------------------------------------------------------------- */

void call::begin_stream() {
    std::lock_guard hold(lock_);
    begin_behind();
    both_ = door_.behind_->PrepareCall(&*behind_, context_.method(), door_.queue_.get());
    both_->StartCall(tag(&call::stream_begun));
}

void call::stream_begun(bool ok) {
    if (!ok) return both_->Finish(&status_, tag(&call::came_back));
    std::lock_guard hold(lock_);
    if (!has_ended_) stream_.Read(&request_, tag(&call::from_client));
    both_->Read(&reply_, tag(&call::from_behind));
}

void call::from_client(bool ok) {
    if (!ok) return both_->WritesDone(tag(&call::is_answered));
    std::string why = door_.visits_.work(this, request_.Length());
    if (!why.empty()) return end(grpc::StatusCode::RESOURCE_EXHAUSTED, why);
    both_->Write(request_, tag(&call::to_behind));
}

void call::to_behind(bool ok) {
    request_.Clear();
    door_.visits_.work(this, 0);
    std::lock_guard hold(lock_);
    if (ok && !has_ended_) stream_.Read(&request_, tag(&call::from_client));
}

void call::from_behind(bool ok) {
    if (!ok) return both_->Finish(&status_, tag(&call::came_back));
    door_.visits_.go(this, reply_.Length(), false);
    std::lock_guard hold(lock_);
    if (has_ended_) both_->Read(&reply_, tag(&call::from_behind)); /* it is cancelled */
    else stream_.Write(reply_, tag(&call::to_client));
}

void call::to_client(bool ok) {
    if (!ok) behind_->TryCancel();
    reply_.Clear();
    door_.visits_.was_read(this);
    both_->Read(&reply_, tag(&call::from_behind));
}

} // namespace oip
