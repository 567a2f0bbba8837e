// Strides: of zero, and so large that elements lie beyond 2^31.
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <new>

#include "axes.hpp"
#include "behaviours.hpp"

namespace headrace::test {
namespace {

// Address space without memory behind it: pages come as they are touched.
class Sparse {
  public:
    explicit Sparse(std::size_t bytes) : bytes_(bytes) {
        data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (data_ == MAP_FAILED) throw std::bad_alloc();
    }
    ~Sparse() { munmap(data_, bytes_); }
    Sparse(const Sparse&) = delete;
    Sparse& operator=(const Sparse&) = delete;
    void* data() const { return data_; }

  private:
    void* data_;
    std::size_t bytes_;
};

// The same tensor with dimension `far` at a stride of 2^24 elements: beyond 2^31 from index 128 on. Values are copied.
TensorView spread(const TensorView& view, int far, std::vector<std::unique_ptr<Sparse>>& memory) {
    TensorView wide = view;
    const std::int64_t stride = std::int64_t{1} << 24, width = static_cast<std::int64_t>(size_of(view.dtype));
    wide.strides[far] = stride;
    memory.push_back(std::make_unique<Sparse>(static_cast<std::size_t>((view.shape[far] + 1) * stride * width)));
    wide.data = memory.back()->data();
    for (std::int64_t i = 0; i < view.numel(); ++i) {
        std::int64_t rest = i, from = 0, to = 0;
        for (int d = view.rank - 1; d >= 0; --d) {
            from += rest % view.shape[d] * view.strides[d];
            to += rest % view.shape[d] * wide.strides[d];
            rest /= view.shape[d];
        }
        std::memcpy(static_cast<char*>(wide.data) + to * width, static_cast<char*>(view.data) + from * width,
                    static_cast<std::size_t>(width));
    }
    return wide;
}

TEST(Memory, M4_OffsetsBeyondTwoToThe31) {
    for (const ProblemLine& line : every_call(" t150 h1 k16 v16 threads=1 bf16")) {
        if (line.force.find("avx2") == 0) continue;  // the same code as the other two
        const std::map<std::string, Bytes> expected = run_and_read(line);
        const CallTensors made = harness::make_tensors(line);
        std::vector<std::unique_ptr<Sparse>> memory;
        Call call = made.call;
        for (TensorView* view : {&call.in.q, &call.in.k, &call.in.v, &call.in.p, &call.in.g, &call.in.beta, &call.out.o,
                                 &call.d_out.d_o, &call.grads.d_q, &call.grads.d_k, &call.grads.d_v, &call.grads.d_p,
                                 &call.grads.d_g, &call.grads.d_beta}) {
            if (view->given()) *view = spread(*view, 1, memory);
        }
        ASSERT_GT((line.T - 1) * call.in.q.strides[1], std::int64_t{1} << 31);
        ASSERT_TRUE(run(call).ok()) << format(line);
        expect_same_bits(expected, written(call), format(line));
    }
}

TEST(Memory, M4_InputsMayRepeatByAStrideOfZero) {
    for (const char* dtype : {" bf16", " f32"}) {
        for (const ProblemLine& line : every_call(std::string(" b2 t70 h2 hv4 k32 v32 threads=1") + dtype)) {
            for (const Axis axis : axes) {
                CallTensors stored = harness::make_tensors(line);
                if (!repeat_inputs(stored.call, axis)) continue;
                CallTensors same = harness::make_tensors(line);
                repeat_inputs(same.call, axis);
                expand_inputs(same.call, axis);
                expect_same_bits(run_and_read(stored), run_and_read(same), format(line) + ", " + name_of(axis));
            }
        }
    }
}

TEST(Memory, M4_PoolsBeyondTwoToThe31) {
    for (const char* op : {"simple_gla", "kda"}) {
        for (const ProblemLine& line : forced_lines(std::string(op) + ":step b3 t2 h2 k16 v16 pool=200 threads=1")) {
            CallTensors made = harness::make_tensors(line);
            harness::Tensor& indices = made.tensors.at("indices");
            const double rows[] = {199, 5, 130};
            for (std::int64_t n = 0; n < 3; ++n) indices.set(n, rows[n]);
            std::vector<std::unique_ptr<Sparse>> memory;
            Call call = made.call;
            call.pool.states = spread(made.call.pool.states, 0, memory);
            const std::map<std::string, Bytes> expected = run_and_read(made);
            harness::Tensor o(line.dtype, {3, 2, 2, 16});
            call.out.o = o.view();
            ASSERT_TRUE(run(call).ok()) << format(line);
            expect_same_bits(expected, written(call), format(line));
        }
    }
}

}  // namespace
}  // namespace headrace::test
