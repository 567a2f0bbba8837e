// safetensors reader and writer: a header that is checked in full before any tensor is made.
#include "harness/safetensors.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "harness/output_file.hpp"

namespace headrace::harness {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr std::uint64_t max_header_bytes = 100'000'000;  // the format's own limit

// Where a file's bytes come from: `read(offset, bytes, destination)` returns false on a failure.
struct Source {
    std::uint64_t bytes = 0;
    std::function<bool(std::uint64_t, std::uint64_t, void*)> read;
};

// One entry of the header; the tensor's bytes are [begin, end) of the data behind the header.
struct Entry {
    std::string name;
    DType dtype = DType::f32;
    std::vector<std::int64_t> shape;
    std::uint64_t begin = 0, end = 0;
};

constexpr std::pair<const char*, DType> dtype_names[] = {{"F64", DType::f64},   {"F32", DType::f32},
                                                         {"BF16", DType::bf16}, {"F16", DType::f16},
                                                         {"I32", DType::i32},   {"I64", DType::i64}};

Status error(const std::string& message) { return Status(Code::invalid_argument, message); }

// A file may hold any bytes as a name: show it short and printable.
std::string quoted(const std::string& name) {
    std::string text = "'";
    for (char c : name.substr(0, 60)) text += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    return text + (name.size() > 60 ? "...'" : "'");
}

// ---- reading

// {"name": {"shape": [2, 3]}} is three levels deep; more would only cost the JSON parser memory.
bool nested_too_deep(const std::string& text) {
    int depth = 0;
    bool in_string = false;
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (in_string) {
            if (text[i] == '\\') {
                ++i;  // whatever stands behind the backslash does not end the string
            } else {
                in_string = text[i] != '"';
            }
        } else if (text[i] == '"') {
            in_string = true;
        } else if (text[i] == '{' || text[i] == '[') {
            if (++depth > 3) return true;
        } else if (text[i] == '}' || text[i] == ']') {
            --depth;
        }
    }
    return false;
}

// Parses the header; a name that stands twice in an object is an error.
Status parse_header(const std::string& text, json* header) {
    if (nested_too_deep(text)) return error("header: values are nested deeper than in entries of tensors");
    std::vector<std::set<std::string>> names;  // per open object
    std::string duplicate;
    const auto watch = [&](int, json::parse_event_t event, json& value) {
        if (event == json::parse_event_t::object_start) names.emplace_back();
        if (event == json::parse_event_t::object_end) names.pop_back();
        if (event == json::parse_event_t::key && !names.back().insert(value.get<std::string>()).second) {
            duplicate = quoted(value.get<std::string>());
        }
        return true;
    };
    *header = json::parse(text, watch, /*allow_exceptions=*/false);
    if (header->is_discarded()) return error("header: not valid JSON");
    if (!header->is_object()) return error("header: expected a JSON object, got " + std::string(header->type_name()));
    if (!duplicate.empty()) return error("header: the name " + duplicate + " stands twice");
    return {};
}

Status parse_metadata(const json& value, std::map<std::string, std::string>* metadata) {
    if (!value.is_object())
        return error("__metadata__: expected an object of strings, got " + std::string(value.type_name()));
    for (const auto& [key, text] : value.items()) {
        if (!text.is_string())
            return error("__metadata__ " + quoted(key) + ": expected a string, got " + text.type_name());
        (*metadata)[key] = text.get<std::string>();
    }
    return {};
}

Status parse_dtype(const std::string& who, const json& value, DType* dtype) {
    if (!value.is_string()) return error(who + ": dtype: expected a string, got " + value.type_name());
    const auto& text = value.get_ref<const std::string&>();
    for (const auto& [name, type] : dtype_names) {
        if (text == name) {
            *dtype = type;
            return {};
        }
    }
    return error(who + ": dtype: expected F64, F32, BF16, F16, I32 or I64, got " + quoted(text));
}

// Also computes the bytes of the tensor, checked against overflow even where another dimension is 0.
Status parse_shape(const std::string& who, const json& value, Entry* entry, std::uint64_t* bytes) {
    if (!value.is_array()) return error(who + ": shape: expected an array, got " + value.type_name());
    if (value.empty() || value.size() > TensorView::max_rank) {
        return error(who + ": shape: expected 1 to 4 dimensions, got " + std::to_string(value.size()));
    }
    constexpr std::uint64_t limit = std::uint64_t{1} << 62;
    std::uint64_t extent = size_of(entry->dtype);
    bool empty = false;
    for (const json& item : value) {
        if (!item.is_number_unsigned()) {
            return error(who + ": shape: expected whole numbers >= 0, got " +
                         item.dump(-1, ' ', true, json::error_handler_t::replace));
        }
        const auto size = item.get<std::uint64_t>();
        empty = empty || size == 0;
        if (size > limit / extent) return error(who + ": shape: the number of bytes overflows");
        extent *= std::max<std::uint64_t>(size, 1);
        entry->shape.push_back(static_cast<std::int64_t>(size));
    }
    *bytes = empty ? 0 : extent;
    return {};
}

Status parse_offsets(const std::string& who, const json& value, std::uint64_t data_bytes, Entry* entry) {
    if (!value.is_array() || value.size() != 2 || !value[0].is_number_unsigned() || !value[1].is_number_unsigned()) {
        return error(who + ": data_offsets: expected two whole numbers >= 0");
    }
    entry->begin = value[0].get<std::uint64_t>();
    entry->end = value[1].get<std::uint64_t>();
    const std::string range = "[" + std::to_string(entry->begin) + ", " + std::to_string(entry->end) + "]";
    if (entry->begin > entry->end) return error(who + ": data_offsets: the begin lies behind the end: " + range);
    if (entry->end > data_bytes) {
        return error(who + ": data_offsets: " + range + " reaches past the " + std::to_string(data_bytes) +
                     " bytes of data");
    }
    return {};
}

Status parse_entry(const std::string& name, const json& value, std::uint64_t data_bytes, Entry* entry) {
    const std::string who = "tensor " + quoted(name);
    if (!value.is_object()) return error(who + ": expected an object, got " + value.type_name());
    for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (!value.contains(field)) return error(who + ": has no " + field);
    }
    entry->name = name;
    std::uint64_t bytes = 0;
    if (Status status = parse_dtype(who, value["dtype"], &entry->dtype); !status.ok()) return status;
    if (Status status = parse_shape(who, value["shape"], entry, &bytes); !status.ok()) return status;
    if (Status status = parse_offsets(who, value["data_offsets"], data_bytes, entry); !status.ok()) return status;
    if (entry->end - entry->begin != bytes) {
        return error(who + ": data_offsets: expected " + std::to_string(bytes) +
                     " bytes for its dtype and shape, got " + std::to_string(entry->end - entry->begin));
    }
    return {};
}

// Tensors must tile the data: no overlaps, no gaps.
Status check_tiling(std::vector<Entry>* entries, std::uint64_t data_bytes) {
    std::sort(entries->begin(), entries->end(),
              [](const Entry& a, const Entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
    std::uint64_t position = 0;
    for (const Entry& entry : *entries) {
        if (entry.begin < position) {
            return error("tensor " + quoted(entry.name) + ": data_offsets: overlaps the tensor before it");
        }
        if (entry.begin > position) break;
        position = entry.end;
    }
    if (position == data_bytes) return {};
    return error("data: the bytes from " + std::to_string(position) + " on belong to no tensor");
}

Status read_header(const Source& source, json* header, std::uint64_t* data_begin) {
    std::uint64_t header_bytes = 0;
    if (source.bytes < 8)
        return error("expected a safetensors file, got only " + std::to_string(source.bytes) + " bytes");
    if (!source.read(0, 8, &header_bytes)) return error("could not be read");
    if (header_bytes > max_header_bytes) {
        return error("header: its size, " + std::to_string(header_bytes) + " bytes, is above the limit of 100 MB");
    }
    if (header_bytes > source.bytes - 8) {
        return error("header: its size, " + std::to_string(header_bytes) + " bytes, is larger than the file");
    }
    std::string text(header_bytes, '\0');
    if (!source.read(8, header_bytes, text.data())) return error("header: could not be read");
    *data_begin = 8 + header_bytes;
    return parse_header(text, header);
}

Status read(const Source& source, Safetensors* file) {
    json header;
    std::uint64_t data_begin = 0;
    if (Status status = read_header(source, &header, &data_begin); !status.ok()) return status;
    const std::uint64_t data_bytes = source.bytes - data_begin;
    Safetensors result;
    std::vector<Entry> entries;
    for (const auto& [name, value] : header.items()) {
        if (name == "__metadata__") {
            if (Status status = parse_metadata(value, &result.metadata); !status.ok()) return status;
            continue;
        }
        entries.emplace_back();
        if (Status status = parse_entry(name, value, data_bytes, &entries.back()); !status.ok()) return status;
    }
    if (Status status = check_tiling(&entries, data_bytes); !status.ok()) return status;
    for (const Entry& entry : entries) {
        Tensor tensor(entry.dtype, entry.shape);
        if (entry.end > entry.begin &&
            !source.read(data_begin + entry.begin, entry.end - entry.begin, tensor.view().data)) {
            return error("tensor " + quoted(entry.name) + ": its data could not be read");
        }
        result.tensors.emplace(entry.name, std::move(tensor));
    }
    *file = std::move(result);
    return {};
}

// ---- writing

// The bytes of a tensor in row-major order.
std::vector<char> row_major_bytes(const TensorView& view) {
    const std::size_t width = size_of(view.dtype);
    std::vector<char> bytes(static_cast<std::size_t>(view.numel()) * width);
    std::int64_t index[TensorView::max_rank] = {};
    for (std::size_t position = 0; position < bytes.size(); position += width) {
        std::int64_t offset = 0;
        for (int i = 0; i < view.rank; ++i) offset += index[i] * view.strides[i];
        std::memcpy(bytes.data() + position,
                    static_cast<const char*>(view.data) + offset * static_cast<std::int64_t>(width), width);
        for (int i = view.rank - 1; i >= 0 && ++index[i] == view.shape[i]; --i) index[i] = 0;
    }
    return bytes;
}

bool contiguous(const TensorView& view) {
    std::int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
        if (view.shape[i] != 1 && view.strides[i] != stride) return false;
        stride *= view.shape[i];
    }
    return true;
}

const char* format_name(DType dtype) {
    for (const auto& [name, type] : dtype_names) {
        if (type == dtype) return name;
    }
    return "?";
}

// Wide elements first, so that each tensor starts at a multiple of its element size.
std::vector<const std::pair<const std::string, Tensor>*> write_order(const std::map<std::string, Tensor>& tensors) {
    std::vector<const std::pair<const std::string, Tensor>*> order;
    for (const auto& item : tensors) {
        if (item.second.given()) order.push_back(&item);
    }
    std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
        return size_of(a->second.dtype()) > size_of(b->second.dtype());
    });
    return order;
}

}  // namespace

Status parse_safetensors(const void* data, std::size_t bytes, Safetensors* file) {
    const auto copy = [&](std::uint64_t offset, std::uint64_t count, void* destination) {
        if (count > 0) std::memcpy(destination, static_cast<const char*>(data) + offset, count);
        return true;
    };
    try {
        return read({bytes, copy}, file);
    } catch (const std::bad_alloc&) {
        return Status(Code::out_of_memory, "not enough memory for the tensors");
    }
}

Status read_safetensors(const std::string& path, Safetensors* file) {
    std::error_code failure;
    const std::uint64_t bytes = std::filesystem::file_size(path, failure);
    if (failure) return error(path + ": could not be opened: " + failure.message());
    errno = 0;
    std::ifstream stream(path, std::ios::binary);
    if (!stream) return error(path + ": could not be opened: " + std::strerror(errno));
    const auto copy = [&](std::uint64_t offset, std::uint64_t count, void* destination) {
        stream.seekg(static_cast<std::streamoff>(offset));
        stream.read(static_cast<char*>(destination), static_cast<std::streamsize>(count));
        return static_cast<bool>(stream);
    };
    try {
        Status status = read({bytes, copy}, file);
        return status.ok() ? status : Status(status.code(), path + ": " + status.message());
    } catch (const std::bad_alloc&) {
        return Status(Code::out_of_memory, path + ": not enough memory for the tensors");
    }
}

Status write_safetensors(const std::string& path, const Safetensors& file) {
    const auto order = write_order(file.tensors);
    json header = json::object();
    if (!file.metadata.empty()) header["__metadata__"] = file.metadata;
    std::uint64_t offset = 0;
    for (const auto* item : order) {
        const Tensor& tensor = item->second;
        const std::uint64_t end = offset + static_cast<std::uint64_t>(tensor.numel()) * size_of(tensor.dtype());
        header[item->first] = {
            {"dtype", format_name(tensor.dtype())}, {"shape", tensor.shape()}, {"data_offsets", {offset, end}}};
        offset = end;
    }
    std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
    text.append((8 - text.size() % 8) % 8, ' ');  // data starts at a multiple of 8
    return write_file(path, [&](const Append& append) {
        const std::uint64_t header_bytes = text.size();
        append(&header_bytes, 8);
        append(text.data(), text.size());
        for (const auto* item : order) {
            const TensorView view = item->second.view();
            if (contiguous(view)) {
                append(view.data, static_cast<std::size_t>(view.numel()) * size_of(view.dtype));
            } else {
                const std::vector<char> bytes = row_major_bytes(view);
                append(bytes.data(), bytes.size());
            }
        }
    });
}

}  // namespace headrace::harness
