"""`burst doctor` on cameras."""

import os

import pytest

from driver.doctor import camera_nodes


class TestCameras:
    """What is said of /dev/video*, without opening one."""

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(camera_nodes, "FOLDER", tmp_path)
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
