"""How the product is built: rooms and the imports between them, circles, ladders, size, copies of one contract.

    python bench/house.py [CHECKOUT ...]     # a column for each; without any, this checkout

Needs grimp, which import-linter brings. Reads source only: nothing of a checkout is imported or built.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from importlib.machinery import PathFinder
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import grimp

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ("fmq", "burst", "driver")
C_COMMENT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"', re.DOTALL)
C_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|\w+|<<=|>>=|->|\+\+|--|&&|\|\||<<|>>|[-+*/%&|^<>=!]=|\S')
EXECUTE = re.compile(r"_?(execute|run)(_[a-z]\w*)?$")
APART = re.compile(r"driver\.(cli|demos|devices|doctor|nn|vts)\b")  # commands, judges and arithmetic, not the contract
SURFACE = {"run", "run_async", "execute", "execute_async", "execute_fenced"}
Figures = dict[str, int | str]


class Source:
    """The Python of a checkout: a tree for each module of the product, and of its tests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
        self.files = {
            ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths
        }
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.files.items()}
        self.tests = [ast.parse(path.read_text()) for path in sorted((root / "tests").rglob("*.py"))]
        self.classes = {
            (name, node.name): node
            for name, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }

    def find_class(self, module: str, name: str) -> tuple[str, str] | None:
        """The module that defines what `module` calls by that name; None when it is not the product's."""
        if (module, name) in self.classes:
            return module, name
        for node in ast.walk(self.trees.get(module, ast.Module([], []))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name and node.module != module:
                        return self.find_class(node.module, alias.name)
        return None

    def bases(self, module: str, name: str) -> list[str]:
        """As they are written, without parameters."""
        return [ast.unparse(base).partition("[")[0] for base in self.classes[module, name].bases]

    def ladder(self, module: str, name: str) -> list[str]:
        """The longest line of ancestors within the product, the class itself first. Protocols hold no code: no rung."""
        bases = self.bases(module, name)
        above = [self.ladder(*found) for base in bases if (found := self.find_class(module, base))]
        return [*([] if "Protocol" in bases else [name]), *max(above, key=len, default=[])]

    def is_error(self, module: str, name: str) -> bool:
        """Errors are a tree by design."""
        bases = self.bases(module, name)
        above = [found for base in bases if (found := self.find_class(module, base))]
        return any(base.endswith(("Error", "Exception")) for base in bases) or any(self.is_error(*at) for at in above)


def room(module: str) -> str:
    """fmq, burst, and what lies in the root of driver: its folders, and the modules that are loose there."""
    return ".".join(module.split(".")[: 2 if module.startswith("driver.") else 1])


def graph_of(root: Path) -> grimp.ImportGraph:
    """What imports what. The finder of an editable install would lead to another checkout, so it is left out."""
    finders = sys.meta_path[:]
    sys.meta_path[:] = [PathFinder]
    sys.path.insert(0, str(root))
    try:
        return grimp.build_graph(*PACKAGES, cache_dir=None)
    finally:
        sys.meta_path[:] = finders
        sys.path.remove(str(root))


def shape(source: Source) -> Figures:
    """Rooms, and what depends on what. An arrow is upward when it must be cut before rooms can stand in layers."""
    graph = graph_of(source.root)
    loose = [n for n, path in source.files.items() if n.count(".") == 1 and path.parent.name == "driver"]
    files = Counter(room(name) for name in source.trees if name not in loose)
    arrows = {(room(a), room(b)) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)}
    upward = {(room(a), room(b)) for a, b in graph.nominate_cycle_breakers("driver")}
    circles = {
        frozenset({name} | (graph.find_upstream_modules(name) & graph.find_downstream_modules(name)))
        for name in graph.modules
    }
    circles = {circle for circle in circles if len(circle) > 1}
    return {
        "modules in the root of driver": len(loose),
        "rooms that are folders": len(files),
        "files in a room: median, most": f"{median(files.values()):g}, {max(files.values())}",
        "arrows between rooms": sum(a != b for a, b in arrows),
        "upward arrows": len(upward),
        "circles of modules": len(circles),
        "modules in the largest circle": max(map(len, circles), default=0),
        "circles that cross rooms": sum(len(set(map(room, circle))) > 1 for circle in circles),
    }


def classes(source: Source) -> Figures:
    """The longest lines of inheritance, by the names of those that stand at their ends; names that mean two classes."""
    ladders = [source.ladder(*at) for at in source.classes if not source.is_error(*at)]
    longest = max(map(len, ladders))
    ends = ", ".join(sorted(ladder[0] for ladder in ladders if len(ladder) == longest))
    twice = sorted(name for name, count in Counter(name for _module, name in source.classes).items() if count > 1)
    return {
        "classes": len(source.classes),
        "longest inheritance, in classes": f"{longest}: {ends}",
        "names of more than one class": f"{len(twice)}: {', '.join(twice)}",
    }


def names_in(node: ast.AST) -> Iterator[str]:
    """Names that an expression or an import takes from elsewhere."""
    if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
        yield node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.name for alias in node.names)


def statements(tree: ast.Module) -> int:
    """Without docstrings."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sum(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
        for node in nodes
    )


def of_package(source: Source, package: str) -> int:
    """Statements of one of the packages."""
    return sum(statements(tree) for name, tree in source.trees.items() if name.split(".")[0] == package)


def size(source: Source) -> Figures:
    """Statements and tokens (no comments, no docstrings, lines of any length); public and private names."""
    c = "\n".join(path.read_text() for path in (source.root / "csrc").rglob("*.[ch]"))
    code = C_COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else " ", c)
    reached = [name for tree in source.tests for node in ast.walk(tree) for name in names_in(node)]
    private = [name for name in reached if re.match("_(?!_)", name)]
    public = {
        f"names in {package}.__all__": len(ast.literal_eval(node.value))
        for package in PACKAGES
        for node in source.trees[package].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    }
    return {
        **public,
        **{f"Python statements, {package}": of_package(source, package) for package in PACKAGES},
        "C tokens": len(C_TOKEN.findall(code)),
        "Python statements of tests": sum(map(statements, source.tests)),
        "private names that tests reach for": f"{len(set(private))} ({len(private)} times)",
    }


def called(node: ast.Call) -> str:
    """The name of what is called."""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def mentions(node: ast.AST, *names: str) -> bool:
    """Return whether a name of those stands below this node."""
    return any(getattr(each, "id", getattr(each, "attr", "")) in names for each in ast.walk(node))


def contracts(source: Source) -> Figures:
    """How often the product says what an execution is: its names, its futures, its tables, its second try."""
    functions, calls, tries = [], [], 0
    for name, tree in source.trees.items():
        nodes = list(ast.walk(tree))
        calls += [node for node in nodes if isinstance(node, ast.Call)]
        if not APART.match(name):
            functions += [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            asked = [node.test for node in nodes if isinstance(node, ast.If)]
            tries += sum(mentions(node, "OUTPUT_INSUFFICIENT_SIZE", "OutputInsufficientSize") for node in asked)
    futures = [
        name
        for at, name in source.classes
        if any(end.endswith(("Future", "Completion")) for end in (name, *source.bases(at, name)))
    ]
    return {
        "definitions of run, execute, execute_async, execute_fenced, run_async": sum(n in SURFACE for n in functions),
        "definitions of `execute*`, `run*`, `_execute*`, `_run*`": sum(bool(EXECUTE.match(name)) for name in functions),
        "conditions on outputs that are too small": tries,
        "classes of futures": f"{len(futures)}: {', '.join(sorted(futures))}",
        "tables of slots that are made": sum(bool(re.match("Slot[A-Z]", called(call))) for call in calls),
        "calls with more than four terms by position": sum(len(call.args) > 4 for call in calls),
        "uses of getattr": sum(called(call) == "getattr" for call in calls),
    }


def main() -> None:
    """Prints a table in Markdown: a line for each figure, a column for each checkout."""
    roots = [Path(name).resolve() for name in sys.argv[1:]] or [Path(__file__).parents[1]]
    figures = (shape, classes, size, contracts)
    columns = [{key: value for ask in figures for key, value in ask(source).items()} for source in map(Source, roots)]
    print(f"| | {' | '.join(root.name for root in roots)} |\n|---|{'---|' * len(roots)}")
    for key in columns[0]:
        print(f"| {key} | {' | '.join(str(column[key]) for column in columns)} |")


if __name__ == "__main__":
    main()
