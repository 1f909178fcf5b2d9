"""Import model files of other frameworks as models of the HAL. A file is untrusted input."""

from typing import TYPE_CHECKING

from driver.late_names import late_names

if TYPE_CHECKING:
    from driver.importers.files import load

__all__ = ["load"]

__getattr__, __dir__ = late_names(__name__, {"driver.importers.files": "load"})
