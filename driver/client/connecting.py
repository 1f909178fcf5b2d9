"""The first `connect` of a process: a device begins to start before its client's modules are loaded, since both take
a tenth of a second and more.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from driver.client import discovery
from driver.devices.library.description import absolute
from driver.options import check_application

if TYPE_CHECKING:
    from driver.client.device import RemoteDevice


@discovery.as_ours()
def connect(
    name: str = "reference", *, application: str | None = None, reconnect: bool = False, real_time: bool = False
) -> RemoteDevice:
    """Return a device by name, its process started when there is none; or one that is served, by its socket's path.

    Args:
        name: of an installed device, the path of a socket, or the path of a shared library that is a driver, which
            ends in .so.
        application: the name of the program within your account, of at most 100 characters. Priorities order the
            executions of one application, and the applications of an account share its time evenly. None: all clients
            in the process's control group are one application.
        reconnect: a device whose process has ended is found again, and started if need be, by the next preparation or
            question. What lived in the old process is lost: see `RemoteDevice`.
        real_time: its bursts are served before all that is ordinary on the machine (SCHED_FIFO), in memory that stays
            in place on both sides. One execution may take 0.2 s.

    Raise InvalidArgument for such a name, and for real time that the device may not have, with the remedy;
    DeviceNotFound, DeviceFailed; ResourceExhaustedTransient while it has as many clients, or your account as many
    applications, as it may have.
    """
    if "driver.client.device" not in sys.modules:
        if application is not None:
            check_application(application)
        discovery.begin(absolute(name))
    from driver.client import device

    return device.connect(name, application=application, reconnect=reconnect, real_time=real_time)
