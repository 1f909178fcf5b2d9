"""Checks of the machine, the account and the installation, for `burst doctor`."""

from driver.doctor.examination import examine
from driver.finding import Finding

__all__ = ["Finding", "examine"]
