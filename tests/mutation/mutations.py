"""Small changes of a program's text, each of which a test should notice."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

_COMPARISONS: Final[dict[type[ast.cmpop], str]] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_OPERATORS: Final[dict[type[ast.operator], str]] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
_NOTHING: Final = "logger", "log"  # whose calls decide nothing


@dataclass(frozen=True)
class Mutation:
    """Bytes ``start`` to ``stop`` of a file, which begin in ``line``, become ``new``."""

    line: int
    start: int
    stop: int
    new: str

    def of(self, source: str) -> str:
        """The whole text with the change."""
        raw = source.encode()
        return (raw[: self.start] + self.new.encode() + raw[self.stop :]).decode()

    def told(self, source: str) -> str:
        """The change in one line."""
        old = source.encode()[self.start : self.stop].decode()
        return f"{self.line}: {_short(old)}  ->  {_short(self.new)}"


def mutations_of(source: str) -> list[Mutation]:
    """All that we know of, by place: those of code alone, not of words, types and what is said in logs."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.found), key=lambda one: (one.start, one.stop, one.new))


def chosen(mutations: list[Mutation], count: int, seed: int) -> list[Mutation]:
    """Some of them, the same ones for the same seed, in the order in which they are to be tried."""
    return Random(seed).sample(mutations, min(count, len(mutations)))


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.found: list[Mutation] = []
        self._source = source
        lines = source.encode().split(b"\n")
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def _place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return f"({ast.unparse(node)})"

    def _change(self, node: ast.expr | ast.stmt, *news: str) -> None:
        start, stop = self._place(node)
        self.found += [Mutation(node.lineno, start, stop, new) for new in news]

    # --- what is left alone ---

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for one in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(one)

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function  # noqa: N815 - names that ast calls

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for one in node.body:
            self.visit(one)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self._change(node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        """A remark for the type checker, in this code."""

    # --- statements are left out, conditions hold always or never ---

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(value, ast.Call) or (
            isinstance(value.func, ast.Attribute)
            and isinstance(value.func.value, ast.Name)
            and value.func.value.id in _NOTHING
        ):
            return
        self._change(node, "pass")
        self.generic_visit(node)

    def _visit_assignment(self, node: ast.Assign | ast.AugAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node, ast.AugAssign) or not all(isinstance(one, ast.Name | ast.Tuple) for one in targets):
            self._change(node, "pass")
        self.visit(node.value)

    visit_Assign = visit_AugAssign = _visit_assignment  # noqa: N815 - names that ast calls

    def _visit_jump(self, node: ast.Break | ast.Continue) -> None:
        self._change(node, "pass")

    visit_Break = visit_Continue = _visit_jump  # noqa: N815 - names that ast calls

    def _visit_condition(self, node: ast.If | ast.IfExp) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self._change(node.test, "True", "False")
        self.generic_visit(node)

    visit_If = visit_IfExp = _visit_condition  # noqa: N815 - names that ast calls

    def visit_While(self, node: ast.While) -> None:
        self._change(node.test, "False")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._change(test, "True")
        self.generic_visit(node)

    # --- expressions ---

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            new = _COMPARISONS[type(node.ops[0])]
            self._change(node, f"({self._text(node.left)} {new} {self._text(node.comparators[0])})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left in node.values:
            self._change(node, f"({word.join(self._text(one) for one in node.values if one is not left)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._change(node, self._text(node.operand))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if new := _OPERATORS.get(type(node.op)):
            self._change(node, f"({self._text(node.left)} {new} {self._text(node.right)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._change(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._change(node, repr(node.value + 1), *(["0"] if node.value not in (0, -1) else []))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max") and len(node.args) > 1:
            self._change(node, *map(self._text, node.args))
        for left in node.keywords:
            if left.arg is not None:
                keywords = [one for one in node.keywords if one is not left]
                self._change(node, ast.unparse(ast.Call(node.func, node.args, keywords)))
        self.generic_visit(node)


def _short(text: str) -> str:
    words: Iterator[str] = iter(text.split())
    joined = " ".join(words)
    return joined if len(joined) <= 100 else f"{joined[:97]}..."
