// Prefetcher: brings what the next chunk reads into the cache, a few lines at a time, while this chunk is computed.
#pragma once

#include "cpu/tiles/rows.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Token rows lie H * K elements apart, too short and too far apart for hardware prefetchers; a chunk would wait for
// memory about a quarter of its time.
class Prefetcher {
  public:
    // `calls` of next() will bring in everything that is added.
    void start(int calls) {
        count_ = position_ = row_ = rows_ = rows_per_call_ = 0;
        calls_ = calls > 0 ? calls : 1;
    }
    void add(const Strided& tensor, const ChunkRange& range, std::int64_t head, int columns, int first_column = 0) {
        if (!tensor.given || tensor.stride[3] != 1 || count_ == capacity || range.length == 0) return;
        const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
        const std::int64_t step = tensor.stride[1] * element;
        pieces_[count_++] = {element_at(tensor, range.row, range.token(0), head, first_column), range.reverse ? -step : step, range.length,
                             columns * element};
        rows_ += range.length;
        rows_per_call_ = (rows_ + calls_ - 1) / calls_;
    }
    // Rows that lie one after the other.
    void add(const char* rows, int count, std::int64_t row_bytes) {
        if (count_ == capacity) return;
        pieces_[count_++] = {rows, row_bytes, count, row_bytes};
        rows_ += count;
        rows_per_call_ = (rows_ + calls_ - 1) / calls_;
    }
    // Whole rows at a time: a loop of steady length costs the running product few mispredicted branches.
    void next() {
        for (int rows = rows_per_call_; rows > 0 && position_ < count_; --rows) {
            const Piece& piece = pieces_[position_];
            const char* row = piece.base + row_ * piece.step;
            for (std::int64_t byte = 0; byte < piece.row_bytes; byte += line_bytes) __builtin_prefetch(row + byte, 0, 2);
            if (++row_ < piece.rows) continue;
            row_ = 0;
            ++position_;
        }
    }

  private:
    static constexpr int capacity = 8;
    struct Piece {
        const char* base;
        std::int64_t step;
        int rows;
        std::int64_t row_bytes;
    };
    Piece pieces_[capacity];
    int count_ = 0, position_ = 0, row_ = 0, rows_ = 0, calls_ = 1, rows_per_call_ = 0;
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
