"""Checks of the machine, the account and the installation, for `burst doctor`."""

from driver.doctor.examination import examine
from driver.doctor.program import examine_program
from driver.finding import Finding

__all__ = ["Finding", "examine", "examine_program"]
