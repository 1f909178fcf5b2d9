"""The folder of models: what is found, loaded, refused and replaced, also while requests run or the device dies."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from oip_models import Client, client_memory, rows, write_sum
from tritonclient.utils import InferenceServerException, shared_memory

import driver
from burst import BurstError
from driver.gateways.oip import model_config
from driver.gateways.oip.model_config import FolderConfig
from driver.gateways.oip.process import InferenceServer
from driver.gateways.oip.repository import ModelRepository
from driver.gateways.oip.resting_repository import RestingRepository
from driver.gateways.oip.service import InferenceService
from driver.gateways.refusal import Refusal

NBYTES = rows().nbytes
NEVER = 1e6  # seconds
DIMS = "data_type: TYPE_FP32 dims: [-1, 4]"
LABELS = f"{DIMS} }} ] output [ {{ name: 'sum' {DIMS} label_filename: '%s'"
HALF = """
import signal, sys
data = open(sys.argv[1], "rb").read()
with open(sys.argv[2], "wb", buffering=0) as file:
    file.write(data[: len(data) // 2])
    print("half", flush=True)
    signal.pause()
"""


@pytest.fixture
def folder(tmp_path):
    """A repository that is looked at by hand, and loads nothing: .loaded has what it would have."""
    loaded, closed = [], []

    def load(name, version, path, config):
        loaded.append((name, version, path.name))
        if path.read_bytes() == b"bad":
            raise Refusal(*_BAD)
        return SimpleNamespace(name=name, version=version, config=config, close=lambda: closed.append((name, version)))

    repository = ModelRepository(tmp_path, load)
    yield SimpleNamespace(path=tmp_path, its=repository, load=load, loaded=loaded, closed=closed)
    repository.close()


def _bad():
    from driver.gateways.refusal import RefusalCode

    return RefusalCode.INVALID_ARGUMENT, "it is bad"


_BAD = _bad()


def write(path, data=b"good"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def settle(folder):
    """Two looks: nothing is loaded that was not the same in both."""
    folder.its.look()
    folder.its.look()


def decoupled(**parameters):
    told = [f"parameters {{ key: '{name}' value {{ string_value: \"{text}\" }} }}" for name, text in parameters.items()]
    return " ".join(["model_transaction_policy { decoupled: true }", *told])


class TestFolder:
    def test_a_file_that_is_being_written(self, folder):
        """While a file grows from look to look it is not loaded; when it stays the same it is, once."""
        for size in range(1, 5):
            write(folder.path / "m.onnx", b"x" * size)
            folder.its.look()
        assert folder.loaded == []
        folder.its.look()
        folder.its.look()
        assert folder.loaded == [("m", "1", "m.onnx")]

    def test_a_broken_file(self, folder):
        """It stands in the index with its reason, is not tried again until it changes, and then is served."""
        write(folder.path / "m.onnx", b"bad")
        settle(folder)
        settle(folder)
        assert len(folder.loaded) == 1
        assert folder.its.index(ready=False) == [
            {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "it is bad"}
        ]
        assert folder.its.index(ready=True) == []
        with pytest.raises(Refusal, match="it is bad"):
            folder.its.get("m")
        write(folder.path / "m.onnx")
        settle(folder)
        assert folder.its.get("m").version == "1"

    def test_a_file_that_breaks(self, folder):
        """The version before it goes on, and the index has the reason."""
        write(folder.path / "m.onnx")
        settle(folder)
        before = folder.its.get("m")
        write(folder.path / "m.onnx", b"bad")
        settle(folder)
        assert folder.its.get("m") is before
        assert folder.its.index(ready=False)[0]["reason"] == "it is bad"
        assert folder.closed == []

    def test_files_come_and_go(self, folder):
        """A file that changes takes the place of the one before, which is closed; one that goes is unloaded."""
        write(folder.path / "m.onnx")
        settle(folder)
        before = folder.its.get("m")
        write(folder.path / "m.onnx", b"better")
        settle(folder)
        assert folder.its.get("m") is not before
        assert folder.closed == [("m", "1")]
        (folder.path / "m.onnx").unlink()
        folder.its.look()
        with pytest.raises(Refusal, match="no model 'm'"):
            folder.its.get("m")

    def test_what_is_no_model(self, folder):
        """Hidden files, other suffixes, folders without versions and strange names are passed over."""
        for name in (".m.onnx", "m.onnx.part", "notes.txt", "a b.onnx", "empty/readme", "odd/01x/model.onnx"):
            write(folder.path / name)
        settle(folder)
        assert folder.its.index(ready=False) == []

    def test_versions(self, folder):
        """By default the latest; all or some by the configuration; the latest of them without a number."""
        for version in ("1", "2", "10"):
            write(folder.path / "m" / version / "model.onnx")
        settle(folder)
        assert folder.its.versions("m") == ["10"]
        write(folder.path / "m" / "config.pbtxt", b"version_policy { all {} }")
        settle(folder)
        assert folder.its.versions("m") == ["1", "2", "10"]
        assert folder.its.get("m").version == "10"
        write(folder.path / "m" / "config.pbtxt", b"version_policy { specific { versions: [2, 7] } }")
        settle(folder)
        assert folder.its.versions("m") == ["2"]
        with pytest.raises(Refusal, match="no version '1'"):
            folder.its.get("m", "1")

    def test_a_sparse_configuration(self, folder):
        """Of a configuration of a terabyte with holes no more is read than one may have; other models are loaded."""
        for name in "m", "n":
            write(folder.path / name / "1" / "model.onnx")
        write(folder.path / "m" / "config.pbtxt", b"name: 'm'")
        os.truncate(folder.path / "m" / "config.pbtxt", 1 << 40)
        settle(folder)
        assert folder.loaded == [("n", "1", "model.onnx")]
        (reason,) = (each["reason"] for each in folder.its.index(ready=False) if each["name"] == "m")
        assert "it has more than 1048576 bytes" in reason

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("name: 'other'", "its name is 'other'"),
            ("ensemble_scheduling { step [] }", "ensemble_scheduling"),
            ("sequence_batching { max_sequence_idle_microseconds: 5 }", "sequence_batching"),
            ("model_transaction_policy { decoupled: true }", "a decoupled model needs the parameter feedback"),
            (decoupled(feedback="{'y'}"), "feedback, most and also are JSON"),
            (decoupled(feedback="{}", until="{"), "until is the name of an output, or JSON"),
            ("platform: 'tensorrt_plan'", "no platform"),
            ("backend: 'python'", "no platform"),
            ("default_model_filename: '../../etc/passwd'", "without folders"),
            ("max_batch_size: -1", "max_batch_size"),
            ("name: ", "config.pbtxt"),
        ],
    )
    def test_configurations_that_mean_something_else(self, folder, text, told):
        """A model whose configuration cannot be kept to is not served, and the index says why."""
        write(folder.path / "m" / "1" / "model.onnx")
        write(folder.path / "m" / "config.pbtxt", text.encode())
        settle(folder)
        assert folder.loaded == []
        assert told in folder.its.index(ready=False)[0]["reason"]

    def test_fields_without_effect(self):
        """They are known by name, whatever is in them."""
        text = "optimization { graph { level: 1 } } model_warmup [ { name: 'w' } ] instance_group [ { count: 3 } ]"
        config = FolderConfig(text)
        assert config.ignored == ["model_warmup", "optimization"]
        assert config.instances == 3

    def test_a_configuration_is_read_once(self, folder, monkeypatch):
        """However often its folder is looked at, until its text is another one."""
        read = []

        def noted(text):
            read.append(text)
            return FolderConfig(text)

        monkeypatch.setattr(model_config, "FolderConfig", noted)
        write(folder.path / "m" / "1" / "model.onnx")
        texts = [f"name: 'm' max_batch_size: {size}".encode() for size in (0, 7)]
        for text in texts:
            write(folder.path / "m" / "config.pbtxt", text)
            settle(folder)
            settle(folder)
        assert [text.encode() for text in read] == texts

    def test_loading_by_name(self, folder):
        """A client unloads and loads what is in the folder; what is not there is told."""
        write(folder.path / "m.onnx")
        settle(folder)
        folder.its.unload("m")
        settle(folder)
        with pytest.raises(Refusal, match="load it first"):
            folder.its.get("m")
        assert folder.its.index(ready=False)[0]["reason"] == "unloaded"
        folder.its.load("m")
        assert folder.its.get("m")
        for call in (folder.its.load, folder.its.unload):
            with pytest.raises(Refusal, match="no model"):
                call("../m")


@pytest.fixture
def running(tmp_path):
    """A server of one model, and a client of it."""
    write_sum(tmp_path / "models" / "sum.onnx")
    its = InferenceServer("onnxruntime", tmp_path / "models", [f"unix:{tmp_path}/s"])
    its.begin()
    client = Client(its.addresses[0])
    yield SimpleNamespace(its=its, client=client, models=tmp_path / "models")
    client.close()
    its.close()


class TestRunning:
    def test_half_of_a_model(self, running):
        """Half of a real model file is refused with a reason; whole, it is served."""
        whole = running.models / ".whole"
        write_sum(whole)
        data = whole.read_bytes()
        write(running.models / "late.onnx", data[: len(data) // 2])
        running.its.repository.look()
        running.its.repository.look()
        index = {row["name"]: row for row in running.its.repository.index(ready=False)}
        assert index["late"]["state"] == "UNAVAILABLE"
        assert index["late"]["reason"]
        write(running.models / "late.onnx", data)
        running.its.repository.look()
        running.its.repository.look()
        x = rows()
        np.testing.assert_array_equal(running.client.sum(x, x, model="late").as_numpy("sum"), 2 * x)

    @pytest.mark.integration
    def test_every_beginning_of_a_model(self, running, tmp_path):
        """Wherever its writer stopped, the beginning of a model file is refused: no part of it is a model."""
        data = (running.models / "sum.onnx").read_bytes()
        for size in range(len(data)):
            (tmp_path / "part.onnx").write_bytes(data[:size])
            with pytest.raises((driver.DriverError, BurstError)):
                driver.compile(driver.load(tmp_path / "part.onnx"), device="onnxruntime").close()

    @pytest.mark.parametrize("name", ["sum", "new"])
    def test_its_writer_is_killed(self, running, name):
        """kill -9 of a program halfway through copying a file over a model that is served, or beside it: the index says
        what is wrong, the model that was served goes on, also at a priority that is prepared only now, and the copy is
        served once it is whole.
        """
        write_sum(running.models / ".product", operator="Mul")
        data = (running.models / ".product").read_bytes()
        path, x = running.models / f"{name}.onnx", rows(begin=3)
        with subprocess.Popen(
            [sys.executable, "-c", HALF, str(running.models / ".product"), str(path)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout.readline() == b"half\n"
            writer.kill()
        assert path.stat().st_size == len(data) // 2
        running.its.repository.look()
        running.its.repository.look()
        index = {row["name"]: row for row in running.its.repository.index(ready=False)}
        assert index[name]["reason"]
        assert index[name]["state"] == ("READY" if name == "sum" else "UNAVAILABLE")
        for priority in (0, 1):
            np.testing.assert_array_equal(running.client.sum(x, x, priority=priority).as_numpy("sum"), 2 * x)
        path.write_bytes(data)
        running.its.repository.look()
        running.its.repository.look()
        np.testing.assert_array_equal(running.client.sum(x, x, model=name).as_numpy("sum"), x * x)

    def test_a_configuration_that_does_not_fit(self, running):
        """Types and dims of config.pbtxt are compared with the file."""
        write_sum(running.models / "m" / "1" / "model.onnx")
        for fields, told in (
            ("data_type: TYPE_INT8 dims: [-1, 4]", "TYPE_INT8, and TYPE_FP32 in the file"),
            ("data_type: TYPE_FP32 dims: [-1, 5]", r"dims \[-1, 5\], and \[-1, 4\]"),
            ("data_type: TYPE_FP32 dims: [-1, 4] reshape { shape: [4] }", "reshape is not supported"),
            (LABELS % "labels.txt", "no such file"),
            (LABELS % "../m/labels.txt", "no such file"),
        ):
            write(running.models / "m" / "config.pbtxt", f"input [ {{ name: 'x' {fields} }} ]".encode())
            with pytest.raises(Refusal, match=told):
                running.its.repository.load("m")
        write(
            running.models / "m" / "config.pbtxt",
            b"max_batch_size: 2 input [ { name: 'x' data_type: TYPE_FP32 dims: [4] } ]",
        )
        running.its.repository.load("m")
        running.client.sum(rows(2), rows(2), model="m")
        with pytest.raises(InferenceServerException, match="max_batch_size is 2"):
            running.client.sum(rows(3), rows(3), model="m")

    @pytest.mark.integration
    def test_another_file_under_load(self, running):
        """While requests run, the file is replaced: each answer is the old model's or the new one's; none is lost."""
        over, wrong, seen = threading.Event(), [], set()
        x = rows(begin=3)

        def ask():
            with Client(running.its.addresses[0]).raw as raw:
                client = running.client
                while not over.is_set():
                    found = raw.infer("sum", [client.input("x", x), client.input("y", x)]).as_numpy("sum")
                    kind = "sum" if np.array_equal(found, 2 * x) else "product" if np.array_equal(found, x * x) else "?"
                    seen.add(kind)
                    if kind == "product":
                        over.set()

        def run():
            try:
                ask()
            except Exception as error:  # noqa: BLE001 (any is one too many)
                wrong.append(error)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        write_sum(running.models / "sum.onnx", operator="Mul")
        over.wait(20)
        for thread in threads:
            thread.join(20)
        assert wrong == []
        assert seen <= {"sum", "product"}
        assert "product" in seen

    def test_unloaded_under_load(self, running):
        """A model that is unloaded and loaded while requests run: right answers, or errors that say so."""
        over, wrong, right = threading.Event(), [], []
        x = rows()

        def ask():
            client = Client(running.its.addresses[0])
            while not over.is_set():
                try:
                    np.testing.assert_array_equal(client.sum(x, x).as_numpy("sum"), 2 * x)
                    right.append(1)
                except InferenceServerException as error:
                    if "UNAVAILABLE" not in str(error.status()) and "unload" not in str(error):
                        wrong.append(error)
                except Exception as error:  # noqa: BLE001 (as above)
                    wrong.append(error)
            client.close()

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            running.client.unload_model("sum")
            running.client.load_model("sum")
        over.set()
        for thread in threads:
            thread.join(20)
        assert wrong == []
        running.client.sum(x, x)

    @pytest.mark.parametrize("way", ["inline", "shared memory"])
    def test_the_device_dies(self, running, way):
        """kill -9 of the device among requests: it is started again, and every request gets its answer."""
        x, client = rows(), running.client
        with client_memory(3 * NBYTES) as (handle, key), driver.connect("onnxruntime") as device:
            shared_memory.set_shared_memory_region(handle, [x, x + 1])
            client.register_system_shared_memory("memory", key, 3 * NBYTES)
            placed = [client.placed(w, x, "FP32", "memory", NBYTES, n * NBYTES) for n, w in enumerate("xy")]
            answer = client.output("sum", "memory", NBYTES, 2 * NBYTES)
            for n in range(30):
                if n == 10:
                    os.kill(device.engine_pid, signal.SIGKILL)
                if way == "inline":
                    found = client.sum(x, x + 1).as_numpy("sum")
                else:
                    client.infer("sum", placed, outputs=[answer])
                    found = shared_memory.get_contents_as_numpy(handle, np.float32, (2, 4), offset=2 * NBYTES)
                np.testing.assert_array_equal(found, 2 * x + 1)
                shared_memory.set_shared_memory_region(handle, [np.zeros_like(x)], offset=2 * NBYTES)
            client.unregister_system_shared_memory("memory")

    def test_batches(self, running):
        """dynamic_batching joins requests: fewer executions than requests, and each gets its own rows."""
        write_sum(running.models / "m" / "1" / "model.onnx")
        text = "instance_group [ { count: 1 } ] dynamic_batching { max_queue_delay_microseconds: 50000 }"
        write(running.models / "m" / "config.pbtxt", f"max_batch_size: 16 {text}".encode())
        running.client.load_model("m")
        wrong = []

        def ask(number):
            client = Client(running.its.addresses[0])
            for n in range(10):
                x = rows(1, begin=number * 100 + n)
                if not np.array_equal(client.sum(x, x, model="m").as_numpy("sum"), 2 * x):
                    wrong.append(number)
            client.close()

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        its = running.client.get_inference_statistics("m").model_stats[0]
        assert its.inference_count == 80
        assert its.execution_count < 80

    def test_it_goes_with_its_folder(self, running):
        """A folder that is gone for a moment harms nothing but its models."""
        shutil.move(running.models, f"{running.models}.away")
        assert running.client.is_server_live()
        shutil.move(f"{running.models}.away", running.models)
        running.client.sum(rows(), rows())


class TestRest:
    """An account that may be idle: see `RestingRepository`."""

    @pytest.fixture
    def resting(self, folder):
        """As `folder`, for a rest after two looks without a request."""
        folder.its = RestingRepository(folder.path, folder.load, 2, period=NEVER)
        yield folder
        folder.its.close()

    def test_a_request_loads_and_rest_gives_back(self, resting):
        """Nothing is loaded before the first request; the third look after the last one closes the models, and the next
        request loads them again.
        """
        write_sum(resting.path / "sum.onnx")
        assert resting.loaded == []
        assert resting.its.get("sum").name == "sum"
        assert resting.its.index(ready=True)
        resting.its.look()
        resting.its.look()
        assert resting.closed == []
        resting.its.look()
        assert resting.closed == [("sum", "1")]
        assert not resting.its.has_begun
        assert resting.its.versions("sum") == ["1"]
        assert resting.loaded == [("sum", "1", "sum.onnx")] * 2

    def test_requests_keep_it_awake(self, resting):
        """However many looks there are between them."""
        write_sum(resting.path / "sum.onnx")
        for _ in range(8):
            assert resting.its.versions("sum") == ["1"]
            resting.its.look()
        assert resting.loaded == [("sum", "1", "sum.onnx")]
        assert resting.closed == []

    def test_a_probe_of_the_server_loads_nothing(self, resting):
        """It is told at once that the server is ready, also while models are loaded, and keeps them from no rest."""
        write_sum(resting.path / "sum.onnx")
        service = InferenceService(resting.its, None)
        assert service.server_ready() == {"ready": True}
        assert resting.loaded == []
        assert resting.its.versions("sum") == ["1"]
        for _ in range(3):
            assert service.server_ready() == {"ready": True}
            resting.its.look()
        assert resting.closed == [("sum", "1")]

    def test_what_a_client_has_unloaded(self, resting):
        """Stays so over a rest."""
        write_sum(resting.path / "sum.onnx")
        resting.its.unload("sum")
        for _ in range(3):
            resting.its.look()
        with pytest.raises(Refusal, match="is unloaded"):
            resting.its.get("sum")
        resting.its.load("sum")
        assert resting.its.get("sum")
