"""Runs a function of a test module in fresh processes with several JAX devices each; none of them outlives its test."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(arguments, devices=1, **environment):
    """A Python process in a group of its own, which sees the modules of the tests and so many devices of JAX."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1",
                   "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", **environment}
    return subprocess.Popen([sys.executable, *map(str, arguments)], env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, start_new_session=True)


def outputs(processes, seconds):
    """What the processes printed, of all of which every one must succeed in time."""
    deadline = time.monotonic() + seconds
    texts = []
    try:
        for process in processes:
            texts.append(process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0])
            assert process.returncode == 0, texts[-1]
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"not done after {seconds} s: {late.output}") from late
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return texts


def on_devices(function, devices=4, seconds=150):
    """Calls a function of a test module, which asserts, in one process with so many devices."""
    code = f"import {function.__module__} as module; module.{function.__name__}()"
    return outputs([launch(["-c", code], devices)], seconds)[0]


def in_processes(function, processes=2, devices=1):
    """So many processes, which know of each other through jax.distributed, and call a function of a test module."""
    address = f"localhost:{free_port()}"
    code = f"""if True:
        import sys, jax
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize("{address}", {processes}, int(sys.argv[1]), initialization_timeout=60)
        import {function.__module__} as module
        module.{function.__name__}()
        jax.distributed.shutdown()
    """
    return [launch(["-c", code, rank], devices) for rank in range(processes)]
