# HEADRACE_CUDA=AUTO|ON|OFF: finds nvcc, which needs no GPU, and defines headrace_compile_cuda(target) for what it compiles.
#
# AUTO builds the CUDA backend where nvcc is found, ON requires it. The fat binary holds code for CMAKE_CUDA_ARCHITECTURES: Ampere,
# Hopper, Blackwell, and PTX for what comes between and after. HEADRACE_CUDA_PLAIN_PTX leaves PTX of compute_80 alone, uncompressed,
# for programs that read it (tests/ptx). CMAKE_CUDA_RUNTIME_LIBRARY is Static, or Shared for a runtime that is found at run time.
set(HEADRACE_CUDA OFF CACHE STRING "Build the CUDA backend in src/cuda: AUTO where nvcc is found, ON, OFF")
set_property(CACHE HEADRACE_CUDA PROPERTY STRINGS AUTO ON OFF)
option(HEADRACE_CUDA_PLAIN_PTX "Leave uncompressed PTX of compute_80 in place of code for GPUs" OFF)

set(headrace_cuda OFF)
if(HEADRACE_CUDA)
    include(CheckLanguage)
    find_program(CMAKE_CUDA_COMPILER nvcc HINTS ENV CUDACXX PATHS /usr/local/cuda/bin)
    if(CMAKE_CUDA_COMPILER)
        set(headrace_cuda ON)
    elseif(NOT HEADRACE_CUDA STREQUAL "AUTO")
        message(FATAL_ERROR "HEADRACE_CUDA is ON, but no nvcc was found: set CMAKE_CUDA_COMPILER, or HEADRACE_CUDA to OFF")
    endif()
endif()
if(NOT headrace_cuda)
    return()
endif()

if(HEADRACE_CUDA_PLAIN_PTX)
    set(CMAKE_CUDA_ARCHITECTURES 80-virtual)
elseif(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 100-real 80-virtual)
endif()
if(NOT CMAKE_CUDA_RUNTIME_LIBRARY)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
endif()
enable_language(CUDA)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 knows none for nvcc
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit REQUIRED QUIET)
set(HEADRACE_CUDART CUDA::cudart_static)
if(CMAKE_CUDA_RUNTIME_LIBRARY STREQUAL "Shared")
    set(HEADRACE_CUDART CUDA::cudart)
endif()
message(STATUS "CUDA backend: ${CMAKE_CUDA_COMPILER} for ${CMAKE_CUDA_ARCHITECTURES}")

# Options of everything that nvcc compiles.
function(headrace_compile_cuda target)
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    if(HEADRACE_CUDA_PLAIN_PTX)
        target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--no-compress>)
    endif()
endfunction()
