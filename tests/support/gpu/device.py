# SPDX-License-Identifier: Apache-2.0
"""The device of tests marked `gpu`: the CPU, or the one that `make gpu` names in the environment."""

import os

import torch

DEVICE = torch.device(os.environ.get("DIFFUSION_TEST_DEVICE", "cpu"))
