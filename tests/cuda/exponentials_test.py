#!/usr/bin/env python3
"""N3 on a device: no exponential is taken of a number above 0 when gates are not, watched in the kernels' PTX.

    exponentials_test.py PATH_OF_HEADRACE

exp() and expm1() of the CUDA library begin with a product of their argument and log2(e); ptx::exp2_approximate is an
instruction of its own. Before each such product or instruction the text gets a trap under the condition that the argument
is above 0 or NaN; the interpreter then runs the kernels with it over problems with gates of every strength. In each module
a trap below 0 has to be met, or nothing was watched.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

LINES = [
    f"{operator}:{direction} {sizes} gates={gates} {words} cuda"
    for operator, words in (
        ("simple_gla", "gate=step+head"), ("simple_gla", "gate=step+head bf16"), ("gla", "gate=channel+head bf16"),
        ("gla", "f64"), ("simple_gla", "f64"),
        ("gated_delta_rule", "beta=sigmoid"), ("kda", "bf16"), ("kda", "f64"), ("comba", "f64"))
    for direction, sizes in (("fwd", "t40 h1 k32 v16"), ("bwd", "varlen=0,3,3,40 h1 k32 v16 state=inout"))
    for gates in ("random", "zero", "strong", "reset", "minus_inf")]
LINES += [line.replace(" cuda", " force=cuda.walk cuda") for line in LINES if ":fwd" in line] + [
    line.replace(" cuda", " force=cuda.recurrent cuda") for line in LINES
    if ":bwd" in line and ("=reset" in line or "=strong" in line)]
LINES += [f"{operator}:{direction} gates={gates} bf16 force=cuda.tensor cuda" for gates in ("random", "zero", "strong", "reset")
          for operator, direction in (("simple_gla", "fwd t100 h1 k32 v32"), ("comba", "fwd t100 h1 k64 v32 l2norm"), ("gla", "fwd t100 h1 k32 v32"),
                                      ("kda", "fwd t100 h1 k64 v32 l2norm"), ("kda", "fwd t100 h1 k64 v32 rawgate"),
                                      ("gla", "fwd t100 h1 k32 v32 rawgate bound=-5"),
                                      ("simple_gla", "bwd t70 h8 k32 v32 state=inout"),
                                      ("gated_delta_rule", "bwd t100 h8 k64 v32 l2norm"),
                                      ("kda", "bwd t70 h8 k64 v32"), ("gla", "bwd t70 h8 k32 v32"))]
LINES += [f"{operator}:summary t40 h1 k32 v16 gates={gates} {words} cuda" for operator in ("gla", "simple_gla")
          for gates in ("random", "zero", "lasting", "reset") for words in ("", "bf16", "rawgate", "rawgate bound=-5 bf16")
          if gates != "zero" or "raw" not in words]
LINES += [f"{operator}:step t3 h1 k32 v16 gates=reset cuda" for operator in ("kda", "gla", "gated_delta_rule")]

# log2(e), or its share of 252 in the fp32 exp, by type; a constant or a register that was given it.
SCALES = {"f32": ("0f3BBB989D", "0f3FB8AA3B"), "f64": ("0d3FF71547652B82FE",)}
PRODUCT = re.compile(r"(?:fma\.rn|mul|mul\.rn)\.(f32|f64) \S+, (%\w+), (%\w+|0[fd][0-9A-F]+)[,;]")
POWER = re.compile(r"ex2\.approx\.ftz\.f32 \S+, (%\w+);")
LIMITS = {"f32": ("0f00000000", "0fC0000000"), "f64": ("0d0000000000000000", "0dC000000000000000")}  # 0, -2


def watched(text, limit):
    """The text with a trap before each exponential of a number above LIMITS[...][limit]; and how many there are."""
    lines, scales, count, header = [], set(), 0, False
    for line in text.splitlines():
        if ".entry " in line or ".func " in line:
            header, scales = True, set()
        elif header and line == "{":
            header, line = False, "{\n.reg .pred %watched;"
        move = re.match(r"mov\.f(?:32|64) (%\w+), (0[fd][0-9A-F]+);", line)
        if move:
            (scales.add if move[2] in SCALES["f32"] + SCALES["f64"] else scales.discard)(move[1])
        product, power = PRODUCT.match(line), POWER.match(line)
        if power and "inline asm" in lines[-1]:
            line = f"setp.gtu.f32 %watched, {power[1]}, {LIMITS['f32'][limit]};\n@%watched trap;\n{line}"
            count += 1
        if product and (product[3] in scales or product[3] in SCALES[product[1]]):
            compared = f"setp.gtu.{product[1]} %watched, {product[2]}, {LIMITS[product[1]][limit]};"
            line = f"{compared}\n@%watched trap;\n{line}"
            count += 1
        lines.append(line)
    return "\n".join(lines) + "\n", count


def check(headrace, problems, **settings):
    environment = {**os.environ, **{f"HEADRACE_PTX_{name}": str(value) for name, value in settings.items()}}
    return subprocess.run([headrace, "check", "--file", str(problems)], env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", check=False)


def main():
    headrace, failures = sys.argv[1], 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        problems, texts, all_watched = (scratch / name for name in ("problems.txt", "texts", "watched"))
        texts.mkdir()
        all_watched.mkdir()
        problems.write_text(LINES[0] + "\n", encoding="utf-8")
        check(headrace, problems, DUMP=texts)
        problems.write_text("\n".join(LINES) + "\n", encoding="utf-8")
        for path in sorted(texts.iterdir()):
            text = path.read_text(encoding="utf-8")
            (all_watched / path.name).write_text(watched(text, 0)[0], encoding="utf-8")
            below, count = watched(text, 1)
            if not count:
                continue
            mutant = scratch / "below.ptx"
            mutant.write_text(below, encoding="utf-8")
            kernel, outcome = re.search(r"\.entry (\w+)", text)[1], check(headrace, problems, TEXT=mutant)
            is_met = outcome.returncode != 0 and "trap" in outcome.stdout
            print(f"{kernel} and others: {count} places, {'some' if is_met else 'NONE'} met with numbers above -2")
            failures += not is_met
        outcome = check(headrace, problems, TEXT=all_watched)
        print(outcome.stdout)
        failures += outcome.returncode != 0
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
