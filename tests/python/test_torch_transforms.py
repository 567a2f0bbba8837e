"""headrace.torch under every transform of torch.func and torch.autograd: right, or refused by a message of ours.

What derivatives should be is taken from central differences of the function itself, whose values other tests judge. A
function without a case, or a transform of torch.func that nobody looked at, fails.
"""

# over 400 lines: one table of functions under one table of transforms.

import contextlib
import functools
import inspect
import re

import pytest
import torch
from torch import func
from torch.autograd import forward_ad, functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import headrace.torch as ht
import headrace.torch.nn as hn

FORWARD_MODE = r"^headrace::\w+: forward-mode derivatives are not computed; expected reverse mode"
SECOND = r"^headrace::\w+: second derivatives are not computed$"
VECTORIZED = r"^headrace::\w+: vectorize and is_grads_batched of torch.autograd are not served; expected torch.func"
NO_GRADIENTS = r"^(ssm_state_indices|state): expected no gradients "
NO_VMAP = r"^(ssm_state_indices|state): expected no vmap over a "

B, T, H, HV, K, V, D, W = 1, 3, 1, 2, 2, 3, 4, 2
SIZES = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "p": (B, T, H, K), "g": (B, T, HV),
         "gk": (B, T, HV, K), "gv": (B, T, HV, V), "g_gamma": (HV,), "beta": (B, T, HV), "A_log": (HV,),
         "dt_bias": (HV,), "initial_state": (B, HV, K, V)}
GATES = ("g", "gk", "gv", "g_gamma")
OPTIONS = {"output_final_state": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
           "use_qk_l2norm_in_kernel": True, "layer_idx": 1, "num_layers": 4}


def draw(sizes):
    return torch.randn(sizes, dtype=torch.float64)


def weights(y):
    """Of the elements of y in the loss."""
    return torch.linspace(1, 2, len(y), dtype=y.dtype)


class Case:
    """A function of tensors by name, float64, and of options."""

    def __init__(self, function, tensors, options):
        self.function, self.tensors, self.options = function, tensors, options
        self.names, self.start = list(tensors), torch.cat([x.flatten() for x in tensors.values()])

    def unflatten(self, flat):
        parts = flat.split([x.numel() for x in self.tensors.values()])
        return {name: part.reshape(x.shape) for (name, x), part in zip(self.tensors.items(), parts)}

    def __call__(self, flat):
        """The same as a function of one vector that gives one vector."""
        return self.named(**self.unflatten(flat))

    def named(self, **changed):
        results = self.function(**{**self.tensors, **changed}, **self.options)
        return torch.cat([y.flatten() for y in tree_leaves(results) if y is not None])

    def loss(self, flat):
        y = self(flat)
        return (y * weights(y)).sum()

    def inputs(self, count):
        """[count, n]: inputs of other values, gates of the sign that they have."""
        return self.start * (1 + torch.rand(count, len(self.start), dtype=torch.float64) / 4)


def operator(name, **options):
    function = getattr(ht, name)
    parameters = inspect.signature(function).parameters
    torch.manual_seed(0)
    tensors = {n: draw(SIZES[n]) for n in SIZES if n in parameters}
    per_channel = "kda" in name or "gla" in name and "simple" not in name
    if per_channel and "g" in tensors:
        tensors["g"] = draw(SIZES["gk"])
    if per_channel and "dt_bias" in tensors:
        tensors["dt_bias"] = draw((HV, K))
    if "gk" in tensors and "g" in tensors:  # which are not added where the gate is made in the kernel
        options["use_gate_in_kernel"] = False
    if not options.get("use_gate_in_kernel", True):
        del tensors["A_log"], tensors["dt_bias"]
    for n in GATES:
        if n in tensors:
            tensors[n] = -tensors[n].abs() - 0.1
    options = {n: value for n, value in {**OPTIONS, **options}.items() if n in parameters}
    if "cu_seqlens" in options:
        tensors["initial_state"] = draw((len(options["cu_seqlens"]) - 1, HV, K, V))
    if "state_v_first" in options:
        tensors["initial_state"] = draw((B, HV, V, K))
    return Case(function, tensors, options)


def convolution(cu_seqlens=None, output_final_state=True):
    torch.manual_seed(0)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    tensors = {"x": draw((B, T, D)), "weight": draw((D, W)), "bias": draw((D,)), "initial_state": draw((N, D, W))}
    options = {"cu_seqlens": cu_seqlens, "output_final_state": output_final_state, "activation": "silu"}
    return Case(ht.short_convolution, tensors, options)


def norm(*leading):
    torch.manual_seed(0)
    tensors = {n: draw((*leading, D)) for n in ("x", "g", "residual")}
    tensors["weight"] = draw((D,))
    return Case(ht.rms_norm_gated, tensors, {"prenorm": True})


def layer(name, *inputs, **arguments):
    torch.manual_seed(0)
    module = getattr(hn, name)(**arguments).double()
    tensors = {n: p.detach() + 0.1 * draw(p.shape) for n, p in module.named_parameters()}
    given = {f"input {i}": draw(sizes) for i, sizes in enumerate(inputs)}

    def function(**t):
        return func.functional_call(module, {n: t[n] for n in tensors}, tuple(t[n] for n in given))

    return Case(function, {**tensors, **given}, {})


def small(name, **arguments):
    return layer(name, (B, T, D), hidden_size=D, norm_eps=0.1, **arguments)


RAGGED = torch.tensor([0, 1, 1, 3])
OPERATORS = [name for name in ht.__all__ if name.startswith(("chunk_", "fused_"))]
FUNCTIONS = {name: (lambda name=name: operator(name)) for name in OPERATORS} | {
    "short_convolution": convolution,
    "rms_norm_gated": lambda: norm(2),
}
LAYERS = {
    "ShortConvolution": lambda: layer("ShortConvolution", (B, T, D), hidden_size=D, kernel_size=W, bias=True),
    "RMSNormGated": lambda: layer("RMSNormGated", (T, D), (T, D), hidden_size=D),
    "FusedRMSNormGated": lambda: layer("FusedRMSNormGated", (T, D), hidden_size=D, groups=2),
    "GatedLinearAttention": lambda: small("GatedLinearAttention", num_heads=1, expand_k=0.5, use_short_conv=True,
                                          gate_low_rank_dim=2),
    "SimpleGatedLinearAttention": lambda: small("SimpleGatedLinearAttention", num_heads=2, expand_k=0.5),
    "LightningAttention": lambda: small("LightningAttention", num_heads=2, num_layers=3, layer_idx=1),
    "GatedDeltaNet": lambda: small("GatedDeltaNet", num_heads=1, head_dim=2),
    "Comba": lambda: small("Comba", num_heads=1, head_dim=2),
    "KimiDeltaAttention": lambda: small("KimiDeltaAttention", num_heads=1, head_dim=2),
}
VARIANTS = {
    "with a gate made outside": lambda: operator("chunk_kda", use_gate_in_kernel=False),
    "ragged": lambda: operator("chunk_comba", cu_seqlens=RAGGED),
    "bounded": lambda: operator("chunk_kda", lower_bound=-2.0),
    "turned": lambda: operator("chunk_gla", state_v_first=True),
    "output alone": lambda: operator("chunk_simple_gla", output_final_state=False),
    "ragged convolution": lambda: convolution(cu_seqlens=RAGGED),
    "convolution alone": lambda: convolution(output_final_state=False),
    "norm of a vector": norm,
    "norm of many dimensions": lambda: norm(1, 2, 1, 2),
}
CASES = FUNCTIONS | LAYERS | VARIANTS
IN_PLACE = [name for name in ht.__all__
            if {"ssm_state_indices", "indices"} & {*inspect.signature(getattr(ht, name)).parameters}]


def test_every_function_and_every_layer_has_a_case():
    assert {*ht.__all__} == {*FUNCTIONS} | {*IN_PLACE} | {"bind"}  # test_bind.py
    assert {name for name in hn.__all__ if isinstance(getattr(hn, name), type)} - {"Cache"} == {*LAYERS}


def test_every_transform_is_known():
    """What stands below uses these; one that is new in torch needs a line there."""
    derivatives = {"grad", "grad_and_value", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize"}
    assert {*func.__all__} <= derivatives | {"vmap", "functionalize", "functional_call", "stack_module_state",
                                             "debug_unwrap", "rearrange", "replace_all_batch_norm_modules_"}
    assert {*functional.__all__} == {"vjp", "jvp", "vhp", "hvp", "jacobian", "hessian"}


def differences(function, x, step=1e-5):
    """[..., n]: the derivatives of `function` at x [n] by central differences."""
    with torch.no_grad():
        steps = step * torch.eye(len(x), dtype=x.dtype)
        return torch.stack([(function(x + e) - function(x - e)) / (2 * step) for e in steps], -1)


COUNT = 4


def close(actual, expected, text=""):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7, msg=lambda message: f"{text}: {message}")


def required(x):
    return x.clone().requires_grad_()


def in_a_level(function, x):
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.ones(1), torch.ones(1))
        return function(x)


def without(mode, function, x):
    with mode():
        return function(x).clone()


def backward_of_vmap(case, X):
    X = required(X)
    func.vmap(case.loss)(X).sum().backward()
    return X.grad


def checkpointed(case, x, reentrant):
    x = required(x)
    checkpoint(case.loss, x, use_reentrant=reentrant).backward()
    return x.grad


# name: (what it gives for a case and its inputs X, what is right; of values Y, derivatives J, gradients G of the loss)
SERVED = {
    "vjp": (lambda c, X: func.vjp(c, X[0])[1](weights(c(X[0])))[0],
            lambda Y, J, G: G[0]),
    "grad": (lambda c, X: func.grad(c.loss)(X[0]), lambda Y, J, G: G[0]),
    "grad_and_value": (lambda c, X: func.grad_and_value(c.loss)(X[0])[0], lambda Y, J, G: G[0]),
    "jacrev": (lambda c, X: func.jacrev(c)(X[0]), lambda Y, J, G: J[0]),
    "jacrev in chunks": (lambda c, X: func.jacrev(c, chunk_size=3)(X[0]), lambda Y, J, G: J[0]),
    "vmap": (lambda c, X: func.vmap(c)(X), lambda Y, J, G: Y),
    "vmap in chunks": (lambda c, X: func.vmap(c, chunk_size=3)(X), lambda Y, J, G: Y),
    "vmap of other dimensions": (lambda c, X: func.vmap(c, -1, 1)(X.T), lambda Y, J, G: Y.T),
    "vmap of vmap": (lambda c, X: func.vmap(func.vmap(c), 1, 1)(X.unflatten(0, (2, -1))).flatten(0, 1),
                     lambda Y, J, G: Y),
    "vmap of nothing": (lambda c, X: func.vmap(c)(X[:0]), lambda Y, J, G: Y[:0]),
    "vmap of grad": (lambda c, X: func.vmap(func.grad(c.loss))(X), lambda Y, J, G: G),
    "vmap of grad of nothing": (lambda c, X: func.vmap(func.grad(c.loss))(X[:0]), lambda Y, J, G: G[:0]),
    "vmap of vmap of grad": (
        lambda c, X: func.vmap(func.vmap(func.grad(c.loss)))(X.unflatten(0, (2, -1))).flatten(0, 1),
        lambda Y, J, G: G),
    "vmap of jacrev": (lambda c, X: func.vmap(func.jacrev(c))(X), lambda Y, J, G: J),
    "grad of vmap": (lambda c, X: func.grad(lambda x: func.vmap(c.loss)(x).sum())(X), lambda Y, J, G: G),
    "backward of vmap": (backward_of_vmap, lambda Y, J, G: G),
    "vmap of grad of vmap": (lambda c, X: func.vmap(func.grad(lambda x: func.vmap(c.loss)(x).sum()))(X[None])[0],
                             lambda Y, J, G: G),
    "functionalize": (lambda c, X: func.functionalize(c)(X[0]), lambda Y, J, G: Y[0]),
    "functionalize of grad": (lambda c, X: func.functionalize(func.grad(c.loss))(X[0]), lambda Y, J, G: G[0]),
    "grad beside a constant": (lambda c, X: func.grad(lambda x: c.loss(x) + c.loss(x.detach()))(X[0]),
                               lambda Y, J, G: G[0]),
    "grad beside an inner one": (
        lambda c, X: func.grad(lambda x: c.loss(x) + func.grad(c.loss)(X[1]).sum())(X[0]), lambda Y, J, G: G[0]),
    "autograd": (lambda c, X: torch.autograd.grad(c.loss(x := required(X[0])), x)[0], lambda Y, J, G: G[0]),
    "autograd with a graph": (
        lambda c, X: torch.autograd.grad(c.loss(x := required(X[0])), x, create_graph=True)[0].detach(),
        lambda Y, J, G: G[0]),
    "autograd.functional.vjp": (lambda c, X: functional.vjp(c.loss, X[0])[1], lambda Y, J, G: G[0]),
    "autograd.functional.jacobian": (lambda c, X: functional.jacobian(c, X[0]), lambda Y, J, G: J[0]),
    "checkpoint": (lambda c, X: checkpointed(c, X[0], False), lambda Y, J, G: G[0]),
    "checkpoint, reentrant": (lambda c, X: checkpointed(c, X[0], True), lambda Y, J, G: G[0]),
    "no_grad": (lambda c, X: without(torch.no_grad, c, required(X[0])), lambda Y, J, G: Y[0]),
    "inference_mode": (lambda c, X: without(torch.inference_mode, c, required(X[0])), lambda Y, J, G: Y[0]),
    "a constant under jvp": (lambda c, X: func.jvp(lambda s: s * c(X[0]), (torch.ones(()),), (torch.ones(()),))[1],
                             lambda Y, J, G: Y[0]),
    "a constant in a level": (lambda c, X: in_a_level(func.grad(c.loss), X[0]), lambda Y, J, G: G[0]),
}


@pytest.mark.parametrize("name", CASES)
def test_right(name):
    case = CASES[name]()
    X = case.inputs(COUNT)
    Y = torch.stack([case(x) for x in X])
    J = torch.stack([differences(case, x) for x in X])
    G = weights(Y[0]) @ J
    for transform, (actual, right) in SERVED.items():
        close(actual(case, X), right(Y, J, G), transform)


def dual(function, x, mode=contextlib.nullcontext):
    with forward_ad.dual_level(), mode():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def dual_cotangent(case, x):
    x = required(x)
    y = case(x)
    return dual(lambda d_y: torch.autograd.grad(y, x, d_y)[0], torch.ones_like(y))


def twice(case, x):
    x = required(x)
    (d_x,) = torch.autograd.grad(case.loss(x), x, create_graph=True)
    return torch.autograd.grad(d_x.sum(), x)


# name: (what asks, the refusal)
REFUSED = {
    "jvp": (lambda c, x: func.jvp(c, (x,), (x,)), FORWARD_MODE),
    "jacfwd": (lambda c, x: func.jacfwd(c)(x), FORWARD_MODE),
    "hessian": (lambda c, x: func.hessian(c.loss)(x), FORWARD_MODE),
    "linearize": (lambda c, x: func.linearize(c, x), FORWARD_MODE),
    "jvp of vmap": (lambda c, x: func.jvp(func.vmap(c), (x[None],), (x[None],)), FORWARD_MODE),
    "vmap of jvp": (lambda c, x: func.vmap(lambda t: func.jvp(c, (x,), (t,)))(x[None]), FORWARD_MODE),
    "jvp of grad": (lambda c, x: func.jvp(func.grad(c.loss), (x,), (x,)), FORWARD_MODE),
    "jvp of vmap of grad": (lambda c, x: func.jvp(func.vmap(func.grad(c.loss)), (x[None],), (x[None],)), FORWARD_MODE),
    "grad of jvp": (lambda c, x: func.grad(lambda y: func.jvp(c.loss, (y,), (x,))[1])(x), FORWARD_MODE),
    "jvp of jvp": (lambda c, x: func.jvp(lambda y: func.jvp(c, (y,), (x,))[1], (x,), (x,)), FORWARD_MODE),
    "jvp of functionalize": (lambda c, x: func.jvp(func.functionalize(c), (x,), (x,)), FORWARD_MODE),
    "dual": (dual, FORWARD_MODE),
    "dual that requires gradients": (lambda c, x: dual(c, required(x)), FORWARD_MODE),
    "dual in no_grad": (lambda c, x: dual(c, x, torch.no_grad), FORWARD_MODE),
    "dual of vmap": (lambda c, x: dual(func.vmap(c), x[None]), FORWARD_MODE),
    "dual of checkpoint": (lambda c, x: dual(lambda y: checkpoint(c, y, use_reentrant=False), x), FORWARD_MODE),
    "dual gradient of the output": (dual_cotangent, FORWARD_MODE),
    "grad of grad": (lambda c, x: func.grad(lambda y: func.grad(c.loss)(y).sum())(x), SECOND),
    "jacrev of jacrev": (lambda c, x: func.jacrev(func.jacrev(c.loss))(x), SECOND),
    "vmap of jacrev of grad": (lambda c, x: func.vmap(func.jacrev(func.grad(c.loss)))(x[None]), SECOND),
    "grad of vmap of grad": (lambda c, x: func.grad(lambda y: func.vmap(func.grad(c.loss))(y).sum())(x[None]), SECOND),
    "autograd of grad": (lambda c, x: func.grad(c.loss)(y := required(x)).sum().backward(), SECOND),
    "autograd twice": (twice, SECOND),
    "autograd.functional.jvp": (lambda c, x: functional.jvp(c, x, x), SECOND),
    "autograd.functional.hvp": (lambda c, x: functional.hvp(c.loss, x, x), SECOND),
    "autograd.functional.vhp": (lambda c, x: functional.vhp(c.loss, x, x), SECOND),
    "autograd.functional.hessian": (lambda c, x: functional.hessian(c.loss, x), SECOND),
    "autograd.functional.jacobian, forward mode": (
        lambda c, x: functional.jacobian(c, x, strategy="forward-mode", vectorize=True), FORWARD_MODE),
    "autograd.functional.jacobian, vectorized": (lambda c, x: functional.jacobian(c, x, vectorize=True), VECTORIZED),
    "is_grads_batched": (lambda c, x: torch.autograd.grad(y := c(z := required(x)), z, y.detach()[None],
                                                          is_grads_batched=True), VECTORIZED),
}


def refusal(asks, *arguments):
    """The message of the refusal; the results, where there is none."""
    try:
        return asks(*arguments)
    except (NotImplementedError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    case = CASES[name]()
    for transform, (asks, message) in REFUSED.items():
        answer = refusal(asks, case, case.start)
        assert isinstance(answer, str) and re.match(message, answer), (transform, answer)


def right_or_refused(asks, expected, message, text):
    answer = refusal(asks)
    if isinstance(answer, str):
        assert re.match(message, answer), (text, answer)
    else:
        close(answer, expected(), text)


@pytest.mark.parametrize("name", CASES)
def test_each_tensor_alone(name):
    """Mapped, differentiated or dual, while the others are not; derivatives of its gradient by another."""
    case = CASES[name]()

    def loss(**changed):
        y = case.named(**changed)
        return (y * weights(y)).sum()

    for n, other in zip(case.names, case.names[1:] + case.names[:1]):
        start = case.tensors[n]
        rows, step = torch.stack([start, 1.1 * start]), 1e-5 * start

        def along(function):  # the derivative in the direction of the tensor itself
            return (function(start + step) - function(start - step)) / 2e-5

        def gradient(x):
            return torch.autograd.grad(loss(**{n: (x := required(x))}), x)[0]

        close(func.vmap(lambda x: case.named(**{n: x}))(rows), torch.stack([case.named(**{n: x}) for x in rows]), n)
        close((gradient(start) * start).sum(), along(lambda x: loss(**{n: x})), n)
        close(func.vmap(func.grad(lambda x: loss(**{n: x})))(rows), torch.stack([gradient(x) for x in rows]), n)
        right_or_refused(lambda: func.jvp(lambda x: case.named(**{n: x}), (start,), (start,))[1],
                         lambda: along(lambda x: case.named(**{n: x})), FORWARD_MODE, n)

        def of_the_other(x):  # the gradient by `other`, summed
            return func.grad(lambda y: loss(**{n: x, other: y}))(case.tensors[other]).sum()

        right_or_refused(lambda: (func.grad(of_the_other)(start) * start).sum(), lambda: along(of_the_other), SECOND,
                         (other, n))


@pytest.mark.parametrize("name", [*OPERATORS, "short_convolution"])
def test_mapped_offsets(name):
    offsets = torch.tensor([[0, 1, 1, 3], [0, 0, 2, 3]])
    case = (convolution if name == "short_convolution" else functools.partial(operator, name))(cu_seqlens=RAGGED)
    function, options = getattr(ht, name), case.options

    def loss(row, flat):
        o, state = function(**case.unflatten(flat), **{**options, "cu_seqlens": row})
        return o.sin().sum() + state.sin().sum()

    X, gradient = case.inputs(2), func.grad(loss, 1)
    close(func.vmap(loss, (0, None))(offsets, X[0]), torch.stack([loss(row, X[0]) for row in offsets]))
    close(func.vmap(loss)(offsets, X), torch.stack([loss(row, x) for row, x in zip(offsets, X)]))
    close(func.vmap(gradient)(offsets, X), torch.stack([gradient(row, x) for row, x in zip(offsets, X)]))
    close(func.vmap(gradient)(offsets[:0], X[:0]), X[:0])


# ---- what changes in place ----


def in_place(name):
    """A function of tensors by name, the tensors, and the names of those that it changes."""
    torch.manual_seed(0)
    if name == "short_convolution_step":
        tensors = {"x": draw((2, D)), "state": draw((5, D, W)), "weight": draw((D, W)), "bias": draw((D,))}
        return lambda t: ht.short_convolution_step(**t, indices=torch.tensor([3, 1])), tensors, ["state"]
    case = operator(name)
    tensors = {n: x[:, :1] if x.dim() > 2 else x for n, x in case.tensors.items()}
    tensors |= {"initial_state": draw((5, HV, K, V)), "out": draw((B, 1, HV, V))}
    parameters = inspect.signature(getattr(ht, name)).parameters
    options = {n: x for n, x in case.options.items() if n in parameters and n != "output_final_state"}
    rows = torch.tensor([3])
    return lambda t: getattr(ht, name)(**t, **options, ssm_state_indices=rows)[0], tensors, ["initial_state", "out"]


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name):
    function, tensors, written = in_place(name)
    expected = {n: x.clone() for n, x in tensors.items()}
    function(expected)
    assert not torch.equal(expected[written[0]], tensors[written[0]])

    def fresh():
        return {n: x.clone() for n, x in tensors.items()}

    # beside derivatives and maps of something else, and where none are asked for
    s = torch.tensor(2.0, dtype=torch.float64)
    for transform in (
        lambda f: func.grad(lambda s: (s * f()).sum())(s),
        lambda f: func.jvp(lambda s: s * f(), (s,), (s,)),
        lambda f: func.vmap(lambda s: s * f())(s[None]),
        lambda f: without(torch.no_grad, lambda _: f(), s),
        lambda f: without(torch.inference_mode, lambda _: f(), s),
    ):
        given = fresh()
        transform(lambda: function(given))
        for n in written:
            assert torch.equal(given[n], expected[n]), n

    # of each tensor: refused, and nothing has changed
    for n, start in tensors.items():
        given = fresh()

        def changed(x):
            return function({**given, n: x})

        for asks, message in (
            (lambda: func.jvp(changed, (given[n],), (start,)), f"{FORWARD_MODE}|{NO_GRADIENTS}"),
            (lambda: func.jacfwd(changed)(given[n]), f"{FORWARD_MODE}|{NO_GRADIENTS}"),
            (lambda: dual(changed, given[n]), FORWARD_MODE),
            (lambda: dual(changed, given[n], torch.no_grad), FORWARD_MODE),
            (lambda: func.grad(lambda x: changed(x).sum())(given[n]), NO_GRADIENTS),
            (lambda: func.vjp(changed, given[n]), NO_GRADIENTS),
            (lambda: func.jacrev(changed)(given[n]), NO_GRADIENTS),
            (lambda: func.hessian(lambda x: changed(x).sum())(given[n]), f"{FORWARD_MODE}|{NO_GRADIENTS}"),
            (lambda: func.vmap(func.grad(lambda x: changed(x).sum()))(given[n][None]), NO_GRADIENTS),
            (lambda: changed(required(given[n])), NO_GRADIENTS),
            (lambda: functional.jacobian(changed, given[n]), NO_GRADIENTS),
            (lambda: checkpoint(changed, required(given[n]), use_reentrant=False), NO_GRADIENTS),
            (lambda: func.vmap(changed)(given[n][None]), NO_VMAP),
            (lambda: func.vmap(changed)(given[n][None][:0]), NO_VMAP),
        ):
            answer = refusal(asks)
            assert isinstance(answer, str) and re.match(message, answer), (n, answer)
            assert all(torch.equal(x, tensors[m]) for m, x in given.items()), (n, message)
        with pytest.raises(RuntimeError, match="alias annotations"):  # by torch; it leaves no place for words of ours
            func.functionalize(changed)(given[n])
        assert all(torch.equal(x, tensors[m]) for m, x in given.items()), n
        answer = refusal(func.linearize, changed, given[n])  # which calls the function before it asks
        assert isinstance(answer, str) and re.match(FORWARD_MODE, answer), (n, answer)
