"""Vendor extensions in a model: types, prefixes, operations, and the file form."""

import os
import pickle

import numpy as np
import pytest

from driver.nn import Extension, ExtensionType, InvalidModel, Model, Operand, Operation, Subgraph, validate
from driver.nn.extension import operand_type_of, operation_of
from driver.nn.file_form import FILE, ModelFile, file_of, model_of_file, tensor_type
from driver.nn.known import explained
from driver.protocol.model_codec import decode, encode, sealed
from driver.protocol.model_digest import structure_digest

PAIRS = ExtensionType("test.pairs", 3, "TENSOR_PAIR", np.dtype("V6"))
EXTENSION = Extension("test.pairs", (PAIRS,), ("SWAP", "JOIN"))


def pair_model(**more: object) -> Model:
    """x -> SWAP -> y, with parameters of the extension at x."""
    x = Operand(PAIRS, (2,), lifetime="INPUT", extension_params=b"\x01")
    y = Operand(PAIRS, (2,), lifetime="OUTPUT")
    return Model(Subgraph([x, y], [Operation(EXTENSION.operation("SWAP"), [0], [1])], [0], [1]), **more)


def mixed_model() -> Model:
    """ADD of the HAL, then an operation of an extension on its result, then ADD on what that gives."""
    sizes = "TENSOR_FLOAT32", (2,)
    operands = [
        Operand(*sizes, lifetime="INPUT"),
        Operand("INT32", (), lifetime="CONSTANT", value=np.zeros((), np.int32)),
        *(Operand(*sizes) for _ in range(2)),
        Operand(*sizes, lifetime="OUTPUT"),
    ]
    add = [Operation("ADD", [x, x, 1], [y]) for x, y in ((0, 2), (3, 4))]
    return Model(Subgraph(operands, [add[0], Operation("test.pairs.SWAP", [2], [3]), add[1]], [0], [4]))


def file_model() -> Model:
    data = np.frombuffer(b"not really a model", np.uint8)
    operands = [Operand(tensor_type(np.int64, 2), (0, 4)), Operand(tensor_type("bfloat16", 0))]
    return model_of_file(ModelFile("onnx", data, {"weights.bin": data[:3]}), operands, operands[:1])


def travelled(model: Model) -> Model:
    encoded = encode(model)
    return decode(sealed([os.dup(fd) for fd in encoded.fds], encoded.where), encoded.where)


def test_a_model_with_extension_types_is_valid_and_gets_a_prefix():
    """Extensions that a model uses and does not list get the next free prefixes; the model is valid."""
    model = pair_model(extensions=(("other.vendor", 1),))
    validate(model)
    assert model.extensions == (("other.vendor", 1), ("test.pairs", 2))


def test_codes_and_names_stand_for_each_other():
    """The code of a type or operation is its prefix in the model and its number, as in the HAL."""
    known, prefixes = {"test.pairs": EXTENSION}, {"test.pairs": 5}
    assert operand_type_of(5 << 16 | 3, prefixes, known) is PAIRS
    assert operation_of(5 << 16 | 1, prefixes, known) == "test.pairs.JOIN"
    for code, words in ((5 << 16 | 4, "no number 4"), (6 << 16, "prefix 6")):
        with pytest.raises(InvalidModel, match=words):
            operand_type_of(code, prefixes, known)
    with pytest.raises(InvalidModel, match="not known here"):
        operation_of(5 << 16, prefixes, {})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: ExtensionType("test.pairs", 65536, "TENSOR_PAIR", np.dtype("V6")), "0 to 65535"),
        (lambda: ExtensionType("test.pairs", 1, "pair", np.dtype("V6")), "capital letters"),
        (lambda: ExtensionType("test.pairs", 1, "PAIR", np.dtype(object)), "no type of"),
        (lambda: Extension("pairs"), "at least one dot"),
        (lambda: Extension("test.other", (PAIRS,)), "of another one"),
        (lambda: EXTENSION.type("TENSOR_PAIRS"), "TENSOR_PAIR"),
        (lambda: EXTENSION.operation("SWOP"), "SWAP"),
        (lambda: pair_model(extensions=(("test.pairs", 0),)), "from 1 to"),
        (lambda: pair_model(extensions=(("test.pairs", 1), ("test.more", 1))), "once"),
    ],
)
def test_what_is_wrong_with_an_extension_is_said(wrong, words):
    """Numbers, names and prefixes that cannot be are refused, with what is right."""
    with pytest.raises(InvalidModel, match=words):
        wrong()


def test_parameters_belong_to_extension_types():
    """extension_params on an operand of the HAL, and a scale on one of an extension, are refused."""
    for operand in (Operand("TENSOR_FLOAT32", (2,), extension_params=b"1"), Operand(PAIRS, (2,), scale=1.0)):
        add = Operation("test.pairs.SWAP", [0], [1])
        given = Operand(operand.type, (2,), operand.scale, 0, "INPUT", extension_params=operand.extension_params)
        with pytest.raises(InvalidModel, match=r"extension|scale 1\.0"):
            validate(Model(Subgraph([given, Operand(PAIRS, (2,), lifetime="OUTPUT")], [add], [0], [1])))


@pytest.mark.parametrize("make", [pair_model, mixed_model, file_model])
def test_an_extension_model_arrives_as_it_was(make):
    """A model with extensions is the same after it has travelled as bytes, and after pickling."""
    model = make()
    for found in (travelled(model), pickle.loads(pickle.dumps(model))):
        assert found.extensions == model.extensions
        assert [(o.type, o.dimensions, o.extension_params) for o in found.main.operands] == [
            (o.type, o.dimensions, o.extension_params) for o in model.main.operands
        ]
        assert found.main.operations == model.main.operations
        assert structure_digest(found) == structure_digest(model)


def test_a_device_is_asked_only_about_extensions_that_it_knows():
    """Operations of other extensions have a reason that names the extension; the rest is a valid model of its own."""
    asked = []

    def explain(part: Model) -> list[str | None]:
        validate(part)
        asked.append([operation.type for operation in part.main.operations])
        return ["too hot", None]

    reasons = explained(mixed_model(), (), explain)
    assert asked == [["ADD", "ADD"]]
    assert reasons == ["too hot", "the device does not know the extension test.pairs", None]
    assert explained(mixed_model(), ("test.pairs",), lambda part: [None] * len(part.main.operations)) == [None] * 3


def test_a_file_is_a_model_of_one_operation():
    """The file form carries the file, the files beside it, and inputs and outputs of types that the HAL lacks."""
    model = file_model()
    validate(model)
    found = file_of(travelled(model))
    assert found is not None
    assert (found.kind, bytes(found.data), bytes(found.external["weights.bin"])) == (
        "onnx",
        b"not really a model",
        b"not",
    )
    assert [model.main.operands[i].type for i in model.main.inputs] == [
        FILE.type("TENSOR_INT64"),
        FILE.type("BFLOAT16"),
    ]
    assert file_of(mixed_model()) is None


def test_a_file_operation_that_is_put_together_wrongly_is_refused():
    """Whatever the first inputs claim to be, a device sees the file or an error."""
    good = file_model().main
    for inputs in ([*good.operations[0].inputs[1:]], [*good.inputs], [0, *good.operations[0].inputs]):
        operation = Operation("burst.file.ONNX", inputs, good.outputs)
        with pytest.raises(InvalidModel, match=r"burst\.file\.ONNX"):
            file_of(Model(Subgraph(good.operands, [operation], good.inputs, good.outputs)))


def test_the_other_form_is_made_only_when_it_is_needed():
    """A device that knows the extension gets the model itself; another one gets the portable form."""
    made, other = [], mixed_model()

    def portable() -> Model:
        made.append(other)
        return other

    model = Model(pair_model().main, portable=portable)
    assert model.form_for(["test.pairs"]) is model
    assert not made
    assert model.form_for([]) is model.form_for(["other.vendor"]) is other
    assert pair_model().form_for([]).extensions == (("test.pairs", 1),)
