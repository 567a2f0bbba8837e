// SampleCall: a small valid call of any operator and direction with memory of its own, for tests that spoil one thing.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "headrace/headrace.hpp"

namespace headrace::test {

struct SampleCall {
    std::int64_t B = 2, T = 5, H = 2, HV = 4, K = 3, V = 6;
    Call call;

    SampleCall(Operator op, Direction direction) {
        call.op = op;
        call.direction = direction;
        Inputs& in = call.in;
        in.q = tensor(DType::f32, {B, T, H, K}, 0.5f);
        in.k = tensor(DType::f32, {B, T, H, K}, 0.25f);
        in.v = tensor(DType::f32, {B, T, HV, V}, 1.0f);
        if (op == Operator::comba) in.p = tensor(DType::f32, {B, T, H, K}, 0.25f);
        if (op == Operator::gla || op == Operator::kda) in.g = tensor(DType::f32, {B, T, HV, K}, -0.5f);
        if (op == Operator::simple_gla || op == Operator::gated_delta_rule || op == Operator::comba) {
            in.g = tensor(DType::f32, {B, T, HV}, -0.5f);
        }
        if (op == Operator::retention) in.g_gamma = tensor(DType::f32, {HV}, -0.25f);
        const bool delta = op == Operator::delta_rule || op == Operator::gated_delta_rule || op == Operator::comba ||
                           op == Operator::kda;
        if (delta) in.beta = tensor(DType::f32, {B, T, HV}, 0.5f);
        if (direction == Direction::backward) {
            call.d_out.d_o = tensor(DType::f32, {B, T, HV, V}, 1.0f);
            call.grads.d_q = tensor(DType::f32, {B, T, H, K});
        } else {
            call.out.o = tensor(DType::f32, {B, T, HV, V});
        }
        if (direction == Direction::step) call.pool.states = tensor(DType::f32, {3, HV, K, V});
    }
    SampleCall(const SampleCall&) = delete;

    // Zeroed or, for f32, filled memory that lives as long as this object.
    TensorView tensor(DType dtype, std::initializer_list<std::int64_t> shape, float value = 0) {
        TensorView view(nullptr, dtype, shape);
        const auto count = static_cast<std::size_t>(view.numel());
        std::vector<float>& memory = memory_.emplace_back((count * size_of(dtype) + 15) / 4, 0.0f);
        if (dtype == DType::f32) memory.assign(memory.size(), value);
        view.data = memory.data();
        return view;
    }

    // An i64 vector with these values.
    TensorView integers(const std::vector<std::int64_t>& values) {
        std::vector<std::int64_t>& memory = integers_.emplace_back(values);
        return {memory.data(), DType::i64, {static_cast<std::int64_t>(values.size())}};
    }

    // [sequences, slots] in i64.
    TensorView integers(std::int64_t sequences, std::int64_t slots, const std::vector<std::int64_t>& values) {
        std::vector<std::int64_t>& memory = integers_.emplace_back(values);
        return {memory.data(), DType::i64, {sequences, slots}};
    }

    // The same sample with a ragged batch: B = 1, T = the last entry.
    void pack(const std::vector<std::int64_t>& cu_seqlens, std::int64_t tokens) {
        call.in.cu_seqlens = integers(cu_seqlens);
        for (TensorView* view : {&call.in.q, &call.in.k, &call.in.v, &call.in.p, &call.in.g, &call.in.beta, &call.out.o,
                                 &call.d_out.d_o, &call.grads.d_q}) {
            if (!view->given()) continue;
            view->shape[0] = 1;
            view->shape[1] = tokens;
        }
        B = 1, T = tokens;
    }

  private:
    std::deque<std::vector<float>> memory_;  // a deque keeps its elements in place
    std::deque<std::vector<std::int64_t>> integers_;
};

}  // namespace headrace::test
