"""What ranks do in the tests of headrace.torch.distributed: a call in pieces beside the same call of one process."""

import torch
import torch.distributed as dist
from conftest import OPERATORS
from layers import HIDDEN, LAYERS, make

import headrace.torch as ht
from headrace.torch.distributed import build_cp_context, gather_final_states, shard, unshard

FUNCTIONS = {"linear_attention": ht.fused_recurrent_simple_gla, "retention": ht.fused_recurrent_simple_gla,
             "simple_gla": ht.fused_recurrent_simple_gla, "gla": ht.fused_recurrent_gla,
             "delta_rule": ht.fused_recurrent_delta_rule, "gated_delta_rule": ht.chunk_gated_delta_rule,
             "comba": ht.chunk_comba, "kda": ht.chunk_kda}
TOKENS = ("q", "k", "v", "p", "g", "gk", "gv", "beta")


def problem(op, T, H, HV, K, V, sequences, dtype, seed=0, raw=False, state=True, resets=(), reflects=False):
    """The tensors of the whole batch, the same on every rank: gates of -inf at the tokens `resets`.

    reflects: a beta of 2 and gates of nearly 0, with which a forward in float32 goes on in double after 512 tokens.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(*sizes, generator=draw, dtype=torch.float64)

    gates, beta, erase = OPERATORS[op]
    unit = torch.nn.functional.normalize
    tensors = {"q": normal(1, T, H, K), "k": unit(normal(1, T, H, K), dim=-1), "v": normal(1, T, HV, V)}
    if erase:
        tensors["p"] = unit(normal(1, T, H, K), dim=-1)
    channel = (K,) if op in ("gla", "kda") else ()
    if "g" in gates:
        g = normal(1, T, HV, *channel)
        tensors["g"] = g if raw else torch.nn.functional.logsigmoid(g + 3)
        tensors["g"][:, list(resets)] = -torch.inf
    if raw and "g" in gates:
        tensors |= {"A_log": normal(HV) / 2, "dt_bias": normal(HV * K if channel else HV)}
    if "g_gamma" in gates:
        tensors["g_gamma"] = -torch.rand(HV, generator=draw, dtype=torch.float64) / 8
    if beta:
        tensors["beta"] = normal(1, T, HV) if raw else torch.sigmoid(normal(1, T, HV))
    if reflects:
        tensors["beta"].fill_(2)
        if "g" in tensors:
            tensors["g"].fill_(-1e-6)
    if state:
        tensors["initial_state"] = normal(sequences, HV, K, V)
    rest = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: x.to(dtype if name in "qkvp" else rest) for name, x in tensors.items()}


def local_tokens(x, context, rank):
    parts = [x[:, begin:end] for begin, end in context.token_ranges[rank]]
    return torch.cat(parts, 1) if parts else x[:, :0]


def local_rows(x, context, at_begin):
    """Rows of sequences as rows of pieces; NaN where no sequence begins (ends), which nobody may read."""
    pieces, sequences = context._layout.sequences_of(context._ranks.rank, at_begin)
    rows = x.new_full((context.num_seqs, *x.shape[1:]), torch.nan)
    rows[torch.from_numpy(pieces)] = x[torch.from_numpy(sequences)]
    return rows


def run(op, tensors, options, weights, final_weights):
    """(results by name, gradients by name) of a loss that weighs o and the final state."""
    inputs = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    given = dict(inputs)
    if op == "gla":
        given["gk"] = given.pop("g")
    o, state = FUNCTIONS[op](**given, output_final_state=True, **options)
    loss = (o.to(weights.dtype) * weights).sum()
    if final_weights is not None:
        loss = loss + (state * final_weights).sum()
    loss.backward()
    return {"o": o.detach(), "final_state": state.detach()}, {f"d_{name}": x.grad for name, x in inputs.items()}


def squares(actual, expected, group):
    """The relative error of what all ranks hold together, [own error, worst finite mismatch]."""
    actual, expected = actual.double(), expected.double()
    if not torch.isfinite(actual).all():
        actual = torch.full_like(actual, 1e300)
    sums = torch.stack([(actual - expected).square().sum(), expected.square().sum()])
    dist.all_reduce(sums, group=group)
    return (sums[0] / sums[1].clamp_min(1e-300)).sqrt().item()


def compare(group, op, lengths, sizes, dtype, context_options, call_options=None, raw=False, resets=(), final=True,
            reference=torch.float64, device="cpu"):
    """The relative errors of all results and gradients beside one process in the type `reference`, by name.

    device: of the tensors of ranks; the other process's are on the CPU.
    """
    H, HV, K, V = sizes
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    T, N, rank = int(offsets[-1]), len(lengths), dist.get_rank(group)
    context = build_cp_context(offsets, group, **context_options)
    options = dict(call_options or {})
    if raw:
        options |= {"use_gate_in_kernel": True}
        options |= {"use_beta_sigmoid_in_kernel": True} if OPERATORS[op][1] else {}
    tensors = problem(op, T, H, HV, K, V, N, dtype, raw=raw, resets=resets)
    draw = torch.Generator().manual_seed(9)
    weights = torch.randn(1, T, HV, V, generator=draw, dtype=torch.float64)
    final_weights = torch.randn(N, HV, K, V, generator=draw, dtype=torch.float64) if final else None
    whole = {name: x.to(reference) for name, x in tensors.items()} if reference is not None else tensors
    expected, gradients = run(op, whole, options | {"cu_seqlens": offsets}, weights, final_weights)
    reverse = options.get("reverse", False)
    local = {name: local_tokens(x, context, rank) if name in TOKENS else x for name, x in tensors.items()}
    local["initial_state"] = local_rows(tensors["initial_state"], context, not reverse)
    rows = None if final_weights is None else torch.nan_to_num(local_rows(final_weights, context, reverse))
    there = {name: x.to(device) for name, x in local.items()}
    results, d = run(op, there, options | {"cp_context": context}, local_tokens(weights, context, rank).to(device),
                     None if rows is None else rows.to(device))
    results, d = ({name: x.cpu() for name, x in found.items()} for found in (results, d))
    ends = torch.nan_to_num(local_rows(expected["final_state"], context, reverse))
    errors = {"o": squares(results["o"], local_tokens(expected["o"], context, rank), group),
              "final_state": squares(results["final_state"], ends, group)}
    for name, gradient in d.items():
        full = gradients[name]
        if name[2:] in TOKENS:
            errors[name] = squares(gradient, local_tokens(full, context, rank), group)
        elif name == "d_initial_state":
            errors[name] = squares(gradient, torch.nan_to_num(local_rows(full, context, not reverse)), group)
        else:
            total = gradient.double().clone()
            dist.all_reduce(total, group=group)
            errors[name] = squares(total, full, group)
    return errors


def many(group, cases):
    """compare() for each case: one job for many of them."""
    return [compare(group, *case[:-1], **case[-1]) for case in cases]



def convolution(group, lengths, D, W, dtype, context_options, activation="silu", initial=True, final=True,
                state_dtype=None):
    """The relative errors of a short convolution beside one process in float64."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    T, N, rank = int(offsets[-1]), len(lengths), dist.get_rank(group)
    context = build_cp_context(offsets, group, W, **context_options)
    draw = torch.Generator().manual_seed(1)
    sizes = {"x": (1, T, D), "weight": (D, W), "bias": (D,), "initial_state": (N, D, W)}
    tensors = {name: torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for name, size in sizes.items()}
    weights = torch.randn(1, T, D, generator=draw, dtype=torch.float64)
    final_weights = torch.randn(N, D, W, generator=draw, dtype=torch.float64)
    if state_dtype is not None:
        tensors["initial_state"] = tensors["initial_state"].to(state_dtype)
    if not initial:
        del tensors["initial_state"]

    def call(tensors, weights, final_weights, **options):
        inputs = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
        y, state = ht.short_convolution(**inputs, activation=activation, output_final_state=final, **options)
        loss = (y * weights).sum() + ((state * final_weights).sum() if final else 0)
        loss.backward()
        return y.detach(), state, {name: x.grad for name, x in inputs.items()}

    y, state, d = call({n: x.double() for n, x in tensors.items()}, weights, final_weights, cu_seqlens=offsets)
    local = {**tensors, "x": local_tokens(tensors["x"], context, rank)}
    if initial:
        local["initial_state"] = local_rows(tensors["initial_state"], context, True)
    rows = torch.nan_to_num(local_rows(final_weights, context, False), 3.0)
    mine, last, mine_d = call(local, local_tokens(weights, context, rank), rows, cp_context=context)
    errors = {"y": squares(mine, local_tokens(y, context, rank), group),
              "d_x": squares(mine_d["x"], local_tokens(d["x"], context, rank), group)}
    if final:
        ends = torch.nan_to_num(local_rows(state.detach(), context, False))
        errors["final_state"] = squares(last.detach(), ends, group)
    if initial:
        errors["d_initial_state"] = squares(
            mine_d["initial_state"], torch.nan_to_num(local_rows(d["initial_state"], context, True)), group)
    for name in ("weight", "bias"):
        total = mine_d[name].double()
        dist.all_reduce(total, group=group)
        errors[f"d_{name}"] = squares(total, d[name], group)
    return errors


def convolutions(group, cases):
    return [convolution(group, *case[:-1], **case[-1]) for case in cases]


def layer(group, name, lengths, context_options):
    """The relative errors of a layer's output and gradients beside one process."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    T, rank = int(offsets[-1]), dist.get_rank(group)
    context = build_cp_context(offsets, group, **context_options)
    module = make(name).double()
    x = torch.randn(1, T, HIDDEN, dtype=torch.float64)
    weights = torch.randn(1, T, HIDDEN, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    o = module(whole, cu_seqlens=offsets)[0]
    (o * weights).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    mine = x.clone().requires_grad_()
    y = module(shard(mine, context), cp_context=context)[0]
    (y * shard(weights, context)).sum().backward()
    errors = {"o": squares(unshard(y.detach(), context), o.detach(), group)}
    dist.all_reduce(mine.grad, group=group)
    errors["d_x"] = squares(mine.grad, whole.grad, group)
    for parameter, p in module.named_parameters():
        dist.all_reduce(p.grad, group=group)
        errors[parameter] = squares(p.grad, gradients[parameter], group)
    return errors


def layers(group, cases):
    return [layer(group, *case) for case in cases]


def gathered(group, lengths, context_options):
    """Whether shard, unshard and gather_final_states move what they say, and their gradients."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    T, N = int(offsets[-1]), len(lengths)
    context = build_cp_context(offsets, group, **context_options)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = torch.randn(3, T, 2, dtype=torch.float64, requires_grad=True)
    mine = shard(x, context)
    assert torch.equal(mine, local_tokens(x, context, rank))
    whole = unshard(mine, context)
    assert torch.equal(whole, x)
    (d,) = torch.autograd.grad(whole, mine, (rank + 1) * x.detach())
    assert torch.allclose(d, mine * sum(range(1, size + 1)))
    (d,) = torch.autograd.grad(mine, x, torch.ones_like(mine))
    dist.all_reduce(d, group=group)
    assert torch.equal(d, torch.ones_like(x))
    assert torch.equal(unshard(mine.movedim(1, 2), context, -1), x.movedim(1, 2))
    states = torch.randn(N, 2, 3, dtype=torch.float64)
    for reverse in (False, True):
        rows = local_rows(states, context, reverse).requires_grad_()
        found = gather_final_states(rows, context, reverse=reverse)
        assert torch.equal(found, states)
        found.backward((rank + 1) * states)
        assert torch.allclose(rows.grad, torch.nan_to_num(rows.detach()) * sum(range(1, size + 1)))
    return context.token_ranges


def bits(group, op, lengths, sizes, dtype, context_options, raw=False, options=None, final=True, reflects=False):
    """The names of results and gradients of which a bit is another one than in one process, parameters left out."""
    H, HV, K, V = sizes
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    T, N, rank = int(offsets[-1]), len(lengths), dist.get_rank(group)
    context = build_cp_context(offsets, group, **context_options)
    options = dict(options or {}) | ({"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True} if raw else {})
    reverse = options.get("reverse", False)
    tensors = problem(op, T, H, HV, K, V, N, dtype, raw=raw, reflects=reflects)
    draw = torch.Generator().manual_seed(9)
    weights = torch.randn(1, T, HV, V, generator=draw).to(dtype)
    final_weights = torch.randn(N, HV, K, V, generator=draw) if final else None
    expected, gradients = run(op, tensors, options | {"cu_seqlens": offsets}, weights, final_weights)
    local = {name: local_tokens(x, context, rank) if name in TOKENS else x for name, x in tensors.items()}
    local["initial_state"] = local_rows(tensors["initial_state"], context, not reverse)
    rows = None if final_weights is None else torch.nan_to_num(local_rows(final_weights, context, reverse))
    results, d = run(op, local, options | {"cp_context": context}, local_tokens(weights, context, rank), rows)
    pairs = {"o": (results["o"], local_tokens(expected["o"], context, rank)),
             "final_state": (results["final_state"],
                             torch.nan_to_num(local_rows(expected["final_state"], context, reverse))),
             "d_initial_state": (d["d_initial_state"],
                                 torch.nan_to_num(local_rows(gradients["d_initial_state"], context, not reverse)))}
    pairs |= {name: (x, local_tokens(gradients[name], context, rank)) for name, x in d.items() if name[2:] in TOKENS}
    return [name for name, (mine, one) in pairs.items() if not torch.equal(mine, one)]


def all_bits(group, cases):
    return [bits(group, *case[:-1], **case[-1]) for case in cases]


class _Replicated(torch.autograd.Function):
    """A tensor that all ranks hold, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        d = d.clone()
        dist.all_reduce(d)
        return d


class _Shared(torch.autograd.Function):
    """A tensor of which all ranks compute the same loss: it counts once."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return d / dist.get_world_size()


def gradients_by_differences(group, strategy):
    """All ranks take the same differences in step: gradcheck of whole tensors that are sharded and gathered inside."""
    offsets = torch.tensor([0, 1, 7])
    context = build_cp_context(offsets, group, strategy=strategy, token_ranges=[[(0, 2)], [(2, 5)], [(5, 7)]])
    tensors = problem("gated_delta_rule", 7, 3, 3, 2, 2, 2, torch.float64, raw=True)
    names = list(tensors)

    def function(*inputs):
        given = {name: _Replicated.apply(x) for name, x in zip(names, inputs)}
        given = {name: shard(x, context) if name in TOKENS else x for name, x in given.items()}
        given["initial_state"] = given["initial_state"][context.sequences]
        o, state = ht.chunk_gated_delta_rule(**given, cp_context=context, use_gate_in_kernel=True,
                                             use_beta_sigmoid_in_kernel=True, output_final_state=True)
        return _Shared.apply(unshard(o, context)), _Shared.apply(gather_final_states(state, context))

    inputs = [x.requires_grad_() for x in tensors.values()]
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
