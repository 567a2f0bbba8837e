// Runs PTX snippets for tests: a body becomes a kernel, vectors become buffers.
#pragma once

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "checks/device_memory.hpp"
#include "machine/grid.hpp"

namespace headrace::ptx {

// A module with the one entry "kernel". Its parameters p0, p1, ... (.u64) are in %rd0, %rd1, ...; the thread's index is
// %r0. Free to use: %r1 to %r39, %rd8 to %rd39, %f0 to %f39, %fd0 to %fd39, %h0 to %h39 (.b16), %p0 to %p19.
inline std::string kernel_text(int parameters, const std::string& body, const std::string& before = {}) {
    std::string text = ".version 9.0\n.target sm_80\n.address_size 64\n" + before + "\n.visible .entry kernel(";
    for (int i = 0; i < parameters; ++i) text += (i == 0 ? ".param .u64 p" : ", .param .u64 p") + std::to_string(i);
    text +=
        ")\n{\n.reg .pred %p<20>;\n.reg .b16 %h<40>;\n.reg .b32 %r<40>;\n.reg .b64 %rd<40>;\n.reg .f32 %f<40>;\n.reg "
        ".f64 %fd<40>;\n";
    for (int i = 0; i < parameters; ++i)
        text += "ld.param.u64 %rd" + std::to_string(i) + ", [p" + std::to_string(i) + "];\n";
    return text + "mov.u32 %r0, %tid.x;\n" + body + "\nret;\n}\n";
}

// Device memory with vectors in and out, and launches of texts.
class Device {
  public:
    template <class T>
    std::uint64_t buffer(const std::vector<T>& contents) {
        const std::uint64_t address = memory.allocate(contents.size() * sizeof(T), "test");
        memory.write(address, contents.data(), contents.size() * sizeof(T));
        return address;
    }
    std::uint64_t unwritten(std::size_t bytes) { return memory.allocate(bytes, "test"); }

    template <class T>
    std::vector<T> read(std::uint64_t address, std::size_t count) {
        std::vector<T> contents(count);
        memory.read(contents.data(), address, count * sizeof(T));
        return contents;
    }

    // The module's first entry, with 64-bit parameters.
    void run(const std::string& text, const std::vector<std::uint64_t>& parameters) {
        Program program(text, memory);
        run(program, parameters);
    }
    void run(Program& program, const std::vector<std::uint64_t>& parameters) {
        Launch launch;
        launch.function = &program.module().functions.at(0);
        launch.grid = grid;
        launch.block = block;
        launch.dynamic_shared_bytes = dynamic_shared_bytes;
        launch.parameters.resize(parameters.size() * sizeof(std::uint64_t));
        if (!parameters.empty()) std::memcpy(launch.parameters.data(), parameters.data(), launch.parameters.size());
        run_grid(program, launch, settings);
    }

    DeviceMemory memory;
    Settings settings;
    std::array<std::uint32_t, 3> grid{1, 1, 1}, block{32, 1, 1};
    std::size_t dynamic_shared_bytes = 0;
};

// One warp of 32 lanes: lane l reads element l of each input, executes `body`, and stores its result.
// `load` and `store` are PTX types ("f32"), `in` and `out` the registers: run_lanes<float>({{x, "f32", "%f1"}}, body,
// "f32", "%f0").
struct LaneInput {
    std::vector<std::uint64_t> bits;  // one for each lane, of the type's size; cycled where they are fewer
    std::string type, target;
};
template <class T>
std::vector<T> run_lanes(const std::vector<LaneInput>& inputs, const std::string& body, const std::string& type,
                         const std::string& result, const Settings& settings = {}) {
    const auto bytes_named = [](const std::string& name) {
        return static_cast<std::size_t>(bytes_of(type_named(name)));
    };
    Device device;
    device.settings = settings;
    std::vector<std::uint64_t> parameters;
    std::string text = "mov.u32 %r39, %laneid;\n";
    for (const LaneInput& input : inputs) {
        const std::size_t bytes = bytes_named(input.type);
        std::vector<std::byte> contents(bytes * 32);
        for (std::size_t lane = 0; lane < 32; ++lane) {
            std::memcpy(contents.data() + lane * bytes, &input.bits[lane % input.bits.size()], bytes);
        }
        text +=
            "mad.wide.u32 %rd39, %r39, " + std::to_string(bytes) + ", %rd" + std::to_string(parameters.size()) + ";\n";
        text += "ld.global." + input.type + " " + input.target + ", [%rd39];\n";
        parameters.push_back(device.buffer(contents));
    }
    const std::string out = std::to_string(parameters.size());
    parameters.push_back(device.unwritten(32 * sizeof(T)));
    text += body + "\nmad.wide.u32 %rd39, %r39, " + std::to_string(sizeof(T)) + ", %rd" + out + ";\n";
    text += "st.global." + type + " [%rd39], " + result + ";\n";
    device.run(kernel_text(static_cast<int>(parameters.size()), text), parameters);
    return device.read<T>(parameters.back(), 32);
}

}  // namespace headrace::ptx
