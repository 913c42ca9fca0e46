# SPDX-License-Identifier: Apache-2.0
"""The engine in a script, without HTTP: the same processes as under the server, behind calls that wait."""
