"""examples/language_model: every operator learns, samples, resumes exactly, and agrees with its plain PyTorch form."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import relative_error

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "language_model"))
from compare import contenders  # noqa: E402
from model import OPERATORS, sample  # noqa: E402
from text import batch, load_text, split, yardsticks  # noqa: E402
from training import Training  # noqa: E402

from headrace.torch.nn import Cache  # noqa: E402

command = runpy.run_path(str(ROOT / "examples" / "language_model" / "__main__.py"))
every_operator = pytest.mark.parametrize("operator", OPERATORS)
TINY = ["--hidden", "32", "--heads", "2", "--layers", "2", "--length", "100", "--batch", "4", "--rate", "0.01"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small only wait for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(load_text()[:100_000])
    return path


@pytest.fixture
def training(text_file):
    def make(operator, *options):
        arguments = command["parse"](["--operator", operator, *TINY, "--text", str(text_file), *options])
        return Training(arguments, *split(load_text(arguments.text)))

    return make


@every_operator
def test_whole_run(operator, text_file, tmp_path, capsys):
    files = ["--text", str(text_file), "--out", str(tmp_path)]
    options = ["--steps", "40", "--sample", "30", "--compare-seconds", "0.01", "--prompt", "int main"]
    assert command["main"](["--operator", operator, *TINY, *files, *options]) == 0
    printed = capsys.readouterr().out
    assert "after 'int main' the model writes" in printed and "30 bytes in" in printed
    assert printed.count("plain PyTorch") == 3 and printed.count("training step, 400 bytes") == 1
    for name in ("loss", "time"):
        assert (tmp_path / f"{operator}_{name}.png").read_bytes().startswith(b"\x89PNG")
    saved = torch.load(tmp_path / f"{operator}.pt", weights_only=True)
    assert saved["steps"] == len(saved["losses"]) == 40
    assert 7.5 < saved["losses"][0] < 8.5  # 8 bits: nothing is known yet
    assert sum(saved["losses"][-5:]) / 5 < 5.3
    assert saved["validations"][-1] == (40 * 400, pytest.approx(sum(saved["losses"][-5:]) / 5, abs=0.6))


@every_operator
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_resumed_run_is_the_same(operator, dtype, training, tmp_path):
    options = ("--steps", "6", "--dtype", dtype)
    whole, first, second = (training(operator, *options) for _ in range(3))
    for _ in range(6):
        whole.step()
    for _ in range(3):
        first.step()
    first.save(tmp_path / "checkpoint.pt")
    second.load(tmp_path / "checkpoint.pt")
    for _ in range(3):
        second.step()
    assert second.losses == whole.losses and second.steps == 6
    for expected, actual in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(expected, actual)
        for name, value in whole.optimizer.state[expected].items():
            assert torch.equal(value, second.optimizer.state[actual][name]), name


@every_operator
@torch.no_grad()
def test_step_form_gives_the_logits_of_the_whole_text(operator, training):
    model, tokens = training(operator).model, torch.randint(256, (2, 80), generator=torch.Generator().manual_seed(1))
    cache = Cache()
    parts = [model(tokens[:, :50], cache)] + [model(tokens[:, t : t + 1], cache) for t in range(50, 80)]
    assert relative_error(torch.cat(parts, 1), model(tokens)) < 1e-5


@every_operator
def test_contenders_compute_the_same(operator, training):
    run = training(operator, "--dtype", "f32")
    for _ in range(3):
        run.step()  # gates that have moved
    windows = batch(run.text, 2, 90, 0, 0)
    results = {}
    for name, contender in contenders(operator).items():
        with contender():
            run.model.zero_grad()
            loss = run.loss(windows)
            loss.backward()
        results[name] = loss.item(), {name: parameter.grad.clone() for name, parameter in run.model.named_parameters()}
    assert len(results) == (3 if operator in ("kda", "gated_delta_rule") else 2)
    ours, gradients = results["headrace"]
    # A gradient that is a sum of terms of both signs, as of dt_bias, has the rounding errors of the terms: fp32's.
    rounding = 2**-24 * torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, (loss, of_contender) in results.items():
        assert loss == pytest.approx(ours, rel=1e-6), name
        for parameter, gradient in gradients.items():
            assert (of_contender[parameter] - gradient).norm() < 2e-5 * gradient.norm() + rounding, (name, parameter)


@every_operator
@torch.no_grad()
def test_contenders_generate_the_same(operator, training):
    run = training(operator)
    texts = []
    for name, contender in contenders(operator).items():
        with contender():
            texts.append(bytes(sample(run.model, b"for (", 40, temperature=0.5)))
    assert len(texts[0]) == 40 and set(texts) == {texts[0]}


def test_interrupted_run_resumes(training, tmp_path, monkeypatch):
    run, path = training("gla", "--steps", "9"), tmp_path / "new folder" / "checkpoint.pt"
    step = run.step

    def interrupted_step():
        if run.steps == 2:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(run, "step", interrupted_step)
    handler = signal.getsignal(signal.SIGINT)
    assert command["train"](run, path) is False
    assert run.steps == 3 and signal.getsignal(signal.SIGINT) is handler
    resumed = training("gla", "--steps", "9")
    resumed.load(path)
    assert command["train"](resumed, path) is True
    assert resumed.steps == 9 and resumed.losses[:3] == run.losses


def test_training_ends_on_time(training, tmp_path):
    run = training("simple_gla", "--seconds", "0.5")
    assert command["train"](run, tmp_path / "checkpoint.pt") is True
    assert 0.5 <= run.seconds < 0.5 + 10 * run.seconds / run.steps and run.progress() == 1
    assert run.learning_rate() == pytest.approx(0.02 * run.a.rate)


def test_failed_save_leaves_the_last_checkpoint(training, tmp_path, monkeypatch):
    run, path = training("gla", "--steps", "9"), tmp_path / "checkpoint.pt"
    run.save(path)
    whole = path.read_bytes()

    def full_disk(values, file):
        Path(file).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        run.save(path)
    assert path.read_bytes() == whole and list(tmp_path.iterdir()) == [path]


def test_text_is_split_and_drawn_the_same_way_each_time():
    data = bytes(range(256)) * 16 * 40  # blocks of 4096 bytes; the first byte of each names it
    data = b"".join(bytes([n]) + data[1:4096] for n in range(40))
    text, held_out = split(data)
    assert held_out[:, 0].tolist() == [15, 31] and len(text) == 38 * 4096
    windows = batch(text, 3, 20, seed=1, step=7)
    assert windows.shape == (3, 21) and torch.equal(windows, batch(text, 3, 20, seed=1, step=7))
    assert not torch.equal(windows, batch(text, 3, 20, seed=1, step=8))
    bits = yardsticks(text, held_out)
    assert 7.9 < bits["single bytes"] < 8.1 and bits["gzip"] < 1 and bits["xz"] < 0.5


def test_wrong_arguments(text_file, tmp_path, capsys):
    def error_of(*options):
        try:
            code = command["main"]([*TINY, "--text", str(text_file), "--out", str(tmp_path), "--steps", "2", *options])
        except SystemExit as stop:
            code = stop.code
        assert code == 2
        return capsys.readouterr().err

    assert "invalid choice: 'rwkv'" in error_of("--operator", "rwkv")
    assert "No such file" in error_of("--text", str(tmp_path / "nothing"))
    (tmp_path / "short").write_text("short")
    assert "error: text: expected at least 65536 bytes, got 5" in error_of("--text", str(tmp_path / "short"))
    assert "length: expected less than the" in error_of("--length", "200000")
    assert "--hidden: expected a multiple of heads 3, got 32" in error_of("--heads", "3")
    assert "--prompt: expected at least one byte" in error_of("--prompt", "")
    assert "--rate: expected a positive number, got -1" in error_of("--rate=-1")
    assert "No such file" in error_of("--resume")
    (tmp_path / "kda.pt").write_text("no checkpoint")
    assert "kda.pt: expected a checkpoint of this example" in error_of("--resume")


def test_checkpoint_of_another_model_is_refused(training, tmp_path):
    training("kda").save(tmp_path / "kda.pt")
    with pytest.raises(ValueError, match="operator: expected kda as in .*, got gla"):
        training("gla").load(tmp_path / "kda.pt")
    with pytest.raises(ValueError, match="batch: expected 4 as in .*, got 5"):
        training("kda", "--batch", "5").load(tmp_path / "kda.pt")


@pytest.mark.parametrize("options, message", [
    (["--operator", "rwkv"], f"--operator: expected one of {' '.join(OPERATORS)}, got 'rwkv'"),
    (["--text", "/nothing"], "--text: expected a file, got '/nothing'"),
    (["--seconds", "0"], "--seconds: expected a number from 1 to 9999999, got '0'"),
    (["--resume", "--steps", "-1"], "--steps: expected a number from 1 to 9999999, got '-1'"),
    (["--tokens"], "expected an option and its value, got '--tokens'"),
    (["--fast", "1"], "unknown option '--fast'"),
])
def test_wrong_arguments_of_the_demo(options, message):
    result = subprocess.run(["bash", ROOT / "scripts" / "demo.sh", *options], capture_output=True, text=True)
    assert result.returncode == 1 and f"error: {message}" in result.stderr


@pytest.fixture
def demo(tmp_path):
    """demo(*options) -> the arguments that the script gives to the model. What it installs and builds is left out."""
    says_nothing = tmp_path / "nothing"
    says_nothing.write_text("#!/bin/sh\necho install ok installed\n")
    prints_arguments = tmp_path / "arguments"
    prints_arguments.write_text('#!/bin/sh\n[ "$1" != -m ] && printf "argument %s\\n" "$@" || true\n')
    programs = {f"bin/{name}": says_nothing for name in ("apt-get", "dpkg-query", "cmake", "python3")}
    programs |= {"build/release/tools/headrace/headrace": says_nothing, "build/venv/bin/python": prints_arguments}
    programs |= {f"scripts/{name}": ROOT / "scripts" / name for name in ("demo.sh", "common.sh")}
    for name, original in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(original, tmp_path / name)
        (tmp_path / name).chmod(0o755)

    def run(*options):
        result = subprocess.run(["bash", tmp_path / "scripts" / "demo.sh", *options], capture_output=True, text=True,
                                cwd=tmp_path, env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
        assert result.returncode == 0, result.stderr
        arguments = re.findall("^argument (.*)$", result.stdout, re.MULTILINE)
        assert arguments.pop(0) == "examples/language_model"
        return arguments

    return run


def test_demo_goes_on_from_its_checkpoint(demo, text_file, tmp_path, capsys):
    def steps(*options):
        arguments = demo("--operator", "gla", "--text", str(text_file), "--out", "a folder", *options)
        short = ["--sample", "1", "--compare-seconds", "0.01"]
        assert command["main"]([*arguments, *TINY, *short]) == 0
        return torch.load(tmp_path / "a folder" / "gla.pt", weights_only=True)["losses"]

    first = steps("--steps", "2")
    assert "earlier ones" not in capsys.readouterr().out
    whole = steps("--resume", "--steps", "3")
    assert "after 2 earlier ones" in capsys.readouterr().out
    assert len(first) == 2 and len(whole) == 3 and whole[:2] == first
