"""What every test may count on."""

from __future__ import annotations

import signal

# A program that was started in the background of a shell without job control ignores SIGINT, and so
# do its children; tests of what Ctrl-C does would wait for it in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
