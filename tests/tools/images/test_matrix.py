"""The jobs of the build workflow, from bake's plan."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import UsageError
from tools.images.plan import digests, read
from tools.images.plan import matrix as jobs_of

PLAN = {
    "target": {
        "cpu": {"tags": ["x/cpu:1"], "platforms": ["linux/amd64", "linux/arm64"]},
        "cuda-mcore0-16": {"tags": ["x/cuda:1"]},
        "wheels-cuda-mcore0-16": {"output": ["type=cacheonly"]},
    }
}


def matrix(plan, now, before):
    return jobs_of(read(plan), now, before)


NOW = {"cpu": "sha256:1", "cuda-mcore0-16": "sha256:2"}


def test_a_job_for_each_image_and_platform():
    assert matrix(json.dumps(PLAN), NOW, {}) == [
        {"target": "cpu", "platform": "linux/amd64", "runner": "ubuntu-24.04"},
        {"target": "cpu", "platform": "linux/arm64", "runner": "ubuntu-24.04-arm"},
        {"target": "cuda-mcore0-16", "platform": "linux/amd64", "runner": "ubuntu-24.04"},
    ]


def test_what_did_not_change_is_left_out():
    jobs = matrix(json.dumps(PLAN), NOW, {**NOW, "cpu": "sha256:0"})
    assert {job["target"] for job in jobs} == {"cpu"}
    assert matrix(json.dumps(PLAN), NOW, NOW) == []


def test_a_target_without_a_digest_is_built():
    assert len(matrix(json.dumps(PLAN), {}, {})) == 3


@pytest.mark.parametrize("name", ["cpu; rm -rf /", "${{ secrets.TOKEN }}", "CPU", "", "a\nb", "x" * 80])
def test_a_name_that_is_no_word_is_refused(name):
    plan = {"target": {name: {"tags": ["x"]}, "gpu": {"tags": "x"}}}
    with pytest.raises(UsageError) as error:
        matrix(json.dumps(plan), {}, {})
    assert len(error.value.violations) == 2


def test_a_platform_that_nobody_can_build_for_is_named():
    plan = {"target": {"gpu": {"tags": ["x"], "platforms": ["linux/s390x"]}}}
    with pytest.raises(UsageError, match="gpu: 'linux/s390x'"):
        matrix(json.dumps(plan), {}, {})


LEAF = st.none() | st.booleans() | st.integers() | st.text(max_size=6)
TREE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner)
)


@settings(max_examples=50)
@given(
    document=TREE | st.fixed_dictionaries({"target": st.dictionaries(st.text(max_size=4), TREE, max_size=3)})
)
def test_any_document_is_jobs_or_a_usage_error(document):
    try:
        for job in matrix(json.dumps(document), {}, {}):
            assert set(job) == {"target", "platform", "runner"}
    except UsageError:
        pass


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"cpu": 1}'])
def test_broken_digests_are_a_usage_error(text):
    with pytest.raises(UsageError):
        digests(text, "before.json")
