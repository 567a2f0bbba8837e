// setmaxnreg: what warpgroups may take of a block's registers, and each rule about it broken once.
#include <gtest/gtest.h>

#include "tests/orders.hpp"

namespace headrace::ptx {
namespace {

// 168 registers of each thread are launched. %r1: the thread's warpgroup.
constexpr const char* bounds = ".maxntid 384\n.minnctapersm 1\n";

void run(const std::string& body, const Settings& settings = {}, const std::string& performance = bounds,
         std::uint32_t threads = 384) {
    Device device;
    device.settings = settings;
    device.block = {threads, 1, 1};
    std::string text = kernel_text(0, "shr.u32 %r1, %r0, 7;" + body);
    text.insert(text.find("\n{\n") + 1, performance);
    device.run(text, {});
}

std::string of_group(int group, const std::string& statements) {
    const std::string number = std::to_string(group);
    return "setp.ne.u32 %p0, %r1, " + number + ";@%p0 bra after_" + number + ";" + statements + "after_" + number +
           ":\n";
}
std::string keep(int count) { return "setmaxnreg.dec.sync.aligned.u32 " + std::to_string(count) + ";"; }
std::string take(int count) { return "setmaxnreg.inc.sync.aligned.u32 " + std::to_string(count) + ";"; }

TEST(RegisterCounts, SharedByGroups) {
    for (const Settings& settings : orders()) {
        run(of_group(0, take(240)) + of_group(1, keep(136)) + of_group(2, keep(128)), settings);
        run(of_group(1, keep(24)), settings);
        run(of_group(0, take(248)) + of_group(2, keep(88)), settings);
    }
    run(take(168));
    run(take(248), {}, ".maxntid 128\n.minnctapersm 2\n", 128);  // of 255, in units of eight
}

void expect_fault(const std::string& words, const std::string& body, const std::string& performance = bounds,
                  std::uint32_t threads = 384) {
    SCOPED_TRACE(body);
    for (const Settings& settings : orders()) EXPECT_FAULT(run(body, settings, performance, threads), words);
}

TEST(RegisterCounts, MoreThanThereAre) {
    expect_fault("some would wait for ever", of_group(0, take(240)) + of_group(1, keep(104)));
    expect_fault("some would wait for ever", take(176));
    expect_fault("some would wait for ever", of_group(0, take(176)) + of_group(1, keep(24)), bounds, 128);
}

TEST(RegisterCounts, WrongNumbers) {
    for (const int wrong : {0, 16, 100, 264})
        expect_fault("expected a multiple of 8 from 24 to 256", of_group(0, keep(wrong)));
    expect_fault("takes 160 registers of the 168", of_group(0, take(160)));
    expect_fault("keeps 176 registers of the 168", of_group(0, keep(176)));
    expect_fault("in a kernel without .maxntid and .minnctapersm", keep(128), "");
    expect_fault("in a kernel without .maxntid and .minnctapersm", keep(128), ".maxntid 384\n");
}

TEST(RegisterCounts, WarpsThatDiffer) {
    expect_fault("of a warpgroup have 168 and 128 registers", "setp.ge.u32 %p1, %r0, 352;@%p1 " + keep(128));
    expect_fault(
        "of a warpgroup have 120 and 128 registers",
        "setp.ge.u32 %p1, %r0, 352;@%p1 bra last;" + of_group(2, keep(120)) + "bra end;last:\n" + keep(128) + "end:\n");
    expect_fault("the group has no four warps", keep(128), bounds, 96);
    expect_fault("has set its number of registers before", of_group(2, keep(128) + keep(120)));
    expect_fault("setmaxnreg", "setp.eq.u32 %p1, %r0, 5;@%p1 " + keep(128));
}

}  // namespace
}  // namespace headrace::ptx
