"""Draw defects to plant: `python -m tests.defects.draw --tree DIR`, which writes `defects.toml`.

All places of all three packages at which one line can be made wrong are listed, and some of them
are drawn by a seed: of each room as many as its share of the lines, of each kind about as many, of
a function one at most. Left out, by rule and never by hand, is what no test should see: texts,
annotations, docstrings, errors' arguments, a picture's sizes, kernels that need a GPU, and
features that are about to be dropped.
"""

import argparse
import ast
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
SEED: Final = 13
NUMBER: Final = 72
PACKAGES: Final = ("harness", "reference_engine", "dashboards")
DROPPED: Final = ("harness/aiperf_rows.py", "harness/analysis/attributed.py")  # with their feature
NEEDS_A_GPU: Final = ("import triton", "import pynvml")

FLIPPED: Final[dict[type[ast.AST], tuple[str, str]]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Lt: ("<", ">="),
    ast.Gt: (">", "<="),
    ast.LtE: ("<=", ">"),
    ast.GtE: (">=", "<"),
}
EDGES: Final[dict[type[ast.AST], tuple[str, str]]] = {
    ast.Lt: ("<", "<="),
    ast.Gt: (">", ">="),
    ast.LtE: ("<=", "<"),
    ast.GtE: (">=", ">"),
}
SUMS: Final[dict[type[ast.AST], tuple[str, str]]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
}
ROOM_TESTS: Final = {
    "dashboards": ["tests/dashboards", "tests/golden"],
    "harness": ["tests/harness", "tests/golden"],
    "reference_engine": ["tests/reference_engine"],
}
GOES_WRONG: Final = {
    "comparison": "a comparison says the opposite",
    "edge": "the value at the edge falls on the other side",
    "sum": "an arithmetic sign is another",
    "and or": "a condition needs one of two instead of both, or both instead of one",
    "constant": "a small number is off by one",
    "flag": "yes is no",
    "not": "a negation is lost",
    "return": "an early return is lost",
    "arguments": "two arguments have changed places",
    "except": "an error that was handled is raised",
    "min max": "the least is the largest, or the other way round",
    "statement": "a statement is lost",
}
TEXT_CALLS: Final = frozenset(
    {"print", "echo", "phase", "warn", "note", "info", "debug", "warning", "error", "add_note"}
)
LOGGERS: Final = frozenset({"logger", "log", "logging"})


@dataclass(frozen=True, slots=True)
class Place:
    """One line that can be made wrong. `function`: its qualified name within the file."""

    file: str
    function: str
    line: int
    old: str
    new: str
    kind: str


class _Places(ast.NodeVisitor):
    """All places in one file."""

    def __init__(self, file: str, source: str) -> None:
        self.found: list[Place] = []
        self._file = file
        self._lines = source.splitlines()
        self._names: list[str] = []
        self._in_function = 0

    # What is looked into, and what is not...

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for one in node.body:
            self.visit(one)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._names.append(node.name)
        self._in_function += 1
        for one in node.body:
            self.visit(one)
        self._in_function -= 1
        self._names.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    def visit_Raise(self, node: ast.Raise) -> None:
        return

    def visit_Assert(self, node: ast.Assert) -> None:
        return

    def visit_keyword(self, node: ast.keyword) -> None:
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    # What can be made wrong...

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            right = node.comparators[0]
            for kind, table in (("comparison", FLIPPED), ("edge", EDGES)):
                if (pair := table.get(type(node.ops[0]))) is not None:
                    self._replace_between(node.left, right, *pair, kind)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)
        is_of_numbers = not any(
            isinstance(side, texts)
            and not (isinstance(side, ast.Constant) and isinstance(side.value, int | float))
            for side in (node.left, node.right)
        )
        if is_of_numbers and (pair := SUMS.get(type(node.op))) is not None:
            self._replace_between(node.left, node.right, *pair, "sum")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        if len(node.values) == 2:
            self._replace_between(node.values[0], node.values[1], *pair, "and or")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value), "flag")
        elif isinstance(node.value, int) and 0 <= node.value <= 3:
            self._replace(node, str(node.value + 1), "constant")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            inner = ast.get_source_segment("\n".join(self._lines), node.operand)
            self._replace(node, f"bool({inner})", "not")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        *_, last = node.body
        if isinstance(last, ast.Return) and not node.orelse:
            self._replace(last, "pass", "return")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        if name in TEXT_CALLS or _is_logger(node.func):
            return
        if name in ("min", "max") and isinstance(node.func, ast.Name):
            self._replace(node.func, "max" if name == "min" else "min", "min max")
        if len(node.args) >= 2 and name not in ("isinstance", "getattr", "hasattr"):
            self._swap(*node.args[:2])
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        first = node.body[0]
        if not isinstance(first, ast.Raise) and len(node.body) == 1:
            self._replace(first, "raise", "except")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not self._is_text(node.value):
            self._replace(node, "pass", "statement")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass", "statement")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        is_init = self._names[-1:] == ["__init__"]
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript) and not is_init:
            self._replace(node, "pass", "statement")
        self.generic_visit(node)

    # How...

    def _swap(self, one: ast.expr, other: ast.expr) -> None:
        if not (isinstance(one, ast.Name) and isinstance(other, ast.Name)):
            return
        if one.id != other.id and one.lineno == other.lineno:
            line = self._lines[one.lineno - 1].encode()
            between = line[one.end_col_offset : other.col_offset].decode()
            text = f"{other.id}{between}{one.id}"
            self._put(one.lineno, one.col_offset, other.end_col_offset, text, "arguments")

    def _replace_between(
        self, left: ast.expr, right: ast.expr, old: str, new: str, kind: str
    ) -> None:
        if left.end_lineno != right.lineno:
            return
        line = self._lines[right.lineno - 1].encode()
        between = line[left.end_col_offset : right.col_offset].decode()
        if between.count(old) == 1:
            text = between.replace(old, new)
            self._put(right.lineno, left.end_col_offset, right.col_offset, text, kind)

    def _replace(self, node: ast.expr | ast.stmt, text: str, kind: str) -> None:
        if node.lineno == node.end_lineno:
            self._put(node.lineno, node.col_offset, node.end_col_offset, text, kind)

    def _put(self, number: int, start: int | None, end: int | None, text: str, kind: str) -> None:
        if not self._in_function:
            return
        line = self._lines[number - 1]
        raw = line.encode()
        new = (raw[:start] + text.encode() + raw[end:]).decode()
        function = ".".join(self._names)
        self.found.append(Place(self._file, function, number, line.strip(), new.strip(), kind))

    @staticmethod
    def _is_text(call: ast.Call) -> bool:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        name = call.func.id if isinstance(call.func, ast.Name) else name
        return name in TEXT_CALLS or _is_logger(call.func)


def _is_logger(func: ast.expr) -> bool:
    owner = func.value if isinstance(func, ast.Attribute) else func
    return isinstance(owner, ast.Name) and owner.id.strip("_").lower() in LOGGERS


def places_in(tree: Path) -> Iterator[Place]:
    """Of all files, in order. A line that stands twice in a function cannot be found again."""
    for path in sorted(path for name in PACKAGES for path in (tree / name).rglob("*.py")):
        source, file = path.read_text(), str(path.relative_to(tree))
        if file in DROPPED or any(needs in source for needs in NEEDS_A_GPU):
            continue
        visitor = _Places(file, source)
        visitor.visit(ast.parse(source))
        times = Counter((one.function, one.old, one.new) for one in visitor.found)
        lines = defaultdict(set)
        for one in visitor.found:
            lines[one.function, one.old].add(one.line)
        for one in visitor.found:
            is_clear = times[one.function, one.old, one.new] == 1
            if is_clear and len(lines[one.function, one.old]) == 1:
                yield one


def room_of(file: str) -> str:
    """The folder, of a file that lies in a package's own folder the package."""
    return str(Path(file).parent)


def shares(tree: Path, rooms: Sequence[str], number: int) -> dict[str, int]:
    """How many of each room: one at least, else by its lines, by largest remainder."""
    lines = {
        room: sum(len(path.read_text().splitlines()) for path in (tree / room).glob("*.py"))
        for room in rooms
    }
    exact = {room: number * count / sum(lines.values()) for room, count in lines.items()}
    found = {room: max(1, int(share)) for room, share in exact.items()}
    for room in sorted(rooms, key=lambda one: found[one] - exact[one]):
        found[room] += sum(found.values()) < number
    return found


def draw(tree: Path, *, seed: int = SEED, number: int = NUMBER) -> list[Place]:
    """Kind by kind, each of which has the same chance in a room."""
    rng = random.Random(seed)
    by_room: dict[str, list[Place]] = defaultdict(list)
    for place in places_in(tree):
        by_room[room_of(place.file)].append(place)
    drawn: list[Place] = []
    for room, count in shares(tree, sorted(by_room), number).items():
        kinds: dict[str, list[Place]] = defaultdict(list)
        for place in by_room[room]:
            kinds[place.kind].append(place)
        taken: set[tuple[str, str]] = set()
        while len(taken) < min(count, len({(one.file, one.function) for one in by_room[room]})):
            place = rng.choice(kinds[rng.choice(sorted(kinds))])
            if (place.file, place.function) not in taken:
                taken.add((place.file, place.function))
                drawn.append(place)
    return drawn


def as_toml(places: Sequence[Place]) -> str:
    lines = [
        f"# Drawn by tests/defects/draw.py from 7cb23c3 with the seed {SEED}. Where the code has",
        "# moved, `now_file`, `now_old` and `now_new` tell of a defect where it is planted today.",
    ]
    for number, one in enumerate(places, 1):
        wrong = f"{one.function.rpartition('.')[2]}: {GOES_WRONG[one.kind]}"
        lines += ["", "[[defect]]", f'id = "{number:02}"']
        pairs = {"file": one.file, "function": one.function, "kind": one.kind}
        pairs |= {"old": one.old, "new": one.new, "wrong": wrong}
        lines += [f"{key} = {quoted(value)}" for key, value in pairs.items()]
    lines += ["", "[tests]  # a package's, where those that import the file see nothing"]
    lines += [f"{name} = {json.dumps(paths)}" for name, paths in ROOM_TESTS.items()]
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """As TOML has it: plain, where that can be."""
    if "'" not in text:
        return f"'{text}'"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, required=True)
    options = parser.parse_args(arguments)
    (HERE / "defects.toml").write_text(as_toml(draw(options.tree)))


if __name__ == "__main__":
    main(sys.argv[1:])
