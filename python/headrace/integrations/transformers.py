"""Models of transformers on headrace's operators: enable() replaces their plain PyTorch functions, disable() undoes it.

    from headrace.integrations.transformers import enable
    enable()                                   # Qwen3-Next, Qwen3.5, OLMo-hybrid, Kimi-Linear and Bailing-hybrid types
    model = AutoModelForCausalLM.from_pretrained(...)

Prefill, decoding and training of CPU tensors then run in the library; tensors on other devices keep the model's own
functions. Models that exist already change too. `python -m headrace.integrations.transformers` measures the gain.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple

from headrace._measuring import MEMORY, MEMORY_HELP, in_turns, keep_memory
from headrace.torch import chunk_gated_delta_rule, chunk_kda

if TYPE_CHECKING:
    import torch

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid")

# Names of the plain functions in the models' modules, and what computes the same.
_FUNCTIONS = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_kda,
    "recurrent_kimi_delta_attention": chunk_kda,
}

_originals: Dict[Tuple[ModuleType, str], Callable] = {}  # (module, name): the function that stood there


def _replacement(function, original):
    def replaced(query, key, value, g, beta, initial_state=None, output_final_state=False,
                 use_qk_l2norm_in_kernel=False, cu_seqlens=None, **others):
        if query.device.type != "cpu":
            return original(query, key, value, g=g, beta=beta, initial_state=initial_state,
                            output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                            cu_seqlens=cu_seqlens, **others)
        return function(query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
                        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens)

    return replaced


def enable(models: Sequence[str] = MODELS) -> List[str]:
    """Replaces the functions of these model types; returns the types that the installed transformers has.

    models: names of folders in transformers.models. Raises ImportError without transformers, ValueError for a type
    without such functions, RuntimeError if none of MODELS is there.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("headrace.integrations.transformers: expected transformers to be installed")
    found = []
    for model in models:
        name = f"transformers.models.{model}.modeling_{model}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if models is MODELS and error.name and error.name.startswith("transformers.models."):
                continue  # an older transformers without this type
            raise
        names = [function for function in _FUNCTIONS if hasattr(module, function)]
        if not names:
            raise ValueError(f"models: expected types with plain functions of these operators, got '{model}'")
        for function in names:
            if (module, function) not in _originals:
                original = getattr(module, function)
                _originals[module, function] = original
                setattr(module, function, _replacement(_FUNCTIONS[function], original))
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
    """A small random model of type "qwen3_next" or "kimi_linear"; its layers but the last are linear attention."""
    import transformers

    common: Dict[str, Any] = dict(vocab_size=256, hidden_size=hidden, intermediate_size=2 * hidden,
                                  num_hidden_layers=layers,
                  num_attention_heads=4, num_key_value_heads=4)
    kinds = ["linear_attention"] * (layers - 1) + ["full_attention"]
    if model == "qwen3_next":
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(
            **common, head_dim=hidden // 4, linear_num_value_heads=heads, linear_num_key_heads=heads // 2,
            linear_key_head_dim=head_dim, linear_value_head_dim=head_dim, num_experts=0, layer_types=kinds))
    return transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(
        **common, linear_num_heads=heads, linear_head_dim=head_dim, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=32, mlp_layer_types=["dense"] * layers, layer_types=kinds, pad_token_id=None,
        bos_token_id=None, eos_token_id=None))


def measure(model: str, tokens: int, rounds: int) -> Tuple[float, float]:
    """Seconds of a training step of a tiny model, the least of some in turns: (its own functions, headrace's)."""
    import torch

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
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", choices=MEMORY, default=MEMORY[0], help=MEMORY_HELP)
    a = parser.parse_args(arguments)
    importlib.import_module("transformers").logging.set_verbosity_error()  # its hints to install faster functions
    memory = keep_memory(a.memory)
    print(f"training step of a random model of 4 layers, {a.tokens} tokens, float32, least of {a.rounds}, {memory}")
    for model in ("qwen3_next", "kimi_linear"):
        plain, ours = measure(model, a.tokens, a.rounds)
        print(f"  {model:12} own functions {plain * 1e3:7.0f} ms   headrace {ours * 1e3:7.0f} ms   "
              f"{plain / ours:.1f} x as fast", flush=True)


if __name__ == "__main__":
    main()
