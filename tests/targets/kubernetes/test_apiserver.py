"""The custom resources of a job, tried by a real API server: fields, types, values and rules (CEL) of theirs.

Nothing is admitted by a webhook or an operator here, and nothing runs.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from bundle.targets import kubernetes
from tests.targets.kubernetes import apiserver
from tests.targets.kubernetes.apiserver import Server
from tests.targets.kubernetes.jobs import everything, options_of, plain
from tests.targets.kubernetes.test_schemas import DEFINITIONS, MISTAKES, SCHEMAS

pytestmark = pytest.mark.clusters
FORMS = {"jobset": {"JobSet"}, "volcano": {"Job"}, "rayjob": {"RayJob"}} | {
    "trainjob": {"TrainingRuntime", "TrainJob"}
}
# What schemas of JSON do not see: rules over several fields.
RULES: list[tuple[str, int, tuple[str, ...], object, str]] = [
    ("trainjob", -1, ("spec", "managedBy"), "us", "spec.managedBy"),
    ("trainjob", -2, ("spec", "mlPolicy"), {"torch": {}, "mpi": {}}, "spec.mlPolicy"),
    ("rayjob", -1, ("spec", "managedBy"), "us", "spec.managedBy"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if why := apiserver.missing():
        pytest.skip(why)
    files = [SCHEMAS / name for name in DEFINITIONS.values()]
    if absent := [file.name for file in files if not file.exists()]:
        pytest.skip(f"{', '.join(absent)} not in ../shared/crds")
    with apiserver.server(tmp_path_factory.mktemp("server")) as made:
        for file in files:
            made.define(file)
        yield made


@pytest.mark.parametrize("form", FORMS)
def test_a_real_server_takes_the_custom_resources_of_every_job(server, jobs, form):
    for job in jobs:
        for options in (each for each in options_of(job) if each.form == form):
            ours = [plain(each) for each in kubernetes.build_objects(job, options) if server.knows(each)]
            assert {each["kind"] for each in ours} == FORMS[form]
            for each in ours:
                assert server.tries(each) == (201, "")


@pytest.mark.parametrize(
    ("form", "which", "path", "value", "named"),
    [*((form, -1, path, value, path[-1]) for form, path, value in MISTAKES), *RULES],
)
def test_a_mistake_is_refused_by_name(server, wide, form, which, path, value, named):
    objects: list[dict[str, Any]] = [plain(each) for each in kubernetes.build_objects(wide, everything(form))]
    inside = objects[which]
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    status, said = server.tries(objects[which])
    assert status in (400, 422) and named in said, said
