"""`python examples/language_model`: trains a model of bytes, samples from it, and times it against plain PyTorch.

`torchrun --nproc-per-node 8 examples/language_model --dp 2 --tp 2 --cp 2` trains it on several processes.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

# PyTorch's threads else spin after their work, on cores that headrace's could use. Read when PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from compare import compare, draw_losses, draw_times  # noqa: E402
from model import OPERATORS, sample  # noqa: E402
from text import load_text, split, yardsticks  # noqa: E402
from training import Training  # noqa: E402

VALIDATIONS = 6
SAVE_EVERY = 30.0  # seconds


def positive(kind):
    def convert(word):
        value = kind(word)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a positive number, got {word}")
        return value

    convert.__name__ = kind.__name__  # argparse says "invalid int value"
    return convert


def parse(arguments):
    does = __doc__.splitlines()[0].split(": ", 1)[1]
    parser = argparse.ArgumentParser(prog="python examples/language_model", description=does)

    def add(name, help, **options):
        default = f" (default {options['default']})" if "default" in options else ""
        parser.add_argument(name, help=help + default, **options)

    add("--operator", "what its attention computes", choices=list(OPERATORS), default="kda")
    add("--text", "what it learns (default: the sources of this project)", metavar="FILE")
    add("--seconds", "length of the training", type=positive(float), default=120)
    add("--steps", "length of the training in steps, instead of seconds", type=positive(int))
    add("--out", "where the pictures and the checkpoint go", metavar="FOLDER", default="build/demo")
    add("--checkpoint", "another place for the checkpoint (default OUT/OPERATOR.pt)", metavar="FILE")
    add("--resume", "go on from the checkpoint, with the same settings and text", action="store_true")
    add("--prompt", "what the sample begins with (default: 64 held-out bytes)")
    add("--sample", "length of the sample", metavar="BYTES", type=positive(int), default=600)
    add("--temperature", "of the sample", type=positive(float), default=0.7)
    add("--compare-seconds", "time of each contender in a comparison", metavar="SECONDS", type=positive(float),
        default=5)
    add("--hidden", "hidden size, a multiple of heads", type=positive(int), default=256)
    add("--heads", "heads of a layer", type=positive(int), default=4)
    add("--layers", "layers of attention and feed-forward network", type=positive(int), default=4)
    add("--length", "bytes of a training sequence", type=positive(int), default=512)
    add("--batch", "sequences of a training step", type=positive(int), default=2)
    add("--rate", "highest learning rate", type=positive(float), default=4e-3)
    add("--dtype", "of matrix products; auto: bf16 where the processor multiplies it", choices=("auto", "bf16", "f32"),
        default="auto")
    add("--seed", "of the first weights, the order of the text and the sample", type=int, default=0)
    for name, what in (("dp", "sequences of a step"), ("tp", "heads"), ("cp", "tokens")):
        add(f"--{name}", f"processes over which the {what} are cut, with torchrun", type=positive(int), default=1)
    add("--beside-one", "trains in one process, too, and prints both curves of losses (with torchrun)",
        action="store_true")
    a = parser.parse_args(arguments)
    a.ranks = int(os.environ.get("WORLD_SIZE", 0))  # as torchrun says; 0 without it
    if a.dp * a.tp * a.cp != max(a.ranks, 1):
        parser.error(f"arguments --dp, --tp, --cp: expected a product of {max(a.ranks, 1)}, the processes that "
                     f"torchrun started, got {a.dp} x {a.tp} x {a.cp}")
    if a.beside_one and not (a.ranks and a.steps):
        parser.error("argument --beside-one: expected with torchrun and --steps")
    if a.hidden % a.heads:
        parser.error(f"argument --hidden: expected a multiple of heads {a.heads}, got {a.hidden}")
    if a.prompt == "":
        parser.error("argument --prompt: expected at least one byte")
    if a.dtype == "auto":
        able = torch.cpu.get_capabilities()
        a.dtype = "bf16" if able.get("avx512_bf16") or able.get("amx_bf16") else "f32"
    a.out = Path(a.out)
    a.checkpoint = Path(a.checkpoint) if a.checkpoint else a.out / (a.operator if a.ranks else f"{a.operator}.pt")
    return a


def set_up(a, kind):
    """The training, of class `kind`, at its beginning or where the checkpoint left it. Raises OSError or ValueError."""
    text, held_out = split(load_text(a.text))
    if a.length >= len(text):
        raise ValueError(f"length: expected less than the {len(text)} bytes of training text, got {a.length}")
    a.out.mkdir(parents=True, exist_ok=True)
    training = kind(a, text, held_out)
    if a.resume:
        training.load(a.checkpoint)
    size, threads = sum(p.numel() for p in training.model.parameters()) / 1e6, torch.get_num_threads()
    print(f"{a.operator}: {size:.1f} million parameters, {a.layers} layers, {a.heads} heads of {a.hidden // a.heads}, "
          f"{a.dtype}, {threads} thread{'s' * (threads > 1)}" + (f" in each of {a.ranks} processes" if a.ranks else ""))
    print(f"text: {a.text or 'the sources of this project'}, {len(text):,} bytes, {held_out.numel():,} more held out")
    print(f"steps of {a.batch} x {a.length} bytes" + (f", after {training.steps} earlier ones" if a.resume else ""),
          flush=True)
    return training


def train(training, checkpoint):
    """To the end, with a bar on a terminal and a line for each validation. Returns False if Ctrl-C ended it."""
    in_steps = training.a.steps is not None
    interrupts = []  # noted, so that no step is left half done
    earlier_handler = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
    bar = tqdm(total=training.a.steps if in_steps else training.a.seconds, unit="steps" if in_steps else "s",
               disable=training.is_silent or None,
               bar_format="{percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} {unit}{postfix}")
    saved = time.perf_counter()
    try:
        while training.progress() < 1 and not training.agreed(len(interrupts)):
            part, seconds = int(training.progress() * VALIDATIONS), training.seconds
            loss = training.step()
            rate = training.bytes_per_step / (training.seconds - seconds)
            bar.n = min(bar.total or 0, training.steps if in_steps else training.seconds)
            bar.set_postfix_str(f"loss {loss:.2f} bits per byte, {rate / 1e3:.1f} kB/s")
            if int(training.progress() * VALIDATIONS) > part:
                tqdm.write(report(training))
            if training.agreed(time.perf_counter() - saved) > SAVE_EVERY:
                training.save(checkpoint)
                saved = time.perf_counter()
    finally:
        bar.close()
        signal.signal(signal.SIGINT, earlier_handler)
    training.save(checkpoint)
    return not training.agreed(len(interrupts))


def report(training):
    """Validates, and says how far the training is."""
    held_out, recent = training.validate(), training.losses[-50:]
    return (f"{training.steps * training.bytes_per_step:11,} bytes, {training.seconds:4.0f} s: "
            f"training text {sum(recent) / len(recent):.2f}, held-out text {held_out:.2f} bits per byte")


def show_sample(training, prompt):
    """Prints the prompt and what the model makes of it."""
    a = training.a
    begin = time.perf_counter()
    text = bytes(sample(training.model, prompt, a.sample, a.temperature, a.seed))
    seconds = time.perf_counter() - begin
    print(f"\nafter {prompt.decode(errors='replace')!r} the model writes, byte by byte:\n")
    print("\n".join("    " + line for line in text.decode(errors="replace").splitlines()))
    print(f"\n{a.sample} bytes in {seconds:.1f} s")


def show_beside_one(training):
    """Prints the losses beside those of the same training in one process."""
    alone = Training(training.a, training.text, training.held_out)
    while alone.progress() < 1:
        alone.step()
    differences = [abs(one - several) for one, several in zip(alone.losses, training.losses, strict=True)]
    print(f"\n{'step':>6}{'1 process':>16}{f'{training.a.ranks} processes':>16}{'difference':>14}   bits per byte")
    for step in range(0, len(differences), -(-len(differences) // 12)):
        print(f"{step + 1:6}{alone.losses[step]:16.6f}{training.losses[step]:16.6f}{differences[step]:14.1e}")
    print(f"largest difference in {len(differences)} steps: {max(differences):.1e} bits per byte", flush=True)


def run(a, kind=Training):
    try:
        training = set_up(a, kind)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not train(training, a.checkpoint):
        print(f"stopped after {training.steps} steps; --resume goes on from {a.checkpoint}")
        return 130
    training.model = training.whole_model()
    if training.model is None:  # in all processes but the first
        return 0
    others = yardsticks(training.text, training.held_out)
    print(f"held-out text: model {training.validations[-1][1]:.2f} bits per byte, "
          + ", ".join(f"{name} {bits:.2f}" for name, bits in others.items()))
    losses, times = a.out / f"{a.operator}_loss.png", a.out / f"{a.operator}_time.png"
    draw_losses(losses, training, others)
    show_sample(training, bytes(training.held_out[0, :64].tolist()) if a.prompt is None else a.prompt.encode())
    if a.ranks:
        if a.beside_one:
            show_beside_one(training)
        print(f"\nwritten: {losses}, {a.checkpoint} (from which --resume goes on, also with other --dp, --tp, --cp)")
        return 0
    draw_times(times, compare(training, a.compare_seconds), a)
    print(f"\nwritten: {losses}, {times}, {a.checkpoint} (from which --resume with more --seconds goes on)")
    return 0


def main(arguments=None):
    a = parse(arguments)
    if not a.ranks:
        return run(a)
    from distributed import DistributedTraining, group_of_processes

    with group_of_processes():
        return run(a, DistributedTraining)


if __name__ == "__main__":
    sys.exit(main())
