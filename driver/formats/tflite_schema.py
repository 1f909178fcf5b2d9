"""TFLite's tables: the places of their fields, and the element types."""

IDENTIFIER, VERSION = b"TFL3", 3
FIELDS: dict[str, dict[str, int]] = {
    "Model": {"version": 0, "operator_codes": 1, "subgraphs": 2, "buffers": 4, "metadata": 6, "signature_defs": 7},
    "OperatorCode": {"deprecated_builtin_code": 0, "custom_code": 1, "version": 2, "builtin_code": 3},
    "SubGraph": {"tensors": 0, "inputs": 1, "outputs": 2, "operators": 3, "name": 4},
    "Operator": {"opcode_index": 0, "inputs": 1, "outputs": 2, "builtin_options_type": 3, "builtin_options": 4},
    "Tensor": {
        "shape": 0,
        "type": 1,
        "buffer": 2,
        "name": 3,
        "quantization": 4,
        "is_variable": 5,
        "sparsity": 6,
        "shape_signature": 7,
        "has_rank": 8,
    },
    "QuantizationParameters": {"scale": 2, "zero_point": 3},
    "SignatureDef": {"inputs": 0, "outputs": 1, "signature_key": 2, "subgraph_index": 4},
    "TensorMap": {"name": 0, "tensor_index": 1},
    "Metadata": {"name": 0, "buffer": 1},
    "Buffer": {"data": 0, "offset": 1, "size": 2},
}
"""Places of fields in the tables of the schema, for the fields that are read."""
TYPE_NAMES = (
    *("FLOAT32", "FLOAT16", "INT32", "UINT8", "INT64", "STRING", "BOOL", "INT16", "COMPLEX64"),
    *("INT8", "FLOAT64", "COMPLEX128", "UINT64", "RESOURCE", "VARIANT", "UINT32", "UINT16", "INT4"),
    *("BFLOAT16", "INT2", "UINT4", "FLOAT8_E4M3FN", "FLOAT8_E5M2"),
)
"""Names of all element types of the schema, by their numbers."""
DTYPES = {number: TYPE_NAMES[number].lower() for number in (0, 1, 2, 3, 4, 6, 7, 9, 10, 12, 15, 16, 18)}
"""Element types that are carried, by their numbers: numpy's names, or "bfloat16"."""
