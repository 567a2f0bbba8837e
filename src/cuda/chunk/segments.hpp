// segments: which chunks a block walks.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

// Chunks [first_chunk, end_chunk) of sequence n, in running order; first_chunk -1: an empty slot.
struct Walk {
    std::int64_t n;
    TokenRange sequence;
    std::int64_t first_chunk, end_chunk;
    bool last;  // of the sequence
};

// Segments of a sequence; one without tokens has one.
HEADRACE_DEVICE std::int64_t segments_of(const KernelArgs& args, const TokenRange& s) {
    const std::int64_t tokens = s.end - s.begin;
    return tokens == 0 ? 1 : parts_of(tokens, args.segments.tokens);
}

// Of a sequence as a whole, of the segment in a slot, and of either.
HEADRACE_DEVICE Walk whole_walk(const TokenRange& sequence, std::int64_t n) {
    return {n, sequence, 0, parts_of(sequence.end - sequence.begin, tensor_chunk), true};
}
HEADRACE_DEVICE Walk segment_walk(const KernelArgs& args, const TokenRange& sequence, PartAt at) {
    const std::int64_t count = segments_of(args, sequence);
    if (at.part >= count) return {at.n, sequence, -1, -1, false};
    const std::int64_t chunks = parts_of(sequence.end - sequence.begin, tensor_chunk),
                       step = args.segments.tokens / tensor_chunk, end = (at.part + 1) * step;
    return {at.n, sequence, at.part * step, end < chunks ? end : chunks, at.part + 1 == count};
}
HEADRACE_DEVICE Walk segment_walk(const KernelArgs& args, std::int64_t slot) {
    const PartAt at = part_at(args, slot, args.segments.tokens);
    return segment_walk(args, sequence_of(args, at.n), at);
}
HEADRACE_DEVICE Walk walk_of(const KernelArgs& args, std::int64_t place) {
    const bool whole = args.segments.tokens == 0;
    const PartAt at = whole ? PartAt{place, 0} : part_at(args, place, args.segments.tokens);
    const TokenRange sequence = sequence_of(args, at.n);
    return whole ? whole_walk(sequence, at.n) : segment_walk(args, sequence, at);
}

// Columns of a state in registers, from `first` on of `all`: values, or channels of the unit matrix that enters a
// segment in its place.
struct WalkedColumns {
    int first, all;
    bool of_values;
    HEADRACE_DEVICE int values() const { return of_values && first < all ? all - first : 0; }
};

// What segments leave each other, states or transitions: [slots,HV,K,columns].
HEADRACE_DEVICE Strided segment_tensor(const KernelArgs& args, float* data, int columns) {
    const std::int64_t head = static_cast<std::int64_t>(args.K) * columns;
    return {reinterpret_cast<char*>(data), {args.HV * head, head, columns, 1}, DType::f32, true};
}

// The chunk of a sequence, in running order.
HEADRACE_DEVICE ChunkRange chunk_range(const KernelArgs& args, const TokenRange& s, std::int64_t chunk) {
    const std::int64_t first = chunk * tensor_chunk, left = s.end - s.begin - first;
    return {s.row,        s.begin,     s.end, first, static_cast<int>(left < tensor_chunk ? left : tensor_chunk),
            tensor_chunk, args.reverse};
}
// Of a walk from the other end (late_gate), whose chunks begin where those of one from this end do: the number of a
// chunk, counted from this end or by such a walk, as the other counts it; and its tokens.
HEADRACE_DEVICE std::int64_t walked_chunk(const KernelArgs& args, const TokenRange& s, std::int64_t chunk) {
    return args.late_gate ? (s.end - s.begin + tensor_chunk - 1) / tensor_chunk - 1 - chunk : chunk;
}
HEADRACE_DEVICE ChunkRange walked_range(const KernelArgs& args, const TokenRange& s, std::int64_t chunk) {
    if (!args.late_gate) return chunk_range(args, s, chunk);
    const std::int64_t tokens = s.end - s.begin, first = walked_chunk(args, s, chunk) * tensor_chunk,
                       end = first + tensor_chunk < tokens ? first + tensor_chunk : tokens;
    return {s.row, s.begin, s.end, tokens - end, static_cast<int>(end - first), tensor_chunk, args.reverse};
}

// Of a block's places (Prepared::looked_at, up to a warp's lanes) those that a sequence has and wanted(place) says so
// of, one after the other, the same in all threads. Which are left is known in shared memory: no register waits for it.
struct WantedPlaces {
    const KernelArgs& args;
    std::uint32_t* left;  // a bit for each

    template <class Wanted>
    HEADRACE_DEVICE WantedPlaces(const KernelArgs& arguments, std::uint32_t* shared, Wanted wanted)
        : args(arguments), left(shared) {
        bool is_wanted = false;
        if (const std::int64_t place = place_of(lane()); lane() < args.prepared.looked_at) {
            const PartAt at = part_at(args, task_of(place, args.HV).place, tensor_chunk);
            if (at.n < args.N) {
                const TokenRange s = sequence_of(args, at.n);
                is_wanted = at.part * tensor_chunk < s.end - s.begin && wanted(place);
            }
        }
        ptx::sync_warp();
        const std::uint32_t all = ptx::bits_of_warp(is_wanted);
        if (threadIdx.x == 0) *left = all;
        ptx::sync_block();
    }
    HEADRACE_DEVICE bool any() const { return *left != 0; }
    // The row of part_at and the head.
    HEADRACE_DEVICE Task first() const { return task_of(place_of(__ffs(static_cast<int>(*left)) - 1), args.HV); }
    HEADRACE_DEVICE void next() const {
        ptx::sync_block();
        if (threadIdx.x == 0) *left &= *left - 1;
        ptx::sync_block();
    }

  private:
    HEADRACE_DEVICE std::int64_t place_of(int which) const {
        return std::int64_t{blockIdx.x} * args.prepared.looked_at + which;
    }
};

}  // namespace headrace::cuda
