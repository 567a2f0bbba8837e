// examples/mpi on several ranks (mpirun): bits and bars of one process for every kind of tensor, errors known to all.
#include <mpi.h>

#include <functional>

#include "behaviours.hpp"
#include "examples/mpi/cut_sequence.hpp"

namespace headrace::test {
namespace {

using harness::Tensor;
using headrace_mpi::AgreedError, headrace_mpi::rank_in, headrace_mpi::ranks_of, headrace_mpi::Ring, headrace_mpi::Scan;
using Cuts = std::vector<std::int64_t>;

// Tokens that run first may be the last ones.
std::size_t place_of(const Call& whole, MPI_Comm comm) {
    return static_cast<std::size_t>(whole.options.reverse ? ranks_of(comm) - 1 - rank_in(comm) : rank_in(comm));
}

// The part of a call that a rank sees: its tokens, and what is known at the ends alone.
Call part_of(const Call& whole, const Cuts& cuts, MPI_Comm comm) {
    const std::size_t place = place_of(whole, comm);
    Call part = tokens_of(whole, cuts[place], cuts[place + 1]);
    if (rank_in(comm) != 0) part.in.initial_state = part.grads.d_initial_state = {};
    if (rank_in(comm) + 1 != ranks_of(comm)) part.out.final_state = part.d_out.d_final_state = {};
    return part;
}

template <class Way>
void run_part(const Call& part, MPI_Comm comm) {
    Way way(comm, part.op, part.options);
    if (part.direction == Direction::forward) return way.forward(part.in, part.out);
    const TensorView& v = part.in.v;
    const Tensor o(v.dtype, {v.shape[0], v.shape[1], v.shape[2], v.shape[3]});
    way.forward(part.in, {o.view(), {}});
    way.backward(part.in, part.d_out, part.grads);
}

bool is_parameter(const std::string& name) { return name == "d_g_gamma" || name == "d_A_log" || name == "d_dt_bias"; }

using Values = std::map<std::string, std::vector<double>>;

// Of values of the outputs of a call those that a part has, whose tokens begin at `begin`.
Values values_of(const Values& values, const Call& whole, const Call& part, std::int64_t begin) {
    Values result = values;
    for (const harness::NamedView& output : harness::output_views(whole)) {
        const bool has_tokens = !is_parameter(output.name) && output.name.find("state") == std::string::npos;
        if (!has_tokens || !values.count(output.name)) continue;
        const std::vector<double>& all = values.at(output.name);
        const std::int64_t rows = output.view.shape[0], tokens = output.view.shape[1], own = part.in.q.shape[1];
        const auto size = static_cast<std::int64_t>(all.size()) / (rows * tokens);
        std::vector<double>& kept = result[output.name] = {};
        for (std::int64_t b = 0; b < rows; ++b) {
            const auto first = all.begin() + (b * tokens + begin) * size;
            kept.insert(kept.end(), first, first + own * size);
        }
    }
    return result;
}

void forget_outputs(CallTensors& made) {
    for (const harness::NamedView& output : harness::output_views(made.call)) {
        made.tensors.at(output.name).fill(std::numeric_limits<double>::quiet_NaN());
    }
}

void expect_scan_within_bars(const std::string& text, const Cuts& cuts, MPI_Comm comm = MPI_COMM_WORLD) {
    CallTensors made = harness::make_tensors(line_of(text));
    const harness::Expected expected = harness::expect(made.call);
    const Call part = part_of(made.call, cuts, comm);
    run_part<Scan>(part, comm);
    const std::int64_t begin = cuts[place_of(made.call, comm)];
    expect_within_bars(part, values_of(expected.outputs, made.call, part, begin), text,
                       values_of(expected.terms, made.call, part, begin));
}

// But for sums over the ranks, which are near.
void expect_ring_gives_same_bits(const std::string& text, const Cuts& cuts, MPI_Comm comm = MPI_COMM_WORLD) {
    CallTensors made = harness::make_tensors(line_of(text));
    const Status status = run(made.call);
    EXPECT_TRUE(status.ok()) << text << ": " << status.message();
    const Call part = part_of(made.call, cuts, comm);
    std::map<std::string, Bytes> expected = written(part);
    Values sums;
    for (const auto& [name, tensor] : made.tensors) {
        if (expected.count(name) && is_parameter(name)) sums[name] = tensor.values(), expected.erase(name);
    }
    forget_outputs(made);
    run_part<Ring>(part, comm);
    std::map<std::string, Bytes> actual = written(part);
    for (const auto& [name, values] : sums) {
        actual.erase(name);
        EXPECT_LT(relative_error(made.tensors.at(name).values(), values), 1e-5) << text << ": " << name;
    }
    expect_same_bits(expected, actual, text);
}

const char* const directions[] = {":fwd", ":bwd"};

TEST(Ranks, RingsGiveTheBitsOfOneProcess) {
    for (const char* direction : directions) {
        for (const Operator op : operators()) {
            for (const char* type : {" f32", " bf16"}) {
                const std::string line = line_text(op, direction) + " t230 h1 hv2 k64 v48 state=inout" + type;
                expect_ring_gives_same_bits(line, {0, 64, 192, 230});
            }
        }
        const std::string kda = std::string("kda") + direction, raw = " rawgate beta=sigmoid l2norm state=inout";
        expect_ring_gives_same_bits(kda + " t300 b2 h2 k32" + raw, {0, 128, 128, 300});
        expect_ring_gives_same_bits(kda + " t150 h2 k32 v32 gv state=inout", {0, 64, 128, 150});
        expect_ring_gives_same_bits(kda + " t150 h2 k32 v48 f64 state=inout", {0, 64, 128, 150});
    }
}

// Numbers beside the state: roundings that add up over all ranks decide how the last ones compute.
TEST(Ranks, RingsHandRoundingsOn) {
    for (const char* type : {" f32", " bf16"}) {
        const std::string forward = "delta_rule:fwd t1500 h2 k64 v32 state=inout betas=2,2";
        const std::string backward = "delta_rule:bwd t1100 h8 k64 v32 state=inout betas=1.8,2";
        expect_ring_gives_same_bits(forward + type, {0, 576, 1280, 1500});
        expect_ring_gives_same_bits(backward + type, {0, 192, 576, 1100});
    }
    // Where the forward of the first or of the second rank goes on in double, and a backward does not.
    const std::string reflections = "delta_rule:bwd t1000 h2 k128 v64 state=inout betas=2,2";
    expect_ring_gives_same_bits(reflections, {0, 832, 896, 1000});
    expect_ring_gives_same_bits(reflections, {0, 64, 896, 1000});
}

TEST(Ranks, ScansAreWithinTheBars) {
    for (const char* direction : directions) {
        for (const Operator op : operators()) {
            for (const char* type : {" f32", " bf16"}) {
                const std::string line = line_text(op, direction) + " t130 h1 hv2 k64 v48 state=inout l2norm" + type;
                expect_scan_within_bars(line, {0, 40, 90, 130});
            }
        }
        const std::string kda = std::string("kda") + direction, raw = " rawgate beta=sigmoid l2norm state=inout";
        expect_scan_within_bars(kda + " t200 b2 h2 k32" + raw, {0, 100, 100, 200});
        expect_scan_within_bars(kda + " t150 h2 k32 v48 f64 state=inout", {0, 50, 110, 150});
    }
}

TEST(Ranks, ReversedSequencesRunOverReversedRanks) {
    MPI_Comm reversed{};
    MPI_Comm_split(MPI_COMM_WORLD, 0, -rank_in(MPI_COMM_WORLD), &reversed);
    for (const char* direction : directions) {
        for (const char* op : {"gla", "kda"}) {
            const std::string line = std::string(op) + direction + " t300 h2 k64 v48 state=inout l2norm reverse";
            expect_ring_gives_same_bits(line, {0, 44, 172, 300}, reversed);
            expect_scan_within_bars(line, {0, 90, 180, 300}, reversed);
        }
    }
    MPI_Comm_free(&reversed);
}

std::string message_of(const std::function<void()>& body) {
    try {
        body();
    } catch (const AgreedError& error) {
        return error.what();
    }
    return "none";
}

TEST(Ranks, AllThrowWhatTheFirstOneSays) {
    const int own = rank_in(MPI_COMM_WORLD);
    for (int first = 0; first < ranks_of(MPI_COMM_WORLD); ++first) {
        const Status status = own < first ? Status() : Status(Code::invalid_argument, "of " + std::to_string(own));
        const std::string number = std::to_string(first);
        const std::string message = message_of([&] { headrace_mpi::agree(status, MPI_COMM_WORLD); });
        EXPECT_EQ(message, "rank " + number + ": of " + number);
    }
    EXPECT_EQ(message_of([&] { headrace_mpi::agree(Status(), MPI_COMM_WORLD); }), "none");
}

// A NaN that one rank alone can see, met in a summary, a forward or a state on its way; nothing is left on its way.
template <class Way>
void expect_known_to_all(const std::string& direction) {
    const std::string text = "kda:" + direction + " t192 h2 k32 v32 state=inout l2norm";
    const Cuts cuts = {0, 64, 128, 192};
    for (int wrong = 0; wrong < ranks_of(MPI_COMM_WORLD); ++wrong) {
        CallTensors made = harness::make_tensors(line_of(text));
        const Call part = part_of(made.call, cuts, MPI_COMM_WORLD);
        Tensor& g = made.tensors.at("g");
        const std::int64_t place = g.numel() / 3 * wrong + 5;
        if (rank_in(MPI_COMM_WORLD) == wrong) g.set(place, std::numeric_limits<double>::quiet_NaN());
        const std::string message = message_of([&] { run_part<Way>(part, MPI_COMM_WORLD); });
        EXPECT_EQ(message.rfind("rank " + std::to_string(wrong) + ": g: ", 0), 0u) << message;
    }
    expect_ring_gives_same_bits(text, cuts);
    expect_scan_within_bars(text, cuts);
}

TEST(Ranks, AnErrorOfOneIsKnownToAll) {
    for (const char* direction : {"fwd", "bwd"}) {
        expect_known_to_all<Scan>(direction);
        expect_known_to_all<Ring>(direction);
    }
}

template <class Way>
void expect_refused() {
    const auto message = [](const std::string& text, const std::function<void(Call&)>& change) {
        CallTensors made = harness::make_tensors(line_of(text));
        Call part = part_of(made.call, {0, 10, 20, 30}, MPI_COMM_WORLD);
        change(part);
        return message_of([&] { run_part<Way>(part, MPI_COMM_WORLD); });
    };
    const bool last = rank_in(MPI_COMM_WORLD) == 2;
    const std::string key_dim = last ? "16" : "32", text = "kda:bwd t30 h2 v32 k";
    EXPECT_EQ(message(text + key_dim, [](Call&) {}), "rank 2: key_dim: expected 32 as on rank 0, got 16");
    const auto move_state = [&](Call& part) {
        if (last) part.in.initial_state = part.d_out.d_final_state;
    };
    EXPECT_EQ(message(text + "32 state=inout", move_state), "rank 2: initial_state: expected on the first rank alone");
    const auto lose_beta = [&](Call& part) {
        if (last) part.in.beta = TensorView(part.in.beta.data, DType::f32, {1, 3, 2});
    };
    const std::string beta = message(text + "32", lose_beta);
    EXPECT_EQ(beta.rfind("rank 2: beta: expected", 0), 0u) << beta;
    const CallTensors made = harness::make_tensors(line_of(text + "32"));
    const Call& call = made.call;
    Way way(MPI_COMM_WORLD, call.op, call.options);
    EXPECT_EQ(message_of([&] { way.backward(call.in, call.d_out, call.grads); }),
              "rank 0: k: expected inputs as of the forward() before");
}

TEST(Ranks, CallsThatDoNotFitTogetherAreRefused) {
    expect_refused<Scan>();
    expect_refused<Ring>();
    // Of value channels that decay apart there is no summary, though a forward of them.
    const CallTensors made = harness::make_tensors(line_of("kda:fwd t30 h2 k32 gv"));
    const Call part = part_of(made.call, {0, 10, 20, 30}, MPI_COMM_WORLD);
    const std::string message = message_of([&] { run_part<Scan>(part, MPI_COMM_WORLD); });
    EXPECT_EQ(message.rfind("rank 0: gv: expected none", 0), 0u) << message;
}

}  // namespace
}  // namespace headrace::test

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    testing::InitGoogleTest(&argc, argv);
    const int result = RUN_ALL_TESTS();
    MPI_Finalize();
    return result;
}
