# SPDX-License-Identifier: Apache-2.0
"""Write docs/development/messages.txt: every text that users read, to be read as a whole.

    python -m tools.messages

The file is a function of the sources, the command lines, the CRDs, the chart and the worker's page. A test holds the committed one to it.
"""

from tools.messages.page import PAGE, page


def main() -> None:
    """Write docs/development/messages.txt from the sources, over the old one."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
