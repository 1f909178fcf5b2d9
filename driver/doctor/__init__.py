"""What this machine, this account and this installation mean for bursts: `burst doctor`."""

from driver.doctor.examination import examine
from driver.doctor.finding import Finding

__all__ = ["Finding", "examine"]
