#!/usr/bin/env python3
"""Fails unless every source file starts with a caption and every file over 400 lines gives its reason."""
import pathlib
import re
import sys

MAX_LINES = 400
# Line 1 by kind of file; a script's caption may stand below its #! line, a Python file's is its docstring.
CAPTION = {
    "slashes": re.compile(r"^(//|/\*) \S.{9,}"),
    "hash": re.compile(r"^# \S.{9,}"),
    "python": re.compile(r'^("""\S.{9,}|# \S.{9,})'),
    "heading": re.compile(r"^# \S"),
}
KIND = {".hpp": "slashes", ".cpp": "slashes", ".h": "slashes", ".c": "slashes", ".cuh": "slashes", ".cu": "slashes",
        ".sh": "hash", ".cmake": "hash", ".in": "hash", ".txt": "hash", ".py": "python", ".md": "heading"}
SKIPPED = {".git", "build", "__pycache__"}


def files(root):
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.is_file() and not SKIPPED.intersection(parts) and path.suffix in KIND:
            yield path


def problems_of(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        return ["is empty"]
    first = lines[1] if lines[0].startswith("#!") and len(lines) > 1 else lines[0]
    found = []
    if not CAPTION[KIND[path.suffix]].match(first):
        found.append(f"line 1 is no caption: {first[:60]!r}")
    is_code = path.suffix not in {".md", ".txt"}  # documents and problem lists may be as long as they like
    if is_code and len(lines) > MAX_LINES and not any("over 400 lines:" in line for line in lines[:40]):
        found.append(f"has {len(lines)} lines and no comment 'over 400 lines: <reason>' near its top")
    return found


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    checked, failures = 0, 0
    for path in files(root):
        checked += 1
        for problem in problems_of(path):
            failures += 1
            print(f"{path.relative_to(root)}: {problem}")
    print(f"{checked} files, {failures} without a caption or over {MAX_LINES} lines without a reason")
    return 1 if failures or checked == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
