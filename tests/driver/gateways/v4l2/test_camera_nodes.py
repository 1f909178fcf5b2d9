"""`burst doctor` on cameras."""

import os

import pytest

from burst_engine.names import install_command
from driver.gateways.v4l2 import camera_nodes


class TestCameras:
    """What is said of /dev/video*, without opening one."""

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(camera_nodes, "FOLDER", tmp_path)
        monkeypatch.setattr(camera_nodes, "CLASS", tmp_path / "class")
        return tmp_path

    def test_a_machine_without_cameras(self, folder):
        """No camera is no fault; a container may have to be given one."""
        (finding,) = camera_nodes.nodes()
        assert (finding.state, "docker run --device" in finding.found) == ("ok", True)

    def test_a_camera_of_others(self, folder, monkeypatch):
        """A node that this account may not open: the group video is the remedy."""
        (folder / "video0").touch()
        monkeypatch.setattr(camera_nodes.os, "access", lambda *_: False)
        (finding,) = camera_nodes.nodes()
        assert (finding.subject, finding.state) == (str(folder / "video0"), "note")
        assert "usermod -aG video" in finding.remedy

    def test_a_camera_in_use(self, folder):
        """The process that has it open is named; without one all is well."""
        (folder / "video0").touch()
        (folder / "video10").touch()
        with (folder / "video0").open():
            first, second = camera_nodes.nodes()
        assert f"{os.getpid()} (" in first.found
        assert (first.state, second.state, second.subject) == ("note", "ok", str(folder / "video10"))

    def described(self, folder, node, name, driver, index=0):
        """As sysfs describes a node."""
        (folder / node).touch()
        (folder / "class" / node / "device").mkdir(parents=True)
        (folder / "class" / node / "name").write_text(f"{name}\n")
        (folder / "class" / node / "index").write_text(f"{index}\n")
        (folder / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "class" / node / "device" / "driver").symlink_to(folder / "drivers" / driver)

    def test_what_a_node_is(self, folder):
        """A webcam by its name; its second node, a sensor that only libcamera reads, and a codec are none to open."""
        self.described(folder, "video0", "HD Webcam: C1", "uvcvideo")
        self.described(folder, "video1", "HD Webcam: C1", "uvcvideo", index=1)
        self.described(folder, "video2", "unicam-image", "unicam")
        self.described(folder, "video3", "bcm2835-codec-decode", "bcm2835-codec")
        webcam, metadata, sensor, codec = camera_nodes.nodes()
        assert webcam.found == "HD Webcam: C1 (uvcvideo): can be opened, and no process of this account has it open"
        assert (metadata.state, "a further node of a camera" in metadata.found) == ("ok", True)
        assert (sensor.state, "libcamera" in sensor.remedy) == ("note", True)
        assert (codec.state, "no camera" in codec.found) == ("ok", True)

    def test_cameras_without_the_library_for_jpeg(self, folder, monkeypatch):
        """It is missed where there are cameras, and only there."""
        monkeypatch.setattr(camera_nodes, "find_spec", lambda _: None)
        assert [finding.state for finding in camera_nodes.nodes()] == ["ok"]
        (folder / "video0").touch()
        _, finding = camera_nodes.nodes()
        assert (finding.state, finding.remedy) == ("note", install_command("camera"))
