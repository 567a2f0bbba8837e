// Calls on tensors of a CUDA device: copied there, run there and copied back.
#include "harness/device_call.hpp"

#include <cstring>
#include <memory>
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

// Device memory with guards, and the host's bytes that it stands for.
class Copied {
  public:
    Copied(void* host, std::size_t bytes, cudaStream_t stream) : host_(host), bytes_(bytes), stream_(stream) {
        status_ = checked(cudaMalloc(&memory_, bytes + 2 * guard), "cudaMalloc");
        if (status_.ok())
            status_ = checked(cudaMemsetAsync(memory_, filling, bytes + 2 * guard, stream), "cudaMemsetAsync");
        if (status_.ok() && host != nullptr && bytes > 0) {
            status_ = checked(cudaMemcpyAsync(data(), host, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
        }
    }
    ~Copied() { cudaFree(memory_); }
    Copied(const Copied&) = delete;
    Copied& operator=(const Copied&) = delete;

    const Status& status() const { return status_; }
    void* data() const { return static_cast<char*>(memory_) + guard; }
    Status copy_back(bool* guards_intact) {
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

Status run_copied(const Call& host, bool own_workspace, cudaStream_t stream, std::string* violation) {
    std::vector<std::unique_ptr<Copied>> tensors;
    Call call = seen_from_device(host);
    Status status;
    each_device_view(call, [&](TensorView& view) {
        tensors.push_back(std::make_unique<Copied>(view.data, extent_bytes(view), stream));
        if (!tensors.back()->status().ok()) status = tensors.back()->status();
        view.data = tensors.back()->data();
    });
    call.options.stream = stream;
    std::size_t bytes = 0;
    if (status.ok() && own_workspace) status = workspace_size(call, &bytes);
    if (!status.ok()) return status;
    Copied workspace(nullptr, bytes, stream);
    if (!workspace.status().ok()) return workspace.status();
    status = run_call(call, own_workspace ? Workspace{workspace.data(), bytes} : Workspace{});
    if (!status.ok()) return status;
    bool intact = true;
    for (const auto& tensor : tensors) {
        if (status = tensor->copy_back(&intact); !status.ok()) return status;
    }
    if (!intact) *violation = "bytes around a tensor were written";
    if (own_workspace && intact) {
        status = workspace.copy_back(&intact);
        if (!intact) *violation = "bytes around the workspace were written";
    }
    return status;
}

}  // namespace

Status run_on_device(const Call& host, bool own_workspace, std::string* violation) {
    cudaStream_t stream = nullptr;
    if (Status status = checked(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
        !status.ok())
        return status;
    Status status = run_copied(host, own_workspace, stream, violation);
    cudaStreamDestroy(stream);
    return status;
}
#else
Status run_on_device(const Call&, bool, std::string*) {
    return {Code::unsupported, "cuda: this build has no CUDA (HEADRACE_CUDA)"};
}
#endif

}  // namespace headrace::harness
