"""What a checkpoint may hold: Transformer Engine's FP8 state (a contract: stand-ins of its classes)."""

import enum
import io
import pathlib
import pickle
import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("megatron.core")

from bundle.mcore.unpickling import force_weights_only_load, restrict_to_data

RECIPES, LAYERS = "transformer_engine.common.recipe", "megatron.core.extensions.transformer_engine"


class _FormatHelper(NamedTuple):
    fwd: float
    bwd: float


class Format(enum.Enum):
    HYBRID = _FormatHelper(448, 57344)

    def __reduce_ex__(self, _: Any) -> Any:
        return Format, (self.value,)  # as in Python 3.12; 3.11.7 too


class DelayedScaling:
    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)


class TEDelayedScaling(DelayedScaling):
    pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes above under the names that they have where Transformer Engine is installed."""
    owners = {RECIPES: (_FormatHelper, Format, DelayedScaling), LAYERS: (TEDelayedScaling,)}
    for package in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for name, classes in owners.items():
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        for one in classes:
            monkeypatch.setattr(one, "__module__", name)
            setattr(module, one.__name__, one)


def test_the_state_of_delayed_scaling_is_data(engine: None):
    settings = {"margin": 0, "fp8_format": Format.HYBRID, "amax_history_len": 1024}
    state = {"recipe": TEDelayedScaling(**settings), "extra_fp8_variables": {"num_gemms": 1}}
    content = pickle.dumps(state)
    with restrict_to_data():
        found = pickle.loads(content)
    assert vars(found["recipe"]) == settings
    assert found["extra_fp8_variables"] == {"num_gemms": 1}


@pytest.mark.parametrize("name", ["torch", "te_checkpoint", "_OPTIONAL"])
def test_what_else_lies_beside_a_recipe_is_not(engine: None, name: str):
    sys.modules[RECIPES].__dict__[name] = print  # imported there, or a function of its own
    sys.modules[LAYERS].__dict__[name] = print
    for module in (RECIPES, LAYERS):
        with restrict_to_data(), pytest.raises(pickle.UnpicklingError, match=f"{module}.{name}"):
            pickle.loads(f"c{module}\n{name}\n(S'run'\ntR.".encode())


def by_name(owner: str, name: str) -> bytes:
    """A pickle of getattr(owner, name), in which Python 3.11.2 puts an enum's member."""
    module, _, of = owner.rpartition(".")
    return f"cbuiltins\ngetattr\n(c{module}\n{of}\nV{name}\ntR.".encode()


def test_a_member_of_an_enum_is_data_by_its_name_too():
    from torch.distributed.checkpoint.planner import WriteItemType

    with restrict_to_data():
        found = pickle.loads(by_name("torch.distributed.checkpoint.planner.WriteItemType", "TENSOR"))
    assert found is WriteItemType.TENSOR


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("pathlib.PosixPath", "unlink"),
        ("pathlib.PosixPath", "home"),
        ("torch.distributed.checkpoint.planner.WriteItemType", "__class__"),
        ("torch.distributed.checkpoint.planner.WriteItemType", "mro"),
    ],
)
def test_an_attribute_that_is_no_member_is_not_looked_up(owner, name):
    with restrict_to_data(), pytest.raises(pickle.UnpicklingError, match=f"'{name}'"):
        pickle.loads(by_name(owner, name))


def test_the_common_state_may_name_members_too(tmp_path):
    from megatron.core.enums import ModelType

    class Named:
        def __reduce__(self) -> Any:
            return getattr, (ModelType, "encoder_or_decoder")

    class Hidden:
        def __reduce__(self) -> Any:
            return getattr, (ModelType, "__init_subclass__")

    torch.save({"type": Named()}, tmp_path / "common.pt")
    torch.save({"type": Hidden()}, tmp_path / "hidden.pt")
    with force_weights_only_load():
        assert torch.load(tmp_path / "common.pt")["type"] is ModelType.encoder_or_decoder
        with pytest.raises(pickle.UnpicklingError, match="__init_subclass__"):
            torch.load(tmp_path / "hidden.pt")


def setting(module: str, name: str, attribute: str, *, member: int | None = None) -> bytes:
    """A pickle that makes `attribute` of a class, function or enum's member the class `set`."""
    named = f"c{module}\n{name}\n" + (f"(I{member}\ntR" if member is not None else "")
    return f"{named}(N(dS'{attribute}'\ncbuiltins\nset\nstb.".encode()


@pytest.mark.parametrize(
    ("module", "name", "attribute", "member"),
    [
        ("pathlib", "PosixPath", "is_symlink", None),  # inherited
        ("pathlib", "PosixPath", "__new__", None),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex", "__eq__", None),
        ("torch.distributed.checkpoint.planner", "WriteItemType", "_value_", 1),
    ],
)
def test_a_pickle_changes_no_class_of_the_process(module, name, attribute, member):
    owner = getattr(sys.modules[module], name)
    of = owner if member is None else owner(member)
    before = getattr(of, attribute)
    with (
        restrict_to_data(),
        pytest.raises(pickle.UnpicklingError, match=f"{attribute} of .*{name}"),
    ):
        pickle.loads(setting(module, name, attribute, member=member))
    assert getattr(of, attribute) == before and not pathlib.Path(__file__).is_symlink()
    broken = setting(module, name, attribute, member=member)[:-1] + b"cos\nsystem\n."  # behind the change
    with restrict_to_data(), pytest.raises(pickle.UnpicklingError, match=r"os\.system"):
        pickle.load(io.BytesIO(broken))
    assert getattr(of, attribute) == before


def test_a_pickle_changes_no_function_of_the_process():
    from torch.storage import _load_from_bytes

    with restrict_to_data():
        pickle.loads(setting("torch.storage", "_load_from_bytes", "mark"))
    assert not hasattr(_load_from_bytes, "mark")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02]r\x00\x00\x00\x10.",  # LONG_BINPUT, 2**28
        b"\x80\x02]p268435456\n.",  # PUT
        b"\x80\x02]p40\n.",  # just beyond what so few can hold
        b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00abc.",  # BYTEARRAY8 of 2**32 bytes
        b"\x80\x04\x8e\x00\x00\x00\x00\x01\x00\x00\x00abc.",  # BINBYTES8
        b"\x80\x02]",  # no end
    ],
)
def test_a_few_bytes_do_not_ask_for_all_memory(content):
    with restrict_to_data():
        for read in (lambda: pickle.loads(content), lambda: pickle.load(io.BytesIO(content))):
            with pytest.raises(pickle.UnpicklingError) as error:
                read()
            assert isinstance(error.value.__cause__, ValueError)  # found before anything was unpickled


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_all_protocols_are_read_from_where_a_file_stands(protocol):
    values = [{f"name {number}": [number, "words" * number]} for number in range(400)]
    file = io.BytesIO(b"before" + pickle.dumps(values, protocol) + pickle.dumps("behind", protocol))
    file.seek(len(b"before"))
    with restrict_to_data():
        assert pickle.load(file) == values
        assert pickle.load(file) == "behind"
