"""One graph of an .onnx file, operator by operator: what is fused, what is computed at load time, and what is refused.

An operator that cannot be imported is noted as an obstacle, and the walk goes on without it, to find the others too.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from driver.errors import DriverError, ImportFailed, InvalidModel
from driver.formats.file_bytes import BudgetSpent
from driver.importers.obstacle import MOST_OBSTACLES, Consequence, Obstacle
from driver.nn import Interpreter, Model

from .call import OnnxCall
from .elements import bounds
from .file import DTYPES, OnnxBody, OnnxNode, OnnxTensor
from .fold import FOLDS, fold, is_constant
from .graph import OnnxGraph, ValueEntry
from .quantised import computes_on_integers, dequantise, input_scales, quantise, wanted
from .table import TABLE, OnnxRule

_OWN = ("", "ai.onnx")
_BUILT_IN = ("Constant", "QuantizeLinear", "DequantizeLinear", "If", "Shape", "Size")
_ACTIVATIONS: dict[object, int] = {(0.0, 6.0): 3, (-1.0, 1.0): 2, (0.0, float("inf")): 1, (0.0, None): 1}
_LARGE = ("Conv", "ConvTranspose", "ConvInteger", "LSTM", "GRU", "RNN", "DynamicQuantizeLinear", "MatMulInteger")
"""Not computed at load time: few bytes can be much work, or the results are no constants."""
_DEEPEST = 8
"""Limit of branches within branches."""


class OnnxWalk:
    """Converts the operators of one graph in order, and remembers which were fused into others.

    found: the obstacles. owner: of a branch, the outermost If that it belongs to. depth: of branches.
    """

    def __init__(self, graph: OnnxGraph, found: list[Obstacle], owner: OnnxNode | None = None, depth: int = 0) -> None:
        self.graph, self.found, self.depth = graph, found, depth
        self.outputs, self._nodes = graph.body.outputs(), graph.body.nodes
        self._owner, self._fused, self._taking = owner, set[OnnxNode](), list[OnnxNode]()
        reads = [(name, node) for node in self._nodes for name in node.inputs if name]
        inner = [name for node in self._nodes for body in node.bodies() for name in names_read(body, depth)]
        self._times = Counter(name for name, _ in reads) + Counter(self.outputs) + Counter(inner)
        self._readers = dict(reads)
        for node in self._nodes:
            if node.kind == "Constant" and node.domain in _OWN and len(node.outputs) == 1:
                graph.define(_constant(node))
        self.scales = input_scales(self._nodes, graph.entries)

    def run(self) -> Model | None:
        """Convert the graph; None where there are obstacles."""
        try:
            self.operators()
            if not self.found:
                return self.graph.finish(self.outputs)
            self._check_outputs()
        except BudgetSpent as error:
            self.found[:] = self.found or [Obstacle.of(error, None, None)]
        except ImportFailed as error:
            self.found.append(Obstacle.of(error, None, None, self.outputs))
        except InvalidModel as error:
            self.found.append(Obstacle(None, None, tuple(self.outputs), f"not a valid graph: {error}"))
        return None

    def operators(self) -> None:
        """Convert all operators, and collect the obstacles among them."""
        for node in self._nodes:
            self._taking = []
            try:
                self._map(node)
                self._fused.update(self._taking)
            except BudgetSpent as error:
                self._note(node, error)
                raise
            except (ImportFailed, InvalidModel) as error:
                if not isinstance(error, Consequence):
                    self._note(node, error)
                if len(self.found) >= MOST_OBSTACLES:
                    raise BudgetSpent(f"{MOST_OBSTACLES} obstacles; the importer looks for no more") from None
                self._give_up(node)

    def _note(self, node: OnnxNode, error: ImportFailed | InvalidModel) -> None:
        tensors = (*filter(None, node.inputs), *filter(None, node.outputs))
        found = Obstacle.of(error, node.name, node.index, tensors)
        seen = [entry for name in node.inputs[:3] if name and (entry := self.graph.find(name)) is not None]
        if seen and not any(repr(entry.name[:64]) in found.reason for entry in seen):
            found = found._replace(reason=f"{found.reason}; it reads {', '.join(map(str, seen))}")
        if self._owner is not None:
            reason = f"in a branch of it, operator {node.index} ({node.name}): {found.reason}"
            remedy = found.remedy or "with a constant condition in the file, only the branch that it chooses counts"
            found = Obstacle(self._owner.name, self._owner.index, found.tensors, reason, remedy=remedy)
        self.found.append(found)

    def _give_up(self, node: OnnxNode) -> None:
        """Go on without an operator. Where its inputs are constant, its results would have been too."""
        entries = [self.graph.find(name) for name in node.inputs if name]
        is_computed = node.kind == "If" or any(entry is not None and entry.array is None for entry in entries)
        for name in filter(None, node.outputs):
            self.graph.give_up(name, self.graph.body.declared.get(name) if is_computed else None)

    def _check_outputs(self) -> None:
        """Note the outputs that the model could not have even if all operators were converted."""
        for name in self.outputs:
            try:
                self.graph.plain(self.graph.entry(name))
            except Consequence:
                continue
            except (ImportFailed, InvalidModel) as error:
                self.found.append(Obstacle.of(error, None, None, (name,)))

    def _map(self, node: OnnxNode) -> None:
        """Convert one operator."""
        if node in self._fused or (node.kind == "Constant" and node.domain in _OWN):
            return
        if node.domain not in _OWN:
            remedy = None
            if node.kind == "DynamicQuantizeLSTM":
                remedy = "it quantises its state at every step, which the HAL's LSTM does not; keep it in floats"
            raise ImportFailed("operators of other domains are not supported", remedy=remedy)
        if not node.outputs or not node.outputs[0]:
            raise ImportFailed("it has no result")
        rule = TABLE.get(node.kind)
        if rule is None and node.kind not in FOLDS and node.kind not in _BUILT_IN:
            raise ImportFailed("the HAL 1.3 has no operation for it, or the importer does not support it")
        call = OnnxCall(self.graph, node, node.outputs[0])
        if fold(call) or (rule is not None and self._compute(node, rule)):
            return
        if node.kind == "If":
            self._if(node)
        elif node.kind in ("QuantizeLinear", "DequantizeLinear"):
            (quantise if node.kind == "QuantizeLinear" else dequantise)(call)
        elif rule is None:
            raise ImportFailed(
                "the HAL 1.3 has no operation for it; it is computed at load time where its inputs are constant"
            )
        else:
            rule.convert(self._call(node, rule))

    def _compute(self, node: OnnxNode, rule: OnnxRule) -> bool:
        """Compute an operator on constants, as the operations that it becomes. Returns whether it was computed."""
        if node.kind in _LARGE or not is_constant(OnnxCall(self.graph, node, node.outputs[0])):
            return False
        graph, names, makes = self.graph.apart(), [*filter(None, node.outputs)], self.graph.file.bytes.makes
        try:
            rule.convert(OnnxCall(graph, node, node.outputs[0]))
            model = graph.finish(names)
            operands = model.main.operands
            size = sum(math.prod(o.dimensions) * o.type.element_size for o in operands)
            if any(0 in o.dimensions for o in operands) or not makes.affords(size):
                return False
            makes.charge(size)
            bound = Interpreter(model).bind([])
            bound.run()
        except BudgetSpent:
            raise
        except DriverError:
            return False
        entries = [graph.entry(name) for name in names]
        if any(entry.scales for entry in entries):
            return False
        for name, entry, tensor in zip(names, entries, bound.results, strict=True):
            array = np.array(tensor.data)
            array = array.view(np.uint8) if array.dtype == np.bool_ else array
            self.graph.bind(ValueEntry(name, entry.type, entry.shape, array.reshape(entry.shape)))
        return True

    # ---- what is fused

    def _call(self, node: OnnxNode, rule: OnnxRule) -> OnnxCall:
        """Return the call for an operator, with a following activation and QuantizeLinear fused into it."""
        name, code, target = node.outputs[0], 0, None
        following = self._only_reader(name, len(node.outputs))
        if rule.fuses and following is not None and (code := self._activation(following)):
            self._taking.append(following)
            name = following.outputs[0]
            following = self._only_reader(name, 1)
        if following is not None and following.kind == "QuantizeLinear" and following.domain in _OWN:
            wish = wanted(self.graph, following) if rule.quantised else None
            if wish is not None and computes_on_integers(self.graph, node, rule, wish.type):
                target = wish
                self._taking.append(following)
                name = following.outputs[0]
        return OnnxCall(self.graph, node, name, code, target=target)

    def _only_reader(self, name: str, results: int) -> OnnxNode | None:
        """Return the operator that reads a value, if it is the only one."""
        if results != 1 or self._times[name] != 1 or name not in self._readers:
            return None
        node = self._readers[name]
        return node if node.inputs[0] == name and len(node.outputs) == 1 else None

    def _activation(self, node: OnnxNode) -> int:
        """Return the HAL's code for an activation that can be fused; 0 for any other operator."""
        if node.domain not in _OWN or node.kind not in ("Relu", "Clip"):
            return 0
        if node.kind == "Relu":
            return 1
        call = OnnxCall(self.graph, node, node.outputs[0])
        entries = [self.graph.find(name) for name in node.inputs[1:] if name]
        if any(entry is None or entry.array is None or entry.array.size != 1 for entry in entries):
            return 0
        return _ACTIVATIONS.get(bounds(call), 0)

    # ---- If

    def _if(self, node: OnnxNode) -> None:
        """Add the branch that a constant condition chooses, in place; else IF."""
        condition = self.graph.entry(node.inputs[0] if node.inputs else "")
        then, otherwise = node.body("then_branch"), node.body("else_branch")
        if condition.type != "BOOL" or math.prod(condition.shape) != 1 or then is None or otherwise is None:
            raise ImportFailed(f"its condition {condition} must be one boolean, and it must have two branches")
        if condition.array is None:
            self._choose(node, condition, (then, otherwise))
            return
        chosen = self._branch(node, then if condition.array.reshape(-1)[0] else otherwise, apart=False)
        chosen.convert_branch()
        for name, source in zip(node.outputs, chosen.outputs, strict=True):
            if name:
                self.graph.alias(name, chosen.graph.entry(source))

    def _branch(self, node: OnnxNode, body: OnnxBody, *, apart: bool) -> "OnnxWalk":
        if self.depth >= _DEEPEST:
            raise ImportFailed(f"it lies in {_DEEPEST} branches; that is the limit")
        graph = OnnxGraph(self.graph.shared, body, self.graph, apart=apart)
        walk = OnnxWalk(graph, self.found, self._owner or node, self.depth + 1)
        if len(walk.outputs) != len(node.outputs):
            raise ImportFailed(f"a branch has {len(walk.outputs)} results; the operator has {len(node.outputs)}")
        return walk

    def convert_branch(self) -> None:
        """Convert all operators of a branch; its obstacles are noted, and `Consequence` is raised."""
        before = len(self.found)
        self.operators()
        if len(self.found) > before:
            raise Consequence("a branch cannot be imported")

    def _choose(self, node: OnnxNode, condition: ValueEntry, bodies: tuple[OnnxBody, OnnxBody]) -> None:
        """IF: each branch is a model of its own. What either reads of the graph around it is an input of both."""
        walks = [self._branch(node, body, apart=True) for body in bodies]
        read = dict.fromkeys(name for body in bodies for name in names_read(body, self.depth + 1))
        held = [name for name in read if (entry := self.graph.find(name)) is not None and entry.array is None]
        for walk in walks:
            for name in held:
                walk.graph.entry(name)
        for walk in walks:
            walk.convert_branch()
        models = [walk.graph.finish(walk.outputs) for walk in walks]
        first, second = ([model.main.operands[i] for i in model.main.outputs] for model in models)
        for name, a, b in zip(node.outputs, first, second, strict=True):
            if (a.type, a.dimensions, a.scale, a.zero_point) != (b.type, b.dimensions, b.scale, b.zero_point):
                shapes = f"{a.type.name} {list(a.dimensions)} and {b.type.name} {list(b.dimensions)}"
                raise self.graph.unsized(f"its branches give {name[:64]!r} as {shapes}; the HAL's IF has one type")
        values = [outside for outside, _ in walks[0].graph.captures]
        chosen = self.graph.reshape(self.graph.plain(condition), (1,))
        found = self.graph.operation("IF", chosen, *models, *values, outputs=len(first))
        call = OnnxCall(self.graph, node, node.outputs[0])
        for at, value in enumerate(found if isinstance(found, tuple) else (found,)):
            call.give(value, shape=walks[0].graph.entry(walks[0].outputs[at]).shape, at=at)


def names_read(body: OnnxBody, depth: int = 0) -> Iterator[str]:
    """Yield the names that a branch, and the branches in it, read; its own values among them."""
    yield from body.outputs()
    for node in body.nodes:
        yield from filter(None, node.inputs)
        if depth < _DEEPEST:
            for inner in node.bodies():
                yield from names_read(inner, depth + 1)


def _constant(node: OnnxNode) -> OnnxTensor:
    """Return the tensor that a Constant node holds."""
    found = node.tensor("value")
    if found is not None:
        return OnnxTensor(node.outputs[0], found.type, found.data, found.offset)
    readers: dict[str, tuple[Callable[[str], object], str]] = {
        "value_int": (node.integer, "INT64"),
        "value_float": (node.real, "FLOAT"),
        "value_ints": (node.integers, "INT64"),
        "value_floats": (node.reals, "FLOAT"),
    }
    for word, (read, kind) in readers.items():
        if node.has(word):
            return OnnxTensor(node.outputs[0], kind, np.array(read(word), DTYPES[kind]), None)
    raise ImportFailed("it holds neither a tensor nor numbers", node.name, node.index)
