// piece_module: forward, backward and the states between pieces, with what a piece knows of the undivided problem.
#include "piece_module.hpp"

#include <nanobind/stl/tuple.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <tuple>

#include "request.hpp"

namespace headrace::python {
namespace {

using Sizes = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

// Memory for calls that follow one another: fresh pages cost a backward of some heads a tenth of its time.
struct Memory {
    std::unique_ptr<char[]> data;
    std::size_t bytes = 0;

    // On a CUDA device nothing: the library's own memory is given back behind the call's work.
    Workspace of(const Call& call) {
        if (call.in.k.device != Device::cpu) return {};
        std::size_t needed = 0;
        raise(workspace_size(call, &needed));
        if (needed > bytes) {
            data.reset();
            bytes = 0;
            data.reset(new char[needed]);
            bytes = needed;
        }
        return {data.get(), bytes};
    }
};

struct PieceRequest : Request {
    Piece piece;

    PieceRequest(const char* op, Direction direction, const Options& options, const Sizes& sizes) : Request(op, direction, options) {
        std::tie(piece.tokens, piece.longest, piece.sequences, piece.heads) = sizes;
        call.options.piece = &piece;
    }
    PieceRequest(const PieceRequest&) = delete;
    PieceRequest& operator=(const PieceRequest&) = delete;
};

void run_piece(const char* direction_name, const char* op, const nb::list& inputs, const nb::list& first, const nb::list& second,
               const Options& options, const Sizes& sizes, const nb::list& roundings, Memory& memory) {
    const std::string_view direction = direction_name;
    const bool is_forward = direction == "forward", states = direction == "backward_states";
    if (!is_forward && !states && direction != "backward") {
        throw nb::value_error("direction: expected forward, backward or backward_states");
    }
    PieceRequest r(op, is_forward ? Direction::forward : Direction::backward, options, sizes);
    r.inputs(inputs);
    if (is_forward) {
        r.outputs(first);
    } else {
        r.output_gradients(first);
        r.gradients(second);
    }
    Piece& p = r.piece;
    if (states) {
        r.arrays.read(roundings, {{"initial_roundings", &p.initial_roundings}, {"final_state", &r.call.out.final_state},
                                  {"final_roundings", &p.final_roundings}});
    } else if (is_forward) {
        r.arrays.read(roundings, {{"initial_roundings", &p.initial_roundings}, {"final_roundings", &p.final_roundings}});
    } else {
        r.arrays.read(roundings, {{"initial_roundings", &p.initial_roundings}, {"d_final_roundings", &p.d_final_roundings},
                                  {"d_initial_roundings", &p.d_initial_roundings}});
    }
    r.workspace = memory.of(r.call);
    r.run();
}

}  // namespace

void add_piece_functions(nb::module_& module) {
    nb::class_<Memory>(module, "Memory", "What calls of run_piece need beside their tensors, one after the other.").def(nb::init<>());
    module.def("roundings_size", [](std::int64_t key_dim) { return roundings_size(key_dim); }, nb::arg("key_dim"),
               "Numbers that describe the roundings in one state.");
    module.def(
        "run_piece", &run_piece, nb::arg("direction"), nb::arg("op"), nb::arg("inputs"), nb::arg("first"), nb::arg("second"),
        nb::arg("options"), nb::arg("sizes"), nb::arg("roundings"), nb::arg("memory"),
        "run of a piece of cut sequences, of an undivided problem of sizes (tokens, longest, sequences, heads). roundings: of\n"
        "'forward' [initial, final], of 'backward' [initial, d_final, d_initial], of 'backward_states' (the arguments of backward,\n"
        "which writes no gradients) [initial, final state, final].");
    module.def(
        "states_agree",
        [](const char* op, const nb::list& inputs, const nb::list& d_outputs, const nb::list& gradients, const Options& options,
           const Sizes& sizes) {
            PieceRequest r(op, Direction::backward, options, sizes);
            r.inputs(inputs);
            r.output_gradients(d_outputs);
            r.gradients(gradients);
            bool agree = false;
            raise(states_agree(r.call, &agree));
            return agree;
        },
        nb::arg("op"), nb::arg("inputs"), nb::arg("d_outputs"), nb::arg("gradients"), nb::arg("options"), nb::arg("sizes"),
        "Whether the final state of 'forward' is, bit for bit, that of 'backward_states' of these arguments.");
}

}  // namespace headrace::python
