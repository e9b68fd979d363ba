"""No value of any key gets anything but an Architecture or a UsageError out of the reader."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.architectures import SUPPORTED_FAMILIES, Architecture, from_config
from bundle.errors import UsageError
from tests.architectures.test_architectures import DENSE, V3

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
NESTED = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("rope_type", "type", "factor", "rope_theta", "mscale", "low_freq_factor"), JSON),
)
KEYS = sorted({*V3, *DENSE, "rope_parameters", "layer_types", "mlp_only_layers", "sliding_window", "n_group"})


@given(st.sampled_from(SUPPORTED_FAMILIES), st.dictionaries(st.sampled_from(KEYS), JSON | NESTED, max_size=4))
def test_any_values_are_read_or_refused(model_type, changes):
    try:
        read = from_config(V3 | DENSE | {"num_experts": 8} | changes | {"model_type": model_type})
    except UsageError as error:
        assert error.violations
    else:
        assert isinstance(read, Architecture) and len(read.moe_layer_pattern) == read.num_layers


@pytest.mark.parametrize("model_type", [None, 3, [], {}, ""])
def test_a_model_type_of_any_kind_is_refused(model_type):
    with pytest.raises(UsageError, match="model_type"):
        from_config({"model_type": model_type})
