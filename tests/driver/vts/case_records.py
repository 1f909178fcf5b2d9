"""Lines of case files, as records."""


def operand(kind, lifetime, value=None, quant=(0.0, 0)):
    dims = [] if kind == "INT32" else [2]
    record = {"type": kind, "dims": dims, "scale": quant[0], "zero_point": quant[1], "lifetime": lifetime}
    return record if value is None else {**record, "value": value}


def add(kind, constant, quant=(0.0, 0)):
    """x + constant, without an activation."""
    return [
        operand(kind, "INPUT", quant=quant),
        operand(kind, "CONSTANT", constant, quant),
        operand("INT32", "CONSTANT", [0]),
        operand(kind, "OUTPUT", quant=quant),
    ]


ADD = {
    "name": "add_two",
    "relaxed": False,
    "expect_failure": False,
    "operands": add("TENSOR_FLOAT32", [1, 2]),
    "operations": [{"type": "ADD", "inputs": [0, 1, 2], "outputs": [3]}],
    "inputs": [0],
    "outputs": [3],
    "feeds": [[0.5, 1.5]],
    "expected": [[1.5, 3.5]],
}
QUANTISED = {
    **ADD,
    "name": "add_quantised",
    "operands": add("TENSOR_QUANT8_ASYMM", [130, 126], (0.5, 128)),
    "feeds": [[129, 250]],
    "expected": [[131, 248]],
}
