// safetensors: round trips of every dtype, layout and metadata, and an error for each way in which a file can be wrong.
#include "harness/safetensors.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "harness/output_file.hpp"

namespace headrace::harness {
namespace {

namespace fs = std::filesystem;

// A folder of its own for each test, removed behind it.
class SafetensorsTest : public ::testing::Test {
  protected:
    void SetUp() override {
        folder_ = fs::path(::testing::TempDir()) /
                  (std::string("headrace_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
        fs::remove_all(folder_);
        fs::create_directories(folder_);
    }
    void TearDown() override { fs::remove_all(folder_); }

    std::string path(const std::string& name) const { return (folder_ / name).string(); }
    std::size_t files() const {
        return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
    }

    fs::path folder_;
};

std::string file_bytes(const std::string& header, const std::string& data, std::uint64_t header_bytes) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &header_bytes, 8);
    return bytes + header + data;
}
std::string file_bytes(const std::string& header, const std::string& data = "") {
    return file_bytes(header, data, header.size());
}

std::string message_of(const std::string& bytes) {
    Safetensors file;
    file.metadata["before"] = "kept";
    const Status status = parse_safetensors(bytes.data(), bytes.size(), &file);
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_EQ(file.metadata.count("before"), 1u) << "a failed read changed its result";
    return status.message();
}

// A file of one tensor "x" with `fields`, and `data_bytes` of data.
std::string message_of_tensor(const std::string& fields, std::size_t data_bytes) {
    return message_of(file_bytes("{\"x\":{" + fields + "}}", std::string(data_bytes, 'a')));
}

Tensor counting(DType dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides = {}) {
    Tensor tensor(dtype, std::move(shape), std::move(strides));
    for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, static_cast<double>(i) - 3);
    return tensor;
}

TEST_F(SafetensorsTest, RoundTripOfEveryDtypeAndRank) {
    Safetensors written;
    const std::vector<std::vector<std::int64_t>> shapes = {{5}, {2, 3}, {2, 1, 4}, {2, 3, 2, 5}, {3, 0, 2}};
    for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i32, DType::i64}) {
        for (const auto& shape : shapes) {
            written.tensors[std::string(name_of(dtype)) + " rank " + std::to_string(shape.size()) +
                            (shape[1 % shape.size()] == 0 ? " empty" : "")] = counting(dtype, shape);
        }
    }
    written.metadata = {{"scale", "0.5"}, {"quote \" and \\", "line\nand \xc3\xa9"}, {"", ""}};
    ASSERT_TRUE(write_safetensors(path("a"), written).ok());
    EXPECT_EQ(files(), 1u) << "the temporary file is left over";

    Safetensors read;
    const Status status = read_safetensors(path("a"), &read);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(read.metadata, written.metadata);
    ASSERT_EQ(read.tensors.size(), written.tensors.size());
    for (const auto& [name, tensor] : written.tensors) {
        ASSERT_EQ(read.tensors.count(name), 1u) << name;
        EXPECT_EQ(read.tensors[name].dtype(), tensor.dtype()) << name;
        EXPECT_EQ(read.tensors[name].shape(), tensor.shape()) << name;
        EXPECT_EQ(read.tensors[name].values(), tensor.values()) << name;
        EXPECT_TRUE(read.tensors[name].guards_intact()) << name;
    }
}

TEST_F(SafetensorsTest, SpecialValuesKeepTheirBits) {
    Safetensors written;
    Tensor tensor(DType::f32, {4});
    const float values[] = {std::numeric_limits<float>::infinity(), -0.0f, std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::quiet_NaN()};
    std::memcpy(tensor.view().data, values, sizeof values);
    Tensor big(DType::i64, {1});
    const std::int64_t integer = (std::int64_t{1} << 62) + 1;
    std::memcpy(big.view().data, &integer, 8);
    written.tensors["x"] = std::move(tensor);
    written.tensors["big"] = std::move(big);
    ASSERT_TRUE(write_safetensors(path("a"), written).ok());
    Safetensors read;
    ASSERT_TRUE(read_safetensors(path("a"), &read).ok());
    EXPECT_EQ(std::memcmp(read.tensors["x"].view().data, values, sizeof values), 0);
    EXPECT_EQ(read.tensors["big"].integers(), std::vector<std::int64_t>{integer});
}

TEST_F(SafetensorsTest, StridedTensorsAreWrittenRowMajor) {
    Safetensors written;
    written.tensors["padded"] = counting(DType::f16, {3, 4}, {7, 1});
    written.tensors["transposed"] = counting(DType::f64, {3, 4}, {1, 3});
    written.tensors["doubled"] = counting(DType::i32, {2, 3, 2}, {12, 4, 2});
    ASSERT_TRUE(write_safetensors(path("a"), written).ok());
    Safetensors read;
    ASSERT_TRUE(read_safetensors(path("a"), &read).ok());
    for (const auto& [name, tensor] : written.tensors) EXPECT_EQ(read.tensors[name].values(), tensor.values()) << name;
}

TEST_F(SafetensorsTest, DataIsAlignedToItsElements) {
    Safetensors written;
    written.tensors["a"] = counting(DType::f16, {1});
    written.tensors["b"] = counting(DType::f64, {1});
    written.tensors["c"] = counting(DType::f32, {1});
    ASSERT_TRUE(write_safetensors(path("a"), written).ok());
    std::ifstream stream(path("a"), std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    std::uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, bytes.data(), 8);
    EXPECT_EQ(header_bytes % 8, 0u);
    double first = 0;
    std::memcpy(&first, bytes.data() + 8 + header_bytes, 8);
    EXPECT_EQ(first, -3);  // b, the widest, stands first
    EXPECT_EQ(bytes.size(), 8 + header_bytes + 8 + 4 + 2);
}

TEST_F(SafetensorsTest, FilesOfOtherToolsAreRead) {
    // trailing spaces, entries in any order, unknown fields, no metadata
    const std::string header =
        R"({"b":{"shape":[2],"data_offsets":[4,8],"dtype":"BF16"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"note":1}}   )";
    const std::string bytes = file_bytes(header, std::string("\x00\x00\x80\x3f\x80\x3f\x00\x40", 8));
    Safetensors file;
    const Status status = parse_safetensors(bytes.data(), bytes.size(), &file);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(file.tensors["a"].values(), std::vector<double>{1});
    EXPECT_EQ(file.tensors["b"].values(), (std::vector<double>{1, 2}));
    ASSERT_TRUE(parse_safetensors(file_bytes("{}").data(), 10, &file).ok());
    EXPECT_TRUE(file.tensors.empty());
}

TEST_F(SafetensorsTest, AFailedWriteLeavesTheOldFile) {
    ASSERT_TRUE(write_text_file(path("a"), "old").ok());
    fs::create_directory(path("folder"));
    const Status onto_folder = write_text_file(path("folder"), "new");
    EXPECT_FALSE(onto_folder.ok());
    EXPECT_NE(onto_folder.message().find("folder: could not be written"), std::string::npos) << onto_folder.message();
    const Status nowhere = write_safetensors(path("none/a"), {});
    EXPECT_NE(nowhere.message().find("none/a: could not be created: No such file"), std::string::npos)
        << nowhere.message();
    EXPECT_EQ(files(), 2u) << "a temporary file is left over";
    ASSERT_TRUE(write_text_file(path("a"), "new").ok());
    EXPECT_EQ(fs::file_size(path("a")), 3u);
}

TEST_F(SafetensorsTest, UnreadablePathsAreNamed) {
    Safetensors file;
    EXPECT_EQ(read_safetensors(path("none"), &file).message(),
              path("none") + ": could not be opened: No such file or directory");
    EXPECT_FALSE(read_safetensors(folder_.string(), &file).ok());
    ASSERT_TRUE(write_text_file(path("short"), "1234567").ok());
    EXPECT_EQ(read_safetensors(path("short"), &file).message(),
              path("short") + ": expected a safetensors file, got only 7 bytes");
}

// Every prefix of a right file is refused, the whole is read.
TEST_F(SafetensorsTest, TruncatedFilesAreRefused) {
    Safetensors written;
    written.tensors["x"] = counting(DType::f32, {3});
    ASSERT_TRUE(write_safetensors(path("a"), written).ok());
    std::ifstream stream(path("a"), std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    Safetensors file;
    for (std::size_t size = 0; size < bytes.size(); ++size) {
        EXPECT_FALSE(parse_safetensors(bytes.data(), size, &file).ok()) << size;
    }
    EXPECT_TRUE(parse_safetensors(bytes.data(), bytes.size(), &file).ok());
    EXPECT_EQ(message_of(bytes + "z"), "data: the bytes from 12 on belong to no tensor");
}

TEST_F(SafetensorsTest, BadHeaders) {
    EXPECT_EQ(message_of(file_bytes("{}", "", 3)), "header: its size, 3 bytes, is larger than the file");
    EXPECT_EQ(message_of(file_bytes("{}", "", 100'000'001)),
              "header: its size, 100000001 bytes, is above the limit of 100 MB");
    EXPECT_EQ(message_of(file_bytes("{}", "", ~std::uint64_t{0})),
              "header: its size, 18446744073709551615 bytes, is above the limit of 100 MB");
    EXPECT_EQ(message_of(file_bytes("", "")), "header: not valid JSON");
    EXPECT_EQ(message_of(file_bytes("{", "")), "header: not valid JSON");
    EXPECT_EQ(message_of(file_bytes("{\"\xff\":1}", "")), "header: not valid JSON");
    EXPECT_EQ(message_of(file_bytes("[]", "")), "header: expected a JSON object, got array");
    EXPECT_EQ(message_of(file_bytes(std::string(100'000, '['))),
              "header: values are nested deeper than in entries of tensors");
    EXPECT_EQ(message_of(file_bytes("{\"a]\\\"]]\":{\"b\":[[1]]}}")),
              "header: values are nested deeper than in entries of tensors");
    EXPECT_EQ(message_of(file_bytes(R"({"x":1,"x":2})")), "header: the name 'x' stands twice");
    EXPECT_EQ(message_of(file_bytes(R"({"x":{"dtype":"F32","shape":[1],"dtype":"F16","data_offsets":[0,4]}})", "abcd")),
              "header: the name 'dtype' stands twice");
    EXPECT_EQ(message_of(file_bytes(R"({"__metadata__":1})")),
              "__metadata__: expected an object of strings, got number");
    EXPECT_EQ(message_of(file_bytes(R"({"__metadata__":{"a":1}})")), "__metadata__ 'a': expected a string, got number");
    EXPECT_EQ(message_of(file_bytes(R"({"x":[]})")), "tensor 'x': expected an object, got array");
}

TEST_F(SafetensorsTest, BadTensors) {
    EXPECT_EQ(message_of_tensor(R"("shape":[1],"data_offsets":[0,4])", 4), "tensor 'x': has no dtype");
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","data_offsets":[0,4])", 4), "tensor 'x': has no shape");
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":[1])", 4), "tensor 'x': has no data_offsets");
    EXPECT_EQ(message_of_tensor(R"("dtype":"U8","shape":[4],"data_offsets":[0,4])", 4),
              "tensor 'x': dtype: expected F64, F32, BF16, F16, I32 or I64, got 'U8'");
    EXPECT_EQ(message_of_tensor(R"("dtype":4,"shape":[4],"data_offsets":[0,4])", 4),
              "tensor 'x': dtype: expected a string, got number");
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":1,"data_offsets":[0,4])", 4),
              "tensor 'x': shape: expected an array, got number");
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":[],"data_offsets":[0,4])", 4),
              "tensor 'x': shape: expected 1 to 4 dimensions, got 0");
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":[1,1,1,1,1],"data_offsets":[0,4])", 4),
              "tensor 'x': shape: expected 1 to 4 dimensions, got 5");
    for (const char* size : {"-1", "1.0", "\"1\"", "null", "1e2"}) {
        EXPECT_NE(message_of_tensor(std::string(R"("dtype":"F32","shape":[)") + size + R"(],"data_offsets":[0,4])", 4)
                      .find("tensor 'x': shape: expected whole numbers >= 0, got "),
                  std::string::npos)
            << size;
    }
}

TEST_F(SafetensorsTest, OverflowedShapes) {
    const std::string overflow = "tensor 'x': shape: the number of bytes overflows";
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0])", 0), overflow);
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,0])", 0), overflow);
    EXPECT_EQ(message_of_tensor(R"("dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0])", 0), overflow);
    EXPECT_EQ(message_of_tensor(R"("dtype":"F16","shape":[0,4294967296,4294967296],"data_offsets":[0,0])", 0),
              overflow);
    EXPECT_EQ(message_of_tensor(R"("dtype":"F16","shape":[1073741824],"data_offsets":[0,0])", 0),
              "tensor 'x': data_offsets: expected 2147483648 bytes for its dtype and shape, got 0");
}

TEST_F(SafetensorsTest, BadOffsets) {
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0])", 4),
              "tensor 'x': data_offsets: expected two whole numbers >= 0");
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[-4,0])", 4),
              "tensor 'x': data_offsets: expected two whole numbers >= 0");
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])", 4),
              "tensor 'x': data_offsets: the begin lies behind the end: [4, 0]");
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])", 4),
              "tensor 'x': data_offsets: [0, 8] reaches past the 4 bytes of data");
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,0])", 4),
              "tensor 'x': data_offsets: the begin lies behind the end: [18446744073709551612, 0]");
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,2])", 4),
              "tensor 'x': data_offsets: expected 4 bytes for its dtype and shape, got 2");
    EXPECT_EQ(message_of_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])", 8),
              "data: the bytes from 0 on belong to no tensor");
    const auto two = [](const std::string& first, const std::string& second, std::size_t bytes) {
        return message_of(file_bytes(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":)" + first +
                                         R"(},"b":{"dtype":"F32","shape":[1],"data_offsets":)" + second + "}}",
                                     std::string(bytes, 'a')));
    };
    EXPECT_EQ(two("[0,4]", "[2,6]", 6), "tensor 'b': data_offsets: overlaps the tensor before it");
    EXPECT_EQ(two("[0,4]", "[0,4]", 4), "tensor 'b': data_offsets: overlaps the tensor before it");
    EXPECT_EQ(two("[8,12]", "[0,4]", 12), "data: the bytes from 4 on belong to no tensor");
}

// A name may hold anything; messages stay short and printable.
TEST_F(SafetensorsTest, StrangeNamesInMessages) {
    EXPECT_EQ(message_of(file_bytes("{\"a\\nb\":1}")), "tensor 'a?b': expected an object, got number");
    EXPECT_LT(message_of(file_bytes("{\"" + std::string(5000, 'n') + "\":1}")).size(), 120u);
}

}  // namespace
}  // namespace headrace::harness
