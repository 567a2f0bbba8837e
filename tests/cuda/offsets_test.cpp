// Offsets beyond 2^31: tensors whose elements lie far apart along each of their axes, and calls on so many sequences
// that tensors and workspace are as large. Device memory is address space here, used where it is touched; of launches
// of many blocks the last alone run (HEADRACE_PTX_SHARE).
#include <algorithm>
#include <memory>

#include "tests/cuda/device_runs.hpp"
#include "tests/cuda/device_tensors.hpp"

namespace headrace::test {
namespace {

constexpr std::int64_t limit = std::int64_t{1} << 31;

enum class Axis { sequences, tokens, heads, channels, rows_of_states };
constexpr const char* names[] = {"sequences", "tokens", "heads", "channels", "rows of states"};

// The dimension of the view along the axis, -1 for none. Tensors of a token are [B,T,H] or [B,T,H,K], states
// [N,H,K,V].
int dimension(const TensorView& view, Axis axis, bool state) {
    constexpr int of_tokens[] = {0, 1, 2, 3, -1}, of_states[] = {0, -1, 1, 3, 2};
    const int d = (state ? of_states : of_tokens)[static_cast<int>(axis)];
    return view.rank >= 3 && d < view.rank && view.shape[d] > 1 ? d : -1;
}

std::vector<TensorView*> states(Call& call) {
    return {&call.in.initial_state, &call.out.final_state,    &call.d_out.d_final_state, &call.grads.d_initial_state,
            &call.pool.states,      &call.summary.transition, &call.summary.state};
}

// The tensors of a call, each with its elements along `axis` at a stride by which the last lies beyond 2^31.
class FarApart {
  public:
    Call call;

    FarApart(DeviceTensors& tensors, Axis axis, std::int64_t odd) : call(tensors.call) {
        std::vector<const TensorView*> hosts;
        Call seen = harness::seen_from_device(tensors.host.call);
        each_device_view(seen, [&](TensorView& view) { hosts.push_back(&view); });
        const std::vector<TensorView*> of_states = states(call);
        std::size_t i = 0;
        each_device_view(call, [&](TensorView& view) {
            const TensorView& host = *hosts[i++];
            const bool state = std::find(of_states.begin(), of_states.end(), &view) != of_states.end();
            if (const int far = dimension(view, axis, state); far >= 0) spread(view, host, far, odd);
        });
        for (const Spread& each : spread_) move(each, true);
    }

    // Puts what the call wrote where the host's tensors are.
    void download(cudaStream_t stream) {
        expect_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        for (const Spread& each : spread_) move(each, false);
    }
    bool empty() const { return spread_.empty(); }

  private:
    struct Spread {
        TensorView device, host;
        int far;
    };

    void spread(TensorView& view, const TensorView& host, int far, std::int64_t odd) {
        std::int64_t stride = 1;
        for (int d = view.rank - 1; d >= 0; --d) {
            if (d == far) continue;
            view.strides[d] = stride;
            stride *= view.shape[d];
        }
        view.strides[far] = (limit / (view.shape[far] - 1) + 63) / 64 * 64 + odd;
        memory_.emplace_back(extent_bytes(view));
        view.data = memory_.back().data();
        spread_.push_back({view, host, far});
    }

    // Copies slice by slice along the axis: the elements of one lie together on the device.
    static void move(const Spread& each, bool up) {
        const auto& [device, host, far] = each;
        const std::size_t width = size_of(host.dtype);
        Bytes slice(static_cast<std::size_t>(host.numel() / host.shape[far]) * width);
        for (std::int64_t index = 0; index < host.shape[far]; ++index) {
            char* there =
                static_cast<char*>(device.data) + static_cast<std::size_t>(index * device.strides[far]) * width;
            if (!up) transfer(slice.data(), there, slice.size());
            for (std::size_t at = 0; at < slice.size(); at += width) {
                std::int64_t rest = static_cast<std::int64_t>(at / width), from = index * host.strides[far];
                for (int d = host.rank - 1; d >= 0; --d) {
                    if (d == far) continue;
                    from += rest % host.shape[d] * host.strides[d];
                    rest /= host.shape[d];
                }
                unsigned char* here = static_cast<unsigned char*>(host.data) + static_cast<std::size_t>(from) * width;
                std::memcpy(up ? slice.data() + at : here, up ? here : slice.data() + at, width);
            }
            if (up) transfer(there, slice.data(), slice.size());
        }
    }

    std::vector<Spread> spread_;
    std::vector<DeviceMemory> memory_;
};

void expect_same_far_apart(const ProblemLine& line, Axis axis, std::int64_t odd) {
    const std::string what = format(line) + ", " + names[static_cast<int>(axis)] + (odd != 0 ? ", odd" : "");
    DeviceTensors near(harness::make_tensors(line)), far(harness::make_tensors(line));
    FarApart apart(far, axis, odd);
    if (apart.empty()) return;
    const auto expected = near.run_and_read();
    const Status status = run(apart.call);
    ASSERT_TRUE(status.ok()) << what << ": " << status.message();
    far.written();  // what is not far apart
    apart.download(far.stream);
    expect_same_bits(expected, written(far.host.call), what);
}

class FarElements : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(
    CudaOffsets, FarElements,
    testing::Values("gated_delta_rule:fwd b2 t70 h2 hv4 k64 v16 state=inout",
                    "gated_delta_rule:bwd b2 t70 h2 k64 v16 state=inout", "kda:fwd b2 t70 h2 k64 v16 state=inout",
                    "kda:bwd b2 t40 h2 k64 v16 state=inout", "gla:fwd b2 t70 h2 k64 v16 state=inout",
                    "gla:bwd b2 t40 h2 k64 v16 state=inout", "simple_gla:fwd b2 t70 h2 k64 v16 state=inout",
                    "simple_gla:bwd b2 t70 h2 k64 v16 state=inout", "comba:bwd b2 t20 h2 k64 v16",
                    "kda:summary b2 t40 h2 k64 v16 state=in", "gla:summary b2 t40 h2 k64 v16 state=in",
                    "gated_delta_rule:summary_bwd b2 t40 h2 k64 v16", "gated_delta_rule:step b3 t2 h2 k64 v16 pool=9"));

// Odd strides send tensors of tensor cores through copies (plumbing/staging.hpp).
TEST_P(FarElements, M4_BitsOfTensorsThatLieTogether) {
    for (const char* dtype : {" bf16", ""}) {
        for (const ProblemLine& line : forced_lines(GetParam() + std::string(dtype) + " cuda")) {
            for (const Axis axis : {Axis::sequences, Axis::tokens, Axis::heads, Axis::channels, Axis::rows_of_states}) {
                expect_same_far_apart(line, axis, 0);
                if (line.force == "cuda.tensor") expect_same_far_apart(line, axis, 1);
            }
        }
    }
}

// So many sequences that a launch with a block for each chunk runs the same ones at the end as those with one for each
// sequence, as HEADRACE_PTX_SHARE is 2^-14.
constexpr std::int64_t few = 17, many = few << 14, zeroed = 512;

// A call on `many` sequences of which the last `few` are those of another call, and those before them zero as far as a
// block may look.
class ManySequences {
  public:
    Call call;

    ManySequences(const std::string& line, DeviceTensors& last)
        : shapes_(harness::make_shapes(line_of(line + " b" + std::to_string(many) + " cuda"))) {
        call = harness::seen_from_device(shapes_.call);
        call.options.stream = last.stream;
        std::vector<const TensorView*> sources;
        each_device_view(last.call, [&](TensorView& view) { sources.push_back(&view); });
        each_device_view(call, [&](TensorView& view) {
            const TensorView& source = *sources[memory_.size()];
            memory_.emplace_back(extent_bytes(view));
            view.data = memory_.back().data();
            const std::size_t bytes = extent_bytes(source),
                              cleared = std::min(extent_bytes(view), bytes / few * static_cast<std::size_t>(zeroed));
            expect_cuda(cudaMemset(tail(view, cleared), 0, cleared), "cudaMemset");
            transfer(tail(view, bytes), source.data, bytes);
        });
    }

    // What it wrote of the last sequences.
    std::map<std::string, Bytes> written(DeviceTensors& last) {
        last.synchronize();
        std::map<std::string, Bytes> result;
        const std::vector<harness::NamedView> own = harness::output_views(call),
                                              few_views = harness::output_views(last.call);
        for (std::size_t i = 0; i < own.size(); ++i) {
            Bytes& bytes = result[own[i].name];
            bytes.resize(extent_bytes(few_views[i].view));
            transfer(bytes.data(), tail(own[i].view, bytes.size()), bytes.size());
        }
        return result;
    }

  private:
    static char* tail(const TensorView& view, std::size_t bytes) {
        return static_cast<char*>(view.data) + extent_bytes(view) - bytes;
    }
    CallTensors shapes_;
    std::vector<DeviceMemory> memory_;
};

class ManyElements : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(
    CudaOffsets, ManyElements,
    testing::Values("gated_delta_rule:fwd t128 hv2 k64 v64 bf16 state=inout force=cuda.tensor",
                    "gated_delta_rule:bwd t128 k64 v64 bf16 force=cuda.tensor",
                    "gated_delta_rule:fwd t128 k64 v64 f16 force=cuda.tensor",
                    "kda:fwd t128 k64 v64 bf16 force=cuda.tensor", "kda:bwd t128 k64 v64 bf16 force=cuda.tensor",
                    "kda:summary t128 k64 v64 bf16 force=cuda.tensor", "gla:fwd t128 k64 v64 bf16 force=cuda.tensor",
                    "gla:bwd t128 k64 v64 bf16 force=cuda.tensor", "simple_gla:fwd t128 k64 v64 bf16 force=cuda.tensor",
                    "simple_gla:bwd t128 hv2 k64 v64 bf16 force=cuda.tensor", "kda:fwd t64 k32 v32 force=cuda.walk",
                    "kda:bwd t64 k32 v32 force=cuda.walk", "kda:bwd t12 k32 v32 force=cuda.recurrent",
                    "kda:fwd t24 k64 v64 force=cuda.recurrent"));

TEST_P(ManyElements, M4_BitsOfFewSequences) {
    const std::string line = std::string(GetParam()) + " h1";
    DeviceTensors last(line + " b" + std::to_string(few));
    const auto expected = last.run_and_read();
    ManySequences all(line, last);
    const Status status = run(all.call);
    ASSERT_TRUE(status.ok()) << status.message();
    expect_same_bits(expected, all.written(last), line);
}

}  // namespace
}  // namespace headrace::test
