"""Two ranks in two network namespaces that a pair of virtual interfaces joins: cut sequences, then a pulled cable.

    python tests/python/two_networks.py [--possible]

--possible: only says whether this machine lets a process make namespaces and such a pair (Linux, unshare, ip).
"""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

NAMES, ADDRESSES, PORT = ("headrace0", "headrace1"), ("10.77.0.1", "10.77.0.2"), 29577
IN_A_NAMESPACE = ["unshare", "--map-root-user", "--net"]
PAIR = ["ip", "link", "add", NAMES[0], "type", "veth", "peer", "name", NAMES[1]]
TIMEOUT = 5  # seconds that a rank waits for another


def possible():
    try:
        tried = subprocess.run([*IN_A_NAMESPACE, *PAIR], capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    return tried.stderr.strip() or "" if tried.returncode else None


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the namespaces did not come up in 60 s"
        time.sleep(0.01)


def is_there(rank):
    return f"{NAMES[rank]}:" in Path("/proc/net/dev").read_text()


def connect(rank):
    for command in (f"addr add {ADDRESSES[rank]}/24 dev {NAMES[rank]}", f"link set {NAMES[rank]} up", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)


def group(rank):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = NAMES[rank]
    store = dist.TCPStore(ADDRESSES[0], PORT, 2, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT))
    return dist.group.WORLD


def what_is_raised(call):
    """The text of its RuntimeError; None where it returns."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None


def run(rank):
    import cp_fault_jobs
    import cp_jobs
    import torch

    from headrace.torch.distributed import build_cp_context

    ranks = group(rank)
    for strategy in ("summary", "ring", "heads"):
        errors = cp_jobs.compare(ranks, "gated_delta_rule", [150, 250], (2, 4, 16, 16), torch.float64,
                                 {"strategy": strategy})
        assert max(errors.values()) < 1e-12, (strategy, errors)
    context = build_cp_context(torch.tensor([0, cp_fault_jobs.T]), ranks, strategy="ring")
    cp_fault_jobs.call(context)
    if rank == 0:
        subprocess.run(["ip", "link", "set", NAMES[0], "down"], check=True)
    begin = time.monotonic()
    message = what_is_raised(lambda: cp_fault_jobs.call(context))
    seconds = time.monotonic() - begin
    assert message is not None, f"rank {rank}: the call returned after {seconds:.1f} s though the link was down"
    assert f"rank {1 - rank} was lost" in message and seconds < 4 * TIMEOUT, (message, seconds)
    print(f"rank {rank}: three strategies within 1e-12 of one process; link down: {message} ({seconds:.1f} s)",
          flush=True)
    os._exit(0)  # connections to the other rank are not closed in order any more


def both():
    program = [sys.executable, __file__]
    other = subprocess.Popen([*IN_A_NAMESPACE[::2], *program, "--rank"])
    try:
        own = os.readlink("/proc/self/ns/net")
        until(lambda: os.readlink(f"/proc/{other.pid}/ns/net") != own)
        subprocess.run([*PAIR, "netns", str(other.pid)], check=True)
        connect(0)
        first = subprocess.run([*program, "--first"], timeout=200).returncode
        return first or other.wait(timeout=60)
    finally:
        other.kill()


def main(arguments):
    if arguments == ["--possible"]:
        if (reason := possible()) is not None:
            sys.exit(f"no two network namespaces here: {reason}")
    elif arguments == ["--inside"]:
        sys.exit(both())
    elif arguments == ["--first"]:
        run(0)
    elif arguments == ["--rank"]:
        until(lambda: is_there(1))
        connect(1)
        run(1)
    else:
        os.execvp("unshare", [*IN_A_NAMESPACE, sys.executable, __file__, "--inside"])


if __name__ == "__main__":
    main(sys.argv[1:])
