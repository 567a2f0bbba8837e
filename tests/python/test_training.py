"""I4: a small language model of two layers trained through headrace.torch follows the loss of the recurrence."""

import functools

import pytest
import torch
from conftest import has_dot_products, relative_error
from recurrence import recurrence

import headrace.torch as ht

T, WIDTH, VOCABULARY, STEPS = 300, 32, 24, 10  # T: two chunks of 128 tokens and a part of one
SIZES = {"simple_gla": (16, 32, 32), "kda": (8, 64, 32)}  # H, K, V: the smallest that bf16 dot products serve
RATES = {"simple_gla": 0.2, "kda": 1.0}  # at which the loss falls all the way; keys of simple_gla are of any length
LOSS_BARS = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


def head_gates(layer):
    """The head gates of ling-mini-linear: 16 heads, layer `layer` of 20, which the checkpoints count from one less."""
    slopes = torch.exp2(-8 * torch.arange(1, 17, dtype=torch.float64) / 16)
    return -slopes * (1 - (layer - 1) / 19 + 1e-5)


def library(op, tensors):
    if op == "simple_gla":
        return ht.chunk_simple_gla(**tensors, chunk_size=128)[0]
    return ht.chunk_kda(**tensors, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                        use_beta_sigmoid_in_kernel=True, chunk_size=128)[0]


def oracle(op, q, k, v, g=None, g_gamma=None, beta=None, A_log=None, dt_bias=None):
    """The recurrence of one sequence, all tokens at once: products of tokens i >= j decay by exp(G_i) exp(-G_j).

    In float64 the sums G of a few hundred log decays leave enough room for both exponentials.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [H, T, K or V]
    if op == "kda":
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        log_decay = -A_log.exp()[:, None] * torch.nn.functional.softplus(g[0] + dt_bias.unflatten(0, g.shape[2:]))
        v = v * torch.sigmoid(beta[0]).T[..., None]
    else:
        log_decay = g_gamma[:, None].expand(k.shape[1], -1, 1)
    G = log_decay.cumsum(0).transpose(0, 1)  # [H, T, K or 1]
    earlier = k * (-G).exp()
    if op == "kda":
        erased = torch.sigmoid(beta[0]).T[..., None] * (k * G.exp() @ earlier.mT)
        v = torch.linalg.solve_triangular(erased, v, upper=False, unitriangular=True)
    o = (q * G.exp() @ earlier.mT).tril() @ v * q.shape[-1] ** -0.5
    return o.transpose(0, 1)[None]


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
        self.heads, K, V = SIZES[op]
        widths = {"q": K, "k": K, "v": V} | ({"g": K, "beta": 1} if op == "kda" else {})
        linear = functools.partial(torch.nn.Linear, bias=False)
        self.projections = torch.nn.ModuleDict({n: linear(WIDTH, self.heads * width) for n, width in widths.items()})
        self.out = linear(self.heads * V, WIDTH)
        if op == "kda":
            gate = {"A_log": torch.zeros(self.heads), "dt_bias": torch.full((self.heads * K,), -2.0)}
            self.gate = torch.nn.ParameterDict(gate)
        else:
            self.register_buffer("g_gamma", head_gates(index))

    def forward(self, x, operator):
        y = torch.nn.functional.rms_norm(x, [WIDTH])
        tensors = {n: f(y).unflatten(-1, (self.heads, -1)) for n, f in self.projections.items()}
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
    return train(op, lambda op, tensors: oracle(op, **tensors), torch.float64)


def loss_distance(op, losses):
    """The largest relative distance from the oracle's loss; NaN stays NaN."""
    return ((losses - exact(op)[0]) / exact(op)[0]).abs().max().item()


def update_distance(op, updates):
    """The largest relative distance of what a parameter gained from what it gains with the oracle."""
    return max(relative_error(updates[name], expected) for name, expected in exact(op)[1].items())


@pytest.mark.parametrize("op", RATES)
def test_the_oracle_is_the_recurrence(op):
    torch.manual_seed(3)
    (H, K, V), T = SIZES[op], 40
    tensors = {n: torch.randn(1, T, H, D, dtype=torch.float64) for n, D in (("q", K), ("k", K), ("v", V))}
    if op == "kda":
        tensors |= {"g": torch.randn_like(tensors["k"]) - 2, "beta": torch.randn(1, T, H, dtype=torch.float64)}
        tensors |= {"A_log": torch.randn(H, dtype=torch.float64), "dt_bias": torch.randn(H * K, dtype=torch.float64)}
        options = {"qk_l2norm": True, "gate": "softplus", "beta_is": "sigmoid"}
    else:
        tensors["g_gamma"], options = head_gates(0), {}
    assert relative_error(oracle(op, **tensors), recurrence(op, **tensors, **options)[0]) < 1e-11


@pytest.mark.parametrize("op", RATES)
def test_the_oracle_learns(op):
    losses, _ = exact(op)
    assert len(losses) == STEPS and losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", LOSS_BARS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", RATES)
def test_loss_follows_the_oracle(op, dtype, chunks_served):
    losses, updates = train(op, library, dtype)
    in_float = dtype != torch.bfloat16 or not has_dot_products()
    assert in_float or chunks_served(dtype)  # in float32 states so small go to the recurrent form
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
