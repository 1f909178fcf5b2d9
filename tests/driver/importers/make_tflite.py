"""Makes the .tflite files in vendor/ with the converter of TensorFlow itself, from seeded weights.

    python -m venv .tfvenv && .tfvenv/bin/pip install 'tensorflow-cpu==2.21.*' 'tf-keras==2.21.*'
    .tfvenv/bin/python tests/driver/importers/make_tflite.py [NAME ...]

The files are committed, so the tests need no TensorFlow. Only Keras 2 (tf-keras) marks its LSTM in the way that the
converter makes one operator of.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}

import numpy as np
import tensorflow as tf

FOLDER = Path(__file__).parent / "vendor"
MOST_BYTES = 300_000


class Layers:
    """Layers of TensorFlow's own operations, with weights drawn from one seed."""

    def __init__(self, seed):
        self._random = np.random.default_rng(seed)

    def weights(self, *shape, spread=None):
        """A constant of normal numbers, spread so that a layer keeps the size of what it gets."""
        spread = np.sqrt(2 / np.prod(shape[:-1])) if spread is None else spread
        return tf.constant(self._random.normal(0, spread, shape), tf.float32)

    def normalised(self, x):
        """Batch normalisation, which the converter folds into the convolution before it."""
        size = x.shape[-1]
        scale, offset, mean = (self.weights(size, spread=0.1) for _ in range(3))
        variance = tf.abs(self.weights(size, spread=0.1)) + 1
        return tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale + 1, offset=offset, mean=mean, variance=variance, epsilon=1e-3, is_training=False
        )[0]

    def conv(self, x, channels, size=3, stride=1, padding="SAME"):
        """A convolution and its batch normalisation."""
        return self.normalised(tf.nn.conv2d(x, self.weights(size, size, x.shape[-1], channels), stride, padding))

    def depthwise(self, x, stride=1):
        """A depthwise convolution of 3 x 3."""
        filters = self.weights(3, 3, x.shape[-1], 1, spread=0.4)
        return self.normalised(tf.nn.depthwise_conv2d(x, filters, [1, stride, stride, 1], "SAME"))

    def dense(self, x, units):
        """A product with a matrix, and a bias."""
        return tf.matmul(x, self.weights(x.shape[-1], units)) + self.weights(units, spread=0.1)

    def layer_norm(self, x):
        """Layer normalisation as Keras writes it out."""
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        offset, scale = (self.weights(x.shape[-1], spread=0.1) for _ in range(2))
        return tf.nn.batch_normalization(x, mean, variance, offset, 1 + scale, 1e-6)


# ---- images --------------------------------------------------------------------------------------------------------


def mobilenet(image):
    """Inverted residual blocks, as MobileNetV2 has them, at a width of about 0.2."""
    layers = Layers(1)
    x = tf.nn.relu6(layers.conv(image, 8, stride=2))
    for channels, stride, expansion in (
        (8, 1, 1),
        (8, 2, 6),
        (8, 1, 6),
        (12, 2, 6),
        (12, 1, 6),
        (20, 2, 6),
        (20, 1, 6),
    ):
        y = tf.nn.relu6(layers.conv(x, x.shape[-1] * expansion, 1)) if expansion > 1 else x
        y = layers.conv(tf.nn.relu6(layers.depthwise(y, stride)), channels, 1)
        x = x + y if y.shape == x.shape else y
    x = tf.reduce_mean(tf.nn.relu6(layers.conv(x, 64, 1)), [1, 2])
    return {"probabilities": tf.nn.softmax(layers.dense(x, 20))}


def resnet(image):
    """Eight residual blocks of two convolutions, as ResNet-18 has them."""
    layers = Layers(2)
    x = tf.nn.max_pool2d(tf.nn.relu(layers.conv(image, 8, 7, 2)), 3, 2, "SAME")
    for channels, stride in ((8, 1), (8, 1), (12, 2), (12, 1), (16, 2), (16, 1), (24, 2), (24, 1)):
        y = layers.conv(tf.nn.relu(layers.conv(x, channels, 3, stride)), channels)
        x = tf.nn.relu((x if y.shape == x.shape else layers.conv(x, channels, 1, stride)) + y)
    return {"scores": layers.dense(tf.reduce_mean(x, [1, 2]), 10)}


def detector(image):
    """Two scales joined by RESIZE_BILINEAR and a transposed convolution; boxes and scores of both, and the best box."""
    layers = Layers(3)
    fine = tf.nn.leaky_relu(layers.conv(image, 8, stride=4), 0.1)
    coarse = tf.nn.elu(layers.conv(fine, 16, stride=2))
    up = tf.image.resize(layers.conv(coarse, 8, 1), [16, 16])
    filters = layers.weights(3, 3, 8, 16)
    up += tf.nn.conv2d_transpose(coarse, filters, [1, 16, 16, 8], 2, "SAME")
    joined = tf.concat([fine, tf.nn.relu(up)], -1)
    grown = tf.compat.v1.image.resize_nearest_neighbor(tf.nn.avg_pool2d(joined, 2, 2, "VALID"), [16, 16])
    heads = [layers.conv(m, 6, 3) for m in (joined + grown, tf.pad(coarse, [[0, 0], [1, 1], [2, 2], [0, 0]]))]
    rows = tf.concat([tf.reshape(head, [1, -1, 6]) for head in heads], 1)
    boxes, scores = tf.nn.tanh(rows[..., :4]), tf.sigmoid(rows[..., 4:])
    best = tf.argmax(scores[..., 0], 1, output_type=tf.int32)
    return {"boxes": boxes, "scores": scores, "best": best, "box": tf.gather(boxes[0], best)}


def shuffler(image):
    """A convolution in groups, a shuffle of channels, space to depth and back, and a hard swish."""
    layers = Layers(4)
    x = tf.nn.space_to_depth(image, 2)
    x = tf.nn.relu(layers.conv(x, 16))
    x = tf.nn.conv2d(x, layers.weights(3, 3, 4, 16), 1, "SAME") + layers.weights(16, spread=0.1)
    x = tf.reshape(tf.transpose(tf.reshape(x, [1, 1024, 4, 4]), [0, 1, 3, 2]), [1, 32, 32, 16])
    x = x * tf.nn.relu6(x + 3) / 6
    x = tf.nn.conv2d(x, layers.weights(3, 3, 16, 12), 1, "SAME", dilations=2)
    parts = tf.split(x, 3, -1)
    x = tf.nn.depth_to_space(tf.concat([parts[2], parts[0], tf.maximum(parts[1], parts[0])], -1), 2)
    return {"image": tf.clip_by_value(x, -1, 1)}


def batches(images):
    """Any number of images; the shape of the middle is computed when it runs."""
    layers = Layers(15)
    x = tf.nn.relu(layers.conv(images, 6, stride=2))
    x = tf.reshape(x, [tf.shape(x)[0], 8, 8, 3, 2])
    x = tf.reshape(tf.transpose(x, [0, 1, 2, 4, 3]), [-1, 384])
    return {"scores": tf.nn.softmax(layers.dense(x, 5))}


# ---- sequences -----------------------------------------------------------------------------------------------------


def transformer(tokens):
    """Two layers of an encoder: multi-head attention and a feed-forward net, each with layer normalisation before."""
    layers, heads, size = Layers(5), 4, 32
    x = tf.gather(layers.weights(100, size, spread=1.0), tokens) + layers.weights(1, 16, size, spread=0.3)
    for _ in range(2):
        y = layers.layer_norm(x)
        q, k, v = (
            tf.transpose(tf.reshape(layers.dense(y, size), [1, 16, heads, size // heads]), [0, 2, 1, 3])
            for _ in range(3)
        )
        weights = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / np.sqrt(size // heads))
        y = tf.reshape(tf.transpose(tf.matmul(weights, v), [0, 2, 1, 3]), [1, 16, size])
        x += layers.dense(y, size)
        y = layers.dense(layers.layer_norm(x), 2 * size)
        x += layers.dense(tf.nn.gelu(y, approximate=True), size)
    return {"encoded": layers.layer_norm(x)}


def attention(frames):
    """One attention over frames, so that it can be quantised from end to end."""
    layers = Layers(6)
    q, k, v = (tf.reshape(layers.dense(frames, 32), [2, 12, 32]) for _ in range(3))
    weights = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / np.sqrt(32))
    return {"attended": layers.dense(tf.matmul(weights, v), 8)}


def lstm(frames):
    """Keywords in audio: a convolution over time, an LSTM, a dense layer."""
    layers = Layers(7)
    x = tf.nn.relu(tf.nn.conv1d(frames, layers.weights(3, 10, 16), 2, "SAME"))
    return {"keywords": layers.dense(KEPT["lstm"](x), 6)}


def gru(frames):
    """The same with a GRU, which the converter writes as WHILE."""
    layers = Layers(8)
    return {"keywords": layers.dense(KEPT["gru"](frames), 6)}


def masked(frames):
    """What a mask hides; classes as 64-bit places and as one-hot vectors; how many values are large; time reversed."""
    layers = Layers(14)
    scores = layers.dense(tf.where(frames[..., :1] > 0, frames, -1.0), 8)
    best = tf.argmax(scores, -1)
    large = tf.reduce_sum(tf.cast(scores > 1, tf.float32), 1)
    return {"best": best, "one_hot": tf.one_hot(tf.cast(best, tf.int32), 8), "large": large, "turned": scores[:, ::-1]}


# ---- control flow --------------------------------------------------------------------------------------------------


def condition(x, flag):
    """Either side has layers of its own."""
    layers = Layers(9)
    first, second = layers.weights(8, 8), layers.weights(8, 8)
    return {"y": tf.cond(flag, lambda: tf.nn.relu(x @ first), lambda: tf.tanh(x @ second) + 1)}


def loop(x, turns):
    """As many turns as are asked for, with a product in each."""
    weights = Layers(10).weights(8, 8, spread=0.3)
    _, y = tf.while_loop(lambda i, _: i < turns, lambda i, y: (i + 1, tf.tanh(y @ weights) + x), [0, x])
    return {"y": y}


# ---- what is made of them ------------------------------------------------------------------------------------------

IMAGE = {"image": ((1, 64, 64, 3), tf.float32)}
KEPT = {}
FRAMES = {"frames": ((1, 20, 10), tf.float32)}
NETS = {
    "mobilenet": (mobilenet, IMAGE, ("float32", "float16", "dynamic", "int8", "uint8")),
    "resnet": (resnet, IMAGE, ("float32", "int8")),
    "detector": (detector, IMAGE, ("float32", "int8")),
    "shuffler": (shuffler, IMAGE, ("float32", "int8")),
    "batches": (batches, {"images": ((None, 16, 16, 3), tf.float32)}, ("float32",)),
    "masked": (masked, {"frames": ((2, 5, 8), tf.float32)}, ("float32",)),
    "transformer": (transformer, {"tokens": ((1, 16), tf.int32)}, ("float32", "float16", "dynamic")),
    "attention": (attention, {"frames": ((2, 12, 16), tf.float32)}, ("float32", "int8")),
    "lstm": (lstm, FRAMES, ("float32", "int8")),
    "gru": (gru, FRAMES, ("float32",)),
    "condition": (condition, {"x": ((2, 8), tf.float32), "flag": ((), tf.bool)}, ("float32",)),
    "loop": (loop, {"x": ((2, 8), tf.float32), "turns": ((), tf.int32)}, ("float32",)),
}


def keep_layers():
    """The layers that have variables of their own."""
    for name, seed in (("lstm", 11), ("gru", 12)):
        tf.keras.utils.set_random_seed(seed)
        KEPT[name] = {"lstm": tf.keras.layers.LSTM, "gru": tf.keras.layers.GRU}[name](36)
        KEPT[name].build((1, None, 16 if name == "lstm" else 10))


def samples(inputs):
    """Data for the converter to find the ranges with."""
    random = np.random.default_rng(13)
    for _ in range(20):
        yield {name: random.normal(0, 1, shape).astype(np.float32) for name, (shape, _) in inputs.items()}


def convert(net, inputs, mode):
    """The bytes of a file."""
    module = tf.Module()
    module.kept = list(KEPT.values())
    module.call = tf.function(net, input_signature=[tf.TensorSpec(s, d, name=n) for n, (s, d) in inputs.items()])
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder, signatures={"serving_default": module.call})
        converter = tf.lite.TFLiteConverter.from_saved_model(folder)
        converter.optimizations = [] if mode == "float32" else [tf.lite.Optimize.DEFAULT]
        if mode == "float16":
            converter.target_spec.supported_types = [tf.float16]
        if mode in ("int8", "uint8"):
            converter.representative_dataset = lambda: samples(inputs)
            converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
            converter.inference_input_type = converter.inference_output_type = tf.as_dtype(mode)
        return converter.convert()


def main():
    """Write the files that are asked for, or all."""
    keep_layers()
    for name, (net, inputs, modes) in NETS.items():
        for mode in modes:
            file = FOLDER / f"{name}_{mode}.tflite"
            if len(sys.argv) > 1 and file.stem not in sys.argv[1:] and name not in sys.argv[1:]:
                continue
            data = convert(net, inputs, mode)
            if len(data) > MOST_BYTES:
                raise SystemExit(f"{file.name} has {len(data)} bytes; make the net narrower")
            file.write_bytes(data)
            print(file.name, len(data))


if __name__ == "__main__":
    main()
