"""Makes the .onnx files of `onnx_models`, with torch's exporters and onnxruntime's quantisation; seeded.

    pip install torch onnxscript onnxruntime onnx
    python make_onnx.py [--folder DIR] [--full]

The files in the repository are small, so that tests need no torch. With --full they have their usual sizes.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn

FOLDER = Path(__file__).parent / "onnx_models"


def conv(inputs, outputs, kernel=3, stride=1, groups=1, act=nn.ReLU6):
    layers = [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)]
    return nn.Sequential(*layers, nn.BatchNorm2d(outputs), *([act()] if act else []))


class Inverted(nn.Module):
    """A block of MobileNetV2."""

    def __init__(self, inputs, outputs, stride, factor):
        super().__init__()
        middle = inputs * factor
        first = [conv(inputs, middle, 1)] if factor > 1 else []
        self.layers = nn.Sequential(*first, conv(middle, middle, 3, stride, middle), conv(middle, outputs, 1, act=None))
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.layers(x) if self.is_residual else self.layers(x)


class MobileNet(nn.Module):
    """MobileNetV2; blocks: (factor, channels, repetitions, stride)."""

    def __init__(self, first, blocks, last, classes):
        super().__init__()
        layers, channels = [conv(3, first, 3, 2)], first
        for factor, outputs, times, stride in blocks:
            for i in range(times):
                layers.append(Inverted(channels, outputs, stride if i == 0 else 1, factor))
                channels = outputs
        self.features = nn.Sequential(*layers, conv(channels, last, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x):
        return self.classifier(self.features(x).mean([2, 3]))


class Residual(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.one = conv(inputs, outputs, 3, stride, act=nn.ReLU)
        self.two = conv(outputs, outputs, 3, act=None)
        is_same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if is_same else conv(inputs, outputs, 1, stride, act=None)

    def forward(self, x):
        return torch.relu(self.two(self.one(x)) + self.short(x))


class ResNet(nn.Module):
    """ResNet-18 of given widths."""

    def __init__(self, widths, classes):
        super().__init__()
        layers = [conv(3, widths[0], 7, 2, act=nn.ReLU), nn.MaxPool2d(3, 2, 1)]
        for before, width in zip((widths[0], *widths), widths, strict=False):
            layers += [Residual(before, width, 1 if width == widths[0] else 2), Residual(width, width, 1)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))

    def forward(self, x):
        return self.layers(x)


class Encoder(nn.Module):
    """Words, their places, and layers of a transformer; GELU in between."""

    def __init__(self, words, size, heads, layers, length):
        super().__init__()
        self.words = nn.Embedding(words, size)
        self.places = nn.Parameter(torch.randn(length, size) * 0.1)
        layer = nn.TransformerEncoderLayer(size, heads, 2 * size, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(size, 4)

    def forward(self, tokens):
        return self.head(self.layers(self.words(tokens) + self.places))


class Audio(nn.Module):
    """Frames of a spectrum: a convolution over time, a recurrent layer both ways, and a decision for each frame."""

    def __init__(self, kind, bands, units, classes):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(bands, units, 3, 2, 1), nn.BatchNorm1d(units), nn.ReLU())
        self.memory = kind(units, units, bidirectional=kind is nn.LSTM)
        self.back = nn.Linear(units * (2 if kind is nn.LSTM else 1), classes)

    def forward(self, frames):
        states, _ = self.memory(self.front(frames).permute(2, 0, 1))
        return torch.log_softmax(self.back(states), -1)


def lively(net):
    """The network with statistics of normalisation as after some training."""
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(layer.running_mean, -0.2, 0.2)
            nn.init.uniform_(layer.running_var, 0.5, 1.5)
            nn.init.uniform_(layer.weight, 0.8, 1.2)
            nn.init.uniform_(layer.bias, -0.1, 0.1)
    return net.eval()


def networks(*, full):
    """name -> (network, input, whether the newer exporter writes it)."""
    torch.manual_seed(1)
    torch.backends.mha.set_fastpath_enabled(False)  # one operator that no exporter knows
    usual = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    narrow = [(1, 8, 1, 1), (6, 8, 2, 2), (6, 8, 2, 2), (6, 16, 2, 2), (6, 24, 1, 1)]
    side = 224 if full else 64
    image = torch.randn(1, 3, side, side)
    mobile = MobileNet(32, usual, 1280, 1000) if full else MobileNet(8, narrow, 96, 10)
    residual = ResNet((64, 128, 256, 512), 1000) if full else ResNet((8, 16, 24, 32), 10)
    encoder, words = (Encoder(5000, 256, 8, 4, 64), 64) if full else (Encoder(64, 32, 4, 2, 12), 12)
    tokens = torch.randint(0, 64, (1, words))
    frames = torch.randn(1, 40 if full else 16, 200 if full else 40)
    lstm, gru = (Audio(kind, frames.shape[1], 64 if full else 24, 8) for kind in (nn.LSTM, nn.GRU))
    made = {
        "mobilenet": (mobile, image, False),
        "resnet": (residual, image, True),
        "encoder": (encoder, tokens, False),
        "encoder_dynamo": (encoder, tokens, True),
        "lstm": (lstm, frames, False),
        "gru": (gru, frames, False),
    }
    return {name: (lively(net), sample, dynamo) for name, (net, sample, dynamo) in made.items()}


def export(net, sample, path, dynamo):
    """Write a network with one of torch's exporters."""
    more = {"external_data": False} if dynamo else {"opset_version": 17}
    with torch.no_grad():
        torch.onnx.export(net, (sample,), str(path), dynamo=dynamo, input_names=["x"], output_names=["y"], **more)
    model = onnx.load(path)
    for node in model.graph.node:  # where in torch it comes from: larger than the network
        del node.metadata_props[:]
        node.doc_string = ""
    del model.graph.value_info[:], model.metadata_props[:], model.graph.metadata_props[:]
    onnx.save(model, path)


class Samples(CalibrationDataReader):
    """A few inputs from which ranges are taken."""

    def __init__(self, shape):
        random = np.random.default_rng(3)
        self._left = iter([{"x": random.standard_normal(shape).astype(np.float32)} for _ in range(8)])

    def get_next(self):
        return next(self._left, None)


def quantise(source, target, sample, kind, *, per_channel):
    """Write a network with QuantizeLinear and DequantizeLinear around its operators."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.onnx"
        quant_pre_process(str(source), str(ready), skip_symbolic_shape=True)
        words = {"activation_type": kind, "weight_type": kind, "per_channel": per_channel}
        quantize_static(str(ready), str(target), Samples(sample.shape), quant_format=QuantFormat.QDQ, **words)


def make(folder, *, full):
    """Write all files."""
    for name, (net, sample, dynamo) in networks(full=full).items():
        path = folder / f"{name}.onnx"
        export(net, sample, path, dynamo)
        if name in ("mobilenet", "resnet"):
            quantise(path, folder / f"{name}_uint8.onnx", sample, QuantType.QUInt8, per_channel=False)
            quantise(path, folder / f"{name}_int8.onnx", sample, QuantType.QInt8, per_channel=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    make(options.folder, full=options.full)


if __name__ == "__main__":
    main()
