"""The server behind the live page: who may see it, what it is told, and what it does about those who are slow."""

import asyncio
import json
import os
import queue
import re
import signal
import socket
import stat
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import av
import pytest
from click.testing import CliRunner
from waiting import PATIENCE

from burst import PeerDied
from burst_engine.names import install_command
from driver.cli.command import burst
from driver.demos.keypad import BLOCK
from driver.demos.web.audio import AudioShow
from driver.demos.web.board import AHEAD, HISTORY, Board, Update, Viewer
from driver.demos.web.camera import CameraShow
from driver.demos.web.server import MOST_VIEWERS, Server, leading_to
from driver.demos.web.settings import Setting, Values, common
from driver.demos.web.stream import Stage

pytestmark = pytest.mark.integration


def test_a_restart_is_over_when_the_stream_runs_again():
    """The words of the death do not stay beside a stream that runs."""
    said = []
    stage = Stage(lambda **words: said.append(words))
    device = SimpleNamespace(name="reference", version="1", type="CPU", engine_pid=7)
    prepared = SimpleNamespace(device=device, model=SimpleNamespace(main=SimpleNamespace(operations=[])))
    stage.placed(prepared)
    stage.restarts(PeerDied("the device's process is gone"))
    device.engine_pid = 8
    stage.placed(prepared)
    notices = [words["notice"] for words in said if "notice" in words]
    assert notices[0] == "The device died and restarts: the device's process is gone"
    assert notices[1:] == ["Engine process 7 died; the device was started again, and so was the stream."]
    assert said[-1]["status"] == "running"


class Tap:
    """A show of as many updates as somebody has poured."""

    kind = "camera"

    def __init__(self):
        self.settings = common("reference")
        self._poured = queue.SimpleQueue()

    def about(self):
        return {"source": "a tap"}

    def pour(self, updates):
        for n in range(updates):
            self._poured.put(n)

    def play(self, values, stage):
        while not stage.news.is_set():
            try:
                n = self._poured.get(timeout=0.02)
            except queue.Empty:
                continue
            yield Update({"n": n}, {"facts": n}, b"picture %d" % n)

    def rest(self):
        pass


def serving(test, show=None):
    """Runs test(server, session, show) beside a server."""

    async def run():
        server = Server(found := show or Tap(), port=0)
        async with server.running(), aiohttp.ClientSession() as session:
            await asyncio.wait_for(test(server, session, found), PATIENCE)

    asyncio.run(run())


def own(server):
    """The origin of the server's pages."""
    return "/".join(server.url.split("/")[:3])


@asynccontextmanager
async def page(server, session):
    """A page that has connected."""
    async with session.ws_connect(server.url + "stream", origin=own(server)) as found:
        yield found


async def receive(page, kind):
    """The next message of that type, and its picture if it has one; others are dropped, and updates drawn."""
    while True:
        message = json.loads(await page.receive_str())
        picture = await page.receive_bytes() if message.get("has_picture") else None
        if message["type"] == "update":
            await page.send_json({"drawn": True})
        if message["type"] == kind:
            return message, picture


class TestWhoMaySeeIt:
    """Whoever has its address, in a browser on this machine."""

    def test_a_browser_is_told_to_be_strict(self):
        """Page and files come with their types, load nothing from elsewhere, and stay in no cache and no frame."""

        async def check(server, session, _):
            for name, kind in {"": "html", "page.css": "css", "page.js": "javascript", "icon.svg": "svg"}.items():
                async with session.get(server.url + name) as answer:
                    assert answer.status == 200
                    assert kind in answer.content_type
                    headers = answer.headers
                    assert headers["X-Content-Type-Options"] == "nosniff"
                    assert headers["Referrer-Policy"] == "no-referrer"
                    assert headers["Cache-Control"] == "no-store"
                    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
                    assert "default-src 'none'; script-src 'self';" in headers["Content-Security-Policy"]
                    assert "unsafe" not in headers["Content-Security-Policy"]
                    assert "Access-Control-Allow-Origin" not in headers
                    text = await answer.text()
                    assert not re.search(r"(src|href)=\"?(https?:)?//|@import|url\(", text)

        serving(check)

    @pytest.mark.parametrize(
        ("path", "headers", "status"),
        [
            ("/", {}, 404),
            ("/stream", {}, 404),
            ("/{wrong}/", {}, 404),
            ("/{wrong}/stream", {"Origin": "{own}"}, 404),
            ("/{token}/page.py", {}, 404),
            ("/{token}/../server.py", {}, 404),
            ("/{token}/", {"Host": "evil.example"}, 421),
            ("/{token}/", {"Host": "evil.example:{port}"}, 421),
            ("/{token}/", {"Host": "127.0.0.1"}, 421),
            ("/{token}/", {"Origin": "http://evil.example"}, 403),
            ("/{token}/", {"Origin": "null"}, 403),
            ("/{token}/stream", {}, 403),
            ("/{token}/stream", {"Origin": "http://evil.example"}, 403),
            ("/{token}/stream", {"Origin": "http://localhost:{port}"}, 403),  # of another host than it asked for
            ("/{token}/stream", {"Origin": "https://127.0.0.1:{port}"}, 403),
            ("/{token}/stream", {"Origin": "{own}", "Host": "evil.example:{port}"}, 421),
            ("/{token}/stream", {"Origin": "{own}"}, 101),
            ("/{token}/", {"Host": "localhost:{port}", "Origin": "http://localhost:{port}"}, 200),
        ],
    )
    def test_everybody_else_is_refused(self, path, headers, status):
        """Another token, another name of the host, another origin, or a stream for whoever does not say his origin."""
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        upgrade["Sec-WebSocket-Key"] = "MDEyMzQ1Njc4OWFiY2RlZg=="

        async def check(server, session, _):
            token = server.url.split("/")[3]
            words = {"token": token, "wrong": token[:-1] + ("A" if token[-1] != "A" else "B"), "own": own(server)}
            words["port"] = own(server).rpartition(":")[2]
            sent = {name: value.format(**words) for name, value in headers.items()}
            sent |= upgrade if path.endswith("stream") else {}
            url = own(server) + path.format(**words)
            async with session.get(url, headers=sent) as answer:
                assert answer.status == status
                assert token not in str(answer.headers)
                if status != 101:
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"

        serving(check)

    def test_it_listens_on_loopback_alone(self):
        """By an address that no other machine has a way to, and under a token of 256 bits that is new each time."""
        servers = [Server(Tap(), 0) for _ in range(2)]
        for server in servers:
            assert server._socket.getsockname()[0] == "127.0.0.1"
            assert len(server.url.split("/")[3]) == 43
            server._socket.close()
        assert servers[0].url.split("/")[3] != servers[1].url.split("/")[3]

    def test_there_are_not_many_pages(self):
        """One more than it serves is refused with a word; when one has gone, there is room again."""

        async def check(server, session, _):
            pages = [await session.ws_connect(server.url + "stream", origin=own(server)) for _ in range(MOST_VIEWERS)]
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(server.url + "stream", origin=own(server))
            assert refused.value.status == 503
            await pages.pop().close()
            while len(server._board) == MOST_VIEWERS:
                await asyncio.sleep(0)
            async with page(server, session) as another:
                assert (await receive(another, "hello"))[0]["source"] == "a tap"
            for one in pages:
                await one.close()

        serving(check)


class TestControls:
    """What pages say."""

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "this is no message"),
            ("{", "this is no message"),
            ("[" * 3000, "this is no message"),
            ("[]", "'[]': send"),
            ("null", "send"),
            ('{"drawn": true, "more": 1}', "send"),
            ('{"set": {}}', "pass the names of settings"),
            ('{"set": 3}', "set=3: pass the names of settings"),
            ('{"set": {"colour": 1}}', "'colour': no such setting; choose from pause, record, device"),
            ('{"set": {"device": "nonesuch"}}', "device='nonesuch': choose from"),
            ('{"set": {"device": ["reference"]}}', "device=['reference']: choose from"),
            ('{"set": {"pause": 1}}', "pause=1: pass true or false"),
            ('{"set": {"rivals": "5"}}', "rivals='5': choose from 0, 1, 2, 3, 4"),
            ('{"set": {"spin": "low", "pause": true}}', "spin='low': choose from sleep, 50 us"),
        ],
    )
    def test_nonsense_is_refused_with_words_and_changes_nothing(self, text, words):
        """Whoever sent it reads what was wrong and what to send; the page stays connected."""

        async def check(server, session, _):
            before = server._values.plain()
            async with page(server, session) as sender:
                await sender.send_str(text)
                refusal, _ = await receive(sender, "refused")
                assert words in refusal["text"]
                assert len(refusal["text"]) < 300
                assert server._values.plain() == before
                await sender.send_json({"set": {"pause": True}})
                while not (await receive(sender, "state"))[0]["values"]["pause"]:
                    pass

        serving(check)

    @pytest.mark.parametrize("value", [0, 121, -1, float("inf"), float("nan"), "30", True, None, 10**400])
    def test_a_number_is_within_its_limits(self, value):
        """Others are refused, with the limits in the words."""
        with pytest.raises(ValueError, match="pass a number from 1 to 120"):
            Setting("fps", "", 30, limits=(1, 120)).checked(value)

    def test_all_of_a_change_or_nothing(self):
        """A change with one bad value changes none of the others."""
        values = Values(common("reference"))
        with pytest.raises(ValueError, match="spin"):
            values.change({"pause": True, "spin": "sometimes"})
        assert not values["pause"]

    def test_a_stream_begins_with_values_of_one_moment(self):
        """What changes while it begins makes it begin anew, but for what acts at once."""
        values = Values(common("reference"))
        held = values.held()
        values.change({"rivals": "2", "pause": True})
        assert held["rivals"] == "2"
        assert not held.is_over
        values.change({"spin": "sleep"})
        assert held["spin"] == "50 us"
        assert held.is_over

    def test_a_long_message_ends_the_page(self):
        """Nobody makes the server keep more than a message of 4 KiB."""

        async def check(server, session, _):
            async with page(server, session) as sender:
                await sender.send_str(" " * 5000)
                while (message := await sender.receive()).type == aiohttp.WSMsgType.TEXT:
                    pass
                assert message.type == aiohttp.WSMsgType.CLOSE
                assert message.data == aiohttp.WSCloseCode.MESSAGE_TOO_BIG

        serving(check)

    def test_every_page_sees_what_one_of_them_changed(self):
        """The state goes to all."""

        async def check(server, session, _):
            async with page(server, session) as one, page(server, session) as other:
                await one.send_json({"set": {"priority": "high"}})
                while (await receive(other, "state"))[0]["values"]["priority"] != "high":
                    pass

        serving(check)


class TestSlowPages:
    """Get the newest, and no more of it than they draw."""

    def test_what_was_not_drawn_is_not_followed_by_more(self):
        """Without an answer a page gets two updates; after one, the newest with its own picture, all points, and how
        many pictures it has missed.
        """

        async def check(server, session, tap):
            async with page(server, session) as slow, page(server, session) as fast:
                tap.pour(1)
                await receive(fast, "update")
                got = [await _unanswered(slow)]
                tap.pour(99)
                while (await receive(fast, "update"))[0]["facts"] != 98:
                    pass
                got.append(await _unanswered(slow))
                while (last := got[-1]["facts"]) != 98 and len(got) < AHEAD:
                    got.append(await _unanswered(slow))
                assert len(got) == AHEAD
                await slow.send_json({"drawn": True})
                if last != 98:
                    message, picture = await receive(slow, "update")
                    assert (message["facts"], picture) == (98, b"picture 98")
                    got.append(message)
                assert sum(len(message["points"]) for message in got) == 100
                assert got[-1]["dropped_here"] == 100 - len(got)

        serving(check)

    def test_points_and_pictures_are_bounded(self):
        """However long nobody draws: a page that comes back gets the last ten seconds, once."""
        board = Board()
        viewer = Viewer(board)
        board.join(viewer)
        for n in range(3 * HISTORY):
            board.post(Update({"n": n}, {}, b"%d" % n))
        message, picture = viewer.update()
        assert [point["n"] for point in message["points"]] == list(range(2 * HISTORY, 3 * HISTORY))
        assert picture == b"%d" % (3 * HISTORY - 1)
        assert viewer.update() is None


async def _unanswered(page):
    """The next update, of which nothing is said to the server."""
    while True:
        message = json.loads(await page.receive_str())
        if message.get("has_picture"):
            await page.receive_bytes()
        if message["type"] == "update":
            return message


class TestDeaths:
    """Of the device, while the page is open."""

    @pytest.mark.parametrize("kind", ["camera", "audio"])
    def test_the_page_says_so_and_the_stream_goes_on(self, place, tmp_path, kind):
        """`kill -9` of the engine: the state counts a death in words, and updates come from another engine process."""

        async def check(server, session, _):
            async with page(server, session) as viewer:
                await receive(viewer, "update")
                state = server._board.state
                os.kill(engine := state["place"]["engine"], signal.SIGKILL)
                while (
                    not (state := (await receive(viewer, "state"))[0])["deaths"] or state["place"]["engine"] == engine
                ):
                    pass
                assert "died" in state["notice"]
                assert state["deaths"] == 1
                for _ in range(10):
                    await receive(viewer, "update")

        serving(check, shows(kind, tmp_path))


@pytest.mark.parametrize("kind", ["camera", "audio"])
def test_recordings_are_private_and_whole(shared, monkeypatch, tmp_path, kind):
    """Switched on, then off: a folder and a file that nobody else may read, which can be played; its path is told."""
    shared.enter(monkeypatch)

    async def check(server, session, _):
        async with page(server, session) as viewer:
            await viewer.send_json({"set": {"record": True}})
            while not (path := (await receive(viewer, "state"))[0]["recording"]):
                pass
            for _ in range(10):
                await receive(viewer, "update")
            await viewer.send_json({"set": {"record": False}})
            while (await receive(viewer, "state"))[0]["recording"]:
                pass
        path = Path(path)
        assert tmp_path in path.parents
        assert [stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent)] == [0o600, 0o700]
        with av.open(str(path)) as file:
            assert sum(frame.samples // BLOCK if kind == "audio" else 1 for frame in file.decode()) >= 8

    serving(check, shows(kind, tmp_path))


def shows(kind, out):
    """A real one."""
    if kind == "camera":
        return CameraShow("scene", 0, 60, "reference", out)
    return AudioShow(None, None, 0, "reference", out)


class TestCommand:
    """`burst demo … --web`."""

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (("camera", "--web", "--frames", "3"), "--frames does not go with --web: the page runs until Ctrl-C"),
            (("camera", "--web", "--json"), "--json does not go with --web"),
            (("camera", "--web", "--spin", "0"), "--spin does not go with --web: set it on the page"),
            (("camera", "--web", "--fps", "0"), "--fps 0: with --web, pass 1 to 120"),
            (("camera", "--web", "--source", "/nowhere"), "--source /nowhere: no such file or camera"),
            (("camera", "--web", "--port", "{taken}"), "--port {taken}: not available on 127.0.0.1"),
            (("camera", "--port", "80"), "--port and --open need --web"),
            (("audio", "--web", "--fast"), "--fast does not go with --web"),
            (("audio", "--web", "--wav", "/nowhere.wav"), "--wav /nowhere.wav: no such file"),
        ],
    )
    def test_what_makes_no_sense_is_refused_with_its_remedy(self, arguments, complaint):
        """A bad argument ends the program at once with 2, with the argument and what to do."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            done = CliRunner().invoke(burst, ["demo", *(word.format(taken=port) for word in arguments)])
        assert done.exit_code == 2
        assert complaint.format(taken=port) in " ".join(done.stderr.split())

    def test_a_browser_is_started_with_a_private_file(self):
        """The command line of a browser, which every account can read, does not have the address; the file has."""
        with leading_to("http://127.0.0.1:1/secret/") as address:
            assert "secret" not in address
            file = Path(address.removeprefix("file://"))
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert "http://127.0.0.1:1/secret/" in file.read_text()
        assert not file.exists()

    def test_without_its_library_it_says_what_to_install(self, tmp_path):
        """Without aiohttp, one line on standard error names the extra, and the exit status is 2."""
        (tmp_path / "aiohttp.py").write_text("raise ModuleNotFoundError(name='aiohttp')")
        command = [sys.executable, "-m", "driver.cli", "demo", "audio", "--web"]
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"Error: aiohttp is not installed: {install_command('web')}\n"

    @pytest.mark.stress
    def test_competing_programs_end_with_the_page_however_it_ends(self, place, kit, process):
        """Two are wanted and there are two processes; after `kill -9` of the program there are none."""
        command = [sys.executable, "-u", "-m", "driver.cli", "demo", "camera", "--web", "--device", "reference"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            url = program.stdout.readline().split()[-1]

            async def want():
                async with (
                    aiohttp.ClientSession() as session,
                    session.ws_connect(url + "stream", origin="/".join(url.split("/")[:3])) as viewer,
                ):
                    await viewer.send_json({"set": {"rivals": "2"}})

            asyncio.run(want())
            pids = kit.until(lambda: len(found := rivals_of(program.pid)) == 2 and found)
            rivals = [process(pid) for pid in pids]
            program.kill()
        assert all(rival.has_ended() for rival in rivals)


def rivals_of(pid):
    """The processes that it has started."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def test_clients_that_send_a_byte_now_and_then(monkeypatch):
    """Connections that never complete a request keep no page out, and are cut off at their deadline."""
    monkeypatch.setattr("driver.demos.web.server.PATIENCE", 1.0)

    async def test(server, session, show):
        port = int(server.url.split("/")[2].split(":")[1])
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        try:
            for _, writer in slow:
                writer.write(b"G")
            async with page(server, session) as seen:
                assert (await seen.receive_json())["type"] == "hello"
                for reader, writer in slow:
                    writer.write(b"E")
                    with suppress(ConnectionError):
                        assert await reader.read() == b""
                show.pour(1)  # the stream outlives the deadline
                while (await seen.receive()).type != aiohttp.WSMsgType.BINARY:
                    pass
        finally:
            for _, writer in slow:
                writer.close()

    serving(test)
