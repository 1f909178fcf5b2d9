"""`python -m fmq list|info|tail|send|unlink`."""

import sys

from fmq.command.arguments import main

if __name__ == "__main__":
    sys.exit(main())
