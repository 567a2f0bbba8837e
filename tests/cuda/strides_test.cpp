// Strides of zero, and offsets beyond 2^31: tensors whose elements lie far apart along each of their axes, and calls on
// so many sequences that tensors and workspace are as large. Device memory is address space here, used where it is
// touched; of launches of many blocks the last alone run (HEADRACE_PTX_SHARE).
#include <algorithm>
#include <memory>

#include "tests/axes.hpp"
#include "tests/cuda/device_runs.hpp"
#include "tests/cuda/device_tensors.hpp"

namespace headrace::test {
namespace {

constexpr std::int64_t limit = std::int64_t{1} << 31;

// The tensors of a call, each with its elements along `axis` at a stride by which the last lies beyond 2^31.
class FarApart {
  public:
    Call call;

    FarApart(DeviceTensors& tensors, Axis axis, std::int64_t odd) : call(tensors.call) {
        std::vector<const TensorView*> hosts;
        Call seen = harness::seen_from_device(tensors.host.call);
        each_device_view(seen, [&](TensorView& view) { hosts.push_back(&view); });
        std::size_t i = 0;
        each_device_view(call, [&](TensorView& view) {
            const TensorView& host = *hosts[i++];
            if (const int far = dimension(call, view, axis); far >= 0) spread(view, host, far, odd);
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
    const std::string what = format(line) + ", " + name_of(axis) + (odd != 0 ? ", odd" : "");
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

class EachCall : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(CudaStrides, EachCall,
                         testing::Values("gated_delta_rule:fwd b2 h2 hv4 k64 v32 state=inout",
                                         "gated_delta_rule:bwd b2 h2 k64 v32 state=inout",
                                         "kda:fwd b2 h2 k64 v32 state=inout", "kda:bwd b2 h2 k64 v32 state=inout",
                                         "gla:fwd b2 h2 k64 v32 state=inout", "gla:bwd b2 h2 k64 v32 state=inout",
                                         "simple_gla:fwd b2 h2 k64 v32 state=inout",
                                         "simple_gla:bwd b2 h2 k64 v32 state=inout", "comba:bwd b2 h2 k64 v32",
                                         "kda:summary b2 h2 k64 v32 state=in", "gla:summary b2 h2 k64 v32 state=in",
                                         "gated_delta_rule:summary_bwd b2 h2 k64 v32",
                                         "gated_delta_rule:step b3 h2 k64 v32 pool=9"));

// On tensor cores more than a chunk of theirs, in other forms of fp32 tensors.
std::vector<ProblemLine> lines_of(const std::string& call) {
    std::vector<ProblemLine> lines = forced_lines(call + " t20 cuda");
    ProblemLine line = line_of(call + " t70 bf16 cuda");
    line.force = "cuda.tensor";
    if (line.direction != Direction::step) lines.push_back(line);
    return lines;
}

// Odd strides send tensors of tensor cores through copies (plumbing/staging.hpp).
TEST_P(EachCall, M4_FarApartItHasTheBitsOfTensorsThatLieTogether) {
    for (const ProblemLine& line : lines_of(GetParam())) {
        for (const Axis axis : axes) {
            expect_same_far_apart(line, axis, 0);
            if (line.force == "cuda.tensor") expect_same_far_apart(line, axis, 1);
        }
    }
}

TEST_P(EachCall, InputsMayRepeatByAStrideOfZero) {
    for (const ProblemLine& line : lines_of(GetParam())) {
        for (const Axis axis : axes) {
            CallTensors stored = harness::make_tensors(line), same = harness::make_tensors(line);
            if (!repeat_inputs(stored.call, axis)) continue;
            repeat_inputs(same.call, axis);
            expand_inputs(same.call, axis);
            expect_same_bits(run_there(stored), run_there(same), format(line) + ", " + name_of(axis));
        }
    }
}

// So many sequences, by forms with a block for each, that a launch with a block for each chunk runs the same ones at
// the end as those with one for each sequence, as HEADRACE_PTX_SHARE is 2^-14.
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

class ManySequencesOf : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(
    CudaStrides, ManySequencesOf,
    testing::Values("gated_delta_rule:fwd t128 hv2 k64 v64 bf16 state=inout force=cuda.tensor",
                    "gated_delta_rule:bwd t128 k64 v64 bf16 force=cuda.tensor",
                    "gated_delta_rule:fwd t128 k64 v64 f16 force=cuda.tensor",
                    "kda:fwd t128 k64 v64 bf16 force=cuda.tensor", "kda:bwd t128 k64 v64 bf16 force=cuda.tensor",
                    "kda:summary t128 k64 v64 bf16 force=cuda.tensor", "gla:fwd t128 k64 v64 bf16 force=cuda.tensor",
                    "gla:bwd t128 k64 v64 bf16 force=cuda.tensor", "simple_gla:fwd t128 k64 v64 bf16 force=cuda.tensor",
                    "simple_gla:bwd t128 hv2 k64 v64 bf16 force=cuda.tensor",
                    "kda:fwd t24 k64 v64 force=cuda.recurrent"));

TEST_P(ManySequencesOf, M4_HaveTheBitsOfFew) {
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
