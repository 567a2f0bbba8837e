"""examples/language_model on several processes: losses and parameters of one, also from each other's checkpoints."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import relative_error
from ranks import group

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "language_model"))
from distributed import DistributedTraining  # noqa: E402
from model import OPERATORS  # noqa: E402
from text import load_text, split  # noqa: E402
from training import Training  # noqa: E402

command = runpy.run_path(str(ROOT / "examples" / "language_model" / "__main__.py"))
TINY = ["--hidden", "32", "--heads", "2", "--layers", "2", "--length", "60", "--batch", "5", "--rate", "0.01",
        "--dtype", "f32"]
STEPS = 9
# Rounding of float32 in some hundred operations one after the other; losses are in bits per byte, 8 at the beginning.
LOSS_BAR, PARAMETER_BAR = 5e-6, 2e-5


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(load_text()[:100_000])
    return str(path)


def training(text_file, ranks=0, operator="kda", steps=STEPS, more=(), kind=DistributedTraining, eps=1e-3, **mesh):
    """eps: of the optimizer. With its own, 1e-8, a first step is the sign of a gradient, also of a rounding error."""
    os.environ["WORLD_SIZE"] = str(ranks)
    sizes = [word for name, size in mesh.items() for word in (f"--{name}", str(size))]
    a = command["parse"](["--operator", operator, *TINY, "--text", text_file, "--steps", str(steps), *sizes, *more])
    run = kind(a, *split(load_text(text_file)))
    for parameters in run.optimizer.param_groups:
        parameters["eps"] = eps
    return run


def alone(text_file, operator="kda", steps=STEPS, run=None, more=()):
    """The same in one process, on rank 0 or outside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = training(text_file, 0, operator, steps, more, kind=Training)
    for _ in range(steps if run is None else run):
        one.step()
    torch.set_num_threads(threads)
    return one


def same_on_first(ranks, several, text_file, operator="kda", steps=STEPS):
    """Losses and parameters are those of one process, as rank 0 sees, which returns that training."""
    parameters = {name: x.full_tensor() for name, x in several.model.named_parameters()}
    if ranks.rank() > 0:
        return None
    one = alone(text_file, operator, steps)
    assert several.losses == pytest.approx(one.losses, abs=LOSS_BAR) and len(one.losses) == steps
    for name, parameter in one.model.named_parameters():
        assert relative_error(parameters.pop(name), parameter) < PARAMETER_BAR, name
    assert not parameters
    return one


def every_operator(ranks, text_file):
    for operator in OPERATORS:
        several = training(text_file, 2, operator, 2, tp=2)
        for _ in range(2):
            several.step()
        same_on_first(ranks, several, text_file, operator, 2)


def mesh_of_8(ranks, text_file):
    several = training(text_file, 8, dp=2, tp=2, cp=2, steps=4)
    for _ in range(4):
        several.step()
    one, validated = same_on_first(ranks, several, text_file, steps=4), several.validate()
    whole, parameters = several.whole_model(), [x.full_tensor() for x in several.model.parameters()]
    assert (whole is None) == (ranks.rank() > 0)
    if whole is not None:
        assert validated == pytest.approx(one.validate(), abs=LOSS_BAR)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(whole.parameters(), parameters, strict=True))


def bf16(ranks, text_file):
    """The losses of one process up to rounding to bf16; the same bits in each run, and on each rank."""
    losses = []
    for _ in range(2):
        several = training(text_file, 2, steps=3, more=["--dtype", "bf16"], tp=2)
        for _ in range(3):
            several.step()
        losses.append(several.losses)
    one = alone(text_file, steps=3, more=["--dtype", "bf16"])
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(one.losses, rel=1e-2) and losses[0] != one.losses
    return losses[0]


def some_steps(ranks, text_file, folder, options, resume):
    """Three steps more, from the checkpoint and into it."""
    run = training(text_file, ranks.size(), **options)
    if resume:
        run.load(folder)
    for _ in range(3):
        run.step()
    run.save(folder)
    return run.losses, {name: x.full_tensor().detach().numpy() for name, x in run.model.named_parameters()}


def checkpoint_of_another_model(ranks, text_file, folder):
    with pytest.raises(ValueError, match="operator: expected kda as in .*, got gla"):
        training(text_file, 2, "gla", dp=2).load(folder)
    with pytest.raises(FileNotFoundError, match="expected a folder with a checkpoint step_N"):
        training(text_file, 2, dp=2).load(f"{folder}/nothing")
    with pytest.raises(ValueError, match="dp: expected at most the 1 sequences of a step, got 2"):
        training(text_file, 2, dp=2, more=["--batch", "1"])


def test_tensor_parallel_operators(text_file):
    group(2).run(every_operator, text_file)


def test_eight_processes(text_file):
    group(8).run(mesh_of_8, text_file)


def test_bf16(text_file):
    first, second = group(2).run(bf16, text_file)
    assert first == second


def test_checkpoints_of_four_two_and_three_processes(text_file, tmp_path):
    """Optimizer and place in the data included: the whole is the run of one process."""
    for ranks, mesh in ((4, {"dp": 2, "tp": 2}), (2, {"cp": 2}), (3, {"dp": 3})):
        results = group(ranks).run(some_steps, text_file, str(tmp_path), mesh, ranks < 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step_9"]
    one = alone(text_file)
    for losses, parameters in results:
        assert losses == pytest.approx(one.losses, abs=LOSS_BAR)
        for name, parameter in one.model.named_parameters():
            assert relative_error(torch.from_numpy(parameters[name]), parameter) < PARAMETER_BAR, name
    group(2).run(checkpoint_of_another_model, text_file, str(tmp_path))


def test_torchrun(text_file, tmp_path):
    """The command goes on from a checkpoint of three processes, and prints its losses beside those of one."""
    group(3).run(some_steps, text_file, str(tmp_path / "kda"), {"dp": 3, "eps": 1e-8}, False)
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/language_model", *TINY,
         "--text", text_file, "--out", str(tmp_path), "--sample", "5", "--cp", "2", "--steps", str(STEPS), "--resume",
         "--beside-one"], env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed, errors = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its processes, which have groups of their own
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    assert "in each of 2 processes" in printed and "after 3 earlier ones" in printed and "5 bytes in" in printed
    assert printed.count("million parameters") == 1 and (tmp_path / "kda_loss.png").exists()
    assert float(printed.split(f"largest difference in {STEPS} steps: ")[1].split()[0]) < 20 * LOSS_BAR  # eps is 1e-8


@pytest.mark.parametrize("ranks, options, message", [
    ("", ["--dp", "2"], "expected a product of 1, the processes that torchrun started, got 2 x 1 x 1"),
    ("2", ["--dp", "2", "--tp", "2"], "expected a product of 2, the processes that torchrun started, got 2 x 2 x 1"),
    ("", ["--beside-one", "--steps", "3"], "--beside-one: expected with torchrun and --steps"),
    ("1", ["--beside-one"], "--beside-one: expected with torchrun and --steps"),
])
def test_wrong_arguments(ranks, options, message, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", ranks or "0")
    with pytest.raises(SystemExit):
        command["parse"](options)
    assert message in capsys.readouterr().err
