"""The backend refuses layers it would attend wrongly, whatever config or flag they came from."""

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_ddtree_patch.backend import check_layers
from sglang_ddtree_patch.errors import ConfigurationError


def model_with(**settings) -> torch.nn.Module:
    layers = [
        RadixAttention(4, 64, 0.125, 2, layer_id=0),
        RadixAttention(4, 64, 0.125, 2, layer_id=1, **settings),
    ]
    return torch.nn.Sequential(*layers)


def test_layers_that_see_the_whole_prefix_are_served():
    check_layers(model_with())


@pytest.mark.parametrize("settings", [{"sliding_window_size": 16}, {"use_irope": True}])
def test_a_layer_that_sees_part_of_the_prefix_is_refused_by_number(settings):
    with pytest.raises(ConfigurationError, match=r"layer 1 .* window or chunk.*DFLASH"):
        check_layers(model_with(**settings))
