// cp.async: copies from global to shared memory that land when their thread waits for them.
#include <cstring>
#include <vector>

#include "instructions/addresses.hpp"

namespace headrace::ptx {

struct Copy {
    std::uint64_t source = 0;
    std::uint32_t destination = 0;
    std::uint8_t bytes = 0, source_bytes = 0;  // of the destination; those that are read, before zeros
    int line = 0;
    std::byte contents[16] = {};
};

// A thread's copies in the order of issue. `groups` counts the copies of each committed group, oldest first; the copies
// behind them are not committed yet.
struct ThreadCopies {
    std::vector<Copy> copies;
    std::vector<std::size_t> groups;
    std::size_t committed = 0;
};

struct AsyncCopies {
    std::vector<ThreadCopies> threads;
};

namespace {

constexpr int has_source_bytes = 1, ignores_if_true = 2, ignores_if_false = 4;  // of Step::variant
constexpr int destination_base = 0, source_base = 1, source_size = 2;           // in Step::from

ThreadCopies& copies_of(const Warp& warp, int lane) {
    return warp.block->copies->threads[static_cast<std::size_t>(warp.index * lanes + lane)];
}

// Device memory answers for powers of two, aligned: a copy that ends within the 16 bytes is read in such pieces.
void read_source(const Block& block, const Copy& copy, std::byte* to) {
    for (unsigned done = 0; done < copy.source_bytes;) {
        unsigned piece = 16;
        while (piece > copy.source_bytes - done || (copy.source + done) % piece != 0) piece /= 2;
        std::memcpy(to + done, block.memory->load(copy.source + done, piece, block.number), piece);
        done += piece;
    }
}

// How many bytes the lane's copy reads; the rest of its destination becomes zero.
unsigned source_bytes_of(const Warp& warp, const Step& step, int lane) {
    const auto bytes = static_cast<unsigned>(step.width);
    const int slot = step.from[source_size];
    if ((step.variant & has_source_bytes) != 0) {
        const std::uint32_t wanted = warp.u32(slot)[lane];
        if (wanted > bytes) throw_fault("copies ", wanted, " bytes into ", bytes);
        return wanted;
    }
    if ((step.variant & (ignores_if_true | ignores_if_false)) == 0) return bytes;
    const bool given = (warp.predicate(slot) >> lane & 1) != 0;
    return given == ((step.variant & ignores_if_true) != 0) ? 0 : bytes;
}

// The hardware may read the source at any time until the copy lands: it is read at both ends, and has to be the same.
void issue(Warp& warp, const Step& step, Mask active) {
    Block& block = *warp.block;
    const auto bytes = static_cast<unsigned>(step.width);
    std::uint64_t to[lanes] = {}, from[lanes] = {};
    gather_addresses(warp, step.from[destination_base], step.other, (step.variant & wide_base) != 0, active, to);
    gather_addresses(warp, step.from[source_base], step.offset, (step.variant & wide_second_base) != 0, active, from);
    for_faulting_lanes(active, [&](int lane) {
        Copy copy;
        if (from[lane] % bytes != 0) throw_fault("source address ", from[lane], " is not aligned to ", bytes, " bytes");
        copy.source = from[lane];
        copy.destination = shared_offset(block, to[lane]);
        copy.bytes = static_cast<std::uint8_t>(bytes);
        copy.source_bytes = static_cast<std::uint8_t>(source_bytes_of(warp, step, lane));
        copy.line = step.statement->line;
        read_source(block, copy, copy.contents);
        block.shared->issue(copy.destination, bytes, warp.index, lane, copy.line);
        copies_of(warp, lane).copies.push_back(copy);
    });
    count_conflicts(step, to, active, bytes);
}

void land(Warp& warp, int lane, Copy& copy) {
    Block& block = *warp.block;
    std::byte now[16] = {};
    read_source(block, copy, now);
    if (std::memcmp(now, copy.contents, copy.source_bytes) != 0)
        throw_fault("waits for the cp.async of line ", copy.line, ", whose source has changed since it was issued");
    block.shared->land(copy.destination, copy.contents, copy.bytes, warp.index, lane, copy.line);
}

void commit_thread(ThreadCopies& thread) {
    thread.groups.push_back(thread.copies.size() - thread.committed);
    thread.committed = thread.copies.size();
}

// Lands the groups before the thread's last `pending` ones.
void wait_thread(Warp& warp, int lane, std::size_t pending) {
    ThreadCopies& thread = copies_of(warp, lane);
    if (thread.groups.size() <= pending) return;
    const std::size_t done = thread.groups.size() - pending;
    std::size_t landing = 0;
    for (std::size_t i = 0; i < done; ++i) landing += thread.groups[i];
    for (std::size_t i = 0; i < landing; ++i) land(warp, lane, thread.copies[i]);
    thread.groups.erase(thread.groups.begin(), thread.groups.begin() + static_cast<std::ptrdiff_t>(done));
    thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<std::ptrdiff_t>(landing));
    thread.committed -= landing;
}

void commit_group(Warp& warp, const Step&, Mask active) {
    for_lanes(active, [&](int lane) { commit_thread(copies_of(warp, lane)); });
}

void wait_group(Warp& warp, const Step& step, Mask active) {
    for_faulting_lanes(active, [&](int lane) { wait_thread(warp, lane, static_cast<std::size_t>(step.other)); });
}

void wait_all(Warp& warp, const Step&, Mask active) {
    for_faulting_lanes(active, [&](int lane) {
        commit_thread(copies_of(warp, lane));
        wait_thread(warp, lane, 0);
    });
}

bool is_hint(const std::string& modifier) {
    return modifier == "L2::cache_hint" || modifier == "L2::64B" || modifier == "L2::128B" || modifier == "L2::256B";
}

// The last operand but a cache policy: src-size or the predicate ignore-src.
void decode_source_size(const Statement& statement, const Operand& operand, Decoder& decoder, Step& step) {
    if (operand.kind == Operand::Kind::reg && decoder.type_of(operand) == Type::pred) {
        step.variant |= operand.negated ? ignores_if_false : ignores_if_true;
        step.from[source_size] = decoder.source(operand, Type::pred);
    } else if (operand.kind == Operand::Kind::immediate || operand.kind == Operand::Kind::reg) {
        step.variant |= has_source_bytes;
        step.from[source_size] = decoder.source(operand, Type::u32);
    } else {
        decoder.unknown(statement);
    }
}

void decode_copy(const Statement& statement, Decoder& decoder, Step& step) {
    const auto& words = statement.modifiers;  // async, ca or cg, shared, global, hints
    if (words.size() < 4 || (words[1] != "ca" && words[1] != "cg") ||
        (words[2] != "shared" && words[2] != "shared::cta") || words[3] != "global")
        decoder.unknown(statement);
    bool has_policy = false;
    for (std::size_t i = 4; i < words.size(); ++i) {
        if (!is_hint(words[i])) decoder.unknown(statement);
        has_policy |= words[i] == "L2::cache_hint";
    }
    const auto& operands = statement.operands;
    const std::size_t count = operands.size() - (has_policy ? 1 : 0);
    if (count < 3 || count > 4 || operands[2].kind != Operand::Kind::immediate) decoder.unknown(statement);
    const std::uint64_t bytes = operands[2].bits;
    if (bytes != 16 && (words[1] == "cg" || (bytes != 4 && bytes != 8))) decoder.unknown(statement);
    step.width = static_cast<std::int16_t>(bytes);
    step.other = static_cast<int>(decode_address(statement, operands[0], decoder, step, destination_base, wide_base));
    step.offset = decode_address(statement, operands[1], decoder, step, source_base, wide_second_base);
    step.sources = static_cast<std::int16_t>(count - 1);
    if (count == 4) decode_source_size(statement, operands[3], decoder, step);
    step.space = Space::shared;
    step.execute = issue;
}

}  // namespace

bool decode_async(const Statement& statement, Decoder& decoder, Step& step) {
    if (statement.opcode != "cp") return false;
    if (statement.modifiers.empty() || statement.modifiers[0] != "async") decoder.unknown(statement);
    const std::string form = statement.modifiers.size() == 2 ? statement.modifiers[1] : "";
    if (form == "commit_group") {
        step.execute = commit_group;
    } else if (form == "wait_all") {
        step.execute = wait_all;
    } else if (form == "wait_group") {
        if (statement.operands.size() != 1 || statement.operands[0].kind != Operand::Kind::immediate)
            decoder.unknown(statement);
        step.other = static_cast<int>(statement.operands[0].bits);
        step.execute = wait_group;
    } else {
        decode_copy(statement, decoder, step);
    }
    return true;
}

AsyncCopies* make_async_copies(Block&, int threads) {
    return new AsyncCopies{std::vector<ThreadCopies>(static_cast<std::size_t>(threads + lanes - 1) / lanes * lanes)};
}

void destroy_async_copies(AsyncCopies* copies) { delete copies; }

void check_no_copies_in_flight(const Warp& warp, Mask exiting) {
    for_faulting_lanes(exiting, [&](int lane) {
        const ThreadCopies& thread = copies_of(warp, lane);
        if (!thread.copies.empty())
            throw_fault("ends while the cp.async of line ", thread.copies[0].line, " is in flight to shared offset ",
                        thread.copies[0].destination);
    });
}

}  // namespace headrace::ptx
