"""Training: batches, learning rate, validation, and checkpoints from which it goes on exactly."""

import hashlib
import math
import os
import pickle
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn import functional as F

from model import BYTES, LanguageModel
from text import batch

BITS = 1 / math.log(2)  # in a unit of the losses, which are natural logarithms
WARM_UP = 0.05  # share of the training in which the learning rate rises
# What a checkpoint and the run that resumes it must have in common.
SETTINGS = ("operator", "hidden", "heads", "layers", "length", "batch", "rate", "seed", "dtype")


class Training:
    """A model on its way. a: SETTINGS, and steps or seconds, the length of the whole training over all resumptions."""

    def __init__(self, a, text, held_out):
        self.a, self.text, self.held_out = a, text, held_out
        self.settings = {name: getattr(a, name) for name in SETTINGS}
        self.settings["text"] = hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16]
        self.model = self.build()
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]  # gates and norms, which do not decay
        self.optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0}],
                                           betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.steps, self.seconds = 0, 0.0
        self.losses = []  # of every step, bits per byte
        self.validations = []  # (bytes trained on, bits per byte)

    def build(self):
        torch.manual_seed(self.a.seed)
        return LanguageModel(self.a.operator, self.a.hidden, self.a.heads, self.a.layers)

    @property
    def bytes_per_step(self):
        return self.a.batch * self.a.length

    def progress(self):
        """Share of the training that is done."""
        done, wanted = (self.seconds, self.a.seconds) if self.a.steps is None else (self.steps, self.a.steps)
        return done / wanted if done < wanted else 1.0

    def learning_rate(self):
        """Up in a line, then down along a cosine to 2 %."""
        progress = self.progress()
        return self.a.rate * min(1, (progress + 1e-3) / WARM_UP) * (0.51 + 0.49 * math.cos(math.pi * progress))

    def in_dtype(self):
        return torch.autocast("cpu", torch.bfloat16) if self.a.dtype == "bf16" else nullcontext()

    def loss(self, windows):
        """Cross entropy of each next byte of windows [B, T + 1], averaged."""
        with self.in_dtype():
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.float().view(-1, BYTES), windows[:, 1:].flatten())

    # What several processes do in another way: distributed.py.
    is_silent = False

    def whole_model(self):
        return self.model

    def value(self, loss):
        return loss.item()

    def agreed(self, number):
        return number

    def step(self):
        """One update. Returns the loss before it, in bits per byte."""
        begin = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self.loss(batch(self.text, self.a.batch, self.a.length, self.a.seed, self.steps))
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1
        self.seconds += time.perf_counter() - begin
        self.losses.append(self.value(loss) * BITS)
        return self.losses[-1]

    @torch.no_grad()
    def validate(self):
        """Bits per byte of the held-out blocks."""
        total = sum(self.value(self.loss(blocks.long())) * len(blocks) for blocks in self.held_out.split(4))
        self.validations.append((self.steps * self.bytes_per_step, total / len(self.held_out) * BITS))
        return self.validations[-1][1]

    def save(self, path):
        """Atomically: a file of that name is always a whole checkpoint."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            torch.save({"settings": self.settings, "model": self.model.state_dict(),
                        "optimizer": self.optimizer.state_dict(), "steps": self.steps, "seconds": self.seconds,
                        "losses": self.losses, "validations": self.validations}, unfinished)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    def load(self, path):
        """Goes on where `save` was called. Raises OSError, and ValueError where this run is set up differently."""
        try:
            saved = torch.load(path, weights_only=True)
            saved_settings = saved["settings"]
        except (RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path}: expected a checkpoint of this example, got something else") from error
        self.check_settings(saved_settings, path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.set_progress(saved)

    def check_settings(self, saved_settings, path):
        for name, value in self.settings.items():
            if saved_settings[name] != value:
                raise ValueError(f"{name}: expected {saved_settings[name]} as in {path}, got {value}")

    def set_progress(self, saved):
        self.steps, self.seconds = saved["steps"], saved["seconds"]
        self.losses, self.validations = saved["losses"], [tuple(pair) for pair in saved["validations"]]
