#!/usr/bin/env bash
# Installs a build into a fresh prefix, then builds and runs a program in C and one in C++ through CMake and pkg-config.
#
# usage: run.sh BUILD_FOLDER C_COMPILER CXX_COMPILER
set -euo pipefail

build=$1 c_compiler=$2 cxx_compiler=$3
here=$(cd "$(dirname "$0")" && pwd)
examples=$here/../../examples
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

cmake --install "$build" --prefix "$place/prefix" >"$place/install.log" || { cat "$place/install.log"; exit 1; }

for language in c cpp; do
    cmake -S "$here/$language" -B "$place/$language" -DCMAKE_PREFIX_PATH="$place/prefix" -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_C_COMPILER="$c_compiler" -DCMAKE_CXX_COMPILER="$cxx_compiler" -Wno-dev --no-warn-unused-cli
    cmake --build "$place/$language"
    echo "find_package, $language:"
    "$place/$language/consumer"
done

export PKG_CONFIG_PATH
PKG_CONFIG_PATH=$(dirname "$(find "$place/prefix" -name headrace.pc)")
headrace_pc() { pkg-config --static "$@" headrace; }
[ "$(headrace_pc --modversion)" = "0.1.0" ]
read -ra flags <<<"$(headrace_pc --cflags)"
read -ra libraries <<<"$(headrace_pc --libs)"
"$cxx_compiler" -std=c++20 "${flags[@]}" "$examples/quickstart.cpp" -o "$place/pkg_cpp" "${libraries[@]}"
"$c_compiler" -std=c11 "${flags[@]}" "$examples/quickstart.c" -o "$place/pkg_c" "${libraries[@]}" -lm
for program in pkg_cpp pkg_c; do
    echo "pkg-config, $program:"
    "$place/$program"
done
