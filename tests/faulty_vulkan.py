"""A GPU in software that fails when a test says so: SwiftShader behind tests/vulkan_faults/faulty_driver.c."""

import json
import shutil
import subprocess
from pathlib import Path

import swiftshader

SOURCE = Path(__file__).with_name("vulkan_faults") / "faulty_driver.c"


class FaultyVulkan:
    """Its files are in one folder, which the device may read. `fail`: a process meets the fault from now on."""

    def __init__(self, folder, home):
        """Has devices of that home directory use it. Skips or fails where SwiftShader is missing."""
        swiftshader.configure(home)
        real, folder = swiftshader.driver_file(), Path(folder)
        library = folder / "libfaulty.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", library, SOURCE], check=True)
        shutil.copy(real.parent / "libvk_swiftshader.so", folder)
        (folder / "driver").write_text(f"{folder}/libvk_swiftshader.so\n")
        described = json.loads(real.read_text())
        described["ICD"]["library_path"] = str(library)
        (folder / "icd.json").write_text(json.dumps(described))
        Path(home, swiftshader.CONFIGURATION).write_text(f'driver = "{folder}/icd.json"')
        self._fault = folder / "fault"

    def fail(self, how, pid):
        """`how`: "lost", "memory", "hang"."""
        told = self._fault.with_suffix(".new")
        told.write_text(f"{how} {pid}")
        told.rename(self._fault)

    def recover(self):
        """Nothing fails any more."""
        self._fault.unlink(missing_ok=True)
