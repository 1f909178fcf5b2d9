"""What becomes of files and of randomness on their way into an input; no device is needed for that."""

import io
import wave
from fractions import Fraction

import click
import numpy as np
import pytest
from PIL import Image

from driver.cli.inputs import FeedOptions, feeds, write_arrays
from driver.cli.ports import Port, inputs_of, outputs_of
from driver.cli.sizes import given_sizes
from driver.cli.sounds import read_recording
from driver.cli.summaries import classes
from driver.cli.timing import estimate
from driver.importers import load
from driver.nn import Operand

BYTE = {"scale": 1 / 64, "zero_point": 128}


def port(kind, shape, name="x", **more):
    """An input as a file has it."""
    return Port(name, Operand(kind, shape, extra={"name": name}, **more))


def fed(its, source, shapes=(), **options):
    """What that one input gets."""
    words = [str(source)] if source is not None else []
    (found,) = feeds([its], words, given_sizes([its], shapes), FeedOptions(**options))
    return found


@pytest.fixture
def picture(tmp_path):
    """A file with 5 x 2 pixels of colour; returns its path and its bytes [height, width, channels]."""
    pixels = np.arange(30, dtype=np.uint8).reshape(2, 5, 3) * 8
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    return path, pixels


@pytest.fixture
def recording(tmp_path):
    """Writes a WAV file of integers, [time, channels]."""

    def write(samples, width=2, rate=16000):
        path = tmp_path / "sound.wav"
        with wave.open(str(path), "wb") as file:
            file.setparams((samples.shape[1], width, rate, len(samples), "NONE", ""))
            file.writeframes(b"".join(int(n).to_bytes(width, "little", signed=width > 1) for n in samples.reshape(-1)))
        return path

    return write


# ---- images


def test_an_image_fits_its_input(picture):
    """Pixels become 0 to 1, channels last or first, whatever the rank, and what was done is said."""
    path, pixels = picture
    last = fed(port("TENSOR_FLOAT32", (1, 2, 5, 3)), path)
    assert np.allclose(last.array, pixels[None] / 255)
    assert last.done == "5 x 2 RGB; pixels as 0..1"
    first = fed(port("TENSOR_FLOAT32", (1, 3, 2, 5)), path)
    assert np.allclose(first.array[0], pixels.transpose(2, 0, 1) / 255)
    assert first.done.endswith("channels first")
    assert fed(port("TENSOR_FLOAT16", (2, 5, 3)), path).array.dtype == np.float16
    grey = fed(port("TENSOR_FLOAT32", (4, 10)), path)
    assert grey.array.shape == (4, 10)
    assert "converted to L, resized to 10 x 4 (bilinear)" in grey.done


def test_an_open_size_is_the_images_own(picture):
    """Height and width up to the next multiple of 32, which networks need; one of them in proportion to the other."""
    path, pixels = picture
    both = fed(port("TENSOR_FLOAT32", (0, 0, 0, 3)), path)
    assert both.array.shape == (1, 32, 32, 3)
    assert both.done.startswith("5 x 2 RGB, letterboxed to 32 x 32")
    assert np.allclose(both.array[0, 15:17, 13:18], pixels / 255)
    assert fed(port("TENSOR_FLOAT32", (1, 3, 8, 0)), path).array.shape == (1, 3, 8, 20)
    assert fed(port("TENSOR_FLOAT32", (1, 3, 0, 10)), path).array.shape == (1, 3, 4, 10)


def test_letterbox_and_stretch(picture):
    """The proportions stay and grey bars fill the rest, or the whole input is image."""
    its = port("TENSOR_FLOAT32", (1, 10, 10, 3))
    boxed, stretched = (fed(its, picture[0], fit=fit, pixels="0..255") for fit in ("letterbox", "stretch"))
    assert boxed.done.startswith("5 x 2 RGB, resized to 10 x 4 (bilinear), letterboxed to 10 x 10")
    assert (boxed.array[0, [0, 2, 7, 9]] == 114).all()
    assert (boxed.array[0, 3:7].std(axis=(0, 1)) > 0).all()
    assert stretched.done.startswith("5 x 2 RGB, resized to 10 x 10 (bilinear);")
    assert (stretched.array[0, [0, 9]] != 114).all()


def test_a_quantised_input_gets_the_bytes(picture):
    """As its 256 steps, with a sign or without; --pixels says which numbers they stand for instead."""
    path, pixels = picture
    assert np.array_equal(fed(port("TENSOR_QUANT8_ASYMM", (1, 2, 5, 3), **BYTE), path).array[0], pixels)
    signed = port("TENSOR_QUANT8_ASYMM_SIGNED", (1, 2, 5, 3), scale=1 / 64, zero_point=0)
    assert np.array_equal(fed(signed, path).array[0], pixels.astype(int) - 128)
    ranged = fed(signed, path, pixels="-1..1")
    assert np.array_equal(ranged.array[0], np.rint((pixels / 255 * 2 - 1) * 64))
    assert ranged.done.endswith("pixels as -1..1, quantised")


def test_imagenets_pixels(picture):
    """Each channel with its own mean and deviation; only where there are three."""
    path, pixels = picture
    found = fed(port("TENSOR_FLOAT32", (1, 2, 5, 3)), path, pixels="imagenet").array[0, 1, 2]
    assert np.allclose(found, (pixels[1, 2] / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225), atol=1e-6)
    with pytest.raises(click.UsageError, match="needs 3 channels; the input has 1"):
        fed(port("TENSOR_FLOAT32", (1, 2, 3, 1)), path, pixels="imagenet")


@pytest.mark.parametrize(
    ("kind", "shape", "told"),
    [
        ("TENSOR_FLOAT32", (2, 2, 3, 3), "which is not an image of 1, 3 or 4 channels"),
        ("TENSOR_FLOAT32", (7,), "pass an array"),
        ("TENSOR_BOOL8", (2, 3), "bool, which no image fits; pass an array"),
    ],
)
def test_what_takes_no_image_says_so(picture, kind, shape, told):
    """A batch, a vector, truth values."""
    with pytest.raises(click.UsageError, match=told):
        fed(port(kind, shape), picture[0])


def test_what_is_no_image_is_told(tmp_path):
    """With what could be read."""
    path = tmp_path / "picture.png"
    path.write_bytes(b"nothing")
    with pytest.raises(click.UsageError, match=r"not a readable image or video: .*supported: .npy"):
        fed(port("TENSOR_FLOAT32", (2, 3)), path)


RAMP = np.linspace(0, 65535, 64).reshape(8, 8)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("grey.png", RAMP.astype(np.uint16)),
        ("grey.tiff", RAMP.astype(np.uint16)),
        ("big.tiff", RAMP.astype(">u2")),
        ("whole.tiff", RAMP.astype(np.int32)),
        ("real.tiff", (RAMP / 65535).astype(np.float32)),
    ],
)
def test_more_than_8_bits_keep_their_proportions(tmp_path, name, values):
    """Depth, thermal and medical images: 65535, or 1.0, is white."""
    Image.fromarray(values).save(tmp_path / name)
    found = fed(port("TENSOR_FLOAT32", (8, 8)), tmp_path / name).array
    np.testing.assert_allclose(found, RAMP / 65535, atol=0.6 / 255)


def test_16_bits_of_each_colour_keep_their_proportions(tmp_path):
    """As FFmpeg writes them, for Pillow does not."""
    av = pytest.importorskip("av")
    values = np.stack([RAMP, RAMP[::-1], RAMP.T], axis=2).astype(np.uint16)
    codec = av.CodecContext.create("png", "w")
    codec.width, codec.height, codec.pix_fmt, codec.time_base = 8, 8, "rgb48be", Fraction(1, 25)
    frame = av.VideoFrame.from_ndarray(values, format="rgb48le").reformat(format="rgb48be")
    (tmp_path / "colour.png").write_bytes(b"".join(bytes(packet) for packet in [*codec.encode(frame), *codec.encode()]))
    found = fed(port("TENSOR_FLOAT32", (8, 8, 3)), tmp_path / "colour.png").array
    np.testing.assert_allclose(found, values / 65535, atol=1.1 / 255)


MODES = {
    "png": ["1", "L", "LA", "P", "RGB", "RGBA"],
    "tiff": ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"],
    "jpeg": ["1", "L", "RGB", "CMYK"],
    "gif": ["1", "L", "LA", "P", "RGB", "RGBA"],
    "webp": ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"],
}


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_every_mode_of_pillow_is_what_pillow_makes_of_it(tmp_path, kind, mode):
    """Black and white, grey with alpha, palettes with a transparent colour, ink."""
    random = np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)
    path = tmp_path / f"picture.{kind}"
    has_hole = mode == "P" and kind in {"png", "gif"}
    Image.fromarray(random).convert(mode).save(path, **({"transparency": 3} if has_hole else {}))
    with Image.open(path) as image:
        expected = np.asarray(image.convert("RGBA").convert("RGB"))
    found = fed(port("TENSOR_FLOAT32", (8, 8, 3)), path, pixels="0..255").array
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "told"),
    [(RAMP * 2, "go from 0 to 131070"), (RAMP - 9, "go from -9"), (RAMP * np.nan, "from nan to nan")],
)
def test_an_image_without_a_known_range_is_refused(tmp_path, values, told):
    """Heights, temperatures: with their range, and what can be passed instead."""
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "real.tiff")
    with pytest.raises(click.UsageError, match=rf"{told}.*from 0 to 1; pass an array"):
        fed(port("TENSOR_FLOAT32", (8, 8)), tmp_path / "real.tiff")


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_an_animated_image_is_a_film(tmp_path, kind):
    """Each of its frames, with its time."""
    frames = [Image.new("RGB", (8, 8), (level, level, level)) for level in (0, 85, 255)]
    path = tmp_path / f"film.{kind}"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=200, lossless=True)
    feed = fed(port("TENSOR_FLOAT32", (8, 8, 3)), path)
    later = [(second, array.mean()) for second, array in feed.later.values]
    assert feed.later.unit == "frame"
    np.testing.assert_allclose([(0, feed.array.mean()), *later], [(0, 0), (0.2, 1 / 3), (0.4, 1)], atol=1e-6)


def test_a_truncated_image_says_so(tmp_path):
    """By its format; it is not taken for a film."""
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (99, 99, 3), np.uint8)).save(tmp_path / "whole.jpg")
    (tmp_path / "half.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:3000])
    with pytest.raises(click.UsageError, match=r"half.jpg: a damaged JPEG image: .*truncated.*; fetch"):
        fed(port("TENSOR_FLOAT32", (8, 8, 3)), tmp_path / "half.jpg")


# ---- sound


SAMPLES = np.sin(np.arange(1600) / 7)[:, np.newaxis] * [0.5, -0.25]


@pytest.mark.parametrize(
    ("codec", "suffix", "form", "error"),
    [
        ("pcm_u8", "wav", "u8", 1 / 127),
        ("pcm_s16le", "wav", "s16", 1 / 32767),
        ("pcm_s24le", "wav", "s32", 1e-6),
        ("pcm_s32le", "wav", "s32", 1e-8),
        ("pcm_f32le", "wav", "flt", 1e-7),
        ("pcm_f64le", "wav", "dbl", 1e-15),
        ("pcm_alaw", "wav", "s16", 0.02),
        ("pcm_mulaw", "wav", "s16", 0.02),
        ("pcm_s16be", "aiff", "s16", 1 / 32767),
        ("flac", "flac", "s16", 1 / 32767),
        ("libmp3lame", "mp3", "fltp", 0.1),
        ("aac", "m4a", "fltp", 0.1),
    ],
)
def test_every_kind_of_sound(tmp_path, codec, suffix, form, error):
    """Files that FFmpeg has written, of whole numbers, real numbers and logarithms: the samples that went in."""
    av = pytest.importorskip("av")
    path = tmp_path / f"sound.{suffix}"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=16000, layout="stereo")
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(SAMPLES.T), format="dblp", layout="stereo")
        frame.sample_rate, frame.time_base, frame.pts = 16000, Fraction(1, 16000), 0
        resampler = av.AudioResampler(form, frame_size=stream.codec_context.frame_size or None)
        for part in [*resampler.resample(frame), *resampler.resample(None), None]:
            container.mux(stream.encode(part))
    recording = read_recording(str(path), "--input")
    assert recording.rate == 16000
    whole = recording.samples
    assert whole.shape[1] == 2
    delays = range(len(whole) - 800 if error == 0.1 else 1)  # codecs that transform blocks begin later
    delay = min(delays, key=lambda n: np.abs(whole[n : n + 800] - SAMPLES[:800]).sum())
    np.testing.assert_allclose(whole[delay : delay + 800], SAMPLES[:800], atol=error)


def test_of_a_damaged_sound_the_beginning_is_taken(recording, capsys):
    """A recorder that lost its power has not written how much follows."""
    path = recording(np.full((1000, 1), 16384))
    path.write_bytes(path.read_bytes()[:1044])
    assert read_recording(str(path), "--input").samples.tolist() == [[0.5]] * 500
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width(recording, width):
    """8 bits without a sign, 16, 24 and 32 with one, become -1 to 1."""
    most = 2 ** (8 * width - 1)
    levels = np.array([[-most], [0], [most // 2]])
    path = recording(levels + (128 if width == 1 else 0), width)
    assert np.allclose(fed(port("TENSOR_FLOAT32", (3,)), path).array, [-1, 0, 0.5])


def test_a_recording_fits_its_input(recording):
    """In blocks, the last filled with zeros; its channels kept where the input has as many, else their mean."""
    path = recording(np.array([[0, 16384], [-16384, -16384], [8192, 0]]))
    cut = fed(port("TENSOR_FLOAT32", (1, 2)), path)
    assert cut.array.tolist() == [[0.25, -0.5]]
    told = "3 samples at 16000 Hz, the mean of 2 channels, 2 blocks of 2, the last padded with 1 zeros; -1 to 1"
    assert cut.done == told
    assert [(at, block.tolist()) for at, block in cut.later.values] == [(2 / 16000, [[0.125, 0]])]
    filled = fed(port("TENSOR_FLOAT32", (1, 4, 1)), path)
    assert filled.later is None
    assert filled.array.reshape(-1).tolist() == [0.25, -0.5, 0.125, 0]
    assert "padded with 1 zeros" in filled.done
    kept = fed(port("TENSOR_FLOAT32", (1, 3, 2)), path)
    assert kept.array.tolist() == [[[0, 0.5], [-0.5, -0.5], [0.25, 0]]]
    assert fed(port("TENSOR_FLOAT32", (0, 0)), path).array.shape == (1, 3)
    bytes_ = fed(port("TENSOR_QUANT8_ASYMM", (3,), **BYTE), path)
    assert bytes_.array.tolist() == [144, 96, 136]


def test_blocks_of_sound(recording):
    """--block where the input leaves the length open, --hop from one to the next; each with the second at which it
    begins.
    """
    its, path = port("TENSOR_FLOAT32", (0, 0)), recording(np.arange(7).reshape(-1, 1) * 4096, rate=8000)
    found = fed(its, path, block=4, hop=2)
    later = list(found.later.values)
    assert [block.shape for _, block in later] == [(1, 4), (1, 4)]
    assert [at for at, _ in later] == [2 / 8000, 4 / 8000]
    assert later[1][1].tolist() == [[0.5, 0.625, 0.75, 0]]
    assert "3 blocks of 4, one every 2, the last padded with 1 zeros" in found.done
    with pytest.raises(click.UsageError, match=r"--block 4: input 'x' takes 1 x 3, blocks of 3 samples; leave"):
        fed(port("TENSOR_FLOAT32", (1, 3)), path, block=4)
    with pytest.raises(click.UsageError, match=r"--hop 4: no input is a sound"):
        fed(its, None, shapes=["1x1"], hop=4)


# ---- bytes and numbers


def test_bytes_of_any_file(tmp_path):
    """A row of integers takes a file's bytes: cut, or padded with zeros; as many as there are where it is open."""
    path = tmp_path / "text.md"
    path.write_bytes(b"abc")
    assert fed(port("TENSOR_INT32", (0, 2)), path).array.tolist() == [[97, 98]]
    assert fed(port("TENSOR_INT32", (5,)), path).done == "3 bytes, padded with zeros to 5"
    assert fed(port("TENSOR_INT32", (0, 0)), path).array.shape == (1, 3)
    with pytest.raises(click.UsageError, match="not one row of bytes"):
        fed(port("TENSOR_INT32", (2, 3)), path)


def test_a_number(tmp_path):
    """Fills its input, if the input can hold it; a file of that name comes first."""
    assert fed(port("INT32", ()), "16000").array == 16000
    assert fed(port("TENSOR_FLOAT32", (0, 2)), "x=0.5").array.tolist() == [[0.5, 0.5]]
    with pytest.raises(click.UsageError, match=r"--input 0\.5: .* takes int32"):
        fed(port("INT32", ()), "0.5")


@pytest.mark.parametrize(
    ("kind", "shape", "told"),
    [("TENSOR_FLOAT32", (40, 13), "not a row of samples"), ("TENSOR_INT32", (3,), "pass an array")],
)
def test_what_takes_no_sound_says_so(recording, kind, shape, told):
    """Spectra, and numbers of words."""
    with pytest.raises(click.UsageError, match=told):
        fed(port(kind, shape), recording(np.zeros((3, 1), int)))


@pytest.mark.parametrize("content", [b"", b"RIFF", b"RIFF\x04\0\0\0WAVE", None])
def test_a_damaged_recording_is_told(tmp_path, recording, content):
    """Also one without samples."""
    path = recording(np.zeros((0, 1), int))
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(click.UsageError, match=r"not a sound that FFmpeg reads|the file contains no samples"):
        fed(port("TENSOR_FLOAT32", (3,)), path)


# ---- arrays


def saved(path, **arrays):
    write_arrays(path, arrays)
    return path


def test_an_array_is_taken_as_it_is(tmp_path):
    """With a batch of one before it, if that is all that lacks; in the input's type, if nothing is lost."""
    values = np.arange(6.0).reshape(2, 3)
    np.save(tmp_path / "a.npy", values)
    batch = fed(port("TENSOR_FLOAT32", (1, 2, 3)), tmp_path / "a.npy")
    assert batch.done == "batch dimension added; float64 converted to float32"
    assert fed(port("TENSOR_QUANT8_ASYMM", (2, 3), **BYTE), tmp_path / "a.npy").array.tolist() == [
        [128, 192, 255],
        [255, 255, 255],
    ]
    np.save(tmp_path / "a.npy", np.arange(3, dtype=np.int64))
    assert fed(port("TENSOR_INT32", (0,)), tmp_path / "a.npy").array.dtype == np.int32


@pytest.mark.parametrize(
    ("values", "kind", "told"),
    [
        (np.zeros((3, 2)), "TENSOR_FLOAT32", "the array has shape 3 x 2, but input 'x' takes 2 x 3; reshape it"),
        (np.full((2, 3), 0.5), "TENSOR_INT32", r"takes int32; convert it with .astype\('int32'\)"),
        (np.full((2, 3), 2**40), "TENSOR_INT32", "convert it"),
        (np.zeros((2, 3), complex), "TENSOR_FLOAT32", "complex128"),
        (np.array([[{}] * 3] * 2), "TENSOR_FLOAT32", "not a readable array"),
    ],
)
def test_an_array_that_does_not_fit_is_told(tmp_path, values, kind, told):
    """Its shape or its type, the input's, and the way from one to the other. Pickled objects are never loaded."""
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(click.UsageError, match=told):
        fed(port(kind, (2, 3)), tmp_path / "a.npy")


def test_an_archive_is_for_all_inputs(tmp_path):
    """By the names of its arrays; one input's array may be called anything."""
    both = [port("TENSOR_FLOAT32", (2,), "file"), port("TENSOR_FLOAT32", (2,), "b=c")]
    path = saved(
        tmp_path / "a.npz", **{"file": np.ones(2, np.float32), "b=c": np.zeros(2, np.float32), "d": np.ones(1)}
    )
    assert [f.array.tolist() for f in feeds(both, [str(path)], {}, FeedOptions())] == [[1, 1], [0, 0]]
    assert feeds(both, [f"b=c={path}"], {}, FeedOptions())[0].source == "random"
    alone = saved(tmp_path / "b.npz", anything=np.ones(2, np.float32))
    assert fed(both[0], alone).array.tolist() == [1, 1]
    with pytest.raises(click.UsageError, match=r"no array is named 'e'; the file has file, b=c, d"):
        fed(port("TENSOR_FLOAT32", (2,), "e"), f"e={path}")
    path.write_bytes(b"no archive")
    with pytest.raises(click.UsageError, match=r"not an \.npz file"):
        feeds(both, [str(path)], {}, FeedOptions())


# ---- random, and which file is whose


def test_random_inputs_are_seeded():
    """The same seed, the same numbers, in the range of the type; states begin with zeros."""
    kinds = {"TENSOR_FLOAT32": "f", "TENSOR_INT32": "i", "TENSOR_BOOL8": "u", "TENSOR_FLOAT16": "f"}
    for kind in kinds:
        its = port(kind, (50,))
        one, again, other = (fed(its, "random", seed=seed).array for seed in (1, 1, 2))
        assert np.array_equal(one, again)
        assert not np.array_equal(one, other)
        assert np.abs(one.astype(float)).max() <= 1
    assert np.ptp(fed(port("TENSOR_QUANT8_ASYMM", (999,), **BYTE), None).array.astype(int)) > 200
    state = Port("h", Operand("TENSOR_FLOAT32", (3,), extra={"name": "h", "state": 0}))
    assert fed(state, None)[:2][1] == "zeros"


def test_open_sizes(picture):
    """By --shape; else a batch is 1, and that is said. For others there is an error with the option that helps."""
    its = port("TENSOR_FLOAT32", (0, 4))
    assert fed(its, None).array.shape == (1, 4)
    assert "? taken as 1" in fed(its, None).done
    assert fed(its, None, shapes=["3x4"]).array.shape == (3, 4)
    assert fed(port("TENSOR_FLOAT32", (0, 0, 0, 3)), picture[0], shapes=["?x2x5x3"]).array.shape == (1, 2, 5, 3)
    assert fed(port("TENSOR_FLOAT32", ()), None, shapes=["x=2x2"]).array.shape == (2, 2)
    for shapes, told in ((["3x5"], r"only a \? can be set"), (["3,4"], "separated by x"), (["0x4"], "positive")):
        with pytest.raises(click.UsageError, match=told):
            fed(its, None, shapes=shapes)
    with pytest.raises(click.UsageError, match="has no known rank"):
        fed(port("TENSOR_FLOAT32", ()), None)
    with pytest.raises(click.UsageError, match=r"'x' is float32 \? x 3 x \? x \?; .* as in --shape x=1x3x320x320"):
        fed(port("TENSOR_FLOAT32", (0, 3, 0, 0)), None)


def test_a_size_with_a_name_is_the_same_everywhere(tmp_path):
    """What a file tells of one input holds for those with the same name for it, and for batches."""
    one = Port("a", Operand("TENSOR_FLOAT32", (0, 0), extra={"name": "a", "dims": ("rows", "length")}))
    two = Port("b", Operand("TENSOR_FLOAT32", (0, 4, 0), extra={"name": "b", "dims": (None, None, "length")}))
    np.save(tmp_path / "b.npy", np.zeros((3, 4, 6), np.float32))
    found = feeds([one, two], [f"b={tmp_path / 'b.npy'}"], {}, FeedOptions())
    assert found[0].array.shape == (3, 6)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["left=random", "left=random"], "input 'left' is given twice"),
        (["random", "random", "random"], "too many; the model has 2 inputs: left, right"),
        (["lef=random"], r"no input is named 'lef'; inputs: left, right; did you mean 'left'\?"),
        (["right=nowhere.npy"], "no such file; pass a path, a number, the address of a stream, or the word 'random'"),
    ],
)
def test_a_wrong_input_is_told(given, told):
    """With the names that there are, and the nearest."""
    with pytest.raises(click.UsageError, match=told):
        feeds([port("TENSOR_FLOAT32", (2,), name) for name in ("left", "right")], given, {}, FeedOptions())


def test_ports_have_the_names_of_the_file(files):
    """And numbers where the file has none, or the same one twice."""
    model = load(files.states, form="operations")
    assert inputs_of(model)[0].name == "frames"
    assert [p.is_state for p in outputs_of(model)] == [False, True, True]


# ---- what comes out


def test_classes_are_the_largest_of_a_row():
    """By their real values, with labels; a box, a state, a matrix and numbers of things are no scores."""
    its = port("TENSOR_QUANT8_ASYMM", (1, 5), **BYTE)
    found = classes(its, np.array([[128, 255, 0, 192, 128]], np.uint8), 3, list("abcde"))
    assert [(c.number, c.label, c.value) for c in found] == [(1, "b", 127 / 64), (3, "d", 1.0), (0, "a", 0.0)]
    real = port("TENSOR_FLOAT32", ())
    assert [c.number for c in classes(real, np.array([1, np.nan, 3, 2, 0], np.float32), 9, [])] == [2, 3, 0, 4, 1]
    assert classes(real, np.ones((1, 4), np.float32), 5, []) == []
    assert classes(real, np.ones((2, 9), np.float32), 5, []) == []
    assert classes(port("TENSOR_INT32", (9,)), np.ones(9, np.int32), 5, []) == []
    with pytest.raises(click.UsageError, match="2 lines, but output 'x' has 5 classes"):
        classes(its, np.zeros((1, 5), np.uint8), 3, ["a", "b"])


def test_an_archive_is_what_numpy_reads(tmp_path):
    """With names and shapes that numpy's own way of writing them does not take."""
    arrays = {"file": np.float32(1), "a b": np.ones((0, 2)), "allow_pickle": np.arange(3)}
    with np.load(io.BytesIO(saved(tmp_path / "o.npz", **arrays).read_bytes())) as found:
        assert {name: found[name].shape for name in found} == {"file": (), "a b": (0, 2), "allow_pickle": (3,)}


@pytest.mark.parametrize(
    ("n", "skipped", "confidence"),
    [(1, 0, 0.0), (2, 0, 0.5), (5, 0, 0.9375), (6, 0, 0.96875), (9, 1, 1 - 20 / 512), (20, 5, 1 - 2 * 21700 / 2**20)],
)
def test_the_interval_of_a_median(n, skipped, confidence):
    """The sign test cuts as many values from each end as leave 95 % inside."""
    found = estimate(np.random.default_rng(1).permutation(n))
    assert (found.low, found.high) == (skipped, n - 1 - skipped)
    assert found.median == pytest.approx((n - 1) / 2)
    assert found.confidence == pytest.approx(confidence)
