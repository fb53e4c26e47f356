"""The backend refuses layers it would attend wrongly, whatever config or flag they came from."""

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_ddtree_patch.backend import UNSERVED_EXTRAS, check_layers, refuse_extras
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


@pytest.mark.parametrize("name", UNSERVED_EXTRAS)
def test_what_would_change_the_result_of_attention_is_refused_by_name(name):
    layer = model_with()[1]
    refuse_extras(layer, {name: None, "harmless": 1})
    with pytest.raises(ConfigurationError, match=rf"layer 1 attends with {name}"):
        refuse_extras(layer, {name: torch.ones(1)})
