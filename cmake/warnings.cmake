# headrace_warnings: the warnings that every target of ours is built with, clean in g++ and clang.
add_library(headrace_warnings INTERFACE)
target_compile_options(headrace_warnings INTERFACE -Wall -Wextra -Wpedantic -Wshadow)
if(HEADRACE_WERROR)
    target_compile_options(headrace_warnings INTERFACE -Werror)
endif()
# g++ 12 sees overlapping copies inside std::string where there are none (its bug 105651, mended in 13).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(headrace_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
