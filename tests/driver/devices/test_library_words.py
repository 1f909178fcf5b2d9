"""What people are told of a message that a library made for its own programmers."""

import logging

import pytest

from driver.devices.lowering.errors import in_words

ORT, RAN = "[ONNXRuntimeError] : 1 : FAIL : ", "Non-zero status code returned while running"
WORDS = [
    (
        (
            f"{ORT}{RAN} Add node. Status Message: /onnxruntime_src/core/providers/cpu/math/element_wise_ops.h:563 "
            "void onnxruntime::BroadcastIterator::Init(ptrdiff_t, ptrdiff_t) axis == 1 was false. 3 by 4\n"
        ),
        f"{RAN} Add node. Status Message: axis == 1 was false. 3 by 4",
    ),
    (
        (
            f"{ORT}/src/core/graph/model.cc:256 onnxruntime::Model::Model(std::function<void (int)>, "
            "const std::map<std::string, int>&) Unsupported model IR version: 99 (of 14)\n"
        ),
        "Unsupported model IR version: 99 (of 14)",
    ),
    (
        f"{RAN} MatMul node. Name:'m' Status Message: matmul_helper.h:59 Compute MatMul dimension mismatch (2 and 3)",
        f"{RAN} MatMul node. Name:'m' Status Message: MatMul dimension mismatch (2 and 3)",
    ),
    (
        (
            "Exception from src/inference/infer_request.cpp:224:\nException from src/plugins/cpu/node.cpp:794:\n"
            "[CPU] MatMul node with name 'y' Check 'k_lhs == k_rhs' failed at src/plugins/cpu/src/matmul.cpp:45:\n"
            "shape A: (2.3) shape B: (4.5)\n\n"
        ),
        "[CPU] MatMul node with name 'y' shape A: (2.3) shape B: (4.5)",
    ),
    (
        "litert/kernels/concatenation.cc:165 t->dims->data[d] != 3 (2 != 3)Node number 0 (CONCATENATION) failed.\n",
        "t->dims->data[d] != 3 (2 != 3); Node number 0 (CONCATENATION) failed.",
    ),
    ("the file 'model.h5' has no operator Foo.cc", "the file 'model.h5' has no operator Foo.cc"),
]


@pytest.mark.parametrize(("full", "told"), WORDS)
def test_places_in_the_sources_of_a_library_are_not_told(full, told):
    """Nor names of its functions; what it says of operators, tensors and sizes is."""
    assert in_words(full) == told


def test_what_is_left_out_is_in_the_log(caplog):
    """All of it, once; of a long message its beginning and its end are told."""
    full = "No translator found for FlexErf. " + 40 * "See the documentation of the frontend. " + "Node 7 failed."
    with caplog.at_level(logging.INFO):
        told = in_words(full)
        assert in_words("short") == "short"
    assert len(told) < 3 * 130
    assert told.startswith("No translator found for FlexErf.")
    assert told.endswith("Node 7 failed.")
    assert [record.getMessage() for record in caplog.records] == [f"in the library's words: {full}"]
