"""Groups of processes for tests: each runs a function of a test module on its rank, under a deadline."""

import multiprocessing
import os
import pickle
import signal
import sys
import time
from datetime import timedelta
from multiprocessing.connection import wait

DEADLINE = 240  # seconds for one job, on a machine that is busy with other things
_methods = multiprocessing.get_context("forkserver")
# What every rank would import by itself, some of it where a layer or an optimizer first needs it.
_methods.set_forkserver_preload(["headrace.torch.distributed", "headrace.torch.nn", "pytest", "matplotlib.pyplot",
                                 "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"])


class Failed(Exception):
    """What a job raised on its rank: `kind` the name of its type, `seconds` the time until then."""

    def __init__(self, kind, text, seconds, cause):
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.seconds, self.cause = kind, text, seconds, cause


def _serve(pipe, rank, size, port, timeout, hosts):
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    sys.path.insert(0, os.path.dirname(__file__))
    store = dist.TCPStore("127.0.0.1", port, size if hosts else size + 1, hosts and rank == 0,
                          timedelta(seconds=30), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    while True:
        try:
            function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        torch.manual_seed(0)
        start = time.monotonic()
        try:
            result = function(dist.group.WORLD, *arguments)
        except Exception as error:
            import traceback
            result = Failed(type(error).__name__, str(error), time.monotonic() - start, repr(error.__cause__))
            if os.environ.get("HEADRACE_TRACE"):
                traceback.print_exc()
        pipe.send_bytes(pickle.dumps((result,)) if not isinstance(result, Failed) else pickle.dumps(
            ("failed", result.kind, result.text, result.seconds, result.cause)))


class Group:
    """`size` processes with a gloo group, until close(). hosts: rank 0 holds the group's store, not this process.

    alone: they are forked from no other, whose CUDA runtime they would share.
    """

    def __init__(self, size, timeout=60, hosts=False, alone=False):
        import torch.distributed as dist
        self.size, self.hosts = size, hosts
        if hosts:
            probe = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
            port = probe.port
            del probe
        else:
            self.store = dist.TCPStore("127.0.0.1", 0, size + 1, True, wait_for_workers=False)
            port = self.store.port
        methods = multiprocessing.get_context("spawn") if alone else _methods
        pipes = [methods.Pipe() for _ in range(size)]
        self.pipes = [mine for mine, _ in pipes]
        self.processes = [methods.Process(target=_serve, args=(theirs, rank, size, port, timeout, hosts), daemon=True)
                          for rank, (_, theirs) in enumerate(pipes)]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def start(self, function, *arguments):
        """function(group, *arguments) on every rank, a function of a module."""
        job = pickle.dumps((function, arguments))
        for pipe in self.pipes:
            pipe.send_bytes(job)

    def results(self, deadline=DEADLINE, lost=()):
        """What the function returned on each rank, Failed for what it raised; None of ranks that are `lost`."""
        found, until = [None] * self.size, time.monotonic() + deadline
        missing = {self.pipes[rank]: rank for rank in range(self.size) if rank not in lost}
        while missing:
            ready = wait(list(missing), timeout=max(0, until - time.monotonic()))
            if not ready:
                ranks = sorted(missing.values())
                self.close()
                raise TimeoutError(f"ranks {ranks} did not finish in {deadline} s")
            for pipe in ready:
                rank = missing.pop(pipe)
                try:
                    result = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self.close()
                    raise RuntimeError(f"rank {rank} died") from None
                found[rank] = Failed(*result[1:]) if len(result) > 1 else result[0]
        return found

    def run(self, function, *arguments, deadline=DEADLINE):
        """The results of ranks that have all succeeded."""
        self.start(function, *arguments)
        results = self.results(deadline)
        for rank, result in enumerate(results):
            if isinstance(result, Failed):
                self.close()  # ranks may wait for one another: the next test gets a new group
                raise AssertionError(f"rank {rank}: {result}")
        return results

    def refused(self, function, *arguments):
        """The errors of ranks that have all failed."""
        self.start(function, *arguments)
        results = self.results()
        assert all(isinstance(result, Failed) for result in results), results
        return results

    def signal(self, rank, number):
        os.kill(self.processes[rank].pid, number)

    def close(self):
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join(10)


_groups = {}


def group(size):
    """The group of this size that tests share."""
    found = _groups.get(size)
    if found is None or not all(process.is_alive() for process in found.processes):
        found = _groups[size] = Group(size, timeout=180)
    return found


def close_all():
    for found in _groups.values():
        found.close()
    _groups.clear()
