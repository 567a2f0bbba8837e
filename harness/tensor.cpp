// Tensor: storage, strides, guards and element access.
#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "harness/convert.hpp"
#include "harness/tensors.hpp"

namespace headrace::harness {

namespace {

constexpr int guard_value = 0xff;

bool is_integer(DType dtype) { return dtype == DType::i32 || dtype == DType::i64; }

std::vector<std::int64_t> contiguous_strides(const std::vector<std::int64_t>& shape) {
    std::vector<std::int64_t> strides(shape.size(), 1);
    for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<std::int64_t>(shape[i], 1);
    return strides;
}

bool all_bytes_are(const unsigned char* begin, std::size_t count, int value) {
    return std::all_of(begin, begin + count, [value](unsigned char byte) { return byte == value; });
}

}  // namespace

Tensor::Tensor(DType dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides, Memory memory)
    : dtype_(dtype), shape_(std::move(shape)), strides_(std::move(strides)) {
    const std::vector<std::int64_t> contiguous = contiguous_strides(shape_);
    if (strides_.empty()) strides_ = contiguous;
    dense_ = strides_ == contiguous;
    if (memory == Memory::none || shape_.empty()) return;
    const std::size_t bytes = static_cast<std::size_t>(extent()) * size_of(dtype);
    storage_.resize(bytes + 2 * guard_bytes);
    std::memset(storage_.data(), guard_value, storage_.size());
    if (is_integer(dtype)) std::memset(payload(), 0, bytes);
}

TensorView Tensor::view() const {
    TensorView view;
    if (shape_.size() > TensorView::max_rank) return view;
    view.data = storage_.empty() ? nullptr : const_cast<unsigned char*>(payload());
    view.dtype = dtype_;
    view.rank = static_cast<int>(shape_.size());
    for (int i = 0; i < view.rank; ++i) {
        view.shape[i] = shape_[static_cast<std::size_t>(i)];
        view.strides[i] = strides_[static_cast<std::size_t>(i)];
    }
    return view;
}

std::int64_t Tensor::numel() const {
    if (shape_.empty()) return 0;
    return std::accumulate(shape_.begin(), shape_.end(), std::int64_t{1}, std::multiplies<>());
}

std::int64_t Tensor::extent() const {
    if (numel() == 0) return 0;
    std::int64_t last = 0;
    for (std::size_t i = 0; i < shape_.size(); ++i) last += (shape_[i] - 1) * strides_[i];
    return last + 1;
}

std::int64_t Tensor::offset_of(std::int64_t index) const {
    std::int64_t offset = 0;
    for (std::size_t i = shape_.size(); i-- > 0;) {
        offset += index % shape_[i] * strides_[i];
        index /= shape_[i];
    }
    return offset;
}

std::int64_t Tensor::run_length(std::int64_t index) const {
    if (dense_) return numel() - index;
    return shape_.back() - index % shape_.back();
}

void Tensor::read(std::int64_t first, std::int64_t count, double* values) const {
    while (count > 0) {
        const std::int64_t piece = std::min(count, run_length(first));
        const unsigned char* source = payload() + static_cast<std::size_t>(offset_of(first)) * size_of(dtype_);
        load_elements(source, dtype_, strides_.back(), piece, values);
        first += piece, count -= piece, values += piece;
    }
}

void Tensor::write(std::int64_t first, std::int64_t count, const double* values) {
    while (count > 0) {
        const std::int64_t piece = std::min(count, run_length(first));
        unsigned char* target = payload() + static_cast<std::size_t>(offset_of(first)) * size_of(dtype_);
        store_elements(target, dtype_, strides_.back(), piece, values);
        first += piece, count -= piece, values += piece;
    }
}

double Tensor::get(std::int64_t index) const {
    double value = 0;
    read(index, 1, &value);
    return value;
}

void Tensor::set(std::int64_t index, double value) { write(index, 1, &value); }

std::vector<double> Tensor::values() const {
    std::vector<double> result(static_cast<std::size_t>(numel()));
    read(0, numel(), result.data());
    return result;
}

std::vector<std::int64_t> Tensor::integers() const {
    std::vector<std::int64_t> result(static_cast<std::size_t>(numel()));
    for (std::size_t i = 0; i < result.size(); ++i) {
        const unsigned char* source =
            payload() + static_cast<std::size_t>(offset_of(static_cast<std::int64_t>(i))) * size_of(dtype_);
        if (dtype_ == DType::i64) {  // exact, where a double would round
            std::memcpy(&result[i], source, 8);
        } else {
            double value = 0;
            load_elements(source, dtype_, 1, 1, &value);
            result[i] = double_to_integer<std::int64_t>(value);
        }
    }
    return result;
}

void Tensor::fill(double value) {
    const std::vector<double> row(static_cast<std::size_t>(std::min<std::int64_t>(numel(), 4096)), value);
    const std::int64_t step = static_cast<std::int64_t>(row.size());
    for (std::int64_t i = 0; i < numel(); i += step) write(i, std::min(step, numel() - i), row.data());
}

bool Tensor::padding_intact() const {
    const std::size_t size = size_of(dtype_);
    std::vector<bool> owned(static_cast<std::size_t>(extent()));
    for (std::int64_t i = 0; i < numel(); ++i) owned[static_cast<std::size_t>(offset_of(i))] = true;
    const int expected = is_integer(dtype_) ? 0 : guard_value;
    for (std::size_t i = 0; i < owned.size(); ++i) {
        if (!owned[i] && !all_bytes_are(payload() + i * size, size, expected)) return false;
    }
    return true;
}

bool Tensor::guards_intact() const {
    if (storage_.empty()) return true;
    if (!all_bytes_are(storage_.data(), guard_bytes, guard_value)) return false;
    if (!all_bytes_are(storage_.data() + storage_.size() - guard_bytes, guard_bytes, guard_value)) return false;
    return dense_ || padding_intact();
}

}  // namespace headrace::harness
