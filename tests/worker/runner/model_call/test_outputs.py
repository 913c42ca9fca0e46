# SPDX-License-Identifier: Apache-2.0
"""Outputs of modules are split by rows, through every wrapper; others are errors that say so."""

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput

from diffusion_worker.runner.model_call.outputs import split, stacked, tensors_of, unstacked, with_tensors


def test_an_output_is_split_wherever_it_has_rows() -> None:
    first, second = split((torch.arange(3), [torch.ones(3, 2)], None), [1, 2])
    assert first[0].tolist() == [0]
    assert second[0].tolist() == [1, 2]
    assert second[1][0].shape == (2, 2)
    assert second[2] is None


def test_an_output_with_several_entries_a_row_is_split_by_rows() -> None:
    first, second = split(torch.arange(6), [1, 2])
    assert first.tolist() == [0, 1]
    assert second.tolist() == [2, 3, 4, 5]


def test_a_distribution_is_split_into_distributions_with_the_same_numbers() -> None:
    parameters = torch.randn(3, 8, 4, 4, generator=torch.Generator().manual_seed(1))
    parts = split(AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(parameters)), [2, 1])
    for part, rows in zip(parts, (parameters[:2], parameters[2:]), strict=True):
        alone = DiagonalGaussianDistribution(rows).sample(torch.Generator().manual_seed(2))
        assert torch.equal(part.latent_dist.sample(torch.Generator().manual_seed(2)), alone)


def test_a_list_with_an_entry_a_row_is_split_by_its_entries() -> None:
    entries = [torch.full((2,), float(row)) for row in range(3)]
    parts = [unstacked(part) for part in split(stacked((entries, {})), [1, 2])]
    assert [[entry.tolist() for entry in part[0]] for part in parts] == [[[0.0, 0.0]], [[1.0, 1.0], [2.0, 2.0]]]


@pytest.mark.parametrize("output", [object(), torch.tensor(1.0), torch.ones(4)], ids=["an object", "a number", "other rows"])
def test_an_output_that_has_no_rows_cannot_be_split(output: object) -> None:
    with pytest.raises(TypeError, match="cannot be split"):
        split(output, [1, 2])


def test_the_tensors_of_an_output_can_be_put_back_into_its_like() -> None:
    output = AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(torch.ones(1, 8, 2, 2)))
    doubled = with_tensors(output, [tensor * 2 for tensor in tensors_of(output)])
    assert doubled.latent_dist.mean.unique().tolist() == [2.0]
