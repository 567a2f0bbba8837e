"""Why a mutant of a PTX statement that nobody noticed is right too: one rule for each reason."""
import itertools
import pathlib
import re
import tempfile

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "src" / "cuda"
LIBRARY_CALL = re.compile(r"\b(exp|expm1|log1p|exponential|frexp|ldexp|sqrt)f?\(")
MOST_COPIES = 12
BITS = {"r": "b32", "rd": "b64", "rs": "b16", "f": "b32", "fd": "b64"}


def unread_result(mutant, _problems, _checks):
    """Nothing reads the result."""
    target = re.match(r"\s*(?:@!?%\w+\s+)?[\w.]+\s+(%\w+)\s*,", mutant.original)
    if not target or mutant.original.startswith(("st", "atom", "red")):
        return False
    body = "\n".join(other.text for other in mutant.text.kernels[mutant.kernel] if other.line != mutant.line)
    return not re.search(re.escape(target.group(1)) + r"(?!\d)", body)


def other_barrier(mutant, _problems, _checks):
    """Without this barrier the interpreter, which knows what barriers order, sees no race: another one is enough."""
    return mutant.title == "no barrier"


def other_wait(mutant, _problems, _checks):
    """Without this wait or fence the interpreter, which knows what is in flight, sees no fault: another one is enough."""
    waits = re.search(r"wait_group|wgmma\.fence|fence\.proxy|commit", mutant.original)
    return bool(waits) and mutant.title in ("left out", "waits for one less")


def rounding(mutant, _problems, _checks):
    """One operation rounds another way: half a unit in the last place, which the bars leave free."""
    return mutant.title.endswith("rounds to zero")


def first_lane(mutant, _problems, _checks):
    """`down` gives lane 0 the sum that `bfly` gives all lanes, and lane 0 alone uses it."""
    return mutant.title == "shfl of another kind"


def source_line(mutant):
    """Of the kernels, '' where it is not known."""
    name, _, number = mutant.place.split(" < ", 1)[0].partition(":")
    paths = list(SOURCES.rglob(name)) if number else []
    lines = paths[0].read_text(encoding="utf-8").splitlines() if len(paths) == 1 else []
    return lines[int(number) - 1] if 0 < int(number or 0) <= len(lines) else ""


def library(mutant, _problems, _checks):
    """Inside of a function of the CUDA library (exp, expm1, log1p, frexp, ldexp): digits that the bars leave free."""
    return mutant.place.startswith(("cmath", "math")) or bool(LIBRARY_CALL.search(source_line(mutant)))


def division(mutant, _problems, _checks):
    """Of a signed division, the correction for negative numbers, of which there are none."""
    line = re.sub(r'"[^"]*"|//.*', "", source_line(mutant))
    of_integers = re.search(r"\.[sub](32|64)\b", mutant.original) and not mutant.original.startswith(("ld", "st"))
    return bool(of_integers) and ("/" in line or "%" in line)


def skipped_zeros(mutant, _problems, _checks):
    """Where a product begins and ends in the zeros of a triangular operand: more terms are more zeros."""
    return "Part::a_" in source_line(mutant)


def padding_column(mutant, _problems, _checks):
    """The edge of a loop over columns: one more is the odd column at a row's end, which nobody reads."""
    return mutant.title == "the edge of a comparison" and "j < columns; j += warp_lanes" in source_line(mutant)


def forbidden_gate(mutant, _problems, _checks):
    """The acceptance of gates: no line has a NaN or a positive one, the tests of the interface and of numbers have."""
    return any(test in source_line(mutant) for test in ("positive_gates ?", "most <= 0", "log_decay < 0 ?"))


def offset_sign(mutant, _problems, _checks):
    """The sign of a 32-bit offset of a sequence: none is negative."""
    return "low >> 31" in source_line(mutant)


def trapped(mutant, problems, checks, condition, on):
    """Whether a run traps where the predicate %stops, which `condition` sets, is `on` at the statement as it was."""
    with tempfile.NamedTemporaryFile(dir=checks.scratch, suffix=".ptx") as file:
        path = pathlib.Path(file.name)
        mutant.written(path, f"{{ .reg .pred %stops; {condition} @{'' if on else '!'}%stops trap; {mutant.original} }}")
        return bool(checks.run([problem.text for problem in mutant.reaching(problems)], 600, TEXT=path))


def never_chosen(mutant, problems, checks):
    """It changes what is chosen at no execution: there is no trap where it is."""
    found = re.search(r"selp\.\w+\s+\S+,\s*(\S+),\s*(\S+),\s*(%p\d+);", mutant.original)
    changed = found and re.search(r"selp\.\w+\s+\S+,\s*(\S+),\s*(\S+),\s*(%p\d+);", mutant.changed)
    if not changed or changed.group(3) != found.group(3) or found.group(1) != changed.group(1) and \
            found.group(2) != changed.group(2):
        return False
    return not trapped(mutant, problems, checks, f"mov.pred %stops, {found.group(3)};",
                       on=found.group(1) != changed.group(1))


def positive_exponent(mutant, problems, checks):
    """It takes the exponential of a positive number, at which exponentials_test.py stops."""
    found = re.search(r"ex2\.approx\.ftz\.f32\s+%f\d+,\s*(%f\d+);", mutant.changed)
    return bool(found) and trapped(mutant, problems, checks, f"setp.gt.f32 %stops, {found.group(1)}, 0f00000000;", on=True)


def other_copy(mutant, problems, checks):
    """It is noticed in another copy that inlining or unrolling made of the source's statement: no slip changes one."""
    return any(copy.noticed(problems, checks) for copy in itertools.islice(mutant.copies(), MOST_COPIES))


def not_entered(mutant, problems, _checks):
    """It takes away the guard of a branch past which no problem goes: coverage counts what lies there."""
    return mutant.tried_by_none(problems)


def same_value(mutant, problems, checks):
    """The register in the other's place holds the same number at each execution: there is no trap where it does not."""
    names = re.fullmatch(r"register %([a-z]+)(\d+) to %[a-z]+(\d+)", mutant.title)
    if not names:
        return False
    kind, one, other = names.groups()
    one, other = f"%{kind}{one}", f"%{kind}{other}"
    compared = f"{'xor.pred' if kind == 'p' else 'setp.ne.' + BITS[kind]} %stops, {one}, {other};"
    return not trapped(mutant, problems, checks, compared, on=True)


def within_the_bars(mutant, problems, checks):
    """It changes errors, but within their bars."""
    lines = [problem.text for problem in mutant.reaching(problems) if isinstance(problem.text, str)]
    with tempfile.NamedTemporaryFile(dir=checks.scratch, suffix=".ptx") as file:
        path = pathlib.Path(file.name)
        mutant.written(path)
        return bool(lines) and checks.errors(lines) != checks.errors(lines, TEXT=path)


def reason_of(mutant, problems, checks):
    """The text of the first rule that holds, or ''."""
    for rule in (unread_result, other_barrier, other_wait, rounding, first_lane, library, division, skipped_zeros,
                 padding_column, forbidden_gate, offset_sign, not_entered, same_value, never_chosen,
                 positive_exponent, within_the_bars, other_copy):
        if rule(mutant, problems, checks):
            return rule.__doc__.split(":", 1)[0].rstrip(".")
    return ""
