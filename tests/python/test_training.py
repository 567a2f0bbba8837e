"""I4: a small language model of two layers trained through headrace.torch follows the loss of the recurrence."""

import functools

import pytest
import torch
from conftest import relative_error
from recurrence import recurrence

import headrace.torch as ht

T, H, D, WIDTH, VOCABULARY, STEPS = 300, 16, 8, 32, 24, 10  # T: two chunks of 128 tokens and a part of one
RATES = {"simple_gla": 0.1, "kda": 0.5}  # at which the loss falls all the way; keys of simple_gla are of any length
LOSS_BARS = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


def head_gates(layer):
    """The head gates of ling-mini-linear: 16 heads, layer `layer` of 20, which the checkpoints count from one less."""
    slopes = torch.exp2(-8 * torch.arange(1, H + 1, dtype=torch.float64) / H)
    return -slopes * (1 - (layer - 1) / 19 + 1e-5)


def library(op, tensors):
    if op == "simple_gla":
        return ht.chunk_simple_gla(**tensors, chunk_size=128)[0]
    return ht.chunk_kda(**tensors, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                        use_beta_sigmoid_in_kernel=True, chunk_size=128)[0]


def oracle(op, tensors):
    options = {"qk_l2norm": True, "gate": "softplus", "beta_is": "sigmoid"} if op == "kda" else {}
    return recurrence(op, **tensors, **options)[0]


def with_wrong_gradient(wanted):
    """The library, with an error of 1 % in the gradient by the input `wanted`."""

    def operator(op, tensors):
        value = tensors[wanted]
        wrong = value * 1.01 + (value * -0.01).detach()
        return library(op, {**tensors, wanted: wrong.to(value.dtype)})

    return operator


class Layer(torch.nn.Module):
    """x + out(operator(norm(x))); simple_gla has fixed head gates, kda computes gates and beta from x."""

    def __init__(self, op, index):
        super().__init__()
        self.op = op
        widths = {"q": D, "k": D, "v": D} | ({"g": D, "beta": 1} if op == "kda" else {})
        linear = functools.partial(torch.nn.Linear, bias=False)
        self.projections = torch.nn.ModuleDict({name: linear(WIDTH, H * width) for name, width in widths.items()})
        self.out = linear(H * D, WIDTH)
        if op == "kda":
            self.gate = torch.nn.ParameterDict({"A_log": torch.zeros(H), "dt_bias": torch.full((H * D,), -2.0)})
        else:
            self.register_buffer("g_gamma", head_gates(index))

    def forward(self, x, operator):
        y = torch.nn.functional.rms_norm(x, [WIDTH])
        tensors = {n: f(y).unflatten(-1, (H, -1)) for n, f in self.projections.items()}
        if self.op == "kda":
            tensors = {**tensors, "beta": tensors["beta"].squeeze(-1), **self.gate}
        else:
            tensors["g_gamma"] = self.g_gamma
        return x + self.out(operator(self.op, tensors).flatten(-2))


class Model(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(Layer(op, index) for index in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, operator):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, operator)
        return self.head(torch.nn.functional.rms_norm(x, [WIDTH]))


def text():
    """Tokens [1, T + 1]: a token repeats the one three places before it, or, one time in ten, is drawn anew."""
    draw = torch.Generator().manual_seed(2)
    drawn = torch.randint(VOCABULARY, (T + 1,), generator=draw).tolist()
    anew = torch.rand(T + 1, generator=draw).lt(0.1).tolist()
    for t in range(3, T + 1):
        drawn[t] = drawn[t] if anew[t] else drawn[t - 3]
    return torch.tensor([drawn])


def train(op, operator, dtype):
    """The loss before each step, and what the steps added to each parameter; bf16: autocast of float32 parameters."""
    torch.manual_seed(1)
    model = Model(op).to(torch.float32 if dtype == torch.bfloat16 else dtype)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[op], momentum=0.9)
    tokens, losses = text(), []
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = model(tokens[:, :-1], operator)
        loss = torch.nn.functional.cross_entropy(logits.to(start["head.weight"].dtype).flatten(0, 1), tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    updates = {name: (p.detach() - start[name]).double() for name, p in model.named_parameters()}
    return torch.tensor(losses, dtype=torch.float64), updates


@functools.cache
def exact(op):
    return train(op, oracle, torch.float64)


def loss_distance(op, losses):
    """The largest relative distance from the oracle's loss; NaN stays NaN."""
    return ((losses - exact(op)[0]) / exact(op)[0]).abs().max().item()


def update_distance(op, updates):
    """The largest relative distance of what a parameter gained from what it gains with the oracle."""
    return max(relative_error(updates[name], expected) for name, expected in exact(op)[1].items())


@pytest.mark.parametrize("op", RATES)
def test_the_oracle_learns(op):
    losses, _ = exact(op)
    assert len(losses) == STEPS and losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", LOSS_BARS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", RATES)
def test_loss_follows_the_oracle(op, dtype):
    losses, updates = train(op, library, dtype)
    assert loss_distance(op, losses) <= LOSS_BARS[dtype]
    if dtype == torch.float32:
        assert update_distance(op, updates) <= 1e-3


@pytest.mark.parametrize("op, name", [("simple_gla", n) for n in ("q", "k", "v")] +
                         [("kda", n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")])
def test_an_error_of_one_percent_in_a_gradient_is_noticed(op, name):
    losses, updates = train(op, with_wrong_gradient(name), torch.float32)
    assert update_distance(op, updates) > 1e-3
    if op == "simple_gla":  # here the loss itself leaves its bar
        assert loss_distance(op, losses) > LOSS_BARS[torch.float32]
