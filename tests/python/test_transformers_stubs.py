"""headrace.integrations.transformers where other packages are importable: on a CPU nothing of theirs is called."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_transformers import assert_same
from transformers_runs import MODELS, net_of, run

# package: (its distribution, version, what its modules define), as far as models of transformers ask for it
STUBS = {
    "causal_conv1d": ("causal-conv1d", "1.6.0", {"": ["causal_conv1d_fn", "causal_conv1d_update"]}),
    "fla": ("flash-linear-attention", "0.6.0", {
        "": [], "ops": [], "modules": ["FusedRMSNormGated", "ShortConvolution"],
        "ops.gated_delta_rule": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"],
        "ops.kda": ["chunk_kda", "fused_recurrent_kda"]}),
    "mamba_ssm": ("mamba-ssm", "2.3.0", {"": ["selective_scan_fn"]}),
    "triton": ("triton", "3.6.0", {"": ["jit", "autotune"], "language": ["load"]}),
}
STUB = '''
def {name}(*args, **kwargs):
    raise RuntimeError("{package}: {name} was called")
'''


def install_stubs(folder):
    for package, (distribution, version, modules) in STUBS.items():
        for module, names in modules.items():
            place = folder.joinpath(package, *module.split("."))
            place.mkdir(parents=True, exist_ok=True)
            text = "".join(STUB.format(package=package, name=name) for name in names)
            (place / "__init__.py").write_text(f'__version__ = "{version}"\n' + text)
        metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (metadata / "top_level.txt").write_text(f"{package}\n")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stubs")
    install_stubs(folder)
    program = Path(__file__).with_name("transformers_runs.py")
    subprocess.run([sys.executable, program, folder, folder / "results.pt"], check=True)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("name", MODELS)
def test_nothing_of_a_served_type_is_bound_to_other_packages(results, name):
    bound = {path.split(".")[1] for path in results[name]["without"]}
    assert len(bound) == 4 and {"causal_conv1d_fn", "causal_conv1d_update"} < bound  # so the stubs are in the way
    assert results[name]["with"] == []  # in the modules of its parts, a model that was there before, a later one
    assert results[name]["changed"] == []  # after disable()


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_what_their_plain_functions_compute(results, name):
    assert "error" not in results[name], results[name]["error"]
    expected = run(net_of(name))
    for actual in (results[name]["existing"], results[name]["later"]):
        assert_same(actual.pop("training"), expected["training"])
        assert actual.keys() | {"training"} == expected.keys()
        assert torch.equal(actual["generation"][0], expected["generation"][0])
        for kind, values in actual.items():
            torch.testing.assert_close(values, expected[kind], rtol=1e-4, atol=1e-4, msg=lambda text: f"{kind}: {text}")
