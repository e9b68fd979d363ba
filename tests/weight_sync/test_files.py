"""Versions in files: read by safetensors itself, refused where a tensor is lost, repeated or changed."""

import json
import resource
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from bundle.architectures import from_config
from bundle.errors import JobFailed, UsageError
from bundle.pretrained.writing import OutputTensorHeader
from bundle.weight_sync.manifest import ExpectedTensors, build_expected_tensors, read_header_tensors
from bundle.weight_sync.transports.files import FilesTransport
from tests.rollouts.families import CONFIGS
from tests.rollouts.sglang.contract_server import wait_until

TABLE = ExpectedTensors.from_architecture(from_config(CONFIGS["latent"]))
EMPTY = ExpectedTensors({}, frozenset(), {})


def draw_tensors():
    generator = torch.Generator().manual_seed(1)
    kinds = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float16]
    shapes = [(3, 5), (7,), (16, 16), (), (2, 3, 4)]
    return {
        f"model.{number}": torch.randn(shape, generator=generator).to(kinds[number % 4])
        for number, shape in enumerate(shapes * 3)
    }


def read_directory(directory: Path):
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert index[name] == path.name
                tensors[name] = file.get_tensor(name)
    assert index.keys() == tensors.keys()
    return tensors


@pytest.mark.parametrize("file_bytes", [1, 100, 2**30])
def test_safetensors_reads_what_was_written_and_digests_are_those_of_xxhash(tmp_path, file_bytes):
    transport = FilesTransport(tmp_path / "new", EMPTY, has_draft=False, file_bytes=file_bytes)
    sent = draw_tensors()
    written = transport.write(4, sent.items())
    received = read_directory(written.directory)
    assert received.keys() == sent.keys() == written.manifest.tensors.keys()
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
        values = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert received[name].reshape(-1).view(torch.uint8).numpy().tobytes() == values
        assert written.manifest.tensors[name].digest == xxhash.xxh3_128(values).hexdigest()
    assert written.manifest.version == 4
    assert written.manifest.bytes == sum(tensor.nbytes for tensor in sent.values())
    declared = read_header_tensors(written.directory)
    assert {name: (entry.dtype, entry.shape) for name, entry in declared.items()} == {
        name: (tensor.stored.dtype, tensor.stored.shape) for name, tensor in written.manifest.tensors.items()
    }


def test_each_version_has_a_directory_and_old_ones_go_when_told_to(tmp_path):
    transport = FilesTransport(tmp_path, EMPTY, has_draft=False)
    first, second, again = (transport.write(number, draw_tensors().items()).directory for number in (1, 2, 2))
    assert len({first, second, again}) == 3 and first.is_dir()
    transport.remove_others(again)
    assert not first.exists() and not second.exists() and again.is_dir()
    transport.close()
    assert list(tmp_path.iterdir()) == []


def test_a_repeated_tensor_is_refused_when_all_have_been_taken(tmp_path, messages):
    transport = FilesTransport(tmp_path, EMPTY, has_draft=False)
    taken = []

    def stream():
        for name, tensor in [*draw_tensors().items(), ("model.1", torch.ones(1)), ("last", torch.ones(1))]:
            taken.append(name)
            yield name, tensor

    with pytest.raises(JobFailed) as error:
        transport.write(1, stream())
    assert taken[-1] == "last" and error.value.violations == ("repeated: model.1",)
    messages(error.value)
    assert not [*next(tmp_path.iterdir()).iterdir()]


def test_a_full_disk_names_the_key_takes_all_tensors_and_leaves_nothing(tmp_path):
    transport = FilesTransport(tmp_path, EMPTY, has_draft=False, file_bytes=1)
    old = transport.write(1, draw_tensors().items()).directory
    taken = []

    def stream():
        for name, tensor in draw_tensors().items():
            taken.append(name)
            yield name, tensor

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
    try:
        with pytest.raises(JobFailed) as error:
            transport.write(2, stream())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(error.value).partition(":")[0].endswith(".weights_folder")
    assert len(taken) == len(draw_tensors())
    assert [*old.parent.iterdir()] == [old]


def find_written(folder: Path) -> Path:
    """The first file of a version, when it is whole."""
    files = "*/*/model-00001.safetensors"
    wait_until(lambda: any(path.stat().st_size > 16 for path in folder.glob(files)))
    return next(folder.glob(files))


def test_files_that_change_before_they_are_read_again_are_refused(tmp_path):
    transport = FilesTransport(tmp_path, EMPTY, has_draft=False, file_bytes=1)

    def stream():
        yield "a", torch.ones(4)
        yield "b", torch.zeros(4)
        first = find_written(tmp_path)
        first.write_bytes(first.read_bytes()[:-1] + b"\1")

    with pytest.raises(JobFailed) as error:
        transport.write(1, stream())
    assert error.value.violations == ("digest: a",)

    def truncate():
        yield "a", torch.ones(4)
        yield "b", torch.zeros(4)
        first = find_written(tmp_path)
        first.write_bytes(first.read_bytes()[:-1])

    with pytest.raises(UsageError):
        transport.write(1, truncate())


def test_names_of_a_draft_are_left_out_or_sent_by_what_the_server_has(tmp_path):
    tensors = {name: torch.zeros(shape) for name, shape in TABLE.expected.items()}
    assert TABLE.draft & tensors.keys() and TABLE.copies
    alone = FilesTransport(tmp_path, TABLE, has_draft=False).write(1, tensors.items()).manifest
    both = FilesTransport(tmp_path, TABLE, has_draft=True).write(1, tensors.items()).manifest
    assert set(alone.left_out) == TABLE.draft & tensors.keys() and both.left_out == ()
    assert {name for name, tensor in both.tensors.items() if tensor.role == "draft"} == set(alone.left_out)
    assert {tensor.role for tensor in alone.tensors.values()} == {"target"}
    declared = build_expected_tensors(TABLE, "BF16")
    for manifest in (alone, both):
        manifest.check_server_tensors(declared)
        # Copies may be among the files of a checkpoint, or not.
        manifest.check_server_tensors(
            declared | {name: OutputTensorHeader(name, "BF16", (1,)) for name in TABLE.copies}
        )


def test_other_names_shapes_and_kinds_of_numbers_are_refused_in_both_directions(tmp_path, messages):
    transport = FilesTransport(tmp_path, EMPTY, has_draft=False)
    manifest = transport.write(1, [("a", torch.ones(2)), ("b", torch.ones(3)), ("c", torch.ones(4))]).manifest
    declared = {
        "b": OutputTensorHeader("b", "F32", (3, 1)),
        "c": OutputTensorHeader("c", "F8_E4M3", (4,)),
        "d": OutputTensorHeader("d", "F32", (1,)),
    }
    with pytest.raises(JobFailed) as error:
        manifest.check_server_tensors(declared)
    kinds = {tuple(line.split()[:2]) for line in error.value.violations}
    assert kinds == {("missing:", "d"), ("unknown:", "a"), ("shape:", "b"), ("dtype:", "c")}
    messages(error.value)
