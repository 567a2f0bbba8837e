# headrace_add_isa(name SOURCES ... [FLAGS ...] [DEFINITIONS ...]): compiles kernel files once more for one instruction set.
#
# Each call makes the object library headrace_isa_<name>, built with FLAGS and HEADRACE_ISA=<name>, and adds its objects
# to the library. All code of these files lies in a namespace named after the ISA: a template or inline function outside
# it would be merged by the linker with the baseline's copy (tests/scripts/check_symbols.sh looks for such symbols).
# -ffp-contract=fast: a multiply and an add become one FMA, which is both faster and more accurate here; where results must
# not depend on the compiler's choice, kernels call fma() (cpu/simd/vec.hpp).
# -fno-math-errno: sqrt becomes a single instruction. -fno-fast-math: exp needs its additions in the order they are written,
# and NaN and infinity, even in a build with -ffast-math.
# -Wno-maybe-uninitialized: g++ 12's own AVX-512 intrinsics set it off.
# -fno-sanitize=null: two thirds of the time that a kernel compiles under UBSan, and reads through null stop without it.
# -fno-sanitize=pointer-overflow: two thirds of the rest. The generic copy keeps the check for the same lines; avx512_bf16,
# which has lines of its own, keeps it too.
function(headrace_add_isa name)
    cmake_parse_arguments(isa "" "" "SOURCES;FLAGS;DEFINITIONS" ${ARGN})
    add_library(headrace_isa_${name} OBJECT ${isa_SOURCES})
    target_compile_definitions(headrace_isa_${name} PRIVATE HEADRACE_ISA=${name} ${isa_DEFINITIONS})
    target_compile_options(headrace_isa_${name} PRIVATE $<$<CONFIG:Release>:-O3> -fno-fast-math -ffp-contract=fast -fno-math-errno
                           $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized> ${isa_FLAGS})
    if(HEADRACE_SANITIZE)
        target_compile_options(headrace_isa_${name} PRIVATE -fno-sanitize=null)
        if(name MATCHES "^(avx2|avx512)$")
            target_compile_options(headrace_isa_${name} PRIVATE -fno-sanitize=pointer-overflow)
        endif()
    endif()
    set_target_properties(headrace_isa_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    target_include_directories(headrace_isa_${name} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
    target_link_libraries(headrace_isa_${name} PRIVATE headrace_warnings)
    target_sources(headrace PRIVATE $<TARGET_OBJECTS:headrace_isa_${name}>)
    set_property(GLOBAL APPEND PROPERTY HEADRACE_ISA_LIBRARIES headrace_isa_${name})
endfunction()
