"""What holds for all tests."""

import signal

# A shell starts what runs in its background with Ctrl-C ignored, and so would be the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
