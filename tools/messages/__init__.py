# SPDX-License-Identifier: Apache-2.0
"""Every text that users read, collected from the sources into docs/development/messages.txt: `python -m tools.messages`."""
