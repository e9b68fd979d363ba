"""In what nodes differ, by what their doctors said."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.environment import nodes
from tests.command import run_bundle

DEVICE = {
    "index": 0,
    "number": 0,
    "name": "NVIDIA H200",
    "identity": "GPU-0",
    "memory": {"value": 150754820096, "reason": "nvidia-smi memory.total"},
    "generation": {"value": "9.0", "reason": "nvidia-smi compute_cap"},
}
PORTS = ["mlx5_0/1: InfiniBand 400 Gb/sec (4X NDR)", "mlx5_1/1: InfiniBand 400 Gb/sec (4X NDR)"]


def as_json(value):
    return json.loads(json.dumps(value))


def node(name):
    devices = [DEVICE | {"index": i, "number": i, "identity": f"GPU-{name}-{i}"} for i in range(4)]
    return as_json(
        {
            "schema": 1,
            "node": name,
            "kernel": "6.1.0",
            "python": "3.11.2",
            "packages": {"torch": "2.11.0"},
            "findings": [{"subject": "python", "level": "ok", "cause": f"Python of {name}", "fix": ""}],
            "hardware": {
                "backend": "cuda",
                "reason": f"4 of 4 GPUs of {name}",
                "devices": devices,
                "driver": {"value": "580.1", "reason": f"read on {name}"},
                "rdma": {"value": PORTS, "reason": "/sys/class/infiniband"},
                "host": {"memory": {"value": 2.0e12, "reason": f"/cgroup/{name}/memory.max"}},
            },
            "image": None,
        }
    )


def compare(tmp_path, *reports, args=(), code):
    names = []
    for at, report in enumerate(reports):
        names.append(f"{at}.json")
        text = report if isinstance(report, str) else json.dumps(report)
        (tmp_path / names[-1]).write_text(text)
    done = run_bundle("doctor", "--compare", *names, *args, cwd=tmp_path, code=code, timeout=60)
    return done.stdout if code in (0, 3) else done.stderr


def differing(tmp_path, *reports):
    return compare(tmp_path, *reports, code=3).splitlines()


def test_what_every_node_has_of_its_own_is_no_difference(tmp_path, messages):
    reports = [node(f"gpu{n}") for n in range(3)]
    reports[1]["hardware"]["host"]["memory"]["value"] *= 0.995
    messages(compare(tmp_path, *reports, code=0))


def test_the_odd_one_out_is_named_where_most_agree(tmp_path, messages):
    reports = [node(f"gpu{n}") for n in range(12)]
    reports[7]["hardware"]["driver"]["value"] = "570.2"
    reports[7]["hardware"]["host"]["memory"]["value"] = 1.9e12
    for line, key in zip(differing(tmp_path, *reports), ("driver", "host.memory"), strict=True):
        assert line.startswith(f"hardware.{key}: gpu7 ")
        messages(line)
    printed = json.loads(compare(tmp_path, *reports, args=["--json"], code=3))
    assert printed["nodes"] == [f"gpu{n}" for n in range(12)]
    first = printed["differences"][0]
    assert (first["key"], first["odd"]) == ("hardware.driver", ["gpu7"])
    assert [one["value"] for one in first["values"]] == ["580.1", "570.2"]


def test_nobody_is_odd_where_as_many_have_the_one_as_the_other(tmp_path, messages):
    one, two = node("a"), node("b")
    two["packages"]["torch"] = "2.12.0"
    (line,) = differing(tmp_path, one, two)
    assert line.startswith("packages.torch: ") and "2.12.0" in line and "2.11.0" in line
    messages(line)
    (found,) = json.loads(compare(tmp_path, one, two, args=["--json"], code=3))["differences"]
    assert found["odd"] == ["a", "b"]


def test_what_is_there_on_some_alone(tmp_path, messages):
    reports = [node(name) for name in "abc"]
    reports[2]["packages"]["numpy"] = "2.0"
    reports[2]["hardware"]["rdma"]["value"] = PORTS[1:]
    reports[2]["hardware"]["driver"]["value"] = None
    reports[2]["findings"].append({"subject": "rdma", "level": "warn", "cause": "it is slow", "fix": "x"})
    lines = differing(tmp_path, *reports)
    keys = ["finding rdma", "hardware.driver", f"hardware.rdma, {PORTS[0]}", "packages.numpy"]
    assert all(line.startswith(f"{key}: c ") for line, key in zip(lines, keys, strict=True))
    messages("\n".join(lines))


def test_devices_that_differ_alike_are_one_difference(tmp_path, messages):
    reports = [node(name) for name in "abc"]
    for device in reports[0]["hardware"]["devices"][1:3]:
        device["memory"]["value"] //= 2
    (line,) = differing(tmp_path, *reports)
    assert line.startswith("hardware.devices.1,2.memory: a ") and "75377410048" in line
    messages(line)


def test_two_nodes_of_one_name_are_told_apart_by_their_files(tmp_path, messages):
    one, two = node("gpu"), node("gpu")
    two["kernel"] = "6.2.0"
    (line,) = differing(tmp_path, one, two)
    assert line.startswith("kernel: 1.json ") and "6.2.0; 0.json" in line
    messages(line)


def test_what_doctor_prints_here_compares(tmp_path):
    done = run_bundle("doctor", "--json", "--backend", "cpu", cwd=tmp_path, timeout=60)
    printed = json.loads(done.stdout)
    other = printed | {"node": "there", "packages": printed["packages"] | {"pydantic": "0.1"}}
    (line,) = differing(tmp_path, done.stdout, other)
    assert line.startswith("packages.pydantic: ") and "0.1" in line and printed["node"] in line


def test_every_broken_file_is_named(tmp_path, messages):
    deep = '{"schema": 1, "findings": [], "a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    bad = node("x") | {"findings": [{"subject": 3}]}
    said = compare(tmp_path, node("a"), "{", "[]", deep, {"schema": 2, "findings": []}, bad, code=2)
    for at in range(1, 6):
        assert f"  - {at}.json: " in said
    assert "0.json" not in said
    absent = compare(tmp_path, node("a"), args=["nowhere"], code=2)
    assert "  - nowhere: " in absent
    messages(absent)


@pytest.mark.parametrize(
    "args", [["--backend", "cpu"], [], ["0.json"]], ids=["backend", "one report", "the same report"]
)
def test_what_compare_cannot_do(tmp_path, args, messages):
    messages(compare(tmp_path, node("a"), args=args, code=2))


def test_what_a_file_says_reaches_no_terminal_raw(tmp_path):
    nasty = node("\x1b[2J") | {"\x1b]0;title\x07": "\x1b[31m" + "x" * 10_000, "deep": None}
    inner = nasty
    for _ in range(500):
        inner["deep"] = {"deep": None}
        inner = inner["deep"]
    said = compare(tmp_path, node("a"), nasty, code=3)
    assert "\x1b" not in said and "\x07" not in said
    assert max(map(len, said.splitlines())) < 2000


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.fixed_dictionaries({"hardware": JSON, "packages": JSON}), max_size=3))
def test_no_report_breaks_it_and_a_report_is_like_itself(found):
    every = {str(n): {"findings": [], **report} for n, report in enumerate(found)}
    assert all(one.to_text().isprintable() for one in nodes.compare_reports(every))
    assert all(nodes.compare_reports({"a": report, "b": report}) == [] for report in every.values())


@pytest.mark.parametrize("words", [["--compare"], ["a.json", "b.json"]])
def test_reports_and_the_flag_go_together(words):
    run_bundle("doctor", *words, code=2)
