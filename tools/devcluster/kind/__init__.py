# SPDX-License-Identifier: Apache-2.0
"""A Docker engine of our own and the image of kind's nodes, for machines where no engine answers."""
