import numpy as np
import pytest

from driver.nn import ExecutionFailed, Interpreter, InvalidModel, ModelBuilder
from driver.nn.validate import required_version

REFUSAL = (ExecutionFailed, InvalidModel)
HUGE = 2**31 - 1
LAYOUTS = pytest.mark.parametrize("layout", [(), (False,), (True,)], ids=["default", "nhwc", "nchw"])
TYPES = pytest.mark.parametrize("dtype", "fhqs")


@pytest.fixture
def on_image(move):
    """move, for an NHWC image whatever the layout: transposed on the way in and out when it is NCHW."""

    def on_image(operation, image, *args, layout=()):
        if layout != (True,):
            return move(operation, image, *args, *layout)
        stored = np.ascontiguousarray(image.transpose(0, 3, 1, 2))
        return move(operation, stored, *args, True).transpose(0, 2, 3, 1)

    return on_image


@TYPES
@LAYOUTS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_depth_to_space(on_image, counting, dtype, layout, size):
    """DEPTH_TO_SPACE lays the channels of a pixel out as a block of pixels, row by row."""
    x = counting((2, 2, 3, size * size * 2), dtype)
    y = on_image("DEPTH_TO_SPACE", x, size, layout=layout)
    assert y.shape == (2, 2 * size, 3 * size, 2)
    for n, h, w, c in np.ndindex(y.shape):
        assert y[n, h, w, c] == x[n, h // size, w // size, (h % size * size + w % size) * 2 + c]


@TYPES
@LAYOUTS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_space_to_depth(on_image, counting, dtype, layout, size):
    """SPACE_TO_DEPTH makes a pixel of a block of pixels, its channels row by row."""
    x = counting((2, 2 * size, 3 * size, 2), dtype)
    y = on_image("SPACE_TO_DEPTH", x, size, layout=layout)
    assert y.shape == (2, 2, 3, size * size * 2)
    for n, h, w, c in np.ndindex(x.shape):
        assert y[n, h // size, w // size, (h % size * size + w % size) * 2 + c] == x[n, h, w, c]


@TYPES
@LAYOUTS
@pytest.mark.parametrize("sizes", [[1, 1], [2, 3], [3, 1]])
def test_batch_to_space_nd(on_image, counting, dtype, layout, sizes):
    """BATCH_TO_SPACE_ND interleaves the images of a batch."""
    bh, bw = sizes
    x = counting((bh * bw * 2, 2, 3, 2), dtype)
    y = on_image("BATCH_TO_SPACE_ND", x, sizes, layout=layout)
    assert y.shape == (2, 2 * bh, 3 * bw, 2)
    for n, h, w, c in np.ndindex(y.shape):
        assert y[n, h, w, c] == x[(h % bh * bw + w % bw) * 2 + n, h // bh, w // bw, c]


@TYPES
@LAYOUTS
@pytest.mark.parametrize(
    ("sizes", "pads"), [([1, 1], [[0, 0], [0, 0]]), ([2, 3], [[0, 0], [0, 0]]), ([2, 3], [[1, 3], [0, 3]])]
)
def test_space_to_batch_nd(on_image, counting, *, dtype, layout, sizes, pads):
    """SPACE_TO_BATCH_ND takes an image for every place in a block, after real zeros were put around."""
    (bh, bw), ((top, bottom), (left, right)) = sizes, pads
    x = counting((2, 4, 6, 2), dtype)
    y = on_image("SPACE_TO_BATCH_ND", x, sizes, pads, layout=layout)
    assert y.shape == (2 * bh * bw, (4 + top + bottom) // bh, (6 + left + right) // bw, 2)
    for n, h, w, c in np.ndindex(y.shape):
        place, image = divmod(n, 2)
        row, column = h * bh + place // bw - top, w * bw + place % bw - left
        outside = 3 if x.dtype.itemsize == 1 else 0
        assert y[n, h, w, c] == (x[image, row, column, c] if 0 <= row < 4 and 0 <= column < 6 else outside)


def test_padding_stays_zero_from_run_to_run():
    """A second run of SPACE_TO_BATCH_ND sees nothing of the first."""
    m = ModelBuilder()
    m.output(m.operation("SPACE_TO_BATCH_ND", m.input("float32", (1, 1, 2, 1)), [1, 1], [[1, 1], [1, 1]]))
    x = np.ones((1, 1, 2, 1), np.float32)
    bound = Interpreter(m.build()).bind([x])
    for scale in (1, 2):
        x[...] = scale
        bound.run()
        y = bound.results[0].data.copy()
        assert y.sum() == 2 * scale
        assert (y[0, 1, 1:3, 0] == scale).all()


NONE = [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        ("DEPTH_TO_SPACE", (0,)),
        ("DEPTH_TO_SPACE", (-2,)),
        ("DEPTH_TO_SPACE", (4,)),
        ("DEPTH_TO_SPACE", (HUGE,)),
        ("SPACE_TO_DEPTH", (0,)),
        ("SPACE_TO_DEPTH", (-1,)),
        ("SPACE_TO_DEPTH", (3,)),
        ("BATCH_TO_SPACE_ND", ([0, 1],)),
        ("BATCH_TO_SPACE_ND", ([2],)),
        ("BATCH_TO_SPACE_ND", ([2, 1, 1],)),
        ("BATCH_TO_SPACE_ND", ([3, 1],)),
        ("BATCH_TO_SPACE_ND", ([HUGE, HUGE],)),
        ("SPACE_TO_BATCH_ND", ([2, 0], NONE)),
        ("SPACE_TO_BATCH_ND", ([3, 2], NONE)),
        ("SPACE_TO_BATCH_ND", ([2, 3], NONE)),
        ("SPACE_TO_BATCH_ND", ([1, 1], [[0, -1], [0, 0]])),
        ("SPACE_TO_BATCH_ND", ([1, 1], [[0, 0]])),
        ("SPACE_TO_BATCH_ND", ([1, 1], [[HUGE, HUGE], [HUGE, HUGE]])),
    ],
)
@pytest.mark.parametrize("layout", [False, True])
def test_blocks_refuse(move, counting, operation, args, layout):
    """Blocks below 1, blocks that do not divide the image, negative and enormous paddings fail."""
    image = counting((4, 4, 4, 4) if operation != "BATCH_TO_SPACE_ND" else (4, 2, 2, 1))
    with pytest.raises(REFUSAL):
        move(operation, image, *args, layout)


@pytest.mark.parametrize("operation", ["DEPTH_TO_SPACE", "SPACE_TO_DEPTH"])
def test_images_have_rank_4(operation):
    """Other ranks are refused by validation."""
    m = ModelBuilder()
    with pytest.raises(InvalidModel, match="rank 3"):
        m.operation(operation, m.input("float32", (2, 2, 4)), 2)


@pytest.mark.parametrize(("zero_point", "layout", "version"), [(0, (), 1), (3, (), 2), (0, (True,), 2)])
def test_space_to_batch_gate(zero_point, layout, version):
    """A zero that is not stored as 0, and the layout, came with HAL 1.2."""
    m = ModelBuilder()
    x = m.input("quant8_asymm", (1, 2, 2, 1), scale=0.5, zero_point=zero_point)
    m.output(m.operation("SPACE_TO_BATCH_ND", x, [1, 1], NONE, *layout))
    assert required_version(m.build()) == version
