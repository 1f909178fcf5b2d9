"""Import model files of other frameworks as models of the HAL. A file is untrusted input."""

from driver.importers.files import load

__all__ = ["load"]
