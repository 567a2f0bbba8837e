// Fuzzes Problem: bytes become a call of any shapes, strides, dtypes and options; nothing may crash, whatever the
// answer.
//
// Views point into one static buffer only where they fit in it; the others have null data, as calls to plan may.
// Whatever Problem accepts must satisfy what the layers below assume, which is checked here by aborting.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "core/problem.hpp"
#include "core/views.hpp"

namespace {

using namespace headrace;

alignas(64) unsigned char memory[1 << 16];

// Reads numbers off the fuzzer's bytes; zeros when they are used up.
class Bytes {
  public:
    Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

    std::uint8_t byte() { return size_ == 0 ? 0 : (--size_, *data_++); }

    std::int64_t wide() {
        std::int64_t value = 0;
        for (int i = 0; i < 8; ++i) value = static_cast<std::int64_t>(static_cast<std::uint64_t>(value) << 8 | byte());
        return value;
    }

    // Mostly a small size, sometimes any number.
    std::int64_t number() {
        const std::uint8_t first = byte();
        return first < 240 ? first % 8 : wide();
    }

    double real() {
        const std::int64_t bits = wide();
        double value;
        std::memcpy(&value, &bits, sizeof(value));
        return value;
    }

  private:
    const std::uint8_t* data_;
    std::size_t size_;
};

// The sizes that a valid call would have; most views use them, so that most calls get far.
struct Sizes {
    std::int64_t B, T, H, HV, K, V, N;
};

void set_strides(TensorView& view) {
    std::uint64_t stride = 1;  // wraps for sizes that are refused
    for (int i = std::min(view.rank, 4) - 1; i >= 0; --i) {
        view.strides[i] = static_cast<std::int64_t>(stride & INT64_MAX);
        stride *= static_cast<std::uint64_t>(std::max<std::int64_t>(1, view.shape[i]));
    }
}

// Gives the view memory at an offset of the fuzzer's choice, if it fits there whole.
void back(TensorView& view, Bytes& bytes) {
    const std::size_t offset = std::size_t{bytes.byte()} * 256 + (bytes.byte() & 15);
    for (int i = 0; i < view.rank; ++i) {
        if (view.rank > 4 || view.shape[i] < 0 || view.strides[i] < 0) return;
    }
    const std::size_t size = size_of(view.dtype);
    if (size == 0 || view.rank < 0) return;
    const std::int64_t room = static_cast<std::int64_t>((sizeof(memory) - offset) / size);
    if (span_of(view) <= room) view.data = memory + offset;
}

TensorView make_view(Bytes& bytes, DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView view;
    const std::uint8_t kind = bytes.byte();
    if (kind < 24) return view;
    view.rank = kind < 32 ? static_cast<std::int8_t>(bytes.byte()) : static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), view.shape);
    if (kind < 48) view.shape[bytes.byte() % 4] = bytes.number();
    set_strides(view);
    if (kind >= 48 && kind < 64) view.strides[bytes.byte() % 4] = bytes.number();
    view.dtype = kind >= 64 && kind < 72 ? static_cast<DType>(bytes.byte() % 8) : dtype;
    view.device = kind >= 72 && kind < 76 ? static_cast<Device>(bytes.byte() % 4) : Device::cpu;
    if (kind % 4 != 0) back(view, bytes);
    return view;
}

Inputs make_inputs(Bytes& bytes, DType dtype, const Sizes& s, std::uint8_t which) {
    const DType gate = bytes.byte() % 2 ? dtype : DType::f32;
    Inputs in;
    in.q = make_view(bytes, dtype, {s.B, s.T, s.H, s.K});
    in.k = make_view(bytes, dtype, {s.B, s.T, s.H, s.K});
    in.v = make_view(bytes, dtype, {s.B, s.T, s.HV, s.V});
    if (which & 1) in.p = make_view(bytes, dtype, {s.B, s.T, s.H, s.K});
    if (which & 2) in.g = make_view(bytes, gate, {s.B, s.T, s.HV});
    if (which & 4) in.g = make_view(bytes, gate, {s.B, s.T, s.HV, s.K});
    if (which & 8) in.g_gamma = make_view(bytes, gate, {s.HV});
    if (which & 16) in.beta = make_view(bytes, gate, {s.B, s.T, s.HV});
    if (which & 32) in.gv = make_view(bytes, gate, {s.B, s.T, s.HV, s.V});
    if (which & 64) in.A_log = make_view(bytes, gate, {s.HV});
    if (which & 64) in.dt_bias = make_view(bytes, gate, {s.HV, s.K});
    if (which & 128) in.initial_state = make_view(bytes, gate, {s.N, s.HV, s.K, s.V});
    return in;
}

Options make_options(Bytes& bytes) {
    Options options;
    const std::uint8_t which = bytes.byte();
    if (which & 1) options.scale = bytes.real();
    options.reverse = which & 2, options.qk_l2norm = which & 4, options.allow_positive_gates = which & 8;
    if (which & 16) options.gate_form = static_cast<GateForm>(bytes.byte() % 4), options.lower_bound = bytes.real();
    if (which & 32) options.beta_form = static_cast<BetaForm>(bytes.byte() % 4);
    if (which & 64) options.chunk = 1 << bytes.byte() % 10, options.num_steps = static_cast<int>(bytes.number());
    if (which & 128)
        options.threads = static_cast<int>(bytes.number()), options.state_dtype = static_cast<DType>(bytes.byte() % 8);
    return options;
}

void require(bool holds) {
    if (!holds) std::abort();
}

// What kernels take for granted.
void check_accepted(const Call& call, const Problem& problem) {
    require(problem.H >= 1 && problem.K >= 1 && problem.V >= 1 && problem.HV == problem.H * problem.group);
    require(static_cast<std::int64_t>(problem.sequences.size()) == problem.N && problem.threads >= 1);
    require(problem.N == 0 || problem.B >= 1);
    for (const Sequence& sequence : problem.sequences) {
        require(sequence.begin >= 0 && sequence.begin <= sequence.end && sequence.end <= problem.T);
        require(sequence.row >= 0 && sequence.row < problem.B);
    }
    const TensorView& q = problem.keys();
    require(q.rank == 4 && q.shape[0] == problem.B && q.shape[3] == problem.K && q.dtype == problem.dtype);
    require(call.direction != Direction::step || !problem.in.initial_state.given());
    for (const TensorView* output :
         {&problem.out.o, &problem.out.final_state, &problem.grads.d_v, &problem.pool.states, &problem.summary.transition,
          &problem.summary.state, &problem.grads.d_initial_state}) {
        require(!output->given() || has_distinct_elements(*output));
        require(!output->given() || !overlaps(extent_of(*output), extent_of(problem.in.v)));
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Bytes bytes(data, size);
    for (std::size_t i = 0; i < sizeof(memory); i += 4) {  // small integers and, read as floats, tiny positive numbers
        const std::uint32_t word = static_cast<std::uint32_t>(i / 4 % 5);
        std::memcpy(memory + i, &word, 4);
    }
    Call call;
    call.op = static_cast<Operator>(bytes.byte() % 9);
    call.direction = static_cast<Direction>(bytes.byte() % 6);
    Sizes s{};
    s.B = bytes.number(), s.T = bytes.number(), s.H = bytes.number(), s.K = bytes.number(), s.V = bytes.number();
    s.HV =
        bytes.byte() % 4 == 0 ? bytes.number() : bounded_product(std::max<std::int64_t>(0, s.H), 1 + bytes.byte() % 2);
    const bool ragged = bytes.byte() % 4 == 0;
    s.N = ragged ? bytes.number() : s.B;
    const auto dtype = static_cast<DType>(bytes.byte() % 4);
    const DType state = dtype == DType::f64 ? DType::f64 : DType::f32;
    call.in = make_inputs(bytes, dtype, s, bytes.byte());
    if (ragged)
        call.in.cu_seqlens =
            make_view(bytes, bytes.byte() % 2 ? DType::i32 : DType::i64, {s.N < INT64_MAX ? s.N + 1 : s.N});
    call.out.o = make_view(bytes, dtype, {s.B, s.T, s.HV, s.V});
    call.out.final_state = make_view(bytes, state, {s.N, s.HV, s.K, s.V});
    call.d_out.d_o = make_view(bytes, dtype, {s.B, s.T, s.HV, s.V});
    call.grads.d_v = make_view(bytes, state, {s.B, s.T, s.HV, s.V});
    call.grads.d_g = make_view(bytes, state, {s.B, s.T, s.HV});
    call.pool.states = make_view(bytes, state, {bytes.number(), s.HV, s.K, s.V});
    call.grads.d_initial_state = make_view(bytes, state, {s.N, s.HV, s.K, s.V});
    call.summary.state = make_view(bytes, state, {s.N, s.HV, s.K, s.V});
    const bool delta = call.op >= Operator::delta_rule;
    call.summary.transition = delta                 ? make_view(bytes, state, {s.N, s.HV, s.K, s.K})
                              : call.in.g.rank == 4 ? make_view(bytes, state, {s.N, s.HV, s.K})
                                                    : make_view(bytes, state, {s.N, s.HV});
    if (bytes.byte() % 2)
        call.pool.indices = make_view(bytes, bytes.byte() % 2 ? DType::i32 : DType::i64, {s.N, bytes.number()});
    if (bytes.byte() % 4 == 0) call.pool.num_accepted_tokens = make_view(bytes, DType::i32, {s.N});
    call.options = make_options(bytes);

    for (const Contents contents : {Contents::ignore, Contents::check}) {
        Problem problem;
        const Status status = make_problem(call, contents, &problem);
        require(status.ok() || (status.code() == Code::invalid_argument && !status.message().empty()));
        if (status.ok()) check_accepted(call, problem);
    }
    std::vector<PlanEntry> entries;
    std::vector<Candidate> candidates;
    std::size_t workspace = 0;
    const bool planned = plan(call, &entries).ok();
    require(workspace_size(call, &workspace).ok() == planned);
    require(explain(call, &candidates).ok() || !planned);
    return 0;
}
