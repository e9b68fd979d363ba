"""Directories that anybody may have written: one clear error each, in time, and nothing is run or loaded."""

import json
import os
import pickle

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bundle.architectures import from_config, read_config
from bundle.errors import UsageError
from bundle.pretrained import find_model_weights, find_recipe_weights, find_weights
from tests.pretrained.directories import recipe, write, write_file

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.lists(st.integers(-5, 2**65), max_size=9),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A directory of one file, and its header."""
    directory = tmp_path_factory.mktemp("hostile")
    (of,) = write(directory).values()
    return directory, of, (directory / "model.safetensors").read_bytes()


def fine_or_refused(directory, taken=lambda directory: find_recipe_weights(recipe(directory))):
    """Whether the directory is taken; an error must be ours, and short enough to be read."""
    try:
        return taken(directory) is not None
    except UsageError as error:
        assert len(str(error)) < 100_000
        assert str(error).isprintable() or all(c.isprintable() or c == "\n" for c in str(error))
        return False


def by_its_config(directory):
    """What `weights check` takes a directory for."""
    config = read_config(directory)
    return find_model_weights(directory, config, from_config(config))


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_one_odd_value_in_a_header(whole, data):
    directory, of, content = whole
    mutated = json.loads(json.dumps(of))
    name = data.draw(st.sampled_from(sorted(of)))
    key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "itself", "name"]))
    odd = data.draw(ODD)
    if key == "itself":
        mutated[name] = odd
    elif key == "name":
        mutated[str(odd)] = mutated.pop(name)
    else:
        mutated[name][key] = odd
    size = len(content) - 8 - int.from_bytes(content[:8], "little")
    write_file(directory / "model.safetensors", mutated, size)
    assert not fine_or_refused(directory) or mutated == of


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 4000), st.binary(min_size=1, max_size=8), st.integers(0, 5))
@example(0, b"\xff" * 8, 0)
@example(0, bytes(8), 0)
def test_bytes_overwritten_or_cut_off(whole, at, odd, cut):
    directory, _, content = whole
    mutated = content[:at] + odd + content[at + len(odd) :]
    (directory / "model.safetensors").write_bytes(mutated[: len(mutated) - cut])
    fine_or_refused(directory)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_one_odd_value_in_an_index(tmp_path, data):
    directory = tmp_path / "sharded"
    write(directory, shards=2)
    place = directory / "model.safetensors.index.json"
    index = json.loads(place.read_text())
    name = data.draw(st.sampled_from([*sorted(index["weight_map"]), "weight_map", ""]))
    odd = data.draw(ODD)
    if name == "":
        index = odd
    elif name == "weight_map":
        index[name] = odd
    else:
        index["weight_map"][name] = odd
    place.write_text(json.dumps(index))
    assert not fine_or_refused(directory)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_one_odd_value_in_a_config(tmp_path, data):
    directory = tmp_path / "model"
    write(directory, "deepseek_v3")
    place = directory / "config.json"
    config = json.loads(place.read_text())
    key = data.draw(
        st.sampled_from([*sorted(config), "quantization_config", "rope_parameters", "auto_map", ""])
    )
    odd = data.draw(ODD)
    if key == "":
        config = odd
    elif data.draw(st.booleans()) and isinstance(config.get(key), dict):
        config[key][data.draw(st.sampled_from(sorted(config[key])))] = odd
    else:
        config[key] = odd
    place.write_text(json.dumps(config))
    if fine_or_refused(directory, by_its_config):
        assert find_weights(directory) is not None, "a change that no tensor shows"


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_routed_experts"])
@pytest.mark.parametrize("many", [5000, 10**7, 2**31 - 1])
def test_more_layers_or_experts_than_any_model_has_are_refused_before_all_are_named(
    tmp_path, key, many, messages
):
    write(tmp_path, "deepseek_v3")
    place = tmp_path / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {key: many}))
    with pytest.raises(UsageError) as refused:
        by_its_config(tmp_path)
    assert any(key in line and "4096" in line for line in refused.value.violations)
    messages(refused.value)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1500), st.binary(min_size=1, max_size=8), st.integers(0, 5))
def test_bytes_of_a_config_overwritten_or_cut_off(tmp_path, at, odd, cut):
    write(tmp_path / "model")
    place = tmp_path / "model" / "config.json"
    content = place.read_bytes()
    mutated = content[:at] + odd + content[at + len(odd) :]
    place.write_bytes(mutated[: len(mutated) - cut])
    fine_or_refused(tmp_path / "model", by_its_config)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b"[" * 100_000, b'{"a": 1, "a": 2}', b"\xff\xfe", b'{"a": NaN}', b"null"],
)
def test_headers_and_indexes_that_are_no_object(tmp_path, text):
    write(tmp_path / "one")
    write_file(tmp_path / "one" / "model.safetensors", text, 0)
    assert not fine_or_refused(tmp_path / "one")
    write(tmp_path / "two", shards=2)
    (tmp_path / "two" / "model.safetensors.index.json").write_bytes(text)
    assert not fine_or_refused(tmp_path / "two")


def test_pipes_and_directories_are_no_files(tmp_path):
    write(tmp_path, shards=2)
    one, two = sorted(tmp_path.glob("model-*.safetensors"))
    for path in (one, two):
        path.unlink()
    os.mkfifo(one)
    two.mkdir()
    with pytest.raises(UsageError) as error:
        find_weights(tmp_path)
    assert f"{one.name}: not a regular file" in error.value.violations
    assert len(error.value.violations) == 2


def test_a_pickle_under_the_name_is_not_run(tmp_path):
    write(tmp_path)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Evil()))
    assert not fine_or_refused(tmp_path)
    assert not (tmp_path / "run").exists()
