"""What the tests of models of transformers run; as a program, the same where stubs of other packages are importable."""

import functools
import importlib
import sys
import types

import torch

from headrace.integrations.transformers import MODELS, disable, enable, tiny_model

LINEAR_LAYERS = 2
PACKAGES = ("causal_conv1d", "fla", "triton", "mamba_ssm")  # that the models' functions may be bound to


def net_of(name):
    torch.manual_seed(0)
    return tiny_model(name, layers=LINEAR_LAYERS + 1).eval()


def random_tokens(*shape):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


def gradients_of(net):
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def logits_and_gradients(net, tokens, **arguments):
    net.zero_grad()
    output = net(input_ids=tokens, labels=tokens, **arguments)
    output.loss.backward()
    return output.logits.detach(), gradients_of(net)


# ---- decoding ----

def states_of(cache):
    """The states of the linear layers, by what they are."""
    linear = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    kinds = {"convolution": "conv_states", "operator": "recurrent_states"}
    return {f"{kind} {i}": getattr(layer, held)[0] for i, layer in enumerate(linear) for kind, held in kinds.items()}


def in_pieces(net, tokens, ends=(17, 18, 19, 23, 24), mask=None, grad=False):
    """(logits, last states, whether they stayed where they were in memory) of calls on a cache that end at `ends`."""
    logits, cache, begin, places = [], None, 0, None
    with torch.set_grad_enabled(grad):
        for end in ends:
            options = {} if mask is None else {"attention_mask": mask[:, :end]}
            output = net(input_ids=tokens[:, begin:end], past_key_values=cache, use_cache=True, **options)
            cache, begin = output.past_key_values, end
            logits.append(output.logits)
            now = {name: state.data_ptr() for name, state in states_of(cache).items()}
            assert places in (None, now), "states have moved"
            places = now
    return torch.cat(logits, 1), {name: state.clone() for name, state in states_of(cache).items()}


def generated(net, prompt, **options):
    """(tokens, logits of each) of greedy decoding."""
    output = net.generate(prompt, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True,
                          pad_token_id=0, **options)
    return output.sequences, torch.stack(output.logits, 1)


def run(net):
    """Training, prefill and decoding, of padded batches too: what must not depend on other packages."""
    tokens, mask = random_tokens(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[0, :5] = 0
    return {"training": logits_and_gradients(net, tokens),
            "decoding": in_pieces(net, tokens),
            "decoding of one": in_pieces(net, tokens[1:], ends=(1, 2, 3, 24)),
            "decoding with padding": in_pieces(net, tokens, mask=mask),
            "decoding with autograd": in_pieces(net, tokens, ends=(20, 21, 22), grad=True)[0].detach(),
            "generation": generated(net, tokens, attention_mask=mask)}


# ---- what an object refers to ----

def module_of(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def homes_of(net):
    """The modules of transformers.models that define the parts of a model."""
    names = {type(part).__module__ for part in net.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


def package_of(x):
    name = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None)
    return name.split(".")[0] if isinstance(name, str) else None


def inside(x):
    """(name, object) of what x holds, as far as it is a container or belongs to transformers."""
    if isinstance(x, dict):
        yield from ((str(key), value) for key, value in dict.items(x))  # of lazy ones what has been loaded
    elif isinstance(x, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", value) for i, value in enumerate(x))
    elif isinstance(x, types.FunctionType):
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or ()):
            if cell.cell_contents is not x:
                yield name, cell.cell_contents
        yield from (("defaults", x.__defaults__), ("keyword defaults", x.__kwdefaults__), ("attributes", vars(x)))
    elif isinstance(x, types.MethodType):
        yield from (("function", x.__func__), ("self", x.__self__))
    elif isinstance(x, functools.partial):
        yield from (("function", x.func), ("arguments", x.args), ("keywords", x.keywords))
    elif isinstance(x, (staticmethod, classmethod)):
        yield "function", x.__func__
    elif isinstance(x, property):
        yield from (("get", x.fget), ("set", x.fset))
    elif isinstance(x, type) and package_of(x) == "transformers":
        yield from (("attributes", dict(vars(x))), ("bases", x.__bases__))
    elif isinstance(x, torch.nn.Module) or (package_of(type(x)) == "transformers" and hasattr(x, "__dict__")):
        yield from (("attributes", vars(x)), ("class", type(x)))


def foreign(root):
    """Where objects of PACKAGES stand below `root`, a module or a model: {path: object}.

    What stands in headrace is not looked into: its functions keep the model's own for other devices.
    """
    found, seen = {}, set()
    todo = [("", vars(root) if isinstance(root, types.ModuleType) else root)]
    while todo:
        path, x = todo.pop()
        if id(x) in seen or isinstance(x, (str, bytes, int, float, torch.Tensor, type(None))):
            continue
        seen.add(id(x))
        if package_of(x) in PACKAGES or package_of(type(x)) in PACKAGES:
            found[path] = x
        elif "headrace" not in (package_of(x), package_of(type(x))):
            todo += [(f"{path}.{name}", value) for name, value in inside(x)]
    return found


def main(stubs, path):
    """Writes what run() gives and what is bound to stubs, of models made before and after enable()."""
    importlib.import_module("torch._dynamo")  # which needs a real triton if it finds one
    sys.path.insert(0, stubs)
    import transformers.utils.import_utils as available

    available.is_torch_cuda_available = lambda: True  # without which transformers takes no package of these for there
    assert available.is_causal_conv1d_available() and available.is_flash_linear_attention_available()
    results = {}
    for name in MODELS:
        module, net = module_of(name), net_of(name)
        result = results[name] = {"without": sorted(foreign(module))}
        before = dict(vars(module))
        enable([name])
        later = net_of(name)
        assert module in homes_of(net)
        result["with"] = [path for x in (*homes_of(net), net, later) for path in foreign(x)]
        try:
            result["existing"], result["later"] = run(net), run(later)
        except Exception as error:  # the others' results are wanted too
            result["error"] = repr(error)
        enable([name])
        disable()
        result["changed"] = [key for key, value in vars(module).items() if before.get(key) is not value]
    torch.save(results, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
