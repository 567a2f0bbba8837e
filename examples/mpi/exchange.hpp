// What MPI ranks exchange around headrace: errors on which all agree, and summaries, composed by MPI as a reduction.
//
// Ranks are those of a communicator of one's own (MPI_Comm_dup), in the order in which the tokens run. All of them make
// the same calls. Errors of MPI itself (a lost rank) end the job, as MPI has it unless told otherwise.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <headrace/summary.hpp>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace headrace_mpi {

using namespace headrace;

inline int rank_in(MPI_Comm comm) {
    int rank = 0;
    MPI_Comm_rank(comm, &rank);
    return rank;
}

inline int ranks_of(MPI_Comm comm) {
    int ranks = 0;
    MPI_Comm_size(comm, &ranks);
    return ranks;
}

// An error that every rank has thrown, with the same message.
struct AgreedError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Before every exchange: a rank that gave up would leave the others waiting. Returns on all ranks, or throws on all of
// them what the first rank with an error says.
inline void agree(const Status& status, MPI_Comm comm) {
    const int ranks = ranks_of(comm);
    int first = status.ok() ? ranks : rank_in(comm);
    MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, comm);
    if (first == ranks) return;
    std::string message = status.message();
    auto length = static_cast<int>(message.size());
    MPI_Bcast(&length, 1, MPI_INT, first, comm);
    message.resize(static_cast<std::size_t>(length));
    MPI_Bcast(message.data(), length, MPI_CHAR, first, comm);
    throw AgreedError("rank " + std::to_string(first) + ": " + message);
}

// What must be one number on all ranks.
struct Common {
    const char* name;
    std::int64_t value;
};

inline void agree(const std::vector<Common>& numbers, MPI_Comm comm) {
    std::vector<std::int64_t> of_first;
    for (const Common& number : numbers) of_first.push_back(number.value);
    MPI_Bcast(of_first.data(), static_cast<int>(of_first.size()), MPI_INT64_T, 0, comm);
    Status status;
    for (std::size_t i = 0; i < numbers.size() && status.ok(); ++i) {
        if (numbers[i].value == of_first[i]) continue;
        status = {Code::invalid_argument, std::string(numbers[i].name) + ": expected " + std::to_string(of_first[i]) +
                                              " as on rank 0, got " + std::to_string(numbers[i].value)};
    }
    agree(status, comm);
}

inline MPI_Datatype number_type(DType dtype) { return dtype == DType::f64 ? MPI_DOUBLE : MPI_FLOAT; }

// How a summary lies in a message: the transitions of all sequences and value heads, then the states.
struct Layout {
    DType dtype = DType::f32;
    int rank = 2;             // of the transition: [N, HV], [N, HV, K] or [N, HV, K, K]
    std::int64_t N = 0, HV = 0, K = 0, V = 0;
    bool transposed = false;  // for gradients of states, which pass the transposed transition

    // Of the tokens that an operator reads, no ragged batch.
    Layout(Operator op, const Inputs& in)
        : dtype(in.k.dtype == DType::f64 ? DType::f64 : DType::f32),
          rank(op >= Operator::delta_rule ? 4 : in.g.rank == 4 ? 3 : 2),  // the delta rule's operators come last
          N(in.k.shape[0]),
          HV(in.v.shape[2]),
          K(in.k.shape[3]),
          V(in.v.shape[3]) {}

    bool operator==(const Layout&) const = default;

    std::int64_t transition_numbers() const { return N * HV * (rank == 2 ? 1 : rank == 3 ? K : K * K); }
    std::int64_t numbers() const { return transition_numbers() + N * HV * K * V; }

    std::vector<char> message() const {  // zeros
        return std::vector<char>(static_cast<std::size_t>(numbers()) * size_of(dtype));
    }
    Summary views(void* message) const {
        TensorView transition(message, dtype, {N, HV, K, K});
        if (rank == 4 && transposed) transition = transition.transposed(2, 3);
        if (rank == 3) transition = {message, dtype, {N, HV, K}};
        if (rank == 2) transition = {message, dtype, {N, HV}};
        const std::size_t behind = static_cast<std::size_t>(transition_numbers()) * size_of(dtype);
        return {transition, {static_cast<char*>(message) + behind, dtype, {N, HV, K, V}}};
    }
};

// Composition of summaries as an operation of MPI: associative, not commutative. MPI calls it with nothing but two
// messages and their datatype, so the layout hangs on the datatype.
class Composition {
  public:
    explicit Composition(const Layout& layout) : layout_(layout), composed_(layout.message()) {
        MPI_Type_contiguous(static_cast<int>(layout.numbers()), number_type(layout.dtype), &type_);
        MPI_Type_commit(&type_);
        if (key == MPI_KEYVAL_INVALID) {
            MPI_Type_create_keyval(MPI_TYPE_NULL_COPY_FN, MPI_TYPE_NULL_DELETE_FN, &key, nullptr);
        }
        MPI_Type_set_attr(type_, key, this);
        MPI_Op_create(&compose_messages, /*commute=*/0, &op_);
    }
    ~Composition() {
        MPI_Op_free(&op_);
        MPI_Type_free(&type_);
    }
    Composition(const Composition&) = delete;
    Composition& operator=(const Composition&) = delete;

    // The map of all tokens on the ranks before this one. Says nothing on the first rank.
    Status of_ranks_before(std::vector<char>& own, std::vector<char>& before, MPI_Comm comm) {
        MPI_Exscan(own.data(), before.data(), 1, type_, op_, comm);
        return status_;
    }

  private:
    inline static int key = MPI_KEYVAL_INVALID;

    // inout <- first and then inout
    static void compose_messages(void* first, void* inout, int* count, MPI_Datatype* type) {
        Composition* self = nullptr;
        int found = 0;
        MPI_Type_get_attr(*type, key, &self, &found);
        const Layout& layout = self->layout_;
        std::vector<char>& composed = self->composed_;
        for (int i = 0; i < *count; ++i) {
            const auto offset = static_cast<std::size_t>(i) * composed.size();
            char *const before = static_cast<char*>(first) + offset, *const behind = static_cast<char*>(inout) + offset;
            const Status status = compose(layout.views(behind), layout.views(before), layout.views(composed.data()));
            if (!status.ok()) self->status_ = status;
            std::memcpy(behind, composed.data(), composed.size());
        }
    }

    Layout layout_;
    std::vector<char> composed_;
    Status status_;
    MPI_Datatype type_{};
    MPI_Op op_{};
};

}  // namespace headrace_mpi
