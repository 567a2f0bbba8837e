# HEADRACE_CUDA=AUTO|ON|OFF: finds nvcc, which needs no GPU; headrace_compile_cuda(target) for what it compiles.
#
# AUTO builds the CUDA backend where nvcc is found, ON requires it: the program CMAKE_CUDA_COMPILER or CUDACXX, or below
# CUDAToolkit_ROOT, CUDA_HOME or CUDA_PATH, in PATH, in /usr/local/cuda. The packages of PyPI will do (scripts/nvcc.sh).
# The fat binary holds code for CMAKE_CUDA_ARCHITECTURES: Ampere, Hopper, Blackwell, and PTX for what comes between and
# after. HEADRACE_CUDA_PLAIN_PTX leaves PTX of compute_80 alone, uncompressed, for programs that read it (tests/ptx).
# CMAKE_CUDA_RUNTIME_LIBRARY is Static, or Shared for a runtime that is found at run time.
set(HEADRACE_CUDA OFF CACHE STRING "Build the CUDA backend in src/cuda: AUTO where nvcc is found, ON, OFF")
set_property(CACHE HEADRACE_CUDA PROPERTY STRINGS AUTO ON OFF)
option(HEADRACE_CUDA_PLAIN_PTX "Leave uncompressed PTX of compute_80 in place of code for GPUs" OFF)

set(headrace_cuda OFF)
if(HEADRACE_CUDA)
    if(NOT CMAKE_CUDA_COMPILER AND NOT "$ENV{CUDACXX}" STREQUAL "")
        set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
    endif()
    find_program(CMAKE_CUDA_COMPILER nvcc
        HINTS "${CUDAToolkit_ROOT}" ENV CUDAToolkit_ROOT ENV CUDA_HOME ENV CUDA_PATH
        PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(CMAKE_CUDA_COMPILER)
        set(headrace_cuda ON)
    elseif(HEADRACE_CUDA STREQUAL "AUTO")
        message(STATUS "CUDA backend: none, no nvcc found (HEADRACE_CUDA=ON says what to do)")
    else()
        message(FATAL_ERROR "HEADRACE_CUDA is ON, but no nvcc was found. "
            "Name it with -DCMAKE_CUDA_COMPILER=FOLDER/bin/nvcc, "
            "install one by `bash scripts/nvcc.sh`, which needs no GPU, or build without: -DHEADRACE_CUDA=OFF")
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

# The packages of PyPI have neither lib64, where nvcc looks for libraries, nor libcudart.so, where CMake does.
get_filename_component(cuda_root "${CMAKE_CUDA_COMPILER}" REALPATH)
get_filename_component(cuda_root "${cuda_root}/../.." ABSOLUTE)
if(EXISTS "${cuda_root}/lib/libcudart_static.a" AND NOT EXISTS "${cuda_root}/lib64")
    string(APPEND CMAKE_CUDA_FLAGS " -L${cuda_root}/lib")
    file(GLOB cudart "${cuda_root}/lib/libcudart.so*")
    if(cudart)
        list(GET cudart 0 cudart)
        set(CUDA_CUDART "${cudart}" CACHE FILEPATH "The CUDA runtime as a shared library")
        set(CUDA_cudart_LIBRARY "${cudart}" CACHE FILEPATH "The same, as CUDA::cudart")
    endif()
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
