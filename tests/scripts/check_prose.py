#!/usr/bin/env python3
"""Fails where prose of the documents is wider than 120 columns; with --wrap it wraps those paragraphs anew.

Tables, blocks of code and headings are as wide as they are; a line that has no place to break (a link) is no failure.
"""
import pathlib
import re
import sys

WIDTH = 120
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")
BULLET = re.compile(r"^\s*([-*+]|\d+[.)])\s+")
NOT_PROSE = re.compile(r"^(\s*\||#|\s*<|\s*$|\[[^]]+\]:)")  # tables, headings, HTML, blank lines, link targets
# What may not be broken: code and links.
TOKEN = re.compile(r"(?:`[^`]*`|\[[^\]]*\]\([^)]*\)|[^\s`])+")
STARTS_SOMETHING = re.compile(r"([-*+]|\d+[.)]|[#>|=].*)$")  # at the beginning of a line


def paragraphs(lines):
    """(first, end) of the runs of lines that are one paragraph or one item of a list each."""
    first, fenced, in_list = None, False, False
    for i, line in enumerate([*lines, ""]):
        fence = line.lstrip().startswith("```")
        is_code = fenced or fence or (line.startswith("    ") and not (in_list or first is not None))
        fenced ^= fence
        if first is not None and (is_code or NOT_PROSE.match(line) or BULLET.match(line)):
            yield first, i
            first = None
        if line.strip() and not is_code and not NOT_PROSE.match(line):
            in_list = in_list and line.startswith(" ") or bool(BULLET.match(line))
            first = i if first is None else first


def wrapped(lines):
    """The lines of one paragraph, as many words on each as fit."""
    bullet = BULLET.match(lines[0])
    start = bullet[0] if bullet else re.match(r"\s*", lines[0])[0]
    words = TOKEN.findall(" ".join([lines[0][len(start):], *lines[1:]]))
    rows = [start + words[0]]
    for word in words[1:]:
        if len(rows[-1]) + 1 + len(word) > WIDTH and not STARTS_SOMETHING.match(word):
            rows.append(" " * len(start) + word)
        else:
            rows[-1] += " " + word
    return rows


def too_wide(lines):
    """(number, columns) of the lines of prose that could be narrower."""
    for first, end in paragraphs(lines):
        if any(len(line) > WIDTH for line in lines[first:end]) and wrapped(lines[first:end]) != lines[first:end]:
            yield from ((i + 1, len(lines[i])) for i in range(first, end) if len(lines[i]) > WIDTH)


def wrap(lines):
    result, done = [], 0
    for first, end in paragraphs(lines):
        is_wide = any(len(line) > WIDTH for line in lines[first:end])
        result += lines[done:first] + (wrapped(lines[first:end]) if is_wide else lines[first:end])
        done = end
    return result + lines[done:]


def main():
    arguments = [x for x in sys.argv[1:] if x != "--wrap"]
    root = pathlib.Path(arguments[0] if arguments else ".").resolve()
    checked, failures = 0, 0
    for path in sorted(path for pattern in DOCUMENTS for path in root.glob(pattern)):
        checked += 1
        lines = path.read_text(encoding="utf-8").split("\n")
        if "--wrap" in sys.argv:
            path.write_text("\n".join(wrap(lines)), encoding="utf-8")
            continue
        for number, columns in too_wide(lines):
            failures += 1
            print(f"{path.relative_to(root)}:{number}: {columns} columns of prose, expected at most {WIDTH}")
    print(f"{checked} documents, {failures} lines of prose over {WIDTH} columns")
    return 1 if failures or checked == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
