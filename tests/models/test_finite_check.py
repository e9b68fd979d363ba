"""Weights that are NaN or infinite are named before a model is trained on, imported or checked with them."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from bundle import pretrained
from bundle.architectures import from_config
from bundle.architectures.tensors import Tensors
from bundle.errors import ExitCode, JobFailed, UsageError
from bundle.models import conversion, finite_check
from bundle.models.conversion import HuggingFaceDirectoryTensors, find_differences
from bundle.models.finite_check import is_finite, refuse_nonfinite_weights
from tests.command import ROOT, call_bundle, run_bundle
from tests.models import test_loading, test_mxfp4
from tests.models.test_loading import alone as alone
from tests.models.test_loading import found_in, model, weights

NOT_FINITE = (math.nan, math.inf, -math.inf)
KINDS = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
LAYER = "model.layers.0."


@pytest.mark.parametrize("kind", KINDS)
def test_every_pattern_of_bits_is_told_as_torch_tells_it(kind):
    size = torch.empty(0, dtype=kind).element_size()
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    if size == 4:  # all exponents with the least, a middle and the largest mantissa
        exponents = torch.arange(2**9, dtype=torch.int64).repeat_interleave(3) << 23
        patterns = exponents + torch.tensor([0, 1 << 22, (1 << 23) - 1]).repeat(2**9)
    else:
        patterns = torch.arange(2 ** (8 * size))
    values = patterns.to(signed).view(kind)
    wanted = values.float().isfinite()
    assert wanted.any() and not wanted.all()
    assert is_finite(values[wanted])
    assert not any(is_finite(value[None]) for value in values[~wanted])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_once", [1, 7, 2**20])
def test_one_among_many_is_found_wherever_it_stands(kind, at_once, monkeypatch):
    monkeypatch.setattr(finite_check, "_CHUNK_VALUES", at_once)
    values = torch.randn(6, 5).to(kind)
    for view in (values, values.T, values[1:, 1:4], values[2], values[:, 2:3], values[0, 0]):
        assert is_finite(view)
        for place in range(view.numel()):
            row = torch.atleast_1d(view)
            index = torch.unravel_index(torch.tensor(place), row.shape)
            before = row[index].clone()
            row[index] = math.nan
            assert not is_finite(view)
            row[index] = before
    assert is_finite(values[:0])


def damaged(changes):
    """The weights of a tiny model, with some values that are none."""
    theirs = weights()
    for name, (place, value) in changes.items():
        theirs[name].view(-1)[place] = value
    return theirs


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_loading_names_every_tensor_with_its_first_value(tmp_path, alone, value, kind):
    """Of gate and up as of a bias and a norm, which are put together in different ways."""
    names = ("mlp.up_proj.weight", "self_attn.k_proj.bias", "input_layernorm.weight")
    theirs = damaged({f"{LAYER}{name}": (3, value) for name in names})
    theirs[f"{LAYER}mlp.up_proj.weight"][2, 1] = value
    test_loading.write(tmp_path / "model", {name: of.to(kind) for name, of in theirs.items()})
    with pytest.raises(JobFailed) as failed:
        test_loading.loaded(model(), found_in(tmp_path / "model"))
    assert failed.value.code is ExitCode.USAGE
    lines = {line.split()[1]: line for line in str(failed.value).splitlines() if " in model-" in line}
    assert lines.keys() == {f"{LAYER}{name}" for name in names}
    of_two = lines[f"{LAYER}{names[0]}"]
    columns = theirs[f"{LAYER}{names[0]}"].shape[1]
    assert "2 of" in of_two and f"[{3 // columns}, {3 % columns}]" in of_two and f" {value:g}" in of_two


def test_a_scale_of_fp8_blocks_is_named(tmp_path, alone, messages):
    name = f"{LAYER}mlp.down_proj.weight"
    theirs = weights()
    rows, columns = theirs[name].shape
    theirs[name] = theirs[name].to(torch.float8_e4m3fn)
    theirs[f"{name}_scale_inv"] = torch.ones(math.ceil(rows / 16), math.ceil(columns / 16))
    theirs[f"{name}_scale_inv"][1, 2] = math.nan
    test_loading.write(tmp_path / "scale", theirs)
    found = found_in(tmp_path / "scale")._replace(scale_block=(16, 16))
    with pytest.raises(JobFailed, match=r"scale_inv .*\[1, 2\]") as error:
        test_loading.loaded(model(), found)
    messages(error.value)
    with pytest.raises(UsageError, match=r"scale_inv .*\[1, 2\]") as refused:
        refuse_nonfinite_weights(found)
    messages(refused.value)
    theirs[f"{name}_scale_inv"][1, 2] = 1
    theirs[name].view(torch.int8)[4, 5] = 0x7F
    test_loading.write(tmp_path / "value", theirs)
    with pytest.raises(JobFailed, match=r"down_proj.*\[4, 5\]") as error:
        test_loading.loaded(model(), found_in(tmp_path / "value")._replace(scale_block=(16, 16)))
    messages(error.value)


written = test_mxfp4.directory


@pytest.mark.parametrize("scale", [253, 255])
def test_a_scale_of_mxfp4_is_named(written, tmp_path, scale, messages):
    from safetensors.torch import load_file

    file = written / "model.safetensors"
    theirs = load_file(file)
    name = next(name for name in theirs if name.endswith("gate_up_proj_scales"))
    refuse_nonfinite_weights(test_mxfp4.found_in(written))
    theirs[name][1, 2, 0] = scale
    save_file(theirs, file)
    found = test_mxfp4.found_in(written)
    table = Tensors(from_config(test_mxfp4.CONFIG))
    for read in (
        lambda: refuse_nonfinite_weights(found),
        lambda: conversion.to_torch_dist(found, table, tmp_path / "out"),
    ):
        with pytest.raises(UsageError, match=rf"proj_scales .*\[1, 2, 0\].* {scale}\b") as error:
            read()
        messages(error.value)


def test_an_import_names_all_and_leaves_what_was_there(tmp_path, messages):
    names = (f"{LAYER}self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight")
    model, out = tmp_path / "model", tmp_path / "out"
    table = Tensors(from_config(test_loading.TINY))
    for theirs in (weights(), damaged(dict.fromkeys(names, (-1, math.nan)))):
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(test_loading.TINY))
        save_file(theirs, model / "model.safetensors")
        found = pretrained.find_model_weights(model, test_loading.TINY, table.architecture)
        if theirs["model.norm.weight"].isfinite().all():
            conversion.to_torch_dist(found, table, out)
            before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
            continue
        with pytest.raises(UsageError) as refused:
            conversion.to_torch_dist(found, table, out)
    assert sorted(line.split(" in ")[0] for line in refused.value.violations) == sorted(names)
    messages(refused.value)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert not list(
        find_differences(HuggingFaceDirectoryTensors(found), HuggingFaceDirectoryTensors(found))
    ), "diff still reads it"


def test_an_import_of_weights_that_are_nan_ends(tmp_path):
    """As a process, whose threads might keep it."""
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(test_loading.TINY))
    save_file({name: of * math.nan for name, of in weights().items()}, model / "model.safetensors")
    done = run_bundle("weights", "import", model, out)
    assert done.returncode == 2 and not done.stdout and not out.exists()
    assert "lm_head.weight" in done.stderr


LEFT = """
import sys, threading
from pathlib import Path
from bundle.cli import main
try:
    main()
finally:
    threads = [thread.name for thread in threading.enumerate() if not thread.daemon]
    children = [each.read_text() for each in Path("/proc/self/task").glob("*/children")]
    print(*threads, *children, file=sys.stderr)
"""


@pytest.mark.slow
def test_nothing_keeps_an_import_that_has_printed_its_result(tmp_path):
    """Python waits for its threads and pools when it ends: there are none."""
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(test_loading.TINY))
    save_file(weights(), model / "model.safetensors")
    done = run_bundle("weights", "import", model, out, program=("-c", LEFT), cwd=ROOT)
    assert (done.returncode, done.stdout.split()) == (0, [str(out)]), done.stderr
    assert done.stderr.splitlines()[-1].split() == ["MainThread"]


def test_check_ends_with_2_and_names_what_is_wrong(tmp_path, capfd, monkeypatch, messages):
    def ends(*words):
        return call_bundle("weights", "check", *words), capfd.readouterr()

    monkeypatch.setattr(finite_check, "_CHUNK_VALUES", 5)
    (tmp_path / "config.json").write_text(json.dumps(test_loading.TINY))
    save_file(damaged({"model.norm.weight": (7, -math.inf)}), tmp_path / "model.safetensors")
    code, said = ends(tmp_path)
    assert code == 2 and not said.out
    assert "model.norm.weight" in said.err and "[7]" in said.err and "-inf" in said.err
    messages(said.err)
    code, said = ends(tmp_path, "--headers")
    assert code == 0
    messages(said.out)
    save_file(weights(), tmp_path / "model.safetensors")
    code, said = ends(tmp_path)
    assert code == 0
    messages(said.out)
    tied = test_loading.TINY | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(tied))
    code, said = ends(tmp_path)
    assert code == 2 and "lm_head.weight" in said.err
