"""The blocks of Python in the user guide and in the README run, as they stand; what check_prose.py finds and wraps."""

import importlib.util
import re
from pathlib import Path

import pytest

from headrace.integrations.transformers import disable

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/distributed.md"])
def test_blocks_run(page, capsys):
    text = (ROOT / page).read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == text.count("```python")
    names = {}
    try:
        for block in blocks:
            line = text.count("\n", 0, block.start(1))
            exec(compile("\n" * line + block[1], str(ROOT / page), "exec"), names)
    finally:
        disable()


def test_prose_is_wrapped_and_nothing_else():
    path = ROOT / "tests" / "scripts" / "check_prose.py"
    spec = importlib.util.spec_from_file_location("check_prose", path)
    prose = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prose)
    words = " ".join(f"word{i}" for i in range(30))
    code = "`" + "x y " * 40 + "`"
    wide = [words, "", f"* {words}", "  " + words, "", f"12. {words}", "", words + " - " + words]
    exempt = ["# " + words, "", "| " + words + " |", "```", words, "```", "", "    " + words, "", code,
              "", "[" + words + "](there.md)", "", "<p>" + words + "</p>", "", "short", "lines"]
    assert [number for number, _ in prose.too_wide(wide)] == [1, 3, 4, 6, 8]
    assert list(prose.too_wide(exempt)) == [] and prose.wrap(exempt) == exempt
    narrow = prose.wrap(wide)
    assert list(prose.too_wide(narrow)) == [] and max(map(len, narrow)) <= prose.WIDTH
    assert " ".join(narrow).split() == " ".join(wide).split() and prose.wrap(narrow) == narrow
    assert not any(line.startswith("- ") for line in narrow)  # which would begin a list
    assert [line[:6] for line in narrow if line.startswith(("*", "  ", "12"))][:2] == ["* word", "  word"]
