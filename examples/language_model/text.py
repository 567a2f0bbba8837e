"""The text: its source, its parts for training and validation, its batches, and what compressors make of it."""

import gzip
import lzma
from pathlib import Path

import torch

SOURCES = {".py", ".cpp", ".hpp", ".h", ".c", ".md", ".sh", ".cmake"}
BLOCK = 4096  # bytes; of every 16 blocks the last is held out of the training
EVERY = 16
MAX_HELD_OUT = 32  # blocks, so that validation of a long text takes no longer
MAX_SEEN = 1 << 22  # bytes of training text that the compressors see first


def load_text(path=None):
    """The bytes of a file; without one, the sources of this project, one after the other."""
    if path is not None:
        return Path(path).read_bytes()
    root = Path(__file__).resolve().parents[2]
    files = (file for entry in sorted(root.iterdir()) if entry.name != "build" and not entry.name.startswith(".")
             for file in ([entry] if entry.is_file() else sorted(entry.rglob("*"))))
    return b"\n".join(file.read_bytes() for file in files
                      if file.suffix in SOURCES and "site-packages" not in file.parts)  # of a virtual environment


def split(data):
    """The bytes for training [n] and the held-out blocks [m, BLOCK], uint8. Raises ValueError for a short text."""
    if len(data) < EVERY * BLOCK:
        raise ValueError(f"text: expected at least {EVERY * BLOCK} bytes, got {len(data)}")
    blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: len(data) // BLOCK * BLOCK].view(-1, BLOCK)
    is_held_out = torch.arange(len(blocks)) % EVERY == EVERY - 1
    held_out = blocks[is_held_out]
    return blocks[~is_held_out].flatten(), held_out[:: -(-len(held_out) // MAX_HELD_OUT)]


def batch(text, size, length, seed, step):
    """[size, length + 1] random windows. They depend on seed and step alone, so a resumed run meets the same ones."""
    draw = torch.Generator().manual_seed((seed << 32) + step)
    starts = torch.randint(len(text) - length, (size, 1), generator=draw)
    return text[starts + torch.arange(length + 1)].long()


def yardsticks(text, held_out):
    """Bits per byte that simpler models need for the held-out blocks, after they have seen the training text."""
    counts = torch.bincount(text.long(), minlength=256).double() + 1
    single = -(counts / counts.sum()).log2()[held_out.flatten().long()].mean().item()
    seen, new = bytes(text[-MAX_SEEN:].numpy()), bytes(held_out.numpy())

    def added(compress):
        return 8 * (len(compress(seen + new)) - len(compress(seen))) / len(new)

    return {"single bytes": single, "gzip": added(gzip.compress),
            "xz": added(lambda data: lzma.compress(data, preset=9))}
