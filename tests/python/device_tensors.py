"""Tensors of PyTorch in the memory of a CUDA device, for a PyTorch without CUDA: what headrace.torch sees is the same.

A DeviceTensor says that it lies on cuda:0, and DLPack's exchange interface gives its address, as a tensor of PyTorch
does. Its memory comes from a CUDA runtime library that ctypes loads: the stand-in of tests/ptx. PyTorch's own operators
on it run on the CPU, on copies; operators of headrace get the tensors. What makes a host wait for a device is refused.
"""

import ctypes
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from headrace import _core

aten = torch.ops.aten
# Operators that read values of a device's tensors, or whose results depend on them.
SYNCHRONISING = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default,
                 aten.item.default, aten.masked_select.default, aten.unique_dim.default, aten._unique2.default}


class Runtime:
    """The CUDA runtime: memory, streams, graphs. PyTorch's current stream of each device is `streams`."""

    def __init__(self):
        self.library = ctypes.CDLL("libcudart.so.13")
        devices = ctypes.c_int()
        self.call("cudaGetDeviceCount", ctypes.byref(devices))
        self.streams = [self.new_stream(device) for device in range(devices.value)]
        self.unused, self.is_capturing = [], False
        self.asked = []  # the devices of which the library wanted the stream

    def call(self, name, *arguments, expected=0):
        error = getattr(self.library, name)(*arguments)
        assert error == expected, f"{name}: {error}"

    def on(self, device):
        self.call("cudaSetDevice", device)

    def current_device(self):
        device = ctypes.c_int()
        self.call("cudaGetDevice", ctypes.byref(device))
        return device.value

    def new_stream(self, device=0):
        stream = ctypes.c_void_p()
        self.on(device)
        self.call("cudaStreamCreateWithFlags", ctypes.byref(stream), 1)  # does not wait for the default stream
        self.on(0)
        return stream

    def current_stream(self, device):
        self.asked.append(device)
        return self.streams[device].value

    @contextmanager
    def stream(self, stream, device=0):
        before, self.streams[device] = self.streams[device], stream
        try:
            yield
        finally:
            self.streams[device] = before

    def allocate(self, size, device):
        address = ctypes.c_void_p()
        self.on(device)
        self.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        self.on(0)
        return address.value

    def wait(self):
        for device in range(len(self.streams)):
            self.on(device)
            self.call("cudaDeviceSynchronize")
        self.on(0)

    def copy(self, to, source, size, device):
        self.on(device)
        self.call("cudaMemcpy", ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(size), 4)
        self.on(0)

    def free(self, address):
        """Now or, in a capture, with the first that is freed after it."""
        self.unused.append(address)
        if not self.is_capturing:
            self.wait()
            while self.unused:
                self.library.cudaFree(ctypes.c_void_p(self.unused.pop()))

    def is_busy(self, stream):
        """Whether work of the stream is still to be done."""
        return self.library.cudaStreamQuery(stream) == 600

    @contextmanager
    def captured(self, stream):
        """A graph of what is queued on the stream: its launch, once the context is left, is a function."""
        graph, run = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cudaStreamBeginCapture", stream, 2)

        def launch():
            self.call("cudaGraphLaunch", run, stream)

        self.is_capturing = True
        try:
            yield launch
        finally:
            self.is_capturing = False
            self.call("cudaStreamEndCapture", stream, ctypes.byref(graph))
        self.call("cudaGraphInstantiate", ctypes.byref(run), graph, ctypes.c_ulonglong(0))


def know_devices():
    """Autograd of a PyTorch without CUDA takes tensors of its devices as inputs, and asks nothing about them."""
    registry = (ctypes.c_void_p * 15).in_dll(ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so"),
                                             "_ZN3c104impl26device_guard_impl_registryE")
    registry[1] = registry[1] or registry[14]  # CUDA's is that of meta, which has nothing to do


def gradients(outputs, d_outputs, wanted):
    """As torch.autograd.grad, node by node, since PyTorch's engine takes its devices for granted."""
    edges = [torch.autograd.graph.get_gradient_edge(x) for x in outputs]
    targets = [torch.autograd.graph.get_gradient_edge(x).node for x in wanted]
    order, seen = [], set()

    def visit(node):
        if node is not None and node not in seen:
            seen.add(node)
            for following, _ in node.next_functions:
                visit(following)
            order.append(node)

    for edge in edges:
        visit(edge.node)
    arrived = {node: [None] * len(node._input_metadata) for node in order}

    def add(node, number, value):
        if node is not None and value is not None:
            taken = node._input_metadata[number]
            value = value.sum_to_size(taken.shape).to(taken.dtype)
            before = arrived[node][number]
            arrived[node][number] = value if before is None else before + value

    with torch.no_grad():
        for edge, d in zip(edges, d_outputs):
            add(edge.node, edge.output_nr, d)
        for node in reversed(order):
            if node.next_functions and any(x is not None for x in arrived[node]):
                following = [edge for edge in node.next_functions if edge[0] is not None]
                if hasattr(node, "needs_input_grad"):  # of Python, which has results for other arguments too
                    values = node.apply(*arrived[node])
                    values = values if isinstance(values, tuple) else (values,)
                    values = [value for value, needed in zip(values, node.needs_input_grad) if needed]
                else:
                    values = node(*arrived[node])
                    values = values if isinstance(values, tuple) else (values,)
                    values = [value for value, edge in zip(values, node.next_functions) if edge[0] is not None]
                for (target, number), value in zip(following, values):
                    add(target, number, value)
    return [arrived[node][0] if node in arrived else None for node in targets]


def moved(layer, put):
    """The layer with its tensors put on a device: a PyTorch without CUDA has no other way."""
    for module in layer.modules():
        for name, x in module._parameters.items():
            module._parameters[name] = x if x is None else torch.nn.Parameter(put(x.detach()))
        for name, x in module._buffers.items():
            module._buffers[name] = x if x is None else put(x)
    return layer


class Memory:
    def __init__(self, runtime, size, device):
        self.runtime, self.size, self.device = runtime, size, device
        self.address = runtime.allocate(size, device)

    def __del__(self):
        self.runtime.free(self.address)


class DeviceTensor(torch.Tensor):
    """A view of `memory` with the sizes, strides, offset and dtype of `like`, a tensor on meta."""

    @staticmethod
    def __new__(cls, like, memory):
        self = torch.Tensor._make_subclass(cls, like, dispatch_device=True,
                                           device_for_backend_keys=torch.device("cuda", memory.device))
        self.like, self.memory = like, memory
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def address(self):
        return self.memory.address + self.like.storage_offset() * self.like.element_size()

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        options = options or {}
        if may_wait[0] and function in WAITING:
            return _with_the_host(function, arguments, options)
        if function is torch.ops.prim.device.default:
            return torch.device("cuda", arguments[0].memory.device)
        assert function not in SYNCHRONISING, f"{function} makes the host wait for a device"
        if function.namespace == "headrace":
            return function._op_dk(torch._C.DispatchKey.CUDA, *arguments, **options)
        return _on_host(function, arguments, options)

    def __repr__(self):
        return f"DeviceTensor({self.dtype}, {list(self.shape)}, cuda:{self.memory.device})"


def _runs(x):
    """(offset, count) of the contiguous stretches of x, in elements, in the order of its elements."""
    offsets = torch.zeros(x.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride())):
        offsets += (torch.arange(size) * stride).reshape([-1 if d == dim else 1 for d in range(x.dim())])
    offsets = offsets.flatten()
    begins = [0, *(1 + (offsets[1:] - offsets[:-1] != 1).nonzero().flatten()).tolist(), len(offsets)]
    return [(int(offsets[first]), last - first) for first, last in zip(begins, begins[1:])] if len(offsets) else []


def _exchange(x, host, is_upload):
    """The elements of x, one way or the other, and nothing between them. host: contiguous, on the CPU."""
    place, size, runtime = host.data_ptr(), x.like.element_size(), x.memory.runtime
    runtime.wait()
    for offset, count in _runs(x.like):
        pair = (x.address + offset * size, place) if is_upload else (place, x.address + offset * size)
        runtime.copy(*pair, count * size, x.memory.device)
        place += count * size
    runtime.wait()


def _new(like, device, runtime):
    """A tensor with memory that nobody has written."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride()))
    return DeviceTensor(like, Memory(runtime, span * like.element_size() if like.numel() else 0, device))


def upload(x, runtime, device=0):
    """x on the device, with its strides."""
    result = _new(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), device, runtime)
    _exchange(result, x.detach().contiguous(), True)
    return result


def download(x):
    """The values of x, once everything is done that was queued."""
    host = torch.empty(x.shape, dtype=x.dtype)
    _exchange(x, host, False)
    return host


class _Nowhere:
    """Addresses of a device that is not there, each of its own."""

    last = 0

    def allocate(self, size, device):
        self.last += 1 << 20
        return self.last

    def free(self, address):
        pass


_nowhere = _Nowhere()


def without_memory(x):
    """A tensor like x of a device that is not there, whose current stream is the default one."""
    know_devices()
    _core.set_current_stream(lambda device: 0)
    return DeviceTensor(torch.empty(x.shape, dtype=x.dtype, device="meta"), Memory(_nowhere, 0, 0))


# Of calls across ranks, whose messages travel through the memory of hosts: true where that is expected.
may_wait = [False]
WAITING = {aten._to_copy.default, aten.to.dtype_layout, aten.copy_.default, aten.index.Tensor, aten.index_put_.default, aten.equal.default,
           aten._local_scalar_dense.default, aten.any.default, aten.is_nonzero.default}


def _with_the_host(function, arguments, options):
    """The operator on copies on the CPU; what is not asked for there goes to the device."""
    first = arguments[0]
    if function is aten.copy_.default:  # of which nothing is read but the source
        source = download(arguments[1]) if isinstance(arguments[1], DeviceTensor) else arguments[1]
        if not isinstance(first, DeviceTensor):
            return first.copy_(source)
        _exchange(first, torch.empty(first.shape, dtype=first.dtype).copy_(source), True)
        return first
    given = tree_map_only(DeviceTensor, download, (arguments, options))
    result = function(*given[0], **given[1])
    if function is aten.index_put_.default:
        _exchange(first, result.contiguous(), True)
        return first
    here = options.get("device") is not None and torch.device(options["device"]).type == "cpu"
    if not isinstance(result, torch.Tensor) or here or not isinstance(first, DeviceTensor):
        return result
    return upload(result, first.memory.runtime, first.memory.device)


_EMPTY = ("empty_like", "new_empty", "new_empty_strided")
_OVERWRITING = ("copy_", "zero_", "fill_")


def _on_host(function, arguments, options):
    """PyTorch's operator: views see the same memory, others compute on copies on the CPU."""
    tensors = [x for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)]
    first = next(x for x in tensors if isinstance(x, DeviceTensor))
    for x in tensors:
        assert isinstance(x, DeviceTensor) or x.dim() == 0, f"{function} of tensors on several devices"
    device = options.get("device")
    assert device is None or torch.device(device).type == "cuda", f"{function} to the host"
    runtime, number = first.memory.runtime, first.memory.device
    on_meta = function.overloadpacket.__name__ in _EMPTY
    converts = function.overloadpacket is aten.to  # a view of nothing, but where nothing changes
    if on_meta or not converts and any(x.alias_info and not x.alias_info.is_write for x in function._schema.returns):
        options = options | ({"device": "meta"} if on_meta else {})
        seen = tree_map_only(DeviceTensor, lambda x: x.like, (arguments, options))
        made = function(*seen[0], **seen[1])
        return tree_map_only(torch.Tensor, lambda x: _new(x, number, runtime) if on_meta
                             else DeviceTensor(x, first.memory), made)
    options = options | ({"device": "cpu"} if device is not None else {})
    written = [(arguments[place] if place < len(arguments) else options[parameter.name], parameter.is_out)
               for place, parameter in enumerate(function._schema.arguments)
               if parameter.alias_info and parameter.alias_info.is_write]
    fresh = {id(x) for x, is_out in written if is_out or function.overloadpacket.__name__ in _OVERWRITING}
    copies = {id(x): torch.empty(x.shape, dtype=x.dtype) if id(x) in fresh else download(x)
              for x in tensors if isinstance(x, DeviceTensor)}
    given = tree_map_only(DeviceTensor, lambda x: copies[id(x)], (arguments, options))
    made = function(*given[0], **given[1])
    for x, _ in written:
        _exchange(x, copies[id(x)].contiguous(), True)
    changed = {id(copies[id(x)]): x for x, _ in written}
    return tree_map_only(torch.Tensor, lambda x: changed[id(x)] if id(x) in changed else upload(x, runtime, number),
                         made)


# ---- DLPack's exchange interface ----

class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("rank", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("offset", ctypes.c_uint64)]


_TENSOR_OF = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Tensor))


class _Interface(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p),
                ("owning", ctypes.c_void_p * 3), ("tensor_of", _TENSOR_OF)]


_CODES = {torch.float64: 2, torch.float32: 2, torch.float16: 2, torch.bfloat16: 4, torch.int32: 0, torch.int64: 0}
_CUDA = 2


@_TENSOR_OF
def _tensor_of(x, target):
    sizes = ctypes.c_int64 * max(x.dim(), 1)
    x.sizes = sizes(*x.shape), sizes(*x.like.stride())
    shape, strides = map(ctypes.addressof, x.sizes)
    target[0] = _Tensor(x.address, _CUDA, x.memory.device, x.dim(), _CODES[x.dtype], 8 * x.like.element_size(), 1,
                        shape, strides, 0)
    return 0


_interface = _Interface(1, 3, None, (ctypes.c_void_p * 3)(), _tensor_of)
_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype, _capsule_of.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_NAME = b"dlpack_exchange_api"
DeviceTensor.__dlpack_c_exchange_api__ = _capsule_of(ctypes.addressof(_interface), _NAME, None)
