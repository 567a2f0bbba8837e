#!/usr/bin/env python3
"""What ptxas makes of src/cuda/kernels: registers, spills, serialized products, blocks, instructions; needs no GPU.

usage: kernel_table.py [--check] [--update docs/cuda-kernels.md] [--instructions sm_80] [--jobs 2]
Prints the tables; --update puts them into the document, behind its text. --check compares with the limits below and
exits with 1 where one is passed. nvcc comes from --nvcc or PATH, nvdisasm too, or else from PyPI.
"""
import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
NVDISASM = "nvidia-cuda-nvdisasm==13.2.51"  # the first version on PyPI
FIRST_HEADING = "## Registers, memory, blocks"
KINDS = ("HMMA", "HGMMA", "LDSM", "LDGSTS", "FFMA", "DFMA", "LDG", "STG", "LDS", "STS", "LD", "ST", "LDL", "STL", "BAR", "CALL")
SIZES = ("64", "128", "256 x 512")  # as kernel_memory.cu


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Limits of one multiprocessor (CUDA C++ Programming Guide, technical specifications per compute capability)."""
    name: str
    architecture: str
    shared: int
    registers: int = 65536
    threads: int = 2048
    blocks: int = 32
    reserved: int = 1024  # of shared memory, per block


GPUS = (Gpu("A100", "sm_80", 164 << 10), Gpu("H100", "sm_90a", 228 << 10), Gpu("B200", "sm_100", 228 << 10))

# By a kernel's name, or the first two words of it, or one: most registers, bytes of stack and bytes spilled, and the least blocks
# that each GPU holds at every size. A spill has its reason beside it. 16 bytes of stack: the two sums of Arena::take.
LIMITS = {
    "walk_forward": (168, 16, 0, (1, 2, 2)),
    **dict.fromkeys(("walk_forward f64", "walk_backward f64"), (255, 16, 0, (1, 1, 1))),
    "split_sweeps f64": (255, 64, 0, (1, 1, 1)),  # of the additive rule, that of two SavedStates which a block has
    "split_gradients f64": (255, 32, 0, (1, 1, 1)),  # of the delta rule on sm_100, at 254 registers; nothing is spilled
    "tensor_forward": (255, 0, 0, (1, 1, 1)),
    "tensor_forward_gradient": (255, 0, 0, (1, 1, 1)),
    "tensor_forward_terms": (255, 0, 0, (1, 1, 1)),
    "tensor_forward_terms k128 f16": (255, 0, 0, (0, 1, 1)),  # no room for its scores on sm_80
    "tensor_add_outputs": (128, 0, 0, (2, 2, 2)),
    "tensor_prepare": (168, 0, 0, (2, 3, 3)),
    "tensor_prepare k256": (216, 0, 0, (1, 2, 2)),  # 213 on sm_100, of 255 that two blocks leave
    "tensor_join": (64, 0, 0, (2, 2, 2)),
    "tensor_join_transitions": (128, 0, 0, (2, 2, 2)),
    "channel_join": (64, 0, 0, (2, 2, 2)),
    "tensor_walk": (255, 0, 0, (1, 1, 1)),
    "tensor_walk_two": (255, 0, 0, (1, 1, 1)),  # on sm_90a alone; elsewhere without code
    # Of a state that takes 128 registers of each thread, addresses.
    "tensor_walk k256": (255, 112, 400, (0, 1, 1)),
    "tensor_sweeps k256": (255, 40, 288, (1, 1, 1)),
    "tensor_walk_states k64": (168, 0, 0, (2, 3, 3)),
    "tensor_walk_states k128": (255, 0, 0, (1, 1, 2)),
    "tensor_states": (255, 0, 0, (1, 1, 1)),
    "tensor_sweeps": (255, 0, 0, (1, 1, 1)),
    "tensor_sweep_segments": (255, 0, 0, (1, 1, 1)),
    "tensor_gradients": (255, 0, 0, (0, 1, 1)),
    "channel_prepare": (168, 0, 0, (2, 3, 3)),
    "channel_prepare_low": (168, 0, 0, (2, 3, 3)),
    "channel_walk": (255, 0, 0, (0, 1, 1)),
    "channel_walk_two": (255, 0, 0, (0, 1, 1)),
    "channel_gradients": (255, 0, 0, (0, 1, 1)),
    "channel_gradients k64 additive": (255, 0, 0, (1, 1, 1)),
    "channel_gradients_low": (255, 0, 0, (0, 1, 1)),
    "channel_estimate k128": (152, 16, 0, (3, 3, 3)),  # the numbers of four chunks on their way, for a warp a head
    "channel_key_sums": (128, 0, 0, (1, 2, 2)),
    **dict.fromkeys(("channel_states k64 additive", "channel_states k128 additive"), (255, 0, 0, (2, 2, 2))),
    "channel_states": (255, 0, 0, (1, 1, 1)),
    "channel_sweeps": (255, 0, 0, (0, 1, 1)),
    "channel_sweep_segments": (255, 0, 0, (0, 1, 1)),
    "recurrent_forward": (255, 0, 0, (2, 2, 2)),
    "recurrent_forward k256 f64 delta": (255, 112, 228, (2, 2, 2)),  # keys, decays and the next token in 64 bits
    "recurrent_backward": (255, 16, 0, (1, 2, 2)),
    "decay_product": (128, 32, 0, (4, 4, 4)),  # four gates of a thread, which are asked for at once
    "parameter_sums": (40, 0, 0, (12, 12, 12)),
    "numbers": (40, 0, 0, (12, 12, 12)),
    "norm": (56, 8, 16, (9, 9, 9)),  # two numbers of 4 bytes, for 40 registers and so 12 blocks
    "convolution": (80, 16, 0, (6, 6, 6)),
    "": (128, 16, 0, (4, 4, 4)),  # any other
}

# Kernels whose blocks have three groups of warps where these share registers, sm_90a, and the bytes of shared memory
# that they take for it (Kernel::more_shared in src/cuda/kernels/kernels.hpp; values of a second group that walks).
THREE_GROUPS = 384
THIRD_GROUP = {r"tensor_walk k(128|256)": 0, "tensor_walk_two k128": 0, "tensor_walk_states k128": 2 * 64 * 64 * 2, r"tensor_forward\w* k128": 0,
               "tensor_states k128": 0, r"channel_walk(_two)? k\d+ delta": 0, "tensor_sweeps k128": 2 * 64 * (128 + 64),
               "tensor_sweeps k256": 2 * 64 * (256 + 64),
               "tensor_sweep_segments k128": 0}


@dataclasses.dataclass
class Code:
    """A kernel as compiled for one architecture."""
    registers: int = 0
    stack: int = 0
    spilled: int = 0  # bytes, stores and loads
    static_shared: int = 0
    serialized: bool = False  # the products of groups of warps, each of which waits for the one before
    kinds: dict = dataclasses.field(default_factory=dict)
    instructions: int = 0


def run(*command):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}:\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def short_name(symbol):
    """walk_forward<ChunkKernel<ScalarGate<float>, true>>(...) in words: walk_forward f32 delta scalar."""
    plain = run("c++filt", symbol).strip()
    function = re.search(r"(\w+)(<.*>)?\(\S*Args\)", plain)
    if not function:
        return symbol
    name, arguments = function[1], function[2] or ""
    arguments = re.sub(r"((?:ChannelWalk<\d+, \w+|WalkerKernel<\d+, [\w:]+<[\w:]+ ?>)), \([\w:]+\)\d>", r"\1>", arguments)  # WalkTo
    blocks = "AdditiveKernel|AddedOutputsKernel|PrepareKernel|WalkerKernel|ChannelPrepare|ChannelWalk|channel_(?:estimate|sweeps|sweep_segments|gradients(?:_low)?|key_sums)|tensor_\\w+"
    sizes = re.findall(rf"(?:(?:{blocks})<|true, |false, )(\d+)", name + arguments)
    words = [name, *(f"k{value}" for value in sizes)]
    words += [word for type_, word in (("float", "f32"), ("double", "f64")) if type_ in arguments]
    rules = {"tensor_gradients": ("comba", ""), "tensor_prepare": ("backward", "")}.get(name, ("delta", "additive"))
    words += [rule for value, rule in zip(("true", "false"), rules) if value in arguments and rule]
    words += ["f16"] if "F16" in arguments else []
    words += [gate.lower() for gate in ("Scalar", "Channel") if gate + "Gate" in arguments]
    arguments = re.sub(r"\(\S*AdditiveWalk\)\d+", "", arguments)  # which the name says
    words += [f"part {value}" for value in re.findall(r"\)(\d+)\b", arguments)]  # of an enum, by number
    return " ".join(words)


def resources(ptxas):
    """{symbol: Code} of what ptxas -v says."""
    found, properties = {}, None
    for line in ptxas.splitlines():
        if match := re.search(r"wgmma\.mma_async instructions are serialized .* in the function '(\w+)'", line):
            found.setdefault(match[1], Code()).serialized = True
        elif match := re.search(r"Compiling entry function '(\w+)'", line):
            properties = found.setdefault(match[1], Code())
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            properties.stack += int(match[1])
            properties.spilled += int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            properties.registers = int(match[1])
            shared = re.search(r"(\d+) bytes smem", line)
            properties.static_shared = int(shared[1]) if shared else 0
    return found


def count_instructions(assembly, found):
    code = None
    for line in assembly.splitlines():
        if match := re.match(r"\s*\.section\s+\.text\.(\w+),", line):
            code = found.get(match[1])
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", line):
            if code is None:
                continue
            code.instructions += 1
            kind = re.sub(r"^FFMA2$", "FFMA", match[1])  # sm_100: two at once
            if kind in KINDS:
                code.kinds[kind] = code.kinds.get(kind, 0) + 1


def compile_kernels(tools, source, architecture, folder):
    """{short name: Code} of one file, with the options of the release build."""
    cubin = folder / f"{source.stem}.{architecture}.cubin"
    options = ("-O3", "-DNDEBUG", "-std=c++20", f"-I{ROOT}/include", f"-I{ROOT}/src", "-Xptxas", "-v")
    found = resources(run(tools.nvcc, "-cubin", f"-arch={architecture}", *options, source, "-o", cubin))
    count_instructions(run(tools.nvdisasm, "-c", cubin), found)
    named = {short_name(symbol): code for symbol, code in found.items()}
    if len(named) < len(found):
        sys.exit(f"{source.name}: short_name gives two of its {len(found)} kernels one name: {sorted(named)}")
    return named


def all_kernels(tools, folder):
    """{architecture: {short name: Code}}"""
    sources = sorted((ROOT / "src/cuda/kernels").glob("*.cu"))
    table = {gpu.architecture: {} for gpu in GPUS}
    with concurrent.futures.ThreadPoolExecutor(tools.jobs) as pool:
        jobs = [(gpu.architecture, pool.submit(compile_kernels, tools, source, gpu.architecture, folder))
                for gpu in GPUS for source in sources]
        for architecture, job in jobs:
            table[architecture].update(job.result())
    return table


def dynamic_memory(tools, folder):
    """{short name: [(bytes of shared memory, bytes beyond it) by size]}, as the library computes them."""
    program = folder / "kernel_memory"
    libraries = pathlib.Path(os.path.realpath(tools.nvcc)).parents[1] / "lib"  # of the packages of PyPI
    run(tools.nvcc, "-std=c++20", "-arch=sm_80", f"-I{ROOT}/include", f"-I{ROOT}/src", f"-L{libraries}",
        ROOT / "tests/cuda/kernel_memory.cu", "-o", program)
    memory = {}
    for line in run(program).splitlines():
        name, *sizes = line.split()
        memory[name.replace(",", " ")] = [tuple(map(int, size.split("+"))) for size in sizes]
    return memory


def blocks_per_multiprocessor(gpu, code, threads, dynamic):
    """Each quarter of the multiprocessor gives its warps registers in units of 256; shared memory has units of 128."""
    warps = threads // 32
    per_warp = (code.registers * 32 + 255) // 256 * 256
    by_registers = gpu.registers // 4 // per_warp * 4 // warps
    shared = (code.static_shared + dynamic + gpu.reserved + 127) // 128 * 128
    return min(by_registers, gpu.shared // shared, gpu.threads // threads, gpu.blocks)


def memory_of(name, memory):
    return memory.get(name.split(" part")[0], [(0, 0)] * len(SIZES))


def blocks_of(name, table, memory, size):
    """Blocks on each GPU."""
    threads = 128
    if name.startswith(("tensor_forward", "tensor_states", "tensor_gradients", "channel_sweep", "channel_gradients k128",
                        "channel_gradients_low k128", "channel_key_sums k128", "tensor_add_outputs k128",
                        "tensor_walk k128", "tensor_walk k256", "tensor_sweeps k128", "tensor_sweeps k256", "tensor_sweep_segments k128",
                        "tensor_join_transitions k128")) or \
            name.startswith(("channel_walk", "channel_states")) and name.endswith("delta"):
        threads = 256
    in_double = name.startswith(("walk_", "split_")) and " f64 " in name
    if in_double:
        threads = 256
    if name in ("channel_join", "tensor_join additive"):
        threads = 512
    dynamic = memory_of(name, memory)[size][0]
    # In double a block takes what the GPU has; of an A100 more of it then lies beyond.
    most = {gpu: gpu.shared - gpu.reserved if in_double else dynamic for gpu in GPUS}
    third = next((shared for start, shared in THIRD_GROUP.items() if re.match(start, name)), None)
    return tuple(blocks_per_multiprocessor(gpu, table[gpu.architecture][name],
                                           *((THREE_GROUPS, dynamic + third) if has_third(gpu, third)
                                             else (threads, min(dynamic, most[gpu]))))
                 for gpu in GPUS)


def has_third(gpu, third):
    return third is not None and gpu.architecture == "sm_90a"


def markdown(header, rows):
    yield "| " + " | ".join(header) + " |"
    yield "|---" + "|---:" * (len(header) - 1) + "|"
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"


def by_gpu(values):
    """One number where all GPUs have the same."""
    return str(values[0]) if len(set(values)) == 1 else " ".join(map(str, values))


def resource_rows(table, memory):
    for name in table[GPUS[0].architecture]:
        codes = [table[gpu.architecture][name] for gpu in GPUS]
        row = [name, *(by_gpu([getattr(code, field) for code in codes]) for field in ("registers", "stack", "spilled"))]
        for size in range(len(SIZES)):
            shared, beyond = memory_of(name, memory)[size]
            more = f" + {beyond / 1024:.0f}" if beyond else ""
            row.append(f"{shared / 1024:.0f}{more}: {by_gpu(blocks_of(name, table, memory, size))}")
        yield row


def document(table, memory, architecture):
    yield FIRST_HEADING
    yield ""
    sizes = [f"K = V = {size}" if " x " not in size else f"K x V = {size}" for size in SIZES]
    yield from markdown(["kernel", "registers", "stack", "spilled", *sizes], resource_rows(table, memory))
    yield ""
    yield f"## Instructions on {architecture}"
    yield ""
    rows = ([name, code.instructions, *(code.kinds.get(kind, 0) for kind in KINDS)]
            for name, code in table[architecture].items())
    yield from markdown(["kernel", "all", *KINDS], rows)


def violations(table, memory):
    names = sorted(set().union(*table.values()))
    for name in names:
        keys = (name, " ".join(name.split()[:2]), name.split()[0], "")
        registers, stack, spilled, blocks = next(LIMITS[each] for each in keys if each in LIMITS)
        for gpu in GPUS:
            code = table[gpu.architecture][name]
            for word, got, most in (("registers", code.registers, registers), ("bytes of stack", code.stack, stack),
                                    ("bytes spilled", code.spilled, spilled)):
                if got > most:
                    yield f"{name}, {gpu.architecture}: expected at most {most} {word}, got {got}"
            if code.serialized:
                yield f"{name}, {gpu.architecture}: ptxas serializes its wgmma"
        if name.startswith(("walk_", "split_", "tensor_forward", "tensor_walk", "tensor_sweep", "tensor_gradients",
                            "channel_prepare", "channel_walk", "channel_states", "channel_sweep", "channel_gradients",
                            "channel_key_sums", "recurrent_backward", "convolution")) and memory_of(name, memory)[0][0] == 0:
            yield f"{name}: kernel_memory.cu does not say what it takes"
        for size, label in enumerate(SIZES):
            got = blocks_of(name, table, memory, size)
            if any(have < least for have, least in zip(got, blocks)):
                yield f"{name}, size {label}: expected at least {blocks} blocks on {[g.name for g in GPUS]}, got {got}"
    for prefix in LIMITS:
        if not any(name.startswith(prefix) for name in names):
            yield f"{prefix}: in LIMITS, but no such kernel"


def find_tools(args, folder):
    args.nvcc = args.nvcc or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not args.nvcc:
        sys.exit("no nvcc: name one with --nvcc, or install one by scripts/nvcc.sh")
    args.nvdisasm = (args.nvdisasm or shutil.which("nvdisasm")
                     or shutil.which("nvdisasm", path=pathlib.Path(os.path.realpath(args.nvcc)).parent))
    if not args.nvdisasm:
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder / "tools", NVDISASM)
        args.nvdisasm = folder / "tools/nvidia/cu13/bin/nvdisasm"
    return args


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the limits in this file")
    parser.add_argument("--update", metavar="FILE", type=pathlib.Path, help="put the tables into this document")
    parser.add_argument("--instructions", metavar="ARCHITECTURE", default="sm_90a",
                        choices=[gpu.architecture for gpu in GPUS], help="of the second table (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--nvcc")
    parser.add_argument("--nvdisasm")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tools = find_tools(parser.parse_args(), folder)
        table, memory = all_kernels(tools, folder), dynamic_memory(tools, folder)
    text = "\n".join(document(table, memory, tools.instructions)) + "\n"
    if tools.update:
        before = tools.update.read_text(encoding="utf-8").split(FIRST_HEADING)[0]
        tools.update.write_text(before + text, encoding="utf-8")
    elif not tools.check:
        print(text, end="")
    if tools.check:
        found = list(violations(table, memory))
        print("\n".join(found) or f"{len(table[GPUS[0].architecture])} kernels within the limits on {len(GPUS)} GPUs")
        sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
