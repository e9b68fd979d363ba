import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.launch import starters


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu[001-003,10],login1", "gpu001"),
        ("login1,gpu[1-2]", "login1"),
        ("rack[0-1]node[10-12]", "rack0node10"),
        ("n[7]-ib.example.org", "n7-ib.example.org"),
        ("gpu[", None),
        ("gpu[]", None),
        ("gpu[a]", None),
        ("", None),
        ("$(reboot),b", None),
        ("[[1]]", None),
    ],
)
def test_the_first_host_of_a_node_list(nodelist, first):
    assert starters.parse_first_host(nodelist) == first


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1:29500", ("node1", 29500)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:29500", ("::1", 29500)),
        ("::1:29500", None),
        ("[node1]:29500", None),
        ("node1", None),
        (":29500", None),
        ("node1:0", None),
        ("node1:65536", None),
        ("node1: 80", None),
        ("-x:80", None),
        ("[fe80::1%eth0;reboot]:80", None),
        ("node1:80\n", None),
    ],
)
def test_endpoints(text, expected):
    assert starters.parse_host_and_port(text) == expected


@given(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.lists(st.integers(0, 999), min_size=1, max_size=5))
def test_a_list_that_we_write_starts_with_what_we_wrote(prefix, numbers):
    inside = ",".join(f"{n:03d}" for n in numbers)
    assert starters.parse_first_host(f"{prefix}[{inside}],other") == f"{prefix}{numbers[0]:03d}"
