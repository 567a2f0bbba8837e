"""What is installed: signatures, types and docstrings, metadata, and what an import says where something is missing."""

import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
import headrace.jax
import headrace.numpy
import headrace.torch

ROOT = Path(__file__).parents[2]

# The interface of flash-linear-attention that headrace.torch offers: what may follow is ours, and has a default.
INTERFACE = """
chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None)
fused_recurrent_gla(q, k, v, gk=None, gv=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None)
chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_size=64)
fused_chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None)
fused_recurrent_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
    reverse=False, state_v_first=False, cu_seqlens=None)
chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, use_gate_in_kernel=False, A_log=None,
    dt_bias=None, chunk_size=64)
fused_recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None)
chunk_comba(q, k, v, p, g, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None)
fused_recurrent_comba(q, k, p, v, g, beta=None)
chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, A_log=None, dt_bias=None, chunk_size=64)
fused_recurrent_kda(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, lower_bound=None, state_v_first=False, cu_seqlens=None)
chunk_delta_rule(q, k, v, beta)
"""
SIGNATURES = re.findall(r"(\w+)\(([^)]*)\)", INTERFACE)

PUBLIC = [(module, name) for module in (headrace.torch, headrace.jax) for name in module.__all__]
PUBLIC = [pair for pair in PUBLIC if inspect.isfunction(getattr(*pair))]
PUBLIC += [(headrace.numpy, name) for name in ("forward", "backward", "step")]


@pytest.mark.parametrize("name, expected", SIGNATURES, ids=lambda x: x if "," not in x else "")
def test_signatures_are_those_of_the_interface(name, expected):
    parameters = list(inspect.signature(getattr(headrace.torch, name)).parameters.values())
    actual = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    expected = re.split(r",\s+", expected)
    assert actual[: len(expected)] == expected
    assert all(p.default is not p.empty for p in parameters[len(expected) :])


def test_other_names_of_the_interface():
    assert len(SIGNATURES) == 12
    for module in (headrace.torch, headrace.jax):
        assert module.chunk_gdn is module.chunk_gated_delta_rule
        assert module.fused_recurrent_gdn is module.fused_recurrent_gated_delta_rule
        for name in ("retention", "lightning_attn", "delta_rule"):
            assert callable(getattr(module, f"chunk_{name}")) and callable(getattr(module, f"fused_recurrent_{name}"))


def test_jax_has_the_functions_of_torch():
    names = [name for name in headrace.torch.__all__ if name.startswith(("chunk_", "fused_"))]
    assert sorted(names + ["attention", "step", "rms_norm_gated", "short_convolution"]) == sorted(headrace.jax.__all__)


def test_jax_has_the_parameters_of_torch():
    """In their order; what means nothing there is missing, and chunk_size is None by default."""
    missing = {"cu_seqlens_cpu", "chunk_indices", "cp_context", "safe_gate", "disable_recompute",
               "return_intermediate_states", "transpose_state_layout", "ssm_state_indices", "inplace_final_state",
               "num_accepted_tokens", "out", "use_graph", "max_num_seqs"}
    for name in headrace.jax.__all__:
        if name not in ("attention", "step"):
            theirs, mine = (inspect.signature(getattr(m, name)).parameters for m in (headrace.torch, headrace.jax))
            assert list(mine) == [p for p in theirs if p not in missing], name
            assert all(mine[p].kind is theirs[p].kind for p in mine), name
            assert all(mine[p].default == theirs[p].default for p in mine if p != "chunk_size"), name


@pytest.mark.parametrize("module, name", PUBLIC, ids=lambda x: getattr(x, "__name__", x))
def test_functions_are_documented_and_typed(module, name):
    function = getattr(module, name)
    text = inspect.getdoc(function)
    assert len(text.split("\n\n")[0]) > 10
    is_operator = name.startswith(("chunk_", "fused_")) or name in ("attention", "forward", "backward", "step")
    for word in ("Shapes:", "ValueError", "docs/math.md") if is_operator else ():
        assert text.count(word) == 1, word
    signature = inspect.signature(function)
    assert signature.return_annotation is not signature.empty
    assert all(p.annotation is not p.empty for p in signature.parameters.values())


def test_versions_agree():
    version = importlib.metadata.version("headrace")
    assert headrace.__version__ == headrace._core.version() == version
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    assert f"project(headrace VERSION {version} " in (ROOT / "CMakeLists.txt").read_text()


def test_installed_files():
    """The source files of the package, its extension with the types, the licence; nothing else."""
    files = importlib.metadata.files("headrace")
    assert any(re.search(r"dist-info/.*LICENSE$", str(file)) for file in files)
    source = ROOT / "python"
    actual, expected = ({str(path) for path in paths if path.parts[0] == "headrace" and "__pycache__" not in path.parts}
                        for paths in (files, (file.relative_to(source) for file in source.rglob("*.*"))))
    extension = {name for name in actual if re.fullmatch(r"headrace/_core\.[^/]*\.so", name)}
    assert len(extension) == 1 and "headrace/py.typed" in expected
    assert actual == expected | extension | {"headrace/_core.pyi"}
    assert all(re.match(r"headrace(-[^/]*dist-info)?/", str(file)) for file in files)


def test_metadata():
    metadata = importlib.metadata.metadata("headrace")
    assert metadata["License-Expression"] == "MIT" and metadata["Description-Content-Type"] == "text/markdown"
    assert set(metadata.get_all("Provides-Extra")) == {"torch", "jax", "transformers", "bench"}
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


FAKE = "import sys, types; sys.modules[{name!r}] = {module}; import {front}"


@pytest.mark.parametrize("framework, oldest, too_old", [("torch", "2.6", ["2.5.1+cu121", "1.13.0a0+git1"]),
                                                        ("jax", "0.10", ["0.9.2", "0.4.38"])])
def test_an_import_says_which_framework_it_expects(framework, oldest, too_old):
    needed = [line for line in importlib.metadata.requires("headrace") if line.startswith(framework + ">")]
    assert needed and all(f"{framework}>={oldest};" in line for line in needed)
    expected = f"ImportError: headrace.{framework}: expected {framework} {oldest} or newer"
    missing = run(FAKE.format(name=framework, module=None, front=f"headrace.{framework}"))
    assert missing.stderr.endswith(f"{expected}, found none: pip install 'headrace[{framework}]'\n")
    for version in too_old:
        module = f"types.SimpleNamespace(__version__={version!r})"
        old = run(FAKE.format(name=framework, module=module, front=f"headrace.{framework}"))
        assert old.stderr.endswith(f"{expected}, got {version}\n"), old.stderr


def test_an_import_refuses_another_core():
    module = "types.SimpleNamespace(version=lambda: '0.0.9', implementations=None)"
    assert "expected version 0.1.0 as that of the package, got 0.0.9" in \
        run(FAKE.format(name="headrace._core", module=module, front="headrace")).stderr


def test_numpy_needs_no_framework():
    result = run("import sys; sys.modules |= dict.fromkeys(('torch', 'jax', 'transformers', 'fla'))\n"
                 "import numpy, headrace.numpy as hn; x = numpy.ones((1, 2, 1, 4))\n"
                 "print(hn.forward('delta_rule', x, x / 2, x)[0].sum())")
    assert result.returncode == 0 and float(result.stdout) > 0, result.stderr
