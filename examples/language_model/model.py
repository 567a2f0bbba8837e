"""A language model of bytes whose attention is one of headrace's layers, and its sampling one byte at a time."""

import torch
from torch import nn
from torch.nn import functional as F

from headrace.torch import nn as layers

BYTES = 256

# operator: its layer, from (place, number of layers, hidden size, heads). A head's keys and values have the same size.
OPERATORS = {
    "kda": lambda place, count, hidden, heads: layers.KimiDeltaAttention(
        hidden, 1, hidden // heads, heads, layer_idx=place),
    "gated_delta_rule": lambda place, count, hidden, heads: layers.GatedDeltaNet(
        hidden, 1, hidden // heads, heads, layer_idx=place),
    "comba": lambda place, count, hidden, heads: layers.Comba(
        hidden, 1, hidden // heads, heads, layer_idx=place),
    "gla": lambda place, count, hidden, heads: layers.GatedLinearAttention(
        hidden_size=hidden, expand_k=1, num_heads=heads, use_short_conv=True, layer_idx=place),
    "simple_gla": lambda place, count, hidden, heads: layers.SimpleGatedLinearAttention(
        hidden_size=hidden, num_heads=heads, layer_idx=place),
    "lightning_attn": lambda place, count, hidden, heads: layers.LightningAttention(
        hidden, heads, num_layers=count, layer_idx=place, gate_convention="maxtext", activation="silu", qk_norm=True),
}


class Block(nn.Module):
    """Linear attention, then a gated feed-forward network; each reads its normalised input and adds to it."""

    def __init__(self, attention, hidden):
        super().__init__()
        inner = 8 * hidden // 3 // 32 * 32
        self.attention_norm, self.attention = nn.RMSNorm(hidden), attention
        self.feed_forward_norm = nn.RMSNorm(hidden)
        self.gate, self.widen = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.narrow = nn.Linear(inner, hidden, bias=False)

    def forward(self, x, cache, cp_context):
        x = x + self.attention(self.attention_norm(x), past_key_values=cache, use_cache=cache is not None,
                               cp_context=cp_context)[0]
        y = self.feed_forward_norm(x)
        return x + self.narrow(F.silu(self.gate(y)) * self.widen(y))


class LanguageModel(nn.Module):
    """Bytes [B, T] -> logits of the byte after each, [B, T, 256]. The embedding is also the output matrix."""

    def __init__(self, operator, hidden, heads, count):
        super().__init__()
        self.embedding = nn.Embedding(BYTES, hidden)
        self.blocks = nn.ModuleList(
            Block(OPERATORS[operator](place, count, hidden, heads), hidden) for place in range(count))
        self.norm = nn.RMSNorm(hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.blocks:  # what is added to x starts small, so that depth does not matter at first
            for layer in (block.attention.o_proj, block.narrow):
                nn.init.normal_(layer.weight, std=0.02 / (2 * count) ** 0.5)

    def forward(self, tokens, cache=None, cp_context=None):
        """cache: a headrace.torch.nn.Cache. Its states are those before `tokens`, and afterwards those after them.

        cp_context: of tokens that are this process's part of a batch, see distributed.py.
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cache, cp_context)
        return F.linear(self.norm(x), self.embedding.weight)


@torch.no_grad()
def sample(model, prompt, count, temperature=0.8, seed=0):
    """Yields `count` bytes after `prompt` (bytes, at least one), each as an int and each from one step of the model."""
    draw = torch.Generator().manual_seed(seed)
    cache = layers.Cache()
    logits = model(torch.tensor([list(prompt)]), cache)[0, -1]
    for _ in range(count):
        likelihood = torch.softmax(logits.float() / temperature, -1)
        token = torch.multinomial(likelihood, 1, generator=draw)
        yield token.item()
        logits = model(token.view(1, 1), cache)[0, -1]
