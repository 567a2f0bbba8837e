"""The same training on several processes of torchrun: each has a part of the sequences, of the tokens and of the heads.

A mesh of dp x cp x tp ranks: dp cut the sequences of a batch (data parallelism), cp their tokens (context parallelism),
tp the heads (tensor parallelism). FSDP (fully_shard) spreads parameters and optimizer over dp x cp ranks, whose
gradients it averages.
"""

import json
import logging
import os
import shutil
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from headrace.torch.distributed import build_cp_context, shard, tensor_parallel_plan
from model import BYTES, LanguageModel
from training import Training


def cut_heads(model, mesh):
    """Tensor parallelism: each rank computes some heads and a part of the feed-forward networks; x is on all."""
    for block in model.blocks:
        parallelize_module(block, mesh, {
            "attention": tensor_parallel_plan(block.attention, use_local_output=False),
            "gate": ColwiseParallel(use_local_output=False),
            "widen": ColwiseParallel(use_local_output=False),
            "narrow": RowwiseParallel(use_local_output=False),
        })

    def replicated(model, inputs, mesh):
        tokens, *rest = inputs
        return DTensor.from_local(tokens, mesh, [Replicate()]), *rest

    distribute_module(model, mesh, input_fn=replicated)  # what is not cut yet becomes replicas


class DistributedTraining(Training):
    """A training whose steps are those of one process, up to rounding. a: also dp, tp and cp, the sizes of the mesh."""

    def __init__(self, a, text, held_out):
        if a.batch < a.dp:
            raise ValueError(f"dp: expected at most the {a.batch} sequences of a step, got {a.dp}")
        self.mesh = init_device_mesh("cpu", (a.dp * a.cp, a.tp), mesh_dim_names=("data", "tp"))
        self.parts = init_device_mesh("cpu", (a.dp, a.cp, a.tp), mesh_dim_names=("dp", "cp", "tp"))  # the same ranks
        self.rank, self.is_silent = dist.get_rank(), dist.get_rank() > 0
        self.saved = None  # the steps of the last checkpoint
        super().__init__(a, text, held_out)

    def build(self):
        model = super().build()
        if self.a.tp > 1:
            cut_heads(model, self.mesh["tp"])
        for module in (*model.blocks, model):
            fully_shard(module, mesh=self.mesh["data"])
        return model

    def loss(self, windows):
        """This rank's share of the cross entropy. The mean of the shares, and of their gradients, is that of all."""
        share = self.mesh["data"].size() / windows[:, 1:].numel()
        own = windows.tensor_split(self.a.dp)[self.parts["dp"].get_local_rank()]
        if not len(own):  # in a validation of few sequences
            own, share = windows[:1], 0
        inputs, targets, context = own[:, :-1], own[:, 1:], None  # labels are shifted before tokens are cut
        if self.a.cp > 1:  # the sequences one after the other, cut anywhere
            ends = torch.arange(0, inputs.numel() + 1, inputs.shape[1])
            context = build_cp_context(ends, self.parts["cp"])
            inputs, targets = (shard(tokens.reshape(1, -1), context) for tokens in (inputs, targets))
        with self.in_dtype():
            logits = self.model(inputs, cp_context=context)
        if isinstance(logits, DTensor):
            logits = logits.to_local()
        return share * F.cross_entropy(logits.float().view(-1, BYTES), targets.flatten(), reduction="sum")

    def value(self, loss):
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.mesh["data"].get_group())
        return total.item() / self.mesh["data"].size()

    def step(self):
        loss = super().step()
        self.seconds = self.agreed(self.seconds)  # on which the length of a training may depend
        return loss

    def agreed(self, number):
        """The largest of the ranks' numbers."""
        largest = torch.tensor(float(number), dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def save(self, path):
        """A folder in the folder `path`, from which any number of ranks goes on; earlier ones are removed."""
        if self.saved == self.steps:
            return
        self.saved = self.steps
        folder = Path(path) / f"step_{self.steps}"
        model, optimizer = get_state_dict(self.model, self.optimizer)
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            progress = {"settings": self.settings, "steps": self.steps, "seconds": self.seconds, "losses": self.losses,
                        "validations": self.validations}
            (folder / "progress.json").write_text(json.dumps(progress))
        dist.barrier()
        checkpoints.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        if self.rank == 0:
            for earlier in Path(path).glob("step_*"):
                if earlier != folder:
                    shutil.rmtree(earlier)
        dist.barrier()

    def load(self, path):
        """Goes on where `save` was called. Raises OSError, and ValueError where this run is set up differently."""
        complete = list(Path(path).glob("step_*/.metadata"))  # which is written last
        if not complete:
            raise FileNotFoundError(f"{path}: expected a folder with a checkpoint step_N of several ranks")
        folder = max((file.parent for file in complete), key=lambda folder: int(folder.name.removeprefix("step_")))
        progress = json.loads((folder / "progress.json").read_text())
        self.check_settings(progress["settings"], folder)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoints.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.set_progress(progress)

    def whole_model(self):
        """The model in one piece, on rank 0."""
        state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.rank:
            return None
        model = super().build()
        model.load_state_dict(state)
        return model


@contextmanager
def group_of_processes():
    """Inside, the processes that torchrun started can exchange tensors, and only the first one prints."""
    dist.init_process_group("gloo")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it has advice on meshes of two dimensions
    try:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing) if dist.get_rank() else nullcontext():
            yield
    finally:
        dist.destroy_process_group()
