// Owning tensors for a ProblemLine: its inputs drawn from the seed, outputs guarded and pre-filled with NaN.
#pragma once

#include <cstdint>
#include <map>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "harness/problem_line.hpp"

namespace headrace::harness {

// Bytes of storage aligned to 64 that stay uninitialised until written, so that large tensors are touched only once.
template <typename T>
struct AlignedAllocator {
    using value_type = T;
    static constexpr std::align_val_t alignment{64};
    AlignedAllocator() = default;
    template <typename U>
    AlignedAllocator(const AlignedAllocator<U>&) {}
    T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), alignment)); }
    void deallocate(T* pointer, std::size_t) { ::operator delete(pointer, alignment); }
    template <typename U, typename... Arguments>
    void construct(U* pointer, Arguments&&... arguments) {
        if constexpr (sizeof...(Arguments) > 0) {
            ::new (static_cast<void*>(pointer)) U(std::forward<Arguments>(arguments)...);
        } else {
            ::new (static_cast<void*>(pointer)) U;
        }
    }
    template <typename U>
    bool operator==(const AlignedAllocator<U>&) const {
        return true;
    }
};

enum class Memory { allocate, none };  // none: shapes and strides only, a view's data pointer is null

// An owning tensor; rank 0 when absent. Storage has 256 guard bytes before and after; strides may exceed the shape's.
// The payload begins at a multiple of 64 bytes. Guards are 0xFF bytes: a NaN in every float type, so that reading past
// an end spoils results and writing past it is seen. Throws std::bad_alloc when the memory is not there.
class Tensor {
  public:
    static constexpr std::size_t guard_bytes = 256;

    Tensor() = default;
    // Moved, never copied: who changes a copy of a call's tensor has changed nothing.
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;
    Tensor(Tensor&&) = default;
    Tensor& operator=(Tensor&&) = default;
    // strides in elements, >= 0; empty: contiguous. Memory starts as NaN (floats) or zero (integers), padding elements
    // too.
    Tensor(DType dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides = {},
           Memory memory = Memory::allocate);

    bool given() const { return !shape_.empty(); }
    TensorView view() const;  // not given when the rank is above TensorView's
    DType dtype() const { return dtype_; }
    const std::vector<std::int64_t>& shape() const { return shape_; }
    const std::vector<std::int64_t>& strides() const { return strides_; }
    std::int64_t numel() const;

    // Logical (row-major) element order, whatever the strides.
    double get(std::int64_t index) const;
    void set(std::int64_t index, double value);  // rounds to dtype
    std::vector<double> values() const;
    std::vector<std::int64_t> integers() const;
    void fill(double value);
    void read(std::int64_t first, std::int64_t count, double* values) const;
    void write(std::int64_t first, std::int64_t count, const double* values);  // rounds to dtype

    // Whether guard bytes and the padding between strided elements are untouched since construction.
    bool guards_intact() const;

  private:
    const unsigned char* payload() const { return storage_.data() + guard_bytes; }
    unsigned char* payload() { return storage_.data() + guard_bytes; }
    std::int64_t extent() const;                        // elements from the first to the last, padding included
    std::int64_t offset_of(std::int64_t index) const;   // of the element at a logical index
    std::int64_t run_length(std::int64_t index) const;  // elements from there that lie at one constant stride
    bool padding_intact() const;

    DType dtype_ = DType::f32;
    std::vector<std::int64_t> shape_, strides_;
    bool dense_ = true;                                                    // strides are those of a contiguous tensor
    std::vector<unsigned char, AlignedAllocator<unsigned char>> storage_;  // guards included; empty: Memory::none
};

// Everything a call on a problem line needs, named as in the API: "q", "k", ..., "initial_state", "cu_seqlens", "o",
// "final_state", "d_o", "d_final_state", "d_q", ..., "pool", "indices", "num_accepted_tokens",
// "transition", "state".
struct CallTensors {
    std::map<std::string, Tensor> tensors;
    Call call;  // views into `tensors`: hence moved, never copied

    CallTensors() = default;
    CallTensors(CallTensors&&) = default;
    CallTensors& operator=(CallTensors&&) = default;
};

// All inputs and outputs of the line: states and gate parameters in f32 (f64 for f64), unless the seed says that g,
// beta and others have the problem's own 16-bit type. The seed also picks i32 or i64, the form of dt_bias, padding in a
// pool, and now and then a backward call without d_o or with some gradients only; seed 1 picks the plain form of all of
// them. `strided` lines and `odd_strides` draw a layout for each tensor: contiguous, padded, heads before tokens, or
// doubled. Values depend on the line alone: the same on every machine and with every standard library. States of a
// `vfirst` line are stored [N,HV,V,K] and the call holds their transposed views.
CallTensors make_tensors(const ProblemLine& line, bool odd_strides = false);

// The same call with shapes, strides and types but no memory (but for cu_seqlens): for explain, plan and
// workspace_size.
CallTensors make_shapes(const ProblemLine& line);

// The views and options of the call for tensors that came from elsewhere (a file); absent names stay absent.
// Valid as long as `tensors` lives; the string of options.force lives for ever.
Call make_call(const ProblemLine& line, std::map<std::string, Tensor>& tensors);

}  // namespace headrace::harness
