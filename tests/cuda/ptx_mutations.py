"""The mutations of one PTX statement: what a slip of the pen in a kernel, or of a compiler, would make of it."""
import re

# What stands for what: the first word of an opcode, whole.
SWAPS = {"add": "sub", "sub": "add", "min": "max", "max": "min", "and": "or", "or": "and", "shl": "shr", "shr": "shl",
         "div": "mul", "ex2": "lg2", "lg2": "ex2", "sqrt": "mov", "neg": "mov", "abs": "mov", "not": "mov"}
# The neighbour of a comparison, which the edge alone tells from it, and its opposite.
NEIGHBOURS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq",
              "ltu": "leu", "leu": "ltu", "gtu": "geu", "geu": "gtu", "equ": "neu", "neu": "equ"}
OPPOSITES = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "ltu": "ge", "geu": "lt", "gtu": "le", "leu": "gt"}
BITS = {"8": 1, "16": 2, "32": 4, "64": 8}
STATEMENT = re.compile(r"^(\s*\{?\s*)(@!?%\w+\s+)?([a-z][\w.]*)(\s+.*?)?;(\s*\}?\s*)$")
REGISTER = re.compile(r"%[a-z]+\d+")


def swapped_opcode(opcode, operands):
    words = opcode.split(".")
    if words[0] not in SWAPS:
        return
    other = SWAPS[words[0]]
    if other == "mov":  # no modifiers but the type
        yield f"{words[0]} left out", f"mov.{words[-1]}", operands
    elif words[0] == "shr" or other == "shr":  # shl has bits, shr has a sign
        kind = "u" if other == "shr" else "b"
        yield f"{words[0]} to {other}", f"{other}.{kind}{words[-1][1:]}", operands
    elif words[0] == "div":
        kind = [word for word in words[1:] if word not in ("full", "approx", "ftz")]
        whole = kind[-1][0] in "su"
        yield "div to mul", "mul." + ("lo." if whole else "") + ".".join(kind), operands
    else:
        yield f"{words[0]} to {other}", ".".join([other] + words[1:]), operands


def fused(opcode, operands):
    words = opcode.split(".")
    if words[0] not in ("fma", "mad") or len(operands) != 4 or "cc" in words:
        return
    target, a, b, c = operands
    yield "the addend left out", ".".join(["mul"] + words[1:]), [target, a, b]
    kind = words[-1]
    if words[0] == "fma" and kind in ("f32", "f64"):
        before = f"{{ .reg .{kind} %mutant; neg.{kind} %mutant,"
        yield "the sign of the addend", f"{before} {c}; {opcode} {target}, {a}, {b}, %mutant; }}", None
        yield "the sign of a factor", f"{before} {a}; {opcode} {target}, %mutant, {b}, {c}; }}", None


def compared(opcode, operands):
    words = opcode.split(".")
    if words[0] != "setp":
        return
    for title, table in (("the edge of a comparison", NEIGHBOURS), ("the opposite comparison", OPPOSITES)):
        if words[1] in table:
            yield title, ".".join(["setp", table[words[1]]] + words[2:]), operands


def multiplied(opcode, operands):
    words = opcode.split(".")
    if words[0] == "mul" and len(operands) == 3 and "wide" not in words:
        rest = [word for word in words[1:] if word not in ("lo", "hi")]
        yield "mul to add", ".".join(["add"] + rest), operands


def moved(opcode, operands):
    words = opcode.split(".")
    if words[0] == "selp":
        yield "selp's operands swapped", opcode, [operands[0], operands[2], operands[1], operands[3]]
    if words[0] == "cvt" and "rn" in words:
        yield "cvt rounds to zero", ".".join("rz" if word == "rn" else word for word in words), operands
    if words[0] in ("add", "sub", "mul", "fma", "div") and "rn" in words and words[-1] in ("f32", "f64"):
        yield f"{words[0]} rounds to zero", ".".join("rz" if word == "rn" else word for word in words), operands
    if words[0] == "shfl":
        kinds = {"bfly": "down", "idx": "bfly", "up": "down", "down": "up"}
        yield "shfl of another kind", ".".join(kinds.get(word, word) for word in words), operands
    if words[0] in ("ldmatrix", "stmatrix"):
        transposed = [word for word in words if word != "trans"]
        at = transposed.index("shared")
        yield "transposed", ".".join(words[:at] + ["trans"] + words[at:] if transposed == words else transposed), operands


# Statements that leave no result in a register: what they store, copy, order or wait for.
EFFECTS = ("st.", "stmatrix", "cp.async", "wgmma.fence", "wgmma.commit", "wgmma.wait", "fence.", "barrier.arrive", "red.")


def ordered(opcode, operands):
    words = opcode.split(".")
    if words[:2] == ["bar", "sync"] or words[:2] == ["barrier", "sync"]:
        yield "no barrier", "", None
    if opcode.startswith(EFFECTS) and "param" not in words:
        yield "left out", "", None
    if "wait_group" in words:
        yield "waits for one less", opcode, [str(int(operands[0]) + 1)]
    if words[0] == "barrier" and operands[0].isdigit():  # where some arrive and others wait
        yield "another barrier", opcode, [str((int(operands[0]) + 1) % 16), *operands[1:]]


def element_bytes(opcode):
    bits = re.search(r"\.[a-z]+(8|16|32|64)$", opcode)
    return BITS[bits.group(1)] if bits else 0


def addressed(opcode, operands):
    words = opcode.split(".")
    size = element_bytes(opcode)
    if words[0] not in ("ld", "st") or "param" in words or not size:
        return
    for i, operand in enumerate(operands):
        place = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", operand)
        if place:
            other = f"[{place.group(1)}+{int(place.group(2) or 0) + size}]"
            yield "the next element", opcode, operands[:i] + [other] + operands[i + 1:]


FLOATS = {"f": ("00000000", "3F800000"), "d": ("0000000000000000", "3FF0000000000000")}


def constant(opcode, operands):
    for i, operand in enumerate(operands):
        number = re.fullmatch(r"-?\d+", operand)
        real = re.fullmatch(r"0([fd])([0-9A-Fa-f]+)", operand)
        if i and number and not opcode.startswith(("bar", "shfl", "cp")):
            yield "a constant more by 1", opcode, operands[:i] + [str(int(operand) + 1)] + operands[i + 1:]
        if i and real:
            zero, one = FLOATS[real.group(1)]
            other = one if real.group(2).upper() == zero else zero
            yield "another constant", opcode, operands[:i] + [f"0{real.group(1)}{other}"] + operands[i + 1:]


def registers(opcode, operands, nearby, random):
    """A source register replaced by one of its kind in the lines around."""
    if opcode.startswith(("bra", "shfl", "cvta")):
        return
    first = 0 if opcode.startswith("st") else 1
    for i, operand in enumerate(operands[first:], first):
        for name in REGISTER.findall(operand):
            kind = re.match(r"%[a-z]+", name).group()
            others = sorted({other for other in nearby if re.fullmatch(kind + r"\d+", other) and other != name})
            if others:
                other = random.choice(others)
                changed = re.sub(re.escape(name) + r"(?!\d)", other, operand)
                yield f"register {name} to {other}", opcode, operands[:i] + [changed] + operands[i + 1:]


def guarded(guard, opcode, operands):
    """Mutations of the guard: (title, guard, opcode, operands)."""
    if not guard:
        return
    other = guard.replace("@!", "@") if "!" in guard else guard.replace("@", "@!")
    yield "the guard's opposite", other, opcode, operands
    yield "no guard", "", opcode, operands
    yield "never executed", "", "", None


def split_operands(text):
    parts, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += letter
    return parts + [current.strip()] if current.strip() else parts


def mutations_of(line, nearby, random):
    """[(title, the line with it)] of a line with one statement; `nearby` are registers of the lines around."""
    match = STATEMENT.match(line)
    if not match:
        return []
    before, guard, opcode, text, after = (part or "" for part in match.groups())
    if ";" in text:
        return []
    operands = split_operands(text)
    makers = (swapped_opcode, fused, compared, multiplied, moved, ordered, addressed, constant)
    found = [(title, guard, *rest) for make in makers for title, *rest in make(opcode, operands)]
    found += [(title, guard, *rest) for title, *rest in registers(opcode, operands, nearby, random)]
    found += list(guarded(guard, opcode, operands))
    result = []
    for title, its_guard, its_opcode, its_operands in found:
        if its_operands is not None:
            changed = f"{before}{its_guard}{its_opcode} {', '.join(its_operands)};{after}"
        else:  # a block, or nothing
            changed = f"{before}{its_opcode}{after}"
        if changed.split() != line.split():
            result.append((title, changed))
    return result
