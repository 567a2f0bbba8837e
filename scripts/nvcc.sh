#!/usr/bin/env bash
# Installs nvcc from PyPI into build/nvcc, without a GPU or root, and prints the options by which cmake takes it.
#
# usage: bash scripts/nvcc.sh [FOLDER]       as in: cmake --preset cuda $(bash scripts/nvcc.sh)
set -euo pipefail
cd "$(dirname "$0")/.."

# One release of the toolkit: nvcc, ptxas and cudafe++; the front end; the compiler's headers; headers and libraries of
# the runtime; cccl for nv/target, which cuda_fp16.h includes.
packages=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96
          nvidia-cuda-cccl==13.0.85)

folder=$(realpath -m "${1:-build/nvcc}")
nvcc=$folder/nvidia/cu13/bin/nvcc
installed=$folder/packages.txt
if [ "$(cat "$installed" 2>/dev/null)" != "${packages[*]}" ]; then
    rm -f "$installed"
    python3 -m pip install --quiet --no-deps --upgrade --target "$folder" "${packages[@]}" >&2
    echo "${packages[*]}" >"$installed"
fi
"$nvcc" --version >&2
echo "-DHEADRACE_CUDA=ON -DCMAKE_CUDA_COMPILER=$nvcc"
