"""Follows what clocks say through the source of tests, and finds where it is compared."""

import ast
import itertools
import re
from collections import defaultdict
from functools import cached_property

NAMES = ("monotonic", "perf_counter", "process_time", "thread_time", "time", "clock_gettime")
CLOCKS = {f"{name}{unit}" for name in NAMES for unit in ("", "_ns")}
FIGURES = {"time_in_driver", "time_on_device", "ru_stime", "ru_utime"}
READS = re.compile(rf"\b(({'|'.join(NAMES)})(_ns)?\(|{'|'.join(sorted(FIGURES))})")
KEEP = {"abs", "float", "int", "list", "map", "max", "min", "next", "round", "set", "sorted", "sum", "tuple", "zip"}
MODULES = {"functools", "itertools", "np", "statistics"}  # what their functions return is made of what they are given
PUT = {"add", "append", "extend", "insert", "put", "setdefault"}
MATTER = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.withitem, ast.Call)
MATTER += (ast.Return, ast.Yield, ast.Compare)
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
PARTS = {
    ast.Attribute: ("value",),
    ast.Await: ("value",),
    ast.BinOp: ("left", "right"),
    ast.BoolOp: ("values",),
    ast.Dict: ("values",),
    ast.DictComp: ("value",),
    ast.GeneratorExp: ("elt",),
    ast.IfExp: ("body", "orelse"),
    ast.Lambda: ("body",),
    ast.List: ("elts",),
    ast.ListComp: ("elt",),
    ast.NamedExpr: ("value",),
    ast.Set: ("elts",),
    ast.SetComp: ("elt",),
    ast.Starred: ("value",),
    ast.Subscript: ("value",),
    ast.Tuple: ("elts",),
    ast.UnaryOp: ("operand",),
}
"""Expressions that are made of what a clock said if one of these parts is."""


class Readings:
    """A file of the tests: which of its expressions are made of what a clock said, and where these are compared."""

    def __init__(self, path):
        text = path.read_text()
        self.path, self.tree, self.lines = path, ast.parse(text), text.splitlines()
        self.scopes = {"": self.tree}  # a function with all that is defined in it, or the lines of the file itself
        self.stress = set()  # names of functions that only `make stress` runs
        self._told = defaultdict(set)  # scope -> names
        self._attributes = set(FIGURES)
        self._nodes = {}
        self.returns = {}  # function -> whether it returns what a clock said, or at which places of a tuple
        self.taken = {node.module for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)}
        marks = (ast.unparse(node) for node in self.tree.body if isinstance(node, ast.Assign))
        self._gather(self.tree, "", any(line.startswith("pytestmark") and "stress" in line for line in marks))

    def _gather(self, node, prefix, is_stress):
        for child in ast.iter_child_nodes(node):
            is_marked = is_stress or any(
                ast.unparse(mark).startswith("pytest.mark.stress") for mark in getattr(child, "decorator_list", ())
            )
            if isinstance(child, FUNCTION):
                self.scopes[prefix + child.name] = child
                self.stress |= {prefix + child.name} if is_marked else set()
            elif isinstance(child, ast.ClassDef | ast.If | ast.Try | ast.With):
                self._gather(child, f"{child.name}." if isinstance(child, ast.ClassDef) else prefix, is_marked)

    def nodes(self, name):
        """Of a function all, of the file those outside of functions."""
        if name not in self._nodes:
            scope = self.scopes[name]
            outside = (node for node in scope.body if not isinstance(node, FUNCTION | ast.ClassDef))
            inside = itertools.chain.from_iterable(map(ast.walk, [scope] if name else outside))
            self._nodes[name] = [node for node in inside if isinstance(node, MATTER)]
        return self._nodes[name]

    @cached_property
    def _within(self):
        """Of each return the function that it returns from."""
        found = {}
        for function in (one for one in ast.walk(self.tree) if isinstance(one, FUNCTION)):
            returns = (one for one in ast.walk(function) if isinstance(one, ast.Return | ast.Yield))
            found |= dict.fromkeys(returns, function.name)  # the innermost comes last
        return found

    def follow(self, functions):
        """Takes a step, knowing what functions return. Whether it has found more."""
        before = self._count()
        for name in self.scopes:
            for node in self.nodes(name):
                self._follow(node, name, functions)
        return before != self._count()

    def _count(self):
        return sum(map(len, self._told.values())), len(self._attributes), str(self.returns)

    def compared(self, functions):
        """(function, line) of each comparison of what a clock said."""
        for name in self.scopes:
            for node in self.nodes(name):
                orders = isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot)
                operands = [node.left, *node.comparators] if orders else []
                if any(self._is_told(one, name, functions) for one in operands):
                    yield name, node.lineno

    def words(self, name):
        """All words of a function."""
        scope = self.scopes[name]
        if name:
            return set(re.findall(r"\w+", "\n".join(self.lines[scope.lineno - 1 : scope.end_lineno])))
        inside = set()
        for node in scope.body:
            if not isinstance(node, FUNCTION | ast.ClassDef):
                inside |= set(re.findall(r"\w+", "\n".join(self.lines[node.lineno - 1 : node.end_lineno])))
        return inside

    def _is_told(self, node, name, functions):
        match node:
            case ast.Name(id=word):
                return word in self._told[name] | self._told[""]
            case ast.Attribute(attr=word) if word in self._attributes:
                return True
            case ast.Call():
                return self._is_call(node, name, functions)
        parts = (getattr(node, part) for part in PARTS.get(type(node), ()))
        flat = itertools.chain.from_iterable(part if isinstance(part, list) else [part] for part in parts)
        return any(self._is_told(part, name, functions) for part in flat if part)

    def _is_call(self, node, name, functions):
        given = any(self._is_told(one, name, functions) for one in node.args)
        match node.func:
            case ast.Attribute(attr=word, value=ast.Name(id="time")):
                return word in CLOCKS
            case ast.Attribute(attr="time"):
                return not node.args  # of an event loop
            case ast.Attribute(attr=word, value=ast.Name(id=module)) if module in MODULES:
                return given
            case ast.Attribute(attr=word, value=value):
                return functions.get(word) is True or (word != "join" and self._is_told(value, name, functions))
            case ast.Name(id=word):
                is_clock = word in CLOCKS and "time" in self.taken
                known = word in self._told[name] or functions.get(word) is True
                return is_clock or known or (word in KEEP and given)
        return False

    def _follow(self, node, name, functions):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value, name, functions)
            case ast.AnnAssign(target=target, value=value) | ast.AugAssign(target=target, value=value):
                self._assign(target, value, name, functions)
            case ast.NamedExpr(target=target, value=value):
                self._assign(target, value, name, functions)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                self._assign(target, value, name, functions)
            case ast.withitem(context_expr=value, optional_vars=target) if target:
                self._assign(target, value, name, functions)
            case ast.Call(func=ast.Attribute(value=kept, attr=word), args=given) if word in PUT:
                for one in given:
                    self._assign(kept, one, name, functions)
            case ast.Return(value=value) | ast.Yield(value=value) if value:
                several = value.elts if isinstance(value, ast.Tuple) else [value]
                places = tuple(self._is_told(one, name, functions) for one in several)
                if any(places):
                    self.returns[self._within[node]] = places if isinstance(value, ast.Tuple) else True

    def _assign(self, target, value, name, functions):
        if isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, ast.Tuple | ast.List):
                for one, its in zip(target.elts, value.elts, strict=False):
                    self._assign(one, its, name, functions)
                return
            called = getattr(value, "func", None)
            places = functions.get(getattr(called, "id", getattr(called, "attr", None)))
            if isinstance(places, tuple):
                for one in itertools.compress(target.elts, places):
                    self._tell(one, name)
                return
        if value and self._is_told(value, name, functions):
            self._tell(target, name)

    def _tell(self, target, name):
        match target:
            case ast.Name(id=word):
                self._told[name].add(word)
            case ast.Attribute(attr=word):
                self._attributes.add(word)
            case ast.Subscript(value=value) | ast.Starred(value=value):
                self._tell(value, name)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for element in elements:
                    self._tell(element, name)


def comparisons(paths):
    """(path, function, line) of each that a test outside of `make stress` comes to."""
    texts = {path: path.read_text() for path in paths}
    words = {path: set(re.findall(r"\w+", text)) for path, text in texts.items()}
    files = {path: Readings(path) for path, text in texts.items() if READS.search(text)}
    known = {}
    is_new = True
    while is_new:
        is_new = False
        for path, file in list(files.items()):
            seen = [file, *(other for other in files.values() if other.path.stem in file.taken or _serves(other, file))]
            known[path] = {name: how for other in seen for name, how in other.returns.items()}
            is_new |= file.follow(known[path])
        tellers = {name for file in files.values() for name in file.returns if not name.startswith("test_")}
        more = {path for path in paths if path not in files and not words[path].isdisjoint(tellers)}
        files |= {path: Readings(path) for path in more}
        is_new |= bool(more)
    reached = _reached(files.values(), set().union(*(words[path] for path in paths if path not in files)))
    for path, file in files.items():
        for name, line in file.compared(known[path]):
            if (file, name) in reached:
                yield path, name, line


def _serves(other, file):
    """Whether its fixtures are those of this file, too."""
    return other.path.name == "conftest.py" and other.path.parent in file.path.parents


def _reached(files, elsewhere):
    """Functions that tests outside of `make stress` may call: who has the name of one may call it."""
    named = defaultdict(set)
    for file in files:
        for name in file.scopes:
            named[name.rpartition(".")[2]].add((file, name))
            if "." in name:
                named[name.partition(".")[0]].add((file, name))
    stress = {(file, name) for file in files for name in file.stress}
    every = {(file, name) for file in files for name in file.scopes} - stress
    reached = {(file, name) for file, name in every if not name or name.rpartition(".")[2].startswith("test_")}
    reached |= set().union(*(named[word] for word in elsewhere if word in named)) - stress
    todo = list(reached)
    while todo:
        file, name = todo.pop()
        called = set().union(*(named[word] for word in file.words(name) if word in named)) - stress - reached
        reached |= called
        todo += called
    return reached
