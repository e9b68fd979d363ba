"""The reward code, by real programs: shares of tests, no reward for claims, limits, nothing left behind."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bundle.recipe.rl import RLReward
from bundle.rewards import RewardPool
from bundle.rewards.code import find_last_block_or_answer
from bundle.rewards.pool import describe_missing_reference
from bundle.rewards.sandbox import PROCESSES
from tests.rewards.programs import CHEATS, HARMS

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux"),
]
ADD = "def add(a, b): return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
SECONDS = 3.0
# What a program may take beyond its time on a busy machine: two interpreters start, and all processes end.
SLACK = 15.0
DRIVER = Path(__file__).with_name("code_driver.py")


def reward(**keys) -> RLReward:
    return RLReward(kind="code", tests="tests", **{"timeout_seconds": SECONDS} | keys)


def list_programs(folder: Path) -> list[int]:
    """Return the processes that began as programs below a folder: their first HOME is there."""
    pids = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            variables = (place / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(variable.startswith(f"HOME={folder}/".encode()) for variable in variables):
            pids.append(int(place.name))
    return pids


def wait_for(condition, seconds=10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def pool(folder) -> Iterator[RewardPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("TRAINER_SECRET", "hidden")
        earlier = os.umask(0o027)  # that of ranks
        opened = RewardPool([reward()])
        os.umask(earlier)
    with opened:
        yield opened


@pytest.fixture
def judge(pool, folder):
    """Return the reward of one answer; no process of it is left afterwards, and nothing on the disk."""

    def judge_one(answer, tests):
        judgement = pool.judge_all([answer], [{"tests": tests}])
        assert list_programs(folder) == [] and list(folder.iterdir()) == []
        assert judgement.failures == {}
        return judgement.rewards[0]

    return judge_one


@pytest.fixture
def is_isolated(pool):
    return pool._worker_judges[0].processes[0].notice == ""


@pytest.mark.parametrize(
    ("tests", "share"),
    [
        (TESTS, 1),
        (["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.5),
        (["assert add(1) == 3", "assert add(1, 2) == 3", "this is no test", "pass"], 0.5),
        ("\n".join(TESTS), 1),
        ("assert add(1, 2) == 3\nassert add(1, 2) == 4", 0),
        (["import numpy\nassert numpy.add(1, 2) == add(1, 2)"], 1),
    ],
)
def test_a_reward_is_the_share_of_tests_that_pass(judge, tests, share):
    assert judge(ADD, tests) == share


def test_each_test_sees_the_program_as_it_was_loaded(judge):
    code = "seen = []\ndef note(x):\n  seen.append(x)\n  return len(seen)"
    tests = ["assert note(1) == 1"] * 3
    assert judge(code, tests) == 1


def test_a_test_that_hangs_leaves_no_time_to_those_behind_it(judge):
    tests = ["assert add(1, 1) == 2", "import time\ntime.sleep(60)", "pass"]
    assert judge(ADD, tests) == 1 / 3


def test_a_program_is_a_module_that_is_not_main(judge):
    code = "import dataclasses\n@dataclasses.dataclass\nclass P:\n  x: 'int'\n"
    code += "if __name__ == '__main__': raise SystemExit"
    tests = ["assert P(3).x == 3 and __name__ == 'answer'"]
    assert judge(code, tests) == 1


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\na\n```\nor\n```python\nb\nc\n```\nDone.", "b\nc\n"),
        ("```python\na\n```\n```\nb\n```\n```text\nc\n```", "a\n"),
        ("```python\na\n```\nand\n```python\nb", "a\n"),
        ("```python\r\na\r\n```\r\n", "a\r\n"),
        ("```python\na", "```python\na"),
        ("`python`\n```py\na\n```", "`python`\n```py\na\n```"),
        ("```python\nx = '```'\n  ```\ny\n``` \n", "x = '```'\n  ```\ny\n"),
        ("", ""),
    ],
)
def test_the_last_closed_block_is_the_program(answer, code):
    assert find_last_block_or_answer(answer) == code


def test_many_fences_are_read_in_one_pass():
    begin = time.monotonic()
    assert find_last_block_or_answer("```python\n" * 200_000) == "```python\n" * 200_000
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("name", CHEATS)
def test_a_claim_is_no_reward(judge, name):
    assert judge(CHEATS[name], TESTS) == 0


@pytest.mark.parametrize("name", HARMS)
def test_harm_ends_at_its_limit_and_leaves_no_process(judge, name):
    begin = time.monotonic()
    assert judge(HARMS[name], TESTS) == 0
    assert time.monotonic() - begin < SECONDS + SLACK
    assert judge(ADD, TESTS) == 1  # the next program has all that it needs


def test_processes_of_a_program_are_counted(judge, is_isolated):
    code = "import os, time\npids = []\ntry:\n  for _ in range(150):\n    pid = os.fork()\n"
    code += "    if not pid: time.sleep(600)\n    pids.append(pid)\nexcept BlockingIOError: pass\n"
    code += "for pid in pids: os.kill(pid, 9); os.waitpid(pid, 0)"
    most = PROCESSES if is_isolated and os.geteuid() == 0 else 149
    tests = [f"assert 8 <= len(pids) <= {most}"]
    assert judge(code, tests) == 1


@pytest.mark.parametrize(("gib", "can_have"), [(10, False), (2, False), (0.1, True)])
def test_memory_of_a_program_is_bounded(judge, gib, can_have):
    code = f"try:\n  pages = bytearray({int(gib * 2**30)})\nexcept MemoryError: pages = b''"
    tests = [f"assert bool(pages) is {can_have}"]
    assert judge(code, tests) == 1


def test_files_of_a_program_are_bounded(judge, is_isolated):
    code = "import errno\nnumbers = []\nfor n in range(9):\n  try:\n    with open(f'{n}', 'wb') as file:\n"
    code += "      for _ in range(15): file.write(bytes(2**20))\n"
    code += "  except OSError as error: numbers.append(error.errno)"
    tests = ["assert not numbers"]
    assert judge(code, tests) == 0 or not is_isolated
    code = "import os\ntry:\n  with open('x', 'wb') as file: file.truncate(2**25)\n"
    code += "except OSError as error: number = error.errno"
    tests = ["import errno\nassert number == errno.EFBIG"]
    assert judge(code, tests) == 1


def test_a_program_has_no_variable_of_the_trainer(judge):
    tests = ["import os\nassert set(os.environ) == {'PATH', 'HOME', 'LANG', 'OMP_NUM_THREADS'}"]
    tests += ["assert os.getcwd() == os.environ['HOME']"]
    assert judge("import os", tests) == 1


def test_nothing_of_the_trainer_can_be_read(judge, tmp_path, is_isolated):
    if not is_isolated:
        pytest.skip("the kernel allows no namespaces")
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    code = "from pathlib import Path\ndef read(path):\n  try: return Path(path).read_bytes()\n"
    code += "  except OSError: return b''\n"
    code += "environments = b''.join(read(path / 'environ') for path in Path('/proc').glob('[0-9]*'))"
    paths = [secret, Path(__file__), Path.home() / ".netrc", Path("/etc/passwd")]
    tests = [f"assert read({str(path)!r}) == b''" for path in paths]
    tests += [
        "assert b'TRAINER_SECRET' not in environments",
        f"assert not Path({str(Path.cwd())!r}).is_file()",
    ]
    tests += [f"assert not Path('/proc/{os.getpid()}').exists()"]
    assert judge(code, tests) == 1


def test_nothing_outside_can_be_written(judge, is_isolated):
    if not is_isolated:
        pytest.skip("the kernel allows no namespaces")
    code = "from pathlib import Path\ndef write(path):\n  try: (Path(path) / 'x').write_text('x')\n"
    code += "  except OSError: return False\n  return True"
    tests = ["assert write('.') and write('/tmp') and write('/dev/shm')"]
    tests += [f"assert not write({path!r})" for path in ("/usr", "/usr/lib", sys.prefix, sys.base_prefix)]
    tests += [
        f"import os\nassert os.statvfs({path!r}).f_flag & os.ST_RDONLY" for path in ("/usr", sys.base_prefix)
    ]
    assert judge(code, tests) == 1


def test_the_network_is_out_of_reach(judge, is_isolated):
    if not is_isolated:
        pytest.skip("the kernel allows no namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        code = "import socket\ndef reach(place):\n  socket.create_connection(place, 1).close()"
        assert judge(code, [f"reach(('127.0.0.1', {port}))"]) == 0
        with pytest.raises(TimeoutError):
            server.accept()
        socket.create_connection(("127.0.0.1", port), 1).close()  # from here it is in reach
        server.accept()[0].close()


def test_a_row_without_tests_is_a_failure_and_never_0(pool, messages):
    values: list[Any] = [None, "", " ", [], ["pass", ""], ["pass", 3], 7, {"a": "pass"}]
    rows: list[dict[str, Any]] = [{"more": 1}, *({"tests": value} for value in values), {"tests": TESTS}]
    judgement = pool.judge_all([ADD] * len(rows), rows)
    assert judgement.failures == {("code", "raised"): len(rows) - 1} and judgement.rewards[-1] == 1
    for row in rows[:-1]:
        reason = describe_missing_reference([reward()], row, "response")
        assert reason is not None and reason.startswith("rl.rewards.0.tests: ")
        messages(reason)
    assert describe_missing_reference([reward()], rows[-1], "response") is None
    assert describe_missing_reference([RLReward(kind="http", url="http://x")], {}, "response") is None


def test_a_sandbox_that_cannot_start_is_a_failure(tmp_path, monkeypatch, messages):
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    with RewardPool([reward()]) as opened:
        shutil.rmtree(place)
        judgement = opened.judge_all([ADD], [{"tests": TESTS}])
        assert judgement.failures == {("code", "raised"): 1}
        assert "FileNotFoundError" in str(judgement.first_reason)
        place.mkdir()
        assert opened.judge_all([ADD], [{"tests": TESTS}]).rewards == [1]


def test_a_program_ends_with_the_rank_that_asked(tmp_path):
    answer = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(600)"
    script = (
        "from bundle.rewards import RewardPool\nfrom bundle.recipe.rl import RLReward\n"
        "pool = RewardPool([RLReward(kind='code', tests='tests', timeout_seconds=60)])\n"
        f"pool.judge_all([{answer!r}], [{{'tests': ['pass']}}])"
    )
    rank = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        assert wait_for(lambda: len(list_programs(tmp_path)) >= 2, 60)
    finally:
        rank.kill()
        rank.wait()
    assert wait_for(lambda: not list_programs(tmp_path))


# The kernel refuses namespaces to what a shell starts behind this; it needs a namespace of users itself.
REFUSE = [
    "unshare",
    "--map-root-user",
    "sh",
    "-c",
    'echo 0 > /proc/sys/user/max_mnt_namespaces && exec "$@"',
    "sh",
]
USER = 54321


@pytest.fixture
def run(request) -> Iterator:
    """Return a function that runs the driver behind other words, by an interpreter that all may read."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if os.geteuid() != 0 or python is None or shutil.which("setpriv") is None:
        pytest.skip("needs root, setpriv, and a python3 of the system")
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    os.chown(place, USER, USER)

    def run_driver(words, answers):
        command = [*words, python, str(DRIVER), str(SECONDS), json.dumps(answers)]
        done = subprocess.run(
            command, env={"TMPDIR": str(place), "PATH": os.environ["PATH"]}, capture_output=True
        )
        if b"Operation not permitted" in done.stderr and b"unshare" in done.stderr:
            pytest.skip("the kernel allows no namespace of users")
        assert list_programs(place) == [] and list(place.iterdir()) == []
        return json.loads(done.stdout)

    yield run_driver
    shutil.rmtree(place)


AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
WITHOUT_MOUNTS = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]


@pytest.mark.parametrize(
    ("words", "has_namespaces"),
    [(AS_USER, True), (WITHOUT_MOUNTS, True), (AS_USER + REFUSE, False)],
    ids=["user", "root_without_mounts", "no_namespaces"],
)
def test_whoever_trains_has_the_same_limits(run, words, has_namespaces):
    names = ["daemon", "much_memory", "fork_bomb", "endless_sleep"]
    answers = [[HARMS[name], TESTS] for name in names]
    answers += [[CHEATS[name], TESTS] for name in ("leaves", "kills_its_parent", "writes_everywhere")]
    answers += [[f"import os\n{ADD}", [*TESTS, "assert not os.path.exists('/work')"]]]
    reply = run(words, answers)
    assert bool(reply["notice"]) is not has_namespaces
    assert reply["rewards"] == [0] * 7 + [1 if has_namespaces else 2 / 3]


def test_root_without_another_user_is_refused_where_nothing_bounds_its_processes(run, messages):
    messages(run(REFUSE, [])["error"])
