// An operator over a sequence whose tokens lie on MPI ranks: Scan (all ranks at once) and Ring (one after the other).
//
// Every rank calls forward() and then backward() with its own tokens, any number of them. initial_state is given on the
// first rank and d_final_state on the last: there the final state is complete, and on the first the gradient of the
// initial one. Gradients of parameters are sums over the ranks, on every rank. The sequences of a batch are cut alike.
// With Options::reverse the communicator has the ranks in reverse: tokens run in the order of its ranks.
#pragma once

#include <optional>

#include "exchange.hpp"

namespace headrace_mpi {

class Cut {
  public:
    Cut(MPI_Comm comm, Operator op, const Options& options) : comm_(comm), op_(op), options_(options) {}

  protected:
    int rank() const { return rank_in(comm_); }
    bool is_first() const { return rank() == 0; }
    bool is_last() const { return rank() + 1 == ranks_of(comm_); }

    Status check_forward(const Inputs& in, const Outputs& out) const {
        if (in.cu_seqlens.given()) return {Code::unsupported, "cu_seqlens: expected none, sequences are cut alike"};
        if (in.initial_state.given() && !is_first()) return misplaced("initial_state", "first");
        if (out.final_state.given() && !is_last()) return misplaced("final_state", "last");
        return {};
    }
    Status check_backward(const Inputs& in, const OutputGradients& d_out, const Gradients& grads) const {
        if (d_out.d_final_state.given() && !is_last()) return misplaced("d_final_state", "last");
        if (grads.d_initial_state.given() && !is_first()) return misplaced("d_initial_state", "first");
        for (const TensorView* sum : {&grads.d_g_gamma, &grads.d_A_log, &grads.d_dt_bias}) {
            std::int64_t stride = 1;
            bool plain = sum->dtype == DType::f32 || sum->dtype == DType::f64;
            for (int i = sum->rank - 1; i >= 0; stride *= sum->shape[i--]) plain = plain && sum->strides[i] == stride;
            if (!plain) return {Code::unsupported, "gradients of parameters: expected contiguous f32 or f64"};
        }
        const bool same_sizes = sizes_ == Layout(op_, in);
        if (!same_sizes) return {Code::invalid_argument, "k: expected inputs as of the forward() before"};
        return check_forward(in, {});
    }
    static Status misplaced(const char* name, const char* where) {
        return {Code::invalid_argument, std::string(name) + ": expected on the " + where + " rank alone"};
    }

    // One call on all ranks, of sizes that fit together.
    Layout begin(Status status, const Inputs& in) const {
        const Layout sizes(op_, in);
        if (status.ok() && sizes.numbers() > std::numeric_limits<int>::max()) {
            status = {Code::unsupported, "k: expected heads whose summaries fit one message of MPI"};
        }
        agree(status, comm_);
        agree({{"op", static_cast<int>(op_)}, {"dtype", static_cast<int>(in.k.dtype)}, {"sequences", sizes.N},
               {"key heads", in.k.shape[2]}, {"value heads", sizes.HV}, {"key_dim", sizes.K}, {"value_dim", sizes.V},
               {"dimensions of the transition", sizes.rank}}, comm_);
        return sizes;
    }
    void add_parameters(const Gradients& grads) const {
        for (const TensorView* sum : {&grads.d_g_gamma, &grads.d_A_log, &grads.d_dt_bias}) {
            if (!sum->given()) continue;
            const auto count = static_cast<int>(sum->numel());
            MPI_Allreduce(MPI_IN_PLACE, sum->data, count, number_type(sum->dtype), MPI_SUM, comm_);
        }
    }

    MPI_Comm comm_;
    Operator op_;
    Options options_;
    std::optional<Layout> sizes_;  // of forward()
};

// All ranks summarise their tokens at once, each as a map of the state, and a prefix sum of the maps (MPI_Exscan) gives
// the state that enters each. The first rank's map has the initial state in it, and maps whatever might come before to
// one state: its transition is zero.
class Scan : public Cut {
  public:
    using Cut::Cut;

    void forward(Inputs in, const Outputs& out) {
        const Layout layout = begin(check_forward(in, out), in);
        sizes_ = layout;
        summary_ = layout.message(), entering_ = layout.message();
        const Summary own = layout.views(summary_.data());
        Status status;
        if (!is_last()) status = summarize(op_, in, {is_first() ? TensorView() : own.transition, own.state}, options_);
        agree(status, comm_);
        agree(Composition(layout).of_ranks_before(summary_, entering_, comm_), comm_);
        if (!is_first()) in.initial_state = layout.views(entering_.data()).state;
        agree(headrace::forward(op_, in, out, options_), comm_);
    }

    // The same for the gradient of the state, from the last rank to the first: by the same transitions, transposed.
    void backward(Inputs in, OutputGradients d_out, const Gradients& grads) {
        Layout layout = begin(check_backward(in, d_out, grads), in);
        layout.transposed = true;
        std::vector<char> adjoint = summary_, leaving = layout.message();
        Status status;
        if (!is_first()) status = summarize_backward(op_, in, d_out, layout.views(adjoint.data()).state, options_);
        agree(status, comm_);
        MPI_Comm reversed{};
        MPI_Comm_split(comm_, 0, -rank(), &reversed);
        status = Composition(layout).of_ranks_before(adjoint, leaving, reversed);
        MPI_Comm_free(&reversed);
        agree(status, comm_);
        if (!is_last()) d_out.d_final_state = layout.views(leaving.data()).state;
        if (!is_first()) in.initial_state = layout.views(entering_.data()).state;
        agree(headrace::backward(op_, in, d_out, grads, options_), comm_);
        add_parameters(grads);
    }

  private:
    std::vector<char> summary_, entering_;  // of forward()
};

// Each rank waits for the state that the one before it leaves: no extra work, and where ranks begin at multiples of 64
// tokens the bits of one process. For that states travel in f64, with what the kernels know of their roundings.
class Ring : public Cut {
  public:
    using Cut::Cut;

    void forward(Inputs in, Outputs out) {
        const Layout sizes = begin(check_forward(in, out), in);
        sizes_ = sizes;
        std::int64_t tokens = in.k.shape[1];
        MPI_Allreduce(MPI_IN_PLACE, &tokens, 1, MPI_INT64_T, MPI_SUM, comm_);
        whole_.tokens = sizes.N * tokens, whole_.longest = tokens;
        Handed leaving(sizes);
        entering_ = Handed(sizes);
        Piece piece = whole_;
        enter(in, piece);
        if (!is_last()) {
            out.final_state = leaving.state_view;
            piece.final_roundings = leaving.roundings_view;
        }
        hand_on(before(), entering_, leaving, behind(), [&] { return headrace::forward(op_, in, out, with(piece)); });
    }

    void backward(Inputs in, OutputGradients d_out, Gradients grads) {
        const Layout sizes = begin(check_backward(in, d_out, grads), in);
        Handed leaving(sizes), d_leaving(sizes), d_entering(sizes);
        Piece piece = whole_, states = whole_;
        enter(in, states);
        enter(in, piece);
        if (!is_last()) {
            d_out.d_final_state = d_leaving.state_view;
            piece.d_final_roundings = d_leaving.roundings_view;
        }
        if (!is_first()) {
            grads.d_initial_state = d_entering.state_view;
            piece.d_initial_roundings = d_entering.roundings_view;
        }

        bool same = false;  // whether a backward recomputes the bits of the states that forward() left
        agree(states_agree({op_, Direction::backward, in, {}, d_out, grads, {}, with(piece)}, &same), comm_);
        same = same && entering_.is_of_floats();
        MPI_Allreduce(MPI_IN_PLACE, &same, 1, MPI_CXX_BOOL, MPI_LAND, comm_);
        if (!same) {
            const Outputs out = {{}, leaving.state_view};
            states.final_roundings = leaving.roundings_view;
            hand_on(before(), entering_, leaving, behind(), [&] {
                return is_last() ? Status() : backward_states(op_, in, d_out, grads, out, with(states));
            });
        }
        hand_on(behind(), d_leaving, d_entering, before(),
                [&] { return headrace::backward(op_, in, d_out, grads, with(piece)); });
        add_parameters(grads);
    }

  private:
    // A state, or its gradient, and its roundings.
    struct Handed {
        std::vector<double> state;
        std::vector<float> roundings;
        TensorView state_view, roundings_view;

        Handed() = default;
        explicit Handed(const Layout& sizes)
            : state(static_cast<std::size_t>(sizes.N * sizes.HV * sizes.K * sizes.V)),
              roundings(static_cast<std::size_t>(sizes.N * sizes.HV * roundings_size(sizes.K))),
              state_view(state.data(), DType::f64, {sizes.N, sizes.HV, sizes.K, sizes.V}),
              roundings_view(roundings.data(), DType::f32, {sizes.N, sizes.HV, roundings_size(sizes.K)}) {}

        // A forward of the delta rule in f32 may go on in double, which no backward does (states_agree).
        bool is_of_floats() const {
            const auto count = static_cast<std::size_t>(roundings_view.shape[2]);
            for (std::size_t i = count; i <= roundings.size(); i += count) {
                if (roundings[i - 1] > 512) return false;
            }
            return true;
        }
    };
    enum Tag { here_it_is, gave_up };

    // With MPI_PROC_NULL nothing is sent or received.
    int before() const { return is_first() ? MPI_PROC_NULL : rank() - 1; }
    int behind() const { return is_last() ? MPI_PROC_NULL : rank() + 1; }

    // A rank that gave up, or whose neighbour did, still sends a message, that it did.
    template <class Body>
    void hand_on(int from, Handed& received, const Handed& sent, int to, const Body& body) const {
        const auto numbers = static_cast<int>(sent.state.size()), estimates = static_cast<int>(sent.roundings.size());
        MPI_Status answer{};
        MPI_Recv(received.state.data(), numbers, MPI_DOUBLE, from, MPI_ANY_TAG, comm_, &answer);
        const bool runs = answer.MPI_TAG != gave_up;
        if (runs) MPI_Recv(received.roundings.data(), estimates, MPI_FLOAT, from, here_it_is, comm_, MPI_STATUS_IGNORE);
        const Status status = runs ? body() : Status();
        if (runs && status.ok()) {
            MPI_Send(sent.state.data(), numbers, MPI_DOUBLE, to, here_it_is, comm_);
            MPI_Send(sent.roundings.data(), estimates, MPI_FLOAT, to, here_it_is, comm_);
        } else {
            MPI_Send(nullptr, 0, MPI_DOUBLE, to, gave_up, comm_);
        }
        agree(status, comm_);
    }
    void enter(Inputs& in, Piece& piece) const {
        if (is_first()) return;
        in.initial_state = entering_.state_view;
        piece.initial_roundings = entering_.roundings_view;
    }
    Options with(const Piece& piece) const {
        Options options = options_;
        options.piece = &piece;
        return options;
    }

    Piece whole_;       // sizes of the undivided problem
    Handed entering_;
};

}  // namespace headrace_mpi
