// Programs that PTX does not define, found in every order, with messages that help; settings.
#include <cstdlib>

#include "tests/orders.hpp"

namespace headrace::ptx {
namespace {

TEST(Faults, BarrierInABranchOfSomeLanes) {
    expect_words(fault_of_body("setp.lt.u32 %p1, %r0, 16;\n@!%p1 bra OUT;\nbar.sync 0;\nOUT:\nmov.u32 %r1, 1;"),
                 {"warp 0 cannot go on", "bar.sync 0;", "lanes 0x0000ffff", "all lanes of the warp", "kernel kernel"});
    expect_words(fault_of_body("setp.lt.u32 %p1, %r0, 16;\n@%p1 bar.sync 0;"), {"the guard lets through 0x0000ffff"});
    expect_words(
        fault_of_body(
            "setp.lt.u32 %p1, %r0, 16;\n@!%p1 bra B;\nbar.sync 0;\nbra C;\nB: bar.sync 0;\nC: mov.u32 %r1, 1;"),
        {"cannot go on"});
}

TEST(Faults, LoopsWithABarrierAndUnequalTripCounts) {
    expect_words(fault_of_body("mov.u32 %r1, 0;\nL: bar.sync 0;\nadd.u32 %r1, %r1, 1;\nsetp.lt.u32 %p1, %r1, "
                               "%r0;\n@%p1 bra L;\nadd.u32 %r1, %r1, 1;"),
                 {"cannot go on"});
}

TEST(Faults, MemberMasks) {
    expect_words(fault_of_body("shfl.sync.idx.b32 %r1, %r0, 0, 31, 0xff;"), {"lane 8 is not in the member mask"});
    expect_words(fault_of_body("setp.lt.u32 %p1, %r0, 4;\n@%p1 exit;\nshfl.sync.idx.b32 %r1, %r0, 9, 31, -1;"),
                 {"exit"});
    expect_words(fault_of_body("shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;", 20), {"no threads of the block"});
    expect_words(fault_of_body("setp.lt.u32 %p1, %r0, 4;\n@!%p1 bra OUT;\nbar.warp.sync -1;\nOUT: mov.u32 %r1, 1;"),
                 {"cannot go on", "bar.warp.sync -1", "the lanes 0xffffffff"});
}

TEST(Faults, Deadlocks) {
    expect_words(
        fault_of_body(
            "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra A;\nbar.sync 1, 64;\nbra B;\nA: bar.sync 2, 64;\nB: mov.u32 %r1, 1;",
            64),
        {"deadlock", "warp 0", "warp 1", "bar.sync 1, 64", "bar.sync 2, 64", "32 of 64"});
    // Threads that exited do not count where a number was given.
    expect_words(fault_of_body("setp.lt.u32 %p1, %r0, 32;\n@%p1 exit;\nbar.sync 1, 64;", 64), {"deadlock"});
}

TEST(Faults, BarrierOperands) {
    expect_words(fault_of_body("bar.sync 16;"), {"barrier 16"});
    expect_words(fault_of_body("bar.sync 1, 33;"), {"not a multiple of 32"});
    expect_words(fault_of_body("bar.sync 1, 0;"), {"not a multiple of 32"});
    expect_words(fault_of_body("setp.lt.u32 %p1, %r0, 32;\n@%p1 bra A;\nbar.sync 1, 96;\nA: bar.sync 1, 64;", 96),
                 {"barrier 1"});
    expect_words(fault_of_body("bar.arrive 1, 64;\nbar.sync 1, 64;"), {"arrives again"});
    expect_words(fault_of_body("mov.u32 %r1, %r0;\nbar.sync %r1, 64;"), {"name different barriers"});
    expect_words(fault_of_body("bar.arrive 1, 64;"), {"block ends", "barrier 1", "32 of 64"});
}

TEST(Faults, TrapsEndsAndWrongBranches) {
    expect_words(fault_of_body("trap;"), {"trap", "PTX line"});
    expect_words(fault_of_body("setp.eq.u32 %p1, %r0, 5;\n@%p1 bra.uni A;\nA: mov.u32 %r1, 1;"), {"bra.uni"});
    expect_words(fault_of_body("bra A;\nmov.u32 %r1, 2;\nA:\n@%p1 mov.u32 %r1, 1;"),
                 {"reads %p1, which it has not written"});
    expect_words(fault_of_body("frobnicate.u32 %r1, %r0;"), {"not done", "frobnicate.u32", "PTX line"});
    expect_words(fault_of_body("add.rn.u32 %r1, %r0, %r0;"), {"not done", "add.rn.u32"});
}

TEST(Faults, RegistersThatThisLaneDidNotWrite) {
    expect_words(fault_of_body("setp.lt.u32 %p1, %r0, 7;\n@%p1 mov.u32 %r1, 3;\nadd.u32 %r2, %r1, 1;"),
                 {"lane 7 reads %r1"});
    expect_words(fault_of_body("mov.u32 %r3, %r2;\nmov.u32 %r1, %r3;\nmov.b64 %rd8, {%r0, %r3};\nadd.u32 %r1, %r1, 1;"),
                 {"lane 0 reads %r1", "add.u32"});
    run_threads("setp.lt.u32 %p1, %r0, 7;\n@%p1 mov.u32 %r1, 3;\n@%p1 add.u32 %r1, %r1, 1;\n@!%p1 mov.u32 %r1, 9;");
}

TEST(Faults, Launches) {
    Device device;
    device.block = {2000, 1, 1};
    EXPECT_FAULT(device.run(kernel_text(0, ""), {}), "more than 1024");
    device.block = {32, 1, 1};
    EXPECT_FAULT(device.run(kernel_text(2, ""), {1}), "bytes of parameters");
}

TEST(Settings, FromTheEnvironment) {
    ::setenv("HEADRACE_PTX_ORDER", "random", 1);
    ::setenv("HEADRACE_PTX_SEED", "77", 1);
    ::setenv("HEADRACE_PTX_MMA", "truncated", 1);
    ::setenv("HEADRACE_PTX_RACES", "0", 1);
    ::setenv("HEADRACE_PTX_SHARE", "0.25", 1);
    const Settings settings = settings_from_environment();
    EXPECT_EQ(settings.order, Order::random);
    EXPECT_EQ(settings.seed, 77u);
    EXPECT_EQ(settings.mma, MmaArithmetic::truncated);
    EXPECT_FALSE(settings.races);
    EXPECT_EQ(settings.share, 0.25);
    for (const char* share : {"0", "1.5", "0.5", "quarter", "nan"}) {
        ::setenv("HEADRACE_PTX_SHARE", share, 1);
        EXPECT_FAULT(settings_from_environment(), "is neither 1 nor above 0 and at most 0.25");
    }
    ::unsetenv("HEADRACE_PTX_SHARE");
    ::setenv("HEADRACE_PTX_SEED", "7x", 1);
    EXPECT_FAULT(settings_from_environment(), "HEADRACE_PTX_SEED=7x");
    ::setenv("HEADRACE_PTX_SEED", "", 1);
    ::setenv("HEADRACE_PTX_ORDER", "sideways", 1);
    EXPECT_FAULT(settings_from_environment(), "HEADRACE_PTX_ORDER=sideways");
    for (const char* name : {"ORDER", "SEED", "MMA", "RACES"})
        ::unsetenv((std::string("HEADRACE_PTX_") + name).c_str());
    EXPECT_EQ(settings_from_environment().order, Order::ascending);
}

}  // namespace
}  // namespace headrace::ptx
