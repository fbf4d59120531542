"""``bdn serve`` in front of a bucket that exists only as numbers: ``python -m … FILES``. Nothing but the upstream is left out."""

import sys

from bdn.cli.main import main
from tests.support.mirror.generated import generated

if __name__ == "__main__":
    with generated(int(sys.argv[1])):
        sys.argv = ["bdn", "serve"]
        main()
