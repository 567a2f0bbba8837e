// SharedMemory: the shared memory of one block: bounds, unwritten reads, races between threads, bytes in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace headrace::ptx {

// Races by vector clocks: an access of one thread is ordered behind one of another if a barrier that both took part in,
// or inside a warp a bar.warp.sync, lies between. shfl, vote and mma order no memory. Granules of 2 bytes.
class SharedMemory {
  public:
    SharedMemory(std::size_t bytes, int warps, bool look_for_races);
    ~SharedMemory();

    std::size_t size() const;
    void reset();  // for the next block of the same size: everything unwritten

    // Offsets into the block's shared window. lane -1: a load for all lanes of the warp (ldmatrix). Pointers are valid
    // for the access alone. Throw Fault; the text names the earlier access (warp, lane, PTX line) of a race.
    const std::byte* load(std::uint32_t offset, unsigned bytes, int warp, int lane, int line);
    // By several lanes: of the same bytes (a bit for each lane), and of neighbouring ones by `lanes` lanes from `lane`
    // on. Null, with nothing done, where one look cannot tell that nothing is wrong for any of them: then the lanes
    // load or store one by one, and the first Fault is the warp's.
    const std::byte* load_together(std::uint64_t offset, unsigned bytes, int warp, std::uint32_t readers, int line);
    const std::byte* load_row(std::uint64_t offset, unsigned bytes, int warp, int lane, int lanes, int line);
    std::byte* store(std::uint32_t offset, unsigned bytes, int warp, int lane, int line);
    std::byte* store_row(std::uint64_t offset, unsigned bytes, int warp, int lane, int lanes, int line);
    std::byte* atomic(std::uint32_t offset, unsigned bytes, int warp, int lane, int line);

    // cp.async: from issue to landing nobody may touch the bytes; landing is a write of that thread. At issue they are
    // poisoned.
    void issue(std::uint32_t offset, unsigned bytes, int warp, int lane, int line);
    void land(std::uint32_t offset, const std::byte* contents, unsigned bytes, int warp, int lane, int line);

    // wgmma's reads, for all lanes of the warp. What threads wrote, or cp.async landed, must have been followed by a
    // fence.proxy.async of the writer that is ordered before the read as the write is, or else of all lanes of the
    // reading warp once the write is ordered before them.
    const std::byte* load_by_async_proxy(std::uint32_t offset, unsigned bytes, int warp, int line);
    // The same of 16, 32 or 128 bytes, at a multiple of them. Null, with nothing done, as above.
    const std::byte* load_together_by_async_proxy(std::uint32_t offset, unsigned bytes, int warp, int line);
    // Such a read goes on until now, and nothing was written since it began.
    void read_on(std::uint32_t offset, unsigned bytes, int warp, int line);
    void fence_proxy(int warp, std::uint32_t lanes);  // fence.proxy.async
    // Tells the present contents of 16 bytes from those of any later write; the line of the last write.
    std::uint64_t version(std::uint32_t offset) const;
    int writer_line(std::uint32_t offset) const;

    // What orders: the lanes of one warp that met at a bar.warp.sync; warps that met at a barrier (arrive: those of
    // `arriving` release, those of `waiting` acquire; bar.sync: both; the block's loop calls it when a barrier
    // completes).
    void warp_sync(int warp, std::uint32_t members);
    // A warp that only arrives (bar.arrive) says so at that moment too, with arrive(): what it does between its arrival
    // and the barrier's completion is not released.
    void barrier(const std::vector<int>& arriving, const std::vector<int>& waiting, int barrier = 0);
    void arrive(int warp, int barrier);

  private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation_;
};

}  // namespace headrace::ptx
