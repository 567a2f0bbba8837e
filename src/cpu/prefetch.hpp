// Prefetcher: brings the rows of the next chunk into the cache, a few lines at a time, while this chunk is computed.
#pragma once

#include "cpu/rows.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Token rows lie H * K elements apart, too short and too far apart for hardware prefetchers; a chunk would wait for
// memory about a quarter of its time.
class Prefetcher {
  public:
    // `calls` of next() will bring in everything that is added.
    void start(int calls) {
        count_ = position_ = row_ = line_ = 0;
        lines_ = 0;
        calls_ = calls > 0 ? calls : 1;
    }
    void add(const Strided& tensor, const ChunkRange& range, std::int64_t head, int columns) {
        if (!tensor.given || tensor.stride[3] != 1 || count_ == capacity || range.length == 0) return;
        const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
        const std::int64_t step = tensor.stride[1] * element;
        pieces_[count_++] = {element_at(tensor, range.row, range.token(0), head), range.reverse ? -step : step, range.length,
                             static_cast<int>((columns * element + line_bytes - 1) / line_bytes)};
        lines_ += pieces_[count_ - 1].rows * pieces_[count_ - 1].lines;
    }
    void next() {
        for (int lines = lines_ / calls_ + 1; lines > 0 && position_ < count_; --lines) {
            const Piece& piece = pieces_[position_];
            __builtin_prefetch(piece.base + row_ * piece.step + line_ * line_bytes, 0, 2);
            if (++line_ < piece.lines) continue;
            line_ = 0;
            if (++row_ < piece.rows) continue;
            row_ = 0;
            ++position_;
        }
    }

  private:
    static constexpr int capacity = 8, line_bytes = 64;
    struct Piece {
        const char* base;
        std::int64_t step;
        int rows, lines;
    };
    Piece pieces_[capacity];
    int count_ = 0, position_ = 0, row_ = 0, line_ = 0, lines_ = 0, calls_ = 1;
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
