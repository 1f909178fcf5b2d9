"""Runs a command under a kernel that cannot refuse descriptors at a socket, as before Linux 6.16.

python older_kernel.py COMMAND...
"""

import errno
import os
import platform
import sys

from refused_calls import refuse_option

SO_PASSRIGHTS = 83
UNDER = (sys.executable, __file__)
"""What runs a command so."""

if __name__ == "__main__":
    refuse_option(errno.ENOPROTOOPT, {"x86_64": 54, "aarch64": 208}[platform.machine()], SO_PASSRIGHTS)
    os.execvp(sys.argv[1], sys.argv[1:])
