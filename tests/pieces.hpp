// Pieces: a call cut along its tokens into pieces (Options::piece) that run one after the other, each with the state
// and the roundings that the others hand it.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>

#include "tests/behaviours.hpp"

namespace headrace::test {

using Cuts = std::vector<std::int64_t>;

inline const char* const parameter_gradients[] = {"d_g_gamma", "d_A_log", "d_dt_bias"};

// Each piece has all sequences, those without tokens in it empty. `run` runs the calls of pieces, and backward_states
// where out.final_state is given with a backward; without that (`forward_states`) forwards give a backward's states.
class Pieces {
  public:
    using Run = std::function<Status(const Call&)>;

    Pieces(CallTensors& made, const Cuts& cuts, Run run = &run_here, bool forward_states = false)
        : made_(made), whole_(made.call), borders_{0}, run_(std::move(run)), forward_states_(forward_states) {
        const TensorView& q = whole_.in.q;
        borders_.insert(borders_.end(), cuts.begin(), cuts.end());
        borders_.push_back(q.shape[1]);
        if (whole_.in.cu_seqlens.given()) offsets_ = made.tensors.at("cu_seqlens").integers();
        sizes_.tokens = q.shape[0] * q.shape[1];
        sizes_.longest = q.shape[1];
        sizes_.sequences = offsets_.empty() ? q.shape[0] : static_cast<std::int64_t>(offsets_.size()) - 1;
        sizes_.heads = q.shape[2];
        for (std::size_t n = 0; n + 1 < offsets_.size(); ++n) {
            sizes_.longest = n == 0 ? offsets_[1] : std::max(sizes_.longest, offsets_[n + 1] - offsets_[n]);
        }
    }

    // In the order of the tokens as they run.
    void run_forward() {
        Handed handed = whole_.in.initial_state.given() ? Handed{whole_.in.initial_state, {}} : Handed{};
        for (std::size_t i = 0; i < count(); ++i) {
            const bool last = i + 1 == count();
            Handed next = last ? Handed{whole_.out.final_state, {}} : take_state();
            enter(piece(i), handed);
            call_.out.final_state = next.state;
            sizes_.final_roundings = next.roundings;
            finish();
            handed = next;
        }
    }

    // States first, as far as a backward recomputes them in its own way; then gradients from the last piece on.
    void run_backward() {
        std::vector<Handed> entering = {whole_.in.initial_state.given() ? Handed{whole_.in.initial_state, {}}
                                                                        : Handed{}};
        for (std::size_t i = 0; i + 1 < count(); ++i) {
            entering.push_back(take_state());
            enter(piece(i), entering[i]);
            set_gradients({}, {});
            sizes_.final_roundings = entering[i + 1].roundings;
            call_.out = {{}, entering[i + 1].state};
            if (forward_states_) run_as_forward();
            if (!forward_states_) finish();
        }
        std::map<std::string, std::vector<double>> sums;
        Handed handed = {whole_.d_out.d_final_state, {}};
        for (std::size_t i = count(); i-- > 0;) {
            Handed next = i == 0 ? Handed{whole_.grads.d_initial_state, {}} : take_state();
            enter(piece(i), entering[i]);
            set_gradients(handed, next);
            finish();
            add_parameters(sums);
            handed = next;
        }
        for (const auto& [name, values] : sums) {
            for (std::size_t j = 0; j < values.size(); ++j)
                made_.tensors.at(name).set(static_cast<std::int64_t>(j), values[j]);
        }
    }

  private:
    struct Handed {
        TensorView state, roundings;
    };

    std::size_t count() const { return borders_.size() - 1; }
    // Exact in any case: f64.
    Handed take_state() {
        const TensorView &k = whole_.in.k, &v = whole_.in.v;
        const std::vector<std::int64_t> shape = {sizes_.sequences, v.shape[2], k.shape[3], v.shape[3]};
        tensors_.push_back(std::make_unique<harness::Tensor>(DType::f64, shape));
        const TensorView state = tensors_.back()->view();
        tensors_.push_back(std::make_unique<harness::Tensor>(
            DType::f32, std::vector<std::int64_t>{shape[0], shape[1], roundings_size(shape[2])}));
        return {state, tensors_.back()->view()};
    }
    // Borders [begin, end) of the piece that runs as the i-th.
    std::size_t piece(std::size_t i) const { return whole_.options.reverse ? count() - 1 - i : i; }
    void enter(std::size_t index, const Handed& handed) {
        const std::int64_t begin = borders_[index], end = borders_[index + 1];
        call_ = tokens_of(whole_, begin, end);
        if (!offsets_.empty()) {
            tensors_.push_back(
                std::make_unique<harness::Tensor>(DType::i64, std::vector<std::int64_t>{sizes_.sequences + 1}));
            for (std::size_t n = 0; n < offsets_.size(); ++n) {
                tensors_.back()->set(static_cast<std::int64_t>(n),
                                     static_cast<double>(std::clamp(offsets_[n], begin, end) - begin));
            }
            call_.in.cu_seqlens = tensors_.back()->view();
        }
        call_.in.initial_state = handed.state;
        sizes_.initial_roundings = handed.roundings;
        sizes_.final_roundings = sizes_.d_final_roundings = sizes_.d_initial_roundings = {};
        call_.options.piece = &sizes_;
    }
    void set_gradients(const Handed& leaving, const Handed& entering) {
        call_.out = {};
        call_.d_out.d_final_state = leaving.state;
        sizes_.d_final_roundings = leaving.roundings;
        call_.grads.d_initial_state = entering.state;
        sizes_.d_initial_roundings = entering.roundings;
    }
    static Status run_here(const Call& call) {
        if (call.direction == Direction::backward && call.out.final_state.given())
            return backward_states(call.op, call.in, call.d_out, call.grads, call.out, call.options);
        return harness::run_call(call);
    }
    void finish() {
        const Status status = run_(call_);
        ASSERT_TRUE(status.ok()) << status.message();
    }
    void run_as_forward() {
        const TensorView& v = call_.in.v;
        tensors_.push_back(std::make_unique<harness::Tensor>(
            v.dtype, std::vector<std::int64_t>{v.shape[0], v.shape[1], v.shape[2], v.shape[3]}));
        Call forward = call_;
        forward.direction = Direction::forward;
        forward.d_out = {}, forward.grads = {};
        forward.out.o = tensors_.back()->view();
        std::swap(forward, call_);
        finish();
        std::swap(forward, call_);
    }
    void add_parameters(std::map<std::string, std::vector<double>>& sums) const {
        for (const char* name : parameter_gradients) {
            if (!made_.tensors.count(name)) continue;
            const std::vector<double> part = made_.tensors.at(name).values();
            std::vector<double>& sum = sums[name];
            sum.resize(part.size());
            for (std::size_t j = 0; j < part.size(); ++j) sum[j] += part[j];
        }
    }

    CallTensors& made_;
    const Call whole_;
    Call call_;
    Cuts borders_, offsets_;
    Piece sizes_;
    std::vector<std::unique_ptr<harness::Tensor>> tensors_;
    const Run run_;
    const bool forward_states_;
};

}  // namespace headrace::test
