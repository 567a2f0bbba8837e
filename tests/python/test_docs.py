"""The blocks of Python in the user guide and in the README run, one after the other, as they stand."""

import re
from pathlib import Path

import pytest

from headrace.integrations.transformers import disable

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
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
