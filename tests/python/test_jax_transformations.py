"""headrace.jax under transformations of JAX in any order: no gradient depends on what was traced before it.

JAX keeps traces of a function and uses them again, so a gradient can be wrong only after others. Here each operator
goes through sequences in which every ordered pair of transformations stands. Within a sequence the caches stay; every
sequence starts with fresh ones, since its scale, which is static, is its own.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import headrace.jax as hj

OPERATORS = {"simple_gla": "g", "gla": "gk", "gated_delta_rule": "g beta", "comba": "p g beta", "kda": "gk beta"}


def tensors_of(op, dtype=jnp.float32):
    draw = np.random.default_rng(0)
    B, T, H, K, V = 1, 5, 2, 4, 6
    tensors = {name: draw.standard_normal((B, T, H, K)) for name in ("q", "k", "p")}
    tensors |= {"v": draw.standard_normal((B, T, H, V)), "g": -draw.random((B, T, H)), "gk": -draw.random((B, T, H, K)),
                "beta": draw.random((B, T, H)), "initial_state": draw.standard_normal((B, H, K, V))}
    names = ["q", "k", "v", "initial_state", *OPERATORS[op].split()]
    return {"g" if name == "gk" else name: jnp.asarray(tensors[name], dtype) for name in names}


def operator(op, scale):
    """{name: the sum of this output} of tensors by name, whatever the scale."""
    def sums(tensors):
        o, state = hj.attention(op, **tensors, scale=scale, output_final_state=True)
        return {"o": jnp.sum(o) / scale, "final_state": jnp.sum(state)}
    return sums


class Call:
    """One call of an operator: loss(x) and sums(x), its outputs' sums, of a value `x` in the place of tensor `name`."""

    def __init__(self, op, sums, tensors, name, scale):
        self.op, self.tensors, self.name, self.scale, self.x = op, tensors, name, scale, tensors[name]
        self.sums = lambda x: sums({**tensors, name: x})
        self.loss = lambda x: sum(self.sums(x).values())
        self.whole = lambda tensors: sum(sums(tensors).values())
        self.zero = jnp.zeros((), self.x.dtype)
        self.two = jnp.stack([self.x, self.x / 2])

    def step(self, x):
        tensors = {**self.tensors, self.name: x}
        o, states = hj.step(self.op, states=tensors.pop("initial_state"), scale=self.scale, **tensors)
        return jnp.sum(o) + jnp.sum(states)


def grad_of_scan(call, body):
    twice = lambda x: jax.lax.scan(lambda total, _: (total + body(x), None), call.zero, length=2)[0]  # noqa: E731
    return jax.grad(twice)(call.x) / 2


def grad_of_cond(call):
    branch = lambda x: jax.lax.cond(x.ravel()[0] < 100, call.loss, lambda x: call.zero, x)  # noqa: E731
    return jax.grad(branch)(call.x)


def grad_of_custom_vjp(call):
    function = jax.custom_vjp(call.loss)
    function.defvjp(lambda x: jax.vjp(call.loss, x), lambda pullback, d: pullback(d))
    return jax.grad(function)(call.x)


def grad_of_shard_map(call):
    """Every device has some of the heads."""
    axes = {name: 1 if name == "initial_state" else 2 for name in call.tensors}
    specs = {name: PartitionSpec(*[None] * axis, "devices") for name, axis in axes.items()}
    one = lambda tensors: call.whole(tensors)[None]  # noqa: E731
    mapped = jax.shard_map(one, mesh=Mesh(jax.devices(), ("devices",)), in_specs=(specs,),
                           out_specs=PartitionSpec("devices"))
    return jax.grad(lambda x: jnp.sum(mapped({**call.tensors, call.name: x})))(call.x)


def refused(error, message, function):
    with pytest.raises(error, match=message):
        function()


def refused_jvp(call):
    """Forward mode: an error, at the latest where it is compiled."""
    with jax.ensure_compile_time_eval():
        refused(TypeError, "forward-mode", lambda: jax.jvp(call.loss, (call.x,), (call.x,)))


def refused_second_derivative(call):
    first = jax.grad(lambda x: jnp.sin(call.loss(x)))
    refused(ValueError, "headrace_backward` cannot be differentiated",
            lambda: jax.grad(lambda x: first(x).sum())(call.x))


def refused_gradient_of_step(call):
    refused(ValueError, "headrace_step` cannot be differentiated", lambda: jax.grad(call.step)(call.x))


def grad_of_nothing(call):
    none = jnp.zeros((0, *call.x.shape), call.x.dtype)
    assert jax.grad(lambda xs: jax.vmap(call.loss)(xs).sum())(none).shape == none.shape


# Each gives the gradient of call.loss at call.x, or None.
TRANSFORMATIONS = {
    "grad": lambda call: jax.grad(call.loss)(call.x),
    "grad by all": lambda call: jax.grad(call.whole)(call.tensors)[call.name],
    "jit of grad": lambda call: jax.jit(jax.grad(call.loss))(call.x),
    "checkpoint": lambda call: jax.grad(jax.checkpoint(call.loss))(call.x),
    "checkpoint that saves": lambda call: jax.grad(
        jax.checkpoint(call.loss, policy=jax.checkpoint_policies.everything_saveable))(call.x),
    "vmap of grad": lambda call: jax.vmap(jax.grad(call.loss))(call.two)[0],
    "grad of vmap": lambda call: jax.grad(lambda xs: jax.vmap(call.loss)(xs).sum())(call.two)[0],
    "jacrev": lambda call: sum(jax.jacrev(call.sums)(call.x).values()),
    "scan": lambda call: grad_of_scan(call, call.loss),
    "remat in scan": lambda call: grad_of_scan(call, jax.checkpoint(call.loss)),
    "fori_loop": lambda call: jax.grad(
        lambda x: jax.lax.fori_loop(0, 2, lambda i, total: total + call.loss(x), call.zero))(call.x) / 2,
    "cond": grad_of_cond,
    "vjp": lambda call: jax.vjp(call.loss, call.x)[1](call.zero + 1)[0],
    "linearize": lambda call: jax.linear_transpose(jax.linearize(call.loss, call.x)[1], call.x)(call.zero + 1)[0],
    "custom_vjp": grad_of_custom_vjp,
    "shard_map": grad_of_shard_map,
    "of one output each": lambda call: sum(jax.grad(lambda x: call.sums(x)[name])(call.x)
                                           for name in ("o", "final_state")),
    "make_jaxpr": lambda call: jax.make_jaxpr(jax.grad(call.loss))(call.x) and None,
    "refused jvp": refused_jvp,
    "refused second derivative": refused_second_derivative,
    "refused gradient of step": refused_gradient_of_step,
    "vmap of nothing": grad_of_nothing,
}

SOME = ("grad", "checkpoint", "vmap of grad", "remat in scan", "cond", "shard_map", "refused jvp",
        "refused gradient of step")


def sequences(kinds, draw, length=9):
    """Lists of `length` kinds in which every ordered pair of kinds stands, side by side."""
    following = {kind: list(draw.permutation(kinds)) for kind in kinds}
    trail, path = [], [kinds[0]]
    while path:  # Hierholzer: a closed trail over the edges of the complete graph, loops included
        if following[path[-1]]:
            path.append(following[path[-1]].pop())
        else:
            trail.append(path.pop())
    assert len(trail) == len(kinds) ** 2 + 1
    return [trail[i:i + length] for i in range(0, len(trail) - 1, length - 1)]


def wrong_gradients(op, kinds, eager=False, dtype=jnp.float32):
    """What differs from the gradients of cleared caches, as text; every other sequence is of a function in jax.jit."""
    tensors = tensors_of(op, dtype)
    jax.clear_caches()
    expected = jax.jit(jax.grad(Call(op, operator(op, 1.0), tensors, "q", 1.0).whole))(tensors)
    assert all(jnp.abs(x).max() > 0.01 for x in expected.values())
    jax.clear_caches()
    draw = np.random.default_rng(0)
    plan = []
    for i, sequence in enumerate(sequences(list(kinds), draw)):
        names = draw.choice(list(tensors), 2, replace=False)  # few, so that one comes back after the other
        plan.append((1 + (i + 1) / 1024, i % 2 == 1, [(str(kind), str(draw.choice(names))) for kind in sequence]))

    def run():
        results = []
        for scale, jit, sequence in plan:
            sums = jax.jit(operator(op, scale)) if jit else operator(op, scale)
            results.append([TRANSFORMATIONS[kind](Call(op, sums, tensors, name, scale)) for kind, name in sequence])
        return results

    wrong = []
    bar = 1e-4 if dtype == jnp.float32 else 1e-11
    for (_, jit, sequence), gradients in zip(plan, run() if eager else jax.jit(run)()):
        for i, ((kind, name), gradient) in enumerate(zip(sequence, gradients)):
            if gradient is not None and not np.allclose(gradient, expected[name], rtol=bar, atol=bar):
                before = ", ".join(f"{kind} by {name}" for kind, name in sequence[:i])
                wrong.append(f"{'in jit: ' if jit else ''}{kind} by {name}, after {before or 'nothing'}")
    return wrong


@pytest.mark.parametrize("op", OPERATORS)
def test_every_transformation_after_every_other(op):
    """All of them with the first operator, some with the others, which share all that depends on traces."""
    with jax.enable_x64(op == "kda"):
        assert not wrong_gradients(op, TRANSFORMATIONS if op == "simple_gla" else SOME,
                                   dtype=jnp.float64 if op == "kda" else jnp.float32)


def test_outside_of_jit():
    assert not wrong_gradients("simple_gla", ("grad", "jit of grad", "checkpoint", "refused jvp"), eager=True)


def test_on_two_devices():
    """shard_map after and before some others, each device with half of the heads."""
    code = """if True:
        import jax
        from test_jax_transformations import wrong_gradients
        assert len(jax.devices()) == 2
        wrong = wrong_gradients("gated_delta_rule", ("shard_map", "grad", "checkpoint", "vmap of grad", "refused jvp"))
        assert not wrong, wrong
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu",
                   "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_gradient_after_that_of_a_checkpoint():
    """The shortest sequence that has gone wrong: the last gradient was zero, of a function in jax.jit or not."""
    tensors = tensors_of("simple_gla")
    for jit in (False, True):
        function = operator("simple_gla", 2.0 + jit)
        function = jax.jit(function) if jit else function
        loss = lambda q, g: function({**tensors, "q": q, "g": g})["o"]  # noqa: E731, B023
        jax.grad(jax.checkpoint(loss))(tensors["q"], tensors["g"])
        jax.grad(loss, 1)(tensors["q"], tensors["g"])
        assert jnp.abs(jax.grad(loss)(tensors["q"], tensors["g"])).max() > 0.01


WRAPPED = {
    "alone": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])).sum(),
    "scan": lambda f: lambda x: jax.lax.scan(lambda total, _: (total + f(x), None), 0.0, length=2)[0],
    "while_loop": lambda f: lambda x: jax.lax.while_loop(lambda c: c[1] < 2, lambda c: (c[0] + f(x), c[1] + 1),
                                                         (0.0, 0))[0],
    "cond": lambda f: lambda x: jax.lax.cond(x.ravel()[0] < 100, f, lambda x: 0.0, x),
}
FORWARD = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "vmap of jvp": lambda f, x: jax.vmap(lambda t: jax.jvp(f, (x,), (t,)))(jnp.stack([x, x])),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
}
REVERSE = {
    "grad": lambda f, x: jax.grad(f)(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(f))(x),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(f))(x[None]),
    "jacrev": lambda f, x: jax.jacrev(f)(x),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_forward_mode_is_refused(wrapped):
    tensors = tensors_of("simple_gla")
    loss = WRAPPED[wrapped](Call("simple_gla", operator("simple_gla", 1.0), tensors, "q", 1.0).loss)
    for name, derivative in FORWARD.items():
        with pytest.raises((TypeError, ValueError), match="forward-mode|cannot be differentiated|does not work for"):
            derivative(loss, tensors["q"])
            pytest.fail(name)


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_derivatives_of_a_step_are_refused(wrapped):
    """By every argument, in forward and in reverse mode."""
    tensors = tensors_of("kda")
    for name in tensors:
        step = WRAPPED[wrapped](Call("kda", None, tensors, name, 1.0).step)
        for kind, derivative in (FORWARD | REVERSE).items() if name == "q" else [("grad", REVERSE["grad"])]:
            with pytest.raises(ValueError, match="headrace_step` cannot be differentiated"):
                derivative(step, tensors[name])
                pytest.fail(f"{kind} by {name}")


@pytest.mark.parametrize("offsets", [False, True], ids=["dense", "offsets mapped"])
def test_vmap_of_nothing(offsets):
    """No elements: results and gradients without elements, and zero by what is not mapped; a step too."""
    tensors = tensors_of("kda")
    if offsets:
        tensors["cu_seqlens"] = jnp.array([0, 5])
    none = {name: jnp.zeros((0, *x.shape), x.dtype) for name, x in tensors.items()}

    def outputs(tensors):
        return hj.attention("kda", **tensors, output_final_state=True)

    for wrap in (lambda f: f, jax.jit):
        mapped = wrap(jax.vmap(outputs))(none)
        assert [(x.shape, x.dtype) for x in mapped] == [((0, *x.shape), x.dtype) for x in outputs(tensors)]
        floats = {name: x for name, x in none.items() if name != "cu_seqlens"}
        gradients = wrap(jax.grad(lambda x: sum(y.sum() for y in jax.vmap(outputs)({**none, **x}))))(floats)
        assert {name: x.shape for name, x in gradients.items()} == {name: x.shape for name, x in floats.items()}
        other = {name: None if name == "q" else 0 for name in tensors}
        total = lambda q: jax.vmap(outputs, (other,))({**none, "q": q})[0].sum()  # noqa: E731, B023
        np.testing.assert_array_equal(wrap(jax.grad(total))(tensors["q"]), jnp.zeros_like(tensors["q"]))
        o, states = wrap(jax.vmap(lambda initial_state, **t: hj.step("kda", states=initial_state, **t)))(**none)
        assert o.shape == none["v"].shape and states.shape == none["initial_state"].shape
        twice = wrap(jax.vmap(jax.vmap(outputs)))({name: x[None] for name, x in none.items()})
        assert twice[0].shape == (1, *none["v"].shape)
