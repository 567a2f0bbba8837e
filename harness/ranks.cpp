// ranks: a call cut into pieces of the token axis as several processes would run it, joined by summaries.
#include "harness/ranks.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "harness/device_call.hpp"
#include "harness/oracle_call.hpp"
#include "harness/random.hpp"
#include "harness/run_call.hpp"
#include "harness/tensors.hpp"

namespace headrace::harness {
namespace {

using Shape = std::vector<std::int64_t>;

TensorView tokens_of(TensorView view, std::int64_t begin, std::int64_t end) {
    if (!view.given()) return view;
    view.data =
        static_cast<char*>(view.data) + begin * view.strides[1] * static_cast<std::int64_t>(size_of(view.dtype));
    view.shape[1] = end - begin;
    return view;
}

// One piece: its call, and what it gives to and takes from others.
struct Piece {
    Call call;
    Tensor cu_seqlens;
    Tensor transition, state;                // of its tokens alone
    Tensor entering;                         // the state; not given: zero
    Tensor adjoint;                          // what its tokens leave of the gradient before them: summarize_backward's
    Tensor leaving_gradient;                 // of the state behind it; not given: zero
    Tensor d_g_gamma, d_A_log, d_dt_bias;    // summed over its tokens

    Summary summary() const { return {transition.view(), state.view()}; }
};

class Ranks {
  public:
    // violation: null on the CPU.
    Ranks(const Call& call, const std::vector<std::int64_t>& borders, Folding folding, std::string* violation)
        : whole_(call), folding_(folding), violation_(violation) {
        const TensorView &k = call.in.k, &v = call.in.v;
        const std::vector<std::int64_t> offsets = read_integers(call.in.cu_seqlens);
        N_ = offsets.empty() ? k.shape[0] : static_cast<std::int64_t>(offsets.size()) - 1;
        H_ = v.shape[2], K_ = k.shape[3], V_ = v.shape[3];
        wide_ = k.dtype == DType::f64 ? DType::f64 : DType::f32;
        sizes_.tokens = k.shape[0] * k.shape[1], sizes_.heads = k.shape[2], sizes_.sequences = N_;
        sizes_.longest = offsets.empty() ? k.shape[1] : 0;
        for (std::size_t n = 1; n < offsets.size(); ++n)
            sizes_.longest = std::max(sizes_.longest, offsets[n] - offsets[n - 1]);
        pieces_.resize(borders.size() - 1);
        for (std::size_t r = 0; r < pieces_.size(); ++r) cut(pieces_[r], offsets, borders[r], borders[r + 1]);
        if (call.options.reverse) std::reverse(pieces_.begin(), pieces_.end());  // from here on as they run
    }

    Status run() {
        const bool backward = whole_.direction == Direction::backward;
        const bool transitions = pieces_.size() > 2 || whole_.in.initial_state.given() || backward;
        for (Piece& piece : pieces_) {
            if (Status status = summarize_piece(piece, transitions); !status.ok()) return status;
        }
        if (Status status = enter_states(); !status.ok()) return status;
        if (backward) {
            if (Status status = enter_gradients(); !status.ok()) return status;
        }
        for (Piece& piece : pieces_) {
            piece.call.options.piece = &sizes_;
            piece.call.in.initial_state = &piece == &pieces_.front() ? whole_.in.initial_state : piece.entering.view();
            piece.call.out.final_state = &piece == &pieces_.back() ? whole_.out.final_state : TensorView{};
            if (backward) give_gradients(piece);
            if (Status status = run_accepted(piece.call); !status.ok()) return status;
        }
        if (backward) add_parameter_gradients();
        return {};
    }

  private:
    Shape state_shape() const { return {N_, H_, K_, V_}; }
    Tensor make_state() const { return Tensor(wide_, state_shape()); }
    Tensor make_transition() const {
        if (is_delta()) return Tensor(wide_, {N_, H_, K_, K_});
        return whole_.in.g.rank == 4 ? Tensor(wide_, {N_, H_, K_}) : Tensor(wide_, {N_, H_});
    }
    bool is_delta() const { return has_delta_rule(whole_.op); }

    void cut(Piece& piece, const std::vector<std::int64_t>& offsets, std::int64_t begin, std::int64_t end) {
        Call& call = piece.call;
        call.op = whole_.op, call.direction = whole_.direction, call.options = whole_.options, call.in = whole_.in;
        for (TensorView Inputs::*tensor : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::p, &Inputs::g, &Inputs::beta}) {
            call.in.*tensor = tokens_of(whole_.in.*tensor, begin, end);
        }
        call.out.o = tokens_of(whole_.out.o, begin, end);
        call.d_out.d_o = tokens_of(whole_.d_out.d_o, begin, end);
        for (TensorView Gradients::* tensor : {&Gradients::d_q, &Gradients::d_k, &Gradients::d_v, &Gradients::d_p,
                                               &Gradients::d_g, &Gradients::d_beta}) {
            call.grads.*tensor = tokens_of(whole_.grads.*tensor, begin, end);
        }
        if (offsets.empty()) return;
        piece.cu_seqlens = Tensor(whole_.in.cu_seqlens.dtype, {N_ + 1});
        for (std::size_t n = 0; n < offsets.size(); ++n) {
            piece.cu_seqlens.set(static_cast<std::int64_t>(n),
                                 static_cast<double>(std::clamp(offsets[n], begin, end) - begin));
        }
        call.in.cu_seqlens = piece.cu_seqlens.view();
    }

    Status summarize_piece(Piece& piece, bool transition) const {
        Call call = piece.call;
        call.in.initial_state = {};
        call.options.force = nullptr;
        if (transition) piece.transition = make_transition();
        piece.state = make_state();
        call.direction = Direction::summarize;
        call.summary = piece.summary();
        return run(call);
    }

    // S_out = M S_in + R from piece to piece, or of all pieces before one at once.
    Status enter_states() {
        const TensorView first = whole_.in.initial_state;
        Tensor transition, state;  // of the pieces so far
        for (std::size_t r = 1; r < pieces_.size(); ++r) {
            const Piece& before = pieces_[r - 1];
            const TensorView entering = r == 1 ? first : before.entering.view();
            Tensor& next = pieces_[r].entering = make_state();
            Summary so_far = before.summary();
            Tensor composed_transition, composed_state;
            if (r > 1 && folding_ == Folding::summaries) {
                composed_transition = make_transition(), composed_state = make_state();
                so_far = {composed_transition.view(), composed_state.view()};
                const Summary earlier{transition.view(), state.view()};
                if (Status status = compose(before.summary(), earlier, so_far); !status.ok()) return status;
            }
            const TensorView base = folding_ == Folding::summaries ? first : entering;
            if (base.given()) {
                if (Status status = apply(so_far, base, false, next.view()); !status.ok()) return status;
            } else {
                copy(next, so_far.state);
            }
            if (folding_ == Folding::states) continue;
            transition = r > 1 ? std::move(composed_transition) : copy_of(before.transition);
            state = r > 1 ? std::move(composed_state) : copy_of(before.state);
        }
        return {};
    }
    static void copy(Tensor& to, const TensorView& from) {
        const std::vector<double> values = read_values(from);
        to.write(0, static_cast<std::int64_t>(values.size()), values.data());
    }
    static Tensor copy_of(const Tensor& tensor) {
        if (!tensor.given()) return {};
        Tensor result(tensor.dtype(), tensor.shape());
        copy(result, tensor.view());
        return result;
    }

    // D_in = M^T D_out + Dx, from the last piece to the first.
    Status enter_gradients() {
        TensorView leaving = whole_.d_out.d_final_state;
        for (std::size_t r = pieces_.size(); r-- > 1;) {
            Piece& piece = pieces_[r];
            if (piece.call.d_out.d_o.given()) {
                Call call = piece.call;
                piece.adjoint = make_state();
                call.in.initial_state = {};
                call.options.force = nullptr;
                call.direction = Direction::summarize_backward;
                call.grads.d_initial_state = piece.adjoint.view();
                if (Status status = run(call); !status.ok()) return status;
            }
            Tensor& gradient = pieces_[r - 1].leaving_gradient = make_state();
            if (leaving.given()) {
                const Summary map{piece.transition.view(), piece.adjoint.view()};
                if (Status status = apply(map, leaving, true, gradient.view()); !status.ok()) return status;
            } else {
                copy(gradient, piece.adjoint.view());
            }
            leaving = gradient.view();
        }
        return {};
    }
    void give_gradients(Piece& piece) const {
        const bool first = &piece == &pieces_.front(), last = &piece == &pieces_.back();
        piece.call.d_out.d_final_state = last ? whole_.d_out.d_final_state : piece.leaving_gradient.view();
        piece.call.grads.d_initial_state = first ? whole_.grads.d_initial_state : TensorView{};
        const auto of_parameter = [](Tensor& sum, const TensorView& whole) {
            if (!whole.given()) return TensorView{};
            sum = Tensor(whole.dtype, Shape(whole.shape, whole.shape + whole.rank));
            return sum.view();
        };
        piece.call.grads.d_g_gamma = of_parameter(piece.d_g_gamma, whole_.grads.d_g_gamma);
        piece.call.grads.d_A_log = of_parameter(piece.d_A_log, whole_.grads.d_A_log);
        piece.call.grads.d_dt_bias = of_parameter(piece.d_dt_bias, whole_.grads.d_dt_bias);
    }
    void add_parameter_gradients() const {
        const auto add = [&](const TensorView& whole, Tensor Piece::*part) {
            if (!whole.given()) return;
            std::vector<double> sums(static_cast<std::size_t>(whole.numel()));
            for (const Piece& piece : pieces_) {
                const std::vector<double> values = (piece.*part).values();
                for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += values[i];
            }
            store(whole, sums);
        };
        add(whole_.grads.d_g_gamma, &Piece::d_g_gamma);
        add(whole_.grads.d_A_log, &Piece::d_A_log);
        add(whole_.grads.d_dt_bias, &Piece::d_dt_bias);
    }
    // Of [HV], [HV, K] or [HV * K] and any strides.
    static void store(const TensorView& view, const std::vector<double>& values) {
        const std::int64_t columns = view.rank == 2 ? view.shape[1] : 1;
        for (std::size_t i = 0; i < values.size(); ++i) {
            const auto number = static_cast<std::int64_t>(i);
            const std::int64_t offset =
                number / columns * view.strides[0] + (view.rank == 2 ? number % columns * view.strides[1] : 0);
            if (view.dtype == DType::f64) static_cast<double*>(view.data)[offset] = values[i];
            if (view.dtype == DType::f32) static_cast<float*>(view.data)[offset] = static_cast<float>(values[i]);
        }
    }

    // On the device where the whole call is.
    Status run(const Call& call) const {
        return violation_ == nullptr ? run_call(call) : run_on_device(call, false, violation_);
    }
    Status compose(Summary second, Summary first, Summary out) const {
        const int threads = whole_.options.threads;
        if (violation_ == nullptr) return headrace::compose(second, first, out, threads);
        return run_on_device(
            {&second.transition, &second.state, &first.transition, &first.state, &out.transition, &out.state},
            [&](void* stream) { return headrace::compose(second, first, out, threads, stream); }, violation_);
    }
    Status apply(Summary summary, TensorView state, bool transposed, TensorView out) const {
        const int threads = whole_.options.threads;
        if (violation_ == nullptr) return headrace::apply(summary, state, transposed, out, threads);
        return run_on_device(
            {&summary.transition, &summary.state, &state, &out},
            [&](void* stream) { return headrace::apply(summary, state, transposed, out, threads, stream); },
            violation_);
    }
    // By the forced implementation where it accepts.
    Status run_accepted(Call call) const {
        if (call.options.force != nullptr) {
            std::vector<Candidate> candidates;
            const Call seen = violation_ == nullptr ? call : seen_from_device(call);
            if (Status status = explain(seen, &candidates); !status.ok()) return status;
            const std::string name = call.options.force;
            for (const Candidate& candidate : candidates) {
                if (candidate.name == name && !candidate.refusal.empty()) call.options.force = nullptr;
            }
        }
        return run(call);
    }

    const Call& whole_;
    const Folding folding_;
    std::string* const violation_;
    std::int64_t N_ = 0, H_ = 0, K_ = 0, V_ = 0;
    DType wide_{};
    headrace::Piece sizes_;  // of the whole
    std::vector<Piece> pieces_;
};

}  // namespace

std::vector<std::int64_t> borders_of(const ProblemLine& line) {
    constexpr std::int64_t aligned = 64;
    const std::int64_t T = line.varlen.empty() ? line.T : line.varlen.back();
    const Stream stream(line.seed, "ranks");
    const std::int64_t kind = line.seed == 1 ? 0 : stream.below(0, 3);
    std::vector<std::int64_t> borders(static_cast<std::size_t>(line.ranks) + 1);
    for (std::int64_t r = 0; r <= line.ranks; ++r) {
        std::int64_t border = T * r / line.ranks;
        if (kind == 0 && T >= aligned * line.ranks) border = border / aligned * aligned;
        if (kind == 1) border = stream.below(r + 1, T + 1);
        if (kind == 2) border = stream.below(r + 1, T / 16 + 1) * 16;
        borders[static_cast<std::size_t>(r)] = border;
    }
    borders.front() = 0, borders.back() = T;
    std::sort(borders.begin(), borders.end());
    return borders;
}

Folding folding_of(const ProblemLine& line) { return line.seed % 2 == 0 ? Folding::summaries : Folding::states; }

Status run_in_ranks(const Call& call, const std::vector<std::int64_t>& borders, Folding folding,
                    std::string* violation) {
    return Ranks(call, borders, folding, violation).run();
}

}  // namespace headrace::harness
