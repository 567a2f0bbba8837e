// DeviceMemory: the global memory of the stand-in GPU: allocations, what has been written, which block touched what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace headrace::ptx {

// Device addresses are addresses of this process that the process itself cannot read or write (a mapping without
// rights): a host that follows a device pointer crashes as it would with a GPU. The interpreter reads the same pages
// through a second mapping. Allocations are 512-byte aligned, with a gap of at least 512 bytes that belongs to nobody
// between them.
class DeviceMemory {
  public:
    explicit DeviceMemory(std::size_t capacity = std::size_t{1} << 36);  // address space, not memory
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    std::uint64_t allocate(std::size_t bytes, std::string name = {});  // unwritten; 0 where none is left
    bool release(std::uint64_t address);                               // false: not the start of an allocation
    bool owns(std::uint64_t address) const;                            // inside the address space, allocated or not
    std::size_t allocated_bytes() const;
    std::size_t bytes_from(std::uint64_t address) const;  // left in its allocation; 0 outside any

    // For the host's copies and memsets. Throw Fault outside allocations. read: whether all bytes were written before
    // is answered, not required (a copy carries "unwritten" along through copy()).
    void write(std::uint64_t to, const void* from, std::size_t bytes);
    bool read(void* to, std::uint64_t from, std::size_t bytes) const;
    void fill(std::uint64_t to, int value, std::size_t bytes);
    void copy(std::uint64_t to, std::uint64_t from, std::size_t bytes);

    // For kernels: a launch begins a new epoch, in which two blocks may not touch the same bytes unless both only read
    // or both use atomics. `block` counts from 0. The pointers are valid for the access alone. Fault: outside an
    // allocation (names the nearest one and the distance), not aligned to `bytes`, reading what nothing wrote, a race
    // between blocks.
    void begin_launch(bool may_read_unwritten = false);
    const std::byte* load(std::uint64_t address, unsigned bytes, std::uint32_t block);
    // ld.global.nc: also a Fault where the launch wrote the bytes before, or writes them later.
    const std::byte* load_unchanging(std::uint64_t address, unsigned bytes, std::uint32_t block);
    std::byte* store(std::uint64_t address, unsigned bytes, std::uint32_t block);
    std::byte* atomic(std::uint64_t address, unsigned bytes, std::uint32_t block);
    // `lanes` neighbouring ones of `bytes` each. Null, with nothing done, where one look cannot tell that nothing is
    // wrong: then they are to be asked for one by one.
    const std::byte* load_row(std::uint64_t address, unsigned bytes, int lanes, bool unchanging, std::uint32_t block);
    std::byte* store_row(std::uint64_t address, unsigned bytes, int lanes, std::uint32_t block);

  private:
    struct Implementation;
    Implementation* implementation_;
};

}  // namespace headrace::ptx
