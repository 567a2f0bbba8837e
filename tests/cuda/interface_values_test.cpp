// What calls on CUDA tensors make of values that nobody looks at before kernels read them: rows of pools, gates and
// betas, sequences; and what HEADRACE_DEBUG_NAN=1 says of them.
#include "tests/cuda/device_runs.hpp"
#include "tests/cuda/device_tensors.hpp"

namespace headrace::test {
namespace {

// ---- pools ----

const char* const pool_line = "gated_delta_rule:step b3 t1 h1 hv2 k32 v16 pool=5";

// The line's call with these rows.
struct WithRows {
    DeviceTensors tensors{pool_line};
    std::map<std::string, Bytes> bits;
    Status status;

    explicit WithRows(const std::vector<std::int64_t>& rows) {
        harness::Tensor& indices = tensors.host.tensors.at("indices");
        for (std::int64_t n = 0; n < indices.numel(); ++n)
            indices.set(n, static_cast<double>(rows[static_cast<std::size_t>(n)]));
        tensors.upload();
        status = run(tensors.call);
        bits = tensors.written();
    }
    std::vector<double> output(std::int64_t n) {
        const std::vector<double> all = tensors.host.tensors.at("o").values();
        return {all.begin() + n * 32, all.begin() + (n + 1) * 32};
    }
    std::vector<double> row(std::int64_t n) {
        const std::vector<double> all = tensors.host.tensors.at("pool").values();
        return {all.begin() + n * 1024, all.begin() + (n + 1) * 1024};
    }
};

TEST(CudaInterface, APoolsIndicesLieOnTheDevice) {
    const std::vector<double> zeros(32, 0.0);
    CallTensors untouched = harness::make_tensors(line_of(pool_line));
    const std::vector<double> before = untouched.tensors.at("pool").values();
    WithRows whole({4, 0, 2}), padded({4, -1, 2}), stray({4, 77, 2});
    EXPECT_TRUE(whole.status.ok() && padded.status.ok() && stray.status.ok());
    for (WithRows* rows : {&padded, &stray}) {
        for (const std::int64_t n : {0, 2}) EXPECT_EQ(rows->output(n), whole.output(n));
        for (const std::int64_t row : {4, 2}) EXPECT_EQ(rows->row(row), whole.row(row));
        for (const std::int64_t row : {0, 1, 3}) {
            EXPECT_EQ(rows->row(row),
                      std::vector<double>(before.begin() + row * 1024, before.begin() + (row + 1) * 1024));
        }
    }
    EXPECT_EQ(padded.output(1), zeros);
    for (const std::vector<std::int64_t>& rows : {std::vector<std::int64_t>{4, 77, 2}, {4, 5, 2}, {4, -2, 2}})
        for (const double value : WithRows(rows).output(1)) EXPECT_TRUE(std::isnan(value)) << rows[1];
    EXPECT_NE(whole.output(1), zeros);
    EXPECT_NE(whole.row(4), std::vector<double>(before.begin() + 4 * 1024, before.end()));
    const Environment debug("HEADRACE_DEBUG_NAN", "1");
    expect_error(WithRows({4, 77, 2}).status, Code::invalid_argument, {"pool.indices"});
    expect_error(WithRows({4, -2, 2}).status, Code::invalid_argument, {"pool.indices"});
    EXPECT_TRUE(WithRows({4, -1, 2}).status.ok());
}

// Of speculative decoding: the token whose state has nowhere to go, or all of a sequence that comes from nowhere.
TEST(CudaInterface, RowsOfSlots) {
    constexpr std::int64_t tokens = 3, values = 16;
    for (const bool accepted : {false, true}) {
        DeviceTensors tensors("kda:step b2 t3 h1 k32 v16 pool=9 spec=3");
        if (accepted)
            tensors.host.tensors.at("num_accepted_tokens").set(1, 5);
        else
            tensors.host.tensors.at("indices").set(tokens + 1, 77);
        tensors.upload();
        EXPECT_TRUE(run(tensors.call).ok());
        tensors.written();
        const std::vector<double> o = tensors.host.tensors.at("o").values();
        for (std::size_t i = 0; i < o.size(); ++i) {
            const std::int64_t token = static_cast<std::int64_t>(i) / values;
            const bool wrong = accepted ? token >= tokens : token == tokens + 1;
            EXPECT_EQ(std::isnan(o[i]), wrong) << accepted << " token " << token;
        }
    }
}

// ---- values that an operator must not be given ----

struct BadValue {
    const char *line, *tensor;
    double value;
    const char* error;
};

TEST(CudaInterface, ABadGateSpoilsItsHeadAndNoOther) {
    const BadValue cases[] = {
        {"gated_delta_rule:fwd t40 h2 k32 v16 state=inout", "g", NAN, "g: "},
        {"gla:fwd t40 h2 k32 v16 state=inout", "g", 0.5, "g: "},
        {"simple_gla:fwd t40 h2 k32 v16 state=inout force=cuda.recurrent", "g", 1e-3, "g: "},
        {"kda:bwd t40 h2 k32 v16 state=inout", "g", NAN, "g: "},
        {"gated_delta_rule:bwd t40 h2 k32 v16 state=inout force=cuda.recurrent", "g", 2, "g: "},
        {"gated_delta_rule:step b1 t1 h2 k32 v16", "g", NAN, "g: "},
        {"gated_delta_rule:fwd t40 h2 k32 v16 state=inout", "beta", INFINITY, "beta: "},
    };
    for (const BadValue& bad : cases) {
        DeviceTensors clean(bad.line), spoiled(bad.line), reported(bad.line);
        const auto bits = clean.run_and_read();
        for (DeviceTensors* tensors : {&spoiled, &reported}) {  // head 1 of the last token
            harness::Tensor& tensor = tensors->host.tensors.at(bad.tensor);
            tensor.set(tensor.numel() - 1, bad.value);
            tensors->upload();
        }
        Gate gate(spoiled.stream);
        const Status status = run(spoiled.call);
        gate.open();
        EXPECT_TRUE(status.ok()) << status.message();
        const auto spoilt = spoiled.written();
        EXPECT_FALSE(gate.early());
        const auto check = [&](const char* name, bool state) {
            const TensorView before = clean.host.tensors.at(name).view(), after = spoiled.host.tensors.at(name).view();
            EXPECT_EQ(of_head(before, 2, 0, state), of_head(after, 2, 0, state)) << bad.line << ": " << name;
            const std::vector<double> head = of_head(after, 2, 1, state);
            const auto finite = [](double x) { return std::isfinite(x); };  // the last token, or key channel of a state
            EXPECT_TRUE(std::none_of(head.end() - 16, head.end(), finite)) << bad.line << ": " << name;
        };
        switch (clean.call.direction) {
            case Direction::backward: check("d_initial_state", true); break;
            case Direction::step: check("o", false), check("pool", true); break;
            default: check("o", false), check("final_state", true);
        }
        const Environment debug("HEADRACE_DEBUG_NAN", "1");
        expect_error(run(reported.call), Code::invalid_argument, {bad.error});
        reported.synchronize();
        if (bad.value > 0 && *bad.tensor == 'g') {
            reported.call.options.allow_positive_gates = true;
            EXPECT_TRUE(run(reported.call).ok());
        }
        reported.synchronize();
    }
}

// Of a step the pool stays as it is; with HEADRACE_DEBUG_NAN=1 calls name what was wrong.
TEST(CudaInterface, SequencesOnTheDeviceThatAreNone) {
    for (const char* line :
         {"kda:step varlen=0,2,2,5,6 h2 k32 v16 pool=9", "gla:fwd varlen=0,2,2,5,6 h2 k32 v16 state=inout"}) {
        DeviceTensors tensors(line);
        const std::vector<double> before = harness::read_values(tensors.host.call.pool.states);
        tensors.host.tensors.at("cu_seqlens").set(2, 7);
        tensors.upload();
        ASSERT_EQ(tensors.call.in.cu_seqlens.device, Device::cuda);
        EXPECT_TRUE(run(tensors.call).ok());
        tensors.written();
        for (const double value : tensors.host.tensors.at("o").values()) ASSERT_TRUE(std::isnan(value));
        EXPECT_EQ(harness::read_values(tensors.host.call.pool.states), before);
        const Environment debug("HEADRACE_DEBUG_NAN", "1");
        expect_error(run(tensors.call), Code::invalid_argument,
                     {"cu_seqlens: expected numbers that ascend from 0 to tokens 6, got others on the device"});
        tensors.synchronize();
    }
}

}  // namespace
}  // namespace headrace::test
