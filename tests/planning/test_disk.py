"""Whether the checkpoints of a run fit on the disk where it lives."""

import shutil
from collections import namedtuple

from bundle.planning.size import disk, model_size
from bundle.recipe import load

Usage = namedtuple("Usage", "total used free")


def test_checkpoints_that_stay_and_one_more_must_fit_where_the_run_will_be(tmp_path, monkeypatch):
    recipe, asked = load("demo", ["checkpoint.keep=4"]), []
    one = model_size(recipe.architecture).checkpoint_bytes(recipe.model.dtype, recipe.optimizer)

    def usage(path):
        asked.append(path)
        return Usage(0, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    for free, fits in ((5 * one, True), (5 * one - 1, False)):
        found = disk(recipe, tmp_path / "not" / "yet" / "there")
        assert (found.checkpoint, found.checkpoints, found.free) == (one, 5 * one, free)
        assert found.suffices == fits
    assert asked == [tmp_path, tmp_path]
