"""Models of transformers on headrace's operators: enable() replaces their plain PyTorch functions, disable() undoes it.

    from headrace.integrations.transformers import enable
    enable()                                   # every type of MODELS that the installed transformers has
    model = AutoModelForCausalLM.from_pretrained(...)

Prefill, decoding and training then run in the library, on the CPU and, where it is built with CUDA, on such devices;
tensors elsewhere keep the model's own functions. Models that exist already change too. Sequences packed in one row with
cu_seq_lens_q stay apart, which the plain functions do not do. `python -m headrace.integrations.transformers` measures
the gain.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import time
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from headrace import _core
from headrace._measuring import MEMORY, MEMORY_HELP, in_turns, keep_memory
from headrace._versions import require
from headrace.torch import chunk_gated_delta_rule, chunk_kda, short_convolution, short_convolution_step

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "kimi_linear", "bailing_hybrid",
          "glm5_next")

_originals: Dict[Tuple[ModuleType, str], Callable] = {}  # (module, name): the function that stood there


@functools.lru_cache(maxsize=None)
def _has_cuda() -> bool:
    return any(name.startswith("cuda.") for name in _core.implementations())


def _is_served(x: torch.Tensor) -> bool:
    """Whether the library computes where x lies."""
    return x.device.type == "cpu" or (x.device.type == "cuda" and _has_cuda())


def _offsets(arguments: Dict[str, Any]) -> Optional[torch.Tensor]:
    """Where the sequences of a packed row begin, None if there is one in each row."""
    offsets = arguments.get("cu_seqlens")
    if offsets is None:
        offsets = arguments.get("cu_seq_lens_q")  # some types pass it on under this name
    if offsets is None and arguments.get("seq_idx") is not None:
        raise ValueError("cu_seq_lens_q: expected beside seq_idx, to keep packed sequences apart, got None "
                         "(DataCollatorWithFlattening gives it with return_flash_attn_kwargs=True)")
    return offsets


def _operator(function: Callable, original: Callable) -> Callable:
    """`function` in place of `original`. What it has no parameter for is for other layers, as transformers takes it."""
    known = frozenset(inspect.signature(function).parameters)

    def replaced(query, key, value, g, beta, **arguments):
        if not _is_served(query):
            return original(query, key, value, g=g, beta=beta, **arguments)
        options = {name: x for name, x in arguments.items() if name in known and name != "cu_seqlens"}
        return function(query, key, value, g, beta, cu_seqlens=_offsets(arguments), **options)

    return replaced


def _convolved(x: torch.Tensor, activation: Optional[str], convolution: Callable) -> torch.Tensor:
    """activation(convolution of x), both [B, D, T]; `convolution` takes and gives [B, T, D] and knows "silu"."""
    from transformers.activations import ACT2FN

    fused = activation if activation in ("silu", "swish") else None
    y = convolution(x.transpose(1, 2), activation=fused).transpose(1, 2)
    return y if activation == fused else ACT2FN[activation](y)


def _convolution(original: Callable) -> Callable:
    """short_convolution in place of `original`."""

    def replaced(hidden_states, weight, bias=None, activation=None, **arguments):
        if not _is_served(hidden_states):
            return original(hidden_states, weight, bias, activation=activation, **arguments)
        return _convolved(hidden_states, activation, lambda x, activation: short_convolution(
            x, weight, bias, activation=activation, cu_seqlens=_offsets(arguments))[0])

    return replaced


def _convolution_of_a_token(original: Callable) -> Callable:
    """short_convolution_step in place of `original`: conv_state [B, D, S], the last S inputs, changes in place."""

    def replaced(hidden_states, conv_state, weight, bias=None, activation=None):
        if not _is_served(hidden_states):
            return original(hidden_states, conv_state, weight, bias, activation)
        tokens, kept = hidden_states.shape[-1], conv_state.shape[-1]
        tensors = (hidden_states, conv_state, weight, bias)
        differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        if tokens == 1 and kept == weight.shape[-1] and not differentiated:
            return _convolved(hidden_states, activation, lambda x, activation: short_convolution_step(
                x, conv_state, weight, bias, activation))
        if kept + 1 < weight.shape[-1]:
            raise ValueError(f"conv_state: expected at least {weight.shape[-1] - 1} inputs, got {kept}")
        joined = torch.cat([conv_state, hidden_states], dim=-1)  # the states of a cache that records may be longer
        conv_state.copy_(joined[..., tokens:])
        y = _convolved(joined, activation, lambda x, activation: short_convolution(
            x, weight, bias, activation=activation)[0])
        return y[..., kept:].to(hidden_states.dtype)

    return replaced


# What stands in place of each function of the models' modules, all of which transformers binds to causal_conv1d or
# flash-linear-attention where these can be imported, on whatever device.
_REPLACEMENTS: Dict[str, Callable[[Callable], Callable]] = {
    "torch_chunk_gated_delta_rule": functools.partial(_operator, chunk_gated_delta_rule),
    "torch_recurrent_gated_delta_rule": functools.partial(_operator, chunk_gated_delta_rule),
    "chunk_kimi_delta_attention": functools.partial(_operator, chunk_kda),
    "recurrent_kimi_delta_attention": functools.partial(_operator, chunk_kda),
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_of_a_token,
}
_OPERATORS = [name for name in _REPLACEMENTS if not name.startswith("causal_conv1d")]


def enable(models: Sequence[str] = MODELS) -> List[str]:
    """Replaces the functions of these model types; returns the types that the installed transformers has.

    models: names of folders in transformers.models. Raises ImportError without transformers 5.15 or newer, whose models
    look their functions up when they run, ValueError for a type without such functions, RuntimeError if none of MODELS
    is there.
    """
    require("headrace.integrations.transformers", "transformers")
    found = []
    for model in models:
        name = f"transformers.models.{model}.modeling_{model}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if models is MODELS and error.name and error.name.startswith("transformers.models."):
                continue  # an older transformers without this type
            raise
        if not any(hasattr(module, function) for function in _OPERATORS):
            raise ValueError(f"models: expected types with plain functions of these operators, got '{model}'")
        for function, replacement in _REPLACEMENTS.items():
            if hasattr(module, function) and (module, function) not in _originals:
                original = _originals[module, function] = getattr(module, function)
                setattr(module, function, replacement(original))
        found.append(model)
    if not found:
        raise RuntimeError(f"transformers: expected a version that has one of {', '.join(MODELS)}")
    return found


def disable() -> None:
    """Puts back what enable() replaced."""
    for (module, name), original in _originals.items():
        setattr(module, name, original)
    _originals.clear()


def tiny_model(model: str, hidden: int = 128, layers: int = 2, heads: int = 4, head_dim: int = 32) -> torch.nn.Module:
    """A small random language model of one of MODELS; its layers but the last are linear attention.

    In texts of up to 2048 tokens nothing in it chooses among experts or tokens, so that its outputs are continuous in
    those of its operators.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    configs: Any = CONFIG_MAPPING  # whose values are typed as their base class
    sizes: Dict[str, Any] = dict(  # each type reads its own of these
        vocab_size=256, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        layer_types=["linear_attention"] * (layers - 1) + ["full_attention"],
        num_attention_heads=4, num_key_value_heads=4, head_dim=hidden // 4, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
        # Gated delta rule, Kimi delta attention
        linear_num_value_heads=heads, linear_num_key_heads=heads // 2, linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim, linear_num_heads=heads, linear_head_dim=head_dim,
        # Full attention of latent keys and values, and of chosen tokens
        q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, indexer_n_heads=2,
        indexer_kv_heads=1, indexer_head_dim=hidden // 4, indexer_budget=2048, indexer_compress_ratio=16, hc_lowrank=16,
        # Experts, where a type has no plain layers
        mlp_only_layers=list(range(layers)), mlp_layer_types=["dense"] * layers, num_experts=2, num_experts_per_tok=2,
        moe_intermediate_size=hidden, shared_expert_intermediate_size=hidden)
    if model == "bailing_hybrid":  # its linear layers have the heads of the full attention
        sizes.update(num_attention_heads=heads, num_key_value_heads=heads, head_dim=head_dim)
    if model == "glm5_next":
        sizes.update(qk_rope_head_dim=0)
        vision = dict(depth=1, hidden_size=32, num_heads=1, intermediate_size=32, out_hidden_size=hidden,
                      projection_intermediate_size=32)
        return AutoModelForImageTextToText.from_config(configs[model](text_config=sizes, vision_config=vision))
    name = f"{model}_text" if f"{model}_text" in configs else model
    return AutoModelForCausalLM.from_config(configs[name](**sizes))


def measure(model: str, tokens: int, rounds: int) -> Tuple[float, float]:
    """Seconds of a training step of a tiny model, the least of some in turns: (its own functions, headrace's)."""
    torch.manual_seed(0)
    net, text = tiny_model(model, hidden=256, layers=4, heads=8, head_dim=64), torch.randint(256, (1, tokens))

    def step() -> float:
        start = time.perf_counter()
        net.zero_grad()
        net(input_ids=text, labels=text).loss.backward()
        return time.perf_counter() - start

    def step_on_headrace() -> float:
        enable([model])
        try:
            return step()
        finally:
            disable()

    disable()
    plain, ours = in_turns({f"{model} on its own functions": step, f"{model} on headrace": step_on_headrace},
                           rounds=rounds).values()
    return min(plain), min(ours)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.integrations.transformers",
                                     description="A training step of tiny models with and without headrace.")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["qwen3_next", "kimi_linear"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", choices=MEMORY, default=MEMORY[0], help=MEMORY_HELP)
    a = parser.parse_args(arguments)
    importlib.import_module("transformers").logging.set_verbosity_error()  # its hints to install faster functions
    memory = keep_memory(a.memory)
    print(f"training step of a random model of 4 layers, {a.tokens} tokens, float32, least of {a.rounds}, {memory}")
    for model in a.model:
        plain, ours = measure(model, a.tokens, a.rounds)
        print(f"  {model:14} own functions {plain * 1e3:7.0f} ms   headrace {ours * 1e3:7.0f} ms   "
              f"{plain / ours:.1f} x as fast", flush=True)


if __name__ == "__main__":
    main()
