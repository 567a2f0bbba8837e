"""The layout of XLA's structures that the JAX handlers were compiled for, against the header of jaxlib."""

import shutil
import subprocess

import jax
import pytest

from headrace import _core


def test_layout_is_that_of_the_header(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler is not None, "no C compiler"
    layout = dict(_core.xla_layout())
    lines = "".join(f'    printf("%lld\\n", (long long)({expression}));\n' for expression in layout)
    source = tmp_path / "layout.c"
    source.write_text("#include <stddef.h>\n#include <stdio.h>\n#include <xla/ffi/api/c_api.h>\n"
                      f"int main(void) {{\n{lines}    return 0;\n}}\n")
    program = tmp_path / "layout"
    subprocess.run([compiler, "-I", jax.ffi.include_dir(), source, "-o", program], check=True)
    values = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    assert dict(zip(layout, map(int, values), strict=True)) == layout


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_handlers_are_those_that_are_registered(device):
    assert set(_core.xla_handlers(device)) == {"forward", "backward", "step", "agree", "summarize", "summarize_backward",
                                         "convolution_forward", "convolution_backward", "norm_forward",
                                         "norm_backward"}
