# headrace_compile_lightly(target): for programs around the library, which takes their time. Their sources are mostly headers of
# GoogleTest, CLI11 and JSON; optimising what becomes of those is a third to a half of the compile time.
function(headrace_compile_lightly target)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1> $<$<CONFIG:Debug>:-O0>)
endfunction()
