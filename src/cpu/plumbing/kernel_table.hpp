// KernelTable: the entry points that one ISA offers, plain function pointers that portable code calls.
#pragma once

#include "core/factor.hpp"
#include "cpu/plumbing/kernel_args.hpp"

namespace headrace::cpu {

struct ConvolutionArgs;  // cpu/layers/layer_args.hpp
struct RmsNormArgs;

enum class Arithmetic { f32, f64, bf16 };
constexpr int num_arithmetics = 3;

// Chunk form, one instance per arithmetic, rule and kind of gate. `scratch` is a thread's memory of scratch bytes.
// n: sequence; head: value head; key_head: query/key head with its group of value heads; slot_*: where chunk states
// are saved (args.saved_*): index first + chunk * per_chunk + member of the group.
struct ChunkKernels {
    std::size_t (*forward_scratch)(const KernelArgs&);
    std::size_t (*backward_scratch)(const KernelArgs&);
    std::size_t (*sweeps_scratch)(const KernelArgs&);
    // rest: one for each head that the task walks; written where args.ends_early.
    void (*forward)(const KernelArgs&, std::int64_t n, std::int64_t head, int first_value, int values, void* scratch, Unfinished* rest);
    void (*one_pass)(const KernelArgs&, std::int64_t n, std::int64_t key_head, std::int64_t first, void* scratch);
    void (*save_states)(const KernelArgs&, std::int64_t n, std::int64_t head, std::int64_t first, void* scratch);
    void (*adjoint_pass)(const KernelArgs&, std::int64_t n, std::int64_t key_head, std::int64_t first, void* scratch);
    void (*chunk_gradients)(const KernelArgs&, std::int64_t n, std::int64_t key_head, std::int64_t chunk, std::int64_t first,
                            void* scratch);
    void (*two_sweeps)(const KernelArgs&, std::int64_t n, std::int64_t key_head, void* scratch);
};

// Summaries in the chunk form, one instance as above. Columns [first, first + count) of the state, and behind its
// args.state_columns of the transition; or of the gradient of the state, from that after the tokens to that before
// them.
struct SummaryKernels {
    std::size_t (*summarize_scratch)(const KernelArgs&);
    std::size_t (*adjoint_scratch)(const KernelArgs&);
    void (*summarize)(const KernelArgs&, std::int64_t n, std::int64_t head, int first, int count, void* scratch, Unfinished* rest);
    void (*adjoint)(const KernelArgs&, std::int64_t n, std::int64_t head, int first, int count, void* scratch);
};

// dst[rows,columns] = a b + c for each sequence and head; a [rows,inner], its transpose, the diagonal [rows] of a
// matrix, or the identity. c may be absent. Any floating types.
struct ProductArgs {
    Strided dst, a, b, c;
    Factor factor;
    int rows, inner, columns;
};
struct ProductKernels {
    std::size_t (*scratch)(const ProductArgs&);
    void (*product)(const ProductArgs&, std::int64_t n, std::int64_t head, void* scratch);
};

// Recurrent form, one instance per arithmetic (f32, f64): every rule, gate and option.
struct RecurrentKernels {
    std::size_t (*forward_scratch)(const KernelArgs&);
    std::size_t (*backward_scratch)(const KernelArgs&);
    void (*start)(void* scratch);  // before the first forward of a call on a thread's scratch, which keeps what they share
    void (*forward)(const KernelArgs&, std::int64_t n, std::int64_t head, int first_value, int values, void* scratch, Unfinished* rest);
    // Saves one state per segment and member of the group at args.saved_states from index `first` on (state_bytes
    // each).
    void (*backward)(const KernelArgs&, std::int64_t n, std::int64_t key_head, std::int64_t first, void* scratch);
    std::size_t (*state_bytes)(const KernelArgs&);
    int segment;
    std::size_t (*adjoint_scratch)(const KernelArgs&);
    void (*adjoint)(const KernelArgs&, std::int64_t n, std::int64_t head, int first, int count, void* scratch);  // as SummaryKernels'
};

// The layer functions, one instance per arithmetic (f32, f64). A group is a run of the call's blocks of tokens or rows,
// which the args list; `scratch` is a thread's memory.
struct LayerKernels {
    std::size_t (*convolution_scratch)(const ConvolutionArgs&);
    void (*convolution_forward)(const ConvolutionArgs&, std::int64_t group, std::int64_t first_channel, void* scratch);
    void (*convolution_backward)(const ConvolutionArgs&, std::int64_t group, std::int64_t first_channel, void* scratch);
    void (*convolution_step)(const ConvolutionArgs&, std::int64_t group, std::int64_t first_channel, void* scratch);
    std::size_t (*rms_norm_scratch)(const RmsNormArgs&);
    void (*rms_norm_forward)(const RmsNormArgs&, std::int64_t group, void* scratch);
    void (*rms_norm_backward)(const RmsNormArgs&, std::int64_t group, void* scratch);
};

struct KernelTable {
    ChunkKernels chunk[num_arithmetics][2][2];  // [arithmetic][delta][channel gate]; bf16: only with the dot product
    SummaryKernels summaries[num_arithmetics][2][2];
    RecurrentKernels recurrent[2][2];           // [f32, f64][delta]
    ProductKernels products[2];                 // [f32, f64]
    LayerKernels layers[2];                     // [f32, f64]
};

}  // namespace headrace::cpu
