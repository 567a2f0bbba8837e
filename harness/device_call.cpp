// Calls on tensors of a CUDA device: copied there, run there and copied back.
#include "harness/device_call.hpp"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "harness/run_call.hpp"
#ifdef HEADRACE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace headrace::harness {
namespace {

bool cu_seqlens_stay(const TensorView& cu_seqlens) { return cu_seqlens.shape[0] % 3 == 0; }

// f(view) for every view that a call gives.
void each_view(Call& call, const std::function<void(TensorView&)>& f) {
    Inputs& in = call.in;
    Gradients& grads = call.grads;
    for (TensorView* view : {&in.q,
                             &in.k,
                             &in.v,
                             &in.p,
                             &in.g,
                             &in.gv,
                             &in.g_gamma,
                             &in.beta,
                             &in.A_log,
                             &in.dt_bias,
                             &in.initial_state,
                             &in.cu_seqlens,
                             &call.out.o,
                             &call.out.final_state,
                             &call.d_out.d_o,
                             &call.d_out.d_final_state,
                             &grads.d_q,
                             &grads.d_k,
                             &grads.d_v,
                             &grads.d_p,
                             &grads.d_g,
                             &grads.d_gv,
                             &grads.d_g_gamma,
                             &grads.d_beta,
                             &grads.d_A_log,
                             &grads.d_dt_bias,
                             &grads.d_initial_state,
                             &call.pool.states,
                             &call.pool.indices,
                             &call.pool.num_accepted_tokens,
                             &call.summary.transition,
                             &call.summary.state}) {
        if (view->given()) f(*view);
    }
}

}  // namespace

Call seen_from_device(const Call& host) {
    Call call = host;
    each_view(call, [](TensorView& view) { view.device = Device::cuda; });
    if (call.in.cu_seqlens.given() && cu_seqlens_stay(call.in.cu_seqlens)) call.in.cu_seqlens.device = Device::cpu;
    return call;
}

void each_device_view(Call& call, const std::function<void(TensorView&)>& f) {
    each_view(call, [&](TensorView& view) {
        if (view.device == Device::cuda) f(view);
    });
}

std::size_t extent_bytes(const TensorView& view) {
    std::int64_t last = 0;
    for (int i = 0; i < view.rank; ++i) {
        if (view.shape[i] == 0) return 0;
        last += (view.shape[i] - 1) * view.strides[i];
    }
    return static_cast<std::size_t>(last + 1) * size_of(view.dtype);
}

#ifdef HEADRACE_HAS_CUDA
namespace {

constexpr std::size_t guard = 256;
constexpr unsigned char filling = 0xff;  // NaN in every floating type

Status checked(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return {};
    return {Code::unsupported, std::string("CUDA: ") + what + ": " + cudaGetErrorString(error)};
}

// Device memory between guards, all of it filled; for a tensor, with the host's bytes that it stands for.
class Guarded {
  public:
    Guarded(void* host, std::size_t bytes, cudaStream_t stream) : host_(host), bytes_(bytes), stream_(stream) {
        status_ = checked(cudaMalloc(&memory_, bytes + 2 * guard), "cudaMalloc");
        if (status_.ok())
            status_ = checked(cudaMemsetAsync(memory_, filling, bytes + 2 * guard, stream), "cudaMemsetAsync");
    }
    ~Guarded() { cudaFree(memory_); }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

    const Status& status() const { return status_; }
    void* data() const { return static_cast<char*>(memory_) + guard; }
    Status upload() {
        if (host_ == nullptr || bytes_ == 0) return {};
        return checked(cudaMemcpyAsync(data(), host_, bytes_, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
    }
    Status download(bool* guards_intact) {
        std::vector<unsigned char> all(bytes_ + 2 * guard);
        Status status = checked(cudaMemcpyAsync(all.data(), memory_, all.size(), cudaMemcpyDeviceToHost, stream_),
                                "cudaMemcpyAsync");
        if (status.ok()) status = checked(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
        if (!status.ok()) return status;
        for (std::size_t i = 0; i < guard; ++i) {
            if (all[i] != filling || all[guard + bytes_ + i] != filling) *guards_intact = false;
        }
        if (host_ != nullptr && bytes_ > 0) std::memcpy(host_, all.data() + guard, bytes_);
        return {};
    }

  private:
    void* host_;
    std::size_t bytes_;
    cudaStream_t stream_;
    void* memory_ = nullptr;
    Status status_;
};

using Blocks = std::vector<std::unique_ptr<Guarded>>;

// Copies all back; says where somebody wrote around one of them.
Status download_all(const Blocks& blocks, const char* what, std::string* violation) {
    bool intact = true;
    for (const auto& block : blocks) {
        if (Status status = block->download(&intact); !status.ok()) return status;
    }
    if (!intact) *violation = std::string("bytes around ") + what + " were written";
    return {};
}

// Tensors that a stream of its own works on.
class OnStream {
  public:
    ~OnStream() {
        blocks_.clear();  // after what the stream holds: cudaFree waits
        if (stream_ != nullptr) cudaStreamDestroy(stream_);
    }
    Status make() {
        return checked(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    }
    cudaStream_t stream() const { return stream_; }
    // The view is then one of device memory.
    Status add(TensorView& view) {
        blocks_.push_back(std::make_unique<Guarded>(view.data, extent_bytes(view), stream_));
        view.data = blocks_.back()->data(), view.device = Device::cuda;
        return blocks_.back()->status();
    }
    Status upload() {
        for (const auto& block : blocks_) {
            if (Status status = block->upload(); !status.ok()) return status;
        }
        return {};
    }
    Status download(std::string* violation) { return download_all(blocks_, "a tensor", violation); }

  private:
    cudaStream_t stream_ = nullptr;
    Blocks blocks_;
};

class CopiedCall final : public CallOnDevice {
  public:
    Status make(const Call& host) {
        Status status = tensors_.make();
        call_ = seen_from_device(host);
        call_.options.stream = tensors_.stream();
        const auto add = [&](TensorView& view) {
            if (status.ok()) status = tensors_.add(view);
        };
        each_device_view(call_, add);
        if (host.options.piece != nullptr) {
            piece_ = *host.options.piece;
            call_.options.piece = &piece_;
            for (TensorView* view : {&piece_.initial_roundings, &piece_.final_roundings, &piece_.d_final_roundings,
                                     &piece_.d_initial_roundings}) {
                if (view->given()) add(*view);
            }
        }
        return status.ok() ? upload() : status;
    }

    const Call& call() const override { return call_; }
    Status add_workspace(const Call& call, Workspace* workspace) override {
        std::size_t bytes = 0;
        if (Status status = workspace_size(call, &bytes); !status.ok()) return status;
        workspaces_.push_back(std::make_unique<Guarded>(nullptr, bytes, tensors_.stream()));
        *workspace = {workspaces_.back()->data(), bytes};
        return workspaces_.back()->status();
    }
    Status upload() override { return tensors_.upload(); }
    Status synchronize() override { return checked(cudaStreamSynchronize(tensors_.stream()), "cudaStreamSynchronize"); }
    Status download(std::string* violation) override {
        if (Status status = tensors_.download(violation); !status.ok()) return status;
        return download_all(workspaces_, "the workspace", violation);
    }

  private:
    OnStream tensors_;
    Call call_;
    Piece piece_;
    Blocks workspaces_;
};

}  // namespace

Status run_on_device(const std::vector<TensorView*>& views, const std::function<Status(void* stream)>& body,
                     std::string* violation) {
    OnStream all;
    Status status = all.make();
    for (TensorView* view : views) {
        if (status.ok() && view->given()) status = all.add(*view);
    }
    if (status.ok()) status = all.upload();
    if (status.ok()) status = body(all.stream());
    return status.ok() ? all.download(violation) : status;
}

Status copy_to_device(const Call& host, std::unique_ptr<CallOnDevice>* result) {
    auto copied = std::make_unique<CopiedCall>();
    Status status = copied->make(host);
    if (status.ok()) *result = std::move(copied);
    return status;
}
#else
namespace {
Status absent() { return {Code::unsupported, "cuda: this build has no CUDA (HEADRACE_CUDA)"}; }
}  // namespace
Status copy_to_device(const Call&, std::unique_ptr<CallOnDevice>*) { return absent(); }
Status run_on_device(const std::vector<TensorView*>&, const std::function<Status(void* stream)>&, std::string*) {
    return absent();
}
#endif

Status run_on_device(const Call& host, bool own_workspace, std::string* violation) {
    std::unique_ptr<CallOnDevice> device;
    Status status = copy_to_device(host, &device);
    Workspace workspace;
    if (status.ok() && own_workspace) status = device->add_workspace(device->call(), &workspace);
    if (status.ok()) status = run_call(device->call(), workspace);
    if (status.ok()) status = device->download(violation);
    return status;
}

}  // namespace headrace::harness
