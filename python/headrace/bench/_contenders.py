"""What takes part in a case: headrace by its faces for PyTorch and NumPy, two sweeps over the states, and the check."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

import headrace.numpy as hn
import headrace.torch as ht
from headrace._measuring import seconds_of
from headrace.bench._cases import Case

OURS, BOUND, BY_NUMPY, BY_C = "headrace", "headrace, bound", "headrace, NumPy", "headrace, C"
FACES = {OURS: "PyTorch", BOUND: "bound", BY_NUMPY: "NumPy", BY_C: "C"}
BOUND_PEERS = ("onnxruntime, LinearAttention", "onnxruntime, GatedDeltaNet")  # on memory that is named beforehand
SWEEPS = "two sweeps over the states"

Tensors = Dict[str, Tensor]


class Contender(NamedTuple):
    """`call` is what is timed; `outputs` gives o [B, T, H, D] and the states [B, H, D, D] that the last call left."""

    call: Callable[[], object]
    outputs: Callable[[], Tuple[Tensor, Tensor]]


Maker = Callable[[Case, Tensors], Optional[Contender]]  # None: it does not do such a case


class Latest:
    """A call whose result is kept, as that of a user's call would be."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.result: Any = None

    def __call__(self) -> None:
        self.result = self.call()

    def outputs(self) -> Tuple[Tensor, Tensor]:
        return self.result


def kept(call: Callable[[], Tuple[Tensor, Tensor]]) -> Contender:
    latest = Latest(call)
    return Contender(latest, latest.outputs)


def _torch_call(case: Case, t: Tensors) -> partial[Tuple[Tensor, Tensor]]:
    gate = "gk" if case.operator == "gla" and case.is_step else "g"
    more: Dict[str, Any] = {gate: t["g"], **{name: t[name] for name in ("beta", "A_log", "dt_bias") if name in t}}
    if case.is_bf16:
        more["use_qk_l2norm_in_kernel"] = True
    if case.is_raw:
        more |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    if case.is_step:
        step = getattr(ht, f"fused_recurrent_{case.operator}")
        return partial(step, t["q"], t["k"], t["v"], **more, initial_state=t["state"], inplace_final_state=True)
    if case.is_bf16:
        more["initial_state"] = t["state"]
    forward = getattr(ht, f"chunk_{case.operator}")
    return partial(forward, t["q"], t["k"], t["v"], **more, output_final_state=True)


def by_torch(case: Case, t: Tensors) -> Contender:
    """headrace.torch, its threads as many as PyTorch's."""
    return kept(_torch_call(case, t))


def bound(case: Case, t: Tensors) -> Contender:
    """The same as a bound call: tensors, results and options named beforehand."""
    call = _torch_call(case, t)
    again = ht.bind(call.func, *call.args, **call.keywords)
    return Contender(again, lambda: again.result)


def head_major(case: Case, t: Tensors) -> Optional[Contender]:
    """The same on tensors whose rows lie together by head."""
    if case.is_step or case.D > 64 or case.T < 1024:
        return None
    lie = {name: x if name == "state" else x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in t.items()}
    return by_torch(case, lie)


def _array(x: Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def by_numpy(case: Case, t: Tensors) -> Contender:
    """headrace.numpy."""
    a = {name: _array(x) for name, x in t.items()}
    state = a.pop("state")
    options: dict = {"threads": case.threads}
    if case.is_bf16:
        options["qk_l2norm"] = True
    if case.is_raw:
        options |= {"gate_form": "softplus", "beta_form": "sigmoid"}
    if case.is_step:
        latest = Latest(lambda: hn.step(case.operator, **a, pool=state, **options))
        return Contender(latest, lambda: (torch.tensor(latest.result.astype(np.float32)), t["state"]))
    if case.is_bf16:
        options["initial_state"] = state
    latest = Latest(lambda: hn.forward(case.operator, **a, final_state=True, **options))
    return Contender(latest, lambda: (torch.tensor(latest.result[0].astype(np.float32)),
                                      torch.tensor(latest.result[1].astype(np.float32))))


def sweeps(case: Case, t: Tensors) -> Optional[Contender]:
    """The floor of a step: one thread reads its share of the states and writes it, in place.

    States that no cache holds are swept by all threads at once, because they share the way to memory.
    """
    if not case.is_step:
        return None
    shares = [x.numpy() for x in t["state"].flatten().chunk(case.threads)]
    if t["state"].nbytes < 8 << 20:
        return Contender(lambda: np.negative(shares[0], shares[0]), lambda: (t["state"], t["state"]))
    pool = ThreadPoolExecutor(case.threads)
    return Contender(lambda: list(pool.map(np.negative, shares, shares)), lambda: (t["state"], t["state"]))


def difference(actual: Tuple[Tensor, Tensor], expected: Tuple[Tensor, Tensor]) -> float:
    """The largest difference over the largest value, of o and of the states."""
    worst = 0.0
    for name, x, y in zip(("o", "states"), actual, expected):
        if x.numel() != y.numel():
            raise ValueError(f"{name}: expected {list(y.shape)}, got {list(x.shape)}")
        x, y = x.reshape(y.shape).double(), y.double()
        worst = max(worst, float(((x - y).abs().max() / y.abs().max()).nan_to_num(float("inf"))))
    return worst


def copies(tensors: Tensors) -> Tensors:
    return {name: x.clone() for name, x in tensors.items()}


def admitted(
    case: Case, tensors: Tensors, makers: Dict[str, Maker], limit: float = math.inf,
) -> Tuple[Dict[str, Contender], Dict[str, str]]:
    """The contenders whose first call computes what headrace's does, by name; and why others are left out.

    One that needs more than `limit` seconds a call is left out, too.
    """
    bar = 0.03 if case.is_bf16 else 1e-3  # several roundings to bf16, at most 2^-8 each; sums of fp32 in other orders
    ours = by_torch(case, copies(tensors))
    ours.call()
    o, states = (x.clone() for x in ours.outputs())
    found, reasons = {OURS: ours}, {}
    for name, make in makers.items():
        try:
            contender = make(case, copies(tensors))
            if contender is None:
                continue
            seconds = seconds_of(contender.call)
            error = 0.0 if name == SWEEPS else difference(contender.outputs(), (o, states))
        except Exception as problem:  # of a peer, whose errors are its own
            reasons[name] = f"{type(problem).__name__}: {problem}".splitlines()[0][:120]
            continue
        if error > bar:
            reasons[name] = f"computes something else: differs by {error:.2g} of the largest value, expected {bar:g}"
        elif seconds > limit:
            reasons[name] = f"{seconds:.2g} s for its first call; --limit is {limit:g} s"
        else:
            found[name] = contender
    return found, reasons


MAKERS: Dict[str, Maker] = {BOUND: bound, BY_NUMPY: by_numpy, "headrace, head-major": head_major, SWEEPS: sweeps}


def is_peer(name: str) -> bool:
    return not name.startswith(OURS) and name != SWEEPS


def like(peer: str) -> str:
    """The face of headrace that is called as this peer is."""
    return BOUND if peer in BOUND_PEERS else OURS
