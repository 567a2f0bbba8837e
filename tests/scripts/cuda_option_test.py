"""HEADRACE_CUDA in each of its values with each kind of nvcc, of which none, old and broken ones are made up.

usage: cuda_option_test.py SOURCE_FOLDER CMAKE
"""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE, CMAKE = Path(sys.argv[1]), sys.argv[2]

# cmake/cuda.cmake as a project includes it, up to where nvcc is handed to CMake.
PROJECT = f"""
cmake_minimum_required(VERSION 3.22)
macro(enable_language)
endmacro()
macro(find_package)
endmacro()
include({SOURCE}/cmake/cuda.cmake)
message(STATUS "headrace_cuda=${{headrace_cuda}}")
"""

# Says its release, and compiles or not.
PROGRAM = """#!/bin/sh
if [ "$1" = --version ]; then {version}; exit; fi
{compiles}
"""
SAYS = "echo 'Cuda compilation tools, release {0}, V{0}.88'"


class CudaOption(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "project.cmake").write_text(PROJECT)

    def nvcc(self, release, compiles="exit 0", version=None):
        program = self.folder / "bin" / "nvcc"
        program.parent.mkdir(exist_ok=True)
        program.write_text(PROGRAM.format(version=version or SAYS.format(release), compiles=compiles))
        program.chmod(0o755)
        return program

    def configure(self, value, nvcc, *more):
        """(whether it went well, what was said); nvcc: the program, or None: there is none."""
        found = [f"-DCMAKE_CUDA_COMPILER={nvcc}"]
        if nvcc is None:  # nothing of this machine is found
            found = [f"-DCMAKE_FIND_ROOT_PATH={self.folder}/none", "-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=ONLY"]
        value = [] if value is None else [f"-DHEADRACE_CUDA={value}"]
        environment = {name: x for name, x in os.environ.items() if not name.startswith(("CUDA", "HEADRACE"))}
        done = subprocess.run([CMAKE, *value, *found, *more, "-P", "project.cmake"], cwd=self.folder, env=environment,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode == 0, " ".join(done.stdout.split())

    def expect(self, value, nvcc, words, *more, on=False):
        went_well, said = self.configure(value, nvcc, *more)
        self.assertTrue(went_well, said)
        self.assertIn(words, said)
        self.assertIn(f"headrace_cuda={'ON' if on else 'OFF'}", said)

    def expect_error(self, nvcc, words):
        went_well, said = self.configure("ON", nvcc)
        self.assertFalse(went_well, said)
        self.assertIn(f"HEADRACE_CUDA is ON, but {words}", said)
        self.assertIn("-DHEADRACE_CUDA=OFF", said)

    def test_nvcc_that_works(self):
        nvcc = self.nvcc("13.0")
        for value in (None, "AUTO", "ON"):
            self.expect(value, nvcc, f"CUDA backend: {nvcc} of release 13.0, for 80-real;90a-real;100-real;80-virtual",
                        on=True)
        self.expect("OFF", nvcc, "CUDA backend: none, HEADRACE_CUDA is OFF")

    def test_architectures_are_those_that_nvcc_knows(self):
        self.expect("AUTO", self.nvcc("12.4"), "for 80-real;90a-real;80-virtual", on=True)
        self.expect("AUTO", self.nvcc("12.8"), "for 80-real;90a-real;100-real;80-virtual", on=True)
        self.expect("AUTO", self.nvcc("12.4"), "for 86", "-DCMAKE_CUDA_ARCHITECTURES=86", on=True)

    def test_no_nvcc(self):
        for value in (None, "AUTO"):
            self.expect(value, None, "CUDA backend: none, no nvcc was found")
        self.expect_error(None, "no nvcc was found")

    def test_old_nvcc(self):
        nvcc = self.nvcc("11.8")
        words = f"{nvcc} is of release 11.8, 12 or later is needed"
        self.expect("AUTO", nvcc, f"CUDA backend: none, {words}")
        self.expect_error(nvcc, words)

    def test_nvcc_that_does_not_run(self):
        for nvcc in (self.nvcc(None, version="exit 1"), self.nvcc(None, version="echo clang version 14"),
                     self.folder / "gone"):
            words = f"{nvcc} is no nvcc that runs"
            self.expect("AUTO", nvcc, f"CUDA backend: none, {words}")
            self.expect_error(nvcc, words)

    def test_nvcc_that_does_not_compile(self):
        nvcc = self.nvcc("13.0", compiles="echo 'error: unsupported GNU version!' >&2; exit 1")
        words = f"{nvcc} does not compile an empty kernel: error: unsupported GNU version!"
        self.expect("AUTO", nvcc, f"CUDA backend: none, {words}")
        self.expect_error(nvcc, words)

    def test_nvcc_is_given_the_host_compiler_and_flags(self):
        nvcc = self.nvcc("13.0", compiles='case "$*" in *"-O1 -ccbin=/bin/c++"*) exit 0; esac; exit 1')
        options = ["-DCMAKE_CUDA_HOST_COMPILER=/bin/c++", "-DCMAKE_CUDA_FLAGS=-O1"]
        self.expect("AUTO", nvcc, f"CUDA backend: {nvcc}", *options, on=True)
        self.expect("AUTO", nvcc, "CUDA backend: none", *options[:1])

    def test_builds_that_nvcc_cannot_make(self):
        nvcc = self.nvcc("13.0")
        self.expect("AUTO", nvcc, "CUDA backend: none, the build is for another machine", "-DCMAKE_CROSSCOMPILING=ON")
        self.expect("AUTO", nvcc, "CUDA backend: none, nvcc has no sanitizers", "-DHEADRACE_SANITIZE=address")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
