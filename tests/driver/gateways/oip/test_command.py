"""`burst serve DEVICE --oip ADDRESS --models FOLDER` as a process."""

import gzip
import json
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import numpy as np
import pytest
from certificates import write_certificate
from oip_models import Client, rows, write_sum
from tritonclient.utils import InferenceServerException
from waiting import until

from driver.gateways.oip import messages
from driver.gateways.oip.inference import InferCall
from driver.gateways.oip.request_spans import RequestSpans

MOBILENET = Path(__file__).parents[2] / "importers/vendor/mobilenet_int8.tflite"
STAGES = "compute_input", "compute_infer", "compute_output"
COMMAND = [sys.executable, "-m", "driver.cli", "serve"]


@pytest.mark.integration
def test_from_the_beginning_to_the_end(tmp_path):
    """It prints its addresses, answers over gRPC and HTTP, and ends on SIGTERM with 0; its socket goes with it."""
    write_sum(tmp_path / "models" / "sum.onnx")
    words = ["--oip", f"unix:{tmp_path}/s", "--oip", "http://:0", "--models", str(tmp_path / "models"), "--json"]
    with subprocess.Popen([*COMMAND, "onnxruntime", *words], stdout=subprocess.PIPE, text=True) as process:
        said = json.loads(process.stdout.readline())
        assert said["device"] == "onnxruntime"
        x = rows()
        for address in said["oip"]:
            client = Client(address)
            np.testing.assert_array_equal(client.sum(x, x).as_numpy("sum"), 2 * x)
            client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not (tmp_path / "s").exists()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--oip", ":0"], "--oip and --models"),
        (["--models", "."], "--oip and --models"),
        (["--oip", ":0", "--models", "no-such-folder"], "there is no such folder"),
        (["--oip", "nonsense", "--models", "."], "--oip nonsense"),
        (["--oip", ":0", "--models", ".", "--group", "x"], "--group"),
        (["--oip", ":0", "--models", ".", "--also", "liter"], "did you mean 'litert'?"),
    ],
)
def test_what_cannot_be_served(words, told, tmp_path):
    """It says what is wrong, and exits with 2."""
    done = subprocess.run([*COMMAND, "onnxruntime", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())


@pytest.mark.integration
def test_files_of_two_runtimes_and_metrics(tmp_path):
    """--also adds a device for files that the first one does not run; --metrics has the figures of each model."""
    write_sum(tmp_path / "sum.onnx")
    shutil.copy(MOBILENET, tmp_path / "net.tflite")
    words = ["--also", "litert", "--oip", f"unix:{tmp_path}/s", "--models", str(tmp_path), "--metrics", ":0", "--json"]
    with subprocess.Popen([*COMMAND, "onnxruntime", *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            said = json.loads(process.stdout.readline())
            client = Client(*said["oip"])
            until(lambda: all(client.is_model_ready(name) for name in ("sum", "net")))
            client.sum(rows(), rows())
            client.close()
            with urllib.request.urlopen(said["metrics"], timeout=20) as answer:
                found = answer.read().decode()
            assert 'burst_oip_model_ready{model="net",version="1"} 1.0' in found
            assert 'burst_oip_requests_total{model="sum",outcome="success",version="1"} 1.0' in found
            assert 'burst_oip_rows_total{model="sum",version="1"} 1.0' in found
            assert re.search(r'burst_oip_seconds_total{model="sum",stage="compute_infer",version="1"} 0?[.\d]', found)
        finally:
            process.terminate()


class Collector(BaseHTTPRequestHandler):
    """Takes what is sent by OTLP over HTTP."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        self.server.taken.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        """Nothing."""


@pytest.mark.integration
def test_spans(tmp_path):
    """With --otlp a collector gets a span for each request, below the one that the client names over HTTP or gRPC, and
    its stages below it; a request that fails is an error."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install -e '.[otel]'")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    write_sum(tmp_path / "sum.onnx")
    parents = {kind: (f"{n:032x}", f"{n:016x}") for n, kind in enumerate(("rpc", "http", "wrong"), 1)}
    fields = {kind: {"traceparent": f"00-{trace}-{span}-01"} for kind, (trace, span) in parents.items()}
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.taken = []
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{collector.server_port}"
        words = ["--oip", ":0", "--oip", "http://:0", "--models", str(tmp_path), "--otlp", url, "--json"]
        with subprocess.Popen([*COMMAND, "onnxruntime", *words], stdout=subprocess.PIPE, text=True) as process:
            rpc, http = map(Client, json.loads(process.stdout.readline())["oip"])
            until(lambda: rpc.is_model_ready("sum"))
            for client, kind in ((rpc, "rpc"), (http, "http")):
                x = [client.input(name, rows()) for name in ("x", "y")]
                client.infer("sum", x, headers=fields[kind])
            with pytest.raises(InferenceServerException):
                rpc.infer("sum", [], headers=fields["wrong"])
            for client in (rpc, http):
                client.close()
            process.terminate()
            assert process.wait(30) == 0
        collector.shutdown()
    assert {path for path, _ in collector.taken} == {"/v1/traces"}
    sent = [ExportTraceServiceRequest.FromString(body) for _, body in collector.taken]
    scopes = [scope for each in sent for group in each.resource_spans for scope in group.scope_spans]
    spans = [span for scope in scopes for span in scope.spans]
    whole = {span.parent_span_id.hex(): span for span in spans if span.name == "infer sum"}
    assert {(span.trace_id.hex(), parent) for parent, span in whole.items()} == set(parents.values())
    for kind, (_, parent) in parents.items():
        span = whole[parent]
        inner = [each for each in spans if each.parent_span_id == span.span_id]
        assert [each.name for each in inner] == [*STAGES] * (kind != "wrong")
        assert (span.status.code == 2) == (kind == "wrong")
        assert all(span.start_time_unix_nano <= each.start_time_unix_nano <= span.end_time_unix_nano for each in inner)


def test_a_span_keeps_little_of_a_request():
    """Names that a client sends are cut: its spans wait for the collector in their thousands."""
    pytest.importorskip("opentelemetry.sdk.trace", reason="pip install -e '.[otel]'")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    call = InferCall("m" * (1 << 20), "7" * (1 << 20), "", [], None, None, "medium")
    RequestSpans(provider).note(call, time.monotonic_ns(), None, ValueError("x" * (1 << 20)))
    (span,) = kept.get_finished_spans()
    assert len(span.to_json()) < 4096


@pytest.mark.integration
def test_tls(tmp_path):
    """With --tls, both doors speak TLS at TCP addresses, and neither answers without."""
    cert, key = write_certificate(tmp_path)
    write_sum(tmp_path / "models" / "sum.onnx")
    words = ["--oip", "localhost:0", "--oip", "http://localhost:0", "--models", str(tmp_path / "models")]
    command = [*COMMAND, "onnxruntime", *words, "--tls", str(cert), str(key), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            rpc, http = json.loads(process.stdout.readline())["oip"]
            credentials = grpc.ssl_channel_credentials(cert.read_bytes())
            method = f"/{messages.SERVICE}/ServerLive"
            with grpc.secure_channel(rpc, credentials) as channel:
                assert channel.unary_unary(method)(b"", timeout=20) == b"\x08\x01"
            with grpc.insecure_channel(rpc) as channel, pytest.raises(grpc.RpcError):
                channel.unary_unary(method)(b"", timeout=5)
            context = ssl.create_default_context(cafile=str(cert))
            url = http.replace("http://", "https://") + "/v2/health/live"
            with urllib.request.urlopen(url, context=context, timeout=20) as answer:
                assert json.load(answer) == {"live": True}
        finally:
            process.terminate()
