"""Films as people have them: turned by a phone, damaged, cut off."""

import struct
from fractions import Fraction

import av
import numpy as np
import pytest

from driver.cli.videos import Video

CORNERS = np.zeros((32, 64, 3), np.uint8)  # the upper left corner is red
CORNERS[:16, :32] = (255, 0, 0)


def film(path, frames, codec="mpeg4", pixels="yuv420p"):
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(25))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        for frame in [*(av.VideoFrame.from_ndarray(each, format="rgb24") for each in frames), None]:
            container.mux(stream.encode(frame))
    return path


def turned(path, matrix):
    """Writes a display matrix into the track's header of an .mp4, as a phone does."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40
    struct.pack_into(">9i", data, at, *(int(n * 65536) for n in matrix[:6]), 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("matrix", "shape", "red"),
    [
        ((1, 0, 0, 0, 1, 0), (32, 64), (0, 0)),
        ((0, 1, 0, -1, 0, 0), (64, 32), (0, -1)),  # a quarter clockwise, as of a phone that is held upright
        ((-1, 0, 0, 0, -1, 0), (32, 64), (-1, -1)),
        ((0, -1, 0, 1, 0, 0), (64, 32), (-1, 0)),
    ],
)
def test_a_film_is_turned_as_it_says(tmp_path, matrix, shape, red):
    """The red corner is where a player shows it."""
    path = turned(film(tmp_path / "film.mp4", [CORNERS] * 3), matrix)
    for _, image in Video(str(path)):
        pixels = np.asarray(image)
        assert pixels.shape[:2] == shape
        corners = {(y, x): pixels[y, x] for y in (0, -1) for x in (0, -1)}
        assert [at for at, colour in corners.items() if colour[0] > 128] == [red]


def damaged(path, which):
    """An .avi of pictures, of which nothing is left of those that are named."""
    data = bytearray(path.read_bytes())
    starts = [at for at in range(len(data) - 1) if data[at : at + 3] == b"\xff\xd8\xff"]
    for n in which:
        data[starts[n] : starts[n + 1] - 16] = bytes(starts[n + 1] - 16 - starts[n])
    path.write_bytes(data)
    return path


LEVELS = [np.full((32, 64, 3), 20 * n, np.uint8) for n in range(8)]


@pytest.mark.parametrize(
    ("which", "told"), [([3], "1 damaged packet left out"), ([0, 3], "2 damaged packets left out")]
)
def test_a_film_goes_on_after_what_is_damaged(tmp_path, capsys, which, told):
    """Also at its beginning; the end says how much was left out."""
    path = damaged(film(tmp_path / "film.avi", LEVELS, "mjpeg", "yuvj420p"), which)
    levels = [np.asarray(image).mean() for _, image in Video(str(path))]
    np.testing.assert_allclose(levels, [20 * n for n in range(8) if n not in which], atol=3)
    assert f"film.avi: {told}; the other frames were taken" in capsys.readouterr().err


def test_a_film_that_is_cut_off_has_its_beginning(tmp_path):
    """A recorder that lost its power: what it has written is shown."""
    path = film(tmp_path / "film.avi", LEVELS, "mjpeg", "yuvj420p")
    pictures = path.read_bytes().split(b"\xff\xd8\xff")
    path.write_bytes(b"\xff\xd8\xff".join([*pictures[:5], pictures[5][:20]]))
    levels = [np.asarray(image).mean() for _, image in Video(str(path))]
    np.testing.assert_allclose(levels[:4], [0, 20, 40, 60], atol=3)
    assert len(levels) < 8
