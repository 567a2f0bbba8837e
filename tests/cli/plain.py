"""safetensors files and the operators' recurrence in plain Python, apart from all code of the library."""
import json
import math
import random
import struct

CODES = {"F64": "d", "F32": "f", "I32": "i", "I64": "q"}


def write_file(path, tensors, metadata=None):
    """tensors: name -> (dtype, shape, row-major values)."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, values) in tensors.items():
        packed = struct.pack(f"<{len(values)}{CODES[dtype]}", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def decode(dtype, data):
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, len(data), 2)]
    code = {**CODES, "F16": "e"}[dtype]
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def read_file(path):
    """(name -> (dtype, shape, values), metadata)."""
    data = path.read_bytes()
    size, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = (entry["dtype"], entry["shape"], decode(entry["dtype"], data[begin:end]))
    return tensors, metadata


def recurrence(op, tensors, scale=None, reverse=False, l2norm=False, state="initial_state"):
    """(o, final states), row-major lists: docs/math.md 2, one value head at a time, batches of equal length."""
    (B, T, H, K), (HV, V) = tensors["q"][1], tensors["v"][1][2:]
    scale = K ** -0.5 if scale is None else scale
    o, states = [0.0] * (B * T * HV * V), []
    values = {name: tensor[2] for name, tensor in tensors.items()}

    def row(name, b, t, h, heads, size):
        begin = ((b * T + t) * heads + h) * size
        x = values[name][begin:begin + size]
        norm = math.sqrt(sum(c * c for c in x) + 1e-6) if l2norm and name in "qkp" else 1.0
        return [c / norm for c in x]

    for b in range(B):
        for h in range(HV):
            S = [[0.0] * V for _ in range(K)]
            if state in values:
                S = [values[state][((b * HV + h) * K + c) * V:][:V] for c in range(K)]
            for t in range(T - 1, -1, -1) if reverse else range(T):
                q, k = (row(name, b, t, h // (HV // H), H, K) for name in "qk")
                v = row("v", b, t, h, HV, V)
                decay = [values["g_gamma"][h] if "g_gamma" in values else 0.0] * K
                if "g" in values:
                    per_channel = len(tensors["g"][1]) == 4
                    g = row("g", b, t, h, HV, K) if per_channel else row("g", b, t, h, HV, 1) * K
                    decay = [x + y for x, y in zip(decay, g)]
                before = S
                S = [[math.exp(decay[c]) * x for x in S[c]] for c in range(K)]
                if op in ("delta_rule", "gated_delta_rule", "comba", "kda"):
                    e, seen = (row("p", b, t, h // (HV // H), H, K), before) if op == "comba" else (k, S)
                    beta = values["beta"][(b * T + t) * HV + h] if "beta" in values else 1.0
                    v = [beta * (v[i] - sum(e[c] * seen[c][i] for c in range(K))) for i in range(V)]
                S = [[S[c][i] + k[c] * v[i] for i in range(V)] for c in range(K)]
                for i in range(V):
                    o[((b * T + t) * HV + h) * V + i] = scale * sum(q[c] * S[c][i] for c in range(K))
            states += [x for line in S for x in line]
    return o, states


def error(values, reference):
    assert len(values) == len(reference), (len(values), len(reference))
    difference = math.sqrt(sum((x - y) ** 2 for x, y in zip(values, reference)))
    return difference / max(math.sqrt(sum(y * y for y in reference)), 1e-30)


GATES = {"linear_attention": "", "retention": "h", "simple_gla": "sh", "gla": "c", "delta_rule": "",
         "gated_delta_rule": "s", "comba": "sh", "kda": "c"}


def example(op, dtype="F64", B=2, T=5, H=1, HV=2, K=3, V=4):
    """Tensors as another tool might write them."""
    rng = random.Random(op)

    def draw(shape, low=-1.0, high=1.0):
        return dtype, list(shape), [rng.uniform(low, high) for _ in range(math.prod(shape))]

    tensors = {"q": draw((B, T, H, K)), "k": draw((B, T, H, K), -0.5, 0.5), "v": draw((B, T, HV, V)),
               "initial_state": draw((B, HV, K, V))}
    if "s" in GATES[op]:
        tensors["g"] = draw((B, T, HV), -1, 0)
    if "c" in GATES[op]:
        tensors["g"] = draw((B, T, HV, K), -1, 0)
    if "h" in GATES[op]:
        tensors["g_gamma"] = draw((HV,), -1, 0)
    if op in ("delta_rule", "gated_delta_rule", "comba", "kda"):
        tensors["beta"] = draw((B, T, HV), 0, 1)
    if op == "comba":
        tensors["p"] = draw((B, T, H, K), -0.5, 0.5)
    return tensors
