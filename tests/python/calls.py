"""Right calls of every function of headrace.torch, headrace.jax and headrace.numpy: for tests of whole classes.

A parameter or a function that stands in none of the tables here is a KeyError: who adds one says how it is called.
"""

import inspect
from dataclasses import dataclass, field

import torch
from recurrence import recurrence

import headrace.jax as hj
import headrace.numpy as hn
import headrace.torch as ht
from headrace._arguments import INPUTS, OPTIONS

B, T, H, HV, K, V = 1, 19, 2, 4, 16, 8
RAGGED = [0, 7, 7, 19]
NAMES = [name for name in ht.__all__ if name.startswith(("chunk_", "fused_"))]
AROUND = ("rms_norm_gated", "short_convolution")  # of headrace.jax: test_jax_layers.py
FUNCTIONS = [getattr(ht, name) for name in NAMES] + [getattr(hj, name) for name in hj.__all__ if name not in AROUND] + \
            [function for _, function in inspect.getmembers(hn, inspect.isfunction)
             if function.__module__ == hn.__name__ and not function.__name__.startswith("_")
             and function is not hn.bind]
_OPERATORS = {"gla": "gla", "simple_gla": "simple_gla", "retention": "retention", "lightning_attn": "retention",
              "delta_rule": "delta_rule", "gated_delta_rule": "gated_delta_rule", "gdn": "gated_delta_rule",
              "comba": "comba", "kda": "kda"}
_BY_NAME = ("attention", "step", "forward", "backward")  # functions that take the name of an operator


def front(function):
    return function.__module__.split(".")[1]


def identifier(function):
    return f"{front(function)}.{function.__name__}"


def operators(function):
    """The operators that the function computes."""
    name = function.__name__
    if name in _BY_NAME:
        return ("simple_gla", "gla", "gated_delta_rule", "comba", "kda")
    return (_OPERATORS[name.removeprefix("fused_").removeprefix("chunk_").removeprefix("recurrent_")],)


def parameters(function):
    """The names that a call may give: for NumPy those of the library's inputs and options, too."""
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return [*dict.fromkeys(names + ([*INPUTS, *OPTIONS] if front(function) == "numpy" else []))]


@dataclass
class Call:
    """A call: tensors and options by the names of parameters; `oracle`: options of the recurrence."""

    op: str
    tensors: dict
    options: dict
    oracle: dict = field(default_factory=dict)

    def expected(self, tensors):
        """(o, final state) of the recurrence on the call's tensors, or on copies of them."""
        t = {n: x for n, x in tensors.items() if n in INPUTS}
        op = self.op
        if "gk" in tensors:
            op = "kda" if self.op == "gated_delta_rule" else op
            t["g"] = tensors["gk"] if "g" not in t else tensors["gk"] + tensors["g"].unsqueeze(-1)
        if self.v_first and "initial_state" in t:
            t["initial_state"] = t["initial_state"].mT
        if self.oracle.get("gate") == "bounded":
            t.setdefault("A_log", torch.zeros(HV, dtype=torch.float64))
        o, state = recurrence(op, **t, **self.oracle)
        return o, state.mT if self.v_first else state

    @property
    def v_first(self):
        return bool(self.options.get("state_v_first") or self.options.get("transpose_state_layout"))


def _normal(draw, *sizes):
    return torch.randn(*sizes, generator=draw, dtype=torch.float64)


def _log_decays(draw, *sizes):
    return torch.nn.functional.logsigmoid(_normal(draw, *sizes) + 2)


def plain_call(function, op, seed=0):
    """The call with every tensor that the function needs, an initial state and the final one."""
    draw = torch.Generator().manual_seed(seed)
    taken = parameters(function)
    unit = torch.nn.functional.normalize
    channels = op in ("gla", "kda")
    tensors = {"q": _normal(draw, B, T, H, K), "k": unit(_normal(draw, B, T, H, K), dim=-1),
               "v": _normal(draw, B, T, HV, V)}
    if op == "comba":
        tensors["p"] = unit(_normal(draw, B, T, H, K), dim=-1)
    if op not in ("retention", "delta_rule"):
        g = _log_decays(draw, B, T, HV, *([K] if channels else []))
        tensors["gk" if channels and "g" not in taken else "g"] = g
    if op in ("delta_rule", "gated_delta_rule", "comba", "kda"):
        tensors["beta"] = torch.sigmoid(_normal(draw, B, T, HV))
    tensors["initial_state"] = _normal(draw, B, HV, K, V)
    call = Call(op, tensors, {}, {})
    if "output_final_state" in taken:
        call.options["output_final_state"] = True
    heads = torch.arange(HV, dtype=torch.float64)
    if function.__name__.endswith("retention"):
        call.oracle["g_gamma"] = torch.log1p(-(2.0 ** (-5 - heads)))
    if "lightning" in function.__name__:
        call.options |= {"layer_idx": 3, "num_layers": 20}
        call.oracle["g_gamma"] = -8 / HV * (1 - 3 / 20) * heads
    return call


def _gate(call, draw, lower_bound=None, dt_bias=False, A_log=True):
    name = "gk" if "gk" in call.tensors else "g"
    if name not in call.tensors:
        return
    call.tensors[name] = _normal(draw, *call.tensors[name].shape)
    if A_log:
        call.tensors["A_log"] = _normal(draw, HV)
    if dt_bias:
        call.tensors["dt_bias"] = _normal(draw, HV * K if call.tensors[name].dim() == 4 else HV)
    call.options |= {"use_gate_in_kernel": True}
    call.oracle |= {"gate": "softplus"}
    if lower_bound is not None:
        call.options |= {"lower_bound": lower_bound}
        call.oracle |= {"gate": "bounded", "lower_bound": lower_bound}


def _beta(call, draw, form):
    if "beta" in call.tensors:
        call.tensors["beta"] = _normal(draw, *call.tensors["beta"].shape)
        call.options |= {"use_beta_sigmoid_in_kernel": True}
        call.options |= {"allow_neg_eigval": True} if form == "two_sigmoid" else {}
        call.oracle |= {"beta_is": form}


def _l2norm(call, draw):
    call.tensors["k"] = call.tensors["k"] * 3
    call.options |= {"use_qk_l2norm_in_kernel": True}
    call.oracle |= {"qk_l2norm": True}


def _ragged(call, draw, cpu=False):
    call.tensors |= {"cu_seqlens": torch.tensor(RAGGED)} | ({"cu_seqlens_cpu": torch.tensor(RAGGED)} if cpu else {})
    if "initial_state" in call.tensors:
        call.tensors["initial_state"] = _normal(draw, len(RAGGED) - 1, HV, K, V)


def _turned(call, draw, name):
    call.tensors["initial_state"] = call.tensors["initial_state"].mT.contiguous()
    call.options[name] = True


def _gk(call, draw):
    if "gk" not in call.tensors:
        call.tensors["gk"] = _log_decays(draw, B, T, HV, K)


def _option(name, value, **oracle):
    def change(call, draw):
        call.options[name] = value
        call.oracle |= oracle
    return change


def _tensor(name, make):
    def change(call, draw):
        call.tensors[name] = make(draw)
    return change


def _nothing(call, draw):
    pass


# parameter: what it changes in the plain call, where no number is one that float32 holds
CHANGES = {
    **dict.fromkeys(("q", "k", "v", "p", "g", "beta", "initial_state", "output_final_state", "layer_idx", "num_layers"),
                    _nothing),
    "g_gamma": _tensor("g_gamma", lambda draw: -torch.rand(HV, generator=draw, dtype=torch.float64)),
    "gv": _tensor("gv", lambda draw: -torch.rand(B, T, HV, V, generator=draw, dtype=torch.float64)),
    "gk": _gk,
    "scale": _option("scale", 0.3, scale=0.3),
    "reverse": _option("reverse", True, reverse=True),
    "use_qk_l2norm_in_kernel": _l2norm,
    "use_gate_in_kernel": lambda call, draw: _gate(call, draw),
    "A_log": lambda call, draw: _gate(call, draw),
    "dt_bias": lambda call, draw: _gate(call, draw, dt_bias=True),
    "lower_bound": lambda call, draw: _gate(call, draw, -4.3, dt_bias=True, A_log=False),
    "use_beta_sigmoid_in_kernel": lambda call, draw: _beta(call, draw, "sigmoid"),
    "allow_neg_eigval": lambda call, draw: _beta(call, draw, "two_sigmoid"),
    "cu_seqlens": _ragged,
    "cu_seqlens_cpu": lambda call, draw: _ragged(call, draw, cpu=True),
    "state_v_first": lambda call, draw: _turned(call, draw, "state_v_first"),
    "transpose_state_layout": lambda call, draw: _turned(call, draw, "transpose_state_layout"),
    "chunk_size": _option("chunk_size", 16),
    "chunk_indices": _option("chunk_indices", torch.tensor([0])),
    "safe_gate": _option("safe_gate", True),
    "disable_recompute": _option("disable_recompute", True),
    "use_graph": _option("use_graph", True),
    "max_num_seqs": _option("max_num_seqs", 4),
    "allow_positive_gates": _option("allow_positive_gates", True),
    "num_steps": _option("num_steps", 2),
    "threads": _option("threads", 1),
}
# Refused in any case; of other parts of a call than inputs and options; of a pool of states.
REFUSED = {"cp_context": object(), "return_intermediate_states": True}
ELSEWHERE = {"op", "final_state", "d_o", "d_final_state", "wanted", "states"}
POOL = {"ssm_state_indices", "inplace_final_state", "num_accepted_tokens", "out", "pool", "indices"}
# Other names of the same in functions that take the name of an operator.
SAME = {"qk_l2norm": "use_qk_l2norm_in_kernel", "gate_form": "use_gate_in_kernel",
        "beta_form": "use_beta_sigmoid_in_kernel", "chunk": "chunk_size"}


def is_taken(function, op, parameter):
    """Whether the function takes the parameter beside the operator."""
    needs = {"p": ("comba",), "beta": ("gated_delta_rule", "comba", "kda", "delta_rule")}
    return function.__name__ not in _BY_NAME or op in needs.get(parameter, (op,))


def changed_call(function, op, parameter):
    call = plain_call(function, op)
    CHANGES[SAME.get(parameter, parameter)](call, torch.Generator().manual_seed(1))
    return call


def options_by_name(options):
    """Options of the functions by operator names, from those of the named functions."""
    o = dict(options)
    result = {}
    if o.pop("use_gate_in_kernel", False):
        result["gate_form"] = "softplus" if o.get("lower_bound") is None else "bounded"
    if o.pop("use_beta_sigmoid_in_kernel", False):
        result["beta_form"] = "two_sigmoid" if o.pop("allow_neg_eigval", False) else "sigmoid"
    for mine, theirs in (("qk_l2norm", "use_qk_l2norm_in_kernel"), ("chunk", "chunk_size")):
        if theirs in o:
            result[mine] = o.pop(theirs)
    return o | result
